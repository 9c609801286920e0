"""Data: open a task's splits and take batches from them. A task is prepared once, as flat
memory-mapped arrays.

    python data.py --list                          # the tasks: sizes, sources, what is ready
    python data.py --task text                     # download IMDb, check it, prepare it
    python data.py --task text --raw DIR           # the same from files you have
    python data.py --task pathx                    # generate 200,000 images: all cores, 3.3 GB
    python data.py --task image --show sheet.png   # examples, before and after masking
    python data.py --task file:my.npz              # your data: x (n, l[, channels]), labels y
    python data.py --task file:my.csv              # a line per example: its label, then its numbers
    python data.py --task ucr:FordA                # a data set of the UCR and UEA archives

Training calls only `open_task`, `Split.batch` and `order`. tasks/ defines the tasks and how each is
read or generated, in one file per task or family. A prepared task is a folder `data/<task>/` with
`{train,val,test}_{x,y}.npy` (symbols: and `_offsets.npy`) and `meta.json`. `meta.json` is written
last, so a folder that contains it is complete."""

import argparse
import hashlib
import inspect
import os
import re
import shlex
import shutil
import sys
import zlib
from collections import namedtuple
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import files
import own.task  # noqa: F401
from files import UserError
from own.columns import add_layout, given
from tasks import PAD, SPLITS, TASKS, Task, declared, folder_name, full_name, identifying, named
from tasks.making import Request, as_wide, stratified
from tasks.picture import height, picture, sheet

# torch and matplotlib are imported where they are used: preparing data starts faster without them.

# ---- reading: all that training uses -------------------------------------------------------------


class Batch(namedtuple("Batch", "symbols samples lengths y")):
    """A batch of b sequences, as torch tensors. Gray images have both views. In a task with two
    documents per example, those of example i are sequences 2i and 2i + 1.

    symbols: int64 (b, l), padded with PAD, or None; a sequence of characters ends with EOS.
    samples: float32 (b, l, channels), normalised, or None; NaN: missing.
    lengths: int64 (b,), EOS counted; None: no padding.
    y: int64 (examples,), or float32 for regression; see Task.target for others."""


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
        """Return the examples `indices` (examples,) as a Batch, reading only their bytes."""
        import torch

        task = self.task
        indices = np.asarray(indices, dtype=np.int64)
        if self.fresh is not None:
            return self.drawn(indices).batch(np.arange(len(indices)), device)
        if self.chosen is not None:
            indices = self.chosen[indices]
        dtype = np.int64 if task.kind in ("class", "positions") else np.float32
        y = torch.from_numpy(self.y[indices].astype(dtype)).to(device)
        if self.offsets is None:
            lengths = None
            x = torch.from_numpy(self.x[indices]).to(device)  # (b, l, channels)
        else:
            sequences = [torch.from_numpy(sequence) for sequence in self.sequences(indices)]
            lengths = torch.tensor([*map(len, sequences)]).to(device)  # (b,)
            # (b, longest[, channels])
            x = torch.nn.utils.rnn.pad_sequence(sequences, True, PAD).to(device)
        if task.kind == "positions" and y.ndim == 2:  # new data have no targets
            y = y[:, : x.shape[1]]  # (b, l)
        if not task.channels:
            return Batch(x, None, lengths, y)
        symbols = x[:, :, 0].long() if task.vocab else None  # (b, l)
        if x.dtype != torch.float64:
            x = x.float()
        # torch refuses tuples; a number stays one, so that no bit changes
        mean, std = (
            torch.tensor(value, dtype=x.dtype, device=device) if isinstance(value, tuple) else value
            for value in (task.mean, task.std)
        )
        samples = ((x / task.scale - mean) / std).float()
        return Batch(symbols, samples, lengths, y)

    def sequences(self, indices):
        """Yield the documents of these examples, in their order: ids int64 (l,), or samples (l,
        channels) as stored."""
        k = self.task.documents
        dtype = self.x.dtype if self.task.channels else np.int64
        for example in indices:
            for document in range(k * example, k * example + k):
                start, end = self.offsets[document : document + 2]
                yield self.x[start:end].astype(dtype)

    def drawn(self, indices):
        """Draw examples anew from the seed `fresh` -> Split."""
        task = self.task
        # 8181 separates these draws from those of prepared splits
        examples = [task.draw(task, np.random.default_rng([8181, self.fresh, i])) for i in indices]
        x, y = zip(*examples)
        y = as_wide(y, task.length) if task.target == "positions" else np.array(y)
        if self.offsets is None:
            return Split(task, np.stack(x), y)
        return Split(task, np.concatenate(x), y, np.cumsum([0, *map(len, x)]))


def order(n, seed, epoch):
    """Return the order in which an epoch visits n examples: int64 (n,). A pure function, so no
    sampler state is saved. 2323 separates these draws from the others of training."""
    return np.random.default_rng([2323, seed, epoch]).permutation(n)


