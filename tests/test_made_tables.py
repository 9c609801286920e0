"""The tables of compare, own and the demos over made runs: every cell equals a plain loop over the
records."""

import itertools
import json
import math
import re

import numpy as np
import pytest
from conftest import call, of_kind
from scipy.stats import t as student

from engine.folder import summary

HEADS = {
    "scratch": "from scratch",
    "spt": "self-pretrained",
    "joint": "joint",
    "linear_probe": "linear probe",
}
# Of the table of a report: column -> the starts whose scores it compares.
DIFFERENCES = {
    "SPT - scratch": ("spt", "scratch"),
    "joint - scratch": ("joint", "scratch"),
    "SPT - joint": ("spt", "joint"),
}


# ---- Made runs: targets and predictions beside each record ---------------------------------------


def targets_of(rng, kind):
    """Targets of a test set: classes, equal or unequal, or numbers that float16 holds exactly."""
    if kind == "number":
        return rng.integers(-40, 41, 40) / 32
    return rng.permutation(np.repeat([0, 1, 2], (20, 20, 24) if kind == "class" else (40, 10, 7)))


def predicted(rng, y, kind, skill):
    if kind == "number":
        return y + rng.integers(-20, 21, len(y)) / 32 * (1 - skill)
    return np.where(rng.random(len(y)) < skill, y, rng.integers(0, 3, len(y)))


def record_of(run, task, kind, y, found, kept, **more):
    """The record of a finetuning run or a baseline with these predictions, and what a loop needs of
    them."""
    wide = kind == "number"
    record = dict(run=run, task=task, test_examples=len(y), evals=[], init=None) | more
    record |= dict(commit="abc", device="made", torch="2")
    if wide:
        around = [(value - np.mean(y)) ** 2 for value in y]
        errors = [(guess - value) ** 2 for guess, value in zip(found, y)]
        record["test_r2"] = 1 - sum(errors) / sum(around)
    else:
        record["test_accuracy"] = sum(found == y) / len(y)
    held = summary(of_kind("number" if wide else "class", 3), y, found)
    if not kept:
        held = {name: value for name, value in held.items() if name not in ("right", "values")}
    record |= held
    return record, dict(y=y, found=found, kept=kept)


def made(seed, task, kind):
    """[(record, facts)] of a task: two models, every start, settings, shares of the labels, and
    seeds that some variants lack."""
    rng, runs = np.random.default_rng(seed), []
    y = targets_of(rng, kind)
    val = "val_r2" if kind == "number" else "val_accuracy"
    common = dict(objective="none", changed={}, seed=0, joint=None)
    runs.append(
        record_of(
            f"{task}-linear",
            task,
            kind,
            y,
            predicted(rng, y, kind, 0.7),
            True,
            **common,
            model="n-grams",
            start="baseline",
            steps=0,
            seconds=4.0,
            **{val: 0.5},
            **{"constant_r2" if kind == "number" else "constant_accuracy": 0.4},
        )
    )
    for model, rate, share in itertools.product(("s4", "rotary"), (None, 0.01), (None, 0.5)):
        if rate and share:
            continue
        for start, mask in (
            ("scratch", None),
            ("spt", None),
            ("spt", 0.5),
            ("joint", None),
            ("linear_probe", None),
        ):
            skill, kept = rng.uniform(0.3, 0.9), bool(rng.random() < 0.8)
            for seed in sorted(rng.choice(4, rng.integers(1, 5), replace=False).tolist()):
                changed = {"lr": rate} if rate else {}
                changed |= {"label_fraction": share} if share else {}
                changed |= {"freeze": True} if start == "linear_probe" else {}
                pretrained = start in ("spt", "linear_probe")
                first = {"mask": mask} if mask else {}
                changed |= {"pretraining": first} if pretrained and first else {}
                name = f"{task}-{model}-{start}-{rate}-{share}-{mask}-s{seed}"
                more = dict(model=model, seed=seed, objective="masked", changed=changed)
                # of which kind are all seconds: no two cells agree by chance
                more |= dict(steps=int(rng.integers(50, 60)), processes=int(rng.integers(1, 3)))
                more |= dict(seconds=float(rng.integers(60, 9000)))
                more |= dict(joint=1.0 if start == "joint" else None)
                if pretrained:
                    before = dict(run=f"{name}-first", task=task, changed=first, val_score=1)
                    before |= {field: more[field] for field in ("model", "seed", "objective")}
                    before |= dict(steps=int(rng.integers(50, 60)), commit="abc", device="made")
                    before |= {"torch": "2", "seconds": 120.0, "best.pt": f"{name} weights"}
                    runs.append((before, None))
                    more |= dict(init=f"gone/{name}-first", pretrained=f"{name} weights")
                more |= {val: float(rng.random())}
                more |= dict(start="spt" if pretrained else start)
                guesses = predicted(rng, y, kind, skill + rng.normal() / 20)
                runs.append(record_of(name, task, kind, y, guesses, kept, **more))
    return runs


