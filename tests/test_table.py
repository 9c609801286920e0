"""own/table.py, columns.py: tables as people have them; what a file does not say is asked for; the
programs of results/own.md make files that are read."""

import glob
import json
import os
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.io
from conftest import ROOT
from test_own_law import Truth, as_long, text_of

import data
from files import UserError
from own.columns import Layout
from own.read import read_own

RISING = text_of([["ab"[i % 2], i + 0.5, -i, 3.25] for i in range(9)])
NUMBERED = "".join(f"{i},{line}\n" for i, line in enumerate(RISING.split()))
VALUES = [[0.5, 0, 3.25], [1.5, -1, 3.25]]
DATES = "s,time,hr\n1,2024-03-30T12:00+01:00,5\n1,2024-03-31T12:00+02:00,7\n"
DATES += "1,2024-03-31T11:59+02:00,6\n2,2024-03-30T12:00Z,8\n"
LONG = dict(id="s", time="time", label="none")


@pytest.mark.parametrize(
    "name, text, flags, series, labels",
    [
        ("a.csv", "0,1,2,3\n" + RISING, {}, VALUES, "ab"),  # a header as pandas writes it
        ("a.csv", "strain,0.0,0.5,1.0\n" + RISING, dict(label="strain"), VALUES, "ab"),
        ("a.csv", ",Group,t0,t1,t2\n" + NUMBERED, dict(label="Group"), VALUES, "ab"),  # its index
        ("a.csv", "sep=,\n" + RISING, {}, VALUES, "ab"),
        ("a.csv", "1 \t 2 \t 3\n4 \t5\t 6\n1 7 8\n", {}, [[2, 3], [5, 6]], "14"),
        ("a.tsv", 'a\t"hello\nb\tworld"\na\tthree\n', {}, ['"hello', 'world"'], "ab"),
        ("a.tsv", 'a\tsaid "1"\nb\tso, so\n', {}, ['said "1"', "so, so"], "ab"),
        ("a.csv", 'a,"said ""1"", so"\nb,so\n', {}, ['said "1", so', "so"], "ab"),
        ("a.csv", 'a,"said \\"1\\", so"\nb,so\n', {}, ['said "1", so', "so"], "ab"),
        ("a.csv", 'label;text\na;s "o", s\nb;so, so\n', {}, ['s "o", s', "so, so"], "ab"),
        ("a.csv", "id;label;text\n1;a;so\n2;b;no\n", dict(text="text"), ["so", "no"], "ab"),
        ("a.jsonl", '{"text":"s\\"o","label":"a"}\n', {}, ['s"o'], "a"),
        ("a.csv", RISING.replace(",", ", "), {}, VALUES, "ab"),
        ("a.csv", RISING.replace("\n", ",\n"), {}, VALUES, "ab"),  # a delimiter at the end
        ("a.csv", "a, tex\nb, more\n", {}, [" tex", " more"], "ab"),
        ("a.txt", "one\x0ctwo\nthree\x85.\n", {}, ["one\x0ctwo", "three\x85."], None),
        ("a.csv", DATES, LONG, [[5, 6, 7], [8]], None),
    ],
)
def test_odd_forms_are_read(name, text, flags, series, labels):
    contents = read_own(name, text.encode(), Layout(**flags))
    rows = [row if isinstance(row, str) else row[:, 0].tolist() for row in contents.series]
    assert rows[:2] == series
    assert labels is None if contents.labels is None else [*contents.labels[:2]] == [*labels]


