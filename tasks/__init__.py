"""Tasks: one file per task or family of tasks. A file dropped into this folder is a --task of every script.
For a first reading this file and listops.py are enough.

    cp tasks/listops.py tasks/mine.py        change what is drawn and the names in the last lines

A file opens with one worked example, then says what is read or drawn; `prepare(task, request)` saves the splits, and
the last lines add rows to TASKS. Whoever changes what is drawn changes `make` too, or removes data/TASK: what is there
already is taken. `making.py` has what several of them use, `picture.py` draws examples, `snakes.py` is
Pathfinder's generator. Here: what a task is, and how tasks are called.
"""
import hashlib
import os
import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from files import UserError, load_room, reading

SPLITS = ("train", "val", "test")
MASK, PAD, UNK, EOS = 0, 1, 2, 3         # ids of the special symbols, in every task of symbols
SPECIAL = ("<mask>", "<pad>", "<unk>", "<eos>")
LEVELS = tuple(str(level) for level in range(256))                        # of gray


@dataclass(frozen=True)
class Source:
    """Where a data set comes from."""
    urls: tuple                     # to download; none: generated, or only with --raw
    accepts: str                    # what --raw DIR may hold; "nothing": the flag has no meaning
    licence: str
    bytes: int | None = None        # of the download; None, and no sha256: not published
    sha256: str | None = None

    @property
    def raw(self):
        return not self.accepts.startswith("nothing")


@dataclass(frozen=True)
class Task:
    """Everything that defines a data set. `open_task` fills in what only the prepared data can tell."""
    family: str                     # what it is called where several tasks are of one kind
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
    make: object = None             # parameters of the generator, or its version; None: there is none
    distinct: bool = False          # an image that came up before is replaced, so that splits are disjoint
    symbols: tuple = ()             # names of the ids 0 .. vocab - 1
    ends: tuple = ()                # filled in: the targets, in their unit, that -1 and 1 stand for
    data: dict | None = None        # filled in: which data set this is (source, seed, sizes, checksum of the labels)
    # By what `repr` shows a prepared set is known, so the rest is left out there.
    labelled: int | None = field(default=None, repr=False)     # filled in: so many training examples, the first, have
    ragged: bool = field(default=False, repr=False)            # labels (None: all); samples of unequal lengths
    prepare: object = field(default=None, repr=False)     # function(task, request): reads or draws, saves all splits
    # Tables of sizes and of recipes, as in recipes.py but without the column `task`; where there are none, the lines
    # there whose task is * count.
    models: str = field(default="", repr=False)
    recipes: str = field(default="", repr=False)

    @property
    def own(self):
        """Whether it is a user's data, file:PATH or ucr:NAME."""
        return self.family in OWN

    @property
    def between(self):
        """What stands between printed symbols: nothing if they are letters."""
        return " " if any(len(symbol) > 1 for symbol in self.symbols[len(SPECIAL):]) else ""


TASKS = {}                       # {name: Task}, filled by the files of this folder
OWN = {}                         # {prefix: function(what follows the colon) -> Task}: your data, file:PATH and ucr:NAME


# ---- names -----------------------------------------------------------------------------------------------------------

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


def declared(name):
    """The Task of a name, without what only its data can tell."""
    prefix, _, rest = name.partition(":")
    return TASKS[name] if name in TASKS else OWN.get(prefix, OWN["file"])(rest)


# ---- what a checkpoint and meta.json keep of a task ------------------------------------------------------------------

def kept(task):
    """What a checkpoint keeps of a task, in plain values: all but where its data come from. `restored` reads it."""
    return {one.name: getattr(task, one.name) for one in fields(Task)
            if one.name not in ("source", "make", "prepare", "models", "recipes")}


def restored(record):
    """-> Task."""
    with reading("this checkpoint is of another version", "make the run again"):
        return replace(OWN["file"](""), **record)


def tuples(record):
    """{key: value} from JSON, with tuples in place of lists, as a Task has them."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}


def check(name, task):
    """ValueError where an entry of TASKS cannot be a task. (Its tables of sizes and recipes: recipes.py.)"""
    if not re.fullmatch(r"\w+", name):                    # it is part of the names of folders
        raise ValueError(f"TASKS[{name!r}]: a name consists of letters, digits and _")
    if not isinstance(task, Task) or not callable(task.prepare):
        raise ValueError(f"TASKS[{name!r}] must be a Task with a function prepare(task, request)")
    if not isinstance(task.sizes, tuple) or len(task.sizes) != len(SPLITS):
        raise ValueError(f"TASKS[{name!r}]: sizes must be (train, val, test)")
    if task.make is None and not task.source.urls and not task.source.raw:
        raise ValueError(f"TASKS[{name!r}]: a generated set needs make, its parameters or version")


homes = load_room(Path(__file__).parent, TASKS, "--task", check)           # {task: its file}
