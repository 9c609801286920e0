"""The report on your data and the demos: baselines, each model with each start, and a verdict in
words.

    python analyze.py own runs/own      a table, a verdict and a figure of all finished runs

comparisons.py arranges the runs, verdict.py judges them; here they become Markdown and a figure."""

import os

from compare.comparisons import comparisons, constant_of, further, further_of_constant, trivial
from compare.drawing import LOOKS, dots, draw, markdown, replace_block, wrapped
from compare.runs import load, pretraining_runs, provenance, rows_of
from compare.statistics import gain, how_sure, mean_of, mean_std, signed
from compare.verdict import noises, verdicts
from engine.targets import UNEQUAL
from experiments import entries
from files import UserError
from models import MODELS
from tasks import declared

# Column of the table -> the starts whose scores it compares.
DIFFERENCES = {
    "SPT - scratch": ("spt", "scratch"),
    "joint - scratch": ("joint", "scratch"),
    "SPT - joint": ("spt", "joint"),
}


def report(args):
    """Print a table and a verdict for each data set and share of the labels, and draw a figure: of
    the finished runs on your data or of a demo."""
    runs = load(args.runs)
    if args.seeds is not None:
        runs = runs[runs.seed.isin(args.seeds) | (runs.start == "baseline")]
    name = "own"
    entry = ()
    if args.command == "demo":
        name = name_of_demo(args)
        models = dict.fromkeys([*entries.DEMOS[name][1].split(), *runs.model])
        entry = entries.demo(name, " ".join(model for model in models if model in MODELS))
    arranged = comparisons(runs, entry)
    if not arranged:
        raise UserError(
            f"no finished finetuning run in {args.runs}; run: bash run_all.sh "
            + ("own --tasks file:PATH" if name == "own" else name)
        )
    blocks = [block for key, comparison in arranged.items() for block in blocks_of(key, comparison)]
    print("\n" + "\n\n".join(blocks) + "\n")
    for comparison in arranged.values():
        print_best(comparison)
    draw(lambda plt: figure(plt, arranged), args.figure)
    if args.readme:
        if args.linked:
            picture = os.path.relpath(args.figure, args.readme.parent)
            blocks.append(f"![gains of all seeds]({picture})")
        replace_block(args.readme, name, wrapped("\n\n".join(blocks)))


def name_of_demo(args):
    """Return which demo is meant: as named, or by the name of its runs. UserError if there is none
    of this name."""
    name = args.what[0] if args.what else args.runs.stem
    if not args.what and name not in entries.DEMOS:
        return "demo"
    if name not in entries.DEMOS:
        raise UserError(f"demo {name}: choose from {' '.join(entries.DEMOS)}")
    return name


def blocks_of(key, comparison):
    """Return the paragraphs of a comparison: title, table, caption, verdict."""
    return [
        f"**{key.title}**",
        table(comparison),
        caption(key, comparison),
        "\n".join(f"- {verdict}" for verdict in verdicts(comparison)),
    ]


def print_best(comparison):
    """Print how to label new sequences, if weights of these runs are there."""
    runs = [run for run in rows_of(comparison.runs) if (run.folder / "best.pt").exists()]
    if runs:
        best = max(runs, key=lambda run: run.val)
        print(
            "To label new sequences with the best network on validation: "
            f"python predict.py {best.folder} --input FILE\n"
        )


# ---- Table ---------------------------------------------------------------------------------------


def table(comparison):
    """Return the table: trivial and linear baselines, one row per line."""
    rows = [row_of_line(comparison, line) for line in comparison.lines]
    if comparison.linear is None:
        return markdown(rows)
    empty = dict.fromkeys(rows[0], "")
    first = [*empty][1]  # the column in which baselines stand
    linear = rows_of(comparison.linear)[0]
    constant = f"{constant_of(comparison):.{comparison.digits}f}"
    score = f"{linear.score:.{comparison.digits}f}"
    others = further_of_constant(comparison)
    constant = with_further(constant, [others[name] for name in further(comparison)])
    score = with_further(score, further_means(comparison, comparison.linear))
    return markdown(
        [
            empty | {"model": f"*{trivial(comparison)}*", first: constant},
            empty
            | {
                "model": f"*linear: {linear.model}*",
                first: score,
                "minutes per run": f"{linear.record['seconds']:.0f} s",
            },
            *rows,
        ]
    )


def row_of_line(comparison, line):
    """Return the row of a model: {column: cell}."""
    row = {"model": line}
    minutes = []
    for start in comparison.starts:
        runs = comparison.of(line, start)
        score = mean_std(runs.score, comparison.digits)
        row[LOOKS[start][0]] = with_further(score, further_means(comparison, runs))
        minutes.append(f"{mean_of(runs.minutes):.1f}" if len(runs) else "–")
    note = " [95 % interval] (seeds)"  # in the head of the first difference
    for name, pair in DIFFERENCES.items():
        if {*pair} <= {*comparison.starts}:
            gained = gain(*(comparison.of(line, start) for start in pair))
            row[name + note] = signed(gained.points, comparison.digits, gained.half)
            note = ""
    return row | {"minutes per run": " / ".join(minutes)}


def further_means(comparison, runs):
    return [mean_of(runs[name]) for name in further(comparison)] if len(runs) else []


def with_further(score, means):
    """Return the text of a score, with other scores in parentheses."""
    return f"{score} ({', '.join(f'{mean:.1f}' for mean in means)})" if means else score


