"""Models: a table of architectures, thin layers over kernels.py, one backbone with two heads.

    python models.py       every architecture: parameters, length, memory of one sequence, FLOPs per position

    Backbone      symbols or samples (b, l) -> features (b, l, d)
    Denoiser      backbone + a linear head on the positions to be predicted         stage 1, pretrain.py
    Classifier    backbone + pooling over the sequence + a head                     stage 2, finetune.py

The order of the file is that of the paper's argument
    1  Sizes: one row of `ARCH` per task and model.
    2  A linear recurrence is a convolution: `SSM`, the layer around any kernel                      (eq. 1 and 2.4)
    3  With a diagonal recurrence the kernel is a sum of geometric sequences: `DLR`                  (eq. 3)
    4  Diagonal plus rank one, discretised from continuous time: `S4`, which HiPPO initialises       (eq. 2)
    5  Nothing set by hand: `randomise`, and what self-pretraining learns instead            (sections 3.3 and 3.6)
    6  The other way to mix positions: `Attention`                                                   (section 3.2)
    7  Norms, residual layers, `Backbone`;  8  heads;  9  Pythia's weights                            (section 3.5)
   10  Optimiser groups;  11  the table that this file prints

Sizes are b batch, l length, d width, h heads, e width of a head, n stored states (of S4 one in each conjugate pair, of
DLR all), c kernels per channel (2 when bidirectional); matrices are upper-case and explained in kernels.py. "Paper" is
Amos et al. 2024, "Never Train from Scratch". Its table 4 fixes the Transformers' sizes below; S4's are those of Gu et
al. 2022 as the paper's official configurations spell them out, and DLR's are S4's (appendix C.1.3).
"""
import itertools
import json
import math
import os
import types

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from kernels import attention, diagonal_kernel, fft_conv, hippo_nplr, rotary, s4_kernel, truncation_correction, turns

# ---------------------------------------------------------------------------------------------------------------------
# 1  Sizes
# ---------------------------------------------------------------------------------------------------------------------

# One row per (task, model). A dash means "not part of this architecture".
#   transformer  paper table 4, rows marked with a dagger: the sizes of Tay et al. 2020, sinusoidal positions
#   rotary       paper table 4, "Transformer + Rotary"
#   s4           Gu et al. 2022, table 11. n_ssm: how many copies of (A, P, B) there are for the d channels to share
#   dlr          S4's depth and width, more states, LayerNorm (appendix C.1.3). dt_min, dt_max: twice its decay rates
#   pythia       GPT-NeoX as Pythia-70M has it (Biderman et al. 2023)
# s4_rand and dlr_rand have the rows of s4 and dlr and other initial values (see `randomise`), pythia_rand that of
# pythia.
# block: attention is cut into blocks of that many positions.  norm, place: which norm, before (pre) or after (post) the
# residual sum.  dt_lr, ssm_lr: learning rates of the step size and of A, P, B (DLR: of all three parameters of its
# kernel); "main" follows the rest of the model.  dropout: inside S4 and on the residual branch, whole channels of a
# sequence; Transformers have none.  sCIFAR's Transformer is Image's (appendix C.1.6). The official S4 for Speech
# Commands pretrains with LayerNorm and finetunes with BatchNorm, an accident: here it has BatchNorm in both.
ARCH = """
task            model       layers   d heads   ff block state n_ssm norm  place dt_min dt_max  dt_lr ssm_lr dropout
listops         transformer      6 512     8 1024     -     -     - layer pre        -      -      -      -       -
listops         rotary           6 512     8 1024     -     -     - layer pre        -      -      -      -       -
listops         s4               8 128     -    -     -    64   128 batch post   0.001    0.1   main  0.001       -
listops         dlr              8 128     -    -     -  1024     - layer post  0.0001  0.001      - 0.0001       -
listops         pythia           6 512     8 2048     -     -     - layer pre        -      -      -      -       -
text            transformer      6 512     8 1024     -     -     - layer pre        -      -      -      -       -
text            rotary           6 512     8 1024     -     -     - layer pre        -      -      -      -       -
text            s4               6 256     -    -     -    64   256 batch pre    0.001    0.1   main  0.001       -
text            dlr              6 256     -    -     -  1024     - layer pre   0.0001  0.001      - 0.0001       -
text            pythia           6 512     8 2048     -     -     - layer pre        -      -      -      -       -
retrieval       transformer      4 128     4  512     -     -     - layer pre        -      -      -      -       -
retrieval       rotary           6 128     4  512     -     -     - layer pre        -      -      -      -       -
retrieval       s4               6 256     -    -     -    64   256 batch pre    0.001    0.1   main  0.001       -
retrieval       pythia           6 512     8 2048     -     -     - layer pre        -      -      -      -       -
image           transformer      3  64     4  128     -     -     - layer pre        -      -      -      -       -
image           rotary           6 256     4  512     -     -     - layer pre        -      -      -      -       -
image           s4               6 512     -    -     -    64     2 layer post   0.001    0.1   main  0.001     0.1
image           dlr              6 512     -    -     -  1024     - layer pre   0.0001  0.001      - 0.0001       -
image           pythia           6 512     8 2048     -     -     - layer pre        -      -      -      -       -
pathfinder      transformer      4 128     8  128     -     -     - layer pre        -      -      -      -       -
pathfinder      rotary           6 128     4  512     -     -     - layer pre        -      -      -      -       -
pathfinder      s4               6 256     -    -     -    64   256 batch pre    0.001    0.1  0.001  0.001       -
pathfinder      pythia           6 512     8 2048     -     -     - layer pre        -      -      -      -       -
pathx           transformer      4 128     8  128  4096     -     - layer pre        -      -      -      -       -
pathx           rotary           5 128     4  512  4096     -     - layer pre        -      -      -      -       -
pathx           s4               6 256     -    -     -    64   256 batch pre   0.0001    0.1 0.0005 0.0005       -
pathx           dlr              6 256     -    -     -  1024     - layer pre   0.0001  0.001      - 0.0001       -
pathx256        s4               6 256     -    -     -    64   256 batch pre   0.0001    0.1 0.0005 0.0005       -
sc              rotary           4 128     4  128  4000     -     - layer pre        -      -      -      -       -
sc              s4               6 128     -    -     -    64    64 batch pre    0.001    0.1  0.001  0.001       -
scifar          rotary           6 256     4  512     -     -     - layer pre        -      -      -      -       -
scifar          s4               6 512     -    -     -    64     2 layer post   0.001    0.1  0.001  0.001     0.1
bidmc_hr        rotary           4 128     4  128     -     -     - layer pre        -      -      -      -       -
bidmc_hr        s4               6 128     -    -     -   256     2 layer pre    0.001    0.1  0.001  0.001       -
bidmc_rr        rotary           4 128     4  128     -     -     - layer pre        -      -      -      -       -
bidmc_rr        s4               6 128     -    -     -   256     2 layer pre    0.001    0.1  0.001  0.001       -
bidmc_spo2      rotary           4 128     4  128     -     -     - layer pre        -      -      -      -       -
bidmc_spo2      s4               6 128     -    -     -   256     2 layer pre    0.001    0.1  0.001  0.001       -
"""

