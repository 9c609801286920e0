"""From run directories to tables and figures. Reads files only: result.json, config.json, log.jsonl, kernels.npz.

    python analyze.py all               the paper's tables and figures with ours, from runs/paper into results/paper
    python analyze.py all --preset mini the same in small, from runs/mini into results/mini
    python analyze.py table 2           one table, Markdown; `figure 1`: one figure
    python analyze.py report            the same as one HTML page, with every run's command and configuration
    python analyze.py keep              copies what tables and figures need into results/paper/runs, to be committed
    python analyze.py readme            README's results, from the kept runs; --check: an error where README is stale
    python analyze.py demo              the demo's table (Markdown) and figure (results/demo.png) from runs/demo
    python analyze.py demo --readme     and puts the table into README.md, between its markers
    python analyze.py demo --runs runs/demo-text --figure results/demo-text.png        the same for the text demo
    python analyze.py watch runs/demo   what is done, what runs and for how long still, what failed

A cell is the mean ± standard deviation over seeds of the test accuracy at the checkpoint that validation chose. A gain
is paired: the same seed with and without self-pretraining, with a 95 % interval from Student's t.

In order: reading runs, statistics, tables, claims, figures; then what is written from them, the demo, watching.
"""
import argparse
import base64
import html
import json
import math
import re
import shutil
import signal
import statistics
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace


class UserError(Exception):
    """A user's mistake: one line, exit code 2."""


# ---------------------------------------------------------------------------------------------------------------------
# Reading runs
# ---------------------------------------------------------------------------------------------------------------------

# What distinguishes the runs of different cells; within a cell, runs differ in their seed.
KEY = ("task", "model", "objective", "start", "size", "train_fraction", "spt_share")
# Of what kind the values are that tables and figures count with; all but the first four may be missing.
NUMBER = (int, float)
FIELDS = dict(task=str, model=str, seed=int, seconds=NUMBER, objective=str, start=str, size=str, init=str,
              processes=int, steps=int, epochs=NUMBER, train_fraction=NUMBER, spt_share=NUMBER, val_score=NUMBER,
              test_accuracy=float, test_r2=float)


def read_results(directory):
    """Every finished run below `directory`: its result.json and `run`, its path. Damaged files are named, not fatal."""
    results = []
    for path in sorted(Path(directory).glob("**/result.json")):
        try:
            record = json.loads(path.read_text())
            for key, kind in FIELDS.items():
                value = record.get(key)
                if value is None and key not in list(FIELDS)[:4]:
                    continue
                if not isinstance(value, kind) or (isinstance(value, float) and not math.isfinite(value)):
                    raise TypeError(f"its {key} is {value}")
            if "start" in record and record.get("test_accuracy", record.get("test_r2")) is None:
                raise TypeError("it has no test_accuracy and no test_r2")
            results.append(record | {"run": str(path.parent)})
        except (OSError, ValueError, TypeError, AttributeError) as error:
            print(f"warning: {path} is skipped: {error}", file=sys.stderr)
    return results


def read_log(run):
    """The records of a run's log.jsonl, as far as it can be read: the last line of a killed run may be torn."""
    records = []
    try:
        for line in (Path(run) / "log.jsonl").read_text(errors="replace").splitlines():
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    except (OSError, ValueError):
        pass
    return records


def one_per_seed(results):
    """The results with one run per stage, cell and seed: the recipe in full goes before a changed one."""
    chosen = {}
    for r in sorted(results, key=lambda r: not r.get("full_recipe")):
        cell = (*(r.get(name) for name in KEY), r["seed"])                    # start is None in pretraining
        if cell in chosen:
            print(f"warning: {r['run']} is left out: {chosen[cell]['run']} has the same cell and seed", file=sys.stderr)
        chosen.setdefault(cell, r)
    ids = {id(r) for r in chosen.values()}
    return [r for r in results if id(r) in ids]


# What the mini preset's sizes of Image stand for.
MINI_SIZES = {"2k": "100k", "4k": "300k", "10k": "1m", "20k": "3m", "80k": "10m"}


def stand_ins(results):
    """The runs of the mini preset, each under the name of the task that it stands in for."""
    return [r | dict(task=r["task"].removesuffix("_mini"), size=MINI_SIZES.get(r.get("size"), r.get("size")),
                     mini=True) for r in results if r["task"].endswith("_mini")]


def stages(run, named):
    """The pretraining run that a finetuning run started from, if that is among `named`, and the run itself."""
    return [r for r in (named.get(Path(run.get("init") or "").name), run) if r]


def hours(runs):
    """Device hours."""
    return sum(r["seconds"] * r.get("processes", 1) for r in runs) / 3600


def provenance(results):
    """Where numbers come from: commits, devices, versions."""
    return ", ".join(f"{label}{', '.join(sorted({str(r.get(name)) for r in results}))}"
                     for label, name in (("commit ", "commit"), ("", "device"), ("torch ", "torch")))


