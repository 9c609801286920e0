"""The recipes: the paper's numbers typed a second time, every line in use, flags that win."""

import contextlib
import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from conftest import parse
from test_analyze import finetuned

import finetune
import pretrain
from compare import runs, settings
from engine import flags
from files import UserError
from models import MODELS
from own.task import FILE
from recipes import OWN_RECIPES, RECIPES, SMALL_RECIPES, arch, learning_rate, read_table, rows
from tasks import TASKS

# ---- the paper's numbers, typed from its tables 4, 5 and 6 and not from the code -----------------

# lr/batch of self-pretraining, of finetuning after it and from scratch, weight decay, pooling; a
# dash: not stated. From scratch: table 6 and appendix C.1.2 for S4 on BIDMC and PathX-256,
# elsewhere Gu et al. 2022; table 5 for the others. Table 5 begins with s4_rand. Its cells of three
# numbers (S4 on Text and DLR on Image, Rand Init + SPT) are read as one lr for both stages.
PAPER = """
task       model       objective spt      finetuning scratch  wd   pool
listops    transformer masked    1e-3/128 1e-4/64    -        0.1  mean
listops    transformer causal    5e-4/32  5e-4/128   -        0.1  last
listops    rotary      masked    1e-3/256 1e-4/64    -        0.05 mean
listops    s4          masked    1e-3/128 1e-3/16    1e-2/50  0.05 -
text       transformer masked    5e-4/32  1e-4/64    -        0.1  mean
text       transformer causal    1e-3/32  1e-4/64    -        0.1  mean
text       rotary      masked    5e-4/8   5e-4/64    -        0.1  mean
text       s4          masked    5e-4/8   5e-4/16    1e-2/16  0.05 -
retrieval  transformer masked    5e-3/32  5e-4/16    -        0    mean
retrieval  transformer causal    5e-3/32  1e-3/48    -        0    mean
retrieval  rotary      masked    5e-3/32  5e-4/16    -        0    mean
retrieval  s4          masked    5e-4/8   5e-4/256   1e-2/64  0.05 -
image      transformer masked    1e-3/32  1e-3/16    -        0    max
image      transformer causal    5e-3/32  1e-3/32    -        0    max
image      rotary      masked    1e-3/32  1e-3/64    -        0    mean
image      s4          masked    1e-3/32  1e-3/512   1e-2/50  0.05 -
pathfinder transformer masked    1e-3/16  5e-4/16    -        0    mean
pathfinder transformer causal    1e-3/128 1e-3/256   -        0    mean
pathfinder rotary      masked    1e-3/32  5e-4/64    -        0    mean
pathfinder s4          masked    1e-3/8   1e-3/64    4e-3/64  0.03 -
pathx      transformer masked    5e-4/8   5e-4/32    -        0    max
pathx      transformer causal    1e-3/8   5e-4/256   -        0    max
pathx      rotary      masked    1e-3/8   5e-4/32    -        0    max
pathx      s4          masked    1e-3/8   1e-3/64    5e-4/16  0.05 max
pathx256   s4          masked    1e-3/8   1e-3/64    1e-4/16  0.05 max
sc         rotary      masked    1e-3/8   1e-3/256   -        0    max
sc         rotary      causal    1e-3/32  1e-3/256   -        0    max
sc         s4          masked    1e-3/32  5e-3/16    1e-2/16  0.05 -
sc         s4          causal    1e-3/32  5e-4/16    -        0.05 -
scifar     rotary      masked    1e-3/32  1e-3/64    -        0    mean
scifar     s4          masked    1e-3/32  5e-4/64    1e-2/50  0.05 -
bidmc_hr   rotary      masked    5e-4/16  5e-4/32    -        0    max
bidmc_rr   rotary      masked    5e-4/16  5e-4/32    -        0    max
bidmc_spo2 rotary      masked    5e-4/16  1e-4/8     -        0    max
bidmc_hr   s4          masked    1e-3/64  1e-3/64    1e-3/32  0.05 -
bidmc_rr   s4          masked    1e-3/64  1e-3/64    1e-2/32  0.05 -
bidmc_spo2 s4          masked    1e-3/64  1e-3/64    1e-2/32  0.05 -
listops    s4_rand     masked    1e-3/32  1e-3/16    5e-4/16  0.05 -
text       s4_rand     masked    1e-3/32  1e-3/16    1e-3/16  0.05 -
image      s4_rand     masked    1e-3/32  5e-4/64    1e-4/128 0.05 -
pathx      s4_rand     masked    1e-3/4   5e-4/16    5e-4/16  0.05 max
listops    dlr         masked    1e-3/128 5e-4/16    5e-4/16  0.05 -
text       dlr         masked    5e-4/8   1e-3/16    5e-4/16  0.05 -
image      dlr         masked    1e-3/32  1e-3/64    5e-4/64  0.05 -
pathx      dlr         masked    5e-4/8   5e-4/64    5e-4/64  0.05 max
listops    dlr_rand    masked    5e-4/32  5e-4/64    1e-4/16  0.05 -
text       dlr_rand    masked    5e-4/8   5e-4/16    1e-3/16  0.05 -
image      dlr_rand    masked    1e-3/32  1e-3/64    1e-3/16  0.05 -
pathx      dlr_rand    masked    5e-4/8   5e-4/16    5e-4/64  0.05 max
"""
# Section 2 and appendix C.3: masking ratios, and the tasks with an L1 loss (table 4).
PAPER_MASK = dict(
    image=0.5,
    pathfinder=0.5,
    pathx=0.5,
    pathx256=0.5,
    scifar=0.5,
    text=0.15,
    retrieval=0.15,
    listops=0.1,
    sc=0.25,
    bidmc_hr=0.25,
    bidmc_rr=0.25,
    bidmc_spo2=0.25,
)
PAPER_L1 = {"image", "scifar", "sc", "bidmc_hr", "bidmc_rr", "bidmc_spo2"}
# Whole recipes: lr, batch, weight decay, length, warm-up, schedule, pooling and head. The numbers
# that the tables above do not have are from the official configurations (Pythia's lr and batch:
# table 5). The last three are not the paper's.
WHOLE = {
    ("listops", "pythia", "causal", "corpus"): (
        5e-5,
        64,
        0,
        "200e",
        200,
        "cosine",
        "mean",
        "linear",
    ),
    ("text", "pythia", "causal", "corpus"): (
        5e-4,
        16,
        0,
        "32e",
        5000,
        "constant",
        "last",
        "linear",
    ),
    ("retrieval", "pythia", "causal", "corpus"): (
        1e-4,
        256,
        0,
        "20e",
        2500,
        "constant",
        "mean",
        "pair",
    ),
    ("image", "pythia_rand", "causal", "scratch"): (
        7e-5,
        64,
        0,
        "200e",
        2000,
        "constant",
        "mean",
        "linear",
    ),
    ("pathfinder", "pythia", "causal", "corpus"): (
        1e-4,
        1024,
        0,
        "200e",
        2500,
        "constant",
        "last",
        "linear",
    ),
    ("text", "rotary", "masked", "spt"): (5e-4, 64, 0.1, "65e", 2000, "constant", "mean", "mlp"),
    ("text", "s4", "masked", "spt"): (5e-4, 16, 0.05, "32e", 5000, "cosine", "mean", "linear"),
    ("retrieval", "transformer", "causal", "scratch"): (
        1e-3,
        48,
        0,
        "32e",
        5000,
        "constant",
        "mean",
        "pair",
    ),
    ("image", "transformer", "masked", "spt"): (
        1e-3,
        16,
        0,
        "200e",
        2000,
        "constant",
        "max",
        "mlp",
    ),
    ("pathx", "s4", "masked", "spt"): (1e-3, 64, 0.05, "50e", 10_000, "cosine", "max", "linear"),
    ("pathx", "dlr_rand", "masked", "scratch"): (
        5e-4,
        64,
        0.05,
        "50e",
        5000,
        "cosine",
        "max",
        "linear",
    ),
    ("bidmc_rr", "rotary", "masked", "spt"): (5e-4, 32, 0, "500e", 0, "step", "max", "linear"),
    ("pathfinder_demo", "rotary", "masked", "scratch"): (
        1e-3,
        16,
        0,
        "2700",
        50,
        "cosine",
        "mean",
        "linear",
    ),
    ("pathx_mini", "linformer", "masked", "spt"): (
        1e-3,
        16,
        0,
        "1400",
        50,
        "cosine",
        "mean",
        "linear",
    ),
    ("pathfinder64", "s4", "causal", "scratch"): (
        4e-3,
        32,
        0,
        "50e",
        500,
        "cosine",
        "mean",
        "linear",
    ),
}
# layers d state n_ssm norm place dt_min dt_lr dropout, from S4's official configurations.
S4_SIZES = {
    "listops": (8, 128, 64, 128, "batch", "post", 1e-3, "main", 0),
    "text": (6, 256, 64, 256, "batch", "pre", 1e-3, "main", 0),
    "image": (6, 512, 64, 2, "layer", "post", 1e-3, "main", 0.1),
    "pathx": (6, 256, 64, 256, "batch", "pre", 1e-4, 5e-4, 0),
    "bidmc_rr": (6, 128, 256, 2, "layer", "pre", 1e-3, 1e-3, 0),
}

