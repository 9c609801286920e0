"""results/findings.md: where SPT pays. Every pair of runs that is kept, as one figure and a few numbers.

    python results/findings/lag.py              lag.png beside this file, and the numbers into results/findings.md
    python results/findings/lag.py --check      writes nothing; an error where the numbers there are stale
    python results/findings/lag.py commonest TASK... --data-dir DIR      what SHARE and VARIANCE have of these tasks

A dot is a model on a bed, from scratch and after SPT at equal passes, with all labels and data, the default masked
objective and at least two seeds.
    lag     how far its mean from scratch is below the best mean from scratch of the bed's dots, in points
    skill   of denoising: 0 is always the commonest symbol, or the mean sample, and 1 is everything right
    gain    SPT minus scratch over paired seeds, in points, with its 95 % interval, which holds the test set's error
Models, sizes and pooling make further dots; rates, evaluations and lengths do not. Of these the runs of the bed's own
length count, which is what lag compares; then those with most seeds, then the shortest, then what validation chooses.
So question 0's trials, with one seed, are out, and the other lengths of questions 3 and 5. Questions 10 and 11 are out:
with many shares and rates SPT would be the best of many, scratch of few. Out are as
well: a share of labels or data, numbers as labels, seeds from 100, a bed with one model, and what has no run from
scratch beside it (other things hidden, parts taken over).
Most of the mini preset pretrains on top of the steps from scratch. Those pairs are no dots; the last rows of both
tables have them. Its table 8 has equal budgets: four dots.
"""
import argparse
import re
import signal
import statistics
import sys
from collections import defaultdict, namedtuple
from pathlib import Path

import numpy as np
import torch
from scipy.stats import rankdata

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

from arms import of_test, wider
from compare import (by_identity, draw, half_width_of, markdown, minus, read_runs, replace_block, scores,
                     with_pretraining)
from data import Parser, UserError, open_task
from kernels import inside

SOURCES = "findings/runs.jsonl", "architectures.jsonl", "mamba.jsonl", "mini/runs.jsonl", "own.jsonl", "baseline.jsonl"
# Of the validation split, by `commonest`: the share of its commonest symbol where symbols or gray levels are predicted;
# the variance of its samples where these are, whose score is minus the squared error.
SHARE = {"text_demo": 0.1773, "text256": 0.1772, "text_mini": 0.1773, "listops_mini": 0.2190,
         "pathfinder_demo": 0.8362, "pathfinder_mini": 0.8182, "pathx_mini": 0.8362}
VARIANCE = {"image_mini": 0.8664, "scifar_mini": 0.9128, "file:speech.npz": 0.9635, "ucr:FordA": 1.0000,
            "ucr:ElectricDevices": 1.0000}
NO_DOT = "lr", "eval_every", "steps"                           # settings that make no further dot
GROUPS = {"film reviews": ("text", "o"), "Pathfinder": ("path", "s"), "others": ("", "^")}   # tasks begin so; marker
Dot = namedtuple("Dot", "task model setting seeds lag skill gain half")


# ---- Which runs ------------------------------------------------------------------------------------------------------

def counts(run):
    """Whether a run may be part of a dot. Where pretraining has more examples, some have no label."""
    return (run["start"] in ("scratch", "spt") and run["objective"] == "masked" and run["seed"] < 100
            and "test_r2" not in run and not re.search(r"-b[\d.]+-", run["run"])
            and run.get("train_fraction") is None and run.get("label_fraction") is None
            and run["train_examples"] == run["first"].get("train_examples", run["train_examples"]))