def write(path, save):
    """save(temporary path), then rename: no reader ever sees half a file."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save(temporary)
        temporary.replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Statistics
# ---------------------------------------------------------------------------------------------------------------------

# 97.5 % quantiles of Student's t for n - 1 degrees of freedom, n = 2, 3, ...; beyond the last, the last: too wide.
T_QUANTILE = [12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]


def mean_std(values, digits=1):
    """'61.2 ± 0.8', or the number alone where one seed gives no spread, or a dash."""
    values = list(values)
    if not values:
        return "–"
    mean = f"{statistics.mean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def minus(after, before):
    """{seed: after - before} of the seeds that both have."""
    return {seed: after[seed] - before[seed] for seed in sorted(before.keys() & after.keys())}


def interval(values):
    """Mean, half-width of its 95 % interval (None for one value) and number of values; None of nothing."""
    values = list(values)
    if not values:
        return None
    if len(values) == 1:
        return values[0], None, 1
    t = T_QUANTILE[min(len(values) - 2, len(T_QUANTILE) - 1)]
    return statistics.mean(values), t * statistics.stdev(values) / math.sqrt(len(values)), len(values)


def paired_gain(before, after):
    """`interval` of the paired differences of {seed: score}."""
    return interval(minus(after, before).values())


def signed(found, digits=1, count=True):
    """What `interval` found: '+3.7 [+2.2, +5.2] (3)', without the number of values on request, or '+3.7 (one seed)', or
    a dash."""
    if found is None:
        return "–"
    mean, half, n = found
    if half is None:
        return f"{mean:+.{digits}f} (one seed)"
    return f"{mean:+.{digits}f} [{mean - half:+.{digits}f}, {mean + half:+.{digits}f}]" + f" ({n})" * count


# ---------------------------------------------------------------------------------------------------------------------
# The paper's tables
# ---------------------------------------------------------------------------------------------------------------------

# Test accuracy in percent (BIDMC: R2), as printed. x: chance level, or too long to train.
# Columns that are no task: sc_causal is sc with a causal model, *_rotary and *_s4 in table 8 name the model, avg is the
# average as the paper prints it (see `averages_of`).
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


def score(run):
    """In the paper's units: accuracy in percent, or R2."""
    return 100 * run["test_accuracy"] if "test_accuracy" in run else run["test_r2"]


def runs_of(results, key):
    """{seed: finetuning run} of a cell."""
    return {r["seed"]: r for r in results if "start" in r and all(r.get(name) == value for name, value in key.items())}


def scores(results, **wanted):
    """{seed: score} of the finetuning runs that match."""
    return {seed: score(run) for seed, run in runs_of(results, wanted).items()}


def is_full(runs):
    """Whether all runs of a cell are their recipes in full, nothing shortened or changed."""
    return all(run.get("full_recipe") for run in runs.values())


def status(runs):
    if not runs:
        return "not run"
    if any(run.get("mini") for run in runs.values()):
        return "mini" if is_full(runs) else "mini, changed"
    return "full" if is_full(runs) else "shortened"


def number_of(printed):
    """A printed cell as a number for averages: x as 50, chance on PathX, though table 2's Pythia was not run on it."""
    return 50.0 if printed == "x" else float(printed)


def digits_of(printed):
    """As many as the paper has: three for R2."""
    return 3 if printed.startswith("0.") else 2


MINI_NOTE = "**Mini**: small models on short stand-ins of the paper's tasks, half a minute of training or so a stage."


def table(results, number, mini=False):
    """One table of the paper in Markdown: the grid, averages, gains, then what stands behind every cell of ours."""
    columns, lines = grid(number)
    named = {Path(r["run"]).name: r for r in results if "start" not in r}
    small = {large: f"{large} (mini: {size})" for size, large in MINI_SIZES.items() if mini}
    out = [f"### Table {number}{', mini' if mini else ''}: {TITLES[number]}", "",
           *([f"{MINI_NOTE} The paper's numbers stand beside them for orientation only.", ""] if mini else []),
           f"Each cell: paper / {'mini' if mini else 'ours'}, mean ± standard deviation (seeds). x: chance level, or "
           "too long to train. †: shortened or changed.", "",
           "| approach | " + " | ".join(small.get(column, column) for column in columns) + " |",
           "|---" * (len(columns) + 1) + "|"]
    averages = ["| approach | average in the paper | recomputed, x as 50 | recomputed without x | the paper | ours | "
                "ours without the paper's x |", "|---" * 7 + "|"]
    details = ["| approach | column | paper | ours | difference | seeds | steps | epochs | device hours | device | "
               "commit | status |", "|---" * 12 + "|"]
    for name, cells, printed_average in lines:
        found = [(column, printed, runs_of(results, key)) for column, (key, printed) in zip(columns, cells)]
        out.append(f"| {name} | " + " | ".join(
            f"{printed} / {mean_std(map(score, runs.values()), digits_of(printed))}"
            + (f" ({len(runs)})" + "†" * (not is_full(runs)) if runs else "") for _, printed, runs in found) + " |")
        details += [detail(name, column, printed, runs, named) for column, printed, runs in found]
        if printed_average is not None:
            averages.append(f"| {name} | {printed_average} | {averages_of(printed_average, found)} |")
    return "\n".join(out + ([""] + averages if len(averages) > 2 else [])
                     + [""] + gains_table(results, number) + [""] + details)


def detail(name, column, printed, runs, named):
    """One line about one cell."""
    if not runs:
        return f"| {name} | {column} | {printed} | – | | | | | | | | {status(runs)} |"
    values = [score(run) for run in runs.values()]
    difference = ""                                    # between different tasks or recipes it would say nothing
    if status(runs) == "full" and printed != "x":
        difference = f"{statistics.mean(values) - number_of(printed):+.{digits_of(printed)}f}"
    each = lambda field: ", ".join(sorted({str(run.get(field)) for run in runs.values()}))
    both = lambda field: ", ".join(dict.fromkeys(" + ".join(str(r.get(field)) for r in stages(run, named))
                                                 for run in runs.values()))
    spent = hours(r for run in runs.values() for r in stages(run, named))
    return (f"| {name} | {column} | {printed} | {mean_std(values, digits_of(printed))} | {difference} | "
            f"{len(values) if len(values) > 1 else 'one seed'} | {both('steps')} | {both('epochs')} | {spent:.2f} | "
            f"{each('device')} | {each('commit')} | {status(runs)} |")


def averages_of(printed_average, found):
    """The average of the paper's cells, with its x as 50 and without, which of the two it printed, and ours over the
    tasks that have been run in full. PathX-256 counts nowhere, as everywhere in the literature."""
    found = [(printed, runs) for column, printed, runs in found if column != "pathx256"]
    as_50 = statistics.mean(number_of(printed) for printed, _ in found)
    without = statistics.mean(number_of(printed) for printed, _ in found if printed != "x")
    counts, leaves = (abs(float(printed_average) - value) < 0.011 for value in (as_50, without))
    so_it = ("is neither: a misprint" if not (counts or leaves) else "has no x" if as_50 == without
             else "counts x as 50" if counts else "leaves x out")

    def ours(all_columns):
        columns = [runs for printed, runs in found if all_columns or printed != "x"]
        means = [statistics.mean(map(score, runs.values())) for runs in columns if runs and is_full(runs)]
        return f"{statistics.mean(means):.2f} over {len(means)} of {len(columns)} tasks" if means else "–"

    return f"{as_50:.2f} | {without:.2f} | {so_it} | {ours(True)} | {ours(False)}"


