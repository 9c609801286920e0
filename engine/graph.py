"""A training step as a CUDA graph, for --compile."""

import math

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from files import UserError
from tasks import IGNORE


def records(args, processes, optimizer, equal):
    """Return whether steps are recorded: with --compile on one GPU, if all steps have the same
    shapes (`equal`) and the optimiser can read its learning rates from the device."""
    capturable = all("capturable" in group for group in optimizer.param_groups)
    one_gpu = processes.device.type == "cuda" and processes.world == 1
    return args.compile and one_gpu and equal and capturable and not args.arch.get("guided")


def filled(part, ratio):
    """Return a part of a batch with as many positions to predict as any other part of its shape: a
    graph demands equal shapes.

    part.hidden: a mask (b, l), True with probability `ratio` at each position -> its flat indices,
    then negative indices of positions that are not hidden. These have no target: IGNORE, or NaN
    among samples. So a loss needs no case for them."""
    mask = part.hidden.flatten()
    hidden = mask.nonzero()[:, 0]
    n = len(mask)
    # mean + 6 standard deviations, a multiple of 64
    most = 64 * math.ceil((n * ratio + 6 * math.sqrt(n * ratio * (1 - ratio))) / 64)
    free = (~mask).nonzero()[: max(0, most - len(hidden)), 0]
    missing = math.nan if part.targets.is_floating_point() else IGNORE
    without = ~part.hidden.view(*part.hidden.shape, *[1] * (part.targets.ndim - 2))
    targets = part.targets.masked_fill(without, missing)
    return part._replace(hidden=torch.cat((hidden, free - n)), targets=targets)


class Recording:
    """A training step as a CUDA graph. A CPU needs longer to launch hundreds of small operations
    than a GPU to compute them, so they are recorded once and then launched with one call.

    Call it like the step itself. The first steps run eagerly, because a library's first calls
    cannot be recorded, and so do steps of other shapes."""

    WARM = 3  # steps before recording

    def __init__(self, step, optimizer):
        self.step = step
        self.optimizer = optimizer
        self.replay = None  # launches the graph
        self.shapes = None  # of the last step's tensors; once recorded, of the graph's
        self.seen = 0  # steps of these shapes
        self.stream = None

    def __call__(self, *arguments):
        tensors, structure = tree_flatten(arguments)
        shapes = [getattr(tensor, "shape", None) for tensor in tensors]  # None of None
        if self.replay is None:
            self.seen = self.seen + 1 if shapes == self.shapes else 1
            self.shapes = shapes
            if self.seen > self.WARM:
                self.record(tensors, structure)
        if self.replay is None or shapes != self.shapes:
            return self.eagerly(lambda: self.step(*arguments))
        for place, tensor in zip(self.tensors, tensors):
            if tensor is not None:
                place.copy_(tensor)
        for rate, group in zip(self.rates, self.optimizer.param_groups):
            rate.fill_(group["lr"])
        self.replay()

    def record(self, tensors, structure):
        """Record the step. The graph reads inputs from `tensors`, learning rates from `rates`."""
        groups = self.optimizer.param_groups
        before = [dict(lr=group["lr"], capturable=group["capturable"]) for group in groups]
        self.tensors = [None if tensor is None else tensor.clone() for tensor in tensors]
        self.rates = [
            torch.tensor(group["lr"], device=group["params"][0].device) for group in groups
        ]
        for group, rate in zip(groups, self.rates):
            group.update(lr=rate, capturable=True)
        try:
            self.replay = self.capture(lambda: self.step(*tree_unflatten(self.tensors, structure)))
        except RuntimeError as error:
            # ending a failed recording raises, too
            cause = str(error.__context__ or error).strip().splitlines()[0]
            raise UserError(f"--compile: a step is no CUDA graph: {cause}") from error
        for group, options in zip(groups, before):
            group.update(options)

    def capture(self, function):
        graph = torch.cuda.CUDAGraph()
        # feed.py's thread runs meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            function()
        return graph.replay

    def eagerly(self, function):
        """Run the step on a separate stream, as PyTorch requires before a recording."""
        main = torch.cuda.current_stream()
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            function()
        main.wait_stream(self.stream)
