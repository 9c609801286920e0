"""A file dropped into tasks/ is a task of every script, with sizes, recipes and a flag."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from conftest import calls, parse, scripts

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


def test_every_script_knows_a_task_from_its_file_and_a_flag_that_a_pretext_reads(tmp_path):
    """Where the task has tables, they are used; for other models those of any task. Finetuning
    reads the flag of its pretraining; weights from before there was the flag have its default."""
    kept = "results/weights/pathfinder_demo-s4-pretrain"
    place = scripts(tmp_path, "tests/conftest.py", "results/weights/*.npz", f"{kept}/*")
    (place / "tasks" / "chirp.py").write_text(CHIRP, encoding="utf-8")
    flag, call = '    add(WITH_DENOISING, "--loss"', "draw(hide, args.mask), args.loss),\n"
    width = '    add(WITH_DENOISING, "--width", positive, "of spans", default=8)\n'
    told = "reads=lambda args, task: print(f'width {args.width}') or task,\n"
    for file, old, new in (
        ("engine/flags.py", flag, width + flag),
        ("pretrain.py", call, call.replace("args.mask", "args.mask / args.width") + told),
    ):
        text = (place / file).read_text(encoding="utf-8")
        assert text.count(old) == 1, file
        (place / file).write_text(text.replace(old, new), encoding="utf-8")
    task, s4 = ("--task", "chirp"), ("--task", "chirp", "--model", "s4")
    few = ("--arch", "layers=1,d=8", "--steps", 1, "--batch", 4)
    features = ("--features", "f.npy", "--input", "results/weights/pathfinder_demo.npz")
    usage, _, *trained = calls(
        place,
        ("pretrain.py", *s4, "--help"),
        ("data.py", *task),
        ("pretrain.py", *s4, "--width", 2, "--out", "pre"),
        ("finetune.py", "--init", "pre", "--out", "fine"),
        ("finetune.py", *s4, "--joint", 1, "--width", 4, "--out", "both"),
        ("finetune.py", *task, "--model", "rotary", *few, "--out", "other"),
        ("predict.py", "fine"),
        ("predict.py", kept, *features),
    )
    widths = [re.findall(r"^width (\d+)$", text, re.M)[0] for text in trained]
    assert widths == ["2", "2", "4", "8", "2", "8"]
    recipe = "loss=l1 lr=0.004 wd=0.01 batch=8 warmup=2 schedule=constant steps=6 mask=0.3"
    assert f"Recipe chirp/s4*/masked: {recipe}" in " ".join(usage.split())
    configs = (place / run / "config.json" for run in ("pre", "fine", "other"))
    pre, fine, other = (json.loads(path.read_text()) for path in configs)
    names = "lr", "batch", "steps", "schedule"
    assert [pre[name] for name in names] == [4e-3, 8, 6, "constant"]
    assert [fine[name] for name in names] == [2e-3, 4, 4, "cosine"]
    assert pre["arch"]["d"] == fine["arch"]["d"] == 8
    assert (pre["recipe"], other["recipe"][:2]) == ("chirp/s4*/masked", "*/")
    predictions = (place / "predictions.csv").read_text().splitlines()[1:]
    assert len(predictions) == 32
    assert {line.split(",")[2] for line in predictions} <= {"falls", "rises"}


SYMBOLS = dict(length=6, classes=2, sizes=(3, 3, 3), mask=0.3, make="1", vocab=6)
SYMBOLS |= dict(source=Source((), "nothing", ""), symbols=(*SPECIAL, "a", "b"))
SAMPLES = SYMBOLS | dict(vocab=None, symbols=(), channels=1)
IDS, SERIES = [np.array([4, 5, EOS])] * 3, np.zeros((3, 6, 1))


def test_what_a_file_saves_must_fit_its_row(tmp_path, monkeypatch):
    """Else one line says what is saved and what is wanted, before anything is trained on it."""

    def prepared(x, y, row):
        def prepare(task, request):
            for split in SPLITS:
                save_split(request, split, x, np.array(y), "mine")

        monkeypatch.setitem(data.TASKS, "mine", Task("mine", **row, prepare=prepare))
        data.prepare("mine", tmp_path / str(len(list(tmp_path.iterdir()))))

    y = [0, 1, 1]
    prepared(IDS, y, SYMBOLS)
    prepared(SERIES, y, SAMPLES)
    for x, labels, row, words in (
        ([np.array([4, 5])] * 3, y, SYMBOLS, "at the end 5; mine has 1 to 6 ids below 6"),
        ([np.array([4, 6, EOS])] * 3, y, SYMBOLS, "ids up to 6, at the end 3"),
        ([np.arange(8)] * 3, y, SYMBOLS, "shape (8,)"),
        ([np.array([], int)] * 3, y, SYMBOLS, "shape (0,)"),
        (IDS[:2], y, SYMBOLS, "2 sequences of train for 3 labels"),
        (IDS, [0, 1, 2], SYMBOLS, "labels of train from 0 to 2; mine has 2 classes"),
        (IDS, [-1, 0, 1], SYMBOLS, "labels of train from -1 to 1"),
        (SERIES, y, SAMPLES | dict(length=7), "mine has 7 positions of 1 channel(s)"),
        (SERIES, y, SAMPLES | dict(channels=2), "mine has 6 positions of 2 channel(s)"),
        (SERIES[..., 0], y, SAMPLES, "shape (6,); mine has 6 positions of 1 channel(s)"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            prepared(x, labels, row)


def test_an_objective_that_is_gone_is_one_line(monkeypatch):
    table = CHIRP.split('RECIPES = """')[1].split('"""')[0].replace("masked", "maskd")
    monkeypatch.setitem(data.TASKS, "mine", replace(data.TASKS["scifar_mini"], recipes=table))
    with pytest.raises(UserError, match="^objective maskd is unknown; there is: masked causal$"):
        parse(pretrain, ["--task", "mine", "--model", "s4"])
