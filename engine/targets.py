"""What a target is: a class, a number, several labels, or a label at every position. KINDS has a
row for each.

A task says in `target` which kind it has. Training, predictions, baselines and comparisons read
only this table."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from tasks import IGNORE
from tasks.split import balanced_accuracy

# ---- Losses: outputs of the head, targets of a batch -> summed over examples ---------------------


def class_loss(outputs, y, weights=None):
    """Return the cross-entropy of outputs (b, classes) and y (b,). weights (classes,): of each
    class."""
    return F.cross_entropy(outputs, y, weights, reduction="sum")


def number_loss(outputs, y, weights=None):
    """Return the squared error of outputs (b, 1) and y (b,)."""
    return (outputs[:, 0] - y).square().sum()


def labels_loss(outputs, y, weights=None):
    """Return the binary cross-entropy of outputs and y (b, k), its mean over the k labels."""
    return (
        F.binary_cross_entropy_with_logits(outputs, y.to(outputs.dtype), reduction="sum")
        / y.shape[1]
    )


def positions_loss(outputs, y, weights=None):
    """Return the cross-entropy of outputs (b, l, classes) and y (b, l), its mean over an example's
    labelled positions: those that are not IGNORE."""
    each = F.cross_entropy(outputs.mT, y, weights, reduction="none")  # (b, l), 0 where IGNORE
    return (each.sum(1) / (y != IGNORE).sum(1).clamp(min=1)).sum()


# ---- Scores: targets y and predictions of a split -> {name: score}. Validation chooses by the last ----


def r2(squared_error, y):
    """Return R2 = 1 - SSE / SST of a whole split, given its SSE and targets y (n,); 0 if all
    targets are equal. (The official code averages R2 over batches, which is another number.)"""
    y = np.asarray(y, dtype=np.float64)
    return 0.0 if y.min() == y.max() else 1 - squared_error / float(np.square(y - y.mean()).sum())


def class_scores(y, found, loss, balanced):
    more = {"balanced_accuracy": balanced_accuracy(y, found)} if balanced else {}
    return {"accuracy": float(np.mean(found == y))} | more


def labels_scores(y, found, loss, balanced):
    """F1 of each label, averaged over labels that some example has (macro), and of all labels
    together (micro)."""
    there = np.asarray(y).any(0)
    macro = [
        ratio(*labels_shares(y[:, i : i + 1], found[:, i : i + 1])) for i in np.flatnonzero(there)
    ]
    return {
        "macro_f1": float(np.mean(macro)) if macro else 0.0,
        "micro_f1": ratio(*labels_shares(y, found)),
    }


# ---- Shares: a score is a ratio of two sums over examples: numerators and denominators, (n,) both ----


def ratio(numerators, denominators):
    return float(numerators.sum() / max(denominators.sum(), 1e-300))


def number_shares(y, found):
    """R2 = 1 - SSE / SST = sum of (y - mean)^2 - error^2, over the sum of (y - mean)^2."""
    around = np.square(y - y.mean())
    return around - np.square(found - y), around


def labels_shares(y, found):
    """F1 = 2 true positives / (labels + predicted labels)."""
    y, found = np.asarray(y, bool), np.asarray(found, bool)
    return 2 * (y & found).sum(1), y.sum(1) + found.sum(1)


def positions_shares(y, found):
    return ((y == found) & (y != IGNORE)).sum(1), (y != IGNORE).sum(1)


class Kind(NamedTuple):
    score: str  # name of the score in result.json, after val_ and test_
    title: str  # its name in tables
    loss: Callable  # (outputs, y, weights) -> the loss, summed over examples
    predict: Callable  # outputs -> predictions, in the form of y
    scores: Callable  # (y, predictions, summed loss, balanced) of a whole split -> {name: score}
    shares: Callable  # (y, predictions) -> numerators and denominators of the score


KINDS = {
    "class": Kind(
        "accuracy",
        "accuracy",
        class_loss,
        lambda outputs: outputs.argmax(-1),
        class_scores,
        lambda y, found: (found == y, np.ones(len(y))),
    ),
    "number": Kind(
        "r2",
        "R2",
        number_loss,
        lambda outputs: outputs[:, 0],
        lambda y, found, loss, balanced: {"r2": r2(loss, y)},
        number_shares,
    ),
    "labels": Kind(
        "micro_f1",
        "micro F1",
        labels_loss,
        lambda outputs: outputs > 0,
        labels_scores,
        labels_shares,
    ),
    "positions": Kind(
        "accuracy",
        "accuracy over positions",
        positions_loss,
        lambda outputs: outputs.argmax(-1),
        lambda y, found, loss, balanced: {"accuracy": ratio(*positions_shares(y, found))},
        positions_shares,
    ),
}


def class_weights(task, train):
    """Return a weight for each class, float32 (classes,): inversely proportional to its number of
    training examples, 1 on average over these."""
    sizes = np.bincount(train.labels(), minlength=task.classes).clip(1)
    return torch.from_numpy(len(train) / (task.classes * sizes)).float()
