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
from collections import namedtuple
from pathlib import Path

import numpy as np
from scipy.special import stdtr

sys.path.insert(0, str(Path(__file__).resolve().parent))

import figures
from arms import (HERE, KEPT, ROOT, by_name, change, changed, curves, exits, layout, nothing, of_question, of_test,
                  scatter, wider)
from analyze import half_lag, kernels_of, kernels_to_keep, line_to_keep
from compare import (draw, half_width, half_width_of, markdown, mean_std, minus, provenance, read_log, read_runs,
                     replace_block, scores, signed, write)
from data import Parser, UserError
from experiments import questions

TRIALS = 0, 12                                                      # questions that show validation
KERNEL_ROWS = ("text_demo-s4-rated", "pathfinder_demo-s4")         # whose kernels the last claim is about


# ---- Tables ----------------------------------------------------------------------------------------------------------

def finding(number, found):
    """The tables of a question in Markdown. Gains are over the first column, of all seeds that there are."""
    used, said, found = [], [], of_question(number, found)
    if number in (10, 11):
        parts = (of_curves if number == 10 else of_exits)(found, used)
    else:
        parts, there = [], set()                                 # beds of which the table says what costs nothing
        for rows, columns in layout(number):
            parts.append(table(number, rows, columns, found, there, said))
            used += [run for row in rows for column in columns for run in found.get(f"{row}-{column}", {}).values()]
    text = f"`bash run_all.sh findings{number}`"
    if used:
        text += f": {provenance([*used, *(run['first'] for run in used if run['init'])])}."
    if said:
        text += f" Pooled deviations: {'; '.join(dict.fromkeys(said))}."
    return "\n\n".join([*parts, text])


def table(number, rows, columns, found, there, said):
    """Rows with the same arms."""
    arms = {(row, column): found.get(f"{row}-{column}", {}) for row in rows for column in columns}
    joint, lines = columns[1:3] == ["spt", "joint"], []
    sure, more = scatter(arms)
    if number not in TRIALS:
        said += [f"{task}: {text}" for task, text in more.items()]
        tasks = dict.fromkeys(row.split("-")[0] for row in rows)
        lines += [[f"*{figures.BEDS[task]}: {name}*", f"{score:.1f}", *[""] * (len(columns) - 1 + joint)]
                  for task in tasks if task not in there for name, score in nothing(task)]
        there |= {*tasks}
    for row in rows:
        first, *others = mine = [(row, column) for column in columns]
        gains = ["", *(changed(arms, key, first, sure) for key in others)]
        lines.append([f"`{row}`", *(cell_of_arm(number, arms[key], gain) if arms[key] else "–"
                                    for key, gain in zip(mine, gains))])
        if joint:
            lines[-1].append(changed(arms, *others[:2], sure))
    return markdown(["", *(f"`{column}`" for column in columns), *["SPT - joint"] * joint], lines)


def cell_of_arm(number, arm, gain):
    """Score and number of seeds, gain over the first column, percent of hidden symbols that pretraining predicted
    right, passes, minutes. Question 9, whose image has samples and whose stages have different batches: epochs."""
    runs = [*arm.values()]
    text = [f"{mean_std(scores(arm))} ({len(arm)})", "" if gain == "–" else gain]
    if number in TRIALS:
        text = [mean_std({seed: 100 * run["val_accuracy"] for seed, run in arm.items()})]
    if number == 4:                                            # two-valued: means say little
        text.insert(0, f"{sum(run['score'] > 55 for run in runs)} of {len(runs)} above 55")
    if number != 9 and all(run["init"] for run in runs):
        text.append(f"hidden: {mean_std({seed: 100 * run['first']['val_score'] for seed, run in arm.items()})}")
    length = "/".join(f"{n:,}" for n in sorted({run["passes"] for run in runs})) + " passes"
    if number == 9:
        length = f"{runs[0]['first'].get('epochs', 0) + runs[0]['epochs']:.0f} epochs"
    return "<br>".join([*filter(None, text), f"{length}, {statistics.mean(run['minutes'] for run in runs):.1f} min"])


