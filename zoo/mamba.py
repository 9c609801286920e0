"""Mamba: a diagonal recurrence whose step size, input and output depend on what is read (Gu and Dao 2023).

Its poles change with the position, so there is no convolution: `selective_scan` goes through the sequence. The authors
know one direction only. For the masked objective a layer here has two scans between one projection in and one out. No
sizes or recipes are published for these tasks: widths, depths and recipes are S4's, the rest the authors' defaults.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from kernels import inside
from models import MODELS, NORMS, Key, Model, SSMBlock, log_uniform

CHUNK = 4                                  # positions; more would leave a CPU's cache


def selective_scan_naive(u, delta, A, B, C):
    """`selective_scan` one step after another."""
    s, y = 0, []
    for t in range(u.shape[1]):
        s = torch.exp(delta[:, t, :, None] * A) * s + (delta * u)[:, t, :, None] * B[:, t, None]       # (b, e, n)
        y.append((s * C[:, t, None]).sum(-1))
    return torch.stack(y, 1)                                                                  # (b, l, e)


@torch.amp.autocast("cpu", enabled=False)
@torch.amp.autocast("cuda", enabled=False)
def selective_scan(u, delta, A, B, C):
    """s[t] = exp(delta[t] A) s[t-1] + delta[t] u[t] B[t], y[t] = sum over n of C[t] s[t], in the dtype of the inputs.

    u, delta (b, l, e), delta positive; A (e, n) negative; B, C (b, l, n), the same for all channels -> y (b, l, e).
    In chunks: the states of all positions, (b, l, e, n), would take n times the memory of the input. Only those between
    chunks are kept. Positions come first in memory, and each costs one call in either direction.
    """
    u, delta, B, C = (part.transpose(0, 1).contiguous() for part in (u, delta, B, C))         # (l, b, e) or (l, b, n)
    return scan(u, delta, A, B, C)[0].transpose(0, 1)


def states_of(delta, A, B, v, s):
    """Of a chunk of k positions, after state s (b, e, n): decay (k, b, e, n); s and the states (k + 1, b, e, n)."""
    decay = torch.exp(delta[..., None] * A)
    states = torch.cat((s[None], v[..., None] * B[:, :, None]))
    for t in range(len(v)):
        states[t + 1].addcmul_(decay[t], states[t])
    return decay, states


# Operators of torch: --compile takes each as one call. `register_fake` says what shapes they return.
@torch.library.custom_op(__name__.replace(".", "::"), mutates_args=())
def scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """`selective_scan` with positions first -> y (l, b, e); the states between chunks (chunks, b, e, n)."""
    v, s, before, y = delta * u, u.new_zeros(*u.shape[1:], A.shape[1]), [], []
    for i in range(0, len(u), CHUNK):
        some = slice(i, i + CHUNK)
        before.append(s)
        _, states = states_of(delta[some], A, B[some], v[some], s)
        y.append((states[1:] @ C[some, :, :, None])[..., 0])                                  # (k, b, e)
        s = states[-1].clone()
    return torch.cat(y), torch.stack(before)


@torch.library.custom_op(__name__.replace(".", "::") + "_backward", mutates_args=())
def scan_backward(grad: Tensor, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, s: Tensor) -> list[Tensor]:
    """The states' gradient is the same recurrence from the end: g[t] = C[t] dy[t] + decay[t+1] g[t+1]. The gradient of
    delta[t] A, of which decay[t] is the exponential, is g[t] decay[t] s[t-1]."""
    v, of_v, of_delta, of_A, of_B, of_C, carry = delta * u, [], [], torch.zeros_like(A), [], [], 0
    for i in reversed(range(len(s))):
        some = slice(CHUNK * i, CHUNK * (i + 1))
        decay, states = states_of(delta[some], A, B[some], v[some], s[i])
        g = grad[some, ..., None] * C[some, :, None]                                          # (k, b, e, n)
        for t in reversed(range(len(g))):
            g[t] += carry
            carry = decay[t] * g[t]                                                           # (b, e, n)
        of_C.append((grad[some, :, None] @ states[1:])[:, :, 0])                              # (k, b, n)
        of_B.append((v[some, :, None] @ g)[:, :, 0])                                          # (k, b, n)
        of_v.append((g @ B[some, :, :, None])[..., 0])                                        # (k, b, e)
        g.mul_(decay).mul_(states[:-1])                                                       # of delta A
        of_delta.append((g * A).sum(-1))                                                      # (k, b, e)
        of_A += (g * delta[some, ..., None]).sum((0, 1))
    of_v, of_delta, of_B, of_C = (torch.cat(parts[::-1]) for parts in (of_v, of_delta, of_B, of_C))
    return [of_v * delta, of_delta + of_v * u, of_A, of_B, of_C]


scan.register_fake(lambda u, delta, A, B, C: (
    torch.empty_like(u), u.new_empty(-(-len(u) // CHUNK), *u.shape[1:], A.shape[1])))
scan_backward.register_fake(lambda grad, *inputs: [*map(torch.empty_like, inputs[:5])])
scan.register_autograd(lambda ctx, grad, _: tuple(scan_backward(grad.contiguous(), *ctx.saved_tensors)),
                       setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output[1]))


class Selective(nn.Module):
    """One direction: h (b, l, e) -> (b, l, e). After a short convolution each position decides how long its own step
    is, delta, and what it writes into the states and reads from them, B and C. A long step forgets the states and takes
    in the position; a short one passes it by."""

    def __init__(self, c, e):
        super().__init__()
        self.rank, self.n = math.ceil(c.d / 16), c.state
        self.conv = nn.Conv1d(e, e, c.conv, groups=e, padding=c.conv - 1)
        self.select = nn.Linear(e, self.rank + 2 * c.state, bias=False)
        self.delta = nn.Linear(self.rank, e)
        nn.init.uniform_(self.delta.weight, -self.rank ** -0.5, self.rank ** -0.5)
        self.delta.bias.data = log_uniform(c, e).exp().expm1().log()                          # of which softplus is dt
        self.A_log = nn.Parameter(torch.arange(1.0, c.state + 1).log().repeat(e, 1))          # (e, n)
        self.D = nn.Parameter(torch.ones(e))
        self.rates = {"A_log": (None, False), "D": (None, False)}                             # not decayed

    def selected(self, h):
        """h (..., e) after the convolution -> delta (..., e), B, C (..., n), float32."""
        delta, B, C = self.select(h).float().split((self.rank, self.n, self.n), -1)
        return F.softplus(self.delta(delta).float()), B, C

    def forward(self, h, real):
        """real (b, l, 1) or None. Padding, which comes first in a reversed sequence, leaves the states at 0."""
        h = F.silu(self.conv(h.transpose(1, 2))[..., :h.shape[1]]).transpose(1, 2)
        h = h if real is None else h * real
        delta, B, C = self.selected(h)
        return selective_scan(h.float(), delta, -self.A_log.float().exp(), B, C) + self.D * h

    def step(self, h, state):
        """h (b, e); state: the inputs (b, e, conv - 1) that the convolution still sees, and s (b, e, n)."""
        if state is None:
            state = h.new_zeros(*h.shape, self.conv.padding[0]), h.new_zeros(*h.shape, self.n)
        seen, s = torch.cat((state[0], h[..., None]), -1), state[1]                           # (b, e, conv)
        h = F.silu((seen * self.conv.weight[:, 0]).sum(-1) + self.conv.bias)                  # (b, e)
        delta, B, C = self.selected(h)
        s = torch.exp(delta[..., None] * -self.A_log.exp()) * s + (delta * h)[..., None] * B[:, None]
        return (s * C[:, None]).sum(-1) + self.D * h, (seen[..., 1:], s)


class Mamba(nn.Module):
    """(b, l, d) -> (b, l, d): to twice c.expand d channels, of which one half passes the scans and the other gates
    their sum. c.conv: width of the convolution. There is no feed-forward part beside it."""

    keys = dict(state=Key(int), conv=Key(int, 4), expand=Key(int, 2), dt_min=Key(float), dt_max=Key(float))

    def __init__(self, c):
        super().__init__()
        e = c.expand * c.d
        self.enter = nn.Linear(c.d, 2 * e, bias=False)
        self.scans = nn.ModuleList(Selective(c, e) for _ in range(c.directions))
        self.out = nn.Linear(e, c.d, bias=False)

    def forward(self, x, lengths=None):
        h, gate = self.enter(x).chunk(2, -1)                                                  # (b, l, e) both
        real = None if lengths is None else inside(lengths, x.shape[1])[..., None]            # (b, l, 1)
        h = h if real is None else h * real
        y = self.scans[0](h, real)
        for scan in self.scans[1:]:
            y = y + scan(h.flip(1), None if real is None else real.flip(1)).flip(1)
        return self.out(y.to(gate.dtype) * F.silu(gate))

    def step(self, x, state):
        """One position of a causal layer: x (b, d), state after the position before or None -> y (b, d), state."""
        h, gate = self.enter(x).chunk(2, -1)
        y, state = self.scans[0].step(h, state)
        return self.out(y * F.silu(gate)), state


class RMSNorm(nn.RMSNorm):
    def forward(self, x, lengths=None):
        return super().forward(x)


NORMS |= {"rms": RMSNorm}
MODELS |= {"mamba": Model(SSMBlock, Mamba, "s4", changes="""
    task sizes
    *    state=16,norm=rms,place=pre""")}
