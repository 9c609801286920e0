"""Data: every task of the paper, generated or read, prepared once into flat memory-mapped arrays.

    python data.py --list                          # the tasks
    python data.py --task listops                  # 100,000 expressions: well under a minute
    python data.py --task pathx                    # 200,000 images of 128 px, all cores, 3.3 GB
    python data.py --task pathx --lra-dir DIR      # read the official LRA release instead of generating
    python data.py --task pathx --stats            # generator beside the official generator's figures

A prepared task is a folder `data/<task>/` with `{train,val,test}_{x,y}.npy` (tokens: and `_offsets.npy`) and
`meta.json`, which is written last: its presence means done. Expected last line:

    data/pathx: ready (train 160,000, val 20,000, test 20,000; generated, seed 0)

The training scripts call `prepare` on first use, then `load`, `Split.batch`, `normalise` and `order`.

The official LRA archive is no longer public, so its ListOps and Pathfinder are generated here by the
processes of the official generators [1, 2], which are rejection samplers. The official Pathfinder script
draws masks and tries one attempt at a time. Here thousands of attempts are arrays, an attempt is a list of
segments, and every test against the mask is a look-up in a table over pairs of segments, so that no mask is
drawn while snakes grow: the same distribution, 100 to 300 times faster on one core.

Glossary of Pathfinder
    snake       a dashed curve of `contour` segments; two long target snakes and several short distractors
    segment     one dash (the official "paddle"), `paddle` px long, followed by a gap of 2 * margin px
    margin      px kept free around every segment
    seed        a snake's first segment;  tail: its first point, its origin;  head: a segment's far end
    pivot       the point `margin` px behind a segment's start: the centre of the circle its head lies on
    reach       radius of that circle, paddle + margin
    ink, mask   stamps of a segment: what is drawn; what it forbids to later segments (ink grown by margin)
    disc        marker on two snake ends; label 1: both on the same snake, 0: on different snakes

[1] github.com/google-research/long-range-arena, lra_benchmarks/data: generators, readers
[2] github.com/drewlinsley/pathfinder, snakes2.py and snakes.py (Linsley et al. 2018)
"""
import argparse
import fcntl
import functools
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
import zipfile
import zlib
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from PIL import Image, ImageDraw
from tqdm import tqdm

# torch is imported where tensors are made: generator processes do without it and start much faster.

MASK, PAD, UNK, EOS = 0, 1, 2, 3
SPLITS = ("train", "val", "test")
CHUNK = 500        # examples generated from one random stream: the unit of work, of progress and of restart


class UserError(Exception):
    """A user's mistake, in one line: what is wrong, the value, the command that fixes it."""


# ---- tasks ---------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Grammar:
    """Parameters of the ListOps generator [1]."""
    depth: int = 10                 # nodes at this depth are digits
    arguments: tuple = (2, 10)      # fewest and most arguments of an operator, inclusive
    leaf: float = 0.75              # probability that a node above the last depth is a digit
    symbols: tuple = (500, 2000)    # expressions strictly between these lengths are kept


@dataclass(frozen=True)
class Snakes:
    """Parameters of the Pathfinder generator [1, 2]; lengths in px."""
    padding: int                    # forbidden frame
    seed_distance: int              # between the two tails
    paddle: int                     # segment length
    thickness: float                # segment width
    margins: tuple                  # drawn uniformly for each image
    continuity: float               # turns of up to 90 / continuity degrees
    marker: float                   # disc radius
    distractors: int                # attempted; the crowded ones fail
    snake_contrast: float           # gray of distractors; targets have snake_contrast * paddle_contrast
    paddle_contrast: float = 1.0
    frame: int | None = None        # kept free of the first seed; official: twice the seed distance
    contour: int = 14               # segments of a target snake
    distractor: int = 4             # segments of a distractor (contour // 3)
    levels: int = 256               # gray levels kept
    distinct: bool = False          # draw an image that came up before again, so that splits are disjoint


@dataclass(frozen=True)
class Task:
    """One row of TASKS: everything that defines a data set."""
    family: str                     # which prepare_<family> makes it
    kind: str                       # "tokens" or "continuous"
    length: int                     # longest sequence l, <eos> included
    classes: int
    sizes: tuple                    # examples in train, val, test
    vocab: int = 256                # tokens: symbols and specials; continuous: gray levels
    channels: int = 1
    mean: float = 0.5               # x/255 -> (x/255 - mean) / std
    std: float = 0.5
    side: int | None = None         # images: length is side * side, row by row
    make: Grammar | Snakes | None = None


def _expressions(length, sizes, *grammar):
    return Task("listops", "tokens", length, 10, sizes, vocab=19, make=Grammar(*grammar))


def _images(side, sizes, *snakes, **more):
    return Task("pathfinder", "continuous", side * side, 2, sizes, side=side, make=Snakes(*snakes, **more))


LRA = (160_000, 20_000, 20_000)
DEMO = (5_000, 1_000, 2_000)
TASKS = {
    #                               length  sizes             depth  arguments  leaf  symbols
    "listops":         _expressions(2048, (96_000, 2_000, 2_000), 10, (2, 10), 0.75, (500, 2000)),
    "listops_demo":    _expressions(80,   DEMO,                    4, (2, 4),  0.75, (15, 80)),
    #                          side sizes padding seed paddle thick margins cont. marker distr. contrasts
    "pathfinder":      _images(32,  LRA,   1,   7,   2,   0.5,  (1,),   1.0,  1.5,   5,   2.0, 0.75),
    "pathfinder64":    _images(64,  LRA,   1,  12,   5,   1.0,  (1,),   1.8,  2.5,   5,   0.8),
    "pathx":           _images(128, LRA,   1,  20,   5,   1.5,  (2, 3), 1.8,  3.0,   8,   0.9),
    "pathx256":        _images(256, LRA,  22,  27,   5,   2.0,  (3,),   1.8,  5.0,   7,   1.0),
    # Large discs, bright against the curves, and three gray levels: how the curves run is all there is to learn.
    "pathfinder_demo": _images(14,  DEMO,  1,   4,   2,   1.0,  (1,),   1.0,  1.5,   0,   0.66,
                               frame=5, contour=4, levels=3, distinct=True),
}


def task_row(task):
    """The row of `task`; UserError with the list of tasks when there is none."""
    if task not in TASKS:
        raise UserError(f"no task '{task}'; the tasks are: {' '.join(TASKS)}")
    return TASKS[task]


# ---- reading: what the training scripts use ------------------------------------------------------

@dataclass
class Split:
    """One split, memory-mapped. x: tokens (total,) uint8 or continuous (n, l, c) uint8; y: (n,)."""
    kind: str
    x: np.ndarray
    y: np.ndarray
    offsets: np.ndarray | None = None      # tokens: example i is x[offsets[i]:offsets[i + 1]], <eos> included

    def __len__(self):
        return len(self.y)

    def batch(self, indices):
        """Examples `indices` (b,) as torch tensors (x, y, lengths); only their rows are read.

        tokens:     x int64 (b, longest), padded with PAD; a row ends with EOS, which lengths int64 (b,) count
        continuous: x uint8 (b, l, c), raw gray levels (see `normalise`); lengths None
        y:          int64 (b,)
        """
        import torch
        indices = np.asarray(indices, dtype=np.int64)
        y = torch.from_numpy(self.y[indices].astype(np.int64))
        if self.kind == "continuous":
            return torch.from_numpy(self.x[indices]), y, None
        rows = [self.x[self.offsets[i]:self.offsets[i + 1]] for i in indices]
        lengths = torch.tensor([len(row) for row in rows])
        x = torch.full((len(rows), int(lengths.max())), PAD, dtype=torch.int64)    # (b, longest)
        for i, row in enumerate(rows):
            x[i, :len(row)] = torch.from_numpy(row.astype(np.int64))
        return x, y, lengths


