"""Draw an example of any task: as it is, with hidden positions, or filled in by a model. Used only
for pictures."""

import re
from pathlib import Path

import numpy as np

from files import UserError

RIGHT, WRONG = "#0072b2", "#d55e00"  # colour-blind safe


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


def draw_example(axis, task, batch, i, hidden, guess=None, wrong=None):
    """Draw example i of a batch on a matplotlib axis: images as images, series as curves, symbols
    as text (the first of two documents). hidden (l,) bool: positions to cover. guess: a model's
    predictions for them, ids (l,) or normalised samples (l, channels); those that are `wrong` (l,)
    have another colour."""
    filled = guess is not None
    if task.side:
        pixels = batch.samples[i].numpy()  # (l, channels)
        pixels = np.where(hidden[:, None], guess, pixels) if filled else pixels
        pixels = (pixels * task.std + task.mean).clip(0, 1)
        marked, colour = (wrong, (0.84, 0.37, 0.0)) if filled else (hidden, (0.34, 0.71, 0.91))
        axis.imshow(np.where(marked[:, None], colour, pixels).reshape(task.side, task.side, 3))
    elif task.channels:  # 400 positions around the largest value
        series = batch.samples[i, : None if batch.lengths is None else batch.lengths[i]]
        start = max(min(int(series.nan_to_num().abs().sum(1).argmax()) - 200, len(series) - 400), 0)
        some, hidden = slice(start, start + 400), hidden[: len(series), None]
        if filled:
            axis.plot(series[some], "-", color="0.8")
            guess, wrong = guess[: len(series)], wrong[: len(series), None]
            for marked, colour in ((hidden & ~wrong, RIGHT), (hidden & wrong, WRONG)):
                axis.plot(np.where(marked, guess, np.nan)[some], ".", color=colour)
        else:
            axis.plot(np.where(hidden, np.nan, series)[some], ".-")
        axis.set_xlim(0, min(task.length, 400))
    else:
        place, black = i * task.documents, not filled
        ids = np.where(hidden, guess, batch.symbols[place]) if filled else batch.symbols[place]
        column, row, pieces = 0, 0, {}  # {(row, colour): the line's letters of that colour}
        for t, covered in zip(range(int(batch.lengths[place])), hidden):
            word = re.sub(r"\s", "␣" if covered and filled else " ", task.symbols[ids[t]])
            colour = "black" if black or not covered else WRONG if wrong[t] else RIGHT
            if column + len(word) > 80:
                column, row = 0, row + 1
            if row == lines_of(task):
                break
            line = pieces.get((row, colour), "").ljust(column)
            pieces[row, colour] = line + ("█" * len(word) if covered and black else word)
            column += len(word) + len(task.between)
        for (row, colour), line in pieces.items():
            axis.text(
                0,
                1 - (row + 0.8) / lines_of(task),
                line,
                va="baseline",
                family="monospace",
                fontsize=7.6,
                color=colour,
                parse_math=False,
            )
    axis.axis("off")
