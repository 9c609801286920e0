"""analyze.py and run_all.sh for the paper's tables and figures: the right runs in the right cells, faults beside them."""
import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import analyze
import finetune
import pretrain
from conftest import ROOT
from models import read_table

BASE = dict(seconds=1800.0, steps=1000, epochs=2.5, commit="abc", device="made", torch="2", processes=1, full_recipe=True, changed={},
            size=None, train_fraction=None, spt_share=None)


def put(root, name, log="", **record):
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(BASE | record))
    (folder / "config.json").write_text("{}")
    (folder / "log.jsonl").write_text(log)
    return folder


def finetuned(root, name, accuracy, seed=0, task="image", model="s4", start="scratch", objective="masked", **more):
    return put(root, name, task=task, model=model, start=start, objective=objective, seed=seed,
               test_accuracy=accuracy, **more)


def tables_of(text):
    """Markdown tables -> list of {row name: {column: cell}}."""
    tables = []
    for block in text.split("\n\n"):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if line[0] == "|"]
        if rows:
            tables.append({row[0]: dict(zip(rows[0][1:], row[1:])) for row in rows[2:]})
    return tables


def test_the_papers_numbers_are_consistent():
    """Every row has a cell for each column; averages that the paper prints are those of its own cells, but for the known
    misprints (specification, section 5)."""
    misprints = {(2, "S4 + SPT"), (2, "Pythia 70M (Rand Init)"), (7, "S4 + Rand Init + SPT"), (7, "DLR + SPT"),
                 (7, "DLR + Rand Init + SPT")}
    for number in analyze.PAPER:
        columns, lines = analyze.grid(number)
        for name, cells, average in lines:
            assert len(cells) == len(columns)
            if average is not None:
                values = [analyze.number_of(p) for c, (_, p) in zip(columns, cells) if c != "pathx256"]
                assert (abs(np.mean(values) - float(average)) < 0.011) == ((number, name) not in misprints), name


def test_every_cell_is_a_recipe():
    """What a cell asks for can be trained: a row of RECIPES exists (PathX for Pythia and Transformers on PathX-256, which
    the paper could not run, excepted)."""
    known = {(r["task"], r["model"], r["objective"], r["start"]) for r in finetune.recipes()}
    for number in analyze.PAPER:
        for _, cells, _ in analyze.grid(number)[1]:
            for key, printed in cells:
                there = (key["task"], key["model"], key["objective"], key["start"]) in known
                assert there or printed == "x", key


def test_table_2_by_hand(tmp_path):
    for seed, (scratch, spt) in enumerate(((.80, .90), (.82, .91), (.84, .95))):
        finetuned(tmp_path, f"a{seed}", scratch, seed)
        finetuned(tmp_path, f"b{seed}", spt, seed, start="spt", init=f"somewhere/p{seed}")
        put(tmp_path, f"p{seed}", task="image", model="s4", objective="masked", seed=seed, val_score=0.5)
    finetuned(tmp_path, "one", .5, task="text", model="rotary", full_recipe=False)
    finetuned(tmp_path, "language", .7, task="text", model="pythia_rand", objective="causal")
    # None of these belongs into table 2.
    finetuned(tmp_path, "share", .1, spt_share=0.2, start="spt")
    finetuned(tmp_path, "part", .1, train_fraction=0.5)
    finetuned(tmp_path, "small", .1, size="1m")
    finetuned(tmp_path, "causal", .1, objective="causal")
    finetuned(tmp_path, "demo", .1, task="text_demo")
    text = analyze.table(analyze.read_results(tmp_path), 2)
    main, averages, gains, details = tables_of(text)
    assert main["S4"]["image"] == "88.65 / 82.00 ± 2.00 (3)" and main["S4 + SPT"]["image"] == "89.36 / 92.00 ± 2.65 (3)"
    assert main["Transformer + Rotary"]["text"] == "79.08 / 50.00 (1)†" and main["S4"]["text"] == "86.82 / –"
    # differences 10, 9, 11: mean 10, standard deviation 1, half-width 4.303 / sqrt(3) = 2.48
    assert gains["S4 + SPT"]["image"] == "+10.00 [+7.52, +12.48] (3)"
    assert list(averages["S4 + SPT"].values()) == ["86.75", "86.92", "86.92", "is neither: a misprint",
                                                   *["92.00 over 1 of 6 tasks"] * 2]
    assert averages["Transformer + Rotary"]["ours"] == "–"             # a shortened run counts in no average
    assert list(averages["Pythia 70M (Rand Init)"].values())[4:] == ["70.00 over 1 of 6 tasks", "70.00 over 1 of 5 tasks"]
    assert list(averages["Pythia 70M"].values())[:4] == ["68.04", "68.03", "71.64", "counts x as 50"]
    lines = [line for line in text.splitlines() if line.startswith("| S4 + SPT | image | 89.36 |")]
    assert len(lines) == 1 and "+2.64 | 3 | 1000 + 1000 | 2.5 + 2.5 | 3.00 | made | abc | full |" in lines[0]     # three times two half hours
    assert "| Transformer + Rotary | text | 79.08 | 50.00 |  | one seed | 1000 | 2.5 | 0.50 | made | abc | shortened |" in text
    assert "| S4 | text | 86.82 | – | | | | | | | | not run |" in text


