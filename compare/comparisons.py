"""Arrange runs on your data, or of a demo, into comparisons: models and how they started, on the
same data with the same labels.

The score is accuracy, R2 for regression, or micro F1 for several labels. If classes are more
unequal than 3:1, it is balanced accuracy (the mean over classes of their recall), because always
predicting the majority class would have a high accuracy."""

from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas

from compare.drawing import LOOKS
from compare.runs import Run, by_variant, examples_of, identity, rows_of, units, with_pretraining
from compare.settings import shown
from engine.targets import KINDS, UNEQUAL
from experiments import entries
from experiments.commands import record, trained
from tasks import declared

NO_RUNS = pandas.DataFrame(columns=[*Run._fields, "first", "passes", "minutes"])


class Key(NamedTuple):
    """What tells comparisons apart."""

    task: str
    share: float  # of the labels
    per_class: "int | None"  # labels, if --labels-per-class set them
    passes: "int | None"  # per run, if --passes or --steps set them

    @property
    def title(self):
        title = Path(self.task.removeprefix("file:")).name
        if self.share < 1:
            title += f" with {100 * self.share:g} % of the labels"
        if self.per_class:
            title += f" with {self.per_class} labelled per class"
        return f"{title}, {self.passes:,} passes per run" if self.passes else title


class Comparison(NamedTuple):
    """The content of one table. A line is a model with what differs from its recipe."""

    variants: dict  # {(line, start): its runs by seed}
    linear: "pandas.DataFrame | None"  # runs of baseline.py, one per draw of labels
    score: str  # R2, accuracy, balanced accuracy, micro F1 ...
    ratio: float  # of the largest class to the smallest

    @property
    def lines(self):
        return [*dict.fromkeys(line for line, _ in self.variants)]

    @property
    def starts(self):
        present = {start for _, start in self.variants}
        return [start for start in entries.STARTS if start in present]

    @property
    def runs(self):
        return pandas.concat([*self.variants.values()])

    @property
    def r2(self):
        return self.score == "R2"

    @property
    def digits(self):
        return 3 if self.r2 else 1

    @property
    def test_examples(self):
        return self.runs.record.iloc[0]["test_examples"]

    def of(self, line, start):
        """Return the runs of a variant by seed; an empty table if there are none."""
        return self.variants.get((line, start), NO_RUNS)


def comparisons(runs, entry=()):
    """Arrange a table of runs -> {Key: Comparison}. entry: rows whose runs are named by their model
    only, and stand first in their order."""
    names = {identity(record(run)): row.model for row in entry for run in trained(row)}
    order = [row.model for row in entry]
    tables = defaultdict(dict)
    linear = {}
    for variant in by_variant(with_pretraining(runs)):
        run = rows_of(variant)[0]
        key, line, start = position_of(run)
        line = names.get(run.variant, line)
        if start == "baseline":
            linear[key[:3]] = variant
        elif start in entries.STARTS:
            tables[key][line, start] = variant
    arranged = {}
    for key, variants in tables.items():
        lines = dict.fromkeys([*order, *(line for line, _ in variants)])
        by_line = {name: variants[name] for line in lines for name in variants if name[0] == line}
        arranged[key] = compared(by_line, linear.get(key[:3]))
    return arranged


def position_of(run):
    """Return the Key, line and start under which a run stands."""
    changed = dict(run.settings)
    if changed.get("joint") == 1:
        del changed["joint"]
    share = changed.pop("label_fraction", None) or 1
    per_class = changed.pop("labels_per_class", None)
    steps = [changed.pop(name, None) for name in ("steps", "pretraining.steps")]
    start = run.start
    if start == "spt" and changed.pop("freeze", False):
        start = "linear_probe"
    words = [run.model] if run.objective == "masked" else [run.model, run.objective]
    for name, value in changed.items():
        word = name.replace("arch.", "").replace(".", " ")
        words.append(word.replace("_", " ") if value is True else f"{word}={shown(value)}")
    key = Key(run.task, share, per_class, run.passes if any(steps) else None)
    return key, ", ".join(words), start


