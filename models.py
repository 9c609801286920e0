"""Models: a table of architectures, thin layers over kernels.py, one backbone with two heads.

    Backbone      symbols or samples (b, l) -> features (b, l, d)
    Denoiser      backbone + a linear head on the positions to be predicted         stage 1, pretrain.py
    Classifier    backbone + pooling over the sequence + a head                     stage 2, finetune.py

Read `ARCH`, then `S4` and `Attention` (the two sequence mixers that the paper compares), then `Backbone`. Sizes are
b batch, l length, d width, h heads, n stored states; matrices are upper-case and explained in kernels.py. "Paper" is
Amos et al. 2024, "Never Train from Scratch"; its table 4 fixes the Transformers' sizes below, and S4's are those of Gu
et al. 2022 as the paper's official configurations spell them out.
"""
import math
import types

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from kernels import attention, fft_conv, hippo_nplr, rotary, s4_kernel, truncation_correction

# One row per (task, model). A dash means "not part of this architecture".
#   transformer  paper table 4, rows marked with a dagger: the sizes of Tay et al. 2020, sinusoidal positions
#   rotary       paper table 4, "Transformer + Rotary"
#   s4           Gu et al. 2022, table 11. n_ssm: how many copies of (A, P, B) there are for the d channels to share
# block: attention is cut into blocks of that many positions.  norm, place: which norm, before (pre) or after (post) the
# residual sum.  dt_lr, ssm_lr: learning rates of the step size and of A, P, B; "main" follows the rest of the model.
# dropout: inside S4 and on the residual branch, whole channels of a sequence; Transformers have none.  sCIFAR's
# Transformer is Image's (appendix C.1.6). The official S4 for Speech Commands pretrains with LayerNorm and finetunes
# with BatchNorm, an accident: here it has BatchNorm in both.
ARCH = """
task            model       layers   d heads   ff block state n_ssm norm  place dt_min dt_max  dt_lr ssm_lr dropout
listops         transformer      6 512     8 1024     -     -     - layer pre        -      -      -      -       -
listops         rotary           6 512     8 1024     -     -     - layer pre        -      -      -      -       -
listops         s4               8 128     -    -     -    64   128 batch post   0.001    0.1   main  0.001       -
text            transformer      6 512     8 1024     -     -     - layer pre        -      -      -      -       -
text            rotary           6 512     8 1024     -     -     - layer pre        -      -      -      -       -
text            s4               6 256     -    -     -    64   256 batch pre    0.001    0.1   main  0.001       -
retrieval       transformer      4 128     4  512     -     -     - layer pre        -      -      -      -       -
retrieval       rotary           6 128     4  512     -     -     - layer pre        -      -      -      -       -
retrieval       s4               6 256     -    -     -    64   256 batch pre    0.001    0.1   main  0.001       -
image           transformer      3  64     4  128     -     -     - layer pre        -      -      -      -       -
image           rotary           6 256     4  512     -     -     - layer pre        -      -      -      -       -
image           s4               6 512     -    -     -    64     2 layer post   0.001    0.1   main  0.001     0.1
pathfinder      transformer      4 128     8  128     -     -     - layer pre        -      -      -      -       -
pathfinder      rotary           6 128     4  512     -     -     - layer pre        -      -      -      -       -
pathfinder      s4               6 256     -    -     -    64   256 batch pre    0.001    0.1  0.001  0.001       -
pathx           transformer      4 128     8  128  4096     -     - layer pre        -      -      -      -       -
pathx           rotary           5 128     4  512  4096     -     - layer pre        -      -      -      -       -
pathx           s4               6 256     -    -     -    64   256 batch pre   0.0001    0.1 0.0005 0.0005       -
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
text256         rotary           3  64     2  128     -     -     - layer pre        -      -      -      -       -
text256         s4               3  64     -    -     -    16    64 batch pre    0.001    0.1  0.001  0.001       -
text_demo       rotary           3  64     2  128     -     -     - layer pre        -      -      -      -       -
text_demo       s4               3  64     -    -     -    16    64 batch pre    0.001    0.1  0.001  0.001       -
listops_demo    transformer      3  64     4  128     -     -     - layer pre        -      -      -      -       -
listops_demo    rotary           3  64     4  128     -     -     - layer pre        -      -      -      -       -
listops_demo    s4               3  64     -    -     -    16    64 batch pre    0.001    0.1  0.001  0.001       -
pathfinder_demo transformer      3  32     2   64     -     -     - layer pre        -      -      -      -       -
pathfinder_demo rotary           3  32     2   64     -     -     - layer pre        -      -      -      -       -
pathfinder_demo s4               3  32     -    -     -    16    32 batch pre    0.001    0.1  0.001  0.001       -
"""


