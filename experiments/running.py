"""Train all runs of a table or figure side by side, then print the table and draw the figure.

    bash run_all.sh demo         {Transformer, S4} x {scratch, SPT} on small Pathfinder images
    bash run_all.sh demo-text    {rotary Transformer, S4} x {scratch, SPT} on IMDb, 127 characters
    bash run_all.sh text256      the same with 255 characters, all training reviews, 3 x the steps
    bash run_all.sh demo-init    {S4, DLR} x {own, random initialisation} on the text of demo-text
    bash run_all.sh recall       {Transformer, S4, Mamba, LSTM} on associative recall (MQAR)
        All five also show the majority class and a linear model (baseline.py)
    bash run_all.sh own --tasks file:my.npz      your data (or ucr:NAME): {rotary Transformer, S4} x
        {scratch, SPT, joint training} at equal passes, beside a linear model. Also:
        --label-fraction 0.05, --regression, --models s4,mega, --starts spt,linear_probe,
        --passes 600 (shortens), --class-weights (rare classes weigh more); how to read the file:
        flags of data.py
    bash run_all.sh sweep --tasks text_demo --models rotary --vary lr=1e-3,3e-3 --vary arch.d=32,64
        every combination, from scratch and self-pretrained, as one table. Also:
        --starts scratch,spt,joint,linear_probe; --select val: show test scores only of the settings
        that validation chose; --any-code: pool seeds trained by different code. A flag applies to
        every stage that has it; pretrain.lr, finetune.lr: to that stage only
    bash run_all.sh table2       the paper's: table1 table2 table3 table7 table8 table9 figure1 ..
                                 figure5 all

    --preset mini                the paper's at small scale: short stand-in tasks on 2 CPU cores
    --list                       print the commands, one chain of runs per line, for any scheduler
    --seeds 0,1,2 --tasks text,image --models s4,rotary      only these (default: three seeds,
                                 everything). Demos, own and sweep take any model
    --gpus 0,1,2,3               run on these of the visible GPUs (default: all), one chain at a
                                 time per GPU
    --raw DIR                    prepare the data from official files in DIR
    --micro-batch 16 --compile --dtype float32      flags of every run

experiments/entries.py says what each target trains. Rerunning skips finished runs and resumes
stopped ones. `python analyze.py status RUNS` shows the state of the runs. Environment: JOBS=runs
side by side (default: CPU cores, or GPUs), RUNS=folder of the runs"""

import argparse
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

from data import look_up
from engine.flags import between
from engine.processes import guarded
from experiments import entries, sweep
from experiments.commands import chains, price
from experiments.pool import Pool, jobs_of, stop_on_signals, visible
from experiments.sweep import words
from files import ROOT, Parser, UserError, locked
from models import MODELS
from own.columns import COLUMNS
from tasks import TASKS, declared, folder_name, full_name

# ---- Which runs ----------------------------------------------------------------------------------


def numbers(text):
    """Split '0,1' into ['0', '1']."""
    if not re.fullmatch(r"\d{1,18}(,\d{1,18})*", text, re.ASCII):  # a seed has 63 bits
        raise argparse.ArgumentTypeError(f"must be numbers of at most 18 digits, got {text!r}")
    return text.split(",")


def task_names(text):
    """Split names of tasks at commas; of your data before file: and ucr:, as paths have commas."""
    return re.split(",(?=file:|ucr:)", text) if re.match("file:|ucr:", text) else words(text)


# Flags of data.py that say how to read your data, without and with a value.
OWN_FLAGS = ["regression", "symbols", "samples", "no-header", "channels-first", "channels-last"]
OWN_FLAGS += ["label-per-position"]


def parse_args(argv):
    parser = Parser(examples=True, allow_abbrev=False)
    parser.format_help = lambda: __doc__
    targets = {}  # {flag: those that it is for; () if for all}

    def add(name, kind, *only, **more):
        if kind is bool:
            more["action"] = "store_true"
        else:
            more["type" if callable(kind) else "choices"] = kind
        targets[parser.add_argument(name, **more).dest] = only

    add("target", (*entries.DEMOS, "own", "sweep", *entries.paper()))
    add("--seeds", numbers, default=["0", "1", "2"])
    add("--tasks", task_names, default=[])
    add("--models", words, default=[])
    add("--preset", ("paper", "mini"), default="paper")
    add("--list", bool)
    add("--gpus", numbers)
    add("--raw", Path)
    add("--micro-batch", between(int, 1))
    add("--dtype", ("auto", "float32", "bfloat16"))
    add("--compile", bool)
    for name in OWN_FLAGS:
        add(f"--{name}", bool, "own", "sweep")
    for name in COLUMNS:
        add(f"--{name}", str, "own", "sweep")
    add("--starts", words, "own", "sweep", default=[])
    add("--passes", between(int, 2), "own")
    add("--label-fraction", between(float, 1e-9, 1), "own")
    add("--class-weights", bool, "own")
    add("--vary", str, "sweep", action="append", default=[])
    add("--select", ["val"], "sweep")
    add("--any-code", bool, "sweep")
    args = parser.parse_args(argv)
    for flag, only in targets.items():
        if only and getattr(args, flag) and args.target not in only:
            raise UserError(f"--{flag.replace('_', '-')} is for: run_all.sh {' or '.join(only)}")
    return args