# ---- Scores --------------------------------------------------------------------------------------


def compared(variants, linear):
    """Return the Comparison of variants, by balanced accuracy if classes are unequal."""
    tables = [*variants.values()] if linear is None else [*variants.values(), linear]
    records = [result for table in tables for result in table.record]
    counts = [result["counts"]["labels"] for result in records if result.get("counts")]
    sizes = [size for size in counts[0] if size] if counts else [1]
    ratio = max(sizes) / min(sizes)
    balanced = ratio > UNEQUAL and len(counts) == len(records)
    score = "balanced accuracy" if balanced else KINDS[tables[0].kind.iloc[0]].title
    variants = {name: with_scores(runs, balanced) for name, runs in variants.items()}
    if linear is not None:
        linear = with_scores(linear, balanced)
    return Comparison(variants, linear, score, ratio)


def with_scores(runs, balanced):
    """Return runs with macro F1 as a column. balanced: balanced accuracy becomes their score."""
    runs = runs.assign(**{"macro F1": [macro_f1_of(run) for run in rows_of(runs)]})
    if not balanced:
        return runs.assign(accuracy=np.nan)
    examples = []
    for run in rows_of(runs):
        predictions = run.examples[0] if run.predicted else None
        examples.append(examples_of(run.record, run.kind, predictions, balanced=True))
    score = [100 * float(recalls(result).mean()) for result in runs.record]
    examples = pandas.Series(examples, runs.index, dtype=object)
    return runs.assign(accuracy=runs.score, score=score, examples=examples)


def recalls(result):
    """Return the recall of each class in the test split: (classes,). result: result.json."""
    labels, right = (np.array(result["counts"][name]) for name in ("labels", "right"))
    return right[labels > 0] / labels[labels > 0]


def macro_f1_of(run):
    """Return the macro F1 of a run in percent: of your data, or of several labels; else NaN."""
    if declared(run.task).own and run.record.get("counts"):
        return macro_f1(run.record["counts"])
    return 100 * run.record.get("test_macro_f1", np.nan)


def macro_f1(counts):
    """Return the mean over classes of F1, the harmonic mean of recall and precision, in percent."""
    labels, predicted, right = (np.array(counts[name]) for name in ("labels", "predicted", "right"))
    return 100 * float(np.mean((2 * right / np.maximum(labels + predicted, 1))[labels > 0]))


def further(comparison):
    """Return the names of the scores that all runs have besides the one that decides."""
    if comparison.r2:
        return []
    runs = pandas.concat([comparison.runs, comparison.linear])
    return [name for name in ("accuracy", "macro F1") if runs[name].notna().all()]


# ---- The trivial baseline ------------------------------------------------------------------------


def trivial(comparison):
    """Return what the trivial baseline predicts."""
    names = {"R2": "mean label", "micro F1": "best constant labels"}
    return names.get(comparison.score, "majority class")


def constant_of(comparison):
    """Return the scores of the trivial baseline, by baseline.py, as a row of a table."""
    run = rows_of(comparison.linear)[0]
    share = run.record.get("constant_accuracy", 0)
    classes = len(recalls(run.record)) if run.record.get("counts") else 1
    # The majority class has precision `share` and recall 1; the other classes have F1 of 0.
    f1 = run.record.get("constant_macro_f1", 2 * share / (1 + share) / classes)
    score = units(run.kind) * run.record[f"constant_{KINDS[run.kind].score}"]
    if comparison.score == "balanced accuracy":
        score = 100 / classes
    return pandas.DataFrame([{"score": score, "accuracy": 100 * share, "macro F1": 100 * f1}])


def in_words(variant):
    """Return (line, start) in words."""
    line, start = variant
    return f"{line} {LOOKS[start][0]}"