def test_special_columns(tmp_path):
    """Causal Speech Commands, R2, shares of a budget, sizes: each run in its cell and nowhere else."""
    finetuned(tmp_path, "a", .93, task="sc", objective="causal")
    finetuned(tmp_path, "b", .96, task="sc")
    record = BASE | dict(task="bidmc_hr", model="rotary", start="spt", objective="masked", seed=0, test_r2=0.9876)
    put(tmp_path, "c", **record)
    finetuned(tmp_path, "d", .84, model="rotary", start="spt", spt_share=0.2)
    finetuned(tmp_path, "e", .75, model="rotary", spt_share=0.0)
    finetuned(tmp_path, "f", .86, start="spt", size="1m")
    finetuned(tmp_path, "g", .88, start="spt")
    results = analyze.read_results(tmp_path)
    three, eight, nine = (tables_of(analyze.table(results, n))[0] for n in (3, 8, 9))
    assert three["S4"]["sc_causal"] == "93.60 / 93.00 (1)" and three["S4"]["sc"] == "96.08 / 96.00 (1)"
    assert three["Transformer + SPT"]["bidmc_hr"] == "0.992 / 0.988 (1)"
    assert eight["SPT 20 % of the budget"]["image_rotary"] == "84.45 / 84.00 (1)"
    assert eight["SPT 0 % of the budget"]["image_rotary"] == "75.04 / 75.00 (1)"
    assert tables_of(analyze.table(results, 8))[1]["SPT 20 % of the budget"]["image_rotary"] == "+9.00 (one seed)"
    assert nine["S4 + SPT"]["1m"] == "88.67 / 86.00 (1)" and nine["S4 + SPT"]["3m"] == "89.36 / 88.00 (1)"
    for table in (three, eight, nine):
        assert sum(not cell.endswith("–") for row in table.values() for cell in row.values()) in (2, 3)


def everything_made(root, seeds=3):
    """Runs for every cell of every table, figure 3 and figure 4."""
    rng = np.random.default_rng(0)
    done = set()
    log = "\n".join(json.dumps(dict(kind="eval", step=s, val_accuracy=s / 10, val_score=s / 10)) for s in range(1, 9))
    for number in analyze.PAPER:
        for _, cells, _ in analyze.grid(number)[1]:
            for key, printed in cells:
                name = "-".join(str(v) for v in key.values())
                if printed in "x-" or name in done:
                    continue
                done.add(name)
                value = analyze.number_of(printed)
                for seed in range(seeds):
                    score = dict(test_r2=value) if value < 1 else dict(test_accuracy=value / 100 + rng.normal() / 200)
                    put(root, f"{name}-{seed}", log + '\n{"torn', **key, **score, seed=seed)
                    if key["start"] == "spt":
                        folder = put(root, f"{name}-{seed}-pretrain", log, seed=seed, val_score=0.5,
                                     **{k: v for k, v in key.items() if k != "start"})
                        if key["model"] == "s4":
                            kernels = np.exp(-np.arange(300) / 50)[None, None] * np.ones((6, 2, 1))
                            np.savez(folder / "kernels.npz", before=kernels, after=kernels / 2)
    for task in ("image", "text"):
        for fraction in (0.005, 0.01, 0.05, 0.1, 0.5, 1.0):
            for start in ("scratch", "spt"):
                for seed in range(seeds):
                    finetuned(root, f"{task}-{fraction}-{start}-{seed}", 0.5 + fraction / 3, seed, task, start=start,
                              train_fraction=fraction)


def run(*words, **more):
    return subprocess.run([sys.executable, ROOT / "analyze.py", *words], capture_output=True, text=True, cwd=ROOT,
                          timeout=120, **more)


