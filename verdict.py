"""Your own data, when its runs are done: what costs nothing, each model's ways to its labels, and a verdict in words.

    python analyze.py own runs/own                  a table, a verdict and a figure, of what is finished

The score is accuracy, R2 for regression, and where classes are more unequal than 3:1 balanced accuracy, the mean over
classes of the share that is found: one answer for all would have a high accuracy there. Intervals are compare.py's.
"""
import math
import os
import statistics
from collections import namedtuple
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

import experiments
from compare import (STARTS, by_identity, dots, draw, estimates, gain, half_width, how_sure, markdown, mean_std,
                     provenance, read_runs, replace_block, shown, signed, with_pretraining)
from data import UNEQUAL, UserError
from recipes import settings

MOST = 100                                     # seeds that are worth naming
# share: of the labels; passes: of a run, where --passes or --steps set them, or None.
Key = namedtuple("Key", "task share passes")


class Bed(NamedTuple):
    """What one table shows."""
    lines: dict                                # {model, and what differs from the recipe: {start: {seed: run}}}
    linear: "dict | None"                      # the record of baseline.py
    score: str                                 # R2, accuracy or balanced accuracy
    ratio: float                               # of the commonest class to the rarest

    @property
    def balanced(self):
        return self.score == "balanced accuracy"

    @property
    def r2(self):
        return self.score == "R2"

    @property
    def digits(self):
        return 3 if self.r2 else 1

    @property
    def unit(self):
        return "R2" if self.r2 else "points"

    @property
    def percent(self):
        return "" if self.r2 else " %"


# ---- Reading ---------------------------------------------------------------------------------------------------------

def beds(runs):
    """{Key: Bed}: runs on the same data with the same labels."""
    found, linear = {}, {}
    for runs in by_identity(with_pretraining(runs)).values():
        run = next(iter(runs.values()))
        own = settings(run["changed"]) | ({"joint": run["joint"]} if run.get("joint") not in (None, 1) else {})
        share, start = own.pop("label_fraction", None) or 1, run["start"]
        if start == "baseline":
            linear[run["task"], share] = run
        steps = [own.pop(name, None) for name in ("steps", "pretraining.steps")]
        if start == "spt" and own.pop("freeze", False):
            start = "probe"
        line = ", ".join([run["model"], *([run["objective"]] if run["objective"] != "masked" else []), *(
            f"{name.replace('arch.', '').replace('.', ' ')}={shown(value)}" for name, value in own.items())])
        if start in experiments.WAYS:
            key = Key(run["task"], share, run["passes"] if any(steps) else None)
            found.setdefault(key, {}).setdefault(line, {})[start] = runs
    return {key: measured(lines, linear.get(key[:2])) for key, lines in found.items()}


def runs_of(lines):
    return [run for arms in lines.values() for arm in arms.values() for run in arm.values()]


def measured(lines, linear):
    """-> Bed; where classes are unequal the score of each run becomes its balanced accuracy, if all have it."""
    linear = linear and dict(linear)           # other tables have it, too
    runs = runs_of(lines) + ([linear] if linear else [])
    if "test_r2" in runs[0]:
        return Bed(lines, linear, "R2", 1)
    counts = [run["counts"]["labels"] for run in runs if run.get("counts")]
    there = [n for n in counts[0] if n] if counts else [1]
    ratio = max(there) / min(there)
    if not (ratio > UNEQUAL and len(counts) == len(runs)):
        return Bed(lines, linear, "accuracy", ratio)
    for run in runs:
        run["accuracy"], run["score"] = run["score"], 100 * float(recalls([run])[0].mean())
    return Bed(lines, linear, "balanced accuracy", ratio)


def recalls(runs):
    """Of each class in the test split: the share that is found, mean over runs, and its size: (classes,) both."""
    labels, right = (np.array([run["counts"][name] for run in runs]).mean(0) for name in ("labels", "right"))
    return right[labels > 0] / labels[labels > 0], labels[labels > 0]


def size_error(bed, runs):
    """Standard error of a score from the size of the test set alone, in points; 0 for R2, of which it is not known."""
    if bed.r2:
        return 0.0
    share, n = np.array([statistics.mean(run["test_accuracy"] for run in runs)]), np.array([runs[0]["test_examples"]])
    if bed.balanced:
        share, n = recalls(runs)
    return 100 * math.sqrt((share * (1 - share) / n).sum()) / len(share)


def worth(bed, n):
    """Of one of n test examples, in points: least and most, since balanced accuracy counts a rare class more."""
    sizes = recalls(runs_of(bed.lines)[:1])[1] if bed.balanced else np.array([n])
    return 100 / len(sizes) / sizes.max(), 100 / len(sizes) / sizes.min()


