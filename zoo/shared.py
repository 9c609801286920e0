"""What several architectures of zoo/ use. Not a --model."""

import torch.nn.functional as F

from kernels import true_lengths
from models import Model, TransformerBlock, sinusoids


def transformer_with(attention, short="", **more):
    """Return a line of `MODELS`: the Transformer, its sizes and recipes, with another attention.
    short: sizes that differ on short sequences, the demos' and stand-ins'."""
    changes = f"task sizes\n*_demo|*_mini|text256 {short}" if short else ""
    base = dict(like="transformer", positions=sinusoids, changes=changes)
    return Model(TransformerBlock, attention, **base, **more)


def fill_up(length, lengths, *heads):
    """Return true lengths, and (b, h, l, e) tensors padded to the task's length. Tensors that have
    that length keep their `lengths`, perhaps None.

    Without it the output of these models would depend on the batch's padding."""
    b, _, l, _ = heads[0].shape
    if l < length:
        lengths = true_lengths(lengths, b, l, heads[0].device)
    return lengths, *(F.pad(y, (0, 0, 0, length - l)) for y in heads)
