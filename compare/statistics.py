"""Differences between variants, and how sure they are.

Intervals (95 %, Student's t) take one standard deviation for all variants of a table, pooled over their seeds, where
variants scatter alike: three seeds alone leave two degrees of freedom, which widens an interval by a half. Where they
do not (Bartlett's test, or a variant whose seeds all agree), each has its own. With ten seeds or more, gains are paired
by seed. A variant that scatters three times as much as the others may pass the test: its intervals hold the truth in
about 87 of 100 tables, not in 95 (tests/test_compare.py).
"""
import math
import statistics
from collections import defaultdict, namedtuple

import numpy as np
from scipy.special import stdtrit

MANY = 10                                  # seeds, from which on gains are paired
ALIKE = 0.1                                # probability below which variants do not scatter alike
Estimate = namedtuple("Estimate", "variance freedom")


def pooled(samples):
    """[[score]] -> the Estimate of their common variance around the mean of each sample."""
    freedom = sum(len(sample) - 1 for sample in samples if sample)
    squares = sum(float(np.var(sample, ddof=1)) * (len(sample) - 1) for sample in samples if len(sample) > 1)
    return Estimate(squares / freedom if freedom else 0.0, freedom)


def estimates(variants):
    """{name: {seed: score}} -> {name: Estimate}: one for all, pooled, where variants scatter alike, else each its
    own."""
    from scipy.stats import bartlett
    samples = [[*seeds.values()] for seeds in variants.values()]
    several = [sample for sample in samples if len(sample) > 1]
    spread = [float(np.var(sample)) for sample in several]
    if any(spread) and len(several) > 1 and (not all(spread) or bartlett(*several).pvalue < ALIKE):
        return {name: pooled([sample]) for name, sample in zip(variants, samples)}
    return dict.fromkeys(variants, pooled(samples))


def half_width(*parts):
    """Of the 95 % interval of a mean, or of a difference of means: for each mean its Estimate and the number of seeds.
    Welch's degrees of freedom where the estimates are not one. 0 where there are none."""
    shares = defaultdict(float)
    for estimate, n in parts:
        shares[estimate] += estimate.variance / n
    if any(estimate.freedom < 1 for estimate in shares):
        return 0.0
    square = sum(shares.values())
    freedom = square ** 2 / sum(share ** 2 / estimate.freedom for estimate, share in shares.items()) if square else 1
    return float(stdtrit(freedom, 0.975)) * math.sqrt(square)


def half_width_of(values):
    """Of the mean of these values alone, differences paired by seed say."""
    return half_width((pooled([values]), len(values)))


def minus(after, before):
    """{seed: after - before} of the seeds that both have."""
    return {seed: after[seed] - before[seed] for seed in sorted(before.keys() & after.keys())}


def mean_std(found, digits=1):
    """{seed: score} as '61.2 ± 0.8', as the number alone where one seed gives no spread, or as a dash."""
    if not found:
        return "–"
    mean = f"{statistics.mean(found.values()):.{digits}f}"
    return mean if len(found) == 1 else f"{mean} ± {statistics.stdev(found.values()):.{digits}f}"


def signed(found, digits=1, half=None):
    """{seed: difference} as '+3.7 [+2.2, +5.2] (3)', mean, interval and number of seeds; '+3.7 (one seed)'; a dash.
    half: of the interval, if it is not that of these differences alone."""
    if not found:
        return "–"
    mean, half = statistics.mean(found.values()), half_width_of([*found.values()]) if half is None else half
    if not half:                                                 # one seed, or seeds that all agree
        return f"{mean:+.{digits}f} ({'one seed' if len(found) == 1 else len(found)})"
    return f"{mean:+.{digits}f} [{mean - half:+.{digits}f}, {mean + half:+.{digits}f}] ({len(found)})"


def gain(variants, one, other, found):
    """Of variants {name: {seed: score}} with their estimates: one minus other -> {seed: difference}, half the
    interval."""
    differences = minus(variants.get(one, {}), variants.get(other, {}))
    n = len(differences)
    if not n or n >= MANY:
        return differences, half_width_of([*differences.values()]) if n else 0.0
    return differences, half_width((found[one], n), (found[other], n))


def how_sure(variants, found, digits=1, of=""):
    """The sentence about a table's intervals."""
    counts = {len(variant) for variant in variants.values() if variant}
    common = [name for name in variants if variants[name] and found[name].freedom]
    if not common:
        return f"One seed{of} has no interval."
    if not any(estimate.variance for estimate in found.values()):
        return f"Seeds{of} do not differ, so there are no intervals."
    one, *others = {found[name] for name in common}
    text = f"Intervals{of}: 95 %, over seeds on one test set, "
    text += ("each row uses its own standard deviation (Welch), because variances differ" if others else
             f"with one standard deviation for all rows, {math.sqrt(one.variance):.{digits}f}, pooled with "
             f"{one.freedom} degrees of freedom")
    return text + (f"; gains over {MANY} seeds or more are paired by seed." if max(counts) >= MANY else ".")
