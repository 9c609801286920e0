"""Reformer: attention among positions with the same hash (Kitaev et al. 2020).

hash(x) = argmax [x R, -x R] with a random rotation R; only positions of one hash are compared.
Reversible layers are left out: they save memory and change no number."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import ceil_div, true_lengths
from models import MODELS, Attention, Key, SizeError
from zoo.shared import fill_up, transformer_with


def lsh_attention(q, v, rotations, chunk, lengths=None):
    """Compute Reformer's attention: q (queries and keys), v (b, h, l, e) -> (b, h, l, e).

    In each round, positions are sorted by bucket, a hash with that round's rotation: `rotations` (h
    or 1, e, rounds, buckets / 2). They are cut into chunks, and attend to their chunk and the
    previous one (the first chunk: to the last). Keys have length 1, there is no scale, and a
    position attends to itself only if no other key is left. Rounds are averaged with their shares
    of the softmax's denominator as weights. O(rounds l chunk)."""
    b, h, l, e = q.shape
    size = ceil_div(l, chunk) * chunk
    ends = true_lengths(lengths, b, l, q.device)
    q, v = (F.pad(x, (0, 0, 0, size - l)) for x in (q, v))  # (b, h, size, e)
    rounds, half = rotations.shape[2:]
    place = torch.arange(size, device=q.device)
    real = place < ends[:, None]  # (b, size)
    with torch.no_grad():
        turned = torch.einsum("bhle,hert->bhrlt", q, rotations.to(q.dtype).expand(h, -1, -1, -1))
        bucket = torch.cat((turned, -turned), -1).argmax(-1)  # (b, h, r, size)
        bucket = bucket.where(real[:, None, None], 2 * half)  # padding after all buckets
        bucket = bucket + (2 * half + 1) * torch.arange(rounds, device=q.device)[:, None]
        order = (bucket * size + place).flatten(2).argsort(-1)  # (b, h, r size)
    position = order % size

    def sort(x):
        x = x.gather(2, position[..., None].expand(-1, -1, -1, x.shape[-1]))  # (b, h, r size, e)
        return x.unflatten(2, (-1, chunk))  # (b, h, chunks, chunk, e)

    def with_previous(x):
        return torch.cat((x.roll(1, 2), x), 3)  # (b, h, chunks, 2 chunk, ...)

    i = position.int().unflatten(2, (-1, chunk))  # (b, h, chunks, chunk)
    j = with_previous(i)
    logits = sort(q) @ with_previous(sort(F.normalize(q, dim=-1))).transpose(-1, -2)
    # Added in place, which saves copies. A score so masked stays far below all others.
    logits.add_(i[..., :, None] == j[..., None, :], alpha=-1e5)
    if lengths is not None or size > l:
        logits.add_(j[..., None, :] >= ends.view(b, 1, 1, 1, 1), alpha=-1e9)
    largest = logits.detach().amax(-1, keepdim=True)  # (b, h, chunks, chunk, 1)
    v = F.pad(v, (0, 1), value=1.0)  # one more column: the softmax's denominator
    values = with_previous(sort(v))
    y = logits.sub_(largest).exp() @ values  # (b, h, chunks, chunk, e + 1)
    share = largest + y[..., -1:].log()
    y = y[..., :-1] / y[..., -1:]
    back = order.argsort(-1)[..., None]  # (b, h, r size, 1)
    y, share = (
        x.gather(2, back.expand_as(x)).unflatten(2, (rounds, size))
        for x in (y.flatten(2, 3), share.flatten(2, 3))
    )
    return (y * share.softmax(2)).sum(2)[:, :, :l]  # (b, h, l, e)


class Reformer(Attention):
    """Attention among positions whose queries, which are also the keys, point the same way.

    Rotations are drawn once for each layer and head and saved with the weights. (The authors draw
    new ones at every step: a prediction is then not a function of its input.)"""

    keys = dict(chunk=Key(int, 64), rounds=Key(int, 2))

    def __init__(self, c):
        super().__init__(c)
        if c.causal:  # the future decides where a chunk ends
            raise SizeError("reformer has no causal form; use --objective masked")
        self.length = c.length
        self.chunk = min(c.chunk, c.length)
        self.qkv = nn.Linear(c.d, 2 * c.d)  # queries and values
        half = max(1, c.length // (2 * c.chunk))  # of the buckets
        rotations = torch.randn(c.heads, self.e, c.rounds, half)
        self.register_buffer("rotations", rotations)  # (h, e, rounds, buckets / 2)

    def attend(self, q, v, lengths):
        l = q.shape[2]
        lengths, q, v = fill_up(self.length, lengths, q.float(), v.float())  # (b, h, length, e)
        with torch.autocast(q.device.type, enabled=False):
            return lsh_attention(q, v, self.rotations, self.chunk, lengths)[:, :, :l]


MODELS |= {"reformer": transformer_with(Reformer, short="chunk=8")}
