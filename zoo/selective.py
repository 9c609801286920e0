"""The scan of a diagonal recurrence whose poles change from position to position. Not a --model:
Mamba uses it.

    s[t] = exp(delta[t] A) s[t-1] + delta[t] u[t] B[t],   y[t] = C[t] s[t]
All states, (b, l, e, n), would take n times the memory of the input, so the scan keeps only those
between chunks. Positions come first in memory; each takes one call per direction. A small batch is
cut into segments of its length, which advance together (`entering`)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import ceil_div

CHUNK = 8  # positions; on a CPU 4 take 5 % longer, 2 take 15 %
AT_ONCE = dict(cpu=2**17, cuda=2**20)  # numbers of a state per call, about; cuda: not measured


@torch.amp.autocast("cpu", enabled=False)
@torch.amp.autocast("cuda", enabled=False)
def selective_scan(u, delta, A, B, C):
    """Run the scan: u, delta > 0 (b, l, e), A < 0 (e, n), B, C (b, l, n) -> y (b, l, e)."""
    u, delta, B, C = (part.transpose(0, 1).contiguous() for part in (u, delta, B, C))  # (l, b, .)
    return scan(u, delta, A, B, C)[0].transpose(0, 1)


def states_of(delta, A, B, v, s):
    """Return decay (k, b, e, n), and states (k + 1, b, e, n) of which s (b, e, n) is the first."""
    decay = (delta[..., None] * A).exp_()
    states = s.new_empty(len(v) + 1, *s.shape)
    states[0] = s
    torch.mul(v[..., None], B[:, :, None], out=states[1:])
    for t in range(len(v)):
        states[t + 1].addcmul_(decay[t], states[t])
    return decay, states


def segments(u, A):
    """Return the number of segments of at least 16 positions for u (l, b, e): at least 4, or 1. It
    depends on the batch, and so do the last bits of the result."""
    per_position = u.shape[1] * A.numel()  # the compiler takes shapes as variable, but not `len`
    number = min(u.shape[0] // 16, AT_ONCE["cuda" if u.is_cuda else "cpu"] // per_position)
    return number if number >= 4 else 1


def cut(x, many):
    """Cut into segments, (l, b, ...) -> (l / many, many b, ...). Zeros at the end add nothing."""
    length = ceil_div(len(x), many)
    x = F.pad(x, (0, 0, 0, 0, 0, many * length - len(x)))
    return x.unflatten(0, (many, length)).transpose(0, 1).flatten(1, 2)


def uncut(x, many, l):
    """Undo `cut`: (length, many b, ...) -> (l, b, ...)."""
    return x.unflatten(1, (many, -1)).transpose(0, 1).flatten(0, 1)[:l]


def entering(delta, A, x, W, many, back=False):
    """Return the state that enters each segment, (many b, e, n), if position t adds x[t] W[t].

    delta, x (l, many b, e), W (l, many b, n). All segments first run from 0, side by side. A
    segment's last state (`ends`), and the share that it keeps of the state that enters it (`kept`),
    then give the state that enters the next one. back: run from the last position to the first, as
    the gradient of the states does: s[t] = decay[t] (s[t+1] + x[t] W[t])."""
    ends = x.new_zeros(*x.shape[1:], A.shape[1])
    if many == 1:
        return ends
    kept = torch.exp(delta.sum(0)[..., None] * A)  # (many b, e, n)
    if back:
        delta, x, W = (part.flip(0) for part in (delta, x, W))
    for i in range(0, len(x), CHUNK):
        chunk = slice(i, i + CHUNK)
        decays = (delta[chunk, ..., None] * A).exp_()
        inputs = x[chunk, ..., None] * W[chunk, :, None]
        if back:
            inputs.mul_(decays)
        for decay, value in zip(decays, inputs):
            ends.mul_(decay).add_(value)
    ends, kept = (part.unflatten(0, (many, -1)) for part in (ends, kept))
    if back:
        ends, kept = ends.flip(0), kept.flip(0)
    states = [torch.zeros_like(ends[0])]
    for end, share in zip(ends[:-1], kept[:-1]):
        states.append(end + share * states[-1])
    return torch.cat(states[::-1] if back else states)


# Custom operators of torch: --compile treats each as one call; `register_fake` gives their shapes.
@torch.library.custom_op(__name__.replace(".", "::"), mutates_args=())
def scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `selective_scan` with positions first -> y (l, b, e), and the states between chunks
    (chunks, b, e, n), of all segments (many b)."""
    l = len(u)
    many = segments(u, A)
    u, delta, B, C = (cut(part, many) for part in (u, delta, B, C))
    v = delta * u
    s = entering(delta, A, v, B, many)
    before = []
    y = []
    for i in range(0, len(u), CHUNK):
        chunk = slice(i, i + CHUNK)
        before.append(s)
        _, states = states_of(delta[chunk], A, B[chunk], v[chunk], s)
        y.append((states[1:] @ C[chunk, :, :, None])[..., 0])  # (k, b, e)
        s = states[-1].clone()
    return uncut(torch.cat(y), many, l), torch.stack(before)


@torch.library.custom_op(__name__.replace(".", "::") + "_backward", mutates_args=())
def scan_backward(
    grad: Tensor, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, s: Tensor
) -> list[Tensor]:
    """Return the inputs' gradients. The states' gradient is the same recurrence from the end: g[t]
    = C[t] dy[t] + decay[t+1] g[t+1]. The gradient of delta[t] A, whose exponential is decay[t], is
    g[t] decay[t] s[t-1]."""
    l = len(u)
    many = segments(u, A)
    grad, u, delta, B, C = (cut(part, many) for part in (grad, u, delta, B, C))
    v = delta * u
    carry = entering(delta, A, grad, C, many, back=True)
    of_A = torch.zeros_like(A)
    of_v, of_delta, of_B, of_C = (torch.empty_like(part) for part in (u, u, B, C))
    for i in reversed(range(len(s))):
        chunk = slice(CHUNK * i, CHUNK * (i + 1))
        decay, states = states_of(delta[chunk], A, B[chunk], v[chunk], s[i])
        g = grad[chunk, ..., None] * C[chunk, :, None]  # (k, b, e, n)
        for t in reversed(range(len(g))):
            g[t] += carry
            carry = decay[t] * g[t]  # (b, e, n)
        of_C[chunk] = (grad[chunk, :, None] @ states[1:])[:, :, 0]  # (k, b, n)
        of_B[chunk] = (v[chunk, :, None] @ g)[:, :, 0]  # (k, b, n)
        of_v[chunk] = (g @ B[chunk, :, :, None])[..., 0]  # (k, b, e)
        g.mul_(decay).mul_(states[:-1])  # gradient of delta A
        of_delta[chunk] = (g * A).sum(-1)  # (k, b, e)
        of_A += (g * delta[chunk, ..., None]).sum((0, 1))
    of_u, of_delta, of_B, of_C = (
        uncut(part, many, l) for part in (of_v * delta, of_delta + of_v * u, of_B, of_C)
    )
    return [of_u, of_delta, of_A, of_B, of_C]


def fake_scan(u, delta, A, B, C):
    many = segments(u, A)
    chunks = ceil_div(ceil_div(u.shape[0], many), CHUNK)
    return torch.empty_like(u), u.new_empty(chunks, many * u.shape[1], u.shape[2], A.shape[1])


scan.register_fake(fake_scan)
scan_backward.register_fake(lambda grad, *inputs: [*map(torch.empty_like, inputs[:5])])
scan.register_autograd(
    lambda ctx, grad, _: tuple(scan_backward(grad.contiguous(), *ctx.saved_tensors)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output[1]),
)
