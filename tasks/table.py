"""Read tables as people have them, through pandas: .csv, .tsv, .jsonl, .parquet, .xlsx, compressed
or not.

    label;t0;t1      a line of my.csv    ->    label "walk", 2 positions of 1 channel
    walk;0,5;0,7

Delimiter, encoding, header and decimal comma are recognised. Which column holds what is said by a
`Layout` where the file does not say it: with a header, the label is the column called label,
target, class or y; without one, the first."""

import contextlib
import csv
import io
import re
from collections import namedtuple
from itertools import islice, zip_longest
from typing import NamedTuple

import numpy as np

from files import UserError, reading

TABLES = ".csv", ".tsv", ".jsonl", ".parquet", ".xlsx"
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars", " ": "spaces"}
LABELS = "label", "target", "class", "y"  # names of a label's column
TEXTS = "text", "review", "sentence"  # of a text's, by which a header is recognised
MISSING = {"", "na", "n/a", "#n/a", "<na>", "nan", "null", "none", "?"}  # in lower case
COMMA = r"[+-]?\d*,\d+(e[+-]?\d+)?"  # a number with a decimal comma
THOUSANDS = r"[+-]?[1-9]\d{0,2}(,\d{3})+"  # one that may have commas between thousands
ID = r"index|idx|(.*[_ .-])?(id|uuid)"  # a column's name, in lower case; heat_index is none


class Layout(NamedTuple):
    """Which column holds what: a name, or a number from 0, or from -1 at the end; and the order of
    an array's axes. The flags of data.py and predict.py have these names. The last three are what
    training data had: the names of the columns that were read, if there was a header; their number,
    0 if it differed; and the label's."""

    label: str | None = None  # "none": the file has no label; "a,b": several, columns of 0 and 1
    text: str | None = None  # the only column that is read
    id: str | None = None  # in a long table, a row per position: which sequence it belongs to
    time: str | None = None  # and its place there
    no_header: bool = False
    channels_first: bool | None = None  # x is (n, channels, l)
    label_per_position: bool | None = None  # with id: the label of a row is that of its position
    columns: tuple = ()
    width: int | None = None  # None: these are training data
    label_column: str = "none"


# The contents of a file: n series and, for each, the label, `known` (n,): has a label, split,
# group, and the row of the file; and the Layout of a table.
Own = namedtuple("Own", "series labels known split group rows layout", defaults=[None] * 6)


def add_layout(parser, of="your data"):
    """Add the flags of a Layout to a parser."""
    group = parser.add_argument_group(
        f"columns of {of}, if it is a table (a name, or a number from 0; -1: the last)"
    )
    group.add_argument(
        "--label",
        metavar="COLUMN",
        help="the label (default: the column called label, target, class "
        "or y; without a header, the first); none: there is no label; a,b: several labels, 0 or 1",
    )
    group.add_argument("--text", metavar="COLUMN", help="the text, if there are further columns")
    group.add_argument(
        "--id", metavar="COLUMN", help="in a table with a row per position: the sequence of the row"
    )
    group.add_argument("--time", metavar="COLUMN", help="with --id: the order of the positions")
    group.add_argument(
        "--label-per-position",
        action="store_true",
        default=None,
        help="with --id: each position has a label of its own",
    )
    group.add_argument(
        "--no-header", action="store_true", default=None, help="the first line is data"
    )
    parser.add_argument(
        "--channels-first",
        action="store_const",
        const=True,
        help=f"{of}: arrays are (n, channels, l)",
    )
    parser.add_argument(
        "--channels-last",
        dest="channels_first",
        action="store_const",
        const=False,
        help="they are (n, l, channels)",
    )


def given(args):
    """Return the given flags of a Layout as a dict, or None."""
    return {
        name: value for name in Layout._fields if (value := getattr(args, name, None)) is not None
    } or None


def decoded(path, raw):
    """Return the text in the bytes of a file: UTF-8, UTF-16, or else Windows-1252, which extends
    Latin-1."""
    with contextlib.suppress(UnicodeDecodeError):
        return raw.decode(
            "utf-16"
            if raw[:2] in (b"\xff\xfe", b"\xfe\xff")
            else "utf-16-le"
            if raw[1:2] == b"\0"
            else "utf-8-sig"
        )
    if b"\0" in raw[:10_000]:
        raise UserError(f"{path} is no text file; save it as UTF-8")
    print(f"{path}: not UTF-8, read as Windows-1252")
    return raw.decode("cp1252", "replace")


