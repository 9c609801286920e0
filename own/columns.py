"""Turn a DataFrame into examples: which columns are labels, groups, samples or texts.

    case when up  label
    a    0    0.5 walk      ->    one series (2, 1): 0.5, 0.7;    label "walk"
    a    1    0.7 walk

A `Layout` says what the file does not say. With a header, the label is the column called label,
target, class or y; without one, the first. With --id and --time a row is a position. What else may
be no sample, and what may be no sequence, is asked about."""

import contextlib
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from files import UserError
from own.cells import (
    MISSING,
    PAGE,
    as_number,
    class_name,
    is_number,
    number_or_none,
    refuse_thousands,
)
from own.questions import (
    ask_about_channels,
    ask_about_label,
    ask_about_names,
    ask_about_texts,
    ask_about_values,
    ask_if_long,
)
from own.table import LABELS, Table, listed


class Layout(NamedTuple):
    """Which column holds what (a name or a number), and the order of an array's axes: the flags of
    data.py and predict.py with these names. The last three are what training data had."""

    label: str | None = None  # "none": the file has no label; "a,b": several, columns of 0 and 1
    text: str | None = None  # the only column that is read
    id: str | None = None  # in a long table, a row per position: which sequence it belongs to
    time: str | None = None  # and its position in it
    group: str | None = None  # no group is in two splits
    split: str | None = None  # train, val, test, or the number of a fold
    drop: str | None = None  # "a,b": columns that are not read
    no_header: bool = False
    channels_first: bool | None = None  # x is (n, channels, l)
    # each position has a label; of new data False: y holds several labels, and is not one-hot
    label_per_position: bool | None = None
    training: bool = True  # False: new data, of which nothing is asked that training has answered
    columns: tuple = ()  # names of the columns that were read, if there was a header
    width: int | None = None  # their number, 0 if it differed; None: these are training data
    label_column: str = "none"

    def names(self):
        """Return the columns that are named."""
        dropped = self.drop.split(",") if self.drop else []
        return [name for name in self[:6] if name] + dropped


COLUMNS = Layout._fields[:7]  # the flags that name columns


class Examples(NamedTuple):
    """The contents of a file: n series and, for each, what else the file says of it."""

    series: list  # samples float64 (l, channels), symbols int64 (l,) or a text each
    labels: np.ndarray | None = None  # (n,); several (n, k); or one per position (n, longest)
    has_label: np.ndarray | None = None  # bool (n,)
    split: np.ndarray | None = None  # (n,)
    group: np.ndarray | None = None  # (n,)
    rows: np.ndarray | None = None  # (n,): the row of the file
    ids: np.ndarray | None = None  # (n,): of a long table, the name of each sequence
    layout: Layout | None = None  # of a table: how new data are read
    how: tuple = ()  # words that say what was read


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
    help = "the group of a sequence, e.g. a person (also an array of an .npz); no group is in two "
    add("--group", metavar="COLUMN", help=f"{help}splits")
    help = "train, val or test; or the number of a fold: the lowest tests, the next validates"
    add("--split", metavar="COLUMN", help=help)
    add("--drop", metavar="COLUMN", help="a,b: columns that are not read")
    switch = dict(action="store_true", default=None)
    add("--label-per-position", help="each position has a label of its own", **switch)
    add("--no-header", help="the first line is data", **switch)
    switch = dict(dest="channels_first", action="store_const")
    help = f"{of}: arrays are (n, channels, l)"
    parser.add_argument("--channels-first", const=True, help=help, **switch)
    parser.add_argument("--channels-last", const=False, help="(n, l, channels)", **switch)


def given(args):
    """Return the given flags of a Layout as a dict, or None."""
    flags = {name: getattr(args, name, None) for name in Layout._fields}
    return {name: value for name, value in flags.items() if value is not None} or None


