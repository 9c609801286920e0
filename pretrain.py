"""Stage 1, self-pretraining (SPT): learn to reconstruct the task's own training inputs. No labels, no other data.

    python pretrain.py --task listops_demo --model transformer    under a minute on one CPU core
    python pretrain.py --task pathx --model s4                    the paper's run, on one GPU
    torchrun --nproc-per-node=4 pretrain.py --task pathx --model s4
    python pretrain.py --task pathx --model s4 --help             every flag with the paper's value for this pair

Two objectives (paper, section 2):
    masked   each position is hidden with a fixed probability and predicted from both sides
    causal   each position is predicted from those before it; the model itself is unidirectional
The result is a run directory with the weights that predicted the validation split best, `best.pt`. Hand it to
`finetune.py --init`. Read "The objective" below, then `main`; the plumbing at the end is shared with finetune.py.
"""
import argparse
import contextlib
import fcntl
import json
import math
import os
import platform
import subprocess
import sys
import time
import warnings
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from data import MASK, TASKS, UserError, choose_positions, load, load_task, normalise, order, prepare
from models import SIZES, Backbone, Denoiser, SSMLayer, arch, count, inside, param_groups, read_table

# Learning rate, batch and weight decay: paper, tables 4 to 6 (its values for PT), and S4's weight decay Gu et al. 2022.
# Epochs, warm-up and schedule: the official configurations (rotary, which has none on LRA: those of the sinusoidal row,
# on Image those of sCIFAR). Masking ratio: `Task.mask`. epochs is the longest run: the best checkpoint counts.
# Retrieval: a batch counts pairs. Pythia is finetuned only (see finetune.py). The paper's misprints, as read here:
#   Pathfinder and PathX have two "Masked" rows; the second is the causal one, by elimination.
#   Image, Transformer, masked: the learning rate "1e03" is 1e-3.
#   Text, S4 + Rand Init + SPT and Image, DLR + Rand Init + SPT have three numbers, not four: pretraining has
#   finetuning's rate.
RECIPES = """
task             model        objective  loss    lr    wd  batch  epochs  steps  warmup  schedule
listops          transformer  masked       ce  1e-3   0.1    128     100      -    2000  constant
listops          transformer  causal       ce  5e-4   0.1     32     100      -    2000  constant
listops          rotary       masked       ce  1e-3  0.05    256     100      -    2000  constant
listops          s4           masked       ce  1e-3  0.05    128     100      -    2000  constant
listops          s4_rand      masked       ce  1e-3  0.05     32     100      -    2000  constant
listops          dlr          masked       ce  1e-3  0.05    128     100      -    2000  constant
listops          dlr_rand     masked       ce  5e-4  0.05     32     100      -    2000  constant
text             transformer  masked       ce  5e-4   0.1     32      32      -    5000  constant
text             transformer  causal       ce  1e-3   0.1     32      32      -    5000  constant
text             rotary       masked       ce  5e-4   0.1      8      32      -    5000  constant
text             s4           masked       ce  5e-4  0.05      8      32      -    1000  constant
text             s4_rand      masked       ce  1e-3  0.05     32      32      -    1000  constant
text             dlr          masked       ce  5e-4  0.05      8      32      -    1000  constant
text             dlr_rand     masked       ce  5e-4  0.05      8      32      -    1000  constant
retrieval        transformer  masked       ce  5e-3     0     32      32      -    2000  constant
retrieval        transformer  causal       ce  5e-3     0     32      32      -    2000  constant
retrieval        rotary       masked       ce  5e-3     0     32      32      -    2000  constant
retrieval        s4           masked       ce  5e-4  0.05      8      20      -    2500  constant
image            transformer  masked       l1  1e-3     0     32      50      -    2500  constant
image            transformer  causal       l1  5e-3     0     32      50      -    2500  constant
image            rotary       masked       l1  1e-3     0     32     200      -    2000  constant
image            s4           masked       l1  1e-3  0.05     32     200      -    1000  constant
image            s4_rand      masked       l1  1e-3  0.05     32     200      -    1000  constant
image            dlr          masked       l1  1e-3  0.05     32     200      -    1000  constant
image            dlr_rand     masked       l1  1e-3  0.05     32     200      -    1000  constant
pathfinder       transformer  masked       ce  1e-3     0     16      50      -    2500  constant
pathfinder       transformer  causal       ce  1e-3     0    128      50      -    2500  constant
pathfinder       rotary       masked       ce  1e-3     0     32      50      -    2500  constant
pathfinder       s4           masked       ce  1e-3  0.03      8     200      -    2500  constant
pathx            transformer  masked       ce  5e-4     0      8     200      -    5000  constant
pathx            transformer  causal       ce  1e-3     0      8     200      -    5000  constant
pathx            rotary       masked       ce  1e-3     0      8     200      -    5000  constant
pathx            s4           masked       ce  1e-3  0.05      8      50      -    5000  constant
pathx            s4_rand      masked       ce  1e-3  0.05      4      50      -    5000  constant
pathx            dlr          masked       ce  5e-4  0.05      8      50      -    5000  constant
pathx            dlr_rand     masked       ce  5e-4  0.05      8      50      -    5000  constant
pathx256         s4           masked       ce  1e-3  0.05      8      50      -    5000  constant
sc               rotary       masked       l1  1e-3     0      8     200      -    2000  constant
sc               rotary       causal       l1  1e-3     0     32     200      -    2000  constant
sc               s4           masked       l1  1e-3  0.05     32      40      -    1000  cosine
sc               s4           causal       l1  1e-3  0.05     32      40      -    1000  cosine
scifar           rotary       masked       l1  1e-3     0     32     200      -    2000  constant
scifar           s4           masked       l1  1e-3  0.05     32     200      -    2000  constant
bidmc_hr         rotary       masked       l1  5e-4     0     16     500      -     500  constant
bidmc_hr         s4           masked       l1  1e-3  0.05     64     500      -     500  constant
bidmc_rr         rotary       masked       l1  5e-4     0     16     500      -     500  constant
bidmc_rr         s4           masked       l1  1e-3  0.05     64     500      -     500  constant
bidmc_spo2       rotary       masked       l1  5e-4     0     16     500      -     500  constant
bidmc_spo2       s4           masked       l1  1e-3  0.05     64     500      -     500  constant
"""

