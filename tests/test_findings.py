"""results/findings.md: each question's runs have a command, the patches of questions 6 and 8 do what they say, tables
and verdicts are right."""
import functools
import itertools
import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from scipy import stats

from compare import markdown, pooled, read_runs
from conftest import ROOT
from data import TASKS, Split, UserError
from experiments import CURVE, EXITS, JOINT, chosen, questions, record, trained
from recipes import read_table
from test_analyze import finetuned, put
from test_readme import run

sys.path.insert(0, str(ROOT / "results" / "findings"))
import arms as arms_of
import convnet
import figures
import lag
import tables


@pytest.fixture(scope="module")
def fork(tmp_path_factory):
    """runs/fork, as fork.sh makes it."""
    copy = tmp_path_factory.mktemp("findings")
    for path in [*ROOT.glob("*.py"), *ROOT.glob("zoo/*.py"), *ROOT.glob("results/findings/fork.sh"),
                 ROOT / "results" / "findings" / "fresh.py",
                 *ROOT.glob("results/findings/question*.patch")]:
        place = copy / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
    for _ in range(2):                                        # the second finds all done
        subprocess.run(["bash", copy / "results" / "findings" / "fork.sh"], check=True)
    return copy / "runs" / "fork"


@pytest.mark.skipif(not shutil.which("patch"), reason="patch makes the fork")
def test_what_is_hidden(fork):
    """The ratio is right everywhere in the sequence; runs have the mean length, patches and rows their shape."""
    kinds = ("runs3", "runs10", "patches", "rows")
    run(fork, "-c", f"""import numpy, pretrain
numpy.savez("hidden.npz", **{{kind: pretrain.hide((4000, 196), 0.25, 7, kind=kind, side=14) for kind in {kinds}}})""")
    hidden = np.load(fork / "hidden.npz")
    for kind, found in hidden.items():
        assert abs(found.mean() - 0.25) < 0.01 and abs(found.mean(0) - 0.25).max() < 0.04, kind
    for length in (3, 10):                                    # a run begins where the position before is not hidden
        found = hidden[f"runs{length}"][:, 40:]
        begins = (found[:, 1:] & ~found[:, :-1]).mean()
        assert found.mean() / begins == pytest.approx(length, rel=0.05)
    patches = hidden["patches"].reshape(4000, 7, 2, 7, 2)
    assert (patches == patches[:, :, :1, :, :1]).all()
    rows = hidden["rows"].reshape(4000, 14, 14)
    assert (rows == rows[:, :, :1]).all()


TAKEN = {"mixers": lambda name: ".mixer." in name, "others": lambda name: ".mixer." not in name,
         "A": lambda name: ".kernel." in name and name[-2:] not in (".B", ".C"),
         "BC": lambda name: ".kernel." in name and name[-2:] in (".B", ".C"),
         "qk": lambda name: ".qkv." in name, "v": lambda name: ".qkv." in name}


@pytest.mark.skipif(not shutil.which("patch"), reason="patch makes the fork")
@pytest.mark.parametrize("model, kinds", [("rotary", ["mixers", "others", "qk", "v"]),
                                          ("s4", ["mixers", "others", "A", "BC"])])
def test_what_is_taken_over(fork, model, kinds):
    """A tensor is the pretrained one where it is to be taken over, and elsewhere the fresh one. Queries, keys and
    values share a tensor. S4's C is one of both, which its stored form, tied to A, only shows when it is taken back."""
    run(fork, "-c", f"""import torch, finetune, kernels, models, data, recipes
from types import SimpleNamespace
from pathlib import Path
sizes = models.config(recipes.arch("text_demo", "{model}"), data.replace(data.TASKS["text_demo"], vocab=50))

def make(seed):
    torch.manual_seed(seed)
    return models.Classifier(models.Backbone(sizes), 2, "mean", "linear")

def weights(model):
    found = model.state_dict()
    for i, layer in enumerate(model.backbone.layers):
        if hasattr(layer.mixer, "kernel"):
            A, P, B, C, dt = layer.mixer.kernel.arguments(layer.mixer.kernel)
            found[f"backbone.layers.{{i}}.mixer.kernel.C"] = kernels.s4_recover_C(A, P, C, dt, 128).detach()
    return found

with torch.no_grad():
    first = make(1)
    for name, value in first.named_parameters():
        value.add_(0.1 * torch.rand_like(value))
torch.save(dict(model=first.state_dict(), config={{}}), "best.pt")
found = dict(pretrained=weights(first), fresh=weights(make(2)))
for take in {kinds}:
    taken = make(2)
    finetune.load_backbone(taken, SimpleNamespace(init=Path("."), take=take), print)
    found[take] = weights(taken)
torch.save(found, "found.pt")""")
    found = torch.load(fork / "found.pt", weights_only=True)
    for kind in kinds:
        for name, fresh in found["fresh"].items():
            expected = found["pretrained"][name] if TAKEN[kind](name) and not name.startswith("head") else fresh
            if ".qkv." in name and kind in ("qk", "v"):
                thirds = [source[name].chunk(3) for source in (found["fresh"], found["pretrained"])]
                expected = torch.cat([thirds[(kind == "qk") == (i < 2)][i] for i in range(3)])
            near = 1e-3 if name.endswith(".C") else 0                         # C was solved for
            torch.testing.assert_close(found[kind][name], expected, rtol=near, atol=near)


