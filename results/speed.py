"""Where the time goes: the tables of results/speed.md that need no other commit beside this one.

    python results/speed.py                   # kernels layer positions operations: some minutes
    python results/speed.py compiled          # --compile against eager, every model of zoo/ too: long

Times want a quiet machine: beside other work S4's compiled step once took seven times as long as its eager one, where
alone both take the same.

    kernels      each fast form beside its naive form: time, peak memory, error against float64
    layer        the parts of an S4 layer beside what this machine could do at best
    positions    the time to generate a position
    operations   how many a training step launches, and how many make a GPU wait for the host
"""
import argparse
import math
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernels import (diagonal_kernel, diagonal_kernel_naive, fft_conv, hippo_nplr, s4_kernel, s4_kernel_naive,
                     s4_recover_C, s4_step, truncation_correction)
from data import Parser, UserError
from models import MODELS, Backbone, Denoiser, config, make_optimizer
from pretrain import spt_loss
from recipes import arch
from run import guarded, peak_memory

# ---- Kernels, a layer, a position ------------------------------------------------------------------------------------

def random_s4(d, N, c, l, dt_min=1e-3, dt_max=0.1, dtype=torch.complex64, seed=0):
    """HiPPO-initialised arguments of `s4_kernel` (A, P, B, C~, dt) with random C and log-uniform dt."""
    generator = torch.Generator().manual_seed(seed)
    A, P, B = (v.expand(d, -1).contiguous() for v in hippo_nplr(N))                      # (d, n)
    C = torch.randn(c, d, N // 2, dtype=torch.complex128, generator=generator)
    dt = torch.exp(torch.rand(d, generator=generator, dtype=torch.float64) * math.log(dt_max / dt_min)) * dt_min
    C = truncation_correction(A, P, C, dt, l)
    return [v.to(dtype) for v in (A, P, B, C)] + [dt.to(dtype.to_real())]


def random_dlr(d, n, c, l, dt_min=1e-4, dt_max=1e-3, dtype=torch.complex64, seed=0):
    """Arguments of `diagonal_kernel` (W, Lambda) as DLR initialises them. l is unused; `random_s4` needs it."""
    generator = torch.Generator().manual_seed(seed)
    dt = torch.exp(torch.rand(n, generator=generator, dtype=torch.float64) * math.log(dt_max / dt_min)) * dt_min
    Lambda = torch.complex(-dt / 2, 2 * math.pi * torch.arange(n, dtype=torch.float64) / n)
    W = torch.randn(c, d, n, 2, generator=generator, dtype=torch.float64) / n
    return [torch.view_as_complex(W).to(dtype), Lambda.to(dtype)]


def measure(kernel, naive, make, sizes, device):
    """Forward + backward of `kernel`: (seconds, peak MiB, error against `naive` in float64)."""
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
    # Four channels are enough for the error: rows of A, P, B, C and W, elements of dt; DLR's Lambda has none.
    few = [v[..., :4, :] if v.ndim > 1 else v if v.is_complex() else v[:4] for v in arguments]
    exact = naive(*(v.to(torch.promote_types(v.dtype, torch.float64)) for v in few), l)  # (c, 4, l)
    return min(seconds), peak / 2**20, ((K[:, :4].cpu() - exact).abs().max() / exact.abs().max()).item()


def benchmark(fast, naive, make, n, lengths, naive_up_to, d=256, c=2):
    """Prints seconds and peak memory of forward + backward, and the largest error over the largest |K|, by length."""
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
            else:      # the peak of a process cannot be set back, and a new one inherits it: this one computes nothing
                with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                    seconds, peak, error = pool.submit(measure, *what).result()
            digits = 5 if device == "cuda" else 3
            print(f"| {l} | {'naive' if kernel is naive else 'fast'} | {seconds:.{digits}f} | {peak:.0f} "
                  f"| {error:.1e} |", flush=True)
    print()


def benchmark_steps(lengths, d=256, N=64, h=4):
    """Prints milliseconds to generate position l of one sequence in one layer, without its projections: S4 by its
    recurrence, S4 by the convolution of all positions so far, attention with cached keys and values."""
    print(f"milliseconds per generated position of one layer, d={d} N={N} heads={h}, cpu, "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| position | S4, one step | S4, whole convolution | attention, cached |\n|---|---|---|---|")
    for l in lengths:
        A, P, B, C, dt = random_s4(d, N, 1, l)
        C_raw = s4_recover_C(A, P, C, dt, l)[0].to(A.dtype)                              # (d, n)
        K, u = s4_kernel(A, P, B, C, dt, l)[0], torch.randn(1, d, l)
        x, q = torch.zeros(1, d, N // 2, dtype=A.dtype), torch.randn(1, h, 1, d // h)
        cache = torch.randn(1, h, l - 1, d // h)

        def attend():
            k = torch.cat((cache, q), 2)                                                 # (1, h, l, e)
            return F.scaled_dot_product_attention(q, k, torch.cat((cache, q), 2))

        cells = []
        for step in (lambda: s4_step(A, P, B, C_raw, dt, x, u[:, :, -1]), lambda: fft_conv(u, K), attend):
            step()
            start, n = time.perf_counter(), 0
            while time.perf_counter() - start < 0.5:
                step()
                n += 1
            cells.append(f"{1000 * (time.perf_counter() - start) / n:.3f}")
        print(f"| {l} | {' | '.join(cells)} |", flush=True)


def machine_speed():
    """What this machine reaches on what it does best -> operations a second of a float32 matrix product, bytes a second
    of a copy."""
    a, b, copy = torch.randn(1024, 1024), torch.randn(2**25), torch.zeros(2**25)
    return 2 * 1024**3 / least_seconds(lambda: a @ a), 2 * b.nbytes / least_seconds(lambda: copy.copy_(b))


def least_seconds(f, times=10):
    took = []
    for _ in range(times):
        start = time.perf_counter()
        f()
        took.append(time.perf_counter() - start)
    return min(took)


def benchmark_layer(sizes):
    """Prints milliseconds, forward + backward, of the three parts of a bidirectional S4 layer, beside a bound: the time
    that their arithmetic takes at the speed of a matrix product or, if longer, their operands' at that of a copy."""
    speed, bandwidth = machine_speed()
    print(f"one S4 layer, forward + backward, ms (bound), cpu, {torch.get_num_threads()} threads: "
          f"{speed / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s\n")
    print("| d, N, l, batch | kernel | convolution | GELU, linear, GLU |\n|---|---|---|---|")
    for d, N, l, b in sizes:
        arguments = [v.requires_grad_() for v in random_s4(d, N, 2, l)]
        K, u = s4_kernel(*arguments, l).detach().requires_grad_(), torch.randn(b, d, l, requires_grad=True)
        W = torch.randn(2 * d, d, requires_grad=True)
        fft = 2.5 * 2 * l * math.log2(2 * l)                                             # of one sequence and channel
        parts = ((lambda: s4_kernel(*arguments, l, precise=False), arguments,
                  3 * 2 * 6 * N * d * l, 6 * 2 * d * l),                                 # 6 sums, 3 products of each
                 (lambda: fft_conv(u, K), (u, K), 5 * b * d * fft, 5 * b * d * l),
                 (lambda: F.glu(W @ F.gelu(u), dim=1), (u, W), 3 * 2 * b * l * 2 * d * d, 5 * b * d * l))
        cells = []
        for part, leaves, flops, numbers in parts:
            took = least_seconds(lambda: torch.autograd.grad(part().sum(), leaves))
            cells.append(f"{1000 * took:.1f} ({1000 * max(flops / speed, 4 * numbers / bandwidth):.1f})")
        print(f"| {d}, {N}, {l}, {b} | {' | '.join(cells)} |", flush=True)
    print()


# ---- Operations and --compile ----------------------------------------------------------------------------------------

class Count(TorchDispatchMode):
    """The names of operations that are not views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and not any(word in str(function) for word in ("_unsafe_view", "detach", "prof")):
            self.names.append(str(function))
        return function(*args, **kwargs or {})


def benchmark_operations(models):
    """Prints how many tensor operations a training step of `text` has that are not views, and how many of them read a
    value back to the host. Small widths: the number does not depend on them."""
    print("operations of a training step of text that are not views, 6 layers, padded batch; waits: values read back "
          "to the host\n\n| model | operations | waits |\n|---|---|---|")
    for model in models:
        sizes = dict(arch("text", model), d=32)
        sizes |= {key: value for key, value in dict(n_ssm=2, state=8, ff=32, heads=2).items() if key in sizes}
        denoiser = Denoiser(Backbone(config(sizes, SimpleNamespace(length=64, vocab=100, channels=None))), 100)
        optimizer = make_optimizer(denoiser, 1e-3, 0.0)
        x, lengths = torch.randint(0, 100, (4, 64)), torch.tensor([64, 60, 50, 64])
        hidden = (torch.rand(4, 64) < 0.3).flatten().nonzero()[:, 0]

        def step():
            spt_loss(denoiser(x, lengths, hidden), x, hidden, "ce")[0].backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        with Count() as found:
            step()
        waits = sum(any(word in name for word in ("_local_scalar", "nonzero", "equal.default")) for name in found.names)
        print(f"| {model} | {len(found.names)} | {waits} |", flush=True)
    print()


def benchmark_compiled(models):
    """Prints milliseconds of the backbone's forward and backward pass on a batch of text_demo, eager and compiled, the
    seconds of the first compiled one, and the largest relative differences of outputs and gradients."""
    print(f"--compile on a batch of text_demo, forward + backward, ms, {torch.get_num_threads()} threads\n\n"
          "| model | eager | compiled | ratio | first step, s | output | gradients |\n|---|---|---|---|---|---|---|")
    for model in models:
        torch._dynamo.reset()
        torch.manual_seed(0)
        c = config(arch("text_demo", model), SimpleNamespace(length=128, vocab=95, channels=None))
        backbone = Backbone(c)
        x, lengths = torch.randint(0, 95, (32, 128)), torch.randint(64, 129, (32,))
        weight, kept = torch.randn(32, 128, c.d), {}

        def step(form):
            backbone.zero_grad()
            y = backbone(x, lengths)
            (y * weight).sum().backward()
            kept[form] = [y.detach(), *(p.grad for p in backbone.parameters() if p.grad is not None)]

        eager = least_seconds(lambda: step("eager"))
        backbone.body = torch.compile(backbone.body, fullgraph=True)
        first = least_seconds(lambda: step("compiled"), times=1)
        compiled = least_seconds(lambda: step("compiled"))
        y, *gradients = (((a - b).abs().max() / b.abs().max()).item()
                         for a, b in zip(kept["compiled"], kept["eager"]))
        print(f"| {model} | {1000 * eager:.1f} | {1000 * compiled:.1f} | {eager / compiled:.2f} | {first:.0f} "
              f"| {y:.0e} | {max(gradients):.0e} |", flush=True)


def main():
    tables = ("kernels", "layer", "positions", "operations", "compiled")
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="TABLE",
                        help=f"of {' '.join(tables)}; default: all but compiled")
    args = parser.parse_args()
    if wrong := set(args.tables) - set(tables):
        raise UserError(f"no table {' '.join(sorted(wrong))}; there are: {' '.join(tables)}")
    for table in args.tables or tables[:-1]:
        if table == "kernels":
            benchmark(s4_kernel, s4_kernel_naive, random_s4, 64, (1024, 4096, 16384, 65536), naive_up_to=4096)
            benchmark(diagonal_kernel, diagonal_kernel_naive, random_dlr, 1024, (256, 1024, 4096, 16384),
                      naive_up_to=256)
        elif table == "layer":
            benchmark_layer(((64, 16, 256, 16), (256, 64, 1024, 4), (512, 64, 1024, 4)))
        elif table == "positions":
            benchmark_steps((1024, 4096, 16384))
        elif table == "operations":
            benchmark_operations(("s4", "dlr", "rotary", "transformer"))
        else:
            benchmark_compiled([model for model in MODELS if arch("text_demo", model)])


if __name__ == "__main__":
    guarded(main)
