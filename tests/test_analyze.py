"""analyze.py: the right runs in the right cells of the paper's tables, numbers against formulas,
faults beside them."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pandas
import pytest
from conftest import ROOT, call

import analyze
from compare import curves, paper, runs, statistics
from compare.paper import Cell
from experiments import commands, entries

BASE = dict(
    seconds=1800.0,
    steps=1000,
    epochs=2.5,
    commit="abc",
    device="made",
    torch="2",
    processes=1,
    seed=0,
    task="image",
    model="s4",
    objective="masked",
    changed={},
    init=None,
)


def put(root, name, log="", **record):
    """A finished pretraining run."""
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(BASE | record))
    (folder / "log.jsonl").write_text(log)
    return folder


def finetuned(root, name, accuracy, seed=0, task="image", model="s4", start="scratch", **more):
    return put(
        root, name, task=task, model=model, start=start, seed=seed, test_accuracy=accuracy, **more
    )


def cells_in(root, preset="paper"):
    return paper.by_cell(runs.load(root), preset)


def cells_of(*numbers):
    """{cell: printed} of these tables of the paper."""
    rows = [row for number in numbers for row in paper.grid(number)[0].values()]
    return {cell: printed for row in rows for cell, printed in row.values()}


def run(*words):
    return call("analyze.py", *words, cwd=ROOT)


def run_all(*words, folder=ROOT, **more):
    """In a process of its own, which starts others: `python` is that of the folder's bin/, if it
    has one."""
    return subprocess.run(
        ["bash", "run_all.sh", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "JOBS": "2"} | more,
    )


@functools.cache
def listed(*words):
    done = call("run_all.sh", *words, "--list")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@functools.cache
def entered(target, preset="paper"):
    """{cell: what result.json will hold} of all runs of a target."""
    found = {}
    for row in entries.paper(preset)[target]:
        for made in commands.trained(row):
            for each in filter(None, (made, made.first)):
                record = commands.record(each)
                found[paper.cells_of(preset)[runs.identity(record)]] = record
    return found


# ---- numbers -------------------------------------------------------------------------------------


def test_the_papers_numbers_are_consistent():
    """Its averages are those of its cells, x as 50, but for those that results/averages.md
    names."""
    others = {
        (2, "S4 + SPT"),
        (2, "Pythia 70M (Rand Init)"),
        (7, "S4 + Rand Init + SPT"),
        (7, "DLR + SPT"),
        (7, "DLR + Rand Init + SPT"),
    }
    for number in paper.PAPER:
        rows, averages = paper.grid(number)
        for name, average in averages.items():
            values = [
                50 if p == "x" else float(p)
                for column, (_, p) in rows[name].items()
                if column != "pathx256"
            ]
            assert (abs(np.mean(values) - float(average)) < 0.011) == (
                (number, name) not in others
            ), name


def test_paired_gains_against_the_formula():
    """Student's t for four pairs: 3.182 s / sqrt(4); a seed that one side lacks does not count."""
    before, after = (
        {0: 50.0, 1: 60.0, 2: 55.0, 3: 70.0, 9: 0.0},
        {0: 53.0, 1: 61.0, 2: 60.0, 3: 71.0, 8: 0.0},
    )
    gains = statistics.minus(*map(pandas.Series, (after, before)))
    assert [*gains] == [3.0, 1.0, 5.0, 1.0] and statistics.signed(gains) == "+2.5 [-0.5, +5.5] (4)"
    assert statistics.half_width([3.0, 1.0, 5.0, 1.0]) == pytest.approx(
        3.1824 * np.std([3, 1, 5, 1], ddof=1) / 2, 1e-4
    )


