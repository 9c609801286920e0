"""experiments/: an entry becomes commands; chains run, fail, are killed and stopped."""

import itertools
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT, call, parse, scripts
from test_analyze import listed

import finetune
import pretrain
from engine import flags as flags_py
from engine.flags import flags
from experiments import commands, entries, running, sweep
from files import UserError
from recipes import read_table
from tasks import TASKS

ENTRIES = {
    **entries.paper(),
    **{f"mini {name}": rows for name, rows in entries.paper("mini").items()},
    **{name: entries.demo(name) for name in entries.DEMOS},
    "demo of any model": entries.demo("demo", "mamba lru"),
}


def stage_of(command):
    """A command of run_all.sh -> the module of its stage, the words of its flags."""
    _, script, *words = shlex.split(command)
    return {"pretrain.py": pretrain, "finetune.py": finetune}[script], words


@pytest.mark.parametrize("target", ENTRIES)
def test_what_a_command_trains_is_what_its_entry_says(target, tmp_path, monkeypatch):
    """Each command, parsed when it is run, differs from the recipe in what `record` said before, by
    which tables find the run; its directory has the name that it would have without --out."""
    monkeypatch.chdir(tmp_path)
    for row in ENTRIES[target]:
        for run in commands.trained(row):
            for link in filter(None, (run.first, run)):
                stage, words = stage_of(commands.command(link, 3, "runs/x", ""))
                args = parse(stage, words)
                if stage is pretrain:
                    args.out.mkdir(parents=True, exist_ok=True)
                    config = vars(args) | dict(out=None, init=None)
                    (args.out / "config.json").write_text(json.dumps(config, default=str))
                    (args.out / "result.json").write_text("{}")
            assert args.resume and args.seed == 3
            assert {
                name: getattr(args, name, None) for name in commands.record(run)
            } == commands.record(run)
            assert args.out.name == parse(stage, words[: words.index("--out")]).out.name


def test_what_own_is_asked_for_reaches_the_runs_that_it_concerns():
    """The share and the weights of labels reach every run that reads labels, and no other; all take
    as many passes."""
    for share, weights, passes, start in itertools.product(
        (None, 0.25), (False, True), (None, 600), entries.STARTS
    ):
        words = ["--starts", start, "--tasks", "file:a.npz"]
        words += ["--passes", "600"] if passes else []
        words += ["--label-fraction", "0.25"] if share else []
        words += ["--class-weights"] if weights else []
        for row in running.entry_of(running.parse_args(["own", *words])):
            for run in commands.trained(row):
                args, first = commands.parsed(run), run.first and commands.parsed(run.first)
                assert (args.label_fraction, args.class_weights) == (share, weights)
                assert bool(first) == (start in ("spt", "linear_probe"))
                assert not first or first.changed.keys() <= {"steps"}
                steps = [run.changed.get("steps", 0) for run in filter(None, (args, first))]
                assert sum(steps) * (1 + (start == "joint")) == (passes or 0)


def test_a_plan_for_your_data_does_not_need_them():
    """Sizes and lengths count as changed whatever `fit` will choose; a recipe's rate does not."""
    words = "--lr 3e-3 --epochs 10 --arch d=64"
    (row,) = entries.rows("file:/none.npz", "rotary", [entries.Variant("pretrain", "", words)])
    (run,) = commands.trained(row)
    assert commands.record(run)["changed"] == {"arch": {"d": 64}, "epochs": 10}


def test_no_run_is_in_two_chains():
    """Of one seed, side by side: they would write one folder."""
    for target, rows in ENTRIES.items():
        outs = re.findall(
            r"--out (\S+)", " ".join(" ".join(chain) for chain in commands.chains(rows, 0, "runs"))
        )
        assert len(set(outs)) == len(outs), target


