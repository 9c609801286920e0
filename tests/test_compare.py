"""compare/: what a run is, what a gain is over, tables of demos and of kept pages. The cells are
those of loops in test_made_tables.py."""

import re

import matplotlib.pyplot as plt
import pytest
from conftest import ROOT, call, made_run, made_runs
from test_made_tables import printed, rows_in

from compare import runs
from files import UserError


def gains(text, *columns):
    """{cells of these columns: the mean gain} of the table of compare."""
    (rows,) = rows_in(text)
    (title,) = [name for name in rows[0] if name.startswith("gain")]
    return {tuple(row[name] for name in columns): row[title].split(" ")[0] for row in rows}


def chain(root, start, score, rate, mask, finetuning):
    """Runs of two seeds, with pretraining of this lr and mask; the recipe's are 0.01 and 0.3."""
    changed = ({"lr": rate} if rate != 0.01 else {}) | ({"mask": mask} if mask != 0.3 else {})
    own = {"lr": finetuning} if finetuning != 0.01 else {}
    for seed in range(2):
        name = f"{start}{rate}{mask}{finetuning}{seed}"
        more = dict(seed=seed, config=dict(lr=finetuning), changed=own)
        if start == "spt":
            config = dict(lr=rate, mask=mask)
            first = dict(name=f"{name}-first", seed=seed, changed=changed, config=config)
            made_run(root, "pretrain", **first)
            more |= dict(init=f"x/{name}-first")
            more["changed"] = own | ({"pretraining": changed} if changed else {})
        elif start == "joint":
            more |= dict(config=dict(lr=rate, mask=mask), changed=changed)
        made_run(root, start, score, name=name, **more)


def test_two_runs_of_one_setting_are_an_error(tmp_path):
    """And so are two data sets of one name; a copy of a run is the run. Names count for nothing."""
    for name, more in dict(a={}, b=dict(changed={"lr": 0.1}), c=dict(seconds=7.0)).items():
        made_run(tmp_path / "a", score=0.5, name=name, **more)
    assert [*map(len, runs.by_variant(runs.load(tmp_path / "a")))] == [1, 1]
    made_run(tmp_path / "a", score=0.7, name="d", commit="def")
    message = "but differ: commit abc and def, test_accuracy 0.5 and 0.7"
    with pytest.raises(UserError, match=message):
        runs.by_variant(runs.load(tmp_path / "a"))
    for seed in range(2):
        made_run(tmp_path / "b", score=0.5, seed=seed, data=dict(labels=seed))
    with pytest.raises(UserError, match="two sets called image: {'labels': 0} and {'labels': 1}"):
        runs.by_variant(runs.load(tmp_path / "b"))


def test_a_baseline_is_of_the_stage_that_has_the_flag_or_of_both(tmp_path):
    for start, score, rate, mask, finetuning in (
        ("scratch", 0.5, 0.01, 0.3, 0.01),
        ("scratch", 0.4, 0.01, 0.3, 0.001),
        ("spt", 0.7, 0.01, 0.3, 0.01),
        ("spt", 0.72, 0.01, 0.5, 0.01),
        ("spt", 0.55, 0.001, 0.3, 0.001),
        ("spt", 0.8, 0.1, 0.3, 0.01),
        ("spt", 0.6, 0.1, 0.3, 0.001),
        ("joint", 0.6, 0.01, 0.3, 0.01),
        ("joint", 0.65, 0.01, 0.5, 0.01),
    ):
        chain(tmp_path, start, score, rate, mask, finetuning)
    columns = "start", "lr", "pretraining lr", "pretraining mask", "mask"
    masks = {
        ("spt", "0.01", "0.01", "0.5", "–"): "+2.0",
        ("joint", "0.01", "–", "–", "0.5"): "+5.0",
    }
    rates = {
        ("scratch", "0.01", "–", "–", "–"): "+10.0",
        ("spt", "0.01", "0.1", "0.3", "–"): "+20.0",
    }
    rates |= {("spt", "0.01", "0.01", "0.3", "–"): "+15.0"}
    for words, expected in (("mask=0.3", masks), ("lr=0.001", rates)):
        over = gains(printed("compare", tmp_path, "--baseline", words), *columns)
        assert {row: gain for row, gain in over.items() if gain != "–"} == expected
    for words, problem in (("d=3", "these runs differ in start"), ("lr=7", "choose from 0.001")):
        assert problem in call("analyze.py", "compare", tmp_path, "--baseline", words).stderr


def test_a_gain_is_over_scratch_at_equal_passes_that_is_not_frozen(tmp_path):
    """60 steps from scratch, 30 and 30 with pretraining: whatever `steps` says."""
    made_run(tmp_path, "pretrain", name="p", steps=30, changed={"steps": 30})
    for start, steps, score, changed, gain in (
        ("scratch", 90, 0.1, {}, None),
        ("spt", 30, 0.6, dict(pretraining={"steps": 30}), "–"),
        ("scratch", 60, 0.2, dict(freeze=True), "–"),
        ("scratch", 60, 0.5, {}, "+10.0"),
    ):
        more = dict(init="x/p") if start == "spt" else {}
        config = dict(freeze="freeze" in changed, steps=steps)
        more |= dict(config=config, steps=steps, changed=dict(steps=steps) | changed)
        made_run(tmp_path, start, score, name=f"{start}{score}", **more)
        over = gains(printed("compare", tmp_path), "start") if gain else {}
        assert over.get(("spt",)) == gain, score


