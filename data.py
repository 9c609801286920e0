"""Data: every task of the paper, downloaded, read or generated, prepared once into flat memory-mapped arrays.

    python data.py --list                          # the tasks: sizes, sources, licences, what is ready
    python data.py --task text                     # download IMDb, check it, prepare it
    python data.py --task text --raw DIR           # the same from files you have: archives, or folders of them
    python data.py --task pathx                    # generate 200,000 images of 128 px, all cores, 3.3 GB
    python data.py --task pathx --raw DIR          # read the official LRA release instead of generating
    python data.py --task image --show sheet.png   # a few examples, before and after masking
    python data.py --task pathx --stats            # generator beside the official generator's figures

A prepared task is a folder `data/<task>/` with `{train,val,test}_{x,y}.npy` (symbols: and `_offsets.npy`) and
`meta.json`, which is written last: its presence means done. Expected last line:

    data/pathx: ready (train 160,000, val 20,000, test 20,000; generated, seed 0)

The training scripts call `prepare` on first use, then `load_task`, `load`, `Split.batch`, `normalise`, `order`
and `choose_positions`. Order of reading: the TASKS table, what the training scripts use, then `prepare` and the
`prepare_<family>` of the task you care about. Downloading and crash safety stand at the end.

The official LRA archive is no longer public. Its ListOps and Pathfinder are generated (generators.py), its
Retrieval can only be read from files that you have; all other sources are the original ones.

[1] github.com/google-research/long-range-arena, lra_benchmarks/data: readers
[2] the paper's official configuration, which is that of S4 (github.com/state-spaces/s4) with symbols for masking
"""
import argparse
import codecs
import contextlib
import csv
import errno
import fcntl
import hashlib
import io
import json
import lzma
import multiprocessing
import os
import pickle
import re
import shlex
import shutil
import signal
import sys
import tarfile
import threading
import time
import wave
import zipfile
import zlib
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path, PurePosixPath

import numpy as np
from PIL import Image
from tqdm import tqdm

from generators import (CHUNK, DIGIT, EOS, MASK, OFFICIAL, PAD, SYMBOLS, UNK, Grammar, Snakes, make_listops,
                        make_pathfinder, print_image_stats, print_listops_stats)

# MASK is not used here: the training scripts take all ids of special symbols from this file.
# torch, requests and matplotlib are imported where they are used: generator processes do without them and start
# much faster.

SPLITS = ("train", "val", "test")


class UserError(Exception):
    """A user's mistake, in one line: what is wrong, the value, the command that fixes it."""


# ---- tasks ---------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Archive:
    """A file to download. It counts as whole only with this size and checksum."""
    name: str
    urls: tuple                     # tried in this order
    bytes: int | None               # None, with checksum None: what `record` publishes
    checksum: str | None            # "md5:...", "sha256:..." or "git:..." (of a git blob)
    record: str | None = None       # list of files as JSON, as Zenodo or Hugging Face send it


@dataclass(frozen=True)
class Source:
    """Where a data set comes from."""
    archives: tuple                 # to download; none: generated, or only with --raw
    accepts: str                    # what --raw DIR may hold
    licence: str


@dataclass(frozen=True)
class Task:
    """One row of TASKS: everything that defines a data set."""
    family: str                     # which prepare_<family> makes it
    kind: str                       # "tokens": symbols; "continuous": samples
    length: int                     # longest sequence l, <eos> included
    classes: int                    # 0: regression, one value in [-1, 1]
    sizes: tuple                    # examples in train, val, test
    mask: float                     # masking ratio of self-pretraining (paper, section 2 and appendix C.3)
    source: Source
    vocab: int = 256                # tokens: symbols and specials; continuous: gray levels. 0: see `load_task`
    channels: int = 1
    documents: int = 1              # sequences per example
    scale: float = 255              # continuous: x -> (x / scale - mean) / std, one number or one a channel
    mean: float | tuple = 0.5
    std: float | tuple = 0.5
    side: int | None = None         # images: length is side * side, row by row
    names: tuple = ()               # of the classes, where they are not numbers
    subset: bool = False            # sizes are a choice: the source holds more
    make: Grammar | Snakes | None = None


WORDS = tuple("bed cat down five forward go house left marvin no on right sheila tree up visual yes backward bird dog "
              "eight follow four happy learn nine off one seven six stop three two wow zero".split())   # order of [2]
THINGS = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())

LRA = Source((), "an LRA release (lra_release/...)", "Apache 2.0 (LRA)")
IMDB = Source((Archive(
    "aclImdb_v1.tar.gz", ("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",
                          "http://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"), 84_125_825,
    "sha256:c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe"),),
    "aclImdb_v1.tar.gz, or its folder aclImdb/", "none stated; cite Maas et al. 2011")
AAN = Source((), "new_aan_pairs.{train,eval,test}.tsv, or the LRA release that holds them in tsv_data/",
             "texts of the ACL Anthology Network; redistribution not allowed")
CIFAR = Source((Archive(
    "cifar-10-binary.tar.gz", ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                               "http://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"), 170_052_171,
    "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"),),
    "cifar-10-binary.tar.gz, cifar-10-python.tar.gz, a folder of either, or cifar10*.npz with x_train, y_train, "
    "x_test, y_test", "none stated; cite Krizhevsky 2009")
SPEECH = Source((Archive(
    "speech_commands_v0.02.tar.gz",
    ("https://storage.googleapis.com/download.tensorflow.org/data/speech_commands_v0.02.tar.gz",
     "http://download.tensorflow.org/data/speech_commands_v0.02.tar.gz"), 2_428_923_189,
    "sha256:af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58"),),
    "speech_commands_v0.02.tar.gz, or a folder of it", "CC BY 4.0")


def _bidmc(target, record, sizes):
    archives = tuple(
        Archive(f"BIDMC32{target}_{part}.ts",
                (f"https://zenodo.org/records/{record}/files/BIDMC32{target}_{part}.ts?download=1",
                 f"https://zenodo.org/record/{record}/files/BIDMC32{target}_{part}.ts"),
                None, None, f"https://zenodo.org/api/records/{record}") for part in ("TRAIN", "TEST"))
    source = Source(archives, f"BIDMC32{target}_TRAIN.ts and BIDMC32{target}_TEST.ts", "ODC-By (PhysioNet BIDMC)")
    return Task("bidmc", "continuous", 4000, 0, sizes, 0.25, source, channels=2, scale=1, mean=0.0, std=1.0)


def _expressions(length, sizes, mask, *grammar):
    return Task("listops", "tokens", length, 10, sizes, mask, LRA, vocab=19, make=Grammar(*grammar))


def _images(side, sizes, mask, *snakes, **more):
    return Task("pathfinder", "continuous", side * side, 2, sizes, mask, LRA, side=side,
                names=("apart", "connected"), make=Snakes(*snakes, **more))


def _reviews(length, sizes, mask, **more):
    return Task("text", "tokens", length, 2, sizes, mask, IMDB, vocab=0, names=("negative", "positive"), **more)


def _pictures(channels, mean, std, sizes=(45_000, 5_000, 10_000), side=32, **more):
    return Task("cifar", "continuous", side * side, 10, sizes, 0.5, CIFAR, channels=channels, mean=mean, std=std,
                side=side, names=THINGS, **more)


FULL = (160_000, 20_000, 20_000)
DEMO = (5_000, 1_000, 2_000)
GREY, COLOUR = (122.6 / 255, 61 / 255), ((0.4914, 0.4822, 0.4465), (0.247, 0.243, 0.261))       # mean and std
TASKS = {
    #                               length  sizes                mask  depth  arguments  leaf  symbols
    "listops":         _expressions(2048, (96_000, 2_000, 2_000), 0.10, 10, (2, 10), 0.75, (500, 2000)),
    "text":            _reviews(4096, (22_500, 2_500, 25_000), 0.15),
    "retrieval":       Task("retrieval", "tokens", 4000, 2, (147_086, 18_090, 17_437), 0.15, AAN, vocab=0, documents=2,
                            names=("unrelated", "related")),
    "image":           _pictures(1, *GREY),
    #                          side sizes mask padding seed paddle thick margins cont. marker distr. contrasts
    "pathfinder":      _images(32,  FULL, 0.50,  1,   7,   2,   0.5,  (1,),   1.0,  1.5,   5,   2.0, 0.75),
    "pathx":           _images(128, FULL, 0.50,  1,  20,   5,   1.5,  (2, 3), 1.8,  3.0,   8,   0.9),
    "pathx256":        _images(256, FULL, 0.50, 22,  27,   5,   2.0,  (3,),   1.8,  5.0,   7,   1.0),
    # mean and std of Speech Commands are those of the training clips: see `load_task`
    "sc":              Task("speech", "continuous", 16_000, 35, (84_843, 9_981, 11_005), 0.25, SPEECH, scale=32768,
                            names=WORDS),
    "scifar":          _pictures(3, *COLOUR),
    "bidmc_hr":        _bidmc("HR", 4001456, (5_564, 1_192, 1_193)),
    "bidmc_rr":        _bidmc("RR", 4001463, (5_509, 1_180, 1_181)),
    "bidmc_spo2":      _bidmc("SpO2", 4001464, (5_564, 1_192, 1_193)),
    # Not the paper's: the generator's fourth resolution, and the demos.
    "pathfinder64":    _images(64,  FULL, 0.50,  1,  12,   5,   1.0,  (1,),   1.8,  2.5,   5,   0.8),
    "listops_demo":    _expressions(80,   DEMO, 0.15,  4, (2, 4),  0.75, (15, 80)),
    # Large discs, bright against the curves, and three gray levels: how the curves run is all there is to learn.
    "pathfinder_demo": _images(14,  DEMO, 0.25,  1,   4,   2,   1.0,  (1,),   1.0,  1.5,   0,   0.66,
                               frame=5, contour=4, levels=3, distinct=True),
    "text256":         _reviews(256, (22_500, 2_500, 25_000), 0.30),
    "text_demo":       _reviews(128, (5_000, 2_500, 10_000), 0.30, subset=True),
    # Stand-ins for the tasks of the same names in `run_all.sh --preset mini`: short sequences, few test examples.
    "listops_mini":    _expressions(80,   DEMO, 0.15,  4, (2, 4),  0.75, (15, 80)),
    "text_mini":       _reviews(128, (22_500, 1_000, 5_000), 0.30, subset=True),
    "image_mini":      _pictures(1, *GREY, (45_000, 1_000, 5_000), 12, subset=True),
    "pathfinder_mini": _images(12,  DEMO, 0.25,  1,   4,   2,   1.0,  (1,),   1.0,  1.5,   0,   0.66,
                               frame=4, contour=3, levels=3, distinct=True),
    "pathx_mini":      _images(14,  DEMO, 0.25,  1,   4,   2,   1.0,  (1,),   1.0,  1.5,   0,   0.66,
                               frame=5, contour=4, levels=3, distinct=True),
    "pathx256_mini":   _images(16,  DEMO, 0.25,  1,   4,   2,   1.0,  (1,),   1.0,  1.5,   0,   0.66,
                               frame=5, contour=5, levels=3, distinct=True),
    "scifar_mini":     _pictures(3, *COLOUR, (9_000, 1_000, 2_000), 12, subset=True),
}


