"""analyze.py and run_all.sh: the right runs in the right cells, numbers against formulas, faults beside them."""
import functools
import json
import math
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import analyze
from analyze import Cell
from conftest import ROOT
from models import MODELS

BASE = dict(seconds=1800.0, steps=1000, epochs=2.5, commit="abc", device="made", torch="2", processes=1, seed=0,
            task="image", model="s4", objective="masked", changed={})


def put(root, name, log="", **record):
    """A finished pretraining run."""
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(BASE | record))
    (folder / "log.jsonl").write_text(log)
    return folder


def finetuned(root, name, accuracy, seed=0, task="image", model="s4", start="scratch", **more):
    put(root, name, task=task, model=model, start=start, seed=seed, test_accuracy=accuracy, **more)


def cells_in(root, preset="paper"):
    return analyze.by_cell(analyze.read_runs(root, preset))


FIGURE3 = {Cell(task, "s4", "masked", start, f"data-{share:g}"): "60.0" for task in ("image", "text")
           for share in (0.5, 1, 5, 10, 50, 100) for start in ("scratch", "spt")}


def cells_of(*numbers):
    """{cell: printed} of these tables of the paper."""
    rows = [row for number in numbers for row in analyze.grid(number)[0].values()]
    return {cell: printed for row in rows for cell, printed in row.values()}


def run(*words, cwd=ROOT, **more):
    return subprocess.run([sys.executable, ROOT / "analyze.py", *words], capture_output=True, text=True, cwd=cwd,
                          timeout=120, **more)


def run_all(*words, folder=ROOT, **more):
    path = folder / "bin" if (folder / "bin").exists() else os.path.dirname(sys.executable)
    return subprocess.run(["bash", "run_all.sh", *words], cwd=folder, capture_output=True, text=True, timeout=60,
                          env=os.environ | {"PATH": f"{path}:{os.environ['PATH']}", "JOBS": "2"} | more)


def listed(*words):
    done = run_all(*words, "--list")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def record_of(command, before=None):
    """What result.json would hold after a command, read from its flags alone."""
    words, changed = command.split(), {}
    flags = {word[2:].replace("-", "_"): after for word, after in zip(words, words[1:]) if word.startswith("--")}
    for name in flags.keys() - {"task", "model", "objective", "seed", "resume", "out", "init", "arch"}:
        changed[name] = json.loads(flags[name]) if flags[name][0].isdigit() else flags[name]
    if "arch" in flags:
        changed["arch"] = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", flags["arch"])}
    start = {"start": "corpus" if flags.get("model") == "pythia" else "scratch"} if "finetune.py" in words else {}
    if before:
        assert flags["init"] == before["out"]
        changed = {k: v for k, v in before["changed"].items() if k in ("arch", "train_fraction")} | changed
        changed |= {"pretraining": before["changed"]} if before["changed"] else {}
        flags, start = before | flags, {"start": "spt"}
    objective = flags.get("objective", "causal" if flags["model"].startswith("pythia") else "masked")
    return dict(task=flags["task"], model=flags["model"], objective=objective, changed=changed, out=flags["out"],
                seed=flags["seed"]) | start


@functools.cache
def commanded(target, preset="paper"):
    """{cell: record} of all runs that run_all.sh lists for a target. Each is exactly the recipe of its cell."""
    found = {}
    for chain in listed(target, "--seeds", "4", "--preset", preset):
        record = None
        for command in chain.split(" && "):
            record = record_of(command, record)
            cell, exact = analyze.cell_of(record, preset)
            assert exact and record["seed"] == "4" and record["out"].endswith("-s4") and "--resume" in command
            found[cell] = record
    return found


# ---- numbers ---------------------------------------------------------------------------------------------------------

def test_the_papers_numbers_are_consistent():
    """Its averages are those of its cells, x as 50, but for those that results/averages.md names."""
    others = {(2, "S4 + SPT"), (2, "Pythia 70M (Rand Init)"), (7, "S4 + Rand Init + SPT"), (7, "DLR + SPT"),
              (7, "DLR + Rand Init + SPT")}
    for number in analyze.PAPER:
        rows, averages = analyze.grid(number)
        for name, average in averages.items():
            values = [50 if p == "x" else float(p) for column, (_, p) in rows[name].items() if column != "pathx256"]
            assert (abs(np.mean(values) - float(average)) < 0.011) == ((number, name) not in others), name


