"""Tables and verdicts over made runs: every cell, interval and decision equals a plain loop."""

import itertools
import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import RECORD, call, made_run, of_kind
from scipy.stats import t as student
from sklearn import metrics

from compare import verdict
from engine.folder import summary

HEADS = dict(scratch="from scratch", spt="self-pretrained", joint="joint")
HEADS |= dict(linear_probe="linear probe")
BY = dict(spt="SPT", joint="joint training")
# Of the table of a report: column -> the starts whose scores it compares.
DIFFERENCES = {"SPT - scratch": ("spt", "scratch"), "joint - scratch": ("joint", "scratch")}
DIFFERENCES |= {"SPT - joint": ("spt", "joint")}

# ---- Made runs: targets and predictions beside each record ---------------------------------------

STARTS = ("scratch", None), ("spt", None), ("spt", 0.25), ("joint", None), ("linear_probe", None)
# model, lr, share of the labels (over 1: labels per class), objective; None: the recipe's
LINES = ("s4", None, None, "masked"), ("rotary", 0.01, None, "masked")
MORE = ("s4", None, 0.5, "masked"), ("s4", None, 3, "masked"), ("s4", None, None, "causal")
TITLES = {1: "", 0.5: " with 50 % of the labels", 3: " with 3 labelled per class"}
# The sets of a report: what differs from the defaults of `made`.
SETS = {
    "class": dict(lines=(*LINES, *MORE)),
    "unequal": dict(kind="unequal", sizes=(40, 10, 7), lines=(*LINES, *MORE)),
    "number": dict(kind="number", lines=(*LINES, *MORE)),
    "easy": dict(skills=(0.85, 1), scratch=1, seeds=(0, 1, 2), passes="all", same="variant"),
    "hard": dict(skills=(0.3, 0.4), linear=0.97, error=0.5, seeds=(0, 1, 2)),
    "dull": dict(kind="unequal", sizes=(40, 10, 7), skills=(0, 0), passes="row"),
    "large": dict(sizes=(300, 300, 400), skills=(0.97, 0.999), same="variant"),
    "few": dict(sizes=(4, 4, 4)),
    "twins": dict(skills=(0.7, 0.7), seeds=(0, 1), passes="row", same="set"),
    "lone": dict(lines=LINES[:1], starts=STARTS[:1], seeds=(0,)),
}


def predicted(rng, y, kind, skill):
    """Predictions of this skill, 0 to 1. With none a model predicts one or two classes."""
    if kind == "number":
        noise = rng.integers(-20, 21, len(y)) / 32 * (1 - skill)
        return (y + noise).astype(np.float16).astype(float)
    if skill == 0:
        return rng.integers(0, 2, len(y)) * (rng.random() > 0.7)
    return np.where(rng.random(len(y)) < skill, y, rng.integers(0, 3, len(y)))


def with_score(kind, y, found, kept, first=None, **record):
    """A finetuning run or a baseline with these predictions: its record, and what a loop needs."""
    number = kind == "number"
    record = RECORD | summary(of_kind("number" if number else "class", 3), y, found) | record
    measure = dict(number=metrics.r2_score, unequal=metrics.balanced_accuracy_score)
    score = measure.get(kind, metrics.accuracy_score)(y, found) * (1 if number else 100)
    record |= dict(test_r2=score) if number else dict(test_accuracy=float((found == y).mean()))
    for name in () if kept else ("right", "values"):
        record.pop(name, None)
    field = "val_r2" if number else "val_accuracy"
    middle, late, last = [line[field] for line in record["evals"]] or (0, 0, 0)
    # Joint training takes two passes a step if its objective hides inputs.
    twice = record["start"] == "joint" and record["objective"] == "masked"
    spent = record["steps"] * (2 if twice else 1), record["seconds"] / 60
    passes, minutes = spent if first is None else (spent[0] + first["steps"], spent[1] + 2)
    facts = dict(passes=passes, minutes=minutes, improves=last > max(middle, late), first=first)
    facts |= dict(val=(1 if number else 100) * record[field], score=score, kept=kept, kind=kind)
    return SimpleNamespace(record=record, y=y, found=found, **facts)


