"""What a user can do wrong, over all commands: each is one line that names the mistake, with exit
code 2, and leaves nothing behind. So is a damaged file, whichever it is and whoever reads it."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from conftest import ROOT, SIZES, call, contents, flags, made_run, made_set, opened

import analyze
import data
import finetune
import pretrain
from engine import setup as setup_py
from experiments import running

pytestmark = pytest.mark.usefixtures("elsewhere")
BASE, INIT = "--task listops --model s4", "--init pt --batch 8"
SMALL = f"{BASE} --arch {SIZES['s4']} --steps 2 --batch 8 --eval-every 2 --out pt"
SHORT = dict(BASE=BASE, INIT=INIT, RESUME=f"{SMALL} --resume", AGAIN=SMALL)

# command -> a piece of the line. There are runs pt (pretrained) and ft (finetuned), and files own/.
MISTAKES = """
pretrain --model s4 -> --task is missing; one of: bidmc_hr
pretrain BASE --lr nan -> --lr: must be at least 0, got nan
pretrain BASE --seed 9223372036854775808 -> --seed: must be
finetune BASE --arch d=x -> --arch d=x: d must be a whole number of at least 1
finetune --task image --model rotary --batch 8 --arch d=36 -> turn pairs, not 9 dimensions
finetune BASE --batch 25 -> --batch 25 is more than the 24 training examples
pretrain --task listops --model linformer --objective causal --batch 4 -> no causal form; use
pretrain BASE --loss l1 -> listops has symbols; use --loss ce
finetune --task retrieval --model s4 --head linear -> --head pair is for two documents
pretrain AGAIN -> is not empty; add --resume, or choose another --out
pretrain RESUME --lr 5 -> was started with lr = 0.001, now 5.0
finetune INIT --out pt/best.pt -> cannot write to --out
finetune --init ft -> is not a pretraining run; run pretrain.py
finetune --init pt --task text -> was pretrained with --task listops; leave --task out
finetune --init pt --data-dir other -> its test split may hold what was pretrained on
finetune WORLD_SIZE=9 RANK=0 MASTER_ADDR=x BASE --batch 8 -> --batch 8 is smaller than 9 processes
predict pt --input own/text.csv -> pt is a pretraining run and predicts no labels
predict ft --input own/huge.npz -> huge.npz: Unable to allocate
predict ft --input own/text.csv --out nowhere/p.csv -> cannot write nowhere/p.csv
predict ft --show sheet.png -> --show needs a run of pretrain.py, but ft is one of finetune.py
predict pt --export m.pt2 -> --export needs a finetuned run, but pt is a pretraining run
data --task image --raw nowhere -> --raw nowhere has none of: cifar-10-binary
data --task retrieval -> retrieval cannot be downloaded
data --task own/whole.npz -> did you mean file:own/whole.npz?
data --task file:own/whole.npz --regression -> not every label is a number ('a' is no number)
data --task file:own/whole.npz --symbols -> example 0: not whole numbers in one channel
data --task file:own/pickled.npz -> pickled.npz: it holds Python objects (set)
data --task file:own/flat.npz -> it must hold numbers x (n, l) or (n, l, channels)
data --task file:own/rows.npz -> shapes [(40, 6), (39,)] do not fit
data --task file:own/splits.npz -> example 5: its split is none of train, val and test
data --task file:own/untrained.npz -> example 38: no training example has its label
data --task file:own/spanned.npz --regression -> example 0: its label is infinite
data --task file:own/infinite.npz -> example 9: a value is infinite
data --task file:own/empty.npz -> example 1: it is empty
data --task file:own/negative.npz -> example 4: a negative or missing symbol
data --task file:own/numbers.npz -> 70,000 different integers; are they symbols or samples? Say
analyze figure 4 --runs kept -> kernels.npz is damaged: all input arrays must have the same shape
analyze compare ft --figure f.xyz -> --figure 'f.xyz': give a file name that ends in .png
run_all table2 --regression -> --regression is for: run_all.sh own
run_all JOBS=abc demo -> JOBS must be a number of runs side by side, got 'abc'
run_all own --tasks file:own/infinite.npz -> example 9: a value is infinite
run_all sweep --tasks text_demo --models s4 --starts scratch,foo -> --starts foo: choose from
"""


def own_files(folder):
    """Files of 40 labelled series that have one thing wrong each."""
    folder.mkdir()
    x, y = made_set(folder, targets=None, n=40).x[:, :6], np.arange(40) % 2
    labels, splits = y.astype("U9"), np.repeat(["train", "test"], [38, 2])

    def but(array, place, value):
        changed = array.copy()
        changed[place] = value
        return changed

    ids = np.tile(np.arange(6), (40, 1))
    for name, arrays in dict(
        whole=dict(x=x, y=np.where(y, "b", "a")),
        flat=dict(x=x[:, 0, 0], y=y),
        pickled=dict(x=np.array([{1}, {2}]), y=y[:2]),
        rows=dict(x=x[:, :, 0], y=y[:39]),
        splits=dict(x=x, y=y, split=but(splits, 5, "?")),
        untrained=dict(x=x, y=but(labels, [38, 39], "d"), split=splits),
        spanned=dict(x=x, y=np.where(y, 1e308, -1e308)),
        infinite=dict(x=but(x, (9, 0, 0), np.inf), y=y),
        empty=dict(x=but(x, 1, np.nan), y=y),
        negative=dict(x=but(ids, (4, 2), -1), y=y),
        numbers=dict(x=np.arange(100_000).reshape(1000, 100), y=np.arange(1000) % 2),
    ).items():
        np.savez(folder / f"{name}.npz", **arrays)
    (folder / "text.csv").write_text("1,[MAX 3 4 X\n")
    with zipfile.ZipFile(folder / "huge.npz", "w") as archive, archive.open("x.npy", "w") as file:
        exabytes = dict(descr="<f8", fortran_order=False, shape=(10**9, 10**9))
        np.lib.format.write_array_header_1_0(file, exabytes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a pretraining run, pt, one with another model, other, and a finetuning run,
    ft; a prepared task in data/, and own/."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup_py, "open_task", opened)
        few = dict(log_every=None, warmup=None, steps=2, eval_every=2)
        pretrain.main(flags(folder / "pt", **few))
        pretrain.main(flags(folder / "other", model="rotary", **few))
        finetune.main(flags(folder / "ft", **few))
    own_files(folder / "own")
    data.prepare("listops_demo", str(folder / "data"), (24, 9, 7), workers=1)
    kernels = made_run(folder / "kept", "pretrain", name="k", task="listops") / "kernels.npz"
    np.savez(kernels, before=np.ones((1, 2, 5)), after=np.ones((2, 2, 5)))
    shutil.copyfile(ROOT / "data.py", folder / "data.py")  # which run_all.sh calls, with PYTHONPATH
    return folder


@pytest.fixture
def refused(monkeypatch, capfd):
    """refused(command, folder) -> the line of a refusal, after which the folder is as before."""

    def run(command, folder):
        monkeypatch.setattr(running, "ROOT", folder)
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        script, *words = command.split()
        argv = ["--data-dir", "."] if script in ("pretrain", "finetune", "predict") else []
        environment = dict(word.split("=") for word in words if re.match("[A-Z_]+=", word))
        words = [word for word in words if not re.match("[A-Z_]+=", word)]
        argv += [flag for word in words for flag in SHORT.get(word, word).split()]
        before = contents(folder)
        script = {"run_all": "run_all.sh"}.get(script, f"{script}.py")
        done = call(script, *argv, cwd=folder, **environment)
        line = done.stderr + capfd.readouterr().err  # of data.py, which run_all.sh starts
        assert done.returncode == 2 and line.count("\n") == 1 and "error: " in line, (command, line)
        assert contents(folder) == before, command
        assert not [*folder.rglob(".file-*.lock"), *folder.rglob(".ucr-*.lock")], command
        return line

    return run


@pytest.mark.parametrize("mistake", MISTAKES.strip().splitlines())
def test_a_mistake_is_one_line_and_leaves_nothing_behind(mistake, refused, runs):
    command, words = mistake.split(" -> ")
    assert words in refused(command, runs)


# ---- Damages -------------------------------------------------------------------------------------

# command: file, and what an editor, a disk or a stranger leaves of it
DAMAGES = """
pretrain RESUME: pt/config.json missing cut list deep
pretrain RESUME: pt/last.pt cut pickle other bare still
finetune INIT: pt/config.json missing cut list deep
finetune INIT: pt/best.pt flip missing cut pickle other bare
finetune INIT: pt/result.json cut list deep
predict ft --input own/text.csv: ft/best.pt flip missing cut pickle bare sizeless
predict ft --input own/text.csv: ft/result.json cut list deep
data --task listops_demo: data/listops_demo/meta.json cut list deep sizes found
data --task listops_demo: data/listops_demo/val_x.npy missing cut
analyze compare ft: ft/result.json cut list deep number fields
analyze figure 4 --runs kept: kept/k/kernels.npz cut
analyze keep --runs kept: kept/k/kernels.npz cut
"""
TEXTS = dict(list="[]", number="5", deep="[" * 100_000, fields="{}")
EDITS = dict(
    bare=lambda saved: saved.update(model=None),
    still=lambda saved: saved.pop("optimizer"),
    sizeless=lambda saved: saved["config"].pop("arch"),
    sizes=lambda saved: saved["flags"].update(sizes=[23, 9, 7]),
    found=lambda saved: saved.update(found=[]),
)


def damage(how, path):
    """Change a file. If a pickle is read, it makes a folder."""
    whole = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "other":
        shutil.copy(path.parent.with_name("other") / path.name, path)
    elif how in TEXTS:
        path.write_text(TEXTS[how])
    elif how in EDITS:
        is_json = path.suffix == ".json"
        saved = json.loads(whole) if is_json else torch.load(path)
        EDITS[how](saved)
        path.write_text(json.dumps(saved)) if is_json else torch.save(saved, path)
    else:
        half = len(whole) // 2
        flipped = whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :]
        pickled = b"cos\nmkdir\n(S'executed'\ntR."
        path.write_bytes(dict(cut=whole[:half], flip=flipped, pickle=pickled)[how])


@pytest.mark.parametrize("line", DAMAGES.strip().splitlines())
def test_a_damaged_file_is_one_line(line, refused, runs, tmp_path):
    shutil.copytree(runs, tmp_path, dirs_exist_ok=True)
    command, files = line.split(": ")
    name, *damages = files.split()
    path = tmp_path / name
    whole, result = path.read_bytes(), path.with_name("result.json")
    for how in damages:
        if path.parent.name in ("pt", "ft") and path != result and how != "flip":
            result.unlink(missing_ok=True)  # whose checksum would say it
        damage(how, path)
        assert path.parent.name in refused(command, tmp_path), how
        path.write_bytes(whole)


def test_what_is_no_record_is_named_and_does_not_count(runs, tmp_path, capsys):
    """By `own` and `status`, which go on with the others."""
    for name in ("one", "two"):
        shutil.copytree(runs / "ft", tmp_path / "runs" / name)
    second = tmp_path / "runs" / "two"
    for how in ("list", "fields", "deep"):
        damage(how, second / "result.json")
        for command in ("own", "status"):
            assert analyze.main([command, "runs"]) == 0
            said = capsys.readouterr()
            assert re.match("warning: a run in .*result.json is skipped: ", said.err), how
            assert "1 of 2 runs are done" in said.out or "decide nothing" in said.out, how
    (second / "result.json").unlink()
    (second / "log.jsonl").write_bytes(b'5\n\xff}\n{"step": 3, "total": 9}\n{"step": 4,')
    assert analyze.main(["status", "runs"]) == 0 and "running  two: 3/9" in capsys.readouterr().out


# ---- Names and terminals -------------------------------------------------------------------------


def test_dollars_and_bars_in_names_break_no_table_and_no_figure(runs, tmp_path, capsys):
    shutil.copytree(runs / "ft", tmp_path / "runs" / "ft")
    record = json.loads((runs / "ft" / "result.json").read_text())
    task = r"file:/a|$\frac$|b_$^$.npz"
    made_run(tmp_path / "runs", name="other", **record | dict(seed=1, task=task))
    for command in ("compare", "own"):
        assert analyze.main([command, "runs", "--figure", f"{command}.png"]) == 0
        assert (tmp_path / f"{command}.png").read_bytes()[:4] == b"\x89PNG"
        for table in re.findall(r"(?:^\|.*\n)+", capsys.readouterr().out, re.M):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_a_terminal_that_knows_only_ascii_shows_the_rest(runs):
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    with contextlib.redirect_stdout(terminal):
        assert analyze.main(["compare", str(runs / "ft")]) == 0
    assert b"? standard deviation" in terminal.buffer.getvalue()


@pytest.mark.skipif(os.name == "nt", reason="wants pipes and devices of POSIX")
def test_a_terminal_that_is_full_or_gone_ends_a_command_in_order(tmp_path):
    def listed(output):
        words = [sys.executable, str(ROOT / "data.py"), "--list"]
        done = subprocess.run(words, stdout=output, stderr=subprocess.PIPE, cwd=tmp_path)
        return done.returncode, done.stderr.count(b"\n")

    read, write = os.pipe()
    os.close(read)
    assert listed(write) == (141, 0)
    os.close(write)
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            assert listed(full) == (2, 1)
