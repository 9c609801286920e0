"""Trains what a table or figure needs, many runs side by side, and ends with that table or figure.

    bash run_all.sh demo             {Transformer, S4} x {scratch, SPT} on scaled-down Pathfinder, 3 seeds, on a laptop
    bash run_all.sh demo-text        {rotary Transformer, S4} x {scratch, SPT} on real film reviews; downloads IMDb
    bash run_all.sh text256          the same with twice the text, all reviews and three times the steps
    bash run_all.sh demo-init        {S4, DLR} x {own start, random start} x {scratch, SPT} on the reviews of demo-text
    bash run_all.sh architectures    every model x {scratch, SPT} on the reviews of demo-text
        Beside the models of each of these: one answer for all, and a linear model that takes seconds (baseline.py)
    bash run_all.sh own --tasks file:my.npz      your own data (or ucr:NAME): {rotary Transformer, S4} x {scratch, SPT,
        joint training} at equal passes, beside a linear model; with --label-fraction 0.05, --regression, --models
        s4,mega, --arms spt,probe, --passes 600 (shortens)
    bash run_all.sh sweep --tasks text_demo --models rotary --vary lr=1e-3,3e-3 --vary arch.d=32,64  every combination,
        from scratch and self-pretrained, as one table; with --arms scratch,spt,joint,probe (probe: after SPT the head
        alone is trained); --select val: test scores of what validation chooses alone. A flag holds for every stage
        that has it; pretrain.lr, finetune.lr: for that stage only
    bash run_all.sh findings1        .. findings11: the questions of results/findings.md, on these tasks and Image;
        findings0, findings12: the trials by which their settings were chosen
    bash run_all.sh table2           the paper's: table1 table2 table3 table7 table8 table9 figure1 .. figure5 all

    --preset mini                    the paper's tables and figures at small scale: short stand-in tasks on 2 CPU cores
    --list                           prints the commands instead, one chain a line, for any scheduler
    --seeds 0,1,2 --tasks text,image --models s4,rotary     only these (default: three seeds of all; findings4: ten,
                                     findings5, 8, 10 and 11: five, 0, 9 and 12: one). Demos, own and sweep
                                     take any model
    --gpus 0,1,2,3                   one chain at a time on each of these GPUs
    --raw DIR                        prepares the data from official files that you have in DIR

What each of them trains stands in experiments.py. Rerunning skips finished runs and resumes started ones. `python
analyze.py status RUNS` shows what runs. Environment: JOBS=runs side by side (default: CPU cores, or GPUs)  RUNS=folder
of the runs
"""
import quiet  # noqa: F401, first

import argparse
import contextlib
import itertools
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

import torch

import experiments
from analyze import newest
from data import TASKS, Parser, UserError, declared, folder_name, full_name, locked
from models import MODELS, Backbone, config
from pretrain import OBJECTIVES
from recipes import arch, recipe_line
from run import MACHINE_FLAGS, flags, guarded

ROOT = Path(__file__).resolve().parent


# ---- Which runs ------------------------------------------------------------------------------------------------------

def numbers(text):
    if not re.fullmatch(r"\d{1,18}(,\d{1,18})*", text, re.ASCII):              # a seed has 63 bits
        raise argparse.ArgumentTypeError(f"must be numbers of at most 18 digits, got {text!r}")
    return text.split(",")


def words(text):
    if not (found := [word for word in text.split(",") if word]):
        raise argparse.ArgumentTypeError(f"must be words separated by commas, got {text!r}")
    return found


def share(text):
    if not re.fullmatch(r"0?\.0*[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, got {text!r}")
    return f"{float(text):g}"


def even(text):
    if not re.fullmatch(r"\d*[02468]", text) or int(text) < 2:
        raise argparse.ArgumentTypeError(f"must be an even number, half of which pretrains, got {text!r}")
    return int(text)


OWN_FLAGS = "regression", "symbols", "samples", "group"          # of data.py: how your own data are read
OF_TARGETS = dict.fromkeys((*OWN_FLAGS, "arms"), ["own", "sweep"]) | {
    "label_fraction": ["own"], "passes": ["own"], "vary": ["sweep"], "select": ["sweep"]}


