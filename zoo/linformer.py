"""Linformer: attention to learned mixtures of all positions (Wang et al. 2020).

With E (l, r), the output is softmax(q (E^T k)^T / sqrt(e)) E^T v: O(l r). The formula needs no faster form. Heads, keys
and values share one E, as in Long Range Arena (Tay et al. 2020). Padding adds nothing, because k and v are zero there.
Sizes and recipes are the Transformer's.
"""
import math

import torch
import torch.nn as nn

from kernels import attention, inside
from models import MODELS, Attention, Key, Model, SizeError, TransformerBlock, sinusoids


class Linformer(Attention):
    """Attention to c.rank learned mixtures of all positions instead of the positions themselves: O(l rank)."""

    keys = dict(rank=Key(int, 16))

    def __init__(self, c):
        super().__init__(c)
        if c.causal:
            raise SizeError("linformer mixes all positions first, so it has no causal form; use --objective masked")
        bound = math.sqrt(6 / (c.length + c.rank))
        self.mix = nn.Parameter(torch.empty(c.length, c.rank).uniform_(-bound, bound))          # (length, r)

    def attend(self, q, k, v, lengths):
        if lengths is not None:                                              # padding must add nothing to a mixture
            real = inside(lengths, k.shape[2])[:, None, :, None]                              # (b, 1, l, 1)
            k, v = k * real, v * real
        mix = self.mix[: k.shape[2]].T                                                        # (r, l)
        k, v = mix @ k, mix @ v                                                               # (b, h, r, e)
        return attention(q, k, v)


MODELS |= {"linformer": Model(TransformerBlock, Linformer, "transformer", positions=sinusoids)}