# Not the paper's: demos, and stand-ins of `run_all.sh --preset mini`, one family of models for all of its tasks.
SMALL_ARCH = """
task                       model              layers  d heads  ff state n_ssm norm  place dt_min dt_max dt_lr ssm_lr
text256|text_demo          rotary                  3 64     2 128     -     - layer pre        -      -     -      -
text256|text_demo          s4                      3 64     -   -    16    64 batch pre    0.001    0.1 0.001  0.001
text_demo                  dlr                     3 64     -   -   128     - layer pre    0.001    0.1     -  0.001
listops_demo               transformer|rotary      3 64     4 128     -     - layer pre        -      -     -      -
listops_demo               s4                      3 64     -   -    16    64 batch pre    0.001    0.1 0.001  0.001
pathfinder_demo            transformer|rotary      3 32     2  64     -     - layer pre        -      -     -      -
pathfinder_demo            s4                      3 32     -   -    16    32 batch pre    0.001    0.1 0.001  0.001
pathfinder_demo            dlr                     3 32     -   -   128     - layer pre    0.001    0.1     -  0.001
listops_mini|text_mini     transformer|rotary      3 32     2  64     -     - layer pre        -      -     -      -
listops_mini|text_mini     pythia                  3 32     2  64     -     - layer pre        -      -     -      -
listops_mini|text_mini     s4                      3 48     -   -    16    48 batch pre    0.001    0.1 0.001  0.001
listops_mini|text_mini     dlr                     3 48     -   -   128     - layer pre    0.001    0.1     -  0.001
pathfinder_mini|pathx_mini transformer|rotary      3 32     2  64     -     - layer pre        -      -     -      -
pathfinder_mini            pythia                  3 32     2  64     -     - layer pre        -      -     -      -
pathfinder_mini|pathx_mini s4                      3 48     -   -    16    48 batch pre    0.001    0.1 0.001  0.001
pathx_mini                 dlr                     3 48     -   -   128     - layer pre    0.001    0.1     -  0.001
pathx256_mini              s4                      3 48     -   -    16    48 batch pre    0.001    0.1 0.001  0.001
image_mini|scifar_mini     transformer|rotary      3 28     2  56     -     - layer pre        -      -     -      -
image_mini                 pythia                  3 32     2  64     -     - layer pre        -      -     -      -
image_mini|scifar_mini     s4                      3 48     -   -    16     2 batch pre    0.001    0.1 0.001  0.001
image_mini|scifar_mini     dlr                     3 48     -   -   128     - layer pre    0.001    0.1     -  0.001
"""

