"""From run directories to tables and figures. Reads files only: result.json, config.json, log.jsonl; needs no torch.

    python analyze.py all               the paper's tables and figures with ours, from runs/paper into results/paper
    python analyze.py all --preset mini the same in small, from runs/mini into results/mini
    python analyze.py table 2           one table, Markdown; `figure 1`: one figure
    python analyze.py report            the same as one HTML page, with every run's command and configuration
    python analyze.py readme            README's results, from the result.json files kept below results/; --check them
    python analyze.py demo              the demo's table (Markdown) and figure (results/demo.png) from runs/demo
    python analyze.py demo --readme     and puts the table into README.md, between its markers
    python analyze.py demo --runs runs/demo-text --figure results/demo-text.png        the same for the text demo
    python analyze.py watch runs/demo   what is done, what is running, and for how long still

A cell is the mean ± standard deviation over seeds of the test accuracy at the checkpoint that validation chose. A gain
is paired: the same seed with and without self-pretraining, with a 95 % interval from Student's t.
"""
import argparse
import base64
import html
import json
import math
import statistics
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

# 97.5 % quantiles of Student's t for n - 1 degrees of freedom, n = 2, 3, ...
T_QUANTILE = [12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]

MODEL_NAMES = {"transformer": "Transformer", "rotary": "Transformer (rotary)", "s4": "S4",
               "s4_rand": "S4, random start", "dlr": "DLR", "dlr_rand": "DLR, random start"}
# Name and chance, in percent.
DEMO_TASKS = {"pathfinder_demo": ("Pathfinder, scaled down", 50), "listops_demo": ("ListOps, scaled down", 10),
              "text_demo": ("Text (IMDb), 128 characters", 50), "text256": ("Text (IMDb), 256 characters", 50)}

# ---------------------------------------------------------------------------------------------------------------------
# Reading runs
# ---------------------------------------------------------------------------------------------------------------------


class UserError(Exception):
    """A user's mistake: one line, exit code 2."""


def write(path, save):
    """save(temporary path), then rename: no reader ever sees half a file."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(temporary)
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def read_results(directory):
    """Every finished run below `directory`: its result.json and `run`, its path. Damaged files are named, not fatal."""
    results = []
    for path in sorted(Path(directory).glob("**/result.json")):
        try:
            record = json.loads(path.read_text())
            for key, kind in (("task", str), ("model", str), ("seed", int), ("seconds", (int, float))):
                if not isinstance(record[key], kind):
                    raise TypeError(f"{key} is {record[key]}")
            if "start" in record and not isinstance(record.get("test_accuracy", record.get("test_r2")), float):
                raise TypeError("it has no test_accuracy or test_r2 that is a number")
            results.append(record | {"run": str(path.parent)})
        except (OSError, ValueError, TypeError, KeyError) as error:
            print(f"warning: {path} is skipped: {error}", file=sys.stderr)
    return results


# What the mini preset's sizes of Image stand for.
MINI_SIZES = {"2k": "100k", "4k": "300k", "10k": "1m", "20k": "3m", "80k": "10m"}


def stand_ins(results):
    """The runs of the mini preset, each under the name of the task that it stands in for."""
    return [r | dict(task=r["task"].removesuffix("_mini"), size=MINI_SIZES.get(r.get("size"), r.get("size")),
                     mini=True)
            for r in results if r["task"].endswith("_mini")]


def scores(results, **wanted):
    """{seed: score} of the finetuning runs that match; two runs of one seed are an error."""
    return {seed: score(run) for seed, run in runs_of(results, wanted).items()}


def mean_std(values, digits=1):
    """'61.2 ± 0.8', or the number alone where one seed gives no spread, or a dash."""
    values = list(values)
    if not values:
        return "–"
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def paired_gain(before, after):
    """Mean of the paired differences and the half-width of its 95 % interval (None for one seed); None if no pair."""
    differences = [after[seed] - before[seed] for seed in sorted(before.keys() & after.keys())]
    if not differences:
        return None
    if len(differences) == 1:
        return differences[0], None
    t = T_QUANTILE[min(len(differences) - 2, len(T_QUANTILE) - 1)]
    return statistics.mean(differences), t * statistics.stdev(differences) / math.sqrt(len(differences))


def signed(gain, digits=1):
    """'+3.7 [+2.2, +5.2]', or that there is one seed, or a dash."""
    if gain is None:
        return "–"
    mean, half = gain
    if half is None:
        return f"{mean:+.{digits}f} (one seed)"
    return f"{mean:+.{digits}f} [{mean - half:+.{digits}f}, {mean + half:+.{digits}f}]"


# ---------------------------------------------------------------------------------------------------------------------
# The paper's tables
# ---------------------------------------------------------------------------------------------------------------------

# Test accuracy in percent (BIDMC: R2), as printed. x: chance level, or too long to train.
# Columns that are no task: sc_causal is sc with a causal model, *_rotary and *_s4 in table 8 name the model, avg is the
# average as the paper prints it (see `average_of`).
PAPER = {
    1: """
approach                 model       objective start   listops text  retrieval image pathfinder pathx avg
Transformer              transformer masked    scratch 36.37   64.27 57.46     42.44 71.40      x     53.66
Transformer_+_Masked_SPT transformer masked    spt     59.75   89.27 88.64     74.22 88.45      87.73 81.34
Transformer_+_Causal_SPT transformer causal    spt     59.15   88.81 90.38     76.00 88.49      88.05 81.81
""",
    2: """
