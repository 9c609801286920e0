"""Compute what every architecture costs, in its sizes on a task: the tables of results/costs.md.

    python results/costs.py [TASK] [LENGTH]      parameters; memory and FLOPs of one sequence
    python results/costs.py TASK --cost          a training step, and the recipe's run: time and memory on a GPU
    python results/costs.py --hours              every stage of the rotary Transformer and S4 in table 2

Models run on tensors that have shapes but no values, so this needs no GPU and little memory.
"""
import contextlib
import math
import sys
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import torch.utils.flop_counter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kernels
from kernels import ceil_div, rotary_turns
from engine.feed import Feed
from engine.flags import between
from engine.processes import guarded
from files import Parser, UserError
from models import AT_ONCE, MODELS, Backbone, Denoiser, SizeError, config, count, make_optimizer
from recipes import arch, recipe_line
from tasks import TASKS

# The GPU that costs are computed for, by its data sheet: bytes, bytes per second, FLOP/s of matrix products in bfloat16
# and in float32, and exponentials per second (132 processors, 16 per clock, 1.75 GHz).
GPU = dict(name="H100 SXM", memory=80e9, bandwidth=3.35e12, bfloat16=989e12, float32=67e12, exponentials=3.7e12)
# A step at best, and a realistic one, fitted to measurements on an H200 (gpu.md). arithmetic: a factor of the computed
# time; launch: seconds from one operation to the next on the CPU.
BEST = dict(arithmetic=1.0, launch=5e-6)
REALISTIC = dict(arithmetic=1.5, launch=28e-6)
# Attention kernels pad heads to a multiple of this width.
TILE = 64
# Mean length of a training example. For other tasks every sequence counts as long as the longest.
MEAN_LENGTH = dict(text=1300, listops=1040)


class Cost(TorchDispatchMode):
    """Counter of the operations that run under it, except views, and of
        flops      of matrix products, attention and Fourier transforms: 2 per multiply-add, 2.5 n log2 n per real FFT
        bytes      read and written, each operand of an operation once
        seconds    on `GPU`, if each operation takes the longer of arithmetic and memory (attention: plus exponentials)
        peak       the most bytes, at one time, of tensors that are made here
    """

    def __init__(self):
        super().__init__()
        self.operations, self.flops, self.bytes, self.seconds, self.now, self.peak = 0, 0, 0, 0.0, 0, 0
        self.storages = set()
        aten = torch.ops.aten
        # Attention and its backward pass are one operation each: {operation: (index of the queries among its arguments,
        # number of matrix products over all pairs of positions)}.
        self.attention = {aten._scaled_dot_product_flash_attention_for_cpu: (0, 2),
                          aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 5)}
        self.formulas = torch.utils.flop_counter.flop_registry | {aten._fft_r2c: self.fft, aten._fft_c2r: self.fft}

    @staticmethod
    def fft(x, dim, *_, out_val=None, **__):
        n = max(x.shape[dim[-1]], out_val.shape[dim[-1]])
        return int(x.numel() // x.shape[dim[-1]] * 2.5 * n * math.log2(max(2, n)))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function.namespace == "aten" and not function.is_view:
            tensors = [v for v in tree_leaves((args, kwargs, result)) if isinstance(v, torch.Tensor)]
            formula = self.formulas.get(function.overloadpacket)
            flops = formula(*args, **kwargs or {}, out_val=result) if formula else 0
            done, exponentials = flops, 0
            if function.overloadpacket in self.attention:
                before, products = self.attention[function.overloadpacket]
                q, k = args[before:before + 2]                       # (b, h, l, e)
                exponentials = q[..., 0].numel() * k.shape[-2]
                e, padded = q.shape[-1], ceil_div(q.shape[-1], TILE) * TILE
                flops, done = (2 * products * width * exponentials for width in (e, padded))
            # repeated entries of an expanded tensor are read once
            moved = sum(min(v.nbytes, v.untyped_storage().nbytes()) for v in tensors)
            peak = GPU["bfloat16" if tensors and tensors[0].dtype == torch.bfloat16 else "float32"]
            self.operations, self.flops, self.bytes = self.operations + 1, self.flops + flops, self.bytes + moved
            self.seconds += max(done / peak + exponentials / GPU["exponentials"], moved / GPU["bandwidth"])
        for v in tree_leaves(result):
            if isinstance(v, torch.Tensor):
                self.hold(v.untyped_storage())
        return result

    def hold(self, storage):
        """Add a new storage to the bytes that exist, until it is freed."""
        key, size = storage._cdata, storage.nbytes()
        if key not in self.storages:
            self.storages.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self.release, key, size)

    def release(self, key, size):
        self.storages.discard(key)
        self.now -= size

    def seconds_of_a_step(self):
        """Return (best, realistic) seconds: the longer of arithmetic and launches."""
        return tuple(max(way["arithmetic"] * self.seconds, way["launch"] * self.operations)
                     for way in (BEST, REALISTIC))


