"""The repository as a whole: one-way imports, nothing at import, the house's limits, README's commands, the demo."""
import ast
import json
import os
import re
import shlex
import subprocess
import sys

import pytest

import compare
import data
import models
import pretrain
from conftest import OLD, ROOT, same_line

# What each file may import of the others.
FOUR = {"kernels": set(), "models": {"kernels"}, "pretrain": {"data", "models", "kernels", "run"},
        "finetune": {"data", "models", "run", "pretrain"}}
FILES = FOUR | {"quiet": set(), "pathfinder": set(), "data": {"pathfinder"}, "recipes": {"data", "models"},
                "run": {"data", "models", "recipes", "zoo"}, "predict": {"data", "models", "pretrain", "run"}, "baseline": {"data", "run"},
                "experiments": {"data", "models", "pretrain", "recipes", "zoo"},
                "compare": {"data", "experiments", "models", "pretrain", "recipes"},
                "verdict": {"compare", "data", "experiments", "recipes"},
                "analyze": {"compare", "data", "experiments", "verdict"},
                "run_all": {"analyze", "compare", "data", "experiments", "models", "pretrain", "recipes", "run"}}
ZOO = """__init__ bigbird dfout ema gpu_attention linear linformer longformer lru mamba mega pythia reformer s4d s5 scan sgconv shared spade
    structured""".split()
FILES |= {f"zoo/{name}": {"data", "kernels", "models", "recipes", "zoo"} for name in ZOO}
FILES |= dict.fromkeys(("results/costs", "results/speed", "results/first_hour"),
                       {"data", "kernels", "models", "pretrain", "recipes", "run", "zoo"})
MODULES = {name.split("/")[0] for name in FILES}
LONGEST = {"zoo": 175}                                           # lines of a file there


def parsed(name):
    return ast.parse((ROOT / f"{name}.py").read_text())


def imports(tree):
    """(module, name) of every import, wherever in the file it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module.split(".")[0], alias.name) for alias in node.names)


def definitions(tree):
    return [node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]


@pytest.mark.parametrize("name", FILES)
def test_each_file_imports_one_way_does_nothing_at_import_and_is_short(name):
    tree, lines = parsed(name), (ROOT / f"{name}.py").read_text().splitlines()
    assert {module for module, _ in imports(tree)} & MODULES <= FILES[name] | {"quiet"}
    assert {what for module, what in imports(tree) if module == "pretrain"} <= {"OBJECTIVES", "spt_loss"}
    names = [node.name for node in definitions(tree)]
    assert len(names) == len(set(names)), "defined twice"
    for node in [] if name == "zoo/__init__" else tree.body:          # which imports what lies beside it
        if isinstance(node, ast.If):
            assert "__main__" in ast.unparse(node.test)
        elif isinstance(node, ast.Expr):                              # a docstring; results/ adds the root to the path
            assert isinstance(node.value, ast.Constant) or any(
                    word in ast.unparse(node) for word in ("sys.path", ".register_")), "a call at import"
        else:
            assert isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign,
                                     ast.AugAssign, ast.AnnAssign)), ast.dump(node)[:80]
    assert [line for line in lines if len(line) > 120] == [] and len(lines) <= LONGEST.get(name.split("/")[0], 9999)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, f"{node.name} has {node.end_lineno - node.lineno + 1} lines"


def test_the_four_files_stay_short_and_begin_with_the_method():
    assert sum(len((ROOT / f"{name}.py").read_text().splitlines()) for name in FOUR) < 1650
    first = {name: {node.name: node.lineno for node in definitions(parsed(name))} for name in FOUR}
    assert first["models"]["SSM"] <= 60 and first["pretrain"]["hide"] <= 60


def test_the_four_files_name_nothing_of_zoo():
    """No class, function or --model: not as a name, an attribute, or a word in a string. Two models are named by words
    that mean something else too."""
    theirs = {node.name for name in FOUR for node in definitions(parsed(name))}
    ours = {node.name for name in FILES if name.startswith("zoo/") for node in definitions(parsed(name))} - theirs
    papers = {key.value for node in ast.walk(parsed("models")) if isinstance(node, ast.Dict) for key in node.keys
              if isinstance(key, ast.Constant)}
    ours |= models.MODELS.keys() - papers - {"linear", "local"}
    assert {"Mega", "structured_linear", "s4d", "pythia", "guide"} <= ours
    for name in FOUR:
        used = set()
        for node in ast.walk(parsed(name)):
            used |= {getattr(node, field, None) for field in ("id", "attr", "name", "arg")}
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                used |= set(re.findall(r"\w+", node.value))
        assert used & ours == set(), name


HEAD = "from models import *\nMODELS |= {'two': Model(TransformerBlock, Attention"
UNLOADABLE = [                                                   # a file of zoo/, and what is said of it
    ("import models\n\nclass Mine(models.Nothing): pass\n", "line 3: AttributeError: module 'models' has no .*"),
    ("def broken(:\n", "line 1: SyntaxError: invalid syntax .*"),
    ("import not_installed\n", "line 1: ModuleNotFoundError: .*"),
    ("from models import *\nMODELS |= {'s4': Model(SSMBlock, SSM)}\n", "--model s4 is that of models.py already"),
    ("from models import *\nMODELS |= {'s5': Model(SSMBlock, SSM)}\n", "--model s5 is that of zoo/mine.py already"),
    (f"{HEAD}, 'three')}}\n", "two is like three, which is no model"),
    (f"{HEAD}, 'two')}}\n", "two is like two, which is itself"),
    (f"{HEAD}, 'rotary', recipes='task lr\\n* 1')}}\n", "recipes of two lack .*"),
    (f"{HEAD}, sizes='task d q\\n* 1 2')}}\n", "no class of two declares q in its keys"),
    (f"{HEAD}, sizes='task d\\n* 1 2')}}\n", "table row has 3 cells, the head 2: .*"),
    (f"{HEAD}, sizes='task d\\n* 1')}}\n", "sizes of two lack ff heads layers, .*")]
# Loads zoo/ once for each of these, in one process, since torch takes its time.
LOADS = """import contextlib, io, json, pathlib, sys, torch
said = []
for text in json.load(sys.stdin):
    pathlib.Path("zoo/mine.py").write_text(text)
    for name in [name for name in sys.modules if name.split(".")[0] in ("models", "recipes", "zoo")]:
        del sys.modules[name]
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.suppress(SystemExit):
        import zoo
    said.append(err.getvalue())