def from_frame(path, frame, header, layout, documents=1, regression=False, kind=None, skip=()):
    """Turn a DataFrame into Examples without `has_label`. Their Layout is that for new data.
    documents: texts per example. regression: labels are numbers. kind: "samples" or "symbols", if
    that is said of numbers. skip: rows of the file that are left out, in a long table with their
    sequences."""
    if (layout.id is None) != (layout.time is None):
        problem = "a table with a row per position needs both"
        raise UserError(f"{path}: {problem} --id COLUMN and --time COLUMN")
    table = without(Table(str(path), frame, header), layout, skip)
    if table.frame.empty:
        return Examples([], rows=np.arange(0), layout=layout)
    training = layout.width is None
    if training:
        ask_if_long(table, layout, kind)
    label_columns = find_labels(table, layout, documents, regression)
    roles = find_roles(table, layout)
    columns = find_values(table, layout, label_columns, roles)
    if training:
        ask_about_names(table, layout, columns, kind)
    labels = labels_of(table, label_columns)
    rows = table.frame.index.to_numpy()
    ids = None
    width = len(columns)
    if layout.id is not None:
        series, rows, ids, labels = series_of_positions(table, roles, columns, labels, layout)
        how = f"channels {listed(columns)}; id: {roles['id']}; time: {roles['time']}"
    elif lists := [name for name in columns if holds_lists(table, name)]:
        series = series_of_lists(table, columns, lists, kind, layout)
        how = f"lists in column {columns[0]}"
    elif width == documents:
        series = texts_of(table, columns, training and layout.text is None)
        how = f"texts in column {listed(columns)}"
    else:
        values = numbers_of(table, columns)
        if training and kind != "samples":
            ask_about_values(table, label_columns, columns, values)
        series = [*values[:, :, None]]
        how = f"columns {listed(columns)}"
        if np.isnan(values[:, -1]).any():  # lengths differ
            width = 0
    how = [how, f"label: {listed(label_columns)}", f"group: {roles.get('group', 'none')}"]
    how += [f"split: {roles['split']}"] if "split" in roles else []
    layout = layout._replace(label_column=",".join(map(str, label_columns)) or "none")
    if training:
        names = tuple(columns) if header else ()
        text = None if header else layout.text
        layout = layout._replace(label=None, text=text, columns=names, width=width)
    beside = {
        role: column_of(table, roles[role], rows) for role in ("split", "group") if role in roles
    }
    return Examples(series, labels, rows=rows, ids=ids, layout=layout, how=tuple(how), **beside)


def without(table, layout, skip):
    """Return a table without the rows `skip` of the file, of a long table without their
    sequences."""
    path, frame, header = table
    if layout.columns and not header and frame.shape[1] not in (0, len(layout.columns)):
        names = ", ".join(layout.columns[:9])
        raise UserError(f"{path} has no header, but the training data had one: {names}")
    left_out = frame.index.isin([*skip])
    if layout.id is not None and len(skip):
        names = frame[table.column("id", layout.id)]
        left_out = names.isin(names[left_out])
    return table._replace(frame=frame[~left_out])


# ---- which column is what ------------------------------------------------------------------------


def find_labels(table, layout, documents, regression):
    """Return the columns of the labels: one, none, or several."""
    path, frame, header = table
    columns = [*frame.columns]
    trained = layout.width is not None  # else these are training data
    if layout.label == "none":
        return []
    asked = layout.label or layout.label_column
    names = [asked] if asked in columns else asked.split(",")
    if len(names) > 1 and (len({*names}) < len(names) or layout.id is not None):
        problem = f"{path}: --label {asked}: name each column once"
        raise UserError(f"{problem}; only one if a row is a position (--id)")
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
    ask_about_label(table, documents, regression)
    return columns[:1]


def labels_by_name(table, trained):
    """Return the column that is called like a label, as a list: of training data exactly one. A y
    beside an x is an axis, and beside a ds a value."""
    named = [name for name in table.frame.columns if name.lower() in LABELS]
    lower = {name.lower() for name in table.frame.columns}
    value = [name.lower() for name in named] == ["y"] and lower & {"x", "ds"}
    if len(named) == 1 and not value or trained:
        return named[:1]
    problem = f"{'several columns are' if named else 'no column is'} called {', '.join(LABELS)}"
    if value:
        problem = f"is y the label, or a value beside {min(value)}?"
    advice = "say which is the label with --label NAME, or --label none"
    raise UserError(f"{table.path}: {problem}; {table.names()}; {advice}")


def find_roles(table, layout):
    """Return {role: column} for id, time, group and split, as far as they are given. New data may
    lack a group and a split."""
    roles = ("id", "time", "group", "split")[: 4 if layout.width is None else 2]
    named = {role: name for role in roles if (name := getattr(layout, role))}
    return {role: table.column(role, name) for role, name in named.items()}