def parse_args(argv):
    parser = Parser(description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                    usage="bash run_all.sh TARGET [flags]", add_help=False)
    add = parser.add_argument
    add("target", nargs="?", default="")
    add("--help", "-h", action="store_true")
    add("--list", action="store_true")
    for name in OWN_FLAGS[:3]:
        add(f"--{name}", action="store_true")
    add("--group", type=Path)
    add("--preset", default="paper")
    add("--raw", type=Path)
    for name, kind in (("seeds", numbers), ("gpus", numbers), ("tasks", words), ("models", words),
                       ("label-fraction", share), ("passes", even)):
        add(f"--{name}", type=kind)
    add("--vary", action="append", default=[])
    add("--arms", type=words)
    add("--select", choices=["val"])
    args = parser.parse_args(argv)
    if args.help:
        print(__doc__)
        raise SystemExit(0)
    for name, theirs in OF_TARGETS.items():
        if getattr(args, name) and args.target not in theirs:
            raise UserError(f"--{name.replace('_', '-')} is for: run_all.sh {' or '.join(theirs)}")
    return args


def settings(varied):
    """['lr=1e-3,3e-3', 'arch.d=32,64'] -> every combination, [[(flag, value)]]. UserError for what no stage knows."""
    known, found = known_flags(), {}
    names = " ".join(sorted(name.replace("_", "-") for name in set().union(*known.values())))
    for text in varied:
        name, _, values = text.partition("=")
        only, _, rest = name.partition(".") if name.split(".")[0] in known else ("", "", name)
        flag, _, key = rest.replace("_", "-").partition(".")
        stages = [stage for stage in ([only] if only else known) if flag.replace("-", "_") in known[stage]]
        if not values.strip(",") or name in found:
            raise UserError(f"--vary wants FLAG=VALUE,VALUE, each flag once; got {text}")
        if not stages or (flag == "arch") != bool(key):
            raise UserError(f"--vary {name}: no such flag; there is: {names}, of arch its keys, arch.d and the like")
        for value in words(values):            # a wrong one is said before anything is planned
            flags(stages[0], OBJECTIVES).parse_args([f"--{flag}", f"{key}={value}" if key else value])
        found[name] = [(name, value) for value in words(values)]
    return [*itertools.product(*found.values())]


def known_flags():
    """{stage: {flag by which a setting can differ: its default}}."""
    apart = MACHINE_FLAGS | {"task", "model", "seed", "init"}
    parsers = {stage: vars(flags(stage, OBJECTIVES).parse_args([])) for stage in ("pretrain", "finetune")}
    return {stage: {name: some[name] for name in some.keys() - apart} for stage, some in parsers.items()}


def check(chain):
    """UserError or SizeError where a flag or size of these commands is out of bounds."""
    task = None
    for command in chain:
        _, script, *given = shlex.split(command)
        args = flags(Path(script).stem, OBJECTIVES).parse_args(given)
        task = task or TASKS.get(args.task)    # the second stage's is that of the first; your own is not prepared yet
        if args.arch:
            sizes = arch(args.task, args.model, **args.arch)
            if task:
                with torch.device("meta"):     # builds the model without its numbers
                    Backbone(config(sizes, task))
        if args.objective and args.mask is not None and not OBJECTIVES[args.objective].hides:
            raise UserError(f"--mask {args.mask} has no meaning with --objective {args.objective}; sweep them apart")
        if args.batch and task and args.batch > task.sizes[0]:
            raise UserError(f"--batch {args.batch} is more than the {task.sizes[0]:,} training examples there are")


def can_pretrain(task, model):
    """Whether there is such a model, with a recipe for both stages."""
    with contextlib.suppress(UserError):
        return model in MODELS and recipe_line(task, declared(full_name(task)), model, None, "pretrain") is not None
    return False


