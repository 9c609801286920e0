"""Missing samples are hidden positions: in losses, inputs, training, predictions, exports."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import call, made_set, result_of

import baseline
import data
import predict
import pretrain
from models import Backbone, config
from recipes import arch


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A set with positions without one channel, or without any, and a late start."""
    monkeypatch.chdir(tmp_path)
    made = made_set(tmp_path, "gaps")
    made.x[np.random.default_rng(0).random((60, 9)) < 0.2] = np.nan
    made.x[3, :4] = made.x[::5, 6:] = np.nan
    np.savez(made.path, x=made.x, y=made.y)
    return made


def oracle(batch, hidden, prediction, causal):
    """The loss in float64, position by position, over the channels that exist; and its count."""
    losses = []
    for i, length in enumerate(batch.lengths.tolist()):
        for t in range(length - causal):
            target = batch.samples[i, t + causal].double()
            present = ~target.isnan()
            if present.any() and (causal or hidden[i, t]):
                losses.append((prediction[i, t].double() - target)[present].abs().mean())
    return float(sum(losses)), len(losses)


@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_what_is_missing_has_no_loss(objective, made):
    _, train, *_ = data.open_task(made.task)
    batch, rng = train.batch(np.arange(len(train))), torch.Generator().manual_seed(0)
    asked = torch.rand(batch.samples.shape[:2], generator=rng) < 0.5
    prediction = torch.randn(batch.samples.shape, generator=rng)
    if objective == "masked":
        inputs, targets, hidden = pretrain.corrupt(batch, asked, "l1")
        assert inputs.isnan().all(-1)[asked & hidden].all()
    else:
        inputs, targets, hidden = pretrain.shift(batch, "l1")
    loss, score = pretrain.spt_loss(SimpleNamespace(loss="l1"), prediction[hidden], targets, hidden)
    exact, count = oracle(batch, asked, prediction, int(objective == "causal"))
    assert int(hidden.sum()) == count and float(loss) == pytest.approx(exact, rel=1e-5)
    assert score < 0


@pytest.mark.parametrize("model", ["s4", "rotary", "mamba", "lstm"])
def test_the_backbone_reads_0_and_the_share_of_channels_that_are_missing(model, made):
    """Nothing else of a missing value reaches the model, and no gradient is lost to it."""
    task, train, *_ = data.open_task(made.task)
    batch = train.batch(np.arange(8))
    gone = batch.samples.isnan()
    for causal in False, True:
        sizes = arch("file:x", model, d=8, layers=1)
        backbone = Backbone(config(sizes, task, causal, True))
        seen = []
        backbone.encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        features = backbone(backbone.inputs(batch), batch.lengths)
        assert torch.equal(seen[0][..., :2], batch.samples.nan_to_num()), causal
        assert torch.equal(seen[0][..., 2], gone.float().mean(-1)), causal
        features.square().sum().backward()
        gradients = [p.grad for p in backbone.parameters() if p.grad is not None]
        assert all(values.isfinite().all() for values in (features, *gradients)), causal


def test_gaps_go_from_a_file_to_predictions_and_an_export(made, tmp_path):
    small = ["--batch", "8", "--steps", "2", "--warmup", "1", "--eval-every", "2"]
    new = ["--task", made.task, "--model", "s4", "--arch", "d=8,layers=1", *small]
    for words in (
        ["pretrain.py", *new, "--out", "first"],
        ["finetune.py", "--init", "first", *small, "--out", "spt"],
        ["finetune.py", *new, "--joint", 1, "--objective", "causal", "--out", "joint"],
        ["predict.py", "spt", "--export", "run.pt2"],
    ):
        done = call(*words)
        assert done.returncode == 0, (words, done.stderr)
    assert result_of(tmp_path / "first")["val_score"] < 0
    *_, test = data.open_task(made.task)
    for run in "spt", "joint":
        names, probabilities = predict.load(run)(made.x[test.rows])
        kept = np.load(f"{run}/predictions.npz")["prediction"].astype(int)
        assert "".join(names) == "".join("abc"[label] for label in kept), run
    exported = torch.export.load("run.pt2").module()
    for series, exact in zip(made.x[test.rows], predict.load("spt")(made.x[test.rows])[1]):
        length = 1 + np.flatnonzero(~np.isnan(series).all(1))[-1:]
        outputs = exported(torch.from_numpy(series[None]).float(), torch.from_numpy(length))
        assert np.allclose(outputs[0].detach(), exact, atol=1e-4)


def test_the_linear_model_reads_the_mean_where_samples_are_missing(made):
    task, train, *_ = data.open_task(made.task)
    filled = replace(train, x=np.where(np.isnan(train.x), np.float32(task.mean), train.x))
    features, exact = (baseline.convolved(task, split, 60) for split in (train, filled))
    assert np.isnan(train.x).any() and np.allclose(features, exact, atol=1e-3)
