"""Mamba: a diagonal recurrence whose step size, input and output maps depend on the input (Gu and Dao 2023).

Its poles change from position to position, so it is no convolution: `selective_scan` steps through the sequence. The
authors' model is causal. For the masked objective a layer here has a scan per direction, with shared projections. No
sizes or recipes are published for these tasks: widths, depths and recipes are S4's, the rest the authors' defaults.
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from kernels import ceil_div, inside
from models import MODELS, NORMS, Key, Model, SSMBlock, log_uniform

CHUNK = 8                                  # positions; a longer chunk does not fit into a CPU's cache
AT_ONCE = dict(cpu=2**17, cuda=2**22)      # numbers of a state that one call advances, about


def selective_scan_naive(u, delta, A, B, C):
    """Compute `selective_scan` one step after another."""
    s, y = 0, []
    for t in range(u.shape[1]):
        s = torch.exp(delta[:, t, :, None] * A) * s + (delta * u)[:, t, :, None] * B[:, t, None]       # (b, e, n)
        y.append((s * C[:, t, None]).sum(-1))
    return torch.stack(y, 1)                                                                  # (b, l, e)


@torch.amp.autocast("cpu", enabled=False)
@torch.amp.autocast("cuda", enabled=False)
def selective_scan(u, delta, A, B, C):
    """Run s[t] = exp(delta[t] A) s[t-1] + delta[t] u[t] B[t], y[t] = sum over n of C[t] s[t], in the inputs' dtype.

    u, delta (b, l, e), delta positive; A (e, n) negative; B, C (b, l, n), the same for all channels -> y (b, l, e).
    The states of all positions, (b, l, e, n), would take n times the memory of the input. The scan therefore works in
    chunks and keeps only the states between them. Positions come first in memory; each takes one call per direction.
    A small batch is cut into segments of its length, which advance together (`entering`).
    """
    u, delta, B, C = (part.transpose(0, 1).contiguous() for part in (u, delta, B, C))         # (l, b, e) or (l, b, n)
    return scan(u, delta, A, B, C)[0].transpose(0, 1)


def states_of(delta, A, B, v, s):
    """Return for k positions after state s (b, e, n): decay (k, b, e, n), and s with the states (k + 1, b, e, n)."""
    decay, states = (delta[..., None] * A).exp_(), s.new_empty(len(v) + 1, *s.shape)
    states[0] = s
    torch.mul(v[..., None], B[:, :, None], out=states[1:])
    for t in range(len(v)):
        states[t + 1].addcmul_(decay[t], states[t])
    return decay, states


def segments(u, A):
    """Return into how many segments of at least 16 positions u (l, b, e) is cut. Fewer than 4 are not worth it."""
    many = min(len(u) // 16, AT_ONCE["cuda" if u.is_cuda else "cpu"] // (u.shape[1] * A.numel()))
    return many if many >= 4 else 1


def cut(x, many):
    """Cut into segments, (l, b, ...) -> (l / many, many b, ...). Zeros at the end neither decay nor add anything."""
    length = ceil_div(len(x), many)
    x = F.pad(x, (0, 0, 0, 0, 0, many * length - len(x)))
    return x.unflatten(0, (many, length)).transpose(0, 1).flatten(1, 2)


def uncut(x, many, l):
    return x.unflatten(1, (many, -1)).transpose(0, 1).flatten(0, 1)[:l]


def entering(delta, A, x, W, many, back=False):
    """Return the state that enters each segment, (many b, e, n), where position t adds x[t] W[t]: delta, x (l, many b,
    e), W (l, many b, n). First all segments run from 0, side by side; then their ends are handed on, one after another.
    back: the gradient of states, which comes from the last position, and of which what t adds decays at t already."""
    ends = x.new_zeros(*x.shape[1:], A.shape[1])
    if many == 1:
        return ends
    whole = torch.exp(delta.sum(0)[..., None] * A)
    delta, x, W = (y.flip(0) if back else y for y in (delta, x, W))
    for some in (slice(i, i + CHUNK) for i in range(0, len(x), CHUNK)):
        decay, adds = (delta[some, ..., None] * A).exp_(), x[some, ..., None] * W[some, :, None]
        for add, kept in zip(adds, decay):
            ends = ends.add_(add).mul_(kept) if back else ends.mul_(kept).add_(add)
    ends, whole = (y.unflatten(0, (many, -1)).unbind() for y in (ends, whole))
    states, order = {}, range(many)[::-1] if back else range(many)
    s = torch.zeros_like(ends[0])
    for segment in order:
        states[segment], s = s, torch.addcmul(ends[segment], whole[segment], s)
    return torch.cat([states[segment] for segment in range(many)])


# Custom operators of torch: --compile treats each as one call. `register_fake` gives the shapes of results.
@torch.library.custom_op(__name__.replace(".", "::"), mutates_args=())
def scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `selective_scan` with positions first -> y (l, b, e), and the states between chunks (chunks, b, e, n), of
    all segments (many b)."""
    l, many, before, y = len(u), segments(u, A), [], []
    u, delta, B, C = (cut(part, many) for part in (u, delta, B, C))
    v = delta * u
    s = entering(delta, A, v, B, many)
    for i in range(0, len(u), CHUNK):
        some = slice(i, i + CHUNK)
        before.append(s)
        _, states = states_of(delta[some], A, B[some], v[some], s)
        y.append((states[1:] @ C[some, :, :, None])[..., 0])                                  # (k, b, e)
        s = states[-1].clone()
    return uncut(torch.cat(y), many, l), torch.stack(before)