def test_table_2_by_hand(tmp_path):
    for seed, (scratch, spt) in enumerate(((0.80, 0.90), (0.82, 0.91), (0.84, 0.95))):
        finetuned(tmp_path, f"a{seed}", scratch, seed)
        finetuned(tmp_path, f"b{seed}", spt, seed, start="spt", init=f"somewhere/p{seed}")
        put(tmp_path, f"p{seed}", seed=seed)
    finetuned(tmp_path, "one", 0.5, task="text", model="rotary")
    finetuned(tmp_path, "language", 0.7, task="text", model="pythia_rand", objective="causal")
    finetuned(tmp_path, "causal", 0.1, objective="causal")  # these count nowhere
    finetuned(tmp_path, "demo", 0.1, task="text_demo")
    finetuned(tmp_path, "shortened", 0.1, task="retrieval", changed={"epochs": 1})
    finetuned(tmp_path, "r2", 0, task="bidmc_rr", model="rotary", test_r2=0.9864)
    finetuned(tmp_path, "words", 0.85, task="sc", model="rotary", objective="causal")
    text = paper.table(cells_in(tmp_path), 2)
    assert "| S4 | 59.60 / – | 86.82 / – | 90.90 / – | 88.65 / 82.00 ± 2.00 (3) |" in text
    assert "| 79.08 / 50.00 (1) |" in text and "| 89.36 / 92.00 ± 2.65 (3) |" in text
    # standard deviations 2 and 2.65: 3.3167 / sqrt(3) = 1.915, t of 11^2 / (16 + 49) 2 = 3.72
    # degrees of freedom 2.860
    assert "| S4 + SPT | – | – | – | +10.00 [+4.52, +15.48] (3) |" in text
    assert "| S4 + SPT | 86.75 | 92.00 over 1 of 6 tasks |" in text
    assert "11 runs, seeds 0, 1, 2; commit abc, made, torch 2; 5.5 hours of training." in text
    text = paper.table(cells_in(tmp_path), 3)
    assert (
        "| Transformer | 84.55 / 85.00 (1) | 86.93 / – |" in text
        and "| 0.981 / 0.986 (1) |" in text
    )


def test_claims_by_hand(tmp_path):
    """Gains are averaged over the tasks that both sides have, seed by seed. What is kept of the
    runs gives the same claims, tables and figures."""
    folder, recipes = tmp_path / "runs", entered("all")
    log = "\n".join(
        json.dumps(dict(kind="eval", step=s, val_accuracy=s / 10, val_score=s / 10))
        for s in range(1, 9)
    )
    for model, task, start, variant, *values in (
        ("rotary", "text", "scratch", "", 0.50, 0.50),
        ("rotary", "text", "spt", "", 0.60, 0.62),
        ("rotary", "image", "scratch", "", 0.30, 0.30),
        ("rotary", "image", "spt", "", 0.36, 0.36),
        ("s4", "text", "scratch", "", 0.70, 0.70),
        ("s4", "text", "spt", "", 0.71, 0.71),
        ("s4", "image", "scratch", "data0.01", 0.5),
        ("s4", "image", "spt", "data0.01", 0.6),
        ("rotary", "image", "scratch", "budget0", 0.7),
        ("rotary", "image", "spt", "budget20", 0.72),
    ):
        cell = Cell(task, model, variant, start)
        changed = recipes[cell]["changed"]
        for seed, value in enumerate(values):
            finetuned(
                folder,
                f"{'-'.join(cell)}{seed}",
                value,
                seed,
                task,
                model,
                start,
                changed=changed,
                log=log + '\n{"torn',
            )
        if variant == "data0.01":
            # no claim
            finetuned(
                folder, f"{start}-other", 0.99, 1, task, model, start, changed=changed | {"wd": 0.5}
            )
    before = 0.5 ** np.arange(8)[None, None] * np.array([1, 0])[None, :, None] * np.ones((2, 1, 1))
    after = np.ones((2, 2, 8))
    after[1] = 0
    after[1, 1, 4] = 1  # the backward kernel starts at lag 1
    np.savez(put(folder, "pre", task="pathx") / "kernels.npz", before=before, after=after)
    text, none = paper.claims(cells_in(folder)), "no full runs to compare"
    lines = text.splitlines()[2:]
    assert len(lines) == 7
    # On text alone, where all four were run. rotary: 10 and 12, mean 11, standard deviation 1.41,
    # half-width 12.71 * 1.41 / sqrt(2) = 12.7; S4: 1. The gap: 20, then 11 and 9.
    assert (
        f"| Transformer, S4: {none}<br>rotary +11.0 [-1.7, +23.7] (2), S4 +1.0 (2), diff"
        in lines[0]
    )
    assert lines[0].endswith("over 1 tasks |") and lines[1].endswith(f"| {none} |")
    assert (
        "rotary: after SPT +10.0 [-2.7, +22.7] (2), from scratch +20.0 (2), change -10.0"
        in lines[2]
    )
    assert lines[3].count(none) == 2
    assert f"image: 1 %: +20.0 (one seed)<br>text: {none}" in lines[4]  # 0.5 -> 0.6 is a fifth more
    assert f"image, rotary: +2.0 (one seed), –, –<br>image, s4: {none}" in lines[5]
    assert "pathx (length 8): 0, 0 -> 3, 5 (1)" in lines[6]
    for words in (
        ["all", "--runs", folder, "--out", tmp_path / "out"],
        ["keep", "--runs", folder, "--out", tmp_path],
        ["all", "--runs", tmp_path / "runs.jsonl", "--out", tmp_path / "again"],
    ):
        assert run(*words).returncode == 0
    for name in ("tables.md", *(f"figure{number}.png" for number in analyze.FIGURES)):
        first, again = ((tmp_path / place / name).read_bytes() for place in ("out", "again"))
        assert first == again and (text.encode() in first or first[:4] == b"\x89PNG")
    assert (tmp_path / "again" / "tables.md").read_text().count("### ") == 1 + len(paper.PAPER)


