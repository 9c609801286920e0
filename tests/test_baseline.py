"""What costs nothing: features beside plain loops, tasks whose answer is known, and what the
verdict makes of it."""

import itertools
import json
import re

import numpy as np
import pytest
import torch
from conftest import ROOT, call
from scipy.stats import ttest_ind_from_stats
from test_report import finished, shown

import baseline
import data
from compare import comparisons, report, verdict
from compare.runs import load
from data import open_task
from files import UserError
from pretrain import hide


def prepared(folder, name="my", seed=0, **arrays):
    np.savez(folder / f"{name}.npz", **arrays)
    return data.open_task(f"file:{folder / name}.npz", folder / "data", labels=True)


def test_ngrams_are_those_of_a_plain_loop(tmp_path):
    """Rows share as many features as their texts share n-grams."""
    x = np.array(["abcabc", "bcab", "xyz", "aaaaaa", "cab"] * 8)
    task, train, *_ = prepared(tmp_path, x=x, y=np.arange(40) % 2)
    ids = [tuple(train.x[a:b]) for a, b in zip(train.offsets, train.offsets[1:])]
    sets = [{one[i : i + n] for n in range(1, 6) for i in range(len(one) - n + 1)} for one in ids]
    found = baseline.ngrams(task, train)
    wanted = [[len(one & two) for two in sets] for one in sets]
    assert (found @ found.T).toarray().tolist() == wanted


def test_words_are_those_of_a_plain_loop(tmp_path):
    """Case does not count, punctuation does, and neither blanks nor the special symbols do."""
    texts = "A fine, fine film.", "a FINE  film", "Not a film!", "<eos> don't", "fine"
    known = [
        ["a", "fine", ",", "fine", "film", "."],
        ["a", "fine", "film"],
        ["not", "a", "film", "!"],
        ["<", "eos", ">", "don", "'", "t"],
        ["fine"],
    ] * 8
    task, train, *_ = prepared(tmp_path, x=np.array(texts * 8), y=np.arange(40) % 2)
    sets = [{*known[i], *zip(known[i], known[i][1:])} for i in train.rows]
    found = baseline.ngrams(task, train, words=True)
    assert (found @ found.T).toarray().tolist() == [
        [len(one & two) for two in sets] for one in sets
    ]


def test_words_are_another_model_of_texts_only(tmp_path, capsys):
    """It is fitted in a folder where characters were, says which regularisation was chosen, and
    wants characters."""
    rng = np.random.default_rng(0)
    good = np.arange(200) % 2
    lines = [" ".join(rng.permutation([*"abcdefg", ("dull", "fun")[one]])) for one in good]
    np.savez(tmp_path / "text.npz", x=np.array(lines), y=good)
    words = [
        "--task",
        f"file:{tmp_path / 'text.npz'}",
        "--data-dir",
        str(tmp_path / "data"),
        "--out",
        str(tmp_path / "out"),
    ]
    for more, model in (
        ((), f"n-grams of 1 to {baseline.LONGEST}"),
        (["--words"], "words and pairs of words"),
    ):
        baseline.main([*words, *more])
        found = json.loads((tmp_path / "out" / "result.json").read_text())
        assert found["model"] == model and found["test_accuracy"] == 1
        assert (
            f"{model}: 1.0000 (validation 1.0000, {found['regularisation']})"
            in capsys.readouterr().out
        )
    for name in "samples", "symbols":  # symbols: of more than one letter
        np.savez(tmp_path / f"{name}.npz", **kinds(rng)[name])
        with pytest.raises(UserError, match="--words is for texts"):
            baseline.main(
                [
                    "--task",
                    f"file:{tmp_path / name}.npz",
                    "--data-dir",
                    str(tmp_path / "data"),
                    "--words",
                ]
            )


