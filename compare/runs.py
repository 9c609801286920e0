"""Read runs into one table, a row per run. Nothing changes a row or a record afterwards.

result.json defines a run: task, model, objective, how it started, seed, and everything that differs
from the recipe in either stage. Names of folders do not matter."""

import base64
import itertools
import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas

from compare.drawing import LOOKS
from engine.folder import read_log
from engine.targets import KINDS
from files import UserError
from pretrain import OBJECTIVES
from recipes import settings


class Run(NamedTuple):
    """A row of the table of runs. A run of pretraining has no kind, score, val and examples."""

    name: str
    place: Path  # its path; of a kept run that of runs.jsonl, with its name instead
    folder: Path  # where its log.jsonl and kernels.npz are
    task: str
    model: str
    objective: str
    start: str  # scratch, spt, joint, corpus, baseline, or pretrain
    settings: dict  # all that differs from the recipe: {"lr": 0.01, "arch.d": 64, ...}
    variant: tuple  # what the seeds of one variant share: `identity`
    seed: int
    record: dict  # result.json
    kind: str = None  # of its targets, a row of KINDS
    score: float = np.nan  # on the test split, R2 or percent
    val: float = np.nan  # the score on validation that chose its checkpoint
    examples: list = None  # what each example adds to the score: arrays, one per class if balanced
    predicted: bool = False  # whether examples are those of kept predictions


# ---- Reading -------------------------------------------------------------------------------------


def load(*sources, strict=False):
    """Return the table of all finished runs in folders of run directories or in files such as
    runs.jsonl. A warning names each damaged run, which is skipped; strict: UserError."""
    rows = []
    for path, text in itertools.chain.from_iterable(map(records_of, sources)):
        try:
            record = json.loads(text)
            kept = None if path.name == "result.json" else path.parent / record["run"]
            rows.append(row_of(record, path.parent, kept))
        except Exception as error:  # the record may be anything
            if strict:
                advice = "remove it and make the run again"
                raise UserError(f"{path} is damaged: {error!r}; {advice}") from None
            print(f"warning: a run in {path} is skipped: {error!r}", file=sys.stderr)
    return pandas.DataFrame(rows, columns=Run._fields)


def records_of(source):
    """Yield (path of the file, text of a record) from a folder of runs or a file of kept runs."""
    if not source.exists():
        raise UserError(f"no runs in {source}; run_all.sh makes them, and --runs names others")
    if source.is_file():
        yield from ((source, line) for line in source.read_text(errors="replace").splitlines())
        return
    for path in sorted(source.glob("**/result.json")):
        yield path, path.read_text(errors="replace")


def row_of(record, folder, kept=None):
    """Return the row of a record, or raise any error. kept: the place of a run without folder."""
    place = kept or folder
    # Fields that are used later are read here, so that a damaged record is named.
    int(record["steps"]), float(record["seconds"])
    variant = identity(record)
    task, model, objective, start, _ = variant
    fields = task, model, objective, start, settings_of(record), variant, int(record["seed"])
    run = Run(place.name, place, folder, *fields, record)
    if start == "pretrain":
        return run
    LOOKS[start]
    kind = kind_of(record)
    predictions = added_by_examples(record, folder, kind)
    return run._replace(
        kind=kind,
        score=units(kind) * float(record[f"test_{KINDS[kind].score}"]),
        val=float(record.get(validation_field(record), np.nan)),
        examples=examples_of(record, kind, predictions),
        predicted=predictions is not None,
    )


def settings_of(record):
    """Return all that differs from the recipe, as a flat dict."""
    weight = {"joint": record["joint"]} if record.get("joint") else {}
    return settings(record["changed"]) | weight


def identity(record):
    """Return what the seeds of a variant share: task, model, objective, start, settings."""
    changed = settings_of(record).items()
    changed = ((name, str(value) if isinstance(value, list) else value) for name, value in changed)
    start = record.get("start", "pretrain")
    return record["task"], record["model"], record["objective"], start, tuple(sorted(changed))


def kind_of(record):
    """Return the kind of a finetuning run's targets, a row of KINDS."""
    kinds = dict(test_r2="number", test_micro_f1="labels", shares="positions")
    return next((kind for field, kind in kinds.items() if field in record), "class")


