"""A file dropped into tasks/ is a task of every script, with its own sizes and recipes; the laws over TASKS hold."""
import json
import re

import pytest

import data
from conftest import calls, laws, scripts
from files import UserError

CHIRP = '''"""Tones that fall or rise: sin(t), t from slow to fast    ->    label 1, "rises"."""
import numpy as np

from tasks import SPLITS, TASKS, Source, Task
from tasks.making import save_split


def prepare(task, request):
    rng = np.random.default_rng([7, request.seed])
    for split, size in zip(SPLITS, request.sizes):
        y = rng.integers(0, task.classes, size)
        phase = np.cumsum(np.linspace(0.1, 0.8, task.length)) + rng.uniform(0, 6, (size, 1))
        x = np.sin(np.where(y[:, None] == 1, phase, phase[:, ::-1]))[..., None].astype(np.float32)     # (n, l, 1)
        save_split(request, split, x, y, "the generator")


MODELS = """
model  layers d state n_ssm norm  place dt_min dt_max dt_lr ssm_lr dropout
s4*         2 8     4     2 layer pre    0.001    0.1 0.001  0.001       -
"""
RECIPES = """
model objective loss pool head   lr        wd   batch length warmup schedule
s4*   masked    l1   mean linear 4e-3/2e-3 0.01 8/4   6/4    2      const/cos
"""
TASKS |= {"chirp": Task("chirp", length=96, classes=2, sizes=(64, 16, 32), mask=0.3,
                        source=Source((), "nothing", "mine"), channels=1, scale=1, mean=0.0, std=0.71,
                        names=("falls", "rises"), make="1", prepare=prepare, models=MODELS, recipes=RECIPES)}
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    copy = scripts(tmp_path_factory.mktemp("task"), "results/*.py", "tests/*.py")
    (copy / "tasks" / "chirp.py").write_text(CHIRP)
    return copy


def test_every_script_knows_it(place):
    """From its files alone: shown, pretrained, finetuned, predicted, beside a baseline, swept, costed. Where it has
    tables, they are used; for other models those of any task."""
    stages = [("pretrain.py", "--task", "chirp", "--model", "s4", "--out", "pre"),
              ("finetune.py", "--init", "pre", "--out", "fine")]
    listed, usage, *said, costs, swept = calls(
        place, ("data.py", "--list"), ("pretrain.py", "--task", "chirp", "--model", "s4", "--help"),
        ("data.py", "--task", "chirp", "--show", "sheet.png"), *stages, ("predict.py", "fine"),
        ("predict.py", "pre", "--show", "filled.png"), ("baseline.py", "--task", "chirp"),
        ("finetune.py", "--task", "chirp", "--model", "rotary", "--steps", "2", "--batch", "4", "--out", "other"),
        ("analyze.py", "compare", "fine", "other", "--figure", "compared.png"),
        ("results/costs.py", "chirp", "--model", "s4"),
        ("run_all.sh", "sweep", "--list", "--tasks", "chirp", "--models", "s4", "--vary", "lr=1e-3,2e-3", "--seeds", "0"))
    assert re.search(r"^chirp +length 96 x 1, 2 classes, 64 / 16 / 32 examples; not prepared$", listed, re.M)
    assert "Recipe chirp/s4*/masked: loss=l1 lr=0.004 wd=0.01 batch=8 warmup=2 schedule=constant steps=6 mask=0.3." in (
        " ".join(usage.split()))
    for picture in ("sheet.png", "filled.png"):
        assert (place / picture).read_bytes()[:4] == b"\x89PNG"
    first, second, other = (json.loads((place / run / "config.json").read_text()) for run in ("pre", "fine", "other"))
    assert [first[name] for name in ("lr", "batch", "steps", "recipe")] == [4e-3, 8, 6, "chirp/s4*/masked"]
    assert [second[name] for name in ("lr", "batch", "steps", "schedule")] == [2e-3, 4, 4, "cosine"]
    assert first["arch"]["d"] == second["arch"]["d"] == 8 and other["recipe"].startswith("*/")
    assert json.loads((place / "fine" / "result.json").read_text())["test_examples"] == 32
    predictions = (place / "predictions.csv").read_text().splitlines()
    assert len(predictions) == 33 and {line.split(",")[2] for line in predictions[1:]} <= {"falls", "rises"}
    assert re.search(r"\| s4 \|", costs) and "| rotary |" in said[-1] and swept.count("--task chirp --model s4") == 4


def test_the_laws_over_tasks_hold_with_it(place):
    """Its batches and its examples, that no two are alike; every line of its tables counts for some run."""
    assert laws(place, "tests/test_data.py", "tests/test_recipes.py", "tests/test_models.py", "-k",
                "chirp or every_line_counts or every_row_of_sizes") == 3


@pytest.mark.parametrize("change, words", [
    ("length=96", "has the shape (96, 1); chirp has 40 positions of 1 channel(s)"),
    ("channels=1", "has the shape (96, 1); chirp has 96 positions of 2 channel(s)"),
    ("classes=2", "labels of train from 0 to 1; chirp has 1 classes, from 0"), ("[..., None]", "has the shape (96,)")])
def test_arrays_that_do_not_fit_their_row_are_one_line(change, words, tmp_path, monkeypatch):
    """Before anything is trained on them, and nothing of them stays."""
    code = CHIRP.replace(change, {"length=96": "length=40", "channels=1": "channels=2", "classes=2": "classes=1",
                                  "[..., None]": ""}[change]).replace("task.length)", "96)")
    code = code.replace("integers(0, task.classes", "integers(0, 2")
    mine = {}
    exec(code.replace("TASKS |=", "MINE ="), mine)
    monkeypatch.setitem(data.TASKS, "chirp", mine["MINE"]["chirp"])
    with pytest.raises(UserError, match=re.escape(words)):
        data.prepare("chirp", tmp_path)
    assert not (tmp_path / "chirp" / "meta.json").exists()
