"""Tables in Markdown, blocks of pages, and figures."""

import math
import re
import textwrap

import numpy as np

from files import UserError, write_atomically

SCRATCH, SPT, OTHER = "#9aa5b1", "#0072b2", "#d55e00"  # colour-blind safe, also distinct in gray
# How a finetuning run started -> its name and its colour in tables and figures.
LOOKS = {
    "baseline": ("linear model", "black"),
    "scratch": ("from scratch", SCRATCH),
    "spt": ("self-pretrained", SPT),
    "joint": ("joint", OTHER),
    "linear_probe": ("linear probe", "#009e73"),
    "corpus": ("pretrained elsewhere", "#cc79a7"),
}


def write(path, save):
    """Call save(open binary file), then rename the file, so that no reader ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save)
    print(f"{path}: written")


def markdown(rows):
    """Return a table in Markdown of rows {column: cell}. The first row has all columns."""
    if not rows:
        return ""
    lines = []
    for cells in ([*rows[0]], *([row.get(title) for title in rows[0]] for row in rows)):
        texts = [f" {cell} ".replace("|", r"\|") if cell else " " for cell in cells]
        lines.append(f"|{'|'.join(texts)}|")
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def wrapped(text):
    """Break the lines of a Markdown text that are not rows of a table."""
    wrapper = textwrap.TextWrapper(100, break_long_words=False, break_on_hyphens=False)
    lines = []
    for line in text.splitlines():
        wrapper.subsequent_indent = "  " if line.startswith("- ") else ""
        lines.append(line if line.startswith("|") else wrapper.fill(line))
    return "\n".join(lines)


def replace_block(path, name, text, check=False):
    """Put text between <!-- name:begin --> and <!-- name:end --> of a page, or check it."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    old = path.read_text(encoding="utf-8")
    block = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
    new, replaced = block.subn(lambda _: f"{begin}\n{text}\n{end}", old, count=1)
    if not replaced:
        raise UserError(f"{path} has no {begin} ... {end}")
    if new == old:
        return
    if check:
        advice = "to update it, repeat the command without --check"
        raise UserError(f"{path} differs from the runs after {begin}; {advice}")
    write(path, lambda file: file.write(new.encode()))


def draw(make, path, note=""):
    """Write the figure of make(plt) -> figure, title with one legend. note: ends the title."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    sizes = {"font.size": 8, "axes.titlesize": 8, "lines.linewidth": 1}
    plt.rcParams.update(sizes | {"text.parse_math": False})
    figure, title = make(plt)
    entries = {}
    for axis in figure.axes:
        handles, labels = axis.get_legend_handles_labels()
        entries |= dict(zip(labels, handles))
    width, height = figure.get_size_inches()
    longest = max(map(len, entries), default=0)
    columns = min(5, max(1, int(14 * width / (8 + longest))))  # that fit side by side
    look = dict(loc="lower center", ncols=columns, frameon=False)
    figure.legend(entries.values(), entries.keys(), **look)
    figure.suptitle(title + note, fontsize=10)
    bottom = (0.15 + 0.18 * math.ceil(len(entries) / columns)) / height
    figure.tight_layout(rect=(0.01, bottom, 0.99, 0.98))
    write(path, lambda file: figure.savefig(file, format=path.suffix[1:].lower(), dpi=150))
    plt.close(figure)


def bars(axis, names, variants, chance, papers=({}, {})):
    """Draw two bars in percent per name and one dot per seed. variants: {name: scores by seed} from
    scratch, the same after SPT; papers: {name: the paper's number} for both; chance: {name: chance
    accuracy}."""
    looks = (-0.19, SCRATCH, "from scratch"), (0.19, SPT, "self-pretrained (SPT)")
    for i, name in enumerate(names):
        for (shift, colour, label), variant, paper in zip(looks, variants, papers):
            bar(axis, i + shift, variant.get(name, ()), colour, label)
            if name in paper:
                look = dict(s=30, marker="D", facecolors="none", edgecolors=OTHER, zorder=4)
                axis.scatter([i + shift], [paper[name]], label="the paper", **look)
        if name in chance:
            look = dict(color="black", linestyle=":", label="chance")
            axis.hlines(chance[name], i - 0.4, i + 0.4, **look)
    axis.set_xticks(range(len(names)), names)
    axis.set(ylabel="test accuracy, %", ylim=(0, 108))


def bar(axis, x, scores, colour, label):
    """Draw the mean of scores as a bar and each as a dot, or 'not run'."""
    if not len(scores):
        axis.text(x, 1, "not run", rotation=90, ha="center", va="bottom", color="0.5")
        return
    mean = scores.mean()
    axis.bar(x, mean, 0.36, color=colour, label=label)
    axis.scatter([x] * len(scores), scores, s=10, color="black", zorder=3, label="one seed")
    box = dict(facecolor="white", edgecolor="none", pad=1)  # a line may run behind it
    axis.text(x, scores.max() + 3, f"{mean:.1f}", ha="center", bbox=box)


def dots(axis, lines, halves=None):
    """Draw {line: {start: runs}}: dots are seeds, bars means. halves: {line: of an interval}."""
    for y, (line, variants) in enumerate(lines.items()):
        starts = [start for start in LOOKS if start in variants]
        for i, start in enumerate(starts):
            scores = variants[start].score
            label, colour = LOOKS[start]
            height = y + 0.2 * (i - (len(starts) - 1) / 2)
            # separates equal scores
            heights = np.linspace(height - 0.04, height + 0.04, len(scores))
            look = dict(s=7, color=colour, label=label, clip_on=False, zorder=3)
            axis.scatter(scores, heights, **look)
            axis.plot([scores.mean()] * 2, [height - 0.1, height + 0.1], color=colour)
            if halves:
                axis.errorbar(scores.mean(), height, xerr=halves[line], color=colour, capsize=3)
    axis.set_yticks(range(len(lines)), lines)
    axis.set(ylim=(len(lines) - 0.5, -0.5), xlabel="test accuracy, %: seeds and mean")
    axis.grid(axis="x", color="0.9")
