"""Make tables and figures from runs. Reads only files: result.json, log.jsonl and kernels.npz of
run directories, or results/PRESET/runs.jsonl and kernels.npz, which `keep` makes from them.

    python analyze.py all               the paper's tables and figures with ours, from runs/paper into results/paper
    python analyze.py all --preset mini the same at small scale, from runs/mini into results/mini
    python analyze.py table 2           one table in Markdown; `figure 1`: one figure
    python analyze.py keep              all runs as results/paper/runs.jsonl and kernels.npz, to be committed
    python analyze.py keep demo         the runs in runs/demo as results/demo.jsonl
    python analyze.py readme            write their results into README.md and results/PRESET/README.md; --check
    python analyze.py compare runs/a runs/b     any runs: one row per setting, with gains and intervals; a figure
    python analyze.py demo              the demo's table (Markdown) and figure, from runs/demo
    python analyze.py own runs/own      your data: SPT and joint training against scratch (run_all.sh own)
    python analyze.py curves RUN...     loss, score, learning rate over steps and minutes: curves.png
    python analyze.py status runs/demo  which runs are done, running (with the time left), stopped or failed

A cell is the mean ± standard deviation over seeds of the test accuracy at the checkpoint that
validation chose. Gains have 95 % intervals over seeds and test examples (compare/statistics.py).
The paper's claims and figure 3 show seeds only: Student's t, and differences paired by seed."""

# first: no traceback if Ctrl-C comes while importing
import argparse
import functools
import json
import math
import statistics
import sys
import time
from collections import namedtuple
from pathlib import Path

import numpy as np

from compare.curves import curves
from compare.drawing import OTHER, SCRATCH, SPT, bars, draw, markdown, replace_block, wrapped, write
from compare.reading import evaluations, identity, provenance, read_runs, scores, variants_of
from compare.report import report
from compare.settings import compare
from compare.statistics import gain, half_width, mean_std, minus, signed
from engine.folder import newest
from experiments import entries
from experiments.commands import record, trained
from files import ROOT, Parser, UserError, exit_code, reading
from tasks.picture import picture

# ---- Cells: which runs make one number -----------------------------------------------------------

# The runs of a cell differ only in their seed. word, start: of a variant in entries.py; task:
# without `_mini`.
Cell = namedtuple("Cell", "task model word start")


@functools.cache
def cells_of(preset):
    """Return {`identity` of a run: its cell}, for all runs that the entries train."""
    found, sizes = {}, {mini: size for size, mini in MINI_SIZES.items()}
    for row in entries.paper(preset)["all"]:
        for run in trained(row):
            for each in filter(None, (run, run.first)):
                word = sizes.get(each.word, each.word)
                found[identity(record(each))] = Cell(
                    each.task.removesuffix("_mini"), each.model, word, each.start
                )
    return found


def by_cell(runs, preset="paper"):
    """Return {cell: {seed: run}}. A run counts if it did exactly what an entry says; a warning
    counts the others."""
    cells, found = cells_of(preset), {}
    for variant in variants_of(runs):
        key = identity(next(iter(variant.runs.values())))
        if key in cells:
            found[cells[key]] = variant.runs
    if left_out := len(runs) - sum(map(len, found.values())):
        print(
            f"warning: {left_out} of {len(runs)} runs are left out: they differ from every entry "
            "of a table; "
            "python analyze.py compare FOLDER shows them",
            file=sys.stderr,
        )
    return found


def kernels_of(runs):
    """Return S4's convolution kernels before and after pretraining, {name of the run: (2, layers,
    l)}: the maximum of |K| over channels and both directions for each lag (paper, section 3.6,
    footnote 3)."""
    found = {}
    for run in runs:
        path = run["folder"] / "kernels.npz"
        # kept runs share one file
        prefix = "" if run["place"] == run["folder"] else f"{run['run']}/"
        if not path.exists():
            continue
        with (
            reading(f"{path} is damaged", "remove it, or make the run again"),
            np.load(path) as arrays,
        ):
            if f"{prefix}after" in arrays:
                # (2, layers, directions, l)
                kernels = np.stack([arrays[f"{prefix}before"], arrays[f"{prefix}after"]])
                # the backward one starts at lag 1 (`fft_conv`)
                kernels[:, :, 1:, 1:] = kernels[:, :, 1:, :-1]
                kernels[:, :, 1:, 0] = 0
                found[run["run"]] = kernels.max(2)
    return found


