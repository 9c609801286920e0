"""Seven ablations as users make them: each in one place, right at the first attempt, in both stages
and in joint training. The objectives and the model here are examples to copy."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    assert_same_run,
    calls,
    flags,
    laws,
    load,
    opened,
    result_of,
    scripts,
    stop_in,
)

import data
import finetune
import predict
import pretrain
import recipes
from compare.curves import curves_of
from engine.feed import drawing
from kernels import inside, true_lengths
from models import at
from pretrain import Objective, corrupt, hide, shift
from tasks import TASKS

pytestmark = pytest.mark.usefixtures("elsewhere")

# ---- InfoNCE: two corrupted views of each sequence find each other -------------------------------


def two_views(args, batch, draw):
    """A batch twice, with other positions hidden -> inputs (2 b, l), a vector for every
    position."""
    views = [corrupt(batch, draw(hide, args.mask, i), args.loss)[0] for i in (0, 1)]
    inputs, lengths = torch.cat(views), None if batch.lengths is None else batch.lengths.repeat(2)
    there = inside(true_lengths(lengths, *inputs.shape[:2], inputs.device), inputs.shape[1])
    return inputs, there, there, lengths


def info_nce(args, prediction, targets, hidden):
    """Cross-entropy of which of the other views is of the same sequence, by the mean vectors. Times
    positions."""
    n, m = len(targets), len(prediction)
    pooled = prediction.new_zeros(n, prediction.shape[1]).index_add(
        0, hidden // targets.shape[1], prediction
    )
    z = F.normalize(pooled, dim=1)
    # (2 b, 2 b)
    similar = (z @ z.T / 0.1).masked_fill(
        torch.eye(n, dtype=torch.bool, device=z.device), -torch.inf
    )
    partner = torch.arange(n, device=z.device).roll(n // 2)
    return m * F.cross_entropy(similar, partner), m * (similar.argmax(1) == partner).float().mean()


INFO_NCE = Objective(
    two_views,
    causal=False,
    hides=True,
    outputs=lambda args, task: 8,
    loss=info_nce,
    whole=True,
    score="accuracy of finding the other view",
)


# ---- The next three positions at once ------------------------------------------------------------


def three_ahead(args, batch, draw):
    x, _, _ = shift(batch, "ce")
    there = inside(true_lengths(batch.lengths, *x.shape[:2], x.device) - 3, x.shape[1])
    # targets (b, l, 3)
    return x, torch.stack([batch.symbols.roll(-i, 1) for i in (1, 2, 3)], -1), there


def three_losses(args, prediction, targets, hidden):
    # (m, 3, vocab), (m, 3)
    prediction, targets = prediction.unflatten(-1, (3, -1)), at(targets, hidden)
    loss = F.cross_entropy(prediction.mT, targets, reduction="sum") / 3
    return loss, (prediction.argmax(-1) == targets).float().mean(-1).sum()


THREE = Objective(
    three_ahead,
    causal=True,
    hides=False,
    outputs=lambda args, task: 3 * task.vocab,
    loss=three_losses,
    score="accuracy on the next three positions",
)


# ---- Span corruption (T5): sentinels stand for spans, which follow after the sequence ------------

SENTINELS = 20


def span_corruption(args, batch, draw):
    vocab = TASKS["listops"].vocab
    hidden = draw(lambda *key: hide(*key) | np.roll(hide(*key), 1, -1), args.mask / 2)
    found, first = [], []
    for x, gone, n in zip(batch.symbols, hidden, batch.lengths.tolist()):
        x, gone = x[:n], gone[:n]
        starts = gone & ~F.pad(gone, (1, 0))[:-1]
        sentinel = vocab + (starts.cumsum(0) - 1).clamp(0, SENTINELS - 1)
        kept = torch.where(starts, sentinel, x)[starts | ~gone]
        # sentinel, span, sentinel
        spans = torch.stack((sentinel, x), 1)[torch.stack((starts, gone), 1)]
        found, first = [*found, torch.cat((kept, spans))], [*first, len(kept)]
    lengths, inputs = (
        torch.tensor([*map(len, found)]),
        torch.nn.utils.rnn.pad_sequence(found, True, 1),
    )
    l = inputs.shape[1]
    return (
        inputs,
        inputs.roll(-1, 1),
        inside(lengths - 1, l) & ~inside(torch.tensor(first) - 1, l),
        lengths,
    )


SPANS = Objective(
    span_corruption,
    causal=True,
    hides=True,
    outputs=lambda args, task: task.vocab + SENTINELS,
    whole=True,
    reads=lambda args, task: replace(task, vocab=task.vocab + SENTINELS, length=2 * task.length),
)
FORKS = dict(info_nce=INFO_NCE, three_ahead=THREE, spans=SPANS)


@pytest.mark.parametrize(
    "name, task, model",
    [
        ("info_nce", "listops", "rotary"),
        ("info_nce", "image", "s4"),
        ("three_ahead", "listops", "s4"),
        ("spans", "listops", "transformer"),
        ("spans", "listops", "s4"),
    ],
)
def test_an_objective_of_ones_own(name, task, model, mistake, monkeypatch, tmp_path, capsys):  # noqa: F811
    """Both stages, joint training, --show; its score has its name; weights and lengths fit."""
    monkeypatch.setitem(pretrain.OBJECTIVES, name, FORKS[name])
    pretrain.main(flags("first", task, model, objective=name))
    finetune.main(flags("second", task=None, model=None, init="first"))
    finetune.main(flags("both", task, model, objective=name, joint=1))
    first = result_of(tmp_path / "first")
    assert first["score_is"] == (FORKS[name].score or "accuracy on predicted positions")
    assert 0 <= first["val_score"] <= 1 and result_of(tmp_path / "both")["objective"] == name
    args = SimpleNamespace(**json.loads((tmp_path / "first" / "config.json").read_text()))
    there, model = (
        load(tmp_path / "first" / "best.pt")["model"],
        load(tmp_path / "second" / "best.pt")["model"],
    )
    assert there["head.weight"].shape[0] == FORKS[name].outputs(args, TASKS[task])
    assert {key for key in there if key.startswith("backbone")} == {
        key for key in model if key.startswith("backbone")
    }
    capsys.readouterr()
    if name == "info_nce":
        assert "are not positions of a sequence" in mistake("predict", ["first", "--show", "a.png"])
        assert "keeps a batch whole" in mistake(
            "pretrain", flags("x", task, "s4", objective=name, micro_batch=2)
        )
    else:
        predict.main(["first", "--show", "a.png"])
        assert "hidden positions" in capsys.readouterr().out


def test_info_nce_is_its_formula(monkeypatch, tmp_path):
    """The first evaluation beside float64, over examples in a loop."""
    monkeypatch.setitem(pretrain.OBJECTIVES, "info_nce", INFO_NCE)
    pretrain.main(flags("run", objective="info_nce", lr=0, steps=1))
    logged = [
        json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    ]
    trained = predict.load("run")
    task, _, val, _ = predict.open_task("listops", ".")
    loss, positions = 0.0, 0
    for i in range(0, len(val), 8):
        rows = np.arange(i, min(i + 8, len(val)))
        batch = val.batch(rows)
        draw = drawing(task, batch, rows, slice(0, len(rows)), 0, pretrain.EVAL_KEY, i // 8)
        inputs, there, _, lengths = two_views(trained.args, batch, draw)
        with torch.no_grad():
            z = trained.model.head(trained.model.backbone(inputs, lengths)).double()
        z = torch.stack([one[:n].mean(0) for one, n in zip(z, lengths)])
        z, n, each = z / z.norm(dim=1, keepdim=True), len(z), 0.0
        for a in range(n):
            like = torch.tensor([z[a] @ z[b] / 0.1 for b in range(n) if b != a])
            partner = (a + n // 2) % n
            each += like.logsumexp(0) - z[a] @ z[partner] / 0.1
        loss, positions = loss + there.sum() * each / n, positions + there.sum()
    assert [line["val_loss"] for line in logged if line["kind"] == "eval"][0] == pytest.approx(
        float(loss / positions), rel=1e-4
    )


# ---- A loss of several parts ---------------------------------------------------------------------


def two_parts(args, prediction, targets, hidden):
    """The loss, and as an auxiliary one a penalty on large outputs."""
    loss, score = pretrain.spt_loss(args, prediction, targets, hidden)
    return {"guess": loss, "size": 0.01 * prediction.float().square().sum()}, score


def test_parts_of_a_loss_are_logged_drawn_and_resumed(monkeypatch, tmp_path):
    """Their sum is the loss; a stopped run goes on with the sums since the last log line; joint
    training names them beside the loss on labels. The last step is logged."""
    monkeypatch.setitem(
        pretrain.OBJECTIVES,
        "masked",
        pretrain.OBJECTIVES["masked"]._replace(loss=two_parts, score="share"),
    )
    words = dict(steps=7, eval_every=7, log_every=4)
    pretrain.main(flags("whole", **words))
    stop_in(6, monkeypatch, "pretrain", flags("stopped", **words))
    pretrain.main(flags("stopped", resume=True, **words))
    finetune.main(flags("both", joint=0.5, **words))
    for out, names in (
        ("whole", {"guess", "size"}),
        ("stopped", {"guess", "size"}),
        ("both", {"labels", "guess", "size"}),
    ):
        lines = [
            json.loads(line) for line in (tmp_path / out / "log.jsonl").read_text().splitlines()
        ]
        train = [line for line in lines if line["kind"] == "train"]
        assert train[-1]["step"] == 7
        for line in train:
            parts = {
                name.removeprefix("loss_"): value
                for name, value in line.items()
                if name.startswith("loss_")
            }
            assert parts.keys() == names and sum(parts.values()) == pytest.approx(
                line["loss"], rel=1e-5
            )
        drawn = curves_of(tmp_path / out)["loss"]
        assert [style for style, *_ in drawn].count(":") == len(names)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


# ---- A flag that a pretext reads -----------------------------------------------------------------


def test_a_flag_that_a_pretext_reads_works_in_every_script(tmp_path):
    """Also with weights that were kept before there was the flag; finetuning reads the value of its
    pretraining."""
    copy = scripts(
        tmp_path, "tests/conftest.py", "results/weights/*.npz", "results/weights/pathfinder_demo*/*"
    )
    for file, old, new in (
        (
            "engine/flags.py",
            '    add(WITH_DENOISING, "--loss"',
            '    add(WITH_DENOISING, "--width", positive, "of spans", default=8)\n'
            '    add(WITH_DENOISING, "--loss"',
        ),
        (
            "pretrain.py",
            "draw(hide, args.mask), args.loss),\n",
            "draw(hide, args.mask / args.width), args.loss),\n"
            "                        reads=lambda args, task: print(f'width {args.width}') or "
            "task,\n",
        ),
    ):
        text = (copy / file).read_text()
        assert text.count(old) == 1
        (copy / file).write_text(text.replace(old, new))
    kept = "results/weights/pathfinder_demo-s4-pretrain"
    small = ("--steps", 2, "--batch", 4, "--eval-every", 2)
    task = ("--task", "pathfinder_demo")
    says = calls(
        copy,
        ("data.py", *task, "--train", 40, "--val", 20, "--test", 20, "--show", "sheet.png"),
        ("pretrain.py", *task, "--model", "s4", "--width", 2, "--out", "first", *small),
        ("finetune.py", "--init", "first", "--out", "second", *small),
        (
            "finetune.py",
            *task,
            "--model",
            "s4",
            "--joint",
            1,
            "--width",
            4,
            "--out",
            "both",
            *small,
        ),
        ("finetune.py", *task, "--model", "s4", "--out", "scratch", *small),
        ("predict.py", "first", "--show", "a.png"),
        ("predict.py", "second"),
        ("predict.py", "both"),
        ("predict.py", kept, "--show", "b.png"),
        (
            "predict.py",
            kept.replace("pretrain", "finetuned"),
            "--input",
            "results/weights/pathfinder_demo.npz",
        ),
        ("baseline.py", *task),
    )
    widths = [re.search(r"^width (\d+)$", text, re.M) for text in says]
    assert [width and int(width[1]) for width in widths] == [None, 2, 2, 4, 8, 2, 2, 4, 8, 8, None]


def test_the_picture_of_a_task_shows_what_the_objective_hides(monkeypatch, tmp_path):
    """Here the first half of each sequence; of padding nothing."""
    monkeypatch.setattr(
        pretrain,
        "hide",
        lambda shape, ratio, *key: np.arange(shape[1]) < np.full(shape, shape[1] // 2),
    )
    drawn = []
    monkeypatch.setattr(data, "open_task", opened)
    monkeypatch.setattr(
        data,
        "sheet",
        lambda path, task, batch, size, columns: drawn.append((task, batch, columns[1][1])),
    )
    for task in "listops", "image":
        data.show(task, ".", "sheet.png")
        task, batch, hidden = drawn.pop()
        lengths = true_lengths(batch.lengths, *hidden.shape, "cpu")
        assert hidden.sum(1).tolist() == lengths.clamp(max=task.length // 2).tolist()


# ---- A schedule ----------------------------------------------------------------------------------


def test_a_schedule_is_a_line(monkeypatch, tmp_path):
    """Warm-up, stable, decay; a flag of both stages."""
    monkeypatch.setitem(
        recipes.SCHEDULES,
        "wsd",
        lambda step, steps, warmup: min(1.0, (steps - step) / (0.5 * steps)),
    )
    pretrain.main(flags("run", schedule="wsd", lr=0.1))
    rates = [
        json.loads(line)["lr"]
        for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()
        if '"train"' in line
    ]
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.1, 0.1 * 2 / 3, 0.1 / 3])


# ---- minGRU (Feng et al. 2024): a file in zoo/ ---------------------------------------------------

MINGRU = '''"""minGRU (Feng et al. 2024): h[t] = (1 - z[t]) h[t-1] + z[t] g[t]; z, g see x[t]."""
import torch
import torch.nn as nn

from kernels import inside
from models import MODELS, Model, SSMBlock


class MinGRU(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.project = nn.ModuleList([nn.Linear(c.d, 2 * c.d) for _ in range(c.directions)])

    def forward(self, x, lengths=None):                                   # (b, l, d) -> (b, l, d)
        y = 0
        for i, project in enumerate(self.project):
            z, g = project(x.flip(1) if i else x).float().chunk(2, -1)
            decay, h = torch.sigmoid(-z), torch.sigmoid(z) * g
            if lengths is not None:  # padding leaves the state as it is
                real = inside(lengths, x.shape[1])[..., None]
                real = real.flip(1) if i else real
                decay, h = decay.where(real, 1), h * real
            shift = 1
            while shift < x.shape[1]:                                     # a scan by doubling
                h = torch.cat((h[:, :shift], h[:, shift:] + decay[:, shift:] * h[:, :-shift]), 1)
                decay = torch.cat((decay[:, :shift], decay[:, shift:] * decay[:, :-shift]), 1)
                shift *= 2
            y = y + (h.flip(1) if i else h)
        return y.to(x.dtype)


MODELS |= {"mingru": Model(SSMBlock, MinGRU, "s4")}
'''


def test_a_model_is_a_file(tmp_path):
    """The laws over all models hold for it, in both directions and causally."""
    copy = scripts(tmp_path, "results/*.py", "tests/*.py")
    (copy / "zoo" / "mingru.py").write_text(MINGRU)
    assert laws(copy, "tests/test_models.py", "tests/test_mixers.py", "-k", "mingru") > 5
