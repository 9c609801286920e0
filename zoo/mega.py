"""MEGA: moving averages, then one gated head of attention (Ma et al. 2023).

    s[t] = q s[t-1] + p beta x[t],  a = sum_h gamma s / sqrt(h),  p = sigmoid(delta),
    q = 1 - p sigmoid(alpha)
With these averages a, v = silu(W x), and u, z, r, h the parts of one Linear of silu(a):
    y = softmax(q k^T / sqrt(z) + bias) v,   q, k = silu(z) scale + shift, each with its own
    x <- x + sigmoid(u) (silu(h + W_out (silu(r) y)) - x)
`mega` attends over the whole length, `mega_chunk` in chunks of 128. Sizes and recipes from scratch
are the authors'; our schedules approximate theirs."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import ceil_div, fft_conv, geometric_sums, inside, split_blocks, true_lengths
from models import MODELS, NORMS, Kernel, Key, Model


def ema_kernel(delta, alpha, beta, gamma, l):
    """Return the kernel of h damped averages, a sum of geometric sequences with real poles q, at
    all lags (the official code cuts it after 1,024): four (dir, d, h) -> float32 (dir, d, l)."""
    directions, d, h = delta.shape
    p = delta.double().sigmoid()  # (dir, d, h)
    log_q = torch.log1p(-p * alpha.double().sigmoid())
    W = gamma * p * beta / math.sqrt(h)
    K = geometric_sums(W.flatten(0, 1)[:, None], log_q.flatten(0, 1), l)
    return K.view(directions, d, l)


class EMA(Kernel):
    """Kernels of c.averages damped exponential averages per channel and direction.

    At the start they all fade within about 60 positions; longer memory must be learned."""

    def __init__(self, c):
        super().__init__()
        self.d = c.d
        shape = (c.directions, c.d, c.averages)
        self.delta = nn.Parameter(torch.randn(shape) * 0.2)
        self.alpha = nn.Parameter(torch.randn(shape) * 0.2)
        self.beta = nn.Parameter(torch.randn(shape) * 0.02 + (-1.0) ** torch.arange(c.averages))
        self.gamma = nn.Parameter(torch.randn(shape))

    def arguments(self, p):
        return p.delta, p.alpha, p.beta, p.gamma

    def make(self, delta, alpha, beta, gamma, l):
        K = ema_kernel(delta, alpha, beta, gamma, l)
        if len(K) == 1:
            return K
        # The backward kernel of `fft_conv` starts at lag 1, MEGA's at lag 0: its first value joins
        # the forward kernel.
        return torch.stack((K[0] + F.pad(K[1, :, :1], (0, l - 1)), F.pad(K[1, :, 1:], (0, 1))))


class Mega(nn.Module):
    """Moving-average gated attention. Returns the change of the block's raw input, (b, l, d).

    Queries, keys and gates come from averages, which also carry context across chunks of c.chunk.
    The single head has a learned bias per distance. c.activation: softmax, or laplace, an error
    function of each score without normalisation."""

    keys = dict(v=Key(int), z=Key(int), averages=Key(int, 16), chunk=Key(int, None, shown=False))
    keys |= dict(activation=Key(("softmax", "laplace")), dropout=Key(float, 0.0))

    def __init__(self, c):
        super().__init__()
        self.d = c.d
        self.v = c.v
        self.z = c.z
        self.causal = c.causal
        self.chunk = c.chunk
        self.laplace = c.activation == "laplace"
        self.kernel = EMA(c)
        self.omega = nn.Parameter(torch.randn(c.d))
        self.values = nn.Linear(c.d, c.v)
        self.gates = nn.Linear(c.d, 2 * c.d + c.v + c.z)
        self.out = nn.Linear(c.v, c.d)
        self.scale = nn.Parameter(torch.randn(2, c.z) * 0.02)
        self.shift = nn.Parameter(torch.zeros(2, c.z))
        distances = 2 * (c.chunk or c.length) - 1
        self.bias = nn.Parameter(torch.randn(distances) * 0.02)
        self.dropout = nn.Dropout(c.dropout)

    def convolve(self, x, K, lengths, D):
        """Convolve x (b, l, d), 0 at padding, with K (dir, d, l or longer), and add D x."""
        u = x if lengths is None else x * inside(lengths, x.shape[1])[..., None]
        return fft_conv(u.transpose(1, 2), K, D).transpose(1, 2)

    def attend(self, q, k, v, lengths):
        """Attend: queries and keys (b, l, z), values (b, l, v) -> (b, l, v)."""
        l = q.shape[1]
        size = min(self.chunk or l, l)
        n = ceil_div(l, size)
        q, k, v = (split_blocks(x, size, n) for x in (q, k, v))  # (b, n, size, .)
        i = torch.arange(size, device=q.device)
        bias = self.bias[len(self.bias) // 2 + i - i[:, None]]  # (size, size)
        real = inside(true_lengths(lengths, 1, l, q.device), n * size)  # (b or 1, n size)
        real = real.unflatten(1, (n, 1, size))  # (b or 1, n, 1, size)
        seen = real & (i <= i[:, None]) if self.causal else real.expand(-1, -1, size, -1)
        if self.laplace:
            keys = (i + 1.0)[:, None] if self.causal else real.sum(-1, keepdim=True).clamp(min=1)
            scores = (q @ k.transpose(-1, -2)).float() / keys + bias  # (b, n, size, size)
            weights = 0.5 * (1 + torch.erf((scores - math.sqrt(0.5)) * math.sqrt(2 * math.pi)))
            y = (weights * seen).to(v.dtype) @ v
        else:
            seen = seen | ~seen.any(-1, keepdim=True)  # softmax needs a key
            mask = bias.masked_fill(~seen, -math.inf).to(q.dtype)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y.flatten(1, 2)[:, :l]

    def forward(self, x, lengths, raw, K=None):
        K = self.kernel(x.shape[1]) if K is None else K
        averages = F.silu(self.convolve(x, K, lengths, self.omega))  # (b, l, d)
        gates = self.gates(self.dropout(averages))
        u, z, r, h = gates.split((self.d, self.z, self.v, self.d), -1)
        z = F.silu(z)  # (b, l, z)
        q, k = (z * self.scale[i] + self.shift[i] for i in range(2))  # (b, l, z)
        y = self.attend(q, k, F.silu(self.values(x)), lengths)  # (b, l, v)
        y = self.dropout(F.silu(h + self.out(F.silu(r) * y)))  # (b, l, d)
        return u.sigmoid() * (self.joined(y, x, lengths) - raw)

    def joined(self, y, x, lengths):
        """Return the attention's output y (b, l, d); zoo/spade.py joins it with S4's."""
        return y


class ScaleNorm(nn.Module):
    """x divided by its root mean square over d, times one learned scalar: the text tasks' norm."""

    def __init__(self, d):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x, lengths=None):
        y = x.float()
        return (self.gain * y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


NORMS |= {"scale": ScaleNorm}


class MegaBlock(nn.Module):
    """The mixer's gated change of x, then a feed-forward part. c.place: where each has its norm."""

    keys = dict(norm=Key(NORMS), place=Key(("pre", "post")))

    def __init__(self, c, mixer):
        super().__init__()
        self.pre = c.place == "pre"
        self.norm1 = NORMS[c.norm](c.d)
        self.norm2 = NORMS[c.norm](c.d)
        self.mixer = mixer
        self.dropout = nn.Dropout(c.dropout)
        self.ff = nn.Sequential(nn.Linear(c.d, c.v), nn.SiLU(), nn.Linear(c.v, c.d))
        for linear in (self.ff[0], self.ff[2], mixer.values, mixer.gates, mixer.out):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, x, lengths=None, *K):
        if self.pre:
            x = x + self.mixer(self.norm1(x, lengths), lengths, x, *K)
            return x + self.dropout(self.ff(self.norm2(x, lengths)))
        x = self.norm1(x + self.mixer(x, lengths, x, *K), lengths)
        return self.norm2(x + self.dropout(self.ff(x)), lengths)


