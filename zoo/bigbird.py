"""BigBird: attention to neighbouring, end and random blocks of positions (Zaheer et al. 2020).

With n blocks, block i attends to {0, i-1, i, i+1, n-1} and r random ones: O(l (5 + r) block)."""

import torch
import torch.nn.functional as F

from kernels import attention, ceil_div, real_keys, split_blocks
from models import MODELS, Attention, Key
from zoo.shared import fill_up, transformer_with


def bigbird_attention(q, k, v, block, random, causal=False, lengths=None):
    """Compute block-sparse attention: queries, keys, values (b, h, l, e) -> (b, h, l, e).

    The two end blocks attend to everything. random (h, n-2, r) int64: the random blocks of those
    between them; a block that is named twice counts once. lengths as in `attention`."""
    b, h, l, e = q.shape
    n = ceil_div(l, block)
    if n < 3:  # end blocks only
        return attention(q, k, v, causal, lengths=lengths)
    q, k, v = (split_blocks(x, block, n) for x in (q, k, v))  # (b, h, n, block, e)
    place = torch.arange(n * block, device=q.device).view(n, block)
    row = torch.arange(1, n - 1, device=q.device)
    fixed = torch.stack((row * 0, row - 1, row, row + 1, row * 0 + n - 1), -1)  # (n-2, 5)
    read = torch.cat((fixed.expand(h, -1, -1), random), -1)  # (h, n-2, 5 + r)
    again = (read[..., :, None] == read[..., None, :]).tril(-1).any(-1)  # already named in this row
    head = torch.arange(h, device=q.device)[:, None, None]
    near_k, near_v = (x[:, head, read].flatten(3, 4) for x in (k, v))  # (b, h, n-2, (5+r) block, e)

    def attend(q, k, v, i, j, allowed):
        """Attend from positions i (..., m) to keys at j (..., s): (b, x, h, m, e) -> the same."""
        seen = real_keys(j, l, lengths)[..., None, :] & allowed[..., None, :]
        if causal:
            seen = seen & (j[..., None, :] <= i[..., None])
        seen = seen | ~seen.any(-1, keepdim=True)  # padding: softmax needs a key
        seen = seen.expand(b, *seen.shape[1:]).flatten(0, 1)
        y = F.scaled_dot_product_attention(*(x.flatten(0, 1) for x in (q, k, v)), attn_mask=seen)
        return y.unflatten(0, (b, -1))

    inner = q[:, :, 1:-1]
    inner, near_k, near_v = (x.transpose(1, 2) for x in (inner, near_k, near_v))  # (b, n-2, h, ...)
    keys = place[read].flatten(2).transpose(0, 1)  # (n-2, h, (5+r) block)
    allowed = ~again.repeat_interleave(block, -1).transpose(0, 1)
    inner = attend(inner, near_k, near_v, place[1:-1, None], keys, allowed)
    inner = inner.transpose(1, 2)  # (b, h, n-2, block, e)
    ends, every = (x.flatten(2, 3)[:, None] for x in (q[:, :, [0, -1]], k))  # (b, 1, h, ., e)
    i = place[[0, -1]].view(1, 1, -1)
    j = place.view(1, 1, -1)
    ends = attend(ends, every, v.flatten(2, 3)[:, None], i, j, torch.ones_like(j, dtype=torch.bool))
    first, last = ends[:, 0].unflatten(2, (2, block)).split(1, 2)  # (b, h, 1, block, e)
    return torch.cat((first, inner, last), 2).flatten(2, 3)[:, :, :l]  # (b, h, l, e)


class BigBird(Attention):
    """Attention to the own block of c.block positions, its neighbours, both ends, c.random others.

    Those, fewer if there are few blocks, are drawn once for each layer, head and block, and saved
    with the weights. Batches are padded to the task's length, so blocks are always the same."""

    keys = dict(random=Key(int, 3, least=0))

    def __init__(self, c):
        super().__init__(c)
        self.length = c.length
        inner = max(0, ceil_div(c.length, c.block) - 2)  # n - 2
        i = torch.arange(inner)
        near = (i[:, None] - i).abs() <= 1  # (n-2, n-2)
        drawn = torch.rand(c.heads, inner, inner).masked_fill(near, -1)
        r = max(0, min(c.random, inner - 3))
        self.register_buffer("random", 1 + drawn.topk(r).indices)  # (h, n-2, r)

    def attend(self, q, k, v, lengths):
        l = q.shape[2]
        lengths, q, k, v = fill_up(self.length, lengths, q, k, v)  # (b, h, length, e)
        return bigbird_attention(q, k, v, self.block, self.random, self.causal, lengths)[:, :, :l]


MODELS |= {"bigbird": transformer_with(BigBird, short="block=8,random=2", extras=dict(block=64))}
