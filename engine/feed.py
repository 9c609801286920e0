"""The batches of training and evaluation: their examples, order and parts. They are prepared in the
background."""

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from data import order
from engine.graph import filled


def drawing(task, batch, rows, share, *key):
    """Return a function draw(hide, ratio, *more) -> positions (b, l) of `batch` to hide. rows: the
    examples of the batch, over all processes; share: the indices in `rows` of this process's.
    `hide` draws for the whole batch, so that the number of processes makes no difference."""

    def draw(hide, ratio, *more):
        positions = hide((len(rows) * task.documents, task.length), ratio, *key, *more)
        positions = positions.reshape(len(rows), -1, task.length)[share].reshape(-1, task.length)
        inputs = batch.symbols if batch.samples is None else batch.samples
        return torch.from_numpy(positions[:, : inputs.shape[1]]).to(batch.y.device)  # (b, l)

    return draw


class Feed:
    """The batches of a run. lengths: of the training examples (n,), if parts have similar lengths;
    else None. costly: parts have a fixed cost. records: steps become CUDA graphs (graph.py)."""

    POSITIONS = 4_096  # in a part, about (results/peers.md); small batches stay whole
    COSTLY = 4  # parts are this many times larger if every part has a fixed cost
    EVALUATED = 2**17  # least number of positions in an evaluation batch on a GPU

    def __init__(self, args, processes, task, examples, lengths, costly, records):
        self.args = args
        self.task = task  # a dict, see `kept`
        self.examples = examples
        self.lengths = lengths
        self.records = records
        self.world = processes.world
        self.rank = processes.rank
        self.device = processes.device
        self.positions = self.POSITIONS * (self.COSTLY if costly else 1)
        self.thread = ThreadPoolExecutor(1)
        self.steps = None  # yields the parts of each step
        # shuffle once per epoch: each step would be slow
        self.order = functools.lru_cache(1)(order)

    # ---- training --------------------------------------------------------------------------------

    def rows(self, step):
        """Return the examples of a step's batch, int64 (batch,), and the indices of this process's
        examples in it, longest first if lengths differ: a pure function of seed and step."""
        args = self.args
        epoch, i = divmod(step, self.examples // args.batch)
        rows = self.order(self.examples, args.seed, epoch)[i * args.batch : (i + 1) * args.batch]
        if args.fresh:  # no example comes twice
            rows = np.arange(step * args.batch, (step + 1) * args.batch)
        if self.lengths is None:
            first = len(rows) * self.rank // self.world
            return rows, np.arange(first, len(rows) * (self.rank + 1) // self.world)
        return rows, np.argsort(-self.lengths[rows], kind="stable")[self.rank :: self.world]

    def parts(self, batch, rows, share, whole=False):
        """Cut this process's share of a batch into parts that pass through the model one after
        another; whole: into one. A mask `hidden` (b, l) becomes flat indices, int64 (m,), because a
        GPU would have to wait for their number."""
        n = len(share)
        parts = [batch] if whole else [self.cut(batch, n, *cut) for cut in self.cuts(rows, n)]
        if "hidden" not in batch._fields:
            return parts
        if self.records and self.args.mask is not None:
            return [filled(part, self.args.mask) for part in parts]
        return [part._replace(hidden=part.hidden.flatten().nonzero()[:, 0]) for part in parts]

    def cuts(self, rows, n):
        """Return [(first, end, width)], the parts of this process's n examples: examples first..end
        and the first `width` positions, None for all.

        A part has at most --micro-batch examples. If lengths differ, it has about `positions`
        positions and is cut to its longest sequence: two thirds of a whole IMDb batch would be
        padding. All processes make equally many parts, as BatchNorm and DDP synchronise in each."""
        largest = -(-len(rows) // self.world)  # the largest share of a process
        smallest = len(rows) // self.world
        most = self.args.micro_batch or largest
        documents = self.task["documents"]
        if self.lengths is None:
            parts = -(-largest // most)
            bounds = [n * i // parts for i in range(parts + 1)]
            return [(first, end, None) for first, end in itertools.pairwise(bounds)]

        # the longest sequence of any process at each index of a share
        longest = -np.sort(-self.lengths[rows])[:: self.world]
        bounds, widths = [0], []
        while bounds[-1] < smallest:
            width = int(longest[bounds[-1]])
            widths.append(width if width <= 512 else -(-width // 128) * 128)  # fewer shapes
            size = min(most, max(1, self.positions // (width * documents)))
            if bounds[-1] + size >= smallest and largest - bounds[-1] > most:
                size = most // 2  # the last row of some processes needs room
            bounds.append(bounds[-1] + size)
        bounds[-1] = n
        return [(*pair, width) for pair, width in zip(itertools.pairwise(bounds), widths)]

    def cut(self, batch, n, first, end, width):
        """Return examples first..end and the first `width` positions of a batch of n examples."""

        def piece(name, tensor):
            if tensor is None:
                return None
            per_example = 1 if len(tensor) == n else self.task["documents"]
            rows = tensor[per_example * first : per_example * end]
            several_labels = name == "y" and self.task["target"] == "labels"
            return rows if rows.ndim == 1 or several_labels else rows[:, :width]

        return batch._make(map(piece, batch._fields, batch))

    def next_parts(self, step, steps, make_parts):
        """Return `make_parts(step)`, a list of tuples of tensors, on the device."""
        self.steps = self.steps or self.ahead(make_parts, range(step, steps))
        return next(self.steps)

    def ahead(self, make_parts, keys):
        """Yield `make_parts(key)` for each key. A thread makes the next parts meanwhile."""
        futures = (self.thread.submit(self.pinned, make_parts, key) for key in keys)
        # each pair begins the next parts before it waits for these
        for future, _ in itertools.pairwise(itertools.chain(futures, [None])):
            yield [self.shipped(part) for part in future.result()]

    def pinned(self, make_parts, argument):
        """Call `make_parts(argument)`; for a GPU into pinned memory, whose copies do not block."""
        parts = make_parts(argument)
        if self.device.type == "cpu":
            return parts
        return [mapped(torch.Tensor.pin_memory, part) for part in parts]

    def shipped(self, part):
        return mapped(lambda tensor: tensor.to(self.device, non_blocking=True), part)

    # ---- evaluation ------------------------------------------------------------------------------

    def batches(self, split, lengths=None, independent=False):
        """Yield (i, examples, batch), one per round; see `Run.batches`. batch is None if only other
        processes have a batch left in the last round."""
        size = self.args.micro_batch or self.args.batch
        if independent and self.device.type == "cuda" and not self.args.micro_batch:
            size = max(size, self.EVALUATED // (self.task["length"] * self.task["documents"]))
        n = len(split)
        order = np.arange(n) if lengths is None else np.argsort(lengths, kind="stable")

        def rows_of(i):
            return order[i * size : (i + 1) * size]

        def make_parts(i):
            rows = rows_of(i)
            return [split.batch(rows)] if len(rows) else []

        # as many rounds on all processes
        numbers = range(self.rank, self.rank + -(-n // size), self.world)
        for i, parts in zip(numbers, self.ahead(make_parts, numbers)):
            yield i, rows_of(i), parts[0] if parts else None


def mapped(function, part):
    """Return a tuple of tensors with a function applied to each; None stays None."""
    return part._make(None if tensor is None else function(tensor) for tensor in part)
