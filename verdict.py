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

import numpy as np
from scipy.special import stdtrit

import experiments
from compare import (STARTS, by_identity, dots, draw, estimates, gain, how_sure, markdown, mean_std, provenance,
                     read_runs, replace_block, shown, signed, with_pretraining)
from data import UserError
from recipes import settings

UNEQUAL = 3                                    # to one: from here on balanced accuracy decides
MOST = 100                                     # seeds that are worth naming
# share: of the labels; passes: of a run, where --passes or --steps set them, or None.
Key = namedtuple("Key", "task share passes")
# lines: {model, and what differs from the recipe: {start: {seed: run}}}; baseline: the record of baseline.py, or None;
# score: what it is called; balanced: whether that is balanced accuracy; ratio: the commonest class to the rarest.
Bed = namedtuple("Bed", "lines baseline score balanced ratio")


# ---- Reading ---------------------------------------------------------------------------------------------------------

def beds(runs):
    """{Key: Bed}: runs on the same data with the same labels."""
    found, baselines = {}, {}
    for runs in by_identity(with_pretraining(runs)).values():
        run = next(iter(runs.values()))
        own = settings(run["changed"]) | ({"joint": run["joint"]} if run.get("joint") not in (None, 1) else {})
        share, start = own.pop("label_fraction", None) or 1, run["start"]
        if start == "baseline":
            baselines[run["task"], share] = run
        steps = [own.pop(name, None) for name in ("steps", "pretraining.steps")]
        if start == "spt" and own.pop("freeze", False):
            start = "probe"
        line = ", ".join([run["model"], *([run["objective"]] if run["objective"] != "masked" else []), *(
            f"{name.replace('arch.', '').replace('.', ' ')}={shown(value)}" for name, value in own.items())])
        if start in experiments.WAYS:
            key = Key(run["task"], share, run["passes"] if any(steps) else None)
            found.setdefault(key, {}).setdefault(line, {})[start] = runs
    return {key: measured(lines, baselines.get(key[:2])) for key, lines in found.items()}


def runs_of(lines):
    return [run for arms in lines.values() for arm in arms.values() for run in arm.values()]


def measured(lines, baseline):
    """-> Bed; where classes are unequal the score of each run becomes its balanced accuracy, if all have it."""
    runs = runs_of(lines) + ([baseline] if baseline else [])
    if "test_r2" in runs[0]:
        return Bed(lines, baseline, "R2", False, 1)
    counts = [run["counts"]["labels"] for run in runs if run.get("counts")]
    there = [n for n in counts[0] if n] if counts else [1]
    ratio = max(there) / min(there)
    balanced = ratio > UNEQUAL and len(counts) == len(runs)
    if balanced:
        for run in runs:
            run["accuracy"], run["score"] = run["score"], 100 * float(recalls([run])[0].mean())
    return Bed(lines, baseline, "balanced accuracy" if balanced else "accuracy", balanced, ratio)


def recalls(runs):
    """Of each class in the test split: the share that is found, mean over runs, and its size: (classes,) both."""
    labels, right = (np.array([run["counts"][name] for run in runs]).mean(0) for name in ("labels", "right"))
    return right[labels > 0] / labels[labels > 0], labels[labels > 0]


def size_error(bed, runs):
    """Standard error of a score from the size of the test set alone, in points; 0 for R2, of which it is not known."""
    if bed.score == "R2":
        return 0.0
    share, n = np.array([statistics.mean(run["test_accuracy"] for run in runs)]), np.array([runs[0]["test_examples"]])
    if bed.balanced:
        share, n = recalls(runs)
    return 100 * math.sqrt((share * (1 - share) / n).sum()) / len(share)


def worth(bed, n):
    """Of one of n test examples, in points: least and most, since balanced accuracy counts a rare class more."""
    sizes = recalls(runs_of(bed.lines)[:1])[1] if bed.balanced else np.array([n])
    return 100 / len(sizes) / sizes.max(), 100 / len(sizes) / sizes.min()


def arms_of(bed):
    """{line and start: [run]}, {line and start: {seed: score}}, and the `estimates` of these."""
    runs = {f"{line} {STARTS[start][0]}": [*arm.values()]
            for line, arms in bed.lines.items() for start, arm in arms.items()}
    each = {name: {run["seed"]: run["score"] for run in arm} for name, arm in runs.items()}
    return runs, each, estimates(each)


def gain_of(line, start, each, sure):
    """{seed: difference to training from scratch}, half its interval."""
    return gain(each, f"{line} {STARTS[start][0]}", f"{line} {STARTS['scratch'][0]}", sure)


# ---- The verdict -----------------------------------------------------------------------------------------------------

