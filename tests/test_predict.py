"""predict.py: a checkpoint stands alone, and says of a sequence what its own training run said."""

import base64
import csv
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, alike
from matplotlib.figure import Figure
from sklearn.metrics import balanced_accuracy_score

import data
import finetune
import predict
import pretrain
from engine.targets import KINDS as TARGETS
from files import UserError
from kernels import inside
from models import MODELS, Backbone, Classifier, config
from own.task import FILE, encode, ended, read_own
from recipes import arch
from tasks import SPECIAL, TASKS
from tasks.cifar import GREY
from tasks.picture import draw_example
from use.export import ExportedModel, export
from use.label import held_out_examples, new_examples, quality
from use.pretrained import filled_in

N = 60
SHORT = "--model", "s4", "--steps", "2", "--eval-every", "2"


def sets(folder):
    """{kind: (sequences as predict.py reads them, labels, flags of data.py)} and a file of each."""
    rng, y = np.random.default_rng(0), np.tile(["no", "yes"], N // 2)
    lengths = rng.integers(3, 9, N)
    ragged = rng.normal(3, 5, (N, 8, 2))
    ragged[np.arange(8) >= lengths[:, None]] = np.nan
    integers = rng.choice([0, 3, 70_000], (N, 6))
    integers[np.arange(6) >= lengths[:, None]] = -1
    texts = np.array(["".join(rng.choice([*"abc é"], length)) for length in lengths])
    fixed = 52.520008 + 1e-5 * np.sin(np.arange(8) * rng.uniform(0.5, 1.5, (N, 1)))
    found = dict(
        texts=(texts, y),
        integers=(integers, y),
        ragged=(ragged, y),
        fixed=(fixed, y),
        numbers=(fixed, rng.normal(100, 20, N)),
    )
    for kind, (x, y) in found.items():
        np.savez(folder / f"{kind}.npz", x=x, y=y)
        data.prepare(
            f"file:{folder / kind}.npz", folder / "data", regression=kind == "numbers" or None
        )
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with these sets, and trained(kind, start, objective, model) -> the directory of a
    run of two steps."""
    folder = tmp_path_factory.mktemp("predict")
    found = sets(folder)

    def train(kind, start, objective="masked", model="s4"):
        out = folder / f"{kind}-{start}-{objective}-{model}"
        if out.exists():
            return out
        words = [
            "--task",
            f"file:{folder / kind}.npz",
            "--model",
            model,
            "--objective",
            objective,
            "--steps",
            "2",
            "--eval-every",
            "2",
            "--warmup",
            "1",
            "--data-dir",
            str(folder / "data"),
        ]
        if start == "spt":
            pretrain.main([*words, "--out", f"{out}-pre"])
            words = ["--init", f"{out}-pre", *words[6:]]
        finetune.main([*words, *["--joint", "1"] * (start == "joint"), "--out", str(out)])
        return out

    return folder, found, train


def table(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


KINDS = "texts", "integers", "ragged", "fixed", "numbers"


@pytest.mark.parametrize(
    "kind, start, objective, model",
    [
        *((kind, start, "masked", "s4") for kind in KINDS for start in ("scratch", "spt", "joint")),
        *(
            (kind, "spt", "causal", model)
            for kind in ("texts", "ragged")
            for model in ("rotary", "s4")
        ),
        ("texts", "scratch", "masked", "bigbird"),
    ],
)
def test_predictions_are_the_runs_own_with_its_data_and_without(
    kind, start, objective, model, trained, monkeypatch, tmp_path
):
    """On the test split; and on a file of the same sequences, from a copy of the run far from any
    prepared data."""
    folder, found, train = trained
    out, (x, y) = train(kind, start, objective, model), found[kind]
    result = json.loads((out / "result.json").read_text())
    predict.main([str(out), "--out", str(tmp_path / "own.csv"), "--data-dir", str(folder / "data")])
    own = table(tmp_path / "own.csv")
    rows = [int(line["row"]) for line in own]
    assert (
        len(own) == result["test_examples"]
        and [line["label"] for line in own] == [str(y[row]) for row in rows]
        or (kind == "numbers" and np.allclose([float(line["label"]) for line in own], y[rows]))
    )
    if kind == "numbers":
        guess = np.array([float(line["prediction"]) for line in own])
        with np.load(out / "predictions.npz") as kept:  # both in the unit of the loss
            assert (
                np.corrcoef(kept["prediction"], guess)[0, 1]
                > 1 - 1e-9
                < np.corrcoef(kept["y"], y[rows])[0, 1]
            )
        r2 = 1 - np.square(guess - y[rows]).sum() / np.square(y[rows] - y[rows].mean()).sum()
        assert r2 == pytest.approx(result["test_r2"], abs=1e-6)
    else:
        assert (
            sum(line["label"] == line["prediction"] for line in own) / len(own)
            == result["test_accuracy"]
        )
        pairs = [(line["label"], line["prediction"]) for line in own]
        with np.load(out / "predictions.npz") as kept:
            named = (["no", "yes"][int(c)] for name in ("y", "prediction") for c in kept[name])
            assert [*named] == [one for side in zip(*pairs) for one in side]
        bits = [label == guess for label, guess in sorted(pairs, key=lambda pair: pair[0])]
        assert result["right"] == base64.b64encode(np.packbits(bits)).decode()
        assert result["counts"] == {
            name: [*map(count, ("no", "yes"))]
            for name, count in (
                ("labels", lambda one: sum(label == one for label, _ in pairs)),
                ("predicted", lambda one: sum(guess == one for _, guess in pairs)),
                ("right", lambda one: pairs.count((one, one))),
            )
        }
        sums = [float(line["p(no)"]) + float(line["p(yes)"]) for line in own]
        assert sums == pytest.approx([1] * len(own), abs=2e-6)
    shutil.copytree(out, tmp_path / "copy")
    monkeypatch.chdir(tmp_path)
    np.savez("new.npz", x=x[rows])
    predict.main(["copy", "--input", "new.npz"])
    new = table("predictions.csv")
    assert [int(line["row"]) for line in new] == [*range(len(rows))]
    assert alike(
        [line | dict(row=0) for line in new],
        [{k: v for k, v in line.items() if k != "label"} | dict(row=0) for line in own],
    )
    model = predict.load("copy")
    answers, probabilities = model(x[rows])
    assert alike([str(answer) for answer in answers], [line["prediction"] for line in own])
    predict.main(["copy", "--input", "new.npz", "--features", "f.npy"])
    assert np.load("f.npy").shape == (len(rows), model.saved["arch"]["d"])


def test_labels_of_a_file_are_those_of_the_run_however_they_are_written(
    trained, tmp_path, capsys, monkeypatch
):
    """1, "1" and 1.0; numbers of a text format; the text before a comma, which is said."""
    folder, found, _ = trained
    monkeypatch.chdir(tmp_path)
    x, codes = found["fixed"][0], np.arange(N) % 2 + 1
    np.savez("codes.npz", x=x, y=np.where(np.arange(N) % 5, codes, np.nan))  # floats, then
    finetune.main(["--task", "file:codes.npz", *SHORT, "--out", "run"])
    assert [*predict.load("run").names] == ["1", "2"]
    (tmp_path / "text.csv").write_text(
        "\n".join(",".join(map(str, [y, *one])) for y, one in zip(codes, x))
    )
    np.savez("ints.npz", x=x, y=codes)
    np.savez("floats.npz", x=x, y=codes.astype(float))
    lines = []
    for name in ("text.csv", "ints.npz", "floats.npz"):
        capsys.readouterr()
        predict.main(["run", "--input", name])
        text = capsys.readouterr().out
        assert ("labels are read from column 0" in text) == name.endswith("csv")
        lines.append([line for line in text.splitlines() if "labels: accuracy" in line])
        assert "the run was trained on this file" not in text
    assert lines[0] == lines[1] == lines[2] and len(lines[0]) == 1
    predict.main(["run", "--input", "codes.npz"])
    assert "note: the run was trained on this file" in capsys.readouterr().out
    values = found["numbers"][1]
    (tmp_path / "values.csv").write_text(
        "\n".join(",".join(map(str, [y, *one])) for y, one in zip(values, x))
    )
    predict.main([str(trained[2]("numbers", "scratch")), "--input", "values.csv", "--label", "0"])
    assert "60 labels: R2 " in capsys.readouterr().out


def test_class_names_of_one_number_are_two_classes(tmp_path, monkeypatch, capsys):
    """And dates, in their precision. A number that fits two names is neither."""
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(N, 8))
    for names in (
        np.array(["01", "1", "2"]),
        np.array(["2020-01-01", "2020-01-02", "NaT"], "datetime64[ns]"),
    ):
        y = names[np.arange(N) % 3]
        np.savez("own.npz", x=x, y=y)
        folder, run = str(len(names[0].astype(str))), f"run{names.dtype.kind}"
        data.prepare("file:own.npz", folder)
        finetune.main(["--task", "file:own.npz", *SHORT, "--data-dir", folder, "--out", run])
        model = predict.load(run)
        _, labels, _ = new_examples(model, "own.npz")
        assert [*labels] == ["" if "NaT" in name else name for name in y.astype(str).tolist()]
    np.savez("floats.npz", x=x[:3], y=[1.0, 2.0, 7.0])
    _, labels, _ = new_examples(predict.load("runU"), "floats.npz")
    assert [*labels] == ["1.0", "2", "7.0"]


@pytest.mark.parametrize(
    "kind, start", [("texts", "scratch"), ("ragged", "joint"), ("numbers", "spt")]
)
def test_predictions_of_a_bfloat16_run_are_its_own(kind, start, trained, tmp_path, capsys):
    folder, found, train = trained
    data.prepare(
        f"file:{folder / kind}.npz", tmp_path / "data", regression=kind == "numbers" or None
    )
    words = [
        "--task",
        f"file:{folder / kind}.npz",
        "--model",
        "s4",
        "--steps",
        "20",
        "--eval-every",
        "20",
        "--warmup",
        "1",
        "--data-dir",
        str(tmp_path / "data"),
        "--dtype",
        "bfloat16",
    ]
    if start == "spt":
        pretrain.main([*words, "--out", str(tmp_path / "pre")])
        predict.main(
            [
                str(tmp_path / "pre"),
                "--show",
                str(tmp_path / "a.png"),
                "--data-dir",
                str(tmp_path / "data"),
            ]
        )
        words[2:4] = "--init", str(tmp_path / "pre")
    finetune.main([*words, *["--joint", "1"] * (start == "joint"), "--out", str(tmp_path / "run")])
    result, model = (
        json.loads((tmp_path / "run" / "result.json").read_text()),
        predict.load(tmp_path / "run"),
    )
    model.data_dir = tmp_path / "data"
    test, *_ = held_out_examples(model)
    outputs, y = model.outputs(test), torch.from_numpy(np.array(test.y))
    y = y.long() if model.task.classes else y
    loss = TARGETS[model.task.kind].loss(torch.from_numpy(outputs), y) / len(test)
    assert loss.item() == pytest.approx(result["test_loss"], abs=1e-9)
    run = [str(tmp_path / "run"), "--data-dir", str(tmp_path / "data")]
    predict.main([*run, "--out", str(tmp_path / "p.csv")])
    assert "computed in bfloat16, as in training" in capsys.readouterr().out
    predict.main([*run, "--features", str(tmp_path / "f.npy")])
    assert np.load(tmp_path / "f.npy").dtype == np.float32
    export(model, tmp_path / "model.pt2")
    assert "it computes in float32, but the run in bfloat16" in capsys.readouterr().out
    assert np.allclose(model.outputs(test), outputs, rtol=1e-6)  # bfloat16 again


def test_an_exported_number_is_as_fine_as_its_unit(tmp_path, monkeypatch):
    """Seconds since 1970, in which float32 has one number for 128 seconds; an export that is off is
    refused."""
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(0).normal(size=(N, 8))
    np.savez("times.npz", x=x, y=1.7e9 + 10 * x[:, 0])
    data.prepare("file:times.npz", regression=True)
    finetune.main(["--task", "file:times.npz", *SHORT, "--out", "run"])
    model = predict.load("run")
    export(model, tmp_path / "model.pt2")
    program, ours = torch.export.load("model.pt2").module(), model(x[:9])[0]
    theirs = [program(torch.from_numpy(one[None, :, None]).float()).item() for one in x[:9]]
    low, high = model.task.ends
    assert len({*theirs}) == 9 and np.abs(theirs - ours).max() < 1e-5 * (high - low)
    right = ExportedModel.forward
    monkeypatch.setattr(
        ExportedModel, "forward", lambda self, x, *more: right(self, x, *more) + 0.01
    )
    with pytest.raises(UserError, match="differs from the model by 0.01; nothing was written"):
        export(model, tmp_path / "other.pt2")


def test_what_is_no_sequence_is_one_line(trained):
    _, found, train = trained
    for kind in "texts", "ragged", "fixed", "integers":
        model = predict.load(train(kind, "scratch"))
        for x in (5, None, [None], [b"ab"], [[[1], 2]], [{"a": 1}], np.array(["2020"], "M8[D]")):
            with pytest.raises(
                UserError, match="neither a text nor an array of numbers|cannot be read|samples"
            ):
                model(x)


@pytest.mark.parametrize("kind", ["texts", "integers", "ragged", "fixed", "numbers"])
def test_one_sequence_or_many_in_what_people_hold(kind, trained):
    """A list, an array, an iterator; one of them."""
    _, found, train = trained
    model, x = predict.load(train(kind, "scratch")), found[kind][0][:3]

    def first(answer):
        names, probabilities = answer
        return names if probabilities is None else probabilities

    wanted = first(model(x))
    for many in (
        [*x],
        iter(x),
        (one for one in x),
        np.array(x, object) if kind in ("fixed", "numbers") else x,
    ):
        assert np.allclose(first(model(many)), wanted, rtol=1e-9)
    for one in (x[0], x[0] if kind == "texts" else x[0].tolist()):
        assert np.allclose(first(model(one)), wanted[:1], rtol=1e-6)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A pretrained and a finetuned run on pairs of texts."""
    folder, patch = tmp_path_factory.mktemp("pairs"), pytest.MonkeyPatch()
    for split in "train", "eval", "test":
        lines = [f"{i % 2}\tA\tB\t{'ab' * (i % 5 + 1)}\t{'ba' * (i % 3 + 1)}\n" for i in range(20)]
        (folder / f"new_aan_pairs.{split}.tsv").write_text("".join(lines))
    patch.chdir(folder)
    data.prepare("retrieval", sizes=(20, 20, 10), raw=".")
    words = ["--steps", "2", "--eval-every", "2", "--batch", "4", "--warmup", "1"]
    pretrain.main(
        [
            "--task",
            "retrieval",
            "--model",
            "s4",
            *words,
            "--arch",
            "layers=1,d=8,n_ssm=1",
            "--out",
            "pre",
        ]
    )
    finetune.main(["--init", "pre", *words, "--out", "fine"])
    yield folder
    patch.undo()


def test_features_of_pairs_are_one_line_per_example(pairs, capsys):
    """The means of both documents, side by side, of the test split and of new pairs."""
    (pairs / "new.tsv").write_text("1\tab\tba\n0\tabab\tb\n")
    for run, width in ("pre", 16), ("fine", 32):
        for more, n in ([], 10), (["--input", "new.tsv"], 2):
            predict.main([run, "--features", "f.npy", *more])
            assert (
                np.load("f.npy").shape == (n, width)
                and f"({n}, {width})" in capsys.readouterr().out
            )
        alone = predict.load(run)
        assert np.allclose(
            alone.features(alone.encoded([("abab", "b")]))[0], np.load("f.npy")[1], atol=1e-5
        )
    first = predict.load("pre")
    one, two = (first.features(first.encoded([pair]))[0] for pair in (("abab", "b"), ("b", "abab")))
    assert np.allclose(one[:8], two[8:], atol=1e-6) and np.allclose(one[8:], two[:8], atol=1e-6)


def test_one_pair_given_flat_is_an_error(pairs):
    model = predict.load("fine")
    assert len(model([("ab", "ba")])[0]) == len(model(np.array([["ab", "ba"]]))[0]) == 1
    (pairs / "flat.txt").write_text("ab\nba\n")
    for x in (
        ("ab", "ba"),
        ["ab", "bab"],
        "ab",
        np.array(["ab", "ba"]),
        [("ab", "ba", "a")],
        [("ab",)],
        [3],
        3,
        [(1, 2)],
    ):
        with pytest.raises(
            UserError,
            match=r"give a list of pairs, \[\(first, second\)\]|neither a text nor an array",
        ):
            model(x)
    with pytest.raises(UserError, match="flat.txt, example 0: it is no pair"):
        new_examples(model, pairs / "flat.txt")


@pytest.mark.parametrize("kind", ["texts", "ragged"])
def test_guesses_are_drawn_where_the_objective_says(kind, trained, monkeypatch):
    """An objective of a fork: three positions ahead, which hides nothing, or the one before, which
    hides some."""
    _, found, train = trained
    model = predict.load(f"{train(kind, 'spt', 'causal')}-pre")
    batch = model.encoded(found[kind][0][:8]).batch(np.arange(8))
    truth = (batch.symbols if batch.samples is None else batch.samples).numpy()
    lengths = batch.lengths.numpy()[:, None]
    at = np.arange(truth.shape[1])
    for ahead, there in (3, (at >= 3) & (at < lengths)), (-1, at < lengths - 1):

        def pretext(args, batch, draw):
            x = batch.symbols if batch.samples is None else batch.samples
            inside = torch.arange(x.shape[1]) + max(ahead, 0) < batch.lengths[:, None]
            return x, x.roll(-ahead, 1), inside & (torch.arange(x.shape[1]) >= -ahead)

        for hides in False, True:
            monkeypatch.setitem(
                pretrain.OBJECTIVES, "causal", pretrain.Objective(pretext, True, hides)
            )
            if batch.samples is None or not hides:
                hidden, guess, wrong = filled_in(model, batch)
                assert np.array_equal(hidden, there)
                right = (
                    guess == truth
                    if batch.samples is None
                    else np.abs(guess - truth).max(-1) <= 0.5
                )
                assert (
                    np.array_equal(wrong, hidden & ~right)
                    and guess[hidden].any()
                    and not guess[~hidden].any()
                )


def test_the_test_split_is_that_of_the_run_or_none(trained, tmp_path):
    """Another seed draws another split, in which examples of the run's training may be tested."""
    folder, _, train = trained
    out = train("texts", "scratch")
    data.prepare(f"file:{folder / 'texts'}.npz", tmp_path, seed=1)
    with pytest.raises(UserError, match="was trained on .*'seed': 0.* holds .*'seed': 1"):
        predict.main([str(out), "--data-dir", str(tmp_path), "--out", str(tmp_path / "p.csv")])
    assert not (tmp_path / "p.csv").exists()


def test_channels_come_last(trained):
    _, found, train = trained
    model = predict.load(train("ragged", "scratch"))
    with pytest.raises(UserError, match=r"its shape is \(2, 8\), but a position has 2 channel"):
        model(np.nan_to_num(found["ragged"][0]).transpose(0, 2, 1))


def test_a_task_of_images_reads_images(monkeypatch, tmp_path):
    """(n, side, side), (n, l) and (n, l, 1), integers or floats, as its own test split; exported,
    too."""
    monkeypatch.chdir(tmp_path)
    data.prepare("pathfinder_demo", sizes=(40, 8, 8))
    words = ["--task", "pathfinder_demo", "--steps", "2", "--eval-every", "2", "--warmup", "1"]
    for model in ("transformer", "s4"):
        finetune.main([*words, "--model", model, "--out", model])
        predict.main([model, "--out", "own.csv"])
        images = data.open_task("pathfinder_demo")[3].x[:].astype(np.int64)  # (8, 196, 1)
        for x in (images.reshape(8, 14, 14), images.reshape(8, 196), images.astype(float)):
            np.savez("images.npz", x=x)
            predict.main([model, "--input", "images.npz"])
            assert [line["prediction"] for line in table("predictions.csv")] == [
                line["prediction"] for line in table("own.csv")
            ]
        predict.main([model, "--export", "model.pt2"])


def test_an_exported_model_is_centred_in_float64(trained, tmp_path):
    """Where the data are."""
    _, found, train = trained
    for kind in ("fixed", "numbers"):
        model, x = predict.load(train(kind, "scratch")), found[kind][0][:1]
        export(model, tmp_path / f"{kind}.pt2")
        out = (
            torch.export.load(tmp_path / f"{kind}.pt2")
            .module()(torch.from_numpy(x[..., None]))
            .detach()
        )
        answer, probabilities = model(x)
        assert np.allclose(
            out, answer[:, None] if probabilities is None else probabilities, rtol=1e-5
        )


def test_a_run_without_labels_gives_features_and_pictures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("bare.npz", x=np.random.default_rng(0).integers(0, 5, (N, 8)))
    np.savez(
        "named.npz",
        x=np.random.default_rng(1).integers(0, 5, (N, 8)),
        y=np.tile(["a", "b"], N // 2),
    )
    pretrain.main(["--task", "file:bare.npz", *SHORT, "--out", "run"])
    predict.main(["run", "--features", "own.npy"])
    predict.main(["run", "--features", "new.npy", "--input", "named.npz"])
    predict.main(["run", "--show", "new.png", "--input", "named.npz"])
    assert np.load("own.npy").shape == (9, 32) and np.load("new.npy").shape == (N, 32)


def test_what_training_never_saw_is_said(trained, tmp_path, capsys, monkeypatch):
    _, _, train = trained
    out = train("texts", "scratch")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new.csv").write_text('no,"ab☃☃"\nmaybe,abcabcabcabcabc\n,c\nyes,b\n')
    predict.main([str(out), "--input", "new.csv"])
    text = capsys.readouterr().out
    assert (
        "2 of 14 positions hold one of 1 symbols that training never saw; they become <unk>: '☃' "
        "(2)" in text
    )
    assert "1 of 4 sequences are longer than the 9 positions" in text
    assert (
        "1 labels belong to no class of the model: maybe; not counted" in text
        and "\n2 labels: accuracy" in text
    )


def test_metrics_are_those_of_their_definitions():
    """By hand, where classes are unequal: sevenfold accuracy hides that b is never found."""
    y, guess = np.array(["a"] * 7 + ["b"]), np.array(["a"] * 8)
    first, *_, last = quality("class", y, guess, np.array(["a", "b"]))
    assert first == "8 labels: accuracy 0.8750, balanced accuracy 0.5000, macro F1 0.4667"
    assert balanced_accuracy_score(y, guess) == 0.5 and last.startswith("every prediction is a")
    # c has no example: recalls 1/2 and 1, F1 2/3 and 1, mean over a and b.
    first, *_ = quality("class", np.array([*"aabb"]), np.array([*"acbb"]), np.array([*"abc"]))
    assert first == "4 labels: accuracy 0.7500, balanced accuracy 0.7500, macro F1 0.8333"
    (line,) = quality(
        "number", np.array([1.0, 3.0, np.nan]), np.array([1.0, 2.0, 9.0]), np.array([])
    )
    assert line == "2 labels: R2 0.5000, root mean squared error 0.7071"


@pytest.mark.parametrize(
    "kind, objective",
    [
        (kind, objective)
        for kind in ("texts", "integers", "ragged", "fixed")
        for objective in ("masked", "causal")
    ],
)
def test_what_a_pretrained_run_fills_in_is_drawn(kind, objective, trained, tmp_path, capsys):
    """Of what is hidden, what is right is said right: against the model's own predictions."""
    folder, found, train = trained
    run = f"{train(kind, 'spt', objective)}-pre"
    predict.main([run, "--show", str(tmp_path / "sheet.png"), "--data-dir", str(folder / "data")])
    assert "hidden positions" in capsys.readouterr().out
    assert (tmp_path / "sheet.png").read_bytes()[:4] == b"\x89PNG"
    model = predict.load(run)
    batch = model.encoded(found[kind][0][:8]).batch(np.arange(8))
    hidden, guess, wrong = filled_in(model, batch)
    truth = (batch.symbols if batch.samples is None else batch.samples).numpy()
    assert hidden.any() and not (wrong & ~hidden).any() and guess.shape == truth.shape
    if batch.samples is None:
        assert np.array_equal(wrong, hidden & (guess != truth))
    else:
        assert np.array_equal(wrong, hidden & (np.abs(guess - truth).max(-1) > 0.5))
    predict.main([run, "--show", str(tmp_path / "new.pdf"), "--input", str(folder / f"{kind}.npz")])


def test_images_are_drawn_as_images(tmp_path):
    """Pixels that are filled in wrong are orange, and no others."""
    task = data.replace(GREY, length=16, side=4, mask=0.5)
    batch = data.Batch(
        torch.zeros(1, 16).long(),
        torch.full((1, 16, 1), -task.mean / task.std),
        None,
        torch.zeros(1),
    )
    hidden, wrong = np.arange(16) < 8, np.arange(16) < 3
    guess = np.where(wrong, 255, 0)[:, None] / 255
    axis = Figure().subplots()
    draw_example(axis, task, batch, 0, hidden, (guess - task.mean) / task.std, wrong)
    pixels = axis.images[0].get_array().reshape(16, 3)
    assert np.allclose(pixels[:3], (0.84, 0.37, 0)) and np.allclose(pixels[3:], 0, atol=1e-6)


def test_pairs_of_texts_are_two_sequences_of_an_example():
    task = data.replace(TASKS["retrieval"], length=6, vocab=7, symbols=(*SPECIAL, *"abc"))
    own = read_own("pairs.tsv", b"related\tab\tc\nunrelated\tb\tcabcabc\n", documents=2)
    arrays, unknown, longer = encode(task, "", [one for pair in own.series for one in pair])
    assert [array.tolist() for array in arrays] == [[4, 5, 3], [6, 3], [5, 3], [6, 4, 5, 6, 4, 3]]
    assert (dict(unknown), longer, [*own.labels]) == ({}, 1, ["related", "unrelated"])


@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name].weights is None])
def test_every_model_exports(name, tmp_path):
    """As it stands in a program without this repository, ragged symbols."""
    task = data.replace(
        FILE, length=12, classes=3, vocab=9, symbols=(*SPECIAL, *"abcde"), names=(*"xyz",)
    )
    trained = predict.load.__new__(predict.load)
    backbone = Backbone(config(arch("text_demo", name, layers=1), task))
    vars(trained).update(
        run=tmp_path,
        task=task,
        is_pretraining=False,
        names=np.array(task.names),
        saved=dict(batch=4),
        model=Classifier(backbone, 3, "mean").eval(),
    )
    export(trained, tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    for b in (1, 5):  # any number, and anything in the padding
        x, lengths = torch.randint(4, 9, (b, 12)), torch.randint(1, 13, (b,))
        with torch.no_grad():
            ours = trained.model(x, lengths).softmax(-1)
        assert torch.allclose(program(x, lengths), ours, atol=1e-5)
        x = x.where(inside(lengths, 12), 99)  # no symbol
        assert torch.allclose(program(x, lengths), ours, atol=1e-5)


@pytest.mark.parametrize("kind", ["texts", "ragged", "fixed"])
def test_an_export_is_run_as_the_page_says_in_a_program_without_this_repository(
    kind, trained, tmp_path
):
    """The page's lines, on the test split's first examples, beside predict.load; class names and
    ids come from the file."""
    _, found, train = trained
    model, x = predict.load(train(kind, "scratch")), found[kind][0][:5]
    export(model, tmp_path / "model.pt2")
    page = (ROOT / "results" / "own.md").read_text()
    code = next(
        block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "model.pt2" in block
    )
    given = (
        [*map(str, x)]
        if kind == "texts"
        else [ended(np.reshape(one, (-1, model.task.channels))).tolist() for one in x]
    )
    (tmp_path / "given.json").write_text(json.dumps(given))
    (tmp_path / "use.py").write_text(
        f"{code}answer = of_{'texts' if kind == 'texts' else 'series'}(json.load(open("
        "'given.json')))\njson.dump([task['names'], answer.tolist()], open('answer.json', 'w'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "use.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    names, theirs = json.loads((tmp_path / "answer.json").read_text())
    assert names == model.names.tolist() and np.allclose(theirs, model(x)[1], atol=1e-5)


@pytest.mark.parametrize("kind", ["texts", "ragged", "fixed"])
def test_onnx_gives_the_same_where_it_is_installed(kind, trained, tmp_path):
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    import onnxruntime

    _, found, train = trained
    model = predict.load(train(kind, "scratch"))
    export(model, tmp_path / "model.onnx")  # compares before it writes
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert (
        json.loads(session.get_modelmeta().custom_metadata_map["task.json"])["names"]
        == model.names.tolist()
    )
    assert session.get_inputs()[0].shape[1:] == (
        [model.task.length] if kind == "texts" else [model.task.length, model.task.channels]
    )
