"""README: the method is quoted from the code, and its three forks apply and run."""
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
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)


def fork(tmp_path, i):
    """A copy of the scripts with the i-th diff of README applied to it."""
    copy = tmp_path / "fork"
    copy.mkdir()
    for path in [*ROOT.glob("*.py")]:
        shutil.copy(path, copy)
    diff = [text for kind, text in BLOCKS if kind == "diff"][i]
    subprocess.run(["git", "apply", "--recount", "-C1", "-"], input=diff, text=True, cwd=copy, check=True)
    return copy


def run(copy, *words):
    environment = os.environ | dict(OMP_NUM_THREADS="1", GIT_CEILING_DIRECTORIES=str(copy.parent))
    done = subprocess.run([sys.executable, *map(str, words)], cwd=copy, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def both_stages(copy, *flags, resumes=False):
    """A few steps of both stages."""
    for stage, words in (("pretrain", flags), ("finetune", ("--init", "pretrain"))):
        words = (f"{stage}.py", *words, "--batch", 8, "--steps", 4, "--eval-every", 2, "--out", stage)
        assert "wrote" in run(copy, *words)
        if resumes:
            (copy / stage / "result.json").unlink()
            assert "wrote" in run(copy, *words, "--resume")


def test_the_method_in_one_screen_is_the_code():
    lines = [line for kind, text in BLOCKS if kind == "python" for line in text.splitlines()]
    code = {}
    for line in lines:
        if line.startswith("# "):
            code = set((ROOT / line[2:].split(":")[0]).read_text().splitlines())
        else:
            assert line in code, line
    assert len(lines) > 12


def test_files_have_about_the_lines_that_readme_says():
    for names, counts in re.findall(r"^\| (`[^|]+`) \| ([\d, ]+) \|", README, re.M):
        for name, count in zip(re.findall(r"`(.+?)`", names), counts.replace(",", " ").split()):
            assert abs(len((ROOT / name).read_text().splitlines()) - int(count)) <= 0.05 * int(count), name


def test_links_and_pictures_are_there():
    for page in [ROOT / "README.md", *ROOT.glob("results/**/*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.skipif(not shutil.which("git"), reason="git applies the diffs")
def test_fork_a_new_mixer(tmp_path):
    copy = fork(tmp_path, 0)
    name = re.search(r'^\+    "(\w+)": Model\(', README, re.M)[1]
    assert name in run(copy, "pretrain.py", "--help")
    assert f"| {name} |" in run(copy, "models.py", 64)
    run(copy, "data.py", "--task", "listops_demo", "--train", 64, "--val", 16, "--test", 16)
    both_stages(copy, "--task", "listops_demo", "--model", name, resumes=True)


@pytest.mark.skipif(not shutil.which("git"), reason="git applies the diffs")
def test_fork_span_masks(tmp_path):
    copy = fork(tmp_path, 1)
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
    copy, rng = fork(tmp_path, 2), np.random.default_rng(0)
    for i in range(100):
        path = tmp_path / "raw" / f"class{i % 5}" / f"{i}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, rng.normal(size=(900 + i, 12)).astype(np.float32))
    run(copy, "data.py", "--task", "ecg", "--raw", tmp_path / "raw")
    both_stages(copy, "--task", "ecg", "--model", "linformer")
