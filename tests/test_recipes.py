"""The recipes: the paper's numbers typed a second time, every line in use, flags that win."""

import functools
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

import recipes
from experiments import commands
from files import UserError
from models import MODELS
from own.task import FILE
from recipes import arch, learning_rate, number, read_table, recipe_line
from tasks import TASKS

# ---- the paper's numbers, typed from its tables 4, 5 and 6 and not from the code -----------------

# lr/batch of self-pretraining, of finetuning after it and from scratch, weight decay, pooling; a
# dash: not stated. From scratch: table 6 and appendix C.1.2 for S4 on BIDMC and PathX-256,
# elsewhere Gu et al. 2022; table 5 for the others. Table 5 begins with s4_rand. Its cells of three
# numbers (S4 on Text and DLR on Image, Rand Init + SPT) are read as one lr for both stages.
PAPER = """
task       model       objective spt      finetuning scratch  wd   pool
listops    transformer masked    1e-3/128 1e-4/64    -        0.1  mean
listops    transformer causal    5e-4/32  5e-4/128   -        0.1  last
listops    rotary      masked    1e-3/256 1e-4/64    -        0.05 mean
listops    s4          masked    1e-3/128 1e-3/16    1e-2/50  0.05 -
text       transformer masked    5e-4/32  1e-4/64    -        0.1  mean
text       transformer causal    1e-3/32  1e-4/64    -        0.1  mean
text       rotary      masked    5e-4/8   5e-4/64    -        0.1  mean
text       s4          masked    5e-4/8   5e-4/16    1e-2/16  0.05 -
retrieval  transformer causal    5e-3/32  1e-3/48    -        0    mean
retrieval  transformer|rotary masked 5e-3/32 5e-4/16 -        0    mean
retrieval  s4          masked    5e-4/8   5e-4/256   1e-2/64  0.05 -
image      transformer masked    1e-3/32  1e-3/16    -        0    max
image      transformer causal    5e-3/32  1e-3/32    -        0    max
image      rotary      masked    1e-3/32  1e-3/64    -        0    mean
image      s4          masked    1e-3/32  1e-3/512   1e-2/50  0.05 -
pathfinder transformer masked    1e-3/16  5e-4/16    -        0    mean
pathfinder transformer causal    1e-3/128 1e-3/256   -        0    mean
pathfinder rotary      masked    1e-3/32  5e-4/64    -        0    mean
pathfinder s4          masked    1e-3/8   1e-3/64    4e-3/64  0.03 -
pathx      transformer masked    5e-4/8   5e-4/32    -        0    max
pathx      transformer causal    1e-3/8   5e-4/256   -        0    max
pathx      rotary      masked    1e-3/8   5e-4/32    -        0    max
pathx      s4          masked    1e-3/8   1e-3/64    5e-4/16  0.05 max
pathx256   s4          masked    1e-3/8   1e-3/64    1e-4/16  0.05 max
sc         rotary      masked    1e-3/8   1e-3/256   -        0    max
sc         rotary      causal    1e-3/32  1e-3/256   -        0    max
sc         s4          masked    1e-3/32  5e-3/16    1e-2/16  0.05 -
sc         s4          causal    1e-3/32  5e-4/16    -        0.05 -
scifar     rotary      masked    1e-3/32  1e-3/64    -        0    mean
scifar     s4          masked    1e-3/32  5e-4/64    1e-2/50  0.05 -
bidmc_hr|bidmc_rr rotary masked  5e-4/16  5e-4/32    -        0    max
bidmc_spo2 rotary      masked    5e-4/16  1e-4/8     -        0    max
bidmc_hr   s4          masked    1e-3/64  1e-3/64    1e-3/32  0.05 -
bidmc_rr|bidmc_spo2 s4 masked    1e-3/64  1e-3/64    1e-2/32  0.05 -
listops    s4_rand     masked    1e-3/32  1e-3/16    5e-4/16  0.05 -
text       s4_rand     masked    1e-3/32  1e-3/16    1e-3/16  0.05 -
image      s4_rand     masked    1e-3/32  5e-4/64    1e-4/128 0.05 -
pathx      s4_rand     masked    1e-3/4   5e-4/16    5e-4/16  0.05 max
listops    dlr         masked    1e-3/128 5e-4/16    5e-4/16  0.05 -
text       dlr         masked    5e-4/8   1e-3/16    5e-4/16  0.05 -
image      dlr         masked    1e-3/32  1e-3/64    5e-4/64  0.05 -
pathx      dlr         masked    5e-4/8   5e-4/64    5e-4/64  0.05 max
listops    dlr_rand    masked    5e-4/32  5e-4/64    1e-4/16  0.05 -
text       dlr_rand    masked    5e-4/8   5e-4/16    1e-3/16  0.05 -
image      dlr_rand    masked    1e-3/32  1e-3/64    1e-3/16  0.05 -
pathx      dlr_rand    masked    5e-4/8   5e-4/16    5e-4/64  0.05 max
"""
# Section 2 and appendix C.3: masking ratios. L1: the tasks with an L1 loss (table 4).
MASKS = """
task                                   mask
image|pathfinder|pathx|pathx256|scifar 0.5
text|retrieval                         0.15
listops                                0.1
sc|bidmc_hr|bidmc_rr|bidmc_spo2        0.25
"""
L1 = {"image", "scifar", "sc", "bidmc_hr", "bidmc_rr", "bidmc_spo2"}
# Whole recipes. The numbers that the tables above do not have are from the official configurations
# (Pythia's lr and batch: table 5). The last three are not the paper's.
WHOLE = """
task            model       objective start   lr   batch wd   length warmup schedule pool head
listops         pythia      causal    scratch 5e-5 64    0    200e   200    cosine   mean linear
text            pythia      causal    scratch 5e-4 16    0    32e    5000   constant last linear
retrieval       pythia      causal    scratch 1e-4 256   0    20e    2500   constant mean pair
image           pythia_rand causal    scratch 7e-5 64    0    200e   2000   constant mean linear
pathfinder      pythia      causal    scratch 1e-4 1024  0    200e   2500   constant last linear
text            rotary      masked    spt     5e-4 64    0.1  65e    2000   constant mean mlp
text            s4          masked    spt     5e-4 16    0.05 32e    5000   cosine   mean linear
retrieval       transformer causal    scratch 1e-3 48    0    32e    5000   constant mean pair
image           transformer masked    spt     1e-3 16    0    200e   2000   constant max  mlp
pathx           s4          masked    spt     1e-3 64    0.05 50e    10000  cosine   max  linear
pathx           dlr_rand    masked    scratch 5e-4 64    0.05 50e    5000   cosine   max  linear
bidmc_rr        rotary      masked    spt     5e-4 32    0    500e   0      step     max  linear
pathfinder_demo rotary      masked    scratch 1e-3 16    0    2700   50     cosine   mean linear
pathx_mini      linformer   masked    spt     1e-3 16    0    1400   50     cosine   mean linear
pathfinder64    s4          causal    scratch 4e-3 32    0    50e    500    cosine   mean linear
"""
# S4 from its official configurations, DLR from appendix C.1.3.
SIZES = """
task     model layers d   state n_ssm norm  place dt_min dt_max dt_lr ssm_lr dropout
listops  s4    8      128 64    128   batch post  1e-3   -      main  -      0
text     s4    6      256 64    256   batch pre   1e-3   -      main  -      0
image    s4    6      512 64    2     layer post  1e-3   -      main  -      0.1
pathx    s4    6      256 64    256   batch pre   1e-4   -      5e-4  -      0
bidmc_rr s4    6      128 256   2     layer pre   1e-3   -      1e-3  -      0
pathx    dlr   6      256 1024  -     layer pre   1e-4   1e-3   -     1e-4   0
"""
# What your data might be: numbers, and enough of them that the rule changes nothing.
OWN = replace(FILE, length=100, classes=2, sizes=(3_000, 500, 500), mask=0.5, channels=1)


