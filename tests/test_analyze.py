"""analyze.py: the right runs in the cells of the paper's tables, numbers beside loops, faults."""

import functools
import json
import os
import sys
import time

import matplotlib.pyplot as plt
import numpy as np
import pytest
from conftest import RECORD, ROOT, call, made_run, scripts
from test_made_tables import agrees, agrees_as_gain, half_of_seeds, rows_in, spread_of

import analyze
from compare import curves, paper, runs
from compare.paper import Cell
from experiments import commands, entries


def cells_in(root, preset="paper"):
    return paper.by_cell(runs.load(root), preset)


def cells_of(*numbers):
    """{cell: printed} of these tables of the paper."""
    rows = [row for number in numbers for row in paper.grid(number)[0].values()]
    return {cell: printed for row in rows for cell, printed in row.values()}


def run(*words):
    return call("analyze.py", *words)


@functools.cache
def listed(*words):
    done = call("run_all.sh", *words, "--list")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@functools.cache
def entered(target, preset="paper"):
    """{cell: what result.json will hold} of all runs of a target."""
    cells = {}
    for row in entries.paper(preset)[target]:
        for training in commands.trained(row):
            for stage in filter(None, (training, training.first)):
                record = commands.record(stage)
                cells[paper.cells_of(preset)[runs.identity(record)]] = record
    return cells


# ---- Numbers -------------------------------------------------------------------------------------


def test_the_papers_numbers_are_consistent():
    """Its averages are those of its cells, x as 50; results/averages.md names the others."""
    others = {(2, "S4 + SPT"), (2, "Pythia 70M (Rand Init)"), (7, "S4 + Rand Init + SPT")}
    others |= {(7, "DLR + SPT"), (7, "DLR + Rand Init + SPT")}
    for number in paper.PAPER:
        rows, averages = paper.grid(number)
        for name, average in averages.items():
            printed = [text for column, (_, text) in rows[name].items() if column != "pathx256"]
            mean = np.mean([50 if text == "x" else float(text) for text in printed])
            assert (abs(mean - float(average)) < 0.011) == ((number, name) not in others), name


@pytest.mark.parametrize("preset", ["paper", "mini"])
def test_every_run_of_an_entry_is_one_cell_and_every_cell_has_an_entry(preset):
    """In the mini preset but for what has no stand-in."""
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
        possible = {cell for cell in wanted if wanted[cell] != "x" and not lacking & {*cell}}
        assert possible <= made <= {*wanted}, target
    for number in (1, 2, 4, 5):
        assert entered(f"figure{number}", preset).keys() <= entered("all", preset).keys(), number


def test_every_cell_of_the_papers_tables_is_that_of_a_loop(tmp_path):
    """Of runs of every cell, in seeds that some cells lack."""
    rng, lines, scores = np.random.default_rng(0), [], {}
    for cell, record in entered("all").items():
        field, scale = ("test_r2", 1) if "bidmc" in cell.task else ("test_accuracy", 100)
        for seed in rng.choice(4, rng.integers(0, 4), replace=False).tolist():
            line = RECORD | record | {"run": f"{cell}{seed}", "seed": seed, field: rng.random()}
            lines.append(json.dumps(line) + "\n")
            scores.setdefault(cell, {})[seed] = scale * line[field]
    (tmp_path / "runs.jsonl").write_text("".join(lines), encoding="utf-8")
    cells = cells_in(tmp_path / "runs.jsonl")
    for number in paper.PAPER:
        (rows, averages), tables = paper.grid(number), rows_in(paper.table(cells, number))
        texts, gains = ({[*line.values()][0]: line for line in tables[i]} for i in (0, -1))
        ours = {line["approach"]: line["ours"] for line in tables[1]} if averages else {}
        columns = [(*pair, column) for row in rows.values() for column, pair in row.items()]
        scratch = {(name, c.model): c for c, _, name in columns if c.start == "scratch"}
        for approach, row in rows.items():
            means = []
            for column, (cell, printed) in row.items():
                digits, seeds = 3 if printed.startswith("0.") else 2, scores.get(cell, {})
                text = {0: "–", 1: "# (1)"}.get(len(seeds), f"# ± # ({len(seeds)})")
                spread = spread_of([*seeds.values()]) if seeds else []
                agrees(texts[approach][column], f"{printed} / {text}", spread, digits)
                means += spread[:1] if column != "pathx256" else []
                if cell.start == "spt":
                    base = scores.get(scratch.get((column, cell.model)), {})
                    pairs = [(seeds[seed], base[seed]) for seed in seeds.keys() & base.keys()]
                    half = half_of_seeds(*zip(*pairs)) if pairs else 0
                    mean = np.mean([a - b for a, b in pairs]) if pairs else None
                    note = {0: "", 1: " (one seed)"}.get(len(pairs), f" ({len(pairs)})")
                    agrees_as_gain(gains[approach][column], mean, half, note, digits)
            if approach in averages:
                text = f"# over {len(means)} of {len(row.keys() - {'pathx256'})} tasks"
                agrees(ours[approach], text if means else "–", means and [np.mean(means)], 2)


