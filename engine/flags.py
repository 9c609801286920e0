"""The flags of both stages: which there are, what they are by default (the recipe, --init), and
what is recorded of them. `arguments` is the place to begin."""

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
from recipes import SCHEDULES, STARTS, WORDS, arch, assignments, fit, recipe_line, settings
from tasks import TASKS, declared, folder_name, full_name

# ---- Which flags there are -----------------------------------------------------------------------

# The starts (recipes.py) for which a flag has a meaning.
ANY = frozenset(STARTS)
FINETUNING = ANY - {"pretrain"}
WITH_DENOISING = frozenset({"pretrain", "joint"})


def between(kind, low, high=math.inf):
    """Return a type for argparse: a number from low to high."""

    def number(text):
        value = kind(text)
        if not (low <= value <= high and math.isfinite(value)):
            bounds = f"at least {low:g}" if high > 2**62 else f"between {low:g} and {high:g}"
            raise argparse.ArgumentTypeError(f"must be {bounds}, got {text}")
        return value

    number.__name__ = kind.__name__  # argparse prints it in errors
    return number


def flags(stage, objectives):
    """Return the parser of a stage (pretrain or finetune), without the defaults that a recipe has.
    Its `starts` are {flag: the starts for which it has a meaning}. To add a flag, add a line:
    starts, names, kind (a type, the choices, or bool for a switch), help."""
    positive, natural, rate = between(int, 1), between(int, 0, 2**63 - 1), between(float, 0)
    weight, share = between(float, 1e-9), between(float, 1e-9, 1)
    about = "With --task and --model, --help also shows their recipe."
    parser = Parser(examples=True, description=about, allow_abbrev=False, add_help=False)
    parser.starts = {}
    of_stage = {"pretrain"} if stage == "pretrain" else FINETUNING

    def add(starts, names, kind, text, **more):
        if not starts & of_stage:
            return
        if kind is bool:
            more["action"] = "store_true"
        else:
            more["type" if callable(kind) else "choices"] = kind
        flag = group.add_argument(*names.split(), help=text, **more)
        parser.starts[flag.dest] = starts

    group = parser.add_argument_group("what to run")
    own = "or your data: file:PATH (a table, .npz, .ts, .txt), ucr:NAME"
    add(ANY, "-h --help", bool, "print this help, with the recipe and sizes of a task and model")
    add(ANY, "--task", str, f"one of: {' '.join(TASKS)} {own}")
    add(ANY, "--model", MODELS, f"one of: {' '.join(MODELS)}", metavar="MODEL")
    add(ANY, "--objective", objectives, "masked: predict hidden positions; causal: the next one")
    sizes = "sizes other than in recipes.py, e.g. d=64,layers=3"
    add(ANY - {"spt"}, "--arch", assignments, sizes, metavar="KEY=VALUE,...")
    add(ANY, "--train-fraction", share, "share of the training examples; smaller ones are nested")
    add(ANY, "--fresh", bool, "draw new training examples in every step (if the task has `draw`)")
    add(ANY, "--seed", natural, "seed of weights, data order and hidden positions", default=0)
    add(ANY, "--data-dir", str, "where prepared data sets live", default="data")
    place = "run directory (default: runs/TASK-MODEL-OBJECTIVE-START-sSEED, with all changes)"
    add(ANY, "--out", Path, place)
    add(ANY, "--resume", bool, "continue the run in --out exactly where it stopped")
    first = "directory of a pretraining run; it also sets task, model, sizes, training examples"
    add({"spt"}, "--init", Path, first)
    both = "joint training from scratch: add W times the pretraining loss on the same batch"
    add({"joint"}, "--joint", weight, f"{both}; masked: half the recipe's steps", metavar="W")
    add(FINETUNING - {"joint"}, "--freeze", bool, "linear probe: train only the head")
    add(FINETUNING, "--class-weights", bool, "weigh each class by how rare it is in training")
    few = "share of all training examples to finetune on; keeps class proportions, and is nested"
    add(FINETUNING, "--label-fraction", share, few)
    few = "labels per class to finetune on, drawn by --seed; validation has a fifth as many"
    add(FINETUNING, "--labels-per-class", positive, few)

    group = parser.add_argument_group("recipe (your flags override it)")
    add(ANY, "--lr", rate, "learning rate of all parameters that do not have their own")
    add(ANY, "--wd --weight-decay", rate, "AdamW weight decay")
    add(ANY, "--batch", positive, "examples (retrieval: pairs) per optimiser step, over all GPUs")
    add(ANY, "--epochs", positive, "length of the run, in epochs")
    add(ANY, "--steps", positive, "length of the run, in optimiser steps; overrides --epochs")
    add(ANY, "--warmup", natural, "steps of linear warm-up")
    add(ANY, "--schedule", SCHEDULES, "after warm-up; step: halved after each fifth of the run")
    add(ANY, "--eval-every", positive, "steps between evaluations (default: an epoch)")
    add(FINETUNING, "--pool", WORDS["pool"], "how to pool the sequence into one vector")
    add(FINETUNING, "--head", WORDS["head"], "mlp: one hidden layer; pair: for two documents")

    # An objective's own flags belong here. A sweep does not repeat training from scratch for them.
    group = parser.add_argument_group("objective, in pretraining and joint training")
    ratio = between(float, 1e-6, 1)
    add(WITH_DENOISING, "--mask", ratio, "masking ratio: probability that a position is hidden")
    add(WITH_DENOISING, "--loss", WORDS["loss"], "cross-entropy (symbols, gray levels) or L1")

    group = parser.add_argument_group("machine")
    add(ANY, "--micro-batch", positive, "examples per forward pass; halve it if memory runs out")
    device = "auto: GPU if there is one (not Apple's: it has no float64)"
    add(ANY, "--device", ("auto", "cpu", "cuda"), device, default="auto")
    dtype = "auto: bfloat16 autocast on a GPU that supports it, else float32"
    add(ANY, "--dtype", ("auto", "float32", "bfloat16"), dtype, default="auto")
    graph = "torch.compile the backbone; for equal lengths on one GPU, CUDA graphs, too"
    add(ANY, "--compile", bool, graph)
    add(ANY, "--log-every", positive, "steps between log lines", default=100)
    return parser


