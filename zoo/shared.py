"""Functions that several architectures of zoo/ use. Not a --model."""
import math

import torch.nn.functional as F

from kernels import inside, true_lengths


def fill_up(length, lengths, *heads):
    """Return true lengths (None if nothing is padded), and (b, h, l, e) tensors padded to the task's length. Otherwise
    the output of these models would depend on the batch's padding."""
    b, _, l, _ = heads[0].shape
    if l < length:
        lengths = true_lengths(lengths, b, l, heads[0].device)
    return lengths, *(F.pad(y, (0, 0, 0, length - l)) for y in heads)


def dense_attention(q, k, v, seen, causal=False, lengths=None):
    """Compute softmax attention, where `seen` (l, l) or (h, l, l) marks the keys of each query: q, k, v (b, h, l, e) ->
    (b, h, l, e). The plain O(l^2) form of sparse attention. Outputs at queries past a true length are meaningless."""
    l = q.shape[-2]
    seen = seen.tril() if causal else seen
    if lengths is not None:
        seen = seen & inside(lengths, l)[:, None, None]                                       # (b, 1 or h, l, l)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