def task_row(task):
    """The row of `task`; UserError with the list of tasks when there is none."""
    if task not in TASKS:
        raise UserError(f"no task '{task}'; the tasks are: {' '.join(TASKS)}")
    return TASKS[task]


# ---- reading: what the training scripts use ------------------------------------------------------

@dataclass
class Split:
    """One split, memory-mapped. x: tokens (total,) uint8 or uint16, or continuous (n, l, c); y: (n,)."""
    row: Task
    x: np.ndarray
    y: np.ndarray
    offsets: np.ndarray | None = None      # tokens: sequence i is x[offsets[i]:offsets[i + 1]], <eos> included
    chosen: np.ndarray | None = None       # only these examples count, numbered from 0; None: all

    def __len__(self):
        return len(self.y if self.chosen is None else self.chosen)

    def batch(self, indices):
        """Examples `indices` (b,) as torch tensors (x, y, lengths); only their rows are read.

        tokens:     x int64 (b, longest), padded with PAD; a row ends with EOS, which lengths int64 (b,) count.
                    Two documents an example: x (b, 2, longest), lengths (b, 2)
        continuous: x (b, l, c) as stored, uint8, int16 or float32 (see `normalise`); lengths None
        y:          int64 (b,), or float32 (b,) for regression
        """
        import torch
        indices = np.asarray(indices, dtype=np.int64)
        indices = indices if self.chosen is None else self.chosen[indices]
        y = torch.from_numpy(self.y[indices].astype(np.int64 if self.row.classes else np.float32))
        if self.row.kind == "continuous":
            return torch.from_numpy(self.x[indices]), y, None
        k = self.row.documents
        sequences = [self.x[self.offsets[j]:self.offsets[j + 1]] for i in indices for j in range(k * i, k * i + k)]
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        x = torch.full((len(sequences), int(lengths.max())), PAD, dtype=torch.int64)    # (b * documents, longest)
        for i, sequence in enumerate(sequences):
            x[i, :len(sequence)] = torch.from_numpy(sequence.astype(np.int64))
        return (x, y, lengths) if k == 1 else (x.view(-1, k, x.shape[1]), y, lengths.view(-1, k))


def load(task, split, data_dir="data", fraction=None):
    """Memory-map one prepared split -> Split. UserError when it is missing, cut short, or of another row.

    fraction: of its examples, the first so many of one fixed shuffle (seed 42, paper's appendix C.1.4 and [2]), so that
    smaller subsets lie within larger ones and both stages see the same.
    """
    row, folder = task_row(task), Path(data_dir) / task
    if split not in SPLITS:
        raise UserError(f"no split '{split}'; the splits are: {' '.join(SPLITS)}")
    meta = _ready(task, data_dir)
    arrays = {}
    for name, entry in meta["files"].items():
        if name.startswith(split + "_"):
            try:
                array = np.load(folder / name, mmap_mode="r", allow_pickle=False)
                if list(array.shape) != entry["shape"] or str(array.dtype) != entry["dtype"]:
                    raise ValueError
            except (OSError, ValueError):
                raise UserError(f"{folder / name} is damaged: not the array that meta.json describes; "
                                f"{_redo(folder, task, data_dir)}") from None
            arrays[name[len(split) + 1:-len(".npy")]] = array
    if "offsets" in arrays:
        offsets, steps = arrays["offsets"], np.diff(arrays["offsets"])
        if offsets[0] != 0 or offsets[-1] != len(arrays["x"]) or steps.min() < 1 or steps.max() > row.length:
            raise UserError(f"{folder / (split + '_offsets.npy')} is damaged; {_redo(folder, task, data_dir)}")
    if fraction is not None:
        n = len(arrays["y"])
        arrays["chosen"] = np.random.RandomState(42).permutation(n)[:max(1, int(fraction * n))]
    return Split(row, **arrays)


def load_task(task, data_dir="data"):
    """The row of a prepared task, with what only its data could tell: Text's and Retrieval's vocabulary, Speech
    Commands' mean and std."""
    row, found = task_row(task), _ready(task, data_dir)["found"]
    return replace(row, **{field.name: found[field.name] for field in fields(row) if field.name in found})


def _ready(task, data_dir):
    folder = Path(data_dir) / task
    meta = _read_meta(folder, task, data_dir)
    if meta is None:
        raise UserError(f"{folder} is not prepared; run: {_how(task, data_dir)}")
    _check_meta(meta, folder, task, data_dir)
    return meta


def normalise(row, x):
    """Samples (b, l, c) as stored -> float32 (b, l, c), (x / scale - mean) / std of the task's row."""
    import torch
    mean, std = (torch.tensor(value, device=x.device) if isinstance(value, tuple) else value
                 for value in (row.mean, row.std))
    return (x.float() / row.scale - mean) / std


# Random streams of training: pure functions of their arguments, so that there is no sampler state to save. Seeds
# start at 0 everywhere, in the generators too; tags keep the streams apart.
ORDER, HIDING = 2323, 1717


def order(n, seed, epoch):
    """The order in which an epoch visits n examples: int64 (n,)."""
    return np.random.default_rng([ORDER, seed, epoch]).permutation(n)


def choose_positions(shape, ratio, *key):
    """Which positions to hide: bool of `shape`, each independently with probability `ratio` (an exact count would tell
    the model how many are left)."""
    return np.random.default_rng((HIDING, *key)).random(shape, dtype=np.float32) < ratio


# ---- preparing -----------------------------------------------------------------------------------
# While a set is made, `parts/` in its folder says which set it is (plan.json) and holds one small file for
# every finished chunk of a generator, so that the same command goes on where a killed one stopped. Chunk i of
# the set with seed s is made from the random stream (s, i) and nothing else. Reading files starts over; what was
# downloaded is kept. Small files are written under a temporary name and renamed.

def prepare(task, data_dir="data", sizes=None, seed=None, raw=None, workers=None, grouped=False):
    """Make data_dir/task ready, unless it is -> its folder. Several processes may call it at once.

    sizes:   examples in (train, val, test); None: the row's, or whatever is there
    seed:    of the generator; None: 0, or whatever is there
    raw:     folder of the official files, read instead of downloading or generating
    workers: processes of a generator; None: one for every core. The result does not depend on it.
    grouped: BIDMC: no recording in two splits (see `recordings`)
    UserError when another set is there (nothing is ever overwritten), or files are damaged or cannot be had.
    """
    row, folder = task_row(task), Path(data_dir) / task
    if sizes is not None and (len(sizes) != 3 or min(sizes) < 1):
        raise UserError(f"sizes {tuple(sizes)}: train, val and test must be three positive numbers")
    if seed is not None and (seed < 0 or raw is not None or row.make is None):
        raise UserError(f"--seed {seed}: must not be negative" if seed < 0 else
                        f"--seed {seed} is for generated sets; the official splits of {task} are fixed; leave it out")
    if grouped and row.family != "bidmc":
        raise UserError(f"--grouped has no meaning for {task}; it is for bidmc_hr, bidmc_rr and bidmc_spo2")
    if raw is not None and (not str(raw) or not Path(raw).is_dir()):
        raise UserError(f"--raw '{raw}' is not a folder; it may hold: {row.source.accepts}")
    source = None if raw is None else f"files in {Path(raw).resolve()}"
    asked = dict(sizes=sizes and [int(size) for size in sizes], seed=seed, source=source, grouped=grouped or None)
    meta = _read_meta(folder, task, data_dir)        # before the lock, so that a read-only folder can be used
    if meta is not None:
        _check_meta(meta, folder, task, data_dir, asked)
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock", f"{folder} is being prepared by another process"):
            if not (folder / "meta.json").exists():   # else another process made it while we waited
                _prepare_locked(row, task, folder, asked, workers or os.cpu_count())
    except OSError as error:
        hint = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            hint = "; make room, or choose another --data-dir"
        elif str(error.filename).startswith(str(data_dir)):
            hint = "; choose another --data-dir"
        raise UserError(f"{folder}: {error}{hint}") from None
    _check_meta(_read_meta(folder, task, data_dir), folder, task, data_dir, asked)
    return folder


