"""Your data: which examples train, validate and test; rows that cannot be read; unequal
classes."""

import csv
import json

import numpy as np
import pytest
import torch
from conftest import alike, call

import baseline
import data
import finetune
import predict
from compare.comparisons import macro_f1
from engine.targets import class_loss
from experiments.running import task_names
from files import UserError, read_json
from own.split import draw_parts, overlap
from tasks import SPLITS


def prepared(folder, x, y=None, **more):
    """A set of these arrays -> task, splits."""
    path = folder / "set.npz"
    np.savez(path, x=x, **more | ({} if y is None else {"y": y}))
    data.prepare(f"file:{path}", folder / "data")
    return data.open_task(f"file:{path}", folder / "data")


# ---- splits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shares", [(0.7, 0.15, 0.15), (0.85, 0.15)])
def test_three_examples_of_a_class_are_in_every_part(seed, shares):
    """And parts stay a partition of about these shares. With groups wherever no other class is lost
    by it."""
    rng = np.random.default_rng(seed)
    sizes = [*rng.integers(1, 9, 5), 200]
    classes = rng.permutation(np.repeat(np.arange(6), sizes))
    parts = draw_parts(classes, None, seed, shares)
    assert sorted(np.concatenate(parts)) == [*range(len(classes))]
    assert all(abs(len(part) - share * len(classes)) < 12 for part, share in zip(parts, shares))
    for c, size in enumerate(sizes):
        there = [(classes[part] == c).sum() for part in parts]
        assert min(there) > 0 if size >= 3 else there[0] > 0
    group = np.repeat(np.arange(60), 4)  # of one class each, so none is lost
    classes = np.repeat(rng.permutation(np.repeat(np.arange(4), [3, 4, 13, 40])), 4)
    parts = draw_parts(classes, group, seed, shares)
    assert sorted(np.concatenate(parts)) == [*range(len(classes))]
    assert all(
        not np.intersect1d(group[one], group[two]).size
        for one in parts
        for two in parts
        if one is not two
    )
    assert all({*classes[part]} == {0, 1, 2, 3} for part in parts)