# Not the paper's: the demos, and the stand-ins of `run_all.sh --preset mini`. In finetune.py, training from scratch has
# the steps of both stages together in the demos, and as in the paper those of finetuning alone in the stand-ins.
SMALL_RECIPES = """
task                   model                   objective     loss   lr wd batch steps warmup schedule eval_every
text256                rotary                  masked          ce 3e-3  0    16  4000     50 cosine            -
text256                s4                      masked          ce 4e-3  0    16  4000     50 cosine            -
text_demo              rotary                  masked          ce 3e-3  0    32  1300     50 cosine            -
text_demo              s4|s4_rand|dlr|dlr_rand masked          ce 4e-3  0    32  1300     50 cosine            -
listops_demo           transformer|rotary      masked          ce 2e-3  0    32   700     50 cosine            -
listops_demo           s4                      masked          ce 4e-3  0    32   700     50 cosine            -
pathfinder_demo        transformer|rotary      masked          ce 3e-3  0    16  1300     50 cosine            -
pathfinder_demo        s4|s4_rand|dlr|dlr_rand masked          ce 1e-2  0    16  1000     50 cosine            -
listops_mini           transformer|rotary      masked|causal   ce 3e-3  0    16   2000     50 cosine          200
listops_mini           s4|s4_rand|dlr|dlr_rand masked          ce 4e-3  0    16   2000     50 cosine          200
text_mini              transformer|rotary      masked|causal   ce 3e-3  0    16  2000     50 cosine          200
text_mini              s4|s4_rand|dlr|dlr_rand masked          ce 4e-3  0    16  2000     50 cosine          200
image_mini|scifar_mini transformer|rotary      masked|causal   l1 3e-3  0    16  1000     50 cosine          200
image_mini|scifar_mini s4|s4_rand|dlr|dlr_rand masked          l1 4e-3  0    16  1000     50 cosine          200
pathfinder_mini        transformer|rotary      masked|causal   ce 3e-3  0    16  1200     50 cosine          200
pathfinder_mini        s4                      masked          ce 1e-2  0    16  1200     50 cosine          200
pathx_mini             transformer|rotary      masked|causal   ce 3e-3  0    16  1300     50 cosine          200
pathx_mini             s4|s4_rand|dlr|dlr_rand masked          ce 1e-2  0    16  1000     50 cosine          200
pathx256_mini          s4                      masked          ce 1e-2  0    16  1000     50 cosine          200
"""

# With --train-fraction these rows take the place of the above: paper, section 3.4 and appendix C.1.4.
PART_RECIPES = """
task             model        objective  loss    lr    wd  batch  epochs  steps  warmup  schedule  eval_every
text             s4           masked       ce  5e-4  0.05      8       -  40000    1000  constant           -
image            s4           masked       l1  1e-2  0.05     50       -  10000    1000  constant           -
text_mini        s4           masked       ce  4e-3     0     16       -   2000      50  cosine           200
image_mini       s4           masked       l1  4e-3     0     16       -   1000      50  cosine           200
"""

# With --spt-share: what both stages have together, of which pretraining takes the share (paper, table 8, appendix D).
BUDGETS = """
task             epochs  steps
text                 30      -
image               150      -
text_mini             -   2000
image_mini            -   2000
"""

# ---------------------------------------------------------------------------------------------------------------------
# The objective
# ---------------------------------------------------------------------------------------------------------------------


def inputs_of(task, model, x):
    """A raw batch -> what the backbone reads: symbols or, of a continuous task, normalised samples. Pythia reads gray
    levels as symbols, since it knows nothing but tokens (paper, section 3.5)."""
    if task.kind == "tokens":
        return x                                                                              # (b, l) or (b, k, l)
    return x.squeeze(-1).long() if model.startswith("pythia") else normalise(task, x)         # (b, l), (b, l, channels)


def symbols_of(task, model):
    """Number of symbols of the backbone's input layer; None where it reads samples."""
    return task.vocab if task.kind == "tokens" or model.startswith("pythia") else None


def corrupt(task, x, where, lengths):
    """Masked objective: raw batch x and positions where (b, l), or (b, k, l) for k documents -> inputs, targets, where.

    Symbols: a hidden one becomes the <mask> symbol. Samples: a hidden one becomes 0 after normalisation in all its
    channels, and one more channel says which are hidden, since 0 is also an honest value. Every chosen position is
    hidden (none is kept or replaced at random, as BERT would). Padding is never chosen; <eos> may be.
    """
    if lengths is not None:
        where = where & inside(lengths, where.shape[-1])
    if task.kind == "tokens":
        return x.masked_fill(where, MASK), x, where                                           # all of the shape of x
    hidden = where[..., None].float()                                                         # (b, l, 1)
    inputs = torch.cat((normalise(task, x) * (1 - hidden), hidden), -1)                       # (b, l, channels + 1)
    return inputs, x, where


def shift(task, x, lengths):
    """Causal objective: the target at t is the input at t + 1; the last position has none. Shapes as in corrupt."""
    *leading, l = positions_of(task, x)
    targets = torch.roll(x, -1, dims=len(leading))
    ends = torch.full(leading, l, device=x.device) if lengths is None else lengths
    where = inside(ends - 1, l)                                                               # (b, l) or (b, k, l)
    return (x if task.kind == "tokens" else normalise(task, x)), targets, where


def positions_of(task, x):
    """Shape of a batch without its channels: (b, l) or (b, k, l)."""
    return x.shape if task.kind == "tokens" else x.shape[:-1]