# These do not define a run.
NOT_DEFINING = {"help", "resume", "device", "dtype", "compile", "log_every", "out", "data_dir"}
SHARES = "train_fraction", "label_fraction", "labels_per_class"  # of the training examples
# `changes` does not compare these: sizes come from `sizes_of`, the others are recorded apart.
RECORDED = {"task", "model", "objective", "arch", "seed", "init", "joint"}

# ---- What a run is asked for ---------------------------------------------------------------------


def arguments(stage, argv, objectives, pretraining=None, planned=False):
    """Parse the flags of a stage and return all settings of the run. Those not given come from the
    recipe and from --init.

    Also set: start, how the run starts (a key of STARTS); arch, all sizes; recipe, the name of its
    line; fitted, a sentence on what `fit` chose for your data; changed, {flag: value} of everything
    that differs from the recipe; with --init pretraining, the settings of that run.

    planned: parse a command of a list before its data and its --init exist. pretraining is then
    what --init would name. Your data are not fitted: every size and length that is given counts as
    changed."""
    parser = flags(stage, objectives)
    args = parser.parse_args(argv)
    if args.help and None in (args.task, args.model) and not getattr(args, "init", None):
        parser.print_help()
        parser.exit()
    args.task = args.task and full_name(args.task)
    if stage == "finetune" and args.init:
        pretraining = read_pretraining(args.init)
    args.start = start_of(stage, args, pretraining)
    refuse(parser, args)
    if args.start == "spt":
        inherit(args, pretraining)
    for flag, choices in (("task", [*TASKS, "file:PATH", "ucr:NAME"]), ("model", MODELS)):
        if getattr(args, flag) is None:
            raise UserError(f"--{flag} is missing; one of: {' '.join(choices)}")

    task = declared(args.task) if planned else look_up(args.task, args.data_dir)
    recipe, fitted_sizes, args.fitted = recipe_of(args, task, objectives, parser.starts)
    sizes = sizes_of(args, task, fitted_sizes)
    if args.help:
        print_recipe(parser, args, recipe)
    args.changed = changes(args, recipe, sizes, vars(parser.parse_args([])))
    if "epochs" in args.changed:
        recipe.pop("steps", None)  # --epochs replaces the recipe's steps
    for flag, value in recipe.items():
        if getattr(args, flag) is None:
            setattr(args, flag, value)
    if task.length:  # unknown in plans for your data
        check_fit(args, task, objectives[args.objective])
    args.out = args.out or Path("runs") / run_name(args, args.seed)
    return args