def made(
    name, seed=33, kind="class", sizes=(20, 20, 24), skills=(0.3, 0.9), lines=LINES, starts=STARTS,
    linear=0.7, error=0.15, seeds=(), passes=None, same=None, scratch=None,
):  # fmt: skip
    """The runs of a set in random order: lines x starts, in seeds that some variants lack. skills:
    of the networks; scratch: of those from scratch; linear: of the linear model; error: least of
    pretraining; passes: equal in `all` runs, or in each row; same: predictions of all runs of the
    set, or of a variant. With seed 33 a report makes every decision."""
    rng, task = np.random.default_rng(seed), f"file:/my/{name}.npz"
    y = rng.permutation(np.repeat([0, 1, 2], sizes))
    y = rng.integers(-40, 41, 40) / 32 if kind == "number" else y  # float16 holds them exactly
    unit = "r2" if kind == "number" else "accuracy"
    alike = same == "set"  # then all validate alike, too
    record = {f"constant_{unit}": 0.4, f"val_{unit}": 0.5, "objective": "none", "evals": []}
    record |= dict(denoising=dict(interpolation=-0.25, mean=-1.0), steps=0, seconds=4.0)
    record |= dict(run=f"{name}-linear", model="n-grams", task=task, start="baseline")
    runs = [with_score(kind, y, predicted(rng, y, kind, linear), True, **record)]
    draws = [0, 1] if kind == "class" else [0]
    for draw in draws if any(line[2] == 3 for line in lines) else ():
        guesses = predicted(np.random.default_rng(draw), y, kind, linear)
        record |= dict(run=f"{name}-few-{draw}", changed=dict(labels_per_class=3), seed=draw)
        runs.append(with_score(kind, y, guesses, True, **record))
    for (i, line), (start, mask) in itertools.product(enumerate(lines), starts):
        skill = (start == "scratch" and scratch) or rng.uniform(*skills)
        kept = alike or bool(rng.random() < 0.7)
        drawn = sorted(rng.choice(4, rng.integers(1, 5), replace=False).tolist())
        for seed in seeds or drawn:
            whole = 100 + 2 * i if passes == "row" else 2 * int(rng.integers(50, 60))
            whole = 100 if passes == "all" else whole
            record, first = settings_of(name, task, line, start, mask, seed, whole)
            record |= {f"val_{unit}": 0.5 if alike else float(rng.random())}
            record |= dict(seconds=float(rng.integers(60, 9000)), processes=int(rng.integers(1, 3)))
            for part, score in zip((0.5, 0.9, 1), rng.random(3).round(1).tolist()):
                step = part * record["steps"]
                record["evals"] += [{"kind": "eval", "step": step, f"val_{unit}": score}]
            if first:
                first["val_score"] = -float(rng.uniform(error, 0.6))
                runs.append(SimpleNamespace(record=first, kind=None))
            place = 0 if alike else 10 * i + starts.index((start, mask))
            chance = np.random.default_rng(place) if same else rng
            own = skill if same or not skill else min(1, skill + rng.normal() / 20)
            guesses = predicted(chance, y, kind, own)
            runs.append(with_score(kind, y, guesses, kept, first, **record))
    rng.shuffle(runs)
    return runs