# ---- tables --------------------------------------------------------------------------------------

# Title, then test accuracy in percent (BIDMC: R2), as printed. x: chance level, or too long to
# train. avg: the average as printed (results/averages.md lists those that count x as 50, and the
# misprints).
PAPER = {
    1: """Long Range Arena, Transformers of the sizes of Tay et al.
approach                 model       word   start   listops text  retrieval image pathfinder pathx avg
Transformer              transformer -      scratch 36.37   64.27 57.46     42.44 71.40      x     53.66
Transformer_+_Masked_SPT transformer -      spt     59.75   89.27 88.64     74.22 88.45      87.73 81.34
Transformer_+_Causal_SPT transformer causal spt     59.15   88.81 90.38     76.00 88.49      88.05 81.81
""",
    2: """Long Range Arena, Transformers and S4
approach                   model       word   start   listops text  retrieval image pathfinder pathx pathx256 avg
Transformer_+_Rotary       rotary      -      scratch 47.90   79.08 82.31     75.04 76.64      84.72 x        74.28
Transformer_+_Rotary_+_SPT rotary      -      spt     61.49   91.02 91.57     86.04 94.16      92.98 x        86.21
S4                         s4          -      scratch 59.60   86.82 90.90     88.65 94.20      96.35 67.82    86.09
S4_+_SPT                   s4          -      spt     61.25   90.34 88.74     89.36 94.92      96.94 87.11    86.75
Pythia_70M_(Rand_Init)     pythia_rand -      scratch 41.20   69.29 76.45     52.55 74.31      x     x        62.76
Pythia_70M                 pythia      -      scratch 43.05   83.41 84.29     67.41 80.05      x     x        68.04
""",
    3: """Speech Commands, sCIFAR, BIDMC (R2)
approach          model  word   start   sc_causal sc    scifar bidmc_hr bidmc_rr bidmc_spo2
S4                s4     -      scratch 93.60     96.08 91.13  0.999    0.994    0.999
Transformer       rotary -      scratch 84.55     86.93 79.41  0.998    0.981    0.998
S4_+_SPT          s4     -      spt     95.09     96.52 91.67  0.999    0.990    0.997
Transformer_+_SPT rotary -      spt     86.13     91.49 90.29  0.992    0.956    0.993
""",
    7: """Initialisations
approach              model    word   start   listops text  image pathx avg
S4_+_Rand_Init_+_SPT  s4_rand  -      spt     61.5    90.5  87.25 91.05 82.75
S4_+_Rand_Init        s4_rand  -      scratch 59.85   88.34 75.56 73.57 74.33
S4_+_SPT              s4       -      spt     61.25   90.34 89.36 96.94 84.47
S4                    s4       -      scratch 59.60   86.82 88.65 96.35 82.85
DLR_+_Rand_Init_+_SPT dlr_rand -      spt     56.75   89.13 81.83 94.59 80.47
DLR_+_Rand_Init       dlr_rand -      scratch 39.55   73.72 56.70 50.04 55.00
DLR_+_SPT             dlr      -      spt     60.45   89.94 87.12 96.38 83.37
DLR                   dlr      -      scratch 57.50   79.65 79.83 92.33 77.33
""",
    8: """A fixed budget of epochs
approach               word     start   image_rotary image_s4 text_rotary text_s4
SPT_0_%_of_the_budget  budget0  scratch 75.04        87.83    79.08       87.51
SPT_20_%_of_the_budget budget20 spt     84.45        87.15    90.20       89.50
SPT_40_%_of_the_budget budget40 spt     84.95        87.72    90.56       89.10
SPT_60_%_of_the_budget budget60 spt     84.32        87.63    90.65       88.87
""",
    9: """Image, across model sizes
approach                   model  word start   100k  300k  1m    3m    10m
Transformer_+_Rotary       rotary -    scratch 68.51 68.51 71.50 75.04 77.88
Transformer_+_Rotary_+_SPT rotary -    spt     74.43 76.36 84.83 86.04 86.54
S4                         s4     -    scratch 81.36 83.63 84.81 88.65 85.73
S4_+_SPT                   s4     -    spt     83.45 86.39 88.67 89.36 88.72
""",
}
# parameters in mini
MINI_SIZES = {"100k": "2k", "300k": "4k", "1m": "10k", "3m": "20k", "10m": "80k"}
MINI_NOTE = "**Mini**: small models on short stand-ins of the paper's tasks, about half a minute of training per stage."
# Columns that are not named after a task, and the fields of their cells.
COLUMNS = {
    "sc_causal": dict(task="sc", word="causal"),
    "3m": dict(task="image"),
    **{size: dict(task="image", word=size) for size in MINI_SIZES if size != "3m"},
    **{
        f"{task}_{model}": dict(task=task, model=model)
        for task in ("image", "text")
        for model in ("rotary", "s4")
    },
}