def runs_by_arm(bed):
    """{(line, start): [run]}."""
    return {(line, start): [*arm.values()] for line, arms in bed.lines.items() for start, arm in arms.items()}


def scored(bed):
    """{(line, start): {seed: score}}, and the `estimates` of these."""
    each = {arm: {run["seed"]: run["score"] for run in runs} for arm, runs in runs_by_arm(bed).items()}
    return each, estimates(each)


def called(arm):
    """(line, start) in words."""
    return f"{arm[0]} {STARTS[arm[1]][0]}"


# ---- The verdict -----------------------------------------------------------------------------------------------------

def verdict(bed):
    """What the table means, a sentence a line."""
    each, sure = scored(bed)
    n = runs_of(bed.lines)[0]["test_examples"]
    means = {arm: statistics.mean(scores.values()) for arm, scores in each.items() if arm[1] != "probe"}
    top = math.inf if bed.r2 else max(98, 100 - 200 / n)             # above it there is nothing to gain
    said = []
    if means and min(means.values()) > top:
        said.append(f"**Every way is at the ceiling** ({min(means.values()):.1f} to {max(means.values()):.1f} %): this "
                    "set is too easy to tell them apart.")
    for line, arms in bed.lines.items():
        words = {start: told(bed, each, sure, line, start, top)
                 for start in ("spt", "joint") if {start, "scratch"} <= arms.keys()}
        said += [text for start, text in words.items()
                 if text and (start == "spt" or "cannot be told" not in text or "spt" not in words)]
    if not any("scratch" in arms for arms in bed.lines.values()):
        said.append("Nothing was trained from scratch, so no gain can be told.")
    for arm, runs in runs_by_arm(bed).items():
        if alone := sum(len([*filter(None, run["counts"]["predicted"])]) == 1 for run in runs if run.get("counts")):
            said.append(f"**{called(arm)} predicts one class alone** in {alone} of {len(runs)} seeds.")
    return said + (beside_linear(bed, means, sure) if bed.linear and means else [])


def told(bed, each, sure, line, start, top):
    """What SPT or joint training did to a model, or None where no seed has both. each, sure: as `scored` has them;
    top: from where on is the ceiling."""
    ours, scratch = (line, start), (line, "scratch")
    points, half = gain(each, ours, scratch, sure)
    if not points:
        return None
    runs, by = runs_by_arm(bed), {"spt": "SPT", "joint": "joint training"}[start]
    size = 1.96 * math.hypot(*(size_error(bed, runs[arm]) for arm in (ours, scratch)))
    mean, n, seeds = statistics.mean(points.values()), runs[ours][0]["test_examples"], len(points)
    change, _, interval = signed(points, bed.digits, half).rsplit(" (", 1)[0].partition(" ")
    name = line if start == "spt" else f"{line}, joint training"
    if seeds == 1:
        return f"**{name}: cannot be told** from one seed ({change} {bed.unit})."
    text = f"{' '.join(filter(None, (change, bed.unit, interval)))}, {seeds} seeds"
    if abs(mean) > math.hypot(half, size) and (mean < 0 or not at_ceiling(each[scratch], top)):
        return f"**{line} {'gains' if mean > 0 else 'loses'} by {by}**: {text}."
    return f"**{name}: cannot be told**: {text}; " + (
        "from scratch it is at the ceiling already." if at_ceiling(each[scratch], top) else
        "there is no difference." if not mean else
        f"{n:,} test examples alone move a difference by up to {size:.1f}, so more seeds would not tell."
        if abs(mean) <= size else
        f"if the difference stays, {enough(mean, size, sure[ours].variance + sure[scratch].variance, seeds)} seeds "
        "would tell.")


def at_ceiling(scores, top):
    return statistics.mean(scores.values()) > top


def enough(mean, size, variance, seeds):
    """How many seeds would tell a difference of this mean and variance; size: half of the 95 % interval that the test
    set's size alone leaves."""
    return next((k for k in range(seeds + 1, MOST + 1)
                 if math.hypot(stdtrit(2 * k - 2, 0.975) * math.sqrt(variance / k), size) < abs(mean)),
                f"more than {MOST}")


