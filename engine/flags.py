"""The flags of both stages: their parser, defaults from the recipe, differences from it, and the
run's name."""

import argparse
import json
import math
import os
import re
from pathlib import Path

import zoo  # noqa: F401, fills MODELS
from data import look_up
from files import Parser, UserError, read_json, sha256_of
from models import MODELS, keys_of
from recipes import CELLS, SCHEDULES, arch, assignments, fit, halved, recipe_line, settings
from tasks import TASKS, folder_name, full_name


def between(kind, low, high=math.inf):
    """Return a type for argparse: a number from low to high."""

    def check(text):
        value = kind(text)
        if not (low <= value <= high and math.isfinite(value)):
            bounds = f"at least {low:g}" if high > 2**62 else f"between {low:g} and {high:g}"
            raise argparse.ArgumentTypeError(f"must be {bounds}, got {text}")
        return value

    check.__name__ = kind.__name__  # argparse prints it in errors
    return check


def flags(stage, objectives):
    """Return the parser of a stage, before a recipe fills in defaults."""
    positive, natural, rate = between(int, 1), between(int, 0, 2**63 - 1), between(float, 0)
    parser = Parser(
        examples=True,
        description="With --task and --model, --help also shows their recipe.",
        allow_abbrev=False,
        add_help=False,
    )
    add = parser.add_argument_group("what to run").add_argument
    add(
        "-h",
        "--help",
        action="store_true",
        help="print this help, with the recipe and sizes of a task and model",
    )
    add(
        "--task",
        help="one of: "
        + " ".join(TASKS)
        + " or your data: file:PATH (a table, .npz, .ts, .txt), ucr:NAME",
    )
    add("--model", choices=MODELS, metavar="MODEL", help="one of: " + " ".join(MODELS))
    add(
        "--objective",
        choices=objectives,
        help="masked: predict hidden positions from both sides; causal: predict "
        "each position from those before it",
    )
    add(
        "--arch",
        type=assignments,
        metavar="KEY=VALUE,...",
        help="sizes other than in recipes.py, e.g. d=64,layers=3",
    )
    add(
        "--train-fraction",
        type=between(float, 1e-9, 1),
        help="share of the training examples to use; a smaller share is a subset of a larger one",
    )
    add(
        "--fresh",
        action="store_true",
        help="draw new training examples in every step (if the task has `draw`)",
    )
    add("--seed", type=natural, default=0, help="seed of weights, data order and hidden positions")
    add("--data-dir", default="data", help="where prepared data sets live")
    add(
        "--out",
        type=Path,
        help="run directory (default: runs/TASK-MODEL-OBJECTIVE-STAGE-sSEED, plus all changes to "
        "the recipe)",
    )
    add("--resume", action="store_true", help="continue the run in --out exactly where it stopped")
    if stage == "finetune":
        add(
            "--init",
            type=Path,
            help="directory of a pretraining run; it also sets task, model, sizes and training "
            "examples (default: start from scratch, or from the model's published weights if it "
            "has any)",
        )
        add(
            "--joint",
            type=between(float, 1e-9),
            metavar="W",
            help="joint training from scratch: add W times the "
            "pretraining loss on the same batch; masked: half the recipe's steps, as a step needs "
            "two passes",
        )
        add(
            "--freeze",
            action="store_true",
            help="linear probe: train only the head, on the frozen backbone",
        )
        add(
            "--class-weights",
            action="store_true",
            help="weigh the loss of each class by how rare it is in training",
        )
        add(
            "--label-fraction",
            type=between(float, 1e-9, 1),
            help="share of all training examples to finetune on "
            "(pretraining may use more); keeps class proportions; a smaller share is a subset of a "
            "larger one",
        )
    add = parser.add_argument_group("recipe (your flags override it)").add_argument
    add("--lr", type=rate, help="learning rate of all parameters that do not have their own")
    add("--wd", "--weight-decay", type=rate, help="AdamW weight decay")
    add(
        "--batch",
        type=positive,
        help="examples (retrieval: pairs) per optimiser step, over all GPUs",
    )
    add("--epochs", type=positive, help="length of the run, in epochs")
    add("--steps", type=positive, help="length of the run, in optimiser steps; overrides --epochs")
    add("--warmup", type=natural, help="steps of linear warm-up")
    add(
        "--schedule",
        choices=SCHEDULES,
        help="learning rate after warm-up: cosine reaches 0 at the "
        "end, step halves the rate after each fifth of the run",
    )
    add("--eval-every", type=positive, help="steps between evaluations (default: an epoch)")
    if stage == "finetune":
        add("--pool", choices=CELLS["pool"].kind, help="how to pool the sequence into one vector")
        add(
            "--head",
            choices=CELLS["head"].kind,
            help="head on that vector; mlp: one hidden layer; pair: for tasks "
            "with two documents per example",
        )
    # Without effect on training from scratch, so a sweep does not repeat it. An objective's own
    # flags belong here.
    group, parser.denoising = (
        parser.add_argument_group("objective, in pretraining and joint training"),
        set(),
    )

    def add(*names, **more):
        parser.denoising.add(group.add_argument(*names, **more).dest)

    add(
        "--mask",
        type=between(float, 1e-6, 1),
        help="masking ratio: probability that a position is hidden",
    )
    add(
        "--loss",
        choices=CELLS["loss"].kind,
        help="loss on hidden positions: cross-entropy (symbols, gray levels), L1",
    )
    add = parser.add_argument_group("machine").add_argument
    add(
        "--micro-batch",
        type=positive,
        help="examples per forward pass; halve it if memory runs out",
    )
    add(
        "--device",
        default="auto",
        choices=("auto", "cpu", "cuda"),
        help="auto: GPU if there is one (not Apple's: it has no float64)",
    )
    add(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16"),
        help="auto: bfloat16 autocast on a GPU that supports it, else float32",
    )
    add(
        "--compile",
        action="store_true",
        help="torch.compile the backbone; on one GPU, if all sequences have "
        "equal length, also run each step as one CUDA graph: 1.3 to 3.5 times as fast "
        "(results/gpu.md)",
    )
    add("--log-every", type=positive, default=100, help="steps between log lines")
    return parser