# ---- Caption -------------------------------------------------------------------------------------


def caption(key, comparison):
    """Return two paragraphs: what the scores are; how sure they are and where they come from."""
    notes = "; ".join(notes_on_training(key, comparison))
    sentences = [how_sure([*comparison.variants.values()]), f"{notes[0].upper()}{notes[1:]}."]
    if not declared(key.task).own:
        sentences.append("Small models on a small or shortened set: not the paper's task.")
    return f"{' '.join(notes_on_scores(comparison))}\n\n{' '.join(sentences)}"


def notes_on_scores(comparison):
    """Return sentences: what the scores are, and how much the test set says."""
    digits, unit = comparison.digits, comparison.unit
    score = f"Test {comparison.score}{'' if comparison.r2 else ' in percent'}"
    words = " and ".join(further(comparison))
    sentences = [
        f"{score} on {comparison.test_examples:,} examples, mean ± standard deviation over seeds"
        + (f"; {words} in parentheses." if words else ".")
    ]
    if untested := comparison.runs.record.iloc[0].get("untested"):
        names = ", ".join(untested)
        sentences.append(f"Nothing is known of classes without a test example: {names}.")
    if comparison.ratio > UNEQUAL:
        balanced = comparison.score == "balanced accuracy"
        sentences.append(
            f"Classes are unequal, {comparison.ratio:.0f}:1"
            + (
                ", so the score is balanced accuracy."
                if balanced
                else "; older runs did not store per-class counts, so the score is accuracy."
            )
        )
    halves = [half for runs in comparison.variants.values() for half in noises(runs).values()]
    halves = [half for half in halves if half]
    if halves:
        half = sum(halves) / len(halves)
        sentences.append(
            f"The choice of test examples moves a score by up to {half:.{digits}f} {unit} (95 %)."
        )
    return sentences


def notes_on_training(key, comparison):
    """Return notes: which labels and passes runs had, and where they come from."""
    runs = comparison.runs
    data = [record.get("data") or {} for record in runs.record]
    partly = [facts for facts in data if "labelled" in facts]
    unlabelled = partly[0]["sizes"][0] - partly[0]["labelled"] if partly else 0
    notes = []
    if "joint" in comparison.starts and (key.share < 1 or unlabelled):
        notes.append("joint training uses only the labelled inputs")
    if unlabelled:
        notes.append(f"only SPT used the {unlabelled:,} sequences without a label")
    notes.append(equal_passes(comparison))
    trained = [*rows_of(runs), *pretraining_runs(runs)]
    if comparison.linear is not None:
        trained += rows_of(comparison.linear)
    return [*notes, provenance(trained)]


def equal_passes(comparison):
    """Return whether all runs, or those of each row, had equally many passes."""
    by_line = {
        line: {n for start in comparison.starts for n in comparison.of(line, start).passes}
        for line in comparison.lines
    }
    numbers = set.union(*by_line.values())
    if len(numbers) == 1:
        return f"{min(numbers):,} passes per run"
    if all(len(passes) == 1 for passes in by_line.values()):
        return "equal passes in each row"
    return "unequal passes"


# ---- Figure --------------------------------------------------------------------------------------


def figure(plt, arranged):
    """Draw for each data set and share of the labels: scores of all seeds (left), gains over
    scratch (right)."""
    heights = [max(1.6, 0.24 * len(comparison.lines)) for comparison in arranged.values()]
    picture, axes = plt.subplots(
        len(arranged),
        2,
        figsize=(9, 1.2 + sum(heights)),
        squeeze=False,
        height_ratios=heights,
        sharey="row",
    )
    firsts = {}  # gains have one scale for all accuracies, and one for all R2
    for (left, right), (key, comparison) in zip(axes, arranged.items()):
        if firsts.setdefault(comparison.r2, right) is not right:
            right.sharex(firsts[comparison.r2])
        draw_scores(left, comparison)
        draw_gains(right, comparison)
        left.set_title(key.title, loc="left")
    return picture, "Gains over training from scratch"


def draw_scores(axis, comparison):
    """Draw the scores of all seeds, and both baselines as lines."""
    lines = {}
    for (line, start), runs in comparison.variants.items():
        lines.setdefault(line, {})[start] = runs
    dots(axis, lines)
    if comparison.linear is not None:
        linear = comparison.linear.score.iloc[0]
        constant = constant_of(comparison)
        axis.axvline(constant, color="black", linestyle=":", label=trivial(comparison))
        axis.axvline(linear, color="black", linestyle="--", label="linear model")
    percent = "" if comparison.r2 else ", %"
    axis.set_xlabel(f"test {comparison.score}{percent}: seeds and mean")
    if not comparison.r2:
        axis.set_xlim(right=101)


def draw_gains(axis, comparison):
    """Draw the gains over scratch with their intervals."""
    for y, line in enumerate(comparison.lines):
        for height, start in ((y - 0.1, "spt"), (y + 0.1, "joint")):
            gained = gain(comparison.of(line, start), comparison.of(line, "scratch"))
            if len(gained.points):
                axis.errorbar(
                    mean_of(gained.points),
                    height,
                    xerr=gained.half or None,
                    color=LOOKS[start][1],
                    marker="o",
                    capsize=3,
                )
    axis.axvline(0, color="black", linestyle=":")
    axis.set_xlabel("gain over scratch, 95 % interval")
