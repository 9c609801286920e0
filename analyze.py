"""From runs to tables and figures. Reads files only: result.json, log.jsonl and kernels.npz of run directories, or the
results/PRESET/runs.jsonl and kernels.npz that `keep` makes of them.

    python analyze.py all               the paper's tables and figures with ours, from runs/paper into results/paper
    python analyze.py all --preset mini the same at small scale, from runs/mini into results/mini
    python analyze.py table 2           one table, Markdown; `figure 1`: one figure
    python analyze.py report            all of it as one HTML page too
    python analyze.py keep              all runs as results/paper/runs.jsonl and kernels.npz, to be committed
    python analyze.py readme            what they say, into README.md and the pages in results/; --check
    python analyze.py demo              the demo's table (Markdown) and figure (results/demo.png), from runs/demo
    python analyze.py own runs/own      your own data: SPT and joint training against scratch (run_all.sh own)
    python analyze.py status runs/demo  what is done, what runs and for how long still, what failed

A cell is the mean ± standard deviation over seeds of the test accuracy at the checkpoint that validation chose. A gain
is paired: the same seed with and without self-pretraining, with a 95 % interval from Student's t.
"""
import argparse
import base64
import json
import math
import os
import re
import signal
import statistics
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np

from data import Parser, UserError

ROOT = Path(__file__).parent


# ---- cells: which runs make one number -------------------------------------------------------------------------------

# The runs of a cell differ in their seed only. start: scratch, spt, corpus (Pythia's weights), or pretraining for the
# runs of stage 1. variant: how the cell varies the recipe, "" where it does not.
Cell = namedtuple("Cell", "task model objective start variant", defaults=("",))

# What tables 8 and 9 and figure 3 vary. run_all.sh passes the same as flags, and a test compares the two.
# Table 9: --arch. The paper prints numbers of parameters only, so the shapes are ours; 3m is the recipe itself. S4's
# last step enlarges its state too, as the paper had to (appendix E).
SIZES = ("100k", "300k", "1m", "10m")
ARCHS = {("rotary", "paper"): (dict(d=48, ff=72), dict(d=80, ff=160), dict(d=144, ff=288), dict(d=448, ff=896)),
         ("s4", "paper"): (dict(d=64), dict(d=128), dict(d=256), dict(d=832, state=128)),
         ("rotary", "mini"): (dict(d=8, ff=16), dict(d=12, ff=24), dict(d=20, ff=40), dict(d=56, ff=112)),
         ("s4", "mini"): (dict(d=10), dict(d=16), dict(d=30), dict(d=104))}
MINI_SIZES = {"100k": "2k", "300k": "4k", "1m": "10k", "3m": "20k", "10m": "80k"}          # how large those are
# Table 8 (appendix D): what both stages have together. Pretraining takes 20, 40 or 60 % of it.
BUDGETS = {("text", "paper"): ("epochs", 30), ("image", "paper"): ("epochs", 150),
           ("text", "mini"): ("steps", 2000), ("image", "mini"): ("steps", 2000)}
# Figure 3 (section 3.4, appendix C.1.4): shares of the training examples in percent; then what else differs from the
# recipe in pretraining, in finetuning after it and from scratch ("until convergence"). For Text from scratch the paper
# takes the better of 1e-3 and 5e-4 on validation. Warm-up and schedule are ours: on the smallest shares the recipe
# would end before its warm-up does.
FRACTIONS = (0.5, 1, 5, 10, 50, 100)
LONGER = dict(warmup=200, schedule="constant")
PARTS = {("text", "paper"): (dict(steps=40000), dict(epochs=200) | LONGER, dict(lr=1e-3, epochs=200) | LONGER),
         ("image", "paper"): (dict(lr=1e-2, batch=50, steps=10000), dict(lr=2e-3, batch=50) | LONGER,
                              dict(lr=2e-3) | LONGER)}


def variants(task, model, preset):
    """Yields (variant, what changes in pretraining, in finetuning after it, from scratch); None where there is no such
    run. The recipe itself comes last."""
    if task == "image":
        for size, arch in zip(SIZES, ARCHS.get((model, preset), ())):
            yield f"size-{size}", {"arch": arch}, {"arch": arch}, {"arch": arch}
    if (task, preset) in BUDGETS and model in ("rotary", "s4"):
        unit, total = BUDGETS[task, preset]
        yield "budget-0", None, None, {unit: total}
        for share in (20, 40, 60):
            first = total * share // 100
            yield f"budget-{share}", {unit: first}, {unit: total - first}, None
    if task in ("image", "text") and model == "s4":
        for share in FRACTIONS:
            part = {"train_fraction": share / 100}
            yield f"data-{share:g}", *(part | more for more in PARTS.get((task, preset), ({}, {}, {})))
    yield "", {}, {}, {}


ANOTHER = ("arch", "train_fraction", "label_fraction")     # what makes a run another experiment


def cell_of(run, preset):
    """The cell that a run counts in -> Cell, and whether the run is exactly its recipe; (None, False) if there is none.
    A run with further changes, a shortened one say, counts in its cell but is marked. One with another architecture or
    on another part of the data does not: that is another experiment."""
    start, task = run.get("start", "pretraining"), run["task"]
    if preset == "mini":                                   # stand-ins fill the cells, and the paper's own tasks do not
        task = task.removesuffix("_mini") if task.endswith("_mini") else f"{task}, full size"
    changed = (run["changed"].get("pretraining", {}),
               {name: value for name, value in run["changed"].items() if name != "pretraining"})
    for variant, first, after, scratch in variants(task, run["model"], preset):
        wanted = {"pretraining": ({}, first), "spt": (first, after)}.get(start, ({}, scratch))
        if wanted[1] is None or any(wanted[1].get(name) != changed[1].get(name) for name in ANOTHER):
            continue
        if all(a.items() <= b.items() for a, b in zip(wanted, changed)):
            return Cell(task, run["model"], run["objective"], start, variant), wanted == changed
    return None, False


# ---- reading ---------------------------------------------------------------------------------------------------------

def read_runs(source, preset="paper"):
    """The record of every finished run in a folder of run directories or in a runs.jsonl. Damaged ones are named and
    skipped. Added to a record: run, its name; folder, where its log.jsonl and kernels.npz are; score of a finetuning
    run, in the paper's units; cell, see `cell_of`; kind: "full", "mini", or "changed", not exactly its recipe."""
    if not source.exists():
        raise UserError(f"no runs in {source}; run_all.sh makes them, and --runs names another folder")
    runs = []
    for path in [source] if source.is_file() else sorted(source.glob("**/result.json")):
        text = path.read_text(errors="replace")
        for record in text.splitlines() if source.is_file() else [text]:
            try:
                run = {"run": path.parent.name} | json.loads(record)
                if "start" in run:
                    run["score"] = float(run["test_r2"] if "test_r2" in run else 100 * run["test_accuracy"])
                cell, exact = cell_of(run, preset)
                kind = "changed" if not exact else "mini" if preset == "mini" else "full"
                runs.append(run | dict(seed=int(run["seed"]), seconds=float(run["seconds"]), folder=path.parent,
                                       cell=cell, kind=kind))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                print(f"warning: a run in {path} is skipped: {error!r}", file=sys.stderr)
    return runs


