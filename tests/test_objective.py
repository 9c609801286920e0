"""The objective of pretraining: what is hidden, what the model reads and predicts, the loss."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import noise

from engine.feed import drawing
from pretrain import EVAL_KEY, OBJECTIVES, constant_score, corrupt, hide, shift, spt_loss
from tasks import EOS, MASK, PAD

# symbols with padding; uint8, int16 and float32 samples of one to three channels
KINDS = "listops_mini ce, pathfinder_demo ce, pathfinder_demo l1, sc l1, scifar l1, bidmc_rr l1"
every_kind = pytest.mark.parametrize("name, loss", [row.split() for row in KINDS.split(",")])


def sequences(split, loss):
    """Return the values of each example that have a loss, in float64: (l,) or (l, channels)."""
    if split.offsets is not None:
        return np.split(split.x, split.offsets[1:-1])
    task = split.task
    levels = split.x.reshape(len(split.x), -1, task.channels).astype(np.float64)
    return levels[..., 0] if loss == "ce" else (levels / task.scale - task.mean) / task.std


@every_kind
def test_a_score_stands_beside_that_of_a_constant(name, loss):
    """The most common symbol's share, or the mean's error, over a thousand examples."""
    split = noise(name, 30, 1_100)[1]
    values = np.concatenate(sequences(split, loss)[:1_000])
    share = np.unique(values, return_counts=True)[1].max() / len(values)
    exact = share if loss == "ce" else -np.square(values).mean()
    assert float(constant_score(split, loss).split()[-1]) == pytest.approx(exact, abs=1e-4)


def test_hide_is_a_function_of_its_key_and_hides_each_position_by_itself():
    hidden = hide((400, 500), 0.15, 3, 9)
    assert hidden.dtype == bool and abs(hidden.mean() - 0.15) < 0.003
    assert np.array_equal(hidden, hide((400, 500), 0.15, 3, 9))
    for key in ((3, 10), (4, 9), (9, 3), (3, EVAL_KEY, 9)):
        both = (hidden & hide((400, 500), 0.15, *key)).mean()
        assert abs(both - 0.15**2) < 0.003, f"{key} depends on (3, 9)"
    assert abs(hidden.sum(1).std() / math.sqrt(500 * 0.15 * 0.85) - 1) < 0.15  # not an exact count
    assert abs((hidden[:, 1:] & hidden[:, :-1]).mean() - 0.15**2) < 0.003  # nor spans


@every_kind
def test_what_is_hidden_is_missing_and_all_else_as_it_was(name, loss):
    """Padding is never hidden; <eos> may be. The backbone reads 0 and a mark (test_gaps.py)."""
    task, split = noise(name, 60, 8)
    batch = split.batch(range(8))
    given = batch.symbols if task.channels is None else batch.samples
    asked = torch.from_numpy(hide(given.shape[:2], 0.4, 7))
    inputs, targets, hidden = corrupt(batch, asked, loss)
    missing = inputs == MASK if task.channels is None else inputs.isnan()
    assert torch.equal(inputs[~hidden], given[~hidden])
    for i, values in enumerate(sequences(split, loss)):
        n, exact = len(values), torch.from_numpy(values).double()
        assert torch.allclose(targets[i, :n].double(), exact, atol=1e-4), f"targets of {i}"
        assert torch.equal(hidden[i, :n], asked[i, :n]) and not hidden[i, n:].any()
        mark = hidden[i] if task.channels is None else hidden[i, :, None].expand_as(missing[i])
        assert torch.equal(missing[i], mark), f"what example {i} lacks"
    if task.channels is None:
        assert (inputs == PAD).any() and (targets[hidden] == EOS).any()


@every_kind
def test_causal_targets_are_the_next_position(name, loss):
    """The last position has none. Nothing is hidden, so there is no mark."""
    task, split = noise(name, 20, 5)
    batch = split.batch(range(5))
    inputs, targets, predicted = shift(batch, loss)
    assert torch.equal(inputs, batch.symbols if task.channels is None else batch.samples)
    for i, values in enumerate(sequences(split, loss)):
        n, exact = len(values) - 1, torch.from_numpy(values[1:]).double()
        assert torch.allclose(targets[i, :n].double(), exact, atol=1e-4), f"targets of {i}"
        assert predicted[i].nonzero()[:, 0].tolist() == [*range(n)]


@pytest.mark.parametrize("name", ["retrieval", "listops_mini", "image"])
@pytest.mark.parametrize("objective", ["masked", "causal"])
def test_the_pretext_does_not_depend_on_how_a_batch_is_divided(name, objective):
    """Three processes with shares of a batch, which are padded less, hide what one would."""
    task, split = noise(name, 50, 7)
    args = SimpleNamespace(objective=objective, mask=0.4, loss="l1" if name == "image" else "ce")
    rows, k = np.array([3, 0, 6, 5, 1, 4, 2]), task.documents

    def pretext(mine, *key):
        batch = split.batch(rows[mine])
        return OBJECTIVES[objective].pretext(args, batch, drawing(task, batch, rows, mine, *key))

    whole = pretext(slice(0, 7), 5, 11)
    for mine in (slice(0, 2), slice(2, 6), slice(6, 7)):
        inputs, targets, hidden = pretext(mine, 5, 11)
        l = hidden.shape[1]
        its = [value[k * mine.start : k * mine.stop] for value in whole]
        assert torch.equal(its[2][:, :l], hidden) and not its[2][:, l:].any(), mine
        assert torch.allclose(its[0][:, :l], inputs, 0, 0, equal_nan=True), mine
        assert torch.equal(its[1][:, :l][hidden], targets[hidden]), mine
    next_step = pretext(slice(0, 7), 5, 12)
    assert torch.equal(next_step[2], whole[2]) == (objective == "causal")
    if k == 2 and objective == "masked":  # each document of a pair has a mask of its own
        first, second = whole[2].unflatten(0, (7, 2)).unbind(1)
        shorter = split.batch(rows).lengths.view(7, 2).amin(1, keepdim=True)
        assert (first != second)[torch.arange(first.shape[1]) < shorter].any()


@pytest.mark.parametrize("loss", ["ce", "l1"])
def test_the_loss_is_its_formula_over_hidden_positions_only(loss):
    """Against float64; the prediction has rows for hidden positions only."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.rand(3, 20, generator=generator) < 0.4
    m = int(hidden.sum())
    prediction = torch.randn(m, 7 if loss == "ce" else 2, generator=generator)
    z = prediction.double().numpy()
    if loss == "ce":
        targets = torch.randint(7, (3, 20), generator=generator)
        y = targets[hidden].numpy()
        exact = (np.log(np.exp(z).sum(1)) - z[np.arange(m), y]).sum()
        score = (z.argmax(1) == y).sum()
    else:
        targets = torch.randn(3, 20, 2, generator=generator)
        error = z - targets[hidden].double().numpy()
        exact, score = np.abs(error).mean(1).sum(), -(error**2).mean(1).sum()
    ours = spt_loss(SimpleNamespace(loss=loss), prediction, targets, hidden)
    assert [value.item() for value in ours] == pytest.approx([exact, score], rel=1e-5)
