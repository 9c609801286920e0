"""results/findings.md: tables, figures and verdicts.

    python results/findings/tables.py 1      a question's table, printed, and figure; without number: all, and claims
    python results/findings/tables.py keep   finished runs of runs/findings into runs.jsonl; then the same as `page`
    python results/findings/tables.py page   what kept runs say, into results/findings.md and the figures

Reads runs/findings; where there is none, runs.jsonl and kernels.npz beside this file; --runs names another. `page
--check` writes nothing.
"""
import argparse
import json
import math
import signal
import statistics
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT, KEPT = HERE.parents[1], HERE / "runs.jsonl"
sys.path.insert(0, str(ROOT))

from analyze import grid, half_lag, kernels_of, kernels_to_keep, line_to_keep
from compare import (STARTS, dots, draw, evaluations, half_width_of, identity, markdown, mean_std, minus, provenance,
                     read_runs, replace_block, signed, with_pretraining, write)
from data import Parser, UserError
from experiments import questions, record, trained

KERNEL_ROWS = ("text_demo-s4-rated", "pathfinder_demo-s4")         # whose kernels the last claim is about


def layout(number):
    """[(names of rows, names of columns)] of a question. A row and a column name the runs ROW-COLUMN-sSEED."""
    found = []
    for row in questions()[number].rows:
        name = "-".join(filter(None, (row.task, row.model, row.word)))
        columns = ["-".join(filter(None, (arm.word, arm.start))) for arm in row.arms]
        if found and found[-1][1] == columns:                  # the same table goes on
            found[-1][0].append(name)
        else:
            found.append(([name], columns))
    return found


def by_name(runs):
    """{name without seed: {seed: run}}, of both stages. UserError for a run that is not what its entry says. Trials and
    the runs that they led to share settings: here, and nowhere else, a name says which of them is meant."""
    entries, found = {}, {}
    for question in questions().values():
        for run in (run for row in question.rows for run in trained(row)):
            for each in filter(None, (run, run.first)):
                name = "-".join(filter(None, (each.task, each.model, each.word, each.start)))
                entries.setdefault(name, identity(record(each)))
    for run in [*with_pretraining(runs), *(run for run in runs if "start" not in run)]:
        name = run["run"].rsplit("-s", 1)[0]
        if name in entries and identity(run) != entries[name]:
            raise UserError(f"{run['run']} is not what experiments.py says: {identity(run)}, not {entries[name]}")
        found.setdefault(name, {})[run["seed"]] = run
    return found


def finding(number, found):
    """The tables of a question in Markdown. Gains are over the first column; a row has the seeds that all of its arms
    have."""
    parts, used, field = [], {}, "score" if number else "val_accuracy"
    for rows, columns in layout(number):
        lines = []
        for row in rows:
            arms = [found.get(f"{row}-{column}", {}) for column in columns]
            made = [set(arm) for arm in arms if arm]
            seeds = sorted(set.intersection(*made)) if made else []
            arms = [{seed: arm[seed] for seed in seeds} if arm else {} for arm in arms]
            every = [run for arm in arms for run in arm.values()]
            used |= {run["run"]: run for run in [*every, *(run["first"] for run in every if run["init"])]}
            scores = [{seed: run[field] * (1 if number else 100) for seed, run in arm.items()} for arm in arms]
            lines.append([f"`{row}`", *(cell_of_arm(number, arm, score, scores[0]) if arm else "–"
                                        for arm, score in zip(arms, scores))])
            if columns[1:3] == ["spt", "joint"]:
                lines[-1].append(signed(minus(scores[1], scores[2])))
        extra = ["SPT - joint"] if columns[1:3] == ["spt", "joint"] else []
        parts.append(markdown(["", *(f"`{column}`" for column in columns), *extra], lines))
    command = f"`bash run_all.sh findings{number}`"
    return "\n\n".join([*parts, f"{command}: {provenance(used.values())}." if used else command])


def cell_of_arm(number, arm, scores, first):
    """Score, gain over the first column, percent of hidden symbols that pretraining predicted right, passes, minutes.
    Question 9, whose image has samples and whose stages have different batches: epochs."""
    runs = [*arm.values()]
    text = [mean_std(scores)] + ([signed(minus(scores, first))] if number and scores is not first else [])
    if number == 4:                                            # two-valued: means say little
        text.insert(0, f"{sum(score > 55 for score in scores.values())} of {len(scores)} above 55")
    if number != 9 and all(run["init"] for run in runs):
        text.append(f"hidden: {mean_std({seed: 100 * run['first']['val_score'] for seed, run in arm.items()})}")
    length = "/".join(f"{n:,}" for n in sorted({run["passes"] for run in runs})) + " passes"
    if number == 9:
        length = f"{runs[0]['first'].get('epochs', 0) + runs[0]['epochs']:.0f} epochs"
    return "<br>".join([*text, f"{length}, {statistics.mean(run['minutes'] for run in runs):.1f} min"])