# ---- The plain loops -----------------------------------------------------------------------------


def score_of(run, kind):
    """In percent, or R2."""
    record, facts = run
    if kind == "number":
        return record["test_r2"]
    if kind == "class":
        return 100 * record["test_accuracy"]
    shares = []
    for label in sorted({*facts["y"].tolist()}):
        rows = [i for i, value in enumerate(facts["y"]) if value == label]
        shares.append(sum(facts["found"][i] == label for i in rows) / len(rows))
    return 100 * sum(shares) / len(shares)


def added(run, kind, label):
    """What each example of a class (None: of all) adds to the score; without predictions, the
    right ones stand first."""
    y, found = run[1]["y"], run[1]["found"]
    if kind == "number":
        if not run[1]["kept"]:
            return None
        mean = sum(y) / len(y)
        around = [(value - mean) ** 2 for value in y]
        above = [a - (guess - value) ** 2 for a, guess, value in zip(around, found, y)]
        ratio, scale = sum(above) / sum(around), sum(around) / len(y)
        return [ratio + (up - ratio * down) / scale for up, down in zip(above, around)]
    rows = [i for i in range(len(y)) if label in (None, y[i])]
    right = [float(found[i] == y[i]) for i in rows]
    return right if run[1]["kept"] else sorted(right, reverse=True)


def variance_of(after, before, unit):
    """Of a mean over examples, and its degrees of freedom. after, before: a list per seed."""
    n, more = len(after[0]), 2 * unit
    gaps = []
    for i in range(n):
        gaps.append(sum(run[i] for run in after) / len(after))
        gaps[i] -= sum(run[i] for run in before) / len(before) if before else 0
    mean = (sum(gaps) + (0 if before else unit)) / (n + more)
    variance = (sum(gap**2 for gap in gaps) + unit) / (n + more) - mean**2
    variance *= (n + more) / (n + more - 1)
    for side in (after, before):
        if len(side) > 1:
            spread = 0.0
            for i in range(n):
                middle = sum(run[i] for run in side) / len(side)
                spread += sum((run[i] - middle) ** 2 for run in side) / (len(side) - 1)
            variance -= spread / n / len(side)
    return max(variance, unit / (n + more)) / n, n + more - 1


def half_of(parts):
    """Of a sum of independent parts, by Welch and Satterthwaite."""
    square = sum(variance for variance, _ in parts)
    if square == 0:
        return 0.0
    freedom = square**2 / sum(variance**2 / degrees for variance, degrees in parts)
    return student.ppf(0.975, freedom) * math.sqrt(square)


def half_of_test(after, before, kind, balanced):
    unit, parts = (0 if kind == "number" else 1), []
    labels = sorted({*after[0][1]["y"].tolist()}) if balanced else [None]
    for label in labels:
        sides = [[added(run, kind, label) for run in side] for side in (after, before)]
        if any(line is None for side in sides for line in side):
            return 0.0
        if all(run[1]["kept"] for run in (*after, *before)):
            parts.append(variance_of(*sides, unit))
            continue
        for side in filter(None, sides):
            each = [variance_of([line], [], unit) for line in side]
            parts.append(tuple(sum(column) / len(each) for column in zip(*each)))
    return (1 if kind == "number" else 100) / len(labels) * half_of(parts)


def half_of_seeds(*sides):
    if min(map(len, sides)) < 2:
        return 0.0
    parts = []
    for side in sides:
        mean = sum(side) / len(side)
        variance = sum((value - mean) ** 2 for value in side) / (len(side) - 1)
        parts.append((variance / len(side), len(side) - 1))
    return half_of(parts)


def difference(after, before, kind, balanced, score):
    """(mean, half of the interval, common seeds) of two variants {seed: run}."""
    seeds = sorted(after.keys() & before.keys())
    if not seeds:
        return None, 0.0, seeds
    sides = [[side[seed] for seed in seeds] for side in (after, before)]
    scores = [[score(run) for run in side] for side in sides]
    mean = sum(a - b for a, b in zip(*scores)) / len(seeds)
    half = 0.0
    if len(seeds) > 1:
        half = math.hypot(half_of_seeds(*scores), half_of_test(*sides, kind, balanced))
    return mean, half, seeds