def by_cell(runs):
    """{cell: {seed: run}}. Of two runs of one seed the recipe's goes before a changed one, then the first by name."""
    cells = {}
    for run in sorted((run for run in runs if run["cell"]), key=lambda run: (run["kind"] == "changed", run["run"])):
        first = cells.setdefault(run["cell"], {}).setdefault(run["seed"], run)
        if first is not run:
            print(f"warning: {run['run']} is left out: {first['run']} has the same cell and seed", file=sys.stderr)
    return cells


def scores(cells, cell):
    """{seed: score} of a cell."""
    return {seed: run["score"] for seed, run in cells.get(cell, {}).items()}


def read_log(folder):
    """The records of a run's log.jsonl, as far as it goes: the last line of a killed run may be torn."""
    path = folder / "log.jsonl"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def evaluations(run):
    """The records of a run's evaluations, which a kept run holds as `evals`, and others from now on."""
    if "evals" not in run:
        run["evals"] = [record for record in read_log(run["folder"]) if record["kind"] == "eval"]
    return run["evals"]


def kernels_of(runs):
    """S4's convolution kernels: max over channels and both directions of |K| for each lag (paper, section 3.6, footnote
    3), before and after pretraining -> {name of the run: (2, layers, l)}."""
    found = {}
    for run in runs:
        path = run["folder"] / "kernels.npz"
        prefix = "" if run["folder"].name == run["run"] else f"{run['run']}/"             # kept runs share one file
        arrays = np.load(path) if path.exists() else {}
        if f"{prefix}after" in arrays:
            kernels = np.stack([arrays[f"{prefix}before"], arrays[f"{prefix}after"]])     # (2, layers, directions, l)
            kernels[:, :, 1:, 1:] = kernels[:, :, 1:, :-1]            # the backward one starts at lag 1 (`fft_conv`)
            kernels[:, :, 1:, 0] = 0
            found[run["run"]] = kernels.max(2)
    return found


def half_lag(kernels):
    """The lag within which half of a kernel's sum lies: (..., l) -> (...)."""
    return (kernels.cumsum(-1) < kernels.sum(-1, keepdims=True) / 2).sum(-1)


def hours(runs):
    return sum(run["seconds"] * run.get("processes", 1) for run in runs) / 3600


def values_of(runs, field):
    """The different values that runs have in a field, as text."""
    return ", ".join(sorted({str(run.get(field)) for run in runs}))


def provenance(runs):
    """How many runs, and where their numbers come from."""
    spent = hours(runs)
    time_spent = f"{spent:.1f} hours" if spent >= 1 else f"{60 * spent:.0f} minutes"
    return (f"{len(runs)} runs, seeds {values_of(runs, 'seed')}; commit {values_of(runs, 'commit')}, "
            f"{values_of(runs, 'device')}, torch {values_of(runs, 'torch')}; {time_spent} of training")


# ---- statistics ------------------------------------------------------------------------------------------------------

# 97.5 % quantiles of Student's t for n - 1 degrees of freedom, n = 2, 3, ...; beyond the last, the last: too wide.
T_QUANTILE = [12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]


def minus(after, before):
    """{seed: after - before} of the seeds that both have."""
    return {seed: after[seed] - before[seed] for seed in sorted(before.keys() & after.keys())}


def half_width(values):
    """Of the 95 % interval of a mean; 0 where one value gives none."""
    if len(values) < 2:
        return 0
    t = T_QUANTILE[min(len(values) - 2, len(T_QUANTILE) - 1)]
    return t * statistics.stdev(values) / math.sqrt(len(values))


def mean_std(found, digits=1):
    """{seed: score} as '61.2 ± 0.8', as the number alone where one seed gives no spread, or as a dash."""
    if not found:
        return "–"
    mean = f"{statistics.mean(found.values()):.{digits}f}"
    return mean if len(found) == 1 else f"{mean} ± {statistics.stdev(found.values()):.{digits}f}"


def signed(found, digits=1):
    """{seed: difference} as '+3.7 [+2.2, +5.2] (3)', mean, interval and number of seeds; '+3.7 (one seed)'; a dash."""
    if not found:
        return "–"
    mean, half = statistics.mean(found.values()), half_width(found.values())
    if len(found) == 1:
        return f"{mean:+.{digits}f} (one seed)"
    return f"{mean:+.{digits}f} [{mean - half:+.{digits}f}, {mean + half:+.{digits}f}] ({len(found)})"


# ---- tables ----------------------------------------------------------------------------------------------------------

# Title, then test accuracy in percent (BIDMC: R2), as printed. x: chance level, or too long to train.
# avg: the average as the paper prints it (results/averages.md: which of them count x as 50, and which are misprints).
PAPER = {1: """Long Range Arena, Transformers of the sizes of Tay et al.
approach                 model       objective start   listops text  retrieval image pathfinder pathx avg
Transformer              transformer masked    scratch 36.37   64.27 57.46     42.44 71.40      x     53.66
Transformer_+_Masked_SPT transformer masked    spt     59.75   89.27 88.64     74.22 88.45      87.73 81.34
Transformer_+_Causal_SPT transformer causal    spt     59.15   88.81 90.38     76.00 88.49      88.05 81.81
""", 2: """Long Range Arena, Transformers and S4
approach                   model       objective start   listops text  retrieval image pathfinder pathx pathx256 avg
Transformer_+_Rotary       rotary      masked    scratch 47.90   79.08 82.31     75.04 76.64      84.72 x        74.28
Transformer_+_Rotary_+_SPT rotary      masked    spt     61.49   91.02 91.57     86.04 94.16      92.98 x        86.21
S4                         s4          masked    scratch 59.60   86.82 90.90     88.65 94.20      96.35 67.82    86.09
S4_+_SPT                   s4          masked    spt     61.25   90.34 88.74     89.36 94.92      96.94 87.11    86.75
Pythia_70M_(Rand_Init)     pythia_rand causal    scratch 41.20   69.29 76.45     52.55 74.31      x     x        62.76
Pythia_70M                 pythia      causal    corpus  43.05   83.41 84.29     67.41 80.05      x     x        68.04
""", 3: """Speech Commands, sCIFAR, BIDMC (R2)
approach          model  objective start   sc_causal sc    scifar bidmc_hr bidmc_rr bidmc_spo2
S4                s4     masked    scratch 93.60     96.08 91.13  0.999    0.994    0.999
Transformer       rotary masked    scratch 84.55     86.93 79.41  0.998    0.981    0.998
S4_+_SPT          s4     masked    spt     95.09     96.52 91.67  0.999    0.990    0.997
Transformer_+_SPT rotary masked    spt     86.13     91.49 90.29  0.992    0.956    0.993
""", 7: """Initialisations
approach              model    objective start   listops text  image pathx avg
S4_+_Rand_Init_+_SPT  s4_rand  masked    spt     61.5    90.5  87.25 91.05 82.75
S4_+_Rand_Init        s4_rand  masked    scratch 59.85   88.34 75.56 73.57 74.33
S4_+_SPT              s4       masked    spt     61.25   90.34 89.36 96.94 84.47
S4                    s4       masked    scratch 59.60   86.82 88.65 96.35 82.85
DLR_+_Rand_Init_+_SPT dlr_rand masked    spt     56.75   89.13 81.83 94.59 80.47
DLR_+_Rand_Init       dlr_rand masked    scratch 39.55   73.72 56.70 50.04 55.00
DLR_+_SPT             dlr      masked    spt     60.45   89.94 87.12 96.38 83.37
DLR                   dlr      masked    scratch 57.50   79.65 79.83 92.33 77.33
""", 8: """A fixed budget of epochs
approach               variant   objective start   image_rotary image_s4 text_rotary text_s4
SPT_0_%_of_the_budget  budget-0  masked    scratch 75.04        87.83    79.08       87.51
SPT_20_%_of_the_budget budget-20 masked    spt     84.45        87.15    90.20       89.50
SPT_40_%_of_the_budget budget-40 masked    spt     84.95        87.72    90.56       89.10
SPT_60_%_of_the_budget budget-60 masked    spt     84.32        87.63    90.65       88.87
""", 9: """Image, across model sizes
approach                   model  objective start   100k  300k  1m    3m    10m
Transformer_+_Rotary       rotary masked    scratch 68.51 68.51 71.50 75.04 77.88
Transformer_+_Rotary_+_SPT rotary masked    spt     74.43 76.36 84.83 86.04 86.54
S4                         s4     masked    scratch 81.36 83.63 84.81 88.65 85.73
S4_+_SPT                   s4     masked    spt     83.45 86.39 88.67 89.36 88.72
"""}
MINI_NOTE = "**Mini**: small models on short stand-ins of the paper's tasks, half a minute of training or so a stage."
# Columns that are no task, and what their cells have instead.
COLUMNS = {"sc_causal": dict(task="sc", objective="causal"), "3m": dict(task="image"),
           **{size: dict(task="image", variant=f"size-{size}") for size in SIZES},
           **{f"{task}_{model}": dict(task=task, model=model) for task, _ in BUDGETS for model in ("rotary", "s4")}}


