"""Attention to the neighbourhood: `longformer`, in a band (Beltagy et al. 2020), and `local`, in blocks.

As in Long Range Arena (Tay et al. 2020), Longformer has no global tokens. `local` is `attention` of kernels.py with
blocks of 64. Sizes and recipes are the Transformer's; the widths on short sequences are ours.
"""
import torch
import torch.nn.functional as F

from kernels import ceil_div
from models import MODELS, Attention, Key, Model, TransformerBlock, sinusoids
from zoo.shared import dense_attention, real_keys, split_blocks


def longformer_attention_naive(q, k, v, window, causal=False, lengths=None):
    """`longformer_attention` as a mask over all pairs."""
    i = torch.arange(q.shape[-2], device=q.device)
    return dense_attention(q, k, v, (i[:, None] - i).abs() <= window // 2, causal, lengths)


def longformer_attention(q, k, v, window, causal=False, lengths=None):
    """Attention in a band, |j - i| <= window // 2, without global tokens (Beltagy et al. 2020): (b, h, l, e) thrice ->
    (b, h, l, e). lengths as in `attention`.

    Blocks of half a window: each attends to itself and its two neighbours, with the band as the mask. O(l window).
    """
    b, h, l, e = q.shape
    size = max(1, min(window // 2, l))
    n = ceil_div(l, size)
    q = split_blocks(q, size, n)                                                         # (b, h, n, size, e)
    k, v = (F.pad(x, (0, 0, size, (n + 1) * size - l)).unfold(2, 3 * size, size).transpose(-1, -2) for x in (k, v))
    i = torch.arange(n * size, device=q.device).view(n, size, 1)
    j = torch.arange(-size, 2 * size, device=q.device) + size * torch.arange(n, device=q.device)[:, None, None]
    seen = ((i - j).abs() <= window // 2) & real_keys(j, l, lengths)                     # (1 or b, n, size, 3 size)
    if causal:
        seen = seen & (j <= i)
    seen = seen | ~seen.any(-1, keepdim=True)                # padded queries may see no key; softmax needs one
    seen = seen.expand(b, -1, -1, -1).flatten(0, 1)[:, None]                             # (b n, 1, size, 3 size)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))                       # (b n, h, size or 3 size, e)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)                          # (b n, h, size, e)
    return y.unflatten(0, (b, n)).transpose(1, 2).flatten(2, 3)[:, :, :l]                # (b, h, l, e)


class Longformer(Attention):
    """Attends to c.window positions around its own (Beltagy et al. 2020). As in the benchmark there are no global
    tokens."""

    keys = dict(window=Key(int, 512))

    def __init__(self, c):
        super().__init__(c)
        self.window = c.window

    def attend(self, q, k, v, lengths):
        return longformer_attention(q, k, v, self.window, self.causal, lengths)


MODELS |= {
    "local": Model(TransformerBlock, Attention, "transformer", dict(block=64), positions=sinusoids, changes="""
        task                  sizes
        *_demo|*_mini|text256 block=8"""),
    "longformer": Model(TransformerBlock, Longformer, "transformer", positions=sinusoids, changes="""
        task                  sizes
        *_demo|*_mini|text256 window=32""")}