def test_paired_gains_against_the_formula():
    """Student's t for four pairs: 3.182 s / sqrt(4); a seed that one side lacks does not count."""
    before, after = {0: 50.0, 1: 60.0, 2: 55.0, 3: 70.0, 9: 0.0}, {0: 53.0, 1: 61.0, 2: 60.0, 3: 71.0, 8: 0.0}
    gains = analyze.minus(after, before)
    assert list(gains.values()) == [3.0, 1.0, 5.0, 1.0] and analyze.signed(gains) == "+2.5 [-0.5, +5.5] (4)"
    assert analyze.half_width([3.0, 1.0, 5.0, 1.0]) == pytest.approx(3.182 * np.std([3, 1, 5, 1], ddof=1) / 2)


def test_table_2_by_hand(tmp_path):
    for seed, (scratch, spt) in enumerate(((.80, .90), (.82, .91), (.84, .95))):
        finetuned(tmp_path, f"a{seed}", scratch, seed)
        finetuned(tmp_path, f"b{seed}", spt, seed, start="spt", init=f"somewhere/p{seed}")
        put(tmp_path, f"p{seed}", seed=seed)
    finetuned(tmp_path, "one", .5, task="text", model="rotary", changed={"lr": 0.1})
    finetuned(tmp_path, "language", .7, task="text", model="pythia_rand", objective="causal")
    finetuned(tmp_path, "causal", .1, objective="causal")              # this counts elsewhere, and this nowhere
    finetuned(tmp_path, "demo", .1, task="text_demo")
    finetuned(tmp_path, "r2", 0, task="bidmc_rr", model="rotary", test_r2=0.9864)
    finetuned(tmp_path, "words", .85, task="sc", model="rotary", objective="causal")
    text = analyze.table(cells_in(tmp_path), 2)
    assert "| S4 | 59.60 / – | 86.82 / – | 90.90 / – | 88.65 / 82.00 ± 2.00 (3) |" in text
    assert "| 79.08 / 50.00 (1)† |" in text and "| 89.36 / 92.00 ± 2.65 (3) |" in text
    # differences 10, 9, 11: mean 10, standard deviation 1, half-width 4.303 / sqrt(3) = 2.48
    assert "| S4 + SPT | – | – | – | +10.00 [+7.52, +12.48] (3) |" in text
    assert "| S4 + SPT | 86.75 | 92.00 over 1 of 6 tasks |" in text
    assert "| Transformer + Rotary | 74.28 | – |" in text              # a shortened run counts in no average
    assert "| 92.00 ± 2.65 | 3 | 1000 + 1000 | 3.00 | made | abc | full |" in text          # hours: 3 seeds x 2 x 0.5
    assert "| 79.08 | 50.00 | one seed | 1000 | 0.50 | made | abc | changed |" in text
    assert "| S4 | text | 86.82 | – | | | | | | not run |" in text
    text = analyze.table(cells_in(tmp_path), 3)
    assert "| Transformer | 84.55 / 85.00 (1) | 86.93 / – |" in text and "| 0.981 / 0.986 (1) |" in text


def test_what_a_change_makes_of_a_run():
    """More than a cell changes: that cell, marked. Another architecture or part of the data: no cell."""
    for changed, *wanted in (({"epochs": 150, "lr": 1.0}, "budget-0", False), ({"epochs": 30}, "", False),
                             ({"arch": {"d": 64}, "lr": 1}, "size-100k", False), ({"arch": {"d": 65}}, None, False),
                             ({"train_fraction": 0.3}, None, False), ({"train_fraction": 0.05}, None, False)):
        cell, exact = analyze.cell_of(BASE | dict(start="scratch", changed=changed), "paper")
        assert [cell and cell.variant, exact] == wanted


