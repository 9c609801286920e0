"""Read files of yours: .npz, .ts, .txt; tables with table.py and columns.py.

    np.savez("my.npz", x=x, y=y)    ->    series x[0], x[1], ..., (l, channels) each;    labels y

A series is samples float64 (l, channels), symbols int64 (l,), or a text. One that cannot be read
does not end the reading: it is listed in `Examples.unreadable`."""

import gzip
import io
import os
import re
from itertools import product
from pathlib import Path

import numpy as np

from files import UserError, reading
from tasks import SPLITS
from tasks.columns import NOT_READ, from_frame, oriented, side_by_side
from tasks.split import SPLIT_NAMES
from tasks.table import MISSING, TABLES, Examples, Layout, decoded, is_number, read_frame

OWN_FILES = ".npz", *TABLES[:2], ".ts", ".txt", *TABLES[2:]
NO_LAYOUT = Layout()


def read_file(path, layout=NO_LAYOUT, documents=1, regression=False, target=None):
    """Read a file that `read_own` knows by its ending -> Examples."""
    if not os.path.isfile(path):
        raise UserError(f"{path} is not a file, or not there")
    if not path.lower().removesuffix(".gz").endswith(OWN_FILES):
        raise UserError(f"{path} must end in one of {' '.join(OWN_FILES)}")
    with reading(path, "restore it, or save it anew"):
        return read_own(path, Path(path).read_bytes(), layout, documents, regression, target)


def read_own(path, raw, layout=NO_LAYOUT, documents=1, regression=False, target=None):
    """Read the bytes of a file -> Examples.

    .npz: x, floats (n, l) or (n, l, channels), integers (n, l), which are symbols, or texts (n,);
    optionally y (n,), or (n, k), k labels of 0 and 1, or (n, l), one per position (below 0: none);
    its `missing` value, split (n,), train, val or test, and group (n,). .txt: one line per text,
    without a label. .ts: see `read_ts`. Others: see table.py.

    documents: texts per example. regression: labels are numbers. target: Task.target of a trained
    run."""
    kind = os.path.splitext(path.lower())[1]
    if kind == ".gz":
        raw = gzip.decompress(raw)
        kind = Path(path.lower()).suffixes[-2]
    missing = None  # the label that means: no label
    if kind == ".npz":
        examples, missing = read_npz(path, raw, layout, documents, target)
    elif kind == ".txt":
        examples = read_txt(path, raw)
    elif kind == ".ts":
        missing = "?"
        lines = io.StringIO(decoded(path, raw))
        series, labels, unreadable = read_ts(path, lines, regression=regression)
        examples = Examples(series, labels, unreadable=unreadable)
    else:
        frame, header = read_frame(path, kind, raw, layout)
        examples = from_frame(path, frame, header, layout, documents, regression)
    return mark_known(examples, missing, regression)


def mark_known(examples, missing, regression):
    """Return Examples with `known`. A label that is empty, NaN or `missing` means: no label."""
    if examples.labels is None:
        return examples._replace(known=np.zeros(len(examples.series), bool))
    labels = np.asarray(examples.labels)
    if labels.ndim == 2:  # several labels, or one per position
        present = labels != "" if labels.dtype.kind == "U" else ~np.isnan(labels)
        return examples._replace(labels=labels, known=present.any(1))
    if labels.dtype.kind in "UO":
        labels = np.char.strip(labels.astype(str))
    unknown = ["", "nan", "nat", *(MISSING if regression else ())]
    if missing is not None:
        unknown.append(str(missing).lower())
    names = np.char.lower(labels.astype(str))  # of a date as in the names of classes
    has_label = (labels != missing) & ~np.isin(names, unknown)
    return examples._replace(labels=labels, known=has_label)


def read_txt(path, raw):
    """Read the bytes of a .txt file -> Examples, a text per line. UserError if they are numbers."""
    lines = [line.strip() for line in io.StringIO(decoded(path, raw), newline=None)]
    texts = [line for line in lines if line]
    rows = [re.split(r"[\s,;|]+", text) for text in texts[1:50]]
    cells = [cell for row in rows if len(row) > 1 for cell in row]
    if sum(map(is_number, cells)) > len(cells) / 2:
        raise UserError(f"{path} holds numbers, but a .txt holds one text per line; call it .csv")
    return Examples(texts, rows=np.flatnonzero([line != "" for line in lines]))


# ---- .npz ----------------------------------------------------------------------------------------

# What arrays may be called, in lower case; with _train, _val and _test after it, those of a split.
CALLED = dict(
    x=("x", "data", "inputs"),
    y=("y", "label", "labels", "target", "targets"),
    split=("split",),
    group=("group", "groups"),
    missing=("missing",),
)


def read_npz(path, raw, layout, documents, target):
    """Read the bytes of an .npz file -> Examples without `known`, and the value of y that means "no
    label", or None."""
    x_and_y = "numbers x (n, l) or (n, l, channels), or texts x (n,), and y (n,)"
    with reading(path, f"it must hold {x_and_y}; a shorter series ends in NaN, or -1 if symbols"):
        with np.load(io.BytesIO(raw)) as file:
            arrays = named_arrays(path, file)
        if "x" not in arrays:
            arrays |= joined_splits(arrays)
        x, y, split, group, missing = map(arrays.get, CALLED)
        refuse_shapes(x, y, split, group, documents)
        series = series_of_array(path, x, layout)
        if y is not None:
            lengths = [*map(len, series)] if documents == 1 else None
            y = labels_of_array(y, lengths, target)
        layout = None if layout.channels_first is None else layout
        return Examples(series, y, split=split, group=group, layout=layout), missing


