"""Models: S4, DLR and Transformers as the paper compares them; one backbone with two heads.

    Backbone      symbols (b, l) or samples (b, l, channels) -> features (b, l, d)
    Denoiser      backbone + a linear head on the positions to be predicted     stage 1, pretrain.py
    Classifier    backbone + pooling over the sequence + a head                 stage 2, finetune.py

The sections follow the paper's argument. The file ends with what a first reading may skip; there
`MODELS` has a line for each --model. Sizes are in recipes.py, other architectures in zoo/; a new
one is a file there, and `python -m zoo` lists them all. A mixer maps (b, l, d) to (b, l, d),
ignores positions at or past `lengths`, and sees no later position if c.causal.

Every class is built from one object `c`, made by `config`: sizes, the extras of the model's line,
the task's length, vocab and channels, `causal`, and the layer's number. Sizes: b batch, l length, d
width, h heads, e width of a head, n stored states, and dir directions, 2 if bidirectional, else 1.
Upper-case matrices are explained in kernels.py. "Paper" is Amos et al. 2024."""

import contextlib
import math
from collections import namedtuple
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from gradients import is_distributed
from kernels import (
    attention,
    diagonal_kernel,
    fft_conv,
    hippo_nplr,
    inside,
    masked_norm,
    rotary,
    rotary_turns,
    s4_kernel,
    true_lengths,
    truncation_correction,
)

# `keys` of a class: sizes that it reads from `c` and that --arch can set (`keys_of` explains Key).
Key = namedtuple(
    "Key", "kind default least most shown inherited", defaults=(..., None, 10**9, True, True)
)


class SizeError(ValueError):
    """Sizes do not fit each other or the task."""


# ---- A linear recurrence is a convolution --------------------------------------------------------


class SSM(nn.Module):
    """A linear recurrence per channel, then GELU and GLU: (b, l, d) -> (b, l, d).

    Paper, eq. 1: x[k] = Abar x[k-1] + Bbar u[k], y[k] = C x[k], for every channel by itself.
    Unrolled, y = K * u with K[k] = C Abar^k Bbar (eq. 2.4). The layer computes just this
    convolution, plus the skip connection D u. `DLR` and `S4` below choose the recurrence.
    Bidirectional layers have a second kernel for the reversed direction. Channels mix only in the
    GLU.

    kernel(c) builds a module that returns kernels (dir, d, l), or longer ones, when called with l.
    Its `rates` name parameters with their own learning rate and weight decay: {name: (rate or None,
    decayed or not)}; None is the main rate. Reserve the attribute's name `kernel` for such modules:
    Figure 4 looks for it."""

    keys = dict(dropout=Key(float, 0.0, most=1))

    def __init__(self, kernel, c):
        super().__init__()
        self.kernel = kernel(c)
        self.D = nn.Parameter(torch.randn(c.d))
        self.dropout = nn.Dropout1d(c.dropout)  # one mask along the length, of (b, d, l)
        self.out = nn.Linear(c.d, 2 * c.d)

    def forward(self, x, lengths=None, K=None):
        """K (dir, d, l) or longer: the kernels, if `Backbone` has already made them."""
        u = x.transpose(1, 2)  # (b, d, l)
        if lengths is not None:  # a convolution does not know padding, but zeros add nothing
            u = u * inside(lengths, x.shape[1])[:, None]
        K = self.kernel(x.shape[1]) if K is None else K
        y = fft_conv(u, K, self.D)  # (b, d, l)
        y = self.dropout(F.gelu(y))
        return linear_glu(self.out, y).transpose(1, 2)  # (b, l, d)


def log_uniform(c, n):
    """Draw the logarithms of n step sizes, uniform between those of c.dt_min and c.dt_max."""
    return torch.rand(n) * math.log(c.dt_max / c.dt_min) + math.log(c.dt_min)


