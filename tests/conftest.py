"""Tests run the code of the repository root, one thread each, with no GPU needed."""

import atexit
import contextlib
import importlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "results")]  # scripts stand beside their pages
# small tensors: more threads cost more than they bring
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What tests start as `python` is this one, whatever PATH holds. (A link to it would lose its
# virtual environment.)
BIN = Path(tempfile.mkdtemp())
atexit.register(shutil.rmtree, BIN, ignore_errors=True)
(BIN / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
(BIN / "python").chmod(0o755)
os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"

import numpy as np  # noqa: E402
import torch  # noqa: E402

import zoo  # noqa: E402, F401, all of MODELS

torch.set_num_threads(1)


def of_kind(kind, classes=0):
    """A task whose targets are of this kind, as far as predictions need it."""
    return SimpleNamespace(kind=kind, classes=classes)


def alike(line, other):
    """Whether two texts agree, decimals to 1e-5 only: the last ones depend on the machine and on a
    batch's size."""
    number, texts = r"[-+]?\d+\.\d+(?:e[-+]?\d+)?", [str(line), str(other)]
    words, values = zip(
        *((re.split(number, text), [*map(float, re.findall(number, text))]) for text in texts)
    )
    return words[0] == words[1] and np.allclose(*values, rtol=1e-5, atol=1e-5)


ROOMS = "tasks", "own", "zoo", "engine", "experiments", "compare", "use"


def scripts(folder, *more):
    """Copy all scripts into a folder, to change them there; more: other files of the repository, or
    patterns -> the folder."""
    patterns = [
        "*.py",
        "run_all.sh",
        "results/hours.txt",
        *(f"{room}/*.py" for room in ROOMS),
        *more,
    ]
    for path in {path for pattern in patterns for path in ROOT.glob(pattern)}:
        place = folder / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    return folder


MODULES = {
    "run_all.sh": "experiments.running",
    **{
        f"{name}.py": name
        for name in ("analyze", "baseline", "data", "finetune", "predict", "pretrain")
    },
}


def call(script, *words, cwd=None, **environment):
    """Run a script of the repository as its command line would, but in this process, which saves
    seconds of imports -> returncode, stdout, stderr. What only a process shows (signals, locks,
    terminals) wants one."""
    from engine.processes import Processes, guarded

    module, before = importlib.import_module(MODULES[script]), os.getcwd()
    kept = {name: os.environ.get(name) for name in environment}
    signals = {
        name: signal.getsignal(name)
        for name in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
    }
    out, err, code, argv = io.StringIO(), io.StringIO(), 0, sys.argv
    os.environ.update({name: str(value) for name, value in environment.items()})
    os.chdir(cwd or before)
    sys.argv = [script, *map(str, words)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            if script in ("data.py", "analyze.py"):
                code = module.main(sys.argv[1:])
            else:
                guarded(lambda: module.main(sys.argv[1:]))
    except SystemExit as end:
        code = end.code or 0
    finally:
        Processes.current, sys.argv = None, argv
        os.chdir(before)
        for name, value in kept.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        for name, handler in signals.items():
            signal.signal(name, handler)
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def parse(stage, words):
    """The settings of a command, as its stage (the module) parses them."""
    from engine.flags import arguments
    from pretrain import OBJECTIVES

    return arguments(stage.__name__, words, OBJECTIVES)


DRIVER = """import json, sys
sys.path.insert(0, "tests")
from conftest import call
said = []
for words in json.load(sys.stdin):
    done = call(*words)
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
    said.append(done.stdout)
with open("said.json", "w") as file:
    json.dump(said, file)
"""


def calls(copy, *lines):
    """Call scripts of a copy that has tests/conftest.py, (script, word ...) each, in one process of
    their own -> what each prints."""
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        cwd=copy,
        capture_output=True,
        text=True,
        input=json.dumps([[str(word) for word in line] for line in lines]),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((copy / "said.json").read_text())


def laws(copy, *words):
    """Run tests of a copy of the repository, tests/ included -> how many there were."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    done = subprocess.run(words, cwd=copy, capture_output=True, text=True)
    passed = re.match(r"(\d+) passed", done.stdout.splitlines()[-1])
    assert passed, done.stdout[-4000:] + done.stderr[-2000:]
    return int(passed[1])
