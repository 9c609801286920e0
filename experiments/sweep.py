"""Sweeps over any flags: bash run_all.sh sweep --tasks T --models M --vary lr=1e-3,3e-3 --vary
arch.d=32,64"""

import argparse
import itertools
import shlex
from pathlib import Path

import torch

from engine.flags import MACHINE_FLAGS, flags
from experiments.commands import differing
from experiments.entries import Row, Variant, spt
from files import UserError
from models import Backbone, config
from pretrain import OBJECTIVES
from recipes import INHERITED, arch, number
from tasks import TASKS

# No effect on training from scratch: the flags of the objective.
DENOISING = flags("pretrain", OBJECTIVES).denoising | {"joint"}


def words(text):
    """Split 'a,b' into ['a', 'b']."""
    if not (found := [word for word in text.split(",") if word]):
        raise argparse.ArgumentTypeError(f"must be words separated by commas, got {text!r}")
    return found


def combinations(varied):
    """Return every combination: ['lr=1e-3,3e-3', 'arch.d=32,64'] -> [[(stage or "", flag, key of
    arch or "", value)]]. A flag without values, such as 'freeze', is left out and given. UserError
    for unknown flags."""
    known, found = known_flags(), {}
    names = " ".join(sorted(name.replace("_", "-") for name in set().union(*known.values())))
    for text in varied:
        name, _, values = text.partition("=")
        only, _, rest = name.partition(".") if name.split(".")[0] in known else ("", "", name)
        flag, _, key = rest.replace("-", "_").partition(".")
        stages = [stage for stage in ([only] if only else known) if flag in known[stage]]
        if not values and stages and known[stages[0]][flag] is False and name not in found:
            found[name] = [(only, flag, key, value) for value in (False, True)]
            continue
        if not values.strip(",") or name in found:
            raise UserError(f"--vary wants FLAG=VALUE,VALUE, each flag once; got {text}")
        if not stages or (flag == "arch") != bool(key):
            raise UserError(
                f"--vary {name}: no such flag; choose from: {names}; for arch its keys, such as "
                "arch.d"
            )
        for value in words(values):  # reports a wrong value before anything is planned
            flags(stages[0], OBJECTIVES).parse_args(
                [f"--{flag.replace('_', '-')}", f"{key}={value}" if key else value]
            )
        found[name] = [(only, flag, key, number(value)) for value in words(values)]
    return [*itertools.product(*found.values())]


def known_flags():
    """Return {stage: {flag: its default}}, for the flags by which settings can differ."""
    apart = MACHINE_FLAGS | {"task", "model", "seed", "init"}
    parsers = {
        stage: vars(flags(stage, OBJECTIVES).parse_args([])) for stage in ("pretrain", "finetune")
    }
    return {
        stage: {name: some[name] for name in some.keys() - apart} for stage, some in parsers.items()
    }


def check(chain):
    """Raise UserError or SizeError if a flag or size of these commands is out of bounds."""
    task = None
    for command in chain:
        _, script, *given = shlex.split(command)
        args = flags(Path(script).stem, OBJECTIVES).parse_args(given)
        # stage 2 has the task of stage 1; your data are not prepared yet
        task = task or TASKS.get(args.task)
        if args.arch:
            sizes = arch(args.task, args.model, **args.arch)
            if task:
                with torch.device("meta"):  # builds the model without memory for its weights
                    Backbone(config(sizes, task))
        if args.batch and task and args.batch > task.sizes[0]:
            raise UserError(
                f"--batch {args.batch} is more than the {task.sizes[0]:,} training examples"
            )


def sweep(tasks, models, settings, starts, known):
    """Return rows of tasks x models, with variants of starts x settings (`combinations`). known:
    {stage: {flag: its default}}. A flag applies to every stage that has it; pretrain.lr and
    finetune.lr to that stage only."""
    return [
        Row(
            task,
            model,
            [
                *dict.fromkeys(
                    variant_of(task, model, start, setting, known)
                    for start in starts
                    for setting in settings
                )
            ],
        )
        for task in tasks
        for model in models
    ]


def variant_of(task, model, start, setting, known):
    """Return a variant of a sweep. Its commands have all flags that have a meaning. Its word leaves
    out the recipe's values, so that a setting has the same name in every sweep."""
    pretrained, stages = start in ("spt", "linear_probe"), {"pretrain": {}, "finetune": {}}
    passed_on = INHERITED | {"objective"}
    useless = {
        "pretrain": set() if pretrained else known["pretrain"].keys(),
        "finetune": {"freeze"}
        if start == "joint"
        else DENOISING | passed_on | {"freeze"}
        if (start == "linear_probe")
        else DENOISING | passed_on
        if pretrained
        else DENOISING,
    }
    # flags of one stage last
    for only, flag, key, value in sorted(setting, key=lambda each: each[0] != ""):
        for stage, some in stages.items():
            asked = {"train_fraction"} if only else set()  # stage 2 may have another share
            if only in ("", stage) and flag in known[stage].keys() - (useless[stage] - asked):
                some[flag] = some.get(flag, {}) | {key: value} if key else value
    objective = stages["pretrain" if pretrained else "finetune"].get("objective")
    hows = "pretrain", "spt" if pretrained else start
    first, second = (
        differing(some, task, model, objective, how, known[stage]) if some else {}
        for how, (stage, some) in zip(hows, stages.items())
    )
    of = "-".join(words_of(first))
    word = "-".join(
        [
            *words_of(second),
            *(
                word
                for flag in first
                for word in words_of({flag: first[flag]}, "" if flag in passed_on else "pre-")
            ),
        ]
    )
    first, text = (
        text_of(stages["pretrain"]),
        text_of(({"joint": 1} if start == "joint" else {}) | stages["finetune"]),
    )
    if start == "linear_probe":
        return spt(f"{word}-probe".strip("-"), first, f"{text} --freeze".strip(), of)
    return spt(word, first, text, of) if pretrained else Variant(start, word, text)


def words_of(flags, prefix=""):
    """Return the words of a setting in names of runs: {"lr": 0.01, "arch": {"d": 64}} -> ['lr0.01',
    'd64']."""
    return [
        word
        for flag, value in flags.items()
        for word in (
            [f"{key}{each}" for key, each in value.items()]
            if isinstance(value, dict)
            else [f"{prefix}{flag.replace('_', '-')}{value if value is not True else ''}"]
            * (value is not False)
        )
    ]


def text_of(flags):
    """Write flags as text that `given` reads: {"lr": 0.01, "arch": {"d": 64}} -> '--arch d=64 --lr
    0.01'."""
    values = {
        flag: ",".join(f"{key}={each}" for key, each in sorted(value.items()))
        if isinstance(value, dict)
        else value
        for flag, value in sorted(flags.items(), key=lambda pair: (pair[0] != "joint", pair[0]))
    }
    return " ".join(
        f"--{flag.replace('_', '-')}" + (f" {value}" if value is not True else "")
        for flag, value in values.items()
        if value is not False
    )
