"""Read tables as people have them, through pandas: .csv, .tsv, .jsonl, .parquet, .xlsx, compressed
or not.

    label;t0;t1      lines of my.csv    ->    a DataFrame with the columns label, t0, t1
    walk;0,5;0,7

Delimiter, encoding and header are recognised here. columns.py says which column holds what."""

import contextlib
import csv
import io
import re
from itertools import groupby, islice, pairwise, zip_longest
from typing import NamedTuple

import numpy as np

from files import UserError, reading, refuse_rows
from own.cells import PAGE, is_number, number_or_none

TABLES = ".csv", ".tsv", ".jsonl", ".parquet", ".xlsx"
DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar", " ": "blanks"}
LABELS = "label", "target", "class", "y"  # names of a label's column
TEXTS = "text", "review", "sentence", "sequence", "seq"  # of a text's
SPLIT_NAMES = dict.fromkeys(("train", "training"), "train")  # {what a file may call it: split}
SPLIT_NAMES |= dict.fromkeys(("val", "validation", "valid", "dev"), "val")
SPLIT_NAMES |= dict.fromkeys(("test", "testing"), "test")
# Words in the names of columns that are no samples.
GROUPS = {"pid", "person", "subject", "patient", "participant", "user", "session", "site"}
FOLDS = {"fold", "kfold", "cv", "split", "set", "train", "val", "test"}
TIMES = {"timestamp", "time", "date", "datetime", "ds"}
COUNTS = {"row", "index", "idx", "id", "uuid", "window", "batch"}


def words_of(name):
    """Return the words of a column's name: of subjectId, subject and id; of patientids, patient."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", str(name))
    words = re.findall(r"[a-z]+", spaced.lower())
    return {*words} | {group for group in GROUPS for word in words if word.startswith(group)}


def stem_of(name):
    """Return a column's name without its numbers: of ax_12, ax_."""
    return re.sub(r"\d+", "", str(name))


def listed(columns):
    """Return columns in words: a, b, or t0 .. t23 where names differ by their numbers."""
    groups = [[*map(str, names)] for _, names in groupby(columns, stem_of)]
    words = [f"{names[0]} .. {names[-1]}" if names[3:] else ", ".join(names) for names in groups]
    return ", ".join([*words[:6], *(["..."] if words[6:] else [])]) or "none"


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


class Table(NamedTuple):
    """A DataFrame and where it comes from."""

    path: str
    frame: object  # its index is the row of the file, counted from 0 below the header
    header: bool

    def place(self, i):
        """Return the words for row i of the frame: its line in the file."""
        above = self.header and not self.path.lower().endswith(".jsonl")
        return f"line {self.frame.index[i] + 1 + above}"

    def refuse(self, problems, advice):
        """Raise BadRows for {index of a row: what is wrong}, if it is not empty."""
        index = self.frame.index
        named = {index[i]: (self.place(i), problem) for i, problem in problems.items()}
        refuse_rows(self.path, named, advice)

    def column(self, flag, name):
        """Return the column that a flag names, by its name or number."""
        columns = self.frame.columns
        if name in columns:
            return name
        if re.fullmatch(r"-?\d+", name) and -len(columns) <= int(name) < len(columns):
            return columns[int(name)]
        raise UserError(f"{self.path} has no column {name!r} for --{flag}; {self.names()}")

    def names(self):
        """Return the words for all columns."""
        names = [repr(name) if name == "" else str(name) for name in self.frame.columns]
        shown = names if len(names) < 12 else [*names[:8], "...", *names[-2:]]
        return f"its columns are: {', '.join(shown)}"

    def texts(self, column):
        """Return a column as texts (n,), "" where a field is missing."""
        cells = self.frame[column]
        return np.array([*cells.astype(object).where(cells.notna(), "").map(str)], object)


# ---- lines ---------------------------------------------------------------------------------------


def lines_of(text, delimiter):
    """Return an iterator over the lines. Where blanks separate fields, tabs do, too."""
    lines = io.StringIO(text, newline="")
    return (line.replace("\t", " ") for line in lines) if delimiter == " " else lines


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


def widths_of(rows):
    """Return the number of fields of each row (n,), without those that are empty in all rows, at
    the end; 0 for an empty row."""
    width = max((i + 1 for row in rows for i, field in enumerate(row) if field), default=0)
    return np.array([min(len(row), width) if any(row) else 0 for row in rows])


def share_of_numbers(rows):
    """Return which share of the fields below the first row are numbers."""
    fields = [field for row in rows[1:200] or rows for field in row]
    return sum(map(is_number, fields)) / len(fields) if fields else 0


