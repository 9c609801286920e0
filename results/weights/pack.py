"""Finished runs as results/weights/ keeps them: best.pt, config.json and result.json, and no more.

    python results/weights/pack.py runs/text256-rotary-masked-pretrain-s0 results/weights/text256-rotary-pretrain

Weights of more than 400 kB are rounded to float16, and the test score is that of the rounded ones. `kept` in
result.json is what the run says of the examples that lie here, TASK.csv or TASK.npz: accuracy, or the share of hidden
positions that it fills in right. A test compares it.
"""
import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from data import open_task, sha256_of, write_atomically, write_json    # noqa: E402
from predict import filled_in, held_examples, load, new_split          # noqa: E402
from run import read_checkpoint                                        # noqa: E402

LARGEST = 400_000                              # bytes


def kept(trained):
    """The score of a run on the examples beside it."""
    split, _, labels = new_split(trained, held_examples(trained))
    if trained.pretrained:
        hidden, _, wrong = filled_in(trained, split.batch(np.arange(len(split))))
        return float(1 - wrong.sum() / hidden.sum())
    return float(np.mean(trained.answers(trained.outputs(split))[0] == labels))


def pack(source, target):
    target.mkdir(parents=True, exist_ok=True)
    checkpoint = read_checkpoint(source / "best.pt")
    rounded = (source / "best.pt").stat().st_size > LARGEST
    if rounded:
        checkpoint["model"] = {name: value.half() if value.dtype == torch.float32 else value
                               for name, value in checkpoint["model"].items()}
    record = json.loads((source / "result.json").read_text())
    write_atomically(target / "best.pt", lambda file: torch.save(checkpoint, file))
    record |= {"best.pt": sha256_of(target / "best.pt"), "weights": "float16" if rounded else "float32"}
    write_atomically(target / "config.json", lambda file: file.write((source / "config.json").read_bytes()))
    write_json(target / "result.json", record)
    trained = load(target)
    if "start" in record:
        test = open_task(record["task"])[3]
        record["test_accuracy"] = float(np.mean(trained.outputs(test).argmax(-1) == test.y))
    record["kept"] = kept(trained)
    write_json(target / "result.json", record)
    size, test = (target / "best.pt").stat().st_size, record.get("test_accuracy")
    print(f"{target}: {size:,} bytes, {record['weights']}, kept examples {record['kept']:.4f}, test {test}")


if __name__ == "__main__":
    pack(*map(Path, sys.argv[1:3]))
