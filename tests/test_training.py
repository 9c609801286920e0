"""The two stages: objective, batches, resuming after kill -9, several processes, error messages, recipes."""
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import data
import finetune
import models
import pretrain
from conftest import ROOT
from data import EOS, MASK, PAD, TASKS, UserError
from models import arch, read_table

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """Both demo tasks, small."""
    folder = tmp_path_factory.mktemp("data")
    for task in ("listops_demo", "pathfinder_demo"):
        data.prepare(task, str(folder), sizes=(64, 24, 40), workers=1)
    return str(folder)


def noise(row, n, seed=0):
    """n made-up examples of a row of TASKS, as the arrays of a Split."""
    rng = np.random.default_rng(seed)
    y = rng.integers(row.classes, size=n).astype(np.uint8) if row.classes else rng.uniform(-1, 1, n).astype(np.float32)
    if row.kind == "tokens":
        lengths = rng.integers(2, row.length + 1, n * row.documents)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        x = rng.integers(EOS + 1, row.vocab, offsets[-1]).astype(np.uint8)
        x[offsets[1:] - 1] = EOS
        return dict(x=x, y=y, offsets=offsets)
    shape = (n, row.length, row.channels)
    x = {255: lambda: rng.integers(0, 256, shape).astype(np.uint8),
         32768: lambda: (3000 * rng.standard_normal(shape)).astype(np.int16),
         1: lambda: rng.standard_normal(shape).astype(np.float32)}[row.scale]()
    return dict(x=x, y=y)


def cut(task, length):
    """The row of a task with shorter sequences, and with what its data would tell."""
    found = dict(text=dict(vocab=99), retrieval=dict(vocab=99), speech=dict(mean=-1e-5, std=0.1))
    return replace(TASKS[task], length=length), found.get(TASKS[task].family, {})


def make_up(folder, task, length, sizes=(12, 5, 7)):
    """A prepared set of noise in folder/task, as data.load accepts it once the row that is returned stands in TASKS."""
    row, found = cut(task, length)
    (folder / task).mkdir(parents=True)
    files = {}
    for split, n in zip(data.SPLITS, sizes):
        for name, array in noise(replace(row, **found), n, n).items():
            path = folder / task / f"{split}_{name}.npy"
            np.save(path, array)
            files[path.name] = dict(shape=list(array.shape), dtype=str(array.dtype), bytes=path.stat().st_size)
    meta = dict(task=task, sizes=list(sizes), asked=True, seed=0, source="made up", grouped=False, row=data._plain(row),
                found=found, files=files)
    (folder / task / "meta.json").write_text(json.dumps(meta))
    return row


@pytest.fixture
def quick_s4(monkeypatch):
    """S4 starts without the truncation correction of C: its matrix powers take seconds a layer at the paper's sizes."""
    monkeypatch.setattr(models, "truncation_correction", lambda A, P, C, dt, l: C)


def flags(prepared, out, task="listops_demo", model="s4", **more):
    words = ["--task", task, "--model", model, "--data-dir", str(prepared), "--out", str(out), "--device", "cpu"]
    settings = dict(steps=6, batch=8, eval_every=3, log_every=1, warmup=2) | more
    for name, value in settings.items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


def run(script, words, **more):
    return subprocess.run([sys.executable, ROOT / script, *words], env=ENVIRONMENT, capture_output=True, text=True,
                          timeout=120, **more)


def interrupted(monkeypatch, stage, words, at=4):
    """A run that Ctrl-C stops in step `at`."""
    training = stage.Log.training

    def stop(log, step, *rest):
        if step == at:
            raise KeyboardInterrupt
        training(log, step, *rest)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stage.Log, "training", stop)
        stage.main(words)


def log_of(out):
    """What the log says about training, without the clock."""
    records = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k != "ms_per_step"} for r in records if r["kind"] in ("train", "eval")]


def weights(path):
    return torch.load(path, weights_only=True)["model"]


def same_weights(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ---- the objective ---------------------------------------------------------------------------------------------------


def choose(*arguments):
    return torch.from_numpy(data.choose_positions(*arguments))


def test_masked_symbols_are_hidden_and_only_they_are_predicted():
    task = TASKS["listops_demo"]
    lengths = torch.tensor([30, 12])
    x = torch.randint(4, task.vocab, (2, 30), generator=torch.Generator().manual_seed(0))
    x[0, 29] = x[1, 11] = EOS
    x[1, 12:] = PAD
    chosen = choose((2, 30), 0.5, 0, 1)
    inputs, targets, where = pretrain.corrupt(task, x, chosen, lengths)
    assert (inputs[where] == MASK).all() and torch.equal(inputs[~where], x[~where])
    assert not where[1, 12:].any() and torch.equal(where[0], chosen[0])
    prediction = torch.randn(int(where.sum()), task.vocab)
    loss, right = pretrain.spt_loss(task, prediction, targets, where, "ce")
    elsewhere = torch.where(where, targets, torch.full_like(targets, 5))
    assert torch.equal(loss, pretrain.spt_loss(task, prediction, elsewhere, where, "ce")[0])
    by_hand = -prediction.double().log_softmax(-1)[range(len(prediction)), x[where]].sum()
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-5)
    assert right == (prediction.argmax(-1) == x[where]).sum()