def value(cell):
    """Return a field as a float, NaN if it says that it is missing. ValueError if it is no
    number."""
    text = str(cell).strip().lower()
    return float(
        "nan" if text in MISSING else text.replace(",", ".") if re.fullmatch(COMMA, text) else text
    )


def value_or_none(cell):
    with contextlib.suppress(ValueError):
        return value(cell)


def number(cell):
    """Return whether a field is a number or says that one is missing."""
    return value_or_none(cell) is not None


def lines_of(text, delimiter):
    """Return an iterator over the lines. Where blanks separate fields, tabs do, too."""
    lines = io.StringIO(text, newline="")
    return (line.replace("\t", " ") for line in lines) if delimiter == " " else lines


def rows_of(text, delimiter, n=50):
    """Return the first lines as lists of fields, without blank lines."""
    csv.field_size_limit(1 << 30)
    reader = csv.reader(lines_of(text, delimiter), delimiter=delimiter, skipinitialspace=True)
    return [*islice(filter(any, reader), n)]


def delimiter_of(text, usual):
    """Return the delimiter that all of the first lines share, or None: the one that makes most
    fields numbers, else the usual one."""
    found = {}
    for delimiter in sorted(DELIMITERS, key=lambda one: (one == " ", one != usual)):
        rows = rows_of(text, delimiter)
        if rows and min(map(len, rows)) > 1 and (delimiter != " " or not found):
            cells = [number(cell) for row in rows[1:] or rows for cell in row]
            share = sum(cells) / len(cells)
            found[delimiter] = share if share > 0.5 else 0
    if not found or [*found] == [" "] and not found[" "]:  # the blanks of texts
        return None
    return max(found, key=found.get)  # the first of equal ones


def frame_of(path, kind, raw, layout):
    """Read a file of a kind of TABLES -> DataFrame, and whether it has a header. Columns are its
    names, or numbers; the index is the line, counted from 0 below the header."""
    import pandas as pd  # here, because every script imports this file

    above = 0
    if not kind.endswith("sv"):
        with reading(
            f"{path} cannot be read", "save it as .csv, or as .jsonl with a JSON object per line"
        ):
            file = io.BytesIO(raw)
            if kind != ".xlsx":
                frame = (
                    pd.read_parquet(file)
                    if kind == ".parquet"
                    else pd.read_json(file, lines=True, dtype=False)
                )
                return frame.rename(columns=str).reset_index(drop=True), True
            frame = pd.read_excel(file, header=None, dtype=str, keep_default_na=False)
    else:
        text = re.sub(r"^sep=.\r?\n", "\n", decoded(path, raw))  # Excel's
        usual, comments = "\t" if kind == ".tsv" else ",", re.match(r"(#.*\n)*", text)[0]
        rest = text.removeprefix(comments)
        some = rows_of(rest, delimiter_of(rest, usual) or usual, 2)
        if comments and any(number(cell) for row in some for cell in row):  # above numbers
            above = comments.count("\n")
            print(f"{path}: the first {above} lines, which begin with #, are left out")
            text = "\n" * above + rest
        delimiter = delimiter_of(text, usual) or "\x1f"  # one that no text has
        rows = records(path, text, delimiter)
        # (rows, columns)
        frame = pd.DataFrame(np.array([*zip_longest(*rows, fillvalue="")], object).T)
    filled = frame.ne("").to_numpy() & frame.notna().to_numpy()
    if not filled.any():
        return frame[:0], False
    last = 1 + np.flatnonzero(filled.any(0))[-1]
    if 1 < last == layout.width < frame.shape[1] and layout.label is None and layout.id is None:
        raise UserError(
            f"{path}: the last column is empty; is the first the label? Give --label 0, or --label "
            "none"
        )
    frame = frame.loc[filled.any(1), : frame.columns[last - 1]]
    names = [str(name).strip() for name in frame.iloc[0].fillna("")]
    flags = {flag for flag in layout[:4] if flag and not re.fullmatch(r"-?\d+", flag)}
    if layout.no_header or not (
        headed(frame) or flags & {*names} or layout.columns and {*layout.columns} <= {*names}
    ):
        return frame, False
    if names == [*map(str, range(len(names)))]:  # an array's, which says nothing
        return frame.iloc[1:].set_axis(frame.index[1:] - 1), False
    frame = frame.iloc[1:].set_axis(names, axis=1)
    if twice := [name for name in names if name and names.count(name) > 1]:
        raise UserError(
            f"{path}: {len(twice)} columns are called {twice[0]!r}; rename them, or give "
            "--no-header"
        )
    if "" in names[1:]:
        raise UserError(
            f"{path}: column {names.index('', 1)} (counted from 0) has no name in the header; name "
            "it, or "
            "remove it"
        )
    first = frame.iloc[:, 0]
    if (
        names[0] in ("", "Unnamed: 0")
        and len(names) > 2
        and first.str.fullmatch(r"\d+").all()
        and first.is_unique
    ):
        print(
            f"{path}: the first column has no name and no number twice; it is left out, as an index"
        )
        frame = frame.iloc[:, 1:]
    return frame.set_axis(frame.index - above - 1), True


