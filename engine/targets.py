"""What a target is: a class, a number, several labels, or a label at every position. KINDS has a
row for each: its loss, its predictions, and what they are worth.

A task says in `target` which kind it has. Only this table knows what differs between kinds."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from tasks import IGNORE

# ---- Losses: outputs of the head, targets of a batch -> summed over examples ---------------------


def class_loss(outputs, y, weights=None):
    """Return the cross-entropy of outputs (b, classes) and y (b,), with weights (classes,)."""
    return F.cross_entropy(outputs, y, weights, reduction="sum")


def number_loss(outputs, y, weights=None):
    """Return the squared error of outputs (b, 1) and y (b,)."""
    return (outputs[:, 0] - y).square().sum()


def labels_loss(outputs, y, weights=None):
    """Return the binary cross-entropy of outputs and y (b, k), its mean over the k labels."""
    loss = F.binary_cross_entropy_with_logits(outputs, y.to(outputs.dtype), reduction="sum")
    return loss / y.shape[1]


def positions_loss(outputs, y, weights=None):
    """Return the cross-entropy of outputs (b, l, classes) and y (b, l), its mean over an example's
    labelled positions: those that are not IGNORE."""
    losses = F.cross_entropy(outputs.mT, y, weights, reduction="none")  # (b, l), 0 where IGNORE
    return (losses.sum(1) / (y != IGNORE).sum(1).clamp(min=1)).sum()


# ---- Scores: targets and predictions of a split -> {name: score}; validation chooses by the last -


def metrics():
    """Import scikit-learn's metrics, at the first evaluation: a run starts without them."""
    from sklearn import metrics

    return metrics


def class_scores(y, predictions):
    return {"accuracy": float(metrics().accuracy_score(y, predictions))}


def balanced_scores(y, predictions):
    """Return also the balanced accuracy: the mean over the classes in y of their recall."""
    classes = np.unique(y)
    recall = metrics().recall_score(y, predictions, labels=classes, average="macro")
    return class_scores(y, predictions) | {"balanced_accuracy": float(recall)}


def number_scores(y, predictions):
    """Return R2 of a whole split, not its mean over batches as in the official code."""
    y, predictions = np.asarray(y, float), np.asarray(predictions, float)
    return {"r2": float(metrics().r2_score(y, predictions)) if len(y) > 1 else 0.0}


def labels_scores(y, predictions):
    """Return F1 of y and predictions (n, k), 0 or 1: its mean over the labels that some example has
    (macro), and of all labels together (micro)."""
    y, predictions = np.asarray(y, int), np.asarray(predictions, int)
    f1 = metrics().f1_score(y, predictions, average=None, zero_division=0)  # (k,)
    micro = metrics().f1_score(y, predictions, average="micro", zero_division=0)
    occurs = y.any(0)  # (k,)
    return {"macro_f1": float(f1[occurs].mean()) if occurs.any() else 0.0, "micro_f1": float(micro)}


def positions_scores(y, predictions):
    """Return the accuracy of y and predictions (n, l) over all positions that have a label."""
    labelled = y != IGNORE
    return class_scores(y[labelled], predictions[labelled])


# ---- Shares: a score is a ratio of two sums over examples: numerators and denominators, (n,) -----


def number_shares(y, predictions):
    """R2 = 1 - SSE / SST = sum of (y - mean)^2 - error^2, over the sum of (y - mean)^2."""
    around = np.square(y - y.mean())
    return around - np.square(predictions - y), around


def labels_shares(y, predictions):
    """F1 = 2 true positives / (labels + predicted labels)."""
    y, predictions = np.asarray(y, bool), np.asarray(predictions, bool)
    return 2 * (y & predictions).sum(1), y.sum(1) + predictions.sum(1)


def positions_shares(y, predictions):
    labelled = y != IGNORE
    return ((y == predictions) & labelled).sum(1), labelled.sum(1)


# ---- The table -----------------------------------------------------------------------------------


class Kind(NamedTuple):
    score: str  # name of the score in result.json, after val_ and test_
    title: str  # its name in tables
    loss: Callable  # (outputs, y, weights) -> the loss, summed over examples
    predict: Callable  # outputs -> predictions, in the form of y
    scores: Callable  # (y, predictions) of a whole split -> {name: score}
    # (y, predictions) -> numerators and denominators; None: an example is right or wrong
    shares: Callable | None


def most_likely(outputs):
    return outputs.argmax(-1)


KINDS = {
    "class": Kind("accuracy", "accuracy", class_loss, most_likely, class_scores, None),
    "number": Kind("r2", "R2", number_loss, lambda out: out[:, 0], number_scores, number_shares),
    "labels": Kind(
        "micro_f1", "micro F1", labels_loss, lambda out: out > 0, labels_scores, labels_shares
    ),
    "positions": Kind(
        "accuracy",
        "accuracy over positions",
        positions_loss,
        most_likely,
        positions_scores,
        positions_shares,
    ),
}

UNEQUAL = 3  # balanced accuracy decides if class sizes differ by more than this ratio


def kind_of_target(task, train):
    """Return a task's row of KINDS; unequal classes of your data: with balanced accuracy."""
    kind = KINDS[task.kind]
    if task.own and task.kind == "class":
        sizes = np.bincount(train.labels())
        if sizes.max() > UNEQUAL * sizes[sizes > 0].min():
            return kind._replace(scores=balanced_scores)
    return kind


def class_weights(task, train):
    """Return a weight for each class, float32 (classes,): inversely proportional to its number of
    training examples, 1 on average over these."""
    sizes = np.bincount(train.labels(), minlength=task.classes).clip(1)
    return torch.from_numpy(len(train) / (task.classes * sizes)).float()
