"""Check this code on a GPU: agreement with the CPU, then speed. Writes results/gpu.md, line by line.

    python results/first_hour.py                                     # everything: about an hour, most of it the suite
    python results/first_hour.py --only parity,steps --seconds 180   # in parts, which the page keeps side by side
    python results/first_hour.py --device cpu --only parity,steps --out cpu.md               # small, without a GPU
    bash results/lease.sh 9                                          # on a GPU rented for minutes: see there

    parity     every model on the CPU and on the GPU, in float32 and bfloat16: outputs and gradients
    kernels    each fast kernel beside its textbook form: time, memory, error
    steps      a training step beside what results/costs.py computes for it: time, GPU time, memory
    compiled   a step as it is, with a compiled backbone, and that as a CUDA graph, as --compile has it
    runs       the same run plain and with --compile; with several GPUs also on all, without and with a stop
    suite      the tests of this repository, on this machine

Where several sections are asked for, each runs in a process of its own, because a CUDA error leaves a process unable
to use the GPU.
"""
import argparse
import contextlib
import copy
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
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

`python results/first_hour.py` writes this page: what agrees between CPU and GPU, and how the times that
[costs.md](costs.md) computes compare with those of a machine. A section says on which one it was made.
"""
# Largest relative error that rounding explains: of outputs, and of all gradients together.
TOLERANCE = {"float32": (1e-3, 1e-3), "bfloat16": (0.03, 0.05)}
DEADLINE = math.inf                            # by time.monotonic(): set by --seconds


def late(seconds):
    """Return whether fewer seconds than these are left; then a section ends with what it has."""
    over = time.monotonic() + seconds > DEADLINE
    if over:
        print("\nOut of time: the remaining rows were not run.")
    return over


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(f, device, times=5):
    """Return the least of `times` timings, each the mean of four calls, after one warm-up: as in training, the CPU runs
    ahead."""
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
    """The largest absolute error of several tensors, each over its largest value."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, exact))


# ---- what must agree -------------------------------------------------------------------------------------------------

def suite(device):
    done = subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or [done.stderr]
    print("\n".join(["`python -m pytest -q`:", "", *(f"    {line}" for line in lines if "FAILED" in line), lines[-1]]))
    return done.returncode == 0


def parity(device):
    """Weights of text_demo's size and a padded batch, drawn once -> whether all errors are within the tolerances."""
    print("Against the CPU in float32: the largest error of the outputs over the largest output, and the norm of the "
          f"error of all gradients over their norm. Allowed: {TOLERANCE['float32']} in float32, "
          f"{TOLERANCE['bfloat16']} in bfloat16, whose rounding puts Reformer's positions into other buckets.\n\n"
          "| model | outputs, float32 | gradients | outputs, bfloat16 | gradients | |\n|---|---|---|---|---|---|")
    good = True
    forms = [(model, causal, None) for model in MODELS if model != "pythia" for causal in (False, True)]
    forms += [("rotary", causal, block) for block in (48, 16) for causal in (False, True)]       # few blocks, and many
    for model, causal, block in forms:
        if late(3):
            break
        sizes = arch("text_demo", model) | ({"block": block} if block else {})
        try:
            c = config(sizes, argparse.Namespace(length=160, vocab=95, channels=None), causal=causal)
            torch.manual_seed(0)
            drawn = Denoiser(Backbone(c), c.vocab)
        except SizeError:                      # no such form
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
    """Symbols (8, 160), true lengths, and the numbers of positions to predict."""
    lengths = torch.tensor([160, 1, 40, 77, 133, 160, 9, 64])
    hidden = inside(lengths, 160) & (torch.rand(8, 160) < 0.3)
    hidden[:, 0] = True
    return torch.randint(0, 95, (8, 160)), lengths, hidden.flatten().nonzero()[:, 0]


def passed(drawn, batch, device, bf16):
    """Outputs and all gradients of a model with these weights there, as float32 on the CPU. Without dropout."""
    model = copy.deepcopy(drawn).to(device).eval()
    x, lengths, hidden = (v.to(device) for v in batch)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        y = model(x, lengths, hidden)
    spt_loss(y, x, hidden, "ce")[0].backward()
    gradients = [p.grad.cpu().flatten() for p in model.parameters() if p.grad is not None]
    return y.detach().cpu().float(), torch.cat(gradients)


def runs(device):
    """Print the losses of the same run in one process; on a GPU with --compile, too; in as many processes as there are
    GPUs (CPU: two), and in these with a SIGTERM and --resume in between -> whether all are alike."""
    cuda = device.type == "cuda"
    processes = torch.cuda.device_count() if cuda else 2
    with tempfile.TemporaryDirectory() as folder:
        x = np.random.default_rng(0).normal(size=(256, 64)).astype(np.float32)
        np.savez(f"{folder}/own.npz", x=x, y=np.arange(256) % 2)

        def run(out, *flags, n=1, stopped=False):
            starts = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"] if n > 1 else []
            words = [ROOT / "pretrain.py", "--task", f"file:{folder}/own.npz", "--model", "s4", "--steps", "200",
                     "--log-every", "50", "--dtype", "float32", "--device", device.type, "--data-dir", f"{folder}/data",
                     "--out", f"{folder}/{out}", "--resume", *flags]
            log = Path(folder, out, "log.jsonl")
            process = subprocess.Popen([sys.executable, *starts, *map(str, words)], stdout=subprocess.PIPE,
                                       stderr=subprocess.STDOUT, text=True)
            while stopped and process.poll() is None and not (log.exists() and '"train"' in log.read_text()):
                time.sleep(0.01)
            if stopped:
                process.terminate()
            said = process.communicate()[0]
            records = [*map(json.loads, log.read_text().splitlines())] if log.exists() else []
            if stopped and (not records or records[-1]["kind"] != "stop") or not stopped and process.returncode:
                raise RuntimeError(said[-500:])
            return [record["loss"] for record in records if record["kind"] == "train"]

        def row(name, losses):
            print(f"| {name} | {' | '.join(f'{loss:.5f}' for loss in losses)} |")
            return losses

        print("Losses up to step 50, 100, 150 and 200, float32\n\n| | 50 | 100 | 150 | 200 |\n|---|---|---|---|---|")
        rows = [row("1 process", run("one"))]
        if cuda:
            rows.append(row("1 process, --compile", run("compiled", "--compile")))
        if processes > 1:
            rows.append(row(f"{processes} processes", run("many", n=processes)))
            run("stopped", n=processes, stopped=True)
            rows.append(row(f"{processes} processes, stopped by SIGTERM, resumed", run("stopped", n=processes)))
    return alike(*rows)


