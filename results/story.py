"""The story of kernels.py with numbers: `python kernels.py`, ten seconds, no data. Draws results/kernels.png.

One S4 layer, computed in five ways, each beside the recurrence in float64; then what its kernels look like.
"""
import math
import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from compare.drawing import OTHER, SCRATCH, SPT, write
from engine.folder import read_checkpoint
from kernels import (discretize, fft_conv, hippo_nplr, s4_kernel, s4_kernel_naive, s4_recover_C, ssm_scan,
                     truncation_correction)
from models import DLR, S4, Backbone, config, randomise
from recipes import arch
from tasks import restored

PICTURE = ROOT / "results" / "kernels.png"
WEIGHTS = ROOT / "results" / "weights" / "text256-s4-pretrain"

# ---- Five ways to the same output ------------------------------------------------------------------------------------

def told(what, exact, make):
    """Print a line of the walk: what was computed, its largest error over the largest value, its time -> the result."""
    start = time.perf_counter()
    found = make()
    seconds, error = time.perf_counter() - start, ((found - exact).abs().max() / exact.abs().max()).item()
    print(f"{what:<72} {error:8.0e} {seconds:9.4f} s")
    return found


def walk(l=2048, d=4, N=16):
    """Print the steps from the recurrence to the fast kernel, for d channels of a random signal of length l."""
    torch.manual_seed(0)
    A, P, B = (v.repeat(d, 1) for v in hippo_nplr(N))                                         # (d, n)
    C, u = torch.randn(1, d, N // 2, dtype=torch.complex128), torch.randn(1, d, l).double()   # (1, d, n), (1, d, l)
    dt = torch.logspace(-3, -1, d, dtype=torch.float64)                                       # (d,)
    Abar, Bbar = discretize(A, P, B, dt)                                                      # (d, N, N), (d, N)
    whole = torch.cat((C[0], C[0].conj()), -1)                                                # (d, N) all states

    print(f"{d} channels of S4, N = {N} states, a signal of {l:,} steps\n{'':<72} {'error':>8} {'time':>11}")
    start = time.perf_counter()
    y = ssm_scan(Abar, Bbar, whole, u)                                                        # (1, d, l)
    print(f"{'the recurrence x[k] = Abar x[k-1] + Bbar u[k], y[k] = C x[k], float64':<72} {'-':>8} "
          f"{time.perf_counter() - start:9.4f} s")

    def powers():
        x, K = Bbar, []
        for _ in range(l):
            K.append((whole * x).sum(-1).real)
            x = torch.einsum("dmn,dn->dm", Abar, x)
        return torch.stack(K, -1)                                                             # (d, l)

    def convolved(K):
        return torch.stack([(K[:, : t + 1] * u[0, :, : t + 1].flip(-1)).sum(-1) for t in range(l)], -1)[None]

    K = powers()
    told("is a convolution: y[t] = sum_j K[j] u[t-j], K[k] = C Abar^k Bbar", y, lambda: convolved(K))
    told("which one FFT computes, in float32: fft_conv", y, lambda: fft_conv(u, K).double())
    C_tilde = truncation_correction(A, P, C, dt, l)
    told("The kernel K itself, one power of Abar after another", K, powers)
    told("by four Cauchy sums on the roots of unity, float64: s4_kernel_naive", K,
         lambda: s4_kernel_naive(A, P, B, C_tilde, dt, l)[0])
    told("by sums of geometric sequences, one matrix product, float32: s4_kernel", K,
         lambda: s4_kernel(A, P, B, C_tilde.to(torch.complex64), dt, l)[0])
    told("and C is found again where a model generates: s4_recover_C", C, lambda: s4_recover_C(A, P, C_tilde, dt, l))


# ---- The picture -----------------------------------------------------------------------------------------------------

def remembered(N, u, h):
    """What HiPPO's state of size N says of a signal u (l,) on a grid of step h, at its end -> (l,)."""
    n, l = torch.arange(N, dtype=torch.float64), len(u)
    B = torch.sqrt(2 * n + 1)
    A = -torch.tril(B[:, None] * B, -1) - torch.diag(n + 1)
    eye, x = torch.eye(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    inverse = torch.linalg.inv(eye - h / 2 * A)
    for value in u:
        x = inverse @ ((eye + h / 2 * A) @ x + h * B * value)
    clock = np.exp(-h * np.arange(l)[::-1])                                                   # e^-s of the past
    return sum(x[i].item() * math.sqrt(2 * i + 1) * np.polynomial.Legendre.basis(i)(2 * clock - 1) for i in range(N))


def before_and_after(folder):
    """S4's kernels of the first layer, before and after self-pretraining: (c, d, l) both."""
    saved = read_checkpoint(folder / "best.pt")
    task, trained = restored(saved["task"]), {name: value for name, value in saved["model"].items()}
    torch.manual_seed(saved["config"]["seed"])                                                # as pretrain.py starts
    backbone = Backbone(config(saved["config"]["arch"], task))
    kernel = backbone.layers[0].mixer.kernel
    before = kernel(task.length)
    prefix = "backbone.layers.0.mixer.kernel."
    kernel.load_state_dict({name.removeprefix(prefix): v for name, v in trained.items() if name.startswith(prefix)})
    return before, kernel(task.length)


@torch.no_grad()
def draw(path):
    import matplotlib.pyplot as plt
    plt.switch_backend("Agg")
    plt.rcParams.update({"font.size": 8, "axes.titlesize": 8, "lines.linewidth": 1})
    figure, axes = plt.subplots(2, 3, figsize=(10, 5))
    task = restored(read_checkpoint(WEIGHTS / "best.pt")["task"])
    torch.manual_seed(0)
    for axis, (title, make) in zip(axes[0], {
            "start of S4: HiPPO": lambda: S4(config(arch("text256", "s4"), task)),
            "start of DLR": lambda: DLR(config(arch("text256", "dlr"), task)),
            "random start of S4": lambda: randomise(S4(config(arch("text256", "s4"), task)))}.items()):
        K = make()(task.length)[0, ::32]                                                      # (2, l) two channels
        for one, colour in zip(K, (SPT, OTHER)):
            axis.plot(one / one.abs().max(), color=colour)
        axis.set(title=f"kernels at the {title}", xlabel="lag k", ylabel="K[k], largest = 1", ylim=(-1.1, 1.1))
    l, h = 1500, 0.004
    past, u = np.arange(-l + 1, 1), torch.sin(torch.arange(l) * 0.02) + 0.5 * torch.sin(torch.arange(l) * 0.051)
    axes[1, 0].plot(past, u, color="black", linestyle=":", label="signal")
    for N, colour in ((16, SPT), (64, OTHER)):
        axes[1, 0].plot(past, remembered(N, u, h), color=colour, label=f"from {N} numbers")
    axes[1, 0].set(title="what HiPPO's state remembers", xlabel="steps before now", ylim=(-3, 2))
    axes[1, 0].legend(loc="lower left", frameon=False, fontsize=7)
    before, after = before_and_after(WEIGHTS)
    change = (after - before).abs().amax(-1) / before.abs().amax(-1)                          # (c, d)
    for axis, i in zip(axes[1, 1:], change[0].argsort(descending=True)[[0, 8]].tolist()):
        axis.plot(before[0, i], color=SCRATCH, label="before self-pretraining")
        axis.plot(after[0, i], color=SPT, label="after")
        axis.set(title=f"S4 on IMDb: layer 1, channel {i}", xlabel="lag k, characters", ylabel="K[k]", xlim=(0, 64))
        axis.legend(loc="upper right", frameon=False, fontsize=7)
    figure.tight_layout()
    write(path, lambda file: figure.savefig(file, format="png", dpi=130))


def main():
    walk()
    print()
    draw(PICTURE)


if __name__ == "__main__":
    main()
