"""Self-pretraining with scikit-learn's interface, for arrays.

    from estimator import SelfPretrainedClassifier
    model = SelfPretrainedClassifier(model="s4", start="spt", passes=2_000)
    model.fit(X, y, groups=people)     # y: None or NaN where there is no label
    model.predict(X_new)               # also predict_proba, score
    model.result_["test_accuracy"]     # on 15 % of the examples, which nothing was fitted to

X holds samples (n, l) or (n, l, channels), NaN where missing, or is a list of sequences, (l,) or
(l, channels) each, of any lengths, or a list of texts. `fit` is one run of `run_all.sh own`: 70 %
of the examples are trained on, 15 % choose the weights, 15 % test them; no group is in two parts.
It calls the stages of pretrain.py and finetune.py, which print their progress."""

import functools
import shlex
import tempfile
from pathlib import Path

import numpy as np
import pandas
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.validation import check_is_fitted

import finetune
import pretrain
from data import prepare
from engine.processes import logged
from experiments import entries
from experiments.commands import chains
from files import read_json
from own.cells import class_name
from use.trained import TrainedModel

STAGES = {"pretrain.py": pretrain.main, "finetune.py": finetune.main}


class SelfPretrained(BaseEstimator):
    """Base class. model: a --model; start: spt, scratch, joint or linear_probe; passes: of a batch
    forward and backward, in both stages together, None: those of the recipe; out: a folder for the
    runs, in which the same fit goes on where it was stopped, None: they are not kept."""

    def __init__(self, model="s4", start="spt", passes=None, seed=0, out=None):
        self.model = model
        self.start = start
        self.passes = passes
        self.seed = seed
        self.out = out

    def fit(self, X, y, groups=None):
        arrays = dict(x=as_array(X), y=self.labels(y))
        if groups is not None:
            arrays["group"] = np.asarray(groups).astype(str)
        if self.out is not None:
            return self.fit_in(Path(self.out), arrays)
        with tempfile.TemporaryDirectory() as folder:
            return self.fit_in(Path(folder), arrays)

    def fit_in(self, folder, arrays):
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / "data.npz", **arrays)
        task = f"file:{folder / 'data.npz'}"
        data_dir = str(folder / "data")
        layout = {"channels_first": False} if arrays["x"].ndim == 3 else {}
        prepare(task, data_dir, regression=self.regression, layout=layout)
        entry = entries.own(task, self.model, starts=[self.start], passes=self.passes)
        flags = f"--data-dir {shlex.quote(data_dir)}"
        (chain,) = chains(entry, self.seed, folder.as_posix(), flags)
        for command in chain:
            _, script, *words = shlex.split(command)
            if not Path(words[-1], "result.json").exists():  # its --out
                logged(functools.partial(STAGES[script], words))
        run = Path(words[-1])
        self.result_ = read_json(run / "result.json")
        self.trained_ = TrainedModel(run, data_dir)
        return self

    def predicted(self, X):
        """Return the predictions, names or numbers, and the probabilities of new sequences."""
        check_is_fitted(self)
        return self.trained_([*as_array(X)])


class SelfPretrainedClassifier(ClassifierMixin, SelfPretrained):
    """Classes y (n,), of any type. classes_: their values, in the order of `predict_proba`."""

    regression = None

    def labels(self, y):
        unknown = pandas.isna(np.asarray(y, object))
        self.classes_ = np.unique([label for label, lacks in zip(y, unknown) if not lacks])
        return np.array(["" if lacks else class_name(label) for label, lacks in zip(y, unknown)])

    def predict(self, X):
        labels = {class_name(label): label for label in self.classes_.tolist()}
        return np.array([labels[name] for name in self.predicted(X)[0]])

    def predict_proba(self, X):
        probabilities = self.predicted(X)[1]
        names = self.trained_.names.tolist()
        order = [names.index(class_name(label)) for label in self.classes_.tolist()]
        return probabilities[:, order]


class SelfPretrainedRegressor(RegressorMixin, SelfPretrained):
    """Numbers y (n,)."""

    regression = True

    def labels(self, y):
        return np.asarray(y, np.float64)

    def predict(self, X):
        return self.predicted(X)[0]


def as_array(X):
    """Return X as a file has it: texts (n,), or samples float64 (n, l[, channels]), where a shorter
    sequence ends in NaN."""
    if isinstance(X[0], str):
        return np.asarray(X, str)
    series = [np.asarray(item, np.float64) for item in X]
    longest = max(map(len, series))
    x = np.full((len(series), longest, *series[0].shape[1:]), np.nan)
    for row, item in zip(x, series):
        row[: len(item)] = item
    return x