def test_claims_by_hand(tmp_path):
    """Gains are averaged over the tasks that both sides have, seed by seed. What is kept of the runs gives the same
    claims, tables and figures."""
    runs, recipes = tmp_path / "runs", commanded("all")
    log = "\n".join(json.dumps(dict(kind="eval", step=s, val_accuracy=s / 10, val_score=s / 10)) for s in range(1, 9))
    for model, task, start, variant, *values in (
            ("rotary", "text", "scratch", "", .50, .50), ("rotary", "text", "spt", "", .60, .62),
            ("rotary", "image", "scratch", "", .30, .30), ("rotary", "image", "spt", "", .36, .36),
            ("s4", "text", "scratch", "", .70, .70), ("s4", "text", "spt", "", .71, .71),
            ("s4", "image", "scratch", "data-1", .5), ("s4", "image", "spt", "data-1", .6),
            ("rotary", "image", "scratch", "budget-0", .7), ("rotary", "image", "spt", "budget-20", .72)):
        cell = Cell(task, model, "masked", start, variant)
        changed = recipes[cell]["changed"]
        for seed, value in enumerate(values):
            finetuned(runs, f"{'-'.join(cell)}{seed}", value, seed, task, model, start, changed=changed,
                      log=log + '\n{"torn')
        if variant == "data-1":
            finetuned(runs, f"{start}-changed", .99, 1, task, model, start, changed=changed | {"wd": 0.5})  # no claim
    before = 0.5 ** np.arange(8)[None, None] * np.array([1, 0])[None, :, None] * np.ones((2, 1, 1))
    after = np.ones((2, 2, 8))
    after[1] = 0
    after[1, 1, 4] = 1                                                 # the backward kernel starts at lag 1
    np.savez(put(runs, "pre", task="pathx") / "kernels.npz", before=before, after=after)
    text, none = analyze.claims(cells_in(runs)), "no full runs to compare"
    lines = text.splitlines()[2:]
    assert len(lines) == 7
    # On text alone, where all four were run. rotary: 10 and 12, mean 11, standard deviation 1.41, half-width
    # 12.71 * 1.41 / sqrt(2) = 12.7; S4: 1. The gap: 20, then 11 and 9.
    assert f"| Transformer, S4: {none}<br>rotary +11.0 [-1.7, +23.7] (2), S4 +1.0 [+1.0, +1.0] (2), diff" in lines[0]
    assert lines[0].endswith("over 1 tasks |") and lines[1].endswith(f"| {none} |")
    assert "rotary: after SPT +10.0 [-2.7, +22.7] (2), from scratch +20.0 [+20.0, +20.0] (2), change -10.0" in lines[2]
    assert lines[3].count(none) == 2
    assert f"image: 1 %: +20.0 (one seed)<br>text: {none}" in lines[4]      # 0.5 -> 0.6 is a fifth more
    assert f"image, rotary: +2.0 (one seed), –, –<br>image, s4: {none}" in lines[5]
    assert "pathx (length 8): 0, 0 -> 3, 5 (1)" in lines[6]
    for words in (["all", "--runs", runs, "--out", tmp_path / "out"], ["keep", "--runs", runs, "--out", tmp_path],
                  ["report", "--runs", tmp_path / "runs.jsonl", "--out", tmp_path / "again"]):
        assert run(*words).returncode == 0
    for name in ("tables.md", *(f"figure{number}.png" for number in analyze.FIGURES)):
        first, again = ((tmp_path / folder / name).read_bytes() for folder in ("out", "again"))
        assert first == again and (text.encode() in first or first[:4] == b"\x89PNG")
    page = (tmp_path / "again" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 5 and page.count("<h2>") == 1 + len(analyze.PAPER)


# ---- what is written -------------------------------------------------------------------------------------------------

def test_wreckage(tmp_path):
    """Damaged files beside good ones: what can be made is made, and the rest is named. Of two runs of one seed the
    recipe's goes before a changed one."""
    finetuned(tmp_path / "runs", "a", .5, changed={"lr": 0.1})
    finetuned(tmp_path / "runs", "b", .88)
    finetuned(tmp_path / "runs", "small", .5, task="pathfinder", changed={"arch": {"d": 1}})
    wrecks = ('{"task": "image"', "[]", '{"task": 5}', "", json.dumps(BASE | dict(start="scratch", test_accuracy=None)),
              json.dumps(BASE | dict(changed=None)))
    for i, content in enumerate(wrecks):
        (put(tmp_path / "runs", f"wreck{i}") / "result.json").write_text(content)
    done = run("all", "--runs", tmp_path / "runs", "--out", tmp_path / "out")
    assert done.returncode == 0 and done.stdout.startswith("3 runs") and "of which 1 match no cell" in done.stdout
    warnings = "".join(f"warning: a run in {tmp_path}/runs/wreck{i}/result.json is skipped.*\n" for i in range(6))
    assert re.fullmatch(warnings + "warning: a is left out: b has the same cell and seed\n", done.stderr)
    assert "88.65 / 88.00 (1) |" in (tmp_path / "out" / "tables.md").read_text()


def test_figures_show_what_was_measured(tmp_path):
    """Dots are seeds, diamonds the paper's averages over the same tasks: (57.50 + 79.65) / 2, (59.60 + 86.82) / 2."""
    import matplotlib.pyplot as plt

    for model in ("s4", "dlr"):
        for task in ("text", "listops"):
            for seed in range(3):
                finetuned(tmp_path, f"{model}-{task}-{seed}", 0.5 + seed / 50, seed, task, model)
    figure, title = analyze.figure2(plt, cells_in(tmp_path))
    dots = {(c.get_label(), *c.get_offsets()[:, 1].round(2)) for c in figure.axes[0].collections}
    assert dots == {("one seed", 50, 52, 54), ("the paper", 68.58), ("the paper", 73.21)} and "listops, text" in title
    plt.close("all")


def test_what_cannot_be_written_is_one_line(tmp_path):
    """The disk fills while a file is written: the old file stays. Without matplotlib tables come all the same."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "tables.md").write_text("old")
    (out / ".tmp-tables.md").symlink_to("/dev/full")
    done = run("all", "--runs", tmp_path, "--out", out)
    assert done.returncode == 2 and "No space left on device" in done.stderr and done.stderr.count("\n") == 1
    assert (out / "tables.md").read_text() == "old"
    (out / ".tmp-tables.md").unlink()
    (tmp_path / "matplotlib.py").write_text("raise ImportError('No module named matplotlib')")
    done = run("all", "--runs", tmp_path, "--out", out, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 2 and done.stderr == "error: No module named matplotlib\n"
    assert "Table 9" in (out / "tables.md").read_text()


def test_what_is_kept_is_what_is_shown(tmp_path, monkeypatch):
    """README's results and results/mini are those of runs.jsonl, whose runs all count in a cell. A stale page is found,
    and mended."""
    kept = ROOT / "results" / "mini"
    runs = analyze.read_runs(kept / "runs.jsonl", "mini")
    assert len(runs) == 576 and all(each["kind"] == "mini" for each in runs)
    assert run("all", "--preset", "mini", "--runs", kept / "runs.jsonl", "--out", tmp_path).returncode == 0
    assert (kept / "tables.md").read_text() == (tmp_path / "tables.md").read_text()
    shutil.copytree(kept, tmp_path / "results" / "mini")
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.setattr(analyze, "ROOT", tmp_path)
    analyze.command(["readme", "--check"])
    for page in (tmp_path / "README.md", tmp_path / "results" / "mini" / "README.md"):
        whole = page.read_text()
        page.write_text(whole.replace("<!-- results:begin -->\n", "<!-- results:begin -->\n?"))
        with pytest.raises(analyze.UserError, match="differs.*the same command without --check"):
            analyze.command(["readme", "--check"])
        analyze.command(["readme"])
        assert page.read_text() == whole


def test_the_demo_from_part_of_its_runs(tmp_path):
    for model, start, seed, value in (
            ("transformer", "scratch", 0, .5), ("transformer", "spt", 0, .7), ("transformer", "scratch", 1, .5),
            ("s4", "scratch", 0, .8), ("s4", "spt", 0, .75)):
        finetuned(tmp_path, f"{model}-{start}-{seed}", value, seed, "pathfinder_demo", model, start)
    page = tmp_path / "page.md"
    page.write_text("<!-- demo:begin -->\n<!-- demo:end -->\n")
    done = run("demo", "--runs", tmp_path, "--figure", tmp_path / "demo.png", "--readme", page)
    assert done.returncode == 0 and (tmp_path / "demo.png").exists(), done.stderr
    assert "| Pathfinder, scaled down | Transformer | 50.0 ± 0.0 | 70.0 | +20.0 | 1 |" in done.stdout
    assert "| *gap, S4 minus Transformer* | +30.0 | +5.0 | | |" in done.stdout and "+20.0 | 1 |" in page.read_text()


def test_many_models_are_sorted_by_their_gain(tmp_path):
    """run_all.sh architectures: no line for a gap between two of them; models that are half done come last; one of a
    fork, which no table knows, is called what --model calls it."""
    for i, model in enumerate(("transformer", "local", "mega", "s4", "s5", "lru", "sgconv", "mine")):
        finetuned(tmp_path, f"{model}-scratch", 0.5 + 0.01 * i, task="text_demo", model=model)
        if model not in ("mega", "mine"):
            finetuned(tmp_path, f"{model}-spt", 0.6 - 0.02 * i, task="text_demo", model=model, start="spt")
    put(tmp_path, "s5-pretrain", task="text_demo", model="s5", val_score=0.447)
    done = run("demo", "--runs", tmp_path, "--figure", tmp_path / "demo.png")
    rows = [line[2:].split(" | ")[0] for line in done.stdout.splitlines() if line.startswith("| ")]
    assert rows[1:] == ["Transformer", "Local attention", "S4", "S5", "LRU", "SGConv", "MEGA", "mine"], done.stderr
    assert "| S5 | 54.0 | 52.0 | -2.0 | 1 | 44.7 |" in done.stdout
    assert "| LRU | 55.0 | 50.0 | -5.0 | 1 | – |" in done.stdout
    assert ("Standard deviation over 6 models: 2.3 (from 50.0 to 56.0) from scratch, 4.6 (from 48.0 to 60.0) after SPT."
            ) in done.stdout
    assert (tmp_path / "demo.png").exists()
    chosen = {}                                   # the bold ones of the rates that were tried are those of the runs
    for line in (ROOT / "results" / "architectures.md").read_text().splitlines():
        cells = line.strip("| ").split(" | ")
        if len(cells) == 10 and cells[0] in MODELS:
            chosen[cells[0]] = [("1e-3", "3e-3", "9e-3")[i % 3] for i, cell in enumerate(cells[1:]) if "**" in cell]
    for line in listed("architectures", "--seeds", "0"):
        first, after, alone = chosen[re.search(r"-(\w+)-(?:pretrain|scratch)-s0", line)[1]]
        assert re.findall(r"--lr (\S+)", line) == ([first, after] if "pretrain.py" in line else [alone])
    names = set(listed("architectures", "--seeds", "0"))
    assert len(names) == 2 * len(analyze.MODEL_NAMES) and set(analyze.MODEL_NAMES) <= set(MODELS)


def test_the_first_look_is_that_of_its_kept_runs(tmp_path):
    """The page's table and caption, and the rank correlations that README states too."""
    pages = [(ROOT / name).read_text() for name in ("README.md", "results/architectures.md")]
    done = run("demo", "--runs", ROOT / "results" / "architectures.jsonl", "--figure", tmp_path / "architectures.png")
    printed = done.stdout.split("\n\n" + str(tmp_path))[0].strip()
    assert printed.count("\n| ") == 24 and printed in pages[1], done.stderr
    snippet = re.search("```python\n(.*?)```", pages[1], re.S)[1]
    shown = subprocess.run([sys.executable, "-c", snippet], cwd=ROOT, capture_output=True, text=True).stdout
    assert re.findall(r"0(\.\d+)", shown) == [".74", ".81", ".95"]
    assert "rank correlation .81" in pages[0] and ".74" in pages[1] and ".81 and .95" in pages[1]


def test_status_and_forecast(tmp_path):
    """Running, finished, failed, silent; torn logs. The forecast: from scratch 6,000 steps of 100 ms, 10 minutes, and
    4,000 of 50 ms, 3:20; SPT takes as long, in two halves, one of which is finished; two chains side by side."""
    name = "runs/demo/pathfinder_demo-transformer-{}-s0".format
    start = json.dumps(dict(kind="start", step=0, total=6000)) + "\n"
    steps = start + json.dumps(dict(kind="train", step=200, loss=0.25, ms_per_step=100)) + "\n"
    logs = {name("pretrain"): steps, name("scratch"): steps + '{"kind": "tra', "new": start, "quiet": steps,
            "broken": steps + json.dumps(dict(kind="error", error="loss is nan")),
            name("scratch").replace("transformer", "s4"): steps.replace("100}", "50}").replace("6000", "4000")}
    for folder, log in logs.items():
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "log.jsonl").write_text(log)
    (tmp_path / name("pretrain") / "result.json").write_text("{}")
    os.utime(tmp_path / "quiet" / "log.jsonl", (time.time() - 900, time.time() - 900))
    assert run("status", tmp_path).stdout.splitlines() == [
        "1 of 6 runs are done", "failed   broken: loss is nan", "running  new: 0/6000",
        "silent   quiet: 200/6000 loss 0.250 for 15 minutes",
        "running  pathfinder_demo-s4-scratch-s0: 200/4000 loss 0.250, 3 minutes left",
        "running  pathfinder_demo-transformer-scratch-s0: 200/6000 loss 0.250, 10 minutes left"]
    done = run("forecast", "2", input="\n".join(listed("demo", "--seeds", "0")), cwd=tmp_path)
    minutes = 1.15 * (10 + 10 / 2 + 10 / 3 * 2) / 2
    assert done.stdout.startswith(f"about {math.ceil(minutes)} minutes here"), done.stdout + done.stderr