def spt_loss(task, prediction, targets, where, loss):
    """Summed loss and summed score over the positions in where: prediction (m, outputs), targets as in the batch.

    ce: cross-entropy over symbols or gray levels 0..255; score: number of right predictions.
    l1: absolute error of the normalised sample, mean over channels; score: negative squared error, mean over channels.
    Sums, not means: micro-batches and processes hold different numbers of hidden positions, and the caller divides by
    the number in the whole batch.
    """
    chosen = targets[where]                                                                   # (m,) or (m, channels)
    if loss == "ce":
        chosen = chosen.reshape(-1).long()
        return F.cross_entropy(prediction.float(), chosen, reduction="sum"), (prediction.argmax(-1) == chosen).sum()
    error = prediction.float() - normalise(task, chosen)
    return error.abs().mean(-1).sum(), -error.square().mean(-1).sum()


def pretext(task, args, x, lengths, rows, *key):
    """One raw batch -> inputs, targets, where, for either objective. rows: which rows of the whole batch these are; the
    positions of the whole batch are drawn everywhere, so that they do not depend on the number of processes."""
    if args.objective == "causal":
        return shift(task, x, lengths)
    _, *documents, l = positions_of(task, x)
    where = choose_positions((len(rows.whole), *documents, task.length), args.mask, *key)[rows.mine]
    return corrupt(task, x, torch.from_numpy(where[..., :l]).to(x.device), lengths)


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation and training
# ---------------------------------------------------------------------------------------------------------------------

@torch.no_grad()
def kernel_maxima(backbone, l):
    """What figure 4 draws (paper, section 3.6): max over channels of |K|, float32 (layers, c, l); None for a model
    without kernels."""
    maxima = [layer.mixer.kernel(l).abs().amax(1) for layer in backbone.layers if isinstance(layer, SSMLayer)]
    return torch.stack(maxima).cpu().numpy() if maxima else None


EVAL_KEY = 1 << 40      # positions hidden in evaluation are the same every time, and none of those of a training step


@torch.no_grad()
def evaluate(model, task, split, args, run):
    """Loss and score per hidden position over a whole split; the score is accuracy (ce) or minus squared error (l1)."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=run.device)
    size = args.micro_batch or args.batch
    for i in range(run.rank, -(-len(split) // size), run.world):
        index = np.arange(i * size, min((i + 1) * size, len(split)))
        x, _, lengths = to_device(split.batch(index), run.device)
        rows = SimpleNamespace(whole=index, mine=slice(None))
        inputs, targets, where = pretext(task, args, x, lengths, rows, args.seed, EVAL_KEY, i)
        with run.autocast():
            prediction = model(inputs, lengths, where)
        loss, score = spt_loss(task, prediction, targets, where, args.loss)
        sums += torch.stack((loss.double(), score.double(), where.sum().double()))
    model.train()
    loss, score, n = run.total(sums).tolist()
    if n == 0:
        raise UserError(f"no position of the validation split is hidden with --mask {args.mask}")
    return loss / n, score / n


def main(argv=None):
    args = parse_args(argv)
    run = setup(args)
    prepare(args.task, args.data_dir)
    task = load_task(args.task, args.data_dir)
    train = load(args.task, "train", args.data_dir, args.train_fraction)
    val = load(args.task, "val", args.data_dir)
    args.data = identity(args)
    total, per_epoch = steps_of(args, len(train))
    resume_from = open_run(args, run)

    # ---- model and optimiser: every process builds the same one --------------------------------------------------
    torch.manual_seed(args.seed)
    masked_samples = args.objective == "masked" and task.kind == "continuous"
    backbone = Backbone(args.arch, task.length, symbols_of(task, args.model), task.channels,
                        mask_channel=masked_samples, causal=args.objective == "causal")
    model = Denoiser(backbone, task.vocab if args.loss == "ce" else task.channels).to(run.device)
    kernels_before = kernel_maxima(backbone, task.length)
    optimizer = torch.optim.AdamW(param_groups(model, args.lr, args.wd), fused=True)
    state = new_state()
    if resume_from is not None:
        state = restore(resume_from, args, model, optimizer)
    plan(args, run, model, optimizer, total, per_epoch, train, val)
    log = Log(args, run, total, state)
    parallel = run.wrap(model, args)

    # ---- training: evaluate, save, stop?, step, log -----------------------------------------------------------
    for step in range(state["step"], total + 1):
        if step == total or (step > 0 and step % args.eval_every == 0):
            if step > state["evaluated"]:                              # not again right after resuming
                with log.pause():
                    loss, score = evaluate(model, task, val, args, run)
                log.evaluation(step, val_loss=loss, val_score=score)
                state["evaluated"] = step
                if score > state["best"]:
                    state.update(best=score, best_step=step)
                    save(args.out / "best.pt", run, args, model)
                log.save(step, state, run, args, model, optimizer)
        if step == total:
            break

        for group in optimizer.param_groups:      # scales each group's own rate: SSM parameters keep theirs
            group["lr"] = group["initial_lr"] * lr_multiplier(step, args.warmup, total, args.schedule)
        seed_dropout(args, step, run)
        rows = batch_rows(len(train), args, step, per_epoch, run)
        x, _, lengths = to_device(train.batch(rows.whole[rows.mine]), run.device)
        inputs, targets, where = pretext(task, args, x, lengths, rows, args.seed, step)
        hidden = run.total(where.sum()).clamp(min=1)                   # in the whole batch, on all processes
        optimizer.zero_grad(set_to_none=True)
        batch_loss = torch.zeros((), device=run.device)
        for part, last in micro_batches(rows, args, run):
            with run.no_sync(parallel, last):
                with run.autocast():
                    ends = None if lengths is None else lengths[part]
                    prediction = parallel(inputs[part], ends, where[part])
                loss, _ = spt_loss(task, prediction, targets[part], where[part], args.loss)
                loss = loss / hidden
                # Outside autocast, which would take the float32 kernels' backward in bfloat16. DDP averages gradients
                # over processes, and we want their sum.
                (loss * run.world).backward()
            batch_loss += loss.detach()
        optimizer.step()
        log.training(step, state, run.total(batch_loss).item(), optimizer)
        log.save_if_due(step + 1, state, run, args, model, optimizer)

    if kernels_before is not None:
        if run.world > 1:
            dist.barrier()                                             # best.pt is written by process 0
        model.load_state_dict(read_checkpoint(args.out / "best.pt")["model"])
        if run.main:
            arrays = dict(before=kernels_before, after=kernel_maxima(backbone, task.length))
            write_atomically(args.out / "kernels.npz", lambda temporary: save_arrays(temporary, arrays))
    log.finish(args, run, state, model, len(train), dict(val_score=state["best"], score_is=(
        "accuracy on predicted positions" if args.loss == "ce" else "minus squared error on predicted samples")))
    run.close()


# ---------------------------------------------------------------------------------------------------------------------
# Plumbing, shared with finetune.py
# ---------------------------------------------------------------------------------------------------------------------


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, where there is one."""

    def _get_help_string(self, action):
        return action.help if action.default is None else super()._get_help_string(action)


