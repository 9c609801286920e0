"""compare/statistics.py against simulation: how often an interval holds the truth, and how often a
difference is claimed that is not there, or is there. `python -m tests.test_statistics` prints the
whole table (ten minutes)."""

import base64
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
from conftest import of_kind
from scipy.optimize import brentq
from scipy.special import ndtr, stdtrit

from compare import comparisons
from compare import statistics as stats
from compare.runs import Run, row_of
from engine.folder import summary

# Standard deviations of a table's variants over seeds. The fourth from the end is that of a demo.
TABLES = [
    [1.0] * 2,
    [1.0] * 4,
    [1.0] * 12,
    [1.0] * 11 + [30.0],
    [0.0, 1.0, 1.0, 1.0],
    [0.0, 6.7, 0.8, 1.3],
    [1.0, 1.0, 1.0, 5.0],
    [1.0, 1.0, 1.0, 3.0],
    [0.3, 0.3, 1.0, 1.0],
]
# Test sets: examples of each class. With more than one class the score is balanced accuracy.
SETS = {
    "60": [60],
    "200": [200],
    "2,000": [2000],
    "100 and 10": [100, 10],
    "500 and 2": [500, 2],
    "300, 30, 3": [300, 30, 3],
    "35 classes of 20": [20] * 35,
}
# Of the variance of an example's difficulty: the share that both variants have in common, and the
# share that every seed draws anew; a seed's standard deviation besides.
KINDS = [(0.7, 0.2, 0.0), (0.7, 0.3, 0.1), (0.9, 0.7, 0.0), (0.5, 0.2, 0.3)]


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
@pytest.mark.parametrize("deviations", TABLES, ids=str)
def test_intervals_hold_the_truth(deviations, seeds):
    """In at least 93 of 100 tables, for the worst pair of variants, however differently they
    vary."""
    random, hits, n = np.random.default_rng(0), np.zeros(len(deviations)), 1000
    for _ in range(n):
        scores = np.array(deviations)[:, None] * random.normal(size=(len(deviations), seeds))
        for i in range(1, len(deviations)):
            hits[i] += abs(scores[i].mean() - scores[0].mean()) <= stats.half_width(
                scores[i], scores[0]
            )
    assert hits[1:].min() / n > 0.93 - 2 * math.sqrt(0.05 * 0.95 / n)


def test_half_of_an_interval_by_hand():
    """Equal variances: t of 4 degrees of freedom, 2.776, times sqrt(1/3 + 1/3). (Once they counted
    as one estimate with 2.) If one variance is 0: t of 2 degrees of freedom, 4.303."""
    assert stats.half_width([1, 2, 3], [5, 6, 7]) == pytest.approx(2.776 * (2 / 3) ** 0.5, 1e-3)
    assert (
        stats.half_width([1, 2, 3], [5, 5, 5])
        == pytest.approx(4.303 / 3**0.5, 1e-3)
        == stats.half_width([1, 2, 3])
    )
    assert stats.half_width([1], [5, 6]) == 0 == stats.half_width([5, 5], [6, 6])


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_a_mean_of_recalls_varies_as_accuracy_does_if_classes_are_alike(classes):
    """Balanced accuracy is then accuracy, and so is its interval: alone, and beside another
    variant."""
    rng, n = np.random.default_rng(0), 400
    right = [
        np.concatenate([rng.permutation(np.arange(n) < share * n) for _ in range(classes)])
        for share in (0.8, 0.7)
    ]
    several, single = (
        [variant(made(line, [n] * classes, 0)) for line in right],
        [variant(made(line, [n * classes], 0)) for line in right],
    )
    for pick in (lambda one, other: (one,)), (lambda one, other: (one, other)):
        assert stats.half_width_of_test(*pick(*several)) == pytest.approx(
            stats.half_width_of_test(*pick(*single)), rel=0.05
        )


# ---- the test set --------------------------------------------------------------------------------


def made(right, sizes, seed):
    """The record of a run that predicted these examples rightly, (n,), sorted by class."""
    y = np.repeat(np.arange(len(sizes)), sizes)
    kind = of_kind("class", len(sizes) + 1)
    run = summary(kind, y, np.where(right, y, (y + 1) % (len(sizes) + 1)))
    return run | dict(seed=seed, test_accuracy=float(right.mean()))