def grid(number):
    """A table of the paper -> {approach: {column: (cell, printed)}}, {approach: the average that it prints}."""
    head, *lines = [line.split() for line in PAPER[number].splitlines()[1:]]
    rows, averages = {}, {}
    for line in lines:
        row = dict(zip(head, line, strict=True))
        approach = row.pop("approach").replace("_", " ")
        if "avg" in row:
            averages[approach] = row.pop("avg")
        shared = {name: row.pop(name) for name in Cell._fields if name in row}
        rows[approach] = {column: (Cell(**shared | COLUMNS.get(column, dict(task=column))), printed)
                          for column, printed in row.items()}
    return rows, averages


def ours(cells, number, approach):
    """{column: {seed: score}} of our runs in a row of a table."""
    return {column: scores(cells, cell) for column, (cell, _) in grid(number)[0][approach].items()}


def is_full(*groups):
    """Whether all runs in these {seed: run} are exactly their recipe, nothing shortened or changed."""
    return all(run["kind"] != "changed" for runs in groups for run in runs.values())


def markdown(head, rows):
    """A table, or nothing where there is no row."""
    if not rows:
        return ""
    head, *rows = ["|" + "|".join(f" {cell} " if cell else " " for cell in row) + "|" for row in (head, *rows)]
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows])


def table(cells, number, mini=False):
    """One table of the paper in Markdown: the grid, averages, gains, then what stands behind every cell of ours."""
    rows, printed_averages = grid(number)
    scratch = {(column, cell.model): cell for row in rows.values() for column, (cell, _) in row.items()
               if cell.start == "scratch"}
    main, averages, gains, details = [], [], [], []
    for approach, row in rows.items():
        main.append([approach])
        gains.append([approach])
        for column, (cell, printed) in row.items():
            runs, found, base = cells.get(cell, {}), scores(cells, cell), scratch.get((column, cell.model))
            digits = 3 if printed.startswith("0.") else 2                                     # R2 is printed with 3
            mean, count = mean_std(found, digits), f" ({len(runs)})" if runs else ""
            main[-1].append(f"{printed} / {mean}{count}" + ("" if is_full(runs) else "†"))
            points = signed(minus(found, scores(cells, base)), digits)
            gains[-1].append(points + ("" if is_full(runs, cells.get(base, {})) else "†"))
            details.append([approach, column, printed, mean, *detail(cells, cell)])
        if cell.start != "spt":
            gains.pop()
        if approach in printed_averages:
            averages.append([approach, printed_averages[approach], our_average(cells, row)])
    names = [f"{column} (mini: {MINI_SIZES[column]})" if mini and column in MINI_SIZES else column for column in row]
    parts = [f"### Table {number}{', mini' if mini else ''}: {PAPER[number].splitlines()[0]}",
             f"{MINI_NOTE} The paper's numbers stand beside them for orientation only." if mini else "",
             f"Each cell: paper / {'mini' if mini else 'ours'}, mean ± standard deviation (seeds). x: chance level, "
             "or too long to train. †: shortened or changed.", markdown(["approach", *names], main),
             markdown(["approach", "average in the paper", "ours"], averages),
             markdown(["gain of SPT, paired by seed [95 % interval] (seeds)", *row], gains),
             markdown(["approach", "column", "paper", "ours", "seeds", "steps", "device hours", "device", "commit",
                       "status"], details)]
    return "\n\n".join(part for part in parts if part)


def detail(cells, cell):
    """What stands behind a cell: seeds, steps and hours of both stages, device, commit, and what kind of runs."""
    runs = cells.get(cell, {})
    if not runs:
        return [*[""] * 5, "not run"]
    chains = []
    for seed, run in runs.items():
        first = cells.get(cell._replace(start="pretraining"), {}).get(seed)
        chains.append([first, run] if first and Path(run.get("init") or "").name == first["run"] else [run])
    steps = dict.fromkeys(" + ".join(str(run.get("steps")) for run in chain) for chain in chains)
    return [str(len(runs)) if len(runs) > 1 else "one seed", ", ".join(steps), f"{hours(sum(chains, [])):.2f}",
            *(values_of(runs.values(), field) for field in ("device", "commit", "kind"))]


def our_average(cells, row):
    """Over the tasks that have been run in full. PathX-256 counts nowhere, as everywhere in the literature."""
    columns = [cells.get(cell, {}) for column, (cell, _) in row.items() if column != "pathx256"]
    means = [statistics.mean(run["score"] for run in runs.values()) for runs in columns if runs and is_full(runs)]
    return f"{statistics.mean(means):.2f} over {len(means)} of {len(columns)} tasks" if means else "–"


# ---- the paper's claims, and what our runs say about each ------------------------------------------------------------

NO_PAIR = "no full runs to compare"
KERNEL_TASKS = ("image", "text", "pathx", "listops")
# An arm: (table, approach) from scratch, the same after SPT.
ARMS = {"Transformer": ((1, "Transformer"), (1, "Transformer + Masked SPT")),
        "rotary": ((2, "Transformer + Rotary"), (2, "Transformer + Rotary + SPT")),
        "S4": ((2, "S4"), (2, "S4 + SPT"))}
