"""The report on your data and the demos: baselines, each model with each start, and a verdict in
words.

    python analyze.py own runs/own                  a table, a verdict and a figure of all finished runs

The score is accuracy, R2 for regression, or micro F1 for several labels. If classes are more
unequal than 3:1, it is balanced accuracy (the mean over classes of their recall), because always
predicting the majority class would have a high accuracy."""

import math
import os
import statistics
from collections import namedtuple
from pathlib import Path
from typing import NamedTuple

import numpy as np

from compare.drawing import LOOKS, dots, draw, markdown, replace_block, wrapped
from compare.reading import (
    evaluations,
    examples,
    identity,
    kind_of,
    provenance,
    read_runs,
    scores,
    units,
    validation,
    validation_field,
    variants_of,
    with_pretraining,
)
from compare.settings import shown
from compare.statistics import (
    gain,
    half_width,
    half_width_of_test,
    how_sure,
    mean_std,
    signed,
    t_interval,
)
from engine.targets import KINDS, UNEQUAL
from experiments import entries
from experiments.commands import record, trained
from files import UserError
from models import MODELS
from tasks import declared

# share of the labels; passes per run if --passes or --steps set them, else None.
Key = namedtuple("Key", "task share passes")


class Comparison(NamedTuple):
    """The content of one table: variants on the same data with the same labels."""

    lines: dict  # {model with what differs from the recipe: {start: {seed: run}}}
    linear: "dict | None"  # the record of baseline.py, if it was run
    score: str  # R2, accuracy, balanced accuracy, micro F1 ...
    ratio: float  # of the largest class to the smallest
    r2: bool  # whether the score is R2
    digits: int  # of printed scores
    unit: str  # of printed differences


# ---- Reading -------------------------------------------------------------------------------------


def comparisons(runs, entry=()):
    """Arrange runs -> {Key: Comparison}. entry: rows whose variants are named by model and word
    only, without what differs from the recipe."""
    rows = [(record(run), row.model) for row in entry for run in trained(row)]
    called, renamed = (
        {identity(run): name for run, name in rows},
        {name for run, name in rows if run["changed"]},
    )
    found, linear = {}, {}
    for variant in variants_of(with_pretraining(runs)):
        start, run = variant.start, next(iter(variant.runs.values()))
        own = {name: value for name, value in variant.own.items() if (name, value) != ("joint", 1)}
        share = own.pop("label_fraction", None) or 1
        if start == "baseline":
            linear[run["task"], share] = run
        steps = [own.pop(name, None) for name in ("steps", "pretraining.steps")]
        if start == "spt" and own.pop("freeze", False):
            start = "linear_probe"
        words = (
            (name.replace("arch.", "").replace(".", " "), value) for name, value in own.items()
        )
        line = ", ".join(
            [
                run["model"],
                *([run["objective"]] if run["objective"] != "masked" else []),
                *(
                    name.replace("_", " ") if value is True else f"{name}={shown(value)}"
                    for name, value in words
                ),
            ]
        )
        if start in entries.STARTS:
            key = Key(run["task"], share, run["passes"] if any(steps) else None)
            line += ", recipe" * (line in renamed)  # the entry has a variant of this name
            found.setdefault(key, {}).setdefault(called.get(identity(run), line), {})[start] = (
                variant.runs
            )
    order = [*called.values()]
    for key, lines in found.items():  # first in the entry's order, then the others
        names = sorted(lines, key=lambda line: order.index(line) if line in order else len(order))
        found[key] = measured({line: lines[line] for line in names}, linear.get(key[:2]))
    return found


def runs_of(lines):
    return [run for starts in lines.values() for seeds in starts.values() for run in seeds.values()]


