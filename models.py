"""Models: a table of sizes, thin layers over kernels.py, one line a model, one backbone with two heads.

    python models.py 1024     what each architecture costs on sequences of that length: parameters, memory, FLOPs

    Backbone      symbols (b, l) or samples (b, l, channels) -> features (b, l, d)
    Denoiser      backbone + a linear head on the positions to be predicted         stage 1, pretrain.py
    Classifier    backbone + pooling over the sequence + a head                     stage 2, finetune.py

The sections follow the paper's argument: a linear recurrence is a convolution (`SSM`); diagonal (`DLR`) and diagonal
plus low rank (`S4`); nothing set by hand (`randomise`); the other way to mix positions (`Attention`).

A new mixer is one class and one line of `MODELS`. Every class takes one object `c`, all that is known about the model:
its sizes, the extras of its line in `MODELS`, what the task says (length, vocab, channels), whether it is causal, and
the number of the layer.

Sizes are b batch, l length, d width, h heads, e width of a head, n stored states (of S4 one in each conjugate pair, of
DLR all), c kernels per channel (2 when bidirectional); matrices are upper-case and explained in kernels.py. "Paper" is
Amos et al. 2024, "Never Train from Scratch". Its table 4 fixes the Transformers' sizes below; S4's are those of Gu et
al. 2022 as the paper's official configurations spell them out, and DLR's are S4's (appendix C.1.3).
"""
import contextlib
import fnmatch
import itertools
import math
import signal
import sys
from collections import namedtuple
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
import torch.nn as nn
import torch.nn.functional as F

from kernels import (attention, diagonal_kernel, fft_conv, hippo_nplr, rotary, rotary_phases,
                     s4_kernel, sgconv_kernel, truncation_correction)

# ---- 1  Sizes --------------------------------------------------------------------------------------------------------

# Tasks are shell patterns, a|b stands for two rows, and the first row that matches counts. A dash means "not part of
# this architecture". A model without rows of its own uses those of the model that it is `like` (see `MODELS`).
#   transformer  paper table 4, rows marked with a dagger: the sizes of Tay et al. 2020, sinusoidal positions
#   rotary       paper table 4, "Transformer + Rotary"; on sCIFAR Image's (appendix C.1.6)
#   pythia       GPT-NeoX as Pythia-70M has it (Biderman et al. 2023)
# block: attention is cut into blocks of that many positions. Transformers have LayerNorm before attention and FF, and
# no dropout.
ATTENTION_ARCH = """
task                 model                     layers   d heads   ff block
listops|text         transformer|rotary             6 512     8 1024     -
retrieval            transformer                    4 128     4  512     -
retrieval|pathfinder rotary                         6 128     4  512     -
image                transformer                    3  64     4  128     -
image|scifar         rotary                         6 256     4  512     -
pathfinder           transformer                    4 128     8  128     -
pathx                transformer                    4 128     8  128  4096
pathx                rotary                         5 128     4  512  4096
sc                   rotary                         4 128     4  128  4000
bidmc_*              rotary                         4 128     4  128     -
text256|text_demo    transformer|rotary             3  64     2  128     -
listops_demo         transformer|rotary             3  64     4  128     -
pathfinder_demo      transformer|rotary             3  32     2   64     -
image_mini           transformer|rotary             3  28     2   56     -
scifar_mini          transformer|rotary             3  28     2   56     -
*_mini               transformer|rotary|pythia      3  32     2   64     -
*                    transformer|rotary             4 128     4  256     -
*                    pythia                         6 512     8 2048     -
"""