@pytest.mark.skipif(not shutil.which("patch"), reason="patch makes the fork")
def test_what_is_rewound_is_what_pretraining_began_from(fork):
    """On samples pretraining has a mask channel more, so that the same seed draws other weights."""
    run(fork, "-c", """import torch, finetune, models, data, recipes
from types import SimpleNamespace
task, arch = data.TASKS["pathfinder_demo"], recipes.arch("pathfinder_demo", "transformer")
torch.manual_seed(3)
start = models.Backbone(models.config(arch, task, mask_channel=True)).state_dict()
torch.manual_seed(3)
args = SimpleNamespace(init=None, begin=None, start="scratch", rewind=True, objective="masked", arch=arch, pool="mean")
args.head, args.freeze = "linear", False
model = finetune.make_model(args, task, None).backbone
start["encoder.weight"] = start["encoder.weight"][:, :-1]
assert not model.mask_channel and start.keys() == model.state_dict().keys()
assert all(torch.equal(start[name], value) for name, value in model.state_dict().items())""")


@pytest.mark.skipif(not shutil.which("patch"), reason="patch makes the fork")
def test_a_fork_trains_on_samples(fork):
    """With everything taken over and with a part, rewound or not: a mask channel is only where it is wanted."""
    data_dir = fork / "tiny"
    run(fork, "data.py", "--task", "pathfinder_demo", "--data-dir", data_dir, "--train", 64, "--val", 16, "--test", 16)
    steps = ("--steps", 2, "--eval-every", 1, "--data-dir", data_dir, "--out")
    run(fork, "pretrain.py", "--task", "pathfinder_demo", "--model", "transformer", "--hide", "patches", *steps, "first")
    for i, flags in enumerate(((), ("--take", "qk"), ("--take", "qk", "--rewind"))):
        assert "wrote" in run(fork, "finetune.py", "--init", "first", *flags, *steps, f"second{i}")


@pytest.mark.skipif(not shutil.which("patch"), reason="patch makes the fork")
def test_scores_on_fresh_images(fork):
    """On a run's own test split the score is its own, with another attention too; the default images are refused."""
    folders = fork / "0", fork / "1"
    for seed, folder in enumerate(folders):
        run(fork, "data.py", "--task", "pathfinder_demo", "--seed", seed, "--data-dir", folder, "--train", 64,
            "--val", 16, "--test", 40)
    for flags in (("--begin", "near"), ("--pool", "max")):
        run(fork, "finetune.py", "--task", "pathfinder_demo", "--model", "transformer", *flags, "--steps", 3,
            "--lr", 0.01, "--eval-every", 1, "--data-dir", folders[1], "--out", f"runs/pathfinder_demo-{flags[1]}")
    script = fork.parents[1] / "results" / "findings" / "fresh.py"
    run(fork, script, "runs", "--data-dir", folders[1])
    for path in (fork / "runs").glob("*/result.json"):
        result = json.loads(path.read_text())
        assert result["fresh"] == dict(accuracy=result["test_accuracy"], examples=40, seed=1)
    for folder in (folders[0], fork / "nothing"):
        done = subprocess.run([sys.executable, script, "runs", "--data-dir", folder], cwd=fork, capture_output=True,
                              text=True)
        assert done.returncode == 2 and done.stderr.count("\n") == 1
        assert "holds no fresh images; make them: " in done.stderr
    arms = {"a": {0: dict(score=1, fresh=dict(accuracy=.5, examples=9))}, "b": {0: dict(score=2)}}
    assert arms_of.fresh(arms) == arms and arms_of.fresh({"a": arms["a"]})["a"][0]["score"] == 50