@contextlib.contextmanager
def without_values():
    """Make tensors without values, only with shapes. They must neither come from a cache nor stay in it."""
    def clear():
        rotary_turns.cache_clear()

    clear()
    try:
        with FakeTensorMode():
            yield
    finally:
        clear()


def check_countable(c):
    """SizeError for a model whose loop over positions one cuDNN call runs, and which would be counted step by step."""
    if getattr(MODELS[c.model].mixer, "sequential", False):
        raise SizeError("runs position by position in one call, which is not counted here")


def describe(c):
    """Return the costs of one sequence of symbols, without input layer and head: (parameters of the mixers, other
    parameters, bytes that autograd keeps for the backward pass in float32, FLOPs per position of the forward pass).

    The model runs on tensors without values. Not counted: element-wise work (the scans of S5 and LRU), and making
    convolution kernels, which happens once per batch (results/peers.md has times).
    """
    check_countable(c)

    def no_kernels(l):
        return [()] * c.layers                 # each layer calls its own; the loop below replaces it

    with without_values():
        backbone = Backbone(c)
        mixers, rest = sum(count(layer.mixer) for layer in backbone.layers), count(backbone) - count(backbone.encoder)
        for layer in backbone.layers:
            for name in {"kernel", "ssm"} & set(dict(layer.mixer.named_children())):
                getattr(layer.mixer, name).forward = partial(torch.empty, c.directions, c.d)          # (c, d, l)
        backbone.kernels = no_kernels
        x, lengths = torch.zeros(1, c.length, dtype=torch.int64), torch.full((1,), c.length)
        kept, cost = run_without_values(backbone, x, lengths)
    return mixers, rest - mixers, kept, cost.flops / c.length


@contextlib.contextmanager
def as_on_a_gpu():
    """Run as a GPU does: attention in many blocks is one call, not one per block, and so are kernels of more layers."""
    usual, at_once = kernels.in_one_call, AT_ONCE["cpu"]
    kernels.in_one_call = lambda q, l, block: l > 8 * block
    AT_ONCE["cpu"] = AT_ONCE["cuda"]
    try:
        yield
    finally:
        kernels.in_one_call, AT_ONCE["cpu"] = usual, at_once


def cost_of_step(c, batch, length, padded):
    """Return the `Cost` of a training step (forward, backward, AdamW) of `batch` sequences of symbols of that length. A
    quarter of the symbols is hidden; autocast chooses bfloat16. The peak includes weights, gradients and AdamW's
    moments. padded: the model gets true lengths."""
    check_countable(c)
    with without_values():
        model = Denoiser(Backbone(c), c.vocab)
        optimizer = make_optimizer(model, 1e-3, 0.0)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()                                             # makes the moments, before counting
        optimizer.zero_grad()
        x = torch.zeros(batch, length, dtype=torch.int64)
        lengths = torch.full((batch,), length) if padded else None
        hidden = torch.zeros(ceil_div(batch * length, 4), dtype=torch.int64)
        with as_on_a_gpu():
            _, cost = run_without_values(model, x, lengths, hidden, optimizer=optimizer)
    cost.peak += 12 * count(model)                                   # gradients are made during the step
    return cost