def grid(number):
    """Parse a table of the paper: {approach: {column: (cell, printed)}}, and {approach: the printed
    average}."""
    head, *lines = [line.split() for line in PAPER[number].splitlines()[1:]]
    rows, averages = {}, {}
    for line in lines:
        row = dict(zip(head, line, strict=True))
        approach = row.pop("approach").replace("_", " ")
        if "avg" in row:
            averages[approach] = row.pop("avg")
        shared = {name: row.pop(name).replace("-", "") for name in Cell._fields if name in row}
        rows[approach] = {
            column: (Cell(**shared | COLUMNS.get(column, dict(task=column))), printed)
            for column, printed in row.items()
        }
    return rows, averages


def ours(cells, number, approach):
    """Return {column: {seed: score}} of our runs in a row of a table."""
    return {
        column: scores(cells.get(cell, {}))
        for column, (cell, _) in grid(number)[0][approach].items()
    }


def table(cells, number, mini=False):
    """Return a table of the paper in Markdown: the grid, averages, gains, and where our numbers
    come from."""
    rows, printed_averages = grid(number)
    scratch = {
        (column, cell.model): cell
        for row in rows.values()
        for column, (cell, _) in row.items()
        if cell.start == "scratch"
    }
    main, averages, gains, made = [], [], [], []
    for approach, row in rows.items():
        main.append([approach])
        gains.append([approach])
        for column, (cell, printed) in row.items():
            runs, base = cells.get(cell, {}), cells.get(scratch.get((column, cell.model)), {})
            first = cells.get(cell._replace(start="pretrain"), {}) if cell.start == "spt" else {}
            made += [*runs.values(), *first.values()]
            digits = 3 if printed.startswith("0.") else 2  # R2 is printed with 3
            count = f" ({len(runs)})" if runs else ""
            main[-1].append(f"{printed} / {mean_std(scores(runs), digits)}{count}")
            over = gain(runs, base)
            gains[-1].append(signed(over.points, digits, over.half))
        if cell.start != "spt":
            gains.pop()
        if approach in printed_averages:
            averages.append([approach, printed_averages[approach], our_average(cells, row)])
    names = [
        f"{column} (mini: {MINI_SIZES[column]})" if mini and column in MINI_SIZES else column
        for column in row
    ]
    parts = [
        f"### Table {number}{', mini' if mini else ''}: {PAPER[number].splitlines()[0]}",
        f"{MINI_NOTE} The paper's numbers, on the original tasks, are for orientation only."
        if mini
        else "",
        f"Each cell: paper / {'mini' if mini else 'ours'}, mean ± standard deviation (seeds). x: "
        "chance level, "
        "or too long to train.",
        markdown(["approach", *names], main),
        markdown(["approach", "average in the paper", "ours"], averages),
        markdown(["gain of SPT [95 % interval] (seeds)", *row], gains),
        f"{provenance(made)}." if made else "",
    ]
    return "\n\n".join(filter(None, parts))


def our_average(cells, row):
    """Return the average over the tasks that were run. PathX-256 never counts, as in the
    literature."""
    columns = [cells.get(cell, {}) for column, (cell, _) in row.items() if column != "pathx256"]
    means = [statistics.mean(scores(runs).values()) for runs in columns if runs]
    return (
        f"{statistics.mean(means):.2f} over {len(means)} of {len(columns)} tasks" if means else "–"
    )


# ---- the paper's claims, and what our runs measured for each -------------------------------------