def test_all_on_a_thousand_runs_in_ten_seconds(tmp_path):
    everything_made(tmp_path / "runs", seeds=5)
    assert len(list((tmp_path / "runs").iterdir())) > 1000
    start = time.time()
    done = run("all", "--runs", tmp_path / "runs", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert time.time() - start < 10
    for number in analyze.FIGURES:
        png = (tmp_path / "out" / f"figure{number}.png").read_bytes()
        assert png[:4] == b"\x89PNG" and len(png) > 15_000
    text = (tmp_path / "out" / "tables.md").read_text()
    assert all(f"### Table {number}:" in text for number in analyze.PAPER) and "not run" not in text.replace(
        "| x | – | | | | | | | | not run |", "")
    assert not [p for p in (tmp_path / "out").iterdir() if p.suffix == ".tmp"]


def test_all_on_nothing_and_on_wreckage(tmp_path):
    """No run at all; and damaged files beside good ones: what can be made is made, and the rest is said."""
    (tmp_path / "runs").mkdir()
    done = run("all", "--runs", tmp_path / "runs", "--out", tmp_path / "out")
    assert done.returncode == 0 and (tmp_path / "out" / "figure1.png").exists()
    finetuned(tmp_path / "runs", "good", .88)
    for name, content in (("torn", '{"task": "image"'), ("list", "[]"), ("foreign", '{"task": 5}'), ("empty", "")):
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "result.json").write_text(content)
    older = {k: v for k, v in BASE.items() if k in ("seconds", "steps")}
    (tmp_path / "runs" / "older").mkdir()
    (tmp_path / "runs" / "older" / "result.json").write_text(json.dumps(older | dict(
        task="text", model="s4", objective="masked", start="scratch", seed=0, test_accuracy=0.8)))
    for i, odd in enumerate((dict(test_accuracy=math.nan), dict(processes="2"), dict(init=5), dict(size=[1]),
                             dict(train_fraction="0.5"), dict(test_accuracy=None))):
        finetuned(tmp_path / "runs", f"odd{i}", 0.5, task="listops")
        path = tmp_path / "runs" / f"odd{i}" / "result.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | odd))
    finetuned(tmp_path / "runs", "zero", 0.0, task="text", train_fraction=0.5)             # no relative gain over nothing
    finetuned(tmp_path / "runs", "zero-spt", 0.5, task="text", train_fraction=0.5, start="spt")
    finetuned(tmp_path / "runs", "epochs", 0.5, model="rotary", spt_share=0.0, epochs=None, steps=0)
    for name, values in (("kernels", None), ("nan", np.full((2, 2, 8), np.nan))):
        folder = put(tmp_path / "runs", name, task="image" if values is None else "text", model="s4", objective="masked",
                     seed=0, val_score=None)
        if values is None:
            (folder / "kernels.npz").write_bytes(b"PK no archive")
        else:
            np.savez(folder / "kernels.npz", before=values, after=values)
    done = run("all", "--runs", tmp_path / "runs", "--out", tmp_path / "out")
    assert done.returncode == 0 and "Traceback" not in done.stderr
    for name in ("torn", "list", "foreign", "empty", "odd0", "odd1", "odd2", "odd3", "odd4", "odd5", "kernels", "nan"):
        assert f"runs/{name}/" in done.stderr, name
    text = (tmp_path / "out" / "tables.md").read_text()
    assert "88.65 / 88.00 (1)" in text and "86.82 / 80.00 (1)†" in text


def test_mini_runs_are_marked_as_mini(tmp_path):
    """Stand-ins fill the tables of the mini preset and none of the paper's, and each output says what they are."""
    finetuned(tmp_path / "runs", "a", .40, task="image_mini")
    finetuned(tmp_path / "runs", "b", .41, task="image_mini", start="spt")
    finetuned(tmp_path / "runs", "c", .30, task="image_mini", size="2k")
    finetuned(tmp_path / "runs", "d", .90, task="image")
    done = run("all", "--preset", "mini", "--runs", tmp_path / "runs", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "out" / "tables.md").read_text()
    assert "88.65 / 40.00 (1)" in text and "81.36 / 30.00 (1)" in text and "90.00" not in text
    assert "| 100k (mini: 2k) |" in text
    assert text.count(", mini: ") == text.count("**Mini**") - 1 == len(analyze.PAPER)     # and the claims
    lines = [line for line in text.splitlines() if line.startswith("| S4 | image | 88.65 | 40.00 |")]
    assert lines and all("| 40.00 |  | one seed |" in line and line.endswith("| mini |") for line in lines)
    assert run("table", "2", "--runs", tmp_path / "runs").stdout.count("90.00") and "40.00" not in run(
        "table", "2", "--runs", tmp_path / "runs").stdout


