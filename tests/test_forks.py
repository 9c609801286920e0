"""Ablations as users make them: each in one place, in both stages and joint training; to copy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same_run, flags, load, log_of, result_of, stop_in

import finetune
import predict
import pretrain
import recipes
from compare.curves import curves_of
from engine.feed import drawing
from files import UserError
from kernels import inside, true_lengths
from models import at
from pretrain import Objective, corrupt, hide, shift
from tasks import TASKS
from use.pretrained import filled_in

pytestmark = pytest.mark.usefixtures("elsewhere")


def two_views(args, batch, draw):
    """InfoNCE: a batch twice, differently hidden -> inputs (2 b, l), a vector a position."""
    views = [corrupt(batch, draw(hide, args.mask, i), args.loss)[0] for i in (0, 1)]
    inputs, lengths = torch.cat(views), None if batch.lengths is None else batch.lengths.repeat(2)
    real = inside(true_lengths(lengths, *inputs.shape[:2], inputs.device), inputs.shape[1])
    return inputs, real, real, lengths


def info_nce(args, prediction, targets, hidden):
    """Cross-entropy of which of the other views is of the same sequence, by the mean vectors. Times
    positions."""
    n, m, d = len(targets), *prediction.shape
    pooled = prediction.new_zeros(n, d).index_add(0, hidden // targets.shape[1], prediction)
    z = F.normalize(pooled, dim=1)
    itself = torch.eye(n, dtype=torch.bool, device=z.device)
    similar = (z @ z.T / 0.1).masked_fill(itself, -torch.inf)  # (2 b, 2 b)
    partner = torch.arange(n, device=z.device).roll(n // 2)
    return m * F.cross_entropy(similar, partner), m * (similar.argmax(1) == partner).float().mean()


INFO_NCE = Objective(two_views, causal=False, hides=True, outputs=lambda args, task: 8)
INFO_NCE = INFO_NCE._replace(loss=info_nce, whole=True, score="accuracy of finding the other view")


def three_ahead(args, batch, draw):
    """The next three positions at once."""
    x, _, _ = shift(batch, "ce")
    real = inside(true_lengths(batch.lengths, *x.shape[:2], x.device) - 3, x.shape[1])
    return x, torch.stack([batch.symbols.roll(-i, 1) for i in (1, 2, 3)], -1), real  # (b, l, 3)


def three_losses(args, prediction, targets, hidden):
    prediction, targets = prediction.unflatten(-1, (3, -1)), at(targets, hidden)  # (m, 3, vocab)
    loss = F.cross_entropy(prediction.mT, targets, reduction="sum") / 3
    return loss, (prediction.argmax(-1) == targets).float().mean(-1).sum()


THREE = Objective(three_ahead, causal=True, hides=False, outputs=lambda args, task: 3 * task.vocab)
THREE = THREE._replace(loss=three_losses, score="accuracy on the next three positions")


SENTINELS = 20


def span_corruption(args, batch, draw):
    """T5: sentinels stand for spans, which follow after the sequence."""
    vocab = TASKS["listops"].vocab
    hidden = draw(lambda *key: hide(*key) | np.roll(hide(*key), 1, -1), args.mask / 2)
    rows, first = [], []
    for x, gone, n in zip(batch.symbols, hidden, batch.lengths.tolist()):
        x, gone = x[:n], gone[:n]
        starts = gone & ~F.pad(gone, (1, 0))[:-1]
        sentinel = vocab + (starts.cumsum(0) - 1).clamp(0, SENTINELS - 1)
        kept = torch.where(starts, sentinel, x)[starts | ~gone]
        spans = torch.stack((sentinel, x), 1)[torch.stack((starts, gone), 1)]  # sentinel, span, ...
        rows, first = [*rows, torch.cat((kept, spans))], [*first, len(kept)]
    lengths = torch.tensor([*map(len, rows)])
    inputs = torch.nn.utils.rnn.pad_sequence(rows, True, 1)
    l = inputs.shape[1]
    predicted = inside(lengths - 1, l) & ~inside(torch.tensor(first) - 1, l)
    return inputs, inputs.roll(-1, 1), predicted, lengths


SPANS = Objective(
    span_corruption,
    causal=True,
    hides=True,
    whole=True,
    outputs=lambda args, task: task.vocab + SENTINELS,
    reads=lambda args, task: replace(task, vocab=task.vocab + SENTINELS, length=2 * task.length),
)
FORKS = dict(info_nce=INFO_NCE, three_ahead=THREE, spans=SPANS)


@pytest.mark.parametrize("name", FORKS)
def test_an_objective_of_ones_own_trains_in_both_stages_and_jointly(
    name, mistake, monkeypatch, tmp_path
):
    """And fills in, if it predicts positions; its score has its name; weights fit."""
    task, model = "image" if name == "info_nce" else "listops", "s4"
    monkeypatch.setitem(pretrain.OBJECTIVES, name, FORKS[name])
    pretrain.main(flags("first", task, model, objective=name))
    finetune.main(flags("second", task=None, model=None, init="first"))
    finetune.main(flags("both", task, model, objective=name, joint=1))
    first = result_of(tmp_path / "first")
    assert first["score_is"] == (FORKS[name].score or "accuracy on predicted positions")
    assert 0 <= first["val_score"] <= 1 and result_of(tmp_path / "both")["objective"] == name
    trained = predict.load("first")
    weights, finetuned = (load(tmp_path / run / "best.pt")["model"] for run in ("first", "second"))
    assert weights["head.weight"].shape[0] == FORKS[name].outputs(trained.args, TASKS[task])
    assert {key for key in weights if key.startswith("backbone")} < finetuned.keys()
    batch = predict.open_task(task, ".")[2].batch(np.arange(8))
    if name == "info_nce":
        with pytest.raises(UserError, match="are not positions of a sequence"):
            filled_in(trained, batch)
        words = flags("x", task, model, objective=name, micro_batch=2)
        assert "keeps a batch whole" in mistake("pretrain", words)
    else:
        assert filled_in(trained, batch)[0].any()


def test_info_nce_is_its_formula(monkeypatch, tmp_path):
    """The first evaluation beside float64, over examples in a loop."""
    monkeypatch.setitem(pretrain.OBJECTIVES, "info_nce", INFO_NCE)
    pretrain.main(flags("run", objective="info_nce", lr=0, steps=1))
    trained = predict.load("run")
    task, _, val, _ = predict.open_task("listops", ".")
    loss = positions = 0
    for i in range(0, len(val), 8):
        rows = np.arange(i, min(i + 8, len(val)))
        batch = val.batch(rows)
        draw = drawing(task, batch, rows, slice(0, len(rows)), 0, pretrain.EVAL_KEY, i // 8)
        inputs, real, _, lengths = two_views(trained.args, batch, draw)
        with torch.no_grad():
            z = trained.model.head(trained.model.backbone(inputs, lengths)).double()
        z = torch.stack([vectors[:n].mean(0) for vectors, n in zip(z, lengths)])
        z, n, summed = z / z.norm(dim=1, keepdim=True), len(z), 0.0
        for a in range(n):
            similar = torch.tensor([z[a] @ z[b] / 0.1 for b in range(n) if b != a])
            summed += similar.logsumexp(0) - z[a] @ z[(a + n // 2) % n] / 0.1
        loss, positions = loss + real.sum() * summed / n, positions + real.sum()
    first = log_of(tmp_path / "run", "eval")[0]
    assert first["val_loss"] == pytest.approx(float(loss / positions), rel=1e-4)


def two_parts(args, prediction, targets, hidden):
    """The loss, and as an auxiliary one a penalty on large outputs."""
    loss, score = pretrain.spt_loss(args, prediction, targets, hidden)
    return {"guess": loss, "size": 0.01 * prediction.float().square().sum()}, score


def test_parts_of_a_loss_are_logged_drawn_and_resumed(monkeypatch, tmp_path):
    """Their sum is the loss; a stopped run goes on with the sums since the last log line; joint
    training names them beside the loss on labels. The last step is logged."""
    masked = pretrain.OBJECTIVES["masked"]._replace(loss=two_parts, score="share")
    monkeypatch.setitem(pretrain.OBJECTIVES, "masked", masked)
    words = dict(steps=7, eval_every=7, log_every=4)
    pretrain.main(flags("whole", **words))
    stop_in(6, monkeypatch, "pretrain", flags("stopped", **words))
    pretrain.main(flags("stopped", resume=True, **words))
    finetune.main(flags("both", joint=0.5, **words))
    parts = {"loss_guess", "loss_size"}
    for out, names in (("whole", parts), ("stopped", parts), ("both", parts | {"loss_labels"})):
        lines = log_of(tmp_path / out, "train")
        assert lines[-1]["step"] == 7
        for line in lines:
            assert {name for name in line if name.startswith("loss_")} == names, out
            summed = sum(line[name] for name in names)
            assert summed == pytest.approx(line["loss"], rel=1e-5), out
        drawn = curves_of(tmp_path / out)["loss"]
        assert [style for style, *_ in drawn].count(":") == len(names), out
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


def test_a_schedule_is_a_line(monkeypatch, tmp_path):
    """Warm-up, stable, decay; a flag of both stages."""

    def decay(step, steps, warmup):
        return min(1.0, (steps - step) / (0.5 * steps))

    monkeypatch.setitem(recipes.SCHEDULES, "wsd", decay)
    pretrain.main(flags("run", schedule="wsd", lr=0.1))
    rates = [line["lr"] for line in log_of(tmp_path / "run", "train")]
    assert rates == pytest.approx([0.05, 0.1, 0.1, 0.1, 0.1 * 2 / 3, 0.1 / 3])
