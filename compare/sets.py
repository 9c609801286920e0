"""SPT and joint training over many data sets, as tables and one figure.

    python analyze.py sets runs/ucr                 the 40 sets of run_all.sh ucr
    python analyze.py sets runs/own                 your own sets, trained by run_all.sh own

One set says little; many, paired, say more. Sets of one family (three axes of one sensor) are not
independent, so a family counts once. Intervals are of a bootstrap that draws families, then sets
within each, then seeds. Wilcoxon's signed-rank test compares the families' means. entries.UCR lists
the families of the archive. Any other set counts as a family, so of sets that are alike name only
one."""

import itertools
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas
from scipy.stats import wilcoxon
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import LeaveOneGroupOut, cross_val_predict

from compare.drawing import LOOKS, draw, markdown, replace_block, wrapped
from compare.reading import provenance, read_runs, scores, validation
from compare.report import comparisons, constant_of, denoising_error, name_of, of_seeds, runs_of
from experiments import entries
from files import UserError

DRAWS = 4_000  # of the bootstrap
FEWEST = 8  # families for which intervals and correlations are shown
PAIRS = [
    ("spt", "scratch"),
    ("joint", "spt"),
    ("scratch", "baseline"),
    ("spt", "baseline"),
    ("joint", "baseline"),
]
# in the linear model's record
FACTS = dict(train_examples="training series", length="length", classes="classes")
# of a model on a set
DENOISING, GAP = "log(interpolation error / model error)", "linear - scratch, on validation"


def collected(runs):
    """Return the values of each seed, as lists, and the runs that were used. rows: (family, set);
    columns: (model, start or fact). The linear model's start is "baseline". It has no model, and
    neither do facts of a set."""
    rows, used = defaultdict(dict), []
    for key, compared in comparisons(runs, entries.ucr()).items():
        # R2 and F1 have no common mean
        if not (linear := compared.linear) or "accuracy" not in compared.score:
            print(
                f"warning: {name_of(key)} is left out: it has no linear model, or no accuracy",
                file=sys.stderr,
            )
            continue
        name = name_of(key._replace(passes=None)).removeprefix("ucr:") + r"\*" * (
            "balanced" in compared.score
        )
        row = rows[entries.family(key.task), name]
        used += [*runs_of(compared.lines), linear]
        row |= {("", fact): [linear.get(fact, np.nan)] for fact in FACTS}
        row |= {
            ("", "majority class"): [constant_of(compared)],
            ("", "baseline"): [linear["score"]],
        }
        for line, starts in compared.lines.items():
            model = f"{line}, {key.passes:,} passes" if key.passes else line
            row |= {(model, start): [*scores(some).values()] for start, some in starts.items()}
            error, scratch = denoising_error(starts), starts.get("scratch", {}).values()
            if error and scratch and "denoising" in linear:
                row[model, DENOISING] = [np.log(linear["denoising"]["interpolation"] / error)]
                row[model, GAP] = [
                    100 * np.mean([validation(linear) - validation(run) for run in scratch])
                ]
    used += [run["first"] for run in used if run.get("init")]
    return pandas.DataFrame.from_dict(rows, orient="index").sort_index(), used


def of_families(values):
    """Return the means over each family's sets, without the sets that lack a value. index: (family,
    set). Rounded, because equal means may differ in their last bits, which would change ranks."""
    return values.dropna().groupby(level=0, sort=False).mean().round(9)


def bootstrap(seeds):
    """Return the 95 % interval of the families' mean difference of two columns of `collected`."""
    rng = np.random.default_rng(0)

    def mean(values):  # (DRAWS, n) -> (DRAWS,), of n drawn columns, each with a row of its own
        rows, columns = (rng.integers(n, size=values.shape) for n in values.shape)
        return values[rows, columns].mean(1)

    differences = [
        mean(np.tile(after, (DRAWS, 1))) - mean(np.tile(before, (DRAWS, 1)))
        for after, before in seeds.to_numpy()
    ]
    families = pandas.DataFrame(differences, seeds.index).groupby(level=0)
    return np.percentile(
        mean(np.stack([mean(some.to_numpy().T) for _, some in families], 1)), (2.5, 97.5)
    )


def signed_rank(samples):
    """Return p of Wilcoxon's signed-rank test for each sample, and p as corrected for their number
    by Holm's method."""
    p = pandas.Series([wilcoxon(sample).pvalue if np.any(sample) else 1.0 for sample in samples])
    return p, (p.sort_values() * np.arange(len(p), 0, -1)).cummax().clip(upper=1).sort_index()


