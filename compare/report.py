"""The report on your data and the demos: baselines, each model with each start, and a verdict in
words.

    python analyze.py own runs/own      a table, a verdict and a figure of all finished runs

comparisons.py arranges the runs, verdict.py judges them; here they become Markdown and a figure."""

import os
from collections import defaultdict

from compare.comparisons import comparisons, constant_of, further, trivial
from compare.drawing import LOOKS, dots, draw, markdown, replace_block, wrapped
from compare.runs import load, provenance, rows_of
from compare.statistics import gain, how_sure, mean_of, mean_std, signed
from compare.verdict import noises, sentences, too_few
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

# What is known of SPT on other data, by the kind of their targets.
ELSEWHERE = {
    "class": "On other series SPT changed S4's accuracy by -0.5 points [-1.9, +1.0] on average "
    "over four sets with 2 to 8 labels per class (results/labels.md), and by -0.2 [-1.3, +0.9] "
    "over 40 with all labels (results/ucr.md)."
}
UNKNOWN = "What SPT changes on other data whose labels are not classes is not known."


def report(args):
    """Print tables and verdicts on your data or of a demo, and draw a figure. args: of analyze.py;
    linked: the page of --readme shows the figure."""
    runs = load(args.runs)
    if args.seeds is not None:
        runs = runs[runs.seed.isin(args.seeds) | (runs.start == "baseline")]
    name = "own"
    words = "own --tasks file:PATH"
    entry = ()
    if args.command == "demo":
        name = words = name_of_demo(args)
        # the usual ones first, then others that were run
        models = dict.fromkeys([*entries.DEMOS[name][1].split(), *runs.model])
        entry = entries.demo(name, " ".join(model for model in models if model in MODELS))
    arranged = comparisons(runs, entry)
    if not arranged:
        problem = f"no finished finetuning run in {args.runs}"
        raise UserError(f"{problem}; run: bash run_all.sh {words}")
    blocks, remarks = [], []
    for key, comparison in arranged.items():
        verdict = "\n".join(f"- {sentence}" for sentence in sentences(comparison))
        blocks += [f"**{key.title}**", *opening_of(comparison)]
        blocks += [table(comparison), caption(key, comparison), verdict]
        if declared(key.task).own:
            remarks.append(ELSEWHERE.get(comparison.runs.kind.iloc[0], UNKNOWN))
    blocks = [block for block in [*blocks, *dict.fromkeys(remarks)] if block]
    print("\n" + "\n\n".join(blocks) + "\n")
    for comparison in arranged.values():
        print_best(comparison)
    draw(lambda plt: figure(plt, arranged), args.figure)
    if args.readme:
        if args.linked:
            picture = os.path.relpath(args.figure, args.readme.parent)
            blocks.append(f"![gains of all seeds]({picture})")
        replace_block(args.readme, name, wrapped("\n\n".join(blocks)))


def opening_of(comparison):
    """Return paragraphs: that nothing can be decided, if test examples are few; what was read of
    your data."""
    data = comparison.runs.record.iloc[0].get("data") or {}
    return [*too_few(comparison), *data.get("read", ())]


def name_of_demo(args):
    """Return which demo is meant: as named, or by the name of its runs."""
    if not args.what:
        return args.runs.stem if args.runs.stem in entries.DEMOS else "demo"
    if args.what[0] not in entries.DEMOS:
        raise UserError(f"demo {args.what[0]}: choose from {' '.join(entries.DEMOS)}")
    return args.what[0]


def print_best(comparison):
    """Print how to label new sequences, if weights of these runs are there."""
    runs = [run for run in rows_of(comparison.runs) if (run.folder / "best.pt").exists()]
    if runs:
        best = max(runs, key=lambda run: run.val)
        print("To label new sequences with the best network on validation:", end=" ")
        print(f"python predict.py {best.folder} --input FILE\n")


# ---- Table ---------------------------------------------------------------------------------------


def table(comparison):
    """Return the table: trivial and linear baselines, one row per line."""
    rows = [row_of_line(comparison, line) for line in comparison.lines]
    if comparison.linear is None:
        return markdown(rows)
    first = [*rows[0]][1]  # the column in which baselines stand
    constant = score_cell(comparison, constant_of(comparison))
    linear = rows_of(comparison.linear)[0]
    row = {"model": f"*linear: {linear.model}*", first: score_cell(comparison, comparison.linear)}
    row["minutes per run"] = f"{linear.record['seconds']:.0f} s"
    baselines = {"model": f"*{trivial(comparison)}*", first: constant}, row
    titles = dict.fromkeys(rows[0])
    return markdown([titles | row for row in (*baselines, *rows)])


def row_of_line(comparison, line):
    """Return the row of a model: {column: cell}."""
    row = {"model": line}
    minutes = []
    for start in comparison.starts:
        runs = comparison.of(line, start)
        row[LOOKS[start][0]] = score_cell(comparison, runs)
        minutes.append(f"{mean_of(runs.minutes):.1f}" if len(runs) else "–")
    few = too_few(comparison)
    # in the head of the first difference
    note = " (seeds)" if few else " [95 % interval] (seeds)"
    for name, pair in DIFFERENCES.items():
        if {*pair} <= {*comparison.starts}:
            gained = gain(*(comparison.of(line, start) for start in pair))
            row[name + note] = signed(gained.points, comparison.digits, 0 if few else gained.half)
            note = ""
    return row | {"minutes per run": " / ".join(minutes)}


