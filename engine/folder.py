"""The run directory: config.json, log.jsonl, best.pt, last.pt; at the end predictions.npz
(finetuning), result.json."""

import base64
import contextlib
import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

import files
import tasks
import zoo
from engine.targets import KINDS
from files import ROOT, UserError, locked

# everything that decides how a run trains, beside the files of its model and its task
CODE = """
    kernels.py gradients.py models.py recipes.py data.py pretrain.py finetune.py tasks/__init__.py
    engine/feed.py engine/graph.py engine/losses.py engine/processes.py engine/run.py
    engine/targets.py zoo/mega.py zoo/scan.py zoo/selective.py zoo/shared.py zoo/structured.py
"""


def code_of_run(args):
    """Return a checksum of a run's code without comments: CODE, its model's and task's files."""
    homes = zoo.homes.get(args.model), tasks.homes.get(args.task, ROOT / "own" / "task.py")
    paths = [ROOT / name for name in CODE.split()] + [home for home in homes if home is not None]
    sources = [files.without_comments(path.read_text(encoding="utf-8")) for path in paths]
    return hashlib.sha256("\n".join(sources).encode()).hexdigest()[:8]


class Folder:
    """A run directory. main: whether this process writes. `look` sets resumes, whether a stopped
    run continues, and began, what its config.json says of RECORDS."""

    # of a run's start; a resumed run keeps them
    RECORDS = "changed", "recipe", "init", "pretrained", "code"

    def __init__(self, path, main):
        self.path = Path(path)
        self.main = main
        self.began = {}
        self.lock = contextlib.ExitStack()

    def look(self, config, resume):
        """Check that the directory is empty or, with --resume, holds a run with this config. Return
        whether that run is finished."""
        out = self.path
        names = {path.name for path in out.glob("*") if path.suffix != ".tmp"} - {".lock"}
        if names and not resume:
            raise UserError(f"{out} is not empty; add --resume, or choose another --out")
        if names and "config.json" not in names:
            raise UserError(f"--resume: {out} has no config.json; it is not a run directory")
        self.resumes = "last.pt" in names
        finished = "result.json" in names
        if self.resumes or finished:
            saved = files.read_json(out / "config.json")
            self.compare(saved, config, finished)
            self.began = {name: saved[name] for name in self.RECORDS if name in config}
            if config["code"] not in saved["code"].split("+"):  # a resumed run has both checksums
                self.began["code"] = f"{saved['code']}+{config['code']}"
        return finished

    def compare(self, saved, config, finished):
        """Raise UserError if the saved run was started by another command or from other weights."""
        before = saved.get("pretrained")
        now = config.get("pretrained")
        if before and now and before != now:  # None: the file is not there
            init = f"{config['init']}/best.pt"
            raise UserError(f"--resume: {self.path} started from another {init}; restore that one")
        free = {*self.RECORDS}
        if finished and "micro_batch" not in saved["changed"] | config["changed"]:
            free.add("micro_batch")  # the next runs may need a smaller one
        for name in sorted((saved.keys() | config.keys()) - free):
            if saved.get(name) != config.get(name):
                raise UserError(
                    f"--resume: {self.path} was started with {name} = {saved.get(name)}, now "
                    f"{config.get(name)}; give the same flags as before, or choose another --out"
                )

    def create(self, config):
        """Create the directory, lock it until `lock.close()`, and write config.json."""
        if not self.main:
            return
        busy = f"{self.path} is in use by another process"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock.enter_context(locked(self.path / ".lock", busy, wait=False))
        except OSError as error:
            raise UserError(f"cannot write to --out {self.path}: {error.strerror}") from None
        files.write_json(self.path / "config.json", config)

    def restore(self, model, optimizer):
        """Load last.pt into model and optimiser. Return the saved state of the run."""
        saved = read_checkpoint(self.path / "last.pt")
        with files.reading(f"{self.path}/last.pt does not fit", "it may be of another version"):
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        return saved["state"]

    def begin_log(self, state, **record):
        """Write the first line of log.jsonl. With --resume, first drop all records past the
        checkpoint: the run writes them again."""
        lines = []
        for line in read_log(self.path) if self.resumes else ():
            last = state["evaluated" if line.get("kind") == "eval" else "step"]
            if "step" in line and line["step"] <= last:
                lines.append(json.dumps(line) + "\n")
        if self.main:
            text = "".join(lines).encode()
            files.write_atomically(self.path / "log.jsonl", lambda file: file.write(text))
        self.log(kind="resume" if lines else "start", step=state["step"], **record)

    def log(self, **record):
        if self.main:
            with open(self.path / "log.jsonl", "a") as file:
                file.write(json.dumps(record) + "\n")

    def save(self, name, record):
        """Write a checkpoint."""
        if self.main:
            files.write_atomically(self.path / name, lambda file: torch.save(record, file))

    def last_good(self):
        last = self.path / "last.pt"
        return f"the last good checkpoint is {last}" if last.exists() else "nothing was saved yet"

    def predictions(self, task, y, predictions):
        """Write predictions.npz, each test example's label and prediction. Return what result.json
        says of them, and the classes without a test example, by their names."""
        path = self.path / "predictions.npz"
        if self.main:
            files.write_atomically(path, lambda file: np.savez(file, y=y, prediction=predictions))
        record = summary(task, y, predictions)
        names = task.names if task.own and task.kind == "class" else ()
        untested = [name for label, name in enumerate(names) if label not in y]
        return record | ({"untested": untested} if untested else {})

    def finish(self, record):
        """Write result.json. It is written last, so its presence means that the run is complete."""
        if self.main:
            record = record | {"best.pt": files.sha256_of(self.path / "best.pt")}
            files.write_json(self.path / "result.json", record)


