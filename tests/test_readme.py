"""README: its method names what the code has, and its three forks apply and run."""
import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, re.S)
SCRIPTS = [*ROOT.glob("*.py"), *ROOT.glob("zoo/*.py"), ROOT / "results" / "costs.py"]


def scripts(tmp_path):
    """A copy of the scripts."""
    copy = tmp_path / "fork"
    for path in SCRIPTS:
        place = copy / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    return copy


def fork(tmp_path, i):
    """The same with the i-th diff of README applied to it."""
    copy, diff = scripts(tmp_path), [text for kind, text in BLOCKS if kind == "diff"][i]
    subprocess.run(["git", "apply", "--recount", "-C1", "-"], input=diff, text=True, cwd=copy, check=True)
    return copy


def run(copy, *words):
    environment = os.environ | dict(OMP_NUM_THREADS="1", GIT_CEILING_DIRECTORIES=str(copy.parent))
    done = subprocess.run([sys.executable, *map(str, words)], cwd=copy, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def both_stages(copy, *flags, resumes=False, folder=""):
    """A few steps of both stages."""
    for stage, words in (("pretrain", flags), ("finetune", ("--init", f"pretrain{folder}"))):
        out = f"{stage}{folder}"
        words = (f"{stage}.py", *words, "--batch", 8, "--steps", 4, "--eval-every", 2, "--out", out)
        assert "wrote" in run(copy, *words)
        if resumes:
            (copy / out / "result.json").unlink()
            assert "wrote" in run(copy, *words, "--resume")


def laws(copy, *words):
    """Tests that run over all models and tasks, in a fork."""
    shutil.copytree(ROOT / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "results" / "speed.py", copy / "results")
    done = run(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words)
    assert re.search(r"^\d+ passed", done.splitlines()[-1]), done


def test_the_method_names_functions_of_the_code():
    """The comments of the pseudocode: functions, classes and methods, in the order of the stages."""
    method = next(text for kind, text in BLOCKS if not kind)
    names = [name for line in method.splitlines() if "  # " in line for name in line.split("# ")[1].split(", ")][1:]
    defined = set()
    for name in ("data", "models", "pretrain", "finetune"):
        for node in ast.walk(ast.parse((ROOT / f"{name}.py").read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined.add(node.name)
    assert len(method.splitlines()) <= 17 and len(names) > 8
    assert {name.split(".")[-1] for name in names} <= defined


def test_files_have_about_the_lines_that_readme_says():
    for names, counts in re.findall(r"^\| (`[^|]+`) \| ([\d, ]+) \|", README, re.M):
        for name, count in zip(re.findall(r"`(.+?)`", names), counts.split(", "), strict=True):
            assert abs(len((ROOT / name).read_text().splitlines()) - int(count)) <= 0.05 * int(count), name
    assert len(README.splitlines()) <= 230


def test_links_and_pictures_are_there():
    for page in [ROOT / "README.md", *ROOT.glob("results/**/*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


def test_fork_a_new_mixer(tmp_path):
    """A file in zoo/, and no other line: both objectives, generation, the table of costs."""
    copy, text = scripts(tmp_path), next(text for kind, text in BLOCKS if text.startswith("# zoo/"))
    (copy / text.split("\n")[0].removeprefix("# ")).write_text(text)
    name = re.search(r'^MODELS \|= \{"(\w+)": Model\(', text, re.M)[1]
    assert len(text.splitlines()) < 30 and name in run(copy, "pretrain.py", "--help")
    assert f"| {name} |" in run(copy, "results/costs.py", "listops_demo", 64)
    run(copy, "data.py", "--task", "listops_demo", "--train", 64, "--val", 16, "--test", 16)
    both_stages(copy, "--task", "listops_demo", "--model", name, "--arch", "width=9", resumes=True)
    both_stages(copy, "--task", "listops_demo", "--model", name, "--objective", "causal", folder="-causal")
    assert run(copy, "predict.py", "pretrain-causal", "--prompt", "[MAX 3").startswith("[MAX 3")
    laws(copy, "tests/test_models.py", "tests/test_mixers.py", "-k", f"{name} or forward_pass")


@pytest.mark.skipif(not shutil.which("git"), reason="git applies the diffs")
def test_fork_span_masks(tmp_path):
    copy = fork(tmp_path, 0)
    code = "import pretrain; print(pretrain.hide((4000, 96), 0.3, 7).tobytes().hex())"
    hidden = np.frombuffer(bytes.fromhex(run(copy, "-c", code)), bool).reshape(4000, 96)
    assert abs(hidden.mean() - 0.3) < 0.01
    edges = np.diff(hidden, axis=1, prepend=hidden[:, -1:])                           # runs on a circle
    runs = hidden.sum() / (edges.sum() / 2)
    assert runs > 8 and ((edges.sum(1) == 0) | (hidden.sum(1) >= 8)).all()            # no run is shorter than eight
    run(copy, "data.py", "--task", "listops_demo", "--train", 64, "--val", 16, "--test", 16)
    both_stages(copy, "--task", "listops_demo", "--model", "s4")


@pytest.mark.skipif(not shutil.which("git"), reason="git applies the diffs")
def test_fork_your_own_task(tmp_path):
    """And the law over every line of TASKS holds with it."""
    copy, rng = fork(tmp_path, 1), np.random.default_rng(0)
    for i in range(100):
        path = tmp_path / "raw" / f"class{i % 5}" / f"{i}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, rng.normal(size=(900 + i, 12)).astype(np.float32))
    run(copy, "data.py", "--task", "ecg", "--raw", tmp_path / "raw")
    both_stages(copy, "--task", "ecg", "--model", "linformer")
    laws(copy, "tests/test_recipes.py::test_every_line_counts_somewhere_and_fits_its_task")
