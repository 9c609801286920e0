"""The runs in results/weights/: whole, small, and of use without their data."""

import json

import numpy as np
import pytest
from conftest import ROOT

import finetune
import predict
from compare.runs import load, rows_of
from use.label import examples_beside, new_examples
from use.pretrained import filled_in

FOLDER = ROOT / "results" / "weights"
PAIRS = "text256-rotary", "text256-s4", "pathfinder_demo-transformer", "pathfinder_demo-s4"
NAMES = [f"{pair}-{stage}" for pair in PAIRS for stage in ("pretrain", "finetuned")]


def test_what_the_pages_say_of_the_linear_model_is_kept():
    """README, the card of the weights and the demos' tables, by results/baseline.jsonl."""
    kept = {
        run.task: run
        for run in rows_of(load(ROOT / "results" / "baseline.jsonl"))
        if run.name == f"{run.task}-baseline"
    }
    found = {task: f"{run.score:.1f}" for task, run in kept.items()}
    assert found.keys() == {"text256", "text_demo", "pathfinder_demo", "listops_demo", "image"}
    readme, card, text, init = (
        (ROOT / name).read_text()
        for name in ("README.md", "results/weights/README.md", "results/text.md", "results/init.md")
    )
    assert f"n-grams scores {found['text256']} %" in readme
    assert (
        card.count(f"| {found['text256']} |") == 2
        and card.count(f"| {found['pathfinder_demo']} |") == 2
    )
    for page, block, task in (
        (readme, "demo", "pathfinder_demo"),
        (text, "demo-text", "text_demo"),
        (text, "text256", "text256"),
        (init, "demo-init", "text_demo"),
    ):
        table = page.split(f"<!-- {block}:begin -->")[1].split(f"<!-- {block}:end -->")[0]
        for name, score in (
            ("majority class", 100 * kept[task].record["constant_accuracy"]),
            (f"linear: {kept[task].model}", kept[task].score),
        ):
            assert table.count(f"*{name}* | {score:.1f} | |") == 1


def test_they_are_these_and_small():
    assert sorted(
        path.name for path in FOLDER.iterdir() if path.is_dir() and path.name[0] not in "._"
    ) == sorted(NAMES)
    sizes = {path: path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()}
    assert all(size <= 400_000 for size in sizes.values()) and sum(sizes.values()) < 3_000_000
    card = (FOLDER / "README.md").read_text()
    for pair in PAIRS:  # its numbers are those of the runs
        first, second = (
            json.loads((FOLDER / f"{pair}-{stage}" / "result.json").read_text())
            for stage in ("pretrain", "finetuned")
        )
        line = next(line for line in card.splitlines() if line.startswith(f"| `{pair}-pretrain`"))
        assert f"| {first['val_score']:.3f} |".replace("| 0.", "| .") in line
        assert (
            f"| {100 * second['test_accuracy']:.1f} |" in line
            and f"| {second['parameters']:,} |" in line
        )


@pytest.mark.parametrize("name", NAMES)
def test_each_has_its_kept_score_without_data(name, tmp_path, monkeypatch, capsys):
    """On the examples beside it, by the commands of the card; within one of them, for other
    machines' rounding."""
    monkeypatch.chdir(tmp_path)
    result = json.loads((FOLDER / name / "result.json").read_text())
    if name.endswith("pretrain"):
        predict.main([str(FOLDER / name), "--show", "sheet.png"])
        assert (tmp_path / "sheet.png").read_bytes()[:4] == b"\x89PNG"
        trained = predict.load(FOLDER / name)
        split, *_ = new_examples(trained, examples_beside(trained))
        hidden, _, wrong = filled_in(trained, split.batch(np.arange(len(split))))
        assert 1 - wrong.sum() / hidden.sum() == pytest.approx(result["kept"], abs=0.01)
    else:
        if name.startswith("text256"):
            (tmp_path / "new.txt").write_text("A lovely, warm film\nBad, bad, bad\n")
            predict.main([str(FOLDER / name), "--input", "new.txt", "--out", "new.csv"])
            found = [line.split(",")[1] for line in (tmp_path / "new.csv").read_text().splitlines()]
            assert found == ["prediction", "positive", "negative"]
        predict.main([str(FOLDER / name)])
        lines = (tmp_path / "predictions.csv").read_text().splitlines()[1:]
        right = [line.split(",")[1] == line.split(",")[2] for line in lines]
        assert len(right) >= 16 and np.mean(right) == pytest.approx(
            result["kept"], abs=1.01 / len(right)
        )
    assert "the run's data are not here; using" in capsys.readouterr().out
    assert not (tmp_path / "data").exists()


def test_finetuning_starts_from_them(tmp_path, capsys):
    """On data that are generated anew: they are those of the pretraining, or it would refuse."""
    words = [
        "--steps",
        "2",
        "--eval-every",
        "2",
        "--data-dir",
        str(tmp_path),
        "--out",
        str(tmp_path / "run"),
    ]
    finetune.main(["--init", str(FOLDER / "pathfinder_demo-s4-pretrain"), *words])
    assert "tensors loaded" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "result.json").read_text())["start"] == "spt"