#   s4           Gu et al. 2022, table 11. n_ssm: how many copies of (A, P, B) there are for the d channels to share
#   dlr          S4's depth and width, more states, LayerNorm (appendix C.1.3). dt_min, dt_max: twice its smallest and
#                largest decay rate
# norm, place: which norm, before (pre) or after (post) the residual sum. dt_lr, ssm_lr: learning rates of the step size
# and of A, P, B (DLR: of all three parameters of its kernel); "main" follows the rest of the model. dropout: inside the
# layer and on the residual branch, whole channels of a sequence. The official S4 for Speech Commands pretrains with
# LayerNorm and finetunes with BatchNorm, an accident: here it has BatchNorm in both.
# Rows of demos, of *_mini (the stand-ins of `run_all.sh --preset mini`) and of * (any other task) are not the paper's.
SSM_ARCH = """
task                   model layers   d state n_ssm norm  place dt_min dt_max  dt_lr ssm_lr dropout
listops                s4         8 128    64   128 batch post   0.001    0.1   main  0.001       -
listops                dlr        8 128  1024     - layer post  0.0001  0.001      - 0.0001       -
text|retrieval         s4         6 256    64   256 batch pre    0.001    0.1   main  0.001       -
text|pathx             dlr        6 256  1024     - layer pre   0.0001  0.001      - 0.0001       -
image                  s4         6 512    64     2 layer post   0.001    0.1   main  0.001     0.1
image                  dlr        6 512  1024     - layer pre   0.0001  0.001      - 0.0001       -
pathfinder             s4         6 256    64   256 batch pre    0.001    0.1  0.001  0.001       -
pathx|pathx256         s4         6 256    64   256 batch pre   0.0001    0.1 0.0005 0.0005       -
sc                     s4         6 128    64    64 batch pre    0.001    0.1  0.001  0.001       -
scifar                 s4         6 512    64     2 layer post   0.001    0.1  0.001  0.001     0.1
bidmc_*                s4         6 128   256     2 layer pre    0.001    0.1  0.001  0.001       -
pathfinder_demo        s4         3  32    16    32 batch pre    0.001    0.1  0.001  0.001       -
pathfinder_demo        dlr        3  32   128     - layer pre    0.001    0.1      -  0.001       -
*_demo|text256         s4         3  64    16    64 batch pre    0.001    0.1  0.001  0.001       -
*_demo|text256         dlr        3  64   128     - layer pre    0.001    0.1      -  0.001       -
image_mini|scifar_mini s4         3  48    16     2 batch pre    0.001    0.1  0.001  0.001       -
*_mini                 s4         3  48    16    48 batch pre    0.001    0.1  0.001  0.001       -
*_mini                 dlr        3  48   128     - layer pre    0.001    0.1      -  0.001       -
*                      s4         4 128    64     2 layer pre    0.001    0.1  0.001  0.001       -
*                      dlr        4 128   256     - layer pre    0.001    0.1      -  0.001       -
"""


def read_table(text):
    """A whitespace table as a list of {column: string} in row order. Cells that are a dash are left out, and a line
    with a|b in a cell stands for a row with a and one with b."""
    head, *lines = [line.split() for line in text.strip().splitlines()]
    for line in lines:
        assert len(line) == len(head), f"table row has {len(line)} cells, the head {len(head)}: {' '.join(line)}"
    return [{key: cell for key, cell in zip(head, row) if cell != "-"}
            for line in lines for row in itertools.product(*(cell.split("|") for cell in line))]


def find(rows, model, **wanted):
    """The first of `rows` for this model whose patterns match everything wanted, or None. A model's own rows go before
    those of the model that it is `like`."""
    while model is not None:
        for row in rows:
            if all(fnmatch.fnmatchcase(value, row[key]) for key, value in (wanted | {"model": model}).items()):
                return row
        model = MODELS[model].like
    return None


