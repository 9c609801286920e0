"""compare/statistics.py beside simulation: how often an interval holds the truth, and how often a
difference is significant that is not there, or is there.
test_made_tables.py compares its formulas with plain loops."""

import math
from pathlib import Path

import numpy as np
import pandas
import pytest
from conftest import RECORD, of_kind
from scipy.optimize import brentq
from scipy.special import ndtr

from compare import statistics as stats
from compare.comparisons import with_scores
from compare.runs import Run, row_of
from engine.folder import summary
from engine.targets import number_shares

# Standard deviations of a table's variants over seeds. The second is that of a demo.
TABLES = [1.0, 1.0, 1.0, 30.0], [0.0, 6.7, 0.8, 1.3], [1.0, 1.0, 1.0, 5.0], [0.3, 0.3, 1.0, 1.0]
# Of the variance of an example's difficulty: the share that both variants have in common, and the
# share that every seed draws anew; a seed's standard deviation besides.
KINDS = [(0.7, 0.2, 0.0), (0.7, 0.3, 0.1), (0.9, 0.7, 0.0), (0.5, 0.2, 0.3)]


@pytest.mark.parametrize("seeds", [2, 5])
def test_intervals_over_seeds_hold_the_truth(seeds):
    """In at least 93 of 100 tables, for the worst pair of variants, of any variances."""
    random, n = np.random.default_rng(0), 500
    for deviations in TABLES:
        hits = np.zeros(len(deviations) - 1)
        for _ in range(n):
            scores = np.array(deviations)[:, None] * random.normal(size=(len(deviations), seeds))
            halves = [stats.half_width(other, scores[0]) for other in scores[1:]]
            hits += abs(scores[1:].mean(1) - scores[0].mean()) <= halves
        assert hits.min() / n > 0.93 - 2 * math.sqrt(0.05 * 0.95 / n), deviations


# ---- The test set --------------------------------------------------------------------------------


def of_record(record, folder=Path("none")):
    """A variant of one run with this record, scored by balanced accuracy if it has counts."""
    row = row_of(RECORD | dict(start="scratch", test_accuracy=0.9) | record, folder)
    runs = pandas.DataFrame([row], columns=Run._fields)
    return with_scores(runs, True) if record.get("counts") else runs


def variant(kind, scores, examples):
    """A variant, a seed per score. examples: per seed arrays, one per class."""
    columns = dict(kind=kind, score=scores, predicted=True)
    return pandas.DataFrame(columns).assign(examples=pandas.Series(examples, dtype=object))


def drawn(random, sizes, seeds, kind, shift=0.0):
    """Two variants; what decides whether an example is right is a normal variable of mean 1.3, so
    that about 90 % are right, and less by shift in one of them."""
    common, anew, between = kind
    shared, n = random.normal(size=sum(sizes)), sum(sizes)
    variants = []
    for more in (shift, 0):
        own = math.sqrt(common) * shared + math.sqrt(1 - common) * random.normal(size=n)
        latent = math.sqrt(1 - anew) * own + math.sqrt(anew) * random.normal(size=(seeds, n))
        right = latent + between * random.normal(size=(seeds, 1)) + 1.3 + more > 0
        examples = [np.split(line, np.cumsum(sizes)[:-1]) for line in right]
        scores = [100 * np.mean([part.mean() for part in parts]) for parts in examples]
        variants.append(variant("class", scores, examples))
    return variants


def squared(random, n, seeds, kind):
    """Two variants of regression that are equally good; their errors have a heavy tail."""
    common, anew, between = kind
    y, shared, variants = random.normal(size=n), random.standard_t(4, n), []
    for _ in range(2):
        own = math.sqrt(common) * shared + math.sqrt(1 - common) * random.standard_t(4, n)
        errors = math.sqrt(1 - anew) * own + math.sqrt(anew) * random.normal(size=(seeds, n))
        variants.append(of_errors(y, 0.6 * errors * (1 + between * random.normal(size=(seeds, 1)))))
    return variants