def settings_of(name, task, line, start, mask, seed, steps):
    """What the records of a run and of its pretraining (or None) say of both."""
    model, rate, share, objective = line
    pairs = dict(lr=rate, freeze=start == "linear_probe" or None)
    pairs["label_fraction" if (share or 1) <= 1 else "labels_per_class"] = share
    changed = {flag: value for flag, value in pairs.items() if value}
    shared = dict(task=task, model=model, objective=objective, seed=seed)
    run = f"{name}-{model}-{objective}-{start}-{rate}-{share}-{mask}-s{seed}"
    record = shared | dict(run=run, changed=changed, evals=[])
    record |= dict(start=start.replace("linear_probe", "spt"))
    record |= dict(steps=steps if start == "scratch" else steps // 2)
    record |= dict(joint=1.0 if start == "joint" else None)
    if record["start"] != "spt":
        return record, None
    before = dict(mask=mask) if mask else {}
    changed |= dict(pretraining=before) if before else {}
    first = RECORD | shared | dict(run=f"{run}-first", changed=before, steps=steps // 2)
    first |= {"seconds": 120.0, "best.pt": f"{run} weights", "start": "pretrain"}
    first |= dict(score_is="minus squared error on predicted samples")
    return record | dict(init=f"gone/{run}-first", pretrained=f"{run} weights"), first


def kept(folder, *sets):
    """Write the runs of some sets into one file -> its path."""
    path = folder / "runs.jsonl"
    path.write_text("".join(json.dumps(run.record) + "\n" for runs in sets for run in runs))
    return path


def as_folders(root, *sets):
    """Write the runs of some sets as folders, each with its settings and its log -> the root."""
    for run in itertools.chain(*sets):
        record = dict(run.record)
        start, name, evals = (record.pop(key, None) for key in ("start", "run", "evals"))
        changed = dict(lr=0.001, mask=0.3, freeze=False) | record["changed"]
        changed = dict(label_fraction=None, labels_per_class=None) | changed
        log = "".join(f"{json.dumps(line)}\n" for line in evals or ())
        made_run(root, start, name=name, config=changed, log=log, **record)
    return root


# ---- The plain loops -----------------------------------------------------------------------------


def added(run, label):
    """What each example of a class (None: all) adds to the score; if unknown, right ones first."""
    y, found = run.y, run.found
    if run.kind == "number":
        around = (y - y.mean()) ** 2
        above = around - (found - y) ** 2
        return run.score + (above - run.score * around) / around.mean() if run.kept else None
    right = [float(found[i] == y[i]) for i in range(len(y)) if label in (None, y[i])]
    return right if run.kept else sorted(right, reverse=True)


def variance_of(after, before, unit):
    """Of a mean over examples, and its degrees of freedom. after, before: a list per seed."""
    after, before = np.array(after), np.array(before)
    n, more = after.shape[1], 2 * unit
    gaps = after.mean(0) - (before.mean(0) if len(before) else 0)
    mean = (gaps.sum() + (0 if len(before) else unit)) / (n + more)
    variance = ((gaps**2).sum() + unit) / (n + more) - mean**2
    variance *= (n + more) / (n + more - 1)
    for side in (after, before):
        if len(side) > 1:
            variance -= side.var(0, ddof=1).mean() / len(side)
    return max(variance, unit / (n + more)) / n, n + more - 1


def half_of(parts):
    """Of a sum of independent (variance, degrees of freedom), by Welch and Satterthwaite."""
    square = sum(variance for variance, _ in parts)
    if square == 0:
        return 0.0
    freedom = square**2 / sum(variance**2 / degrees for variance, degrees in parts)
    return student.ppf(0.975, freedom) * math.sqrt(square)


def half_of_test(after, before=()):
    kind, parts = after[0].kind, []
    labels = [0, 1, 2] if kind == "unequal" else [None]
    unit = 0 if kind == "number" else 1
    for label in labels:
        sides = [[added(run, label) for run in side] for side in (after, before)]
        if any(line is None for side in sides for line in side):
            return 0.0
        if all(run.kept for run in (*after, *before)):
            parts.append(variance_of(*sides, unit))
            continue
        for side in filter(None, sides):  # as if errors were independent
            each = [variance_of([line], [], unit) for line in side]
            parts.append(tuple(sum(column) / len(each) for column in zip(*each)))
    return (1 if kind == "number" else 100) / len(labels) * half_of(parts)


def half_of_seeds(*sides):
    if min(map(len, sides)) < 2:
        return 0.0
    return half_of([(spread_of(side)[1] ** 2 / len(side), len(side) - 1) for side in sides])


def mean_of(values):
    return sum(values) / len(values)


def spread_of(values):
    return [mean_of(values), np.std(values, ddof=1)] if len(values) > 1 else [mean_of(values)]


def scores_of(variant):
    return [run.score for run in variant.values()]


def difference(after, before):
    """(mean, half of the interval, that of the test set, common seeds) of two {seed: run}."""
    seeds = sorted(after.keys() & before.keys())
    if not seeds:
        return None, 0.0, 0.0, seeds
    sides = [[side[seed] for seed in seeds] for side in (after, before)]
    scores = [[run.score for run in side] for side in sides]
    mean, test = sum(a - b for a, b in zip(*scores)) / len(seeds), half_of_test(*sides)
    half = math.hypot(half_of_seeds(*scores), test) if len(seeds) > 1 else 0.0
    return mean, half, test, seeds


def passes_of(variant):
    """As compare prints them."""
    return "/".join(map(str, sorted({run.passes for run in variant.values()})))


# ---- Cells ---------------------------------------------------------------------------------------


def rows_in(text):
    """[{column: cell}] of every table of a text."""
    tables = []
    for block in re.findall(r"(?:^\|.*\n)+", text + "\n", re.M):
        head, _, *lines = [
            [cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()
        ]
        tables.append([dict(zip(head, line, strict=True)) for line in lines])
    return tables


def agrees(cell, text, numbers, digits):
    """Whether a cell is this text, in which each # is a number, printed with so many digits."""
    number = rf"([-+]?\d+\.\d{{{digits}}})"
    match = re.fullmatch("".join(number if part == "#" else re.escape(part) for part in text), cell)
    assert match, f"{cell!r} is not {text!r}"
    for printed, value in zip(match.groups(), numbers, strict=True):
        assert abs(float(printed) - value) <= 0.5 * 10**-digits + 1e-9, (cell, text, numbers)


def agrees_as_spread(cell, values, digits, end=""):
    agrees(cell, ("# ± #" if len(values) > 1 else "#") + end, spread_of(values), digits)


def agrees_as_gain(cell, mean, half, note, digits):
    if mean is None:
        return agrees(cell, f"–{note}", [], digits)
    if not half:
        return agrees(cell, f"#{note}", [mean], digits)
    return agrees(cell, f"# [#, #]{note}", [mean, mean - half, mean + half], digits)


def by_variant(runs):
    """{(start, model, objective, *settings): {seed: run}} of finetuning runs."""
    variants = {}
    for run in runs:
        if run.kind:
            changed = dict(run.record["changed"])
            before = changed.pop("pretraining", {}).items()
            changed |= {f"pretraining.{name}": value for name, value in before}
            names = (run.record[name] for name in ("start", "model", "objective"))
            variants.setdefault((*names, *sorted(changed.items())), {})[run.record["seed"]] = run
    return variants


def printed(*words):
    """What analyze.py prints, without the seconds that its figure takes."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("report", "settings"):
            patch.setattr(f"compare.{module}.draw", lambda *arguments: None)
        done = call("analyze.py", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---- compare -------------------------------------------------------------------------------------

CONFIG = {"lr": "0.001", "label-fraction": "–", "labels-per-class": "–", "freeze": "False"}
CONFIG |= {"pretraining mask": "0.3"}  # of as_folders
COLUMNS = "start", "model", "objective", *CONFIG


def cells_of_compare(key, config):
    """The cells by which a row is found. Kept runs have no config.json, so that what they leave to
    the recipe is `recipe`; a baseline has no settings."""
    cells = {} if key[0] == "baseline" else dict(config)
    if key[0] != "spt":
        cells.pop("pretraining mask", None)
    cells |= {name.replace(".", " ").replace("_", "-"): f"{value}" for name, value in key[3:]}
    return *key[:3], *(cells.get(name, "–") for name in COLUMNS[3:])


def over_which(key, variants, chosen, wanted):
    """The variant over which compare takes the gain of another: the best from scratch, that of the
    wanted lr, or that from scratch of the same settings, whatever the pretraining. Or {}."""
    if key[0] == "baseline" or not wanted and key[0] == "scratch":
        return {}
    if chosen:
        return variants[chosen["scratch", *key[1:3], False]]
    pairs = dict(key[3:])
    if wanted:
        other = (*key[:3], *sorted((pairs | dict(lr=0.01)).items()))
        return variants.get(other, {}) if other != key else {}
    pairs = {name: pairs[name] for name in pairs if name not in ("pretraining.mask", "freeze")}
    return variants.get(("scratch", *key[1:3], *sorted(pairs.items())), {})


CASES = ("class", False, ()), ("class", True, ("--select", "val")), ("number", True, ())
CASES += (("number", True, ("--baseline", "lr=0.01")),)


@pytest.mark.parametrize("kind, folders, words", CASES)
def test_every_cell_of_compare_is_that_of_a_loop(kind, folders, words, tmp_path):
    """With --select, validation chooses among the variants with the most seeds, for each model and
    start; only the test scores of these are shown."""
    lines = [(model, rate, None, "masked") for model in ("s4", "rotary") for rate in (None, 0.01)]
    runs = made("my", len(words), kind, lines=(*lines, *MORE))
    source = as_folders(tmp_path / "a", runs) if folders else kept(tmp_path, runs)
    config = CONFIG if folders else dict.fromkeys(CONFIG, "recipe")
    variants, chosen = by_variant(runs), {}
    digits, title = (3, "test R2") if kind == "number" else (1, "test accuracy, %")
    val = {key: [run.val for run in variant.values()] for key, variant in variants.items()}
    for key in sorted(val, key=lambda key: (len(val[key]), mean_of(val[key]))):
        if "--select" in words:
            chosen[*key[:3], ("freeze", True) in key] = key  # the last one is the best
    (rows,) = rows_in(printed("compare", source, *words))
    by_cells = {tuple(row[name] for name in COLUMNS): row for row in rows}
    assert len(by_cells) == len(rows) == len(variants)
    (gain,) = [name for name in rows[0] if name.startswith("gain over ")]
    for key, variant in variants.items():
        row, scores = by_cells[cells_of_compare(key, config)], scores_of(variant)
        assert (row["seeds"], row["passes"]) == (str(len(variant)), passes_of(variant)), key
        agrees(row["minutes"], "#", [mean_of([run.minutes for run in variant.values()])], 1)
        if chosen:
            star = key in chosen.values()
            agrees_as_spread(row["validation"], val[key], digits, " *" * star)
            assert star != (row[title] == row["95 % interval"] == row[gain] == ""), key
            if not star:
                continue
        agrees_as_spread(row[title], scores, digits)
        half = math.hypot(half_of_seeds(scores), half_of_test([*variant.values()]))
        ends = [mean_of(scores) - half, mean_of(scores) + half] if len(scores) > 1 and half else []
        text = "[#, #]" if ends else "–"
        agrees(row["95 % interval"], text, ends, digits)
        scratch = over_which(key, variants, chosen, "--baseline" in words)
        if not scratch:
            assert row[gain] == "–", key
            continue
        mean, half, _, seeds = difference(variant, scratch)
        notes = [f"common seeds: {', '.join(map(str, seeds)) or 'none'}"]
        notes *= variant.keys() != scratch.keys()
        notes += [f"over {passes_of(scratch)} passes"] * (passes_of(scratch) != row["passes"])
        agrees_as_gain(row[gain], mean, half, f" ({'; '.join(notes)})" if notes else "", digits)


# ---- own and the demos: tables -------------------------------------------------------------------


def further_of(runs):
    """Accuracy (if the score is balanced accuracy) and macro F1 of some runs, in percent."""
    if runs[0].kind == "number":
        return []
    values = [100 * metrics.f1_score(run.y, run.found, average="macro") for run in runs]
    means = [mean_of([100 * run.record["test_accuracy"] for run in runs]), mean_of(values)]
    return means if runs[0].kind == "unequal" else means[1:]


def agrees_with_further(cell, values, others, digits):
    """Whether a cell shows these values, and in parentheses others."""
    outer, _, inner = cell.partition(" (")
    agrees_as_spread(outer, values, digits)
    others = others if digits == 1 else []  # R2 has none
    agrees(inner, f"{', '.join('#' for _ in others)})" if others else "", others, 1)


def arranged(variants):
    """{share of the labels: {line: {start: {seed: run}}}}, as a report arranges variants."""
    shares = {}
    for (start, model, objective, *pairs), variant in variants.items():
        changed = dict(pairs)
        share = changed.pop("label_fraction", None) or changed.pop("labels_per_class", 1)
        start = "linear_probe" if changed.pop("freeze", False) else start
        words = [model] if objective == "masked" else [model, objective]
        words += [f"{name.replace('.', ' ')}={value:g}" for name, value in sorted(changed.items())]
        if start != "baseline":
            shares.setdefault(share, {}).setdefault(", ".join(words), {})[start] = variant
    return shares


def check_table(rows, lines, linear):
    """Compare every cell of a report's table. lines: {line: {start: {seed: run}}}; linear: runs."""
    some = next(iter(variants_of(lines).values()))[0]
    few, digits = len(some.y) < 30, 3 if some.kind == "number" else 1
    if linear:
        (first, second), rows = rows[:2], rows[2:]
        column = next(head for head in HEADS.values() if head in first)
        scores = [run.score for run in linear]
        agrees_with_further(second[column], scores, further_of(linear), digits)
        others = [40, 100 * 2 * 0.4 / 1.4 / 3][some.kind != "unequal" :]
        agrees_with_further(first[column], [constant_of(linear)], others, digits)
        assert (first["minutes per run"], second["minutes per run"]) == ("", "4 s")
    present = {start for starts in lines.values() for start in starts}
    assert [row["model"] for row in rows] == [*lines]
    assert {start for start, head in HEADS.items() if head in rows[0]} == present
    for row in rows:
        starts, minutes = lines[row["model"]], iter(row["minutes per run"].split(" / "))
        for start in filter(present.__contains__, HEADS):
            variant = starts.get(start)
            if not variant:
                assert row[HEADS[start]] == next(minutes) == "–"
                continue
            runs = [*variant.values()]
            agrees_with_further(row[HEADS[start]], scores_of(variant), further_of(runs), digits)
            agrees(next(minutes), "#", [mean_of([run.minutes for run in runs])], 1)
        for column, pair in DIFFERENCES.items():
            cells = [row[head] for head in row if head.split(" [")[0].split(" (")[0] == column]
            assert len(cells) == ({*pair} <= present)
            mean, half, _, seeds = difference(*(starts.get(start, {}) for start in pair))
            note = {0: "", 1: " (one seed)"}.get(len(seeds), f" ({len(seeds)})")
            for cell in cells:
                agrees_as_gain(cell, mean, 0 if few else half, note, digits)


def variants_of(lines):
    """{name in words: [run]}"""
    return {
        f"{line} {HEADS[start]}": [*variant.values()]
        for line, starts in lines.items()
        for start, variant in starts.items()
    }


def constant_of(linear):
    """The score of the trivial baseline."""
    return {"number": 0.4, "unequal": 100 / 3, "class": 40.0}[linear[0].kind]


# ---- own and the demos: verdicts -----------------------------------------------------------------
# Each loop yields what a sentence must say: keys of verdict.WORDS, phrases, and all its numbers.


def effects(line, starts, n):
    """Of SPT on a model, and of joint training where it is decided or without SPT."""
    after, scratch = starts.get("spt", {}), starts.get("scratch", {})
    for start in ("spt", "joint"):
        if starts.get(start, {}).keys() & scratch.keys():
            decision = effect(line, start, starts[start], scratch, n)
            if start == "spt" or not (after and scratch) or decision[0][0] in ("gains", "loses"):
                yield decision


def effect(line, start, after, scratch, n):
    mean, half, test, seeds = difference(after, scratch)
    name = line if start == "spt" else f"{line}, {BY[start]}"
    runs, numbers = [*after.values(), *scratch.values()], [mean, mean - half, mean + half]
    ceiling, key = False, "no seeds" if len(seeds) == 1 else ""
    if runs[0].kind != "number":
        ceiling = mean_of(scores_of(scratch)) > max(98, 100 - 200 / n)
    elif not all(run.kept for run in runs):
        key = key or "no predictions"
    if key:
        reason = "one seed" if key == "no seeds" else "predictions were not kept"
        return ("unknown", key), [f"**{name}: {reason}**"], [mean]
    if mean + half < 0:
        return ("loses",), [f"**{line} loses by {BY[start]}**"], numbers
    if mean - half > 0 and half and not ceiling:
        return ("gains",), [f"**{line} gains by {BY[start]}**"], numbers
    if ceiling:
        key, reason = "ceiling", "at the ceiling"
    elif not mean:
        key, reason = "equal", "the scores are equal"
    elif abs(mean) <= test:
        key, reason, numbers = "noise", "more seeds would not settle it", [*numbers, test]
    else:
        key, reason = "seeds", "more than 100 seeds would"
        variances = [np.var(scores_of(side), ddof=1) for side in (after, scratch)]
        for k in range(100, len(seeds), -1):
            if math.hypot(half_of([(part / k, k - 1) for part in variances]), test) < abs(mean):
                reason = f" {k} seeds would"
    return ("no difference", key), [f"**{name}: no significant difference**", reason], numbers


def relation_to_linear(runs, linear):
    if len(runs) == 1 or linear[0].kind == "number" and not all(run.kept for run in runs):
        return "which is better is unknown"
    if len(linear) == 1 and "labels_per_class" in linear[0].record["changed"]:
        return "which is better is unknown"
    sides = [[run.score for run in side] for side in (runs, linear)]
    apart, sides = mean_of(sides[0]) - mean_of(sides[1]), sides[: 1 + (len(linear) > 1)]
    if abs(apart) <= math.hypot(half_of_seeds(*sides), half_of_test(runs, linear)):
        return "**not significantly different from**"
    return "**ahead of**" if apart > 0 else "**behind**"


def beside_linear(networks, linear):
    """networks: {name in words: [run]}."""
    relations = {name: relation_to_linear(runs, linear) for name, runs in networks.items()}
    scores = {name: mean_of([run.score for run in runs]) for name, runs in networks.items()}
    if {*relations.values()} == {"**behind**"}:
        name = max(scores, key=scores.get)
        phrases = ["**The linear model is ahead of every network**", f"and {name} "]
        return ("linear wins",), phrases, [mean_of([run.score for run in linear]), scores[name]]
    val = {name: round(mean_of([run.val for run in runs]), 9) for name, runs in networks.items()}
    best = max(val, key=val.get)
    tied = [name for name in val if val[name] == val[best]]
    lead = "chosen", f"Validation chooses {best}."
    if len(tied) > 1:
        lead = "tied", f"cannot choose between {', '.join(tied)}."
    elif len(val) == 1:
        lead = "only", f"{best} scores "
    unknown = ", unknown" * ("unknown" in relations[best])
    keys, phrases = [lead[0], f"beside linear{unknown}"], [lead[1], relations[best]]
    behind = [name for name in val if relations[name] == "**behind**" and name != best]
    if behind:
        keys.append("behind linear")
        phrases.append(f"Behind the linear model: {', '.join(behind)}.")
    return keys, phrases, [scores[best], mean_of([run.score for run in linear])]


def denoised(lines):
    """Interpolation leaves a quarter of the variance, each model what validation measured."""
    explained = {}
    for line, starts in lines.items():
        firsts = [run.first for run in starts.get("spt", {}).values()]
        masked = {first["objective"] for first in firsts} == {"masked"}
        if masked and not any("mask" in first["changed"] for first in firsts):
            explained[line] = 100 * (1 + mean_of([first["val_score"] for first in firsts]))
    keys, phrases = ["interpolation"], ["Linear interpolation", *(f"{line} " for line in explained)]
    if explained and max(explained.values()) <= 75:
        keys, phrases = [*keys, "no more than interpolation"], [*phrases, "not learned more"]
    return [(keys, phrases, [75.0, *explained.values()])] if explained else []


def decisions(lines, linear):
    """All sentences of a verdict: keys of verdict.WORDS, phrases, and all numbers."""
    variants = variants_of(lines)
    networks = {name: runs for name, runs in variants.items() if "linear probe" not in name}
    n = len(next(iter(variants.values()))[0].y)
    if n < 30:
        return
    for line, starts in lines.items():
        yield from effects(line, starts, n)
    if linear:
        yield beside_linear(networks, linear)
    for name, runs in variants.items():
        single = sum(len({*run.found.tolist()}) == 1 for run in runs if run.kind != "number")
        if single:
            text = f"**{name} predicts only one class** in {single} of {len(runs)} seeds"
            yield ("one class",), [text], []
    constant, nothing = linear and constant_of(linear), []
    for name, runs in networks.items():
        if linear and all(run.score <= constant + half_of_test([run]) for run in runs):
            nothing.append(name)
    if nothing:
        yield ("trivial",), ["Not significantly better", f": {', '.join(nothing)}."], [constant]
    yield from denoised(lines) if linear else ()
    improving = [
        name
        for name, runs in variants.items()
        if len(runs) > 1 and sum(run.improves for run in runs) > len(runs) / 2
    ]
    if improving:
        yield ("improving",), [f"at the end**: {', '.join(improving)}. Longer runs"], []


def check_caption(part, lines):
    """Compare the passes, what is unequal and the error of the test set's size with a loop."""
    runs = {line: sum(variants_of({line: lines[line]}).values(), []) for line in lines}
    passes, runs = [{run.passes for run in row} for row in runs.values()], sum(runs.values(), [])
    words = "equal passes in each row" if max(map(len, passes)) == 1 else "unequal passes"
    if len(set.union(*passes)) == 1:
        words = f"{min(passes[0])} passes per run"
    few, shown = len(runs[0].y) < 30, re.findall(r"score by about ±([\d.]+)", part)
    assert f"{words};" in part.lower() and few == ("test examples decide nothing" in part), words
    assert ("Classes are unequal" in part) == (runs[0].kind == "unequal")
    halves = [] if few else [half for run in runs if (half := half_of_test([run]))]
    assert len(shown) == bool(halves)
    for half in shown:
        agrees(half, "#", [mean_of(halves)], 3 if runs[0].kind == "number" else 1)


def check_report(text, sets):
    """Compare tables, captions and verdicts of a report with loops -> the keys of its sentences."""
    _, *parts = re.split(rf"^\*\*(\S+?(?:{'|'.join(TITLES.values())})?)\*\*$", text, flags=re.M)
    parts, seen = dict(zip(parts[::2], parts[1::2])), set()
    for name, runs in sets.items():
        baselines = [run for run in runs if run.record.get("start") == "baseline"]
        for share, lines in arranged(by_variant(runs)).items():
            part = parts.pop(f"{name}.npz{TITLES[share]}")
            of_share = [run.record["changed"].get("labels_per_class", 1) for run in baselines]
            linear = [run for run, few in zip(baselines, of_share) if few == share]
            check_table(rows_in(part)[0], lines, linear)
            check_caption(part, lines)
            sentences = re.findall(r"^- (.*)$", part, re.M)
            pairs = zip(sentences, decisions(lines, linear), strict=True)
            for sentence, (keys, phrases, numbers) in pairs:
                assert all(phrase in sentence for phrase in phrases), (sentence, phrases)
                seen |= {*keys}
                digits = 3 if baselines[0].kind == "number" and "interpolation" not in keys else 1
                shown = re.findall(rf"[-+]?\d+\.\d{{{digits}}}(?!\d)", sentence)
                half = 0.5 * 10**-digits + 1e-9
                assert [*map(float, shown)] == pytest.approx(numbers, rel=0, abs=half), sentence
    assert not parts
    return seen


def test_every_cell_and_decision_of_own_is_that_of_a_loop(tmp_path):
    sets = {name: made(name, **more) for name, more in SETS.items()}
    made_decisions = check_report(printed("own", kept(tmp_path, *sets.values())), sets)
    assert made_decisions >= {*verdict.WORDS, "no seeds", "no predictions"}


def test_what_is_kept_of_runs_gives_the_report_of_their_folders(tmp_path):
    runs = [made(name, **SETS[name]) for name in ("number", "unequal")]
    folder = as_folders(tmp_path / "runs", *runs)
    printed("keep", "demo", "--runs", folder, "--out", tmp_path)
    report = printed("own", folder)
    assert report == printed("own", tmp_path / "demo.jsonl") and "Still improving" in report