@pytest.mark.parametrize("loss", ["ce", "l1"])
def test_masked_pixels(loss):
    task = TASKS["pathfinder_demo"]
    x = torch.randint(0, 256, (3, task.length, 1), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    chosen = choose((3, task.length), 0.5, 7)
    inputs, targets, where = pretrain.corrupt(task, x, chosen, None)
    assert inputs.shape == (3, task.length, 2)
    assert (inputs[..., 0][where] == 0).all() and torch.equal(inputs[..., 1] == 1, where)
    assert torch.allclose(inputs[..., 0][~where], x[..., 0][~where] / 127.5 - 1, atol=1e-6)
    outputs = 256 if loss == "ce" else 1
    prediction = torch.randn(int(where.sum()), outputs)
    value, score = pretrain.spt_loss(task, prediction, targets, where, loss)
    truth = x[..., 0][where]
    if loss == "ce":
        exact = -prediction.double().log_softmax(-1)[range(len(truth)), truth.long()].sum()
    else:
        exact = (prediction[:, 0].double() - (truth / 127.5 - 1).double()).abs().sum()
        assert score.item() == pytest.approx(-(prediction[:, 0] - (truth / 127.5 - 1)).square().sum().item(), rel=1e-4)
    assert value.item() == pytest.approx(exact.item(), rel=1e-5)


@pytest.mark.parametrize("task", ["sc", "scifar", "bidmc_rr"])
def test_all_channels_of_a_step_are_hidden_together(task):
    """int16, uint8 and float32; the loss is the absolute error of normalised samples, mean over channels."""
    row, found = cut(task, 60)
    row = replace(row, **found)
    x, _, _ = data.Split(row, **noise(row, 3)).batch([0, 1, 2])
    chosen = choose((3, 60), 0.25, 7)
    inputs, targets, where = pretrain.corrupt(row, x, chosen, None)
    mean, std = (np.broadcast_to(value, row.channels) for value in (row.mean, row.std))
    exact = torch.from_numpy((x.numpy().astype(np.float64) / row.scale - mean) / std)
    assert torch.equal(where, chosen) and inputs.shape == (3, 60, row.channels + 1)
    assert torch.equal(inputs[..., -1] == 1, where) and (inputs[where][:, :-1] == 0).all()
    assert torch.allclose(inputs[~where][:, :-1].double(), exact[~where], atol=1e-4)
    prediction = torch.randn(int(where.sum()), row.channels)
    loss, score = pretrain.spt_loss(row, prediction, targets, where, "l1")
    error = prediction.double() - exact[where]
    assert loss.item() == pytest.approx(error.abs().mean(-1).sum().item(), rel=1e-5)
    assert score.item() == pytest.approx(-error.square().mean(-1).sum().item(), rel=1e-5)


def test_documents_are_masked_independently_and_never_in_padding():
    row = replace(TASKS["retrieval"], length=50, vocab=99)
    x, _, lengths = data.Split(row, **noise(row, 6)).batch(range(6))
    rows = SimpleNamespace(whole=np.arange(6), mine=slice(0, 6))
    args = SimpleNamespace(objective="masked", mask=0.5)
    inputs, targets, where = pretrain.pretext(row, args, x, lengths, rows, 0, 1)
    real = torch.arange(x.shape[-1]) < lengths[..., None]
    assert torch.equal(real, x != PAD) and not (where & ~real).any()
    assert torch.equal(inputs == MASK, where) and torch.equal(targets, x)
    both = real.all(1)
    assert 0.3 < (where[:, 0] == where[:, 1])[both].float().mean() < 0.7
    rows.mine = slice(2, 5)                                   # another process hides the same positions of its share
    assert torch.equal(pretrain.pretext(row, args, x[2:5], lengths[2:5], rows, 0, 1)[2], where[2:5])
    args.objective = "causal"
    inputs, targets, where = pretrain.pretext(row, args, x, lengths, rows, 0, 1)
    assert torch.equal(where.sum(-1), lengths - 1) and torch.equal(targets[where], x[..., 1:][where[..., :-1]])


def test_causal_targets_are_the_next_position():
    task = TASKS["listops_demo"]
    lengths = torch.tensor([6, 3])
    x = torch.tensor([[5, 6, 7, 8, 9, 3], [10, 11, 3, 1, 1, 1]])
    inputs, targets, where = pretrain.shift(task, x, lengths)
    assert torch.equal(inputs, x)
    assert targets[where].tolist() == [6, 7, 8, 9, 3, 11, 3]
    assert where.tolist() == [[True] * 5 + [False], [True, True] + [False] * 4]


def test_masking_ratio_and_determinism():
    chosen = choose((400, 500), 0.15, 3, 9)
    assert abs(chosen.float().mean().item() - 0.15) < 0.003
    assert torch.equal(chosen, choose((400, 500), 0.15, 3, 9))
    assert not torch.equal(chosen, choose((400, 500), 0.15, 3, 10))
    assert chosen.sum(1).float().std() > 4                   # independent per position, not an exact count


def test_batches_cover_an_epoch_and_processes_share_a_batch():
    args = SimpleNamespace(batch=10, seed=4)
    seen = []
    for step in range(7):
        parts = [pretrain.batch_rows(75, args, step, 7, SimpleNamespace(rank=r, world=3)) for r in range(3)]
        shared = np.concatenate([p.whole[p.mine] for p in parts])
        assert np.array_equal(shared, parts[0].whole) and len(shared) == 10
        seen.extend(shared)
    assert len(set(seen)) == 70
    again = pretrain.batch_rows(75, args, 7, 7, SimpleNamespace(rank=0, world=1)).whole
    assert not np.array_equal(again, seen[:10])              # the next epoch has another order


# ---- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script, model", [("pretrain.py", "s4"), ("finetune.py", "rotary")])
def test_kill_9_at_random_moments_then_resume_is_bit_identical(script, model, prepared, tmp_path):
    words = dict(task="listops_demo" if model == "s4" else "pathfinder_demo", model=model, steps=60, eval_every=4,
                 log_every=3)
    quiet, noisy = tmp_path / "quiet", tmp_path / "noisy"
    assert run(script, flags(prepared, quiet, **words)).returncode == 0
    rng = random.Random(script)
    kills = 0
    while not (noisy / "result.json").exists():
        command = [sys.executable, ROOT / script, *flags(prepared, noisy, **words), "--resume"]
        process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if kills < 3:
            # Wait for some further log lines, so that the kill falls into training and not into torch's import.
            goal, size = rng.randrange(1, 6), len((noisy / "log.jsonl").read_text()) if noisy.exists() else 0
            deadline = time.time() + 60
            while process.poll() is None and time.time() < deadline:
                if (noisy / "log.jsonl").exists() and len((noisy / "log.jsonl").read_text()) > size + 70 * goal:
                    break
                time.sleep(0.002)
            time.sleep(rng.random() * 0.02)
            process.send_signal(signal.SIGKILL)
            kills += 1
        error = process.communicate()[1].decode()
        assert process.returncode in (0, -9), error
    assert kills == 3
    assert log_of(quiet) == log_of(noisy)
    for name in ("last.pt", "best.pt"):
        assert same_weights(weights(quiet / name), weights(noisy / name))


@pytest.mark.parametrize("stop", [2, 6, 7])
def test_checkpoints_between_evaluations(stop, prepared, tmp_path, monkeypatch):
    """Saved after every step and stopped before step `stop`; 6 is where an evaluation is due that was not made yet."""
    words = dict(steps=10, eval_every=6, log_every=4)
    pretrain.main(flags(prepared, tmp_path / "quiet", **words))
    monkeypatch.setattr(pretrain.Log, "SAVE_SECONDS", 0)
    loss, calls = pretrain.spt_loss, []

    def interrupted(*arguments):
        if torch.is_grad_enabled():
            calls.append(1)
            if len(calls) == stop + 1:
                raise KeyboardInterrupt
        return loss(*arguments)

    monkeypatch.setattr(pretrain, "spt_loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pretrain.main(flags(prepared, tmp_path / "noisy", **words))
    monkeypatch.setattr(pretrain, "spt_loss", loss)
    pretrain.main(flags(prepared, tmp_path / "noisy", resume=True, **words))
    assert log_of(tmp_path / "quiet") == log_of(tmp_path / "noisy")
    for name in ("last.pt", "best.pt"):
        assert same_weights(weights(tmp_path / "quiet" / name), weights(tmp_path / "noisy" / name))


def test_kill_9_inside_a_checkpoint_write(prepared, tmp_path):
    words = flags(prepared, tmp_path / "quiet")
    assert run("pretrain.py", words).returncode == 0
    killer = tmp_path / "killer.py"
    killer.write_text(f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import torch, pretrain
whole, calls = torch.save, 0
def torn(record, path):
    global calls
    calls += 1
    whole(record, path)
    if calls == int(sys.argv[1]):
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), 9)
torch.save = torn
pretrain.main(sys.argv[2:])
""")
    for call in (1, 2, 3):                                   # in best.pt, in last.pt, in the second evaluation
        out = tmp_path / f"torn{call}"
        words = flags(prepared, out)
        killed = subprocess.run([sys.executable, killer, str(call), *words], env=ENVIRONMENT, capture_output=True)
        assert killed.returncode == -9
        assert run("pretrain.py", words + ["--resume"]).returncode == 0
        assert log_of(out) == log_of(tmp_path / "quiet")
        assert same_weights(weights(out / "last.pt"), weights(tmp_path / "quiet" / "last.pt"))


def test_micro_batches_do_not_change_the_step(prepared, tmp_path):
    for name, more in (("whole", {}), ("parts", dict(micro_batch=3))):
        pretrain.main(flags(prepared, tmp_path / name, model="transformer", **more))
    assert_same_training(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("stage", [pretrain, finetune])
def test_micro_batches_of_pairs_do_not_change_the_step(tmp_path, monkeypatch, stage):
    monkeypatch.setitem(TASKS, "retrieval", make_up(tmp_path / "data", "retrieval", 40))
    for name, more in (("whole", {}), ("parts", dict(micro_batch=2))):
        stage.main(flags(tmp_path / "data", tmp_path / name, "retrieval", "rotary", steps=3, batch=5, eval_every=3, **more))
    assert_same_training(tmp_path / "whole", tmp_path / "parts")


def assert_same_training(one, two):
    """Adam's first moments, which unlike the weights show a wrong scale of the gradients, and BatchNorm's statistics."""
    one, two = (torch.load(out / "last.pt", weights_only=True) for out in (one, two))
    for i, moments in one["optimizer"]["state"].items():
        ours, theirs = moments["exp_avg"], two["optimizer"]["state"][i]["exp_avg"]
        assert (ours - theirs).norm() <= 0.02 * ours.norm() + 1e-6, i
    for key in one["model"]:
        if "running" in key:
            assert torch.allclose(one["model"][key], two["model"][key], rtol=1e-3, atol=1e-4), key


# ---- several processes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_two_processes_do_what_one_does(stage, prepared, tmp_path):
    """S4 with BatchNorm on padded batches, batch 9 over 2 processes: losses, evaluations and weights agree."""
    program = tmp_path / "program.py"
    program.write_text(f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import models
models.ARCH = '''task model layers d state n_ssm norm place dt_min dt_max dt_lr ssm_lr
listops_demo s4 2 16 8 4 batch pre 0.001 0.1 main 0.001'''
import {stage}
{stage}.main(sys.argv[1:])
""")
    outs = []
    for processes in (1, 2):
        out = tmp_path / str(processes)
        words = flags(prepared, out, batch=9, steps=5)
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        done = subprocess.run([sys.executable, *(launcher if processes > 1 else []), program, *words],
                              env=ENVIRONMENT, capture_output=True, text=True, timeout=180)
        assert done.returncode == 0, done.stderr
        outs.append(out)
    for one, two in zip(*(log_of(out) for out in outs)):
        assert one.keys() == two.keys()
        assert all(one[k] == pytest.approx(two[k], rel=1e-4, abs=1e-5) for k in one if k != "kind")
    assert_same_training(*outs)
    assert json.loads((outs[1] / "result.json").read_text())["processes"] == 2
    # The processes have 4 and 5 rows: cut into micro-batches of 2 on their own, they would make 2 and 3 of them, and
    # BatchNorm's sums would wait for each other for ever.
    words = flags(prepared, tmp_path / "micro", batch=9, steps=2, micro_batch=2)
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program,
                           *words], env=ENVIRONMENT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr


# ---- from stage 1 to stage 2 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("task, model", [("listops_demo", "rotary"), ("pathfinder_demo", "s4")])
def test_finetuning_starts_from_the_pretrained_backbone(task, model, prepared, tmp_path, capsys):
    pretrain.main(flags(prepared, tmp_path / "pt", task, model))
    pretrained = weights(tmp_path / "pt" / "best.pt")
    args = finetune.parse_args(["--init", str(tmp_path / "pt"), "--data-dir", prepared])
    assert (args.task, args.model, args.start) == (task, model, "spt")
    row = TASKS[task]
    backbone = models.Backbone(args.arch, row.length, row.vocab if row.kind == "tokens" else None, row.channels)
    model = models.Classifier(backbone, row.classes, args.pool)
    head = model.head.weight.clone()
    finetune.load_backbone(model, args, print)
    for key, value in model.state_dict().items():
        if key.startswith("head."):
            continue
        exact = pretrained[key][:, :1] if key == "backbone.encoder.weight" and task == "pathfinder_demo" else pretrained[key]
        assert torch.equal(value, exact), key
    assert torch.equal(model.head.weight, head)
    printed = capsys.readouterr().out
    assert ("mask-indicator column" in printed) == (task == "pathfinder_demo") and "fresh: head.bias" in printed


def test_causal_from_end_to_end(prepared, tmp_path, monkeypatch):
    """No mask channel in stage 1, one kernel per channel in S4, and finetuning inherits the objective."""
    for stage in (pretrain, finetune):
        rows = [line.replace("masked", "causal") for line in stage.SMALL_RECIPES.splitlines()
                if line.startswith("pathfinder_demo")]
        monkeypatch.setattr(stage, "SMALL_RECIPES", stage.SMALL_RECIPES + "\n".join(rows) + "\n")
    for model in ("s4", "transformer"):
        pretrain.main(flags(prepared, tmp_path / model, "pathfinder_demo", model, objective="causal"))
        state = weights(tmp_path / model / "best.pt")
        assert state["backbone.encoder.weight"].shape[1] == 1
        assert model != "s4" or state["backbone.layers.0.mixer.kernel.C"].shape[0] == 1
        finetune.main(["--init", str(tmp_path / model), "--data-dir", prepared, "--out", str(tmp_path / f"{model}-ft"),
                       "--steps", "2", "--batch", "8"])
        result = json.loads((tmp_path / f"{model}-ft" / "result.json").read_text())
        assert result["objective"] == "causal" and not result["full_recipe"]
        assert "was pretrained with --objective causal" in mistake(
            finetune, ["--init", str(tmp_path / model), "--objective", "masked", "--data-dir", prepared])