def units(kind):
    """Return the factor of a score in tables: 1 for R2, 100 for shares, shown in percent."""
    return 1 if kind == "number" else 100


def validation_field(record):
    """Return the name of the score that chose a run's checkpoint."""
    balanced = "val_balanced_accuracy"
    return balanced if balanced in record else f"val_{KINDS[kind_of(record)].score}"


def evaluations(run):
    """Return the evaluations of a run: of a kept run `evals` of its record, else from its log."""
    if "evals" in run.record:
        return run.record["evals"]
    return [record for record in read_log(run.folder) if record.get("kind") == "eval"]


# ---- What each test example adds to a score ------------------------------------------------------


def added_by_examples(record, folder, kind):
    """Return what each test example adds to a run's score, from its kept predictions: right or not,
    sorted by label; a share of R2, F1 or the accuracy over positions, a ratio of two sums that both
    vary. None if they were not kept."""
    n = record.get("test_examples")
    path = folder / "predictions.npz"
    if record.get("right"):
        return np.unpackbits(decoded(record["right"], np.uint8), count=n)
    if record.get("shares"):
        return shares_of_ratio(*decoded(record["shares"], np.uint16).reshape(2, n).astype(float))
    if path.exists():
        with np.load(path) as arrays:
            y, prediction = arrays["y"], arrays["prediction"]
    elif record.get("values"):
        y, prediction = decoded(record["values"], np.float16).reshape(2, n).astype(float)
    else:
        return None
    if kind == "class":
        return (prediction == y)[np.argsort(y, kind="stable")]
    if y.min() == y.max():
        return None
    return shares_of_ratio(*KINDS[kind].shares(y, prediction))


def decoded(text, dtype):
    return np.frombuffer(base64.b64decode(text), dtype)


def shares_of_ratio(numerators, denominators):
    """Return what each example adds to a ratio of two sums, to first order; its mean is the
    ratio."""
    ratio = numerators.sum() / max(denominators.sum(), 1e-300)
    return ratio + (numerators - ratio * denominators) / max(denominators.mean(), 1e-300)


def examples_of(record, kind, predictions, balanced=False):
    """Return what each test example adds to a run's score: a list of arrays, one per class if the
    score is balanced accuracy, else one array. Without kept predictions only how many are right is
    known, by class. None if nothing is known."""
    n = record.get("test_examples")
    if kind != "class" or not n:
        return None if predictions is None else [predictions]
    counts = record.get("counts") or dict(labels=[n], right=[round(record["test_accuracy"] * n)])
    if predictions is None:
        pairs = zip(counts["labels"], counts["right"])
        predictions = np.concatenate([np.arange(size) < right for size, right in pairs])
    if not balanced:
        return [predictions]
    return np.split(predictions, np.cumsum([size for size in counts["labels"] if size])[:-1])


# ---- Finetuning runs and their pretraining -------------------------------------------------------


def with_pretraining(runs):
    """Return finetuning runs with more columns. first: the Run of its pretraining, or None; passes
    (forward and backward passes of a batch) and minutes, both including `first`."""
    rows = []
    pretrained = {run.place.resolve(): run for run in rows_of(runs) if run.start == "pretrain"}
    for run in rows_of(runs[runs.start != "pretrain"]):
        first = pretraining_of(run, pretrained)
        if first is None and run.record.get("init"):
            lost = "its pretraining run was not found"
            print(f"warning: {run.name} is left out: {lost}", file=sys.stderr)
            continue
        objective = OBJECTIVES.get(run.objective)
        twice = run.start == "joint" and objective and objective.hides
        passes = (2 if twice else 1) * run.record["steps"]
        seconds = run.record["seconds"]
        if first:
            passes += first.record["steps"]
            seconds += first.record["seconds"]
        rows.append((*run, first, passes, seconds / 60))
    return pandas.DataFrame(rows, columns=[*Run._fields, "first", "passes", "minutes"])


def rows_of(runs):
    """Return the rows of a table of runs, which have its columns as attributes."""
    return [*runs.itertuples(index=False, name="Run")]