def number(text):
    """'64' -> 64, '1e-3' -> 0.001, 'batch' -> 'batch'."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


class SizeError(ValueError):
    """Sizes that do not fit each other or the task, in one line."""


def arch(task, model, **overrides):
    """Sizes of a model on a task: its row above and the numbers among its extras, changed by `overrides` -> plain dict,
    saved in config.json and in checkpoints. None where there is no row; SizeError for an override without meaning."""
    row = find(read_table(ATTENTION_ARCH) + read_table(SSM_ARCH), model, task=task)
    if row is None:
        return None
    sizes = dict(block=None, norm="layer") if "heads" in row else dict(dropout=0.0)
    sizes |= {key: number(cell) for key, cell in row.items() if key != "task"} | {"model": model}
    sizes |= {key: value for key, value in MODELS[model].extras.items() if type(value) in (int, float)}
    choices = {"norm": [*NORMS], "place": ["pre", "post"]}
    for key, value in overrides.items():
        if key not in sizes or key == "model":
            raise SizeError(f"--arch {key}={value}: {model} on {task} has no {key}; it has: {' '.join(sizes)}")
        whole, number_like = type(sizes[key]) is int, type(value) in (int, float)
        fits = value in choices[key] if key in choices else number_like or (key, value) == ("dt_lr", "main")
        if not fits or whole and not (type(value) is int and value > 0):
            raise SizeError(f"--arch {key}={value}: not a value for {key}, which is {sizes[key]} in models.py")
    return sizes | overrides


# ---- 2  A linear recurrence is a convolution -------------------------------------------------------------------------

class SSM(nn.Module):
    """A linear recurrence per channel, then GELU and GLU: (b, l, d) -> (b, l, d).

    Paper, eq. 1: x[k] = Abar x[k-1] + Bbar u[k], y[k] = C x[k] for every channel by itself. Unrolled, y = K * u with
    K[k] = C Abar^k Bbar (eq. 2.4), and that is all that is computed here: a convolution with the kernels that `kernel`
    makes, plus the skip connection D u. (`ssm_scan` in kernels.py is the recurrence, step by step.) `DLR` and `S4`
    below choose the recurrence. Bidirectional layers have a second kernel for the reversed direction. Channels meet in
    the GLU only.

    A kernel is a module Kernel(c); called with the length l, it returns (directions, d, l) or longer. Its `rates` name
    the parameters that do not follow the main learning rate and weight decay: {name: (learning rate, decayed or not)},
    with None for the main rate. Only such a module may be called `kernel` in a mixer: Figure 4 draws it.
    """

    def __init__(self, kernel, c):
        super().__init__()
        self.kernel = kernel(c)
        self.D = nn.Parameter(torch.randn(c.d))
        self.dropout = nn.Dropout1d(c.dropout)                       # one mask along the length, of (b, d, l)
        self.out = nn.Linear(c.d, 2 * c.d)

    def forward(self, x, lengths=None):
        u = x.transpose(1, 2)                                                                 # (b, d, l)
        if lengths is not None:       # a convolution does not know padding; zeros do not move its state
            u = u * inside(lengths, x.shape[1])[:, None]
        K = self.kernel(x.shape[1])                                                           # (c, d, l) or longer
        y = fft_conv(u, K[0], K[1] if len(K) == 2 else None) + self.D[:, None] * u            # (b, d, l)
        return F.glu(self.out(self.dropout(F.gelu(y)).transpose(1, 2)), dim=-1)               # (b, l, d)


# ---- 3  Diagonal: DLR ------------------------------------------------------------------------------------------------

class DLR(nn.Module):
    """Kernels of the diagonal linear RNN (paper, eq. 3; Gupta et al. 2022): K[k] = Re sum_n W_n e^(Lambda_n k).

    Abar = diag(e^Lambda) and Bbar = 1, so K[k] = C Abar^k 1 with C = W: a sum of damped waves. All channels and
    directions of a layer share the poles e^Lambda, and each mixes them with its own W. Nothing is sampled from
    continuous time, and there are no conjugate pairs. Re Lambda = -theta^2 <= 0: whatever is learned, the recurrence
    never grows.

    At the start: decay rates log-uniform in [dt_min / 2, dt_max / 2], one full turn of frequencies 2 pi n / N, and W
    complex normal over N. All three parameters have a small learning rate of their own and no weight decay.
    """

    def __init__(self, c):
        super().__init__()
        decay = c.dt_min / 2 * (c.dt_max / c.dt_min) ** torch.rand(c.state)
        self.theta = nn.Parameter(decay.sqrt())                                               # (n,)
        self.Lambda_im = nn.Parameter(torch.arange(c.state) * (2 * math.pi / c.state))        # (n,)
        # Complex parameters are stored as real pairs, so that Adam keeps moments per component.
        self.W = nn.Parameter(torch.randn(c.directions, c.d, c.state, 2) / c.state)           # (c, d, n, 2)
        self.rates = {name: (c.ssm_lr, False) for name in ("theta", "Lambda_im", "W")}

    @torch.compiler.disable                                          # complex arithmetic: the compiler gains nothing
    def forward(self, l):
        """(c, d, l), float32."""
        Lambda = torch.complex(-self.theta.float().square(), self.Lambda_im.float())          # (n,)
        return diagonal_kernel(torch.view_as_complex(self.W.float()), Lambda, l)


# ---- 4  Diagonal plus low rank: S4 -----------------------------------------------------------------------------------

class S4(nn.Module):
    """Kernels of S4 (paper, eq. 2; Gu et al. 2022).

    Low rank: the state matrix is diag(A) - P P* (eq. 2.1). HiPPO's matrix is normal only up to such a rank-one term,
    and diagonalising it whole would be numerically hopeless; a diagonal A alone is the case of `DLR`.

    Discretisation: the recurrence is a differential equation, x' = A x + B u, sampled with a step size dt by the
    bilinear rule, Abar = (I - dt/2 A)^-1 (I + dt/2 A), Bbar = (I - dt/2 A)^-1 dt B (eq. 2.2 and 2.3; `discretize` in
    kernels.py). It maps every stable A to a stable Abar. Each channel has its own dt, which stretches the same kernel
    in time.

    HiPPO sets A, P, B so that the state holds the past as coefficients of Legendre polynomials: kernels decay over some
    1 / dt steps and not over a few. That is the prior whose worth the paper asks about.

    A, P and B exist in `n_ssm` copies that the channels share in turn; each channel has its own C, a second one when
    bidirectional. C is trained in the truncation-corrected form C~ = C (I - Abar^length), which ties it to the task's
    `length`: kernels are always made at that length, and the convolution cuts them to the batch's.

    A, P, B and log dt have learning rates of their own and no weight decay: they set time scales, where a step that is
    small for a weight makes a kernel many times longer or shorter.
    """

    def __init__(self, c):
        super().__init__()
        if c.d % c.n_ssm:
            raise SizeError(f"d={c.d} is not a multiple of n_ssm={c.n_ssm}")
        self.d, self.length = c.d, c.length
        A, P, B = (v.repeat(c.n_ssm, 1) for v in hippo_nplr(c.state))                         # (n_ssm, n)
        log_dt = torch.rand(c.d) * math.log(c.dt_max / c.dt_min) + math.log(c.dt_min)         # log-uniform
        # Complex standard normal, one output map per direction.
        C = torch.randn(c.directions, c.d, c.state // 2, dtype=torch.complex64)               # (c, d, n)
        A_all, P_all = (v.repeat(c.d // c.n_ssm, 1) for v in (A, P))                          # (d, n)
        C = truncation_correction(A_all, P_all, C, log_dt.exp(), c.length)
        self.log_dt = nn.Parameter(log_dt)
        self.A_log_re = nn.Parameter((-A.real).log().float())       # Re A = -exp(.) < 0: the recurrence stays stable
        self.A_im = nn.Parameter(A.imag.float())
        self.P = nn.Parameter(torch.view_as_real(P).float().clone())
        self.B = nn.Parameter(torch.view_as_real(B).float().clone())
        self.C = nn.Parameter(torch.view_as_real(C.to(torch.complex64)).clone())
        self.rates = {name: (c.ssm_lr, False) for name in ("A_log_re", "A_im", "P", "B")}
        self.rates["log_dt"] = (None if c.dt_lr == "main" else c.dt_lr, False)

    @torch.compiler.disable
    def forward(self, l):
        """(c, d, length), float32, whatever l is."""
        A = torch.complex(-self.A_log_re.float().exp().clamp(min=1e-4), self.A_im.float())    # (n_ssm, n)
        P, B, C = (torch.view_as_complex(v.float()) for v in (self.P, self.B, self.C))
        A, P, B = (v.repeat(self.d // v.shape[0], 1) for v in (A, P, B))                      # (d, n) channels in turn
        return s4_kernel(A, P, B, C, self.log_dt.float().exp(), self.length)


class SGConv(nn.Module):
    """Kernels of SGConv (Li et al. 2022): a long convolution without a state space behind it.

    A kernel is pieces of c.piece learned values, laid end to end. From the third on, each is stretched twice as long as
    the one before; each weighs 1 / c.decay as much. About log2(length / piece) pieces reach over the whole length, and
    distant lags are coarse and weak by construction. The kernel is divided by its norm at initialisation, a constant
    from then on that is saved with the weights. Pieces have a learning rate of their own and the usual weight decay.
    """

    def __init__(self, c):
        super().__init__()
        pieces = 1 + max(0, math.ceil(math.log2(c.length / c.piece)))
        self.w = nn.Parameter(torch.randn(pieces, c.directions, c.d, c.piece))                # (S, c, d, d0)
        self.register_buffer("multiplier", torch.full((c.d,), float(c.decay)))
        reach = c.piece * 2 ** (pieces - 1)                                                   # at least the length
        K = sgconv_kernel(self.w.detach(), reach, self.multiplier)                            # (c, d, reach)
        self.register_buffer("norm", K.norm(dim=-1, keepdim=True))
        self.rates = {"w": (c.piece_lr, True)}

    def forward(self, l):
        """(c, d, l), float32."""
        return sgconv_kernel(self.w, l, self.multiplier) / self.norm


# ---- 5  Nothing set by hand ------------------------------------------------------------------------------------------

@torch.no_grad()
def randomise(module):
    """The paper's random initialisation: every parameter is drawn from N(0, 0.1^2), norm gains and biases included
    (appendix C.1.3 and the official code; section 3.3 speaks of the state space parameters only).

    What that does to S4: dt = e^(log dt) is about 1 where HiPPO's channels have a hundredth and less, Re A = -e^(.)
    about -1 and Im A about 0, so the bilinear map puts the poles around (1 - 1/2) / (1 + 1/2) = 1/3, and a kernel is
    its first few values. To DLR: decay rates theta^2 scatter around 0.01. With many states a few of them land near 0,
    so there is memory. The frequencies, however, all lie within a few tenths of a radian, where DLR's own
    initialisation spreads them over the full circle. Its kernels are large, slow swells that cannot tell a position
    from its neighbour. The tests state numbers.

    What self-pretraining learns instead (section 3.6, figure 4): kernels whose decay the data decide. It differs from
    task to task and from layer to layer; on Text they come out more local than HiPPO's, and on PathX they peak at
    multiples of the image's width, where the neighbours above and below are.
    """
    for parameter in module.parameters():
        parameter.normal_(0, 0.1)
    return module


# ---- 6  Attention ----------------------------------------------------------------------------------------------------

class Attention(nn.Module):
    """Multi-head self-attention, (b, l, d) -> (b, l, d).

    c.rotary: the share of a head's e dimensions that rotary positions turn. c.block: size of attention's blocks.
    One Linear makes queries, keys and values. torch's default initialisation depends only on the input width, so this
    is the same as three independent projections. (The official code copies one projection into q, k, v and o, which
    makes every position attend to itself at the start.)
    """

    def __init__(self, c):
        super().__init__()
        if c.d % c.heads:
            raise SizeError(f"d={c.d} is not a multiple of heads={c.heads}")
        self.heads, self.causal, self.block = c.heads, c.causal, c.block
        self.rotary_dims = int(c.rotary * c.d // c.heads)
        if self.rotary_dims % 2:
            raise SizeError(f"d={c.d}, heads={c.heads}: rotary positions turn pairs, not {self.rotary_dims} dimensions")
        self.qkv = nn.Linear(c.d, 3 * c.d)
        self.out = nn.Linear(c.d, c.d)

    def project(self, x):
        """x (b, l, d) -> queries, keys, values, each (b, h, l, e)."""
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if r := self.rotary_dims:
            q, k = (rotary(y) if r == y.shape[-1] else torch.cat((rotary(y[..., :r]), y[..., r:]), -1) for y in (q, k))
        return q, k, v

    def merge(self, y):
        """What the heads attended to (b, h, l, e) -> (b, l, d)."""
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x, lengths=None):
        q, k, v = self.project(x)                                                             # (b, h, l, e)
        return self.merge(attention(q, k, v, causal=self.causal, block=self.block, lengths=lengths))


class Linformer(Attention):
    """Attends to c.rank learned mixtures of all positions in place of the positions (Wang et al. 2020): O(l rank)."""

    def __init__(self, c):
        super().__init__(c)
        if c.causal:
            raise SizeError("linformer mixes all positions before it attends, so it has no causal form")
        bound = math.sqrt(6 / (c.length + c.rank))
        self.mix = nn.Parameter(torch.empty(c.length, c.rank).uniform_(-bound, bound))        # (length, r)

    def forward(self, x, lengths=None):
        q, k, v = self.project(x)                                                             # (b, h, l, e)
        if lengths is not None:                                              # padding adds nothing to a mixture
            real = inside(lengths, x.shape[1])[:, None, :, None]                              # (b, 1, l, 1)
            k, v = k * real, v * real
        k, v = (torch.einsum("bhle,lr->bhre", y, self.mix[: x.shape[1]]) for y in (k, v))     # (b, h, r, e)
        return self.merge(attention(q, k, v))


def sinusoids(l, d):
    """Fixed sinusoidal positions (l, d): sin and cos interleaved, base 10000 (Vaswani et al. 2017)."""
    angle = torch.arange(l, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1).float()


# ---- 7  Norms and residual blocks ------------------------------------------------------------------------------------

def inside(lengths, l):
    """True lengths (...,) -> (..., l) bool, True at real positions."""
    return torch.arange(l, device=lengths.device) < lengths[..., None]


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation of (b, l, d) over all real positions of the whole batch.

    Two things that nn.BatchNorm1d does not do: padded positions do not count, and under torchrun the statistics are
    those of all processes together (nn.SyncBatchNorm does the latter, but only on GPUs). Both keep one optimiser step
    the same however the batch is padded or divided.
    """

    def forward(self, x, lengths=None):
        many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if not self.training or (lengths is None and not many):
            return super().forward(x.flatten(0, -2)).view_as(x)
        x_dtype, x = x.dtype, x.float()
        weight = torch.ones(x.shape[:2], device=x.device) if lengths is None else inside(lengths, x.shape[1]).float()
        weight = weight[..., None]                                                            # (b, l, 1)

        def total(value):                                            # over positions, sequences and processes
            value = value.sum((0, 1))                                  # gradients pass through this all_reduce:
            return torch.distributed.nn.functional.all_reduce(value) if many else value

        count = total(weight)                                                                 # (1,)
        mean = total(weight * x) / count                                                      # (d,)
        variance = total(weight * (x - mean).square()) / count                                # (d,)
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1).clamp(min=1), self.momentum)
            self.num_batches_tracked += 1
        return ((x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias).to(x_dtype)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm with the calling convention of `BatchNorm`: a position is normalised alone, whatever the lengths."""

    def forward(self, x, lengths=None):
        return super().forward(x)


NORMS = {"layer": LayerNorm, "batch": BatchNorm}


class TransformerBlock(nn.Module):
    """x + mixer(norm(x)), then + ff(norm(x)) of that sum, or of x itself when c.parallel (GPT-NeoX). No dropout
    (official configurations)."""

    def __init__(self, c, mixer):
        super().__init__()
        self.norm1, self.norm2, self.parallel = NORMS[c.norm](c.d), NORMS[c.norm](c.d), c.parallel
        self.mixer = mixer
        self.ff = nn.Sequential(nn.Linear(c.d, c.ff), nn.GELU(), nn.Linear(c.ff, c.d))

    def forward(self, x, lengths=None):
        y = x + self.mixer(self.norm1(x, lengths), lengths)
        return y + self.ff(self.norm2(x if self.parallel else y, lengths))


class SSMBlock(nn.Module):
    """x + mixer(norm(x)), or norm(x + mixer(x)) where the norm comes after. The mixer's GLU replaces the FF."""

    def __init__(self, c, mixer):
        super().__init__()
        self.pre, self.norm, self.mixer = c.place == "pre", NORMS[c.norm](c.d), mixer
        self.dropout = nn.Dropout1d(c.dropout)

    def forward(self, x, lengths=None):
        y = self.mixer(self.norm(x, lengths) if self.pre else x, lengths)                     # (b, l, d)
        x = x + self.dropout(y.transpose(1, 2)).transpose(1, 2)                               # one mask for the length
        return x if self.pre else self.norm(x, lengths)


# ---- 8  MODELS and the backbone --------------------------------------------------------------------------------------

@torch.no_grad()
def init_neox(backbone):
    """N(0, 0.02^2) and zero biases: how the library that the official code uses starts a GPT-NeoX (the paper's "Pythia
    70M (Rand Init)")."""
    for module in backbone.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.normal_(0, 0.02)
        if isinstance(module, nn.Linear):
            module.bias.zero_()


# One line a --model. block(c, mixer(c)) is a layer; `like`: whose sizes and recipes it uses where it has none of its
# own; extras: what else its classes find in `c` (those that are numbers can be changed by --arch). Among them
#   positions  function (length, d) -> (length, d), added to the input; all other models know positions by their mixer
#   init       sets the initial weights of the backbone; init_head: of the head on it
#   symbols    True: reads symbols (gray levels, say) wherever the task has them, since it knows nothing but tokens
Model = namedtuple("Model", "block mixer like extras")
RANDOM = dict(init=randomise, init_head=randomise)
NEOX = dict(rotary=0.25, parallel=True, symbols=True, init=init_neox)
MODELS = {
    "transformer": Model(TransformerBlock, Attention, None, dict(positions=sinusoids)),
    "rotary": Model(TransformerBlock, Attention, None, dict(rotary=1.0)),
    "s4": Model(SSMBlock, partial(SSM, S4), None, {}),
    "s4_rand": Model(SSMBlock, partial(SSM, S4), "s4", RANDOM),
    "dlr": Model(SSMBlock, partial(SSM, DLR), None, {}),
    "dlr_rand": Model(SSMBlock, partial(SSM, DLR), "dlr", RANDOM),
    "sgconv": Model(SSMBlock, partial(SSM, SGConv), "s4", dict(piece=32, decay=2.0, piece_lr=1e-3)),
    "linformer": Model(TransformerBlock, Linformer, "transformer", dict(positions=sinusoids, rank=16)),
    "pythia": Model(TransformerBlock, Attention, None, NEOX),
    "pythia_rand": Model(TransformerBlock, Attention, "pythia", NEOX),
}
DEFAULTS = dict(norm="layer", place="pre", rotary=0.0, parallel=False, symbols=False, positions=None,
                init=nn.Identity(), init_head=nn.Identity())           # Identity: weights stay as torch draws them


def config(sizes, task, causal=False, mask_channel=False):
    """The object `c` that all classes here take: sizes as `arch` gives them, extras, what `task` says (length, vocab,
    channels) and causal. mask_channel: one more input channel that is 1 where the sample was masked out (masked
    pretraining on samples only)."""
    extras = DEFAULTS | MODELS[sizes["model"]].extras
    reads_symbols = task.channels is None or extras["symbols"]
    return SimpleNamespace(**extras | sizes, length=task.length, vocab=task.vocab if reads_symbols else None,
                           channels=None if reads_symbols else task.channels + mask_channel,
                           causal=causal, directions=1 if causal else 2)


class Backbone(nn.Module):
    """(b, l) symbols or (b, l, channels) samples -> (b, l, d). All that self-pretraining hands on to finetuning."""

    def __init__(self, c):
        super().__init__()
        model = MODELS[c.model]
        self.d, self.reads_symbols, self.init_head = c.d, c.vocab is not None, c.init_head
        self.encoder = nn.Embedding(c.vocab, c.d) if self.reads_symbols else nn.Linear(c.channels, c.d)
        self.register_buffer("positions", c.positions and c.positions(c.length, c.d), persistent=False)
        try:
            numbered = (SimpleNamespace(**vars(c), layer=i) for i in range(c.layers))
            self.layers = nn.ModuleList(model.block(c, model.mixer(c)) for c in numbered)
        except ValueError as error:                                    # an odd state, say
            raise SizeError(str(error)) from None
        # A residual stream that is normalised only on its way into each layer leaves the last sum unnormalised.
        self.norm = NORMS[c.norm](c.d) if c.place == "pre" else None
        c.init(self)

    def inputs(self, batch):
        """The view of a batch that this backbone reads."""
        return batch.symbols if self.reads_symbols else batch.samples

    def forward(self, x, lengths=None):
        # The input and the sum that all layers add to stay float32 under autocast, for every model alike: bfloat16
        # would keep 8 bits of a sample.
        with torch.autocast(x.device.type, enabled=False):
            x = self.encoder(x)                                                               # (b, l, d)
        if self.positions is not None:
            x = x + self.positions[: x.shape[1]]
        for layer in self.layers:
            x = layer(x, lengths)
        return x if self.norm is None else self.norm(x, lengths)                              # (b, l, d)


# ---- 9  Heads --------------------------------------------------------------------------------------------------------

class Denoiser(nn.Module):
    """Stage 1: predicts the symbol or sample at chosen positions. `outputs` is the vocabulary (or gray levels) under
    cross-entropy, the number of channels under L1."""

    def __init__(self, backbone, outputs):
        super().__init__()
        self.backbone = backbone
        self.head = backbone.init_head(nn.Linear(backbone.d, outputs))

    def forward(self, x, lengths, hidden):
        """x as in Backbone, hidden (b, l) bool -> (m, outputs), one row per True: no logits where no loss is taken."""
        return self.head(self.backbone(x, lengths)[hidden])


class Classifier(nn.Module):
    """Stage 2: one label per example; classes or, for regression, one output.

    pool: mean, max or last, over a sequence's true length.
    head: linear; mlp, with one hidden layer; pair, on both documents of an example, with their difference and product.
    """

    def __init__(self, backbone, outputs, pool, head="linear"):
        super().__init__()
        self.backbone, self.pool, self.pair = backbone, pool, head == "pair"
        d = backbone.d
        if head == "linear":
            layers = [nn.Linear(d, outputs)]
        elif head == "mlp":
            layers = [nn.Linear(d, d), nn.ReLU(), nn.Linear(d, outputs)]
        else:
            layers = [nn.Linear(4 * d, d), nn.GELU(), nn.Linear(d, outputs)]
        self.head = backbone.init_head(nn.Sequential(*layers))

    def forward(self, x, lengths=None):
        """x as in Backbone -> (b, outputs); with the head `pair`, of 2 b documents."""
        x = self.backbone(x, lengths)                                                         # (b, l, d)
        if lengths is None:
            lengths = torch.full(x.shape[:1], x.shape[1], device=x.device)
        real = inside(lengths, x.shape[1])[..., None]                                         # (b, l, 1)
        if self.pool == "mean":
            x = (x * real).sum(1) / lengths[:, None]                                          # (b, d)
        elif self.pool == "max":
            x = x.masked_fill(~real, -math.inf).amax(1)
        else:
            x = x.take_along_dim(lengths[:, None, None] - 1, 1).squeeze(1)
        if self.pair:
            one, two = x.unflatten(0, (-1, 2)).unbind(1)                                      # (b, d) both
            x = torch.cat((one, two, one - two, one * two), -1)                               # (b, 4 d)
        with torch.autocast(x.device.type, enabled=False):             # bfloat16 is too coarse for R2 near 1
            return self.head(x.float())                                                       # (b, outputs)


# ---- 10  Optimiser groups --------------------------------------------------------------------------------------------

def param_groups(model, lr, weight_decay):
    """Groups for AdamW. Parameters that a module's `rates` name keep their own learning rate, and are decayed only
    where it says so; everything else, biases and norm gains included, takes the recipe's (as in the official code). A
    schedule must scale each `initial_lr`."""
    own = {id(getattr(module, name)): rate for module in model.modules()
           for name, rate in getattr(module, "rates", {}).items()}
    groups = {}
    for parameter in model.parameters():
        rate, decayed = own.get(id(parameter), (None, True))
        name = "own" if id(parameter) in own else "main"
        group = groups.setdefault((name, rate, decayed), dict(
            params=[], weight_decay=weight_decay if decayed else 0.0, name=name))
        group["lr"] = group["initial_lr"] = lr if rate is None else rate
        group["params"].append(parameter)
    return list(groups.values())


def count(model):
    return sum(p.numel() for p in model.parameters())


# ---- 11  The table ---------------------------------------------------------------------------------------------------

def describe(c):
    """Cost of a batch of one sequence of symbols, without input layer and head -> (parameters of the mixers, other
    parameters, bytes that autograd keeps for the backward pass in float32, FLOPs per position of the forward pass).

    The model runs on tensors that have shapes but no values. Counted are matrix products, attention (causal like full)
    and Fourier transforms, two FLOPs a multiply-add and 2.5 n log2 n a real FFT; not counted is element-wise work, nor
    making convolution kernels, which is done once a batch (`python kernels.py` measures that).
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    def fft(x, dim, *rest, out_shape=None, **more):
        n = max(x[dim[-1]], out_shape[dim[-1]])
        return int(math.prod(x) // x[dim[-1]] * 2.5 * n * math.log2(max(2, n)))

    def attend(q, k, v, *rest, out_shape=None, **more):
        return 4 * math.prod(q) * k[-2]

    def keep(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    aten, saved = torch.ops.aten, {}
    counter = FlopCounterMode(display=False, custom_mapping={
        aten._fft_r2c: fft, aten._fft_c2r: fft, aten._scaled_dot_product_flash_attention_for_cpu: attend})
    rotary_phases.cache_clear()            # tensors without values must neither come from this cache nor stay in it
    with FakeTensorMode():
        backbone = Backbone(c)
        mixers, rest = sum(count(layer.mixer) for layer in backbone.layers), count(backbone) - count(backbone.encoder)
        for layer in backbone.layers:
            if hasattr(layer.mixer, "kernel"):
                layer.mixer.kernel.forward = partial(torch.empty, c.directions, c.d)          # (c, d, l)
        x, lengths = torch.zeros(1, c.length, dtype=torch.int64), torch.full((1,), c.length)
        with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = backbone(x, lengths)       # y keeps alive what is counted
        for p in backbone.parameters():
            saved.pop(p.untyped_storage()._cdata, None)
    rotary_phases.cache_clear()
    return mixers, rest - mixers, sum(s.nbytes() for s in saved.values()), counter.get_total_flops() / c.length


def print_models(length):
    """One line for each model and its sizes, own or borrowed, with the tasks that they are for."""
    print(f"A batch of one sequence of {length:,} symbols. Kept: by autograd for the backward pass, float32.\n")
    print("| model | tasks | parameters of mixers | other parameters | MiB kept | MFLOPs per position |")
    print("|---|---|---|---|---|---|")
    task = SimpleNamespace(length=length, vocab=256, channels=None)
    rows = read_table(ATTENTION_ARCH) + read_table(SSM_ARCH)
    for model, (_, _, like, _) in MODELS.items():
        tasks = {}
        for name in dict.fromkeys(row["task"] for row in rows if row["model"] in (model, like)):
            tasks.setdefault(str(arch(name, model)), []).append(name)
        for names in tasks.values():
            mixers, rest, memory, flops = describe(config(arch(names[0], model), task, causal="pythia" in model))
            cells = f"{mixers:,} | {rest:,} | {memory / 2**20:,.1f} | {flops / 1e6:,.2f}"
            print(f"| {model} | {' '.join(names)} | {cells} |")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)                      # piped into head: ends quietly
    print_models(length=int(sys.argv[1]) if len(sys.argv) > 1 else 1024)
