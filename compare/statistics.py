"""Differences between variants, and how sure they are.

Intervals are 95 %, by Student's t. If variances are alike, all variants of a table share one standard deviation, pooled
over their seeds. (Three seeds of one variant leave two degrees of freedom, which would widen its interval by half.) If
variances differ (Bartlett's test, or a variant whose seeds all agree), each variant uses its own. With ten seeds or
more, gains are paired by seed. Bartlett's test may miss a variant with three times the others' standard deviation; its
intervals then hold the truth in about 87 of 100 tables instead of 95 (tests/test_compare.py).
"""
import math
import statistics
from collections import defaultdict, namedtuple

import numpy as np
from scipy.special import stdtrit

MANY = 10                                  # from this number of seeds on, gains are paired
ALIKE = 0.1                                # p-value of Bartlett's test below which variances differ
Estimate = namedtuple("Estimate", "variance freedom")


def pooled(samples):
    """Return the Estimate of the common variance of samples [[score]], each around its own mean."""
    freedom = sum(len(sample) - 1 for sample in samples if sample)
    squares = sum(float(np.var(sample, ddof=1)) * (len(sample) - 1) for sample in samples if len(sample) > 1)
    return Estimate(squares / freedom if freedom else 0.0, freedom)


def estimates(variants):
    """Estimate variances: {name: {seed: score}} -> {name: Estimate}. All variants share one pooled estimate if their
    variances are alike; else each has its own."""
    from scipy.stats import bartlett
    samples = [[*seeds.values()] for seeds in variants.values()]
    several = [sample for sample in samples if len(sample) > 1]
    spread = [float(np.var(sample)) for sample in several]
    if any(spread) and len(several) > 1 and (not all(spread) or bartlett(*several).pvalue < ALIKE):
        return {name: pooled([sample]) for name, sample in zip(variants, samples)}
    return dict.fromkeys(variants, pooled(samples))


def half_width(*parts):
    """Return half of the 95 % interval of a mean or of a difference of means. parts: each mean's Estimate and number of
    seeds. Different estimates use Welch's degrees of freedom. 0 if an estimate has no degrees of freedom."""
    shares = defaultdict(float)
    for estimate, n in parts:
        shares[estimate] += estimate.variance / n
    if any(estimate.freedom < 1 for estimate in shares):
        return 0.0
    square = sum(shares.values())
    freedom = square ** 2 / sum(share ** 2 / estimate.freedom for estimate, share in shares.items()) if square else 1
    return float(stdtrit(freedom, 0.975)) * math.sqrt(square)


def half_width_of(values):
    """Return half of the 95 % interval of the mean of these values, such as differences paired by seed."""
    return half_width((pooled([values]), len(values)))


def minus(after, before):
    """Return {seed: after - before} for the seeds that both have."""
    return {seed: after[seed] - before[seed] for seed in sorted(before.keys() & after.keys())}


def mean_std(found, digits=1):
    """Format {seed: score} as '61.2 ± 0.8', as '61.2' if there is one seed, or as a dash if there is none."""
    if not found:
        return "–"
    mean = f"{statistics.mean(found.values()):.{digits}f}"
    return mean if len(found) == 1 else f"{mean} ± {statistics.stdev(found.values()):.{digits}f}"


def signed(found, digits=1, half=None):
    """Format {seed: difference} as '+3.7 [+2.2, +5.2] (3)' (mean, interval, number of seeds), '+3.7 (one seed)' or a
    dash. half: of the interval; None: of the interval that follows from these differences only."""
    if not found:
        return "–"
    mean, half = statistics.mean(found.values()), half_width_of([*found.values()]) if half is None else half
    if not half:                                                 # one seed, or seeds that all agree
        return f"{mean:+.{digits}f} ({'one seed' if len(found) == 1 else len(found)})"
    return f"{mean:+.{digits}f} [{mean - half:+.{digits}f}, {mean + half:+.{digits}f}] ({len(found)})"


def gain(variants, one, other, found):
    """Return one minus other as {seed: difference}, and half of its interval. variants: {name: {seed: score}}; found:
    their estimates."""
    differences = minus(variants.get(one, {}), variants.get(other, {}))
    n = len(differences)
    if not n or n >= MANY:
        return differences, half_width_of([*differences.values()]) if n else 0.0
    return differences, half_width((found[one], n), (found[other], n))


def how_sure(variants, found, digits=1, of=""):
    """Return the sentence about a table's intervals."""
    counts = {len(variant) for variant in variants.values() if variant}
    common = [name for name in variants if variants[name] and found[name].freedom]
    if not common:
        return f"One seed{of} has no interval."
    if not any(estimate.variance for estimate in found.values()):
        return f"Seeds{of} do not differ, so there are no intervals."
    one, *others = {found[name] for name in common}
    text = f"Intervals{of}: 95 %, over seeds on one test set; "
    text += ("each row uses its own standard deviation (Welch), because variances differ" if others else
             f"one standard deviation for all rows, {math.sqrt(one.variance):.{digits}f}, pooled with "
             f"{one.freedom} degrees of freedom")
    return text + (f"; gains over {MANY} seeds or more are paired by seed." if max(counts) >= MANY else ".")
