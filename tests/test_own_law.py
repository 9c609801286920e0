"""A random table of known meaning is read back the same, in whatever format it is written, and
after every mishap it is refused in one line that names the place and the cure."""

import gzip
import io
import json

import numpy as np
import pandas as pd
import pytest

from files import UserError
from own.columns import Layout
from own.read import read_own

DELIMITERS = ",", ";", "\t", "|", " "


class Truth:
    """n sequences of l samples, their labels, persons and folds."""

    def __init__(self, seed):
        rng = self.rng = np.random.default_rng(seed)
        self.n, self.l = int(rng.integers(12, 30)), int(rng.integers(5, 15))
        self.x = (rng.normal(size=(self.n, self.l)) * 10.0 ** rng.integers(-2, 4)).round(5)
        names = [["walk", "run", "sit"], ["1", "2", "3"], ["a b", "c", "é"]][seed % 3]
        self.y = np.array(names)[rng.permutation(np.arange(self.n) % 3)]
        self.person = np.array([f"P{i // 3}" for i in range(self.n)])
        self.fold = np.arange(self.n) % 4
        self.names = [f"t{t}" for t in range(self.l)]

    def rows(self, header=True, comma=False):
        cells = [[repr(float(value)) for value in row] for row in self.x]
        if comma:
            cells = [[cell.replace(".", ",") for cell in row] for row in cells]
        rows = [[label, *row] for label, row in zip(self.y, cells)]
        return [["label", *self.names], *rows] if header else rows

    def frame(self):
        return pd.DataFrame(self.x, columns=self.names).assign(label=self.y)


def text_of(rows, delimiter=",", end="\n"):
    quoted = [
        [f'"{cell}"' if delimiter in str(cell) or " " in str(cell) else str(cell) for cell in row]
        for row in rows
    ]
    return "".join(delimiter.join(row) + end for row in quoted)


def as_text(truth):
    """A delimiter, a header or none, points or commas, the label somewhere, further columns."""
    rng = truth.rng
    delimiter = DELIMITERS[rng.integers(5)]
    header, last, comma = rng.integers(2, size=3)
    rows = truth.rows(header, comma)
    flags = {}
    if last:
        rows = [[*row[1:], row[0]] for row in rows]
        flags = {} if header else dict(label="-1")
    for role, name, values in (("group", "who", truth.person), ("split", "part", truth.fold)):
        if rng.integers(2):
            rows = [
                [*row[:2], value, *row[2:]] for row, value in zip(rows, [name] * header + [*values])
            ]
            flags |= {role: name if header else "2"}
            break
    ending = ".tsv" if delimiter == "\t" and rng.integers(2) else ".csv"
    raw = text_of(rows, delimiter, ["\n", "\r\n"][rng.integers(2)])
    code = ["utf-8", "utf-8-sig", "utf-16", "cp1252"][rng.integers(4)]
    return f"a{ending}", raw.encode(code), flags


def as_workbook(truth, *sheets):
    file = io.BytesIO()
    with pd.ExcelWriter(file) as writer:
        truth.frame().to_excel(writer, sheet_name="data", index=False)
        for name, state in sheets:
            pd.DataFrame([["x", 1]]).to_excel(writer, sheet_name=name, index=False)
            writer.sheets[name].sheet_state = state
    return "a.xlsx", file.getvalue(), {}


def as_parquet(truth, lists=False):
    file = io.BytesIO()
    frame = pd.DataFrame(dict(x=[*truth.x], label=truth.y)) if lists else truth.frame()
    frame.to_parquet(file)
    return "a.parquet", file.getvalue(), {}


def as_json_lines(truth):
    records = [dict(x=row.tolist(), label=label) for row, label in zip(truth.x, truth.y)]
    return "a.jsonl", "\n".join(map(json.dumps, records)).encode(), {}


def as_arrays(truth, **more):
    file = io.BytesIO()
    np.savez(file, **dict(x=truth.x, y=truth.y) | more)
    return "a.npz", file.getvalue(), {}


def as_ts(truth):
    lines = [f"{','.join(map(repr, row))}:{y}" for row, y in zip(truth.x.tolist(), truth.y)]
    return "a.ts", "\n".join(["@data", *lines]).encode(), {}