def named_arrays(path, file):
    """Return the arrays of an open .npz file by their usual names: x, y, split, group, missing, or
    x_train, y_val, ..."""
    names = {name.lower(): name for name in file.files}  # those that are not read yet
    arrays = {}
    for key, part in product(CALLED, ("", *SPLITS)):
        ends = [f"_{name}" for name, split in SPLIT_NAMES.items() if split == part] or [""]
        present = [word + end for word in CALLED[key] for end in ends if word + end in names]
        if present:
            arrays[f"{key}_{part}".strip("_")] = array_of(file, names.pop(present[0]))
    if "x" not in arrays and not {"x_train", "x_test"} <= arrays.keys():
        raise ValueError(f"its arrays are {', '.join(file.files)}; call one x")
    if names:
        print(f"{path}: these arrays are not read: {', '.join(names.values())}")
    return arrays


def array_of(file, name):
    """Return an array of an open .npz file. Objects become texts, or stay arrays."""
    # here, because tasks are listed in the order in which they are imported
    from tasks.cifar import ArraysOnly

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
        if any(f"{key}_{part}" in arrays for part in parts):
            joined[key] = np.concatenate([arrays[f"{key}_{part}"] for part in parts])
    return joined


def refuse_shapes(x, y, split, group, documents):
    """Raise ValueError if the arrays do not fit each other."""
    beside = [part.shape for part in (split, group) if part is not None]
    if y is not None:
        beside.append(y.shape[:1])
    if x.dtype.kind == "U":
        right = x.shape[1:] == ((documents,) if documents > 1 else ())
    else:
        right = x.ndim in (2, 3) or x.dtype.kind == "O"
    if not right or any(shape != x.shape[:1] for shape in beside):
        raise ValueError(f"shapes {[x.shape, *beside]} do not fit")
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


def labels_of_array(y, lengths, target):
    """Return labels y of an .npz: (n,); several of 0 and 1, (n, k), NaN in a row without any; or
    texts (n, longest), a label per position. lengths: of the series (n,)."""
    if y.ndim == 2 and y.shape[1] == 1:
        return y[:, 0]
    numeric = y.dtype.kind in "biuf"
    ones = y.ndim == 2 and numeric and np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all()
    if ones and not target:
        return y.argmax(1)  # one-hot
    if target != "labels" and isinstance(y[0], np.ndarray) and [*map(len, y)] == lengths:
        return side_by_side(y)
    if y.ndim == 2:
        several = numeric and (np.isin(y, (0, 1)) | np.isnan(y).all(1, keepdims=True)).all()
        if not several:
            problem = f"y has the shape {y.shape}: several labels (n, k) must be 0 or 1"
            raise ValueError(f"{problem}; labels of positions are as many as positions")
    return y


# ---- .ts -----------------------------------------------------------------------------------------


def read_ts(path, lines, shape=None, kind=str, regression=True):
    """Read the lines of a .ts file, of the TSER archive (Tan et al. 2021) or UEA's -> series,
    targets of type `kind` or None, {index of a series that cannot be read: UserError}. Series are
    float64 (l, channels), or float32 of `shape` if that is given; then any error is raised.

    After a header of lines with #, % and @, there is one line per example: its channels, numbers
    separated by commas, and the target, separated by colons; no target if the header says
    "@classLabel false". A value may be (time,value), or a question mark if it is missing."""
    series = []
    targets = []
    unreadable = {}
    labelled = True
    for number, line in enumerate(lines, 1):
        if line.strip()[:1] in ("", "#", "@", "%"):
            words = line.lower().split()[:2]
            if words in (["@classlabel", "false"], ["@targetlabel", "false"]):
                labelled = False
            if words == ["@targetlabel", "true"] and not regression:
                problem = f"{path}, line {number}: @targetLabel says that targets are numbers"
                raise UserError(f"{problem}; give --regression of data.py or run_all.sh own")
            continue
        try:
            values, target = ts_example(line, labelled, shape)
            target = kind(target)
        except ValueError as error:
            line_holds = "it must hold the numbers of each channel and a target, between colons"
            problem = f"{path}, line {number}: {line_holds} ({str(error).splitlines()[0]})"
            if shape:
                raise UserError(f"{problem}; restore the file") from None
            unreadable[len(series)] = UserError(f"{problem}; a missing value is a ?")
            values = NOT_READ
            target = kind("nan")
        series.append(values)
        targets.append(target)
    return series, targets if labelled else None, unreadable


def ts_example(line, labelled, shape):
    """Return the values (l, channels) and the target of a line of a .ts file."""
    without_colons = re.sub(r"\([^()]*:[^()]*,", "(,", line)  # of times of day
    channels = without_colons.split(":")
    target = channels.pop().strip() if labelled else ""
    channels = [re.sub(r"\([^()]*,([^(),]*)\)", r"\1", channel) for channel in channels]
    if not shape:
        channels = [channel.replace("?", "nan") for channel in channels]
    rows = [channel.split(",") for channel in channels]
    lengths = {*map(len, rows)}
    if len(lengths) > 1:
        raise ValueError("channels have different numbers of positions, or the label has a colon")
    values = np.array(rows, np.float32 if shape else np.float64).reshape(len(rows), -1).T
    return values.reshape(shape or values.shape), target
