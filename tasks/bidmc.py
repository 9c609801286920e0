"""BIDMC: heart rate, respiratory rate or oxygen saturation from 32 seconds of two sensors (Pimentel
et al. 2017).

4,000 positions of PPG and ECG, 125 Hz    ->    72.5 beats per minute, mapped to [-1, 1]
"""

import re

import numpy as np

from files import UserError, refuse_rows
from tasks import SPLITS, TASKS, Source, Task
from tasks.making import find, save_split


def official_windows(n):
    """Split n windows into 70, 15 and 15 % as the official code does -> three index arrays."""
    from sklearn.model_selection import train_test_split

    train, rest = train_test_split(np.arange(n), test_size=0.3, random_state=0)
    return train, *train_test_split(rest, test_size=0.5, random_state=1)


def prepare(task, request):
    """Prepare one of BIDMC's three targets. The official split joins TRAIN and TEST and draws
    windows at random, so test windows overlap training windows (results/bidmc_leak.md). Targets are
    mapped to [-1, 1] by the range of the training split (paper, appendix C.3): `Task.ends`."""
    paths = [find(request, url.rsplit("/", 1)[1]) for url in task.source.urls]  # TRAIN, TEST
    halves = []
    for path in paths:
        with open(path, encoding="latin-1") as file:
            series, targets = read_ts(path, file, (task.length, task.channels), float)
        halves.append((series, targets))
    series, targets = map(np.concatenate, zip(*halves))  # (n, l, channels), (n,)
    train, *others = official_windows(len(targets))
    train = train[: request.take("train", len(train), paths[0])]
    low = targets[train].min()
    high = targets[train].max()
    for split, examples in zip(SPLITS, (train, *others)):
        y = (targets[examples] - low) / (high - low) * 2 - 1
        save_split(request, split, series[examples], y, paths[0])
    return dict(ends=[float(low), float(high)])


def windows(target, record, sizes):
    names = [f"BIDMC32{target}_TRAIN.ts", f"BIDMC32{target}_TEST.ts"]
    urls = tuple(f"https://zenodo.org/records/{record}/files/{name}" for name in names)
    return Task(
        "bidmc",
        length=4000,
        classes=0,
        sizes=sizes,
        mask=0.25,
        channels=2,
        scale=1,
        mean=0.0,
        std=1.0,
        source=Source(urls, " and ".join(names), "ODC-By (PhysioNet BIDMC)"),
        prepare=prepare,
    )


# ---- .ts -----------------------------------------------------------------------------------------


def read_ts(path, lines, shape=None, kind=str, regression=True, skip=()):
    """Read the lines of a .ts file, of the TSER archive (Tan et al. 2021) or UEA's -> series,
    targets of type `kind` or None. Series are float64 (l, channels), or float32 of `shape` if that
    is given. skip: examples that are left out.

    After a header of lines with #, % and @, there is one line per example: its channels, numbers
    separated by commas, and the target, separated by colons; no target if the header says
    "@classLabel false". A value may be (time,value), or a question mark if it is missing."""
    series, targets = [], []
    problems = {}
    labelled = True
    row = -1
    for number, line in enumerate(lines, 1):
        if line.strip()[:1] in ("", "#", "@", "%"):
            words = line.lower().split()[:2]
            if words in (["@classlabel", "false"], ["@targetlabel", "false"]):
                labelled = False
            if words == ["@targetlabel", "true"] and not regression:
                problem = f"{path}, line {number}: @targetLabel says that targets are numbers"
                raise UserError(f"{problem}; give --regression of data.py or run_all.sh own")
            continue
        row += 1
        if row in skip:
            continue
        try:
            values, target = ts_example(line, labelled, shape)
            targets.append(kind(target))
            series.append(values)
        except ValueError as error:
            problem = "not the numbers of each channel and a target, between colons"
            problems[row] = f"line {number}", f"{problem} ({str(error).splitlines()[0]})"
    refuse_rows(path, problems, "restore the file" if shape else "a missing value is a ?")
    return series, targets if labelled else None


def ts_example(line, labelled, shape):
    """Return the values (l, channels) and the target of a line of a .ts file."""
    without_colons = re.sub(r"\([^()]*:[^()]*,", "(,", line)  # of times of day
    channels = without_colons.split(":")
    target = channels.pop().strip() if labelled else ""
    channels = [re.sub(r"\([^()]*,([^(),]*)\)", r"\1", channel) for channel in channels]
    if not shape:
        channels = [channel.replace("?", "nan") for channel in channels]
    rows = [channel.split(",") for channel in channels]
    if any("_" in channel for channel in channels):
        raise ValueError("5_3 is no number")
    lengths = {*map(len, rows)}
    if len(lengths) > 1:
        raise ValueError("channels have different numbers of positions, or the label has a colon")
    values = np.array(rows, np.float32 if shape else np.float64).reshape(len(rows), -1).T
    return values.reshape(shape or values.shape), target


TASKS |= {
    "bidmc_hr": windows("HR", 4001456, (5_564, 1_192, 1_193)),
    "bidmc_rr": windows("RR", 4001463, (5_509, 1_180, 1_181)),
    "bidmc_spo2": windows("SpO2", 4001464, (5_564, 1_192, 1_193)),
}