def test_the_report_is_one_page(tmp_path):
    """Tables, pictures and runs in one file that points to no other; what runs say of themselves is text, not markup."""
    folder = finetuned(tmp_path / "runs", "good", .88, commit="<script>alert(1)</script>")
    (folder / "log.jsonl").write_text(json.dumps(dict(kind="start", argv=["finetune.py", "--task", "image", "--lr<b>"])))
    put(tmp_path / "runs", "pre", task="image", model="s4", objective="masked", seed=0, val_score=0.1)
    done = run("report", "--runs", tmp_path / "runs", "--out", tmp_path / "out", "--title", "a & b")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 5 and "<h1>a &amp; b</h1>" in page
    assert "http" not in page and "<script>" not in page and "<b>" not in page and "**" not in page
    assert all(f"<h2>Table {number}:" in page for number in analyze.PAPER)
    assert page.count("<details>") == 2 and "finetune.py --task image --lr&lt;b&gt;" in page
    assert "<td>88.65 / 88.00 (1)</td>" in page
    (tmp_path / "out" / "report.html").unlink()
    (tmp_path / "out" / ".figure4.png.tmp").symlink_to("/dev/full")           # one figure fails: a page without it
    done = run("report", "--runs", tmp_path / "runs", "--out", tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert done.returncode == 1 and page.count("data:image/png;base64,") == 4 and "No space left" in page


def test_two_runs_of_one_seed(tmp_path):
    """The recipe's run goes before a changed one, wherever they lie, and the other is named."""
    finetuned(tmp_path, "a", .5, full_recipe=False)
    finetuned(tmp_path, "b", .6)
    done = run("table", "2", "--runs", tmp_path)
    assert done.returncode == 0 and "88.65 / 60.00 (1) |" in done.stdout
    assert done.stderr.count("\n") == 1 and "a is left out" in done.stderr and "b has the same cell and seed" in done.stderr


def test_runs_that_belong_nowhere_are_named(tmp_path):
    finetuned(tmp_path / "runs", "fits", .5)
    finetuned(tmp_path / "runs", "share", .5, train_fraction=0.3)              # on figure 3
    finetuned(tmp_path / "runs", "ablation", .5, task="pathfinder", size="1m")
    done = run("all", "--runs", tmp_path / "runs", "--out", tmp_path / "out")
    assert "note: 1 finished runs belong into no table or figure: ablation\n" in done.stdout


def test_figures_show_what_was_measured(tmp_path):
    """Dots are seeds, a layer has one colour in every panel and in the legend, titles lie on the picture."""
    for seed in range(3):
        for model in ("s4", "dlr"):
            for task in ("text", "listops"):
                finetuned(tmp_path, f"{model}-{task}-{seed}", 0.5 + seed / 50, seed, task, model)
    for task, layers in (("listops", 8), ("text", 6)):
        folder = put(tmp_path, f"{task}-pre", task=task, model="s4", objective="masked", seed=0, val_score=0.1)
        after = np.stack([np.full((layers, 50), 1.0), np.full((layers, 50), 2.0)], 1)        # two directions
        np.savez(folder / "kernels.npz", before=after, after=after)
    results, plt = analyze.read_results(tmp_path), analyze.plotting()
    figure, title = analyze.figure2(plt, results)
    marks = lambda label: [c.get_offsets()[:, 1] for c in figure.axes[0].collections if c.get_label() == label]
    assert "3 seeds" in title and "listops, text" in title and len(marks("one seed")) == 2
    assert sorted(marks("one seed")[0]) == pytest.approx([50, 52, 54])
    assert sorted(map(float, marks("the paper"))) == pytest.approx([(57.50 + 79.65) / 2, (59.60 + 86.82) / 2])
    small, _ = analyze.figure2(plt, [r | {"mini": True} for r in results])                # other tasks, other numbers
    assert "the paper" not in [c.get_label() for c in small.axes[0].collections]
    figure, _ = analyze.figure4(plt, results)
    for axis in (figure.axes[1], figure.axes[3]):
        lines = {line.get_label(): line for line in axis.get_lines()}
        assert lines["SPT, layer 3"].get_color() == analyze.LAYERS[1] and list(lines["HiPPO, layer 1"].get_ydata()) == [1] + [2] * 49
    for number, function in analyze.FIGURES.items():
        figure, title = function(plt, results)
        text = figure.suptitle(title + "\nmini: small models on short stand-in tasks", fontsize=10)
        box = text.get_window_extent(figure.canvas.get_renderer())
        assert 0 <= box.x0 and box.x1 <= figure.bbox.width, (number, title)
    plt.close("all")


def test_watching(tmp_path):
    """Running, finished, failed, silent; torn logs; and runs of other targets are not counted."""
    line = lambda **record: json.dumps(record) + "\n"
    start = line(kind="start", step=0, total=200, argv=["finetune.py"])
    steps = start + line(kind="train", step=50, loss=0.5, ms_per_step=100) + line(kind="eval", step=50, val_accuracy=0.75)
    steps += line(kind="train", step=100, loss=0.25, ms_per_step=100)
    logs = {"done": steps, "going": steps + '{"kind": "tra', "broken": steps + line(kind="error", error="loss is nan"),
            "quiet": steps, "new": start, "foreign": steps}
    for name, log in logs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "log.jsonl").write_text(log)
    (tmp_path / "done" / "result.json").write_text("{}")
    long_ago = time.time() - 200
    for name in ("quiet", "new", "broken"):                            # a new run may take its time: nothing is known
        for file in (tmp_path / name).iterdir():
            os.utime(file, (long_ago, long_ago))
    (tmp_path / "queue.txt").write_text("\n".join(f"runs/{name}" for name in logs if name != "foreign") + "\nruns/later\n")
    done = run("watch", tmp_path, "--once", "--only", tmp_path / "queue.txt")
    assert done.stdout.startswith("[  1/6 runs] 0:00 spent, time left unknown;")
    assert "failed: broken: loss is nan; silent: quiet 100/200 loss 0.250 val_accuracy 0.750 for 3:20; running: " in done.stdout
    assert "going 100/200 loss 0.250 val_accuracy 0.750 0:10 left" in done.stdout and "new 0/200" in done.stdout
    assert "foreign" not in done.stdout
    (tmp_path / "finished").touch()                                    # a queue at work: what it has not reached waits
    later = time.time() + 60                                           # as if written after watching began
    os.utime(tmp_path / "going" / "log.jsonl", (later, later))
    done = run("watch", tmp_path, "--only", tmp_path / "queue.txt", "--until", tmp_path / "finished")
    assert "going 100/200" in done.stdout and not any(name in done.stdout for name in ("broken", "quiet", "new"))