def test_groups_of_small_classes_are_drawn(tmp_path):
    """Eight classes of four examples each: no class has an example for each of seven folds."""
    parts = draw_parts(np.arange(32) % 8, np.arange(32) // 4, 0, (0.7, 0.15, 0.15))
    assert sorted(np.concatenate(parts)) == [*range(32)] and min(map(len, parts)) > 3
    # classes of one example each: no fold can be drawn, and an empty part is refused later
    parts = draw_parts(np.arange(6), np.arange(6) // 2, 0, (0.7, 0.15, 0.15))
    assert [*map(len, parts)] == [6, 0, 0]


def test_what_a_split_lacks_is_said(tmp_path, capsys):
    x, y = np.random.default_rng(0).normal(size=(40, 6)), np.repeat(["a", "b", "c"], [30, 8, 2])
    prepared(tmp_path, x, y)
    out = capsys.readouterr().out
    finetune.main(
        [
            "--task",
            f"file:{tmp_path}/set.npz",
            "--data-dir",
            str(tmp_path / "data"),
            *WORDS,
            "--out",
            str(tmp_path / "runs" / "one"),
        ]
    )
    done = call("analyze.py", "own", "--runs", tmp_path / "runs", "--figure", tmp_path / "a.png")
    assert "Nothing is known of classes without a test example: c." in done.stdout, done.stderr
    assert (
        "note: val has no example of 1 of 3 classes: c" in out
        and "note: test has no example of 1 of 3 classes: c" in out
    )


@pytest.mark.parametrize("kind", ["apart", "twice", "texts", "windows", "gaps", "steps"])
def test_what_training_has_of_a_test_example_is_counted(kind, tmp_path, capsys):
    """Beside a count in plain Python. Few values that repeat, and rows that are apart, are no
    overlap."""
    rng = np.random.default_rng(0)
    x, long = rng.normal(size=(40, 12)), rng.normal(size=200)
    if kind == "twice":
        x[20:] = x[:20]
    elif kind == "texts":
        x = np.array([f"text {i % 25}" for i in range(40)])
    elif kind in ("windows", "gaps"):
        long[::17] = np.nan if kind == "gaps" else 0
        x = np.stack([long[4 * i : 4 * i + 12] for i in range(40)])
    elif kind == "steps":
        x = (np.arange(12) >= rng.integers(2, 10, (40, 1))).astype(float)
    _, *splits = prepared(tmp_path, x, np.arange(40) % 2)
    split = {int(row): name for name, part in zip(SPLITS, splits) for row in part.rows}
    held = [row for row in range(40) if split[row] != "train"]
    same = [
        row
        for row in held
        if any(
            np.array_equal(x[row], x[other], equal_nan=x.dtype.kind == "f")
            for other in range(40)
            if split[other] != split[row]
        )
    ]
    beside = [
        row
        for row in held
        if row not in same
        and any(split.get(other, split[row]) != split[row] for other in (row - 1, row + 1))
    ]
    out = capsys.readouterr().out
    assert (
        f"note: {len(same)} of {len(held)} sequences of val and test are in another split, too"
        in out
    ) == bool(same)
    assert (
        f"note: {len(beside)} of {len(held)} sequences of val and test overlap the row" in out
    ) == (kind in ("windows", "gaps"))
    assert bool(same) == (kind in ("twice", "texts", "steps"))


def test_series_that_overlap():
    one = np.arange(20.0)[:, None]
    assert overlap(one, one[12:]) and overlap(one, np.concatenate((one[15:], one[:15])))
    assert not overlap(one, np.concatenate((one[16:], one[:16])))  # a fifth of it
    step = np.arange(20)[:, None]
    assert not overlap((step >= 15) + 0.0, (step >= 5) + 0.0)  # two values
    assert not overlap(one, one) and not overlap(one[:0], one) and not overlap("abc", "bcd")


# ---- unequal classes -----------------------------------------------------------------------------

WORDS = [
    "--model",
    "s4",
    "--arch",
    "d=8,layers=1",
    "--steps",
    "8",
    "--batch",
    "8",
    "--warmup",
    "1",
    "--eval-every",
    "2",
]


@pytest.mark.parametrize("joint", [False, True])
def test_class_weights_weigh_the_loss(joint, tmp_path, monkeypatch):
    """Of class k by n / (classes n_k), so that the classes weigh alike; the first step's loss
    beside an oracle."""
    monkeypatch.chdir(tmp_path)
    y = np.repeat([0, 1, 2], [60, 30, 10])
    task, train, *_ = prepared(tmp_path, np.random.default_rng(0).normal(size=(100, 6)), y)
    # the examples that are used
    for chosen in np.random.default_rng(0).permutation(len(train))[:20], None:
        train.chosen = chosen
        weights, sizes = (
            finetune.class_weights(task, train),
            np.bincount(train.labels(), minlength=3),
        )
        assert np.allclose(weights.numpy() * sizes, len(train) / 3 * (sizes > 0))
    outputs, labels = torch.randn(9, 3), torch.arange(9) % 3
    losses = -outputs.double().log_softmax(1)[range(9), labels] * weights.double()[labels]
    assert class_loss(outputs, labels, weights).item() == pytest.approx(
        losses.sum().item(), rel=1e-5
    )
    losses = {}
    for flag in ([], ["--class-weights"]):
        finetune.main(
            [
                "--task",
                f"file:{tmp_path}/set.npz",
                *WORDS,
                "--out",
                f"run{len(flag)}",
                "--log-every",
                "1",
                *flag,
                *["--joint", "1"] * joint,
            ]
        )
        lines = [
            json.loads(line)
            for line in (tmp_path / f"run{len(flag)}" / "log.jsonl").read_text().splitlines()
        ]
        losses[len(flag)] = [line["loss"] for line in lines if line["kind"] == "train"]
    assert (
        losses[0][0] != losses[1][0]
        and read_json(tmp_path / "run1" / "result.json")["changed"]["class_weights"]
    )


def test_validation_chooses_by_balanced_accuracy_where_classes_are_unequal(tmp_path, monkeypatch):
    """The checkpoint of the best mean recall, not of the most correct; recomputed from kept
    predictions."""
    monkeypatch.chdir(tmp_path)
    for sizes, balanced in (((88, 12), True), ((60, 40), False)):
        x = np.random.default_rng(0).normal(size=(100, 6)) + np.repeat([0, 0.7], sizes)[:, None]
        folder = tmp_path / f"{balanced}"
        folder.mkdir()
        _, _, _, test = prepared(folder, x, np.repeat([0, 1], sizes))
        finetune.main(
            [
                "--task",
                f"file:{folder}/set.npz",
                "--data-dir",
                str(folder / "data"),
                *WORDS,
                "--class-weights",
                "--out",
                str(folder / "run"),
            ]
        )
        result = read_json(folder / "run" / "result.json")
        evals = [
            json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()
        ]
        evals = {line["step"]: line for line in evals if line["kind"] == "eval"}
        name = "val_balanced_accuracy" if balanced else "val_accuracy"
        assert (("val_balanced_accuracy" in result) == balanced) and max(
            line[name] for line in evals.values()
        ) == evals[result["best_step"]][name] == result[name]
        assert result["val_accuracy"] == evals[result["best_step"]]["val_accuracy"]
        kept = np.load(folder / "run" / "predictions.npz")
        recalls = [np.mean(kept["prediction"][kept["y"] == c] == c) for c in (0, 1)]
        assert not balanced or result["test_balanced_accuracy"] == pytest.approx(np.mean(recalls))


def test_the_classes_of_training_decide_which_score_counts(tmp_path, monkeypatch):
    """Equal there and unequal elsewhere, and the reverse; in finetuning and for the linear
    model."""
    monkeypatch.chdir(tmp_path)
    unlike, alike = np.repeat([0, 1], [27, 3]), np.arange(30) % 2
    for balanced, y in enumerate((np.r_[alike, unlike, unlike], np.r_[unlike, alike, alike])):
        np.savez(
            f"{balanced}.npz",
            x=np.random.default_rng(0).normal(size=(90, 6)),
            y=y,
            split=np.repeat(SPLITS, 30),
        )
        task = ["--task", f"file:{balanced}.npz", "--out"]
        finetune.main([*task, f"net{balanced}", *WORDS])
        baseline.main([*task, f"linear{balanced}"])
        for name in "net", "linear":
            assert (
                "test_balanced_accuracy"
                in read_json(tmp_path / f"{name}{balanced}" / "result.json")
            ) == balanced


def test_macro_f1_is_that_of_scikit_learn():
    from sklearn.metrics import f1_score

    rng = np.random.default_rng(0)
    y, found = rng.integers(0, 4, 200), rng.integers(0, 5, 200)
    counts = {
        name: np.bincount(each, minlength=5).tolist()
        for name, each in dict(labels=y, predicted=found, right=y[y == found]).items()
    }
    assert macro_f1(counts) == pytest.approx(
        100 * f1_score(y, found, labels=range(4), average="macro")
    )


# ---- rows that cannot be read --------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "ts", "npz", "long"])
def test_bad_rows_refuse_the_file_unless_they_are_skipped(kind, tmp_path, monkeypatch, capsys):
    """All others have the same numbers as without those rows. Blank lines count."""
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(40, 6)).round(3)
    prepared(tmp_path, x, np.arange(40) % 2)
    finetune.main(["--task", "file:set.npz", *WORDS, "--out", "run"])
    rows = [",".join(map(str, row)) for row in x[:5]]
    flags = []
    kept = [0, 1, 4]
    if kind == "csv":
        lines = [*rows[:2], "", rows[2].replace(",", ",oops,", 1).rsplit(",", 1)[0], "a" + rows[3]]
        words = "new.csv, line 4: column 1: 'oops' is no number; .*The same: line 5 "
        lines += rows[4:]
        kept = [0, 1, 5]
        flags = ["--label", "none"]
    elif kind == "ts":
        lines = ["@classLabel false", "@data", *rows[:2], rows[2] + ",x", "x", *rows[4:]]
        words = "new.ts, line 5: not the numbers of each channel.*The same: line 6"
    elif kind == "long":
        table = [(i, t, x[i, t]) for i in range(5) for t in range(6)]
        table[2 * 6 + 1] = 2, 1, "oops"
        table[3 * 6 + 5] = 3, 5, "1_0"
        lines = [",".join(map(str, row)) for row in table]
        words = "new.csv, line 14: .*oops.*The same: line 24"
        kept = [0, 6, 24]
        flags = ["--id", "0", "--time", "1", "--label", "none"]
    else:
        broken = x[:5].copy()
        broken[2:4, 3] = np.inf
        np.savez("new.npz", x=broken)
        words = "new.npz, example 2: a value is infinite.*The same: example 3"
    name = f"new.{'csv' if kind == 'long' else kind}"
    if kind != "npz":
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=words):
        predict.main(["run", "--input", name, *flags])
    predict.main(["run", "--input", name, *flags, "--skip-bad"])
    with open("predictions.csv", newline="") as file:
        table = list(csv.DictReader(file))
    names, probabilities = predict.load("run")(x[[0, 1, 4]])
    for line, row, i, name, p in zip(table, kept, (0, 1, 4), names, probabilities, strict=True):
        wanted = dict(row=str(row), prediction=str(name)) | {
            f"p({c})": f"{p[c]:.6f}" for c in (0, 1)
        }
        assert alike(line, {"id": str(i)} | wanted if kind == "long" else wanted)


