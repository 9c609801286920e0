"""README: its method names what the code has, its commands are commands, its forks apply and
run."""

import ast
import contextlib
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from conftest import ROOT, call, calls, laws, scripts

import analyze
from engine.flags import flags
from pretrain import OBJECTIVES

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(
    r"```(\w*)\n(.*?)```", README + (ROOT / "results" / "data.md").read_text(), re.S
)
LISTOPS = "data.py", "--task", "listops_demo", "--train", 64, "--val", 16, "--test", 16


def fork(tmp_path):
    """A copy of the scripts, with the files that README's blocks begin with the names of: `#
    zoo/NAME.py`."""
    copy = scripts(tmp_path / "fork", "results/*.py", "tests/*.py")
    for text in (text for _, text in BLOCKS if re.match(r"# (zoo|tasks)/", text)):
        assert len(text.splitlines()) < 40
        (copy / text.split("\n")[0].removeprefix("# ")).write_text(text)
    return copy


def both_stages(*flags, folder=""):
    """The commands of a few steps of both stages."""
    few = "--batch", 8, "--steps", 4, "--eval-every", 2
    return [
        ("pretrain.py", *flags, *few, "--out", f"pretrain{folder}"),
        ("finetune.py", "--init", f"pretrain{folder}", *few, "--out", f"finetune{folder}"),
    ]


def test_the_method_names_functions_of_the_code():
    """The comments of the pseudocode: functions, classes and methods, in the order of the
    stages."""
    method = next(text for kind, text in BLOCKS if not kind)
    names = [
        name
        for line in method.splitlines()
        if "  # " in line
        for name in line.split("# ")[1].split(", ")
    ][1:]
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
            assert abs(len((ROOT / name).read_text().splitlines()) - int(count)) <= 0.05 * int(
                count
            ), name


def test_readme_is_short_and_says_what_is_read_first():
    """At most 200 lines of 100 characters; the lines up to where a first reading stops."""
    lines = README.splitlines()
    assert len(lines) <= 200 and [line for line in lines if len(line) > 100] == []
    read = 0
    for name, end in dict(
        kernels="# ---- Skip at a", models="# ---- Skip at a", pretrain="$", finetune="# ---- Joint"
    ).items():
        read += (ROOT / f"{name}.py").read_text().split(end)[0].count("\n")
    assert abs(read - int(re.search(r"about ([\d,]+) lines", README)[1].replace(",", ""))) < 30


