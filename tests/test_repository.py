"""The repository as a whole: rooms that import one way, nothing at import, the house's limits,
README's commands, the demo."""

import ast
import contextlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest
import story
from conftest import ROOT, call, parse, scripts
from test_analyze import listed

import data
import models
import pretrain

FOUR = "kernels", "models", "pretrain", "finetune"
TOP = {
    *FOUR,
    "gradients",
    "data",
    "recipes",
    "predict",
    "baseline",
    "analyze",
    "estimator",
    "files",
    "micro",
}
FILES = sorted(
    path.relative_to(ROOT).with_suffix("").as_posix()
    for pattern in ("*.py", "*/*.py", "*/*/*.py")
    for path in ROOT.glob(pattern)
    if not re.match(r"\.|(tests|data|runs|venv)/", path.relative_to(ROOT).as_posix())
)
LONGEST = {"zoo": 240, "data": 500}  # lines of a file there


def room_of(name):
    """A folder, or a file of the top level."""
    return name.split("/")[0]


def and_below(*rooms):
    return {*rooms}.union(*(MAY[room] for room in rooms))


# What each room may import of the others.
MAY = {
    "micro": set(),
    "files": set(),
    "gradients": set(),
    "kernels": {"gradients"},
    "tasks": {"files"},
    "own": {"files", "tasks"},
    "models": {"gradients", "kernels"},
    "data": {"files", "own", "tasks"},
    "recipes": {"files", "models", "tasks"},
    "zoo": {"files", "kernels", "models", "recipes", "tasks"},
}
MAY["engine"] = and_below("data", "zoo")
MAY["pretrain"] = and_below("engine")
MAY["baseline"] = MAY["finetune"] = MAY["use"] = MAY["experiments"] = and_below("pretrain")
MAY["predict"] = and_below("use")
MAY["compare"] = and_below("experiments")
MAY["analyze"] = and_below("compare")
MAY["estimator"] = and_below("experiments", "finetune", "use")
MAY["results"] = {*MAY}
# {what an import may name: its file}. What lies in results/ is imported by its own name.
MODULES = {
    name.removeprefix("results/").removesuffix("/__init__").replace("/", "."): name
    for name in FILES
}


def parsed(name):
    return ast.parse((ROOT / f"{name}.py").read_text())


