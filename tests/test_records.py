"""Records that cannot lie: what a user asks for is what is trained, and a run is known by all that
made it."""

import dataclasses
import io
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tokenize
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, call, flags, parse, result_of, scripts, stop_in
from test_analyze import finetuned, put, run
from test_compare import told
from test_experiments import here, stand_in_for_python  # noqa: F401, here is a fixture
from test_models import mixer_settings

import data
import finetune
import pretrain
import tasks
import zoo
from compare import runs
from engine import flags as flags_py
from engine import folder as folder_py
from engine import run as run_py
from engine.feed import Feed
from engine.flags import NOT_DEFINING, defining
from engine.folder import Folder
from engine.processes import Processes, guarded
from engine.setup import setup
from experiments import commands, entries, running, sweep
from files import UserError, locked, sha256_of, without_comments
from models import S4, SizeError

PARSE = {f"{stage.__name__}.py": partial(parse, stage) for stage in (pretrain, finetune)}
pytestmark = pytest.mark.usefixtures("elsewhere")


def own_file(folder, shape=(60, 8, 1)):
    """A user's data of two classes."""
    path = folder / "mine.npz"
    np.savez(path, x=np.random.default_rng(0).normal(size=shape), y=np.arange(shape[0]) % 2)
    return f"file:{path}"


# ---- what a user asks for is always passed on ----------------------------------------------------

OTHERS = dict(
    lr=0.05,
    wd=0.3,
    batch=7,
    epochs=3,
    steps=9,
    warmup=2,
    schedule="step",
    eval_every=5,
    mask=0.11,
    loss="l1",
    pool="max",
    head="mlp",
    micro_batch=2,
    train_fraction=0.5,
    label_fraction=0.5,
    objective="causal",
    joint=2.0,
    **{"arch.d": 32, "arch.layers": 2},
)
MEANINGLESS = dict(scratch={"mask", "loss", "joint"}, spt={"joint"}, joint=set())


@pytest.mark.parametrize(
    "task, model", [("text_demo", "s4"), ("image", "rotary"), ("own", "rotary")]
)
def test_every_value_of_every_flag_arrives(task, model, monkeypatch, tmp_path):
    """In config.json of each stage that a sweep gives the flag, the recipe's own value included. Of
    your data the recipe's epochs are not what `fit` makes of them."""
    monkeypatch.chdir(tmp_path)
    task = own_file(tmp_path) if task == "own" else task
    known = {stage: parser.starts.keys() - sweep.APART for stage, parser in sweep.parsers().items()}
    if own := tasks.declared(task).own:
        data.prepare(task, "data")
    assert known["pretrain"] | known["finetune"] == OTHERS.keys() - {
        "arch.d",
        "arch.layers",
    } | {"arch", "freeze", "class_weights", "fresh"}
    recipe = vars(parse(pretrain, ["--task", task, "--model", model])) | (
        dict(epochs=10) if own else {}
    )
    for start, flag in itertools.product(MEANINGLESS, OTHERS):
        name, _, key = flag.partition(".")
        usual = recipe[name][key] if key else recipe.get(name)
        for value in {OTHERS[flag], usual} - {None} - ({"l1"} if task == "text_demo" else set()):
            settings = sweep.combinations([f"{flag.replace('_', '-')}={value}"])
            (row,) = sweep.sweep([task], [model], settings, [start])
            arrived = []
            for command in commands.chains([row], 0, "runs")[0]:
                _, script, *words = shlex.split(command)
                args = PARSE[script](words)
                config = defining(args) | dict(data=None)
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / "config.json").write_text(json.dumps(config))
                (args.out / "result.json").write_text('{"task": 0, "seed": 0}')
                if f"--{name.replace('_', '-')} " in command:
                    arrived.append((config[name][key] if key else config[name]) == value)
                    assert flag != "epochs" or config["steps"] is None  # they would win
            assert all(arrived) and (arrived or flag in MEANINGLESS[start]), (start, flag, value)
            said = commands.record(commands.trained(row)[0])  # by which a table finds the run
            if not own or name == "epochs":  # others `fit` may choose as well
                assert said["changed"].get(name) == args.changed.get(name), (start, flag, value)