approach                   model       objective start   listops text  retrieval image pathfinder pathx pathx256 avg
Transformer_+_Rotary       rotary      masked    scratch 47.90   79.08 82.31     75.04 76.64      84.72 x        74.28
Transformer_+_Rotary_+_SPT rotary      masked    spt     61.49   91.02 91.57     86.04 94.16      92.98 x        86.21
S4                         s4          masked    scratch 59.60   86.82 90.90     88.65 94.20      96.35 67.82    86.09
S4_+_SPT                   s4          masked    spt     61.25   90.34 88.74     89.36 94.92      96.94 87.11    86.75
Pythia_70M_(Rand_Init)     pythia_rand causal    scratch 41.20   69.29 76.45     52.55 74.31      x     x        62.76
Pythia_70M                 pythia      causal    corpus  43.05   83.41 84.29     67.41 80.05      x     x        68.04
""",
    3: """
approach          model  objective start   sc_causal sc    scifar bidmc_hr bidmc_rr bidmc_spo2
S4                s4     masked    scratch 93.60     96.08 91.13  0.999    0.994    0.999
Transformer       rotary masked    scratch 84.55     86.93 79.41  0.998    0.981    0.998
S4_+_SPT          s4     masked    spt     95.09     96.52 91.67  0.999    0.990    0.997
Transformer_+_SPT rotary masked    spt     86.13     91.49 90.29  0.992    0.956    0.993
""",
    7: """
approach              model    objective start   listops text  image pathx avg
S4_+_Rand_Init_+_SPT  s4_rand  masked    spt     61.5    90.5  87.25 91.05 82.75
S4_+_Rand_Init        s4_rand  masked    scratch 59.85   88.34 75.56 73.57 74.33
S4_+_SPT              s4       masked    spt     61.25   90.34 89.36 96.94 84.47
S4                    s4       masked    scratch 59.60   86.82 88.65 96.35 82.85
DLR_+_Rand_Init_+_SPT dlr_rand masked    spt     56.75   89.13 81.83 94.59 80.47
DLR_+_Rand_Init       dlr_rand masked    scratch 39.55   73.72 56.70 50.04 55.00
DLR_+_SPT             dlr      masked    spt     60.45   89.94 87.12 96.38 83.37
DLR                   dlr      masked    scratch 57.50   79.65 79.83 92.33 77.33
""",
    8: """
approach               spt_share objective start   image_rotary image_s4 text_rotary text_s4
SPT_0_%_of_the_budget  0         masked    scratch 75.04        87.83    79.08       87.51
SPT_20_%_of_the_budget 0.2       masked    spt     84.45        87.15    90.20       89.50
SPT_40_%_of_the_budget 0.4       masked    spt     84.95        87.72    90.56       89.10
SPT_60_%_of_the_budget 0.6       masked    spt     84.32        87.63    90.65       88.87
""",
    9: """
approach                   model  objective start   100k  300k  1m    3m    10m
Transformer_+_Rotary       rotary masked    scratch 68.51 68.51 71.50 75.04 77.88
Transformer_+_Rotary_+_SPT rotary masked    spt     74.43 76.36 84.83 86.04 86.54
S4                         s4     masked    scratch 81.36 83.63 84.81 88.65 85.73
S4_+_SPT                   s4     masked    spt     83.45 86.39 88.67 89.36 88.72
"""}
TITLES = {1: "Long Range Arena, Transformers of the sizes of Tay et al.", 2: "Long Range Arena, Transformers and S4",
          3: "Speech Commands, sCIFAR, BIDMC (R2)", 7: "Initialisations", 8: "A fixed budget of epochs",
          9: "Image, across model sizes"}


def grid(number):
    """A table of the paper -> (columns, [(approach, [(key, printed), ...], printed average or None), ...]).

    key: what a finetuning run says of itself if it belongs into that cell.
    """
    head, *rows = [line.split() for line in PAPER[number].strip().splitlines()]
    columns = [column for column in head[4:] if column != "avg"]
    lines = []
    for name, what, objective, start, *printed in rows:
        average = printed.pop() if head[-1] == "avg" else None
        cells = []
        for column, value in zip(columns, printed):
            key = dict(model=what, objective=objective, start=start, task=column, size=None, train_fraction=None,
                       spt_share=None)
            if number == 8:
                task, model = column.split("_")
                key |= dict(task=task, model=model, spt_share=float(what))
            elif number == 9:                              # 3m is the row of table 2 itself
                key |= dict(task="image", size=None if column == "3m" else column)
            elif column == "sc_causal":
                key |= dict(task="sc", objective="causal")
            cells.append((key, value))
        lines.append((name.replace("_", " "), cells, average))
    return columns, lines


def runs_of(results, key):
    """{seed: finetuning run} of a cell."""
    found = {}
    for r in results:
        if "start" in r and all(r.get(name) == value for name, value in key.items()):
            if r["seed"] in found:
                raise UserError(f"two runs of seed {r['seed']} for one cell: {found[r['seed']]['run']} and {r['run']}")
            found[r["seed"]] = r
    return found


def score(run):
    """In the paper's units: accuracy in percent, or R2."""
    return 100 * run["test_accuracy"] if "test_accuracy" in run else run["test_r2"]


def number_of(printed):
    """A printed cell as a number: chance on PathX is 50."""
    return 50.0 if printed == "x" else float(printed)


def digits_of(printed):
    """As many as the paper has: three for R2."""
    return 3 if printed.startswith("0.") else 2


def status(runs):
    if not runs:
        return "not run"
    if any(r.get("mini") for r in runs.values()):
        return "mini" if all(r.get("full_recipe") for r in runs.values()) else "mini, changed"
    return "full" if all(r.get("full_recipe") for r in runs.values()) else "shortened"


def stages(run, named):
    """The pretraining run that a finetuning run started from, if that is among `named`, and the run itself."""
    return [r for r in (named.get(Path(run.get("init") or "").name), run) if r]


MINI_NOTE = "**Mini**: small models, trained for minutes on short stand-ins of the paper's tasks."


