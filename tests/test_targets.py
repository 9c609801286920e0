"""Targets of other kinds: several labels per example, and a label at every position; associative
recall."""

import csv
import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import call
from sklearn import metrics

import data
import finetune
import pretrain
from engine import setup as setup_py
from engine.feed import Feed
from engine.targets import KINDS
from tasks import EOS, IGNORE, TASKS, making

# ---- A label per position: associative recall ----------------------------------------------------


def test_recall_is_a_lookup_and_fresh_samples_are_new():
    """Each label is the value after its key; no key twice; every step draws other examples, the
    same ones again."""
    task = TASKS["recall"]
    x, y = map(np.array, zip(*(task.draw(task, np.random.default_rng(i)) for i in range(200))))
    assert (x[:, -1] == EOS).all() and ((y != IGNORE).sum(1) == task.make.pairs).all()
    for ids, labels in zip(x, y):
        pairs = dict(ids[: 2 * task.make.pairs].reshape(-1, 2).tolist())
        assert len(pairs) == task.make.pairs
        for place in np.flatnonzero(labels != IGNORE):
            assert task.symbols[pairs[ids[place]]] == task.names[labels[place]]
    assert (y[:, : 2 * task.make.pairs] == IGNORE).all()
    split = data.Split(task, x[:0].ravel(), y, np.arange(3), fresh=7)
    some, other = split.batch([3, 70_000]), split.batch([70_000])
    assert torch.equal(some.symbols[1], other.symbols[0]) and not torch.equal(
        some.symbols[0], some.symbols[1]
    )
    assert torch.equal(some.y[1], other.y[0]) and split.lengths() is None
    split.fresh = 8
    assert not torch.equal(split.batch([3]).symbols[0], some.symbols[0])  # another seed


@pytest.mark.parametrize("batch, n", [(1, 1), (4, 9), (7, 20)])
def test_fresh_steps_share_no_example(batch, n):
    args = SimpleNamespace(batch=batch, micro_batch=None, seed=3, fresh=True)
    feed = Feed(
        args,
        SimpleNamespace(world=1, rank=0, device=None),
        dict(target="", documents=1),
        n,
        None,
        False,
        False,
    )
    assert (
        len({row for step in range(3 * n) for row in feed.rows(step)[0].tolist()}) == 3 * n * batch
    )


@pytest.mark.parametrize("stage", [pretrain, finetune], ids=lambda stage: stage.__name__)
def test_flags_choose_the_examples_of_either_stage(stage, monkeypatch):
    """--seed draws fresh examples; shares reach `open_task`, that of the labels in stage 2."""

    def opened(name, folder, fraction=None, labelled=None, labels=False, fresh=None):
        raise InterruptedError(name, folder, fraction, labelled, labels, fresh)

    monkeypatch.setattr(setup_py, "open_task", opened)
    for seed, flag in itertools.product(
        (0, 5),
        ("--wd", "--fresh", "--train-fraction") + ("--label-fraction",) * (stage is finetune),
    ):
        words = [
            "--task",
            "recall",
            "--model",
            "s4",
            "--data-dir",
            "there",
            "--steps",
            1,
            "--seed",
            seed,
            flag,
        ]
        with pytest.raises(InterruptedError) as asked:
            stage.main([*map(str, words), *["0.3"] * (flag != "--fresh")])
        assert asked.value.args == (
            "recall",
            "there",
            0.3 if flag[2] == "t" else None,
            0.3 if flag[2] == "l" else None,
            stage is finetune,
            seed if flag == "--fresh" else None,
        )