def verdict(bed):
    """What the table means, a sentence a line."""
    runs, each, sure = arms_of(bed)
    unit = "R2" if bed.score == "R2" else "points"
    means = {name: statistics.mean(arm.values()) for name, arm in each.items()}
    errors = {name: size_error(bed, arm) for name, arm in runs.items()}
    n, said = next(iter(runs.values()))[0]["test_examples"], []
    top = 100 - max(1, 200 / n) if unit == "points" else math.inf      # above it there is nothing to gain
    if min(means.values()) > top:
        said.append(f"**Every way is at the ceiling** ({min(means.values()):.1f} to {max(means.values()):.1f} %): this "
                    "set is too easy to tell them apart.")
    for line, arms in bed.lines.items():
        if {"scratch", "spt"} <= arms.keys() and (found := gain_of(line, "spt", each, sure))[0]:
            before, after = (f"{line} {STARTS[start][0]}" for start in ("scratch", "spt"))
            said.append(told(line, *found, unit, 1.96 * math.hypot(errors[before], errors[after]), n, worth(bed, n)[0],
                             None if means[before] > top else sure[before].variance + sure[after].variance))
    alone = {name: sum(len([*filter(None, run["counts"]["predicted"])]) == 1 for run in arm)
             for name, arm in runs.items() if all(run.get("counts") for run in arm)}
    said += [f"**{name} predicts one class alone** in {k} of {len(runs[name])} seeds."
             for name, k in alone.items() if k]
    if bed.baseline:
        said += beside_baseline(bed, runs, means, errors, [name for name, k in alone.items() if k == len(runs[name])])
    return said


def told(line, points, half, unit, size, n, least, variance):
    """Of one model, what SPT did. size: half of the 95 % interval that n test examples alone would have, at most;
    least: what one of them is worth; variance: of a difference of two seeds, None where scratch is at the ceiling."""
    mean, digits = statistics.mean(points.values()), 3 if unit == "R2" else 1
    text = signed(points, digits, half).rsplit(" (", 1)[0].replace(" [", f" {unit} [")
    text += "" if "[" in text else f" {unit}"
    if len(points) == 1:
        return f"**{line}: cannot be told** from one seed ({text})."
    if abs(mean) > half:
        word = "gains" if mean > 0 else "loses"
        sure = "" if abs(mean) > math.hypot(half, size) else (
            f"; the error of {n:,} test examples, up to {size:.1f}, would take the interval to 0")
        return f"**{line} {word} by SPT**: {text}, {len(points)} seeds{sure}."
    if variance is None:
        return f"**{line}: cannot be told**: {text}, and from scratch it is at the ceiling already."
    needed = next((k for k in range(len(points) + 1, MOST + 1)
                   if stdtrit(2 * k - 2, 0.975) * math.sqrt(variance / k) < abs(mean)), None)
    few = unit == "points" and abs(mean) < least
    return f"**{line}: cannot be told**: {text}, {len(points)} seeds; " + (
        "that is less than one test example." if few else
        f"if the difference stays, {needed or f'more than {MOST}'} seeds would tell.")


def beside_baseline(bed, runs, means, errors, known):
    """The networks beside what costs nothing. known: arms of which it is said already that they learned nothing."""
    means = {name: mean for name, mean in means.items() if not name.endswith(STARTS["probe"][0])} or means
    digits, percent = (3, "") if bed.score == "R2" else (1, " %")
    linear, error = bed.baseline["score"], size_error(bed, [bed.baseline])

    def validation(name):
        return statistics.mean(run.get("val_accuracy", run.get("val_r2")) for run in runs[name])

    def beside(name):
        apart = means[name] - linear
        return "level with" if abs(apart) <= 1.96 * math.hypot(error, errors[name]) else (
            "ahead of" if apart > 0 else "behind")

    best = max(means, key=validation)
    behind = [name for name in means if beside(name) == "behind"]
    text = f"the linear model, {linear:.{digits}f}{percent}"
    if len(behind) == len(means):
        most = max(means, key=means.get)
        yield (f"**The linear model is ahead of every network**: {linear:.{digits}f}{percent}, where {most} has "
               f"{means[most]:.{digits}f}.")
    else:
        yield (f"Validation prefers {best}, {means[best]:.{digits}f}{percent}: **{beside(best)}** {text}"
               + (f", which is ahead of {', '.join(behind)}." if behind else "."))
    constant = constant_of(bed)
    none = [name for name in means if name not in known and means[name] <= constant + 1.96 * errors[name]]
    if none:
        yield f"No better than one answer for all ({constant:.{digits}f}{percent}): {', '.join(none)}."


