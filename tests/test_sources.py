"""Tasks that are downloaded or read: archives in the official formats, and a server with faults."""

import hashlib
import io
import os
import pickle
import subprocess
import sys
import tarfile
import wave
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import ROOT, call
from PIL import Image
from test_data import check_batch, digest, fails, sequences, wait_for

import data
import files
import tasks
from tasks.bidmc import official_windows
from tasks.speech import WORDS
from zoo import pythia

NAME, RNG = "aclImdb_v1.tar.gz", np.random.default_rng(0)

# Files: {path: bytes}
EXPRESSIONS = "Source\tTarget\r\n( ( ( [MAX 4 ) 3 ) ] )\t4\r\n[SM " + "1 " * 3000 + "]\t0\r\n"
LISTOPS = {f"listops-1000/basic_{split}.tsv": EXPRESSIONS.encode() for split in tasks.SPLITS}

MANY = "".join(map(chr, range(0x4E00, 0x4E00 + 400)))  # more symbols than a byte holds
PAIRS = (
    '1.0\tA1\tB1\tplain text\tanother "quoted" word inside\n'
    '0.0\tA2\tB2\t"a tab\there, a line\nend, ""doubled"" quotes"\tb\n'
    f"1.0\tA3\tB3\t{'x' * 5000}\t{MANY}\n"
)
AAN = dict.fromkeys(("eval", "test"), "\ufeff0\tA\tB\tbax\t\u00fc\n") | dict(train=PAIRS)
AAN = {f"tsv_data/new_aan_pairs.{split}.tsv": text.encode() for split, text in AAN.items()}

BATCHES = {}  # {name: (labels, planes)}
for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
    BATCHES[name] = RNG.integers(0, 10, 40, np.uint8), RNG.integers(0, 256, (40, 3072), np.uint8)
CIFAR = {f"batches/{name}.bin": np.c_[arrays].tobytes() for name, arrays in BATCHES.items()}
PICKLED = {
    f"batches/{name}": pickle.dumps({b"labels": labels.tolist(), b"data": planes}, 2)
    for name, (labels, planes) in BATCHES.items()
}

SERIES, TARGETS = RNG.normal(0, 1, (40, 4000, 2)).round(5), RNG.normal(60, 9, 40).round(3)
TARGETS[[4, 11]] = 20, 99  # of test and validation: the training range does not hold them
WINDOWS = [
    ":".join([*(",".join(map(str, channel)) for channel in window.T), str(target)])
    for window, target in zip(SERIES, TARGETS)
]
HEAD = "# made\n@problemName BIDMC\n@univariate false\n@targetlabel true\n@data"
BIDMC = {"BIDMC32HR_TRAIN.ts": WINDOWS[:25], "BIDMC32HR_TEST.ts": WINDOWS[25:]}
BIDMC = {name: "\n".join([HEAD, *lines, ""]).encode() for name, lines in BIDMC.items()}


def imdb():
    """60 training and 20 test reviews; one is too long; characters below and at a threshold."""
    members = {"aclImdb/README": "about", "aclImdb/train/unsup/0_0.txt": "ignored \u4e2d" * 20}
    for split, n in (("train", 30), ("test", 10)):
        for i in range(n):  # of frequent characters
            number = f"{i:06b}".replace("0", "fi").replace("1", "lm")
            texts = f"Bad {number}.<br />\u00e9\u00e9 awful {split}", f'Good "{number}" {split}'
            members[f"aclImdb/{split}/neg/{i}_2.txt"] = texts[0]
            members[f"aclImdb/{split}/pos/{i}_9.txt"] = texts[1] * (99 if i == 3 else 1)
    members["aclImdb/train/pos/1_9.txt"] = "\u00f8" * 14 + "\u00df" * 15
    rare = {"aclImdb/train/pos/0_9.txt": b"rare: \xf0\x9f\x98\x80 once, broken \xff byte"}
    return {name: text.encode() for name, text in members.items()} | rare


