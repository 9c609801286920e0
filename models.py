"""Models: a table of sizes, thin layers over kernels.py, one line a model, one backbone with two heads.

    python models.py [TASK] [LENGTH]     what each architecture costs, in its sizes on a task: parameters, memory, FLOPs
    python models.py TASK LENGTH --cost  of a training step: operations, FLOPs, bytes, a bound on its time on a GPU

    Backbone      symbols (b, l) or samples (b, l, channels) -> features (b, l, d)
    Denoiser      backbone + a linear head on the positions to be predicted         stage 1, pretrain.py
    Classifier    backbone + pooling over the sequence + a head                     stage 2, finetune.py

The sections follow the paper's argument: a linear recurrence is a convolution (`SSM`); diagonal (`DLR`) and diagonal
plus low rank (`S4`); nothing set by hand (`randomise`); the other way to mix positions (`Attention`). The architectures
that it compares itself with, and later ones, stand below a ruler: a first reading may skip from there to `MODELS`.

A new mixer is one class and one line of `MODELS`. Every class takes one object `c`, all that is known about the model:
its sizes, the extras of its line in `MODELS`, what the task says (length, vocab, channels), whether it is causal, and
the number of the layer.

Sizes are b batch, l length, d width, h heads, e width of a head, n stored states (of S4 one in each conjugate pair, of
DLR all), c kernels per channel (2 when bidirectional); matrices are upper-case and explained in kernels.py. "Paper" is
Amos et al. 2024, "Never Train from Scratch". Its table 4 fixes the Transformers' sizes below; S4's are those of Gu et
al. 2022 as the paper's official configurations spell them out, and DLR's are S4's (appendix C.1.3).
"""
import argparse
import contextlib
import fnmatch
import itertools
import math
import signal
from collections import namedtuple
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.flop_counter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels import (attention, bigbird_attention, ceil_div, diagonal_kernel, diagonal_scan, elu_features, ema_kernel,
                     favor_features, fft_conv, hippo_nplr, inside, linear_attention, longformer_attention,
                     lsh_attention, relu_features, rotary, rotary_phases, s4_kernel, s4_recover_C, s4_step, s4d_kernel,
                     s4d_poles, sgconv_kernel, structured_linear, truncation_correction, two_levels)

# ---- Sizes -----------------------------------------------------------------------------------------------------------

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
pathx|pathx256       transformer                    4 128     8  128  4096
pathx|pathx256       rotary                         5 128     4  512  4096
sc                   rotary                         4 128     4  128  4000
bidmc_*              rotary                         4 128     4  128     -
text256|text_demo    transformer|rotary             3  64     2  128     -
listops_demo         transformer|rotary             3  64     4  128     -
pathfinder_demo      transformer|rotary             3  32     2   64     -
image_mini           transformer|rotary             3  28     2   56     -
scifar_mini          transformer|rotary             3  28     2   56     -
*_mini               transformer|rotary|pythia      3  32     2   64     -
file:*|ucr:*         transformer|rotary             3  64     2  128     -
*                    rotary                         4 128     4  256     -
*                    pythia                         6 512     8 2048     -
"""

#   s4           Gu et al. 2022, table 11. n_ssm: how many copies of (A, P, B) there are for the d channels to share
#   dlr          S4's depth and width, more states, LayerNorm (appendix C.1.3). dt_min, dt_max: twice its smallest and
#                largest decay rate
#   s5           Smith et al. 2023: state values, of which half are stored, in n_ssm blocks
#   lru          Orvieto et al. 2023; ssm_lr is a share of the main rate
# norm, place: which norm, before (pre) or after (post) the residual sum. dt_lr, ssm_lr: learning rates of the step size
# and of A, P, B (DLR: of all three parameters of its kernel); "main" follows the rest of the model. dropout: inside the
# layer and on the residual branch, whole channels of a sequence. The official S4 for Speech Commands pretrains with
# LayerNorm and finetunes with BatchNorm, an accident: here it has BatchNorm in both.
# Rows of demos, of *_mini (the stand-ins of `run_all.sh --preset mini`), of file:* and ucr:* (your own data, for a
# width of 64; `fit` in pretrain.py widens or narrows them) and of * (any other task) are not the paper's.
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
listops                s5         8 128    16     8 batch pre    0.001    0.1  0.001  0.001       -
text                   s5         6 256   192    12 batch pre    0.001    0.1   main  0.001     0.1
retrieval              s5         6 128   256    16 batch pre    0.001    0.1   main  0.001       -
image|scifar           s5         6 512   384     3 batch pre    0.001    0.1  0.001  0.001     0.1
pathfinder             s5         6 192   256     8 batch pre    0.001    0.1 0.0009 0.0009    0.05
pathx|pathx256         s5         6 128   256    16 batch pre   0.0001    0.1 0.0006 0.0006       -
listops                lru        6 128   256     - batch pre        -      -      -    0.5       -
text                   lru        6 256   192     - batch pre        -      -      -    0.1     0.1
retrieval              lru        6 128   256     - batch pre        -      -      -    0.5     0.1
image|scifar           lru        6 512   384     - batch pre        -      -      -   0.25     0.1
pathfinder             lru        6 192   256     - batch pre        -      -      -   0.25       -
pathx|pathx256         lru        6 128   256     - batch pre        -      -      -   0.25       -
pathfinder_demo        s5         3  32    32     1 batch pre    0.001    0.1  0.001  0.001       -
*_demo|text256         s5         3  64    64     1 batch pre    0.001    0.1  0.001  0.001       -
*_mini                 s5         3  48    48     1 batch pre    0.001    0.1  0.001  0.001       -
file:*|ucr:*           s5         3  64    64     1 batch pre    0.001    0.1  0.001  0.001       -
file:*|ucr:*           lru        3  64    64     - batch pre        -      -      -   0.25       -
*                      s5         4 128   128     1 batch pre    0.001    0.1  0.001  0.001       -
pathfinder_demo        lru        3  32    32     - batch pre        -      -      -   0.25       -
*_demo|text256         lru        3  64    64     - batch pre        -      -      -   0.25       -
*_mini                 lru        3  48    48     - batch pre        -      -      -   0.25       -
*                      lru        4 128   128     - batch pre        -      -      -   0.25       -
pathfinder_demo        s4         3  32    16    32 batch pre    0.001    0.1  0.001  0.001       -
pathfinder_demo        dlr        3  32   128     - layer pre    0.001    0.1      -  0.001       -
*_demo|text256         s4         3  64    16    64 batch pre    0.001    0.1  0.001  0.001       -
*_demo|text256         dlr        3  64   128     - layer pre    0.001    0.1      -  0.001       -
image_mini|scifar_mini s4         3  48    16     2 batch pre    0.001    0.1  0.001  0.001       -
*_mini                 s4         3  48    16    48 batch pre    0.001    0.1  0.001  0.001       -
*_mini                 dlr        3  48   128     - layer pre    0.001    0.1      -  0.001       -
file:*|ucr:*           s4         3  64    32     2 batch pre    0.001    0.1  0.001  0.001       -
file:*|ucr:*           dlr        3  64   128     - layer pre    0.001    0.1      -  0.001       -
*                      s4         4 128    64     2 layer pre    0.001    0.1  0.001  0.001       -
*                      dlr        4 128   256     - layer pre    0.001    0.1      -  0.001       -
"""

#   mega         Ma et al. 2023. v: width of values and of the feed-forward part; z: of queries and keys
MEGA_ARCH = """
task                  model layers   d   v  z norm  place activation dropout
listops               mega       6  80 160 64 layer post  softmax        0.1
text                  mega       4 128 256 64 scale post  softmax        0.1
retrieval             mega       6 128 256 64 scale post  softmax        0.1
image|scifar          mega       8 160 320 96 batch pre   laplace          -
pathfinder            mega       6 128 256 64 batch pre   laplace          -
pathx|pathx256        mega       4  64 128 32 batch pre   laplace          -
text256|text_demo     mega       3  64 128 32 layer pre   softmax          -
*_demo|*_mini         mega       3  32  64 16 layer pre   softmax          -
file:*|ucr:*          mega       3  64 128 32 layer pre   softmax          -
*                     mega       4 128 256 64 layer pre   softmax          -
"""

