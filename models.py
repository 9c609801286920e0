"""Models: S4, DLR and Transformers as the paper compares them; one backbone with two heads.

    Backbone      symbols (b, l) or samples (b, l, channels) -> features (b, l, d)
    Denoiser      backbone + a linear head on the positions to be predicted         stage 1, pretrain.py
    Classifier    backbone + pooling over the sequence + a head                     stage 2, finetune.py

The sections follow the paper's argument: a linear recurrence is a convolution (`SSM`); diagonal (`DLR`) and diagonal
plus low rank (`S4`); nothing set by hand (`randomise`); the other way to mix positions (`Attention`). A first reading
may skip all that is called `step`, which generates. Sizes are in recipes.py, other architectures in
zoo/. `MODELS`, at the end, has a line for each --model; a new one is a file of its own in zoo/.

Every class takes one object `c`, all that is known about the model: its sizes, the extras of its line, what the task
says (length, vocab, channels), whether it is causal, and the number of the layer. Sizes are b batch, l length, d width,
h heads, e width of a head, n stored states (of S4 one in each conjugate pair, of DLR all), in shapes c kernels per
channel (2 when bidirectional); matrices are upper-case and explained in kernels.py. "Paper" is Amos et al. 2024.
"""
import math
from collections import namedtuple
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from gradients import MaskedNorm
from kernels import (attention, diagonal_kernel, fft_conv, hippo_nplr, inside, rotary, s4_kernel, s4_recover_C,
                     s4_step, true_lengths, truncation_correction)

# What --arch may change, declared as `keys` by the classes that read it. kind: int, float, or the values to choose
# from. default: an ellipsis where a table of sizes must say. A number lies from least (1 if whole, else 0) to most. not
# shown: among a model's sizes only where it is set. inherited: whether finetuning takes it over from pretraining.
Key = namedtuple("Key", "kind default least most shown inherited", defaults=(..., None, 10**9, True, True))
AT_ONCE = dict(cpu=2**22, cuda=2**25)      # values d l of the kernels made in one call; a GPU waits for each launch


class SizeError(ValueError):
    """Sizes that do not fit each other or the task, in one line."""


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
    with None for the main rate. Name an attribute `kernel` only if it is such a module: Figure 4 finds it by this name.
    """

    keys = dict(dropout=Key(float, 0.0, most=1))

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
    `make(*arguments, l)` makes kernels, channel by channel. An argument is (..., d, n) or (d,). A kernel sets self.d.
    """

    def forward(self, l):
        return self.make(*self.arguments(self), l)


