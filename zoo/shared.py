"""What several architectures of zoo/ share; no model of its own."""
import math

import torch.nn.functional as F

from kernels import inside, true_lengths


def fill_up(length, lengths, *heads):
    """True lengths, and (b, h, l, e) tensors filled up to the task's length. Pads to the task's length; otherwise these
    models' output would depend on the batch's padding."""
    b, _, l, _ = heads[0].shape
    return true_lengths(lengths, b, l, heads[0].device), *(F.pad(y, (0, 0, 0, length - l)) for y in heads)


def dense_attention(q, k, v, seen, causal=False, lengths=None):
    """Softmax attention where `seen` (l, l) or (h, l, l) says who sees whom: (b, h, l, e) thrice -> (b, h, l, e). The
    plain form of all attention to some of the positions: O(l^2), without meaning at queries past a true length."""
    l = q.shape[-2]
    seen = seen.tril() if causal else seen
    if lengths is not None:
        seen = seen & inside(lengths, l)[:, None, None]                                       # (b, 1 or h, l, l)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