def base_parser(description, stage):
    """The flags both stages have -> parser, and its first two groups for what a stage adds. Defaults that the recipe
    decides are filled in by `apply_recipe`."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False, formatter_class=HelpFormatter)
    what = parser.add_argument_group("what to run")
    what.add_argument("--task", help="one of: " + " ".join(TASKS))
    what.add_argument("--model", help="transformer (sinusoidal positions), rotary, s4, dlr; s4_rand and dlr_rand: with "
                                      "nothing set by hand at the start; finetune.py also: pythia, pythia_rand")
    what.add_argument("--size", help="100k, 300k, 1m, 3m or 10m parameters (Image, rotary and s4: table 9)")
    what.add_argument("--objective", choices=("masked", "causal"),
                      help="masked: bidirectional; causal: unidirectional, predicts the next position; with --init: "
                           "that of the pretraining run")
    what.add_argument("--spt-share", type=float,
                      help="share of a fixed budget that pretraining takes, finetuning gets the rest; 0 for finetuning "
                           "from scratch (text and image: table 8)")
    what.add_argument("--seed", type=int, default=0, help="of weights, data order and hidden positions")
    what.add_argument("--data-dir", default="data", help="where prepared data sets live")
    what.add_argument("--out", type=Path, help=f"run directory (default: runs/TASK-MODEL-OBJECTIVE-{stage}-sSEED, and "
                                                 "size and fraction where given)")
    what.add_argument("--resume", action="store_true", help="go on exactly where the run in --out was stopped")
    recipe = parser.add_argument_group("recipe (the paper's values; your flags win)")
    recipe.add_argument("--lr", type=float, help="learning rate of all but the SSM parameters")
    recipe.add_argument("--wd", "--weight-decay", type=float, help="AdamW weight decay")
    recipe.add_argument("--batch", type=int, help="examples (retrieval: pairs) per optimiser step, over all GPUs and "
                                                  "micro-batches")
    recipe.add_argument("--epochs", type=int, help="longest run, in epochs")
    recipe.add_argument("--steps", type=int, help="longest run, in optimiser steps; wins over --epochs")
    what.add_argument("--train-fraction", type=float,
                      help="share of the training examples to use at both stages, with the recipe of figure 3 where "
                           "there is one (text and image with s4); smaller shares lie within larger ones")
    recipe.add_argument("--warmup", type=int, help="steps of linear warm-up")
    recipe.add_argument("--schedule", choices=("constant", "cosine", "step"),
                        help="after warm-up; cosine reaches 0 at the end; step halves the rate after each fifth of the "
                             "run")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--micro-batch", type=int, help="examples per forward pass; halve it when memory runs out")
    machine.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto: GPU if there is one")
    machine.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"),
                         help="auto: bfloat16 autocast on a GPU that has it, else float32")
    machine.add_argument("--compile", action="store_true", help="torch.compile the backbone")
    machine.add_argument("--eval-every", type=int, help="steps between evaluations (default: an epoch; with "
                                                       "--train-fraction at least a 200th of the run)")
    machine.add_argument("--log-every", type=int, default=100, help="steps between log lines")
    return parser, what, recipe


MACHINE_FLAGS = {"resume", "device", "dtype", "compile", "log_every", "out", "data_dir"}      # do not define the run


def parse_args(argv=None):
    """Flags of stage 1: the recipe's row for (task, model, objective) gives the defaults."""
    parser, _, recipe = base_parser(__doc__.splitlines()[0], "pretrain")
    recipe.add_argument("--mask", type=float, help="masking ratio: probability that a position is hidden")
    recipe.add_argument("--loss", choices=("ce", "l1"), help="cross-entropy over symbols or gray levels, or L1")
    # A masked row's ratio is its task's.
    rows = [row | ({"mask": TASKS[row["task"]].mask} if row["objective"] == "masked" else {})
            for row in rows_of(PART_RECIPES, RECIPES, SMALL_RECIPES)]
    args = apply_recipe(parser, argv, rows, lambda first: dict(
        task=first.task, model=first.model, objective=first.objective, part=first.train_fraction is not None))
    if args.objective == "causal" and args.mask is not None:
        raise UserError(f"--mask {args.mask} has no meaning with --objective causal")
    if args.objective == "masked" and not 0 < args.mask < 1:
        raise UserError(f"--mask must lie between 0 and 1, got {args.mask}")
    task = TASKS[args.task]
    if args.loss == "l1" and task.kind == "tokens":
        raise UserError(f"--loss l1 needs samples, and {args.task} consists of symbols; use --loss ce")
    if args.loss == "ce" and not (task.kind == "tokens" or (task.side and task.channels == 1)):
        raise UserError(f"--loss ce needs symbols or gray levels, which {args.task} does not consist of; use --loss l1")
    args.out = args.out or run_directory(args, "pretrain")
    return args


