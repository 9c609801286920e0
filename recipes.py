"""The paper's tables 4 to 6: the size and the recipe of each model on each task, and how a run
finds its line.

    python pretrain.py --task pathx --model s4 --help         print the sizes and the recipe of a
                                                              task and model; also of finetune.py
    python pretrain.py --task pathx --model s4 --arch d=64,layers=3 --lr 1e-3      change both

These are the settings behind the paper's numbers. A first reading may skip the lower half, which
looks lines up. An architecture in zoo/ adds tables without the column `model`. A task may add
tables without the column `task`.

In all tables tasks and models are shell patterns, a|b stands for two rows, and the first row that
matches counts. A dash means "does not apply". A model without its own rows uses those of the model
named in its `like` (models.py)."""

import contextlib
import fnmatch
import functools
import itertools
import math
from argparse import ArgumentTypeError

from files import UserError
from models import MODELS, Attention, SizeError, keys_of
from tasks import TASKS

# ---- Sizes ---------------------------------------------------------------------------------------

# transformer  paper table 4, rows with a dagger: sizes of Tay et al. 2020; sinusoidal positions
# rotary       paper table 4, "Transformer + Rotary"; on sCIFAR the sizes of Image (appendix C.1.6)
# block: attention is cut into blocks of that many positions. Transformers have LayerNorm before
# attention and FF, and no dropout. These rows are not the paper's: demos; *_mini, the stand-ins of
# `run_all.sh --preset mini`; file:* and ucr:*, your data, for a width of 64 (`fit` widens or
# narrows them); and *, any other task.
ATTENTION_SIZES = """
task                           model                     layers   d heads   ff block
listops|text                   transformer|rotary             6 512     8 1024     -
retrieval                      transformer                    4 128     4  512     -
retrieval|pathfinder           rotary                         6 128     4  512     -
image                          transformer                    3  64     4  128     -
image|scifar                   rotary                         6 256     4  512     -
pathfinder                     transformer                    4 128     8  128     -
pathx|pathx256                 transformer                    4 128     8  128  4096
pathx|pathx256                 rotary                         5 128     4  512  4096
sc                             rotary                         4 128     4  128  4000
bidmc_*                        rotary                         4 128     4  128     -
text256|text_demo|file:*|ucr:* transformer|rotary             3  64     2  128     -
listops_demo                   transformer|rotary             3  64     4  128     -
image_mini|scifar_mini         transformer|rotary             3  28     2   56     -
pathfinder_demo|*_mini         transformer|rotary             3  32     2   64     -
*                              rotary                         4 128     4  256     -
"""

# s4           Gu et al. 2022, table 11, as the paper's official configurations spell them out
# n_ssm        the number of copies of (A, P, B), which the d channels share
# dlr          S4's depth and width, more states, LayerNorm (appendix C.1.3); dt_min, dt_max: twice
#              its smallest and largest decay rate
# norm, place  the norm, and its place before the layer (pre) or after the residual sum (post)
# dt_lr        learning rate of the step size; "main" is the rate of the rest of the model
# ssm_lr       learning rate of A, P, B (DLR: of all three parameters of its kernel)
# dropout      drops whole channels of a sequence, inside the layer and on the residual branch
# On Speech Commands the official S4 pretrains with LayerNorm and finetunes with BatchNorm, by
# accident; here both stages use BatchNorm.
SSM_SIZES = """
task                        model layers   d state n_ssm norm  place dt_min dt_max  dt_lr ssm_lr dropout
listops                     s4         8 128    64   128 batch post   0.001    0.1   main  0.001       -
listops                     dlr        8 128  1024     - layer post  0.0001  0.001      - 0.0001       -
text|retrieval              s4         6 256    64   256 batch pre    0.001    0.1   main  0.001       -
text|pathx                  dlr        6 256  1024     - layer pre   0.0001  0.001      - 0.0001       -
image                       s4         6 512    64     2 layer post   0.001    0.1   main  0.001     0.1
image                       dlr        6 512  1024     - layer pre   0.0001  0.001      - 0.0001       -
pathfinder                  s4         6 256    64   256 batch pre    0.001    0.1  0.001  0.001       -
pathx|pathx256              s4         6 256    64   256 batch pre   0.0001    0.1 0.0005 0.0005       -
sc                          s4         6 128    64    64 batch pre    0.001    0.1  0.001  0.001       -
scifar                      s4         6 512    64     2 layer post   0.001    0.1  0.001  0.001     0.1
bidmc_*                     s4         6 128   256     2 layer pre    0.001    0.1  0.001  0.001       -
pathfinder_demo             s4         3  32    16    32 batch pre    0.001    0.1  0.001  0.001       -
pathfinder_demo             dlr        3  32   128     - layer pre    0.001    0.1      -  0.001       -
*_demo|text256              s4         3  64    16    64 batch pre    0.001    0.1  0.001  0.001       -
*_demo|text256|file:*|ucr:* dlr        3  64   128     - layer pre    0.001    0.1      -  0.001       -
image_mini|scifar_mini      s4         3  48    16     2 batch pre    0.001    0.1  0.001  0.001       -
*_mini                      s4         3  48    16    48 batch pre    0.001    0.1  0.001  0.001       -
*_mini                      dlr        3  48   128     - layer pre    0.001    0.1      -  0.001       -
file:*|ucr:*                s4         3  64    32     2 batch pre    0.001    0.1  0.001  0.001       -
*                           s4         4 128    64     2 layer pre    0.001    0.1  0.001  0.001       -
*                           dlr        4 128   256     - layer pre    0.001    0.1      -  0.001       -
"""

