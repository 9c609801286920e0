"""Draw an example of any task: as it is, with hidden positions, or filled in by a model."""

import re
from pathlib import Path

import numpy as np

from files import UserError, write_atomically

RIGHT = "#0072b2"  # colour-blind safe
WRONG = "#d55e00"


def picture(flag, path):
    """Raise UserError if a path is not a file name for a picture."""
    if Path(path).suffix.lower() not in (".png", ".pdf", ".svg") or Path(path).is_dir():
        raise UserError(f"{flag} '{path}': give a file name that ends in .png, .pdf or .svg")


def lines_of(task):
    """Return how many lines of 80 letters `draw_example` has for a text."""
    return min(11, 1 + task.length * (3 if task.between else 1) // 80)


def height(task):
    """Return the height of an axis for `draw_example`, in inches."""
    return 2.4 if task.channels else 0.35 + 0.18 * lines_of(task)


def sheet(path, task, batch, size, columns, stacked=False):
    """Write a picture of a batch: one row per example or, stacked, its columns below each other.
    size: in inches. columns: (titles, one per example; then arguments of `draw_example` from
    `hidden` on, a row per sequence)."""
    from matplotlib.figure import Figure

    figure = Figure(size, layout="constrained")
    shape = (len(batch.y), len(columns))
    grid = (np.prod(shape), 1) if stacked else shape
    axes = figure.subplots(*grid, squeeze=False).reshape(shape)
    for (i, j), axis in np.ndenumerate(axes):
        titles, *marks = columns[j]
        draw_example(axis, task, batch, i, *(mark[i * task.documents] for mark in marks))
        axis.set_title(titles[i], loc="left", fontsize=8, parse_math=False)
    kind = Path(path).suffix[1:].lower()
    write_atomically(path, lambda file: figure.savefig(file, format=kind))


def draw_example(axis, task, batch, i, hidden, guess=None, wrong=None):
    """Draw example i of a batch on a matplotlib axis: an image, a curve, or the first document as
    text. hidden (l,) bool: positions to cover. guess: a model's predictions for them, ids (l,) or
    normalised samples (l, channels); those that are `wrong` (l,) have another colour."""
    if task.side:
        draw_image(axis, task, batch.samples[i].numpy(), hidden, guess, wrong)
    elif task.channels:
        length = None if batch.lengths is None else batch.lengths[i]
        draw_series(axis, task, batch.samples[i, :length], hidden, guess, wrong)
    else:
        document = i * task.documents
        ids = batch.symbols[document, : int(batch.lengths[document])]
        draw_text(axis, task, ids, hidden, guess, wrong)
    axis.axis("off")


def draw_image(axis, task, pixels, hidden, guess, wrong):
    """Draw pixels (l, channels), those that are marked in one colour."""
    marked = hidden
    colour = (0.34, 0.71, 0.91)
    if guess is not None:
        pixels = np.where(hidden[:, None], guess, pixels)
        marked = wrong
        colour = (0.84, 0.37, 0.0)
    pixels = (pixels * task.std + task.mean).clip(0, 1)
    axis.imshow(np.where(marked[:, None], colour, pixels).reshape(task.side, task.side, 3))


def draw_series(axis, task, series, hidden, guess, wrong):
    """Draw 400 positions of a series (l, channels) around its largest value."""
    largest = int(series.nan_to_num().abs().sum(1).argmax())
    start = max(min(largest - 200, len(series) - 400), 0)
    shown = slice(start, start + 400)
    hidden = hidden[: len(series), None]
    if guess is None:
        axis.plot(np.where(hidden, np.nan, series)[shown], ".-")
    else:
        axis.plot(series[shown], "-", color="0.8")
        guess = guess[: len(series)]
        wrong = wrong[: len(series), None]
        for marked, colour in ((hidden & ~wrong, RIGHT), (hidden & wrong, WRONG)):
            axis.plot(np.where(marked, guess, np.nan)[shown], ".", color=colour)
    axis.set_xlim(0, min(task.length, 400))


def draw_text(axis, task, ids, hidden, guess, wrong):
    """Write symbols, ids (l,), in lines of 80 letters; hidden ones are covered or guessed."""
    if guess is not None:
        ids = np.where(hidden[: len(ids)], guess[: len(ids)], ids)
    column = 0
    row = 0
    pieces = {}  # {(row, colour): the line's letters of that colour}
    for t, covered in zip(range(len(ids)), hidden):
        filled = covered and guess is not None
        word = re.sub(r"\s", "␣" if filled else " ", task.symbols[ids[t]])
        colour = "black"
        if filled:
            colour = WRONG if wrong[t] else RIGHT
        if column + len(word) > 80:
            column = 0
            row += 1
        if row == lines_of(task):
            break
        line = pieces.get((row, colour), "").ljust(column)
        pieces[row, colour] = line + ("█" * len(word) if covered and not filled else word)
        column += len(word) + len(task.between)
    font = dict(va="baseline", family="monospace", fontsize=7.6, parse_math=False)
    for (row, colour), line in pieces.items():
        axis.text(0, 1 - (row + 0.8) / lines_of(task), line, color=colour, **font)
