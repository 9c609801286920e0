"""Read runs: what each run did, and which runs are seeds of one variant.

result.json defines a run: task, model, objective, how it started, seed, and everything that differs
from the recipe in either stage. Names of folders do not matter."""

import base64
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

from compare.drawing import LOOKS
from engine.folder import read_log
from engine.targets import KINDS
from files import UserError
from pretrain import OBJECTIVES
from recipes import settings


def read_runs(source, strict=False):
    """Return the records of all finished runs in a folder of run directories or in a runs.jsonl. A
    warning names each damaged run, which is skipped; strict: UserError. Added to a record: run, its
    name; folder, where its log.jsonl and kernels.npz are; place, its path (of a kept run: that of
    runs.jsonl and its name); score of a finetuning run, in the paper's units."""
    if not source.exists():
        raise UserError(
            f"no runs in {source}; run_all.sh makes them, and --runs names another folder"
        )
    runs = []
    for path in [source] if source.is_file() else sorted(source.glob("**/result.json")):
        text = path.read_text(errors="replace")
        for record in text.splitlines() if source.is_file() else [text]:
            try:
                run = {"run": path.parent.name} | json.loads(record)
                # Raises if a field that is used later is missing or of the wrong type.
                if "start" in run:
                    run["score"] = units(run) * float(run[f"test_{KINDS[kind_of(run)].score}"])
                    (
                        LOOKS[run["start"]],
                        Path(run.get("init") or ""),
                        examples(run | {"folder": path.parent}),
                    )
                hash(identity(run)), {**(run.get("data") or {})}
                numbers = dict(
                    seed=int(run["seed"]), steps=int(run["steps"]), seconds=float(run["seconds"])
                )
                place = path.parent / run["run"] if source.is_file() else path.parent
                runs.append(run | numbers | {"folder": path.parent, "place": place})
            except Exception as error:  # the record may be anything
                if strict:
                    raise UserError(
                        f"{path} is damaged: {error!r}; remove it and make the run again"
                    ) from None
                print(f"warning: a run in {path} is skipped: {error!r}", file=sys.stderr)
    return runs


def evaluations(run):
    """Return a run's evaluations: `evals` of a kept run; for others, read them from the log and add
    them as `evals`."""
    if "evals" not in run:
        run["evals"] = [
            record for record in read_log(run["folder"]) if record.get("kind") == "eval"
        ]
    return run["evals"]


def kind_of(run):
    """Return the kind of a finetuning run's targets, a row of KINDS."""
    return (
        "number"
        if "test_r2" in run
        else "labels"
        if "test_micro_f1" in run
        else ("positions" if "shares" in run else "class")
    )


def units(run):
    """Return by what a score is multiplied in tables: 1 for R2, 100 for shares, which are printed
    in percent."""
    return 1 if kind_of(run) == "number" else 100


def predicted(run):
    """Return what each test example adds to a run's score, from its kept predictions: right or not,
    sorted by label; a share of R2, F1 or the accuracy over positions, a ratio of two sums that both
    vary. None if they were not kept."""
    n, path = run.get("test_examples"), run["folder"] / "predictions.npz"
    if run.get("right"):
        bits = np.unpackbits(np.frombuffer(base64.b64decode(run["right"], validate=True), np.uint8))
        if not n <= len(bits) < n + 8:
            raise ValueError(f"{len(bits)} bits for {n} examples")
        return bits[:n]
    if run.get("shares"):
        return shared(
            *np.frombuffer(base64.b64decode(run["shares"]), np.uint16).reshape(2, n).astype(float)
        )
    if path.exists():
        with np.load(path) as kept:
            y, found = kept["y"], kept["prediction"]
    elif run.get("values"):
        y, found = (
            np.frombuffer(base64.b64decode(run["values"]), np.float16)
            .reshape(2, n)
            .astype(np.float64)
        )
    else:
        return None
    if kind_of(run) == "class":
        return (found == y)[np.argsort(y, kind="stable")]
    return None if y.min() == y.max() else shared(*KINDS[kind_of(run)].shares(y, found))


def shared(numerators, denominators):
    """Return what each example adds to a ratio of two sums, to first order: their mean is the
    ratio."""
    ratio = numerators.sum() / max(denominators.sum(), 1e-300)
    return ratio + (numerators - ratio * denominators) / max(denominators.mean(), 1e-300)


def examples(run):
    """Return what each test example adds to a run's score: a list of arrays, one per class if the
    score is balanced accuracy (`balanced`), else one array. Without kept predictions only how many
    are right is known, by class. None if nothing is known."""
    n, counts, found = run.get("test_examples"), run.get("counts"), predicted(run)
    if kind_of(run) != "class" or not n:
        return None if found is None else [found]
    counts = counts or dict(labels=[n], right=[round(run["test_accuracy"] * n)])
    labels, right = counts["labels"], counts["right"]
    if found is None:
        found = np.concatenate([np.arange(size) < some for size, some in zip(labels, right)])
    return (
        np.split(found, np.cumsum([size for size in labels if size])[:-1])
        if run.get("balanced")
        else [found]
    )


def validation_field(run):
    """Return the name of the score that chose a run's checkpoint: balanced accuracy, accuracy, R2
    or micro F1."""
    return (
        "val_balanced_accuracy"
        if "val_balanced_accuracy" in run
        else f"val_{KINDS[kind_of(run)].score}"
    )


