"""Generate Pathfinder: images of dashed curves, by the process of the official generator [2].

The official generator is a rejection sampler that draws and tests one attempt at a time. Here
arrays hold thousands of attempts. An attempt is a list of segments, and every test against the mask
is a look-up in a table over pairs of segments, so no mask is drawn while snakes grow. The
distribution is the same, hundreds of times faster on one core. Read `make_pathfinder` first, then
upwards from it.

Glossary
    snake       a dashed curve of `contour` segments; two long targets, several short distractors
    segment     one dash (official: "paddle"), `paddle` px long, then a gap of 2 * margin px
    margin      px kept free around every segment
    seed        a snake's first segment;  tail: its first point;  head: a segment's far end
    pivot       the point `margin` px behind a segment's start: the centre of its head's circle
    reach       radius of that circle, paddle + margin
    ink, mask   stamps of a segment: what is drawn; what it forbids to later ones (ink and margin)
    disc        marker on a snake's end; label 1: the two discs are on the same snake

[1] github.com/google-research/long-range-arena, lra_benchmarks/data: parameters
[2] github.com/drewlinsley/pathfinder, snakes2.py and snakes.py (Linsley et al. 2018)
"""

import functools
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
from PIL import Image, ImageDraw


@dataclass(frozen=True)
class Snakes:
    """Parameters of the Pathfinder generator [1, 2]; lengths in px."""

    padding: int  # width of the forbidden frame
    seed_distance: int  # distance between the two tails
    paddle: int  # segment length
    thickness: float  # segment width
    margins: tuple  # each image draws one, uniformly
    continuity: float  # turns of up to 90 / continuity degrees
    marker: float  # disc radius
    distractors: int  # number attempted; those that find no room are left out
    snake_contrast: float  # gray of distractors; targets have snake_contrast * paddle_contrast
    paddle_contrast: float = 1.0
    frame: int | None = None  # its width without first seeds; None: twice the seed distance, as [2]
    contour: int = 14  # segments of a target snake
    levels: int = 256  # gray levels kept


# ---- tables --------------------------------------------------------------------------------------
# Coordinates are (row, column); angles turn from +column to +row. Everything that depends on a
# segment's orientation is tabulated once per margin. Orientations 0..359 are a seed's whole degrees
# -180..179; orientation 360 + k means that the head was candidate k of its circle. A stamp depends
# only on where the line ends on the fine grid, so a few dozen distinct stamps serve all
# orientations. `t` is always the namespace of these tables.

DISTRACTOR = 4  # segments of a distractor
ANTIALIAS = 2  # fine pixels per pixel
FAR = -(1 << 20)  # coordinate of an absent segment: beyond the reach of every table
HIT = 459  # a segment collides where mask + stamp >= 1.8, in units of 1/255


def _step(angle, distance):
    return np.stack([np.sin(angle), np.cos(angle)], -1) * distance


def _move(origin, step):
    """Return the pixel a step away, rounded up as in [2].

    Do not tabulate this as an offset: sines and cosines of right angles are not exactly 0 in
    floating point, and whether the sum loses the difference depends on the origin. With tabulated
    offsets a tenth more attempts succeed at 32 px."""
    return np.ceil(origin + step).astype(np.int64)


def _spread(image, radius):
    """Dilate image (..., side, side) by a disk. Its margins must have room for the disk."""
    padded = np.pad(image, [(0, 0)] * (image.ndim - 2) + [(radius, radius)] * 2)
    side = image.shape[-1]
    out = np.zeros_like(image)
    grid = np.arange(-radius, radius + 1)
    for row, column in np.argwhere(grid[:, None] ** 2 + grid**2 <= radius**2):
        np.maximum(out, padded[..., row : row + side, column : column + side], out=out)
    return out


def _shrink(image, side):
    return np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.LANCZOS))


def _stamps(t, ends):
    """Draw ink and mask of the lines from a centre to `ends` (s, 2) on the fine grid -> two uint8
    (s, side, side).

    As in [2], the line is drawn on the fine grid, for the mask also dilated, and both are shrunk by
    a Lanczos filter, whose ringing leaves the faint speckle around every segment of the official
    images."""
    centre = t.half * ANTIALIAS
    side = 2 * t.half + 1
    width = round(t.snakes.thickness * ANTIALIAS)
    ink = []
    mask = []
    for row, column in (ends + centre).tolist():
        fine = Image.new("L", (2 * centre + 1, 2 * centre + 1))
        ImageDraw.Draw(fine).line([(centre, centre), (column, row)], fill=255, width=width)
        ink.append(_shrink(np.asarray(fine), side))
        mask.append(_shrink(_spread(np.asarray(fine), t.margin * ANTIALIAS), side))
    return np.stack(ink), np.stack(mask)


