"""Check this code on a GPU: agreement with the CPU, then speed. Write results/gpu.md line by line.

    python results/first_hour.py                                     # everything: about six minutes
    python results/first_hour.py --only parity,steps --seconds 180   # some sections; the page keeps the others
    python results/first_hour.py --device cpu --only parity,steps --out cpu.md               # small, without a GPU
    bash results/lease.sh 9                                          # on a GPU rented for minutes: see there

    parity     every model on the CPU and on the GPU, in float32 and bfloat16: outputs and gradients
    kernels    each fast kernel beside its textbook form: time, memory, error
    steps      a training step, measured and as results/costs.py computes it: time, GPU time, memory
    compiled   a step in eager mode, with a compiled backbone, and that as a CUDA graph, as with --compile

Several sections run in one process each, because after a CUDA error a process cannot use the GPU.
"""
import argparse
import contextlib
import copy
import io
import math
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "results")]

import speed
from costs import GPU, cost_of_step, stages
from engine.folder import environment
from engine.graph import Recorded
from engine.processes import guarded
from files import Parser, UserError
from kernels import inside
from models import MODELS, Backbone, Denoiser, SizeError, config, make_optimizer
from pretrain import spt_loss
from recipes import arch
from tasks import TASKS

PAGE = """# On a GPU

`python results/first_hour.py` writes the sections of this page: agreement between CPU and GPU, and measured times
against those computed by [costs.md](costs.md). Every section names its machine.
"""
# The largest relative errors that rounding explains: (outputs, all gradients together).
TOLERANCE = {"float32": (1e-3, 1e-3), "bfloat16": (0.03, 0.05)}
CE = SimpleNamespace(loss="ce")
DEADLINE = math.inf                            # in time.monotonic(), set by --seconds


def late(seconds):
    """Return whether fewer seconds than these are left. The section then ends with the rows so far."""
    over = time.monotonic() + seconds > DEADLINE
    if over:
        print("\nOut of time: the remaining rows did not run.")
    return over


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(f, device, times=5):
    """Return the minimum of `times` timings after a warm-up. Each is the mean of four calls, so that the CPU runs ahead
    as in training."""
    took = []
    f()
    for _ in range(times):
        wait(device)
        start = time.perf_counter()
        for _ in range(4):
            f()
        wait(device)
        took.append(250 * (time.perf_counter() - start))
    return min(took)


def largest_error(found, exact):
    """Return the largest absolute error among several tensors, each relative to its largest value."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, exact))


# ---- What must agree -------------------------------------------------------------------------------------------------

def parity(device):
    """Compare models of text_demo's size on one padded batch -> whether all errors are within the tolerances."""
    print("Against the CPU in float32. Outputs: the largest error over the largest output. Gradients: the norm of the "
          f"error over the norm, of all together. Allowed: {TOLERANCE['float32']} in float32, {TOLERANCE['bfloat16']} "
          "in bfloat16 (not for Reformer, where rounding puts positions into other buckets).\n\n"
          "| model | outputs, float32 | gradients | outputs, bfloat16 | gradients | |\n|---|---|---|---|---|---|")
    good = True
    forms = [(model, causal, None) for model in MODELS if model != "pythia" for causal in (False, True)]
    forms += [("rotary", causal, block) for block in (48, 16) for causal in (False, True)]       # few and many blocks
    for model, causal, block in forms:
        if late(3):
            break
        sizes = arch("text_demo", model) | ({"block": block} if block else {})
        try:
            c = config(sizes, argparse.Namespace(length=160, vocab=95, channels=None), causal=causal)
            torch.manual_seed(0)
            drawn = Denoiser(Backbone(c), c.vocab)
        except SizeError:                      # the model has no such form
            continue
        batch, cells, fine = padded_batch(), [], True
        y, grad = passed(drawn, batch, torch.device("cpu"), False)
        for dtype, allowed in TOLERANCE.items():
            its, theirs = passed(drawn, batch, device, dtype == "bfloat16")
            errors = largest_error([its], [y]), ((theirs - grad).norm() / grad.norm()).item()
            cells += [f"{error:.0e}" for error in errors]
            if (model, dtype) != ("reformer", "bfloat16"):
                fine &= all(error <= most for error, most in zip(errors, allowed))
        good &= fine
        name = ", ".join([model, *(["causal"] if causal else []), *([f"blocks of {block}"] if block else [])])
        print(f"| {name} | {' | '.join(cells)} | {'' if fine else '**off**'} |")
    return good