def table(results, number, mini=False):
    """One table of the paper in Markdown: the grid, averages, gains, then what stands behind every cell of ours."""
    columns, lines = grid(number)
    named = {Path(r["run"]).name: r for r in results if "start" not in r}
    out = [f"### Table {number}{', mini' if mini else ''}: {TITLES[number]}", "",
           *([f"{MINI_NOTE} The paper's numbers stand beside them for orientation only.", ""] if mini else []),
           f"Each cell: paper / {'mini' if mini else 'ours'}, mean ± standard deviation over seeds.", "",
           "| approach | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    details = ["| approach | column | paper | ours | difference | seeds | steps | epochs | hours | device | commit "
               "| status |", "|---" * 12 + "|"]
    averages = ["| approach | average printed in the paper | recomputed, x as 50 | recomputed, without x | ours |",
                "|---" * 5 + "|"]
    for name, cells, printed_average in lines:
        found = [runs_of(results, key) for key, _ in cells]
        out.append(f"| {name} | " + " | ".join(
            f"{'chance' if printed == 'x' else printed} / "
            f"{mean_std(map(score, runs.values()), digits_of(printed))}"
            for (_, printed), runs in zip(cells, found)) + " |")
        details += [detail(name, column, printed, runs, named)
                    for column, (_, printed), runs in zip(columns, cells, found)]
        if printed_average is not None:
            # As everywhere in the literature, PathX-256 does not count.
            counted = [(printed, runs) for column, (_, printed), runs in zip(columns, cells, found)
                       if column != "pathx256"]
            averages.append(f"| {name} | {printed_average} | {average_of(counted)} |")
    return "\n".join(out + ([""] + averages if len(averages) > 2 else [])
                     + [""] + gains_table(results, number) + [""] + details)


def detail(name, column, printed, runs, named):
    """One line about one cell."""
    if not runs:
        return f"| {name} | {column} | {printed} | – | | | | | | | | {status(runs)} |"
    values = [score(run) for run in runs.values()]
    difference = f"{statistics.mean(values) - number_of(printed):+.{digits_of(printed)}f}"
    if any(run.get("mini") for run in runs.values()):
        difference = ""                                # of another task: no difference worth a number
    each = lambda field: ", ".join(sorted({str(run.get(field)) for run in runs.values()}))
    both = lambda field: ", ".join(dict.fromkeys(" + ".join(str(r.get(field)) for r in stages(run, named))
                                                 for run in runs.values()))
    hours = sum(r["seconds"] * r.get("processes", 1) for run in runs.values() for r in stages(run, named)) / 3600
    return (f"| {name} | {column} | {printed} | {mean_std(values, digits_of(printed))} | {difference} | "
            f"{len(values) if len(values) > 1 else 'one seed'} | {both('steps')} | {both('epochs')} | {hours:.2f} | "
            f"{each('device')} | {each('commit')} | {status(runs)} |")


def average_of(cells):
    """The paper's average recomputed, with an x as 50 and without, and ours over the tasks that have been run."""
    numbers = [number_of(printed) for printed, _ in cells]
    without = [number_of(printed) for printed, _ in cells if printed != "x"]
    ours = [statistics.mean(map(score, runs.values())) for _, runs in cells if runs]
    return (f"{statistics.mean(numbers):.2f} | {statistics.mean(without):.2f} | "
            + (f"{statistics.mean(ours):.2f} over {len(ours)} of {len(cells)} tasks" if ours else "–"))


def gains_table(results, number):
    """Gain of SPT in each cell that has both: the same seeds with and without it, mean and 95 % interval."""
    columns, lines = grid(number)
    out = ["| gain of SPT, paired by seed [95 % interval] | " + " | ".join(columns) + " |",
           "|---" * (len(columns) + 1) + "|"]
    for name, cells, _ in lines:
        texts = []
        for key, printed in cells:
            if key["start"] != "spt":
                texts.append("")
                continue
            base = key | dict(start="scratch")
            if number == 1:                                # the causal model has no baseline of its own there
                base["objective"] = "masked"
            if number == 8:
                base["spt_share"] = 0.0
            texts.append(signed(paired_gain(scores(results, **base), scores(results, **key)), digits_of(printed)))
        if any(texts):
            out.append(f"| {name} | " + " | ".join(texts) + " |")
    return out


# ---------------------------------------------------------------------------------------------------------------------
# The paper's claims, and what our runs say about each
# ---------------------------------------------------------------------------------------------------------------------


def cells_of(results, number):
    """{(approach, column): {seed: score}} of our runs in a table."""
    columns, lines = grid(number)
    return {(name, column): scores(results, **key)
            for name, cells, _ in lines for column, (key, _) in zip(columns, cells)}


def over_tasks(results, *approaches):
    """Averages over the tasks on which all of these approaches (table, name) have been run -> tasks, and for each
    approach {seed: average}. PathX-256 does not count, as in the paper's averages."""
    rows = [{column: scores for (name, column), scores in cells_of(results, number).items() if name == wanted}
            for number, wanted in approaches]
    tasks = [task for task in rows[0] if task != "pathx256" and all(row.get(task) for row in rows)]
    seeds = set.intersection(*(set(row[task]) for row in rows for task in tasks)) if tasks else set()
    return tasks, [{seed: statistics.mean(row[task][seed] for task in tasks) for seed in sorted(seeds)} for row in rows]


def by_fraction(results, task, start):
    """Figure 3: {share of the training examples: {seed: score}} of S4."""
    found = {}
    for r in results:
        if (r["task"], r["model"], r.get("start")) == (task, "s4", start) and r.get("train_fraction"):
            found.setdefault(r["train_fraction"], {})[r["seed"]] = score(r)
    return dict(sorted(found.items()))