@pytest.mark.parametrize("channels, ragged", [(1, False), (3, False), (2, True)])
def test_random_convolutions_are_those_of_a_plain_loop(channels, ragged, tmp_path):
    x = np.random.default_rng(1).standard_normal((30, 40, channels))
    if ragged:
        x[::2, 25:] = np.nan
    task, train, *_ = prepared(tmp_path, x=x, y=np.arange(30) % 2)
    found, column = baseline.convolved(task, train), 0
    batch = train.batch(np.arange(len(train)))
    i = int(np.argmin(batch.lengths)) if ragged else 3
    series = torch.zeros(40, channels)
    length = batch.lengths[i] if ragged else 40
    series[:length] = batch.samples[i, :length]
    kernels = baseline.random_kernels(40, channels)
    assert (
        sum(len(biases) for _, biases, _, _ in kernels) == baseline.KERNELS == found.shape[1] // 2
    )
    for weights, biases, dilation, padding in kernels:
        width = weights.shape[2]
        assert torch.allclose(weights.sum(2), torch.zeros(()), atol=1e-5)
        padded = torch.cat([torch.zeros(padding, channels), series, torch.zeros(padding, channels)])
        places = range(len(padded) - dilation * (width - 1))
        plain = [
            float(biases[0])
            + sum(float(weights[0, :, j] @ padded[t + j * dilation]) for j in range(width))
            for t in places
        ]
        assert found[i, column] == pytest.approx(max(plain), abs=1e-4)
        share = sum(value > 0 for value in plain) / len(plain)
        assert found[i, column + len(biases)] == pytest.approx(share, abs=1.01 / len(plain))
        column += 2 * len(biases)


def kinds(rng, n=400):
    """{kind: arrays of a set whose answer n-grams or convolutions know}."""
    y = np.arange(n) % 3
    words = rng.integers(0, 20, (n, 30))
    words[np.arange(n), 5 + rng.integers(0, 20, n)] = 20 + y
    waves = np.sin(np.arange(60) * np.array([0.2, 0.5, 1.1])[y][:, None] + 6 * rng.random((n, 1)))
    short = waves + 0.3 * rng.standard_normal((n, 60))
    ragged = short.copy()
    ragged[::3, 40:] = np.nan
    few = np.where(rng.random(n) < 0.5, y, np.nan)
    return {
        "symbols": dict(x=words, y=y),
        "samples": dict(x=short, y=y),
        "ragged": dict(x=ragged, y=y),
        "texts": dict(
            x=np.array(["".join(map(chr, 97 + line)) for line in words]), y=np.array([*"abc"])[y]
        ),
        "unlabelled": dict(x=short, y=few),
        "channels": dict(x=np.stack([short, short[::-1]], 2), y=y),
        "numbers": dict(x=short, y=np.array([0.5, 1, 2])[y] + 0.01 * rng.standard_normal(n)),
    }


@pytest.mark.parametrize("kind", kinds(np.random.default_rng(0)))
def test_it_finds_what_is_there_and_says_so(kind, tmp_path, capsys):
    np.savez(tmp_path / "my.npz", **kinds(np.random.default_rng(0))[kind])
    task, folder = f"file:{tmp_path / 'my.npz'}", str(tmp_path / "data")
    data.prepare(task, folder, regression=kind == "numbers")
    words = ["--task", task, "--data-dir", folder, "--out", str(tmp_path / "out")]
    baseline.main(words)
    found, text = (
        json.loads((tmp_path / "out" / "result.json").read_text()),
        capsys.readouterr().out,
    )
    score = "r2" if kind == "numbers" else "accuracy"
    assert found[f"test_{score}"] > 0.9 and found[f"constant_{score}"] < 0.45
    assert found["start"] == "baseline" and f"{found[f'test_{score}']:.4f}" in text
    assert (
        kind == "numbers"
        or found["constant_accuracy"] == found["counts"]["labels"][0] / found["test_examples"]
    )
    assert kind != "unlabelled" or found["train_examples"] == found["data"]["labelled"] < 200
    baseline.main(words)
    assert "is finished" in capsys.readouterr().out


def test_a_share_of_the_labels_is_that_of_finetuning(tmp_path):
    arrays = kinds(np.random.default_rng(0))["symbols"]
    prepared(tmp_path, **arrays)
    task, train, val, test = data.open_task(
        f"file:{tmp_path / 'my.npz'}", tmp_path / "data", None, 0.1
    )
    whole = baseline.ngrams(
        task, data.open_task(f"file:{tmp_path / 'my.npz'}", tmp_path / "data")[1]
    )
    assert (baseline.ngrams(task, train) != whole[train.chosen]).nnz == 0 and len(train) == 28
    _, _, predictions, _ = baseline.fit(task, train, val, test)
    assert len(predictions["test"]) == len(test)