# ---- Recipes -------------------------------------------------------------------------------------

# One line per (task, model, objective), for both stages, as the paper's tables 4 to 6 print it. A
# cell is pretraining/finetuning/from scratch; if it has fewer values, the last one serves the rest.
# A dash in place of an lr means that the line does not apply to that start. length: of the run, in
# epochs (50e) or steps (1300); the best checkpoint is used. eval: steps between evaluations, by
# default an epoch. The masking ratio is the task's (tasks/). A batch of Retrieval counts pairs.
# Sources: the paper's tables 4 to 6 and appendix C.1; for its gaps the official configurations; for
# S4 from scratch Gu et al. 2022. results/recipes.md lists each cell's source, gaps and misprints.
RECIPES = """
task       model       objective loss pool head   lr             wd   batch     length   warmup     schedule
listops    transformer masked    ce   mean linear 1e-3/1e-4      0.1  128/64    100e     2000       const
listops    transformer causal    ce   last linear 5e-4           0.1  32/128    100e     2000       const
listops    rotary      masked    ce   mean linear 1e-3/1e-4      0.05 256/64    100e     2000       const
listops    s4          masked    ce   mean linear 1e-3/1e-3/1e-2 0.05 128/16/50 100e/40e 2000       const/const/cos
listops    s4_rand     masked    ce   mean linear 1e-3/1e-3/5e-4 0.05 32/16     100e/40e 2000       const
listops    dlr         masked    ce   mean linear 1e-3/5e-4      0.05 128/16    100e/40e 2000       const
listops    dlr_rand    masked    ce   mean linear 5e-4/5e-4/1e-4 0.05 32/64/16  100e/40e 2000       const
text       transformer masked    ce   mean mlp    5e-4/1e-4      0.1  32/64     32e/65e  5000/2000  const
text       transformer causal    ce   mean mlp    1e-3/1e-4      0.1  32/64     32e/65e  5000/2000  const
text       rotary      masked    ce   mean mlp    5e-4           0.1  8/64      32e/65e  5000/2000  const
text       s4          masked    ce   mean linear 5e-4/5e-4/1e-2 0.05 8/16      32e      1000/5000  const/cos
text       s4_rand     masked    ce   mean linear 1e-3           0.05 32/16     32e      1000/5000  const/cos
text       dlr         masked    ce   mean linear 5e-4/1e-3/5e-4 0.05 8/16      32e      1000/2000  const
text       dlr_rand    masked    ce   mean linear 5e-4/5e-4/1e-3 0.05 8/16      32e      1000/2000  const
retrieval  transformer masked    ce   mean pair   5e-3/5e-4      0    32/16     32e      2000/5000  const
retrieval  transformer causal    ce   mean pair   5e-3/1e-3      0    32/48     32e      2000/5000  const
retrieval  rotary      masked    ce   mean pair   5e-3/5e-4      0    32/16     32e      2000/5000  const
retrieval  s4          masked    ce   mean pair   5e-4/5e-4/1e-2 0.05 8/256/64  20e      2500       const/const/cos
image      transformer masked    l1   max  mlp    1e-3           0    32/16     50e/200e 2500/2000  const
image      transformer causal    l1   max  mlp    5e-3/1e-3      0    32        50e/200e 2500/2000  const
image      rotary      masked    l1   mean mlp    1e-3           0    32/64     200e     2000       const
image      s4          masked    l1   mean linear 1e-3/1e-3/1e-2 0.05 32/512/50 200e     1000       const/cos
image      s4_rand     masked    l1   mean linear 1e-3/5e-4/1e-4 0.05 32/64/128 200e     1000       const/cos
image      dlr         masked    l1   mean linear 1e-3/1e-3/5e-4 0.05 32/64     200e     1000       const
image      dlr_rand    masked    l1   mean linear 1e-3           0.05 32/64/16  200e     1000       const
pathfinder transformer masked    ce   mean linear 1e-3/5e-4      0    16        50e/200e 2500/5000  const
pathfinder transformer causal    ce   mean linear 1e-3           0    128/256   50e/200e 2500/5000  const
pathfinder rotary      masked    ce   mean linear 1e-3/5e-4      0    32/64     50e/200e 2500/5000  const
pathfinder s4          masked    ce   last linear 1e-3/1e-3/4e-3 0.03 8/64      200e     2500       const/const/cos
pathx      transformer masked    ce   max  linear 5e-4           0    8/32      200e     5000       const
pathx      transformer causal    ce   max  linear 1e-3/5e-4      0    8/256     200e     5000       const
pathx      rotary      masked    ce   max  linear 1e-3/5e-4      0    8/32      200e     5000       const
pathx      s4          masked    ce   max  linear 1e-3/1e-3/5e-4 0.05 8/64/16   50e      5000/10000 const/cos
pathx      s4_rand     masked    ce   max  linear 1e-3/5e-4      0.05 4/16      50e      5000/10000 const/cos
pathx      dlr         masked    ce   max  linear 5e-4           0.05 8/64      50e      5000       const/cos
pathx      dlr_rand    masked    ce   max  linear 5e-4           0.05 8/16/64   50e      5000       const/cos
pathx256   s4          masked    ce   max  linear 1e-3/1e-3/1e-4 0.05 8/64/16   50e      5000/10000 const/cos
sc         rotary      masked    l1   max  linear 1e-3           0    8/256     200e     2000       const/cos
sc         rotary      causal    l1   max  linear 1e-3           0    32/256    200e     2000       const/cos
sc         s4          masked    l1   max  linear 1e-3/5e-3/1e-2 0.05 32/16     40e      1000       cos
sc         s4          causal    l1   max  linear 1e-3/5e-4/1e-2 0.05 32/16     40e      1000       cos
scifar     rotary      masked    l1   mean mlp    1e-3           0    32/64     200e     2000       const
scifar     s4          masked    l1   mean linear 1e-3/5e-4/1e-2 0.05 32/64/50  200e     2000/1000  const/cos
bidmc_spo2 rotary      masked    l1   max  linear 5e-4/1e-4      0    16/8      500e     500/0      const/step
bidmc_*    rotary      masked    l1   max  linear 5e-4           0    16/32     500e     500/0      const/step
bidmc_hr   s4          masked    l1   mean linear 1e-3           0.05 64/64/32  500e     500/0      const/step
bidmc_*    s4          masked    l1   mean linear 1e-3/1e-3/1e-2 0.05 64/64/32  500e     500/0      const/step
"""