def measured(lines, linear):
    """Return a Comparison. If classes are unequal, scores become balanced accuracies, if all runs
    have them."""
    linear = linear and dict(linear)  # a copy, because other tables have it, too
    runs = runs_of(lines) + ([linear] if linear else [])
    title = KINDS[kind_of(runs[0])].title
    counts = [run["counts"]["labels"] for run in runs if run.get("counts")]
    for run in runs:
        if declared(run["task"]).own and run.get("counts"):
            run["macro F1"] = macro_f1(run["counts"])
        elif "test_macro_f1" in run:
            run["macro F1"] = 100 * run["test_macro_f1"]
    there = [n for n in counts[0] if n] if counts else [1]
    ratio = max(there) / min(there)
    if ratio > UNEQUAL and len(counts) == len(runs):
        title = "balanced accuracy"
        for run in runs:
            run["accuracy"], run["score"], run["balanced"] = (
                run["score"],
                100 * float(recalls(run).mean()),
                True,
            )
    r2 = title == "R2"
    return Comparison(
        lines, linear, title, ratio, r2, digits=3 if r2 else 1, unit="R2" if r2 else "points"
    )


def recalls(run):
    """Return the recall of each class in the test split: (classes,)."""
    labels, right = (np.array(run["counts"][name]) for name in ("labels", "right"))
    return right[labels > 0] / labels[labels > 0]


def macro_f1(counts):
    """Return the mean over classes of F1, the harmonic mean of recall and precision, in percent."""
    labels, predicted, right = (np.array(counts[name]) for name in ("labels", "predicted", "right"))
    return 100 * float(np.mean((2 * right / np.maximum(labels + predicted, 1))[labels > 0]))


def runs_by_variant(compared):
    """Return {(line, start): {seed: run}}."""
    return {
        (line, start): seeds
        for line, starts in compared.lines.items()
        for start, seeds in starts.items()
    }


def called(variant):
    """Return (line, start) in words."""
    return f"{variant[0]} {LOOKS[variant[1]][0]}"


# ---- The verdict ---------------------------------------------------------------------------------


def verdict(compared):
    """Return what the table shows, one sentence per line."""
    n, said = runs_of(compared.lines)[0]["test_examples"], []
    means = {
        variant: statistics.mean(scores(seeds).values())
        for variant, seeds in runs_by_variant(compared).items()
        if variant[1] != "linear_probe"
    }
    top = math.inf if compared.r2 else max(98, 100 - 200 / n)  # above it there is nothing to gain
    if means and min(means.values()) > top:
        said.append(
            f"**Everything is at the ceiling** ({min(means.values()):.1f} to "
            f"{max(means.values()):.1f} %): "
            "this set is too easy to compare models."
        )
    for line, starts in compared.lines.items():
        words = {
            start: outcome(compared, line, start, top)
            for start in ("spt", "joint")
            if {start, "scratch"} <= starts.keys()
        }
        said += [
            text
            for start, text in words.items()
            if text and (start == "spt" or "by joint" in text or "spt" not in words)
        ]
    for variant, seeds in runs_by_variant(compared).items():
        classes = [
            [*filter(None, run["counts"]["predicted"])]
            for run in seeds.values()
            if run.get("counts")
        ]
        if single := sum(len(one) == 1 for one in classes):
            said.append(
                f"**{called(variant)} predicts only one class** in {single} of {len(seeds)} seeds."
            )
    said += beside_linear(compared, means) if compared.linear and means else []
    return said + denoised(compared) + unfinished(compared)