def validation(run):
    """Return the score by which a run's checkpoint was chosen."""
    return run.get(validation_field(run))


def with_pretraining(runs):
    """Yield the finetuning runs. Added to a run: first, its pretraining run; passes (forward and
    backward passes of a batch) and minutes, both including `first`."""
    pretrained = {run["place"].resolve(): run for run in runs if "start" not in run}
    for run in runs:
        if "start" not in run:
            continue
        first = dict(steps=0, seconds=0)
        if init := run.get("init") and Path(run["init"]):
            # Kept runs and moved folders have it beside the run. A checksum, if known, shows
            # whether it was replaced.
            paths = [init.resolve()] * (run["place"] == run["folder"]) + [
                run["place"].resolve().with_name(init.name)
            ]
            there = (
                pretrained.get(path) or next(iter(read_runs(path) if path.exists() else []), {})
                for path in paths
            )
            first = next(
                (
                    one
                    for one in there
                    if one and len({run.get("pretrained"), one.get("best.pt")} - {None}) < 2
                ),
                None,
            )
            if first is None:
                print(
                    f"warning: {run['run']} is left out: its pretraining run was not found",
                    file=sys.stderr,
                )
                continue
        objective = OBJECTIVES.get(run["objective"])
        each = 2 if run["start"] == "joint" and objective and objective.hides else 1
        yield run | dict(
            first=first,
            passes=each * run["steps"] + first["steps"],
            minutes=(run["seconds"] + first["seconds"]) / 60,
        )


class Variant(NamedTuple):
    """Runs that differ only in their seed."""

    task: str
    model: str
    objective: str
    start: str  # scratch, spt, joint, corpus, baseline, or pretrain
    own: dict  # all that differs from the recipe: {"lr": 0.01, "arch.d": 64, ...}
    runs: dict  # {seed: run}


def identity(run):
    """Return what runs of one variant share: task, model, objective, start, and all that differs
    from the recipe."""
    words = tuple(
        sorted(
            (name, str(value) if isinstance(value, list) else value)
            for name, value in own(run).items()
        )
    )
    return run["task"], run["model"], run["objective"], run.get("start", "pretrain"), words


def own(run):
    """Return all that differs from the recipe, as a flat dict."""
    return settings(run["changed"]) | ({"joint": run["joint"]} if run.get("joint") else {})


# Fields in which two runs of one setting and seed should agree, and fields that may explain why
# they do not.
OUTCOME = (
    *(f"{split}_{name}" for split in ("val", "test") for name in ("accuracy", "r2", "micro_f1")),
    "val_score",
    "test_loss",
    "steps",
    "parameters",
)
CAUSES = "commit", "torch", "device", "processes", "dtype", "init"


def variants_of(runs, any_code=True):
    """Group runs -> [Variant]. UserError for two runs of one variant and seed that differ, or two
    sets of one name. If runs of a variant, or their pretraining runs, record different code: a
    warning, or without any_code UserError."""
    found, sets = defaultdict(dict), {}
    for run in runs:
        there = found[identity(run)].setdefault(run["seed"], run)
        if any(there.get(name) != run.get(name) for name in OUTCOME):
            names = [name for name in (*CAUSES, *OUTCOME) if there.get(name) != run.get(name)]
            differ = ", ".join(
                f"{name} {there.get(name)} and {run.get(name)}" for name in names[:3]
            )
            raise UserError(
                f"{there['place']} and {run['place']} are two runs of one setting and seed, but "
                "differ: "
                f"{differ}; leave one out, or make your change a flag"
            )
        other = sets.setdefault(run["task"], run)
        one, two = other.get("data") or {}, run.get("data") or {}
        if one.keys() < two.keys():  # older runs recorded less about their data
            sets[run["task"]] = run
        if any(one[name] != two[name] for name in one.keys() & two.keys()):
            raise UserError(
                f"{other['place']} and {run['place']} trained on two sets called {run['task']}: "
                f"{other['data']} and {run['data']}; compare them separately"
            )
    for seeds in found.values():
        runs_of_stages = [*seeds.values()], [run.get("first", {}) for run in seeds.values()]
        several = max(
            len({run["code"] for run in stage if run.get("code")}) for stage in runs_of_stages
        )
        if several > 1:
            place = runs_of_stages[0][0]["place"]
            text = f"seeds of the setting of {place} were trained by {several} versions of the code"
            if not any_code:
                raise UserError(f"{text}; train them again, or pool them with --any-code")
            print(f"warning: {text}", file=sys.stderr)
    return [
        Variant(*key[:4], own(next(iter(seeds.values()))), seeds) for key, seeds in found.items()
    ]


def scores(runs):
    """Return {seed: score} of {seed: run}."""
    return {seed: run["score"] for seed, run in runs.items()}


def provenance(runs):
    """Return how many runs there are and where their numbers come from. A run that others share
    counts once."""
    runs = [*{run["place"]: run for run in runs}.values()]
    hours = sum(run["seconds"] * run.get("processes", 1) for run in runs) / 3600
    time_spent = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"
    seeds, commits, devices, versions = (
        ", ".join(sorted({str(run.get(field)) for run in runs}))
        for field in ("seed", "commit", "device", "torch")
    )
    return (
        f"{len(runs)} run{'s' * (len(runs) != 1)}, seeds {seeds}; commit {commits}, {devices}, "
        f"torch {versions}; "
        f"{time_spent} of training"
    )