# These recipes are not the paper's: attention on PathX-256, with PathX's numbers; the demos;
# *_mini, the stand-ins of `run_all.sh --preset mini`; and *, a default for tasks for which the
# model has no other line. From scratch, demos train for as many steps as both stages together; the
# others, as in the paper, for as many steps as finetuning.
SMALL_RECIPES = """
task            model              objective     loss pool head   lr        wd batch length         warmup schedule eval
pathx256        transformer|rotary masked|causal ce   max  linear 1e-3/5e-4 0  8/32  200e           5000   const    -
text256         transformer|rotary masked        ce   max  linear 3e-3/1e-3 0  16    4000/2000/6000 50     cos      -
text256         s4|dlr             masked        ce   max  linear 4e-3      0  16    4000/2000/6000 50     cos      -
text_demo       transformer|rotary masked        ce   max  linear 3e-3/1e-3 0  32    1300/700/2000  50     cos      -
text_demo       s4|dlr             masked        ce   max  linear 4e-3      0  32    1300/700/2000  50     cos      -
listops_demo    transformer|rotary masked        ce   mean linear 2e-3/1e-3 0  32    700/1000/1700  50     cos      -
listops_demo    s4|dlr             masked        ce   mean linear 4e-3      0  32    700/1000/1700  50     cos      -
pathfinder_demo transformer|rotary masked        ce   mean linear 3e-3/1e-3 0  16    1300/1400/2700 50     cos      500
pathfinder_demo s4|dlr             masked        ce   mean linear 1e-2      0  16    1000/900/1900  50     cos      500
listops_mini    transformer|rotary masked|causal ce   mean linear 3e-3      0  16    2000           50     cos      200
text_mini       transformer|rotary masked|causal ce   max  linear 3e-3      0  16    2000/700       50     cos      200
image_mini      transformer|rotary masked|causal l1   mean linear 3e-3      0  16    1000/700       50     cos      200
scifar_mini     transformer|rotary masked|causal l1   mean linear 3e-3      0  16    1000/700       50     cos      200
pathfinder_mini transformer|rotary masked|causal ce   mean linear 3e-3/1e-3 0  16    1200/1000      50     cos      200
pathx*_mini     transformer|rotary masked|causal ce   mean linear 3e-3/1e-3 0  16    1300/1400      50     cos      200
listops_mini    s4|dlr             masked        ce   mean linear 4e-3/1e-2 0  16    2000           50     cos      200
text_mini       s4|dlr             masked        ce   max  linear 4e-3/1e-2 0  16    2000/700       50     cos      200
image_mini      s4|dlr             masked        l1   mean linear 4e-3/1e-2 0  16    1000/700       50     cos      200
scifar_mini     s4|dlr             masked        l1   mean linear 4e-3/1e-2 0  16    1000/700       50     cos      200
pathfinder_mini s4|dlr             masked        ce   mean linear 1e-2      0  16    1200/1000      50     cos      200
pathx*_mini     s4|dlr             masked        ce   mean linear 1e-2      0  16    1000           50     cos      200
*               transformer|rotary masked|causal -    mean -      1e-3      0  32    50e            500    cos      -
*               s4|dlr             masked|causal -    mean -      4e-3      0  32    50e            500    cos      -
"""