class Always:
    """A fitted model with these predictions of validation, then of the test split."""

    def __init__(self, *found):
        self.found = [*found]

    def fit(self, x, y):
        pass

    def predict(self, x):
        return self.found.pop(0)


@pytest.mark.parametrize("share, wanted", [(5, "careful"), (2, "bold")])
def test_unequal_classes_choose_by_balanced_accuracy(share, wanted, monkeypatch, tmp_path):
    """4:1, where "careful" finds half of the smaller class at the cost of more mistakes; 1:1 by
    accuracy. The majority class is that of training."""
    y = np.where(np.arange(400) % share == 0, 0, 1)
    task, *splits = prepared(tmp_path, x=np.random.default_rng(0).standard_normal((400, 9)), y=y)
    val = splits[1].y
    half = np.flatnonzero(val == 0)[::2]
    careful = np.ones_like(val)
    careful[[*half, *np.flatnonzero(val == 1)[: len(half) + 2]]] = 0
    test = np.zeros(len(splits[2]), int)
    monkeypatch.setattr(
        baseline,
        "linear_models",
        lambda task: {"bold": Always(np.ones_like(val), test), "careful": Always(careful, test)},
    )
    strength, _, predictions, kind = baseline.fit(task, *splits)
    balanced = "balanced_accuracy" in kind.scores(val, predictions["val"])
    assert strength == wanted and balanced == (share == 5)
    assert share == 2 or set(predictions["constant"]) == {1}


def test_finished_is_only_what_has_the_same_flags(tmp_path, capsys):
    """Another share of the labels, another task with the same data, and back again."""
    arrays = kinds(np.random.default_rng(0))["samples"]
    prepared(tmp_path, **arrays)
    words = [
        "--task",
        f"file:{tmp_path / 'my.npz'}",
        "--data-dir",
        str(tmp_path / "data"),
        "--out",
        str(tmp_path / "out"),
    ]
    for more, examples in (
        ([], 280),
        (["--label-fraction", "0.1"], 28),
        (["--label-fraction", "0.2"], 56),
        ([], 280),
    ):
        for again in False, True:
            baseline.main([*words, *more])
            assert ("is finished" in capsys.readouterr().out) == again
            assert (
                json.loads((tmp_path / "out" / "result.json").read_text())["train_examples"]
                == examples
            )
    for task in "listops_demo", "listops_mini":
        data.prepare(task, tmp_path / "data", sizes=(40, 20, 20), workers=1)
        baseline.main(["--task", task, *words[2:]])
        assert json.loads((tmp_path / "out" / "result.json").read_text())["task"] == task


@pytest.mark.parametrize("ragged", [False, True])
def test_samples_may_be_longer_than_a_part(ragged, tmp_path):
    x = np.random.default_rng(0).standard_normal((12, 50_100))
    x[::2, 40_000 if ragged else 50_100 :] = np.nan
    task, train, *_ = prepared(tmp_path, x=x, y=np.arange(12) % 2)
    assert task.ragged == ragged and baseline.convolved(task, train, 60).shape == (len(train), 120)


