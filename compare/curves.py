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
    panels = {name: [] for name in PANELS}
    records = [record for record in read_log(folder) if record.get("kind") in ("train", "eval")]
    fields = [name for record in records for name in record if name.startswith("val_")]
    scores = [name for name in fields if name != "val_loss"]
    score = scores[-1] if scores else None  # which chooses checkpoints is recorded last
    parts = sorted({name for record in records for name in record if name.startswith("loss_")})
    lines = [
        ("loss", "train", "loss", "-"),
        ("loss", "eval", "val_loss", "--"),
        ("denoising" if score == "val_score" else "score", "eval", score, "-"),
        ("lr", "train", "lr", "-"),
        ("gradient_norm", "train", "gradient_norm", "-"),
        *(("loss", "train", part, ":") for part in parts),
    ]
    for panel, kind, name, style in lines:
        points = [record for record in records if record["kind"] == kind and name in record]
        if points:
            steps = [record["step"] for record in points]
            minutes = [record["seconds"] / 60 for record in points]
            panels[panel].append((style, steps, minutes, [record[name] for record in points]))
    return panels


def curves(args):
    """Draw loss, score, learning rate and gradient norm of runs over steps and over minutes."""
    logs = [path for place in args.what for path in sorted(Path(place).glob("**/log.jsonl"))]
    if not logs:
        problem = f"curves {' '.join(args.what)}: no run was started there"
        raise UserError(f"{problem}; give folders of runs")
    runs = {path.parent: curves_of(path.parent) for path in logs}
    draw(lambda plt: figure(plt, runs), args.figure)


def figure(plt, runs):
    """Draw {folder: its `curves_of`}: a row per panel that has a line, over steps and minutes."""
    drawn = [panel for panel in PANELS if any(panels[panel] for panels in runs.values())]
    look = dict(figsize=(9, 2.2 * len(drawn)), sharex="col", sharey="row")
    picture, axes = plt.subplots(len(drawn), 2, squeeze=False, **look)
    for (left, right), panel in zip(axes, drawn):
        for i, (folder, panels) in enumerate(runs.items()):
            colour = plt.cm.tab10(i) if len(runs) <= 10 else plt.cm.tab20(i % 20)
            for style, steps, minutes, values in panels[panel]:
                look = dict(color=colour, linestyle=style, label=folder.name)
                look["marker"] = "." if len(steps) < 3 else ""
                left.plot(steps, values, **look)
                right.plot(minutes, values, **look)
        left.set_ylabel(PANELS[panel])
        if panel == "gradient_norm":
            left.set_yscale("log")
            low, high = left.get_ylim()
            decades = high >= 1e3 * low  # fewer get more labels
            left.yaxis.set_major_locator(plt.LogLocator(subs=(1,) if decades else (1, 2, 5)))
            left.yaxis.set_major_formatter("{x:g}")
            left.yaxis.set_minor_formatter(plt.NullFormatter())
    axes[-1, 0].set_xlabel("steps")
    axes[-1, 1].set_xlabel("minutes of training and evaluation")
    return picture, "Training curves"