def beside_linear(bed, means, sure):
    """The networks beside what costs nothing."""
    linear, runs, constant = bed.linear, runs_by_arm(bed), constant_of(bed)
    halves = {arm: math.hypot(1.96 * size_error(bed, runs[arm]), half_width((sure[arm], len(runs[arm]))))
              for arm in means}                                  # of the 95 % interval of a mean
    own = 1.96 * size_error(bed, [linear])

    def beside(arm):
        apart = means[arm] - linear["score"]
        return "level with" if abs(apart) <= math.hypot(own, halves[arm]) else "ahead of" if apart > 0 else "behind"

    def validation(arm):
        return statistics.mean(run.get("val_accuracy", run.get("val_r2")) for run in runs[arm])

    best, said = max(means, key=validation), []
    behind = [called(arm) for arm in means if arm != best and beside(arm) == "behind"]

    def text(score):
        return f"{score:.{bed.digits}f}{bed.percent}"

    if len(behind) == len(means) - 1 and beside(best) == "behind":
        most = max(means, key=means.get)
        said.append(f"**The linear model is ahead of every network**: {text(linear['score'])}, where {called(most)} "
                    f"has {means[most]:.{bed.digits}f}.")
    else:
        said.append(f"Validation {'R2' if bed.r2 else 'accuracy'} chooses {called(best)}; on test it has "
                    f"{text(means[best])} and is **{beside(best)}** the linear model, {text(linear['score'])}."
                    + (f" Also behind that: {', '.join(behind)}." if behind and beside(best) == "behind" else
                       f" Behind the linear model: {', '.join(behind)}." if behind else ""))
    none = [called(arm) for arm in means if all(
        run["score"] <= constant + 1.96 * size_error(bed, [run]) for run in runs[arm])]
    if none:
        said.append(f"Not shown to be better than one answer for all ({text(constant)}): {', '.join(none)}.")
    return said


def constant_of(bed):
    """The score of one answer for all, by baseline.py."""
    if bed.r2:
        return bed.linear["constant_r2"]
    return 100 / len(recalls([bed.linear])[0]) if bed.balanced else 100 * bed.linear["constant_accuracy"]


# ---- Table, caption, figure ------------------------------------------------------------------------------------------

def name_of(key):
    few = f" with {100 * key.share:g} % of the labels" if key.share < 1 else ""
    return Path(key.task.removeprefix("file:")).name + few + (f", {key.passes:,} passes a run" if key.passes else "")


def table(bed):
    """What costs nothing, then a row a model."""
    probes = any("probe" in arms for arms in bed.lines.values())
    starts = experiments.WAYS if probes else experiments.WAYS[:3]
    head = ["model", *(STARTS[start][0] for start in starts), "SPT - scratch [95 % interval] (seeds)",
            "joint - scratch", "SPT - joint", "minutes a run"]
    rows, runs, (each, sure) = [], runs_by_arm(bed), scored(bed)

    def cell(score, accuracy):
        return f"{score} ({statistics.mean(accuracy):.1f})" if bed.balanced else score

    if one := bed.linear:
        nothing = [""] * (len(head) - 3)
        constant = f"{constant_of(bed):.{bed.digits}f}"
        rows += [["*one answer for all*", cell(constant, [100 * one.get("constant_accuracy", 0)]), *nothing, ""],
                 [f"*linear: {one['model']}*", cell(f"{one['score']:.{bed.digits}f}", [one.get("accuracy", 0)]),
                  *nothing, f"{one['seconds']:.0f} s"]]
    for line, arms in bed.lines.items():
        ours = [(line, start) for start in starts]
        minutes = [f"{statistics.mean(run['minutes'] for run in runs[arm]):.1f}" if arm in runs else "–"
                   for arm in ours]
        differences = [gain(each, (line, one), (line, other), sure)
                       for one, other in (("spt", "scratch"), ("joint", "scratch"), ("spt", "joint"))]
        rows.append([line, *(cell(mean_std(each[arm], bed.digits), [run.get("accuracy", 0) for run in runs[arm]])
                             if arm in each else "–" for arm in ours),
                     *(signed(found, bed.digits, half) for found, half in differences), " / ".join(minutes)])
    return markdown(head, rows)


