"""The figures of results/findings.md, which tables.py draws: arms in words, one answer for all and the linear model as
lines, every seed as a dot, the mean with its 95 % interval, gains and numbers of seeds in the picture.
"""
import re
import statistics
from collections import namedtuple

from arms import change, curves, exits, layout, nothing, of_question, scatter
from analyze import grid
from compare import MODEL_NAMES, STARTS, evaluations, half_width, scores
from experiments import questions

BEDS = {"pathfinder_demo": "Pathfinder", "text_demo": "reviews, 128 characters", "text256": "reviews, 256 characters",
        "image": "CIFAR-10 in grey"}
# Words of runs' names -> what they mean, in the order in which they are tried.
WORDS = {
    "scratch": "from scratch", "spt": "SPT", "joint": "joint training", "max": "max pooling", "causal": "causal",
    "short": "small time steps", "long": "four times the steps", "rated": "", "rewind": "rest rewound",
    r"l([\d.]+)": "labels for {:.0%}", r"f([\d.]+)": "{:.0%} of the data", r"s(\d+)": "{:,.0f} steps",
    r"p(\d+)": "after {:,.0f} steps", r"n([\d.]+)": "on {:.3g} of the images", r"m([\d.]+)": "{:.0%} hidden",
    "runs3": "runs of 3", "runs10": "runs of 10", "patches": "2 x 2 patches",
    "rows": "whole rows", "qk": "queries, keys kept", "v": "values kept", "mixers": "mixers kept",
    "others": "all but mixers kept", "A": "A, dt kept", "BC": "B, C kept", r"lr([\d.]+)": "rate {:g}",
    r"w([\d.]+)": "weight {:g}", "e4": "4 epochs", "100k": "100k parameters"}


def in_words(names, left_out=()):
    """Words of a run's name -> what they mean: ['v', 'rewind', 'spt'] -> 'SPT, values kept, rest rewound'."""
    said = []
    for name in [*names[-1:], *names[:-1]] if names and names[-1] in STARTS else names:
        for pattern, text in WORDS.items():
            if (match := re.fullmatch(pattern, name)) and not any(re.fullmatch(one, name) for one in left_out):
                said.append(text.format(*map(float, match.groups())))
                break
    return ", ".join(filter(None, said))


def plain_row(row):
    """'pathfinder_demo-dlr_rand-lr0.003-long' -> 'DLR, random start, four times the steps'."""
    _, model, *words = row.split("-")
    return ", ".join(filter(None, [MODEL_NAMES.get(model, model), in_words(words, [r"lr.*"])]))


# ---- A line an arm ---------------------------------------------------------------------------------------------------

# Arm `key` of `arms`, whose gain is over `base`, with Estimates of their scatter; its row and what it is in words.
Line = namedtuple("Line", "heading name arms key base sure")


def costs(axis, values, horizontal=False, all_labels=""):
    """What costs nothing, as lines: [(name, percent)]. all_labels: said of those that learn."""
    draw = axis.axhline if horizontal else axis.axvline
    for i, ((name, value), style) in enumerate(zip(values, (":", "--", "-."))):
        name = ("linear model" if name.startswith("linear") else name) + (all_labels if i else "")
        draw(value, color="black", linestyle=style, linewidth=0.8, label=name)


def arms_figure(plt, number, found):
    """A panel a bed, a line an arm: seeds, mean, interval; beside it what it gains over its row's first arm."""
    panels = {}
    for rows, columns in layout(number):
        arms = {(row, column): found.get(f"{row}-{column}", {}) for row in rows for column in columns}
        sure = scatter(arms)[0]                                  # as the table has it
        for row in rows:
            lines = panels.setdefault(row.split("-")[0], [])
            there = [line.arms[line.key] for line in lines]
            lines += [Line(plain_row(row), in_words(column.split("-")), arms, (row, column), (row, columns[0]), sure)
                      for column in columns if not any(arms[row, column] is arm for arm in there)]
    sizes = [len(lines) + len({line.heading for line in lines}) for lines in panels.values()]
    figure, axes = plt.subplots(len(panels), 1, figsize=(9, 0.9 + 0.5 * len(panels) + 0.155 * sum(sizes)),
                                height_ratios=sizes, squeeze=False)
    for axis, (task, lines) in zip(axes[:, 0], panels.items()):
        draw_arms(axis, lines)
        costs(axis, nothing(task))
        axis.set_title(BEDS[task], loc="left")
    axes[-1, 0].set_xlabel("test accuracy, %: seeds, mean, 95 % interval     |     mean, points gained [95 %] (seeds)")
    return figure, questions()[number].title