@torch.library.custom_op(__name__.replace(".", "::") + "_backward", mutates_args=())
def scan_backward(grad: Tensor, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, s: Tensor) -> list[Tensor]:
    """Return the inputs' gradients. The states' gradient is the same recurrence from the end: g[t] = C[t] dy[t] +
    decay[t+1] g[t+1]. The gradient of delta[t] A, whose exponential is decay[t], is g[t] decay[t] s[t-1]."""
    l, many, of_v, of_delta, of_A, of_B, of_C = len(u), segments(u, A), [], [], torch.zeros_like(A), [], []
    grad, u, delta, B, C = (cut(part, many) for part in (grad, u, delta, B, C))
    v, carry = delta * u, entering(delta, A, grad, C, many, back=True)
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
        g.mul_(decay).mul_(states[:-1])                                                       # gradient of delta A
        of_delta.append((g * A).sum(-1))                                                      # (k, b, e)
        of_A += (g * delta[some, ..., None]).sum((0, 1))
    of_v, of_delta, of_B, of_C = (torch.cat(parts[::-1]) for parts in (of_v, of_delta, of_B, of_C))
    of_u, of_delta, of_B, of_C = (uncut(part, many, l) for part in (of_v * delta, of_delta + of_v * u, of_B, of_C))
    return [of_u, of_delta, of_A, of_B, of_C]


def fake_scan(u, delta, A, B, C):
    many = segments(u, A)
    chunks = ceil_div(ceil_div(len(u), many), CHUNK)
    return torch.empty_like(u), u.new_empty(chunks, many * u.shape[1], u.shape[2], A.shape[1])


scan.register_fake(fake_scan)
scan_backward.register_fake(lambda grad, *inputs: [*map(torch.empty_like, inputs[:5])])
scan.register_autograd(lambda ctx, grad, _: tuple(scan_backward(grad.contiguous(), *ctx.saved_tensors)),
                       setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output[1]))


class Selective(nn.Module):
    """One direction: h (b, l, e) -> (b, l, e). After a short convolution each position determines its own step size
    delta, what it writes into the states (B), and what it reads from them (C). A long step makes the states forget
    their past and take in the position; a short step skips the position."""

    def __init__(self, c, e):
        super().__init__()
        self.rank, self.n = math.ceil(c.d / 16), c.state
        self.conv = nn.Conv1d(e, e, c.conv, groups=e, padding=c.conv - 1)
        self.select = nn.Linear(e, self.rank + 2 * c.state, bias=False)
        self.delta = nn.Linear(self.rank, e)
        nn.init.uniform_(self.delta.weight, -self.rank ** -0.5, self.rank ** -0.5)
        self.delta.bias.data = log_uniform(c, e).exp().expm1().log()                          # softplus of it is dt
        self.A_log = nn.Parameter(torch.arange(1.0, c.state + 1).log().repeat(e, 1))          # (e, n)
        self.D = nn.Parameter(torch.ones(e))
        self.rates = {"A_log": (None, False), "D": (None, False)}                             # no weight decay

    def selected(self, h):
        """Return delta (..., e) and B, C (..., n), float32, of the convolution's output h (..., e)."""
        delta, B, C = self.select(h).float().split((self.rank, self.n, self.n), -1)
        return F.softplus(self.delta(delta).float()), B, C

    def forward(self, h, real):
        """real (b, l, 1): 0 at padding; or None. In a reversed sequence padding comes first and leaves states at 0."""
        h = F.silu(self.conv(h.transpose(1, 2))[..., :h.shape[1]]).transpose(1, 2)
        h = h if real is None else h * real
        delta, B, C = self.selected(h)
        return selective_scan(h.float(), delta, -self.A_log.float().exp(), B, C) + self.D * h

    def step(self, h, state):
        """Take one step, h (b, e). state: None, or the convolution's last inputs (b, e, conv - 1) and s (b, e, n)."""
        if state is None:
            state = h.new_zeros(*h.shape, self.conv.padding[0]), h.new_zeros(*h.shape, self.n)
        seen, s = torch.cat((state[0], h[..., None]), -1), state[1]                           # (b, e, conv)
        h = F.silu((seen * self.conv.weight[:, 0]).sum(-1) + self.conv.bias)                  # (b, e)
        delta, B, C = self.selected(h)
        s = torch.exp(delta[..., None] * -self.A_log.exp()) * s + (delta * h)[..., None] * B[:, None]
        return (s * C[:, None]).sum(-1) + self.D * h, (seen[..., 1:], s)


class Mamba(nn.Module):
    """A layer of Mamba, (b, l, d) -> (b, l, d). It makes twice c.expand d channels: one half passes the scans, and the
    other half gates their sum. c.conv: width of the convolution. There is no separate feed-forward part."""

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
        """Compute one position of a causal layer: x (b, d), the state before it or None -> y (b, d), state."""
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
