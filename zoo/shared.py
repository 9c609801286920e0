"""What several architectures of zoo/ use. Not a --model."""

import torch.nn.functional as F

from kernels import true_lengths


def fill_up(length, lengths, *heads):
    """Return true lengths, and (b, h, l, e) tensors padded to the task's length. Tensors that have
    that length keep their `lengths`, perhaps None.

    Without it the output of these models would depend on the batch's padding."""
    b, _, l, _ = heads[0].shape
    if l < length:
        lengths = true_lengths(lengths, b, l, heads[0].device)
    return lengths, *(F.pad(y, (0, 0, 0, length - l)) for y in heads)
