"""Differences between variants, and how sure they are.

Intervals are 95 %. They answer two questions, whose halves are added in quadrature:

- Would other seeds agree? Welch's t interval: each variant has its own standard deviation, so one
  that varies more does
  not spoil the others. Beside a standard deviation that a whole table shares, the interval is 1.2
  to 1.5 times as wide with three seeds, 1.8 to 3.4 times with two, and less than 1.2 times with
  five or more.
- Would other test examples agree? Both variants were tested on the same examples, so only those
  count on which they
  differ (paired): the variance over examples of the difference of both means over seeds, less what
  the seeds explain. Half an example is added for each of the four outcomes, both right, one right,
  the other, both wrong (Agresti and Min 2005). Without these, a class whose two test examples are
  right would have no variance. Runs without kept predictions are compared as if they erred
  independently, which is wider; other scores than accuracy then have no such part.

By simulation (tests/test_statistics.py): two variants that are equally good differ significantly in
at most 5 of 100 tables, with 2 to 10 seeds and with rare classes; in R2, if their errors have
similar tails."""

import math
import statistics
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit

from compare.reading import examples, kind_of, predicted, scores, units


class Gain(NamedTuple):
    """A difference of two variants."""

    points: dict  # {seed: difference} of common seeds
    seeds: float  # half of the interval due to seeds; 0 if there is one seed
    test: float  # the same, due to the test examples

    @property
    def half(self):
        """Half of the 95 % interval; 0 with one seed, which has none."""
        return math.hypot(self.seeds, self.test) if len(self.points) > 1 else 0.0


def t_interval(*parts):
    """Return half of the 95 % interval of a sum of independent parts: (variance, degrees of
    freedom) each."""
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
    n, more = after.shape[1], 2 * unit  # added to a mean: one right, one wrong
    difference = after.mean(0) - (before.mean(0) if len(before) else 0)
    mean = (difference.sum() + (0 if len(before) else unit)) / (n + more)
    variance = (np.square(difference).sum() + unit) / (n + more) - mean**2
    variance *= (n + more) / (n + more - 1)
    variance -= sum(
        side.var(0, ddof=1).mean() / len(side) for side in (after, before) if len(side) > 1
    )
    return max(variance, unit / (n + more)) / n, n + more - 1


def half_width_of_test(after, before=()):
    """Return half of the 95 % interval of the mean score of runs, or of its difference from other
    runs, that is due to the test set. after, before: runs on the same test set. 0 if nothing is
    known of its examples."""
    runs, parts = [*after, *before], []
    known = [examples(run) for run in runs]  # per run: a list of arrays, one per class
    if None in known:
        return 0.0
    share, alike = kind_of(runs[0]) != "class", len({tuple(map(len, each)) for each in known}) == 1
    unit, paired = 0 if share else 1, alike and all(predicted(run) is not None for run in runs)
    for some in zip(*known):
        if paired:
            one, other = some[: len(after)], some[len(after) :]
            parts.append(of_class(np.array(one, float), np.array(other, float), unit))
        else:  # as if they erred independently
            each_run = [of_class(np.array([each], float), [], unit) for each in some]
            parts += [
                np.mean(side, 0)
                for side in (each_run[: len(after)], each_run[len(after) :])
                if side
            ]
    return units(runs[0]) / len(known[0]) * t_interval(*parts)


def half_width_of_mean(runs):
    """Return half of the 95 % interval of the mean score of runs [run]; 0 for one run."""
    seeds = half_width([run["score"] for run in runs])
    return math.hypot(seeds, half_width_of_test(runs)) if len(runs) > 1 else 0.0


def gain(after, before):
    """Return the Gain of runs {seed: run} over others, in common seeds."""
    points = minus(scores(after), scores(before))
    after, before = ([side[seed] for seed in points] for side in (after, before))
    return Gain(
        points,
        half_width(*([run["score"] for run in side] for side in (after, before))),
        half_width_of_test(after, before) if points else 0.0,
    )


def minus(after, before):
    """Return {seed: after - before} for the seeds that both have."""
    return {seed: after[seed] - before[seed] for seed in sorted(before.keys() & after.keys())}


def mean_std(found, digits=1):
    """Format {seed: score} as '61.2 ± 0.8', as '61.2' if there is one seed, or as a dash if there
    is none."""
    if not found:
        return "–"
    mean = f"{statistics.mean(found.values()):.{digits}f}"
    return mean if len(found) == 1 else f"{mean} ± {statistics.stdev(found.values()):.{digits}f}"


def signed(found, digits=1, half=None):
    """Format {seed: difference} as '+3.7 [+2.2, +5.2] (3)' (mean, interval, number of seeds), '+3.7
    (one seed)' or a dash. half: of the interval; None: of the interval that follows from these
    differences only."""
    if not found:
        return "–"
    mean, half = (
        statistics.mean(found.values()),
        half_width([*found.values()]) if half is None else half,
    )
    if not half:  # one seed, or seeds that all agree
        return f"{mean:+.{digits}f} ({'one seed' if len(found) == 1 else len(found)})"
    return (
        f"{mean:+.{digits}f} [{mean - half:+.{digits}f}, {mean + half:+.{digits}f}] ({len(found)})"
    )


def how_sure(variants, of=""):
    """Return the sentence about the intervals of a table of these [{seed: run}]. of: " of TASK", if
    there are more."""
    runs = [run for seeds in variants for run in seeds.values()]
    if max(map(len, variants)) < 2:
        return f"One seed{of} has no interval."
    kept, known = (sum(what(run) is not None for run in runs) for what in (predicted, examples))
    how = (
        "paired"
        if kept == len(runs)
        else "as if errors were independent: predictions were not kept"
        if not kept
        else "paired where both kept their predictions, else as if errors were independent"
    )
    test = (
        f" and test examples ({how})"
        if known == len(runs)
        else ", on one test set"
        if not known
        else (f" and, where they are known, test examples ({how})")
    )
    return f"Intervals{of}: 95 %, over seeds (Welch){test}."
