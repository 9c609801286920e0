"""Make tables and figures from runs. Reads only files: result.json, log.jsonl and kernels.npz of
run directories, or results/PRESET/runs.jsonl and kernels.npz, which `keep` makes from them.

    python analyze.py all               the paper's tables and figures with ours, into results/paper
    python analyze.py all --preset mini the same at small scale, into results/mini
    python analyze.py table 2           one table in Markdown; `figure 1`: one figure
    python analyze.py keep              all runs as results/paper/runs.jsonl and kernels.npz
    python analyze.py keep demo         the runs in runs/demo as results/demo.jsonl
    python analyze.py readme            write results into README.md and results/PRESET; --check
    python analyze.py compare runs/a    any runs: one row per setting, with gains; a figure
    python analyze.py demo              the demo's table (Markdown) and figure, from runs/demo
    python analyze.py own runs/own      your data: SPT and joint training against scratch
    python analyze.py curves RUN...     loss, score, learning rate over steps and minutes
    python analyze.py status runs/demo  which runs are done, running (time left), stopped or failed

A cell is the mean ± standard deviation over seeds of the test accuracy at the checkpoint that
validation chose. Gains have 95 % intervals over seeds and test examples (compare/statistics.py).
The paper's claims and figure 3 show seeds only: Student's t, and differences paired by seed."""

# first: no traceback if Ctrl-C comes while importing
import argparse
import itertools
import json
import math
import sys
import time
from pathlib import Path

import numpy as np

from compare import paper
from compare.curves import curves
from compare.drawing import OTHER, SCRATCH, SPT, bars, draw, replace_block, wrapped, write
from compare.report import report
from compare.runs import evaluations, load, provenance, rows_of
from compare.settings import compare
from compare.statistics import half_width
from engine.folder import newest
from experiments import entries
from files import ROOT, Parser, UserError, exit_code, reading
from tasks.picture import picture

# ---- Figures -------------------------------------------------------------------------------------

LAYERS = (SPT, OTHER, "#009e73", "#cc79a7")  # of layers 1, 3, 5, 7


def figure1(plt, cells):
    """Draw Long Range Arena: both Transformers and S4, from scratch and after SPT."""
    figure, axes = plt.subplots(3, 1, figsize=(8, 7.5), sharex=True)
    for axis, pair in zip(axes, paper.PAIRS.values()):
        scores = [paper.ours(cells, *approach) for approach in pair]
        printed = [paper.paper_numbers(cells, *approach) for approach in pair]
        bars(axis, paper.CHANCE, scores, paper.CHANCE, printed)
        axis.set_title(pair[0][1])
    return figure, "Figure 1: Long Range Arena"


def figure2(plt, cells):
    """Draw the initialisations: averages over the tasks of table 7 that all have in common."""
    approaches = itertools.chain(*paper.INITIALISATIONS.values())
    approaches = [row for row in approaches if any(map(len, paper.ours(cells, *row).values()))]
    tasks, averages = paper.over_tasks(cells, *approaches)
    scores_of = dict(zip(approaches, averages))
    scores, printed = ({}, {}), ({}, {})
    for name, pair in paper.INITIALISATIONS.items():
        for i, approach in enumerate(pair):
            scores[i][name] = scores_of.get(approach, ())
            numbers = paper.paper_numbers(cells, *approach)
            if numbers and len(scores[i][name]):
                printed[i][name] = np.mean([numbers[task] for task in tasks])
    figure, axis = plt.subplots(figsize=(7, 3.8))
    bars(axis, paper.INITIALISATIONS, scores, {}, printed)
    common = ", ".join(tasks) or "no task: none is common to all"
    return figure, f"Figure 2: initialisations, average of {common}"


def figure3(plt, cells):
    """Draw accuracy and the relative gain of SPT against the share of the training set."""
    figure, axes = plt.subplots(1, 2, figsize=(8.5, 3.8))
    for task, colour in (("image", SPT), ("text", OTHER)):
        scratch, spt, gains = paper.by_fraction(cells, task)
        for axis, by_share, style, label in (
            (axes[0], scratch, "--", f"{task}, from scratch"),
            (axes[0], spt, "-", f"{task}, SPT"),
            (axes[1], gains, "-", ""),
        ):
            means = [values.mean() for values in by_share.values()]
            halves = [half_width(values) for values in by_share.values()]
            look = dict(color=colour, linestyle=style, marker="o", markersize=3, capsize=2)
            axis.errorbar([*by_share], means, halves, label=label, **look)
    for axis, label in zip(axes, ("test accuracy, %", "relative gain of SPT, %")):
        axis.set(xscale="log", xlabel="share of the training examples, %", ylabel=label)
        shares = [100 * fraction for fraction in entries.FRACTIONS]
        axis.set_xticks(shares, [f"{share:g}" for share in shares])
        axis.minorticks_off()
    axes[1].axhline(0, color="black", linestyle=":")
    return figure, "Figure 3: S4 on parts of the training set; bars: 95 % intervals"


