"""Missing samples are hidden positions: in the input, in the losses, in both stages, in predictions
and in exports."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import baseline
import data
import finetune
import predict
import pretrain
import tasks  # noqa: F401, TASKS is filled
from data import Batch
from files import UserError
from models import Backbone, config
from recipes import arch

N, L, C = 40, 12, 2


def arrays(seed=0):
    """x (n, l, channels): positions without any value, positions without one of both, a late start,
    unequal lengths."""
    rng = np.random.default_rng(seed)
    x = np.sin(np.arange(L)[:, None] * np.array([0.4, 0.9]) + 6 * rng.random((N, 1, C))) + 5
    x[rng.random((N, L)) < 0.2] = np.nan
    x[rng.random((N, L, C)) < 0.1] = np.nan
    x[3, :4] = np.nan
    x[::5, 9:] = np.nan
    return x, np.arange(N) % 2


@pytest.fixture
def opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = arrays()
    np.savez("gaps.npz", x=x, y=y)
    return data.open_task("file:gaps.npz", "data")


def test_what_is_missing_stays_missing_and_is_said(opened, capsys):
    """Normalised by what is there; a series ends where no value follows."""
    task, train, *_ = opened
    x, _ = arrays()
    assert task.gaps and task.ragged
    lengths = [L - int(np.isnan(one).all(1)[::-1].argmin()) for one in x]
    cut = [one[:length] for one, length in zip(x, lengths)]
    missing = [int(np.isnan(one).sum()) for one in cut]
    told = f"{sum(missing):,} values in {np.count_nonzero(missing)} of {N} sequences are missing"
    there = np.concatenate([cut[row] for row in train.rows])
    assert np.allclose(task.mean, np.nanmean(there, 0)) and np.allclose(
        task.std, np.nanstd(there, 0)
    )
    batch = train.batch(np.arange(len(train)))
    for i, row in enumerate(train.rows):
        assert batch.lengths[i] == lengths[row]
        back = batch.samples[i, : lengths[row]].double().numpy() * task.std + task.mean
        assert np.allclose(back, cut[row], atol=1e-5, equal_nan=True)
    data.prepare("file:gaps.npz", "again")
    assert told in capsys.readouterr().out


def oracle(batch, hidden, prediction, causal):
    """The loss in float64, position by position and channel by channel: a mean over the channels
    that are there."""
    total = count = 0
    for i, length in enumerate(batch.lengths.tolist()):
        for t in range(length - causal):
            target = batch.samples[i, t + causal].double()
            known = ~target.isnan()
            if known.any() and (causal or hidden[i, t]):
                total += (prediction[i, t].double() - target)[known].abs().mean()
                count += 1
    return float(total), count


@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_what_is_missing_has_no_loss(objective, opened):
    _, train, *_ = opened
    batch, torch_rng = train.batch(np.arange(len(train))), torch.Generator().manual_seed(0)
    shape = batch.samples.shape
    asked = torch.rand(shape[:2], generator=torch_rng) < 0.5
    prediction = torch.randn(shape, generator=torch_rng)
    if objective == "masked":
        inputs, targets, hidden = pretrain.corrupt(batch, asked, "l1")
        assert inputs.isnan().all(-1)[asked & hidden].all()
    else:
        inputs, targets, hidden = pretrain.shift(batch, "l1")
    loss, score = pretrain.spt_loss(SimpleNamespace(loss="l1"), prediction[hidden], targets, hidden)
    wanted, count = oracle(batch, asked, prediction, int(objective == "causal"))
    assert (
        int(hidden.sum()) == count and float(loss) == pytest.approx(wanted, rel=1e-5) and score < 0
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("model", ["s4", "rotary", "mamba", "lstm"])
def test_the_backbone_reads_0_and_a_mark(model, causal, opened):
    """The mark is the share of channels that are missing. Nothing else of a missing value reaches
    the model, and no gradient is lost to it."""
    task, train, *_ = opened
    backbone = Backbone(
        config(
            arch("file:x", model, d=8, layers=1) or arch("text_demo", model, d=8, layers=1),
            task,
            causal,
            True,
        )
    )
    batch = train.batch(np.arange(8))
    seen = []
    backbone.encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    features = backbone(backbone.inputs(batch), batch.lengths)
    gone = batch.samples.isnan()
    assert torch.equal(seen[0][..., :C], torch.where(gone, torch.zeros(()), batch.samples))
    assert torch.equal(seen[0][..., C], gone.float().mean(-1))
    features.square().sum().backward()
    assert features.isfinite().all() and all(
        p.grad.isfinite().all() for p in backbone.parameters() if p.grad is not None
    )


@pytest.mark.parametrize("objective", ["masked", "causal"])
@pytest.mark.parametrize("start", ["scratch", "spt", "joint"])
def test_from_gaps_to_predictions_and_an_export(start, objective, opened, tmp_path, capsys):
    words = [
        "--task",
        "file:gaps.npz",
        "--model",
        "s4",
        "--arch",
        "d=8,layers=1",
        "--steps",
        "3",
        "--batch",
        "6",
        "--warmup",
        "1",
        "--eval-every",
        "3",
        "--objective",
        objective,
    ]
    if start == "spt":
        pretrain.main([*words, "--out", "first"])
        assert json.loads((tmp_path / "first" / "result.json").read_text())["val_score"] < 0
    finetune.main(
        [
            *(words[6:12] + ["--init", "first"] if start == "spt" else words),
            "--out",
            "run",
            *["--joint", "1"] * (start == "joint"),
        ]
    )
    saved = torch.load("run/best.pt", weights_only=True)["model"]
    assert saved["backbone.encoder.weight"].shape[1] == C + 1 and all(
        one.isfinite().all() for one in saved.values()
    )
    model = predict.load("run")
    x, _ = arrays()
    kept = np.load("run/predictions.npz")
    _, _, _, test = data.open_task("file:gaps.npz", "data")
    names, probabilities = model(x[test.rows])
    assert [int(name) for name in names] == kept["prediction"].tolist() and np.isfinite(
        probabilities
    ).all()
    predict.main(["run", "--export", "run.pt2"])
    exported = torch.export.load("run.pt2").module()
    for row, line in zip(test.rows, probabilities):
        length = torch.tensor([L - int(np.isnan(x[row]).all(1)[::-1].argmin())])
        assert np.allclose(
            exported(torch.from_numpy(x[row][None]).float(), length)[0].detach(), line, atol=1e-4
        )


def test_a_gap_that_training_never_saw_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = np.random.default_rng(0).normal(size=(N, L, C)), np.arange(N) % 2
    np.savez("whole.npz", x=x, y=y)
    finetune.main(
        [
            "--task",
            "file:whole.npz",
            "--model",
            "s4",
            "--arch",
            "d=8,layers=1",
            "--steps",
            "1",
            "--batch",
            "6",
            "--warmup",
            "1",
            "--out",
            "run",
        ]
    )
    x[2, 4, 1] = np.nan
    with pytest.raises(UserError, match="example 2: a value is missing, which training never saw"):
        predict.load("run")(x)


def test_the_linear_model_reads_the_mean(opened):
    task, train, *_ = opened
    found = baseline.convolved(task, train, 60)
    assert np.isfinite(found).all()
    filled = train.batch(np.arange(len(train)))
    assert Batch._fields == filled._fields and filled.samples.isnan().any()