def of_curves(found, used):
    """Question 10: for each model a line a budget, without and with dropout, then the shares at a budget of 1."""
    parts = []
    for curve in curves(found):
        arms, lines, ends = curve.arms, [], []
        sure, said = scatter(arms)
        used += [run for arm in arms.values() for run in arm.values()]
        for at, word in ((curve.at, ""), (curve.dropped, ", dropout")):
            for budget in sorted({budget for budget, _ in at}):
                alone, after, name = at[budget, 0], at[budget, curve.share], f"{budget:g}{word}"
                lines.append([name, f"{round(curve.passes * budget):,}", score_of(arms[alone]), score_of(arms[after]),
                              changed(arms, after, alone, sure), hidden(arms[after])])
                ends += [[name, end_of(arms[alone]), end_of(arms[after])]] if arms[alone] else []
        costs = [[f"*{what}*", "", f"{score:.1f}", "", "", ""] for what, score in nothing(curve.task, fresh=True)]
        shares = sorted(share for budget, share in curve.at if budget == 1)
        more = [changed(arms, curve.at[1, share], curve.at[1, 0], sure) for share in shares[1:]]
        grown = growth(curve, sure)
        parts += [f"`{curve.name}`" + "".join(f"; pooled deviation {text}" for text in said.values()),
                  markdown(["times today's passes", "passes", "from scratch", f"SPT, {100 * curve.share:g} % of them",
                            "SPT - scratch", "hidden"], costs + lines),
                  markdown(["share of pretraining", *(f"{100 * share:g} %" for share in shares)], [
                      ["test accuracy", *(score_of(arms[curve.at[1, share]]) for share in shares)],
                      ["over 0 %", "", *more]]), *([grown] if grown else []),
                  markdown(["times today's passes", "from scratch: loss in training and on validation; best after",
                            "SPT"], ends)]
    return parts


def end_of(arm):
    """Means over seeds: the last losses on the labels, and the part of finetuning's steps after which validation was
    best. Training's is a mean since the evaluation before, and has no value where that was less than 100 steps ago."""
    runs = [run for run in arm.values() if "evals" in run]
    if not runs:
        return "–"
    last = [run["evals"][-1] for run in runs]
    losses = [[record[key] for record in last if key in record] for key in ("train_loss", "val_loss")]
    losses = [f"{statistics.mean(some):.2f}" if some else "–" for some in losses]
    best = statistics.mean(100 * run["best_step"] / run["steps"] for run in runs)
    return f"{' and '.join(losses)}; {best:.0f} %"


def growth(curve, sure):
    """How much larger SPT's gain is with four times today's passes, in words; None while an arm has one run or none."""
    keys = [curve.at[budget, share] for budget in (4, 1) for share in (curve.share, 0)]
    some = [curve.arms[key] for key in keys]
    if min(map(len, some)) < 2:
        return None
    after, alone, before, base = (statistics.mean(scores(arm).values()) for arm in some)
    more = (after - alone) - (before - base)
    half = wider(half_width(*((sure[key], len(arm)) for key, arm in zip(keys, some))), of_test(*some))
    return f"Gain with 4 times the passes minus today's: {more:+.1f} [{more - half:+.1f}, {more + half:+.1f}]."


def told_gain(arms, key, base, sure):
    """Points over another arm where the whole interval is above 0, else None."""
    mean, half, _ = change(arms, key, base, sure) if arms[key] and arms[base] else (None, None, None)
    return mean if half is not None and mean > half else None


def of_exits(found, used):
    """Question 11: for each bed a line an exit, and how much of SPT's gain it recovers, where both gains are told from
    0."""
    parts = []
    for task, arms in exits(found).items():
        arms = {(task, name): arm for name, arm in arms.items()}
        sure, said = scatter(arms)
        used += [run for arm in arms.values() for run in arm.values()]
        lines = [[f"*{what}*", f"{score:.1f}", "", "", ""] for what, score in nothing(task, fresh=True)]
        alone, own = (task, "from scratch"), (task, "SPT")
        most = told_gain(arms, own, alone, sure)
        for key, arm in arms.items():
            more = most and told_gain(arms, key, alone, sure)
            part = f"{round(100 * more / most)} %" if more else "–"
            beside = ["", ""] if key == alone else [changed(arms, key, alone, sure), part]
            lines.append([key[1], score_of(arm), *beside, hidden(arm)])
        parts += [figures.BEDS[task] + "".join(f"; pooled deviation {text}" for text in said.values()),
                  markdown(["exit", "test accuracy", "over scratch", "of SPT's gain", "hidden"], lines)]
    return parts


def score_of(arm):
    return f"{mean_std(scores(arm))} ({len(arm)})" if arm else "–"


def hidden(arm):
    """Percent of hidden symbols that pretraining predicted right."""
    return mean_std({seed: 100 * run["first"]["val_score"] for seed, run in arm.items() if run["init"]}) if arm else ""


# ---- The paper's claims ----------------------------------------------------------------------------------------------

# values: {seed: points}; test: variance that another test set would bring; asked: what must be above 0 for a claim to
# be about anything.
Measured = namedtuple("Measured", "values test asked", defaults=(None,))


def less(one, other):
    return Measured(minus(one.values, other.values), one.test + other.test)


