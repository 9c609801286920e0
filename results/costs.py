"""What each architecture costs, in the sizes that it has on a task: the tables of results/costs.md.

    python results/costs.py [TASK] [LENGTH]      of a sequence: parameters, memory, FLOPs
    python results/costs.py TASK --cost          of a training step and of the recipe's run: time and memory on a GPU
    python results/costs.py --hours              table 2's rotary Transformer and S4, every stage

Models run on tensors that have shapes but no values, so nothing here takes a GPU's memory or time.
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
from kernels import ceil_div, rotary_turns, two_levels
from engine.feed import Feed
from engine.flags import between
from engine.processes import guarded
from files import Parser, UserError
from models import AT_ONCE, MODELS, Backbone, Denoiser, SizeError, config, count, make_optimizer
from recipes import arch, recipe_line
from tasks import TASKS
from zoo.gpu_attention import many_blocks, near_attention

# What its maker says of the GPU that costs are computed for: bytes, bytes a second, operations a second of matrix
# products, in bfloat16 and in float32, and exponentials a second (132 processors, 16 a clock, 1.75 GHz).
GPU = dict(name="H100 SXM", memory=80e9, bandwidth=3.35e12, bfloat16=989e12, float32=67e12, exponentials=3.7e12)
# A step at best, and a realistic one, fitted to what an H200 took (gpu.md). arithmetic: times what is computed; launch:
# seconds from one operation to the next on the CPU.
BEST = dict(arithmetic=1.0, launch=5e-6)
REALISTIC = dict(arithmetic=1.5, launch=28e-6)
# Attention kernels pad heads to a multiple of this width.
TILE = 64
# Symbols of a training example, on average; other sequences are taken as long as the task's longest.
MEAN_LENGTH = dict(text=1300, listops=1040)


class Cost(TorchDispatchMode):
    """Counts what runs under it, without autograd's views: operations; FLOPs of matrix products, attention, Fourier
    transforms and LSTM's recurrence (2 a multiply-add, 2.5 n log2 n a real FFT); bytes read and written, each
    operation's operands once; the seconds that GPU would take if each operation took the longer of its arithmetic's and
    its memory's time, attention its exponentials' as well; and the most bytes of tensors made here that exist at once.
    """

    def __init__(self):
        super().__init__()
        self.operations, self.flops, self.bytes, self.seconds, self.now, self.peak = 0, 0, 0, 0.0, 0, 0
        self.storages = set()
        aten = torch.ops.aten
        # Attention and its backward pass are one operation each: {operation: (place of the queries among its arguments,
        # matrix products of all pairs of positions)}.
        self.attention = {aten._scaled_dot_product_flash_attention_for_cpu: (0, 2),
                          aten._scaled_dot_product_flash_attention_for_cpu_backward: (1, 5)}
        self.formulas = torch.utils.flop_counter.flop_registry | {aten._fft_r2c: self.fft, aten._fft_c2r: self.fft}
        # The recurrences of LSTM and GRU: {operation: (place of x among its arguments, passes through the positions,
        # products with each weight)}. The backward pass repeats the forward pass.
        self.recurrent = {torch.ops.zoo.recurrence: (0, 1, 1), torch.ops.zoo.recurrence_backward: (2, 2, 4)}

    @staticmethod
    def fft(x, dim, *_, out_val=None, **__):
        n = max(x.shape[dim[-1]], out_val.shape[dim[-1]])
        return int(x.numel() // x.shape[dim[-1]] * 2.5 * n * math.log2(max(2, n)))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        recurrent = self.recurrent.get(function.overloadpacket)
        if (function.namespace == "aten" or recurrent) and not function.is_view:
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
            if recurrent:                      # one call, but one position after another: each is an operation
                before, passes, products = recurrent
                x, W, U = args[before:before + 3]                    # (k, l, b, d), (k, m, d), (k, m, n)
                flops = done = 2 * products * x[0, ..., 0].numel() * (W.numel() + U.numel())
                self.operations += passes * len(x) * x.shape[1] - 1
            # what an expanded tensor repeats is read once
            moved = sum(min(v.nbytes, v.untyped_storage().nbytes()) for v in tensors)
            peak = GPU["bfloat16" if tensors and tensors[0].dtype == torch.bfloat16 else "float32"]
            self.operations, self.flops, self.bytes = self.operations + 1, self.flops + flops, self.bytes + moved
            self.seconds += max(done / peak + exponentials / GPU["exponentials"], moved / GPU["bandwidth"])
        for v in tree_leaves(result):
            if isinstance(v, torch.Tensor):
                self.hold(v.untyped_storage())
        return result

    def hold(self, storage):
        """Counts a new storage among the bytes that exist, until it goes."""
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
        """Return (best, realistic) seconds: the larger of arithmetic and launches."""
        return tuple(max(way["arithmetic"] * self.seconds, way["launch"] * self.operations)
                     for way in (BEST, REALISTIC))


@contextlib.contextmanager
def without_values():
    """Tensors made here have shapes but no values: they must neither come from a cache nor stay in it."""
    def clear():
        rotary_turns.cache_clear()
        two_levels.cache_clear()

    clear()
    try:
        with FakeTensorMode():
            yield
    finally:
        clear()


def describe(c):
    """Cost of a batch of one sequence of symbols, without input layer and head -> (parameters of the mixers, other
    parameters, bytes that autograd keeps for the backward pass in float32, FLOPs per position of the forward pass).

    The model runs on tensors that have shapes but no values. Not counted is element-wise work (S5's and LRU's scans),
    nor making convolution kernels, which is done once a batch (`python results/speed.py` measures that).
    """
    def no_kernels(l):
        return [()] * c.layers                 # so that each layer calls its own, which the loop below replaces

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
    """Attention in many blocks is one call there, and one for each block on a CPU; so are more layers' kernels."""
    usual, at_once = kernels.faster, AT_ONCE["cpu"]
    kernels.faster = lambda q, k, v, causal, block, lengths: (
        near_attention(q, k, v, block, None, causal, lengths) if many_blocks(q.shape[2], block) else None)
    AT_ONCE["cpu"] = AT_ONCE["cuda"]
    try:
        yield
    finally:
        kernels.faster, AT_ONCE["cpu"] = usual, at_once