def load(task, split, data_dir="data"):
    """Memory-map one prepared split -> Split. UserError when it is missing, cut short, or of another row."""
    row, folder = task_row(task), Path(data_dir) / task
    if split not in SPLITS:
        raise UserError(f"no split '{split}'; the splits are: {' '.join(SPLITS)}")
    meta = _read_meta(folder, task, data_dir)
    if meta is None:
        raise UserError(f"{folder} is not prepared; run: "
                        f"{_redo(folder, task, data_dir).split(' && ')[1]}")
    _check_meta(meta, folder, task, data_dir)
    arrays = {}
    for name, entry in meta["files"].items():
        if name.startswith(split + "_"):
            try:
                array = np.load(folder / name, mmap_mode="r", allow_pickle=False)
                if list(array.shape) != entry["shape"] or str(array.dtype) != entry["dtype"]:
                    raise ValueError
            except (OSError, ValueError):
                raise UserError(f"{folder / name} is damaged: not the array that meta.json describes; "
                                f"{_redo(folder, task, data_dir)}") from None
            arrays[name[len(split) + 1:-len(".npy")]] = array
    if "offsets" in arrays:
        offsets, steps = arrays["offsets"], np.diff(arrays["offsets"])
        if offsets[0] != 0 or offsets[-1] != len(arrays["x"]) or steps.min() < 1 or steps.max() > row.length:
            raise UserError(f"{folder / (split + '_offsets.npy')} is damaged; {_redo(folder, task, data_dir)}")
    return Split(row.kind, **arrays)


def normalise(row, x):
    """Gray levels uint8 (b, l, c) -> float32 (b, l, c), (x/255 - mean) / std of the task's row."""
    return (x.float() / 255 - row.mean) / row.std


ORDER = 2323       # tag of this random stream: its seeds coincide with those of the generators


def order(n, seed, epoch):
    """The order in which an epoch visits n examples: int64 (n,), a pure function of its arguments."""
    return np.random.default_rng([ORDER, seed, epoch]).permutation(n)


# ---- ListOps -------------------------------------------------------------------------------------
# `[MAX 4 [MIN 2 3 ] 0 ]` -> ids 15 8 14 6 7 18 4 18 3, label 4. The grammar is a branching process: a node is
# a digit with probability `leaf`, else an operator with a uniform number of arguments. Trees are drawn level
# by level, thousands at once; those of the wrong length are dropped before anything is evaluated or written.

SYMBOLS = tuple("0123456789") + ("[MIN", "[MAX", "[MED", "[SM", "X")     # ids 4..18; X closes an operator
DIGIT, MIN, MAX, MED, SM, CLOSE = 4, 14, 15, 16, 17, 18


def _draw_trees(grammar, rng, count):
    """Draw `count` trees, keep those of the right length -> levels, lengths (kept,).

    A level is the nodes of one depth, siblings adjacent: tree, parent (index in the level above), arity (0
    for a digit), what (the digit, or the operator's id).
    """
    low, high = grammar.symbols
    lengths, levels = np.zeros(count, np.int64), []
    tree, parent = np.arange(count), np.zeros(count, np.int64)
    for depth in range(1, grammar.depth + 1):
        operator = (rng.random(len(tree)) >= grammar.leaf) & (depth < grammar.depth)
        arity = np.where(operator, rng.integers(grammar.arguments[0], grammar.arguments[1] + 1, len(tree)), 0)
        what = np.where(operator, rng.integers(MIN, SM + 1, len(tree)), rng.integers(0, 10, len(tree)))
        levels.append(SimpleNamespace(tree=tree, parent=parent, arity=arity, what=what))
        lengths += np.bincount(tree, np.where(operator, 2, 1), count).astype(np.int64)
        # A tree that will be too long is not grown further: its pending arguments count one each at least.
        growing = lengths + np.bincount(tree, arity, count) < high
        lengths[~growing] = high
        parent = np.repeat(np.arange(len(tree)), arity * growing[tree])
        tree = tree[parent]
    keep = (low < lengths) & (lengths < high)
    renumber, above = np.cumsum(keep) - 1, np.zeros(count, np.int64)
    for level in levels:
        kept = keep[level.tree]
        level.tree, level.parent = renumber[level.tree[kept]], above[level.parent[kept]]
        level.arity, level.what = level.arity[kept], level.what[kept]
        above = np.cumsum(kept) - 1
    return levels, lengths[keep]


def _evaluate(levels):
    """Bottom-up: gives every level `value` and `size` (symbols of the subtree)."""
    for level, below in zip(levels[::-1], [None] + levels[:0:-1]):
        level.value, level.size = level.what.copy(), np.ones(len(level.what), np.int64)
        operators = np.flatnonzero(level.arity)
        if not len(operators):
            continue
        arity, what = level.arity[operators], level.what[operators]
        first = np.cumsum(arity) - arity              # an operator's arguments are below[first:first + arity]
        rising = below.value[np.lexsort((below.value, below.parent))]
        middle = (rising[first + (arity - 1) // 2] + rising[first + arity // 2]) // 2   # int(median), see [1]
        level.value[operators] = np.select(
            [what == MIN, what == MAX, what == MED], [rising[first], rising[first + arity - 1], middle],
            np.add.reduceat(below.value, first) % 10)
        level.size[operators] = 2 + np.add.reduceat(below.size, first)


def _write_tokens(levels, lengths):
    """Top-down: the ids of every tree in reading order, EOS after each -> uint8 (sum(lengths + 1),)."""
    tokens = np.full(int((lengths + 1).sum()), EOS, np.uint8)
    start = np.cumsum(lengths + 1) - (lengths + 1)
    for above, level in zip([None] + levels[:-1], levels):
        if above is not None:
            before = np.cumsum(level.size) - level.size           # symbols of all arguments to the left
            first = np.cumsum(above.arity) - above.arity
            start = above.start[level.parent] + 1 + before - before[first[level.parent]]
        level.start, operator = start, level.arity > 0
        tokens[start] = np.where(operator, level.what, DIGIT + level.what)
        tokens[(start + level.size - 1)[operator]] = CLOSE
    return tokens


def make_listops(grammar, rng, count):
    """Generate `count` expressions by the official grammar [1] -> tokens (total,), lengths (n,), labels (n,).

    tokens uint8, one expression after the other, each ending in EOS; lengths int64 count it; labels uint8.
    """
    parts, have = [], 0
    while have < count:
        levels, lengths = _draw_trees(grammar, rng, 4096)
        _evaluate(levels)
        parts.append((_write_tokens(levels, lengths), lengths + 1, levels[0].value.astype(np.uint8)))
        have += len(lengths)
    tokens, lengths, labels = (np.concatenate(column) for column in zip(*parts))
    return tokens[:lengths[:count].sum()], lengths[:count], labels[:count]


# ---- Pathfinder: tables --------------------------------------------------------------------------
# Coordinates are (row, column); angles turn from +column to +row. All that depends on a segment's orientation
# is tabulated once per margin. Orientations 0..359 are a seed's whole degrees -180..179; orientation 360 + k
# means that the head was candidate k of its circle. A stamp depends only on where the line ends on the fine
# grid, so a few dozen distinct ones serve all orientations. `t` is always the namespace of these tables.

ANTIALIAS = 2          # fine pixels per pixel
FAR = -(1 << 20)       # coordinate of a segment that is not there: beyond the reach of every table
HIT = 459              # a segment collides where mask + stamp >= 1.8, in units of 1/255
BLOCKS_SEED = 77       # a seed may not lie where the mask is above 0.3 (in units of 1/255)


def _step(angle, distance):
    return np.stack([np.sin(angle), np.cos(angle)], -1) * distance


def _move(origin, step):
    """The pixel a step away: ceil per component, as in [2], not round.

    Not to be tabulated as an offset: sines and cosines of right angles are not quite 0 in floating point,
    and whether that is lost in the sum depends on the origin. Close to the top and left edges it pushes
    snakes one pixel inwards; tabulated, a tenth more attempts succeed at 32 px.
    """
    return np.ceil(origin + step).astype(np.int64)


def _disk(radius):
    grid = np.arange(-radius, radius + 1)
    return np.argwhere(grid[:, None] ** 2 + grid ** 2 <= radius ** 2) - radius


def _spread(image, radius):
    """Dilate image (..., side, side) by a disk; the sides stay, so leave room for it."""
    padded = np.pad(image, [(0, 0)] * (image.ndim - 2) + [(radius, radius)] * 2)
    side, out = image.shape[-1], np.zeros_like(image)
    for row, column in _disk(radius) + radius:
        np.maximum(out, padded[..., row:row + side, column:column + side], out=out)
    return out


def _shrink(image, side):
    return np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.LANCZOS))


