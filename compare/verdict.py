"""The verdict on a comparison: what its table shows, in at most five kinds of sentences.

1. Does SPT, or joint training, change the score of a model?
2. Does the best network score more than the linear model?
3. Which networks have learned nothing?
4. Has pretraining learned more than interpolation?
5. Would longer runs score more?"""

import math
from typing import NamedTuple

import numpy as np

from compare.comparisons import constant_of, in_words, trivial
from compare.runs import evaluations, firsts_of, rows_of, validation_field
from compare.statistics import gain, half_width, half_width_of_test, mean_of, t_interval
from tasks import declared

CHANGE = "{points:+.{digits}f} {unit}"
INTERVAL = "[{low:+.{digits}f}, {high:+.{digits}f}], {seeds} seeds"
SCORE = "{score:.{digits}f}{percent}"
LINEAR = "{linear:.{digits}f}{percent}"
# What a Verdict is in words.
WORDS = {
    "gains": f"**{{line}} gains by {{by}}**: {CHANGE} {INTERVAL}.",
    "loses": f"**{{line}} loses by {{by}}**: {CHANGE} {INTERVAL}.",
    "unknown": f"**{{name}}: {{reason}}** ({CHANGE}), so significance is unknown.",
    "no difference": f"**{{name}}: no significant difference**: {CHANGE} {INTERVAL};",
    "ceiling": "from scratch it is already at the ceiling.",
    "equal": "the scores are equal.",
    "noise": (
        "noise from {n:,} test examples reaches ±{test:.{digits}f} {unit}, so more seeds would not "
        "settle it."
    ),
    "seeds": "if the difference stays, {enough} seeds would settle it.",
    "linear wins": (
        f"**The linear model is ahead of every network**: it scores {LINEAR}, and {{network}} "
        f"{SCORE}."
    ),
    "only": f"{{network}} scores {SCORE} on test,",
    "chosen": f"Validation chooses {{network}}. It scores {SCORE} on test,",
    "tied": (f"Validation cannot choose between {{networks}}. The first scores {SCORE} on test,"),
    "beside linear": f"**{{relation}}** the linear model ({LINEAR}).",
    "beside linear, unknown": f"the linear model {LINEAR}; which is better is unknown.",
    "behind linear": "Behind the linear model: {networks_behind}.",
    "one class": "**{network} predicts only one class** in {single} of {seeds} seeds.",
    "trivial": (
        "Not significantly better than the {trivial} ({constant:.{digits}f}{percent}): {networks}."
    ),
    "interpolation": (
        "Linear interpolation between visible neighbours explains {line:.1f} % of the variance of "
        "hidden samples (validation); {models}."
    ),
    "no more than interpolation": "**Pretraining has not learned more than interpolation.**",
    "improving": ("**Still improving at the end**: {networks}. Longer runs{how} may score more."),
}


class Verdict(NamedTuple):
    """What a table shows in one respect."""

    kinds: tuple  # keys of WORDS
    facts: dict  # the numbers and names of their words


def too_few(comparison):
    """Return the sentence that test examples are too few to decide anything, in a list; [] if they
    are not."""
    n = comparison.test_examples
    if n >= 30:
        return []
    # half of the 95 % interval, in points of an accuracy of 50 %, or of R2 = 0.5
    half, least, unit = 98 / n**0.5, "±5 needs about 400", " points"
    if comparison.r2:
        half, least, unit = 1.39 / n**0.5, "±0.1 needs about 200", " of R2"
    moves = f"others would move a score by ±{half:.{comparison.digits}f}{unit} (95 %)"
    return [f"**{n} test examples decide nothing**: {moves}; {least}."]


def sentences(comparison):
    """Return the sentences of all verdicts on a comparison; none if test examples are too few."""
    if too_few(comparison):
        return []
    verdicts = [verdict for line in comparison.lines for verdict in of_line(comparison, line)]
    for respect in (beside_linear, nothing_learned, denoised, unfinished):
        verdicts += respect(comparison)
    unit, percent = ("R2", "") if comparison.r2 else ("points", " %")
    shared = dict(digits=comparison.digits, unit=unit, percent=percent)
    texts = [(" ".join(WORDS[kind] for kind in kinds), facts) for kinds, facts in verdicts]
    return [text.format(**shared, **facts) for text, facts in texts]


