"""Show kernels.py in numbers: `python kernels.py` takes five seconds and no data, and draws
kernels.png. `python -m results.story` draws README's copy, results/kernels.png.

The picture shows kernels at the start of training, and what HiPPO's state remembers."""

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

import kernels
from compare.drawing import OTHER, SPT, write
from files import Parser, exit_code
from models import DLR, S4, config, randomise
from recipes import arch
from use.recurrent import s4_recover_C

COPY = Path(__file__).with_name("kernels.png")

# ---- One output, form by form --------------------------------------------------------------------


def report(what, exact, form, *arguments):
    """Compute form(*arguments) and print one line: what it is, its largest error over the largest
    value, its time -> the result."""
    start = time.perf_counter()
    result = form(*arguments)
    seconds = time.perf_counter() - start
    error = "-"
    if exact is not None:
        error = f"{((result - exact).abs().max() / exact.abs().max()).item():.0e}"
    print(f"{what:<72} {error:>8} {seconds:9.4f} s")
    return result


def power_by_power(Abar, Bbar, C, l):
    """Return K[k] = C Abar^k Bbar, (1, d, l), of Abar (d, N, N), Bbar and C (d, N)."""
    x = Bbar
    K = []
    for _ in range(l):
        K.append((C * x).sum(-1).real)
        x = torch.einsum("dmn,dn->dm", Abar, x)
    return torch.stack(K, -1)[None]


def walk(l=2048, d=4, N=16):
    """Print the steps from the recurrence to the fast kernel, for a random signal."""
    torch.manual_seed(0)
    A, P, B = (v.repeat(d, 1) for v in kernels.hippo_nplr(N))  # (d, n)
    C = torch.randn(1, d, N // 2, dtype=torch.complex128)
    u = torch.randn(1, d, l).double()
    dt = torch.logspace(-3, -1, d, dtype=torch.float64)  # (d,)
    Abar, Bbar = kernels.discretize(A, P, B, dt)  # (d, N, N), (d, N)
    C_all = torch.cat((C[0], C[0].conj()), -1)  # (d, N) all states
    C_tilde = kernels.truncation_correction(A, P, C, dt, l)

    print(f"{d} channels of S4, N = {N} states, a signal of {l:,} steps")
    print(f"{'':<72} {'error':>8} {'time':>11}")
    what = "the recurrence x[k] = Abar x[k-1] + Bbar u[k], y[k] = C x[k], float64"
    y = report(what, None, kernels.ssm_scan, Abar, Bbar, C_all, u)  # (1, d, l)
    what = "its kernel K[k] = C Abar^k Bbar, power by power, float64"
    K = report(what, None, power_by_power, Abar, Bbar, C_all, l)  # (1, d, l)
    what = "y by convolution: y[t] = sum_j K[j] u[t-j], fft_conv_naive"
    report(what, y, kernels.fft_conv_naive, u, K)
    report("y by FFT, in float32: fft_conv", y, kernels.fft_conv, u, K)
    what = "K by four Cauchy sums at roots of unity, float64: s4_kernel_naive"
    report(what, K, kernels.s4_kernel_naive, A, P, B, C_tilde, dt, l)
    what = "K by geometric sequences, as a matrix product, float32: s4_kernel"
    report(what, K, kernels.s4_kernel, A, P, B, C_tilde.to(torch.complex64), dt, l)
    what = "C from the trained C~, needed for generation: s4_recover_C"
    report(what, C, s4_recover_C, A, P, C_tilde, dt, l)


# ---- The picture ---------------------------------------------------------------------------------


def remembered(N, u, h):
    """Return the signal (l,) that HiPPO's state of size N holds at the end of a signal u (l,) with
    step size h."""
    A, B = kernels.hippo_legs(N)
    eye = torch.eye(N, dtype=torch.float64)
    x = torch.zeros(N, dtype=torch.float64)
    inverse = torch.linalg.inv(eye - h / 2 * A)  # the bilinear rule, as in `discretize`
    for value in u:
        x = inverse @ ((eye + h / 2 * A) @ x + h * B * value)
    clock = np.exp(-h * np.arange(len(u))[::-1])  # e^-s of the past
    return np.polynomial.legendre.legval(2 * clock - 1, (x * B).numpy())  # B_n = sqrt(2n+1)


def draw_kernels(axes):
    """Draw two channels of the kernel of S4, DLR and random S4 at the start of training."""
    torch.manual_seed(0)
    task = SimpleNamespace(length=256, vocab=None, channels=1)
    s4 = config(arch("text256", "s4"), task)
    starts = {
        "S4 starts smooth (HiPPO)": S4(s4),
        "DLR starts with all frequencies": DLR(config(arch("text256", "dlr"), task)),
        "random S4: a kernel of a few lags": randomise(S4(s4)),
    }
    channels = (SPT, "kernel of one channel"), (OTHER, "of another")
    for axis, (title, kernel) in zip(axes, starts.items()):
        for K, (colour, label) in zip(kernel(256)[0, ::32], channels):
            axis.plot(K / K.abs().max(), color=colour, label=label)  # (l,)
        axis.set(title=title, xlabel="lag k", ylabel="K[k] / max |K|", ylim=(-1.1, 1.1))


def draw_memory(axis, l=1500, h=0.004):
    """Draw a signal and what HiPPO's state of two sizes holds of it."""
    past = np.arange(-l + 1, 1)
    t = torch.arange(l)
    u = torch.sin(t * 0.02) + 0.5 * torch.sin(t * 0.051)
    axis.plot(past, u, color="black", linestyle=":", label="signal")
    for N, colour in ((16, SPT), (64, OTHER)):
        axis.plot(past, remembered(N, u, h), color=colour, label=f"recovered, N = {N}")
    title = "HiPPO's state keeps the recent past sharply"
    axis.set(title=title, xlabel="step (0: now)", ylim=(-3, 2))


@torch.no_grad()
def draw(path):
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")
    plt.rcParams.update({"font.size": 8, "axes.titlesize": 8, "lines.linewidth": 1})
    figure, axes = plt.subplots(2, 2, figsize=(8, 5))
    axes = axes.ravel()
    draw_kernels(axes)
    draw_memory(axes[3])
    for axis in axes[0], axes[3]:
        axis.legend(loc="lower right", frameon=False, fontsize=7)
    figure.tight_layout()
    write(path, lambda file: figure.savefig(file, format="png", dpi=130))


def main(path=COPY):
    Parser(description=__doc__, allow_abbrev=False).parse_args()
    walk()
    print()
    draw(path)


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
