"""Make the data of tasks: generate chunks in parallel processes, save splits, find official files.

Chunk i of a generated set with seed s depends only on the random stream (s, i). Finished chunks are
kept in `parts/`, so an interrupted command resumes."""

import contextlib
import glob
import multiprocessing
import os
import re
import shlex
import signal
import sys
import tarfile
import threading
import time
import zipfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType

import numpy as np
from tqdm import tqdm

from files import UserError, fetch, reading, sha256_of, write_atomically
from tasks import EOS, IGNORE, SPLITS, Source, Task

CHUNK = 500  # examples per chunk
LRA = Source((), "an LRA release (lra_release/...)", "Apache 2.0 (LRA)")
GENERATED = Source((), "nothing", "as this code")
DEMO = (5_000, 1_000, 2_000)  # examples in train, val, test of the small sets for demos


@dataclass(frozen=True)
class Request:
    """The arguments of a task's `prepare`."""

    name: str  # name of the task
    folder: Path
    task: Task
    made_of: str  # checksum of everything but sizes and seed that determines the arrays
    sizes: list | None  # examples in train, val, test; None: all available ones
    seed: int  # seed of the generator
    raw: Path | None  # folder of the official files; None: generate or download
    workers: int | None  # processes of the generator; None: one per core
    # For your data:
    regression: bool | None = None  # labels are numbers to predict
    kind: str | None = None  # "symbols" or "samples", if numbers could be either
    layout: dict | None = None  # given fields of an own.columns.Layout

    def take(self, split, available, place):
        """Return how many of the available examples to take for a split."""
        size = self.sizes[SPLITS.index(split)] if self.sizes else available
        if not 0 < size <= available:
            problem = f"{place} holds {available:,} examples for {split}, not {max(size, 1):,}"
            raise UserError(f"{problem}; change --{split}, or get the files again")
        return size

    def part(self, index, count):
        """Return the path of a finished chunk. Other code or another seed gives another path."""
        return self.folder / "parts" / f"{self.made_of}-{self.seed}-{index:06d}-{count}"


def random_split(n):
    """Return the permutation of torch's random_split with seed 42, as S4 and the paper: (n,)."""
    import torch

    return torch.randperm(n, generator=torch.Generator().manual_seed(42)).numpy()


def stratified(labels, seed):
    """Return a random order of examples with these labels (n,): int64 (n,). Every prefix keeps the
    class proportions (rounded up), so even a short one has every class."""
    shuffled = np.random.default_rng([4242, seed]).permutation(len(labels))
    place = np.empty(len(labels))  # of an example among those of its class, from 0 to 1
    for label in np.unique(labels):
        examples = shuffled[labels[shuffled] == label]
        place[examples] = np.arange(len(examples)) / len(examples)
    return shuffled[np.argsort(place[shuffled], kind="stable")]


# ---- chunks and workers --------------------------------------------------------------------------


def run_chunks(draw, counts, request):
    """Generate the missing chunks of these numbers of examples in parallel processes, and return
    the paths of all, for np.load. draw(task, rng, count) returns a chunk as {name: array}."""
    (request.folder / "parts").mkdir(exist_ok=True)
    chunks = list(enumerate(counts))
    missing = [chunk for chunk in chunks if not request.part(*chunk).exists()]
    workers = max(min(request.workers or os.cpu_count(), len(missing)), 1)
    if missing:
        announce(draw, request, sum(count for _, count in missing), workers)
    done = len(chunks) - len(missing)
    with tqdm(desc=str(request.folder), total=len(chunks), initial=done, unit="chunk") as progress:
        if workers > 1:
            make_in_parallel(draw, request, missing, workers, progress)
        else:
            for index, count in missing:
                make_chunk(draw, request, index, count)
                progress.update()
    return [request.part(*chunk) for chunk in chunks]


