"""Tests run the code of the repository root, one thread each, with no GPU needed."""

import atexit
import contextlib
import importlib
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "results")]  # scripts stand beside their pages
# small tensors: more threads cost more than they bring
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What tests start as `python` is this one, whatever PATH holds. (A link to it would lose its
# virtual environment.)
BIN = Path(sys.executable).parent
if os.name == "posix":
    BIN = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, BIN, ignore_errors=True)
    (BIN / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (BIN / "python").chmod(0o755)
os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"

# ruff: noqa: E402
import numpy as np
import pytest
import torch

import files
import finetune
import predict
import pretrain
import zoo  # noqa: F401, all of MODELS
from data import Split
from engine import folder as folder_py
from engine import setup as setup_py
from engine.processes import Processes, guarded
from engine.run import Run
from models import MODELS, keys_of
from recipes import arch
from tasks import EOS, SPECIAL, TASKS

torch.set_num_threads(1)


def of_kind(kind, classes=0):
    """A task whose targets are of this kind, as far as predictions need it."""
    return SimpleNamespace(kind=kind, classes=classes)


def alike(line, other):
    """Whether two texts agree, decimals to 1e-5 only: the last ones depend on the machine and on a
    batch's size."""
    number = r"[-+]?\d+\.\d+(?:e[-+]?\d+)?"
    if re.split(number, str(line)) != re.split(number, str(other)):
        return False
    values = [[*map(float, re.findall(number, str(text)))] for text in (line, other)]
    return np.allclose(*values, rtol=1e-5, atol=1e-5)


ROOMS = "tasks", "own", "zoo", "engine", "experiments", "compare", "use"


def scripts(folder, *more):
    """Copy all scripts into a folder; more: patterns of other files -> the folder."""
    patterns = ["*.py", "run_all.sh", "results/hours.txt", *more]
    patterns += [f"{room}/*.py" for room in ROOMS]
    for path in {path for pattern in patterns for path in ROOT.glob(pattern)}:
        place = folder / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)  # without its mode: a repository may be read-only
    return folder


MODULES = "analyze", "baseline", "data", "finetune", "predict", "pretrain"
MODULES = {f"{name}.py": name for name in MODULES} | {"run_all.sh": "experiments.running"}