GRID = text_of([[i // 5, 7 * i, i * i % 7, 3.5] for i in range(30)])
LABEL_LAST = text_of([[i + 0.5, -i, "ab"[i % 2]] for i in range(9)])


@pytest.mark.parametrize(
    "name, text, flags, words",
    [
        ("a.csv", "label,signal,,\n" + RISING, {}, "column 2 .* has no name"),
        # as R writes row names
        ("a.csv", '"label" "t0"\n"1" 1 0.5\n"2" 0 0.7\n', {}, "line 1 has 2 fields"),
        ("a.csv", 'label,t0,t1\na,"1,234",5\nb,"2,500",1\n', {}, "does the comma in '1,234'"),
        ("a.csv", 'label,t0,t1\na,"0,23",5.5\nb,"2,5",1.5\n', {}, "does the comma in '0,23'"),
        ("a.csv", "s,time,hr\n1,30.01.2024,5\n1,01.02.2024,6\n", LONG, "a date as 2024-01-31"),
        ("a.csv", "s,time,hr\n1,1,5\n1,,6\n", LONG, "line 3: column time holds ''; a time"),
        ("a.csv", GRID, {}, "looks like a long table.* --id 0 --time 1 "),
        ("a.csv", LABEL_LAST, {}, "the last column looks like the label .*--label -1"),
        ("a.csv", "up,down,kind\n" + LABEL_LAST, {}, "no column is called label.* --label NAME"),
        ("a.csv", "y,t0,t1,t2\n" + RISING, dict(label="z"), "has no column 'z' for --label"),
        ("a.jsonl", "a,b\n1,2\n", {}, "a.jsonl cannot be read: .*with a JSON object per line"),
        ("a.jsonl", '{"x":[1,"u"],"label":1}\n', {}, "a.jsonl, line 1: .* is no list of numbers"),
        ("a.txt", "label\tt0\n" + "a\t1.5\t2.5\n" * 5, {}, "holds numbers, but a .txt holds"),
    ],
)
def test_what_a_file_does_not_say_is_asked_for(name, text, flags, words):
    with pytest.raises(UserError, match=words):
        read_own(name, text.encode(), Layout(**flags))


def read_new(trained, rows):
    """Read rows as new data of a model, whose training data were read as `trained`."""
    layout = trained.layout._replace(training=False, channels_first=False)
    return read_own("new.csv", text_of(rows, ";").encode(), layout, kind="samples")


def test_new_data_are_read_as_the_training_data_were():
    """By name, if there is a header; else by number. Nothing is asked."""
    truth = Truth(0)
    named, bare = (np.array(truth.rows(header)) for header in (True, False))
    further = np.insert(named, 0, "who", axis=1)
    last = np.roll(bare, -1, 1)
    for rows, flags, others in (
        (named, {}, (named, named[:, 1:], named[:, ::-1], further, bare[:, 1:])),
        (named, dict(drop="t2"), (named, named[:, :0:-1])),
        (bare, {}, (bare, bare[:, 1:])),
        (last, dict(label="-1"), (last, bare[:, 1:])),
    ):
        trained = read_own("a.csv", text_of(rows).encode(), Layout(**flags))
        for other in others:
            contents, labelled = read_new(trained, other), {"label", truth.y[0]} & {*other[0]}
            case = flags, other[0]
            assert np.array_equal(contents.series, trained.series), case
            assert contents.labels is None if not labelled else [*contents.labels] == [*truth.y]
    trained = read_own("a.csv", text_of(named).encode())
    with pytest.raises(UserError, match="has no column 'set_temp', which training had"):
        read_new(trained, np.delete(named, 2, 1))
    name, raw, flags = as_long(truth)
    trained = read_own(name, raw, Layout(**flags))
    lines = [line.split(",") for line in raw.decode().split()]
    fewer = [[line[i] for i in (4, 3, 1, 0)] for line in [lines[0], *lines[:0:-1]]]
    contents = read_new(trained, fewer)
    assert np.array_equal(contents.series, trained.series[::-1]) and contents.labels is None


def write_inputs():
    """Write the files that the programs of results/own.md read, of 24 series and three classes."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 12)).round(3), np.array(["run", "walk", "sit"] * 8)
    wide = pd.DataFrame(x, columns=[f"t{t}" for t in range(12)])
    wide.insert(0, "label", y)
    walk = pd.DataFrame(rng.normal(size=(2_400, 3)).cumsum(0), columns=["x", "y", "z"])
    walk["activity"] = np.array(["run", "walk"])[np.arange(2_400) // 100 % 2]
    trials = [(i // 4, i % 4, t, x[i, t], y[i]) for i in range(24) for t in range(12)]
    columns = {f"{label}_{i}": row for i, (label, row) in enumerate(zip(y, x))}
    axes = [pd.DataFrame(axis).add_prefix(name) for axis, name in ((x, "ax_"), (-x, "ay_"))]
    merged = wide.sort_values("label")
    merged["label"] = merged["label"].where(~merged["label"].duplicated())
    usage = np.repeat(["Training", "PublicTest", "PrivateTest"], [12, 6, 6])
    tags = ["joy", "fear", "joy;fear"] * 8
    log = [(i, t, "ABC"[rng.integers(3)], y[i]) for i in range(24) for t in range(8)]
    for name, table in dict(
        trials=pd.DataFrame(trials, columns=["subject", "trial", "t", "up", "label"]),
        beside=pd.concat([wide["label"], *axes], axis=1),
        sentinels=wide.replace(x[0, 0], -9999),
        usage=wide.assign(Usage=usage),
        tags=pd.DataFrame(dict(text=[f"a day {i}" for i in range(24)], label=tags)),
        lists=pd.DataFrame(dict(label=y, signal=[str(row.tolist()) for row in x])),
        series=wide.drop(columns="label").rename_axis("id").reset_index(),
        labels=wide["label"].rename_axis("id").reset_index(),
        columns=pd.DataFrame(columns).rename_axis("time").reset_index(),
        recording=walk.rename_axis("timestamp").reset_index(),
        events=pd.DataFrame(log, columns=["case_id", "timestamp", "activity", "outcome"]),
    ).items():
        table.to_csv(f"{name}.csv", index=False)
    wide.to_csv("table.csv.zip", index=False)
    merged.to_excel("merged.xlsx", index=False)
    with pd.ExcelWriter("book.xlsx") as book:
        wide[:15].to_excel(book, sheet_name="train", index=False)
        wide[15:].to_excel(book, sheet_name="test", index=False)
    words = [[f"E{k}" for k in rng.integers(5, size=9)] for _ in y]
    records = dict(words=dict(tokens=words), channels=dict(ax=[*x], ay=[*-x]))
    for name, fields in records.items():
        pd.DataFrame(fields | dict(label=y)).to_json(f"{name}.jsonl", orient="records", lines=True)
    wide.to_json("rows.json", orient="records")
    pd.to_pickle(dict(x=x, y=y), "held.pkl")
    scipy.io.savemat("held.mat", dict(X=np.stack([x, -x], 1), y=np.arange(24) % 2))
    for name, array in dict(
        X=np.stack([x, -x], 1), y=np.arange(24) % 2, images=rng.normal(size=(24, 3, 4, 4))
    ).items():
        np.save(f"{name}.npy", array)
    lines = [",".join(map(str, [*row, label])) for row, label in zip(x, y)]
    Path("table.arff").write_text("@relation a\n@data\n" + "\n".join(lines) + "\n")
    letters = ["".join(rng.choice([*"ACGT"], 20)) for _ in y]
    Path("dna.fasta").write_text("".join(f">s{i}|{y[i]}\n{letters[i]}\n" for i in range(24)))
    for i, (label, row) in enumerate(zip(y, x)):
        for kind in "wavs", "nested":
            Path(kind, label).mkdir(parents=True, exist_ok=True)
        sound = np.round(row[: 10 + i % 3] * 1_000).astype("<i2")
        scipy.io.wavfile.write(f"wavs/{label}/{i}.wav", 8_000, sound)
        pd.DataFrame(dict(up=row, down=-row)).rename_axis("t").to_csv(f"nested/{label}/{i}.csv")


# Length, channels, classes of the files that programs of the page write; of others (12, 1, 3).
WRITTEN = dict(windows=(40, 3, 2), several=(9, None, 2), codes=(10, None, 3), beside=(12, 2, 3))
WRITTEN |= dict(channels=(12, 2, 3), events=(9, None, 3), mat=(12, 2, 2), monster=(12, 2, 2))
WRITTEN |= dict(dna=(21, None, 3), images=(16, 3, 2), nested=(12, 2, 3))


@pytest.mark.skipif(os.name == "nt", reason="the programs split paths at /")
def test_the_answers_of_the_page_are_read(tmp_path, monkeypatch, capsys):
    """Each program, then data.py with the flags of its last line; and all sections are there."""
    monkeypatch.chdir(tmp_path)
    write_inputs()
    page = (ROOT / "results" / "own.md").read_text(encoding="utf-8")
    page = page[page.index("### Answers") : page.index("## Predictions for new")]
    names = dict(np=np, pd=pd, json=json, glob=glob)
    stems = []
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        for program, flags in re.findall(r"(.*?)\n# (--task file:[^\n]*)\n", block, re.S):
            exec(program, names)
            assert data.main(flags.split()) == 0, (flags, capsys.readouterr())
            stems.append(re.search(r"file:(\w+)", flags)[1])
            task, *_ = data.open_task(flags.split()[1])
            shape = task.length, task.channels, task.classes
            assert shape == WRITTEN.get(stems[-1], (12, 1, 3)), stems[-1]
    assert {*WRITTEN} < {*stems} and len(stems) > 20
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "own").glob("*.py"))
    sections = {match[0] for match in re.findall(r"\{PAGE\}: ((\w+ ?)+)", code)}
    assert len(sections) > 5
    for section in sections:
        assert f"**{section}" in page, section