def inherit(flags):
    """Return the {flag: value} that --init determines; its config.json holds the flags of
    pretraining. Both stages use the same examples unless --train-fraction differs."""
    if flags.label_fraction is not None and flags.train_fraction is not None:
        raise UserError(
            "give only one of --label-fraction and --train-fraction: both choose training examples"
        )
    trained = flags.model in MODELS and MODELS[flags.model].weights is not None
    if flags.joint is not None and (trained or flags.init is not None):
        raise UserError(
            f"--joint {flags.joint:g} trains from scratch, so it has no meaning with --init, nor "
            "with a "
            "model that has trained weights; leave it out"
        )
    if flags.init is None:
        return dict(start="corpus" if trained else "scratch" if flags.joint is None else "joint")
    if not (flags.init / "config.json").exists():
        raise UserError(
            f"--init {flags.init} is not the directory of a pretraining run: it has no config.json"
        )
    saved = read_json(flags.init / "config.json")
    needed = {"task", "model", "objective", "arch", "train_fraction", "changed"}
    if saved.get("start") != "pretrain" or not needed <= saved.keys():
        raise UserError(
            f"--init {flags.init} is not a pretraining run, or one of an older version; run "
            "pretrain.py"
        )
    for name in ("task", "model", "objective"):
        if getattr(flags, name) not in (None, saved[name]):
            raise UserError(
                f"--{name} {getattr(flags, name)}, but {flags.init} was pretrained with --{name} "
                f"{saved[name]}; leave that flag out, or choose another --init"
            )
    if flags.arch is not None:
        raise UserError(f"--arch has no meaning with --init: the sizes are those of {flags.init}")
    fixed, weights = (
        {name: saved[name] for name in ("task", "model", "objective", "arch")},
        flags.init / "best.pt",
    )
    saved.pop("code", None)  # result.json has it
    return fixed | dict(
        start="spt",
        init=Path(os.path.relpath(flags.init)),
        pretraining=saved,
        pretrained=sha256_of(weights) if weights.exists() else None,
        train_fraction=flags.train_fraction or saved["train_fraction"],
    )


