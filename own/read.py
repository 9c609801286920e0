"""Read files of yours, a function per format: .npz, .ts, .txt, and tables (table.py, columns.py).

    np.savez("my.npz", x=x, y=y)    ->    series x[0], x[1], ..., (l, channels) each;    labels y

A series is samples float64 (l, channels), symbols int64 (l,), or a text."""

import gzip
import io
import os
import re
from itertools import product
from pathlib import Path

import numpy as np

from files import UserError, reading
from own.cells import MISSING, PAGE, is_number
from own.columns import COLUMNS, Examples, Layout, from_frame, oriented, side_by_side
from own.questions import ask_about_merged
from own.table import FOLDS, GROUPS, SPLIT_NAMES, TABLES, decoded, read_frame, words_of
from tasks import SPLITS
from tasks.bidmc import read_ts
from tasks.cifar import ArraysOnly

OWN_FILES = ".npz", *TABLES[:2], ".ts", ".txt", *TABLES[2:]
NO_LAYOUT = Layout()


def read_file(path, layout=NO_LAYOUT, **more):
    """Read a file that `read_own` knows by its ending -> Examples."""
    endings = f"must end in one of {' '.join(OWN_FILES)}; other forms: {PAGE}"
    if os.path.isdir(path):
        raise UserError(f"{path} is a folder; a path {endings}")
    if not os.path.isfile(path):
        raise UserError(f"{path} is not a file, or not there")
    if not path.lower().removesuffix(".gz").endswith(OWN_FILES):
        raise UserError(f"{path} {endings}")
    with reading(path, "restore it, or save it anew"):
        return read_own(path, Path(path).read_bytes(), layout, **more)


def read_own(path, raw, layout=NO_LAYOUT, documents=1, regression=False, kind=None, skip=()):
    """Read the bytes of a file -> Examples.

    .npz: see `read_npz`. .txt: one line per text, without a label. .ts: see `read_ts`. Others: see
    table.py.

    documents: texts per example. regression: labels are numbers. kind: "samples" or "symbols", if
    that is said of numbers. skip: rows of the file that are left out."""
    ending = os.path.splitext(path.lower())[1]
    if ending == ".gz":
        raw = gzip.decompress(raw)
        ending = Path(path.lower()).suffixes[-2]
    missing = None  # the label that means: no label
    refuse_flags(path, ending, layout)
    if ending == ".npz":
        examples, missing = read_npz(path, raw, layout, documents, skip)
    elif ending == ".txt":
        examples = read_txt(path, raw, skip)
    elif ending == ".ts":
        missing = "?"
        lines = io.StringIO(decoded(path, raw))
        series, labels = read_ts(path, lines, regression=regression, skip=skip)
        how = "a .ts", f"label: {'none' if labels is None else 'last'}", "group: none"
        examples = Examples(series, labels, rows=left(len(series) + len(skip), skip), how=how)
    else:
        frame, header, lines = read_frame(path, ending, raw, layout)
        more = dict(documents=documents, regression=regression, kind=kind, skip=skip)
        examples = from_frame(path, frame, header, layout, **more)
        examples = examples._replace(how=(*examples.how, *lines))
        if ending == ".xlsx" and layout.training:
            ask_about_merged(path, examples.labels)
    return mark_labels(examples, missing, regression)


def refuse_flags(path, ending, layout):
    """Raise UserError for flags of columns that a format of training data has not."""
    meant = {".ts": (), ".txt": (), ".npz": ("group", "split", "drop")}.get(ending, COLUMNS)
    wrong = [flag for flag in COLUMNS if getattr(layout, flag) and flag not in meant]
    if ending == ".npz" and layout.label == "none":
        wrong.remove("label")
    if layout.training and wrong:
        raise UserError(f"{path}: --{wrong[0]} is for tables; leave it out, or see {PAGE}")


def left(n, skip):
    """Return the numbers below n that are not skipped."""
    return np.setdiff1d(np.arange(n), np.array([*skip], int))


def mark_labels(examples, missing, regression):
    """Return Examples with `has_label`. A label that is empty, NaN or `missing` means: no label."""
    if examples.labels is None:
        return examples._replace(has_label=np.zeros(len(examples.series), bool))
    labels = np.asarray(examples.labels)
    if labels.ndim == 2:  # several labels, or one per position
        present = labels != "" if labels.dtype.kind == "U" else ~np.isnan(labels)
        return examples._replace(labels=labels, has_label=present.any(1))
    if labels.dtype.kind in "UO":
        labels = np.char.strip(labels.astype(str))
    unknown = ["", "nan", "nat", *(MISSING if regression else ())]
    if missing is not None:
        unknown.append(str(missing).lower())
    names = np.char.lower(labels.astype(str))  # of a date as in the names of classes
    has_label = (labels != missing) & ~np.isin(names, unknown)
    return examples._replace(labels=labels, has_label=has_label)


