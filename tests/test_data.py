"""data.py against independent evaluators, drawn masks, and interruptions."""
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = ROOT.parent / "shared" / "data"
sys.path.insert(0, str(ROOT))
import data  # noqa: E402
import generators  # noqa: E402

SMALL = (1100, 120, 130)


def digest(folder):
    """Fingerprint of all arrays of a prepared task."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.npy"))}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Two small generated tasks, in one process."""
    folder = tmp_path_factory.mktemp("data")
    for task in ("listops_demo", "pathfinder_demo"):
        data.prepare(task, folder, sizes=SMALL, workers=1)
    return folder


def fails(*argv):
    """Run the command line in this process; it must fail as a user's mistake. Returns its one line."""
    out = []
    real, sys.stderr = sys.stderr, SimpleNamespace(write=out.append, flush=lambda: None)
    try:
        code = data.main([str(word) for word in argv])
    finally:
        sys.stderr = real
    lines = [line for line in "".join(out).splitlines() if line.startswith("error: ")]
    assert code == 2 and len(lines) == 1 and "Traceback" not in "".join(out)
    return lines[0]


# ---- ListOps ----------------------------------------------------------------------------------------

def calculator(ids):
    """Value and deepest operator of an expression: a stack machine over ids, sharing nothing with data.py."""
    stack, deepest = [], 0
    for token in ids:
        if token == 18:
            values = []
            while stack[-1] >= 0:
                values.append(stack.pop())
            operator = -stack.pop()
            values = np.array(values)
            apply = {14: np.min, 15: np.max, 16: np.median, 17: lambda v: np.sum(v) % 10}[operator]
            stack.append(int(apply(values)))
        elif token >= 14:
            stack.append(-int(token))
            deepest = max(deepest, sum(entry < 0 for entry in stack))
        else:
            assert 4 <= token <= 13
            stack.append(int(token) - 4)
    assert len(stack) == 1 and stack[0] >= 0
    return stack[0], deepest


@pytest.mark.parametrize("task, count", [("listops", 150), ("listops_demo", 1000)])
def test_listops_labels_grammar_and_lengths(task, count):
    grammar = data.TASKS[task].make
    tokens, lengths, labels = generators.make_listops(grammar, np.random.default_rng(1), count)
    assert len(lengths) == len(labels) == count and lengths.sum() == len(tokens)
    deepest = 0
    for ids, label in zip(np.split(tokens, np.cumsum(lengths)[:-1]), labels):
        assert ids[-1] == data.EOS and (ids[:-1] > data.EOS).all()
        assert grammar.symbols[0] < len(ids) - 1 < grammar.symbols[1] and len(ids) <= data.TASKS[task].length
        value, depth = calculator(ids[:-1])
        assert value == label
        deepest = max(deepest, depth)
    assert deepest == grammar.depth - 1                    # nodes at the last depth are digits


def test_listops_arities():
    tokens, _, _ = generators.make_listops(generators.Grammar(), np.random.default_rng(0), 200)
    arities, open_counts = [], [0]
    for token in tokens[tokens != data.EOS]:
        if token == generators.CLOSE:
            arities.append(open_counts.pop())
        else:
            open_counts[-1] += 1
            if token >= generators.MIN:
                open_counts.append(0)
    assert open_counts == [200]          # every expression is one argument of nothing
    histogram = np.bincount(arities, minlength=12)
    assert histogram[:2].sum() == histogram[11:].sum() == 0
    assert np.abs(histogram[2:11] / len(arities) - 1 / 9).max() < 0.02


def test_listops_statistics():
    _, lengths, labels = generators.make_listops(generators.Grammar(), np.random.default_rng(0), 3000)
    assert abs((lengths - 1).mean() / 1040 - 1) < 0.03     # a plain recursive simulation: 1039.5 +- 3.6
    shares = np.bincount(labels, minlength=10) / 3000
    official = [.171, .091, .077, .078, .090, .088, .077, .076, .077, .173]
    assert np.abs(shares - official).max() < 0.025


def test_evaluate_agrees_and_rejects():
    assert data.evaluate("[MED 1 2 3 8 X".split()) == 2 and data.evaluate("[SM 9 8 X".split()) == 7
    for bad in ("", "1 2", "[MAX 1", "[MAX X", "1 X", "[FIRST 1 X", "[MAX 1 X X"):
        with pytest.raises(ValueError):
            data.evaluate(bad.split())