def _seed_kernel(mask, reach):
    """Return the pixels (n, 2) that must be free for a seed at (0, 0), or None if its orientation
    never finds a place.

    The official test [2] dilates the blocked map by the stamp's pixels of exactly 1, drawn one
    pixel off the centre both ways. If the stamp of a corner pixel lies wholly outside the image,
    OpenCV's dilation returns -DBL_MAX, the count of free pixels comes out as zero and the attempt
    is lost. So only stamps with a pixel in each closed quadrant are usable. At 32 px these are 30
    of 360 degrees, so all seeds point up and left."""
    kernel = np.argwhere(mask == 255) - mask.shape[-1] // 2 + 1
    kernel = kernel[(np.abs(kernel) <= reach).all(1)]
    usable = all((kernel * sign >= 0).all(1).any() for sign in ((1, 1), (1, -1), (-1, 1), (-1, -1)))
    return kernel if usable else None


def _pad_rows(rows):
    """Stack ragged rows into one int64 array. Short rows repeat their first entry."""
    index = np.arange(max(map(len, rows)))
    return np.stack([np.int64(row)[np.where(index < len(row), index, 0)] for row in rows])


@functools.cache
def _tables(snakes, side, margin):
    """Build the tables of a margin: K candidates, S stamps, O = 360 + K orientations, T choices."""
    reach = snakes.paddle + margin
    t = SimpleNamespace(snakes=snakes, side=side, margin=margin, reach=reach)
    t.half = reach + int(np.ceil(snakes.thickness))  # of the side of a stamp

    # Candidates: distinct pixels of the circle of radius `reach`, truncated; about a sample each.
    around = np.deg2rad(np.arange(0, 360, 360 / (2 * np.pi * reach)))
    circle = np.floor(512 + _step(around, reach)).astype(np.int64) - 512
    t.candidate = np.unique(circle, axis=0)  # (K, 2) from the pivot
    degrees = np.deg2rad(np.arange(-180, 180))
    direction = np.concatenate([degrees, np.arctan2(*t.candidate.T)])  # (O,)

    # Stamps: a seed is drawn forwards from its tail, every later segment backwards from its head.
    drawn = np.concatenate([degrees, direction[360:] + np.pi])
    centre = t.half * ANTIALIAS
    ends = _move(centre, _step(drawn, snakes.paddle * ANTIALIAS)) - centre
    ends, t.stamp = np.unique(ends, axis=0, return_inverse=True)  # t.stamp (O,)
    t.ink, t.mask = _stamps(t, ends)  # (S, side, side)

    # Growth: the next pivot; how much each candidate within the largest turn is favoured by it.
    t.advance = _step(direction, reach + margin)  # (O, 2)
    t.to_head = _step(degrees, snakes.paddle)  # (360, 2) of seeds
    t.to_pivot = _step(degrees + np.pi, reach)
    turn = np.abs(direction[360:] - direction[:, None])
    turn = np.minimum(turn, 2 * np.pi - turn)
    favour = np.cos(np.minimum(snakes.continuity * turn, np.pi / 2)) ** 2  # (O, K)
    choices = [np.flatnonzero(row > 1e-12) for row in favour]
    t.choice = _pad_rows(choices)  # (O, T) candidate numbers
    t.favour = np.take_along_axis(favour, t.choice, 1)
    t.favour[np.arange(t.choice.shape[1]) >= np.array([len(row) for row in choices])[:, None]] = 0

    # Seeds: pixels that must be free, and their bounding box; the distance between the two tails.
    kernels = [_seed_kernel(t.mask[stamp], reach) for stamp in t.stamp[:360]]
    t.usable = np.array([kernel is not None for kernel in kernels])  # (360,)
    t.kernel = _pad_rows([[(0, 0)] if kernel is None else kernel for kernel in kernels])
    t.apart = _step(np.deg2rad(np.arange(360)), snakes.seed_distance)
    _conflict_tables(t)
    return t