# What a model has besides, where it is not as its line in MODELS says: the sizes of short sequences, and those that its
# authors changed from task to task.
OWN_SIZES = """
task                   model            sizes
*_demo|*_mini|text256  local            block=8
*_demo|*_mini|text256  longformer       window=32
*_demo|*_mini|text256  reformer         chunk=8
*_demo|*_mini|text256  bigbird          block=8,random=2
*_demo|*_mini|text256  performer        features=16
*_demo|*_mini|text256  mega_chunk|spade chunk=16
pathx|pathx256         mega_chunk|spade chunk=4096
listops|retrieval      sgconv           piece=1
text                   sgconv           piece=2
image                  sgconv           decay=1,power=1,dropout=0.2
pathfinder             sgconv           dropout=0.2
pathx|pathx256         sgconv           piece=64,stretch=1,decay=1,decay_spread=2,cosine=1
*_demo|*_mini|text256  lru              r_min=0.9,r_max=0.999
pathx|pathx256         lru              r_min=0.999,r_max=0.9999,angle=0.314
listops                s5               fast_B=1,C_scale=0.088
text                   s5               C_scale=0.0625
image|scifar           s5               fast_B=1,C_scale=0.044
pathx|pathx256         s5               C_scale=11.3
pathx256               dfout            state=128
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


def assignments(text):
    """'d=64,layers=3' -> {"d": 64, "layers": 3}. ValueError for anything else."""
    pairs = [pair.strip().partition("=") for pair in text.split(",")]
    if not all(key and value for key, _, value in pairs):
        raise ValueError(f"wants key=value,key=value, got {text}")
    return {key: number(value) for key, _, value in pairs}


class SizeError(ValueError):
    """Sizes that do not fit each other or the task, in one line."""


def arch(task, model, /, **overrides):
    """Sizes of a model on a task: its row above and the numbers among its extras, changed by `overrides` -> plain dict,
    saved in config.json and in checkpoints. None where there is no row; SizeError for an override without meaning."""
    row = find(read_table(ATTENTION_ARCH) + read_table(SSM_ARCH) + read_table(MEGA_ARCH), model, task=task)
    if row is None:
        return None
    sizes = dict(block=None, norm="layer") if "heads" in row else dict(dropout=0.0)
    sizes |= {key: number(cell) for key, cell in row.items() if key != "task"} | {"model": model}
    sizes |= {key: value for key, value in MODELS[model].extras.items() if type(value) in (int, float)}
    own = [row["sizes"] for row in read_table(OWN_SIZES)
           if row["model"] == model and fnmatch.fnmatchcase(task, row["task"])]
    sizes |= assignments(own[0]) if own else {}
    known = FEED_FORWARD | sizes if "heads" in row else sizes
    for key, value in overrides.items():
        if key not in known or key == "model":
            names = " ".join(name for name in known if name != "model")
            raise SizeError(f"--arch {key}={value}: {model} on {task} has no {key}; it has: {names}")
        default = MODELS[model].extras.get(key, known[key])            # a row may write 1 where the default is 1.0
        if key in CHOICES:
            fits, wanted = value in CHOICES[key], "one of: " + " ".join(map(str, CHOICES[key]))
        elif type(default) is int or key == "block":
            least = 0 if key in MAY_BE_ZERO else 1
            fits, wanted = type(value) is int and value >= least, f"a whole number of at least {least}"
        else:
            most = 1 if key in ("guided", "ffn_share") else 1e9
            fits = type(value) in (int, float) and 0 <= value <= most or (key, value) == ("dt_lr", "main")
            wanted = f"a number from 0 to {most:g}"
        if not fits:
            raise SizeError(f"--arch {key}={value}: {key} must be {wanted}; on {task} it is {known[key]}")
    if overrides.keys() & {"ffn_share", "ffn_blocks", "guided"} and overrides.get("ffn", "dense") == "dense":
        raise SizeError("--arch ffn_share, ffn_blocks and guided need ffn=lowrank, blockdense or blockshuffle")
    sizes |= overrides
    if "dt_min" in sizes and not 0 < sizes["dt_min"] <= sizes["dt_max"]:
        raise SizeError(f"dt_min={sizes['dt_min']}, dt_max={sizes['dt_max']}: wants 0 < dt_min <= dt_max")
    return sizes


# ---- A linear recurrence is a convolution ----------------------------------------------------------------------------

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

    def forward(self, x, lengths=None, K=None):
        """K (c, d, l) or longer, if it has been made already."""
        u = x.transpose(1, 2)                                                                 # (b, d, l)
        if lengths is not None:       # a convolution does not know padding; zeros do not move its state
            u = u * inside(lengths, x.shape[1])[:, None]
        K = self.kernel(x.shape[1]) if K is None else K
        y = fft_conv(u, K, D=self.D)                                                          # (b, d, l)
        y = self.dropout(F.gelu(y))
        # `out` on the channels of each position, without transposing what is large. Autocast would cast the weight
        # after it is expanded, b times.
        lower = torch.get_autocast_dtype(y.device.type) if torch.is_autocast_enabled(y.device.type) else y.dtype
        weight, bias = self.out.weight.to(lower), self.out.bias.to(lower)
        y = torch.baddbmm(bias[:, None], weight.expand(len(y), -1, -1), y.to(lower))          # (b, 2 d, l)
        return F.glu(y, dim=1).transpose(1, 2)                                                # (b, l, d)

    def step(self, x, state):
        """One position of a causal layer: x (b, d) and the state after the position before -> y (b, d), state."""
        y, state = self.kernel.step(x, state)
        return F.glu(self.out(F.gelu(y + self.D * x)), dim=-1), state


def log_uniform(c, n):
    """Logarithms of n step sizes, spread evenly between those of c.dt_min and c.dt_max."""
    return torch.rand(n) * math.log(c.dt_max / c.dt_min) + math.log(c.dt_min)


class Kernel(nn.Module):
    """Base of what makes convolution kernels, (directions, d, l) of length l, float32.

    Kernels depend on parameters alone, so the layers of a backbone make theirs together, in as few calls as one layer
    would need. `arguments(p)` prepares parameters, p.A and the like: of this module, or of many, stacked in front.
    `make(*arguments, l)` makes kernels, channel by channel. An argument is (..., d, n) or (d,).
    """

    def forward(self, l):
        return self.make(*self.arguments(self), l)


def make_kernels(kernels, l):
    """The kernels of modules of one shape, (c, d, l) each, in one call. Where they are large, calls cost little and
    memory much, so then in several calls."""
    names = [*kernels[0]._parameters, *kernels[0]._buffers]
    many, made = max(1, 2**22 // (kernels[0].d * getattr(kernels[0], "length", l))), []
    for i in range(0, len(kernels), many):
        some = kernels[i:i + many]
        p = SimpleNamespace(**{name: torch.stack([getattr(kernel, name) for kernel in some]) for name in names})
        # layers in front -> layers and channels as one dimension: (layers, ..., d, n) -> (..., layers d, n)
        arguments = (v.flatten() if v.ndim == 2 else v.movedim(0, -3).flatten(-3, -2) for v in some[0].arguments(p))
        made += some[0].make(*arguments, l)[..., :l].chunk(len(some), 1)
    return made


# ---- Diagonal: DLR ---------------------------------------------------------------------------------------------------

class Diagonal(Kernel):
    """Kernels that are sums of geometric sequences: arguments W (c, d, n) and Lambda (1 or d, n), complex."""

    make = staticmethod(diagonal_kernel)

    def poles(self):
        return self.arguments(self)

    def step(self, u, x):
        """The recurrence itself: u (b, d), state x (b, d, n) or None -> y (b, d), x."""
        W, Lambda = self.poles()
        x = u[..., None] + (0 if x is None else torch.exp(Lambda) * x)                        # (b, d, n)
        return (W[0] * x).real.sum(-1).float(), x


class DLR(Diagonal):
    """Kernels of the diagonal linear RNN (paper, eq. 3; Gupta et al. 2022): K[k] = Re sum_n W_n e^(Lambda_n k).

    Abar = diag(e^Lambda) and Bbar = 1, so K[k] = C Abar^k 1 with C = W: a sum of damped waves. All channels and
    directions of a layer share the poles e^Lambda, and each mixes them with its own W. Nothing is sampled from
    continuous time, and there are no conjugate pairs. Re Lambda = -theta^2 <= 0: whatever is learned, the recurrence
    never grows.

    At the start: decay rates log-uniform in [dt_min / 2, dt_max / 2], one full turn of frequencies 2 pi n / N, and W
    complex normal over N. All three parameters have a small learning rate of their own and no weight decay.

    c.own_poles: each channel has its own. The frequencies of channel i are shifted by i/d of the spacing 2 pi/N, so
    that all channels together fill the circle evenly. (DFouT, arXiv 2508.20441)
    """

    def __init__(self, c):
        super().__init__()
        channels = c.d if c.own_poles else 1
        decay = c.dt_min / 2 * (c.dt_max / c.dt_min) ** torch.rand(channels, c.state)
        turn = (torch.arange(c.state) + torch.arange(channels)[:, None] / channels) * (2 * math.pi / c.state)
        self.d = c.d
        self.theta = nn.Parameter(decay.sqrt().squeeze(0))                                    # (n,) or (d, n)
        self.Lambda_im = nn.Parameter(turn.squeeze(0))                                        # (n,) or (d, n)
        # Complex parameters are stored as real pairs, so that Adam keeps moments per component.
        self.W = nn.Parameter(torch.randn(c.directions, c.d, c.state, 2) / c.state)           # (c, d, n, 2)
        self.rates = {name: (c.ssm_lr, False) for name in ("theta", "Lambda_im", "W")}

    def arguments(self, p):
        Lambda = torch.complex(-p.theta.float().square(), p.Lambda_im.float())                # (n,) or (d, n)
        return torch.view_as_complex(p.W.float()), Lambda if self.theta.ndim == 2 else Lambda[..., None, :]


# ---- Diagonal plus low rank: S4 --------------------------------------------------------------------------------------

class S4(Kernel):
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
        log_dt = log_uniform(c, c.d)
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

    def arguments(self, p):
        """A, P, B (d, n), C~ (c, d, n) and dt (d,)."""
        P, B, C = (torch.view_as_complex(v.float()) for v in (p.P, p.B, p.C))
        A_re, A_im, P, B = (v.tile((self.d // v.shape[-2], 1))                                # (d, n) channels in turn
                            for v in (p.A_log_re.float().exp(), p.A_im.float(), P, B))
        dt = p.log_dt.float().exp()                                                           # (d,)
        # No state decays slower than 1 % in `length` steps (before the bilinear rule), so that float32 is enough: see
        # `s4_kernel`. HiPPO's states do not come near it.
        least = 0.01 / (self.length * dt.detach()[..., None])
        return torch.complex(-A_re.maximum(least), A_im), P, B, C, dt

    def make(self, A, P, B, C, dt, l):
        """(c, d, length), whatever l is."""
        return s4_kernel(A, P, B, C, dt, self.length, precise=False)

    def step(self, u, state):
        """The state also holds C, which costs far more to find than a step."""
        A, P, B, C, dt = self.arguments(self)
        if state is None:
            C = s4_recover_C(A, P, C, dt, self.length)[0].to(A.dtype)                         # (d, n)
            state = C, torch.zeros(*u.shape, A.shape[-1], dtype=A.dtype, device=u.device)     # (b, d, n)
        y, x = s4_step(A, P, B, state[0], dt, state[1], u)
        return y, (state[0], x)


# ---- Nothing set by hand ---------------------------------------------------------------------------------------------

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


# ---- Attention -------------------------------------------------------------------------------------------------------

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
        self.heads, self.e, self.causal, self.block = c.heads, c.d // c.heads, c.causal, c.block
        self.rotary_dims = int(c.rotary * c.d // c.heads)
        if self.rotary_dims % 2:
            raise SizeError(f"d={c.d}, heads={c.heads}: rotary positions turn pairs, not {self.rotary_dims} dimensions")
        self.qkv = nn.Linear(c.d, 3 * c.d)
        self.out = nn.Linear(c.d, c.d)

    def project(self, x, start=0):
        """x (b, l, d) at positions from `start` on -> queries, keys, values, each (b, h, l, e); `Reformer`: no keys."""
        y = self.qkv(x).unflatten(-1, (-1, self.e))                                           # (b, l, 3 h, e)
        if r := self.rotary_dims:                                    # queries and keys in one product
            qk, v = y.split((y.shape[2] - self.heads, self.heads), 2)
            turned = rotary(qk[..., :r], start, dim=1)
            y = torch.cat((turned, qk[..., r:]), -1) if r < self.e else turned                # (b, l, 2 h, e)
        parts = y.split(self.heads, 2) + ((v,) if r else ())
        return tuple(part.transpose(1, 2) for part in parts)

    def merge(self, y):
        """What the heads attended to (b, h, l, e) -> (b, l, d)."""
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x, lengths=None):
        return self.merge(self.attend(*self.project(x), lengths))

    def attend(self, q, k, v, lengths):
        """Who attends to whom, which the models below replace: (b, h, l, e) three times -> (b, h, l, e)."""
        return attention(q, k, v, causal=self.causal, block=self.block, lengths=lengths)

    def step(self, x, state):
        """One position of a causal layer: x (b, d), state None or keys and values so far -> y (b, d), state. Models
        that replace `attend` call it on all positions so far and keep the last."""
        start = 0 if state is None else state[0].shape[2]
        q, k, v = self.project(x[:, None], start)                                             # (b, h, 1, e)
        k, v = (k, v) if state is None else (torch.cat(pair, 2) for pair in zip(state, (k, v)))
        if type(self).attend is Attention.attend:
            first = max(0, (start // self.block - 1) * self.block) if self.block else 0
            y = F.scaled_dot_product_attention(q, k[:, :, first:], v[:, :, first:])           # (b, h, 1, e)
        else:                              # as a whole, with one real query
            y = self.attend(F.pad(q, (0, 0, start, 0)), k, v, None)[:, :, -1:]
        return self.merge(y)[:, 0], (k, v)


def sinusoids(l, d):
    """Fixed sinusoidal positions (l, d): sin and cos interleaved, base 10000 (Vaswani et al. 2017)."""
    angle = torch.arange(l, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[:, :d].float()


# ---- Norms and residual blocks ---------------------------------------------------------------------------------------

def total(value, many):
    """Sum over processes, if there are many."""
    if many:
        dist.all_reduce(value)
    return value


class MaskedNorm(torch.autograd.Function):
    """x (b, d, l), real (b, l, 1) 1 or 0, gain and bias (d,) -> (x - mean) / sqrt(variance + eps) * gain + bias, with
    the mean and variance (d, 1) of the real positions of all processes; also these and their number (1, 1). In few
    passes over x."""

    @staticmethod
    def forward(context, x, real, gain, bias, eps, many):
        count = total(real.sum((0, 1), keepdim=True)[0], many)                                # (1, 1)
        share = real / count                                                                  # (b, l, 1)
        mean = total((x @ share).sum(0), many)                                                # (d, 1)
        x = x - mean
        variance = total((x.square() @ share).sum(0), many)                                   # (d, 1)
        rate = torch.rsqrt(variance + eps)
        context.save_for_backward(x, share, gain, rate)
        context.many = many
        context.mark_non_differentiable(mean, variance, count)
        context.set_materialize_grads(False)
        return torch.addcmul(bias[:, None], x, rate * gain[:, None]), mean, variance, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, grad, *_):
        """y = gain z + bias, z = rate x. Every position's z depends on all real x, through mean and variance."""
        x, share, gain, rate = context.saved_tensors
        of_bias = grad.sum((0, 2))[:, None]                                                   # (d, 1)
        of_gain = (grad * x).sum((0, 2))[:, None] * rate                                      # (d, 1)
        sums = total(torch.cat((of_bias, of_gain), 1), context.many)                          # (d, 2)
        shift = torch.addcmul(sums[:, :1], x, sums[:, 1:] * rate).mul_(share.mT)              # (b, d, l)
        return (grad - shift).mul_(rate * gain[:, None]), None, of_gain[:, 0], of_bias[:, 0], None, None


