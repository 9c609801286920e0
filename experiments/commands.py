"""Turn an entry into its commands. A command is its own record: the stage's parser says what the
run will record, and its name."""

import functools
import shlex
from collections import namedtuple

import zoo  # noqa: F401, fills MODELS
from engine.flags import arguments, run_name
from files import ROOT
from pretrain import OBJECTIVES
from recipes import read_table

# One run of each seed. word: how tables call its variant; start: that of its variant (a model with
# trained weights starts from them instead of scratch); first: its pretraining, or None.
Training = namedtuple("Training", "task model word start flags first")


def trained(row):
    """Return [Training], one per variant of a row."""
    runs = []
    for variant in row.variants:
        first = None
        if variant.start == "spt":
            first = Training(row.task, row.model, variant.word, "pretrain", variant.first, None)
        run = Training(row.task, row.model, variant.word, variant.start, variant.flags, first)
        runs.append(run)
    return runs


@functools.cache
def parsed(run):
    """Return the settings of a run as its stage parses them, before anything is trained."""
    words = shlex.split(run.flags)
    if run.first:
        pretraining = vars(parsed(run.first))
        return arguments("finetune", words, OBJECTIVES, pretraining, planned=True)
    words += ["--task", run.task, "--model", run.model]
    stage = "pretrain" if run.start == "pretrain" else "finetune"
    return arguments(stage, words, OBJECTIVES, planned=True)


def record(run):
    """Return what result.json will say of a run: task, model, objective, start, joint, changed."""
    settings = vars(parsed(run))
    names = "task model objective start joint changed"
    return {name: settings.get(name) for name in names.split()}


def directory(run, seed, folder):
    """Return the directory of a run with this seed."""
    return f"{folder}/{run_name(parsed(run), seed)}"


def command(run, seed, folder, machine):
    """Return the command of a run with this seed. Its own flags count more than `machine`."""
    script = "pretrain.py" if run.start == "pretrain" else "finetune.py"
    subject = f"--task {shlex.quote(run.task)} --model {run.model}"
    if run.first:
        subject = f"--init {shlex.quote(directory(run.first, seed, folder))}"
    flags = " ".join(filter(None, (subject, machine, run.flags)))
    out = shlex.quote(directory(run, seed, folder))
    return f"python {script} {flags} --seed {seed} --resume --out {out}"


def chains(entry, seed, folder, machine=""):
    """Return the commands of an entry for one seed, all with the flags of `machine`: one list per
    chain, a single run, or a pretraining followed by all finetunings that start from it. Two
    commands that train the same have one directory and come once."""
    order = "pretrain", "scratch", "spt", "joint"
    runs = [run for row in entry for run in trained(row)]
    groups = {}  # {directory of a chain's first run: {directory: command}}
    for run in sorted(runs, key=lambda run: order.index(run.start)):
        group = groups.setdefault(directory(run.first or run, seed, folder), {})
        for link in filter(None, (run.first, run)):
            group[directory(link, seed, folder)] = command(link, seed, folder, machine)
    return [[*group.values()] for group in groups.values()]


def price(chains):
    """Return what the missing runs of these chains cost, from results/hours.txt, as a sentence."""
    costs = {row["run"]: row for row in read_table((ROOT / "results" / "hours.txt").read_text())}
    outs = [ROOT / shlex.split(command)[-1] for chain in chains for command in chain]
    missing = [out.name.rpartition("-s")[0] for out in outs if not (out / "result.json").exists()]
    rows = [costs[name] for name in missing if name in costs]
    low, high = (sum(float(row[column]) for row in rows) for column in ("best", "realistic"))
    text = f"{len(chains)} chains, {low:,.0f} to {high:,.0f} computed H100 hours (results/costs.md)"
    if unknown := len(missing) - len(rows):  # of a fork
        text += f" and {unknown} runs whose hours are unknown"
    large = sorted({f"{row['run']} {row['gb']}" for row in rows if float(row["gb"]) > 80})
    if large:
        text += f"; GB without --micro-batch: {', '.join(large)}"
    return text