def speech():
    """Clips of half a second to one; the lists name some, and one that does not exist."""
    members = {"./validation_list.txt": b"bed/2.wav\nzero/9.wav\n"}
    members["./testing_list.txt"] = b"zero/0.wav\nvisual/1.wav\n"
    for word in ("bed", "visual", "zero", "_background_noise_"):
        for i in range(3):
            file = io.BytesIO()
            with wave.open(file, "wb") as clip:
                clip.setparams((1, 2, 16_000, 0, "NONE", ""))
                clip.writeframes(np.random.default_rng(i).bytes(2 * (16_000 - 4_000 * i)))
            members[f"./{word}/{i}.wav"] = file.getvalue()
    return members


LRA = "pathfinder32/curv_contour_length_14"


def lra_images():
    """Two batches, 2 and 10; an image is empty -> files, level and label of the other images."""
    members, expected = {}, []
    for batch, size in (2, 12), (10, 11):
        lines = []
        for i in range(size):
            file, name, pair = io.BytesIO(), f"sample_{i}.png", (len(expected) + 1, i % 2)
            if (batch, i) != (2, 3):
                Image.fromarray(np.full((32, 32), pair[0], np.uint8)).save(file, "png")
                expected.append(pair)
            members[f"{LRA}/imgs/{batch}/{name}"] = file.getvalue()
            lines.append(f"imgs/{batch} {name} {i} {pair[1]} 1.0 14 4 2 0.5 1 1\n")
        members[f"{LRA}/metadata/{batch}.npy"] = "".join(lines).encode()
    return members, expected


def tar(path, members):
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


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    """Files of every source in one folder, those of LRA as its archive unpacks."""
    folder = tar(tmp_path_factory.mktemp("raw") / NAME, imdb()).parent
    tar(folder / "cifar-10-binary.tar.gz", CIFAR)
    tar(folder / "speech_commands_v0.02.tar.gz", speech())
    unpack(folder / "lra_release" / "lra_release", LISTOPS | AAN | lra_images()[0])
    return unpack(folder, BIDMC)


READ = "listops", "text256", "retrieval", "image", "pathfinder", "scifar", "bidmc_hr", "sc"


@pytest.fixture(scope="module")
def prepared(raw, tmp_path_factory):
    """A folder of the tasks that are read, by the command."""
    folder = tmp_path_factory.mktemp("prepared")
    few = "--train", 180, "--val", 20, "--test", 40
    for name, sizes in (*((name, ()) for name in READ), ("scifar_mini", few)):
        done = call("data.py", "--task", name, "--data-dir", folder, "--raw", raw, *sizes)
        assert done.returncode == 0, done.stderr
    return folder


def test_every_read_task_obeys_the_laws_of_batches_and_needs_its_files_once(prepared, tmp_path):
    for name in READ:
        assert str(tmp_path) in fails("--task", name, "--data-dir", tmp_path, "--raw", tmp_path)
        assert "other raw (" in fails("--task", name, "--data-dir", prepared, "--raw", tmp_path)
        task, train, *_ = data.open_task(name, prepared)
        check_batch(task, train, (0, 1, 0))
        assert task.data["source"] == "official files" and task.data["seed"] == 0


def test_a_picture_shows_what_is_hidden(prepared, tmp_path):
    for name in ("retrieval", "image", "bidmc_hr"):  # a text, an image, a curve
        data.show(name, prepared, tmp_path / "sheet.png")
        picture = np.asarray(Image.open(tmp_path / "sheet.png").convert("L")).astype(int)
        left, right = np.split(picture[60:], 2, axis=1)
        assert (abs(left - right) > 40).mean() > 0.005, name


class Evil:
    def __reduce__(self):
        return os.system, ("echo executed > executed",)


UNKNOWN, EVIL = b"Source\tTarget\r\n[MUL 4 ]\t4\r\n", pickle.dumps({b"data": Evil()}, 2)
DAMAGED = [
    ("listops", LISTOPS, "listops-1000/basic_val.tsv", UNKNOWN, "basic_val.tsv, line 2"),
    ("pathfinder", lra_images()[0], f"{LRA}/imgs/10/sample_1.png", b"no image", "sample_1.png"),
    ("pathfinder", lra_images()[0], f"{LRA}/metadata/10.npy", b"imgs/10 gone.png 0 7", "gone.png"),
    ("retrieval", AAN, "tsv_data/new_aan_pairs.eval.tsv", b"1\tA\tB\tx\n", "eval.tsv, line 1"),
    ("bidmc_hr", BIDMC, "BIDMC32HR_TEST.ts", b"@data\n1,2,3:4,5,6:7\n", "TEST.ts, line 2"),
    ("image", CIFAR, "batches/data_batch_3.bin", bytes(3072), "not the whole CIFAR-10"),
    ("image", PICKLED, "batches/data_batch_2", EVIL, ".system"),
]