def entry_of(args):
    """Return the rows that a target trains; own: those of one data set."""
    models = " ".join(args.models)
    for flag, choices in (("starts", entries.STARTS), ("models", MODELS)):
        for name in getattr(args, flag):
            if name not in choices:
                raise UserError(f"--{flag} {name}: choose from {' '.join(choices)}")
    if args.target == "own":
        if not args.tasks or TASKS.keys() & {*args.tasks}:
            raise UserError("own wants --tasks file:PATH or --tasks ucr:NAME")
        (task,) = args.tasks
        return entries.own(
            task, models, args.label_fraction, args.starts, args.passes, args.class_weights
        )
    if args.target == "sweep":
        if not (args.tasks and models):
            raise UserError("sweep wants --tasks and --models")
        settings = sweep.combinations(args.vary)
        return sweep.sweep(args.tasks, args.models, settings, args.starts or ["scratch", "spt"])
    if args.target in entries.DEMOS:
        return chosen(entries.demo(args.target, models), args)
    return chosen(entries.paper(args.preset)[args.target], args)


def chosen(entry, args):
    """Return the rows of an entry for --tasks and --models, which need no _mini."""
    for flag, field in (("tasks", "task"), ("models", "model")):
        names = [name.removesuffix("_mini") for name in getattr(args, flag)]
        present = {getattr(row, field).removesuffix("_mini") for row in entry}
        for name in names:
            if name not in present:
                raise UserError(f"no chain of {args.target} is for --{flag} {name}")
        if names:
            entry = [row for row in entry if getattr(row, field).removesuffix("_mini") in names]
    return entry


# What one call trains. folder: of its runs; chains: {seed: chains of commands}.
Plan = namedtuple("Plan", "args entry folder chains")


def plan_of(args, lacking=()):
    """Return the Plan of a target without tasks that lack data; own: of one data set."""
    entry = [row for row in entry_of(args) if row.task not in lacking]
    usual = args.target
    if args.target == "own":
        usual = f"own/{folder_name(args.tasks[0])}"
    elif args.target in entries.paper():
        usual = args.preset
    folder = Path(os.environ.get("RUNS") or Path("runs", usual))
    flags = {"micro_batch": args.micro_batch, "dtype": args.dtype}
    flags["compile"] = "" if args.compile else None  # "": a switch; None: left out
    machine = sweep.written(flags)
    by_seed = {seed: chains(entry, seed, folder.as_posix(), machine) for seed in args.seeds}
    return Plan(args, entry, folder, by_seed)


# ---- Running them --------------------------------------------------------------------------------


def data_command(task, args):
    """Return the command that prepares a task, with the flags that say how to read it."""
    raw = ["--raw", str(args.raw)] if args.raw and declared(task).source.raw else []
    given = vars(args)
    switches = [f"--{name}" for name in OWN_FLAGS if given[name.replace("-", "_")]]
    values = [f"--{name}={given[name]}" for name in COLUMNS if given[name] is not None]
    return ["python", "data.py", "--task", task, *raw, *switches, *values]


def linear_commands(plan):
    """Return the commands that fit linear models; [] but for demos and your data."""
    if plan.args.target not in (*entries.DEMOS, "own"):
        return []
    share = plan.args.label_fraction
    few = ["--label-fraction", f"{share:g}"] if share else []
    ending = f"-l{share:g}-baseline" if share else "-baseline"
    commands = []
    for task in dict.fromkeys(row.task for row in plan.entry):
        out = (plan.folder / f"{folder_name(task)}{ending}").as_posix()
        commands.append(["python", "baseline.py", "--task", task, *few, "--out", out])
    return commands


def prepare_all(plan):
    """Prepare the data of a plan. Return the tasks that have none."""
    lacking = set()
    for task in sorted({row.task for row in plan.entry}):
        code = subprocess.run(data_command(task, plan.args)).returncode
        if code in (130, -signal.SIGINT):
            raise KeyboardInterrupt
        if code:
            lacking.add(task)
            if not declared(task).own:
                print(f"error: no data for {task}; its runs are left out", file=sys.stderr)
        elif plan.args.target == "own" and look_up(task).labelled == 0:
            raise UserError(f"{task} has no labels, and own compares classifiers; see pretrain.py")
    return lacking


