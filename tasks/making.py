"""Make the data of tasks: generate chunks in parallel processes, save splits, find official files
and archives.

Chunk i of a generated set with seed s depends only on the random stream (s, i). Finished chunks are
kept in `parts/`, so an interrupted command resumes. Reading official files starts over; downloads
are kept."""

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
    # For your data. regression: labels are numbers to predict. kind: "symbols" or "samples", if
    # numbers could be either. group: path of a file with one line per example, its group. layout:
    # given fields of a table.Layout.
    regression: bool | None = None
    kind: str | None = None
    group: str | None = None
    layout: dict | None = None

    def take(self, split, available, place):
        """Return how many of the available examples to take for a split."""
        size = self.sizes[SPLITS.index(split)] if self.sizes else available
        if not 0 < size <= available:
            raise UserError(
                f"{place} holds {available:,} examples for {split}, not {max(size, 1):,}; "
                f"change --{split}, or get the files again"
            )
        return size

    def part(self, index, count):
        """Return the path of a finished chunk. Other code or another seed gives another path."""
        return self.folder / "parts" / f"{self.made_of}-{self.seed}-{index:06d}-{count}"


def random_split(n):
    """Return the permutation of torch's random_split with seed 42, which S4 and the paper use:
    int64 (n,)."""
    import torch

    return torch.randperm(n, generator=torch.Generator().manual_seed(42)).numpy()


def stratified(labels, seed):
    """Return a random order of examples with these labels (n,): int64 (n,). Every prefix keeps the
    class proportions (rounded up), so even a short one has every class."""
    shuffled, place = (
        np.random.default_rng([4242, seed]).permutation(len(labels)),
        np.empty(len(labels)),
    )
    for label in np.unique(labels):
        mine = shuffled[labels[shuffled] == label]
        place[mine] = np.arange(len(mine)) / len(mine)
    return shuffled[np.argsort(place[shuffled], kind="stable")]


@contextlib.contextmanager
def workers_start(draw):
    """Start worker processes inside this context. They do not import the running script: a user's
    script without `if __name__ == "__main__"` would run again in each worker. They ignore Ctrl-C
    from the start; their parent handles it."""
    main, ours = sys.modules["__main__"], threading.current_thread() is threading.main_thread()
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN) if ours else None
    if draw.__module__ != "__main__":  # otherwise workers need the script, which defines `draw`
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if ours:
            signal.signal(signal.SIGINT, usual)


def run_chunks(draw, counts, request):
    """Generate the missing chunks of these numbers of examples in parallel processes, and return
    the paths of all, for np.load. draw(task, rng, count) returns a chunk as {name: array}."""
    (request.folder / "parts").mkdir(exist_ok=True)
    jobs = list(enumerate(counts))
    todo = [job for job in jobs if not request.part(*job).exists()]
    workers = max(min(request.workers or os.cpu_count(), len(todo)), 1)
    if todo:
        for few in 1, 100:  # the first call takes longer
            start, arrays = time.perf_counter(), draw(request.task, np.random.default_rng(0), few)
        left = sum(count for _, count in todo)
        minutes = (time.perf_counter() - start) / few * left / workers / 60
        gigabytes = sum(array.nbytes for array in arrays.values()) / few * left / 1e9
        if minutes > 1:
            print(
                f"{request.folder}: generating {left:,} examples, {gigabytes:.2f} GB, about "
                f"{minutes:.0f} minutes on "
                f"{workers} CPU cores",
                file=sys.stderr,
                flush=True,
            )
    # "spawn", because a forked copy of a process that has used torch or threads can hang.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker)
    made = (_make_chunk(draw, request, *job) for job in todo)
    if workers > 1:  # not pool.map, which fails on futures that Ctrl-C cancelled
        with workers_start(draw):
            futures = [pool.submit(_make_chunk, draw, request, *job) for job in todo]
        made = (future.result() for future in futures)
    try:
        for _ in tqdm(
            made, str(request.folder), len(jobs), initial=len(jobs) - len(todo), unit="chunk"
        ):
            pass
    except BrokenProcessPool:
        raise UserError(
            f"{request.folder}: a worker was killed (out of memory?); run the same command again "
            "to "
            "resume, with a smaller --workers if need be"
        ) from None
    finally:
        # after Ctrl-C they are still at work on their chunks
        for worker in multiprocessing.active_children():
            worker.terminate()
        pool.shutdown(cancel_futures=True)
    return [request.part(*job) for job in jobs]


def _make_chunk(draw, request, index, count):
    arrays = draw(request.task, np.random.default_rng([request.seed, index]), count)
    write_atomically(request.part(index, count), lambda file: np.savez_compressed(file, **arrays))