MACHINE_FLAGS = {
    "help",
    "resume",
    "device",
    "dtype",
    "compile",
    "log_every",
    "out",
    "data_dir",
    "fitted",
}  # these do not define the run
# no flags: a run's
SET_LATER = {"start", "recipe", "fitted", "changed", "pretraining", "pretrained", "data", "code"}
# recorded separately, not in `changed`
RECORDED = {"task", "model", "objective", "arch", "seed", "init", "joint"}


def arguments(stage, argv, objectives):
    """Return the flags of a stage. Those not given come from the recipe and --init. Also set: start
    (pretrain, spt, corpus, scratch or joint); arch, all sizes; recipe, the name of its line;
    fitted, a sentence on what `fit` chose; changed, {flag: value} of everything that differs from
    the recipe."""
    parser = flags(stage, objectives)
    args = parser.parse_args(argv)
    named = vars(args).keys() - MACHINE_FLAGS - RECORDED
    if taken := vars(args).keys() & SET_LATER:
        raise UserError(
            f"--{min(taken)}: runs record something else under this name; rename the flag"
        )
    if args.help and None in (args.task, args.model) and not getattr(args, "init", None):
        parser.print_help()
        parser.exit()
    args.task = args.task and full_name(args.task)
    vars(args).update(inherit(args) if stage == "finetune" else {"start": stage})
    for flag, known in (("task", [*TASKS, "file:PATH", "ucr:NAME"]), ("model", MODELS)):
        if getattr(args, flag) is None:
            raise UserError(f"--{flag} is missing; one of: {' '.join(known)}")
    task, fitted, args.fitted = look_up(args.task, args.data_dir), {}, None
    args.recipe, args.objective, values = recipe_line(
        args.task, task, args.model, args.objective, args.start
    )
    if args.objective not in objectives:
        raise UserError(f"objective {args.objective} is unknown; there is: {' '.join(objectives)}")
    hides = objectives[args.objective].hides
    if args.start == "joint" and hides:
        values = halved(values)
    if task.own:
        first = args.pretraining if args.start == "spt" else vars(args)
        examples = max(1, int(task.sizes[0] * (first["train_fraction"] or 1)))
        fitted, args.fitted = fit(task, examples, values, arch(args.task, args.model))
    unused = (
        parser.denoising
        if args.start not in ("pretrain", "joint")
        else set()
        if hides
        else {"mask"}
    )
    values = {
        flag: value for flag, value in values.items() if flag in vars(args) and flag not in unused
    }
    sizes = arch(args.task, args.model, **fitted)
    if sizes is None:
        raise UserError(f"--model {args.model} has no sizes for {args.task}")
    if args.start == "spt":
        keys = keys_of(args.model, args.arch.get("ffn", "dense"))
        args.arch = {
            name: value
            for name, value in args.arch.items()
            if name not in keys or keys[name].inherited
        }
    else:
        args.arch = arch(args.task, args.model, **fitted | (args.arch or {}))
    if args.help:
        print_recipe(parser, args, values)
    other_sizes = {key: value for key, value in args.arch.items() if sizes.get(key) != value}
    args.changed = {"arch": other_sizes} if other_sizes else {}
    # matters to BatchNorm
    cut = args.micro_batch and args.micro_batch < (args.batch or values["batch"])
    for flag in sorted(named):  # also flags that a fork adds
        same = flag == "micro_batch" and not (cut and args.arch.get("norm") == "batch")
        if not same and getattr(args, flag) not in (
            None,
            values.get(flag),
            parser.get_default(flag),
        ):
            args.changed[flag] = getattr(args, flag)
    if args.start == "spt":  # changes in pretraining are changes of this run
        unfinished = {} if (args.init / "result.json").exists() else {"unfinished": True}
        if before := args.pretraining["changed"] | unfinished:
            args.changed["pretraining"] = before
    if "epochs" in args.changed:
        values.pop("steps", None)  # --epochs replaces the recipe's steps
    vars(args).update(
        {flag: value for flag, value in values.items() if getattr(args, flag) is None}
    )
    check(args, task, objectives[args.objective], parser)
    args.out = args.out or Path("runs") / run_name(args)
    return args


