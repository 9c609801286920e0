"""Runs: stopping and resuming, several processes, the loop that a run is, both stages from end to
end, and what one may add to them."""

import copy
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from itertools import count, product
from pathlib import Path
from types import SimpleNamespace

import conftest
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, STAGES, assert_same_run, flags, load, log_of, opened, result_of, stop_in

import analyze
import data
import predict
import pretrain
from engine import folder, processes, setup
from engine import run as run_py
from engine.feed import Feed
from engine.run import Run
from files import locked
from models import Backbone, Classifier, Denoiser, config, param_groups

pytestmark = pytest.mark.usefixtures("elsewhere")
posix = pytest.mark.skipif(os.name == "nt", reason="wants fork and signals")
KILL, TERM, USR1 = (getattr(signal, f"SIG{name}", None) for name in ("KILL", "TERM", "USR1"))


def cases(names, rows):
    """Parametrise a test by rows of words, with commas between rows."""
    return pytest.mark.parametrize(names.split(), [row.split() for row in rows.split(",")])


def words_of(stage, out, *sizes, **settings):
    """The flags of a short run of a stage."""
    return flags(out, *sizes, **dict(joint=0.5 if stage == "joint" else None) | settings)


def train(stage, *words, **settings):
    STAGES[stage].main(words_of(stage, *words, **settings))


def saved(out, name="last.pt"):
    return load(Path(out) / name)


def errors():
    return Path("errors").read_text()


def lines_of(out):
    """How many lines a run's log has."""
    log = out / "log.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def wait_for(out, lines, *running):
    while lines_of(out) < lines:
        assert all(process.is_alive() for process in running), errors()
        time.sleep(0.001)


def ends_of(running):
    """The exit codes of processes."""
    for process in running:
        process.join(120)
    return [process.exitcode for process in running]


@posix
@cases("stage task model", "pretrain listops s4, finetune bidmc_hr rotary, joint listops s4")
def test_a_run_ended_at_random_moments_resumes_to_the_bit(stage, task, model, start, tmp_path):
    """By kill -9, and by signals of preemption, which lose nothing that was trained."""
    words = partial(words_of, stage, task=task, model=model, steps=100, log_every=3)
    out, rng = tmp_path / "out", random.Random(stage)
    STAGES[stage].main(words("quiet"))
    for told in (KILL, TERM, KILL, USR1):
        lines = lines_of(out) + 2 + rng.randrange(4)
        often = partial(setattr, Run, "SAVE_SECONDS", 0.02 if told == KILL else 600)
        process = start(stage, words(out, resume=True), often)
        wait_for(out, lines, process)
        time.sleep(rng.random() * 0.02)
        os.kill(process.pid, told)
        assert ends_of([process]) == [-KILL if told == KILL else 143], errors()
        if told != KILL:
            step, text = saved(out)["state"]["step"], log_of(out)[-1]["text"]
            assert step > 0 and text == f"stopped by {told.name} after step {step}"
            assert "--resume continues" in analyze.state_of(out)
    STAGES[stage].main(words(out, resume=True))
    assert_same_run(tmp_path / "quiet", out)


