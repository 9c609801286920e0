"""Read tables as people have them, through pandas: .csv, .tsv, .jsonl, .parquet, .xlsx, compressed
or not.

    label;t0;t1      a line of my.csv    ->    label "walk", 2 positions of 1 channel
    walk;0,5;0,7

Delimiter, encoding, header and decimal comma are recognised here. columns.py says which column
holds what."""

import contextlib
import csv
import io
import re
from itertools import islice, zip_longest
from typing import NamedTuple

import numpy as np

from files import UserError, reading

TABLES = ".csv", ".tsv", ".jsonl", ".parquet", ".xlsx"
DELIMITERS = ",;\t| "
LABELS = "label", "target", "class", "y"  # names of a label's column
TEXTS = "text", "review", "sentence"  # of a text's, by which a header is recognised
MISSING = {"", "na", "n/a", "#n/a", "<na>", "nan", "null", "none", "?"}  # in lower case
COMMA = r"[+-]?\d*,\d+(e[+-]?\d+)?"  # a number with a decimal comma
THOUSANDS = r"[+-]?[1-9]\d{0,2}(,\d{3})+"  # one that may have commas between thousands


class Layout(NamedTuple):
    """Which column holds what (a name or a number), and the order of an array's axes: the flags of
    data.py and predict.py with these names. The last three are what training data had."""

    label: str | None = None  # "none": the file has no label; "a,b": several, columns of 0 and 1
    text: str | None = None  # the only column that is read
    id: str | None = None  # in a long table, a row per position: which sequence it belongs to
    time: str | None = None  # and its place there
    no_header: bool = False
    channels_first: bool | None = None  # x is (n, channels, l)
    label_per_position: bool | None = None  # with id: the label of a row is that of its position
    columns: tuple = ()  # names of the columns that were read, if there was a header
    width: int | None = None  # their number, 0 if it differed; None: these are training data
    label_column: str = "none"


class Examples(NamedTuple):
    """The contents of a file: n series and, for each, what else the file says of it."""

    series: list  # samples float64 (l, channels), symbols int64 (l,) or a text each
    labels: np.ndarray | None = None  # (n,); several (n, k); or one per position (n, longest)
    known: np.ndarray | None = None  # bool (n,): has a label
    split: np.ndarray | None = None  # (n,)
    group: np.ndarray | None = None  # (n,)
    rows: np.ndarray | None = None  # (n,): the row of the file
    layout: Layout | None = None  # of a table: how new data are read
    unreadable: dict = {}  # {index of a series that could not be read: UserError}

    def all_series(self, bad=None):
        """Return the series. Raise the first error of reading, or add all to the dict `bad`."""
        if self.unreadable and bad is None:
            raise self.unreadable[min(self.unreadable)]
        if bad is not None:
            bad.update(self.unreadable)
        return self.series


def add_layout(parser, of="your data"):
    """Add the flags of a Layout to a parser."""
    title = f"columns of {of}, if it is a table (a name, or a number from 0; -1: the last)"
    add = parser.add_argument_group(title).add_argument
    default = "the column called label, target, class or y; without a header, the first"
    help = f"the label (default: {default}); none: there is no label; a,b: several, 0 or 1"
    add("--label", metavar="COLUMN", help=help)
    add("--text", metavar="COLUMN", help="the text, if there are further columns")
    add("--id", metavar="COLUMN", help="in a table with a row per position: the row's sequence")
    add("--time", metavar="COLUMN", help="with --id: the order of the positions")
    switch = dict(action="store_true", default=None)
    add("--label-per-position", help="with --id: each position has a label of its own", **switch)
    add("--no-header", help="the first line is data", **switch)
    switch = dict(dest="channels_first", action="store_const")
    help = f"{of}: arrays are (n, channels, l)"
    parser.add_argument("--channels-first", const=True, help=help, **switch)
    parser.add_argument("--channels-last", const=False, help="(n, l, channels)", **switch)


def given(args):
    """Return the given flags of a Layout as a dict, or None."""
    flags = {name: getattr(args, name, None) for name in Layout._fields}
    return {name: value for name, value in flags.items() if value is not None} or None


# ---- cells ---------------------------------------------------------------------------------------


def as_number(cell):
    """Return a field as a float, NaN if it is missing. ValueError if it is no number."""
    text = str(cell).strip().lower()
    if text in MISSING:
        return float("nan")
    return float(text.replace(",", ".") if re.fullmatch(COMMA, text) else text)