@pytest.mark.parametrize("model", ["transformer", "rotary", "s4", "dlr"])
def test_bfloat16_touches_matrix_products_only(model, prepared, tmp_path, monkeypatch):
    """Under autocast the residual stream and the gradients of the SSM parameters stay float32-accurate."""
    pretrain.main(flags(prepared, tmp_path / "run", "pathfinder_demo", model, dtype="bfloat16", steps=2))
    row = TASKS["pathfinder_demo"]
    torch.manual_seed(0)
    backbone = models.Backbone(models.arch("pathfinder_demo", model), row.length, None, 1)
    seen = []
    for layer in backbone.layers:
        layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        features = backbone(torch.randn(2, row.length, 1))
    assert seen and set(seen) == {torch.float32}
    if model in ("s4", "dlr"):
        kernel = backbone.layers[0].mixer.kernel
        poles = kernel.log_dt if model == "s4" else kernel.theta
        with torch.autocast("cpu", torch.bfloat16):
            K = kernel(row.length)
        kernel.zero_grad()
        K.square().sum().backward()
        within = poles.grad.clone()
        kernel.zero_grad()
        kernel(row.length).square().sum().backward()
        assert torch.equal(within, poles.grad)
    assert torch.isfinite(features).all()


def test_the_test_split_is_whole_and_judged_by_the_validated_checkpoint(prepared, tmp_path):
    """An independent count with best.pt, one sequence at a time: batches, padding and the odd end change nothing."""
    out = tmp_path / "ft"
    finetune.main(flags(prepared, out, "listops_demo", "s4", steps=12, batch=7))
    result = json.loads((out / "result.json").read_text())
    evals = [r for r in log_of(out) if r["kind"] == "eval"]
    best = max(evals, key=lambda r: (r["val_accuracy"], -r["step"]))
    assert result["best_step"] == best["step"] and result["val_accuracy"] == best["val_accuracy"]
    row = TASKS["listops_demo"]
    model = models.Classifier(models.Backbone(models.arch("listops_demo", "s4"), row.length, row.vocab), row.classes, "mean")
    model.load_state_dict(weights(out / "best.pt"))
    model.eval()
    split = data.load("listops_demo", "test", prepared)
    right = 0
    for i in range(len(split)):
        x, y, lengths = split.batch(np.array([i]))
        right += (model(x, lengths).argmax(-1) == y).item()
    assert result["test_examples"] == len(split) == 40
    assert result["test_accuracy"] == pytest.approx(right / 40)


def test_learning_happens(prepared, tmp_path):
    """Both stages lower their training loss on data they can memorise."""
    for stage, out in ((pretrain, tmp_path / "pt"), (finetune, tmp_path / "ft")):
        stage.main(flags(prepared, out, "listops_demo", "rotary", steps=150, batch=16, eval_every=150, log_every=10,
                         lr=3e-3, schedule="constant"))
        losses = [r["loss"] for r in log_of(out) if r["kind"] == "train"]
        assert losses[-1] < 0.9 * losses[0], (stage.__name__, losses)


# ---- the tasks that are not generated, on noise ----------------------------------------------------------------------


@pytest.mark.parametrize("task, model, objective", [
    ("text", "transformer", "causal"), ("retrieval", "transformer", "masked"), ("retrieval", "s4", "masked"),
    ("image", "transformer", "causal"), ("scifar", "s4", "masked"), ("sc", "rotary", "causal"), ("sc", "s4", "masked"),
    ("bidmc_spo2", "rotary", "masked")])
def test_both_stages_from_end_to_end(task, model, objective, tmp_path, monkeypatch, quick_s4):
    """The real architecture at a cut length; batches and micro-batches that do not divide the splits."""
    monkeypatch.setitem(TASKS, task, make_up(tmp_path / "data", task, 40))
    words = flags(tmp_path / "data", tmp_path / "pt", task, model, objective=objective, steps=2, batch=5, eval_every=2,
                  micro_batch=3)
    pretrain.main(words)
    first = json.loads((tmp_path / "pt" / "result.json").read_text())
    assert math.isfinite(first["val_score"]) and not first["full_recipe"]
    finetune.main(["--init", str(tmp_path / "pt"), "--data-dir", str(tmp_path / "data"), "--out", str(tmp_path / "ft"),
                   "--device", "cpu", "--steps", "2", "--batch", "5", "--micro-batch", "3"])
    second = json.loads((tmp_path / "ft" / "result.json").read_text())
    score = "r2" if task.startswith("bidmc") else "accuracy"
    assert second["test_examples"] == 7 and (second["objective"], second["start"]) == (objective, "spt")
    scores = {key for key in second if key.startswith(("val_", "test_"))} - {"test_examples"}
    assert scores == {f"val_{score}", f"test_{score}", "test_loss"}
    evaluation = next(r for r in log_of(tmp_path / "ft") if r["kind"] == "eval")
    assert evaluation.keys() == {"kind", "step", "val_loss", f"val_{score}"}
    encoder = weights(tmp_path / "ft" / "best.pt")["backbone.encoder.weight"]
    assert encoder.shape[1 if TASKS[task].kind == "continuous" else 0] == (
        TASKS[task].channels if TASKS[task].kind == "continuous" else 99)


@pytest.mark.parametrize("stage", ["pretrain", "finetune"])
def test_a_fraction_of_the_training_set(stage, tmp_path, monkeypatch):
    """Only the training split shrinks; smaller subsets lie within larger ones; finetuning inherits the share; no other
    example is ever read."""
    monkeypatch.setitem(TASKS, "image", make_up(tmp_path / "data", "image", 16, sizes=(200, 11, 13)))
    whole = data.load("image", "train", tmp_path / "data")
    indices = {}
    for fraction, count in {0.005: 1, 0.01: 2, 0.05: 10, 0.1: 20, 0.5: 100, 1.0: 200}.items():
        part = data.load("image", "train", tmp_path / "data", fraction)
        assert len(part) == count
        x, y, _ = part.batch(range(len(part)))
        at = part.chosen
        assert np.array_equal(x.numpy(), whole.x[at]) and np.array_equal(y.numpy(), whole.y[at])
        indices[fraction] = set(at.tolist())
    ordered = [indices[f] for f in sorted(indices)]
    assert all(small < large for small, large in zip(ordered, ordered[1:]))
    assert indices[0.01] == set(np.random.RandomState(42).permutation(200)[:2].tolist())

    seen = set()
    batch = data.Split.batch
    monkeypatch.setattr(data.Split, "batch", lambda split, index: (
        seen.update(split.chosen[index].tolist()) if split.chosen is not None else None, batch(split, index))[1])
    words = flags(tmp_path / "data", tmp_path / "pt", "image", "rotary", steps=8, batch=3, train_fraction=0.05)
    pretrain.main(words)
    result = json.loads((tmp_path / "pt" / "result.json").read_text())
    if stage == "finetune":
        seen.clear()
        finetune.main(["--init", str(tmp_path / "pt"), "--data-dir", str(tmp_path / "data"), "--out",
                       str(tmp_path / "ft"), "--device", "cpu", "--steps", "8", "--batch", "3"])
        result = json.loads((tmp_path / "ft" / "result.json").read_text())
        assert result["test_examples"] == 13
    assert seen == indices[0.05] and result["train_examples"] == 10
    assert result["changed"]["train_fraction"] == 0.05 and not result["full_recipe"]


def test_kernels_are_kept_for_figure_4(prepared, tmp_path, monkeypatch):
    """Largest |K| over channels, before and after pretraining, of the checkpoint that finetuning takes; the same after a
    stop in between; nothing for a Transformer."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    pretrain.main(flags(prepared, whole, steps=6, eval_every=2, lr=1e-2))
    with np.load(whole / "kernels.npz", allow_pickle=False) as arrays:
        before, after = arrays["before"], arrays["after"]
    config = json.loads((whole / "config.json").read_text())
    length = TASKS["listops_demo"].length
    assert before.shape == after.shape == (config["arch"]["layers"], 2, length)
    backbone = models.Backbone(config["arch"], length, TASKS["listops_demo"].vocab)
    state = weights(whole / "best.pt")
    backbone.load_state_dict({k.removeprefix("backbone."): v for k, v in state.items() if k.startswith("backbone.")})
    with torch.no_grad():
        K = torch.stack([layer.mixer.kernel(length).abs().max(1)[0] for layer in backbone.layers])
    assert np.allclose(after, K.numpy()) and not np.allclose(before, after)
    interrupted(monkeypatch, pretrain, flags(prepared, stopped, steps=6, eval_every=2, lr=1e-2))
    pretrain.main(flags(prepared, stopped, steps=6, eval_every=2, lr=1e-2, resume=True))
    with np.load(stopped / "kernels.npz", allow_pickle=False) as arrays:
        assert np.array_equal(arrays["before"], before) and np.array_equal(arrays["after"], after)
    pretrain.main(flags(prepared, tmp_path / "t", model="transformer"))
    assert not (tmp_path / "t" / "kernels.npz").exists()


def test_sizes_are_inherited_and_named(tmp_path, monkeypatch, quick_s4):
    """--size takes table 9's shape, is not a departure from the recipe, and finetuning follows it."""
    monkeypatch.setitem(TASKS, "image", make_up(tmp_path / "data", "image", 16))
    args = pretrain.parse_args(["--task", "image", "--model", "s4", "--size", "100k"])
    assert args.arch["d"] == 64 and not args.changed and str(args.out) == "runs/image-s4-100k-masked-pretrain-s0"
    pretrain.main(flags(tmp_path / "data", tmp_path / "pt", "image", "s4", size="100k", steps=1, batch=3))
    args = finetune.parse_args(["--init", str(tmp_path / "pt")])
    assert (args.size, args.arch["d"]) == ("100k", 64) and str(args.out) == "runs/image-s4-100k-masked-spt-s0"
    finetune.main(["--init", str(tmp_path / "pt"), "--data-dir", str(tmp_path / "data"), "--out", str(tmp_path / "ft"),
                   "--steps", "1", "--batch", "3", "--device", "cpu"])
    assert json.loads((tmp_path / "ft" / "result.json").read_text())["size"] == "100k"
    assert "was pretrained with --size 100k" in mistake(finetune, ["--init", str(tmp_path / "pt"), "--size", "1m"])
    for words in (["--task", "text", "--size", "1m"], ["--task", "image", "--size", "2m"]):
        assert "there is: image/rotary: 100k 300k 1m 3m 10m; image/s4: 100k" in mistake(pretrain, [*words, "--model", "s4"])


