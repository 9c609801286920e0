"""Self-pretraining (SPT) in one file: the whole algorithm. The other files do it at full size.

    python micro.py      two to three minutes on one CPU core; needs only torch; shows seed 0

The paper (Amos et al. 2024, "Never Train from Scratch"): trained from scratch, S4 looks far better
than a Transformer. Let both first fill in hidden parts of their own training inputs, without labels
and without other data, and they come close. A toy that is made for it, so that filling in needs
what the label needs; accuracy on fresh data in percent, seeds 0 to 9, `compare(seed)`:

    Transformer, from scratch      78.5 71.1 78.5 79.2 73.5 79.4 74.3 75.6 74.0 76.5
    Transformer, self-pretrained   95.5 99.5 99.0 98.4 99.0 99.2 97.8 97.4 99.3 99.2
    S4, from scratch               99.0 98.1 99.0 99.4 98.6 98.8 99.3 99.3 99.2 98.9
    S4, self-pretrained            99.6 99.7 99.8 99.8 99.6 99.6 99.6 99.8 99.7 99.8

From scratch, 1,600 passes let the Transformer learn its 1,000 examples by heart. Four times the
passes give 81.3 85.9 84.8, four times the examples 94.0 80.8 93.0 (seeds 0 to 2). Learning rates
are those of a first trial. This file repeats on purpose what others hold, and imports none."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

LENGTH, KINDS = 32, 8  # of a sequence: symbols, and kinds of symbols
EXAMPLES, BATCH, PASSES = 1_000, 32, 1_600  # a pass: forward and backward, of one batch
WIDTH, LAYERS, HEADS, STATES = 64, 2, 4, 32  # shapes: b batch, l LENGTH, d WIDTH, N STATES


# ---- 1  The task: is the second half a copy of the first? ----------------------------------------
# Label 1: yes. Label 0: no, four places are drawn anew. The natural way to tell is to compare
# positions that are 16 apart, and there is one bit per example to find that out.
# At full size: data.py and tasks/. The paper's tasks have up to 65,536 positions.
def draw(n):
    """Return sequences (n, LENGTH) and labels (n,)."""
    first = torch.randint(KINDS, (n, LENGTH // 2))
    places = torch.rand(first.shape).argsort(1) < 4  # four of each row
    other = torch.where(places, torch.randint(KINDS, first.shape), first)
    labels = torch.randint(2, (n,))
    return torch.cat((first, torch.where(labels[:, None] == 1, first, other)), 1), labels


# ---- 2  The mask: some ten symbols to predict per example, without labels ------------------------
# At full size: pretrain.py, for symbols, pixels and sounds; or causally, predicting the next one.
def hide(x):
    """Hide each symbol of x (b, l) with probability 0.3. Return x with a mask symbol, and where."""
    hidden = torch.rand(x.shape) < 0.3
    return x.masked_fill(hidden, KINDS), hidden  # (b, l) both


# ---- 3  A block of a Transformer: every position looks at every other ----------------------------
# At full size: `attention` in kernels.py, which does not store the (l, l) weights.
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ff1, self.ff2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):  # (b, l, d)
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)  # (b, heads, l, l)
        x = x + self.out((weights @ v).transpose(1, 2).flatten(2))  # (b, l, d)
        return x + self.ff2(F.gelu(self.ff1(self.norm2(x))))  # a small network for each position


# ---- 4  A block of S4: a linear recurrence, all positions at once --------------------------------
# Each channel u has a recurrence with N states x (C and the step dt are its own; at first x = 0):
#     x[k] = Abar x[k-1] + Bbar u[k],    y[k] = C x[k]
# Insert the first equation into itself: y is a convolution of u with a kernel K:
#     y[k] = sum_j K[j] u[k-j],          K[j] = C Abar^j Bbar
# Abar and Bbar sample a differential equation x' = A x + B u (bilinear rule, h = dt / 2):
#     Abar = (1 - h A)^-1 (1 + h A),     Bbar = (1 - h A)^-1 dt B
# With HiPPO's A and B, x holds the past of u as coefficients of polynomials. In a suitable basis
# A = diag(a) - P P*, with a vector P. So the spectrum of K, its discrete Fourier transform at the l
# roots of unity w (w^l = 1), is cheap:
#  1  A geometric series: sum_(k<l) K[k] w^k = C (1 - Abar^l) (1 - w Abar)^-1 Bbar.
#     C~ = C (1 - Abar^l) is trained in place of C, so nobody needs Abar^l.
#  2  Insert Abar and Bbar; (1 - h A)^-1 cancels: it is dt C~ [(1-w) - h (1+w) A]^-1 B.
#  3  The bracket is D + g P P*, with g = h (1+w) and D = (1-w) - g diag(a). Its inverse is
#     D^-1 - g D^-1 P P* D^-1 / (1 + g P* D^-1 P) (Woodbury): sums over the N states.
# A second kernel reads the future. At full size: kernels.py, without the tensor D.


def hippo():
    """Return a, P and B of HiPPO in that basis, complex (N,): conjugate pairs."""
    n = torch.arange(STATES, dtype=torch.float64)
    B, P = (2 * n + 1).sqrt(), (n + 0.5).sqrt()
    A = -torch.tril(B[:, None] * B, -1) - torch.diag(n + 1)  # (N, N)
    skew = A + P[:, None] * P + torch.eye(STATES) / 2  # skew.T = -skew, so -1j skew is Hermitian
    frequencies, V = torch.linalg.eigh(-1j * skew)
    return -0.5 + 1j * frequencies, V.mH @ P.to(V.dtype), V.mH @ B.to(V.dtype)


def kernel(a, P, B, C, dt, l):
    """Return K (2, d, l) by steps 1 to 3, of a, P, B (N,), C~ (2, d, N), dt (d,)."""
    w = torch.exp(-2j * math.pi * torch.arange(l // 2 + 1) / l)  # half of them, as K is real
    h = dt[:, None] / 2  # (d, 1)
    g = h * (1 + w)  # (d, l/2+1)
    D = (1 - w) - g[:, None] * a[:, None]  # (d, N, l/2+1)
    inverse = 1 / D
    CB, CP, PB, PP = (  # (..., d, l/2+1)
        (v[..., None] * inverse).sum(-2) for v in (C * B, C * P, P.conj() * B, P.conj() * P)
    )
    return torch.fft.irfft(2 * h * (CB - g * CP * PB / (1 + g * PP)), l)


class S4(nn.Module):
    def __init__(self):
        super().__init__()
        a, P, B = (v[: STATES // 2].to(torch.complex64) for v in hippo())  # one of each pair
        self.log_decay, self.frequency = nn.Parameter((-a.real).log()), nn.Parameter(a.imag)
        self.P, self.B = (nn.Parameter(torch.view_as_real(v).clone()) for v in (P, B))
        self.C = nn.Parameter(torch.randn(2, WIDTH, STATES // 2, 2))  # C~: of past and future
        self.log_dt = nn.Parameter(torch.empty(WIDTH).uniform_(math.log(0.01), math.log(0.3)))
        self.skip = nn.Parameter(torch.randn(WIDTH))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x):  # (b, l, d)
        l = x.shape[1]
        a = torch.complex(-self.log_decay.exp(), self.frequency)  # x decays, whatever is learned
        parameters = a, *map(torch.view_as_complex, (self.P, self.B, self.C))
        a, P, B, C = (torch.cat((v, v.conj()), -1) for v in parameters)
        K, back = kernel(a, P, B, C, self.log_dt.exp(), l)  # (d, l) both
        # An FFT convolves on a circle. On one of 2 l points, the end does not meet the beginning.
        circle = torch.cat((K, back.flip(-1)), -1)  # (d, 2 l): lags 0 .. l-1, then -l .. -1
        u = self.norm(x).mT  # (b, d, l)
        y = torch.fft.irfft(torch.fft.rfft(u, 2 * l) * torch.fft.rfft(circle), 2 * l)[..., :l]
        y = F.gelu(y + self.skip[:, None] * u).mT  # (b, l, d)
        return x + F.glu(self.out(y), -1)  # gated; mixes the channels of a position


# ---- 5  One backbone, two output layers ----------------------------------------------------------
# At full size: models.py for the paper's models, zoo/ for many others.
class Network(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.embed = nn.Embedding(KINDS + 1, WIDTH)
        angles = torch.arange(LENGTH)[:, None] * 1e4 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
        waves = torch.stack((angles.sin(), angles.cos()), -1).flatten(1)  # (l, d)
        self.positions = nn.Parameter(waves) if block is Attention else 0  # S4 knows the order
        self.blocks = nn.Sequential(*(block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.fill, self.label = nn.Linear(WIDTH, KINDS), nn.Linear(WIDTH, 2)

    def forward(self, x):  # (b, l) -> (b, l, d)
        return self.blocks(self.embed(x) + self.positions)


# ---- 6  Two losses, one training loop ------------------------------------------------------------
# At full size: the loops of pretrain.py and finetune.py, with validation, checkpoints and GPUs.
def fill_loss(network, x, labels):
    """Stage 1, self-pretraining: predict what is hidden. Labels are not used."""
    seen, hidden = hide(x)
    return F.cross_entropy(network.fill(network(seen)[hidden]), x[hidden])


def label_loss(network, x, labels):
    """Stage 2: predict the label, from the mean over positions."""
    return F.cross_entropy(network.label(network(x).mean(1)), labels)


def train(network, loss, x, labels, passes, lr):
    """Take optimiser steps on random batches; the learning rate warms up, then falls to 0."""
    optimizer = torch.optim.AdamW(network.parameters(), lr)
    for i in range(passes):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1, (i + 1) / 50) * (1 + math.cos(math.pi * i / passes)) / 2
        rows = torch.randint(len(x), (BATCH,))
        optimizer.zero_grad()
        loss(network, x[rows], labels[rows]).backward()
        optimizer.step()


# ---- 7  The comparison, at equal passes ----------------------------------------------------------
def compare(seed, passes=PASSES):
    """Train four networks, print and return their accuracies on fresh data in percent."""
    torch.manual_seed(seed)
    (x, labels), (fresh, answers) = draw(EXAMPLES), draw(2_000)
    scores = []
    for name, block, lr in ("Transformer", Attention, 3e-3), ("S4", S4, 4e-3):
        for start, first in ("from scratch", 0), ("self-pretrained", passes // 2):
            torch.manual_seed(seed)  # the same weights for both starts
            network = Network(block)
            train(network, fill_loss, x, labels, first, lr)
            if first:
                seen, hidden = hide(fresh[:1])
                filled = torch.where(hidden, network.fill(network(seen)).argmax(-1), seen)
                for title, rows in ("sequence", fresh), ("hidden", seen), ("filled in", filled):
                    print(f"    {title:10}", *("_" if i == KINDS else i for i in rows[0].tolist()))
            train(network, label_loss, x, labels, passes - first, lr)
            with torch.no_grad():
                guesses = network.label(network(fresh).mean(1)).argmax(-1)  # (n,)
            scores.append(100 * (guesses == answers).float().mean().item())
            print(f"{name:12} {start:16} {scores[-1]:5.1f} %", flush=True)
    return scores


if __name__ == "__main__":
    torch.set_num_threads(1)
    compare(seed=0)
