"""Your own data: what is stored is what was read; rows without a label; the identity of a set; the
rule of sizes; `run_all.sh own` from a file to its report."""

import io
import json
import re
import shlex
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from conftest import call, made_set, parse

import data
import files
import finetune
import pretrain
import tasks
from models import MODELS
from own.task import encode
from tasks import EOS, IGNORE, SPECIAL

N, LENGTHS = 60, np.tile([9, 7, 4], 20)  # of made_set


def opened(made, folder):
    """Prepare a made set -> its task, its splits, what data.py prints."""
    done = call("data.py", "--task", made.task, "--data-dir", folder, *made.flags)
    assert done.returncode == 0, done.stderr
    task, *splits = data.open_task(made.task, folder)
    return task, splits, done.stdout


def refused(words, name, folder, **more):
    with pytest.raises(files.UserError, match=words):
        data.prepare(name, folder, **more)


def assert_inputs(task, batch, rows, x):
    """The sequences of a batch are the rows of x, normalised or as symbols."""
    for i, row in enumerate(rows):
        length = task.length if batch.lengths is None else int(batch.lengths[i])
        if task.channels:
            exact = (x[row] - np.array(task.mean)) / np.array(task.std)
            samples = batch.samples[i, :length].double().numpy()
            assert np.allclose(samples, exact[:length], atol=1e-3, equal_nan=True), row
            assert np.isnan(exact[length:]).all(), row
        else:
            ids = batch.symbols[i, :length].tolist()
            numbers = x.dtype.kind == "i"
            exact = " ".join(map(str, x[row][x[row] >= 0])) if numbers else x[row]
            back = task.between.join(task.symbols[symbol] for symbol in ids[:-1])
            assert ids[-1] == EOS and back == exact, row


INPUTS = "series", "ragged", "gaps", "fixed", "texts", "integers"
KINDS = [(inputs, "class") for inputs in INPUTS]
KINDS += [("series", targets) for targets in ("number", "labels", "positions", None)]

# What a model of these inputs does not read.
STRANGE = [
    ("series", np.zeros((9, 3)), "3.*but a position has 2 channel"),
    ("series", np.zeros((10, 2)), "10 positions, but training had 9"),
    ("series", np.full((9, 2), np.inf), "a value is infinite"),
    ("series", np.full((9, 2), np.nan), "a value is missing, which training never saw"),
    ("series", "abc", "a text, but the model reads samples"),
    ("ragged", np.zeros((0, 2)), "it is empty"),
    ("texts", np.zeros((9, 2)), "samples, but the model reads symbols"),
    ("integers", np.array([-1, -1]), "it is empty"),
]


@pytest.mark.parametrize("inputs, targets", [*KINDS, ("ragged", "positions")])
def test_what_is_stored_is_what_was_read(inputs, targets, tmp_path):
    """To float32's last digits. Splits are a partition; training is normalised."""
    made = made_set(tmp_path, inputs, targets, seed=4)  # whose numbers have their ends in test
    task, splits, said = opened(made, tmp_path / "data")
    assert task.sizes == tuple(map(len, splits)) == (42, 9, 9)
    assert sorted(np.concatenate([split.rows for split in splits])) == [*range(N)]
    for split in splits:
        assert_inputs(task, split.batch(np.arange(len(split))), split.rows, made.x)
        y, rows = np.array(split.y), split.rows
        if targets == "positions":
            inside = np.arange(9) < (LENGTHS[rows] if task.ragged else 9 + 0 * rows)[:, None]
            names = np.array([*task.names, "-1"]).astype(int)  # the last: of none
            labels = names[np.where(y == IGNORE, -1, y)]
            assert np.array_equal(labels, np.where(inside, made.y[rows], -1))
        elif targets == "number":
            low, high = task.ends
            assert (splits[0].y.min(), splits[0].y.max()) == (-1, 1) and task.classes == 0
            assert np.allclose((y + 1.0) / 2 * (high - low) + low, made.y[rows], atol=1e-4)
        elif targets:
            labels = y if targets == "labels" else np.array(task.names)[y]
            assert np.array_equal(labels, made.y[rows])
    if task.channels:
        trained = made.x[splits[0].rows].reshape(-1, task.channels)
        assert np.allclose(task.mean, np.nanmean(trained, 0), rtol=1e-6)
        assert np.allclose(task.std, np.nanstd(trained, 0), rtol=1e-3)
    else:
        symbols = {*"".join(made.x)} if inputs == "texts" else {0, 3, 70_000}
        assert task.vocab == len(task.symbols) == len(SPECIAL) + len(symbols)
    if inputs == "integers":  # those of a .csv have one channel
        columns = [row[:, None] * 1.0 for row in made.x[splits[0].rows]]
        assert np.array_equal(np.concatenate(encode(task, "new", columns)[0]), splits[0].x)
    assert (inputs == "gaps") == ("are missing" in said)
    if targets is None:
        with pytest.raises(files.UserError, match="has no labels; only pretrain.py can use it"):
            data.open_task(made.task, tmp_path / "data", labels=True)
    for strange, words in [case[1:] for case in STRANGE if case[0] == inputs]:
        with pytest.raises(files.UserError, match=f"new, example 1: .*{words}"):
            encode(task, "new", [made.x[0], strange])


