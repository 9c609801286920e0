"""The paper's tables and claims, with our runs in their cells."""

import functools
import itertools
import statistics
import sys
from collections import defaultdict, namedtuple

import numpy as np
import pandas

from compare.comparisons import NO_RUNS
from compare.drawing import markdown
from compare.runs import by_variant, identity, provenance, rows_of
from compare.statistics import gain, mean_of, mean_std, minus, signed
from experiments import entries
from experiments.commands import record, trained
from files import reading

# ---- Cells: which runs make one number -----------------------------------------------------------

# The runs of a cell differ only in their seed. word, start: of a variant in entries.py; task:
# without `_mini`.
Cell = namedtuple("Cell", "task model word start")


@functools.cache
def cells_of(preset):
    """Return {`identity` of a run: its cell}, for all runs that the entries train."""
    cells = {}
    sizes = {mini: size for size, mini in MINI_SIZES.items()}
    for row in entries.paper(preset)["all"]:
        for run in trained(row):
            for stage in filter(None, (run, run.first)):
                task, word = stage.task.removesuffix("_mini"), sizes.get(stage.word, stage.word)
                cells[identity(record(stage))] = Cell(task, stage.model, word, stage.start)
    return cells


def by_cell(runs, preset="paper"):
    """Return {cell: its runs by seed}. Runs that no entry trains are left out, with a warning."""
    cells = cells_of(preset)
    arranged = defaultdict(lambda: NO_RUNS)
    for variant in by_variant(runs):
        if cell := cells.get(variant.variant.iloc[0]):
            arranged[cell] = variant
    if left_out := len(runs) - sum(map(len, arranged.values())):
        text = f"warning: {left_out} of {len(runs)} runs are left out: they differ from every entry"
        print(f"{text}; python analyze.py compare FOLDER shows them", file=sys.stderr)
    return arranged


def kernels_of(runs):
    """Return S4's convolution kernels before and after pretraining, {name of the run: (2, layers,
    l)}: the maximum of |K| over channels and both directions for each lag (paper, section 3.6,
    footnote 3)."""
    maxima = {}
    for run in rows_of(runs):
        path = run.folder / "kernels.npz"
        # kept runs share one file
        prefix = "" if run.place == run.folder else f"{run.name}/"
        if not path.exists():
            continue
        damage = reading(f"{path} is damaged", "remove it, or make the run again")
        with damage, np.load(path) as arrays:
            if f"{prefix}after" in arrays:
                # (2, layers, directions, l)
                kernels = np.stack([arrays[f"{prefix}before"], arrays[f"{prefix}after"]])
                # the backward one starts at lag 1 (`fft_conv`)
                kernels[:, :, 1:, 1:] = kernels[:, :, 1:, :-1]
                kernels[:, :, 1:, 0] = 0
                maxima[run.name] = kernels.max(2)
    return maxima


# ---- Tables --------------------------------------------------------------------------------------