def plan(args):
    """The rows that a target trains, its seeds, and the folder of its runs."""
    target, models = args.target, " ".join(args.models or ())
    papers, questions = experiments.paper(), experiments.questions()
    number = int(target[8:]) if re.fullmatch(r"findings\d+", target) else None
    if target not in (*experiments.DEMOS, "own", "sweep", *papers) and number not in questions:
        raise UserError(f"no target '{target}'; there is: {' '.join(experiments.DEMOS)} own sweep findings0 .. "
                        f"findings{max(questions)} {' '.join(papers)}")
    if args.preset not in ("paper", "mini"):
        raise UserError(f"no preset '{args.preset}'; there is: paper mini")
    seeds = args.seeds or [*map(str, questions[number].seeds if number is not None else range(3))]
    if target in ("own", "sweep"):
        if not args.tasks or target == "sweep" and not models:
            raise UserError("own wants --tasks file:PATH or --tasks ucr:NAME" if target == "own" else
                            "sweep wants --tasks and --models")
        args.tasks = [*map(full_name, args.tasks)]
        if target == "own" and (theirs := TASKS.keys() & {*args.tasks}):
            raise UserError(f"own wants --tasks file:PATH or --tasks ucr:NAME; got '{min(theirs)}'")
    tasks = args.tasks or [experiments.DEMOS.get(target, [""])[0]]
    if target in (*experiments.DEMOS, "own", "sweep"):
        for task, model in itertools.product(tasks, args.models or ()):
            if not can_pretrain(task, model):
                raise UserError(f"{target} has no model {model!r}")
    if unknown := [start for start in args.arms or () if start not in experiments.WAYS]:
        raise UserError(f"--arms {unknown[0]}: there is {' '.join(experiments.WAYS)}")
    if target == "own":
        ways = args.arms or experiments.WAYS[:3]
        entry = experiments.own(tasks[0], models, args.label_fraction, ways, args.passes)
        return entry, seeds, f"own/{folder_name(tasks[0])}"
    if target == "sweep":
        starts = args.arms or ["scratch", "spt"]
        return experiments.sweep(tasks, models.split(), settings(args.vary), starts, known_flags()), seeds, "sweep"
    if target in experiments.DEMOS:
        entry, folder = experiments.demo(target, models), target
    elif number is not None:
        entry, folder = questions[number].rows, "findings"
    else:
        entry, folder = experiments.paper(args.preset)[target], args.preset
    for flag, field, wanted in (("tasks", "task", args.tasks), ("models", "model", args.models)):
        for word in wanted or ():
            if not any(getattr(row, field).removesuffix("_mini") == word.removesuffix("_mini") for row in entry):
                raise UserError(f"no chain of {target} is for --{flag} {word}")
    wanted = [{word.removesuffix("_mini") for word in some or ()} for some in (args.tasks, args.models)]
    entry = [row for row in entry if (not wanted[0] or row.task.removesuffix("_mini") in wanted[0])
             and (not wanted[1] or row.model in wanted[1])]
    return entry, seeds, folder


# ---- Running them ----------------------------------------------------------------------------------------------------

class Pool:
    """Chains side by side, one a slot. Where there are GPUs, each slot has its own."""

    def __init__(self, jobs, gpus, folder):
        self.folder, self.running, self.slots, self.stopped, self.failed = folder, set(), [], False, False
        # On CPUs: one thread a run, and glibc keeps freed memory, whose return to the system takes up to a tenth of
        # the time.
        ours = {} if gpus else dict(OMP_NUM_THREADS="1", MALLOC_TRIM_THRESHOLD_=str(2**30),
                                    MALLOC_MMAP_THRESHOLD_=str(2**30)) | os.environ
        self.environments = [os.environ | ours | (dict(CUDA_VISIBLE_DEVICES=gpus[i % len(gpus)]) if gpus else {})
                             for i in range(jobs)]

    def run(self, chains, meanwhile):
        """meanwhile(): called twice a second until all are done."""
        waiting = deque(chains)
        slots = self.slots = [threading.Thread(target=self.work, args=(waiting, environment), daemon=True)
                 for environment in self.environments]
        for slot in slots:
            slot.start()
        while any(slot.is_alive() for slot in slots):
            slots[0].join(0.5) if slots[0].is_alive() else time.sleep(0.5)
            meanwhile()

    def work(self, waiting, environment):
        while not self.stopped:
            try:
                chain = waiting.popleft()
            except IndexError:
                return
            name = Path(shlex.split(chain[-1])[-1]).name
            path, last = self.folder / "output" / f"{name}.txt", ""
            try:
                with open(path, "w") as output:
                    if all(self.call(command, output, environment) == 0 for command in chain):
                        continue
                last = f"{path} ends with: {(path.read_text(errors='replace').strip().splitlines() or [''])[-1]}"
            except OSError as error:                             # no space, no python
                last = str(error)
            if not self.stopped:
                self.failed = True
                print(f"error: {name} did not finish; {last}", file=sys.stderr, flush=True)

    def call(self, command, output, environment):
        if self.stopped:
            return 1
        # A session of its own: Ctrl-C in the terminal reaches this process alone, which then stops them all.
        process = subprocess.Popen(shlex.split(command), stdout=output, stderr=subprocess.STDOUT, env=environment,
                                   start_new_session=True)
        self.running.add(process)
        if self.stopped:                       # while it was started
            end(process)
        code = process.wait()
        self.running.discard(process)
        return code

    def stop(self):
        self.stopped = True
        for process in [*self.running]:
            end(process)
        for slot in self.slots:                # one may be starting a process just now
            slot.join(5)