def _start_worker():
    """Make a worker exit when its parent does, even if the parent is killed. Ignore Ctrl-C here
    too, because `workers_start` can do that only in the main thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def check_example(request, split, array, place):
    """Raise UserError if an example, or one of its documents, does not fit the task's row of
    TASKS."""
    task, found = request.task, f"the shape {array.shape}"
    if task.channels:
        least, wanted = (
            1 if task.ragged else task.length,
            f"{task.length:,} positions of {task.channels} channel(s)",
        )
        fits = array.shape[1:] == (task.channels,) and least <= len(array) <= task.length
    else:
        wanted = f"1 to {task.length:,} ids below {task.vocab or 'its number of symbols'}, EOS ({EOS}) at the end"
        fits = array.ndim == 1 and 0 < len(array) <= task.length
        if fits and (array[-1] != EOS or task.vocab and array.max() >= task.vocab):
            fits, found = False, f"ids up to {array.max()}, at the end {array[-1]}"
    if not fits:
        raise UserError(f"{place}: an example of {split} has {found}; {request.name} has {wanted}")


def as_wide(y, length):
    """Return the labels of positions, n arrays of at most `length`, as int16 (n, length), at the
    end IGNORE."""
    return np.array(
        [np.pad(one, (0, length - len(one)), constant_values=IGNORE) for one in y], np.int16
    )


def save_split(request, split, x, y, place):
    """Save one split: targets y (n,) or as Task.target says, and inputs x, an array or iterator of
    n arrays of samples (l, channels), or of n times `task.documents` sequences of ids that end in
    EOS. Examples beyond the requested size are left out. UserError if an example does not fit the
    task's row of TASKS."""
    task, folder, lengths = request.task, request.folder, []
    ragged = task.ragged or not task.channels
    size = request.take(split, len(y), place)
    targets = as_wide(y[:size], task.length) if task.target == "positions" else np.asarray(y[:size])
    known, most = targets[targets != IGNORE], 2 if task.target == "labels" else task.classes
    if most and len(known) and not (known.min() >= 0 and known.max() < most):
        raise UserError(
            f"{place}: labels of {split} from {known.min()} to {known.max()}; {request.name} has "
            f"{most} "
            "classes, from 0"
        )
    wanted = (size, *dict(labels=[task.classes], positions=[task.length]).get(task.target, ()))
    if targets.shape != wanted:
        raise UserError(
            f"{place}: labels of {split} have the shape {targets.shape}; {request.name} has "
            f"{wanted}"
        )

    def write(file):
        file.seek(128)  # numpy's header contains the length, so it is written last
        for array in islice(x, size * task.documents):
            check_example(request, split, array, place)
            file.write(array.tobytes())
            lengths.append(len(array))
        if len(lengths) < size * task.documents:
            raise UserError(f"{place}: {len(lengths):,} sequences of {split} for {size:,} labels")
        shape = (sum(lengths), *array.shape[1:]) if ragged else (size, *array.shape)
        file.seek(0)
        np.lib.format.write_array_header_1_0(
            file, dict(descr=array.dtype.str, fortran_order=False, shape=shape)
        )

    write_atomically(folder / f"{split}_x.npy", write)
    if ragged:
        offsets = np.cumsum([0, *lengths])
        write_atomically(folder / f"{split}_offsets.npy", lambda file: np.save(file, offsets))
    targets = targets.astype(
        np.int16 if task.target == "positions" else np.uint8 if task.classes else np.float32
    )
    write_atomically(folder / f"{split}_y.npy", lambda file: np.save(file, targets))


# ---- official files: folders, archives, downloads ------------------------------------------------


def find(request, *patterns):
    """Find an official file or folder and return its path. With --raw DIR: the first match of a
    pattern in DIR, which may be the outer or inner root of an LRA release (".": DIR itself).
    Otherwise: the download that matches the first pattern."""
    source, folder = request.task.source, request.folder
    if request.raw is None:
        by_hand = (
            f"put it into a folder DIR and run: python data.py --task {request.name} --data-dir "
            f"{shlex.quote(str(folder.parent))} --raw DIR (DIR may hold: {source.accepts})"
        )
        if not source.urls:
            raise UserError(
                f"{request.name} cannot be downloaded ({source.licence}); if you have it, {by_hand}"
            )
        url = next(url for url in source.urls if patterns[0].split("*")[0] in url)
        path = fetch(url, folder.parent / "downloads", by_hand, source.sha256)
    else:
        roots = (
            request.raw,
            request.raw / "lra_release",
            request.raw / "lra_release" / "lra_release",
        )
        found = [
            root / name
            for root in roots
            for pattern in patterns
            for name in sorted(glob.glob(pattern, root_dir=root))
        ]
        if not found:
            raise UserError(
                f"--raw {request.raw} has none of: {', '.join(patterns)} (nor has its lra_release/)"
            )
        path = found[0]
    if path.stat().st_size == source.bytes and sha256_of(path) != source.sha256:
        raise UserError(f"{path} is damaged: wrong checksum; remove it and get it again")
    print(f"{folder}: reading {path}")
    return path


def members(place, pattern):
    """Yield (match, bytes) for every file in an archive or folder whose path matches. Nothing is
    unpacked to disk."""
    with reading(f"{place} is damaged", "get it again"):
        if place.is_dir():
            for path in sorted(place.rglob("*")):
                if match := re.search(pattern, path.relative_to(place).as_posix()):
                    yield match, path.read_bytes()
        elif zipfile.is_zipfile(place):
            with zipfile.ZipFile(place) as archive:
                yield from (
                    (match, archive.read(name))
                    for name in archive.namelist()
                    if (match := re.search(pattern, name))
                )
        else:
            with tarfile.open(place) as archive:
                for member in archive:
                    if member.isfile() and (match := re.search(pattern, member.name)):
                        yield match, archive.extractfile(member).read()
