"""The models one position at a time, for generation. Skip this file at a first reading.

A causal layer has a recurrent form, `step`: one position and the state so far -> its output and the
new state. A state space model keeps its state x, attention all keys and values so far. This file
gives the classes of models.py their `step`; those of zoo/ bring their own. Where a layer has none,
predict.py computes all positions anew for every symbol."""

import torch
import torch.nn.functional as F

from kernels import transition_power
from models import S4, SSM, Attention, Diagonal, SSMBlock, TransformerBlock


def can_step(backbone):
    """Return whether all layers have a recurrent form."""
    mixers = [layer.mixer for layer in backbone.layers]
    kernels = [getattr(mixer, "kernel", mixer) for mixer in mixers]
    return all(map(has_step, [*backbone.layers, *mixers, *kernels]))


def has_step(part):
    """Return whether a module has a recurrent form. A class that replaces `forward` does not
    inherit one."""
    for base in type(part).__mro__:
        if {"step", "forward"} & vars(base).keys():
            return "step" in vars(base)


def backbone_step(backbone, x, t, states):
    """Compute position t of a causal backbone in eval mode, equal to `forward` there.

    x (b,) symbols or (b, channels) samples; states: the layers' after position t - 1, None at the
    start -> (b, d), states."""
    x = backbone.encoder(x)  # (b, d)
    if backbone.positions is not None:
        x = x + backbone.positions[t]
    after = []
    for layer, state in zip(backbone.layers, states or [None] * len(backbone.layers)):
        x, state = layer.step(x, state)
        after.append(state)
    return x if backbone.norm is None else backbone.norm(x), after


# ---- Its parts: x (b, d), state after the previous position or None -> y (b, d), state -----------


def transformer_block_step(block, x, state):
    y, state = block.mixer.step(block.norm1(x), state)
    x = x + y
    return x + block.ff(block.norm2(x)), state


def ssm_block_step(block, x, state):
    y, state = block.mixer.step(block.norm(x) if block.pre else x, state)
    return x + y if block.pre else block.norm(x + y), state


def attention_step(mixer, x, state):
    """state: keys and values (b, h, t, e). A model with its own `attend` calls it on all positions
    so far and keeps the last."""
    start = 0 if state is None else state[0].shape[2]
    q, k, v = mixer.project(x[:, None], start)  # (b, h, 1, e)
    if state is not None:
        k = torch.cat((state[0], k), 2)
        v = torch.cat((state[1], v), 2)
    if type(mixer).attend is Attention.attend:
        first = max(0, (start // mixer.block - 1) * mixer.block) if mixer.block else 0
        y = F.scaled_dot_product_attention(q, k[:, :, first:], v[:, :, first:])  # (b, h, 1, e)
    else:  # all positions, with one real query
        y = mixer.attend(F.pad(q, (0, 0, start, 0)), k, v, None)[:, :, -1:]
    return mixer.merge(y)[:, 0], (k, v)


def ssm_step(mixer, x, state):
    y, state = mixer.kernel.step(x, state)
    return F.glu(mixer.out(F.gelu(y + mixer.D * x)), dim=-1), state


def diagonal_step(kernel, u, x):
    """state: x (b, d, n), the sum of u's past."""
    W, Lambda = kernel.arguments(kernel)
    x = u[..., None] + (0 if x is None else torch.exp(Lambda) * x)  # (b, d, n)
    return (W[0] * x).real.sum(-1).float(), x


def s4_kernel_step(kernel, u, state):
    """state: C (d, n), which costs far more to find than a step, and x (b, d, n)."""
    A, P, B, C, dt = kernel.arguments(kernel)
    if state is None:
        C = s4_recover_C(A, P, C, dt, kernel.length)[0].to(A.dtype)  # (d, n)
        x = torch.zeros(*u.shape, A.shape[-1], dtype=A.dtype, device=u.device)  # (b, d, n)
    else:
        C, x = state
    y, x = s4_step(A, P, B, C, dt, x, u)
    return y, (C, x)


Attention.step = attention_step
Diagonal.step = diagonal_step
S4.step = s4_kernel_step
SSM.step = ssm_step
SSMBlock.step = ssm_block_step
TransformerBlock.step = transformer_block_step


# ---- The recurrence of S4 (kernels.py, part 3) ---------------------------------------------------


def s4_recover_C(A, P, C, dt, l):
    """Return C from the trained C~ = C (I - Abar^l): complex (dir, d, n) -> complex128."""
    power = transition_power(A, P, dt, l)  # (d, N, N)
    C_real = torch.cat((C.real, -C.imag), -1).double()  # (dir, d, N) Re C x as a row
    rest = (torch.eye(power.shape[-1]).to(power) - power).transpose(-1, -2)
    C_real = torch.linalg.solve(rest, C_real.permute(1, 2, 0)).permute(2, 0, 1)  # (dir, d, N)
    return torch.complex(*C_real.chunk(2, -1)).conj().resolve_conj()  # (dir, d, n)


def s4_step(A, P, B, C, dt, x, u):
    """Take one step of S4's recurrence: state x complex (b, d, n), input u (b, d) -> y (b, d), x.

    A, P, B complex (d, n) or (1, n), C complex (d, n) from `s4_recover_C`, dt (d,). O(n) per
    channel. Solves the bilinear rule (2/dt - A_full) x' = (2/dt + A_full) x + 2 B u by Woodbury's
    identity. x is half of the state [x, conj x]; the other half enters through real parts. Abar is
    never diagonalised: its eigenvectors have condition 4e7 at HiPPO's start."""
    rate = 2 / dt[:, None]  # (d, 1)
    inverse = 1 / (rate - A)  # (d, n)
    P_conj = P.conj()
    rho = 1 / (1 + 2 * (P.abs().square() * inverse).real.sum(-1, keepdim=True))  # (d, 1)
    w = (rate + A) * x - P * (2 * (P_conj * x).real.sum(-1, keepdim=True)) + 2 * B * u[..., None]
    x = inverse * (w - P * (rho * 2 * (P_conj * inverse * w).real.sum(-1, keepdim=True)))
    return (2 * (C * x).real.sum(-1)).float(), x.to(torch.complex64)