# ---- run_all.sh ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("preset", ["paper", "mini"])
def test_chains_fill_the_cells(preset):
    """Every run of every chain is exactly the recipe of one cell, and every cell of a table has a chain; in the mini
    preset but for what has no stand-in."""
    lacking = {"retrieval", "sc", "bidmc_hr", "bidmc_rr", "bidmc_spo2", "pythia"} if preset == "mini" else set()
    targets = {f"table{number}": cells_of(number) for number in analyze.PAPER}
    targets |= {"figure3": FIGURE3, "all": cells_of(*analyze.PAPER) | FIGURE3}
    for target, wanted in targets.items():
        made = {cell for cell in commanded(target, preset) if cell.start != "pretraining"}
        possible = {cell for cell, printed in wanted.items() if printed != "x" and not lacking & set(cell)}
        assert possible <= made <= set(wanted), target
    for number in (1, 2, 4, 5):
        assert commanded(f"figure{number}", preset).keys() <= commanded("all", preset).keys(), number


def test_no_chain_is_listed_twice_and_filters_filter():
    everything = listed("all")
    assert len(set(everything)) == len(everything) > 400
    some = listed("table2", "--tasks", "text_mini,image", "--models", "s4", "--seeds", "7,8")
    assert len(some) == 2 * 2 * 2 and all("--model s4" in c and ("--seed 7" in c or "--seed 8" in c) for c in some)


