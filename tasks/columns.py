"""Turn a DataFrame into examples: which columns are labels, values or texts.

    case when up  label
    a    0    0.5 walk      ->    one series (2, 1): 0.5, 0.7;    label "walk"
    a    1    0.7 walk

Where the file does not say it, a `Layout` does. With a header, the label is the column called
label, target, class or y; without one, the first. With --id and --time a row is a position."""

import contextlib
import re
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from files import UserError
from tasks.table import LABELS, MISSING, THOUSANDS, Examples, as_number, is_number, number_or_none

ID = r"index|idx|(.*[_ .-])?(id|uuid)"  # a column's name, in lower case; heat_index is none
NOT_READ = np.zeros((0, 1))  # stands in for a series that could not be read


class Table(NamedTuple):
    """A DataFrame and where it comes from."""

    path: str
    frame: object  # its index is the row of the file, counted from 0 below the header
    header: bool

    def place(self, i):
        """Return the words for row i of the frame: its line in the file."""
        above = self.header and not self.path.lower().endswith(".jsonl")
        return f"{self.path}, line {self.frame.index[i] + 1 + above}"

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

    def cells(self, columns):
        """Return columns as a frame of texts, "" where a field is missing."""
        cells = self.frame[columns]
        return cells.astype(object).where(cells.notna(), "")


def from_frame(path, frame, header, layout, documents=1, regression=False):
    """Turn a DataFrame into Examples without `known`. Their Layout is that for new data. documents:
    texts per example. regression: labels are numbers."""
    if frame.empty:
        return Examples([], rows=np.arange(0), layout=layout)
    table = Table(str(path), frame, header)
    refuse_unclear(table, layout)
    label_columns = find_labels(table, layout, documents, regression)
    place_columns = []
    if layout.id is not None:
        place_columns = [table.column("id", layout.id), table.column("time", layout.time)]
    value_columns = find_values(table, layout, label_columns, place_columns)
    labels = labels_of(table, label_columns)
    rows = frame.index.to_numpy()
    width = len(value_columns)
    first_cell = frame[value_columns[0]].iloc[0]
    if layout.id is not None:
        series, rows, labels, unreadable = series_of_positions(
            table, place_columns, value_columns, labels, layout.label_per_position
        )
    elif width == 1 and isinstance(first_cell, (list, np.ndarray)):
        series, unreadable = series_of_lists(table, value_columns[0])
        series = oriented(path, series, layout)
    elif width == documents:
        series, unreadable = texts_of(table, value_columns)
    else:
        values, unreadable = numbers_of(table, value_columns)
        if header and layout.width is None and len(values) > 9 and not unreadable:
            refuse_ids(path, value_columns, values)
        series = [*values[:, :, None]]
        if np.isnan(values[:, -1]).any():  # lengths differ
            width = 0
    layout = layout._replace(label_column=",".join(map(str, label_columns)) or "none")
    if layout.width is None:
        columns = tuple(value_columns) if header else ()
        text = None if header else layout.text
        layout = layout._replace(label=None, text=text, columns=columns, width=width)
    return Examples(series, labels, rows=rows, layout=layout, unreadable=unreadable)


def refuse_unclear(table, layout):
    """Raise UserError for flags that lack another, and for a table that looks like a row per
    position without the flags that say so."""
    path, frame, header = table
    if (layout.id is None) != (layout.time is None):
        problem = "a table with a row per position needs both"
        raise UserError(f"{path}: {problem} --id COLUMN and --time COLUMN")
    first, second = [*frame.columns, None][:2]
    if layout.id is None and layout.label not in ("0", str(first)) and looks_long(frame):
        problem = f"{path} looks like a long table, a row per position"
        flags = f"--id {first} --time {second} and --label COLUMN, or --label none"
        raise UserError(f"{problem}; give {flags}; if {first} is the label: --label {first}")
    if layout.columns and not header and frame.shape[1] != len(layout.columns):
        names = ", ".join(layout.columns[:9])
        raise UserError(f"{path} has no header, but the training data had one: {names}")


