"""baseline.py: features beside plain loops, tasks with a known answer, which run is finished."""

import json

import numpy as np
import pytest
import torch
from conftest import ROOT, call, result_of

import baseline
import data
from files import UserError
from pretrain import hide


def prepared(folder, share=None, **arrays):
    """task, train, val, test of a set with these arrays."""
    np.savez(folder / "my.npz", **arrays)
    path = f"file:{folder / 'my.npz'}"
    data.open_task(path, folder / "data", labels=True)
    return data.open_task(path, folder / "data", None, share)


def run(folder, *words, task=None):
    """Run baseline.py on my.npz, or on another task -> what it prints, and result.json."""
    task = task or f"file:{folder / 'my.npz'}"
    words = "--task", task, "--data-dir", folder / "data", "--out", folder / "out", *words
    done = call("baseline.py", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout, result_of(folder / "out")


def kinds(n=400):
    """{kind: arrays of a set whose answer n-grams or convolutions know}."""
    rng, y = np.random.default_rng(0), np.arange(n) % 3
    words = rng.integers(0, 20, (n, 30))
    words[np.arange(n), 5 + rng.integers(0, 20, n)] = 20 + y
    waves = np.sin(np.arange(60) * np.array([0.2, 0.5, 1.1])[y][:, None] + 6 * rng.random((n, 1)))
    waves += 0.3 * rng.standard_normal((n, 60))
    ragged, half = waves.copy(), np.where(rng.random(n) < 0.5, y, np.nan)
    ragged[::3, 40:] = np.nan
    letters = np.array(["".join(map(chr, 97 + line)) for line in words])
    numbers = np.array([0.5, 1, 2])[y] + 0.01 * rng.standard_normal(n)
    return {
        "symbols": dict(x=words, y=y),
        "ragged": dict(x=ragged, y=y),
        "texts": dict(x=letters, y=np.array([*"abc"])[y]),
        "unlabelled": dict(x=np.stack([waves, waves[::-1]], 2), y=half),
        "numbers": dict(x=waves, y=numbers),
    }


# ---- Features ------------------------------------------------------------------------------------

# With --words, case does not count, punctuation does, and neither blanks nor special symbols do.
WORDS = {
    "A fine, fine film.": ["a", "fine", ",", "fine", "film", "."],
    "a FINE  film": ["a", "fine", "film"],
    "Not a film!": ["not", "a", "film", "!"],
    "<eos> don't": ["<", "eos", ">", "don", "'", "t"],
    "fine": ["fine"],
}


@pytest.mark.parametrize("words", [False, True])
def test_rows_share_as_many_features_as_their_texts_share_ngrams(words, tmp_path):
    x = np.array([*(WORDS if words else ("abcabc", "bcab", "xyz", "aaaaaa", "cab"))] * 8)
    task, train, *_ = prepared(tmp_path, x=x, y=np.arange(40) % 2)
    texts = [tuple(WORDS[x[i]] if words else (*x[i], "end")) for i in train.rows]
    longest = 2 if words else 5
    sets = [
        {text[i : i + n] for n in range(1, longest + 1) for i in range(len(text) - n + 1)}
        for text in texts
    ]
    features = baseline.ngrams(task, train, words)
    shared = [[len(row & other) for other in sets] for row in sets]
    assert (features @ features.T).toarray().tolist() == shared


@pytest.mark.parametrize("channels, ragged", [(3, False), (2, True)])
def test_random_convolutions_are_those_of_a_plain_loop(channels, ragged, tmp_path):
    x = np.random.default_rng(1).standard_normal((30, 40, channels))
    x[::2, 25 if ragged else 40 :] = np.nan
    task, train, *_ = prepared(tmp_path, x=x, y=np.arange(30) % 2)
    features, column = baseline.convolved(task, train), 0
    batch = train.batch(np.arange(len(train)))
    i = int(np.argmin(batch.lengths)) if ragged else 3
    length, series = batch.lengths[i] if ragged else 40, torch.zeros(40, channels)
    series[:length] = batch.samples[i, :length]
    kernels = baseline.random_kernels(40, channels)
    count = sum(len(biases) for _, biases, _, _ in kernels)
    assert count == baseline.KERNELS == features.shape[1] // 2
    for weights, biases, dilation, padding in kernels:
        assert torch.allclose(weights.sum(2), torch.zeros(()), atol=1e-5)
        edge, width = torch.zeros(padding, channels), weights.shape[2]
        padded = torch.cat([edge, series, edge])
        assert padding == 0 or padding == dilation * (width - 1) // 2
        values = [
            float(biases[0])
            + sum(float(weights[0, :, j] @ padded[t + j * dilation]) for j in range(width))
            for t in range(len(padded) - dilation * (width - 1))
        ]
        assert features[i, column] == pytest.approx(max(values), abs=1e-4)
        share = sum(value > 0 for value in values) / len(values)
        place = column + len(biases)
        assert features[i, place] == pytest.approx(share, abs=1.01 / len(values))
        column += 2 * len(biases)


@pytest.mark.parametrize("ragged", [False, True])
def test_interpolation_is_that_of_a_plain_loop(ragged, tmp_path):
    """Each hidden sample from the nearest visible ones of its series and channel, never from the
    padding of a shorter series, far from the values here."""
    rng = np.random.default_rng(0)
    x = 50 + rng.normal(size=(40, 12, 2)).cumsum(1)
    for i in range(40 * ragged):
        x[i, 4 + i % 9 :] = np.nan
    task, _, val, _ = prepared(tmp_path, x=x, y=np.arange(40) % 2)
    batch = val.batch(np.arange(len(val)))
    series = batch.samples.numpy()  # (n, l, channels)
    ends = batch.lengths.tolist() if ragged else [12] * len(val)
    hidden = hide((len(val), task.length), task.mask, 0)[:, : series.shape[1]]
    hidden &= np.arange(series.shape[1]) < np.array(ends)[:, None]
    errors = []
    for i in range(len(val)):
        visible = np.flatnonzero(~hidden[i, : ends[i]])
        for t, c in np.argwhere(hidden[i][:, None] & np.ones(2, bool)):
            guess = np.interp(t, visible, series[i, visible, c]) if len(visible) else 0.0
            errors.append((series[i, t, c] - guess) ** 2)
    record = run(tmp_path)[1]
    scores = dict(interpolation=-np.mean(errors), mean=-np.square(series[hidden]).mean())
    assert record["denoising"] == pytest.approx(scores, rel=1e-5)
    assert (record["length"], record["classes"]) == (12, 2)


# ---- Fitting -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", kinds())
def test_it_finds_what_is_there_and_says_so(kind, tmp_path):
    np.savez(tmp_path / "my.npz", **kinds()[kind])
    task, score = f"file:{tmp_path / 'my.npz'}", "r2" if kind == "numbers" else "accuracy"
    data.prepare(task, tmp_path / "data", regression=kind == "numbers")
    text, record = run(tmp_path)
    assert record[f"test_{score}"] > 0.9 and record[f"constant_{score}"] < 0.45
    assert record["start"] == "baseline" and f"{record[f'test_{score}']:.4f}" in text
    if kind != "numbers":
        share = record["counts"]["labels"][0] / record["test_examples"]
        assert record["constant_accuracy"] == share
    assert kind != "unlabelled" or record["train_examples"] == record["data"]["labelled"] < 200


def test_words_are_another_model_of_texts_only(tmp_path):
    """It is fitted in a folder where characters were, and says which regularisation was chosen."""
    rng, good = np.random.default_rng(0), np.arange(200) % 2
    lines = [" ".join(rng.permutation([*"abcdefg", ("dull", "fun")[label]])) for label in good]
    np.savez(tmp_path / "my.npz", x=np.array(lines), y=good)
    for words, model in (((), "n-grams of 1 to 5"), (["--words"], "words and pairs of words")):
        text, record = run(tmp_path, *words)
        assert record["model"] == model and record["test_accuracy"] == 1
        assert f"{model}: 1.0000 (validation 1.0000, {record['regularisation']})" in text
    np.savez(tmp_path / "my.npz", **kinds()["symbols"])  # of more than one letter
    words = "--task", f"file:{tmp_path / 'my.npz'}", "--data-dir", str(tmp_path / "other")
    with pytest.raises(UserError, match="--words is for texts"):
        baseline.main([*words, "--words"])


def test_a_share_of_the_labels_is_that_of_finetuning(tmp_path):
    arrays = kinds()["symbols"]
    task, whole, *_ = prepared(tmp_path, **arrays)
    task, train, val, test = prepared(tmp_path, 0.1, **arrays)
    features = baseline.ngrams(task, whole)[train.chosen]
    assert (baseline.ngrams(task, train) != features).nnz == 0 and len(train) == 28
    _, _, predictions, _ = baseline.fit(task, train, val, test)
    assert len(predictions["test"]) == len(test)


class Always:
    """A fitted model with these predictions of validation, then of the test split."""

    def __init__(self, *predictions):
        self.predict, self.fit = lambda x, left=[*predictions]: left.pop(0), lambda x, y: None


@pytest.mark.parametrize("share, wanted", [(5, "careful"), (2, "bold")])
def test_unequal_classes_choose_by_balanced_accuracy(share, wanted, monkeypatch, tmp_path):
    """4:1, where "careful" finds half of the smaller class at the cost of more mistakes; 1:1 by
    accuracy. The majority class is that of training."""
    y = np.where(np.arange(400) % share == 0, 0, 1)
    task, *splits = prepared(tmp_path, x=np.random.default_rng(0).standard_normal((400, 9)), y=y)
    val, test = splits[1].y, np.zeros(len(splits[2]), int)
    half, careful = np.flatnonzero(val == 0)[::2], np.ones_like(val)
    careful[[*half, *np.flatnonzero(val == 1)[: len(half) + 2]]] = 0
    models = dict(bold=Always(np.ones_like(val), test), careful=Always(careful, test))
    monkeypatch.setattr(baseline, "linear_models", lambda task: models)
    strength, _, predictions, kind = baseline.fit(task, *splits)
    balanced = "balanced_accuracy" in kind.scores(val, predictions["val"])
    assert strength == wanted and balanced == (share == 5)
    assert share == 2 or set(predictions["constant"]) == {1}


def test_finished_is_only_what_has_the_same_flags(tmp_path):
    """Another share or draw of the labels, another task with the same data, and back again."""
    unequal = np.minimum(np.arange(400) % 6, 2)
    np.savez(tmp_path / "my.npz", **kinds()["numbers"] | dict(y=unequal))
    errors, few = set(), ("--labels-per-class", 4)
    cases = ((), 280), (("--label-fraction", 0.1), 28), (few, 12), ((*few, "--seed", 1), 12)
    for share, n in (*cases, cases[0]):
        for again in False, True:
            text, record = run(tmp_path, *share)
            assert ("is finished" in text) == again
            assert record["train_examples"] == n and record["constant_accuracy"] > 0.6
            errors |= {*record["denoising"].items()}  # of all validation examples
    assert len(errors) == 2
    for task in "listops_demo", "listops_mini":
        data.prepare(task, tmp_path / "data", sizes=(40, 20, 20), workers=1)
        assert run(tmp_path, task=task)[1]["task"] == task


def test_the_page_of_full_length_shows_its_records():
    """A row of results/linear.md per record: what was chosen, scores, their error."""
    page, records = (
        (ROOT / "results" / f"linear.{suffix}").read_text(encoding="utf-8").splitlines()
        for suffix in ("md", "jsonl")
    )
    rows = [[cell.strip("* ") for cell in line.split("|")] for line in page if line[:3] == "| `"]
    for row, record in zip(rows, map(json.loads, records), strict=True):
        score, seconds = 100 * record["test_accuracy"], round(record["seconds"])
        error = (score * (100 - score) / record["test_examples"]) ** 0.5
        numbers = [100 * record["val_accuracy"], score, error, seconds]
        assert row[3] == record["regularisation"], row
        assert [*map(float, row[4:8])] == pytest.approx(numbers, abs=0.0051), row
        assert row[1].startswith(f"`{record['task'].split('_')[0]}`"), row
        assert record["model"].split()[-1] in row[2], row
