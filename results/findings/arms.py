"""The arms of the questions in results/findings.md: their runs, what they score, and how sure a difference is. Read by
tables.py and figures.py.
"""
import math
import re
import statistics
import sys
from collections import namedtuple
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT, KEPT = HERE.parents[1], HERE / "runs.jsonl"
sys.path.insert(0, str(ROOT))

from compare import (estimates, half_width, half_width_of, identity, minus, read_runs, scores, with_pretraining)
from data import UserError
from experiments import CURVE, questions, record, trained
from recipes import read_table


# ---- Runs ------------------------------------------------------------------------------------------------------------

def layout(number):
    """[(names of rows, names of columns)] of a question. A row and a column name the runs ROW-COLUMN-sSEED."""
    found = []
    for row in questions()[number].rows:
        name = "-".join(filter(None, (row.task, row.model, row.word)))
        columns = ["-".join(filter(None, (arm.word, arm.start))) for arm in row.arms]
        if found and found[-1][1] == columns:                  # the same table goes on
            found[-1][0].append(name)
        else:
            found.append(([name], columns))
    return found


def by_name(runs):
    """{name without seed: {seed: run}}, of both stages. UserError for a run that is not what its entry says. Trials and
    the runs that they led to share settings: here, and nowhere else, a name says which of them is meant."""
    entries, found = {}, {}
    for question in questions().values():
        for run in (run for row in question.rows for run in trained(row)):
            for each in filter(None, (run, run.first)):
                name = "-".join(filter(None, (each.task, each.model, each.word, each.start)))
                entries.setdefault(name, identity(record(each)))
    for run in [*with_pretraining(runs), *(run for run in runs if "start" not in run)]:
        name = run["run"].rsplit("-s", 1)[0]
        if name in entries and identity(run) != entries[name]:
            raise UserError(f"{run['run']} is not what experiments.py says: {identity(run)}, not {entries[name]}")
        found.setdefault(name, {})[run["seed"]] = run
    return found


def of_question(number, found):
    """Its runs alone: question 12 has seeds from 100 on, which no other may show, under the same names."""
    return {name: {seed: run for seed, run in arm.items() if (seed >= 100) == (number == 12)}
            for name, arm in found.items()}


def nothing(task, fresh=False):
    """[(name, test accuracy in percent)] of what costs nothing on a bed, or little: results/baseline.jsonl. fresh: on
    the fresh images, where they were tried on these."""
    found = {}
    for run in read_runs(ROOT / "results" / "baseline.jsonl"):
        if run["task"] == task:
            own = run["fresh"]["accuracy"] * 100 if fresh and "fresh" in run else run["score"]
            found.setdefault(run["model"], []).append(run | dict(score=own))
    linear = [(f"linear model of {name}", runs[0]) for name, runs in found.items() if "constant_accuracy" in runs[0]]
    return [*(("one answer for all", 100 * (run["fresh"]["constant"] if fresh and "fresh" in run else
                                            run["constant_accuracy"])) for _, run in linear),
            *((name, run["score"]) for name, run in linear),
            *((name, statistics.mean(run["score"] for run in runs)) for name, runs in found.items()
              if "constant_accuracy" not in runs[0])]


# Question 10's arms of one model. at: {(budget, share of pretraining): (name, arm)}, as `scatter` has them; dropped: the
# same with dropout.
Curve = namedtuple("Curve", "name task passes share at arms dropped")


def curves(found):
    """[Curve] of question 10."""
    made = []
    for line, row in zip(read_table(CURVE), questions()[10].rows, strict=True):
        name = "-".join(filter(None, (row.task, row.model, row.word)))
        arms, at, dropped = {}, {}, {}
        for arm in row.arms:
            key = name, f"{arm.word}-{arm.start}"
            budget, share = re.match(r"b([\d.]+)(?:-share([\d.]+))?-", arm.word).groups()
            arms[key] = found.get("-".join(key), {})
            (dropped if "dropout" in arm.word else at)[float(budget), float(share or 0)] = key
        made.append(Curve(name, row.task, int(line["passes"]), float(line["share"]), at, fresh(arms), dropped))
    return made