def _conflict_tables(t):
    """Tabulate what an older segment forbids to a newer one, by the difference of their positions.

    blocked (S, wide, wide): the older stamp's mask, dilated by the margin, at a candidate pixel.
    hits (K, S, broad, broad): true if a segment with its head at candidate k collides with the
    older one. Both have zeros at their edges: segments further apart do not conflict."""
    far = np.abs(t.candidate).max()
    t.near = t.half + t.margin + far + 1  # a segment does not block pivots this far away
    t.blocked = _spread(np.pad(t.mask, [(0, 0)] + [(t.near + far - t.half,) * 2] * 2), t.margin)
    t.wide = t.blocked.shape[-1]
    t.candidate_flat = t.candidate @ (t.wide, 1)

    # Only pixels of a segment's core reach HIT; core_low, core_high: its bounding box, (K, 2).
    core = [np.argwhere(t.mask[stamp] >= HIT - 255) for stamp in t.stamp[360:]]
    t.core_low = np.stack([pixels.min(0) for pixels in core]) - t.half
    t.core_high = np.stack([pixels.max(0) for pixels in core]) - t.half
    t.span = 2 * t.half + 1
    t.broad = 2 * t.span + 1
    padded = np.pad(t.mask, [(0, 0)] + [(t.span,) * 2] * 2)
    t.hits = np.zeros((len(core), len(t.mask), t.broad, t.broad), bool)
    for k, pixels in enumerate(core):
        for row, column in pixels:
            least = HIT - int(t.mask[t.stamp[360 + k], row, column])
            t.hits[k] |= padded[:, row : row + t.broad, column : column + t.broad] >= least


# ---- growth --------------------------------------------------------------------------------------
# The mask is the pixel-wise maximum of its segments' stamps and a frame of ones, so the outcome of
# a test against the mask is the worst of the tests against its segments. `old` (n, 3, a) is the
# mask of a attempts: row, column and stamp of its n segments.


def _extend(rng, t, old, pivot, orientation):
    """Add a segment to one snake of each attempt. pivot (2, a), orientation (a,): of its last one.
    Return the attempts that found a place (p,), and the new pivots, orientations and segments
    (3, p)."""
    pivot = _move(pivot, t.advance[orientation].T)
    free = 255 - _blocked(t, old, pivot, orientation)  # (a, T)
    choice = t.choice[orientation]
    low = t.snakes.padding + t.margin  # of the dilated frame
    high = t.side - low
    outer = np.flatnonzero(((pivot < low + t.reach) | (pivot >= high - t.reach)).any(0))
    place = pivot[:, outer, None] + t.candidate.T[:, choice[outer]]  # (2, outer attempts, T)
    free[outer] *= ((place >= low) & (place < high)).all(0)
    odds = np.cumsum(t.favour[orientation] * free, axis=1)
    todo = np.flatnonzero(odds[:, -1] >= 1e-4 * 255)  # the others are dead ends
    chosen = np.full(len(odds), -1)
    for _ in range(3):  # up to three draws, same odds
        ball = rng.random(len(todo)) * odds[todo, -1]
        k = choice[todo, (odds[todo] > ball[:, None]).argmax(1)]
        hit = _collides(t, old, todo, pivot[:, todo] + t.candidate[k].T, k)
        chosen[todo[~hit]] = k[~hit]
        todo = todo[hit]
    alive = np.flatnonzero(chosen >= 0)
    pivot = pivot[:, alive]
    k = chosen[alive]
    segment = np.stack([*(pivot + t.candidate[k].T), t.stamp[360 + k]])
    return alive, pivot, 360 + k, segment


def _near(old, point, reach):
    """Find the older segments within reach of point (2, a), attempt by attempt -> attempt, stamp of
    the segment, and how far down and right of it the point is, each (pairs,)."""
    down = point[0] - old[:, 0]  # (n, a)
    right = point[1] - old[:, 1]
    attempt, segment = np.nonzero(((np.abs(down) < reach) & (np.abs(right) < reach)).T)
    return attempt, old[segment, 2, attempt], down[segment, attempt], right[segment, attempt]


