"""Curves of any runs, finished or not: python analyze.py curves RUN..."""

from pathlib import Path

from compare.drawing import draw
from engine.folder import read_log
from files import UserError

PANELS = {
    "loss": "loss\n(dashed: validation;\ndotted: its parts)",
    "score": "validation score",
    "denoising": "score of\npretraining",
    "lr": "learning rate",
    "gradient_norm": "gradient norm",
}


def curves_of(folder):
    """Return {panel: [(line style, steps, minutes, values)]} of a run."""
    found = {name: [] for name in PANELS}
    records = [record for record in read_log(folder) if record.get("kind") in ("train", "eval")]
    score = next(
        (
            name
            for record in records[::-1]
            for name in [*record][::-1]
            if name.startswith("val_") and name != "val_loss"
        ),
        None,
    )
    parts = sorted({name for record in records for name in record if name.startswith("loss_")})
    stage = "denoising" if score == "val_score" else "score"
    for panel, kind, name, style in (
        ("loss", "train", "loss", "-"),
        ("loss", "eval", "val_loss", "--"),
        (stage, "eval", score, "-"),
        ("lr", "train", "lr", "-"),
        ("gradient_norm", "train", "gradient_norm", "-"),
        *(("loss", "train", part, ":") for part in parts),
    ):
        some = [record for record in records if record["kind"] == kind and name in record]
        if some:
            steps, seconds, values = (
                [record[field] for record in some] for field in ("step", "seconds", name)
            )
            found[panel].append((style, steps, [each / 60 for each in seconds], values))
    return found


def curves(args):
    """Draw loss, score, learning rate and gradient norm of runs over steps and over minutes."""
    folders = [
        path.parent for place in args.what for path in sorted(Path(place).glob("**/log.jsonl"))
    ]
    if not folders:
        raise UserError(
            f"curves {' '.join(args.what)}: no run was started there; give folders of runs"
        )
    found = {folder: curves_of(folder) for folder in folders}
    there = {
        panel: label
        for panel, label in PANELS.items()
        if any(panels[panel] for panels in found.values())
    }

    def make(plt):
        figure, axes = plt.subplots(
            len(there), 2, figsize=(9, 2.2 * len(there)), sharex="col", sharey="row", squeeze=False
        )
        for i, (folder, panels) in enumerate(found.items()):
            for (left, right), (panel, label) in zip(axes, there.items()):
                for style, steps, minutes, values in panels[panel]:
                    colour = plt.cm.tab10(i) if len(found) <= 10 else plt.cm.tab20(i % 20)
                    look = dict(
                        color=colour,
                        linestyle=style,
                        marker="." * (len(steps) < 3),
                        label=folder.name,
                    )
                    left.plot(steps, values, **look)
                    right.plot(minutes, values, **look)
                left.set_ylabel(label)
                if panel == "gradient_norm":
                    left.set_yscale("log")
                    low, high = left.get_ylim()
                    few = high < 1e3 * low  # decades, so they get more labels
                    left.yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5) if few else (1,)))
                    left.yaxis.set_major_formatter("{x:g}")
                    left.yaxis.set_minor_formatter(plt.NullFormatter())
        axes[-1, 0].set_xlabel("steps")
        axes[-1, 1].set_xlabel("minutes of training and evaluation")
        return figure, "Training curves"

    draw(make, args.figure)
