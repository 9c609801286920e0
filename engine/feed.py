"""The batches of training and evaluation: their examples, order and parts. They are prepared in the
background."""

import functools
import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from data import order


def drawing(task, batch, rows, mine, *key):
    """Return a function draw(hide, ratio, *more) -> positions (b, l) of `batch` to hide. rows: the
    examples of the batch, over all processes. mine: the indices in `rows` of this process's
    examples. `hide` is called once for the whole batch, so the positions do not depend on the
    number of processes or the order in which they compute."""

    def draw(hide, ratio, *more):
        whole = hide((len(rows) * task.documents, task.length), ratio, *key, *more)
        # (b, task's length)
        ours = whole.reshape(len(rows), -1, task.length)[mine].reshape(-1, task.length)
        l = (batch.symbols if batch.samples is None else batch.samples).shape[1]
        return torch.from_numpy(ours[:, :l]).to(batch.y.device)  # (b, l)

    return draw


class Feed:
    """The batches of a run. lengths: lengths of the training examples (n,), if batches are cut into
    parts of similar length; else None. costly: every part has a fixed cost. records: steps are
    recorded as CUDA graphs (graph.py)."""

    POSITIONS = 4_096  # in a part, about (results/peers.md); small batches stay whole
    COSTLY = 4  # parts are this many times larger if every part has a fixed cost
    EVALUATED = 2**17  # least number of positions in an evaluation batch on a GPU

    def __init__(self, args, processes, task, examples, lengths, costly, records):
        self.args, self.task, self.examples, self.lengths, self.records = (
            args,
            task,
            examples,
            lengths,
            records,
        )
        self.world, self.rank, self.device = processes.world, processes.rank, processes.device
        self.per_epoch = examples // args.batch
        self.positions = self.POSITIONS * (self.COSTLY if costly else 1)
        self.thread, self.prepared = ThreadPoolExecutor(1), None
        # shuffle once per epoch: each step would be slow
        self.order = functools.lru_cache(1)(order)

    def rows(self, step):
        """Return the examples of a step's batch, int64 (batch,), and the indices of this process's
        examples in it, longest first if lengths differ. A pure function of seed and step, so there
        is no sampler state to save."""
        args, (epoch, i) = self.args, divmod(step, self.per_epoch)
        rows = self.order(self.examples, args.seed, epoch)[i * args.batch : (i + 1) * args.batch]
        if args.fresh:  # no example comes twice
            rows = np.arange(step * args.batch, (step + 1) * args.batch)
        if self.lengths is None:
            return rows, np.arange(
                *(len(rows) * r // self.world for r in (self.rank, self.rank + 1))
            )
        return rows, np.argsort(-self.lengths[rows], kind="stable")[self.rank :: self.world]

    def parts(self, whole, rows, mine, documents=1):
        """Cut a batch of this process into parts that pass through the model one after another.
        Rows of the tensors in `whole` are examples, or sequences (`documents` per example). A part
        has at most --micro-batch examples. If lengths differ, it has about `positions` positions
        and is cut to its longest sequence: two thirds of a whole IMDb batch would be padding. All
        processes make equally many parts, as BatchNorm and DDP synchronise in each."""
        largest, smallest = -(-len(rows) // self.world), len(rows) // self.world
        n, most = len(mine), self.args.micro_batch or largest
        if self.lengths is None:
            parts = -(-largest // most)
            bounds, widths = [n * i // parts for i in range(parts + 1)], [None] * parts
        else:
            longest, bounds, widths = -np.sort(-self.lengths[rows])[:: self.world], [0], []
            while bounds[-1] < smallest:
                width = int(longest[bounds[-1]])
                widths.append(width if width <= 512 else -(-width // 128) * 128)  # fewer shapes
                size = min(most, max(1, self.positions // (width * documents)))
                if bounds[-1] + size >= smallest and largest - bounds[-1] > most:
                    size = most // 2  # the last row of some processes needs room
                bounds.append(bounds[-1] + size)
            bounds[-1] = n

        several = self.task["target"] == "labels"

        def cut(name, view, low, high, width):
            each = 1 if len(view) == n else documents  # rows per example
            some = view[each * low : each * high]
            return some if view.ndim == 1 or name == "y" and several else some[:, :width]

        return [
            whole._make(
                view if view is None else cut(name, view, *pair, width)
                for name, view in zip(whole._fields, whole)
            )
            for pair, width in zip(itertools.pairwise(bounds), widths)
        ]

    def numbers(self, hidden):
        """Return the flat indices, int64 (m,), where a mask (b, l) is True. (A GPU would have to
        wait for their count.) Recorded steps need the same m every time, so negative numbers fill
        up the rest. They stand for no position."""
        found = hidden.flatten().nonzero()[:, 0]
        if not self.records or self.args.mask is None:
            return found
        n, ratio = hidden.numel(), self.args.mask
        # mean + 6 std
        most = min(n, 64 * math.ceil((n * ratio + 6 * math.sqrt(n * ratio * (1 - ratio))) / 64))
        return (
            torch.cat((found, torch.arange(-1, len(found) - most - 1, -1)))
            if len(found) < most
            else found
        )

    def take(self, step, steps, prepare):
        """Return the result of `prepare(step)`, a list of tuples of tensors, on the device. The
        next step's result is prepared in the background meanwhile."""
        parts = (self.prepared or self.thread.submit(self.pinned, prepare, step)).result()
        self.prepared = (
            self.thread.submit(self.pinned, prepare, step + 1) if step + 1 < steps else None
        )
        return [self.shipped(part) for part in parts]

    def pinned(self, prepare, step):
        """Call `prepare(step)`. For a GPU, put the result into pinned memory: copies from it do not
        block the CPU."""
        parts = prepare(step)
        if self.device.type == "cpu":
            return parts
        return [
            part._make(view if view is None else view.pin_memory() for view in part)
            for part in parts
        ]

    def shipped(self, part):
        return part._make(
            view if view is None else view.to(self.device, non_blocking=True) for view in part
        )

    def batches(self, split, lengths=None, independent=False):
        """Yield (i, examples, batch) for the evaluation batches of this process, one per round.
        batch is None if only other processes have a batch left in the last round. `Run.batches`
        explains the other arguments."""
        size, n = self.args.micro_batch or self.args.batch, len(split)
        if independent and self.device.type == "cuda" and not self.args.micro_batch:
            size = max(size, self.EVALUATED // (self.task["length"] * self.task["documents"]))
        order, ahead = np.arange(n) if lengths is None else np.argsort(lengths, kind="stable"), None

        def submit(i):
            rows = order[i * size : (i + 1) * size]
            return (
                i,
                rows,
                self.thread.submit(self.pinned, lambda _: [split.batch(rows)], 0)
                if len(rows)
                else None,
            )

        for first in range(0, -(-n // size), self.world):  # as many rounds on all processes
            i, rows, made = ahead or submit(first + self.rank)
            ahead = submit(i + self.world)
            yield i, rows, made and self.shipped(made.result()[0])
