"""The report of `own`: what it says besides the tables and verdicts of test_made_tables.py."""

import re
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
from conftest import ROOT, call, made_run, made_runs

from compare import comparisons, report, verdict
from compare.runs import load

PAGES = "README.md", "results/labels.md", "results/ucr.md"
MINE = dict(task="file:/my.npz", test_examples=1000)


def shown(folder):
    done = call("analyze.py", "own", "--runs", folder, "--figure", folder / "own.png")
    assert done.returncode == 0 and (folder / "own.png").read_bytes()[:4] == b"\x89PNG", done.stderr
    return done.stdout


def test_the_run_to_use_is_the_best_on_validation_whatever_the_test_split_says(tmp_path):
    """And sequences without a label are named, and what was read of the data."""
    facts = dict(sizes=[50, 9, 9], labelled=30, read=["read my.npz: 68 sequences"])
    for model, val, score in (("s4", 0.7, 0.6), ("rotary", 0.6, 0.8)):
        more = MINE | dict(model=model, val_accuracy=val, data=facts)
        for folder in made_runs(tmp_path, "scratch", [score] * 2, **more):
            (folder / "best.pt").touch()
    text = shown(tmp_path)
    assert f"python predict.py {tmp_path}/s4-" in text and "\nread my.npz: 68 sequences\n" in text
    assert "No run used the 20 sequences without a label" in text and "Joint" not in text
    pages = [(ROOT / page).read_text(encoding="utf-8").replace(" points [", " [") for page in PAGES]
    numbers = re.findall(r"by (\S+)(?: points)? (\[.*?\])", report.ELSEWHERE["class"])
    assert report.ELSEWHERE["class"] in text.replace("\n", " ")
    assert [sum(f"{mean} {ends}" in page for page in pages) for mean, ends in numbers] == [2, 2]
    made_runs(tmp_path, "joint", [0.5], **MINE, data=facts)
    assert "Joint training uses only the labelled inputs; no run used the 20 " in shown(tmp_path)


def test_shortened_runs_and_runs_without_counts_are_tables_of_their_own(tmp_path):
    """Of unequal classes: one table of runs with counts, one of older runs without."""
    counts = dict(labels=[900, 100], predicted=[850, 150], right=[840, 90])
    more = dict(model="n-grams", constant_accuracy=0.9, objective="none", counts=counts)
    made_run(tmp_path, "baseline", 0.93, **MINE | more)
    made_runs(tmp_path, "scratch", [0.93, 0.93], **MINE, counts=counts)
    short = dict(steps=10, changed=dict(steps=10))
    made_runs(tmp_path / "short", "scratch", [0.9, 0.9], **MINE, **short)
    whole, short = shown(tmp_path).split("**my.npz, 10 passes per run**")
    name = "| *linear: n-grams* |"
    assert f"{name} 91.7 (93.0, 84.0) |" in whole and f"{name} 93.0 |" in short
    assert "counts per class were not kept" in short


@pytest.mark.parametrize("n", [6, 20])
def test_few_test_examples_move_r2_as_much_as_in_a_simulation(n):
    """A score of 0.5, for a large test set: half of the 95 % interval, scaled to n examples."""
    (sentence,) = verdict.too_few(SimpleNamespace(test_examples=n, r2=True, digits=3))
    y, noise = np.random.default_rng(0).normal(size=(2, 4000, 400))
    r2 = 1 - np.square(y / 2 - noise / 2).mean(1) / y.var(1)
    half = float(sentence.split("±")[1].split(" ")[0])
    assert half == pytest.approx(1.96 * r2.std() * (400 / n) ** 0.5, rel=0.25)


def test_the_figure_has_one_scale_of_gains_and_ends_behind_100(tmp_path):
    """No interval where there is one seed; R2 has a scale of its own."""
    for name, scores in dict(my=(0.9, 0.95, 0.97), one=(0.5,)).items():
        for start in ("scratch", "spt"):
            task = dict(task=f"file:{name}.npz", test_examples=1000)
            made_runs(tmp_path / name, start, [s + 0.02 * (start == "spt") for s in scores], **task)
    made_run(tmp_path, task="file:r2.npz", test_r2=0.5, test_examples=1000)
    axes = report.figure(plt, comparisons.comparisons(load(tmp_path)))[0].axes
    plt.close("all")
    pairs = {
        left.get_title(loc="left"): (left, right) for left, right in zip(axes[::2], axes[1::2])
    }
    (left, right), (_, single), (r2, _) = (pairs[f"{name}.npz"] for name in ("my", "one", "r2"))
    assert left.get_xlim()[1] == 101 != r2.get_xlim()[1] and right.get_xlim() == single.get_xlim()
    bars = [container.has_xerr for axis in (right, single) for container in axis.containers]
    assert bars == [True, False]