def records(path, text, delimiter):
    """Return the lines of a text file as lists of fields. Quotes are around a field and doubled in
    it, or have a backslash before them, or, in a .tsv, are letters. Blanks before a quote do not
    belong to the field."""
    blanks = delimiter == " " or re.search(f'{re.escape(delimiter)} +"', text) is not None
    how = dict(delimiter=delimiter, skipinitialspace=blanks)
    for quotes in {}, dict(escapechar="\\"):
        reader = csv.reader(lines_of(text, delimiter), strict=True, **how, **quotes)
        try:
            rows = [*reader]
            if delimiter != "\t" or not any(
                "\t" in field and "\n" in field for row in rows for field in row
            ):
                return rows  # else there are rows within quotes
        except csv.Error as error:
            problem = f"{path}, line {reader.line_num}: {error}; double the quotes within a text in quotes"
    if delimiter != "\t":
        raise UserError(problem)
    return [*csv.reader(lines_of(text, delimiter), quoting=csv.QUOTE_NONE, **how)]


def headed(frame):
    """Return whether the first row names the columns: one is called like a label, or none of its
    fields is a number where all below it are; or it counts the columns, as pandas does, or only the
    first has no name."""
    first, body = (
        [str(cell).strip() for cell in frame.iloc[0].fillna("")],
        frame.iloc[1:50].fillna(""),
    )
    if any(
        name.lower() in LABELS + TEXTS and name not in set(body[i])
        for i, name in zip(frame.columns, first)
    ):
        return True
    if len(first) > 2 and (
        first == [*map(str, range(len(first)))]
        or not first[0]
        and all(first[1:])
        and (first[1:] == [*map(str, range(len(first) - 1))] or not any(map(number, first[1:])))
    ):
        return True
    below = [
        name for i, name in zip(frame.columns, first) if len(body) and body[i].map(number).all()
    ]
    return bool(below) and not any(map(number, below))


def column_of(path, frame, flag, wanted):
    """Return the column that a flag names."""
    if wanted in frame.columns:
        return wanted
    if re.fullmatch(r"-?\d+", wanted) and -frame.shape[1] <= int(wanted) < frame.shape[1]:
        return frame.columns[int(wanted)]
    raise UserError(
        f"{path} has no column {wanted!r} for --{flag}; its columns are: {listing(frame)}"
    )


def listing(frame):
    names = [repr(name) if name == "" else str(name) for name in frame.columns]
    return ", ".join(names if len(names) < 12 else [*names[:8], "...", *names[-2:]])


def place(path, row, header):
    """Return the words for a row of a table: its line in the file."""
    return f"{path}, line {row + 1 + (header and not path.lower().endswith('.jsonl'))}"