def call(script, *words, cwd=None, **environment):
    """Run a script of the repository as its command line would, but in this process, which saves
    seconds of imports -> returncode, stdout, stderr. What only a process shows (signals, locks,
    terminals) wants one."""
    module, before = importlib.import_module(MODULES[script]), os.getcwd()
    kept = {name: os.environ.get(name) for name in environment}
    names = ("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]  # not on Windows
    handlers = {number: signal.getsignal(number) for number in numbers}
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
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def parse(stage, words):
    """The settings of a command, as its stage (the module) parses them."""
    from engine.flags import arguments

    return arguments(stage.__name__, words, pretrain.OBJECTIVES)


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
    words = json.dumps([[str(word) for word in line] for line in lines])
    driver = [sys.executable, "-c", DRIVER]
    done = subprocess.run(driver, cwd=copy, input=words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((copy / "said.json").read_text())


def laws(copy, *words):
    """Run tests of a copy of the repository, tests/ included -> how many there were."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    done = subprocess.run(words, cwd=copy, capture_output=True, text=True)
    passed = re.match(r"(\d+) passed", done.stdout.splitlines()[-1])
    assert passed, done.stdout[-4000:] + done.stderr[-2000:]
    return int(passed[1])


# ---- Made runs and made sets ---------------------------------------------------------------------

RECORD = dict(task="image", model="s4", objective="masked", seed=0, changed={}, init=None)
RECORD |= dict(steps=1000, epochs=2.5, seconds=1800.0, processes=1)
RECORD |= dict(commit="abc", device="made", torch="2")


def made_run(root, start="scratch", score=None, *, name=None, config=None, log="", **record):
    """Write the folder of a finished run: result.json with RECORD, what is given here and the score
    (test_accuracy, or val_score of a pretraining), config.json if given, log.jsonl -> the
    folder."""
    record = RECORD | record
    if start == "pretrain":
        record |= {} if score is None else dict(val_score=score)
    else:
        record |= dict(start=start) | ({} if score is None else dict(test_accuracy=score))
        record |= dict(joint=1.0) if start == "joint" and "joint" not in record else {}
    share = record.get("label_fraction")
    folder = root / (name or f"{record['model']}-{start}-s{record['seed']}-{share}")
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(record))
    (folder / "log.jsonl").write_text(log)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def made_runs(root, start, scores, **record):
    """A made run for each score, of seeds 0, 1, ...; SPT and a linear probe with a pretraining run
    of as many steps beside each -> the folders. Joint training has half the steps: equal passes."""
    folders = []
    for seed, score in enumerate(scores):
        more = RECORD | dict(seed=seed) | record
        if start == "joint":
            more["steps"] //= 2
        if start in ("spt", "linear_probe"):
            more["steps"] //= 2
            name = f"{more['model']}-pretrain-s{seed}"
            if not (root / name).exists():
                first = {key: more[key] for key in ("task", "model", "objective", "steps", "seed")}
                made_run(root, "pretrain", 1, name=name, **first)
            more["init"] = f"x/{name}"
        if start == "linear_probe":
            more["changed"] = more["changed"] | dict(freeze=True)
            more["name"] = f"{more['model']}-linear_probe-s{seed}"
        folders.append(made_run(root, start.replace("linear_probe", "spt"), score, **more))
    return folders


def made_set(folder, inputs="series", targets="class", n=60, name="my set", seed=0, **arrays):
    """Write a user's NAME.npz of n sequences, which take part in three classes in turn -> its task,
    path, arrays x and y, and the flags by which data.py reads it.
    inputs: series (n, 9, 2), ragged (of 9, 7 or 4 positions), gaps, fixed (one channel), texts,
    integers. targets: class, number, labels (n, 3), positions (n, 9), or None."""
    rng = np.random.default_rng(seed)
    lengths, classes = np.tile([9, 7, 4], n)[:n], np.arange(n) % 3
    after = np.arange(9) >= lengths[:, None]
    if inputs == "texts":
        x = np.array(["".join(rng.choice([*"abc \u00e9"], length)) for length in lengths])
    elif inputs == "integers":
        x = np.where(after, -1, rng.choice([0, 3, 70_000], (n, 9)))
    elif inputs == "fixed":
        x = (52.520008 + 1e-5 * rng.normal(size=(n, 9)))[..., None]
    else:
        x = rng.normal(3, 5, (n, 9, 2)).round(3)
        x[after if inputs == "ragged" else np.zeros_like(after)] = np.nan
        x[rng.random(x.shape) < (0.1 if inputs == "gaps" else 0)] = np.nan
    y = dict(
        class_=np.array([*"abc"])[classes],
        number=rng.normal(100, 20, n),
        labels=np.eye(3, dtype=int)[classes] | np.eye(3, dtype=int)[rng.integers(0, 3, n)],
        positions=np.where(rng.random((n, 9)) < 0.2, -1, rng.integers(0, 3, (n, 9))),
    ).get({"class": "class_"}.get(targets, targets))
    path = folder / f"{name}.npz"
    np.savez(path, x=x, **arrays if y is None else dict(y=y) | arrays)
    flags = dict(number=["--regression"], positions=["--label-per-position"]).get(targets, [])
    return SimpleNamespace(task=f"file:{path}", path=path, x=x, y=y, flags=flags)


# ---- Short runs on noise -------------------------------------------------------------------------

# What preparing the real data would have found. Of the letters, one is two bytes long and one has
# no token in Pythia.
LETTERS = (*SPECIAL, *" abcdefg\u00e9\u4e00")
PREPARED = dict.fromkeys(("text", "retrieval"), dict(vocab=14, symbols=LETTERS))
PREPARED |= dict(speech=dict(mean=-1e-5, std=0.1))


def noise(name, length, n, seed=0):
    """A task with shorter sequences, and a split of n made-up examples of it."""
    task = replace(TASKS[name], length=length, **PREPARED.get(TASKS[name].family, {}))
    rng = np.random.default_rng(seed)
    if task.classes:
        y = rng.integers(task.classes, size=n)
    else:
        y = rng.uniform(-1, 1, n).astype(np.float32)
    if task.channels is None:
        offsets = np.cumsum([0, *rng.integers(2, length + 1, n * task.documents)])
        x = rng.integers(EOS + 1, task.vocab, offsets[-1]).astype(np.uint8)
        x[offsets[1:] - 1] = EOS
        return task, Split(task, x, y, offsets)
    shape = (n, length, task.channels)
    x = {
        255: rng.integers(0, 256, shape).astype(np.uint8),
        1: rng.standard_normal(shape).astype(np.float32),
        32768: (3000 * rng.standard_normal(shape)).astype(np.int16),
    }[task.scale]
    return task, Split(task, x, y)


STAGES = dict(pretrain=pretrain, finetune=finetune, joint=finetune)  # joint: with --joint
SMALL = dict(d=16, layers=2, heads=2, ff=32, state=8, n_ssm=4, v=24, z=8)
SIZES = {}
for model in MODELS:
    keys = keys_of(model).keys() & arch("listops", model).keys()
    SIZES[model] = ",".join(f"{key}={size}" for key, size in SMALL.items() if key in keys)


def opened(name, data_dir, fraction=1.0, labelled=None, **others):
    """data.open_task on noise: up to 40 positions; another data_dir is another data set."""
    sizes = [24, 9, 7]
    drawn = int(sizes[0] * (labelled or fraction or 1)), *sizes[1:]
    splits = [noise(name, 40, n, seed=n)[1] for n in drawn]
    task = replace(splits[0].task, data=dict(source=str(data_dir), seed=0, sizes=sizes, labels=0))
    return task, *splits


def flags(out, task="listops", model="s4", more="", **settings):
    """argv of a short run; more: further sizes; None leaves a flag out."""
    usual = dict(out=out, task=task, model=model, arch=model and SIZES[model] + more, steps=6)
    usual |= dict(batch=8, eval_every=4, log_every=1, warmup=2, data_dir=".", device="cpu")
    words = []
    for name, value in (usual | settings).items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """A test in an empty folder; its runs read noise and do not lock, being in one process."""
    monkeypatch.chdir(tmp_path)
    for module in (setup_py, predict):
        monkeypatch.setattr(module, "open_task", opened)
    monkeypatch.setattr(folder_py, "locked", lambda *arguments, **more: contextlib.nullcontext())
    monkeypatch.setattr(Processes, "current", None)


@pytest.fixture(scope="session")
def start():
    """start(stage, words, before=None, **environment) -> process, forked from one that has imported
    everything, what the first step of an optimiser imports included."""
    forks = "forkserver" in multiprocessing.get_all_start_methods()  # not on Windows
    context = multiprocessing.get_context("forkserver" if forks else "spawn")
    if forks:
        context.set_forkserver_preload(["conftest", "torch._dynamo"])
        paths = os.pathsep.join(str(ROOT / name) for name in ("", "tests", "results"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", paths)
            importlib.import_module("multiprocessing.forkserver").ensure_running()

    def begin(stage, words, before=None, **environment):
        arguments = stage, words, before, environment
        process = context.Process(target=child, args=arguments, daemon=True)
        process.start()
        return process

    return begin


def child(stage, words, before, environment):
    """In a process of its own: before(), then a script; its errors go into the file `errors`."""
    os.dup2(os.open("errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.environ |= environment
    setup_py.open_task = opened
    if before:
        before()
    guarded(lambda: STAGES[stage].main(words))


@pytest.fixture
def mistake(capsys):
    """mistake(stage, words, code=2) -> the one line that a script prints as it ends with code."""

    def make(stage, words, code=2):
        Processes.current = None
        with pytest.raises(SystemExit) as end:
            guarded(lambda: (STAGES | dict(predict=predict))[stage].main(words))
        line = capsys.readouterr().err
        begin = "interrupted" if code == 130 else "error: "
        assert end.value.code == code and re.fullmatch(rf"{begin}.*\n", line), line
        return line

    return make


def stop_in(step, monkeypatch, stage, words):
    """A run that is interrupted in step `step`."""
    stepped = Run.stepped

    def stop(run, now):
        if now == step:
            raise KeyboardInterrupt
        stepped(run, now)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Run, "stepped", stop)
        STAGES[stage].main(words)


# ---- what a run leaves ---------------------------------------------------------------------------


def load(path):
    return torch.load(path, weights_only=True)


def result_of(out):
    return json.loads((out / "result.json").read_text())


def log_of(out, *kinds):
    """Log records of these kinds, without the clock."""
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    clock = "ms_per_step", "seconds"
    records = [record for record in records if not kinds or record["kind"] in kinds]
    return [{k: v for k, v in record.items() if k not in clock} for record in records]


def contents(folder):
    """{path: bytes} of all files but locks; the paths of folders."""
    paths = [path for path in folder.rglob("*") if not path.name.endswith(".lock")]
    return {path: path.is_file() and path.read_bytes() for path in paths}


def same(a, b):
    """Nested checkpoints, to the last bit, but for the clock."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        names = a.keys() - {"seconds", "peak_memory_bytes"}
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in names)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list) else a == b