def as_long(truth):
    rows = [
        [f"s{i}", t, truth.person[i], value, truth.y[i]]
        for i, row in enumerate(truth.x.tolist())
        for t, value in enumerate(row)
    ]
    order = sorted(range(len(rows)), key=lambda i: (rows[i][0], truth.rng.random()))
    order = sorted(order, key=lambda i: int(rows[i][0][1:]))
    rows = [["case", "when", "subject", "up", "label"], *(rows[i] for i in order)]
    return "a.csv", text_of(rows).encode(), dict(id="case", time="when", group="subject")


FORMATS = as_text, as_workbook, as_parquet, as_json_lines, as_arrays, as_ts, as_long


def same(truth, name, raw, flags):
    contents = read_own(name, raw, Layout(**flags))
    assert np.array_equal([series[:, 0] for series in contents.series], truth.x)
    assert [*contents.labels] == [*truth.y] and contents.has_label.all()
    if "group" in flags:
        assert [*contents.group] == [*truth.person]
    if "split" in flags:
        assert [*contents.split] == [*map(str, truth.fold)]


@pytest.mark.parametrize("write", FORMATS, ids=lambda write: write.__name__)
def test_a_table_is_read_back_the_same(write):
    for seed in range(60 if write is as_text else 6):
        truth = Truth(seed)
        name, raw, flags = write(truth)
        same(truth, name, raw, flags)
        if seed % 3 == 0:
            same(truth, name + ".gz", gzip.compress(raw), flags)
    same(truth, *as_parquet(truth, lists=True))


def with_column(name, values):
    """A mishap: a column beside the samples."""

    def change(truth, rows):
        cells = [name, *values(truth)]
        return [[row[0], cell, *row[1:]] for row, cell in zip(rows, cells)]

    return change


def at_line(change):
    """A mishap of one line somewhere: change(row, header) returns rows in its place."""

    def changed(truth, rows):
        i = int(truth.rng.integers(2, len(rows) - 1))
        return [*rows[:i], *change(rows[i], rows[0]), *rows[i + 1 :]]

    return changed


def in_cell(text, column=1):
    return at_line(lambda row, header: [[*row[:column], text, *row[column + 1 :]]])