def numbers(path, frame, header):
    """Convert the fields of a frame to float64 (n, columns); fields that say so are missing. Also
    return the rows that hold something else, {row: UserError}."""
    cells = frame.astype(object).where(frame.notna(), "nan").to_numpy()
    with contextlib.suppress(ValueError, TypeError):
        return np.where(cells == "", "nan", cells).astype(np.float64), {}
    commas = [cell for cell in cells.flat if "," in str(cell)]
    if commas and (
        all(re.fullmatch(THOUSANDS, str(cell).strip()) for cell in commas)
        or any("." in str(cell) and number(cell) for cell in cells.flat)
    ):
        raise UserError(
            f"{path}: does the comma in {commas[0]!r} mark thousands or decimals? Write 1234 for "
            "thousands, 1.234 for decimals"
        )
    values, wrong = np.vectorize(value_or_none, [object])(cells), {}
    for i, j in np.argwhere(np.equal(values, None))[::-1]:  # the first of a row is named
        wrong[i] = UserError(
            f"{place(path, frame.index[i], header)}, column {frame.columns[j]}: "
            f"{str(cells[i, j])[:40]!r} is no number; correct it, or leave it empty if it is "
            "missing, "
            "or leave out the column (if it is the text: --text)"
        )
    return values.astype(float), wrong  # None: NaN


def labelled(column):
    """Return whether a column looks like classes: names or whole numbers, most of them more than
    once."""
    known = column[~column.str.strip().str.lower().isin(MISSING)]
    whole = not known.map(number).any() or known.str.fullmatch(r"\s*[+-]?\d+(\.0*)?\s*").all()
    return bool(whole) and 1 < known.nunique() <= max(2, len(known) / 3)


def label_columns(path, frame, header, layout, documents, regression):
    """Return the columns of the labels: one, none, or several, named as a,b,c."""
    columns, new, asked = (
        [*frame.columns],
        layout.width is not None,
        layout.label or layout.label_column,
    )
    wanted = [asked] if asked in columns else asked.split(",")
    if len(wanted) > 1 and (len({*wanted}) < len(wanted) or layout.id is not None):
        raise UserError(
            f"{path}: --label {asked}: name each column once; only one if a row is a position "
            "(--id)"
        )
    # Without a header, a new file has the label in the column of the training data, unless it has
    # only what is read.
    bare = layout.label_column == "none" or len(columns) in (layout.width, len(layout.columns))
    if layout.label == "none" or layout.label is None and new and not header and bare:
        return []
    if layout.label is not None or new and (not header or {*wanted} <= {*columns}):
        return [column_of(path, frame, "label", name) for name in wanted]
    if header:
        named = [name for name in columns if name.lower() in LABELS]
        if len(named) == 1 or new:
            return named[:1]
        raise UserError(
            f"{path}: {'several columns are' if named else 'no column is'} called "
            f"{', '.join(LABELS)}; its "
            f"columns are: {listing(frame)}; say which is the label with --label NAME, or --label "
            "none"
        )
    if len(columns) <= documents:
        return []
    first, last = (frame[i].fillna("") for i in (columns[0], columns[-1]))
    if (
        len(columns) != documents + 1
        and not last.map(number).all()
        or (documents == 1 and not regression and not labelled(first) and labelled(last))
    ):
        raise UserError(
            f"{path}: the last column looks like the label ({last.iloc[0]!r}), the first does not "
            f"({first.iloc[0][:40]!r}); give --label -1, or --label 0"
        )
    return columns[:1]


