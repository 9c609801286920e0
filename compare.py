"""Runs beside each other: what each of them did, how their scores differ, and how sure that is.

    python analyze.py compare runs/a runs/b                  any runs, a row a setting; --baseline lr=1e-3
    python analyze.py demo                                   the demo's table and figure, from runs/demo

A run is what result.json says that it did: task, model, objective, how it started, seed, and everything that differs
from the recipe in either stage. Names of folders count for nothing.

Intervals (95 %, Student's t) take one standard deviation for all arms of a table, pooled over their seeds, where arms
scatter alike: three seeds alone leave two degrees of freedom, which widens an interval by a half. Where they do not
(Bartlett's test, or an arm whose seeds all agree), each arm has its own. With ten seeds or more, gains are paired by
seed. An arm that scatters three times as much as the others may pass the test: its intervals hold the truth in some 87
of 100 tables, not in 95 (tests/test_compare.py).
"""
import contextlib
import json
import math
import re
import statistics
import sys
from collections import defaultdict, namedtuple
from pathlib import Path

import numpy as np
from scipy.special import chdtrc, stdtrit

import experiments
from data import UserError, read_json, reading, write_atomically
from models import MODELS
from pretrain import OBJECTIVES
from recipes import number, settings

SCRATCH, SPT, OTHER = "#9aa5b1", "#0072b2", "#d55e00"      # colour-blind safe, and apart in gray too
# How a finetuning run started -> what it is called, its colour.
STARTS = {"baseline": ("linear model", "black"), "scratch": ("from scratch", SCRATCH),
          "spt": ("self-pretrained", SPT), "joint": ("joint", OTHER),
          "probe": ("head alone", "#009e73"), "corpus": ("pretrained elsewhere", "#cc79a7")}


# ---- Reading ---------------------------------------------------------------------------------------------------------

def read_runs(source, strict=False):
    """The record of every finished run in a folder of run directories or in a runs.jsonl. Damaged ones are named and
    skipped; strict: UserError. Added to a record: run, its name; folder, where its log.jsonl and kernels.npz are; score
    of a finetuning run, in the paper's units."""
    if not source.exists():
        raise UserError(f"no runs in {source}; run_all.sh makes them, and --runs names another folder")
    runs = []
    for path in [source] if source.is_file() else sorted(source.glob("**/result.json")):
        text = path.read_text(errors="replace")
        for record in text.splitlines() if source.is_file() else [text]:
            try:
                run = {"run": path.parent.name} | json.loads(record)
                # Raises where what is asked of a run later is not there, or of another kind.
                if "start" in run:
                    run["score"] = float(run["test_r2"] if "test_r2" in run else 100 * run["test_accuracy"])
                    STARTS[run["start"]], Path(run.get("init") or "")
                hash(identity(run)), {**(run.get("data") or {})}
                numbers = dict(seed=int(run["seed"]), steps=int(run["steps"]), seconds=float(run["seconds"]))
                runs.append(run | numbers | {"folder": path.parent})
            except Exception as error:                           # a record of any kind
                if strict:
                    raise UserError(f"{path} is damaged: {error!r}; remove it and make the run again") from None
                print(f"warning: a run in {path} is skipped: {error!r}", file=sys.stderr)
    return runs


def read_log(folder):
    """The records of a run's log.jsonl. What is none is left out: the last line of a killed run may be torn."""
    path, found = folder / "log.jsonl", []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return [record for record in found if isinstance(record, dict)]


def newest(folder):
    """The newest value of each field in a run's log; `kind` is that of the last record."""
    return {name: value for record in read_log(folder) for name, value in record.items()}


def evaluations(run):
    """The records of a run's evaluations, which a kept run holds as `evals`, and others from now on."""
    if "evals" not in run:
        run["evals"] = [record for record in read_log(run["folder"]) if record.get("kind") == "eval"]
    return run["evals"]


def home(run):
    """Where a run's folder lies; of a kept run, where runs.jsonl lies."""
    return run["folder"].parent if run["folder"].name == run["run"] else run["folder"]


def place(run):
    """What to call a run in a message."""
    return home(run) / run["run"]


def with_pretraining(runs):
    """Finetuning runs. Added to a run: first, that of its pretraining; passes, forward and backward, and minutes, both
    with those of `first`."""
    pretrained = {(home(run), run["run"]): run for run in runs if "start" not in run}
    for run in runs:
        if "start" not in run:
            continue
        first = dict(steps=0, seconds=0)
        if init := run.get("init") and Path(run["init"]):
            first = pretrained.get((home(run), init.name)) or next(iter(read_runs(init) if init.exists() else []), None)
            if first is None:
                print(f"warning: {run['run']} is left out: its pretraining run is not here", file=sys.stderr)
                continue
        objective = OBJECTIVES.get(run["objective"])
        each = 2 if run["start"] == "joint" and objective and objective.hides else 1
        yield run | dict(first=first, passes=each * run["steps"] + first["steps"],
                         minutes=(run["seconds"] + first["seconds"]) / 60)


