"""Models: S4, DLR and Transformers as the paper compares them; one backbone with two heads.

    Backbone      symbols (b, l) or samples (b, l, channels) -> features (b, l, d)
    Denoiser      backbone + a linear head on the positions to be predicted         stage 1, pretrain.py
    Classifier    backbone + pooling over the sequence + a head                     stage 2, finetune.py

The sections follow the paper's argument: a linear recurrence is a convolution (`SSM`); diagonal
(`DLR`) and diagonal plus low rank (`S4`); nothing set by hand (`randomise`); the other way to mix
positions (`Attention`). The file ends with what a first reading may skip; there `MODELS` has a line
for each --model. Sizes are in recipes.py, other architectures in zoo/; a new one is a file there. A
mixer maps (b, l, d) to (b, l, d), ignores positions at or past `lengths`, and sees no later
position if c.causal.

Every class is built from one object `c`, made by `config`: sizes, the extras of the model's line,
the task's length, vocab and channels, `causal`, and the layer's number. Sizes: b batch, l length, d
width, h heads, e width of a head, n stored states, and in shapes c kernels per channel (2 when
bidirectional). Upper-case matrices are explained in kernels.py. "Paper" is Amos et al. 2024."""

import contextlib
import math
import runpy
from collections import namedtuple
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from gradients import masked_batch_norm
from kernels import (
    attention,
    diagonal_kernel,
    fft_conv,
    hippo_nplr,
    inside,
    rotary,
    s4_kernel,
    s4_recover_C,
    s4_step,
    true_lengths,
    truncation_correction,
)