def caption(key, bed):
    """What the scores are and how sure they are; second, where they come from."""
    runs, (each, sure) = runs_of(bed.lines), scored(bed)
    n, passes = runs[0]["test_examples"], {run["passes"] for run in runs}
    equal = "unequal passes" if len(passes) > 1 else f"{passes.pop():,} passes a run"
    some = [run["data"] for run in runs if "labelled" in run.get("data", {})]
    bare = some[0]["sizes"][0] - some[0]["labelled"] if some else 0
    joint = any("joint" in arms for arms in bed.lines.values()) and (key.share < 1 or bare)
    percent, accuracy = "" if bed.r2 else " in percent", "; accuracy in parentheses" if bed.balanced else ""
    text = [f"Test {bed.score}{percent} on {n:,} examples, mean ± standard deviation over seeds{accuracy}."]
    if bed.ratio > UNEQUAL:
        text.append(f"Classes are unequal, {bed.ratio:.0f}:1" + (
            ", so balanced accuracy decides." if bed.balanced else ", and these older runs kept no balanced accuracy."))
    if bed.r2:
        text.append("How far another test set would move R2 is not known.")
    else:
        error = statistics.mean(size_error(bed, [run]) for run in runs)
        deviations = sorted(math.sqrt(estimate.variance) for estimate in sure.values() if estimate.freedom)
        seeds, points = (" to ".join(dict.fromkeys(texts)) for texts in (
            [f"{one:.1f}" for one in deviations[::max(1, len(deviations) - 1)]],
            [f"{one:.2g}" for one in worth(bed, n)]))
        text.append(f"One test example is worth {points} points; another test set of this size would move a score by "
                    f"{error:.1f} (standard error){f', another seed by {seeds}' if seeds else ''}.")
    source = (f"{how_sure(each, sure, bed.digits)} {'Joint training sees the labelled inputs only; ' if joint else ''}"
              f"{f'SPT alone saw {bare:,} more sequences, without a label; ' if bare else ''}{equal}; "
              f"{provenance(runs + [run['first'] for run in runs if run['init']] + [bed.linear] * bool(bed.linear))}.")
    return f"{' '.join(text)}\n\n{source}"


def own(args):
    """Your own data, of what is finished: for each set and share of the labels a table and a verdict; a figure."""
    found = beds(read_runs(args.runs))
    if not found:
        raise UserError(f"no finished finetuning run in {args.runs}; run: bash run_all.sh own --tasks file:PATH")
    blocks = [block for key, bed in found.items() for block in (
        f"**{name_of(key)}**", table(bed), caption(key, bed), "\n".join(f"- {line}" for line in verdict(bed)))]
    print("\n" + "\n\n".join(blocks) + "\n")
    for bed in found.values():
        there = [run for run in runs_of(bed.lines) if (run["folder"] / "best.pt").exists()]
        if there:
            best = max(there, key=lambda run: run.get("val_accuracy", run.get("val_r2")))["folder"]
            print(f"The run that validation prefers labels new sequences: python predict.py {best} --input FILE\n")
    draw(lambda plt: figure(plt, found), args.figure)
    if args.readme:
        picture = os.path.relpath(args.figure, args.readme.parent)
        replace_block(args.readme, "own", "\n\n".join([*blocks, f"![gains of all seeds]({picture})"]))


def figure(plt, found):
    """For each set and share of the labels: scores of all seeds on the left, gains over scratch on the right. Gains
    have one scale for all accuracies, and one for all R2."""
    picture, axes = plt.subplots(len(found), 2, figsize=(9, 1.2 + 1.6 * len(found)), squeeze=False)
    widest = {}
    for (left, right), (key, bed) in zip(axes, found.items()):
        each, sure = scored(bed)
        for y, line in enumerate(bed.lines):
            for height, start in ((y - 0.1, "spt"), (y + 0.1, "joint")):
                points, half = gain(each, (line, start), (line, "scratch"), sure)
                if points:
                    mean = statistics.mean(points.values())
                    right.errorbar(mean, height, xerr=half or None, color=STARTS[start][1], marker="o", capsize=3)
                    widest[bed.r2] = max(widest.get(bed.r2, 0), abs(mean) + half)
        dots(left, {line: {start: [*arm.values()] for start, arm in arms.items()} for line, arms in bed.lines.items()})
        if bed.linear:
            left.axvline(constant_of(bed), color="black", linestyle=":", label="one answer for all")
            left.axvline(bed.linear["score"], color="black", linestyle="--", label="linear model")
        left.set_xlabel(f"test {bed.score}{'' if bed.r2 else ', %'}: seeds and mean")
        if not bed.r2:
            left.set_xlim(right=100)
        right.axvline(0, color="black", linestyle=":")
        right.set_yticks(range(len(bed.lines)), bed.lines)
        right.set(xlabel="gain over scratch, 95 % interval over seeds", ylim=(len(bed.lines) - 0.5, -0.5))
        left.set_title(name_of(key), loc="left")
    for (_, right), bed in zip(axes, found.values()):
        limit = 1.05 * widest.get(bed.r2, 1) or 1
        right.set_xlim(-limit, limit)
    return picture, "What self-pretraining and joint training gain"