def outcome(compared, line, start, top):
    """Return what SPT or joint training changed for a model; None if no seed has both. top: the
    score above which a model is at the ceiling."""
    ours, scratch = compared.lines[line][start], compared.lines[line]["scratch"]
    found, by = gain(ours, scratch), {"spt": "SPT", "joint": "joint training"}[start]
    if not found.points:
        return None
    mean, seeds = statistics.mean(found.points.values()), len(found.points)
    n = runs_of(compared.lines)[0]["test_examples"]
    change, _, interval = (
        signed(found.points, compared.digits, found.half).rsplit(" (", 1)[0].partition(" ")
    )
    name = line if start == "spt" else f"{line}, joint training"
    ceiling = statistics.mean(scores(scratch).values()) > top
    if seeds == 1 or None in map(examples, [*ours.values(), *scratch.values()]):
        why = "one seed" if seeds == 1 else "predictions were not kept"
        return f"**{name}: {why}** ({change} {compared.unit}), so significance is unknown."
    text = f"{' '.join(filter(None, (change, compared.unit, interval)))}, {seeds} seeds"
    if 0 < found.half < abs(mean) and (mean < 0 or not ceiling):
        return f"**{line} {'gains' if mean > 0 else 'loses'} by {by}**: {text}."
    variances = [statistics.variance(scores(runs).values()) for runs in (ours, scratch)]
    return f"**{name}: no significant difference**: {text}; " + (
        "from scratch it is already at the ceiling."
        if ceiling
        else "the scores are equal."
        if not mean
        else f"noise from {n:,} test examples reaches ±{found.test:.{compared.digits}f} "
        f"{compared.unit}, so more seeds "
        "would not settle it."
        if abs(mean) <= found.test
        else f"if the difference stays, {enough(mean, found.test, variances, seeds)} seeds would "
        "settle it."
    )


def enough(mean, test, variances, seeds, most=100):
    """Return how many seeds make a difference of this mean significant. test: half of the 95 %
    interval due to the test set; variances: of both variants over seeds."""
    return next(
        (
            k
            for k in range(seeds + 1, most + 1)
            if math.hypot(t_interval(*((variance / k, k - 1) for variance in variances)), test)
            < abs(mean)
        ),
        f"more than {most}",
    )


def beside_linear(compared, means):
    """Return how the networks compare with the trivial and linear baselines."""
    linear, runs, constant = compared.linear, runs_by_variant(compared), constant_of(compared)

    def beside(variant):
        ours, apart = [*runs[variant].values()], means[variant] - linear["score"]
        test = half_width_of_test(ours, [linear])
        if len(ours) == 1 or None in map(examples, [*ours, linear]):
            return None
        if abs(apart) <= math.hypot(half_width([run["score"] for run in ours]), test):
            return "not significantly different from"
        return "ahead of" if apart > 0 else "behind"

    chosen = {
        variant: round(statistics.mean(map(validation, runs[variant].values())), 9)
        for variant in means
    }
    best = max(means, key=chosen.get)
    tied = [called(variant) for variant in means if chosen[variant] == chosen[best]]
    behind, said = (
        [called(variant) for variant in means if variant != best and beside(variant) == "behind"],
        [],
    )

    def text(score):
        return f"{score:.3f}" if compared.r2 else f"{score:.1f} %"

    if len(behind) == len(means) - 1 and beside(best) == "behind":
        most = max(means, key=means.get)
        said.append(
            f"**The linear model is ahead of every network**: it scores {text(linear['score'])}, "
            "and "
            f"{called(most)} {text(means[most])}."
        )
    else:
        relation = (
            f"**{beside(best)}** the linear model ({text(linear['score'])})"
            if beside(best)
            else f"the linear model {text(linear['score'])}; which is better is unknown"
        )
        said.append(
            (
                f"Validation cannot choose between {', '.join(tied)}. The first"
                if tied[1:]
                else f"Validation chooses {called(best)}. It"
            )
            + f" scores {text(means[best])} on test, {relation}."
            + f" Behind the linear model: {', '.join(behind)}." * bool(behind)
        )
    none = [
        called(variant)
        for variant in means
        if all(
            run["score"] <= constant + half_width_of_test([run]) for run in runs[variant].values()
        )
    ]
    if none:
        said.append(
            f"Not significantly better than the {trivial(compared)} ({text(constant)}): "
            f"{', '.join(none)}."
        )
    return said