def test_what_is_odd_in_samples_is_said(tmp_path):
    made = made_set(tmp_path)
    made.x[..., 1] = 4
    made.x[5:9, 2, 0] = -9999
    np.savez(made.path, x=made.x, y=made.y)
    task, (train, *_), said = opened(made, tmp_path / "data")
    assert "channels 1 (from 0) do not change" in said and "-9999 stands in" in said
    assert train.batch(range(42)).samples[..., 1].abs().max() < 1e-6


NONE, CODES = np.arange(N) % 4 == 0, np.arange(N) % 3


@pytest.mark.parametrize(
    "targets, y, missing",
    [
        ("class", np.where(NONE, "", np.array([*"abc"])[CODES]), ""),
        ("class", np.where(NONE, -1, CODES), -1),
        ("number", np.where(NONE, np.nan, CODES * 2.5), ""),
        ("labels", np.where(NONE[:, None], np.nan, np.eye(3)[CODES] + np.eye(3)[0]).clip(0, 1), ""),
        ("positions", np.where(NONE[:, None], -1, np.tile(CODES[:9], (N, 1))), ""),
    ],
)
def test_rows_without_a_label_serve_pretraining_alone(targets, y, missing, tmp_path):
    """In both stages the same normalisation; a share of the labels is nested in all."""
    made = made_set(tmp_path, "ragged", targets, y=y, missing=missing)
    task, (train, val, test), said = opened(made, tmp_path / "data")
    assert task.sizes == (31 + 15, 7, 7) and task.labelled == 31
    assert "15 without a label, only for pretraining" in said
    assert {*train.rows[31:]} == {*np.flatnonzero(NONE)}
    assert not NONE[[*val.rows, *test.rows]].any()
    chosen = {}
    for share in None, 0.5:
        labelled = data.open_task(made.task, tmp_path / "data", None, share, labels=True)[1]
        chosen[share] = {*labelled.chosen}
        assert [*labelled.lengths()] == [*LENGTHS[labelled.rows[labelled.chosen]]]
    assert chosen[0.5] < chosen[None] == {*range(31)} and len(chosen[0.5]) == 15
    first = data.open_task(made.task, tmp_path / "data", 0.5)[1]
    second = data.open_task(made.task, tmp_path / "data", 0.5, labels=True)[1]
    assert len(first) == 23 and {*second.chosen} == {i for i in first.chosen if i < 31}


def test_symbols_that_training_never_saw_are_counted_and_refused_if_many(tmp_path):
    split = np.repeat(["train", "val", "test"], [30, 10, 20])
    for name, strange in ("few", 2), ("many", 10):
        texts = np.array(["abcd" * 5] * (N - strange) + ["abxy" * 5] * strange)
        np.savez(tmp_path / f"{name}.npz", x=texts, y=np.arange(N) % 2, split=split)
    few, many = (f"file:{tmp_path / name}.npz" for name in ("few", "many"))
    said = call("data.py", "--task", few, "--data-dir", tmp_path / "data").stdout
    assert "test: 20 positions (5.0%) hold symbols that training never saw, 'x', 'y'" in said
    refused(r"test: 100 positions \(25.0%\) hold symbols", many, tmp_path / "data")


