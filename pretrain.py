"""Stage 1, self-pretraining (SPT): learn to reconstruct the task's own training inputs. No labels, no other data.

    python pretrain.py --task pathfinder_demo --model transformer    about a minute on one CPU core: val_score 0.86
    python pretrain.py --task pathx --model s4                       the paper's run, on one GPU
    torchrun --nproc-per-node=4 pretrain.py --task pathx --model s4
    python pretrain.py --task pathx --model s4 --help                the flags, and the recipe and sizes of this pair

Two objectives (paper, section 2):
    masked   each position is hidden with a fixed probability and predicted from both sides
    causal   each position is predicted from those before it. The model itself must not see ahead, so it is another
             one: causal attention, or state space kernels in one direction only
For example, an expression of ListOps when its second and fifth symbols are hidden:
    the sequence      [MAX    4   [MIN   2     3    X   0   X  <eos>
    masked   input    [MAX  <mask> [MIN  2  <mask>  X   0   X  <eos>      predict 4 and 3, at their places
    causal   input    [MAX    4   [MIN   2     3    X   0   X  <eos>      predict 4, [MIN, 2, 3, X, 0, X, <eos>
The result is a run directory with the weights that predicted the validation split best, `best.pt`. Hand it to
`finetune.py --init`. Recipes are in recipes.py; flags and `Run`, all of a run that is not the method, in engine/.
"""
from files import UserError  # first: no traceback if Ctrl-C comes while the rest is imported

from collections import namedtuple
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from data import open_task
from engine.flags import arguments
from engine.processes import guarded
from engine.run import Run, kernel_maxima, learning_rate
from kernels import inside, true_lengths
from models import Backbone, Denoiser, at, config, make_optimizer
from tasks import MASK

# ---- The objective ---------------------------------------------------------------------------------------------------

def hide(shape, ratio, *key):
    """Which positions to hide: bool of `shape`, each by itself with probability `ratio` (an exact count would tell the
    model how many are left). A pure function of `key`, so that there is no sampler state to save; 1717 keeps it apart
    from other draws with that key. Change this function to try another masking."""
    return np.random.default_rng((1717, *key)).random(shape, dtype=np.float32) < ratio


def corrupt(batch, hidden, loss):
    """Masked objective: a batch and positions to hide (b, l) -> inputs, targets, hidden (the padding taken out).

    Symbols: a hidden one becomes the <mask> symbol. Samples: a hidden one becomes 0 after normalisation in all its
    channels, and one more channel says which are hidden, since 0 is also an honest value. Every chosen position is
    hidden (none is kept or replaced at random, as BERT would). Padding is never chosen; <eos> may be.
    """
    if batch.lengths is not None:
        hidden = hidden & inside(batch.lengths, hidden.shape[1])
    if batch.samples is None:
        return batch.symbols.masked_fill(hidden, MASK), batch.symbols, hidden                 # (b, l) all three
    covered = hidden[..., None].float()                                                       # (b, l, 1)
    inputs = torch.cat((batch.samples * (1 - covered), covered), -1)                          # (b, l, channels + 1)
    return inputs, batch.symbols if loss == "ce" else batch.samples, hidden


def shift(batch, loss):
    """Causal objective: the target at t is the input at t + 1; the last position has none -> inputs, targets, and
    which positions (b, l) have a target."""
    x = batch.symbols if batch.samples is None else batch.samples                             # (b, l), (b, l, channels)
    targets = torch.roll(batch.symbols if loss == "ce" else x, -1, dims=1)
    b, l = x.shape[:2]
    return x, targets, inside(true_lengths(batch.lengths, b, l, x.device) - 1, l)             # (b, l)


def masked(args, task, batch, rows, mine, *key):
    """A batch -> inputs, targets, hidden. rows: the examples of the whole batch on all processes; mine: those of them
    that `batch` holds, by their place there. Positions are drawn for the whole batch, so that they depend neither on
    the number of processes nor on the order in which it is computed."""
    l = (batch.symbols if batch.samples is None else batch.samples).shape[1]
    hidden = hide((len(rows) * task.documents, task.length), args.mask, *key)
    hidden = hidden.reshape(len(rows), -1, task.length)[mine].reshape(-1, task.length)[:, :l]              # (b, l)
    return corrupt(batch, torch.from_numpy(hidden).to(batch.y.device), args.loss)


def causal(args, task, batch, rows, mine, *key):
    """The same for the causal objective, which draws nothing."""
    return shift(batch, args.loss)


# --objective: pretext(args, task, batch, rows, mine, *key) -> inputs, targets, hidden; causal: the model sees only what
# came before; hides: it reads other inputs than the labels' loss does (samples: with one more channel, which says what
# is hidden; --mask has a meaning; joint training has two passes). Another one is a function and a line here.
Objective = namedtuple("Objective", "pretext causal hides")
OBJECTIVES = {"masked": Objective(masked, causal=False, hides=True),
              "causal": Objective(causal, causal=True, hides=False)}