# What your own data might be: numbers, and so many of them that the rule changes nothing.
OWN = replace(FILE, length=100, classes=2, sizes=(3_000, 500, 500), mask=0.5, channels=1)

# ---- the lines -----------------------------------------------------------------------------------


def task_of(name):
    """A task as its prepared data would fill it in."""
    return TASKS[name] if name in TASKS and TASKS[name].length else OWN


def words(task, model, objective=None):
    return ["--task", task, "--model", model] + (["--objective", objective] if objective else [])


def pretrained(folder, argv, finished=True):
    """A pretraining run as far as finetune.py's flags look at it -> how to start from it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(vars(parse(pretrain, argv)), default=str))
    if finished:
        (folder / "result.json").touch()
    return ["--init", str(folder)]


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    """(task, model, objective, start) -> parsed flags, for all that there are."""
    folder, parsed = tmp_path_factory.mktemp("runs"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flags, "look_up", lambda name, _: task_of(name))
        for i, key in enumerate(
            itertools.product([*TASKS, "file:/my.npz", "ucr:Mine"], MODELS, ("masked", "causal"))
        ):
            with contextlib.suppress(UserError):  # no such recipe
                args = parse(finetune, words(*key))
                parsed[*key, args.start] = args
                parsed[*key, "pretrain"] = parse(pretrain, words(*key))
                parsed[*key, "spt"] = parse(finetune, pretrained(folder / str(i), words(*key)))
    return parsed


def test_every_line_counts_somewhere_and_fits_its_task(recipes):
    lines = [
        "/".join(line[column] for column in ("task", "model", "objective"))
        for line in rows("recipes", RECIPES, SMALL_RECIPES, OWN_RECIPES)
    ]
    assert set(lines) == {args.recipe for args in recipes.values()}, "a line is hidden by another"
    wanted = itertools.product(TASKS, set(MODELS) - {"pythia", "pythia_rand"}, ("masked", "causal"))
    assert set(wanted) <= {key[:3] for key in recipes if key[3] == "pretrain"}, (
        "a pair has no recipe"
    )
    for (name, model, objective, start), args in recipes.items():
        task = task_of(name)
        assert (args.start, args.changed, args.arch) == (start, {}, arch(name, model))
        if start == "pretrain":
            assert args.mask == (task.mask if objective == "masked" else None)
            assert args.loss == "ce" or task.channels is not None
            assert args.loss == "l1" or task.vocab is not None
        else:
            assert (args.head == "pair") == (task.documents == 2)


def test_the_first_line_that_matches_counts_and_a_model_has_its_own_before_others(recipes):
    for key, name in (
        (("bidmc_spo2", "rotary"), "bidmc_spo2/rotary"),
        (("bidmc_rr", "rotary"), "bidmc_*/rotary"),
        (("listops", "s4_rand"), "listops/s4_rand"),
        (("retrieval", "s4_rand"), "retrieval/s4"),
        (("image", "sgconv"), "image/s4"),
        (("pathx_mini", "linformer"), "pathx*_mini/transformer"),
    ):
        assert recipes[*key, "masked", "scratch"].recipe == name + "/masked"
    assert [parse(pretrain, words("sc", model)).objective for model in ("rotary", "s4")] == [
        "masked"
    ] * 2
    assert parse(finetune, words("text", "pythia")).objective == "causal"


@pytest.mark.parametrize("stage", [pretrain, finetune])
def test_help_shows_the_recipe_and_every_task_and_model(stage, capsys):
    with pytest.raises(SystemExit):
        parse(stage, [*words("pathx", "s4"), "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    recipe = (
        "loss=ce lr=0.001 wd=0.05 batch=8 "
        if stage is pretrain
        else "pool=max head=linear lr=0.0005 wd=0.05 "
    )
    assert f"Recipe pathx/s4/masked: {recipe}" in shown and "d=256 state=64" in shown
    with pytest.raises(SystemExit):
        parse(stage, ["--help"])
    assert {*TASKS, *MODELS} <= set(capsys.readouterr().out.split())


def test_the_numbers_are_the_papers(recipes):
    """Every number that the paper states; lines of models and tasks that it does not have are
    free."""
    for row in read_table(PAPER):
        key = row["task"], row["model"], row["objective"]
        first, second, scratch = (recipes[*key, start] for start in ("pretrain", "spt", "scratch"))
        for args, column in ((first, "spt"), (second, "finetuning"), (scratch, "scratch")):
            assert args.wd == float(row["wd"]), key
            assert column not in row or [args.lr, args.batch] == [
                float(cell) for cell in row[column].split("/")
            ], key
        assert first.loss == ("l1" if row["task"] in PAPER_L1 else "ce")
        assert second.pool == scratch.pool == row.get("pool", second.pool)
        if row["model"] in ("transformer", "rotary"):
            assert all(
                getattr(scratch, name) == getattr(second, name)
                for name in ("lr", "batch", "epochs", "warmup", "schedule")
            ), key
    assert PAPER_MASK.items() <= {name: task.mask for name, task in TASKS.items()}.items()
    for key, whole in WHOLE.items():
        args = recipes[key]
        length = str(args.steps or f"{args.epochs}e")
        assert (
            args.lr,
            args.batch,
            args.wd,
            length,
            args.warmup,
            args.schedule,
            args.pool,
            args.head,
        ) == whole, key


def test_sizes_are_the_official_ones():
    names = ("layers", "d", "state", "n_ssm", "norm", "place", "dt_min", "dt_lr", "dropout")
    for task, sizes in S4_SIZES.items():
        assert tuple(arch(task, "s4")[name] for name in names) == sizes, task
    assert arch("pathx", "dlr") == dict(
        model="dlr",
        layers=6,
        d=256,
        state=1024,
        norm="layer",
        place="pre",
        dt_min=1e-4,
        dt_max=1e-3,
        ssm_lr=1e-4,
        dropout=0,
    )
    # Table 4: heads; section 3 and C.3: blocks.
    assert [
        arch(task, "transformer")["heads"] for task in ("text", "retrieval", "image", "pathx")
    ] == [8, 4, 4, 8]
    assert [arch(task, "rotary")["block"] for task in ("pathx", "sc", "image")] == [
        4096,
        4000,
        None,
    ]


# ---- flags ---------------------------------------------------------------------------------------


def test_explicit_flags_win_and_are_recorded():
    s4 = {"task": "pathx", "model": "s4"}
    for given, changed in (
        ("--lr 0.25 --batch 8", {"lr": 0.25}),
        ("--mask 0.3", {"mask": 0.3}),
        ("--mask 0.5", {}),
        ("--steps 6", {"steps": 6}),
        ("--epochs 50 --seed 4 --log-every 7 --device cpu", {}),
        ("--micro-batch 2", {"micro_batch": 2}),
        ("--train-fraction 0.05", {"train_fraction": 0.05}),
        ("--arch d=64,n_ssm=64,layers=6", {"arch": {"d": 64, "n_ssm": 64}}),
        ("--arch norm=layer --epochs 3", {"arch": {"norm": "layer"}, "epochs": 3}),
    ):
        args = parse(pretrain, words(**s4) + given.split())
        assert args.changed == changed and args.warmup == 5000
        assert all(
            getattr(args, name) == value for name, value in changed.items() if name != "arch"
        )
        assert args.arch == arch("pathx", "s4", **changed.get("arch", {}))
    # the recipe says steps
    args = parse(pretrain, words("listops_demo", "s4") + ["--epochs", "2"])
    assert (args.steps, args.epochs, args.changed) == (None, 2, {"epochs": 2})
    assert parse(pretrain, words("image", "s4") + ["--loss", "ce"]).changed == {"loss": "ce"}
    assert parse(finetune, words("text", "s4") + ["--head", "mlp"]).changed == {"head": "mlp"}
    names = [
        str(parse(pretrain, words(**s4) + flags.split()).out)
        for flags in ("", "--arch d=64,n_ssm=64 --train-fraction 0.1 --seed 2")
    ]
    assert names == [
        "runs/pathx-s4-masked-pretrain-s0",
        "runs/pathx-s4-d=64-n_ssm=64-masked-pretrain-f0.1-s2",
    ]


@pytest.mark.parametrize("stage", [pretrain, finetune])
def test_a_flag_of_ones_own_is_in_the_record_the_name_and_the_tables(stage, monkeypatch, tmp_path):
    """Nothing but the parser knows it. Where it is at its default, nothing has changed."""

    def more(name, objectives, flags=flags.flags):
        parser = flags(name, objectives)
        parser.add_argument("--spans", type=int, default=1)
        parser.add_argument("--sgd", action="store_true")
        return parser

    monkeypatch.setattr(flags, "flags", more)
    argv = words("image", "s4")
    assert parse(stage, argv).changed == parse(stage, [*argv, "--spans", "1"]).changed == {}
    args = parse(stage, [*argv, "--spans", "3", "--sgd"])
    assert args.changed == {"spans": 3, "sgd": True}
    assert args.out.name == parse(stage, argv).out.name.replace("-s0", "-sgd-spans3-s0")
    if stage is finetune:
        for each in (args, parse(stage, argv)):
            finetuned(tmp_path, each.out.name, 0.5, changed=each.changed)
            config = {
                name: value for name, value in vars(each).items() if name not in ("out", "init")
            }
            (tmp_path / each.out.name / "config.json").write_text(json.dumps(config))
        columns, rows = settings.settings_of(
            runs.by_variant(runs.with_pretraining(runs.load(tmp_path)))
        )
        assert columns == ["sgd", "spans"] and [[*row.values.values()][-2:] for row in rows] == [
            [False, 1],
            [True, 3],
        ]


def test_runs_of_different_settings_have_different_folders(tmp_path):
    """All that differs from the recipe, pretraining's changes included; sizes where they always
    were."""

    def name(stage, *flags):
        return parse(stage, [*words("image", "s4"), *flags]).out.name

    assert name(pretrain) == "image-s4-masked-pretrain-s0"
    assert (
        name(pretrain, "--lr", "0.01", "--mask", ".25")
        == "image-s4-masked-pretrain-lr0.01-mask0.25-s0"
    )
    assert (
        name(finetune, "--joint", ".3", "--pool", "max")
        == "image-s4-masked-joint-poolmax-joint0.3-s0"
    )
    assert name(finetune, "--joint", "1") == "image-s4-masked-joint-s0"
    init = pretrained(tmp_path / "run", [*words("image", "s4"), "--lr", "0.3", "--arch", "d=64"])
    second = parse(finetune, [*init, "--freeze", "--lr", "0.3"])
    assert second.out.name == "image-s4-d=64-masked-spt-freeze-lr0.3-pre-lr0.3-s0"


def test_finetuning_inherits_what_was_pretrained(tmp_path):
    argv = words("image", "s4", "masked") + [
        "--arch",
        "d=64",
        "--train-fraction",
        "0.5",
        "--lr",
        "0.3",
        "--seed",
        "5",
    ]
    init = pretrained(tmp_path / "run", argv)
    args = parse(finetune, init + ["--batch", "9"])
    assert (args.task, args.model, args.objective, args.start) == ("image", "s4", "masked", "spt")
    assert args.arch == arch("image", "s4", d=64) and args.train_fraction == 0.5 and args.seed == 0
    before = {"arch": {"d": 64}, "train_fraction": 0.5, "lr": 0.3}
    assert args.changed == {
        "arch": {"d": 64},
        "train_fraction": 0.5,
        "batch": 9,
        "pretraining": before,
    }
    assert parse(finetune, init + ["--train-fraction", "0.1"]).train_fraction == 0.1
    assert parse(finetune, init + words("image", "s4", "masked")).arch == args.arch
    args = parse(finetune, pretrained(tmp_path / "stopped", words("image", "s4"), finished=False))
    assert args.changed == {"pretraining": {"unfinished": True}}


def test_learning_rate_schedules():
    """Linear warm-up, then constant, half a cosine down to 0, or halved after each fifth of the
    run."""

    def rates(schedule, warmup, steps, at):
        args = SimpleNamespace(schedule=schedule, warmup=warmup)
        return pytest.approx([learning_rate(step, steps, args) for step in at])

    for schedule in ("constant", "cosine", "step"):
        assert rates(schedule, 10, 1000, (0, 4, 9)) == [0.1, 0.5, 1]
    assert rates("constant", 10, 100, (10, 50, 99)) == [1, 1, 1]
    assert [1, 0.5, (1 + math.cos(math.pi * 89 / 90)) / 2, 0] == rates(
        "cosine", 10, 100, (10, 55, 99, 100)
    )
    assert rates("step", 0, 500, (0, 99, 100, 200, 399, 499)) == [1, 1, 0.5, 0.25, 0.125, 0.0625]
