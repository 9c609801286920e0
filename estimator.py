"""Self-pretraining with scikit-learn's interface, for arrays.

    model = SelfPretrainedClassifier(model="s4", start="spt", passes=2_000)
    model.fit(X, y, groups=people)   # y: None or NaN where there is no label
    model.result_["test_accuracy"]   # on 15 % of the examples, which nothing was fitted to

X holds samples (n, l) or (n, l, channels), NaN where missing, or is a list of sequences, (l,) or
(l, channels) each, or of texts. `fit` is a run of `run_all.sh own`: 70 % of the examples train,
15 % choose the weights, 15 % test them; no group is in two parts."""

import contextlib
import functools
import shlex
import tempfile
import zlib
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


class SelfPretrained(BaseEstimator):
    """model: a --model; start: spt, scratch, joint, linear_probe; passes: of both stages (None: the
    recipe's); out: a folder for runs, in which the same fit goes on (None: they are not kept)."""

    def __init__(self, model="s4", start="spt", passes=None, seed=0, out=None):
        self.model = model
        self.start = start
        self.passes = passes
        self.seed = seed
        self.out = out

    def fit(self, X, y, groups=None):
        group = {} if groups is None else {"group": np.asarray(groups).astype(str)}
        arrays = dict(x=as_array(X), y=self.labels(y)) | group
        place = contextlib.nullcontext(self.out) if self.out else tempfile.TemporaryDirectory()
        with place as folder:
            self.fit_in(Path(folder), arrays)
        return self

    def fit_in(self, folder, arrays):
        folder.mkdir(parents=True, exist_ok=True)
        checksum = zlib.crc32(b"".join(array.tobytes() for array in arrays.values()))
        path = folder / f"data-{checksum:08x}.npz"  # of cross-validation: one a fold
        np.savez(path, **arrays)
        data_dir = str(folder / "data")
        task = f"file:{path}"
        layout = {"channels_first": False} if arrays["x"].ndim == 3 else {}
        prepare(task, data_dir, regression=self.regression, layout=layout)
        entry = entries.own(task, self.model, starts=[self.start], passes=self.passes)
        where = folder.as_posix(), f"--data-dir {shlex.quote(data_dir)}"
        (chain,) = chains(entry, self.seed, *where)
        for command in chain:
            _, script, *words = shlex.split(command)
            stage = pretrain if script == "pretrain.py" else finetune
            if not Path(words[-1], "result.json").exists():  # its --out
                logged(functools.partial(stage.main, words))
        self.result_ = read_json(Path(words[-1], "result.json"))
        self.trained_ = TrainedModel(words[-1], data_dir)

    def predicted(self, X):
        check_is_fitted(self)
        return self.trained_([*as_array(X)])


class SelfPretrainedClassifier(ClassifierMixin, SelfPretrained):
    """Classes y (n,), of any type. classes_: their values, in the order of `predict_proba`."""

    regression = None

    def labels(self, y):
        names = ["" if pandas.isna(label) else class_name(label) for label in y]
        labels = {name: label for name, label in zip(names, y) if name not in ("", "nan")}
        self.classes_ = np.unique([*labels.values()])
        return np.array(names)

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
    """Return X as texts (n,) or samples float64 (n, l[, channels]); a shorter one ends in NaN."""
    X = [*(X.to_numpy() if hasattr(X, "to_numpy") else X)]
    if isinstance(X[0], str):
        return np.asarray(X, str)
    series = [np.asarray(item, np.float64) for item in X]
    longest = max(map(len, series))
    pad = [[(0, longest - len(item))] + [(0, 0)] * (item.ndim - 1) for item in series]
    return np.array([np.pad(*pair, constant_values=np.nan) for pair in zip(series, pad)])