def gains_table(results, number):
    """Gain of SPT in each cell that has both: mean over the seeds that have both, its 95 % interval, how many."""
    columns, lines = grid(number)
    out = ["| gain of SPT, paired by seed [95 % interval] (seeds) | " + " | ".join(columns) + " |",
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
            before, after = runs_of(results, base), runs_of(results, key)
            mark = "†" * (bool(before and after) and not (is_full(before) and is_full(after)))
            texts.append(signed(paired_gain(*({seed: score(run) for seed, run in runs.items()}
                                              for runs in (before, after))), digits_of(printed)) + mark)
        if any(texts):
            out.append(f"| {name} | " + " | ".join(texts) + " |")
    return out


# ---------------------------------------------------------------------------------------------------------------------
# The paper's claims, and what our runs say about each
# ---------------------------------------------------------------------------------------------------------------------


NO_PAIR = "no full runs to compare"


def cells_of(results, number):
    """{(approach, column): {seed: score}} of our runs in a table."""
    columns, lines = grid(number)
    return {(name, column): scores(results, **key)
            for name, cells, _ in lines for column, (key, _) in zip(columns, cells)}


def over_tasks(results, *approaches):
    """Averages over the tasks on which all of these approaches (table, name) have been run -> tasks, and for each
    approach {seed: average} with the seeds that all have on all of them. PathX-256 does not count, as in the paper's
    averages."""
    rows = []
    for number, wanted in approaches:
        rows.append({column: cell for (name, column), cell in cells_of(results, number).items() if name == wanted})
        assert rows[-1], f"table {number} has no row {wanted}"
    tasks = [task for task in rows[0] if task != "pathx256" and all(row.get(task) for row in rows)]
    seeds = set.intersection(*(set(row[task]) for row in rows for task in tasks)) if tasks else set()
    return tasks, [{seed: statistics.mean(row[task][seed] for task in tasks) for seed in sorted(seeds)} for row in rows]


def compare(results, first, second, labels, difference):
    """Two differences between approaches, (before, after) each, on the tasks and seeds that all four have, and the
    first minus the second."""
    tasks, (a, b, c, d) = over_tasks(results, *first, *second)
    if not a:
        return f"{' / '.join(labels)}: {NO_PAIR}"
    one, other = minus(b, a), minus(d, c)
    texts = [signed(interval(values.values())) for values in (one, other, minus(one, other))]
    return f"{labels[0]} {texts[0]}, {labels[1]} {texts[1]}, {difference} {texts[2]}, over {len(tasks)} tasks"


def by_fraction(results, task, start):
    """Figure 3: {share of the training examples: {seed: score}} of S4."""
    key = dict(task=task, model="s4", objective="masked", start=start, size=None, spt_share=None)
    shares = sorted({r["train_fraction"] for r in results if r.get("train_fraction")})
    return {share: found for share in shares if (found := scores(results, **key, train_fraction=share))}


def relative_gains(results, task):
    """{share of the training examples: [gain of SPT in percent of the score from scratch, one for each seed]}."""
    before, after = (by_fraction(results, task, start) for start in ("scratch", "spt"))
    return {share: [100 * difference / before[share][seed]
                    for seed, difference in minus(after[share], before[share]).items() if before[share][seed]]
            for share in before if share in after}


def gains_by_budget(results, column):
    cells = cells_of(results, 8)
    gains = [paired_gain(cells["SPT 0 % of the budget", column], cells[f"SPT {share} % of the budget", column])
             for share in (20, 40, 60)]
    return f"{column.replace('_', ', ')}: " + (", ".join(map(signed, gains)) if any(gains) else NO_PAIR)


def kernels_of(results, task):
    """Figure 4: [(path, before, after)] of S4, one for each seed: max over channels and both directions of |K|, each
    (layers, l) (paper, section 3.6, footnote 3). Damaged files are named, not fatal."""
    import numpy as np

    def by_lag(kernels):
        """(layers, directions, l) -> (layers, l). The backward kernel starts at lag 1 (see `fft_conv`)."""
        backward = np.pad(kernels[:, 1:, :-1], ((0, 0), (0, 0), (1, 0)))
        return np.concatenate([kernels[:, :1], backward], 1).max(1)

    what = dict(task=task, model="s4", objective="masked", train_fraction=None, spt_share=None, size=None)
    found = []
    for r in sorted(results, key=lambda r: r["seed"]):
        path = Path(r["run"]) / "kernels.npz"
        if "start" in r or any(r.get(name) != value for name, value in what.items()) or not path.exists():
            continue
        try:
            with np.load(path, allow_pickle=False) as arrays:
                before, after = arrays["before"], arrays["after"]
            if before.ndim != 3 or before.shape != after.shape or not before.size:
                raise ValueError(f"kernels of shapes {before.shape} and {after.shape}")
            if not np.isfinite(before + after).all():
                raise ValueError("numbers that are not finite")
            found.append((path, by_lag(before), by_lag(after)))
        except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
            print(f"warning: {path} is skipped: {error}", file=sys.stderr)
    return found


def half_lags(results, task):
    """For each layer the lag up to which half of the sum of a kernel's maxima lies: at the start -> after SPT."""
    found = kernels_of(results, task)
    if not found:
        return f"{task}: {NO_PAIR}"
    lags = lambda kernels: [int((kernel.cumsum() < kernel.sum() / 2).sum()) for kernel in kernels]
    before, after = (", ".join(f"{statistics.mean(column):.0f}" for column in zip(*map(lags, sets)))
                     for sets in list(zip(*found))[1:])
    return f"{task} (length {found[0][1].shape[1]:,}): {before} -> {after} ({len(found)})"


def claims(results):
    """The paper's seven claims, each with what our runs measured, as Markdown. Runs that are not their recipe in full
    do not count."""
    results = [r for r in results if r.get("full_recipe")]
    plain, plain_spt = (1, "Transformer"), (1, "Transformer + Masked SPT")
    rotary, rotary_spt = (2, "Transformer + Rotary"), (2, "Transformer + Rotary + SPT")
    s4, s4_spt = (2, "S4"), (2, "S4 + SPT")
    arms = ("after SPT", "from scratch")
    tasks, (masked, causal) = over_tasks(results, plain_spt, (1, "Transformer + Causal SPT"))
    rows = {
        "SPT lifts Transformers most: gains in points": [
            compare(results, (plain, plain_spt), (s4, s4_spt), ("Transformer", "S4"), "difference"),
            compare(results, (rotary, rotary_spt), (s4, s4_spt), ("rotary", "S4"), "difference")],
        "masked and causal SPT are alike: points": [
            f"causal minus masked {signed(paired_gain(masked, causal))}, over {len(tasks)} tasks" if masked
            else NO_PAIR],
        "the gap between Transformer and S4 shrinks: S4 minus Transformer in points": [
            f"{name}: {compare(results, (after, s4_spt), (before, s4), arms, 'change')}"
            for name, before, after in (("Transformer", plain, plain_spt), ("rotary", rotary, rotary_spt))],
        "initialisation matters less after SPT: own start minus random start in points": [
            f"{name}: " + compare(results, ((7, f"{name} + Rand Init + SPT"), (7, f"{name} + SPT")),
                                  ((7, f"{name} + Rand Init"), (7, name)), arms, "change")
            for name in ("S4", "DLR")],
        "gains grow as data shrinks: relative gain of S4 in percent, by share of the data": [
            f"{task}: " + (", ".join(f"{100 * share:g} %: {signed(interval(gains))}"
                                     for share, gains in relative_gains(results, task).items()) or NO_PAIR)
            for task in ("image", "text")],
        "gains survive an equal budget: gain in points when SPT takes 20, 40, 60 % of it": [
            gains_by_budget(results, column) for column in grid(8)[0]],
        "learned kernels differ from HiPPO, by task: lag within which half of the kernel lies, layer by layer": [
            half_lags(results, task) for task in ("image", "text", "pathx", "listops")]}
    lines = [f"| {i} | {claim} | {'<br>'.join(measured)} |" for i, (claim, measured) in enumerate(rows.items(), 1)]
    return "\n".join(["| | claim | measured: means over seeds [95 % interval of paired differences] (seeds) |",
                      "|---|---|---|", *lines])


# ---------------------------------------------------------------------------------------------------------------------
# The paper's figures
# ---------------------------------------------------------------------------------------------------------------------

CHANCE = {"listops": 10, "text": 50, "retrieval": 50, "image": 10, "pathfinder": 50, "pathx": 50, "pathx256": 50}  # %
# Colour-blind safe, and apart in gray too.
SCRATCH, SPT, OTHER = "#9aa5b1", "#0072b2", "#d55e00"
LAYERS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")      # of layers 1, 3, 5, 7


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


def bars(axis, groups, names, chance=None, paper=()):
    """Pairs of bars, from scratch beside SPT; groups: [(scratch values, SPT values)], a dot per value. An empty one is
    marked as not run. paper: pairs of its numbers, or None where it has none."""
    for i, pair in enumerate(groups):
        for j, (values, colour) in enumerate(zip(map(list, pair), (SCRATCH, SPT))):
            label = ("from scratch", "self-pretrained (SPT)")[j]
            x = i + 0.38 * (j - 0.5)
            if paper and paper[i][j] is not None:
                axis.scatter([x], [paper[i][j]], s=30, marker="D", facecolors="none", edgecolors=OTHER, zorder=4,
                             label="the paper")
            if not values:
                axis.text(x, 1, "not run", rotation=90, ha="center", va="bottom", fontsize=7, color="0.5")
                continue
            axis.bar(x, statistics.mean(values), 0.36, color=colour, label=label)
            axis.scatter([x] * len(values), values, s=10, color="black", zorder=3, label="one seed")
            axis.annotate(f"{statistics.mean(values):.1f}", (x, max(values)), (0, 5), textcoords="offset points",
                          ha="center", fontsize=8)
    if chance is not None:
        axis.axhline(chance, color="black", linewidth=0.8, linestyle=":")
        axis.annotate("chance", (1, chance), (3, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                      fontsize=8, va="center")
    axis.set_xticks(range(len(names)), names, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def legend(figure, axes):
    """One legend for the whole figure, each label once."""
    entries = {}
    for axis in axes:
        entries |= dict(zip(*reversed(axis.get_legend_handles_labels())))
    figure.legend(entries.values(), entries.keys(), loc="lower center", ncols=5, frameon=False, fontsize=8)


def seeds_text(values):
    counts = sorted({len(v) for v in values if v})
    return "no run" if not counts else f"{counts[0]} seed{'s' if counts[0] > 1 else ''}" if len(counts) == 1 else (
        f"{counts[0]} to {counts[-1]} seeds")


def printed_of(results, number):
    """{(approach, column): the paper's number}; nothing beside mini runs, whose tasks are others."""
    if any(r.get("mini") for r in results):
        return {}
    columns, lines = grid(number)
    return {(name, column): float(printed) for name, cells, _ in lines
            for column, (_, printed) in zip(columns, cells) if printed != "x"}


def figure1(plt, results):
    """Transformer, rotary Transformer and S4 on Long Range Arena, from scratch and after SPT."""
    tasks, drawn = grid(2)[0], []
    figure, axes = plt.subplots(3, 1, figsize=(8, 7.5), sharex=True)
    for axis, (number, name) in zip(axes, ((1, "Transformer"), (2, "Transformer + Rotary"), (2, "S4"))):
        after = f"{name} + Masked SPT" if name == "Transformer" else f"{name} + SPT"
        cells, paper = cells_of(results, number), printed_of(results, number)
        pairs = [(cells.get((name, task), {}).values(), cells.get((after, task), {}).values()) for task in tasks]
        bars(axis, pairs, tasks, paper=[(paper.get((name, task)), paper.get((after, task))) for task in tasks])
        drawn += [values for pair in pairs for values in pair]
        axis.hlines([CHANCE[task] for task in tasks], [i - 0.4 for i in range(len(tasks))],
                    [i + 0.4 for i in range(len(tasks))], color="black", linewidth=0.8, linestyle=":", label="chance")
        axis.set_title(name, fontsize=9)
        axis.set_ylabel("test accuracy, %", fontsize=8)
        axis.set_ylim(0, 108)
    legend(figure, axes)
    return figure, f"Figure 1: Long Range Arena, {seeds_text(drawn)}"


def figure2(plt, results):
    """Initialisations: averages over the tasks of table 7 that all approaches with any run have in common."""
    cells, names = cells_of(results, 7), ["S4", "DLR", "S4 + Rand Init", "DLR + Rand Init"]
    rows = [(7, name) for start in names for name in (start, f"{start} + SPT")
            if any(cells[name, task] for task in grid(7)[0])]
    tasks, averages = over_tasks(results, *rows) if rows else ([], [])
    values = {name: average.values() for (_, name), average in zip(rows, averages)}
    printed = printed_of(results, 7)
    paper = {name: statistics.mean(printed[name, task] for task in tasks) for name in values if printed and tasks}
    figure, axis = plt.subplots(figsize=(7, 3.8))
    pairs = lambda found, nothing: [(found.get(name, nothing), found.get(f"{name} + SPT", nothing)) for name in names]
    bars(axis, pairs(values, []), names, paper=pairs(paper, None))
    axis.set_ylabel("test accuracy, %", fontsize=8)
    axis.set_ylim(0, 108)
    legend(figure, [axis])
    average = f"average of {', '.join(tasks)}" if any(values.values()) else "no task and seed in common"
    return figure, f"Figure 2: initialisations, {average}, {seeds_text(values.values())}"


def figure3(plt, results):
    """Accuracy against the share of the training set, and the gain of SPT relative to training from scratch."""
    figure, axes = plt.subplots(1, 2, figsize=(8.5, 3.8))
    deviation = lambda values: statistics.stdev(values) if len(values) > 1 else 0
    half_width = lambda values: interval(values)[1] or 0
    every, shares = [], set()

    def curve(axis, found, spread, colour, **more):
        """found: {share: [values]}."""
        axis.errorbar(list(found), list(map(statistics.mean, found.values())), list(map(spread, found.values())),
                      color=colour, marker="o", markersize=3, capsize=2, **more)

    for task, colour in (("image", SPT), ("text", OTHER)):
        for start, style, label in (("scratch", "--", "from scratch"), ("spt", "-", "SPT")):
            found = {share: list(cell.values()) for share, cell in by_fraction(results, task, start).items()}
            curve(axes[0], found, deviation, colour, linestyle=style, label=f"{task}, {label}")
            every += found.values()
            shares |= found.keys()
        gains = {share: values for share, values in relative_gains(results, task).items() if values}
        curve(axes[1], gains, half_width, colour)
    for axis, label in zip(axes, ("test accuracy, %", "relative gain of SPT, %")):
        axis.set_xscale("log")
        axis.set_xticks(sorted(shares), [f"{100 * share:g}" for share in sorted(shares)], fontsize=8)
        axis.minorticks_off()
        axis.set_xlabel("share of the training examples, %", fontsize=8)
        axis.set_ylabel(label, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[1].axhline(0, color="black", linewidth=0.8, linestyle=":")
    legend(figure, axes)
    return figure, (f"Figure 3: S4 on parts of the training set, {seeds_text(every)}; "
                    "bars: standard deviations (left), 95 % intervals (right)")


def figure4(plt, results):
    """Maximal |K| over channels and directions against the lag, for odd layers: after SPT and as HiPPO starts."""
    tasks = ("image", "text", "pathx", "listops")
    figure, axes = plt.subplots(len(tasks), 1, figsize=(8, 10))
    for axis, task in zip(axes, tasks):
        found = kernels_of(results, task)
        axis.set_title(f"{task}: {found[0][0].parent.name if found else 'not run'}", fontsize=8)
        if not found:
            axis.set_axis_off()
            continue
        _, before, after = found[0]
        lags = range(1, before.shape[1] + 1)
        for i in range(0, len(after), 2):
            axis.plot(lags, after[i], color=LAYERS[i // 2], linewidth=0.8, label=f"SPT, layer {i + 1}")
        axis.plot(lags, before[0], color="black", linewidth=0.8, linestyle="--", label="HiPPO, layer 1")
        width = math.isqrt(len(lags))
        for k in range(1, 9) if task in ("image", "pathx") else ():
            axis.axvline(k * width + 1, color="0.85", linewidth=0.6, zorder=0)
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_ylabel("max |K|", fontsize=7)
        axis.tick_params(labelsize=7)
    axes[-1].set_xlabel("lag + 1, positions (vertical lines: first multiples of the image's width)", fontsize=8)
    legend(figure, axes)
    return figure, "Figure 4: kernels of S4 after SPT against those it started with, one seed"


def curves_of(results, task):
    """Figure 5: one seed's runs of table 8's rotary Transformer, {kind: run}: pretraining with a fifth of the budget,
    finetuning after it, training from scratch. The first of the seeds that have most of them."""
    what, found = dict(task=task, model="rotary", objective="masked", size=None, train_fraction=None), {}
    for r in sorted(results, key=lambda r: r["seed"]):
        mine = all(r.get(name) == value for name, value in what.items()) and r.get("spt_share") in (0, 0.2)
        if mine and r.get("steps"):
            found.setdefault(r["seed"], {})[r.get("start", "denoising")] = r
    return max(found.values(), key=len, default={})


def figure5(plt, results):
    """Validation curves of table 8's Transformers: the denoising task, and the downstream task with and without SPT."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.8))
    rights = []
    for axis, task in zip(axes, ("image", "text")):
        runs, right = curves_of(results, task), axis.twinx()
        rights.append(right)
        for kind, run in runs.items():
            records = [record for record in read_log(run["run"]) if record.get("kind") == "eval"]
            epochs = [record["step"] * (run.get("epochs") or math.nan) / run["steps"] for record in records]
            if kind == "denoising":
                values = [record["val_score"] for record in records]
                values = [1 + v for v in values] if min(values, default=0) < 0 else values
                right.plot(epochs, values, color=OTHER, linewidth=1.2, label="denoising (right axis)")
            else:
                axis.plot(epochs, [100 * record["val_accuracy"] for record in records], color=SPT, linewidth=1.2,
                          linestyle="--" if kind == "scratch" else "-",
                          label="downstream, from scratch" if kind == "scratch" else "downstream, after SPT")
        axis.set_title(f"{task}: {'rotary Transformer, 20 % of the budget for SPT' if runs else 'not run'}", fontsize=8)
        axis.set_xlabel("epochs of the stage", fontsize=8)
        axis.set_ylabel("downstream validation accuracy, %", fontsize=8)
        right.set_ylabel("denoising: 1 - squared error" if task == "image" else "denoising accuracy", fontsize=8,
                         color=OTHER)
        axis.spines["top"].set_visible(False)
        right.spines["top"].set_visible(False)
    legend(figure, [*axes, *rights])
    return figure, "Figure 5: training with and without SPT, one seed"


FIGURES = {1: figure1, 2: figure2, 3: figure3, 4: figure4, 5: figure5}


def draw(results, number, path, mini=False):
    plt = plotting()
    figure, title = FIGURES[number](plt, results)
    if not all(r.get("full_recipe") for r in results):
        title += "; some runs shortened or changed"
    figure.suptitle(title + "\nmini: small models on short stand-in tasks" * mini, fontsize=10)
    figure.tight_layout(rect=(0, 0.07, 1, 0.98))
    save_figure(figure, path)
    plt.close(figure)


# ---------------------------------------------------------------------------------------------------------------------
# What is written: tables and figures, a page, README's results
# ---------------------------------------------------------------------------------------------------------------------


def results_of(args):
    """The preset's runs; also fills in the folders that depend on the preset."""
    args.mini = args.preset == "mini"
    if args.runs and not args.runs.is_dir():
        raise UserError(f"--runs {args.runs} is not a folder")
    args.runs, args.out = args.runs or Path("runs", args.preset), args.out or Path("results", args.preset)
    results = one_per_seed(read_results(args.runs))
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


def strangers(results):
    """Finetuning runs that belong into no cell."""
    keys = [key for number in PAPER for _, cells, _ in grid(number)[1] for key, _ in cells]
    keys += [dict(task=task, model="s4", objective="masked", size=None, spt_share=None) for task in ("image", "text")]
    return [r for r in results if "start" in r and not any(all(r.get(k) == v for k, v in key.items()) for key in keys)]


def produce(args):
    """Every table into one Markdown file, every figure beside it. One that cannot be made does not stop the others ->
    results, {number of a figure: what stopped it}."""
    results, failed = results_of(args), {}
    text = "\n\n".join(sections(results, args.mini)) + "\n"
    write(args.out / "tables.md", lambda temporary: temporary.write_text(text))
    print(f"{args.out / 'tables.md'}: written, from {len(results)} finished runs below {args.runs}")
    if others := strangers(results):
        print(f"note: {len(others)} finished runs belong into no table or figure: "
              + ", ".join(Path(r["run"]).name for r in others[:5]) + ", ..." * (len(others) > 5))
    for number in FIGURES:
        try:
            draw(results, number, args.out / f"figure{number}.png", args.mini)
            print(f"{args.out / f'figure{number}.png'}: written")
        except Exception as error:                     # whatever a log or an array may hold that nobody thought of
            failed[number] = str(error)
            print(f"error: figure {number}: {error or type(error).__name__}", file=sys.stderr)
    return results, failed


def everything(args):
    _, failed = produce(args)
    if failed:
        raise SystemExit(1)


STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 72em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; display: block; overflow-x: auto }
td, th { border: 1px solid #ccc; padding: .2em .6em; text-align: left; white-space: nowrap } th { background: #f2f2f2 }
.claims td { white-space: normal }
img { max-width: 100% } pre { background: #f6f6f6; padding: .6em; overflow-x: auto } summary { cursor: pointer }"""


def to_html(text):
    """The Markdown that `sections` writes: headings, paragraphs with strong words, tables with line breaks."""
    out = []
    for block in text.split("\n\n"):
        lines = block.splitlines()
        if lines[0].startswith("|"):
            rows = [[html.escape(cell.strip()).replace("&lt;br&gt;", "<br>") for cell in line.strip("|").split("|")]
                    for line in lines]
            wide = ' class="claims"' if "claim" in lines[0] else ""
            out.append(f"<table{wide}><tr>" + "".join(f"<th>{cell}</th>" for cell in rows[0]) + "</tr>" + "".join(
                "<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows[2:]) + "</table>")
        elif lines[0].startswith("### "):
            out.append(f"<h2>{html.escape(lines[0][4:])}</h2>")
        else:
            out.append("<p>" + re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", html.escape(block)) + "</p>")
    return "\n".join(out)


def report(args):
    """One HTML page without links to other files: claims, tables, figures, and of each run its command, environment and
    configuration, folded."""
    results, failed = produce(args)
    title = html.escape(args.title or "Never Train from Scratch: the paper's numbers and ours"
                        + (" (mini: short stand-in tasks)" if args.mini else ""))
    page = [f"<h1>{title}</h1>", *map(to_html, sections(results, args.mini))]
    for number in FIGURES:
        page.append(f"<h2>Figure {number}</h2>")
        if number in failed:
            page.append(f"<p>{html.escape(failed[number])}</p>")
            continue
        picture = base64.b64encode((args.out / f"figure{number}.png").read_bytes()).decode()
        page.append(f'<img alt="figure {number}" src="data:image/png;base64,{picture}">')
    page.append(f"<h2>All {len(results)} runs</h2>")
    for r in results:
        argv = next((record["argv"] for record in read_log(r["run"]) if isinstance(record.get("argv"), list)),
                    ["command unknown"])
        try:
            config = (Path(r["run"]) / "config.json").read_text(errors="replace")
        except OSError:
            config = "not there"
        what = f"{score(r):.4g}" if "start" in r else f"validation score {r.get('val_score') or 0:.4g}"
        name = html.escape(Path(r["run"]).name)
        page.append(f"<details><summary>{name}: {what}, {html.escape(status({0: r}))}</summary>"
                    f"<pre>{html.escape(' '.join(map(str, argv)))}</pre>"
                    f"<pre>{html.escape(json.dumps(r, indent=1))}</pre><pre>{html.escape(config)}</pre></details>")
    path = args.out / "report.html"
    text = (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
            f"<style>{STYLE}</style></head><body>\n" + "\n".join(page) + "\n</body></html>\n")
    write(path, lambda temporary: temporary.write_text(text))
    print(f"{path}: written")
    if failed:
        raise SystemExit(1)


def keep(args):
    """Into --out/runs: result.json of every run, the kernels of figure 4, the logs of figure 5. No weights."""
    results = results_of(args)
    kernels = {path.parent for task in ("image", "text", "pathx", "listops") for path, *_ in kernels_of(results, task)}
    logs = {Path(run["run"]) for task in ("image", "text") for run in curves_of(results, task).values()}
    folder, runs = args.out / "runs", [Path(r["run"]) for r in results]
    if len({run.name for run in runs}) < len(runs):
        raise UserError(f"runs below {args.runs} have the same name in different folders")
    if folder.resolve() == args.runs.resolve():
        raise UserError(f"--runs {args.runs} is where runs are kept; name the folder that they come from")
    shutil.rmtree(folder, ignore_errors=True)                # what is kept is what is there now
    for run in runs:
        for name in ("result.json", *["kernels.npz"] * (run in kernels), *["log.jsonl"] * (run in logs)):
            if (run / name).exists():
                write(folder / run.name / name, lambda temporary: shutil.copyfile(run / name, temporary))
    print(f"{folder}: {len(runs)} runs kept")


def kept(preset):
    """The results that are part of the repository."""
    results = one_per_seed(read_results(Path(__file__).with_name("results") / preset / "runs"))
    return stand_ins(results) if preset == "mini" else results


def readme(args):
    """README's block of results: what the kept runs say about the paper's claims."""
    parts = []
    for preset, title in (("paper", "The paper's recipes"), ("mini", "The mini preset")):
        results = kept(preset)
        if not results:
            parts.append(f"**{title}**: no runs are kept here yet.")
            continue
        seeds = ", ".join(map(str, sorted({r["seed"] for r in results})))
        folder = f"results/{preset}"
        parts += [f"**{title}**: {len(results)} runs, seeds {seeds}; {provenance(results)}; {hours(results):.1f} "
                  "hours of training added up over runs.", *([MINI_NOTE] if preset == "mini" else []), claims(results),
                  f"![Figure 1, {preset}]({folder}/figure1.png)",
                  f"All tables, with what stands behind each cell: [{folder}/tables.md]({folder}/tables.md)."]
    replace_block(Path(__file__).with_name("README.md"), "results", "\n\n".join(parts), args.check)
    print("README.md: its results are those of the kept runs")


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


# ---------------------------------------------------------------------------------------------------------------------
# The demo: the paper's Figure 1 in small
# ---------------------------------------------------------------------------------------------------------------------

MODEL_NAMES = {"transformer": "Transformer", "rotary": "Transformer (rotary)", "s4": "S4",
               "s4_rand": "S4, random start", "dlr": "DLR", "dlr_rand": "DLR, random start"}
# Name and chance, in percent.
DEMO_TASKS = {"pathfinder_demo": ("Pathfinder, scaled down", 50), "listops_demo": ("ListOps, scaled down", 10),
              "text_demo": ("Text (IMDb), 128 characters", 50), "text256": ("Text (IMDb), 256 characters", 50)}


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
                         f"{mean_std(spt.values())} | {signed(paired_gain(scratch, spt), count=False)} | {seeds} |")
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
    if args.figure.suffix != ".png":
        raise UserError(f"--figure {args.figure} should end in .png")
    results = [r for r in one_per_seed(read_results(args.runs))
               if r["task"] in DEMO_TASKS and r["model"] in MODEL_NAMES and "test_accuracy" in r]
    if not results:
        raise UserError(f"no finished finetuning run below {args.runs}; run: bash run_all.sh demo")
    table = demo_table(results)
    seconds = sum(r["seconds"] for r in read_results(args.runs))
    caption = (f"Test accuracy in percent, mean ± standard deviation over seeds. Small models on small or shortened "
               f"sets: not the paper's tasks; {provenance(results)}, "
               f"{seconds / 60:.0f} minutes of training added up over runs.")
    print(f"\n{table}\n\n{caption}\n")
    demo_figure(results, args.figure)
    print(f"figure: {args.figure}")
    if args.readme:
        name = args.figure.stem                              # the block has the figure's name
        replace_block(Path(__file__).with_name("README.md"), name, f"{table}\n\n{caption}\n\n![{name}]({args.figure})")


# ---------------------------------------------------------------------------------------------------------------------
# Watching
# ---------------------------------------------------------------------------------------------------------------------


def progress(directory, names=None):
    """{run name: its state} of every started run below `directory` (or of those named), from its files alone: what
    share is done, whether it is finished, and of the others where they are, their last numbers, seconds left, why they
    failed, seconds since their log last changed (age), and the same where it is beyond what is usual (silent)."""
    state = {}
    for config in sorted(Path(directory).glob("**/config.json")):
        run = config.parent
        if names is not None and run.name not in names:
            continue
        if (run / "result.json").exists():
            state[run.name] = SimpleNamespace(share=1, finished=True)
            continue
        log = read_log(run)
        numeric = lambda value: isinstance(value, NUMBER) and math.isfinite(value)
        last = {key: value for record in log for key, value in record.items() if numeric(value)}    # the newest of each
        step, total = last.get("step", 0), last.get("total", 0)
        numbers = " ".join(f"{key} {last[key]:.3f}" for key in last if key == "loss" or key.startswith("val_"))
        pace = last.get("ms_per_step", 0) / 1000
        steps = [record["step"] for record in log if record.get("kind") == "train" and numeric(record.get("step"))]
        # Between two lines of its log. An evaluation may take longer, and before the second line nothing is known.
        usual = pace * (steps[-1] - steps[-2]) if len(steps) > 1 else 60
        try:
            age = time.time() - max(path.stat().st_mtime for path in (config, *run.glob("log.jsonl")))
        except OSError:                                      # written anew at this moment
            age = 0
        state[run.name] = SimpleNamespace(
            share=min(step / total, 0.999) if total else 0, finished=False, text=f"{step}/{total} {numbers}".rstrip(),
            left=pace * (total - step), error=log[-1].get("error") if log else None, age=age,
            silent=age if age > 120 + 10 * usual else 0)
    return state


def watch(args):
    """A status line whenever a run finishes and every so often in between, until all --only runs are done: which are
    done, which run, where, with what numbers and for how long still, which failed, and which have been silent for
    longer than they should.

    Of a queue that works (--until), what was stopped before watching began waits for its turn and is not mentioned.
    Time left of all assumes that runs not yet started take as long as those seen so far.
    """
    try:
        names = {Path(line).name for line in args.only.read_text().split()} if args.only else None
    except OSError as error:
        raise UserError(f"--only {args.only}: {error.strerror}") from None
    if not args.runs.is_dir():
        raise UserError(f"{args.runs} is not a folder")
    start, reported, last_line = time.time(), set(), 0.0
    amount_before = None                                     # runs' worth of work that was there when watching began
    while True:
        state = progress(args.runs, names)
        jobs = len(names or state)
        amount = sum(run.share for run in state.values())
        amount_before = amount if amount_before is None else amount_before
        finished = {name for name, run in state.items() if run.finished}
        if finished - reported or time.time() - last_line > args.every:
            spent = time.time() - start
            left = "time left unknown"
            if amount - amount_before > 0.3:
                left = f"about {_clock((jobs - amount) * spent / (amount - amount_before))} left"
            news = "".join(f" {name} done;" for name in sorted(finished - reported) if last_line)
            others = {name: run for name, run in state.items()
                      if not run.finished and not (args.until and run.age > spent + 1)}
            lists = {"failed": [f"{name}: {run.error}" for name, run in others.items() if run.error],
                     "silent": [f"{name} {run.text} for {_clock(run.silent)}" for name, run in others.items()
                                if run.silent and not run.error],
                     "running": [f"{name} {run.text}" + (f" {_clock(run.left)} left" if run.left > 0 else "")
                                 for name, run in others.items() if not run.silent and not run.error]}
            print(f"[{len(finished):>3}/{jobs} runs] {_clock(spent)} spent, {left};{news} " + "; ".join(
                f"{what}: {', '.join(runs) or 'none'}" for what, runs in lists.items() if runs or what == "running"),
                flush=True)
            reported, last_line = finished, time.time()
        if len(finished) >= jobs or args.once or (args.until and args.until.exists()):
            return
        time.sleep(1)


def _clock(seconds):
    seconds = max(0, seconds)
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


# ---------------------------------------------------------------------------------------------------------------------
# Commands
# ---------------------------------------------------------------------------------------------------------------------


def _common(command):
    command.add_argument("--preset", choices=("paper", "mini"), default="paper", help="which runs: see run_all.sh")
    command.add_argument("--runs", type=Path, help="folder of the run directories (default: runs/PRESET)")
    command.add_argument("--out", type=Path, help="folder for what is written (default: results/PRESET)")


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, numbers in (("table", PAPER), ("figure", FIGURES)):
        command = commands.add_parser(name, help=f"a {name} of the paper, beside our runs")
        command.add_argument("number", type=int, choices=sorted(numbers))
        command.set_defaults(run=print_table if name == "table" else print_figure)
        _common(command)
    for name, run, text in (("all", everything, "all tables and figures"),
                            ("report", report, "all of it as one HTML page"),
                            ("keep", keep, "copies of result.json for the repository")):
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=run)
        _common(command)
        if name == "report":
            command.add_argument("--title")
    command = commands.add_parser("readme", help="README's results")
    command.add_argument("--check", action="store_true", help="write nothing; an error where README is stale")
    command.set_defaults(run=readme)
    command = commands.add_parser("demo", help="the demo's table and figure")
    command.add_argument("--runs", default="runs/demo", type=Path)
    command.add_argument("--figure", default="results/demo.png", type=Path)
    command.add_argument("--readme", action="store_true", help="also write the table into README.md")
    command.set_defaults(run=demo)
    command = commands.add_parser("watch", help="progress of the runs below a folder")
    command.add_argument("runs", type=Path)
    command.add_argument("--only", type=Path, help="file with the run directories to watch, one a line")
    command.add_argument("--every", type=float, default=15, help="seconds between status lines")
    command.add_argument("--until", type=Path, help="stop when this file exists")
    command.add_argument("--once", action="store_true", help="print one status line and stop")
    command.set_defaults(run=watch)
    args = parser.parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)            # table 2 | head: no traceback
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