def run_directory(args, stage):
    """The default of --out."""
    size = f"-{args.size}" if args.size else ""
    share = f"-share{args.spt_share:g}" if args.spt_share is not None else ""
    fraction = f"-f{args.train_fraction:g}" if args.train_fraction is not None else ""
    return Path("runs") / f"{args.task}-{args.model}{size}-{args.objective}-{stage}{fraction}{share}-s{args.seed}"


def rows_of(part_recipes, *others):
    """The rows of all tables, those for a part of the data first: where there is none, they give way to the others."""
    return [row | {"part": True} for row in read_table(part_recipes)] + [
        row | {"part": None} for table in others for row in read_table(table)]


def apply_recipe(parser, argv, rows, key_of):
    """Two passes: the first finds out which row, the second parses with that row as defaults, so that explicit flags
    win and --help shows the row's values. Row cells are strings; argparse runs `type=` on string defaults. key_of: from
    the first pass to {column: cell} of the row that is meant; where either is None the column is open, and the first
    row counts."""
    argv = sys.argv[1:] if argv is None else argv
    first, _ = parser.parse_known_args([a for a in argv if a not in ("-h", "--help")])
    wanted_help = len(argv) != len([a for a in argv if a not in ("-h", "--help")])
    if wanted_help and None in (first.task, first.model) and getattr(first, "init", None) is None:
        parser.parse_args(argv)                                        # prints help without a row, and exits
    key = key_of(first)
    for name in ("task", "model"):
        if key[name] is None:
            known = sorted({row[name] for row in rows})
            raise UserError(f"--{name} is missing; one of: {' '.join(known)}")
    matching = [row for row in rows if all(v is None or row[k] in (None, v) for k, v in key.items())]
    if not matching:
        same = [row for row in rows if row["task"] == key["task"]] or rows
        pairs = sorted({f"{row['task']}/{row['model']}/{row['objective']}" for row in same})
        asked = "/".join(v for v in key.values() if isinstance(v, str))
        raise UserError(f"no recipe for {asked}; there is: {' '.join(pairs)}")
    row = matching[0]
    if first.spt_share is not None:
        row = row | budget_of(row["task"], first.spt_share, "start" in row)
    parser.set_defaults(**row)
    recipe, args = vars(parser.parse_args([])), parser.parse_args(argv)
    args.task, args.model, args.objective = row["task"], row["model"], row["objective"]
    args.arch = arch(args.task, args.model, args.size)
    if args.arch is None:
        sizes = {}
        for r in read_table(SIZES):
            sizes.setdefault(f"{r['task']}/{r['model']}", []).append(r["size"])
        raise UserError(f"no --size {args.size} for {args.task}/{args.model}; there is: "
                        + "; ".join(f"{pair}: {' '.join(names)}" for pair, names in sizes.items()))
    if args.epochs != recipe["epochs"] and args.steps == recipe["steps"]:
        args.steps = None                                              # --epochs was asked for, --steps was not
    # What the user changed: a run with a non-empty list is never reported as the recipe's.
    free = MACHINE_FLAGS | {"task", "model", "size", "spt_share", "objective", "seed", "init"}
    free |= {"train_fraction"} if row["part"] else set()
    args.changed = {k: getattr(args, k) for k in recipe if k not in free and getattr(args, k) != recipe[k]}
    check_numbers(args)
    return args


def budget_of(task, share, second_stage):
    """{epochs, steps} of a stage under --spt-share."""
    row = next((row for row in read_table(BUDGETS) if row["task"] == task), None)
    if row is None:
        raise UserError(f"no --spt-share for {task}; there is: {' '.join(r['task'] for r in read_table(BUDGETS))}")
    if not 0 <= share < 1:
        raise UserError(f"--spt-share must lie between 0 and 1, got {share}")
    share = 1 - share if second_stage else share
    return {unit: round(int(row[unit]) * share) if unit in row else None for unit in ("epochs", "steps")}