def read_txt(path, raw, skip):
    """Read the bytes of a .txt file -> Examples, a text per line. UserError if they are numbers."""
    lines = [line.strip() for line in io.StringIO(decoded(path, raw), newline=None)]
    rows = [row for row, line in enumerate(lines) if line and row not in skip]
    halves = [lines[row].split("\t") for row in rows]
    if {*map(len, halves)} == {2} and len({label for label, _ in halves}) < len(rows) / 2:
        raise UserError(f"{path} has a label and a tab in each line; call it .tsv")
    cells = [cell for row in rows[1:50] for cell in re.split(r"[\s,;|]+", lines[row]) if cell]
    if sum(map(is_number, cells)) > len(cells) / 2:
        raise UserError(f"{path} holds numbers, but a .txt holds one text per line; call it .csv")
    how = "a text per line", "label: none", "group: none"
    return Examples([lines[row] for row in rows], rows=np.array(rows, int), how=how)


# ---- .npz ----------------------------------------------------------------------------------------

# What arrays may be called, in lower case; with _train, _val and _test after it, those of a split.
CALLED = dict(
    x=("x", "data", "inputs"),
    y=("y", "label", "labels", "target", "targets"),
    split=("split",),
    group=("group", "groups"),
    missing=("missing",),
)


def read_npz(path, raw, layout, documents, skip):
    """Read the bytes of an .npz file -> Examples without `has_label`, and the value of y that means
    "no label", or None. It holds x, floats (n, l) or (n, l, channels), integers (n, l), which are
    symbols, or texts (n,); optionally y (n,), or (n, k), k labels of 0 and 1, or (n, l), one per
    position (below 0: none); its `missing` value, split (n,) and group (n,)."""
    x_and_y = "numbers x (n, l) or (n, l, channels), or texts x (n,), and y (n,)"
    with reading(path, f"it must hold {x_and_y}; other shapes: {PAGE}"):
        with np.load(io.BytesIO(raw)) as file:
            arrays = named_arrays(path, file, layout)
        if "x" not in arrays:
            arrays |= joined_splits(arrays)
        missing = arrays.pop("missing", None)
        refuse_shapes(arrays, documents)
        rows = left(len(arrays["x"]), skip)
        x, y, split, group = (
            array if array is None else array[rows] for array in map(arrays.get, [*CALLED][:4])
        )
        series = series_of_array(path, x, layout)
        if y is not None:
            y = labels_of_array(path, y, [*map(len, series)], layout)
        how = f"x {x.dtype}", f"label: {'none' if y is None else 'y'}"
        how += (f"group: {'none' if group is None else layout.group or 'group'}",)
        first = layout.channels_first
        kept = None if first is None else Layout(channels_first=first)
        fields = dict(split=split, group=group, rows=rows, layout=kept, how=how)
        return Examples(series, y, **fields), missing


def named_arrays(path, file, layout):
    """Return the arrays of an open .npz file by their usual names: x, y, split, group, missing, or
    x_train, y_val, ..."""
    names = {name.lower(): name for name in file.files}  # those that are not read yet
    called = CALLED | ({"y": ()} if layout.label == "none" else {})
    for role in "group", "split":
        if layout.training and (name := getattr(layout, role)):
            if not any(array.startswith(name) for array in file.files):
                raise ValueError(f"its arrays are {', '.join(file.files)}; none is {name!r}")
            called[role] = (name.lower(),)
    for name in (layout.drop or "").split(","):
        names.pop(name.lower(), None)
    arrays = {}
    for key, part in product(called, ("", *SPLITS)):
        ends = [f"_{name}" for name, split in SPLIT_NAMES.items() if split == part] or [""]
        present = [word + end for word in called[key] for end in ends if word + end in names]
        if present:
            arrays[f"{key}_{part}".strip("_")] = array_of(file, names.pop(present[0]))
    if "x" not in arrays and not {"x_train", "x_test"} <= arrays.keys():
        raise ValueError(f"its arrays are {', '.join(file.files)}; call one x")
    for name in names.values():
        name = re.sub(r"_(train|val|test)$", "", name)
        role = "group" if words_of(name) & GROUPS else "split" if words_of(name) & FOLDS else None
        if role and layout.training and role not in arrays:
            problem = f"{path}: what is the array {name}? --{role} {name}"
            raise UserError(f"{problem}: see data.py --help; --drop {name} leaves it out")
    if names:
        print(f"{path}: these arrays are not read: {', '.join(names.values())}")
    return arrays