NO_PAIR = "no full runs to compare"
KERNEL_TASKS = ("image", "text", "pathx", "listops")
# (table, approach) from scratch, the same after SPT.
PAIRS = {
    "Transformer": ((1, "Transformer"), (1, "Transformer + Masked SPT")),
    "rotary": ((2, "Transformer + Rotary"), (2, "Transformer + Rotary + SPT")),
    "S4": ((2, "S4"), (2, "S4 + SPT")),
}
INITIALISATIONS = {
    name: ((7, name), (7, f"{name} + SPT"))
    for name in ("S4", "DLR", "S4 + Rand Init", "DLR + Rand Init")
}


def over_tasks(cells, *approaches):
    """Average over the tasks and seeds that these approaches (table, name) have in common -> tasks,
    and {seed: average} per approach. PathX-256 does not count, as in the paper's averages."""
    rows = [ours(cells, *approach) for approach in approaches]
    tasks = [
        task
        for task in CHANCE
        if task != "pathx256" and rows and all(row.get(task) for row in rows)
    ]
    seeds = (
        set.intersection(*(set(row[task]) for row in rows for task in tasks)) if tasks else set()
    )
    return tasks, [
        {seed: statistics.mean(row[task][seed] for task in tasks) for seed in sorted(seeds)}
        for row in rows
    ]


def beside(cells, one, other, labels):
    """Return two differences of approaches, (before, after) each, then first minus second, with
    these labels."""
    tasks, (a, b, c, d) = over_tasks(cells, *one, *other)
    if not a:
        return f"{labels[0]}, {labels[1]}: {NO_PAIR}"
    differences = minus(b, a), minus(d, c), minus(minus(b, a), minus(d, c))
    texts = [f"{label} {signed(found)}" for label, found in zip(labels, differences)]
    return f"{', '.join(texts)}, over {len(tasks)} tasks"


def gap(cells, name, lower, upper):
    """Return by how much one model exceeds another, after SPT and from scratch."""
    labels = "after SPT", "from scratch", "change"
    return f"{name}: {beside(cells, (lower[1], upper[1]), (lower[0], upper[0]), labels)}"


def by_fraction(cells, task):
    """Return S4's values for figure 3: scores from scratch, scores after SPT, and the gain of SPT
    in percent of the score from scratch. Each is {share of the training examples in percent: {seed:
    value}}."""
    scratch, spt, gains = {}, {}, {}
    for fraction in entries.FRACTIONS:
        share, cell = 100 * fraction, Cell(task, "s4", f"data{fraction}", "scratch")
        before, after = (
            scores(cells.get(cell._replace(start=start), {})) for start in ("scratch", "spt")
        )
        scratch[share], spt[share] = before, after
        gains[share] = {
            seed: 100 * points / before[seed] for seed, points in minus(after, before).items()
        }
    return [
        {share: values for share, values in found.items() if values}
        for found in (scratch, spt, gains)
    ]


def half_lags(cells, task):
    """Return per layer the lag within which half of the kernel's sum lies, mean over seeds: at
    start -> after SPT."""
    found = list(kernels_of(cells.get(Cell(task, "s4", "", "pretrain"), {}).values()).values())
    if not found:
        return f"{task}: {NO_PAIR}"
    # (2, layers) each
    lags = [(kernels.cumsum(-1) < kernels.sum(-1, keepdims=True) / 2).sum(-1) for kernels in found]
    before, after = (", ".join(f"{lag:.0f}" for lag in stage) for stage in np.mean(lags, 0))
    return f"{task} (length {found[0].shape[-1]:,}): {before} -> {after} ({len(found)})"


