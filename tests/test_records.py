"""Records that cannot lie: what is asked for is trained; a run is known by all that made it."""

import ast
import contextlib
import dataclasses
import functools
import io
import itertools
import json
import shlex
import shutil
import tokenize
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, call, flags, made_run, made_set, parse, result_of, scripts, stop_in

import data
import finetune
import pretrain
import recipes
import tasks
import zoo
from compare import runs, settings
from engine import flags as flags_py
from engine import folder as folder_py
from engine.feed import Feed
from engine.folder import Folder
from engine.processes import Processes
from experiments import commands, entries, sweep
from files import UserError, read_json, sha256_of, without_comments, write_json

pytestmark = pytest.mark.usefixtures("elsewhere")
AGAIN = pytest.raises(UserError, match="was started with")
STAGES = dict(pretrain=pretrain, finetune=finetune)
MACHINE = "--device", "cpu", "--dtype", "float32", "--log-every", "7", "--compile"
# A value of every flag that is no recipe's. A fork added sgd for every run, tau for its objective.
OTHERS = dict(lr=0.05, wd=0.3, batch=7, epochs=3, steps=99, warmup=77, schedule="step")
OTHERS |= dict(eval_every=55, mask=0.11, loss="ce", pool="max", head="mlp", micro_batch=2)
OTHERS |= dict(train_fraction=0.5, label_fraction=0.25, labels_per_class=3, joint=0.3, tau=0.2)
OTHERS |= {"objective": "causal", "arch.d": 32, "freeze": True, "class_weights": True}
OTHERS |= dict(fresh=True, sgd=True)


def swept(root, task, start, *varied):
    """The last setting of a sweep over these values -> its commands; what tables know of it."""
    (row,) = sweep.sweep([task], ["s4"], sweep.combinations(varied)[-1:], [start])
    return commands.chains([row], 0, root)[0], commands.record(commands.trained(row)[0])


def played(chain):
    """Parse each command and leave its run's records -> [(module of its stage, words, args)]."""
    stages = []
    for command in chain:
        _, script, *words = shlex.split(command)
        stage = STAGES[Path(script).stem]
        args = parse(stage, words)
        config = config_of(args)
        names = config.keys() & {"task", "model", "objective", "joint", "changed", "init"}
        record = {name: config[name] for name in names}
        made_run(args.out.parent, args.start, 0.5, name=args.out.name, config=config, **record)
        stages.append((stage, words, args))
    return stages


def config_of(args):
    return flags_py.defining(args) | dict(code="1", data=dict(labels=1))


def value_of(args, flag):
    name, _, key = flag.partition(".")
    return vars(args)[name][key] if key else vars(args).get(name)


def variants_of(*roots, **more):
    return runs.by_variant(runs.with_pretraining(runs.load(*map(Path, roots))), **more)


