"""S4D: S4 without its low-rank term, with three initialisations (Gu et al. 2022, arXiv 2206.11893).

    K[k] = 2 Re sum_n C_n B_n Bbar_n p_n^k,   p = e^(dt A),   Bbar = (p - 1) / A   (zero-order hold)
The starts are `s4d` (Lin), `s4d_inv` and `s4d_legs`. Sizes and recipes are S4's."""

import math
from functools import partial

import torch
import torch.nn as nn

from kernels import hippo_nplr
from models import MODELS, S4, SSM, Diagonal, Model, SizeError, SSMBlock, log_uniform


def s4d_poles(A, B, C, dt):
    """Return W (dir, d, n) and Lambda (d, n), complex128, for which `diagonal_kernel` gives the
    kernel of S4D: A, B complex (d, n) or (1, n), one of each pair; C complex (dir, d, n); dt (d,).
    Layers may come first in all shapes."""
    A, B, C = (v.to(torch.complex128) for v in (A, B, C))
    Lambda = dt.double()[..., None] * A  # (..., d, n)
    W = 2 * C.movedim(-3, 0) * B * torch.expm1(Lambda) / A  # (dir, ..., d, n)
    return W.movedim(0, -3), Lambda


class S4D(Diagonal):
    """Kernels of S4D. c.start chooses the initial poles.

    lin    Im A = pi n, the frequencies of a Fourier basis
    inv    Im A = N/pi (N / (2n + 1) - 1), dense at 0, with few high frequencies
    legs   HiPPO's poles, without its low-rank term
    All three have Re A = -1/2 and B = 1. Copies, learning rates and log dt are as in `S4`."""

    keys = S4.keys

    def __init__(self, c):
        super().__init__()
        if c.d % c.n_ssm:
            raise SizeError(f"d={c.d} is not a multiple of n_ssm={c.n_ssm}")
        self.d = c.d
        n = torch.arange(c.state // 2)
        imag = {
            "lin": math.pi * n,
            "inv": c.state / math.pi * (c.state / (2 * n + 1) - 1),
            "legs": hippo_nplr(c.state)[0].imag.float(),
        }[c.start]  # (n,)
        self.log_dt = nn.Parameter(log_uniform(c, c.d))
        self.A_log_re = nn.Parameter(torch.full((c.n_ssm, len(n)), math.log(0.5)))
        self.A_im = nn.Parameter(imag.repeat(c.n_ssm, 1))  # (n_ssm, n)
        self.B = nn.Parameter(torch.tensor([1.0, 0.0]).repeat(c.n_ssm, len(n), 1))  # (n_ssm, n, 2)
        C = torch.randn(c.directions, c.d, len(n), dtype=torch.complex64)
        self.C = nn.Parameter(torch.view_as_real(C).clone())  # (dir, d, n, 2)
        self.rates = dict.fromkeys(("A_log_re", "A_im", "B"), (c.ssm_lr, False))
        self.rates["log_dt"] = (None if c.dt_lr == "main" else c.dt_lr, False)

    def arguments(self, p):
        A = torch.complex(-p.A_log_re.float().exp().clamp(min=1e-4), p.A_im.float())  # (n_ssm, n)
        B, C = (torch.view_as_complex(v.float()) for v in (p.B, p.C))
        A, B = (v.tile((self.d // v.shape[-2], 1)) for v in (A, B))  # (d, n)
        return s4d_poles(A, B, C, p.log_dt.float().exp())


MODELS |= {
    name: Model(SSMBlock, partial(SSM, S4D), "s4", dict(start=start))
    for name, start in (("s4d", "lin"), ("s4d_inv", "inv"), ("s4d_legs", "legs"))
}