def pairs(runs, on_top=False):
    """{(task, model, setting): ({seed: run} from scratch, the same after SPT)}. on_top: with equal steps on the labels
    in place of equal passes, of the mini preset alone."""
    arms, found = defaultdict(list), defaultdict(list)
    for (task, model, _, start, words), seeds in by_identity(filter(counts, with_pretraining(runs))).items():
        setting = dict((name.removeprefix("pretraining."), value) for name, value in words)
        if not on_top or task.endswith("_mini") and "steps" not in setting:
            word = " ".join(f"{name}={value}" for name, value in sorted(setting.items()) if name not in NO_DOT)
            length = {run["steps" if on_top else "passes"] for run in seeds.values()}
            arms[task, model, word, *length, start].append(seeds)
    for (*what, length, start), before in arms.items():
        after = arms.get((*what, length, "spt"))
        if start == "scratch" and after:
            pair = [max(some, key=lambda seeds: (len(seeds), validation(seeds))) for some in (before, after)]
            if len(pair[0].keys() & pair[1].keys()) > 1:
                other_length = "steps" in next(iter(pair[0].values()))["changed"]
                found[tuple(what)].append((other_length, -len(pair[0]) - len(pair[1]), length, pair))
    return {what: min(some, key=lambda each: each[:3])[3] for what, some in found.items()}


def validation(seeds):
    return statistics.mean(run["val_accuracy"] for run in seeds.values())


def dots_of(pairs):
    """[Dot] of the beds that have two models or more, in the order of their lag."""
    dots, beds = [], defaultdict(dict)
    for what, pair in pairs.items():
        beds[what[0]][what] = [scores(arm) for arm in pair]
    best = best_of(pairs)
    for task, arms in beds.items():
        for what, (before, after) in arms.items() if len(arms) > 1 else ():
            gains = [*minus(after, before).values()]
            able = statistics.mean(skill(task, run["first"]["val_score"]) for run in pairs[what][1].values())
            half = half_width_of(gains)
            if all("test_examples" in run for arm in pairs[what] for run in arm.values()):
                half = wider(half, of_test(*pairs[what]))
            dots.append(Dot(*what, len(gains), best[task] - statistics.mean(before.values()), able,
                            statistics.mean(gains), half))
    return sorted(dots, key=lambda dot: dot.lag)


def best_of(pairs):
    """{task: the best mean from scratch}."""
    best = defaultdict(float)
    for (task, *_), (before, _) in pairs.items():
        best[task] = max(best[task], statistics.mean(scores(before).values()))
    return best


def linear_models(runs, dots, best):
    """Of the beds of dots that have a linear model (baseline.py): how far it lags, in points; less than 0: it leads."""
    there = {dot.task for dot in dots}
    found = {run["task"]: best[run["task"]] - run["score"] for run in runs
             if run.get("start") == "baseline" and "constant_accuracy" in run and not run["changed"]}
    return [lag for task, lag in found.items() if task in there]


def skill(task, score):
    """Of denoising, by a pretraining's val_score."""
    if task in VARIANCE:
        return 1 + score / VARIANCE[task]
    if task not in SHARE:
        raise UserError(f"lag.py has no number of {task}: put what `lag.py commonest {task}` prints into its tables")
    return (score - SHARE[task]) / (1 - SHARE[task])


def commonest(name, data_dir):
    """(share of the commonest symbol or None, variance of the normalised samples or None) of a validation split."""
    _, _, val, _ = open_task(name, data_dir)
    parts = [val.batch(range(i, min(i + 256, len(val)))) for i in range(0, len(val), 256)]
    found = []
    for view in ("symbols", "samples"):
        kept = [x if batch.lengths is None else x[inside(batch.lengths, x.shape[1])].unsqueeze(0)          # no padding
                for batch in parts if (x := getattr(batch, view)) is not None]
        found.append(torch.cat([x.flatten(0, 1) for x in kept]) if kept else None)
    symbols, samples = found
    return (None if symbols is None else float(torch.bincount(symbols).max() / len(symbols)),
            None if samples is None else float(samples.var(0, correction=0).mean()))


# ---- Numbers ---------------------------------------------------------------------------------------------------------

def group_of(dot):
    return next(name for name, (begin, _) in GROUPS.items() if dot.task.startswith(begin))


def column(dots, field):
    return np.array([getattr(dot, field) for dot in dots])


