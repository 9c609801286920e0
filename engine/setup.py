"""`setup`: what is settled before a run. Both stages begin with it."""

import argparse
import os
from pathlib import Path

import torch

from data import open_task
from engine.flags import SHARES, arguments
from files import UserError
from models import Backbone, config, count
from tasks import declared, folder_name


class Settings(argparse.Namespace):
    """The settings of a run, as `args`. They are final: nothing sets one later."""

    def __init__(self, settings):
        vars(self).update(settings)

    def __setattr__(self, name, value):
        raise AttributeError(f"settings are final; setup.py sets args.{name}")


def setup(stage, argv, objectives):
    """Return what a run of a stage (pretrain or finetune) begins with: args, its final settings;
    task, the Task; (train, val, test), its splits (`Split` in data.py)."""
    args = arguments(stage, argv, objectives)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no CUDA device; use --device cpu")
    warn_before(args)
    task, train, val, test = open_task(
        args.task,
        args.data_dir,
        args.train_fraction,
        getattr(args, "label_fraction", None),
        labels=stage == "finetune",
        per_class=getattr(args, "labels_per_class", None),
        seed=args.seed,
    )
    train.fresh = args.seed if args.fresh else None
    if args.start == "spt" and args.pretraining["data"] != task.data:
        raise UserError(
            f"{args.init} was pretrained on {args.pretraining['data']}, and {args.task} in "
            f"{args.data_dir} holds {task.data}; its test split may hold what was pretrained on"
        )
    fit_to_data(args, task, len(train))
    return Settings(vars(args)), task, (train, val, test)


def fit_to_data(args, task, examples):
    """Set what depends on the number of training examples: batch, steps, eval_every. Record the
    data, and sizes of its splits that differ from the task's."""
    few = any(getattr(args, flag, None) for flag in SHARES[1:]) or task.labelled is not None
    if few and examples < args.batch:
        args.batch = examples
        if not task.own:  # whose recipe has no batch of its own
            args.changed["batch"] = examples
    if examples < args.batch:
        raise UserError(f"--batch {args.batch} is more than the {examples} training examples")
    # The last, incomplete batch of an epoch is left out. Each epoch has a new order, so no example
    # is left out for good.
    per_epoch = examples // args.batch
    args.steps = args.steps or args.epochs * per_epoch
    # A small share of the data has few steps per epoch. Validation after every epoch would take
    # most of the time.
    least = args.steps // 200 if few or args.train_fraction is not None else 1
    args.eval_every = args.eval_every or max(per_epoch, least)
    args.data = task.data
    if list(task.data["sizes"]) != list(task.sizes):
        args.changed["sizes"] = list(task.data["sizes"])


def warn_before(args):
    """Warn, before data are made, if a CPU would train for days."""
    prepared = Path(args.data_dir, folder_name(args.task), "meta.json").exists()
    on_gpu = args.device != "cpu" and torch.cuda.is_available()
    if prepared or on_gpu or int(os.environ.get("RANK", 0)) > 0:
        return
    task = declared(args.task)
    share = args.train_fraction or getattr(args, "label_fraction", None) or 1
    per_class = getattr(args, "labels_per_class", None)
    examples = per_class * task.classes if per_class else int(share * task.sizes[0])
    examples = min(examples, task.sizes[0])
    steps = args.steps or args.epochs * (examples // args.batch)
    positions = steps * args.batch * task.documents * task.length
    operations = 6 * count(Backbone(config(args.arch, task))) * positions
    # 1.1e10 a second and core measured on PathX
    days = operations / (1e10 * torch.get_num_threads()) / 86400
    if days > 1:
        print(f"  note: no GPU: about {days:,.0f} days of training (results/costs.md)", flush=True)