print(json.dumps(said))"""


def test_a_file_of_zoo_that_does_not_load_is_one_line(copy):
    """Which names it, or what is loaded after it and clashes; in every script, whatever model it was asked for."""
    path, environment = copy / "zoo" / "mine.py", os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    try:
        texts = json.dumps([text for text, _ in UNLOADABLE])
        command = [sys.executable, "-c", LOADS]
        done = subprocess.run(command, input=texts, cwd=copy, env=environment, capture_output=True, text=True)
        for (_, line), said in zip(UNLOADABLE, json.loads(done.stdout), strict=True):
            assert re.fullmatch(rf"error: zoo/\w+.py: {line}; mend it, or take it out of zoo/\n", said), said
        for words in ("pretrain.py --task listops_demo --model s4", "predict.py runs/x"):
            command = [sys.executable, *words.split()]
            done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
            assert (done.returncode, done.stdout) == (2, "")
            assert done.stderr.startswith("error: zoo/mine.py: sizes of two") and done.stderr.count("\n") == 1
    finally:
        path.unlink()


def test_no_paths_of_one_machine():
    for pattern in ("*.py", "*.sh", "*.md", "*.txt", "results/**/*.md", "tests/*.py", ".ci/*"):
        for path in ROOT.glob(pattern):
            found = re.findall(r"(?<![\w.:/~$}])/(?:home|root|Users|work|mnt|scratch)/\w\S*", path.read_text())
            assert not found, path


def shell(command, folder):
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The tracked files in an empty folder, with a small prepared demo set and a few PathX images."""
    folder = tmp_path_factory.mktemp("copy")
    for name in [*(f"{name}.py" for name in FILES), "run_all.sh", "README.md", ".gitignore"]:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes((ROOT / name).read_bytes())
    for task, sizes in (("pathfinder_demo", (64, 16, 16)), ("pathx", (2, 1, 1))):
        data.prepare(task, str(folder / "data"), sizes=sizes, workers=1)
    return folder