def measure(found):
    """[(claim, question, bound, {row: Measured})] of the paper's claims at this size."""
    def score(name):
        arm = found.get(name, {})
        return Measured(scores(arm), of_test(arm) if arm else 0)

    def gain(row):
        return less(score(f"{row}-spt"), score(f"{row}-scratch"))

    def more(one, other):                  # what SPT gains for one beyond what it gains for the other
        return less(gain(one), gain(other))

    def closer(low, high):                 # how far the one that the paper has behind catches up, by its own gain
        before, after = (less(score(f"{high}-{start}"), score(f"{low}-{start}")) for start in ("scratch", "spt"))
        own, shrinks = gain(low), less(before, after)
        less_of_both = {seed: min(value, own.values[seed]) for seed, value in shrinks.values.items()}
        return Measured(less_of_both, max(own.test, shrinks.test), before)

    def longer(row):                       # log2 of S4's half lags after pretraining against those at the start
        runs = found.get(f"{row}-pretrain", {})
        kernels = {seed: kernels_of([run]).get(run["run"]) for seed, run in runs.items()}
        return Measured({seed: float(np.diff(np.log2(1 + half_lag(k)), axis=0).mean()) for seed, k in kernels.items()
                         if k is not None}, 0)

    models = {"text256-rotary": "text256-s4", "text256-linear": "text256-s4",
              "pathfinder_demo-transformer": "pathfinder_demo-s4",
              "pathfinder_demo-transformer-max": "pathfinder_demo-s4", "pathfinder_demo-rotary": "pathfinder_demo-s4"}
    starts = {"text_demo-s4-rated": "text_demo-s4_rand-rated", "text_demo-dlr-rated": "text_demo-dlr_rand-rated",
              "pathfinder_demo-s4": "pathfinder_demo-s4_rand-lr0.003",
              "pathfinder_demo-dlr-lr0.003": "pathfinder_demo-dlr_rand-lr0.003"}
    texts = "text_demo-rotary", "text_demo-s4"
    return [
        ("SPT lifts Transformers most: their gain minus S4's", 1, "above 0",
         {one: more(one, s4) for one, s4 in models.items()}),
        ("masked and causal SPT are alike: causal minus masked", 7, "within 2",
         {row: less(score(f"{row}-causal-spt"), score(f"{row}-spt")) for row in texts}),
        ("the gap between Transformer and S4 shrinks: by", 1, "above 0",
         {one: closer(one, s4) for one, s4 in models.items()}),
        ("initialisation matters less after SPT: the random start comes closer by", 3, "above 0",
         {own: closer(random, own) for own, random in starts.items()}),
        ("gains grow as data shrinks: gain on a twentieth of it minus gain on all", 2, "above 0",
         {row: more(f"{row}-f0.05", row) for row in texts}),
        ("gains survive an equal budget: gain", 1, "above 0",
         {row: gain(row) for row in dict.fromkeys([*models, *models.values()])}),
        ("learned kernels differ from HiPPO, by task; here in reach: log2 of the lag that half of a kernel lies "
         "within, mean over layers, after SPT minus before", 3, "not 0", {row: longer(row) for row in KERNEL_ROWS})]


def verdicts(found):
    """Head and rows of a table of the claims; the sentence about how many of these tests are left when one knows how
    many they are."""
    lines, measured = [], measure(found)
    chances = {(i, row): chance(one) for i, (*_, bound, values) in enumerate(measured, 1) for row, one in values.items()
               if bound != "within 2" and len(one.values) > 1}
    holm, hochberg = survivors(chances)
    for i, (claim, question, bound, values) in enumerate(measured, 1):
        says, points = {}, []                                  # {verdict: the rows that it is about}
        for row, one in values.items():
            says.setdefault(decide(one, bound), []).append(plain(row))
            mark = r" \*\*" if (i, row) in holm else r" \*" if (i, row) in hochberg else ""
            points.append(f"{plain(row)}: {signed(one.values, half=half_of(one))}{mark}")
        answer = [f"{verdict}: {', '.join(says[verdict])}" for verdict in sorted(says)]
        lines.append([str(i), claim, "<br>".join(answer), "<br>".join(points), str(question)])
    text = (f"Of {len(chances)} tests against 0, {sum(p < 0.05 for p in chances.values())} have p < .05 over seeds "
            f"alone. \\*: one of {len(hochberg)} that survive Benjamini and Hochberg's correction at 5 %; \\*\\*: one "
            f"of {len(holm)} that survive Holm's. Intervals hold the error of the test set as well.")
    return ["", "claim", "here", "points [95 % interval] (seeds)", "question"], lines, text


def half_of(one):
    """Of the 95 % interval of a Measured: over paired seeds, with the error of the test set."""
    return wider(half_width_of([*one.values.values()]), one.test) if len(one.values) > 1 else 0.0


