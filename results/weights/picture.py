"""README's picture of what two kept runs fill in: curves of Pathfinder and a review.

    python results/weights/picture.py results/filled_in.png
"""
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from predict import draw_filled_in, filled_in, held_examples, load, new_split             # noqa: E402


def main(path):
    figure = Figure((6.6, 3.5), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1.1, 2))
    paths, review = above.subplots(1, 6).reshape(2, 3), below.subplots(3, 1).reshape(1, 3)
    above.suptitle("A small Transformer on Pathfinder: hidden pixels are blue, wrong ones orange", x=0.01, ha="left",
                   fontsize=7.5)
    below.suptitle("One with rotary positions on a review: what it fills in right is blue, what is wrong orange",
                   x=0.01, ha="left", fontsize=7.5)
    for name, some, axes in (("pathfinder_demo-transformer", [1, 2], paths), ("text256-rotary", [7], review)):
        trained = load(HERE / f"{name}-pretrain")
        split = new_split(trained, held_examples(trained))[0]
        batch = split.batch(np.array(some))
        hidden, guess, wrong = filled_in(trained, batch)
        if trained.task.channels:              # gray levels as samples
            guess = (guess[..., None] / trained.task.scale - trained.task.mean) / trained.task.std
        draw_filled_in(axes, trained.task, batch, hidden, guess, wrong)
        for axis, title in zip(axes.flat, ("as it is", f"{trained.saved['mask']:.0%} hidden", "filled in") * 2):
            axis.set_title(title, loc="left", fontsize=7.5)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1])