# ---- What a run is ---------------------------------------------------------------------------------------------------

def identity(run):
    """Task, model, objective, start, and all that differs from the recipe: what makes runs seeds of one experiment."""
    found = settings(run["changed"]) | ({"joint": run["joint"]} if run.get("joint") else {})
    words = tuple(sorted((name, str(value) if isinstance(value, list) else value) for name, value in found.items()))
    return run["task"], run["model"], run["objective"], run.get("start", "pretrain"), words


# By which two runs of one setting and seed are told apart, and what may be the cause.
OUTCOME = "val_accuracy", "val_r2", "val_score", "test_accuracy", "test_r2", "test_loss", "steps", "parameters"
CAUSES = "commit", "torch", "device", "processes", "dtype", "init"


def by_identity(runs):
    """{identity: {seed: run}}. UserError for two runs of one identity and seed, or two data sets of one name."""
    found, sets = defaultdict(dict), {}
    for run in runs:
        there = found[identity(run)].setdefault(run["seed"], run)
        if any(there.get(name) != run.get(name) for name in OUTCOME):
            names = [name for name in (*CAUSES, *OUTCOME) if there.get(name) != run.get(name)]
            differ = ", ".join(f"{name} {there.get(name)} and {run.get(name)}" for name in names[:3])
            raise UserError(f"{place(there)} and {place(run)} are two runs of one setting and seed, which differ: "
                            f"{differ}; leave one out, or make what was changed a flag")
        other = sets.setdefault(run["task"], run)
        one, two = other.get("data") or {}, run.get("data") or {}
        if one.keys() < two.keys():            # older runs tell less of their data
            sets[run["task"]] = run
        if any(one[name] != two[name] for name in one.keys() & two.keys()):
            raise UserError(f"{place(other)} and {place(run)} trained on two sets called {run['task']}: "
                            f"{other['data']} and {run['data']}; compare them apart")
    return dict(found)


def scores(runs):
    """{seed: run} -> {seed: score}."""
    return {seed: run["score"] for seed, run in runs.items()}


def values_of(runs, field):
    """The different values that runs have in a field, as text."""
    return ", ".join(sorted({str(run.get(field)) for run in runs}))


def hours(runs):
    return sum(run["seconds"] * run.get("processes", 1) for run in runs) / 3600


def provenance(runs):
    """How many runs, and where their numbers come from. One that several others share counts once."""
    runs = [*{place(run): run for run in runs}.values()]
    spent = hours(runs)
    time_spent = f"{spent:.1f} hours" if spent >= 1 else f"{60 * spent:.0f} minutes"
    return (f"{len(runs)} runs, seeds {values_of(runs, 'seed')}; commit {values_of(runs, 'commit')}, "
            f"{values_of(runs, 'device')}, torch {values_of(runs, 'torch')}; {time_spent} of training")


# ---- Statistics ------------------------------------------------------------------------------------------------------

MANY = 10                                  # seeds, from which on gains are paired
ALIKE = 0.1                                # probability below which arms do not scatter alike
Estimate = namedtuple("Estimate", "variance freedom")


def pooled(arms):
    """[[score]] -> the Estimate of their common variance around the mean of each arm."""
    freedom = sum(len(arm) - 1 for arm in arms if arm)
    squares = sum(float(np.var(arm, ddof=1)) * (len(arm) - 1) for arm in arms if len(arm) > 1)
    return Estimate(squares / freedom if freedom else 0.0, freedom)


def estimates(arms):
    """{arm: {seed: score}} -> {arm: Estimate}: one for all, pooled, where arms scatter alike, else each its own."""
    each = {name: pooled([[*arm.values()]]) for name, arm in arms.items()}
    some = [estimate for estimate in each.values() if estimate.freedom > 0]
    if any(one.variance for one in some) and bartlett(some) < ALIKE:
        return each
    return dict.fromkeys(arms, pooled([[*arm.values()] for arm in arms.values()]))


def bartlett(some):
    """[Estimate] -> the probability of variances that are as unlike as these, where the true ones are equal: Bartlett's
    test. 0 where one of them is 0."""
    variance, freedom = np.array(some, float).T                                               # (arms,) both
    if len(some) < 2 or not variance.all():
        return float(len(some) < 2)
    spread = freedom.sum() * np.log(np.average(variance, weights=freedom)) - (freedom * np.log(variance)).sum()
    return chdtrc(len(some) - 1, spread / (1 + ((1 / freedom).sum() - 1 / freedom.sum()) / (3 * (len(some) - 1))))


