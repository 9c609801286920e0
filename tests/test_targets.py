"""Other targets: several labels per example; a label at every position, as in recall."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import call, made_set, result_of
from sklearn.metrics import f1_score

import data
import finetune
import pretrain
from engine import setup as setup_py
from engine.feed import Feed
from engine.targets import KINDS
from tasks import EOS, IGNORE, TASKS

SMALL = ["--batch", "8", "--steps", "3", "--warmup", "1"]
NEW = ["--arch", "d=8,layers=1", *SMALL, "--model"]


def ran(*words):
    """What a script prints, in the current folder."""
    done = call(*words)
    assert done.returncode == 0, (words, done.stdout[-500:], done.stderr)
    return done.stdout


def refused(said, *words):
    done = call(*words)
    assert done.returncode == 2 and said in done.stderr, (words, done.stderr)
    assert done.stderr.count("\n") == 1, done.stderr


def table(path="predictions.csv"):
    return pd.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")


def test_a_loss_is_the_sum_over_examples_of_means_over_labels():
    """As many labels again, and positions without one, change nothing."""
    draw, classes = torch.Generator().manual_seed(0), torch.arange(30) % 4
    for kind, shape, y in (
        ("class", (5, 4), classes[:5]),
        ("number", (5, 1), classes[:5].float()),
        ("labels", (5, 3), torch.eye(5)[:, :3]),
        ("positions", (5, 6, 4), classes.view(5, 6)),
    ):
        loss, outputs = KINDS[kind].loss, torch.randn(shape, generator=draw)
        whole = pytest.approx(loss(outputs, y).item(), 1e-5)
        singles = [loss(outputs[i : i + 1], y[i : i + 1]) for i in range(5)]
        assert sum(singles).item() == whole, kind
        if y.ndim > 1:
            repeated = outputs.repeat_interleave(4, 1), y.repeat_interleave(4, 1)
            assert loss(*repeated).item() == whole, kind
    more = torch.cat((outputs, outputs), 1), torch.cat((y, torch.full_like(y, IGNORE)), 1)
    assert loss(*more).item() == whole


def test_scores_count_the_labels_that_occur():
    rng = np.random.default_rng(0)
    y, guess = (rng.random((2, 50, 4)) < 0.3).astype(int)
    y[:, 2] = 0
    occurs = [0, 1, 3]
    macro = f1_score(y[:, occurs], guess[:, occurs], average="macro")
    scores = KINDS["labels"].scores(y, guess)
    assert scores["macro_f1"] == pytest.approx(macro)
    assert scores["micro_f1"] == pytest.approx(f1_score(y, guess, average="micro"))
    places = np.where(rng.random((50, 4)) < 0.3, IGNORE, y)
    exact = (places == guess)[places != IGNORE].mean()
    assert KINDS["positions"].scores(places, guess)["accuracy"] == pytest.approx(exact)


def test_recall_is_a_lookup_and_fresh_samples_are_new():
    """Each label is the value after its key; no key twice. A seed and a number name a sample."""
    task = TASKS["recall"]
    pairs = task.make.pairs
    examples = [task.draw(task, np.random.default_rng(i)) for i in range(200)]
    x, y = map(np.array, zip(*examples))
    assert (x[:, -1] == EOS).all() and ((y != IGNORE).sum(1) == pairs).all()
    assert (y[:, : 2 * pairs] == IGNORE).all()
    for ids, labels in zip(x, y):
        value_of = dict(ids[: 2 * pairs].reshape(-1, 2).tolist())
        assert len(value_of) == pairs
        for place in np.flatnonzero(labels != IGNORE):
            assert task.symbols[value_of[ids[place]]] == task.names[labels[place]]
    split = data.Split(task, x[:0].ravel(), y, np.arange(3), fresh=7)
    both, last = split.batch([3, 70_000]), split.batch([70_000])
    assert torch.equal(both.symbols[1], last.symbols[0]) and torch.equal(both.y[1], last.y[0])
    assert not torch.equal(*both.symbols) and split.lengths() is None
    split.fresh = 8
    assert not torch.equal(split.batch([3]).symbols[0], both.symbols[0]), "another seed"


def test_fresh_steps_share_no_example():
    for batch, n in (1, 1), (4, 9), (7, 20):
        args = SimpleNamespace(batch=batch, micro_batch=None, seed=3, fresh=True)
        processes = SimpleNamespace(world=1, rank=0, device=None)
        feed = Feed(args, processes, dict(target="", documents=1), n, None, False, False)
        rows = {row for step in range(3 * n) for row in feed.rows(step)[0].tolist()}
        assert len(rows) == 3 * n * batch


def test_flags_choose_the_examples_of_either_stage(monkeypatch):
    """--seed draws fresh examples; shares reach `open_task`, that of the labels in stage 2."""

    train = data.Split(None, None, np.arange(3))

    def opened(name, folder, *shares, labels, per_class, seed):
        return (*shares, labels, per_class and (per_class, seed)), train, None, None

    def fit_to_data(args, shares, examples):
        raise LookupError(*shares[:3], train.fresh, shares[3])

    monkeypatch.setattr(setup_py, "open_task", opened)
    monkeypatch.setattr(setup_py, "fit_to_data", fit_to_data)
    for stage, flag, given in (
        (pretrain, ["--train-fraction", "0.3"], (0.3, None, False, None, None)),
        (finetune, ["--train-fraction", "0.3"], (0.3, None, True, None, None)),
        (finetune, ["--label-fraction", "0.3"], (None, 0.3, True, None, None)),
        (finetune, ["--task=listops", "--labels-per-class=3"], (None, None, True, None, (3, 5))),
        (finetune, ["--fresh"], (None, None, True, 5, None)),
    ):
        with pytest.raises(LookupError) as asked:
            stage.main(["--task", "recall", "--model", "s4", "--seed", "5", *flag])
        assert asked.value.args == given, (stage, flag)


def test_recall_goes_from_data_to_tables(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    new = ["--task", "recall", *NEW, "transformer", "--out"]
    ran("data.py", "--task", "recall", "--train", 40, "--val", 10, "--test", 20)
    ran("finetune.py", *new, "runs/fresh", "--joint", 1, "--fresh")
    ran("baseline.py", "--task", "recall", "--out", "runs/base")
    ran("predict.py", "runs/fresh")
    rows, result = table(), result_of(tmp_path / "runs/fresh")
    assert (len(rows), sum(row["label"] != "" for row in rows)) == (20 * 48, 20 * 8)
    assert {row["position"] for row in rows} == {*map(str, range(48))}
    assert score_of(rows) == pytest.approx(result["test_accuracy"]) and result["changed"]["fresh"]
    assert "accuracy over positions, %" in ran("analyze.py", "compare", "runs")
    refused("", "finetune.py", "--task", "listops", *NEW, "s4", "--fresh", "--out", "x")


def score_of(rows):
    """Micro F1 of a table of predictions, which is the accuracy, if each has one label."""
    fields = [(row["label"], row["prediction"]) for row in rows if row["label"]]
    sets = [[{*text.split(";")} - {""} for text in pair] for pair in fields]
    right = sum(len(labels & guess) for labels, guess in sets)
    return 2 * right / sum(len(labels) + len(guess) for labels, guess in sets)


@pytest.mark.parametrize("kind", ["labels", "positions"])
def test_every_start_and_report_knows_your_targets(kind, tmp_path, monkeypatch):
    """And the same file again, as new data, has the same predictions."""
    monkeypatch.chdir(tmp_path)
    made = made_set(tmp_path, "series", kind)
    task = "file:my set.npz"
    said = ran("data.py", "--task", task, *made.flags)
    assert ("\nlabels: " if kind == "labels" else "classes per position: ") in said
    ran("pretrain.py", "--task", task, *NEW, "s4", "--out", "runs/pre")
    pre, new = ["--init", "runs/pre", *SMALL], ["--task", task, *NEW, "s4"]
    for name, words in dict(
        spt=pre,
        probe=[*pre, "--freeze"],
        scratch=new,
        joint=[*new, "--joint", 1],
        few=[*new, "--label-fraction", 0.5],
    ).items():
        ran("finetune.py", *words, "--out", f"runs/{name}")
    ran("baseline.py", "--task", task, "--out", "runs/base")
    base = result_of(tmp_path / "runs/base")
    assert base["task"] == made.task and (kind == "positions" or "constant_macro_f1" in base)
    for report in "own", "compare":
        said = ran("analyze.py", report, "runs")
        assert KINDS[kind].title in said and "nan" not in said, report
    ran("predict.py", "runs/scratch", "--features", "f.npy")
    ran("predict.py", "runs/scratch")
    rows = table()
    score = result_of(tmp_path / "runs/scratch")[f"test_{KINDS[kind].score}"]
    assert score_of(rows) == pytest.approx(score)
    ran("predict.py", "runs/scratch", "--input", "my set.npz", "--out", "new.csv")
    again = {(row["row"], row.get("position")): row for row in table("new.csv")}
    for row in rows:
        same = again[row["row"], row.get("position")]
        assert [same[key] for key in ("label", "prediction")] == [row["label"], row["prediction"]]
    if kind == "positions":
        flags = (["--class-weights"], "one class per"), (["--pool", "mean"], "--pool none is for")
        for words, said in (*flags, (["--fresh"], "these can: recall")):
            refused(said, "finetune.py", *new, "--out", "x", *words)
        return
    y = np.eye(3)[np.arange(6) % 3]  # rows with exactly one label, and rows without
    y[:2] = np.nan
    np.savez("new.npz", x=made.x[:6], y=y)
    assert "4 examples: macro F1" in ran("predict.py", "runs/scratch", "--input", "new.npz")
    assert [row["label"] for row in table()] == ["?", "?", "2", "0", "1", "2"]
    np.savez("four.npz", x=made.x[:6], y=np.ones((6, 4), int))
    refused("predicts 3 labels", "predict.py", "runs/scratch", "--input", "four.npz")


def test_labels_of_positions_that_are_no_classes_are_refused(tmp_path):
    many = made_set(tmp_path, targets="positions", y=np.arange(540).reshape(60, 9))
    words = "data.py", "--task", many.task, *many.flags, "--data-dir", tmp_path
    refused("540 different labels of positions", *words)
    refused("one number per sequence", *words, "--regression")
