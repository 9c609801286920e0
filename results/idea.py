"""Draw README's first picture, results/idea.png: python results/idea.py

Left: a sentence as it is, with hidden characters, and as the kept pretrained model fills them in. Right: what that
pretraining was worth on IMDb (255 characters), from the kept runs of question 1 in findings.md.
"""
import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np

from compare.drawing import SCRATCH, SPT, write
from predict import filled_in, held_examples, load, new_split

PRETRAINED = ROOT / "results" / "weights" / "text256-rotary-pretrain"
SHOWN = 57                                     # characters per line
MODELS = {"rotary": "Transformer\n(rotary)", "s4": "S4"}


def write_line(axis, y, label, characters, colours, boxed=None):
    """Write a label and one line of characters, each in its colour; boxed: which are covered by a black square."""
    axis.text(-0.5, y + 0.55, label, fontsize=9, color="0.35")
    for i, (one, colour) in enumerate(zip(characters, colours)):
        if boxed is not None and boxed[i]:
            axis.fill_between([i - 0.5, i + 0.45], y - 0.32, y + 0.32, color="black", linewidth=0)
        else:
            axis.text(i, y, one, family="monospace", fontsize=11, color=colour, ha="center", va="center")


def draw(path):
    import matplotlib.pyplot as plt
    plt.switch_backend("Agg")
    trained = load(PRETRAINED)
    batch = new_split(trained, held_examples(trained))[0].batch(np.arange(2, 3))
    hidden, guess, wrong = (part[0, :SHOWN] for part in filled_in(trained, batch))            # (l,) each
    symbols = batch.symbols[0, :SHOWN].numpy()
    whole, filled = ([trained.task.symbols[i] for i in ids] for ids in (symbols, np.where(hidden, guess, symbols)))
    filled = ["\u2423" if gone and one == " " else one for gone, one in zip(hidden, filled)]

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 2.9), width_ratios=(2.8, 1))
    write_line(left, 2.2, "stage 1: take the training inputs, without their labels ...", whole, ["black"] * SHOWN)
    write_line(left, 1.1, "... hide some characters ...", whole, ["black"] * SHOWN, hidden)
    colours = np.where(wrong, "#d55e00", np.where(hidden, SPT, "black"))
    write_line(left, 0.0, "... and learn to fill them in (blue: right, orange: wrong)", filled, colours)
    left.text(-0.5, -0.9, "stage 2: train on the labels, as usual, from these weights", fontsize=9, color="0.35")
    left.set(xlim=(-1, SHOWN), ylim=(-1.1, 3))
    left.axis("off")

    runs = {run["run"]: 100 * run["test_accuracy"] for name in ("findings/runs.jsonl", "baseline.jsonl")
            for run in map(json.loads, open(ROOT / "results" / name)) if "test_accuracy" in run}
    for x, model in enumerate(MODELS):
        for shift, start, colour, label in ((-0.2, "scratch", SCRATCH, "from scratch"), (0.2, "spt", SPT, "after SPT")):
            scores = [runs[f"text256-{model}-{start}-s{seed}"] for seed in range(3)]
            mean = statistics.mean(scores)
            right.bar(x + shift, mean, 0.38, color=colour, label=label if x == 0 else None)
            right.scatter([x + shift] * 3, scores, s=8, color="black", zorder=3)
            right.text(x + shift, max(scores) + 1, f"{mean:.1f}", ha="center", fontsize=9)
    right.axhline(runs["text256-baseline"], color="black", linestyle="--", linewidth=1, label="linear model of n-grams")
    right.set_xticks(range(len(MODELS)), MODELS.values())
    right.set(ylim=(50, 88), ylabel="test accuracy, % (50: chance)",
              title="IMDb, 255 characters; 25,000 test reviews; dots: 3 seeds")
    right.title.set_fontsize(9)
    right.legend(fontsize=8, frameon=False, loc="upper left", ncols=2, handlelength=1, columnspacing=0.8)
    right.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    write(path, lambda file: figure.savefig(file, format="png", dpi=110))


if __name__ == "__main__":
    draw(ROOT / "results" / "idea.png")