# ---- what is written -----------------------------------------------------------------------------


def test_wreckage(tmp_path):
    """Damaged files beside good ones: what can be made is made, and the rest is named. Changed runs
    do not count."""
    finetuned(tmp_path / "runs", "a", 0.5, changed={"lr": 0.1})
    finetuned(tmp_path / "runs", "b", 0.88)
    finetuned(tmp_path / "runs", "small", 0.5, task="pathfinder", changed={"arch": {"d": 1}})
    wrecks = (
        '{"task": "image"',
        "[]",
        '{"task": 5}',
        "",
        json.dumps(BASE | dict(start="scratch", test_accuracy=None)),
        json.dumps(BASE | dict(changed=None)),
    )
    for i, content in enumerate(wrecks):
        (put(tmp_path / "runs", f"wreck{i}") / "result.json").write_text(content)
    done = run("all", "--runs", tmp_path / "runs", "--out", tmp_path / "out")
    warnings = "".join(
        f"warning: a run in {tmp_path}/runs/wreck{i}/result.json is skipped.*\n" for i in range(6)
    )
    assert done.returncode == 0 and re.fullmatch(
        f"{warnings}warning: 2 of 3 runs are left out: .*\n", done.stderr
    ), done.stderr
    assert "88.65 / 88.00 (1) |" in (tmp_path / "out" / "tables.md").read_text()


def test_figures_show_what_was_measured(tmp_path):
    """Dots are seeds, diamonds the paper's averages over the same tasks: (57.50 + 79.65) / 2,
    (59.60 + 86.82) / 2."""
    import matplotlib.pyplot as plt

    for model in ("s4", "dlr"):
        for task in ("text", "listops"):
            for seed in range(3):
                finetuned(tmp_path, f"{model}-{task}-{seed}", 0.5 + seed / 50, seed, task, model)
    figure, title = analyze.figure2(plt, cells_in(tmp_path))
    dots = {(c.get_label(), *c.get_offsets()[:, 1]) for c in figure.axes[0].collections}
    assert (
        sorted(dots)
        == [
            ("one seed", *map(pytest.approx, (50, 52, 54))),
            *(("the paper", pytest.approx(mean)) for mean in (68.575, 73.21)),
        ]
        and "listops, text" in title
    )
    plt.close("all")