# `--size` (paper, table 9): what to put in place of the row's numbers. The paper prints parameter counts only; 3m is
# the row itself. S4's last step enlarges its state too, as the paper says it had to (appendix E). Image's stand-in has
# sizes of its own.
SIZES = """
task        model   size  layers   d state   ff
image       rotary  100k       6  48     -   72
image       rotary  300k       6  80     -  160
image       rotary  1m         6 144     -  288
image       rotary  3m         6 256     -  512
image       rotary  10m        6 448     -  896
image       s4      100k       6  64    64    -
image       s4      300k       6 128    64    -
image       s4      1m         6 256    64    -
image       s4      3m         6 512    64    -
image       s4      10m        6 832   128    -
image_mini  rotary  2k         3   8     -   16
image_mini  rotary  4k         3  12     -   24
image_mini  rotary  10k        3  20     -   40
image_mini  rotary  20k        3  28     -   56
image_mini  rotary  80k        3  56     -  112
image_mini  s4      2k         3  10    16    -
image_mini  s4      4k         3  16    16    -
image_mini  s4      10k        3  30    16    -
image_mini  s4      20k        3  48    16    -
image_mini  s4      80k        3 104    16    -
"""


def read_table(text):
    """A whitespace table as a list of {column: string} in row order. Cells that are a dash are left out, and a line
    with a|b in a cell stands for a row with a and one with b."""
    head, *lines = [line.split() for line in text.strip().splitlines()]
    for line in lines:
        assert len(line) == len(head), f"table row has {len(line)} cells, the head {len(head)}: {' '.join(line)}"
    return [{key: cell for key, cell in zip(head, row) if cell != "-"}
            for line in lines for row in itertools.product(*(cell.split("|") for cell in line))]


def arch(task, model, size=None):
    """The row of `ARCH` or `SMALL_ARCH` as a plain dict, numbers converted, or None. It is saved in config.json and in
    checkpoints."""
    def value(cell):
        try:
            return int(cell) if cell.isdigit() else float(cell)
        except ValueError:
            return cell

    def find(table, **key):
        row = next((row for row in read_table(table) if key.items() <= row.items()), None)
        return row and {name: value(cell) for name, cell in row.items() if name != "size"}

    row = find(ARCH, task=task, model=model.removesuffix("_rand"))
    row = row or find(SMALL_ARCH, task=task, model=model.removesuffix("_rand"))
    if row is not None and size is not None:
        other = find(SIZES, task=task, model=model, size=size)
        row = other and row | other
    return row and row | {"model": model}


# ---------------------------------------------------------------------------------------------------------------------
# 2  A linear recurrence is a convolution
# ---------------------------------------------------------------------------------------------------------------------


class SSM(nn.Module):
    """A linear recurrence per channel, then GELU and GLU: (b, l, d) -> (b, l, d).

    Paper, eq. 1: x[k] = Abar x[k-1] + Bbar u[k], y[k] = C x[k] for every channel by itself. Unrolled, y = K * u with
    K[k] = C Abar^k Bbar (eq. 2.4), and that is all that is computed here: a convolution with the kernels that `kernel`
    makes, plus the skip connection D u. (`ssm_scan` in kernels.py is the recurrence, step by step.) Which recurrence it
    is, is the business of `DLR` and `S4` below. Bidirectional layers have a second kernel for the reversed direction.
    Channels meet in the GLU only.
    """

    def __init__(self, kernel, d, dropout=0.0):
        super().__init__()
        self.kernel = kernel
        self.D = nn.Parameter(torch.randn(d))
        self.dropout = nn.Dropout1d(dropout)                         # one mask along the length, of (b, d, l)
        self.out = nn.Linear(d, 2 * d)

    def forward(self, x, lengths=None):
        u = x.transpose(1, 2)                                                                 # (b, d, l)
        if lengths is not None:       # a convolution does not know padding; zeros do not move its state
            u = u * inside(lengths, x.shape[1])[:, None]
        K = self.kernel(x.shape[1])                                                           # (c, d, l) or longer
        y = fft_conv(u, K[0], K[1] if len(K) == 2 else None) + self.D[:, None] * u            # (b, d, l)
        return F.glu(self.out(self.dropout(F.gelu(y)).transpose(1, 2)), dim=-1)               # (b, l, d)


# ---------------------------------------------------------------------------------------------------------------------
# 3  Diagonal: DLR
# ---------------------------------------------------------------------------------------------------------------------