def test_readme_commands_run(copy):
    """Every `python ...` line of README's shell blocks, cut to a few steps. PathX runs at its full length of 16,384."""
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    lines = [line for line in lines if re.match(r"python (pretrain|finetune|data)\.py", line) and "..." not in line]
    assert "python pretrain.py --task pathx --model s4" in lines
    assert "python finetune.py --task pathx --model s4 --init runs/pathx-s4-masked-pretrain-s0" in lines
    for line in dict.fromkeys(lines):
        words = shlex.split(line)
        if words[1] != "data.py":
            line += " --steps 1 --batch 1 --log-every 1"
            if words[1] == "pretrain.py" and "--help" not in words:
                line += f" --out {pretrain.parse_args(words[2:]).out}"          # as if it were not shortened
        elif "--list" not in words and "--help" not in words:
            continue                                                  # downloads, or generates 200,000 images
        shell(line, copy)
    untracked = shell("git init -q && git status --porcelain --untracked-files=all", copy)
    assert "data/" not in untracked and "runs/" not in untracked and "__pycache__" not in untracked


def test_a_mistake_of_the_command_line_has_no_traceback(copy):
    for script in ("pretrain.py", "finetune.py"):
        words = [sys.executable, script, "--task", "scifar", "--model", "pythia"]
        done = subprocess.run(words, cwd=copy, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith("error: no recipe") and done.stderr.count("\n") == 1


def test_the_pages_show_what_costs_prints(copy):
    costs, table = ((ROOT / "results" / f"{name}.md").read_text() for name in ("costs", "models"))
    block = re.search("<!-- models:begin -->\n(.*?)<!-- models:end -->", costs, re.S)[1].splitlines()
    printed = shell("python results/costs.py", copy).splitlines()
    assert len(block) > 10 and all(any(same_line(line, other) for other in printed) for line in block
                                  if not OLD or "reformer" not in line)
    printed = [line.split(" | ") for line in shell("python results/costs.py pathx 16384", copy).splitlines()]
    kept = {row[0].strip("| "): float(row[3].replace(",", "")) for row in printed if len(row) == 5 and row[3][0] != "M"}
    shown = {}
    for names, memory in re.findall(r"^\| (`.*?) \|.*\| ([\d, ]+) \| \w+[^|]*\|$", table, re.M):
        names, memory = re.findall("`(.+?)`", names), [int(cell.replace(",", "")) for cell in memory.split(", ")]
        shown |= dict(zip(names, memory * len(names) if len(memory) == 1 else memory, strict=True))
    models = compare.MODEL_NAMES.keys() | {"pythia"}
    assert shown.keys() == models
    assert all(shown[model] == round(kept[model]) for model in models if not OLD or model != "reformer")


def test_speed_counts_what_a_step_launches(copy):
    """684 operations of S4 stand on results/speed.md; none makes a GPU wait."""
    printed = shell("python results/speed.py operations", copy)
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines()]
    found = {row[0]: row[1:] for row in rows if len(row) == 3}
    page = (ROOT / "results" / "speed.md").read_text()
    for model in ("s4", "dlr", "rotary", "transformer"):
        count, waits = found[model]
        shown = re.search(rf"^\| {model} \| [\d.]+ \| (\d+) \| \d+ \| 0 \|$", page, re.M)[1]
        assert int(count) == pytest.approx(int(shown), rel=0.03 if OLD else 0) and waits == "0"
    command = [sys.executable, "results/speed.py", "nothing"]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and done.stderr.startswith("error: no table nothing")


def test_kernels_and_models_name_the_commands_that_measure_them(copy):
    assert shell("python kernels.py", copy) == "the benchmark: python results/speed.py\n"
    assert shell("python models.py", copy) == "what each model costs: python results/costs.py\n"


def test_the_demo_chain(copy):
    """run_all.sh demo --list prints the linear model and chains; the first ones, cut short, then the table, figure and
    status."""
    linear, *chains = shell("bash run_all.sh demo --list", copy).strip().splitlines()
    assert len(chains) == 2 * 2 * 3 and len(set(chains)) == len(chains)
    for chain in (linear, *chains[:4]):
        shell(chain.replace("--resume", "--steps 4 --eval-every 2 --log-every 2 --resume"), copy)
    output = shell("python analyze.py compare runs/demo --figure figure.png", copy)
    assert (copy / "figure.png").read_bytes()[:4] == b"\x89PNG"
    results = [json.loads(path.read_text()) for path in copy.glob("runs/demo/*/result.json")]
    scratch = next(r for r in results if r.get("start") == "scratch" and r["model"] == "s4")
    assert f"{100 * scratch['test_accuracy']:.1f}" in output
    assert shell("python analyze.py status runs/demo", copy).startswith("6 of 6 runs are done")