RECORD = dict(
    task="t", model="m", objective="none", start="scratch", changed={}, steps=1, seconds=1
)


def variant(*records, folder=Path("none")):
    """A variant of runs with these records, by seed. If they have several classes, the score is
    balanced accuracy."""
    rows = [row_of(RECORD | dict(seed=i) | record, folder) for i, record in enumerate(records)]
    runs = pandas.DataFrame(rows, columns=Run._fields).set_index("seed", drop=False)
    counts = [(record.get("counts") or {}).get("labels", ()) for record in records]
    balanced = all(np.count_nonzero(labels) > 1 for labels in counts)
    return comparisons.with_scores(runs, True) if balanced else runs


def drawn(random, sizes, seeds, mean, shift, kind):
    """Two variants {seed: run}; what decides whether an example is right is a normal variable of
    this mean."""
    common, anew, between = kind
    shared, n = random.normal(size=sum(sizes)), sum(sizes)
    variants = []
    for more in (shift, 0):
        own = math.sqrt(common) * shared + math.sqrt(1 - common) * random.normal(size=n)
        latent = math.sqrt(1 - anew) * own + math.sqrt(anew) * random.normal(size=(seeds, n))
        latent += between * random.normal(size=(seeds, 1)) + mean + more
        variants.append(variant(*(made(line > 0, sizes, i) for i, line in enumerate(latent))))
    return variants


def before(after, scratch, found):
    """The rule that this one replaced: a pooled standard deviation, and both test errors as if
    independent."""
    variance = np.mean([np.var(side.score, ddof=1) for side in (after, scratch)])
    seeds, test = len(after), 0
    for side in (after, scratch):
        counts = [record["counts"] for record in side.record]
        for group in zip(*(count["right"] for count in counts), counts[0]["labels"]):
            if group[-1]:
                share = np.mean(group[:-1]) / group[-1]
                test += share * (1 - share) / group[-1]
        k = sum(n > 0 for n in counts[0]["labels"])
    return math.hypot(
        stdtrit(2 * seeds - 2, 0.975) * math.sqrt(2 * variance / seeds), 196 * math.sqrt(test) / k
    )


def claims(
    sizes,
    seeds,
    errors,
    kind,
    tables,
    mean=1.3,
    rules=(before, lambda after, scratch, found: found.half),
):
    """Share of tables in which each rule claims a difference. errors: the true difference, in
    standard errors of a score that are due to the test set. mean 1.3: about 90 % are right."""
    random, hits = np.random.default_rng(0), np.zeros(len(rules))
    spread = math.sqrt(1 + kind[2] ** 2)  # of the latent variable over everything
    share = ndtr(mean / spread)
    wanted = share - errors * math.sqrt(sum(share * (1 - share) / n for n in sizes)) / len(sizes)
    shift = brentq(lambda x: ndtr((mean + x) / spread) - wanted, -20, 0) if errors else 0
    for _ in range(tables):
        after, scratch = drawn(random, sizes, seeds, mean, shift, kind)
        found = stats.gain(after, scratch)
        hits += [abs(found.points.mean()) > rule(after, scratch, found) for rule in rules]
    return hits / tables


@pytest.mark.parametrize("sizes", ["60", "200", "100 and 10", "500 and 2"])
@pytest.mark.parametrize("seeds", [2, 3, 10])
def test_equal_variants_rarely_differ(sizes, seeds):
    """In at most 5 of 100 tables, whatever the seeds and the examples have in common."""
    n = 200
    found = [claims(SETS[sizes], seeds, 0, kind, n)[1] for kind in KINDS]
    assert max(found) < 0.05 + 2 * math.sqrt(0.05 * 0.95 / n) and np.mean(found) < 0.05


def test_a_true_difference_is_found_more_often_than_before():
    """Of two standard errors: examples that both variants get wrong do not count any more."""
    old, new = claims([200], 5, 2, KINDS[0], 200)
    assert new > 0.5 > old