@pytest.mark.parametrize(
    "kind, outputs, y",
    [
        ("class", torch.randn(5, 4), torch.arange(5) % 4),
        ("number", torch.randn(5, 1), torch.randn(5)),
        ("labels", torch.randn(5, 3), torch.eye(5)[:, :3]),
        ("positions", torch.randn(5, 6, 4), torch.arange(30).view(5, 6) % 4),
    ],
)
def test_a_loss_is_the_sum_over_examples_of_means_over_labels(kind, outputs, y):
    """As many labels again, and positions without one, change nothing."""
    loss = KINDS[kind].loss
    whole = pytest.approx(loss(outputs, y).item(), 1e-5)
    assert sum(loss(outputs[i : i + 1], y[i : i + 1]) for i in range(5)).item() == whole
    if y.ndim > 1:
        assert loss(outputs.repeat_interleave(4, 1), y.repeat_interleave(4, 1)).item() == whole
    if kind == "positions":
        more = torch.cat((outputs, outputs), 1), torch.cat((y, torch.full_like(y, IGNORE)), 1)
        assert loss(*more).item() == whole


def test_recall_from_data_to_table(tmp_path):
    """Both stages, joint, fresh samples, predictions, a baseline, an export, a comparison; scores
    beside an oracle."""
    small = [
        "--model",
        "transformer",
        "--arch",
        "d=8,layers=1",
        "--steps",
        3,
        "--batch",
        8,
        "--data-dir",
        "data",
    ]
    one = ["--task", "recall", *small, "--out"]
    sizes = ["--train", 40, "--val", 10, "--test", 20]
    for words in (
        ("data.py", "--task", "recall", "--data-dir", "data", *sizes),
        ("pretrain.py", *one, "pre"),
        (
            "finetune.py",
            "--init",
            "pre",
            "--steps",
            3,
            "--batch",
            8,
            "--data-dir",
            "data",
            "--out",
            "runs/spt",
        ),
        ("finetune.py", *one, "runs/scratch"),
        ("finetune.py", *one, "runs/joint", "--joint", 1),
        ("finetune.py", *one, "runs/fresh", "--fresh"),
        ("finetune.py", *one, "runs/few", "--label-fraction", 0.5),
        ("baseline.py", "--task", "recall", "--data-dir", "data", "--out", "runs/base"),
        ("predict.py", "runs/scratch", "--data-dir", "data"),
        ("predict.py", "runs/scratch", "--data-dir", "data", "--export", "m.pt2"),
        ("data.py", "--task", "recall", "--data-dir", "data", "--show", "sheet.png"),
    ):
        done = call(*words, cwd=tmp_path)
        assert done.returncode == 0, (words, done.stderr)
    rows = [*csv.DictReader((tmp_path / "predictions.csv").open())]
    known = [row for row in rows if row["label"]]
    result = json.loads((tmp_path / "runs" / "scratch" / "result.json").read_text())
    assert (
        len(rows) == 20 * 48
        and len(known) == 20 * 8
        and {row["position"] for row in rows} == {*map(str, range(48))}
    )
    assert np.mean([row["label"] == row["prediction"] for row in known]) == pytest.approx(
        result["test_accuracy"]
    )
    table = call("analyze.py", "compare", "runs", cwd=tmp_path)
    assert table.returncode == 0 and "accuracy over positions, %" in table.stdout, table.stderr
    assert (
        json.loads((tmp_path / "runs" / "fresh" / "result.json").read_text())["changed"]["fresh"]
        is True
    )
    line = call("finetune.py", "--task", "listops", *small, "--fresh", "--out", "x", cwd=tmp_path)
    assert line.returncode == 2


# ---- Several labels per example, and labels per position, of your data ---------------------------