def test_a_damaged_file_is_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i, (name, members, file, content, words) in enumerate(DAMAGED):
        unpack(tmp_path / f"raw{i}", members | {file: content})
        assert words in fails("--task", name, "--data-dir", f"{i}", "--raw", f"raw{i}"), file
        assert not (tmp_path / f"{i}" / name / "meta.json").exists(), file
    assert not (tmp_path / "executed").exists()


def shuffled(n):
    """The order of torch's random_split with seed 42."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(42)).tolist()


def test_files_of_the_lra_release(prepared):
    """Expressions without parentheses, cut to 2,047 symbols and <eos>; batch 2 before batch 10."""
    symbols, _, lengths, y = data.open_task("listops", prepared)[1].batch([0, 1])
    assert symbols[0, :5].tolist() == [15, 8, 7, 18, 3] and symbols[1, -2:].tolist() == [5, 3]
    assert lengths.tolist() == [5, 2048] and y.tolist() == [4, 0]
    splits = data.open_task("pathfinder", prepared)[1:]
    seen = [(int(x.max()), int(y)) for split in splits for x, y in zip(split.x, split.y)]
    assert seen == [lra_images()[1][i] for i in shuffled(22)]
    assert [*map(len, splits)] == [18, 2, 2]


def test_text(prepared, raw, monkeypatch, tmp_path):
    """Every review by the rules: characters, 15 occurrences, cut, <eos>. An archive and a folder
    give the same; one cut short is refused, and one of official size with another checksum."""
    data.prepare("text256", tmp_path, raw=unpack(tmp_path / "unpacked", imdb()) / "aclImdb")
    assert digest(tmp_path / "text256") == digest(prepared / "text256")
    texts = {"train": {}, "test": {}}
    for name, content in imdb().items():
        if "/neg/" in name or "/pos/" in name:
            text = content.decode("utf-8", "replace")[:255]
            texts[name.split("/")[1]][text] = int("/pos/" in name)
    letters = "".join(texts["train"])
    often = [letter for letter in {*letters} if letters.count(letter) >= 15]
    often.sort(key=lambda letter: (-letters.count(letter), letter))
    task, train, val, test = data.open_task("text256", tmp_path)
    assert task.symbols == ("<mask>", "<pad>", "<unk>", "<eos>", *often) and "\u00df" in often
    for half, splits in ("train", (train, val)), ("test", (test,)):
        pairs = [pair for split in splits for pair in zip(sequences(split), split.y)]
        seen = {"".join(task.symbols[i] for i in ids[:-1]): y for ids, y in pairs}
        for text, y in texts[half].items():
            known = "".join(letter if letter in often else "<unk>" for letter in text)
            assert seen.pop(known) == y, text
        assert not seen
    assert val.y.tolist() == [i >= 30 for i in shuffled(60)[54:]]  # of the negative, the positive
    point(monkeypatch, "text256", "", bytes=(raw / NAME).stat().st_size, sha256="0")
    half = unpack(tmp_path / "half", {NAME: (raw / NAME).read_bytes()[:1000]})
    for folder, words in (half, "is damaged: "), (raw, "wrong checksum"):
        line = fails("--task", "text256", "--data-dir", tmp_path / "again", "--raw", folder)
        assert words in line


def test_retrieval(prepared, raw, tmp_path):
    """The vocabulary is that of the training texts; sequences 2i and 2i + 1 are example i."""
    texts = ["plain text", 'another "quoted" word inside']
    texts += ['a tab\there, a line\nend, "doubled" quotes', "b", "x" * 3999, MANY]
    task, train, val, _ = data.open_task("retrieval", prepared)
    assert task.vocab == 4 + len({*"".join(texts)}) > 400
    symbols, _, lengths, y = train.batch([1, 0, 2])
    assert symbols.shape == (6, 4000) and y.tolist() == [0, 1, 1]
    for ids, length, i in zip(symbols, lengths, (2, 3, 0, 1, 4, 5)):
        assert "".join(task.symbols[i] for i in ids[: length - 1]) == texts[i]
    unknown = [[task.symbols[i] for i in ids] for ids in val.batch([0]).symbols]
    assert unknown == [["b", "a", "x", "<eos>"], ["<unk>", "<eos>", "<pad>", "<pad>"]]
    words = "--task", "retrieval", "--data-dir", tmp_path, "--raw", raw
    assert "1 examples for val, not 7" in fails(*words, "--train", 3, "--val", 7)


def test_cifar(prepared, tmp_path):
    """Each pixel where it belongs; side 12: each is the mean of those whose centres lie in it.
    Pickled batches and a gray .npz hold the same as binary ones."""
    *train, test = BATCHES.values()
    train, grays = [np.concatenate(arrays) for arrays in zip(*train)], {}
    for half, (labels, planes) in dict(train=train, test=test).items():
        pixels = planes.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        gray = [np.asarray(Image.fromarray(image).convert("L")) for image in pixels]
        grays |= {f"x_{half}": np.stack(gray), f"y_{half}": labels[:, None]}
    unpack(tmp_path / "pickled", PICKLED)
    (tmp_path / "gray").mkdir()
    np.savez(tmp_path / "gray" / "cifar10_gray.npz", **grays)
    for name, place in ("scifar", "pickled"), ("image", "gray"):
        data.prepare(name, tmp_path / "data", raw=tmp_path / place)
        assert digest(tmp_path / "data" / name) == digest(prepared / name), place
    words = "--task", "scifar", "--data-dir", tmp_path, "--raw", tmp_path / "gray"
    assert "needs colour" in fails(*words)
    under = (np.arange(32) + 0.5) * 12 // 32 == np.arange(12)[:, None]  # (12, 32)
    weights = under / under.sum(1, keepdims=True)
    names = "image", "scifar", "scifar_mini"
    gray, colour, small = (data.open_task(name, prepared)[1:] for name in names)
    for i, members in enumerate((shuffled(200)[:180], shuffled(200)[180:])):
        assert all((splits[i].y == train[0][members]).all() for splits in (gray, colour, small))
        assert (colour[i].x.transpose(0, 2, 1).reshape(-1, 3072) == train[1][members]).all()
        assert (gray[i].x[..., 0] == grays["x_train"][members].reshape(-1, 1024)).all()
        pixels = colour[i].x.reshape(-1, 32, 32, 3)
        wanted = np.einsum("hi,wj,nijc->nhwc", weights, weights, pixels)
        assert np.abs(wanted.reshape(-1, 144, 3) - small[i].x).max() <= 1
    assert (colour[2].y == test[0]).all()


def test_bidmc(prepared):
    """Targets in [-1, 1] by the training range; scikit-learn documents the split of range(10)."""
    ten = [split.tolist() for split in official_windows(10)]
    assert ten == [[9, 1, 6, 7, 3, 0, 5], [8], [2, 4]]
    for name, n in (("bidmc_rr", 7870), ("bidmc_hr", 7949), ("bidmc_spo2", 7949)):
        members = official_windows(n)
        assert tuple(map(len, members)) == tasks.TASKS[name].sizes
        assert sorted(np.concatenate(members)) == [*range(n)]
    task, *splits = data.open_task("bidmc_hr", prepared)
    (low, high), windows = task.ends, official_windows(40)
    assert (low, high) == (min(TARGETS[windows[0]]), max(TARGETS[windows[0]]))
    for split, members in zip(splits, windows):
        batch = split.batch(range(len(split)))
        assert np.allclose(batch.samples, SERIES[members], atol=1e-6)
        assert np.allclose((batch.y + 1) / 2 * (high - low) + low, TARGETS[members], atol=1e-4)


def test_speech(prepared):
    """Official lists, labels in their order, silence after a clip's end, one mean and deviation."""
    _, *splits = data.open_task("sc", prepared)
    x = splits[0].batch(range(6)).samples
    assert abs(x.mean()) < 1e-3 and abs(x.std() - 1) < 1e-3
    clips, words = speech(), dict(bed=0, visual=15, zero=34)
    lists = ["bed/0", "bed/1", "visual/0", "visual/2", "zero/1", "zero/2"], ["bed/2"]
    for split, names in zip(splits, (*lists, ["visual/1", "zero/0"])):
        sounds = [clips[f"./{name}.wav"][44:].ljust(32_000, b"\0") for name in names]
        labels = [words[name.split("/")[0]] for name in names]
        seen = [(np.array(x).tobytes(), int(y)) for x, y in zip(split.x, split.y)]
        assert sorted(seen) == sorted(zip(sounds, labels))
    assert all(WORDS[label] == word for word, label in words.items())


