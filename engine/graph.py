"""A training step as a CUDA graph, for --compile."""

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from files import UserError


def records(args, processes, optimizer, equal):
    """Return whether steps are recorded: with --compile on one GPU, if all steps have the same
    shapes (`equal`) and the optimiser can read its learning rates from the device, as those of
    torch can that have the option `capturable`."""
    capturable = all("capturable" in group for group in optimizer.param_groups)
    one_gpu = processes.device.type == "cuda" and processes.world == 1
    return args.compile and one_gpu and equal and capturable and not args.arch.get("guided")


class Recorded:
    """A training step as a CUDA graph. A CPU needs longer to launch hundreds of small operations
    than a GPU to compute them, so they are recorded once and then launched with one call.

    Call it like the step itself. The first steps run eagerly, because a library's first calls
    cannot be recorded. Steps of other shapes than the recorded one run eagerly, too. A step that
    reads a value on the CPU raises UserError."""

    WARM = 3  # steps before recording

    def __init__(self, step, optimizer):
        self.step, self.optimizer = step, optimizer
        self.replay, self.shapes, self.seen, self.side = None, None, 0, None

    def __call__(self, *arguments):
        tensors, structure = tree_flatten(arguments)
        shapes = [None if v is None else v.shape for v in tensors]
        if self.replay is None:
            self.seen = self.seen + 1 if shapes == self.shapes else 1
            self.shapes = shapes
            if self.seen > self.WARM:
                self.record(tensors, structure)
        if self.replay is None or shapes != self.shapes:
            return self.eagerly(lambda: self.step(*arguments))
        for mine, given in zip(self.tensors, tensors):
            if given is not None:
                mine.copy_(given)
        for rate, group in zip(self.rates, self.optimizer.param_groups):
            rate.fill_(group["lr"])
        self.replay()

    def record(self, tensors, structure):
        """Record the step. The graph reads its inputs from `tensors` and its learning rates from
        `rates`."""
        groups = self.optimizer.param_groups
        before = [(group["lr"], group["capturable"]) for group in groups]
        self.tensors = [v if v is None else v.clone() for v in tensors]
        self.rates = [
            torch.tensor(rate, device=group["params"][0].device)
            for group, (rate, _) in zip(groups, before)
        ]
        for group, rate in zip(groups, self.rates):
            group.update(lr=rate, capturable=True)
        try:
            self.replay = self.capture(lambda: self.step(*tree_unflatten(self.tensors, structure)))
        except RuntimeError as error:
            # ending a failed recording raises, too
            cause = str(error.__context__ or error).strip().splitlines()[0]
            raise UserError(
                f"--compile: cannot record a step as a CUDA graph: {cause}; leave out --compile"
            ) from error
        for group, (rate, capturable) in zip(groups, before):
            group.update(lr=rate, capturable=capturable)

    def capture(self, function):
        graph = torch.cuda.CUDAGraph()
        # feed.py's thread runs meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            function()
        return graph.replay

    def eagerly(self, function):
        """Run the step on a separate stream, as PyTorch requires before a recording."""
        main, self.side = torch.cuda.current_stream(), self.side or torch.cuda.Stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            function()
        main.wait_stream(self.side)