def fields_of(path, text, usual):
    """Return the lines of a text file as lists of fields, and the delimiter: the one that gives all
    lines equally many fields, more than one; of several the one that makes most fields numbers,
    else the usual one. None: each line is one field.

    Numbers without a header may have lines of different lengths. Other lines that differ are
    refused."""
    csv.field_size_limit(1 << 30)
    even, uneven = {}, {}  # {delimiter: (share of numbers, rows)}
    failed = None
    for delimiter in sorted(DELIMITERS, key=lambda sign: (sign == " ", sign != usual)):
        start = csv.reader(lines_of(text, delimiter), delimiter=delimiter)
        if (delimiter == " " and even) or max(map(len, islice(start, 200)), default=0) < 2:
            continue
        try:
            rows = all_rows(path, text, delimiter)
        except UserError as error:  # quotes that do not fit this delimiter
            failed = failed or error
            continue
        widths = widths_of(rows)
        widths = widths[widths > 0]
        share = share_of_numbers(rows)
        if len(widths) and widths.max() > 1 and (delimiter != " " or share > 0.5):
            equal = widths.min() == widths.max()
            (even if equal else uneven)[delimiter] = share if share > 0.5 else 0, rows
    candidates = even or uneven
    if failed and not candidates:
        raise failed
    if not candidates:
        return all_rows(path, text, "\x1f"), None  # a delimiter that no text has
    delimiter = max(candidates, key=lambda sign: candidates[sign][0])  # the first of equal ones
    share, rows = candidates[delimiter]
    if candidates is uneven:
        refuse_widths(path, rows, delimiter, share)
    return rows, delimiter


def refuse_widths(path, rows, delimiter, share):
    """Raise UserError for the first line that has another number of fields than most lines, unless
    these are numbers without a header, of lengths that differ. share: of numbers."""
    widths = widths_of(rows)
    values, counts = np.unique(widths[widths > 0], return_counts=True)
    by_mistake = counts.max() > 0.8 * counts.sum()  # few lines differ
    has_names = not any(map(is_number, rows[0][1:]))
    if share and not has_names and not by_mistake:
        return
    most = values[np.argmax(counts)]
    line = np.flatnonzero((widths > 0) & (widths != most))[0]
    problem = f"line {line + 1} has {widths[line]} fields, and most lines have {most}"
    advice = "quote texts in which it stands; fill short sequences with empty fields"
    delimiter = f"the delimiter is a {DELIMITERS[delimiter]}".replace("a blanks", "blanks")
    raise UserError(f"{path}: {problem} ({delimiter}); remove what is no data; {advice}")


# ---- a file as a DataFrame -----------------------------------------------------------------------


def read_frame(path, ending, raw, layout):
    """Read a file with an ending of TABLES -> DataFrame, whether it has a header, and words that
    say how it was read. Columns are its names, or numbers; the index is the row, counted from 0
    below the header."""
    if ending in (".jsonl", ".parquet"):
        return read_binary(path, ending, raw), True, []
    if ending == ".xlsx":
        frame, how = read_workbook(path, raw)
    else:
        frame, how = read_lines(path, ending, raw)
    frame = without_margins(path, frame, layout)
    if frame.empty or not has_header(path, frame, layout):
        return frame, False, [*how, "no header"]
    names = column_names(frame)
    if names == [*map(str, range(len(names)))]:  # an array's, which says nothing
        return frame.iloc[1:].set_axis(frame.index[1:] - 1), False, [*how, "no header"]
    frame = under_header(path, frame, names)
    return frame.set_axis(frame.index - 1), True, how


def read_binary(path, ending, raw):
    """Read the bytes of a .jsonl or .parquet file -> DataFrame."""
    import pandas as pd  # here, because every script imports this file

    file = io.BytesIO(raw)
    if ending == ".jsonl" and raw.lstrip()[:1] == b"[":
        raise UserError(f"{path} begins with an array, not an object per line; {PAGE}: .json")
    advice = "save it as .csv, or as .jsonl with a JSON object per line"
    with reading(f"{path} cannot be read", advice):
        if ending == ".parquet":
            frame = pd.read_parquet(file)
        else:
            frame = pd.read_json(file, lines=True, dtype=False, precise_float=True)
        return frame.reset_index(drop=not any(frame.index.names)).rename(columns=str)


def read_workbook(path, raw):
    """Read the only visible sheet of an .xlsx file -> DataFrame of texts, words. Hidden sheets are
    not read."""
    import openpyxl
    import pandas as pd

    with reading(f"{path} cannot be read", f"save it as .csv; {PAGE}"):
        book = openpyxl.load_workbook(io.BytesIO(raw), read_only=True)
        sheets = [sheet.title for sheet in book.worksheets if sheet.sheet_state == "visible"]
        if len(sheets) > 1:
            names = ", ".join(sheets)
            raise UserError(f"{path} has the sheets {names}; save one as .csv, or {PAGE}: Sheets")
        options = dict(header=None, dtype=str, keep_default_na=False)
        frame = pd.read_excel(io.BytesIO(raw), sheets[0], **options)
    filled = frame.ne("").sum(axis=1)
    frame = frame.loc[:, frame.ne("").any().cummax()]  # columns on the left may be empty
    title = filled[filled > 0].index[:1]
    if len(title) and filled[title[0]] == 1 and filled.median() > 2:
        first = next(cell for cell in frame.loc[title[0]] if cell)
        problem = f"line {title[0] + 1} holds only {first[:40]!r}"
        raise UserError(f"{path}: {problem}; remove lines above the header")
    return frame, [f"sheet {sheets[0]}"]