def test_the_page_of_full_length_shows_its_records():
    """A row of results/linear.md per record: what was chosen, the scores, the error of the test
    set's size."""
    rows = [
        [cell.strip("* ") for cell in line.split("|")]
        for line in (ROOT / "results" / "linear.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    records = [
        json.loads(line) for line in (ROOT / "results" / "linear.jsonl").read_text().splitlines()
    ]
    for row, record in zip(rows, records, strict=True):
        score = record["test_accuracy"]
        error = (score * (1 - score) / record["test_examples"]) ** 0.5
        assert row[3] == record["regularisation"] and [*map(float, row[4:8])] == pytest.approx(
            [100 * record["val_accuracy"], 100 * score, 100 * error, round(record["seconds"])],
            abs=0.0051,
        )
        assert (
            row[1].startswith(f"`{record['task'].split('_')[0]}`")
            and record["model"].split()[-1] in row[2]
        )


# ---- The verdict ---------------------------------------------------------------------------------


def counts(labels, predicted, right):
    return dict(counts=dict(labels=labels, predicted=predicted, right=right))


def trained(folder, model, start, scores, steps=100, **more):
    """A finished run a seed."""
    for seed, score in enumerate(scores):
        init = {}
        if start == "spt":
            if not (folder / f"{model}-pretrain-s{seed}-None").exists():
                finished(folder, "pretrain", model, seed, dict(val_score=1), steps, 60)
            init = dict(init=f"{model}-pretrain-s{seed}-None")
        own = dict(val_accuracy=score, test_examples=1000) | init | more
        finished(folder, start, model, seed, score, steps, 60, **own)


def linear(folder, score, constant, **more):
    finished(
        folder,
        "baseline",
        "n-grams of 1 to 5",
        0,
        score,
        0,
        3,
        **dict(objective="none", constant_accuracy=constant, val_accuracy=score, test_examples=1000)
        | more,
    )


def test_baselines_come_first_and_may_be_ahead(tmp_path):
    linear(tmp_path, 0.77, 0.5)
    trained(tmp_path, "s4", "scratch", [0.695, 0.7, 0.705])
    trained(tmp_path, "s4", "spt", [0.711, 0.71, 0.709])
    text = shown(tmp_path)
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    assert rows == ["| model", "| *majority class*", "| *linear: n-grams of 1 to 5*", "| s4"]
    assert (
        "- **The linear model is ahead of every network**: it scores 77.0 %, and s4 "
        "self-pretrained 71.0 %." in text
    )
    trained(tmp_path, "rotary", "scratch", [0.83, 0.83, 0.84])
    assert (
        "- Validation chooses rotary from scratch. It scores 83.3 % on test, **ahead of** the "
        "linear model "
        "(77.0 %). Behind the linear model: s4 from scratch, s4 self-pretrained." in shown(tmp_path)
    )
    trained(tmp_path, "dlr", "scratch", [0.83, 0.83, 0.84])
    assert (
        "Validation cannot choose between dlr from scratch, rotary from scratch. The first scores"
        in shown(tmp_path)
    )


def test_validation_chooses_whatever_the_test_split_says(tmp_path):
    """In the verdict, and the run to use: wherever the best model on test is not that on
    validation."""
    names, test = ["s4", "rotary", "lstm"], (0.6, 0.7, 0.8)
    for trial, val in enumerate(some for some in itertools.permutations(test) if some[2] < 0.8):
        folder, best = tmp_path / str(trial), names[np.argmax(val)]
        linear(folder, 0.5, 0.5)
        for name, chosen, score in zip(names, val, test):
            trained(folder, name, "scratch", [score, score], val_accuracy=chosen)
            (folder / f"{name}-scratch-s0-None" / "best.pt").touch()
        text = shown(folder)
        assert (
            f"Validation chooses {best} from scratch. It scores "
            f"{100 * test[names.index(best)]:.1f} %" in text
        )
        assert f"python predict.py {folder / best}-scratch-s0-None --input" in text


def test_a_variant_that_scatters_is_not_behind_the_linear_model(tmp_path):
    """Its mean is ten points behind, two of its three seeds are not."""
    linear(tmp_path, 0.934, 0.5)
    trained(tmp_path, "rotary", "joint", [0.932, 0.914, 0.65])
    trained(tmp_path, "s4", "scratch", [0.90, 0.901, 0.902])
    text = shown(tmp_path)
    assert "Validation chooses s4 from scratch. It scores 90.1 % on test, **behind** the" in text
    assert "ahead of every network" not in text and "Behind the linear model" not in text


def test_tables_that_share_a_linear_model_do_not_spoil_each_other(tmp_path):
    """Of unequal classes: one table of runs with counts, one of older runs without."""
    some = counts([900, 100], [850, 150], [840, 90])
    linear(tmp_path, 0.93, 0.9, **some)
    trained(tmp_path, "s4", "scratch", [0.93, 0.93], **some)
    trained(tmp_path / "short", "s4", "scratch", [0.9, 0.9], steps=10, changed=dict(steps=10))
    text = shown(tmp_path)
    whole, short = text.split("**my.npz, 10 passes per run**")
    name = "| *linear: n-grams of 1 to 5* |"
    assert f"{name} 91.7 (93.0, 84.0) |" in whole and f"{name} 93.0 |" in short


def test_joint_training_is_judged_where_it_is_decided_or_alone(tmp_path):
    trained(tmp_path, "s4", "scratch", [0.5, 0.51, 0.52])
    trained(tmp_path, "s4", "joint", [0.7, 0.71, 0.72])
    assert "- **s4 gains by joint training**: +20.0 points [" in shown(tmp_path)
    trained(tmp_path / "more", "lru", "spt", [0.5])
    trained(tmp_path / "more", "s4", "spt", [0.5, 0.51, 0.52])
    text = shown(tmp_path)
    assert (
        "**s4 gains by joint training**" in text
        and "**s4: no significant difference**: +0.0 points" in text
    )


def test_unequal_classes_are_judged_by_balanced_accuracy(tmp_path):
    """28:2, and every run but one learns the larger class: 93.3 % is no success."""
    majority = counts([28, 2], [30, 0], [28, 0]) | dict(test_examples=30)
    linear(tmp_path, 28 / 30, 28 / 30, **majority)
    trained(tmp_path, "s4", "scratch", [28 / 30] * 3, **majority)
    trained(
        tmp_path,
        "s4",
        "spt",
        [28 / 30] * 3,
        **counts([28, 2], [28, 2], [27, 1]) | dict(test_examples=30),
    )
    text = shown(tmp_path)
    assert "Classes are unequal, 14:1, so the score is balanced accuracy." in text
    assert "| *majority class* | 50.0 (93.3, 48.3) |" in text
    assert "| s4 | 50.0 ± 0.0 (93.3, 48.3) | 73.2 ± 0.0 (93.3, 73.2) |" in text
    assert "- **s4 from scratch predicts only one class** in 3 of 3 seeds." in text
    # Of two examples of a class one is found: sqrt(2/4 2/4 / 2 + 28/30 2/30 / 28) / 2 = 18.0 points
    # of error, one none from scratch: sqrt(1/4 3/4 / 2 + 29/30 1/30 / 28) / 2 = 15.5. With few
    # degrees of freedom, ±66.4 points together.
    assert "**s4: no significant difference**: +23.2 points" in text
    assert (
        "noise from 30 test examples reaches ±66.4 points, so more seeds would not settle it."
        in text
    )


def test_older_runs_have_no_balanced_accuracy_and_it_says_so(tmp_path):
    linear(tmp_path, 0.9, 0.9, **counts([900, 100], [950, 50], [880, 20]))
    trained(tmp_path, "s4", "scratch", [0.9] * 2)
    assert "counts per class were not kept" in shown(tmp_path)


def test_the_ceiling_is_named_and_no_seeds_are_asked_for(tmp_path):
    trained(tmp_path, "s4", "scratch", [1.0, 0.999])
    trained(tmp_path, "s4", "spt", [1.0, 1.0])
    text = shown(tmp_path)
    assert re.search(
        r"\*\*s4: no significant difference\*\*: \+0.. points.*; from scratch it is already at the "
        r"ceil",
        text,
    )
    trained(tmp_path, "s4", "joint", [0.6, 0.6])
    assert "**s4 loses by joint training**: -40.0 points" in shown(tmp_path)


def test_few_examples_make_no_ceiling(tmp_path):
    trained(tmp_path, "s4", "scratch", [8 / 9] * 2, test_examples=9)
    trained(tmp_path, "s4", "spt", [8 / 9] * 2, test_examples=9)
    text = shown(tmp_path)
    assert "ceiling" not in text and "**9 test examples decide nothing**" in text
    assert "+0.0 (2)" in text and "[" not in text.split("| s4 |")[1]


def test_everything_is_learned_where_two_examples_are_left(tmp_path):
    """Of 10,000 examples 150 are left to gain; of 9, two."""
    for start, score in (("scratch", 0.985), ("spt", 0.998)):
        trained(
            tmp_path, "s4", start, [score - 0.0002, score, score + 0.0002], test_examples=10_000
        )
    assert "**s4 gains by SPT**" in (text := shown(tmp_path)) and "at the ceiling" not in text


def test_a_score_within_the_noise_of_the_test_set_is_no_better_than_the_majority(tmp_path):
    """Of 1,000 examples 3.1 points are noise."""
    linear(tmp_path, 0.7, 0.5)
    trained(tmp_path, "s4", "scratch", [0.51, 0.52])
    trained(tmp_path, "rotary", "scratch", [0.51, 0.54])
    assert "Not significantly better than the majority class (50.0 %): s4 from scratch." in shown(
        tmp_path
    )


def test_one_seed_decides_nothing(tmp_path):
    linear(tmp_path, 0.6, 0.5)
    trained(tmp_path, "s4", "scratch", [0.5])
    trained(tmp_path, "s4", "spt", [0.9])
    text = shown(tmp_path)
    assert "- **s4: one seed** (+40.0 points), so significance is unknown." in text
    assert "It scores 90.0 % on test, the linear model 60.0 %; which is better is unknown." in text
    assert "ahead" not in text and "behind" not in text.lower()


@pytest.mark.parametrize("mean, deviation", [(1.0, 2.0), (0.4, 0.5), (3.0, 1.0)])
def test_the_seeds_that_would_decide_are_those_of_a_t_test(mean, deviation):
    needed = next(
        k
        for k in range(4, 100)
        if ttest_ind_from_stats(mean, deviation, k, 0, deviation, k).pvalue < 0.05
    )
    assert verdict.enough(mean, 0, [deviation**2] * 2, 3) == needed
    assert verdict.enough(mean, 0.5 * mean, [deviation**2] * 2, 3) >= needed
    assert verdict.enough(mean, 0, [1e9] * 2, 3) == "more than 100"


def test_shortened_runs_are_a_table_of_their_own(tmp_path):
    trained(tmp_path, "s4", "scratch", [0.5, 0.6])
    trained(tmp_path / "short", "s4", "scratch", [0.4, 0.5], steps=10, changed=dict(steps=10))
    text = shown(tmp_path)
    assert "**my.npz**" in text and "**my.npz, 10 passes per run**" in text


def test_the_figure_has_one_scale_of_gains_and_ends_behind_100(tmp_path):
    """No interval where there is one seed; R2 has a scale of its own."""
    import matplotlib.pyplot as plt

    linear(tmp_path, 0.77, 0.5)
    trained(tmp_path, "s4", "scratch", [0.9, 0.95, 0.97])
    trained(tmp_path, "s4", "spt", [0.99, 1.0, 1.0])
    trained(tmp_path / "one", "s4", "scratch", [0.5], task="file:one.npz")
    finished(tmp_path / "one", "pretrain", "s4", 0, dict(val_score=1), 100, 60, task="file:one.npz")
    finished(
        tmp_path / "one",
        "spt",
        "s4",
        0,
        0.6,
        100,
        60,
        task="file:one.npz",
        init="s4-pretrain-s0-None",
    )
    finished(tmp_path / "r2", "scratch", "s4", 0, dict(test_r2=0.5), 100, 60, task="file:r2.npz")
    found = comparisons.comparisons(load(tmp_path))
    axes = report.figure(plt, found)[0].axes
    lefts, rights = axes[::2], axes[1::2]
    titles = [axis.get_title(loc="left") for axis in lefts]
    by_title = dict(zip(titles, zip(lefts, rights)))
    (left, right), (_, alone), (r2, _) = (
        by_title[name] for name in ("my.npz", "one.npz", "r2.npz")
    )
    assert (
        left.get_xlim()[1] == 101
        and r2.get_xlim()[1] != 100
        and right.get_xlim() == alone.get_xlim()
    )
    bars = [container.has_xerr for axis in (right, alone) for container in axis.containers]
    assert bars == [True, False]
    across = {
        round(float(line.get_xdata()[0]), 1)
        for line in left.lines
        if len(set(line.get_xdata())) == 1
    }
    assert across >= {50.0, 77.0}
    plt.close("all")


# ---- Interpolation ------------------------------------------------------------------------------


def denoising(folder, val_score, changed=None):
    """Runs of one set, as kept: a linear model, and from scratch and with SPT, three seeds each,
    which improve in the last tenth if that seed is below 2 (from scratch) or 1 (SPT)."""
    common = dict(task="file:my.npz", steps=10, seconds=3.0, commit="abc", torch="2", device="CPU")
    common |= dict(objective="masked", changed={}, init=None, test_examples=200, val_accuracy=0.6)
    interpolated = dict(denoising=dict(interpolation=-0.1, mean=-1.0), constant_accuracy=0.5)
    lines = [
        common | dict(run="linear", model="linear", seed=0, start="baseline", test_accuracy=0.5)
    ]
    lines[0] |= interpolated | dict(evals=[])
    for seed, start in itertools.product(range(3), ("pretrain", "scratch", "spt")):
        best = {"scratch": 2, "spt": 1}.get(start, 0) > seed
        curve = zip((1, 5, 9, 10), [0.2, 0.5, 0.5, 0.6 if best else 0.5])
        line = common | dict(run=f"{start}{seed}", model="s4", seed=seed)
        line["evals"] = [dict(kind="eval", step=at, val_accuracy=score) for at, score in curve]
        if start == "pretrain":
            line |= dict(val_score=val_score, changed=changed or {})
            line |= dict(score_is="minus squared error on predicted samples")
        else:
            line |= dict(start=start, test_accuracy=0.5 + seed / 100)
            line |= dict(init=f"pretrain{seed}") if start == "spt" else {}
        lines.append(line)
    path = folder / "runs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = call("analyze.py", "own", path, "--figure", folder / "own.png")
    return " ".join(done.stdout.split())


def test_the_report_says_what_interpolation_explains_and_what_was_not_finished(tmp_path):
    """The interpolation's error is a tenth of the variance, a model's .05; from scratch, two of
    three seeds improve in the last tenth, after SPT one."""
    text = denoising(tmp_path, -0.05)
    explained = "explains 90.0 % of the variance of hidden samples (validation); s4 95.0 %."
    assert explained in text and "not learned more" not in text
    assert "**Still improving at the end**: s4 from scratch. Longer runs" in text
    none = "**Pretraining has not learned more than interpolation.**"
    assert none in denoising(tmp_path, -0.2)
    # hidden otherwise, errors say nothing beside each other
    assert "explains" not in denoising(tmp_path, -0.05, {"mask": 0.1})


@pytest.mark.parametrize("ragged", [False, True])
def test_interpolation_beside_a_plain_loop(ragged, tmp_path):
    """What baseline.py records: each hidden sample from the nearest visible ones of its series and
    channel, never from the padding of a shorter series, far from the values here."""
    rng = np.random.default_rng(0)
    x, y = 50 + rng.normal(size=(40, 12, 2)).cumsum(1), np.arange(40) % 2
    for i in range(40 * ragged):
        x[i, 4 + i % 9 :] = np.nan
    np.savez(tmp_path / "walk.npz", x=x, y=y)
    name = f"file:{tmp_path / 'walk.npz'}"
    for words in (
        ("data.py", "--task", name, "--data-dir", tmp_path / "data"),
        ("baseline.py", "--task", name, "--data-dir", tmp_path / "data", "--out", tmp_path / "out"),
    ):
        done = call(*words)
        assert not done.returncode, done.stderr
    task, _, val, _ = open_task(name, tmp_path / "data")
    series = val.batch(np.arange(len(val))).samples.numpy()  # (n, l, channels)
    ends = val.batch(np.arange(len(val))).lengths.tolist() if ragged else [12] * len(val)
    hidden = hide((len(val), task.length), task.mask, 0)[:, : series.shape[1]]
    hidden &= np.arange(series.shape[1]) < np.array(ends)[:, None]
    errors = []
    for i, t in zip(*np.nonzero(hidden)):
        left, right = (
            next((k for k in some if not hidden[i, k]), None)
            for some in (range(t, -1, -1), range(t, ends[i]))
        )
        for c in range(2):
            if left is None and right is None:
                guess = 0.0
            elif left is None or right is None:
                guess = series[i, right if left is None else left, c]
            else:
                share = (t - left) / (right - left)
                guess = (1 - share) * series[i, left, c] + share * series[i, right, c]
            errors.append((series[i, t, c] - guess) ** 2)
    found = json.loads((tmp_path / "out" / "result.json").read_text())
    assert found["denoising"]["interpolation"] == pytest.approx(-np.mean(errors), rel=1e-5)
    assert found["denoising"]["mean"] == pytest.approx(-np.square(series[hidden]).mean(), rel=1e-5)
    assert (found["length"], found["classes"]) == (12, 2)