def test_a_set_is_known_by_the_content_of_its_file(tmp_path):
    """A new time of the same content is no change, and a lost file is not needed."""
    made, folder = made_set(tmp_path), tmp_path / "data"
    first = opened(made, folder)[0]
    made.path.write_bytes(made.path.read_bytes())
    assert opened(made, folder)[0] == first
    np.savez(made.path, x=made.x + 1, y=made.y)  # the labels are those of before
    refused("with other code or files; remove it and run again: rm -r", made.task, folder)
    assert opened(made, tmp_path / "other")[0].data != first.data
    made.path.unlink()
    assert data.open_task(made.task, folder)[0] == first


X = np.random.default_rng(0).normal(size=(40, 6)).round(3)


def archived(kind, scale=1, train=30):
    """{name: bytes} of both halves of a set of an archive."""
    contents = {}
    for half, rows in (("TRAIN", range(train)), ("TEST", range(30, 40))):
        text = "@data\n" if kind == "ts" else ""
        delimiter = dict(ts=",", tsv="\t", txt="  ")[kind]
        for i in rows:
            cells = delimiter.join(map(str, (scale * X[i]).tolist()))
            text += f"{cells}:{i % 2}\n" if kind == "ts" else f"{i % 2}{delimiter}{cells}\n"
        contents[f"Mine_{half}.{kind}"] = text.encode()
    return contents


def test_a_set_of_an_archive_is_the_same_from_all_places(server, monkeypatch, tmp_path):
    """.ts is read before .tsv before .txt, which here are other numbers."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for name, content in (archived("ts") | {"Mine.txt": b"other", "a.arff": b"other"}).items():
            file.writestr(name, content)
    places = {None: None, "zip": {"Mine.zip": packed.getvalue()}, "txt": archived("txt")}
    places["ts"] = archived("ts") | archived("tsv", 2) | archived("txt", 2)
    places["tsv"] = archived("tsv") | archived("txt", 2)
    places["few"] = archived("ts", train=2)
    for place, contents in [*places.items()][1:]:
        (tmp_path / place).mkdir()
        for name, content in contents.items():
            (tmp_path / place / name).write_bytes(content)
    task = tasks.declared("ucr:Mine")
    source = replace(task.source, urls=(server("Mine.zip", packed.getvalue(), "cut"),))
    monkeypatch.setitem(tasks.OWN, "ucr", lambda name: replace(task, source=source))
    for place in (None, "zip", "txt", "tsv", "ts"):
        raw, folder = place and tmp_path / place, tmp_path / f"data {place}"
        data.prepare("ucr:Mine", folder, raw=raw)
        own, *splits = data.open_task("ucr:Mine", folder)
        assert own.sizes == (26, 4, 10), place
        for split in splits:
            samples = split.batch(np.arange(len(split))).samples[..., 0]
            exact = (X[split.rows] - own.mean) / own.std
            assert np.allclose(samples, exact, atol=1e-4), place
    words = "2 / 0 / 10 .*; no class has an example to spare for validation"
    refused(words, "ucr:Mine", tmp_path / "b", raw=tmp_path / "few")


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A folder with sets of three sizes, and their tasks: 42, 2,100 and 14,000 to train on."""
    folder = tmp_path_factory.mktemp("own")
    made = [made_set(folder, "fixed", n=n, name=str(n)) for n in (60, 3_000, 20_000)]
    for each in made:
        data.prepare(each.task, folder / "data")
    return folder, [each.task for each in made]


def parsed(stage, own, *words):
    return parse(stage, [*map(str, words), "--data-dir", str(own[0] / "data")])


CASES = [(model, "masked", 0) for model in sorted(MODELS.keys() - {"pythia", "pythia_rand"})]
CASES += [("s4", objective, size) for objective in ("masked", "causal") for size in (0, 1, 2)]


