"""A file dropped into tasks/ is a task of every script, with its own sizes and recipes; the laws
over TASKS hold."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from conftest import calls, laws, parse, scripts

import data
import pretrain
from files import UserError
from tasks import EOS, SPECIAL, SPLITS, Source, Task
from tasks.making import save_split

CHIRP = '''"""Tones that fall or rise: sin(t), t from slow to fast    ->    label 1, "rises"."""
import numpy as np

from tasks import SPLITS, TASKS, Source, Task
from tasks.making import save_split


def prepare(task, request):
    rng = np.random.default_rng([7, request.seed])
    for split, size in zip(SPLITS, request.sizes):
        y = rng.integers(0, task.classes, size)
        phase = np.cumsum(np.linspace(0.1, 0.8, task.length)) + rng.uniform(0, 6, (size, 1))
        x = np.sin(np.where(y[:, None] == 1, phase, phase[:, ::-1]))[..., None]     # (n, l, 1)
        save_split(request, split, x.astype(np.float32), y, "the generator")


MODELS = """
model  layers d state n_ssm norm  place dt_min dt_max dt_lr ssm_lr dropout
s4*         2 8     4     2 layer pre    0.001    0.1 0.001  0.001       -
"""
RECIPES = """
model objective loss pool head   lr        wd   batch length warmup schedule
s4*   masked    l1   mean linear 4e-3/2e-3 0.01 8/4   6/4    2      const/cos
"""
TASKS |= {"chirp": Task("chirp", length=96, classes=2, sizes=(64, 16, 32), mask=0.3,
                        source=Source((), "nothing", "mine"), channels=1, scale=1, mean=0.0,
                        std=0.71, names=("falls", "rises"), make="1", prepare=prepare,
                        models=MODELS, recipes=RECIPES)}
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    copy = scripts(tmp_path_factory.mktemp("task"), "results/*.py", "tests/*.py")
    (copy / "tasks" / "chirp.py").write_text(CHIRP)
    return copy


def test_every_script_knows_it(place):
    """From its files alone: shown, pretrained, finetuned, predicted, beside a baseline, swept.
    Where it has tables, they are used; for other models those of any task."""
    stages = [
        ("pretrain.py", "--task", "chirp", "--model", "s4", "--out", "pre"),
        ("finetune.py", "--init", "pre", "--out", "fine"),
    ]
    listed, usage, *said, swept = calls(
        place,
        ("data.py", "--list"),
        ("pretrain.py", "--task", "chirp", "--model", "s4", "--help"),
        ("data.py", "--task", "chirp", "--show", "sheet.png"),
        *stages,
        ("predict.py", "fine"),
        ("predict.py", "pre", "--show", "filled.png"),
        ("baseline.py", "--task", "chirp"),
        (
            "finetune.py",
            "--task",
            "chirp",
            "--model",
            "rotary",
            "--steps",
            "2",
            "--batch",
            "4",
            "--out",
            "other",
        ),
        ("analyze.py", "compare", "fine", "other", "--figure", "compared.png"),
        (
            "run_all.sh",
            "sweep",
            "--tasks",
            "chirp",
            "--models",
            "s4",
            "--vary",
            "lr=1e-3,2e-3",
            "--seeds",
            0,
            "--list",
        ),
    )
    assert re.search(
        r"^chirp +length 96, 2 classes, 64 / 16 / 32 examples; not prepared$", listed, re.M
    )
    assert (
        "Recipe chirp/s4*/masked: loss=l1 lr=0.004 wd=0.01 batch=8 warmup=2 schedule=constant "
        "steps=6 mask=0.3." in (" ".join(usage.split()))
    )
    for picture in ("sheet.png", "filled.png"):
        assert (place / picture).read_bytes()[:4] == b"\x89PNG"
    first, second, other = (
        json.loads((place / run / "config.json").read_text()) for run in ("pre", "fine", "other")
    )
    assert [first[name] for name in ("lr", "batch", "steps", "recipe")] == [
        4e-3,
        8,
        6,
        "chirp/s4*/masked",
    ]
    assert [second[name] for name in ("lr", "batch", "steps", "schedule")] == [2e-3, 4, 4, "cosine"]
    assert first["arch"]["d"] == second["arch"]["d"] == 8 and other["recipe"].startswith("*/")
    assert json.loads((place / "fine" / "result.json").read_text())["test_examples"] == 32
    predictions = (place / "predictions.csv").read_text().splitlines()
    assert len(predictions) == 33 and {line.split(",")[2] for line in predictions[1:]} <= {
        "falls",
        "rises",
    }
    assert "| rotary |" in said[-1] and swept.count("--task chirp --model s4") == 4


def test_the_laws_over_tasks_hold_with_it(place):
    """Its batches and its examples, that no two are alike; every line of its tables counts for some
    run."""
    assert (
        laws(
            place,
            "tests/test_data.py",
            "tests/test_recipes.py",
            "tests/test_models.py",
            "-k",
            "chirp or every_line_counts or every_row_of_sizes",
        )
        == 3
    )


def test_what_a_file_saves_must_fit_its_row(tmp_path, monkeypatch):
    """Else one line says what there is and what is wanted, before anything is trained on it."""

    def prepared(**wrong):
        """With one thing that `prepare` saves, or its row of TASKS, changed."""
        series = [np.array([4, 5, EOS])] * 3 if wrong.pop("ids", True) else np.zeros((3, 6, 1))
        saved, y = wrong.pop("x", series), wrong.pop("y", [0, 1, 1])

        def prepare(task, request):
            for split in SPLITS:
                save_split(request, split, saved, np.array(y), "mine")

        row = dict(
            length=6,
            classes=2,
            sizes=(3, 3, 3),
            mask=0.3,
            source=Source((), "nothing", ""),
            make="1",
            vocab=6,
            symbols=(*SPECIAL, "a", "b"),
            prepare=prepare,
        ) | wrong.get("row", {})
        monkeypatch.setitem(data.TASKS, "mine", Task("mine", **row))
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        data.prepare("mine", folder)
        return data.open_task("mine", folder)

    samples = dict(vocab=None, symbols=(), channels=1)
    assert len(prepared()[1]) == len(prepared(ids=False, row=samples)[1]) == 3
    for wrong, words in (
        (
            dict(x=[np.array([4, 5])] * 3),
            "at the end 5; mine has 1 to 6 ids below 6, EOS (3) at the end",
        ),
        (dict(x=[np.array([4, 6, EOS])] * 3), "ids up to 6, at the end 3"),
        (dict(x=[np.arange(8)] * 3), "shape (8,)"),
        (dict(x=[np.array([], int)] * 3), "shape (0,)"),
        (dict(x=[np.array([4, EOS])] * 2), "2 sequences of train for 3 labels"),
        (dict(y=[0, 1, 2]), "labels of train from 0 to 2; mine has 2 classes"),
        (dict(y=[-1, 0, 1]), "labels of train from -1 to 1"),
        (
            dict(ids=False, row=samples | dict(length=7)),
            "the shape (6, 1); mine has 7 positions of 1 channel(s)",
        ),
        (
            dict(ids=False, row=samples | dict(channels=2)),
            "the shape (6, 1); mine has 6 positions of 2 channel(s)",
        ),
        (
            dict(x=np.zeros((3, 6)), row=samples),
            "the shape (6,); mine has 6 positions of 1 channel(s)",
        ),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            prepared(**wrong)


def test_an_objective_that_is_gone_is_one_line(monkeypatch):
    table = CHIRP.split('RECIPES = """')[1].split('"""')[0].replace("masked", "maskd")
    monkeypatch.setitem(data.TASKS, "mine", replace(data.TASKS["scifar_mini"], recipes=table))
    with pytest.raises(UserError, match="^objective maskd is unknown; there is: masked causal$"):
        parse(pretrain, ["--task", "mine", "--model", "s4"])