def print_recipe(parser, args, values):
    """Print the help with the recipe and sizes of a task and model, and exit."""
    keys = keys_of(args.model, args.arch.get("ffn", "dense"))
    # no other columns of the table
    read = {name: value for name, value in args.arch.items() if name in keys}
    recipe, sizes = (
        " ".join(f"{k}={v}" for k, v in some.items() if v is not None) for some in (values, read)
    )
    rule = f" {args.fitted}." if args.fitted else ""
    parser.description = f"Recipe {args.recipe}: {recipe}. Sizes: {sizes}.{rule}"
    parser.print_help()
    parser.exit()


def completed(stage, objectives, **settings):
    """Return a namespace of settings, with the parser's default for each flag that they lack: kept
    weights may be older than a flag that a fork reads."""
    return argparse.Namespace(**vars(flags(stage, objectives).parse_args([])) | settings)


# in names of runs
SHORT = {"train_fraction": "f", "label_fraction": "l", "pretraining": "pre", "arch": ""}


def run_name(args):
    """Return TASK-MODEL-OBJECTIVE-START-sSEED with all changes to the recipe: the default run
    directory."""
    found = settings(args.changed) | (
        {"joint": args.joint} if args.start == "joint" and args.joint != 1 else {}
    )
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


def check(args, task, objective, parser):
    """Raise UserError if flags do not fit each other or the task."""
    hides, denoises = objective.hides, args.start in ("pretrain", "joint")
    for flag in sorted(parser.denoising) if not denoises else ():
        if getattr(args, flag) != parser.get_default(flag):
            raise UserError(
                f"--{flag.replace('_', '-')} {getattr(args, flag)} has no meaning without --joint"
            )
    if objective.whole and denoises and args.micro_batch:
        raise UserError(
            f"--micro-batch has no meaning with --objective {args.objective}, which keeps a batch "
            "whole"
        )
    if not hides and args.mask is not None:
        raise UserError(f"--mask {args.mask} has no meaning with --objective {args.objective}")
    if args.start != "pretrain" and args.class_weights and task.kind != "class":
        raise UserError(
            f"--class-weights is for one class per example; the targets of {args.task}: {task.kind}"
        )
    if args.start != "pretrain" and (args.pool == "none") != (task.kind == "positions"):
        raise UserError(
            f"--pool {args.pool} does not fit {args.task}; `--pool none` is for a label at every "
            "position"
        )
    if args.fresh and (
        task.draw is None or args.train_fraction or getattr(args, "label_fraction", None)
    ):
        able = " ".join(name for name, other in TASKS.items() if other.draw)
        raise UserError(
            "--fresh draws all examples; leave out the share of them"
            if task.draw
            else f"--fresh: {args.task} has no function that draws an example; these have one: "
            f"{able}"
        )
    if args.start == "joint" and args.freeze:
        raise UserError("--freeze has no meaning with --joint, which trains the backbone")
    if denoises and args.loss == "l1" and task.channels is None:
        raise UserError(
            f"--loss l1 needs samples, but {args.task} consists of symbols; use --loss ce"
        )
    if denoises and args.loss == "ce" and task.vocab is None:
        raise UserError(
            f"--loss ce needs symbols or gray levels, but {args.task} has neither; use --loss l1"
        )
    if args.start != "pretrain" and (args.head == "pair") != (task.documents == 2):
        raise UserError(
            f"--head {args.head} does not fit {args.task}, where an example has {task.documents} "
            "document"
            f"{'s; use --head pair' if task.documents > 1 else '; use --head linear or mlp'}"
        )


def defining(args):
    """Return everything that defines a run; saved in config.json and in each checkpoint."""
    return json.loads(
        json.dumps({k: v for k, v in vars(args).items() if k not in MACHINE_FLAGS}, default=str)
    )