def pythia_files(folder, known, seed=0):
    """The two files of Pythia-70M as a user puts them there, with made weights and a made tokenizer."""
    from test_models import made_neox, write_safetensors
    folder.mkdir(parents=True)
    tensors = made_neox(6, 512, 8, 2048, vocab=max(known.values()) + 1, turned=16, seed=seed)
    for name, tensor in tensors.items():                              # as deep as it is, features should stay finite
        if name.endswith("weight") and tensor.ndim == 2 and "embed" not in name:
            tensors[name] = tensor / 10
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": known, "merges": []}}))
    return tensors


@pytest.mark.parametrize("task", ["listops", "text", "retrieval", "image"])
def test_pythia_from_end_to_end(task, tmp_path, monkeypatch, capsys):
    """Symbols become the checkpoint's tokens, its weights the start, of the pretrained variant only."""
    letters = {"\u0120": 50, "a": 51, "b": 52, "\u00c3\u00a9": 60}      # space, e-acute as byte-level BPE writes them
    known = {"<|endoftext|>": 0, "<|padding|>": 1, "MIN": 40, "MAX": 41, "MED": 42, "SM": 43, "]": 44} | letters
    known |= {str(level): 100 + level for level in range(256)}
    row = make_up(tmp_path / "data", task, 40)
    monkeypatch.setitem(TASKS, task, row)
    if task in ("text", "retrieval"):                                 # the characters that a real set would have found
        path = tmp_path / "data" / task / "meta.json"
        meta = json.loads(path.read_text())
        meta["found"]["symbols"] = " ab\u00e9\u4e00" + "c" * 90
        path.write_text(json.dumps(meta))
    tensors = pythia_files(tmp_path / "data" / "pythia-70m-deduped", known)
    tokens, without = data.pythia_tokens(task, tmp_path / "data" / "pythia-70m-deduped" / "tokenizer.json",
                                         tmp_path / "data")
    if task == "image":
        assert tokens.tolist() == list(range(100, 356)) and not without
        x, _, _ = data.load("image", "train", tmp_path / "data").batch([0, 1])
        symbols = pretrain.inputs_of(row, "pythia_rand", x)
        assert symbols.dtype == torch.int64 and torch.equal(symbols, x[:, :, 0].long()) and len(symbols.unique()) > 20
    elif task == "listops":
        assert tokens.tolist() == [0, 1, 0, 0, *range(100, 110), 40, 41, 42, 43, 44] and not without
    else:
        assert tokens[:8].tolist() == [0, 1, 0, 0, 50, 51, 52, 60] and set(tokens[8:]) == {0} and len(tokens) == 99
        assert without == ["\u4e00"] + ["c"] * 90

    words = ["--task", task, "--data-dir", str(tmp_path / "data"), "--device", "cpu", "--steps", "2", "--batch", "3",
             "--eval-every", "1", "--lr", "0", "--out"]
    finetune.main([*words, str(tmp_path / "pythia"), "--model", "pythia"])
    printed = capsys.readouterr().out
    assert f"the {len(tokens)} rows of this task's symbols" in printed and "fresh: head" in printed
    result = json.loads((tmp_path / "pythia" / "result.json").read_text())
    assert (result["start"], result["objective"], result["init"]) == ("corpus", "causal", None)
    state = weights(tmp_path / "pythia" / "best.pt")                  # at a rate of zero: still the checkpoint's
    assert torch.equal(state["backbone.encoder.weight"], tensors["gpt_neox.embed_in.weight"].float()[tokens])
    assert torch.equal(state["backbone.layers.5.ff.2.bias"],
                       tensors["gpt_neox.layers.5.mlp.dense_4h_to_h.bias"].float())
    finetune.main([*words, str(tmp_path / "rand"), "--model", "pythia_rand"])
    result = json.loads((tmp_path / "rand" / "result.json").read_text())
    assert (result["start"], result["objective"]) == ("scratch", "causal")
    encoder = weights(tmp_path / "rand" / "best.pt")["backbone.encoder.weight"]
    assert abs(encoder.std() / 0.02 - 1) < 0.05


def test_a_resumed_pythia_needs_no_files(tmp_path, monkeypatch):
    """Stopped after a checkpoint, its files gone: --resume ends where an undisturbed run does, and has learned."""
    monkeypatch.setitem(TASKS, "image", make_up(tmp_path / "data", "image", 16))
    files = tmp_path / "data" / "pythia-70m-deduped"
    pythia_files(files, {"<|endoftext|>": 0} | {str(level): 1 + level for level in range(256)})
    words = lambda name: flags(tmp_path / "data", tmp_path / name, "image", "pythia", steps=6, batch=4, eval_every=2,
                               lr=1e-3)
    finetune.main(words("whole"))
    losses = [r["loss"] for r in log_of(tmp_path / "whole") if r["kind"] == "train"]
    assert min(losses[3:]) < losses[0]
    interrupted(monkeypatch, finetune, words("stopped"))
    shutil.rmtree(files)
    monkeypatch.setattr(data, "fetch_pythia", lambda *_: pytest.fail("downloads again"))
    finetune.main([*words("stopped"), "--resume"])
    assert same_weights(weights(tmp_path / "whole" / "last.pt"), weights(tmp_path / "stopped" / "last.pt"))
    with pytest.raises(SystemExit) as end:
        finetune.main([*words("stopped"), "--resume"])
    assert end.value.code == 0


def test_pythia_in_a_place_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "pythia-70m-deduped").write_text("a file, where the folder should be")
    with pytest.raises(UserError, match="choose another --data-dir"):
        data.fetch_pythia(tmp_path / "data")


def test_runs_of_an_older_version(prepared, tmp_path, capsys):
    """Without today's keys in config.json: a finished run is left alone, an unfinished one says why it cannot go on."""
    out = tmp_path / "a"
    pretrain.main(flags(prepared, out))
    config = json.loads((out / "config.json").read_text())
    del config["train_fraction"], config["size"]
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as end:
        pretrain.main(flags(prepared, out, resume=True))
    assert end.value.code == 0 and "nothing to do" in capsys.readouterr().out
    (out / "result.json").unlink()
    assert "a version of this code that knew no size" in mistake(pretrain, flags(prepared, out, resume=True))
    assert finetune.parse_args(["--init", str(out)]).train_fraction is None


def test_a_part_of_the_data_has_a_recipe_of_its_own(tmp_path, monkeypatch, quick_s4):
    """Appendix C.1.4: fixed rates, batches and pretraining steps, also at the whole set; finetuning follows --init. Typed
    from the paper: (task) -> lr, batch and steps of SPT, lr and batch of finetuning, lr from scratch."""
    for task, (lr, batch, steps, ft_lr, ft_batch, scratch_lr) in {
            "text": (5e-4, 8, 40_000, 5e-4, 16, 1e-3), "image": (1e-2, 50, 10_000, 2e-3, 50, 2e-3)}.items():
        for fraction in ("0.005", "1"):
            words = ["--task", task, "--model", "s4", "--train-fraction", fraction]
            first, scratch = pretrain.parse_args(words), finetune.parse_args(words)
            assert (first.lr, first.batch, first.steps, first.changed) == (lr, batch, steps, {})
            assert (scratch.lr, scratch.batch, scratch.changed) == (scratch_lr, ft_batch, {})
            assert first.out.name == f"{task}-s4-masked-pretrain-f{fraction}-s0"
            folder = tmp_path / task / fraction
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps(pretrain.config_of(first)))
            (folder / "result.json").touch()
            second = finetune.parse_args(["--init", str(folder)])
            assert (second.lr, second.batch, second.train_fraction, second.changed) == (
                ft_lr, ft_batch, float(fraction), {})
    # Elsewhere the row stays, and the share is a change to it.
    args = pretrain.parse_args(["--task", "listops", "--model", "s4", "--train-fraction", "0.1"])
    assert (args.batch, args.changed) == (128, {"train_fraction": 0.1})


def test_validation_comes_once_an_epoch():
    """But not on a small share of the data, where an epoch is a few steps."""
    for words, n, every in ((["bidmc_hr", "--steps", "100000"], 5_564, 86), (["image", "--steps", "10000"], 45_000, 1406),
                            (["image", "--steps", "10000", "--train-fraction", "0.005"], 225, 50)):
        args = pretrain.parse_args(["--model", "s4", "--task", *words])
        pretrain.steps_of(args, n)
        assert args.eval_every == every


