"""Attention to nearby positions: `longformer` in a band (Beltagy et al. 2020), `local` in blocks.

Position i attends to j with |j - i| <= window / 2, or to the own block of 64 and one on either side
(`attention` of kernels.py). As in Long Range Arena (Tay et al. 2020), Longformer has no global
tokens. We chose the windows and blocks for short sequences."""

from kernels import near_attention
from models import MODELS, Attention, Key
from zoo.shared import transformer_with


class Longformer(Attention):
    """Attention where |j - i| <= c.window // 2, in O(l window)."""

    keys = dict(window=Key(int, 512))

    def __init__(self, c):
        super().__init__(c)
        self.window = c.window

    def attend(self, q, k, v, lengths):
        reach = self.window // 2
        return near_attention(q, k, v, max(1, reach), reach, self.causal, lengths)


MODELS |= {
    "local": transformer_with(Attention, short="block=8", extras=dict(block=64)),
    "longformer": transformer_with(Longformer, short="window=32"),
}