def announce(draw, request, examples, workers):
    """Say the size of these examples and how long they take, if it is more than a minute."""
    draw(request.task, np.random.default_rng(0), 1)  # the first call takes longer
    start = time.perf_counter()
    arrays = draw(request.task, np.random.default_rng(0), 100)
    minutes = (time.perf_counter() - start) / 100 * examples / workers / 60
    gigabytes = sum(array.nbytes for array in arrays.values()) / 100 * examples / 1e9
    if minutes > 1:
        size = f"{examples:,} examples, {gigabytes:.2f} GB"
        time_left = f"about {minutes:.0f} minutes on {workers} CPU cores"
        print(f"{request.folder}: generating {size}, {time_left}", file=sys.stderr, flush=True)


def make_chunk(draw, request, index, count):
    arrays = draw(request.task, np.random.default_rng([request.seed, index]), count)
    write_atomically(request.part(index, count), lambda file: np.savez_compressed(file, **arrays))


def make_in_parallel(draw, request, missing, workers, progress):
    """Make the missing chunks in worker processes. They stop with this process."""
    # "spawn", because a forked copy of a process that has used torch or threads can hang.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker)
    try:
        with hidden_script(draw):
            futures = [pool.submit(make_chunk, draw, request, *chunk) for chunk in missing]
        for future in futures:
            future.result()
            progress.update()
    except BrokenProcessPool:
        problem = f"{request.folder}: a worker was killed (out of memory?)"
        raise UserError(
            f"{problem}; run again to resume, with fewer --workers if need be"
        ) from None
    finally:
        for worker in multiprocessing.active_children():  # after Ctrl-C still at work
            worker.terminate()
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def hidden_script(draw):
    """Hide the running script from workers that start in this context, which would run it again if
    it has no `if __name__ == "__main__"`, and Ctrl-C, after which each would print a traceback."""
    script = sys.modules["__main__"]
    main_thread = threading.current_thread() is threading.main_thread()
    if main_thread:  # no other thread may change what Ctrl-C does
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    if draw.__module__ != "__main__":  # otherwise workers need the script, which defines `draw`
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script
        if main_thread:
            signal.signal(signal.SIGINT, handler)


def start_worker():
    """Make a worker ignore Ctrl-C, and exit when its parent does, even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


# ---- saving --------------------------------------------------------------------------------------


def check_example(request, split, array, place):
    """Raise UserError if a sequence does not fit the task's row of TASKS."""
    task = request.task
    actual = f"the shape {array.shape}"
    if task.channels:
        shortest = 1 if task.ragged else task.length
        wanted = f"{task.length:,} positions of {task.channels} channel(s)"
        fits = array.shape[1:] == (task.channels,) and shortest <= len(array) <= task.length
    else:
        vocab = task.vocab or "its number of symbols"
        wanted = f"1 to {task.length:,} ids below {vocab}, EOS ({EOS}) at the end"
        fits = array.ndim == 1 and 0 < len(array) <= task.length
        if fits and (array[-1] != EOS or task.vocab and array.max() >= task.vocab):
            fits = False
            actual = f"ids up to {array.max()}, at the end {array[-1]}"
    if not fits:
        raise UserError(f"{place}: an example of {split} has {actual}; {request.name} has {wanted}")


def check_targets(request, split, targets, size, place):
    """Raise UserError if the targets of a split do not fit the task's row of TASKS."""
    task = request.task
    labels = targets[targets != IGNORE]
    classes = 2 if task.target == "labels" else task.classes
    if classes and len(labels) and not (labels.min() >= 0 and labels.max() < classes):
        problem = f"{place}: labels of {split} from {labels.min()} to {labels.max()}"
        raise UserError(f"{problem}; {request.name} has {classes} classes, from 0")
    shape = (size, *dict(labels=[task.classes], positions=[task.length]).get(task.target, ()))
    if targets.shape != shape:
        problem = f"{place}: labels of {split} have the shape {targets.shape}"
        raise UserError(f"{problem}; {request.name} has {shape}")


def as_wide(y, length):
    """Return labels of positions, n arrays of at most `length`, as int16 (n, length), padded with
    IGNORE."""
    rows = [np.pad(row, (0, length - len(row)), constant_values=IGNORE) for row in y]
    return np.array(rows, np.int16)