EXIT_WORDS = {"begin": {"mimetic": "mimetic start", "near": "start that prefers near positions"},
              "repeat": {0.125: "an eighth of the examples first"},
              "inputs": {"listops": "SPT on ListOps", "shuffled": "SPT on shuffled positions"}}


def exits(found):
    """{task: {exit in words: arm}} of question 11."""
    made = {}
    for row in questions()[11].rows:
        arms = made.setdefault(row.task, {})
        for arm, run in zip(row.arms, trained(row), strict=True):
            flags = record(run)["changed"]
            flags = flags | flags.get("pretraining", {})
            name = next((names[flags[flag]] for flag, names in EXIT_WORDS.items() if flag in flags),
                        {"scratch": "from scratch", "spt": "SPT", "joint": "joint training"}[arm.start])
            name = "max pooling" if row.word == "max" else name
            words = row.task, row.model, row.word, arm.word, arm.start
            arms[name] = found.get("-".join(filter(None, words)), {})
    return {task: fresh(arms) for task, arms in made.items()}


def fresh(arms):
    """{key: {seed: run}} with their scores on the 20,000 fresh images, if all of these runs have been tried on them."""
    if not all("fresh" in run for arm in arms.values() for run in arm.values()):
        return arms
    return {key: {seed: run | dict(score=100 * run["fresh"]["accuracy"], test_examples=run["fresh"]["examples"])
                  for seed, run in arm.items()} for key, arm in arms.items()}


# ---- How sure a difference is ----------------------------------------------------------------------------------------

def of_test(*arms):
    """Variance that another test set would bring to a difference of these arms {seed: run}, at most: errors on the
    same examples cancel in part, and how far is not known."""
    share = [statistics.mean(run["score"] / 100 for run in arm.values()) for arm in arms]
    sizes = [min(run["test_examples"] for run in arm.values()) for arm in arms]
    return 1e4 * sum(p * (1 - p) / n for p, n in zip(share, sizes))


def wider(half, variance):
    """Half of a 95 % interval over seeds, with that of the test set. None stays: there is one seed."""
    return None if half is None else math.hypot(half, 1.96 * math.sqrt(variance))


def change(arms, key, base, sure):
    """Of arms {key: {seed: run}} with Estimates of their scatter: difference of two means, half of its 95 % interval
    with these, the same with the differences paired by seed or None. Both hold the error of the test set. Halves are
    None for one seed."""
    one, other = scores(arms[key]), scores(arms[base])
    mean, size = statistics.mean(one.values()) - statistics.mean(other.values()), of_test(arms[key], arms[base])
    half = half_width((sure[key], len(one)), (sure[base], len(other))) if min(len(one), len(other)) > 1 else None
    alike = half is not None and one.keys() == other.keys()
    paired = half_width_of([*minus(one, other).values()]) if alike else None
    return mean, wider(half, size), wider(paired, size)


def changed(arms, key, base, sure):
    """The same as text, a dash where an arm has no runs."""
    if not arms[key] or not arms[base]:
        return "–"
    mean, half, paired = change(arms, key, base, sure)
    if half is None:
        return f"{mean:+.1f} (one seed)"
    text = f"{mean:+.1f} [{mean - half:+.1f}, {mean + half:+.1f}]"
    return text + (f", paired [{mean - paired:+.1f}, {mean + paired:+.1f}]" if paired is not None else "")


def scatter(arms):
    """{(row, column): {seed: run}} -> {(row, column): Estimate}, pooled over the arms of a task that scatter alike;
    {task: what to say of it}."""
    found, said = {}, {}
    tasks = dict.fromkeys(row.split("-")[0] for row, _ in arms)
    for task in tasks:
        mine = {key: scores(arm) for key, arm in arms.items() if key[0].split("-")[0] == task and arm}
        if mine:
            found |= estimates(mine)
            some = [*{found[key] for key in mine if found[key].freedom}]
            if len(some) == 1:
                said[task] = f"{math.sqrt(some[0].variance):.1f} points, {some[0].freedom} degrees of freedom"
            elif some:
                said[task] = "each arm its own"
    return found, said
