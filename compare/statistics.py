"""Differences between variants, and how sure they are.

Intervals are 95 %. They answer two questions, whose halves are added in quadrature:

- Would other seeds agree? Welch's t interval: each variant has its own standard deviation, so one
  that varies more does not spoil the others. Beside a standard deviation that a whole table shares,
  the interval is 1.2 to 1.5 times as wide with three seeds, 1.8 to 3.4 times with two, and less
  than 1.2 times with five or more.
- Would other test examples agree? Both variants were tested on the same examples, so only those
  count on which they differ (paired): the variance over examples of the difference of both means
  over seeds, less what the seeds explain. Half an example is added for each of the four outcomes,
  both right, one right, the other, both wrong (Agresti and Min 2005). Without these, a class whose
  two test examples are right would have no variance. Runs without kept predictions are compared as
  if they erred independently, which is wider; other scores than accuracy then have no such part.

By simulation (tests/test_statistics.py): two variants that are equally good differ significantly in
at most 5 of 100 tables, with 2 to 10 seeds and with rare classes; in R2, if their errors have
similar tails."""

import math
import statistics
from typing import NamedTuple

import numpy as np
import pandas
from scipy.special import stdtrit

from compare.runs import units


class Gain(NamedTuple):
    """A difference of two variants."""

    points: pandas.Series  # the differences of common seeds
    seeds: float  # half of the interval due to seeds; 0 if there is one seed
    test: float  # the same, due to the test examples

    @property
    def half(self):
        """Half of the 95 % interval; 0 with one seed, which has none."""
        return math.hypot(self.seeds, self.test) if len(self.points) > 1 else 0.0


def t_interval(*parts):
    """Return half of the 95 % interval of a sum of independent (variance, degrees of freedom)."""
    square = sum(variance for variance, _ in parts)
    freedom = square**2 / sum(variance**2 / freedom for variance, freedom in parts) if square else 1
    return float(stdtrit(freedom, 0.975)) * math.sqrt(square)


def half_width(*samples):
    """Return half of the 95 % interval of a sample's mean, or of the difference of two means. 0 if
    a sample has fewer than two values."""
    if min(map(len, samples)) < 2:
        return 0.0
    return t_interval(
        *((float(np.var(sample, ddof=1)) / len(sample), len(sample) - 1) for sample in samples)
    )


def of_class(after, before, unit=1):
    """Return the variance of a difference of mean scores that is due to which examples of a class
    are in the test set, and its degrees of freedom. after, before: (seeds, n), what each example
    adds to the score; before may be empty. unit: 1 for right or wrong, with two examples added; 0
    for R2 and F1, where an example may add anything."""
    n = after.shape[1]
    more = 2 * unit  # added to a mean: one right, one wrong
    difference = after.mean(0) - (before.mean(0) if len(before) else 0)
    mean = (difference.sum() + (0 if len(before) else unit)) / (n + more)
    variance = (np.square(difference).sum() + unit) / (n + more) - mean**2
    variance *= (n + more) / (n + more - 1)
    variance -= sum(
        side.var(0, ddof=1).mean() / len(side) for side in (after, before) if len(side) > 1
    )
    return max(variance, unit / (n + more)) / n, n + more - 1


def half_width_of_test(*variants):
    """Return half of the 95 % interval of the mean score of a variant, or of the difference of two,
    that is due to the test set, which is the same. 0 if nothing is known of its examples."""
    sides = [[*variant.examples] for variant in variants]  # per run: arrays, one per class
    runs = [examples for side in sides for examples in side]
    if any(examples is None for examples in runs):
        return 0.0
    kind = variants[0].kind.iloc[0]
    unit = 1 if kind == "class" else 0
    sizes = {tuple(map(len, examples)) for examples in runs}
    paired = len(sizes) == 1 and all(variant.predicted.all() for variant in variants)
    parts = []
    for i in range(len(runs[0])):
        added = [[np.asarray(examples[i], float) for examples in side] for side in sides]
        if paired:
            before = np.array(added[1]) if len(added) > 1 else []
            parts.append(of_class(np.array(added[0]), before, unit))
        else:  # as if they erred independently
            for side in added:
                separate = [of_class(values[None], [], unit) for values in side]
                parts.append(np.mean(separate, 0))
    return units(kind) / len(runs[0]) * t_interval(*parts)


def half_width_of_mean(variant):
    """Return half of the 95 % interval of the mean score of a variant; 0 for one run."""
    if len(variant) < 2:
        return 0.0
    return math.hypot(half_width(variant.score), half_width_of_test(variant))


def gain(after, before):
    """Return the Gain of a variant over another, in common seeds."""
    seeds = sorted({*after.index} & {*before.index})
    after, before = after.loc[seeds], before.loc[seeds]
    points = (after.score - before.score).astype(float)
    test = half_width_of_test(after, before) if seeds else 0.0
    return Gain(points, half_width(after.score, before.score), test)


def minus(after, before):
    """Return after - before, values by seed, for the seeds that both have."""
    return (after - before).dropna()


def mean_of(values):
    """Return the mean of values by seed, rounded once: pandas rounds every sum, so that a mean of
    73.55 may be printed as 73.5 or 73.6."""
    return statistics.mean(values.tolist())


def mean_std(values, digits=1):
    """Format scores by seed as '61.2 ± 0.8', as '61.2' if there is one seed, or as a dash if there
    is none."""
    if not len(values):
        return "–"
    mean = f"{mean_of(values):.{digits}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values.tolist()):.{digits}f}"


def interval(mean, half, digits=1, sign="+"):
    """Format a 95 % interval: '[+2.2, +5.2]'."""
    return f"[{mean - half:{sign}.{digits}f}, {mean + half:{sign}.{digits}f}]"


def signed(points, digits=1, half=None):
    """Format differences by seed as '+3.7 [+2.2, +5.2] (3)' (mean, interval, number of seeds),
    '+3.7 (one seed)' or a dash. half: of the interval; None: of the interval that follows from
    these differences only."""
    if not len(points):
        return "–"
    mean = mean_of(points)
    if half is None:
        half = half_width(points)
    seeds = "one seed" if len(points) == 1 else len(points)
    if not half:  # one seed, or seeds that all agree
        return f"{mean:+.{digits}f} ({seeds})"
    return f"{mean:+.{digits}f} {interval(mean, half, digits)} ({seeds})"


def how_sure(variants, of=""):
    """Return the sentence about the intervals of these variants. of: " of TASK", if there are
    more."""
    if max(map(len, variants)) < 2:
        return f"One seed{of} has no interval."
    predicted = [kept for variant in variants for kept in variant.predicted]
    examples_kept = [examples is not None for variant in variants for examples in variant.examples]
    how = "as if errors were independent: predictions were not kept"
    if all(predicted):
        how = "paired"
    elif any(predicted):
        how = "paired where both kept their predictions, else as if errors were independent"
    test = ", on one test set"
    if any(examples_kept):
        where = "" if all(examples_kept) else ", where they are known,"
        test = f" and{where} test examples ({how})"
    return f"Intervals{of}: 95 %, over seeds (Welch){test}."
