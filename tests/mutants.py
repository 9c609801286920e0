"""Faults that the tests must catch: one line of the code is changed, and the named test files run
until one fails.

    python tests/mutants.py              all, one on each core: half an hour on two
    python tests/mutants.py predict      those whose file has this in its name

pytest does not collect this file. A mutant that survives is a test that is missing.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# A file, and below it a line as it is -> as it is changed [test files, one of which must fail].
# Blanks do not matter. The first occurrence is changed.
MUTANTS = r"""
analyze.py
    if run.start != "pretrain"}  ->  if False}  [made_tables]
own/split.py
    if len(examples) > 2 and len(spare):  ->  if False:  [splits]
    if lacking < fewest:  ->  if draw == 0:  [splits]
    if len(where[keys[i]]) > 1  ->  if len(where[keys[i]]) > 2  [splits]
    len(np.unique(end)) > 4  ->  len(np.unique(end)) > 0  [splits]
    y[parts[0]].max()]  ->  y.max()]  [own]
tasks/recall.py
    SPLITS.index(split)]  ->  0]  [data]
own/table.py
    if names == [*map(str, range(len(names)))]:  ->  if False:  [table]
own/questions.py
    same = names[1:] == names[:-1]  ->  same = names[1:] != names[:-1]  [table]
    if smooth:  ->  if False:  [own_law]
    (whole & (different > 1)  ->  (whole & (different > 999)  [own_law]
    [constant & different]  ->  [constant & (values[0] > 9e99)]  [own_law]
    counts[first] * counts[second] <= 2 * len(frame)  ->  False  [own_law]
own/columns.py
    left_out = names.isin(names[left_out])  ->  pass  [own_law]
    times[indices], kind="stable"  ->  indices, kind="stable"  [table]
pretrain.py
    hidden & ~batch.samples.isnan().all(-1)  ->  hidden  [gaps]
    weight = there.shape[1] / there.sum(-1).clamp(min=1)  ->  weight = there.sum(-1) * 0 + 1  [gaps]
engine/targets.py
    len(train) / (task.classes * sizes)  ->  len(train) / sizes  [splits]
    np.bincount(train.labels(), m  ->  np.bincount(train.y, m  [splits]
    sizes.max() > UNEQUAL * sizes[sizes > 0].min()  ->  sizes.max() < UNEQUAL * sizes.min()  [splits]
    labels=classes, average  ->  average  [predict]
    / y.shape[1]  ->  nothing  [targets]
    / (y != IGNORE).sum(1).clamp(min=1)  ->  nothing  [targets]
finetune.py
    kind_of_target(task, train)  ->  kind_of_target(task, test)  [splits]
kernels.py
    (block <= 512 or q.is_cuda or  ->  (q.is_cuda or  [kernels]
baseline.py
    range(len(split)) if split.chosen is None else split.chosen  ->  range(len(split))  [baseline]
    recorded and identity.items() <= read_json(  ->  recorded and {} != read_json(  [baseline]
    np.bincount(y).argmax()  ->  np.bincount(y).argmin()  [baseline]
    columns += [y.amax(-1),  ->  columns += [y.mean(-1),  [baseline]
data.py
    nested[:max(task.classes, 1, int(labelled * n))]  ->  nested[:max(1, int(labelled * n))]  [own data]
    *codes, *map(files.sha256_of, yours)  ->  *codes  [own records]
    longest if self.chosen is None else longest[self.chosen]  ->  longest  [own data]
    if (path := files.ROOT / room  ->  if False and (path := files.ROOT / room  [data]
    8181, self.fresh, i  ->  8181, 0, i  [targets]
    np.random.RandomState(42).permutation(len(train))  ->  np.arange(len(train))  [data]
    if meta["inputs"]:  ->  if False:  [own]
engine/feed.py
    self.positions // (width * documents)  ->  self.positions // width  [runs]
    order(self.examples, args.seed, epoch)  ->  order(self.examples, args.seed, 0)  [runs]
    np.arange(step * args.batch, (step + 1) * args.batch)  ->  np.arange(args.batch)  [targets]
    size = most // 2  ->  size = most  [records]
engine/run.py
    [args.seed, step, self.processes.rank]  ->  [args.seed, step]  [runs]
    guide(self.model, step  ->  guide(self.model, 0  [runs]
    self.config |= self.folder.began  ->  pass  [records]
    if score >= self.state["best"]:  ->  if score > self.state["best"]:  [runs]
    (loss * self.processes.world).backward()  ->  loss.backward()  [runs]
    self.seconds_before + time.perf_counter()  ->  time.perf_counter()  [records]
engine/graph.py
    targets=part.targets.masked_fill(without, missing)  ->  targets=part.targets  [gpu]
    torch.cat((hidden, free - n))  ->  torch.cat((hidden, free))  [gpu]
engine/folder.py
    if before and now and before != now:  ->  if False:  [records]
    for name in sorted((saved.keys() | config.keys()) - free):  ->  for name in ():  [records]
    files.without_comments(path.read_text(encoding="utf-8"))  ->  path.read_text()  [records]
    config["code"] not in saved["code"].split("+")  ->  False  [records]
    right[np.argsort(y, kind="stable")]  ->  right  [statistics predict]
use/export.py
    x = x.masked_fill(padding[..., None] if self.samples else padding, PAD)  ->  pass  [predict]
    low + (outputs.double() + 1) / 2  ->  low + (outputs + 1) / 2  [predict]
use/label.py
    if ids is not None:  ->  if False:  [splits]
    if task.data != trained.saved["data"]:  ->  if False:  [predict]
    f1_score(y, predictions, labels=np.unique(y),  ->  f1_score(y, predictions,  [predict]
    & ~of_number.index.duplicated(keep=False)  ->  nothing  [predict]
use/trained.py
    enabled=self.dtype == "bfloat16"  ->  enabled=False  [predict]
    np.argsort(order)]  ->  order]  [targets predict]
files.py
    getattr(next(iter(error.args), None), "reason", error)  ->  error  [sources]
compare/runs.py
    twice = run.start == "joint" and objective and objective.hides  ->  twice = run.start == "joint"  [records]
    else [init.resolve(), beside]  ->  else [beside]  [records compare]
    if len(checksums) < 2:  ->  if True:  [records]
    if not any_code:  ->  if False:  [records]
    * record.get("processes", 1)  ->  nothing  [records]
    if not balanced:  ->  if True:  [statistics made_tables]
    (numerators - ratio * denominators) / max(denominators.mean(), 1e-300)  ->  (numerators - ratio * denominators)  [made_tables]
    variant.drop_duplicates("seed")  ->  variant  [compare]
    seconds += first.record  ->  seconds += 0 * first.record  [made_tables]
compare/statistics.py
    len(sample), len(sample) - 1)  ->  len(sample), len(sample))  [made_tables]
    (np.square(difference).sum() + unit)  ->  np.square(difference).sum()  [made_tables]
    variance -= sum(side.var(0, ddof=1)  ->  variance -= 0 * sum(side.var(0, ddof=1)  [made_tables]
    len(sizes) == 1 and all(  ->  len(sizes) == 1 and any(  [made_tables]
    / len(runs[0]) * t_interval  ->  * t_interval  [made_tables]
    math.hypot(half_width(variant.score), half_width_of_test(variant))  ->  half_width(variant.score)  [made_tables]
    if len(self.points) > 1 else 0.0  ->  nothing  [made_tables]
    sorted({*after.index} & {*before.index})  ->  sorted(after.index)  [made_tables]
compare/settings.py
    tries = [(True, True), (True, False), *tries]  ->  pass  [compare]
    if {*row.runs.index} != {*before.runs.index}:  ->  if False:  [made_tables]
    return len(row.runs), statistics.mean_of(row.runs.val)  ->  return statistics.mean_of(row.runs.val)  [made_tables]
    mean_of(row.runs.val)  ->  mean_of(row.runs.score)  [made_tables]
    if not other.changed.get("freeze")  ->  nothing  [compare]
    name not in FIELDS and other.changed  ->  other.changed  [made_tables]
compare/comparisons.py
    balanced = ratio > UNEQUAL and len(counts) == len(records)  ->  balanced = ratio > UNEQUAL  [report]
    ratio > UNEQUAL and  ->  nothing  [made_tables]
    changed.pop("label_fraction", None) or 1  ->  1  [made_tables]
    / np.maximum(labels + predicted, 1)  ->  / np.maximum(labels, 1)  [made_tables]
    2 * share / (1 + share) / classes  ->  2 * share / (1 + share)  [made_tables]
    score = 100 / classes  ->  score = 50  [made_tables]
compare/verdict.py
    "tied" if len(tied) > 1 else "chosen"  ->  "chosen"  [made_tables]
    round(mean_of(runs.val), 9)  ->  round(mean_of(runs.score), 9)  [made_tables]
    and "mask" not in record["changed"]  ->  nothing  [made_tables]
    max(late) > max(early)  ->  max(late) < max(early)  [made_tables]
    if len(runs) == 1 or runs.examples  ->  if runs.examples  [made_tables]
    if 0 < gained.half < abs(mean) and  ->  if gained.seeds < abs(mean) and  [baseline report]
    max(98, 100 - 200 / comparison.test_examples)  ->  98  [made_tables]
    <= constant + noise for  ->  <= constant for  [made_tables]
compare/report.py
    key=lambda run: run.val  ->  key=lambda run: run.score  [report]
    constant_of(comparison))  ->  comparison.linear)  [made_tables]
engine/setup.py
    if few and examples < args.batch:  ->  if False:  [own runs]
    fresh=args.seed if  ->  fresh=0 if  [targets]
    getattr(args, "label_fraction", None), lab  ->  None, lab  [targets]
    args.pretraining["data"] != task.data  ->  False  [records]
    raise AttributeError(f"settings  ->  print(f"settings  [records]
engine/flags.py
    if args.start not in starts and  ->  if False and  [records]
    recipe["epochs"] = recipe["eval_every"] = None  ->  pass  [records]
    if name not in asked}  ->  }  [records]
    if not in_parts or args.arch.get("norm") != "batch":  ->  if True:  [records]
experiments/running.py
    "data.py", "--task", task, *raw, *switches, *values]  ->  "data.py", "--task", task]  [experiments]
    few = ["--label-fraction", f"{share:g}"] if share else []  ->  few = []  [experiments]
    sentence = price([*itertools.chain(*plan.chains.values())])  ->  sentence = price([])  [experiments]
    , args.class_weights  ->  nothing  [experiments]
experiments/pool.py
    [names[int(number)] for number in  ->  [str(number) for number in  [experiments]
    return len(gpus) or cores  ->  return cores  [experiments]
experiments/entries.py
    weights and "--class-weights"  ->  None  [experiments]
    passes // 2  ->  passes  [experiments]
experiments/commands.py
    (subject, machine, run.flags)  ->  (subject, run.flags, machine)  [experiments]
experiments/sweep.py
    or (choice.stage, choice.flag) == ("finetune", "train_fraction")  ->  nothing  [experiments]
    values["freeze"] = ""  ->  pass  [experiments]
    key=lambda choice: choice.stage != ""  ->  key=lambda choice: 0  [experiments]
"""


def parsed(text):
    """Return [(file, line as it is, as it is changed, test files)] of the table."""
    mutants, file = [], None
    for line in text.strip().splitlines():
        if not line.startswith(" "):
            file = line
            continue
        old, new, tests = re.fullmatch(r" +(.+?)  ->  (.+)  \[(.+)\]", line).groups()
        mutants.append((file, old, "" if new == "nothing" else new, tests))
    return mutants


def pattern(code):
    """Return a pattern of a piece of code, however the formatter breaks its lines."""
    return re.compile(r"\s*".join(map(re.escape, re.sub(r"\s", "", code))))


def tested(copy, *words):
    """Run tests in a copy -> whether they pass, and the name of the first that fails."""
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-rfE", *words]
    done = subprocess.run(
        words,
        cwd=copy,
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", done.stdout, re.M)
    if done.returncode and not failed:
        raise SystemExit(f"pytest fails: {done.stdout[-500:]}{done.stderr[-500:]}")
    return done.returncode == 0, failed and failed[1]


def survives(copy, file, old, new, tests):
    """Return whether tests pass in a copy with a changed line, and the test that fails."""
    path = copy / file
    source = path.read_text()
    path.write_text(pattern(old).sub(lambda match: new, source, count=1))
    alive, by = tested(copy, *(f"tests/test_{name}.py" for name in tests.split()))
    path.write_text(source)
    if not alive and not tested(copy, by)[0]:
        raise SystemExit(f"{by} fails without a mutant, too")
    return alive, by


def main():
    word = sys.argv[1] if sys.argv[1:] else ""
    chosen = [mutant for mutant in parsed(MUTANTS) if word in mutant[0]]
    for file, old, *_ in chosen:
        assert pattern(old).search((ROOT / file).read_text()), (
            f"{file} has no {old!r} any more: write the mutant anew"
        )
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as threads:
        free = []
        for i in range(os.cpu_count()):
            for name in files:
                (Path(folder, str(i), name).parent).mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, Path(folder, str(i), name))
            free.append(Path(folder, str(i)))

        def run(mutant):
            copy = free.pop()
            try:
                return survives(copy, *mutant)
            finally:
                free.append(copy)

        survived = 0
        for (file, old, new, _), (alive, by) in zip(chosen, threads.map(run, chosen)):
            survived += alive
            print(
                f"{'SURVIVES' if alive else 'caught'}  {file}: {old.strip()}  ->  "
                f"{new.strip() or 'nothing'}"
                f"{'' if alive else f'  ({by})'}",
                flush=True,
            )
    print(f"{len(chosen) - survived} of {len(chosen)} mutants are caught")
    raise SystemExit(survived > 0)


if __name__ == "__main__":
    main()