def array_of(file, name):
    """Return an array of an open .npz file. Objects become texts, or stay arrays."""
    try:
        array = file[name]
    except ValueError:  # an array of objects: a pickle below one line
        pickled = file.zip.read(f"{name}.npy").split(b"\n", 1)[1]
        objects = ArraysOnly(io.BytesIO(pickled)).load()
    else:
        return array.astype(str) if array.dtype.kind == "S" else array
    cells = [cell for cell in objects.flat if not isinstance(cell, np.ndarray)]
    plain = (str, int, float, type(None))
    kinds = {type(cell).__name__ for cell in cells if not isinstance(cell, plain)}
    if kinds:
        raise ValueError(f"it holds Python objects ({', '.join(kinds)}); save texts or numbers")
    if not cells:
        return objects
    texts = ["" if cell is None else str(cell) for cell in cells]
    return np.array(texts).reshape(objects.shape)


def joined_splits(arrays):
    """Join x_train, x_val, x_test, and likewise y and group -> {name: array}, with split."""
    parts = [part for part in SPLITS if f"x_{part}" in arrays]
    joined = {"split": np.repeat(parts, [len(arrays[f"x_{part}"]) for part in parts])}
    for key in "x", "y", "group":
        lacking = [f"{key}_{part}" for part in parts if f"{key}_{part}" not in arrays]
        if lacking and len(lacking) < len(parts):
            raise ValueError(f"it has no {lacking[0]}")
        if not lacking:
            joined[key] = np.concatenate([arrays[f"{key}_{part}"] for part in parts])
    return joined


def refuse_shapes(arrays, documents):
    """Raise ValueError if the arrays x, y, split and group do not fit each other."""
    x = arrays["x"]
    shapes = [arrays[name].shape for name in ("split", "group") if name in arrays]
    if "y" in arrays:
        shapes.append(arrays["y"].shape[:1] if arrays["y"].ndim < 3 else arrays["y"].shape)
    if x.dtype.kind == "U":
        right = x.shape[1:] == ((documents,) if documents > 1 else ())
    else:
        right = x.ndim in (2, 3) or x.dtype.kind == "O"
    if not right or any(shape != x.shape[:1] for shape in shapes):
        raise ValueError(f"shapes {[x.shape, *shapes]} do not fit")
    if x.dtype.kind not in "biufUO":
        raise ValueError(f"x is {x.dtype}")


def series_of_array(path, x, layout):
    """Return the series in x as a list: texts, symbols (l,) or samples (l, channels)."""
    if x.dtype.kind == "O":
        series = [np.array(row, np.float64).reshape(len(row), -1) for row in x]
        return oriented(path, series, layout)
    if x.dtype.kind == "U":
        return [*x]
    if x.dtype.kind in "iub" and x.ndim == 2:
        return [*x.astype(np.int64)]
    samples = x.astype(np.float64).reshape(*x.shape[:2], -1)
    return [*oriented(path, samples, layout)]


def labels_of_array(path, y, lengths, layout):
    """Return labels y of an .npz: (n,); several of 0 and 1, (n, k), NaN in a row without any; or
    texts (n, longest), a label per position. lengths: of the series (n,)."""
    if y.ndim == 2 and y.shape[1] == 1:
        return y[:, 0]
    per_position = isinstance(y[0], np.ndarray) and [*map(len, y)] == lengths
    if per_position and y.ndim == 2 and layout.label_per_position is None:
        problem = f"{path}: y has {y.shape[1]} columns, as many as x has positions"
        answers = "a label per position (--label-per-position), one-hot (save y.argmax(1))"
        raise UserError(f"{problem}: {answers} or several labels (save a table)?")
    if per_position and (y.ndim == 1 or layout.label_per_position):
        return side_by_side(y)
    numeric = y.dtype.kind in "biuf"
    ones = y.ndim == 2 and numeric and np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all()
    if ones and layout.label_per_position is None:
        return y.argmax(1)  # one-hot
    if y.ndim == 2:
        several = numeric and (np.isin(y, (0, 1)) | np.isnan(y).all(1, keepdims=True)).all()
        if not several:
            problem = f"y has the shape {y.shape}: several labels (n, k) must be 0 or 1"
            raise ValueError(f"{problem}; labels of positions are as many as positions")
    return y