def draw_arms(axis, lines):
    """[Line], a heading where it changes."""
    y, ticks, heading = 0, [], ""
    for line in lines:
        if line.heading != heading:
            heading = line.heading
            ticks.append((y, heading, "bold"))
            y += 1
        ticks.append((y, line.name, "normal"))
        if arm := line.arms[line.key]:
            values = [*scores(arm).values()]
            mean, (label, colour) = statistics.mean(values), STARTS[next(iter(arm.values()))["start"]]
            half = half_width((line.sure[line.key], len(values))) if len(values) > 1 else 0
            axis.scatter(values, [y] * len(values), s=6, color=colour, alpha=0.5, linewidths=0)
            axis.errorbar(mean, y, xerr=half or None, color=colour, marker="|", markersize=7, capsize=2, label=label)
            text = f"{mean:.1f}"
            if line.key != line.base and line.arms[line.base]:
                points, half, _ = change(line.arms, line.key, line.base, line.sure)
                text += f"  {points:+.1f}" + ("" if half is None else f" [{points - half:+.1f}, {points + half:+.1f}]")
            axis.text(1.01, y, f"{text} ({len(values)})", transform=axis.get_yaxis_transform(), va="center", fontsize=7)
        y += 1
    axis.set_yticks([at for at, *_ in ticks], [name for _, name, _ in ticks])
    for label, (*_, weight) in zip(axis.get_yticklabels(), ticks):
        label.set(fontweight=weight, fontsize=7)
    axis.tick_params(axis="y", length=0)
    axis.set_ylim(y - 0.3, -0.7)
    axis.grid(axis="x", color="0.92")


# ---- Over labels, steps, passes --------------------------------------------------------------------------------------

def line_of(axis, x, arms, sure, **look):
    """Means with intervals over x; for two seeds their scores, since their interval may fill the panel. arms:
    [{seed: run}], of which some are empty."""
    points = [(one, statistics.mean(scores(arm).values()), half_width((estimate, len(arm))) * (len(arm) > 2), len(arm))
              for one, arm, estimate in zip(x, arms, sure) if arm]
    for one, arm in zip(x, arms):
        if len(arm) == 2:
            axis.plot([one, one], [*scores(arm).values()], "_", color=look["color"], label="each of two seeds")
    if points:
        x, means, halves, n = zip(*points)
        if "label" in look:
            look["label"] += f", n={'/'.join(map(str, sorted({*n})))}"
        axis.errorbar(x, means, yerr=halves if any(halves) else None, marker="o", markersize=3, capsize=2, **look)


def say_gain(axis, x, arms, key, base):
    """Points gained, above a mean."""
    if arms[key] and arms[base]:
        mean, other = (statistics.mean(scores(arms[each]).values()) for each in (key, base))
        axis.annotate(f"{mean - other:+.1f}", (x, mean), (3, 5), textcoords="offset points", fontsize=7, ha="left")


