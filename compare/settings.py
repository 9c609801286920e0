"""Compare any runs: one row per setting, with gains and intervals, as table and figure: analyze.py
compare FOLDER"""

import math
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pandas

from compare import statistics
from compare.drawing import LOOKS, dots, draw, markdown
from compare.runs import by_variant, load, provenance, rows_of, units, with_pretraining
from engine.targets import KINDS
from experiments.sweep import DENOISING
from files import UserError, read_json
from recipes import number

IDENTITY = "task", "model", "objective", "start"  # what distinguishes settings, besides flags
FIELDS = *IDENTITY, "joint"
LENGTH = "steps", "epochs"


class Setting(NamedTuple):
    """A row of the table: a variant, with its value in every column."""

    values: dict  # {column: value}, where a flag is left to the recipe that of the recipe
    changed: dict  # {flag: value}, only what differs from the recipe
    runs: pandas.DataFrame  # by seed


# ---- Rows and columns ----------------------------------------------------------------------------


def settings_of(variants):
    """Turn variants into columns, the names in which they differ, and rows, [Setting]."""
    firsts = [rows_of(variant)[0] for variant in variants]
    names = dict.fromkeys([*FIELDS, *(name for run in firsts for name in run.settings)])
    rows = []
    for run, variant in zip(firsts, variants):
        values = {name: value_of(run, name) for name in names}
        changed = {name: value for name, value in run.settings.items() if name not in FIELDS}
        rows.append(Setting(values, changed, variant))
    columns = [name for name in names if differs(name, rows)]
    rows.sort(key=lambda row: [place_of(name, row.values[name]) for name in columns])
    return columns or ["model", "start"], rows


def value_of(run, name):
    """Return a run's value in a column, its own or the recipe's; None if it has no meaning."""
    fields = {field: getattr(run, field) for field in IDENTITY} | {"joint": run.record.get("joint")}
    own = run.settings | fields
    if name in own or run.start == "baseline":  # a baseline has no settings
        value = own.get(name)
        return str(value) if isinstance(value, list) else value
    if name.startswith("pretraining."):
        name = name.removeprefix("pretraining.")
        run = run.first
        if run is None:
            return None
    if run.place != run.folder:  # a kept run has no config.json
        return "recipe"
    config = read_json(run.folder / "config.json")
    for part in name.split("."):
        config = (config or {}).get(part)
    return config


def differs(name, rows):
    """Return whether rows differ in a column. If None may mean that a flag has no meaning, it
    differs only between rows of one task, model, objective and start."""
    values = {row.values[name] for row in rows}
    if name in DENOISING or name.startswith("pretraining."):
        values -= {None}
    groups = defaultdict(set)
    for row in rows:
        groups[tuple(row.values[field] for field in IDENTITY)].add(row.values[name])
    return len(values) > 1 or any(len(group) > 1 for group in groups.values())


def place_of(name, value):
    """Return by what values are sorted: starts as in figures, then numbers, then words."""
    if name == "start":
        return [*LOOKS].index(value), ""
    if isinstance(value, (int, float)):
        return value, ""
    return math.inf, str(value)


# ---- What a gain is over -------------------------------------------------------------------------


def baseline(row, rows, wanted):
    """Return the row over which a row's gain is measured, or None: the row that has the `wanted`
    values and otherwise the same. By default the row from scratch, with as many passes if there is
    one, whatever the steps; flags of pretraining and joint training then do not matter."""
    others = [other for other in rows if other is not row]
    meant = of_its_stage(row, wanted)
    columns = {*row.values}
    tries = [(False, True), (False, False)]  # whether passes decide, and whether values are equal
    if not wanted:
        if row.values["start"] == "scratch":
            return None
        meant = {"start": "scratch"}
        others = [other for other in others if not other.changed.get("freeze")]
        columns -= {"freeze", *DENOISING}
        columns = {name for name in columns if not name.startswith("pretraining.")}
        tries = [(True, True), (True, False), *tries]
    for budget, exactly in tries:
        names = columns - {*LENGTH} if budget else columns
        for other in others:
            if budget and passes(other) != passes(row):
                continue
            if all(fits(other, row, name, meant, exactly) for name in names):
                return other
    return None


def of_its_stage(row, wanted):
    """Return {column: value} meant by --baseline: a flag of the stage that has it, or of both."""
    meant = {}
    for name, value in wanted.items():
        before = row.values.get(f"pretraining.{name}")
        after = row.values.get(name)
        if before is not None and after in (None, before):
            meant[f"pretraining.{name}"] = value
        if after is not None or before is None:
            meant[name] = value
    return meant