def find_values(table, layout, label_columns, roles):
    """Return the columns that are read: those of the training data, or all that are left."""
    path, frame, header = table
    apart = [*label_columns, *roles.values()]
    bare = layout.width == frame.shape[1] and not header
    for role in ("drop",) if layout.width is None else ("drop", "group", "split"):
        names = getattr(layout, role)
        if names and not (bare or header and layout.columns):
            names = [names] if names in frame.columns else names.split(",")
            apart += [table.column(role, name) for name in names]
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
    """Return the labels in these columns: texts (n,) of one, numbers (n, k), 0 or 1 or all NaN, of
    several, None of none."""
    if not columns:
        return None
    cells = table.frame[columns]
    if any(holds_lists(table, name) for name in columns):
        problem = f"{table.path}: labels in column {columns[0]} are lists"
        raise UserError(f"{problem}; another: --label NAME; {PAGE}: Several labels")
    if len(columns) == 1:
        return table.texts(columns[0])
    words = {"true": 1, "1": 1, "1.0": 1, "false": 0, "0": 0, "0.0": 0}
    words |= dict.fromkeys(MISSING, np.nan)
    labels = cells.map(lambda cell: words.get(str(cell).strip().lower(), 9)).to_numpy(np.float64)
    fit = np.isin(labels, (0, 1)) | np.isnan(labels).all(1, keepdims=True)
    problems = {
        i: f"column {columns[j]} holds {cells.iloc[i, j]!r}" for i, j in np.argwhere(~fit)[::-1]
    }
    table.refuse(problems, "several labels must be 0 or 1")
    return labels


def column_of(table, column, rows):
    """Return a column as texts, at these rows of the file. UserError if one is empty."""
    at_rows = np.searchsorted(table.frame.index, rows)
    texts = np.array([class_name(text) for text in table.texts(column)[at_rows]])
    empty = dict.fromkeys(at_rows[texts == ""], f"column {column} is empty")
    table.refuse(empty, "fill it in, or remove the row")
    return texts


def texts_of(table, columns, ask):
    """Return the texts of a column, or tuples of several. ask: whether texts may be numbers."""
    if ask:
        ask_about_texts(table, columns[0])
    texts = [table.texts(name) for name in columns]
    empty = np.flatnonzero(np.any([column == "" for column in texts], axis=0))
    table.refuse(dict.fromkeys(empty, "the text is empty"), "remove that line")
    return [*texts[0]] if len(columns) == 1 else [*zip(*texts)]


def holds_lists(table, column):
    return table.frame[column].dropna().iloc[:1].map(type).isin([list, np.ndarray]).any()


def series_of_lists(table, columns, lists, kind, layout):
    """Return the lists of a column of a .jsonl or .parquet file, of numbers or of lists of numbers,
    as float64 (l, channels) each. lists: the columns that hold lists."""
    if len(columns) > 1 and lists != columns:
        others = ",".join(str(name) for name in columns if name not in lists)
        raise UserError(
            f"{table.path}: column {lists[0]} holds lists, others do not: --drop {others}"
        )
    if len(columns) > 1:
        names = listed(columns)
        raise UserError(
            f"{table.path}: columns {names} hold lists; --drop, or {PAGE}: Lists in cells"
        )
    series = []
    problems = {}
    whole = True
    for i, cell in enumerate(table.frame[columns[0]]):
        try:
            series.append(np.array([*cell], np.float64).reshape(len(cell), -1))
            kinds = int, np.integer, type(None)
            whole = whole and all(isinstance(number, kinds) for number in cell)
        except (ValueError, TypeError):
            problems[i] = f"{str(cell)[:40]!r} is no list of numbers, or of equally many numbers"
    table.refuse(problems, f"{PAGE}: Lists in cells")
    if whole and kind is None and layout.width is None:
        problem = f"{table.path}: column {columns[0]} holds lists of whole numbers"
        raise UserError(f"{problem}: are they symbols (--symbols) or samples (--samples)?")
    return oriented(table.path, series, layout)


def oriented(path, series, layout):
    """Return series (l, channels), of which --channels-first says that they are (channels, l)."""
    shape = next((array.shape for array in series if len(array)), (1, 1))
    if shape[1] >= max(2, shape[0]) and layout.channels_first is None:
        question = "is the last axis the positions (--channels-first), or are there"
        problem = f"{path}: a sequence has the shape {shape}; {question}"
        raise UserError(f"{problem} {shape[1]} channels (--channels-last)?")
    return [array.T for array in series] if layout.channels_first else series


def numbers_of(table, columns):
    """Convert columns to float64 (n, columns), NaN where a field says that a value is missing."""
    frame = table.frame[columns]
    cells = frame.astype(object).where(frame.notna(), "nan").to_numpy()
    if not any(isinstance(cell, str) and "_" in cell for cell in cells.flat):  # 5_3 is no number
        with contextlib.suppress(ValueError, TypeError):
            return np.where(cells == "", "nan", cells).astype(np.float64)
    refuse_thousands(table.path, [cell for cell in cells.flat if isinstance(cell, str)])
    values = np.vectorize(number_or_none, [object])(cells)
    wrong = np.equal(values, None)
    if wrong.any():
        refuse_cells(table, columns, cells, wrong)
    return values.astype(float)  # None becomes NaN