@pytest.mark.skipif(not shutil.which("patch"), reason="patch makes the fork")
def test_exits_from_a_plateau(fork):
    """Where attention begins: products of weights near the identity and minus it, and scores that fall with distance.
    What is seen first is a share of the examples, each epoch all of it. Shuffled inputs hold the same symbols."""
    run(fork, "-c", """import numpy as np, torch, exits, data
from types import SimpleNamespace
from models import Attention
torch.manual_seed(0)
layer = Attention(SimpleNamespace(d=64, heads=2, causal=False, block=None, rotary=0.0))
model = torch.nn.Sequential(layer)
exits.begin(model, "mimetic")
q, k, v = layer.qkv.weight.detach().chunk(3)
eye = torch.eye(64)
for rows in torch.arange(64).split(32):
    near = (q[rows].T @ k[rows]).trace() / 64
    assert 0.4 < near < 1.2, near                                  # of rank 32, the largest of .7 Z + .7 I
assert abs((v.T @ layer.out.weight.detach().T).trace() / 64 + 0.4) < 0.1 and not layer.qkv.bias.any()
exits.begin(model, "near")
q, k, v = torch.randn(3, 2, 2, 9, 32).unbind()
lengths = torch.tensor([9, 6])
distance = (torch.arange(9)[:, None] - torch.arange(9)).abs()
scores = q @ k.transpose(-1, -2) / 32 ** 0.5 - torch.tensor([1 / 4, 1 / 256])[:, None, None] * distance
scores[1, ..., 6:] = -torch.inf
torch.testing.assert_close(layer.attend(q, k, v, lengths), scores.softmax(-1) @ v)
assert layer.slope.requires_grad and len([*model.parameters()]) == 5
first = [exits.repeated(80, 5, 0.25, 7, step) for step in range(8)]
assert sorted(np.concatenate(first[:4])) == sorted(np.concatenate(first[4:])) and len(set(np.concatenate(first))) == 20
task = data.TASKS["text_demo"]
x, offsets = np.arange(4, 54).astype("uint8"), np.array([0, 20, 50])
split = exits.other_inputs("shuffled", data.Split(task, x, np.zeros(2), offsets), ".")
for a, b in zip(offsets, offsets[1:]):
    assert sorted(split.x[a:b]) == sorted(x[a:b]) and split.x[b - 1] == x[b - 1] and (split.x[a:b] != x[a:b]).any()""")


# ---- tables ----------------------------------------------------------------------------------------------------------

def bed(root, model, scratch, spt, joint):
    """Three arms of Pathfinder, as question 1 trains them: {seed: accuracy} each. 2,700 steps from scratch, 1,300 +
    1,400, 1,350 jointly."""
    row = next(row for row in questions()[1].rows if (row.task, row.model) == ("pathfinder_demo", model))
    for made, arm, steps in zip(trained(row), (scratch, spt, joint), (2700, 1400, 1350)):
        for seed, score in arm.items():
            shared = record(made) | {"steps": steps, "seconds": 60, "test_examples": 2000, "val_accuracy": .5}
            name = f"pathfinder_demo-{model}-{{}}-s{seed}"
            init = "somewhere/" + name.format("pretrain") if made.first else None
            finetuned(root, name.format(made.start), score, seed, **shared, init=init)
            if init:
                first = {key: value for key, value in record(made.first).items() if key != "start"}
                put(root, name.format("pretrain"), seed=seed, steps=1300, **first, seconds=120, val_score=0.8)


def test_a_difference_by_hand(tmp_path):
    """Means of all seeds that an arm has; one scatter for arms that scatter alike; paired where seeds are the same;
    both intervals hold the error of a test set of 2,000."""
    bed(tmp_path, "transformer", {0: .50, 1: .52, 2: .51}, {0: .70, 1: .71, 2: .74, 3: .72}, {0: .60, 1: .61, 2: .63})
    found = tables.by_name(read_runs(tmp_path))
    arms = {("pathfinder_demo-transformer", start): found[f"pathfinder_demo-transformer-{start}"]
            for start in ("scratch", "spt", "joint")}
    sure, said = tables.scatter(arms)
    scratch, spt, joint = arms
    seeds = [np.array([*tables.scores(arm).values()]) for arm in arms.values()]
    variance, freedom = sum(((x - x.mean()) ** 2).sum() for x in seeds) / 7, 7
    assert sure[spt] == pytest.approx((variance, freedom)) and "7 degrees of freedom" in said["pathfinder_demo"]
    mean, half, paired = tables.change(arms, spt, scratch, sure)
    test = 1.96 * 100 * np.sqrt((.7175 * .2825 + .51 * .49) / 2000)
    assert (mean, paired) == (pytest.approx(71.75 - 51), None)
    assert half == pytest.approx(np.hypot(stats.t.ppf(.975, 7) * np.sqrt(variance / 4 + variance / 3), test), rel=1e-3)
    mean, half, paired = tables.change(arms, joint, scratch, sure)
    test = 1.96 * 100 * np.sqrt((.6133 * .3867 + .51 * .49) / 2000)
    assert paired == pytest.approx(np.hypot(stats.t.ppf(.975, 2) * stats.sem([10, 9, 12]), test), rel=1e-3)


