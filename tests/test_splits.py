"""Your data: splits, what they share or lack; unequal classes; rows that cannot be read."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import call, log_of, result_of

import data
import finetune
import predict
from engine.targets import class_loss
from files import UserError
from own.split import draw_parts, overlap, point_out_leaks
from tasks import SPLITS


def saved(name, **arrays):
    np.savez(f"{name}.npz", **arrays)
    return f"file:{name}.npz"


def prepared(name, *flags, **arrays):
    """Prepare arrays -> the rows of each split, what data.py prints."""
    task = saved(name, **arrays)
    done = call("data.py", "--task", task, *flags)
    assert done.returncode == 0, done.stderr
    return [split.rows for split in data.open_task(task)[1:]], done.stdout


@pytest.mark.parametrize("shares", [(0.7, 0.15, 0.15), (0.85, 0.15)], ids=len)
def test_parts_have_their_shares_every_class_of_three_examples_and_no_common_group(shares):
    for seed in range(6):
        rng = np.random.default_rng(seed)
        sizes = [*rng.integers(1, 9, 5), 200]
        classes = rng.permutation(np.repeat(np.arange(6), sizes))
        parts = draw_parts(classes, None, seed, shares)
        assert sorted(np.concatenate(parts)) == [*range(len(classes))], seed
        for part, share in zip(parts, shares):
            assert abs((classes[part] == 5).sum() - share * 200) <= 4, seed
        for label, size in enumerate(sizes):
            counts = [(classes[part] == label).sum() for part in parts]
            assert min(counts) > 0 if size >= 3 else counts[0] > 0, (seed, label)
        again, other = (draw_parts(classes, None, seed + more, shares) for more in (0, 1))
        assert np.array_equal(parts[0], again[0]) and {*parts[0]} != {*other[0]}, seed
        group = np.repeat(np.arange(60), 4)  # of one class each, so none is lost
        classes = np.repeat(rng.permutation(np.repeat(np.arange(4), [3, 4, 13, 40])), 4)
        parts = draw_parts(classes, group, seed, shares)
        assert sorted(np.concatenate(parts)) == [*range(len(classes))], seed
        assert sum(len({*group[part]}) for part in parts) == 60, seed
        assert all({*classes[part]} == {0, 1, 2, 3} for part in parts), seed
    # eight classes of four examples each: no class has an example for each of seven folds
    parts = draw_parts(np.arange(32) % 8, np.arange(32) // 4, 0, (0.7, 0.15, 0.15))
    assert sorted(np.concatenate(parts)) == [*range(32)] and min(map(len, parts)) > 3
    # classes of one example each: no fold can be drawn, and an empty part is refused later
    parts = draw_parts(np.arange(6), np.arange(6) // 2, 0, (0.7, 0.15, 0.15))
    assert [*map(len, parts)] == [6, 0, 0]


X = np.random.default_rng(0).normal(size=(60, 6)).round(3)
Y = np.arange(60) % 2
PART = np.repeat(SPLITS, (36, 9, 15))
ROWS = [[*np.flatnonzero(name == PART)] for name in SPLITS]


def test_a_given_split_is_kept_whatever_it_is_called(tmp_path, monkeypatch):
    """An array, a fold's number (the lowest tests, the next validates), or arrays of each split.
    Without validation, 15 % of training are drawn."""
    monkeypatch.chdir(tmp_path)
    fold = np.select([PART == "test", PART == "val"], [3.0, 5.0], 10.0 + Y)
    sets = dict(split=dict(x=X, y=Y, split=PART), fold=dict(x=X, y=Y, fold=fold))
    for names in ("train", "dev", "testing"), ("training", "valid", "test"):
        arrays = dict(X=X, y=Y, groups=np.arange(60) // 3)
        sets[names[1]] = {
            f"{key}_{name}": array[rows]
            for name, rows in zip(names, ROWS)
            for key, array in arrays.items()
        }
    for name, arrays in sets.items():
        flags = ["--split", "fold"] if name == "fold" else []
        rows, said = prepared(name, *flags, **arrays, strange=X)
        assert [*map(sorted, rows)] == ROWS and "these arrays are not read: strange" in said, name
    rows, _ = prepared("two", x=X, y=Y, split=np.where(PART == "val", "train", PART))
    assert [*map(len, rows)] == [38, 7, 15] and sorted(rows[2]) == ROWS[2]


def test_no_group_lies_in_two_splits(tmp_path, monkeypatch):
    """Drawn, or as the file says. Rows without a label whose group is held out are left out."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    group, x = np.sort(rng.integers(0, 40, 600)), rng.normal(size=(600, 3))
    y = (group + rng.integers(0, 2, 600)) % 3
    rows, _ = prepared("drawn", x=x, y=y, group=group)
    assert sum(map(len, rows)) == 600 and sum(len({*group[part]}) for part in rows) == 40
    for part, share in zip(rows, (0.7, 0.15, 0.15)):
        assert np.bincount(y[part]) == pytest.approx(np.bincount(y) * share, abs=15)
    few, given = np.where(np.arange(600) % 5, y, -1), np.where(group < 30, "train", "test")
    rows, _ = prepared("given", x=x, y=few, missing=-1, group=group, split=given)
    assert sum(len({*group[part]}) for part in rows) == 40
    assert [{*given[part]} for part in rows] == [{"train"}, {"train"}, {"test"}]
    assert [bool((few[part] < 0).any()) for part in rows] == [True, False, False]