def _blocked(t, old, pivot, orientation):
    """Return how much the dilated mask covers each candidate, 0..255: uint8 (a, T)."""
    worst = np.zeros((len(orientation), t.choice.shape[1]), np.uint8)
    attempt, stamp, down, right = _near(old, pivot, t.near)
    if len(attempt):
        start = stamp * t.wide**2 + (t.wide // 2 + down) * t.wide + t.wide // 2 + right
        candidates = t.candidate_flat[t.choice][orientation[attempt]]  # (pairs, T)
        blocked = t.blocked.take(start[:, None] + candidates)
        first = np.flatnonzero(np.diff(attempt, prepend=-1))  # an attempt's first pair
        worst[attempt[first]] = np.maximum.reduceat(blocked, first)
    return worst


def _collides(t, old, attempt, head, k):
    """Test segments, head (2, p), candidate k (p,), of attempts (p,) for collisions -> (p,)."""
    padding = t.snakes.padding
    outside = (head + t.core_low[k].T < padding) | (head + t.core_high[k].T >= t.side - padding)
    hit = outside.any(0)
    near, stamp, down, right = _near(old[:, :, attempt], head, t.span)
    hit[near[t.hits[k[near], stamp, down + t.span, right + t.span]]] = True
    return hit


def _seed_pivot(t, tail, degree):
    return _move(_move(tail, t.to_head[degree].T), t.to_pivot[degree].T)  # (2, a)


def _grow_pairs(rng, t, count):
    """Make `count` attempts at the two target snakes -> numbers (s,) of the successes, their
    segments (s, n, 3).

    Segment 2i + j is segment i of snake j. The first seed's stamp keeps clear of the frame; the
    second seed lies a seed distance away, tested only against the image's edge. A segment enters
    the mask late, after its snake has grown another one, so step s sees segments 0 .. s - 3."""
    degree = rng.integers(0, 360, (2, count))
    compass = rng.integers(0, 360, count)
    number = np.flatnonzero(t.usable[degree[0]])
    degree = degree[:, number]
    frame = t.snakes.frame or 2 * t.snakes.seed_distance
    low = frame - t.kernel.min(1)[degree[0]]  # (a, 2)
    high = t.side - frame - t.kernel.max(1)[degree[0]]  # exclusive
    tail = low + np.floor(rng.random(low.shape) * np.maximum(high - low, 0)).astype(np.int64)
    tails = [tail, np.round(tail + t.apart[compass[number]]).astype(np.int64)]
    heads = _move(tails[1], t.to_head[degree[1]])
    ends = np.stack([tails[1], heads, _move(heads, t.to_pivot[degree[1]])])
    inside = (high > low).all(1) & (ends >= 0).all((0, 2)) & (ends < t.side).all((0, 2))
    number = number[inside]
    orientations = [*degree[:, inside]]
    tails = [tail[inside].T for tail in tails]  # (2, a) each
    grown = np.stack([[*tails[j], t.stamp[orientations[j]]] for j in (0, 1)])  # (2, 3, a)
    pivots = [_seed_pivot(t, tails[j], orientations[j]) for j in (0, 1)]
    for step in range(2, 2 * t.snakes.contour):
        j = step % 2
        alive, pivots[j], orientations[j], segment = _extend(
            rng, t, grown[: step - 2], pivots[j], orientations[j]
        )
        pivots[1 - j] = pivots[1 - j][:, alive]
        orientations[1 - j] = orientations[1 - j][alive]
        number = number[alive]
        grown = np.concatenate([grown[:, :, alive], segment[None]])
    return number, grown.transpose(2, 0, 1)


# ---- distractors and drawing ---------------------------------------------------------------------


def _find_tails(rng, t, taken, image, degree):
    """Draw a free place for a seed, uniformly, in each `image` (p,) -> success (p,), tails (2, p).

    taken (n, width, width): where the mask blocks seeds, in a margin of `reach` zeros. Places are
    drawn until one is free. If dozens of draws fail, the map of all free places is computed."""
    width = taken.shape[-1]
    kernel = t.kernel[degree] @ (width, 1) + t.reach * (width + 1)  # (p, pixels)
    success = np.zeros(len(image), bool)
    tails = np.zeros((2, len(image)), np.int64)
    todo = np.arange(len(image))
    draws = max(4, 256 // kernel.shape[1])
    for _ in range(6):
        places = rng.integers(0, t.side, (2, len(todo), draws))
        start = image[todo, None] * width**2 + places[0] * width + places[1]  # (todo, draws)
        free = ~taken.reshape(-1).take(start[..., None] + kernel[todo, None]).any(-1)
        first = free.argmax(1)
        good = free[np.arange(len(todo)), first]
        success[todo[good]] = True
        tails[:, todo[good]] = places[:, good, first[good]]
        todo = todo[~good]
    for i in todo:
        free = np.ones((t.side, t.side), bool)
        for row, column in t.kernel[degree[i]] + t.reach:
            free &= taken[image[i], row : row + t.side, column : column + t.side] == 0
        places = np.argwhere(free)
        if len(places):
            success[i] = True
            tails[:, i] = places[rng.integers(len(places))]
    return success, tails


def _mark_taken(t, taken, images, segments):
    """Enter segments (n, 3, p) of images (p,) into the map of `_find_tails`."""
    width = taken.shape[-1]
    grid = np.arange(-t.half, t.half + 1)
    pixels = (grid[:, None] * width + grid + t.reach * (width + 1)).reshape(-1)
    blocks = (t.mask > 0.3 * 255).reshape(len(t.mask), -1)
    stamp_pixels = _pad_rows([pixels[row] for row in blocks])  # (S, most)
    for row, column, stamp in segments:
        start = images * width**2 + row * width + column
        taken.reshape(-1)[start[:, None] + stamp_pixels[stamp]] = 1


def _add_distractors(rng, t, pairs):
    """Add the distractors to pairs (n, 2 * contour, 3) -> segments (n, slots, 3), number of
    distractors placed (n,).

    Each has up to five attempts; if all fail it is left out, and its slots are FAR. As in [2], the
    first target snake's last segment is not in the mask (an oversight there), so a distractor may
    cross it. The test of [2] for a free 1 % of the mask is left out: a third is always free."""
    n = len(pairs)
    targets = 2 * t.snakes.contour
    segments = np.full((targets + t.snakes.distractors * DISTRACTOR, 3, n), FAR)
    segments[:, 2] = 0
    segments[:targets] = pairs.transpose(1, 2, 0)
    in_mask = [slot for slot in range(targets) if slot != targets - 2]
    inside = np.zeros((t.side - 2 * t.snakes.padding,) * 2, np.uint8)
    frame = np.pad(inside, t.snakes.padding, constant_values=1)
    taken = np.tile(np.pad(frame, t.reach), (n, 1, 1))  # (n, width, width)
    _mark_taken(t, taken, np.arange(n), segments[in_mask])
    placed = np.zeros(n, np.int64)
    for slot in range(targets, len(segments), DISTRACTOR):
        waiting = np.arange(n)
        for _ in range(5):
            degree = rng.integers(0, 360, len(waiting))
            image = waiting[t.usable[degree]]
            degree = degree[t.usable[degree]]
            free, tails = _find_tails(rng, t, taken, image, degree)
            image, degree, tails = image[free], degree[free], tails[:, free]
            pivot = _seed_pivot(t, tails, degree)
            new = np.stack([*tails, t.stamp[degree]])[None]
            for step in range(1, DISTRACTOR):
                old = np.concatenate([segments[in_mask][:, :, image], new[: step - 1]])
                alive, pivot, degree, segment = _extend(rng, t, old, pivot, degree)
                image = image[alive]
                new = np.concatenate([new[:, :, alive], segment[None]])
            segments[slot : slot + DISTRACTOR, :, image] = new
            _mark_taken(t, taken, image, new)
            placed[image] += 1
            waiting = np.setdiff1d(waiting, image)
        in_mask += range(slot, slot + DISTRACTOR)
    return segments.transpose(2, 0, 1), placed


def _disc(radius):
    """Return the disc's stamp, centred on its pixel: float32 (side, side), 0..1. Its centre is the
    first fine pixel of its pixel, as [2] draws on the fine grid of the whole image."""
    half = int(np.ceil(radius)) + 3  # room for the filter's ringing
    grid = np.arange(2 * half * ANTIALIAS + ANTIALIAS) - half * ANTIALIAS
    fine = (grid[:, None] ** 2 + grid**2 <= (radius * ANTIALIAS) ** 2).astype(np.uint8) * 255
    return _shrink(fine, 2 * half + 1).astype(np.float32) / 255


def _draw(t, segments, discs):
    """Draw segments (n, slots, 3) and discs at pixels (n, 2, 2) -> images uint8 (n, side, side)."""
    snakes = t.snakes
    disc = _disc(snakes.marker)
    pad = max(t.half, len(disc) // 2)
    width = t.side + 2 * pad
    canvas = np.zeros(len(segments) * width**2, np.float32)

    def offsets(stamp):
        return (np.argwhere(stamp) - len(stamp) // 2) @ (width, 1)

    def paste(images, row, column, pixels, values):
        where = (images * width**2 + (row + pad) * width + column + pad)[:, None] + pixels
        canvas[where] = np.maximum(canvas[where], values)

    ink_pixels = _pad_rows([offsets(stamp) for stamp in t.ink])  # (S, most)
    ink_values = _pad_rows([stamp[stamp > 0] for stamp in t.ink])
    ink_values = ink_values * np.float32(snakes.snake_contrast / 255)
    for slot, (row, column, stamp) in enumerate(segments.transpose(1, 2, 0)):
        contrast = np.float32(snakes.paddle_contrast if slot < 2 * snakes.contour else 1)
        images = np.flatnonzero(row != FAR)
        row, column, stamp = row[images], column[images], stamp[images]
        paste(images, row, column, ink_pixels[stamp], ink_values[stamp] * contrast)
    for row, column in discs.transpose(1, 2, 0):
        paste(np.arange(len(discs)), row, column, offsets(disc), disc[disc > 0])
    canvas = canvas.reshape(-1, width, width)[:, pad:-pad, pad:-pad]
    # The official files went through an image writer that stretches every image to 0..255.
    images = (canvas * (255 / canvas.max((1, 2), keepdims=True)) + 0.5).astype(np.uint8)
    coarse = np.arange(256) * snakes.levels // 256 * 255 // (snakes.levels - 1)  # identity for 256
    return coarse.astype(np.uint8)[images]


def _accepted_pairs(rng, t, count):
    """Try pairs of target snakes until `count` succeed -> segments (count, 2 * contour, 3),
    attempts per success."""
    accepted = []
    have = tried = 0
    batch = 4096
    while have < count:
        number, pairs = _grow_pairs(rng, t, batch)
        accepted.append(pairs[: count - have])
        have += len(accepted[-1])
        tried += batch if have < count else number[len(accepted[-1]) - 1] + 1
        # Enough for the rest at the success rate so far, but few enough to stay in cache.
        wanted = 1.1 * (count - have) * tried / max(have, 1)
        batch = int(np.clip(wanted, 1024, 8192 / t.usable.mean()))
    return np.concatenate(accepted), tried / count


def make_pathfinder(snakes, side, rng, count):
    """Generate `count` images of side x side px by the official process [2] -> arrays with one
    entry per image.

    images uint8 (n, side, side), labels uint8 (n,), and how they were made: margins (n,); attempts
    (n,) at the two target snakes, the mean over images of the same margin; distractors (n,) placed;
    paths (n, 2, contour, 2): points of both target snakes from tail to last head; discs (n, 2, 2):
    the marked points."""
    labels, marked = rng.integers(0, 2, (2, count))  # marked: the snake whose tail gets a disc
    out = SimpleNamespace(
        images=np.zeros((count, side, side), np.uint8),
        labels=labels.astype(np.uint8),
        margins=rng.choice(snakes.margins, count),
        attempts=np.zeros(count),
        distractors=np.zeros(count, int),
        paths=np.zeros((count, 2, snakes.contour, 2), np.int64),
        discs=np.zeros((count, 2, 2), np.int64),
    )
    # A margin is drawn per image, not per attempt, because wide margins fail more often.
    for margin in np.unique(out.margins).tolist():
        which = np.flatnonzero(out.margins == margin)
        t = _tables(snakes, side, margin)
        pairs, out.attempts[which] = _accepted_pairs(rng, t, len(which))
        segments, out.distractors[which] = _add_distractors(rng, t, pairs)
        # (n, 2, contour, 2)
        points = pairs[:, :, :2].reshape(-1, snakes.contour, 2, 2).transpose(0, 2, 1, 3)
        numbers = np.arange(len(which))
        start = marked[which]
        end = np.where(labels[which] == 1, start, 1 - start)
        discs = np.stack([points[numbers, start, 0], points[numbers, end, -1]], 1)  # (n, 2, 2)
        out.paths[which] = points
        out.discs[which] = discs
        # a few MB of canvas
        for block in np.array_split(numbers, 1 + len(numbers) * side**2 // 2**20):
            out.images[which[block]] = _draw(t, segments[block], discs[block])
    return out