def test_tables_and_verdicts_by_hand(tmp_path):
    """Every cell has the seeds that its arm has; passes and minutes are those of both stages; what costs nothing stands
    first; a claim is what its intervals say."""
    bed(tmp_path, "transformer", {0: .50, 1: .51}, {0: .70, 1: .712, 2: .9}, {0: .60, 1: .50})
    bed(tmp_path, "s4", {0: .80, 1: .81}, {0: .78, 1: .80}, {})
    found = tables.by_name(read_runs(tmp_path))
    rows = {line.split(" | ")[0]: line for line in tables.finding(1, found).splitlines()}
    row = rows["| `pathfinder_demo-transformer`"]
    assert "| 50.5 ± 0.7 (2)<br>2,700 passes, 1.0 min |" in row and "| 77.1 ± 11.2 (3)<br>+26.6 [" in row
    assert "<br>hidden: 80.0 ± 0.0<br>2,700 passes, 3.0 min |" in row and rows["| `text256-s4`"].count("–") == 4
    assert rows["| *Pathfinder: one answer for all*"].startswith("| *Pathfinder: one answer for all* | 48.9 |")
    assert "| 0 of 2 above 55<br>50.5 ± 0.7 (2)<br>" in tables.finding(4, found)
    head, lines, text = tables.verdicts(found)
    lines = {line[:5]: line for line in markdown(head, lines).splitlines()}
    assert "transformer: +20.1 [" in lines["| 6 |"]
    assert "pathfinder_demo rotary: –<br>text256 s4: –<br>" in lines["| 6 |"]
    missing = ("| confirmed: pathfinder_demo transformer<br>not run: text256 rotary, text256 linear, "
               "pathfinder_demo transformer max, pathfinder_demo rotary")
    assert f"{missing}, text256 s4<br>undecided: pathfinder_demo s4 |" in lines["| 6 |"]
    assert f"{missing} |" in lines["| 1 |"] and "transformer: +21.6 [" in lines["| 1 |"]
    assert "transformer: +20.1 [" in lines["| 3 |"]                   # what S4 loses does not count
    assert text.startswith("Of 4 tests against 0, ")


def test_a_verdict_is_where_the_interval_lies():
    for values, bound, verdict in (
            ((3.0, 3.2), "above 0", "confirmed"), ((3.0, 3.2), "within 2", "undecided"),
            ((-3.0, -3.01), "above 0", "refuted"), ((-3.0, -3.01), "within 2", "refuted"),
            ((0.1, 0.11), "within 2", "confirmed"), ((1, 9), "not 0", "undecided")):
        assert tables.decide(tables.Measured(dict(enumerate(values)), 0), bound) == verdict
    sure, unsure = (tables.Measured({0: a, 1: b}, 0) for a, b in ((3.0, 3.1), (-1, 3)))
    assert tables.decide(sure._replace(asked=sure), "above 0") == "confirmed"
    assert tables.decide(sure._replace(asked=unsure), "above 0") == "undecided"      # there is nothing to shrink
    assert tables.decide(tables.Measured({0: 3.0, 1: 3.1}, 9), "above 0") == "undecided"      # another test set


def test_no_table_shows_what_a_trial_scored(tmp_path):
    """The rate that trials choose has the same name as its runs of the table; seeds tell them apart."""
    row = next(row for row in questions()[10].rows if (row.task, row.model, row.word) == ("pathfinder_demo", "s4", ""))
    arm = next(made for made in trained(row) if "b1-" in made.word and made.start == "scratch")
    for seed, score in ((0, .8), (100, .9)):
        finetuned(tmp_path, f"pathfinder_demo-s4-{arm.word}-scratch-s{seed}", score, seed, test_examples=2000,
                  val_accuracy=score, **record(arm) | dict(steps=1900, seconds=60))
    found = tables.by_name(read_runs(tmp_path))
    assert "| 80.0 (1) |" in tables.finding(10, found) and "90.0" not in tables.finding(10, found)
    assert "| 90.0<br>1,900 passes" in tables.finding(12, found)


def arm_with(*scores, test_examples=10**9):
    return {seed: dict(score=score, test_examples=test_examples, init="") for seed, score in enumerate(scores)}


def test_two_seeds_are_drawn_and_three_have_an_interval():
    """Two that differ by 26 points would have a bar of 330."""
    axis = Figure().subplots()
    sure = [pooled([seeds]) for seeds in ((50, 76), (70, 72, 74))]
    figures.line_of(axis, (2, 4), [arm_with(50, 76), arm_with(70, 72, 74)], sure, color="black")
    seeds, means = axis.lines[0], axis.containers[0]
    assert [*zip(seeds.get_xdata(), seeds.get_ydata())] == [(2, 50), (2, 76)]
    assert [bar[1, 1] - bar[0, 1] for bar in means.lines[2][0].get_segments()] == pytest.approx([
        0, 2 * stats.t.ppf(.975, 2) * 2 / 3 ** .5])


def test_how_much_a_gain_grows():
    """Four means of two seeds each with a pooled variance of 2; a test set so large that it has no error."""
    means = {(1, 0): 60, (1, .5): 62, (4, 0): 70, (4, .5): 75}
    at = {key: ("text256-s4", str(key)) for key in means}
    arms = {at[key]: arm_with(mean - 1, mean + 1) for key, mean in means.items()}
    curve = arms_of.Curve("text256-s4", "text256", 6000, .5, at, arms, {})
    half = stats.t.ppf(.975, 4) * 2
    assert tables.growth(curve, arms_of.scatter(arms)[0]).endswith(f": +3.0 [{3 - half:+.1f}, {3 + half:+.1f}].")
    few = {at[key]: arm_with(mean - 1, mean + 1, test_examples=100) for key, mean in means.items()}
    half = np.hypot(half, 1.96 * 10 * np.sqrt(sum(mean / 100 * (1 - mean / 100) for mean in means.values())))
    assert f"[{3 - half:+.1f}, {3 + half:+.1f}]" in tables.growth(curve._replace(arms=few), arms_of.scatter(few)[0])
    arms[at[4, 0]].popitem()
    assert tables.growth(curve, arms_of.scatter(arms)[0]) is None


