"""The runs in results/weights/: whole, small, and of use without their data."""

import json

import numpy as np
import pytest
from conftest import ROOT, result_of, stop_in

import predict
from compare.runs import load, rows_of
from use.label import examples_beside, new_examples
from use.pretrained import filled_in

FOLDER = ROOT / "results" / "weights"
PAIRS = "text256-rotary", "text256-s4", "pathfinder_demo-transformer", "pathfinder_demo-s4"
NAMES = [f"{pair}-{stage}" for pair in PAIRS for stage in ("pretrain", "finetuned")]


def test_readme_and_the_card_say_of_the_linear_model_what_is_kept():
    rows = rows_of(load(ROOT / "results" / "baseline.jsonl"))
    kept = {run.task: f"{run.score:.1f}" for run in rows if run.name == f"{run.task}-baseline"}
    pages = "README.md", "results/weights/README.md"
    readme, card = ((ROOT / name).read_text(encoding="utf-8") for name in pages)
    assert f"n-grams scores {kept['text256']} %" in readme
    for task in ("text256", "pathfinder_demo"):
        assert card.count(f"| {kept[task]} |") == 2, task


def test_they_are_these_and_small_and_the_card_has_their_numbers():
    folders = [path.name for path in FOLDER.iterdir() if path.is_dir()]
    assert sorted(name for name in folders if name[0] not in "._") == sorted(NAMES)
    sizes = [path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()]
    assert max(sizes) <= 400_000 and sum(sizes) < 3_000_000
    card = (FOLDER / "README.md").read_text(encoding="utf-8").splitlines()
    for pair in PAIRS:
        first, second = (result_of(FOLDER / f"{pair}-{end}") for end in ("pretrain", "finetuned"))
        (line,) = (line for line in card if line.startswith(f"| `{pair}-pretrain`"))
        score, parameters = first["val_score"], second["parameters"]
        assert f"| {score:.3f} |".replace("| 0.", "| .") in line
        assert f"| {100 * second['test_accuracy']:.1f} |" in line and f"| {parameters:,} |" in line


@pytest.mark.parametrize("name", NAMES)
def test_each_has_its_kept_score_without_data(name, tmp_path, monkeypatch, capsys):
    """On the examples beside it, by the commands of the card; one may differ by rounding."""
    monkeypatch.chdir(tmp_path)
    kept = json.loads((FOLDER / name / "result.json").read_text())["kept"]
    if name.endswith("pretrain"):
        predict.main([str(FOLDER / name), "--show", "sheet.png"])
        assert (tmp_path / "sheet.png").read_bytes()[:4] == b"\x89PNG"
        trained = predict.load(FOLDER / name)
        split, *_ = new_examples(trained, examples_beside(trained))
        hidden, _, wrong = filled_in(trained, split.batch(np.arange(len(split))))
        assert 1 - wrong.sum() / hidden.sum() == pytest.approx(kept, abs=0.01)
    else:
        predict.main([str(FOLDER / name)])
        lines = (tmp_path / "predictions.csv").read_text().splitlines()[1:]
        right = [line.split(",")[1] == line.split(",")[2] for line in lines]
        assert len(right) >= 16
        assert np.mean(right) == pytest.approx(kept, abs=1.01 / len(right))
    assert "the run's data are not here; using" in capsys.readouterr().out
    assert not (tmp_path / "data").exists()
    if name.startswith("text256") and name.endswith("finetuned"):
        names, _ = predict.load(FOLDER / name)(["A lovely, warm film", "Bad, bad, bad"])
        assert names.tolist() == ["positive", "negative"]


def test_finetuning_starts_from_them(tmp_path, monkeypatch, capsys):
    """On data that are generated anew: they are those of the pretraining, or it would refuse."""
    words = ["--init", str(FOLDER / "pathfinder_demo-s4-pretrain"), "--data-dir", str(tmp_path)]
    stop_in(0, monkeypatch, "finetune", [*words, "--batch", "8", "--out", str(tmp_path / "run")])
    assert "tensors loaded" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "config.json").read_text())["start"] == "spt"
