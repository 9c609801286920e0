"""Runs: stopping and resuming, several processes, both stages from end to end, and what a user can
do wrong."""

import copy
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import (
    ROOT,
    SIZES,
    STAGES,
    assert_same_run,
    call,
    contents,
    flags,
    load,
    log_of,
    noise,
    opened,
    parse,
    result_of,
    stop_in,
)
from PIL import Image
from safetensors.torch import save_file
from test_mixers import KNOWN
from test_models import VOCABULARY, made_neox

import analyze
import data
import finetune
import predict
import pretrain
from data import Split
from engine import folder as folder_py
from engine import run as run_py
from engine import setup as setup_py
from engine.feed import Feed
from engine.folder import Folder, peak_memory
from engine.processes import Processes, guarded
from engine.run import Run
from files import UserError, locked
from models import (
    FEED_FORWARD,
    MODELS,
    Backbone,
    Classifier,
    Denoiser,
    SizeError,
    config,
    param_groups,
)
from recipes import arch, assignments

pytestmark = pytest.mark.usefixtures("elsewhere")
THE_PAPERS = {"transformer", "rotary", "s4", "s4_rand", "dlr", "dlr_rand", "pythia", "pythia_rand"}
OTHERS = [model for model in MODELS if model not in THE_PAPERS]


# ---- stopping and resuming -----------------------------------------------------------------------


def save_often(seconds=0.02):
    Run.SAVE_SECONDS = seconds


@pytest.mark.parametrize(
    "stage, task, model",
    [("pretrain", "listops", "s4"), ("finetune", "bidmc_hr", "rotary"), ("joint", "listops", "s4")],
)
def test_kill_9_at_random_moments_then_resume_is_bit_identical(stage, task, model, start, tmp_path):
    words = partial(
        flags,
        task=task,
        model=model,
        steps=120,
        log_every=3,
        joint=0.5 if stage == "joint" else None,
    )
    quiet, out, log, rng = (
        tmp_path / "quiet",
        tmp_path / "out",
        tmp_path / "out" / "log.jsonl",
        random.Random(stage),
    )
    STAGES[stage].main(words(quiet))
    for _ in range(5):
        seen, more = len(log.read_text().splitlines()) if log.exists() else 0, rng.randrange(4)
        process = start(stage, words(out, resume=True), save_often)
        while not log.exists() or len(log.read_text().splitlines()) <= seen + more:
            assert process.is_alive(), Path("errors").read_text()
            time.sleep(0.001)
        time.sleep(rng.random() * 0.02)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    STAGES[stage].main(words(out, resume=True))
    assert_same_run(quiet, out)


def die_in_write(n):
    """SIGKILL when half of the n-th file is on the disk; a checkpoint after every step."""
    save_often(0)
    rename, calls = os.replace, iter(range(1, n + 1))

    def torn(source, target):
        if next(calls) == n:
            os.truncate(source, os.path.getsize(source) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    os.replace = torn


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_kill_9_inside_any_write_then_resume_is_bit_identical(stage, start, tmp_path):
    """Config, log, checkpoints at and between evaluations, kernels, result. With dropout, whose
    stream must go on."""
    words = partial(flags, more=",dropout=0.5", steps=5)
    STAGES[stage].main(words(tmp_path / "quiet"))
    for n in range(1, 99):
        process = start(stage, words(out := tmp_path / f"torn{n}"), partial(die_in_write, n))
        process.join()
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL and not (out / "result.json").exists(), Path(
            "errors"
        ).read_text()
        STAGES[stage].main(words(out, resume=True))
        assert_same_run(tmp_path / "quiet", out)
    assert n > 10


TOLD = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


@pytest.mark.parametrize(
    "stage, task, model, told",
    [
        ("pretrain", "listops", "s4", TOLD[0]),
        ("finetune", "bidmc_hr", "rotary", TOLD[-1]),
        ("joint", "listops", "s4", TOLD[0]),
    ],
)
def test_a_signal_saves_the_step_and_the_run_goes_on_to_the_bit(
    stage, task, model, told, start, tmp_path
):
    """Preemption, at random moments: nothing that was trained is lost."""
    words = partial(
        flags,
        task=task,
        model=model,
        steps=120,
        log_every=3,
        joint=0.5 if stage == "joint" else None,
    )
    quiet, out, log, rng = (
        tmp_path / "quiet",
        tmp_path / "out",
        tmp_path / "out" / "log.jsonl",
        random.Random(stage),
    )
    STAGES[stage].main(words(quiet))
    for _ in range(4):
        seen, more = len(log.read_text().splitlines()) if log.exists() else 0, 1 + rng.randrange(4)
        process = start(stage, words(out, resume=True))
        while not log.exists() or len(log.read_text().splitlines()) <= seen + more:
            assert process.is_alive(), Path("errors").read_text()
            time.sleep(0.001)
        time.sleep(rng.random() * 0.02)
        os.kill(process.pid, told)
        process.join()
        last = log_of(out)[-1]
        assert process.exitcode == 143 and last["kind"] == "stop", Path("errors").read_text()
        step = load(out / "last.pt")["state"]["step"]
        assert last["text"] == f"stopped by {told.name} after step {step}" and step > 0
        assert "stopped by" in analyze.state_of(out) and "--resume continues" in analyze.state_of(
            out
        )
    STAGES[stage].main(words(out, resume=True))
    assert_same_run(quiet, out)


def tell_in(name, n):
    """A signal to this process in the n-th call of a method of `Run` or `Feed`, or of `open_task`,
    before it does anything."""
    place = next(place for place in (setup_py, Run, Feed, run_py) if hasattr(place, name))
    method, calls = getattr(place, name), iter(range(1, 99))

    def told(*arguments, **more):
        if next(calls) == n:
            os.kill(os.getpid(), TOLD[0])
        return method(*arguments, **more)

    setattr(place, name, told)


@pytest.mark.parametrize(
    "name, n, step",
    [
        ("open_task", 1, None),
        ("print_plan", 1, None),
        ("backward", 1, None),
        ("backward", 4, 4),
        ("evaluated", 1, 5),
        ("shipped", 5, 4),
        ("save_last", 2, 6),
        ("load_best", 1, 6),
    ],
)
def test_a_signal_at_any_time_ends_a_run_in_order(name, n, step, start, tmp_path):
    """Where data are prepared, and in the first step, which may compile for minutes, there is
    nothing to save. In an evaluation: what was trained before it."""
    finetune.main(flags(tmp_path / "quiet"))
    process = start("finetune", flags(out := tmp_path / "run"), partial(tell_in, name, n))
    process.join()
    assert process.exitcode == 143 and not (out / "result.json").exists(), Path(
        "errors"
    ).read_text()
    assert (
        not (out / "last.pt").exists()
        if step is None
        else load(out / "last.pt")["state"]["step"] == step
    )
    if name not in ("open_task", "print_plan"):  # else the run has no log yet
        assert analyze.state_of(out).startswith(
            f"stopped  run: stopped by SIGTERM after step {step or 0} of 6"
        )
    finetune.main(flags(out, resume=True))
    assert_same_run(tmp_path / "quiet", out)


def test_a_missing_compiler_is_one_line(tmp_path, monkeypatch, mistake):
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor.cpp, "cxx", ("absent",))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "nothing compiled before"))
    torch._dynamo.reset()
    line = mistake("finetune", flags(tmp_path / "run", compile=True))
    assert line.startswith("error: --compile needs triton on a GPU, g++ on a CPU; install it")
    words = flags(tmp_path / "run", resume=True)
    Processes.current = None
    finetune.main(words)  # what the line says
    assert (tmp_path / "run" / "result.json").exists()