def test_files_beside_the_caller_are_not_imported(tmp_path):
    for name in ("models", "files", "tasks"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not these')")
    done = subprocess.run(
        ["bash", ROOT / "run_all.sh", "demo", "--list"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.count("pretrain.py") == 6, done.stderr


# ---- run_all.sh ----------------------------------------------------------------------------------


def test_no_chain_is_listed_twice_and_filters_filter():
    everything = listed("all")
    assert len(set(everything)) == len(everything) > 400
    some = listed("table2", "--tasks", "text_mini,image", "--models", "s4", "--seeds", "7,8")
    assert len(some) == 2 * 2 * 2 and all(
        "--model s4" in c and ("--seed 7" in c or "--seed 8" in c) for c in some
    )
    linear, *chains = listed("demo", "--models", "mamba", "--seeds", "0")
    assert (
        linear
        == "python baseline.py --task pathfinder_demo --out runs/demo/pathfinder_demo-baseline"
    )
    assert len(chains) == 2 and all("baseline.py" not in line for line in everything)


@pytest.mark.parametrize(
    "words",
    [
        ("table2", "--seeds", "0"),
        ("demo",),
        ("table3", "--preset", "mini"),
        (
            "sweep",
            "--tasks",
            "text_demo",
            "--models",
            "s4",
            "--vary",
            "micro-batch=2",
            "--starts",
            "scratch,spt,joint",
        ),
    ],
)
def test_machine_flags_reach_every_command_and_no_name(words):
    """A run's own flag follows, so that it counts."""
    machine = "--compile --dtype float32 --micro-batch 1024"
    plain, marked = listed(*words), listed(*words, *shlex.split(machine))
    assert [line.replace(f" {machine}", "") for line in marked] == plain
    stages = [
        command for line in marked for command in line.split(" && ") if "baseline.py" not in command
    ]
    assert all(machine in command for command in stages)
    args = parse(*stage_of(next(command for command in stages if "pretrain.py" in command)))
    assert (
        args.compile
        and args.dtype == "float32"
        and args.micro_batch == (2 if words[0] == "sweep" else 1024)
    )
    assert args.changed == ({"micro_batch": 2} if words[0] == "sweep" else {})


def test_micro_batches_change_a_recipe_only_where_they_cut_a_batch_that_is_normalised():
    """S4 on PathX pretrains with BatchNorm on batches of 8, rotary with LayerNorm."""
    changed = [
        parse(pretrain, ["--task", "pathx", "--model", model, "--micro-batch", size]).changed
        for model, size in (("s4", "4"), ("s4", "8"), ("s4", "16"), ("rotary", "4"))
    ]
    assert changed == [{"micro_batch": 4}, {}, {}, {}]


def test_the_price_covers_every_run_and_is_that_of_the_page(tmp_path):
    """Steps and batches are those of the commands; what is finished costs nothing."""
    costs = {row["run"]: row for row in read_table((ROOT / "results/hours.txt").read_text())}
    chains = {
        target: commands.chains(rows, 0, str(tmp_path)) for target, rows in entries.paper().items()
    }
    pairs = {(name, command) for name in chains for command in sum(chains[name], [])}
    for target, command in pairs:
        row = costs[Path(shlex.split(command)[-1]).name.removesuffix("-s0")]
        if target in ("table2", "table8") and "--init" not in command:
            args = parse(*stage_of(command))
            steps = args.steps or args.epochs * (TASKS[args.task].sizes[0] // args.batch)
            assert (int(row["steps"]), int(row["batch"])) == (steps, args.batch), command
    page = (ROOT / "results/costs.md").read_text().split("<!-- hours:begin -->")[1]
    lines = re.findall(r"^\| (\w+) \| (\w+) \| (\w+) \| .* \| ([\d.]+) to ([\d.]+) \|$", page, re.M)
    for *name, low, high in lines:
        task, model, start = name
        objective = "causal" if model.startswith("pythia") else "masked"
        row = costs[f"{task}-{model}-{objective}-{start}"]
        assert [float(low), float(high)] == pytest.approx(
            [float(row["best"]), float(row["realistic"])], abs=0.06
        ), name
    ours = [chain for chain in chains["table2"] if "pythia" not in chain[0]]
    total = re.search(r"^Total: (\d+ to \d+) hours", page, re.M)[1]
    fork = [
        *ours,
        ["python finetune.py --task text --model mine --seed 0 --out runs/text-mine-scratch-s0"],
    ]
    assert commands.price(fork).startswith(f"27 chains, {total} computed H100 hours")
    assert " and 1 runs whose hours are unknown; GB" in commands.price(fork)
    assert len(lines) == 39 and commands.price(ours).startswith(
        f"26 chains, {total} computed H100 hours"
    )
    assert commands.price(ours).endswith(
        "GB without --micro-batch: pathx256-s4-masked-spt 177.6, retrieval-s4-masked-spt 86.2"
    )
    for out in re.findall(r"--out (\S+)", " ".join(" ".join(chain) for chain in ours)):
        Path(out).mkdir()
        Path(out, "result.json").touch()
    assert commands.price(ours) == "26 chains, 0 to 0 computed H100 hours (results/costs.md)"
    done = call("run_all.sh", "table2", "--list")
    assert done.stderr.startswith("table2: 108 chains, ") and "chains, " not in done.stdout


def test_a_sweep_has_every_combination_where_it_has_a_meaning():
    """A mask only where something is hidden; sizes only where finetuning does not inherit them; one
    stage by name; a number however it is written."""
    lines = listed(
        "sweep",
        "--tasks",
        "text_demo",
        "--models",
        "s4",
        "--vary",
        "lr=1e-3,0.003",
        "--vary",
        "arch.d=128",
        "--vary",
        "arch.layers=1",
        "--vary",
        "mask=.1,.2",
        "--vary",
        "pretrain.batch=8",
        "--seeds",
        "0",
        "--starts",
        "scratch,spt,joint",
    )
    assert len(lines) == 2 + 4 + 4
    alone = [line for line in lines if "-scratch-" in line]
    assert all(
        "--mask" not in line and "--batch" not in line and "--arch d=128,layers=1" in line
        for line in alone
    )
    pretrain, finetune = next(
        line for line in lines if "lr0.001" in line and "mask0.2" in line and "-spt-" in line
    ).split(" && ")
    assert "--arch d=128,layers=1 --batch 8 --lr 1e-3 --mask .2 --seed" in pretrain
    assert "--lr 1e-3 --seed" in finetune and "--arch" not in finetune and "--batch" not in finetune
    joint = next(line for line in lines if "-joint-" in line)
    assert "--arch d=128,layers=1 --joint 1 --lr 1e-3 --mask .1" in joint
    outs = re.findall(r"--out (\S+)", " ".join(lines))
    assert len(set(outs)) == len(outs)


def test_a_setting_has_one_name_whichever_sweep_asks_for_it():
    """The recipe's own rate, 0.004, size, 64, and mask, 0.3, are the recipe; finetuning's settings
    share a pretraining."""

    def outs(*vary, starts="scratch,spt"):
        flags = [word for each in vary for word in ("--vary", each)]
        lines = listed(
            "sweep",
            "--tasks",
            "text_demo",
            "--models",
            "s4",
            *flags,
            "--starts",
            starts,
            "--seeds",
            "0",
        )
        return set(re.findall(r"--out runs/sweep/(\S+)", " ".join(lines))), lines

    plain = {f"text_demo-s4-masked-{stage}-s0" for stage in ("scratch", "pretrain", "spt")}
    assert outs("lr=4e-3")[0] == outs("mask=0.3")[0] == outs("arch.d=64", "lr=0.004")[0] == plain
    names, lines = outs("lr=0.001,0.004", "arch.d=64,128")
    assert plain < names and len(lines) == 8 and "text_demo-s4-d=128-masked-spt-s0" in names
    names, lines = outs(
        "finetune.lr=1e-3,3e-3", "label-fraction=0.1,0.5", starts="spt,linear_probe"
    )
    assert len(lines) == 1 and lines[0].count("pretrain.py") == 1 and len(names) == 1 + 2 * 4
    assert (
        outs("arch.d=128", "lr=0.001") == outs("lr=0.001", "arch.d=128")
        and outs("warmup=50")[0] == plain
    )
    assert outs("joint=1", starts="joint")[0] == outs("lr=0.004", starts="joint")[0]
    names, lines = outs("lr=0.001,0.002", "pretrain.lr=0.01", starts="spt")
    assert len(lines) == 1 and "pretrain.py --task text_demo --model s4 --lr 0.01 " in lines[0]


def stand_in_for_python(folder, more=""):
    """A `python` that runs nothing: it notes what it was asked for and on which GPU, and makes a
    run's result.json."""
    stub = folder / "bin" / "python"
    stub.parent.mkdir(parents=True)
    stub.write_text(f"""#!/usr/bin/env bash
if [ "$1" = -P ]; then exec {sys.executable} "$@"; fi
if [ "$1" = analyze.py ]; then echo "$*" >> analyses.txt; exit; fi
[ "$1" = data.py ] || echo "$CUDA_VISIBLE_DEVICES $*" >> calls.txt
{more}
[ "$1" != data.py ] || exit 0
mkdir -p "${{@: -1}}"; touch "${{@: -1}}/result.json"
""")
    stub.chmod(0o755)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """here(*words): run_all.sh, with the `python` that stands in."""
    monkeypatch.setattr(running, "ROOT", tmp_path)
    return lambda *words: call(
        "run_all.sh", *words, JOBS=2, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    )


def test_what_fails_does_not_stop_the_others(here, tmp_path):
    """Chains run on two GPUs. One task has no data; one chain fails, another beside its old result:
    all others are made, exit code and lines tell."""
    stand_in_for_python(
        tmp_path,
        """
if [ "$*" = "data.py --task image" ]; then exit 2; fi
if [[ $* == *"pretrain.py"*"--model dlr "*"--seed 1"* ]]; then
    echo "stub: no memory" >&2; exit 1; fi
if [[ $* == *"--model s4 "*"-scratch-s2" ]]; then
    mkdir -p "${@: -1}"; touch "${@: -1}/result.json"; echo "error: lr"; exit 2
fi""",
    )
    done = here("table7", "--tasks", "text,image", "--gpus", "3,5")
    assert done.returncode == 1 and "error: some runs are missing" in done.stderr
    assert "error: no data for image; its runs are left out" in done.stderr
    failed = {
        line.split()[1]: line for line in done.stderr.splitlines() if "did not finish" in line
    }
    assert failed.keys() == {"text-dlr-masked-spt-s1", "text-s4-masked-scratch-s2"}
    assert failed["text-dlr-masked-spt-s1"].endswith("stub: no memory") and failed[
        "text-s4-masked-scratch-s2"
    ].endswith("error: lr")
    assert (
        tmp_path / "analyses.txt"
    ).read_text() == "analyze.py table 7 --preset paper --runs runs/paper\n"
    calls = (tmp_path / "calls.txt").read_text().splitlines()
    assert {call.split()[0] for call in calls} == {"3", "5"}
    assert len(calls) == 4 * 3 * 3 - 1  # the failed chain's second stage is not tried
    done = here("table7", "--tasks", "image")
    assert done.returncode == 2 and done.stderr.endswith("its runs are left out\n")


def test_raw_is_for_what_official_files_hold(here, tmp_path, monkeypatch):
    """A sweep may mix reviews, which --raw gives, with a generated task, which no --raw could."""
    stand_in_for_python(tmp_path, '[ "$1" != data.py ] || echo "$*" >> prepared.txt')
    monkeypatch.chdir(tmp_path)
    here(
        "sweep",
        "--tasks",
        "text256,pathfinder_demo",
        "--models",
        "s4",
        "--raw",
        ".",
        "--seeds",
        "0",
    )
    assert (tmp_path / "prepared.txt").read_text().splitlines() == [
        "data.py --task pathfinder_demo",
        f"data.py --task text256 --raw {tmp_path}",
    ]


def test_killed_runs_are_made_again(here, tmp_path):
    """Half of a demo's runs are killed as `kill -9` does: the same command, until it reports
    success, makes them all. Its table is shown whenever a seed is complete."""
    wanted = set(re.findall(r"--out (\S+)", "\n".join(listed("demo-init"))))
    stand_in_for_python(
        tmp_path,
        """
name=$(basename "${@: -1}") sum=$(cksum <<< "$name")
if [ "$1" != data.py ] && [ $((${sum%% *} % 2)) = 0 ] && [ ! -e "shot-$name" ]; then
    touch "shot-$name"; kill -9 $$
fi""",
    )
    tries = [here("demo-init") for _ in range(3)]  # first stages, second stages, then all
    assert [done.returncode for done in tries] == [1, 1, 0] and len(
        list(tmp_path.glob("shot-*"))
    ) > 6
    assert {
        str(path.parent.relative_to(tmp_path)) for path in tmp_path.glob("runs/**/result.json")
    } == wanted
    said = "\nSo far, seeds 0:\n\nSo far, seeds 0, 1:\ndemo-init took "
    assert tries[2].stdout.startswith(said)
    analyses = (tmp_path / "analyses.txt").read_text().splitlines()
    words = "analyze.py demo demo-init --runs runs/demo-init --figure runs/demo-init/demo-init.png"
    assert [re.sub(r" --seeds \S+", "", line) for line in analyses] == [words] * 3 * 3
    assert (
        [re.findall(r"--seeds (\S+)", line) for line in analyses[:3]][2]
        == []
        != re.findall("--seeds", analyses[0])
    )


@pytest.mark.parametrize("target, how, code", [("demo", "ctrl-c", 130), ("table7", "kill", 143)])
def test_stopping_stops_the_runs(target, how, code, here, tmp_path):
    """Ctrl-C in a terminal, or `kill` of the script alone: what runs is stopped, and has saved
    before the script ends; nothing is started after it. A second run_all.sh on the same runs is
    refused until then."""
    scripts(tmp_path)
    stand_in_for_python(
        tmp_path,
        """
if [ "$1" != data.py ] && [ "$1" != baseline.py ]; then
    trap 'sleep 0.5; echo >> saved.txt; exit 143' TERM; sleep 30.25 & wait
fi""",
    )
    calls = tmp_path / "calls.txt"
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        # tests in the background ignore it, and pass that on
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execvpe(
            "bash",
            ["bash", "run_all.sh", target],
            os.environ | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "JOBS": "2"},
        )
    while not calls.exists() or calls.read_text().count("--resume") < 2:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), os.read(terminal, 4096).decode()
        time.sleep(0.1)
    assert "another run_all.sh works on runs/" in here(target).stderr
    if how == "ctrl-c":
        os.write(terminal, b"\x03")
    else:
        os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    assert len((tmp_path / "saved.txt").read_text().splitlines()) == 2
    time.sleep(0.5)
    listing = subprocess.run(["ps", "-eo", "stat=,args="], capture_output=True, text=True).stdout
    left = [line for line in listing.splitlines() if "sleep 30.25" in line and line[0] != "Z"]
    assert not left and calls.read_text().count("--resume") == 2


# ---- seeds side by side; flags of a fork ---------------------------------------------------------


def test_chains_of_all_seeds_share_one_pool(monkeypatch, tmp_path):
    """Eight slots run eight seeds of one variant at once; a seed is reported as soon as it is
    complete."""
    pool, together = running.Pool(8, ["0"], tmp_path), threading.Barrier(8)
    monkeypatch.setattr(running.Pool, "work", lambda pool, chain: together.wait(20))
    seen = pool.run({str(seed): [[f"run {seed}"]] for seed in range(8)})
    assert [*map(len, seen)] == [*range(1, 9)]


@pytest.fixture
def with_tau(monkeypatch):
    """A fork's flag, of the objective."""

    def forked(stage, objectives):
        parser = flags(stage, objectives)
        parser.add_argument("--tau", type=float, default=0.1)
        parser.starts["tau"] = flags_py.WITH_DENOISING
        return parser

    monkeypatch.setattr(flags_py, "flags", forked)
    monkeypatch.setattr(sweep, "flags", forked)


def test_a_flag_belongs_to_its_stage(with_tau):
    """The objective's has no effect from scratch, so a sweep does not train that again; a stage's
    own name is kept."""

    def variants(*varied, starts=("scratch", "spt", "joint")):
        return sweep.sweep(["listops_demo"], ["s4"], sweep.combinations(varied), starts)[0].variants

    found = variants("tau=0.1,0.2")
    assert [(one.start, one.first, one.flags) for one in found] == [
        ("scratch", "", ""),
        ("spt", "--tau 0.1", ""),
        ("spt", "--tau 0.2", ""),
        ("joint", "", "--joint 1 --tau 0.1"),
        ("joint", "", "--joint 1 --tau 0.2"),
    ]
    with pytest.raises(UserError, match="--tau has no meaning in training from scratch"):
        parse(finetune, ["--task", "listops_demo", "--model", "s4", "--tau", "0.2"])
    args = parse(pretrain, ["--task", "listops_demo", "--model", "s4", "--tau", "0.2"])
    assert args.changed == {"tau": 0.2} and "pretrain-tau0.2-s0" in str(args.out)
    assert parse(finetune, ["--task", "listops_demo", "--model", "s4"]).changed == {}


def test_a_probe_is_always_frozen():
    found = sweep.sweep(
        ["listops_demo"], ["s4"], sweep.combinations(["freeze"]), ["spt", "linear_probe"]
    )[0].variants
    assert [one.flags for one in found] == ["", "--freeze"]


@pytest.mark.parametrize("varied", [["lr=2", "finetune.lr=1"], ["finetune.lr=1", "lr=2"]])
def test_a_value_of_one_stage_wins_over_that_of_both(varied):
    (variant,) = sweep.sweep(["listops_demo"], ["s4"], sweep.combinations(varied), ["spt"])[
        0
    ].variants
    assert (variant.first, variant.flags) == ("--lr 2", "--lr 1")


def test_a_flag_without_a_value_is_left_out_and_given():
    both = sweep.sweep(
        ["listops_demo"], ["s4"], sweep.combinations(["freeze"]), ["scratch", "spt", "joint"]
    )[0].variants
    assert [(one.start, one.flags) for one in both] == [
        ("scratch", ""),
        ("scratch", "--freeze"),
        ("spt", ""),
        ("spt", "--freeze"),
        ("joint", "--joint 1"),
    ]
    with pytest.raises(UserError, match="must be FLAG=VALUE"):
        sweep.combinations(["lr"])
