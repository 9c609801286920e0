"""The run directory: config.json, log.jsonl, best.pt, last.pt; at the end predictions.npz
(finetuning), result.json."""

import ast
import base64
import contextlib
import functools
import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from engine.targets import KINDS
from files import (
    ROOT,
    UserError,
    locked,
    read_json,
    reading,
    sha256_of,
    without_comments,
    write_atomically,
    write_json,
)

BITS = 100_000  # bits of predictions in result.json, at most: it must stay readable


class Folder:
    """A run directory. main: whether this process writes. `look` sets resumes, whether a stopped
    run continues, and began, what its config.json says of RECORDS."""

    # of a run's start; a resumed run keeps them
    RECORDS = "changed", "recipe", "init", "pretrained", "code"

    def __init__(self, path, main):
        self.path, self.main, self.began, self.lock = Path(path), main, {}, contextlib.ExitStack()

    def look(self, config, resume):
        """Check that the directory is empty or, with --resume, holds a run with this config. Return
        whether that run is finished. Write nothing."""
        out = self.path
        there = (
            {p.name for p in out.iterdir() if p.suffix != ".tmp"} - {".lock"}
            if out.is_dir()
            else set()
        )
        if there and not resume:
            raise UserError(
                f"run directory {out} is not empty; add --resume to continue it, or choose another "
                "--out"
            )
        if there and "config.json" not in there:
            raise UserError(f"--resume: {out} has no config.json; it is not a run directory")
        if there & {"last.pt", "result.json"}:
            saved = read_json(out / "config.json")
            self.began = {name: saved.get(name) for name in self.RECORDS if name in config}
            before, now = saved.get("pretrained"), config.get("pretrained")
            if before != now and before and now:  # None: unknown
                raise UserError(
                    f"--resume: {out} started from another {config['init']}/best.pt (checksum "
                    f"{before[:8]}, now {now[:8]}); restore that one, or choose another --out"
                )
            if old := saved.get("code"):  # a changed file has both checksums
                self.began["code"] = old | {
                    file: was if one in (was := old.get(file, one)) else f"{was}+{one}"
                    for file, one in config["code"].items()
                }
            cut = (
                {"micro_batch"} - saved.get("changed", {}).keys() - config.get("changed", {}).keys()
            )
            apart = {*self.RECORDS} | (cut if "result.json" in there else set())
            for key in sorted((saved.keys() | config.keys()) - apart):
                # a newer flag, not given
                if saved.get(key) != config.get(key) and (key in saved or config[key]):
                    raise UserError(
                        f"--resume: {out} was started with {key} = {saved.get(key)}, now "
                        f"{config.get(key)}; give the same flags as before, or choose another --out"
                    )
        self.resumes = "last.pt" in there
        return "result.json" in there

    def take(self, config):
        """Create the directory, lock it until `lock.close()` or the process's end, and write
        config.json."""
        if self.main:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                self.lock.enter_context(
                    locked(
                        self.path / ".lock", f"{self.path} is in use by another process", wait=False
                    )
                )
            except OSError as error:
                raise UserError(f"cannot write to --out {self.path}: {error.strerror}") from None
            write_json(self.path / "config.json", config)

    def restore(self, model, optimizer, state):
        """Load last.pt into model and optimiser. Return the saved state."""
        saved = read_checkpoint(self.path / "last.pt")
        with reading(
            f"{self.path}/last.pt does not fit", "it may come from another version of the code"
        ):
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            kept = {"loss_parts": {}} | saved["state"]  # a kept checkpoint may be older
            state = {name: type(value)(kept[name]) for name, value in state.items()}
        return state

    def begin_log(self, state, **record):
        """Write the first line of log.jsonl. With --resume, first drop all records past the
        checkpoint: the run writes them again, so that the log has no gaps and no duplicates."""
        kept = [
            json.dumps(one) + "\n"
            for one in (read_log(self.path) if self.resumes else ())
            if "step" in one
            and one["step"] <= state["evaluated" if one.get("kind") == "eval" else "step"]
        ]
        if self.main:
            write_atomically(
                self.path / "log.jsonl", lambda file: file.write("".join(kept).encode())
            )
        self.log(kind="resume" if kept else "start", step=state["step"], **record)

    def log(self, **record):
        if self.main:
            with open(self.path / "log.jsonl", "a") as file:
                file.write(json.dumps(record) + "\n")

    def save(self, name, record):
        """Write a checkpoint."""
        if self.main:
            write_atomically(self.path / name, lambda file: torch.save(record, file))

    def last_good(self):
        last = self.path / "last.pt"
        return f"the last good checkpoint is {last}" if last.exists() else "nothing was saved yet"

    def predictions(self, task, y, found):
        """Write predictions.npz, each test example's label and prediction. Return what result.json
        says of them, and the classes without a test example, by their names."""
        if self.main:
            write_atomically(
                self.path / "predictions.npz", lambda file: np.savez(file, y=y, prediction=found)
            )
        names = task.names if task.own and task.kind == "class" else ()
        untested = [name for label, name in enumerate(names) if not (np.asarray(y) == label).any()]
        return summary(task, y, found) | ({"untested": untested} if untested else {})

    def finish(self, record):
        """Write result.json. It is written last, so its presence means that the run is complete."""
        if self.main:
            write_json(
                self.path / "result.json", record | {"best.pt": sha256_of(self.path / "best.pt")}
            )


