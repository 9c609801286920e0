"""The report of `own` over made runs: what it says of gains, baselines and few examples."""

import json
import re

import numpy as np
import pytest
from conftest import call, of_kind

from engine.folder import summary


def finished(folder, start, model, seed, score, steps, seconds, **more):
    """A run's result.json."""
    name = f"{model}-{start}-s{seed}-{more.get('label_fraction')}"
    (folder / name).mkdir(parents=True)
    result = (
        dict(
            task="file:/some/my.npz",
            model=model,
            objective="masked",
            seed=seed,
            steps=steps,
            seconds=seconds,
            changed={},
            train_fraction=None,
            commit="c",
            device="d",
            torch="t",
            init=None,
            test_examples=90_000,
        )
        | more
    )
    result |= {} if start == "pretrain" else dict(start=start)
    result |= score if isinstance(score, dict) else dict(test_accuracy=score)
    (folder / name / "result.json").write_text(json.dumps(result))
    return name


def shown(folder):
    done = call("analyze.py", "own", "--runs", folder, "--figure", folder / "own.png")
    assert done.returncode == 0 and (folder / "own.png").read_bytes()[:4] == b"\x89PNG", done.stderr
    return done.stdout


def test_gains_and_the_sentence_that_says_them(tmp_path):
    """Three seeds each with a standard deviation of 1: t of 4 degrees of freedom, 2.776 sqrt(2/3) =
    2.27; with one of 1.5, t of 3.48, 2.945 sqrt(3.25/3) = 3.07. With the test set's .46: 2.3 and
    3.1. A loss is a negative gain; half the labels are another table, another rate is another
    line."""
    for seed in range(3):
        for model, gain in (("rotary", 0.04), ("s4", -0.04)):
            first = finished(tmp_path, "pretrain", model, seed, dict(val_score=1), 100, 60)
            for share in (None, 0.5):
                changed = dict(label_fraction=share) if share else {}
                more, base = (
                    dict(label_fraction=share, changed=changed),
                    (0.5 if share is None else 0.4) + seed / 100,
                )
                finished(tmp_path, "scratch", model, seed, base, 250, 90, **more)
                spread = 1.5 if model == "s4" else 1
                finished(
                    tmp_path,
                    "spt",
                    model,
                    seed,
                    base + gain + (spread - 1) * (seed - 1) / 100,
                    150,
                    120,
                    init=f"runs/x/{first}",
                    **more,
                )
                finished(tmp_path, "joint", model, seed, base + 0.01, 125, 90, joint=1.0, **more)
    text = shown(tmp_path)
    for words in ("my.npz", "my.npz with 50 % of the labels"):
        table = text.split(f"**{words}**")[1]
        assert "- **rotary gains by SPT**: +4.0 points [+1.7, +6.3], 3 seeds." in table
        assert "- **s4 loses by SPT**: -4.0 points [-7.1, -0.9], 3 seeds." in table
    assert (
        "| rotary | 51.0 \u00b1 1.0 | 55.0 \u00b1 1.0 | 52.0 \u00b1 1.0 | +4.0 [+1.7, +6.3] (3) "
        "| +1.0 [-1.3, +3.3] (3) | +3.0 [+0.7, +5.3] (3) | 1.5 / 3.0 / 1.5 |"
    ) in text
    assert text.count("250 passes per run") == 2
    finished(tmp_path, "scratch", "lru", 0, 0.5, 300, 90)
    finished(tmp_path / "more", "scratch", "rotary", 0, 0.5, 300, 90, changed=dict(lr=0.1))
    text = shown(tmp_path)
    assert "Equal passes in each row" in text and "| rotary, lr=0.1 | 50.0 | – | – |" in text
    finished(tmp_path, "scratch", "lru", 1, 0.5, 310, 90)
    assert "Unequal passes" in shown(tmp_path)


def test_a_probe_has_a_column_where_there_is_one(tmp_path):
    """The linear probe, on the same pretrained model: neither SPT nor another line."""
    for seed in range(2):
        first = finished(tmp_path, "pretrain", "s4", seed, dict(val_score=1), 100, 60)
        finished(tmp_path, "scratch", "s4", seed, 0.5, 250, 90)
        finished(tmp_path, "spt", "s4", seed, 0.6, 150, 120, init=first)
    assert "linear probe" not in shown(tmp_path)
    for seed in range(2):
        first = f"s4-pretrain-s{seed}-None"
        finished(
            tmp_path,
            "spt",
            "s4",
            seed,
            0.55,
            150,
            60,
            init=first,
            changed=dict(freeze=True),
            label_fraction=1.0,
        )
    text = shown(tmp_path)
    assert "| model | from scratch | self-pretrained | linear probe | SPT - scratch" in text
    assert (
        "| s4 | 50.0 \u00b1 0.0 | 60.0 \u00b1 0.0 | 55.0 \u00b1 0.0 | +10.0 [+9.5, +10.5] (2) | "
        "1.5 / 3.0 / 2.0 |" in text
    )


