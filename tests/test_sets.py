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
from scipy.stats import norm, spearmanr, wilcoxon

from compare import report, sets
from compare.reading import read_runs
from data import open_task
from experiments import entries
from pretrain import hide

NAMES = [*entries.FAMILIES][:20]


def record(name, start, seed, right, n=200, **more):
    changed = more.pop("changed", {})
    return dict(run=f"ucr-{name}-{more.get('model', 's4')}-{start}-s{seed}", task=f"ucr:{name}", model="s4", seed=seed,
                objective="none" if start == "baseline" else "masked", steps=10, seconds=3.0, changed=changed,
                commit="abc", torch="2", device="CPU") | ({} if start == "pretrain" else dict(
                    start=start, test_accuracy=right / n, test_examples=n, val_accuracy=right % 7 / 7, init=None,
                    counts=dict(labels=[n // 2] * 2, right=[right // 2, right - right // 2],
                                predicted=[n // 2] * 2))) | more


def records(gain, names=NAMES):
    """Runs of two models with three seeds on some sets. gain(name) -> what SPT gains, in examples of 200."""
    rng, found = np.random.default_rng(1), []
    for name in names:
        base = int(rng.integers(60, 140))
        found.append(record(name, "baseline", 0, base + 20, model="random convolutions", length=100 + base, classes=2 + base % 7,
                            train_examples=base,
                            data=dict(sizes=[base, 9, 200]), denoising=dict(interpolation=-0.1, mean=-1.0),
                            constant_accuracy=0.5))
        for model, seed in itertools.product(("s4", "lstm"), range(3)):
            noise = int(rng.integers(-6, 7))
            found += [record(name, "scratch", seed, base, model=model), record(
                name, "pretrain", seed, 0, model=model, val_score=-0.05,
                score_is="minus squared error on predicted samples"),
                record(name, "spt", seed, base + gain(name) + noise, model=model,
                       init=f"ucr-{name}-{model}-pretrain-s{seed}")]
    return found


def kept(folder, found):
    path = folder / "runs.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in found))
    return path


def test_the_tables_are_those_of_the_records(tmp_path):
    gains = {name: 10 if len(name) % 2 else -4 for name in NAMES}
    found = records(gains.get)
    done = call("analyze.py", "sets", kept(tmp_path, found), "--figure", tmp_path / "sets.png")
    assert "denoising beside" not in done.stdout                        # it is the same for all sets here
    assert not done.returncode, done.stderr
    points, families = [], {}
    for name in NAMES:
        spt, scratch = ([one["test_accuracy"] for one in found if one["task"] == f"ucr:{name}" and one["model"] == "s4"
                         and one.get("start") == start] for start in ("spt", "scratch"))
        points.append(round(100 * (sum(spt) - sum(scratch)) / 3, 9))
        families.setdefault(entries.FAMILIES[name], []).append(points[-1])
    mean = np.mean([np.mean(some) for some in families.values()])
    outcomes = [sum(test) for test in zip(*((one > 1e-9, abs(one) <= 1e-9, one < -1e-9) for one in points))]
    line = next(line for line in done.stdout.splitlines() if line.startswith("| s4 | self-pretrained - from scratch"))
    assert f"| {len(NAMES)} ({len(families)}) | {' / '.join(map(str, outcomes))} | {mean:+.1f} [" in line
    assert f"| {wilcoxon([np.mean(some) for some in families.values()]).pvalue:.3f} | " in line
    # By hand: the rank correlation of length and gain over families, and how often the commoner sign is right.
    lengths = {}
    for one in found:
        if one.get("start") == "baseline":
            lengths.setdefault(entries.FAMILIES[one["task"][4:]], []).append(one["length"])
    rho = spearmanr([np.mean(some) for some in lengths.values()], [
        np.mean(some).round(9) for some in families.values()]).statistic
    assert f"| s4 | length | {rho:+.2f} [" in done.stdout
    assert f"of {sum(map(bool, points))} sets; always the commoner sign, in {max(outcomes[0], outcomes[2])}." in (
        " ".join(done.stdout.split()))
    assert (tmp_path / "sets.png").stat().st_size > 10_000


def test_one_set_is_not_enough(tmp_path):
    done = call("analyze.py", "sets", kept(tmp_path, records(lambda name: 1, NAMES[:1])))
    assert done.returncode and "at least two sets" in done.stderr and "Traceback" not in done.stderr


def test_holm():
    """By definition: the k-th smallest of n p values times n - k, and never below a smaller one's."""
    samples = [np.arange(1, 7), np.arange(-1, 9), np.zeros(4), np.arange(-2, 8), np.arange(1, 6)]
    p, corrected = sets.signed_rank(samples)
    assert np.allclose(p, [wilcoxon(sample).pvalue if sample.any() else 1 for sample in samples])
    wanted, least = {}, 0
    for k, one in enumerate(sorted(p)):
        wanted[one] = least = max(least, min(1, one * (len(p) - k)))
    assert [*corrected] == [wanted[one] for one in p] and len({*wanted.values()}) > 2


def both(after, before):
    return pandas.DataFrame(dict(after=after, before=before)).dropna()


def test_the_interval_of_families_covers():
    """Families with an effect of their own, sets and seeds with noise: 95 % of intervals hold the true mean, or, with
    only 28 families, a few less. The mean of a family varies by sqrt(4 + (1 + 2 / 3) / sets), which gives the width."""
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
    width = 2 * 1.96 * np.sqrt(np.mean([4 + (1 + 2 / 3) / (1 + family % 3) for family in range(28)]) / 28)
    assert 0.85 < np.mean(widths) / width < 1.25


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
    found = {subprocess.run(words, cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True,
                            check=True).stdout for seed in "12"}
    assert len(found) == 1


def test_the_report_says_what_interpolation_explains_and_what_was_not_finished(tmp_path):
    """The interpolation's error is a tenth of the variance, a model's .05; from scratch, two of three seeds improve in
    the last tenth, after SPT one."""
    found = records(lambda name: 5, NAMES[:1])
    for one in found:
        best = {"scratch": 2, "spt": 1}.get(one.get("start"), 0) > one["seed"]
        curve = [0.2, 0.5, 0.5, 0.6 if best else 0.5]
        one["evals"] = [dict(kind="eval", step=step, val_accuracy=score) for step, score in zip((1, 5, 9, 10), curve)]
    done = call("analyze.py", "own", kept(tmp_path, found), "--figure", tmp_path / "own.png")
    said = " ".join(done.stdout.split())
    assert "interpolation between visible neighbours explains 90.0 %, s4 95.0 %, lstm 95.0 %." in said
    assert "not learned more" not in said
    assert "**Still improving at the end**: s4 from scratch, lstm from scratch. Longer runs" in said
    for one in found:
        one |= {"val_score": -0.2} if "val_score" in one else {}
    done = call("analyze.py", "own", kept(tmp_path, found), "--figure", tmp_path / "own.png")
    assert "**Pretraining has not learned more than interpolation.**" in " ".join(done.stdout.split())


@pytest.mark.parametrize("ragged", [False, True])
def test_interpolation_beside_a_plain_loop(ragged, tmp_path):
    """What baseline.py records: each hidden sample from the nearest visible ones of its series and channel, never from
    the padding of a shorter series, far from the values here."""
    rng = np.random.default_rng(0)
    x, y = 50 + rng.normal(size=(40, 12, 2)).cumsum(1), np.arange(40) % 2
    for i in range(40 * ragged):
        x[i, 4 + i % 9:] = np.nan
    np.savez(tmp_path / "walk.npz", x=x, y=y)
    name = f"file:{tmp_path / 'walk.npz'}"
    for words in (("data.py", "--task", name, "--data-dir", tmp_path / "data"), (
            "baseline.py", "--task", name, "--data-dir", tmp_path / "data", "--out", tmp_path / "out")):
        done = call(*words)
        assert not done.returncode, done.stderr
    task, _, val, _ = open_task(name, tmp_path / "data")
    series = val.batch(np.arange(len(val))).samples.numpy()                                   # (n, l, channels)
    ends = val.batch(np.arange(len(val))).lengths.tolist() if ragged else [12] * len(val)
    hidden = hide((len(val), task.length), task.mask, 0)[:, :series.shape[1]]
    hidden &= np.arange(series.shape[1]) < np.array(ends)[:, None]
    errors = []
    for i, t in zip(*np.nonzero(hidden)):
        left, right = (next((k for k in some if not hidden[i, k]), None) for some in (range(t, -1, -1), range(t, ends[i])))
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


def test_your_report_says_what_spt_changed_on_sets_of_the_archive_of_that_size():
    """Beside the kept records, read plainly: accuracy, or the mean recall where classes are more unequal than 3:1."""
    def score(run):
        labels, right = (np.array(run["counts"][name], float) for name in ("labels", "right"))
        labels, right = labels[labels > 0], right[labels > 0]
        return 100 * (np.mean(right / labels) if labels.max() > 3 * labels.min() else right.sum() / labels.sum())

    kept = ROOT / "results" / "ucr.jsonl"
    points, runs = {}, [json.loads(line) for line in kept.read_text().splitlines()]
    for (task, n), some in itertools.groupby(sorted((run for run in runs if run["model"] == "s4" and "start" in run and
                                                     "steps" not in run["changed"]), key=lambda run: run["task"]),
                                             lambda run: (run["task"], run["train_examples"])):
        by_start = {start: [score(run) for run in pair] for start, pair in itertools.groupby(
            sorted(some, key=lambda run: run["start"]), lambda run: run["start"])}
        if {"spt", "scratch"} <= by_start.keys() and 200 <= n < 500 and task != "ucr:Adiac":
            points[task] = round(np.mean(by_start["spt"]) - np.mean(by_start["scratch"]), 9)
    assert len(points) > 5
    found = report.comparisons([run for run in read_runs(kept) if run["task"] == "ucr:Adiac"])
    (key, compared), = ((key, one) for key, one in found.items() if not key.passes)
    line = next(line for line in report.on_the_archive(key, compared) if " changed s4 " in line)
    gained, lost = (sum(sign * one > 0 for one in points.values()) for sign in (1, -1))
    assert line.startswith(f"On {len(points)} sets of the UCR archive with 200 to 499 training series (results/ucr.md)")
    assert f"median of {np.median([*points.values()]):+.1f} points: {gained} gained, {lost} lost" in line
    assert not report.on_the_archive(key._replace(share=0.1), compared)


def test_pages_say_what_the_kept_records_say(tmp_path):
    page = (ROOT / "results" / "ucr.md").read_text()
    copy = tmp_path / "ucr.md"
    copy.write_text(page)
    done = call("analyze.py", "sets", ROOT / "results" / "ucr.jsonl", "--figure", tmp_path / "a.png", "--readme", copy)
    assert not done.returncode, done.stderr
    assert copy.read_text() == page
    row = next(line for line in page.splitlines() if line.startswith("| s4 | self-pretrained - from scratch"))
    sets, families = re.search(r"\| (\d+) \((\d+)\) \|", row).groups()
    interval = re.search(r"[+-]\d+\.\d \[.*?\]", row)[0]
    for text in page.split("<!-- sets:begin -->")[0], (ROOT / "README.md").read_text(), (
            ROOT / "results" / "own.md").read_text():
        text = " ".join(text.split())
        assert interval.replace(" [", " points [") in text and f"{sets} sets" in text and f"{families} families" in text