def from_frame(path, frame, header, layout, documents=1, regression=False):
    """Turn a DataFrame into an Own without `known`; its Layout is that by which new data are read.
    Instead of a series that cannot be read there is a UserError."""
    if frame.empty:
        return Own([], rows=np.arange(0), layout=layout)
    if (layout.id is None) != (layout.time is None):
        raise UserError(
            f"{path}: a table with a row per position needs both --id COLUMN and --time COLUMN"
        )
    one, two = [*frame.columns, None][:2]
    if layout.id is None and layout.label not in ("0", str(one)) and looks_long(frame):
        raise UserError(
            f"{path} looks like a long table, a row per position; give --id {one} --time {two} and "
            "--label "
            f"COLUMN, or --label none; if {one} is the label: --label {one}"
        )
    if layout.columns and not header and frame.shape[1] != len(layout.columns):
        raise UserError(
            f"{path} has no header, but the training data had one: {', '.join(layout.columns[:9])}"
        )
    named = label_columns(path, frame, header, layout, documents, regression)
    apart = (
        []
        if layout.id is None
        else [column_of(path, frame, flag, getattr(layout, flag)) for flag in ("id", "time")]
    )
    rest = [name for name in frame.columns if name not in (*named, *apart)]
    if layout.text is not None and frame.shape[1] > 1:
        rest = [column_of(path, frame, "text", layout.text)]
    elif layout.columns and header:
        if lacking := [name for name in layout.columns if name not in frame]:
            raise UserError(
                f"{path} has no column {lacking[0]!r}, which training had; its columns are: "
                f"{listing(frame)}"
            )
        rest = [*layout.columns]
    if not rest or rest == named:
        raise UserError(
            f"{path} has no column besides {', '.join(map(str, named + apart))}; give --label and "
            "--text"
        )
    rows, width, labels = frame.index.to_numpy(), len(rest), None
    if len(named) == 1:
        labels = frame[named[0]].astype(object).where(frame[named[0]].notna(), "")
    elif named:
        words = {"true": 1.0, "false": 0.0} | dict.fromkeys(MISSING, np.nan)
        labels = frame[named].map(
            lambda cell: words.get(str(cell).lower(), value(cell) if number(str(cell)) else 9)
        )
        labels = labels.to_numpy(np.float64)  # (n, k)
        for i, j in np.argwhere(
            ~(np.isin(labels, (0, 1)) | np.isnan(labels).all(1, keepdims=True))
        ):
            raise UserError(
                f"{place(path, rows[i], header)}: column {named[j]} holds "
                f"{frame[named[j]].iloc[i]!r}; "
                "several labels must be 0 or 1"
            )
    if layout.id is not None:
        series, rows, labels = long(
            path, frame, header, apart, labels, rest, layout.label_per_position
        )
    elif len(rest) == 1 and isinstance(frame[rest[0]].iloc[0], (list, np.ndarray)):
        series = [listed(place(path, row, header), cell) for row, cell in frame[rest[0]].items()]
        series = oriented(path, series, layout)
    elif len(rest) == documents:
        cells = frame[rest].astype(object).where(frame[rest].notna(), "").astype(str)
        series = (
            cells[rest[0]].tolist()
            if documents == 1
            else [*cells.itertuples(index=False, name=None)]
        )
        for i in np.flatnonzero(cells.eq("").any(axis=1)):
            series[i] = UserError(
                f"{place(path, rows[i], header)}: the text is empty; remove that line"
            )
    else:
        values, wrong = numbers(path, frame[rest], header)
        if header and layout.width is None and len(values) > 9 and not wrong:
            check_ids(path, rest, values)
        series = [wrong.get(i, row[:, None]) for i, row in enumerate(values)]
        width *= not np.isnan(values[:, -1]).any()
    found = (
        layout
        if layout.width is not None
        else layout._replace(
            label=None,
            text=None if header else layout.text,
            columns=tuple(rest) if header else (),
            width=width,
        )
    )
    return Own(
        series,
        labels,
        rows=rows,
        layout=found._replace(label_column=",".join(map(str, named)) or "none"),
    )


def check_ids(path, names, values):
    """Raise UserError if a column of values (n, l) has the name of an id and is one; point out one
    that counts rows."""
    for name, column in zip(names, values.T):
        if (
            re.fullmatch(ID, name.lower())
            and np.all(column % 1 == 0)
            and len({*column}) == len(column)
        ):
            raise UserError(
                f"{path}: column {name} looks like an id, not a sample; remove it from the file "
                "(or, if a "
                f"row is a position: --id {name} --time NAME)"
            )
    if set(np.diff(values[:, 0])) == {1}:
        print(
            f"note: column {names[0]} counts the rows and is read as the first sample; if it is an "
            "id, remove it "
            "from the file"
        )


def listed(where, cell):
    """Return a list of a .jsonl or .parquet file, of numbers or of lists of numbers, as float64 (l,
    channels)."""
    try:
        return np.array([*cell], np.float64).reshape(len(cell), -1)
    except (ValueError, TypeError):
        return UserError(
            f"{where}: {str(cell)[:40]!r} is no list of numbers, or of lists of equally many "
            "numbers"
        )