def labelled(folder, form):
    """A file of 60 series whose labels say where they are high -> its task, and flags that read
    it."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 12)).round(3)
    several = np.stack(
        (x[:, :4].mean(1) > 0, x[:, 4:8].mean(1) > 0, x[:, 8:].mean(1) > 0), 1
    ).astype(int)
    several[:3] = 0, 1, 1
    places = np.where(x > 1, 1, 0)
    if form == "labels.npz":
        np.savez(folder / form, x=x, y=several)
    elif form == "labels.csv":
        lines = [
            ["early", "middle", "late", *(f"t{i}" for i in range(12))],
            *np.hstack((several, x)).tolist(),
        ]
        (folder / form).write_text(
            "\n".join(
                ",".join(
                    str(int(cell) if isinstance(cell, float) and j < 3 else cell)
                    for j, cell in enumerate(line)
                )
                for line in lines
            )
        )
    elif form == "positions.npz":
        np.savez(folder / form, x=x, y=np.where(rng.random((60, 12)) < 0.2, -1, places))
    else:
        lines = ["series,time,value,state"] + [
            f"{i},{t},{x[i, t]},{'high' if places[i, t] else 'low'}"
            for i in range(60)
            for t in range(12)
        ]
        (folder / form).write_text("\n".join(lines))
    more = {
        "positions.npz": ["--label-per-position"],
        "labels.csv": ["--label", "early,middle,late"],
        "positions.csv": [
            "--id",
            "series",
            "--time",
            "time",
            "--label",
            "state",
            "--label-per-position",
        ],
    }.get(form, [])
    return f"file:{folder / form}", more


def test_labels_that_cannot_be_used_are_one_line(tmp_path, monkeypatch):
    """What is wrong and where; a label that a split lacks is named; rows without a label only
    pretrain."""
    rng = np.random.default_rng(0)
    x, rare = rng.normal(size=(60, 6)).round(2), np.zeros((60, 2), int)
    rare[:, 0], rare[7, 1] = np.arange(60) % 2, 1
    rare[7, 0] = 1
    places = np.where(np.arange(60)[:, None] < 20, -1, (x > 0).astype(int))
    monkeypatch.chdir(tmp_path)
    np.savez("two.npz", x=x, y=rare + 1)
    np.savez("rare.npz", x=x, y=rare)
    np.savez("places.npz", x=x, y=places)
    np.savez("numbers.npz", x=x, y=rng.normal(size=(60, 6)))
    np.savez("many.npz", x=rng.normal(size=(60, 6)), y=np.arange(360).reshape(60, 6))
    rows = [
        "a,b,t0,t1",
        *(f"{i % 2},{'no' if i == 3 else 1},{x[i, 0]},{x[i, 1]}" for i in range(60)),
    ]
    (tmp_path / "words.csv").write_text("\n".join(rows))
    for words, said in (
        (["two.npz"], "several labels (n, k) must be 0 or 1"),
        (["many.npz", "--label-per-position"], "360 different labels of positions"),
        (
            ["many.npz", "--regression", "--label-per-position"],
            "--regression predicts one number per sequence",
        ),
        (
            ["numbers.npz", "--label-per-position"],
            "labels of positions are classes, whole numbers or names",
        ),
        (
            ["words.csv", "--label", "a,b"],
            "line 5: column b holds 'no'; several labels must be 0 or 1",
        ),
        (["words.csv", "--label", "a,a"], "name each column once"),
    ):
        done = call("data.py", "--task", f"file:{words[0]}", *words[1:])
        assert done.returncode and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
    done = call("data.py", "--task", "file:rare.npz")
    assert (
        done.returncode == 0
        and "has no example of 1 of 2 classes: 1" in done.stdout
        and "stratified" not in done.stdout
    )
    done = call("data.py", "--task", "file:places.npz", "--label-per-position")
    assert done.returncode == 0 and "20 without a label, only for pretraining" in done.stdout, (
        done.stderr
    )
    small = ["--model", "s4", "--arch", "d=8,layers=1", "--steps", 2, "--batch", 8]
    for words, said in (
        (["--class-weights"], "--class-weights needs one class per example"),
        (["--fresh"], "these can: recall"),
        (["--pool", "mean"], "--pool none is for a label per position"),
    ):
        done = call("finetune.py", "--task", "file:places.npz", *small, *words)
        assert done.returncode == 2 and said in done.stderr, done.stderr
    task = TASKS["recall"]
    request = SimpleNamespace(
        name="recall", folder=tmp_path, task=task, take=lambda split, n, place: n
    )
    examples = [task.draw(task, np.random.default_rng(i)) for i in range(3)]
    making.save_split(
        request,
        "val",
        [one for one, _ in examples],
        [y[: 20 + i] for i, (_, y) in enumerate(examples)],
        "x",
    )
    saved = np.load(tmp_path / "val_y.npy")  # shorter labels are filled up
    assert (
        saved.shape == (3, 49)
        and (saved[:, 23:] == IGNORE).all()
        and np.array_equal(saved[0, :20], examples[0][1][:20])
    )


X, RNG = np.random.default_rng(1).normal(size=(60, 3, 12)).round(2), np.random.default_rng(2)
# three labels, never none
K3 = RNG.integers(0, 2, (60, 3)) | np.eye(3, dtype=int)[np.arange(60) % 3]
K3[0] = 1  # more than one: not one-hot
WORDS = np.array([*map(str, RNG.integers(10**11, 10**12, 60))])  # of twelve characters


@pytest.mark.parametrize(
    "arrays, flags, target, classes",
    [
        (dict(x=X, y=K3), ["--channels-first"], "labels", 3),  # y is as wide as there are channels
        (dict(x=X.swapaxes(1, 2), y=K3), ["--channels-last"], "labels", 3),
        (
            dict(x=X, y=(X[:, 0] > 0).astype(int)),
            ["--channels-first", "--label-per-position"],
            "positions",
            2,
        ),
        (dict(x=X[:, 0], y=(X[:, 0] > 0).astype(int)), [], None, "--label-per-position"),
        (dict(x=X[:, 0, :6], y=np.eye(5)[np.arange(60) % 5]), [], "", 5),  # one-hot
        (dict(x=X[:, 0, :5], y=np.eye(5)[np.arange(60) % 5]), [], None, "--label-per-position"),
        (dict(x=X[:, 0], y=np.where(np.arange(60)[:, None] < 20, np.nan, K3)), [], "labels", 3),
        (
            dict(
                x_train=X[:40, 0],
                y_train=K3[:40],
                x_test=X[40:50, 0],
                y_test=K3[40:50],
                x_val=X[50:, 0],
            ),
            [],
            None,
            "it has no y_val",
        ),
        (
            dict(
                x=WORDS, y=np.array([[int(letter in "13579") for letter in word] for word in WORDS])
            ),
            ["--label-per-position"],
            "positions",
            2,
        ),
        (
            dict(x=WORDS, y=np.array([["p", "q"]] * 60)),
            [],
            None,
            "several labels (n, k) must be 0 or 1",
        ),
        (
            dict(x=X[:, 0], y=np.where(X[:, 0] > 0, 1, -1)),
            ["--label-per-position"],
            None,
            "1 different labels of positions",
        ),
    ],
)
def test_what_y_means_is_not_mistaken(arrays, flags, target, classes, tmp_path):
    """Orientation, one-hot, unlabelled rows, a split without y, characters of texts; else one
    line."""
    np.savez(tmp_path / "my.npz", **arrays)
    done = call("data.py", "--task", f"file:{tmp_path}/my.npz", *flags, cwd=tmp_path)
    if target is None:
        assert done.returncode == 2 and classes in done.stderr, done.stdout + done.stderr
        assert done.stderr.count("\n") == 1
        return
    assert done.returncode == 0, done.stderr
    task, train, *_ = data.open_task(f"file:{tmp_path}/my.npz", tmp_path / "data")
    assert (task.target, task.classes) == (target, classes)
    if np.isnan(arrays["y"].astype(float)).any():
        assert task.labelled == train.y.shape[0] - 20
    if arrays["x"].dtype.kind == "U":  # every character its label, <eos> none
        batch = train.batch(range(5))
        for ids, labels in zip(batch.symbols, batch.y):
            assert [int(task.symbols[i] in "13579") for i in ids[:-1]] == labels[
                :-1
            ].tolist() and labels[-1] == IGNORE


def test_new_files_with_several_labels(tmp_path):
    """All rows with exactly one label; rows without; booleans; another number of labels."""
    x = X[:, 0]
    np.savez(tmp_path / "my.npz", x=x, y=K3)
    task, small = (
        f"file:{tmp_path}/my.npz",
        ["--arch", "d=8,layers=1", "--steps", 3, "--batch", 8, "--model", "s4"],
    )
    done = call("finetune.py", "--task", task, *small, "--out", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    np.savez(tmp_path / "one.npz", x=x[:6], y=np.eye(3, dtype=int)[[0, 1, 2, 0, 1, 2]])
    np.savez(tmp_path / "some.npz", x=x[:6], y=np.where(np.arange(6)[:, None] < 2, np.nan, K3[:6]))
    np.savez(tmp_path / "four.npz", x=x[:6], y=np.ones((6, 4), int))
    for name, labels in (
        ("one", ["0", "1", "2", "0", "1", "2"]),
        ("some", ["?", "?", *(";".join(str(i) for i in range(3) if row[i]) for row in K3[2:6])]),
    ):
        done = call("predict.py", "run", "--input", f"{name}.npz", cwd=tmp_path)
        assert (
            done.returncode == 0 and f"{6 - labels.count('?')} examples: macro F1" in done.stdout
        ), done.stderr
        assert [
            row["label"] for row in csv.DictReader((tmp_path / "predictions.csv").open())
        ] == labels
    done = call("predict.py", "run", "--input", "four.npz", cwd=tmp_path)
    assert (
        done.returncode == 2 and "predicts 3 labels" in done.stderr and done.stderr.count("\n") == 1
    )
    rows = [
        "a,b,t0,t1",
        *(
            f"{['true', 'false'][i % 2]},{'' if i > 49 else 'False'},{x[i, 0]},{x[i, 1]}"
            for i in range(50)
        ),
        *(f",,{x[i, 0]},{x[i, 1]}" for i in range(50, 60)),
    ]
    (tmp_path / "words.csv").write_text("\n".join(rows))
    done = call("data.py", "--task", f"file:{tmp_path}/words.csv", "--label", "a,b", cwd=tmp_path)
    assert done.returncode == 0 and "10 without a label, only for pretraining" in done.stdout, (
        done.stderr
    )
    long = [
        "series,time,value,a,b",
        *(f"{i},{t},{x[i, t]},1,0" for i in range(20) for t in range(6)),
    ]
    (tmp_path / "long.csv").write_text("\n".join(long))
    done = call(
        "data.py",
        "--task",
        f"file:{tmp_path}/long.csv",
        "--id",
        "series",
        "--time",
        "time",
        "--label",
        "a,b",
        cwd=tmp_path,
    )
    assert done.returncode and "only one if a row is a position (--id)" in done.stderr


def test_a_baseline_knows_a_relative_path(tmp_path):
    np.savez(tmp_path / "my.npz", x=X[:, 0], y=K3)
    done = call("baseline.py", "--task", "file:my.npz", "--out", "base", cwd=tmp_path)
    result = json.loads((tmp_path / "base" / "result.json").read_text())
    assert done.returncode == 0 and result["task"] == f"file:{tmp_path}/my.npz"
    assert {
        "test_macro_f1",
        "test_micro_f1",
        "constant_macro_f1",
        "constant_micro_f1",
    } <= result.keys()


@pytest.mark.parametrize("form", ["labels.npz", "labels.csv", "positions.npz", "positions.csv"])
def test_your_data_with_several_labels(form, tmp_path):
    """From a file to a report and predictions: every start, a share of the labels, a baseline;
    scores beside scikit-learn's; the same file again, as new data, has the same predictions."""
    task, more = labelled(tmp_path, form)
    kind, small = (
        form.split(".")[0],
        ["--arch", "d=8,layers=1", "--steps", 4, "--batch", 8, "--model", "s4"],
    )
    prepared = call("data.py", "--task", task, *more, cwd=tmp_path)
    assert (
        prepared.returncode == 0
        and ("\nlabels: " if kind == "labels" else "classes per position: ") in prepared.stdout
    ), prepared.stderr
    for words in (
        ["finetune.py", "--task", task, *small, "--out", "runs/scratch"],
        ["finetune.py", "--task", task, *small, "--out", "runs/joint", "--joint", 1],
        ["pretrain.py", "--task", task, *small, "--out", "runs/pre"],
        ["finetune.py", "--init", "runs/pre", "--steps", 4, "--batch", 8, "--out", "runs/spt"],
        [
            "finetune.py",
            "--init",
            "runs/pre",
            "--steps",
            4,
            "--batch",
            8,
            "--out",
            "runs/probe",
            "--freeze",
        ],
        ["finetune.py", "--task", task, *small, "--label-fraction", 0.5, "--out", "runs/few"],
        ["baseline.py", "--task", task, "--out", "runs/base"],
        ["predict.py", "runs/scratch"],
        ["analyze.py", "own", "runs"],
        ["analyze.py", "compare", "runs"],
        ["predict.py", "runs/scratch", "--export", "m.pt2"],
        ["predict.py", "runs/scratch", "--features", "f.npy"],
    ):
        done = call(*words, cwd=tmp_path)
        assert done.returncode == 0, (words, done.stdout[-500:], done.stderr)
        if words[0] == "analyze.py":
            assert KINDS[kind].title in done.stdout and "nan" not in done.stdout
            assert (
                kind == "positions"
                or words[1] == "compare"
                or "macro F1 in parentheses" in done.stdout
            )
    rows = [*csv.DictReader((tmp_path / "predictions.csv").open())]
    result = json.loads((tmp_path / "runs" / "scratch" / "result.json").read_text())
    if kind == "labels":
        names = [name[2:-1] for name in rows[0] if name.startswith("p(")]
        y, guess = (
            [[name in row[field].split(";") for name in names] for row in rows]
            for field in ("label", "prediction")
        )
        for field, average in (("micro_f1", "micro"), ("macro_f1", "macro")):
            there = np.flatnonzero(np.any(y, 0))
            assert result[f"test_{field}"] == pytest.approx(
                metrics.f1_score(
                    np.array(y)[:, there if average == "macro" else slice(None)],
                    np.array(guess)[:, there if average == "macro" else slice(None)],
                    average=average,
                    zero_division=0,
                )
            )
        assert names == (["early", "middle", "late"] if form.endswith("csv") else ["0", "1", "2"])
    else:
        known = [row for row in rows if row["label"]]
        assert len(rows) == 12 * result["test_examples"]
        assert result["test_accuracy"] == pytest.approx(
            np.mean([row["label"] == row["prediction"] for row in known])
        )
    if form == "positions.csv":  # a table without the labels
        bare = [
            ",".join(line.split(",")[:3]) for line in (tmp_path / form).read_text().splitlines()
        ]
        (tmp_path / "bare.csv").write_text("\n".join(bare))
        done = call(
            "predict.py",
            "runs/scratch",
            "--input",
            "bare.csv",
            "--out",
            "bare_out.csv",
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        assert [*csv.DictReader((tmp_path / "bare_out.csv").open())][0].keys() == rows[0].keys() - {
            "label"
        }
    new = call(
        "predict.py",
        "runs/scratch",
        "--input",
        task.removeprefix("file:"),
        "--out",
        "new.csv",
        cwd=tmp_path,
    )
    assert new.returncode == 0, new.stderr
    again = {
        (row["row"], row.get("position")): row
        for row in csv.DictReader((tmp_path / "new.csv").open())
    }
    for row in rows:
        same = again[row["row"], row.get("position")]
        assert (same["label"], same["prediction"]) == (row["label"], row["prediction"])
