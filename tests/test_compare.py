"""compare/: what a run is, tables of any runs and of demos."""

import itertools
import json
import re
import subprocess

import pytest
from conftest import ROOT, call
from test_analyze import finetuned, put, run

from compare import comparisons, report, runs
from files import UserError

# ---- what a run is -------------------------------------------------------------------------------


def test_two_runs_of_one_setting_are_an_error(tmp_path):
    """And so are two data sets of one name; a copy of a run is the run. Names count for nothing."""
    finetuned(tmp_path, "a", 0.5)
    finetuned(tmp_path, "b", 0.6, changed={"lr": 0.1})
    finetuned(tmp_path, "c", 0.5, seconds=7.0)
    assert [len(variant) for variant in runs.by_variant(runs.load(tmp_path))] == [
        1,
        1,
    ]
    finetuned(tmp_path, "d", 0.7, commit="def")
    message = (
        "/d are two runs of one setting and seed, but differ: commit abc and def, test_accuracy "
        "0.5 and 0.7"
    )
    with pytest.raises(UserError, match=message):
        runs.by_variant(runs.load(tmp_path))
    finetuned(tmp_path / "other", "a", 0.5, seed=1, data=dict(labels=1))
    finetuned(tmp_path / "other", "b", 0.5, seed=2, data=dict(labels=2))
    with pytest.raises(
        UserError, match="trained on two sets called image: {'labels': 1} and {'labels': 2}"
    ):
        runs.by_variant(runs.load(tmp_path / "other"))


# ---- compare -------------------------------------------------------------------------------------


def chain(root, rate, seed, scratch, spt, joint=None, **pretraining):
    """Runs of one learning rate of every stage, the recipe's being 0.01."""
    changed, name = {"lr": rate} if rate != 0.01 else {}, f"{rate}-{seed}-{len(pretraining)}"
    first = changed | pretraining
    config = json.dumps(dict(lr=rate, mask=pretraining.get("mask", 0.3), arch=dict(d=64)))
    alone = json.dumps(dict(lr=rate, mask=None, arch=dict(d=64)))
    folders = [put(root, f"{name}-first", seed=seed, changed=first, steps=100, seconds=60)]
    (folders[0] / "config.json").write_text(config)
    records = [
        ("spt", spt, changed | ({"pretraining": first} if first else {}), f"x/{name}-first", 150)
    ]
    records += [] if scratch is None else [("scratch", scratch, changed, None, 250)]
    records += [] if joint is None else [("joint", joint, changed, None, 125)]
    for start, score, differs, init, steps in records:
        folder = finetuned(
            root,
            f"{name}-{start}",
            score,
            seed,
            start=start,
            changed=differs,
            init=init,
            steps=steps,
            val_accuracy=score - rate,
            joint=1.0 if start == "joint" else None,
            seconds=60,
        )
        (folder / "config.json").write_text(config if start == "joint" else alone)


def told(root, *words):
    done = run("compare", root, "--figure", root / "compare.png", *words)
    assert done.returncode == 0 and (root / "compare.png").read_bytes()[:4] == b"\x89PNG", (
        done.stderr
    )
    return [
        line[2:-2].split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")
    ], done.stdout