def oriented(path, series, layout):
    """Return series (l, channels), of which --channels-first says that they are (channels, l)."""
    shape = next((one.shape for one in series if not isinstance(one, UserError)), (1, 1))
    if shape[1] > shape[0] and layout.channels_first is None:
        raise UserError(
            f"{path}: a sequence has the shape {shape}; is the last axis the positions "
            "(--channels-first), "
            f"or are there {shape[1]} channels (--channels-last)?"
        )
    return [one.T for one in series] if layout.channels_first else series


def looks_long(frame):
    """Return whether the first column has runs of equal names, within which the second rises."""
    if not 2 < frame.shape[1] <= 9 or not frame.iloc[:, 1].map(number).all():
        return False
    names, order = frame.iloc[:, 0].astype(str).to_numpy(), frame.iloc[:, 1].map(value).to_numpy()
    same, runs = names[1:] == names[:-1], len({*names})
    return (
        1 < runs < len(names) / 2
        and (~same).sum() == runs - 1
        and bool((np.diff(order)[same] > 0).all())
    )


def long(path, frame, header, apart, labels, rest, per_position):
    """Turn a table with a row per position into series (l, channels), in the order in which they
    appear, and return the first row of each and its label, too. apart: the columns that name a
    sequence and order its positions. per_position: return labels (n, longest), texts, "" for
    none."""
    import pandas as pd

    name, time = apart
    (values, wrong), order, found, steps = numbers(path, frame[rest], header), frame[time], [], []
    if order.map(number).all():
        order = order.map(value).to_numpy()
    else:
        dates = pd.to_datetime(order, format="ISO8601", errors="coerce", utc=True)
        # a number is no date
        order = dates.dt.tz_localize(None).where(~order.map(number)).to_numpy()
    for i in np.flatnonzero(np.isnan(order)):
        raise UserError(
            f"{place(path, frame.index[i], header)}: column {time} holds {frame[time].iloc[i]!r}, "
            "which is "
            "neither a number nor a date as 2024-01-31 23:59:00"
        )
    for key, places in frame.groupby(name, sort=False).indices.items():
        first, places = places.min(), places[np.argsort(order[places], kind="stable")]
        theirs = [] if labels is None else labels.iloc[places].tolist()
        known = {one for one in theirs if one != ""}
        steps.append(np.diff(order[places]).astype(float))
        if not steps[-1].all():
            raise UserError(f"{path}: {name} {key} has two rows of one {time}")
        if len(known) > 1 and not per_position:
            raise UserError(
                f"{path}: {name} {key} has several labels in {labels.name}; if each position has "
                "its own, "
                "give --label-per-position"
            )
        found.append(
            (
                next((wrong[place] for place in places if place in wrong), values[places]),
                frame.index[first],
                [*map(str, theirs)] if per_position else [*known, ""][0],
            )
        )
    if not np.allclose(steps := np.concatenate(steps), steps[:1], rtol=1e-3):
        print(
            f"note: {time} has steps of several sizes, but each row is one position; where rows "
            "lack, add empty ones"
        )
    series, rows, known = zip(*found)
    known = side_by_side(known) if per_position else [*known]
    return [*series], np.array(rows), None if labels is None else known


def side_by_side(labels):
    """Return the labels of positions, n lists, as texts (n, longest); "" for none: missing, or a
    number below 0."""
    texts = []
    for one in map(np.asarray, labels):
        one = one.astype(int) if one.dtype.kind == "b" else one
        if one.dtype.kind == "f" and (one % 1 > 0).any():
            raise ValueError("labels of positions are classes, whole numbers or names")
        texts.append(
            [f"{each:.0f}" if one.dtype.kind == "f" else str(each) for each in one.tolist()]
        )
    none = MISSING | {text for one in texts for text in one if number(text) and value(text) < 0}
    longest = max(map(len, texts))
    return np.array(
        [
            [text if text.lower() not in none else "" for text in one] + [""] * (longest - len(one))
            for one in texts
        ]
    )
