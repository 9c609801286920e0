"""The repository: rooms that import one way, files that do nothing at import, the demo."""

import ast
import json
import re
import runpy
import shlex
import sys
from graphlib import TopologicalSorter

import pytest
from conftest import ROOT, call

import data
import models
from files import load_room

README, TREES = (ROOT / "README.md").read_text(encoding="utf-8"), {}
for pattern in ("*.py", "*/*.py", "*/*/*.py"):
    for path in sorted(ROOT.glob(pattern)):
        name = path.relative_to(ROOT).with_suffix("").as_posix()
        if not re.match(r"\.|(tests|data|runs|venv)/", name):
            TREES[name] = ast.parse(path.read_text(encoding="utf-8"))


def room_of(name):
    """A folder, or a file of the top level."""
    return name.split("/")[0]


def and_below(*rooms):
    return {*rooms}.union(*(MAY[room] for room in rooms))


# What each room may import of the others.
MAY = dict(micro=set(), files=set(), gradients=set(), kernels={"gradients"}, tasks={"files"})
MAY |= dict(own={"files", "tasks"}, models={"gradients", "kernels"})
MAY |= dict(data={"files", "own", "tasks"}, recipes={"files", "models", "tasks"})
MAY["zoo"] = {"files", "kernels", "models", "recipes", "tasks"}
MAY["engine"] = and_below("data", "zoo")
MAY["pretrain"] = and_below("engine")
MAY |= dict.fromkeys(("baseline", "finetune", "use", "experiments"), and_below("pretrain"))
MAY["predict"] = and_below("use")
MAY["compare"] = and_below("experiments")
MAY["analyze"] = and_below("compare")
MAY["estimator"] = and_below("experiments", "finetune", "use")
MAY["results"] = {*MAY}
# {what an import may name: its file}. What lies in results/ is imported by its own name.
PREFIX = re.compile("^results/|/__init__$")
MODULES = {PREFIX.sub("", name).replace("/", "."): name for name in TREES}


def imports(nodes):
    """(module, name) of every import among these nodes."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield from ((node.module, alias.name) for alias in node.names)


def imported(nodes):
    """The files of the repository that are imported."""
    for module, name in imports(nodes):
        if file := MODULES.get(f"{module}.{name}", MODULES.get(module)):
            yield file
        assert file or room_of(module.replace(".", "/")) not in MAY, module


def test_rooms_import_one_way():
    """Within a room files may import each other, but in no circle. Every file is in a room."""
    assert {room_of(name) for name in TREES} == MAY.keys()
    graph = {name: {*imported(ast.walk(tree))} for name, tree in TREES.items()}
    # only its picture, which shows what is hidden
    graph["data"] -= {"engine/feed", "engine/flags", "pretrain"}
    for name, others in graph.items():
        assert {room_of(other) for other in others} <= MAY[room_of(name)] | {room_of(name)}, name
    assert {*TopologicalSorter(graph).static_order()} == {*TREES}  # raises where there is a circle
    assert not any(room in MAY[room] for room in MAY)


def test_readme_says_how_many_files_a_run_imports():
    loaded, waiting = set(), {"pretrain", "finetune"}
    while waiting:
        name = waiting.pop()
        loaded.add(name)
        waiting |= {*imported(TREES[name].body), f"{room_of(name)}/__init__"} & TREES.keys()
        if name in ("tasks/__init__", "zoo/__init__"):  # which import what lies beside them
            waiting |= {other for other in TREES if room_of(other) == room_of(name)}
        waiting -= loaded | {"zoo/__main__"}
    texts = [(ROOT / f"{name}.py").read_text(encoding="utf-8") for name in loaded]
    count, lines = re.search(r"to read, (\d+) run \(([\d,]+) lines\)", README).groups()
    assert len(loaded) == int(count)
    assert abs("".join(texts).count("\n") / int(lines.replace(",", "")) - 1) < 0.05


def test_the_method_in_readme_names_functions_of_the_code():
    method = re.search(r"(?s)```\n(stage 1.*?)```", README)[1]
    comments = [line.split("# ")[1] for line in method.splitlines() if "  # " in line]
    names = [name for comment in comments[1:] for name in comment.split(", ")]
    trees = [TREES[name] for name in ("data", "models", "pretrain", "finetune")]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, DEFINITIONS)]
    assert len(names) > 8
    assert {name.split(".")[-1] for name in names} <= {node.name for node in nodes}


DEFINITIONS = ast.FunctionDef, ast.ClassDef
BODY = ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AugAssign
SHARED = {"OBJECTIVES", "denoising", "make_backbone", "parts_of", "spt_loss"}


def test_each_file_does_nothing_at_import_and_has_short_functions():
    for name, tree in TREES.items():
        parts = {what for module, what in imports(ast.walk(tree)) if module == "pretrain"}
        assert name == "estimator" or parts <= SHARED, name
        names = [node.name for node in tree.body if isinstance(node, DEFINITIONS)]
        assert len(names) == len({*names}), f"{name} defines something twice"
        for node in tree.body if name != "zoo/__init__" else []:
            code = ast.unparse(node)
            if isinstance(node, ast.If):
                assert "__main__" in ast.unparse(node.test), f"{name}: {code}"
            elif isinstance(node, ast.Expr):  # a docstring; results/ adds the root to the path
                allowed = "sys.path" in code or ".register_" in code
                assert isinstance(node.value, ast.Constant) or allowed, f"{name} calls {code}"
            else:
                assert isinstance(node, (*BODY, ast.AnnAssign)), f"{name}: {code}"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                limit = 90 if node.name in ("flags", "paper") else 60  # a parser, a table
                assert node.end_lineno - node.lineno < limit, f"{name}: {node.name} is long"


def test_a_name_that_is_taken_is_one_line(tmp_path, monkeypatch, capsys):
    """It names the file that is loaded later. Any other error of a new file is Python's own."""
    monkeypatch.syspath_prepend(tmp_path)

    def load(room, line):
        """Load a folder with two files, of which the second has this line -> {name: its file}."""
        texts = dict(__init__="TABLE = {'s4': 1}", a="TABLE['new'] = 2", b=line)
        for name, text in texts.items():
            head = "" if name == "__init__" else f"from {room} import TABLE\n"
            (tmp_path / room).mkdir(exist_ok=True)
            (tmp_path / room / f"{name}.py").write_text(head + text)
        return load_room(tmp_path / room, __import__(room).TABLE, "--model")

    homes = load("room0", "TABLE['other'] = 3")
    assert {name: path.name for name, path in homes.items()} == {"new": "a.py", "other": "b.py"}
    for room, name, home in ("room1", "s4", "models.py"), ("room2", "new", "room2/a.py"):
        with pytest.raises(SystemExit, match="2"):
            load(room, f"TABLE['{name}'] = 3")
        problem = f"{room}/b.py: --model {name} is already defined in {home}"
        assert capsys.readouterr().err == f"error: {problem}; choose another name\n"
    with pytest.raises(AttributeError):
        load("room3", "TABLE.nothing")