def over_labels(plt, number, found):
    """Question 2: accuracy over the share that has labels, a panel a model; dashed: no more data than these."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    shares = (0.01, 0.05, 0.25, 1)
    for axis, model in zip(axes, ("rotary", "s4")):
        names = {(f"l{share}" if share < 1 else "", start): found.get("-".join(filter(None, (
            "text_demo", model, f"l{share}" if share < 1 else "", start))), {})
            for share in shares for start in ("scratch", "spt", "joint")}
        names |= {(f"f{share}", start): found.get(f"text_demo-{model}-f{share}-{start}", {})
                  for share in (0.05, 0.25) for start in ("scratch", "spt")}
        sure, _ = scatter({("text_demo", key): arm for key, arm in names.items()})
        for start in ("scratch", "spt", "joint"):
            keys = [(f"l{share}" if share < 1 else "", start) for share in shares]
            line_of(axis, [5000 * share for share in shares], [names[key] for key in keys],
                    [sure.get(("text_demo", key)) for key in keys], color=STARTS[start][1], label=STARTS[start][0])
            keys = [(f"f{share}", start) for share in (0.05, 0.25)]
            if start != "joint":
                line_of(axis, [250, 1250], [names[key] for key in keys],
                        [sure.get(("text_demo", key)) for key in keys], color=STARTS[start][1], linestyle="--",
                        label=f"{STARTS[start][0]}, no other reviews")
        costs(axis, nothing("text_demo"), horizontal=True, all_labels=", all 5,000 labels")
        for key, x in zip([f"l{share}" for share in shares[:-1]] + [""], (50, 250, 1250, 5000)):
            say_gain(axis, x, names, (key, "spt"), (key, "scratch"))
        axis.set(xscale="log", xlabel="reviews with labels", title=MODEL_NAMES[model])
        axis.set_xticks([50, 250, 1250, 5000], ["50", "250", "1,250", "5,000"])
        axis.minorticks_off()
    axes[0].set_ylabel("test accuracy, %")
    return figure, questions()[number].title


def over_steps(plt, number, found):
    """Question 5: over steps of pretraining and of scratch; over images."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    row = "pathfinder_demo-transformer-"
    lines = [("spt", "SPT: then 1,400 steps on labels", {n: f"p{n}-spt" for n in (175, 350, 700, 1400, 2800)}, left),
             ("scratch", "from scratch: more than 1,400 steps on labels",
              {0: "s1400-scratch", 1300: "scratch", 2800: "s4200-scratch"}, left),
             ("spt", "SPT on so many images, 625 with labels",
              {5000 * share: f"n{share:g}-spt" for share in (0.125, 0.25, 0.5, 1)}, right),
             ("scratch", "from scratch on so many images",
              {625: "n0.125-scratch", 1250: "n0.25-scratch", 2500: "n0.5-scratch", 5000: "scratch"}, right)]
    for start, label, names, axis in lines:
        arms = [found.get(row + name, {}) for name in names.values()]
        sure, _ = scatter({(row, x): arm for x, arm in zip(names, arms)})
        line_of(axis, [*names], arms, [sure.get((row, x)) for x in names], color=STARTS[start][1], label=label,
                linestyle="-" if axis is left else "--")
    for axis in (left, right):
        costs(axis, nothing("pathfinder_demo"), horizontal=True, all_labels=", all 5,000 labels")
    for n in (175, 350, 700, 1400, 2800):
        say_gain(left, n, {name: found.get(f"{row}{name}", {}) for name in (f"p{n}-spt", "s1400-scratch")},
                 f"p{n}-spt", "s1400-scratch")
    left.set(xlabel="steps of pretraining, or more steps on labels", ylabel="test accuracy, %")
    right.set(xlabel="images", xscale="log")
    right.set_xticks([625, 1250, 2500, 5000], ["625", "1,250", "2,500", "5,000"])
    right.minorticks_off()
    return figure, questions()[number].title


def over_epochs(plt, number, found):
    """Question 9: validation accuracy over epochs of both stages, a line a run, and the paper's test accuracies of
    Table 9."""
    figure, axis = plt.subplots(figsize=(9, 3.5))
    names = {"image-s4-100k-scratch": "-", "image-s4-100k-spt": "-", "image-s4-100k-e4-scratch": "-.",
             "image-s4-100k-lr0.01-spt": "--"}
    for name, style in names.items():
        start = name.rsplit("-", 1)[1]
        colour, words = STARTS[start][1], in_words(name.split("-")[3:])
        if style == "-":
            paper = {"scratch": "S4", "spt": "S4 + SPT"}[start]
            axis.axhline(float(grid(9)[0][paper]["100k"][1]), color=colour, linestyle=":",
                         label=f"the paper's test, 200 epochs, {in_words([start])}")
        for run in found.get(name, {}).values():
            before = run["first"].get("epochs", 0)
            epochs = [before + record["step"] * run["epochs"] / run["steps"] for record in evaluations(run)]
            axis.plot(epochs, [100 * record["val_accuracy"] for record in evaluations(run)], style, color=colour,
                      label=f"{words}, one seed")
    costs(axis, nothing("image"), horizontal=True)
    axis.set(xlabel="epochs, those of pretraining counted", ylabel="validation accuracy, %")
    return figure, questions()[number].title


LOOKS = {"pathfinder_demo-transformer": "#0072b2", "pathfinder_demo-transformer-max": "#009e73",
         "pathfinder_demo-s4": "#d55e00", "text256-rotary": "#0072b2", "text256-s4": "#d55e00"}