def test_a_row_a_setting_and_a_column_what_differs(tmp_path):
    """Rates 0.01, the recipe's, and 0.001; another mask; gains over scratch of the same rate. Three
    seeds with a deviation of 1: t of 4 degrees of freedom, 2.776 sqrt(2/3) = 2.27; of a mean t of
    2, 4.303 sqrt(1/3) = 2.48."""
    for seed in range(3):
        shift = (seed - 1) / 100
        chain(tmp_path, 0.01, seed, 0.5 + shift, 0.7 + shift, 0.6 + shift)
        chain(tmp_path, 0.001, seed, 0.4 + shift, 0.55 + shift)
        chain(tmp_path, 0.01, seed, None, 0.72 + shift, mask=0.5)
    rows, text = told(tmp_path)
    assert rows[0] == [
        "start",
        "lr",
        "pretraining lr",
        "pretraining mask",
        "test accuracy, %",
        "95 % interval",
        "gain over scratch [95 % interval]",
        "seeds",
        "passes",
        "minutes",
    ]
    found = {tuple(row[:4]): row[4:] for row in rows[1:]}
    assert len(found) == 6
    assert found["scratch", "0.01", "–", "–"] == [
        "50.0 ± 1.0",
        "[47.5, 52.5]",
        "–",
        "3",
        "250",
        "1.0",
    ]
    assert found["spt", "0.01", "0.01", "0.3"] == [
        "70.0 ± 1.0",
        "[67.5, 72.5]",
        "+20.0 [+17.7, +22.3]",
        "3",
        "250",
        "2.0",
    ]
    assert found["spt", "0.001", "0.001", "0.3"][2] == "+15.0 [+12.7, +17.3]"
    assert found["spt", "0.01", "0.01", "0.5"][2] == "+22.0 [+19.7, +24.3]"
    assert found["joint", "0.01", "–", "–"][2:] == ["+10.0 [+7.7, +12.3]", "3", "250", "1.0"]
    assert "Intervals: 95 %, over seeds (Welch)" in text and "image, s4: mean" in text
    rows, _ = told(tmp_path, "--baseline", "lr=0.001")
    gains = {tuple(row[:4]): row[6] for row in rows[1:]}
    assert (
        gains["scratch", "0.01", "–", "–"].startswith("+10.0 [")
        and gains["joint", "0.01", "–", "–"] == "–"
    )
    assert gains["spt", "0.01", "0.01", "0.3"].startswith("+15.0 [")  # one flag for both stages
    assert run("compare", tmp_path, "--baseline", "d=3").stderr.startswith(
        "error: --baseline d: these runs differ in start"
    )


def test_validation_chooses_and_only_its_test_scores_are_shown(tmp_path):
    """The better test score of 0.01 is not shown, as its validation score is worse."""
    for seed in range(2):
        chain(tmp_path, 0.2, seed, 0.54, 0.76)
        chain(tmp_path, 0.001, seed, 0.5, 0.7)
    rows, text = told(tmp_path, "--select", "val")
    found = {tuple(row[:2]): row[3:] for row in rows[1:]}
    assert (
        found["scratch", "0.001"][:2] == ["49.9 ± 0.0 *", "50.0 ± 0.0"]
        and found["scratch", "0.2"][0] == "34.0 ± 0.0"
    )
    assert "54.0" not in text and "76.0" not in text and found["spt", "0.001"][3] == "+20.0"


def test_none_is_a_value_where_a_flag_has_a_meaning(tmp_path):
    """All labels and a tenth of them are two rows and no baseline of each other; joint training on
    a quarter has none."""
    for seed in range(2):
        for share, score in ((None, 0.8), (0.1, 0.6)):
            changed = dict(label_fraction=share) if share else {}
            for start, more in (("scratch", 0), ("joint", 0.05)):
                joint = 1.0 if start == "joint" else None
                folder = finetuned(
                    tmp_path,
                    f"{share}{start}{seed}",
                    score + more + seed / 100,
                    seed,
                    start=start,
                    changed=changed,
                    joint=joint,
                )
                (folder / "config.json").write_text(json.dumps(dict(label_fraction=share)))
    folder = finetuned(
        tmp_path, "quarter", 0.7, start="joint", changed=dict(label_fraction=0.25), joint=1.0
    )
    (folder / "config.json").write_text(json.dumps(dict(label_fraction=0.25)))
    found = {tuple(row[:2]): row[2:] for row in told(tmp_path)[0][1:]}
    assert found["scratch", "–"][0] == "80.5 ± 0.7" and found["scratch", "0.1"][0] == "60.5 ± 0.7"
    assert [
        found[start, share][2][:4] for start in ("scratch", "joint") for share in ("–", "0.1")
    ] == ["–", "–", "+5.0", "+5.0"] and found["joint", "0.25"][2] == "–"


def test_none_is_a_value_beside_another_start_or_model(tmp_path):
    """A twentieth of the labels from scratch, all of them after SPT. What all rows share stands in
    the caption."""
    put(tmp_path, "p", steps=60)
    for name, start, share in (("a", "scratch", 0.05), ("b", "spt", None)):
        changed = {"label_fraction": share, "steps": 60} if share else {"steps": 60}
        folder = finetuned(
            tmp_path,
            name,
            0.5,
            start=start,
            changed=changed,
            init="x/p" if start == "spt" else None,
        )
        (folder / "config.json").write_text(json.dumps(dict(label_fraction=share)))
    rows, text = told(tmp_path)
    assert rows[0][:2] == ["start", "label-fraction"] and [row[:2] for row in rows[1:]] == [
        ["scratch", "0.05"],
        ["spt", "–"],
    ]
    assert "image, s4, steps 60: mean" in text and "; –: there is none." in text