class DLR(nn.Module):
    """Kernels of the diagonal linear RNN (paper, eq. 3; Gupta et al. 2022): K[k] = Re sum_n W_n e^(Lambda_n k).

    Abar = diag(e^Lambda) and Bbar = 1, so K[k] = C Abar^k 1 with C = W: a sum of damped waves. All channels and
    directions of a layer share the poles e^Lambda, and each mixes them with its own W. Nothing is sampled from
    continuous time, and there are no conjugate pairs. Re Lambda = -theta^2 <= 0: whatever is learned, the recurrence
    never grows.

    At the start: decay rates log-uniform in [dt_min / 2, dt_max / 2], one full turn of frequencies 2 pi n / N, and W
    complex normal over N.

    `special`: as in `S4`.
    """

    def __init__(self, d, state, dt_min, dt_max, causal, ssm_lr):
        super().__init__()
        decay = dt_min / 2 * (dt_max / dt_min) ** torch.rand(state)
        self.theta = nn.Parameter(decay.sqrt())                                               # (n,)
        self.Lambda_im = nn.Parameter(torch.arange(state) * (2 * math.pi / state))            # (n,)
        # Complex parameters are stored as real pairs, so that Adam keeps moments per component.
        self.W = nn.Parameter(torch.randn(1 if causal else 2, d, state, 2) / state)           # (c, d, n, 2)
        self.special = dict(theta=ssm_lr, Lambda_im=ssm_lr, W=ssm_lr)

    @torch.compiler.disable                                          # complex arithmetic: the compiler gains nothing
    def forward(self, l):
        """(c, d, l), float32."""
        Lambda = torch.complex(-self.theta.float().square(), self.Lambda_im.float())          # (n,)
        return diagonal_kernel(torch.view_as_complex(self.W.float()), Lambda, l)


