"""BIDMC: heart rate, respiratory rate or oxygen saturation from 32 seconds of two sensors (Pimentel
et al. 2017).

4,000 positions of PPG and ECG, 125 Hz    ->    72.5 beats per minute, mapped to [-1, 1]
"""

import numpy as np

from tasks import SPLITS, TASKS, Source, Task
from tasks.making import find, save_split
from tasks.readers import read_ts


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
            series, targets, _ = read_ts(path, file, (task.length, task.channels), float)
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


TASKS |= {
    "bidmc_hr": windows("HR", 4001456, (5_564, 1_192, 1_193)),
    "bidmc_rr": windows("RR", 4001463, (5_509, 1_180, 1_181)),
    "bidmc_spo2": windows("SpO2", 4001464, (5_564, 1_192, 1_193)),
}