def cost_of_step(c, batch, length, padded):
    """Cost of a training step, forward, backward and AdamW, of `batch` sequences of symbols of that length, of which a
    quarter is hidden, in bfloat16 where autocast takes it -> `Cost`, whose peak holds weights, gradients and AdamW's
    moments too. padded: whether the model is told true lengths."""
    with without_values():
        model = Denoiser(Backbone(c), c.vocab)
        optimizer = make_optimizer(model, 1e-3, 0.0)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()                                             # makes the moments, off the count
        optimizer.zero_grad()
        x = torch.zeros(batch, length, dtype=torch.int64)
        lengths = torch.full((batch,), length) if padded else None
        hidden = torch.zeros(ceil_div(batch * length, 4), dtype=torch.int64)
        with as_on_a_gpu():
            _, cost = run_without_values(model, x, lengths, hidden, optimizer=optimizer)
    cost.peak += 12 * count(model)                                   # gradients are made during the step
    return cost


def cost_on(task, model, batch):
    """Cost of a training step on a task's batch as `Feed` takes it: whole, or where lengths differ in parts of like
    length, without padding to speak of -> `Cost`; most: the sequences that fit into memory."""
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
    """{stage: (batch, steps)} of the recipe."""
    recipes = {start: recipe_line(task, TASKS[task], model, None, start)[2] for start in ("pretrain", "spt", "scratch")}
    size = TASKS[task].sizes[0]
    return {start: (recipe["batch"], recipe.get("steps") or recipe["epochs"] * (size // recipe["batch"]))
            for start, recipe in recipes.items()}


def run_without_values(model, *inputs, optimizer=None):
    """A forward pass and, with an optimiser, the rest of a step -> bytes kept for the backward pass, `Cost`."""
    def keep(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    saved = {}
    with Cost() as cost:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            with torch.autocast("cpu", torch.bfloat16, enabled=optimizer is not None):
                y = model(*inputs)         # y keeps alive what is counted
        for p in model.parameters():
            saved.pop(p.untyped_storage()._cdata, None)
        if optimizer is not None:
            F.cross_entropy(y.float(), torch.zeros(len(y), dtype=torch.int64)).backward()
            optimizer.step()
    return sum(s.nbytes() for s in saved.values()), cost


def print_models(task, length, only):
    """One line for each model, in the sizes that it has on a task: of a sequence."""
    outside = SimpleNamespace(length=length, vocab=256, channels=None)
    print(f"Sizes as on {task}; a batch of one sequence of {length:,} symbols. Kept: by autograd for the backward "
          "pass, float32.\n")
    print("| model | parameters of mixers | other parameters | MiB kept | MFLOPs per position |\n|---|---|---|---|---|")
    for model in MODELS:
        if only in (None, model) and (sizes := arch(task, model)) is not None:
            try:
                mixers, rest, memory, flops = describe(config(sizes, outside, causal="pythia" in model))
                print(f"| {model} | {mixers:,} | {rest:,} | {memory / 2**20:,.1f} | {flops / 1e6:,.2f} |")
            except SizeError as error:         # no such form
                print(f"| {model} | {error} | | | |")


COLUMNS = ("batch", "operations", "TFLOP", "GB moved", "ms computed", "ms of launches", "GB", "sequences on 80 GB",
           "hours")


def header(*first):
    best, real = ((f"{way['arithmetic']:g}", f"{way['launch'] * 1e6:g}") for way in (BEST, REALISTIC))
    print(f"Computed, not measured, for one {GPU['name']} ({GPU['bandwidth'] / 1e12:g} TB/s, "
          f"{GPU['bfloat16'] / 1e12:g} TFLOP/s in bfloat16, {GPU['float32'] / 1e12:g} in float32, "
          f"{GPU['exponentials'] / 1e12:g}e12 exponentials a second), in bfloat16 but for kernels, convolutions and "
          "norms. ms computed: each operation takes the longer of its arithmetic's and its memory's time; attention "
          f"takes its exponentials' as well, and its heads are at least {TILE} wide. ms of launches: {best[1]} "
          "microseconds an operation. GB: the most at once, with weights and AdamW's moments. hours: of the recipe's "
          f"steps, without evaluations, at best (ms computed, or {best[1]} microseconds an operation if that is more) "
          f"to realistic ({real[0]} times ms computed, or {real[1]} microseconds an operation; see gpu.md).\n")
    columns = [*first, *COLUMNS]
    print("|", " | ".join(columns), "|\n" + "|---" * len(columns) + "|")


def row(*first, task, model, batch, steps):
    """A line of the table -> its hours, at best and realistic."""
    cost = cost_on(task, model, batch)
    hours = [steps * seconds / 3600 for seconds in cost.seconds_of_a_step()]
    most = f"{cost.most:,}" if cost.most < math.inf else "any, in parts"
    print(f"| {' | '.join(first)} | {batch} | {cost.operations:,} | {cost.flops / 1e12:.2f} | {cost.bytes / 1e9:.1f} "
          f"| {1000 * cost.seconds:.1f} | {1000 * BEST['launch'] * cost.operations:.1f} | {cost.peak / 1e9:.2f} "
          f"| {most} | {hours[0]:.1f} to {hours[1]:.1f} |", flush=True)
    return hours


def print_steps(task, batch, only):
    """One line for each model, in the sizes that it has on a task: of a training step, and of pretraining with it."""
    print(f"A training step on {task}; hours of pretraining.", end=" ")
    header("model")
    for model in MODELS:
        if only in (None, model) and arch(task, model) is not None and "pythia" not in model:        # not pretrained
            own, steps = stages(task, model)["pretrain"]
            try:
                row(model, task=task, model=model, batch=batch or own, steps=steps * own // (batch or own))
            except SizeError as error:
                print(f"| {model} | {error} |")


def print_hours():
    """Table 2: the rotary Transformer and S4, every stage."""
    header("task", "model", "stage")
    hours = [row(task, model, stage, task=task, model=model, batch=batch, steps=steps)
             for task in "listops text retrieval image pathfinder pathx pathx256".split()
             for model in ("rotary", "s4") if (task, model) != ("pathx256", "rotary")
             for stage, (batch, steps) in stages(task, model).items()]
    print("\nAll of them: {:.0f} to {:.0f} hours.".format(*map(sum, zip(*hours))))


def main(argv=None):
    parser = Parser(description="What each architecture costs, in its sizes on a task.")
    parser.add_argument("task", nargs="?", default="text", help="default: text")
    parser.add_argument("length", nargs="?", type=between(int, 1, 2**31), default=1024,
                        help="of the sequence, default: 1024")
    parser.add_argument("--cost", type=between(int, 0, 2**31), nargs="?", const=0, metavar="BATCH",
                        help="of a training step at the task's own length instead; default batch: the recipe's")
    parser.add_argument("--model", choices=MODELS, metavar="MODEL", help="this one alone")
    parser.add_argument("--hours", action="store_true", help="table 2's rotary Transformer and S4, every stage")
    args = parser.parse_args(argv)
    if args.task not in TASKS:
        raise UserError(f"no task {args.task!r}; one of: {' '.join(TASKS)}")
    if args.cost is not None and "pythia" in (args.model or ""):
        raise UserError(f"{args.model} is not pretrained here, so it has no step of pretraining")
    if args.hours:
        print_hours()
    elif args.cost is not None:
        print_steps(args.task, args.cost, args.model)
    else:
        print_models(args.task, args.length, args.model)


if __name__ == "__main__":
    guarded(main)