def spread_of(values):
    mean = sum(values) / len(values)
    if len(values) == 1:
        return [mean]
    return [mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))]


def minutes_of(runs, firsts):
    spent = [run[0]["seconds"] + firsts.get(run[0]["run"], {}).get("seconds", 0) for run in runs]
    return sum(spent) / len(spent) / 60


def passes_of(runs, firsts):
    """Joint training takes two passes a step, as the masked objective hides its inputs."""
    found = set()
    for record, _ in runs:
        steps = record["steps"] * (2 if record["start"] == "joint" else 1)
        found.add(steps + firsts.get(record["run"], {}).get("steps", 0))
    return "/".join(str(number) for number in sorted(found))


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
    parts = [number if part == "#" else re.escape(part) for part in text]
    match = re.fullmatch("".join(parts), cell)
    assert match, f"{cell!r} is not {text!r}"
    for printed, number in zip(match.groups(), numbers, strict=True):
        assert abs(float(printed) - number) <= 0.5 * 10**-digits + 1e-9, (cell, text, numbers)


def agrees_as_spread(cell, values, digits, brackets=()):
    text, numbers = ("# ± #" if len(values) > 1 else "#"), spread_of(values)
    if not brackets:
        return agrees(cell, text, numbers, digits)
    outer, _, inner = cell.partition(" (")
    agrees(outer, text, numbers, digits)
    return agrees(f"({inner}", "(#, #)", brackets, 1)


def agrees_as_gain(cell, mean, half, note, digits):
    if mean is None:
        return agrees(cell, f"–{note}", [], digits)
    if not half:
        return agrees(cell, f"#{note}", [mean], digits)
    return agrees(cell, f"# [#, #]{note}", [mean, mean - half, mean + half], digits)


def written(folder, *sets):
    """The records of some sets in one file, in random order -> its path."""
    records = [record for runs in sets for record, _ in runs]
    np.random.default_rng(0).shuffle(records)
    path = folder / "runs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def by_variant(runs):
    """{(start, model, settings): {seed: run}} of finetuning runs, and {name: its pretraining}."""
    firsts = {record["run"].removesuffix("-first"): record for record, facts in runs if not facts}
    variants = {}
    for record, facts in runs:
        if facts:
            changed = dict(record["changed"])
            before = changed.pop("pretraining", {})
            changed |= {f"pretraining.{name}": value for name, value in before.items()}
            key = (record["start"], record["model"], *sorted(changed.items()))
            variants.setdefault(key, {})[record["seed"]] = (record, facts)
    return variants, firsts


def shown(value):
    return f"{value:g}" if isinstance(value, float) else str(value)


def cells_of_compare(key):
    """The cells by which a row of compare is found. The kept runs have no config.json, so what
    they leave to the recipe is 'recipe'; a baseline has no settings."""
    start, model, *pairs = key
    changed = dict(pairs)
    other = "–" if start == "baseline" else "recipe"
    mask = changed.get("pretraining.mask", other if start == "spt" else "–")
    values = [changed.get(name, other) for name in ("lr", "label_fraction", "freeze")]
    return start, model, *map(shown, values), shown(mask)


@pytest.mark.parametrize("kind", ["class", "number"])
@pytest.mark.parametrize("seed", range(2))
def test_every_cell_of_compare_is_that_of_a_loop(seed, kind, tmp_path):
    runs = made(seed, "file:/my/set.npz", kind)
    words = "analyze.py", "compare", written(tmp_path, runs), "--figure", tmp_path / "a.png"
    done = call(*words)
    assert done.returncode == 0, done.stderr
    variants, firsts = by_variant(runs)
    (rows,) = rows_in(done.stdout)
    digits, title = (3, "test R2") if kind == "number" else (1, "test accuracy, %")
    columns = "start", "model", "lr", "label-fraction", "freeze", "pretraining mask"
    printed = {tuple(row[name] for name in columns): row for row in rows}
    assert len(printed) == len(rows) == len(variants)

    def score(run):
        return score_of(run, kind)

    for key, variant in variants.items():
        row, values = printed[cells_of_compare(key)], [score(run) for run in variant.values()]
        agrees_as_spread(row[title], values, digits)
        half = 0.0
        if len(values) > 1:
            test = half_of_test([*variant.values()], [], kind, False)
            half = math.hypot(half_of_seeds(values), test)
        mean = sum(values) / len(values)
        if half:
            agrees(row["95 % interval"], "[#, #]", [mean - half, mean + half], digits)
        else:
            assert row["95 % interval"] == "–"
        assert row["seeds"] == str(len(variant))
        passes = passes_of(variant.values(), firsts)
        assert row["passes"] == passes
        agrees(row["minutes"], "#", [minutes_of(variant.values(), firsts)], 1)
        # The row from scratch of the same settings, whatever the pretraining.
        alike = [pair for pair in key[2:] if pair[0] not in ("pretraining.mask", "freeze")]
        scratch = variants.get(("scratch", key[1], *alike), {})
        gain = row["gain over scratch [95 % interval]"]
        if key[0] in ("scratch", "baseline") or not scratch:
            assert gain == "–"
            continue
        mean, half, seeds = difference(variant, scratch, kind, False, score)
        before, notes = passes_of(scratch.values(), firsts), []
        if variant.keys() != scratch.keys():
            notes.append(f"common seeds: {', '.join(map(str, seeds)) or 'none'}")
        if before != passes:
            notes.append(f"over {before} passes")
        agrees_as_gain(gain, mean, half, f" ({'; '.join(notes)})" if notes else "", digits)