def test_pythia_without_its_files(tmp_path, monkeypatch):
    """Offline, damaged or foreign files: one line that names the file and what to do."""
    monkeypatch.setitem(TASKS, "image", make_up(tmp_path / "data", "image", 16))
    monkeypatch.setattr(data, "PAUSE", 0.01)
    nowhere = dict(urls=("http://127.0.0.1:9/x",), record="http://127.0.0.1:9/y")
    monkeypatch.setattr(data, "PYTHIA_FILES", tuple(replace(archive, **nowhere) for archive in data.PYTHIA_FILES))
    words = ["--task", "image", "--model", "pythia", "--data-dir", str(tmp_path / "data"), "--out",
             str(tmp_path / "run"), "--batch", "4"]
    with pytest.raises(UserError) as error:
        finetune.main(words)
    folder = tmp_path / "data" / "pythia-70m-deduped"
    line = str(error.value)
    assert "\n" not in line and "no connection" in line and str(folder) in line and "pythia_rand" in line
    assert not (tmp_path / "run").exists()
    known = {"<|endoftext|>": 0} | {str(level): 1 + level for level in range(256)}
    pythia_files(folder.with_name("good"), known)
    for name, content in (("model.safetensors", b"<html>"), ("model.safetensors", None), ("tokenizer.json", b"{}"),
                          ("tokenizer.json", b"\xff\xfe"), ("tokenizer.json", b'{"model": {"vocab": []}}'),
                          ("tokenizer.json", b"[" * 200_000),
                          *(("tokenizer.json", json.dumps({"model": {"vocab": known | {"7": token}}}).encode())
                            for token in (-1, 107.9, "x", True, [1], 2**70, None))):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(folder.with_name("good"), folder)
        if content is None:                                           # whole, but of another model
            from test_models import made_neox, write_safetensors
            write_safetensors(folder / name, made_neox(2, 512, 8, 64, vocab=300, turned=16))
        else:
            (folder / name).write_bytes(content)
        with pytest.raises(UserError) as error:
            finetune.main(words)
        assert str(folder / name) in str(error.value) and "\n" not in str(error.value)
        assert not (tmp_path / "run").exists()
    assert "no recipe for image/pythia" in mistake(pretrain, ["--task", "image", "--model", "pythia"])


def test_r2_is_that_of_the_whole_split_on_any_number_of_processes(tmp_path, monkeypatch):
    row = make_up(tmp_path / "data", "bidmc_hr", 24, sizes=(30, 23, 17))
    monkeypatch.setitem(TASKS, "bidmc_hr", row)
    words = dict(steps=8, batch=4, eval_every=2, lr=3e-3)
    one, two = tmp_path / "one", tmp_path / "two"
    finetune.main(flags(tmp_path / "data", one, "bidmc_hr", "rotary", **words))
    result = json.loads((one / "result.json").read_text())
    evals = [r for r in log_of(one) if r["kind"] == "eval"]
    best = max(evals, key=lambda r: (r["val_r2"], -r["step"]))
    assert (result["best_step"], result["val_r2"]) == (best["step"], best["val_r2"])
    model = models.Classifier(models.Backbone(models.arch("bidmc_hr", "rotary"), 24, None, 2), 1, "max")
    model.load_state_dict(weights(one / "best.pt"))
    for name in ("val", "test"):
        x, y, _ = (split := data.load("bidmc_hr", name, tmp_path / "data")).batch(range(len(split)))
        with torch.no_grad():
            error = (model.eval()(data.normalise(row, x))[:, 0] - y).double().numpy()
        y = y.double().numpy()
        exact = 1 - (error ** 2).sum() / ((y - y.mean()) ** 2).sum()
        assert result[f"{name}_r2"] == pytest.approx(exact, abs=1e-5)
    assert result["test_loss"] == pytest.approx((error ** 2).mean(), rel=1e-5)

    program = tmp_path / "program.py"
    program.write_text(f"""
import sys
from dataclasses import replace
sys.path.insert(0, {str(ROOT)!r})
import data, finetune
data.TASKS["bidmc_hr"] = replace(data.TASKS["bidmc_hr"], length=24)
finetune.main(sys.argv[1:])
""")
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", program,
                           *flags(tmp_path / "data", two, "bidmc_hr", "rotary", **words)],
                          env=ENVIRONMENT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    other = json.loads((two / "result.json").read_text())
    for key in ("val_r2", "test_r2", "test_loss"):
        assert other[key] == pytest.approx(result[key], abs=1e-3), key


def test_equal_targets_do_not_stop_a_run(tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "bidmc_hr", make_up(tmp_path / "data", "bidmc_hr", 24))
    np.save(tmp_path / "data" / "bidmc_hr" / "val_y.npy", np.full(5, 0.3, np.float32))
    finetune.main(flags(tmp_path / "data", tmp_path / "run", "bidmc_hr", "rotary", steps=2, batch=4))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["val_r2"] == 0 and math.isfinite(result["test_r2"]) and result["best_step"] == 2


@pytest.mark.parametrize("stage", [pretrain, finetune])
def test_resuming_drops_the_same_channels(stage, tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "image", make_up(tmp_path / "data", "image", 24))
    monkeypatch.setattr(models, "ARCH", """task model layers d state n_ssm norm place dt_min dt_max dt_lr ssm_lr dropout
                                           image s4 2 16 8 4 layer post 0.001 0.1 main 0.001 0.5""")
    words = dict(steps=6, batch=4, eval_every=6)
    stage.main(flags(tmp_path / "data", tmp_path / "quiet", "image", **words))
    monkeypatch.setattr(pretrain.Log, "SAVE_SECONDS", 0)
    rows, calls = stage.batch_rows, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return rows(*arguments)

    monkeypatch.setattr(stage, "batch_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stage.main(flags(tmp_path / "data", tmp_path / "noisy", "image", **words))
    stage.main(flags(tmp_path / "data", tmp_path / "noisy", "image", resume=True, **words))
    assert log_of(tmp_path / "quiet") == log_of(tmp_path / "noisy")
    assert same_weights(weights(tmp_path / "quiet" / "last.pt"), weights(tmp_path / "noisy" / "last.pt"))


def test_a_split_by_recording_is_another_data_set(tmp_path, monkeypatch):
    monkeypatch.setitem(TASKS, "bidmc_hr", make_up(tmp_path / "data", "bidmc_hr", 24))
    pretrain.main(flags(tmp_path / "data", tmp_path / "pt", "bidmc_hr", "rotary", steps=1, batch=4))
    meta = tmp_path / "data" / "bidmc_hr" / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | dict(grouped=True)))
    assert "may hold what was pretrained on" in mistake(
        finetune, ["--init", str(tmp_path / "pt"), "--data-dir", str(tmp_path / "data")])


# ---- a user's mistakes -----------------------------------------------------------------------------------------------


def mistake(stage, words):
    with pytest.raises(UserError) as error:
        stage.main(words)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_mistakes_are_one_line(prepared, tmp_path):
    good = tmp_path / "good"
    pretrain.main(flags(prepared, good, steps=2, eval_every=2))
    before = {p.name: p.read_bytes() for p in good.iterdir()}

    assert "not empty" in mistake(pretrain, flags(prepared, good))
    assert "no recipe for pathx256/transformer" in mistake(pretrain, flags(prepared, tmp_path / "a", "pathx256", "transformer"))
    assert "no recipe" in mistake(pretrain, flags(prepared, tmp_path / "a", "nothing"))
    assert "--task is missing" in mistake(pretrain, ["--model", "s4"])
    assert "between 0 and 1" in mistake(pretrain, flags(prepared, tmp_path / "a", mask=1.5))
    assert "--batch must be at least 1" in mistake(pretrain, flags(prepared, tmp_path / "a", batch=0))
    assert "was pretrained with --model s4" in mistake(
        finetune, ["--init", str(good), "--model", "rotary", "--data-dir", prepared])
    assert "is not a directory" in mistake(finetune, ["--init", str(tmp_path / "nowhere")])
    assert "is not a directory" in mistake(finetune, ["--init", str(good / "best.pt")])
    assert "is more than the 64 training sequences" in mistake(pretrain, flags(prepared, tmp_path / "a", batch=65))
    for name, value in (("lr", "nan"), ("lr", -1), ("warmup", -1), ("seed", -1), ("seed", 2**64)):
        assert f"--{name} must be" in mistake(pretrain, flags(prepared, tmp_path / "a", **{name: value}))
    assert "no position" in mistake(pretrain, flags(prepared, tmp_path / "a", mask=1e-9))
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "x"):
        assert "cannot write to --out" in mistake(pretrain, flags(prepared, out))
    assert "finetuning run" in mistake(finetune, ["--init", str(_finetuned(prepared, tmp_path))])
    (good / "result.json").unlink()
    assert "was started with steps = 2, now 4" in mistake(pretrain, flags(prepared, good, steps=4, eval_every=2, resume=True))
    assert {p.name: p.read_bytes() for p in good.iterdir()} == {k: v for k, v in before.items() if k != "result.json"}


def test_resume_leaves_foreign_directories_alone(prepared, tmp_path):
    (tmp_path / "best.pt").write_text("precious")
    assert "not a run directory" in mistake(pretrain, flags(prepared, tmp_path, resume=True))
    assert (tmp_path / "best.pt").read_text() == "precious" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name, content, words", [
    ("config.json", "[]", "damaged"), ("config.json", "{", "damaged"), ("config.json", None, "cannot be read"),
    ("best.pt", None, "not a checkpoint"), ("best.pt", "gone", "does not exist"), ("result.json", "{", "damaged")])
def test_damaged_run_directories_are_one_line(name, content, words, prepared, tmp_path):
    pretrain.main(flags(prepared, tmp_path / "run", steps=2, eval_every=2))
    if name != "result.json":
        (tmp_path / "run" / "result.json").unlink()
    path = tmp_path / "run" / name
    path.unlink()
    if content is None:
        path.mkdir() if name == "config.json" else path.write_text("")
    elif content != "gone":
        path.write_text(content)
    assert words in mistake(pretrain, flags(prepared, tmp_path / "run", steps=2, eval_every=2, resume=True))