# ---- 1. SPT and joint training against scratch ---------------------------------------------------


def of_line(comparison, line):
    """Return [Verdict] on a model: SPT, and joint training if significant or without SPT."""
    spt, joint = (outcome(comparison, line, start) for start in ("spt", "joint"))
    pair = {(line, "spt"), (line, "scratch")}
    if pair <= comparison.variants.keys() and joint and joint.kinds[0] not in ("gains", "loses"):
        joint = None
    return [verdict for verdict in (spt, joint) if verdict]


def outcome(comparison, line, start):
    """Return the Verdict on what SPT or joint training changed; None if no seed has both."""
    after = comparison.of(line, start)
    scratch = comparison.of(line, "scratch")
    gained = gain(after, scratch)
    if not len(gained.points):
        return None
    mean = mean_of(gained.points)
    seeds = len(gained.points)
    by = {"spt": "SPT", "joint": "joint training"}[start]
    name = line if start == "spt" else f"{line}, {by}"
    facts = dict(line=line, name=name, by=by, seeds=seeds, n=comparison.test_examples)
    facts |= dict(points=mean, low=mean - gained.half, high=mean + gained.half, test=gained.test)
    if seeds == 1:
        return Verdict(("unknown",), facts | dict(reason="one seed"))
    if after.examples.isna().any() or scratch.examples.isna().any():
        return Verdict(("unknown",), facts | dict(reason="predictions were not kept"))
    # nothing to gain above 98 %, or two test examples less than all
    limit = math.inf if comparison.r2 else max(98, 100 - 200 / comparison.test_examples)
    ceiling = mean_of(scratch.score) > limit
    if 0 < gained.half < abs(mean) and (mean < 0 or not ceiling):
        return Verdict(("gains" if mean > 0 else "loses",), facts)
    if ceiling:
        reason = "ceiling"
    elif not mean:
        reason = "equal"
    elif abs(mean) <= gained.test:
        reason = "noise"
    else:
        reason = "seeds"
        variances = [after.score.var(), scratch.score.var()]
        facts["enough"] = enough(mean, gained.test, variances, seeds)
    return Verdict(("no difference", reason), facts)


def enough(mean, test, variances, seeds, most=100):
    """Return how many seeds make a difference of this mean significant. test: half of the 95 %
    interval due to the test set; variances: of both variants over seeds."""
    for k in range(seeds + 1, most + 1):
        half = t_interval(*((variance / k, k - 1) for variance in variances))
        if math.hypot(half, test) < abs(mean):
            return k
    return f"more than {most}"


# ---- 2. The linear model -------------------------------------------------------------------------


def networks_of(comparison):
    """Return {(line, start): runs by seed} without linear probes."""
    return {name: runs for name, runs in comparison.variants.items() if name[1] != "linear_probe"}


def beside_linear(comparison):
    """Return [Verdict] on the network that validation chooses, and on those behind linear."""
    networks = networks_of(comparison)
    if comparison.linear is None or not networks:
        return []
    linear = mean_of(comparison.linear.score)
    relations = {name: relation_to_linear(runs, comparison) for name, runs in networks.items()}
    if {*relations.values()} == {"behind"}:
        top = max(networks, key=lambda name: mean_of(networks[name].score))
        score = mean_of(networks[top].score)
        facts = dict(network=in_words(top), linear=linear, score=score)
        return [Verdict(("linear wins",), facts)]
    # rounded, because equal means may differ in their last bits
    val = {name: round(mean_of(runs.val), 9) for name, runs in networks.items()}
    best = max(networks, key=val.get)
    tied = [in_words(name) for name in networks if val[name] == val[best]]
    behind = [in_words(name) for name in networks if name != best and relations[name] == "behind"]
    kinds = ["tied" if len(tied) > 1 else "chosen" if len(networks) > 1 else "only"]
    kinds.append("beside linear" if relations[best] else "beside linear, unknown")
    if behind:
        kinds.append("behind linear")
    facts = dict(network=in_words(best), networks=", ".join(tied), relation=relations[best])
    facts |= dict(networks_behind=", ".join(behind), linear=linear)
    return [Verdict(tuple(kinds), facts | dict(score=mean_of(networks[best].score)))]