def test_stage_2_alone_may_have_another_share():
    """Else it has that of its pretraining, which is passed on with --init."""
    for flag, wanted in (
        ("finetune.train-fraction", [False, True]),
        ("pretrain.train-fraction", [True, False]),
        ("train-fraction", [True, False]),
    ):
        (row,) = sweep.sweep(["image"], ["s4"], sweep.combinations([f"{flag}=0.5"]), ["spt"])
        assert [
            "--train-fraction 0.5" in line for line in commands.chains([row], 0, "runs")[0]
        ] == wanted


def test_flags_that_say_how_to_read_your_data_reach_data_and_baseline(here, tmp_path):  # noqa: F811
    path = own_file(tmp_path).removeprefix("file:")
    stand_in_for_python(tmp_path, f'[ "$1" = data.py ] && echo "$*" >> {tmp_path}/data.txt')
    here(
        "own",
        "--tasks",
        f"file:{path}",
        "--models",
        "rotary",
        "--seeds",
        "0",
        "--group",
        "who",
        "--samples",
        "--label-fraction",
        "0.5",
        "--label",
        "-1",
        "--no-header",
    )
    assert (
        (tmp_path / "data.txt")
        .read_text()
        .split("\n")[0]
        .endswith("--samples --no-header --label=-1 --group=who")
    )
    (baseline,) = (
        line for line in (tmp_path / "calls.txt").read_text().splitlines() if "baseline.py" in line
    )
    assert "--label-fraction 0.5" in baseline


# ---- what a set is -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        dict(seed=1),
        dict(regression=True),
        dict(kind="symbols"),
        dict(layout=dict(label="0", group="2")),
        "mine.csv",
    ],
    ids=str,
)
def test_any_other_input_is_another_set(other, monkeypatch, tmp_path):
    """A flag, or the content of a file that it was made from; the same flags, or none, open it."""
    monkeypatch.chdir(tmp_path)
    lines = [f"{i % 2},{i % 5},{i % 7},{i % 3}" for i in range(60)]
    (tmp_path / "mine.csv").write_text("\n".join(lines))
    flags = dict(seed=0, layout=dict(label="0"), kind="samples", regression=False)
    folder = data.prepare("file:mine.csv", "data", **flags)
    assert (
        data.prepare("file:mine.csv", "data")
        == folder
        == data.prepare("file:mine.csv", "data", **flags)
    )
    if isinstance(other, str):
        (tmp_path / other).write_text((tmp_path / other).read_text().replace("5", "6"))
    for given in (flags, {}) if isinstance(other, str) else (flags | other, other):
        with pytest.raises(UserError, match="was made by another version or with other "):
            data.prepare("file:mine.csv", "data", **given)


def test_every_field_of_a_task_that_shapes_its_arrays_identifies_its_set():
    row, apart = tasks.TASKS["pathfinder_demo"], ("sizes", "mask", "source", "names", "subset")
    for one in dataclasses.fields(tasks.Task):
        other = dataclasses.replace(row, **{one.name: "other"})
        assert (tasks.identifying(other) == tasks.identifying(row)) == (
            not one.repr or one.name in apart
        ), one.name


# ---- what a run is -------------------------------------------------------------------------------


def another(folder):
    """Put other weights into a pretraining run: of the same flags, as edited code would make."""
    saved = torch.load(folder / "best.pt", weights_only=True)
    next(iter(saved["model"].values())).add_(1e-3)
    torch.save(saved, folder / "best.pt")
    if (folder / "result.json").exists():
        record = json.loads((folder / "result.json").read_text()) | {
            "best.pt": sha256_of(folder / "best.pt")
        }
        (folder / "result.json").write_text(json.dumps(record))


