"""Compare any runs: one row per setting, with gains and intervals, as table and figure: analyze.py
compare FOLDER"""

import itertools
import math
import statistics
from collections import defaultdict, namedtuple
from pathlib import Path

from compare.drawing import LOOKS, dots, draw, markdown
from compare.reading import (
    kind_of,
    provenance,
    read_runs,
    scores,
    units,
    validation,
    variants_of,
    with_pretraining,
)
from compare.statistics import gain, half_width_of_mean, how_sure, mean_std, signed
from engine.targets import KINDS
from experiments.sweep import DENOISING
from files import UserError, read_json
from recipes import number, settings

# values: {column: value}; own, runs: as in Variant
Setting = namedtuple("Setting", "values own runs")
LENGTH = "steps", "epochs"
# what distinguishes settings, besides flags
FIELDS = "task", "model", "objective", "start", "joint"


def value_of(run, name):
    """Return a run's value in a column: its own, or the recipe's from config.json; None if it has
    no meaning."""
    own = settings(run["changed"]) | {name: run.get(name) for name in FIELDS}
    if name in own or run["start"] == "baseline":  # a baseline has no settings
        return str(own.get(name)) if isinstance(own.get(name), list) else own.get(name)
    if name.startswith("pretraining."):
        run, name = run["first"], name.removeprefix("pretraining.")
        if "changed" not in run:  # there was no pretraining
            return None
    if run["place"] != run["folder"]:  # a kept run has no config.json
        return "recipe"
    config = read_json(run["folder"] / "config.json")
    for part in name.split("."):
        config = (config or {}).get(part)
    return config


def settings_of(variants):
    """Turn [Variant] into columns, the names in which the variants differ, and rows, [Setting]."""
    names = dict.fromkeys([*FIELDS, *(name for variant in variants for name in variant.own)])
    rows = [
        Setting(
            {name: value_of(next(iter(variant.runs.values())), name) for name in names},
            {name: value for name, value in variant.own.items() if name not in FIELDS},
            variant.runs,
        )
        for variant in variants
    ]
    alike = defaultdict(list)  # rows among which None is a value like others
    for row in rows:
        alike[tuple(row.values[name] for name in FIELDS[:4])].append(row)

    def differs(name):
        without = {None} if name in DENOISING or name.startswith("pretraining.") else set()
        return len({row.values[name] for row in rows} - without) > 1 or any(
            len({row.values[name] for row in some}) > 1 for some in alike.values()
        )

    columns = [*filter(differs, names)]
    order = list(LOOKS).index
    rows.sort(
        key=lambda row: [
            (order(row.values[name]), "")
            if name == "start"
            else (row.values[name], "")
            if isinstance(row.values[name], (int, float))
            else (math.inf, str(row.values[name]))
            for name in columns
        ]
    )
    return columns or ["model", "start"], rows


def baseline(row, rows, wanted):
    """Return the row over which a row's gain is measured, or None: the row that has the `wanted`
    values and otherwise the same. By default the row from scratch, with as many passes if there is
    one; pretraining, joint training and --freeze then do not matter."""
    if not wanted and row.values["start"] == "scratch":
        return None
    meant = {}
    for name, value in wanted.items():  # means the flag of the stage that has it, or of both
        own, before = row.values.get(name), row.values.get(f"pretraining.{name}")
        meant |= (
            {f"pretraining.{name}": value} if before is not None and own in (None, before) else {}
        )
        meant |= {name: value} if own is not None or before is None else {}

    def agree(other, name, exactly, budget):
        if name in meant:
            return shown(other.values[name]) == meant[name]
        if not wanted and name in ("start", "freeze"):
            return other.values["start"] == "scratch" and not other.own.get("freeze")
        if (
            not wanted
            and (name in DENOISING or name.startswith("pretraining."))
            or budget
            and name in LENGTH
        ):
            return True  # no meaning from scratch, or at equal passes
        return other.values[name] == row.values[name] or (
            not exactly and name not in FIELDS and other.own.get(name) == row.own.get(name)
        )

    # First look for equal passes, whatever the steps, then for equal values: recipes may differ
    # between starts.
    for budget, exactly in itertools.product((False,) if wanted else (True, False), (True, False)):
        for other in rows:
            if (
                other is not row
                and (not budget or passes(other) == passes(row))
                and all(agree(other, name, exactly, budget) for name in row.values)
            ):
                return other
    return None