def test_how_training_ended():
    one = dict(steps=10, best_step=4, evals=[dict(val_loss=.5, train_loss=.6), dict(val_loss=1.0, train_loss=.1)])
    other = dict(steps=10, best_step=10, evals=[dict(val_loss=.5, train_loss=.3)])
    short = dict(steps=10, best_step=10, evals=[dict(val_loss=.6)])
    assert tables.end_of({0: one, 1: other}) == "0.20 and 0.75; 70 %"
    assert tables.end_of({0: short}) == "– and 0.60; 100 %" and tables.end_of({}) == "–"


def test_no_share_of_a_gain_that_may_be_none(monkeypatch):
    """Neither of SPT's nor of the exit's own."""
    sure, wide = (59, 61, 60), (20, 100, 60)
    for spt, pooled, share in ((sure, (54, 56, 55), "50 %"), (wide, (54, 56, 55), "–"), (sure, (45, 65, 55), "–")):
        arms = {"from scratch": arm_with(49, 51, 50), "SPT": arm_with(*spt), "max pooling": arm_with(*pooled)}
        monkeypatch.setattr(tables, "exits", lambda found: {"pathfinder_demo": arms})
        line = next(line for line in "".join(tables.of_exits({}, [])).splitlines() if "max pooling" in line)
        assert line.split("|")[4].strip() == share


def test_the_curve_on_pathfinder_has_fresh_scores():
    """Kept before fresh.py has seen it a run would have none for good, and a table with it none at all."""
    found = tables.by_name(read_runs(tables.KEPT))
    names = {f"{row}-{column}" for number in (10, 11) for rows, columns in tables.layout(number) for row in rows
             for column in columns if row.startswith("pathfinder_demo")}
    scored = [run for name in names for seed, run in found.get(name, {}).items() if seed < 100]
    assert len(scored) > 100 and all(run["fresh"]["examples"] == 20_000 for run in scored)


