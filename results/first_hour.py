"""The first hour on a machine with a GPU, in one command: what must agree agrees, and how fast it is. Writes gpu.md.

    python results/first_hour.py                        # all, about an hour
    python results/first_hour.py --only parity,steps    # in parts, which gpu.md keeps side by side
    python results/first_hour.py --device cpu --only parity,steps,torchrun --out cpu.md        # small, without a GPU

    suite      the tests of this repository, on this machine
    parity     every model on the CPU and on the GPU, in float32 and bfloat16: outputs and gradients
    attention  padded batches by FlashAttention, by a mask, and without padding
    kernels    each fast kernel beside its textbook form: time, memory, error
    steps      a training step beside what results/costs.py computes for it: time, memory, --compile
    torchrun   the same run in one process and on all GPUs
"""
import argparse
import contextlib
import copy
import io
import json
import math
import re
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

from costs import GPU, cost_of_step, stages
from data import TASKS, Parser, UserError
from kernels import attention
from models import MODELS, Backbone, Denoiser, SizeError, config, make_optimizer
from pretrain import spt_loss
from recipes import arch
from run import environment, guarded
from zoo.gpu_attention import variable_length

PAGE = """# A GPU's first hour

`python results/first_hour.py` writes this page: what agrees between CPU and GPU, and how the times that
[costs.md](costs.md) computes compare with those of a machine. A section says on which one it was made.
"""
# Largest relative error that rounding explains: of outputs, and of all gradients together.
TOLERANCE = {"float32": (1e-3, 1e-3), "bfloat16": (0.03, 0.05)}


def wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(f, device, times):
    """The least of some times, after one to warm up."""
    took = []
    for _ in range(times + 1):
        wait(device)
        start = time.perf_counter()
        f()
        wait(device)
        took.append(1000 * (time.perf_counter() - start))
    return min(took[1:])


# ---- what must agree -------------------------------------------------------------------------------------------------