def test_what_no_split_can_be_made_of_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    third = np.repeat(SPLITS, 20)
    lacking = np.where(third == "val", "", np.tile(["a", "b"], 30))
    for words, arrays in (
        (r"group \d+ has examples in train and in val", dict(split=third, group=Y)),
        ("20 / 0 / 20 examples to train, validate and test", dict(split=third, y=lacking)),
        ("its split is none of train, val and test", dict(split=np.array(["a", "train"] * 30))),
        ("2 folds; three are needed", dict(split=Y)),
        ("no training example has its label", dict(split=third, y=np.arange(60) // 20)),
        ("its group is missing", dict(group=np.where(Y, "a", ""))),
    ):
        with pytest.raises(UserError, match=words):
            data.prepare(saved("a", **dict(x=X, y=Y) | arrays))
    with pytest.raises(UserError, match="it has no y_test"):
        data.prepare(saved("b", x_train=X, y_train=Y, x_test=X))
    _, said = prepared("rare", x=X, y=np.repeat(["a", "b", "c"], [40, 18, 2]))
    for name in "val", "test":
        assert f"note: {name} has no example of 1 of 3 classes: c" in said


def test_what_training_has_of_a_test_example_is_counted(capsys):
    """Beside a count in plain Python."""
    rng = np.random.default_rng(0)
    twice, long = rng.normal(size=(40, 12)), rng.normal(size=200)
    twice[20:] = twice[:20]
    windows = np.stack([long[4 * i : 4 * i + 12] for i in range(40)])
    for series in twice, windows, rng.normal(size=(40, 12)):
        parts = np.split(rng.permutation(40), [28, 34])
        split = {row: i for i, part in enumerate(parts) for row in part}
        copies = beside = 0
        for row in (*parts[1], *parts[2]):
            same = [np.array_equal(series[row], other) for other in series]
            copied = any(split[row] != split[other] for other in np.flatnonzero(same))
            nearby = {split.get(row - 1), split.get(row + 1)} - {None, split[row]}
            copies += copied
            beside += bool(nearby) and series is windows
        point_out_leaks([*series[..., None]], parts)
        notes = re.findall(r"note: (\d+) of 12 .*? (are|overlap)", capsys.readouterr().out)
        counts = [(copies, "are"), (beside, "overlap")]
        assert notes == [(str(count), word) for count, word in counts if count]
    step = np.arange(20)[:, None]
    assert not overlap((step >= 15) * 1.0, (step >= 5) * 1.0), "two values"


def trained(task, out, *flags):
    """Train a small model on a task of yours -> its folder."""
    words = f"--model s4 --arch d=8,layers=1 --steps 4 --batch 8 --eval-every 2 --out {out}".split()
    done = call("finetune.py", "--task", task, *words, "--warmup", 1, "--log-every", 1, *flags)
    assert done.returncode == 0, done.stderr
    return Path(out)


def test_class_weights_weigh_the_loss(tmp_path, monkeypatch):
    """By n / (classes n_k), of the examples that are used."""
    monkeypatch.chdir(tmp_path)
    task = saved("a", x=X, y=np.repeat([0, 1, 2], [36, 18, 6]))
    own, train, *_ = data.open_task(task)
    for chosen in np.arange(42)[::3], None:
        train.chosen = chosen
        weights = finetune.class_weights(own, train)
        sizes = np.bincount(train.labels(), minlength=3)
        assert np.allclose(weights.numpy() * sizes, len(train) / 3 * (sizes > 0))
    outputs, labels = torch.randn(9, 3), torch.arange(9) % 3
    losses = -outputs.double().log_softmax(1)[range(9), labels] * weights.double()[labels]
    loss = class_loss(outputs, labels, weights).item()
    assert loss == pytest.approx(losses.sum().item(), rel=1e-5)
    for joint in [], ["--joint", 1]:
        plain = trained(task, f"plain{len(joint)}", *joint)
        weighted = trained(task, f"weighted{len(joint)}", *joint, "--class-weights")
        assert result_of(weighted)["changed"]["class_weights"], joint
        losses = [log_of(out, "train")[0]["loss"] for out in (plain, weighted)]
        assert losses[0] != losses[1], joint


def test_the_classes_of_training_decide_which_score_chooses(tmp_path, monkeypatch):
    """Balanced accuracy, if they are unequal there, whatever they are elsewhere."""
    monkeypatch.chdir(tmp_path)
    unlike, like = np.repeat([0, 1], [17, 3]), np.arange(20) % 2
    for balanced, y in enumerate((np.r_[like, unlike, unlike], np.r_[unlike, like, like])):
        task = saved(f"{balanced}", x=X + y[:, None], y=y, split=np.repeat(SPLITS, 20))
        out = trained(task, f"net{balanced}")
        assert call("baseline.py", "--task", task, "--out", f"linear{balanced}").returncode == 0
        result = result_of(out)
        for record in result, result_of(Path(f"linear{balanced}")):
            assert ("test_balanced_accuracy" in record) == balanced
        name = "val_balanced_accuracy" if balanced else "val_accuracy"
        scores = {record["step"]: record[name] for record in log_of(out, "eval")}
        assert scores[result["best_step"]] == result[name] == max(scores.values())
        kept = np.load(out / "predictions.npz")
        recalls = [np.mean(kept["prediction"][kept["y"] == label] == label) for label in (0, 1)]
        if balanced:
            assert result["test_balanced_accuracy"] == pytest.approx(np.mean(recalls))


def test_bad_rows_refuse_the_file_unless_they_are_skipped(tmp_path, monkeypatch):
    """All others have the same predictions as without those rows. Blank lines count."""
    monkeypatch.chdir(tmp_path)
    frame = pd.DataFrame(X, columns=[*"abcdef"])
    frame.assign(label=Y).to_csv("a.csv", index=False)
    model = predict.load(trained("file:a.csv", "run"))
    names, probabilities = model(X[[0, 1, 4]])
    assert np.allclose(model(frame[[*"fedcba"]])[1][[0, 1, 4]], probabilities, atol=1e-5)
    rows = [",".join(map(str, row)) for row in X[:5].tolist()]
    wrong = rows[2].replace(",", ",oops,", 1).rsplit(",", 1)[0]
    broken = X[:5].copy()
    broken[2:4, 3] = np.inf
    np.savez("new.npz", x=broken)
    ragged = ["@classLabel false", "@data", *rows[:2], rows[2] + ",x", "x", rows[4]]
    lines = ["a,b,c,d,e,f", *rows[:2], "", wrong, "a" + rows[3], rows[4]]
    for name, content, kept, words in (
        ("new.npz", [], [0, 1, 4], "example 2: a value is infinite.*The same: example 3"),
        ("new.csv", lines, [0, 1, 5], "line 5: column b: 'oops' is no number.*The same: line 6"),
        ("new.ts", ragged, [0, 1, 4], "line 5: not the numbers .*The same: line 6"),
    ):
        if content:
            Path(name).write_text("\n".join(content) + "\n")
        done = call("predict.py", "run", "--input", name)
        assert done.returncode and re.search(f"{name}, {words}", done.stderr), done.stderr
        done = call("predict.py", "run", "--input", name, "--skip-bad")
        assert done.returncode == 0, done.stderr
        table = pd.read_csv("predictions.csv", dtype=dict(prediction=str))
        assert table["row"].tolist() == kept, name
        assert table["prediction"].tolist() == [*names], name
        assert np.allclose(table[["p(0)", "p(1)"]], probabilities, atol=1e-5), name


def test_predictions_of_a_long_table_carry_its_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wide = pd.DataFrame(X).assign(who=[f"s{i}" for i in range(len(X))], label=Y)
    wide.melt(["who", "label"], var_name="when").to_csv("new.csv", index=False)
    flags = "--id who --time when --label label"
    assert call("data.py", "--task", "file:new.csv", *flags.split()).returncode == 0
    trained("file:new.csv", "run")
    assert call("predict.py", "run", "--input", "new.csv").returncode == 0
    assert pd.read_csv("predictions.csv")["id"].tolist() == wide["who"].tolist()