def claims(cells):
    """Return the paper's seven claims with what our runs measured, in Markdown."""
    transformers, fractions, budgets = ("Transformer", "rotary"), [], []
    tasks, (masked, causal) = over_tasks(
        cells, (1, "Transformer + Masked SPT"), (1, "Transformer + Causal SPT")
    )
    for task in ("image", "text"):
        texts = [
            f"{share:g} %: {signed(found)}" for share, found in by_fraction(cells, task)[2].items()
        ]
        fractions.append(f"{task}: {', '.join(texts) or NO_PAIR}")
    # SPT takes 0, 20, 40, 60 %
    scratch, *shared = [ours(cells, 8, approach) for approach in grid(8)[0]]
    for column in scratch:
        gains = [minus(share[column], scratch[column]) for share in shared]
        budgets.append(
            f"{column.replace('_', ', ')}: "
            f"{', '.join(map(signed, gains)) if any(gains) else NO_PAIR}"
        )
    measured = {
        "SPT lifts Transformers most: gains in points": [
            beside(cells, PAIRS[name], PAIRS["S4"], (name, "S4", "difference"))
            for name in transformers
        ],
        "masked and causal SPT are alike: difference in points": [
            f"causal minus masked {signed(minus(causal, masked))}, over {len(tasks)} tasks"
            if masked
            else NO_PAIR
        ],
        "the gap between Transformer and S4 shrinks: S4 minus Transformer in points": [
            gap(cells, name, PAIRS[name], PAIRS["S4"]) for name in transformers
        ],
        "initialisation matters less after SPT: own minus random initialisation, in points": [
            gap(cells, name, INITIALISATIONS[f"{name} + Rand Init"], INITIALISATIONS[name])
            for name in ("S4", "DLR")
        ],
        "gains grow as data shrinks: relative gain of S4 in percent, by share of the data": fractions,
        "gains survive an equal budget: gain in points when SPT takes 20, 40, 60 % of it": budgets,
        "learned kernels differ from HiPPO, by task: lag within which half of the kernel's sum "
        "lies, per layer": [half_lags(cells, task) for task in KERNEL_TASKS],
    }
    return markdown(
        ["", "claim", "measured: means over seeds [95 % interval of paired differences] (seeds)"],
        [
            [str(i), claim, "<br>".join(found)]
            for i, (claim, found) in enumerate(measured.items(), 1)
        ],
    )


# ---- figures -------------------------------------------------------------------------------------

# %
CHANCE = {
    "listops": 10,
    "text": 50,
    "retrieval": 50,
    "image": 10,
    "pathfinder": 50,
    "pathx": 50,
    "pathx256": 50,
}
LAYERS = (SPT, OTHER, "#009e73", "#cc79a7")  # of layers 1, 3, 5, 7


def paper_numbers(cells, number, approach):
    """Return {column: number} of a row as the paper prints it; {} for mini runs, whose tasks
    differ."""
    if any(run["task"].endswith("_mini") for runs in cells.values() for run in runs.values()):
        return {}
    return {
        column: float(printed)
        for column, (_, printed) in grid(number)[0][approach].items()
        if printed != "x"
    }


def figure1(plt, cells):
    """Draw Transformer, rotary Transformer and S4 on Long Range Arena, from scratch and after
    SPT."""
    figure, axes = plt.subplots(3, 1, figsize=(8, 7.5), sharex=True)
    for axis, pair in zip(axes, PAIRS.values()):
        bars(
            axis,
            CHANCE,
            [ours(cells, *approach) for approach in pair],
            CHANCE,
            [paper_numbers(cells, *approach) for approach in pair],
        )
        axis.set_title(pair[0][1])
    return figure, "Figure 1: Long Range Arena"


def figure2(plt, cells):
    """Draw the initialisations: averages over the tasks of table 7 that all approaches with runs
    have in common."""
    run = [
        approach
        for pair in INITIALISATIONS.values()
        for approach in pair
        if any(ours(cells, *approach).values())
    ]
    tasks, averages = over_tasks(cells, *run)
    found, variants, papers = dict(zip(run, averages)), ({}, {}), ({}, {})
    for name, pair in INITIALISATIONS.items():
        for approach, variant, paper in zip(pair, variants, papers):
            numbers, variant[name] = paper_numbers(cells, *approach), found.get(approach, {})
            if numbers and variant[name]:
                paper[name] = statistics.mean(numbers[task] for task in tasks)
    figure, axis = plt.subplots(figsize=(7, 3.8))
    bars(axis, INITIALISATIONS, variants, {}, papers)
    return (
        figure,
        "Figure 2: initialisations, average of "
        f"{', '.join(tasks) or 'no task: none is common to all'}",
    )