def squared(random, n, seeds, kind, more=0.0):
    """Two variants of regression, errors with a heavy tail; the first one's squared errors are
    larger by the share `more`."""
    common, anew, between = kind
    y, shared = random.normal(size=n), random.standard_t(4, n)
    variants = []
    for scale in (math.sqrt(1 + more), 1):
        own = math.sqrt(common) * shared + math.sqrt(1 - common) * random.standard_t(4, n)
        errors = (
            0.6
            * scale
            * (math.sqrt(1 - anew) * own + math.sqrt(anew) * random.normal(size=(seeds, n)))
        )
        errors = errors * (1 + between * random.normal(size=(seeds, 1)))
        records = []
        for line in errors:
            r2 = float(1 - np.square(line).mean() / y.var())
            records.append(summary(of_kind("number"), y, y + line) | dict(test_r2=r2))
        variants.append(variant(*(record | dict(test_examples=n) for record in records)))
    return variants


def claims_of_r2(n, seeds, kind, tables, more=0.0):
    """Share of tables with a claim: by the seeds alone, and by this rule."""
    random, hits = np.random.default_rng(0), np.zeros(2)
    for _ in range(tables):
        found = stats.gain(*squared(random, n, seeds, kind, more))
        mean = abs(found.points.mean())
        hits += [mean > found.seeds, mean > found.half]
    return hits / tables


@pytest.mark.parametrize("n, seeds", [(59, 3), (59, 10), (400, 3), (400, 10)])
def test_r2_rarely_differs_between_equal_variants(n, seeds):
    """And often, by the seeds alone: the test set decides."""
    tables = 300
    alone, false = np.array([claims_of_r2(n, seeds, kind, tables) for kind in KINDS]).max(0)
    assert false < 0.05 + 2 * math.sqrt(0.05 * 0.95 / tables) and alone > 0.15


def test_the_interval_of_one_r2_holds_the_truth():
    """R2 is a ratio, whose denominator varies with the test examples as well."""
    random, hits, tables = np.random.default_rng(0), 0, 400
    for _ in range(tables):
        y = random.normal(size=100)
        runs = []
        for _ in range(3):
            line = 0.6 * random.normal(size=100)
            r2 = float(1 - np.square(line).mean() / y.var())
            runs.append(
                summary(of_kind("number"), y / 4, (y + line) / 4)
                | dict(test_r2=r2, test_examples=100)
            )
        runs = variant(*runs)
        hits += abs(runs.score.mean() - (1 - 0.36)) <= stats.half_width_of_mean(runs)
    assert hits / tables > 0.92


def test_the_interval_of_one_accuracy_holds_the_truth():
    random, hits, tables = np.random.default_rng(0), 0, 400
    for _ in range(tables):
        runs, _ = drawn(random, [200], 3, 1.3, 0, (1.0, 0.2, 0.1))
        truth = 100 * ndtr(1.3 / math.sqrt(1.01))
        hits += abs(runs.score.mean() - truth) <= stats.half_width_of_mean(runs)
    assert hits / tables > 0.92


def test_larger_test_sets_are_read_from_their_predictions(tmp_path):
    """Which result.json does not hold; and a run that lost examples is not paired."""
    y, found = np.arange(6) % 3, np.array([0, 1, 0, 2, 1, 2])
    np.savez(tmp_path / "predictions.npz", y=y, prediction=found.astype(float))
    run = variant(dict(test_examples=6, test_accuracy=4 / 6, right=None), folder=tmp_path)
    assert [part.tolist() for part in run.examples.iloc[0]] == [[1, 0, 1, 1, 0, 1]]
    assert stats.half_width_of_test(run, variant(made(np.ones(5, bool), [5], 0))) > 0


def test_two_examples_of_a_class_decide_nothing():
    """Right in all three seeds and wrong in all three: +50 points of balanced accuracy."""
    some = np.repeat([True, False], [100, 2])
    scratch, after = (
        variant(*(made(right, [100, 2], seed) for seed in range(3)))
        for right in (some, np.ones(102, bool))
    )
    found = stats.gain(after, scratch)
    assert [*found.points] == [50.0, 50.0, 50.0] and found.seeds == 0 and found.half > 50