def test_no_file_names_a_path_of_one_machine():
    for pattern in ("*.py", "*/*.py", "*.sh", "*.md", "*.txt", "results/**/*.md", ".ci/*"):
        for path in ROOT.glob(pattern):
            paths = r"(?<![\w.:/~$}])/(?:home|root|Users|work|mnt|scratch)/\w\S*"
            assert not re.search(paths, path.read_text(encoding="utf-8")), path


def test_every_model_is_listed_once_with_its_paper(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["zoo"])
    runpy.run_module("zoo", run_name="__main__", alter_sys=True)
    lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    names = [name for line in lines for name in line.partition(": ")[0].split(", ")]
    assert sorted(names) == sorted(models.MODELS)
    assert all(re.search(r"\d{4}|section", line) for line in lines)


def test_the_chains_of_the_demo_run_and_are_compared(tmp_path):
    """The linear model and the first chains, cut short; then the table, figure and status."""

    def run(line):
        done = call(*shlex.split(line.removeprefix("python ")), cwd=tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        return done.stdout

    data.prepare("pathfinder_demo", tmp_path / "data", sizes=(64, 16, 16), workers=1)
    linear, *chains = run("run_all.sh demo --list").splitlines()
    assert len(chains) == len({*chains}) == 2 * 2 * 3
    few = "--steps 4 --eval-every 2 --log-every 2 --resume"
    for chain in (linear, *chains[:4]):
        for line in chain.replace("--resume", few).split(" && "):
            run(line)
    output = run("analyze.py compare runs/demo --figure figure.png")
    results = [json.loads(path.read_text()) for path in tmp_path.glob("runs/demo/*/result.json")]
    scratch = next(r for r in results if r.get("start") == "scratch" and r["model"] == "s4")
    numbers = [float(word) for word in re.findall(r"\d+\.\d+", output)]
    assert pytest.approx(100 * scratch["test_accuracy"], abs=0.051) in numbers
    assert run("analyze.py status runs/demo").startswith("6 of 6 runs are done")
