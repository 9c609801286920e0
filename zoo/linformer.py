"""Linformer: attention to learned mixtures of all positions (Wang et al. 2020).

With E (l, r), softmax(q (E^T k)^T / sqrt(e)) E^T v: O(l r). There is no faster form than the formula. Heads, keys and
values share one E, as in Long Range Arena (Tay et al. 2020); k and v are zero at padding, so that it adds nothing.
Sizes and recipes are the Transformer's.
"""
import math

import torch
import torch.nn as nn

from kernels import attention, inside
from models import MODELS, Attention, Key, Model, SizeError, TransformerBlock, sinusoids


class Linformer(Attention):
    """Attends to c.rank learned mixtures of all positions in place of the positions (Wang et al. 2020): O(l rank). All
    heads, keys and values share them."""

    keys = dict(rank=Key(int, 16))

    def __init__(self, c):
        super().__init__(c)
        if c.causal:
            raise SizeError("linformer mixes all positions before it attends: no causal form; use --objective masked")
        bound = math.sqrt(6 / (c.length + c.rank))
        self.mix = nn.Parameter(torch.empty(c.length, c.rank).uniform_(-bound, bound))          # (length, r)

    def attend(self, q, k, v, lengths):
        if lengths is not None:                                              # padding adds nothing to a mixture
            real = inside(lengths, k.shape[2])[:, None, :, None]                              # (b, 1, l, 1)
            k, v = k * real, v * real
        k, v = (torch.einsum("bhle,lr->bhre", y, self.mix[: y.shape[2]]) for y in (k, v))       # (b, h, r, e)
        return attention(q, k, v)


MODELS |= {"linformer": Model(TransformerBlock, Linformer, "transformer", positions=sinusoids)}