class BatchNorm(nn.BatchNorm1d):
    """Batch normalisation of (b, l, d) over all real positions of the whole batch.

    Two things that nn.BatchNorm1d does not do: padded positions do not count, and under torchrun the statistics are
    those of all processes together (nn.SyncBatchNorm does the latter, but only on GPUs). Both keep one optimiser step
    the same however the batch is padded or divided.
    """

    def forward(self, x, lengths=None):
        many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if x.ndim == 2:                                                                       # (b, d), one step
            return super().forward(x)
        if not self.training or (lengths is None and not many):
            return super().forward(x.transpose(1, 2)).transpose(1, 2)
        real = torch.ones(x.shape[:2], device=x.device) if lengths is None else inside(lengths, x.shape[1], torch.float)
        with torch.autocast(x.device.type, enabled=False):
            y, mean, variance, count = MaskedNorm.apply(x.transpose(1, 2).float(), real[..., None], self.weight,
                                                        self.bias, self.eps, many)
        with torch.no_grad():
            self.running_mean.lerp_(mean[:, 0], self.momentum)
            self.running_var.lerp_((variance * count / (count - 1).clamp(min=1))[:, 0], self.momentum)
            self.num_batches_tracked += 1
        return y.to(x.dtype).transpose(1, 2)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm with the calling convention of `BatchNorm`: a position is normalised alone, whatever the lengths."""

    def forward(self, x, lengths=None):
        return super().forward(x)


class ScaleNorm(nn.Module):
    """x / its root mean square over d, times one learned scalar (MEGA's norm on the text tasks)."""

    def __init__(self, d):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x, lengths=None):
        y = x.float()
        return (self.gain * y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


NORMS = {"layer": LayerNorm, "batch": BatchNorm, "scale": ScaleNorm}


class TransformerBlock(nn.Module):
    """x + mixer(norm(x)), then + ff(norm(x)) of that sum, or of x itself when c.parallel (GPT-NeoX). No dropout
    (official configurations)."""

    def __init__(self, c, mixer):
        super().__init__()
        self.norm1, self.norm2, self.parallel = NORMS[c.norm](c.d), NORMS[c.norm](c.d), c.parallel
        self.mixer = mixer
        self.ff = feed_forward(c)

    def forward(self, x, lengths=None, *K):
        y = x + self.mixer(self.norm1(x, lengths), lengths, *K)
        return y + self.ff(self.norm2(x if self.parallel else y, lengths))

    def step(self, x, state):
        y, state = self.mixer.step(self.norm1(x), state)
        y = x + y                                                                             # (b, d)
        return y + self.ff(self.norm2(x if self.parallel else y)), state


class SSMBlock(nn.Module):
    """x + mixer(norm(x)), or norm(x + mixer(x)) where the norm comes after. The mixer's GLU replaces the FF."""

    def __init__(self, c, mixer):
        super().__init__()
        self.pre, self.norm, self.mixer = c.place == "pre", NORMS[c.norm](c.d), mixer
        self.dropout = nn.Dropout1d(c.dropout)

    def forward(self, x, lengths=None, *K):
        y = self.mixer(self.norm(x, lengths) if self.pre else x, lengths, *K)                 # (b, l, d)
        # One mask for the length. The sum lies in memory as its first term does, so from here on as (b, d, l).
        x = self.dropout(y.transpose(1, 2)).transpose(1, 2) + x
        return x if self.pre else self.norm(x, lengths)

    def step(self, x, state):
        y, state = self.mixer.step(self.norm(x) if self.pre else x, state)
        return x + y if self.pre else self.norm(x + y), state                                 # (b, d)


# ---- The backbone ----------------------------------------------------------------------------------------------------

class Backbone(nn.Module):
    """(b, l) symbols or (b, l, channels) samples -> (b, l, d). All that self-pretraining hands on to finetuning."""

    def __init__(self, c):
        super().__init__()
        model = MODELS[c.model]
        self.d, self.reads_symbols, self.init_head = c.d, c.vocab is not None, c.init_head
        self.mask_channel = c.mask_channel
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
        """The view of a batch that this backbone reads, with nothing hidden."""
        x = batch.symbols if self.reads_symbols else batch.samples
        return F.pad(x, (0, 1)) if self.mask_channel else x

    def forward(self, x, lengths=None):
        return self.body(x, lengths, self.kernels(x.shape[1]))

    def body(self, x, lengths, kernels):
        """All but the kernels that layers make together: what --compile compiles."""
        # The input and the sum that all layers add to stay float32 under autocast, for every model alike: bfloat16
        # would keep 8 bits of a sample.
        with torch.autocast(x.device.type, enabled=False):
            x = self.encoder(x)                                                               # (b, l, d)
        if self.positions is not None:
            x = x + self.positions[: x.shape[1]]
        for layer, K in zip(self.layers, kernels):
            x = layer(x, lengths, *K)
        return x if self.norm is None else self.norm(x, lengths)                              # (b, l, d)

    def kernels(self, l):
        """The kernels of all layers, made together: for each layer (K,), or () where its mixer makes what it needs."""
        kernels = [getattr(layer.mixer, "kernel", None) for layer in self.layers]
        if not all(isinstance(kernel, Kernel) for kernel in kernels):
            return [()] * len(kernels)
        return [(K,) for K in make_kernels(kernels, l)]

    def can_step(self):
        """Whether all layers have a recurrent form; those that have none generate by computing everything anew."""
        return all(hasattr(layer, "step") and hasattr(getattr(layer.mixer, "kernel", layer), "step")
                   for layer in self.layers)

    def step(self, x, t, states):
        """Position t of a causal backbone in eval mode: x (b,) symbols or (b, channels) samples, states: of the layers
        after position t - 1 (None at the start) -> (b, d), states. Equals `forward` at that position."""
        x = self.encoder(x) + (0 if self.positions is None else self.positions[t])            # (b, d)
        after = []
        for layer, state in zip(self.layers, states or [None] * len(self.layers)):
            x, state = layer.step(x, state)
            after.append(state)
        return x if self.norm is None else self.norm(x), after


# ---- Heads -----------------------------------------------------------------------------------------------------------

def at(x, hidden):
    """x (b, l, ...) at hidden positions -> (m, ...). hidden: bool (b, l) or numbers (m,) below b l."""
    return x[hidden] if hidden.dtype == torch.bool else x.flatten(0, 1)[hidden]


class Denoiser(nn.Module):
    """Stage 1: predicts the symbol or sample at chosen positions. `outputs` is the vocabulary (or gray levels) under
    cross-entropy, the number of channels under L1."""

    def __init__(self, backbone, outputs):
        super().__init__()
        self.backbone = backbone
        self.head = backbone.init_head(nn.Linear(backbone.d, outputs))

    def forward(self, x, lengths, hidden):
        """x as in Backbone, hidden as in `at` -> (m, outputs): no logits where no loss is taken."""
        return self.head(at(self.backbone(x, lengths), hidden))


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
        return self.classify(self.backbone(x, lengths), lengths)

    def classify(self, x, lengths):
        """What the backbone gives, (b, l, d) -> (b, outputs)."""
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


class Joint(Classifier):
    """Joint training, self-pretraining's rival: a classifier whose backbone also predicts what is hidden, through a
    second head with that many `predicted` outputs."""

    def __init__(self, backbone, outputs, pool, head, predicted):
        super().__init__(backbone, outputs, pool, head)
        self.predict = backbone.init_head(nn.Linear(backbone.d, predicted))

    def forward(self, x, lengths=None, corrupted=None, hidden=None):
        """x as in Backbone -> (b, outputs); with hidden as in `at`, also (m, predicted): from the corrupted inputs, or
        with a causal model, which has none, from the same pass."""
        features = self.backbone(x, lengths)                                                  # (b, l, d)
        outputs = self.classify(features, lengths)
        if hidden is None:
            return outputs
        if corrupted is not None:
            # BatchNorm's running averages are for evaluation, whose inputs are not corrupted: this pass leaves them.
            norms = [norm for norm in self.backbone.modules() if isinstance(norm, BatchNorm)]
            kept = [norm.momentum for norm in norms]
            for norm in norms:
                norm.momentum = 0.0
            features = self.backbone(corrupted, lengths)
            for norm, momentum in zip(norms, kept):
                norm.momentum = momentum
        return outputs, self.predict(at(features, hidden))


# ---- Optimiser groups ------------------------------------------------------------------------------------------------

class Share(float):
    """A learning rate as a share of the main one."""


def param_groups(model, lr, weight_decay):
    """Groups for AdamW. Parameters that a module's `rates` name keep their own learning rate, and are decayed only
    where it says so; everything else, biases and norm gains included, takes the recipe's (as in the official code). A
    schedule must scale each `initial_lr`."""
    own = {id(getattr(module, name)): rate for module in model.modules()
           for name, rate in getattr(module, "rates", {}).items()}
    groups = {}
    for parameter in model.parameters():
        rate, decayed = own.get(id(parameter), (None, True))
        rate = lr * rate if isinstance(rate, Share) else rate
        name = "own" if id(parameter) in own else "main"
        group = groups.setdefault((name, rate, decayed), dict(
            params=[], weight_decay=weight_decay if decayed else 0.0, name=name))
        group["lr"] = group["initial_lr"] = lr if rate is None else rate
        group["params"].append(parameter)
    return list(groups.values())


def count(model):
    return sum(p.numel() for name, p in model.named_parameters() if not name.endswith(".guide"))


# =====================================================================================================================
# Beyond the paper: the architectures that it compares itself with, and later ones. A first reading may skip to MODELS.
# =====================================================================================================================

# ---- State spaces ----------------------------------------------------------------------------------------------------

class S4D(Diagonal):
    """Kernels of S4D (Gu et al. 2022, arXiv 2206.11893): S4 without the low-rank term, zero-order hold, poles from
    c.start.

    lin    Im A = pi n, the frequencies of a Fourier basis
    inv    Im A = N/pi (N / (2n + 1) - 1), dense at 0 and few that are fast
    legs   HiPPO's, its low-rank term dropped
    In all three Re A = -1/2 and B = 1. Copies, rates and log dt are those of `S4`.
    """

    make = staticmethod(s4d_kernel)

    def __init__(self, c):
        super().__init__()
        if c.d % c.n_ssm:
            raise SizeError(f"d={c.d} is not a multiple of n_ssm={c.n_ssm}")
        self.d, n = c.d, torch.arange(c.state // 2)
        imag = {"lin": math.pi * n, "inv": c.state / math.pi * (c.state / (2 * n + 1) - 1),
                "legs": hippo_nplr(c.state)[0].imag.float()}[c.start]                         # (n,)
        self.log_dt = nn.Parameter(log_uniform(c, c.d))
        self.A_log_re = nn.Parameter(torch.full((c.n_ssm, len(n)), math.log(0.5)))
        self.A_im = nn.Parameter(imag.repeat(c.n_ssm, 1))                                     # (n_ssm, n)
        self.B = nn.Parameter(torch.tensor([1.0, 0.0]).repeat(c.n_ssm, len(n), 1))            # (n_ssm, n, 2)
        C = torch.randn(c.directions, c.d, len(n), dtype=torch.complex64)
        self.C = nn.Parameter(torch.view_as_real(C).clone())                                  # (c, d, n, 2)
        self.rates = {name: (c.ssm_lr, False) for name in ("A_log_re", "A_im", "B")}
        self.rates["log_dt"] = (None if c.dt_lr == "main" else c.dt_lr, False)

    def arguments(self, p):
        A = torch.complex(-p.A_log_re.float().exp().clamp(min=1e-4), p.A_im.float())          # (n_ssm, n)
        B, C = (torch.view_as_complex(v.float()) for v in (p.B, p.C))
        A, B = (v.tile((self.d // v.shape[-2], 1)) for v in (A, B))                           # (d, n)
        return A, B, C, p.log_dt.float().exp()

    def poles(self):
        return s4d_poles(*self.arguments(self))


class SGConv(Kernel):
    """Kernels of SGConv (Li et al. 2023): a long convolution without a state space behind it.

    A kernel is pieces of c.piece learned values, laid end to end. From the third on, each is stretched twice as long as
    the one before. Each piece weighs 1 / decay of the one before, with decay rising over the channels from c.decay by
    c.decay_spread; and lag t weighs (t + 1)^-c.power. About log2(length / piece) pieces reach over the whole length,
    and distant lags are coarse and weak by construction. The kernel is divided by its norm at initialisation, a
    constant from then on that is saved with the weights. Pieces have a learning rate of their own and the usual weight
    decay. c.stretch: all pieces are 2^stretch times as long. c.cosine: pieces begin as cosines, whose frequencies are
    dealt out to the channels.
    """

    def __init__(self, c):
        super().__init__()
        self.d, self.stretch = c.d, c.stretch
        pieces = 1 + max(0, math.ceil(math.log2(c.length / c.piece)) - c.stretch)
        w = torch.randn(pieces, c.directions, c.d, c.piece)                                   # (S, c, d, d0)
        if c.cosine:
            turn = torch.linspace(0, 2 * math.pi, c.piece)                                    # (d0,)
            w = torch.stack([(torch.randperm(c.d)[:, None] * turn).cos().expand(c.directions, -1, -1) for _ in w])
        self.w = nn.Parameter(w)
        self.register_buffer("multiplier", torch.linspace(c.decay, c.decay + c.decay_spread, c.d))      # (d,)
        self.register_buffer("power", torch.full((c.d,), float(c.power)), persistent=False)
        reach = c.piece * 2 ** (pieces - 1 + c.stretch)                                       # at least the length
        K = sgconv_kernel(w, reach, self.multiplier, self.power, c.stretch)                   # (c, d, reach)
        self.register_buffer("norm", K.norm(dim=-1, keepdim=True))
        self.rates = {"w": (c.piece_lr, True)}

    def arguments(self, p):
        return p.w, p.multiplier, p.power, p.norm

    def make(self, w, multiplier, power, norm, l):
        return sgconv_kernel(w, l, multiplier, power, self.stretch) / norm


class SharedState(nn.Module):
    """A linear recurrence whose n states all channels share, (b, l, d) -> (b, l, d): `S5` and `LRU` below.

    x[t] = lambda x[t-1] + Bbar u[t] with lambda (n,), Bbar (n, d); y = factor Re C x + D u with C (d, n). Each state
    reads all channels, so there is a scan over time and no kernel per channel. Bidirectional: a second C reads the scan
    of the reversed sequence; u[t] is in both. `recurrence` makes lambda and Bbar. Then GELU and a
    gate.
    """

    factor = 1

    def __init__(self, c, n):
        super().__init__()
        C = c.C_scale * torch.randn(c.directions, c.d, n, 2) / math.sqrt(c.state)
        self.C = nn.Parameter(C)                                                              # (c, d, n, 2)
        self.D = nn.Parameter(torch.randn(c.d))

    def scan(self, u):
        """(b, l, d), float32 -> the same."""
        log_lambda, B = self.recurrence()
        v, y = torch.complex(u @ B.real.T, u @ B.imag.T), 0                                   # (b, l, n)
        for direction, C in enumerate(self.C.float()):
            x = diagonal_scan(log_lambda, v.flip(1)).flip(1) if direction else diagonal_scan(log_lambda, v)
            y = y + x.real @ C[..., 0].T - x.imag @ C[..., 1].T                               # (b, l, d) Re C x
        return self.factor * y + self.D * u

    def forward(self, x, lengths=None):
        u = x if lengths is None else x * inside(lengths, x.shape[1])[..., None]
        with torch.autocast(x.device.type, enabled=False):
            y = self.scan(u.float())                                                          # (b, l, d)
        return self.gate(F.gelu(y, approximate="tanh"))

    def step(self, x, state):
        """One position of a causal layer: x (b, d), state (b, n) or None -> y (b, d), state."""
        log_lambda, B = self.recurrence()
        state = x.to(B.dtype) @ B.T + (0 if state is None else log_lambda.exp() * state)      # (b, n)
        y = self.factor * (state @ torch.view_as_complex(self.C.float())[0].T).real + self.D * x
        return self.gate(F.gelu(y, approximate="tanh")), state


class S5(SharedState):
    """S5 (Smith et al. 2023): HiPPO's diagonal in c.n_ssm blocks of c.state / n_ssm states, one of each conjugate pair
    stored; zero-order hold with a step size per state.

    The authors draw B and C in HiPPO's basis and turn them with its unitary V. A turned Gaussian is a Gaussian, so they
    are drawn here where they are needed. c.C_scale: how large C is; c.fast_B: B has the main learning rate and decay.
    Both change from task to task.
    """

    factor = 2                                                           # y = 2 Re C x: the other half of each pair

    def __init__(self, c):
        if c.state % (2 * c.n_ssm):
            raise SizeError(f"state={c.state} is not a multiple of 2 n_ssm, {2 * c.n_ssm}")
        super().__init__(c, c.state // 2)
        A = hippo_nplr(c.state // c.n_ssm)[0].repeat(c.n_ssm)                                 # (n,)
        self.A_log_re = nn.Parameter((-A.real).log().float())
        self.A_im = nn.Parameter(A.imag.float())
        self.B = nn.Parameter(torch.randn(len(A), c.d, 2) / math.sqrt(2 * c.state))           # (n, d, 2)
        self.log_dt = nn.Parameter(log_uniform(c, len(A)))
        self.out = nn.Linear(c.d, c.d)
        self.rates = {name: (c.ssm_lr, False) for name in ("A_log_re", "A_im", "B", "log_dt")}
        for name, main in (("log_dt", c.dt_lr == "main"), ("B", c.fast_B)):
            if main:                                                     # of the main rate, and decayed
                del self.rates[name]

    def recurrence(self):
        """log lambda (n,) and Bbar (n, d), complex64."""
        A = torch.complex(-self.A_log_re.float().exp().clamp(min=1e-4), self.A_im.float())    # (n,)
        log_lambda = A * self.log_dt.float().exp()
        return log_lambda, (torch.expm1(log_lambda) / A)[:, None] * torch.view_as_complex(self.B.float())

    def gate(self, y):
        return y * self.out(y).sigmoid()


class LRU(SharedState):
    """The Linear Recurrent Unit (Orvieto et al. 2023): c.state poles drawn uniformly from a ring, c.r_min < |lambda| <
    c.r_max and angles up to c.angle; no continuous time. Bbar is scaled, at the start by sqrt(1 - |lambda|^2), and the
    scale is learned."""

    def __init__(self, c):
        super().__init__(c, c.state)
        square = c.r_min ** 2 + torch.rand(c.state) * (c.r_max ** 2 - c.r_min ** 2)           # |lambda|^2
        square = square.clamp(1e-6, 1 - 1e-6)
        self.nu = nn.Parameter((-square.log() / 2).log())                                     # |lambda| = exp(-e^nu)
        self.theta = nn.Parameter((torch.rand(c.state).clamp(min=1e-6) * c.angle).log())      # angle e^theta
        self.gamma = nn.Parameter((1 - square).log() / 2)
        self.B = nn.Parameter(torch.randn(c.state, c.d, 2) / math.sqrt(2 * c.d))              # (n, d, 2)
        self.out = nn.Linear(c.d, 2 * c.d)
        self.rates = {name: (Share(c.ssm_lr), False) for name in ("nu", "theta", "gamma", "B")}

    def recurrence(self):
        """log lambda (n,) and Bbar (n, d), complex64."""
        log_lambda = torch.complex(-self.nu.float().exp(), self.theta.float().exp())
        return log_lambda, self.gamma.float().exp()[:, None] * torch.view_as_complex(self.B.float())

    def gate(self, y):
        return F.glu(self.out(y), dim=-1)


# ---- Cheaper attention -----------------------------------------------------------------------------------------------

class Longformer(Attention):
    """Attends to c.window positions around its own (Beltagy et al. 2020). As in the benchmark there are no global
    tokens."""

    def __init__(self, c):
        super().__init__(c)
        self.window = c.window

    def attend(self, q, k, v, lengths):
        return longformer_attention(q, k, v, self.window, self.causal, lengths)


def fill_up(length, lengths, *heads):
    """True lengths, and (b, h, l, e) tensors filled up to the task's length: for models whose function of a sequence
    would otherwise depend on how long the batch is."""
    b, l = heads[0].shape[0], heads[0].shape[2]
    lengths = torch.full((b,), l, device=heads[0].device) if lengths is None else lengths
    return lengths, *(F.pad(y, (0, 0, 0, length - l)) for y in heads)


class BigBird(Attention):
    """Attends to its block of c.block positions, the two beside it, the first, the last, and c.random others (Zaheer et
    al. 2020). The others are drawn once for each layer, head and block, and saved with the weights; short sequences
    have fewer. Blocks are those of the task's length, whatever the length of a batch."""

    def __init__(self, c):
        super().__init__(c)
        self.length, inner = c.length, max(0, ceil_div(c.length, c.block) - 2)
        i = torch.arange(inner)
        near = (i[:, None] - i).abs() <= 1                                                    # (n-2, n-2)
        drawn = torch.rand(c.heads, inner, inner).masked_fill(near, -1)
        self.register_buffer("random", 1 + drawn.topk(max(0, min(c.random, inner - 3))).indices)      # (h, n-2, r)

    def attend(self, q, k, v, lengths):
        l = q.shape[2]
        lengths, q, k, v = fill_up(self.length, lengths, q, k, v)                             # (b, h, length, e)
        return bigbird_attention(q, k, v, self.block, self.random, self.causal, lengths)[:, :, :l]


class Linformer(Attention):
    """Attends to c.rank learned mixtures of all positions in place of the positions (Wang et al. 2020): O(l rank). All
    heads, keys and values share them."""

    def __init__(self, c):
        super().__init__(c)
        if c.causal:
            raise SizeError("linformer mixes all positions before it attends: no causal form; use --objective masked")
        bound = math.sqrt(6 / (c.length + c.rank))
        self.mix = nn.Parameter(torch.empty(c.length, c.rank).uniform_(-bound, bound))          # (length, r)

    def attend(self, q, k, v, lengths):
        if lengths is not None:                                              # padding adds nothing to a mixture
            real = inside(lengths, k.shape[2])[:, None, :, None]                              # (b, 1, l, 1)
            k, v = k * real, v * real
        k, v = (torch.einsum("bhle,lr->bhre", y, self.mix[: y.shape[2]]) for y in (k, v))       # (b, h, r, e)
        return attention(q, k, v)


class Reformer(Attention):
    """Attends among positions whose queries, which are the keys as well, point the same way (Kitaev et al. 2020):
    c.rounds hashes, chunks of c.chunk. Rotations are drawn once for each layer and head and saved with the weights (the
    authors draw new ones at every step, and a prediction is then not a function of its input)."""

    def __init__(self, c):
        super().__init__(c)
        if c.causal:
            raise SizeError("reformer sorts all positions before it attends: no causal form; use --objective masked")
        self.length, self.chunk = c.length, min(c.chunk, c.length)
        self.qkv = nn.Linear(c.d, 2 * c.d)                                                    # queries and values
        rotations = torch.randn(c.heads, c.d // c.heads, c.rounds, max(1, c.length // (2 * c.chunk)))
        self.register_buffer("rotations", rotations)                                # (h, e, rounds, buckets / 2)

    def attend(self, q, v, lengths):
        l = q.shape[2]
        lengths, q, v = fill_up(self.length, lengths, q.float(), v.float())                   # (b, h, length, e)
        with torch.autocast(q.device.type, enabled=False):
            return lsh_attention(q, v, self.rotations, self.chunk, lengths)[:, :, :l]


class LinearAttention(Attention):
    """Attention whose softmax is replaced by a product of c.phi of queries and keys: O(l) (Katharopoulos et al. 2020;
    with relu_features the "generalised" Performer, which the benchmark ran on all tasks but ListOps)."""

    def __init__(self, c):
        super().__init__(c)
        self.phi = c.phi

    def attend(self, q, k, v, lengths):
        with torch.autocast(q.device.type, enabled=False):                                    # sums over all positions
            q, k, v = q.float(), k.float(), v.float()
            return linear_attention(self.phi(q), self.phi(k), v, self.causal, lengths)


class Performer(Attention):
    """Linear attention whose c.features random features estimate softmax (Choromanski et al. 2021). Their directions,
    orthogonal by groups of e and as long as Gaussian vectors, are drawn once and saved with the weights."""

    def __init__(self, c):
        super().__init__(c)
        e = c.d // c.heads
        if c.causal and e > 64:
            raise SizeError(f"performer: features of heads with {e} dimensions may overflow when causal; at most 64")
        groups = [torch.linalg.qr(torch.randn(e, e)).Q.T for _ in range(ceil_div(c.features, e))]
        W = torch.cat(groups)[: c.features] * torch.randn(c.features, e).norm(dim=-1, keepdim=True)
        self.register_buffer("W", W)                                                          # (m, e)

    def attend(self, q, k, v, lengths):
        with torch.autocast(q.device.type, enabled=False):
            q = favor_features(q.float(), self.W, query=True)                                 # (b, h, l, m)
            k = favor_features(k.float(), self.W, query=False, causal=self.causal, lengths=lengths)
            return linear_attention(q, k, v.float(), self.causal, lengths, eps=1e-6 if self.causal else 0.0)


# ---- Averages that prepare attention, MEGA ---------------------------------------------------------------------------

class EMA(Kernel):
    """Kernels of MEGA's moving averages: c.averages damped exponential ones per channel and direction. At the start all
    fade within some 60 positions; long memory is learned."""

    def __init__(self, c):
        super().__init__()
        self.d, shape = c.d, (c.directions, c.d, c.averages)
        self.delta, self.alpha = (nn.Parameter(torch.randn(shape) * 0.2) for _ in range(2))
        self.beta = nn.Parameter(torch.randn(shape) * 0.02 + (-1.0) ** torch.arange(c.averages))
        self.gamma = nn.Parameter(torch.randn(shape))

    def arguments(self, p):
        return p.delta, p.alpha, p.beta, p.gamma

    def make(self, delta, alpha, beta, gamma, l):
        """(c, d, l), float32. Unlike the official code's, kernels are not cut after 1024 lags."""
        K = ema_kernel(delta, alpha, beta, gamma, l)
        if len(K) == 1:
            return K
        # The backward kernel of `fft_conv` starts at lag 1, MEGA's at lag 0: that value is added to the forward one.
        return torch.stack((K[0] + F.pad(K[1, :, :1], (0, l - 1)), F.pad(K[1, :, 1:], (0, 1))))


class Mega(nn.Module):
    """Moving-average gated attention (Ma et al. 2023): what to add to the block's raw input, (b, l, d) -> (b, l, d).

    Averages over the past (and future) prepare queries, keys and gates; values come from the input itself. One head of
    attention, with a learned bias per distance, in disjoint chunks of c.chunk or over the whole length: averages carry
    context across chunks. c.activation: softmax, or laplace, an error function of each score that is not normalised.
    c.state: the bottom layer also has a bare S4, whose output joins the attention's. That is our reading of SPADE (Zuo
    et al. 2022), whose Long Range Arena code is not public.
    """

    def __init__(self, c):
        super().__init__()
        self.d, self.v, self.z, self.causal, self.chunk = c.d, c.v, c.z, c.causal, c.chunk
        self.laplace = c.activation == "laplace"
        self.kernel = EMA(c)
        self.omega = nn.Parameter(torch.randn(c.d))
        self.values, self.gates = nn.Linear(c.d, c.v), nn.Linear(c.d, 2 * c.d + c.v + c.z)
        self.out = nn.Linear(c.v, c.d)
        self.scale = nn.Parameter(torch.randn(2, c.z) * 0.02)
        self.shift = nn.Parameter(torch.zeros(2, c.z))
        self.bias = nn.Parameter(torch.randn(2 * (c.chunk or c.length) - 1) * 0.02)           # by distance
        self.dropout = nn.Dropout(c.dropout)
        self.ssm = None
        if c.state and c.layer == 0:                                     # SPADE
            self.ssm, self.D = S4(SimpleNamespace(**vars(c) | dict(n_ssm=c.d))), nn.Parameter(torch.randn(c.d))
            self.norm_ssm, self.norm_out = nn.LayerNorm(c.d), nn.LayerNorm(c.d)
            self.join = nn.Linear(2 * c.d, c.d)

    def convolve(self, x, K, lengths, D):
        """x (b, l, d) with kernels K (c, d, l or longer), padding taken as 0, and D x -> (b, l, d)."""
        u = x if lengths is None else x * inside(lengths, x.shape[1])[..., None]
        return fft_conv(u.transpose(1, 2), K, D=D).transpose(1, 2)

    def attend(self, q, k, v, lengths):
        """q, k (b, l, z), v (b, l, v) -> (b, l, v)."""
        b, l = q.shape[:2]
        size = min(self.chunk or l, l)
        n = ceil_div(l, size)
        q, k, v = (F.pad(y, (0, 0, 0, n * size - l)).unflatten(1, (n, size)) for y in (q, k, v))     # (b, n, size, .)
        i = torch.arange(size, device=q.device)
        bias = self.bias[len(self.bias) // 2 + i - i[:, None]]                                # (size, size)
        ends = torch.full((1,), l, device=q.device) if lengths is None else lengths
        real = inside(ends, n * size).unflatten(1, (n, 1, size))                              # (b or 1, n, 1, size)
        seen = real & (i <= i[:, None]) if self.causal else real.expand(-1, -1, size, -1)
        if self.laplace:
            keys = (i + 1.0)[:, None] if self.causal else real.sum(-1, keepdim=True).clamp(min=1)
            scores = (q @ k.transpose(-1, -2)).float() / keys + bias                          # (b, n, size, size)
            weights = 0.5 * (1 + torch.erf((scores - math.sqrt(0.5)) * math.sqrt(2 * math.pi)))
            y = (weights * seen).to(v.dtype) @ v
        else:
            seen = seen | ~seen.any(-1, keepdim=True)                                         # a chunk of padding
            mask = bias.masked_fill(~seen, -math.inf).to(q.dtype)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return y.flatten(1, 2)[:, :l]

    def averages(self, x, lengths, K):
        """What queries, keys and gates are made from, (b, l, d)."""
        return F.silu(self.convolve(x, K, lengths, self.omega))

    def forward(self, x, lengths, raw, K=None):
        K = self.kernel(x.shape[1]) if K is None else K
        gates = self.gates(self.dropout(self.averages(x, lengths, K))).split((self.d, self.z, self.v, self.d), -1)
        update, shared, reset, own = gates[0].sigmoid(), F.silu(gates[1]), F.silu(gates[2]), gates[3]
        q, k = (shared * self.scale[i] + self.shift[i] for i in range(2))                     # (b, l, z)
        y = self.attend(q, k, F.silu(self.values(x)), lengths)                                # (b, l, v)
        y = self.dropout(F.silu(own + self.out(reset * y)))                                   # (b, l, d)
        if self.ssm is not None:
            state = self.convolve(x, self.ssm(x.shape[1]), lengths, self.D)
            y = self.join(torch.cat((self.norm_ssm(state), self.norm_out(y)), -1))
        return update * (y - raw)


class MegaBlock(nn.Module):
    """The mixer's gated change of x, then a feed-forward part, each with a norm before it or after its sum."""

    def __init__(self, c, mixer):
        super().__init__()
        self.pre, self.norm1, self.norm2 = c.place == "pre", NORMS[c.norm](c.d), NORMS[c.norm](c.d)
        self.mixer, self.dropout = mixer, nn.Dropout(c.dropout)
        self.ff = nn.Sequential(nn.Linear(c.d, c.v), nn.SiLU(), nn.Linear(c.v, c.d))
        for linear in (self.ff[0], self.ff[2], mixer.values, mixer.gates, mixer.out):
            nn.init.normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)

    def forward(self, x, lengths=None, *K):
        if self.pre:
            x = x + self.mixer(self.norm1(x, lengths), lengths, x, *K)
            return x + self.dropout(self.ff(self.norm2(x, lengths)))
        x = self.norm1(x + self.mixer(x, lengths, x, *K), lengths)
        return self.norm2(x + self.dropout(self.ff(x)), lengths)


# ---- Structured feed-forward -----------------------------------------------------------------------------------------

def feed_forward(c):
    """Linear, GELU, Linear; of structured matrices with --arch ffn=..., except in the first layer (as the authors)."""
    linear = nn.Linear if c.ffn == "dense" or c.layer == 0 else partial(StructuredLinear, c=c)
    return nn.Sequential(linear(c.d, c.ff), nn.GELU(), linear(c.ff, c.d))


class StructuredLinear(nn.Module):
    """A Linear whose matrix is a product of two cheaper ones, with c.ffn_share of its parameters (Wei et al. 2024).

    c.ffn: the kind, see `structured_linear`. c.ffn_blocks: the number of blocks, which alone sets blockshuffle's share.
    lowrank starts as the best approximation of a matrix drawn as nn.Linear draws it; in the other kinds each block
    starts with singular values 1.

    c.guided > 0: self-guided training. During that share of the run a dense matrix W, the product of the two at the
    start, is trained with them: y = a W x + (1 - a) (second first) x, and `guide` lets a fall from 1 to 0. Only
    training mixes. W is not part of the model: stage 2 starts without it. (The authors mix at a step with probability
    a, which halves the cost.)
    """

    def __init__(self, n, m, c):
        super().__init__()
        self.kind, self.guided, share, blocks = c.ffn, c.guided, c.ffn_share, c.ffn_blocks
        q = min(n, m) // blocks
        if self.kind != "lowrank" and (n % blocks or m % blocks):
            raise SizeError(f"ffn_blocks={blocks} does not divide {n} and {m}")
        if self.kind == "blockshuffle" and q < blocks:                   # else some inputs never reach some outputs
            raise SizeError(f"ffn_blocks={blocks}: blockshuffle of {n} and {m} wants {math.isqrt(min(n, m))} at most")
        if self.kind == "lowrank":
            rank = max(1, min(n, m, round(share * n * m / (n + m))))
            P, S, Qh = torch.linalg.svd(nn.Linear(n, m, bias=False).weight.detach(), full_matrices=False)
            first, second = S[:rank, None].sqrt() * Qh[:rank], P[:, :rank] * S[:rank].sqrt()
        else:
            rank = max(1, round(share * n * m / (m + n / blocks) / blocks)) * blocks
            shapes = dict(blockdense=[(blocks, rank // blocks, n // blocks), (m, rank)],
                          blockshuffle=[(blocks, q, n // blocks), (blocks, m // blocks, q)])[self.kind]
            parts = (torch.linalg.svd(torch.randn(shape), full_matrices=False) for shape in shapes)
            first, second = (P @ Qh for P, _, Qh in parts)
        self.first, self.second = nn.Parameter(first.clone()), nn.Parameter(second.clone())
        self.bias = nn.Parameter(torch.zeros(m))
        self.guide, self.a = nn.Parameter(self.dense()) if c.guided else None, 0.0

    @torch.no_grad()
    def dense(self):
        """The matrix (m, n) that the two factors stand for."""
        n = self.first.shape[-1] * (1 if self.kind == "lowrank" else len(self.first))
        eye = torch.eye(n).to(self.first)
        return structured_linear(eye, self.first, self.second, 0 * self.bias, self.kind).T.clone()

    def forward(self, x):
        y = structured_linear(x, self.first, self.second, self.bias, self.kind)
        if not self.training or self.guide is None:
            return y
        if not self.a:                     # over; DDP wants every parameter to take part
            return y + 0 * self.guide.sum()
        return self.a * F.linear(x, self.guide, self.bias) + (1 - self.a) * y


def guide(model, step, steps):
    """Sets how much of the guides counts at this step of a run: half a cosine from 1 to 0 over c.guided of the run."""
    for module in model.modules():
        if isinstance(module, StructuredLinear) and module.guide is not None:
            progress = step / (module.guided * steps)
            module.a = 0.5 * (1 + math.cos(math.pi * progress)) if progress < 1 else 0.0


# ---- MODELS ----------------------------------------------------------------------------------------------------------

@torch.no_grad()
def init_mega(backbone):
    """The authors' embedding of symbols, N(0, 1/d)."""
    if backbone.reads_symbols:
        backbone.encoder.weight.normal_(0, backbone.d ** -0.5)


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
    "transformer": Model(TransformerBlock, Attention, "rotary", dict(positions=sinusoids)),
    "rotary": Model(TransformerBlock, Attention, None, dict(rotary=1.0)),
    "local": Model(TransformerBlock, Attention, "transformer", dict(positions=sinusoids, block=64)),
    "longformer": Model(TransformerBlock, Longformer, "transformer", dict(positions=sinusoids, window=512)),
    "linformer": Model(TransformerBlock, Linformer, "transformer", dict(positions=sinusoids, rank=16)),
    "reformer": Model(TransformerBlock, Reformer, "transformer", dict(positions=sinusoids, chunk=64, rounds=2)),
    "bigbird": Model(TransformerBlock, BigBird, "transformer", dict(positions=sinusoids, block=64, random=3)),
    "linear": Model(TransformerBlock, LinearAttention, "transformer", dict(positions=sinusoids, phi=elu_features)),
    "performer": Model(TransformerBlock, Performer, "transformer", dict(positions=sinusoids, features=256)),
    "performer_relu": Model(TransformerBlock, LinearAttention, "transformer",
                            dict(positions=sinusoids, phi=relu_features)),
    "mega": Model(MegaBlock, Mega, "rotary", dict(averages=16, init=init_mega)),
    "mega_chunk": Model(MegaBlock, Mega, "mega", dict(averages=16, chunk=128, init=init_mega)),
    "spade": Model(MegaBlock, Mega, "mega", dict(averages=16, chunk=128, init=init_mega, state=64, dt_min=0.001,
                                                 dt_max=0.1, dt_lr="main", ssm_lr=0.001)),
    "s4": Model(SSMBlock, partial(SSM, S4), None, {}),
    "s4_rand": Model(SSMBlock, partial(SSM, S4), "s4", RANDOM),
    "dlr": Model(SSMBlock, partial(SSM, DLR), "s4", {}),
    "dlr_rand": Model(SSMBlock, partial(SSM, DLR), "dlr", RANDOM),
    "dfout": Model(SSMBlock, partial(SSM, DLR), "s4", dict(own_poles=True, dt_min=1e-4, dt_max=0.1)),
    "s4d": Model(SSMBlock, partial(SSM, S4D), "s4", dict(start="lin")),
    "s4d_inv": Model(SSMBlock, partial(SSM, S4D), "s4", dict(start="inv")),
    "s4d_legs": Model(SSMBlock, partial(SSM, S4D), "s4", dict(start="legs")),
    "s5": Model(SSMBlock, S5, "s4", dict(fast_B=0, C_scale=1.0)),
    "lru": Model(SSMBlock, LRU, "s5", dict(r_min=0.0, r_max=1.0, angle=2 * math.pi, C_scale=1.0)),
    "sgconv": Model(SSMBlock, partial(SSM, SGConv), "s4", dict(
        piece=32, decay=2.0, decay_spread=0.0, power=0.0, stretch=0, cosine=0, piece_lr=1e-3)),
    "pythia": Model(TransformerBlock, Attention, None, NEOX),
    "pythia_rand": Model(TransformerBlock, Attention, "pythia", NEOX),
}
FEED_FORWARD = dict(ffn="dense", ffn_share=0.5, ffn_blocks=4, guided=0.0)                 # see StructuredLinear
DEFAULTS = FEED_FORWARD | dict(
    norm="layer", place="pre", rotary=0.0, parallel=False, symbols=False, positions=None, own_poles=False, state=None,
    chunk=None, init=nn.Identity(), init_head=nn.Identity())           # Identity: weights stay as torch draws them
CHOICES = dict(norm=NORMS.keys(), place=("pre", "post"), activation=("softmax", "laplace"), cosine=(0, 1),
               fast_B=(0, 1), ffn=("dense", "lowrank", "blockdense", "blockshuffle"))
MAY_BE_ZERO = ("random", "stretch")


def config(sizes, task, causal=False, mask_channel=False):
    """The object `c` that all classes here take: sizes as `arch` gives them, extras, what `task` says (length, vocab,
    channels) and causal. mask_channel: one more input channel that is 1 where the sample was masked out (masked
    pretraining on samples only)."""
    extras = DEFAULTS | MODELS[sizes["model"]].extras
    reads_symbols = task.channels is None or extras["symbols"]
    return SimpleNamespace(**extras | sizes, length=task.length, vocab=task.vocab if reads_symbols else None,
                           channels=None if reads_symbols else task.channels + mask_channel,
                           mask_channel=mask_channel and not reads_symbols,
                           causal=causal, directions=1 if causal else 2)


# ---- The table -------------------------------------------------------------------------------------------------------

# What its maker says of the GPU that costs are computed for: bytes, bytes a second, and operations a second of matrix
# products, in bfloat16 and in float32.
GPU = dict(name="H100 SXM", memory=80e9, bandwidth=3.35e12, bfloat16=989e12, float32=67e12)


class Cost(TorchDispatchMode):
    """Counts what runs under it, without autograd's views: operations; FLOPs of matrix products, attention and Fourier
    transforms (2 a multiply-add, 2.5 n log2 n a real FFT); bytes read and written, each operation's operands once; and
    the seconds that GPU needs at least, if each operation takes the larger of its arithmetic's and its memory's time.
    """

    def __init__(self):
        super().__init__()
        self.operations, self.flops, self.bytes, self.seconds = 0, 0, 0, 0.0
        aten = torch.ops.aten
        self.formulas = torch.utils.flop_counter.flop_registry | {
            aten._fft_r2c: self.fft, aten._fft_c2r: self.fft,
            aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_, **__: 4 * q.numel() * k.shape[-2],
            aten._scaled_dot_product_flash_attention_for_cpu_backward:
                lambda grad, q, k, *_, **__: 10 * q.numel() * k.shape[-2]}

    @staticmethod
    def fft(x, dim, *_, out_val=None, **__):
        n = max(x.shape[dim[-1]], out_val.shape[dim[-1]])
        return int(x.numel() // x.shape[dim[-1]] * 2.5 * n * math.log2(max(2, n)))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function.namespace == "aten" and not function.is_view:
            tensors = [v for v in tree_leaves((args, kwargs, result)) if isinstance(v, torch.Tensor)]
            formula = self.formulas.get(function.overloadpacket)
            flops = formula(*args, **kwargs or {}, out_val=result) if formula else 0
            # what an expanded tensor repeats is read once
            moved = sum(min(v.nbytes, v.untyped_storage().nbytes()) for v in tensors)
            peak = GPU["bfloat16" if tensors and tensors[0].dtype == torch.bfloat16 else "float32"]
            self.operations, self.flops, self.bytes = self.operations + 1, self.flops + flops, self.bytes + moved
            self.seconds += max(flops / peak, moved / GPU["bandwidth"])
        return result


@contextlib.contextmanager
def without_values():
    """Tensors made here have shapes but no values: they must neither come from a cache nor stay in it."""
    def clear():
        rotary_phases.cache_clear()
        two_levels.cache_clear()

    clear()
    try:
        with FakeTensorMode():
            yield
    finally:
        clear()


def describe(c):
    """Cost of a batch of one sequence of symbols, without input layer and head -> (parameters of the mixers, other
    parameters, bytes that autograd keeps for the backward pass in float32, FLOPs per position of the forward pass).

    The model runs on tensors that have shapes but no values. Not counted is element-wise work (S5's and LRU's scans),
    nor making convolution kernels, which is done once a batch (`python kernels.py` measures that).
    """
    def no_kernels(l):
        return [()] * c.layers                 # so that each layer calls its own, which the loop below replaces

    with without_values():
        backbone = Backbone(c)
        mixers, rest = sum(count(layer.mixer) for layer in backbone.layers), count(backbone) - count(backbone.encoder)
        for layer in backbone.layers:
            for name in {"kernel", "ssm"} & set(dict(layer.mixer.named_children())):
                getattr(layer.mixer, name).forward = partial(torch.empty, c.directions, c.d)          # (c, d, l)
        backbone.kernels = no_kernels
        x, lengths = torch.zeros(1, c.length, dtype=torch.int64), torch.full((1,), c.length)
        kept, cost = run_without_values(backbone, x, lengths)
    return mixers, rest - mixers, kept, cost.flops / c.length


def cost_of_step(c, batch):
    """Cost of a training step, forward, backward and AdamW, of `batch` sequences of symbols of which a quarter is
    hidden, in bfloat16 where autocast takes it -> `Cost`, with the bytes that autograd keeps and those of weights,
    gradients and AdamW's moments."""
    with without_values():
        model = Denoiser(Backbone(c), c.vocab)
        optimizer = torch.optim.AdamW(param_groups(model, 1e-3, 0.0), fused=True)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()                                             # makes the moments, off the count
        optimizer.zero_grad()
        x, lengths = torch.zeros(batch, c.length, dtype=torch.int64), torch.full((batch,), c.length)
        hidden = torch.zeros(ceil_div(batch * c.length, 4), dtype=torch.int64)
        kept, cost = run_without_values(model, x, lengths, hidden, optimizer=optimizer)
    cost.kept, cost.weights = kept, 16 * count(model)
    return cost


def run_without_values(model, *inputs, optimizer=None):
    """A forward pass and, with an optimiser, the rest of a step -> bytes kept for the backward pass, `Cost`."""
    def keep(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    saved = {}
    with Cost() as cost:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with torch.autocast("cpu", torch.bfloat16, enabled=optimizer is not None):
                y = model(*inputs)         # y keeps alive what is counted
        for p in model.parameters():
            saved.pop(p.untyped_storage()._cdata, None)
        if optimizer is not None:
            F.cross_entropy(y.float(), torch.zeros(len(y), dtype=torch.int64)).backward()
            optimizer.step()
    return sum(s.nbytes() for s in saved.values()), cost


def print_models(task, length, batch=None):
    """One line for each model, in the sizes that it has on a task: of a sequence or, with batch, of a training step."""
    outside = SimpleNamespace(length=length, vocab=256, channels=None)
    configs = {model: config(sizes, outside, causal="pythia" in model)
               for model in MODELS if (sizes := arch(task, model)) is not None}
    if batch is None:
        print(f"Sizes as on {task}; a batch of one sequence of {length:,} symbols. Kept: by autograd for the backward "
              "pass, float32.\n")
        print("| model | parameters of mixers | other parameters | MiB kept | MFLOPs per position |")
        print("|---|---|---|---|---|")
        for model, c in configs.items():
            mixers, rest, memory, flops = describe(c)
            print(f"| {model} | {mixers:,} | {rest:,} | {memory / 2**20:,.1f} | {flops / 1e6:,.2f} |")
        return
    print(f"Sizes as on {task}; a training step on {batch} sequences of {length:,} symbols, bfloat16 but for kernels, "
          f"convolutions and norms. Computed, not measured: the least time, if each operation took the larger of its "
          f"arithmetic's and its memory's on one {GPU['name']} ({GPU['bandwidth'] / 1e12:g} TB/s, "
          f"{GPU['bfloat16'] / 1e12:g} TFLOP/s in bfloat16, {GPU['float32'] / 1e12:g} in float32), and the sequences "
          f"whose kept tensors fill {GPU['memory'] / 1e9:g} GB.\n")
    print("| model | operations | TFLOP | GB moved | ms at least | GB kept | sequences at most |")
    print("|---|---|---|---|---|---|---|")
    for model, c in configs.items():
        step, twice = cost_of_step(c, batch), cost_of_step(c, 2 * batch)
        more = (GPU["memory"] - step.weights - step.kept) * batch / (twice.kept - step.kept)         # sequences
        print(f"| {model} | {step.operations:,} | {step.flops / 1e12:.2f} | {step.bytes / 1e9:.1f} "
              f"| {1000 * step.seconds:.1f} | {(step.kept + step.weights) / 1e9:.2f} "
              f"| {int(batch + more):,} |")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)                      # piped into head: ends quietly
    parser = argparse.ArgumentParser(description="What each architecture costs, in its sizes on a task.")
    parser.add_argument("task", nargs="?", default="text", help="default: text")
    parser.add_argument("length", nargs="?", type=int, default=1024, help="of the sequence, default: 1024")
    parser.add_argument("--cost", dest="batch", type=int, nargs="?", const=32, metavar="BATCH",
                        help="of a training step instead, and the least time it takes on a GPU; default batch: 32")
    args = parser.parse_args()
    if args.length < 1 or (args.batch is not None and args.batch < 1):
        parser.error("length and batch must be at least 1")
    print_models(**vars(args))