def point(monkeypatch, name, *urls, **more):
    """Let a task download these instead."""
    source = replace(tasks.TASKS[name].source, urls=urls, **more)
    monkeypatch.setitem(tasks.TASKS, name, replace(tasks.TASKS[name], source=source))


CONTENT = RNG.bytes(3_000_000)
CHECKSUM = hashlib.sha256(CONTENT).hexdigest()
FAULTS = [("cut", 0), ("cut", 500), ("norange", 500), ("503", 10_000_000)]
REFUSALS = [("403", "403 Client Error"), ("wrong", "wrong checksum"), ("nobody", "refused")]


@pytest.mark.parametrize("fault, junk", FAULTS)
def test_a_download_ends_whole(server, tmp_path, fault, junk):
    """Whatever fails on the way, and whatever lies about under the name of the part."""
    unpack(tmp_path, {f"{NAME}.part": b"?" * junk})
    path = files.fetch(server(NAME, CONTENT, fault), tmp_path, "", CHECKSUM)
    assert path.read_bytes() == CONTENT
    assert fault != "norange" or len(server.log) == 1  # all that came took the place of the part


@pytest.mark.parametrize("fault, words", REFUSALS)
def test_a_failed_download_is_one_line(server, monkeypatch, tmp_path, fault, words):
    url = server(NAME, CONTENT, fault) if fault != "nobody" else f"http://127.0.0.1:9/{NAME}"
    point(monkeypatch, "text256", url, sha256=CHECKSUM)
    line = fails("--task", "text256", "--data-dir", tmp_path)
    assert words in line and url in line and "Max retries" not in line
    assert f"python data.py --task text256 --data-dir {tmp_path} --raw DIR" in line
    assert len(server.log) in (0, 1, 4) and not (tmp_path / "downloads" / NAME).exists()