def forecasts(text):
    """The steps of which a line was printed, and the seconds left that each of them says."""
    lines = re.findall(r"step +(\d+)/\d+ .* time left (?:(\d+) days?, )?(\d+):(\d+):(\d+)\n", text)
    return {
        int(step): 86_400 * int(days or 0) + 3600 * int(h) + 60 * int(m) + int(s)
        for step, days, h, m, s in lines
    }


def test_a_run_says_early_how_long_it_takes(monkeypatch, capsys, tmp_path):
    """On a clock of our own: a step takes 100 s, an evaluation 1,000 s, known after the first. A
    run of 8 steps has two."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    backward, evaluated = Run.backward, Run.evaluated

    def slow(run, loss):
        backward(run, loss)
        now[0] += 100

    def slow_evaluation(run, *arguments, **values):
        now[0] += 1000
        evaluated(run, *arguments, **values)

    monkeypatch.setattr(Run, "backward", slow)
    monkeypatch.setattr(Run, "evaluated", slow_evaluation)
    pretrain.main(flags("first", steps=8, log_every=4))  # 24 sequences, 9 and 7: 8 in a batch
    assert forecasts(capsys.readouterr().out) == {1: 700, 2: 600, 4: 400, 5: 1300, 8: 1000}
    stop_in(5, monkeypatch, "finetune", flags("second", steps=8, log_every=100))
    capsys.readouterr()
    finetune.main(flags("second", steps=8, log_every=100, resume=True))  # from 4, counted anew
    assert forecasts(capsys.readouterr().out) == {5: 300, 6: 200, 8: 0}


def test_a_run_that_would_take_days_says_so_before_data_are_made(monkeypatch, capsys, tmp_path):
    def stop(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(setup_py, "open_task", stop)
    words = ["--model", "s4", "--device", "cpu", "--data-dir", str(tmp_path)]
    with pytest.raises(KeyboardInterrupt):
        pretrain.main(["--task", "pathx", *words])
    assert re.search(r"note: no GPU: about [\d,]+ days of training", capsys.readouterr().out)
    with pytest.raises(KeyboardInterrupt):
        pretrain.main(["--task", "pathfinder_demo", *words])
    assert "days" not in capsys.readouterr().out


def test_a_finished_run_stays_finished_whatever_the_memory():
    """Its chain may go on with micro-batches. With BatchNorm they are a change where they cut the
    batch."""
    pretrain.main(flags(out := Path("run")))
    again = [call("pretrain.py", *flags(out, resume=True, micro_batch=size)) for size in (8, 4)]
    assert [done.returncode for done in again] == [0, 2] and "micro_batch = None, now 4" in again[
        1
    ].stderr


NAN = "loss is nan at step 6: --lr .*, gradient norm nan; the last good checkpoint is .*"


@pytest.mark.parametrize(
    "stage, ending, code, text",
    [
        ("pretrain", math.nan, 2, NAN),
        ("finetune", math.nan, 2, NAN),
        (
            "pretrain",
            KeyboardInterrupt(),
            130,
            "interrupted; the same command with --resume continues from the last .*",
        ),
        (
            "finetune",
            torch.OutOfMemoryError(),
            2,
            "out of GPU memory; give a smaller --micro-batch",
        ),
        ("pretrain", ZeroDivisionError("x"), None, "ZeroDivisionError: x"),
    ],
)
def test_what_ends_a_run_is_its_last_record_until_it_resumes(
    stage, ending, code, text, mistake, monkeypatch, tmp_path
):
    out, backward, calls = tmp_path / "run", Run.backward, []

    def breaks(run, loss):
        calls.append(loss)
        if len(calls) == 6 and ending is not math.nan:
            raise ending
        backward(
            run, {name: part * math.nan if len(calls) == 6 else part for name, part in loss.items()}
        )

    with monkeypatch.context() as patch:
        patch.setattr(Run, "backward", breaks)
        if code is None:  # a defect of ours comes with its traceback
            with pytest.raises(ZeroDivisionError):
                guarded(lambda: STAGES[stage].main(flags(out)))
        else:
            line = mistake(stage, flags(out), code)
    record = log_of(out)[-1]
    assert record["kind"] == "error" and re.fullmatch(text, record["error"])
    assert code is None or line.removeprefix("error: ") == f"{record['error']}\n"
    STAGES[stage].main(flags(out, resume=True))  # from the last good checkpoint
    STAGES[stage].main(flags(tmp_path / "quiet"))
    assert_same_run(tmp_path / "quiet", out)
    assert "error" not in {record["kind"] for record in log_of(out)}


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_a_gradient_that_is_not_finite_stops_the_run(stage, mistake, monkeypatch, tmp_path):
    """While the loss still is: nothing is saved after it."""
    backward, calls = Run.backward, []

    def breaks(run, loss):
        backward(run, loss)
        calls.append(loss)
        if len(calls) == 6:
            [*run.model.head.parameters()][0].grad.fill_(math.inf)

    monkeypatch.setattr(Run, "backward", breaks)
    line = mistake(stage, flags(tmp_path / "run"))
    assert re.search(
        r"loss is \d+\.\d+ at step 6: .*, gradient norm (inf|nan); the last good", line
    )
    assert load(tmp_path / "run" / "last.pt")["state"]["step"] == 4


def test_dropout_draws_anew_in_every_step(monkeypatch, tmp_path):
    """And the same for a step of the same run, whatever came before."""
    states, backward = {}, Run.backward

    def noted(run, loss):
        backward(run, loss)
        states.setdefault(run.args.seed, []).append(hash(torch.get_rng_state().numpy().tobytes()))

    monkeypatch.setattr(Run, "backward", noted)
    for out, seed in (("a", 0), ("b", 1), ("c", 0)):
        pretrain.main(flags(tmp_path / out, more=",dropout=0.5", seed=seed))
    assert len(set(states[0])) == len(set(states[1])) == 6 and not {*states[0]} & {*states[1]}
    assert states[0][:6] == states[0][6:]


def test_a_validation_that_is_not_finite_stops_the_run(mistake, tmp_path):
    line = mistake("pretrain", flags("run", model="rotary", lr="1e30", steps=1, warmup=1))
    assert "validation at step 1 gave" in line and "nothing was saved yet" in line
    assert not (tmp_path / "run" / "best.pt").exists()
    # nothing is in the way of the corrected command
    pretrain.main(flags("run", model="rotary", resume=True))


def test_a_full_disk_is_one_line_and_leaves_the_old_checkpoint(start, monkeypatch, tmp_path):
    stop_in(4, monkeypatch, "pretrain", flags("run"))
    before = (tmp_path / "run" / "last.pt").read_bytes()
    limit = (len(before) // 2,) * 2
    process = start(
        "pretrain",
        flags("run", resume=True),
        partial(resource.setrlimit, resource.RLIMIT_FSIZE, limit),
    )
    process.join()
    assert process.exitcode == 2
    assert re.fullmatch(
        "error: cannot write run/[a-z]+.pt: .*; make room, or .*\n", Path("errors").read_text()
    )
    assert (tmp_path / "run" / "last.pt").read_bytes() == before and not list(
        tmp_path.glob("run/*.tmp")
    )


def test_a_torn_log_does_not_stop_a_run(monkeypatch, tmp_path):
    stop_in(4, monkeypatch, "pretrain", flags("run"))
    path = tmp_path / "run" / "log.jsonl"
    path.write_bytes(path.read_bytes().splitlines(True)[0] + b'{"kind": "train", "st\xff')
    pretrain.main(flags("run", resume=True))
    assert [record["kind"] for record in log_of(tmp_path / "run")] == [
        "start",
        "resume",
        "train",
        "train",
        "eval",
    ]


WINDOWS = """
import os, signal, sys
sys.modules["resource"] = None                                       # so that importing it fails
for name in "SIGPIPE SIGUSR1 SIGUSR2 SIGHUP SIGALRM SIGKILL".split():
    delattr(signal, name)