def chance(one):
    """Student's p of a mean that is 0, over seeds alone."""
    values = [*one.values.values()]
    error = statistics.stdev(values) / math.sqrt(len(values))
    if not error:
        return float(not any(values))
    return 2 * float(stdtr(len(values) - 1, -abs(statistics.mean(values)) / error))


def survivors(chances, level=0.05):
    """{test: p} -> tests that Holm's correction leaves, and those that Benjamini and Hochberg's does."""
    ranked, n = sorted(chances, key=chances.get), len(chances)
    holm = next((i for i, test in enumerate(ranked) if chances[test] > level / (n - i)), n)
    hochberg = max((i + 1 for i, test in enumerate(ranked) if chances[test] <= level * (i + 1) / n), default=0)
    return {*ranked[:holm]}, {*ranked[:hochberg]}


def plain(row):
    """A row's task, model and variant; its rate is under Settings."""
    return " ".join(word for word in row.split("-") if word != "rated" and not word.startswith("lr"))


def decide(one, bound):
    """Where the interval of a Measured lies -> confirmed, refuted or undecided; one seed has none. Where what it asks
    for is not above 0 there is nothing to decide."""
    if len(one.values) < 2:
        return "one seed" if one.values else "not run"
    mean, half = statistics.mean(one.values.values()), half_of(one)
    if one.asked and statistics.mean(one.asked.values.values()) <= half_of(one.asked):
        return "undecided"
    if bound == "above 0":
        return "confirmed" if mean - half > 0 else "refuted" if mean + half < 0 else "undecided"
    if bound == "not 0":
        return "confirmed" if abs(mean) > half else "undecided"
    return "confirmed" if abs(mean) + half < 2 else "refuted" if abs(mean) - half > 2 else "undecided"


def tell(args):
    """A question's table and figure; of all, and the paper's claims."""
    found = by_name(read_runs(args.runs))
    folder = args.runs.parent if args.runs.is_file() else args.runs
    for number in questions() if args.what == "" else [int(args.what)]:
        print(f"\n**{number}. {questions()[number].title}**\n\n{finding(number, found)}\n")
        if number not in TRIALS:
            draw(lambda plt: figures.question(plt, number, found), folder / f"question{number}.png")
    if args.what == "":
        head, rows, text = verdicts(found)
        print(f"{markdown(head, rows)}\n\n{text}")


def keep(args):
    """Adds runs to runs.jsonl, with their evaluations, and those of KERNEL_ROWS to kernels.npz. A run that is there
    stays: its test scores have been used."""
    lines = KEPT.read_text().splitlines(keepends=True)
    there = {json.loads(line)["run"] for line in lines}
    new = [run for run in read_runs(args.runs) if run["run"] not in there]
    for run in new:
        with_losses(run)
    kernels = kernels_to_keep(run for run in new if run["run"].rsplit("-pretrain-s", 1)[0] in KERNEL_ROWS)
    if kernels:
        with np.load(HERE / "kernels.npz") as old:
            kernels |= old
        write(HERE / "kernels.npz", lambda file: np.savez_compressed(file, **kernels))
    lines = sorted([*lines, *map(line_to_keep, new)], key=lambda line: json.loads(line)["run"])
    write(KEPT, lambda file: file.write("".join(lines).encode()))
    print(f"{len(new)} runs added to {len(there)}, which stay as they are")
    page(args)


def with_losses(run):
    """Adds a run's evaluations, each with the mean training loss since the one before."""
    losses = []
    for record in read_log(run["folder"]):
        if record.get("kind") == "train":
            losses.append(record["loss"])
        elif record.get("kind") == "eval":
            run.setdefault("evals", []).append(record | ({"train_loss": statistics.mean(losses)} if losses else {}))
            losses = []


def drawn(number, found):
    """Whether a question has a figure: once most of its arms have runs of its own. The figure leaves out the others."""
    own = of_question(number, found)
    arms = [own.get(f"{row}-{column}") for rows, columns in layout(number) for row in rows for column in columns]
    return number not in TRIALS and sum(map(bool, arms)) > len(arms) / 2


def page(args):
    """What the kept runs say, into results/findings.md, and its figures."""
    found = by_name(read_runs(KEPT))
    path = ROOT / "results" / "findings.md"
    for number in questions():
        replace_block(path, f"question{number}", finding(number, found), args.check)
        if not args.check and drawn(number, found):
            draw(lambda plt: figures.question(plt, number, found), HERE / f"question{number}.png")
    head, rows, text = verdicts(found)
    replace_block(path, "claims", f"{markdown(head, rows)}\n\n{text}", args.check)


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