class Kernel(nn.Module):
    """Base class: make convolution kernels (dir, d, l), float32, of length l from parameters.

    A subclass sets self.d and has two methods: `arguments(p)` turns parameters p.A, p.P, ... into
    arguments (..., d, n) or (d,), and `make(*arguments, l)` turns those into kernels. Two, because
    kernels do not depend on the input: one batched call makes those of all layers (`make_kernels`),
    where p holds the parameters of all, stacked."""

    def forward(self, l):
        return self.make(*self.arguments(self), l)


# ---- Diagonal: DLR -------------------------------------------------------------------------------


class Diagonal(Kernel):
    """Base class: arguments W (dir, d, n), Lambda (1 or d, n), complex."""

    make = staticmethod(diagonal_kernel)


class DLR(Diagonal):
    """Kernels of the diagonal linear RNN (eq. 3; Gupta et al. 2022): K[k] = Re sum_n W_n p_n^k.

    Abar = diag(p), p = e^Lambda, and Bbar = 1, so K[k] = C Abar^k 1 with C = W: a sum of damped
    waves. All channels and directions of a layer share the poles p, and each has its own W. There
    is no continuous time (dt_min, dt_max are S4's names) and no conjugate pairing. Re Lambda =
    -theta^2 <= 0, so the recurrence never grows.

    Initial values: decay rates log-uniform in [dt_min / 2, dt_max / 2], frequencies 2 pi n / N over
    one full turn, W complex normal divided by N. All three parameters have a small learning rate of
    their own and no weight decay."""

    keys = dict(state=Key(int), dt_min=Key(float), dt_max=Key(float), ssm_lr=Key(float))

    def __init__(self, c):
        super().__init__()
        decay = c.dt_min / 2 * (c.dt_max / c.dt_min) ** torch.rand(c.state)
        self.d = c.d
        self.theta = nn.Parameter(decay.sqrt())  # (n,)
        self.Lambda_im = nn.Parameter(torch.arange(c.state) * (2 * math.pi / c.state))  # (n,)
        # Complex parameters are stored as real pairs, so that Adam keeps moments per component.
        W = torch.randn(c.directions, c.d, c.state, 2) / c.state  # (dir, d, n, 2)
        self.W = nn.Parameter(W)
        self.rates = dict.fromkeys(("theta", "Lambda_im", "W"), (c.ssm_lr, False))

    def arguments(self, p):
        Lambda = torch.complex(-p.theta.float().square(), p.Lambda_im.float())  # (n,)
        return torch.view_as_complex(p.W.float()), Lambda[..., None, :]  # (dir, d, n), (1, n)


# ---- Diagonal plus low rank: S4 ------------------------------------------------------------------


