"""Attention without softmax, in O(l): `linear` (Katharopoulos et al. 2020), `performer` and
`performer_relu` (Choromanski et al. 2021).

    y[i] = phi(q[i]) S / (phi(q[i]) z),   S = sum_j phi(k[j]) v[j]^T,   z = sum_j phi(k[j])
Features phi are non-negative: elu(x) + 1; random features that estimate softmax; relu(x) + 0.001,
the "generalised" Performer, which Long Range Arena's authors (Tay et al. 2020) ran on every task
except ListOps."""

import math

import torch
import torch.nn.functional as F

from kernels import ceil_div, real_keys, split_blocks
from models import MODELS, Attention, Key, SizeError
from zoo.shared import transformer_with


def linear_attention(q, k, v, causal=False, lengths=None, eps=1e-6):
    """Return q (k^T v) / (q . sum of k + eps), multiplied in this order.

    q, k (b, h, l, m): non-negative features; v (b, h, l, e) -> (b, h, l, e). If causal, sums run
    over j <= i exactly: earlier chunks enter as a running sum of k^T v, the query's own chunk as a
    masked matrix."""
    l = q.shape[-2]
    if lengths is not None and not causal:
        k = k * real_keys(torch.arange(l, device=k.device), l, lengths)[:, None, :, None]
    v = F.pad(v, (0, 1), value=1.0)  # one more column of values: the denominator
    if causal:
        q, k, v = (split_blocks(x, 64, ceil_div(l, 64)) for x in (q, k, v))  # (b, h, n, 64, .)
        state = (k.transpose(-1, -2) @ v).cumsum(2)  # (b, h, n, m, e + 1)
        before = F.pad(state, (0, 0, 0, 0, 1, 0))[:, :, :-1]
        y = (q @ before + (q @ k.transpose(-1, -2)).tril() @ v).flatten(2, 3)[:, :, :l]
    else:
        y = q @ (k.transpose(-1, -2) @ v)  # (b, h, l, e + 1)
    return y[..., :-1] / (y[..., -1:] + eps)


def favor_features(x, W, query, eps=1e-6, causal=False, lengths=None):
    """Return Performer's positive random features: x (b, h, l, e), W (m, e) -> (b, h, l, m).

    Their dot products estimate exp(q.k / sqrt(e)). So that exp does not overflow, every query's
    largest exponent is subtracted, and for keys the largest of all keys; both cancel in
    `linear_attention`, except for eps. If causal, that would leak the future, so nothing is
    subtracted for keys; the exponent is at most |w|^2 / 2, which float32 holds for e up to 64."""
    m, e = W.shape
    x = x * e**-0.25
    exponent = x @ W.to(x.dtype).T  # (b, h, l, m)
    largest = exponent.detach()
    if query:
        largest = largest.amax(-1, keepdim=True)  # (b, h, l, 1)
    elif causal:
        largest = 0
    else:
        l = x.shape[-2]
        real = real_keys(torch.arange(l, device=x.device), l, lengths)[:, None, :, None]
        largest = largest.masked_fill(~real, -math.inf).amax((-2, -1), keepdim=True)  # (b, h, 1, 1)
    # Three passes over (b, h, l, m): subtract everything (log sqrt(m), too), exp, add eps.
    exponent.sub_(x.square().sum(-1, keepdim=True) / 2 + largest + math.log(m) / 2)
    return torch.exp(exponent) + eps * m**-0.5


class LinearAttention(Attention):
    """Attention with products of c.phi(queries) and c.phi(keys) instead of softmax: O(l)."""

    def __init__(self, c):
        super().__init__(c)
        self.phi = c.phi

    def attend(self, q, k, v, lengths):
        with torch.autocast(q.device.type, enabled=False):  # long sums
            q, k, v = (x.float() for x in (q, k, v))
            return linear_attention(self.phi(q), self.phi(k), v, self.causal, lengths)


class Performer(Attention):
    """Linear attention with c.features random features that estimate softmax. Directions, drawn
    once and saved with the weights, are orthogonal in groups of e, as long as Gaussian vectors."""

    keys = dict(features=Key(int, 256))

    def __init__(self, c):
        super().__init__(c)
        e = c.d // c.heads
        if c.causal and e > 64:  # features may overflow
            raise SizeError(f"performer: causal heads have at most 64 dimensions, not {e}")
        groups = [torch.linalg.qr(torch.randn(e, e)).Q.T for _ in range(ceil_div(c.features, e))]
        W = torch.cat(groups)[: c.features] * torch.randn(c.features, e).norm(dim=-1, keepdim=True)
        self.register_buffer("W", W)  # (m, e)

    def attend(self, q, k, v, lengths):
        with torch.autocast(q.device.type, enabled=False):
            q = favor_features(q.float(), self.W, query=True)  # (b, h, l, m)
            k = favor_features(k.float(), self.W, query=False, causal=self.causal, lengths=lengths)
            eps = 1e-6 if self.causal else 0.0
            return linear_attention(q, k, v.float(), self.causal, lengths, eps)


MODELS |= {
    "linear": transformer_with(LinearAttention, extras=dict(phi=lambda x: F.elu(x) + 1)),
    "performer": transformer_with(Performer, short="features=16"),
    "performer_relu": transformer_with(
        LinearAttention, extras=dict(phi=lambda x: F.relu(x) + 1e-3)
    ),
}