def denoised(compared):
    """Return how much of the variance of hidden samples each pretrained model explains, and linear
    interpolation."""
    known, explained = (compared.linear or {}).get("denoising"), {}
    for line, starts in compared.lines.items():
        if known and (error := denoising_error(starts)):
            explained[line] = 100 - 100 * error / known["mean"]
    if not explained:
        return []
    line = 100 - 100 * known["interpolation"] / known["mean"]
    return [
        f"Linear interpolation between visible neighbours explains {line:.1f} % of the variance of "
        "hidden samples "
        f"(validation); {', '.join(f'{name} {one:.1f} %' for name, one in explained.items())}."
        + " **Pretraining has not learned more than interpolation.**"
        * (max(explained.values()) <= line)
    ]


def denoising_error(starts):
    """Return the mean validation score of a model's pretraining runs, if `interpolated` of
    baseline.py is its like: minus the squared error, hidden as the task says. Else None."""
    firsts = [run["first"] for run in starts.get("spt", {}).values()]
    alike = [
        first["val_score"]
        for first in firsts
        if first["objective"] == "masked"
        and "mask" not in first["changed"]
        and first.get("score_is") == "minus squared error on predicted samples"
    ]
    return statistics.mean(alike) if alike and len(alike) == len(firsts) else None


def unfinished(compared):
    """Return which variants improved to the end: most of their seeds validate best in the last
    tenth of the run."""

    def improved(run):
        steps, field = run["steps"], validation_field(run)
        early, late = (
            [each[field] for each in evaluations(run) if (each["step"] > 0.9 * steps) == last]
            for last in (False, True)
        )
        return bool(early and late) and max(late) > max(early)

    names = [
        called(variant)
        for variant, seeds in runs_by_variant(compared).items()
        if len(seeds) > 1 and sum(map(improved, seeds.values())) > len(seeds) / 2
    ]
    longer = " (--passes)" if declared(runs_of(compared.lines)[0]["task"]).own else ""
    return [
        f"**Still improving at the end**: {', '.join(names)}. Longer runs{longer} may score more."
    ] * bool(names)


def trivial(compared):
    """Return what the trivial baseline predicts."""
    return {"R2": "mean label", "micro F1": "best constant labels"}.get(
        compared.score, "majority class"
    )


def further(compared):
    """Return the scores that all runs of a table have besides the one that decides it: accuracy,
    macro F1."""
    runs = runs_of(compared.lines) + [compared.linear] * bool(compared.linear)
    return [
        name
        for name in ("accuracy", "macro F1")
        if not compared.r2 and all(name in run for run in runs)
    ]


def constant_run(compared):
    """Return the scores of always predicting the majority class, as `further` names them."""
    share = compared.linear.get("constant_accuracy", 0)
    classes = len(recalls(compared.linear)) if compared.linear.get("counts") else 1
    # of several labels
    f1 = compared.linear.get("constant_macro_f1", 2 * share / (1 + share) / classes)
    return {"accuracy": 100 * share, "macro F1": 100 * f1}


def constant_of(compared):
    """Return the score of always predicting the majority class, or the mean, by baseline.py."""
    if compared.score == "balanced accuracy":
        return 100 / len(recalls(compared.linear))
    return (
        units(compared.linear)
        * compared.linear[f"constant_{KINDS[kind_of(compared.linear)].score}"]
    )


# ---- Table, caption, figure ----------------------------------------------------------------------


def name_of(key):
    few = f" with {100 * key.share:g} % of the labels" if key.share < 1 else ""
    return (
        Path(key.task.removeprefix("file:")).name
        + few
        + (f", {key.passes:,} passes per run" if key.passes else "")
    )


DIFFERENCES = {
    "SPT - scratch": ("spt", "scratch"),
    "joint - scratch": ("joint", "scratch"),
    "SPT - joint": ("spt", "joint"),
}