class S4(Kernel):
    """Kernels of S4 (paper, eq. 2; Gu et al. 2022).

    The state matrix is A_full = diag(A) - P P* (eq. 2.1), because HiPPO's matrix is normal only up
    to such a rank-one term. Diagonalising the whole matrix would be numerically hopeless.

    x' = A_full x + B u is sampled with step size dt by the bilinear rule (eq. 2.2 and 2.3,
    `discretize` in kernels.py), which keeps a stable matrix stable. Each channel has its own dt,
    which stretches the kernel in time.

    HiPPO chooses A, P, B so that the state holds the past as Legendre coefficients (`hippo_legs` in
    kernels.py): kernels decay over about 1 / dt steps. The paper asks what this prior is worth.

    Channel i uses copy i mod `n_ssm` of A, P, B, and has its own C per direction. C is trained as
    C~ = C (I - Abar^length), which ties it to the task's `length`: kernels are always made at that
    length, and the convolution cuts them to the batch's.

    A, P, B and log dt set time scales: a step that is small for a weight changes a kernel's length
    many times over. So they have their own rates (log dt unless dt_lr is "main") and no decay."""

    keys = dict(state=Key(int), n_ssm=Key(int), dt_min=Key(float), dt_max=Key(float))
    keys |= dict(dt_lr=Key((float, "main")), ssm_lr=Key(float))

    def __init__(self, c):
        super().__init__()
        if c.d % c.n_ssm:
            raise SizeError(f"d={c.d} is not a multiple of n_ssm={c.n_ssm}")
        self.d = c.d
        self.length = c.length
        A, P, B = (v.repeat(c.n_ssm, 1) for v in hippo_nplr(c.state))  # (n_ssm, n)
        log_dt = log_uniform(c, c.d)
        # Complex standard normal, one output map per direction.
        C = torch.randn(c.directions, c.d, c.state // 2, dtype=torch.complex64)  # (dir, d, n)
        A_all, P_all = (v.repeat(c.d // c.n_ssm, 1) for v in (A, P))  # (d, n)
        C = truncation_correction(A_all, P_all, C, log_dt.exp(), c.length)
        self.log_dt = nn.Parameter(log_dt)
        self.A_log_re = nn.Parameter((-A.real).log().float())  # Re A = -exp(.) < 0: stable
        self.A_im = nn.Parameter(A.imag.float())
        self.P = nn.Parameter(torch.view_as_real(P).float().clone())
        self.B = nn.Parameter(torch.view_as_real(B).float().clone())
        self.C = nn.Parameter(torch.view_as_real(C.to(torch.complex64)).clone())
        self.rates = dict.fromkeys(("A_log_re", "A_im", "P", "B"), (c.ssm_lr, False))
        self.rates["log_dt"] = (None if c.dt_lr == "main" else c.dt_lr, False)

    def arguments(self, p):
        """Return A, P, B (d, n), C~ (dir, d, n) and dt (d,)."""
        P, B, C = (torch.view_as_complex(v.float()) for v in (p.P, p.B, p.C))
        A_re, A_im, P, B = (
            v.tile((self.d // v.shape[-2], 1))  # (d, n) channels in turn
            for v in (p.A_log_re.float().exp(), p.A_im.float(), P, B)
        )
        dt = p.log_dt.float().exp()  # (d,)
        # Before the bilinear rule every state decays by at least 1 % in `length` steps, so that
        # float32 suffices (`s4_kernel`). HiPPO's states decay far more there.
        least = 0.01 / (self.length * dt.detach()[..., None])
        return torch.complex(-A_re.maximum(least), A_im), P, B, C, dt

    def make(self, A, P, B, C, dt, l):
        """Return kernels (dir, d, length) for every l up to length."""
        if l > self.length:
            raise SizeError(f"S4 was made with length={self.length}, got {l} positions")
        return s4_kernel(A, P, B, C, dt, self.length, precise=False)


# ---- Nothing set by hand -------------------------------------------------------------------------


@torch.no_grad()
def randomise(module):
    """Draw every parameter from N(0, 0.1^2), norm gains and biases included (appendix C.1.3 and the
    official code; section 3.3 mentions only the state space parameters).

    S4 then has dt about 1 (at HiPPO's start: 0.001 to 0.1), Re A about -1 and Im A about 0. The
    bilinear rule puts its poles around (1 - 1/2) / (1 + 1/2) = 1/3, so a kernel is its first few
    values. DLR's decay rates theta^2 scatter around 0.01; a few are near 0, so there is memory. Its
    frequencies all lie within a few tenths of a radian instead of on the full circle: kernels are
    slow swells that barely separate neighbouring positions.

    The paper finds that SPT learns kernels whose decay the data decide (section 3.6, figure 4). On
    Text they become more local than HiPPO's; on PathX they peak at multiples of the image's width,
    the neighbours above and below."""
    for parameter in module.parameters():
        parameter.normal_(0, 0.1)
    return module


# ---- Attention -----------------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head self-attention, (b, l, d) -> (b, l, d).

    c.rotary: the share of a head's e dimensions that rotary positions rotate. c.block: block size
    of `attention`. One Linear equals three projections. (The official code copies one projection
    into q, k, v and o, so that at the start every position attends to itself. We do not.)"""

    keys = dict(heads=Key(int), block=Key(int, None), rotary=Key(float, 0.0, most=1, shown=False))

    def __init__(self, c):
        super().__init__()
        if c.d % c.heads:
            raise SizeError(f"d={c.d} is not a multiple of heads={c.heads}")
        self.heads = c.heads
        self.e = c.d // c.heads
        self.causal = c.causal
        self.block = c.block
        self.rotary_dims = int(c.rotary * c.d // c.heads)
        if self.rotary_dims % 2:
            raise SizeError(f"rotary positions turn pairs, not {self.rotary_dims} dimensions")
        self.qkv = nn.Linear(c.d, 3 * c.d)
        self.out = nn.Linear(c.d, c.d)

    def project(self, x, start=0):
        """Return queries, keys, values (b, h, l, e) of x (b, l, d). start: its first position."""
        y = self.qkv(x).unflatten(-1, (-1, self.e))  # (b, l, 3 h, e)
        if r := self.rotary_dims:  # rotate queries and keys in one call
            qk, v = y.split((y.shape[2] - self.heads, self.heads), 2)
            turned = rotary(qk[..., :r], start, dim=1)
            y = torch.cat((turned, qk[..., r:]), -1) if r < self.e else turned  # (b, l, 2 h, e)
        parts = y.split(self.heads, 2) + ((v,) if r else ())
        return tuple(part.transpose(1, 2) for part in parts)

    def merge(self, y):
        """Project the heads' outputs (b, h, l, e) -> (b, l, d)."""
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(self, x, lengths=None):
        return self.merge(self.attend(*self.project(x), lengths))

    def attend(self, q, k, v, lengths):
        """Attend: queries, keys, values (b, h, l, e) -> (b, h, l, e). zoo/ has other ways."""
        return attention(q, k, v, causal=self.causal, block=self.block, lengths=lengths)


# ---- Norms and residual blocks -------------------------------------------------------------------


class BatchNorm(nn.BatchNorm1d):
    """nn.BatchNorm1d on (b, l, d), over real positions only, and over all processes together, so
    that padding and division do not matter. (nn.SyncBatchNorm counts padding and wants a GPU.)"""

    def forward(self, x, lengths=None):
        x = x.movedim(-1, 1)  # (b, d, l)
        masked = self.training and (lengths is not None or is_distributed())
        y = masked_batch_norm(self, x, lengths) if masked else super().forward(x)
        return y.movedim(1, -1)  # (b, l, d)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm, called like `BatchNorm`. It treats each position by itself."""

    def forward(self, x, lengths=None):
        return super().forward(x)


NORMS = {"layer": LayerNorm, "batch": BatchNorm}


class FeedForward(nn.Sequential):
    """Linear, GELU, Linear: (b, l, d) -> (b, l, d)."""

    keys = {}

    def __init__(self, c):
        super().__init__(nn.Linear(c.d, c.ff), nn.GELU(), nn.Linear(c.ff, c.d))


FEED_FORWARD = {"dense": FeedForward}  # --arch ffn=...


class TransformerBlock(nn.Module):
    """x = x + mixer(norm(x)), then x + ff(norm(x)). No dropout (official configurations)."""

    keys = dict(ff=Key(int), ffn=Key(FEED_FORWARD, "dense", shown=False))

    def __init__(self, c, mixer):
        super().__init__()
        self.norm1 = NORMS[c.norm](c.d)
        self.norm2 = NORMS[c.norm](c.d)
        self.mixer = mixer
        self.ff = FEED_FORWARD[c.ffn](c)

    def forward(self, x, lengths=None, *K):  # K: the mixer's kernels, where `Backbone` makes them
        x = x + self.mixer(self.norm1(x, lengths), lengths, *K)
        return x + self.ff(self.norm2(x, lengths))


class SSMBlock(nn.Module):
    """x + mixer(norm(x)), or norm(x + mixer(x)) with c.place "post". GLU replaces feed-forward."""

    keys = dict(norm=Key(NORMS), place=Key(("pre", "post")), dropout=Key(float, 0.0, most=1))

    def __init__(self, c, mixer):
        super().__init__()
        self.pre = c.place == "pre"
        self.norm = NORMS[c.norm](c.d)
        self.mixer = mixer
        self.dropout = nn.Dropout1d(c.dropout)

    def forward(self, x, lengths=None, *K):
        y = self.mixer(self.norm(x, lengths) if self.pre else x, lengths, *K)  # (b, l, d)
        # One mask for all positions. This order of adding keeps (b, d, l) in memory.
        x = self.dropout(y.transpose(1, 2)).transpose(1, 2) + x
        return x if self.pre else self.norm(x, lengths)


# ---- The backbone --------------------------------------------------------------------------------


class Backbone(nn.Module):
    """Symbols (b, l) or samples (b, l, channels), NaN where hidden or missing -> features (b, l,
    d): what pretraining hands on to finetuning."""

    keys = dict(layers=Key(int), d=Key(int), norm=Key(NORMS, "layer"))

    def __init__(self, c):
        super().__init__()
        model = MODELS[c.model]
        self.d = c.d
        self.mask_channel = c.mask_channel
        self.init_head = model.init_head
        self.reads_symbols = c.vocab is not None
        if self.reads_symbols:
            self.encoder = nn.Embedding(c.vocab, c.d)
        else:
            self.encoder = nn.Linear(c.channels, c.d)
        positions = model.positions and model.positions(c.length, c.d)  # (length, d) or None
        self.register_buffer("positions", positions, persistent=False)
        try:
            numbered = (SimpleNamespace(**vars(c), layer=i) for i in range(c.layers))
            self.layers = nn.ModuleList(model.block(c, model.mixer(c)) for c in numbered)
        except ValueError as error:  # an odd state, say
            raise SizeError(str(error)) from None
        # Pre-norm blocks never normalise the final sum.
        self.norm = NORMS[c.norm](c.d) if getattr(self.layers[0], "pre", True) else None
        model.init(self)

    def inputs(self, batch):
        """Return what this backbone reads of a batch, with nothing hidden."""
        return batch.symbols if self.reads_symbols else batch.samples

    def forward(self, x, lengths=None):
        return self.body(x, lengths, self.kernels(x.shape[1]))

    def body(self, x, lengths, kernels):
        """Run everything but the making of kernels. --compile compiles this method."""
        if self.mask_channel:
            # hidden or missing: 0 and a mark, since 0 is a valid value, too
            mark = x.isnan().float().mean(-1, keepdim=True)  # (b, l, 1)
            x = torch.cat((x.nan_to_num(), mark), -1)  # (b, l, channels + 1)
        # Inputs and residual stream stay float32: bfloat16 would keep 8 bits of a sample.
        with torch.autocast(x.device.type, enabled=False):
            x = self.encoder(x)  # (b, l, d)
        if self.positions is not None:
            x = x + self.positions[: x.shape[1]]
        for layer, K in zip(self.layers, kernels):
            x = layer(x, lengths, *K)
        return x if self.norm is None else self.norm(x, lengths)  # (b, l, d)

    def kernels(self, l):
        """Return the kernels of all layers: (K,) for each, or () if its mixer needs none."""
        kernels = [getattr(layer.mixer, "kernel", None) for layer in self.layers]
        if not all(isinstance(kernel, Kernel) for kernel in kernels):
            return [()] * len(kernels)
        return [(K,) for K in make_kernels(kernels, l)]


# ---- Heads ---------------------------------------------------------------------------------------


def at(x, hidden):
    """Return x (b, l, ...) at hidden positions, (m, ...). hidden: a mask (b, l), or flat indices
    (m,) below b l."""
    return x[hidden] if hidden.dtype == torch.bool else x.flatten(0, 1)[hidden]


def exactly(head, x):
    """Return head(x) in float32: bfloat16 is too coarse for samples and for R2 near 1."""
    with torch.autocast(x.device.type, enabled=False):
        return head(x.float())


class Denoiser(nn.Module):
    """Stage 1: predict the symbol or sample at hidden positions. outputs: the number of symbols (or
    gray levels) under cross-entropy, of channels under L1."""

    def __init__(self, backbone, outputs):
        super().__init__()
        self.backbone = backbone
        self.head = backbone.init_head(nn.Linear(backbone.d, outputs))

    def forward(self, x, lengths, hidden):
        """x as in Backbone, hidden as in `at` -> (m, outputs), only at hidden positions."""
        return exactly(self.head, at(self.backbone(x, lengths), hidden))


class Classifier(nn.Module):
    """Stage 2: predict one label per example. outputs: the number of classes, or 1 for regression.

    pool: mean, max or last, over a sequence's true length; none: a label for every position. head:
    linear; mlp (one hidden layer); pair (of both documents, their difference and product)."""

    def __init__(self, backbone, outputs, pool, head="linear"):
        super().__init__()
        self.backbone = backbone
        self.pool = pool
        self.pair = head == "pair"
        self.frozen = False
        d = backbone.d
        if head == "linear":
            layers = [nn.Linear(d, outputs)]
        elif head == "mlp":
            layers = [nn.Linear(d, d), nn.ReLU(), nn.Linear(d, outputs)]
        else:
            layers = [nn.Linear(4 * d, d), nn.GELU(), nn.Linear(d, outputs)]
        self.head = backbone.init_head(nn.Sequential(*layers))

    def freeze(self):
        """Make it a linear probe: train only the head, on the backbone in evaluation mode."""
        self.frozen = True
        self.backbone.requires_grad_(False).eval()

    def train(self, mode=True):
        super().train(mode)
        self.backbone.train(mode and not self.frozen)
        return self

    def forward(self, x, lengths=None):
        """x as in Backbone -> (b[, l], outputs); with the head `pair`, x holds 2 b documents."""
        return self.classify(self.backbone(x, lengths), lengths)

    def classify(self, x, lengths):
        """Pool the backbone's features (b, l, d) and apply the head -> (b, outputs)."""
        if self.pool == "none":
            return exactly(self.head, x)  # (b, l, outputs)
        lengths = true_lengths(lengths, *x.shape[:2], x.device)  # (b,)
        real = inside(lengths, x.shape[1])[..., None]  # (b, l, 1)
        if self.pool == "mean":
            x = (x * real).sum(1) / lengths[:, None]  # (b, d)
        elif self.pool == "max":
            x = x.masked_fill(~real, -math.inf).amax(1)
        else:
            x = x.take_along_dim(lengths[:, None, None] - 1, 1).squeeze(1)
        if self.pair:
            first, second = x.unflatten(0, (-1, 2)).unbind(1)  # (b, d) both
            x = torch.cat((first, second, first - second, first * second), -1)  # (b, 4 d)
        return exactly(self.head, x)  # (b, outputs)


# ---- Skip at a first reading ---------------------------------------------------------------------

# The table of models.


def sinusoids(l, d):
    """Return fixed sinusoidal positions (l, d), sin and cos interleaved (Vaswani et al. 2017)."""
    return rotary_turns(l, d, torch.device("cpu")).flip(-1).flatten(1)[:, :d]


@dataclass(frozen=True)
class Model:
    """A line of `MODELS`: block(c, mixer(c)) is a layer. A block that normalises its own output has
    `pre` False."""

    block: type
    mixer: object  # a class, or a partial of classes
    like: str | None = None  # whose sizes and recipes it uses if it has none of its own
    extras: dict = field(default_factory=dict)  # other defaults of its keys, and what else `c` has
    positions: object = None  # function (length, d) -> (length, d), added to the input
    init: object = nn.Identity()  # sets a backbone's initial weights (Identity: torch's defaults)
    init_head: object = nn.Identity()  # sets its head's initial weights
    symbols: bool = False  # whether it reads symbols (gray levels, say) if the task has them
    weights: object = None  # function(classifier, task, args, say) that loads trained weights
    sizes: str = ""  # table of sizes as in recipes.py, without the column `model`
    recipes: str = ""  # table of recipes, likewise
    changes: str = ""  # table of sizes that differ on some tasks, key=value


RANDOM = dict(init=randomise, init_head=randomise)
MODELS = {
    "transformer": Model(TransformerBlock, Attention, "rotary", positions=sinusoids),
    "rotary": Model(TransformerBlock, Attention, extras=dict(rotary=1.0)),
    "s4": Model(SSMBlock, partial(SSM, S4)),
    "s4_rand": Model(SSMBlock, partial(SSM, S4), "s4", **RANDOM),
    "dlr": Model(SSMBlock, partial(SSM, DLR), "s4"),
    "dlr_rand": Model(SSMBlock, partial(SSM, DLR), "dlr", **RANDOM),
}


# The end of `SSM`.


def linear_glu(linear, y):
    """Return F.glu(linear(y)) over channels, which come second: y (b, d, l) -> (b, d, l).

    Nothing large is transposed. Weights are cast first: autocast would cast b expanded copies."""
    dtype = y.dtype
    device = y.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    weight = linear.weight.to(dtype).expand(y.shape[0], -1, -1)
    bias = linear.bias.to(dtype)[:, None]
    return F.glu(torch.baddbmm(bias, weight, y.to(dtype)), dim=1)


# Optimiser groups; the number of parameters.

# Names of training-only parameters: not counted, not transferred to finetuning. zoo/ adds its own.
HELPERS = set()


def param_groups(model, lr, weight_decay):
    """Return AdamW's parameter groups, one for each learning rate and weight decay.

    Parameters named in a module's `rates` have their own, a rate perhaps as a function of the main
    one. All others, biases and norm gains included, use the recipe's (as in the official code). A
    schedule scales each group's `initial_lr`."""
    rates = {
        id(getattr(module, name)): rate
        for module in model.modules()
        for name, rate in getattr(module, "rates", {}).items()
    }
    groups = {}
    for parameter in model.parameters():
        if not parameter.requires_grad:
            continue
        name = "own" if id(parameter) in rates else "main"
        rate, decayed = rates.get(id(parameter), (None, True))
        if callable(rate):
            rate = rate(lr)
        key = name, rate, decayed
        decay = weight_decay if decayed else 0.0
        group = groups.setdefault(key, dict(params=[], weight_decay=decay, name=name))
        group["lr"] = group["initial_lr"] = lr if rate is None else rate
        group["params"].append(parameter)
    return list(groups.values())


def make_optimizer(model, args):
    """Return the optimiser of both stages. Another one takes the same groups."""
    return torch.optim.AdamW(param_groups(model, args.lr, args.wd), fused=True)


def count(model):
    """Return the number of parameters."""
    parameters = model.named_parameters()
    return sum(p.numel() for name, p in parameters if name.split(".")[-1] not in HELPERS)


# From tables and flags to the object `c`.


def keys_of(model, ffn="dense"):
    """Return {name: Key} of all classes of a model, its feed-forward part included.

    A Key's kind: int, float, or the allowed values. default: `...` means that a table of sizes must
    give it. A number lies between least (default: 1 for int, 0 for float) and most. shown: listed
    even when not set. inherited: finetuning takes it over from pretraining."""
    model = MODELS[model]
    parts = [model.mixer, Backbone, model.block]
    if isinstance(model.mixer, partial):
        parts = [model.mixer.func, *model.mixer.args, Backbone, model.block]
    keys = {}
    for part in parts:
        for base in reversed(part.__mro__):
            keys |= vars(base).get("keys", {})
    if "ffn" in keys:
        keys |= FEED_FORWARD.get(ffn, FeedForward).keys
    return keys


def config(sizes, task, causal=False, mask_channel=False):
    """Return the object `c` that all classes here take. sizes: from `arch` in recipes.py.

    mask_channel: add an input channel, the share of channels that are hidden at a position (in
    masked pretraining on samples; where samples are missing, in both stages)."""
    model = MODELS[sizes["model"]]
    keys = keys_of(sizes["model"], sizes.get("ffn", "dense"))
    defaults = {name: key.default for name, key in keys.items() if key.default is not ...}
    reads_symbols = task.channels is None or model.symbols
    return SimpleNamespace(
        **defaults | model.extras | sizes,
        length=task.length,
        vocab=task.vocab if reads_symbols else None,
        channels=None if reads_symbols else task.channels + mask_channel,
        mask_channel=mask_channel and not reads_symbols,
        causal=causal,
        directions=1 if causal else 2,
    )


# Kernels of all layers in one call, because a GPU waits for each launch.

AT_ONCE = dict(cpu=2**22, cuda=2**25)  # values d l of the kernels that one call makes


def make_kernels(kernels, l):
    """Return the kernels (dir, d, l) of modules of one shape, in a few calls if they are large."""
    first = kernels[0]
    names = [*first._parameters, *first._buffers]
    most = AT_ONCE["cuda" if next(first.parameters()).is_cuda else "cpu"]
    number = max(1, most // (first.d * getattr(first, "length", l)))  # of modules in a call
    made = []
    for i in range(0, len(kernels), number):
        group = kernels[i : i + number]
        stacked = {name: torch.stack([getattr(kernel, name) for kernel in group]) for name in names}
        # layers and channels become one dimension: (layers, ..., d, n) -> (..., layers d, n)
        arguments = (
            v.flatten() if v.ndim == 2 else v.movedim(0, -3).flatten(-3, -2)
            for v in first.arguments(SimpleNamespace(**stacked))
        )
        made += first.make(*arguments, l)[..., :l].chunk(len(group), 1)
    return made


# BatchNorm in training.


def masked_batch_norm(norm, x, lengths):
    """Apply `BatchNorm` in training: x (b, d, l) -> (b, d, l), and move the running averages."""
    b, _, l = x.shape
    real = inside(true_lengths(lengths, b, l, x.device), l, torch.float)[:, None]  # (b, 1, l)
    with torch.autocast(x.device.type, enabled=False):
        y, mean, variance, count = masked_norm(x.float(), real, norm.weight, norm.bias, norm.eps)
    with torch.no_grad():
        norm.running_mean.lerp_(mean[:, 0], norm.momentum)
        norm.running_var.lerp_((variance * count / (count - 1).clamp(min=1))[:, 0], norm.momentum)
        norm.num_batches_tracked += 1
    return y.to(x.dtype)


# Joint training.


class Joint(Classifier):
    """Joint training: a classifier whose backbone also predicts hidden positions, through a second
    head with `predicted` outputs."""

    def __init__(self, backbone, outputs, pool, head, predicted):
        super().__init__(backbone, outputs, pool, head)
        self.predict = backbone.init_head(nn.Linear(backbone.d, predicted))

    def forward(self, x, lengths=None, hidden=None, corrupted=None, corrupted_lengths=None):
        """x as in Backbone -> (b, outputs). With hidden as in `at`, also predictions (m,
        predicted): from the corrupted inputs, or, without them (causal), from the same pass."""
        features = self.backbone(x, lengths)  # (b, l, d)
        outputs = self.classify(features, lengths)
        if hidden is None:
            return outputs
        if corrupted is not None:
            with averages_kept(self.backbone):  # it evaluates on inputs that are not corrupted
                features = self.backbone(corrupted, corrupted_lengths)
        return outputs, exactly(self.predict, at(features, hidden))


@contextlib.contextmanager
def averages_kept(backbone):
    """Leave BatchNorm's running averages as they are."""
    momenta = {norm: norm.momentum for norm in backbone.modules() if isinstance(norm, BatchNorm)}
    for norm in momenta:
        norm.momentum = 0.0
    yield
    for norm, momentum in momenta.items():
        norm.momentum = momentum
