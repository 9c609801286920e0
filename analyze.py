"""From run directories to tables and figures. Reads files only: result.json, config.json, log.jsonl; needs no torch.

    python analyze.py demo              the demo's table (Markdown) and figure (results/demo.png) from runs/demo
    python analyze.py demo --readme     and puts the table into README.md, between its markers
    python analyze.py demo --runs runs/demo-text --figure results/demo-text.png        the same for the text demo
    python analyze.py watch runs/demo   what is done, what is running, and for how long still

A cell is the mean ± standard deviation over seeds of the test accuracy at the checkpoint that validation chose. A gain
is paired: the same seed with and without self-pretraining, with a 95 % interval from Student's t.
"""
import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

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


def read_results(directory):
    """Every finished run below `directory`: its result.json and `run`, its path. Damaged files are named, not fatal."""
    results = []
    for path in sorted(Path(directory).glob("**/result.json")):
        try:
            record = json.loads(path.read_text())
            for key, kind in (("task", str), ("model", str), ("seed", int), ("seconds", (int, float))):
                if not isinstance(record[key], kind):
                    raise TypeError(f"{key} is {record[key]}")
            if not isinstance(record.get("test_accuracy", 0.0), float):
                raise TypeError(f"test_accuracy is {record['test_accuracy']}")
            results.append(record | {"run": str(path.parent)})
        except (OSError, ValueError, TypeError, KeyError) as error:
            print(f"warning: {path} is skipped: {error}", file=sys.stderr)
    return results


def accuracies(results, **wanted):
    """{seed: test accuracy in percent} of the finetuning runs that match; two runs of one seed are an error."""
    found = {}
    for r in results:
        if "test_accuracy" in r and all(r.get(k) == v for k, v in wanted.items()):
            if r["seed"] in found:
                raise UserError(f"two runs of seed {r['seed']} for {wanted}; one of them is {r['run']}")
            found[r["seed"]] = 100 * r["test_accuracy"]
    return found


def mean_std(values):
    """'61.2 ± 0.8', or the number alone where one seed gives no spread, or a dash."""
    values = list(values)
    if not values:
        return "–"
    mean = f"{statistics.mean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.1f}"


def paired_gain(before, after):
    """Mean of the paired differences and the half-width of its 95 % interval (None for one seed); None if no pair."""
    differences = [after[seed] - before[seed] for seed in sorted(before.keys() & after.keys())]
    if not differences:
        return None
    if len(differences) == 1:
        return differences[0], None
    t = T_QUANTILE[min(len(differences) - 2, len(T_QUANTILE) - 1)]
    return statistics.mean(differences), t * statistics.stdev(differences) / math.sqrt(len(differences))


def signed(gain):
    if gain is None:
        return "–"
    mean, half = gain
    return f"{mean:+.1f} (one seed)" if half is None else f"{mean:+.1f} [{mean - half:+.1f}, {mean + half:+.1f}]"


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
            scratch = accuracies(results, task=task, model=model, start="scratch")
            spt = accuracies(results, task=task, model=model, start="spt")
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
    try:
        import matplotlib
    except ImportError:
        raise UserError("the figure needs matplotlib; run: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = [t for t in DEMO_TASKS if any(r["task"] == t for r in results)]
    models = [m for m in MODEL_NAMES if any(r["model"] == m for r in results)]
    colours = {"scratch": "#9aa5b1", "spt": "#0072b2"}                   # colour-blind safe, apart in gray too
    names = {"scratch": "from scratch", "spt": "self-pretrained (SPT)"}
    width = max(4.4, 1.4 * len(models))
    figure, axes = plt.subplots(1, len(tasks), figsize=(width * len(tasks), 3.6), squeeze=False)
    for axis, task in zip(axes[0], tasks):
        for i, model in enumerate(models):
            for j, start in enumerate(("scratch", "spt")):
                values = list(accuracies(results, task=task, model=model, start=start).values())
                if not values:
                    continue
                x = i + 0.36 * (j - 0.5)
                axis.bar(x, statistics.mean(values), 0.34, color=colours[start],
                         label=names[start] if i == 0 else None)
                axis.scatter([x] * len(values), values, s=14, color="black", zorder=3,
                             label="one seed" if i == 0 and j == 1 else None)
                axis.text(x, max(values) + 1.2, f"{statistics.mean(values):.1f}", ha="center", fontsize=9)
        chance = DEMO_TASKS[task][1]
        axis.axhline(chance, color="black", linewidth=0.8, linestyle=":")
        axis.text(len(models) - 0.5, chance, " chance", fontsize=8, va="center")
        axis.set_xticks(range(len(models)), [MODEL_NAMES[m].replace(", ", ",\n") for m in models])
        axis.set_title(DEMO_TASKS[task][0], fontsize=10)
        axis.set_ylim(0, axis.get_ylim()[1] * 1.05)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("test accuracy, %, mean over seeds")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=3, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
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


def replace_block(path, name, text):
    """Puts text between <!-- name:begin --> and <!-- name:end --> of a Markdown file."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    content = path.read_text()
    if begin not in content or end not in content:
        raise UserError(f"{path} has no {begin} ... {end}")
    head, rest = content.split(begin, 1)
    path.write_text(f"{head}{begin}\n{text}\n{end}{rest.split(end, 1)[1]}")


# ---------------------------------------------------------------------------------------------------------------------
# Watching
# ---------------------------------------------------------------------------------------------------------------------


def progress(directory):
    """{run name: (step, total)} of every started run below `directory`; step == total once its result.json is there."""
    state = {}
    for config in sorted(Path(directory).glob("**/config.json")):
        run, step, total = config.parent, 0, 1
        try:
            for line in (run / "log.jsonl").read_text().splitlines():
                record = json.loads(line)
                step, total = record.get("step", step), record.get("total", total)
        except (OSError, ValueError, AttributeError):
            pass                                             # not there yet, or its last line is being written
        total = max(total, 1)
        finished = (run / "result.json").exists()
        state[run.name] = (total, total) if finished else (min(step, total - 1), total)
    return state


def watch(args):
    """A status line whenever a run finishes and every so often in between, until --jobs runs are done.

    Time left assumes that runs not yet started take as long as those seen so far.
    """
    start, reported, last_line = time.time(), set(), 0.0
    amount_before = None                                     # runs' worth of work that was there when watching began
    while True:
        state = progress(args.runs)
        jobs = args.jobs or len(state)
        amount = sum(step / total for step, total in state.values())
        amount_before = amount if amount_before is None else amount_before
        finished = {name for name, (step, total) in state.items() if step == total}
        if finished - reported or time.time() - last_line > args.every:
            spent = time.time() - start
            rate = (amount - amount_before) / max(spent, 1e-9)
            left = "time left unknown"
            if amount - amount_before > 0.3:
                left = f"about {_clock((jobs - amount) / rate)} left"
            news = "".join(f" {name} done;" for name in sorted(finished - reported) if last_line)
            running = ", ".join(f"{name} {step}/{total}" for name, (step, total) in state.items() if step < total)
            print(f"[{len(finished):>3}/{jobs} runs] {_clock(spent)} spent, {left};{news} running: {running}",
                  flush=True)
            reported, last_line = finished, time.time()
        if len(finished) >= jobs or args.once or (args.until and args.until.exists()):
            return
        time.sleep(1)


def _clock(seconds):
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("demo", help="the demo's table and figure")
    command.add_argument("--runs", default="runs/demo", type=Path)
    command.add_argument("--figure", default="results/demo.png", type=Path)
    command.add_argument("--readme", action="store_true", help="also write the table into README.md")
    command.set_defaults(run=demo)
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
