"""experiments/: an entry becomes commands; chains run, fail, are killed and stopped."""

import functools
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import ROOT, call, made_set, parse, scripts

import finetune
import pretrain
import recipes
from engine.flags import run_name
from experiments import commands, entries, pool, running, sweep
from files import UserError
from recipes import read_table
from tasks import TASKS

unix = pytest.mark.skipif(os.name == "nt", reason="bash, and signals and terminals of Unix")
ENTRIES = entries.paper()
ENTRIES |= {f"mini {target}": rows for target, rows in entries.paper("mini").items()}
ENTRIES |= {target: entries.demo(target) for target in entries.DEMOS}
ENTRIES |= {"demo of any model": entries.demo("demo", "mamba lru")}


def stage_of(command):
    """A command of run_all.sh -> the module of its stage, the words of its flags."""
    _, script, *words = shlex.split(command)
    return {"pretrain.py": pretrain, "finetune.py": finetune}[script], words


def outs(lines):
    """The run directories of commands, in their order."""
    return re.findall(r"--out (\S+)", " ".join(lines))


@functools.cache
def listed(words):
    """The lines of run_all.sh --list."""
    done = call("run_all.sh", *shlex.split(words), "--list", RUNS="", JOBS="")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def swept(*varied, starts="scratch,spt"):
    """The lines of a sweep over these settings."""
    words = " ".join(f"--vary {setting}" for setting in varied)
    return listed(f"sweep --tasks text_demo --models s4 --seeds 0 --starts {starts} {words}")


def trained(rows):
    return [run for row in rows for run in commands.trained(row)]


def test_what_a_command_trains_is_what_its_entry_says(tmp_path, monkeypatch):
    """Tables find a run by `record`, before it is made; its name is that without --out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(recipes, "rows", functools.cache(recipes.rows))
    for run in {run: 0 for rows in ENTRIES.values() for run in trained(rows)}:
        for link in filter(None, (run.first, run)):
            stage, words = stage_of(commands.command(link, 3, "runs/x", ""))
            folder = Path(words[-1])
            if (folder / "config.json").exists():  # the pretraining of other runs, too
                continue
            args = parse(stage, words)
            assert args.resume and args.seed == 3 and args.out.name == run_name(args, 3)
            said = commands.record(link)
            assert {name: getattr(args, name, None) for name in said} == said, words
            if stage is pretrain:
                folder.mkdir(parents=True)
                (folder / "config.json").write_text(json.dumps(vars(args), default=str))
                (folder / "result.json").write_text("{}")


def test_chains_share_no_run_and_filters_keep_their_tasks_models_and_seeds():
    """Of one seed, side by side, two would write one folder."""
    for target, rows in ENTRIES.items():
        folders = outs(itertools.chain(*commands.chains(rows, 0, "runs")))
        assert len({*folders}) == len(folders), target
    everything = listed("all")
    assert len({*everything}) == len(everything) > 400
    lines = listed("table2 --tasks text_mini,image --models s4 --seeds 7,8")
    kept = re.findall(r"--model (\w+) --seed (\d).*? --out runs/paper/([a-z]+)", "\n".join(lines))
    assert len(lines) == 8 and {*kept} == {*itertools.product(["s4"], "78", ("text", "image"))}
    linear, *chains = listed("demo --models mamba --seeds 0")
    assert linear.startswith("python baseline.py --task pathfinder_demo --out runs/demo/pathf")
    assert [re.findall(r"--model (\w+)", line) for line in chains] == [["mamba"]] * 2


def test_what_own_is_asked_for_reaches_the_runs_that_it_concerns():
    """Flags of labels reach every run that reads labels, and no other; all take as many passes."""
    asked = itertools.product((None, 0.25), (False, True), (None, 600), entries.STARTS)
    for share, weights, passes, start in asked:
        words = ["own", "--starts", start, "--tasks", "file:a.npz"]
        words += ["--passes", "600"] * bool(passes) + ["--class-weights"] * weights
        words += ["--label-fraction", "0.25"] * bool(share)
        for run in trained(running.entry_of(running.parse_args(words))):
            args, first = commands.parsed(run), run.first and commands.parsed(run.first)
            assert (args.label_fraction, args.class_weights) == (share, weights), words
            assert bool(first) == (start in ("spt", "linear_probe")), words
            assert not first or first.changed.keys() <= {"steps"}, words
            steps = sum(stage.changed.get("steps", 0) for stage in filter(None, (args, first)))
            assert steps * (1 + (start == "joint")) == (passes or 0), words


def test_machine_flags_reach_every_command_and_no_name():
    """A run's own flag follows, so that it counts."""
    machine = "--compile --dtype float32 --micro-batch 1024"
    varied = "sweep --tasks text_demo --models s4 --vary micro-batch=2 --starts scratch,spt,joint"
    for words in ("table2 --seeds 0", "demo", "table3 --preset mini", varied):
        plain, marked = listed(words), listed(f"{words} {machine}")
        assert [line.replace(f" {machine}", "") for line in marked] == plain
        stages = [link for line in marked for link in line.split(" && ") if "baseline" not in link]
        assert all(machine in link for link in stages), words
        args = parse(*stage_of(next(link for link in stages if "pretrain.py" in link)))
        own = {"micro_batch": 2} if words == varied else {}
        assert args.changed == own and args.micro_batch == own.get("micro_batch", 1024), words