def imports(tree):
    """(module, name) of every import, wherever in the file it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield from ((node.module, alias.name) for alias in node.names)


def imported(tree):
    """The files of the repository that are imported."""
    found = {
        MODULES.get(f"{module}.{what}", MODULES.get(module, "")) for module, what in imports(tree)
    }
    assert (
        not {module for module, _ in imports(tree) if room_of(module.replace(".", "/")) in MAY}
        - MODULES.keys()
    )
    return found - {""}


def definitions(tree):
    return [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


def test_rooms_import_one_way():
    """Within a room files may import each other, but in no circle. All that lies outside tests/ is
    in a room."""
    assert {room_of(name) for name in FILES} == MAY.keys() and {
        name for name in FILES if "/" not in name
    } == TOP
    found = {name: imported(parsed(name)) for name in FILES}
    # only its picture, which shows what is hidden
    found["data"] -= {"engine/feed", "engine/flags", "pretrain"}
    for name, others in found.items():
        assert {room_of(other) for other in others} <= MAY[room_of(name)] | {room_of(name)}, name
    order = [*TopologicalSorter(found).static_order()]  # raises where there is a circle
    assert {*order} == {*FILES} and not any(room in MAY[room] for room in MAY)


@pytest.mark.parametrize("name", FILES)
def test_each_file_does_nothing_at_import_and_is_short(name):
    tree, lines = parsed(name), (ROOT / f"{name}.py").read_text().splitlines()
    assert name == "estimator" or {
        what for module, what in imports(tree) if module == "pretrain"
    } <= {
        "OBJECTIVES",
        "denoising",
        "make_backbone",
        "parts_of",
        "spt_loss",
    }
    names = [node.name for node in definitions(tree)]
    assert len(names) == len(set(names)), "defined twice"
    for node in [] if name == "zoo/__init__" else tree.body:  # which imports what lies beside it
        if isinstance(node, ast.If):
            assert "__main__" in ast.unparse(node.test)
        elif isinstance(node, ast.Expr):  # a docstring; results/ adds the root to the path
            assert isinstance(node.value, ast.Constant) or any(
                word in ast.unparse(node) for word in ("sys.path", ".register_")
            ), "a call at import"
        else:
            assert isinstance(
                node,
                (
                    ast.Import,
                    ast.ImportFrom,
                    ast.FunctionDef,
                    ast.ClassDef,
                    ast.Assign,
                    ast.AugAssign,
                    ast.AnnAssign,
                ),
            ), ast.dump(node)[:80]
    assert [line for line in lines if len(line) > 120] == [] and len(lines) <= LONGEST.get(
        room_of(name), 9999
    )
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            number = node.end_lineno - node.lineno + 1
            limit = 90 if node.name in ("flags", "paper") else 60  # a parser, a table of settings
            assert number <= limit, f"{node.name} has {number} lines"


def test_the_four_files_stay_short_and_begin_with_the_method():
    assert sum(len((ROOT / f"{name}.py").read_text().splitlines()) for name in FOUR) <= 1850
    run = next(node for node in definitions(parsed("engine/run")) if node.name == "Run")
    assert run.end_lineno - run.lineno < 420
    first = {name: {node.name: node.lineno for node in definitions(parsed(name))} for name in FOUR}
    assert first["models"]["SSM"] <= 65 and first["pretrain"]["hide"] <= 65


def test_the_four_files_name_nothing_of_zoo():
    """No class, function or --model: not as a name, an attribute, or a word in a string. Two models
    are named by words that mean something else too."""
    theirs = {node.name for name in FOUR for node in definitions(parsed(name))}
    ours = {
        node.name for name in FILES if name.startswith("zoo/") for node in definitions(parsed(name))
    } - theirs
    papers = {
        key.value
        for node in ast.walk(parsed("models"))
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    }
    ours |= models.MODELS.keys() - papers - {"linear", "local"}
    assert {"Mega", "structured_linear", "s4d", "pythia", "guide"} <= ours
    for name in FOUR:
        used = set()
        for node in ast.walk(parsed(name)):
            used |= {getattr(node, field, None) for field in ("id", "attr", "name", "arg")}
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                used |= set(re.findall(r"\w+", node.value))
        assert used & ours == set(), name


TAKEN = [  # a file of a room with a name that is taken, and what is said of it
    (
        "zoo",
        "from models import *\nMODELS |= {'s4': Model(SSMBlock, SSM)}\n",
        "zoo/mine.py: --model s4 is already defined in models.py",
    ),
    (
        "zoo",
        "from models import *\nMODELS |= {'s5': Model(SSMBlock, SSM)}\n",
        "zoo/s5.py: --model s5 is already defined in zoo/mine.py",
    ),
    (
        "tasks",
        "from tasks import *\nTASKS['listops'] = replace(TASKS['listops'], length=9)\n",
        "tasks/mine.py: --task listops is already defined in tasks/listops.py",
    ),
    (
        "tasks",
        "from tasks import *\nTASKS['text'] = TASKS['listops']\n",
        "tasks/text.py: --task text is already defined in tasks/mine.py",
    ),
]
# Loads zoo/, and with it tasks/, once for each of these, in one process, since torch takes its
# time.
LOADS = """import contextlib, io, json, pathlib, sys, torch
said = []
for room, text in json.load(sys.stdin):
    path, code = pathlib.Path(room, "mine.py"), 0
    path.write_text(text)
    for name in [*sys.modules]:
        if name.split(".")[0] in ("models", "recipes", "tasks", "zoo"):
            del sys.modules[name]
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            import tasks, zoo
        except SystemExit as end:
            code = end.code
    said.append((code, err.getvalue()))
    path.unlink()
print(json.dumps(said))"""


def test_a_name_that_is_taken_is_one_line(tmp_path):
    """Of zoo/ or tasks/: the line names the file, or what is loaded after it and clashes. Any other
    error of a new file is Python's own."""

    def run(*words, **more):
        return subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            **more,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        )

    scripts(tmp_path)
    done = run("-c", LOADS, input=json.dumps([(room, text) for room, text, _ in TAKEN]))
    for (_, _, line), (code, said) in zip(TAKEN, json.loads(done.stdout), strict=True):
        assert (code, said) == (2, f"error: {line}; choose another name\n")
    (tmp_path / "tasks" / "mine.py").write_text("import tasks\n\ntasks.Nothing()\n")
    done = run("data.py", "--list")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(r'tasks/mine.py", line 3[\s\S]*\nAttributeError: ', done.stderr)