def verdicts(found):
    """The paper's claims at this size: head and rows of a table, what was measured, and what its intervals say."""
    def scores(name):
        return {seed: run["score"] for seed, run in found.get(name, {}).items()}

    def gain(row):
        return minus(scores(f"{row}-spt"), scores(f"{row}-scratch"))

    def more(one, other):                  # what SPT gains for one beyond what it gains for the other
        return minus(gain(one), gain(other))

    def closer(one, other):                # how far the lower of two catches up, by its own gain, not the other's loss
        gaps = [minus(scores(f"{one}-{start}"), scores(f"{other}-{start}")) for start in ("scratch", "spt")]
        lower = gain(one if sum(gaps[0].values()) < 0 else other)
        before, after = ({seed: math.copysign(1, sum(gap.values())) * value for seed, value in gap.items()}
                         for gap in gaps)
        return {seed: min(value, lower[seed]) for seed, value in minus(before, after).items() if seed in lower}

    def longer(row):                       # log2 of S4's half lags after pretraining against those at the start
        runs = found.get(f"{row}-pretrain", {})
        kernels = {seed: kernels_of([run]).get(run["run"]) for seed, run in runs.items()}
        return {seed: float(np.diff(np.log2(1 + half_lag(k)), axis=0).mean()) for seed, k in kernels.items()
                if k is not None}

    models = {"text256-rotary": "text256-s4", "text256-linear": "text256-s4",
              "pathfinder_demo-transformer": "pathfinder_demo-s4",
              "pathfinder_demo-transformer-max": "pathfinder_demo-s4", "pathfinder_demo-rotary": "pathfinder_demo-s4"}
    starts = {"text_demo-s4-rated": "text_demo-s4_rand-rated", "text_demo-dlr-rated": "text_demo-dlr_rand-rated",
              "pathfinder_demo-s4": "pathfinder_demo-s4_rand-lr0.003",
              "pathfinder_demo-dlr-lr0.003": "pathfinder_demo-dlr_rand-lr0.003"}
    texts = "text_demo-rotary", "text_demo-s4"
    measured = [
        ("SPT lifts Transformers most: their gain minus S4's", 1, "above 0",
         {one: more(one, s4) for one, s4 in models.items()}),
        ("masked and causal SPT are alike: causal minus masked", 7, "within 2",
         {row: minus(scores(f"{row}-causal-spt"), scores(f"{row}-spt")) for row in texts}),
        ("the gap between Transformer and S4 shrinks: by", 1, "above 0",
         {one: closer(one, s4) for one, s4 in models.items()}),
        ("initialisation matters less after SPT: own and random start closer by", 3, "above 0",
         {own: closer(own, random) for own, random in starts.items()}),
        ("gains grow as data shrinks: gain on a twentieth of it minus gain on all", 2, "above 0",
         {row: more(f"{row}-f0.05", row) for row in texts}),
        ("gains survive an equal budget: gain", 1, "above 0",
         {row: gain(row) for row in dict.fromkeys([*models, *models.values()])}),
        ("learned kernels differ from HiPPO, by task; here in reach: log2 of the lag that half of a kernel lies "
         "within, mean over layers, after SPT minus before", 3, "not 0", {row: longer(row) for row in KERNEL_ROWS})]
    lines = []
    for i, (claim, question, bound, values) in enumerate(measured, 1):
        says = {}                                              # {verdict: the rows that it is about}
        for row, value in values.items():
            says.setdefault(decide(value, bound), []).append(plain(row))
        answer = [f"{verdict}: {', '.join(says[verdict])}" for verdict in sorted(says)]
        points = [f"{plain(row)}: {signed(value)}" for row, value in values.items()]
        lines.append([str(i), claim, "<br>".join(answer), "<br>".join(points), str(question)])
    return ["", "claim", "here", "points [95 % interval] (seeds)", "question"], lines


def plain(row):
    """A row's task, model and variant; its rate is under Settings."""
    return " ".join(word for word in row.split("-") if word != "rated" and not word.startswith("lr"))


def decide(values, bound):
    """Where the interval of a mean lies -> confirmed, refuted or undecided; one seed has none."""
    if len(values) < 2:
        return "one seed" if values else "not run"
    mean, half = statistics.mean(values.values()), half_width_of([*values.values()])
    if bound == "above 0":
        return "confirmed" if mean - half > 0 else "refuted" if mean + half < 0 else "undecided"
    if bound == "not 0":
        return "confirmed" if abs(mean) > half else "undecided"
    return "confirmed" if abs(mean) + half < 2 else "refuted" if abs(mean) - half > 2 else "undecided"


