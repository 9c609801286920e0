"""Which examples a step or an evaluation sees: in what order, cut into which parts, made while the step before runs."""
import itertools
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from data import order


def drawing(task, batch, rows, mine, *key):
    """Return draw(hide, ratio) -> positions (b, l) of `batch` to hide. rows: the examples of the whole batch, of all
    processes; mine: the places of this process's in it. `hide` is called once for the whole batch, so positions depend
    neither on the number of processes nor on the order in which they compute."""
    def draw(hide, ratio):
        whole = hide((len(rows) * task.documents, task.length), ratio, *key)
        ours = whole.reshape(len(rows), -1, task.length)[mine].reshape(-1, task.length)       # (b, task's length)
        l = (batch.symbols if batch.samples is None else batch.samples).shape[1]
        return torch.from_numpy(ours[:, :l]).to(batch.y.device)                               # (b, l)
    return draw


class Feed:
    """The batches of a run. lengths: of the training examples, (n,), where a batch is cut into parts of like length, or
    None. positions: of such a part, about. records: whether steps are recorded, see graph.py."""

    POSITIONS = 4_096                          # results/speed.md; small batches stay whole
    COSTLY = 4                                 # times as many where each part costs something of its own
    EVALUATED = 2**17                          # positions of an evaluation batch on a GPU, at least

    def __init__(self, args, processes, task, examples, lengths, costly, records):
        self.args, self.task, self.examples, self.lengths, self.records = args, task, examples, lengths, records
        self.world, self.rank, self.device = processes.world, processes.rank, processes.device
        self.per_epoch = examples // args.batch
        self.positions = self.POSITIONS * (self.COSTLY if costly else 1)
        self.thread, self.prepared = ThreadPoolExecutor(1), None

    def rows(self, step):
        """The examples of a step's batch, int64 (batch,), and which of them are this process's, the longest first where
        lengths differ: a pure function of seed and step, so that there is no sampler state to save."""
        args, (epoch, i) = self.args, divmod(step, self.per_epoch)
        if getattr(self, "epoch", None) != epoch:                      # shuffling at every step would take time
            self.epoch, self.order = epoch, order(self.examples, args.seed, epoch)
        rows = self.order[i * args.batch:(i + 1) * args.batch]
        if self.lengths is None:
            return rows, np.arange(*(len(rows) * r // self.world for r in (self.rank, self.rank + 1)))
        return rows, np.argsort(-self.lengths[rows], kind="stable")[self.rank::self.world]

    def parts(self, whole, rows, mine, documents=1):
        """A batch of this process, tensors whose rows are sequences (`documents` an example) or examples, in parts that
        pass through the model one after another. Where lengths differ they are cut to the longest of a part, of some
        `positions`: of a batch of film reviews two thirds would be padding. At most --micro-batch examples each. Every
        process makes equally many, because BatchNorm and DDP meet in each of them."""
        largest, smallest = -(-len(rows) // self.world), len(rows) // self.world
        n, most = len(mine), self.args.micro_batch or largest
        if self.lengths is None:
            parts = min(-(-largest // most), smallest)
            bounds, widths = [n * i // parts for i in range(parts + 1)], [None] * parts
        else:
            longest, bounds, widths = -np.sort(-self.lengths[rows])[::self.world], [0], []
            while bounds[-1] < smallest:
                width = int(longest[bounds[-1]])
                widths.append(width if width <= 512 else -(-width // 128) * 128)                # few shapes
                bounds.append(bounds[-1] + min(most, max(1, self.positions // (width * documents))))
            bounds[-1] = n

        def cut(view, low, high, width):
            each = 1 if len(view) == n else documents                  # rows of an example
            some = view[each * low:each * high]
            return some[:, :width] if view.ndim > 1 else some

        return [whole._make(view if view is None else cut(view, *pair, width) for view in whole)
                for pair, width in zip(itertools.pairwise(bounds), widths)]

    def numbers(self, hidden):
        """Return the flat indices, int64 (m,), of a mask (b, l): a GPU would have to wait for a mask to be counted.
        Recorded steps need the same m, so negative numbers, which stand for no position, fill up the rest."""
        found = hidden.flatten().nonzero()[:, 0]
        if not self.records or self.args.mask is None:
            return found
        n, ratio = hidden.numel(), self.args.mask
        most = min(n, 64 * math.ceil((n * ratio + 6 * math.sqrt(n * ratio * (1 - ratio))) / 64))       # six deviations
        return torch.cat((found, torch.arange(-1, len(found) - most - 1, -1))) if len(found) < most else found

    def take(self, step, steps, prepare):
        """What `prepare(step)` gives, a list of tuples of tensors, on the device. All but the first are made in the
        background, during the step before."""
        parts = (self.prepared or self.thread.submit(self.pinned, prepare, step)).result()
        self.prepared = self.thread.submit(self.pinned, prepare, step + 1) if step + 1 < steps else None
        return [self.shipped(part) for part in parts]

    def pinned(self, prepare, step):
        """`prepare(step)`, for a GPU in memory from which it copies without holding up the CPU."""
        parts = prepare(step)
        if self.device.type == "cpu":
            return parts
        return [part._make(view if view is None else view.pin_memory() for view in part) for part in parts]

    def shipped(self, part):
        return part._make(view if view is None else view.to(self.device, non_blocking=True) for view in part)

    def batches(self, split, lengths=None, independent=False):
        """(i, examples, batch) of the batches of an evaluation, of this process one in each round: batch is None in a
        last round that others fill. The other arguments: `Run.batches`."""
        size, n = self.args.micro_batch or self.args.batch, len(split)
        if independent and self.device.type == "cuda" and not self.args.micro_batch:
            size = max(size, self.EVALUATED // (self.task["length"] * self.task["documents"]))
        order, ahead = np.arange(n) if lengths is None else np.argsort(lengths, kind="stable"), None

        def submit(i):
            rows = order[i * size:(i + 1) * size]
            return i, rows, self.thread.submit(self.pinned, lambda _: [split.batch(rows)], 0) if len(rows) else None

        for first in range(0, -(-n // size), self.world):                          # as many rounds on every process
            i, rows, made = ahead or submit(first + self.rank)
            ahead = submit(i + self.world)
            yield i, rows, made and self.shipped(made.result()[0])