@torch.no_grad()
def init_mega(backbone):
    """Draw the embedding of symbols from N(0, 1/d)."""
    if backbone.reads_symbols:
        backbone.encoder.weight.normal_(0, backbone.d**-0.5)


# v: width of values and of the feed-forward part; z: width of queries and keys.
SIZES = """
task                           layers   d   v  z norm  place activation dropout
listops                             6  80 160 64 layer post  softmax        0.1
text                                4 128 256 64 scale post  softmax        0.1
retrieval                           6 128 256 64 scale post  softmax        0.1
image|scifar                        8 160 320 96 batch pre   laplace          -
pathfinder                          6 128 256 64 batch pre   laplace          -
pathx|pathx256                      4  64 128 32 batch pre   laplace          -
text256|text_demo|file:*|ucr:*      3  64 128 32 layer pre   softmax          -
*_demo|*_mini                       3  32  64 16 layer pre   softmax          -
*                                   4 128 256 64 layer pre   softmax          -
"""
RECIPES = """
task       objective loss pool head   lr       wd   batch length warmup schedule
listops    masked    ce   mean mlp    -/-/1e-3 0.01 64    60e    3000   cos
text       masked    ce   mean mlp    -/-/4e-3 0.01 50    50e    10000  cos
retrieval  masked    ce   mean pair   -/-/3e-3 0.04 64    40e    10000  cos
image      masked    l1   mean mlp    -/-/1e-2 0.02 50    200e   9000   cos
pathfinder masked    ce   mean linear -/-/1e-2 0.01 128   200e   50000  cos
pathx      masked    ce   mean linear -/-/1e-2 0.01 128   100e   25000  cos
"""
CHUNKS = """
task                  sizes
*_demo|*_mini|text256 chunk=16
pathx|pathx256        chunk=4096
"""
MODELS |= {
    "mega": Model(MegaBlock, Mega, "rotary", init=init_mega, sizes=SIZES, recipes=RECIPES),
    "mega_chunk": Model(MegaBlock, Mega, "mega", dict(chunk=128), init=init_mega, changes=CHUNKS),
}