def cost_on(task, model, batch):
    """Return the `Cost` of a training step on a task's batch as `Feed` divides it: whole, or, if lengths differ, in
    parts of similar length with hardly any padding. most: the number of sequences that fit into memory."""
    facts, sizes = TASKS[task], arch(task, model)
    c = config(sizes, SimpleNamespace(length=facts.length, vocab=256, channels=None), causal="pythia" in model)
    unequal, sequences = facts.channels is None or facts.ragged, batch * facts.documents
    whole = not unequal or sizes.get("norm") == "batch"
    length = facts.length if whole else MEAN_LENGTH.get(task, facts.length)
    some = sequences if whole else min(sequences, max(1, Feed.COSTLY * Feed.POSITIONS // length))
    one, two = (cost_of_step(c, n, length, unequal and whole) for n in (some, 2 * some))
    parts = sequences / some
    one.operations, one.flops = one.operations * math.ceil(parts), one.flops * parts
    one.bytes, one.seconds = one.bytes * parts, one.seconds * parts
    more = (GPU["memory"] - one.peak) * some / (two.peak - one.peak)                             # sequences
    one.most = int(some + more) if whole else math.inf
    return one


def stages(task, model):
    """Return {stage: (batch, steps)} of the recipe."""
    recipes = {start: recipe_line(task, TASKS[task], model, None, start)[2] for start in ("pretrain", "spt", "scratch")}
    size = TASKS[task].sizes[0]
    return {start: (recipe["batch"], recipe.get("steps") or recipe["epochs"] * (size // recipe["batch"]))
            for start, recipe in recipes.items()}


def run_without_values(model, *inputs, optimizer=None):
    """Run a forward pass, with an optimiser a whole step -> bytes kept for the backward pass, `Cost`."""
    def keep(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    saved = {}
    with Cost() as cost:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with torch.autocast("cpu", torch.bfloat16, enabled=optimizer is not None):
                y = model(*inputs)         # y keeps the counted tensors alive
        for p in model.parameters():
            saved.pop(p.untyped_storage()._cdata, None)
        if optimizer is not None:
            F.cross_entropy(y.float(), torch.zeros(len(y), dtype=torch.int64)).backward()
            optimizer.step()
    return sum(s.nbytes() for s in saved.values()), cost


def print_models(task, length, only):
    """Print the costs of one sequence: one line per model, in its sizes on a task."""
    outside = SimpleNamespace(length=length, vocab=256, channels=None)
    print(f"Sizes as on {task}; one sequence of {length:,} symbols. MiB kept: what autograd keeps for the "
          "backward pass, in float32.\n")
    print("| model | mixer parameters | other parameters | MiB kept | MFLOPs per position |\n|---|---|---|---|---|")
    for model in MODELS:
        if only in (None, model) and (sizes := arch(task, model)) is not None:
            try:
                mixers, rest, memory, flops = describe(config(sizes, outside, causal="pythia" in model))
                print(f"| {model} | {mixers:,} | {rest:,} | {memory / 2**20:,.1f} | {flops / 1e6:,.2f} |")
            except SizeError as error:         # the model has no such form
                print(f"| {model} | {error} | | | |")


COLUMNS = ("batch", "operations", "TFLOP", "GB moved", "ms computed", "ms of launches", "peak GB",
           "sequences on 80 GB", "hours")


def header(*first):
    best, real = ((f"{way['arithmetic']:g}", f"{way['launch'] * 1e6:g}") for way in (BEST, REALISTIC))
    print(f"Computed, not measured, for one {GPU['name']}: {GPU['bandwidth'] / 1e12:g} TB/s, "
          f"{GPU['bfloat16'] / 1e12:g} TFLOP/s in bfloat16, {GPU['float32'] / 1e12:g} in float32, "
          f"{GPU['exponentials'] / 1e12:g}e12\nexponentials per second. Kernels, convolutions and norms run in "
          "float32, the rest in bfloat16.\n\n- ms computed: each operation takes the longer of arithmetic and memory "
          f"traffic; attention also\n  takes time for its exponentials, and its heads are padded to at least {TILE}\n"
          f"- ms of launches: {best[1]} microseconds per operation\n- peak GB: with weights and AdamW's moments\n"
          f"- hours: steps of the recipe without evaluations, from best (ms computed, or {best[1]} microseconds per\n"
          f"  operation if that is longer) to realistic ({real[0]} times ms computed, or {real[1]} microseconds; "
          "see gpu.md)\n")
    columns = [*first, *COLUMNS]
    print("|", " | ".join(columns), "|\n" + "|---" * len(columns) + "|")


def row(*first, task, model, batch, steps):
    """Print a line of the table -> its hours: best, realistic."""
    cost = cost_on(task, model, batch)
    hours = [steps * seconds / 3600 for seconds in cost.seconds_of_a_step()]
    most = f"{cost.most:,}" if cost.most < math.inf else "any, in parts"
    print(f"| {' | '.join(first)} | {batch} | {cost.operations:,} | {cost.flops / 1e12:.2f} | {cost.bytes / 1e9:.1f} "
          f"| {1000 * cost.seconds:.1f} | {1000 * BEST['launch'] * cost.operations:.1f} | {cost.peak / 1e9:.2f} "
          f"| {most} | {hours[0]:.1f} to {hours[1]:.1f} |", flush=True)
    return hours


def print_steps(task, batch, only):
    """Print a training step and the hours of pretraining: one line per model, in its sizes on a task."""
    print(f"A training step on {task}, and the hours of pretraining.", end="\n\n")
    header("model")
    for model in MODELS:
        if only in (None, model) and arch(task, model) is not None and "pythia" not in model:        # not pretrained
            own, steps = stages(task, model)["pretrain"]
            try:
                row(model, task=task, model=model, batch=batch or own, steps=steps * own // (batch or own))
            except SizeError as error:
                print(f"| {model} | {error} |")


def print_hours():
    """Print every stage of the rotary Transformer and S4 in table 2."""
    header("task", "model", "stage")
    hours = [row(task, model, stage, task=task, model=model, batch=batch, steps=steps)
             for task in "listops text retrieval image pathfinder pathx pathx256".split()
             for model in ("rotary", "s4") if (task, model) != ("pathx256", "rotary")
             for stage, (batch, steps) in stages(task, model).items()]
    print("\nTotal: {:.0f} to {:.0f} hours.".format(*map(sum, zip(*hours))))


def main(argv=None):
    parser = Parser(description="Compute what every architecture costs, in its sizes on a task.")
    parser.add_argument("task", nargs="?", default="text", help="default: text")
    parser.add_argument("length", nargs="?", type=between(int, 1, 2**31), default=1024,
                        help="length of the sequence, default: 1024")
    parser.add_argument("--cost", type=between(int, 0, 2**31), nargs="?", const=0, metavar="BATCH",
                        help="compute a training step at the task's own length; default batch: the recipe's")
    parser.add_argument("--model", choices=MODELS, metavar="MODEL", help="only this model")
    parser.add_argument("--hours", action="store_true", help="every stage of the rotary Transformer and S4 in table 2")
    args = parser.parse_args(argv)
    if args.task not in TASKS:
        raise UserError(f"no task {args.task!r}; one of: {' '.join(TASKS)}")
    if args.cost is not None and "pythia" in (args.model or ""):
        raise UserError(f"{args.model} is only finetuned, so it has no pretraining step")
    if args.hours:
        print_hours()
    elif args.cost is not None:
        print_steps(args.task, args.cost, args.model)
    else:
        print_models(args.task, args.length, args.model)


if __name__ == "__main__":
    guarded(main)