def refuse_cells(table, columns, cells, wrong):
    """Raise UserError for cells that are no numbers, of which wrong (n, columns) is True."""
    for j in np.flatnonzero(wrong.mean(0) > 0.5):
        name = columns[j]
        shown = str(cells[wrong[:, j], j][0])[:40]
        roles = f"--drop, --label or --group {name}; --text {name}, if only this text is read"
        problem = f"column {name} holds no numbers as 1234.5 ({shown!r})"
        raise UserError(f"{table.path}: {problem}; {roles}; {PAGE}: Lists in cells, Event logs")
    problems = {}
    for i in np.flatnonzero(wrong.any(1)):
        j = np.argmax(wrong[i])
        problem = f"column {columns[j]}: {str(cells[i, j])[:40]!r} is no number"
        if wrong[i].all():
            shown = str(cells[i, j])[:40]
            problem = f"no numbers, but {shown!r}: units, a note, or a header below others?"
        problems[i] = problem
    table.refuse(problems, "correct it, leave it empty if it is missing, or remove it")


# ---- a row per position --------------------------------------------------------------------------


def series_of_positions(table, roles, value_columns, labels, layout):
    """Turn a table with a row per position into series (l, channels). Return them, the first row of
    each, its name, and its label, or with --label-per-position its labels (n, longest), texts, ""
    for none."""
    name = roles["id"]
    values = numbers_of(table, value_columns)
    series, rows, ids, targets = [], [], [], []
    sequences = sequences_of(table, name, roles["time"])
    if layout.width is None:
        rows_of = [indices for _, indices in sequences]
        ask_about_channels(table, roles, value_columns, values, rows_of)
    for key, indices in sequences:
        series.append(values[indices])
        rows.append(table.frame.index[indices.min()])
        ids.append(str(key))
        if labels is None:
            continue
        if layout.label_per_position:
            targets.append([*labels[indices]])
            continue
        different = {*labels[indices]} - {""}
        if len(different) > 1:
            problem = f"{table.path}: {name} {key} has several labels"
            advice = "if each position has its own, give --label-per-position; or cut windows"
            raise UserError(f"{problem}; {advice} ({PAGE}: Windows of recordings)")
        targets.append(next(iter(different), ""))
    if layout.label_per_position and labels is not None:
        targets = side_by_side(targets)
    return series, np.array(rows), np.array(ids), None if labels is None else targets


def sequences_of(table, name, time):
    """Return the name of each sequence and the indices of its rows (l,), in the order of time."""
    times = times_of(table, time)
    column_of(table, name, table.frame.index)  # no name is empty
    sequences = []
    steps = []
    for key, indices in table.frame.groupby(name, sort=False).indices.items():
        indices = indices[np.argsort(times[indices], kind="stable")]
        steps.append(np.diff(times[indices]).astype(float))
        if not steps[-1].all():
            problem = f"{table.path}: {name} {key} has two rows of one {time}"
            raise UserError(f"{problem}; if several columns name a sequence: {PAGE}: Wide to long")
        sequences.append((key, indices))
    steps = np.concatenate(steps)
    if not np.allclose(steps, steps[:1], rtol=1e-3):
        note = f"note: {time} has steps of several sizes, but each row is one position"
        print(f"{note}; where rows lack, add empty ones")
    return sequences


def times_of(table, column):
    """Return a column as numbers or dates (n,), which order positions."""
    import pandas as pd

    cells = table.frame[column]
    numbers = cells.map(number_or_none)
    if numbers.map(lambda number: number is not None).mean() > 0.5:
        times = numbers.astype(float).to_numpy()
    else:
        dates = pd.to_datetime(cells, format="ISO8601", errors="coerce", utc=True)
        # a number is no date
        times = dates.dt.tz_localize(None).where(~cells.map(is_number)).to_numpy()
    problems = {
        i: f"column {column} holds {cells.iloc[i]!r}" for i in np.flatnonzero(np.isnan(times))
    }
    table.refuse(problems, "a time is a number, or a date as 2024-01-31 23:59:00")
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
            rows.append([class_name(label) for label in row.tolist()])
    texts = {text for row in rows for text in row}
    none = MISSING | {text for text in texts if is_number(text) and as_number(text) < 0}
    columns = zip_longest(*rows, fillvalue="")
    return np.array([["" if text.lower() in none else text for text in row] for row in columns]).T
