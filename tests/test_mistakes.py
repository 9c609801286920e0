"""What a user can do wrong, over all commands: each is one line that names the mistake, with exit
code 2, and writes nothing."""

import json
import os
import re
import shutil
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import ROOT, SIZES, call, contents, flags, opened
from test_analyze import put

import analyze
import data
import finetune
import pretrain
from engine import setup as setup_py
from experiments import running

DAMAGES = "missing", "cut", "pickle", "other", "flip", "deep"
pytestmark = pytest.mark.usefixtures("elsewhere")
BASE, INIT = "--task listops --model s4 ", "--init pt --batch 8 "
RESUME = BASE + f"--arch {SIZES['s4']} --steps 2 --batch 8 --eval-every 2 --out pt --resume"
MISTAKES = [  # words before the flags: environment, or damage done to a file of the run `pt`
    ("pretrain --model s4", "--task is missing; one of: bidmc_hr"),
    ("finetune --task listops", "--model is missing; one of: transformer"),
    ("pretrain --task nothing --model s4", "no task 'nothing'; the tasks are: bidmc_hr"),
    (
        "finetune --task listops --model nothing",
        "argument --model: invalid choice: 'nothing' (choose from",
    ),
    ("pretrain " + BASE + "--lr nan", "--lr: must be at least 0, got nan"),
    ("pretrain " + BASE + "--seed 9223372036854775808", "--seed: must be"),
    ("pretrain " + BASE + "--arch d", "--arch: must be key=value,key=value, got d"),
    ("pretrain " + BASE + "--arch q=3", "s4 on listops has no q; it has: dropout"),
    (
        "pretrain " + BASE + "--arch model=dlr",
        "s4 on listops has no model; it has: dropout layers d",
    ),
    ("pretrain " + BASE + "--arch dt_min=0", "dt_min=0, dt_max=0.1: must be 0 < dt_min <= dt_max"),
    (
        "finetune " + BASE + "--arch d=x",
        "--arch d=x: d must be a whole number of at least 1; s4 on listops has 128",
    ),
    (
        "finetune " + BASE + "--arch norm=group",
        "norm must be layer or batch or rms or scale; s4 on listops has batch",
    ),
    ("finetune " + BASE + "--batch 8 --arch d=65", "d=65 is not a multiple of n_ssm=128"),
    ("finetune --task image --model rotary --batch 8 --arch d=36", "turn pairs, not 9 dimensions"),
    ("finetune " + BASE + "--batch 25", "--batch 25 is more than the 24 training examples"),
    ("pretrain --task image --model pythia", "no recipe in pretraining for image/pythia/masked"),
    (
        "pretrain --task listops --model linformer --objective causal --batch 4",
        "no causal form; use",
    ),
    (
        "pretrain --task pathx --model transformer --objective causal --mask 0.5",
        "no meaning with --objective",
    ),
    ("pretrain " + BASE + "--loss l1", "listops has symbols; use --loss ce"),
    ("pretrain --task sc --model s4 --loss ce", "sc has none; use --loss l1"),
    ("finetune --task retrieval --model s4 --head linear", "--head pair is for two documents"),
    (
        "pretrain " + RESUME.replace("--resume", ""),
        "is not empty; add --resume, or choose another --out",
    ),
    (
        "pretrain " + RESUME + " --lr 5",
        "was started with lr = 0.001, now 5.0; give the same flags as before",
    ),
    ("finetune " + INIT + "--out pt/best.pt", "cannot write to --out"),
    ("finetune --init pt/best.pt", "best.pt is not a pretraining run"),
    ("finetune --init ft", "is not a pretraining run; run pretrain.py"),
    ("finetune --init pt --task text", "was pretrained with --task listops; leave --task out"),
    ("finetune --init pt --arch d=32", "--arch has no meaning with --init"),
    ("finetune --init pt --data-dir other", "its test split may hold what was pretrained on"),
    (
        "finetune WORLD_SIZE=9 RANK=0 MASTER_ADDR=x " + BASE + "--batch 8",
        "--batch 8 is smaller than 9 processes",
    ),
    *(
        []
        if torch.cuda.is_available()
        else [("pretrain " + BASE + "--device cuda", "use --device cpu")]
    ),
    ("pretrain missing:config.json " + RESUME, "has no config.json; it is not a run directory"),
    ("pretrain cut:config.json " + RESUME, "config.json is missing or damaged"),
    ("finetune missing:config.json --init pt", "pt is not a pretraining run"),
    (
        "pretrain cut:last.pt " + RESUME,
        "last.pt is missing, cut short, or not a checkpoint of this project",
    ),
    (
        "finetune pickle:best.pt " + INIT,
        "best.pt is missing, cut short, or not a checkpoint of this project",
    ),
    ("pretrain other:last.pt " + RESUME, "last.pt does not fit: Error"),
    ("finetune other:best.pt " + INIT, "pt holds another architecture than this run"),
    (
        "pretrain " + BASE + "--arch ffn_share=0.3",
        "s4 on listops has no ffn_share; it has: dropout",
    ),
    ("pretrain --sample pt", "unrecognized arguments: --sample pt"),
    ("predict nowhere", "nowhere has no best.pt; predict.py needs"),
    ("predict pt", "pt has objective masked; to continue a sequence"),
    ("predict pt --prompt x", "pt has objective masked; to continue a sequence"),
    ("predict pt --promt x", "unrecognized arguments"),
    ("predict pt --input own/whole.npz", "samples, but the model reads symbols"),
    (
        "predict pt --input own/text.csv",
        "pt is a pretraining run and predicts no labels; train a classifier from it: python",
    ),
    ("predict ft --input none.csv", "none.csv is not a file, or not there"),
    ("predict ft --input own", "own is a folder"),
    (
        "predict ft --input own/text.pdf",
        "text.pdf must end in one of .npz .csv .tsv .ts .txt .jsonl .parquet .xlsx",
    ),
    ("predict ft --input own/nothing.csv", "own/nothing.csv holds no sequence"),
    ("predict ft --input own/empty.npz", "samples, but the model reads symbols"),
    ("predict ft --input own/text.csv --out nowhere/p.csv", "cannot write nowhere/p.csv"),
    ("predict ft --input own/text.csv --features own", "cannot write own"),
    *(
        []
        if torch.cuda.is_available()
        else [
            (
                "predict ft --input own/text.csv --device cuda",
                "--device cuda, but torch sees no CUDA device",
            )
        ]
    ),
    (
        "predict ft --show sheet.png",
        "--show needs a run of pretrain.py, but ft is one of finetune.py",
    ),
    ("predict pt --show sheet.jpeg2", "give a file name that ends in .png, .pdf or .svg"),
    ("predict pt --export m.pt2", "--export needs a finetuned run, but pt is a pretraining run"),
    (
        "predict pickle:best.pt pt",
        "best.pt is missing, cut short, or not a checkpoint of this project",
    ),
    (
        "finetune " + BASE + "--mask 0.2",
        "--mask has no meaning in training from scratch; leave it out",
    ),
    ("finetune " + BASE + "--joint 0", "--joint: must be at least 1e-09, got 0"),
    ("finetune --task sc --model s4 --joint 1 --loss ce", "sc has none; use --loss l1"),
    (
        "finetune " + INIT + "--joint 1",
        "--joint has no meaning with --init; leave it out",
    ),
    (
        "finetune --task image --model pythia --joint 1",
        "--joint has no meaning with a model that has trained weights",
    ),
    (
        "finetune " + BASE + "--label-fraction 2",
        "--label-fraction: must be between 1e-09 and 1, got 2",
    ),
    (
        "finetune " + BASE + "--label-fraction 0.5 --train-fraction 0.5",
        "give only one of --label-fraction",
    ),
    ("finetune --task file:none.npz --model s4", "none.npz is not a file, or not there"),
    (
        "pretrain --task file:own/once.npz --model s4",
        "example 3: class c has only one example",
    ),
    ("pretrain --task ucr:A/B --model s4", "no task 'ucr:A/B'; the tasks are"),
    ("data --task patx", "pathx256"),
    ("data", "--task is missing; the tasks are: bidmc_hr"),
    ("data --tsk text", "unrecognized arguments: --tsk text"),
    ("data --task listops_demo --workers 0", "at least 1"),
    ("data --task text --seed 1", "leave"),
    ("data --task image --raw nowhere", "--raw nowhere has none of: cifar-10-binary"),
    ("data --task image --show a.jpeg2", ".png"),
    ("data --task retrieval", "retrieval cannot be downloaded"),
    ("data --task listops --data-dir afile", "afile"),
    ("data --task text --regression", "are for your data, and text is fixed; leave them out"),
    (
        "data --task file:own/whole.npz --train 5",
        "have no meaning for your data; leave them out",
    ),
    (
        "data --task file:own/text.pdf",
        "text.pdf must end in one of .npz .csv .tsv .ts .txt .jsonl .parquet .xlsx",
    ),
    ("data --task file:own/whole.npz --raw own", "--raw own has no meaning for file:"),
    (
        "data --task file:own/whole.npz --regression",
        "not every label is a number ('a' is no number)",
    ),
    ("data --task file:own/damaged.npz", "damaged.npz: "),
    (
        "data --task file:own/pickled.npz",
        "pickled.npz: it holds Python objects (set); save texts or numbers",
    ),
    ("data --task file:own/flat.npz", "it must hold numbers x (n, l) or (n, l, channels)"),
    ("data --task file:own/rows.npz", "shapes [(40, 6), (39,)] do not fit"),
    (
        "data --task file:own/splits.npz",
        "example 5: its split is none of train, val and test",
    ),
    (
        "data --task file:own/untrained.npz",
        "example 38: no training example has its label",
    ),
    (
        "data --task file:own/spanned.npz --regression",
        "example 0: its label is infinite",
    ),
    ("data --task file:own/endless.npz", "example 3: its label is infinite"),
    ("data --task file:own/infinite.npz", "example 9: a value is infinite"),
    (
        "data --task file:own/constant.npz",
        "constant.npz: no channel changes in the training examples",
    ),
    ("data --task file:own/empty.npz", "example 1: it is empty"),
    (
        "data --task file:own/negative.npz",
        "example 4: a negative or missing symbol",
    ),
    ("data --task file:own/oneclass.npz", "1 different labels, but there must be 2 to 256 classes"),
    ("data --task file:own/many.npz", "300 different labels, but there must be 2 to 256 classes"),
    (
        "data --task file:own/few.npz --regression",
        "1 / 1 / 1 examples to train, validate and test; every split",
    ),
    (
        "data --task file:own/numbers.npz",
        "70,000 different integers; are they symbols or samples? Say",
    ),
    (
        "data --task file:own/header.csv",
        "header.csv: 1 different labels, but there must be 2 to 256 classes (labels are those of "
        "column y;",
    ),
    (
        "data --task file:own/last.csv",
        "looks like the label ('yes'), the first does not ('0.5'); give --label 0, --label -1",
    ),
    (
        "data --task file:own/counts.npz",
        "different integers; are they symbols or samples? Say so with --symbols",
    ),
    (
        "data --task file:own/whole.npz --symbols",
        "example 0: not whole numbers in one channel",
    ),
    ("data --task file:own/whole.npz --group nothing", "its arrays are x, y; none is 'nothing'"),
    ("data --task text --group none", "text is fixed"),
    ("data --task file:own/nothing.csv", "nothing.csv holds no series"),
    (
        "data --task file:own/imaginary.npz --regression",
        "labels are complex128; they must be numbers or names",
    ),
    ("finetune flip:best.pt " + INIT, "wrong checksum"),
    ("predict flip:best.pt pt --features f.npy", "wrong checksum"),
    (
        "data --task file:own/mixed.csv",
        "mixed.csv: line 1 has 3 fields, and most lines have 2 ",
    ),
    (
        "data --task file:own/colons.ts",
        "colons.ts, line 3: not the numbers of each channel and a target",
    ),
    (
        "data --task ucr:Mine --raw own",
        "own must hold one Mine_TRAIN and one Mine_TEST, as .ts, .tsv or .txt",
    ),
    ("analyze table 4", "table 4: choose from 1, 2, 3, 7, 8, 9"),
    ("analyze demo --runs pt", "run_all.sh demo"),
    ("analyze figure 1 --runs nowhere", "no runs in nowhere"),
    ("analyze own --runs pt", "run_all.sh own"),
    ("analyze table 2 --perset mini", "unrecognized arguments: --perset mini"),
    ("analyze tabel 2", "invalid choice: 'tabel'"),
    ("analyze status own", "no run was started there"),
    ("run_all table4", "target: invalid choice: 'table4'"),
    ("run_all table2 --seeds a", "numbers"),
    ("run_all table2 --seeds", "argument --seeds: expected one argument"),
    ("run_all table2 --tasks text,imgae", "--tasks imgae"),
    ("run_all table2 --preset big", "--preset: invalid choice: 'big'"),
    ("run_all own", "own wants --tasks file:PATH"),
    ("run_all own --tasks my.npz", "no task 'my.npz'; the tasks are"),
    (
        "run_all own --tasks ucr:FordA --label-fraction 5",
        "--label-fraction: must be between 1e-09 and 1, got 5",
    ),
    ("run_all own --tasks file:none.npz", "none.npz is not a file, or not there"),
    (
        "run_all own --tasks file:own/infinite.npz",
        "example 9: a value is infinite",
    ),
    ("run_all own --tasks file:own/whole.npz --models s4,s5x", "--models s5x: choose from"),
    ("run_all own --task file:own/whole.npz", "unrecognized arguments: --task file:own/whole.npz"),
    (
        "run_all own --tasks file:own/whole.npz --models pythia",
        "whole.npz/pythia/masked; there are: ",
    ),
    ("data --task own/whole.npz", "did you mean file:own/whole.npz?"),
    ("data --task file:own/latin.csv", "latin.csv: 1 different labels"),
    ("data --task file:own/complex.npz", "x is complex128; it must hold numbers"),
    ("run_all table2 --regression", "--regression is for: run_all.sh own"),
    *(
        (f"run_all sweep --tasks text_demo --models s4 {words}", wanted)
        for words, wanted in (
            ("--vary nope=1", "--vary nope: no such flag; choose from: arch batch"),
            ("--vary lr=", "must be FLAG=VALUE,VALUE"),
            ("--vary lr=-1", "--lr: must be at least 0, got -1"),
            ("--vary arch.dd=3", "s4 on text_demo has no dd"),
            ("--vary arch.d=0", "d must be a whole number of at least 1"),
            ("--starts scratch,foo", "--starts foo: choose from"),
            ("--vary arch=32", "--vary arch: no such flag"),
            ("--vary lr=1 --vary lr=2", "--vary lr=2: must be FLAG=VALUE"),
            ("--vary objective=foo --starts joint", "invalid choice: 'foo'"),
            ("--starts ,", "words separated by commas"),
            ("--vary pretrain.arch.dd=3", "s4 on text_demo has no dd"),
            ("--vary schedule=cubic", "invalid choice: 'cubic'"),
            ("--vary finetune.mask", "must be FLAG=VALUE,VALUE"),
        )
    ),
    ("run_all sweep --models s4", "sweep wants --tasks and --models"),
    ("run_all sweep --tasks nothing --models s4", "no task 'nothing'"),
    ("run_all demo --models nothing", "--models nothing: choose from"),
    ("run_all demo --vary lr=1", "--vary is for"),
    ("run_all demo --select best", "invalid choice: 'best'"),
    ("analyze compare", "compare wants folders of runs"),
    ("analyze compare pt", "no finished finetuning run in pt"),
    ("analyze compare nowhere", "no runs in nowhere"),
    (
        "analyze compare ft --baseline lr=1 --select val",
        "--select: not allowed with argument --baseline",
    ),
    ("analyze compare ft --baseline lr=1", "--baseline lr: these runs differ in"),
    # what a disk, an editor or a stranger can do
    ("data --task file:own/huge.npz", "huge.npz: Unable to allocate 7.28 TiB"),
    ("data --task file:own/secret.npz", "secret.npz: File 'x.npy' is encrypted"),
    ("data --task file:own/method.npz", "method.npz: That compression method is not supported"),
    ("data --task file:own/bytes.npz", "bytes.npz: 'ascii' codec can't decode byte 0xe9"),
    (
        "data --task ucr:Secret --raw own",
        "Secret.zip is damaged: File 'Secret_TRAIN.ts' is encrypted",
    ),
    (f"data --task file:own/{'n' * 249}.csv", "is not a file, or not there"),
    (f"pretrain {BASE} --batch 8 --out {'o' * 300}", "File name too long"),
    ("predict ft --input own/huge.npz", "huge.npz: Unable to allocate 7.28 TiB"),
    ("predict ft --input own/secret.npz", "secret.npz: File 'x.npy' is encrypted"),
    *(
        (f"finetune {how}:config.json {INIT}", words)
        for how, words in (
            ("deep", "config.json is missing or damaged: maximum recursion depth"),
            ("list", "it is no JSON object"),
        )
    ),
    (f"pretrain still:last.pt {RESUME}", "last.pt does not fit: KeyError 'optimizer'"),
    (
        "pretrain bare:last.pt " + RESUME,
        "last.pt is missing, cut short, or not a checkpoint of this project: ",
    ),
    (
        "finetune bare:best.pt " + INIT,
        "best.pt is missing, cut short, or not a checkpoint of this project: ",
    ),
    ("predict sizeless:ft/best.pt ft", "best.pt does not fit its own sizes: "),
    *(
        (f"analyze {how}:ft/result.json compare ft", "result.json is damaged: ")
        for how in ("list", "text", "number", "fields", "deep", "steps")
    ),
    *(
        (
            f"predict {how}:ft/result.json ft",
            "result.json is missing or damaged: it is no JSON object",
        )
        for how in ("list", "text", "number")
    ),
    (
        "data sizes:data/listops_demo/meta.json --task listops_demo",
        "listops_demo is damaged: the sizes of its arrays",
    ),
    (
        "data found:data/listops_demo/meta.json --task listops_demo",
        "damaged: 'list' object has no attribute 'items'",
    ),
    ("data cut:data/listops_demo/val_x.npy --task listops_demo", "listops_demo is damaged: "),
    (
        "analyze figure 4 --runs kept",
        "kernels.npz is damaged: all input arrays must have the same shape",
    ),
    (
        "analyze cut:kept/k/kernels.npz figure 4 --runs kept",
        "kernels.npz is damaged: File is not a zip file",
    ),
    (
        "analyze cut:kept/k/kernels.npz keep --runs kept",
        "kernels.npz is missing or damaged: File is not a zip file",
    ),
    (
        "analyze compare ft --figure f.xyz",
        "--figure 'f.xyz': give a file name that ends in .png, .pdf or .svg",
    ),
    ("analyze compare ft --figure own", "--figure 'own': give a file name"),
    (
        "data --task file:own/whole.npz --show pictures.png",
        "--show 'pictures.png': give a file name",
    ),
    ("run_all JOBS=abc demo", "JOBS must be a number of runs side by side, got 'abc'"),
    ("run_all demo --seeds 9223372036854775808", "--seeds: must be numbers of at most 18 digits"),
]