# Title, then test accuracy in percent (BIDMC: R2), as printed. x: chance level, or too long to
# train. avg: the average as printed (results/averages.md lists those that count x as 50, and the
# misprints).
PAPER = {
    1: """Long Range Arena, Transformers of the sizes of Tay et al.
approach                 model       word   start   listops text  retrieval image pathfinder pathx avg
Transformer              transformer -      scratch 36.37   64.27 57.46     42.44 71.40      x     53.66
Transformer_+_Masked_SPT transformer -      spt     59.75   89.27 88.64     74.22 88.45      87.73 81.34
Transformer_+_Causal_SPT transformer causal spt     59.15   88.81 90.38     76.00 88.49      88.05 81.81
""",  # noqa: E501
    2: """Long Range Arena, Transformers and S4
approach                   model       word   start   listops text  retrieval image pathfinder pathx pathx256 avg
Transformer_+_Rotary       rotary      -      scratch 47.90   79.08 82.31     75.04 76.64      84.72 x        74.28
Transformer_+_Rotary_+_SPT rotary      -      spt     61.49   91.02 91.57     86.04 94.16      92.98 x        86.21
S4                         s4          -      scratch 59.60   86.82 90.90     88.65 94.20      96.35 67.82    86.09
S4_+_SPT                   s4          -      spt     61.25   90.34 88.74     89.36 94.92      96.94 87.11    86.75
Pythia_70M_(Rand_Init)     pythia_rand -      scratch 41.20   69.29 76.45     52.55 74.31      x     x        62.76
Pythia_70M                 pythia      -      scratch 43.05   83.41 84.29     67.41 80.05      x     x        68.04
""",  # noqa: E501
    3: """Speech Commands, sCIFAR, BIDMC (R2)
approach          model  word   start   sc_causal sc    scifar bidmc_hr bidmc_rr bidmc_spo2
S4                s4     -      scratch 93.60     96.08 91.13  0.999    0.994    0.999
Transformer       rotary -      scratch 84.55     86.93 79.41  0.998    0.981    0.998
S4_+_SPT          s4     -      spt     95.09     96.52 91.67  0.999    0.990    0.997
Transformer_+_SPT rotary -      spt     86.13     91.49 90.29  0.992    0.956    0.993
""",  # noqa: E501
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
""",  # noqa: E501
    8: """A fixed budget of epochs
approach               word     start   image_rotary image_s4 text_rotary text_s4
SPT_0_%_of_the_budget  budget0  scratch 75.04        87.83    79.08       87.51
SPT_20_%_of_the_budget budget20 spt     84.45        87.15    90.20       89.50
SPT_40_%_of_the_budget budget40 spt     84.95        87.72    90.56       89.10
SPT_60_%_of_the_budget budget60 spt     84.32        87.63    90.65       88.87
""",  # noqa: E501
    9: """Image, across model sizes
approach                   model  word start   100k  300k  1m    3m    10m
Transformer_+_Rotary       rotary -    scratch 68.51 68.51 71.50 75.04 77.88
Transformer_+_Rotary_+_SPT rotary -    spt     74.43 76.36 84.83 86.04 86.54
S4                         s4     -    scratch 81.36 83.63 84.81 88.65 85.73
S4_+_SPT                   s4     -    spt     83.45 86.39 88.67 89.36 88.72
""",  # noqa: E501
}
# parameters in mini
MINI_SIZES = {"100k": "2k", "300k": "4k", "1m": "10k", "3m": "20k", "10m": "80k"}
MINI_NOTE = (
    "**Mini**: small models on short stand-ins of the paper's tasks, about half a minute of "
    "training per stage."
)
# Columns that are not named after a task, and the fields of their cells.
COLUMNS = {size: dict(task="image", word=size) for size in MINI_SIZES}
COLUMNS |= {"3m": dict(task="image"), "sc_causal": dict(task="sc", word="causal")}
COLUMNS |= {
    f"{task}_{model}": dict(task=task, model=model)
    for task, model in itertools.product(("image", "text"), ("rotary", "s4"))
}

# Accuracy by chance in percent.
CHANCE = dict(listops=10, text=50, retrieval=50, image=10, pathfinder=50, pathx=50, pathx256=50)


def grid(number):
    """Parse a table of the paper: {approach: {column: (cell, printed)}}, {approach: average}."""
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
    """Return {column: scores by seed} of our runs in a row of a table."""
    row = grid(number)[0][approach]
    return {column: cells[cell].score for column, (cell, _) in row.items()}


def table(cells, number, mini=False):
    """Return a table of the paper in Markdown: paper and ours, averages, gains, provenance."""
    rows, printed_averages = grid(number)
    columns = [(column, cell) for row in rows.values() for column, (cell, _) in row.items()]
    scratch = {(column, cell.model): cell for column, cell in columns if cell.start == "scratch"}
    scores, averages, gains, made = [], [], [], []
    for approach, row in rows.items():
        scores.append({"approach": approach})
        gains.append({"gain of SPT [95 % interval] (seeds)": approach})
        for column, (cell, printed) in row.items():
            runs = cells[cell]
            base = cells[scratch.get((column, cell.model))]
            made.append(runs)
            if cell.start == "spt":
                made.append(cells[cell._replace(start="pretrain")])
            digits = 3 if printed.startswith("0.") else 2  # R2 is printed with 3
            count = f" ({len(runs)})" if len(runs) else ""
            size = f" (mini: {MINI_SIZES[column]})" if mini and column in MINI_SIZES else ""
            scores[-1][column + size] = f"{printed} / {mean_std(runs.score, digits)}{count}"
            gained = gain(runs, base)
            gains[-1][column] = signed(gained.points, digits, gained.half)
        if cell.start != "spt":
            gains.pop()
        if average := printed_averages.get(approach):
            titles = "approach", "average in the paper", "ours"
            averages.append(dict(zip(titles, (approach, average, our_average(cells, row)))))
    note = f"{MINI_NOTE} The paper's numbers, on the original tasks, are for orientation only."
    parts = [
        f"### Table {number}{', mini' if mini else ''}: {PAPER[number].splitlines()[0]}",
        note if mini else "",
        f"Each cell: paper / {'mini' if mini else 'ours'}, mean ± standard deviation (seeds). x: "
        "chance level, or too long to train.",
        markdown(scores),
        markdown(averages),
        markdown(gains),
        f"{provenance(*made)}." if any(map(len, made)) else "",
    ]
    return "\n\n".join(filter(None, parts))


def our_average(cells, row):
    """Return the average over the tasks that were run, but for PathX-256."""
    columns = [cells[cell].score for column, (cell, _) in row.items() if column != "pathx256"]
    means = [mean_of(scores) for scores in columns if len(scores)]
    if not means:
        return "–"
    return f"{statistics.mean(means):.2f} over {len(means)} of {len(columns)} tasks"


# ---- The paper's claims, and what our runs measured for each -------------------------------------

NO_PAIR = "no full runs to compare"
TRANSFORMERS = "Transformer", "rotary"
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
    and averages by seed for each approach. PathX-256 does not count, as in the paper's averages."""
    rows = [ours(cells, *approach) for approach in approaches]
    tasks = [task for task in CHANCE if all(len(row.get(task, ())) for row in rows)]
    tasks = [task for task in tasks if task != "pathx256"]
    if not rows or not tasks:
        return [], [pandas.Series(dtype=float)] * len(rows)
    columns = {(i, task): row[task] for i, row in enumerate(rows) for task in tasks}
    common = pandas.DataFrame(columns).dropna()  # (seeds, approaches x tasks)
    return tasks, [common[i].mean(axis=1) for i in range(len(rows))]


def beside(cells, pair, other_pair, labels):
    """Return two differences of approaches, (before, after) each, and first minus second."""
    tasks, (before, after, other_before, other_after) = over_tasks(cells, *pair, *other_pair)
    if not len(before):
        return f"{labels[0]}, {labels[1]}: {NO_PAIR}"
    first = minus(after, before)
    second = minus(other_after, other_before)
    differences = zip(labels, (first, second, minus(first, second)))
    texts = [f"{label} {signed(points)}" for label, points in differences]
    return f"{', '.join(texts)}, over {len(tasks)} tasks"


def gap(cells, name, lower, upper):
    """Return by how much one model exceeds another, after SPT and from scratch."""
    labels = "after SPT", "from scratch", "change"
    return f"{name}: {beside(cells, (lower[1], upper[1]), (lower[0], upper[0]), labels)}"


def by_fraction(cells, task):
    """Return S4's scores from scratch, its scores after SPT, and the gain in percent of the score
    from scratch (figure 3). Each is {share of the training examples in percent: values by seed}."""
    scratch, spt, gains = {}, {}, {}
    for fraction in entries.FRACTIONS:
        cell = Cell(task, "s4", f"data{fraction}", "scratch")
        before = cells[cell].score
        after = cells[cell._replace(start="spt")].score
        relative = (100 * minus(after, before) / before).dropna()
        for by_share, values in ((scratch, before), (spt, after), (gains, relative)):
            if len(values):
                by_share[100 * fraction] = values
    return scratch, spt, gains


def half_lags(cells, task):
    """Return per layer the lag that halves the kernel's sum, mean over seeds: before -> after."""
    kernels = [*kernels_of(cells[Cell(task, "s4", "", "pretrain")]).values()]
    if not kernels:
        return f"{task}: {NO_PAIR}"
    kernels = np.array(kernels)  # (seeds, 2, layers, l)
    half = kernels.sum(-1, keepdims=True) / 2
    lags = (kernels.cumsum(-1) < half).sum(-1).mean(0)  # (2, layers)
    before, after = (", ".join(f"{lag:.0f}" for lag in stage) for stage in lags)
    return f"{task} (length {kernels.shape[-1]:,}): {before} -> {after} ({len(kernels)})"


def of_fractions(cells, task):
    """Return the relative gains of S4 on shares of a training set."""
    _, _, gains = by_fraction(cells, task)
    texts = [f"{share:g} %: {signed(points)}" for share, points in gains.items()]
    return f"{task}: {', '.join(texts) or NO_PAIR}"


def of_budgets(cells, column):
    """Return the gains in a column of table 8, where SPT takes 20, 40, 60 % of the budget."""
    scratch, *shared = [ours(cells, 8, approach)[column] for approach in grid(8)[0]]
    gains = [minus(scores, scratch) for scores in shared]
    texts = ", ".join(map(signed, gains)) if any(map(len, gains)) else NO_PAIR
    return f"{column.replace('_', ', ')}: {texts}"


def claims(cells):
    """Return the paper's seven claims with what our runs measured, in Markdown."""
    pair = (1, "Transformer + Masked SPT"), (1, "Transformer + Causal SPT")
    tasks, (masked, causal) = over_tasks(cells, *pair)
    alike = f"causal minus masked {signed(minus(causal, masked))}, over {len(tasks)} tasks"
    measured = {
        "SPT lifts Transformers most: gains in points": [
            beside(cells, PAIRS[name], PAIRS["S4"], (name, "S4", "difference"))
            for name in TRANSFORMERS
        ],
        "masked and causal SPT are alike: difference in points": [
            alike if len(masked) else NO_PAIR
        ],
        "the gap between Transformer and S4 shrinks: S4 minus Transformer in points": [
            gap(cells, name, PAIRS[name], PAIRS["S4"]) for name in TRANSFORMERS
        ],
        "initialisation matters less after SPT: own minus random initialisation, in points": [
            gap(cells, name, INITIALISATIONS[f"{name} + Rand Init"], INITIALISATIONS[name])
            for name in ("S4", "DLR")
        ],
        "gains grow as data shrinks: relative gain of S4 in percent, by share of the data": [
            of_fractions(cells, task) for task in ("image", "text")
        ],
        "gains survive an equal budget: gain in points when SPT takes 20, 40, 60 % of it": [
            of_budgets(cells, column) for column in grid(8)[0]["SPT 0 % of the budget"]
        ],
        "learned kernels differ from HiPPO, by task: lag within which half of the kernel's sum "
        "lies, per layer": [half_lags(cells, task) for task in KERNEL_TASKS],
    }
    title = "measured: means over seeds [95 % interval of paired differences] (seeds)"
    lines = enumerate(measured.items(), 1)
    return markdown(
        [{"": str(i), "claim": claim, title: "<br>".join(texts)} for i, (claim, texts) in lines]
    )


def paper_numbers(cells, number, approach):
    """Return {column: printed number} of a row; {} for mini runs, whose tasks differ."""
    if any(runs.task.str.endswith("_mini").any() for runs in cells.values()):
        return {}
    row = grid(number)[0][approach]
    return {column: float(printed) for column, (_, printed) in row.items() if printed != "x"}