def end(process):
    with contextlib.suppress(OSError):         # it has ended
        os.killpg(process.pid, signal.SIGTERM) if hasattr(os, "killpg") else process.terminate()


def outs_of(chain):
    """The run directories of a chain."""
    return re.findall(r"--out (\S+)", " ".join(chain))


def forecast(by_seed, jobs):
    """Minutes for these chains, {seed: chains}, by the first timed steps from scratch, or of pretraining where nothing
    is trained from scratch; None before there are enough. SPT has as many, in two stages. Evaluations and test take
    some 15 % more."""
    def what(out):                             # task, model and setting
        return re.sub(r"(-pre-.*)?(-probe)?-(pretrain|scratch|spt|joint)-s\d+$", "", out)

    seconds, seeds, kinds = {}, [], set()
    outs = {seed: [*map(outs_of, chains)] for seed, chains in by_seed.items()}
    alone = {what(some[0]) for some in itertools.chain(*outs.values()) if len(some) == 1}
    for some in itertools.chain(*outs.values()):
        last = newest(Path(some[0]))
        kinds.add(what(some[-1]))
        if (len(some) == 1 or what(some[-1]) not in alone) and last.get("step", 0) >= 200:    # the first 100 are slower
            seconds[what(some[-1])] = 1.15 * len(some) * last["total"] * last["ms_per_step"] / 1000
    if len(seconds) < min(jobs, len(kinds)):
        return None
    for chains in outs.values():
        times = [seconds.get(what(some[-1]), max(seconds.values())) / len(some) * sum(
            not Path(out, "result.json").exists() for out in some) for some in chains]
        seeds.append(max(sum(times) / jobs, max(times)))
    return math.ceil(sum(seeds) / 60)


def reading(args):
    """The flags of data.py that say how your own data are read."""
    flags = [f"--{name}" for name in OWN_FLAGS[:3] if getattr(args, name)]
    return flags + (["--group", str(args.group)] if args.group else [])


def prepare(task, args, quiet=False):
    """data.py's exit code. Quiet: of a second's work only what goes wrong."""
    raw = ["--raw", str(args.raw)] if args.raw and task not in ("pathfinder_demo", "listops_demo") else []
    done = subprocess.run(["python", "data.py", "--task", task, *raw, *reading(args)], text=True,
                          **dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT) if quiet else {})
    if quiet and done.returncode:
        print((done.stdout.splitlines() or [""])[-1], file=sys.stderr)
    return done.returncode


def taken(folder):
    """Makes the folder of the runs -> its lock."""
    try:
        (folder / "output").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None
    return locked(folder / ".lock", f"another run_all.sh works on {folder}", wait=False)


def linear_command(args, entry, folder):
    """The command that fits a linear model to the one task of a demo or of your own data, in seconds; none for what has
    no such row."""
    if args.target not in (*experiments.DEMOS, "own"):
        return []
    task, share = entry[0].task, args.label_fraction
    name = "-".join(filter(None, (folder_name(task), share and f"l{share}", "baseline")))
    return ["python", "baseline.py", "--task", task, *(["--label-fraction", share] if share else []),
            "--out", (folder / name).as_posix()]


def train(args, entry, seeds, folder):
    """Data, then all chains, then the table: of demos and the like after every seed. -> exit code"""
    often, started, failed, lacking = args.target in (*experiments.DEMOS, "own", "sweep"), time.time(), False, set()
    tasks = sorted({row.task for row in entry})
    for task in tasks:                         # one's own first: a mistake there shows before there is a folder
        if ":" in task and (code := prepare(task, args)):
            return code
    lock = taken(folder)                       # to the end
    for task in tasks:
        if ":" not in task and (code := prepare(task, args, quiet=args.target == "demo")):
            if code in (130, -signal.SIGINT):
                return 130
            print(f"error: no data for {task}; its runs are left out", file=sys.stderr)
            lacking.add(task)
    entry = [row for row in entry if row.task not in lacking]
    if not entry:
        print("error: nothing is left to run", file=sys.stderr)
        return 1
    if (command := linear_command(args, entry, folder)) and subprocess.run(command).returncode:
        print("warning: there is no linear model to compare with", file=sys.stderr)
    by_seed = {seed: experiments.chains(entry, seed, folder.as_posix()) for seed in seeds}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    jobs = int(os.environ.get("JOBS") or (len(args.gpus) if args.gpus else cores))
    pool, told = Pool(jobs, args.gpus, folder), not often

    def tell():
        nonlocal told
        if not told and (minutes := forecast(by_seed, jobs)) is not None:
            told = True
            print(f"about {minutes} minutes here, by the time of the first steps", flush=True)

    def stop(number, _):
        pool.stop()
        raise SystemExit(128 + number)

    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
        number = getattr(signal, name, None)
        if number and signal.getsignal(number) != signal.SIG_IGN:          # nohup ignores SIGHUP, and so do we
            signal.signal(number, stop)
    if often:
        for seed, chains in by_seed.items():
            pool.run(chains, tell)
            failed |= show(args, folder, by_seed, last=seed == seeds[-1])
    else:
        print(f"{jobs} chains run side by side; the output of each goes to {folder}/output/", flush=True)
        pool.run([*itertools.chain(*by_seed.values())], tell)
        failed |= show(args, folder, by_seed)
    del lock
    print(f"{args.target} took {(time.time() - started) // 60:.0f} minutes")
    if failed or lacking or pool.failed:
        print("error: some runs are missing; the same command again makes them", file=sys.stderr)
        return 1
    return 0