def summary(task, y, predictions):
    """Return what result.json says of a test split's labels and predictions (n,), so that two runs
    can be compared example by example: test_examples; counts, for each class its labels,
    predictions and correct predictions; right, one bit per example, sorted by label, in base64.
    Regression has values instead, labels and predictions as float16; other kinds of targets have
    shares, numerators and denominators (see engine/targets.py) as uint16."""
    y = np.asarray(y)
    predictions = np.asarray(predictions)
    n = len(y)
    if task.kind == "number":
        values = np.array([y, predictions]).astype(np.float16)
        return dict(test_examples=n, values=in_base64(values), counts=None)
    if task.kind != "class":
        shares = np.array(KINDS[task.kind].shares(y, predictions))
        shares = in_base64(shares.astype(np.uint16)) if shares.max() < 2**16 else None
        return dict(test_examples=n, shares=shares, counts=None)
    predictions = predictions.astype(int)
    right = predictions == y
    bits = np.packbits(right[np.argsort(y, kind="stable")])
    counts = dict(labels=y, predicted=predictions, right=y[right])
    for name, labels in counts.items():
        counts[name] = np.bincount(labels, minlength=task.classes).tolist()
    return dict(test_examples=n, right=in_base64(bits), counts=counts)


def in_base64(array):
    return base64.b64encode(array.tobytes()).decode()


def read_checkpoint(path):
    """Return a checkpoint on the CPU: tensors and plain values (weights_only). It must match its
    checksum in result.json, if there is one."""
    path = Path(path)
    result = path.with_name("result.json")
    checksum = files.read_json(result).get(path.name) if result.exists() else None
    if checksum is not None and path.exists() and files.sha256_of(path) != checksum:
        raise UserError(f"{path} is damaged or of another run than {result}: wrong checksum")
    problem = f"{path} is missing, cut short, or not a checkpoint of this project"
    with files.reading(problem, "choose another"):
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        dict(checkpoint["model"], **checkpoint["config"])  # raises an error unless both are dicts
    return checkpoint


def peak_memory(device):
    """Return the peak memory of this process in bytes; None if the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def environment(device, processes=1, dtype="float32"):
    """Return what a reader needs to interpret a result: versions, commit, hardware."""
    commit = os.environ.get("COMMIT")  # for a copy of the code without its repository
    with contextlib.suppress(OSError):  # git may be missing
        git = ["git", "-C", ROOT, "describe", "--always", "--dirty", "--abbrev=10"]
        commit = commit or subprocess.run(git, capture_output=True, text=True).stdout.strip()
    name = f"CPU ({platform.machine()})"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    versions = dict(torch=torch.__version__, python=platform.python_version())
    machine = dict(device=name, processes=processes, threads=torch.get_num_threads(), dtype=dtype)
    return {"commit": commit or "unknown"} | versions | machine


def read_log(folder):
    """Return the records of a run's log.jsonl, without a line that a kill cut short."""
    path = folder / "log.jsonl"
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    records = []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict)]


def newest(folder):
    """Return the newest value of each field in a run's log; `kind` is that of the last record."""
    return {name: value for record in read_log(folder) for name, value in record.items()}