STARTS = {name: ((7, name), (7, f"{name} + SPT")) for name in ("S4", "DLR", "S4 + Rand Init", "DLR + Rand Init")}


def over_tasks(cells, *approaches):
    """Averages over the tasks and seeds that all of these approaches (table, name) have -> tasks, and {seed: average}
    for each approach. PathX-256 does not count, as in the paper's averages."""
    rows = [ours(cells, *approach) for approach in approaches]
    tasks = [task for task in CHANCE if task != "pathx256" and rows and all(row.get(task) for row in rows)]
    seeds = set.intersection(*(set(row[task]) for row in rows for task in tasks)) if tasks else set()
    return tasks, [{seed: statistics.mean(row[task][seed] for task in tasks) for seed in sorted(seeds)} for row in rows]


def compare(cells, one, other, labels):
    """Two differences between approaches, (before, after) each, then the first minus the second, with these labels."""
    tasks, (a, b, c, d) = over_tasks(cells, *one, *other)
    if not a:
        return f"{labels[0]}, {labels[1]}: {NO_PAIR}"
    differences = minus(b, a), minus(d, c), minus(minus(b, a), minus(d, c))
    texts = [f"{label} {signed(found)}" for label, found in zip(labels, differences)]
    return f"{', '.join(texts)}, over {len(tasks)} tasks"


def gap(cells, name, lower, upper):
    """How far one arm lies above another, after SPT and from scratch."""
    labels = "after SPT", "from scratch", "change"
    return f"{name}: {compare(cells, (lower[1], upper[1]), (lower[0], upper[0]), labels)}"


def by_fraction(cells, task):
    """Figure 3: three of {share of the training examples in percent: {seed: value}} of S4: scores from scratch, after
    SPT, and the gain of SPT in percent of the score from scratch."""
    scratch, spt, gains = {}, {}, {}
    for share in FRACTIONS:
        cell = Cell(task, "s4", "masked", "scratch", f"data-{share:g}")
        before, after = scores(cells, cell), scores(cells, cell._replace(start="spt"))
        scratch[share], spt[share] = before, after
        gains[share] = {seed: 100 * points / before[seed] for seed, points in minus(after, before).items()}
    return [{share: values for share, values in found.items() if values} for found in (scratch, spt, gains)]


def half_lags(cells, task):
    """For each layer the lag within which half of its kernel's sum lies, mean over seeds: at the start -> after SPT."""
    found = list(kernels_of(cells.get(Cell(task, "s4", "masked", "pretraining"), {}).values()).values())
    if not found:
        return f"{task}: {NO_PAIR}"
    lags = sum(map(half_lag, found)) / len(found)                                                      # (2, layers)
    before, after = (", ".join(f"{lag:.0f}" for lag in stage) for stage in lags)
    return f"{task} (length {found[0].shape[-1]:,}): {before} -> {after} ({len(found)})"


def claims(cells):
    """The paper's seven claims, each with what our runs measured, as Markdown. Changed runs do not count."""
    cells = {cell: {seed: run for seed, run in runs.items() if run["kind"] != "changed"}
             for cell, runs in cells.items()}
    transformers, fractions, budgets = ("Transformer", "rotary"), [], []
    tasks, (masked, causal) = over_tasks(cells, (1, "Transformer + Masked SPT"), (1, "Transformer + Causal SPT"))
    for task in ("image", "text"):
        texts = [f"{share:g} %: {signed(found)}" for share, found in by_fraction(cells, task)[2].items()]
        fractions.append(f"{task}: {', '.join(texts) or NO_PAIR}")
    alone, *shared = [ours(cells, 8, approach) for approach in grid(8)[0]]             # SPT takes 0, 20, 40, 60 %
    for column in alone:
        gains = [minus(share[column], alone[column]) for share in shared]
        budgets.append(f"{column.replace('_', ', ')}: {', '.join(map(signed, gains)) if any(gains) else NO_PAIR}")
    measured = {
        "SPT lifts Transformers most: gains in points":
            [compare(cells, ARMS[name], ARMS["S4"], (name, "S4", "difference")) for name in transformers],
        "masked and causal SPT are alike: points":
            [f"causal minus masked {signed(minus(causal, masked))}, over {len(tasks)} tasks" if masked else NO_PAIR],
        "the gap between Transformer and S4 shrinks: S4 minus Transformer in points":
            [gap(cells, name, ARMS[name], ARMS["S4"]) for name in transformers],
        "initialisation matters less after SPT: own start minus random start in points":
            [gap(cells, name, STARTS[f"{name} + Rand Init"], STARTS[name]) for name in ("S4", "DLR")],
        "gains grow as data shrinks: relative gain of S4 in percent, by share of the data": fractions,
        "gains survive an equal budget: gain in points when SPT takes 20, 40, 60 % of it": budgets,
        "learned kernels differ from HiPPO, by task: lag within which half of the kernel lies, layer by layer":
            [half_lags(cells, task) for task in KERNEL_TASKS]}
    return markdown(["", "claim", "measured: means over seeds [95 % interval of paired differences] (seeds)"],
                    [[str(i), claim, "<br>".join(found)] for i, (claim, found) in enumerate(measured.items(), 1)])


# ---- figures ---------------------------------------------------------------------------------------------------------

CHANCE = {"listops": 10, "text": 50, "retrieval": 50, "image": 10, "pathfinder": 50, "pathx": 50, "pathx256": 50}  # %
SCRATCH, SPT, OTHER = "#9aa5b1", "#0072b2", "#d55e00"      # colour-blind safe, and apart in gray too
LAYERS = (SPT, OTHER, "#009e73", "#cc79a7")                # of layers 1, 3, 5, 7