def _stamps(snakes, margin, ends):
    """Ink and mask of the lines from a centre to `ends` (s, 2) on the fine grid -> two uint8 (s, side, side).

    As in [2], the line is drawn fine, for the mask also dilated, and both are shrunk by a Lanczos filter; its
    ringing leaves the faint speckle of 1 to 6 gray levels around every segment of the official images.
    """
    half = snakes.paddle + int(np.ceil(snakes.thickness)) + margin
    centre, side, ink, mask = half * ANTIALIAS, 2 * half + 1, [], []
    for row, column in ends + centre:
        fine = Image.new("L", (2 * centre + 1, 2 * centre + 1))
        width = round(snakes.thickness * ANTIALIAS)
        ImageDraw.Draw(fine).line([(centre, centre), (int(column), int(row))], fill=255, width=width)
        ink.append(_shrink(np.asarray(fine), side))
        mask.append(_shrink(_spread(np.asarray(fine), margin * ANTIALIAS), side))
    return np.stack(ink), np.stack(mask)


def _seed_kernel(mask, reach):
    """Pixels (n, 2) that must be free for a seed at (0, 0), or None: an orientation that never finds a place.

    The official test [2] dilates the blocked map by the stamp's pixels of exactly 1, drawn one pixel off the
    centre both ways. Where the stamp of a corner pixel lies wholly outside the image, OpenCV's dilation
    returns -DBL_MAX, the count of free pixels comes out as zero and the attempt is lost: only stamps with a
    pixel in each closed quadrant are usable. At 32 px these are 30 of 360 degrees, so all seeds point up and
    left.
    """
    kernel = np.argwhere(mask == 255) - mask.shape[-1] // 2 + 1
    kernel = kernel[(np.abs(kernel) <= reach).all(1)]
    usable = all((kernel * sign >= 0).all(1).any() for sign in ((1, 1), (1, -1), (-1, 1), (-1, -1)))
    return kernel if usable else None


def _pad_rows(rows):
    """Ragged rows -> one int64 array, short rows filled with their first entry (a pixel named twice)."""
    out = np.zeros((len(rows), max(map(len, rows))) + np.shape(rows[0])[1:], np.int64)
    for i, row in enumerate(rows):
        out[i], out[i, :len(row)] = row[0], row
    return out


@functools.lru_cache(maxsize=None)
def pathfinder_tables(snakes, margin):
    """All tables of one margin. Sizes: K candidates, S stamps, O = 360 + K orientations, T choices."""
    reach = snakes.paddle + margin
    t = SimpleNamespace(margin=margin, reach=reach, half=reach + int(np.ceil(snakes.thickness)))

    # Candidates: the distinct pixels of the circle of radius `reach`, truncated, about one sample per pixel.
    around = np.deg2rad(np.arange(0, 360, 360 / (2 * np.pi * reach)))
    circle = np.floor(512 + _step(around, reach)).astype(np.int64) - 512
    t.candidate = np.unique(circle, axis=0)                                            # (K, 2) from the pivot
    degrees = np.deg2rad(np.arange(-180, 180))
    direction = np.concatenate([degrees, np.arctan2(*t.candidate.T)])                    # (O,)

    # Stamps: a seed is drawn forwards from its tail, every later segment backwards from its head.
    drawn = np.concatenate([degrees, direction[360:] + np.pi])
    centre = t.half * ANTIALIAS
    ends = _move(centre, _step(drawn, snakes.paddle * ANTIALIAS)) - centre
    ends, t.stamp = np.unique(ends, axis=0, return_inverse=True)                         # t.stamp (O,)
    t.ink, t.mask = _stamps(snakes, margin, ends)                                        # (S, side, side)

    # Growth: the next pivot, and how much each candidate is favoured by its turn. Only candidates within the
    # largest turn are listed.
    t.advance = _step(direction, reach + margin)                                         # (O, 2)
    t.to_head, t.to_pivot = _step(degrees, snakes.paddle), _step(degrees + np.pi, reach)  # (360, 2) of seeds
    turn = np.abs(direction[360:] - direction[:, None])
    turn = np.minimum(turn, 2 * np.pi - turn)
    favour = np.cos(np.minimum(snakes.continuity * turn, np.pi / 2)) ** 2                # (O, K)
    choices = [np.flatnonzero(row > 1e-12) for row in favour]
    t.choice = _pad_rows(choices)                                                  # (O, T) candidate numbers
    t.favour = np.take_along_axis(favour, t.choice, 1)
    t.favour[np.arange(t.choice.shape[1]) >= np.array([len(row) for row in choices])[:, None]] = 0

    # Seeds: pixels that must be free, and their bounding box; the distance between the two tails.
    kernels = [_seed_kernel(t.mask[stamp], reach) for stamp in t.stamp[:360]]
    t.usable = np.array([kernel is not None for kernel in kernels])                      # (360,)
    t.kernel = _pad_rows([np.zeros((1, 2), int) if kernel is None else kernel for kernel in kernels])
    t.apart = _step(np.deg2rad(np.arange(360)), snakes.seed_distance)
    _conflict_tables(t, margin)
    return t


def _conflict_tables(t, margin):
    """What an older segment forbids to a newer one, as look-ups by the difference of their positions.

    blocked (S, wide, wide): the older stamp's mask, dilated by the margin, at a candidate pixel.
    hits (K, S, broad, broad): whether a segment with its head at candidate k collides with the older one.
    Both end in zeros, so that differences can be clipped.
    """
    far = np.abs(t.candidate).max()
    t.near = t.half + margin + far + 1                    # pivots this far from a segment do not feel it
    t.blocked = _spread(np.pad(t.mask, [(0, 0)] + [(t.near + far - t.half,) * 2] * 2), margin)
    t.wide = t.blocked.shape[-1]
    t.candidate_flat = t.candidate @ (t.wide, 1)

    core = [np.argwhere(t.mask[stamp] >= HIT - 255) for stamp in t.stamp[360:]]     # only these can reach HIT
    t.core_low = np.stack([pixels.min(0) for pixels in core]) - t.half             # (K, 2) bounding boxes
    t.core_high = np.stack([pixels.max(0) for pixels in core]) - t.half
    t.span = 2 * t.half + 1
    t.broad = 2 * t.span + 1
    padded = np.pad(t.mask, [(0, 0)] + [(t.span,) * 2] * 2)
    t.hits = np.zeros((len(core), len(t.mask), t.broad, t.broad), bool)
    for k, pixels in enumerate(core):
        for row, column in pixels:
            least = HIT - int(t.mask[t.stamp[360 + k], row, column])
            t.hits[k] |= padded[:, row:row + t.broad, column:column + t.broad] >= least


# ---- Pathfinder: growth --------------------------------------------------------------------------
# The mask is the pixel-wise maximum of its segments' stamps and a frame of ones, so the outcome of a test
# against the mask is the worst of the tests against each segment. `old` (n, 3, a): row, column and stamp of
# the n segments in the mask of each of a attempts.

def _extend(rng, t, side, padding, old, pivot, orientation):
    """Add one segment to one snake of each attempt -> alive, and their pivot, orientation, segment (3, p).

    pivot (2, a), orientation (a,): of the snake's last segment. alive (p,): the attempts that found a place.
    """
    pivot = _move(pivot, t.advance[orientation].T)
    free = 255 - _blocked(t, old, pivot, orientation)                                    # (a, T)
    choice = t.choice[orientation]
    for axis in (0, 1):
        place = pivot[axis][:, None] + t.candidate[choice, axis]
        free *= (place >= padding + t.margin) & (place < side - padding - t.margin)      # the dilated frame
    odds = np.cumsum(t.favour[orientation] * free, axis=1)
    todo = np.flatnonzero(odds[:, -1] >= 1e-4 * 255)                               # the others are dead ends
    alive, chosen = [], []
    for _ in range(3):                                                             # draws from the same odds
        ball = rng.random(len(todo)) * odds[todo, -1]
        k = choice[todo, (odds[todo] > ball[:, None]).argmax(1)]
        hit = _collides(t, side, padding, old, todo, pivot[:, todo] + t.candidate[k].T, k)
        alive.append(todo[~hit])
        chosen.append(k[~hit])
        todo = todo[hit]
    alive, k = np.concatenate(alive), np.concatenate(chosen)
    by_attempt = np.argsort(alive)
    alive, k = alive[by_attempt], k[by_attempt]
    pivot = pivot[:, alive]
    segment = np.concatenate([pivot + t.candidate[k].T, t.stamp[360 + k][None]])
    return alive, pivot, 360 + k, segment