def pretraining_of(run, pretrained):
    """Return the Run from which a run started, or None. pretrained: {place: Run}. Of a kept run, or
    if folders were moved, it stands beside the run. A checksum, if known, shows whether it was
    replaced."""
    if not run.record.get("init"):
        return None
    init = Path(run.record["init"])
    beside = run.place.resolve().with_name(init.name)
    for path in [beside] if run.place != run.folder else [init.resolve(), beside]:
        first = pretrained.get(path)
        if first is None and path.exists():
            first = next(iter(rows_of(load(path))), None)
        if first:
            checksums = {run.record.get("pretrained"), first.record.get("best.pt")} - {None}
            if len(checksums) < 2:
                return first
    return None


# ---- Variants: tables of runs that differ only in their seed -------------------------------------

# Fields in which two runs of one setting and seed should agree, and fields that may explain why
# they do not.
SCORES = "accuracy", "r2", "micro_f1"
OUTCOME = *(f"{split}_{score}" for split in ("val", "test") for score in SCORES), "val_score"
OUTCOME += "test_loss", "steps", "parameters"
CAUSES = "commit", "torch", "device", "processes", "dtype", "init"


def by_variant(runs, any_code=True):
    """Return a table for each variant, indexed by seed. UserError for two runs of one variant and
    seed that differ, or two sets of one name. If runs of a variant, or their pretraining runs,
    record different code: a warning, or without any_code UserError."""
    refuse_two_sets(runs)
    variants = []
    for _, variant in runs.groupby("variant", sort=False):
        refuse_two_outcomes(variant)
        variant = variant.drop_duplicates("seed").set_index("seed", drop=False)
        versions = versions_of_code(variant)
        if versions > 1:
            seeds = f"seeds of the setting of {variant.place.iloc[0]}"
            text = f"{seeds} were trained by {versions} versions of the code"
            if not any_code:
                raise UserError(f"{text}; train them again, or pool them with --any-code")
            print(f"warning: {text}", file=sys.stderr)
        variants.append(variant)
    return variants


def refuse_two_sets(runs):
    """Raise UserError for two runs whose data have one name and differ in what both record."""
    facts = {}
    for run in rows_of(runs):
        for name, value in (run.record.get("data") or {}).items():
            first, earlier = facts.setdefault((run.task, name), (value, run))
            if value != first:
                raise UserError(
                    f"{earlier.place} and {run.place} trained on two sets called {run.task}: "
                    f"{earlier.record['data']} and {run.record['data']}; compare them separately"
                )


def refuse_two_outcomes(variant):
    """Raise UserError for two runs of one seed with different results. Copies are no error."""
    seeds = {}
    for run in rows_of(variant):
        earlier = seeds.setdefault(run.seed, run)
        before, after = earlier.record, run.record
        names = [name for name in (*CAUSES, *OUTCOME) if before.get(name) != after.get(name)]
        if {*OUTCOME} & {*names}:
            texts = [f"{name} {before.get(name)} and {after.get(name)}" for name in names[:3]]
            raise UserError(
                f"{earlier.place} and {run.place} are two runs of one setting and seed, but "
                f"differ: {', '.join(texts)}; leave one out, or make your change a flag"
            )


def versions_of_code(variant):
    """Return how many versions of the code trained runs, or their pretraining runs."""
    stages = rows_of(variant), firsts_of(variant)
    return max(len({run.record.get("code") for run in stage} - {None}) for stage in stages)


def firsts_of(runs):
    """Return the rows of the pretraining of these runs, as far as they are known."""
    return [first for first in runs.get("first", ()) if first is not None]


def provenance(*tables):
    """Return where numbers come from: how many runs, with pretraining; a shared one counts once."""
    rows = [run for runs in tables for run in (*rows_of(runs), *firsts_of(runs))]
    records = [*{run.place: run.record for run in rows}.values()]
    hours = sum(record["seconds"] * record.get("processes", 1) for record in records) / 3600
    time_spent = f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.0f} minutes"
    seeds, commits, devices, versions = (
        ", ".join(sorted({str(record.get(field)) for record in records}))
        for field in ("seed", "commit", "device", "torch")
    )
    runs = "1 run" if len(records) == 1 else f"{len(records)} runs"
    made = f"commit {commits}, {devices}, torch {versions}"
    return f"{runs}, seeds {seeds}; {made}; {time_spent} of training"