def fits(other, row, name, meant, exactly):
    """Return whether another row has the meant value in a column, else that of a row. Not exactly:
    or both leave it to their recipe, which may differ between starts."""
    if name in meant:
        return shown(other.values[name]) == meant[name]
    if other.values[name] == row.values[name]:
        return True
    return not exactly and name not in FIELDS and other.changed.get(name) == row.changed.get(name)


def chosen_by_validation(rows):
    """Return {group: its best row}: of those with the most seeds the best on validation."""
    groups = defaultdict(list)
    for row in rows:
        groups[group_of(row)].append(row)

    def quality(row):
        return len(row.runs), statistics.mean_of(row.runs.val)

    return {key: max(group, key=quality) for key, group in groups.items()}


def group_of(row):
    """Return a row's group, of which validation chooses one."""
    return *(row.values[field] for field in IDENTITY), "freeze" in row.changed


# ---- Table ---------------------------------------------------------------------------------------


def compare(args):
    """Print a table of runs in any folders, one row per setting, and draw a figure."""
    if not args.what:
        raise UserError("compare wants folders of runs: python analyze.py compare runs/sweep")
    paths = [Path(word) for word in args.what]
    sources = [path for path in paths if not path.is_file() or path.suffix == ".jsonl"]  # no figure
    runs = with_pretraining(load(*sources, strict=True))
    columns, rows = settings_of(by_variant(runs, args.any_code))
    if not rows:
        problem = f"no finished finetuning run in {' '.join(args.what)}"
        raise UserError(f"{problem}; python analyze.py status says more")
    wanted = parsed_baseline(args.baseline, columns, rows)
    print(f"\n{table(columns, rows, wanted, args.select)}{unfinished(sources)}\n")
    drawn = [*chosen_by_validation(rows).values()] if args.select else rows
    draw(lambda plt: figure_of_settings(plt, columns, drawn), args.figure)


def unfinished(sources):
    """Return a sentence that counts the runs without result.json in some folders; '' if none."""
    begun = [path for source in sources for path in source.glob("**/config.json")]
    lost = sum(not path.with_name("result.json").exists() for path in begun)
    return f" Unfinished runs, not included: {lost}." if lost else ""


def parsed_baseline(text, columns, rows):
    """Parse --baseline 'lr=0.01,arch.d=64': {column without its stage: value as shown}. UserError
    for a name or value that no row has."""
    wanted = {}
    for pair in text.split(",") if text else ():
        name, _, value = pair.partition("=")
        name = name.replace("-", "_")
        value = shown(number(value))
        names = [column for column in columns if f".{column}".endswith(f".{name}")]
        if not names:
            titles = ", ".join(map(title, columns))
            raise UserError(f"--baseline {name}: these runs differ in {titles}")
        values = {shown(row.values[column]) for row in rows for column in names}
        if value not in values:
            raise UserError(f"--baseline {pair}: choose from {' '.join(sorted(values))}")
        both = names[0].removeprefix("pretraining.")
        wanted[name if name.startswith("pretraining.") else both] = value
    return wanted


def table(columns, rows, wanted, select):
    """Return table and caption. select: show test scores only of the rows that validation chose."""
    best = chosen_by_validation(rows)
    titles = " or ".join(dict.fromkeys(title_of_score(row.runs) for row in rows))
    over = ", ".join(f"{title(name)}={value}" for name, value in wanted.items()) or "scratch"
    test = f"test {titles}", "95 % interval", f"gain over {over} [95 % interval]"
    lines = []
    for row in rows:
        line = {title(name): shown(row.values[name]) for name in columns}
        group = group_of(row)
        if select:
            from_scratch = *group[:3], "scratch", False
            before = None if row.values["start"] == "scratch" else best.get(from_scratch)
            scale = units(row.runs.kind.iloc[0])
            validation = statistics.mean_std(scale * row.runs.val, digits_of(row))
            line["validation"] = f"{validation} *" if row is best[group] else validation
        else:
            before = baseline(row, rows, wanted)
        hidden = select and row is not best[group]
        cells = ("", "", "") if hidden else test_cells(row, before)
        minutes = f"{statistics.mean_of(row.runs.minutes):.1f}"
        line |= dict(zip(test, cells)) | dict(seeds=str(len(row.runs)), passes=passes(row))
        lines.append(line | dict(minutes=minutes))
    return f"{markdown(lines)}\n\n{caption(columns, rows, wanted, select)}"