# ---------------------------------------------------------------------------------------------------------------------
# 4  Diagonal plus low rank: S4
# ---------------------------------------------------------------------------------------------------------------------


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

    `special` names the parameters with a learning rate of their own and no weight decay: A, P, B and log dt set time
    scales, where a step that is small for a weight makes a kernel many times longer or shorter. None: the main rate.
    """

    def __init__(self, d, state, n_ssm, dt_min, dt_max, length, causal, dt_lr, ssm_lr):
        super().__init__()
        self.d, self.length = d, length
        A, P, B = (v.repeat(n_ssm, 1) for v in hippo_nplr(state))                             # (n_ssm, n)
        log_dt = torch.rand(d) * math.log(dt_max / dt_min) + math.log(dt_min)                 # log-uniform
        # Complex standard normal, one output map per direction.
        C = torch.randn(1 if causal else 2, d, state // 2, dtype=torch.complex64)             # (c, d, n)
        repeats = d // n_ssm
        C = truncation_correction(A.repeat(repeats, 1), P.repeat(repeats, 1), C, log_dt.exp(), length)
        self.log_dt = nn.Parameter(log_dt)
        self.A_log_re = nn.Parameter((-A.real).log().float())       # Re A = -exp(.) < 0: the recurrence stays stable
        self.A_im = nn.Parameter(A.imag.float())
        self.P = nn.Parameter(torch.view_as_real(P).float().clone())
        self.B = nn.Parameter(torch.view_as_real(B).float().clone())
        self.C = nn.Parameter(torch.view_as_real(C.to(torch.complex64)).clone())
        self.special = dict(A_log_re=ssm_lr, A_im=ssm_lr, P=ssm_lr, B=ssm_lr, log_dt=dt_lr)

    @torch.compiler.disable
    def forward(self, l):
        """(c, d, length), float32, whatever l is."""
        A = torch.complex(-self.A_log_re.float().exp().clamp(min=1e-4), self.A_im.float())    # (n_ssm, n)
        P, B, C = (torch.view_as_complex(v.float()) for v in (self.P, self.B, self.C))
        A, P, B = (v.repeat(self.d // v.shape[0], 1) for v in (A, P, B))                      # (d, n) channels in turn
        return s4_kernel(A, P, B, C, self.log_dt.float().exp(), self.length)


# ---------------------------------------------------------------------------------------------------------------------
# 5  Nothing set by hand
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def randomise(module):
    """The paper's random initialisation: every parameter is drawn from N(0, 0.1^2), norm gains and biases included
    (appendix C.1.3 and the official code; section 3.3 speaks of the state space parameters only).

    What that does to S4: dt = e^(log dt) is about 1 where HiPPO's channels have a hundredth and less, Re A = -e^(.)
    about -1 and Im A about 0, so the bilinear map puts the poles around (1 - 1/2) / (1 + 1/2) = 1/3, and a kernel is
    its first few values. To DLR: decay rates theta^2 scatter around 0.01, and of many states some are next to 0, so
    memory there is; but all frequencies are a few tenths of a radian at most, where DLR's own start has them all around
    the circle. Its kernels are large, slow swells that cannot tell a position from its neighbour. The tests state
    numbers.

    What self-pretraining learns instead (section 3.6, figure 4): kernels whose decay the data decide. It differs from
    task to task and from layer to layer; on Text they come out more local than HiPPO's, and on PathX they peak at
    multiples of the image's width, where the neighbours above and below are.
    """
    for parameter in module.parameters():
        parameter.normal_(0, 0.1)


# ---------------------------------------------------------------------------------------------------------------------
# 6  Attention
# ---------------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head self-attention, (b, l, d) -> (b, l, d). rotary_dims: how many of a head's e dimensions
    rotary positions turn, the first ones; 0: none.

    One Linear makes queries, keys and values. torch's default initialisation depends only on the input width, so this
    is the same as three independent projections. (The official code copies one projection into q, k, v and o, which
    makes every position attend to itself at the start; see README, "Where we differ".)
    """

    def __init__(self, d, heads, rotary_dims, causal, block=None):
        super().__init__()
        self.heads, self.rotary_dims, self.causal, self.block = heads, rotary_dims, causal, block
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)

    def forward(self, x, lengths=None):
        b, l, d = x.shape
        q, k, v = (y.view(b, l, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(d, -1))   # (b, h, l, e)
        if r := self.rotary_dims:
            q, k = (rotary(y) if r == y.shape[-1] else torch.cat((rotary(y[..., :r]), y[..., r:]), -1) for y in (q, k))
        y = attention(q, k, v, causal=self.causal, block=self.block, lengths=lengths)
        return self.out(y.transpose(1, 2).reshape(b, l, d))                                   # (b, l, d)


def sinusoids(l, d):
    """Fixed sinusoidal positions (l, d): sin and cos interleaved, base 10000 (Vaswani et al. 2017)."""
    angle = torch.arange(l, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1).float()


# ---------------------------------------------------------------------------------------------------------------------
# 7  Norms, residual layers, backbone
# ---------------------------------------------------------------------------------------------------------------------


def inside(lengths, l):
    """True lengths (...,) -> (..., l) bool, True at real positions."""
    return torch.arange(l, device=lengths.device) < lengths[..., None]


class SumOverProcesses(torch.autograd.Function):
    """All-reduce that gradients pass through: what every process receives depends on what each of them gave."""

    @staticmethod
    def forward(context, value):
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(context, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


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
            value = value.sum((0, 1))
            return SumOverProcesses.apply(value) if many else value

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


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then + ff(norm(x)) of that sum, or of x itself when `parallel` (GPT-NeoX). No dropout
    (official configurations)."""

    def __init__(self, d, heads, ff, rotary_dims, causal, block=None, parallel=False):
        super().__init__()
        self.norm1, self.norm2, self.parallel = LayerNorm(d), LayerNorm(d), parallel
        self.mixer = Attention(d, heads, rotary_dims, causal, block)
        self.ff = nn.Sequential(nn.Linear(d, ff), nn.GELU(), nn.Linear(ff, d))

    def forward(self, x, lengths=None):
        y = x + self.mixer(self.norm1(x), lengths)
        return y + self.ff(self.norm2(x if self.parallel else y))


class SSMLayer(nn.Module):
    """x + ssm(norm(x)), or norm(x + ssm(x)) where the norm comes after. The GLU inside takes the place of the FF."""

    def __init__(self, d, norm, place, mixer, dropout=0.0):
        super().__init__()
        self.pre, self.norm, self.mixer = place == "pre", NORMS[norm](d), mixer
        self.dropout = nn.Dropout1d(dropout)

    def forward(self, x, lengths=None):
        y = self.mixer(self.norm(x, lengths) if self.pre else x, lengths)                     # (b, l, d)
        x = x + self.dropout(y.transpose(1, 2)).transpose(1, 2)                               # one mask for the length
        return x if self.pre else self.norm(x, lengths)


ROTARY_SHARE = {"transformer": 0, "rotary": 1, "pythia": 1 / 4}      # of a head's dimensions


class Backbone(nn.Module):
    """(b, l) symbols or (b, l, channels) samples -> (b, l, d). All that self-pretraining hands on to finetuning.
    Several documents an example, (b, k, l) symbols with lengths (b, k) -> (b, k, l, d), are b * k sequences to it.

    sizes: a row of `ARCH`. vocab: number of symbols, or None for continuous input. mask_channel: one more input
    channel that is 1 where the sample was masked out (masked pretraining of continuous input only).
    """

    def __init__(self, sizes, length, vocab=None, channels=1, mask_channel=False, causal=False):
        super().__init__()
        s = types.SimpleNamespace(**sizes)
        d, family = s.d, s.model.removesuffix("_rand")
        self.encoder = nn.Embedding(vocab, d) if vocab else nn.Linear(channels + mask_channel, d)
        # The Transformer of table 1 knows positions from the input only; all others carry them in the mixer.
        positions = sinusoids(length, d) if family == "transformer" else None
        self.register_buffer("positions", positions, persistent=False)

        def layer():
            if family in ROTARY_SHARE:
                rotary_dims = int(ROTARY_SHARE[family] * d // s.heads)
                return TransformerLayer(d, s.heads, s.ff, rotary_dims, causal, getattr(s, "block", None),
                                        parallel=family == "pythia")
            if family == "dlr":
                kernel = DLR(d, s.state, s.dt_min, s.dt_max, causal, s.ssm_lr)
            else:
                kernel = S4(d, s.state, s.n_ssm, s.dt_min, s.dt_max, length, causal,
                            None if s.dt_lr == "main" else s.dt_lr, s.ssm_lr)
            drop = getattr(s, "dropout", 0.0)
            return SSMLayer(d, s.norm, s.place, SSM(kernel, d, drop), drop)

        self.layers = nn.ModuleList(layer() for _ in range(s.layers))
        # A residual stream that is normalised only on its way into each layer leaves the last sum unnormalised.
        self.norm = NORMS[s.norm](d) if s.place == "pre" else None
        self.random = s.model in ("s4_rand", "dlr_rand")
        if self.random:
            randomise(self)
        elif family == "pythia":
            init_neox(self)

    def forward(self, x, lengths=None):
        leading = x.shape[:1] if lengths is None else lengths.shape
        if len(leading) > 1:
            x, lengths = x.flatten(0, 1), lengths.flatten()                                   # (b * k, l)
        # The input and the sum that all layers add to stay float32 under autocast, for every model alike: bfloat16
        # would keep 8 bits of a sample.
        with torch.autocast(x.device.type, enabled=False):
            x = self.encoder(x)                                                               # (b, l, d)
        if self.positions is not None:
            x = x + self.positions[: x.shape[1]]
        for layer in self.layers:
            x = layer(x, lengths)
        x = x if self.norm is None else self.norm(x, lengths)
        return x if len(leading) == 1 else x.unflatten(0, leading)                            # (b, l, d), (b, k, l, d)


# ---------------------------------------------------------------------------------------------------------------------
# 8  Heads
# ---------------------------------------------------------------------------------------------------------------------


class Denoiser(nn.Module):
    """Stage 1: predicts the symbol or sample at chosen positions. `outputs` is the vocabulary (or gray levels) under
    cross-entropy, the number of channels under L1."""

    def __init__(self, backbone, outputs):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(_width(backbone), outputs)
        if backbone.random:
            randomise(self.head)

    def forward(self, x, lengths, where):
        """x as in Backbone, where (b, l) or (b, k, l) bool -> (m, outputs), one row per True: no logits where no loss
        is taken."""
        return self.head(self.backbone(x, lengths)[where])


class Classifier(nn.Module):
    """Stage 2: one label per example; classes or, for regression, one output.

    pool: mean, max or last, over a sequence's true length.
    head: linear; mlp, with one hidden layer; pair, on both documents of an example, with their difference and product.
    """

    def __init__(self, backbone, outputs, pool, head="linear"):
        super().__init__()
        self.backbone, self.pool, self.pair = backbone, pool, head == "pair"
        d = _width(backbone)
        self.head = {"linear": lambda: nn.Linear(d, outputs),
                     "mlp": lambda: nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, outputs)),
                     "pair": lambda: nn.Sequential(nn.Linear(4 * d, d), nn.GELU(), nn.Linear(d, outputs))}[head]()
        if backbone.random:
            randomise(self.head)

    def forward(self, x, lengths=None):
        """x as in Backbone -> (b, outputs). With the head `pair`: x (b, 2, l), lengths (b, 2)."""
        x = self.backbone(x, lengths)                                                         # (b, l, d), (b, 2, l, d)
        if lengths is None:
            lengths = torch.full(x.shape[:-2], x.shape[-2], device=x.device)
        real = inside(lengths, x.shape[-2])[..., None]                                        # (b, l, 1), (b, 2, l, 1)
        if self.pool == "mean":
            x = (x * real).sum(-2) / lengths[..., None]
        elif self.pool == "max":
            x = x.masked_fill(~real, -math.inf).amax(-2)
        else:
            x = x.take_along_dim(lengths[..., None, None] - 1, -2).squeeze(-2)
        if self.pair:
            one, two = x.unbind(1)                                                            # (b, d) both
            x = torch.cat((one, two, one - two, one * two), -1)                               # (b, 4 d)
        with torch.autocast(x.device.type, enabled=False):             # one vector an example, and R2 close to 1
            return self.head(x.float())                                                       # (b, outputs)


def _width(backbone):
    return backbone.encoder.weight.shape[1 if isinstance(backbone.encoder, nn.Embedding) else 0]


# ---------------------------------------------------------------------------------------------------------------------
# 9  Pythia
# ---------------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def init_neox(backbone):
    """N(0, 0.02^2) and zero biases: how the library that the official code uses starts a GPT-NeoX (the paper's "Pythia
    70M (Rand Init)")."""
    for module in backbone.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.normal_(0, 0.02)
        if isinstance(module, nn.Linear):
            module.bias.zero_()


def read_safetensors(path):
    """A .safetensors file -> {name: tensor}. Nothing in it is executed or unpickled.

    The format: 8 bytes, little-endian, the length n of a header; n bytes of JSON, {name: {dtype, shape, data_offsets}};
    then the arrays, row-major, at their offsets from there. ValueError, LookupError, TypeError or AttributeError for
    anything else.
    """
    dtypes = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
              "I64": torch.int64, "U8": torch.uint8, "BOOL": torch.bool}
    total = os.path.getsize(path)
    with open(path, "rb") as file:
        n = int.from_bytes(file.read(8), "little")
        if not 2 <= n <= total - 8:
            raise ValueError("it has no header")
        header = json.loads(file.read(n))
    data = torch.from_file(str(path), shared=False, size=total, dtype=torch.uint8)[8 + n:]
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape, (start, stop) = dtypes[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if not 0 <= start <= stop <= len(data) or stop - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} does not lie inside it")
        tensors[name] = data[start:stop].clone().view(dtype).view(shape)                      # offsets may be odd
    return tensors


def neox_weights(tensors, sizes, tokens):
    """The tensors of a GPT-NeoX checkpoint -> state dict of the `Backbone` with these sizes. tokens (vocab,): which of
    the checkpoint's tokens stands for each symbol of the task; the embeddings of all others could never be used and are
    left out. KeyError or RuntimeError where names or shapes do not fit.

    Two conventions differ. There, the rows of query_key_value are (h, 3, e), head by head; here all queries come first,
    then keys, then values. There, rotary positions pair dimension m with m + e/8, half a rotated part away; `rotary`
    pairs neighbours. Reordering the rows of queries and keys alike leaves their products as they were.
    """
    heads, e = sizes["heads"], sizes["d"] // sizes["heads"]
    r = int(ROTARY_SHARE["pythia"] * e)
    neighbours = torch.arange(r).view(2, -1).T.flatten().tolist() + list(range(r, e))

    def fused(name):
        rows = tensors[name].float().unflatten(0, (heads, 3, e)).transpose(0, 1)              # (3, h, e, ...)
        return torch.cat((rows[:2, :, neighbours], rows[2:])).flatten(0, 2)                   # (3 d, ...)

    weights = {"encoder.weight": tensors["gpt_neox.embed_in.weight"].float()[tokens]}
    for part in ("weight", "bias"):
        weights[f"norm.{part}"] = tensors[f"gpt_neox.final_layer_norm.{part}"].float()
        for i in range(sizes["layers"]):
            theirs, ours = f"gpt_neox.layers.{i}", f"layers.{i}"
            weights[f"{ours}.mixer.qkv.{part}"] = fused(f"{theirs}.attention.query_key_value.{part}")
            for name, same in (("norm1", "input_layernorm"), ("norm2", "post_attention_layernorm"),
                               ("mixer.out", "attention.dense"), ("ff.0", "mlp.dense_h_to_4h"),
                               ("ff.2", "mlp.dense_4h_to_h")):
                weights[f"{ours}.{name}.{part}"] = tensors[f"{theirs}.{same}.{part}"].float()
    return weights


# ---------------------------------------------------------------------------------------------------------------------
# 10  Optimiser groups
# ---------------------------------------------------------------------------------------------------------------------


def param_groups(model, lr, weight_decay):
    """Groups for AdamW. SSM parameters keep their own learning rate and are not decayed; everything else, biases and
    norm gains included, takes the recipe's (as in the official code). A schedule must scale each `initial_lr`."""
    rates = {id(getattr(layer, name)): rate or lr
             for layer in model.modules() if isinstance(layer, (DLR, S4)) for name, rate in layer.special.items()}
    groups = {}
    for parameter in model.parameters():
        special = id(parameter) in rates
        rate = rates.get(id(parameter), lr)
        group = groups.setdefault((special, rate), dict(params=[], lr=rate, initial_lr=rate,
                                                        weight_decay=0.0 if special else weight_decay,
                                                        name="ssm" if special else "main"))
        group["params"].append(parameter)
    return list(groups.values())


def count(model):
    """Number of trainable parameters."""
    return sum(p.numel() for p in model.parameters())


# ---------------------------------------------------------------------------------------------------------------------
# 11  The table
# ---------------------------------------------------------------------------------------------------------------------


class GivenKernel(nn.Module):
    """Stands in for a kernel where only the cost of using it is of interest."""

    def __init__(self, c, d):
        super().__init__()
        self.c, self.d = c, d

    def forward(self, l):
        return torch.empty(self.c, self.d, l)


def describe(sizes, length, vocab, channels, causal=False):
    """What one more sequence costs: (mixer parameters, other parameters, bytes that autograd keeps for the backward
    pass in float32, FLOPs per position of the forward pass). Without heads.

    The model runs on tensors that have shapes but no values, once on one sequence and once on two, so the numbers
    follow whatever you change above. The difference leaves out what is done once a batch: making the kernels of state
    space models (`python kernels.py` measures that) and transforming them. Matrix products, attention and Fourier
    transforms are counted, two FLOPs a multiply-add and 2.5 n log2 n a real FFT; element-wise work is not. Causal
    attention counts like the full one.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    def fft(x, dim, *rest, out_shape=None, **more):
        n = max(x[dim[-1]], out_shape[dim[-1]])
        rows = math.prod(x) // x[dim[-1]]
        return int(rows * 2.5 * n * math.log2(max(2, n)))

    def attend(q, k, v, *rest, out_shape=None, **more):
        return 4 * math.prod(q) * k[-2]

    def cost(backbone, b):
        """Bytes kept and FLOPs of a forward pass on b sequences."""
        saved, aten = {}, torch.ops.aten

        def keep(tensor):
            storage = tensor.untyped_storage()
            saved[storage._cdata] = storage
            return tensor

        x = torch.zeros(b, length, dtype=torch.int64) if vocab else torch.zeros(b, length, channels)
        lengths = torch.full((b,), length) if vocab else None          # symbols come with lengths, which norms save
        counter = FlopCounterMode(display=False, custom_mapping={
            aten._fft_r2c: fft, aten._fft_c2r: fft, aten._scaled_dot_product_flash_attention_for_cpu: attend})
        with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = backbone(x, lengths)                                   # y keeps alive what is counted
        return sum(storage.nbytes() for storage in saved.values()), counter.get_total_flops()

    turns.cache_clear()                # tensors without values must neither come from this cache nor stay in it
    try:
        with FakeTensorMode():
            backbone = Backbone(sizes, length, vocab, channels, causal=causal)
            mixers = sum(count(m) for m in backbone.modules() if isinstance(m, (Attention, DLR, S4)))
            mixers += sum(m.D.numel() for m in backbone.modules() if isinstance(m, SSM))
            total = count(backbone)
            for module in backbone.modules():
                if isinstance(module, SSM):
                    module.kernel = GivenKernel(1 if causal else 2, sizes["d"])
            (memory, flops), (both_memory, both_flops) = cost(backbone, 1), cost(backbone, 2)
    finally:
        turns.cache_clear()
    return mixers, total - mixers, both_memory - memory, (both_flops - flops) / length


def print_models():
    """One line per row of the tables above. A sequence is one document; an example of Retrieval has two."""
    from data import TASKS                                             # for the lengths only
    found = dict(text=135, text256=135, text_demo=135, text_mini=135, retrieval=99)    # symbols: only the data tell
    print("| task | model | parameters: mixer | rest | length | MiB kept per sequence, float32 | MFLOPs per position |")
    print("|---|---|---|---|---|---|---|")
    rows = [(row["task"], row["model"], None) for row in read_table(ARCH) + read_table(SMALL_ARCH)]
    rows += [(row["task"], row["model"], row["size"]) for row in read_table(SIZES)]
    for task, model, size in rows:
        row = TASKS[task]
        symbols = row.kind == "tokens" or model == "pythia"
        mixer, rest, memory, flops = describe(arch(task, model, size), row.length,
                                              (found.get(task) or row.vocab) if symbols else None, row.channels,
                                              causal=model == "pythia")
        print(f"| {task} | {model}{f' --size {size}' if size else ''} | {mixer:,} | {rest:,} | {row.length:,} "
              f"| {memory / 2**20:,.0f} | {flops / 1e6:,.2f} |", flush=True)


if __name__ == "__main__":
    import argparse
    import signal

    signal.signal(signal.SIGPIPE, signal.SIG_DFL)                      # ends quietly when piped into head
    argparse.ArgumentParser(description="What every architecture of the paper costs.").parse_args()
    print_models()