@pytest.mark.parametrize("log", ["5", '{"a": 1}', "\udcff", ""])
def test_a_damaged_log_does_not_stop_a_run(log, prepared, tmp_path):
    pretrain.main(flags(prepared, tmp_path, steps=4, eval_every=2))
    (tmp_path / "result.json").unlink()
    (tmp_path / "log.jsonl").write_bytes(log.encode("utf-8", "surrogateescape"))
    pretrain.main(flags(prepared, tmp_path, steps=4, eval_every=2, resume=True))
    assert (tmp_path / "result.json").exists()


def test_a_mistake_leaves_nothing_in_the_way(prepared, tmp_path):
    """After an error before the first checkpoint, the corrected command runs, with --resume and, in stage 2, without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "evaluate", lambda *arguments: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
        with pytest.raises(torch.OutOfMemoryError):
            pretrain.main(flags(prepared, tmp_path / "pt"))
    pretrain.main(flags(prepared, tmp_path / "pt", micro_batch=4, resume=True))
    best = (tmp_path / "pt" / "best.pt").rename(tmp_path / "elsewhere")
    words = ["--init", str(tmp_path / "pt"), "--out", str(tmp_path / "ft"), "--data-dir", prepared, "--steps", "2",
             "--batch", "8"]
    assert "does not exist" in mistake(finetune, words)
    best.rename(tmp_path / "pt" / "best.pt")
    finetune.main(words)


def test_one_run_directory_serves_one_process(prepared, tmp_path):
    words = flags(prepared, tmp_path / "run", steps=400, eval_every=400)
    first = subprocess.Popen([sys.executable, ROOT / "pretrain.py", *words], env=ENVIRONMENT, stdout=subprocess.PIPE)
    while b"run directory" not in first.stdout.readline():
        pass
    assert "in use by another process" in mistake(pretrain, words + ["--resume"])
    first.kill()
    first.communicate()


def test_without_git(prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    pretrain.main(flags(prepared, tmp_path / "run", steps=1))
    assert json.loads((tmp_path / "run" / "result.json").read_text())["commit"] == "unknown"


def _finetuned(prepared, tmp_path):
    finetune.main(flags(prepared, tmp_path / "ft", steps=2, eval_every=2))
    return tmp_path / "ft"


@pytest.mark.parametrize("damage", ["truncated", "foreign", "empty", "pickle"])
def test_damaged_checkpoints_are_one_line_and_left_alone(damage, prepared, tmp_path):
    out = tmp_path / "run"
    pretrain.main(flags(prepared, out, steps=2, eval_every=2))
    (out / "result.json").unlink()
    for name in ("last.pt", "best.pt"):
        path = out / name
        if damage == "truncated":
            path.write_bytes(path.read_bytes()[:-500])
        elif damage == "foreign":
            torch.save({"weights": torch.zeros(3)}, path)
        elif damage == "empty":
            path.write_bytes(b"")
        else:
            import pickle
            path.write_bytes(pickle.dumps(SimpleNamespace(model=1)))
    bytes_before = (out / "last.pt").read_bytes()
    assert "not a checkpoint of this project" in mistake(pretrain, flags(prepared, out, steps=2, eval_every=2, resume=True))
    assert "not a checkpoint of this project" in mistake(
        finetune, ["--init", str(out), "--data-dir", prepared, "--out", str(tmp_path / "ft")])
    assert (out / "last.pt").read_bytes() == bytes_before


def test_checkpoint_of_another_architecture(prepared, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    pretrain.main(flags(prepared, one, steps=2, eval_every=2))
    pretrain.main(flags(prepared, two, model="rotary", steps=2, eval_every=2))
    (one / "result.json").unlink()
    shutil.copy(two / "last.pt", one / "last.pt")
    assert "another architecture" in mistake(pretrain, flags(prepared, one, steps=2, eval_every=2, resume=True))
    shutil.copy(two / "best.pt", one / "best.pt")
    assert "another architecture" in mistake(finetune, ["--init", str(one), "--data-dir", prepared, "--out", str(tmp_path / "f")])


def test_a_loss_that_is_not_finite_stops_the_run(prepared, tmp_path, monkeypatch):
    loss, calls = pretrain.spt_loss, []

    def breaks(*arguments):
        calls.extend([1] * torch.is_grad_enabled())
        value, score = loss(*arguments)
        return (value * math.nan if len(calls) == 5 and torch.is_grad_enabled() else value), score

    monkeypatch.setattr(pretrain, "spt_loss", breaks)
    message = mistake(pretrain, flags(prepared, tmp_path, steps=20))
    assert "loss is nan at step 4" in message and "learning rates" in message and "gradient norm" in message
    assert f"last good checkpoint is {tmp_path / 'last.pt'}" in message and not (tmp_path / "result.json").exists()
    for name in ("last.pt", "best.pt"):
        assert all(torch.isfinite(v).all() for v in weights(tmp_path / name).values())


def test_what_ended_a_run_stands_in_its_log(prepared, tmp_path, monkeypatch, capsys):
    """The last record says it, for analyze.py watch, until --resume goes on from the last checkpoint."""
    loss, calls = pretrain.spt_loss, []

    def breaks(*arguments):
        calls.append(torch.is_grad_enabled())
        value, score = loss(*arguments)
        return (value * math.nan if sum(calls) == 5 and calls[-1] else value), score

    monkeypatch.setattr(pretrain, "spt_loss", breaks)
    words = flags(prepared, tmp_path, steps=6, eval_every=2)
    log = lambda: [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    with pytest.raises(SystemExit) as stopped:
        pretrain.guarded(lambda: pretrain.main(words))
    assert stopped.value.code == 2 and capsys.readouterr().err == f"error: {log()[-1]['error']}\n"
    assert "loss is nan at step 4" in log()[-1]["error"]
    with pytest.raises(ZeroDivisionError):
        pretrain.guarded(lambda: 1 / 0)
    assert log()[-1]["error"] == "ZeroDivisionError: division by zero"
    pretrain.guarded(lambda: pretrain.main([*words, "--resume"]))
    assert "error" not in {record["kind"] for record in log()} and log()[-1]["step"] == 6


def test_a_validation_that_is_not_finite_stops_the_run(prepared, tmp_path):
    message = mistake(pretrain, flags(prepared, tmp_path, model="rotary", lr="1e30", steps=1, warmup=1))
    assert "validation at step 1" in message and "nothing was saved yet" in message
    assert not (tmp_path / "best.pt").exists()


def test_exit_code_2_without_traceback(prepared, tmp_path):
    done = run("pretrain.py", ["--task", "pathx256", "--model", "rotary"])
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and done.stderr.startswith("error: no recipe")


def test_finished_runs_are_left_alone(prepared, tmp_path):
    out = tmp_path / "run"
    pretrain.main(flags(prepared, out, steps=2))
    before = (out / "log.jsonl").read_bytes()
    with pytest.raises(SystemExit) as done:
        pretrain.main(flags(prepared, out, steps=2, resume=True))
    assert done.value.code == 0 and (out / "log.jsonl").read_bytes() == before


# ---- recipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [pretrain, finetune])
def test_every_recipe_row(stage, capsys, tmp_path):
    """Each row parses as defaults and shows in --help, has an architecture, and is the only one for its key."""
    rows = finetune.recipes() if stage is finetune else pretrain.rows_of(
        pretrain.PART_RECIPES, pretrain.RECIPES, pretrain.SMALL_RECIPES)
    keys = [tuple(row.get(k) for k in ("task", "model", "objective", "start", "part")) for row in rows]
    assert len(set(keys)) == len(keys)
    for row in rows:
        words = ["--task", row["task"], "--model", row["model"], "--objective", row["objective"]]
        if row.get("start") == "spt":
            (tmp_path / "config.json").write_text(json.dumps({k: row[k] for k in ("task", "model", "objective")}
                                                             | {"arch": models.arch(row["task"], row["model"])}))
            (tmp_path / "result.json").touch()
            words = ["--init", str(tmp_path)]
        words += ["--train-fraction", "0.5"] if row["part"] else []
        args = stage.parse_args(words)
        assert not args.changed and args.arch and row["task"] in TASKS
        for name, cell in row.items():
            value = getattr(args, name)
            assert value is cell or str(value) == cell or value == pytest.approx(float(cell)), (row, name)
        assert (args.steps or args.epochs) and args.schedule in ("constant", "cosine", "step")
        with pytest.raises(SystemExit):
            stage.parse_args(words + ["--help"])
        shown = " ".join(capsys.readouterr().out.split())
        assert f"(default: {row['batch']})" in shown
        if stage is pretrain:
            ratio = TASKS[row["task"]].mask if row["objective"] == "masked" else None
            assert args.mask == ratio and ("position is hidden (default" in shown) == (ratio is not None)
            assert ratio is None or f"that a position is hidden (default: {ratio})" in shown


def test_both_stages_have_the_same_pairs():
    first = read_table(pretrain.RECIPES) + read_table(pretrain.SMALL_RECIPES)
    pairs = [{(row["task"], row["model"], row["objective"]) for row in rows} for rows in (first, finetune.recipes())]
    pythia = {(task, model, "causal") for task in PYTHIA for model in ("pythia", "pythia_rand")}
    pythia |= {(f"{task}_mini", "pythia_rand", "causal") for task in PYTHIA if task != "retrieval"}
    assert pairs[0] | pythia == pairs[1] and not pairs[0] & pythia
    rows = read_table(models.ARCH) + read_table(models.SMALL_ARCH)
    assert {(t, m.removesuffix("_rand")) for t, m, _ in pairs[1]} == {(row["task"], row["model"]) for row in rows}


def test_explicit_flags_win():
    args = pretrain.parse_args(["--task", "pathx", "--model", "s4", "--lr", "0.25", "--batch", "8"])
    assert args.lr == 0.25 and args.changed == {"lr": 0.25} and args.warmup == 5000
    assert pretrain.parse_args(["--task", "pathx", "--model", "transformer", "--objective", "causal"]).lr == 1e-3
    assert pretrain.parse_args(["--task", "pathx", "--model", "s4", "--steps", "6"]).changed == {"steps": 6}
    assert pretrain.parse_args(["--task", "pathx", "--model", "s4", "--micro-batch", "2"]).changed == {"micro_batch": 2}
    assert pretrain.parse_args(["--task", "pathx", "--model", "s4", "--mask", "0.3"]).changed == {"mask": 0.3}
    assert not pretrain.parse_args(["--task", "pathx", "--model", "s4", "--mask", "0.5"]).changed
    assert finetune.parse_args(["--task", "text", "--model", "s4", "--head", "mlp"]).changed == {"head": "mlp"}
    args = pretrain.parse_args(["--task", "listops_demo", "--model", "s4", "--epochs", "2"])
    assert args.steps is None and args.epochs == 2                       # not the row's number of steps
    assert "no meaning" in mistake(pretrain, ["--task", "pathx", "--model", "transformer", "--objective", "causal",
                                              "--mask", "0.5"])
    assert "needs samples" in mistake(pretrain, ["--task", "listops", "--model", "s4", "--loss", "l1"])
    for task in ("sc", "scifar", "bidmc_hr"):
        assert "needs symbols or gray levels" in mistake(pretrain, ["--task", task, "--model", "s4", "--loss", "ce"])
    assert pretrain.parse_args(["--task", "image", "--model", "s4", "--loss", "ce"]).changed == {"loss": "ce"}
    assert "has 1 document; use --head linear" in mistake(
        finetune, ["--task", "text", "--model", "s4", "--head", "pair"])
    assert "has 2 documents; use --head pair" in mistake(
        finetune, ["--task", "retrieval", "--model", "s4", "--head", "linear"])


# Typed from the paper's tables 4, 5 and 6, not from the code: (task, model, objective) -> lr and batch of SPT, of
# finetuning after it, weight decay, pooling of finetuning (None: not in the paper).
PAPER = {("listops", "transformer", "masked"): (1e-3, 128, 1e-4, 64, 0.1, "mean"),
         ("listops", "transformer", "causal"): (5e-4, 32, 5e-4, 128, 0.1, "last"),
         ("listops", "rotary", "masked"): (1e-3, 256, 1e-4, 64, 0.05, "mean"),
         ("listops", "s4", "masked"): (1e-3, 128, 1e-3, 16, 0.05, None),
         ("text", "transformer", "masked"): (5e-4, 32, 1e-4, 64, 0.1, "mean"),
         ("text", "transformer", "causal"): (1e-3, 32, 1e-4, 64, 0.1, "mean"),
         ("text", "rotary", "masked"): (5e-4, 8, 5e-4, 64, 0.1, "mean"),
         ("text", "s4", "masked"): (5e-4, 8, 5e-4, 16, 0.05, None),
         ("retrieval", "transformer", "masked"): (5e-3, 32, 5e-4, 16, 0, "mean"),
         ("retrieval", "transformer", "causal"): (5e-3, 32, 1e-3, 48, 0, "mean"),
         ("retrieval", "rotary", "masked"): (5e-3, 32, 5e-4, 16, 0, "mean"),
         ("retrieval", "s4", "masked"): (5e-4, 8, 5e-4, 256, 0.05, None),
         ("image", "transformer", "masked"): (1e-3, 32, 1e-3, 16, 0, "max"),
         ("image", "transformer", "causal"): (5e-3, 32, 1e-3, 32, 0, "max"),
         ("image", "rotary", "masked"): (1e-3, 32, 1e-3, 64, 0, "mean"),
         ("image", "s4", "masked"): (1e-3, 32, 1e-3, 512, 0.05, None),
         ("pathfinder", "transformer", "masked"): (1e-3, 16, 5e-4, 16, 0, "mean"),
         ("pathfinder", "transformer", "causal"): (1e-3, 128, 1e-3, 256, 0, "mean"),
         ("pathfinder", "rotary", "masked"): (1e-3, 32, 5e-4, 64, 0, "mean"),
         ("pathfinder", "s4", "masked"): (1e-3, 8, 1e-3, 64, 0.03, None),
         ("pathx", "transformer", "masked"): (5e-4, 8, 5e-4, 32, 0, "max"),
         ("pathx", "transformer", "causal"): (1e-3, 8, 5e-4, 256, 0, "max"),
         ("pathx", "rotary", "masked"): (1e-3, 8, 5e-4, 32, 0, "max"),
         ("pathx", "s4", "masked"): (1e-3, 8, 1e-3, 64, 0.05, "max"),
         ("pathx256", "s4", "masked"): (1e-3, 8, 1e-3, 64, 0.05, "max"),
         ("sc", "rotary", "masked"): (1e-3, 8, 1e-3, 256, 0, "max"),
         ("sc", "rotary", "causal"): (1e-3, 32, 1e-3, 256, 0, "max"),
         ("sc", "s4", "masked"): (1e-3, 32, 5e-3, 16, 0.05, None),
         ("sc", "s4", "causal"): (1e-3, 32, 5e-4, 16, 0.05, None),
         ("scifar", "rotary", "masked"): (1e-3, 32, 1e-3, 64, 0, "mean"),
         ("scifar", "s4", "masked"): (1e-3, 32, 5e-4, 64, 0.05, None),
         ("bidmc_hr", "rotary", "masked"): (5e-4, 16, 5e-4, 32, 0, "max"),
         ("bidmc_rr", "rotary", "masked"): (5e-4, 16, 5e-4, 32, 0, "max"),
         ("bidmc_spo2", "rotary", "masked"): (5e-4, 16, 1e-4, 8, 0, "max"),
         ("bidmc_hr", "s4", "masked"): (1e-3, 64, 1e-3, 64, 0.05, None),
         ("bidmc_rr", "s4", "masked"): (1e-3, 64, 1e-3, 64, 0.05, None),
         ("bidmc_spo2", "s4", "masked"): (1e-3, 64, 1e-3, 64, 0.05, None),
         # Table 5. Cells of three numbers (Text S4 + Rand Init + SPT, Image DLR + Rand Init + SPT): FT lr for both.
         ("listops", "s4_rand", "masked"): (1e-3, 32, 1e-3, 16, 0.05, None),
         ("text", "s4_rand", "masked"): (1e-3, 32, 1e-3, 16, 0.05, None),
         ("image", "s4_rand", "masked"): (1e-3, 32, 5e-4, 64, 0.05, None),
         ("pathx", "s4_rand", "masked"): (1e-3, 4, 5e-4, 16, 0.05, "max"),
         ("listops", "dlr", "masked"): (1e-3, 128, 5e-4, 16, 0.05, None),
         ("text", "dlr", "masked"): (5e-4, 8, 1e-3, 16, 0.05, None),
         ("image", "dlr", "masked"): (1e-3, 32, 1e-3, 64, 0.05, None),
         ("pathx", "dlr", "masked"): (5e-4, 8, 5e-4, 64, 0.05, "max"),
         ("listops", "dlr_rand", "masked"): (5e-4, 32, 5e-4, 64, 0.05, None),
         ("text", "dlr_rand", "masked"): (5e-4, 8, 5e-4, 16, 0.05, None),
         ("image", "dlr_rand", "masked"): (1e-3, 32, 1e-3, 64, 0.05, None),
         ("pathx", "dlr_rand", "masked"): (5e-4, 8, 5e-4, 16, 0.05, "max")}
# From scratch, lr and batch: table 6 and appendix C.1.2 for S4, table 5 for the others.
PAPER_SCRATCH = {("bidmc_rr", "s4"): (1e-2, 32), ("bidmc_hr", "s4"): (1e-3, 32), ("bidmc_spo2", "s4"): (1e-2, 32),
                 ("pathx256", "s4"): (1e-4, 16),
                 ("listops", "s4_rand"): (5e-4, 16), ("text", "s4_rand"): (1e-3, 16), ("image", "s4_rand"): (1e-4, 128),
                 ("pathx", "s4_rand"): (5e-4, 16), ("listops", "dlr"): (5e-4, 16), ("text", "dlr"): (5e-4, 16),
                 ("image", "dlr"): (5e-4, 64), ("pathx", "dlr"): (5e-4, 64), ("listops", "dlr_rand"): (1e-4, 16),
                 ("text", "dlr_rand"): (1e-3, 16), ("image", "dlr_rand"): (1e-3, 16), ("pathx", "dlr_rand"): (5e-4, 64)}
# Pythia: lr and batch of finetuning (table 5); then the official configuration's epochs, warm-up, schedule, pool, head.
PYTHIA = {"listops": (5e-5, 64, 200, 200, "cosine", "mean", "linear"),
          "text": (5e-4, 16, 32, 5000, "constant", "last", "linear"),
          "retrieval": (1e-4, 256, 20, 2500, "constant", "mean", "pair"),
          "image": (7e-5, 64, 200, 2000, "constant", "mean", "linear"),
          "pathfinder": (1e-4, 1024, 200, 2500, "constant", "last", "linear")}
# Section 2 and appendix C.3: masking ratios, and the tasks with an L1 loss (table 4).
PAPER_MASK = dict(image=.5, pathfinder=.5, pathx=.5, pathx256=.5, scifar=.5, text=.15, retrieval=.15, listops=.1,
                  sc=.25, bidmc_hr=.25, bidmc_rr=.25, bidmc_spo2=.25)
PAPER_L1 = {"image", "scifar", "sc", "bidmc_hr", "bidmc_rr", "bidmc_spo2"}


# The official configurations, as the experiments' specification lists them (sections 1.1 to 1.10).
# S4: layers d state n_ssm norm place dt_min dt_lr dropout
OFFICIAL_S4 = {
    "listops": (8, 128, 64, 128, "batch", "post", 1e-3, "main", 0), "text": (6, 256, 64, 256, "batch", "pre", 1e-3, "main", 0),
    "retrieval": (6, 256, 64, 256, "batch", "pre", 1e-3, "main", 0),
    "image": (6, 512, 64, 2, "layer", "post", 1e-3, "main", .1), "scifar": (6, 512, 64, 2, "layer", "post", 1e-3, 1e-3, .1),
    "pathfinder": (6, 256, 64, 256, "batch", "pre", 1e-3, 1e-3, 0),
    "pathx": (6, 256, 64, 256, "batch", "pre", 1e-4, 5e-4, 0), "pathx256": (6, 256, 64, 256, "batch", "pre", 1e-4, 5e-4, 0),
    "sc": (6, 128, 64, 64, "batch", "pre", 1e-3, 1e-3, 0),
    **{f"bidmc_{name}": (6, 128, 256, 2, "layer", "pre", 1e-3, 1e-3, 0) for name in ("hr", "rr", "spo2")}}
# Table 4: heads; section 3 and C.3: blocks.
HEADS = {("listops", "transformer"): 8, ("listops", "rotary"): 8, ("text", "transformer"): 8, ("text", "rotary"): 8,
         ("pathfinder", "transformer"): 8, ("pathx", "transformer"): 8}                  # all others: 4
BLOCKS = {"pathx": 4096, "sc": 4000}
# (epochs, warm-up, schedule) of pretraining; then of finetuning, and its head: Transformer, then S4 with SPT
OFFICIAL_RUNS = {
    "listops": ((100, 2000, "constant"), (100, 2000, "constant", "linear"),
                (100, 2000, "constant"), (40, 2000, "constant", "linear")),
    "text": ((32, 5000, "constant"), (65, 2000, "constant", "mlp"), (32, 1000, "constant"), (32, 5000, "cosine", "linear")),
    "retrieval": ((32, 2000, "constant"), (32, 5000, "constant", "pair"),
                  (20, 2500, "constant"), (20, 2500, "constant", "pair")),
    "image": ((50, 2500, "constant"), (200, 2000, "constant", "mlp"),
              (200, 1000, "constant"), (200, 1000, "cosine", "linear")),
    "pathfinder": ((50, 2500, "constant"), (200, 5000, "constant", "linear"),
                   (200, 2500, "constant"), (200, 2500, "constant", "linear")),
    "pathx": ((200, 5000, "constant"), (200, 5000, "constant", "linear"),
              (50, 5000, "constant"), (50, 10_000, "cosine", "linear")),
    "pathx256": (None, None, (50, 5000, "constant"), (50, 10_000, "cosine", "linear")),
    "sc": ((200, 2000, "constant"), (200, 2000, "cosine", "linear"), (40, 1000, "cosine"), (40, 1000, "cosine", "linear")),
    "scifar": ((200, 2000, "constant"), (200, 2000, "constant", "mlp"),
               (200, 2000, "constant"), (200, 1000, "cosine", "linear")),
    **{f"bidmc_{name}": ((500, 500, "constant"), (500, 0, "step", "linear")) * 2 for name in ("hr", "rr", "spo2")}}
# DLR: layers d place; (epochs, warm-up, schedule) of pretraining, of finetuning; 1024 states, LayerNorm, rates 1e-4.
OFFICIAL_DLR = {"listops": (8, 128, "post", (100, 2000, "constant"), (40, 2000, "constant")),
                "text": (6, 256, "pre", (32, 1000, "constant"), (32, 2000, "constant")),
                "image": (6, 512, "pre", (200, 1000, "constant"), (200, 1000, "constant")),
                "pathx": (6, 256, "pre", (50, 5000, "constant"), (50, 5000, "cosine"))}
SCRATCH_S4 = {"listops": (1e-2, 50), "text": (1e-2, 16), "retrieval": (1e-2, 64), "image": (1e-2, 50), "scifar": (1e-2, 50),
              "pathfinder": (4e-3, 64), "pathx": (5e-4, 16), "sc": (1e-2, 16)}


def test_sizes_and_schedules_are_the_official_ones():
    first = {(r["task"], r["model"], r["objective"]): r for r in read_table(pretrain.RECIPES)}
    second = {(r["task"], r["model"], r["objective"], r["start"]): r for r in finetune.recipes() if not r["part"]}
    for task, model, objective in PAPER:
        sizes, s4 = arch(task, model), model in ("s4", "s4_rand")
        run = lambda row: (int(row["epochs"]), int(row["warmup"]), row["schedule"])
        if model in ("dlr", "dlr_rand"):
            layers, d, place, pt, ft = OFFICIAL_DLR[task]
            assert sizes == dict(task=task, model=model, layers=layers, d=d, state=1024, norm="layer", place=place,
                                 dt_min=1e-4, dt_max=1e-3, ssm_lr=1e-4)
            assert run(first[task, model, objective]) == pt
            assert all(run(second[task, model, objective, start]) == ft for start in ("spt", "scratch"))
            continue
        if s4:
            names = ("layers", "d", "state", "n_ssm", "norm", "place", "dt_min", "dt_lr")
            assert (*(sizes[name] for name in names), sizes.get("dropout", 0)) == OFFICIAL_S4[task], task
            if model == "s4" and task in SCRATCH_S4:
                row = second[task, model, objective, "scratch"]
                assert (float(row["lr"]), int(row["batch"])) == SCRATCH_S4[task], task
        else:
            assert (sizes["heads"], sizes.get("block")) == (HEADS.get((task, model), 4), BLOCKS.get(task)), (task, model)
        pt, ft = OFFICIAL_RUNS[task][2:] if s4 else OFFICIAL_RUNS[task][:2]
        if (task, model) == ("image", "rotary"):                      # no such configuration: sCIFAR's
            pt = OFFICIAL_RUNS["scifar"][0]
        assert run(first[task, model, objective]) == pt, (task, model)
        row = second[task, model, objective, "spt"]
        assert (*run(row), row["head"]) == ft, (task, model)
        assert model != "s4_rand" or run(second[task, model, objective, "scratch"]) == run(row)
    for task, (lr, batch, *official) in PYTHIA.items():
        for model, start in (("pythia", "corpus"), ("pythia_rand", "scratch")):
            row = second[task, model, "causal", start]
            assert (float(row["lr"]), int(row["batch"]), float(row["wd"])) == (lr, batch, 0)
            assert [*run(row), row["pool"], row["head"]] == official


def test_recipes_are_the_papers():
    ours = {(r["task"], r["model"], r["objective"]): r for r in read_table(pretrain.RECIPES)}
    starts = {(r["task"], r["model"], r["objective"], r["start"]): r for r in finetune.recipes() if not r["part"]}
    assert ours.keys() == PAPER.keys()
    for key, (pt_lr, pt_batch, ft_lr, ft_batch, decay, pool) in PAPER.items():
        first, second, scratch = ours[key], starts[*key, "spt"], starts[*key, "scratch"]
        assert (float(first["lr"]), int(first["batch"]), float(first["wd"])) == (pt_lr, pt_batch, decay), key
        assert (float(second["lr"]), int(second["batch"]), float(second["wd"])) == (ft_lr, ft_batch, decay), key
        assert pool in (None, second["pool"]), key
        assert first["loss"] == ("l1" if key[0] in PAPER_L1 else "ce") and TASKS[key[0]].mask == PAPER_MASK[key[0]]
        assert (scratch["pool"], scratch["head"]) == (second["pool"], second["head"])
        if key[1] in ("transformer", "rotary"):
            assert {**scratch, "start": "spt"} == second
        elif key[:2] in PAPER_SCRATCH:
            assert (float(scratch["lr"]), int(scratch["batch"])) == PAPER_SCRATCH[key[:2]], key


@pytest.mark.parametrize("stage, recipe", [
    *(pytest.param("pretrain", row, id=f"pretrain-{row['task']}-{row['model']}-{row['objective']}")
      for row in read_table(pretrain.RECIPES) + read_table(pretrain.SMALL_RECIPES)),
    *(pytest.param("finetune", row, id=f"finetune-{row['task']}-{row['model']}-{row['objective']}")
      for row in finetune.recipes() if row["start"] != "spt" and not row["part"])])
def test_every_recipe_makes_a_step(stage, recipe, quick_s4):
    """The real architecture at a cut length: finite loss, a gradient on every parameter."""
    row, found = cut(recipe["task"], 48)
    row = replace(row, **found)
    sizes = models.arch(recipe["task"], recipe["model"])
    sizes |= {"block": 16} if "block" in sizes else {}
    causal, tokens = recipe["objective"] == "causal", row.kind == "tokens"
    torch.manual_seed(0)
    x, y, lengths = data.Split(row, **noise(row, 3)).batch(range(3))
    backbone = models.Backbone(sizes, row.length, pretrain.symbols_of(row, recipe["model"]), row.channels,
                               mask_channel=stage == "pretrain" and not causal and not tokens, causal=causal)
    if stage == "pretrain":
        model = models.Denoiser(backbone, row.vocab if recipe["loss"] == "ce" else row.channels)
        rows = SimpleNamespace(whole=np.arange(3), mine=slice(3))
        args = SimpleNamespace(objective=recipe["objective"], mask=0.5)
        inputs, targets, where = pretrain.pretext(row, args, x, lengths, rows, 0)
        loss, _ = pretrain.spt_loss(row, model(inputs, lengths, where), targets, where, recipe["loss"])
    else:
        model = models.Classifier(backbone, row.classes or 1, recipe["pool"], recipe["head"])
        loss = finetune.supervised_loss(row, model(pretrain.inputs_of(row, recipe["model"], x), lengths), y)
    loss.backward()
    assert math.isfinite(loss.item())
    for name, p in model.named_parameters():
        assert p.grad is not None and torch.isfinite(p.grad).all() and p.grad.abs().sum() > 0, name
