"""Structured feed-forward parts, and self-guided training (Wei et al. 2024). Not a --model.

    python pretrain.py ... --arch ffn=lowrank,ffn_share=0.3
In every Transformer's feed-forward part, a matrix W (M, N) becomes a product of two cheaper ones,
second (M, R) times first (R, N) say. The first layer's stays dense, as in the authors' models."""

import math
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from models import FEED_FORWARD, HELPERS, Key, SizeError


def structured_linear(x, first, second, bias, kind):
    """Return x W^T + bias, where W is a product of two cheaper matrices: (..., N) -> (..., M).

    lowrank       first (R, N), second (M, R)
    blockdense    first (B, R/B, N/B), one matrix for each slice of x; second (M, R)
    blockshuffle  first (B, Q, N/B), second (B, M/B, Q), Q = min(N, M) / B: both block diagonal.
                  Between them the values are read as a (Q, B) matrix and transposed; after them,
                  as a (B, M/B) matrix and transposed"""
    if kind == "lowrank":
        return F.linear(F.linear(x, first), second, bias)
    blocks = len(first)
    x = torch.einsum("...bn,bqn->...bq", x.unflatten(-1, (blocks, -1)), first)  # (..., B, R/B or Q)
    if kind == "blockdense":
        return F.linear(x.flatten(-2), second, bias)
    x = x.flatten(-2).unflatten(-1, (-1, blocks)).transpose(-1, -2)  # (..., B, Q) shuffled
    x = torch.einsum("...bq,bmq->...bm", x, second)  # (..., B, M/B)
    return x.transpose(-1, -2).flatten(-2) + bias  # (..., M)


def initial_factors(n, m, kind, share, blocks):
    """Draw the factors of a matrix (m, n), shaped as in `structured_linear`."""
    if kind == "lowrank":
        rank = max(1, min(n, m, round(share * n * m / (n + m))))
        dense = nn.Linear(n, m, bias=False).weight.detach()
        P, S, Qh = torch.linalg.svd(dense, full_matrices=False)
        return S[:rank, None].sqrt() * Qh[:rank], P[:, :rank] * S[:rank].sqrt()
    if n % blocks or m % blocks:
        raise SizeError(f"ffn_blocks={blocks} does not divide {n} and {m}")
    if kind == "blockdense":
        rank = max(1, round(share * n * m / (m + n / blocks) / blocks)) * blocks
        shapes = (blocks, rank // blocks, n // blocks), (m, rank)
    else:
        q = min(n, m) // blocks
        if q < blocks:  # some inputs would never reach some outputs
            raise SizeError(f"ffn_blocks={blocks}: must be at most {math.isqrt(min(n, m))}")
        shapes = (blocks, q, n // blocks), (blocks, m // blocks, q)
    draws = (torch.linalg.svd(torch.randn(shape), full_matrices=False) for shape in shapes)
    return [P @ Qh for P, _, Qh in draws]


class StructuredLinear(nn.Module):
    """A Linear whose matrix is a product of two cheaper ones, with c.ffn_share of its parameters.

    c.ffn_blocks: the number of blocks, which by itself sets the share of blockshuffle. lowrank
    starts as the best approximation of a matrix drawn as in nn.Linear; in the other kinds each
    block starts with singular values 1.

    c.guided > 0: self-guided training. During that share of the run a dense matrix W, initially the
    product of the two factors, is trained with them: y = a W x + (1 - a) (second first) x, and
    `guide` lowers a from 1 to 0. Evaluation and stage 2 do not use W. (The authors mix at a step
    with probability a, which halves the cost.)"""

    def __init__(self, n, m, c):
        super().__init__()
        self.kind = c.ffn
        self.guided = c.guided
        first, second = initial_factors(n, m, c.ffn, c.ffn_share, c.ffn_blocks)
        self.first = nn.Parameter(first.clone())
        self.second = nn.Parameter(second.clone())
        self.bias = nn.Parameter(torch.zeros(m))
        product = structured_linear(torch.eye(n), first, second, torch.zeros(1), self.kind)
        self.guide = nn.Parameter(product.T.clone()) if c.guided else None  # (m, n)
        self.a = 0.0

    def forward(self, x):
        y = structured_linear(x, self.first, self.second, self.bias, self.kind)
        if not self.training or self.guide is None:
            return y
        if not self.a:  # guiding is over; DDP needs every parameter
            return y + 0 * self.guide.sum()
        return self.a * F.linear(x, self.guide, self.bias) + (1 - self.a) * y


class StructuredFeedForward(nn.Sequential):
    """Linear, GELU, Linear with structured matrices; in the first layer with dense ones."""

    keys = dict(ffn_share=Key(float, 0.5, most=1, shown=False), ffn_blocks=Key(int, 4, shown=False))
    # stage 2 has no guides
    keys |= dict(guided=Key(float, 0.0, most=1, shown=False, inherited=False))

    def __init__(self, c):
        linear = nn.Linear if c.layer == 0 else partial(StructuredLinear, c=c)
        super().__init__(linear(c.d, c.ff), nn.GELU(), linear(c.ff, c.d))


def guide(model, step, steps):
    """Set the guides' weight a: half a cosine from 1 to 0 over the share c.guided of the run."""
    for module in model.modules():
        if isinstance(module, StructuredLinear) and module.guide is not None:
            progress = step / (module.guided * steps)
            module.a = 0.5 * (1 + math.cos(math.pi * progress)) if progress < 1 else 0.0


FEED_FORWARD |= dict.fromkeys(("lowrank", "blockdense", "blockshuffle"), StructuredFeedForward)
HELPERS |= {"guide"}