def test_a_folder_that_is_not_there(tmp_path):
    done = run("figure", "1", "--runs", tmp_path / "nowhere", "--out", tmp_path / "out")
    assert done.returncode == 2 and done.stderr == f"error: --runs {tmp_path / 'nowhere'} is not a folder\n"
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "out").write_text("a file")
    done = run("all", "--runs", tmp_path, "--out", tmp_path / "out")
    assert done.returncode == 2 and "cannot write" in done.stderr and done.stderr.count("\n") == 1


def test_a_full_disk(tmp_path):
    """The disk fills while a file is written: one line, and the old file stays."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tables.md").write_text("old")
    (tmp_path / "out" / ".tables.md.tmp").symlink_to("/dev/full")
    done = run("all", "--runs", tmp_path, "--out", tmp_path / "out")
    assert done.returncode == 2 and "No space left on device" in done.stderr and done.stderr.count("\n") == 1
    assert (tmp_path / "out" / "tables.md").read_text() == "old"
    (tmp_path / "out" / ".tables.md.tmp").unlink()
    (tmp_path / "out" / ".figure2.png.tmp").symlink_to("/dev/full")
    done = run("all", "--runs", tmp_path, "--out", tmp_path / "out")
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "error: figure 2: cannot write" in done.stderr
    assert (tmp_path / "out" / "figure3.png").exists() and "Table 9" in (tmp_path / "out" / "tables.md").read_text()


def test_without_matplotlib(tmp_path):
    """Tables come without it, and figures say what they need."""
    (tmp_path / "matplotlib.py").write_text("raise ImportError('No module named matplotlib')")
    done = run("all", "--runs", tmp_path, "--out", tmp_path / "out", env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1 and (tmp_path / "out" / "tables.md").exists()
    assert done.stderr.count("figures need matplotlib") == len(analyze.FIGURES) == done.stderr.count("\n")


@pytest.mark.parametrize("preset", ["paper", "mini"])
def test_what_is_kept_is_what_is_shown(preset):
    """README's results and results/PRESET/tables.md are those of the result.json files in the repository."""
    done = run("readme", "--check")
    assert done.returncode == 0, done.stderr
    results = analyze.kept(preset)
    if results:
        shown = (ROOT / "results" / preset / "tables.md").read_text()
        assert shown == "\n\n".join(analyze.sections(results, preset == "mini")) + "\n"


def test_a_stale_readme_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(analyze, "__file__", str(tmp_path / "analyze.py"))
    (tmp_path / "README.md").write_text("<!-- results:begin -->\n<!-- results:end -->\n")
    analyze.main(["readme"])
    analyze.main(["readme", "--check"])
    finetuned(tmp_path / "results" / "mini" / "runs", "a", .40, task="image_mini")
    with pytest.raises(analyze.UserError, match="stale.*run: python analyze.py readme"):
        analyze.main(["readme", "--check"])
    analyze.main(["readme"])
    assert "**The mini preset**: 1 runs, seeds 0" in (tmp_path / "README.md").read_text()


def test_claims_by_hand(tmp_path):
    """Gains are averaged over the tasks that both sides have, seed by seed."""
    for seed in (0, 1):
        for task, model, start, value in (("text", "rotary", "scratch", .50), ("text", "rotary", "spt", .60 + seed / 50),
                                          ("image", "rotary", "scratch", .30), ("image", "rotary", "spt", .36),
                                          ("text", "s4", "scratch", .70), ("text", "s4", "spt", .71),
                                          ("listops", "s4", "scratch", .10)):
            finetuned(tmp_path, f"{task}-{model}-{start}-{seed}", value, seed, task, model, start)
    finetuned(tmp_path, "part", .5, train_fraction=0.01)
    finetuned(tmp_path, "part-spt", .6, train_fraction=0.01, start="spt")
    finetuned(tmp_path, "budget", .70, model="rotary", spt_share=0.0)
    finetuned(tmp_path, "budget-spt", .72, model="rotary", spt_share=0.2, start="spt")
    finetuned(tmp_path, "changed", .99, 2, "text", "s4", full_recipe=False)              # must not count
    kernels = 0.5 ** np.arange(8)[None, None] * np.array([1, 0])[None, :, None] * np.ones((2, 1, 1))
    folder = put(tmp_path, "pre", task="pathx", model="s4", objective="masked", seed=0, val_score=0.1)
    after = np.ones((2, 2, 8))
    after[1] = 0
    after[1, 1, 4] = 1                                                 # the backward kernel starts at lag 1
    np.savez(folder / "kernels.npz", before=kernels, after=after)
    text, none = analyze.claims(analyze.read_results(tmp_path)), "no full runs to compare"
    lines = text.splitlines()[2:]
    assert len(lines) == 7
    # On text alone, where all four were run. rotary: 10 and 12, mean 11, standard deviation 1.41, half-width 12.71 * 1.41
    # / sqrt(2) = 12.7; S4: 1. The gap: 20, then 11 and 9.
    assert f"| Transformer / S4: {none}<br>rotary +11.0 [-1.7, +23.7] (2), S4 +1.0 [+1.0, +1.0] (2), difference +10.0 " in lines[0]
    assert lines[0].endswith("over 1 tasks |") and lines[1].endswith(f"| {none} |")
    assert ("rotary: after SPT +10.0 [-2.7, +22.7] (2), from scratch +20.0 [+20.0, +20.0] (2), change -10.0 [-22.7, +2.7] (2)"
            in lines[2])
    assert lines[3].count(none) == 2
    assert f"image: 1 %: +20.0 (one seed)<br>text: {none}" in lines[4]      # 0.5 -> 0.6 is a fifth more
    assert f"image, rotary: +2.0 (one seed), –, –<br>image, s4: {none}" in lines[5]
    assert "pathx (length 8): 0, 0 -> 3, 5 (1)" in lines[6]


