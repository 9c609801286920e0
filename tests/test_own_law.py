"""A random table of known meaning is read back the same in every format; after a mishap it is
refused in one line, and the flags that the line names cure it."""

import gzip
import io
import json
import re

import numpy as np
import pandas as pd
import pytest

from files import UserError
from own.columns import Layout
from own.questions import ask_about_labels
from own.read import read_own
from own.task import ended

DELIMITERS = ",", ";", "\t", "|", " "
ENCODINGS = "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "cp1252"


class Truth:
    """n series of up to l samples, their labels, persons and folds. By the seed: whole series, or
    with missing samples, or of several lengths; NaN stands for what is not there."""

    def __init__(self, seed, whole=False):
        rng = self.rng = np.random.default_rng(seed)
        self.n, self.l = int(rng.integers(15, 30)), int(rng.integers(5, 15))
        self.x = (rng.normal(size=(self.n, self.l)) * 10.0 ** rng.integers(-2, 4)).round(5)
        kind = 0 if whole else seed % 3
        if kind == 1:
            self.x[1:, 1:-1][rng.random((self.n - 1, self.l - 2)) < 0.1] = np.nan
        if kind == 2:
            lengths = [self.l, *rng.integers(3, self.l + 1, self.n - 1)]
            self.x[np.arange(self.l) >= np.array(lengths)[:, None]] = np.nan
        names = [["walk", "run", "sit"], ["1", "2", "3"], ["a b", "c", "é"]][seed // 3 % 3]
        self.y = np.array(names)[rng.permutation(np.arange(self.n) % 3)]
        self.person = np.array([f"P{i // 3}" for i in range(self.n)])
        self.fold = np.arange(self.n) % 4
        # of fractions, names of counts and times are samples, too
        self.names = ["heat_index", "set_temp", *(f"t{t}" for t in range(2, self.l))]

    def rows(self, header=True, comma=False, missing=""):
        """Lists of fields: a label and the samples."""
        rows = [["label", *self.names]] if header else []
        for label, series in zip(self.y, self.x.tolist()):
            cells = [missing if np.isnan(value) else repr(value) for value in series]
            rows.append([label, *(cell.replace(".", ",") if comma else cell for cell in cells)])
        return rows

    def frame(self):
        return pd.DataFrame(self.x, columns=self.names).assign(label=self.y)

    def lists(self):
        """The series as lists, None where a sample is missing."""
        series = [ended(row[:, None])[:, 0].tolist() for row in self.x]
        return [[None if np.isnan(value) else value for value in row] for row in series]


def text_of(rows, delimiter=",", end="\n"):
    def field(cell):
        return f'"{cell}"' if {delimiter, " "} & {*str(cell)} else str(cell)

    return "".join(delimiter.join(map(field, row)) + end for row in rows)


def as_text(truth):
    """A delimiter, a header or none, points or commas, the label somewhere, further columns."""
    rng = truth.rng
    delimiter, code = rng.choice(DELIMITERS), rng.choice(ENCODINGS)
    header, last, comma, blank = rng.integers(2, size=4)
    missing = "nan" if delimiter == " " else rng.choice(["", "NA", "nan", "?"])
    rows, flags = truth.rows(header, comma, missing), {}
    if header:
        rows[0][0] = rng.choice(["label", "Class", "target", "species"])
        flags = dict(label="species") if rows[0][0] == "species" else {}
    if last:
        rows = [[*row[1:], row[0]] for row in rows]
        flags = flags if header else dict(label="-1")
    role = rng.choice(["group", "split", ""])
    if role:
        values = truth.person if role == "group" else [f"{fold}.0" for fold in truth.fold]
        cells = ["who"] * header + [*values]
        rows = [[*row[:2], cell, *row[2:]] for row, cell in zip(rows, cells)]
        flags[role] = "who" if header else "2"
    ending = ".tsv" if delimiter == "\t" and rng.integers(2) else ".csv"
    text = text_of(rows, delimiter, ["\n", "\r\n"][rng.integers(2)] * (1 + blank))
    return f"a{ending}", text.encode(code), flags


def as_workbook(truth, *sheets):
    file = io.BytesIO()
    with pd.ExcelWriter(file) as writer:
        truth.frame().to_excel(writer, sheet_name="data", index=False)
        for name, state in sheets:
            pd.DataFrame([["x", 1]]).to_excel(writer, sheet_name=name, index=False)
            writer.sheets[name].sheet_state = state
    return "a.xlsx", file.getvalue(), {}


def as_parquet(truth):
    file = io.BytesIO()
    lists = pd.DataFrame(dict(x=[*truth.x], label=truth.y))
    (lists if truth.rng.integers(2) else truth.frame()).to_parquet(file)
    return "a.parquet", file.getvalue(), {}


def as_json_lines(truth):
    records = [dict(x=series, label=label) for series, label in zip(truth.lists(), truth.y)]
    return "a.jsonl", "\n".join(map(json.dumps, records)).encode(), {}


def packed(**arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def as_arrays(truth):
    return "a.npz", packed(x=truth.x, y=truth.y), {}


def as_ts(truth):
    lines = ["# a comment", "@problemName my", "@data"]
    for series, label in zip(truth.lists(), truth.y):
        cells = ["?" if value is None else repr(value) for value in series]
        lines.append(f"{','.join(cells)}:{label}")
    return "a.ts", "\n".join(lines).encode(), {}


def as_long(truth):
    """A row per position of two channels, in any order; dates may lie far apart (after 2262)."""
    days = np.datetime64("1600-01-02") + 40_000 * np.arange(truth.l)
    times = [np.arange(truth.l), days.astype(str)][truth.rng.integers(2)]
    rows = []
    for i, series in enumerate(truth.x):
        length = len(ended(series[:, None]))
        for t in truth.rng.permutation(length):
            cell = "" if np.isnan(series[t]) else repr(float(series[t]))
            other = cell and repr(-float(series[t]))
            rows.append([f"s{i}", times[t], truth.person[i], cell, other, truth.y[i]])
    header = ["case", "when", "subject", "up", "down", "label"]
    return "a.csv", text_of([header, *rows]).encode(), dict(id="case", time="when", group="subject")


FORMATS = as_text, as_workbook, as_parquet, as_json_lines, as_arrays, as_ts, as_long


def same(truth, name, raw, flags):
    contents = read_own(name, raw, Layout(**flags))
    case = name, flags, raw[:80]
    assert len(contents.series) == truth.n, case
    for series, exact in zip(contents.series, truth.x):
        exact = ended(np.stack([exact, -exact], 1)[:, : series.shape[1]])
        assert np.array_equal(ended(series), exact, equal_nan=True), case
    assert [*contents.labels] == [*truth.y] and contents.has_label.all(), case
    if "group" in flags:
        assert [*contents.group] == [*truth.person], case
    if "split" in flags:
        assert [*contents.split] == [*map(str, truth.fold)], case


@pytest.mark.parametrize("write", FORMATS, ids=lambda write: write.__name__)
def test_a_table_is_read_back_the_same(write):
    for seed in range(40 if write is as_text else 6):
        truth = Truth(seed)
        name, raw, flags = write(truth)
        same(truth, name, raw, flags)
        if seed % 5 == 0:
            same(truth, name + ".gz", gzip.compress(raw), flags)


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
    "a person's number": (with_column("subjectId", lambda t: t.fold), "--group subjectId"),
    "a fold": (with_column("Fold", lambda t: t.fold), "--split Fold"),
    "a split": (with_column("used", lambda t: ["train", "test"] * t.n), "--split used"),
    "a window": (with_column("window", lambda t: [f"0_{i}" for i in range(t.n)]), "--drop window"),
    "a row number": (with_column("no", lambda t: range(5, 5 + t.n)), "rises or falls.*--drop no"),
    "numbers": (with_column("no", lambda t: t.rng.permutation(t.n)), "whole numbers.*--drop no"),
    "a clock": (with_column("at", lambda t: range(10**9, 10**9 + 7 * t.n, 7)), "Windows of"),
    "a date": (with_column("day", lambda t: ["2024-03-01"] * t.n), "holds times"),
    "no number": (in_cell("5_3"), r"line \d+: column heat_index: '5_3' is no number"),
    "thousands": (in_cell('"1,024"'), "does the comma"),
    "no label": (in_cell("NA", 0), "is it a class\\? Rename"),
    "several labels": (in_cell('"run;c"', 0), "Several labels"),
    "a header repeated": (at_line(lambda row, header: [row, header]), "repeats the header"),
    "a line cut off": (at_line(lambda row, header: [row[:3]]), r"line \d+ has 3 fields"),
    "units": (lambda t, rows: [rows[0], ["", *["mV"] * t.l], *rows[1:]], "line 2: no numbers"),
    "a footer": (lambda t, rows: [*rows, ["Mean", *["-"] * t.l]], r"line \d+: no numbers"),
}


@pytest.mark.parametrize("mishap", MISHAPS)
def test_a_mishap_is_named_and_the_flags_that_are_named_cure_it(mishap):
    change, words = MISHAPS[mishap]
    for seed in 0, 6:
        truth = Truth(seed, whole=True)
        rows = change(truth, truth.rows())
        delimiter = DELIMITERS[seed % 4]
        raw = "".join(delimiter.join(map(str, row)) + "\n" for row in rows).encode()
        message = refused("a.csv", raw, words)
        for role, name in re.findall(r"--(group|split|drop) (\w+)", message):
            truth.person = truth.fold = [str(row[1]) for row in rows[1:]]
            same(truth, "a.csv", raw, {role: name})


def refused(name, raw, words, flags=()):
    with pytest.raises(UserError, match=words) as error:
        contents = read_own(name, raw, Layout(**dict(flags)))
        ask_about_labels(name, contents.labels[contents.has_label].tolist())
    assert name in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


def test_mishaps_of_long_tables():
    name, raw, flags = as_long(Truth(9, whole=True))
    lines = raw.split(b"\n")[:-1]
    shuffled = [lines[0], *np.random.default_rng(0).permutation(lines[1:]).tolist()]
    for table in raw, b"\n".join(shuffled):
        refused(name, table, "long table.*--id case --time when")
    refused(name, raw, "needs both --id COLUMN and --time", dict(id="case"))
    alone = {role: column for role, column in flags.items() if role != "group"}
    named = raw.replace(b"subject", b"ward").replace(b",P", b",")
    refused(name, named, "ward is the same at all positions.*--group ward", alone)
    refused(name, raw.replace(b"P1", b"P2", 1), "has several values of subject", flags)
    refused(name, b"\n".join([*lines, lines[-1]]), "s.* has two rows of one when", flags)
    first, label = lines[1].rsplit(b",", 1)
    other = next(line.rsplit(b",", 1)[1] for line in lines[1:] if not line.endswith(label))
    several = [lines[0], first + b"," + other, *lines[2:]]
    refused(name, b"\n".join(several), "s0 has several labels", flags)


def test_mishaps_of_other_formats():
    truth = Truth(1, whole=True)
    halves = [pd.DataFrame(truth.x).add_prefix(name) for name in "ab"]
    beside = pd.concat([truth.frame()["label"], *halves], axis=1)
    refused("a.csv", beside.to_csv(index=False).encode(), "channels side by side")
    recording = np.cumsum(truth.rng.normal(size=(200, 3)), 0).round(3)
    rows = [[["walk", "run"][i // 20 % 2], *row] for i, row in enumerate(recording)]
    refused("a.csv", text_of(rows).encode(), "as in a recording.*Windows of recordings")
    both = [[*row, str(i % 3)] for i, row in enumerate(truth.rows(header=False))]
    refused("a.csv", text_of(both).encode(), "label in the first column .* or the last")
    refused(*as_workbook(truth, ("notes", "visible"))[:2], "has the sheets data, notes")
    same(truth, *as_workbook(truth, ("notes", "hidden")))
    merged = Truth(1, whole=True)
    merged.y = np.where(np.arange(merged.n) % 3 == 0, merged.y, None)
    refused(*as_workbook(merged)[:2], "Merged cells")
    for cells in [1, 2, 3], [1, None, 3]:
        records = [json.dumps(dict(x=cells, label=label)) for label in truth.y]
        refused("a.jsonl", "\n".join(records).encode(), "--symbols.*--samples")
    refused("a.jsonl", b"[1]", "begins with an array")
    name, raw, _ = as_ts(truth)
    refused(name, raw.replace(b"@data\n", b"@data\n5_3,"), "line 4: .*no number")
    for flag in "group", "label", "time":
        refused(name, raw, f"--{flag} is for tables", {flag: "person"})


N, RNG = 60, np.random.default_rng(2)
X = RNG.normal(size=(N, 3, 12)).round(2)
SEVERAL = RNG.integers(0, 2, (N, 3)) | np.eye(3, dtype=int)[np.arange(N) % 3]
SEVERAL[0] = 1  # so not one-hot
HIGH = (X[:, 0] > 0).astype(int)
ONE_HOT = np.eye(5)[np.arange(N) % 5]
FIRST, POSITIONS = dict(channels_first=True), dict(label_per_position=True)


@pytest.mark.parametrize(
    "arrays, flags, meaning",
    [
        (dict(x=X, y=SEVERAL), FIRST, SEVERAL),  # y is as wide as there are channels
        (dict(x=X, y=HIGH), FIRST | POSITIONS, HIGH.astype(str)),
        (dict(x=X[:, 0], y=np.where(HIGH, 1, -1)), POSITIONS, np.where(HIGH, "1", "")),
        (dict(x=X[:, 0, :6], y=ONE_HOT), {}, np.arange(N) % 5),
        (dict(x=np.array(["abcd"] * N), y=HIGH[:, :4]), POSITIONS, HIGH[:, :4].astype(str)),
        (dict(x=X[:, 0], y=np.where(np.arange(N)[:, None] < 20, np.nan, SEVERAL)), {}, SEVERAL),
        (dict(x=X, y=SEVERAL), {}, "--channels-first"),  # aeon's axes
        (dict(x=X[:, 0], y=HIGH), {}, "--label-per-position"),
        (dict(x=X[:, 0, :5], y=ONE_HOT), {}, "--label-per-position"),
        (dict(x=X[:, 0], y=HIGH + 0.5), POSITIONS, "labels of positions are classes"),
        (dict(x=X[:, 0], y=SEVERAL + 1), {}, "several labels .* must be 0 or 1"),
        (dict(x=X[:, 0], y=SEVERAL, subject=np.arange(N)), {}, "--group subject"),
    ],
)
def test_what_arrays_mean_is_not_mistaken(arrays, flags, meaning):
    if isinstance(meaning, str):
        refused("a.npz", packed(**arrays), meaning, flags)
        return
    contents = read_own("a.npz", packed(**arrays), Layout(**flags))
    assert np.array_equal(contents.labels[contents.has_label], meaning[contents.has_label])
    assert contents.has_label.sum() == N - 20 * (arrays["y"].dtype.kind == "f" and meaning.ndim > 1)
    if arrays["x"].ndim == 3:
        assert np.array_equal(contents.series, X.swapaxes(1, 2))


def test_columns_of_several_labels_are_0_or_1():
    cells = np.array(["False", "1"])[SEVERAL]
    cells[50:] = ""  # no labels
    rows = [["a", "b", "c", "t0", "t1"], *np.hstack((cells, X[:, 0, :2].astype(str))).tolist()]
    raw, flags = text_of(rows).encode(), dict(label="a,b,c")
    contents = read_own("a.csv", raw, Layout(**flags))
    assert np.array_equal(contents.labels[:50], SEVERAL[:50]) and not contents.has_label[50:].any()
    rows[4][1] = "no"
    refused("a.csv", text_of(rows).encode(), "line 5: column b holds 'no'", flags)
    refused("a.csv", raw, "name each column once", dict(label="a,a"))
    refused("a.csv", raw, "only one if a row is a position", flags | dict(id="t0", time="t1"))


def test_a_column_of_a_long_table_labels_positions():
    truth = Truth(0)
    name, raw, _ = as_long(truth)
    flags = dict(id="case", time="when", label="label", drop="subject", label_per_position=True)
    lines = raw.replace(b",run\n", b",-1\n").replace(b",walk\n", b",2.0\n")
    contents = read_own(name, lines, Layout(**flags))
    exact = np.select([truth.y == "run", truth.y == "walk"], ["", "2"], "sit")
    assert np.array_equal(contents.labels, np.repeat(exact[:, None], truth.l, 1))


def test_a_skipped_row_takes_its_whole_sequence_along():
    truth = Truth(4, whole=True)
    name, raw, flags = as_long(truth)
    contents = read_own(name, raw, Layout(**flags), skip=[truth.l + 1])  # of the second sequence
    kept = [series[:, 0] for series in contents.series]
    assert np.array_equal(kept, np.delete(truth.x, 1, 0))