def half_width(*parts):
    """Of the 95 % interval of a mean, or of a difference of means: for each mean its Estimate and the number of seeds.
    Welch's degrees of freedom where the estimates are not one. 0 where there are none."""
    shares = defaultdict(float)
    for estimate, n in parts:
        shares[estimate] += estimate.variance / n
    if any(estimate.freedom < 1 for estimate in shares):
        return 0.0
    square = sum(shares.values())
    freedom = square ** 2 / sum(share ** 2 / estimate.freedom for estimate, share in shares.items()) if square else 1
    return float(stdtrit(freedom, 0.975)) * math.sqrt(square)


def half_width_of(values):
    """Of the mean of these values alone, differences paired by seed say."""
    return half_width((pooled([values]), len(values)))


def minus(after, before):
    """{seed: after - before} of the seeds that both have."""
    return {seed: after[seed] - before[seed] for seed in sorted(before.keys() & after.keys())}


def mean_std(found, digits=1):
    """{seed: score} as '61.2 ± 0.8', as the number alone where one seed gives no spread, or as a dash."""
    if not found:
        return "–"
    mean = f"{statistics.mean(found.values()):.{digits}f}"
    return mean if len(found) == 1 else f"{mean} ± {statistics.stdev(found.values()):.{digits}f}"


def signed(found, digits=1, half=None):
    """{seed: difference} as '+3.7 [+2.2, +5.2] (3)', mean, interval and number of seeds; '+3.7 (one seed)'; a dash.
    half: of the interval, if it is not that of these differences alone."""
    if not found:
        return "–"
    mean, half = statistics.mean(found.values()), half_width_of([*found.values()]) if half is None else half
    if not half:                                                 # one seed, or seeds that all agree
        return f"{mean:+.{digits}f} ({'one seed' if len(found) == 1 else len(found)})"
    return f"{mean:+.{digits}f} [{mean - half:+.{digits}f}, {mean + half:+.{digits}f}] ({len(found)})"


def gain(arms, one, other, found):
    """Of arms {name: {seed: score}} with their estimates: one minus other -> {seed: difference}, half the interval."""
    differences = minus(arms.get(one, {}), arms.get(other, {}))
    n = len(differences)
    if not n or n >= MANY:
        return differences, half_width_of([*differences.values()]) if n else 0.0
    return differences, half_width((found[one], n), (found[other], n))


def how_sure(arms, found, digits=1, of=""):
    """The sentence about a table's intervals."""
    counts = {len(arm) for arm in arms.values() if arm}
    common = [name for name in arms if arms[name] and found[name].freedom]
    if not common:
        return f"One seed{of} has no interval."
    if not any(estimate.variance for estimate in found.values()):
        return f"Seeds{of} do not differ, so there are no intervals."
    one, *others = {found[name] for name in common}
    text = f"Intervals{of}: 95 %, over seeds on one test set, "
    text += ("each row with its own standard deviation, since rows do not scatter alike (Welch's t)" if others else
             f"with one standard deviation for all rows, which scatter alike, {math.sqrt(one.variance):.{digits}f}, "
             f"pooled with {one.freedom} degrees of freedom")
    return text + (f"; gains over {MANY} seeds or more are paired by seed." if max(counts) >= MANY else ".")


# ---- What is written -------------------------------------------------------------------------------------------------