def test_a_figure_wants_runs_of_its_question():
    """Trials have names of its arms, and are none of them."""
    found = tables.by_name(read_runs(tables.KEPT))
    tried = {name: {seed: run for seed, run in arm.items() if seed >= 100} for name, arm in found.items()}
    assert tables.drawn(1, found) and tables.drawn(11, found)
    names = [f"{row}-{column}" for rows, columns in tables.layout(11) for row in rows for column in columns]
    some = [{name: {0: {}} for name in names[:n]} for n in (1, len(names) // 2, len(names) // 2 + 1)]
    assert [tables.drawn(11, arms) for arms in some] == [False, False, True]
    assert not any(tables.drawn(number, tried) for number in questions())


def test_many_tests():
    """Holm's and Benjamini and Hochberg's corrections, by hand: .01, .02, .03, .04, .5 of five."""
    chances = dict(zip("abcde", (.5, .01, .02, .03, .04)))
    assert tables.survivors(chances) == ({"b"}, {*"bcde"})
    assert tables.survivors(dict(zip("ab", (.01, .02)))) == ({"a", "b"}, {"a", "b"})
    one = tables.Measured({0: 1.0, 1: 2.0, 2: 4.0}, 0)
    assert tables.chance(one) == pytest.approx(stats.ttest_1samp([1, 2, 4], 0).pvalue)


def means_of_trials(found, name, rates):
    """{rate: mean validation accuracy over the trials' seeds}; name: of the runs, {} for the rate."""
    trials = {float(rate): found.get(name.format(f"{float(rate):g}"), {}) for rate in rates.split("/")}
    scores = {rate: [run["val_accuracy"] for seed, run in runs.items() if seed >= 100] for rate, runs in trials.items()}
    return {rate: np.mean(some) for rate, some in scores.items() if some}


def test_the_rates_of_the_curve_and_of_the_exits_are_the_best_of_their_trials():
    """By validation, of the kept runs of findings12."""
    found = tables.by_name(read_runs(tables.KEPT))
    cases, lines = [], {}
    for line in read_table(CURVE):
        pool = "-max" if (line["task"], line["pool"]) == ("pathfinder_demo", "max") else ""
        lines.setdefault((line["task"], line["model"]), line)
        for start, budget in itertools.product(("scratch", "spt"), (0.25, 1, 4)):
            share = "-share0.5" if start == "spt" else ""
            cases.append((f"{line['task']}-{line['model']}{pool}-b{budget:g}{share}-lr{{}}-{start}", line["tried"],
                          chosen(line, start, budget)))
    for line in read_table(EXITS):
        rates = lines[line["task"], line["model"]]["tried"]
        for word in line.keys() - {"task", "model"}:
            inputs = word in ("listops", "shuffled")
            name = f"share0.5-{word}-lr{{}}-spt" if inputs else f"lr{{}}-{word}-scratch"
            cases.append((f"{line['task']}-{line['model']}-b1-{name}", rates, float(line[word])))
    checked = 0
    for name, rates, taken in cases:
        means = means_of_trials(found, name, rates)
        if len(means) == 3:
            checked += 1
            assert means[taken] == max(means.values()), (name, means)
    assert checked >= 35


def test_dropout_is_the_best_of_its_trials_and_stands_apart():
    """By validation, from scratch at four times the passes; its arms are no points of the curve."""
    found, dropped = tables.by_name(read_runs(tables.KEPT)), 0
    for line, curve in zip(read_table(CURVE), arms_of.curves(found), strict=True):
        assert not any("dropout" in name for _, name in curve.at.values())
        if float(line["dropout"]):
            dropped += 1
            plain, name = curve.at[4, 0][1], curve.dropped[4, 0][1]
            assert name == plain.replace("-scratch", f"-dropout{line['dropout']}-scratch") and len(curve.dropped) == 2
            means = means_of_trials(found, f"{curve.name}-{name.replace(line['dropout'], '{}')}", "0.05/0.1/0.2")
            rate = chosen(line, "scratch", 4)
            without = f"{curve.name}-{plain}".replace(f"lr{rate:g}", "lr{}")
            means[0.0] = means_of_trials(found, without, str(rate))[rate]
            assert len(means) == 4 and means[float(line["dropout"])] == max(means.values())
    assert dropped == 1


def test_joint_training_takes_the_best_of_its_trials():
    """By validation, of the kept runs of findings0: the setting that experiments.py has for a bed is that of the best."""
    runs = read_runs(ROOT / "results" / "findings" / "runs.jsonl")
    trials = [each for each in runs if each.get("start") == "joint" and re.search(r"-lr[\d.]+-w", each["run"])]
    for chosen in read_table(JOINT):
        scores = {}                                                # some trials were made again
        for trial in trials:
            if [trial["task"], trial["model"], trial["seed"]] == [chosen["task"], chosen["model"], 0]:
                setting = re.search(r"-lr([\d.]+)-w([\d.]+)", trial["run"]).groups()
                scores.setdefault(tuple(map(float, setting)), []).append(trial["val_accuracy"])
        bed_and_model = chosen["task"], chosen["model"]
        assert len(scores) == (12 if bed_and_model[0] != "text256" else 4 if bed_and_model[1] == "s4" else 5)
        assert max(scores, key=lambda setting: np.mean(scores[setting])) == (float(chosen["lr"]), float(chosen["joint"]))


def test_a_run_that_is_not_what_its_name_says_is_an_error(tmp_path):
    finetuned(tmp_path, "pathfinder_demo-s4-scratch-s0", 0.5, 0, "pathfinder_demo", "s4", changed={"lr": 0.1})
    with pytest.raises(UserError, match="pathfinder_demo-s4-scratch-s0 is not what experiments.py says"):
        tables.by_name(read_runs(tmp_path))


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """A copy of what `keep` and `page` write."""
    shutil.copytree(ROOT / "results" / "findings", tmp_path / "results" / "findings")
    shutil.copy(ROOT / "results" / "findings.md", tmp_path / "results")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "HERE", tmp_path / "results" / "findings")
    monkeypatch.setattr(tables, "KEPT", tables.HERE / "runs.jsonl")
    return tmp_path


def test_the_pages_are_those_of_the_kept_runs(pages, capsys):
    """A stale page is found, and mended."""
    assert tables.main(["page", "--check"]) == 0
    page = pages / "results" / "findings.md"
    for block in ("question1", "claims"):
        whole = page.read_text()
        page.write_text(whole.replace(f"<!-- {block}:begin -->\n", f"<!-- {block}:begin -->\n?"))
        assert tables.main(["page", "--check"]) == 2 and "without --check" in capsys.readouterr().err
        assert tables.main(["page"]) == 0 and page.read_text() == whole


def test_intervals_in_sentences_are_those_of_the_tables():
    """An interval in README or on the page, with its gain and without, stands in a table of the page, perhaps as that
    of a loss."""
    page, readme = ((ROOT / name).read_text(encoding="utf-8") for name in ("results/findings.md", "README.md"))
    block, one = r"<!-- (\w+):begin -->.*?<!-- \1:end -->", r"([+-]?\d*\.?\d+)"
    tables_of = " ".join(whole.group(0) for whole in re.finditer(block, page, re.DOTALL))
    prose = " ".join(re.sub(block, "", text, flags=re.DOTALL) for text in (page, readme))
    interval = rf"\[{one},\s+{one}\]"
    for pattern in (interval, rf"{one}\s+{interval}"):
        known, told = ({tuple(map(float, match)) for match in re.findall(pattern, text)} for text in (tables_of, prose))
        known |= {(*(-mean for mean in means), -high, -low) for *means, low, high in known}
        assert len(told) > 30 and not told - known


def test_keeping_adds_runs_and_never_replaces_one(pages):
    """The first test score of a run counts. A run of another question, which is only kept, stays."""
    old = {each["run"]: each for each in read_runs(tables.KEPT)}
    bed(pages / "new", "transformer", {0: .99, 77: .6}, {77: .7}, {})
    put(pages / "new", "pathfinder_demo-s4-pretrain-s77", seed=77, task="pathfinder_demo", model="s4")
    for folder in (pages / "new").iterdir():
        if "s4-pretrain" in folder.name:                       # question 3's
            log = [dict(kind="train", loss=2), dict(kind="train", loss=4), dict(kind="eval"), dict(kind="eval")]
            (folder / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in log))
            np.savez(folder / "kernels.npz", before=np.ones((1, 2, 8)), after=np.ones((1, 2, 8)))
    assert tables.main(["keep", "--runs", str(pages / "new")]) == 0
    new = {each["run"]: each for each in read_runs(tables.KEPT)}
    assert {name: new[name] for name in old} == old
    assert [record.get("train_loss") for record in new["pathfinder_demo-s4-pretrain-s77"]["evals"]] == [3, None]
    assert len(new) - len(old) == 4 and new["pathfinder_demo-transformer-scratch-s77"]["score"] == 60
    kernels, before = np.load(tables.HERE / "kernels.npz"), np.load(ROOT / "results" / "findings" / "kernels.npz")
    assert {*kernels} - {*before} == {f"pathfinder_demo-s4-pretrain-s77/{stage}" for stage in ("before", "after")}
    assert all((kernels[name] == before[name]).all() for name in before)