def score_cell(comparison, runs):
    """Return the mean score of runs, with their other scores in parentheses."""
    score = mean_std(runs.score, comparison.digits)
    others = [f"{mean_of(runs[name]):.1f}" for name in further(comparison)] if len(runs) else []
    return f"{score} ({', '.join(others)})" if others else score


# ---- Caption -------------------------------------------------------------------------------------


def caption(key, comparison):
    """Return two paragraphs: what the scores are; how sure they are and where they come from."""
    data = [record.get("data") or {} for record in comparison.runs.record]
    counts = (facts["sizes"][0] - facts["labelled"] for facts in data if "labelled" in facts)
    unlabelled = next(counts, 0)
    notes = []
    if "joint" in comparison.starts and (key.share < 1 or key.per_class or unlabelled):
        notes.append("joint training uses only the labelled inputs")
    if unlabelled:
        pretrained = {"spt", "linear_probe"} & {*comparison.starts}
        users = "only SPT" if pretrained else "no run"
        notes.append(f"{users} used the {unlabelled:,} sequences without a label")
    linear = [] if comparison.linear is None else [comparison.linear]
    source = provenance(comparison.runs, *linear)
    text = "; ".join([*notes, passes_in_words(comparison), source])
    remarks = [f"{text[0].upper()}{text[1:]}."]
    if not too_few(comparison):
        remarks.insert(0, how_sure([*comparison.variants.values()]))
    if not declared(key.task).own:
        remarks.append("Small models on a small or shortened set: not the paper's task.")
    return f"{' '.join(notes_on_scores(comparison))}\n\n{' '.join(remarks)}"


def notes_on_scores(comparison):
    """Return sentences: what the scores are, and how much the test set says."""
    digits = comparison.digits
    score = "Test R2" if comparison.r2 else f"Test {comparison.score} in percent"
    score += f" on {comparison.test_examples:,} examples, mean ± standard deviation over seeds"
    words = " and ".join(further(comparison))
    notes = [f"{score}; {words} in parentheses." if words else f"{score}."]
    if untested := comparison.runs.record.iloc[0].get("untested"):
        names = ", ".join(untested)
        notes.append(f"Nothing is known of classes without a test example: {names}.")
    if comparison.ratio > UNEQUAL:
        classes = f"Classes are unequal, {comparison.ratio:.0f}:1"
        if comparison.score != "balanced accuracy":
            classes += "; counts per class were not kept"
        notes.append(f"{classes}, so the score is {comparison.score}.")
    halves = [half for runs in comparison.variants.values() for half in noises(runs).values()]
    halves = [half for half in halves if half]
    if halves and not too_few(comparison):
        half = f"{sum(halves) / len(halves):.{digits}f} {'R2' if comparison.r2 else 'points'}"
        notes.append(f"The choice of test examples moves a score by about ±{half} (95 %).")
    return notes


def passes_in_words(comparison):
    """Return in words whether all runs, or those of each row, had equally many passes."""
    by_line = defaultdict(set)
    for (line, _), runs in comparison.variants.items():
        by_line[line] |= {*runs.passes}
    numbers = set.union(*by_line.values())
    if len(numbers) == 1:
        return f"{min(numbers):,} passes per run"
    if all(len(passes) == 1 for passes in by_line.values()):
        return "equal passes in each row"
    return "unequal passes"


# ---- Figure --------------------------------------------------------------------------------------


def figure(plt, arranged):
    """Draw per data set and share of labels: scores of seeds (left), gains over scratch (right)."""
    heights = [max(1.6, 0.24 * len(comparison.lines)) for comparison in arranged.values()]
    look = dict(figsize=(9, 1.2 + sum(heights)), height_ratios=heights, sharey="row")
    picture, axes = plt.subplots(len(arranged), 2, squeeze=False, **look)
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
        linear = mean_of(comparison.linear.score)
        constant = constant_of(comparison).score[0]
        axis.axvline(constant, color="black", linestyle=":", label=trivial(comparison))
        axis.axvline(linear, color="black", linestyle="--", label="linear model")
    percent = "" if comparison.r2 else ", %"
    axis.set_xlabel(f"test {comparison.score}{percent}: seeds and mean")
    if not comparison.r2:
        axis.set_xlim(right=101)


def draw_gains(axis, comparison):
    """Draw the gains of SPT and joint training over scratch, with their intervals."""
    for y, line in enumerate(comparison.lines):
        for height, start in ((y - 0.1, "spt"), (y + 0.1, "joint")):
            gained = gain(comparison.of(line, start), comparison.of(line, "scratch"))
            if len(gained.points):
                look = dict(color=LOOKS[start][1], marker="o", capsize=3)
                axis.errorbar(mean_of(gained.points), height, xerr=gained.half or None, **look)
    axis.axvline(0, color="black", linestyle=":")
    axis.set_xlabel("gain over scratch, 95 % interval")