def tell_in(name, n, told=TERM):
    """A signal to this process in the n-th call of a function, before it does anything; SIGKILL:
    when half of the file that is written is on the disk."""
    place = next(place for place in (setup, Run, Feed, run_py, os) if hasattr(place, name))
    function, numbers = getattr(place, name), count(1)

    def interrupted(*arguments, **more):
        if next(numbers) == n:
            if told == KILL:
                os.truncate(arguments[0], os.path.getsize(arguments[0]) // 2)
            os.kill(os.getpid(), told)
        return function(*arguments, **more)

    setattr(place, name, interrupted)
    Run.SAVE_SECONDS = 0 if told == KILL else 600


@posix
@cases("stage", "pretrain, finetune")
def test_kill_9_inside_any_write_then_resume_is_bit_identical(stage, start, tmp_path):
    """Config, log, checkpoints at and between evaluations, kernels, result, with dropout."""
    words = partial(flags, more=",dropout=0.5", steps=4, eval_every=3)
    STAGES[stage].main(words("quiet"))
    for n in count(1):
        out = tmp_path / f"torn{n}"
        process = start(stage, words(out), partial(tell_in, "replace", n, KILL))
        if ends_of([process]) == [0]:
            break
        assert process.exitcode == -KILL and not (out / "result.json").exists(), errors()
        STAGES[stage].main(words(out, resume=True))
        assert_same_run(tmp_path / "quiet", out)
    assert n > 9


@posix
def test_a_signal_at_any_time_ends_a_run_in_order(start, tmp_path):
    """Where data are prepared, and in the first step, which may compile for minutes, there is
    nothing to save. In an evaluation: what was trained before it."""
    train("finetune", "quiet")
    places = [("open_task", 1, None), ("print_plan", 1, None), ("backward", 1, None)]
    places += [("backward", 4, 4), ("evaluated", 1, 5), ("shipped", 5, 4), ("load_best", 1, 6)]
    for name, n, step in places:
        out = tmp_path / f"{name}{n}"
        process = start("finetune", flags(out), partial(tell_in, name, n))
        assert ends_of([process]) == [143] and not (out / "result.json").exists(), (name, errors())
        exists = (out / "last.pt").exists()
        assert (saved(out)["state"]["step"] if exists else None) == step, name
        if lines_of(out):
            assert f"stopped by SIGTERM after step {step or 0} of 6" in analyze.state_of(out)
        train("finetune", out, resume=True)
        assert_same_run(tmp_path / "quiet", out)


def test_what_ends_a_run_is_its_last_record_until_it_resumes(mistake, monkeypatch, tmp_path):
    """And it goes on from the last good checkpoint. A gradient may be infinite while the loss is
    not; a defect of ours comes with its traceback."""
    from torch._inductor.exc import InvalidCxxCompiler

    missing = RuntimeError(InvalidCxxCompiler.__name__)
    good, backward = "the last good checkpoint is .*", Run.backward
    endings = (
        ("pretrain", "loss", 2, f"loss is nan at step 6: .*, gradient norm nan; {good}"),
        ("finetune", "gradient", 2, rf"loss is [\d.]+ at step 6: .* norm (inf|nan); {good}"),
        ("finetune", KeyboardInterrupt("key"), 130, "interrupted; the same .* --resume .*"),
        ("pretrain", torch.OutOfMemoryError("full"), 2, "out of GPU memory; .* --micro-batch"),
        ("finetune", missing, 2, r"--compile needs .*g\+\+ on a CPU; .*"),
        ("pretrain", ZeroDivisionError("x"), None, "ZeroDivisionError: x"),
    )
    for stage, ending, code, text in endings:
        steps, out, quiet = count(1), tmp_path / str(ending), tmp_path / f"quiet-{stage}"

        def breaks(run, loss):
            last = next(steps) == 6
            if last and isinstance(ending, BaseException):
                raise ending
            factor = math.nan if last and ending == "loss" else 1
            backward(run, {name: factor * part for name, part in loss.items()})
            if last and ending == "gradient":
                next(run.model.head.parameters()).grad.fill_(math.inf)

        with monkeypatch.context() as patch:
            patch.setattr(Run, "backward", breaks)
            if code is None:
                with pytest.raises(ZeroDivisionError):
                    processes.guarded(lambda: train(stage, out))
            else:
                line = mistake(stage, flags(out), code)
        record = log_of(out)[-1]
        assert record["kind"] == "error" and re.fullmatch(text, record["error"]), record
        assert code is None or line.removeprefix("error: ") == f"{record['error']}\n"
        assert saved(out)["state"]["step"] == 4
        with open(out / "log.jsonl", "ab") as log:
            log.write(b'{"kind": "train", "st\xff')  # a line that was cut short
        train(stage, out, resume=True)
        if not quiet.exists():
            train(stage, quiet)
        assert_same_run(quiet, out)
        assert not log_of(out, "error")


def test_a_validation_that_is_not_finite_stops_the_run(mistake):
    line = mistake("pretrain", flags("run", model="rotary", lr="1e30", steps=1, warmup=1))
    assert "validation at step 1 gave" in line and not Path("run/best.pt").exists()
    train("pretrain", "run", model="rotary", resume=True)  # the corrected command


@posix
def test_a_full_disk_is_one_line_and_leaves_the_old_checkpoint(start, monkeypatch, tmp_path):
    import resource

    stop_in(4, monkeypatch, "pretrain", flags("run"))
    last = tmp_path / "run" / "last.pt"
    before = last.read_bytes()
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (len(before) // 2,) * 2)
    assert ends_of([start("pretrain", flags("run", resume=True), limit)]) == [2]
    assert re.fullmatch("error: cannot write run/[a-z]+.pt: .*; make room, or .*\n", errors())
    assert last.read_bytes() == before and not [*tmp_path.glob("run/*.tmp")]


@posix
def test_running_and_finished_runs_are_left_alone(start, mistake, monkeypatch, tmp_path):
    """Also with other micro-batches, if they do not cut the batch of a BatchNorm."""
    process = start("pretrain", words := flags("run", steps=1000, resume=True))
    wait_for(tmp_path / "run", 1, process)
    with monkeypatch.context() as patch:
        patch.setattr(folder, "locked", locked)
        assert "run is in use by another process" in mistake("pretrain", words)
    process.kill()
    train("pretrain", "finished")
    before = conftest.contents(tmp_path / "finished")
    for size, code, text in ((None, 0, "is finished"), (8, 0, "is finished"), (4, 2, "now 4")):
        done = conftest.call("pretrain.py", *flags("finished", resume=True, micro_batch=size))
        assert done.returncode == code and text in done.stdout + done.stderr, size
    assert conftest.contents(tmp_path / "finished") == before


def test_a_run_says_early_how_long_it_takes(monkeypatch, capsys):
    """A step takes 100 s, an evaluation, known after the first, 1,000 s. On resuming anew."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    for method, seconds in ((Run.backward, 100), (Run.evaluated, 1000)):

        def slower(*arguments, method=method, seconds=seconds, **more):
            now[0] += seconds
            method(*arguments, **more)

        monkeypatch.setattr(Run, method.__name__, slower)

    def forecasts():
        """The steps of which a line was printed, and the seconds left that each of them says."""
        line = r"step +(\d+)/\d+ .* time left (\d+):(\d+):(\d+)\n"
        numbers = [[*map(int, found)] for found in re.findall(line, capsys.readouterr().out)]
        return {step: 3600 * hours + 60 * minutes + rest for step, hours, minutes, rest in numbers}

    train("pretrain", "first", steps=12, log_every=4)
    assert forecasts() == {1: 1100, 2: 1000, 4: 800, 5: 2700, 8: 2400, 10: 1200, 12: 1000}
    stop_in(5, monkeypatch, "finetune", flags("second", steps=8, log_every=100))
    forecasts()
    train("finetune", "second", steps=8, log_every=100, resume=True)
    assert forecasts() == {5: 300, 6: 200, 8: 0}


@cases(
    "stage task model objective",
    "pretrain pathfinder rotary masked, pretrain text transformer causal, "
    "finetune listops s4 masked, joint listops s4 masked, joint text transformer causal",
)
def test_a_run_is_this_loop(stage, task, model, objective, tmp_path):
    """Training and validation written out plainly: one process, no checkpoints. Joint training: two
    models that share a backbone, whose BatchNorm forgets what it has seen corrupted."""
    rates = dict(lr=0.01, schedule="cosine", seed=3)
    words = words_of(stage, "run", task, model, objective=objective, **rates)
    STAGES[stage].main(words)
    args, (task, examples, val, _) = conftest.parse(STAGES[stage], words), opened(task, ".")
    torch.manual_seed(3)
    causal = objective == "causal"
    backbone = Backbone(config(args.arch, task, causal, mask_channel=stage == "pretrain"))
    trained = torch.nn.ModuleDict()
    if stage != "pretrain":
        trained["classifier"] = Classifier(backbone, task.classes, args.pool, args.head)
    if stage != "finetune":
        trained["denoiser"] = Denoiser(backbone, task.vocab)
    optimizer = torch.optim.AdamW(param_groups(trained, args.lr, args.wd))

    def label_losses(batch, *key):
        outputs = trained["classifier"](batch.symbols, batch.lengths)
        return F.cross_entropy(outputs, batch.y, reduction="none")

    def hidden_losses(batch, *key):
        """The loss of each position to be predicted."""
        l = batch.symbols.shape[1]
        hidden = torch.from_numpy(pretrain.hide((len(batch.y), 40), task.mask, 3, *key))[:, :l]
        pretext = pretrain.shift(batch, "ce") if causal else pretrain.corrupt(batch, hidden, "ce")
        inputs, targets, hidden = pretext
        prediction = trained["denoiser"](inputs, batch.lengths, hidden)
        return F.cross_entropy(prediction, targets[hidden], reduction="none")

    losses = hidden_losses if stage == "pretrain" else label_losses
    near = partial(pytest.approx, rel=1e-3)
    log = iter(log_of(tmp_path / "run", "train", "eval"))
    for step in range(6):
        factor = 0.5 if step == 0 else (1 + math.cos(math.pi * max(0, step - 2) / 4)) / 2
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor
        batch = examples.batch(data.order(24, 3, step // 3)[8 * (step % 3) :][:8])
        parts = dict(loss=losses(batch, step).mean())
        if stage == "joint":
            seen = {name: value.clone() for name, value in backbone.named_buffers()}
            second = 0.5 * hidden_losses(batch, step).mean()
            for name, value in backbone.named_buffers():
                value.copy_(seen[name])
            labels = parts["loss"]
            parts = dict(loss=labels + second, loss_labels=labels, loss_denoising=second)
        optimizer.zero_grad()
        parts["loss"].backward()
        optimizer.step()
        gradients = [p.grad.flatten() for p in trained.parameters() if p.grad is not None]
        parts["gradient_norm"] = torch.cat(gradients).double().norm()
        record = {name: near(value.item()) for name, value in parts.items()}
        record |= dict(kind="train", step=step + 1, lr=near(optimizer.param_groups[0]["lr"]))
        assert next(log) == record
        if step + 1 in (4, 6):
            trained.eval()
            with torch.no_grad():
                batches = enumerate((range(8), [8]))
                exact = [losses(val.batch(rows), pretrain.EVAL_KEY, i) for i, rows in batches]
            assert next(log)["val_loss"] == near(torch.cat(exact).mean().item())
            trained.train()


def assert_alike(first, second, kinds=("train", "eval"), tolerance=1e-3):
    """Two runs took the same steps. First moments show a wrong scale, unlike weights."""
    for ours, theirs in zip(log_of(Path(first), *kinds), log_of(Path(second), *kinds), strict=True):
        assert ours.pop("kind") == theirs.pop("kind")
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
    ours, theirs = saved(first), saved(second)
    for i, state in ours["optimizer"]["state"].items():
        difference = (state["exp_avg"] - theirs["optimizer"]["state"][i]["exp_avg"]).norm()
        assert difference <= tolerance * state["exp_avg"].norm() + 1e-6, f"parameter {i}"
    for name, value in ours["model"].items():
        alike = torch.allclose(value, theirs["model"][name], rtol=1e-3, atol=1e-4)
        assert alike or "running" not in name, name


def lag():
    """This process looks into the run directory after the others have had time to write there."""
    look = folder.Folder.look
    folder.Folder.look = lambda *arguments: time.sleep(0.5) or look(*arguments)


def as_torchrun(start, stage, words, number):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = dict(WORLD_SIZE=str(number), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    lags = [None, *[lag] * (number - 1)]
    return [start(stage, words, late, RANK=str(i), **world) for i, late in enumerate(lags)]


@posix
def test_processes_agree_when_to_stop(start, tmp_path):
    """Though a signal reaches one of them only, at any time. Then they resume."""
    words, out = partial(flags, batch=9, steps=60, eval_every=7), tmp_path / "many"
    assert ends_of(as_torchrun(start, "pretrain", words("quiet"), 2)) == [0, 0], errors()
    for rank in (1, 0, None):
        running = as_torchrun(start, "pretrain", words("many", resume=True), 2)
        if rank is not None:
            wait_for(out, lines_of(out) + 6, *running)
            os.kill(running[rank].pid, USR1)
        assert ends_of(running) == [0 if rank is None else 143] * 2, errors()
    assert_same_run(tmp_path / "quiet", out)


@posix
@cases(
    "stage task model number micro",
    "pretrain listops s4 2 0, pretrain retrieval rotary 2 2, finetune listops s4 2 2, "
    "finetune bidmc_hr rotary 2 2, joint listops s4 2 0, joint sc rotary 1 2",
)
def test_processes_and_micro_batches_do_not_change_the_step(
    stage, task, model, number, micro, start
):
    """A batch of 9, padded; S4 has BatchNorm. Processes are started as torchrun does."""
    number, micro = int(number), int(micro) or None
    train(stage, "one", task, model, batch=9)
    words = words_of(stage, "many", task, model, batch=9, micro_batch=micro)
    assert ends_of(as_torchrun(start, stage, words, number)) == [0] * number, errors()
    ours, theirs = (result_of(Path(name)) for name in ("one", "many"))
    assert theirs["processes"] == number
    if model == "s4" and micro:
        # BatchNorm counts a micro-batch. Shares of 4 and 5, each cut on its own, would be 2 and 3
        # micro-batches, and the sums would wait for each other for ever.
        return
    for name in ours:
        assert not name.startswith("test_") or ours[name] == pytest.approx(theirs[name], abs=1e-3)
    # validation hides by micro-batch
    kinds = ["train"] if stage == "pretrain" and micro else ["train", "eval"]
    assert_alike("one", "many", kinds, tolerance=0.02)


@cases(
    "stage task model",
    "pretrain listops dlr, pretrain retrieval rotary, finetune retrieval s4_rand, "
    "joint listops rotary",
)
def test_parts_of_like_length_do_not_change_the_step(stage, task, model, monkeypatch):
    """A batch whole and in many parts of about 60 positions, each cut to its longest sequence."""
    shapes, parts = {}, Feed.parts

    def seen(feed, *arguments):
        made = parts(feed, *arguments)
        shapes.setdefault(feed.args.out.name, []).append([part[0].shape for part in made])
        return made

    monkeypatch.setattr(Feed, "parts", seen)
    monkeypatch.setattr(Feed, "COSTLY", 1)
    more = ",norm=layer" if model in ("dlr", "s4_rand") else ""
    for name, positions in (("whole", 10**9), ("cut", 60)):
        monkeypatch.setattr(Feed, "POSITIONS", positions)
        train(stage, name, task, model, more, batch=9)
    documents = 2 if task == "retrieval" else 1
    for (whole,), cut in zip(shapes["whole"], shapes["cut"], strict=True):
        rows, widths = zip(*(shape[:2] for shape in cut))
        assert len(cut) > 2 and sum(rows) == whole[0] == 9 * documents
        assert [*widths] == sorted(widths, reverse=True) and widths[-1] < widths[0] == whole[1]
        assert all(n * width <= 60 or n == documents for n, width in zip(rows, widths)), cut
    assert_alike("whole", "cut")


def test_each_process_and_each_step_drops_other_channels():
    """Else all processes would drop the same channels of their examples."""
    seeds = {}
    for seed, step, rank in product(range(3), repeat=3):
        keep = partial(seeds.setdefault, (seed, step, rank))
        args, share = SimpleNamespace(seed=seed, arch={}), SimpleNamespace(rank=rank, seed=keep)
        feed = SimpleNamespace(next_parts=lambda *_: None)
        Run.begin(SimpleNamespace(args=args, steps=9, processes=share, feed=feed), step, None)
    assert len({*seeds.values()}) == len(seeds) == 27


@pytest.fixture
def begun(monkeypatch):
    """Copies of the models that the runs of a test begin with, in order."""
    models, begin = [], Run.start

    def keep(run, model, optimizer):
        models.append(copy.deepcopy(model))
        return begin(run, model, optimizer)

    monkeypatch.setattr(Run, "start", keep)
    return models


@cases(
    "task model objective",
    "listops s4 masked, scifar s4 masked, retrieval rotary masked, bidmc_spo2 rotary masked, "
    "image dlr causal, text_demo mamba masked, listops lstm causal, sc rotary causal",
)
def test_both_stages_from_end_to_end(task, model, objective, begun, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")  # a machine without git
    flushes = torch.set_flush_denormal(False)  # where a CPU can
    reads, batch = {}, data.Split.batch

    def counted(split, indices, device="cpu"):
        reads[len(split)] = reads.get(len(split), 0) + len(indices)
        return batch(split, indices, device)

    pt, ft, score = tmp_path / "pt", tmp_path / "ft", "r2" if "bidmc" in task else "accuracy"
    few = dict(steps=3, batch=5, micro_batch=3, eval_every=1, warmup=1)  # 5 and 3 divide no split
    train("pretrain", pt, task, model, objective=objective, train_fraction=0.5, **few)
    with monkeypatch.context() as patch:
        patch.setattr(data.Split, "batch", counted)
        train("finetune", ft, None, None, init=pt, **few)
    assert torch.tensor(1e-30) * 1e-10 == 0 or not flushes  # such numbers slow a CPU
    assert reads == {12: 3 * 5, 9: 3 * 9, 7: 7}  # three steps and validations; the test split once

    # ---- logs and results; a made run has nothing that they lack
    first, second = result_of(pt), result_of(ft)
    assert conftest.RECORD.keys() <= first.keys() | {"init"} and "test_loss" not in first
    assert conftest.RECORD.keys() <= second.keys()
    assert first["changed"]["train_fraction"] == 0.5 and second["start"] == "spt"
    assert second["changed"] == first["changed"] | {"pretraining": first["changed"]}
    for out, result, name in ((pt, first, "val_score"), (ft, second, f"val_{score}")):
        told = [result[key] for key in ("task", "model", "objective", "train_examples", "commit")]
        assert told == [task, model, objective, 12, "unknown"]
        best = max(log_of(out, "eval"), key=lambda record: (record[name], record["step"]))
        assert (result["best_step"], result[name]) == (best["step"], best[name])
        moments = saved(out)["optimizer"]["state"].values()
        assert all(state["exp_avg"].any() for state in moments), "parameters without a gradient"

    # ---- the weights that finetuning starts from, and their kernels
    (denoiser, classifier), pretrained = begun, saved(pt, "best.pt")["model"]
    mark = objective == "masked" and not classifier.backbone.reads_symbols
    for key, value in classifier.backbone.state_dict().items():
        exact = pretrained[f"backbone.{key}"]
        if key == "encoder.weight" and mark:
            exact = exact[:, :-1]  # the column that says what is hidden
        assert torch.equal(value, exact), key
    layers = denoiser.backbone.layers
    assert (pt / "kernels.npz").exists() == hasattr(layers[0].mixer, "kernel")
    for path in pt.glob("kernels.npz"):
        for name, values in np.load(path).items():  # "before", then "after"
            exact = [layer.mixer.kernel(40).detach().abs().amax(1)[0] for layer in layers]
            assert np.allclose(values[:, 0], np.stack(exact)), name
            denoiser.load_state_dict(pretrained)

    # ---- the scores, one example at a time, with the checkpoint that validation chose
    classifier.load_state_dict(saved(ft, "best.pt")["model"])
    classifier.eval()
    for name, split in zip(("val", "test"), opened(task, ".")[2:]):
        batches = [split.batch([i]) for i in range(len(split))]
        with torch.no_grad():
            outputs = [classifier(classifier.backbone.inputs(b), b.lengths) for b in batches]
        outputs, y = torch.cat(outputs).double(), torch.cat([batch.y for batch in batches])
        if score == "accuracy":
            guesses = outputs.argmax(-1)
            loss, exact = F.cross_entropy(outputs, y), (guesses == y).double().mean()
        else:
            guesses = outputs[:, 0]
            loss = (guesses - y).square().mean()
            exact = 1 - loss / (y - y.double().mean()).square().mean()
        assert second[f"{name}_{score}"] == pytest.approx(exact.item(), abs=1e-5)
    assert second["test_loss"] == pytest.approx(loss.item(), rel=1e-5)
    with np.load(ft / "predictions.npz") as kept:
        assert np.array_equal(kept["y"], y) and np.allclose(kept["prediction"], guesses, atol=1e-5)


@cases("stage", "pretrain, finetune")
def test_guides_are_trained_while_they_guide(stage, begun, monkeypatch):
    """In every layer but the first, which stays dense; each step takes them further back."""
    steps, guide = [], run_py.guide
    monkeypatch.setattr(run_py, "guide", lambda *words: steps.append(words[1:]) or guide(*words))
    train(stage, "run", "text_demo", "rotary", ",ffn=lowrank,guided=0.5")
    assert steps == [(step, len(steps)) for step in range(6)]
    guides = {key: value for key, value in begun[0].state_dict().items() if key.endswith(".guide")}
    assert guides.keys() == {"backbone.layers.1.ff.0.guide", "backbone.layers.1.ff.2.guide"}
    assert not any(torch.equal(value, saved("run")["model"][key]) for key, value in guides.items())


def test_few_labels_shrink_the_batch():
    """To all of them, which is recorded as a change; with enough of them it stays."""
    for fraction, wanted in ((0.2, 4), (0.5, 8)):
        train("finetune", out := Path(f"few{wanted}"), label_fraction=fraction)
        assert result_of(out)["train_examples"] == int(24 * fraction)
        assert result_of(out)["changed"].get("batch") == saved(out)["config"]["batch"] == wanted


def test_a_causal_run_generates(capsys):
    """Symbols after a prompt, the same for a seed, by models without steps, too."""
    for model in ("s4", "rotary", "mega"):
        train("pretrain", model, "listops", model, objective="causal", steps=2)
        texts = []
        for seed in (0, 0, 1):
            capsys.readouterr()
            predict.main([model, "--prompt", "[MAX 3 4", "--seed", str(seed)])
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1] != texts[2], model
        for text in texts:
            assert text.startswith("[MAX 3 4") and 3 <= len(text.split()) <= 40 and "<" not in text


def test_bfloat16_is_for_matrix_products_only(begun, monkeypatch):
    """Not for the input, nor the sum that layers add to, nor a backward pass through kernels."""
    backward, kinds = Run.backward, []

    def outside(run, loss):
        assert all(part.dtype == torch.float32 for part in loss.values())
        assert not torch.is_autocast_enabled("cpu")
        backward(run, loss)

    monkeypatch.setattr(Run, "backward", outside)
    for stage in STAGES:
        train(stage, stage, "image", dtype="bfloat16", steps=2)
        assert result_of(Path(stage))["dtype"] == "bfloat16"
    backbone = begun[1].backbone
    for module in (*backbone.layers, backbone.layers[0].mixer):
        module.register_forward_hook(lambda module, inputs, output: kinds.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        backbone(torch.randn(2, 40, 1))
    assert kinds == [torch.bfloat16, torch.float32, torch.float32]


def test_pythia_starts_from_its_files_and_resumes_without_them(begun, monkeypatch, tmp_path):
    from safetensors.torch import save_file
    from test_models import VOCABULARY, made_neox

    files, made = tmp_path / "pythia-70m-deduped", made_neox(2, 16, 2, 32, vocab=400, turned=2)
    files.mkdir()
    save_file(made, files / "model.safetensors")
    (files / "tokenizer.json").write_text(json.dumps({"model": {"vocab": VOCABULARY}}))
    train("finetune", "quiet", "text", "pythia")
    tokens = [0, 1, 0, 0, 50, 51, 52, *[0] * 5, 60, 0]
    rows = made["gpt_neox.embed_in.weight"].float()[tokens]
    assert torch.equal(begun[0].backbone.encoder.weight, rows)
    assert result_of(tmp_path / "quiet")["start"] == "corpus"
    stop_in(5, monkeypatch, "finetune", flags("stopped", "text", "pythia"))
    shutil.rmtree(files)
    train("finetune", "stopped", "text", "pythia", resume=True)
    assert_same_run(tmp_path / "quiet", tmp_path / "stopped")


def test_a_model_may_act_after_each_step(monkeypatch):
    """On the weights of that step, as an average of a teacher's would."""
    heads = []

    def act(model):
        heads.append(model.head.weight.detach().clone())

    monkeypatch.setattr(Denoiser, "after_step", act, raising=False)
    train("pretrain", "run")
    assert len(heads) == 6 and torch.equal(heads[-1], saved("run")["model"]["head.weight"])


@cases("task model", "image s4, listops s4, text rotary")
def test_a_frozen_backbone_stays_as_it_was_pretrained(task, model):
    """BatchNorm's averages, too, and if resumed; only the head learns and is in the optimiser."""
    train("pretrain", "first", task, model)
    for _ in range(2):
        train("finetune", "probe", None, None, arch=None, init="first", freeze=True, resume=True)
        Path("probe", "result.json").unlink()
    first, probe = saved("first", "best.pt")["model"], saved("probe")
    kept = {name: value for name, value in probe["model"].items() if name.startswith("backbone.")}
    for name, value in kept.items():  # without the column for the mask channel
        exact = first[name] if first[name].ndim < 2 else first[name][:, : value.shape[1]]
        assert torch.equal(value, exact), name
    moments = probe["optimizer"]["state"].values()
    assert kept and len(moments) == len(probe["model"]) - len(kept)
    assert all(state["exp_avg"].any() for state in moments)


WINDOWS = """import os, signal, sys
sys.modules["resource"] = None  # so that importing it fails
for name in "SIGPIPE SIGUSR1 SIGUSR2 SIGHUP SIGALRM SIGKILL".split():
    delattr(signal, name)
for name in "killpg sched_getaffinity fork sync".split():
    delattr(os, name)
import data, finetune, pretrain
data.main("--task listops_demo --train 32 --val 8 --test 8 --workers 2".split())
flags = "--steps 2 --batch 8".split()
sizes = "--arch d=8,layers=1,state=4,n_ssm=2".split()
pretrain.main(["--task", "listops_demo", "--model", "s4", "--out", "first", *flags, *sizes])
finetune.main(["--init", "first", "--out", "second", *flags])
"""


@posix
def test_neither_stage_needs_what_windows_lacks(tmp_path):
    words, where = [sys.executable, "-c", WINDOWS], dict(PYTHONPATH=str(ROOT))
    options = dict(cwd=tmp_path, env=os.environ | where, capture_output=True, text=True)
    done = subprocess.run(words, **options)
    assert done.returncode == 0, done.stderr
    assert result_of(tmp_path / "second")["test_accuracy"] >= 0
    assert result_of(tmp_path / "first")["peak_memory_bytes"] is None