def test_all_starts_have_equal_passes_and_sizes_by_the_rule(own, tmp_path):
    """Joint training with a masked objective reads each example twice a step."""
    for model, objective, size in CASES:
        words = "--task", own[1][size], "--model", model, "--objective", objective
        width, epoch = (32, 64, 128)[size], (200, 200, 875)[size]
        first = parsed(pretrain, own, *words)
        (tmp_path / "config.json").write_text(json.dumps(vars(first), default=str))
        second = parsed(finetune, own, "--init", tmp_path)
        scratch = parsed(finetune, own, *words)
        joint = parsed(finetune, own, *words, "--joint", 1)
        case = model, objective, size
        assert first.arch["d"] == width, case
        assert first.arch == second.arch == scratch.arch == joint.arch, case
        twice = 2 if objective == "masked" else 1
        assert first.steps + second.steps == scratch.steps == joint.steps * twice, case
        assert scratch.steps % epoch == 0 and f"{epoch} steps per epoch" in scratch.fitted, case
        assert (joint.mask, joint.loss, scratch.mask) == (first.mask, first.loss, None), case
        assert first.changed == scratch.changed == joint.changed == {}, case


def test_shares_of_the_labels_are_nested_stratified_and_of_the_whole_set(own):
    name, folder = own[1][1], own[0] / "data"
    sets = [data.open_task(name, folder, 0.01, share)[1] for share in (0.001, 0.01, 0.1, 1)]
    assert [*map(len, sets)] == [3, 21, 210, 2100]  # one of each class at least
    for few, more in zip(sets, sets[1:]):
        assert {*few.chosen} < {*more.chosen} and np.ptp(np.bincount(few.labels())) <= 1


def test_run_all_names_folders_as_data_does(tmp_path):
    for name in "my.v2.npz", "caf\u00e9, b & co (1).npz":
        path = tmp_path / name
        path.touch()
        folder = tasks.folder_name(f"file:{path}")
        words = "own", "--list", "--tasks", f"file:{name}", "--seeds", 3, "--models", "s4,mega"
        outs = []
        for share in (), ("--label-fraction", 0.05):
            lines = call("run_all.sh", *words, *share, cwd=tmp_path).stdout.splitlines()
            assert len(lines) == 7 and "python baseline.py" in lines[0]
            assert all(shlex.quote(f"file:{path}") in line for line in lines)
            outs.append([re.findall(rf"--out (runs/own/{folder}/{folder}-\S+)", x) for x in lines])
        whole, few = ([places for places in run if len(places) == 2] for run in outs)
        assert [first for first, _ in whole] == [first for first, _ in few]
        last, others = ({places[-1] for places in run} for run in outs)
        assert len(last) == 7 and not last & others, "runs of another share of the labels"


def test_own_leads_from_a_file_to_its_report(tmp_path):
    made = made_set(tmp_path, "ragged")
    words = "--list", "--tasks", made.task, "--seeds", "0", "--models", "s4"
    words += "--label-fraction", 0.1  # fewer examples than a batch holds are one batch
    lines = call("run_all.sh", "own", *words, cwd=tmp_path).stdout.splitlines()
    for command in " && ".join(lines).split(" && "):
        _, script, *words = shlex.split(command)
        words += ["--steps", 2, "--eval-every", 1, "--warmup", 1] if "--resume" in words else []
        done = call(script, *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    results = [json.loads(path.read_text()) for path in tmp_path.glob("runs/**/result.json")]
    starts = {None, "scratch", "spt", "joint", "baseline"}
    assert {result.get("start") for result in results} == starts
    for result in results:
        assert result["task"] == made.task and result["train_examples"] in (4, 42)
    done = call("analyze.py", "own", "--runs", "runs", "--figure", "a.png", cwd=tmp_path)
    assert re.search(r"\| s4, eval_every=1, warmup=1 \| [\d.]+ \([\d.]+\) \|", done.stdout)
    for words in (
        "my set.npz with 10 % of the labels",
        "| *linear: random convolutions* |",
        "predict.py",
    ):
        assert words in done.stdout, words
    done = call("analyze.py", "compare", "runs", "--figure", "c.png", cwd=tmp_path)
    assert done.returncode == 0 and "| baseline |" in done.stdout, done.stderr