def stand_in_for_python(folder, more=""):
    """A `python` that runs nothing: it notes what it was asked for and on which GPU, and makes a run's result.json."""
    stub = folder / "bin" / "python"
    stub.parent.mkdir(parents=True)
    (folder / "results" / "findings").mkdir(parents=True)
    for script in ("run_all.sh", "results/findings/runs.sh"):
        (folder / script).write_bytes((ROOT / script).read_bytes())
    stub.write_text(f"""#!/usr/bin/env bash
if [ "$1" = analyze.py ]; then echo "$*" >> analyses.txt; exit; fi
[ "$1" = data.py ] || echo "$CUDA_VISIBLE_DEVICES $*" >> calls.txt
{more}
[ "$1" != data.py ] || exit 0
mkdir -p "${{@: -1}}"; touch "${{@: -1}}/result.json"
""")
    stub.chmod(0o755)


def test_what_fails_does_not_stop_the_others(tmp_path):
    """Chains run on two GPUs. One task has no data; one chain fails, another beside its old result: all others are
    made, exit code and lines tell."""
    stand_in_for_python(tmp_path, """
if [ "$*" = "data.py --task image" ]; then exit 2; fi
if [[ $* == *"pretrain.py"*"--model dlr "*"--seed 1"* ]]; then echo "stub: no memory" >&2; exit 1; fi
if [[ $* == *"--model s4 "*"-scratch-s2" ]]; then
    mkdir -p "${@: -1}"; touch "${@: -1}/result.json"; echo "error: lr"; exit 2
fi""")
    done = run_all("table7", "--tasks", "text,image", "--gpus", "3,5", folder=tmp_path)
    assert done.returncode == 1 and "error: some runs are missing" in done.stderr
    assert "error: no data for image; its runs are left out" in done.stderr
    failed = {line.split()[1]: line for line in done.stderr.splitlines() if "did not finish" in line}
    assert failed.keys() == {"text-dlr-spt-s1", "text-s4-scratch-s2"}
    assert failed["text-dlr-spt-s1"].endswith("stub: no memory") and failed["text-s4-scratch-s2"].endswith("error: lr")
    assert (tmp_path / "analyses.txt").read_text() == "analyze.py table 7 --preset paper --runs runs/paper\n"
    calls = (tmp_path / "calls.txt").read_text().splitlines()
    assert {call.split()[0] for call in calls} == {"3", "5"}
    assert len(calls) == 4 * 3 * 3 - 1                                # the failed chain's second stage is not tried
    done = run_all("table7", "--tasks", "image", folder=tmp_path)
    assert done.returncode == 1 and done.stderr.endswith("error: nothing is left to run\n")


