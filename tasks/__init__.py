"""Tasks: one file per task or family of tasks. A file added to this folder becomes a --task of
every script. For a first reading this file and listops.py are enough.

    cp tasks/listops.py tasks/mine.py    then change what it generates, and the names at the end

A file opens with one worked example; its `prepare(task, request)` saves the splits; its last lines
add rows to TASKS. `making.py` holds functions that several tasks use, `picture.py` draws examples,
`snakes.py` is Pathfinder's generator. This file defines what a task is and how tasks are named.
Your data are in own/."""

import hashlib
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from files import UserError, load_room, reading

SPLITS = ("train", "val", "test")
MASK, PAD, UNK, EOS = 0, 1, 2, 3  # ids of the special symbols, the same in every task
IGNORE = -100  # the target of a position without a label; torch's cross_entropy leaves it out
SPECIAL = ("<mask>", "<pad>", "<unk>", "<eos>")
LEVELS = tuple(str(level) for level in range(256))  # gray levels


@dataclass(frozen=True)
class Source:
    """Where a data set comes from."""

    urls: tuple  # what to download; empty: generated, or read only from --raw DIR
    accepts: str  # what --raw DIR may hold; "nothing": the flag does not apply
    licence: str
    bytes: int | None = None  # size of the download; None (likewise sha256): not published
    sha256: str | None = None

    @property
    def raw(self):
        return not self.accepts.startswith("nothing")


@dataclass(frozen=True)
class Task:
    """Everything that defines a data set. "Filled in" are fields that depend on prepared data."""

    family: str  # the name that tasks of one kind share
    length: int  # longest sequence l, <eos> included
    classes: int  # 0: regression, one value in [-1, 1]. With `target` labels: their number
    sizes: tuple  # examples in train, val, test
    mask: float  # masking ratio of self-pretraining (paper, section 2 and appendix C.3)
    source: Source
    vocab: int | None = None  # symbols of the `symbols` view (0: filled in); None: no such view
    channels: int | None = None  # channels of the `samples` view; None: no such view
    documents: int = 1  # sequences per example
    # a sample is (x / scale - mean) / std; mean, std: one number, or one per channel
    scale: float = 255
    mean: float | tuple = 0.5
    std: float | tuple = 0.5
    side: int | None = None  # images: length is side * side, row by row
    names: tuple = ()  # names of the classes; empty if they only have numbers
    subset: bool = False  # True: the source holds more examples than `sizes`
    make: object = None  # parameters of the generator, or its version; None: no generator
    distinct: bool = False  # True: repeated images are replaced, so that splits are disjoint
    symbols: tuple = ()  # names of the ids 0 .. vocab - 1
    ends: tuple = ()  # filled in: the targets, in their own unit, that -1 and 1 stand for
    data: dict | None = None  # filled in: which set this is, see `identity` in data.py
    # What an example's target is, a row of KINDS in engine/targets.py. "": a class or, if `classes`
    # is 0, a number. labels: several, uint8 (n, classes), 0 or 1. positions: a class per position,
    # int16 (n, length), or IGNORE.
    target: str = ""
    # Fields that do not identify a prepared set have repr=False, see `identifying`.
    # filled in: labelled training examples, which come first (None: all)
    labelled: int | None = field(default=None, repr=False)
    ragged: bool = field(default=False, repr=False)  # filled in: samples have unequal lengths
    gaps: bool = field(default=False, repr=False)  # filled in: samples are missing within sequences
    # filled in: an own.columns.Layout, by which new files are read
    layout: dict | None = field(default=None, repr=False)
    # filled in: what was read of your data, in two lines
    read: tuple = field(default=(), repr=False)
    # function(task, request): read or generate, save all splits
    prepare: object = field(default=None, repr=False)
    # function(task, rng) -> x, y of one example, for --fresh
    draw: object = field(default=None, repr=False)
    # Tables of sizes and of recipes, as in recipes.py but without the column `task`; empty: the
    # lines of recipes.py with task * apply.
    models: str = field(default="", repr=False)
    recipes: str = field(default="", repr=False)

    @property
    def kind(self):
        """Return the kind of target: class, number, labels or positions."""
        return self.target or ("class" if self.classes else "number")

    @property
    def own(self):
        """Return whether this is a user's data, file:PATH or ucr:NAME."""
        return self.family in OWN

    @property
    def between(self):
        """Return the separator of printed symbols: empty if they are letters."""
        return " " if any(len(symbol) > 1 for symbol in self.symbols[len(SPECIAL) :]) else ""


TASKS = {}  # {name: Task}, filled by the files of this folder
OWN = {}  # {prefix: function(what follows the colon) -> Task}: your data, filled by own/task.py


# ---- names ---------------------------------------------------------------------------------------


def full_name(name):
    """Return a task's full name, a file's with its absolute path. UserError if it is unknown."""
    kind, _, path = (name or "").partition(":")
    if kind == "file" and path:
        return f"file:{os.path.abspath(os.path.expanduser(path))}"
    if name in TASKS or re.fullmatch(r"ucr:[\w-]+", name or ""):
        return name
    problem = f"no task '{name}'" if name else "--task is missing"
    meant = f"did you mean file:{name}? " if os.path.isfile(name or "") else ""
    raise UserError(f"{problem}; {meant}the tasks are: {' '.join(TASKS)} file:PATH ucr:NAME")


def folder_name(name):
    """Return a task's name in folder names: for a file its stem and a checksum of its path."""
    name = full_name(name)
    if not name.startswith("file:"):
        return name.replace(":", "-")
    path = name.removeprefix("file:")
    stem = re.sub("[^A-Za-z0-9._-]", "_", Path(path).stem)[:100]  # a run's name is longer
    return f"file-{stem}-{hashlib.md5(os.fsencode(path)).hexdigest()[:8]}"


def declared(name):
    """Return the Task of a name, without the fields that depend on its prepared data."""
    if name in TASKS:
        return TASKS[name]
    prefix, _, path_or_name = name.partition(":")
    return OWN.get(prefix, OWN["file"])(path_or_name)


def named(task, y):
    """Turn targets into names (n,) or (n, length), "" for none; in regression, into values in the
    unit of the labels. Several labels of an example are one text."""
    names = np.array(task.names or [str(label) for label in range(task.classes)])
    y = np.asarray(y)
    if task.kind == "labels":
        return np.array([";".join(names[row.astype(bool)]) for row in y])
    if task.classes:
        return np.where(y == IGNORE, "", names[np.maximum(y, 0)])
    low, high = task.ends or (-1.0, 1.0)
    return low + (y.astype(np.float64) + 1) / 2 * (high - low)


# ---- what a checkpoint and meta.json keep of a task ----------------------------------------------


def identifying(task):
    """Return the text of all fields that shape the arrays of a prepared set."""
    return repr(replace(task, sizes=None, mask=None, source=None, names=None, subset=None))


def kept(task):
    """Return what a checkpoint keeps of a task: all but where its data come from."""
    left_out = {"source", "make", "prepare", "draw", "models", "recipes"}
    return {name: value for name, value in vars(task).items() if name not in left_out}


def restored(record):
    """Return the Task of a record that `kept` made."""
    with reading("this checkpoint is from another version of the code", "repeat the run"):
        return replace(OWN["file"](""), **record)


homes = load_room(Path(__file__).parent, TASKS, "--task")  # {task: its file}