def figure4(plt, cells):
    """Draw max |K| against the lag for odd layers, after SPT and at HiPPO's start."""
    plt.rcParams["text.parse_math"] = True  # powers of ten along the axes
    figure, axes = plt.subplots(len(paper.KERNEL_TASKS), 1, figsize=(8, 10))
    for axis, task in zip(axes, paper.KERNEL_TASKS):
        runs = cells[paper.Cell(task, "s4", "", "pretrain")]
        name, kernels = next(iter(paper.kernels_of(runs).items()), ("not run", None))
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
    """Return {start: runs by seed} of table 8's rotary Transformer for figure 5."""
    words = {start: word for start, (word, _, _) in CURVES.items()}
    return {start: cells[paper.Cell(task, "rotary", word, start)] for start, word in words.items()}


def figure5(plt, cells):
    """Draw validation of table 8's Transformers: denoising, and the task with and without SPT."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 6))
    titles = {"image": "minus squared error", "text": "accuracy"}
    for (above, below), (task, score) in zip(axes.T, titles.items()):
        for start, runs in curves_of(cells, task).items():
            if not len(runs):
                continue
            run = rows_of(runs.sort_index())[0]
            axis, field = (above, "val_score") if start == "pretrain" else (below, "val_accuracy")
            _, colour, label = CURVES[start]
            epochs_per_step = run.record["epochs"] / run.record["steps"]
            records = evaluations(run)
            epochs = [record["step"] * epochs_per_step for record in records]
            axis.plot(epochs, [record[field] for record in records], color=colour, label=label)
        above.set(title=f"{task}: rotary Transformer", ylabel=f"denoising, {score}")
        below.set(xlabel="epochs of the stage", ylabel="downstream accuracy")
    return figure, "Figure 5: validation with and without SPT, one seed"


def draw_paper(number, cells, path, mini):
    """Draw a figure of the paper into a PNG file."""
    note = "\nmini: small models on short stand-in tasks" if mini else ""
    draw(lambda plt: FIGURES[number](plt, cells), path, note)


# ---- Output --------------------------------------------------------------------------------------


def table_or_figure(args):
    """Print a table of the paper, or draw a figure of it."""
    numbers = {"table": paper.PAPER, "figure": FIGURES}[args.command]
    if len(args.what) != 1 or args.what[0] not in map(str, numbers):
        choices = ", ".join(map(str, numbers))
        raise UserError(f"{args.command} {' '.join(args.what)}: choose from {choices}")
    number = int(args.what[0])
    cells, mini = paper.by_cell(load(args.runs), args.preset), args.preset == "mini"
    if args.command == "table":
        print(paper.table(cells, number, mini))
    else:
        draw_paper(number, cells, args.out / f"figure{number}.png", mini)


def everything(args):
    """Write the claims and every table into one Markdown file, and draw every figure beside it."""
    cells, mini = paper.by_cell(load(args.runs), args.preset), args.preset == "mini"
    note = f", mini\n\n{paper.MINI_NOTE}" if mini else ""
    tables = [paper.table(cells, number, mini) for number in paper.PAPER]
    text = "\n\n".join([f"### The paper's claims{note}\n\n{paper.claims(cells)}", *tables])
    write(args.out / "tables.md", lambda file: file.write(f"{text}\n".encode()))
    for number in FIGURES:
        draw_paper(number, cells, args.out / f"figure{number}.png", mini)


def keep(args):
    """Write into --out: runs.jsonl, one line per run (for figure 5 with evaluations); kernels.npz,
    figure 4's kernels. `keep NAME` writes results/NAME.jsonl, with the evaluations of finetuning.
    Weights are not kept."""
    runs = load(args.runs)
    if args.what:
        evaluated = {run.place for run in rows_of(runs) if run.start != "pretrain"}
        write_records(args.out / f"{args.what[0]}.jsonl", runs, evaluated)
        return
    cells = paper.by_cell(runs, args.preset)
    evaluated, kernels = set(), {}
    for task in paper.KERNEL_TASKS:
        for variant in curves_of(cells, task).values():
            evaluated |= {*variant.place}
        for run in rows_of(cells[paper.Cell(task, "s4", "", "pretrain")]):
            path = run.folder / "kernels.npz"
            damage = reading(f"{path} is missing or damaged", "make the run again")
            with damage, np.load(path) as arrays:
                kernels |= {f"{run.name}/{stage}": arrays[stage] for stage in ("before", "after")}
    if kernels:
        write(args.out / "kernels.npz", lambda file: np.savez_compressed(file, **kernels))
    write_records(args.out / "runs.jsonl", runs, evaluated)


def write_records(path, runs, evaluated):
    """Write one line per run. evaluated: places of the runs that get their evaluations."""
    lines = []
    for run in rows_of(runs):
        record = {"run": run.name} | run.record
        if run.place in evaluated:
            record["evals"] = evaluations(run)
        lines.append(json.dumps(record) + "\n")
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
        runs = load(kept)
        text = paper.claims(paper.by_cell(runs, preset))
        replace_block(ROOT / folder / "README.md", "results", text, args.check)
        paragraphs.append(
            f"**{title}**: {provenance(runs)}. [What they show]({folder}/README.md), "
            f"[every table]({folder}/tables.md)."
        )
    replace_block(ROOT / "README.md", "results", wrapped("<br>\n".join(paragraphs)), args.check)


def status(args):
    """Print how many runs below a folder are done, then a line per unfinished run: running, silent
    (its log has not changed for long), stopped, or failed with its error."""
    where = args.what[0] if args.what else "runs"
    folders = [path.parent for path in sorted(Path(where).glob("**/log.jsonl"))]
    if not folders:
        raise UserError(f"status {where}: no run was started there")
    done = {*load(Path(where)).folder}  # names damaged runs
    started = [folder for folder in folders if folder not in done]
    print(f"{len(folders) - len(started)} of {len(folders)} runs are done")
    for folder in started:
        if not (folder / "result.json").exists():
            print(state_of(folder))


def state_of(folder):
    """Return the line of `status` for a run without result.json."""
    last = newest(folder)
    if last.get("kind") == "error":
        return f"failed   {folder.name}: {last['error']}"
    step, total = last.get("step", 0), last.get("total", 0)
    if last.get("kind") == "stop":
        how = "the same command with --resume continues"
        return f"stopped  {folder.name}: {last['text']} of {total}; {how}"
    minutes_per_step = last.get("ms_per_step", 0) / 60_000
    scores = {name: last[name] for name in last if name == "loss" or name.startswith("val_")}
    numbers = "".join(f" {name} {value:.3f}" for name, value in scores.items())
    text = f"{folder.name}: {step}/{total}{numbers}"
    silent = (time.time() - (folder / "log.jsonl").stat().st_mtime) / 60
    if silent > 10 + 1000 * minutes_per_step:  # 1,000 steps: ten lines of the log
        return f"silent   {text} for {silent:.0f} minutes"
    if not minutes_per_step:
        return f"running  {text}"
    return f"running  {text}, {minutes_per_step * (total - step):.0f} minutes left"


# ---- Commands ------------------------------------------------------------------------------------

FIGURES = {1: figure1, 2: figure2, 3: figure3, 4: figure4, 5: figure5}
COMMANDS = {
    "table": table_or_figure,
    "figure": table_or_figure,
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
    """Run the command of these words."""
    args = parsed(argv)
    of_users = args.command in ("compare", "curves", "demo", "own")
    if args.command in ("compare", "curves", "own") and args.what:
        args.runs = Path(args.what[0])
    named = args.what and args.command in ("demo", "keep")
    folder = args.command if of_users else args.preset
    if named:
        folder = args.what[0]
    if args.runs is None:
        args.runs = Path("runs", folder)
        kept = ROOT / "results" / args.preset / "runs.jsonl"
        reads_kept = args.command in ("table", "figure", "all")
        if reads_kept and kept.exists() and not args.runs.exists():
            args.runs = kept
    if args.out is None:
        args.out = Path("results") if named else Path("results", args.preset)
    args.linked = args.figure is not None  # then a page of --readme shows it
    if args.figure is None:
        together = args.runs.is_dir() and len(args.what) < 2  # one folder holds all runs
        args.figure = (args.runs if together else Path()) / f"{args.command}.png"
    picture("--figure", args.figure)
    COMMANDS[args.command](args)


def parsed(argv):
    """Parse the words of a command."""
    parser = Parser(
        examples=True,
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("command", choices=COMMANDS)
    text = "number of the table or figure; compare, curves, own, status: folders; demo, keep: a "
    add("what", nargs="*", help=f"{text}demo of run_all.sh")
    add("--preset", choices=("paper", "mini"), default="paper", help="see run_all.sh")
    add(
        "--runs", type=Path, help="folder of runs or runs.jsonl (default: runs/PRESET or kept runs)"
    )
    add("--out", type=Path, help="folder for the output (default: results/PRESET)")
    add("--check", action="store_true", help="readme: write nothing; fail if a page is out of date")
    either = parser.add_mutually_exclusive_group().add_argument
    text = "compare: what gains are over (default: scratch)"
    either("--baseline", metavar="NAME=VALUE,...", help=text)
    either("--select", choices=["val"], help="compare: test scores only of what validation chose")
    add("--any-code", action="store_true", help="compare: pool seeds trained by different code")
    text = "demo, own: only the runs of these seeds"
    add("--seeds", type=lambda text: {*map(int, text.split(","))}, metavar="0,1,...", help=text)
    text = "demo, own, compare, curves: where the figure goes (default: in the folder of the runs)"
    add("--figure", type=Path, help=text)
    add("--readme", type=Path, help="demo, own: write tables between their markers in this file")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