def test_a_flag_is_refused_or_recorded_named_and_a_column(monkeypatch):
    """By every start, as a sweep passes it on. Its usual value is the recipe."""
    parsers = {stage: flags_py.flags(stage, pretrain.OBJECTIVES) for stage in STAGES}
    for parser in parsers.values():
        parser.add_argument("--sgd", action="store_true")
        parser.add_argument("--tau", type=float, default=0.1)
        parser.starts |= dict(sgd=flags_py.ANY, tau=flags_py.WITH_DENOISING)
    for module in flags_py, sweep:
        monkeypatch.setattr(module, "flags", lambda stage, objectives: parsers[stage])
    monkeypatch.setattr(commands, "parsed", functools.cache(commands.parsed.__wrapped__))
    monkeypatch.setattr(recipes, "rows", functools.cache(recipes.rows))
    starts = {stage: parser.starts for stage, parser in parsers.items()}
    names = {flag.split(".")[0] for flag in OTHERS}
    assert starts["pretrain"].keys() | starts["finetune"].keys() == names | sweep.APART
    usual = {}
    for start, task in itertools.product(entries.STARTS, ("image_mini", "recall")):
        usual[start, task] = played(swept(f"usual/{start}/{task}", task, start)[0])
        for stage, words, args in usual[start, task]:
            again = config_of(parse(stage, [*words, *MACHINE]))
            assert Folder(args.out, True).look(again, True), args.out
            with AGAIN:
                Folder(args.out, True).look(again | dict(data=dict(labels=2)), True)
    for start, (flag, value) in itertools.product(entries.STARTS, OTHERS.items()):
        if (start, flag) == ("linear_probe", "freeze"):  # it is frozen anyway
            continue
        task = "recall" if flag == "fresh" else "image_mini"
        root, name, option = f"{start}/{flag}", flag.split(".")[0], flag.replace("_", "-")
        words = ["--arch", f"d={value}"] if name == "arch" else [f"--{option}", str(value)]
        asked = f"{option}={value}"
        if value is True:
            words, asked = words[:1], option
        chain, said = swept(root, task, start, asked)
        before = False  # whether pretraining has it
        for (stage, given, was), (_, now, args) in zip(usual[start, task], played(chain)):
            case = f"{args.start} of {start}: {' '.join(words)}"
            meant = args.start in starts[stage.__name__].get(name, ())
            inherits = args.start == "spt" and name in ("objective", "train_fraction", "arch")
            assert (words[0] in now) == (meant and not inherits), case
            if not meant and (args.start, flag) != ("scratch", "joint"):  # which starts otherwise
                with pytest.raises((UserError, SystemExit)):
                    parse(stage, [*given, *words])
            changes = {(flag, value)} if meant or inherits else set()
            changes |= {(f"pretraining.{flag}", value)} if before and not inherits else set()
            apart = changes if flag in ("objective", "joint") else set()
            recorded = recipes.settings(args.changed).items()
            recorded -= recipes.settings(was.changed).items()
            assert recorded == changes - apart, case
            assert flag != "epochs" or args.steps is None, case  # they would win
            assert not (meant or inherits) or value_of(args, flag) == value, case
            assert bool(changes) == (args.out.name != was.out.name), case
            assert not changes or (option if value is True else str(value)) in args.out.name, case
            with AGAIN if changes else contextlib.nullcontext():
                Folder(was.out, True).look(config_of(args), True)
            if meant and value_of(was, flag):
                own = f"{stage.__name__}.{option}={value_of(was, flag)}"
                again, _ = swept(f"usual/{start}/{task}", task, start, own)
                assert any(link.endswith(f"--out {was.out}") for link in again), f"{case}: {own}"
            before = meant
        assert said == {key: vars(args).get(key) for key in said}, case
        columns, _ = settings.settings_of(variants_of(root, f"usual/{start}/{task}"))
        assert not changes or {*columns} == {column for column, _ in changes}, case


def test_a_plan_for_your_data_says_what_the_run_records(tmp_path):
    """Before the data are read: lengths and sizes are not what `fit` will make of the recipe's."""
    task = made_set(tmp_path, "fixed").task
    planned = [swept("plan", task, start, "epochs=10", "arch.d=64") for start in entries.STARTS]
    data.prepare(task, "data")
    for start, (_, said) in zip(entries.STARTS, planned):
        _, _, args = played(swept(start, task, start, "epochs=10", "arch.d=64")[0])[-1]
        for name in "epochs", "arch":
            assert said["changed"].get(name) == args.changed.get(name), (start, name)
        assert args.steps is None and args.epochs == 10


def test_a_micro_batch_is_the_recipe_but_where_it_cuts_a_batch_that_is_normalised():
    """A finished run is the same with another one."""
    cases = itertools.product(("s4", "rotary"), ("batch", "layer"), ("4", "8"))  # the batch is 8
    for model, norm, size in cases:
        words = ["--task", "pathx", "--model", model, "--arch", f"norm={norm}", "--micro-batch"]
        args, other = parse(pretrain, [*words, size]), parse(pretrain, [*words, "2"])
        assert ("micro_batch" in args.changed) == (norm == "batch" and size == "4"), words
        place = dict(name=f"{model}-{norm}-{size}", config=config_of(args))
        folder = Folder(made_run(Path("runs"), "pretrain", 1, **place), True)
        with AGAIN if norm == "batch" else contextlib.nullcontext():
            folder.look(config_of(other), True)


def test_any_other_input_is_another_set(tmp_path):
    """A flag, or the content of a file that it was made from; the same flags, or none, open it."""
    lines = "\n".join(f"{i % 2},{i % 5},{i % 7},{i % 3}" for i in range(60))
    (tmp_path / "mine.csv").write_text(lines)
    usual = dict(seed=0, layout=dict(label="0"), kind="samples", regression=False)
    folder = data.prepare("file:mine.csv", "data", **usual)
    assert folder == data.prepare("file:mine.csv", "data")
    others = dict(seed=1), dict(regression=True), dict(kind="symbols"), dict(layout=dict(group="2"))
    for given in (*(usual | other for other in others), usual, {}):
        if given in (usual, {}):
            (tmp_path / "mine.csv").write_text(lines.replace("5", "6"))
        with pytest.raises(UserError, match="was made by another version or with other "):
            data.prepare("file:mine.csv", "data", **given)