def look_up(name, data_dir="data"):
    """Return the Task of a name. Your data is prepared first: only then its length is known."""
    task = declared(full_name(name))
    return task if task.length else open_task(name, data_dir)[0]


def open_task(
    name, data_dir="data", fraction=None, labelled=None, labels=False, per_class=None, seed=0
):
    """Return a task and its splits: Task, train, val, test. Prepares the task on first use;
    UserError as in `prepare`.

    fraction: keep the first `fraction * n` training examples of one fixed shuffle (seed 42, paper's
    appendix C.1.4 and its official configuration), so smaller subsets lie within larger ones, in
    both stages. labelled: instead, a share of all training examples that keeps the class
    proportions, again nested. per_class: instead, this number of examples of each class (all, if it
    has fewer), drawn from `seed` and nested, and of validation a fifth as many, at least one;
    UserError if targets are not one class. labels: leave out training examples without a label;
    UserError if no example has one."""
    folder = prepare(name, data_dir)
    with files.reading(f"{folder} is damaged", remake(name, folder)):
        task, (train, val, test) = load(declared(name), folder)
    n = len(train) if task.labelled is None else task.labelled
    if labels and n == 0:
        raise UserError(f"{name} has no labels; only pretrain.py can use it")
    if labelled is not None:
        nested = stratified(train.y[:n] if task.kind == "class" else np.zeros(n), 42)
        train.chosen = nested[: max(task.classes, 1, int(labelled * n))]
    elif per_class is not None:
        if task.kind != "class":
            raise UserError(f"--labels-per-class needs one class per example, not {task.kind}")
        train.chosen = of_each_class(train.y[:n], per_class, seed)
        val.chosen = of_each_class(val.y, max(1, per_class // 5), seed)
        if len(train) < per_class * task.classes and os.environ.get("RANK", "0") == "0":
            print(f"note: a class has fewer than {per_class} labelled training examples: all count")
    elif fraction is not None:
        nested = np.random.RandomState(42).permutation(len(train))
        train.chosen = nested[: max(1, int(fraction * len(train)))]
    if labels and task.labelled is not None:
        train.chosen = np.arange(n) if train.chosen is None else train.chosen[train.chosen < n]
        if not len(train):
            raise UserError(f"--train-fraction {fraction} keeps no example with a label; raise it")
    return task, train, val, test


def of_each_class(labels, k, seed):
    """Return the first k examples of each class in a random order: int64 (at most classes * k,)."""
    # 5151 separates these draws from others of the same seed
    order = np.random.default_rng([5151, seed]).permutation(len(labels))
    return np.concatenate([order[labels[order] == label][:k] for label in np.unique(labels)])


def load(task, folder):
    """Return a Task with the fields that its prepared folder fills in, and its three Splits."""
    meta = files.read_json(folder / "meta.json")
    for field, value in meta["found"].items():
        task = replace(task, **{field: tuple(value) if isinstance(value, list) else value})
    task = replace(task, data=identity(task, folder, meta))
    arrays = ["x", "y"]
    if task.ragged or not task.channels:
        arrays.append("offsets")
    if task.own:
        arrays.append("rows")
    splits = []
    for name in SPLITS:
        mapped = {array: np.load(folder / f"{name}_{array}.npy", mmap_mode="r") for array in arrays}
        splits.append(Split(task, **mapped))
    if [len(split.y) for split in splits] != meta["flags"]["sizes"]:
        raise ValueError("the sizes of its arrays are not those in meta.json")
    return task, splits


def identity(task, folder, meta):
    """Return what a run records of its data: where they come from, seed, sizes and a checksum of
    the labels; for your data also checksums of the inputs."""
    flags = meta["flags"]
    source = "generated" if task.make and flags["raw"] is None else "official files"
    if task.own:
        source = "own data"
    record = dict(source=source, seed=flags["seed"], sizes=flags["sizes"])
    labels = b"".join((folder / f"{split}_y.npy").read_bytes() for split in SPLITS)
    record["labels"] = zlib.crc32(labels)
    if meta["inputs"]:
        record["inputs"] = meta["inputs"]
    if task.labelled is not None:
        record["labelled"] = task.labelled
    if task.read:
        record["read"] = list(task.read)
    return record


# ---- preparing -----------------------------------------------------------------------------------


def prepare(name, data_dir="data", sizes=None, seed=None, raw=None, workers=None, **own_data):
    """Prepare a task unless it is ready, and return its folder in data_dir. Several processes may
    call this at once.

    sizes: of (train, val, test); None: the task's. seed: of the generator, or of the split of your
    data; None: 0. raw: folder of the official files, read instead of downloading or generating.
    workers: processes of a generator; None: one per core; the result does not depend on it.
    own_data: regression, kind and layout, as in `Request`.

    Nothing is overwritten. UserError if the folder was made with other flags (None: any), by other
    code or from other files of yours."""
    name = full_name(name)
    task = declared(name)
    folder = Path(data_dir) / folder_name(name)
    refuse_meaningless(name, task, seed, raw, own_data)
    place = raw and str(Path(raw).resolve())
    flags = own_data | dict(sizes=sizes and list(sizes), seed=seed, raw=place)
    if not (folder / "meta.json").exists():  # before locking, so a read-only folder can be used
        make_set(name, task, folder, flags, raw and Path(raw), workers)
    meta = files.read_json(folder / "meta.json")
    recorded = meta.get("flags", {})
    differences = [
        f"{flag} ({recorded.get(flag)}, not {value})"
        for flag, value in flags.items()
        if value is not None and recorded.get(flag) != value
    ]
    checksum = made_of(name, task)
    if checksum is not None and checksum != meta.get("made_of"):
        differences.append("code or files")
    if differences:
        problem = f"{folder} was made by another version or with other {', '.join(differences)}"
        raise UserError(f"{problem}; {remake(name, folder)}")
    return folder


def refuse_meaningless(name, task, seed, raw, own_data):
    """Raise UserError for a flag that has no meaning for a task."""
    if raw is not None and not task.source.raw:
        raise UserError(f"--raw {raw} has no meaning for {name}; leave it out")
    generated = task.make and raw is None
    if seed is not None and not generated and not task.own:
        raise UserError(f"--seed {seed}: the official splits of {name} are fixed; leave it out")
    if not task.own and any(value is not None for value in own_data.values()):
        flags = "--regression, --symbols, --samples and flags of columns"
        raise UserError(f"{flags} are for your data, and {name} is fixed; leave them out")


def made_of(name, task):
    """Return a checksum of what makes a set: the task's parameters, the code of its file and of the
    files of own/ and tasks/ that it imports, without comments, and your file. None if a file of
    yours is gone: its set can still be used.

    Official files do not count: they are not read again once their set is ready."""
    yours = [name.removeprefix("file:")] if task.family == "file" else []
    if not all(map(os.path.isfile, yours)):
        return None
    function = getattr(task.prepare, "func", task.prepare)  # of a partial
    source = inspect.getsourcefile(function)  # None if it was typed into an interpreter
    paths = [Path(source)] if source else []
    codes = []
    for path in paths:  # grows
        codes.append(files.without_comments(path.read_text(encoding="utf-8")))
        for room, name in re.findall(r"^ *from (own|tasks)\.(\w+) import", codes[-1], re.M):
            if (path := files.ROOT / room / f"{name}.py") not in paths:
                paths.append(path)
    text = "\n".join([identifying(task), *codes, *map(files.sha256_of, yours)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_set(name, task, folder, flags, raw, workers):
    """Call the task's `prepare`, then write meta.json. Remove an empty folder and its lock."""
    sizes = flags["sizes"]
    if sizes is None and (task.subset or task.make and raw is None):
        sizes = list(task.sizes)
    own_data = {flag: flags.get(flag) for flag in ("regression", "kind", "layout")}
    checksum = made_of(name, task)
    seed = flags["seed"] or 0
    request = Request(name, folder, task, checksum, sizes, seed, raw, workers, **own_data)
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.parent / f".{folder.name}.lock"
    with files.locked(lock, f"{folder} is being prepared by another process"):
        if (folder / "meta.json").exists():  # another process made it while we waited
            return
        folder.mkdir(exist_ok=True)
        try:
            fields = task.prepare(task, request) or {}
        except KeyboardInterrupt:
            raise KeyboardInterrupt("interrupted; run the same command again to resume") from None
        finally:
            if not os.listdir(folder):
                folder.rmdir()
                lock.unlink()
        lengths = [len(np.load(folder / f"{split}_y.npy", mmap_mode="r")) for split in SPLITS]
        inputs = None
        if task.own:
            inputs = [files.sha256_of(folder / f"{split}_x.npy")[:8] for split in SPLITS]
        flags = flags | dict(sizes=lengths, seed=seed, regression=bool(request.regression))
        meta = dict(task=name, flags=flags, made_of=checksum, inputs=inputs, found=fields)
        files.write_json(folder / "meta.json", meta)
        shutil.rmtree(folder / "parts", ignore_errors=True)


def remake(name, folder):
    """Return the words that say how to make a set anew."""
    folder, task, place = (shlex.quote(str(word)) for word in (folder, name, folder.parent))
    command = f"python data.py --task {task} --data-dir {place}"
    return f"remove it and run again: rm -r {folder} && {command} (and your flags)"


# ---- --list, --show ------------------------------------------------------------------------------


def print_tasks(data_dir):
    for name, task in TASKS.items():
        target = f"{task.classes} classes" if task.classes else "regression"
        sizes = " / ".join(f"{size:,}" for size in task.sizes)
        state = "" if (Path(data_dir) / name / "meta.json").exists() else "not "
        print(f"{name:16} length {task.length:,}, {target}, {sizes} examples; {state}prepared")
        origin = "generated" if task.make else "no download"
        if task.source.urls:
            server = task.source.urls[0].split("/")[2]
            origin = f"{task.source.bytes or 400_000_000:,} bytes from {server}"
        print(f"{'':16} {origin}; --raw: {task.source.accepts}; licence: {task.source.licence}")


def show(name, data_dir, path):
    """Draw four training examples: on the left as they are, on the right with the positions that
    the masked objective hides. Only for this picture, data.py imports what stands above it."""
    from engine.feed import drawing
    from engine.flags import completed
    from pretrain import OBJECTIVES, denoising

    task, train, *_ = open_task(name, data_dir)
    rows = order(len(train), 0, 0)[:4]
    batch = train.batch(rows)
    flags = dict(objective="masked", mask=task.mask, loss="l1" if task.channels else "ce")
    args = completed("pretrain", OBJECTIVES, **flags)
    rng = drawing(task, batch, rows, slice(0, len(rows)), 0)
    hidden = denoising(args, batch, rng).hidden.numpy()
    titles = named(task, batch.y)
    if task.kind == "number":
        titles = [f"{value:.3g}" for value in titles]
    elif task.kind == "positions":
        titles = ["a label per position"] * len(titles)
    size = (12, height(task) * len(batch.y))
    masked = [f"{task.mask:.0%} hidden"] * len(batch.y)
    sheet(path, task, batch, size, [(titles, np.zeros_like(hidden)), (masked, hidden)])
    print(f"wrote {path}")


# ---- command line --------------------------------------------------------------------------------


def main(argv=None):
    """Run a command of the module's docstring and return its `exit_code`."""
    return files.exit_code(lambda: command(parser().parse_args(argv)))


def parser():
    """Return the parser of data.py's flags."""
    parser = files.Parser(
        examples=True,
        prog="data.py",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    yours = "file:PATH (a table, .npz, .ts, .txt) or ucr:NAME"
    add("--task", help=f"one of: {' '.join(TASKS)} or your data: {yours}")
    add("--data-dir", default="data", help="folder of prepared tasks and downloads (default: data)")
    for split in SPLITS:
        help = f"{split} examples (default: the task's number)"
        add(f"--{split}", type=int, metavar="N", help=help)
    help = "read the official files in DIR (--list says which) in place of the download"
    add("--raw", "--lra-dir", metavar="DIR", help=help)
    for kind in ("symbols", "samples"):
        help = f"read the numbers of your data as {kind} (default: symbols if an .npz has integers)"
        add(f"--{kind}", dest="kind", action="store_const", const=kind, help=help)
    help = "your data: labels are numbers to predict, not classes"
    add("--regression", action="store_true", default=None, help=help)
    add_layout(parser)
    add("--seed", type=int, help="seed of the generator, or of the split of your data (default: 0)")
    add("--workers", type=int, metavar="K", help="processes of the generator (default: all cores)")
    add("--show", metavar="FILE", help="prepare, then draw examples before and after masking")
    add("--list", action="store_true", help="print the tasks")
    return parser


def command(args):
    """Do what the flags say: print the tasks, or prepare one and print a line about it."""
    if args.list:
        return print_tasks(args.data_dir)
    for flag, least in dict(train=1, val=1, test=1, workers=1, seed=0).items():
        value = getattr(args, flag)
        if value is not None and value < least:
            raise UserError(f"--{flag} {value}: must be at least {least}")
    if args.show is not None:
        picture("--show", args.show)
    sizes = [getattr(args, split) for split in SPLITS]
    if not any(sizes):
        sizes = None
    elif args.task in TASKS:
        sizes = [size or default for size, default in zip(sizes, TASKS[args.task].sizes)]
    else:
        raise UserError("--train, --val and --test have no meaning for your data; leave them out")
    own_data = dict(regression=args.regression, kind=args.kind, layout=given(args))
    folder = prepare(args.task, args.data_dir, sizes, args.seed, args.raw, args.workers, **own_data)
    task, *splits = open_task(args.task, args.data_dir)
    counts = []
    for name, split, official in zip(SPLITS, splits, task.sizes):
        note = "" if len(split) == official else f" (official: {official:,})"
        counts.append(f"{name} {len(split):,}{note}")
    source = task.data["source"]
    seed = "" if source == "official files" else f", seed {task.data['seed']}"
    print(f"{folder}: ready ({', '.join(counts)}; {source}{seed})")
    if args.show:
        show(args.task, args.data_dir, args.show)


if __name__ == "__main__":
    sys.exit(main())