# `keys` of a class: the sizes that it reads from `c` and that --arch can set (`keys_of` says what a
# Key holds).
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
    convolution, plus the skip connection D u. `DLR` and `S4` below choose the recurrence;
    `ssm_scan` in kernels.py runs it step by step. Bidirectional layers have a second kernel for the
    reversed direction. Channels mix only in the GLU.

    kernel(c) builds a module that returns kernels (directions, d, l), or longer ones, when called
    with l. Its `rates` name parameters with their own learning rate and weight decay: {name: (rate
    or None, decayed or not)}; None is the main rate. Reserve the attribute's name `kernel` for such
    modules: Figure 4 looks for it."""

    keys = dict(dropout=Key(float, 0.0, most=1))

    def __init__(self, kernel, c):
        super().__init__()
        self.kernel = kernel(c)
        self.D = nn.Parameter(torch.randn(c.d))
        self.dropout = nn.Dropout1d(c.dropout)  # one mask along the length, of (b, d, l)
        self.out = nn.Linear(c.d, 2 * c.d)

    def forward(self, x, lengths=None, K=None):
        """K (c, d, l) or longer: the kernels, if `Backbone` has already made those of all
        layers."""
        u = x.transpose(1, 2)  # (b, d, l)
        # a convolution does not know padding; zeros do not change its state
        if lengths is not None:
            u = u * inside(lengths, x.shape[1])[:, None]
        K = self.kernel(x.shape[1]) if K is None else K
        y = fft_conv(u, K, D=self.D)  # (b, d, l)
        y = self.dropout(F.gelu(y))
        # The rest is F.glu(self.out(y.transpose(1, 2))), without transposing y. The weight is cast
        # first: autocast would cast b expanded copies.
        lower = (
            torch.get_autocast_dtype(y.device.type)
            if torch.is_autocast_enabled(y.device.type)
            else y.dtype
        )
        weight, bias = self.out.weight.to(lower), self.out.bias.to(lower)
        # (b, 2 d, l)
        y = torch.baddbmm(bias[:, None], weight.expand(y.shape[0], -1, -1), y.to(lower))
        return F.glu(y, dim=1).transpose(1, 2)  # (b, l, d)


def log_uniform(c, n):
    """Draw the logarithms of n step sizes, uniform between those of c.dt_min and c.dt_max."""
    return torch.rand(n) * math.log(c.dt_max / c.dt_min) + math.log(c.dt_min)


class Kernel(nn.Module):
    """Base class: make convolution kernels (directions, d, l), float32, of length l from
    parameters.

    A subclass sets self.d and has two methods: `arguments(p)` turns parameters p.A, p.P, ... into
    arguments (..., d, n) or (d,), and `make(*arguments, l)` turns those into kernels. Two, because
    kernels do not depend on the input: one batched call makes those of all layers (`make_kernels`),
    where p holds the parameters of all, stacked."""

    def forward(self, l):
        return self.make(*self.arguments(self), l)


# ---- Diagonal: DLR -------------------------------------------------------------------------------


class Diagonal(Kernel):
    """Base class: kernels that are sums of geometric sequences; arguments W (c, d, n), Lambda (1 or
    d, n), complex."""

    make = staticmethod(diagonal_kernel)


class DLR(Diagonal):
    """Kernels of the diagonal linear RNN (paper, eq. 3; Gupta et al. 2022): K[k] = Re sum_n W_n
    e^(Lambda_n k).

    Abar = diag(e^Lambda) and Bbar = 1, so K[k] = C Abar^k 1 with C = W: a sum of damped waves. All
    channels and directions of a layer share the poles e^Lambda, and each has its own W. There is no
    continuous time (dt_min, dt_max are S4's names) and no conjugate pairing. Re Lambda = -theta^2
    <= 0, so the recurrence never grows.

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
        self.W = nn.Parameter(torch.randn(c.directions, c.d, c.state, 2) / c.state)  # (c, d, n, 2)
        self.rates = dict.fromkeys(("theta", "Lambda_im", "W"), (c.ssm_lr, False))

    def arguments(self, p):
        Lambda = torch.complex(-p.theta.float().square(), p.Lambda_im.float())  # (n,)
        return torch.view_as_complex(p.W.float()), Lambda[..., None, :]  # (c, d, n), (1, n)


# ---- Diagonal plus low rank: S4 ------------------------------------------------------------------


class S4(Kernel):
    """Kernels of S4 (paper, eq. 2; Gu et al. 2022).

    Diagonal plus low rank: the state matrix is A_full = diag(A) - P P* (eq. 2.1), because HiPPO's
    matrix is normal only up to such a rank-one term. Diagonalising the whole matrix would be
    numerically hopeless.

    Discretisation: x' = A_full x + B u is sampled with step size dt by the bilinear rule (eq. 2.2
    and 2.3, `discretize` in kernels.py), which keeps a stable matrix stable. Each channel has its
    own dt, which stretches the kernel in time.

    HiPPO chooses A, P, B so that the state holds the past as Legendre coefficients (`hippo_legs` in
    kernels.py): kernels decay over about 1 / dt steps. The paper asks what this prior is worth.

    Channel i uses copy i mod `n_ssm` of A, P, B. It has its own C, and a second one when
    bidirectional. C is trained as C~ = C (I - Abar^length), which ties it to the task's `length`:
    kernels are always made at that length, and the convolution cuts them to the batch's.

    A, P, B and log dt set time scales, so a step that is small for a weight changes a kernel's
    length many times over. A, P and B have a learning rate of their own, and so has log dt unless
    dt_lr is "main". None is decayed."""

    keys = dict(
        state=Key(int),
        n_ssm=Key(int),
        dt_min=Key(float),
        dt_max=Key(float),
        dt_lr=Key((float, "main")),
        ssm_lr=Key(float),
    )

    def __init__(self, c):
        super().__init__()
        if c.d % c.n_ssm:
            raise SizeError(f"d={c.d} is not a multiple of n_ssm={c.n_ssm}")
        self.d, self.length = c.d, c.length
        A, P, B = (v.repeat(c.n_ssm, 1) for v in hippo_nplr(c.state))  # (n_ssm, n)
        log_dt = log_uniform(c, c.d)
        # Complex standard normal, one output map per direction.
        C = torch.randn(c.directions, c.d, c.state // 2, dtype=torch.complex64)  # (c, d, n)
        A_all, P_all = (v.repeat(c.d // c.n_ssm, 1) for v in (A, P))  # (d, n)
        C = truncation_correction(A_all, P_all, C, log_dt.exp(), c.length)
        self.log_dt = nn.Parameter(log_dt)
        # Re A = -exp(.) < 0: the recurrence stays stable
        self.A_log_re = nn.Parameter((-A.real).log().float())
        self.A_im = nn.Parameter(A.imag.float())
        self.P = nn.Parameter(torch.view_as_real(P).float().clone())
        self.B = nn.Parameter(torch.view_as_real(B).float().clone())
        self.C = nn.Parameter(torch.view_as_real(C.to(torch.complex64)).clone())
        self.rates = dict.fromkeys(("A_log_re", "A_im", "P", "B"), (c.ssm_lr, False))
        self.rates["log_dt"] = (None if c.dt_lr == "main" else c.dt_lr, False)

    def arguments(self, p):
        """Return A, P, B (d, n), C~ (c, d, n) and dt (d,)."""
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
        """Return kernels (c, d, length) for every l up to length."""
        if l > self.length:
            raise SizeError(
                f"S4 was made for at most {self.length} positions, got {l}; make it with length={l}"
            )
        return s4_kernel(A, P, B, C, dt, self.length, precise=False)


# ---- Nothing set by hand -------------------------------------------------------------------------


@torch.no_grad()
def randomise(module):
    """Draw every parameter from N(0, 0.1^2), norm gains and biases included: the paper's random
    initialisation (appendix C.1.3 and the official code; section 3.3 mentions only the state space
    parameters).

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
    of `attention`. One Linear makes queries, keys and values. torch initialises by input width, so
    it equals three projections. (The official code copies one projection into q, k, v and o, so
    that at the start every position attends to itself. We do not.)"""

    keys = dict(heads=Key(int), block=Key(int, None), rotary=Key(float, 0.0, most=1, shown=False))

    def __init__(self, c):
        super().__init__()
        if c.d % c.heads:
            raise SizeError(f"d={c.d} is not a multiple of heads={c.heads}")
        self.heads, self.e, self.causal, self.block = c.heads, c.d // c.heads, c.causal, c.block
        self.rotary_dims = int(c.rotary * c.d // c.heads)
        if self.rotary_dims % 2:
            raise SizeError(
                f"d={c.d}, heads={c.heads}: rotary positions turn pairs, not {self.rotary_dims} "
                "dimensions"
            )
        self.qkv = nn.Linear(c.d, 3 * c.d)
        self.out = nn.Linear(c.d, c.d)

    def project(self, x, start=0):
        """Return queries, keys, values (b, h, l, e) of x (b, l, d), whose first position is
        `start`."""
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
        """Attend: queries, keys, values (b, h, l, e) -> (b, h, l, e). Subclasses in zoo/ replace
        this method."""
        return attention(q, k, v, causal=self.causal, block=self.block, lengths=lengths)


def sinusoids(l, d):
    """Return fixed sinusoidal positions (l, d), sin and cos interleaved, base 10000 (Vaswani et al.
    2017)."""
    angle = torch.arange(l, dtype=torch.float64)[:, None] * 10000.0 ** (
        -torch.arange(0, d, 2, dtype=torch.float64) / d
    )
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[:, :d].float()


# ---- Norms and residual blocks -------------------------------------------------------------------


class BatchNorm(nn.BatchNorm1d):
    """nn.BatchNorm1d on (b, l, d), over real positions only, and over all processes together. So a
    step does not depend on how the batch is padded or divided. (nn.SyncBatchNorm counts padding and
    wants a GPU.)"""

    def forward(self, x, lengths=None):
        x = x.movedim(-1, 1)  # (b, d, l)
        counted = inside(lengths, x.shape[2], torch.float) if lengths is not None else None
        y = masked_batch_norm(self, x, counted) if self.training else super().forward(x)
        return y.movedim(1, -1)  # (b, l, d)


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm, called like `BatchNorm`. It normalises each position by itself, so lengths do
    not matter."""

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
        self.norm1, self.norm2 = NORMS[c.norm](c.d), NORMS[c.norm](c.d)
        self.mixer = mixer
        self.ff = FEED_FORWARD[c.ffn](c)

    def forward(self, x, lengths=None, *K):  # K: the mixer's kernels, where `Backbone` makes them
        x = x + self.mixer(self.norm1(x, lengths), lengths, *K)
        return x + self.ff(self.norm2(x, lengths))


class SSMBlock(nn.Module):
    """x + mixer(norm(x)), or norm(x + mixer(x)) with c.place "post". The mixer's GLU replaces the
    feed-forward part."""

    keys = dict(norm=Key(NORMS), place=Key(("pre", "post")), dropout=Key(float, 0.0, most=1))

    def __init__(self, c, mixer):
        super().__init__()
        self.pre, self.norm, self.mixer = c.place == "pre", NORMS[c.norm](c.d), mixer
        self.dropout = nn.Dropout1d(c.dropout)

    def forward(self, x, lengths=None, *K):
        y = self.mixer(self.norm(x, lengths) if self.pre else x, lengths, *K)  # (b, l, d)
        # One dropout mask for all positions. This order of adding keeps the (b, d, l) memory layout
        # for the next layer.
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
        self.d, self.reads_symbols, self.init_head = c.d, c.vocab is not None, model.init_head
        self.mask_channel = c.mask_channel
        self.encoder = (
            nn.Embedding(c.vocab, c.d) if self.reads_symbols else nn.Linear(c.channels, c.d)
        )
        self.register_buffer(
            "positions", model.positions and model.positions(c.length, c.d), persistent=False
        )
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
            gone = x.isnan()  # hidden or missing: 0 and a mark, since 0 is a valid value, too
            # (b, l, channels + 1)
            x = torch.cat((x.nan_to_num(), gone.float().mean(-1, keepdim=True)), -1)
        # Input and residual stream stay float32 under autocast: bfloat16 would keep 8 bits of a
        # sample.
        with torch.autocast(x.device.type, enabled=False):
            x = self.encoder(x)  # (b, l, d)
        if self.positions is not None:
            x = x + self.positions[: x.shape[1]]
        for layer, K in zip(self.layers, kernels):
            x = layer(x, lengths, *K)
        return x if self.norm is None else self.norm(x, lengths)  # (b, l, d)

    def kernels(self, l):
        """Return the kernels of all layers, made in one call: (K,) for each layer, or () if its
        mixer needs none."""
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
    """Return head(x) in float32: bfloat16 is too coarse for samples and for R2 near 1, and a head
    costs little."""
    with torch.autocast(x.device.type, enabled=False):
        return head(x.float())


class Denoiser(nn.Module):
    """Stage 1: predict the symbol or sample at hidden positions. outputs: the vocabulary's size (or
    gray levels) under cross-entropy, the number of channels under L1."""

    def __init__(self, backbone, outputs):
        super().__init__()
        self.backbone = backbone
        self.head = backbone.init_head(nn.Linear(backbone.d, outputs))

    def forward(self, x, lengths, hidden):
        """x as in Backbone, hidden as in `at` -> (m, outputs), only at hidden positions."""
        return exactly(self.head, at(self.backbone(x, lengths), hidden))


class Classifier(nn.Module):
    """Stage 2: predict one label per example. outputs: the number of classes, or 1 for regression.

    pool: mean, max or last, over a sequence's true length; none: predict a label for every
    position. head: linear; mlp (one hidden layer); pair (on both documents of an example, their
    difference and product)."""

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
        self.head, self.frozen = backbone.init_head(nn.Sequential(*layers)), False

    def freeze(self):
        """Make it a linear probe: train only the head, on the backbone in evaluation mode (dropout,
        BatchNorm)."""
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
            one, two = x.unflatten(0, (-1, 2)).unbind(1)  # (b, d) both
            x = torch.cat((one, two, one - two, one * two), -1)  # (b, 4 d)
        return exactly(self.head, x)  # (b, outputs)


# ---- Optimiser groups ----------------------------------------------------------------------------

# names of training-only parameters: not counted, not transferred to finetuning (zoo/ adds its own)
HELPERS = set()


def param_groups(model, lr, weight_decay):
    """Return AdamW's parameter groups. Parameters named in a module's `rates` have their own
    learning rate and are decayed only if it says so. All others, biases and norm gains included,
    use the recipe's (as in the official code). A rate may be a function of the main one. A schedule
    scales each group's `initial_lr`."""
    own = {
        id(getattr(module, name)): rate
        for module in model.modules()
        for name, rate in getattr(module, "rates", {}).items()
    }
    groups = {}
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        rate, decayed = own.get(id(parameter), (None, True))
        rate = rate(lr) if callable(rate) else rate
        name = "own" if id(parameter) in own else "main"
        group = groups.setdefault(
            (name, rate, decayed),
            dict(params=[], weight_decay=weight_decay if decayed else 0.0, name=name),
        )
        group["lr"] = group["initial_lr"] = lr if rate is None else rate
        group["params"].append(parameter)
    return list(groups.values())


def make_optimizer(model, args):
    """Return the optimiser of both stages, AdamW. Another one takes the same groups, perhaps by a
    flag in `args`."""
    return torch.optim.AdamW(param_groups(model, args.lr, args.wd), fused=True)


def count(model):
    """Return the number of parameters."""
    return sum(
        p.numel() for name, p in model.named_parameters() if name.split(".")[-1] not in HELPERS
    )


# ---- Skip at a first reading ---------------------------------------------------------------------

# The table of models.


@dataclass(frozen=True)
class Model:
    """A line of `MODELS`: block(c, mixer(c)) is a layer. A block that normalises its own output has
    `pre` False."""

    block: type
    mixer: object  # a class, or a partial of classes
    # whose sizes and recipes it uses if it has none of its own (not its positions)
    like: str | None = None
    # other defaults of its keys, and what else its classes read in `c`
    extras: dict = field(default_factory=dict)
    # function (length, d) -> (length, d), added to the input; None: the mixer's
    positions: object = None
    init: object = nn.Identity()  # sets a backbone's initial weights (Identity: torch's defaults)
    init_head: object = nn.Identity()  # sets its head's initial weights
    # whether it reads symbols (gray levels, for example) if the task has them
    symbols: bool = False
    weights: object = None  # function(classifier, task, args, say) that loads trained weights
    sizes: str = ""  # table of sizes as in recipes.py, without the column `model`
    recipes: str = ""  # table of recipes, likewise
    changes: str = ""  # table of sizes that differ on some tasks, key=value
    about: str = ""  # what `python models.py` prints; default: the first line of its file in zoo/


MODELS = {
    "transformer": Model(
        TransformerBlock,
        Attention,
        "rotary",
        positions=sinusoids,
        about="Attention, sinusoidal positions (Vaswani et al. 2017; sizes of Tay et al. 2020).",
    ),
    "rotary": Model(
        TransformerBlock,
        Attention,
        extras=dict(rotary=1.0),
        about="Attention, rotary positions (Su et al. 2021).",
    ),
    "s4": Model(
        SSMBlock, partial(SSM, S4), about="S4: diagonal plus low rank, from HiPPO (Gu et al. 2022)."
    ),
    "s4_rand": Model(
        SSMBlock,
        partial(SSM, S4),
        "s4",
        init=randomise,
        init_head=randomise,
        about="S4 with every parameter drawn from N(0, 0.1^2) (Amos et al. 2024).",
    ),
    "dlr": Model(
        SSMBlock, partial(SSM, DLR), "s4", about="DLR: the diagonal linear RNN (Gupta et al. 2022)."
    ),
    "dlr_rand": Model(
        SSMBlock,
        partial(SSM, DLR),
        "dlr",
        init=randomise,
        init_head=randomise,
        about="DLR with every parameter drawn from N(0, 0.1^2) (Amos et al. 2024).",
    ),
}


# From tables and flags to the object `c`.


def keys_of(model, ffn="dense"):
    """Return {name: Key} of all classes of a model, its feed-forward part included.

    A Key's kind: int, float, or the allowed values. default: `...` means that a table of sizes must
    give it. A number lies between least (default: 1 for int, 0 for float) and most. shown: listed
    even when not set. inherited: finetuning takes it over from pretraining."""
    model, keys = MODELS[model], {}
    mixer = (
        [model.mixer.func, *model.mixer.args] if isinstance(model.mixer, partial) else [model.mixer]
    )
    for part in (*mixer, Backbone, model.block):
        for base in reversed(part.__mro__):
            keys |= vars(base).get("keys", {})
    return keys | (FEED_FORWARD.get(ffn, FeedForward).keys if "ffn" in keys else {})


def config(sizes, task, causal=False, mask_channel=False):
    """Return the object `c` that all classes here take. sizes: from `arch` in recipes.py.
    mask_channel: add an input channel, the share of channels that are hidden at a position (in
    masked pretraining on samples; where samples are missing, in both stages)."""
    model, keys = MODELS[sizes["model"]], keys_of(sizes["model"], sizes.get("ffn", "dense"))
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


# Kernels of all layers in one call.

# values d l of the kernels that one call makes; a GPU waits for each launch
AT_ONCE = dict(cpu=2**22, cuda=2**25)


def make_kernels(kernels, l):
    """Return the kernels (c, d, l) of modules of one shape: made in one call, or in several if they
    are large."""
    names = [*kernels[0]._parameters, *kernels[0]._buffers]
    most = AT_ONCE["cuda" if next(kernels[0].parameters()).is_cuda else "cpu"]
    many, made = max(1, most // (kernels[0].d * getattr(kernels[0], "length", l))), []
    for i in range(0, len(kernels), many):
        some = kernels[i : i + many]
        p = SimpleNamespace(
            **{name: torch.stack([getattr(kernel, name) for kernel in some]) for name in names}
        )
        # layers in front -> layers and channels as one dimension: (layers, ..., d, n) -> (...,
        # layers d, n)
        arguments = (
            v.flatten() if v.ndim == 2 else v.movedim(0, -3).flatten(-3, -2)
            for v in some[0].arguments(p)
        )
        made += some[0].make(*arguments, l)[..., :l].chunk(len(some), 1)
    return made


# Joint training.


class Joint(Classifier):
    """Joint training, an alternative to self-pretraining: a classifier whose backbone also predicts
    hidden positions, through a second head with `predicted` outputs."""

    def __init__(self, backbone, outputs, pool, head, predicted):
        super().__init__(backbone, outputs, pool, head)
        self.predict = backbone.init_head(nn.Linear(backbone.d, predicted))

    def forward(self, x, lengths=None, hidden=None, corrupted=None, corrupted_lengths=None):
        """x as in Backbone -> (b, outputs). With hidden as in `at`, also predictions (m,
        predicted): from the corrupted inputs, or, if there are none (causal), from the same
        pass."""
        features = self.backbone(x, lengths)  # (b, l, d)
        outputs = self.classify(features, lengths)
        if hidden is None:
            return outputs
        if corrupted is not None:
            # BatchNorm evaluates on inputs that are not corrupted
            with averages_kept(self.backbone):
                features = self.backbone(corrupted, corrupted_lengths)
        return outputs, exactly(self.predict, at(features, hidden))


@contextlib.contextmanager
def averages_kept(backbone):
    """Leave BatchNorm's running averages as they are."""
    norms = [norm for norm in backbone.modules() if isinstance(norm, BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
    yield
    for norm, momentum in zip(norms, momenta):
        norm.momentum = momentum


# Generation. `step` is the recurrent form of a part: one position and the state so far -> its
# output and the new state.


def ssm_step(self, x, state):
    """x (b, d), state after the previous position -> y (b, d), state."""
    y, state = self.kernel.step(x, state)
    return F.glu(self.out(F.gelu(y + self.D * x)), dim=-1), state


def diagonal_step(self, u, x):
    """Take one step of the recurrence: u (b, d), state x (b, d, n) or None -> y (b, d), x."""
    W, Lambda = self.arguments(self)
    x = u[..., None] + (0 if x is None else torch.exp(Lambda) * x)  # (b, d, n)
    return (W[0] * x).real.sum(-1).float(), x


def s4_kernel_step(self, u, state):
    """u (b, d), state None or C and x (b, d, n) -> y (b, d), state. Finding C costs far more than a
    step."""
    A, P, B, C, dt = self.arguments(self)
    if state is None:
        C = s4_recover_C(A, P, C, dt, self.length)[0].to(A.dtype)  # (d, n)
        state = C, torch.zeros(*u.shape, A.shape[-1], dtype=A.dtype, device=u.device)  # (b, d, n)
    y, x = s4_step(A, P, B, state[0], dt, state[1], u)
    return y, (state[0], x)


def attention_step(self, x, state):
    """x (b, d), state None or the keys and values so far -> y (b, d), state. A model with its own
    `attend` calls it on all positions so far and keeps the last."""
    start = 0 if state is None else state[0].shape[2]
    q, k, v = self.project(x[:, None], start)  # (b, h, 1, e)
    k, v = (k, v) if state is None else (torch.cat(pair, 2) for pair in zip(state, (k, v)))
    if type(self).attend is Attention.attend:
        first = max(0, (start // self.block - 1) * self.block) if self.block else 0
        y = F.scaled_dot_product_attention(q, k[:, :, first:], v[:, :, first:])  # (b, h, 1, e)
    else:  # all positions, with one real query
        y = self.attend(F.pad(q, (0, 0, start, 0)), k, v, None)[:, :, -1:]
    return self.merge(y)[:, 0], (k, v)


def transformer_block_step(self, x, state):
    y, state = self.mixer.step(self.norm1(x), state)
    x = x + y  # (b, d)
    return x + self.ff(self.norm2(x)), state


def ssm_block_step(self, x, state):
    y, state = self.mixer.step(self.norm(x) if self.pre else x, state)
    return x + y if self.pre else self.norm(x + y), state  # (b, d)


def can_step(self):
    """Return whether all layers have a recurrent form. Other models generate by computing
    everything anew."""

    def steps(part):  # a class that replaces `forward` does not inherit `step`
        return "step" in next(
            vars(base) for base in type(part).__mro__ if {"step", "forward"} & vars(base).keys()
        )

    return all(
        steps(part)
        for layer in self.layers
        for part in (layer, layer.mixer, getattr(layer.mixer, "kernel", layer))
    )


def backbone_step(self, x, t, states):
    """Compute position t of a causal backbone in eval mode, equal to `forward` there: x (b,)
    symbols or (b, channels) samples, the layers' states after position t - 1 (None at the start) ->
    (b, d), states."""
    x = self.encoder(x) + (0 if self.positions is None else self.positions[t])  # (b, d)
    after = []
    for layer, state in zip(self.layers, states or [None] * len(self.layers)):
        x, state = layer.step(x, state)
        after.append(state)
    return x if self.norm is None else self.norm(x), after


SSM.step, Diagonal.step, S4.step, Attention.step = (
    ssm_step,
    diagonal_step,
    s4_kernel_step,
    attention_step,
)
TransformerBlock.step, SSMBlock.step = transformer_block_step, ssm_block_step
Backbone.step, Backbone.can_step = backbone_step, can_step


if __name__ == "__main__":
    listing = runpy.run_path(str(Path(__file__).parent / "results" / "listing.py"))
    raise SystemExit(listing["exit_code"](listing["print_models"]))