def summary(task, y, found):
    """Return what result.json says of a test split's labels and predictions (n,), so that two runs
    can be compared example by example: test_examples; counts, for each class its labels,
    predictions and correct predictions; right, one bit per example, sorted by label, in base64.
    Regression has values instead, labels and predictions as float16; other kinds of targets have
    shares, numerators and denominators (see engine/targets.py) as uint16."""
    y, found = np.asarray(y), np.asarray(found)
    if task.kind != "class":
        name, kept = (
            ("values", np.array([y, found]))
            if task.kind == "number"
            else ("shares", np.array(KINDS[task.kind].shares(y, found)))
        )
        dtype, fits = (np.float16, True) if name == "values" else (np.uint16, kept.max() < 2**16)
        text = (
            base64.b64encode(kept.astype(dtype).tobytes()).decode()
            if fits and len(y) <= BITS // 16
            else None
        )
        return {"test_examples": len(y), name: text, "counts": None}
    found = found.astype(int)
    right = found == y
    some = dict(labels=y, predicted=found, right=y[right])
    bits = np.packbits(right[np.argsort(y, kind="stable")]) if len(y) <= BITS else None
    return dict(
        test_examples=len(y),
        right=None if bits is None else base64.b64encode(bits.tobytes()).decode(),
        counts={
            name: np.bincount(each, minlength=task.classes).tolist() for name, each in some.items()
        },
    )


def read_checkpoint(path):
    """Return a checkpoint, on the CPU. Only tensors and plain values are unpickled (weights_only).
    If result.json holds a checksum of the file, the file must match it."""
    path, record = Path(path), Path(path).with_name("result.json")
    wanted = read_json(record).get(path.name) if record.exists() else None
    if wanted is not None and path.exists() and sha256_of(path) != wanted:
        raise UserError(
            f"{path} is damaged or belongs to another run than {record}: wrong checksum"
        )
    with reading(
        f"{path} is missing, cut short, or not a checkpoint of this project", "choose another"
    ):
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        # Raises an error unless these are {name: tensor} and {flag: value}.
        (
            {str.lower(name): tensor.shape for name, tensor in checkpoint["model"].items()},
            {**checkpoint["config"]},
        )
    return checkpoint


def peak_memory(device):
    """Return the peak memory of this process on this device in bytes; None if the system does not
    report it."""
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
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU ({platform.machine()})"
    )
    return dict(
        commit=commit or "unknown",
        torch=torch.__version__,
        python=platform.python_version(),
        device=name,
        processes=processes,
        threads=torch.get_num_threads(),
        dtype=dtype,
    )


@functools.cache
def code_of(*files):
    """Return {file: checksum without comments} of files of this repository and all of its files
    that they import."""
    found, files = {}, [*files]
    for file in files:  # grows
        if file not in found and (ROOT / file).is_file():
            source = (ROOT / file).read_text(encoding="utf-8")
            found[file] = hashlib.sha256(without_comments(source).encode()).hexdigest()[:8]
            for node in ast.walk(ast.parse(source)):
                names = (
                    [alias.name for alias in node.names]
                    if isinstance(node, (ast.Import, ast.ImportFrom))
                    else []
                )
                for name in (
                    names
                    if isinstance(node, ast.Import)
                    else [f"{node.module}.{name}" for name in names]
                ):
                    *rooms, last = parts = name.split(".")
                    files += [
                        "/".join(parts) + ".py",
                        "/".join(rooms) + ".py",
                        f"{parts[0]}/__init__.py",
                    ]
    return found


def read_log(folder):
    """Return the records of a run's log.jsonl. Skip lines that are not records: a kill may cut the
    last line short."""
    path, found = folder / "log.jsonl", []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError, RecursionError):
            found.append(json.loads(line))
    return [record for record in found if isinstance(record, dict)]


def newest(folder):
    """Return the newest value of each field in a run's log; `kind` is that of the last record."""
    return {name: value for record in read_log(folder) for name, value in record.items()}