def constant_of(bed):
    """The score of one answer for all, by baseline.py."""
    if bed.score == "R2":
        return bed.baseline["constant_r2"]
    return 100 / len(recalls([bed.baseline])[0]) if bed.balanced else 100 * bed.baseline["constant_accuracy"]


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
    digits, rows, (runs, each, sure) = 3 if bed.score == "R2" else 1, [], arms_of(bed)

    def cell(score, accuracy):
        return f"{score} ({statistics.mean(accuracy):.1f})" if bed.balanced else score

    if one := bed.baseline:
        nothing = [""] * (len(head) - 3)
        constant = f"{constant_of(bed):.{digits}f}"
        rows += [["*one answer for all*", cell(constant, [100 * one.get("constant_accuracy", 0)]), *nothing, ""],
                 [f"*linear: {one['model']}*", cell(f"{one['score']:.{digits}f}", [one.get("accuracy", 0)]), *nothing,
                  f"{one['minutes']:.1f}"]]
    for line, arms in bed.lines.items():
        names = {start: f"{line} {STARTS[start][0]}" for start in starts}
        minutes = [f"{statistics.mean(run['minutes'] for run in runs[name]):.1f}" if name in runs else "–"
                   for name in names.values()]
        differences = [gain(each, names[one], names[other], sure)
                       for one, other in (("spt", "scratch"), ("joint", "scratch"), ("spt", "joint"))]
        rows.append([line, *(cell(mean_std(each[name], digits), [run.get("accuracy", 0) for run in runs[name]])
                             if name in each else "–" for name in names.values()),
                     *(signed(found, digits, half) for found, half in differences), " / ".join(minutes)])
    return markdown(head, rows)


def caption(key, bed):
    runs, (_, each, sure) = runs_of(bed.lines), arms_of(bed)
    digits, n, passes = 3 if bed.score == "R2" else 1, runs[0]["test_examples"], {run["passes"] for run in runs}
    equal = "unequal passes" if len(passes) > 1 else f"{passes.pop():,} passes a run"
    some = [run["data"] for run in runs if "labelled" in run.get("data", {})]
    bare = some[0]["sizes"][0] - some[0]["labelled"] if some else 0
    percent, accuracy = "" if bed.score == "R2" else " in percent", "; accuracy in parentheses" if bed.balanced else ""
    text = [f"Test {bed.score}{percent} on {n:,} examples, mean ± standard deviation over seeds{accuracy}."]
    if bed.ratio > UNEQUAL:
        text.append(f"Classes are unequal, {bed.ratio:.0f}:1" + (
            ", so balanced accuracy decides." if bed.balanced else ", and these older runs kept no balanced accuracy."))
    if bed.score != "R2":
        error = statistics.mean(size_error(bed, [run]) for run in runs)
        common = [estimate for estimate in sure.values() if estimate.freedom]
        seeds = math.sqrt(statistics.mean(estimate.variance for estimate in common)) if common else None
        another = "" if seeds is None else f", another seed by {seeds:.1f}"
        points = " to ".join(dict.fromkeys(f"{one:.2g}" for one in worth(bed, n)))
        text.append(f"One test example is worth {points} points; another test set of this size would move a score by "
                    f"{error:.1f} (standard error){another}.")
    text.append(how_sure(each, sure, digits))
    text.append(f"{'Joint training sees the labelled inputs only; ' if key.share < 1 or bare else ''}"
                f"{f'SPT alone saw {bare:,} more sequences, without a label; ' if bare else ''}{equal}; "
                f"{provenance(runs + [run['first'] for run in runs if run['init']])}.")
    return " ".join(text)


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
            print(f"The best run by validation labels new sequences: python predict.py {best} --input FILE\n")
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
        _, each, sure = arms_of(bed)
        for y, line in enumerate(bed.lines):
            for height, start in ((y - 0.1, "spt"), (y + 0.1, "joint")):
                points, half = gain_of(line, start, each, sure)
                if points:
                    mean = statistics.mean(points.values())
                    right.errorbar(mean, height, xerr=half or None, color=STARTS[start][1], marker="o", capsize=3)
                    widest[bed.score == "R2"] = max(widest.get(bed.score == "R2", 0), abs(mean) + half)
        dots(left, {line: {start: [*arm.values()] for start, arm in arms.items()} for line, arms in bed.lines.items()})
        if bed.baseline:
            left.axvline(constant_of(bed), color="black", linestyle=":", label="one answer for all")
            left.axvline(bed.baseline["score"], color="black", linestyle="--", label="linear model")
        left.set_xlabel(f"test {'R2' if bed.score == 'R2' else f'{bed.score}, %'}: seeds and mean")
        if bed.score != "R2":
            left.set_xlim(right=100)
        right.axvline(0, color="black", linestyle=":")
        right.set_yticks(range(len(bed.lines)), bed.lines)
        right.set(xlabel="gain over scratch, 95 % interval", ylim=(len(bed.lines) - 0.5, -0.5))
        left.set_title(name_of(key), loc="left")
    for (_, right), bed in zip(axes, found.values()):
        limit = 1.05 * widest.get(bed.score == "R2", 1) or 1
        right.set_xlim(-limit, limit)
    return picture, "What self-pretraining and joint training gain"