# ---- the archives --------------------------------------------------------------------------------


def test_the_best_files_of_an_archive_are_read(tmp_path):
    """.ts before .tsv before .txt; a half without labels; one example a class leaves none for
    validation."""
    x = np.random.default_rng(0).normal(size=(40, 6)).round(3)
    forms = dict(
        ts=lambda row, y: f"{','.join(map(str, row))}:{y}",
        tsv=lambda row, y: "\t".join(map(str, [y, *row])),
        txt=lambda row, y: "  ".join(map(str, [y, *row])),
    )
    found = []
    for kinds in (("ts", "tsv", "txt"), ("tsv", "txt"), ("txt",)):
        folder = tmp_path / "".join(kinds)
        folder.mkdir()
        for kind in kinds:
            for half, rows in (("TRAIN", range(30)), ("TEST", range(30, 40))):
                scale = 1 if kind == kinds[0] else 2  # others must not be read
                (folder / f"Mine_{half}.{kind}").write_text(
                    "\n".join(forms[kind](scale * x[i], i % 2) for i in rows) + "\n"
                )
        data.prepare("ucr:Mine", folder / "data", raw=folder)
        found.append(
            [np.array(split.x) for split in data.open_task("ucr:Mine", folder / "data")[1:]]
        )
    assert all(np.array_equal(one, two) for other in found[1:] for one, two in zip(found[0], other))
    (folder / "Mine_TEST.ts").write_text(
        "@classLabel false\n@data\n" + "\n".join(",".join(map(str, row)) for row in x[30:])
    )
    (folder / "Mine_TRAIN.ts").write_text(
        "@data\n" + "\n".join(forms["ts"](x[i], i % 2) for i in range(30))
    )
    with pytest.raises(
        UserError,
        match="26 / 4 / 0 examples to train, validate and test; every split needs an example with",
    ):
        data.prepare("ucr:Mine", folder / "more", raw=folder)
    for half, rows in (("TRAIN", range(2)), ("TEST", range(30, 40))):
        (folder / f"Mine_{half}.ts").write_text(
            "@data\n" + "\n".join(forms["ts"](x[i], i % 2) for i in rows)
        )
    with pytest.raises(
        UserError, match="2 / 0 / 10 .*; no class has an example to spare for validation"
    ):
        data.prepare("ucr:Mine", folder / "few", raw=folder)