def looks_long(frame):
    """Return whether the first column has runs of equal names, within which the second rises."""
    if not 2 < frame.shape[1] <= 9 or not frame.iloc[:, 1].map(is_number).all():
        return False
    names = frame.iloc[:, 0].astype(str).to_numpy()
    order = frame.iloc[:, 1].map(as_number).to_numpy()
    same = names[1:] == names[:-1]
    runs = len({*names})
    if not 1 < runs < len(names) / 2 or (~same).sum() != runs - 1:
        return False
    return bool((np.diff(order)[same] > 0).all())


# ---- which column is what ------------------------------------------------------------------------


def find_labels(table, layout, documents, regression):
    """Return the columns of the labels: one, none, or several."""
    path, frame, header = table
    columns = [*frame.columns]
    trained = layout.width is not None  # else these are training data
    asked = layout.label or layout.label_column
    names = [asked] if asked in columns else asked.split(",")
    if len(names) > 1 and (len({*names}) < len(names) or layout.id is not None):
        problem = f"{path}: --label {asked}: name each column once"
        raise UserError(f"{problem}; only one if a row is a position (--id)")
    if layout.label == "none":
        return []
    if layout.label is not None:
        return [table.column("label", name) for name in names]
    if trained and not header:
        # The label is in the column of the training data, unless there is only what is read.
        bare = len(columns) in (layout.width, len(layout.columns))
        if layout.label_column == "none" or bare:
            return []
        return [table.column("label", name) for name in names]
    if trained and {*names} <= {*columns}:
        return names
    if header:
        return labels_by_name(table, trained)
    if len(columns) <= documents:
        return []
    refuse_label_last(table, documents, regression)
    return columns[:1]


def labels_by_name(table, trained):
    """Return the column that is called like a label, as a list: of training data exactly one."""
    named = [name for name in table.frame.columns if name.lower() in LABELS]
    if len(named) == 1 or trained:
        return named[:1]
    problem = f"{'several columns are' if named else 'no column is'} called {', '.join(LABELS)}"
    advice = "say which is the label with --label NAME, or --label none"
    raise UserError(f"{table.path}: {problem}; {table.names()}; {advice}")


def refuse_label_last(table, documents, regression):
    """Raise UserError if the last column, and not the first, of a table without a header looks like
    the label."""
    frame = table.frame
    first = frame.iloc[:, 0].fillna("")
    last = frame.iloc[:, -1].fillna("")
    names_last = frame.shape[1] != documents + 1 and not last.map(is_number).all()
    classes_last = looks_like_classes(last) and not looks_like_classes(first)
    if names_last or documents == 1 and not regression and classes_last:
        problem = f"the last column looks like the label ({last.iloc[0]!r}), the first does not"
        advice = "give --label -1, or --label 0"
        raise UserError(f"{table.path}: {problem} ({first.iloc[0][:40]!r}); {advice}")


def looks_like_classes(column):
    """Return whether a column holds names or whole numbers, most of them more than once."""
    cells = column[~column.str.strip().str.lower().isin(MISSING)]
    names = not cells.map(is_number).any()
    whole = names or cells.str.fullmatch(r"\s*[+-]?\d+(\.0*)?\s*").all()
    return bool(whole) and 1 < cells.nunique() <= max(2, len(cells) / 3)


def find_values(table, layout, label_columns, place_columns):
    """Return the columns that are read: those of the training data, or all that are left."""
    path, frame, header = table
    apart = label_columns + place_columns
    columns = [name for name in frame.columns if name not in apart]
    if layout.text is not None and frame.shape[1] > 1:
        columns = [table.column("text", layout.text)]
    elif layout.columns and header:
        if lacking := [name for name in layout.columns if name not in frame]:
            problem = f"{path} has no column {lacking[0]!r}, which training had"
            raise UserError(f"{problem}; {table.names()}")
        columns = [*layout.columns]
    if not columns or columns == label_columns:
        names = ", ".join(map(str, apart))
        raise UserError(f"{path} has no column besides {names}; give --label and --text")
    return columns


# ---- what is in the columns ----------------------------------------------------------------------