def digits_of(row):
    return 1 if units(row.runs.kind.iloc[0]) > 1 else 3


def test_cells(row, before):
    """Return mean test score, interval, and gain over another row (or None), with a note on what
    both do not share: seeds, passes."""
    digits = digits_of(row)
    mean = statistics.mean_of(row.runs.score)
    half = statistics.half_width_of_mean(row.runs)
    spread = statistics.mean_std(row.runs.score, digits)
    cells = [spread, statistics.interval(mean, half, digits, "") if half else "–"]
    if before is None:
        return [*cells, "–"]
    gained = statistics.gain(row.runs, before.runs)
    text = statistics.signed(gained.points, digits, gained.half).rsplit(" (", 1)[0]
    notes = []
    if {*row.runs.index} != {*before.runs.index}:
        seeds = ", ".join(map(str, gained.points.index)) or "none"
        notes.append(f"common seeds: {seeds}")
    if passes(before) != passes(row):
        notes.append(f"over {passes(before)} passes")
    return [*cells, f"{text} ({'; '.join(notes)})" if notes else text]


def caption(columns, rows, wanted, select):
    """Return the sentences below the table."""
    shared = [rows[0].values[name] for name in FIELDS[:3] if name not in columns]
    shared = [value for value in shared if value != "masked"]
    changed = {name: value for row in rows for name, value in row.changed.items()}
    # what differs in all rows from the recipe
    shared += [f"{title(name)} {shown(changed[name])}" for name in changed if name not in columns]
    sentences = [f"{', '.join(shared)}: mean" if shared else "Mean"]
    sentences[0] += " ± standard deviation over seeds."
    tasks = dict.fromkeys(row.values["task"] for row in rows)
    for task in tasks:
        variants = [row.runs for row in rows if row.values["task"] == task]
        sentences.append(statistics.how_sure(variants, f" of {task}" if len(tasks) > 1 else ""))
    if select:
        sentences.append("Gains are over the row from scratch that validation chose.")
        sentences.append("*: chosen by validation; only these test scores are shown.")
    elif not wanted:
        text = "Gains are over the row from scratch with as many passes, else the one that is"
        sentences.append(f"{text} otherwise the same; –: there is none.")
    text = "Passes (forward and backward passes of a batch) and minutes count both stages."
    return " ".join([*sentences, text, f"{provenance(*(row.runs for row in rows))}."])


def passes(row):
    """Return the numbers of passes of a row's runs, as text."""
    return "/".join(f"{n:,}" for n in sorted({*row.runs.passes}))


def shown(value):
    """Format a value of a setting."""
    if value is None:
        return "–"
    return f"{value:g}" if isinstance(value, float) else str(value)


def title(name):
    """Return the title of a column."""
    return name.replace("arch.", "").replace(".", " ").replace("_", "-")


def title_of_score(runs):
    """Return the title of the score of runs, with its unit."""
    kind = runs.kind.iloc[0]
    percent = ", %" if units(kind) > 1 else ""
    return KINDS[kind].title + percent


# ---- Figure --------------------------------------------------------------------------------------


def figure_of_settings(plt, columns, rows):
    """Draw one panel per task, one line per setting."""
    tasks = defaultdict(list)
    for row in rows:
        tasks[row.values["task"]].append(row)
    size = 7, 1 + 0.3 * len(rows) + 0.6 * len(tasks)
    figure, axes = plt.subplots(len(tasks), 1, figsize=size, squeeze=False)
    named = [name for name in columns if name != "task"]
    for axis, (task, settings) in zip(axes[:, 0], tasks.items()):
        lines = {label(named, row): {row.values["start"]: row.runs} for row in settings}
        halves = {label(named, row): statistics.half_width_of_mean(row.runs) for row in settings}
        dots(axis, lines, halves)
        axis.set_xlabel(title_of_score(settings[0].runs))
        axis.set_title(task, loc="left")
    return figure, "Test scores: seeds and mean"


def label(columns, row):
    """Return the label of a row in a figure."""
    words = []
    for name in columns:
        value = row.values[name]
        if name == "start":
            words.append(LOOKS[value][0])
        elif name in ("task", "model"):
            words.append(str(value))
        elif value is not None:
            words.append(f"{title(name)} {shown(value)}")
    return ", ".join(words)