def test_a_replaced_pretraining_is_noticed(mistake, monkeypatch, tmp_path):  # noqa: F811
    """By a finished and by a stopped finetuning."""
    pretrain.main(flags("pt"))
    finetune.main(flags("done", None, None, init="pt"))
    stop_in(5, monkeypatch, "finetune", flags("half", None, None, init="pt"))
    assert result_of(tmp_path / "done")["pretrained"] == result_of(tmp_path / "pt")["best.pt"]
    another(tmp_path / "pt")
    for name in ("done", "half"):
        line = mistake("finetune", flags(name, None, None, init="pt", resume=True))
        assert f"--resume: {name} started from another pt/best.pt; restore that one" in line


def test_a_pretraining_on_any_other_data_is_refused(mistake, tmp_path):  # noqa: F811
    pretrain.main(flags("pt"))
    config = json.loads((tmp_path / "pt" / "config.json").read_text())
    for name in config["data"]:
        other = config | dict(data=config["data"] | {name: None})
        (tmp_path / "pt" / "config.json").write_text(json.dumps(other))
        line = mistake("finetune", flags("ft", None, None, init="pt"))
        assert "pt was pretrained on {" in line and "may hold what was pretrained on" in line


def test_settings_are_final():
    """`setup` fits them to the data; nothing sets one later."""
    words = flags("ft", label_fraction=0.1, eval_every=None, steps=None)
    args, task, (train, *_) = setup("finetune", words, pretrain.OBJECTIVES)
    assert args.batch == args.changed["batch"] == len(train) == 2 and args.data == task.data
    assert args.steps == args.epochs and args.eval_every == max(1, args.steps // 200)
    with pytest.raises(AttributeError, match="settings are final; setup.py sets args.lr"):
        args.lr = 1.0


@pytest.mark.parametrize(
    "stage, words",
    [
        ("pretrain", []),
        ("finetune", []),
        ("finetune", ["--joint", "1"]),
        ("finetune", ["--init", "first"]),
    ],
)
def test_any_other_flag_is_another_run(stage, words, monkeypatch, tmp_path):
    """Every flag but those of the machine, one at a time: --resume refuses it, and compare keeps
    both runs apart."""
    monkeypatch.chdir(tmp_path)
    parse, base = PARSE[f"{stage}.py"], ["--task", "text_demo", "--model", "s4", *words]
    if "--init" in words:  # task, model and more are the pretraining's
        for name, more in (("first", []), ("second", ["--lr", "0.02"])):
            args = PARSE["pretrain.py"](["--task", "text_demo", "--model", "s4", *more])
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text(
                json.dumps(defining(args) | dict(data={"sizes": [9]}))
            )
            torch.save(dict(config=defining(args), model={}), tmp_path / name / "best.pt")
        base = base[4:]

    def made(more):
        args = parse([*base, *more])
        return defining(args) | dict(data={"labels": 1}, code="1"), vars(args)

    config, args = made([])
    (tmp_path / "run").mkdir()
    for name, content in (("config", config), ("result", dict(task=0, seed=0))):
        (tmp_path / "run" / f"{name}.json").write_text(json.dumps(content))
    others = {flag: str(value) for flag, value in OTHERS.items() if "." not in flag} | dict(
        task="listops_demo",
        model="rotary",
        seed="3",
        arch="layers=2",
        freeze="",
        class_weights="",
        fresh="",
        init="second",
        pool="mean" if config.get("pool") == "max" else "max",
    )
    # symbols have one loss
    without = (
        {"mask", "loss", "fresh"} if args["start"] in ("scratch", "spt") else {"loss", "fresh"}
    )
    without |= (
        {"freeze"} if args["start"] == "joint" else {"joint"} if args["start"] == "spt" else set()
    )
    without |= (
        {"task", "model", "objective", "train_fraction", "arch"}
        if args["start"] == "spt"
        else {"init"}
    )
    flags_here = (
        vars(flags_py.flags(stage, pretrain.OBJECTIVES).parse_args([])).keys() - NOT_DEFINING
    )
    for flag in flags_here - without:
        word = [f"--{flag.replace('_', '-')}", others[flag]][: 1 + (others[flag] != "")]
        other, found = made(word)
        with pytest.raises(UserError, match="was started with|started from another"):
            Folder("run", True).look(other, True)
        if flag not in ("seed", "micro_batch"):
            one, two = (
                runs.identity(
                    dict(
                        task=some["task"],
                        model=some["model"],
                        objective=some["objective"],
                        start=some["start"],
                        changed=some["changed"],
                        joint=some.get("joint"),
                    )
                )
                for some in (args, found)
            )
            assert one != two, flag
    with pytest.raises(UserError, match="was started with data"):
        Folder("run", True).look(config | dict(data={"labels": 2}), True)
    assert Folder("run", True).look(made(["--log-every", "7", "--device", "cpu"])[0], True)


def test_what_was_recorded_at_the_start_stays(monkeypatch, tmp_path):
    """An unfinished pretraining stays unfinished, wherever one stands when the run is resumed."""
    stop_in(5, monkeypatch, "pretrain", flags("pt"))
    stop_in(5, monkeypatch, "finetune", flags("ft", None, None, init="pt"))
    (tmp_path / "pt" / "result.json").write_text('{"task": 0, "seed": 0}')
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    finetune.main(flags("../ft", None, None, init="../pt", resume=True))
    record = result_of(tmp_path / "ft")
    assert record["changed"]["pretraining"]["unfinished"] is True and record["init"] == "pt"


def test_the_time_of_a_run_counts_from_its_first_start(monkeypatch, tmp_path):
    stop_in(5, monkeypatch, "pretrain", flags("pt"))
    saved = torch.load(tmp_path / "pt" / "last.pt", weights_only=True)
    saved["state"]["seconds"] = 5000.0
    torch.save(saved, tmp_path / "pt" / "last.pt")
    pretrain.main(flags("pt", resume=True))
    assert 5000 <= result_of(tmp_path / "pt")["seconds"] < 5600


def test_a_run_resumes_in_the_process_that_was_told_to_stop(monkeypatch, tmp_path):
    monkeypatch.setattr(folder_py, "locked", locked)
    stepped = pretrain.Run.stepped

    def told_to_stop(run, step):
        os.kill(os.getpid(), signal.SIGTERM) if step == 2 else None
        stepped(run, step)

    monkeypatch.setattr(pretrain.Run, "stepped", told_to_stop)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    with pytest.raises(SystemExit) as end:
        guarded(lambda: pretrain.main(flags("run")))
    signal.signal(signal.SIGTERM, before[0]), signal.signal(signal.SIGUSR1, before[1])
    assert end.value.code == 143
    pretrain.main(flags("run", resume=True))
    assert result_of(tmp_path / "run")["best_step"]


# ---- the code of a run ---------------------------------------------------------------------------


def test_a_run_knows_the_code_that_shapes_it(monkeypatch, tmp_path):
    """One checksum; comments and other models do not count."""
    monkeypatch.setattr(folder_py, "ROOT", scripts(tmp_path))
    monkeypatch.setattr(
        zoo, "homes", {"lru": tmp_path / "zoo/lru.py", "s5": tmp_path / "zoo/s5.py"}
    )
    monkeypatch.setattr(tasks, "homes", {"listops": tmp_path / "tasks" / "listops.py"})

    def now(model="lru", task="listops"):
        return folder_py.code_of_run(SimpleNamespace(model=model, task=task))

    first = now()
    with open(tmp_path / "models.py", "a") as file:
        file.write("# a comment\n")
    (tmp_path / "zoo" / "s5.py").write_text("other = 1")
    assert now() == first != now("s5")
    codes = {first}
    for name in ("models.py", "zoo/lru.py", "tasks/listops.py", "recipes.py", "engine/run.py"):
        with open(tmp_path / name, "a") as file:
            file.write("more = 1\n")
        codes.add(now())
    assert len(codes) == 6 and now("s4", "file:x.csv") not in codes


def test_the_files_of_a_run_are_all_that_trains_it():
    """All that a process imported from here but those of other models and tasks, and what only
    reads flags and files."""
    words = "import sys, finetune; print(*[n for n in sys.modules if not n.startswith('_')])"
    loaded = subprocess.run(
        [sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    files = {f"{name.replace('.', '/')}{end}" for name in loaded for end in (".py", "/__init__.py")}
    files = {file for file in files if (ROOT / file).is_file()}
    homes = {
        str(home.relative_to(ROOT)) for homes in (zoo.homes, tasks.homes) for home in homes.values()
    }
    beside = {file for file in files if file.startswith(("own/", "tasks/"))} - {"tasks/__init__.py"}
    beside |= {
        "files.py",
        "zoo/__init__.py",
        *(f"engine/{name}.py" for name in ("__init__", "flags", "folder", "setup")),
    }
    assert files - homes - beside == set(folder_py.CODE.split()) - homes


def test_a_resumed_run_knows_both_versions(tmp_path):
    (tmp_path / "last.pt").touch()
    (tmp_path / "config.json").write_text(json.dumps(dict(code="1", changed={})))
    folder = Folder(tmp_path, True)
    for code, known in (("1", "1"), ("2", "1+2"), ("2", "1+2"), ("1", "1+2")):
        folder.look(dict(code=code, changed={}), resume=True)
        assert folder.began["code"] == known
        (tmp_path / "config.json").write_text(json.dumps(folder.began))


def test_seeds_of_different_code_are_not_pooled(tmp_path, capsys):
    """By compare, which the sweep calls; other reports warn. Their pretraining counts; older runs
    know no code."""

    def made(root, *codes, stage="finetune"):
        for seed, code in enumerate(codes):
            first, second = (code if stage == each else None for each in ("pretrain", "finetune"))
            put(tmp_path / root, f"p{seed}", seed=seed, code=first)
            finetuned(
                tmp_path / root,
                f"f{seed}",
                0.5 + seed / 9,
                seed,
                start="spt",
                init=f"x/p{seed}",
                code=second,
            )
        return run("compare", tmp_path / root, "--figure", tmp_path / f"{root}.png")

    for stage in ("pretrain", "finetune"):
        done = made(stage, "1", "2", "1", stage=stage)
        assert (
            done.returncode == 2
            and "2 versions of the code; " in done.stderr
            and "--any-code" in done.stderr
        )
        assert done.stderr.count("\n") == 1
        done = run("compare", tmp_path / stage, "--any-code", "--figure", tmp_path / "any.png")
        assert (
            done.returncode == 0
            and "| 3 |" in done.stdout
            and "warning: seeds of the setting" in done.stderr
        )
    assert made("same", "1", "1").returncode == made("older", "1", None, "1").returncode == 0
    runs.by_variant(runs.with_pretraining(runs.load(tmp_path / "finetune")))
    assert "2 versions of the code" in capsys.readouterr().err


def test_a_sweep_pools_any_code_if_asked(here, tmp_path):  # noqa: F811
    stand_in_for_python(tmp_path)
    here("sweep", "--tasks", "text_demo", "--models", "s4", "--seeds", "0", "--any-code")
    assert "--any-code" in (tmp_path / "analyses.txt").read_text()
    assert "--any-code is for: run_all.sh sweep" in here("demo", "--any-code").stderr


# ---- runs beside each other ----------------------------------------------------------------------


def passes_of(root):
    return [*runs.with_pretraining(runs.load(root)).passes]


def test_joint_training_takes_two_passes_where_it_hides(tmp_path):
    """A causal objective reads the batch once for both losses."""
    for objective in "masked", "causal":
        finetuned(tmp_path, objective, 0.5, start="joint", objective=objective, joint=1.0, steps=30)
    assert sorted(passes_of(tmp_path)) == [30, 60]


def test_a_pretraining_is_found_by_its_path_before_its_name(tmp_path, monkeypatch, capsys):
    """Beside a kept run, and where folders were moved, by its name; never another one, if the
    checksum is known."""
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "one", "p", steps=11, **{"best.pt": "a"})
    put(tmp_path / "two", "p", steps=1000, **{"best.pt": "b"})
    folder = finetuned(tmp_path / "two", "f", 0.5, start="spt", init="one/p", steps=9)
    assert passes_of(tmp_path / "two") == [20]
    record = json.loads((folder / "result.json").read_text())
    lines = [
        record | dict(run="f"),
        dict(json.loads((tmp_path / "two/p/result.json").read_text()), run="p"),
    ]
    (tmp_path / "kept.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert passes_of(tmp_path / "kept.jsonl") == [1009]
    shutil.rmtree(tmp_path / "one")
    assert passes_of(tmp_path / "two") == [1009] and not capsys.readouterr().err
    (folder / "result.json").write_text(json.dumps(record | dict(pretrained="a")))
    assert passes_of(tmp_path / "two") == [] and "f is left out" in capsys.readouterr().err


def test_gains_are_at_equal_passes_or_say_so(tmp_path):
    """SPT of 20 and 20 steps, from scratch 20 and 40."""
    put(tmp_path, "p", steps=20, changed={"steps": 20})
    first = {"steps": 20, "pretraining": {"steps": 20}}
    finetuned(tmp_path, "b", 0.6, start="spt", steps=20, changed=first, init="x/p")
    finetuned(tmp_path, "a", 0.592, steps=20, changed={"steps": 20})
    rows, text = told(tmp_path)
    assert [row[-4] for row in rows[1:] if "spt" in row] == [
        "+0.8 (over 20 passes)"
    ] and "3 runs, " in text
    finetuned(tmp_path, "c", 0.648, steps=40, changed={"steps": 40})
    rows, text = told(tmp_path)
    assert [row[-4] for row in rows[1:] if "spt" in row] == [
        "-4.8"
    ] and "with as many passes, else" in text


def test_gains_say_which_seeds_they_are_of(tmp_path):
    for seed in range(3):
        finetuned(tmp_path, f"j{seed}", 0.5 + seed / 100, seed, start="joint", joint=1.0, steps=500)
    finetuned(tmp_path, "s2", 0.517, 2)
    assert [row[-4] for row in told(tmp_path)[0][1:] if "joint" in row][0].endswith(
        " (common seeds: 2)"
    )
    shutil.rmtree(tmp_path / "s2")
    finetuned(tmp_path, "s7", 0.517, 7, seconds=900.0, processes=8)
    rows, text = told(tmp_path)
    assert [row[-4] for row in rows[1:] if "joint" in row] == ["– (common seeds: none)"]
    said = runs.provenance(runs.load(tmp_path / "s7"))
    assert "1 run, seeds 7" in said and "; 2.0 hours of training" in said  # of all processes


# ---- parts, kernels, lengths ---------------------------------------------------------------------


def test_no_part_exceeds_a_micro_batch():
    """Whatever the number of processes; all have equally many parts, and none is empty."""
    lengths = np.random.default_rng(0).integers(1, 900, 40)
    for world, batch, micro, ragged in itertools.product(
        (1, 2, 3), (5, 6, 8, 9, 13), (1, 2, 3, 4), (False, True)
    ):
        if batch < world or micro == 1 and batch % world:  # an error: see below
            continue
        counts, seen = set(), []
        for rank in range(world):
            args = SimpleNamespace(batch=batch, micro_batch=micro, seed=0, fresh=False)
            feed = Feed(
                args,
                SimpleNamespace(world=world, rank=rank, device=None),
                dict(target="", documents=1),
                40,
                lengths if ragged else None,
                False,
                False,
            )
            rows, mine = feed.rows(0)
            x = torch.from_numpy(rows[mine])
            parts = feed.parts(pretrain.Denoising(x, x, x, x), rows, mine)
            assert all(1 <= len(part.lengths) <= micro for part in parts), (
                world,
                batch,
                micro,
                ragged,
            )
            counts.add(len(parts))
            seen += [int(n) for part in parts for n in part.lengths]
        assert len(counts) == 1 and sorted(seen) == sorted(rows)


def test_rows_that_processes_cannot_share_singly_are_one_line(mistake, monkeypatch):  # noqa: F811

    def two(args):
        processes = Processes(args)
        processes.world, processes.barrier = 2, lambda: None
        return processes

    monkeypatch.setattr(run_py, "Processes", two)
    line = mistake("pretrain", flags("run", batch=9, micro_batch=1))
    assert "--micro-batch 1: give 2, or a --batch divisible by 2 processes" in line


def test_an_s4_layer_makes_no_longer_kernel_than_it_was_made_for():
    kernel = S4(mixer_settings(d=4, state=8, n_ssm=2, dt_min=0.001, dt_max=0.1, length=256))
    assert kernel(256).shape[-1] >= 256 and kernel(100).shape[-1] >= 100
    with pytest.raises(SizeError, match="length=256, got 1024 positions"):
        kernel(1024)


# ---- machines ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inherited, count, words, wanted",
    [
        (None, 2, "", {"0", "1"}),
        ("4,6", 2, "", {"4", "6"}),
        ("4,6,7", 3, "--gpus 0,2", {"4", "7"}),
        (None, 0, "--gpus 3,5", {"3", "5"}),
        ("", 0, "", {""}),
    ],
)
def test_chains_share_the_visible_gpus(
    inherited,
    count,
    words,
    wanted,
    here,  # noqa: F811
    monkeypatch,
    tmp_path,
):
    """One at a time on each, and --gpus counts among the visible ones. Without a GPU chains share
    the cores."""
    stand_in_for_python(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(7), raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", inherited) if inherited is not None else None
    pools, pool = [], running.Pool.__init__
    monkeypatch.setattr(
        running.Pool, "__init__", lambda self, *more: (pools.append(more), pool(self, *more))[1]
    )
    monkeypatch.setenv("JOBS", "")
    done = call(
        "run_all.sh",
        "table7",
        "--tasks",
        "image",
        "--seeds",
        "0",
        *words.split(),
        JOBS="",
        PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
    )
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls.txt").read_text().splitlines()
    assert {line.split(" ")[0] for line in calls} == wanted
    assert pools[0][0] == (len(wanted) if any(wanted) else 7)


def test_gpus_that_are_not_visible_are_one_line(here, monkeypatch, tmp_path):  # noqa: F811
    stand_in_for_python(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    done = here("table7", "--tasks", "image", "--gpus", "0,5")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "error: --gpus: CUDA_VISIBLE_DEVICES leaves only 0 to 1"
    )


def test_a_micro_batch_alone_is_the_recipe():
    """Not with BatchNorm, which takes its statistics over it. A sweep says the same of a run before
    it is made."""
    for model, asked, changed in (
        ("rotary", {}, {}),
        ("s4", {}, {"micro_batch": 2}),
        ("s4", {"norm": "layer"}, {}),
        ("rotary", {"norm": "batch"}, {"micro_batch": 2}),
    ):
        words = [f"--arch={name}={value}" for name, value in asked.items()]
        args = parse(pretrain, ["--task", "pathx", "--model", model, "--micro-batch", "2", *words])
        wanted = changed | ({"arch": asked} if asked else {})
        assert args.changed == wanted and args.micro_batch == 2
        (row,) = entries.rows(
            "pathx", model, [entries.Variant("pretrain", "", " ".join(["--micro-batch 2", *words]))]
        )
        assert commands.record(commands.trained(row)[0])["changed"] == wanted


def test_a_checksum_of_code_is_that_of_every_python():
    """Comments do not count, and # inside a string does; ast.unparse would write the f-string
    otherwise in 3.12."""
    source = "def f(x):  # why\n    # more\n\n    return f\"{x!r:>{3}} # {'a'}\"\n"
    assert without_comments(source) == "def f(x):\n    return f\"{x!r:>{3}} # {'a'}\""


@pytest.mark.parametrize(
    "path", sorted(ROOT.glob("*.py")) + sorted(ROOT.glob("*/*.py")), ids=lambda path: path.stem
)
def test_comments_are_found_as_python_finds_them(path):
    source = path.read_text()
    lines = source.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    assert without_comments(source) == "\n".join(filter(None, map(str.rstrip, lines)))