def write(path, save):
    """save(open binary file), then rename: no reader ever sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save)
    print(f"{path}: written")


def markdown(head, rows):
    """A table, or nothing where there is no row."""
    if not rows:
        return ""
    cells = [[f" {cell} ".replace("|", r"\|") if cell else " " for cell in row] for row in (head, *rows)]
    first, *others = [f"|{'|'.join(row)}|" for row in cells]
    return "\n".join([first, "|---" * len(head) + "|", *others])


def replace_block(path, name, text, check=False):
    """Puts text between <!-- name:begin --> and <!-- name:end --> of a Markdown file, or checks that it is there."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    with reading(f"{path} cannot be read", "name another file"):
        old = path.read_text(encoding="utf-8")
    new, found = re.subn(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{text}\n{end}", old, 1, re.S)
    if not found:
        raise UserError(f"{path} has no {begin} ... {end}")
    if new == old:
        return
    if check:
        raise UserError(f"{path} differs from the runs after {begin}; mend it: the same command without --check")
    write(path, lambda file: file.write(new.encode()))


def draw(make, path):
    """Writes the figure that make(plt) -> figure, title draws, with one legend, each label once, as a PNG file."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    plt.rcParams.update({"font.size": 8, "axes.titlesize": 8, "lines.linewidth": 1, "text.parse_math": False})
    figure, title = make(plt)
    entries = {label: handle for axis in figure.axes for handle, label in zip(*axis.get_legend_handles_labels())}
    width, height = figure.get_size_inches()
    longest = max(map(len, entries), default=0)
    columns = min(5, max(1, int(14 * width / (8 + longest))))                                  # that fit side by side
    figure.legend(entries.values(), entries.keys(), loc="lower center", ncols=columns, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0.01, (0.15 + 0.18 * -(-len(entries) // columns)) / height, 0.99, 0.98))
    write(path, lambda file: figure.savefig(file, format=path.suffix[1:].lower(), dpi=150))
    plt.close(figure)


def costs_nothing(linear):
    """A record of baseline.py -> [(what to call it in a table, in a figure, its line there, its score in percent)]."""
    return [("*one answer for all*", "one answer for all", ":", 100 * linear["constant_accuracy"]),
            (f"*linear: {linear['model']}*", "linear model", "--", linear["score"])]


def bars(axis, names, arms, chance, papers=({}, {})):
    """A pair of bars in percent for each name, a dot for each seed. arms: {name: {seed: score}} from scratch and after
    SPT; papers: {name: the paper's number} of both; chance: {name: its level}."""
    looks = (-0.19, SCRATCH, "from scratch"), (0.19, SPT, "self-pretrained (SPT)")
    for i, name in enumerate(names):
        for (shift, colour, label), arm, paper in zip(looks, arms, papers):
            values = list(arm.get(name, {}).values())
            if values:
                axis.bar(i + shift, statistics.mean(values), 0.36, color=colour, label=label)
                axis.scatter([i + shift] * len(values), values, s=10, color="black", zorder=3, label="one seed")
                axis.text(i + shift, max(values) + 3, f"{statistics.mean(values):.1f}", ha="center",
                          bbox=dict(facecolor="white", edgecolor="none", pad=1))     # a line may run behind it
            else:
                axis.text(i + shift, 1, "not run", rotation=90, ha="center", va="bottom", color="0.5")
            if name in paper:
                axis.scatter([i + shift], [paper[name]], s=30, marker="D", facecolors="none", edgecolors=OTHER,
                             zorder=4, label="the paper")
        if name in chance:
            axis.hlines(chance[name], i - 0.4, i + 0.4, color="black", linestyle=":", label="chance")
    axis.set_xticks(range(len(names)), names)
    axis.set(ylabel="test accuracy, %", ylim=(0, 108))


def dots(axis, lines):
    """{line: {start: runs}} -> a dot a seed, a bar at the mean."""
    for y, arms in enumerate(lines.values()):
        for i, start in enumerate(start for start in experiments.WAYS if start in arms):
            runs, (label, colour) = arms[start], STARTS[start]
            height = y + 0.2 * (i - (len(arms) - 1) / 2)
            if runs:
                values = [run["score"] for run in runs]
                heights = np.linspace(height - 0.04, height + 0.04, len(runs))                # equal scores stay apart
                axis.scatter(values, heights, s=7, color=colour, label=label, clip_on=False, zorder=3)
                axis.plot([statistics.mean(values)] * 2, [height - 0.1, height + 0.1], color=colour)
    axis.set_yticks(range(len(lines)), lines)
    axis.set(ylim=(len(lines) - 0.5, -0.5), xlabel="test accuracy, %: seeds and mean")
    axis.grid(axis="x", color="0.9")


# ---- compare: any runs -----------------------------------------------------------------------------------------------

Setting = namedtuple("Setting", "values own runs")               # {column: value}, {column: what differs}, {seed: run}
FIELDS = "task", "model", "objective", "start", "joint"          # what else makes a run another one


def value_of(run, name):
    """What a run has in a column: its own value or the recipe's, from its config.json; None where it has no meaning."""
    own = settings(run["changed"]) | {name: run.get(name) for name in FIELDS}
    if name in own or run["start"] == "baseline":                # which has no settings
        return str(own.get(name)) if isinstance(own.get(name), list) else own.get(name)
    if name.startswith("pretraining."):
        run, name = run["first"], name.removeprefix("pretraining.")
        if "changed" not in run:                                 # there was none
            return None
    if home(run) == run["folder"]:                               # a kept run has no config.json
        return "recipe"
    config = read_json(run["folder"] / "config.json")
    for part in name.split("."):
        config = (config or {}).get(part)
    return config


def settings_of(found):
    """{identity: {seed: run}} -> the columns, all in which they differ; [Setting]."""
    firsts = [next(iter(runs.values())) for runs in found.values()]
    owns = [settings(run["changed"]) for run in firsts]
    names = dict.fromkeys([*FIELDS, *(name for own in owns for name in own)])
    rows = [Setting({name: value_of(run, name) for name in names}, own, runs)
            for run, own, runs in zip(firsts, owns, found.values())]
    alike = defaultdict(list)                                    # rows of which None means something
    for row in rows:
        alike[tuple(row.values[name] for name in FIELDS[:4])].append(row)

    def differs(name):
        without = {None} if name in experiments.DENOISING or name.startswith("pretraining.") else set()
        return len({row.values[name] for row in rows} - without) > 1 or any(
            len({row.values[name] for row in some}) > 1 for some in alike.values())

    columns = [*filter(differs, names)]
    order = list(STARTS).index
    rows.sort(key=lambda row: [(order(row.values[name]), "") if name == "start" else
                               (row.values[name], "") if isinstance(row.values[name], (int, float)) else
                               (math.inf, str(row.values[name])) for name in columns])
    return columns or ["model", "start"], rows


def baseline(row, rows, wanted):
    """The row that a row's gain is over, or None: that with the `wanted` values and otherwise its own. By default that
    from scratch, whatever pretraining, joint training or a probe had beside it."""
    if not wanted and row.values["start"] == "scratch":
        return None
    meant = {}
    for name, value in wanted.items():                           # a flag of the stage that has it, or of both
        own, before = row.values.get(name), row.values.get(f"pretraining.{name}")
        meant |= {f"pretraining.{name}": value} if before is not None and own in (None, before) else {}
        meant |= {name: value} if own is not None or before is None else {}

    def passes(row):
        return next(iter(row.runs.values()))["passes"]

    def agree(other, name, exactly, budget):
        if name in meant:
            return shown(other.values[name]) == meant[name]
        if not wanted and name == "start":
            return other.values[name] == "scratch"
        if not wanted and name == "freeze":
            return not other.own.get("freeze")
        if not wanted and (name in experiments.DENOISING or name.startswith("pretraining.")):
            return True                                          # without meaning from scratch
        if budget and name in ("steps", "epochs"):
            return passes(other) == passes(row)
        return other.values[name] == row.values[name] or (
            not exactly and name not in FIELDS and other.own.get(name) == row.own.get(name))

    # Recipes may differ between ways to start, and so may steps at equal passes.
    for exactly, budget in ((True, False), (False, False), *([] if wanted else [(False, True)])):
        for other in rows:
            if other is not row and all(agree(other, name, exactly, budget) for name in row.values):
                return other
    return None


def shown(value):
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def chosen_by_validation(rows):
    """Of the rows of a task, model, objective and start (a frozen one apart), the best by mean validation score, of
    those with the most seeds."""
    def validation(row):
        return statistics.mean(run.get("val_accuracy", run.get("val_r2")) for run in row.runs.values())

    arms = defaultdict(list)
    for row in rows:
        arms[(*(row.values[name] for name in ("task", "model", "objective", "start")), "freeze" in row.own)].append(row)
    return [max(arm, key=lambda row: (len(row.runs), validation(row))) for arm in arms.values()]


def chosen_scratch(row, chosen):
    """Of what validation chose, the row from scratch beside a row that it chose too."""
    if row not in chosen or row.values["start"] == "scratch":
        return None
    alone = [other for other in chosen if other.values["start"] == "scratch" and "freeze" not in other.own]
    return next((other for other in alone if all(
        other.values[name] == row.values[name] for name in ("task", "model", "objective"))), None)


def compare(args):
    """Runs in any folders: a row a setting, as a table and a figure."""
    if not args.what:
        raise UserError("compare wants folders of runs: python analyze.py compare runs/sweep")
    if args.baseline and args.select:
        raise UserError("--baseline has no meaning with --select: gains are over what validation chose from scratch")
    sources = [Path(source) for source in args.what]
    sources = [source for source in sources if not source.is_file() or source.suffix == ".jsonl"]         # no figures
    found = [read_runs(source, strict=True) for source in sources]
    for source, runs in zip(sources, found):
        if not any("start" in run for run in runs):
            raise UserError(f"no finished finetuning run in {source}; python analyze.py status {source} tells more")
    columns, rows = settings_of(by_identity(with_pretraining([run for runs in found for run in runs])))
    if not rows:
        raise UserError(f"no finetuning run in {' '.join(args.what)} beside its pretraining run")
    wanted = {}
    for pair in args.baseline.split(",") if args.baseline else ():
        name, _, value = pair.partition("=")
        name, value = name.replace("-", "_"), shown(number(value))
        names = [each for each in columns if each.split(".")[-1] == name.split(".")[-1] and each.endswith(name)]
        if not names:
            raise UserError(f"--baseline {name}: these runs differ in {', '.join(map(title, columns))}")
        if value not in (there := {shown(row.values[each]) for row in rows for each in names}):
            raise UserError(f"--baseline {pair}: there is {' '.join(sorted(there))}")
        wanted[names[0] if name.startswith("pretraining.") else names[0].removeprefix("pretraining.")] = value
    text = "\n\n".join(tell(columns, rows, wanted, args.select))
    begun = [path.parent for source in sources for path in source.glob("**/config.json")]
    lost = sum(not (folder / "result.json").exists() for folder in begun)
    print(f"\n{text}{f' Unfinished runs, which are not in it: {lost}.' if lost else ''}\n")
    some = chosen_by_validation(rows) if args.select else rows
    draw(lambda plt: (figure_of_settings(plt, columns, some), "Test scores: seeds, mean, 95 % interval"), args.figure)


def title(name):
    """What to call a column."""
    return name.replace("arch.", "").replace(".", " ").replace("_", "-")


def label(columns, row):
    """What to call a row in a figure."""
    return ", ".join(f"{title(name)} {shown(row.values[name])}" if name not in ("task", "model", "start") else
                     STARTS[row.values[name]][0] if name == "start" else str(row.values[name])
                     for name in columns if row.values[name] is not None)


def tell(columns, rows, wanted, select):
    """Table and caption. select: test scores of what validation chose alone."""
    chosen, lines, notes, every, r2 = chosen_by_validation(rows) if select else rows, [], [], [], set()
    tasks, lonely = dict.fromkeys(row.values["task"] for row in rows), False
    for task in tasks:
        some = [row for row in rows if row.values["task"] == task]
        arms = {i: scores(row.runs) for i, row in enumerate(some)}
        found = estimates(arms)
        for name, row in enumerate(some):
            runs = [*row.runs.values()]
            digits, factor = (3, 1) if "test_r2" in runs[0] else (1, 100)
            mean, half = statistics.mean(arms[name].values()), half_width((found[name], len(runs)))
            over = baseline(row, some, wanted) if not select else chosen_scratch(row, chosen)
            interval = f"[{mean - half:.{digits}f}, {mean + half:.{digits}f}]" if half else "–"
            test = [mean_std(arms[name], digits), interval, "–"]
            if over:
                differences, half = gain(arms, name, next(i for i, each in enumerate(some) if each is over), found)
                test[2] = signed(differences, digits, half)
                if len(differences) == len(runs):                # else it has fewer seeds than the row
                    test[2] = test[2].rsplit(" (", 1)[0]
            lonely = lonely or not over and row.values["start"] != "scratch"
            if select:
                score = {seed: run.get("val_accuracy", run.get("val_r2")) * factor for seed, run in row.runs.items()}
                test = [mean_std(score, digits), *(test if row in chosen else [""] * 3)]
                test[0] += " *" if row in chosen else ""
            passes = "/".join(f"{n:,}" for n in sorted({run["passes"] for run in runs}))
            lines.append([*(shown(row.values[name]) for name in columns), *test, str(len(runs)), passes,
                          f"{statistics.mean(run['minutes'] for run in runs):.1f}"])
            every += [*runs, *(run["first"] for run in runs if "changed" in run["first"])]
        notes.append(how_sure(arms, found, digits, f" of {task}" if len(tasks) > 1 else ""))
        r2.add(digits == 3)
    over = ", ".join(f"{title(name)}={value}" for name, value in wanted.items()) or "scratch"
    unit = "accuracy, % (or R2)" if len(r2) > 1 else "R2" if True in r2 else "accuracy, %"
    head = [*map(title, columns), *["validation"] * bool(select), f"test {unit}", "95 % interval",
            f"gain over {over} [95 % interval]", "seeds", "passes", "minutes"]
    alike = [str(rows[0].values[name]) for name in FIELDS[:3] if name not in columns]
    alike = [name for name in alike if name != "masked"]
    alike += dict.fromkeys(f"{title(name)} {shown(value)}" for row in rows for name, value in row.own.items()
                           if name not in columns)               # what differs from the recipe in all of them
    alike = f"{', '.join(alike)}: mean" if alike else "Mean"
    caption = [f"{alike} ± standard deviation over seeds.", *notes,
               "Gains are over the row from scratch that validation chose." if select else
               "" if wanted else "Gains are over the row from scratch that is otherwise the same, or has as many passes"
               + ("; –: there is none." if lonely else "."),
               "*: chosen by validation; the test scores of no other are shown." if select else "",
               f"Passes through the model and minutes: of both stages. {provenance(every)}."]
    return [markdown(head, lines), " ".join(filter(None, caption))]


def figure_of_settings(plt, columns, rows):
    """A panel a task, a line a setting."""
    tasks = dict.fromkeys(row.values["task"] for row in rows)
    figure, axes = plt.subplots(len(tasks), 1, figsize=(7, 1 + 0.3 * len(rows) + 0.6 * len(tasks)), squeeze=False)
    for axis, task in zip(axes[:, 0], tasks):
        some = [row for row in rows if row.values["task"] == task]
        found = estimates({i: scores(row.runs) for i, row in enumerate(some)})
        for y, row in enumerate(some):
            values, (name, colour) = [*scores(row.runs).values()], STARTS[row.values["start"]]
            half = half_width((found[y], len(values)))
            axis.scatter(values, [y] * len(values), s=7, color=colour, label=name)
            axis.errorbar(statistics.mean(values), y, xerr=half, color=colour, marker="|", markersize=9, capsize=3)
        axis.set_yticks(range(len(some)), [label([name for name in columns if name != "task"], row) for row in some])
        r2 = "test_r2" in next(iter(row.runs.values()))
        axis.set(ylim=(len(some) - 0.5, -0.5), xlabel="R2" if r2 else "accuracy, %")
        axis.set_title(task, loc="left")
        axis.grid(axis="x", color="0.9")
    return figure


# ---- demo: the entries of run_all.sh's demos -------------------------------------------------------------------------

DEMO_TASKS = {"pathfinder_demo": "Pathfinder, scaled down", "text_demo": "Text (IMDb), 128 characters",
              "text256": "Text (IMDb), 256 characters"}                                       # two classes all
MODEL_NAMES = {
    "transformer": "Transformer", "rotary": "Transformer (rotary)", "local": "Local attention",
    "longformer": "Longformer", "linformer": "Linformer", "reformer": "Reformer", "bigbird": "BigBird",
    "linear": "Linear Transformer", "performer": "Performer", "performer_relu": "Performer, ReLU", "mega": "MEGA",
    "mega_chunk": "MEGA-chunk", "mamba": "Mamba", "spade": "SPADE (our reading)", "s4": "S4",
    "s4_rand": "S4, random start", "dlr": "DLR", "dlr_rand": "DLR, random start", "dfout": "DFouT",
    "s4d": "S4D-Lin", "s4d_inv": "S4D-Inv", "s4d_legs": "S4D-LegS", "s5": "S5", "lru": "LRU", "sgconv": "SGConv"}


def dumbbells(axis, models, arms):
    """A line a model, from its mean score from scratch to that after SPT."""
    for y, name in enumerate(reversed(models)):
        scratch, spt = (statistics.mean(arm[name].values()) if arm[name] else math.nan for arm in arms)
        axis.plot([scratch, spt], [y, y], color="0.6", zorder=1)
        axis.scatter(scratch, y, color=SCRATCH, label="from scratch")
        axis.scatter(spt, y, color=SPT, label="self-pretrained (SPT)")
    most = max(len(seeds) for arm in arms for seeds in arm.values())
    fewer = {name: min(len(arm[name]) for arm in arms) for name in models}
    axis.set_yticks(range(len(models)), [f"{name} ({fewer[name]} of {most} seeds)" if fewer[name] < most else name
                                         for name in reversed(models)])
    axis.set(xlabel="test accuracy, %")


def spread_over(models, arms):
    """How far models are apart: does SPT level the field?"""
    ends = [[statistics.mean(arm[name].values()) for name in models if arms[0][name] and arms[1][name]] for arm in arms]
    if len(ends[0]) < 2:
        return ""
    scratch, spt = (f"{statistics.stdev(arm):.1f} (from {min(arm):.1f} to {max(arm):.1f})" for arm in ends)
    return (f"Standard deviation over {len(ends[0])} models: {scratch} from scratch, {spt} after SPT. Hidden: percent "
            "of the hidden symbols that pretraining predicts right. ")


def arms_of(entry, found):
    """A demo's entry, runs {identity: {seed: run}} -> ({name: {seed: score}} from scratch, the same after SPT), {name:
    {seed: percent of hidden symbols that pretraining predicted right}}, the runs that count."""
    arms, hidden, used = ({}, {}), {}, []
    for row in entry:
        name = ", ".join(filter(None, (MODEL_NAMES.get(row.model, row.model), row.word)))
        for run in experiments.trained(row):
            arm = found.get(identity(experiments.record(run)), {})
            first = found.get(identity(experiments.record(run.first)), {}) if run.first else {}
            arms[run.start == "spt"][name] = scores(arm)
            hidden |= {name: {seed: 100 * each["val_score"] for seed, each in first.items()}} if run.first else {}
            used += [*arm.values(), *first.values()]
    return arms, hidden, used


def demo(args):
    """Prints a demo's table and caption for the finished runs that its entry in experiments.py names, of any model, and
    draws its figure."""
    target = args.what[0] if args.what else args.runs.stem if args.runs.stem in experiments.DEMOS else "demo"
    if target not in experiments.DEMOS:
        raise UserError(f"demo {target}: there is {' '.join(experiments.DEMOS)}")
    task, usual = experiments.DEMOS[target]
    runs = [run for run in read_runs(args.runs) if run["task"] == task]
    linear = [run for run in runs if "constant_accuracy" in run and not run["changed"]][:1]    # of baseline.py, if any
    free = [line for run in linear for line in costs_nothing(run)]
    more = dict.fromkeys(run["model"] for run in runs if run["model"] in MODELS.keys() - {*usual.split()})
    arms, hidden, used = arms_of(experiments.demo(target, " ".join([*usual.split(), *more])), by_identity(runs))
    models = [name for name in hidden if arms[0][name] or arms[1][name]]
    used += linear
    others = f"{len(runs) - len(used)} runs there have other settings: python analyze.py compare {args.runs}"
    if not models:
        raise UserError(f"no finished finetuning run of {target} in {args.runs}; run: bash run_all.sh {target}"
                        + (f"; {others}" if runs else ""))
    rows, many = [], len(models) > 6                               # then sorted by the gain
    both = {f"{name} {how}": arm[name] for arm, how in zip(arms, ("from scratch", "after SPT")) for name in models}
    sure = estimates(both)
    gains = {name: gain(both, f"{name} after SPT", f"{name} from scratch", sure) for name in models}
    if many:
        models.sort(key=lambda name: -statistics.mean([*gains[name][0].values()] or [-math.inf]))
    for name in models:
        points = signed(gains[name][0], 1, gains[name][1]).rsplit(" (", 1)[0]      # seeds have their own column
        rows.append([DEMO_TASKS[task], name, *(mean_std(arm[name]) for arm in arms), points, str(len(gains[name][0]))])
    head = ["task", "model", "from scratch", "self-pretrained", "gain [95 % interval]", "seeds"]
    pair = [name for name in models if name == "S4" or name.startswith("Transformer")]
    if len(pair) == 2 == len(models) and all(arm[name] for arm in arms for name in pair):
        gaps = [statistics.mean(arm["S4"].values()) - statistics.mean(arm[pair[0]].values()) for arm in arms]
        rows.append([DEMO_TASKS[task], "*gap, S4 minus Transformer*", *(f"{gap:+.1f}" for gap in gaps), "", ""])
    above, caption = [[DEMO_TASKS[task], name, f"{score:.1f}", "", "", ""] for name, _, _, score in free], ""
    if many:
        plain = [name for name in models if ", " not in name or name in MODEL_NAMES.values()]        # no other sizes
        caption, head = f"{DEMO_TASKS[task]}. {spread_over(plain, arms)}", [*head[1:], "hidden"]
        rows = [[*row[1:], mean_std(hidden[name])] for row, name in zip(rows, models)]
        above = [[*row[1:], ""] for row in above]
    caption += ("Test accuracy in percent, mean ± standard deviation over seeds. "
                f"{how_sure(both, sure)} Small models on small or shortened sets: not the paper's tasks; "
                f"{provenance(used)}.")
    text = f"{markdown(head, above + rows)}\n\n{caption}"
    print(f"\n{text}\n")
    if len(runs) > len(used):
        print(f"{others}\n")
    draw(lambda plt: (figure_of_demo(plt, models, arms, free), DEMO_TASKS[task]), args.figure)
    if args.readme:
        replace_block(args.readme, args.figure.stem, text)


def figure_of_demo(plt, models, arms, free):
    """free: what `costs_nothing` says, a line each; with none of it, chance."""
    if many := len(models) > 6:
        figure, axis = plt.subplots(figsize=(6.4, 0.9 + 0.22 * len(models)))
        dumbbells(axis, models, arms)
    else:
        figure, axis = plt.subplots(figsize=(max(7.2, 1.4 * len(models)), 3.6))
        bars(axis, models, arms, {} if free else dict.fromkeys(models, 50))
    for _, name, style, score in free:
        (axis.axvline if many else axis.axhline)(score, color="black", linestyle=style, label=name)
    return figure