def test_every_claim_names_runs_of_its_question():
    class Noted(dict):
        def get(self, name, default=None):
            asked.add(name)
            return default

    asked, every = set(), {f"{row}-{column}" for number in questions() for rows, columns in tables.layout(number)
                           for row in rows for column in columns}
    tables.verdicts(Noted())
    assert len(asked) > 20 and {name for name in asked if not name.endswith("-pretrain")} <= every
    assert {name.replace("-pretrain", "-spt") for name in asked} <= every


# ---- lag -------------------------------------------------------------------------------------------------------------

def pair(root, model, scratch, spt, word="", **more):
    """A model from scratch and after SPT on a bed: {seed: accuracy} and {seed: (accuracy, val_score)}. 20 passes."""
    shared = dict(task="text_demo", model=model, train_examples=9) | more
    for seed, score in scratch.items():
        finetuned(root, f"{model}{word}-scratch-s{seed}", score, seed, val_accuracy=score, **{"steps": 20} | shared)
    for seed, (score, able) in spt.items():
        name = f"{model}{word}-pretrain-s{seed}"
        put(root, name, seed=seed, val_score=able, **shared | {"steps": 10})
        finetuned(root, f"{model}{word}-spt-s{seed}", score, seed, start="spt", init=f"runs/{name}", val_accuracy=score,
                  **shared | {"steps": 10})


def test_lag_skill_and_gain_by_hand(tmp_path):
    """What has fewer seeds, other passes, part of the labels, a start with other settings, or no other model on its bed
    is no dot; of two rates the one that validation chooses counts, for each arm by itself."""
    pair(tmp_path, "s4", {0: .70, 1: .72}, {0: (.70, .5), 1: (.70, .7)})
    pair(tmp_path, "rotary", {0: .60, 1: .61}, {0: (.64, .1773), 1: (.67, .1773)})
    pair(tmp_path, "rotary", {0: .50, 1: .61}, {0: (.5, 1), 1: (.5, 1)}, "slow", changed={"lr": 1e-4})
    pair(tmp_path, "rotary", {0: .99}, {0: (.99, 1)}, "one", changed={"lr": 1})
    pair(tmp_path, "rotary", {0: .99, 1: .99}, {}, "long", steps=40, changed={"steps": 40})
    pair(tmp_path, "rotary", {0: .99, 1: .99}, {}, "max", changed={"pool": "max"})
    pair(tmp_path, "s4", {100: .99, 101: .99}, {100: (.99, 1)}, "late")
    pair(tmp_path, "dlr", {0: .99, 1: .99}, {0: (.99, 1), 1: (.99, 1)}, label_fraction=.5)
    pair(tmp_path, "s4", {0: .50, 1: .51}, {0: (.50, -.5), 1: (.50, -.5)}, "alone", task="image_mini")
    s4, rotary = lag.dots_of(lag.pairs(read_runs(tmp_path)))
    assert s4[:4] == ("text_demo", "s4", "", 2) and rotary[:3] == ("text_demo", "rotary", "")
    near = functools.partial(pytest.approx, abs=1e-9)
    assert s4[4:7] == near((0, (0.6 - 0.1773) / (1 - 0.1773), -1)) and s4.half == near(12.706204736)     # gains 0, -2
    assert rotary[4:7] == near((71 - 60.5, 0, 5)) and rotary.half == near(12.706204736)                  # gains 4, 6
    assert lag.skill("image_mini", -0.8664) == near(0) and lag.skill("ucr:FordA", -0.25) == near(0.75)
    with pytest.raises(UserError, match="lag.py commonest ucr:Mine"):
        lag.skill("ucr:Mine", 0.5)