def test_raw_is_for_what_official_files_hold(tmp_path):
    """The questions of findings mix reviews, which --raw gives, with a generated task, which no --raw could."""
    stand_in_for_python(tmp_path, '[ "$1" != data.py ] || echo "$*" >> prepared.txt')
    run_all("findings1", "--raw", ".", "--seeds", "0", folder=tmp_path)
    assert (tmp_path / "prepared.txt").read_text().splitlines() == [
        "data.py --task pathfinder_demo", f"data.py --task text256 --raw {tmp_path}"]


def test_killed_runs_are_made_again(tmp_path):
    """Half of a demo's runs are killed as `kill -9` does: the same command, until it reports success, makes them all.
    Its table is shown after each seed."""
    wanted = set(re.findall(r"--out (\S+)", "\n".join(listed("demo-init"))))
    stand_in_for_python(tmp_path, """
name=$(basename "${@: -1}") sum=$(cksum <<< "$name")
if [ "$1" != data.py ] && [ $((${sum%% *} % 2)) = 0 ] && [ ! -e "shot-$name" ]; then
    touch "shot-$name"; kill -9 $$
fi""")
    tries = [run_all("demo-init", folder=tmp_path) for _ in range(3)]          # first stages, second stages, then all
    assert [done.returncode for done in tries] == [1, 1, 0] and len(list(tmp_path.glob("shot-*"))) > 6
    assert {str(path.parent.relative_to(tmp_path)) for path in tmp_path.glob("runs/**/result.json")} == wanted
    assert tries[2].stdout == "demo-init took 0 minutes\n"
    analyses = (tmp_path / "analyses.txt").read_text().splitlines()
    assert analyses.count("analyze.py demo --runs runs/demo-init --figure runs/demo-init/demo-init.png") == 3 * 3
    assert "analyze.py forecast 2" in analyses