def test_every_field_of_a_task_that_shapes_its_arrays_identifies_its_set():
    task, apart = tasks.TASKS["pathfinder_demo"], ("sizes", "mask", "source", "names", "subset")
    for field in dataclasses.fields(tasks.Task):
        other = dataclasses.replace(task, **{field.name: "other"})
        same = tasks.identifying(other) == tasks.identifying(task)
        assert same == (not field.repr or field.name in apart), field.name


def after(name, **more):
    """argv of a finetuning of pt."""
    return flags(name, None, None, **dict(init="pt") | more)


def test_other_weights_or_data_of_a_pretraining_are_noticed(mistake, monkeypatch):
    """By a finished, a stopped and a new finetuning."""
    pt = Path("pt")
    pretrain.main(flags("pt"))
    finetune.main(after("done"))
    stop_in(5, monkeypatch, "finetune", after("half"))
    assert result_of(Path("done"))["pretrained"] == result_of(pt)["best.pt"]
    config = read_json(pt / "config.json")
    for name in config["data"]:
        write_json(pt / "config.json", config | dict(data=config["data"] | {name: None}))
        assert "pt was pretrained on {" in mistake("finetune", after("new")), name
    write_json(pt / "config.json", config)
    saved = torch.load(pt / "best.pt", weights_only=True)
    next(iter(saved["model"].values())).add_(1e-3)  # as edited code of the same flags would
    torch.save(saved, pt / "best.pt")
    write_json(pt / "result.json", result_of(pt) | {"best.pt": sha256_of(pt / "best.pt")})
    for name in ("done", "half"):
        line = mistake("finetune", after(name, resume=True))
        assert f"--resume: {name} started from another pt/best.pt; restore that one" in line


def test_what_was_recorded_at_the_start_of_a_run_stays(monkeypatch, tmp_path):
    """An unfinished pretraining stays so for a resumed run, whose time counts from the start."""
    for stage, words in ("pretrain", flags("pt")), ("finetune", after("ft")):
        stop_in(5, monkeypatch, stage, words)
    saved = torch.load(tmp_path / "ft" / "last.pt", weights_only=True)
    saved["state"]["seconds"] = 5000.0
    torch.save(saved, tmp_path / "ft" / "last.pt")
    (tmp_path / "pt" / "result.json").write_text('{"task": 0, "seed": 0}')
    (tmp_path / "deep").mkdir()
    monkeypatch.chdir(tmp_path / "deep")
    finetune.main(after("../ft", init="../pt", resume=True))
    with pytest.raises(AttributeError, match="settings are final; setup.py sets args.lr"):
        Processes.current.args.lr = 1.0
    record = result_of(tmp_path / "ft")
    assert record["changed"]["pretraining"]["unfinished"] is True and record["init"] == "pt"
    assert 5000 <= record["seconds"] < 5600