def told(dots):
    """Which gains are told from 0."""
    return np.abs(column(dots, "gain")) > column(dots, "half")


def ranks_agree(x, y):
    """Spearman's rank correlation."""
    return np.corrcoef(rankdata(x), rankdata(y))[0, 1]


# What least squares predict a gain from.
FORMS = {"always the mean": lambda lag, skill: [],
         "lag, skill": lambda lag, skill: [lag, skill],
         "lag, skill, lag x skill": lambda lag, skill: [lag, skill, lag * skill],
         "lag x skill": lambda lag, skill: [lag * skill]}


def predicted(fitted, dots, form):
    """The gains of `dots`, by least squares over `fitted`."""
    one, other = (np.stack([np.ones(len(some)), *form(column(some, "lag"), column(some, "skill"))], -1)
                  for some in (fitted, dots))                                                  # (dots, 1 to 4)
    return other @ np.linalg.lstsq(one, column(fitted, "gain"), rcond=None)[0]


def groups_of(dots):
    return {name: [dot for dot in dots if group_of(dot) == name] for name in GROUPS}


def text_of(dots, on_top):
    """The numbers in Markdown: how many dots, and their rank correlations with the gain."""
    above, below = ([dot for dot in dots if sign * dot.gain > dot.half] for sign in (1, -1))
    span = [f"lag {min(lag):.1f} to {max(lag):.1f}, skill {min(able):.2f} to {max(able):.2f}" if some else "none"
            for some in (above, below) for lag, able in [(column(some, "lag"), column(some, "skill"))]]
    seeds = [dot.seeds for dot in dots]
    text = (f"{len(dots)} dots of {len({dot.task for dot in dots})} beds, {min(seeds)} to {max(seeds)} seeds each, "
            f"{seeds.count(3)} of them 3. {len(above) + len(below)} gains are told from 0: {len(above)} above "
            f"({span[0]}), {len(below)} below ({span[1]}).")
    rows = []
    for name, some in {"all": dots, **groups_of(dots), "mini, pretraining on top": on_top}.items():
        lag, able, gains = (column(some, field) for field in ("lag", "skill", "gain"))
        rows.append([name, str(len(some)), f"{sum(told(some) & (gains > 0))} / {sum(told(some) & (gains < 0))}",
                     *(f"{ranks_agree(x, gains):+.2f}" for x in (lag, able, lag * able))])
    head = ["rank correlation with the gain", "dots", "told from 0: above / below", "lag", "skill", "lag x skill"]
    return "\n\n".join([text, markdown(head, rows), forecasts(dots, on_top)])


def forecasts(dots, on_top):
    """How well gains are predicted on beds to which nothing was fitted, as a table in Markdown."""
    reviews, path, _ = groups_of(dots).values()
    each = [([dot for dot in dots if dot.task != task], [dot for dot in dots if dot.task == task])
            for task in dict.fromkeys(dot.task for dot in dots)]
    tests = {"film reviews -> Pathfinder": [(reviews, path)], "Pathfinder -> film reviews": [(path, reviews)],
             "all beds but one -> that one": each, "all -> mini, pretraining on top": [(dots, on_top)]}
    rows = []
    for name, folds in tests.items():
        some = [dot for _, test in folds for dot in test]
        gains, sure = column(some, "gain"), told(some)
        rows.append([name])
        for form in FORMS.values():
            guess = np.concatenate([predicted(fitted, test, form) for fitted, test in folds])
            right = guess * gains > 0
            rows[-1].append(f"{sum(right)} of {len(some)} ({sum(right & sure)} of {sum(sure)}), "
                            f"{np.abs(guess - gains).mean():.1f}")
    return markdown(["fitted on -> tested on: right signs (of gains told from 0), mean error in points", *FORMS], rows)


# ---- Figure ----------------------------------------------------------------------------------------------------------