def test_a_killed_download_goes_on_and_of_two_at_once_one_downloads(server, tmp_path):
    url, part = server(NAME, CONTENT, "slow"), tmp_path / f"{NAME}.part"
    code = "import sys, pathlib, files; files.fetch(sys.argv[1], pathlib.Path(sys.argv[2]), '')"
    words = [sys.executable, "-c", code, url, tmp_path]
    running = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL)
    wait_for(lambda: part.exists() and part.stat().st_size > 500_000)
    running.kill()
    running.wait()
    size = part.stat().st_size
    both = [subprocess.Popen(words, cwd=ROOT, stderr=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert server.log == ["bytes=0-", f"bytes={size}-"]
    assert (tmp_path / NAME).read_bytes() == CONTENT


def test_a_download_without_a_checksum_is_whole_after_a_break(server, monkeypatch, tmp_path):
    """BIDMC's two files and Pythia's."""
    urls = [server(name, content, "cut") for name, content in BIDMC.items()]
    point(monkeypatch, "bidmc_hr", *urls)
    assert len(data.open_task("bidmc_hr", tmp_path)[1]) == 28
    contents = {"model.safetensors": os.urandom(700_000), "tokenizer.json": os.urandom(70_000)}
    urls = [server(name, content, "cut") for name, content in contents.items()]
    monkeypatch.setattr(pythia, "PYTHIA", urls[0].rsplit("/", 1)[0])
    assert [path.read_bytes() for path in pythia.fetch_pythia(tmp_path)] == [*contents.values()]