def parsed(task, model, start="pretrain", flags="", first=""):
    """The settings of a command with these flags, after a pretraining with the flags `first`."""
    init = commands.Training(task, model, "", "pretrain", first, None) if start == "spt" else None
    return commands.parsed(commands.Training(task, model, "", start, flags, init))


def of_row(row, start):
    """The settings of a row of these tables, and the values of its other columns."""
    objective = f"--objective {row['objective']}"
    flags = dict(spt=dict(first=objective)).get(start, dict(flags=objective))
    apart = "task", "model", "objective", "start"
    values = {name: number(cell) for name, cell in row.items() if name not in apart}
    return parsed(row["task"], row["model"], start, **flags), values


def test_every_line_counts_somewhere_and_fits_its_task(monkeypatch):
    monkeypatch.setattr(recipes, "rows", functools.cache(recipes.rows))
    counted, starts = set(), ("pretrain", "spt", "scratch")
    for name, model in itertools.product([*TASKS, "file:/my.npz", "ucr:Mine"], MODELS):
        task = TASKS.get(name, OWN)
        for objective, start in itertools.product(("masked", "causal"), starts):
            case = f"{name} {model} {objective} {start}"
            try:
                line, known, recipe = recipe_line(name, task, model, objective, start)
            except UserError:
                assert model in ("pythia", "pythia_rand"), f"no recipe: {case}"
                continue
            counted.add(line)
            assert known == objective and recipe["mask"] == task.mask, case
            assert recipe["loss"] == "ce" or task.channels is not None, case
            assert recipe["loss"] == "l1" or task.vocab is not None, case
            assert (recipe["head"] == "pair") == (task.documents == 2), case
            assert (recipe["pool"] == "none") == (task.kind == "positions"), case
        assert model in ("pythia", "pythia_rand") or arch(name, model), f"no sizes: {name} {model}"
    columns = "task", "model", "objective"
    tables = recipes.RECIPES, recipes.SMALL_RECIPES, recipes.OWN_RECIPES
    lines = {"/".join(map(row.get, columns)) for row in recipes.rows("recipes", *tables)}
    assert lines == counted, "a line is hidden by another"
    for name in "listops/s4_rand", "bidmc_spo2/rotary", "sc/s4", "sc/rotary":
        assert parsed(*name.split("/")).recipe == f"{name}/masked"
    assert parsed("retrieval", "s4_rand").recipe == "retrieval/s4/masked"  # it has no line there