def padded_batch():
    """Return symbols (8, 160), true lengths, and the flat indices of the positions to predict."""
    lengths = torch.tensor([160, 1, 40, 77, 133, 160, 9, 64])
    hidden = inside(lengths, 160) & (torch.rand(8, 160) < 0.3)
    hidden[:, 0] = True
    return torch.randint(0, 95, (8, 160)), lengths, hidden.flatten().nonzero()[:, 0]


def passed(drawn, batch, device, bf16):
    """Return outputs and all gradients of a copy of this model on a device, as float32 on the CPU. Without dropout."""
    model = copy.deepcopy(drawn).to(device).eval()
    x, lengths, hidden = (v.to(device) for v in batch)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        y = model(x, lengths, hidden)
    spt_loss(CE, y, x, hidden)[0].backward()
    gradients = [p.grad.cpu().flatten() for p in model.parameters() if p.grad is not None]
    return y.detach().cpu().float(), torch.cat(gradients)


# ---- How fast it is --------------------------------------------------------------------------------------------------

def kernels(device):
    speed.main(up_to=1024)
    return True


PAIRS = (("image", "transformer"), ("text", "rotary"), ("pathx", "s4"), ("pathx", "transformer"), ("image", "s4"),
         ("pathfinder", "s4"), ("text", "s4"), ("pathx", "rotary"), ("listops", "rotary"), ("pathx", "dlr"),
         ("image", "rotary"), ("pathx", "local"), ("pathx", "longformer"), ("pathx", "mega_chunk"))
SMALL = ("listops_demo", "rotary"), ("pathfinder_demo", "s4")


def training_step(task, model, device):
    """Return a step of pretraining on full-length sequences, with the recipe's batch or 32 if that is less: (batch,
    config, denoiser, optimiser, the denoiser's inputs, the function)."""
    length, batch = TASKS[task].length, min(32, stages(task, model)["pretrain"][0])
    c = config(arch(task, model), argparse.Namespace(length=length, vocab=256, channels=None))
    denoiser = Denoiser(Backbone(c), 256).to(device)
    optimizer = make_optimizer(denoiser, 1e-3, 0.0)
    x = torch.randint(0, 256, (batch, length), device=device)
    hidden = torch.arange(0, x.numel(), 4, device=device)

    def step():
        optimizer.zero_grad()                  # comes first, as in training: a CUDA graph reuses gradients' memory
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            y = denoiser(x, None, hidden)
        spt_loss(CE, y, x, hidden)[0].backward()
        optimizer.step()

    return batch, c, denoiser, optimizer, (x, None, hidden), step


def kernel_milliseconds(step, device):
    """Return the GPU's computing time in a step, without the gaps between its kernels. Print the slowest kernels to
    stderr."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        wait(device)
    found = profile.key_averages()
    print(found.table(sort_by="self_device_time_total", row_limit=12, max_name_column_width=90), file=sys.stderr)
    return sum(event.self_device_time_total for event in found) / 1000


def steps(device):
    cuda = device.type == "cuda"
    print("A step is forward, backward and AdamW. kernels: GPU time without the gaps between kernels. best, realistic: "
          f"computed by results/costs.py for an {GPU['name']}. GB: peak of the allocated memory.\n\n"
          "| task | model | batch | ms | ms, kernels | ms, best | ms, realistic | GB | GB computed |\n"
          "|---|---|---|---|---|---|---|---|---|")
    for task, model in PAIRS if cuda else SMALL:
        if late(8):
            break
        batch, c, *_, step = training_step(task, model, device)
        cost, peak, busy = cost_of_step(c, batch, c.length, False), "–", "–"
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        took = milliseconds(step, device)
        if cuda:
            peak = f"{torch.cuda.max_memory_allocated(device) / 1e9:.2f}"
            busy = f"{kernel_milliseconds(step, device):.2f}"
        low, high = cost.seconds_of_a_step()
        print(f"| {task} | {model} | {batch} | {took:.2f} | {busy} | {1000 * low:.2f} | {1000 * high:.2f} | {peak} "
              f"| {cost.peak / 1e9:.2f} |")
        print(f"{task} {model}", file=sys.stderr)
    return True


def compiled(device):
    """Print the time of each form of a step, and the error of a compiled backbone's outputs against eager mode."""
    cuda = device.type == "cuda"
    print("ms of a training step: in eager mode; with a compiled backbone; with --compile, which adds a CUDA graph. "
          "first: seconds of the first compiled step. error: of the compiled outputs, in evaluation mode.\n\n"
          "| task | model | eager | compiled | first | error | --compile |\n|---|---|---|---|---|---|---|")
    for task, model in PAIRS[:6] if cuda else SMALL[:1]:
        if late(25):
            break
        *_, denoiser, optimizer, inputs, step = training_step(task, model, device)

        def output():
            denoiser.eval()
            with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                y = denoiser(*inputs).float()
            denoiser.train()
            return y

        cells, before, start = [f"{milliseconds(step, device):.2f}"], output(), time.perf_counter()
        denoiser.backbone.body = torch.compile(denoiser.backbone.body, backend="inductor" if cuda else "eager")
        error = largest_error([output()], [before])
        step()
        wait(device)
        first = time.perf_counter() - start
        cells += [f"{milliseconds(step, device):.2f}", f"{first:.0f}", f"{error:.0e}"]
        if cuda:
            graph = Recorded(step, optimizer)
            for _ in range(graph.WARM + 1):
                graph()
            cells.append(f"{milliseconds(graph, device):.2f}")
        print(f"| {task} | {model} | {' | '.join(cells)} |")
        torch._dynamo.reset()
    return True