def test_no_paths_of_one_machine():
    for pattern in ("*.py", "*/*.py", "*.sh", "*.md", "*.txt", "results/**/*.md", ".ci/*"):
        for path in ROOT.glob(pattern):
            found = re.findall(
                r"(?<![\w.:/~$}])/(?:home|root|Users|work|mnt|scratch)/\w\S*", path.read_text()
            )
            assert not found, path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a small prepared demo set and a few PathX images."""
    folder = tmp_path_factory.mktemp("place")
    for task, sizes in (("pathfinder_demo", (64, 16, 16)), ("pathx", (2, 1, 1))):
        data.prepare(task, str(folder / "data"), sizes=sizes, workers=1)
    return folder


def run(line, folder):
    """A command line of our scripts -> what it prints."""
    words = shlex.split(line)
    done = call(*words[words[0] in ("python", "bash") :], cwd=folder)
    assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def test_readme_commands_run(place):
    """Every `python ...` line of README's shell blocks, cut to a few steps. PathX runs at its full
    length of 16,384. What they leave is not for git."""
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    lines = [
        line
        for line in lines
        if re.match(r"python (pretrain|finetune|data)\.py", line) and "..." not in line
    ]
    assert "python pretrain.py --task pathx --model s4" in lines
    assert (
        "python finetune.py --task pathx --model s4 --init runs/pathx-s4-masked-pretrain-s0"
        in lines
    )
    for line in dict.fromkeys(lines):
        words = shlex.split(line)
        if words[1] != "data.py":
            line += " --steps 1 --batch 1 --log-every 1"
            if words[1] == "pretrain.py" and "--help" not in words:
                # as if it were not shortened
                line += f" --out {parse(pretrain, words[2:]).out}"
        elif "--list" not in words and "--help" not in words:
            continue  # downloads, or generates 200,000 images
        run(line, place)
    shutil.copy(ROOT / ".gitignore", place)
    (place / "zoo" / "__pycache__").mkdir(parents=True)
    (place / "zoo" / "__pycache__" / "lru.cpython-311.pyc").touch()
    done = subprocess.run(
        "git init -q && git status --porcelain --untracked-files=all",
        shell=True,
        cwd=place,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "?? .gitignore\n" and (place / "runs").exists()


def test_a_mistake_of_the_command_line_has_no_traceback():
    for script in ("pretrain.py", "finetune.py"):
        done = call(script, "--task", "scifar", "--model", "pythia")
        assert (
            done.returncode == 2
            and done.stderr.startswith("error: no recipe")
            and done.stderr.count("\n") == 1
        )


def test_no_large_file_is_committed():
    tracked = subprocess.run(
        ["git", "-C", ROOT, "ls-files"], capture_output=True, text=True
    ).stdout.split()
    assert not [
        name
        for name in tracked
        if (ROOT / name).exists() and (ROOT / name).stat().st_size > 4 << 20
    ]


def test_bare_commands_show_what_there_is_or_what_to_type(monkeypatch):
    """Every model once, in a line with its paper; the examples of the docstring."""

    def printed(script, *words):
        monkeypatch.setattr(sys, "argv", [script, *words])
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
            runpy.run_path(str(ROOT / script), run_name="__main__")
        return out.getvalue()

    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_module("zoo", run_name="__main__")
    lines = out.getvalue().partition("\n\n")[0].splitlines()
    names = [name for line in lines for name in line.partition(": ")[0].split(", ")]
    assert sorted(names) == sorted(models.MODELS)
    assert all(re.search(r"\d{4}|section", line) for line in lines)
    for script in (
        "analyze.py",
        "predict.py",
        "baseline.py",
        "data.py",
        "pretrain.py",
        "finetune.py",
    ):
        assert f"\n    python {script} " in printed(script)


def test_kernels_tells_its_story(tmp_path, monkeypatch):
    """`python kernels.py`: each form beside the one before, with its error; then the picture."""
    monkeypatch.setattr(sys, "argv", ["kernels.py"])
    with contextlib.redirect_stdout(io.StringIO()) as out:
        story.main(tmp_path / "kernels.png")
    # without the references
    lines = [line for line in out.getvalue().splitlines() if line.endswith(" s")][2:]
    errors = [float(line.split()[-3]) for line in lines]
    assert len(errors) == 5 and min(errors) > 0 and max(errors) < 1e-5
    assert (tmp_path / "kernels.png").read_bytes()[:4] == b"\x89PNG"
    assert re.search(r"if __name__.*\n.*results.*story\.py", (ROOT / "kernels.py").read_text())


def test_the_demo_chain(place):
    """run_all.sh demo --list prints the linear model and chains; the first ones, cut short, then
    the table, figure and status."""
    linear, *chains = listed("demo")
    assert len(chains) == 2 * 2 * 3 and len(set(chains)) == len(chains)
    for chain in (linear, *chains[:4]):
        for line in chain.replace(
            "--resume", "--steps 4 --eval-every 2 --log-every 2 --resume"
        ).split(" && "):
            run(line, place)
    output = run("analyze.py compare runs/demo --figure figure.png", place)
    assert (place / "figure.png").read_bytes()[:4] == b"\x89PNG"
    results = [json.loads(path.read_text()) for path in place.glob("runs/demo/*/result.json")]
    scratch = next(r for r in results if r.get("start") == "scratch" and r["model"] == "s4")
    assert any(
        float(word) == pytest.approx(100 * scratch["test_accuracy"], abs=0.051)
        for word in re.findall(r"\d+\.\d+", output)
    )
    assert run("analyze.py status runs/demo", place).startswith("6 of 6 runs are done")
