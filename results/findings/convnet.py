"""A small convolutional network on scaled-down Pathfinder, in the minutes of the Transformer's run (88 s on a thread).

    python results/findings/convnet.py                      three rates with seed 100, then seeds 0 to 9
    python results/findings/convnet.py --fresh data/fresh   also on 20,000 images that no run has seen (fresh.py)

An unfair neighbour: it sees the image in two dimensions, and neighbours as neighbours, where every other model here
reads 196 pixels in a row. So it tells what the task is worth to whoever knows that, not what a sequence model should
reach. Training is on the same 5,000 images, from scratch, and nothing is changed in them. Validation chooses the rate,
with seed 100 alone, and the checkpoint; the test split is seen once. With --fresh the linear model of baseline.py is
fitted again, and scored on the same images.

Each run is a record in results/baseline.jsonl, in the place of an older one of its name.
"""
import argparse
import copy
import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT)]

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from baseline import counts, fit, score
from data import exit_code, open_task, write_atomically
from fresh import fresh_images
from run import environment

TASK, KEPT, RATES, TRIAL = "pathfinder_demo", ROOT / "results" / "baseline.jsonl", (1e-3, 3e-3, 1e-2), 100
WIDTH, BATCH, EPOCHS = 24, 32, 30               # 26,474 parameters; the Transformer has 25,826, S4 14,594


def network():
    """Six convolutions of 3 x 3, half as fine after three of them; a linear head on the mean over positions."""
    layers = []
    for i in range(6):
        layers += [nn.Conv2d(WIDTH if i else 1, WIDTH, 3, padding=1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if i == 2 else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 2))


def images(split):
    """-> (n, 1, side, side), labels (n,)."""
    batch, side = split.batch(np.arange(len(split))), split.task.side
    return batch.samples.reshape(-1, 1, side, side), batch.y


@torch.no_grad()
def predicted(model, x):
    model.eval()
    guess = torch.cat([model(part).argmax(1) for part in x.split(1000)])
    model.train()
    return guess.numpy()


def train(x, y, x_val, y_val, rate, seed):
    """-> the model after the epoch that validation prefers, of equal ones the first; its accuracy there; the epoch."""
    torch.manual_seed(seed)
    model, best = network(), (-1, None, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=EPOCHS * (len(x) // BATCH))
    for epoch in range(1, EPOCHS + 1):
        for rows in torch.randperm(len(x))[:len(x) // BATCH * BATCH].split(BATCH):
            loss = F.cross_entropy(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        accuracy = float(np.mean(predicted(model, x_val) == y_val.numpy()))
        if accuracy > best[0]:
            best = accuracy, copy.deepcopy(model.state_dict()), epoch
    model.load_state_dict(best[1])
    return model, best[0], best[2]


def scored(guess, split):
    """What `fresh` is in a record."""
    return dict(accuracy=score(split.task, split.y, guess), examples=len(split), seed=split.task.data["seed"])


def keep(record):
    """Into results/baseline.jsonl, in the place of the record of that name or at the end."""
    kept = {one["run"]: one for one in map(json.loads, KEPT.read_text().splitlines())} | {record["run"]: record}
    write_atomically(KEPT, lambda file: file.write("".join(f"{json.dumps(one)}\n" for one in kept.values()).encode()))
    print(record["run"], record["val_accuracy"], record["test_accuracy"], record.get("fresh"), flush=True)


def linear(splits, fresh):
    """The kept record of baseline.py, with its score on fresh images."""
    kept = next(one for one in map(json.loads, KEPT.read_text().splitlines()) if one["run"] == f"{TASK}-baseline")
    val_accuracy, guess, constant = fit(splits[0].task, *splits[:2], fresh)
    assert val_accuracy == kept["val_accuracy"], "another model than the kept one"
    return kept | dict(fresh=scored(guess, fresh) | dict(constant=float((constant == fresh.y).mean())))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--fresh", metavar="DIR", help="prepared images of another seed; see fresh.py")
    args, here = parser.parse_args(), environment(torch.device("cpu"))
    fresh = fresh_images(args.fresh)[1] if args.fresh else None
    torch.set_num_threads(1)
    task, *splits = open_task(TASK)
    test, both = splits[2], [*images(splits[0]), *images(splits[1])]
    if fresh:
        keep(linear(splits, fresh))
    tried = {rate: train(*both, rate, TRIAL)[1] for rate in RATES}
    print("validation of each rate:", tried, flush=True)
    for seed in range(10):
        start, rate = time.process_time(), max(tried, key=tried.get)
        model, val_accuracy, epoch = train(*both, rate, seed)
        seconds = time.process_time() - start                    # of one thread, whatever runs beside it
        guess = predicted(model, images(test)[0])
        record = dict(
            run=f"{TASK}-convnet-s{seed}", val_accuracy=val_accuracy, test_accuracy=score(task, test.y, guess),
            task=TASK, model="convolutional network", objective="none", start="baseline", seed=seed, data=task.data,
            changed={}, lr=rate, tried=tried, steps=EPOCHS * (len(both[0]) // BATCH), best_epoch=epoch,
            parameters=sum(weight.numel() for weight in model.parameters()), train_examples=len(both[0]),
            test_examples=len(test), seconds=round(seconds, 1), counts=counts(task, test.y, guess), **here)
        keep(record | (dict(fresh=scored(predicted(model, images(fresh)[0]), fresh)) if fresh else {}))


if __name__ == "__main__":
    sys.exit(exit_code(main))
