"""Scores of Pathfinder's runs on 20,000 test images that no other run has seen. Its 2,000 test images stand under all
seeds alike: their standard error of 1.1 points does not get smaller with more seeds, that of 20,000 is .3.

    python data.py --task pathfinder_demo --seed 1 --train 20 --val 20 --test 20000 --data-dir data/fresh
    python results/findings/fresh.py runs/findings

Each finished run gets `fresh` in its result.json: accuracy, examples, and the generator's seed. 531 of the 20,000
images are among the training images as well: curves on so few pixels repeat.
"""
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from data import Parser, UserError, exit_code, open_task, read_json, write_json


def fresh_images(folder):
    """Task and test split of the images in `folder`. UserError where it lacks them: the default images, which would be
    made then, are those that every run is tested on."""
    path = Path(folder, "pathfinder_demo", "meta.json")
    if not path.exists() or read_json(path)["seed"] == 0:
        raise UserError(f"{folder} holds no fresh images; make them: python data.py --task pathfinder_demo --seed 1 "
                        f"--train 20 --val 20 --test 20000 --data-dir {folder}")
    task, *_, test = open_task("pathfinder_demo", folder)
    return task, test


def main():
    parser = Parser(description=__doc__.split("\n\n")[0])
    parser.add_argument("runs", type=Path, help="folder of runs")
    parser.add_argument("--data-dir", default="data/fresh", help="the fresh images (default: data/fresh)")
    args = parser.parse_args()
    if not args.runs.is_dir():
        raise UserError(f"no runs in {args.runs}")
    task, test = fresh_images(args.data_dir)
    fork = ROOT / "runs" / "fork"                                # where it is: it builds the models of question 11 too
    sys.path.insert(0, str(fork if fork.exists() else ROOT))
    from predict import Trained

    torch.set_num_threads(1)
    for path in sorted(args.runs.glob("pathfinder_demo-*/result.json")):
        run = read_json(path)
        if "fresh" in run or "start" not in run or run["seed"] >= 100:            # trials are judged by validation
            continue
        guess = torch.from_numpy(Trained(path.parent).outputs(test)).argmax(-1).numpy()
        run["fresh"] = dict(accuracy=float((guess == test.y).mean()), examples=len(test), seed=task.data["seed"])
        write_json(path, run)
        print(f"{path.parent.name}: {run['test_accuracy']:.4f} on {run['test_examples']:,}, "
              f"{run['fresh']['accuracy']:.4f} on {len(test):,}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