@pytest.mark.parametrize("target, how, code", [("demo", "ctrl-c", 130), ("table7", "kill", 143)])
def test_stopping_stops_the_runs(target, how, code, tmp_path):
    """Ctrl-C in a terminal, or `kill` of the script alone: what runs is stopped, and nothing is started after it. A
    second run_all.sh on the same runs is refused until then."""
    stand_in_for_python(tmp_path, '[ "$1" = data.py ] || exec sleep 30.25')
    calls = tmp_path / "calls.txt"
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        signal.signal(signal.SIGINT, signal.SIG_DFL)           # tests in the background ignore it, and pass that on
        os.execvpe("bash", ["bash", "run_all.sh", target],
                   os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "JOBS": "2"})
    while not calls.exists() or calls.read_text().count("\n") < 2:
        time.sleep(0.1)
    assert "another run_all.sh works on runs/" in run_all(target, folder=tmp_path).stderr
    if how == "ctrl-c":
        os.write(terminal, b"\x03")
    else:
        os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    time.sleep(0.5)
    listing = subprocess.run(["ps", "-eo", "sid=,stat=,args="], capture_output=True, text=True).stdout
    left = [line for line in listing.splitlines() if line.split()[0] == str(pid) and line.split()[1][0] != "Z"]
    assert not left and calls.read_text().count("\n") == 2