def read_table(text):
    """A whitespace table as a list of {column: string} in row order; cells that are a dash are left out."""
    head, *rows = [line.split() for line in text.strip().splitlines() if not line.lstrip().startswith("#")]
    for row in rows:
        assert len(row) == len(head), f"table row has {len(row)} cells, the head {len(head)}: {' '.join(row)}"
    return [{key: cell for key, cell in zip(head, row) if cell != "-"} for row in rows]


def arch(task, model):
    """The row of `ARCH` as a plain dict (numbers converted), or None. It is saved in config.json and in checkpoints."""
    for row in read_table(ARCH):
        if (row["task"], row["model"]) == (task, model):
            def value(cell):
                try:
                    return int(cell) if cell.isdigit() else float(cell)
                except ValueError:
                    return cell
            return {key: value(cell) for key, cell in row.items()}
    return None


# ---------------------------------------------------------------------------------------------------------------------
# The two sequence mixers
# ---------------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Multi-head self-attention, (b, l, d) -> (b, l, d).

    One Linear makes queries, keys and values. torch's default initialisation depends only on the input width, so this
    is the same as three independent projections. (The official code copies one projection into q, k, v and o, which
    makes every position attend to itself at the start; see README, "Where we differ".)
    """

    def __init__(self, d, heads, use_rotary, causal, block=None):
        super().__init__()
        self.heads, self.use_rotary, self.causal, self.block = heads, use_rotary, causal, block
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)

    def forward(self, x, lengths=None):
        b, l, d = x.shape
        q, k, v = (y.view(b, l, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(d, -1))   # (b, h, l, e)
        if self.use_rotary:
            q, k = rotary(q), rotary(k)
        y = attention(q, k, v, causal=self.causal, block=self.block, lengths=lengths)
        return self.out(y.transpose(1, 2).reshape(b, l, d))                                   # (b, l, d)


class S4(nn.Module):
    """The S4 layer, (b, l, d) -> (b, l, d): one linear recurrence per channel as a convolution, then GELU and GLU.

    Paper, eq. 2. Each channel has its own step size dt and output map C; A, P and B exist in `n_ssm` copies that the
    channels share in turn. Bidirectional layers have a second C for the reversed direction, everything else shared.
    C is trained in the truncation-corrected form C~ = C (I - Abar^length), which ties it to the task's `length`: the
    kernel is always made at that length and then cut to the batch's.

    `special` names the parameters with a learning rate of their own and no weight decay: A, P, B and log dt set time
    scales, where a step that is small for a weight can move a pole across the unit circle.
    """

    def __init__(self, d, state, n_ssm, dt_min, dt_max, length, causal, dt_lr, ssm_lr, dropout=0.0):
        super().__init__()
        self.d, self.causal, self.length = d, causal, length
        A, P, B = (v.repeat(n_ssm, 1) for v in hippo_nplr(state))                             # (n_ssm, n)
        log_dt = torch.rand(d) * math.log(dt_max / dt_min) + math.log(dt_min)                 # log-uniform
        # Complex standard normal, one output map per direction.
        C = torch.randn(1 if causal else 2, d, state // 2, dtype=torch.complex64)             # (c, d, n)
        repeats = d // n_ssm
        C = truncation_correction(A.repeat(repeats, 1), P.repeat(repeats, 1), C, log_dt.exp(), length)
        self.log_dt = nn.Parameter(log_dt)
        self.A_log_re = nn.Parameter((-A.real).log().float())       # Re A = -exp(.) < 0: the recurrence stays stable
        self.A_im = nn.Parameter(A.imag.float())
        # Complex parameters are stored as real pairs, so that Adam keeps moments per component.
        self.P = nn.Parameter(torch.view_as_real(P).float().clone())
        self.B = nn.Parameter(torch.view_as_real(B).float().clone())
        self.C = nn.Parameter(torch.view_as_real(C.to(torch.complex64)).clone())
        self.D = nn.Parameter(torch.randn(d))                        # the skip connection y += D u
        self.dropout = nn.Dropout1d(dropout)                         # one mask along the length, of (b, d, l)
        self.out = nn.Linear(d, 2 * d)
        # None stands for the main learning rate.
        self.special = dict(A_log_re=ssm_lr, A_im=ssm_lr, P=ssm_lr, B=ssm_lr, log_dt=dt_lr)

    @torch.compiler.disable                                          # complex arithmetic: the compiler gains nothing
    def kernel(self):
        """The convolution kernels (c, d, length), float32."""
        A = torch.complex(-self.A_log_re.float().exp().clamp(min=1e-4), self.A_im.float())    # (n_ssm, n)
        P, B, C = (torch.view_as_complex(v.float()) for v in (self.P, self.B, self.C))
        A, P, B = (v.repeat(self.d // v.shape[0], 1) for v in (A, P, B))                      # (d, n) channels in turn
        return s4_kernel(A, P, B, C, self.log_dt.float().exp(), self.length)

    def forward(self, x, lengths=None):
        u = x.transpose(1, 2)                                                                 # (b, d, l)
        if lengths is not None:       # a convolution does not know padding; zeros do not move its state
            u = u * inside(lengths, x.shape[1])[:, None]
        K = self.kernel()
        y = fft_conv(u, K[0], None if self.causal else K[1]) + self.D[:, None] * u            # (b, d, l)
        return F.glu(self.out(self.dropout(F.gelu(y)).transpose(1, 2)), dim=-1)               # (b, l, d)


# ---------------------------------------------------------------------------------------------------------------------
# Norms, layers, backbone
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
    """x + attention(norm(x)), then x + ff(norm(x)). No dropout (official configurations)."""

    def __init__(self, d, heads, ff, use_rotary, causal, block):
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(d), LayerNorm(d)
        self.mixer = Attention(d, heads, use_rotary, causal, block)
        self.ff = nn.Sequential(nn.Linear(d, ff), nn.GELU(), nn.Linear(ff, d))

    def forward(self, x, lengths=None):
        x = x + self.mixer(self.norm1(x), lengths)
        return x + self.ff(self.norm2(x))


class S4Layer(nn.Module):
    """x + s4(norm(x)), or norm(x + s4(x)) where the norm comes after. The GLU inside S4 takes the place of the FF."""

    def __init__(self, d, norm, place, mixer, dropout=0.0):
        super().__init__()
        self.pre, self.norm, self.mixer = place == "pre", NORMS[norm](d), mixer
        self.dropout = nn.Dropout1d(dropout)

    def forward(self, x, lengths=None):
        y = self.mixer(self.norm(x, lengths) if self.pre else x, lengths)                     # (b, l, d)
        x = x + self.dropout(y.transpose(1, 2)).transpose(1, 2)                               # one mask for the length
        return x if self.pre else self.norm(x, lengths)


def sinusoids(l, d):
    """Fixed sinusoidal positions (l, d): sin and cos interleaved, base 10000 (Vaswani et al. 2017)."""
    angle = torch.arange(l, dtype=torch.float64)[:, None] * 10000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1).float()


class Backbone(nn.Module):
    """(b, l) symbols or (b, l, channels) samples -> (b, l, d). All that self-pretraining hands on to finetuning.
    Several documents an example, (b, k, l) symbols with lengths (b, k) -> (b, k, l, d), are b * k sequences to it.

    sizes: a row of `ARCH`. vocab: number of symbols, or None for continuous input. mask_channel: one more input
    channel that is 1 where the sample was masked out (masked pretraining of continuous input only).
    """

    def __init__(self, sizes, length, vocab=None, channels=1, mask_channel=False, causal=False):
        super().__init__()
        s = types.SimpleNamespace(**sizes)
        d = s.d
        self.encoder = nn.Embedding(vocab, d) if vocab else nn.Linear(channels + mask_channel, d)
        # The Transformer of table 1 knows positions from the input only; rotary and S4 carry them in the mixer.
        positions = sinusoids(length, d) if s.model == "transformer" else None
        self.register_buffer("positions", positions, persistent=False)
        if s.model == "s4":
            drop = getattr(s, "dropout", 0.0)
            self.layers = nn.ModuleList(
                S4Layer(d, s.norm, s.place, S4(d, s.state, s.n_ssm, s.dt_min, s.dt_max, length, causal,
                                               None if s.dt_lr == "main" else s.dt_lr, s.ssm_lr, drop), drop)
                for _ in range(s.layers))
        else:
            self.layers = nn.ModuleList(
                TransformerLayer(d, s.heads, s.ff, s.model == "rotary", causal, getattr(s, "block", None))
                for _ in range(s.layers))
        # A residual stream that is normalised only on its way into each layer leaves the last sum unnormalised.
        self.norm = NORMS[s.norm](d) if s.place == "pre" else None

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
# Heads
# ---------------------------------------------------------------------------------------------------------------------


class Denoiser(nn.Module):
    """Stage 1: predicts the symbol or sample at chosen positions. `outputs` is the vocabulary (or gray levels) under
    cross-entropy, the number of channels under L1."""

    def __init__(self, backbone, outputs):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(_width(backbone), outputs)

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
# Optimiser groups, description
# ---------------------------------------------------------------------------------------------------------------------


def param_groups(model, lr, weight_decay):
    """Groups for AdamW. SSM parameters keep their own learning rate and are not decayed; everything else, biases and
    norm gains included, takes the recipe's (as in the official code). A schedule must scale each `initial_lr`."""
    rates = {id(getattr(layer, name)): rate or lr
             for layer in model.modules() if isinstance(layer, S4) for name, rate in layer.special.items()}
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