MISHAPS = {
    "a person's number": (with_column("subject_id", lambda t: t.fold), "--group subject_id"),
    "a person's name": (with_column("Patient", lambda t: t.person), "--group Patient"),
    "a session": (with_column("session", lambda t: t.fold), "--group session"),
    "a fold": (with_column("fold", lambda t: t.fold), "--split fold"),
    "a split": (
        with_column("used", lambda t: np.array(["train", "test"])[t.fold % 2]),
        "--split used",
    ),
    "a window": (with_column("window", lambda t: [f"0_{i}" for i in range(t.n)]), "--drop window"),
    "a row number": (
        with_column("no", lambda t: range(5, 5 + t.n)),
        "rises or falls.*--drop no",
    ),
    "a clock": (with_column("when", lambda t: range(10**9, 10**9 + 7 * t.n, 7)), "Windows of"),
    "a date": (with_column("day", lambda t: ["2024-03-01"] * t.n), "holds times"),
    "a trial": (
        with_column("trial", lambda t: np.arange(t.n) // 4),
        "whole numbers.*--drop trial",
    ),
    "a flag": (with_column("worn", lambda t: ["True"] * t.n), "worn holds no numbers"),
    "lists": (with_column("z", lambda t: ["[1 2]"] * t.n), "z holds no numbers"),
    "no number": (in_cell("5_3"), r"line \d+: column t0: '5_3' is no number"),
    "thousands": (in_cell('"1,024"'), "does the comma"),
    "thousands in a label": (in_cell('"1,024"', 0), "does the comma"),
    "no label": (in_cell("NA", 0), "is it a class\\? Rename"),
    "several labels": (
        lambda truth, rows: [*rows, [f'"{truth.y[0]};{truth.y[1]}"', *rows[1][1:]]],
        "Several labels",
    ),
    "a header repeated": (
        at_line(lambda row, header: [row, header]),
        r"line \d+ repeats the header",
    ),
    "a field too many": (
        at_line(lambda row, header: [[*row, "0.5"]]),
        r"line \d+ has \d+ fields, and most lines have \d+",
    ),
    "a line cut off": (at_line(lambda row, header: [row[:3]]), r"line \d+ has 3 fields"),
    "units": (
        lambda truth, rows: [rows[0], ["", *["mV"] * truth.l], *rows[1:]],
        "line 2: no numbers, but 'mV'",
    ),
    "a preamble": (
        lambda truth, rows: [["Logger", "SN-7"], ["Start", "noon"], *rows],
        "line 1 has 2 fields",
    ),
    "a footer": (
        lambda truth, rows: [*rows, ["Mean", *["-"] * truth.l]],
        r"line \d+: no numbers, but '-'",
    ),
}


@pytest.mark.parametrize("mishap", MISHAPS)
def test_a_mishap_is_named(mishap):
    change, words = MISHAPS[mishap]
    for seed in range(9):
        truth = Truth(seed)
        delimiter = DELIMITERS[seed % 4]
        rows = change(truth, truth.rows())
        raw = "".join(delimiter.join(map(str, row)) + "\n" for row in rows).encode()
        refused("a.csv", raw, words)


def refused(name, raw, words, **flags):
    from own.questions import ask_about_labels

    with pytest.raises(UserError, match=words) as error:
        contents = read_own(name, raw, Layout(**flags))
        ask_about_labels(name, contents.labels[contents.has_label].tolist())
    assert name in str(error.value) and "\n" not in str(error.value)


def test_mishaps_of_other_formats():
    truth = Truth(1)
    name, raw, flags = as_long(Truth(4))
    refused(name, raw, "long table.*--id case --time when")
    shuffled = [raw.split(b"\n")[0], *truth.rng.permutation(raw.split(b"\n")[1:-1])]
    refused(name, b"\n".join(shuffled), "long table.*--id case --time when")
    named = raw.replace(b"subject", b"ward").replace(b",P", b",")
    del flags["group"]
    refused(name, named, "ward is the same at all positions.*--group ward", **flags)
    refused(name, raw.replace(b"P1", b"P2", 1), "subject", **flags, group="subject")
    beside = pd.concat([truth.frame(), truth.frame()[truth.names].add_prefix("b")], axis=1)
    refused("a.csv", beside.to_csv(index=False).encode(), "channels side by side")
    recording = np.cumsum(truth.rng.normal(size=(200, 3)), 0).round(3)
    rows = [[["walk", "run"][i // 20 % 2], *row] for i, row in enumerate(recording)]
    refused("a.csv", text_of(rows).encode(), "as in a recording.*Windows of recordings")
    both = [[*row, str(i % 3)] for i, row in enumerate(truth.rows(header=False))]
    refused("a.csv", text_of(both).encode(), "label in the first column .* or the last")
    refused(*as_workbook(truth, ("notes", "visible"))[:2], "has the sheets data, notes")
    same(truth, *as_workbook(truth, ("notes", "hidden")))
    merged = Truth(1)
    merged.y = np.where(np.arange(merged.n) % 3 == 0, merged.y, None)
    refused(*as_workbook(merged)[:2], "Merged cells")
    whole = [dict(x=[1, 2, 3], label=label) for label in truth.y]
    refused("a.jsonl", "\n".join(map(json.dumps, whole)).encode(), "--symbols.*--samples")
    refused("a.jsonl", json.dumps(whole).encode(), "begins with an array")
    y = np.eye(truth.l, dtype=int)[np.arange(truth.n) % truth.l]
    refused(*as_arrays(truth, y=y)[:2], "--label-per-position")
    refused(*as_arrays(truth, subject=truth.person)[:2], "--group subject")
    for flag in "group", "label", "time":
        refused(*as_ts(truth)[:2], f"--{flag} is for tables", **{flag: "person"})
    name, raw, _ = as_ts(truth)
    broken = raw.replace(b",", b",5_3,", 1)
    refused(name, broken, "line 2: .*no number")
    nulls = [dict(x=[1, None, 3], label=label) for label in truth.y]
    refused("a.jsonl", "\n".join(map(json.dumps, nulls)).encode(), "--symbols.*--samples")
    refused(*as_arrays(truth, x=truth.x[:, None])[:2], "--channels-first")  # aeon's axes
    square = truth.rng.normal(size=(truth.n, 6, 6))
    refused(*as_arrays(truth, x=square)[:2], "--channels-first")


def test_a_skipped_row_takes_its_sequence_along():
    """Otherwise a shorter sequence would be read in silence."""
    truth = Truth(4)
    name, raw, flags = as_long(truth)
    contents = read_own(name, raw, Layout(**flags), skip=[truth.l + 1])  # of the second sequence
    assert np.array_equal([series[:, 0] for series in contents.series], np.delete(truth.x, 1, 0))
    assert contents.ids.tolist() == [f"s{i}" for i in range(truth.n) if i != 1]