def test_what_cannot_be_written_is_one_line(tmp_path, monkeypatch):
    """The disk fills while a file is written: the old file stays. Without matplotlib tables come
    all the same."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "tables.md").write_text("old")
    (out / "tables.md.tmp").symlink_to("/dev/full")
    done = run("all", "--runs", tmp_path, "--out", out)
    assert (
        done.returncode == 2
        and "No space left on device" in done.stderr
        and done.stderr.count("\n") == 1
    )
    assert (out / "tables.md").read_text() == "old"
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    done = run("all", "--runs", tmp_path, "--out", out)
    assert (
        done.returncode == 2
        and done.stderr == "error: import of matplotlib.pyplot halted; None in sys.modules\n"
    )
    assert "Table 9" in (out / "tables.md").read_text()


def test_what_is_kept_is_what_is_shown(tmp_path, monkeypatch):
    """README's results and results/mini are those of runs.jsonl, whose runs all count in a cell. A
    stale page is found, and mended."""
    kept = ROOT / "results" / "mini"
    kept_runs = runs.load(kept / "runs.jsonl")
    assert sum(map(len, paper.by_cell(kept_runs, "mini").values())) == len(kept_runs) == 576
    assert (
        run("all", "--preset", "mini", "--runs", kept / "runs.jsonl", "--out", tmp_path).returncode
        == 0
    )
    assert (kept / "tables.md").read_text() == (tmp_path / "tables.md").read_text()
    shutil.copytree(kept, tmp_path / "results" / "mini")
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.setattr(analyze, "ROOT", tmp_path)
    analyze.command(["readme", "--check"])
    for page in (tmp_path / "README.md", tmp_path / "results" / "mini" / "README.md"):
        whole = page.read_text()
        page.write_text(whole.replace("<!-- results:begin -->\n", "<!-- results:begin -->\n?"))
        with pytest.raises(analyze.UserError, match="differs.*repeat the command without --check"):
            analyze.command(["readme", "--check"])
        analyze.command(["readme"])
        assert page.read_text() == whole


def test_curves(tmp_path):
    """Of finished and unfinished runs, over steps and minutes."""
    lines = [
        dict(kind="start", step=0),
        *(
            dict(
                kind="train",
                step=step,
                loss=2.0 / step,
                lr=0.1,
                gradient_norm=1.0,
                seconds=6.0 * step,
            )
            for step in (1, 2, 5)
        ),
        dict(
            kind="eval",
            step=5,
            val_loss=0.7,
            val_accuracy=0.4,
            val_balanced_accuracy=0.3,
            seconds=36.0,
        ),
    ]
    put(tmp_path, "one", "\n".join(map(json.dumps, lines)) + "\n{torn")
    assert curves.curves_of(tmp_path / "one") == dict(
        loss=[("-", [1, 2, 5], [0.1, 0.2, 0.5], [2.0, 1.0, 0.4]), ("--", [5], [0.6], [0.7])],
        score=[("-", [5], [0.6], [0.3])],
        denoising=[],
        lr=[("-", [1, 2, 5], [0.1, 0.2, 0.5], [0.1] * 3)],
        gradient_norm=[("-", [1, 2, 5], [0.1, 0.2, 0.5], [1.0] * 3)],
    )
    done = run("curves", tmp_path, "--figure", tmp_path / "curves.png")
    assert done.returncode == 0 and (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert (
        "no run was started there"
        in run("curves", tmp_path / "none", "--figure", tmp_path / "c.png").stderr
    )


@pytest.mark.parametrize(
    "norms", [(5.6, 5.7, 6.4), (0.02, 3.0, 7.0), (1e-4, 1.0, 1e4), (0.3, 0.3, 0.3)]
)
def test_each_axis_of_the_curves_has_readable_numbers(norms, tmp_path, monkeypatch):
    lines = [
        dict(kind="train", step=i, seconds=i, loss=1.0, lr=0.1, gradient_norm=norm)
        for i, norm in enumerate(norms)
    ]
    put(tmp_path, "run", "\n".join(map(json.dumps, lines)))
    figures = []
    monkeypatch.setattr(curves, "draw", lambda make, path: figures.append(make(plt)[0]))
    with plt.rc_context({"text.parse_math": False}):
        curves.curves(SimpleNamespace(what=[tmp_path], figure=None))
        figures[0].canvas.draw()
        for axis in figures[0].axes[::2]:
            low, high = axis.get_ylim()
            labels = [
                label
                for place, label in zip(axis.get_yticks(), axis.get_yticklabels())
                if low <= place <= high
            ]
            texts = [label.get_text() for label in (*labels, *axis.get_yticklabels(minor=True))]
            assert len([*filter(None, texts)]) >= 2 and not any("$" in text for text in texts)


def test_status(tmp_path):
    """Running, finished, failed, silent; torn logs."""
    start = json.dumps(dict(kind="start", step=0, total=6000)) + "\n"
    steps = start + json.dumps(dict(kind="train", step=200, loss=0.25, ms_per_step=100)) + "\n"
    logs = {
        "done": steps,
        "torn": steps + '{"kind": "tra',
        "new": start,
        "quiet": steps,
        "broken": steps + json.dumps(dict(kind="error", error="loss is nan")),
    }
    for folder, log in logs.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "log.jsonl").write_text(log)
    (tmp_path / "done" / "result.json").write_text(json.dumps(BASE))
    os.utime(tmp_path / "quiet" / "log.jsonl", (time.time() - 900, time.time() - 900))
    assert run("status", tmp_path).stdout.splitlines() == [
        "1 of 5 runs are done",
        "failed   broken: loss is nan",
        "running  new: 0/6000",
        "silent   quiet: 200/6000 loss 0.250 for 15 minutes",
        "running  torn: 200/6000 loss 0.250, 10 minutes left",
    ]


@pytest.mark.parametrize("preset", ["paper", "mini"])
def test_entries_fill_the_cells(preset):
    """Every run of every entry is exactly one cell, and every cell of a table has an entry; in the
    mini preset but for what has no stand-in."""
    lacking = entries.LACKING if preset == "mini" else set()
    shares = {
        Cell(task, "s4", f"data{share}", start): "60.0"
        for task in ("image", "text")
        for share in entries.FRACTIONS
        for start in ("scratch", "spt")
    }
    targets = {f"table{number}": cells_of(number) for number in paper.PAPER}
    targets |= {"figure3": shares, "all": cells_of(*paper.PAPER) | shares}
    for target, wanted in targets.items():
        made = {cell for cell in entered(target, preset) if cell.start != "pretrain"}
        possible = {
            cell for cell, printed in wanted.items() if printed != "x" and not lacking & set(cell)
        }
        assert possible <= made <= set(wanted), target
    for number in (1, 2, 4, 5):
        assert entered(f"figure{number}", preset).keys() <= entered("all", preset).keys(), number