def alike(first, *others):
    return all(math.isclose(*pair, rel_tol=2e-3) for some in others for pair in zip(first, some, strict=True))


# ---- how fast it is --------------------------------------------------------------------------------------------------

def kernels(device):
    speed.main(up_to=1024)
    return True


PAIRS = (("image", "transformer"), ("text", "rotary"), ("pathx", "s4"), ("pathx", "transformer"), ("image", "s4"),
         ("pathfinder", "s4"), ("text", "s4"), ("pathx", "rotary"), ("listops", "rotary"), ("pathx", "dlr"),
         ("image", "rotary"), ("pathx", "local"), ("pathx", "longformer"), ("pathx", "mega_chunk"))
SMALL = ("listops_demo", "rotary"), ("pathfinder_demo", "s4")


def training_step(task, model, device):
    """A step of pretraining on full-length sequences of symbols, with the recipe's batch, at most 32 -> (batch, config,
    denoiser, optimiser, its inputs, the function)."""
    length, batch = TASKS[task].length, min(32, stages(task, model)["pretrain"][0])
    c = config(arch(task, model), argparse.Namespace(length=length, vocab=256, channels=None))
    denoiser = Denoiser(Backbone(c), 256).to(device)
    optimizer = make_optimizer(denoiser, 1e-3, 0.0)
    x = torch.randint(0, 256, (batch, length), device=device)
    hidden = torch.arange(0, x.numel(), 4, device=device)

    def step():
        optimizer.zero_grad()                  # first, as in training: a CUDA graph reuses the memory of gradients
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            y = denoiser(x, None, hidden)
        spt_loss(y, x, hidden, "ce")[0].backward()
        optimizer.step()

    return batch, c, denoiser, optimizer, (x, None, hidden), step


def kernel_milliseconds(step, device):
    """The time that the GPU computes in a step, without the gaps between its kernels. Which of them take the most of it
    goes to stderr."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        wait(device)
    found = profile.key_averages()
    print(found.table(sort_by="self_device_time_total", row_limit=12, max_name_column_width=90), file=sys.stderr)
    return sum(event.self_device_time_total for event in found) / 1000


def steps(device):
    cuda = device.type == "cuda"
    print("A step is forward, backward and AdamW. kernels: GPU time without the gaps between kernels. best, realistic: "
          f"computed by results/costs.py, for an {GPU['name']}. GB: the most that was allocated.\n\n"
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
    """Times of each form of a step, and how far a compiled backbone's outputs are from the eager ones."""
    cuda = device.type == "cuda"
    print("ms of a training step: eager; with a compiled backbone; as a CUDA graph of that, as --compile has it. "
          "first: seconds of the first compiled step. error: of the compiled backbone's outputs, in evaluation.\n\n"
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


# ---- the page --------------------------------------------------------------------------------------------------------

SECTIONS = dict(parity=parity, kernels=kernels, steps=steps, compiled=compiled, runs=runs,
                suite=suite)
# How the time is shared out: what a section leaves over is for those after it.
SHARES = dict(parity=80, kernels=50, steps=80, compiled=100, runs=60, suite=2500)


CUT = "**Was cut short.** "                    # stands on the page until a section ends


class Lines(io.StringIO):
    """What a section prints: shown, and with each line kept."""

    def __init__(self, keep):
        super().__init__()
        self.shown, self.keep = sys.stdout, keep

    def write(self, text):
        print(end=text, file=self.shown, flush=True)
        super().write(text)
        if text.endswith("\n"):
            self.keep(self.getvalue(), CUT)


def section(name, device, page):
    """Run a section and put what it prints in its place on the page, line by line: whatever ends this process, the
    lines so far are there -> whether all is well."""
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
            good = print(f"**failed**: {type(error).__name__}: {' '.join(str(error).split())[:500]}")
    keep(text.getvalue(), "" if good else "**Not as it should be.** ")
    print()
    return bool(good)


def apart(name, rest, args):
    """Run a section in its own process, for its share of the remaining time, and end all that it has started ->
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
    if code not in (0, 1):                     # its page says that it was cut short
        print(f"{name}: " + (f"ended after {seconds:.0f} seconds" if code is None else f"exit code {code}"), flush=True)
    return code == 0


STARTING = 12                                  # seconds until a process has imported torch, and to end what it began


def main(argv=None):
    global DEADLINE
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="some of: " + ",".join(SECTIONS))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu.md", help="default: results/gpu.md")
    parser.add_argument("--seconds", type=float, default=3600, help="for all sections together; default: 3600")
    args = parser.parse_args(argv)
    DEADLINE, names = time.monotonic() + args.seconds, args.only.split(",")
    if wrong := set(names) - SECTIONS.keys():
        raise UserError(f"no section {' '.join(sorted(wrong))}; there are: {' '.join(SECTIONS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("torch sees no CUDA device; with --device cpu a small rehearsal runs without one")
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
