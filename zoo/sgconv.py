"""SGConv: a long convolution without a state space model behind it (Li et al. 2023).

    K = [w_0, w_1 / 2, w_2 / 4 stretched 2 times, w_3 / 8 stretched 4 times, ...]
Short learned pieces w_i are stretched, weighted and laid end to end; the formula needs no faster
form. Sizes are S4's with the authors' settings. Recipes from scratch are the authors'; our
schedules approximate theirs."""

import math
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from models import MODELS, SSM, Kernel, Key, Model, SSMBlock


def sgconv_kernel(w, l, decay, power, stretch):
    """Return the kernel of SGConv: S short learned pieces; later pieces are longer and weigh less.

    w (S, dir, d, d0) pieces of d0 values, the first nearest to lag 0; decay, power (d,) -> float32
    (dir, d, l). Piece i is stretched s = 2^(max(0, i-1) + stretch) times by linear interpolation:
    its lag t reads the piece at (t + 1/2) / s - 1/2, clamped. So S d0 parameters reach T = d0
    2^(S-1 + stretch) lags. Piece i is weighted by decay^(S-1-i), lag t by (t + 1)^-power. The
    result is cut to l lags or continued with zeros."""
    decay = decay.float()[:, None]  # (d, 1)
    pieces = []
    for i, piece in enumerate(w.float()):
        piece = piece * decay ** (len(w) - 1 - i)  # (dir, d, d0)
        s = 2 ** (max(0, i - 1) + stretch)
        pieces.append(F.interpolate(piece, scale_factor=s, mode="linear"))
    K = torch.cat(pieces, -1)  # (dir, d, T)
    K = K * torch.arange(1, K.shape[-1] + 1, device=K.device) ** -power.float()[:, None]
    return F.pad(K, (0, l - K.shape[-1]))  # (dir, d, l)  a negative pad cuts


class SGConv(Kernel):
    """Kernels of SGConv, divided by their norm at initialisation, which is saved with the weights.

    About log2(length / c.piece) pieces of c.piece learned values, with their own learning rate,
    cover the whole length. decay rises over the channels from c.decay by c.decay_spread. c.cosine:
    pieces start as cosines, with a random permutation of frequencies over the channels."""

    keys = dict(piece=Key(int, 32), decay=Key(float, 2.0), decay_spread=Key(float, 0.0))
    keys |= dict(power=Key(float, 0.0), stretch=Key(int, 0, least=0), cosine=Key((0, 1), 0))
    keys |= dict(piece_lr=Key(float, 1e-3))

    def __init__(self, c):
        super().__init__()
        self.d = c.d
        self.stretch = c.stretch
        pieces = 1 + max(0, math.ceil(math.log2(c.length / c.piece)) - c.stretch)
        w = torch.randn(pieces, c.directions, c.d, c.piece)  # (S, dir, d, d0)
        if c.cosine:
            turn = torch.linspace(0, 2 * math.pi, c.piece)  # (d0,)
            for i in range(pieces):
                w[i] = (torch.randperm(c.d)[:, None] * turn).cos()
        self.w = nn.Parameter(w)
        decay = torch.linspace(c.decay, c.decay + c.decay_spread, c.d)
        self.register_buffer("multiplier", decay)  # (d,)
        self.register_buffer("power", torch.full((c.d,), float(c.power)), persistent=False)
        reach = c.piece * 2 ** (pieces - 1 + c.stretch)  # at least the length
        K = sgconv_kernel(w, reach, self.multiplier, self.power, c.stretch)  # (dir, d, reach)
        self.register_buffer("norm", K.norm(dim=-1, keepdim=True))
        self.rates = {"w": (c.piece_lr, True)}

    def arguments(self, p):
        return p.w, p.multiplier, p.power, p.norm

    def make(self, w, multiplier, power, norm, l):
        return sgconv_kernel(w, l, multiplier, power, self.stretch) / norm


CHANGES = """
task              sizes
listops|retrieval piece=1
text              piece=2
image             decay=1,power=1,dropout=0.2
pathfinder        dropout=0.2
pathx|pathx256    piece=64,stretch=1,decay=1,decay_spread=2,cosine=1
"""
RECIPES = """
task    objective loss pool head   lr       wd   batch length warmup schedule
listops masked    ce   mean linear -/-/1e-2 0.05 50    40e    1000   cos
text    masked    ce   mean linear -/-/1e-2 0.05 16    32e    1000   cos
pathx   masked    ce   mean linear -/-/4e-3 0.03 64    50e    10000  cos
"""
MODELS |= {"sgconv": Model(SSMBlock, partial(SSM, SGConv), "s4", changes=CHANGES, recipes=RECIPES)}