def _blocked(t, old, pivot, orientation):
    """How far the dilated mask covers each candidate, 0..255 -> uint8 (a, T)."""
    candidates = t.candidate_flat[t.choice]                                              # (O, T)
    worst = np.zeros((len(orientation), t.choice.shape[1]), np.uint8)
    table, centre = t.blocked.reshape(-1), t.wide // 2 * (t.wide + 1)
    for row, column, stamp in old:
        near = np.flatnonzero((np.abs(pivot[0] - row) < t.near) & (np.abs(pivot[1] - column) < t.near))
        if len(near):
            away = (pivot[0, near] - row[near]) * t.wide + pivot[1, near] - column[near]
            start = stamp[near] * t.wide ** 2 + centre + away
            cover = table.take(start[:, None] + candidates[orientation[near]])
            worst[near] = np.maximum(worst[near], cover)
    return worst


def _collides(t, side, padding, old, attempt, head, k):
    """Whether a segment whose head (2, p) was candidate k (p,) collides in `attempt` (p,) -> bool (p,)."""
    corner = head + t.core_low[k].T, head + t.core_high[k].T
    hit = (corner[0] < padding).any(0) | (corner[1] >= side - padding).any(0)
    for row, column, stamp in old:
        down, right = head[0] - row[attempt], head[1] - column[attempt]
        near = np.flatnonzero((np.abs(down) < t.span) & (np.abs(right) < t.span))
        hit[near] |= t.hits[k[near], stamp[attempt[near]], down[near] + t.span, right[near] + t.span]
    return hit


def _seed_pivot(t, tail, degree):
    return _move(_move(tail, t.to_head[degree].T), t.to_pivot[degree].T)                 # (2, a)


def _grow_pairs(rng, t, side, snakes, count):
    """`count` attempts at the two target snakes -> numbers (s,) of the successes, their segments (s, n, 3).

    Segment 2i + j is segment i of snake j. The first seed's stamp keeps clear of a frame twice the seed
    distance wide; the second seed lies a seed distance away, unchecked but for the image's edge. The mask
    lags: a segment enters it when its snake has grown another one, so step s sees segments 0 .. s - 3.
    """
    degree = rng.integers(0, 360, (2, count))
    compass = rng.integers(0, 360, count)
    number = np.flatnonzero(t.usable[degree[0]])
    degree, compass = degree[:, number], compass[number]
    kernel, frame = t.kernel[degree[0]], snakes.frame or 2 * snakes.seed_distance        # (a, pixels, 2)
    low, high = frame - kernel.min(1), side - frame - kernel.max(1)                # (a, 2) high is exclusive
    tail = low + np.floor(rng.random(low.shape) * np.maximum(high - low, 0)).astype(np.int64)
    tails = tail, np.round(tail + t.apart[compass]).astype(np.int64)
    heads = _move(tails[1], t.to_head[degree[1]])
    ends = np.stack([tails[1], heads, _move(heads, t.to_pivot[degree[1]])])
    inside = (high > low).all(1) & (ends >= 0).all((0, 2)) & (ends < side).all((0, 2))
    number, degree = number[inside], degree[:, inside]
    tails = [tail[inside].T for tail in tails]                                           # (2, a) each
    grown = np.stack([[*tails[j], t.stamp[degree[j]]] for j in (0, 1)])                  # (2, 3, a)
    pivots = [_seed_pivot(t, tails[j], degree[j]) for j in (0, 1)]
    orientations = [degree[0], degree[1]]
    for step in range(2, 2 * snakes.contour):
        j = step % 2
        alive, pivot, orientation, segment = _extend(
            rng, t, side, snakes.padding, grown[:step - 2], pivots[j], orientations[j])
        pivots[1 - j], orientations[1 - j] = pivots[1 - j][:, alive], orientations[1 - j][alive]
        pivots[j], orientations[j] = pivot, orientation
        number, grown = number[alive], np.concatenate([grown[:, :, alive], segment[None]])
    return number, grown.transpose(2, 0, 1)


# ---- Pathfinder: distractors and drawing ---------------------------------------------------------