def labels_of(table, columns):
    """Return the labels in some columns: a Series (n,) of one, numbers (n, k), 0 or 1 or all NaN,
    of several, None of none."""
    if not columns:
        return None
    cells = table.frame[columns]
    if len(columns) == 1:
        return table.cells(columns)[columns[0]]
    words = {"true": 1.0, "false": 0.0} | dict.fromkeys(MISSING, np.nan)

    def as_label(cell):
        text = str(cell)
        if text.lower() in words:
            return words[text.lower()]
        return as_number(cell) if is_number(text) else 9  # 9: refused below

    labels = cells.map(as_label).to_numpy(np.float64)
    fit = np.isin(labels, (0, 1)) | np.isnan(labels).all(1, keepdims=True)
    for i, j in np.argwhere(~fit):
        problem = f"{table.place(i)}: column {columns[j]} holds {cells.iloc[i, j]!r}"
        raise UserError(f"{problem}; several labels must be 0 or 1")
    return labels


def texts_of(table, columns):
    """Return the texts of a column, or tuples of several; and {row: UserError} of empty ones."""
    cells = table.cells(columns).astype(str)
    unreadable = {
        i: UserError(f"{table.place(i)}: the text is empty; remove that line")
        for i in np.flatnonzero(cells.eq("").any(axis=1))
    }
    if len(columns) == 1:
        return cells[columns[0]].tolist(), unreadable
    return [*cells.itertuples(index=False, name=None)], unreadable


def series_of_lists(table, column):
    """Return the lists of a column of a .jsonl or .parquet file, of numbers or of lists of numbers,
    as float64 (l, channels) each; and {row: UserError} of others."""
    series = []
    unreadable = {}
    for i, cell in enumerate(table.frame[column]):
        try:
            series.append(np.array([*cell], np.float64).reshape(len(cell), -1))
        except (ValueError, TypeError):
            series.append(NOT_READ)
            problem = f"{table.place(i)}: {str(cell)[:40]!r} is no list of numbers"
            unreadable[i] = UserError(f"{problem}, or of lists of equally many numbers")
    return series, unreadable


def oriented(path, series, layout):
    """Return series (l, channels), of which --channels-first says that they are (channels, l)."""
    shape = next((array.shape for array in series if len(array)), (1, 1))
    if shape[1] > shape[0] and layout.channels_first is None:
        question = "is the last axis the positions (--channels-first), or are there"
        problem = f"{path}: a sequence has the shape {shape}; {question}"
        raise UserError(f"{problem} {shape[1]} channels (--channels-last)?")
    return [array.T for array in series] if layout.channels_first else series


def numbers_of(table, columns):
    """Convert columns to float64 (n, columns); a field that says so is missing. Also return {row:
    UserError} of the rows that hold something else; there it is NaN."""
    frame = table.frame[columns]
    cells = frame.astype(object).where(frame.notna(), "nan").to_numpy()
    with contextlib.suppress(ValueError, TypeError):
        return np.where(cells == "", "nan", cells).astype(np.float64), {}
    refuse_thousands(table.path, cells)
    values = np.vectorize(number_or_none, [object])(cells)
    unreadable = {}
    for i, j in np.argwhere(np.equal(values, None))[::-1]:  # the first of a row is named
        problem = f"{table.place(i)}, column {columns[j]}: {str(cells[i, j])[:40]!r} is no number"
        advice = "correct it, or leave it empty if it is missing, or leave out the column"
        unreadable[i] = UserError(f"{problem}; {advice} (if it is the text: --text)")
    return values.astype(float), unreadable  # None becomes NaN


def refuse_thousands(path, cells):
    """Raise UserError if commas in numbers may be between thousands."""
    commas = [cell for cell in cells.flat if "," in str(cell)]
    if not commas:
        return
    thousands = all(re.fullmatch(THOUSANDS, str(cell).strip()) for cell in commas)
    if thousands or any("." in str(cell) and is_number(cell) for cell in cells.flat):
        problem = f"{path}: does the comma in {commas[0]!r} mark thousands or decimals?"
        raise UserError(f"{problem} Write 1234 for thousands, 1.234 for decimals")