def test_every_number_that_the_paper_states_is_the_recipes():
    columns = dict(pretrain="spt", spt="finetuning", scratch="scratch")
    for row in read_table(PAPER):
        args = {start: of_row(row, start)[0] for start in columns}
        for start, column in columns.items():
            assert args[start].wd == float(row["wd"]) and args[start].changed == {}, (row, start)
            stated = column in row and [*map(float, row[column].split("/"))]
            assert stated in (False, [args[start].lr, args[start].batch]), (row, start)
        first, second, scratch = args.values()
        assert first.loss == ("l1" if row["task"] in L1 else "ce"), row
        assert second.pool == scratch.pool == row.get("pool", second.pool), row
        for name in ("lr", "batch", "epochs", "warmup", "schedule"):
            same = getattr(scratch, name) == getattr(second, name)
            assert same or row["model"] not in ("transformer", "rotary"), (row, name)
    for row in read_table(MASKS):
        assert TASKS[row["task"]].mask == float(row["mask"]), row


def test_whole_recipes_and_sizes_are_the_official_ones():
    for row in read_table(WHOLE):
        args, values = of_row(row, row["start"])
        settings = vars(args) | dict(length=args.steps or f"{args.epochs}e")
        assert settings.items() >= values.items(), row
    for row in read_table(SIZES):
        values = {name: number(cell) for name, cell in row.items() if name not in ("task", "model")}
        assert arch(row["task"], row["model"]).items() >= values.items(), row
    heads, blocks = (
        dict(text=8, retrieval=4, image=4, pathx=8),
        dict(pathx=4096, sc=4000, image=None),
    )
    assert {task: arch(task, "transformer")["heads"] for task in heads} == heads  # table 4
    assert {task: arch(task, "rotary")["block"] for task in blocks} == blocks  # section 3, C.3


def test_finetuning_takes_over_what_was_pretrained_and_joint_training_has_half_the_steps():
    first = "--arch d=64,ffn=lowrank,guided=0.5 --train-fraction 0.5 --lr 0.3 --seed 5"
    args = parsed("image", "rotary", "spt", "", first)
    assert args.arch == arch("image", "rotary", d=64, ffn="lowrank")  # guides are pretraining's
    assert (args.train_fraction, args.seed, args.lr) == (0.5, 0, 1e-3)
    args = parsed("image", "rotary", "spt", "--train-fraction 0.1", first)
    assert args.train_fraction == args.changed["train_fraction"] == 0.1
    joint, scratch = parsed("image", "s4", "joint", "--joint 1"), parsed("image", "s4", "scratch")
    assert joint.epochs == scratch.epochs // 2 and joint.out.name == "image-s4-masked-joint-s0"


def test_schedules_are_their_formulas():
    """Linear warm-up, then constant, half a cosine down to 0, or halved after each fifth."""
    for schedule, warmup, steps in itertools.product(recipes.SCHEDULES, (0, 10), (100, 500)):
        args = SimpleNamespace(schedule=schedule, warmup=warmup)
        for step in range(steps):
            turned = math.pi * (step - warmup) / (steps - warmup)
            fifths = sum(step >= steps * i / 5 for i in range(1, 5))
            rate = dict(constant=1, cosine=(1 + math.cos(turned)) / 2, step=0.5**fifths)[schedule]
            rate = (step + 1) / warmup if step < warmup else rate
            got = learning_rate(step, steps, args)
            assert got == pytest.approx(rate, abs=1e-12), (schedule, step)