def read_pretraining(folder):
    """Return the settings of the pretraining run in a folder, from its config.json."""
    config = folder / "config.json"
    saved = read_json(config) if config.exists() else {}
    if saved.get("start") != "pretrain":
        raise UserError(f"--init {folder} is not a pretraining run; run pretrain.py")
    saved.pop("code", None)  # result.json has it
    return saved


def start_of(stage, args, pretraining):
    """Return how a run starts, a key of STARTS."""
    if stage == "pretrain":
        return "pretrain"
    if pretraining is not None:
        return "spt"
    if args.model and MODELS[args.model].weights is not None:
        return "corpus"
    return "scratch" if args.joint is None else "joint"


def refuse(parser, args):
    """Raise UserError for a flag that has no meaning for this start."""
    for flag, starts in parser.starts.items():
        value = getattr(args, flag)
        if args.start not in starts and value != parser.get_default(flag):
            name = f"--{flag.replace('_', '-')}"
            others = ", ".join(STARTS[start] for start in STARTS if start in starts)
            raise UserError(
                f"{name} has no meaning {STARTS[args.start]}; leave it out (it has one {others})"
            )
    given = [f"--{flag.replace('_', '-')}" for flag in SHARES if getattr(args, flag, None)]
    if len(given) > 1:
        raise UserError(f"give only one of {' and '.join(given)}")


def inherit(args, pretraining):
    """Take over, in place, what the pretraining run determines."""
    for flag in ("task", "model", "objective"):
        value = pretraining[flag]
        if getattr(args, flag) not in (None, value):
            raise UserError(f"{args.init} was pretrained with --{flag} {value}; leave --{flag} out")
        setattr(args, flag, value)
    keys = keys_of(args.model, pretraining["arch"].get("ffn", "dense"))
    args.pretraining = pretraining
    args.arch = {
        name: size
        for name, size in pretraining["arch"].items()
        if name not in keys or keys[name].inherited
    }
    args.train_fraction = args.train_fraction or pretraining["train_fraction"]
    if args.init is not None:  # else it is planned
        weights = args.init / "best.pt"
        args.init = Path(os.path.relpath(args.init))
        args.pretrained = sha256_of(weights) if weights.exists() else None


