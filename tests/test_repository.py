"""The repository as a whole: imports go one way, importing does nothing, the README's commands run, the chain works."""
import ast
import json
import os
import re
import shlex
import subprocess
import sys

import pytest

import analyze
import data
import models
from conftest import ROOT

# models.py reads the lengths of the tasks for the table that it prints.
FILES = {"kernels": set(), "models": {"kernels", "data"}, "generators": set(), "data": {"generators"},
         "pretrain": {"data", "models"}, "finetune": {"data", "models", "pretrain"}, "analyze": set()}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": os.path.dirname(sys.executable) + ":" + os.environ["PATH"]}


@pytest.mark.parametrize("name", FILES)
def test_imports_go_one_way_and_do_nothing(name):
    tree = ast.parse((ROOT / f"{name}.py").read_text())
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert imported & FILES.keys() == FILES[name]
    names = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    assert len(names) == len(set(names)), "defined twice"
    quiet = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.Expr, ast.If)
    for node in tree.body:
        assert isinstance(node, quiet), ast.dump(node)[:80]
        if isinstance(node, ast.Expr):
            assert isinstance(node.value, ast.Constant), "a call at import"
        if isinstance(node, ast.If):
            assert "__main__" in ast.unparse(node.test)


def shell(command, folder, **more):
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=ENVIRONMENT | more, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The tracked files in an empty folder, with small prepared demo sets and a few PathX images."""
    folder = tmp_path_factory.mktemp("copy")
    for name in [*(f"{name}.py" for name in FILES), "run_all.sh", "README.md"]:
        (folder / name).write_bytes((ROOT / name).read_bytes())
    for task, sizes in (("listops_demo", (64, 16, 16)), ("pathfinder_demo", (64, 16, 16)), ("pathx", (2, 1, 1))):
        data.prepare(task, str(folder / "data"), sizes=sizes, workers=1)
    return folder


def test_readme_commands_run(copy):
    """Every `python ...` line of README's shell blocks, cut to a few steps. PathX runs at its full length of 16,384."""
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    lines = [line for line in lines if re.match(r"python (pretrain|finetune|data)\.py", line) and "..." not in line]
    assert any("pretrain.py --task pathx --model s4" in line for line in lines)
    assert any("finetune.py --task pathx --model s4" in line for line in lines)
    small = {"pretrain.py": " --steps 1 --batch 1 --log-every 1", "finetune.py": " --steps 1 --batch 1 --log-every 1"}
    for line in dict.fromkeys(lines):
        script = shlex.split(line)[1]
        if script == "data.py" and not {"--list", "--help"} & set(shlex.split(line)):
            continue                                                    # generating 200,000 images is not for a test
        shell(line + ("" if "--help" in line else small.get(script, "")), copy)


def test_readme_shows_what_models_prints(copy):
    printed = shell("python models.py", copy).splitlines()
    block = re.search("<!-- models:begin -->\n(.*?)<!-- models:end -->", (ROOT / "README.md").read_text(), re.S)[1]
    assert len(block.splitlines()) > 10 and set(block.splitlines()) <= set(printed)
    assert len(printed) == 2 + sum(len(models.read_table(t)) for t in (models.ARCH, models.SMALL_ARCH, models.SIZES))


def test_the_demo_chain(copy):
    """run_all.sh demo --list prints chains; two of them, cut short, then analyze: table and figure."""
    chains = shell("bash run_all.sh demo --list", copy).strip().splitlines()
    assert len(chains) == 2 * 2 * 2 * 3 and len(set(chains)) == len(chains)
    short = " --steps 4 --eval-every 2 --log-every 2 "
    for chain in chains[:4]:
        shell(re.sub(r"--resume", short + "--resume", chain), copy)
    output = shell("python analyze.py demo --runs runs/demo --figure figure.png", copy)
    assert (copy / "figure.png").read_bytes()[:4] == b"\x89PNG"
    results = [json.loads(path.read_text()) for path in copy.glob("runs/demo/*/result.json")]
    scratch = next(r for r in results if r.get("start") == "scratch" and r["model"] == "s4")
    assert f"{100 * scratch['test_accuracy']:.1f}" in output and "one seed" in output
    assert shell("python analyze.py watch runs/demo --once", copy).startswith("[  6/6 runs]")


# ---- analyze.py ------------------------------------------------------------------------------------------------------


def test_table_by_hand(tmp_path):
    accuracies = {("rotary", "scratch"): [.50, .52, .54], ("rotary", "spt"): [.60, .66, .66],
                  ("s4", "scratch"): [.70, .70, .70], ("s4", "spt"): [.72, .70, .74]}
    for (model, start), values in accuracies.items():
        for seed, value in enumerate(values):
            folder = tmp_path / f"{model}-{start}-{seed}"
            folder.mkdir()
            (folder / "result.json").write_text(json.dumps(dict(
                task="listops_demo", model=model, start=start, seed=seed, test_accuracy=value, seconds=1)))
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "result.json").write_text('{"task": "list')
    table = analyze.demo_table(analyze.read_results(tmp_path))
    # differences 10, 14, 12: mean 12, standard deviation 2, half-width 4.303 * 2 / sqrt(3) = 4.97
    assert "| 52.0 ± 2.0 | 64.0 ± 3.5 | +12.0 [+7.0, +17.0] | 3 |" in table
    assert "| +18.0 | +8.0 |" in table


def test_readme_block_is_replaced(tmp_path):
    path = tmp_path / "README.md"
    path.write_text("a\n<!-- demo:begin -->\nold\n<!-- demo:end -->\nb\n")
    analyze.replace_block(path, "demo", "new")
    analyze.replace_block(path, "demo", "newer")
    assert path.read_text() == "a\n<!-- demo:begin -->\nnewer\n<!-- demo:end -->\nb\n"


def test_analyze_without_runs_is_one_line(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "analyze.py", "demo", "--runs", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
