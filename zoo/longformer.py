"""Attention to nearby positions: `longformer` in a band (Beltagy et al. 2020), `local` in blocks.

Position i attends to j with |j - i| <= window / 2, or to the own block of 64 and one on either side
(`attention` of kernels.py). As in Long Range Arena (Tay et al. 2020), Longformer has no global
tokens. Sizes and recipes are the Transformer's; we chose the windows and blocks for short
sequences."""

from kernels import near_attention
from models import MODELS, Attention, Key, Model, TransformerBlock, sinusoids


def longformer_attention(q, k, v, window, causal=False, lengths=None):
    """Attend where |j - i| <= window // 2, in O(l window): q, k, v (b, h, l, e) -> (b, h, l, e)."""
    return near_attention(q, k, v, max(1, window // 2), window // 2, causal, lengths)


class Longformer(Attention):
    """Attention to c.window positions around the own one."""

    keys = dict(window=Key(int, 512))

    def __init__(self, c):
        super().__init__(c)
        self.window = c.window

    def attend(self, q, k, v, lengths):
        return longformer_attention(q, k, v, self.window, self.causal, lengths)


TRANSFORMER = dict(block=TransformerBlock, like="transformer", positions=sinusoids)
SHORT = """
task                  sizes
*_demo|*_mini|text256 {}
"""
MODELS |= {
    "local": Model(
        **TRANSFORMER,
        mixer=Attention,
        extras=dict(block=64),
        changes=SHORT.format("block=8"),
        about="Local attention, in blocks of 64 (Tay et al. 2020).",
    ),
    "longformer": Model(
        **TRANSFORMER,
        mixer=Longformer,
        changes=SHORT.format("window=32"),
        about="Longformer: attention in a band (Beltagy et al. 2020).",
    ),
}