def test_claims_by_hand_and_kept_runs_make_the_same(tmp_path):
    """Gains are averaged over the tasks that both sides have, seed by seed."""
    folder, recipes = tmp_path / "runs", entered("all")
    evals = [dict(kind="eval", step=s, val_accuracy=s / 10, val_score=s / 10) for s in range(1, 9)]
    log = "\n".join(map(json.dumps, evals)) + '\n{"torn'
    for model, task, start, word, *scores in (
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
        cell = Cell(task, model, word, start)
        more = dict(task=task, model=model, log=log, changed=recipes[cell]["changed"])
        for seed, score in enumerate(scores):
            made_run(folder, start, score, name=f"{'-'.join(cell)}{seed}", seed=seed, **more)
        if word == "data0.01":  # other settings are no claim
            more["changed"] = more["changed"] | {"wd": 0.5}
            made_run(folder, start, 0.99, name=f"{start}-other", seed=1, **more)
    before = 0.5 ** np.arange(8) * np.array([[[1], [0]]] * 2)  # layers, directions, lags
    after = np.ones((2, 2, 8))
    after[1] = 0
    after[1, 1, 4] = 1  # the backward kernel starts at lag 1
    after[1, 1, 7] = 0.4
    pretrained = made_run(folder, "pretrain", name="pre", task="pathx")
    np.savez(pretrained / "kernels.npz", before=before, after=after)
    cells, none = cells_in(folder), "no full runs to compare"
    text = paper.claims(cells)
    lines = text.splitlines()[2:]
    assert len(lines) == 7
    # On text only, where all four were run. rotary: 10 and 12, mean 11, standard deviation 1.41,
    # half-width 12.71 * 1.41 / sqrt(2) = 12.7; S4: 1. The gap: 20, then 11 and 9.
    gain = "rotary +11.0 [-1.7, +23.7] (2), S4 +1.0 (2), diff"
    assert f"| Transformer, S4: {none}<br>{gain}" in lines[0] and "over 1 tasks |" in lines[0]
    gap = "rotary: after SPT +10.0 [-2.7, +22.7] (2), from scratch +20.0 (2), change -10.0"
    assert lines[1].endswith(f"| {none} |") and gap in lines[2] and lines[3].count(none) == 2
    assert f"image: 1 %: +20.0 (one seed)<br>text: {none}" in lines[4]  # 0.5 -> 0.6 is a fifth more
    assert f"image, rotary: +2.0 (one seed), –, –<br>image, s4: {none}" in lines[5]
    assert "pathx (length 8): 0, 0 -> 3, 5 (1)" in lines[6]
    assert run("keep", "--runs", folder, "--out", tmp_path).returncode == 0
    again = cells_in(tmp_path / "runs.jsonl")
    assert paper.claims(again) == text
    for draw in (analyze.figure4, analyze.figure5):  # of kernels, and of evaluations
        curve, kept = (
            [
                line.get_xydata().tolist()
                for axis in draw(plt, source)[0].axes
                for line in axis.lines
            ]
            for source in (cells, again)
        )
        assert curve == kept and len(curve) > 1
    plt.close("all")


# ---- Figures -------------------------------------------------------------------------------------


def test_figures_show_seeds_and_the_papers_averages_over_the_same_tasks(tmp_path):
    """Dots are seeds, diamonds the paper's: (57.50 + 79.65) / 2, (59.60 + 86.82) / 2."""
    for model in ("s4", "dlr"):
        for task in ("text", "listops"):
            for seed in range(3):
                more = dict(name=f"{model}-{task}-{seed}", task=task, model=model, seed=seed)
                made_run(tmp_path, "scratch", 0.5 + seed / 50, **more)
    figure, title = analyze.figure2(plt, cells_in(tmp_path))
    dots = sorted((dot.get_label(), *dot.get_offsets()[:, 1]) for dot in figure.axes[0].collections)
    plt.close("all")
    assert dots[1][1:] == dots[0][1:] == pytest.approx((50, 52, 54)) and "listops, text" in title
    assert [mean for name, mean in dots[2:]] == pytest.approx([68.575, 73.21])


def test_curves_are_those_of_the_log_over_steps_and_minutes(tmp_path):
    steps = [dict(step=step, loss=2.0 / step, seconds=6.0 * step) for step in (1, 2, 5)]
    lines = [dict(kind="train", lr=0.1, gradient_norm=1.0) | step for step in steps]
    scores = dict(val_loss=0.7, val_accuracy=0.4, val_balanced_accuracy=0.3)
    lines = [dict(kind="start", step=0), *lines, dict(kind="eval", step=5, seconds=36.0) | scores]
    made_run(tmp_path, name="one", log="\n".join(map(json.dumps, lines)) + "\n{torn")
    x = "-", [1, 2, 5], [0.1, 0.2, 0.5]
    assert curves.curves_of(tmp_path / "one") == dict(
        loss=[(*x, [2.0, 1.0, 0.4]), ("--", [5], [0.6], [0.7])],
        score=[("-", [5], [0.6], [0.3])],
        denoising=[],
        lr=[(*x, [0.1] * 3)],
        gradient_norm=[(*x, [1.0] * 3)],
    )
    done = run("curves", tmp_path / "none", "--figure", tmp_path / "c.png")
    assert "no run was started there" in done.stderr


# ---- What is written -----------------------------------------------------------------------------


def test_damaged_runs_are_named_and_runs_with_other_settings_do_not_count(tmp_path):
    made_run(tmp_path, name="good", score=0.88)
    others = dict(lr=dict(changed={"lr": 0.1}), small=dict(changed={"arch": {"d": 1}}))
    others |= dict(causal=dict(objective="causal"), demo=dict(task="text_demo"))
    for name, more in others.items():
        made_run(tmp_path, score=0.1, name=name, **more)
    half = RECORD | dict(start="scratch")
    broken = half, half | dict(test_accuracy=None), half | dict(test_accuracy=1, changed=None)
    wrecks = '{"task": "image"', "[]", '{"task": 5}', "", *map(json.dumps, broken)
    for i, content in enumerate(wrecks):
        (made_run(tmp_path, name=f"wreck{i}") / "result.json").write_text(content)
    done = run("table", "2", "--runs", tmp_path)
    warning = "warning: a run in {} is skipped"
    warnings = [warning.format(tmp_path / f"wreck{i}" / "result.json") for i in range(7)]
    warnings.append("warning: 4 of 5 runs are left out: ")
    lines = done.stderr.splitlines()
    assert done.returncode == 0 and len(lines) == 8, done.stderr
    assert all(line.startswith(start) for line, start in zip(lines, warnings)), done.stderr
    assert "88.65 / 88.00 (1) |" in done.stdout


def test_what_cannot_be_written_is_one_line_and_the_old_file_stays(tmp_path, monkeypatch):
    """Without matplotlib tables come all the same."""
    out, page = tmp_path / "out", tmp_path / "out" / "tables.md"
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    done = run("all", "--runs", tmp_path, "--out", out)
    assert done.returncode == 2 and "matplotlib.pyplot" in done.stderr, done.stderr
    assert done.stderr.count("\n") == 1 and "Table 9" in page.read_text(encoding="utf-8")
    if not os.path.exists("/dev/full"):
        return
    page.write_text("old")
    (out / "tables.md.tmp").symlink_to("/dev/full")  # the disk fills
    done = run("all", "--runs", tmp_path, "--out", out)
    assert done.returncode == 2 and "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1 and page.read_text() == "old"


def test_pages_show_the_kept_runs_and_a_stale_page_is_noticed(tmp_path, monkeypatch):
    """README's results and results/mini are those of runs.jsonl, whose runs all count in a cell."""
    kept = ROOT / "results" / "mini"
    kept_runs = runs.load(kept / "runs.jsonl")
    cells = paper.by_cell(kept_runs, "mini")
    assert sum(map(len, cells.values())) == len(kept_runs) == 576
    monkeypatch.setattr(analyze, "draw_paper", lambda *arguments: None)
    words = "--preset", "mini", "--runs", kept / "runs.jsonl", "--out", tmp_path
    assert run("all", *words).returncode == 0
    assert (kept / "tables.md").read_text("utf-8") == (tmp_path / "tables.md").read_text("utf-8")
    scripts(tmp_path, "README.md", "results/mini/*")
    monkeypatch.setattr(analyze, "ROOT", tmp_path)
    begin, pages = "<!-- results:begin -->\n", (tmp_path, tmp_path / "results" / "mini")
    whole = {page / "README.md": (page / "README.md").read_text("utf-8") for page in pages}
    for page, text in whole.items():
        page.write_text(text.replace(begin, f"{begin}?"), encoding="utf-8")
    with pytest.raises(analyze.UserError, match="differs"):
        analyze.command(["readme", "--check"])
    analyze.command(["readme"])
    assert {page: page.read_text("utf-8") for page in whole} == whole


def test_status_says_running_done_failed_or_silent(tmp_path):
    start = json.dumps(dict(kind="start", step=0, total=6000)) + "\n"
    steps = start + json.dumps(dict(kind="train", step=200, loss=0.25, ms_per_step=100)) + "\n"
    broken = steps + json.dumps(dict(kind="error", error="loss is nan"))
    logs = dict(torn=steps + '{"kind": "tra', new=start, quiet=steps, broken=broken)
    made_run(tmp_path, name="done", score=0.5, log=steps)
    for name, log in logs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text(log)
    os.utime(tmp_path / "quiet" / "log.jsonl", (time.time() - 900, time.time() - 900))
    assert run("status", tmp_path).stdout.splitlines() == [
        "1 of 5 runs are done",
        "failed   broken: loss is nan",
        "running  new: 0/6000",
        "silent   quiet: 200/6000 loss 0.250 for 15 minutes",
        "running  torn: 200/6000 loss 0.250, 10 minutes left",
    ]
