"""Stage 1, self-pretraining (SPT): learn to reconstruct the task's own training inputs. No labels,
no other data.

    # about a minute on one CPU core
    python pretrain.py --task pathfinder_demo --model transformer
    # the paper's run, on one GPU, or on four
    python pretrain.py --task pathx --model s4
    torchrun --nproc-per-node=4 pretrain.py --task pathx --model s4
    # the flags, and the recipe and sizes of this pair
    python pretrain.py --task pathx --model s4 --help

Two objectives (paper, section 2):
    masked   hide each position with a fixed probability and predict it from both sides
    causal   predict each position from those before it. The model must not see ahead, so it
             differs in both stages: causal attention, or state space kernels in one direction only
For example, an expression of ListOps (X closes a bracket) with its second and fifth symbols hidden:
    the sequence      [MAX     4        [MIN     2     3        X     0    X    <eos>
    masked   input    [MAX     <mask>   [MIN     2     <mask>   X     0    X    <eos>
             predict           4                       3
    causal   input    [MAX     4        [MIN     2     3        X     0    X    <eos>
             predict  4        [MIN     2        3     X        0     X    <eos>
The masked objective hides and predicts, with the paper's masking ratio and loss:
    task                 hides    reads                     predicts             loss
    ListOps              10 %     symbols                   the symbol           ce
    Text, Retrieval      15 %     symbols                   the symbol           ce
    Pathfinder, PathX    50 %     gray values and a mark    one of 256 values    ce
    Image, sCIFAR        50 %     gray or RGB and a mark    the value            l1
    audio (sc), BIDMC    25 %     samples and a mark        the sample           l1
The result is a run directory. Its `best.pt` holds the weights that predicted the validation split
best; hand the directory to `finetune.py --init`. Recipes are in recipes.py. Flags and `Run`,
everything that is not the method, are in engine/."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from engine.feed import drawing
from engine.processes import guarded
from engine.run import Run
from engine.setup import setup
from files import UserError
from kernels import inside, true_lengths
from models import Backbone, Denoiser, at, config, make_optimizer
from recipes import learning_rate
from tasks import MASK

# ---- The objective -------------------------------------------------------------------------------


def hide(shape, ratio, *key):
    """Return which positions to hide: bool of `shape`, each independently with probability `ratio`.
    (An exact count would tell the model how many are left.) A pure function of `key`, so there is
    no sampler state to save; 1717 separates these draws from others with the same key. Change this
    function to try another masking."""
    return np.random.default_rng((1717, *key)).random(shape, dtype=np.float32) < ratio


def corrupt(batch, hidden, loss):
    """Hide positions (b, l) of a batch -> inputs, targets, hidden (without padding). This is the
    masked objective.

    A hidden symbol becomes <mask>. A hidden sample becomes NaN in all its channels, as a missing
    one is; the backbone reads both as 0 and a mark. What is missing is never predicted. Unlike
    BERT, no chosen position is kept or replaced at random. Padding is never hidden; <eos> may be.
    Gray images have both forms: `samples`, which are read, and with loss ce the gray levels in
    `symbols`, which are predicted."""
    if batch.lengths is not None:
        hidden = hidden & inside(batch.lengths, hidden.shape[1])
    if batch.samples is None:
        return batch.symbols.masked_fill(hidden, MASK), batch.symbols, hidden  # (b, l) all three
    inputs = batch.samples.masked_fill(hidden[..., None], math.nan)  # (b, l, channels)
    targets = batch.symbols if loss == "ce" else batch.samples
    return inputs, targets, hidden & ~batch.samples.isnan().all(-1)


def shift(batch, loss):
    """Return inputs, targets, and which positions (b, l) have a target. This is the causal
    objective: the target at t is the input at t + 1; the last position has none."""
    inputs = batch.symbols if batch.samples is None else batch.samples  # (b, l), (b, l, channels)
    targets = torch.roll(batch.symbols if loss == "ce" else inputs, -1, dims=1)
    b, l = inputs.shape[:2]
    predicted = inside(true_lengths(batch.lengths, b, l, inputs.device) - 1, l)  # (b, l)
    if batch.samples is not None and loss == "l1":
        predicted = predicted & ~targets.isnan().all(-1)
    return inputs, targets, predicted


def spt_loss(args, prediction, targets, hidden):
    """Return loss and score, summed over hidden positions: prediction (m, outputs), targets (b, l)
    or (b, l, channels), hidden as in `at`. args.loss:

    ce: cross-entropy over symbols or gray levels 0..255; score: number of correct predictions.
    l1: absolute error of the normalised sample, mean over channels; score: negative squared error,
    mean over channels. A missing channel has no error; those that are there count more.

    Sums, because micro-batches and processes hold different numbers of hidden positions; the caller
    divides by the number in the whole batch."""
    targets = at(targets, hidden)  # (m,) or (m, channels)
    if args.loss == "ce":
        loss = F.cross_entropy(prediction.float(), targets, reduction="sum")
        return loss, (prediction.argmax(-1) == targets).sum()
    there = ~targets.isnan()  # (m, channels)
    error = (prediction.float() - targets.nan_to_num()).masked_fill(~there, 0.0)
    weight = there.shape[1] / there.sum(-1).clamp(min=1)  # 1 if none is missing
    return (weight * error.abs().mean(-1)).sum(), -(weight * error.square().mean(-1)).sum()


def parts_of(loss, n, weight=1.0):
    """Return {name: weight * loss / n} for what an objective returns, a loss or {name: loss}."""
    parts = loss if isinstance(loss, dict) else {"denoising": loss}
    assert "labels" not in parts, "joint training calls the loss on labels so"
    return {name: weight * part / n for name, part in parts.items()}


class Objective(NamedTuple):
    """A row of OBJECTIVES. To add an objective, write its pretext, perhaps a loss, and a row."""

    # (args, batch, draw) -> inputs, targets, hidden (b, l); lengths if not those of the batch.
    # draw(hide, ratio[, i]): `hide` for this batch -> (b, l)
    pretext: Callable
    # the model sees only earlier positions
    causal: bool
    # inputs are corrupted: samples get a mask channel, joint training needs two passes
    hides: bool
    # (args, task) -> outputs of the head: one per symbol (or gray level), or one per channel
    outputs: Callable = lambda args, task: task.vocab if args.loss == "ce" else task.channels
    # (args, prediction, targets, hidden) -> loss and score, summed over hidden positions. A loss of
    # several parts is {name: part}: their sum is minimised, each is logged.
    loss: Callable = spt_loss
    # the Task that the backbone reads, e.g. one with more symbols
    reads: Callable = lambda args, task: task
    # a batch is not cut: rows or lengths change, or the loss compares examples (the last batch of
    # validation may have one)
    whole: bool = False
    # what the score is, in result.json; a loss of its own needs it
    score: str = ""


OBJECTIVES = {  # --objective
    "masked": Objective(
        lambda args, batch, draw: corrupt(batch, draw(hide, args.mask), args.loss),
        causal=False,
        hides=True,
    ),
    "causal": Objective(
        lambda args, batch, draw: shift(batch, args.loss), causal=True, hides=False
    ),
}


class Denoising(NamedTuple):
    """A part of a batch: sequences that pass through the model together."""

    inputs: torch.Tensor  # (b, l) or (b, l, channels)
    lengths: "torch.Tensor | None"  # (b,)
    hidden: torch.Tensor  # positions to predict: a mask (b, l), later flat indices (m,)
    targets: torch.Tensor  # (b, l) or (b, l, channels)


def denoising(args, batch, draw):
    """Return what the objective makes of a batch."""
    inputs, targets, hidden, *lengths = OBJECTIVES[args.objective].pretext(args, batch, draw)
    return Denoising(inputs, lengths[0] if lengths else batch.lengths, hidden, targets)


def make_backbone(args, task):
    """Return the backbone of a run of either stage. It has a mask channel if samples may be hidden
    or missing."""
    objective = OBJECTIVES[args.objective]
    hides = args.start in ("pretrain", "joint") and objective.hides and task.channels is not None
    # what `reads` sees in both stages: the flags of pretraining
    pretraining = vars(args) | (getattr(args, "pretraining", None) or {})
    task = objective.reads(SimpleNamespace(**pretraining), task)
    return Backbone(config(args.arch, task, objective.causal, mask_channel=task.gaps or hides))


# ---- Validation and training ---------------------------------------------------------------------

# every evaluation hides the same positions, drawn apart from those of training steps
EVAL_KEY = 1 << 40


@torch.no_grad()
def validate(model, task, split, args, run):
    """Return loss and score per hidden position of a split; the score is accuracy (ce) or minus
    squared error (l1)."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=run.device)
    for i, rows, batch in run.batches(split):  # this process's batches of the split
        draw = drawing(task, batch, rows, slice(0, len(rows)), args.seed, EVAL_KEY, i)
        inputs, lengths, hidden, targets = denoising(args, batch, draw)
        n = hidden.sum()
        hidden = hidden.flatten().nonzero()[:, 0]  # mask (b, l) -> indices (m,)
        with run.autocast():  # bfloat16 on a GPU
            prediction = model(inputs, lengths, hidden)  # (m, outputs)
        loss, score = OBJECTIVES[args.objective].loss(args, prediction, targets, hidden)
        loss = sum(parts_of(loss, 1).values())
        sums += torch.stack((loss.double(), score.double(), n.double()))
    model.train()
    loss, score, n = run.total(sums).tolist()  # sum over processes
    if n == 0:
        more = "--objective masked" if args.mask is None else f"a --mask above {args.mask}"
        raise UserError(f"no position of the validation split is predicted; use {more}")
    return loss / n, score / n


