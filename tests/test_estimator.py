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

X = np.random.default_rng(0).normal(size=(60, 12))
PEOPLE = np.repeat(np.arange(20), 3)
UP = X.mean(1) > 0
LABELS = np.where(UP, "up", "down")
SOME = np.arange(60) % 6 > 0


def test_fit_is_the_run_of_own_to_the_bit(tmp_path):
    y = np.where(SOME, LABELS, None)  # some have no label
    model = SelfPretrainedClassifier(passes=4, seed=1, out=tmp_path / "fit").fit(X, y, PEOPLE)
    again = clone(model).fit(X, y, PEOPLE)  # finished: it is only loaded
    assert (again.predict_proba(X) == model.predict_proba(X)).all()
    (path,) = (tmp_path / "fit").glob("data-*.npz")
    assert np.load(path)["group"].tolist() == [*map(str, PEOPLE)]
    words = "--models", "s4", "--starts", "spt", "--passes", 4, "--seeds", 1, "--list"
    listed = call("run_all.sh", "own", "--tasks", f"file:{path}", *words).stdout
    chain = listed.strip().splitlines()[-1].split(" && ")
    commands = [shlex.split(command)[1:] for command in chain]
    assert [command[0] for command in commands] == ["data.py", "pretrain.py", "finetune.py"]
    for command in commands:
        done = call(*command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    name = commands[-1][-1]
    folders = tmp_path / "fit" / name.split("/")[-1], tmp_path / name
    fitted, own = (read_checkpoint(folder / "best.pt")["model"] for folder in folders)
    assert fitted.keys() == own.keys()
    assert all(torch.equal(fitted[key], own[key]) for key in fitted)


def test_classes_keep_their_type_and_probabilities_their_order():
    for y, classes in (
        (UP * 8 + 2, [2, 10]),  # "10" comes before "2" among texts
        (np.where(SOME, UP, np.nan), [0.0, 1.0]),
        ([*map(bool, UP)], [False, True]),
        (np.where(UP, "2.0", " 1"), [" 1", "2.0"]),
        (np.where(SOME, LABELS, "nan"), ["down", "up"]),
    ):
        model = SelfPretrainedClassifier(start="scratch", passes=2).fit(X, y)
        predicted, probabilities = model.predict(X), model.predict_proba(X)
        assert model.classes_.tolist() == classes and probabilities.shape == (60, 2)
        assert (model.classes_[probabilities.argmax(1)] == predicted).all(), classes
        assert 0 <= model.score(X, np.where(UP, *classes[::-1])) <= 1, classes
    again = pickle.loads(pickle.dumps(model))
    assert (again.predict_proba(X) == probabilities).all()


@pytest.mark.parametrize("kind", ["texts", "ragged", "channels", "gaps"])
def test_sequences_of_every_kind_are_read(kind):
    rng = np.random.default_rng(1)
    lengths = rng.integers(4, 9, 60)
    x = {
        "texts": ["".join(rng.choice([*"abc"], n)) for n in lengths],
        "ragged": [rng.normal(size=n) for n in lengths],
        "channels": rng.normal(size=(60, 2, 3)),  # fewer positions than channels
        "gaps": np.where(rng.random((60, 12)) < 0.2, np.nan, X),
    }[kind]
    model = SelfPretrainedClassifier(passes=2, start="scratch").fit(x, LABELS)
    assert (model.predict(x[:5]) == model.predict(x)[:5]).all()


def test_numbers_are_predicted_in_their_unit():
    y = 1_000 + X.mean(1)
    model = SelfPretrainedRegressor(start="scratch", passes=2).fit(X, y)
    assert (np.abs(model.predict(X) - y) < 3).all() and model.score(X, y) <= 1


def test_it_is_cloned_and_cross_validated_in_a_pipeline():
    model = make_pipeline(StandardScaler(), SelfPretrainedClassifier("rotary", "scratch", 2))
    scores = cross_val_score(model, X, LABELS, cv=GroupKFold(2), groups=PEOPLE)
    assert scores.shape == (2,) and np.isfinite(scores).all()