def figure3(plt, cells):
    """Draw accuracy against the share of the training set, and the gain of SPT relative to training
    from scratch."""
    figure, axes = plt.subplots(1, 2, figsize=(8.5, 3.8))
    for task, colour in (("image", SPT), ("text", OTHER)):
        scratch, spt, gains = by_fraction(cells, task)
        for axis, found, style, label in (
            (axes[0], scratch, "--", f"{task}, from scratch"),
            (axes[0], spt, "-", f"{task}, SPT"),
            (axes[1], gains, "-", ""),
        ):
            values = [list(seeds.values()) for seeds in found.values()]
            axis.errorbar(
                list(found),
                list(map(statistics.mean, values)),
                list(map(half_width, values)),
                color=colour,
                linestyle=style,
                marker="o",
                markersize=3,
                capsize=2,
                label=label,
            )
    for axis, label in zip(axes, ("test accuracy, %", "relative gain of SPT, %")):
        axis.set(xscale="log", xlabel="share of the training examples, %", ylabel=label)
        shares = [100 * fraction for fraction in entries.FRACTIONS]
        axis.set_xticks(shares, [f"{share:g}" for share in shares])
        axis.minorticks_off()
    axes[1].axhline(0, color="black", linestyle=":")
    return figure, "Figure 3: S4 on parts of the training set; bars: 95 % intervals"