# ---- run_all.sh ------------------------------------------------------------------------------------------------------


def listed(*words):
    done = subprocess.run(["bash", ROOT / "run_all.sh", *words, "--list"], capture_output=True, text=True, timeout=60,
                          env=os.environ | {"PATH": os.path.dirname(sys.executable) + ":" + os.environ["PATH"]})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def flags_of(command):
    words = command.split()[2:]
    return [word for i, word in enumerate(words) if word not in ("--resume",)]


@pytest.mark.parametrize("preset", ["paper", "mini"])
@pytest.mark.parametrize("target", ["table1", "table2", "table3", "table7", "table8", "table9"])
def test_chains_fill_the_tables(target, preset, tmp_path):
    """What a target would train is what the table asks for, cell by cell; every command parses as it stands. The mini
    preset does so with stand-ins, but for what has none."""
    made, order = set(), ("task", "model", "objective", "start", "size", "train_fraction", "spt_share")
    for chain in listed(target, "--seeds", "4", "--preset", preset):
        *first, last = chain.split(" && ")
        inherited = None
        if first:
            inherited = pretrain.parse_args(flags_of(first[0]))
            inherited.out = tmp_path / inherited.out
            inherited.out.mkdir(parents=True)
            (inherited.out / "config.json").write_text(json.dumps(pretrain.config_of(inherited)))
            (inherited.out / "result.json").touch()
            last = last.replace("--init ", f"--init {tmp_path}/")
        args = finetune.parse_args(flags_of(last))
        assert args.seed == 4 and not args.changed and (not first or inherited.seed == 4)
        run = {name: getattr(args, name) for name in order} | {"run": "somewhere"}
        (run,) = [run] if preset == "paper" else analyze.stand_ins([run])
        made.add(tuple(run[name] for name in order))
    wanted = set()
    for _, cells, _ in analyze.grid(int(target[5:]))[1]:
        for key, printed in cells:
            wanted.add((tuple(key[name] for name in order), printed))
    possible = {key for key, printed in wanted if printed != "x"}
    if preset == "mini":
        possible = {key for key in possible if key[0] in ("listops", "text", "image", "pathfinder", "pathx", "pathx256",
                                                          "scifar") and key[1] != "pythia"}
    assert possible <= made and made <= {key for key, _ in wanted}


def test_a_task_without_data_does_not_stop_the_others(tmp_path):
    """Preparing fails for one of two tasks: the other's runs are made, and exit code and messages say what is missing."""
    stand_in_for_python(tmp_path, """
if [ "$1" = data.py ]; then [ "$3" != scifar_mini ] || { echo "error: no connection" >&2; exit 2; }; exit; fi""")
    done = stubbed(tmp_path, "table3", "--preset", "mini", "--seeds", "0")
    assert done.returncode == 1 and "error: no data for scifar_mini" in done.stderr and "nothing is left" in done.stderr
    done = stubbed(tmp_path, "table2", "--preset", "mini", "--seeds", "0", "--tasks", "text,image", "--models", "s4")
    assert done.returncode == 0 and len(list((tmp_path / "runs" / "mini").glob("*/result.json"))) == 2 * 3


def test_targets_share_runs_and_filters_filter():
    everything = listed("all")
    assert len(set(everything)) == len(everything)
    outs = [word for chain in everything for word in chain.split() if word.startswith("runs/paper/")]
    for target in ("table1", "table7", "figure3", "figure5", "figure1"):
        assert set(listed(target)) <= set(everything), target
    assert all(any(chain.startswith(f"{line} &&") for chain in everything) for line in listed("figure4"))
    assert len(listed("figure5", "--seeds", "0")) == len(listed("figure4", "--seeds", "0")) == 4
    assert {c.count(" && ") for c in everything} == {0, 1} and len(set(outs)) > 400
    some = listed("table2", "--tasks", "text,image", "--models", "s4", "--seeds", "7,8")
    assert len(some) == 2 * 2 * 2 and all("--model s4" in c and ("--seed 7" in c or "--seed 8" in c) for c in some)
    assert listed("table1", "--preset", "mini", "--tasks", "text_mini") == listed("table1", "--preset", "mini", "--tasks", "text")