def _prepare_locked(row, task, folder, asked, workers):
    """Make the set and, at the very end, meta.json. Only one process at a time is in here for one folder."""
    source = asked["source"] or ("generated" if row.make else "downloaded")
    sizes = asked["sizes"] or (list(row.sizes) if source == "generated" or row.subset else None)
    plan = dict(task=task, sizes=sizes, asked=bool(asked["sizes"]), seed=asked["seed"] or 0, source=source,
                grouped=bool(asked["grouped"]), row=_plain(row))
    parts = folder / "parts"
    parts.mkdir(exist_ok=True)
    unfinished = _read_json(parts / "plan.json")
    if unfinished is None and source == "generated":                         # reading starts over anyway
        _write_json(parts / "plan.json", plan)
    elif unfinished not in (None, plan):
        theirs = ", ".join(f"{key} {unfinished.get(key)}" for key in plan if unfinished.get(key) != plan[key])
        raise UserError(f"{folder} holds an unfinished set with {theirs}; ask for it, or run: "
                        f"rm -r {shlex.quote(str(folder))}")
    make = dict(listops=prepare_listops, text=prepare_text, retrieval=prepare_retrieval, cifar=prepare_cifar,
                pathfinder=prepare_pathfinder, speech=prepare_speech, bidmc=prepare_bidmc)[row.family]
    found = make(row, folder, plan, workers) or {}
    files = {}
    for path in sorted(folder.glob("*.npy")):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        files[path.name] = dict(shape=list(array.shape), dtype=str(array.dtype), bytes=path.stat().st_size)
    plan["sizes"] = [files[f"{split}_y.npy"]["shape"][0] for split in SPLITS]
    _write_json(folder / "meta.json", dict(plan, found=found, files=files))
    for path in [*parts.iterdir(), *folder.glob(".*.npy.*")]:                      # and what a kill left over
        path.unlink()
    parts.rmdir()


def _size(plan, i, available, place):
    """Examples to take for split i of those available: what was asked for, what a subset's row says, else all."""
    if not available:
        raise UserError(f"{place} holds no examples for {SPLITS[i]}; get it again")
    size = plan["sizes"][i] if plan["sizes"] else available
    if size > available and plan["asked"]:
        raise UserError(f"{place}: {available} examples for {SPLITS[i]}, not {size}; change --{SPLITS[i]}")
    return min(size, available)


def _shuffled(n):
    """The permutation behind torch's random_split with seed 42, which S4 and the paper split by: int64 (n,)."""
    import torch
    return torch.randperm(n, generator=torch.Generator().manual_seed(42)).numpy()


# ---- ListOps -------------------------------------------------------------------------------------