@pytest.mark.skipif(not (SAMPLES / "listops").exists(), reason="no sample of the original ListOps files")
def test_listops_real_files(tmp_path):
    data.prepare("listops", tmp_path, raw=SAMPLES / "listops")
    for split, size in (("train", 8000), ("val", 1000), ("test", 1000)):
        part = data.load("listops", split, tmp_path)
        assert len(part) == size
        for i in range(0, size, 97):
            ids = part.x[part.offsets[i]:part.offsets[i + 1]]
            assert ids[-1] == data.EOS and calculator(ids[:-1])[0] == part.y[i]


def write_tsv(folder, rows, name="basic_val.tsv"):
    folder.mkdir(exist_ok=True)
    good = "Source\tTarget\r\n( ( ( [MAX 4 ) 3 ) ] )\t4\r\n"
    for split in data.SPLITS:
        (folder / f"basic_{split}.tsv").write_bytes(good.encode())
    (folder / name).write_bytes((good + rows).encode())


@pytest.mark.parametrize("row, words", [
    ("( ( [MAX 4 ) ] )\r\n", ["line 3", "1 columns"]),
    ("( ( [MAX 4 ) ] )\t4\t5\r\n", ["line 3", "3 columns"]),
    ("( ( [MAX 4 ) 5\t4\r\n", ["line 3", "not one complete expression"]),
    ("( ( [MUL 4 ) ] )\t4\r\n", ["line 3", "[MUL"]),
    ("( ( [MAX 4 ) ] )\t5\r\n", ["line 3", "label '5'"]),
])
def test_listops_damaged_file(tmp_path, row, words):
    write_tsv(tmp_path / "lra", row)
    line = fails("--task", "listops", "--data-dir", tmp_path / "data", "--lra-dir", tmp_path / "lra")
    assert "basic_val.tsv" in line and all(word in line for word in words)
    with pytest.raises(data.UserError, match="not prepared"):
        data.load("listops", "val", tmp_path / "data")


def test_listops_long_expression_is_cut(tmp_path):
    write_tsv(tmp_path / "listops-1000", "[SM " + "1 " * 3000 + "]\t0\r\n")
    tokens, lengths, _ = data.read_listops(tmp_path / "listops-1000" / "basic_val.tsv", 2048)
    assert lengths.tolist() == [5, 2048] and tokens[-1] == data.EOS and tokens[-2] == 5
    data.prepare("listops", tmp_path / "data", raw=tmp_path)         # the release's own layout
    x, y, lengths = data.load("listops", "train", tmp_path / "data").batch([0])
    assert x.tolist() == [[15, 8, 7, 18, 3]] and y.tolist() == [4] and lengths.tolist() == [5]


# ---- Pathfinder --------------------------------------------------------------------------------------

def runs(values):
    """[1, 2, 3, 7] -> [(1, 3), (7, 7)]"""
    cuts = np.flatnonzero(np.diff(values) != 1) + 1
    return [(int(run[0]), int(run[-1])) for run in np.split(values, cuts)]


@pytest.mark.parametrize("task, margin, expected", [
    ("pathfinder", 1, [(-150, -121)]),
    ("pathfinder64", 1, [(-180, -136), (-134, -85)]),
    ("pathx", 2, [(-180, -60), (-53, 179)]),
    ("pathx", 3, [(-180, 179)]),
    ("pathx256", 3, [(-180, 179)]),
])
def test_usable_seed_orientations(task, margin, expected):
    t = generators.pathfinder_tables(data.TASKS[task].make, margin)
    assert runs(np.flatnonzero(t.usable) - 180) == expected


def dilated(image, radius):
    out, grid = np.zeros_like(image), np.pad(image, radius)
    for down in range(-radius, radius + 1):
        for right in range(-radius, radius + 1):
            if down ** 2 + right ** 2 <= radius ** 2:
                rows, columns = (slice(radius + move, radius + move + len(image)) for move in (down, right))
                out = np.maximum(out, grid[rows, columns])
    return out


def pasted(side, stamp, row, column):
    half = len(stamp) // 2
    canvas = np.zeros((side + 4 * half,) * 2, np.int64)
    canvas[row + half:row + 3 * half + 1, column + half:column + 3 * half + 1] = stamp
    return canvas[2 * half:-2 * half, 2 * half:-2 * half]