def _find_tails(rng, t, side, taken, image, degree):
    """A uniformly drawn free place for a seed in each `image` (p,), or none -> found (p,) bool, tails (2, p).

    taken (n, width, width): where the mask blocks seeds, in a margin of `reach` zeros. Places are drawn until
    one is free, which needs no dilated map; only where dozens of draws fail is it made, to tell rare from
    none.
    """
    width = taken.shape[-1]
    kernel = t.kernel[degree] @ (width, 1) + t.reach * (width + 1)                       # (p, pixels)
    found, tails = np.zeros(len(image), bool), np.zeros((2, len(image)), np.int64)
    todo, draws = np.arange(len(image)), max(4, 256 // kernel.shape[1])
    for _ in range(6):
        places = rng.integers(0, side, (2, len(todo), draws))
        start = image[todo, None] * width ** 2 + places[0] * width + places[1]
        free = ~taken.reshape(-1).take(start[..., None] + kernel[todo, None]).any(-1)    # (todo, draws)
        first = free.argmax(1)
        good = free[np.arange(len(todo)), first]
        found[todo[good]] = True
        tails[:, todo[good]] = places[:, good, first[good]]
        todo = todo[~good]
    for i in todo:
        free = np.ones((side, side), bool)
        for row, column in t.kernel[degree[i]] + t.reach:
            free &= taken[image[i], row:row + side, column:column + side] == 0
        places = np.argwhere(free)
        if len(places):
            found[i], tails[:, i] = True, places[rng.integers(len(places))]
    return found, tails


def _mark_taken(t, taken, images, segments):
    """Enter segments (n, 3, p) of images (p,) into the map of `_find_tails`."""
    width, half = taken.shape[-1], t.half
    grid = np.arange(-half, half + 1)
    pixels = (grid[:, None] * width + grid + t.reach * (width + 1)).reshape(-1)
    blocks = (t.mask >= BLOCKS_SEED).reshape(len(t.mask), -1)
    stamp_pixels = _pad_rows([pixels[row] for row in blocks])                            # (S, most)
    for row, column, stamp in segments:
        taken.reshape(-1)[(images * width ** 2 + row * width + column)[:, None] + stamp_pixels[stamp]] = 1


def _add_distractors(rng, t, side, snakes, pairs):
    """Add the short snakes to pairs (n, 2 * contour, 3) -> segments (n, slots, 3), distractors placed (n,).

    Up to five attempts each, skipped when all fail; slots of absent ones are FAR. As in [2], the first target
    snake's last segment is not in the mask (an oversight there), so a distractor may cross it. Its stop when
    less than 1 % of the mask is free is left out: a third or more always is.
    """
    n, own = len(pairs), 2 * snakes.contour
    segments = np.full((own + snakes.distractors * snakes.distractor, 3, n), FAR)
    segments[:, 2], segments[:own] = 0, pairs.transpose(1, 2, 0)
    in_mask = [slot for slot in range(own) if slot != own - 2]
    taken = np.zeros((n, side + 2 * t.reach, side + 2 * t.reach), np.uint8)
    frame = taken[:, t.reach:-t.reach, t.reach:-t.reach]
    frame[:] = 1
    frame[:, snakes.padding:-snakes.padding, snakes.padding:-snakes.padding] = 0
    _mark_taken(t, taken, np.arange(n), segments[in_mask])
    placed = np.zeros(n, np.int64)
    for slot in range(own, len(segments), snakes.distractor):
        waiting = np.arange(n)
        for _ in range(5):
            degree = rng.integers(0, 360, len(waiting))
            image, degree = waiting[t.usable[degree]], degree[t.usable[degree]]
            found, tails = _find_tails(rng, t, side, taken, image, degree)
            image, degree, tails = image[found], degree[found], tails[:, found]
            new, pivot = np.stack([*tails, t.stamp[degree]])[None], _seed_pivot(t, tails, degree)
            for step in range(1, snakes.distractor):
                old = np.concatenate([segments[in_mask][:, :, image], new[:step - 1]])
                alive, pivot, degree, segment = _extend(rng, t, side, snakes.padding, old, pivot, degree)
                image, new = image[alive], np.concatenate([new[:, :, alive], segment[None]])
            segments[slot:slot + snakes.distractor, :, image] = new
            _mark_taken(t, taken, image, new)
            placed[image] += 1
            waiting = np.setdiff1d(waiting, image)
        in_mask += range(slot, slot + snakes.distractor)
    return segments.transpose(2, 0, 1), placed


@functools.lru_cache(maxsize=None)
def _disc(radius):
    """The disc's stamp, centred on its pixel -> float32 (side, side), 0..1.

    [2] draws it on the even fine grid of the whole image, so that its centre is the first fine pixel of its
    pixel.
    """
    half = int(np.ceil(radius)) + 3                       # room for the filter's ringing
    grid = np.arange(2 * half * ANTIALIAS + ANTIALIAS) - half * ANTIALIAS
    fine = (grid[:, None] ** 2 + grid ** 2 <= (radius * ANTIALIAS) ** 2).astype(np.uint8) * 255
    return _shrink(fine, 2 * half + 1).astype(np.float32) / 255


def _draw(t, side, snakes, segments, discs):
    """Images uint8 (n, side, side) of segments (n, slots, 3) and disc pixels (n, 2, 2)."""
    disc = _disc(snakes.marker)
    pad = max(t.half, len(disc) // 2)
    width = side + 2 * pad
    canvas = np.zeros(len(segments) * width ** 2, np.float32)

    def paste(images, row, column, pixels, values):
        where = (images * width ** 2 + (row + pad) * width + column + pad)[:, None] + pixels
        canvas[where] = np.maximum(canvas[where], values)

    def offsets(stamp):
        return (np.argwhere(stamp) - len(stamp) // 2) @ (width, 1)

    ink_pixels = _pad_rows([offsets(stamp) for stamp in t.ink])                          # (S, most)
    ink_values = _pad_rows([stamp[stamp > 0] for stamp in t.ink]) * np.float32(snakes.snake_contrast / 255)
    for slot, (row, column, stamp) in enumerate(segments.transpose(1, 2, 0)):
        contrast = np.float32(snakes.paddle_contrast if slot < 2 * snakes.contour else 1)
        there = np.flatnonzero(row != FAR)
        paste(there, row[there], column[there], ink_pixels[stamp[there]], ink_values[stamp[there]] * contrast)
    for row, column in discs.transpose(1, 2, 0):
        paste(np.arange(len(discs)), row, column, offsets(disc), disc[disc > 0])
    canvas = canvas.reshape(-1, width, width)[:, pad:-pad, pad:-pad]
    # The official files went through an image writer that stretches every image to 0..255.
    images = (canvas * (255 / canvas.max((1, 2), keepdims=True)) + 0.5).astype(np.uint8)
    coarse = np.arange(256) * snakes.levels // 256 * 255 // (snakes.levels - 1)              # identity for 256
    return coarse.astype(np.uint8)[images]


def _accepted_pairs(rng, t, side, snakes, count):
    """Two-snake attempts until `count` succeed -> segments (count, 2 * contour, 3), attempts per success."""
    accepted, have, tried, batch = [], 0, 0, 4096
    while have < count:
        number, pairs = _grow_pairs(rng, t, side, snakes, batch)
        accepted.append(pairs[:count - have])
        have += len(accepted[-1])
        tried += batch if have < count else number[len(accepted[-1]) - 1] + 1
        # Enough for the rest at the rate so far, within what keeps the arrays in cache.
        batch = int(np.clip(1.1 * (count - have) * tried / max(have, 1), 1024, 8192 / t.usable.mean()))
    return np.concatenate(accepted), tried / count


def make_pathfinder(row, rng, count):
    """Generate `count` images by the official process [2] -> a namespace of arrays, one entry an image:

    images uint8 (n, side, side), labels uint8 (n,), and how they came about: margins (n,), attempts (n,): at
    the two target snakes, mean over the image's margin; distractors (n,) placed; paths (n, 2, contour, 2):
    points of either target snake from its tail to its last head; discs (n, 2, 2): the marked points.
    """
    snakes, side = row.make, row.side
    labels, marked = rng.integers(0, 2, (2, count))       # marked: the snake whose tail gets a disc
    out = SimpleNamespace(
        images=np.zeros((count, side, side), np.uint8), labels=labels.astype(np.uint8),
        margins=rng.choice(snakes.margins, count), attempts=np.zeros(count), distractors=np.zeros(count, int),
        paths=np.zeros((count, 2, snakes.contour, 2), np.int64), discs=np.zeros((count, 2, 2), np.int64))
    for margin in snakes.margins:    # the margin is the image's, not the attempt's: wide ones fail more often
        which = np.flatnonzero(out.margins == margin)
        if not len(which):
            continue
        t = pathfinder_tables(snakes, margin)
        pairs, out.attempts[which] = _accepted_pairs(rng, t, side, snakes, len(which))
        segments, out.distractors[which] = _add_distractors(rng, t, side, snakes, pairs)
        points = pairs[:, :, :2].reshape(-1, snakes.contour, 2, 2).transpose(0, 2, 1, 3)  # (n, 2, contour, 2)
        each, start = np.arange(len(which)), marked[which]
        end = np.where(labels[which] == 1, start, 1 - start)
        discs = np.stack([points[each, start, 0], points[each, end, -1]], 1)              # (n, 2, 2)
        out.paths[which], out.discs[which] = points, discs
        for block in np.array_split(each, -(-len(each) * side ** 2 // 2 ** 20)):          # a few MB of canvas
            out.images[which[block]] = _draw(t, side, snakes, segments[block], discs[block])
    return out


# ---- official files (--lra-dir) ------------------------------------------------------------------

def _find(source, *layouts):
    """The first of `layouts` below the release "official DIR"; DIR is the archive's outer or inner root."""
    lra_dir = source.removeprefix("official ")
    for root in (Path(lra_dir), Path(lra_dir) / "lra_release", Path(lra_dir) / "lra_release" / "lra_release"):
        for layout in layouts:
            if (root / layout).exists():
                return root / layout
    raise UserError(f"--lra-dir {lra_dir} has none of: {', '.join(layouts)} (also looked in lra_release/)")


def evaluate(symbols):
    """Value 0..9 of a list of ListOps symbols ("[MAX", "4", .., "X"); ValueError when it is no expression."""
    apply = {"[MIN": min, "[MAX": max, "[SM": lambda v: sum(v) % 10,
             "[MED": lambda v: (sorted(v)[(len(v) - 1) // 2] + sorted(v)[len(v) // 2]) // 2}
    stack = [("", [])]                                    # open operators and their arguments so far
    for symbol in symbols:
        if symbol in apply:
            stack.append((symbol, []))
        elif symbol == "X":
            operator, values = stack.pop()
            if not stack or not values:
                raise ValueError("a bracket closes nothing")
            stack[-1][1].append(apply[operator](values))
        elif symbol in SYMBOLS:
            stack[-1][1].append(int(symbol))
        else:
            raise ValueError(f"unknown token '{symbol}'")
    if len(stack) > 1 or len(stack[0][1]) != 1:
        raise ValueError("not one complete expression")
    return stack[0][1][0]


def read_listops(path, length):
    """Read an official file, header "Source<TAB>Target" -> ids uint8 (total,), lengths (n,), labels (n,).

    As in [1]: `]` becomes X, parentheses go, split at white space; cut to length - 1, then EOS. Expressions
    are evaluated. UserError with file and line for a wrong column count, no expression, or a label that is
    wrong.
    """
    number = {symbol: DIGIT + i for i, symbol in enumerate(SYMBOLS)}
    letters = str.maketrans({"]": "X", "(": None, ")": None})
    rows, labels = [], []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line, text in enumerate(file, 1):
            fields = text.rstrip("\n").split("\t")
            if len(fields) != 2:
                raise UserError(f"{path}, line {line}: {len(fields)} columns, not 2; restore the file")
            if line == 1 and fields[0] == "Source":
                continue
            symbols = fields[0].translate(letters).split()
            try:
                value = evaluate(symbols)
            except ValueError as error:
                raise UserError(f"{path}, line {line}: {error}; restore the file") from None
            if fields[1].strip() != str(value):
                raise UserError(f"{path}, line {line}: label '{fields[1]}' of an expression that is {value}; "
                                "restore the file")
            rows.append([number[symbol] for symbol in symbols[:length - 1]] + [EOS])
            labels.append(value)
    tokens = np.concatenate([np.zeros(0, np.uint8)] + [np.array(row, np.uint8) for row in rows])
    return tokens, np.array([len(row) for row in rows], np.int64), np.array(labels, np.uint8)


def read_pathfinder_index(folder):
    """The metadata of one official folder -> image paths (n,), labels uint8 (n,), number of empty images.

    metadata/<batch>.npy is plain text in the release and a numpy string array from the public generator;
    columns 0, 1, 3 are folder, file, label. Batches in numeric order. One image of the release is known to be
    0 bytes.
    """
    paths, labels, empty = [], [], 0
    files = sorted((folder / "metadata").glob("*.npy"), key=lambda path: path.stem.zfill(12))   # as numbers
    if not files:
        raise UserError(f"{folder}/metadata holds no .npy file; restore the LRA release")
    for file in files:
        try:
            if file.read_bytes()[:6] == b"\x93NUMPY":
                rows = np.load(file, allow_pickle=False).astype(str).tolist()
            else:
                rows = [line.split() for line in file.read_text().splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise UserError(f"{file}: not readable as metadata ({error}); restore the LRA release") from None
        for line, fields in enumerate(rows, 1):
            if len(fields) < 4 or fields[3] not in ("0", "1"):
                raise UserError(f"{file}, line {line}: no label 0 or 1 in column 3; restore the LRA release")
            path = folder / fields[0] / fields[1]
            if not path.exists():
                raise UserError(f"{path} is missing ({file}, line {line}); restore the LRA release")
            if path.stat().st_size == 0:
                empty += 1
                continue
            paths.append(path)
            labels.append(int(fields[3]))
    return paths, np.array(labels, np.uint8), empty


def official_split(n):
    """The split of S4 and the paper, random_split with seed 42 into 80, 10, 10 % -> three index arrays."""
    import torch
    shuffled = torch.randperm(n, generator=torch.Generator().manual_seed(42)).numpy()
    return np.split(shuffled, [n - 2 * int(0.1 * n), n - int(0.1 * n)])


# ---- preparing -----------------------------------------------------------------------------------
# While a set is made, `parts/` in its folder says which set it is (plan.json) and holds one small file for
# every finished chunk, so that the same command goes on where a killed one stopped. Chunk i of the set with
# seed s is made from the random stream (s, i) and nothing else. Small files are written under a temporary
# name and renamed.

def prepare(task, data_dir="data", sizes=None, seed=None, lra_dir=None, workers=None):
    """Make data_dir/task ready, unless it is -> its folder. Several processes may call it at once.

    sizes:   examples in (train, val, test); None: the row's, or whatever is there
    seed:    of the generator; None: 0, or whatever is there
    lra_dir: root of the official release, read instead of generating
    workers: processes; None: one for every core. The result does not depend on it.
    UserError when another set is there (nothing is ever overwritten), or the official files are damaged.
    """
    row, folder = task_row(task), Path(data_dir) / task
    if sizes is not None and (len(sizes) != 3 or min(sizes) < 1):
        raise UserError(f"sizes {tuple(sizes)}: train, val and test must be three positive numbers")
    if seed is not None and seed < 0:
        raise UserError(f"--seed {seed}: must not be negative")
    source = lra_dir and f"official {Path(lra_dir).resolve()}"
    asked = dict(sizes=sizes and [int(size) for size in sizes], seed=seed, source=source)
    meta = _read_meta(folder, task, data_dir)        # before the lock, so that a read-only folder can be used
    if meta is not None:
        _check_meta(meta, folder, task, data_dir, asked)
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)          # released when this process ends, however it ends
            if not (folder / "meta.json").exists():   # else another process made it while we waited
                _prepare_locked(row, task, folder, asked, workers or os.cpu_count())
    except OSError as error:
        raise UserError(f"{folder}: {error}; make room, or choose another --data-dir") from None
    _check_meta(_read_meta(folder, task, data_dir), folder, task, data_dir, asked)
    return folder


def _prepare_locked(row, task, folder, asked, workers):
    sizes = asked["sizes"] or (None if asked["source"] else list(row.sizes))        # None: all official files
    plan = dict(task=task, sizes=sizes, seed=asked["seed"] or 0, source=asked["source"] or "generated",
                row=_plain(row))
    parts = folder / "parts"
    parts.mkdir(exist_ok=True)
    unfinished = _read_json(parts / "plan.json")
    if unfinished is None and plan["source"] == "generated":                 # reading starts over anyway
        _write_json(parts / "plan.json", plan)
    elif unfinished not in (None, plan):
        theirs = ", ".join(f"{key} {unfinished.get(key)}" for key in plan if unfinished.get(key) != plan[key])
        raise UserError(f"{folder} holds an unfinished set with {theirs}; ask for it, or run: rm -r {folder}")
    {"listops": prepare_listops, "pathfinder": prepare_pathfinder}[row.family](row, folder, plan, workers)
    files = {}
    for path in sorted(folder.glob("*.npy")):
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        files[path.name] = dict(shape=list(array.shape), dtype=str(array.dtype), bytes=path.stat().st_size)
    plan["sizes"] = [files[f"{split}_y.npy"]["shape"][0] for split in SPLITS]
    _write_json(folder / "meta.json", dict(plan, files=files))
    for path in [*parts.iterdir(), *folder.glob(".*.npy.*")]:                      # and what a kill left over
        path.unlink()
    parts.rmdir()


def prepare_listops(row, folder, plan, workers):
    """All splits of a ListOps task: chunks until there are enough distinct ones, or the official files."""
    if plan["source"] != "generated":
        for i, split in enumerate(SPLITS):
            path = _find(plan["source"], f"listops-1000/basic_{split}.tsv", f"basic_{split}.tsv")
            tokens, lengths, labels = read_listops(path, row.length)
            size = _official_size(plan, i, len(labels), path)
            _save_tokens(folder, split, tokens[:lengths[:size].sum()], lengths[:size], labels[:size])
        return
    total, seen, rows, labels = sum(plan["sizes"]), set(), [], []
    chunks = range(-(-total // CHUNK))
    while len(rows) < total:                              # more turns only to replace duplicates
        _run_chunks(_listops_chunk, [(i, CHUNK, folder, plan, row) for i in chunks], workers)
        before = len(rows)
        for i in chunks:
            part = _load_part(folder, i, plan)
            expressions = np.split(part["tokens"], np.cumsum(part["lengths"])[:-1])
            for tokens, label in zip(expressions, part["labels"]):
                digest = hashlib.blake2b(tokens.tobytes(), digest_size=16).digest()
                if digest not in seen:                # the official set is distinct, too: splits are disjoint
                    seen.add(digest)
                    rows.append(tokens)
                    labels.append(label)
        if len(rows) - before < len(chunks) * CHUNK // 50:
            raise UserError(f"{plan['task']} has too few distinct expressions for {total}; ask for fewer")
        chunks = range(chunks.stop, chunks.stop + 1)
    for split, start, size in zip(SPLITS, np.cumsum([0] + plan["sizes"]), plan["sizes"]):
        mine = slice(start, start + size)
        lengths = [len(tokens) for tokens in rows[mine]]
        _save_tokens(folder, split, np.concatenate(rows[mine]), lengths, labels[mine])


def _listops_chunk(index, count, folder, plan, row):
    rng = np.random.default_rng([plan["seed"], index])
    tokens, lengths, labels = make_listops(row.make, rng, count)
    _save_part(folder, index, plan, tokens=tokens, lengths=lengths, labels=labels)


def _save_tokens(folder, split, tokens, lengths, labels):
    for name, array in (("x", tokens), ("offsets", np.cumsum(np.concatenate([[0], lengths]))), ("y", labels)):
        array = np.asarray(array, np.int64 if name == "offsets" else np.uint8)
        _replace(folder / f"{split}_{name}.npy", lambda file: np.save(file, array))


def prepare_pathfinder(row, folder, plan, workers):
    """All splits of a Pathfinder task, drawn chunk by chunk straight into their place in the final files, so
    that neither memory nor disk holds the set twice: a chunk's part file holds only a checksum."""
    if plan["source"] != "generated":
        return _read_official_images(row, folder, plan)
    jobs = []
    for split, size in zip(SPLITS, plan["sizes"]):
        _create(folder / f"{split}_x.npy", (size, row.length, 1))
        _create(folder / f"{split}_y.npy", (size,))
        for start in range(0, size, CHUNK):
            jobs.append((len(jobs), min(CHUNK, size - start), folder, plan, row, split, start))
    _run_chunks(_pathfinder_chunk, jobs, workers)
    if row.make.distinct:
        _replace_repeats(folder, plan, row)


def _replace_repeats(folder, plan, row):
    """Small pictures repeat. A kill in here is harmless: the chunks no longer fit their checksums and are redrawn."""
    rng, seen = np.random.default_rng([plan["seed"], 1 << 40]), set()

    def spares():
        while True:
            made = make_pathfinder(row, rng, 64)
            yield from zip(made.images.reshape(64, row.length, 1), made.labels)

    spare = spares()
    for split in SPLITS:
        x, y = (np.load(folder / f"{split}_{name}.npy", mmap_mode="r+") for name in "xy")
        for i in range(len(y)):
            while x[i].tobytes() in seen:
                x[i], y[i] = next(spare)
            seen.add(x[i].tobytes())
        x.flush(), y.flush()


def _pathfinder_chunk(index, count, folder, plan, row, split, start):
    made = make_pathfinder(row, np.random.default_rng([plan["seed"], index]), count)
    for name, array in (("x", made.images.reshape(count, row.length, 1)), ("y", made.labels)):
        target = np.load(folder / f"{split}_{name}.npy", mmap_mode="r+")
        target[start:start + count] = array
        target.flush()
    _save_part(folder, index, plan, checksum=_checksum(folder, split, start, count))


def _checksum(folder, split, start, count):
    x, y = (np.load(folder / f"{split}_{name}.npy", mmap_mode="r")[start:start + count] for name in "xy")
    return zlib.crc32(y.tobytes(), zlib.crc32(x.tobytes()))


def _read_official_images(row, folder, plan):
    source = _find(plan["source"], f"pathfinder{row.side}/curv_contour_length_14")
    paths, labels, empty = read_pathfinder_index(source)
    print(f"{source}: {len(paths):,} images, {empty} empty ones skipped")
    for i, (split, members) in enumerate(zip(SPLITS, official_split(len(paths)))):
        members = members[:_official_size(plan, i, len(members), source)]
        _replace(folder / f"{split}_y.npy", lambda file: np.save(file, labels[members]))
        images = _create(folder / f"{split}_x.npy", (len(members), row.length, 1))
        for place, member in enumerate(tqdm(members, desc=f"{folder} {split}", unit="image")):
            try:
                with Image.open(paths[member]) as image:
                    pixels = np.asarray(image.convert("L"))
            except (OSError, SyntaxError) as error:
                raise UserError(f"{paths[member]}: {error}; restore the LRA release") from None
            if pixels.shape != (row.side, row.side):
                raise UserError(f"{paths[member]} is {pixels.shape}, not {row.side} px; restore the release")
            images[place, :, 0] = pixels.reshape(-1)
        images.flush()


def _official_size(plan, i, available, path):
    size = plan["sizes"][i] if plan["sizes"] else available
    if size > available or not size:
        raise UserError(f"{path}: {available} examples for {SPLITS[i]}, not {size}; change --{SPLITS[i]}")
    return size


# ---- preparing: chunks in processes --------------------------------------------------------------

def _run_chunks(make, jobs, workers):
    """Call make(*job) for every job (index, count, folder, plan, ...) that has no valid part file yet."""
    folder = jobs[0][2]
    todo = [job for job in jobs if not _finished(*job)]
    total, left = (sum(job[1] for job in some) for some in (jobs, todo))
    with tqdm(total=total, initial=total - left, desc=str(folder), unit="example", mininterval=0.5) as bar:
        if min(workers, len(todo)) <= 1:
            for job in todo:
                make(*job)
                bar.update(job[1])
            return
        # "spawn": a forked copy of a process that has used torch or threads can hang.
        context, others = multiprocessing.get_context("spawn"), multiprocessing.active_children()
        with ProcessPoolExecutor(min(workers, len(todo)), context, _start_worker) as pool:
            running = {pool.submit(make, *job): job[1] for job in todo}
            try:
                for done in as_completed(running):
                    done.result()
                    bar.update(running[done])
            except KeyboardInterrupt:
                for worker in multiprocessing.active_children():
                    if worker not in others:
                        worker.terminate()
                raise
            except BrokenProcessPool:
                raise UserError(f"{folder}: a worker was killed (out of memory?); the same command goes on "
                                "from here, with a smaller --workers if need be") from None
            finally:
                pool.shutdown(cancel_futures=True)


def _start_worker():
    """A worker leaves Ctrl-C to its parent, but does not outlive it, however it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _finished(index, count, folder, plan, row, split=None, start=0):
    part = _load_part(folder, index, plan)
    if part is not None and "checksum" in part:
        return int(part["checksum"]) == _checksum(folder, split, start, count)
    return part is not None and len(part["labels"]) == count


def _part_path(folder, index):
    return folder / "parts" / f"{index:06d}.npz"


def _save_part(folder, index, plan, **arrays):
    _replace(_part_path(folder, index), lambda file: np.savez(file, plan=json.dumps(plan), **arrays))


def _load_part(folder, index, plan):
    """The arrays of a part file, or None when it is missing, damaged, or of another plan."""
    try:
        with np.load(_part_path(folder, index), allow_pickle=False) as part:
            arrays = dict(part)                           # the zip format checks a checksum of each array
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error):
        return None
    return arrays if str(arrays.pop("plan", "")) == json.dumps(plan) else None


# ---- preparing: files ----------------------------------------------------------------------------

def _replace(path, save):
    """Write `path` by save(file) under a temporary name, then rename: it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb") as file:
        save(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _write_json(path, value):
    _replace(path, lambda file: file.write(json.dumps(value, indent=1).encode()))


def _read_json(path):
    try:
        value = json.loads(path.read_text())
        return value if isinstance(value, dict) else None
    except (OSError, ValueError):
        return None


def _create(path, shape):
    """A writable uint8 array in a .npy file; what is there already is kept when it has the right shape."""
    try:
        array = np.load(path, mmap_mode="r+", allow_pickle=False)
        if array.shape == shape and array.dtype == np.uint8:
            return array
    except (OSError, ValueError):
        pass
    need, free = np.prod(shape) / 1e9, shutil.disk_usage(path.parent).free / 1e9
    if need > free:                                 # a full disk kills a process that writes to mapped memory
        raise UserError(f"{path} needs {need:.1f} GB, {free:.1f} are free; make room, or change --data-dir")
    return np.lib.format.open_memmap(path, "w+", np.uint8, shape)


def _plain(row):
    """What a row says about the examples, as it reads back from a file."""
    return {key: value for key, value in json.loads(json.dumps(asdict(row))).items() if key != "sizes"}


def _redo(folder, task, data_dir):
    flag = "" if str(data_dir) == "data" else f" --data-dir {data_dir}"
    return f"run: rm -r {folder} && python data.py --task {task}{flag}"


def _read_meta(folder, task, data_dir):
    """meta.json of a prepared task; None where there is none, UserError where it is not whole."""
    if not (folder / "meta.json").exists():
        return None
    meta = _read_json(folder / "meta.json")
    if meta is None or not {"sizes", "seed", "source", "row", "files"} <= set(meta):
        raise UserError(f"{folder / 'meta.json'} is damaged; {_redo(folder, task, data_dir)}")
    return meta


def _check_meta(meta, folder, task, data_dir, asked=None):
    """UserError unless the set is the one asked for, of today's row, and its files have their full size."""
    if meta["row"] != _plain(TASKS[task]):
        raise UserError(f"{folder} was made with other parameters of {task}; {_redo(folder, task, data_dir)}")
    for key, value in (asked or {}).items():
        if value is not None and meta[key] != value:
            raise UserError(f"{folder} was made with {key} {meta[key]}, not {value}; leave out that flag, "
                            f"or run: rm -r {folder}")
    for name, entry in meta["files"].items():
        size = (folder / name).stat().st_size if (folder / name).exists() else 0
        if size != entry["bytes"]:
            raise UserError(f"{folder / name} is cut short: {size:,} of {entry['bytes']:,} bytes; "
                            f"{_redo(folder, task, data_dir)}")


# ---- --stats -------------------------------------------------------------------------------------
# Measured by running the official generator: number of images, then the QUANTITIES. Attempts are geometric,
# so their mean over n images is only known to a part in sqrt(n).

QUANTITIES = ("attempts per image", "distractors placed", "mean gray", "std of gray", "fraction > 0",
              "fraction > 25, median", "fraction > 127", "fraction = 255", "disc px > 127", "disc px > 25")
OFFICIAL = {
    32:  (500, (318,  1.20, 20.3, 51.3, .342, .151,  .086, .0022, 8, 13)),
    64:  (40,  (3760, 2.5,  13.2, 41.1, .257, .111,  .045, .0025, 20, 28)),
    128: (90,  (316,  7.7,  7.90, 35.7, .138, .057,  .030, .0007, 28, 37)),   # attempts: 72, 560 by margin
    256: (250, (8,    6.99, 2.95, 24.1, .039, .0171, .011, .0034, 80, 92)),
}


def image_stats(row, made):
    """QUANTITIES of `make_pathfinder`'s images, and their deviations from image to image -> two lists."""
    above = [(made.images > level).mean((1, 2)) for level in (0, 25, 127, 254)]
    each = [made.attempts, made.distractors, made.images.mean((1, 2)), made.images.std((1, 2)), *above]
    disc = 255 * _disc(row.make.marker)
    values = [figure.mean() for figure in each] + [(disc > level).sum() for level in (127, 25)]
    deviations = [figure.std() for figure in each] + [0, 0]
    deviations[0] = values[0]                      # attempts: only means are recorded, but they are geometric
    values[3], values[5] = made.images.std(), np.median(above[1])
    return values, deviations


def print_image_stats(task, count, seed):
    """Generate `count` images in memory and print them beside the official generator's figures."""
    row = TASKS[task]
    if row.side not in OFFICIAL:
        raise UserError(f"{task}: no official figures for {row.side} px; there are for 32, 64, 128 and 256")
    start, parts = time.process_time(), []
    for index in tqdm(range(-(-count // CHUNK)), desc=f"{count} images", unit="chunk"):
        rng = np.random.default_rng([seed, index])
        parts.append(vars(make_pathfinder(row, rng, min(CHUNK, count - CHUNK * index))))
    seconds = (time.process_time() - start) / count
    made = SimpleNamespace(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
    (official, targets), (values, deviations) = OFFICIAL[row.side], image_stats(row, made)
    print(f"{task}: {count} images of {row.side} px, seed {seed}. Target: {official} official images.")
    print("Noise: two standard errors of the difference.")
    print(f"{'quantity':22} {'target':>8} {'measured':>9} {'diff %':>7} {'noise %':>8}  within 5 %")
    for name, target, value, deviation in zip(QUANTITIES, targets, values, deviations):
        difference = 100 * (value / target - 1)
        noise = 200 * deviation / value * np.sqrt(1 / count + 1 / official)
        verdict = "yes" if abs(difference) <= 5 else "within noise" if abs(difference) <= noise else "NO"
        print(f"{name:22} {target:8.4g} {value:9.4g} {difference:7.1f} {noise:8.1f}  {verdict}")
    for margin in row.make.margins:
        mine = made.margins == margin
        print(f"margin {margin}: {mine.sum()} images, {made.attempts[mine].mean():.1f} attempts per image")
    print(f"{1e3 * seconds:.2f} ms per image and core; {100 * made.labels.mean():.1f} % of labels are 1")


def print_listops_stats(task, count, seed):
    """Generate `count` expressions in memory and print lengths and labels beside a simulation of [1]."""
    start = time.process_time()
    _, lengths, labels = make_listops(TASKS[task].make, np.random.default_rng([seed, 0]), count)
    seconds, lengths = (time.process_time() - start) / count, lengths - 1
    print(f"{task}: {count} expressions, seed {seed}, {1e3 * seconds:.3f} ms per expression and core")
    figures = [lengths.mean(), *np.percentile(lengths, [5, 25, 50, 75, 95]), lengths.min(), lengths.max()]
    print("length, mean p5 p25 p50 p75 p95 min max: " + " ".join(f"{figure:.0f}" for figure in figures))
    if task == "listops":
        print("      official process, 3,000 examples: 1064 540 723 995 1347 1819 501 1998")
    shares = np.bincount(labels, minlength=10) / count
    print("labels 0..9:                             " + " ".join(f"{share:.3f}" for share in shares))
    if task == "listops":
        print("      official process, 3,000 examples: .171 .091 .077 .078 .090 .088 .077 .076 .077 .173")


# ---- command line --------------------------------------------------------------------------------

def main(argv=None):
    """The commands of the module's docstring -> exit code: 0, 2 after a user's mistake, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="data.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", help="one of: " + " ".join(TASKS))
    parser.add_argument("--data-dir", default="data",
                        help="tasks are prepared in DATA_DIR/TASK (default: data)")
    for split in SPLITS:
        parser.add_argument(f"--{split}", type=int, metavar="N", help=f"{split} size (default: the row's)")
    parser.add_argument("--seed", type=int, help="of the generator (default: 0)")
    parser.add_argument("--lra-dir", help="root of the official LRA release: read it instead of generating")
    parser.add_argument("--workers", type=int, metavar="K", help="processes (default: all cores)")
    parser.add_argument("--stats", action="store_true", help="print the generator beside official figures")
    parser.add_argument("--stats-images", type=int, metavar="N", help="size of --stats (default: 2000, 300)")
    parser.add_argument("--list", action="store_true", help="print the tasks")
    args = parser.parse_args(argv)
    try:
        _command(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def _command(args):
    if args.list:
        for name, row in TASKS.items():
            sizes = " / ".join(f"{size:,}" for size in row.sizes)
            print(f"{name:16} {row.kind:10} length {row.length:6,}  classes {row.classes:2}  {sizes}")
        return
    if args.task is None:
        raise UserError(f"no --task; the tasks are: {' '.join(TASKS)}")
    row = task_row(args.task)
    if args.workers is not None and args.workers < 1:
        raise UserError(f"--workers {args.workers}: must be positive")
    if args.stats_images is not None and args.stats_images < 1:
        raise UserError(f"--stats-images {args.stats_images}: must be positive")
    if args.stats:
        count = args.stats_images or (300 if (row.side or 0) > 32 else 2000)
        show = print_listops_stats if row.family == "listops" else print_image_stats
        return show(args.task, count, args.seed or 0)
    asked = [getattr(args, split) for split in SPLITS]
    sizes = None                                          # the row's, or whatever is there
    if any(size is not None for size in asked):
        sizes = [default if size is None else size for size, default in zip(asked, row.sizes)]
    folder = prepare(args.task, args.data_dir, sizes, args.seed, args.lra_dir, args.workers)
    meta = _read_meta(folder, args.task, args.data_dir)
    counts = ", ".join(f"{split} {size:,}" for split, size in zip(SPLITS, meta["sizes"]))
    source = f"generated, seed {meta['seed']}" if meta["source"] == "generated" else meta["source"]
    print(f"{folder}: ready ({counts}; {source})")


if __name__ == "__main__":
    sys.exit(main())