def assert_same_run(one, two):
    assert {path.name for path in contents(one)} == {path.name for path in contents(two)}
    assert log_of(one, "train", "eval") == log_of(two, "train", "eval")
    assert same(result_of(one), result_of(two))
    assert all(same(load(one / name), load(two / name)) for name in ("last.pt", "best.pt"))
    for kernels in one.glob("kernels.npz"):
        with np.load(kernels) as a, np.load(two / "kernels.npz") as b:
            assert all(np.array_equal(a[key], b[key]) for key in ("before", "after"))


# ---- A web server --------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch):
    """serve(name, content) -> function: its address under a fault; serve.log: the Ranges."""
    contents, log, done = {}, [], set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            """cut: half, once; wrong: other bytes; norange: sends all; slow; 403; 503, once."""
            _, fault, name = self.path.split("/", 2)
            log.append(self.headers["Range"])
            first = self.path not in done
            done.add(self.path)
            if fault == "403" or fault == "503" and first:
                return self.send_error(int(fault))
            content = contents[name][:-20] + bytes(20) if fault == "wrong" else contents[name]
            body = content if fault == "norange" else content[int(self.headers["Range"][6:-1]) :]
            if not body:
                return self.send_error(416)
            self.send_response(200 if fault == "norange" else 206)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Encoding", "x-gzip")  # as Apache says of every .gz
            self.end_headers()
            for i in range(0, len(body) // 2 if fault == "cut" and first else len(body), 1 << 15):
                self.wfile.write(body[i : i + (1 << 15)])
                time.sleep(0.01 if fault == "slow" else 0)

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.handle_error = lambda *_: None  # a client that went away
    threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
    monkeypatch.setattr(files, "PAUSE", 0.01)

    def serve(name, content, fault):
        contents[name] = content
        return f"http://127.0.0.1:{httpd.server_port}/{fault}/{name}"

    serve.log = log
    yield serve
    httpd.shutdown()