def read_lines(path, ending, raw):
    """Read the bytes of a .csv or .tsv file -> DataFrame of texts, and words."""
    import pandas as pd

    text = re.sub(r"^sep=.\r?\n", "", decoded(path, raw)).lstrip("\r\n")  # Excel's
    usual = "\t" if ending == ".tsv" else ","
    rows, delimiter = fields_of(path, text, usual)
    columns = [*zip_longest(*rows, fillvalue="")]
    how = [f"delimiter {DELIMITERS[delimiter]}"] if delimiter else []
    return pd.DataFrame(np.array(columns, object).T), how


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


# ---- the header ----------------------------------------------------------------------------------


def column_names(frame):
    """Return the fields of the first row as names."""
    return [str(name).strip() for name in frame.iloc[0].fillna("")]


def has_equal_steps(numbers):
    """Return whether a list holds numbers, and each differs by the same step from the last."""
    if None in numbers:
        return False
    steps = {round(number - last, 9) for last, number in pairwise(numbers)}
    return len(steps) == 1 and steps != {0}


def ask_about_numbers(path, frame):
    """Raise UserError if the first row, and only it, has numbers in equal steps. Those that count
    the columns from 0 are an array's."""
    fields = frame.iloc[:9, 1:].fillna("").to_numpy().tolist()
    numbers = [[number_or_none(field) for field in row] for row in fields]
    equal = [has_equal_steps(row) for row in numbers]
    if len(fields[0]) > 3 and equal[0] and not any(equal[1:]) and numbers[0][0] not in (0, 1):
        problem = f"the first line rises in equal steps ({fields[0][0]}, {fields[0][1]}, ...)"
        advice = "--no-header: it is data; else name its columns t0, t1, ..."
        raise UserError(f"{path}: {problem}: is it a header? {advice}")


def has_header(path, frame, layout):
    """Return whether the first row names the columns, as it looks or as a Layout says."""
    if layout.no_header:
        return False
    ask_about_numbers(path, frame)
    names = {*column_names(frame)}
    asked = {name for name in layout.names() if not re.fullmatch(r"-?\d+", name)}
    trained = layout.columns and {*layout.columns} <= names
    return looks_like_header(frame) or bool(asked & names) or bool(trained)


def looks_like_header(frame):
    """Return whether the first row names the columns: a name is one of a label, a text or what is
    no sample; or none of its fields is a number where those below are; or it counts the columns, as
    pandas does, or only the first has no name."""
    names = column_names(frame)
    body = frame.iloc[1:200].fillna("")
    body = body[(body != frame.iloc[0].fillna("")).any(axis=1)]  # a repeated header is refused
    telling = GROUPS | FOLDS | TIMES | COUNTS
    for column, name in zip(frame.columns, names):
        words = words_of(name) if re.fullmatch(r"[\w:./-]+", name) else set()
        named = name.lower() in LABELS + TEXTS or words & telling
        if named and name not in set(body[column]):
            return True
    counts = [*map(str, range(len(names)))]
    first, *others = names
    named = others == counts[:-1] or not any(map(is_number, others))
    index = not first and all(others) and named
    if len(names) > 2 and (names == counts or index):
        return True
    if body.empty:
        return False
    numbers = [np.mean([*map(is_number, body[column])]) > 0.8 for column in frame.columns]
    numeric = [name for name, fits in zip(names, numbers) if fits]
    return bool(numeric) and not any(map(is_number, numeric))


def under_header(path, frame, names):
    """Return the rows below the header, with its names. An index of pandas is left out."""
    header = frame.iloc[0]
    frame = frame.iloc[1:].set_axis(names, axis=1)
    repeats = frame.index[(frame.to_numpy() == header.to_numpy()).all(1)]
    if len(repeats):
        raise UserError(f"{path}: line {repeats[0] + 1} repeats the header; remove it")
    if twice := [name for name in names if name and names.count(name) > 1]:
        problem = f"{path}: {names.count(twice[0])} columns are called {twice[0]!r}"
        raise UserError(f"{problem}; rename them")
    if "" in names[1:]:
        problem = f"{path}: column {names.index('', 1)} (counted from 0) has no name in the header"
        raise UserError(f"{problem}; name it, or remove it")
    first = frame.iloc[:, 0]
    nameless = names[0] in ("", "Unnamed: 0") and len(names) > 2
    if nameless and first.str.fullmatch(r"\d+").all() and first.is_unique:
        print(f"{path}: the first column has no name and is left out, as an index")
        frame = frame.iloc[:, 1:]
    return frame
