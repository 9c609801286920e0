"""A picture of what a pretrained run fills in."""

from typing import NamedTuple

import numpy as np
import torch

from data import sheet
from engine.feed import drawing
from files import UserError
from pretrain import OBJECTIVES, denoising
from tasks import UNK
from tasks.picture import height


class FilledIn(NamedTuple):
    """Arrays of a batch of b sequences; 0 where nothing is predicted."""

    hidden: np.ndarray  # (b, l) bool: which positions are predicted
    guess: np.ndarray  # the predictions: ids (b, l), or samples (b, l, channels)
    wrong: np.ndarray  # (b, l) bool: another symbol, or off by half a standard deviation


@torch.no_grad()
def filled_in(trained, batch):
    """Return what a pretrained run predicts for a batch, as FilledIn."""
    args, task = trained.args, trained.task
    x = batch.symbols if batch.samples is None else batch.samples
    b, l = x.shape[:2]
    rows = np.arange(len(batch.y))
    draw = drawing(task, batch, rows, slice(0, len(rows)), args.seed, 1 << 41)
    inputs, lengths, hidden, targets = denoising(args, batch, draw)
    with trained.autocast():
        outputs = trained.model(inputs, lengths, hidden)  # (m, outputs)
    m = len(outputs)

    # Which position does each prediction stand for? The same pretext tells, given a batch that
    # holds its positions. They begin at 2^20, above all symbols.
    numbers = (2**20 + torch.arange(l)).expand(b, l)
    numbered = batch._replace(symbols=numbers)
    if batch.samples is not None:
        numbered = numbered._replace(samples=numbers[..., None].expand_as(x).float())
    numbers = denoising(args, numbered, draw).targets[hidden]  # (m, ...)
    position = numbers.reshape(m, -1)[:, 0].long() - 2**20  # (m,)
    real = (position >= 0) & (position < l)  # (m,)
    if len(hidden) != b or not real.any():
        raise UserError(
            f"--show: the predictions of --objective {args.objective} are not positions of a "
            "sequence"
        )

    targets = targets[hidden]  # (m, ...)
    if args.loss == "ce":  # of several predictions, e.g. of the next positions, the first
        vocab = OBJECTIVES[args.objective].reads(args, task).vocab
        guess = outputs.unflatten(-1, (-1, vocab)).argmax(-1)[:, 0]
        wrong = guess != targets.reshape(m, -1)[:, 0]
        guess = guess.where(guess < task.vocab, UNK)
    else:
        guess = outputs
        wrong = (guess - targets).abs().amax(-1) > 0.5
    places = hidden.nonzero()[real, 0], position[real]

    def placed(values):
        """Put values (m, ...) at their places in a batch, (b, l, ...)."""
        return values.new_zeros(b, l, *values.shape[1:]).index_put(places, values[real]).numpy()

    return FilledIn(placed(real), placed(guess), placed(wrong))


def show(trained, split, path):
    """Write a picture of four sequences: the original, the model's input, and as the model fills it
    in."""
    if not trained.pretrained:
        raise UserError(
            f"--show needs a run of pretrain.py, but {trained.run} is one of finetune.py"
        )
    task, args = trained.task, trained.args
    batch = split.batch(np.arange(min(4, len(split))))
    hidden, guess, wrong = filled_in(trained, batch)
    if task.channels and args.loss == "ce":  # gray levels as samples
        guess = (guess[..., None] / task.scale - task.mean) / task.std
    n = len(batch.y)
    nothing = np.zeros_like(hidden)
    as_read = (["read from left to right"] * n, nothing)
    if OBJECTIVES[args.objective].hides:
        as_read = ([f"{args.mask:.0%} hidden"] * n, hidden)
    filled = ([f"filled in by {args.model}"] * n, hidden, guess, wrong)
    size = 17, height(task) * n  # inches
    colours = "correct predictions are blue, wrong ones orange"
    if task.side:
        size = 7.2, height(task) * n
        colours = "hidden pixels are blue, wrong ones orange"
    elif not task.channels:  # texts are wide: below each other
        size = 6.2, 3.3 * height(task) * n
    columns = (["original"] * n, nothing), as_read, filled
    sheet(path, task, batch, size, columns, stacked=not task.channels)
    right = 1 - wrong.sum() / hidden.sum()
    print(f"wrote {path}: {colours}; of {hidden.sum():,} hidden positions {right:.1%} are correct")
