"""Turn an entry into its commands, and into what result.json will say of each run, so that tables
find it."""

import shlex
from collections import namedtuple

import zoo  # noqa: F401, fills MODELS
from files import ROOT
from models import MODELS, keys_of
from pretrain import OBJECTIVES
from recipes import INHERITED, arch, assignments, halved, number, read_table, recipe_line
from tasks import declared, folder_name

# One run, trained by one command. first: the run of its pretraining, or None.
Trained = namedtuple("Trained", "task model word start flags first", defaults=(None,))


def differing(flags, task, model, objective, start, defaults=None):
    """Return the flags that differ from the recipe, sorted. For your data, every size and length
    that is set counts as different, because `fit` chooses these by the number of sequences."""
    _, usual, recipe = recipe_line(task, declared(task), model, objective, start)
    if start == "joint":
        recipe = (halved(recipe) if OBJECTIVES[usual].hides else recipe) | {"joint": 1}
    recipe = (
        (defaults or {})
        | recipe
        | {"objective": recipe_line(task, declared(task), model, None, start)[1]}
    )
    recipe |= dict(epochs=None, eval_every=None) if declared(task).own else {}
    sizes, whole = (
        {} if declared(task).own else arch(task, model),
        arch(task, model) | flags.get("arch", {}),
    )
    flags = {
        name: {key: value[key] for key in sorted(value) if sizes.get(key) != value[key]}
        if name == "arch"
        else value
        for name, value in sorted(flags.items())
    }
    # the gradient is that of the whole batch
    same = {"micro_batch"} if whole.get("norm") != "batch" else {}
    return {
        name: value
        for name, value in flags.items()
        if value not in ({}, recipe.get(name)) and name not in same
    }


def given(text):
    """Parse flags: '--lr 3e-3 --arch d=64 --rewind' -> {"lr": 0.003, "arch": {"d": 64}, "rewind":
    True}."""
    words, found = text.split(), {}
    for word, after in zip(words, [*words[1:], "--"]):
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            found[name] = (
                True
                if after.startswith("--")
                else assignments(after)
                if name == "arch"
                else number(after)
            )
    return found


def trained(row):
    """Return [Trained], one per variant of a row."""
    found = []
    for variant in row.variants:
        word, first = "-".join(filter(None, (row.word, variant.word))), None
        if variant.start == "spt":
            first = Trained(
                row.task,
                row.model,
                word if variant.of is None else variant.of,
                "pretrain",
                variant.first,
            )
        found.append(Trained(row.task, row.model, word, variant.start, variant.flags, first))
    return found


def chains(entry, seed, folder, machine=""):
    """Return the commands of an entry for one seed, all with the flags of `machine`: one list per
    chain, a single run, or a pretraining followed by all finetunings that start from it."""
    groups = {}
    for run in dict.fromkeys(run for row in entry for run in trained(row)):
        group = groups.setdefault(run.first or run, [run.first] if run.first else [])
        group.append(run)
    order = "pretrain", "scratch", "spt", "joint"
    groups = sorted(groups.values(), key=lambda group: order.index(group[-1].start))
    return [commands(group, seed, folder, machine) for group in groups]


def price(chains):
    """Return what the missing runs of these chains cost, from results/hours.txt, as a sentence."""
    costs = {row["run"]: row for row in read_table((ROOT / "results" / "hours.txt").read_text())}
    outs = [ROOT / shlex.split(command)[-1] for chain in chains for command in chain]
    missing = [out.name.rpartition("-s")[0] for out in outs if not (out / "result.json").exists()]
    rows = [costs[name] for name in missing if name in costs]
    low, high = (sum(float(row[column]) for row in rows) for column in ("best", "realistic"))
    large = sorted({f"{row['run']} {row['gb']}" for row in rows if float(row["gb"]) > 80})
    text = f"{len(chains)} chains, {low:,.0f} to {high:,.0f} computed H100 hours (results/costs.md)"
    if unknown := len(missing) - len(rows):  # of a fork
        text += f" and {unknown} runs whose hours are unknown"
    return text + f"; GB without --micro-batch: {', '.join(large)}" * bool(large)


def record(run):
    """Return what result.json will say of a run: task, model, objective, start, joint, changed."""
    task, flags, first = declared(run.task), given(run.flags), run.first and record(run.first)
    start = "corpus" if run.start == "scratch" and MODELS[run.model].weights else run.start
    objective = first["objective"] if first else flags.pop("objective", None)
    objective = recipe_line(run.task, task, run.model, objective, start)[1]
    if first:
        keys = keys_of(run.model, first["changed"].get("arch", {}).get("ffn", "dense"))
        inherited = {name: value for name, value in first["changed"].items() if name in INHERITED}
        if "arch" in inherited:
            inherited["arch"] = {
                name: value for name, value in inherited["arch"].items() if keys[name].inherited
            }
        flags = inherited | flags
    weight = flags.pop("joint", None)
    changed = differing(flags, run.task, run.model, objective, start)
    changed |= {"pretraining": first["changed"]} if first and first["changed"] else {}
    return dict(
        task=run.task,
        model=run.model,
        objective=objective,
        start=start,
        joint=weight,
        changed=changed,
    )


def commands(group, seed, folder, machine=""):
    """Return the commands of a chain of runs. A run's flags follow those of `machine` and win."""
    found = []

    def out(run):
        task = folder_name(run.task)
        return f"{folder}/{'-'.join(filter(None, (task, run.model, run.word, run.start)))}-s{seed}"

    for run in group:
        script = "pretrain" if run.start == "pretrain" else "finetune"
        what = (
            f"--init {out(run.first)}"
            if run.first
            else f"--task {shlex.quote(run.task)} --model {run.model}"
        )
        flags = " ".join(filter(None, (what, machine, run.flags)))
        found.append(f"python {script}.py {flags} --seed {seed} --resume --out {out(run)}")
    return found
