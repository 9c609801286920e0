"""estimator.py: scikit-learn's contract, and the same run as `run_all.sh own`."""

import pickle
import shlex

import numpy as np
import pytest
import torch
from conftest import call
from sklearn.base import clone
from sklearn.model_selection import GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from engine.folder import read_checkpoint
from estimator import SelfPretrainedClassifier, SelfPretrainedRegressor

rng = np.random.default_rng(0)
X = rng.normal(size=(60, 12))
PEOPLE = np.repeat(np.arange(20), 3)
LABELS = np.where(X.mean(1) > 0, "up", "down")


def test_fit_is_the_run_of_own_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    y = np.where(np.arange(60) % 6, LABELS, None)  # some have no label
    model = SelfPretrainedClassifier(passes=6, seed=1, out=tmp_path / "fit").fit(X, y, PEOPLE)
    again = clone(model).fit(X, y, PEOPLE)  # finished: it is only loaded
    assert (again.predict_proba(X) == model.predict_proba(X)).all()
    (path,) = (tmp_path / "fit").glob("data-*.npz")
    words = ["--models", "s4", "--starts", "spt", "--passes", "6", "--seeds", "1", "--list"]
    listed = call("run_all.sh", "own", "--tasks", f"file:{path}", *words).stdout
    chain = listed.strip().splitlines()[-1].split(" && ")
    commands = [shlex.split(command)[1:] for command in chain]
    assert [command[0] for command in commands] == ["data.py", "pretrain.py", "finetune.py"]
    for command in commands:
        done = call(*command)
        assert done.returncode == 0, done.stderr
    run = tmp_path / commands[-1][-1]
    weights, weights_of_own = (
        read_checkpoint(folder / run.name / "best.pt")["model"]
        for folder in (tmp_path / "fit", run.parent)
    )
    assert weights.keys() == weights_of_own.keys()
    assert all(torch.equal(weights[name], weights_of_own[name]) for name in weights)


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        (LABELS, ["down", "up"]),
        ((LABELS == "up").astype(int) * 9 + 1, [1, 10]),  # "10" comes before "2" among texts
        (np.where(np.arange(60) % 6, LABELS == "up", np.nan), [0.0, 1.0]),
        ([bool(label == "up") for label in LABELS], [False, True]),
        (np.where(LABELS == "up", "2.0", " 1"), [" 1", "2.0"]),
        (np.where(np.arange(60) % 6, LABELS, "nan"), ["down", "up"]),
    ],
    ids=["texts", "numbers", "unlabelled", "bools", "texts of numbers", "texts of none"],
)
def test_classes_keep_their_type(y, classes):
    model = SelfPretrainedClassifier(start="scratch", passes=4).fit(X, y)
    assert model.classes_.tolist() == classes
    predicted, probabilities = model.predict(X), model.predict_proba(X)
    assert {*predicted.tolist()} <= {*classes} and probabilities.shape == (60, 2)
    assert (model.classes_[probabilities.argmax(1)] == predicted).all()
    assert 0 <= model.score(X, np.where(LABELS == "up", *classes[::-1])) <= 1
    again = pickle.loads(pickle.dumps(model))
    assert (again.predict_proba(X) == probabilities).all()


@pytest.mark.parametrize("kind", ["texts", "ragged", "channels", "gaps"])
def test_sequences_of_every_kind(kind):
    lengths = rng.integers(4, 9, 60)
    x = {
        "texts": ["".join(rng.choice([*"abc"], n)) for n in lengths],
        "ragged": [rng.normal(size=n) for n in lengths],
        "channels": rng.normal(size=(60, 2, 3)),  # fewer positions than channels
        "gaps": np.where(rng.random((60, 12)) < 0.2, np.nan, X),
    }[kind]
    model = SelfPretrainedClassifier(passes=4).fit(x, LABELS, groups=PEOPLE)
    assert len(model.predict(x[:5])) == 5
    assert (model.predict(x[:5]) == model.predict(x)[:5]).all()


def test_numbers_are_predicted_in_their_unit():
    model = SelfPretrainedRegressor(start="scratch", passes=4).fit(X, 1_000 + X.mean(1))
    assert (np.abs(model.predict(X) - 1_000) < 3).all()
    assert model.score(X, 1_000 + X.mean(1)) <= 1


def test_it_is_an_estimator():
    """Cloned, in a pipeline, cross-validated by groups."""
    model = clone(SelfPretrainedClassifier("rotary", start="scratch", passes=2))
    assert model.get_params()["model"] == "rotary"
    pipeline = make_pipeline(StandardScaler(), model)
    scores = cross_val_score(pipeline, X, LABELS, cv=GroupKFold(2), groups=PEOPLE)
    assert scores.shape == (2,) and np.isfinite(scores).all()