def own_files(folder):
    """Files of 40 labelled series that have one thing wrong each."""
    folder.mkdir()
    x, y = np.random.default_rng(0).normal(size=(40, 6, 2)), np.arange(40) % 2
    infinite, constant, empty, negative = (
        x.copy(),
        x.copy(),
        x.copy(),
        np.tile(np.arange(6), (40, 1)),
    )
    infinite[9, 0, 0], constant[:], empty[1], negative[4, 2] = np.inf, 3, np.nan, -1
    label = y.astype("U9")
    once, untrained, endless = label.copy(), label.copy(), y.astype(float)
    once[3], untrained[[38, 39]], endless[3] = "c", ["d", "d"], np.inf
    splits = np.repeat(["train", "test"], [38, 2])
    wrong = splits.copy()
    wrong[5] = "?"
    for name, arrays in dict(
        whole=dict(x=x, y=np.where(y, "b", "a")),
        other=dict(x=x),
        flat=dict(x=x[:, 0, 0], y=y),
        pickled=dict(x=np.array([{1}, {2}]), y=y[:2]),
        rows=dict(x=x[:, :, 0], y=y[:39]),
        splits=dict(x=x, y=y, split=wrong),
        untrained=dict(x=x, y=untrained, split=splits),
        once=dict(x=x, y=once),
        imaginary=dict(x=x, y=y * 1j),
        counts=dict(x=np.arange(1500).reshape(500, 3), y=np.arange(500) % 2),
        endless=dict(x=x, y=endless),
        spanned=dict(x=x, y=np.where(y, 1e308, -1e308)),
        infinite=dict(x=infinite, y=y),
        constant=dict(x=constant, y=y),
        empty=dict(x=empty, y=y),
        negative=dict(x=negative, y=y),
        complex=dict(x=x[:, :, 0] + 1j, y=y),
        oneclass=dict(x=x, y=y * 0),
        many=dict(x=np.random.rand(900, 2), y=np.arange(900) // 3),
        few=dict(x=x[:3], y=[5.0, 6.0, 7.0]),
        numbers=dict(x=np.arange(100_000).reshape(1000, 100), y=np.arange(1000) % 2),
    ).items():
        np.savez(folder / f"{name}.npz", **arrays)
    whole = (folder / "whole.npz").read_bytes()
    for name, content in {
        "damaged.npz": whole[: len(whole) // 2],
        "text.pdf": b"%PDF",
        "header.csv": b"y,x1,x2\n1,2,3\n",
        "text.csv": b"1,[MAX 3 4 X\n",
        "nothing.csv": b"\n",
        "last.csv": b"0.5,1.5,yes\n2.5,1,no\n",
        "latin.csv": b"a,\xe9t\xe9\n",
        "mixed.csv": b"1,2,3\n2,some text\n" + b"1,3\n2,4\n" * 9,
        "colons.ts": b"@data\n1,2:a\n1,2:3:a\n",
    }.items():
        (folder / name).write_bytes(content)
    np.savez(folder / "bytes.npz", x=x, y=np.where(y, b"\xe9", b"a"))
    # terabytes
    with zipfile.ZipFile(folder / "huge.npz", "w") as archive, archive.open("x.npy", "w") as file:
        np.lib.format.write_array_header_1_0(
            file, dict(descr="<f8", fortran_order=False, shape=(10**6, 10**6))
        )
    with zipfile.ZipFile(folder / "Secret.zip", "w") as archive:
        archive.writestr("Secret_TRAIN.ts", "@data\n1,2:a\n")
    (folder / "method.npz").write_bytes(whole)
    (folder / "secret.npz").write_bytes(whole)
    for name, place, value in (("secret.npz", 8, 1), ("Secret.zip", 8, 1), ("method.npz", 10, 99)):
        spoiled = bytearray((folder / name).read_bytes())
        # in the directory, beside each member
        for mark, shift in ((b"PK\1\2", place), (b"PK\3\4", place - 2)):
            for found in re.finditer(re.escape(mark), bytes(spoiled)):
                spoiled[found.start() + shift] = value
        (folder / name).write_bytes(spoiled)


JSON = dict(list=[], text="x", number=5, fields={})
EDITS = dict(  # what an editor changes in a JSON object or a checkpoint
    steps=lambda it: it.pop("steps"),
    found=lambda it: it.update(found=[]),
    sizes=lambda it: it["flags"].update(sizes=[23, 9, 7]),
    bare=lambda it: it.update(model=None),
    still=lambda it: it.pop("optimizer"),
    sizeless=lambda it: it["config"].pop("arch"),
)


def edited(how, path):
    it = torch.load(path) if path.suffix == ".pt" else json.loads(path.read_text())
    EDITS[how](it)
    torch.save(it, path) if path.suffix == ".pt" else path.write_text(json.dumps(it))


def damage(how, path):
    whole = path.read_bytes()
    if how == "flip":
        path.write_bytes(whole[:-9000] + bytes([whole[-9000] ^ 1]) + whole[-8999:])
        return
    if path.name not in ("result.json", "kernels.npz"):
        path.with_name("result.json").unlink(missing_ok=path.parent.name not in ("pt", "ft"))
    if how in JSON or how == "deep":
        path.write_text("[" * 100_000 if how == "deep" else json.dumps(JSON[how]))
    elif how in EDITS:
        edited(how, path)
    elif how == "missing":
        path.unlink()
    elif how == "other":
        shutil.copy(path.parent.with_name("other") / path.name, path)
    else:  # a pickle makes a folder when it is read
        path.write_bytes(
            dict(cut=whole[: len(whole) // 2], pickle=b"cos\nmkdir\n(S'executed'\ntR.")[how]
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a pretraining run, pt, one with another model, other, and a finetuning run,
    ft."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        for stage, out, model in (
            (pretrain, "pt", "s4"),
            (pretrain, "other", "rotary"),
            (finetune, "ft", "s4"),
        ):
            patch.setattr(setup_py, "open_task", opened)
            stage.main(
                flags(folder / out, model=model, log_every=None, warmup=None, steps=2, eval_every=2)
            )
    own_files(folder / "own")
    (folder / "data.py").symlink_to(ROOT / "data.py")  # which run_all.sh calls
    data.prepare("listops_demo", str(folder / "data"), (24, 9, 7), workers=1)
    (folder / "pictures.png").mkdir()
    kernels = put(folder / "kept", "k", task="listops") / "kernels.npz"
    np.savez(kernels, before=np.ones((1, 2, 5)), after=np.ones((2, 2, 5)))
    (folder / "afile").touch()
    return folder


@pytest.mark.parametrize("command, words", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(
    command, words, runs, monkeypatch, capfd, tmp_path
):
    shutil.copytree(runs, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.setattr(running, "ROOT", tmp_path)
    script, *rest = command.split()
    argv = ["--data-dir", "."] if script in ("pretrain", "finetune", "predict") else []
    for word in rest:
        if re.match("[A-Z_]+=", word):
            monkeypatch.setenv(*word.split("="))
        elif len(parts := word.split(":")) == 2 and parts[0] in {*DAMAGES, *JSON, *EDITS}:
            damage(parts[0], tmp_path / ("" if "/" in parts[1] else "pt") / parts[1])
        else:
            argv.append(word)
    before = contents(tmp_path)
    done = call({"run_all": "run_all.sh"}.get(script, f"{script}.py"), *argv)
    line = done.stderr + capfd.readouterr().err  # of data.py, which run_all.sh starts
    assert done.returncode == 2 and words in line and line.count("\n") == 1 and "error: " in line
    assert contents(tmp_path) == before and not [
        *tmp_path.rglob(".file-*.lock"),
        *tmp_path.rglob(".ucr-*.lock"),
    ]


def test_what_is_no_record_is_named_and_does_not_count(runs, tmp_path, monkeypatch, capsys):
    """By `own` and `status`, which go on with the others."""
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        shutil.copytree(runs / "ft", tmp_path / "runs" / name)
    for how in ("list", "text", "number", "fields", "deep"):
        damage(how, tmp_path / "runs" / "two" / "result.json")
        for command in ("own", "status"):
            assert analyze.main([command, "runs"]) == 0
            said = capsys.readouterr()
            assert said.err.startswith("warning: a run in runs/two/result.json is skipped: ")
            assert "1 of 2 runs are done" in said.out or "decide nothing" in said.out
    (tmp_path / "runs" / "two" / "result.json").unlink()
    (tmp_path / "runs" / "two" / "log.jsonl").write_bytes(
        b'garbage}\n5\n[]\n\xff}\n{"step": 3, "total": 9}\n{"step": 4,'
    )
    assert analyze.main(["status", "runs"]) == 0 and "running  two: 3/9" in capsys.readouterr().out


def test_dollars_and_bars_in_names(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs / "ft", tmp_path / "runs" / "ft")
    record = json.loads((tmp_path / "runs" / "ft" / "result.json").read_text())
    name = r"file:/a|$\frac$|b_$^$.npz"
    put(tmp_path / "runs", "other", **record | dict(seed=1, task=name))
    for command in ("compare", "own"):
        assert analyze.main([command, "runs", "--figure", f"{command}.png"]) == 0
        assert (tmp_path / f"{command}.png").read_bytes()[:4] == b"\x89PNG"
        for table in re.findall(r"(?:^\|.*\n)+", capsys.readouterr().out, re.M):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_terminals(runs, tmp_path):
    """That know ASCII alone, take nothing more, or are gone."""
    shutil.copytree(runs / "ft", tmp_path / "ft")

    def run(command, **more):
        words = f"python {ROOT}/{command}; exit ${{PIPESTATUS[0]}}"
        return subprocess.run(
            ["bash", "-c", words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env=os.environ | dict(OMP_NUM_THREADS="1") | more,
        )

    def alone(command):
        return run(command, PYTHONIOENCODING="ascii")

    def lost(command):
        return run(f"{command} | true", PYTHONUNBUFFERED="1")

    with ThreadPoolExecutor(2) as pool:
        compared = pool.submit(alone, "analyze.py compare ft")
        full = pool.submit(run, "data.py --list > /dev/full")
        gone = pool.map(
            lost,
            [
                "predict.py ft --features f.npy --input none.csv",
                "data.py --list",
                f"analyze.py compare ft --figure {tmp_path}/lost.png",
            ],
        )
    assert compared.result().returncode == 0 and compared.result().stderr == ""
    assert "? standard deviation" in compared.result().stdout
    for done in gone:
        assert done.returncode in (2, 141) and done.stderr.count("\n") == (done.returncode == 2)
    assert (full.result().returncode, full.result().stderr) == (
        2,
        "error: [Errno 28] No space left on device\n",
    )


def test_there_are_many():
    assert len({command for command, _ in MISTAKES}) == len(MISTAKES) >= 50