def make_kernels(kernels, l):
    """The kernels (c, d, l) of modules of one shape, in one call; large ones in several, to save memory."""
    names = [*kernels[0]._parameters, *kernels[0]._buffers]
    most = AT_ONCE["cuda" if next(kernels[0].parameters()).is_cuda else "cpu"]
    many, made = max(1, most // (kernels[0].d * getattr(kernels[0], "length", l))), []
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
    """

    keys = dict(state=Key(int), dt_min=Key(float), dt_max=Key(float), ssm_lr=Key(float))

    def __init__(self, c):
        super().__init__()
        decay = c.dt_min / 2 * (c.dt_max / c.dt_min) ** torch.rand(c.state)
        self.d = c.d
        self.theta = nn.Parameter(decay.sqrt())                                               # (n,)
        self.Lambda_im = nn.Parameter(torch.arange(c.state) * (2 * math.pi / c.state))        # (n,)
        # Complex parameters are stored as real pairs, so that Adam keeps moments per component.
        self.W = nn.Parameter(torch.randn(c.directions, c.d, c.state, 2) / c.state)           # (c, d, n, 2)
        self.rates = {name: (c.ssm_lr, False) for name in ("theta", "Lambda_im", "W")}

    def arguments(self, p):
        Lambda = torch.complex(-p.theta.float().square(), p.Lambda_im.float())                # (n,)
        return torch.view_as_complex(p.W.float()), Lambda[..., None, :]                       # (c, d, n), (1, n)


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

    keys = dict(state=Key(int), n_ssm=Key(int), dt_min=Key(float), dt_max=Key(float), dt_lr=Key((float, "main")),
                ssm_lr=Key(float))

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

    keys = dict(heads=Key(int), block=Key(int, None), rotary=Key(float, 0.0, most=1, shown=False))

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
        """x (b, l, d) at positions from `start` on -> queries, keys, values, each (b, h, l, e)."""
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
        """Who attends to whom, which subclasses replace: (b, h, l, e) three times -> (b, h, l, e)."""
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


NORMS = {"layer": LayerNorm, "batch": BatchNorm}


class FeedForward(nn.Sequential):
    """Linear, GELU, Linear: (b, l, d) -> (b, l, d)."""

    keys = {}

    def __init__(self, c):
        super().__init__(nn.Linear(c.d, c.ff), nn.GELU(), nn.Linear(c.ff, c.d))


FEED_FORWARD = {"dense": FeedForward}                               # --arch ffn=...


class TransformerBlock(nn.Module):
    """x + mixer(norm(x)), then + ff(norm(x)) of that sum. No dropout (official configurations)."""

    keys = dict(ff=Key(int), ffn=Key(FEED_FORWARD, "dense", shown=False))

    def __init__(self, c, mixer):
        super().__init__()
        self.norm1, self.norm2 = NORMS[c.norm](c.d), NORMS[c.norm](c.d)
        self.mixer = mixer
        self.ff = FEED_FORWARD[c.ffn](c)

    def forward(self, x, lengths=None, *K):      # K: the mixer's kernels, where `Backbone` makes them
        x = x + self.mixer(self.norm1(x, lengths), lengths, *K)
        return x + self.ff(self.norm2(x, lengths))

    def step(self, x, state):
        y, state = self.mixer.step(self.norm1(x), state)
        x = x + y                                                                             # (b, d)
        return x + self.ff(self.norm2(x)), state


class SSMBlock(nn.Module):
    """x + mixer(norm(x)), or norm(x + mixer(x)) where the norm comes after. The mixer's GLU replaces the FF."""

    keys = dict(norm=Key(NORMS), place=Key(("pre", "post")), dropout=Key(float, 0.0, most=1))

    def __init__(self, c, mixer):
        super().__init__()
        self.pre, self.norm, self.mixer = c.place == "pre", NORMS[c.norm](c.d), mixer
        self.dropout = nn.Dropout1d(c.dropout)

    def forward(self, x, lengths=None, *K):
        y = self.mixer(self.norm(x, lengths) if self.pre else x, lengths, *K)                 # (b, l, d)
        # One mask for the length. Adding in this order keeps the (b, d, l) memory layout that the next layer wants.
        x = self.dropout(y.transpose(1, 2)).transpose(1, 2) + x
        return x if self.pre else self.norm(x, lengths)

    def step(self, x, state):
        y, state = self.mixer.step(self.norm(x) if self.pre else x, state)
        return x + y if self.pre else self.norm(x + y), state                                 # (b, d)


# ---- The backbone ----------------------------------------------------------------------------------------------------

class Backbone(nn.Module):
    """(b, l) symbols or (b, l, channels) samples -> (b, l, d). All that self-pretraining hands on to finetuning."""

    keys = dict(layers=Key(int), d=Key(int), norm=Key(NORMS, "layer"))

    def __init__(self, c):
        super().__init__()
        model = MODELS[c.model]
        self.d, self.reads_symbols, self.init_head = c.d, c.vocab is not None, model.init_head
        self.mask_channel = c.mask_channel
        self.encoder = nn.Embedding(c.vocab, c.d) if self.reads_symbols else nn.Linear(c.channels, c.d)
        self.register_buffer("positions", model.positions and model.positions(c.length, c.d), persistent=False)
        try:
            numbered = (SimpleNamespace(**vars(c), layer=i) for i in range(c.layers))
            self.layers = nn.ModuleList(model.block(c, model.mixer(c)) for c in numbered)
        except ValueError as error:                                    # an odd state, say
            raise SizeError(str(error)) from None
        # A residual stream that is normalised only on its way into each layer leaves the last sum unnormalised.
        self.norm = NORMS[c.norm](c.d) if getattr(self.layers[0], "pre", True) else None
        model.init(self)

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
        def steps(part):               # and not a step of a class whose forward pass it has replaced
            of = [next((i for i, base in enumerate(type(part).__mro__) if name in vars(base)), math.inf)
                  for name in ("step", "forward")]
            return of[0] <= of[1] and hasattr(part, "step")

        return all(steps(part) for layer in self.layers
                   for part in (layer, layer.mixer, getattr(layer.mixer, "kernel", layer)))

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


def exactly(head, x):
    """head(x) in float32: bfloat16 is too coarse for samples, and for R2 near 1. A head is a hundredth of the work."""
    with torch.autocast(x.device.type, enabled=False):
        return head(x.float())


class Denoiser(nn.Module):
    """Stage 1: predicts the symbol or sample at chosen positions. `outputs` is the vocabulary (or gray levels) under
    cross-entropy, the number of channels under L1."""

    def __init__(self, backbone, outputs):
        super().__init__()
        self.backbone = backbone
        self.head = backbone.init_head(nn.Linear(backbone.d, outputs))

    def forward(self, x, lengths, hidden):
        """x as in Backbone, hidden as in `at` -> (m, outputs): no logits where no loss is taken."""
        return exactly(self.head, at(self.backbone(x, lengths), hidden))


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
        self.head, self.frozen = backbone.init_head(nn.Sequential(*layers)), False

    def freeze(self):
        """A linear probe: the head alone is trained, on what the backbone gives in evaluation (dropout, BatchNorm)."""
        self.frozen = True
        self.backbone.requires_grad_(False).eval()

    def train(self, mode=True):
        super().train(mode)
        self.backbone.train(mode and not self.frozen)
        return self

    def forward(self, x, lengths=None):
        """x as in Backbone -> (b, outputs); with the head `pair`, of 2 b documents."""
        return self.classify(self.backbone(x, lengths), lengths)

    def classify(self, x, lengths):
        """What the backbone gives, (b, l, d) -> (b, outputs)."""
        lengths = true_lengths(lengths, *x.shape[:2], x.device)                               # (b,)
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
        return exactly(self.head, x)                                                          # (b, outputs)


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
        return outputs, exactly(self.predict, at(features, hidden))


# ---- Optimiser groups ------------------------------------------------------------------------------------------------

HELPERS = set()    # of parameters that only help to train others: not counted, not taken over (zoo/ adds names)


def param_groups(model, lr, weight_decay):
    """Groups for AdamW. Parameters that a module's `rates` name keep their own learning rate, and are decayed only
    where it says so; everything else, biases and norm gains included, takes the recipe's (as in the official code). An
    own rate may be a function of the main one. A schedule must scale each `initial_lr`."""
    own = {id(getattr(module, name)): rate for module in model.modules()
           for name, rate in getattr(module, "rates", {}).items()}
    groups = {}
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        rate, decayed = own.get(id(parameter), (None, True))
        rate = rate(lr) if callable(rate) else rate
        name = "own" if id(parameter) in own else "main"
        group = groups.setdefault((name, rate, decayed), dict(
            params=[], weight_decay=weight_decay if decayed else 0.0, name=name))
        group["lr"] = group["initial_lr"] = lr if rate is None else rate
        group["params"].append(parameter)
    return list(groups.values())


def make_optimizer(model, lr, weight_decay):
    """Of both stages. Another one wants `initial_lr` in its groups."""
    return torch.optim.AdamW(param_groups(model, lr, weight_decay), fused=True)


def count(model):
    return sum(p.numel() for name, p in model.named_parameters() if name.split(".")[-1] not in HELPERS)


# ---- MODELS ----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Model:
    """A line of `MODELS`: block(c, mixer(c)) is a layer. A block that normalises what it returns has `pre` False."""
    block: type
    mixer: object                      # a class, or a partial of classes
    like: str | None = None            # the model whose sizes and recipes it uses where it has none of its own
    extras: dict = field(default_factory=dict)      # other defaults of its keys, and what else its classes find in `c`
    positions: object = None           # function (length, d) -> (length, d), added to the input; else the mixer's task
    init: object = nn.Identity()       # sets the initial weights of a backbone (Identity: as torch draws them)
    init_head: object = nn.Identity()  # the same, of the head on it
    symbols: bool = False              # reads symbols (gray levels, say) wherever the task has them
    weights: object = None             # function(classifier, task, args, say): loads trained ones; finetuned only
    sizes: str = ""                    # tables as in recipes.py, without the column `model`: sizes, recipes, and
    recipes: str = ""                  # what differs from these sizes on some tasks, key=value
    changes: str = ""


MODELS = {
    "transformer": Model(TransformerBlock, Attention, "rotary", positions=sinusoids),
    "rotary": Model(TransformerBlock, Attention, extras=dict(rotary=1.0)),
    "s4": Model(SSMBlock, partial(SSM, S4)),
    "s4_rand": Model(SSMBlock, partial(SSM, S4), "s4", init=randomise, init_head=randomise),
    "dlr": Model(SSMBlock, partial(SSM, DLR), "s4"),
    "dlr_rand": Model(SSMBlock, partial(SSM, DLR), "dlr", init=randomise, init_head=randomise),
}


def keys_of(model, ffn="dense"):
    """{name: Key} of all that the classes of a model declare, those of its feed-forward part included."""
    model, keys = MODELS[model], {}
    mixer = [model.mixer.func, *model.mixer.args] if isinstance(model.mixer, partial) else [model.mixer]
    for part in (*mixer, Backbone, model.block):
        for base in reversed(part.__mro__):
            keys |= vars(base).get("keys", {})
    return keys | (FEED_FORWARD.get(ffn, FeedForward).keys if "ffn" in keys else {})


def config(sizes, task, causal=False, mask_channel=False):
    """The object `c` that all classes here take: sizes as `arch` in recipes.py gives them, extras, what `task` says
    (length, vocab, channels) and causal. mask_channel: one more input channel that is 1 where the sample was masked out
    (masked pretraining on samples only)."""
    model, keys = MODELS[sizes["model"]], keys_of(sizes["model"], sizes.get("ffn", "dense"))
    defaults = {name: key.default for name, key in keys.items() if key.default is not ...}
    reads_symbols = task.channels is None or model.symbols
    return SimpleNamespace(**defaults | model.extras | sizes, length=task.length,
                           vocab=task.vocab if reads_symbols else None,
                           channels=None if reads_symbols else task.channels + mask_channel,
                           mask_channel=mask_channel and not reads_symbols,
                           causal=causal, directions=1 if causal else 2)


if __name__ == "__main__":
    print("what each model costs: python results/costs.py")