# Your data. From scratch they train for as many steps as both stages together (`fit` says what an
# epoch is). The fourth learning rate is for joint training, which elsewhere has that of training
# from scratch. results/ucr.md has the trial that chose lengths and rates.
OWN_RECIPES = """
task         model              objective     loss pool head lr                  wd batch length      warmup schedule
file:*|ucr:* transformer|rotary masked|causal -    mean -    3e-3/1e-3/1e-3/3e-3 0  16    10e/10e/20e 50     cos
file:*|ucr:* s4|dlr             masked|causal -    mean -    4e-3/3e-3/3e-3/1e-2 0  16    10e/10e/20e 50     cos
"""

# ---- Reading tables ------------------------------------------------------------------------------


@functools.cache
def read_table(text):
    """Read a whitespace table -> list of {column: string} in row order. Cells that are a dash are
    left out, and a line with a|b in a cell becomes a row with a and one with b."""
    head, *lines = [line.split() for line in text.strip().splitlines() or [""]]
    rows = []
    for line in lines:
        assert len(line) == len(head), f"{len(line)} cells, the head has {len(head)}: {line}"
        for cells in itertools.product(*(cell.split("|") for cell in line)):
            rows.append({key: cell for key, cell in zip(head, cells) if cell != "-"})
    return rows


def rows(kind, *tables):
    """Return all rows of a kind (sizes, recipes): of tasks, of `tables`, of models."""
    field = "models" if kind == "sizes" else kind
    all_rows = []
    for name, task in TASKS.items():
        all_rows += [{"task": name} | row for row in read_table(getattr(task, field))]
    for text in tables:
        all_rows += read_table(text)
    for name, model in MODELS.items():
        all_rows += [row | {"model": name} for row in read_table(getattr(model, kind))]
    return all_rows