def recipe_of(args, task, objectives, starts):
    """Return {flag: value} of a run's recipe, {name: size} that `fit` changes for your data, and
    its sentence. Set args.recipe, the name of its line, and args.objective."""
    args.recipe, args.objective, recipe = recipe_line(
        args.task, task, args.model, args.objective, args.start
    )
    if args.objective not in objectives:
        raise UserError(f"objective {args.objective} is unknown; there is: {' '.join(objectives)}")
    hides = objectives[args.objective].hides
    if not hides:
        recipe.pop("mask")
    elif args.start == "joint":  # takes two passes per step
        recipe |= {name: recipe[name] // 2 for name in recipe.keys() & {"steps", "epochs"}}
    recipe = {flag: value for flag, value in recipe.items() if args.start in starts.get(flag, ())}
    if not task.own:
        return recipe, {}, None
    if not task.length:  # a plan: the run's length, which `fit` chooses, is unknown
        recipe["epochs"] = recipe["eval_every"] = None
        return recipe, {}, None
    first = args.pretraining if args.start == "spt" else vars(args)
    examples = max(1, int(task.sizes[0] * (first["train_fraction"] or 1)))
    return fit(task, examples, recipe, arch(args.task, args.model))


def sizes_of(args, task, fitted_sizes):
    """Set args.arch, all sizes of the model. Return those that differ from the usual ones."""
    usual = arch(args.task, args.model, **fitted_sizes)
    if usual is None:
        raise UserError(f"--model {args.model} has no sizes for {args.task}")
    asked = args.arch or {}
    if args.start == "spt":
        asked = args.pretraining["changed"].get("arch", {})
    else:
        args.arch = arch(args.task, args.model, **fitted_sizes | asked)
    if task.own and not task.length:  # a plan: the sizes that `fit` chooses are unknown
        usual = {name: size for name, size in usual.items() if name not in asked}
    return {name: size for name, size in args.arch.items() if usual.get(name) != size}


def changes(args, recipe, sizes, defaults):
    """Return `changed` of result.json, {flag: value} of everything that differs from the recipe.
    sizes: of the model, those that differ; defaults: {flag: that of the parser}."""
    changed = {"arch": sizes} if sizes else {}
    for flag in sorted(defaults.keys() - NOT_DEFINING - RECORDED):  # also those of a fork
        value = getattr(args, flag)
        if value not in (None, recipe.get(flag), defaults[flag]):
            changed[flag] = value
    in_parts = args.micro_batch and args.micro_batch < (args.batch or recipe["batch"])
    if not in_parts or args.arch.get("norm") != "batch":  # else the gradient is the whole batch's
        changed.pop("micro_batch", None)
    if args.start == "spt":  # changes in pretraining are changes of this run
        before = dict(args.pretraining["changed"])
        if args.init is not None and not (args.init / "result.json").exists():
            before["unfinished"] = True
        if before:
            changed["pretraining"] = before
    return changed


def print_recipe(parser, args, recipe):
    """Print the help with the recipe and sizes of a task and model, and exit."""

    def listed(values):
        return " ".join(f"{name}={value}" for name, value in values.items() if value is not None)

    keys = keys_of(args.model, args.arch.get("ffn", "dense"))
    sizes = {name: size for name, size in args.arch.items() if name in keys}
    parser.description = f"Recipe {args.recipe}: {listed(recipe)}. Sizes: {listed(sizes)}."
    parser.description += f" {args.fitted or ''}"
    parser.print_help()
    parser.exit()


def check_fit(args, task, objective):
    """Raise UserError if a flag does not fit the task, the objective or another flag."""
    name = args.task
    if not objective.hides and args.mask is not None:
        raise UserError(f"--mask has no meaning with --objective {args.objective}")
    if args.start in WITH_DENOISING:
        if objective.whole and args.micro_batch:
            raise UserError(f"--micro-batch: --objective {args.objective} keeps a batch whole")
        if args.loss == "l1" and task.channels is None:
            raise UserError(f"--loss l1 needs samples, and {name} has symbols; use --loss ce")
        if args.loss == "ce" and task.vocab is None:
            raise UserError(f"--loss ce needs symbols, and {name} has none; use --loss l1")
    if args.start in FINETUNING:
        if args.class_weights and task.kind != "class":
            raise UserError(f"--class-weights needs one class per example, not {task.kind}")
        if (args.pool == "none") != (task.kind == "positions"):
            raise UserError(f"{name}: --pool none is for a label per position, and only for that")
        if (args.head == "pair") != (task.documents == 2):
            raise UserError(f"{name}: --head pair is for two documents, and only for that")
    if args.fresh and task.draw is None:
        able = " ".join(name for name, other in TASKS.items() if other.draw)
        raise UserError(f"--fresh: {name} cannot draw new examples; these can: {able}")
    if args.fresh and any(getattr(args, flag, None) for flag in SHARES):
        raise UserError("--fresh draws all examples; leave out the share of them")


# ---- Names and records ---------------------------------------------------------------------------

SHORT = dict(train_fraction="f", label_fraction="l", labels_per_class="k")
SHORT |= dict(pretraining="pre", arch="")


def run_name(args, seed):
    """Return the name of a run: TASK-MODEL-OBJECTIVE-START-sSEED with all changes to the recipe. It
    is the default run directory, and that of run_all.sh."""
    changed = settings(args.changed)
    if args.start == "joint" and args.joint != 1:
        changed["joint"] = args.joint
    sizes = words = ""
    for name, value in changed.items():
        text = f"{value:g}" if isinstance(value, float) else str(value)
        if name.startswith("arch."):
            sizes += f"-{name.removeprefix('arch.')}={text}"
            continue
        # pretraining.mask -> pre-mask
        parts = [SHORT.get(part, part.replace("_", "-")) for part in name.split(".")]
        words += "-" + "-".join(filter(None, parts)) + ("" if value is True else text)
    task = folder_name(args.task)
    name = f"{task}-{args.model}{sizes}-{args.objective}-{args.start}{words}-s{seed}"
    return re.sub(r"[^\w.=-]", "_", name)


def defining(args):
    """Return everything that defines a run; saved in config.json and in each checkpoint."""
    apart = NOT_DEFINING | {"fitted"}
    settings = {name: value for name, value in vars(args).items() if name not in apart}
    return json.loads(json.dumps(settings, default=str))


def completed(stage, objectives, **settings):
    """Return a namespace of settings; flags that they lack, e.g. of a fork, have defaults."""
    return argparse.Namespace(**vars(flags(stage, objectives).parse_args([])) | settings)
