"""Attention to nearby positions: `longformer` in a band (Beltagy et al. 2020), `local` in blocks.

As in Long Range Arena (Tay et al. 2020), Longformer has no global tokens. `local` is `attention` of
kernels.py with blocks of 64. Sizes and recipes are the Transformer's; we chose the windows and
blocks for short sequences."""

from kernels import near_attention
from models import MODELS, Attention, Key, Model, TransformerBlock, sinusoids


def longformer_attention(q, k, v, window, causal=False, lengths=None):
    """Attend in a band, |j - i| <= window // 2, without global tokens (Beltagy et al. 2020), in O(l
    window): queries, keys, values (b, h, l, e) -> (b, h, l, e). lengths as in `attention`."""
    return near_attention(q, k, v, max(1, window // 2), window // 2, causal, lengths)


class Longformer(Attention):
    """Attention to c.window positions around the own one (Beltagy et al. 2020)."""

    keys = dict(window=Key(int, 512))

    def __init__(self, c):
        super().__init__(c)
        self.window = c.window

    def attend(self, q, k, v, lengths):
        return longformer_attention(q, k, v, self.window, self.causal, lengths)


MODELS |= {
    "local": Model(
        TransformerBlock,
        Attention,
        "transformer",
        dict(block=64),
        positions=sinusoids,
        changes="""
        task                  sizes
        *_demo|*_mini|text256 block=8""",
        about="Local attention, in blocks of 64 (Tay et al. 2020).",
    ),
    "longformer": Model(
        TransformerBlock,
        Longformer,
        "transformer",
        positions=sinusoids,
        changes="""
        task                  sizes
        *_demo|*_mini|text256 window=32""",
        about="Longformer: attention in a band (Beltagy et al. 2020).",
    ),
}