def test_a_run_knows_the_code_that_shapes_it(monkeypatch, tmp_path):
    """One checksum; comments and other models do not count."""
    monkeypatch.setattr(folder_py, "ROOT", scripts(tmp_path))
    homes = {model: tmp_path / "zoo" / f"{model}.py" for model in ("lru", "s5")}
    monkeypatch.setattr(zoo, "homes", homes)
    monkeypatch.setattr(tasks, "homes", {"listops": tmp_path / "tasks" / "listops.py"})

    def now(model="lru", task="listops"):
        return folder_py.code_of_run(SimpleNamespace(model=model, task=task))

    def changed(name, line):
        with open(tmp_path / name, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        return now()

    first = now()
    assert first == changed("models.py", "# why") == changed("zoo/s5.py", "a = 1") != now("s5")
    names = "models.py", "zoo/lru.py", "tasks/listops.py", "recipes.py", "engine/run.py"
    assert len({first, now("s4", "file:x.csv"), *(changed(name, "a = 1") for name in names)}) == 7


def test_the_files_of_a_run_are_all_that_trains_it():
    """All that the stages import but files of models and tasks, and what reads flags and files."""
    homes = {path.relative_to(ROOT).as_posix() for path in (zoo.homes | tasks.homes).values()}
    left, loaded = {"pretrain.py", "finetune.py", *homes}, set()
    while left:
        path = left.pop()
        loaded.add(path)
        for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
            names = {alias.name for alias in getattr(node, "names", ())}
            if isinstance(node, ast.ImportFrom):
                names = {node.module, *(f"{node.module}.{name}" for name in names)}
            for name, end in itertools.product(names, (".py", "/__init__.py")):
                path = name.replace(".", "/") + end
                left |= {path} - loaded if (ROOT / path).is_file() else set()
    beside = {f"engine/{name}.py" for name in ("flags", "folder", "setup")}
    beside |= {"files.py", "zoo/__init__.py", *(path for path in loaded if path.startswith("own/"))}
    beside |= {path for path in loaded if path.startswith("tasks/")} - {"tasks/__init__.py"}
    assert loaded - homes - beside == {*folder_py.CODE.split()} - homes


def test_comments_are_found_as_python_finds_them_and_strings_stay():
    sources = [path.read_text(encoding="utf-8") for path in ROOT.glob("[ez]*/*.py")]
    for source in (*sources, "def f(x):  # why\n    return f\"{x!r:>{3}} # {'a'}\"\n"):
        lines = source.split("\n")
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                lines[row - 1] = lines[row - 1][:column]
        assert without_comments(source) == "\n".join(filter(None, map(str.rstrip, lines))), source


def test_a_resumed_run_knows_both_versions(tmp_path):
    (tmp_path / "last.pt").touch()
    folder, config = Folder(tmp_path, True), dict(code="1", changed={})
    for code, both in (("1", "1"), ("2", "1+2"), ("2", "1+2"), ("1", "1+2")):
        write_json(tmp_path / "config.json", config)
        folder.look(dict(code=code, changed={}), resume=True)
        config = folder.began
        assert config["code"] == both


def test_seeds_of_different_code_are_not_pooled_unless_asked_to(capsys):
    """Reports warn. Their pretraining counts; older runs know no code."""
    unknown = [None] * 3
    sets = ("first", unknown, "121"), ("second", "121", unknown), ("none", ["1", None, "1"], "222")
    for root, codes, firsts in sets:
        for seed, (code, first) in enumerate(zip(codes, firsts)):
            made_run(Path(root), "pretrain", 1, name=f"p{seed}", seed=seed, code=first)
            made_run(Path(root), "spt", seed / 9, seed=seed, init=f"x/p{seed}", code=code)
        (variant,) = variants_of(root)
        warned = "were trained by 2 versions of the code" in capsys.readouterr().err
        assert len(variant) == 3 and warned == (root != "none")
        with pytest.raises(UserError, match="--any-code") if warned else contextlib.nullcontext():
            variants_of(root, any_code=False)
    assert call("analyze.py", "compare", "first").returncode == 2


def passes_of(root):
    return [*runs.with_pretraining(runs.load(Path(root))).passes]


def test_joint_training_takes_two_passes_where_it_hides_and_all_processes_take_time(tmp_path):
    for objective in "masked", "causal":
        more = dict(objective=objective, steps=30, seconds=900.0, processes=8)
        made_run(tmp_path, "joint", 0.5, name=objective, **more)
    assert sorted(passes_of(tmp_path)) == [30, 60]
    assert "; 4.0 hours of training" in runs.provenance(runs.load(tmp_path))


def test_a_pretraining_is_found_by_its_path_before_its_name(capsys):
    """By its name beside a kept run, and where folders were moved; by its checksum, if known."""
    made_run(Path("one"), "pretrain", 1, name="p", steps=11, **{"best.pt": "a"})
    two = made_run(Path("two"), "pretrain", 1, name="p", **{"best.pt": "b"})
    folder = made_run(Path("two"), "spt", 0.5, name="f", init="one/p", steps=9)
    assert passes_of("two") == [20]
    record = result_of(folder)
    lines = [record | dict(run="f"), result_of(two) | dict(run="p")]
    Path("kept.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert passes_of("kept.jsonl") == [1009]
    shutil.rmtree("one")
    assert passes_of("two") == [1009] and not capsys.readouterr().err
    write_json(folder / "result.json", record | dict(pretrained="a"))
    assert passes_of("two") == [] and "f is left out" in capsys.readouterr().err


def test_no_part_exceeds_a_micro_batch():
    """Whatever the number of processes; all have equally many parts, and none is empty."""
    lengths = np.random.default_rng(0).integers(1, 900, 40)
    cases = itertools.product((1, 2, 3), (5, 6, 8, 9, 13), (1, 2, 3, 4), (None, lengths))
    for world, batch, micro, ragged in cases:
        if micro == 1 and batch % world:  # an error
            continue
        args = SimpleNamespace(batch=batch, micro_batch=micro, seed=0, fresh=False)
        counts, seen = set(), []
        for rank in range(world):
            processes = SimpleNamespace(world=world, rank=rank, device=None)
            task = dict(target="", documents=1)
            feed = Feed(args, processes, task, 40, ragged, False, False)
            rows, mine = feed.rows(0)
            x = torch.from_numpy(rows[mine])
            parts = feed.parts(pretrain.Denoising(x, x, x, x), rows, mine)
            assert all(1 <= len(part.lengths) <= micro for part in parts), (world, batch, micro)
            counts.add(len(parts))
            seen += [int(n) for part in parts for n in part.lengths]
        assert len(counts) == 1 and sorted(seen) == sorted(rows), (world, batch, micro)
