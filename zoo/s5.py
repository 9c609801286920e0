"""S5: one diagonal recurrence whose state all channels share, computed by a scan (Smith et al.
2023).

    x[t] = p x[t-1] + Bbar u[t],  y[t] = 2 Re C x[t] + D u[t],  p = e^(dt A),  Bbar = (p - 1) / A B
The scan is in zoo/scan.py. Sizes and recipes from scratch are the authors'; our schedules
approximate theirs."""

import math

import torch
import torch.nn as nn

from kernels import hippo_nplr
from models import MODELS, S4, Key, Model, SizeError, SSMBlock, log_uniform
from zoo.scan import SharedState


class S5(SharedState):
    """The recurrence of S5: HiPPO's diagonal in c.n_ssm blocks of c.state / n_ssm states, one of
    each conjugate pair stored; zero-order hold with one step size per state.

    The authors rotate B and C by HiPPO's unitary V; a rotated Gaussian is a Gaussian. c.C_scale:
    factor of C; c.fast_B: B has the main learning rate and weight decay."""

    keys = S4.keys | dict(fast_B=Key((0, 1), 0), C_scale=Key(float, 1.0))
    factor = 2  # y = 2 Re C x: adds each pair's other half

    def __init__(self, c):
        if c.state % (2 * c.n_ssm):
            raise SizeError(f"state={c.state} is not a multiple of 2 n_ssm = {2 * c.n_ssm}")
        super().__init__(c, c.state // 2)
        A = hippo_nplr(c.state // c.n_ssm)[0].repeat(c.n_ssm)  # (n,)
        self.A_log_re = nn.Parameter((-A.real).log().float())
        self.A_im = nn.Parameter(A.imag.float())
        self.B = nn.Parameter(torch.randn(len(A), c.d, 2) / math.sqrt(2 * c.state))  # (n, d, 2)
        self.log_dt = nn.Parameter(log_uniform(c, len(A)))
        self.out = nn.Linear(c.d, c.d)
        names = ["A_log_re", "A_im"]
        names += [] if c.fast_B else ["B"]
        names += [] if c.dt_lr == "main" else ["log_dt"]
        self.rates = dict.fromkeys(names, (c.ssm_lr, False))

    def recurrence(self):
        A = torch.complex(-self.A_log_re.float().exp().clamp(min=1e-4), self.A_im.float())  # (n,)
        log_lambda = A * self.log_dt.float().exp()
        B = torch.view_as_complex(self.B.float())
        return log_lambda, (torch.expm1(log_lambda) / A)[:, None] * B

    def gate(self, y):
        return y * self.out(y).sigmoid()


# state: the number of states, in n_ssm blocks; half of them are stored.
SIZES = """
task                        layers   d state n_ssm norm  place dt_min dt_max  dt_lr ssm_lr dropout
listops                          8 128    16     8 batch pre    0.001    0.1  0.001  0.001       -
text                             6 256   192    12 batch pre    0.001    0.1   main  0.001     0.1
retrieval                        6 128   256    16 batch pre    0.001    0.1   main  0.001       -
image|scifar                     6 512   384     3 batch pre    0.001    0.1  0.001  0.001     0.1
pathfinder                       6 192   256     8 batch pre    0.001    0.1 0.0009 0.0009    0.05
pathx|pathx256                   6 128   256    16 batch pre   0.0001    0.1 0.0006 0.0006       -
pathfinder_demo                  3  32    32     1 batch pre    0.001    0.1  0.001  0.001       -
*_demo|text256|file:*|ucr:*      3  64    64     1 batch pre    0.001    0.1  0.001  0.001       -
*_mini                           3  48    48     1 batch pre    0.001    0.1  0.001  0.001       -
*                                4 128   128     1 batch pre    0.001    0.1  0.001  0.001       -
"""
CHANGES = """
task           sizes
listops        fast_B=1,C_scale=0.088
text           C_scale=0.0625
image|scifar   fast_B=1,C_scale=0.044
pathx|pathx256 C_scale=11.3
"""
RECIPES = """
task       objective loss pool head   lr         wd   batch length warmup schedule
listops    masked    ce   mean linear -/-/3e-3   0.04 50    40e    1920   cos
text       masked    ce   mean linear -/-/4e-3   0.07 50    35e    0      cos
retrieval  masked    ce   mean pair   -/-/2e-3   0.05 32    20e    4600   cos
image      masked    l1   mean linear -/-/4.5e-3 0.07 50    250e   900    cos
pathfinder masked    ce   mean linear -/-/4.5e-3 0.03 64    200e   2500   cos
pathx      masked    ce   mean linear -/-/1.8e-3 0.06 32    75e    5000   cos
"""
MODELS |= {"s5": Model(SSMBlock, S5, "s4", sizes=SIZES, changes=CHANGES, recipes=RECIPES)}