def check_numbers(args):
    """UserError for a number that has no meaning."""
    if args.train_fraction is not None and not 0 < args.train_fraction <= 1:
        raise UserError(f"--train-fraction must lie above 0 and not above 1, got {args.train_fraction}")
    for name in ("lr", "wd", "warmup", "seed"):
        if not (math.isfinite(getattr(args, name)) and getattr(args, name) >= 0):
            raise UserError(f"--{name} must be a number from 0 up, got {getattr(args, name)}")
    if args.seed >= 2**63:
        raise UserError(f"--seed must be below 2^63, got {args.seed}")
    for name in ("batch", "steps", "epochs", "micro_batch", "eval_every", "log_every"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")


def setup(args):
    """Processes, device and number format, each decision printed with its reason. Returns a small namespace."""
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1 and not {"RANK", "MASTER_ADDR"} <= os.environ.keys():
        raise UserError(f"WORLD_SIZE is {world}, but RANK or MASTER_ADDR is not set; start with torchrun")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no CUDA device; use --device cpu")
    cuda = args.device != "cpu" and torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(f"cuda:{local}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world > args.batch:
        raise UserError(f"--batch {args.batch} is smaller than the number of processes, {world}")
    if world > 1:
        dist.init_process_group("nccl" if cuda else "gloo")
    bf16 = args.dtype == "bfloat16" or (args.dtype == "auto" and cuda and torch.cuda.is_bf16_supported())
    why = "--dtype" if args.dtype != "auto" else "CUDA with bfloat16" if bf16 else f"{device.type}, autocast off"
    run = SimpleNamespace(world=world, rank=rank, device=device, main=rank == 0,
                          dtype="bfloat16" if bf16 else "float32")
    run.say = lambda text: print(text, flush=True) if run.main else None
    run.say(f"device {device} x {world}; {run.dtype} ({why}); SSM kernels and convolutions always float32")

    def total(tensor):
        """Sum over processes."""
        if world > 1:
            dist.all_reduce(tensor)
        return tensor

    def wrap(model, args):
        """Compile in place (so that saved keys keep their names), then DDP."""
        if args.compile:
            model.backbone.compile()
        if world == 1:
            return model
        with warnings.catch_warnings():          # newer torch renames broadcast_buffers, older knows no other name
            warnings.simplefilter("ignore", FutureWarning)
            # Buffers are equal on all processes already: BatchNorm counts the whole batch.
            return torch.nn.parallel.DistributedDataParallel(model, device_ids=[local] if cuda else None,
                                                             broadcast_buffers=False)

    run.total, run.wrap = total, wrap
    run.autocast = lambda: torch.autocast(device.type, torch.bfloat16, enabled=bf16)
    # Gradients are exchanged on the last micro-batch only.
    run.no_sync = lambda model, last: contextlib.nullcontext() if world == 1 or last else model.no_sync()

    def close():
        """All processes together: one that leaves early takes the others' connections with it."""
        if world > 1:
            # The handle is kept. Otherwise gloo's thread may be the last to drop it, for which it needs the
            # interpreter's lock, while the group's destructor holds that lock and waits for the thread: some runs never
            # exited.
            run.last_barrier = dist.barrier(async_op=True)
            run.last_barrier.wait()
            dist.destroy_process_group()

    run.close = close
    return run


def to_device(batch, device):
    return tuple(None if tensor is None else tensor.to(device, non_blocking=True) for tensor in batch)


def steps_of(args, n):
    """Total steps and steps per epoch for n training sequences. The last, incomplete batch of an epoch is left out; the
    next epoch's order differs, so no sequence is left out for good."""
    if n < args.batch:
        share = f" with --train-fraction {args.train_fraction:g}" if args.train_fraction is not None else ""
        raise UserError(f"--batch {args.batch} is more than the {n} training sequences there are{share}")
    per_epoch = n // args.batch
    total = args.steps or args.epochs * per_epoch
    # On a small share of the data an epoch is a few steps, and validation would take most of the time.
    least = total // 200 if args.train_fraction is not None else 1
    args.eval_every = args.eval_every or max(per_epoch, least)
    return total, per_epoch


def batch_rows(n, args, step, per_epoch, run):
    """Which sequences make up this step's batch (whole) and which of them are this process's (mine): a pure function of
    seed and step, so there is no sampler state to save."""
    epoch, i = divmod(step, per_epoch)
    whole = _order(n, args.seed, epoch)[i * args.batch:(i + 1) * args.batch]
    bounds = [len(whole) * r // run.world for r in (run.rank, run.rank + 1)]
    return SimpleNamespace(whole=whole, mine=slice(*bounds))


def seed_dropout(args, step, run):
    """What is dropped depends on seed, step and process only, so that a resumed run drops the same. Another number of
    processes or micro-batches drops other channels, with the same probability."""
    torch.manual_seed(int(np.random.SeedSequence([args.seed, step, run.rank]).generate_state(1, np.uint64)[0]))


_last_order = {}


def _order(n, seed, epoch):
    """One epoch's order, kept until the next is asked for: shuffling 160,000 numbers at every step would be felt."""
    if (n, seed, epoch) not in _last_order:
        _last_order.clear()
        _last_order[n, seed, epoch] = order(n, seed, epoch)
    return _last_order[n, seed, epoch]


def new_state():
    """Loop state beyond weights and optimiser; all of it goes into last.pt."""
    return dict(step=0, evaluated=0, best=-math.inf, best_step=0, seconds=0.0, loss_sum=0.0, loss_steps=0)


def micro_batches(rows, args, run):
    """Slices of this process's rows, at most --micro-batch each, and whether each is the last. Every process makes
    equally many, whatever its share of the batch, because BatchNorm and DDP meet in each of them."""
    largest, smallest = -(-len(rows.whole) // run.world), len(rows.whole) // run.world
    parts = min(-(-largest // (args.micro_batch or largest)), smallest)
    n = rows.mine.stop - rows.mine.start
    bounds = [n * i // parts for i in range(parts + 1)]
    return [(slice(a, b), i + 1 == parts) for i, (a, b) in enumerate(zip(bounds, bounds[1:]))]


def lr_multiplier(step, warmup, total, schedule):
    """Factor of every group's initial learning rate: linear warm-up, then constant, half a cosine down to 0, or steps:
    a half after each fifth of the run."""
    if step < warmup:
        return (step + 1) / warmup
    if schedule == "constant":
        return 1.0
    if schedule == "step":
        return 0.5 ** (5 * step // total)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


# ---- run directory ---------------------------------------------------------------------------------------------------


def write_atomically(path, write):
    """write(temporary path), flush to disk, rename: a kill at any moment leaves the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:                           # torch.save reports a full disk as RuntimeError
        temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {str(error).splitlines()[0]}") from None


def save_arrays(path, arrays):
    with open(path, "wb") as file:                                     # np.savez would add .npz to the temporary name
        np.savez(file, **arrays)


def write_json(path, record):
    write_atomically(path, lambda temporary: temporary.write_text(json.dumps(record, indent=1, default=str) + "\n"))


def config_of(args):
    """What defines the run; saved in config.json and inside each checkpoint."""
    return json.loads(json.dumps({k: v for k, v in vars(args).items() if k not in MACHINE_FLAGS}, default=str))


def identity(args):
    """Which data set this is: a resumed or finetuned run must see the one that it began with."""
    folder = Path(args.data_dir) / args.task
    meta = read_json(folder / "meta.json")
    labels = zlib.crc32(b"".join((folder / f"{split}_y.npy").read_bytes() for split in ("train", "val", "test")))
    source = "generated" if meta["source"] == "generated" else "official files"        # wherever they lie
    return dict(source=source, seed=meta["seed"], sizes=meta["sizes"], labels=labels) | (
        {"grouped": True} if meta["grouped"] else {})


def open_run(args, run):
    """Makes the run directory or, with --resume, checks that it is this run's. Returns the checkpoint to go on from, or
    None. A directory in which no checkpoint was written yet may be begun again with other flags."""
    last, config = args.out / "last.pt", args.out / "config.json"
    finished = args.resume and (args.out / "result.json").exists()
    if run.main:
        there = {p.name for p in args.out.iterdir() if p.suffix != ".tmp"} - {".lock"} if args.out.is_dir() else set()
        if there and not args.resume:
            raise UserError(f"run directory {args.out} is not empty; add --resume to go on, or choose another --out")
        if there and "config.json" not in there:
            raise UserError(f"--resume: {args.out} has no config.json; it is not a run directory")
        if finished:
            read_json(args.out / "result.json")
        if there & {"last.pt", "result.json"}:
            saved, ours = read_json(config), config_of(args)
            new = sorted(ours.keys() - saved.keys())
            if new and not finished:
                raise UserError(f"--resume: {args.out} was started by a version of this code that knew no {new[0]}; "
                                "choose another --out")
            # The flag that was given first, then what follows from it.
            keys = [] if new else sorted((saved.keys() | ours.keys()) - {"changed"},
                                         key=lambda key: (key not in ("size", "train_fraction"), key))
            for key in keys:
                if saved.get(key) != ours.get(key):
                    raise UserError(f"--resume: {args.out} was started with {key} = {saved.get(key)}, "
                                    f"now {ours.get(key)}; give the same flags as before, or choose another --out")
        if not finished:
            try:
                args.out.mkdir(parents=True, exist_ok=True)
                run.lock = open(args.out / ".lock", "w")               # held until this process ends
                fcntl.lockf(run.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{args.out} is in use by another process") from None
            except OSError as error:
                raise UserError(f"cannot write to --out {args.out}: {error.strerror}") from None
            write_json(config, config_of(args))
    if finished:
        run.say(f"{args.out} is finished; nothing to do")
        run.close()
        raise SystemExit(0)
    if run.world > 1:
        dist.barrier()
    return last if args.resume and last.exists() else None


def read_json(path):
    try:
        record = json.loads(Path(path).read_text())
    except OSError:
        raise UserError(f"{path} cannot be read; is {Path(path).parent} a run directory?") from None
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise UserError(f"{path} is damaged: it should hold a JSON object")
    return record


def read_checkpoint(path):
    """A checkpoint on the CPU. Only tensors and plain values are ever unpickled (weights_only)."""
    if not Path(path).exists():
        raise UserError(f"checkpoint {path} does not exist")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        checkpoint["model"], checkpoint["config"]
    except Exception as error:
        raise UserError(f"{path} is not a checkpoint of this project, or it is cut short "
                        f"({type(error).__name__})") from None
    return checkpoint


def save(path, run, args, model, **more):
    """model, config and whatever else, by process 0."""
    if run.main:
        record = dict(model=model.state_dict(), config=config_of(args), **more)
        write_atomically(path, lambda temporary: torch.save(record, temporary))


def restore(path, args, model, optimizer):
    """Weights, optimiser and loop state from last.pt of the same run."""
    checkpoint = read_checkpoint(path)
    if checkpoint["config"].get("arch") != config_of(args)["arch"]:
        raise UserError(f"{path} holds another architecture: {checkpoint['config'].get('arch')}")
    try:
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        state = checkpoint["state"]
    except (KeyError, RuntimeError, ValueError) as error:
        raise UserError(f"{path} does not fit this model: {str(error).splitlines()[0]}") from None
    # best.pt is needed at the end: better to hear now than then that it is gone.
    if state["best_step"] and read_checkpoint(path.with_name("best.pt"))["config"] != config_of(args):
        raise UserError(f"{path.with_name('best.pt')} belongs to another run")
    return state


def environment(run):
    """What a reader needs to place a number: versions, commit, hardware."""
    here = Path(__file__).resolve().parent
    try:
        commit = subprocess.run(["git", "-C", here, "describe", "--always", "--dirty", "--abbrev=10"],
                                capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:                                                    # no git on this machine
        commit = "unknown"
    name = torch.cuda.get_device_name(run.device) if run.device.type == "cuda" else f"CPU ({platform.machine()})"
    return dict(commit=commit, torch=torch.__version__, python=platform.python_version(), device=name,
                processes=run.world, threads=torch.get_num_threads(), dtype=run.dtype)


def plan(args, run, model, optimizer, total, per_epoch, train, val):
    """Everything that was decided, before the first step."""
    run.say(f"{args.task} / {args.model} / {args.objective}: {count(model):,} parameters; "
            f"{len(train):,} training and {len(val):,} validation sequences")
    for group in optimizer.param_groups:
        numbers = sum(p.numel() for p in group["params"])
        run.say(f"  {group['name']:5} {numbers:11,} parameters, lr {group['initial_lr']:g}, "
                f"weight decay {group['weight_decay']:g}")
    share = f"{args.batch} sequences a step"
    if run.world > 1 or args.micro_batch:
        share += f" = {run.world} processes x up to {-(-args.batch // run.world)}"
        share += f" in micro-batches of {args.micro_batch}" if args.micro_batch else ""
    run.say(f"  {total:,} steps = {total / per_epoch:.1f} epochs of {per_epoch:,}; {share}; {args.schedule} schedule, "
            f"{args.warmup} warm-up steps; evaluation every {args.eval_every:,}")
    if args.warmup >= total:
        run.say(f"  note: the run ends before its warm-up of {args.warmup} steps does; --warmup sets it")
    if args.micro_batch and args.arch.get("norm") == "batch":
        run.say("  note: BatchNorm takes its statistics per micro-batch, so --micro-batch changes this model's results")
    run.say(f"  run directory {args.out}" + (f"; differs from the recipe in {args.changed}" if args.changed else ""))


class Log:
    """log.jsonl and the console. Also keeps the clock: seconds spent, milliseconds per step, time left.

    The first record holds argv and environment. On --resume, records past the checkpoint are cut off (they will be
    written again), so the file reads as if nothing had happened.
    """

    SAVE_SECONDS = 600                         # between evaluations, a checkpoint at least this often
    opened = None                              # that of this process, for `guarded` to note what ended it

    def __init__(self, args, run, total, state):
        self.path, self.run, self.total, self.every = args.out / "log.jsonl", run, total, args.log_every
        self.environment = environment(run)
        self.clock = self.saved_at = self.since = time.perf_counter()
        self.seconds_before, self.steps_timed = state["seconds"], 0
        kept = []
        if args.resume and run.main and self.path.is_file():
            for line in self.path.read_text(errors="replace").splitlines():
                try:
                    record = json.loads(line)
                    done = state["evaluated"] if record["kind"] == "eval" else state["step"]
                    if record["step"] <= done:
                        kept.append(json.dumps(record))
                except (ValueError, KeyError, TypeError):
                    break                                              # a line torn by the kill
        if run.main:
            write_atomically(self.path, lambda temporary: temporary.write_text("".join(k + "\n" for k in kept)))
        self.write(dict(kind="resume" if kept else "start", step=state["step"], total=total, argv=sys.argv,
                        **self.environment))
        Log.opened = self

    def write(self, record):
        if self.run.main:
            with open(self.path, "a") as file:
                file.write(json.dumps(record) + "\n")

    @contextlib.contextmanager
    def pause(self):
        """Time spent evaluating does not count as training speed."""
        start = time.perf_counter()
        yield
        self.since += time.perf_counter() - start

    def seconds(self):
        return self.seconds_before + time.perf_counter() - self.clock

    def training(self, step, state, loss, optimizer):
        """Called after each step; writes a line every `every` steps. Stops the run at a loss that is not finite."""
        rates = sorted({group["lr"] for group in optimizer.param_groups}, reverse=True)
        if not math.isfinite(loss):
            gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
            raise UserError(f"loss is {loss} at step {step}: learning rates {', '.join(f'{r:.3g}' for r in rates)}, "
                            f"gradient norm {norm:.3g}; {self.last_good()}")
        state["loss_sum"] += loss
        state["loss_steps"] += 1
        self.steps_timed += 1
        if (step + 1) % self.every:
            return
        now = time.perf_counter()
        pace = (now - self.since) / self.steps_timed
        self.since, self.steps_timed = now, 0
        mean = state["loss_sum"] / state["loss_steps"]
        state.update(loss_sum=0.0, loss_steps=0)
        self.write(dict(kind="train", step=step + 1, loss=mean, lr=rates[0], ms_per_step=round(1000 * pace, 2)))
        minutes, seconds = divmod(int(pace * (self.total - step - 1)), 60)
        left = f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"
        self.run.say(f"step {step + 1:>6}/{self.total}  loss {mean:.4f}  lr {rates[0]:.2e}  "
                     f"{1000 * pace:7.1f} ms/step  time left {left}")

    def last_good(self):
        last = self.path.with_name("last.pt")
        return f"the last good checkpoint is {last}" if last.exists() else "nothing was saved yet"

    def evaluation(self, step, **values):
        if not all(math.isfinite(v) for v in values.values()):
            raise UserError(f"validation at step {step} gave {values}; {self.last_good()}")
        self.write(dict(kind="eval", step=step, **values))
        self.run.say(f"step {step:>6}/{self.total}  " + "  ".join(f"{k} {v:.4f}" for k, v in values.items()))

    def save(self, step, state, run, args, model, optimizer):
        state.update(step=step, seconds=self.seconds())
        with self.pause():
            save(args.out / "last.pt", run, args, model, optimizer=optimizer.state_dict(), state=state)
        self.saved_at = time.perf_counter()

    def save_if_due(self, step, state, run, args, model, optimizer):
        if time.perf_counter() - self.saved_at > self.SAVE_SECONDS:
            self.save(step, state, run, args, model, optimizer)

    def finish(self, args, run, state, model, examples, results):
        """result.json, written last: its presence means that the run is complete."""
        if not run.main:
            return
        if run.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(run.device)
        else:
            import resource
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        record = dict(results, task=args.task, model=args.model, size=args.size, objective=args.objective,
                      train_fraction=args.train_fraction, spt_share=args.spt_share, seed=args.seed, steps=self.total,
                      epochs=round(self.total / (examples // args.batch), 2), best_step=state["best_step"],
                      parameters=count(model), train_examples=examples, data=args.data, changed=args.changed,
                      full_recipe=not args.changed and "grouped" not in args.data
                      and args.data["sizes"] == list(TASKS[args.task].sizes),
                      seconds=round(self.seconds(), 1), peak_memory_bytes=peak, **self.environment)
        write_json(args.out / "result.json", record)
        run.say(f"done in {record['seconds']:.0f} s: best at step {state['best_step']}; "
                + "  ".join(f"{k} {v:.4f}" for k, v in results.items() if isinstance(v, float))
                + f"; wrote {args.out / 'result.json'}")


def guarded(main):
    """Runs a stage's main; a user's mistake is one line and exit code 2, Ctrl-C is one line and exit code 130. The log
    gets a last record that says what went wrong, for `analyze.py watch`; --resume takes it away again."""
    def note(text):
        if Log.opened is not None:
            with contextlib.suppress(OSError):                         # the disk may be what went wrong
                Log.opened.write(dict(kind="error", error=text))

    try:
        main()
    except (UserError, torch.OutOfMemoryError) as error:
        text = str(error) if isinstance(error, UserError) else "out of GPU memory; give a smaller --micro-batch"
        note(text)
        print(f"error: {text}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        note("interrupted")
        print("\ninterrupted; the same command with --resume goes on from the last checkpoint", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        note(f"{type(error).__name__}: {error}")
        raise


if __name__ == "__main__":
    guarded(main)