def number_or_none(cell):
    try:
        return as_number(cell)
    except ValueError:
        return None


def is_number(cell):
    """Return whether a field is a number or says that one is missing."""
    return number_or_none(cell) is not None


# ---- lines ---------------------------------------------------------------------------------------


def decoded(path, raw):
    """Return the text in the bytes of a file: UTF-8, UTF-16, or else Windows-1252."""
    encoding = "utf-8-sig"
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        encoding = "utf-16"
    elif raw[1:2] == b"\0":
        encoding = "utf-16-le"
    with contextlib.suppress(UnicodeDecodeError):
        return raw.decode(encoding)
    if b"\0" in raw[:10_000]:
        raise UserError(f"{path} is no text file; save it as UTF-8")
    print(f"{path}: not UTF-8, read as Windows-1252")
    return raw.decode("cp1252", "replace")


def lines_of(text, delimiter):
    """Return an iterator over the lines. Where blanks separate fields, tabs do, too."""
    lines = io.StringIO(text, newline="")
    return (line.replace("\t", " ") for line in lines) if delimiter == " " else lines


def first_rows(text, delimiter, n=50):
    """Return the first lines as lists of fields, without blank lines."""
    csv.field_size_limit(1 << 30)
    reader = csv.reader(lines_of(text, delimiter), delimiter=delimiter, skipinitialspace=True)
    return [*islice(filter(any, reader), n)]


def delimiter_of(text, usual):
    """Return the delimiter that all of the first lines share, or None: the one that makes most
    fields numbers, else the usual one."""
    shares = {}  # {delimiter: share of numbers, 0 if they are not most fields}
    for delimiter in sorted(DELIMITERS, key=lambda sign: (sign == " ", sign != usual)):
        rows = first_rows(text, delimiter)
        if rows and min(map(len, rows)) > 1 and (delimiter != " " or not shares):
            numbers = [is_number(cell) for row in rows[1:] or rows for cell in row]
            share = sum(numbers) / len(numbers)
            shares[delimiter] = share if share > 0.5 else 0
    if not shares or [*shares] == [" "] and not shares[" "]:  # the blanks of texts
        return None
    return max(shares, key=shares.get)  # the first of equal ones


def all_rows(path, text, delimiter):
    """Return the lines of a text file as lists of fields. Quotes are around a field and doubled in
    it, or have a backslash before them, or, in a .tsv, are letters."""
    blanks = delimiter == " " or re.search(f'{re.escape(delimiter)} +"', text) is not None
    style = dict(delimiter=delimiter, skipinitialspace=blanks)
    for quotes in {}, dict(escapechar="\\"):
        reader = csv.reader(lines_of(text, delimiter), strict=True, **style, **quotes)
        try:
            rows = [*reader]
        except csv.Error as error:
            problem = f"{path}, line {reader.line_num}: {error}; double the quotes within quotes"
            continue
        swallowed = any("\t" in field and "\n" in field for row in rows for field in row)
        if delimiter != "\t" or not swallowed:  # no rows within quotes
            return rows
    if delimiter != "\t":
        raise UserError(problem)
    return [*csv.reader(lines_of(text, delimiter), quoting=csv.QUOTE_NONE, **style)]


# ---- a file as a DataFrame -----------------------------------------------------------------------


def read_frame(path, kind, raw, layout):
    """Read a file of a kind of TABLES -> DataFrame, and whether it has a header. Columns are its
    names, or numbers; the index is the line, counted from 0 below the header."""
    skipped = 0
    if kind in (".jsonl", ".parquet"):
        return read_binary(path, kind, raw), True
    if kind == ".xlsx":
        frame = read_binary(path, kind, raw)
    else:
        frame, skipped = read_lines(path, kind, raw)
    frame = without_margins(path, frame, layout)
    if frame.empty or not has_header(frame, layout):
        return frame, False
    names = column_names(frame)
    if names == [*map(str, range(len(names)))]:  # an array's, which says nothing
        return frame.iloc[1:].set_axis(frame.index[1:] - 1), False
    frame = under_header(path, frame, names)
    return frame.set_axis(frame.index - skipped - 1), True