def prepare_listops(row, folder, plan, workers):
    """All splits of a ListOps task: chunks until there are enough distinct ones, or the official files."""
    if plan["source"] != "generated":
        for i, split in enumerate(SPLITS):
            path = _release(plan, f"listops-1000/basic_{split}.tsv", f"basic_{split}.tsv")
            tokens, lengths, labels = read_listops(path, row.length)
            size = _size(plan, i, len(labels), path)
            _save_tokens(folder, split, tokens[:lengths[:size].sum()], lengths[:size], labels[:size])
        return
    total, seen, rows, labels = sum(plan["sizes"]), set(), [], []
    chunks = range(-(-total // CHUNK))
    while len(rows) < total:                              # more turns only to replace duplicates
        _run_chunks(_listops_chunk, [(i, CHUNK, folder, plan, row) for i in chunks], workers)
        before = len(rows)
        for i in chunks:
            part = _load_part(folder, i, plan)
            expressions = np.split(part["tokens"], np.cumsum(part["lengths"])[:-1])
            for tokens, label in zip(expressions, part["labels"]):
                digest = hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
                if digest not in seen:                # the official set is distinct, too: splits are disjoint
                    seen.add(digest)
                    rows.append(tokens)
                    labels.append(label)
        if len(rows) - before < len(chunks) * CHUNK // 50:
            raise UserError(f"{plan['task']} has too few distinct expressions for {total}; ask for fewer")
        chunks = range(chunks.stop, chunks.stop + 1)
    for split, start, size in zip(SPLITS, np.cumsum([0] + plan["sizes"]), plan["sizes"]):
        mine = slice(start, start + size)
        lengths = [len(tokens) for tokens in rows[mine]]
        _save_tokens(folder, split, np.concatenate(rows[mine]), lengths, labels[mine])


def _listops_chunk(index, count, folder, plan, row):
    rng = np.random.default_rng([plan["seed"], index])
    tokens, lengths, labels = make_listops(row.make, rng, count)
    _save_part(folder, index, plan, tokens=tokens, lengths=lengths, labels=labels)


def _save_tokens(folder, split, tokens, lengths, labels):
    """Arrays of one split: sequences one after the other, where each begins, labels."""
    _save(folder / f"{split}_x.npy", tokens)
    _save(folder / f"{split}_offsets.npy", np.cumsum([0, *lengths], dtype=np.int64))
    _save(folder / f"{split}_y.npy", np.asarray(labels, np.uint8))


def evaluate(symbols):
    """Value 0..9 of a list of ListOps symbols ("[MAX", "4", .., "X"); ValueError when it is no expression."""
    apply = {"[MIN": min, "[MAX": max, "[SM": lambda v: sum(v) % 10,
             "[MED": lambda v: (sorted(v)[(len(v) - 1) // 2] + sorted(v)[len(v) // 2]) // 2}
    stack = [("", [])]                                    # open operators and their arguments so far
    for symbol in symbols:
        if symbol in apply:
            stack.append((symbol, []))
        elif symbol == "X":
            operator, values = stack.pop()
            if not stack or not values:
                raise ValueError("a bracket closes nothing")
            stack[-1][1].append(apply[operator](values))
        elif symbol in SYMBOLS:
            stack[-1][1].append(int(symbol))
        else:
            raise ValueError(f"unknown token '{symbol}'")
    if len(stack) > 1 or len(stack[0][1]) != 1:
        raise ValueError("not one complete expression")
    return stack[0][1][0]


def read_listops(path, length):
    """Read an official file, header "Source<TAB>Target" -> ids uint8 (total,), lengths (n,), labels (n,).

    As in [1]: `]` becomes X, parentheses go, split at white space; cut to length - 1, then EOS. Expressions
    are evaluated. UserError with file and line for a wrong column count, no expression, or a label that is
    wrong.
    """
    number = {symbol: DIGIT + i for i, symbol in enumerate(SYMBOLS)}
    letters = str.maketrans({"]": "X", "(": None, ")": None})
    rows, labels = [], []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line, text in enumerate(file, 1):
            fields = text.rstrip("\n").split("\t")
            if len(fields) != 2:
                raise UserError(f"{path}, line {line}: {len(fields)} columns, not 2; restore the file")
            if line == 1 and fields[0] == "Source":
                continue
            symbols = fields[0].translate(letters).split()
            try:
                value = evaluate(symbols)
            except ValueError as error:
                raise UserError(f"{path}, line {line}: {error}; restore the file") from None
            if fields[1].strip() != str(value):
                raise UserError(f"{path}, line {line}: label '{fields[1]}' of an expression that is {value}; "
                                "restore the file")
            rows.append([number[symbol] for symbol in symbols[:length - 1]] + [EOS])
            labels.append(value)
    tokens = np.concatenate([np.zeros(0, np.uint8)] + [np.array(row, np.uint8) for row in rows])
    return tokens, np.array([len(row) for row in rows], np.int64), np.array(labels, np.uint8)


# ---- Pathfinder ----------------------------------------------------------------------------------

def prepare_pathfinder(row, folder, plan, workers):
    """All splits of a Pathfinder task, drawn chunk by chunk straight into their place in the final files, so
    that neither memory nor disk holds the set twice: a chunk's part file holds only a checksum."""
    if plan["source"] != "generated":
        return _read_official_images(row, folder, plan)
    jobs = []
    for split, size in zip(SPLITS, plan["sizes"]):
        _create(folder / f"{split}_x.npy", (size, row.length, 1))
        _create(folder / f"{split}_y.npy", (size,))
        for start in range(0, size, CHUNK):
            jobs.append((len(jobs), min(CHUNK, size - start), folder, plan, row, split, start))
    _run_chunks(_pathfinder_chunk, jobs, workers)
    if row.make.distinct:
        _replace_repeats(folder, plan, row)


def _replace_repeats(folder, plan, row):
    """Small pictures repeat. A kill in here is harmless: the chunks no longer fit their checksums and are redrawn."""
    rng, seen = np.random.default_rng([plan["seed"], 1 << 40]), set()

    def spares():
        while True:
            made = make_pathfinder(row, rng, 64)
            yield from zip(made.images.reshape(64, row.length, 1), made.labels)

    spare = spares()
    for split in SPLITS:
        x, y = (np.load(folder / f"{split}_{name}.npy", mmap_mode="r+") for name in "xy")
        for i in range(len(y)):
            while x[i].tobytes() in seen:
                x[i], y[i] = next(spare)
            seen.add(x[i].tobytes())
        x.flush(), y.flush()


def _pathfinder_chunk(index, count, folder, plan, row, split, start):
    made = make_pathfinder(row, np.random.default_rng([plan["seed"], index]), count)
    for name, array in (("x", made.images.reshape(count, row.length, 1)), ("y", made.labels)):
        target = np.load(folder / f"{split}_{name}.npy", mmap_mode="r+")
        target[start:start + count] = array
        target.flush()
    _save_part(folder, index, plan, checksum=_checksum(folder, split, start, count))


def _checksum(folder, split, start, count):
    x, y = (np.load(folder / f"{split}_{name}.npy", mmap_mode="r")[start:start + count] for name in "xy")
    return zlib.crc32(y.tobytes(), zlib.crc32(x.tobytes()))


def _read_official_images(row, folder, plan):
    source = _release(plan, f"pathfinder{row.side}/curv_contour_length_14")
    paths, labels, empty = read_pathfinder_index(source)
    print(f"{source}: {len(paths):,} images, {empty} empty ones skipped")
    tenth = int(0.1 * len(paths))
    parts = np.split(_shuffled(len(paths)), [len(paths) - 2 * tenth, len(paths) - tenth])
    for i, (split, members) in enumerate(zip(SPLITS, parts)):
        members = members[:_size(plan, i, len(members), source)]
        _save(folder / f"{split}_y.npy", labels[members])
        path = folder / f"{split}_x.npy"
        _create(path, (len(members), row.length, 1))
        for place, member in enumerate(tqdm(members, desc=f"{folder} {split}", unit="image")):
            if place % CHUNK == 0:
                images = np.load(path, mmap_mode="r+")    # a fresh map lets go of what has been written
            try:
                with Image.open(paths[member]) as image:
                    pixels = np.asarray(image.convert("L"))
            except (OSError, SyntaxError) as error:
                raise UserError(f"{paths[member]}: {error}; restore the LRA release") from None
            if pixels.shape != (row.side, row.side):
                raise UserError(f"{paths[member]} is {pixels.shape}, not {row.side} px; restore the release")
            images[place, :, 0] = pixels.reshape(-1)


def read_pathfinder_index(folder):
    """The metadata of one official folder -> image paths (n,), labels uint8 (n,), number of empty images.

    metadata/<batch>.npy is plain text in the release and a numpy string array from the public generator;
    columns 0, 1, 3 are folder, file, label. Batches in numeric order. One image of the release is known to be
    0 bytes.
    """
    paths, labels, empty = [], [], 0
    files = sorted((folder / "metadata").glob("*.npy"), key=lambda path: path.stem.zfill(12))   # as numbers
    if not files:
        raise UserError(f"{folder}/metadata holds no .npy file; restore the LRA release")
    for file in files:
        try:
            if file.read_bytes()[:6] == b"\x93NUMPY":
                rows = np.load(file, allow_pickle=False).astype(str).tolist()
            else:
                rows = [line.split() for line in file.read_text().splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: not readable as metadata ({error}); restore the LRA release") from None
        for line, fields in enumerate(rows, 1):
            if len(fields) < 4 or fields[3] not in ("0", "1"):
                raise UserError(f"{file}, line {line}: no label 0 or 1 in column 3; restore the LRA release")
            path = folder / fields[0] / fields[1]
            if not path.exists():
                raise UserError(f"{path} is missing ({file}, line {line}); restore the LRA release")
            if path.stat().st_size == 0:
                empty += 1
                continue
            paths.append(path)
            labels.append(int(fields[3]))
    return paths, np.array(labels, np.uint8), empty


# ---- Text, Retrieval -----------------------------------------------------------------------------
# Characters, not bytes or words. A text is cut to length - 1 characters, then EOS. Ids: the special symbols, then the
# characters of the (cut) training texts by falling frequency, as in [2]; anything else is UNK.

CODES = 0x110000           # code points of Unicode
END = "\U0010ffff"         # stands for EOS while texts are strings; Unicode assigns it to nothing


def _codes(texts):
    """Texts joined -> code points (total,) uint32."""
    return np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)


def vocabulary(counts, least):
    """Counts of all code points (CODES,) -> characters in order of their ids, table code point -> id (CODES,).

    Characters that occur fewer than `least` times are UNK. Ties go by code point.
    """
    known = np.flatnonzero(counts >= least)
    known = known[np.lexsort((known, -counts[known]))]
    table = np.full(CODES, UNK, np.uint8 if EOS + 1 + len(known) <= 256 else np.uint16)
    table[known] = EOS + 1 + np.arange(len(known))
    table[ord(END)] = EOS
    return "".join(map(chr, known)), table


def prepare_text(row, folder, plan, workers):
    """IMDb (Maas et al. 2011): 25,000 training and 25,000 test reviews, label 1 = positive.

    Validation is a tenth of the training reviews, where the official code validates on the test set. Characters count
    as known from 15 occurrences in the 25,000 reviews on, as in [2].
    """
    place, reviews = _place(row, folder, plan, ("aclImdb*.tar*",), ("train/pos",)), {"train": {}, "test": {}}
    for match, raw in _members(place, r"(?:^|/)(train|test)/(neg|pos)/(\d+_\d+)\.txt$"):
        reviews[match[1]][match[2] == "pos", match[3]] = raw.decode("utf-8", "replace")[:row.length - 1]
    for name, some in reviews.items():
        if len({positive for positive, _ in some}) < 2:
            raise UserError(f"{place} holds no reviews {name}/neg/*.txt and {name}/pos/*.txt; get it again")
        reviews[name] = [(positive, text) for (positive, _), text in sorted(some.items())]    # by label, then by file
    shuffled = _shuffled(len(reviews["train"]))
    held_out = len(shuffled) // 10
    parts = ([reviews["train"][i] for i in shuffled[:-held_out]], [reviews["train"][i] for i in shuffled[-held_out:]],
             reviews["test"])
    counts = np.bincount(_codes(text for _, text in reviews["train"]), minlength=CODES)
    symbols, table = vocabulary(counts, least=15)
    for i, (split, part) in enumerate(zip(SPLITS, parts)):
        if split == "test":                               # sorted so far: a part of it would have one label
            part = [part[j] for j in _shuffled(len(part))]
        part = part[:_size(plan, i, len(part), place)]
        lengths = [len(text) + 1 for _, text in part]
        _save_tokens(folder, split, table[_codes(text + END for _, text in part)], lengths,
                     [positive for positive, _ in part])
    return dict(vocab=EOS + 1 + len(symbols), symbols=symbols)


def read_retrieval(path):
    """An official AAN file -> iterator over (label, text, text).

    Columns label ("0.0" or "1.0"), id, id, text, text; no header. As in [2] a field may be quoted by `"`, and then may
    hold tabs, line ends and doubled quotes ([1] takes quotes literally: a few texts differ). UserError with file and
    line for another number of columns or another label.
    """
    csv.field_size_limit(1 << 22)                         # a quote that is never closed swallows no more
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file, delimiter="\t")
        try:
            for columns in reader:
                if len(columns) != 5 or columns[0] not in ("0.0", "1.0", "0", "1"):
                    raise UserError(f"{path}, line {reader.line_num}: not a label 0.0 or 1.0, two ids and two texts, "
                                    "separated by tabs; restore the file")
                yield int(columns[0][0]), columns[3], columns[4]
        except csv.Error as error:
            raise UserError(f"{path}, line {reader.line_num}: {error}; restore the file") from None


def prepare_retrieval(row, folder, plan, workers):
    """AAN (Radev et al. 2013; pairs of LRA): do two papers cite each other? Label 1: yes.

    Read twice and a thousand texts at a time, since the training texts fill gigabytes: once for vocabulary and lengths,
    once to write.
    """
    if plan["source"] == "downloaded":
        raise UserError("retrieval cannot be downloaded: the LRA archive (storage.googleapis.com/long-range-arena/"
                        "lra_release.gz) answers 403 Forbidden since 2026, and its texts may not be redistributed. If "
                        "you have new_aan_pairs.{train,eval,test}.tsv or an LRA release, run: python data.py "
                        "--task retrieval --raw DIR")
    paths = [_release(plan, f"tsv_data/{name}", f"aan/{name}", name)
             for name in (f"new_aan_pairs.{split}.tsv" for split in ("train", "eval", "test"))]

    def pieces(path, least=1000):
        """(labels, texts of both documents in turn), some hundred examples at a time."""
        labels, texts = [], []
        for label, *pair in read_retrieval(path):
            labels.append(label)
            texts += [text[:row.length - 1] for text in pair]
            if len(texts) >= least:
                yield labels, texts
                labels, texts = [], []
        if labels:
            yield labels, texts

    counts, labels, lengths = np.zeros(CODES, np.int64), [[], [], []], [[], [], []]
    for i, path in enumerate(paths):
        for some, texts in tqdm(pieces(path), desc=f"{path.name}, first reading", unit="piece"):
            labels[i] += some
            lengths[i] += [len(text) + 1 for text in texts]
            if i == 0:
                counts += np.bincount(_codes(texts), minlength=CODES)
    symbols, table = vocabulary(counts, least=1)
    for i, (split, path) in enumerate(zip(SPLITS, paths)):
        size = _size(plan, i, len(labels[i]), path)
        ends = np.cumsum([0] + lengths[i][:2 * size])
        x, done = _create(folder / f"{split}_x.npy", (int(ends[-1]),), table.dtype), 0
        for _, texts in tqdm(pieces(path), desc=f"{path.name}, second reading", unit="piece"):
            texts = texts[:2 * size - done]
            if not texts:
                break
            x[ends[done]:ends[done + len(texts)]] = table[_codes(text + END for text in texts)]
            done += len(texts)
        x.flush()
        _save(folder / f"{split}_offsets.npy", ends)
        _save(folder / f"{split}_y.npy", np.array(labels[i][:size], np.uint8))
    return dict(vocab=EOS + 1 + len(symbols), symbols=symbols)


# ---- Image, sCIFAR -------------------------------------------------------------------------------

class _ArraysOnly(pickle.Unpickler):
    """Reads the official pickled batches. A pickle can name any function to be called; here only what makes an array
    exists."""

    RECONSTRUCT = np.empty(0).__reduce__()[0]       # an empty array, which its pickled state then fills
    ALLOWED = {"numpy.ndarray": np.ndarray, "numpy.dtype": np.dtype, "_codecs.encode": codecs.encode,
               "numpy.core.multiarray._reconstruct": RECONSTRUCT, "numpy._core.multiarray._reconstruct": RECONSTRUCT}

    def find_class(self, module, name):
        if f"{module}.{name}" not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return self.ALLOWED[f"{module}.{name}"]


def read_cifar(place):
    """CIFAR-10 (Krizhevsky 2009), binary or pickled, archive or folder; or an .npz file.

    -> {"train": (images, labels), "test": (images, labels)}, images uint8 (n, 32, 32, 3), or (n, 32, 32) where the .npz
    holds grey ones, labels uint8 (n,), in the official order.
    """
    def checked(images, labels):
        labels = np.asarray(labels)
        if (images.dtype != np.uint8 or images.shape[1:] not in ((32, 32), (32, 32, 3)) or labels.dtype.kind not in "iu"
                or labels.size != len(images) or not (0 <= labels.min() and labels.max() <= 9)):
            raise ValueError(f"{labels.size} labels and {images.dtype} images {images.shape}")
        return images, labels.reshape(-1).astype(np.uint8)

    if place.suffix == ".npz":
        try:
            with np.load(place, allow_pickle=False) as file:
                return {name: checked(file[f"x_{name}"], file[f"y_{name}"]) for name in ("train", "test")}
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise UserError(f"{place}: not an .npz of CIFAR-10's x_train, y_train, x_test, y_test ({error})") from None
    batches = {}
    for match, raw in _members(place, r"(?:^|/)(data_batch_[1-5]|test_batch)(\.bin)?$"):
        try:
            if match[2]:                                              # a label and three planes, row by row
                rows = np.frombuffer(raw, np.uint8).reshape(-1, 1 + 3072)
                labels, planes = rows[:, 0], rows[:, 1:]
            else:
                batch = _ArraysOnly(io.BytesIO(raw), encoding="bytes").load()
                labels, planes = batch[b"labels"], batch[b"data"]
            batches[match[1]] = checked(planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels)
        except Exception as error:       # unpickling raises whatever its bytes make it raise
            raise UserError(f"{place}, {match[0]}: not a CIFAR-10 batch ({error}); get it again") from None
    missing = {"test_batch", *(f"data_batch_{i}" for i in range(1, 6))} - batches.keys()
    if missing:
        raise UserError(f"{place} lacks {', '.join(sorted(missing))}; get it again")
    test = batches.pop("test_batch")
    train = [np.concatenate(column) for column in zip(*(batches[name] for name in sorted(batches)))]
    return {"train": tuple(train), "test": test}


def prepare_cifar(row, folder, plan, workers):
    """Image (one grey channel) or sCIFAR (three): 32 x 32 pixels row by row, or fewer, each the mean of those whose
    centres lie under it. Validation: a tenth of the training images as random_split with seed 42 draws it."""
    place = _place(row, folder, plan, ("cifar-10-binary*.tar*", "cifar-10-python*.tar*", "cifar10*.npz"),
                   ("data_batch_1.bin", "data_batch_1"))
    read = read_cifar(place)
    shuffled = _shuffled(len(read["train"][1]))
    held_out = len(shuffled) - int(len(shuffled) * 0.9)
    parts = (("train", "train", shuffled[:-held_out]), ("val", "train", shuffled[-held_out:]),
             ("test", "test", np.arange(len(read["test"][1]))))
    for i, (split, source, members) in enumerate(parts):
        members = members[:_size(plan, i, len(members), place)]
        images, labels = (array[members] for array in read[source])
        if images.ndim == 4 and row.channels == 1:
            images = grey(images)
        if row.channels == 3 and images.ndim == 3:
            raise UserError(f"{place} holds grey images; {plan['task']} needs colour")
        if row.side != 32:
            small = (row.side, row.side)
            images = np.stack([np.asarray(Image.fromarray(image).resize(small, Image.BOX)) for image in images])
        _save(folder / f"{split}_x.npy", images.reshape(-1, row.length, row.channels))
        _save(folder / f"{split}_y.npy", labels)


def grey(images):
    """uint8 (n, h, w, 3) -> (n, h, w): luma of ITU-R 601 in the integer arithmetic of PIL's conversion to "L"."""
    out = np.empty(images.shape[:-1], np.uint8)
    for start in range(0, len(images), 1000):
        r, g, b = np.moveaxis(images[start:start + 1000].astype(np.uint32), -1, 0)
        out[start:start + 1000] = (19595 * r + 38470 * g + 7471 * b + 32768) >> 16
    return out


# ---- Speech Commands -----------------------------------------------------------------------------

def read_wav(raw, length):
    """The bytes of a clip, 16 kHz, mono, 16 bits -> int16 (length,), silence after its end. ValueError for others."""
    try:
        with wave.open(io.BytesIO(raw)) as clip:
            form = clip.getnchannels(), clip.getsampwidth(), clip.getframerate()
            samples = np.frombuffer(clip.readframes(length), "<i2") if form == (1, 2, 16_000) else None
    except (wave.Error, EOFError) as error:
        raise ValueError(f"not a .wav file ({error})") from None
    if samples is None:
        raise ValueError(f"{form[0]} channels of {8 * form[1]} bits at {form[2]} Hz, not mono, 16 bits, 16,000 Hz")
    if len(samples) < min(clip.getnframes(), length):
        raise ValueError(f"{len(samples)} of its {clip.getnframes()} samples are there")
    out = np.zeros(length, np.int16)
    out[:len(samples)] = samples
    return out


def prepare_speech(row, folder, plan, workers):
    """Speech Commands v0.02 (Warden 2018), all 35 words, raw samples. The official lists name the validation and test
    clips, the rest is training. An archive is read twice: once for the names and lists, once for the samples.

    Normalised by one mean and one standard deviation of the padded training clips, where [2] takes one per time step
    of values that it has divided by 2^15 twice.
    """
    place = _place(row, folder, plan, ("speech_commands*.tar*",), ("testing_list.txt",))
    pattern = rf"(?:^|/)(?:((?:{'|'.join(row.names)})/[^/.][^/]*\.wav)|(validation|testing)_list\.txt)$"
    clips, lists = [], {}
    for match, raw in _members(place, pattern):
        if match[1]:
            clips.append(match[1])
        else:
            lists[match[2]] = set(raw.decode("utf-8", "replace").split())
    if lists.keys() != {"validation", "testing"} or not clips:
        raise UserError(f"{place} lacks validation_list.txt, testing_list.txt or clips; get it again")
    parts = [sorted(set(clips) - lists["validation"] - lists["testing"]),
             sorted(set(clips) & lists["validation"]), sorted(set(clips) & lists["testing"])]
    where = {}
    for i, (split, part) in enumerate(zip(SPLITS, parts)):
        part = [part[j] for j in _shuffled(len(part))][:_size(plan, i, len(part), place)]
        where |= {clip: (i, j) for j, clip in enumerate(part)}
        _create(folder / f"{split}_x.npy", (len(part), row.length, 1), np.int16)
        _save(folder / f"{split}_y.npy", np.array([row.names.index(clip.split("/")[0]) for clip in part], np.uint8))
    n, total, squares = 0, 0.0, 0.0                        # of the training samples
    for count, (match, raw) in enumerate(tqdm(_members(place, pattern), desc=str(folder), total=len(clips) + 2)):
        if count % 2000 == 0:                             # a fresh map lets go of what has been written
            arrays = [np.load(folder / f"{split}_x.npy", mmap_mode="r+") for split in SPLITS]
        if match[1] in where:
            i, j = where.pop(match[1])
            try:
                arrays[i][j, :, 0] = clip = read_wav(raw, row.length)
            except ValueError as error:
                raise UserError(f"{place}, {match[1]}: {error}; get it again") from None
            if i == 0:
                values = clip / row.scale
                n, total, squares = n + row.length, total + values.sum(), squares + np.square(values).sum()
    return dict(mean=float(total / n), std=float(np.sqrt(squares / n - (total / n) ** 2)))


# ---- BIDMC ---------------------------------------------------------------------------------------

def read_ts(path, length, channels):
    """A .ts file of the TSER archive (Tan et al. 2021) -> series float32 (n, length, channels), targets float64 (n,).

    After @data, a line an example: its channels, numbers separated by commas, then the target, separated by colons. A
    missing value, "?", is interpolated between its neighbours. UserError with file and line for anything else.
    """
    series, targets, header = [], [], True
    with open(path, encoding="latin-1") as file:
        for line, text in enumerate(file, 1):
            text = text.strip()
            if header or not text or text.startswith("#"):
                header = header and text.lower() != "@data"
                continue
            *parts, target = text.split(":")
            try:
                sizes = [part.count(",") + 1 for part in parts]
                if sizes != [length] * channels:
                    raise ValueError(f"channels of {sizes} values")
                with np.errstate(over="ignore"):          # becomes infinite, which is refused below
                    values = np.array([part.replace("?", "nan").split(",") for part in parts], np.float32)
                for channel in values:
                    known = np.flatnonzero(~np.isnan(channel))
                    channel[:] = np.interp(np.arange(length), known, channel[known])
                targets.append(float(target))
                if not (np.isfinite(values).all() and np.isfinite(targets[-1])):
                    raise ValueError("a value that is not finite")
            except ValueError as error:
                raise UserError(f"{path}, line {line}: not {channels} channels of {length} values and a target "
                                f"({error}); restore the file") from None
            series.append(values.T)
    if not series:
        raise UserError(f"{path} holds no example after a line @data; restore the file")
    return np.stack(series), np.array(targets)


def official_windows(n):
    """70, 15, 15 % as the official code splits -> three index arrays. It calls scikit-learn's train_test_split for 0.3
    with seed 0, then for half of that with seed 1; the head of each permutation is what is held out."""
    def cut(members, share, seed):
        shuffled = members[np.random.RandomState(seed).permutation(len(members))]
        held_out = int(np.ceil(share * len(members)))
        return shuffled[held_out:], shuffled[:held_out]

    train, rest = cut(np.arange(n), 0.3, 0)
    return train, *cut(rest, 0.5, 1)


def fingerprints(series, span=32, rarity=64):
    """What two windows of one recording share: hashes of `span` consecutive samples of all channels, at about one in
    `rarity` positions, chosen by the samples themselves so that overlapping windows choose the same ones.

    series float32 (n, l, c) -> window (m,) and hash (m,). Stretches of fewer than span / 2 distinct steps are left out:
    a flat line looks the same in every recording.
    """
    windows, hashes = [], []
    odd = np.random.default_rng(0).integers(0, 2 ** 63, span + series.shape[2], np.uint64) * 2 + 1
    for start in range(0, len(series), 200):                          # 200 windows: some 100 MB
        bits = series[start:start + 200].view(np.uint32).astype(np.uint64)             # (200, l, c)
        mixed = (bits * odd[span:]).sum(-1)                                            # (200, l)
        mixed ^= mixed >> np.uint64(29)
        last = mixed.shape[1] - span + 1
        total = sum(mixed[:, i:i + last] * odd[i] for i in range(span))
        moves = np.cumsum(np.diff(mixed, axis=1, prepend=0) != 0, axis=1)
        lively = moves[:, span - 1:] - moves[:, :last] >= span // 2
        window, place = np.nonzero(lively & (total >> np.uint64(40) & np.uint64(rarity - 1) == 0))
        windows.append(window + start)
        hashes.append(total[window, place])
    return np.concatenate(windows), np.concatenate(hashes)


def recordings(window, hashes, n):
    """Which windows come from one recording: those linked by shared samples -> group number (n,).

    The files do not name the recordings, but neighbouring windows overlap.
    """
    parent = np.arange(n)

    def root(i):
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    by_hash = np.lexsort((window, hashes))
    same = hashes[by_hash][1:] == hashes[by_hash][:-1]
    for a, b in np.unique(np.stack([window[by_hash][:-1][same], window[by_hash][1:][same]], 1), axis=0):
        parent[root(a)] = root(b)
    return np.unique([root(i) for i in range(n)], return_inverse=True)[1]


def prepare_bidmc(row, folder, plan, workers):
    """BIDMC (Pimentel et al. 2017): heart rate, respiratory rate or oxygen saturation from PPG and ECG, 32 s at 125 Hz.

    Official split: TRAIN and TEST are joined and windows drawn at random, so test windows overlap training windows; how
    many is printed and kept in meta.json. With plan["grouped"], whole recordings are drawn, in about the same shares.
    Targets are mapped to [-1, 1] by the range of the training split (paper, appendix C.3); `label_range` in meta.json
    maps back.
    """
    if plan["source"] == "downloaded":
        by_hand = _by_hand(plan["task"], folder.parent)
        paths = [fetch(archive, folder.parent / "downloads", by_hand) for archive in row.source.archives]
    else:
        names = [archive.name for archive in row.source.archives]
        raw = _raw_dir(plan)
        roots = [root for root in (raw, *sorted(raw.iterdir())) if all((root / name).exists() for name in names)]
        if not roots:
            raise UserError(f"--raw {raw} does not hold {' and '.join(names)}, nor does a folder in it")
        paths = [roots[0] / name for name in names]
    series, targets = (np.concatenate(column) for column in
                       zip(*(read_ts(path, row.length, row.channels) for path in paths)))
    n = len(targets)
    window, hashes = fingerprints(series)
    groups = recordings(window, hashes, n)
    if plan["grouped"]:
        sizes = np.bincount(groups)
        shuffled = np.random.RandomState(0).permutation(len(sizes))
        middle = (np.cumsum(sizes[shuffled]) - sizes[shuffled] / 2) / n      # of each, in shares of all windows
        split_of = np.digitize(middle, [0.7, 0.85])[np.argsort(shuffled)]
        parts = [np.flatnonzero(split_of[groups] == i) for i in range(3)]
        if len(sizes) > n // 2 or not all(map(len, parts)):
            raise UserError(f"{n} windows fall into {len(sizes)} groups that share samples, which cannot be split by "
                            "recording; leave out --grouped")
    else:
        parts = official_windows(n)
    test, train = (np.isin(window, parts[i]) for i in (2, 0))
    leak = len(np.unique(window[test & np.isin(hashes, hashes[train])])) / len(parts[2])
    unknown = groups.max() + 1 > n // 2                    # windows rescaled one by one share no numbers
    parts = [part[:_size(plan, i, len(part), plan["source"])] for i, part in enumerate(parts)]
    low, high = targets[parts[0]].min(), targets[parts[0]].max()
    if low == high:
        raise UserError(f"{plan['source']}: all training targets are {low}; nothing to learn")
    for split, part in zip(SPLITS, parts):
        _save(folder / f"{split}_x.npy", series[part])
        _save(folder / f"{split}_y.npy", ((targets[part] - low) / (high - low) * 2 - 1).astype(np.float32))
    print(f"{folder}: {n:,} windows in {groups.max() + 1} groups that share samples; " + (
        "too many groups to tell which windows overlap" if unknown else
        f"{100 * leak:.0f} % of the test windows share samples with a training window"))
    return dict(label_range=[float(low), float(high)], groups=int(groups.max() + 1),
                leak=None if unknown else round(leak, 4))


# ---- official files: folders and archives --------------------------------------------------------

def _raw_dir(plan):
    return Path(plan["source"].removeprefix("files in "))


def _release(plan, *layouts):
    """The first of `layouts` below --raw DIR, which may be the outer or inner root of an LRA release."""
    raw = _raw_dir(plan)
    for root in (raw, raw / "lra_release", raw / "lra_release" / "lra_release"):
        for layout in layouts:
            if (root / layout).exists():
                return root / layout
    raise UserError(f"--raw {raw} has none of: {', '.join(layouts)} (nor has its lra_release/)")


def _place(row, folder, plan, archives, markers):
    """Where the files are: the download; or below --raw DIR the first archive that matches, or folder with a marker."""
    if plan["source"] == "downloaded":
        return fetch(row.source.archives[0], folder.parent / "downloads", _by_hand(plan["task"], folder.parent))
    raw = _raw_dir(plan)
    found = [path for pattern in archives for path in sorted(raw.glob(pattern))
             if path.suffix in (".tar", ".tgz", ".gz", ".bz2", ".xz", ".npz")]
    found += [root for root in (raw, *sorted(raw.iterdir())) for marker in markers if (root / marker).exists()]
    if not found:
        raise UserError(f"--raw {raw} holds nothing for {plan['task']}; it may hold: {row.source.accepts}")
    print(f"{folder}: reading {found[0]}" + "".join(f", not {path.name}" for path in found[1:]))
    return found[0]


def _members(place, pattern):
    """The files in an archive or folder whose path matches -> iterator over (match, bytes).

    An archive is read from front to back and never unpacked, so nothing in it can be written anywhere. UserError for
    one that is damaged or that no official source would make: paths that lead out of it, links in place of files.
    """
    pattern = re.compile(pattern)
    if place.is_dir():
        for path in sorted(place.rglob("*")):
            match = pattern.search(path.relative_to(place).as_posix())
            if match and path.is_file():
                yield match, path.read_bytes()
        return
    try:
        with tarfile.open(place) as archive:
            for member in archive:
                path, match = PurePosixPath(member.name), pattern.search(member.name)
                if path.is_absolute() or ".." in path.parts:
                    raise UserError(f"{place} holds '{member.name}', which leads out of it; get another copy")
                if match and not member.isfile():
                    raise UserError(f"{place} holds '{member.name}', which is not a file; get another copy")
                if match:
                    yield match, archive.extractfile(member).read()
            # tarfile takes a damaged header for the end, and stops before the compressor's own checksum.
            marked = archive.fileobj.tell() > archive.offset
            while rest := archive.fileobj.read(1 << 20):
                if rest.strip(b"\0"):
                    raise tarfile.ReadError("it goes on after its end")
            if not marked:
                raise tarfile.ReadError("it is cut short")
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        raise UserError(f"{place} is damaged ({str(error).splitlines()[0]}); get it again") from None


# ---- downloads -----------------------------------------------------------------------------------

TIMEOUT = 10, 60           # seconds to connect; seconds without a byte
TRIES = 4                  # in a row without a new byte, for each address
PAUSE = 2                  # seconds before trying again, times the number of failures in a row


def fetch(archive, folder, by_hand):
    """Download `archive` into a folder, unless it is there -> its path.

    It gets its name only once size and checksum are right; until then it is NAME.part, which the next call goes on
    with. UserError with every server's answer and what to do `by_hand`, when all addresses fail.
    """
    import requests
    path, part = folder / archive.name, folder / (archive.name + ".part")
    if archive.checksum is None and path.exists():        # only its server could tell more about it
        return path
    folder.mkdir(parents=True, exist_ok=True)
    failures = []
    with _locked(folder / f".{archive.name}.lock", f"{path} is being downloaded by another process"):
        if path.exists():                                 # ours, or put there by somebody
            if archive.checksum is None or _checksum_of(path, archive.checksum) == archive.checksum:
                return path                               # another process may have been faster
            os.replace(path, part)
        try:
            archive = _published(archive)
        except (requests.RequestException, ValueError, LookupError, TypeError) as error:
            failures.append(f"{archive.record}: {_reason(error)}")
        for url in archive.urls if archive.checksum else ():
            for _ in range(2):
                resumed = part.exists()
                try:
                    _download(url, part, archive.bytes)
                except requests.RequestException as error:
                    failures.append(f"{url}: {_reason(error)}")
                    break
                if _checksum_of(part, archive.checksum) == archive.checksum:
                    os.replace(part, path)
                    return path
                part.unlink()                             # a part from elsewhere may be to blame: once more, afresh
                if not resumed:
                    failures.append(f"{url}: wrong checksum")
                    break
    raise UserError(f"{archive.name} cannot be downloaded ({'; '.join(failures)}). Get it in another way, {by_hand}")


def _by_hand(task, data_dir):
    return (f"put it into a folder DIR and run: {_how(task, data_dir)} --raw DIR "
            f"(DIR may hold: {TASKS[task].source.accepts})")


def _published(archive):
    """The archive with size and checksum filled in from its record, where they are not known here."""
    import requests
    if archive.checksum is not None:
        return archive
    answer = requests.get(archive.record, timeout=TIMEOUT)
    answer.raise_for_status()
    listing = answer.json()
    if isinstance(listing, dict):                         # Zenodo
        found = {entry["key"]: (entry["size"], entry["checksum"]) for entry in listing["files"]}
    else:                                                 # Hugging Face: large files by content, small ones as in git
        found = {entry["path"]: (entry["size"], f"sha256:{entry['lfs']['oid']}" if "lfs" in entry else
                                 f"git:{entry['oid']}") for entry in listing}
    size, checksum = found.get(archive.name, (0, ""))
    if re.fullmatch("(md5|sha256|git):[0-9a-f]+", checksum):
        return replace(archive, bytes=int(size), checksum=checksum)
    raise LookupError(f"the record names no {archive.name} with a checksum")


def _reason(error):
    """Why a server did not help, in a few words."""
    import requests
    if isinstance(error, requests.HTTPError):
        return f"HTTP {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.Timeout):
        return "no answer"
    if isinstance(error, requests.ConnectionError):
        return "no connection"
    return str(error) if str(error) and "\n" not in str(error) else type(error).__name__


def _download(url, part, size):
    """Go on with `part` until it has `size` bytes. requests.RequestException when the server refuses, offers something
    else, or breaks off time and again; what arrived stays."""
    import requests
    import urllib3
    have = part.stat().st_size if part.exists() else 0
    most, failures = have, 0
    while have != size:
        if have > size:
            part.unlink()
            have = 0
        if shutil.disk_usage(part.parent).free < size - have:
            raise UserError(f"{part} needs {(size - have) / 1e6:,.1f} MB more than it has, and there is no room for "
                            "them; make room, or choose another --data-dir")
        try:
            _request(url, part, have, size)
            reason = "broke off"
        except requests.HTTPError as error:
            if error.response.status_code < 500:
                raise
            reason = _reason(error)
        except (requests.ConnectionError, requests.Timeout) as error:
            reason = _reason(error)
        except urllib3.exceptions.HTTPError:              # in the middle of a body
            reason = "broke off"
        have = part.stat().st_size if part.exists() else 0
        failures = 0 if have > most else failures + 1
        most = max(have, most)
        if failures == TRIES:
            raise requests.RequestException(f"{reason}, {have:,} of {size:,} bytes")
        if have != size:
            print(f"{url}: {reason}, {have:,} of {size:,} bytes; trying again", file=sys.stderr)
            time.sleep(PAUSE * failures)


def _request(url, part, have, size):
    """One request for what is missing after `have` bytes; the body goes into `part` as it comes."""
    import requests
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
        if answer.status_code == 416:
            part.unlink(missing_ok=True)
            raise requests.RequestException("has another file, shorter than what is here already")
        answer.raise_for_status()
        if answer.headers.get("Content-Type", "").startswith("text/html"):
            raise requests.RequestException("sends a web page instead")
        if answer.headers.get("Content-Range", "").split("-")[0] != f"bytes {have}":
            have = 0                                      # a server that does not resume sends all of it
        offered = answer.headers.get("Content-Length", "")
        if offered.isdigit() and have + int(offered) != size:
            raise requests.RequestException(f"offers {have + int(offered):,} bytes, not {size:,}")
        with open(part, "r+b" if have else "wb") as file, tqdm(
                desc=part.name, total=size, initial=have, unit="B", unit_scale=True, mininterval=0.5) as bar:
            file.seek(have)
            # Not iter_content: it would unpack what a server calls a gzip encoding, and drop the end of a broken body.
            for block in answer.raw.stream(1 << 16, decode_content=False):
                if file.tell() + len(block) > size:
                    raise requests.RequestException(f"sends more than {size:,} bytes")
                file.write(block)
                bar.update(len(block))


def _checksum_of(path, expected):
    algorithm = expected.split(":")[0]
    with open(path, "rb") as file:
        if algorithm == "git":
            return "git:" + hashlib.sha1(b"blob %d\0" % path.stat().st_size + file.read()).hexdigest()
        return f"{algorithm}:{hashlib.file_digest(file, algorithm).hexdigest()}"


# ---- Pythia --------------------------------------------------------------------------------------
# The paper's section 3.5 finetunes a language model on the tasks' own symbols: each symbol becomes one of the model's
# tokens, and no position is added or lost. Only the two files below are fetched, and nothing in them is executed.

PYTHIA = "https://huggingface.co/EleutherAI/pythia-70m-deduped/resolve/main"
PYTHIA_FILES = tuple(
    Archive(name, (f"{PYTHIA}/{name}",), None, None, PYTHIA.replace("EleutherAI", "api/models/EleutherAI", 1).replace(
        "resolve", "tree")) for name in ("model.safetensors", "tokenizer.json"))


def fetch_pythia(data_dir="data"):
    """Download Pythia-70M into data_dir/pythia-70m-deduped, unless it is there -> paths of weights and tokenizer."""
    folder = Path(data_dir) / "pythia-70m-deduped"
    try:
        return tuple(fetch(archive, folder, f"put it into {folder}, and run the same command again; or take --model "
                                            "pythia_rand, which needs no download") for archive in PYTHIA_FILES)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}; choose another --data-dir") from None


def pythia_tokens(task, tokenizer, data_dir="data"):
    """The token of each symbol of a prepared task: int64 (vocab,), and the symbols that have none.

    A gray level is the token of its decimal digits ("0" to "255" have one each), a character its own, an operator of
    ListOps that of its name ("MAX"). <eos>, <unk> and symbols without a token of their own become <|endoftext|>, <pad>
    becomes <|padding|>, as in the official code; <mask> never occurs in finetuning.
    """
    row, meta = task_row(task), _ready(task, data_dir)
    if row.kind == "continuous":
        symbols = [str(level) for level in range(row.vocab)]
    else:
        names = {"[MIN": "MIN", "[MAX": "MAX", "[MED": "MED", "[SM": "SM", "X": "]"} if row.family == "listops" else {}
        symbols = ["<|endoftext|>", "<|padding|>", "<|endoftext|>", "<|endoftext|>",
                   *(names.get(symbol, symbol) for symbol in meta["found"].get("symbols", SYMBOLS))]
    try:
        with open(tokenizer, encoding="utf-8") as file:
            known = json.load(file)["model"]["vocab"]
        end = known["<|endoftext|>"]
        # Tokens are written with one printable character for each byte: itself where it is printable, else the next
        # unused ones from 256 on (byte-level BPE, as in GPT-2).
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        letter = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
        tokens = [known.get("".join(letter[byte] for byte in symbol.encode())) for symbol in symbols]
        if not all(token is None or type(token) is int and 0 <= token < 1 << 31 for token in (end, *tokens)):
            raise ValueError
        if end is None or row.kind == "continuous" and None in tokens:
            raise LookupError
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{tokenizer} is not Pythia's tokenizer, or it is damaged ({type(error).__name__}); "
                        f"remove it, and run the same command again") from None
    without = [symbol for symbol, token in zip(symbols, tokens) if token is None]
    return np.array([end if token is None else token for token in tokens], np.int64), without


# ---- generating: chunks in processes ---------------------------------------------------------------

def _run_chunks(make, jobs, workers):
    """Call make(*job) for every job (index, count, folder, plan, ...) that has no valid part file yet."""
    folder = jobs[0][2]
    todo = [job for job in jobs if not _finished(*job)]
    total, left = (sum(job[1] for job in some) for some in (jobs, todo))
    with tqdm(total=total, initial=total - left, desc=str(folder), unit="example", mininterval=0.5) as bar:
        if min(workers, len(todo)) <= 1:
            for job in todo:
                make(*job)
                bar.update(job[1])
            return
        # "spawn": a forked copy of a process that has used torch or threads can hang.
        context, others = multiprocessing.get_context("spawn"), multiprocessing.active_children()
        with ProcessPoolExecutor(min(workers, len(todo)), context, _start_worker) as pool:
            running = {pool.submit(make, *job): job[1] for job in todo}
            try:
                for done in as_completed(running):
                    done.result()
                    bar.update(running[done])
            except KeyboardInterrupt:
                for worker in multiprocessing.active_children():
                    if worker not in others:
                        worker.terminate()
                raise
            except BrokenProcessPool:
                raise UserError(f"{folder}: a worker was killed (out of memory?); the same command goes on "
                                "from here, with a smaller --workers if need be") from None
            finally:
                pool.shutdown(cancel_futures=True)


def _start_worker():
    """A worker leaves Ctrl-C to its parent, but does not outlive it, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _finished(index, count, folder, plan, row, split=None, start=0):
    part = _load_part(folder, index, plan)
    if part is not None and "checksum" in part:
        return int(part["checksum"]) == _checksum(folder, split, start, count)
    return part is not None and len(part["labels"]) == count


def _part_path(folder, index):
    return folder / "parts" / f"{index:06d}.npz"


def _save_part(folder, index, plan, **arrays):
    _replace(_part_path(folder, index), lambda file: np.savez(file, plan=json.dumps(plan), **arrays))


def _load_part(folder, index, plan):
    """The arrays of a part file, or None when it is missing, damaged, or of another plan."""
    try:
        with np.load(_part_path(folder, index), allow_pickle=False) as part:
            arrays = dict(part)                           # the zip format checks a checksum of each array
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error):
        return None
    return arrays if str(arrays.pop("plan", "")) == json.dumps(plan) else None


# ---- files of a prepared set ----------------------------------------------------------------------

def _replace(path, save):
    """Write `path` by save(file) under a temporary name, then rename: it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb") as file:
        save(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _save(path, array):
    _replace(path, lambda file: np.save(file, array))


@contextlib.contextmanager
def _locked(path, busy):
    """Hold a lock file; it is released when this process ends, however it ends."""
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{busy}; waiting", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _write_json(path, value):
    _replace(path, lambda file: file.write(json.dumps(value, indent=1).encode()))


def _read_json(path):
    try:
        value = json.loads(path.read_text())
        return value if isinstance(value, dict) else None
    except (OSError, ValueError):
        return None


def _create(path, shape, dtype=np.uint8):
    """A writable array in a .npy file; what is there already is kept when it has the right shape."""
    try:
        array = np.load(path, mmap_mode="r+", allow_pickle=False)
        if array.shape == shape and array.dtype == dtype:
            return array
    except (OSError, ValueError, EOFError):
        pass
    array = np.lib.format.open_memmap(path, "w+", dtype, shape)
    # Room is taken now: a disk that turns out full under mapped memory kills the process without a word.
    if hasattr(os, "posix_fallocate"):
        with open(path, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return array


def _plain(row):
    """What a row says about the examples, as it reads back from a file."""
    return {key: value for key, value in json.loads(json.dumps(asdict(row))).items()
            if key not in ("sizes", "mask", "source", "names", "subset")}


def _how(task, data_dir):
    """What a user types to prepare a task."""
    where = "" if str(data_dir) == "data" else f" --data-dir {shlex.quote(str(data_dir))}"
    raw = "" if TASKS[task].make or TASKS[task].source.archives else " --raw DIR"
    return f"python data.py --task {task}{where}{raw}"


def _redo(folder, task, data_dir):
    return f"run: rm -r {shlex.quote(str(folder))} && {_how(task, data_dir)} (and the flags it was made with)"


def _read_meta(folder, task, data_dir):
    """meta.json of a prepared task; None where there is none, UserError where it is not whole."""
    if not (folder / "meta.json").exists():
        return None
    meta = _read_json(folder / "meta.json") or {}
    arrays = {f"{split}_{name}.npy" for split in SPLITS for name in "xy"}
    if not ({"sizes", "asked", "seed", "source", "grouped", "row", "found", "files"} <= meta.keys()
            and isinstance(meta["files"], dict) and arrays <= meta["files"].keys()):
        raise UserError(f"{folder / 'meta.json'} is damaged, or of an older version; {_redo(folder, task, data_dir)}")
    return meta


def _check_meta(meta, folder, task, data_dir, asked=None):
    """UserError unless the set is the one asked for, of today's row, and its files have their full size."""
    if meta["row"] != _plain(TASKS[task]):
        raise UserError(f"{folder} was made with other parameters of {task}; {_redo(folder, task, data_dir)}")
    for key, value in (asked or {}).items():
        if value is not None and meta[key] != value:
            raise UserError(f"{folder} was made with {key} {meta[key]}, not {value}; leave out that flag, "
                            f"or run: rm -r {shlex.quote(str(folder))}")
    for name, entry in meta["files"].items():
        size = (folder / name).stat().st_size if (folder / name).exists() else 0
        if size != entry["bytes"]:
            raise UserError(f"{folder / name} is cut short: {size:,} of {entry['bytes']:,} bytes; "
                            f"{_redo(folder, task, data_dir)}")


# ---- --list, --show ------------------------------------------------------------------------------

def print_tasks(data_dir):
    """The TASKS table for people: two lines a task."""
    for name, row in TASKS.items():
        sizes = " / ".join(f"{size:,}" for size in row.sizes)
        classes = f"{row.classes} classes" if row.classes else "regression"
        shape = f"{row.documents} x {row.length:,}" if row.documents > 1 else f"{row.length:,}"
        print(f"{name:16} {row.kind:10}  length {shape:9}  channels {row.channels}  {classes:10}  {sizes}")
        urls = [archive.urls[0].split("/")[2] for archive in row.source.archives]
        size = sum(archive.bytes or 0 for archive in row.source.archives)
        origin = (f"generated, or --raw: {row.source.accepts}" if row.make else
                  f"only --raw: {row.source.accepts}" if not urls else
                  f"{f'{size:,} bytes' if size else 'some hundred MB'} from {urls[0]}")
        try:
            _ready(name, data_dir)
            state = "prepared"
        except UserError:
            state = "damaged" if (Path(data_dir) / name / "meta.json").exists() else "not prepared"
        print(f"{'':16} {state}; {origin}; licence: {row.source.licence}")


SHOWN = 4                  # examples on a contact sheet
ZOOM = 400                 # steps of a waveform on its right-hand side


def show(task, data_dir, path):
    """Contact sheet of a few training examples: on the left as they are, on the right with the hidden positions of one
    step of masked pretraining. Writes a picture to `path`."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    row, split = load_task(task, data_dir), load(task, "train", data_dir)
    members = order(len(split), 0, 0)[:SHOWN]
    x, y, lengths = split.batch(members)
    _, *documents, l = x.shape if row.kind == "tokens" else x.shape[:-1]
    hidden = choose_positions((len(members), *documents, row.length), row.mask, 0, 0)[..., :l]
    meta = _read_meta(Path(data_dir) / task, task, data_dir)
    width, height = (5.4, 2.6) if row.side else (12, 2.0)
    figure, axes = plt.subplots(len(members), 2, figsize=(width, height * len(members)), squeeze=False,
                                layout="constrained")
    for i, (before, after) in enumerate(axes):
        if row.kind == "tokens":
            symbols = ["<mask>", "<pad>", "<unk>", "<eos>", *meta["found"].get("symbols", SYMBOLS)]
            between = " " if row.family == "listops" else ""
            documents = zip(*(array.reshape(row.documents, -1) for array in (x[i].numpy(), hidden[i])),
                            lengths[i].reshape(-1).tolist())
            documents = [(ids[:n], where[:n]) for ids, where, n in documents]
            for axis, cover in ((before, False), (after, True)):
                _show_text(axis, ["".join(("█" * len(symbols[t]) if cover and h else symbols[t]) + between
                                          for t, h in zip(ids, where)) for ids, where in documents])
        elif row.side:
            _show_image(before, after, row, x[i].numpy(), hidden[i])
        else:
            _show_waves(before, after, normalise(row, x[i:i + 1])[0].numpy(), hidden[i])
        value = y[i].item()
        if row.classes:
            label = f"label {value}" + (f": {row.names[value]}" if row.names else "")
        else:
            low, high = meta["found"]["label_range"]
            label = f"target {value:.2f} (in units: {low + (value + 1) / 2 * (high - low):.1f})"
        before.set_title(label, fontsize=9, loc="left")
        after.set_title(f"{row.mask:.0%} hidden", fontsize=9, loc="left")
    figure.suptitle(f"{task}: before and after masking", fontsize=11)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise UserError(f"cannot write --show {path}: {error.strerror}") from None
    finally:
        plt.close(figure)


def _show_text(axis, texts, width=88, rows=11):
    """The beginning of one text or several, in lines of `width` characters."""
    rows = rows // len(texts)
    lines = []
    for text in texts:
        text = re.sub(r"\s", " ", text)
        lines += [text[i:i + width] for i in range(0, min(len(text), rows * width), width)]
        lines[-1] += " ..." if len(text) > rows * width else ""
        lines.append("")
    axis.text(0, 1, "\n".join(lines), family="monospace", fontsize=7.6, va="top", transform=axis.transAxes,
              parse_math=False)
    axis.axis("off")


def _show_image(before, after, row, x, hidden):
    image = np.repeat(x, 3 // row.channels, axis=1).reshape(row.side, row.side, 3)
    covered = image.copy()
    covered[hidden.reshape(row.side, row.side)] = (214, 90, 30)
    for axis, picture in ((before, image), (after, covered)):
        axis.imshow(picture, interpolation="nearest")
        axis.axis("off")


def _show_waves(before, after, x, hidden):
    """All of it; and a few steps from its loudest point on, hidden ones at 0 as the model gets them."""
    start = int(np.clip(np.abs(x).sum(1).argmax() - ZOOM // 4, 0, len(x) - ZOOM))
    steps = np.arange(start, start + ZOOM)
    for c, channel in enumerate(x.T):
        before.plot(channel, linewidth=0.5, color=f"C{c}")
        after.plot(steps, np.where(hidden[steps], np.nan, channel[steps]), ".-", markersize=2.5, linewidth=0.8,
                   color=f"C{c}")
    before.axvspan(start, start + ZOOM, color="0.85", zorder=0)
    gone = steps[hidden[steps]]
    after.plot(gone, np.zeros(len(gone)), ".", markersize=2.5, color="#d65a1e", label="hidden")
    after.legend(loc="upper right", fontsize=7)
    for axis in (before, after):
        axis.set_xlabel("step", fontsize=7)
        axis.tick_params(labelsize=7)


# ---- command line --------------------------------------------------------------------------------

def main(argv=None):
    """The commands of the module's docstring -> exit code: 0, 2 after a user's mistake, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="data.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", help="one of: " + " ".join(TASKS))
    parser.add_argument("--data-dir", default="data",
                        help="tasks are prepared in DATA_DIR/TASK, downloads kept in "
                        "DATA_DIR/downloads (default: data)")
    for split in SPLITS:
        parser.add_argument(f"--{split}", type=int, metavar="N", help=f"{split} size (default: the row's)")
    parser.add_argument("--raw", "--lra-dir", metavar="DIR", help="read the official files in DIR: an LRA release for "
                        "listops, pathfinder*, pathx* and retrieval; what a download would bring for the others")
    parser.add_argument("--grouped", action="store_true", help="bidmc: split by recording instead of by window")
    parser.add_argument("--seed", type=int, help="of the generator (default: 0)")
    parser.add_argument("--workers", type=int, metavar="K", help="processes of the generator (default: all cores)")
    parser.add_argument("--show", metavar="FILE", help="prepare, then draw some examples before and after masking")
    parser.add_argument("--stats", action="store_true", help="print the generator beside official figures")
    parser.add_argument("--stats-images", type=int, metavar="N", help="size of --stats (default: 2000, 300)")
    parser.add_argument("--list", action="store_true", help="print the tasks")
    args = parser.parse_args(argv)
    try:
        _command(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _command(args):
    if args.list:
        return print_tasks(args.data_dir)
    if args.task is None:
        raise UserError(f"no --task; the tasks are: {' '.join(TASKS)}")
    row = task_row(args.task)
    if args.workers is not None and args.workers < 1:
        raise UserError(f"--workers {args.workers}: must be positive")
    if args.stats_images is not None and args.stats_images < 1:
        raise UserError(f"--stats-images {args.stats_images}: must be positive")
    if args.show is not None and Path(args.show).suffix.lower() not in (".png", ".pdf", ".svg"):
        raise UserError(f"--show '{args.show}': give a file name that ends in .png, .pdf or .svg")
    if args.stats:
        if row.make is None:
            raise UserError(f"--stats is for generated tasks; {args.task} is not generated")
        if row.side and row.side not in OFFICIAL:
            raise UserError(f"{args.task}: no official figures for {row.side} px; there are for 32, 64, 128 and 256")
        count = args.stats_images or (300 if (row.side or 0) > 32 else 2000)
        print_stats = print_listops_stats if row.family == "listops" else print_image_stats
        return print_stats(args.task, row, count, args.seed or 0)
    asked = [getattr(args, split) for split in SPLITS]
    sizes = None                                          # the row's, or whatever is there
    if any(size is not None for size in asked):
        sizes = [default if size is None else size for size, default in zip(asked, row.sizes)]
    folder = prepare(args.task, args.data_dir, sizes, args.seed, args.raw, args.workers, args.grouped)
    meta = _read_meta(folder, args.task, args.data_dir)
    counts = ", ".join(f"{split} {size:,}" + (f" (official: {full:,})" if size != full and not meta["asked"] else "")
                       for split, size, full in zip(SPLITS, meta["sizes"], row.sizes))
    source = f"generated, seed {meta['seed']}" if meta["source"] == "generated" else meta["source"]
    print(f"{folder}: ready ({counts}; {source}{', split by recording' if meta['grouped'] else ''})")
    if args.show:
        show(args.task, args.data_dir, args.show)
        print(f"{args.show}: written")


if __name__ == "__main__":
    sys.exit(main())