def test_keep_keeps_what_is_there(tmp_path):
    """Results of every run, kernels and logs of those that figures need, and nothing of a run that is no longer there."""
    finetuned(tmp_path / "runs", "a", .5)
    curve = finetuned(tmp_path / "runs", "curve", .5, model="rotary", spt_share=0.0)
    pre = put(tmp_path / "runs", "pre", task="image", model="s4", objective="masked", seed=0, val_score=0.1)
    np.savez(pre / "kernels.npz", before=np.ones((2, 2, 8)), after=np.ones((2, 2, 8)))
    (pre / "best.pt").write_bytes(b"weights")
    keep = lambda: run("keep", "--runs", tmp_path / "runs", "--out", tmp_path / "out")
    assert keep().returncode == 0
    names = lambda: {str(p.relative_to(tmp_path / "out" / "runs")) for p in (tmp_path / "out" / "runs").glob("*/*")}
    assert names() == {"a/result.json", "curve/result.json", "curve/log.jsonl", "pre/result.json", "pre/kernels.npz"}
    (tmp_path / "runs" / "a").rename(tmp_path / "runs" / "b")
    (curve / "log.jsonl").unlink()
    assert keep().returncode == 0
    assert names() == {"b/result.json", "curve/result.json", "pre/result.json", "pre/kernels.npz"}
    done = run("keep", "--runs", tmp_path / "out" / "runs", "--out", tmp_path / "out")
    assert done.returncode == 2 and len(names()) == 4


def test_a_chain_that_fails_beside_an_old_result(tmp_path):
    """As where the recipe has changed since: its result must not pass for today's."""
    stand_in_for_python(tmp_path, """
if [ "$1" = data.py ]; then exit; fi
if [[ $* == *"finetune.py --task"* ]]; then mkdir -p "${@: -1}"; touch "${@: -1}/result.json"; echo "error: lr"; exit 2; fi""")
    done = stubbed(tmp_path, "table7", "--tasks", "text", "--models", "s4", "--seeds", "0")
    assert done.returncode == 1 and "text-s4-scratch-s0 did not finish" in done.stderr and "error: lr" in done.stderr


def test_ctrl_c_while_data_are_prepared(tmp_path):
    stand_in_for_python(tmp_path, '[ "$1" != data.py ] || exit 130')
    done = stubbed(tmp_path, "table2", "--preset", "mini", "--seeds", "0")
    assert done.returncode == 130 and not (tmp_path / "gpus.txt").exists()


def test_two_at_once_on_the_same_runs(tmp_path):
    stand_in_for_python(tmp_path, '[ "$1" != data.py ] || exit 0; sleep 1')
    words = ["bash", "run_all.sh", "table7", "--tasks", "text", "--models", "s4", "--seeds", "0"]
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
    first = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    while not (tmp_path / "gpus.txt").exists():
        time.sleep(0.05)
    second = stubbed(tmp_path, *words[2:])
    assert second.returncode == 2 and "another run_all.sh works on runs/paper" in second.stderr
    assert first.wait(30) == 0


def test_a_failing_chain_does_not_stop_the_others(tmp_path):
    """All chains run, each on one of the two GPUs, one fails, and the exit code and the last lines say which."""
    stand_in_for_python(tmp_path, """
if [ "$1" = data.py ]; then exit; fi
if [[ $* == *"pretrain.py"*"--model dlr "*"--seed 1"* ]]; then echo "stub: no memory" >&2; exit 1; fi""")
    done = stubbed(tmp_path, "table7", "--tasks", "text", "--gpus", "3,5")
    assert done.returncode == 1
    failed = [line for line in done.stderr.splitlines() if "did not finish" in line]
    assert [line.split("/")[2].split()[0] for line in failed] == ["text-dlr-pretrain-s1"]
    assert "stub: no memory" in done.stderr and "34 of 36 runs are finished" in done.stdout
    calls = (tmp_path / "gpus.txt").read_text().splitlines()
    assert {call.split()[0] for call in calls} == {"3", "5"}
    assert len(calls) == 4 * 3 * 3 - 1                                # the failed chain's second stage is not tried