def table(compared):
    """Return the table: trivial and linear baselines, one row per model."""
    there = {start for starts in compared.lines.values() for start in starts}
    starts = [start for start in entries.STARTS if start in there]
    pairs = {name: pair for name, pair in DIFFERENCES.items() if there.issuperset(pair)}
    head = [
        "model",
        *(LOOKS[start][0] for start in starts),
        *(f"{name} [95 % interval] (seeds)" if i == 0 else name for i, name in enumerate(pairs)),
        "minutes per run",
    ]

    def cell(score, runs):
        means = [f"{statistics.mean(run[name] for run in runs):.1f}" for name in further(compared)]
        return f"{score} ({', '.join(means)})" if means else score

    rows = []
    if one := compared.linear:
        nothing = [""] * (len(head) - 3)
        constant = f"{constant_of(compared):.{compared.digits}f}"
        rows += [
            [f"*{trivial(compared)}*", cell(constant, [constant_run(compared)]), *nothing, ""],
            [
                f"*linear: {one['model']}*",
                cell(f"{one['score']:.{compared.digits}f}", [one]),
                *nothing,
                f"{one['seconds']:.0f} s",
            ],
        ]
    for line, variants in compared.lines.items():
        cells, minutes = [], []
        for start in starts:
            some = variants.get(start, {})
            cells.append(
                cell(mean_std(scores(some), compared.digits), some.values()) if some else "–"
            )
            minutes.append(
                f"{statistics.mean(run['minutes'] for run in some.values()):.1f}" if some else "–"
            )
        gains = [gain(*(variants.get(start, {}) for start in pair)) for pair in pairs.values()]
        rows.append(
            [
                line,
                *cells,
                *(signed(found.points, compared.digits, found.half) for found in gains),
                " / ".join(minutes),
            ]
        )
    return markdown(head, rows)


def caption(key, compared):
    """Return two paragraphs: what the scores are; how sure they are and where they come from."""
    runs = runs_of(compared.lines)
    n, passes = (
        runs[0]["test_examples"],
        [
            {run["passes"] for run in runs_of({line: starts})}
            for line, starts in compared.lines.items()
        ],
    )
    equal = (
        f"{min(passes[0]):,} passes per run"
        if len(set.union(*passes)) == 1
        else (
            "equal passes in each row"
            if all(len(some) == 1 for some in passes)
            else "unequal passes"
        )
    )
    some = [run["data"] for run in runs if "labelled" in run.get("data", {})]
    bare = some[0]["sizes"][0] - some[0]["labelled"] if some else 0
    joint = any("joint" in starts for starts in compared.lines.values()) and (key.share < 1 or bare)
    percent, words = "" if compared.r2 else " in percent", " and ".join(further(compared))
    text = [
        f"Test {compared.score}{percent} on {n:,} examples, mean ± standard deviation over seeds"
        f"{f'; {words} in parentheses' if words else ''}."
    ]
    if untested := runs[0].get("untested"):
        text.append(f"Nothing is known of classes without a test example: {', '.join(untested)}.")
    if compared.ratio > UNEQUAL:
        text.append(
            f"Classes are unequal, {compared.ratio:.0f}:1"
            + (
                ", so the score is balanced accuracy."
                if compared.score == "balanced accuracy"
                else "; older runs did not store per-class counts, so the score is accuracy."
            )
        )
    sizes, digits = [*filter(None, (half_width_of_test([run]) for run in runs))], compared.digits
    text += (
        [
            "The choice of test examples moves a score by up to "
            f"{statistics.mean(sizes):.{digits}f} {compared.unit} "
            "(95 %)."
        ]
        if sizes
        else []
    )
    made = (
        runs
        + [run["first"] for run in runs if run["init"]]
        + [compared.linear] * bool(compared.linear)
    )
    notes = ["joint training uses only the labelled inputs"] * bool(joint)
    notes += [f"only SPT used the {bare:,} sequences without a label"] * bool(bare) + [
        equal,
        provenance(made),
    ]
    notes = "; ".join(notes)
    small = (
        ""
        if declared(key.task).own
        else " Small models on a small or shortened set: not the paper's task."
    )
    source = (
        f"{how_sure([*runs_by_variant(compared).values()])} {notes[0].upper()}{notes[1:]}.{small}"
    )
    return f"{' '.join(text)}\n\n{source}"