def tests(seeds, means):
    """Return the rows of the table of differences: each model, each pair of its variants."""
    rows, samples = [], []
    for model, (start, other) in itertools.product(
        dict.fromkeys(model for model, _ in seeds if model), PAIRS
    ):
        after, before = (model, start), ("" if other == "baseline" else model, other)
        both = seeds.reindex(columns=[after, before]).dropna()
        if len(both):
            points = (means[after] - means[before]).round(9).dropna()
            families, (low, high) = of_families(points), bootstrap(both)
            interval = f" [{low:+.1f}, {high:+.1f}]" * (len(families) >= FEWEST)
            samples.append(families)
            rows.append(
                [
                    model,
                    f"{LOOKS[start][0]} - {LOOKS[other][0]}",
                    f"{len(points)} ({len(families)})",
                    f"{(points > 0).sum()} / {(points == 0).sum()} / {(points < 0).sum()}",
                    f"{families.mean():+.1f}{interval}",
                    f"{points.median():+.1f}",
                ]
            )
    tested = zip(*signed_rank([sample for sample in samples if len(sample) >= FEWEST]))
    return [
        [*row, *(f"{p:.3f}" if p >= 0.001 else "< 0.001" for p in next(tested))]
        if len(sample) >= FEWEST
        else [*row, "–", "–"]
        for row, sample in zip(rows, samples)
    ]


