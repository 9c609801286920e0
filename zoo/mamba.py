"""Mamba: a diagonal recurrence whose step size, input and output maps depend on the input (Gu and
Dao 2023).

    s[t] = exp(delta[t] A) s[t-1] + delta[t] B[t] u[t],   y[t] = C[t] s[t]
Its poles change from position to position, so it is no convolution but the scan in
zoo/selective.py. The authors' model is causal; for the masked objective a layer here has a scan per
direction, with shared projections. None are published for these tasks, so widths, depths and
recipes are S4's, the rest the authors' defaults."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import inside
from models import MODELS, NORMS, Key, Model, SSMBlock, log_uniform
from zoo.selective import selective_scan


class Selective(nn.Module):
    """One direction: h (b, l, e) -> (b, l, e).

    After a short convolution each position determines its own step size delta, what it writes into
    the states (B), and what it reads from them (C). A long step forgets the past and takes in the
    position; a short step skips the position."""

    def __init__(self, c, e):
        super().__init__()
        self.rank = math.ceil(c.d / 16)
        self.n = c.state
        self.conv = nn.Conv1d(e, e, c.conv, groups=e, padding=c.conv - 1)
        self.select = nn.Linear(e, self.rank + 2 * c.state, bias=False)
        self.delta = nn.Linear(self.rank, e)
        nn.init.uniform_(self.delta.weight, -(self.rank**-0.5), self.rank**-0.5)
        self.delta.bias.data = log_uniform(c, e).exp().expm1().log()  # softplus of it is dt
        self.A_log = nn.Parameter(torch.arange(1.0, c.state + 1).log().repeat(e, 1))  # (e, n)
        self.D = nn.Parameter(torch.ones(e))
        self.rates = {"A_log": (None, False), "D": (None, False)}  # no weight decay

    def selected(self, h):
        """Return delta (..., e) and B, C (..., n), float32, of the convolution's h (..., e)."""
        delta, B, C = self.select(h).float().split((self.rank, self.n, self.n), -1)
        return F.softplus(self.delta(delta).float()), B, C

    def forward(self, h, real):
        """real (b, l, 1) or None: 0 at padding, which leaves states at 0 where it comes first."""
        h = F.silu(self.conv(h.transpose(1, 2))[..., : h.shape[1]]).transpose(1, 2)
        h = h if real is None else h * real
        delta, B, C = self.selected(h)
        return selective_scan(h.float(), delta, -self.A_log.float().exp(), B, C) + self.D * h

    def step(self, h, state):
        """h (b, e), state -> y (b, e), state: last inputs (b, e, conv - 1) and s (b, e, n)."""
        if state is None:
            state = h.new_zeros(*h.shape, self.conv.padding[0]), h.new_zeros(*h.shape, self.n)
        past, s = state
        inputs = torch.cat((past, h[..., None]), -1)  # (b, e, conv)
        h = F.silu((inputs * self.conv.weight[:, 0]).sum(-1) + self.conv.bias)  # (b, e)
        delta, B, C = self.selected(h)
        decay = torch.exp(delta[..., None] * -self.A_log.exp())  # (b, e, n)
        s = decay * s + (delta * h)[..., None] * B[:, None]
        return (s * C[:, None]).sum(-1) + self.D * h, (inputs[..., 1:], s)


class Mamba(nn.Module):
    """A layer of Mamba, (b, l, d) -> (b, l, d): of twice c.expand d channels one half passes the
    scans, and the other half gates their sum. c.conv: width of the convolution."""

    keys = dict(state=Key(int), conv=Key(int, 4), expand=Key(int, 2))
    keys |= dict(dt_min=Key(float), dt_max=Key(float))

    def __init__(self, c):
        super().__init__()
        e = c.expand * c.d
        self.enter = nn.Linear(c.d, 2 * e, bias=False)
        self.scans = nn.ModuleList(Selective(c, e) for _ in range(c.directions))
        self.out = nn.Linear(e, c.d, bias=False)

    def forward(self, x, lengths=None):
        h, gate = self.enter(x).chunk(2, -1)  # (b, l, e) both
        real = None if lengths is None else inside(lengths, x.shape[1])[..., None]  # (b, l, 1)
        h = h if real is None else h * real
        y = self.scans[0](h, real)
        for scan in self.scans[1:]:
            y = y + scan(h.flip(1), None if real is None else real.flip(1)).flip(1)
        return self.out(y.to(gate.dtype) * F.silu(gate))

    def step(self, x, state):
        """x (b, d), state after the previous position or None -> y (b, d), state."""
        h, gate = self.enter(x).chunk(2, -1)
        y, state = self.scans[0].step(h, state)
        return self.out(y * F.silu(gate)), state


class RMSNorm(nn.RMSNorm):
    def forward(self, x, lengths=None):
        return super().forward(x)


NORMS |= {"rms": RMSNorm}
CHANGES = """
task sizes
*    state=16,norm=rms,place=pre
"""
MODELS |= {"mamba": Model(SSMBlock, Mamba, "s4", changes=CHANGES)}