def test_sequences_without_a_label_are_named(tmp_path):
    finished(tmp_path, "scratch", "s4", 0, 0.5, 250, 90, data=dict(sizes=[50, 9, 9], labelled=30))
    assert "No run used the 20 sequences without a label" in shown(tmp_path)
    finished(tmp_path, "joint", "s4", 0, 0.5, 125, 90, data=dict(sizes=[50, 9, 9], labelled=30))
    assert (
        "Joint training uses only the labelled inputs; no run used the 20 sequences without a "
        "label; " in shown(tmp_path)
    )


@pytest.mark.parametrize("kind", ["class", "number"])
def test_the_report_begins_with_what_was_read_and_few_examples_decide_nothing(kind, tmp_path):
    """Half of the 95 % interval of an accuracy of 50 %, by the binomial distribution; of R2 = 0.5,
    by simulation."""
    score = "test_accuracy" if kind == "class" else "test_r2"
    read = ["read my.npz: 40 sequences of 9 positions, 1 channel", "classes: a 20, b 20"]
    for seed in 0, 1:
        for start, value in (("scratch", 0.4), ("spt", 1.0)):
            first = (
                {}
                if start == "scratch"
                else dict(
                    init=finished(
                        tmp_path,
                        "pretrain",
                        "s4",
                        seed,
                        {},
                        30,
                        9,
                        data=dict(sizes=[28, 6, 6], read=read),
                    )
                )
            )
            data = dict(sizes=[28, 6, 6], read=read)
            finished(
                tmp_path,
                start,
                "s4",
                seed,
                {score: value},
                60,
                9,
                data=data,
                test_examples=6,
                **first,
            )
    text = shown(tmp_path)
    opening = text[text.index("**my.npz**") :].split("\n\n")
    assert opening[1].startswith("**6 test examples decide nothing**") and opening[2:4] == read
    half = float(re.search(r"±([\d.]+)", opening[1])[1])
    rng = np.random.default_rng(0)
    if kind == "class":
        wanted = 100 * 1.96 * (0.25 / 6) ** 0.5
    else:
        y = rng.normal(size=(4_000, 400))
        guess = y / 2 + rng.normal(size=y.shape) / 2
        errors, spread = ((y - guess) ** 2).mean(1), y.var(1)
        wanted = 1.96 * (1 - errors / spread).std() * (400 / 6) ** 0.5
    assert half == pytest.approx(wanted, rel=0.25)
    assert "ceiling" not in text and "moves a score by about" not in text
    assert "gains by" not in text and "significant" not in text
    assert "\n\n\n" not in text.strip()


def test_an_objective_is_a_line(tmp_path):
    for objective, score in (("masked", 0.6), ("bert", 0.8)):
        name = finished(
            tmp_path / objective,
            "pretrain",
            "s4",
            0,
            dict(val_score=1),
            100,
            60,
            objective=objective,
        )
        finished(
            tmp_path / objective, "spt", "s4", 0, score, 150, 120, init=name, objective=objective
        )
    text = shown(tmp_path)
    assert "| s4 | 60.0 |" in text and "| s4, bert | 80.0 |" in text


@pytest.mark.parametrize("kept", [False, True])
def test_numbers_have_r2(kept, tmp_path):
    """Their significance needs the predictions, which `keep` keeps."""
    y, noise = np.random.default_rng(0).normal(size=(2, 200))

    def values(scale):
        return dict(test_r2=1 - scale**2) | (
            summary(of_kind("number"), y / 4, (y + scale * noise) / 4) if kept else {}
        )

    for seed in range(2):
        finished(tmp_path, "scratch", "s4", seed, values(0.7 - seed / 100), 250, 90)
        first = finished(tmp_path, "pretrain", "s4", seed, dict(val_score=1), 100, 60)
        finished(tmp_path, "spt", "s4", seed, values(0.4 - seed / 100), 150, 90, init=first)
    text = shown(tmp_path)
    assert (
        "- **s4 gains by SPT**: +0.327 R2 [+0.2"
        if kept
        else "- **s4: predictions were not kept** (+0.327 R2), so significance is unknown."
    ) in text
    if kept:
        call("analyze.py", "keep", "--runs", tmp_path, "--out", tmp_path / "kept")
        done = call(
            "analyze.py",
            "own",
            "--runs",
            tmp_path / "kept" / "runs.jsonl",
            "--figure",
            tmp_path / "own.png",
        )
        assert done.stdout.split("- **")[1] == text.split("- **")[1]