def test_a_frozen_model_from_scratch_is_no_baseline(tmp_path):
    put(tmp_path, "p")
    for name, start, frozen in (("a", "scratch", True), ("b", "spt", False)):
        folder = finetuned(
            tmp_path,
            name,
            0.5,
            start=start,
            changed={"freeze": True} if frozen else {},
            init="x/p" if start == "spt" else None,
            val_accuracy=0.5,
        )
        (folder / "config.json").write_text(json.dumps(dict(freeze=frozen)))
    for words in ((), ("--select", "val")):
        rows, _ = told(tmp_path, *words)
        assert [row[rows[0].index("start")] for row in rows[1:]] == ["scratch", "spt"]
        assert {row[-4] for row in rows[1:]} == {"–"}
    assert "choose from False True" in run("compare", tmp_path, "--baseline", "freeze=2").stderr
    rows, _ = told(tmp_path, "--baseline", "freeze=False")
    assert rows


def test_fewer_seeds_are_said_and_chosen_last(tmp_path):
    for seed in range(3):
        chain(tmp_path, 0.01, seed, 0.5 if seed == 0 else None, 0.6 + seed / 10)
    chain(tmp_path, 0.001, 0, None, 0.9)
    rows, text = told(tmp_path)
    found = {tuple(row[:2]): row for row in rows[1:]}
    assert found["spt", "0.01"][-4] == "+10.0 (common seeds: 0)" and found["spt", "0.01"][-3] == "3"
    assert "9 runs" in text  # scratch, three and one chain of two
    rows, _ = told(tmp_path, "--select", "val")
    assert [row[1] for row in rows[1:] if row[3].endswith("*") and row[0] == "spt"] == ["0.01"]


def test_a_baseline_is_of_the_stage_that_has_the_flag(tmp_path):
    """Two masks of pretraining beside joint training, which has its own."""
    for seed in range(2):
        chain(tmp_path, 0.01, seed, 0.5, 0.7, 0.6)
        chain(tmp_path, 0.01, seed, None, 0.75, mask=0.5)
        folder = finetuned(
            tmp_path,
            f"joint{seed}",
            0.65,
            seed,
            start="joint",
            changed={"mask": 0.5},
            joint=1.0,
            steps=125,
        )
        (folder / "config.json").write_text(json.dumps(dict(mask=0.5)))
    rows, _ = told(tmp_path, "--baseline", "mask=0.3")
    assert rows[0][:3] == ["start", "pretraining mask", "mask"]
    found = {(row[0], row[2], row[1]): row[-4] for row in rows[1:]}
    assert found["spt", "–", "0.5"] == "+5.0" and found["joint", "0.5", "–"] == "+5.0"
    assert (
        found["spt", "–", "0.3"] == found["joint", "0.3", "–"] == found["scratch", "–", "–"] == "–"
    )


def test_scratch_at_equal_passes_is_what_gains_are_over(tmp_path):
    """60 steps from scratch, 30 and 30 with pretraining: whatever `steps` says."""
    put(tmp_path, "p", steps=30, changed={"steps": 30})
    for name, start, steps, score in (
        ("a", "scratch", 60, 0.5),
        ("b", "spt", 30, 0.6),
        ("c", "scratch", 90, 0.1),
    ):
        changed = {"steps": steps} | ({"pretraining": {"steps": 30}} if start == "spt" else {})
        finetuned(
            tmp_path,
            name,
            score,
            start=start,
            steps=steps,
            changed=changed,
            init="x/p" if start == "spt" else None,
        )
    rows, _ = told(tmp_path)
    assert [row[-4] for row in rows[1:] if "spt" in row] == ["+10.0"]


def test_runs_that_share_a_pretraining_count_it_once(tmp_path):
    put(tmp_path, "p", steps=60)
    for name, changed in (("a", {}), ("b", {"lr": 0.1})):
        folder = finetuned(tmp_path, name, 0.5, start="spt", init="x/p", changed=changed)
        (folder / "config.json").write_text(json.dumps(dict(lr=changed.get("lr", 0.01))))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text("{}")
    _, text = told(tmp_path)
    assert "3 runs, seeds 0;" in text and "Unfinished runs, not included: 1." in text