def spt_loss(prediction, targets, hidden, loss):
    """Summed loss and summed score over the hidden positions: prediction (m, outputs), targets (b, l) or
    (b, l, channels), hidden as in `at`.

    ce: cross-entropy over symbols or gray levels 0..255; score: number of right predictions.
    l1: absolute error of the normalised sample, mean over channels; score: negative squared error, mean over channels.
    Sums, not means: micro-batches and processes hold different numbers of hidden positions, and the caller divides by
    the number in the whole batch. A number below 0 in `hidden` stands for no position.
    """
    targets = at(targets, hidden)                                                             # (m,) or (m, channels)
    none = hidden < 0 if hidden.ndim == 1 else targets.new_zeros(len(targets), dtype=torch.bool)
    if loss == "ce":
        targets = targets.masked_fill(none, -100)                  # which cross_entropy ignores
        return F.cross_entropy(prediction.float(), targets, reduction="sum"), (prediction.argmax(-1) == targets).sum()
    error = (prediction.float() - targets).masked_fill(none[:, None], 0.0)
    return error.abs().mean(-1).sum(), -error.square().mean(-1).sum()


# ---- Validation and training -----------------------------------------------------------------------------------------

EVAL_KEY = 1 << 40      # positions hidden in evaluation are the same every time, and none of those of a training step


@torch.no_grad()
def validate(model, task, split, args, run):
    """Loss and score per hidden position over a whole split; the score is accuracy (ce) or minus squared error (l1)."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=run.device)
    for i, rows, batch in run.batches(split):
        pretext = OBJECTIVES[args.objective].pretext
        inputs, targets, hidden = pretext(args, task, batch, rows, slice(0, len(rows)), args.seed, EVAL_KEY, i)
        with run.autocast():
            prediction = model(inputs, batch.lengths, hidden)                                 # (m, outputs)
        loss, score = spt_loss(prediction, targets, hidden, args.loss)
        sums += torch.stack((loss.double(), score.double(), hidden.sum().double()))
    model.train()
    loss, score, n = run.total(sums).tolist()
    if n == 0:
        raise UserError(f"no position of the validation split is hidden with --mask {args.mask}")
    return loss / n, score / n


class Denoising(NamedTuple):
    """Sequences of a batch that pass through the model together."""
    inputs: torch.Tensor
    lengths: "torch.Tensor | None"
    hidden: torch.Tensor                # positions to predict: (b, l), then (m,) in b l
    targets: torch.Tensor


def parse_args(argv=None):
    return arguments("pretrain", argv, OBJECTIVES)


def main(argv=None):
    args = parse_args(argv)
    run, objective = Run(args), OBJECTIVES[args.objective]
    task, train, val, _ = open_task(args.task, args.data_dir, args.train_fraction)
    run.open(task, train)                         # sets the number of steps; checks the run directory

    # ---- model and optimiser: every process builds the same one --------------------------------------------------
    torch.manual_seed(args.seed)
    mask_channel = objective.hides and task.channels is not None
    backbone = Backbone(config(args.arch, task, causal=objective.causal, mask_channel=mask_channel))
    model = Denoiser(backbone, task.vocab if args.loss == "ce" else task.channels).to(run.device)
    kernels_before = kernel_maxima(backbone, task.length)
    optimizer = make_optimizer(model, args.lr, args.wd)
    forward = run.start(model, optimizer)         # restores a stopped run; compiled or distributed, if asked for

    def prepare(step):
        """The parts of a step's batch, on the CPU, while the step before runs."""
        rows, mine = run.rows(step)               # examples of the whole batch; which of them are this process's
        batch = train.batch(rows[mine])
        inputs, targets, hidden = objective.pretext(args, task, batch, rows, mine, args.seed, step)
        parts = run.parts(Denoising(inputs, batch.lengths, hidden, targets), rows, mine, task.documents)
        return [part._replace(hidden=run.numbers(part.hidden)) for part in parts]             # (b, l) -> (m,)

    @run.measured                                 # notes loss and gradient norm; with --compile a CUDA graph
    def learn(parts):
        """A step of the optimiser: the gradient of the loss of a whole batch, part by part."""
        n = run.total(sum((part.hidden >= 0).sum() for part in parts)).clamp(min=1)     # hidden, on all processes
        optimizer.zero_grad(set_to_none=True)
        for part in run.exchange(parts):          # processes add up their gradients in the last part
            with run.autocast():
                prediction = forward(part.inputs, part.lengths, part.hidden)                  # (m, outputs)
            loss, _ = spt_loss(prediction, part.targets, part.hidden, args.loss)
            run.backward(loss / n)
        optimizer.step()

    # ---- training: evaluate, save, stop?, step, log -----------------------------------------------------------
    for step in range(run.step, run.steps + 1):   # run.step: 0, or where a stopped run goes on
        if run.evaluates(step):
            loss, score = validate(model, task, val, args, run)
            run.evaluated(step, score, val_loss=loss, val_score=score)                        # best.pt, last.pt
        if step == run.steps:
            break

        for group in optimizer.param_groups:      # scales each group's own rate: SSM parameters keep theirs
            group["lr"] = group["initial_lr"] * learning_rate(step, run.steps, args)
        learn(run.begin(step, prepare))           # the prepared parts, on the device; dropout is seeded
        run.stepped(step)                         # log line, checkpoint; ends here if a signal asked for it

    run.keep_kernels(kernels_before, task.length)                      # for figure 4
    run.finish(val_score=run.state["best"], score_is=(
        "accuracy on predicted positions" if args.loss == "ce" else "minus squared error on predicted samples"))


if __name__ == "__main__":
    guarded(main)