SCORES = dict(ce="accuracy on predicted positions", l1="minus squared error on predicted samples")


def constant_score(split, loss, most=1_000):
    """Describe what a constant prediction scores on the first examples of a split, beside which a
    score is read."""
    batch = split.batch(np.arange(min(len(split), most)))
    values = batch.symbols if loss == "ce" else batch.samples  # (b, l), (b, l, channels)
    b, l = values.shape[:2]
    values = values[inside(true_lengths(batch.lengths, b, l, values.device), l)]  # without padding
    if loss == "ce":
        return f"the most common symbol scores {values.bincount().max().item() / len(values):.4f}"
    return f"the mean scores {-values.square().nanmean().item():.4f}"  # samples are normalised


def main(argv=None):
    args, task, (train, val, _) = setup("pretrain", argv, OBJECTIVES)  # flags and data
    objective = OBJECTIVES[args.objective]
    run = Run(args, task, train)  # device, processes; checks the run directory

    # ---- model and optimiser: every process builds the same --------------------------------------
    torch.manual_seed(args.seed)
    backbone = make_backbone(args, task)
    model = Denoiser(backbone, objective.outputs(args, task)).to(run.device)
    optimizer = make_optimizer(model, args)
    # restores a stopped run; returns the model to call (compiled, DDP)
    forward = run.start(model, optimizer)

    def make_parts(step):
        """Make a step's batch on the CPU, while the step before runs. Return it in parts."""
        rows, share = run.rows(step)  # examples of the whole batch; this process's share of them
        batch = train.batch(rows[share])
        draw = drawing(task, batch, rows, share, args.seed, step)
        # sequences of similar length together; the mask `hidden` becomes indices (m,)
        return run.parts(denoising(args, batch, draw), rows, share, objective.whole)

    @run.measured  # records loss and gradient norm; with --compile a CUDA graph
    def learn(parts):
        """Take one optimiser step: the gradient of the whole batch's mean loss, summed part by
        part."""
        n = run.positions(parts)  # positions to predict, over all processes
        optimizer.zero_grad(set_to_none=True)
        for part in run.exchange(parts):  # each part; in the last, processes add up their gradients
            with run.autocast():
                prediction = forward(part.inputs, part.lengths, part.hidden)  # (m, outputs)
            loss, _ = objective.loss(args, prediction, part.targets, part.hidden)
            run.backward(parts_of(loss, n))  # loss.backward(), and adds to the logged loss
        optimizer.step()

    score_is = objective.score or SCORES[args.loss]
    remark = ""
    if objective.loss is spt_loss:
        remark = f" ({score_is}; {constant_score(val, args.loss)})"

    # ---- training: evaluate, save, stop?, step, log ----------------------------------------------
    for step in range(run.step, run.steps + 1):  # run.step: 0, or where a stopped run continues
        if run.evaluates(step):  # every --eval-every steps and at the end
            loss, score = validate(model, task, val, args, run)
            # logs; writes best.pt, last.pt
            run.evaluated(step, score, remark, val_loss=loss, val_score=score)
        if step == run.steps:
            break

        for group in optimizer.param_groups:  # the schedule scales each group's own rate
            group["lr"] = group["initial_lr"] * learning_rate(step, run.steps, args)
        learn(run.begin(step, make_parts))  # seeds dropout; returns the parts, on the device
        run.stepped(step)  # log line, checkpoint; ends the run if a signal asked for it

    # result.json, kernels.npz for figure 4, and a last line with the scores
    run.finish(val_score=run.state["best"], score_is=score_is)


if __name__ == "__main__":
    guarded(main)