def test_the_formula_of_a_class_by_hand():
    """Of ten examples one run gets 8 right, another 5 of these: three only one. (3 + 1) / 12 - (3 /
    12)^2, over 10."""
    one, other = (np.array([np.arange(10) < n], float) for n in (8, 5))
    assert stats.of_class(one, other) == pytest.approx(
        ((4 / 12 - (3 / 12) ** 2) * 12 / 11 / 10, 11)
    )
    # (right + 1) / (n + 2)
    assert stats.of_class(one, []) == pytest.approx((9 / 12 * 3 / 12 * 12 / 11 / 10, 11))
    assert stats.of_class(one, one)[0] == pytest.approx(1 / 11 / 10)
    two = np.array([np.arange(10) < 8, np.arange(10) < 6], float)  # two examples vary
    d, within = two.mean(0), (2 * 0.5 / 10) / 2
    assert stats.of_class(two, [])[0] == pytest.approx(
        (((np.square(d).sum() + 1) / 12 - ((d.sum() + 1) / 12) ** 2) * 12 / 11 - within) / 10
    )


def test_runs_without_predictions_are_compared_as_if_independent():
    """And wider, when they err on the same examples."""
    right = np.arange(200) < 180
    kept = [made(right, [200], 0), made(right, [200], 1)]
    lost = [
        {name: value for name, value in run.items() if name not in ("right", "counts")}
        for run in kept
    ]
    share = 181 / 202
    wide = 100 * float(stdtrit(402, 0.975)) * math.sqrt(2 * share * (1 - share) * 202 / 201 / 200)
    (kept, other), (lost, gone) = ([variant(one) for one in runs] for runs in (kept, lost))
    assert stats.half_width_of_test(lost, gone) == pytest.approx(wide)
    assert stats.half_width_of_test(kept, gone) == pytest.approx(wide)  # one kept its own
    assert stats.half_width_of_test(kept, other) < wide / 3
    assert stats.half_width_of_test(variant(dict(test_r2=1.0))) == 0


def test_kept_bits_are_those_of_the_examples():
    random = np.random.default_rng(0)
    y, found = random.integers(0, 3, 50), random.integers(0, 3, 50)
    run = summary(of_kind("class", 3), y, found.astype(float)) | dict(
        test_examples=50, test_accuracy=float(np.mean(y == found))
    )
    examples = variant(run).examples.iloc[0]
    assert [part.tolist() for part in examples] == [
        [int(guess == c) for label, guess in zip(y, found) if label == c] for c in range(3)
    ]
    assert len(base64.b64decode(run["right"])) == 7 and "right" not in summary(
        of_kind("number"), y, found
    )


def main():
    tables = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    print(
        "R2, % of tables with a claim: by the seeds alone / now. Mean over the kinds, and the "
        "largest; squared errors that are "
        "a fifth larger, then a half.\n\n| test examples | seeds | false | largest | a fifth | a "
        "half |\n|---|---|---|---|---|---|"
    )
    for n, seeds in itertools.product((59, 400), (2, 3, 5, 10)):
        found = np.array(
            [
                [claims_of_r2(n, seeds, kind, tables, more) for kind in KINDS]
                for more in (0, 0.2, 0.5)
            ]
        )
        cells = [
            " / ".join(f"{100 * one:.1f}" for one in pair)
            for pair in (found[0].mean(0), found[0].max(0), found[1].mean(0), found[2].mean(0))
        ]
        print(f"| {n} | {seeds} | {' | '.join(cells)} |", flush=True)
    print(
        "\nShare of tables with a claim, %: before / now. Mean over four kinds of variants, and "
        "the largest.\n\n"
        "| test set | seeds | false | largest | one standard error | two "
        "|\n|---|---|---|---|---|---|"
    )
    for name, sizes in SETS.items():
        for seeds in (2, 3, 5, 10):
            found = np.array(
                [
                    [claims(sizes, seeds, errors, kind, tables) for kind in KINDS]
                    for errors in (0, 1, 2)
                ]
            )
            cells = [
                " / ".join(f"{100 * one:.1f}" for one in pair)
                for pair in (found[0].mean(0), found[0].max(0), found[1].mean(0), found[2].mean(0))
            ]
            print(f"| {name} | {seeds} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
