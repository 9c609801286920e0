"""Measure the kernels of S4 and DLR, the fast and the naive forms: time, peak memory, error against float64.

    python results/speed.py         # half a minute, on a machine without other work
"""
import argparse
import math
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine.folder import peak_memory
from engine.processes import guarded
from files import Parser
from kernels import (diagonal_kernel, diagonal_kernel_naive, hippo_nplr, s4_kernel, s4_kernel_naive,
                     truncation_correction)


def random_s4(d, N, c, l, dt_min=1e-3, dt_max=0.1, dtype=torch.complex64, seed=0):
    """Return HiPPO-initialised arguments of `s4_kernel` (A, P, B, C~, dt) with random C and log-uniform dt."""
    generator = torch.Generator().manual_seed(seed)
    A, P, B = (v.expand(d, -1).contiguous() for v in hippo_nplr(N))                      # (d, n)
    C = torch.randn(c, d, N // 2, dtype=torch.complex128, generator=generator)
    dt = torch.exp(torch.rand(d, generator=generator, dtype=torch.float64) * math.log(dt_max / dt_min)) * dt_min
    C = truncation_correction(A, P, C, dt, l)
    return [v.to(dtype) for v in (A, P, B, C)] + [dt.to(dtype.to_real())]


def random_dlr(d, n, c, l, dt_min=1e-4, dt_max=1e-3, dtype=torch.complex64, seed=0):
    """Return arguments of `diagonal_kernel` (W, Lambda) as DLR initialises them. l is unused; `random_s4` needs it."""
    generator = torch.Generator().manual_seed(seed)
    dt = torch.exp(torch.rand(n, generator=generator, dtype=torch.float64) * math.log(dt_max / dt_min)) * dt_min
    Lambda = torch.complex(-dt / 2, 2 * math.pi * torch.arange(n, dtype=torch.float64) / n)
    W = torch.randn(c, d, n, 2, generator=generator, dtype=torch.float64) / n
    return [torch.view_as_complex(W).to(dtype), Lambda.to(dtype)]


def measure(kernel, naive, make, sizes, device):
    """Return (seconds, peak MiB, error against `naive` in float64) of `kernel`, forward + backward."""
    kernel(*(v.to(device) for v in make(2, 4, 1, 16)), 16).sum()                         # warm up
    arguments, l, seconds = make(*sizes), sizes[-1], []
    leaves = [v.detach().to(device).requires_grad_() for v in arguments]
    before = peak_memory(torch.device("cpu"))
    for _ in range(1 if kernel is naive else 3):
        start = time.perf_counter()
        K = kernel(*leaves, l)                                                           # (c, d, l)
        torch.autograd.grad(K.square().sum(), leaves)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = peak_memory(torch.device(device)) - (0 if device == "cuda" else before)
    # Four channels suffice for the error: rows of A, P, B, C and W, elements of dt. DLR's Lambda has no channels.
    few = [v[..., :4, :] if v.ndim > 1 else v if v.is_complex() else v[:4] for v in arguments]
    exact = naive(*(v.to(torch.promote_types(v.dtype, torch.float64)) for v in few), l)  # (c, 4, l)
    return min(seconds), peak / 2**20, ((K[:, :4].cpu() - exact).abs().max() / exact.abs().max()).item()


def benchmark(fast, naive, make, n, lengths, naive_up_to, d=256, c=2):
    """Print seconds and peak memory of forward + backward per length, and the largest error over the largest |K|."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{fast.__name__}, forward + backward, d={d} N={n} directions={c}, {device}, "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| l | form | s | MiB | error |\n|---|---|---|---|---|")
    for l in lengths:
        for kernel in (naive, fast) if l <= naive_up_to else (fast,):
            what = kernel, naive, make, (d, n, c, l), device
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                seconds, peak, error = measure(*what)
            else:      # a process cannot reset its peak, and a child inherits it: this one computes nothing
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                    seconds, peak, error = pool.submit(measure, *what).result()
            digits = 5 if device == "cuda" else 3
            print(f"| {l} | {'naive' if kernel is naive else 'fast'} | {seconds:.{digits}f} | {peak:.0f} "
                  f"| {error:.1e} |", flush=True)
    print()


def main(up_to=4096):
    benchmark(s4_kernel, s4_kernel_naive, random_s4, 64, (1024, 4096, 16384, 65536), naive_up_to=up_to)
    benchmark(diagonal_kernel, diagonal_kernel_naive, random_dlr, 1024, (256, 1024, 4096, 16384), up_to // 16)


if __name__ == "__main__":
    Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    guarded(main)