def figure4(plt, cells):
    """Draw max |K| over channels and directions against the lag, for odd layers: after SPT and at
    HiPPO's start."""
    plt.rcParams["text.parse_math"] = True  # powers of ten along the axes
    figure, axes = plt.subplots(len(KERNEL_TASKS), 1, figsize=(8, 10))
    for axis, task in zip(axes, KERNEL_TASKS):
        runs = cells.get(Cell(task, "s4", "", "pretrain"), {}).values()
        name, kernels = next(iter(kernels_of(runs).items()), ("not run", None))
        axis.set(title=f"{task}: {name}", xscale="log", yscale="log", ylabel="max |K|")
        if kernels is None:
            continue
        before, after = kernels  # (layers, l) each
        lags = range(1, before.shape[1] + 1)
        for i in range(0, len(after), 2):
            axis.plot(lags, after[i], color=LAYERS[i // 2], label=f"SPT, layer {i + 1}")
        axis.plot(lags, before[0], color="black", linestyle="--", label="HiPPO, layer 1")
        for k in range(1, 9) if task in ("image", "pathx") else ():
            axis.axvline(k * math.isqrt(len(lags)) + 1, color="0.85", zorder=0)
    axes[-1].set_xlabel("lag + 1, positions (vertical lines: first multiples of the image's width)")
    return figure, "Figure 4: kernels of S4 after SPT against those it started with, one seed"


CURVES = {
    "scratch": ("budget0", SCRATCH, "from scratch"),
    "spt": ("budget20", SPT, "finetuning after SPT"),
    "pretrain": ("budget20", OTHER, "SPT with 20 % of the budget"),
}


def curves_of(cells, task):
    """Return {start: run} of table 8's rotary Transformer for figure 5, of the first seed. Adds
    `evals`, the evaluations, to the runs of all seeds."""
    found = {}
    for start, (word, _, _) in CURVES.items():
        for _, run in sorted(cells.get(Cell(task, "rotary", word, start), {}).items()):
            evaluations(run)
            found.setdefault(start, run)
    return found


def figure5(plt, cells):
    """Draw validation curves of table 8's Transformers: denoising, and the downstream task with and
    without SPT."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 6))
    for (above, below), task, score_is in zip(
        axes.T, ("image", "text"), ("minus squared error", "accuracy")
    ):
        for start, run in curves_of(cells, task).items():
            epochs = [record["step"] * run["epochs"] / run["steps"] for record in run["evals"]]
            axis, field = (above, "val_score") if start == "pretrain" else (below, "val_accuracy")
            _, colour, label = CURVES[start]
            axis.plot(epochs, [record[field] for record in run["evals"]], color=colour, label=label)
        above.set(title=f"{task}: rotary Transformer", ylabel=f"denoising, {score_is}")
        below.set(xlabel="epochs of the stage", ylabel="downstream accuracy")
    return figure, "Figure 5: validation with and without SPT, one seed"


def draw_paper(number, cells, path, mini):
    """Draw a figure of the paper into a PNG file."""

    def make(plt):
        figure, title = FIGURES[number](plt, cells)
        return figure, title + "\nmini: small models on short stand-in tasks" * mini

    draw(make, path)


# ---- output --------------------------------------------------------------------------------------


def one(args):
    """Print a table (`table N`) or draw a figure (`figure N`)."""
    known = PAPER if args.command == "table" else FIGURES
    if len(args.what) != 1 or args.what[0] not in map(str, known):
        raise UserError(
            f"{args.command} {' '.join(args.what)}: choose from {', '.join(map(str, known))}"
        )
    cells, number, mini = (
        by_cell(read_runs(args.runs), args.preset),
        int(args.what[0]),
        args.preset == "mini",
    )
    if args.command == "table":
        print(table(cells, number, mini))
    else:
        draw_paper(number, cells, args.out / f"figure{number}.png", mini)


def everything(args):
    """Write the claims and every table into one Markdown file, and draw every figure beside it."""
    cells, mini = by_cell(read_runs(args.runs), args.preset), args.preset == "mini"
    note = f", mini\n\n{MINI_NOTE}" if mini else ""
    text = "\n\n".join(
        [
            f"### The paper's claims{note}\n\n{claims(cells)}",
            *(table(cells, n, mini) for n in PAPER),
        ]
    )
    write(args.out / "tables.md", lambda file: file.write(f"{text}\n".encode()))
    for number in FIGURES:
        draw_paper(number, cells, args.out / f"figure{number}.png", mini)


def keep(args):
    """Write into --out: runs.jsonl, one line per run (for figure 5 with evaluations); kernels.npz,
    figure 4's kernels. `keep NAME` writes results/NAME.jsonl, with the evaluations of finetuning.
    Weights are not kept."""
    runs, kernels = read_runs(args.runs), {}
    if args.what:
        for run in runs:
            if "start" in run:
                evaluations(run)
        write_records(args.out / f"{args.what[0]}.jsonl", runs)
        return
    cells = by_cell(runs, args.preset)
    for task in KERNEL_TASKS:
        curves_of(cells, task)  # adds their evaluations
        for run in cells.get(Cell(task, "s4", "", "pretrain"), {}).values():
            path = run["folder"] / "kernels.npz"
            with (
                reading(f"{path} is missing or damaged", "make the run again"),
                np.load(path) as arrays,
            ):
                kernels |= {f"{run['run']}/{stage}": arrays[stage] for stage in ("before", "after")}
    if kernels:
        write(args.out / "kernels.npz", lambda file: np.savez_compressed(file, **kernels))
    write_records(args.out / "runs.jsonl", runs)


def write_records(path, runs):
    """Write one line per run, without what read_runs added."""
    added = "folder", "place", "score"
    lines = [
        json.dumps({name: run[name] for name in run if name not in added}) + "\n" for run in runs
    ]
    write(path, lambda file: file.write("".join(lines).encode()))


def readme(args):
    """Write the results of the kept runs into README.md and results/PRESET/README.md."""
    paragraphs = []
    for preset, title in (("paper", "The paper's recipes"), ("mini", "The mini preset")):
        folder = f"results/{preset}"
        kept = ROOT / folder / "runs.jsonl"
        if not kept.exists():
            paragraphs.append(f"**{title}**: no runs are kept here yet.")
            continue
        runs = read_runs(kept)
        replace_block(
            ROOT / folder / "README.md", "results", claims(by_cell(runs, preset)), args.check
        )
        paragraphs.append(
            f"**{title}**: {provenance(runs)}. [What they show]({folder}/README.md), "
            f"[every table]({folder}/tables.md)."
        )
    replace_block(ROOT / "README.md", "results", wrapped("<br>\n".join(paragraphs)), args.check)


def status(args):
    """Print how many runs below a folder are done, then one line per unfinished run: running, with
    its last numbers and the time left; silent, if its log has not changed for long; stopped; or
    failed, with the error."""
    where = args.what[0] if args.what else "runs"
    folders = [path.parent for path in sorted(Path(where).glob("**/log.jsonl"))]
    if not folders:
        raise UserError(f"status {where}: no run was started there")
    done = {run["folder"] for run in read_runs(Path(where))}  # names damaged runs
    started = [folder for folder in folders if folder not in done]
    print(f"{len(folders) - len(started)} of {len(folders)} runs are done")
    for folder in started:
        if not (folder / "result.json").exists():
            print(state_of(folder))


def state_of(folder):
    """Return the line of `status` for a run without result.json."""
    last = newest(folder)
    step, total, seconds = (
        last.get("step", 0),
        last.get("total", 0),
        last.get("ms_per_step", 0) / 1000,
    )
    numbers = [
        f"{name} {value:.3f}"
        for name, value in last.items()
        if name == "loss" or name.startswith("val_")
    ]
    text = " ".join([f"{folder.name}: {step}/{total}", *numbers])
    silent = time.time() - (folder / "log.jsonl").stat().st_mtime
    if last.get("kind") == "error":
        return f"failed   {folder.name}: {last['error']}"
    if last.get("kind") == "stop":
        return f"stopped  {folder.name}: {last['text']} of {total}; the same command with --resume continues"
    if silent > 600 + 1000 * seconds:  # ten minutes, and 1,000 steps: ten lines of the log
        return f"silent   {text} for {silent / 60:.0f} minutes"
    return f"running  {text}" + (
        f", {seconds * (total - step) / 60:.0f} minutes left" if seconds else ""
    )


# ---- commands ------------------------------------------------------------------------------------

FIGURES = {1: figure1, 2: figure2, 3: figure3, 4: figure4, 5: figure5}
COMMANDS = {
    "table": one,
    "figure": one,
    "all": everything,
    "keep": keep,
    "readme": readme,
    "compare": compare,
    "curves": curves,
    "demo": report,
    "own": report,
    "status": status,
}


def main(argv=None):
    """Run a command of the module's docstring. Return its `exit_code`."""
    return exit_code(lambda: command(argv))


def command(argv):
    parser = Parser(
        examples=True,
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument(
        "what",
        nargs="*",
        help="number of the table or figure; compare, curves, own, status: "
        "folders; demo, keep: a demo of run_all.sh",
    )
    parser.add_argument(
        "--preset", choices=("paper", "mini"), default="paper", help="see run_all.sh"
    )
    parser.add_argument(
        "--runs",
        type=Path,
        help="folder of runs or runs.jsonl (default: runs/PRESET, else kept runs)",
    )
    parser.add_argument("--out", type=Path, help="folder for the output (default: results/PRESET)")
    parser.add_argument(
        "--check", action="store_true", help="readme: write nothing; fail if a page is out of date"
    )
    parser.add_argument(
        "--baseline",
        metavar="NAME=VALUE,...",
        help="compare: what gains are over (default: scratch)",
    )
    parser.add_argument(
        "--select",
        choices=["val"],
        help="compare: test scores only of settings that validation chose",
    )
    parser.add_argument(
        "--any-code", action="store_true", help="compare: pool seeds trained by different code"
    )
    parser.add_argument(
        "--seeds",
        type=lambda text: {*map(int, text.split(","))},
        metavar="0,1,...",
        help="demo, own: only the runs of these seeds",
    )
    parser.add_argument(
        "--figure",
        type=Path,
        help="demo, own, compare, curves: where the figure goes "
        "(default: in the folder of the runs)",
    )
    parser.add_argument(
        "--readme",
        type=Path,
        help="demo, own: write tables between their markers in this file",
    )
    args = parser.parse_args(argv)
    of_users = args.command in ("compare", "curves", "demo", "own")
    if args.command in ("compare", "curves", "own") and args.what:
        args.runs = Path(args.what[0])
    name = args.command if of_users else args.preset
    default = Path("runs", args.what[0] if args.command in ("demo", "keep") and args.what else name)
    kept = ROOT / "results" / args.preset / "runs.jsonl"
    usual = (
        kept
        if kept.exists() and not default.exists() and not of_users and args.command != "keep"
        else default
    )
    args.runs = args.runs or usual
    args.out = args.out or Path(
        "results", "" if args.command == "keep" and args.what else args.preset
    )
    together = args.runs.is_dir() and len(args.what) < 2  # one folder holds all runs
    args.linked = args.figure is not None  # then a page of --readme shows it
    args.figure = args.figure or (args.runs if together else Path()) / f"{args.command}.png"
    picture("--figure", args.figure)
    COMMANDS[args.command](args)


if __name__ == "__main__":
    sys.exit(main())
