"""pretrain.py, the objective: what is hidden, what the model reads instead, what it must predict,
and the loss."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import noise

from data import Batch
from engine.feed import drawing
from pretrain import EVAL_KEY, OBJECTIVES, constant_score, corrupt, hide, shift, spt_loss
from tasks import EOS, MASK, PAD


@pytest.mark.parametrize(
    "name, loss",
    [("listops", "ce"), ("pathfinder_demo", "ce"), ("pathfinder_demo", "l1"), ("scifar", "l1")],
)
def test_a_score_stands_beside_that_of_a_constant(name, loss):
    """The most common symbol's share, or the mean's error, over all real positions of the first
    thousand examples."""
    _, split = noise(name, 30, 1_100)
    values = [x for i in range(1_000) for x in sequence(split, i, loss)]
    expected = (
        np.bincount(values).max() / len(values) if loss == "ce" else -np.square(values).mean()
    )
    assert float(constant_score(split, loss).split()[-1]) == pytest.approx(expected, abs=1e-4)


def sequence(split, i, loss):
    """The values of an example that have a loss, without padding."""
    if split.offsets is not None:
        return split.x[split.offsets[i] : split.offsets[i + 1]]
    x, task = split.x[i].reshape(-1, split.task.channels), split.task
    return x[:, 0] if loss == "ce" else ((x / task.scale - task.mean) / task.std).flatten()


def test_hide_is_a_function_of_its_key_and_hides_each_position_by_itself():
    hidden = hide((400, 500), 0.15, 3, 9)
    assert hidden.dtype == bool and abs(hidden.mean() - 0.15) < 0.003
    assert np.array_equal(hidden, hide((400, 500), 0.15, 3, 9))
    for key in ((3, 10), (4, 9), (9, 3), (3, EVAL_KEY, 9)):
        # independent of each other
        assert abs((hidden & hide((400, 500), 0.15, *key)).mean() - 0.15**2) < 0.003
    assert abs(hidden.sum(1).std() / math.sqrt(500 * 0.15 * 0.85) - 1) < 0.15  # not an exact count
    assert abs((hidden[:, 1:] & hidden[:, :-1]).mean() - 0.15**2) < 0.003  # nor spans


def test_hidden_symbols_become_the_mask_and_padding_is_never_hidden():
    _, split = noise("listops_mini", 60, 8)
    batch = split.batch(range(8))
    asked = torch.from_numpy(hide(batch.symbols.shape, 0.5, 1))
    inputs, targets, hidden = corrupt(batch, asked, "ce")
    real = torch.arange(batch.symbols.shape[1]) < batch.lengths[:, None]
    assert torch.equal(batch.symbols != PAD, real) and not real.all()
    assert torch.equal(hidden, asked & real)
    assert (inputs[hidden] == MASK).all() and torch.equal(inputs[~hidden], batch.symbols[~hidden])
    # <eos> may be hidden
    assert torch.equal(targets, batch.symbols) and (targets[hidden] == EOS).any()


@pytest.mark.parametrize(
    "name, loss",
    [
        ("image", "l1"),
        ("pathfinder_demo", "ce"),
        ("pathfinder_demo", "l1"),
        ("sc", "l1"),
        ("scifar", "l1"),
        ("bidmc_rr", "l1"),
    ],
)
def test_all_channels_of_a_hidden_sample_are_missing(name, loss):
    """uint8, int16 and float32 samples, with one to three channels. The backbone reads 0 and a mark
    (test_gaps.py)."""
    task, split = noise(name, 60, 3)
    batch = split.batch(range(3))
    hidden = torch.from_numpy(hide((3, 60), 0.4, 7))
    inputs, targets, same = corrupt(batch, hidden, loss)
    mean, std = (np.broadcast_to(value, task.channels) for value in (task.mean, task.std))
    exact = torch.from_numpy((split.x.astype(np.float64) / task.scale - mean) / std)
    assert torch.equal(same, hidden) and inputs.shape == (3, 60, task.channels)
    assert torch.equal(inputs.isnan(), hidden[..., None].expand_as(inputs))
    assert torch.allclose(inputs[~hidden].double(), exact[~hidden], atol=1e-4)
    levels = torch.from_numpy(split.x[..., 0])  # (3, 60) gray, under ce
    assert torch.allclose(targets.double(), levels.double() if loss == "ce" else exact, atol=1e-4)


def test_causal_targets_are_the_next_position():
    symbols = torch.tensor([[5, 6, 7, 8, 9, 3], [10, 11, 3, 1, 1, 1]])
    batch = Batch(symbols, None, torch.tensor([6, 3]), torch.zeros(2))
    inputs, targets, predicted = shift(batch, "ce")
    assert torch.equal(inputs, symbols)
    assert predicted.tolist() == [[True] * 5 + [False], [True, True] + [False] * 4]
    assert targets[predicted].tolist() == [6, 7, 8, 9, 3, 11, 3]
    batch = noise("image", 20, 2)[1].batch(range(2))
    for loss, values in (("ce", batch.symbols), ("l1", batch.samples)):
        inputs, targets, predicted = shift(batch, loss)
        assert torch.equal(inputs, batch.samples)  # no indicator channel: nothing is hidden
        assert torch.equal(targets[:, :-1], values[:, 1:]) and predicted.sum(1).tolist() == [19, 19]


@pytest.mark.parametrize("name", ["retrieval", "listops_mini", "image"])
@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_the_pretext_does_not_depend_on_how_a_batch_is_divided(name, objective):
    """Three processes with shares of a batch, which are padded less, hide what one process
    would."""
    task, split = noise(name, 50, 7)
    args = SimpleNamespace(objective=objective, mask=0.4, loss="l1" if name == "image" else "ce")
    rows, k = np.array([3, 0, 6, 5, 1, 4, 2]), task.documents

    def pretext(mine, *key):
        batch = split.batch(rows[mine])
        return OBJECTIVES[objective].pretext(args, batch, drawing(task, batch, rows, mine, *key))

    whole = pretext(slice(0, 7), 5, 11)
    for mine in (slice(0, 2), slice(2, 6), slice(6, 7)):
        inputs, targets, hidden = pretext(mine, 5, 11)
        all_inputs, all_targets, all_hidden = (
            value[k * mine.start : k * mine.stop] for value in whole
        )
        l = hidden.shape[1]
        assert torch.equal(all_hidden[:, :l], hidden) and not all_hidden[:, l:].any()
        assert torch.allclose(all_inputs[:, :l], inputs, 0, 0, equal_nan=True) and torch.equal(
            all_targets[:, :l][hidden], targets[hidden]
        )
    next_step = pretext(slice(0, 7), 5, 12)
    assert torch.equal(next_step[2], whole[2]) == (objective == "causal")
    if k == 2 and objective == "masked":  # each document of a pair has a mask of its own
        one, two = whole[2].unflatten(0, (7, 2)).unbind(1)
        both = torch.arange(one.shape[1]) < split.batch(rows).lengths.view(7, 2).amin(
            1, keepdim=True
        )
        assert (one != two)[both].any()


@pytest.mark.parametrize("loss", ["ce", "l1"])
def test_the_loss_is_its_formula_over_hidden_positions_only(loss):
    """Against float64; prediction has rows for hidden positions only."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.rand(3, 20, generator=generator) < 0.4
    m = int(hidden.sum())
    prediction = torch.randn(m, 7 if loss == "ce" else 2, generator=generator)
    if loss == "ce":
        targets = torch.randint(7, (3, 20), generator=generator)
        z, y = prediction.double().numpy(), targets[hidden].numpy()
        exact = (np.log(np.exp(z).sum(1)) - z[np.arange(m), y]).sum()
        score = (z.argmax(1) == y).sum()
    else:
        targets = torch.randn(3, 20, 2, generator=generator)
        error = prediction.double().numpy() - targets.double().numpy()[hidden.numpy()]
        exact, score = np.abs(error).mean(1).sum(), -(error**2).mean(1).sum()
    ours = spt_loss(SimpleNamespace(loss=loss), prediction, targets, hidden)
    assert [v.item() for v in ours] == pytest.approx([exact, score], rel=1e-5)