def figure_of_question(plt, number, found):
    """A panel a task, a line a model and variant: the test accuracy of every seed, and the mean. Of question 9 the
    validation curves."""
    panels = {}                                                # {task: {line: {start: runs}}}
    for rows, columns in layout(number):
        for name in [f"{row}-{column}" for row in rows for column in columns]:
            task, *words, start = name.split("-")
            runs = [*found.get(name, {}).values()]
            panels.setdefault(task, {}).setdefault(" ".join(words), {})[start] = runs
    most = max(map(len, panels.values()))
    figure, axes = plt.subplots(1, len(panels), figsize=(9, 3.5 if number == 9 else 1.3 + 0.32 * most), squeeze=False)
    for axis, (task, lines) in zip(axes[0], panels.items()):
        (curves if number == 9 else dots)(axis, lines)
        axis.set_title(task, loc="left")
    return figure, questions()[number].title


def curves(axis, lines):
    """Validation accuracy over epochs of both stages, a line a run, and the paper's test accuracies of Table 9."""
    paper, first = {"scratch": "S4", "spt": "S4 + SPT"}, next(iter(lines))
    for words, style in zip(lines, ("-", "-.", "--"), strict=True):
        for start, runs in lines[words].items():
            label, colour = STARTS[start]
            axis.axhline(float(grid(9)[0][paper[start]]["100k"][1]), color=colour, linestyle=":",
                         label="the paper's test, 200 epochs")
            for run in runs:
                before = run["first"].get("epochs", 0)
                epochs = [before + record["step"] * run["epochs"] / run["steps"] for record in evaluations(run)]
                axis.plot(epochs, [100 * record["val_accuracy"] for record in evaluations(run)], style, color=colour,
                          label=label + words.removeprefix(first))
    axis.set(xlabel="epochs, those of pretraining counted", ylabel="validation accuracy, %")


def tell(args):
    """A question's table and figure; of all, and the paper's claims."""
    found = by_name(read_runs(args.runs))
    folder = args.runs.parent if args.runs.is_file() else args.runs
    for number in questions() if args.what == "" else [int(args.what)]:
        print(f"\n**{number}. {questions()[number].title}**\n\n{finding(number, found)}\n")
        if number:                                             # trials have no figure
            draw(lambda plt: figure_of_question(plt, number, found), folder / f"question{number}.png")
    if args.what == "":
        print(markdown(*verdicts(found)))


def keep(args):
    """Adds runs to runs.jsonl, with their evaluations, and those of KERNEL_ROWS to kernels.npz. A run that is there
    stays: its test scores have been used."""
    lines = KEPT.read_text().splitlines(keepends=True)
    there = {json.loads(line)["run"] for line in lines}
    new = [run for run in read_runs(args.runs) if run["run"] not in there]
    for run in new:
        evaluations(run)                                       # adds them
    kernels = kernels_to_keep(run for run in new if run["run"].rsplit("-pretrain-s", 1)[0] in KERNEL_ROWS)
    if kernels:
        with np.load(HERE / "kernels.npz") as old:
            kernels |= old
        write(HERE / "kernels.npz", lambda file: np.savez_compressed(file, **kernels))
    lines = sorted([*lines, *map(line_to_keep, new)], key=lambda line: json.loads(line)["run"])
    write(KEPT, lambda file: file.write("".join(lines).encode()))
    print(f"{len(new)} runs added to {len(there)}, which stay as they are")
    page(args)


def page(args):
    """What the kept runs say, into results/findings.md. A figure is drawn once each cell of its question has runs."""
    found = by_name(read_runs(KEPT))
    path = ROOT / "results" / "findings.md"
    for number in questions():
        text, figure = finding(number, found), HERE / f"question{number}.png"
        names = [f"{row}-{column}" for rows, columns in layout(number) for row in rows for column in columns]
        if number and all(name in found for name in names):
            if not args.check:
                draw(lambda plt: figure_of_question(plt, number, found), figure)
            text += f"\n\n![question {number}](findings/{figure.name})"
        replace_block(path, f"question{number}", text, args.check)
    head, rows = verdicts(found)
    replace_block(path, "claims", markdown(head, rows), args.check)


def main(argv=None):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="", choices=["", "keep", "page", *map(str, questions())],
                        metavar="WHAT", help="number of a question, keep or page")
    parser.add_argument("--runs", type=Path, help="folder of runs or runs.jsonl")
    parser.add_argument("--check", action="store_true", help="page: write nothing; an error where it is stale")
    own = Path("runs", "findings")
    try:
        args = parser.parse_args(argv)
        if args.check and args.what != "page":
            raise UserError("--check is for: page")
        args.runs = args.runs or (own if own.exists() or args.what == "keep" else KEPT)
        {"keep": keep, "page": page}.get(args.what, tell)(args)
    except (UserError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    for quiet in (signal.SIGPIPE, signal.SIGINT):              # tables.py 2 | head, Ctrl-C: no traceback
        signal.signal(quiet, signal.SIG_DFL)
    sys.exit(main())