def show(args, folder, by_seed, last=True):
    """The table or figure of what is finished -> whether it failed. Validation chooses once, when all are there."""
    runs, figure, target = ["--runs", folder.as_posix()], ["--figure", str(folder / f"{args.target}.png")], args.target
    if target.startswith("findings"):
        words = ["results/findings/tables.py", target[8:], *runs]
    elif target in experiments.DEMOS:
        words = ["analyze.py", "demo", target, *runs, *figure]
    elif target == "own":
        words = ["analyze.py", "own", *runs, *figure]
    elif target == "sweep":
        if args.select and not last:
            return False
        select = ["--select", args.select] if args.select else []
        outs = [out for chains in by_seed.values() for chain in chains for out in outs_of(chain)]
        done = [out for out in outs if "-pretrain-s" not in out and Path(out, "result.json").exists()]
        words = ["analyze.py", "compare", *done, *figure, *select] if done else ["analyze.py", "compare", str(folder)]
    else:
        words = ["analyze.py", *re.fullmatch(r"([a-z]+)(\d*)", target).groups(), "--preset", args.preset, *runs]
    return subprocess.run(["python", *filter(None, words)]).returncode != 0


def main(argv=None):
    args = parse_args(argv)
    # Of own, one set after another, each with a folder and a table of its own.
    sets = [argparse.Namespace(**vars(args) | {"tasks": [task]}) for task in args.tasks] if (
        args.target == "own" and args.tasks) else [args]
    plans = [(one, *plan(one)) for one in sets]                  # mistakes in any of them are said before the first
    for one in sets:
        one.raw, one.group = (path and path.resolve() for path in (args.raw, args.group))
    os.chdir(ROOT)
    codes = []
    for one, *rest in plans:
        codes.append(carry_out(one, *rest))
        if codes[-1] == 130 or codes[-1] < 0:                    # stopped
            break
    return next(filter(None, codes), 0)


def carry_out(args, entry, seeds, folder):
    """Trains an entry, or prints its commands -> exit code."""
    folder, jobs = Path(os.environ.get("RUNS") or Path("runs", folder)), os.environ.get("JOBS") or "1"
    if not re.fullmatch(r"[1-9]\d{0,3}", jobs):
        raise UserError(f"JOBS must be a number of runs side by side, got '{jobs}'")
    if not re.fullmatch(r"[\w./][\w./-]*", str(folder), re.ASCII):
        raise UserError(f"RUNS must consist of letters, digits, and . _ / -: '{folder}'")
    by_seed = {seed: experiments.chains(entry, seed, folder.as_posix()) for seed in seeds}
    if args.target == "sweep":
        for chain in by_seed[seeds[0]]:
            check(chain)
    if not args.list:
        return train(args, entry, seeds, folder)
    more = [*(["--raw", str(args.raw)] if args.raw else []), *reading(args)]
    command = linear_command(args, entry, folder)
    for chain in [*([[shlex.join(command)]] if command else []), *itertools.chain(*by_seed.values())]:
        # Elsewhere, a chain must know how its data are to be read.
        own = {row.task for row in entry if ":" in row.task and shlex.quote(row.task) in chain[0]}
        print(" && ".join([*(shlex.join(["python", "data.py", "--task", task, *more]) for task in own), *chain]))
    return 0


if __name__ == "__main__":
    guarded(main)