def matching(rows, model, **wanted):
    """Return the first of `rows` for this model whose patterns match everything wanted, or None. A
    model's own rows come before those of the model named in its `like`."""
    while model is not None:
        values = wanted | {"model": model}
        for row in rows:
            if all(fnmatch.fnmatchcase(value, row[key]) for key, value in values.items()):
                return row
        model = MODELS[model].like
    return None


def number(text):
    """Convert a cell: '64' -> 64, '1e-3' -> 0.001, 'batch' -> 'batch'."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def assignments(text):
    """Parse 'd=64,layers=3' -> {"d": 64, "layers": 3}."""
    pairs = [pair.strip().partition("=") for pair in text.split(",")]
    if not all(key and value for key, _, value in pairs):
        raise ArgumentTypeError(f"must be key=value,key=value, got {text}")
    return {key: number(value) for key, _, value in pairs}


INHERITED = {"arch", "train_fraction"}  # settings that finetuning takes from pretraining


def settings(changed):
    """Flatten `changed` of a result.json, the settings of both stages that differ from the recipe:
    {"lr": 0.01, "arch.d": 64, "pretraining.mask": 0.5}. A setting that finetuning inherits is
    listed once."""
    flat = {}
    for name, value in changed.items():
        if name == "arch":
            flat |= {f"arch.{key}": size for key, size in value.items()}
        elif name != "pretraining":
            flat[name] = value
    pretraining = settings(changed["pretraining"]) if "pretraining" in changed else {}
    for name, value in pretraining.items():
        if name.split(".")[0] not in INHERITED or flat.get(name) != value:
            flat[f"pretraining.{name}"] = value
    return flat


# ---- How a run finds its line --------------------------------------------------------------------


def arch(task, model, /, **overrides):
    """Return a model's sizes on a task as a plain dict; None if there is no row. Later sources
    override earlier ones: defaults of its keys, its row, numbers among its extras, its own
    changes, `overrides`. SizeError for an override that nothing reads."""
    row = matching(rows("sizes", ATTENTION_SIZES, SSM_SIZES), model, task=task)
    if row is None:
        return None
    keys = keys_of(model, overrides.get("ffn", "dense"))
    defaults = {name: key.default for name, key in keys.items() if key.default is not ...}
    shown = {name: value for name, value in defaults.items() if keys[name].shown}
    # their order in run names
    sizes = {name: shown[name] for name in shown if name in ("block", "norm", "dropout")}
    sizes |= {key: number(cell) for key, cell in row.items() if key != "task"} | {"model": model}
    sizes |= {name: value for name, value in shown.items() if name not in sizes}
    extras = MODELS[model].extras
    sizes |= {key: value for key, value in extras.items() if type(value) in (int, float)}
    for row in read_table(MODELS[model].changes):
        if fnmatch.fnmatchcase(task, row["task"]):
            sizes |= assignments(row["sizes"])
            break
    allowed = {name: value for name, value in (defaults | sizes).items() if name in keys}
    for name, value in overrides.items():
        check_size(name, value, allowed, keys, f"{model} on {task}")
    sizes |= overrides
    if "dt_min" in sizes and not 0 < sizes["dt_min"] <= sizes["dt_max"]:
        raise SizeError(
            f"dt_min={sizes['dt_min']}, dt_max={sizes['dt_max']}: must be 0 < dt_min <= dt_max"
        )
    return sizes


def check_size(name, value, usual, keys, whose):
    """Raise SizeError if a model cannot have a size. usual: its sizes without --arch."""
    if name not in usual:  # no class reads it, even if the row has it
        raise SizeError(f"--arch {name}={value}: {whose} has no {name}; it has: {' '.join(usual)}")
    key = keys[name]
    if key.kind is int:
        least = 1 if key.least is None else key.least
        wanted = [f"a whole number of at least {least}"]
        fits = type(value) is int and least <= value <= key.most
    else:
        choices = [float] if key.kind is float else [*key.kind]
        numbers = f"a number from {key.least or 0:g} to {key.most:g}"
        wanted = [numbers if choice is float else str(choice) for choice in choices]
        in_range = type(value) in (int, float) and (key.least or 0) <= value <= key.most
        fits = value in choices or (float in choices and in_range)
    if not fits:
        wanted = f"{' or '.join(wanted)}; {whose} has {usual[name]}"
        raise SizeError(f"--arch {name}={value}: {name} must be {wanted}")


# The factor on the learning rate after warm-up, a function of (step, steps, warmup). To add a
# schedule, add a line.
SCHEDULES = {
    "constant": lambda step, steps, warmup: 1.0,
    "cosine": lambda step, steps, warmup: (
        0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
    ),  # half a cosine, down to 0
    # halves after each fifth
    "step": lambda step, steps, warmup: 0.5 ** (5 * step // steps),
}
ABBREVIATIONS = dict(const="constant", cos="cosine")  # in RECIPES
# What these columns of RECIPES, and their flags, may be.
WORDS = dict(
    loss=("ce", "l1"), pool=("mean", "max", "last", "none"), head=("linear", "mlp", "pair")
)


# How a run starts, with words for messages. Stage 1 knows the first, stage 2 the others.
STARTS = dict(
    pretrain="in pretraining",
    spt="with --init",
    corpus="with a model that has trained weights",
    scratch="in training from scratch",
    joint="with --joint",
)
# Which value of a cell of RECIPES each uses.
VALUES = dict(pretrain=0, spt=1, corpus=1, scratch=2, joint=3)


def learning_rate(step, steps, args):
    """Return the factor on every group's initial learning rate."""
    if step < args.warmup:
        return (step + 1) / args.warmup
    return SCHEDULES[args.schedule](step, steps, args.warmup)