def test_killed_runs_are_made_again(tmp_path):
    """More than 64 queued runs, half of them killed as `kill -9` does: the same command again and again until it reports
    success leaves what one quiet pass leaves."""
    (tmp_path / "quiet").mkdir(), (tmp_path / "shot").mkdir()
    words = ["table7", "--preset", "mini", "--seeds", "0,1"]
    stand_in_for_python(tmp_path / "quiet", '[ "$1" != data.py ] || exit 0')
    assert stubbed(tmp_path / "quiet", *words).returncode == 0
    stand_in_for_python(tmp_path / "shot", """
if [ "$1" = data.py ]; then exit; fi
name=$(basename "${@: -1}") sum=$(cksum <<< "$name")
if [ $((${sum%% *} % 2)) = 0 ] && [ ! -e "shot-$name" ]; then touch "shot-$name"; kill -9 $$; fi""")
    codes = []
    while not codes or (codes[-1] and len(codes) < 5):
        codes.append(stubbed(tmp_path / "shot", *words).returncode)
    assert len(list((tmp_path / "shot").glob("shot-*"))) > 32
    made = [sorted(str(p.relative_to(folder)) for p in folder.glob("runs/**/result.json"))
            for folder in (tmp_path / "quiet", tmp_path / "shot")]
    assert codes == [1, 1, 0] and made[0] == made[1] and len(made[0]) >= 64      # first stages, second stages, then all


@pytest.mark.parametrize("how, code", [("ctrl-c", 130), ("kill", 143)])
def test_stopping_stops_the_runs(how, code, tmp_path):
    """Ctrl-C, or `kill` of the script alone: what runs is stopped, and nothing is started after it."""
    stand_in_for_python(tmp_path, '[ "$1" != data.py ] || exit 0; exec sleep 30')
    # Where the tests themselves run in the background, they ignore the interrupt, and would pass that on.
    running = subprocess.Popen(["bash", "run_all.sh", "table7", "--preset", "mini"], cwd=tmp_path, start_new_session=True,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                               env=os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(100):
        time.sleep(0.1)
        if (tmp_path / "gpus.txt").exists() and len((tmp_path / "gpus.txt").read_text().splitlines()) == 2:
            break
    if how == "ctrl-c":
        os.killpg(running.pid, signal.SIGINT)
    else:
        os.kill(running.pid, signal.SIGTERM)
    assert running.wait(30) == code
    time.sleep(0.5)
    left = [pid for state, pid in map(str.split, subprocess.run(
        ["ps", "-o", "stat=,pid=", "-g", str(running.pid)], capture_output=True, text=True).stdout.splitlines())
        if not state.startswith("Z")]                                  # but for those that wait to be noted as dead
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    assert not left and len((tmp_path / "gpus.txt").read_text().splitlines()) == 2


def stand_in_for_python(folder, more):
    """A `python` that runs nothing: it notes on which GPU it was asked for a run, and makes its result.json."""
    (folder / "run_all.sh").write_bytes((ROOT / "run_all.sh").read_bytes())
    stub = folder / "bin" / "python"
    stub.parent.mkdir()
    stub.write_text(f"""#!/usr/bin/env bash
if [ "$1" = -c ]; then echo 2; exit; fi
if [ "$1" = analyze.py ]; then until [ -e "${{@: -1}}" ]; do sleep 0.1; done; exit; fi
[[ $1 == data.py ]] || echo "$CUDA_VISIBLE_DEVICES $*" >> gpus.txt
{more}
out=$(grep -o -- "--out [^ ]*" <<< "$*" | cut -d " " -f 2)
mkdir -p "$out"; touch "$out/result.json"
""")
    stub.chmod(0o755)


def stubbed(folder, *words):
    return subprocess.run(["bash", "run_all.sh", *words], cwd=folder, text=True, capture_output=True, timeout=60,
                          env=os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"})


@pytest.mark.parametrize("words", [["table4"], [], ["table2", "--seeds", "a"], ["table2", "--tasks", "nonsense"],
                                   ["demo", "--raw", "x"], ["demo", "--preset", "mini"], ["table2", "--preset", "big"],
                                   ["table2", "--tasks", "text,imgae"], ["table2", "--models", "s5"], ["table2", "--gpus", "all"], ["table2", "--seeds"]])
def test_mistakes_in_run_all(words):
    done = subprocess.run(["bash", ROOT / "run_all.sh", *words], capture_output=True, text=True, timeout=60,
                          env=os.environ | {"PATH": os.path.dirname(sys.executable) + ":" + os.environ["PATH"]})
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr


def test_budgets_are_table_8s():
    assert {(r["task"], r.get("epochs")) for r in read_table(pretrain.BUDGETS) if "mini" not in r["task"]} == {
        ("image", "150"), ("text", "30")}
    for task, budget in (("image", 150), ("text", 30)):
        for share in ("0.2", "0.4", "0.6"):
            args = pretrain.parse_args(["--task", task, "--model", "rotary", "--spt-share", share])
            assert (args.epochs, args.steps, args.changed) == (round(budget * float(share)), None, {})
        args = finetune.parse_args(["--task", task, "--model", "s4", "--spt-share", "0"])
        assert (args.epochs, args.steps, args.changed) == (budget, None, {})
    with pytest.raises(pretrain.UserError, match="no --spt-share for listops"):
        pretrain.parse_args(["--task", "listops", "--model", "s4", "--spt-share", "0.2"])
