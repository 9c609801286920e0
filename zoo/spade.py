"""SPADE: MEGA in chunks, with S4's convolution beside the attention of the bottom layer (Zuo et al.
2022).

    y <- Linear([LayerNorm(S4(x)), LayerNorm(y)]),  y: the attention's output
This is our reading of the paper: its code is not public. Sizes and recipes are MEGA's."""

from types import SimpleNamespace

import torch
import torch.nn as nn

from models import MODELS, S4, Key, Model
from zoo.mega import CHUNKS, Mega, MegaBlock, init_mega


class Spade(Mega):
    """MEGA whose bottom layer also applies S4 to its input."""

    keys = dict(chunk=Key(int, 128), state=Key(int, 64), dt_min=Key(float, 0.001))
    keys |= dict(dt_max=Key(float, 0.1), ssm_lr=Key(float, 0.001))
    keys |= dict(dt_lr=Key((float, "main"), "main", shown=False))

    def __init__(self, c):
        super().__init__(c)
        self.ssm = None
        if c.layer == 0:
            self.ssm = S4(SimpleNamespace(**vars(c) | dict(n_ssm=c.d)))
            self.D = nn.Parameter(torch.randn(c.d))
            self.norm_ssm = nn.LayerNorm(c.d)
            self.norm_out = nn.LayerNorm(c.d)
            self.join = nn.Linear(2 * c.d, c.d)

    def joined(self, y, x, lengths):
        if self.ssm is None:
            return y
        state = self.convolve(x, self.ssm(x.shape[1]), lengths, self.D)  # (b, l, d)
        return self.join(torch.cat((self.norm_ssm(state), self.norm_out(y)), -1))


MODELS |= {"spade": Model(MegaBlock, Spade, "mega", init=init_mega, changes=CHUNKS)}