# ---- The page --------------------------------------------------------------------------------------------------------

SECTIONS = dict(parity=parity, kernels=kernels, steps=steps, compiled=compiled)
# Shares of the time. Time that a section leaves goes to the sections after it.
SHARES = dict(parity=80, kernels=50, steps=80, compiled=100)


CUT = "**Interrupted.** "                      # on the page until the section ends


class Lines(io.StringIO):
    """Output of a section: shows it and calls `keep` after every line."""

    def __init__(self, keep):
        super().__init__()
        self.shown, self.keep = sys.stdout, keep

    def write(self, text):
        print(end=text, file=self.shown, flush=True)
        super().write(text)
        if text.endswith("\n"):
            self.keep(self.getvalue(), CUT)


def section(name, device, page):
    """Run a section and write its output to its place on the page line by line, so that nothing is lost if this process
    ends -> whether all is well."""
    where = environment(device)

    def keep(text, warning):
        found = (f"<!-- {name}:begin -->\n## {name}\n\n{warning}{text.strip()}\n\n{where['device']}, torch "
                 f"{where['torch']}, commit {where['commit']}\n<!-- {name}:end -->\n")
        whole = page.read_text() if page.exists() else PAGE
        old = re.search(rf"<!-- {name}:begin -->\n.*?<!-- {name}:end -->\n", whole, re.S)
        page.write_text(whole.replace(old[0], found) if old else f"{whole}\n{found}")

    keep("", CUT)
    with contextlib.redirect_stdout(Lines(keep)) as text:
        try:
            good = SECTIONS[name](device)
        except Exception as error:
            good = print(f"**error**: {type(error).__name__}: {' '.join(str(error).split())[:500]}")
    keep(text.getvalue(), "" if good else "**Check failed.** ")
    print()
    return bool(good)


def apart(name, rest, args):
    """Run a section in its own process for its share of the remaining time, then end every process that it started ->
    whether all is well."""
    left = DEADLINE - time.monotonic()
    seconds = left * SHARES[name] / sum(SHARES[each] for each in (name, *rest))
    command = [sys.executable, __file__, "--only", name, "--device", args.device, "--out", str(args.out),
               "--seconds", str(max(1, seconds - STARTING))]
    process, code = subprocess.Popen(command, start_new_session=True), None
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if code not in (0, 1):                     # the page says that it was interrupted
        print(f"{name}: " + (f"ended after {seconds:.0f} seconds" if code is None else f"exit code {code}"), flush=True)
    return code == 0


STARTING = 12                                  # seconds to import torch, and to end a section


def main(argv=None):
    global DEADLINE
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="some of: " + ",".join(SECTIONS))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu.md", help="default: results/gpu.md")
    parser.add_argument("--seconds", type=float, default=3600, help="time for all sections together; default: 3600")
    args = parser.parse_args(argv)
    DEADLINE, names = time.monotonic() + args.seconds, args.only.split(",")
    if wrong := set(names) - SECTIONS.keys():
        raise UserError(f"no section {' '.join(sorted(wrong))}; there are: {' '.join(SECTIONS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("torch sees no CUDA device; --device cpu runs a small rehearsal without one")
    if len(names) > 1:
        good = [apart(name, names[i + 1:], args) for i, name in enumerate(names)]
    else:
        warnings.filterwarnings("ignore", "Dynamo detected a call|Torchinductor does not support")      # engine/run.py
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        good = [section(name, torch.device(args.device), args.out) for name in names]
    return 0 if all(good) else 1


if __name__ == "__main__":
    guarded(main)