def test_runs_that_share_a_pretraining_count_it_once(tmp_path):
    made_run(tmp_path, "pretrain", name="p")
    for rate in (0.01, 0.1):
        more = dict(init="x/p", changed={"lr": rate}, config=dict(lr=rate))
        made_run(tmp_path, "spt", 0.5, name=f"{rate}", **more)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text("{}")
    text = printed("compare", tmp_path)
    assert "3 runs, seeds 0;" in text and "Unfinished runs, not included: 1." in text


def test_a_pretraining_run_elsewhere_is_found_by_its_path(tmp_path):
    first = made_run(tmp_path / "one", "pretrain", name="p", steps=70)
    made_run(tmp_path / "two", "spt", 0.5, name="f", init=str(first), steps=30)
    made_run(tmp_path / "two", "spt", 0.5, name="g", seed=1, init="gone/p")
    done = call("analyze.py", "compare", tmp_path / "two", "--figure", tmp_path / "c.png")
    assert "| 1 | 100 |" in done.stdout and (tmp_path / "c.png").read_bytes()[:4] == b"\x89PNG"
    assert "g is left out: its pretraining run was not found" in done.stderr


def test_folders_with_nothing_to_compare_are_one_line(tmp_path):
    made_run(tmp_path / "first", "pretrain")
    (made_run(tmp_path / "broken") / "result.json").write_text('{"task"')
    for name, text in dict(first="no finished finetuning run", broken="json is damaged").items():
        done = call("analyze.py", "compare", tmp_path / name)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and text in done.stderr, name


# ---- Demos and pages -----------------------------------------------------------------------------


def test_a_demo_shows_its_baselines_first_and_a_row_for_what_differs(tmp_path, monkeypatch):
    """In the table, on a page, and as two lines across the figure; with part of the labels the
    baseline is another model's. A fork's run changes no other number."""
    for model, scores in dict(rotary=(0.5, 0.52), s4=(0.8, 0.8), mega=(0.7,)).items():
        for start in ("scratch", "spt"):
            made_runs(tmp_path, start, scores, model=model, task="text_demo", test_examples=2000)
    for share, score in ((None, 0.75), (0.05, 0.9)):
        more = dict(changed={"label_fraction": share} if share else {}, constant_accuracy=0.52)
        more |= dict(task="text_demo", model="n-grams", objective="none", test_examples=2000)
        made_run(tmp_path, "baseline", score, name=f"linear{share}", **more)
    monkeypatch.setattr(plt, "close", lambda figure: None)
    page = tmp_path / "page.md"
    page.write_text("<!-- demo-text:begin -->\n<!-- demo-text:end -->\n")

    def told():
        words = "--runs", tmp_path, "--figure", tmp_path / "demo.png", "--readme", page
        done = call("analyze.py", "demo", "demo-text", *words)
        assert done.returncode == 0 and (tmp_path / "demo.png").exists(), done.stderr
        assert rows_in(page.read_text(encoding="utf-8")) == rows_in(done.stdout)
        return {row["model"]: row["from scratch"].split(" ")[0] for row in rows_in(done.stdout)[0]}

    before = told()
    means = {
        "*majority class*": "52.0",
        "*linear: n-grams*": "75.0",
        "rotary": "51.0",
        "s4": "80.0",
    }
    assert [*before.items()] == [*(means | dict(mega="70.0")).items()]
    lines = {line.get_label(): line.get_xdata()[0] for line in plt.gcf().axes[0].lines}
    monkeypatch.undo()
    plt.close("all")
    assert (lines["majority class"], lines["linear model"]) == (52, 75)
    more = dict(model="s4", task="text_demo", changed={"optimizer": "muon"}, test_examples=2000)
    made_run(tmp_path, "scratch", 0.9, name="fork", **more)
    assert told() == before | {"s4, optimizer=muon": "90.0"}


def test_the_rank_correlations_of_architectures_are_those_of_its_kept_runs(monkeypatch, capsys):
    page = (ROOT / "results" / "architectures.md").read_text(encoding="utf-8")
    monkeypatch.chdir(ROOT)
    exec(re.search("```python\n(.*?)```", page, re.S)[1], {})
    ranks = re.findall(r"0(\.\d+)", capsys.readouterr().out)
    assert len(ranks) == 3 and f"columns is {ranks[0]}." in page
    assert f"{ranks[1]} and {ranks[2]}" in page


def test_the_kept_records_of_findings_are_readable(tmp_path):
    """By the command of their page: the runs of a task but for some variants."""
    page = (ROOT / "results" / "findings.md").read_text(encoding="utf-8")
    left_out = re.search(r"`grep text256 .* grep -vE '(.*?)'", page)[1]
    text = (ROOT / "results" / "findings" / "runs.jsonl").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if "text_demo" in line]
    lines = [line for line in lines if not re.search(left_out, line)]
    (tmp_path / "some.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert len(rows_in(printed("compare", tmp_path / "some.jsonl"))[0]) > 20