def passes(row):
    """Return the numbers of passes of a row's runs, as text."""
    return "/".join(f"{n:,}" for n in sorted({run["passes"] for run in row.runs.values()}))


def noted(gain, row, other):
    """Return the text of a gain with what its two rows do not share: seeds, of which only common
    ones count; passes."""
    seeds = ", ".join(str(seed) for seed in sorted(row.runs.keys() & other.runs.keys())) or "none"
    notes = [f"common seeds: {seeds}"] * (row.runs.keys() != other.runs.keys())
    notes += [f"over {passes(other)} passes"] * (passes(other) != passes(row))
    return gain.rsplit(" (", 1)[0] + (f" ({'; '.join(notes)})" if notes else "")


def shown(value):
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def chosen_by_validation(rows):
    """Return {(task, model, objective, start, with --freeze?): its best row}: among the rows with
    the most seeds, the one with the highest mean validation score."""
    groups = defaultdict(list)
    for row in rows:
        groups[*(row.values[name] for name in FIELDS[:4]), "freeze" in row.own].append(row)
    return {
        key: max(
            group,
            key=lambda row: (len(row.runs), statistics.mean(map(validation, row.runs.values()))),
        )
        for key, group in groups.items()
    }


def compare(args):
    """Print a table of runs in any folders, one row per setting, and draw a figure."""
    if not args.what:
        raise UserError("compare wants folders of runs: python analyze.py compare runs/sweep")
    if args.baseline and args.select:
        raise UserError(
            "--baseline has no meaning with --select: gains are over the scratch row that "
            "validation chose"
        )
    # skip figures
    sources = [
        path for path in map(Path, args.what) if not path.is_file() or path.suffix == ".jsonl"
    ]
    runs = [run for source in sources for run in read_runs(source, strict=True)]
    columns, rows = settings_of(variants_of(with_pretraining(runs), args.any_code))
    if not rows:
        raise UserError(
            f"no finished finetuning run in {' '.join(args.what)}; python analyze.py status says "
            "more"
        )
    wanted = {}
    for pair in args.baseline.split(",") if args.baseline else ():
        name, _, value = pair.partition("=")
        name, value = name.replace("-", "_"), shown(number(value))
        names = [
            each
            for each in columns
            if each.split(".")[-1] == name.split(".")[-1] and each.endswith(name)
        ]
        if not names:
            raise UserError(
                f"--baseline {name}: these runs differ in {', '.join(map(title, columns))}"
            )
        if value not in (there := {shown(row.values[each]) for row in rows for each in names}):
            raise UserError(f"--baseline {pair}: choose from {' '.join(sorted(there))}")
        wanted[
            names[0] if name.startswith("pretraining.") else names[0].removeprefix("pretraining.")
        ] = value
    text = "\n\n".join(table(columns, rows, wanted, args.select))
    begun = [path.parent for source in sources for path in source.glob("**/config.json")]
    lost = sum(not (folder / "result.json").exists() for folder in begun)
    print(f"\n{text}{f' Unfinished runs, not included: {lost}.' if lost else ''}\n")
    some = [*chosen_by_validation(rows).values()] if args.select else rows
    draw(
        lambda plt: (figure_of_settings(plt, columns, some), "Test scores: seeds and mean"),
        args.figure,
    )


def titled(run):
    """Return the title of a run's score."""
    return KINDS[kind_of(run)].title + ", %" * (units(run) > 1)


def title(name):
    """Return the title of a column."""
    return name.replace("arch.", "").replace(".", " ").replace("_", "-")


def label(columns, row):
    """Return the label of a row in a figure."""
    return ", ".join(
        f"{title(name)} {shown(row.values[name])}"
        if name not in ("task", "model", "start")
        else LOOKS[row.values[name]][0]
        if name == "start"
        else str(row.values[name])
        for name in columns
        if row.values[name] is not None
    )


