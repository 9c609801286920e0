"""A diagonal recurrence whose states read all channels, so there is a scan over time instead of a
kernel per channel. Not a --model: S5 and LRU use it.

    x[t] = lambda x[t-1] + v[t], by doubling: x[t] <- x[t] + lambda^s x[t-s] for s = 1, 2, 4, ..."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import inside


class DiagonalScan(torch.autograd.Function):
    """Run x[t] = lambda x[t-1] + v[t]: complex (n,), complex (b, l, n) -> complex (b, l, n).

    After log2(l) passes, each position holds the sum over all positions before it. Powers of lambda
    are taken from its logarithm in float64; repeated squaring in float32 would lose two digits. The
    backward pass needs only x; autograd would keep all passes."""

    @staticmethod
    def forward(ctx, log_lambda, v):
        x = v
        shift = 1
        while shift < v.shape[1]:
            power = torch.exp(shift * log_lambda.to(torch.complex128)).to(v.dtype)  # (n,)
            x = torch.cat((x[:, :shift], x[:, shift:] + power * x[:, :-shift]), 1)
            shift *= 2
        ctx.save_for_backward(log_lambda, x)
        return x

    @staticmethod
    def backward(ctx, grad):
        """v's gradient is the scan from the end; log lambda's sums it times conj(lambda x[t-1])."""
        log_lambda, x = ctx.saved_tensors
        grad = DiagonalScan.apply(log_lambda.conj(), grad.flip(1)).flip(1)  # (b, l, n)
        before = log_lambda.exp() * x[:, :-1]
        return (grad[:, 1:] * before.conj()).sum((0, 1)), grad


diagonal_scan = DiagonalScan.apply


class SharedState(nn.Module):
    """Base class of S5 and LRU: a linear recurrence of n states, (b, l, d) -> (b, l, d).

    x[t] = lambda x[t-1] + Bbar u[t] with lambda (n,), Bbar (n, d); y = factor Re C x + D u with C
    (d, n). When bidirectional, a second C reads the scan of the reversed sequence; both scans
    include u[t]. A subclass defines `gate`, and `recurrence`, which returns log lambda and Bbar."""

    factor = 1

    def __init__(self, c, n):
        super().__init__()
        C = c.C_scale * torch.randn(c.directions, c.d, n, 2) / math.sqrt(c.state)
        self.C = nn.Parameter(C)  # (dir, d, n, 2)
        self.D = nn.Parameter(torch.randn(c.d))

    def forward(self, u, lengths=None):
        if lengths is not None:
            u = u * inside(lengths, u.shape[1])[..., None]
        with torch.autocast(u.device.type, enabled=False):
            log_lambda, B = self.recurrence()
            u = u.float()
            v = torch.complex(u @ B.real.T, u @ B.imag.T)  # (b, l, n)
            states = [diagonal_scan(log_lambda, v)]
            if len(self.C) == 2:
                states.append(diagonal_scan(log_lambda, v.flip(1)).flip(1))
            y = 0
            for x, C in zip(states, self.C.float()):
                y = y + x.real @ C[..., 0].T - x.imag @ C[..., 1].T  # (b, l, d) Re C x
            y = self.factor * y + self.D * u
        return self.gate(F.gelu(y, approximate="tanh"))

    def step(self, x, state):
        """Compute one position: x (b, d), state (b, n) or None -> y (b, d), state."""
        log_lambda, B = self.recurrence()
        v = x.to(B.dtype) @ B.T  # (b, n)
        state = v if state is None else v + log_lambda.exp() * state
        C = torch.view_as_complex(self.C.float())[0]  # (d, n)
        y = self.factor * (state @ C.T).real + self.D * x
        return self.gate(F.gelu(y, approximate="tanh")), state
