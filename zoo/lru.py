"""LRU: the linear recurrent unit, a diagonal recurrence, poles from a ring (Orvieto et al. 2023).

    x[t] = lambda x[t-1] + gamma B u[t],  lambda = exp(-e^nu + i e^theta),  so |lambda| < 1
The layer around the recurrence is S5's (zoo/scan.py). Sizes are the authors'; recipes from scratch
are S5's. Here ssm_lr is a factor of the main learning rate, not a rate."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from models import MODELS, Key, Model, SSMBlock
from zoo.scan import SharedState


class LRU(SharedState):
    """A recurrence in discrete time. Its c.state poles are drawn uniformly from a ring, c.r_min <
    |lambda| < c.r_max, with angles up to c.angle. gamma is at the start sqrt(1 - |lambda|^2)."""

    keys = dict(state=Key(int), ssm_lr=Key(float), r_min=Key(float, 0.0), r_max=Key(float, 1.0))
    keys |= dict(angle=Key(float, 2 * math.pi), C_scale=Key(float, 1.0))

    def __init__(self, c):
        super().__init__(c, c.state)
        square = c.r_min**2 + torch.rand(c.state) * (c.r_max**2 - c.r_min**2)  # |lambda|^2
        square = square.clamp(1e-6, 1 - 1e-6)
        self.nu = nn.Parameter((-square.log() / 2).log())  # |lambda| = exp(-e^nu)
        angle = torch.rand(c.state).clamp(min=1e-6) * c.angle
        self.theta = nn.Parameter(angle.log())
        self.gamma = nn.Parameter((1 - square).log() / 2)
        self.B = nn.Parameter(torch.randn(c.state, c.d, 2) / math.sqrt(2 * c.d))  # (n, d, 2)
        self.out = nn.Linear(c.d, 2 * c.d)
        rate = (lambda lr: c.ssm_lr * lr, False)  # lr: main
        self.rates = dict.fromkeys(("nu", "theta", "gamma", "B"), rate)

    def recurrence(self):
        log_lambda = torch.complex(-self.nu.float().exp(), self.theta.float().exp())
        B = torch.view_as_complex(self.B.float())
        return log_lambda, self.gamma.float().exp()[:, None] * B

    def gate(self, y):
        return F.glu(self.out(y), dim=-1)


SIZES = """
task                        layers   d state norm  place ssm_lr dropout
listops                          6 128   256 batch pre      0.5       -
text                             6 256   192 batch pre      0.1     0.1
retrieval                        6 128   256 batch pre      0.5     0.1
image|scifar                     6 512   384 batch pre     0.25     0.1
pathfinder                       6 192   256 batch pre     0.25       -
pathx|pathx256                   6 128   256 batch pre     0.25       -
pathfinder_demo                  3  32    32 batch pre     0.25       -
*_demo|text256|file:*|ucr:*      3  64    64 batch pre     0.25       -
*_mini                           3  48    48 batch pre     0.25       -
*                                4 128   128 batch pre     0.25       -
"""
CHANGES = """
task                  sizes
*_demo|*_mini|text256 r_min=0.9,r_max=0.999
pathx|pathx256        r_min=0.999,r_max=0.9999,angle=0.314
"""
MODELS |= {"lru": Model(SSMBlock, LRU, "s5", sizes=SIZES, changes=CHANGES)}