def save_split(request, split, x, y, place):
    """Save one split: targets y (n,) or as Task.target says, and inputs x, an array or iterator of
    n arrays of samples (l, channels), or of n * task.documents sequences of ids that end in EOS.
    What is beyond the requested size stays unread. UserError if something does not fit the task's
    row of TASKS. place: where the data come from, for messages."""
    task = request.task
    size = request.take(split, len(y), place)
    if task.target == "positions":
        targets = as_wide(y[:size], task.length)
        dtype = np.int16
    else:
        targets = np.asarray(y[:size])
        dtype = np.uint8 if task.classes else np.float32
    check_targets(request, split, targets, size, place)
    ragged = task.ragged or not task.channels
    lengths = []

    def write(file):
        file.seek(128)  # numpy's header contains the length, so it is written last
        for array in islice(x, size * task.documents):
            check_example(request, split, array, place)
            file.write(array.tobytes())
            lengths.append(len(array))
        if len(lengths) < size * task.documents:
            raise UserError(f"{place}: {len(lengths):,} sequences of {split} for {size:,} labels")
        shape = (sum(lengths), *array.shape[1:]) if ragged else (size, *array.shape)
        header = dict(descr=array.dtype.str, fortran_order=False, shape=shape)
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, header)

    write_atomically(request.folder / f"{split}_x.npy", write)
    if ragged:
        save_array(request, f"{split}_offsets", np.cumsum([0, *lengths]))
    save_array(request, f"{split}_y", targets.astype(dtype))


def save_array(request, name, array):
    write_atomically(request.folder / f"{name}.npy", lambda file: np.save(file, array))


# ---- official files: folders, archives, downloads ------------------------------------------------


def find(request, *patterns):
    """Find an official file or folder and return its path. With --raw DIR: the first match of a
    pattern in DIR, which may be the outer or inner root of an LRA release (".": DIR itself).
    Otherwise: the download that matches the first pattern."""
    source = request.task.source
    folder = request.folder
    if request.raw is None:
        data_dir = shlex.quote(str(folder.parent))
        command = f"python data.py --task {request.name} --data-dir {data_dir} --raw DIR"
        by_hand = f"put it into a folder DIR and run: {command} (DIR may hold: {source.accepts})"
        if not source.urls:
            problem = f"{request.name} cannot be downloaded ({source.licence})"
            raise UserError(f"{problem}; if you have it, {by_hand}")
        url = next(url for url in source.urls if patterns[0].split("*")[0] in url)
        path = fetch(url, folder.parent / "downloads", by_hand, source.sha256)
    else:
        release = request.raw / "lra_release"
        paths = [
            root / name
            for root in (request.raw, release, release / "lra_release")
            for pattern in patterns
            for name in sorted(glob.glob(pattern, root_dir=root))
        ]
        if not paths:
            patterns = ", ".join(patterns)
            raise UserError(f"--raw {request.raw} has none of: {patterns} (nor its lra_release/)")
        path = paths[0]
    if path.stat().st_size == source.bytes and sha256_of(path) != source.sha256:
        raise UserError(f"{path} is damaged: wrong checksum; remove it and get it again")
    print(f"{folder}: reading {path}")
    return path


def members(place, pattern):
    """Yield (match, bytes) for every file in an archive or folder whose path matches."""
    with reading(f"{place} is damaged", "get it again"):
        if place.is_dir():
            for path in sorted(place.rglob("*")):
                if match := re.search(pattern, path.relative_to(place).as_posix()):
                    yield match, path.read_bytes()
        elif zipfile.is_zipfile(place):
            with zipfile.ZipFile(place) as archive:
                for name in archive.namelist():
                    if match := re.search(pattern, name):
                        yield match, archive.read(name)
        else:
            with tarfile.open(place) as archive:
                for member in archive:
                    if member.isfile() and (match := re.search(pattern, member.name)):
                        yield match, archive.extractfile(member).read()
