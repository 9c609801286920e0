"""Sweeps over any flags: bash run_all.sh sweep --tasks T --models M --vary lr=1e-3,3e-3 --vary
arch.d=32,64"""

import argparse
import itertools
from collections import namedtuple

from engine.flags import NOT_DEFINING, flags
from experiments.entries import Row, Variant
from files import UserError
from pretrain import OBJECTIVES

# The flags of the objective: no effect on training from scratch.
DENOISING = {
    flag
    for flag, starts in flags("finetune", OBJECTIVES).starts.items()
    if "joint" in starts and "scratch" not in starts
}


# One value of --vary. stage: the only one that it is for, or ""; key: of --arch, or ""; value: its
# text, "" for a switch that is given, None for one that is left out.
Choice = namedtuple("Choice", "stage flag key value")


def words(text):
    """Split 'a,b' into ['a', 'b']."""
    parts = [part for part in text.split(",") if part]
    if not parts:
        raise argparse.ArgumentTypeError(f"must be words separated by commas, got {text!r}")
    return parts


APART = NOT_DEFINING | {"task", "model", "seed", "init"}  # a sweep does not vary these


def parsers():
    return {stage: flags(stage, OBJECTIVES) for stage in ("pretrain", "finetune")}


def combinations(varied):
    """Return every combination of values: ['lr=1e-3,3e-3', 'pretrain.arch.d=32'] ->
    [[Choice("", "lr", "", "1e-3"), Choice("pretrain", "arch", "d", "32")], ...]."""
    stages = parsers()
    names = sorted(set().union(*(parser.starts for parser in stages.values())) - APART)
    choices = {}
    for text in varied:
        name, _, values = text.partition("=")
        stage, _, rest = name.partition(".")
        if stage not in stages:
            stage, rest = "", name
        flag, _, key = rest.replace("-", "_").partition(".")
        readers = [parser for only, parser in stages.items() if stage in ("", only)]
        readers = [parser for parser in readers if flag in parser.starts.keys() - APART]
        if not readers or (flag == "arch") != bool(key):
            raise UserError(
                f"--vary {name}: no such flag; choose from: {' '.join(names).replace('_', '-')}; "
                "for arch its keys, such as arch.d"
            )
        switch = readers[0].get_default(flag) is False
        if name in choices or bool(values.strip(",")) == switch:
            raise UserError(f"--vary {text}: must be FLAG=VALUE,VALUE or a switch, each flag once")
        texts = [None, ""] if switch else words(values)
        choices[name] = [Choice(stage, flag, key, value) for value in texts]
    return [*itertools.product(*choices.values())]


def sweep(tasks, models, settings, starts):
    """Return rows of tasks x models, with variants of starts x settings (`combinations`)."""
    meanings = {stage: parser.starts for stage, parser in parsers().items()}
    variants = [variant_of(start, setting, meanings) for start in starts for setting in settings]
    variants = [*dict.fromkeys(variants)]
    return [Row(task, model, variants) for task in tasks for model in models]


def variant_of(start, setting, meanings):
    """Return a variant with those flags of a setting that have a meaning (`starts` of a parser)."""
    if start in ("scratch", "joint"):
        return Variant(start, "", text_of(start, "finetune", setting, meanings))
    first = text_of("pretrain", "pretrain", setting, meanings)
    # Finetuning takes these over; only another share of the data may be asked for.
    second = [
        choice
        for choice in setting
        if choice.flag not in ("objective", "train_fraction")
        or (choice.stage, choice.flag) == ("finetune", "train_fraction")
    ]
    return Variant("spt", "", text_of(start, "finetune", second, meanings), first)


def text_of(start, stage, setting, meanings):
    """Write the flags of a setting that have a meaning for a start of a stage."""
    values = {"joint": "1"} if start == "joint" else {}
    sizes = {}
    group = "spt" if start == "linear_probe" else start
    for choice in sorted(setting, key=lambda choice: choice.stage != ""):  # a stage's own win
        if choice.stage not in ("", stage) or group not in meanings[stage].get(choice.flag, ()):
            continue
        if choice.key:
            sizes[choice.key] = choice.value
        else:
            values[choice.flag] = choice.value
    if sizes:
        values["arch"] = ",".join(f"{key}={value}" for key, value in sorted(sizes.items()))
    if start == "linear_probe":
        values["freeze"] = ""
    return written(values)


def written(values):
    """Write flags: {"lr": "0.01", "freeze": "", "fresh": None} -> '--freeze --lr 0.01'."""
    return " ".join(
        f"--{flag.replace('_', '-')} {value}".strip()
        for flag, value in sorted(values.items())
        if value is not None
    )