def relation_to_linear(runs, comparison):
    """Return how a network compares with the linear model; None if that is unknown."""
    linear = comparison.linear
    if len(runs) == 1 or runs.examples.isna().any() or linear.examples.isna().any():
        return None
    if len(linear) == 1 and "labels_per_class" in dict(linear.settings.iloc[0]):
        return None
    apart = mean_of(runs.score) - mean_of(linear.score)
    # of all labels there is one linear model, which does not vary
    drawn = [runs.score, linear.score] if len(linear) > 1 else [runs.score]
    half = math.hypot(half_width(*drawn), half_width_of_test(runs, linear))
    if abs(apart) <= half:
        return "not significantly different from"
    return "ahead of" if apart > 0 else "behind"


# ---- 3. Networks that have learned nothing -------------------------------------------------------


def nothing_learned(comparison):
    """Return [Verdict] on variants with one class only, or no better than the trivial baseline."""
    verdicts = []
    for name, runs in comparison.variants.items():
        counts = [record["counts"] for record in runs.record if record.get("counts")]
        single = sum(np.count_nonzero(count["predicted"]) == 1 for count in counts)
        if single:
            facts = dict(network=in_words(name), single=single, seeds=len(runs))
            verdicts.append(Verdict(("one class",), facts))
    if comparison.linear is None:
        return verdicts
    constant = constant_of(comparison).score[0]
    no_better = [
        in_words(name)
        for name, runs in networks_of(comparison).items()
        if all(runs.score.loc[seed] <= constant + noise for seed, noise in noises(runs).items())
    ]
    if no_better:
        facts = dict(trivial=trivial(comparison), constant=constant, networks=", ".join(no_better))
        verdicts.append(Verdict(("trivial",), facts))
    return verdicts


def noises(runs):
    """Return {seed: half of the 95 % interval of its score due to the test examples}."""
    return {seed: half_width_of_test(runs.loc[[seed]]) for seed in runs.index}


# ---- 4. Interpolation ----------------------------------------------------------------------------


def denoised(comparison):
    """Return [Verdict] on the variance of hidden samples that pretraining explains."""
    if comparison.linear is None:
        return []
    errors = comparison.linear.record.iloc[0].get("denoising")
    explained = {}
    for line in comparison.lines:
        error = denoising_error(comparison.of(line, "spt"))
        if errors and error:
            explained[line] = 100 - 100 * error / errors["mean"]
    if not explained:
        return []
    line = 100 - 100 * errors["interpolation"] / errors["mean"]
    models = ", ".join(f"{name} {share:.1f} %" for name, share in explained.items())
    kinds = ["interpolation"]
    if max(explained.values()) <= line:
        kinds.append("no more than interpolation")
    return [Verdict(tuple(kinds), dict(line=line, models=models))]


def denoising_error(runs):
    """Return the mean validation score of the pretraining of runs, if `interpolated` of baseline.py
    is its like: minus the squared error, hidden as the task says. Else None."""
    scores = [
        record["val_score"]
        for record in (first.record for first in firsts_of(runs))
        if record["objective"] == "masked"
        and "mask" not in record["changed"]
        and record.get("score_is") == "minus squared error on predicted samples"
    ]
    return sum(scores) / len(scores) if 0 < len(scores) == len(runs) else None


# ---- 5. Unfinished training ----------------------------------------------------------------------


def unfinished(comparison):
    """Return [Verdict] on variants most of whose seeds validate best in the last tenth."""
    names = []
    for name, runs in comparison.variants.items():
        improved = sum(improved_to_the_end(run) for run in rows_of(runs))
        if len(runs) > 1 and improved > len(runs) / 2:
            names.append(in_words(name))
    own = declared(comparison.runs.task.iloc[0]).own
    facts = dict(networks=", ".join(names), how=" (--passes)" if own else "")
    return [Verdict(("improving",), facts)] if names else []


def improved_to_the_end(run):
    """Return whether a run's best evaluation is in the last tenth of its steps."""
    early, late = [], []
    for record in evaluations(run):
        part = late if record["step"] > 0.9 * run.record["steps"] else early
        part.append(record[validation_field(run.record)])
    return bool(early and late) and max(late) > max(early)