@pytest.mark.parametrize("task, margin, count", [("pathfinder", 1, 4000), ("pathx", 3, 1500)])
def test_tables_equal_drawn_masks(monkeypatch, task, margin, count):
    """The look-ups by pairs of segments give what the official process reads off a drawn mask."""
    row = data.TASKS[task]
    t, side, padding, steps = generators.pathfinder_tables(row.make, margin), row.side, row.make.padding, []
    extend = generators._extend
    monkeypatch.setattr(generators, "_extend", lambda *args: steps.append(args) or extend(*args))
    generators._grow_pairs(np.random.default_rng(3), t, side, row.make, count)
    compared = hits = covers = 0
    for _, _, _, _, old, pivot, orientation in steps:
        pivot = np.ceil(pivot + t.advance[orientation].T).astype(int)
        cover = generators._blocked(t, old, pivot, orientation)
        for a in range(0, pivot.shape[1], 1 + pivot.shape[1] // 8):
            frame = np.full((side, side), 255)
            frame[padding:-padding, padding:-padding] = 0
            mask = np.zeros((side, side), np.int64)
            for segment in old[:, :, a]:
                mask = np.maximum(mask, pasted(side, t.mask[segment[2]], *segment[:2]))
            wide, mask = dilated(mask, margin), np.maximum(mask, frame)
            heads = pivot[:, a] + t.candidate[t.choice[orientation[a]]]
            for choice, (down, right) in enumerate(heads):
                if not (0 <= down < side and 0 <= right < side and t.favour[orientation[a], choice] > 0):
                    continue
                k = t.choice[orientation[a], choice]
                drawn = (mask + pasted(side, t.mask[t.stamp[360 + k]], down, right)).max() >= 459
                head = heads[choice][:, None]
                told = generators._collides(t, side, padding, old, np.array([a]), head, np.array([k]))
                assert told[0] == drawn and cover[a, choice] == wide[down, right]
                compared, hits, covers = compared + 1, hits + drawn, covers + (cover[a, choice] > 0)
    assert compared > 800 and min(hits, covers) > compared // 40


@pytest.fixture(scope="module")
def pictures():
    counts = {"pathfinder": 600, "pathx": 40, "pathx256": 60, "pathfinder_demo": 100}
    return {task: generators.make_pathfinder(data.TASKS[task], np.random.default_rng(0), count)
            for task, count in counts.items()}


@pytest.mark.parametrize("task", ["pathfinder", "pathx", "pathx256", "pathfinder_demo"])
def test_label_agrees_with_paths(pictures, task):
    made, snakes = pictures[task], data.TASKS[task].make
    assert 0.3 < made.labels.mean() < 0.7
    apart = np.linalg.norm(np.diff(made.paths, axis=2), axis=-1).max((0, 1))             # (contour - 1,)
    assert apart[0] <= 2 * snakes.paddle + 2 * max(made.margins) + 4   # tail to second head: two, a gap
    assert apart[1:].max() <= snakes.paddle + 2 * max(made.margins) + 4  # head to head: one of each
    for i, label in enumerate(made.labels):
        tails, tips = made.paths[i, :, 0].tolist(), made.paths[i, :, -1].tolist()
        start, end = made.discs[i].tolist()
        same = [tails[j] == start and tips[j] == end for j in (0, 1)]
        other = [tails[j] == start and tips[1 - j] == end for j in (0, 1)]
        assert any(same) if label else any(other)
        for row, column in (start, end):                                 # and the discs are drawn there
            assert made.images[i, row, column] > 100
        for row, column in made.paths[i].reshape(-1, 2) if snakes.levels == 256 else []:   # few levels: gaps
            assert made.images[i, max(row - 1, 0):row + 2, max(column - 1, 0):column + 2].max() > 40
    assert (made.images.max((1, 2)) == 255).all()


def test_pathfinder_statistics(pictures):
    """Loosely, beside the official generator's figures; `data.py --task T --stats` is the full table."""
    for task, tolerance in (("pathfinder", 0.03), ("pathx", 0.04), ("pathx256", 0.03)):
        values, _ = generators.image_stats(data.TASKS[task], pictures[task])
        _, targets = generators.OFFICIAL[data.TASKS[task].side]
        difference = np.array(values) / targets - 1
        assert np.abs(difference[2:7]).max() < tolerance and (difference[8:] == 0).all()
        assert abs(difference[1]) < 0.12
    attempts = {task: pictures[task].attempts.mean() for task in pictures}
    assert abs(attempts["pathfinder"] / 318 - 1) < 0.12 and 5 < attempts["pathx256"] < 11


def test_margin_belongs_to_the_image(pictures):
    made = pictures["pathx"]
    assert set(made.margins) == {2, 3} and 0.25 < (made.margins == 3).mean() < 0.75
    assert made.attempts[made.margins == 3].mean() > 3 * made.attempts[made.margins == 2].mean()


def test_demo_images_are_distinct(prepared):
    seen = [data.load("pathfinder_demo", split, prepared).x[:, :, 0] for split in data.SPLITS]
    assert len({image.tobytes() for part in seen for image in part}) == sum(SMALL)


def make_release(folder, numpy_format, sizes=(12, 11), side=32):
    """An official folder of two batches named so that text order is not number order; one image is empty."""
    base = folder / f"pathfinder{side}" / "curv_contour_length_14"
    (base / "metadata").mkdir(parents=True)
    expected = []
    for batch, size in zip((2, 10), sizes):
        (base / "imgs" / str(batch)).mkdir(parents=True)
        rows = []
        for i in range(size):
            level, label = len(expected) + 1, i % 2
            path = base / "imgs" / str(batch) / f"sample_{i}.png"
            Image.fromarray(np.full((side, side), level, np.uint8)).save(path)
            rows.append([f"imgs/{batch}", path.name, str(i), str(label), *"1.0 14 4 2 0.5 1 1".split()])
            if batch == 2 and i == 3:
                path.write_bytes(b"")
            else:
                expected.append((level, label))
        if numpy_format:
            np.save(base / "metadata" / f"{batch}.npy", np.array(rows))
        else:
            (base / "metadata" / f"{batch}.npy").write_text("\n".join(map(" ".join, rows)) + "\n")
    return expected


@pytest.mark.parametrize("numpy_format", [False, True])
def test_pathfinder_official_files(tmp_path, capsys, numpy_format):
    expected = make_release(tmp_path / "lra_release" / "lra_release", numpy_format)
    data.prepare("pathfinder", tmp_path / "data", raw=tmp_path)
    assert "22 images, 1 empty" in capsys.readouterr().out
    shuffled = torch.randperm(22, generator=torch.Generator().manual_seed(42)).tolist()
    for split, members in (("train", shuffled[:18]), ("val", shuffled[18:20]), ("test", shuffled[20:])):
        part = data.load("pathfinder", split, tmp_path / "data")
        got = [(int(part.x[i].max()), int(part.y[i])) for i in range(len(part))]
        assert got == [expected[member] for member in members] and part.x.shape[1:] == (1024, 1)


def test_pathfinder_damaged_release(tmp_path):
    make_release(tmp_path, False)
    base = tmp_path / "pathfinder32" / "curv_contour_length_14"
    command = ("--task", "pathfinder", "--data-dir", tmp_path / "data", "--lra-dir", tmp_path)
    (base / "imgs" / "10" / "sample_1.png").write_bytes(b"no image")
    assert "sample_1.png" in fails(*command)
    (base / "metadata" / "10.npy").write_text("imgs/10 sample_0.png 0 7\n")
    assert "10.npy, line 1" in fails(*command)
    (base / "metadata" / "10.npy").write_bytes(b"\x93NUMPY torn")
    assert "10.npy" in fails(*command)
    assert "has none of: pathfinder128" in fails("--task", "pathx", "--data-dir", tmp_path / "data", "--raw", tmp_path)
    make_release(tmp_path / "whole", False)              # a failed reading leaves nothing in the way
    data.prepare("pathfinder", tmp_path / "data", raw=tmp_path / "whole")


# ---- reading -----------------------------------------------------------------------------------------

def test_batch_of_tokens(prepared):
    part = data.load("listops_demo", "val", prepared)
    x, y, lengths = part.batch([5, 0, 7])
    assert x.dtype == y.dtype == lengths.dtype == torch.int64
    assert x.shape == (3, int(lengths.max())) and len(part) == SMALL[1]
    for ids, label, length in zip(x, y, lengths):
        assert ids[length - 1] == data.EOS and (ids[length:] == data.PAD).all()
        assert calculator(ids[:length - 1].tolist())[0] == label
    again, _, _ = part.batch(torch.tensor([0]))
    assert again[0].tolist() == x[1, :lengths[1]].tolist()


def test_batch_of_images(prepared):
    part, row = data.load("pathfinder_demo", "test", prepared), data.TASKS["pathfinder_demo"]
    x, y, lengths = part.batch(np.array([3, 1]))
    assert x.shape == (2, row.length, 1) and x.dtype == torch.uint8 and lengths is None and y.shape == (2,)
    assert x[0, :, 0].tolist() == part.x[3, :, 0].tolist()
    z = data.normalise(row, x)
    assert z.dtype == torch.float32 and z.shape == x.shape
    assert z[x == 255].unique().tolist() == [1.0] and z[x == 0].unique().tolist() == [-1.0]


def test_order_is_a_pure_function():
    first = data.order(1000, 0, 3)
    assert (np.sort(first) == np.arange(1000)).all() and (first == data.order(1000, 0, 3)).all()
    others = [data.order(1000, 1, 3), data.order(1000, 0, 4), data.order(1000, 3, 0)]
    assert all((first != other).mean() > 0.9 for other in others)


def test_splits_are_disjoint(prepared):
    rows = [data.load("listops_demo", split, prepared) for split in data.SPLITS]
    seen = [part.x[part.offsets[i]:part.offsets[i + 1]].tobytes() for part in rows for i in range(len(part))]
    assert len(set(seen)) == len(seen) == sum(SMALL)


# ---- reliability -------------------------------------------------------------------------------------

def test_workers_do_not_change_the_result(prepared, tmp_path):
    for task in ("listops_demo", "pathfinder_demo"):
        data.prepare(task, tmp_path, sizes=SMALL, workers=2)
        assert digest(tmp_path / task) == digest(prepared / task)


def test_seed_changes_the_result(prepared, tmp_path):
    data.prepare("pathfinder_demo", tmp_path, sizes=SMALL, seed=1, workers=1)
    assert digest(tmp_path / "pathfinder_demo") != digest(prepared / "pathfinder_demo")


def command(task, folder, *more):
    sizes = [word for split, size in zip(data.SPLITS, (6000, 600, 700)) for word in (f"--{split}", str(size))]
    return subprocess.Popen([sys.executable, str(ROOT / "data.py"), "--task", task, "--data-dir", str(folder),
                             *sizes, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("task, workers", [("listops_demo", "1"), ("pathfinder_demo", "2")])
def test_killed_then_finished(monkeypatch, tmp_path, task, workers):
    first = command(task, tmp_path / "killed", "--workers", workers)
    parts, start = tmp_path / "killed" / task / "parts", time.time()
    while len(list(parts.glob("*.npz"))) < 3 and time.time() - start < 30:
        time.sleep(0.002)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert not (tmp_path / "killed" / task / "meta.json").exists()
    with pytest.raises(data.UserError, match="not prepared"):
        data.load(task, "train", tmp_path / "killed")
    with pytest.raises(data.UserError, match="unfinished set with sizes"):
        data.prepare(task, tmp_path / "killed", sizes=(10, 10, 10))
    done = sorted(path for path in parts.glob("[0-9]*.npz"))
    done[1].write_bytes(done[1].read_bytes()[:-40])                      # a torn part is made again
    made, real = [], data._save_part
    monkeypatch.setattr(data, "_save_part", lambda *args, **more: made.append(args[1]) or real(*args, **more))
    data.prepare(task, tmp_path / "killed", sizes=(6000, 600, 700), workers=1)
    assert int(done[0].stem) not in made and int(done[1].stem) in made
    data.prepare(task, tmp_path / "whole", sizes=(6000, 600, 700), workers=1)
    assert digest(tmp_path / "killed" / task) == digest(tmp_path / "whole" / task)
    names = sorted(path.name for path in (tmp_path / "killed" / task).iterdir())
    assert names == sorted(path.name for path in (tmp_path / "whole" / task).iterdir())


def test_part_of_another_set_is_not_used(tmp_path):
    row, folder = data.TASKS["listops_demo"], tmp_path / "listops_demo"
    (folder / "parts").mkdir(parents=True)
    plan = dict(task="listops_demo", sizes=[10, 10, 10], seed=0, source="generated", row=data._plain(row))
    data._listops_chunk(0, data.CHUNK, folder, plan, row)
    assert data._finished(0, data.CHUNK, folder, plan, row)
    assert not data._finished(0, data.CHUNK, folder, dict(plan, seed=1), row)


def test_two_processes_at_once(tmp_path):
    both = [command("pathfinder_demo", tmp_path, "--workers", "1") for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert "ready (train 6,000, val 600, test 700; generated, seed 0)" in out
    assert len(data.load("pathfinder_demo", "train", tmp_path)) == 6000


def test_prepared_is_kept(prepared):
    before = digest(prepared / "listops_demo")
    assert data.prepare("listops_demo", prepared) == prepared / "listops_demo"       # whatever is there
    data.prepare("listops_demo", prepared, sizes=SMALL, seed=0)
    line = fails("--task", "listops_demo", "--data-dir", prepared, "--train", 5)
    assert "sizes [1100, 120, 130]" in line and f"rm -r {prepared}/listops_demo" in line
    assert "seed 0, not 4" in fails("--task", "listops_demo", "--data-dir", prepared, "--seed", 4)
    assert "source" in fails("--task", "listops_demo", "--data-dir", prepared, "--lra-dir", prepared)
    assert "--raw 'x' is not a folder" in fails("--task", "listops_demo", "--data-dir", prepared, "--raw", "x")
    assert digest(prepared / "listops_demo") == before


@pytest.mark.parametrize("damage, words", [
    (lambda folder: os.truncate(folder / "val_x.npy", 500), "cut short"),
    (lambda folder: (folder / "val_y.npy").unlink(), "cut short"),
    (lambda folder: (folder / "meta.json").write_text('{"task": "pathf'), "meta.json is damaged"),
    (lambda folder: (folder / "meta.json").write_text("{}"), "meta.json is damaged"),
    (lambda folder: (folder / "val_y.npy").write_bytes(b"?" * 136), "is damaged"),
])
def test_damaged_set(tmp_path, damage, words):
    data.prepare("pathfinder_demo", tmp_path, sizes=(10, 8, 6), workers=1)
    damage(tmp_path / "pathfinder_demo")
    with pytest.raises(data.UserError, match=words) as error:
        data.load("pathfinder_demo", "val", tmp_path)
    assert f"rm -r {tmp_path}/pathfinder_demo && python data.py --task pathfinder_demo" in str(error.value)
    assert "\n" not in str(error.value)


def test_retuned_row_is_noticed(prepared, tmp_path, monkeypatch):
    meta = json.loads((prepared / "listops_demo" / "meta.json").read_text())
    assert meta["seed"] == 0 and meta["sizes"] == list(SMALL)
    assert meta["files"]["test_y.npy"] == dict(shape=[130], dtype="uint8", bytes=258)
    monkeypatch.setitem(data.TASKS, "listops_demo", data.TASKS["listops"])
    with pytest.raises(data.UserError, match="other parameters"):
        data.load("listops_demo", "val", prepared)


def test_messages(tmp_path):
    assert all(task in fails("--task", "patx") for task in data.TASKS)
    assert "--task" in fails()
    assert "positive" in fails("--task", "listops_demo", "--data-dir", tmp_path, "--train", 0)
    assert "positive" in fails("--task", "listops_demo", "--data-dir", tmp_path, "--workers", 0)
    assert "has none of" in fails("--task", "listops", "--data-dir", tmp_path, "--lra-dir", tmp_path)
    (tmp_path / "file").write_text("")
    assert "--data-dir" in fails("--task", "listops_demo", "--data-dir", tmp_path / "file")
    with pytest.raises(SystemExit) as stop:
        data.main(["--tas", "listops"])
    assert stop.value.code == 2


def test_command_line_exit_code(tmp_path):
    words = [sys.executable, str(ROOT / "data.py"), "--task", "nope", "--data-dir", str(tmp_path)]
    result = subprocess.run(words, capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and result.stderr.startswith("error: ")


def test_stats_and_list(capsys):
    assert data.main(["--list"]) == 0 and "pathx256" in capsys.readouterr().out
    assert data.main(["--task", "pathx256", "--stats", "--stats-images", "20"]) == 0
    assert "attempts per image" in capsys.readouterr().out
    assert data.main(["--task", "listops", "--stats", "--stats-images", "50"]) == 0
    assert "ms per expression" in capsys.readouterr().out
