"""analyze.py sets, beside its numbers computed plainly from the same records."""

import itertools
import json
import os
import re
import subprocess
import sys

import numpy as np
import pandas
import pytest
from conftest import ROOT, call
from scipy.stats import f as fisher
from scipy.stats import norm, spearmanr, wilcoxon

from compare import report, sets
from compare.reading import read_runs
from data import open_task
from experiments import entries
from pretrain import hide

NAMES = [*entries.FAMILIES][:20]


def record(name, start, seed, right, n=200, **more):
    changed = more.pop("changed", {})
    return (
        dict(
            run=f"ucr-{name}-{more.get('model', 's4')}-{start}-s{seed}",
            task=f"ucr:{name}",
            model="s4",
            seed=seed,
            objective="none" if start == "baseline" else "masked",
            steps=10,
            seconds=3.0,
            changed=changed,
            commit="abc",
            torch="2",
            device="CPU",
        )
        | (
            {}
            if start == "pretrain"
            else dict(
                start=start,
                test_accuracy=right / n,
                test_examples=n,
                val_accuracy=right % 7 / 7,
                init=None,
                counts=dict(
                    labels=[n // 2] * 2,
                    right=[right // 2, right - right // 2],
                    predicted=[n // 2] * 2,
                ),
            )
        )
        | more
    )


def records(gain, names=NAMES):
    """Runs of two models with three seeds on some sets. gain(name) -> what SPT gains, in examples
    of 200."""
    rng, found = np.random.default_rng(1), []
    for name in names:
        base = int(rng.integers(60, 140))
        found.append(
            record(
                name,
                "baseline",
                0,
                base + 20,
                model="random convolutions",
                length=100 + base,
                classes=2 + base % 7,
                train_examples=base,
                data=dict(sizes=[base, 9, 200]),
                denoising=dict(interpolation=-0.1, mean=-1.0),
                constant_accuracy=0.5,
            )
        )
        for model, seed in itertools.product(("s4", "lstm"), range(3)):
            noise = int(rng.integers(-6, 7))
            found += [
                record(name, "scratch", seed, base, model=model),
                record(
                    name,
                    "pretrain",
                    seed,
                    0,
                    model=model,
                    val_score=-0.05,
                    score_is="minus squared error on predicted samples",
                ),
                record(
                    name,
                    "spt",
                    seed,
                    base + gain(name) + noise,
                    model=model,
                    init=f"ucr-{name}-{model}-pretrain-s{seed}",
                ),
            ]
    return found


def kept(folder, found):
    path = folder / "runs.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in found))
    return path


def test_the_tables_are_those_of_the_records(tmp_path):
    gains = {name: 10 if len(name) % 2 else -4 for name in NAMES}
    found = records(gains.get)
    done = call("analyze.py", "sets", kept(tmp_path, found), "--figure", tmp_path / "sets.png")
    assert "denoising beside" not in done.stdout  # it is the same for all sets here
    assert not done.returncode, done.stderr
    points, families, single, varied = [], {}, [], []
    for name in NAMES:
        spt, scratch = (
            [
                one["test_accuracy"]
                for one in found
                if one["task"] == f"ucr:{name}"
                and one["model"] == "s4"
                and one.get("start") == start
            ]
            for start in ("spt", "scratch")
        )
        points.append(round(100 * (sum(spt) - sum(scratch)) / 3, 9))
        families.setdefault(entries.FAMILIES[name], []).append(points[-1])
        single += [100 * (after - before) for after, before in zip(spt, scratch)]
        varied.append(sum((one - points[-1]) ** 2 for one in single[-3:]) / 2)
    said = re.search(
        r"deviation of (\S+) points over the seeds of one set, and of (\S+) over all seeds of all "
        r"(\d+) sets",
        " ".join(done.stdout.split()),
    ).groups()
    assert [*map(float, said)] == pytest.approx(
        [np.sqrt(np.mean(varied)), np.std(single, ddof=1), len(NAMES)], abs=0.051
    )
    mean = np.mean([np.mean(some) for some in families.values()])
    outcomes = [
        sum(test) for test in zip(*((one > 1e-9, abs(one) <= 1e-9, one < -1e-9) for one in points))
    ]
    line = next(
        line
        for line in done.stdout.splitlines()
        if line.startswith("| s4 | self-pretrained - from scratch")
    )
    assert f"| {len(NAMES)} ({len(families)}) | {' / '.join(map(str, outcomes))} | " in line
    cells = [cell.split(" [")[0] for cell in line.split(" | ")]
    assert float(cells[4]) == pytest.approx(mean, abs=0.051)
    assert float(cells[6]) == pytest.approx(
        wilcoxon([np.mean(some) for some in families.values()]).pvalue, abs=0.0006
    )
    # By hand: the rank correlation of length and gain over families, and how often the commoner
    # sign is right.
    lengths = {}
    for one in found:
        if one.get("start") == "baseline":
            lengths.setdefault(entries.FAMILIES[one["task"][4:]], []).append(one["length"])
    rho = spearmanr(
        [np.mean(some) for some in lengths.values()],
        [np.mean(some).round(9) for some in families.values()],
    ).statistic
    assert float(re.search(r"\| s4 \| length \| (\S+) \[", done.stdout)[1]) == pytest.approx(
        rho, abs=0.0051
    )
    assert (
        f"of {sum(map(bool, points))} sets; always guessing the commoner sign is right in "
        f"{max(outcomes[0], outcomes[2])}."
    ) in " ".join(done.stdout.split())
    assert (tmp_path / "sets.png").stat().st_size > 10_000


def test_one_set_is_not_enough(tmp_path):
    done = call("analyze.py", "sets", kept(tmp_path, records(lambda name: 1, NAMES[:1])))
    assert done.returncode and "at least two sets" in done.stderr and "Traceback" not in done.stderr


def test_holm():
    """By definition: the k-th smallest of n p values times n - k, and never below a smaller
    one's."""
    samples = [np.arange(1, 7), np.arange(-1, 9), np.zeros(4), np.arange(-2, 8), np.arange(1, 6)]
    p, corrected = sets.signed_rank(samples)
    assert np.allclose(p, [wilcoxon(sample).pvalue if sample.any() else 1 for sample in samples])
    wanted, least = {}, 0
    for k, one in enumerate(sorted(p)):
        wanted[one] = least = max(least, min(1, one * (len(p) - k)))
    assert [*corrected] == [wanted[one] for one in p] and len({*wanted.values()}) > 2


def test_equal_means_are_equal():
    """Means that differ in their last bits only would get different ranks."""
    values = pandas.DataFrame(
        dict(a=[0.1, 0.2, 0.3], b=[(0.1 + 0.2 + 0.3) / 3] * 3), [["f"] * 3, [*range(3)]]
    )
    assert (values.groupby(level=0).mean().nunique(axis=1) == 2).all()
    assert (sets.of_families(values).nunique(axis=1) == 1).all()


def test_only_sets_with_several_seeds_say_how_much_a_seed_changes():
    """Gains of 1 and 3 points on eight sets, by seed: sqrt(2) within each, sqrt(16 / 15) over
    all."""
    rows = {(str(k), "set"): ([71.0, 73.0], [70.0, 70.0]) for k in range(8)} | {
        ("one seed", "set"): ([99.0], [10.0]),
        ("another lacks", "set"): ([99.0, 9.0], [10.0]),
    }
    table = pandas.DataFrame.from_dict(
        rows,
        orient="index",
        columns=pandas.MultiIndex.from_tuples([("s4", "spt"), ("s4", "scratch")]),
    )
    table.index = pandas.MultiIndex.from_tuples(rows)
    [line] = sets.repeats("s4", table)
    assert "1.4 points" in line and "of 1.0 over" in line and "all 8 sets" in line
    assert sets.repeats("s4", table[:7]) == []


def both(after, before):
    return pandas.DataFrame(dict(after=after, before=before)).dropna()


def test_the_interval_of_families_covers():
    """Families with an effect of their own, sets and seeds with noise: 95 % of intervals hold the
    true mean, or, with only 28 families, a few less. The mean of a family varies by sqrt(4 + (1 + 2
    / 3) / sets), which gives the width."""
    rng, covered, widths, trials = np.random.default_rng(0), 0, [], 120
    for _ in range(trials):
        after, before = {}, {}
        for family in range(28):
            of_family = rng.normal(1.0, 2.0)
            for one in range(1 + family % 3):
                effect = of_family + rng.normal(0, 1)
                after[str(family), one] = [*(effect + rng.normal(0, 1, 3))]
                before[str(family), one] = [*rng.normal(0, 1, 3)]
        low, high = sets.bootstrap(both(after, before))
        covered += low <= 1.0 <= high
        widths.append(high - low)
    least = norm.ppf(0.001) * np.sqrt(0.93 * 0.07 / trials) + 0.93
    assert covered / trials >= least
    width = (
        2
        * 1.96
        * np.sqrt(np.mean([4 + (1 + 2 / 3) / (1 + family % 3) for family in range(28)]) / 28)
    )
    assert 0.85 < np.mean(widths) / width < 1.25


@pytest.mark.parametrize("level", ["families", "sets", "seeds"])
def test_each_level_is_drawn(level):
    """Where only one level varies, the interval has the width of a mean over its n draws: +-1.96
    sigma / sqrt(n)."""
    n, families = 30, 20
    values = np.random.default_rng(1).normal(size=n)
    seeds = {
        "families": {(str(i), 0): [value] for i, value in enumerate(values)},
        "sets": {(str(k), i): [value] for k in range(families) for i, value in enumerate(values)},
        "seeds": {(str(k), 0): [*values] for k in range(families)},
    }[level]
    low, high = sets.bootstrap(both(seeds, {place: [0.0] for place in seeds}))
    width = 2 * 1.96 * values.std() / np.sqrt(n * (1 if level == "families" else families))
    assert high - low == pytest.approx(width, rel=0.06)


def test_ranks_and_groups():
    """Four variants over 30 families: c and d are equal but for noise, a and b far from them and
    from each other."""
    noise = np.random.default_rng(0).normal(scale=0.1, size=(30, 4))
    table = pandas.DataFrame(
        noise + [5, 3, 1, 1], columns=pandas.MultiIndex.from_product([["m"], [*"abcd"]])
    )
    ranks, groups = sets.ranked(table)
    assert (
        [start for _, start in ranks.index[:2]] == ["a", "b"]
        and ranks.iloc[0] == 1
        and ranks.iloc[1] == 2
    )
    assert groups == [(2, 3)]


def test_facts_that_go_with_the_gain(capsys):
    """The gain is larger where the model denoises better than interpolation and lags more behind
    the linear model: both facts correlate by +1, and predict the sign. Sets without a linear model
    or with R2 are left out."""
    found = []
    for i, name in enumerate(dict.fromkeys(entries.FAMILIES.values())):
        common = dict(n=1000)
        found += [
            record(
                name,
                "baseline",
                0,
                700,
                model="random convolutions",
                length=100,
                classes=2,
                train_examples=50,
                denoising=dict(interpolation=-0.1, mean=-1.0),
                constant_accuracy=0.5,
                **common,
            ),
            record(name, "scratch", 0, 500, **common),
            record(
                name,
                "pretrain",
                0,
                0,
                val_score=-0.1 / (1 + i),
                score_is="minus squared error on predicted samples",
                n=1,
            ),
            record(name, "spt", 0, 500 + 2 * i - 27, init=f"ucr-{name}-s4-pretrain-s0", **common),
        ]
        found[-4]["val_accuracy"], found[-3]["val_accuracy"] = 0.5 + 0.01 * i, 0.5
    families = len(found) // 4
    numbers = [
        record("Numbers", "baseline", 0, 100, model="random convolutions"),
        record("Numbers", "scratch", 0, 100),
    ]
    found += [
        record("Bare", "scratch", 0, 100),
        *(
            {name: run[name] for name in run if name != "counts"}
            | dict(test_r2=0.5, constant_r2=0.0, val_r2=0.5)
            for run in numbers
        ),
    ]
    read = [
        one
        | {"score": 100 * one.get("test_accuracy", 0), "place": ROOT / one["run"], "folder": ROOT}
        for one in found
    ]
    seeds, _ = sets.collected(read)
    said = capsys.readouterr().err
    assert len(seeds) == families and "Bare is left out" in said and "Numbers is left out" in said
    rows, (sentence,) = sets.correlates("s4", seeds.map(np.mean))
    assert [row[1:] for row in rows] == [
        [sets.DENOISING, "+1.00 [+1.00, +1.00]"],
        [sets.GAP, "+1.00 [+1.00, +1.00]"],
    ]
    assert f"in {families - 2} of {families} sets" in sentence  # not the two about zero


def test_a_sign_is_predicted_from_other_families_only():
    """Facts say nothing, and 15 of 28 sets gain: without a whole family that gains, losing is
    commoner, so all guesses are wrong. Leaving out one set, its siblings would say its sign."""
    places = [(f"{k}", i) for k in range(9) for i in range(3)] + [("9", 0)]
    columns = [
        *(("", fact) for fact in sets.FACTS),
        *(("s4", name) for name in (sets.DENOISING, sets.GAP, "scratch", "spt")),
    ]
    means = pandas.DataFrame(
        0.0, pandas.MultiIndex.from_tuples(places), pandas.MultiIndex.from_tuples(columns)
    )
    means["", "length"] = [1, 2, 3] * 9 + [2]
    means["s4", "spt"] = [1.0 if int(family) < 5 else -1.0 for family, _ in places]
    _, (sentence,) = sets.correlates("s4", means)
    assert "in 0 of 28 sets; always guessing the commoner sign is right in 15." in sentence


def test_few_families_have_no_intervals(tmp_path):
    names = list(dict.fromkeys(entries.FAMILIES.values()))[:5]
    done = call(
        "analyze.py",
        "sets",
        kept(tmp_path, records(lambda name: 5, names)),
        "--figure",
        tmp_path / "a.png",
    )
    table = done.stdout.split("\n\n")[0]
    assert not done.returncode and "5 (5)" in table and table.count("[") == table.count("[95 %]")
    assert "rank correlation" not in done.stdout


def test_draws_over_families_not_sets():
    """Ten copies of one set in one family are no more sure than one."""
    one = {("a", 0): [5.0], ("b", 0): [-1.0], ("c", 0): [2.0]}
    many = one | {("a", i): [5.0] for i in range(10)}
    zero = {place: [0.0] for place in many}
    assert np.allclose(*(sets.bootstrap(both(some, zero)) for some in (one, many)), atol=0.3)


def test_an_interval_is_the_same_in_every_process(tmp_path):
    """Python orders the members of a set of strings anew in every process."""
    path = kept(tmp_path, records(len, NAMES[:9]))
    words = [sys.executable, "analyze.py", "sets", path, "--figure", tmp_path / "sets.png"]
    found = {
        subprocess.run(
            words,
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "12"
    }
    assert len(found) == 1


def test_the_report_says_what_interpolation_explains_and_what_was_not_finished(tmp_path):
    """The interpolation's error is a tenth of the variance, a model's .05; from scratch, two of
    three seeds improve in the last tenth, after SPT one."""
    found = records(lambda name: 5, NAMES[:1])
    for one in found:
        best = {"scratch": 2, "spt": 1}.get(one.get("start"), 0) > one["seed"]
        curve = [0.2, 0.5, 0.5, 0.6 if best else 0.5]
        one["evals"] = [
            dict(kind="eval", step=step, val_accuracy=score)
            for step, score in zip((1, 5, 9, 10), curve)
        ]
    done = call("analyze.py", "own", kept(tmp_path, found), "--figure", tmp_path / "own.png")
    said = " ".join(done.stdout.split())
    assert (
        "explains 90.0 % of the variance of hidden samples (validation); s4 95.0 %, lstm 95.0 %."
        in said
    )
    assert "not learned more" not in said
    assert "**Still improving at the end**: s4 from scratch, lstm from scratch. Longer runs" in said
    for one in found:
        one |= {"val_score": -0.2} if "val_score" in one else {}
    done = call("analyze.py", "own", kept(tmp_path, found), "--figure", tmp_path / "own.png")
    assert "**Pretraining has not learned more than interpolation.**" in " ".join(
        done.stdout.split()
    )
    for one in found:  # hidden otherwise, errors say nothing beside each other
        one |= {"changed": {"mask": 0.1}} if "val_score" in one else {}
    assert (
        "explains"
        not in call(
            "analyze.py", "own", kept(tmp_path, found), "--figure", tmp_path / "own.png"
        ).stdout
    )


@pytest.mark.parametrize("ragged", [False, True])
def test_interpolation_beside_a_plain_loop(ragged, tmp_path):
    """What baseline.py records: each hidden sample from the nearest visible ones of its series and
    channel, never from the padding of a shorter series, far from the values here."""
    rng = np.random.default_rng(0)
    x, y = 50 + rng.normal(size=(40, 12, 2)).cumsum(1), np.arange(40) % 2
    for i in range(40 * ragged):
        x[i, 4 + i % 9 :] = np.nan
    np.savez(tmp_path / "walk.npz", x=x, y=y)
    name = f"file:{tmp_path / 'walk.npz'}"
    for words in (
        ("data.py", "--task", name, "--data-dir", tmp_path / "data"),
        ("baseline.py", "--task", name, "--data-dir", tmp_path / "data", "--out", tmp_path / "out"),
    ):
        done = call(*words)
        assert not done.returncode, done.stderr
    task, _, val, _ = open_task(name, tmp_path / "data")
    series = val.batch(np.arange(len(val))).samples.numpy()  # (n, l, channels)
    ends = val.batch(np.arange(len(val))).lengths.tolist() if ragged else [12] * len(val)
    hidden = hide((len(val), task.length), task.mask, 0)[:, : series.shape[1]]
    hidden &= np.arange(series.shape[1]) < np.array(ends)[:, None]
    errors = []
    for i, t in zip(*np.nonzero(hidden)):
        left, right = (
            next((k for k in some if not hidden[i, k]), None)
            for some in (range(t, -1, -1), range(t, ends[i]))
        )
        for c in range(2):
            if left is None and right is None:
                guess = 0.0
            elif left is None or right is None:
                guess = series[i, right if left is None else left, c]
            else:
                share = (t - left) / (right - left)
                guess = (1 - share) * series[i, left, c] + share * series[i, right, c]
            errors.append((series[i, t, c] - guess) ** 2)
    found = json.loads((tmp_path / "out" / "result.json").read_text())
    assert found["denoising"]["interpolation"] == pytest.approx(-np.mean(errors), rel=1e-5)
    assert found["denoising"]["mean"] == pytest.approx(-np.square(series[hidden]).mean(), rel=1e-5)
    assert (found["length"], found["classes"]) == (12, 2)


def test_your_report_says_what_spt_changed_on_sets_of_the_archive_of_that_size(tmp_path):
    """Beside the kept records, read plainly: accuracy, or the mean recall where classes are more
    unequal than 3:1."""

    def score(run):
        labels, right = (np.array(run["counts"][name], float) for name in ("labels", "right"))
        labels, right = labels[labels > 0], right[labels > 0]
        return 100 * (
            np.mean(right / labels)
            if labels.max() > 3 * labels.min()
            else right.sum() / labels.sum()
        )

    kept = ROOT / "results" / "ucr.jsonl"
    points, runs = {}, [json.loads(line) for line in kept.read_text().splitlines()]
    for (task, n), some in itertools.groupby(
        sorted(
            (
                run
                for run in runs
                if run["model"] == "s4" and "start" in run and "steps" not in run["changed"]
            ),
            key=lambda run: run["task"],
        ),
        lambda run: (run["task"], run["train_examples"]),
    ):
        by_start = {
            start: [score(run) for run in pair]
            for start, pair in itertools.groupby(
                sorted(some, key=lambda run: run["start"]), lambda run: run["start"]
            )
        }
        if {"spt", "scratch"} <= by_start.keys() and 200 <= n < 500 and task != "ucr:Adiac":
            points[task] = round(np.mean(by_start["spt"]) - np.mean(by_start["scratch"]), 9)
    assert len(points) > 5
    found = report.comparisons([run for run in read_runs(kept) if run["task"] == "ucr:Adiac"])
    ((key, compared),) = ((key, one) for key, one in found.items() if not key.passes)
    line = next(line for line in report.on_the_archive(key, compared) if " changed s4 " in line)
    gained, lost = (sum(sign * one > 0 for one in points.values()) for sign in (1, -1))
    assert line.startswith(
        f"On {len(points)} sets of the UCR archive with 200 to 499 training series (results/ucr.md)"
    )
    median = re.search(rf"median of (\S+) points: {gained} gained, {lost} lost", line)[1]
    assert float(median) == pytest.approx(np.median([*points.values()]), abs=0.051)
    assert line.endswith("Size did not predict the gain there.")
    for other in dict(share=0.1), dict(passes=600), dict(task="listops_demo"):
        assert not report.on_the_archive(key._replace(**other), compared)
    printed = call("analyze.py", "own", kept, "--figure", tmp_path / "own.png").stdout
    assert line in printed


def test_siblings_and_other_lengths_do_not_count_for_your_report(monkeypatch):
    """FordA's report leaves FordB out; runs of other lengths count nowhere; four sets are too
    few."""

    def comparison(n, gained, classes=True):
        starts = {
            start: {0: dict(score=score, test_examples=None, folder=ROOT)}
            for start, score in (("scratch", 50.0), ("spt", 50.0 + gained))
        }
        linear = dict(train_examples=n, denoising={}, **({} if classes else {"test_r2": 0.1}))
        return report.Comparison({"s4": starts}, linear, "accuracy", 1, False, 1, "points")

    def said(of, key="ucr:FordA", **more):
        monkeypatch.setattr(
            report,
            "archive",
            lambda: {
                report.Key(f"ucr:{name}", 1, passes): comparison(n, gained)
                for (name, passes), (n, gained) in of.items()
            },
        )
        return report.on_the_archive(report.Key(key, 1, None), comparison(3000, 0, **more))

    of = {
        ("FordB", None): (3000, 9),
        ("Crop", None): (500, 1),
        ("ElectricDevices", None): (9000, 2),
        ("DistalPhalanxOutlineCorrect", None): (510, -4),
        ("Crop", 2000): (6000, 9),
        ("Adiac", None): (499, 9),
        ("Fish", None): (500, 3),
        ("Car", None): (900, -1),
    }
    (line,) = said(of)
    assert (
        "On 5 sets" in line
        and "median of +1.0 points: 3 gained, 2 lost" in line
        and "500 or more" in line
    )
    assert not said(of, classes=False)
    del of["Crop", None]
    assert not said(of)


def test_pages_say_what_the_kept_records_say(tmp_path):
    page = (ROOT / "results" / "ucr.md").read_text()
    copy = tmp_path / "ucr.md"
    copy.write_text(page)
    done = call(
        "analyze.py",
        "sets",
        ROOT / "results" / "ucr.jsonl",
        "--figure",
        tmp_path / "a.png",
        "--readme",
        copy,
    )
    assert not done.returncode, done.stderr
    assert copy.read_text() == page
    row = next(
        line
        for line in page.splitlines()
        if line.startswith("| s4 | self-pretrained - from scratch")
    )
    sets, families = re.search(r"\| (\d+) \((\d+)\) \|", row).groups()
    interval = re.search(r"[+-]\d+\.\d \[.*?\]", row)[0]
    limits = re.findall(r"^\| \w+ \| training series \| \S+ \[(\S+), (\S+)\]", page, re.M)
    # as `own` says
    assert len(limits) == 2 and all(float(low) < 0 < float(high) for low, high in limits)
    found = re.findall(
        r"- (\w+): gains .*? of (\S+) points .*? of (\S+) over .*? all (\d+) sets",
        " ".join(page.split()),
    )
    for model, one_set, over_all, several in found:  # typed on top, and S4's elsewhere
        name = {"s4": "S4", "rotary": "rotary Transformer"}[model]
        assert f"| {name} | {several} | {one_set} points | {over_all} points |" in page
    texts = (ROOT / "README.md").read_text(), (ROOT / "results" / "own.md").read_text()
    assert all(re.search(rf"varies\s+by {found[0][1]} ", text) for text in texts)
    for text in (
        page.split("<!-- sets:begin -->")[0],
        (ROOT / "README.md").read_text(),
        (ROOT / "results" / "own.md").read_text(),
    ):
        text = " ".join(text.split()).replace(" points [", " [")
        assert interval in text and f"{sets} sets" in text and f"{families} families" in text


def test_how_far_gains_of_seeds_repeat_as_typed():
    """Analysis of variance by its formula, over the sets with two seeds in the kept records."""
    page, scores = (ROOT / "results" / "ucr.md").read_text(), {}
    for run in map(json.loads, (ROOT / "results" / "ucr.jsonl").read_text().splitlines()):
        if run.get("start") in ("scratch", "spt") and not run["changed"]:
            labels, right = (np.array(run["counts"][name], float) for name in ("labels", "right"))
            share = right[labels > 0] / labels[labels > 0]
            uneven = rf"| {run['task'][4:]}\* |" in page
            score = 100 * (share.mean() if uneven else right.sum() / labels.sum())
            scores.setdefault((run["model"], run["task"]), {})[run["start"], run["seed"]] = score
    for model in ("s4", "rotary"):
        gains = np.array(
            [
                [of["spt", seed] - of["scratch", seed] for seed in (0, 1)]
                for (name, _), of in scores.items()
                if name == model and ("spt", 1) in of
            ]
        )
        n, mean = len(gains), gains.mean()
        between = 2 * sum((gains.mean(1) - mean) ** 2) / (n - 1)
        ratio = between / (sum(((gains - gains.mean(1, keepdims=True)) ** 2).ravel()) / n)
        p = f"{fisher.sf(ratio, n - 1, n):.2f}".lstrip("0")
        r = f"{np.corrcoef(gains.T)[0, 1]:.2f}".lstrip("0")
        assert f"F({n - 1}, {n}) = {ratio:.2f}, p = {p}" in page and re.search(
            rf"(by|r =) {re.escape(r)}\b", page
        )
