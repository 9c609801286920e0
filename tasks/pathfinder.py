"""Pathfinder: do two marked discs lie on the same dashed curve? (Linsley et al. 2018; Long Range
Arena)

    0 0 127 255 ...    the gray levels of 32 x 32 pixels, row by row    ->    label 1, "connected"

snakes.py generates the images. PathX is the same task with 128 x 128 pixels, PathX-256 with 256 x
256."""

from dataclasses import replace
from itertools import repeat

import numpy as np
from PIL import Image

from files import UserError
from tasks import LEVELS, SPLITS, TASKS, Task
from tasks.making import CHUNK, DEMO, GENERATED, LRA, find, random_split, run_chunks, save_split
from tasks.snakes import Snakes, make_pathfinder


def draw_images(task, rng, count):
    snakes = make_pathfinder(task.make, task.side, rng, count)
    return dict(images=snakes.images.reshape(count, task.length, 1), labels=snakes.labels)


def distinct(images, labels, task, rng):
    """Yield the images; a spare image and label replace one that came up before."""
    chunks = (draw_images(task, rng, count) for count in repeat(64))
    spare = (pair for chunk in chunks for pair in zip(chunk["labels"], chunk["images"]))
    seen = set()
    for i, image in enumerate(images):
        while image.tobytes() in seen:
            labels[i], image = next(spare)  # early enough: `save_split` writes labels last
        seen.add(image.tobytes())
        yield image


def read_pathfinder_index(folder):
    """Read the metadata of an official folder -> image paths (n,), labels (n,). The files
    metadata/<batch>.npy are plain text; columns 0, 1 and 3 are folder, file and label. Batches are
    in numeric order. Empty image files are left out; the release has one."""
    paths = []
    labels = []
    for file in sorted((folder / "metadata").glob("*.npy"), key=lambda path: int(path.stem)):
        for directory, name, _, label, *_ in map(str.split, file.read_text().splitlines()):
            if (folder / directory / name).stat().st_size:
                paths.append(folder / directory / name)
                labels.append(int(label))
    return paths, np.array(labels)


def read_images(task, paths):
    """Yield gray images, row by row: uint8 (l, 1)."""
    for path in paths:
        try:
            yield np.asarray(Image.open(path).convert("L")).reshape(task.length, 1)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: {error}; restore that file") from None


def prepare(task, request):
    """Generate all splits, or read the official files."""
    if request.raw is not None:
        place = find(request, f"pathfinder{task.side}/curv_contour_length_14")
        paths, labels = read_pathfinder_index(place)
        tenth = len(paths) // 10
        parts = np.split(random_split(len(paths)), [-2 * tenth, -tenth])
        for split, part in zip(SPLITS, parts):
            images = read_images(task, [paths[i] for i in part])
            save_split(request, split, images, labels[part], place)
        return
    counts = [min(CHUNK, size - start) for size in request.sizes for start in range(0, size, CHUNK)]
    chunks = run_chunks(draw_images, counts, request)
    images = (image for path in chunks for image in np.load(path)["images"])
    labels = np.concatenate([np.load(path)["labels"] for path in chunks])
    if task.distinct:
        images = distinct(images, labels, task, np.random.default_rng([request.seed, 1 << 40]))
    for split, start in zip(SPLITS, np.cumsum([0] + request.sizes)):
        save_split(request, split, images, labels[start:], request.folder)


def paths_task(side, *sizes, **more):
    """Return the task of side x side px whose generator has these parameters of `Snakes`."""
    return Task(
        "pathfinder",
        length=side * side,
        classes=2,
        sizes=(160_000, 20_000, 20_000),
        mask=0.50,
        source=LRA,
        vocab=256,
        channels=1,
        side=side,
        names=("apart", "connected"),
        make=Snakes(*sizes, **more),
        symbols=LEVELS,
        prepare=prepare,
    )


def small_paths(side, frame, contour):
    """Return a small task with large, bright discs and three gray levels: only the curves must be
    learned."""
    more = dict(frame=frame, contour=contour, levels=3)
    task = paths_task(side, 1, 4, 2, 1.0, (1,), 1.0, 1.5, 0, 0.66, **more)
    return replace(task, sizes=DEMO, mask=0.25, distinct=True, source=GENERATED)


# Side; then padding, seed distance, paddle, thickness, margins, continuity, marker, distractors,
# contrast of snakes, of paddles, see `Snakes`.
TASKS |= {
    "pathfinder": paths_task(32, 1, 7, 2, 0.5, (1,), 1.0, 1.5, 5, 2.0, 0.75),
    "pathx": paths_task(128, 1, 20, 5, 1.5, (2, 3), 1.8, 3.0, 8, 0.9),
    "pathx256": paths_task(256, 22, 27, 5, 2.0, (3,), 1.8, 5.0, 7, 1.0),
    # Not the paper's: the generator's fourth resolution; small sets for the demo and for
    # `run_all.sh --preset mini`.
    "pathfinder64": paths_task(64, 1, 12, 5, 1.0, (1,), 1.8, 2.5, 5, 0.8),
    "pathfinder_demo": small_paths(14, frame=5, contour=4),
    "pathfinder_mini": small_paths(12, frame=4, contour=3),
    "pathx_mini": small_paths(14, frame=5, contour=4),
    "pathx256_mini": small_paths(16, frame=5, contour=5),
}