def kernels_of(results, task):
    """Figure 4: (path, before, after) of the first seed's S4, max over channels of |K| in the forward direction, each
    (layers, l); None where there is no run."""
    import numpy as np
    what = dict(task=task, model="s4", objective="masked", train_fraction=None, spt_share=None, size=None)
    runs = sorted((r["seed"], r["run"]) for r in results
                  if "start" not in r and all(r.get(name) == value for name, value in what.items()))
    paths = [path for _, run in runs if (path := Path(run) / "kernels.npz").exists()]
    if not paths:
        return None
    try:
        with np.load(paths[0], allow_pickle=False) as arrays:
            return paths[0], arrays["before"][:, 0], arrays["after"][:, 0]
    except (OSError, ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{paths[0]} is damaged: {type(error).__name__}") from None


def gain(results, before, after, label):
    """'label: +1.2 [+0.8, +1.6] over 5 tasks', from one approach (table, name) to another."""
    tasks, (first, second) = over_tasks(results, before, after)
    return f"{label}: " + (f"{signed(paired_gain(first, second))} over {len(tasks)} tasks" if tasks else "not run")


def gains_by_fraction(results, task):
    before, after = (by_fraction(results, task, start) for start in ("scratch", "spt"))
    return f"{task}: " + (", ".join(f"{100 * fraction:g} % {signed(paired_gain(before[fraction], after[fraction]))}"
                                    for fraction in before if fraction in after) or "not run")


def gains_by_budget(results, column):
    cells = cells_of(results, 8)
    gains = [paired_gain(cells["SPT 0 % of the budget", column], cells[f"SPT {share} % of the budget", column])
             for share in (20, 40, 60)]
    return f"{column.replace('_', ', ')}: " + (", ".join(map(signed, gains)) if any(gains) else "not run")


def half_lags(results, task):
    """For each layer the lag up to which half of the sum of a kernel's maxima lies: at the start -> after SPT."""
    try:
        found = kernels_of(results, task)
    except UserError as error:
        return f"{task}: {error}"
    if not found:
        return f"{task}: not run"
    before, after = ([int((kernel.cumsum() < kernel.sum() / 2).sum()) for kernel in kernels] for kernels in found[1:])
    return f"{task} (length {found[1].shape[1]:,}): {', '.join(map(str, before))} -> {', '.join(map(str, after))}"


def claims(results):
    """The paper's seven claims, each with what our runs measured, as Markdown. Verdicts are the reader's."""
    rows = {
        "SPT lifts Transformers most; gain of": [
            gain(results, (1, "Transformer"), (1, "Transformer + Masked SPT"), "Transformer"),
            gain(results, (2, "Transformer + Rotary"), (2, "Transformer + Rotary + SPT"), "rotary"),
            gain(results, (2, "S4"), (2, "S4 + SPT"), "S4")],
        "masked and causal SPT are alike": [
            gain(results, (1, "Transformer + Masked SPT"), (1, "Transformer + Causal SPT"), "causal minus masked")],
        "the gap between Transformer and S4 shrinks; S4 minus": [
            gain(results, (1, "Transformer"), (2, "S4"), "Transformer from scratch"),
            gain(results, (1, "Transformer + Masked SPT"), (2, "S4 + SPT"), "Transformer, both after SPT"),
            gain(results, (2, "Transformer + Rotary"), (2, "S4"), "rotary from scratch"),
            gain(results, (2, "Transformer + Rotary + SPT"), (2, "S4 + SPT"), "rotary, both after SPT")],
        "initialisation matters less after SPT; own start minus random start": [
            gain(results, (7, f"{model} + Rand Init{after}"), (7, model + after), model + (after or " from scratch"))
            for model in ("S4", "DLR") for after in ("", " + SPT")],
        "gains grow as data shrinks; gain of S4 by share of the data": [
            gains_by_fraction(results, task) for task in ("image", "text")],
        "gains survive an equal budget; gain when SPT takes 20, 40, 60 % of it": [
            gains_by_budget(results, column) for column in grid(8)[0]],
        "learned kernels differ from HiPPO, by task; lag within which half of the kernel lies, for each layer": [
            half_lags(results, task) for task in ("image", "text", "pathx", "listops")]}
    lines = [f"| {i} | {claim} | {'; '.join(measured)} |" for i, (claim, measured) in enumerate(rows.items(), 1)]
    return "\n".join(["| | claim | measured: mean of paired differences in points [95 % interval] |", "|---|---|---|",
                      *lines])


# ---------------------------------------------------------------------------------------------------------------------
# The paper's figures
# ---------------------------------------------------------------------------------------------------------------------

CHANCE = {"listops": 10, "text": 50, "retrieval": 50, "image": 10, "pathfinder": 50, "pathx": 50}     # percent
# Colour-blind safe, and apart in gray too.
SCRATCH, SPT, OTHER = "#9aa5b1", "#0072b2", "#d55e00"


def plotting():
    """matplotlib.pyplot, drawing into files."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UserError(f"figures need matplotlib ({error}); run: pip install matplotlib") from None
    return plt


def save_figure(figure, path):
    write(path, lambda temporary: figure.savefig(temporary, dpi=150, format="png"))


def bars(axis, groups, names, chance=None):
    """Pairs of bars, from scratch beside SPT; groups: [(scratch values, SPT values)], a dot per value. An empty one is
    marked as not run."""
    for i, pair in enumerate(groups):
        for j, (values, colour) in enumerate(zip(map(list, pair), (SCRATCH, SPT))):
            label = ("from scratch", "self-pretrained (SPT)")[j]
            x = i + 0.38 * (j - 0.5)
            if not values:
                axis.text(x, 1, "not run", rotation=90, ha="center", va="bottom", fontsize=7, color="0.5")
                continue
            axis.bar(x, statistics.mean(values), 0.36, color=colour, label=label)
            axis.scatter([x] * len(values), values, s=10, color="black", zorder=3, label="one seed")
            axis.annotate(f"{statistics.mean(values):.1f}", (x, max(values)), (0, 4), textcoords="offset points",
                          ha="center", fontsize=8)
    if chance is not None:
        axis.axhline(chance, color="black", linewidth=0.8, linestyle=":")
        axis.text(len(groups) - 0.5, chance, " chance", fontsize=8, va="center")
    axis.set_xticks(range(len(names)), names, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def legend(figure, axes, **more):
    """One legend for the whole figure, each label once."""
    entries = {}
    for axis in axes:
        entries |= dict(zip(*reversed(axis.get_legend_handles_labels())))
    figure.legend(entries.values(), entries.keys(), loc="lower center", ncols=4, frameon=False, fontsize=8, **more)


def seeds_text(values):
    counts = sorted({len(v) for v in values if v})
    return "no run" if not counts else f"{counts[0]} seed{'s' if counts[0] > 1 else ''}" if len(counts) == 1 else (
        f"{counts[0]} to {counts[-1]} seeds")


def figure1(plt, results):
    """Transformer, rotary Transformer and S4 on Long Range Arena, from scratch and after SPT."""
    one, two = cells_of(results, 1), cells_of(results, 2)
    tasks = grid(1)[0]
    figure, axes = plt.subplots(3, 1, figsize=(8, 7.5), sharex=True)
    for axis, (cells, name) in zip(axes, ((one, "Transformer"), (two, "Transformer + Rotary"), (two, "S4"))):
        after = f"{name} + Masked SPT" if name == "Transformer" else f"{name} + SPT"
        bars(axis, [(cells[name, task].values(), cells[after, task].values()) for task in tasks], tasks)
        axis.hlines([CHANCE[task] for task in tasks], [i - 0.4 for i in range(len(tasks))],
                    [i + 0.4 for i in range(len(tasks))], color="black", linewidth=0.8, linestyle=":", label="chance")
        axis.set_title(name, fontsize=9)
        axis.set_ylabel("test accuracy, %", fontsize=8)
        axis.set_ylim(0, 108)
    legend(figure, axes)
    return figure, f"Figure 1: Long Range Arena, {seeds_text([*one.values(), *two.values()])}"


def figure2(plt, results):
    """Averages over tasks of table 7; bars only where every task has been run."""
    cells, tasks = cells_of(results, 7), grid(7)[0]
    tasks = [task for task in tasks if any(cells[name, task] for name in ("S4", "DLR"))] or tasks
    names = ["S4", "DLR", "S4 + Rand Init", "DLR + Rand Init"]
    average = lambda name: ([statistics.mean(statistics.mean(cells[name, task].values()) for task in tasks)]
                            if all(cells[name, task] for task in tasks) else [])
    figure, axis = plt.subplots(figsize=(7, 3.8))
    bars(axis, [(average(name), average(f"{name} + SPT")) for name in names], names)
    axis.set_ylabel("test accuracy, %", fontsize=8)
    axis.set_ylim(0, 108)
    legend(figure, [axis])
    return figure, f"Figure 2: initialisations, average of {', '.join(tasks)}, {seeds_text(cells.values())}"


def figure3(plt, results):
    """Accuracy against the share of the training set, and the gain of SPT relative to training from scratch."""
    figure, axes = plt.subplots(1, 2, figsize=(8.5, 3.8))
    every, shares = [], sorted({r["train_fraction"] for r in results if r.get("train_fraction")})
    for task, colour in (("image", SPT), ("text", OTHER)):
        curves = {start: by_fraction(results, task, start) for start in ("scratch", "spt")}
        for start, found in curves.items():
            every += found.values()
            spread = [statistics.stdev(v.values()) if len(v) > 1 else 0 for v in found.values()]
            axes[0].errorbar(list(found), [statistics.mean(v.values()) for v in found.values()], spread, color=colour,
                             marker="o", markersize=3,
                             linestyle="-" if start == "spt" else "--", capsize=2,
                             label=f"{task}, {'SPT' if start == 'spt' else 'from scratch'}")
        xs = sorted(curves["scratch"].keys() & curves["spt"].keys())
        gains = [100 * (statistics.mean(curves["spt"][x].values()) / statistics.mean(curves["scratch"][x].values()) - 1)
                 for x in xs]
        axes[1].plot(xs, gains, color=colour, marker="o", markersize=3)
    for axis, label in zip(axes, ("test accuracy, %", "relative gain of SPT, %")):
        axis.set_xscale("log")
        axis.set_xticks(shares, [f"{100 * share:g}" for share in shares], fontsize=8, minor=False)
        axis.minorticks_off()
        axis.set_xlabel("share of the training examples, %", fontsize=8)
        axis.set_ylabel(label, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].axhline(0, color="black", linewidth=0.8, linestyle=":")
    legend(figure, axes)
    return figure, f"Figure 3: S4 on parts of the training set, {seeds_text(every)}"


def figure4(plt, results):
    """Maximal |K| over channels against the lag, for odd layers: after SPT and as HiPPO starts (first seed)."""
    tasks = ("image", "text", "pathx", "listops")
    figure, axes = plt.subplots(len(tasks), 1, figsize=(8, 10))
    for axis, task in zip(axes, tasks):
        found = kernels_of(results, task)
        axis.set_title(f"{task}: {found[0].parent.name if found else 'not run'}", fontsize=8)
        if not found:
            axis.set_axis_off()
            continue
        _, before, after = found
        lags = range(1, before.shape[1] + 1)
        for i in range(0, len(after), 2):
            shade = i / max(1, len(after) - 1)
            axis.plot(lags, after[i], color=plt.cm.viridis(0.9 * shade), linewidth=0.8, label=f"SPT, layer {i + 1}")
        axis.plot(lags, before[0], color="black", linewidth=0.8, linestyle="--", label="HiPPO, layer 1")
        width = math.isqrt(len(lags))
        for k in range(1, 9) if task in ("image", "pathx") else ():
            axis.axvline(k * width + 1, color="0.85", linewidth=0.6, zorder=0)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylabel("max over channels of |K|", fontsize=7)
        axis.tick_params(labelsize=7)
    axes[-1].set_xlabel("lag + 1, positions (vertical lines: multiples of the image's width)", fontsize=8)
    legend(figure, axes)
    return figure, "Figure 4: kernels of S4 after SPT against those it started with"


def figure5(plt, results):
    """Validation curves of table 8's Transformers: the denoising task, and the downstream task with and without SPT."""
    figure, axes = plt.subplots(1, 2, figsize=(8.5, 3.8))
    for axis, task in zip(axes, ("image", "text")):
        for r in results:
            if (r.get("task"), r.get("model")) != (task, "rotary") or r.get("spt_share") not in (0, 0.2) or r["seed"]:
                continue
            kind = r.get("start", "denoising")
            steps, values = [], []
            for record in read_log(Path(r["run"])):
                if record.get("kind") == "eval":
                    steps.append(record["step"])
                    values.append(100 * record.get("val_accuracy", record.get("val_score", float("nan"))))
            look = dict(scratch=(SPT, "--", "downstream, from scratch"), spt=(SPT, "-", "downstream, after SPT"),
                        denoising=(OTHER, "-", "denoising (image: 1 - squared error)"))[kind]
            if kind == "denoising" and min(values, default=0) < 0:
                values = [100 + v for v in values]
            axis.plot(steps, values, color=look[0], linestyle=look[1], linewidth=1.2, label=look[2])
        axis.set_title(f"{task}: rotary Transformer, 20 % of the budget for SPT", fontsize=8)
        axis.set_xlabel("optimiser steps of the stage", fontsize=8)
        axis.set_ylabel("validation accuracy, %", fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    legend(figure, axes)
    return figure, "Figure 5: training with and without SPT, seed 0"


FIGURES = {1: figure1, 2: figure2, 3: figure3, 4: figure4, 5: figure5}


def draw(results, number, path, mini=False):
    plt = plotting()
    figure, title = FIGURES[number](plt, results)
    figure.suptitle(title + "\nmini: small models on short stand-in tasks" * mini, fontsize=10)
    figure.tight_layout(rect=(0, 0.07, 1, 0.98))
    save_figure(figure, path)
    plt.close(figure)


def read_log(run):
    """The records of a run's log.jsonl, as far as it can be read: the last line of a killed run may be torn."""
    records = []
    try:
        for line in (run / "log.jsonl").read_text(errors="replace").splitlines():
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    except (OSError, ValueError):
        pass
    return records


# ---------------------------------------------------------------------------------------------------------------------
# The demo: the paper's Figure 1 in small
# ---------------------------------------------------------------------------------------------------------------------


def demo_table(results):
    """Markdown: one row per task and model, then the gap between the two models before and after SPT."""
    tasks = [t for t in DEMO_TASKS if any(r["task"] == t for r in results)]
    models = [m for m in MODEL_NAMES if any(r["model"] == m for r in results)]
    lines = ["| task | model | from scratch | self-pretrained | gain [95 % interval] | seeds |",
             "|---|---|---|---|---|---|"]
    for task in tasks:
        cells = {}
        for model in models:
            scratch = scores(results, task=task, model=model, start="scratch")
            spt = scores(results, task=task, model=model, start="spt")
            cells[model] = scratch, spt
            seeds = len(scratch.keys() & spt.keys())
            lines.append(f"| {DEMO_TASKS[task][0]} | {MODEL_NAMES[model]} | {mean_std(scratch.values())} | "
                         f"{mean_std(spt.values())} | {signed(paired_gain(scratch, spt))} | {seeds} |")
        others = [m for m in models if m in ("transformer", "rotary")]
        if "s4" in cells and others and all(cells["s4"]) and all(cells[others[0]]):
            gaps = [statistics.mean(cells["s4"][i].values()) - statistics.mean(cells[others[0]][i].values())
                    for i in (0, 1)]
            lines.append(f"| {DEMO_TASKS[task][0]} | *gap, S4 minus Transformer* | {gaps[0]:+.1f} | "
                         f"{gaps[1]:+.1f} | | |")
    return "\n".join(lines)


def demo_figure(results, path):
    """Bars: scratch beside SPT, for each task and model; a dot per seed."""
    plt = plotting()
    tasks = [t for t in DEMO_TASKS if any(r["task"] == t for r in results)]
    models = [m for m in MODEL_NAMES if any(r["model"] == m for r in results)]
    width = max(4.4, 1.4 * len(models))
    figure, axes = plt.subplots(1, len(tasks), figsize=(width * len(tasks), 3.6), squeeze=False)
    for axis, task in zip(axes[0], tasks):
        pairs = [[list(scores(results, task=task, model=model, start=start).values())
                  for start in ("scratch", "spt")] for model in models]
        name, chance = DEMO_TASKS[task]
        bars(axis, pairs, [MODEL_NAMES[m].replace(", ", ",\n") for m in models], chance)
        axis.set_title(name, fontsize=10)
        axis.set_ylim(0, axis.get_ylim()[1] * 1.05)
    axes[0][0].set_ylabel("test accuracy, %, mean over seeds")
    legend(figure, axes[0])
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    save_figure(figure, path)
    plt.close(figure)


def demo(args):
    results = [r for r in read_results(args.runs) if "test_accuracy" in r]
    if not results:
        raise UserError(f"no finished finetuning run below {args.runs}; run: bash run_all.sh demo")
    table = demo_table(results)
    seconds = sum(r["seconds"] for r in read_results(args.runs))
    where = {name: ", ".join(sorted({str(r.get(name)) for r in results})) for name in ("commit", "device", "torch")}
    caption = (f"Test accuracy in percent, mean ± standard deviation over seeds. Small models on small or shortened "
               f"sets: not the paper's tasks. Commit {where['commit']}, {where['device']}, torch {where['torch']}, "
               f"{seconds / 60:.0f} minutes of training added up over runs.")
    print(f"\n{table}\n\n{caption}\n")
    demo_figure(results, args.figure)
    print(f"figure: {args.figure}")
    if args.readme:
        name = args.figure.stem                              # the block has the figure's name
        replace_block(Path(__file__).with_name("README.md"), name, f"{table}\n\n{caption}\n\n![{name}]({args.figure})")


def replace_block(path, name, text, check=False):
    """Puts text between <!-- name:begin --> and <!-- name:end --> of a Markdown file, or says that it is not there."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    content = path.read_text()
    if begin not in content or end not in content:
        raise UserError(f"{path} has no {begin} ... {end}")
    head, rest = content.split(begin, 1)
    new = f"{head}{begin}\n{text}\n{end}{rest.split(end, 1)[1]}"
    if check and new != content:
        raise UserError(f"{path} is stale between {begin} and {end}; run: python analyze.py readme")
    if new != content:
        write(path, lambda temporary: temporary.write_text(new))


def kept(preset):
    """The results that are part of the repository."""
    results = read_results(Path(__file__).with_name("results") / preset / "runs")
    return stand_ins(results) if preset == "mini" else results


def readme(args):
    """README's block of results: what the kept runs say about the paper's claims."""
    parts = []
    for preset, title in (("paper", "The paper's recipes"), ("mini", "The mini preset")):
        results = kept(preset)
        if not results:
            parts.append(f"**{title}**: no runs are kept here yet.")
            continue
        seeds = sorted({r["seed"] for r in results})
        hours = sum(r["seconds"] * r.get("processes", 1) for r in results) / 3600
        where = {name: ", ".join(sorted({str(r.get(name)) for r in results})) for name in ("commit", "device", "torch")}
        parts += [f"**{title}**: {len(results)} runs, seeds {', '.join(map(str, seeds))}, commit {where['commit']}, "
                  f"{where['device']}, torch {where['torch']}, {hours:.1f} device hours added up.",
                  *([MINI_NOTE] if preset == "mini" else []), claims(results),
                  f"![Figure 1, {preset}](results/{preset}/figure1.png)",
                  f"All tables with every cell's runs: [results/{preset}/tables.md](results/{preset}/tables.md)."]
    replace_block(Path(__file__).with_name("README.md"), "results", "\n\n".join(parts), args.check)
    print("README.md: its results are those of the kept runs")


# ---------------------------------------------------------------------------------------------------------------------
# Watching
# ---------------------------------------------------------------------------------------------------------------------


def progress(directory):
    """{run name: its state} of every started run below `directory`, from its files alone: step of total, whether it is
    finished, its last numbers, and for how many seconds its log has been silent beyond what is usual for it."""
    state = {}
    for config in sorted(Path(directory).glob("**/config.json")):
        run = config.parent
        log = read_log(run)
        last = {key: value for record in log for key, value in record.items()}       # the newest of each
        total = max(last.get("total", 1), 1)
        finished = (run / "result.json").exists()
        numbers = " ".join(f"{key} {last[key]:.3f}" for key in last if key == "loss" or key.startswith("val_"))
        steps = [record["step"] for record in log if record.get("kind") == "train"]
        usual = last.get("ms_per_step", 0) / 1000 * (steps[-1] - steps[-2] if len(steps) > 1 else 1)
        try:
            age = time.time() - max(path.stat().st_mtime for path in (config, *run.glob("log.jsonl")))
        except OSError:                                      # written anew at this moment
            age = 0
        state[run.name] = SimpleNamespace(
            step=total if finished else min(last.get("step", 0), total - 1), total=total, finished=finished,
            numbers=numbers, silent=age if not finished and age > 60 + 10 * usual else 0)
    return state


def watch(args):
    """A status line whenever a run finishes and every so often in between, until --jobs runs are done: which are done,
    which run, where and with what numbers, and which have been silent for longer than they should.

    Time left assumes that runs not yet started take as long as those seen so far.
    """
    start, reported, last_line = time.time(), set(), 0.0
    amount_before = None                                     # runs' worth of work that was there when watching began
    while True:
        state = progress(args.runs)
        jobs = args.jobs or len(state)
        amount = sum(run.step / run.total for run in state.values())
        amount_before = amount if amount_before is None else amount_before
        finished = {name for name, run in state.items() if run.finished}
        if finished - reported or time.time() - last_line > args.every:
            spent = time.time() - start
            rate = (amount - amount_before) / max(spent, 1e-9)
            left = "time left unknown"
            if amount - amount_before > 0.3:
                left = f"about {_clock((jobs - amount) / rate)} left"
            news = "".join(f" {name} done;" for name in sorted(finished - reported) if last_line)
            running = ", ".join(f"{name} {run.step}/{run.total} {run.numbers}".rstrip() for name, run in state.items()
                                if not run.finished and not run.silent)
            silent = ", ".join(f"{name} {run.step}/{run.total} for {_clock(run.silent)}" for name, run in state.items()
                               if run.silent)
            print(f"[{len(finished):>3}/{jobs} runs] {_clock(spent)} spent, {left};{news} running: {running or 'none'}"
                  + (f"; stopped or failed, silent: {silent}" if silent else ""), flush=True)
            reported, last_line = finished, time.time()
        if len(finished) >= jobs or args.once or (args.until and args.until.exists()):
            return
        time.sleep(1)


def _clock(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def _common(command):
    command.add_argument("--preset", choices=("paper", "mini"), default="paper", help="which runs: see run_all.sh")
    command.add_argument("--runs", type=Path, help="folder of the run directories (default: runs/PRESET)")
    command.add_argument("--out", type=Path, help="folder for what is written (default: results/PRESET)")


def results_of(args):
    """The preset's runs; also fills in the folders that depend on the preset."""
    args.mini = args.preset == "mini"
    args.runs, args.out = args.runs or Path("runs", args.preset), args.out or Path("results", args.preset)
    results = read_results(args.runs)
    return stand_ins(results) if args.mini else results


def print_table(args):
    results = results_of(args)
    print(table(results, args.number, args.mini))


def print_figure(args):
    results, path = results_of(args), args.out / f"figure{args.number}.png"
    draw(results, args.number, path, args.mini)
    print(f"{path}: written")


def sections(results, mini):
    """All that there is in Markdown: claims, then tables."""
    note = [MINI_NOTE] if mini else []
    return ["\n\n".join([f"### The paper's claims{', mini' if mini else ''}", *note, claims(results)]),
            *(table(results, number, mini) for number in PAPER)]


def everything(args):
    """Every table into one Markdown file, every figure beside it. One that cannot be made does not stop the others."""
    results, failed = results_of(args), []
    text = "\n\n".join(sections(results, args.mini)) + "\n"
    write(args.out / "tables.md", lambda temporary: temporary.write_text(text))
    print(f"{args.out / 'tables.md'}: written, from {len(results)} finished runs")
    for number in FIGURES:
        try:
            draw(results, number, args.out / f"figure{number}.png", args.mini)
            print(f"{args.out / f'figure{number}.png'}: written")
        except (UserError, OSError, ValueError, KeyError) as error:
            failed.append(number)
            print(f"error: figure {number}: {error}", file=sys.stderr)
    if failed:
        raise SystemExit(1)


STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; display: block; overflow-x: auto }
td, th { border: 1px solid #ccc; padding: .2em .6em; text-align: left; white-space: nowrap } th { background: #f2f2f2 }
img { max-width: 100% } pre { background: #f6f6f6; padding: .6em; overflow-x: auto } summary { cursor: pointer }"""


def to_html(text):
    """The Markdown that `table` writes: headings, paragraphs, tables."""
    out = []
    for block in text.split("\n\n"):
        lines = block.splitlines()
        if lines[0].startswith("|"):
            rows = [[html.escape(cell.strip()) for cell in line.strip("|").split("|")] for line in lines]
            out.append("<table><tr>" + "".join(f"<th>{cell}</th>" for cell in rows[0]) + "</tr>" + "".join(
                "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows[2:]) + "</table>")
        elif lines[0].startswith("### "):
            out.append(f"<h2>{html.escape(lines[0][4:])}</h2>")
        else:
            out.append(f"<p>{html.escape(block)}</p>")
    return "\n".join(out)


def report(args):
    """One HTML page without links to other files: tables, figures, and of each run its command, environment and
    configuration, folded."""
    everything(args)
    results, page = results_of(args), [f"<h1>{html.escape(args.title)}</h1>"]
    page += map(to_html, sections(results, args.mini))
    for number in FIGURES:
        path = args.out / f"figure{number}.png"
        picture = base64.b64encode(path.read_bytes()).decode()
        page.append(f'<h2>Figure {number}</h2><img alt="figure {number}" src="data:image/png;base64,{picture}">')
    page.append(f"<h2>All {len(results)} runs</h2>")
    for r in results:
        run = Path(r["run"])
        start = next((record for record in read_log(run) if "argv" in record), {})
        try:
            config = (run / "config.json").read_text()
        except OSError:
            config = "not there"
        what = f"{score(r):.4g}" if "start" in r else f"validation score {r.get('val_score', 0):.4g}"
        page.append(f"<details><summary>{html.escape(run.name)}: {what}, {html.escape(status({0: r}))}</summary>"
                    f"<pre>{html.escape(' '.join(map(str, start.get('argv', ['command unknown']))))}</pre>"
                    f"<pre>{html.escape(json.dumps(r, indent=1))}</pre><pre>{html.escape(config)}</pre></details>")
    path = args.out / "report.html"
    text = (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(args.title)}</title>'
            f"<style>{STYLE}</style></head><body>\n" + "\n".join(page) + "\n</body></html>\n")
    write(path, lambda temporary: temporary.write_text(text))
    print(f"{path}: written")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("demo", help="the demo's table and figure")
    command.add_argument("--runs", default="runs/demo", type=Path)
    command.add_argument("--figure", default="results/demo.png", type=Path)
    command.add_argument("--readme", action="store_true", help="also write the table into README.md")
    command.set_defaults(run=demo)
    for name, numbers in (("table", PAPER), ("figure", FIGURES)):
        command = commands.add_parser(name, help=f"a {name} of the paper, beside our runs")
        command.add_argument("number", type=int, choices=sorted(numbers))
        command.set_defaults(run=print_table if name == "table" else print_figure)
        _common(command)
    command = commands.add_parser("all", help="all tables and figures")
    command.set_defaults(run=everything)
    _common(command)
    command = commands.add_parser("report", help="all of it as one HTML page")
    command.add_argument("--title", default="Never Train from Scratch: the paper's numbers and ours")
    command.set_defaults(run=report)
    _common(command)
    command = commands.add_parser("readme", help="README's results")
    command.add_argument("--check", action="store_true", help="write nothing; an error where README is stale")
    command.set_defaults(run=readme)
    command = commands.add_parser("watch", help="progress of the runs below a folder")
    command.add_argument("runs", type=Path)
    command.add_argument("--jobs", type=int, help="how many runs there will be")
    command.add_argument("--every", type=float, default=15, help="seconds between status lines")
    command.add_argument("--until", type=Path, help="stop when this file exists")
    command.add_argument("--once", action="store_true", help="print one status line and stop")
    command.set_defaults(run=watch)
    args = parser.parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