@pytest.mark.parametrize(
    "names", [("val", "test"), ("valid", "test"), ("validation", "testing"), ("dev", "test")]
)
def test_arrays_of_splits_have_the_usual_names(names, tmp_path, capsys):
    """Groups as well; what is lacking is named, and what is not read."""
    x, y, g = np.random.default_rng(0).normal(size=(40, 6)), np.arange(40) % 2, np.arange(40) // 5
    parts = dict(zip(("train", *names), (slice(0, 25), slice(25, 30), slice(30, 40))))
    arrays = {
        f"{key}_{part}": array[rows]
        for part, rows in parts.items()
        for key, array in (("X", x), ("y", y), ("groups", g))
    }
    np.savez(tmp_path / "a.npz", **arrays, strange=x)
    _, *splits = data.open_task(f"file:{tmp_path}/a.npz", tmp_path / "data")
    assert [sorted(split.rows) for split in splits] == [
        [*range(25)],
        [*range(25, 30)],
        [*range(30, 40)],
    ]
    assert all(np.array_equal(split.y, y[split.rows]) for split in splits)
    assert "these arrays are not read: strange" in capsys.readouterr().out
    del arrays[f"y_{names[1]}"]
    np.savez(tmp_path / "b.npz", **arrays)
    with pytest.raises(UserError, match="b.npz: it has no y_test; it must hold"):
        data.prepare(f"file:{tmp_path}/b.npz", tmp_path / "data")
    arrays["groups_train"] = arrays["groups_train"] + 1  # group 5 is in two splits
    arrays[f"y_{names[1]}"] = y[30:]
    np.savez(tmp_path / "c.npz", **arrays)
    with pytest.raises(UserError, match="group 5 has examples in train and in val"):
        data.prepare(f"file:{tmp_path}/c.npz", tmp_path / "data")


def test_a_path_may_have_commas():
    assert task_names("file:a, b/c,d.npz,ucr:FordA,file:e.csv") == [
        "file:a, b/c,d.npz",
        "ucr:FordA",
        "file:e.csv",
    ]
    assert task_names("text,image") == ["text", "image"]