def test_the_price_covers_every_run_and_is_that_of_the_page(tmp_path):
    """Steps and batches are those of the commands; what is finished costs nothing."""
    costs = {row["run"]: row for row in read_table((ROOT / "results/hours.txt").read_text())}
    folder = tmp_path.as_posix()
    chains = {name: commands.chains(rows, 0, folder) for name, rows in entries.paper().items()}
    for target, command in {(name, link) for name in chains for link in sum(chains[name], [])}:
        row = costs[Path(shlex.split(command)[-1]).name.removesuffix("-s0")]
        if target in ("table2", "table8") and "--init" not in command:
            args = parse(*stage_of(command))
            steps = args.steps or args.epochs * (TASKS[args.task].sizes[0] // args.batch)
            assert (int(row["steps"]), int(row["batch"])) == (steps, args.batch), command
    page = (ROOT / "results/costs.md").read_text(encoding="utf-8").split("<!-- hours:begin -->")[1]
    lines = re.findall(r"^\| (\w+) \| (\w+) \| (\w+) \| .* \| ([\d.]+) to ([\d.]+) \|$", page, re.M)
    for task, model, start, *hours in lines:
        objective = "causal" if model.startswith("pythia") else "masked"
        row = costs[f"{task}-{model}-{objective}-{start}"]
        exact = [float(row["best"]), float(row["realistic"])]
        assert [*map(float, hours)] == pytest.approx(exact, abs=0.06), row
    assert len(lines) == 39
    ours = [chain for chain in chains["table2"] if "pythia" not in chain[0]]
    total = re.search(r"^Total: (\d+ to \d+) hours", page, re.M)[1]
    assert commands.price(ours).startswith(f"26 chains, {total} computed H100 hours")
    fork = commands.price([*ours, ["python finetune.py --out runs/text-mine-scratch-s0"]])
    assert " and 1 runs whose hours are unknown" in fork
    for out in outs(itertools.chain(*ours)):
        Path(out).mkdir()
        Path(out, "result.json").touch()
    assert commands.price(ours) == "26 chains, 0 to 0 computed H100 hours (results/costs.md)"
    done = call("run_all.sh", "table2", "--list")
    assert done.stderr.startswith("table2: 108 chains, ") and "chains, " not in done.stdout


def test_a_sweep_has_every_setting_once_under_one_name():
    """From scratch there is no mask; settings of finetuning share a pretraining."""
    settings = "lr=1e-3,0.003", "arch.d=128", "arch.layers=1", "mask=.1,.2", "pretrain.batch=8"
    lines = swept(*settings, starts="scratch,spt,joint")
    assert len({*outs(lines)}) == len(outs(lines)) == 2 + 2 * 4 + 4
    pairs = [f"--lr {lr} --mask {mask}" for lr in ("1e-3", "0.003") for mask in (".1", ".2")]
    asked = [f"{more}{pair}" for more in ("--batch 8 ", "--joint 1 ") for pair in pairs]
    for flags in ("--lr 1e-3", "--lr 0.003", *asked):
        assert "\n".join(lines).count(f"s4 --arch d=128,layers=1 {flags} --seed") == 1, flags
    assert swept("arch.d=128", "arch.layers=1") == swept("arch.layers=1", "arch.d=128")
    assert outs(swept("arch.d=64", "lr=4e-3")) == outs(swept())  # the recipe's, otherwise written
    settings = "finetune.lr=1e-3,3e-3", "label-fraction=0.1,0.5"
    (line,) = swept(*settings, starts="spt,linear_probe")
    assert line.count("pretrain.py") == 1 and len({*outs([line])}) == 1 + 2 * 4


def test_a_stage_has_its_own_value_and_a_switch_is_left_out_and_given():
    for settings in (["lr=2,3", "pretrain.lr=1"], ["pretrain.lr=1", "lr=2,3"]):
        (line,) = swept(*settings, starts="spt")  # one pretraining
        assert re.findall(r"--lr (\d)", line) == ["1", "2", "3"], settings
    (line,) = swept("finetune.train-fraction=0.5", starts="spt")
    assert "--train-fraction 0.5" in line.split(" && ")[-1]
    frozen = swept("freeze", starts="scratch,spt,linear_probe,joint")
    assert ["--freeze" in line for line in frozen] == [False, True, True, False]
    assert len(outs(frozen)) == 2 + 3 + 1  # the linear probe is a frozen SPT
    with pytest.raises(UserError, match="must be FLAG=VALUE"):
        sweep.combinations(["lr"])


@unix
def test_run_all_imports_what_stands_beside_it_wherever_it_is_called(tmp_path):
    here, there = tmp_path / "h\u00e9re and", tmp_path / "there"
    for folder in (here, there):
        (folder / "experiments").mkdir(parents=True)
        (folder / "files.py").write_text(f"place = {folder.name!r}", encoding="utf-8")
        source = "import sys, files\nprint(ascii(files.place), sys.argv[1:])"
        (folder / "experiments" / "running.py").write_text(source)
    (here / "run_all.sh").write_bytes((ROOT / "run_all.sh").read_bytes())
    words = ["bash", here / "run_all.sh", "demo", "a b"]
    done = subprocess.run(words, cwd=there, capture_output=True, text=True)
    assert done.stdout.strip() == f"{ascii(here.name)} ['demo', 'a b']", done.stderr


def stand_in_for_python(folder, more=""):
    """A `python` that runs nothing: it notes its words and GPU, and makes a run's result.json."""
    stub = folder / "bin" / "python"
    stub.parent.mkdir(parents=True)
    stub.write_text(f"""#!/usr/bin/env bash
if [ "$1" = -P ]; then exec "{sys.executable}" "$@"; fi
if [ "$1" = analyze.py ]; then echo "$*" >> analyses.txt; exit; fi
if [ "$1" = data.py ]; then echo "$*" >> prepared.txt; else
    echo "$CUDA_VISIBLE_DEVICES $*" >> calls.txt; fi
{more}
[ "$1" != data.py ] || exit 0
mkdir -p "${{@: -1}}"; touch "${{@: -1}}/result.json"
""")
    stub.chmod(0o755)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """here(words): run_all.sh, with the `python` that stands in, and lines(name) of its notes."""
    monkeypatch.setattr(running, "ROOT", tmp_path)
    monkeypatch.delenv("RUNS", raising=False)

    def run(words):
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return call("run_all.sh", *shlex.split(words), JOBS=2, PATH=path)

    run.lines = lambda name: (tmp_path / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return run


@unix
def test_what_fails_does_not_stop_the_others(here, tmp_path):
    """One task has no data; one chain fails, another beside its old result: exit code and lines."""
    fails = """
if [ "$*" = "data.py --task image" ]; then exit 2; fi
if [[ $* == *"pretrain.py"*"--model dlr "*"--seed 1"* ]]; then
    echo "stub: no memory" >&2; exit 1; fi
if [[ $* == *"--model s4 "*"-scratch-s2" ]]; then
    mkdir -p "${@: -1}"; touch "${@: -1}/result.json"; echo "error: lr"; exit 2
fi"""
    stand_in_for_python(tmp_path, fails)
    done = here("table7 --tasks text,image --gpus 3,5")
    assert done.returncode == 1 and "error: some runs are missing" in done.stderr
    assert "error: no data for image; its runs are left out" in done.stderr
    failed = re.findall(r"error: (\S+) did not finish; .* ends with: (.*)", done.stderr)
    dlr, s4 = "text-dlr-masked-spt-s1", "text-s4-masked-scratch-s2"
    assert {*failed} == {(dlr, "stub: no memory"), (s4, "error: lr")}
    assert here.lines("analyses") == ["analyze.py table 7 --preset paper --runs runs/paper"]
    calls = here.lines("calls")
    assert {line.split()[0] for line in calls} == {"3", "5"}
    assert len(calls) == 4 * 3 * 3 - 1  # the failed chain's second stage is not tried
    done = here("table7 --tasks image")
    assert done.returncode == 2 and done.stderr.endswith("its runs are left out\n")


@unix
def test_flags_reach_the_scripts_that_they_are_for(here, tmp_path, monkeypatch):
    stand_in_for_python(tmp_path)
    monkeypatch.chdir(tmp_path)
    here("sweep --tasks text256,pathfinder_demo --models s4 --raw . --seeds 0 --any-code")
    generated, official = here.lines("prepared")
    assert generated == "data.py --task pathfinder_demo"
    assert official == f"data.py --task text256 --raw {tmp_path}"
    assert all("--any-code" in line for line in here.lines("analyses"))
    assert "--any-code is for: run_all.sh sweep" in here("demo --any-code").stderr
    mine = made_set(tmp_path, name="mine").task
    reading = "--samples --no-header --label=-1 --group=who"
    here(f"own --tasks {mine} --models rotary --seeds 0 --label-fraction 0.5 {reading}")
    assert here.lines("prepared")[2] == f"data.py --task {mine} {reading}"
    (baseline,) = [line for line in here.lines("calls") if "baseline.py" in line]
    assert "--label-fraction 0.5" in baseline


@unix
def test_killed_runs_are_made_again(here, tmp_path):
    """By the same command, until it reports success; a table is shown after each seed."""
    wanted = {*outs(listed("demo-init"))}
    kills = """
name=$(basename "${@: -1}") sum=$(cksum <<< "$name")
if [ "$1" != data.py ] && [ $((${sum%% *} % 2)) = 0 ] && [ ! -e "shot-$name" ]; then
    touch "shot-$name"; kill -9 $$
fi"""
    stand_in_for_python(tmp_path, kills)
    tries = [here("demo-init") for _ in range(3)]  # first stages, second stages, then all
    assert [done.returncode for done in tries] == [1, 1, 0]
    assert len([*tmp_path.glob("shot-*")]) > 6
    made = {path.parent.relative_to(tmp_path) for path in tmp_path.glob("runs/**/result.json")}
    assert {path.as_posix() for path in made} == wanted
    assert tries[2].stdout.startswith("\nSo far, seeds 0:\n\nSo far, seeds 0, 1:\ndemo-init took ")
    seeds = [re.findall(r"--seeds (\S+)", line) for line in here.lines("analyses")]
    assert seeds == [["0"], ["0,1"], []] * 3


@unix
def test_ctrl_c_stops_the_runs_after_they_have_saved(here, tmp_path):
    """Nothing is started after it. A second run_all.sh on the same runs is refused until then."""
    nap = f"sleep 30.{os.getpid()}"
    naps = f"""
if [ "$1" != data.py ] && [ "$1" != baseline.py ]; then
    trap 'sleep 0.5; echo >> saved.txt; exit 143' TERM; {nap} & wait
fi"""
    scripts(tmp_path)
    stand_in_for_python(tmp_path, naps)
    calls = tmp_path / "calls.txt"
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    pid, terminal = pytest.importorskip("pty").fork()
    if pid == 0:
        os.chdir(tmp_path)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # tests in the background ignore it
        words = ["bash", "run_all.sh", "demo"]
        os.execvpe("bash", words, os.environ | {"PATH": path, "JOBS": "2"})
    while not calls.exists() or calls.read_text().count("--resume") < 2:
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), os.read(terminal, 4096).decode()
        time.sleep(0.1)
    assert "another run_all.sh works on runs/" in here("demo").stderr
    os.write(terminal, b"\x03")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert len(here.lines("saved")) == calls.read_text().count("--resume") == 2
    processes = subprocess.run(["ps", "-eo", "stat=,args="], capture_output=True, text=True).stdout
    assert not [line for line in processes.splitlines() if nap in line and line[0] != "Z"]


def test_every_signal_stops_the_pool_but_one_that_is_ignored(monkeypatch):
    handlers, ignored = {}, {signal.SIGINT: signal.SIG_IGN}  # as a test in the background does
    monkeypatch.setattr(signal, "signal", handlers.setdefault)
    monkeypatch.setattr(signal, "getsignal", ignored.get)
    pool.stop_on_signals(None)
    wanted = {"SIGTERM", "SIGHUP", "SIGUSR1"} & {*dir(signal)}
    assert {number.name for number in handlers} == wanted


def test_chains_share_the_visible_gpus(monkeypatch, tmp_path):
    """--gpus counts among the visible ones. Without a GPU chains share the cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(7), raising=False)
    monkeypatch.setenv("JOBS", "")
    cases = (None, 2, None, "01"), ("4,6", 2, None, "46"), ("", 0, None, "")
    cases += ("4,6,7", 3, "02", "47"), (None, 0, "35", "35")
    for inherited, count, asked, wanted in cases:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", inherited) if inherited is not None else None
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        gpus = pool.visible(asked)
        jobs = pool.jobs_of(gpus)
        slots = pool.Pool(jobs, gpus, tmp_path).slots
        given = [slots.get().get("CUDA_VISIBLE_DEVICES") for _ in range(jobs)]
        assert gpus == [*wanted] and given == ([*wanted] or [inherited] * 7), inherited
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    with pytest.raises(UserError, match="CUDA_VISIBLE_DEVICES leaves only 0 to 1"):
        pool.visible("05")


def test_chains_of_all_seeds_share_one_pool(monkeypatch, tmp_path):
    """Eight slots run eight seeds at once; each is reported as soon as it is complete."""
    slots, together = pool.Pool(8, ["0"], tmp_path), threading.Barrier(8)
    monkeypatch.setattr(pool.Pool, "work", lambda pool, chain: together.wait(20))
    seen = slots.run({str(seed): [[f"run {seed}"]] for seed in range(8)})
    assert [*map(len, seen)] == [*range(1, 9)]