def test_best_against_best(tmp_path):
    """With --select the gain is over what validation chose from scratch, whatever its settings."""
    for seed in range(2):
        chain(tmp_path, 0.01, seed, 0.5, 0.75 + seed / 100)
        chain(tmp_path, 0.001, seed, 0.6 + seed / 100, 0.7)
    rows, text = told(tmp_path, "--select", "val")
    found = {tuple(row[:2]): row[3:] for row in rows[1:]}
    assert found["spt", "0.01"][3].startswith("+15.0 [") and found["scratch", "0.001"][3] == "–"
    assert "Gains are over the row from scratch that validation chose." in text
    assert (
        "error: --baseline lr=7: choose from 0.001 0.01"
        in run("compare", tmp_path, "--baseline", "lr=7").stderr
    )


def test_folders_with_nothing_to_compare(tmp_path):
    put(tmp_path / "first", "p")
    (tmp_path / "broken" / "a").mkdir(parents=True)
    (tmp_path / "broken" / "a" / "result.json").write_text('{"task"')
    (tmp_path / "empty").mkdir()
    for folder in ("first", "broken", "empty"):
        done = run("compare", tmp_path / folder)
        wanted = (
            "result.json is damaged: " if folder == "broken" else "no finished finetuning run in "
        )
        assert (
            done.returncode == 2
            and done.stderr.startswith("error: ")
            and done.stderr.count("\n") == 1
        )
        assert wanted in done.stderr
        assert not list(tmp_path.glob("**/*.png"))
    assert run("compare").stderr.startswith("error: compare wants folders of runs")


def test_a_pretraining_run_elsewhere_is_found_by_its_path(tmp_path):
    put(tmp_path / "one", "p", steps=70)
    finetuned(tmp_path / "two", "f", 0.5, start="spt", init=str(tmp_path / "one" / "p"), steps=30)
    finetuned(tmp_path / "two", "g", 0.5, seed=1, start="spt", init="gone/p")
    done = run("compare", tmp_path / "two", "--figure", tmp_path / "c.png")
    assert (
        "| 1 | 100 |" in done.stdout
        and "g is left out: its pretraining run was not found" in done.stderr
    )


# ---- demos ---------------------------------------------------------------------------------------


def rows_of(text):
    """[[cell]] of all tables, without their heads."""
    return [
        line[2:-2].split(" | ") for line in re.findall(r"^\|(?!---)(?! model \|).*", text, re.M)
    ]


def of_demo(root, name, model, start, value, task="text_demo", **more):
    return finetuned(
        root,
        name,
        value,
        task=task,
        model=model,
        start=start,
        test_examples=2_000,
        val_accuracy=value,
        **more,
    )


def test_the_demo_from_part_of_its_runs(tmp_path):
    for model, start, seed, value in (
        ("transformer", "scratch", 0, 0.5),
        ("transformer", "spt", 0, 0.7),
        ("transformer", "scratch", 1, 0.5),
        ("s4", "scratch", 0, 0.8),
        ("s4", "spt", 0, 0.75),
    ):
        of_demo(
            tmp_path, f"{model}-{start}-{seed}", model, start, value, "pathfinder_demo", seed=seed
        )
    page = tmp_path / "page.md"
    page.write_text("<!-- demo:begin -->\n<!-- demo:end -->\n")
    done = run("demo", "--runs", tmp_path, "--figure", tmp_path / "demo.png", "--readme", page)
    assert done.returncode == 0 and (tmp_path / "demo.png").exists(), done.stderr
    found = {row[0]: row[1:4] for row in rows_of(done.stdout)}
    assert found == {
        "transformer": ["50.0 ± 0.0", "70.0", "+20.0 (one seed)"],
        "s4": ["80.0", "75.0", "-5.0 (one seed)"],
    }
    assert "**pathfinder_demo**" in done.stdout and rows_of(page.read_text()) == rows_of(
        done.stdout
    )
    assert "majority class" not in done.stdout  # an older folder has no run of baseline.py