def test_pretraining_on_top_is_apart(tmp_path):
    for model in ("s4", "dlr"):
        pair(tmp_path, model, {0: .40, 1: .41}, {0: (.55, .5), 1: (.54, .5)}, task="text_mini", steps=10)
        pair(tmp_path, model, {0: .50, 1: .51}, {}, "long", task="text_mini", changed={"steps": 20})
    runs = read_runs(tmp_path)
    assert [round(dot.gain) for dot in lag.dots_of(lag.pairs(runs))] == [4, 4]
    assert [round(dot.gain) for dot in lag.dots_of(lag.pairs(runs, on_top=True))] == [14, 14]


def test_forecasts_by_hand():
    """A plane through its points is found; ranks agree by Spearman; no interval, no telling apart."""
    dots = [lag.Dot("text_demo", "s4", "", 3, behind, able, 1 + 2 * behind - 3 * able, 2)
            for behind, able in ((0, .5), (4, .1), (9, .9), (2, .3))]
    new = [lag.Dot("pathfinder_demo", "s4", "", 3, 10, 1, -2, 2)]
    assert lag.predicted(dots, new, lag.FORMS["lag, skill"]) == pytest.approx([18])
    assert lag.predicted(dots, new, lag.FORMS["always the mean"]) == pytest.approx([np.mean([-.5, 8.7, 16.3, 4.1])])
    assert [*lag.told(dots)] == [False, True, True, True] and not lag.told(new)[0]
    assert lag.ranks_agree([1, 2, 3, 9], [5, 6, 8, 7]) == pytest.approx(0.8)


def test_the_commonest_symbol(tmp_path):
    """Padding is not counted, neither as a symbol nor as a sample."""
    small = ("--data-dir", tmp_path, "--train", 8, "--val", 300, "--test", 8)
    run(tmp_path, ROOT / "data.py", "--task", "listops_mini", *small)
    symbols = np.load(tmp_path / "listops_mini" / "val_x.npy")
    assert lag.commonest("listops_mini", tmp_path) == (pytest.approx(np.bincount(symbols).max() / len(symbols)), None)
    samples = np.random.default_rng(0).normal(3, 2, (40, 9, 2)).astype("float32")
    samples[:20, 4:] = np.nan
    np.savez(tmp_path / "mine.npz", x=samples, y=np.arange(40) % 2)
    share, variance = lag.commonest(f"file:{tmp_path / 'mine.npz'}", tmp_path)
    folder = next(tmp_path.glob("file-*"))
    kept, std = np.load(folder / "val_x.npy"), json.loads((folder / "meta.json").read_text())["found"]["std"]
    assert kept.ndim == 2 and share is None
    assert variance == pytest.approx((kept.var(0) / np.square(std)).mean(), rel=1e-4)


def test_the_numbers_are_those_of_the_kept_runs(tmp_path, monkeypatch, capsys):
    """A stale page is found, and mended; the figure is drawn."""
    for name in ("findings.md", *lag.SOURCES):
        (tmp_path / "results" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "results" / name, tmp_path / "results" / name)
    monkeypatch.setattr(lag, "ROOT", tmp_path)
    monkeypatch.setattr(lag, "HERE", tmp_path / "results" / "findings")
    assert lag.main(["--check"]) == 0
    page = tmp_path / "results" / "findings.md"
    whole = page.read_text()
    page.write_text(whole.replace("<!-- lag:begin -->\n", "<!-- lag:begin -->\n?"))
    assert lag.main(["--check"]) == 2 and "without --check" in capsys.readouterr().err
    assert not (lag.HERE / "lag.png").exists()
    assert lag.main([]) == 0 and page.read_text() == whole and (lag.HERE / "lag.png").stat().st_size > 10_000


# ---- the convolutional network of Pathfinder -------------------------------------------------------------------------

def test_the_kept_convolutional_networks():
    """Ten seeds at the rate that validation preferred; its images are those of the split, a score is that of its
    counts."""
    kept = [run for run in read_runs(ROOT / "results" / "baseline.jsonl") if "-convnet-" in run["run"]]
    assert [run["seed"] for run in kept] == [*range(10)]
    for run in kept:
        assert run["tried"][f"{run['lr']}"] == max(run["tried"].values()) and run["fresh"]["examples"] == 20_000
        assert run["test_accuracy"] == sum(run["counts"]["right"]) / run["test_examples"]
        assert run["parameters"] == sum(weight.numel() for weight in convnet.network().parameters())
    x = np.random.default_rng(0).integers(0, 256, (5, 196, 1), dtype=np.uint8)
    split = Split(TASKS["pathfinder_demo"], x, np.arange(5) % 2)
    found, labels = convnet.images(split)
    assert found[3, 0, 2, 5] == split.batch([3]).samples[0, 2 * 14 + 5, 0] and labels.tolist() == [0, 1, 0, 1, 0]