LIMITS = {"pathfinder_demo": (40, 100), "text256": (45, 80)}      # percent; other beds fit their data


def over_passes(plt, number, found):
    """Question 10, a column a bed: accuracy over passes, a line a model and start; accuracy over the share of
    pretraining at today's passes; losses on the labels of the models of reviews."""
    figure, axes = plt.subplots(3, 2, figsize=(9, 9.5))
    tasks = "pathfinder_demo", "text256"
    for curve in curves(found):
        passes, shares = axes[:2, tasks.index(curve.task)]
        sure, look = scatter(curve.arms)[0], dict(color=LOOKS[curve.name])
        name = f"{BEDS[curve.task].split(',')[0]}: {plain_row(curve.name)}"
        budgets = sorted({budget for budget, _ in curve.at})
        for share, style, fill, label in ((0, "--", "white", "scratch"), (curve.share, "-", None, "SPT")):
            keys = [curve.at[budget, share] for budget in budgets]
            line_of(passes, budgets, [curve.arms[key] for key in keys], [sure.get(key) for key in keys],
                    linestyle=style, markerfacecolor=fill, label=f"{name}, {label}", **look)
        some = sorted(share for budget, share in curve.at if budget == 1)
        keys = [curve.at[1, share] for share in some]
        line_of(shares, [100 * share for share in some], [curve.arms[key] for key in keys],
                [sure.get(key) for key in keys], **look)
    for (passes, shares, _), task in zip(axes.T, tasks):
        costs(passes, nothing(task, fresh=True), horizontal=True)
        passes.set(xscale="log", xlabel="passes of both stages, in today's", title=BEDS[task])
        budgets = sorted({budget for curve in curves(found) if curve.task == task for budget, _ in curve.at})
        passes.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
        passes.minorticks_off()
        for axis in (passes, shares):
            axis.set_ylim(LIMITS.get(task))
        shares.set(xlabel="share of pretraining, % of today's passes")
    for axis in axes[:2, 0]:
        axis.set_ylabel("test accuracy, %")
    for axis, curve in zip(axes[2], [curve for curve in curves(found) if curve.task == "text256"]):
        losses(axis, curve)
    return figure, questions()[number].title


def losses(axis, curve):
    """Loss on the labels over passes, of training and validation, of the first seed from scratch and after SPT, with
    the largest budget that has both."""
    both = [budget for budget, share in curve.at if share == curve.share and all(
        curve.arms[curve.at[budget, each]] for each in (0, share))]
    most = max(both, default=1)
    for start, share in (("scratch", 0), ("spt", curve.share)):
        for run in [*curve.arms[curve.at[most, share]].values()][:1]:
            for field, style, words in (("val_loss", "-", "validation"), ("train_loss", ":", "training")):
                points = [(run["first"]["steps"] + record["step"], record[field]) for record in evaluations(run)
                          if field in record]
                if points:
                    axis.plot(*zip(*points), style, color=STARTS[start][1], label=f"loss {STARTS[start][0]}, {words}")
    title = f"{plain_row(curve.name)}, today's passes x {most:g}, one seed"
    axis.set(xlabel="passes", ylabel="loss on the labels", title=title)
    axis.set_visible(bool(axis.lines))


def ways_out(plt, number, found):
    """Question 11: a line an exit."""
    made = {task: {name: arm for name, arm in arms.items() if arm} for task, arms in exits(found).items()
            if arms["from scratch"]}
    figure, axes = plt.subplots(len(made), 1, figsize=(9, 1.4 + 0.17 * sum(len(arms) + 3 for arms in made.values())),
                                squeeze=False)
    for axis, (task, some) in zip(axes[:, 0], made.items()):
        arms = {(task, name): arm for name, arm in some.items()}
        sure = scatter(arms)[0]
        draw_arms(axis, [Line("", key[1], arms, key, (task, "from scratch"), sure) for key in arms])
        costs(axis, nothing(task, fresh=True))
        axis.set_xlim(LIMITS.get(task))
        axis.set_title(BEDS[task], loc="left")
    return figure, questions()[number].title


def question(plt, number, found):
    """-> figure, title."""
    own = {2: over_labels, 5: over_steps, 9: over_epochs, 10: over_passes, 11: ways_out}
    return own.get(number, arms_figure)(plt, number, of_question(number, found))