# {dot: what to call it, how far right of it and above, in points of text, and which end of the name is there}
NAMES = {("pathfinder_demo", "transformer", ""): ("Transformer, Pathfinder", -8, 0, "right"),
         ("pathfinder_demo", "transformer", "pool=max"): ("Transformer with max pooling", 14, 26, "left"),
         ("pathfinder_demo", "s4", ""): ("S4 and its kind, Pathfinder", 8, -7, "left"),
         ("text256", "rotary", ""): ("rotary, reviews", 8, 3, "left")}


def figure_of(plt, dots, linear):
    """A dot a pair, its interval, and names for a few. linear: lags of linear models, which have no gain."""
    figure, axis = plt.subplots(figsize=(7, 4.5))
    axis.axhline(0, color="0.3", zorder=2)
    for name, some in groups_of(dots).items():
        marker = GROUPS[name][1]
        lag, gains, half, able = (column(some, field) for field in ("lag", "gain", "half", "skill"))
        axis.errorbar(lag, gains, half, fmt="none", ecolor="0.87", elinewidth=0.8, zorder=1)
        drawn = axis.scatter(lag, gains, 30, able, marker=marker, cmap="viridis", vmin=0, vmax=1, edgecolors="0.2",
                             linewidths=0.4, zorder=3)
        axis.scatter([], [], 30, "0.6", marker=marker, label=f"{name} ({len(some)})")
    for dot in dots:
        if dot[:3] in NAMES:
            name, right, up, side = NAMES[dot[:3]]
            axis.annotate(name, (dot.lag, dot.gain), (right, up), textcoords="offset points", ha=side, va="center",
                          arrowprops=dict(arrowstyle="-", color="0.6", linewidth=0.6, shrinkA=0))
    seeds = [dot.seeds for dot in dots]
    axis.text(0.98, 0.02, f"{len(dots)} models on {len({dot.task for dot in dots})} tasks, {min(seeds)} to "
              f"{max(seeds)} seeds each, mostly {statistics.mode(seeds)}; bars: 95 %", transform=axis.transAxes, ha="right")
    bottom = axis.get_ylim()[0] - 2                            # room for that
    axis.set_ylim(bottom=bottom)
    axis.scatter(linear, [bottom] * len(linear), 40, "black", marker="x", linewidths=1.5, zorder=4, clip_on=False,
                 label=f"linear model ({len(linear)} tasks)")
    axis.annotate("linear models,\nreviews", (min(linear), bottom), (-4, 8), textcoords="offset points")
    figure.colorbar(drawn, pad=0.02).set_label("predicts hidden symbols:\n"
                                               "0 = no better than always the commonest, 1 = all")
    axis.set(xlabel="points behind the best model from scratch", ylabel="points that SPT gains")
    axis.spines[["top", "right"]].set_visible(False)
    return figure, "SPT pays on reviews where a model can denoise, on Pathfinder where it lags"


def main(argv=None):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", metavar="WHAT", help="nothing, or commonest and tasks")
    parser.add_argument("--check", action="store_true", help="write nothing; an error where the page is stale")
    parser.add_argument("--data-dir", default="data", help="commonest: where prepared data sets live")
    args = parser.parse_args(argv)
    try:
        if args.what:
            if args.what[0] != "commonest":
                raise UserError(f"{args.what[0]}: there is commonest")
            for name in args.what[1:]:
                share, variance = commonest(name, args.data_dir)
                print(f"{name}: share {share}, variance {variance}")
            return 0
        runs = [run for source in SOURCES for run in read_runs(ROOT / "results" / source)]
        some = pairs(runs)
        dots = dots_of(some)
        if not args.check:
            draw(lambda plt: figure_of(plt, dots, linear_models(runs, dots, best_of(some))), HERE / "lag.png")
        replace_block(ROOT / "results" / "findings.md", "lag", text_of(dots, dots_of(pairs(runs, on_top=True))),
                      args.check)
    except (UserError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    for quiet in (signal.SIGPIPE, signal.SIGINT):              # lag.py | head, Ctrl-C: no traceback
        signal.signal(quiet, signal.SIG_DFL)
    sys.exit(main())