def suite(device):
    done = subprocess.run([sys.executable, "-m", "pytest", "-q"], cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines() or [done.stderr]
    print("\n".join(["`python -m pytest -q`:", "", *(f"    {line}" for line in lines if "FAILED" in line), lines[-1]]))
    return done.returncode == 0


def parity(device):
    """Weights and a padded batch of text_demo's size, drawn once -> whether all is within the tolerances."""
    print("Against the CPU in float32: the largest error of the outputs over the largest output, and of all gradients "
          f"by their norms. Allowed: {TOLERANCE['float32']} in float32, {TOLERANCE['bfloat16']} in bfloat16, whose "
          "rounding puts Reformer's positions into other buckets.\n\n"
          "| model | outputs, float32 | gradients | outputs, bfloat16 | gradients | |\n|---|---|---|---|---|---|")
    good = True
    for model, causal, block in [(model, causal, None) for model in MODELS if model != "pythia"
                                 for causal in (False, True)] + [("rotary", False, 48), ("rotary", True, 48)]:
        sizes = arch("text_demo", model) | ({"block": block} if block else {})
        try:
            c = config(sizes, argparse.Namespace(length=128, vocab=95, channels=None), causal=causal)
            torch.manual_seed(0)
            drawn = Denoiser(Backbone(c), c.vocab)
        except SizeError:                      # no such form
            continue
        batch, cells, fine = padded_batch(), [], True
        y, grad = passed(drawn, batch, torch.device("cpu"), False)
        for dtype, allowed in TOLERANCE.items():
            its, theirs = passed(drawn, batch, device, dtype == "bfloat16")
            errors = ((its - y).abs().max() / y.abs().max()).item(), ((theirs - grad).norm() / grad.norm()).item()
            cells += [f"{error:.0e}" for error in errors]
            if (model, dtype) != ("reformer", "bfloat16"):
                fine &= all(error <= most for error, most in zip(errors, allowed))
        good &= fine
        name = ", ".join([model, *(["causal"] if causal else []), *([f"blocks of {block}"] if block else [])])
        print(f"| {name} | {' | '.join(cells)} | {'' if fine else '**off**'} |", flush=True)
    return good


def padded_batch():
    """Symbols (8, 128), true lengths, and the numbers of positions to predict."""
    lengths = torch.tensor([128, 1, 40, 77, 100, 128, 9, 64])
    hidden = (torch.arange(128) < lengths[:, None]) & (torch.rand(8, 128) < 0.3)
    hidden[:, 0] = True
    return torch.randint(0, 95, (8, 128)), lengths, hidden.flatten().nonzero()[:, 0]


def passed(drawn, batch, device, bf16):
    """Outputs and all gradients of a model with these weights there, as float32 on the CPU. Without dropout."""
    model = copy.deepcopy(drawn).to(device).eval()
    x, lengths, hidden = (v.to(device) for v in batch)
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        y = model(x, lengths, hidden)
    spt_loss(y, x, hidden, "ce")[0].backward()
    gradients = [p.grad.cpu().flatten() for p in model.parameters() if p.grad is not None]
    return y.detach().cpu().float(), torch.cat(gradients)


def torchrun(device):
    """The losses of the same run in one process, in as many as there are GPUs (CPU: two), and in these with a SIGTERM
    and --resume in between."""
    processes = torch.cuda.device_count() if device.type == "cuda" else 2
    if processes < 2:
        print("There is one GPU: nothing to compare.")
        return True
    with tempfile.TemporaryDirectory() as folder:
        x = np.random.default_rng(0).normal(size=(256, 64)).astype(np.float32)
        np.savez(f"{folder}/own.npz", x=x, y=np.arange(256) % 2)

        def run(n, out, told=False):
            starts = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"] if n > 1 else []
            words = [ROOT / "pretrain.py", "--task", f"file:{folder}/own.npz", "--model", "s4", "--steps", "200",
                     "--log-every", "50", "--dtype", "float32", "--device", device.type, "--data-dir", f"{folder}/data",
                     "--out", f"{folder}/{out}", "--resume"]
            log = Path(folder, out, "log.jsonl")
            process = subprocess.Popen([sys.executable, *starts, *map(str, words)], stdout=subprocess.PIPE,
                                       stderr=subprocess.STDOUT, text=True)
            while told and process.poll() is None and not (log.exists() and '"train"' in log.read_text()):
                time.sleep(0.01)
            if told:
                process.terminate()
            said = process.communicate()[0]
            records = [*map(json.loads, log.read_text().splitlines())] if log.exists() else []
            if told and (not records or records[-1]["kind"] != "stop") or not told and process.returncode:
                raise RuntimeError(said[-500:])
            return [record["loss"] for record in records if record["kind"] == "train"]

        run(processes, "told", told=True)
        rows = {"1": run(1, "one"), str(processes): run(processes, "many"),
                f"{processes}, stopped by SIGTERM, resumed": run(processes, "told")}
    print("Losses up to step 50, 100, 150 and 200, float32\n\n"
          "| processes | 50 | 100 | 150 | 200 |\n|---|---|---|---|---|")
    for name, losses in rows.items():
        print(f"| {name} | {' | '.join(f'{loss:.5f}' for loss in losses)} |")
    return alike(*rows.values())


def alike(first, *others):
    return all(math.isclose(*pair, rel_tol=2e-3) for some in others for pair in zip(first, some, strict=True))


# ---- how fast it is --------------------------------------------------------------------------------------------------

def attend(device):
    print(f"Padded attention by {variable_length()[0] if device.type == 'cuda' else None or 'a mask'}. Forward and "
          "backward, ms; lengths uniform from 1 to l\n\n| b, h, l, e | by `attention` | by a mask | unpadded |\n"
          "|---|---|---|---|")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for b, h, l, e in ((16, 8, 1024, 64), (8, 8, 4096, 64)) if device.type == "cuda" else ((4, 2, 128, 16),):
        heads = [torch.randn(b, h, l, e, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
        lengths = torch.randint(1, l + 1, (b,), device=device)
        mask = torch.zeros(b, 1, 1, l, device=device, dtype=dtype).masked_fill(
            torch.arange(l, device=device) >= lengths[:, None, None, None], -math.inf)
        forms = (lambda: attention(*heads, lengths=lengths), lambda: attention(*heads), lambda:
                 torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask))
        ours, unpadded, masked = (milliseconds(lambda: f().sum().backward(), device, 10) for f in forms)
        print(f"| {b}, {h}, {l}, {e} | {ours:.2f} | {masked:.2f} | {unpadded:.2f} |", flush=True)
    return True


def kernels(device):
    print(subprocess.run([sys.executable, ROOT / "results" / "speed.py", "kernels"], check=True, text=True,
                         stdout=subprocess.PIPE).stdout)
    return True


PAIRS = (("listops", "rotary"), ("text", "s4"), ("image", "rotary"), ("image", "s4"), ("pathfinder", "s4"),
         ("pathx", "transformer"), ("pathx", "rotary"), ("pathx", "s4"), ("pathx", "dlr"), ("pathx", "local"),
         ("pathx", "longformer"), ("pathx", "mega_chunk"))
SMALL = ("listops_demo", "rotary"), ("pathfinder_demo", "s4")


def steps(device):
    """A step of pretraining on sequences of the task's full length, with the recipe's batch, at most 32."""
    print("ms: forward, backward and AdamW. Computed: by results/costs.py, for an H100 SXM. GB: the most that was "
          "allocated, and what costs.py says is kept. error: of compiled outputs, the largest, beside uncompiled ones."
          "\n\n| task | model | batch | ms | ms computed | of launches | GB | GB computed | compiled, ms | first step, "
          "s | error |\n|---|---|---|---|---|---|---|---|---|---|---|")
    for task, model in PAIRS if device.type == "cuda" else SMALL:
        length, batch = TASKS[task].length, min(32, stages(task, model)["pretrain"][0])
        c = config(arch(task, model), argparse.Namespace(length=length, vocab=256, channels=None))
        cost = cost_of_step(c, batch, length, False)
        denoiser = Denoiser(Backbone(c), 256).to(device)
        optimizer = make_optimizer(denoiser, 1e-3, 0.0)
        x = torch.randint(0, 256, (batch, length), device=device)
        hidden = torch.arange(0, x.numel(), 4, device=device)

        def step():
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                y = denoiser(x, None, hidden)
            spt_loss(y, x, hidden, "ce")[0].backward()
            optimizer.step()
            optimizer.zero_grad()

        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        eager = milliseconds(step, device, 10)
        peak = f"{torch.cuda.max_memory_allocated(device) / 1e9:.2f}" if device.type == "cuda" else "–"
        compiled = "failed | | |"
        with contextlib.suppress(Exception):   # without a compiler, say; the other numbers are as good
            compiled = in_compiled_form(denoiser, x, hidden, step, device)
        print(f"| {task} | {model} | {batch} | {eager:.1f} | {1000 * cost.seconds:.1f} "
              f"| {1000 * GPU['launch'] * cost.operations:.1f} | {peak} | {(cost.kept + cost.weights) / 1e9:.2f} "
              f"| {compiled}", flush=True)
    return True


def in_compiled_form(denoiser, x, hidden, step, device):
    """The row's last cells: milliseconds, seconds of the first step, how far outputs are from uncompiled ones."""
    def output():
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return denoiser(x, None, hidden).float()

    body, start, before = denoiser.backbone.body, time.perf_counter(), output()
    torch._dynamo.reset()
    denoiser.backbone.body = torch.compile(body, backend="inductor" if device.type == "cuda" else "eager")
    after = output()
    step()
    wait(device)
    first, error = time.perf_counter() - start, (after - before).abs().max() / before.abs().max()
    return f"{milliseconds(step, device, 10):.1f} | {first:.0f} | {error:.0e} |"


# ---- the page --------------------------------------------------------------------------------------------------------

SECTIONS = dict(suite=suite, parity=parity, attention=attend, kernels=kernels, steps=steps, torchrun=torchrun)


class Both(io.StringIO):
    """What is printed, kept and shown."""

    def __init__(self):
        super().__init__()
        self.shown = sys.stdout

    def write(self, text):
        print(end=text, file=self.shown, flush=True)
        return super().write(text)


def section(name, device, page):
    """Runs a section and puts what it prints in its place on the page -> whether all is well."""
    with contextlib.redirect_stdout(Both()) as text:
        try:
            good = SECTIONS[name](device)
        except (RuntimeError, SizeError, subprocess.SubprocessError) as error:          # the others can still be had
            good = print(f"**failed**: {type(error).__name__}: {' '.join(str(error).split())[:500]}")
    where = environment(device)
    warning = "" if good else "**Not as it should be.** "
    found = (f"<!-- {name}:begin -->\n## {name}\n\n{warning}{text.getvalue().strip()}\n\n{where['device']}, torch "
             f"{where['torch']}, commit {where['commit']}\n<!-- {name}:end -->\n")
    whole = page.read_text() if page.exists() else PAGE
    old = re.search(rf"<!-- {name}:begin -->\n.*?<!-- {name}:end -->\n", whole, re.S)
    page.write_text(whole.replace(old[0], found) if old else f"{whole}\n{found}")
    print()
    return bool(good)


def main(argv=None):
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SECTIONS), help="some of: " + ",".join(SECTIONS))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "gpu.md", help="default: results/gpu.md")
    args = parser.parse_args(argv)
    names = args.only.split(",")
    if wrong := set(names) - SECTIONS.keys():
        raise UserError(f"no section {' '.join(sorted(wrong))}; there are: {' '.join(SECTIONS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("torch sees no CUDA device; with --device cpu a small rehearsal runs without one")
    warnings.filterwarnings("ignore", "Dynamo detected a call|Torchinductor does not support")          # as in run.py
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    good = [section(name, torch.device(args.device), args.out) for name in names]
    return 0 if all(good) else 1


if __name__ == "__main__":
    guarded(main)
