"""The scan of a diagonal recurrence whose poles change from position to position. Not a --model:
Mamba uses it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import ceil_div

CHUNK = 8  # positions; on a CPU 4 take 5 % longer, 2 take 15 %
# numbers of a state that one call advances, about; on a GPU not measured
AT_ONCE = dict(cpu=2**17, cuda=2**20)


@torch.amp.autocast("cpu", enabled=False)
@torch.amp.autocast("cuda", enabled=False)
def selective_scan(u, delta, A, B, C):
    """Run s[t] = exp(delta[t] A) s[t-1] + delta[t] u[t] B[t], y[t] = sum over n of C[t] s[t], in
    the inputs' dtype.

    u, delta (b, l, e), delta positive; A (e, n) negative; B, C (b, l, n), the same for all channels
    -> y (b, l, e). The states of all positions, (b, l, e, n), would take n times the memory of the
    input. The scan therefore works in chunks and keeps only the states between them. Positions come
    first in memory; each takes one call per direction. A small batch is cut into segments of its
    length, which advance together (`entering`)."""
    # (l, b, e) or (l, b, n)
    u, delta, B, C = (part.transpose(0, 1).contiguous() for part in (u, delta, B, C))
    return scan(u, delta, A, B, C)[0].transpose(0, 1)


def states_of(delta, A, B, v, s):
    """Return for k positions after state s (b, e, n): decay (k, b, e, n), and s with the states (k
    + 1, b, e, n)."""
    decay, states = (delta[..., None] * A).exp_(), s.new_empty(len(v) + 1, *s.shape)
    states[0] = s
    torch.mul(v[..., None], B[:, :, None], out=states[1:])
    for t in range(len(v)):
        states[t + 1].addcmul_(decay[t], states[t])
    return decay, states


def segments(u, A):
    """Return into how many segments of at least 16 positions u (l, b, e) is cut. Fewer than 4 are
    not worth it. The number depends on the batch, and so do the last bits of the result."""
    many = min(
        u.shape[0] // 16, AT_ONCE["cuda" if u.is_cuda else "cpu"] // (u.shape[1] * A.numel())
    )
    return many if many >= 4 else 1


def cut(x, many):
    """Cut into segments, (l, b, ...) -> (l / many, many b, ...). Zeros at the end neither decay nor
    add anything."""
    length = ceil_div(len(x), many)
    x = F.pad(x, (0, 0, 0, 0, 0, many * length - len(x)))
    return x.unflatten(0, (many, length)).transpose(0, 1).flatten(1, 2)


def uncut(x, many, l):
    """Undo `cut`: (length, many b, ...) -> (l, b, ...)."""
    return x.unflatten(1, (many, -1)).transpose(0, 1).flatten(0, 1)[:l]


def entering(delta, A, x, W, many, back=False):
    """Return the state that enters each segment, (many b, e, n), if position t adds x[t] W[t]:
    delta, x (l, many b, e), W (l, many b, n).

    All segments first run from 0, side by side. A segment's last state (`ends`), and the share that
    it leaves of the state that enters it (`whole`), then give the state that enters the next
    segment. back: run from the last position to the first, as the gradient of the states does: s[t]
    = decay[t] (s[t+1] + x[t] W[t])."""
    ends = x.new_zeros(*x.shape[1:], A.shape[1])
    if many == 1:
        return ends
    whole = torch.exp(delta.sum(0)[..., None] * A)  # (many b, e, n)
    delta, x, W = (y.flip(0) if back else y for y in (delta, x, W))
    for some in (slice(i, i + CHUNK) for i in range(0, len(x), CHUNK)):
        decay, adds = (delta[some, ..., None] * A).exp_(), x[some, ..., None] * W[some, :, None]
        if back:
            adds.mul_(decay)
        for add, kept in zip(adds, decay):
            ends.mul_(kept).add_(add)
    ends, whole = (y.unflatten(0, (many, -1)) for y in (ends, whole))
    s, states = torch.zeros_like(ends[0]), []
    for end, kept in zip(*(y.flip(0) if back else y for y in (ends, whole))):
        states.append(s)
        s = end + kept * s
    return torch.cat(states[::-1] if back else states)


# Custom operators of torch, called zoo::selective and zoo::selective_backward: --compile treats
# each as one call. `register_fake` gives the shapes of results.
@torch.library.custom_op(__name__.replace(".", "::"), mutates_args=())
def scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `selective_scan` with positions first -> y (l, b, e), and the states between chunks
    (chunks, b, e, n), of all segments (many b)."""
    l, many, before, y = len(u), segments(u, A), [], []
    u, delta, B, C = (cut(part, many) for part in (u, delta, B, C))
    v = delta * u
    s = entering(delta, A, v, B, many)
    for i in range(0, len(u), CHUNK):
        some = slice(i, i + CHUNK)
        before.append(s)
        _, states = states_of(delta[some], A, B[some], v[some], s)
        y.append((states[1:] @ C[some, :, :, None])[..., 0])  # (k, b, e)
        s = states[-1].clone()
    return uncut(torch.cat(y), many, l), torch.stack(before)


@torch.library.custom_op(__name__.replace(".", "::") + "_backward", mutates_args=())
def scan_backward(
    grad: Tensor, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, s: Tensor
) -> list[Tensor]:
    """Return the inputs' gradients. The states' gradient is the same recurrence from the end: g[t]
    = C[t] dy[t] + decay[t+1] g[t+1]. The gradient of delta[t] A, whose exponential is decay[t], is
    g[t] decay[t] s[t-1]."""
    l, many, of_v, of_delta, of_A, of_B, of_C = (
        len(u),
        segments(u, A),
        [],
        [],
        torch.zeros_like(A),
        [],
        [],
    )
    grad, u, delta, B, C = (cut(part, many) for part in (grad, u, delta, B, C))
    v, carry = delta * u, entering(delta, A, grad, C, many, back=True)
    for i in reversed(range(len(s))):
        some = slice(CHUNK * i, CHUNK * (i + 1))
        decay, states = states_of(delta[some], A, B[some], v[some], s[i])
        g = grad[some, ..., None] * C[some, :, None]  # (k, b, e, n)
        for t in reversed(range(len(g))):
            g[t] += carry
            carry = decay[t] * g[t]  # (b, e, n)
        of_C.append((grad[some, :, None] @ states[1:])[:, :, 0])  # (k, b, n)
        of_B.append((v[some, :, None] @ g)[:, :, 0])  # (k, b, n)
        of_v.append((g @ B[some, :, :, None])[..., 0])  # (k, b, e)
        g.mul_(decay).mul_(states[:-1])  # gradient of delta A
        of_delta.append((g * A).sum(-1))  # (k, b, e)
        of_A += (g * delta[some, ..., None]).sum((0, 1))
    of_v, of_delta, of_B, of_C = (torch.cat(parts[::-1]) for parts in (of_v, of_delta, of_B, of_C))
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