def read_binary(path, kind, raw):
    """Read the bytes of a .jsonl or .parquet file, or of the first sheet of an .xlsx, as texts ->
    DataFrame."""
    import pandas as pd  # here, because every script imports this file

    file = io.BytesIO(raw)
    advice = "save it as .csv, or as .jsonl with a JSON object per line"
    with reading(f"{path} cannot be read", advice):
        if kind == ".xlsx":
            return pd.read_excel(file, header=None, dtype=str, keep_default_na=False)
        parquet = kind == ".parquet"
        frame = pd.read_parquet(file) if parquet else pd.read_json(file, lines=True, dtype=False)
        return frame.rename(columns=str).reset_index(drop=True)


def read_lines(path, kind, raw):
    """Read the bytes of a .csv or .tsv file -> DataFrame of texts, and how many lines of comments
    above numbers were left out."""
    import pandas as pd

    text = re.sub(r"^sep=.\r?\n", "\n", decoded(path, raw))  # Excel's
    usual = "\t" if kind == ".tsv" else ","
    comments = re.match(r"(#.*\n)*", text)[0]
    below = text.removeprefix(comments)
    rows = first_rows(below, delimiter_of(below, usual) or usual, 2)
    skipped = 0
    if comments and any(is_number(cell) for row in rows for cell in row):
        skipped = comments.count("\n")
        print(f"{path}: the first {skipped} lines, which begin with #, are left out")
        text = "\n" * skipped + below
    delimiter = delimiter_of(text, usual) or "\x1f"  # one that no text has
    columns = [*zip_longest(*all_rows(path, text, delimiter), fillvalue="")]
    return pd.DataFrame(np.array(columns, object).T), skipped


def without_margins(path, frame, layout):
    """Leave out empty rows, and empty columns on the right."""
    filled = frame.ne("").to_numpy() & frame.notna().to_numpy()
    if not filled.any():
        return frame[:0]
    width = 1 + np.flatnonzero(filled.any(0))[-1]
    if 1 < width == layout.width < frame.shape[1] and layout.label is None and layout.id is None:
        problem = f"{path}: the last column is empty; is the first the label?"
        raise UserError(f"{problem} Give --label 0, or --label none")
    return frame.loc[filled.any(1), : frame.columns[width - 1]]


def column_names(frame):
    """Return the fields of the first row as names."""
    return [str(name).strip() for name in frame.iloc[0].fillna("")]


def has_header(frame, layout):
    """Return whether the first row names the columns, as it looks or as a Layout says."""
    if layout.no_header:
        return False
    names = {*column_names(frame)}
    asked = {name for name in layout[:4] if name and not re.fullmatch(r"-?\d+", name)}
    trained = layout.columns and {*layout.columns} <= names
    return looks_like_header(frame) or bool(asked & names) or bool(trained)


def looks_like_header(frame):
    """Return whether the first row names the columns: one is called like a label, or none of its
    fields is a number where all below it are; or it counts the columns, as pandas does, or only the
    first has no name."""
    names = column_names(frame)
    body = frame.iloc[1:50].fillna("")
    for column, name in zip(frame.columns, names):
        if name.lower() in LABELS + TEXTS and name not in set(body[column]):
            return True
    counts = [*map(str, range(len(names)))]
    first, *others = names
    named = others == counts[:-1] or not any(map(is_number, others))
    index = not first and all(others) and named
    if len(names) > 2 and (names == counts or index):
        return True
    below = body.map(is_number).all()  # is a column of numbers?
    numeric = [name for name, numbers in zip(names, below) if numbers and len(body)]
    return bool(numeric) and not any(map(is_number, numeric))


def under_header(path, frame, names):
    """Return the rows below the header, with its names. An index of pandas is left out."""
    frame = frame.iloc[1:].set_axis(names, axis=1)
    if twice := [name for name in names if name and names.count(name) > 1]:
        problem = f"{path}: {len(twice)} columns are called {twice[0]!r}"
        raise UserError(f"{problem}; rename them, or give --no-header")
    if "" in names[1:]:
        problem = f"{path}: column {names.index('', 1)} (counted from 0) has no name in the header"
        raise UserError(f"{problem}; name it, or remove it")
    first = frame.iloc[:, 0]
    nameless = names[0] in ("", "Unnamed: 0") and len(names) > 2
    if nameless and first.str.fullmatch(r"\d+").all() and first.is_unique:
        print(f"{path}: the first column has no name and is left out, as an index")
        frame = frame.iloc[:, 1:]
    return frame