def draw(make, cells, path, mini=False):
    """Writes the figure that make(plt, cells) draws, with its title and one legend, each label once, as a PNG file."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    plt.rcParams.update({"font.size": 8, "axes.titlesize": 8, "lines.linewidth": 1})
    figure, title = make(plt, cells)
    title += "" if is_full(*cells.values()) else "; some runs shortened or changed"
    title += "\nmini: small models on short stand-in tasks" if mini else ""
    entries = {label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(entries.values(), entries.keys(), loc="lower center", ncols=5, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0.07, 1, 0.98))
    write(path, lambda temporary: figure.savefig(temporary, dpi=150))
    plt.close(figure)


def bars(axis, names, arms, chance, papers=({}, {})):
    """A pair of bars in percent for each name, a dot for each seed. arms: {name: {seed: score}} from scratch and after
    SPT; papers: {name: the paper's number} of both; chance: {name: its level}."""
    looks = (-0.19, SCRATCH, "from scratch"), (0.19, SPT, "self-pretrained (SPT)")
    for i, name in enumerate(names):
        for (shift, colour, label), arm, paper in zip(looks, arms, papers):
            values = list(arm.get(name, {}).values())
            if values:
                axis.bar(i + shift, statistics.mean(values), 0.36, color=colour, label=label)
                axis.scatter([i + shift] * len(values), values, s=10, color="black", zorder=3, label="one seed")
                axis.text(i + shift, max(values) + 3, f"{statistics.mean(values):.1f}", ha="center")
            else:
                axis.text(i + shift, 1, "not run", rotation=90, ha="center", va="bottom", color="0.5")
            if name in paper:
                axis.scatter([i + shift], [paper[name]], s=30, marker="D", facecolors="none", edgecolors=OTHER,
                             zorder=4, label="the paper")
        if name in chance:
            axis.hlines(chance[name], i - 0.4, i + 0.4, color="black", linestyle=":", label="chance")
    axis.set_xticks(range(len(names)), names)
    axis.set(ylabel="test accuracy, %", ylim=(0, 108))


def paper_numbers(cells, number, approach):
    """{column: number} of a row as the paper prints it; none beside mini runs, whose tasks are others."""
    if any(run["kind"] == "mini" for runs in cells.values() for run in runs.values()):
        return {}
    return {column: float(printed) for column, (_, printed) in grid(number)[0][approach].items() if printed != "x"}


def figure1(plt, cells):
    """Transformer, rotary Transformer and S4 on Long Range Arena, from scratch and after SPT."""
    figure, axes = plt.subplots(3, 1, figsize=(8, 7.5), sharex=True)
    for axis, arms in zip(axes, ARMS.values()):
        bars(axis, CHANCE, [ours(cells, *approach) for approach in arms], CHANCE,
             [paper_numbers(cells, *approach) for approach in arms])
        axis.set_title(arms[0][1])
    return figure, "Figure 1: Long Range Arena"


def figure2(plt, cells):
    """Initialisations: averages over the tasks of table 7 that all approaches with any run have in common."""
    run = [approach for pair in STARTS.values() for approach in pair if any(ours(cells, *approach).values())]
    tasks, averages = over_tasks(cells, *run)
    found, arms, papers = dict(zip(run, averages)), ({}, {}), ({}, {})
    for name, pair in STARTS.items():
        for approach, arm, paper in zip(pair, arms, papers):
            numbers, arm[name] = paper_numbers(cells, *approach), found.get(approach, {})
            if numbers and arm[name]:
                paper[name] = statistics.mean(numbers[task] for task in tasks)
    figure, axis = plt.subplots(figsize=(7, 3.8))
    bars(axis, STARTS, arms, {}, papers)
    return figure, f"Figure 2: initialisations, average of {', '.join(tasks) or 'no task: none is common to all'}"


def figure3(plt, cells):
    """Accuracy against the share of the training set, and the gain of SPT relative to training from scratch."""
    figure, axes = plt.subplots(1, 2, figsize=(8.5, 3.8))
    for task, colour in (("image", SPT), ("text", OTHER)):
        scratch, spt, gains = by_fraction(cells, task)
        for axis, found, style, label in ((axes[0], scratch, "--", f"{task}, from scratch"),
                                          (axes[0], spt, "-", f"{task}, SPT"), (axes[1], gains, "-", "")):
            values = [list(seeds.values()) for seeds in found.values()]
            axis.errorbar(list(found), list(map(statistics.mean, values)), list(map(half_width, values)), color=colour,
                          linestyle=style, marker="o", markersize=3, capsize=2, label=label)
    for axis, label in zip(axes, ("test accuracy, %", "relative gain of SPT, %")):
        axis.set(xscale="log", xlabel="share of the training examples, %", ylabel=label)
        axis.set_xticks(FRACTIONS, [f"{share:g}" for share in FRACTIONS])
        axis.minorticks_off()
    axes[1].axhline(0, color="black", linestyle=":")
    return figure, "Figure 3: S4 on parts of the training set; bars: 95 % intervals"


def figure4(plt, cells):
    """Maximal |K| over channels and directions against the lag, for odd layers: after SPT and as HiPPO starts."""
    figure, axes = plt.subplots(len(KERNEL_TASKS), 1, figsize=(8, 10))
    for axis, task in zip(axes, KERNEL_TASKS):
        runs = cells.get(Cell(task, "s4", "masked", "pretraining"), {}).values()
        name, kernels = next(iter(kernels_of(runs).items()), ("not run", None))
        axis.set(title=f"{task}: {name}", xscale="log", yscale="log", ylabel="max |K|")
        if kernels is None:
            continue
        before, after = kernels                                                                # (layers, l) each
        lags = range(1, before.shape[1] + 1)
        for i in range(0, len(after), 2):
            axis.plot(lags, after[i], color=LAYERS[i // 2], label=f"SPT, layer {i + 1}")
        axis.plot(lags, before[0], color="black", linestyle="--", label="HiPPO, layer 1")
        for k in range(1, 9) if task in ("image", "pathx") else ():
            axis.axvline(k * math.isqrt(len(lags)) + 1, color="0.85", zorder=0)
    axes[-1].set_xlabel("lag + 1, positions (vertical lines: first multiples of the image's width)")
    return figure, "Figure 4: kernels of S4 after SPT against those it started with, one seed"


CURVES = {"scratch": ("budget-0", SCRATCH, "from scratch"), "spt": ("budget-20", SPT, "finetuning after SPT"),
          "pretraining": ("budget-20", OTHER, "SPT with 20 % of the budget")}


def curves_of(cells, task):
    """Figure 5: {start: run} of table 8's rotary Transformer, of the first seed of those that have most. Adds to each
    run its evaluations, `evals`."""
    found = {}
    for start, (variant, _, _) in CURVES.items():
        for seed, run in cells.get(Cell(task, "rotary", "masked", start, variant), {}).items():
            evaluations(run)
            found.setdefault(seed, {})[start] = run
    return max((found[seed] for seed in sorted(found)), key=len, default={})


def figure5(plt, cells):
    """Validation curves of table 8's Transformers: the denoising task, and the downstream task with and without SPT."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 6))
    for (above, below), task, score_is in zip(axes.T, ("image", "text"), ("minus squared error", "accuracy")):
        for start, run in curves_of(cells, task).items():
            epochs = [record["step"] * run["epochs"] / run["steps"] for record in run["evals"]]
            axis, field = (above, "val_score") if start == "pretraining" else (below, "val_accuracy")
            _, colour, label = CURVES[start]
            axis.plot(epochs, [record[field] for record in run["evals"]], color=colour, label=label)
        above.set(title=f"{task}: rotary Transformer", ylabel=f"denoising, {score_is}")
        below.set(xlabel="epochs of the stage", ylabel="downstream accuracy")
    return figure, "Figure 5: validation with and without SPT, one seed"


# ---- what is written -------------------------------------------------------------------------------------------------

def write(path, save):
    """save(temporary path), then rename: no reader ever sees half a file."""
    temporary = path.with_name(f".tmp-{path.name}")
    path.parent.mkdir(parents=True, exist_ok=True)
    save(temporary)
    temporary.replace(path)
    print(f"{path}: written")


def one(args):
    """`table N` and `figure N`."""
    known = PAPER if args.command == "table" else FIGURES
    if args.what not in map(str, known):
        raise UserError(f"{args.command} {args.what}: there is {', '.join(map(str, known))}")
    cells, number, mini = by_cell(read_runs(args.runs, args.preset)), int(args.what), args.preset == "mini"
    if args.command == "table":
        print(table(cells, number, mini))
    else:
        draw(FIGURES[number], cells, args.out / f"figure{number}.png", mini)


def everything(args):
    """Claims and every table into one Markdown file, every figure beside it."""
    runs, mini = read_runs(args.runs, args.preset), args.preset == "mini"
    cells, note = by_cell(runs), f", mini\n\n{MINI_NOTE}" if mini else ""
    text = "\n\n".join([f"### The paper's claims{note}\n\n{claims(cells)}", *(table(cells, n, mini) for n in PAPER)])
    print(f"{len(runs)} runs in {args.runs}, of which {sum(run['cell'] is None for run in runs)} match no cell")
    write(args.out / "tables.md", lambda temporary: temporary.write_text(text + "\n"))
    for number, figure in FIGURES.items():
        draw(figure, cells, args.out / f"figure{number}.png", mini)


def report(args):
    """The same, then one HTML page that needs no other file: the figures first."""
    everything(args)
    page = ["<!doctype html><meta charset=utf-8><title>Never Train from Scratch</title>",
            "<style>body { font: 14px sans-serif } td { border: 1px solid #ccc; padding: 3px 8px }</style>"]
    for number in FIGURES:
        picture = base64.b64encode((args.out / f"figure{number}.png").read_bytes()).decode()
        page.append(f'<p><img src="data:image/png;base64,{picture}">')
    for block in (args.out / "tables.md").read_text().replace("**", "").split("\n\n"):
        if block.startswith("|"):
            rows = [line.strip("|").replace("|", "<td>") for line in block.splitlines() if line[:4] != "|---"]
            page.append("<table><tr><td>" + "\n<tr><td>".join(rows) + "</table>")
        else:
            page.append(f"<h2>{block[4:]}</h2>" if block.startswith("### ") else f"<p>{block}")
    write(args.out / "report.html", lambda temporary: temporary.write_text("\n".join(page)))


def keep(args):
    """Into --out: every run as a line of runs.jsonl, those of figure 5 with their evaluations; kernels of figure 4 as
    kernels.npz. No weights."""
    runs = read_runs(args.runs, args.preset)
    cells = by_cell(runs)
    for task in KERNEL_TASKS:
        curves_of(cells, task)                                                                # adds their evaluations
    shown = [run for task in KERNEL_TASKS for run in cells.get(Cell(task, "s4", "masked", "pretraining"), {}).values()]
    if shown:
        kernels = kernels_to_keep(shown)
        write(args.out / "kernels.npz", lambda temporary: np.savez_compressed(temporary, **kernels))
    write(args.out / "runs.jsonl", lambda temporary: temporary.write_text("".join(map(line_to_keep, runs))))


def line_to_keep(run):
    """A run's line of runs.jsonl, without what `read_runs` adds."""
    return json.dumps({name: run[name] for name in run if name not in ("folder", "score", "cell", "kind")}) + "\n"


def kernels_to_keep(runs):
    """{name in kernels.npz: array}, as `kernels_of` reads them."""
    kernels = {}
    for run in runs:
        arrays = np.load(run["folder"] / "kernels.npz")
        kernels |= {f"{run['run']}/{stage}": arrays[stage] for stage in ("before", "after")}
    return kernels


def readme(args):
    """What the kept runs say, into README.md and results/PRESET/README.md."""
    paragraphs = []
    for preset, title in (("paper", "The paper's recipes"), ("mini", "The mini preset")):
        folder = f"results/{preset}"
        kept = ROOT / folder / "runs.jsonl"
        if not kept.exists():
            paragraphs.append(f"**{title}**: no runs are kept here yet.")
            continue
        runs = read_runs(kept, preset)
        replace_block(ROOT / folder / "README.md", "results", claims(by_cell(runs)), args.check)
        paragraphs.append(f"**{title}**: {provenance(runs)}. [What they show]({folder}/README.md), "
                          f"[every table]({folder}/tables.md).")
    replace_block(ROOT / "README.md", "results", "<br>\n".join(paragraphs), args.check)


def replace_block(path, name, text, check=False):
    """Puts text between <!-- name:begin --> and <!-- name:end --> of a Markdown file, or checks that it is there."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    old = path.read_text()
    new, found = re.subn(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{text}\n{end}", old, 1, re.S)
    if not found:
        raise UserError(f"{path} has no {begin} ... {end}")
    if new == old:
        return
    if check:
        raise UserError(f"{path} differs from the runs after {begin}; mend it: the same command without --check")
    write(path, lambda temporary: temporary.write_text(new))


DEMOS = {"pathfinder_demo": "Pathfinder, scaled down", "text_demo": "Text (IMDb), 128 characters",
         "text256": "Text (IMDb), 256 characters"}                                            # two classes all
MODEL_NAMES = {
    "transformer": "Transformer", "rotary": "Transformer (rotary)", "local": "Local attention",
    "longformer": "Longformer", "linformer": "Linformer", "reformer": "Reformer", "bigbird": "BigBird",
    "linear": "Linear Transformer", "performer": "Performer", "performer_relu": "Performer, ReLU", "mega": "MEGA",
    "mega_chunk": "MEGA-chunk", "spade": "SPADE (our reading)", "s4": "S4", "s4_rand": "S4, random start",
    "dlr": "DLR", "dlr_rand": "DLR, random start", "dfout": "DFouT", "s4d": "S4D-Lin", "s4d_inv": "S4D-Inv",
    "s4d_legs": "S4D-LegS", "s5": "S5", "lru": "LRU", "sgconv": "SGConv"}


def dumbbells(axis, models, arms):
    """A line a model, from its mean score from scratch to that after SPT."""
    for y, name in enumerate(reversed(models)):
        scratch, spt = (statistics.mean(arm[name].values()) if arm[name] else math.nan for arm in arms)
        axis.plot([scratch, spt], [y, y], color="0.6", zorder=1)
        axis.scatter(scratch, y, color=SCRATCH, label="from scratch")
        axis.scatter(spt, y, color=SPT, label="self-pretrained (SPT)")
    axis.set_yticks(range(len(models)), reversed(models))
    axis.set(xlabel="test accuracy, %")


def spread(models, arms):
    """How far models are apart: does SPT level the field?"""
    ends = [[statistics.mean(arm[name].values()) for name in models if arms[0][name] and arms[1][name]] for arm in arms]
    if len(ends[0]) < 2:
        return ""
    scratch, spt = (f"{statistics.stdev(arm):.1f} (from {min(arm):.1f} to {max(arm):.1f})" for arm in ends)
    return (f"Standard deviation over {len(ends[0])} models: {scratch} from scratch, {spt} after SPT. Hidden: percent "
            "of the hidden symbols that pretraining predicts right. ")


def demo(args):
    """Prints the demo's table and caption for the finished runs, and draws its figure."""
    runs = [run for run in read_runs(args.runs) if run["task"] in DEMOS]
    if not any("start" in run for run in runs):
        raise UserError(f"no finished finetuning run of a demo in {args.runs}; run: bash run_all.sh demo")
    cells, task, rows = by_cell(runs), runs[0]["task"], []
    names = MODEL_NAMES | {run["model"]: run["model"] for run in runs if run["model"] not in MODEL_NAMES}
    arms = [{name: scores(cells, Cell(task, model, "masked", start)) for model, name in names.items()}
            for start in ("scratch", "spt")]
    models = [name for name in names.values() if arms[0][name] or arms[1][name]]
    many = len(models) > 6                                         # then sorted by the gain
    if many:
        gained = {name: [*minus(arms[1][name], arms[0][name]).values()] for name in models}
        models.sort(key=lambda name: -statistics.mean(gained[name] or [-math.inf]))
    for name in models:
        scratch, spt = arms[0][name], arms[1][name]
        gains = minus(spt, scratch)
        gain = signed(gains).split(" (")[0]                        # the number of seeds has its own column
        rows.append([DEMOS[task], name, mean_std(scratch), mean_std(spt), gain, str(len(gains))])
    head = ["task", "model", "from scratch", "self-pretrained", "gain [95 % interval]", "seeds"]
    pair = [name for name in models if name == "S4" or name.startswith("Transformer")]
    if len(pair) == 2 == len(models) and all(arm[name] for arm in arms for name in pair):
        gaps = [statistics.mean(arm["S4"].values()) - statistics.mean(arm[pair[0]].values()) for arm in arms]
        rows.append([DEMOS[task], "*gap, S4 minus Transformer*", *(f"{gap:+.1f}" for gap in gaps), "", ""])
    caption = ""
    if many:
        caption, head = f"{DEMOS[task]}. {spread(models, arms)}", [*head[1:], "hidden"]
        pretrained = {name: cells.get(Cell(task, model, "masked", "pretraining"), {}) for model, name in names.items()}
        rows = [[*row[1:], mean_std({seed: 100 * run["val_score"] for seed, run in pretrained[name].items()})]
                for row, name in zip(rows, models)]
    caption += ("Test accuracy in percent, mean ± standard deviation over seeds. Small models on small or shortened "
                f"sets: not the paper's tasks; {provenance(runs)}.")
    text = f"{markdown(head, rows)}\n\n{caption}"
    print(f"\n{text}\n")

    def figure_of_demo(plt, cells):
        if many:
            figure, axis = plt.subplots(figsize=(6.4, 0.9 + 0.22 * len(models)))
            dumbbells(axis, models, arms)
        else:
            figure, axis = plt.subplots(figsize=(max(6.4, 1.4 * len(models)), 3.6))
            bars(axis, models, arms, dict.fromkeys(models, 50))
        return figure, DEMOS[task]

    draw(figure_of_demo, cells, args.figure)
    if args.readme:
        replace_block(args.readme, args.figure.stem, f"{text}\n\n![{args.figure.stem}]({args.figure})")


OWN_ARMS = {"scratch": ("from scratch", SCRATCH), "spt": ("self-pretrained", SPT), "joint": ("joint", OTHER)}


def with_pretraining(runs):
    """Finetuning runs. Added to a run: first, that of its pretraining; passes, forward and backward, and minutes, both
    with those of `first`."""
    pretrained = {run["run"]: run for run in runs if "start" not in run}
    for run in runs:
        if run.get("start") in OWN_ARMS:
            first = pretrained.get(Path(run["init"]).name) if run["init"] else dict(steps=0, seconds=0)
            if first is None:
                print(f"warning: {run['run']} is left out: its pretraining run is not here", file=sys.stderr)
                continue
            each = 2 if run["start"] == "joint" and run["objective"] == "masked" else 1
            yield run | dict(first=first, passes=each * run["steps"] + first["steps"],
                             minutes=(run["seconds"] + first["seconds"]) / 60)


def own_arms(runs):
    """{(task, share of the labels): {model: {start: {seed: run}}}} of finetuning runs."""
    found = {}
    for run in with_pretraining(runs):
        arms = found.setdefault((run["task"], run.get("label_fraction") or 1), {}).setdefault(run["model"], {})
        if arms.setdefault(run["start"], {}).setdefault(run["seed"], run) is not run:
            print(f"warning: {run['run']} is left out: another has the same cell and seed", file=sys.stderr)
    return found


def own_title(task, share):
    return Path(task.removeprefix("file:")).name + (f" with {100 * share:g} % of the labels" if share < 1 else "")


def own(args):
    """Your own data, of what is finished: for each share of the labels a table and a sentence, printed; a figure."""
    found = own_arms(read_runs(args.runs))
    if not found:
        raise UserError(f"no finished finetuning run in {args.runs}; run: bash run_all.sh own --tasks file:PATH")
    head = ["model", *(name for name, _ in OWN_ARMS.values()), "SPT - scratch [95 % interval] (seeds)",
            "joint - scratch", "SPT - joint", "minutes a run"]
    blocks = []
    for key, models in found.items():
        runs = [run for arms in models.values() for arm in arms.values() for run in arm.values()]
        digits, score, unit = (3, "R2", "R2") if "test_r2" in runs[0] else (1, "accuracy in percent", "points")
        rows, gains = [], {}
        for model, arms in models.items():
            scratch, spt, joint = ({seed: run["score"] for seed, run in arms.get(start, {}).items()}
                                   for start in OWN_ARMS)
            minutes = [mean_std({seed: run["minutes"] for seed, run in arms.get(start, {}).items()}).split(" ")[0]
                       for start in OWN_ARMS]
            differences = minus(spt, scratch), minus(joint, scratch), minus(spt, joint)
            rows.append([model, *(mean_std(arm, digits) for arm in (scratch, spt, joint)),
                         *(signed(difference, digits) for difference in differences), " / ".join(minutes)])
            if len(differences[0]) > 1:
                gains[model] = differences[0]
        passes = {run["passes"] for run in runs}
        equal = f"{passes.pop():,} passes a run" if len(passes) == 1 else "unequal passes"
        blocks += [f"**{own_title(*key)}**", markdown(head, rows),
                   f"Test {score} on {values_of(runs, 'test_examples')} examples, mean ± standard deviation over "
                   "seeds; intervals are over seeds, on one split; "
                   f"{'joint training sees the labelled inputs only; ' if key[1] < 1 else ''}{equal}; "
                   f"{provenance(runs + [run['first'] for run in runs if run['init']])}."]
        if gains:
            seeds = {len(gain) for gain in gains.values()}
            texts = [signed(gain, digits) for gain in gains.values()]
            texts = [text.rsplit(" (", 1)[0] if len(seeds) == 1 else text for text in texts]
            texts[0] = texts[0].replace(" [", f" {unit} [")            # the unit stands once
            texts = " and ".join(f"{text} for {model}" for text, model in zip(texts, gains))
            seeds = " or ".join(map(str, sorted(seeds)))
            blocks.append(f"On {own_title(*key)} SPT gains {texts} over scratch ({seeds} seeds, "
                          f"{'un' if 'unequal' in equal else ''}equal passes).")
    print("\n" + "\n\n".join(blocks) + "\n")
    draw(lambda plt, cells: own_figure(plt, found), {}, args.figure)
    if args.readme:
        figure = os.path.relpath(args.figure, args.readme.parent)
        replace_block(args.readme, "own", "\n\n".join([*blocks, f"![gains of all seeds]({figure})"]))


def dots(axis, lines):
    """{line: {start: runs}} -> a dot a seed, a bar at the mean."""
    for y, arms in enumerate(lines.values()):
        for i, start in enumerate(start for start in OWN_ARMS if start in arms):
            runs, (label, colour) = arms[start], OWN_ARMS[start]
            height = y + 0.2 * (i - (len(arms) - 1) / 2)
            if runs:
                scores = [run["score"] for run in runs]
                heights = np.linspace(height - 0.04, height + 0.04, len(runs))                # equal scores stay apart
                axis.scatter(scores, heights, s=7, color=colour, label=label)
                axis.plot([statistics.mean(scores)] * 2, [height - 0.1, height + 0.1], color=colour)
    axis.set_yticks(range(len(lines)), lines)
    axis.set(ylim=(len(lines) - 0.5, -0.5), xlabel="test accuracy, %: seeds and mean")
    axis.grid(axis="x", color="0.9")


def own_figure(plt, found):
    """For each share of the labels: scores of all seeds on the left, gains over scratch on the right."""
    figure, axes = plt.subplots(len(found), 2, figsize=(9, 1.2 + 1.6 * len(found)), squeeze=False)
    for (left, right), (key, models) in zip(axes, found.items()):
        for y, arms in enumerate(models.values()):
            score = "R2" if any("test_r2" in run for arm in arms.values() for run in arm.values()) else "accuracy, %"
            for height, start in ((y - 0.1, "spt"), (y + 0.1, "joint")):
                gain = [*minus(*({seed: run["score"] for seed, run in arms.get(name, {}).items()}
                                 for name in (start, "scratch"))).values()]
                if gain:
                    right.errorbar(statistics.mean(gain), height, xerr=half_width(gain), color=OWN_ARMS[start][1],
                                   marker="o", capsize=3)
        dots(left, {model: {start: [*arm.values()] for start, arm in arms.items()} for model, arms in models.items()})
        right.axvline(0, color="black", linestyle=":")
        right.set_yticks(range(len(models)), models)
        right.set(xlabel="gain over scratch, 95 % interval", ylim=(len(models) - 0.5, -0.5))
        left.set_xlabel(f"test {score}: seeds and mean")
        left.set_title(own_title(*key), loc="left")
    return figure, "What self-pretraining and joint training gain"


# ---- runs in progress ------------------------------------------------------------------------------------------------

def newest(folder):
    """The newest value of each field in a run's log; `kind` is that of the last record."""
    return {name: value for record in read_log(folder) for name, value in record.items()}


def status(args):
    """How many runs below a folder are done, then a line for each other one that was started: running, with its last
    numbers and the time left; silent, where its log has not changed for long; or failed, with the error."""
    folders = [path.parent for path in sorted(Path(args.what).glob("**/log.jsonl"))]
    if not folders:
        raise UserError(f"status {args.what}: no run was started there")
    started = [folder for folder in folders if not (folder / "result.json").exists()]
    print(f"{len(folders) - len(started)} of {len(folders)} runs are done")
    for folder in started:
        last = newest(folder)
        step, total, seconds = last.get("step", 0), last.get("total", 0), last.get("ms_per_step", 0) / 1000
        numbers = [f"{name} {value:.3f}" for name, value in last.items() if name == "loss" or name.startswith("val_")]
        text = " ".join([f"{folder.name}: {step}/{total}", *numbers])
        silent = time.time() - (folder / "log.jsonl").stat().st_mtime
        if last.get("kind") == "error":
            print(f"failed   {folder.name}: {last['error']}")
        elif silent > 600 + 1000 * seconds:                  # ten minutes, and ten times 100 steps, a line of the log
            print(f"silent   {text} for {silent / 60:.0f} minutes")
        else:
            print(f"running  {text}" + (f", {seconds * (total - step) / 60:.0f} minutes left" if seconds else ""))


def forecast(args):
    """For run_all.sh: how long a demo takes here. stdin: its chains, `what` of a seed side by side, seed after seed.
    Waits for timed steps from scratch. SPT has as many, in two stages. Evaluations and test take some 15 % more."""
    chains = [(re.search(r"--model (\S+)", line)[1], re.findall(r"--out (\S+)", line)) for line in sys.stdin]
    jobs, seconds, seeds = int(args.what), {}, {}
    while len(seconds) < min(jobs, len(dict(chains))):
        time.sleep(0.5)
        for model, outs in chains:
            last = newest(Path(outs[0]))
            if len(outs) == 1 and last.get("step", 0) >= 200:                            # the first 100 are slower
                seconds[model] = 1.15 * last["total"] * last["ms_per_step"] / 1000
    for model, outs in chains:
        left = sum(not Path(out, "result.json").exists() for out in outs) / len(outs)
        seeds.setdefault(outs[0].split("-s")[-1], []).append(left * seconds.get(model, max(seconds.values())))
    minutes = sum(max(sum(times) / jobs, max(times)) for times in seeds.values()) / 60
    print(f"about {math.ceil(minutes)} minutes here, by the time of the first steps", flush=True)


# ---- commands --------------------------------------------------------------------------------------------------------

FIGURES = {1: figure1, 2: figure2, 3: figure3, 4: figure4, 5: figure5}
COMMANDS = {"table": one, "figure": one, "all": everything, "report": report, "keep": keep, "readme": readme,
            "demo": demo, "own": own, "status": status, "forecast": forecast}


def main(argv=None):
    """The commands of the module's docstring -> exit code: 0, 2 after a user's mistake."""
    try:
        command(argv)
    except (UserError, OSError, ImportError) as error:       # a missing file, a full disk; no matplotlib
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def command(argv):
    parser = Parser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("what", nargs="?", default="", help="number of the table or figure; status, own: the folder")
    parser.add_argument("--preset", choices=("paper", "mini"), default="paper", help="see run_all.sh")
    parser.add_argument("--runs", type=Path, help="folder of runs or runs.jsonl (default: runs/PRESET, else the kept)")
    parser.add_argument("--out", type=Path, help="folder for what is written (default: results/PRESET)")
    parser.add_argument("--check", action="store_true", help="readme: write nothing; an error where a page is stale")
    parser.add_argument("--figure", type=Path, help="demo, own: where the figure goes (default: results/demo.png, or "
                        "own.png in the folder of the runs)")
    parser.add_argument("--readme", type=Path, help="demo, own: write tables between their markers in this file")
    args = parser.parse_args(argv)
    name = args.command if args.command in ("demo", "own") else args.preset
    own, kept = Path("runs", name), ROOT / "results" / name / "runs.jsonl"
    if args.command == "own" and args.what:
        args.runs = Path(args.what)
    args.runs = args.runs or (kept if kept.exists() and not own.exists() and args.command != "keep" else own)
    args.out = args.out or Path("results", name)
    args.figure = args.figure or (args.runs / "own.png" if args.command == "own" else Path("results/demo.png"))
    COMMANDS[args.command](args)


if __name__ == "__main__":
    for quiet in (signal.SIGPIPE, signal.SIGINT):            # table 2 | head, Ctrl-C: no traceback
        signal.signal(quiet, signal.SIG_DFL)
    sys.exit(main())