def of_errors(y, errors):
    """A variant of regression with these errors, (seeds, n)."""
    sums = [number_shares(y, y + line) for line in errors]
    scores = [above.sum() / around.sum() for above, around in sums]
    examples = [
        [score + (above - score * around) / around.mean()]
        for score, (above, around) in zip(scores, sums)
    ]
    return variant("number", scores, examples)


def significant(pair):
    found = stats.gain(*pair)
    mean = abs(found.points.mean())
    return np.array([mean > found.half, mean > found.seeds])


CASES = ([60], 2), ([60], 10), ([100, 10], 3), ([500, 2], 2)


@pytest.mark.parametrize("sizes, seeds", CASES)
def test_equal_variants_rarely_differ(sizes, seeds):
    """In at most 5 of 100 tables, whatever the seeds and the examples have in common."""
    random, n = np.random.default_rng(0), 100
    shares = [
        sum(significant(drawn(random, sizes, seeds, kind))[0] for _ in range(n)) / n
        for kind in KINDS
    ]
    assert max(shares) < 0.05 + 2 * math.sqrt(0.05 * 0.95 / n) and np.mean(shares) < 0.05, shares


@pytest.mark.parametrize("n, seeds", [(59, 3), (400, 10)])
def test_r2_rarely_differs_between_equal_variants(n, seeds):
    """And often, by the seeds alone: the test set decides."""
    random, tables = np.random.default_rng(0), 100
    hits = [
        sum(significant(squared(random, n, seeds, kind)) for _ in range(tables)) / tables
        for kind in KINDS
    ]
    false, alone = np.max(hits, 0)
    assert false < 0.05 + 2 * math.sqrt(0.05 * 0.95 / tables) and alone > 0.15, hits


def test_a_true_difference_of_two_standard_errors_is_mostly_found():
    """Examples that both variants get wrong do not count."""
    random, n = np.random.default_rng(0), 100
    share = ndtr(1.3)
    wanted = share - 2 * math.sqrt(share * (1 - share) / 200)
    shift = brentq(lambda x: ndtr(1.3 + x) - wanted, -20, 0)
    assert sum(significant(drawn(random, [200], 5, KINDS[0], shift))[0] for _ in range(n)) > n / 2


def test_the_interval_of_one_score_holds_the_truth():
    """Of accuracy, and of R2, a ratio whose denominator varies with the test examples as well."""
    random, hits, tables = np.random.default_rng(0), np.zeros(2), 300
    for _ in range(tables):
        y, errors = random.normal(size=100), 0.6 * random.normal(size=(3, 100))
        pair = drawn(random, [200], 3, (1.0, 0.2, 0.1))[0], of_errors(y, errors)
        for i, truth in enumerate((100 * ndtr(1.3 / math.sqrt(1.01)), 1 - 0.36)):
            hits[i] += abs(pair[i].score.mean() - truth) <= stats.half_width_of_mean(pair[i])
    assert (hits / tables > 0.92).all(), hits


@pytest.mark.parametrize("in_result", [True, False])
def test_kept_predictions_are_read_sorted_by_class(in_result, tmp_path):
    """As bits of result.json, else predictions.npz. A run that lost examples is not paired."""
    random = np.random.default_rng(0)
    y, found = random.integers(0, 3, (2, 50))
    kept = summary(of_kind("class", 3), y, found.astype(float))
    assert "right" not in summary(of_kind("number"), y, found)
    if not in_result:
        np.savez(tmp_path / "predictions.npz", y=y, prediction=found.astype(float))
        kept["right"] = None
    run = of_record(kept, tmp_path)
    parts = [(found == y)[y == label].astype(int).tolist() for label in range(3)]
    assert [part.tolist() for part in run.examples.iloc[0]] == parts
    other = run.assign(examples=[[part[1:] for part in run.examples.iloc[0]]])
    assert stats.half_width_of_test(run, other) > stats.half_width_of_test(run, run)
