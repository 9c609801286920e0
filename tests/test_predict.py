"""predict.py: a checkpoint stands alone, and predicts of a sequence what its own training run
predicted; so does an export, without this repository."""

import base64
import csv
import functools
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, made_set, result_of
from matplotlib.figure import Figure
from sklearn import metrics

import data
import finetune
import predict
import pretrain
from engine.targets import KINDS
from files import UserError
from own.columns import Examples
from own.task import ended
from tasks.cifar import GREY
from tasks.picture import draw_example
from use import export as export_py
from use.export import export
from use.label import class_labels, held_out_examples, new_examples, quality
from use.pretrained import filled_in

# inputs: kind of target and model. Every kind, and every shape of model: kernel, attention,
# recurrence, scan, blocks of attention.
SETS = dict(
    texts=("class", "s4"),
    integers=("positions", "rotary"),
    ragged=("labels", "lstm"),
    gaps=("class", "lru"),
    fixed=("number", "bigbird"),
)
STARTS = "scratch", "spt", "joint", "probe", "bfloat16"
SCORES = dict(
    number=metrics.r2_score,
    labels=functools.partial(metrics.f1_score, average="micro", zero_division=0),
    positions=lambda y, guess: metrics.accuracy_score(y[y >= 0], guess[y >= 0]),
)
STEPS = ["--steps", "2", "--eval-every", "2", "--warmup", "1", "--batch", "8", "--lr", "0.05"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(inputs, start) -> the made set and the directory of a run on it. start: `pretrain`,
    from which `spt` and `probe` start, or one of STARTS. Prepared data are in `trained.data`."""
    folder = tmp_path_factory.mktemp("predict")

    @functools.cache
    def prepared(inputs):
        own = made_set(folder, inputs, SETS[inputs][0], name=inputs)
        if inputs == "fixed":  # seconds since 1970, in which float32 has one number for 128 seconds
            own.y += 1.7e9
            np.savez(own.path, x=own.x, y=own.y)
        assert data.main(["--task", own.task, *own.flags, "--data-dir", str(train.data)]) == 0
        return own

    def train(inputs, start, objective="masked"):
        own, out = prepared(inputs), folder / f"{inputs}-{start}-{objective}"
        if out.exists():
            return own, out
        words = [*STEPS, "--data-dir", str(train.data), "--out", str(out)]
        if start in ("spt", "probe"):
            words += ["--init", str(train(inputs, "pretrain")[1])]
            finetune.main([*words, "--freeze"] if start == "probe" else words)
        else:
            words += ["--task", own.task, "--model", SETS[inputs][1], "--objective", objective]
            words += ["--arch", "layers=1,d=16"]
            words += dict(joint=["--joint", "1"], bfloat16=["--dtype", start]).get(start, [])
            (pretrain if start == "pretrain" else finetune).main(words)
        return own, out

    train.data = folder / "data"
    return train


def table(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def close(numbers, others):
    """Seconds, on a machine with other rounding."""
    return np.asarray(numbers, float) == pytest.approx(np.asarray(others, float), abs=1e-3, rel=0)


def as_printed(kind, names, y):
    """Targets as predictions.csv prints them."""
    if kind == "labels":
        return [";".join(names[row == 1]) for row in y]
    return ["" if label < 0 else names[label] for label in y.astype(int)]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("inputs", SETS)
def test_predictions_are_the_runs_own_with_its_data_and_without(
    inputs, start, trained, tmp_path, monkeypatch
):
    """On the test split; on a file of the same sequences, by a copy of the run without data."""
    (own, out), kind = trained(inputs, start), SETS[inputs][0]
    result = result_of(out)
    monkeypatch.chdir(tmp_path)
    predict.main([str(out), "--out", "own.csv", "--data-dir", str(trained.data)])
    lines = table("own.csv")
    labels, guesses = (np.array([line[key] for line in lines]) for key in ("label", "prediction"))
    shutil.copytree(out, "copy")
    model = predict.load("copy", trained.data)
    names = model.names
    rows = [int(line["row"]) for line in lines]
    examples = [*dict.fromkeys(rows)]  # rows of the file, once each
    at = np.array([examples.index(row) for row in rows])  # of each line: its example
    if kind == "positions":
        at = at, np.array([int(line["position"]) for line in lines])

    # the labels are the file's, and the record has both sides, their score and loss
    y = own.y[examples][at]
    if kind == "number":
        assert close(labels, y)
    else:
        assert labels.tolist() == [*(y if kind == "class" else as_printed(kind, names, y))]
    with np.load(out / "predictions.npz") as kept:
        y, guess = kept["y"], kept["prediction"]
    for side, printed in ((y, labels), (guess, guesses)):
        if kind == "number":  # in the unit of the loss
            assert np.corrcoef(side, printed.astype(float))[0, 1] > 1 - 1e-9
        else:
            assert as_printed(kind, names, side[at]) == printed.tolist()
    assert len(examples) == len(y) == result["test_examples"]
    score = SCORES.get(kind, metrics.accuracy_score)(y, guess)
    assert score == pytest.approx(result[f"test_{KINDS[kind].score}"], abs=1e-6)
    test, *_ = held_out_examples(model)
    targets, outputs = test.batch(np.arange(len(y))).y, torch.from_numpy(model.outputs(test))
    outputs = outputs[:, : targets.shape[1]] if targets.ndim > 1 else outputs
    loss = KINDS[kind].loss(outputs, targets) / len(y)
    assert loss.item() == pytest.approx(result["test_loss"], rel=1e-6)
    if kind == "class":
        right = (labels == guesses)[np.argsort(labels, kind="stable")]
        assert result["right"] == base64.b64encode(np.packbits(right)).decode()
        sides = dict(labels=labels, predicted=guesses, right=labels[labels == guesses])
        for key, side in sides.items():
            assert result["counts"][key] == [np.sum(side == name) for name in names], key

    # without the data the predictions are the same
    np.savez("new.npz", x=own.x[examples])
    predict.main(["copy", "--input", "new.npz"])
    again = table("predictions.csv")
    assert [examples[int(line["row"])] for line in again] == rows
    answers, probabilities = model(own.x[examples])
    for values in ([line["prediction"] for line in again], answers[at].astype(str).tolist()):
        assert close(values, guesses) if kind == "number" else values == guesses.tolist()
    for i, name in enumerate(names):
        for printed in (lines, again):
            printed = [float(line[f"p({name})"]) for line in printed]
            assert np.allclose(probabilities[..., i][at], printed, atol=1e-5), name

    # features are what the head reads
    predict.main(["copy", "--input", "new.npz", "--features", "f.npy"])
    features, outputs = np.load("f.npy"), model.outputs(model.encoded(own.x[examples]))
    with torch.no_grad():
        again = model.model.head(torch.from_numpy(features)).numpy()
    assert features.dtype == np.float32
    assert np.allclose(again[at], outputs[at], atol=1e-4)


# ---- Exports -------------------------------------------------------------------------------------


def test_an_export_predicts_the_same_in_a_program_without_this_repository(trained, tmp_path):
    """By the lines of results/own.md; in ONNX, where it is installed."""
    page = (ROOT / "results" / "own.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    code = next(block for block in blocks if "model.pt2" in block)
    onnx = all(map(importlib.util.find_spec, ("onnx", "onnxscript", "onnxruntime")))
    models = {}
    for inputs, start in zip(SETS, (*STARTS[:4], "scratch")):
        own, out = trained(inputs, start)
        model, x = models[inputs] = predict.load(out), own.x[:5]
        (tmp_path / inputs).mkdir()
        export(model, tmp_path / inputs / "model.pt2")
        if onnx and inputs != "gaps":  # lru has an operation that ONNX lacks
            export(model, tmp_path / inputs / "model.onnx")  # compares before it writes
        given = [*x] if inputs == "texts" else [ended(series).tolist() for series in x]
        if inputs == "integers":
            given = [" ".join(map(str, symbols)) for symbols in given]
        (tmp_path / inputs / "given.json").write_text(json.dumps(given))
    code += 'answers = (of_texts if task["ids"] else of_series)(json.load(open("given.json")))\n'
    code += 'json.dump([task["names"], answers.tolist()], open("answers.json", "w"))\n'
    program = f"import os\nfor name in {[*models]}:\n    os.chdir(name)\n"
    program += textwrap.indent(code, "    ") + '    os.chdir("..")\n'
    (tmp_path / "use.py").write_text(program, encoding="utf-8")
    words = [sys.executable, "-I", "use.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for inputs, (model, x) in models.items():
        names, theirs = json.loads((tmp_path / inputs / "answers.json").read_text())
        theirs, (ours, probabilities) = np.array(theirs), model(x)
        assert names == model.names.tolist(), inputs
        if inputs == "fixed":
            assert close(theirs[:, 0], ours) and len({*ours}) == 5
            continue
        real = np.nonzero(x >= 0) if inputs == "integers" else ...  # positions of a sequence
        assert np.allclose(theirs[real], probabilities[real], atol=1e-5), inputs


@pytest.fixture
def untraced(monkeypatch):
    """Exports are modules, which saves the seconds of a trace; `off` is added to what they give.
    Past the end of a sequence they are given what is no symbol."""
    state = SimpleNamespace(off=0.0)

    def written(program, description):
        def run(x, *lengths):
            for row, length in zip(x, *lengths or [()]):
                row[length:] = 99
            return program(x, *lengths) + state.off

        return description.encode(), run

    monkeypatch.setattr(torch.export, "export", lambda module, *more, **dims: module)
    monkeypatch.setitem(export_py.FORMATS, ".pt2", written)
    return state


@pytest.mark.parametrize("inputs", SETS)
def test_an_export_that_is_off_is_not_written(inputs, trained, untraced, tmp_path):
    """Its check draws lengths, and computes in float32 in any run."""
    model = predict.load(trained(inputs, "bfloat16")[1])
    export(model, tmp_path / "right.pt2")
    assert json.loads((tmp_path / "right.pt2").read_bytes())["target"] == SETS[inputs][0]
    untraced.off = 1e-4 * np.ptp(model.task.ends or (0, 1))
    with pytest.raises(UserError, match="differs from the model"):
        export(model, tmp_path / "off.pt2")
    assert not (tmp_path / "off.pt2").exists() and model.dtype == "bfloat16"


def test_a_task_of_images_reads_images_of_any_shape_and_type(untraced, monkeypatch, tmp_path):
    """As pixels, and as gray levels that are symbols."""
    monkeypatch.chdir(tmp_path)
    data.prepare("pathfinder_demo", sizes=(16, 8, 8), workers=1)
    images = data.open_task("pathfinder_demo")[3].x[:].astype(np.int64)  # (8, 196, 1)
    for name in ("transformer", "s4"):
        words = ["--task", "pathfinder_demo", "--model", name, "--arch", "layers=1"]
        finetune.main([*words, *STEPS, "--out", name])
        predict.main([name])
        wanted = table("predictions.csv")
        for x in (images.reshape(8, 14, 14), images.reshape(8, 196), images.astype(float)):
            np.savez("images.npz", x=x)
            predict.main([name, "--input", "images.npz"])
            for line, new in zip(wanted, table("predictions.csv"), strict=True):
                assert line == new | dict(label=line["label"]), x.shape
        predict.main([name, "--export", "model.pt2"])


# ---- What people hold ----------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", SETS)
def test_one_sequence_or_many_are_read_and_what_is_none_is_refused(inputs, trained):
    own, out = trained(inputs, "scratch")
    model, x = predict.load(out), own.x[:3]
    wanted = model.outputs(model.encoded(x))
    for many in ([*x], iter(x), (sequence for sequence in x)):
        assert np.allclose(model.outputs(model.encoded(many)), wanted, atol=1e-6)
    first = x[0][:, 0] if inputs == "fixed" else x[0]
    for single in (first, first if inputs == "texts" else first.tolist()):
        assert np.allclose(model.outputs(model.encoded(single)), wanted[:1], atol=1e-5)
    if inputs == "texts":  # what is unknown is read, what is too long is cut
        assert model.encoded(["a\u2603" * 9]).lengths().tolist() == [model.task.length]
    strange = [5, None, [None], [b"ab"], [[[1], 2]], [{"a": 1}], np.array(["2020"], "M8[D]")]
    if inputs in ("ragged", "gaps"):
        strange.append(x.transpose(0, 2, 1))  # channels come last
    for sequences in strange:
        with pytest.raises(UserError):
            model(sequences)


def test_a_label_is_the_class_of_its_name_or_else_the_only_one_of_its_number():
    """Whether a file holds texts, whole numbers or floats."""
    numbers = {"01": 1, "1": 1, "1.0": 1, "2": 2, "3": 3, "3.50": 3.5}  # others have none
    rng = np.random.default_rng(0)
    for _ in range(50):
        names = rng.choice([*numbers, "a", "2020-01-01"], 3, replace=False)
        model = SimpleNamespace(names=names, task=SimpleNamespace(own=True, channels=1), run="")
        for labels in ([*numbers, "a", "2020-01-01"], [1, 2, 7], [1.0, 2.0, 3.5]):
            wanted = []
            for label in labels:
                number = numbers.get(label) if isinstance(label, str) else label
                same = [name for name in names if number and numbers.get(name) == number]
                only = same[0] if len(same) == 1 else str(label)
                wanted.append(str(label) if str(label) in names else only)
            contents = Examples([], np.array(labels), np.ones(len(labels), bool), None)
            assert class_labels(model, "", contents).tolist() == wanted, (names, labels)
            contents = contents._replace(has_label=~contents.has_label)
            assert not any(class_labels(model, "", contents))


def test_the_test_split_is_that_of_the_run_or_none(trained, tmp_path):
    own, out = trained("texts", "scratch")
    data.prepare(own.task, tmp_path, seed=1)
    with pytest.raises(UserError, match="was trained on .*'seed': 0.* holds .*'seed': 1"):
        predict.main([str(out), "--data-dir", str(tmp_path), "--out", str(tmp_path / "p.csv")])
    assert not (tmp_path / "p.csv").exists()


def test_printed_scores_are_their_definitions():
    """Over the classes that some label has."""
    names = np.array([*"abcd"])
    for seed in range(30):
        rng = np.random.default_rng(seed)
        y, guess = rng.choice(names[: 2 + seed % 3], 12), rng.choice(names, 12)
        recalls, f1 = [], []
        for name in {*y}:
            right, either = ((y == name) & (guess == name)).sum(), (y == name).sum()
            recalls.append(right / either)
            f1.append(2 * right / (either + (guess == name).sum()))
        wanted = [np.mean(y == guess), np.mean(recalls), np.mean(f1)]
        lines = [*quality("class", np.append(y, ["", "?"]), np.append(guess, [*"aa"]), names)]
        line = next(line for line in lines if line.startswith("12 labels:"))
        assert [*map(float, re.findall(r"\d\.\d+", line))] == pytest.approx(wanted, abs=6e-5)
        y, guess = rng.normal(size=(2, 9))
        error = np.square(y - guess)
        wanted = [1 - error.sum() / np.square(y - y.mean()).sum(), np.sqrt(error.mean())]
        (line,) = quality("number", np.append(y, np.nan), np.append(guess, 9), names)
        assert [*map(float, re.findall(r"-?\d+\.\d+", line))] == pytest.approx(wanted, rel=1e-3)


def test_features_of_a_pair_are_those_of_its_documents_side_by_side(tmp_path, monkeypatch):
    """Means over positions. One pair given flat is an error."""
    monkeypatch.chdir(tmp_path)
    texts = [f"{i % 2}\tA\tB\t{'ab' * (i % 5 + 1)}\t{'ba' * (i % 3 + 1)}\n" for i in range(20)]
    for split in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{split}.tsv").write_text("".join(texts))
    data.prepare("retrieval", sizes=(20, 20, 10), raw=".")
    words = ["--task", "retrieval", "--model", "s4", "--arch", "layers=1,d=8,n_ssm=1"]
    pretrain.main([*words, *STEPS, "--out", "run"])
    (tmp_path / "new.tsv").write_text("1\tab\tba\n0\tabab\tb\n")
    predict.main(["run", "--features", "own.npy"])
    predict.main(["run", "--features", "new.npy", "--input", "new.tsv"])
    assert np.load("own.npy").shape == (10, 16)
    model = predict.load("run")
    batch = model.encoded([("ab", "ba"), ("abab", "b")]).batch(np.arange(2))
    states = model.model.backbone(batch.symbols, batch.lengths).detach()
    means = [vectors[:n].mean(0) for vectors, n in zip(states, batch.lengths)]
    assert np.allclose(np.load("new.npy"), torch.stack(means).view(2, 16), atol=1e-5)
    (tmp_path / "flat.txt").write_text("ab\nba\n")
    for x in (("ab", "ba"), "ab", [("ab", "ba", "a")], [("ab",)], [3], 3, [(1, 2)]):
        with pytest.raises(UserError, match="give a list of pairs|neither a text nor an array"):
            model.encoded(x)
    with pytest.raises(UserError, match="flat.txt, example 0: it is no pair"):
        new_examples(model, "flat.txt")


# ---- What a pretrained run fills in --------------------------------------------------------------


@pytest.mark.parametrize("objective", pretrain.OBJECTIVES)
@pytest.mark.parametrize("inputs", ["texts", "integers", "ragged", "gaps"])
def test_what_a_pretrained_run_fills_in_is_wrong_where_it_is_off(inputs, objective, trained):
    """By half a standard deviation, or another symbol. Causally all is filled in but the first."""
    own, run = trained(inputs, "pretrain", objective)
    model = predict.load(run)
    batch = model.encoded(own.x[:8]).batch(np.arange(8))
    hidden, guess, wrong = filled_in(model, batch)
    if batch.samples is None:
        off, whole = guess != batch.symbols.numpy(), ...
    else:
        truth = batch.samples.numpy()
        off, whole = (np.abs(guess - truth) > 0.5).any(-1), ~np.isnan(truth).any(-1)
    assert np.array_equal(wrong[whole], (hidden & off)[whole])
    assert guess[hidden].any() and not guess[~hidden].any()
    t = np.arange(hidden.shape[1])
    if objective == "causal":
        assert np.array_equal(hidden, (t > 0) & (t < batch.lengths[:, None].numpy()))


def test_what_is_filled_in_is_drawn(trained, tmp_path):
    own, run = trained("gaps", "pretrain")
    predict.main([str(run), "--show", str(tmp_path / "a.png"), "--input", str(own.path)])
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_only_pixels_that_are_filled_in_wrong_are_orange():
    task = data.replace(GREY, length=16, side=4, mask=0.5)
    black = torch.full((1, 16, 1), -task.mean / task.std)
    batch = data.Batch(torch.zeros(1, 16).long(), black, None, torch.zeros(1))
    hidden, wrong = np.arange(16) < 8, np.arange(16) < 3
    guess = (np.where(wrong, 1, 0)[:, None] - task.mean) / task.std
    axis = Figure().subplots()
    draw_example(axis, task, batch, 0, hidden, guess, wrong)
    pixels = axis.images[0].get_array().reshape(16, 3)
    assert np.allclose(pixels[:3], (0.84, 0.37, 0)) and np.allclose(pixels[3:], 0, atol=1e-6)