def train(plan):
    """Prepare data, run all chains and show the table. Return the exit code."""
    args, folder, started = plan.args, plan.folder, time.time()
    after_each_seed = args.target in (*entries.DEMOS, "own", "sweep")
    gpus = visible(args.gpus)
    jobs = jobs_of(gpus)
    lacking = prepare_all(plan)  # before the folder of the runs is made
    if lacking == {row.task for row in plan.entry}:
        return 2
    (folder / "output").mkdir(parents=True, exist_ok=True)
    # held until the end
    lock = locked(folder / ".lock", f"another run_all.sh works on {folder}", wait=False)
    if lacking:
        plan = plan_of(args, lacking)
    for command in linear_commands(plan):
        if subprocess.run(command).returncode:
            print("warning: the linear model failed; the table lacks it", file=sys.stderr)
    pool = Pool(jobs, gpus, folder)
    stop_on_signals(pool)
    if not after_each_seed:
        print(f"{pool.jobs} chains at a time; their output: {folder}/output/", flush=True)
    failed = False
    for seeds in pool.run(plan.chains):
        last = len(seeds) == len(plan.chains)
        if after_each_seed or last:
            failed = show(plan, seeds, last)
    del lock
    print(f"{args.target} took {(time.time() - started) / 60:.1f} minutes")
    if failed or lacking or pool.failed:
        print("error: some runs are missing; repeat the command to make them", file=sys.stderr)
        return 1
    return 0


def show(plan, seeds, last):
    """Print the table or draw the figure of the runs of these seeds, and return whether that
    failed. With --select, wait for the last seed: validation chooses once, from all runs."""
    args, folder, target = plan.args, plan.folder, plan.args.target
    if args.select and not last:
        return False
    figure = ["--figure", str(folder / f"{target}.png")]
    runs = ["--runs", folder.as_posix()]
    if not last:
        print(f"\nSo far, seeds {', '.join(seeds)}:", flush=True)
        runs += ["--seeds", ",".join(seeds)]
    if target in entries.DEMOS:
        command = ["demo", target, *runs, *figure]
    elif target == "own":
        command = ["own", *runs, *figure]
    elif target == "sweep":
        command = ["compare", *finished(plan, seeds), *figure]
        command += ["--any-code"] if args.any_code else []
        command += ["--select", args.select] if args.select else []
    else:
        kind, number = re.fullmatch(r"([a-z]+)(\d*)", target).groups()
        command = [kind, *filter(None, [number]), "--preset", args.preset, *runs]
    return subprocess.run(["python", "analyze.py", *command]).returncode != 0


def finished(plan, seeds):
    """Return the finished finetunings of a sweep. If there is none, return its folder."""
    chains = [chain for seed in seeds for chain in plan.chains[seed]]
    commands = [shlex.split(command) for chain in chains for command in chain]
    # a command ends with its --out
    outs = [command[-1] for command in commands if command[1] == "finetune.py"]
    return [out for out in outs if Path(out, "result.json").exists()] or [str(plan.folder)]


def print_commands(plan):
    """Print all commands, one chain per line, after those that prepare your data. So any machine
    can run a line."""
    own = {row.task for row in plan.entry if declared(row.task).own}
    linear = [[shlex.join(command)] for command in linear_commands(plan)]
    for chain in [*linear, *itertools.chain(*plan.chains.values())]:
        tasks = [task for task in own if shlex.quote(task) in chain[0]]
        print(" && ".join([*(shlex.join(data_command(task, plan.args)) for task in tasks), *chain]))


def main(argv=None):
    args = parse_args(argv)
    if args.target in ("own", "sweep"):
        args.tasks = [*map(full_name, args.tasks)]
    # absolute, because the commands run in the repository
    args.raw = args.raw and args.raw.resolve()
    calls = [args]
    if args.target == "own" and args.tasks:  # one data set after another, with its own table
        calls = [argparse.Namespace(**vars(args) | {"tasks": [task]}) for task in args.tasks]
    plans = [plan_of(call) for call in calls]  # reports mistakes before the first set starts
    os.chdir(ROOT)
    codes = []
    for plan in plans:
        if args.target in entries.paper() and args.preset == "paper":
            sentence = price([*itertools.chain(*plan.chains.values())])
            print(f"{args.target}: {sentence}", file=sys.stderr)
        if args.list:
            print_commands(plan)
            continue
        codes.append(train(plan))
    return next(filter(None, codes), 0)


if __name__ == "__main__":
    guarded(main)