def correlates(model, means):
    """Return rows on what goes with a model's gain from SPT, and sentences on whether its sign can
    be predicted."""
    # The gap to the linear model is that on validation: on test, its noise would be that of the
    # gain.
    table = means.reindex(
        columns=[*(("", fact) for fact in FACTS), (model, DENOISING), (model, GAP)]
    ).droplevel(0, 1)
    table = table.assign(gain=(means[model, "spt"] - means[model, "scratch"]).round(9)).dropna()
    table = table.loc[:, (table.nunique() > 1) | (table.columns == "gain")]  # facts that vary
    rng, families = np.random.default_rng(0), of_families(table)
    if len(families) < FEWEST:
        return [], []
    drawn = pandas.DataFrame(
        families.sample(frac=1, replace=True, random_state=rng).corr("spearman").gain
        for _ in range(DRAWS // 4)
    )
    limits = zip(
        families.corr("spearman").gain[:-1].items(), *drawn.quantile([0.025, 0.975]).to_numpy()
    )
    rows = [
        [model, FACTS.get(fact, fact), f"{one:+.2f} [{low:+.2f}, {high:+.2f}]"]
        for (fact, one), low, high in limits
    ]
    table = table[table.gain != 0]  # no gain has no sign
    better, groups = (table.gain > 0).to_numpy(), table.index.get_level_values(0)
    if min(groups[better].nunique(), groups[~better].nunique()) < 2:
        return rows, []
    guess = cross_val_predict(
        LogisticRegression(),
        table.drop(columns="gain").rank() / len(table),
        better,
        groups=groups,
        cv=LeaveOneGroupOut(),
    )
    right, common = (guess == better).sum(), max(better.sum(), (~better).sum())
    return rows, [
        f"- {model}: a logistic regression on these facts, fitted each time to the other families, "
        "predicts "
        f"the sign of the gain in {right} of {len(table)} sets; always guessing the commoner sign "
        "is right "
        f"in {common}."
    ]


def repeats(model, seeds):
    """Return a sentence on how much of a gain from SPT another seed would change, from the sets
    with several seeds."""
    pairs = seeds[[(model, "spt"), (model, "scratch")]].dropna().to_numpy()
    gains = [np.subtract(after, before) for after, before in pairs if len(after) == len(before) > 1]
    if len(gains) < FEWEST:
        return []
    one_set = np.sqrt(np.mean([np.var(some, ddof=1) for some in gains]))
    spread = np.std(np.concatenate(gains), ddof=1)
    return [
        f"- {model}: gains from SPT with one seed have a standard deviation of {one_set:.1f} "
        "points over the seeds "
        f"of one set, and of {spread:.1f} over all seeds of all {len(gains)} sets that have "
        "several."
    ]


def ranked(table):
    """Return the mean ranks of variants over families (n, variants), sorted; and [(first, last)],
    the longest groups of neighbours among which no pair differs significantly."""
    ranks = table.rank(axis=1, ascending=False).mean().sort_values()
    pairs = [*itertools.combinations(range(len(ranks)), 2)]
    _, corrected = signed_rank(
        [(table[ranks.index[i]] - table[ranks.index[j]]).round(9) for i, j in pairs]
    )
    alike = {pair for pair, p in zip(pairs, corrected) if p > 0.05}
    groups = {(i, j) for i, j in pairs if {*itertools.combinations(range(i, j + 1), 2)} <= alike}
    return ranks, [(i, j) for i, j in sorted(groups) if not {(i - 1, j), (i, j + 1)} & groups]


def figure(plt, means, models):
    """Draw SPT against scratch, one dot per set and a panel per model. Below, a critical-difference
    diagram: the mean ranks of the variants that all sets have, and a bar beside each group that
    `ranked` finds."""
    table = of_families(means.dropna(axis=1))
    rows = [models, ["ranks"] * len(models)] if len(table) >= FEWEST else [models]
    picture, axes = plt.subplot_mosaic(
        rows,
        height_ratios=(3, 2)[: len(rows)],
        figsize=(max(6, 3.6 * len(models)), 1 + 2.7 * len(rows)),
    )
    low = means.min(axis=None) // 10 * 10
    for model in models:
        x, y = means[[(model, "scratch"), (model, "spt")]].dropna().round(9).to_numpy().T
        axes[model].axline((0, 0), slope=1, color="black", linestyle=":")
        axes[model].scatter(x, y, s=12, color=LOOKS["spt"][1])
        axes[model].set(
            title=f"{model}\n{len(x)} sets: {(y > x).sum()} gain by SPT, {(y < x).sum()} lose",
            xlabel="from scratch, test score in percent",
            ylabel="SPT",
            xlim=(low, 102),
            ylim=(low, 102),
            aspect="equal",
        )
    if axis := axes.get("ranks"):
        ranks, groups = ranked(table)
        axis.scatter(ranks, range(len(ranks)), s=12, color="black", zorder=3)
        for k, (i, j) in enumerate(groups):  # right of the frame
            axis.plot(
                [1.02 + 0.02 * k] * 2,
                (i, j),
                color=LOOKS["spt"][1],
                linewidth=3,
                clip_on=False,
                transform=axis.get_yaxis_transform(),
            )
        axis.set_yticks(
            range(len(ranks)),
            [f"{model} {LOOKS[start][0]}".strip() for model, start in ranks.index],
        )
        axis.grid(axis="y", color="0.9")
        axis.set(
            xlabel=f"mean rank over {len(table)} families (1 is best), of the variants that all "
            "sets have\n"
            "a bar joins variants without a significant difference",
            ylim=(len(ranks) - 0.5, -0.5),
        )
    return picture, "Self-pretraining over many sets"


def over_sets(args):
    """Print the tables and draw the figure of the runs in some folders."""
    runs = [run for folder in args.what or [args.runs] for run in read_runs(Path(folder))]
    seeds, used = collected(of_seeds(runs, args.seeds))
    models = [model for model, start in seeds if start == "spt" and (model, "scratch") in seeds]
    if len(seeds) < 2 or not models:
        raise UserError(
            "sets wants at least two sets, each with runs from scratch, with SPT and a linear "
            "model: bash "
            "run_all.sh own --tasks file:A,file:B"
        )
    means = seeds.map(np.mean)
    facts, variants = (
        means[[("", fact) for fact in FACTS]],
        means[[name for name in means if name[1] in LOOKS]],
    )
    scored = means[[("", "majority class"), *variants]].map("{:.1f}".format)
    sets = pandas.concat([facts.map("{:.0f}".format), scored], axis=1).replace("nan", "–")
    rows, said = (sum(some, []) for some in zip(*(correlates(model, means) for model in models)))
    sets = [[Path(family).name, *row] for family, *row in sets.reset_index().to_numpy().tolist()]
    text = wrapped(
        "\n\n".join(
            filter(
                None,
                [
                    markdown(
                        [
                            "model",
                            "difference",
                            "sets (families)",
                            "wins / draws / losses",
                            "mean [95 %]",
                            "median",
                            "p",
                            "p, Holm",
                        ],
                        tests(seeds, means),
                    ),
                    "Points of test accuracy in percent, or (\\*) of balanced accuracy if the test "
                    "set's classes are more unequal "
                    "than 3:1. The mean is over families, the median over sets. Intervals: "
                    "bootstrap over families (at least "
                    f"{FEWEST}), sets within them and seeds; with one seed, its noise is part of "
                    "the spread over families. p: "
                    "Wilcoxon's signed-rank test over families, then corrected for all rows "
                    f"(Holm). {provenance(used)}.",
                    rows
                    and markdown(
                        ["model", "fact", "rank correlation with the gain from SPT [95 %]"], rows
                    ),
                    rows
                    and "Correlations are over the families' means; their intervals resample "
                    "families only. Errors are "
                    "squared, on hidden samples of the validation split (networks are trained on "
                    "the absolute error); "
                    "interpolation is linear, between visible neighbours.",
                    "\n".join(said + sum((repeats(model, seeds) for model in models), [])),
                    "<details><summary>Every set</summary>",
                    markdown(
                        [
                            "family",
                            "set",
                            *FACTS.values(),
                            "majority class",
                            *(f"{model} {LOOKS[start][0]}".strip() for model, start in variants),
                        ],
                        sets,
                    ),
                    "</details>",
                ],
            )
        )
    )
    print(f"\n{text}\n")
    draw(lambda plt: figure(plt, variants, models), args.figure)
    if args.readme:
        replace_block(args.readme, "sets", text)
