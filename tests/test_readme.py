"""README: its commands are commands and run, its forks apply and run."""

import re
import runpy
import shlex

import numpy as np
from conftest import ROOT, call, flags, laws, parse, result_of, scripts

import analyze
import data
import pretrain


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


README = read("README.md")
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README + read("results/data.md"), re.S)


def block(words):
    """The first block of README or results/data.md with these words."""
    return next(text for _, text in BLOCKS if words in text)


def test_readme_is_short_and_says_how_long_files_are():
    """At most 200 lines of 100 characters; the lines up to where a first reading stops."""
    lines = README.splitlines()
    assert len(lines) <= 200 and max(map(len, lines)) <= 100
    for names, counts in re.findall(r"^\| (`[^|]+`) \| ([\d, ]+) \|", README, re.M):
        for name, count in zip(re.findall(r"`(.+?)`", names), counts.split(", "), strict=True):
            assert abs(read(name).count("\n") / int(count) - 1) <= 0.05, name
    stops = dict.fromkeys(("kernels", "models"), "# ---- Skip at a")
    stops |= dict(pretrain="$", finetune="# ---- Joint")
    first = sum(read(f"{name}.py").split(stop)[0].count("\n") for name, stop in stops.items())
    assert abs(first - int(re.search(r"about ([\d,]+) lines", README)[1].replace(",", ""))) < 30


def test_the_layer_in_five_lines_runs():
    code, names = block("SimpleNamespace"), {}
    exec(code, names)
    assert names["y"].shape == (8, 1024, 64) and names["y"].isfinite().all()


def test_each_command_runs_or_is_listed_or_read_by_its_parser(tmp_path, monkeypatch):
    """Both stages run in one step of a small model, PathX at its full length of 16,384."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(analyze, "COMMANDS", dict.fromkeys(analyze.COMMANDS, lambda args: None))
    monkeypatch.setattr("tasks.making.announce", lambda *arguments: None)  # draws 100 more images
    data.prepare("pathx", sizes=(2, 1, 1), workers=1)
    (tmp_path / "my.npz").touch()
    seen = set()
    for line in "".join(re.findall(r"```bash\n(.*?)```", README, re.S)).splitlines():
        _, script, *words = shlex.split(line, comments=True)
        if script == "run_all.sh":
            words += [] if "--list" in words else ["--list"]
            assert call(script, *words).stdout.startswith("python "), line
        elif script == "analyze.py":
            analyze.command(words)
        elif script in ("pretrain.py", "finetune.py"):
            small = [] if "--init" in words else ["--arch", "layers=1,d=8,n_ssm=8,state=4"]
            if script == "pretrain.py":  # as if it were not shortened
                small += ["--out", parse(pretrain, words).out]
            done = call(script, *words, "--steps", 1, "--batch", 1, *small)
            assert done.returncode == 0, f"{line}: {done.stderr}"
            seen.add((script, "--init" in words))
        elif script == "predict.py":
            assert (ROOT / words[0]).is_dir(), line
        else:
            assert script in ("install", "micro.py"), line
    assert len(seen) == 3
    for target in re.search(r"run_all.sh table2 .*# or (.*)", README)[1].replace("..", "").split():
        listed = call("run_all.sh", target, "--list", "--preset", "mini").stdout
        assert listed.startswith("python "), target
    left = {f"/{path.name}/" for path in tmp_path.iterdir() if path.is_dir()}
    assert left == {"/data/", "/runs/"} <= {*read(".gitignore").split()}


# What a fork with README's mixer and task does, among its tests.
FORKED = """
from pathlib import Path
import numpy as np
from conftest import call

def test_shortconv_and_ecg_are_models_and_tasks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i in range(40):
        path = Path("raw", ("healthy", "sick")[i % 2], f"{i}.npy")
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.random.default_rng(i).normal(size=(1000, 2)).astype(np.float32))
    demo = "--task listops_demo --train 24 --val 8 --test 8 --workers 1".split()
    lines = [("data.py", *demo), ("data.py", "--task", "ecg", "--raw", "raw")]
    few = "--batch 8 --steps 2 --eval-every 1 --out".split()
    for name, *words in (
        ("masked", "--task", "listops_demo", "--model", "shortconv", "--arch", "width=9"),
        ("causal", "--task", "listops_demo", "--model", "shortconv", "--objective", "causal"),
        ("ecg", "--task", "ecg", "--model", "linformer", "--arch", "layers=1,d=16,ff=16,heads=2"),
    ):
        init = "--init", name, *few, f"{name}-tuned"
        lines += ("pretrain.py", *words, *few, name), ("finetune.py", *init)
    lines += [(*line, "--resume") for line in lines[2:]]
    for line in (*lines, ("predict.py", "causal", "--prompt", "[MAX 3")):
        done = call(*line)
        assert done.returncode == 0, (line, done.stderr[-2000:])
        if line[-2] == "--out":                                          # as if it were killed
            Path(line[-1], "result.json").rename(f"{line[-1]}.json")
    assert done.stdout.startswith("[MAX 3")
"""


def test_forks_that_are_a_file_run_and_obey_the_laws(tmp_path):
    """A mixer and a task, and no other line: both objectives, a killed run that goes on."""
    tests = [f"tests/test_{name}.py" for name in ("fork", "models", "mixers", "kernels")]
    copy = scripts(tmp_path / "fork", "results/*.py", "tests/conftest.py", *tests)
    for name in ("zoo/shortconv.py", "tasks/ecg.py"):
        (copy / name).write_text(block(f"# {name}\n"), encoding="utf-8")
    (copy / tests[0]).write_text(FORKED, encoding="utf-8")
    assert laws(copy, *tests[:3], "-k", "shortconv") > 2


def test_a_fork_masks_spans(tmp_path, monkeypatch, elsewhere):
    spans, before = block("np.roll"), read("pretrain.py")
    last = next(line for line in before.splitlines() if "default_rng((1717, *key))" in line)
    (tmp_path / "spans.py").write_text(before.replace(f"{last}\n", spans), encoding="utf-8")
    hide = runpy.run_path(str(tmp_path / "spans.py"))["hide"]
    hidden = hide((4000, 96), 0.3, 7)
    assert abs(hidden.mean() - 0.3) < 0.01
    edges = np.diff(hidden, axis=1, prepend=hidden[:, -1:])  # runs on a circle
    # no run is shorter than eight
    assert hidden.sum() / (edges.sum() / 2) > 8
    assert ((edges.sum(1) == 0) | (hidden.sum(1) >= 8)).all()
    monkeypatch.setattr(pretrain, "hide", hide)
    pretrain.main(flags("run", steps=2))
    assert np.isfinite(result_of(tmp_path / "run")["val_score"])