def refuse_ids(path, names, values):
    """Raise UserError if a column of values (n, l) has the name of an id and is one; point out one
    that counts rows."""
    for name, column in zip(names, values.T):
        unique = np.all(column % 1 == 0) and len({*column}) == len(column)
        if re.fullmatch(ID, name.lower()) and unique:
            problem = f"{path}: column {name} looks like an id, not a sample; remove it"
            raise UserError(f"{problem} (or, if a row is a position: --id {name} --time NAME)")
    if set(np.diff(values[:, 0])) == {1}:
        note = f"note: column {names[0]} counts the rows and is read as the first sample"
        print(f"{note}; if it is an id, remove it from the file")


# ---- a row per position --------------------------------------------------------------------------


def series_of_positions(table, place_columns, value_columns, labels, per_position):
    """Turn a table with a row per position into series (l, channels). place_columns: what names a
    sequence, and what orders its positions. Also return the first row of each, its label, or with
    per_position its labels (n, longest), texts, "" for none; and {series: UserError}."""
    name, time = place_columns
    values, wrong = numbers_of(table, value_columns)
    series = []
    rows = []
    targets = []
    unreadable = {}
    for key, places in sequences_of(table, name, time):
        errors = [wrong[place] for place in places if place in wrong]
        if errors:
            unreadable[len(series)] = errors[0]
        series.append(values[places])
        rows.append(table.frame.index[places.min()])
        if labels is None:
            continue
        labels_here = labels.iloc[places].tolist()
        if per_position:
            targets.append([str(label) for label in labels_here])
            continue
        different = {label for label in labels_here if label != ""}
        if len(different) > 1:
            problem = f"{table.path}: {name} {key} has several labels in {labels.name}"
            raise UserError(f"{problem}; if each position has its own, give --label-per-position")
        targets.append(next(iter(different), ""))
    if per_position and labels is not None:
        targets = side_by_side(targets)
    return series, np.array(rows), None if labels is None else targets, unreadable


def sequences_of(table, name, time):
    """Yield the name of each sequence and the indices of its rows (l,), in the order of time."""
    times = times_of(table, time)
    steps = []
    for key, places in table.frame.groupby(name, sort=False).indices.items():
        places = places[np.argsort(times[places], kind="stable")]
        steps.append(np.diff(times[places]).astype(float))
        if not steps[-1].all():
            raise UserError(f"{table.path}: {name} {key} has two rows of one {time}")
        yield key, places
    steps = np.concatenate(steps)
    if not np.allclose(steps, steps[:1], rtol=1e-3):
        note = f"note: {time} has steps of several sizes, but each row is one position"
        print(f"{note}; where rows lack, add empty ones")


def times_of(table, column):
    """Return a column as numbers or dates (n,), which order positions."""
    import pandas as pd

    cells = table.frame[column]
    if cells.map(is_number).all():
        times = cells.map(as_number).to_numpy()
    else:
        dates = pd.to_datetime(cells, format="ISO8601", errors="coerce", utc=True)
        # a number is no date
        times = dates.dt.tz_localize(None).where(~cells.map(is_number)).to_numpy()
    for i in np.flatnonzero(np.isnan(times)):
        problem = f"{table.place(i)}: column {column} holds {cells.iloc[i]!r}, which is neither"
        raise UserError(f"{problem} a number nor a date as 2024-01-31 23:59:00")
    return times


def side_by_side(labels):
    """Return the labels of positions, n lists, as texts (n, longest); "" for none: missing, or a
    number below 0."""
    rows = []
    for row in map(np.asarray, labels):
        if row.dtype.kind == "b":
            row = row.astype(int)
        if row.dtype.kind == "f":
            if (row % 1 > 0).any():
                raise ValueError("labels of positions are classes, whole numbers or names")
            rows.append([f"{label:.0f}" for label in row.tolist()])
        else:
            rows.append([str(label) for label in row.tolist()])
    texts = {text for row in rows for text in row}
    none = MISSING | {text for text in texts if is_number(text) and as_number(text) < 0}
    columns = zip_longest(*rows, fillvalue="")
    return np.array([["" if text.lower() in none else text for text in row] for row in columns]).T
