"""Linformer: attention to learned mixtures of all positions (Wang et al. 2020).

With E (l, r), the output is softmax(q (E^T k)^T / sqrt(e)) E^T v: O(l r). Heads, keys and values
share one E, as in Long Range Arena (Tay et al. 2020), so the code mixes x:
    E^T (x W + b) = (E^T x) W + (E^T 1) b
Keys and values are then projected at r mixtures instead of l positions, which excludes rotary
positions. Padding adds nothing, because E is zero there."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import attention, inside
from models import MODELS, Attention, Key, Model, SizeError, TransformerBlock, sinusoids


class Linformer(Attention):
    """Attention to c.rank learned mixtures of all positions: O(l rank)."""

    keys = dict(rank=Key(int, 16), rotary=Key(float, 0.0, most=0, shown=False))

    def __init__(self, c):
        super().__init__(c)
        if c.causal:  # positions are mixed first
            raise SizeError("linformer has no causal form; use --objective masked")
        self.mix = nn.Parameter(nn.init.xavier_uniform_(torch.empty(c.length, c.rank)))

    def forward(self, x, lengths=None):
        mix = self.mix[: x.shape[1]].T  # (r, l)
        if lengths is not None:  # padding must add nothing to a mixture
            mix = mix * inside(lengths, x.shape[1])[:, None]  # (b, r, l)
        d = x.shape[-1]
        W = self.qkv.weight  # (3 d, d), queries first
        b = self.qkv.bias
        q = F.linear(x, W[:d], b[:d]).unflatten(-1, (self.heads, self.e)).transpose(1, 2)
        kv = F.linear(mix @ x, W[d:]) + mix.sum(-1, keepdim=True) * b[d:]  # (b, r, 2 d)
        k, v = kv.unflatten(-1, (2, self.heads, self.e)).permute(2, 0, 3, 1, 4)  # (b, h, r, e)
        return self.merge(attention(q, k, v))


MODELS |= {"linformer": Model(TransformerBlock, Linformer, "transformer", positions=sinusoids)}
