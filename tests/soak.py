"""Kills everything at random moments, 1,000 times, and compares what comes out in the end with an undisturbed twin, bit
for bit. Not part of the suite: an hour or more on 2 CPU cores.

    python tests/soak.py                       # the table of results/soak.md
    python tests/soak.py --kills 20 --only finetune,run_all

A signal comes at a moment drawn uniformly between a command's first file and its end: half of them kill -9, for all
processes that it has started; half SIGTERM, for the command alone, which is to end what it has started. The same
command (training: with --resume) is started again, and killed again, until it comes to its end by itself. Then its
files must be those of the twin: all arrays and meta.json of a data set; log, result and the tensors of both checkpoints
of a run. All this happens in a copy of the scripts in which an epoch of your own data is 20 steps.
"""
import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "results")]

from test_runs import load, log_of, result_of, same  # noqa: E402

SHARES = dict(generate=250, read=250, pretrain=130, finetune=130, joint=130, run_all=110)                     # of 1,000
OWN = "--task file:../../own.npz --model s4 --seed 1 --log-every 5 --resume --out run"
COMMANDS = {       # all are repeated as they are
    "generate": "python data.py --task listops_demo --train 2000 --val 100 --test 100 --workers 2",
    "read": "python data.py --task file:../../large.npz",
    "pretrain": f"python pretrain.py {OWN}",
    "finetune": "python finetune.py --init first --seed 1 --log-every 5 --label-fraction 0.5 --resume --out run",
    "joint": f"python finetune.py {OWN} --joint 1",
    "run_all": "bash run_all.sh own --tasks file:../../own.npz --models s4 --seeds 0"}
RESULTS = dict(generate="data", read="data", run_all="runs/own")


def copy(folder):
    """The scripts, with short epochs."""
    folder.mkdir(parents=True)
    shutil.copytree(ROOT / "zoo", folder / "zoo", ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*ROOT.glob("*.py"), ROOT / "run_all.sh"]:
        text = path.read_text()
        if path.name == "recipes.py":
            short = text.replace('// recipe["batch"], 200), 1_000)', '// recipe["batch"], 20), 20)')
            assert short != text, "the rule has changed"
            text = short
        (folder / path.name).write_text(text)
    return folder


def start(command, folder):
    """A command in a session of its own -> process."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(command.split(), cwd=folder, start_new_session=True, stdout=subprocess.DEVNULL,
                            stderr=open(folder / "errors.txt", "a"),
                            env=os.environ | dict(PATH=path, OMP_NUM_THREADS="1", JOBS="2", CUDA_VISIBLE_DEVICES=""))


def kill(process, term):
    """Until no process of a session is left: kill -9 to all, or SIGTERM to the first, half a minute before the rest."""
    if term:
        process.send_signal(signal.SIGTERM)
    patience = time.time() + (30 if term else 0)
    while True:
        listing = subprocess.run(["ps", "-eo", "pid=,sid=,stat="], capture_output=True, text=True).stdout
        left = [int(pid) for pid, session, state in map(str.split, listing.splitlines())
                if int(session) == process.pid and state[0] != "Z"]
        if not left:
            return process.wait()
        for pid in left if time.time() > patience else []:
            assert not term, f"{left} outlived SIGTERM"
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.01)


def differences(one, two):
    """Names of what is not the same in two folders of results."""
    kinds, found = (".npy", ".npz", ".pt", ".json", ".jsonl"), []
    names = {path.relative_to(top) for top in (one, two) for path in top.rglob("*") if path.suffix in kinds}
    for name in sorted(names):
        a, b = one / name, two / name
        if not (a.exists() and b.exists()):
            equal = False
        elif name.suffix == ".pt":
            equal = same(load(a), load(b))
        elif name.name == "result.json":
            equal = same(result_of(a.parent), result_of(b.parent))
        elif name.suffix == ".jsonl":
            equal = log_of(a.parent, "train", "eval") == log_of(b.parent, "train", "eval")
        elif name.suffix == ".npz":
            with np.load(a) as first, np.load(b) as second:
                equal = first.keys() == second.keys() and all(np.array_equal(first[key], second[key]) for key in first)
        else:                                             # arrays, meta.json, config.json
            equal = a.read_bytes() == b.read_bytes()
        found += [] if equal else [str(name)]
    return found


def soak(what, kills, folder, seed):
    """-> row of the table: what, kills, times started, runs or data sets compared, what differed."""
    rng, made, hits, terms, starts, found = random.Random(f"{what} {seed}"), folder / what, 0, 0, 0, []
    twin, result = copy(made / "twin"), RESULTS.get(what, "run")
    if what == "finetune":
        assert start(COMMANDS["pretrain"].replace("--out run", "--out first"), twin).wait() == 0, twin
    spare, begun = shutil.copytree(twin, made / "spare"), time.time()
    process = start(COMMANDS[what], twin)
    while not (twin / result).exists():
        time.sleep(0.01)
    first = time.time() - begun
    assert process.wait() == 0, (twin / "errors.txt").read_text()
    whole, compared = time.time() - begun, 0
    while hits < kills:
        here = shutil.copytree(spare, made / "here")
        while True:
            process, starts = start(COMMANDS[what], here), starts + 1
            try:
                code = process.wait(rng.uniform(0.9 * first, 1.2 * whole) if hits < kills else None)
                assert code == 0, (here / "errors.txt").read_text()[-2000:]
                break
            except subprocess.TimeoutExpired:
                code = kill(process, term := rng.random() < 0.5)
                assert not term or code in (0, 143, -signal.SIGTERM), (code, (here / "errors.txt").read_text()[-2000:])
                hits, terms = hits + 1, terms + term
        found += differences(twin / result, here / result)
        compared += len([*(here / result).rglob("meta.json"), *(here / result).rglob("result.json")])
        shutil.rmtree(here)
    return f"| {what} | {hits - terms} | {terms} | {starts} | {compared} | {', '.join(found) or 'none'} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="in all (default: 1000)")
    parser.add_argument("--only", default=",".join(SHARES), help="some of: " + ",".join(SHARES))
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    args = parser.parse_args()
    some = args.only.split(",")
    torch.set_num_threads(1)
    print("| command | kill -9 | SIGTERM | started | runs or sets compared | different from the twin |\n"
          "|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        for name, n, l in (("own", 120, 40), ("large", 20_000, 200)):
            x = np.random.default_rng(0).normal(size=(n, l)).astype(np.float32)
            np.savez(Path(folder, f"{name}.npz"), x=x, y=np.arange(n) % 2)
        total = sum(SHARES[what] for what in some)
        shares = [max(1, args.kills * SHARES[what] // total) for what in some]
        for row in pool.map(soak, some, shares, [Path(folder)] * len(some), [args.seed] * len(some)):
            print(row, flush=True)


if __name__ == "__main__":
    main()