def cell(line, flag, start):
    """Return a flag's value in a line of RECIPES for a run with this start (a key of STARTS)."""
    choices = line[flag].split("/")
    return choices[min(VALUES[start], len(choices) - 1)]


def recipe_line(name, task, model, objective, start):
    """Find a run's line of RECIPES -> its name, its objective, {flag: value} for this start."""
    lines = [
        line
        for line in rows("recipes", RECIPES, SMALL_RECIPES, OWN_RECIPES)
        if fnmatch.fnmatchcase(name, line["task"]) and cell(line, "lr", start) != "-"
    ]
    named = [line for line in lines if line["task"] != "*"]
    # an objective without a recipe takes that of the masked one
    tries = [{"objective": objective}, {"objective": "masked"}] if objective else [{}]
    matches = [matching(table, model, **asked) for table in (named, lines) for asked in tries]
    line = next(filter(None, matches), None)
    if line is None:
        pairs = sorted({f"{line['model']}/{line['objective']}" for line in named or lines})
        wanted = f"{STARTS[start]} for {name}/{model}/{objective or 'masked'}"
        raise UserError(f"no recipe {wanted}; there are: {' '.join(pairs)}")
    values = {flag: number(cell(line, flag, start)) for flag in line}
    name = "/".join(values.pop(column) for column in ("task", "model", "objective"))
    length = str(values.pop("length"))
    values["epochs" if length.endswith("e") else "steps"] = int(length.removesuffix("e"))
    values["schedule"] = ABBREVIATIONS.get(values["schedule"], values["schedule"])
    values |= dict(eval_every=values.pop("eval", None), mask=task.mask)
    values.setdefault("loss", "ce" if task.channels is None else "l1")
    values.setdefault("head", "pair" if task.documents == 2 else "linear")
    if task.kind == "positions":
        values["pool"] = "none"
    return name, objective or line["objective"], values


def fit(task, examples, recipe, sizes):
    """Fit a recipe to the number and length of your examples. Return the recipe, the sizes to
    change, and a sentence that reports the choice."""
    width = 32
    if examples >= 1_000:
        width = 64 if examples < 10_000 else 128
    epoch = min(max(examples // recipe["batch"], 200), 1_000)  # in steps
    batch = min(recipe["batch"], examples)
    recipe |= dict(batch=batch, steps=recipe.pop("epochs") * epoch, eval_every=epoch // 2)
    widths = {"d", "ff", "v", "z"} & keys_of(sizes["model"]).keys()
    changed = {key: size * width // 64 for key, size in sizes.items() if key in widths}
    sentence = (
        f"{examples:,} examples: width {width} (32 below 1,000, 64 below 10,000, then 128) and "
        f"{epoch} steps per epoch (at least 200, at most 1,000)"
    )
    attention = MODELS[sizes["model"]].mixer is Attention
    if attention and task.length > 2_048 and sizes["block"] is None:
        changed["block"] = 1_024
        sentence += "; attention in blocks of 1,024 (above 2,048 positions)"
    return recipe, changed, sentence