for name in "killpg sched_getaffinity fork getuid".split():
    delattr(os, name)
import data, finetune, predict, pretrain
data.main("--task listops_demo --train 64 --val 16 --test 16 --workers 1".split())
flags = "--steps 4 --log-every 2 --arch d=8,layers=1,state=4,n_ssm=2".split()
pretrain.main(["--task", "listops_demo", "--model", "s4", "--out", "first", *flags])
finetune.main(["--init", "first", "--out", "second", *flags[:4]])
predict.main(["second"])
"""


def test_what_only_some_systems_have_is_not_needed(tmp_path, monkeypatch):
    """Both stages of a demo without what Windows lacks; macOS counts memory in bytes, Linux in
    kilobytes."""
    done = subprocess.run(
        [sys.executable, "-c", WINDOWS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | dict(PYTHONPATH=str(ROOT)),
    )
    assert done.returncode == 0, done.stderr
    assert result_of(tmp_path / "first")["peak_memory_bytes"] is None and [
        *tmp_path.glob("**/predictions.csv")
    ]
    linux = peak_memory(torch.device("cpu"))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert 2**26 < linux <= 1025 * peak_memory(torch.device("cpu"))


def test_running_and_finished_runs_are_left_alone(start, mistake, capsys, monkeypatch, tmp_path):
    process = start("pretrain", flags("run", steps=1000))
    while not (tmp_path / "run" / "log.jsonl").exists():
        time.sleep(0.01)
    monkeypatch.setattr(folder_py, "locked", locked)
    assert "run is in use by another process" in mistake(
        "pretrain", flags("run", steps=1000, resume=True)
    )
    process.kill()
    pretrain.main(flags("finished"))
    before = contents(tmp_path / "finished")
    with pytest.raises(SystemExit) as end:
        pretrain.main(flags("finished", resume=True))
    assert end.value.code == 0 and "is finished; nothing to do" in capsys.readouterr().out
    assert contents(tmp_path / "finished") == before


# ---- one step, however it is divided -------------------------------------------------------------


def test_numbers_that_slow_a_cpu_are_zero():
    """Below 1e-38, where the attention of a diverging run ends, its matrix products take three
    times as long."""
    torch.set_flush_denormal(False)
    pretrain.main(flags("run"))
    assert torch.tensor(1e-30) * 1e-10 == 0


@pytest.mark.parametrize(
    "stage, task, model, objective",
    [
        ("pretrain", "pathfinder", "rotary", "masked"),
        ("pretrain", "listops", "s4", "masked"),
        ("pretrain", "text", "transformer", "causal"),
        ("finetune", "listops", "s4", "masked"),
        ("finetune", "text", "transformer", "causal"),
        ("joint", "listops", "s4", "masked"),
        ("joint", "text", "transformer", "causal"),
    ],
)
def test_a_run_is_this_loop(stage, task, model, objective, tmp_path):
    """Training and validation written out plainly: one process, no checkpoints. Joint training: two
    models that share a backbone, whose BatchNorm forgets what it has seen corrupted."""
    words = flags(
        "run",
        task,
        model,
        objective=objective,
        lr=0.01,
        schedule="cosine",
        seed=3,
        joint=0.7 if stage == "joint" else None,
    )
    STAGES[stage].main(words)
    args, (task, train, val, _) = parse(STAGES[stage], words), opened(task, ".")
    torch.manual_seed(3)
    causal = objective == "causal"
    backbone = Backbone(config(args.arch, task, causal, mask_channel=stage == "pretrain"))
    model = (
        Denoiser(backbone, task.vocab)
        if stage == "pretrain"
        else Classifier(backbone, task.classes, args.pool, args.head)
    )
    denoiser = model if stage == "pretrain" else Denoiser(backbone, task.vocab)
    both = (
        model if stage != "joint" else torch.nn.ModuleDict(dict(labels=model, second=denoiser.head))
    )
    optimizer = torch.optim.AdamW(param_groups(both, args.lr, args.wd))

    def losses(batch, *key):
        """The loss of each label, or of each position to be predicted."""
        if stage != "pretrain":
            return F.cross_entropy(model(batch.symbols, batch.lengths), batch.y, reduction="none")
        return hidden_losses(batch, *key)

    def hidden_losses(batch, *key):
        hidden = torch.from_numpy(pretrain.hide((len(batch.y), 40), task.mask, 3, *key))[
            :, : batch.symbols.shape[1]
        ]
        inputs, targets, hidden = (
            pretrain.shift(batch, "ce") if causal else pretrain.corrupt(batch, hidden, "ce")
        )
        return F.cross_entropy(
            denoiser(inputs, batch.lengths, hidden), targets[hidden], reduction="none"
        )

    log = iter(log_of(tmp_path / "run", "train", "eval"))
    for step in range(6):
        # two steps of warm-up
        factor = 0.5 if step == 0 else (1 + math.cos(math.pi * max(0, step - 2) / 4)) / 2
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        batch = train.batch(data.order(24, 3, step // 3)[8 * (step % 3) :][:8])
        loss, parts = losses(batch, step).mean(), {}
        if stage == "joint":
            seen = {name: value.clone() for name, value in backbone.named_buffers()}
            parts = dict(loss_labels=loss, loss_denoising=0.7 * hidden_losses(batch, step).mean())
            loss = sum(parts.values())
            for name, value in backbone.named_buffers():
                value.copy_(seen[name])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        norm = (
            torch.cat([p.grad.flatten() for g in optimizer.param_groups for p in g["params"]])
            .double()
            .norm()
            .item()
        )
        parts = {name: pytest.approx(part.item(), rel=1e-4) for name, part in parts.items()}
        assert next(log) == dict(
            kind="train",
            step=step + 1,
            loss=pytest.approx(loss.item(), rel=1e-4),
            **parts,
            lr=optimizer.param_groups[0]["lr"],
            gradient_norm=pytest.approx(norm, rel=1e-3),
        )
        if step + 1 in (4, 6):
            model.eval()
            with torch.no_grad():
                parts = [
                    losses(val.batch(rows), pretrain.EVAL_KEY, i)
                    for i, rows in enumerate((range(8), [8]))
                ]
            assert next(log)["val_loss"] == pytest.approx(torch.cat(parts).mean().item(), rel=1e-4)
            model.train()


def lag():
    """This process looks into the run directory after the others have had time to write there."""
    look = Folder.look

    def late(folder, *arguments):
        time.sleep(0.5)
        return look(folder, *arguments)

    Folder.look = late


def as_torchrun(start, stage, words, processes):
    """[process]"""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        world = dict(
            WORLD_SIZE=str(processes),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(free.getsockname()[1]),
        )
    return [
        start(stage, words, lag if rank else None, RANK=str(rank), **world)
        for rank in range(processes)
    ]


def test_processes_agree_when_to_stop(start, tmp_path):
    """Though one of them alone is told, and is told at any time. Then they resume, again until
    told."""
    words, out = (
        partial(flags, task="listops", model="s4", batch=9, steps=60, eval_every=7),
        tmp_path / "many",
    )
    as_torchrun(start, "pretrain", words("quiet"), 2)[0].join()
    for rank in (1, 0):
        running = as_torchrun(start, "pretrain", words("many", resume=True), 2)
        lines = len((out / "log.jsonl").read_text().splitlines()) if out.exists() else 0
        while (
            not (out / "log.jsonl").exists()
            or len((out / "log.jsonl").read_text().splitlines()) < lines + 6
        ):
            assert all(process.is_alive() for process in running), Path("errors").read_text()
            time.sleep(0.001)
        os.kill(running[rank].pid, TOLD[-1])
        for process in running:
            process.join(60)
        assert [process.exitcode for process in running] == [143, 143], Path("errors").read_text()
        assert log_of(out)[-1]["kind"] == "stop" and 0 < load(out / "last.pt")["state"]["step"] < 60
    for process in as_torchrun(start, "pretrain", words("many", resume=True), 2):
        process.join(60)
    assert_same_run(tmp_path / "quiet", out)


@pytest.mark.parametrize(
    "stage, task, model, processes, micro",
    [
        ("pretrain", "listops", "s4", 2, None),
        ("pretrain", "retrieval", "rotary", 2, 2),
        ("finetune", "listops", "s4", 2, None),
        ("finetune", "listops", "s4", 2, 2),
        ("finetune", "retrieval", "rotary", 1, 2),
        ("finetune", "bidmc_hr", "rotary", 2, 2),
        ("joint", "listops", "s4", 2, None),
        ("joint", "retrieval", "rotary", 2, 2),
        ("joint", "sc", "rotary", 1, 2),
    ],
)
def test_processes_and_micro_batches_do_not_change_the_step(
    stage, task, model, processes, micro, start, tmp_path
):
    """A batch of 9, padded; S4 has BatchNorm. Processes are started as torchrun does."""
    flags = partial(globals()["flags"], joint=0.5 if stage == "joint" else None)
    STAGES[stage].main(flags("one", task, model, batch=9))
    running = as_torchrun(
        start, stage, flags("many", task, model, batch=9, micro_batch=micro), processes
    )
    for process in running:
        process.join(60)
        process.kill()
    one, many = (result_of(tmp_path / name) for name in ("one", "many"))
    assert many["processes"] == processes
    if model == "s4" and micro:
        # BatchNorm counts a micro-batch. Shares of 4 and 5, each cut on its own, would be 2 and 3
        # micro-batches, and the sums would wait for each other for ever.
        return
    assert all(one[k] == pytest.approx(many[k], abs=1e-3) for k in one if k.startswith("test_"))
    if stage != "pretrain":  # each process predicts some of the examples
        ours, theirs = (np.load(tmp_path / name / "predictions.npz") for name in ("one", "many"))
        assert np.array_equal(ours["y"], theirs["y"])
        assert np.allclose(ours["prediction"], theirs["prediction"], rtol=1e-3, atol=1e-4)
    # validation hides by micro-batch
    kinds = ["train"] if stage == "pretrain" and micro else ["train", "eval"]
    for one, many in zip(
        *(log_of(tmp_path / name, *kinds) for name in ("one", "many")), strict=True
    ):
        assert one.pop("kind") == many.pop("kind") and one == pytest.approx(
            many, rel=1e-4, abs=1e-5
        )
    one, many = (load(tmp_path / name / "last.pt") for name in ("one", "many"))
    for i, state in one["optimizer"]["state"].items():  # unlike weights, they show a wrong scale
        ours, theirs = state["exp_avg"], many["optimizer"]["state"][i]["exp_avg"]
        assert (ours - theirs).norm() <= 0.02 * ours.norm() + 1e-6, i
    assert all(
        torch.allclose(v, many["model"][k], rtol=1e-3, atol=1e-4)
        for k, v in one["model"].items()
        if "running" in k
    )


# ---- both stages, from end to end ----------------------------------------------------------------

# What analyze.py finds in every result.json.
RESULT = {
    "task",
    "model",
    "objective",
    "seed",
    "data",
    "recipe",
    "changed",
    "full_recipe",
    "train_examples",
    "train_fraction",
    "steps",
    "epochs",
    "best_step",
    "parameters",
    "seconds",
    "peak_memory_bytes",
    "commit",
    "torch",
    "python",
    "device",
    "processes",
    "threads",
    "dtype",
    "best.pt",
    "code",
}


@pytest.fixture
def begun(monkeypatch):
    """Copies of the models that the runs of a test begin with, in order."""
    models, begin = [], Run.start

    def keep(run, model, optimizer):
        models.append(copy.deepcopy(model))
        return begin(run, model, optimizer)

    monkeypatch.setattr(Run, "start", keep)
    return models


@pytest.mark.parametrize(
    "task, model, more, objective",
    [
        ("text", "transformer", "", "masked"),
        ("listops", "s4", "", "masked"),
        ("listops", "dlr_rand", "", "masked"),
        ("retrieval", "rotary", "", "masked"),
        ("retrieval", "s4", ",norm=layer", "masked"),
        ("image", "s4_rand", "", "masked"),
        ("image", "sgconv", ",piece=4", "masked"),
        ("image", "dlr", "", "masked"),
        ("pathfinder", "linformer", ",rank=4", "masked"),
        ("scifar", "s4", "", "masked"),
        ("bidmc_spo2", "rotary", "", "masked"),
        ("image", "transformer", "", "causal"),
        ("sc", "s4", "", "causal"),
        ("sc", "rotary", ",block=8", "causal"),
        ("sc", "s4_rand", "", "causal"),
        ("sc", "sgconv", ",piece=4", "causal"),
        ("pathfinder64", "dlr", "", "causal"),
        ("pathfinder64", "dlr_rand", "", "causal"),
        *(("text_demo", model, "", "masked") for model in OTHERS),  # with padding
        *(("pathfinder_demo", model, "", "masked") for model in OTHERS),
        *(
            ("listops", model, "", "causal")
            for model in OTHERS
            if model not in ("linformer", "reformer")
        ),
        *(
            ("text_demo", "rotary", f",ffn={kind},guided=1", "masked")
            for kind in FEED_FORWARD
            if kind != "dense"
        ),
    ],
)
def test_both_stages_from_end_to_end(task, model, more, objective, begun, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")  # a machine without git
    reads, batch = Counter(), Split.batch

    def counted(split, indices, device="cpu"):
        reads[len(split)] += len(indices)
        return batch(split, indices, device)

    pt, ft = tmp_path / "pt", tmp_path / "ft"
    few = dict(steps=3, batch=5, micro_batch=3, eval_every=1, warmup=1)  # 5 and 3 divide no split
    try:
        pretrain.main(flags(pt, task, model, more, objective=objective, train_fraction=0.5, **few))
    except SizeError as error:
        assert "no causal form" in str(error) and objective == "causal" and model not in KNOWN
        return
    with monkeypatch.context() as patch:
        patch.setattr(Split, "batch", counted)
        finetune.main(flags(ft, None, None, init=pt, **few))
    assert reads == {12: 3 * 5, 9: 3 * 9, 7: 7}  # three steps and validations; the test split once
    first, second = result_of(pt), result_of(ft)

    # ---- logs and results
    score = "r2" if task.startswith("bidmc") else "accuracy"
    assert first.keys() == RESULT | {"val_score", "score_is"}
    assert second.keys() == RESULT | {
        f"val_{score}",
        f"test_{score}",
        "right" if score == "accuracy" else "values",
        *[
            "test_loss",
            "test_examples",
            "counts",
            "start",
            "init",
            "label_fraction",
            "joint",
            "pretrained",
        ],
    }
    sizes = {
        key: value
        for key, value in assignments(SIZES[model] + more).items()
        if arch(task, model).get(key) != value
    }
    batch_norm = load(pt / "best.pt")["config"]["arch"].get("norm") == "batch"
    assert first["changed"] == dict(arch=sizes, train_fraction=0.5, sizes=[24, 9, 7]) | {
        name: value for name, value in few.items() if name != "micro_batch" or batch_norm
    }
    sizes = {key: value for key, value in sizes.items() if key != "guided"}
    assert (second["label_fraction"], second["joint"]) == (None, None)
    assert second["changed"] == first["changed"] | {"pretraining": first["changed"], "arch": sizes}
    for out, result, name in ((pt, first, "val_score"), (ft, second, f"val_{score}")):
        assert (result["task"], result["model"], result["objective"]) == (task, model, objective)
        assert (result["train_fraction"], result["train_examples"], result["commit"]) == (
            0.5,
            12,
            "unknown",
        )
        assert (
            result["recipe"].split("/")[2] in (objective, "masked")
            and result["full_recipe"] is False
        )
        train, evals = (
            {"kind", "step", "loss", "lr", "gradient_norm"},
            {"kind", "step", "val_loss", name},
        )
        assert all(record.keys() == train for record in log_of(out, "train"))
        assert all(record.keys() == evals for record in log_of(out, "eval"))
        best = max(log_of(out, "eval"), key=lambda record: (record[name], record["step"]))
        assert (result["best_step"], result[name]) == (best["step"], best[name])
        optimizer = load(out / "last.pt")["optimizer"]  # every parameter has had a gradient
        numbers = [i for group in optimizer["param_groups"] for i in group["params"]]
        assert all(optimizer["state"][i]["exp_avg"].any() for i in numbers)

    # ---- the weights that finetuning starts from, and their kernels
    (denoiser, classifier), pretrained = begun, load(pt / "best.pt")["model"]
    for key, value in classifier.backbone.state_dict().items():
        exact = pretrained[f"backbone.{key}"]
        if (
            key == "encoder.weight"
            and objective == "masked"
            and not classifier.backbone.reads_symbols
        ):
            exact = exact[:, :-1]  # the column that says what is hidden
        assert torch.equal(value, exact), key
    kernels = np.load(pt / "kernels.npz") if (pt / "kernels.npz").exists() else {}
    assert bool(kernels) == hasattr(denoiser.backbone.layers[0].mixer, "kernel")
    for name in kernels:
        exact = [
            layer.mixer.kernel(40).detach().abs().max(1)[0] for layer in denoiser.backbone.layers
        ]
        assert np.allclose(kernels[name], np.stack(exact)), name  # "before", then "after"
        denoiser.load_state_dict(pretrained)

    # ---- the scores of validation and test split, one example at a time, with the checkpoint that
    # validation chose
    classifier.load_state_dict(load(ft / "best.pt")["model"])
    for name, split in (("val", opened(task, ".")[2]), ("test", opened(task, ".")[3])):
        batches = [split.batch([i]) for i in range(len(split))]
        with torch.no_grad():
            outputs = torch.cat(
                [classifier.eval()(classifier.backbone.inputs(b), b.lengths) for b in batches]
            ).double()
        y = torch.cat([batch.y for batch in batches])
        if score == "accuracy":
            loss, exact = F.cross_entropy(outputs, y), (outputs.argmax(-1) == y).double().mean()
        else:
            loss = (outputs[:, 0] - y).square().mean()
            exact = 1 - loss / (y - y.double().mean()).square().mean()
        assert second[f"{name}_{score}"] == pytest.approx(exact.item(), abs=1e-5)
    assert (
        second["test_loss"] == pytest.approx(loss.item(), rel=1e-5) and second["test_examples"] == 7
    )

    # ---- its predictions, as kept and as predict.py makes them
    exact = outputs.argmax(-1) if score == "accuracy" else outputs[:, 0]
    with np.load(ft / "predictions.npz") as kept:
        assert np.array_equal(kept["y"], y) and np.allclose(kept["prediction"], exact, atol=1e-5)
    assert np.allclose(predict.load(ft).outputs(split), outputs, atol=1e-5)


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_guides_are_trained_while_they_guide(stage, begun, monkeypatch, tmp_path):
    """In both stages, in every layer but the first, which stays dense; each step takes them further
    back."""
    steps, guide = [], run_py.guide
    monkeypatch.setattr(run_py, "guide", lambda *words: steps.append(words[1:]) or guide(*words))
    STAGES[stage].main(flags(tmp_path / "run", "text_demo", "rotary", ",ffn=lowrank,guided=0.5"))
    assert steps == [(step, len(steps)) for step in range(6)]
    guides = {key: value for key, value in begun[0].state_dict().items() if key.endswith(".guide")}
    assert guides.keys() == {"backbone.layers.1.ff.0.guide", "backbone.layers.1.ff.2.guide"}
    last = load(tmp_path / "run" / "last.pt")["model"]
    assert not any(torch.equal(value, last[key]) for key, value in guides.items())


def test_a_causal_run_generates(monkeypatch, capsys, tmp_path):
    """Symbols after a prompt, the same for a seed; images whose upper half stays; models without
    steps, too. What cannot generate says why in one line."""
    for model in ("s4", "rotary", "mega"):
        pretrain.main(flags(model, "listops", model, objective="causal", steps=2))
        texts = []
        for seed in (0, 0, 1):
            capsys.readouterr()
            predict.main([model, "--prompt", "[MAX 3 4", "--seed", str(seed)])
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1] != texts[2] and all(
            text.startswith("[MAX 3 4") for text in texts
        )
        assert all(3 <= len(text.split()) <= 40 and "<" not in text for text in texts)

    def square(name, data_dir, *more, **others):
        splits = [noise("image", 36, n)[1] for n in (24, 9, 7)]
        return replace(
            splits[0].task, side=6, data=dict(source=".", seed=0, sizes=[24, 9, 7], labels=0)
        ), *splits

    pretrain.main(flags("masked", "listops", "s4", steps=2))
    with monkeypatch.context() as patch:
        patch.setattr(setup_py, "open_task", square)
        patch.setattr("use.pretrained.open_task", square)
        pretrain.main(flags("image", "image", "s4", objective="causal", loss="ce", steps=2))
        predict.main(["image"])
        with pytest.raises(UserError, match="--prompt has no meaning for the images"):
            predict.main(["image", "--prompt", "0"])
    pixels, given = (
        np.asarray(Image.open("image/sample.png"))[::4, ::4],
        square("image", ".")[2].batch(np.arange(8)),
    )
    given = np.hstack(given.symbols.view(8, 6, 6).numpy())
    assert np.array_equal(pixels[:3], given[:3]) and not np.array_equal(pixels[3:], given[3:])
    for words, line in (
        (
            ["masked", "--prompt", "0"],
            "masked has objective masked; to continue a sequence, predict.py needs",
        ),
        (["s4", "--prompt", "[MAX q"], "--prompt '[MAX q': listops has no symbol 'q'"),
    ):
        with pytest.raises(UserError, match=re.escape(line)):
            predict.main(words)


def test_bfloat16_is_for_matrix_products_only(begun, monkeypatch, tmp_path):
    """Not for the input and the sum that layers add to, nor for a backward pass, which kernels need
    in float32."""
    backward = Run.backward

    def outside(run, loss):
        assert all(part.dtype == torch.float32 for part in loss.values())
        assert not torch.is_autocast_enabled("cpu")
        backward(run, loss)

    monkeypatch.setattr(Run, "backward", outside)
    for stage in STAGES:
        STAGES[stage].main(flags(stage, "image", "s4", dtype="bfloat16", steps=2))
        assert result_of(tmp_path / stage)["dtype"] == "bfloat16"
    backbone, kinds = begun[1].backbone, []
    for module in (*backbone.layers, backbone.layers[0].mixer):
        module.register_forward_hook(lambda module, inputs, output: kinds.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        backbone(torch.randn(2, 40, 1))
    assert kinds == [torch.bfloat16, torch.float32, torch.float32]


# ---- Pythia --------------------------------------------------------------------------------------

FOLDER = Path("pythia-70m-deduped")


@pytest.fixture
def tensors(elsewhere):
    """Those of a small GPT-NeoX in FOLDER, as a user has them there."""
    tensors = made_neox(2, 16, 2, 32, vocab=400, turned=2)
    FOLDER.mkdir()
    save_file(tensors, FOLDER / "model.safetensors")
    (FOLDER / "tokenizer.json").write_text(json.dumps({"model": {"vocab": VOCABULARY}}))
    return tensors


@pytest.mark.parametrize(
    "task, tokens",
    [("image", range(100, 356)), ("text", [0, 1, 0, 0, 50, 51, 52, *[0] * 5, 60, 0])],
)
def test_pythia_starts_from_its_files_and_resumes_without_them(
    task, tokens, tensors, begun, monkeypatch, tmp_path
):
    finetune.main(flags("quiet", task, "pythia"))
    backbone, result = begun[0].backbone, result_of(tmp_path / "quiet")
    assert (result["start"], result["objective"], result["init"]) == ("corpus", "causal", None)
    assert torch.equal(
        backbone.encoder.weight, tensors["gpt_neox.embed_in.weight"].float()[list(tokens)]
    )
    assert torch.equal(
        backbone.layers[1].ff[2].bias, tensors["gpt_neox.layers.1.mlp.dense_4h_to_h.bias"].float()
    )
    stop_in(5, monkeypatch, "finetune", flags("stopped", task, "pythia"))
    shutil.rmtree(FOLDER)
    finetune.main(flags("stopped", task, "pythia", resume=True))
    assert_same_run(tmp_path / "quiet", tmp_path / "stopped")
    finetune.main(flags("random", task, "pythia_rand"))
    assert result_of(tmp_path / "random")["start"] == "scratch" and not FOLDER.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_damaged_files_of_pythia_are_one_line(name, tensors, mistake):
    (FOLDER / name).write_bytes(b"<html>")
    line = mistake("finetune", flags("run", "image", "pythia"))
    assert f"{FOLDER}/model.safetensors" in line and name in line and not Path("run").exists()


# ---- seams: an objective, a step of one's own, a frozen backbone ---------------------------------


@pytest.mark.parametrize("task", ["listops", "pathfinder", "image"])
@pytest.mark.parametrize("model", ["s4", "rotary"])
def test_an_objective_is_a_function_and_a_line(task, model, monkeypatch, tmp_path, capsys):
    """BERT's: a tenth of what is to be predicted stays as it is, a tenth becomes another symbol. It
    has the masked recipe, both stages, joint training with two passes, and its name."""

    def bert(args, batch, draw):
        inputs, targets, hidden = pretrain.corrupt(batch, draw(pretrain.hide, args.mask), args.loss)
        if batch.samples is None:
            kept = (
                draw(lambda shape, ratio, *key: pretrain.hide(shape, ratio, *key, 1), 0.2) & hidden
            )
            inputs = torch.where(kept, targets, inputs)
        return inputs, targets, hidden

    monkeypatch.setitem(
        pretrain.OBJECTIVES, "bert", pretrain.Objective(bert, causal=False, hides=True)
    )
    pretrain.main(flags("first", task, model, objective="bert"))
    finetune.main(flags("second", task=None, model=None, init="first"))
    finetune.main(flags("both", task, model, objective="bert", joint=1))
    masked, joint = (
        parse(STAGES[stage], flags("x", task, model, **more, steps=None))
        for stage, more in (("pretrain", {}), ("joint", dict(joint=1, objective="bert")))
    )
    for out, start in (("first", None), ("second", "spt"), ("both", "joint")):
        result = result_of(tmp_path / out)
        assert (result["objective"], result.get("start")) == ("bert", start)
    assert (
        json.loads((tmp_path / "first" / "config.json").read_text())["mask"]
        == masked.mask
        is not None
    )
    alone = parse(finetune, flags("x", task, model, steps=None))
    assert (joint.steps or joint.epochs) == (alone.steps or alone.epochs) // 2
    assert "no bert recipe for" in capsys.readouterr().out


def test_a_model_may_act_after_each_step(monkeypatch, tmp_path):
    """An average of the weights, as a teacher has it, is what six steps make of it."""

    class Averaged(Denoiser):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.register_buffer("average", self.head.weight.detach().clone())
            self.seen = [self.average.clone()]

        def after_step(self):
            self.average.lerp_(self.head.weight.detach(), 0.1)
            self.seen.append(self.head.weight.detach().clone())
            made.append(self)

    made = []
    monkeypatch.setattr(pretrain, "Denoiser", Averaged)
    pretrain.main(flags("run"))
    average, *steps = made[0].seen
    for weight in steps:
        average = average.lerp(weight, 0.1)
    assert len(steps) == 6 and torch.allclose(
        load(tmp_path / "run" / "last.pt")["model"]["average"], average
    )


@pytest.mark.parametrize(
    "task, model", [("listops", "s4"), ("image", "s4"), ("text", "rotary"), ("listops", "mamba")]
)
def test_a_frozen_backbone_stays_as_it_was_pretrained(task, model, mistake, tmp_path):
    """Its weights and BatchNorm's averages, resumed too; the head learns. Nothing of it is in the
    optimiser."""
    pretrain.main(flags("first", task, model))
    words = flags("probe", task=None, model=None, arch=None, init="first", freeze=True, resume=True)
    finetune.main(words)
    (tmp_path / "probe" / "result.json").unlink()
    finetune.main(words)
    first, probe = (
        load(tmp_path / "first" / "best.pt")["model"],
        load(tmp_path / "probe" / "last.pt"),
    )
    kept = {name: value for name, value in probe["model"].items() if name.startswith("backbone.")}
    dropped = "backbone.encoder.weight"
    assert kept and all(
        torch.equal(value, first[name][:, : value.shape[1]] if name == dropped else first[name])
        for name, value in kept.items()
    )
    moments = probe["optimizer"]["state"]
    assert len(moments) == len(probe["model"]) - len(kept) and all(
        each["exp_avg"].abs().sum() for each in moments.values()
    )
    assert result_of(tmp_path / "probe")["changed"]["freeze"] is True
    assert "--freeze has no meaning with --joint" in mistake(
        "finetune", flags("x", joint=1, freeze=True)
    )


@pytest.mark.parametrize(
    "stage, task, model, documents",
    [
        ("pretrain", "listops", "rotary", 1),
        ("pretrain", "listops", "dlr", 1),
        ("pretrain", "retrieval", "rotary", 2),
        ("finetune", "listops", "transformer", 1),
        ("finetune", "retrieval", "s4_rand", 2),
        ("joint", "listops", "rotary", 1),
    ],
)
def test_parts_of_like_length_do_not_change_the_step(
    stage, task, model, documents, tmp_path, monkeypatch
):
    """A batch whole and in many parts, each cut to its longest sequence: the same losses, scores
    and first moments."""
    flags, shapes, parts = (
        partial(globals()["flags"], joint=0.5 if stage == "joint" else None),
        {},
        Feed.parts,
    )

    def seen(feed, whole, rows, *more):
        found = parts(feed, whole, rows, *more)
        shapes.setdefault(feed.args.out.name, []).append([part[0].shape for part in found])
        return found

    monkeypatch.setattr(Feed, "parts", seen)
    monkeypatch.setattr(Feed, "COSTLY", 1)
    for name, positions in (("whole", 10**9), ("cut", 20)):
        monkeypatch.setattr(Feed, "POSITIONS", positions)
        STAGES[stage].main(
            flags(
                name,
                task,
                model,
                batch=9,
                arch=f"{SIZES[model]},norm=layer" if model in ("dlr", "s4_rand") else SIZES[model],
            )
        )
    assert all(len(some) == 1 for some in shapes["whole"]) and min(map(len, shapes["cut"])) > 2
    for whole, cut in zip(shapes["whole"], shapes["cut"], strict=True):
        widths = [shape[1] for shape in cut]
        assert sum(shape[0] for shape in cut) == whole[0][0] == 9 * documents
        assert (
            widths == sorted(widths, reverse=True)
            and widths[0] == whole[0][1]
            and widths[-1] < widths[0]
        )
    for one, many in zip(
        *(log_of(tmp_path / name, "train", "eval") for name in ("whole", "cut")), strict=True
    ):
        assert (
            one == pytest.approx(many, rel=1e-4, abs=1e-5)
            if one.pop("kind") == many.pop("kind")
            else False
        )
    one, many = (load(tmp_path / name / "last.pt") for name in ("whole", "cut"))
    for i, state in one["optimizer"]["state"].items():
        ours, theirs = state["exp_avg"], many["optimizer"]["state"][i]["exp_avg"]
        assert (ours - theirs).norm() <= 1e-3 * ours.norm() + 1e-6, i


def test_few_labels_shrink_the_batch(tmp_path):
    """To all of them, which is recorded as a change; with enough of them, and where all have
    labels, it stays."""
    for fraction, wanted in ((0.2, 4), (0.5, 8)):
        finetune.main(flags("few", label_fraction=fraction))
        record = result_of(tmp_path / "few")
        assert (
            record["train_examples"] == 24 * fraction // 1
            and record["changed"].get("batch") == wanted
        )
        assert load(tmp_path / "few" / "best.pt")["config"]["batch"] == wanted
        shutil.rmtree("few")


def test_each_process_and_each_step_drops_other_channels():
    """Else all processes would drop the same channels of their examples."""

    def seeded(seed, step, rank):
        found = []
        run = SimpleNamespace(
            args=SimpleNamespace(seed=seed, arch={}),
            steps=9,
            processes=SimpleNamespace(rank=rank, seed=found.append),
            feed=SimpleNamespace(next_parts=lambda *_: None),
        )
        Run.begin(run, step, None)
        return found[0]

    keys = list(itertools.product(range(3), repeat=3))
    assert len({seeded(*key) for key in keys}) == len(keys) and seeded(1, 2, 1) == seeded(1, 2, 1)


def test_wide_parts_have_few_widths_and_all_processes_as_many(monkeypatch):
    """At the lengths of film reviews: above 512 multiples of 128, cut to what there is; each
    example once."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(50, 4000, 64)
    for world, documents in ((1, 1), (3, 1), (1, 2), (3, 2)):  # both documents as long
        seen, counts = [], set()
        for rank in range(world):
            args = SimpleNamespace(batch=64, micro_batch=None, seed=0, fresh=False)
            feed = Feed(
                args,
                SimpleNamespace(world=world, rank=rank, device=None),
                dict(target="", documents=documents),
                64,
                lengths,
                False,
                False,
            )
            rows, mine = feed.rows(0)
            here = lengths[rows[mine]].repeat(documents)
            l = here.max()
            x = torch.from_numpy((np.arange(l) < here[:, None]).astype(np.int64))
            found = feed.parts(pretrain.Denoising(x, torch.from_numpy(here), x, x), rows, mine)
            counts.add(len(found))
            widths = {part.inputs.shape[1] for part in found}
            assert all(width <= 512 or width % 128 == 0 or width == l for width in widths)
            seen += [int(n) for part in found for n in part.lengths[::documents]]
            for part in found:
                assert (
                    part.inputs.sum() == part.lengths.sum()
                    and part.inputs.numel() <= 2 * Feed.POSITIONS
                )
        assert len(counts) == 1 and sorted(seen) == sorted(lengths)
