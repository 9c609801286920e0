"""Everything of a training run that is not the method: flags, processes, files, log, clock. A first reading skips it.

To understand a training loop, read `learning_rate`, and skip the rest. `arguments` fills in a stage's flags from the
recipe; `Run` is what both stages do around their loops, and what makes them resumable; `guarded` turns a user's mistake
into one line.
"""
import argparse
import contextlib
import ctypes
import datetime
import itertools
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten

import zoo                                     # noqa: F401, fills MODELS
from data import (TASKS, Parser, UserError, exit_code, folder_name, full_name, kept, locked, look_up, order, read_json,
                  reading, sha256_of, write_atomically, write_json)
from models import MODELS, SizeError, count, keys_of
from recipes import arch, assignments, fit, halved, recipe_line, settings
from zoo.gpu_attention import variable_length
from zoo.structured import guide


def learning_rate(step, steps, args):
    """Factor of every group's initial learning rate: linear warm-up, then constant, half a cosine down to 0, or steps:
    a half after each fifth of the run."""
    if step < args.warmup:
        return (step + 1) / args.warmup
    if args.schedule == "constant":
        return 1.0
    if args.schedule == "step":
        return 0.5 ** (5 * step // steps)
    return 0.5 * (1 + math.cos(math.pi * (step - args.warmup) / max(1, steps - args.warmup)))


# ---- flags -----------------------------------------------------------------------------------------------------------

def between(kind, low, high=math.inf):
    """Type of a flag: a number from low to high."""
    def check(text):
        value = kind(text)
        if not (low <= value <= high and math.isfinite(value)):
            bounds = f"at least {low:g}" if high > 2**62 else f"between {low:g} and {high:g}"
            raise argparse.ArgumentTypeError(f"must be {bounds}, got {text}")
        return value
    check.__name__ = kind.__name__             # which argparse names
    return check


def overrides(text):
    """'d=64,layers=3' -> {"d": 64, "layers": 3}."""
    try:
        return assignments(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def device(text):
    if text == "mps":
        raise argparse.ArgumentTypeError("Apple's GPU has no float64 and no complex128, which kernels need; use cpu")
    return text


def moved(run):
    raise argparse.ArgumentTypeError(f"generating has a script of its own: python predict.py {run}")


def flags(stage, objectives):
    """The parser of a stage, without a recipe's defaults."""
    positive, natural, rate = between(int, 1), between(int, 0, 2**63 - 1), between(float, 0)
    parser = Parser(description="With --task and --model, --help shows their recipe.", allow_abbrev=False,
                    add_help=False)
    add = parser.add_argument_group("what to run").add_argument
    add("-h", "--help", action="store_true", help="these lines, with the recipe and the sizes of a task and model")
    add("--task", help="one of: " + " ".join(TASKS) + " or your own data: file:PATH (.npz, .csv, .tsv, .ts), ucr:NAME")
    add("--model", help="one of: " + " ".join(MODELS))
    add("--objective", choices=objectives, help="masked: the model sees both sides; causal: only what came before, and "
        "predicts what comes next")
    add("--arch", type=overrides, metavar="KEY=VALUE,...", help="other sizes than in recipes.py: d=64,layers=3, say")
    add("--train-fraction", type=between(float, 1e-9, 1), help="share of the training examples to use; smaller shares "
        "lie within larger ones")
    add("--seed", type=natural, default=0, help="of weights, data order and hidden positions")
    add("--data-dir", default="data", help="where prepared data sets live")
    add("--out", type=Path, help="run directory (default: runs/TASK-MODEL-OBJECTIVE-STAGE-sSEED, and what differs from "
        "the recipe)")
    add("--resume", action="store_true", help="continue exactly where the run in --out was stopped")
    if stage == "finetune":
        add("--init", type=Path, help="pretraining run, which also gives task, model, sizes and training examples; "
            "default: from scratch, or from trained weights where --model has some")
        add("--joint", type=between(float, 1e-9), metavar="W", help="from scratch, with W times pretraining's loss on "
            "the same batch added in each step; half as many steps, since each has two passes")
        add("--freeze", action="store_true", help="train the head alone, on the backbone as it is: a linear probe")
        add("--label-fraction", type=between(float, 1e-9, 1), help="share of all training examples (whatever was "
            "pretrained on) to train with here; classes keep their shares, smaller shares lie within larger ones")
    add = parser.add_argument_group("recipe (your flags win)").add_argument
    add("--lr", type=rate, help="learning rate of all parameters but those that have their own")
    add("--wd", "--weight-decay", type=rate, help="AdamW weight decay")
    add("--batch", type=positive, help="examples (retrieval: pairs) per optimiser step, over all GPUs")
    add("--epochs", type=positive, help="length of the run, in epochs")
    add("--steps", type=positive, help="length of the run, in optimiser steps; wins over --epochs")
    add("--warmup", type=natural, help="steps of linear warm-up")
    add("--schedule", choices=("constant", "cosine", "step"), help="after warm-up; cosine reaches 0 at the end, step "
        "halves the rate after each fifth of the run")
    add("--eval-every", type=positive, help="steps between evaluations (default: an epoch)")
    add("--mask", type=between(float, 1e-6, 1), help="masking ratio: probability that a position is hidden")
    add("--loss", choices=("ce", "l1"), help="of hidden positions: cross-entropy over symbols or gray levels, or L1")
    if stage == "pretrain":
        add("--sample", type=moved, help=argparse.SUPPRESS)            # goes with the next release
    else:
        add("--pool", choices=("mean", "max", "last"), help="how the sequence becomes one vector")
        add("--head", choices=("linear", "mlp", "pair"), help="on that vector; mlp: one hidden layer; pair: for tasks "
            "with two documents an example")
    add = parser.add_argument_group("machine").add_argument
    add("--micro-batch", type=positive, help="examples per forward pass; halve it when memory runs out")
    add("--device", default="auto", type=device, choices=("auto", "cpu", "cuda"), help="auto: GPU if there is one")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16"),
        help="auto: bfloat16 autocast on a GPU that has it, else float32")
    add("--compile", action="store_true", help="torch.compile the backbone; on one GPU, where all sequences are "
        "equally long, also launch each step as one CUDA graph: 1.3 to 3.5 times as fast (results/gpu.md)")
    add("--log-every", type=positive, default=100, help="steps between log lines")
    return parser


MACHINE_FLAGS = {"help", "sample", "resume", "device", "dtype", "compile", "log_every", "out", "data_dir",
                 "fitted"}                                             # do not define the run
RECORDED = {"task", "model", "objective", "arch", "seed", "init", "joint"}       # by themselves, not among what changed


def arguments(stage, argv, objectives, inherit=None):
    """The flags of a stage, the rest filled in from the recipe. inherit(flags) -> {flag: value} that --init fixes. Also
    set: start (pretrain, spt, corpus, scratch or joint); arch, all sizes; recipe, the name of its line; fitted, what
    `fit` did; changed, {flag: value} of all that differs from it."""
    parser = flags(stage, objectives)
    args = parser.parse_args(argv)
    named = vars(args).keys() - MACHINE_FLAGS - RECORDED
    if args.help and None in (args.task, args.model) and not getattr(args, "init", None):
        parser.print_help()
        parser.exit()
    args.task = args.task and full_name(args.task)
    vars(args).update(inherit(args) if inherit else {"start": stage})
    for flag, value, known in (("task", args.task, TASKS), ("model", args.model, MODELS)):
        if value is None or flag == "model" and value not in known:
            problem = "is missing" if value is None else f"{value} is unknown"
            own = " file:PATH ucr:NAME" if flag == "task" else ""
            raise UserError(f"--{flag} {problem}; one of: {' '.join(known)}{own}")
    task, fitted, args.fitted = look_up(args.task, args.data_dir), {}, None
    args.recipe, args.objective, values = recipe_line(args.task, task, args.model, args.objective, args.start)
    hides = objectives[args.objective].hides
    if args.start == "joint" and hides:
        values = halved(values)
    if args.task not in TASKS:
        first = args.pretraining if args.start == "spt" else vars(args)
        examples = max(1, int(task.sizes[0] * (first["train_fraction"] or 1)))
        fitted, args.fitted = fit(task, examples, values, arch(args.task, args.model))
    unused = {"mask", "loss"} if args.start not in ("pretrain", "joint") else set() if hides else {"mask"}
    values = {flag: value for flag, value in values.items() if flag in vars(args) and flag not in unused}
    sizes = arch(args.task, args.model, **fitted)
    if sizes is None:
        raise UserError(f"--model {args.model} has no sizes for {args.task}")
    if args.start == "spt":
        keys = keys_of(args.model, args.arch.get("ffn", "dense"))
        args.arch = {name: value for name, value in args.arch.items() if name not in keys or keys[name].inherited}
    else:
        args.arch = arch(args.task, args.model, **fitted | (args.arch or {}))
    if args.help:
        print_recipe(parser, args, values)
    other_sizes = {key: value for key, value in args.arch.items() if sizes.get(key) != value}
    args.changed = {"arch": other_sizes} if other_sizes else {}
    for flag in sorted(named):                                         # a new flag, too
        if getattr(args, flag) not in (None, values.get(flag), parser.get_default(flag)):
            args.changed[flag] = getattr(args, flag)
    if args.start == "spt":                                            # changes to the pretraining are this run's too
        unfinished = {} if (args.init / "result.json").exists() else {"unfinished": True}
        if before := args.pretraining["changed"] | unfinished:
            args.changed["pretraining"] = before
    if "epochs" in args.changed:
        values.pop("steps", None)                                      # --epochs was asked for in place of steps
    for flag, value in values.items():
        if getattr(args, flag) is None:
            setattr(args, flag, value)
    check(args, task, hides)
    args.out = args.out or Path("runs") / run_name(args)
    return args


def print_recipe(parser, args, values):
    """--help of a task and model."""
    keys = keys_of(args.model, args.arch.get("ffn", "dense"))
    read = {name: value for name, value in args.arch.items() if name in keys}         # not a row's other columns
    recipe, sizes = (" ".join(f"{k}={v}" for k, v in some.items() if v is not None) for some in (values, read))
    rule = f" {args.fitted}." if args.fitted else ""
    parser.description = f"Recipe {args.recipe}: {recipe}. Sizes: {sizes}.{rule}"
    parser.print_help()
    parser.exit()


SHORT = {"train_fraction": "f", "label_fraction": "l", "pretraining": "pre", "arch": ""}         # in names of runs


def run_name(args):
    """TASK-MODEL-OBJECTIVE-START-sSEED, with all that differs from the recipe: the folder of a run without --out."""
    found = settings(args.changed) | ({"joint": args.joint} if args.start == "joint" and args.joint != 1 else {})
    sizes, words = "", ""
    for name, value in found.items():
        value = f"{value:g}" if isinstance(value, float) else str(value)
        if name.startswith("arch."):
            sizes += f"-{name.removeprefix('arch.')}={value}"
        else:
            parts = (SHORT.get(part, part.replace("_", "-")) for part in name.split("."))
            words += f"-{'-'.join(filter(None, parts))}{'' if value == 'True' else value}"
    name = f"{folder_name(args.task)}-{args.model}{sizes}-{args.objective}-{args.start}{words}-s{args.seed}"
    return re.sub(r"[^\w.=-]", "_", name)


def check(args, task, hides):
    """UserError for flags that do not fit each other or the task."""
    denoises = args.start in ("pretrain", "joint")
    for flag in ("mask", "loss"):
        if getattr(args, flag) is not None and not denoises:
            raise UserError(f"--{flag} {getattr(args, flag)} has no meaning without --joint")
    if not hides and args.mask is not None:
        raise UserError(f"--mask {args.mask} has no meaning with --objective {args.objective}")
    if args.start == "joint" and args.freeze:
        raise UserError("--freeze has no meaning with --joint, which trains the backbone")
    if denoises and args.loss == "l1" and task.channels is None:
        raise UserError(f"--loss l1 needs samples, and {args.task} consists of symbols; use --loss ce")
    if denoises and args.loss == "ce" and task.vocab is None:
        raise UserError(f"--loss ce needs symbols or gray levels, which {args.task} does not consist of; use --loss l1")
    if args.start != "pretrain" and (args.head == "pair") != (task.documents == 2):
        raise UserError(f"--head {args.head} does not fit {args.task}, where an example has {task.documents} document"
                        f"{'s; use --head pair' if task.documents > 1 else '; use --head linear or mlp'}")


# ---- the run ---------------------------------------------------------------------------------------------------------

def keep_memory():
    """Keeps freed memory for the next tensor. glibc gives it back to the system, which then clears it page by page: a
    third of a step of a small model on a CPU."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc, trim_threshold, mmap_threshold = ctypes.CDLL(None), -1, -3            # numbers of malloc.h
        libc.mallopt(mmap_threshold, 2**30) or libc.mallopt(mmap_threshold, 2**25)       # all that older ones allow
        libc.mallopt(trim_threshold, 2**31 - 1)


class Run:
    """All of a run that is not the method: processes, device, number format, run directory, log, clock, checkpoints.

    In a stage's main: Run(args), open, start, measured; in every step evaluates and evaluated, begin, exchange,
    backward, stepped; at the end load_best and finish. `state` is what a resumed run needs beyond weights and
    optimiser.
    """

    SAVE_SECONDS = 600                         # between evaluations, a checkpoint at least this often
    EARLY = 1, 2, 5, 10, 20, 50                # steps after which a line is printed, if not in the log
    positions = 4_096                          # of a part, about: results/speed.md; small batches stay whole
    EVALUATED = 2**17                          # positions of an evaluation batch on a GPU, at least
    COSTLY = 4                                 # times as many where each part costs something of its own, see `start`
    told = None                                # the signal that asked this process to stop
    asked = None                               # what all processes were asked last, by `stops`
    current = None                             # that of this process, for `guarded` to log what ended it

    def __init__(self, args):
        """Processes, device and number format."""
        self.args, environ = args, os.environ
        self.world, self.rank = int(environ.get("WORLD_SIZE", 1)), int(environ.get("RANK", 0))
        self.main = self.rank == 0
        if self.world > 1 and not {"RANK", "MASTER_ADDR"} <= environ.keys():
            raise UserError(f"WORLD_SIZE is {self.world}, but RANK or MASTER_ADDR is not set; start with torchrun")
        if args.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device cuda, but torch sees no CUDA device; use --device cpu")
        if self.world > args.batch:
            raise UserError(f"--batch {args.batch} is smaller than the number of processes, {self.world}")
        keep_memory()
        torch.set_flush_denormal(True)         # a CPU takes three times as long below 1e-38, where a softmax saturates
        cuda = args.device != "cpu" and torch.cuda.is_available()
        self.device = torch.device(f"cuda:{environ.get('LOCAL_RANK', 0)}" if cuda else "cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        if self.world > 1:
            dist.init_process_group("nccl" if cuda else "gloo", device_id=self.device if cuda else None)
        self.side = dist.new_group(backend="gloo") if self.world > 1 and cuda else None          # for `stops`
        # TF32, which some containers switch on, would make a kernel's error of 9e-7 one of 4e-4.
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        # Older GPUs emulate bfloat16, slowly and without fused attention.
        able = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
        self.bf16 = args.dtype == "bfloat16" or args.dtype == "auto" and able
        self.dtype = "bfloat16" if self.bf16 else "float32"
        self.say(f"device {self.device} x {self.world}; {self.dtype}; SSM kernels and convolutions always float32")

    def say(self, text):
        if self.main:
            print(text, flush=True)

    def open(self, task, train):
        """Sets the length of the run, for these training examples. Checks that the run directory is free or, with
        --resume, this run's. A finished run ends here. Nothing is written yet."""
        args, out, self.task, examples = self.args, self.args.out, kept(task), len(train)
        self.family = task.family
        # BatchNorm takes its statistics over the whole batch, or over each micro-batch as it stands.
        self.equal = train.lengths() is None
        self.lengths = None if args.arch.get("norm") == "batch" else train.lengths()
        few = getattr(args, "label_fraction", None) is not None or task.labelled is not None
        if few and examples < args.batch:
            args.batch = args.changed["batch"] = examples
            if self.world > examples:
                raise UserError(f"{examples} examples are fewer than the number of processes, {self.world}")
        if examples < args.batch:
            raise UserError(f"--batch {args.batch} is more than the {examples} training examples there are")
        # The last, incomplete batch of an epoch is left out. Each epoch has a new order, so no example is left out for
        # good.
        self.examples, self.per_epoch = examples, examples // args.batch
        self.steps = args.steps or args.epochs * self.per_epoch
        # On a small share of the data an epoch is a few steps, and validation would take most of the time.
        least = self.steps // 200 if few or args.train_fraction is not None else 1
        args.eval_every = args.eval_every or max(self.per_epoch, least)
        args.data = task.data
        if list(task.data["sizes"]) != list(task.sizes):
            args.changed["sizes"] = list(task.data["sizes"])

        there = {p.name for p in out.iterdir() if p.suffix != ".tmp"} - {".lock"} if out.is_dir() else set()
        if there and not args.resume:
            raise UserError(f"run directory {out} is not empty; add --resume to continue it, or choose another --out")
        if there and "config.json" not in there:
            raise UserError(f"--resume: {out} has no config.json; it is not a run directory")
        if there & {"last.pt", "result.json"}:
            saved, ours = read_json(out / "config.json"), self.config()
            for key in sorted((saved.keys() | ours.keys()) - {"changed", "recipe"}):
                if saved.get(key) != ours.get(key):
                    raise UserError(f"--resume: {out} was started with {key} = {saved.get(key)}, now {ours.get(key)}; "
                                    "give the same flags as before, or choose another --out")
        self.resumes = "last.pt" in there
        if self.world > 1:
            dist.barrier()                     # nobody writes before all have looked
        if "result.json" in there:
            read_json(out / "result.json", "task", "seed")
            self.say(f"{out} is finished; nothing to do")
            self.close()
            raise SystemExit(0)

    def config(self):
        """All that defines the run; saved in config.json and in each checkpoint."""
        return json.loads(json.dumps({k: v for k, v in vars(self.args).items() if k not in MACHINE_FLAGS}, default=str))

    def start(self, model, optimizer):
        """Takes the run directory, restores what was saved there, prints and logs the plan -> the model to call, which
        is compiled or distributed on request."""
        args, self.model, self.optimizer, self.forward = self.args, model, optimizer, model
        # Each part makes its convolution kernels anew, and on a GPU launches as many operations: fewer parts there.
        convolves = any(hasattr(layer.mixer, "kernel") for layer in model.backbone.layers)
        self.positions *= self.COSTLY if convolves or self.device.type == "cuda" else 1
        self.state = dict(step=0, evaluated=0, best=-math.inf, best_step=0, seconds=0.0, loss_sum=0.0, loss_steps=0)
        if self.main:
            try:
                args.out.mkdir(parents=True, exist_ok=True)            # the lock is held until this process ends
                self.lock = locked(args.out / ".lock", f"{args.out} is in use by another process", wait=False)
            except OSError as error:
                raise UserError(f"cannot write to --out {args.out}: {error.strerror}") from None
            write_json(args.out / "config.json", self.config())
        if self.world > 1:
            dist.barrier()
        if self.resumes:
            saved = read_checkpoint(args.out / "last.pt")
            with reading(f"{args.out}/last.pt does not fit", "it may be of another version of the code"):
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
                self.state = {name: type(value)(saved["state"][name]) for name, value in self.state.items()}
            if self.state["best_step"]:
                read_checkpoint(args.out / "best.pt")                  # needed at the end: fail now rather than then
        self.step = self.first = self.state["step"]
        self.loss_sum = torch.full((), self.state["loss_sum"], dtype=torch.float64, device=self.device)
        # step, loss and gradient norm of the last step, or of the first one where either was not finite
        self.latest = torch.zeros(3, dtype=torch.float64, device=self.device)
        self.count = torch.full((), float(self.step), device=self.device)
        self.loss = torch.zeros((), device=self.device)
        # Where all steps have the same shapes, --compile also makes CUDA graphs of them.
        self.records = (args.compile and self.device.type == "cuda" and self.world == 1 and self.equal
                        and not args.arch.get("guided"))
        self.thread, self.prepared = ThreadPoolExecutor(1), None
        self.print_plan()
        self.begin_log()
        if args.compile:
            # One graph. The kernels that layers make together stay outside: complex arithmetic gains nothing.
            model.backbone.body = torch.compile(model.backbone.body)
            for known in "Dynamo detected a call to a `functools.lru_cache`", "Torchinductor does not support code":
                warnings.filterwarnings("ignore", known)               # neither matters here
        if self.world > 1:
            # Buffers are equal on all processes already, as BatchNorm counts the whole batch. Newer torch renames this
            # argument.
            warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)
            self.forward = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False,
                                                                     gradient_as_bucket_view=True)
        return self.forward

    def print_plan(self):
        """Everything that was decided, before the first step."""
        args = self.args
        self.say(f"{args.task} / {args.model} / {args.objective}: {count(self.model):,} parameters; {self.examples:,} "
                 f"training examples; recipe {args.recipe}")
        for group in self.optimizer.param_groups:
            self.say(f"  {group['name']:5} {sum(p.numel() for p in group['params']):11,} parameters, "
                     f"lr {group['initial_lr']:g}, weight decay {group['weight_decay']:g}")
        self.say(f"  {self.steps:,} steps of {args.batch} examples = {self.steps / self.per_epoch:.1f} epochs; "
                 f"{args.schedule} schedule after {args.warmup:,} warm-up steps; evaluation every {args.eval_every:,}")
        if self.device.type == "cuda" and self.bf16 and self.lengths is not None and not args.compile:
            library = variable_length()[0]
            self.say(f"  attention of padded batches: {f'FlashAttention of {library}' if library else 'with a mask'}")
        if args.fitted:
            self.say(f"  your own data: {args.fitted}")
        self.say(f"  run directory {args.out}; differs from the recipe in {args.changed or 'nothing'}")
        if args.recipe.split("/")[1:] != [args.model, args.objective]:
            self.say(f"  note: there is no {args.objective} recipe for {args.model} here; these numbers are our choice")
        if args.warmup >= self.steps:
            self.say(f"  note: the run ends before its warm-up of {args.warmup} steps does; --warmup sets it")
        if args.micro_batch and args.arch.get("norm") == "batch":
            self.say("  note: BatchNorm takes its statistics per micro-batch, so --micro-batch changes the results")

    # ---- one step --------------------------------------------------------------------------------------------------

    def evaluates(self, step):
        """Whether to evaluate before this step; not again right after resuming."""
        due = step == self.steps or (step > 0 and step % self.args.eval_every == 0)
        if due:
            self.read_loss()
        self.due_at = time.perf_counter()
        return due and step > self.state["evaluated"]

    def evaluated(self, step, score, **values):
        """Logs an evaluation; writes best.pt if `score` is the best so far, and last.pt."""
        if not all(math.isfinite(value) for value in values.values()):
            raise UserError(f"validation at step {step} gave {values}; {self.last_good()}")
        self.evaluation = time.perf_counter() - self.due_at
        self.log(kind="eval", step=step, **values)
        self.say(f"step {step:>6}/{self.steps}  " + "  ".join(f"{k} {v:.4f}" for k, v in values.items()))
        self.state["evaluated"] = step
        if score > self.state["best"]:
            self.state.update(best=score, best_step=step)
            self.save("best.pt")
        self.save_last(step)

    def begin(self, step, prepare):
        """What `prepare(step)` gives, a list of tuples of tensors, on the device. All but the first are made in the
        background, during the step before. Also seeds dropout, by seed, step and process, so that a resumed run drops
        the same channels."""
        args, self.begun = self.args, time.perf_counter()
        if args.arch.get("guided"):
            guide(self.model, step, self.steps)
        stream = np.random.SeedSequence([args.seed, step, self.rank]).generate_state(1, np.uint64)
        # torch.manual_seed does the same, and half a millisecond of work for kinds of device that are not there.
        torch.default_generator.manual_seed(int(stream[0]))
        if self.device.type == "cuda":
            torch.cuda.manual_seed(int(stream[0]))
        parts = (self.prepared or self.thread.submit(self.pinned, prepare, step)).result()
        self.prepared = self.thread.submit(self.pinned, prepare, step + 1) if step + 1 < self.steps else None
        return [self.shipped(part) for part in parts]

    def pinned(self, prepare, step):
        """`prepare(step)`, for a GPU in memory from which it copies without holding up the CPU."""
        parts = prepare(step)
        if self.device.type == "cpu":
            return parts
        return [part._make(view if view is None else view.pin_memory() for view in part) for part in parts]

    def shipped(self, part):
        return part._make(view if view is None else view.to(self.device, non_blocking=True) for view in part)

    def rows(self, step):
        """The examples of a step's batch, int64 (batch,), and which of them are this process's, the longest first where
        lengths differ: a pure function of seed and step, so that there is no sampler state to save."""
        args, (epoch, i) = self.args, divmod(step, self.per_epoch)
        if getattr(self, "epoch", None) != epoch:                      # shuffling at every step would take time
            self.epoch, self.order = epoch, order(self.examples, args.seed, epoch)
        rows = self.order[i * args.batch:(i + 1) * args.batch]
        if self.lengths is None:
            return rows, np.arange(*(len(rows) * r // self.world for r in (self.rank, self.rank + 1)))
        return rows, np.argsort(-self.lengths[rows], kind="stable")[self.rank::self.world]

    def parts(self, whole, rows, mine, documents=1):
        """A batch of this process, tensors whose rows are sequences (`documents` an example) or examples, in parts that
        pass through the model one after another. Where lengths differ they are cut to the longest of a part, of some
        `positions`: of a batch of film reviews two thirds would be padding. At most --micro-batch examples each. Every
        process makes equally many, because BatchNorm and DDP meet in each of them."""
        largest, smallest = -(-len(rows) // self.world), len(rows) // self.world
        n, most = len(mine), self.args.micro_batch or largest
        if self.lengths is None:
            parts = min(-(-largest // most), smallest)
            bounds, widths = [n * i // parts for i in range(parts + 1)], [None] * parts
        else:
            longest, bounds, widths = -np.sort(-self.lengths[rows])[::self.world], [0], []
            while bounds[-1] < smallest:
                width = int(longest[bounds[-1]])
                widths.append(width if width <= 512 else -(-width // 128) * 128)                # few shapes
                bounds.append(bounds[-1] + min(most, max(1, self.positions // (width * documents))))
            bounds[-1] = n

        def cut(view, low, high, width):
            each = 1 if len(view) == n else documents                  # rows of an example
            some = view[each * low:each * high]
            return some[:, :width] if view.ndim > 1 else some

        return [whole._make(view if view is None else cut(view, *pair, width) for view in whole)
                for pair, width in zip(itertools.pairwise(bounds), widths)]

    def numbers(self, hidden):
        """Return the flat indices, int64 (m,), of a mask (b, l): a GPU would have to wait for a mask to be counted.
        Recorded steps need the same m, so negative numbers, which stand for no position, fill up the rest."""
        found = hidden.flatten().nonzero()[:, 0]
        if not self.records or self.args.mask is None:
            return found
        n, ratio = hidden.numel(), self.args.mask
        most = min(n, 64 * math.ceil((n * ratio + 6 * math.sqrt(n * ratio * (1 - ratio))) / 64))       # six deviations
        return torch.cat((found, torch.arange(-1, len(found) - most - 1, -1))) if len(found) < most else found

    def measured(self, learn):
        """Wrap learn(parts), a training step, so that its loss and gradient norm are logged. With --compile on a GPU
        the step becomes a CUDA graph."""
        def step(parts):
            learn(parts)
            norm = torch.nn.utils.get_total_norm(
                [p.grad for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None])
            loss = self.total(self.loss)
            self.loss_sum += loss
            this = torch.stack((self.count, loss, norm)).double()
            self.latest.copy_(torch.where(self.latest.isfinite().all(), this, self.latest))
            self.count += 1
            self.loss.zero_()

        return Recorded(step, self.optimizer) if self.records else step

    def exchange(self, parts):
        """The parts of a batch, one after another; gradients are exchanged between processes in the last one only."""
        for i, part in enumerate(parts):
            last = self.world == 1 or i + 1 == len(parts)
            with contextlib.nullcontext() if last else self.forward.no_sync():
                yield part

    def batches(self, split, lengths=None, independent=False):
        """(i, examples, batch) of the batches of an evaluation that are this process's. lengths (n,): examples of like
        length together. independent: results do not depend on which examples share a batch (in pretraining the hidden
        positions do), so a GPU, which would wait for launches, takes larger ones. The next batch is made in the
        background."""
        size, n = self.args.micro_batch or self.args.batch, len(split)
        if independent and self.device.type == "cuda" and not self.args.micro_batch:
            size = max(size, self.EVALUATED // (self.task["length"] * self.task["documents"]))
        order, ahead = np.arange(n) if lengths is None else np.argsort(lengths, kind="stable"), None

        def submit(i):
            rows = order[i * size:(i + 1) * size]
            return i, rows, self.thread.submit(self.pinned, lambda _: [split.batch(rows)], 0) if len(rows) else None

        for first in range(0, -(-n // size), self.world):                          # as many rounds on every process
            if self.stops():
                self.leave()
            i, rows, made = ahead or submit(first + self.rank)
            ahead = submit(i + self.world)
            if made is not None:
                yield i, rows, self.shipped(made.result()[0])

    def autocast(self):
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16)

    def backward(self, loss):
        """Call it outside autocast, which would take the float32 kernels' backward in bfloat16."""
        (loss * self.world).backward()         # DDP averages gradients over processes, and we want their sum
        self.loss += loss.detach()

    def total(self, tensor):
        """Sum over processes."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def stepped(self, step):
        """After the optimiser's step: the model's own `after_step()`, if it has one (an averaged teacher, say); every
        --log-every steps a log line and, if the last is ten minutes old, last.pt; first a few lines that are only
        printed. Nothing is read from the device at other times."""
        getattr(self.model, "after_step", lambda: None)()
        state, groups = self.state, self.optimizer.param_groups
        state["loss_steps"] += 1
        logs = (step + 1) % self.args.log_every == 0
        if logs:
            self.read_loss()
        now = time.perf_counter()
        self.times.append(now - self.begun)    # evaluating and saving do not count as training speed
        done = step + 1 - self.first           # by this process
        if logs or done in self.EARLY:         # early lines are only printed: how long will it take?
            later = self.times if logs else self.times[len(self.times) // 2:]            # the first steps are slower
            pace, lr = sum(later) / len(later), max(group["lr"] for group in groups)
            if not logs:
                self.read_loss()
            loss = state["loss_sum"] / state["loss_steps"]
            self.say(f"step {step + 1:>6}/{self.steps}  loss {loss:.4f}  lr {lr:.2e}  {1000 * pace:7.1f} ms/step  "
                     f"time left {self.left(step, pace)}")
            if done == 2:
                self.warn(step, pace)
        if logs:
            self.times = []
            self.loss_sum.zero_()
            state.update(loss_sum=0.0, loss_steps=0)
            self.log(kind="train", step=step + 1, loss=loss, lr=lr, ms_per_step=round(1000 * pace, 2))
            if now - self.saved_at > self.SAVE_SECONDS:                # where all processes have read the loss
                self.save_last(step + 1)
        self.step, self.stepping = step + 1, True
        if self.stops():
            self.leave()

    def left(self, step, pace):
        """The time that the other steps, validation and test take."""
        _, val, test = self.args.data["sizes"]
        often = self.steps // self.args.eval_every - step // self.args.eval_every      # that after this step, too
        each = self.evaluation or pace / 3 * val / self.args.batch     # a forward pass is a third of a step
        times = often + (self.steps % self.args.eval_every > 0) + (test / val if self.args.start != "pretrain" else 0)
        return datetime.timedelta(seconds=int(pace * (self.steps - step - 1) + each * times))

    def warn(self, step, pace):
        """Where a run takes days: what ends today."""
        left, task, model = self.left(step, pace), self.args.task, self.args.model
        if left.days:
            steps = int(self.steps * (datetime.timedelta(hours=12) / left))
            demo = f"{self.family}_demo" if f"{self.family}_demo" in TASKS else "pathfinder_demo"
            other = f", or --task {demo}" if self.args.start != "spt" else ""            # its task is that of --init
            gpu = f". Hours of a GPU: python results/costs.py {task} --cost --model {model}" if task in TASKS else ""
            self.say(f"  note: about {left / datetime.timedelta(days=1):.1f} days on this machine. What ends today: "
                     f"--steps {steps}{other}{gpu}")

    # ---- preemption: a machine that is taken away says so first ------------------------------------------------------

    def stops(self):
        """Whether a signal asked a process to stop: the answer to the call before, which is the same on all processes,
        so that none has to wait for another."""
        if self.world == 1:
            return self.told is not None
        before, flag = self.asked, torch.tensor(float(self.told is not None))
        self.asked = flag, dist.all_reduce(flag, group=self.side, async_op=True)
        if before is not None:
            before[1].wait()
        return before is not None and bool(before[0])

    def leave(self):
        """Saves what is not saved yet; ends this process."""
        if self.step > self.state["step"]:
            self.save_last(self.step)
        text = f"stopped by {signal.Signals(self.told).name if self.told else 'a signal'} after step {self.step}"
        self.log(kind="stop", text=text)       # without a step of its own: --resume takes it away again
        self.say(f"{text}; the same command with --resume continues")
        self.close()
        raise SystemExit(PREEMPTED)

    def read_loss(self):
        """The sum of losses so far into `state`. Stops the run where a loss or gradient was not finite: before anything
        is saved."""
        step, loss, norm = self.latest.tolist()
        if not math.isfinite(loss + norm):
            factor = learning_rate(step, self.steps, self.args)
            rates = ", ".join(f"{g['name']} {factor * g['initial_lr']:.3g}" for g in self.optimizer.param_groups)
            raise UserError(f"loss is {loss} at step {step:.0f}: learning rates {rates}, gradient norm {norm:.3g}; "
                            f"{self.last_good()}")
        self.state["loss_sum"] = self.loss_sum.item()

    # ---- log and files ---------------------------------------------------------------------------------------------

    def begin_log(self):
        """log.jsonl begins with argv and environment. On --resume, records past the checkpoint are cut off (they will
        be written again), so the file reads as if nothing had happened."""
        state, self.path, kept = self.state, self.args.out / "log.jsonl", []
        self.clock = self.saved_at = time.perf_counter()
        self.times, self.seconds_before, self.evaluation, self.stepping = [], state["seconds"], None, False
        if self.resumes and self.path.is_file():
            with contextlib.suppress(ValueError, KeyError, TypeError):     # a line torn by a kill ends the reading
                for line in self.path.read_text(errors="replace").splitlines():
                    record = json.loads(line)
                    if record["step"] <= state["evaluated" if record["kind"] == "eval" else "step"]:
                        kept.append(json.dumps(record) + "\n")
        if self.main:
            write_atomically(self.path, lambda file: file.write("".join(kept).encode()))
        self.log(kind="resume" if kept else "start", step=self.step, total=self.steps, argv=sys.argv,
                 **environment(self.device, self.world, self.dtype))
        Run.current = self

    def log(self, **record):
        if self.main:
            with open(self.path, "a") as file:
                file.write(json.dumps(record) + "\n")

    def seconds(self):
        return self.seconds_before + time.perf_counter() - self.clock

    def last_good(self):
        last = self.args.out / "last.pt"
        return f"the last good checkpoint is {last}" if last.exists() else "nothing was saved yet"

    def save(self, name, **more):
        """A checkpoint: model, config, all that the task knows of its data, and whatever else, by process 0."""
        if self.main:
            record = dict(model=self.model.state_dict(), config=self.config(), task=self.task, **more)
            write_atomically(self.args.out / name, lambda file: torch.save(record, file))

    def save_last(self, step):
        self.read_loss()
        self.state.update(step=step, seconds=self.seconds())
        self.save("last.pt", optimizer=self.optimizer.state_dict(), state=self.state)
        self.saved_at = time.perf_counter()

    def load_best(self):
        """Puts the weights that validation chose into the model, on all processes."""
        if self.world > 1:
            dist.barrier()                                             # best.pt is written by process 0
        self.model.load_state_dict(read_checkpoint(self.args.out / "best.pt")["model"])

    def keep_kernels(self, before, l):
        """kernels.npz, for figure 4: what `kernel_maxima` gave before the first step, and of the best weights."""
        if before is not None:
            self.load_best()
            kernels = dict(before=before, after=kernel_maxima(self.model.backbone, l))
            if self.main:
                write_atomically(self.args.out / "kernels.npz", lambda file: np.savez(file, **kernels))

    def finish(self, **results):
        """result.json, written last: its presence means that the run is complete."""
        args, names = self.args, ("task", "model", "objective", "train_fraction", "label_fraction", "joint", "seed",
                                  "data", "recipe", "changed")
        record = results | {name: getattr(args, name) for name in names if name in args} | dict(
            full_recipe=not args.changed and args.recipe.split("/")[1:] == [args.model, args.objective],
            steps=self.steps, epochs=round(self.steps / self.per_epoch, 2), best_step=self.state["best_step"],
            parameters=count(self.model), train_examples=self.examples, seconds=round(self.seconds(), 1),
            peak_memory_bytes=peak_memory(self.device), **environment(self.device, self.world, self.dtype))
        if self.main:
            write_json(args.out / "result.json", record | {"best.pt": sha256_of(args.out / "best.pt")})
        scores = "  ".join(f"{k} {v:.4f}" for k, v in results.items() if isinstance(v, float))
        self.say(f"done in {record['seconds']:.0f} s: best at step {record['best_step']}; {scores}; wrote "
                 f"{args.out / 'result.json'}")
        self.close()

    def close(self):
        """All processes together: one that leaves early takes the others' connections with it."""
        if self.world > 1:
            if self.asked is not None:
                self.asked[1].wait()
            # The handle is kept. Otherwise gloo's thread may be the last to drop it, for which it needs the
            # interpreter's lock, while the group's destructor holds that lock and waits for the thread: some runs never
            # exited.
            self.last_barrier = dist.barrier(async_op=True)
            self.last_barrier.wait()
            dist.destroy_process_group()


class Recorded:
    """A training step as a CUDA graph. A CPU takes longer to launch hundreds of small operations than a GPU to compute
    them, so they are recorded once and from then on launched by one call.

    Call it like the step. The first steps run eagerly, since a library's first calls cannot be recorded; so do steps of
    other shapes than the recorded one. UserError where a step cannot be recorded: one that reads a value, say.
    """

    WARM = 3                                   # steps before recording

    def __init__(self, step, optimizer):
        self.step, self.optimizer = step, optimizer
        self.replay, self.shapes, self.seen, self.side = None, None, 0, None

    def __call__(self, *arguments):
        tensors, structure = tree_flatten(arguments)
        shapes = [None if v is None else v.shape for v in tensors]
        if self.replay is None:
            self.seen = self.seen + 1 if shapes == self.shapes else 1
            self.shapes = shapes
            if self.seen > self.WARM:
                self.record(tensors, structure)
        if self.replay is None or shapes != self.shapes:
            return self.eagerly(lambda: self.step(*arguments))
        for mine, given in zip(self.tensors, tensors):
            if given is not None:
                mine.copy_(given)
        for rate, group in zip(self.rates, self.optimizer.param_groups):
            rate.fill_(group["lr"])
        self.replay()

    def record(self, tensors, structure):
        """Record the step. The graph reads its inputs from `tensors`, its learning rates from `rates`."""
        groups = self.optimizer.param_groups
        before = [(group["lr"], group["capturable"]) for group in groups]
        self.tensors = [v if v is None else v.clone() for v in tensors]
        self.rates = [torch.tensor(rate, device=group["params"][0].device) for group, (rate, _) in zip(groups, before)]
        for group, rate in zip(groups, self.rates):
            group.update(lr=rate, capturable=True)
        try:
            self.replay = self.capture(lambda: self.step(*tree_unflatten(self.tensors, structure)))
        except RuntimeError as error:
            cause = str(error.__context__ or error).strip().splitlines()[0]      # ending a failed recording fails, too
            raise UserError(f"--compile: no CUDA graph can be made of a step: {cause}; leave out --compile") from error
        for group, (rate, capturable) in zip(groups, before):
            group.update(lr=rate, capturable=capturable)

    def capture(self, function):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):     # another thread makes the next batch
            function()
        return graph.replay

    def eagerly(self, function):
        """On a stream of its own, as PyTorch asks for before a recording."""
        main, self.side = torch.cuda.current_stream(), self.side or torch.cuda.Stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            function()
        main.wait_stream(self.side)


def peak_memory(device):
    """The most memory that this process has had, on this device: bytes. None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:                        # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def environment(device, processes=1, dtype="float32"):
    """What a reader needs to place a number: versions, commit, hardware."""
    commit = os.environ.get("COMMIT")          # of a copy that has left its repository behind
    with contextlib.suppress(OSError):         # no git on this machine
        git = ["git", "-C", Path(__file__).resolve().parent, "describe", "--always", "--dirty", "--abbrev=10"]
        commit = commit or subprocess.run(git, capture_output=True, text=True).stdout.strip()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    return dict(commit=commit or "unknown", torch=torch.__version__, python=platform.python_version(), device=name,
                processes=processes, threads=torch.get_num_threads(), dtype=dtype)


@torch.no_grad()
def kernel_maxima(backbone, l):
    """What figure 4 draws (paper, section 3.6): max over channels of |K|, float32 (layers, c, l); None for a model
    without kernels."""
    maxima = [layer.mixer.kernel(l).abs().amax(1) for layer in backbone.layers if hasattr(layer.mixer, "kernel")]
    return torch.stack(maxima).cpu().numpy() if maxima else None


def read_checkpoint(path):
    """A checkpoint on the CPU. Only tensors and plain values are ever unpickled (weights_only). That of a finished run
    must be the one of which result.json has the checksum."""
    path, record = Path(path), Path(path).with_name("result.json")
    wanted = read_json(record, "task", "seed").get(path.name) if record.exists() else None
    if wanted is not None and path.exists() and sha256_of(path) != wanted:
        raise UserError(f"{path} is damaged, or not that of the run of which {record} tells: wrong checksum")
    with reading(f"{path} is missing, cut short, or not a checkpoint of this project", "choose another"):
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        # Raises unless these are tensors by name, and flags.
        {str.lower(name): tensor.shape for name, tensor in checkpoint["model"].items()}, {**checkpoint["config"]}
    return checkpoint


PREEMPTED = 143                                # exit code after SIGTERM and SIGUSR1


def on_signal(number, _):
    """A run saves after the step or batch that it is in. What has made no step yet has nothing to save."""
    if Run.current is not None and Run.current.stepping:
        Run.current.told = number
    else:
        raise SystemExit(PREEMPTED)


def guarded(main):
    """Runs a script's main and ends with its `exit_code`. The log of a run gets a last record that tells what went
    wrong, for `analyze.py status`; --resume takes it away again."""
    def logged():
        try:
            return main()
        except (Exception, KeyboardInterrupt) as error:
            text = f"{type(error).__name__}: {error}"
            if isinstance(error, (UserError, SizeError)):
                text = str(error)
            elif isinstance(error, torch.OutOfMemoryError):
                text = "out of GPU memory; give a smaller --micro-batch"
            elif isinstance(error, KeyboardInterrupt) and Run.current is not None:
                text = "interrupted; the same command with --resume continues from the last checkpoint"
                error = KeyboardInterrupt(f"error: {text}")
            if Run.current is not None:
                with contextlib.suppress(OSError):                     # the disk may be what went wrong
                    Run.current.log(kind="error", error=text)
            if isinstance(error, (SizeError, torch.OutOfMemoryError)):
                error = UserError(text)
            raise error                                                # of a bug, exit_code shows the traceback

    for name in "SIGTERM", "SIGUSR1":
        if hasattr(signal, name):              # not every system has them
            signal.signal(getattr(signal, name), on_signal)
    if code := exit_code(logged):
        raise SystemExit(code)