@pytest.mark.parametrize("seed", range(2))
def test_validation_chooses_the_rows_of_compare(seed, tmp_path):
    """Of the variants with the most seeds that of the best validation score, for each model and
    start; only its test scores are shown."""
    runs = made(seed, "file:/my/set.npz", "class")
    words = "--select", "val", "--figure", tmp_path / "a.png"
    done = call("analyze.py", "compare", written(tmp_path, runs), *words)
    variants, firsts = by_variant(runs)
    groups, chosen = {}, {}
    for key, variant in variants.items():
        group = groups.setdefault((key[0], key[1], ("freeze", True) in key), [])
        score = sum(100 * record["val_accuracy"] for record, _ in variant.values()) / len(variant)
        group.append((len(variant), score, key))
    chosen = {name: max(group, key=lambda row: row[:2])[2] for name, group in groups.items()}
    columns = "start", "model", "lr", "label-fraction", "freeze", "pretraining mask"
    (rows,) = rows_in(done.stdout)
    printed = {tuple(row[name] for name in columns): row for row in rows}
    for key, variant in variants.items():
        row = printed[cells_of_compare(key)]
        star = key in chosen.values()
        values = [100 * record["val_accuracy"] for record, _ in variant.values()]
        text = "# ± #" if len(values) > 1 else "#"
        agrees(row["validation"], text + " *" * star, spread_of(values), 1)
        test = row["test accuracy, %"], row["95 % interval"]
        assert star != (test == ("", ""))
        if not star:
            continue
        agrees_as_spread(test[0], [score_of(run, "class") for run in variant.values()], 1)
        scratch = variants[chosen["scratch", key[1], False]] if key[0] != "baseline" else {}
        gain = row["gain over scratch [95 % interval]"]
        if key[0] in ("scratch", "baseline"):
            assert gain == "–"
            continue
        mean, half, seeds = difference(
            variant, scratch, "class", False, lambda run: score_of(run, "class")
        )
        notes = []
        if variant.keys() != scratch.keys():
            notes.append(f"common seeds: {', '.join(map(str, seeds)) or 'none'}")
        before = passes_of(scratch.values(), firsts)
        if before != passes_of(variant.values(), firsts):
            notes.append(f"over {before} passes")
        agrees_as_gain(gain, mean, half, f" ({'; '.join(notes)})" if notes else "", 1)


def further_of(runs, kind):
    """Accuracy (if the score is balanced accuracy) and macro F1 of some runs, in percent."""
    accuracies, values = [], []
    for record, facts in runs:
        accuracies.append(100 * record["test_accuracy"])
        y, found, f1 = facts["y"], facts["found"], []
        for label in sorted({*y.tolist()}):
            both = sum((found == label) & (y == label))
            f1.append(2 * both / max(sum(found == label) + sum(y == label), 1))
        values.append(100 * sum(f1) / len(f1))
    means = [sum(accuracies) / len(runs), sum(values) / len(runs)]
    return means if kind == "unequal" else means[1:]


def lines_of(variants):
    """{(share, line): {start: {seed: run}}}, as the report arranges variants."""
    found = {}
    for (start, model, *pairs), variant in variants.items():
        changed = dict(pairs)
        share = changed.pop("label_fraction", 1)
        if changed.pop("freeze", False):
            start = "linear_probe"
        names = {"lr": "lr", "pretraining.mask": "pretraining mask"}
        words = [f"{names[name]}={value:g}" for name, value in sorted(changed.items())]
        found.setdefault((share, ", ".join([model, *words])), {})[start] = variant
    return found


