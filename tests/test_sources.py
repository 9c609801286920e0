"""The tasks that are downloaded or read: made archives in the official formats, a server with
faults, and the real files where they are at hand."""

import hashlib
import io
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import wave
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from test_data import calculator, check_batch, digest, fails, sequences, wait_for

import data
import tasks
from tasks.bidmc import official_windows
from tasks.speech import WORDS
from zoo import pythia

SAMPLES = ROOT.parent / "shared" / "data"
real = pytest.mark.skipif(not SAMPLES.is_dir(), reason="the real samples are not here")
NAME = "aclImdb_v1.tar.gz"


# ---- made files ----------------------------------------------------------------------------------


def tar(path, members):
    """A .tar.gz of {name: bytes}."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def unpack(folder, members):
    for name, content in members.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def listops():
    lines = "Source\tTarget\r\n( ( ( [MAX 4 ) 3 ) ] )\t4\r\n[SM " + "1 " * 3000 + "]\t0\r\n"
    return {f"basic_{split}.tsv": lines.encode() for split in tasks.SPLITS}


def imdb():
    """60 training and 20 test reviews; one longer than a task's length, characters below and at the
    threshold of 15."""
    members = {
        "aclImdb/README": b"about",
        "aclImdb/train/unsup/0_0.txt": "ignored \u4e2d".encode() * 20,
    }
    for split, n in (("train", 30), ("test", 10)):
        for i in range(n):
            # of frequent characters
            number = format(i, "06b").replace("0", "fi").replace("1", "lm")
            members[f"aclImdb/{split}/neg/{i}_2.txt"] = (
                f"Bad {number}.<br />\u00e9\u00e9 awful {split}".encode()
            )
            members[f"aclImdb/{split}/pos/{i}_9.txt"] = (
                f'Good "{number}" {split}' * (99 if i == 3 else 1)
            ).encode()
    members["aclImdb/train/pos/0_9.txt"] = b"rare: \xf0\x9f\x98\x80 once, broken \xff byte"
    members["aclImdb/train/pos/1_9.txt"] = ("\u00f8" * 14 + "\u00df" * 15).encode()
    return members


MANY = "".join(map(chr, range(0x4E00, 0x4E00 + 400)))  # more symbols than a byte holds
AAN = (
    '1.0\tA1\tB1\tplain text\tanother "quoted" word inside\n'
    '0.0\tA2\tB2\t"a tab\there, a line\nend, ""doubled"" quotes"\tb\n'
    f"1.0\tA3\tB3\t{'x' * 5000}\t{MANY}\n"
)


def aan():
    others = "\ufeff0\tA\tB\tbax\t\u00fc\n"  # a byte order mark is no text
    return {
        f"new_aan_pairs.{split}.tsv": text.encode()
        for split, text in zip(("train", "eval", "test"), (AAN, others, others))
    }


def cifar(n=40):
    """Random batches {name: (labels, planes)} -> these, the binary files."""
    rng, batches = np.random.default_rng(0), {}
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        batches[name] = (
            rng.integers(0, 10, n).astype(np.uint8),
            rng.integers(0, 256, (n, 3072)).astype(np.uint8),
        )
    return batches, {
        f"cifar-10-batches-bin/{name}.bin": np.concatenate([labels[:, None], planes], 1).tobytes()
        for name, (labels, planes) in batches.items()
    }


def bidmc(n=40):
    """Random windows -> the two .ts files, their values (n, 4000, 2) and targets."""
    rng = np.random.default_rng(0)
    series, targets = rng.normal(0, 1, (n, 4000, 2)).round(5), rng.normal(60, 9, n).round(3)
    targets[[4, 11]] = 20, 99  # of test and validation: the training range does not hold them
    lines = [
        ":".join([*(",".join(map(str, channel)) for channel in example.T), str(y)])
        for example, y in zip(series, targets)
    ]
    head = "# made\n@problemName BIDMC\n@univariate false\n@targetlabel true\n@data\n"
    halves = {"BIDMC32HR_TRAIN.ts": lines[:25], "BIDMC32HR_TEST.ts": lines[25:]}
    return (
        {name: (head + "\n".join(some) + "\n").encode() for name, some in halves.items()},
        series,
        targets,
    )


def speech():
    """Clips of half a second to one; the lists name some, and one that is not there."""
    members = {
        "./validation_list.txt": b"bed/2.wav\nzero/9.wav\n",
        "./testing_list.txt": b"zero/0.wav\nvisual/1.wav\n",
    }
    for word in ("bed", "visual", "zero", "_background_noise_"):
        for i in range(3):
            file = io.BytesIO()
            with wave.open(file, "wb") as clip:
                clip.setparams((1, 2, 16_000, 0, "NONE", ""))
                clip.writeframes(os.urandom(2 * (16_000 - 4_000 * i)))
            members[f"./{word}/{i}.wav"] = file.getvalue()
    return members


def lra_images():
    """Two batches, text order not being number order, one image empty -> files, level and label of
    the other images."""
    members, expected = {}, []
    for batch, size in (2, 12), (10, 11):
        lines = []
        for i in range(size):
            file, level, label, empty = (
                io.BytesIO(),
                len(expected) + 1,
                i % 2,
                batch == 2 and i == 3,
            )
            Image.fromarray(np.full((32, 32), level, np.uint8)).save(file, "png")
            members[f"imgs/{batch}/sample_{i}.png"] = b"" if empty else file.getvalue()
            lines.append(f"imgs/{batch} sample_{i}.png {i} {label} 1.0 14 4 2 0.5 1 1\n")
            expected += [] if empty else [(level, label)]
        members[f"metadata/{batch}.npy"] = "".join(lines).encode()
    return {
        f"pathfinder32/curv_contour_length_14/{name}": raw for name, raw in members.items()
    }, expected


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """Made files of every source in one folder, those of LRA as its archive unpacks."""
    folder = tar(tmp_path_factory.mktemp("raw") / NAME, imdb()).parent
    tar(folder / "cifar-10-binary.tar.gz", cifar()[1])
    tar(folder / "speech_commands_v0.02.tar.gz", speech())
    unpack(
        folder / "lra_release" / "lra_release",
        {f"listops-1000/{name}": some for name, some in listops().items()}
        | lra_images()[0]
        | {f"tsv_data/{name}": some for name, some in aan().items()},
    )
    return unpack(folder, bidmc()[0])


@pytest.fixture(scope="module")
def prepared(raw, tmp_path_factory):
    """Tasks that are read, by the command."""
    folder = tmp_path_factory.mktemp("prepared")
    for name in (
        "listops",
        "text256",
        "retrieval",
        "image",
        "pathfinder",
        "scifar",
        "scifar_mini",
        "bidmc_hr",
        "sc",
    ):
        sizes = ("--train", "180", "--val", "20", "--test", "40") if name == "scifar_mini" else ()
        assert (
            data.main(["--task", name, "--data-dir", str(folder), "--raw", str(raw), *sizes]) == 0
        )
    return folder


# ---- every official format -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["listops", "text256", "retrieval", "image", "pathfinder", "scifar", "bidmc_hr", "sc"]
)
def test_batches_and_show_of_read_tasks(prepared, tmp_path, name):
    """The laws of test_data.py, and a picture; one line where --raw holds nothing."""
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path}/empty" in fails(
        "--task", name, "--data-dir", tmp_path, "--raw", tmp_path / "empty"
    )
    task, train, *_ = data.open_task(name, prepared)
    check_batch(task, train, (0, 1, 0))
    assert task.data["source"] == "official files" and task.data["seed"] == 0
    data.show(name, prepared, tmp_path / "sheet.png")
    picture = np.asarray(Image.open(tmp_path / "sheet.png").convert("L")).astype(int)
    middle = picture.shape[1] // 2
    # what is hidden shows
    assert (abs(picture[60:, :middle] - picture[60:, -middle:]) > 40).mean() > 0.005


def test_a_set_of_official_files_needs_them_once(tmp_path):
    folder = unpack(tmp_path / "raw", listops())
    words = ["--task", "listops", "--data-dir", str(tmp_path), "--raw", str(folder)]
    assert data.main(words) == 0
    shutil.rmtree(folder)
    assert data.main(words) == data.main(words[:4]) == 0
    assert "raw (" in fails(*words[:-1], tmp_path)


class Evil:
    def __reduce__(self):
        return os.system, ("echo executed > executed",)


@pytest.mark.parametrize(
    "name, file, content, words",
    [
        ("listops", "basic_val.tsv", "Source\tTarget\r\n[MUL 4 ]\t4\r\n", "basic_val.tsv, line 2"),
        (
            "pathfinder",
            "pathfinder32/curv_contour_length_14/imgs/10/sample_1.png",
            "no image",
            "sample_1.png",
        ),
        (
            "pathfinder",
            "pathfinder32/curv_contour_length_14/metadata/10.npy",
            "imgs/10 missing.png 0 7",
            "missing.png",
        ),
        ("retrieval", "new_aan_pairs.train.tsv", AAN + "1.0\tA\tB\tx\n", "train.tsv, line 5"),
        ("bidmc_hr", "BIDMC32HR_TEST.ts", "@data\n1,2,3:4,5,6:7\n", "TEST.ts, line 2"),
        ("image", "cifar-10-batches-bin/data_batch_3.bin", "\0" * 3072, "not the whole CIFAR-10"),
        (
            "image",
            "cifar-10-batches-py/data_batch_2",
            pickle.dumps({b"data": Evil()}, 2).decode("latin-1"),
            "system",
        ),
    ],
)
def test_damaged_files(tmp_path, monkeypatch, name, file, content, words):
    monkeypatch.chdir(tmp_path)
    whole = dict(
        listops=listops,
        pathfinder=lambda: lra_images()[0],
        retrieval=aan,
        bidmc_hr=lambda: bidmc()[0],
        image=lambda: cifar(4)[1],
    )[name]
    unpack(
        tmp_path / "raw",
        whole() | {file: content.encode("latin-1" if name == "image" else "utf-8")},
    )
    assert words in fails("--task", name, "--data-dir", "data", "--raw", "raw")
    assert (
        not (tmp_path / "executed").exists()
        and not (tmp_path / "data" / name / "meta.json").exists()
    )


def test_files_of_the_lra_release(prepared):
    """Expressions without parentheses, cut to 2,047 symbols and <eos>; images of batch 2 before
    those of batch 10."""
    batch = data.open_task("listops", prepared)[1].batch([0, 1])
    assert batch.symbols[0, :5].tolist() == [15, 8, 7, 18, 3] and batch.lengths.tolist() == [
        5,
        2048,
    ]
    assert batch.symbols[1, -2:].tolist() == [5, 3] and batch.y.tolist() == [4, 0]
    expected, shuffled = (
        lra_images()[1],
        torch.randperm(22, generator=torch.Generator().manual_seed(42)).tolist(),
    )
    splits = data.open_task("pathfinder", prepared)[1:]
    assert [(int(x.max()), int(y)) for split in splits for x, y in zip(split.x, split.y)] == [
        expected[i] for i in shuffled
    ] and [len(split) for split in splits] == [18, 2, 2]


def test_text(prepared, raw, monkeypatch, tmp_path):
    """Every review against its file, by the rules spelled out again: characters, 15 occurrences,
    cut, <eos>. An archive and a folder give the same; one cut short is refused, and one of the
    official size with another checksum."""
    made, texts = imdb(), {"train": {}, "test": {}}
    data.prepare("text256", tmp_path, raw=unpack(tmp_path / "unpacked", made) / "aclImdb")
    assert digest(tmp_path / "text256") == digest(prepared / "text256")
    for name, content in made.items():
        if re.search("/(neg|pos)/", name):
            texts[name.split("/")[1]][content.decode("utf-8", "replace")[:255]] = int(
                "/pos/" in name
            )
    letters = "".join(texts["train"])
    known = sorted(
        (c for c in set(letters) if letters.count(c) >= 15), key=lambda c: (-letters.count(c), c)
    )
    task, *splits = data.open_task("text256", tmp_path)
    assert task.symbols == ("<mask>", "<pad>", "<unk>", "<eos>", *known) and "\u00df" in known
    train, val, test = (
        {"".join(task.symbols[i] for i in ids[:-1]): y for ids, y in zip(sequences(split), split.y)}
        for split in splits
    )
    for some, seen in ("train", train | val), ("test", test):
        assert seen == {
            "".join(c if c in known else "<unk>" for c in text): y
            for text, y in texts[some].items()
        }
    # of the negative and the positive
    shuffled = torch.randperm(60, generator=torch.Generator().manual_seed(42))
    assert splits[1].y.tolist() == (shuffled[54:] >= 30).long().tolist()
    point(monkeypatch, "text256", "", bytes=(raw / NAME).stat().st_size, sha256="0")
    unpack(tmp_path / "half", {NAME: (raw / NAME).read_bytes()[:1000]})
    for folder, words in (tmp_path / "half", "is damaged: "), (raw, "wrong checksum"):
        assert words in fails(
            "--task", "text256", "--data-dir", tmp_path / "again", "--raw", folder
        )


def test_retrieval(prepared, raw, tmp_path):
    """The vocabulary is that of the training texts; sequences 2i and 2i + 1 are example i."""
    texts = [
        ("plain text", 'another "quoted" word inside', 1),
        ('a tab\there, a line\nend, "doubled" quotes', "b", 0),
        ("x" * 3999, MANY, 1),
    ]
    task, train, val, _ = data.open_task("retrieval", prepared)
    assert task.vocab == 4 + len(set("".join(a + b for a, b, _ in texts))) > 400
    batch = train.batch([1, 0, 2])
    assert batch.symbols.shape == (6, 4000) and batch.y.tolist() == [0, 1, 1]
    for i, which in enumerate((1, 0, 2)):
        for j in (0, 1):
            ids = batch.symbols[2 * i + j, : batch.lengths[2 * i + j] - 1]
            assert "".join(task.symbols[t] for t in ids) == texts[which][j]
    assert [[task.symbols[t] for t in ids] for ids in val.batch([0]).symbols] == [
        ["b", "a", "x", "<eos>"],
        ["<unk>", "<eos>", "<pad>", "<pad>"],
    ]
    line = fails(
        "--task", "retrieval", "--data-dir", tmp_path, "--raw", raw, "--train", 3, "--val", 7
    )
    assert "1 examples for val, not 7" in line


def test_cifar(prepared, tmp_path):
    """Each pixel where it belongs; the split that random_split draws; gray as PIL makes it; side
    12: each pixel is the mean of the original ones whose centres lie in its 8/3 x 8/3. Pickled
    batches hold the same as binary ones."""
    batches, _ = cifar()
    pickled = {
        f"cifar-10-batches-py/{name}": pickle.dumps({b"labels": y.tolist(), b"data": x}, 2)
        for name, (y, x) in batches.items()
    }
    data.prepare("scifar", tmp_path, raw=unpack(tmp_path / "pickled", pickled))
    assert digest(tmp_path / "scifar") == digest(prepared / "scifar")
    labels, planes = (
        np.concatenate([batches[f"data_batch_{i}"][k] for i in range(1, 6)]) for k in (0, 1)
    )
    subsets = torch.utils.data.random_split(
        range(200), [180, 20], torch.Generator().manual_seed(42)
    )
    under = (np.arange(32) + 0.5) * 12 // 32 == np.arange(12)[:, None]  # (12, 32)
    weights = under / under.sum(1, keepdims=True)
    gray, colour, small = (
        data.open_task(name, prepared)[1:] for name in ("image", "scifar", "scifar_mini")
    )
    for i, members in enumerate(map(list, subsets)):
        assert all((opened[i].y == labels[members]).all() for opened in (gray, colour, small))
        assert (colour[i].x.transpose(0, 2, 1).reshape(-1, 3072) == planes[members]).all()
        for x, pixels in zip(gray[i].x, colour[i].x.reshape(-1, 32, 32, 3)):
            assert (np.asarray(Image.fromarray(pixels).convert("L")).reshape(-1) == x[:, 0]).all()
        wanted = np.einsum("hi,wj,nijc->nhwc", weights, weights, colour[i].x.reshape(-1, 32, 32, 3))
        assert np.abs(wanted.reshape(-1, 144, 3) - small[i].x).max() <= 1
    assert (colour[2].y == batches["test_batch"][0]).all()


def test_bidmc(prepared):
    """Targets in [-1, 1] by the training range; scikit-learn's train_test_split(range(10),
    test_size=0.3, random_state=0) is documented to give these."""
    train, val, test = official_windows(10)
    assert (
        train.tolist() == [9, 1, 6, 7, 3, 0, 5] and val.tolist() == [8] and test.tolist() == [2, 4]
    )
    for name, n in (("bidmc_rr", 7870), ("bidmc_hr", 7949), ("bidmc_spo2", 7949)):
        members = official_windows(n)
        assert tuple(map(len, members)) == tasks.TASKS[name].sizes
        assert sorted(np.concatenate(members)) == list(range(n))
    (_, series, targets), windows = bidmc(), official_windows(40)
    task, *splits = data.open_task("bidmc_hr", prepared)
    low, high = task.ends
    assert (low, high) == (min(targets[windows[0]]), max(targets[windows[0]]))
    for split, members in zip(splits, windows):
        batch = split.batch(range(len(split)))
        assert (
            np.allclose(batch.samples, series[members], atol=1e-6)
            and batch.y.dtype == torch.float32
        )
        assert np.allclose((batch.y + 1) / 2 * (high - low) + low, targets[members], atol=1e-4)


@pytest.mark.parametrize(
    "place, sizes",
    [
        ("made", [6, 1, 2]),
        pytest.param(SAMPLES / "speech_commands_v0.02_subset.tar.gz", [25, 1, 1212], marks=real),
    ],
)
def test_speech(raw, tmp_path, place, sizes):
    """Official lists, labels in the official order, silence after a clip's end, one mean and
    deviation."""
    place = raw / "speech_commands_v0.02.tar.gz" if place == "made" else place
    data.prepare("sc", tmp_path, raw=place.parent)
    _, *splits = data.open_task("sc", tmp_path)
    assert [len(split) for split in splits] == sizes
    x = splits[0].batch(range(sizes[0])).samples
    assert abs(x.mean()) < 1e-3 and abs(x.std() - 1) < 1e-3
    with tarfile.open(place) as archive:
        found = {
            member.name.split("/", 1)[-1]: archive.extractfile(member).read()
            for member in archive
            if member.isfile()
        }
    listed = [clip for clip in found["testing_list.txt"].decode().split() if clip in found]
    expected = {
        (found[clip][44:].ljust(32_000, b"\0"), WORDS.index(clip.split("/")[0])) for clip in listed
    }
    assert {(np.array(x).tobytes(), int(y)) for x, y in zip(splits[2].x, splits[2].y)} == expected
    assert [WORDS.index(word) for word in ("bed", "visual", "zero")] == [0, 15, 34]


# ---- real files ----------------------------------------------------------------------------------


@real
def test_listops_real(tmp_path):
    data.prepare("listops", tmp_path, raw=SAMPLES / "listops")
    for split, size in zip(data.open_task("listops", tmp_path)[1:], (8000, 1000, 1000)):
        assert len(split) == size
        for ids, label in list(zip(sequences(split), split.y))[::97]:
            assert ids[-1] == tasks.EOS and calculator(ids[:-1])[0] == label


@real
def test_text_real(tmp_path):
    """All of IMDb: split sizes, class counts, vocabulary."""
    data.prepare("text", tmp_path, raw=SAMPLES)
    task, train, val, test = data.open_task("text", tmp_path)
    assert task.vocab == 135 and task.data["sizes"] == [22_500, 2_500, 25_000] == list(task.sizes)
    assert (
        np.bincount(np.concatenate([train.y, val.y])).tolist()
        == np.bincount(test.y).tolist()
        == [12_500, 12_500]
    )
    assert np.diff(train.offsets).max() == 4096 and (np.asarray(test.x) == tasks.UNK).mean() < 1e-4


@real
def test_cifar_real(tmp_path):
    """The pickled subset against the gray file, which was made from the full set; the full split
    sizes."""
    for name, file in (("gray", "cifar10_gray.npz"), ("colour", "cifar-10-python-10k-2k.tar.gz")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).symlink_to(SAMPLES / file)
        data.prepare("image", tmp_path / name, raw=tmp_path / name)
    task, train, val, test = data.open_task("image", tmp_path / "gray")
    assert task.data["sizes"] == [45_000, 5_000, 10_000]
    assert np.bincount(np.concatenate([train.y, val.y])).tolist() == [5_000] * 10
    # the first 2,000 test images, in official order
    small = data.open_task("image", tmp_path / "colour")[3]
    assert (small.x == test.x[:2000]).all() and (small.y == test.y[:2000]).all()
    assert "colour" in fails(
        "--task", "scifar", "--data-dir", tmp_path / "c", "--raw", tmp_path / "gray"
    )


# ---- downloads -----------------------------------------------------------------------------------


def point(monkeypatch, name, *urls, **more):
    """Let a task download these instead."""
    task = tasks.TASKS[name]
    monkeypatch.setitem(
        tasks.TASKS, name, replace(task, source=replace(task.source, urls=urls, **more))
    )


@pytest.fixture
def reviews(tmp_path):
    return tar(
        tmp_path / "made" / NAME, imdb() | {"aclImdb/noise": os.urandom(3_000_000)}
    ).read_bytes()


@pytest.mark.parametrize("fault", ["cut", "norange", "503"])
@pytest.mark.parametrize("junk", [0, 500, 10_000_000])
def test_download_succeeds(server, monkeypatch, tmp_path, reviews, fault, junk):
    """Whatever fails on the way, and whatever lies about under the name of the part."""
    point(
        monkeypatch,
        "text256",
        server(NAME, reviews, fault),
        sha256=hashlib.sha256(reviews).hexdigest(),
    )
    folder = tmp_path / "downloads"
    folder.mkdir()
    (folder / f"{NAME}.part").write_bytes(b"?" * junk)
    data.prepare("text256", tmp_path)
    assert (folder / NAME).read_bytes() == reviews and len(
        data.open_task("text256", tmp_path)[1]
    ) == 54
    assert fault != "norange" or len(server.log) == 1  # all that came took the place of the part


@pytest.mark.parametrize(
    "fault, words",
    [("403", "403 Client Error: Forbidden"), ("wrong", "wrong checksum"), ("nobody", "refused")],
)
def test_download_fails_in_one_line(server, monkeypatch, tmp_path, reviews, fault, words):
    url = server(NAME, reviews, fault) if fault != "nobody" else f"http://127.0.0.1:9/{NAME}"
    point(monkeypatch, "text256", url, sha256=hashlib.sha256(reviews).hexdigest())
    line = fails("--task", "text256", "--data-dir", tmp_path)
    assert words in line and url in line and "aclImdb/" in line and "Max retries" not in line
    assert len(server.log) in (0, 1, 4)
    assert f"python data.py --task text256 --data-dir {tmp_path} --raw DIR" in line
    assert (
        not (tmp_path / "text256" / "meta.json").exists()
        and not (tmp_path / "downloads" / NAME).exists()
    )


def test_full_disk(server, monkeypatch, tmp_path, reviews):
    point(monkeypatch, "text256", server(NAME, reviews, "norange"))
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / f"{NAME}.part").symlink_to("/dev/full")
    line = fails("--task", "text256", "--data-dir", tmp_path)
    assert "No space left" in line


def test_killed_while_downloading(server, tmp_path, reviews):
    """kill -9 at half of the download: the next call fetches the rest only; of two at once, one
    downloads."""
    url, part = server(NAME, reviews, "slow"), tmp_path / f"{NAME}.part"
    code = "import sys, pathlib, files; files.fetch(sys.argv[1], pathlib.Path(sys.argv[2]), '')"
    calls = [sys.executable, "-c", code, url, tmp_path]
    running = subprocess.Popen(calls, cwd=ROOT)
    wait_for(lambda: part.exists() and part.stat().st_size > 1_000_000)
    running.send_signal(signal.SIGKILL)
    running.wait()
    have = part.stat().st_size
    assert [one.wait(60) for one in [subprocess.Popen(calls, cwd=ROOT) for _ in range(2)]] == [0, 0]
    assert (
        server.log == ["bytes=0-", f"bytes={have}-"] and (tmp_path / NAME).read_bytes() == reviews
    )


def test_downloads_without_a_checksum(server, monkeypatch, tmp_path):
    """BIDMC's two files and Pythia's are whole although the connection breaks."""
    point(
        monkeypatch, "bidmc_hr", *(server(name, some, "cut") for name, some in bidmc()[0].items())
    )
    assert len(data.open_task("bidmc_hr", tmp_path)[1]) == 28
    contents = {"model.safetensors": os.urandom(700_000), "tokenizer.json": os.urandom(70_000)}
    hub, _ = (server(name, some, "cut").rsplit("/", 1)[0] for name, some in contents.items())
    monkeypatch.setattr(pythia, "PYTHIA", hub)
    assert [path.read_bytes() for path in pythia.fetch_pythia(tmp_path)] == list(contents.values())