def test_readme_says_how_many_files_a_run_imports():
    """All files of the repository that the two stages import, and their lines."""
    program = (
        "import sys, pretrain, finetune\n"
        "for module in sys.modules.values(): print(getattr(module, '__file__', None))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    files = {str(ROOT / name) for name in names.split()} & {*done.stdout.split("\n")}
    lines = sum(len(Path(file).read_text().splitlines()) for file in files)
    count, said = re.search(r"to read, (\d+) run \(([\d,]+) lines\)", README).groups()
    assert len(files) == int(count) and abs(lines - int(said.replace(",", ""))) < 0.05 * lines


def test_the_layer_in_five_lines():
    code = next(text for kind, text in BLOCKS if "SimpleNamespace" in text)
    found = {}
    exec(code, found)
    assert (
        found["y"].shape == (8, 1024, 64)
        and found["y"].isfinite().all()
        and len(code.splitlines()) <= 6
    )


def test_each_command_is_one(tmp_path, monkeypatch):
    """What test_repository.py does not run is listed, or read by its script's parser."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(analyze, "COMMANDS", dict.fromkeys(analyze.COMMANDS, lambda args: None))
    (tmp_path / "my.npz").touch()
    blocks = re.findall(r"```bash\n(.*?)```", README, re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    for line in lines:
        words = [
            *shlex.split(line),
            *(["--list"] if "run_all.sh" in line and "--list" not in line else []),
        ]
        if words[:2] == ["bash", "run_all.sh"]:
            assert call(*words[1:]).stdout.startswith("python "), line
        elif words[1] == "analyze.py":
            analyze.command(words[2:])
        elif words[1] in ("pretrain.py", "finetune.py"):
            flags(words[1].removesuffix(".py"), OBJECTIVES).parse_args(words[2:])
        elif words[1] == "micro.py":
            assert words[2:] == []
        elif words[1] == "predict.py":
            assert (ROOT / words[2]).is_dir() or words[2] == "RUN", line
        else:
            assert words[:2] == ["pip", "install"], line
    targets = re.search(r"run_all.sh table2 .*# or (.*) \.\. (figure5)", README)
    for target in (*targets[1].split(), targets[2]):
        assert call("run_all.sh", target, "--list", "--preset", "mini").stdout.startswith("python ")


def test_links_and_pictures_are_there():
    for page in [ROOT / "README.md", *ROOT.glob("results/**/*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), (
                f"{page.name}: {target}"
            )


def test_forks_that_are_a_file(tmp_path):
    """A mixer and a task, and no other line: both objectives, generation, a killed run that goes
    on; and the laws over all models hold."""
    copy, rng = fork(tmp_path), np.random.default_rng(0)
    for i in range(100):
        path = tmp_path / "raw" / ("healthy", "sick")[i % 2] / f"{i}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, rng.normal(size=(1000, 2)).astype(np.float32))
    mixer = both_stages("--task", "listops_demo", "--model", "shortconv", "--arch", "width=9")
    flags, *_, prompted = calls(
        copy,
        ("pretrain.py", "--help"),
        LISTOPS,
        *mixer,
        *both_stages(
            "--task",
            "listops_demo",
            "--model",
            "shortconv",
            "--objective",
            "causal",
            folder="-causal",
        ),
        ("data.py", "--task", "ecg", "--raw", tmp_path / "raw"),
        *both_stages("--task", "ecg", "--model", "linformer", folder="-ecg"),
        ("predict.py", "pretrain-causal", "--prompt", "[MAX 3"),
    )
    assert "shortconv" in flags and "ecg" in flags and prompted.startswith("[MAX 3")
    for stage in ("pretrain", "finetune"):
        (copy / stage / "result.json").unlink()
    assert all("wrote" in said for said in calls(copy, *((*words, "--resume") for words in mixer)))
    laws(copy, "tests/test_models.py", "tests/test_mixers.py", "-k", "shortconv or forward_pass")


def test_fork_span_masks(tmp_path):
    copy, spans = fork(tmp_path), next(text for _, text in BLOCKS if "np.roll" in text)
    before = (copy / "pretrain.py").read_text()
    last = next(line for line in before.splitlines() if "default_rng((1717, *key))" in line)
    (copy / "pretrain.py").write_text(before.replace(f"{last}\n", spans))
    hide = runpy.run_path(str(copy / "pretrain.py"))["hide"]
    hidden = hide((4000, 96), 0.3, 7)
    assert abs(hidden.mean() - 0.3) < 0.01
    edges = np.diff(hidden, axis=1, prepend=hidden[:, -1:])  # runs on a circle
    runs = hidden.sum() / (edges.sum() / 2)
    # no run is shorter than eight
    assert runs > 8 and ((edges.sum(1) == 0) | (hidden.sum(1) >= 8)).all()
    calls(copy, LISTOPS, *both_stages("--task", "listops_demo", "--model", "s4"))


def test_tensorboard_gets_every_number_of_a_log(tmp_path, monkeypatch):
    """By the lines of results/recipes.md, with a writer that notes what it is given."""
    text = (ROOT / "results" / "recipes.md").read_text(encoding="utf-8")
    lines = next(
        block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "tensorboard" in block
    )
    records = [
        dict(kind="start", step=0, argv=["a"]),
        dict(kind="train", step=5, loss=0.5, seconds=1.0),
        dict(kind="eval", step=5, val_loss=0.25, val_score=0.75),
    ]
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "log.jsonl").write_text(
        "\n".join(map(json.dumps, records)) + "\n{torn"
    )
    given = set()

    class SummaryWriter(contextlib.nullcontext):
        def __init__(self, folder):
            super().__init__(self)
            self.folder = folder

        def add_scalar(self, *numbers):
            given.add((self.folder.name, *numbers))

    monkeypatch.setitem(
        sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter)
    )
    monkeypatch.chdir(tmp_path)
    exec(lines, {})
    assert given == {
        ("tensorboard", name, value, 5)
        for name, value in dict(loss=0.5, seconds=1.0, val_loss=0.25, val_score=0.75).items()
    }
