"""Attention on a GPU: sequences of unequal lengths by FlashAttention, many blocks in one call. No model of its own.

A mask would keep FlashAttention from padded batches. Its variable-length form takes sequences end to end, with the
places where each begins and ends, and a window of positions to see.
"""
import functools
import importlib
import itertools

import torch
import torch.nn.functional as F

import kernels
from kernels import ceil_div, true_lengths
from zoo.shared import real_keys, split_blocks


# ---- Sequences of unequal lengths ------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=4)                                          # all layers ask for the same
def boundaries(lengths, b, l, device):
    """True lengths (b,), or None for l -> where sequences begin and end in b l positions, int32 (2 b + 1,). A
    sequence's padding is a sequence of its own, so nothing is moved, and the host need not know how many positions are
    real."""
    first = torch.arange(b, device=device) * l
    ends = torch.stack((first, first + true_lengths(lengths, b, l, device)), 1).flatten()
    return F.pad(ends, (0, 1), value=b * l).int()


def each_alone(q, k, v, bounds, longest, left, right):
    """What `variable_length` is to compute, a sequence after another: q, k, v (b l, h, e), `boundaries` -> (b l, h, e).
    A position sees `left` before it and `right` after it, -1: all."""
    done = []
    for low, high in itertools.pairwise(bounds.tolist()):
        i = torch.arange(high - low, device=q.device)
        seen = torch.ones(high - low, high - low, dtype=torch.bool, device=q.device)
        seen &= (i[:, None] - i <= left) | (left < 0)
        seen &= (i - i[:, None] <= right) | (right < 0)
        heads = (x[low:high].transpose(0, 1) for x in (q, k, v))                              # (h, n, e)
        done.append(F.scaled_dot_product_attention(*heads, attn_mask=seen).transpose(0, 1))
    return torch.cat(done)


def packed_attention(function, q, k, v, lengths, left=-1, right=-1):
    """(b, h, l, e) thrice, lengths (b,) or None -> (b, h, l, e), by a function like `each_alone`. What comes out past
    the true length is finite and without meaning."""
    b, _, l, _ = q.shape
    bounds = boundaries(lengths, b, l, q.device)
    y = function(*(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)), bounds, l, left, right)
    return y.unflatten(0, (b, l)).transpose(1, 2)


def library(module, name):
    """A library's variable-length attention, called like `each_alone`."""
    call = getattr(importlib.import_module(module), name)
    return lambda q, k, v, bounds, longest, left, right: call(q, k, v, bounds, bounds, longest, longest,
                                                              window_size=(left, right))


@torch.inference_mode(False)
@torch.enable_grad()                                       # whoever asks first
def agrees(function, device, dtype):
    """Whether a function gives what `each_alone` does in float32, and its gradients, to what half precision bears."""
    # Longer than 128: up to there torch may call another library than for long sequences.
    lengths, draws = torch.tensor([160, 1, 33], device=device), torch.Generator().manual_seed(0)
    drawn = [torch.randn(3, 2, 160, 16, generator=draws).to(device, dtype) for _ in range(4)]
    real = kernels.inside(lengths, 160)[:, None, :, None]
    for left, right in ((-1, -1), (16, 16), (16, 0)):
        found = []
        for some, kind in ((function, dtype), (each_alone, torch.float32)):
            q, k, v, grad = (x.to(kind).requires_grad_() for x in drawn)
            y = packed_attention(some, q, k, v, lengths, left, right)
            found.append([y * real, *torch.autograd.grad(y, (q, k, v), grad.detach() * real)])
        for ours, exact in zip(*found):
            if not (ours.float() - exact).abs().max() < 0.03 * exact.abs().max():
                return False
    return True


LIBRARIES = {"torch": ("torch.nn.attention.varlen", "varlen_attn"),
             "flash-attn": ("flash_attn", "flash_attn_varlen_func")}


@functools.lru_cache(maxsize=None)
def variable_length():
    """(name, function) of the first library that agrees with `each_alone` on this GPU; (None, None) if there is none:
    an older torch has none, and a build for another GPU can be imported, then fails."""
    for name, path in LIBRARIES.items():
        try:
            if agrees(function := library(*path), "cuda", torch.bfloat16):
                return name, function
        except Exception:
            continue
    return None, None


def packed(q, k, v, lengths, left=-1, right=-1):
    """`packed_attention` where it can be had, else None. Compiled code has a mask instead."""
    e = q.shape[-1]
    fits = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and e % 8 == 0 and e <= 128          # on every GPU
    if not fits or torch.compiler.is_compiling() or variable_length()[1] is None:
        return None
    return packed_attention(variable_length()[1], q, k, v, lengths, left, right)


# ---- Many blocks in one call -----------------------------------------------------------------------------------------

def near_attention(q, k, v, size, reach=None, causal=False, lengths=None):
    """Each block of `size` attends to itself and its neighbours (causal: the previous one); with `reach`, positions
    attend to |j - i| <= reach alone. All blocks in one call: they are folded into the batch. (b, h, l, e) thrice ->
    (b, h, l, e)."""
    b, h, l, e = q.shape
    size = min(size, l)
    n, blocks = ceil_div(l, size), 2 if causal else 3                                    # of queries; of keys for each
    q = split_blocks(q, size, n)                                                         # (b, h, n, size, e)
    width, after = blocks * size, (n + blocks - 2) * size - l                            # after: filled up at the end
    k, v = (F.pad(x, (0, 0, size, after)).unfold(2, width, size).transpose(-1, -2) for x in (k, v))
    i = torch.arange(n * size, device=q.device).view(n, size, 1)
    j = torch.arange(-size, width - size, device=q.device) + size * torch.arange(n, device=q.device)[:, None, None]
    seen = real_keys(j, l, lengths)                                                      # (1 or b, n, 1, width)
    if reach is not None:
        seen = seen & ((i - j).abs() <= reach)                                           # (1 or b, n, size, width)
    if causal:
        seen = seen & (j <= i)
    seen = seen | ~seen.any(-1, keepdim=True)                # padded queries may see no key; softmax needs one
    seen = seen.expand(b, -1, size, -1).flatten(0, 1)[:, None]                           # (b n, 1, size, width)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))                       # (b n, h, size or width, e)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)                          # (b n, h, size, e)
    return y.unflatten(0, (b, n)).transpose(1, 2).flatten(2, 3)[:, :, :l]                # (b, h, l, e)


def many_blocks(l, block):
    """Whether a length has many blocks. PathX has 4."""
    return block is not None and l > 8 * block


def faster(q, k, v, causal, block, lengths):
    """`kernels.attention` by one of these, or None. On a CPU a call per block is faster; in compiled code each number
    of blocks would be compiled anew."""
    l = q.shape[2]
    if many_blocks(l, block) and (q.is_cuda or torch.compiler.is_compiling()):
        return near_attention(q, k, v, block, None, causal, lengths)
    if lengths is not None and not causal and (block is None or block >= l):
        return packed(q, k, v, lengths)
    return None


kernels.faster = faster