def test_a_kept_demo_is_its_folder(tmp_path, monkeypatch):
    """The table and the verdict, which needs the evaluations."""
    monkeypatch.chdir(tmp_path)
    log = "".join(
        json.dumps(dict(kind="eval", step=step, val_accuracy=step / 2000)) + "\n"
        for step in (500, 1000)
    )
    for start, seed in itertools.product(("scratch", "joint"), (0, 1)):
        of_demo(
            tmp_path / "runs/demo",
            f"{start}{seed}",
            "s4",
            start,
            0.5 + seed / 10,
            seed=seed,
            log=log,
        )
    assert call("analyze.py", "keep", "demo").returncode == 0
    folder, kept = (
        call("analyze.py", "demo", "--runs", tmp_path / source, "--figure", "demo.png").stdout
        for source in ("runs/demo", "results/demo.jsonl")
    )
    assert folder == kept and "Still improving at the end" in kept


def test_baselines_stand_first_in_a_demo(tmp_path):
    """In the table and as two lines across the figure; with part of the labels it is another
    model's."""
    names = ["transformer", "local", "mega"]
    for model in names:
        for start in ("scratch", "spt"):
            of_demo(tmp_path, f"{model}-{start}", model, start, 0.6)
    for share in (None, 0.05):
        of_demo(
            tmp_path,
            f"{share}-baseline",
            "n-grams of 1 to 5",
            "baseline",
            0.9 if share else 0.7,
            objective="none",
            changed={"label_fraction": share} if share else {},
            constant_accuracy=0.52,
        )
    done = run("demo", "demo-text", "--runs", tmp_path, "--figure", tmp_path / "demo.png")
    rows = rows_of(done.stdout)
    assert [row[:2] for row in rows[:2]] == [
        ["*majority class*", "52.0"],
        ["*linear: n-grams of 1 to 5*", "70.0"],
    ]
    assert (
        {row[0] for row in rows[2:]} == {*names}
        and len(rows) == 2 + 3
        and "90.0" not in done.stdout
    )
    assert "7 runs, seeds 0" in done.stdout
    plt = pytest.importorskip("matplotlib.pyplot")
    left, _ = report.figure(plt, comparisons.comparisons(runs.load(tmp_path)))[0].axes
    found = {
        line.get_label(): line.get_xdata() for line in left.lines if line.get_label()[0] != "_"
    }
    assert found == {"majority class": [52, 52], "linear model": [70, 70]}
    plt.close("all")


def test_a_run_that_is_none_of_the_demos_has_a_row_of_its_own(tmp_path):
    """A fork's, say: the row says what differs, and no other number changes."""
    for model in ("transformer", "s4"):
        of_demo(tmp_path, model, model, "scratch", 0.5)

    def told():
        done = run("demo", "demo-text", "--runs", tmp_path, "--figure", tmp_path / "demo.png")
        assert done.returncode == 0 and (tmp_path / "demo.png").exists(), done.stderr
        return {row[0]: row[1:-1] for row in rows_of(done.stdout)}

    before = told()
    of_demo(tmp_path, "fork", "s4", "scratch", 0.9, changed={"optimizer": "muon"})
    assert told() == before | {"s4, optimizer=muon": ["90.0"]}


def test_the_rank_correlations_of_architectures_are_those_of_its_kept_runs(monkeypatch, capsys):
    page = (ROOT / "results" / "architectures.md").read_text()
    monkeypatch.chdir(ROOT)
    exec(re.search("```python\n(.*?)```", page, re.S)[1], {})
    assert re.findall(r"0(\.\d+)", capsys.readouterr().out) == [".81", ".68", ".96"]
    assert "columns is .81." in page and ".68 and .96" in page


def test_the_kept_records_of_findings_are_readable(tmp_path):
    """By the command of their page, for each task."""
    command = re.search("`(grep text256 .*?)`", (ROOT / "results" / "findings.md").read_text())[1]
    for task in ("text256", "text_demo", "pathfinder_demo"):
        here = command.replace("text256", task).replace("results/", f"{ROOT}/results/")
        subprocess.run(["bash", "-c", here], cwd=tmp_path, check=True)
        done = run("compare", tmp_path / "some.jsonl", "--figure", tmp_path / "some.png")
        assert done.returncode == 0 and len(rows_of(done.stdout)) > 20, done.stderr