def check_report(text, sets, further):
    """Compare every cell of the tables of a report with a loop. sets: [(name, kind, runs)].
    further: whether scores are followed by others in parentheses."""
    titles = re.findall(r"^\*\*(\S+?(?: with 50 % of the labels)?)\*\*$", text, re.M)
    tables = dict(zip(titles, rows_in(text), strict=True))
    checked = 0
    for name, kind, runs in sets:
        variants, firsts = by_variant(runs)
        digits, balanced = 3 if kind == "number" else 1, kind == "unequal"
        ((linear,),) = [v.values() for key, v in variants.items() if key[0] == "baseline"]
        networks = {key: v for key, v in variants.items() if key[0] != "baseline"}
        arranged = lines_of(networks)

        def score(run):
            return score_of(run, kind)

        for share in (1, 0.5):
            lines = {line: starts for (part, line), starts in arranged.items() if part == share}
            rows = tables[name + (" with 50 % of the labels" if share < 1 else "")]
            more = further and kind != "number"
            if share == 1:  # baselines stand first
                (first, second), rows = rows[:2], rows[2:]
                constant = 0.4 if kind == "number" else 100 / 3 if balanced else 40
                f1 = 100 * 2 * 0.4 / 1.4 / 3
                shown = first["from scratch"].split(" (")[0]
                agrees(shown, "#", [constant], digits)
                shown, _, inner = second["from scratch"].partition(" (")
                agrees(shown, "#", [score(linear)], digits)
                if more:
                    text = ", ".join("#" for _ in further_of([linear], kind))
                    agrees(f"({inner}", f"({text})", further_of([linear], kind), 1)
                    trivial = [40, f1] if balanced else [f1]
                    inner = first["from scratch"].partition(" (")[2]
                    agrees(f"({inner}", f"({text})", trivial, 1)
                assert second["minutes per run"] == "4 s" and first["minutes per run"] == ""
            assert len(rows) == len(lines)
            for row in rows:
                starts, minutes = lines[row["model"]], []
                for start, head in HEADS.items():
                    if head not in row:
                        continue
                    variant = [*starts.get(start, {}).values()]
                    if not variant:
                        assert row[head] == "–"
                        minutes.append("–")
                        continue
                    shown, _, inner = row[head].partition(" (")
                    agrees_as_spread(shown, [score(run) for run in variant], digits)
                    if more:
                        values = further_of(variant, kind)
                        agrees(f"({inner}", f"({', '.join('#' for _ in values)})", values, 1)
                    else:
                        assert not inner
                    minutes.append(minutes_of(variant, firsts))
                for value, part in zip(minutes, row["minutes per run"].split(" / "), strict=True):
                    agrees(part, "–" if value == "–" else "#", [] if value == "–" else [value], 1)
                for column, pair in DIFFERENCES.items():
                    (cell,) = [row[head] for head in row if head.split(" [")[0] == column]
                    sides = [starts.get(start, {}) for start in pair]
                    mean, half, seeds = difference(*sides, kind, balanced, score)
                    note = f" ({len(seeds)})"
                    if mean is None:
                        note = ""
                    elif len(seeds) == 1:
                        note = " (one seed)"
                    agrees_as_gain(cell, mean, half, note, digits)
                    checked += 1
    assert checked >= 3 * 3 * len(sets)


@pytest.mark.parametrize("seed", range(2))
def test_every_cell_of_own_is_that_of_a_loop(seed, tmp_path):
    """Several sets in one folder: accuracy, balanced accuracy, R2, with and without part of the
    labels."""
    kinds = ["class", "unequal", "number"]
    sets = [(f"{kind}.npz", kind, made(seed, f"file:/my/{kind}.npz", kind)) for kind in kinds]
    path = written(tmp_path, *(runs for *_, runs in sets))
    done = call("analyze.py", "own", path, "--figure", tmp_path / "a.png")
    assert done.returncode == 0, done.stderr
    check_report(done.stdout, sets, further=True)


@pytest.mark.parametrize("seed", range(2))
def test_every_cell_of_a_demo_is_that_of_a_loop(seed, tmp_path):
    sets = [("text_demo", "class", made(seed, "text_demo", "class"))]
    path = written(tmp_path, sets[0][2])
    done = call("analyze.py", "demo", "demo-text", "--runs", path, "--figure", tmp_path / "a.png")
    assert done.returncode == 0, done.stderr
    check_report(done.stdout, sets, further=False)
