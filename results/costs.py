"""What each architecture costs, in the sizes that it has on a task: the tables of results/costs.md.

    python results/costs.py [TASK] [LENGTH]      of a sequence: parameters, memory, FLOPs
    python results/costs.py TASK LENGTH --cost   of a training step: operations, FLOPs, bytes, the least time on a GPU

Models run on tensors that have shapes but no values, so nothing here takes a GPU's memory or time.
"""
import contextlib
import math
import sys
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

from kernels import ceil_div, rotary_turns, two_levels
from data import TASKS, Parser, UserError
from models import MODELS, Backbone, Denoiser, SizeError, config, count, make_optimizer
from recipes import arch
from run import between, guarded

# What its maker says of the GPU that costs are computed for: bytes, bytes a second, and operations a second of matrix
# products, in bfloat16 and in float32.
GPU = dict(name="H100 SXM", memory=80e9, bandwidth=3.35e12, bfloat16=989e12, float32=67e12)


class Cost(TorchDispatchMode):
    """Counts what runs under it, without autograd's views: operations; FLOPs of matrix products, attention and Fourier
    transforms (2 a multiply-add, 2.5 n log2 n a real FFT); bytes read and written, each operation's operands once; and
    the seconds that GPU needs at least, if each operation takes the larger of its arithmetic's and its memory's time.
    """

    def __init__(self):
        super().__init__()
        self.operations, self.flops, self.bytes, self.seconds = 0, 0, 0, 0.0
        aten = torch.ops.aten
        self.formulas = torch.utils.flop_counter.flop_registry | {
            aten._fft_r2c: self.fft, aten._fft_c2r: self.fft,
            aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, *_, **__: 4 * q.numel() * k.shape[-2],
            aten._scaled_dot_product_flash_attention_for_cpu_backward:
                lambda grad, q, k, *_, **__: 10 * q.numel() * k.shape[-2]}

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
            # what an expanded tensor repeats is read once
            moved = sum(min(v.nbytes, v.untyped_storage().nbytes()) for v in tensors)
            peak = GPU["bfloat16" if tensors and tensors[0].dtype == torch.bfloat16 else "float32"]
            self.operations, self.flops, self.bytes = self.operations + 1, self.flops + flops, self.bytes + moved
            self.seconds += max(flops / peak, moved / GPU["bandwidth"])
        return result


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


def cost_of_step(c, batch):
    """Cost of a training step, forward, backward and AdamW, of `batch` sequences of symbols of which a quarter is
    hidden, in bfloat16 where autocast takes it -> `Cost`, with the bytes that autograd keeps and those of weights,
    gradients and AdamW's moments."""
    with without_values():
        model = Denoiser(Backbone(c), c.vocab)
        optimizer = make_optimizer(model, 1e-3, 0.0)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()                                             # makes the moments, off the count
        optimizer.zero_grad()
        x, lengths = torch.zeros(batch, c.length, dtype=torch.int64), torch.full((batch,), c.length)
        hidden = torch.zeros(ceil_div(batch * c.length, 4), dtype=torch.int64)
        kept, cost = run_without_values(model, x, lengths, hidden, optimizer=optimizer)
    cost.kept, cost.weights = kept, 16 * count(model)
    return cost


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


def print_models(task, length, batch=None):
    """One line for each model, in the sizes that it has on a task: of a sequence or, with batch, of a training step."""
    outside = SimpleNamespace(length=length, vocab=256, channels=None)
    configs = {model: config(sizes, outside, causal="pythia" in model)
               for model in MODELS if (sizes := arch(task, model)) is not None}
    if batch is None:
        print(f"Sizes as on {task}; a batch of one sequence of {length:,} symbols. Kept: by autograd for the backward "
              "pass, float32.\n")
        print("| model | parameters of mixers | other parameters | MiB kept | MFLOPs per position |")
        print("|---|---|---|---|---|")
        for model, c in configs.items():
            try:
                mixers, rest, memory, flops = describe(c)
                print(f"| {model} | {mixers:,} | {rest:,} | {memory / 2**20:,.1f} | {flops / 1e6:,.2f} |")
            except SizeError as error:         # no such form
                print(f"| {model} | {error} | | | |")
        return
    print(f"Sizes as on {task}; a training step on {batch} sequences of {length:,} symbols, bfloat16 but for kernels, "
          f"convolutions and norms. Computed, not measured: the least time, if each operation took the larger of its "
          f"arithmetic's and its memory's on one {GPU['name']} ({GPU['bandwidth'] / 1e12:g} TB/s, "
          f"{GPU['bfloat16'] / 1e12:g} TFLOP/s in bfloat16, {GPU['float32'] / 1e12:g} in float32), and the sequences "
          f"whose kept tensors fill {GPU['memory'] / 1e9:g} GB.\n")
    print("| model | operations | TFLOP | GB moved | ms at least | GB kept | sequences at most |")
    print("|---|---|---|---|---|---|---|")
    for model, c in configs.items():
        step, twice = cost_of_step(c, batch), cost_of_step(c, 2 * batch)
        more = (GPU["memory"] - step.weights - step.kept) * batch / (twice.kept - step.kept)         # sequences
        print(f"| {model} | {step.operations:,} | {step.flops / 1e12:.2f} | {step.bytes / 1e9:.1f} "
              f"| {1000 * step.seconds:.1f} | {(step.kept + step.weights) / 1e9:.2f} "
              f"| {int(batch + more):,} |")


def main(argv=None):
    parser = Parser(description="What each architecture costs, in its sizes on a task.")
    parser.add_argument("task", nargs="?", default="text", help="default: text")
    parser.add_argument("length", nargs="?", type=between(int, 1, 2**31), default=1024,
                        help="of the sequence, default: 1024")
    parser.add_argument("--cost", dest="batch", type=between(int, 1, 2**31), nargs="?", const=32, metavar="BATCH",
                        help="of a training step instead, and the least time it takes on a GPU; default batch: 32")
    args = parser.parse_args(argv)
    if args.task not in TASKS:
        raise UserError(f"no task {args.task!r}; one of: {' '.join(TASKS)}")
    print_models(**vars(args))


if __name__ == "__main__":
    guarded(main)
