"""DFouT: DLR in which every channel has its own poles (arXiv 2508.20441).

The N frequencies of channel i are 2 pi (k + i/d) / N, k < N, so that those of all d channels
together fill the circle evenly. The recurrence is DLR's (models.py); sizes and recipes are S4's."""

import math
from functools import partial

import torch
import torch.nn as nn

from models import DLR, MODELS, SSM, Kernel, Model, SSMBlock


class DFouT(DLR):
    """Kernels of DFouT. Decay rates and W start as in DLR."""

    def __init__(self, c):
        Kernel.__init__(self)  # not DLR's, which draws other poles
        decay = c.dt_min / 2 * (c.dt_max / c.dt_min) ** torch.rand(c.d, c.state)
        turn = (torch.arange(c.state) + torch.arange(c.d)[:, None] / c.d) * (2 * math.pi / c.state)
        self.d = c.d
        self.theta = nn.Parameter(decay.sqrt())  # (d, n)
        self.Lambda_im = nn.Parameter(turn)  # (d, n)
        W = torch.randn(c.directions, c.d, c.state, 2) / c.state  # (dir, d, n, 2)
        self.W = nn.Parameter(W)
        self.rates = dict.fromkeys(("theta", "Lambda_im", "W"), (c.ssm_lr, False))

    def arguments(self, p):
        W, Lambda = super().arguments(p)  # (d, 1, n)
        return W, Lambda.squeeze(-2)  # (d, n)


CHANGES = """
task     sizes
pathx256 state=128
"""
DT = dict(dt_min=1e-4, dt_max=0.1)
MODELS |= {"dfout": Model(SSMBlock, partial(SSM, DFouT), "s4", DT, changes=CHANGES)}