def table(columns, rows, wanted, select):
    """Return table and caption. select: show test scores only of the rows that validation chose."""
    best, lines, notes, every, titles = chosen_by_validation(rows) if select else {}, [], [], [], {}
    tasks, chosen, lonely = (
        dict.fromkeys(row.values["task"] for row in rows),
        [*best.values()],
        False,
    )
    for task in tasks:
        some = [row for row in rows if row.values["task"] == task]
        for row in some:
            runs = [*row.runs.values()]
            factor = units(runs[0])
            digits = 1 if factor > 1 else 3
            points = scores(row.runs)
            mean, half = statistics.mean(points.values()), half_width_of_mean(runs)
            over = None if select else baseline(row, some, wanted)
            if select and row.values["start"] != "scratch":
                over = best.get((*(row.values[name] for name in FIELDS[:3]), "scratch", False))
            interval = f"[{mean - half:.{digits}f}, {mean + half:.{digits}f}]" if half else "–"
            test = [mean_std(points, digits), interval, "–"]
            if over:
                found = gain(row.runs, over.runs)
                test[2] = noted(signed(found.points, digits, found.half), row, over)
            lonely = lonely or not over and row.values["start"] != "scratch"
            if select:
                score = {seed: factor * validation(run) for seed, run in row.runs.items()}
                test = [mean_std(score, digits), *(test if row in chosen else [""] * 3)]
                test[0] += " *" if row in chosen else ""
            lines.append(
                [
                    *(shown(row.values[name]) for name in columns),
                    *test,
                    str(len(runs)),
                    passes(row),
                    f"{statistics.mean(run['minutes'] for run in runs):.1f}",
                ]
            )
            every += [*runs, *(run["first"] for run in runs if "changed" in run["first"])]
        notes.append(how_sure([row.runs for row in some], f" of {task}" if len(tasks) > 1 else ""))
        titles |= {titled(runs[0]): None}
    over = ", ".join(f"{title(name)}={value}" for name, value in wanted.items()) or "scratch"
    head = [
        *map(title, columns),
        *["validation"] * bool(select),
        f"test {' or '.join(titles)}",
        "95 % interval",
        f"gain over {over} [95 % interval]",
        "seeds",
        "passes",
        "minutes",
    ]
    alike = [str(rows[0].values[name]) for name in FIELDS[:3] if name not in columns]
    alike = [name for name in alike if name != "masked"]
    alike += dict.fromkeys(
        f"{title(name)} {shown(value)}"
        for row in rows
        for name, value in row.own.items()
        if name not in columns
    )  # all rows differ in this from the recipe
    alike = f"{', '.join(alike)}: mean" if alike else "Mean"
    caption = [
        f"{alike} ± standard deviation over seeds.",
        *notes,
        "Gains are over the row from scratch that validation chose."
        if select
        else ""
        if wanted
        else "Gains are over the row from scratch with as many passes, else the one that is "
        "otherwise the same" + ("; –: there is none." if lonely else "."),
        "*: chosen by validation; only these test scores are shown." if select else "",
        "Passes (forward and backward passes of a batch) and minutes count both stages. "
        f"{provenance(every)}.",
    ]
    return [markdown(head, lines), " ".join(filter(None, caption))]


def figure_of_settings(plt, columns, rows):
    """Draw one panel per task, one line per setting."""
    tasks = dict.fromkeys(row.values["task"] for row in rows)
    figure, axes = plt.subplots(
        len(tasks), 1, figsize=(7, 1 + 0.3 * len(rows) + 0.6 * len(tasks)), squeeze=False
    )
    for axis, task in zip(axes[:, 0], tasks):
        some = [row for row in rows if row.values["task"] == task]
        named = [name for name in columns if name != "task"]
        halves = {label(named, row): half_width_of_mean([*row.runs.values()]) for row in some}
        dots(
            axis,
            {label(named, row): {row.values["start"]: [*row.runs.values()]} for row in some},
            halves,
        )
        axis.set_xlabel(titled(next(iter(some[0].runs.values()))))
        axis.set_title(task, loc="left")
    return figure