def of_seeds(runs, seeds):
    return [
        run
        for run in runs
        if seeds is None or run["seed"] in seeds or run.get("start") == "baseline"
    ]


def report(args):
    """Print a table and a verdict for each data set and share of the labels, and draw a figure: of
    the finished runs on your data or of a demo."""
    name, entry = args.command, []
    runs = of_seeds(read_runs(args.runs), args.seeds)
    if args.command == "demo":
        name = (
            args.what[0]
            if args.what
            else args.runs.stem
            if args.runs.stem in entries.DEMOS
            else "demo"
        )
        if name not in entries.DEMOS:
            raise UserError(f"demo {name}: choose from {' '.join(entries.DEMOS)}")
        names = dict.fromkeys([*entries.DEMOS[name][1].split(), *(run["model"] for run in runs)])
        entry = entries.demo(name, " ".join(model for model in names if model in MODELS))
    found = comparisons(runs, entry)
    if not found:
        raise UserError(
            f"no finished finetuning run in {args.runs}; run: bash run_all.sh "
            + (name if entry else "own --tasks file:PATH")
        )
    blocks = [
        block
        for key, compared in found.items()
        for block in (
            f"**{name_of(key)}**",
            table(compared),
            caption(key, compared),
            "\n".join(f"- {line}" for line in verdict(compared)),
        )
    ]
    print("\n" + "\n\n".join(blocks) + "\n")
    for compared in found.values():
        there = [run for run in runs_of(compared.lines) if (run["folder"] / "best.pt").exists()]
        if there:
            best = max(there, key=validation)["folder"]
            print(
                "To label new sequences with the best network on validation: "
                f"python predict.py {best} --input FILE\n"
            )
    draw(lambda plt: figure(plt, found), args.figure)
    if args.readme:
        picture = os.path.relpath(args.figure, args.readme.parent)
        blocks += [f"![gains of all seeds]({picture})"] if args.linked else []
        replace_block(args.readme, name, wrapped("\n\n".join(blocks)))


def figure(plt, found):
    """Draw for each data set and share of the labels: scores of all seeds (left), gains over
    scratch (right)."""
    heights = [max(1.6, 0.24 * len(compared.lines)) for compared in found.values()]
    picture, axes = plt.subplots(
        len(found),
        2,
        figsize=(9, 1.2 + sum(heights)),
        squeeze=False,
        height_ratios=heights,
        sharey="row",
    )
    firsts = {}  # gains have one scale for all accuracies, and one for all R2
    for (left, right), (key, compared) in zip(axes, found.items()):
        if firsts.setdefault(compared.r2, right) is not right:
            right.sharex(firsts[compared.r2])
        for y, starts in enumerate(compared.lines.values()):
            for height, start in ((y - 0.1, "spt"), (y + 0.1, "joint")):
                gained = gain(starts.get(start, {}), starts.get("scratch", {}))
                if gained.points:
                    mean = statistics.mean(gained.points.values())
                    right.errorbar(
                        mean,
                        height,
                        xerr=gained.half or None,
                        color=LOOKS[start][1],
                        marker="o",
                        capsize=3,
                    )
        dots(
            left,
            {
                line: {start: [*seeds.values()] for start, seeds in starts.items()}
                for line, starts in compared.lines.items()
            },
        )
        if compared.linear:
            left.axvline(
                constant_of(compared), color="black", linestyle=":", label=trivial(compared)
            )
            left.axvline(
                compared.linear["score"], color="black", linestyle="--", label="linear model"
            )
        left.set_xlabel(f"test {compared.score}{'' if compared.r2 else ', %'}: seeds and mean")
        if not compared.r2:
            left.set_xlim(right=101)
        right.axvline(0, color="black", linestyle=":")
        right.set_xlabel("gain over scratch, 95 % interval")
        left.set_title(name_of(key), loc="left")
    return picture, "Gains over training from scratch"
