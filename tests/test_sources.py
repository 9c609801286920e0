"""The tasks that are downloaded or read: made archives in the official formats, served over HTTP by servers that fail
in all the usual ways; and the real files where they are at hand."""
import bz2
import gzip
import hashlib
import io
import json
import lzma
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import threading
import time
import wave
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch

import data
from conftest import ROOT
from test_data import SAMPLES, digest, fails

real = pytest.mark.skipif(not SAMPLES.is_dir(), reason="the real samples are not here")
RNG = np.random.default_rng(0)


# ---- made archives -----------------------------------------------------------------------------------

def tar(path, members, extra=()):
    """A .tar.gz of {name: bytes}; `extra`: TarInfo objects without content."""
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
        for info in extra:
            archive.addfile(info)
    return path


def imdb():
    """60 training and 20 test reviews; one longer than a task's length, some characters below the threshold of 15."""
    members = {"aclImdb/README": b"about", "aclImdb/train/unsup/0_0.txt": "ignored \u4e2d".encode() * 20}
    for split, n in (("train", 30), ("test", 10)):
        for i in range(n):
            number = format(i, "06b").replace("0", "fi").replace("1", "lm")     # of frequent characters
            members[f"aclImdb/{split}/neg/{i}_2.txt"] = f"Bad {number}.<br />\u00e9\u00e9 awful {split}".encode()
            members[f"aclImdb/{split}/pos/{i}_9.txt"] = (f"Good \"{number}\" {split}" * (99 if i == 3 else 1)).encode()
    members["aclImdb/train/pos/0_9.txt"] = b"rare: \xf0\x9f\x98\x80 once, broken \xff byte"
    return members


def cifar_arrays(n=40):
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    return {name: (RNG.integers(0, 10, n).astype(np.uint8), RNG.integers(0, 256, (n, 3072)).astype(np.uint8))
            for name in names}


def cifar_binary(arrays):
    return {f"cifar-10-batches-bin/{name}.bin": np.concatenate([labels[:, None], planes], 1).tobytes()
            for name, (labels, planes) in arrays.items()} | {"cifar-10-batches-bin/readme.html": b"<html>"}


def cifar_pickled(arrays):
    """As Python 2 wrote them: protocol 2, bytes for keys, numpy's functions under their old module."""
    def dump(labels, planes):
        record = {b"batch_label": b"x", b"labels": labels.tolist(), b"data": planes, b"filenames": [b"a.png"]}
        return pickle.dumps(record, 2).replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    return {f"cifar-10-batches-py/{name}": dump(*pair) for name, pair in arrays.items()}


def clip(samples, rate=16_000, channels=1):
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels), out.setsampwidth(2), out.setframerate(rate)
        out.writeframes(samples.astype("<i2").tobytes())
    return file.getvalue()


def speech():
    """Six clips a word, of several lengths; the second of each word is validation, the third test."""
    members, lists = {"./_background_noise_/hum.wav": clip(np.ones(30_000))}, {"validation": [], "testing": []}
    for word in data.WORDS:
        for i in range(6):
            name = f"{word}/{i:08x}_nohash_{i}.wav"
            members["./" + name] = clip(RNG.normal(0, 3000, 16_000 if i else 9_000).clip(-32768, 32767))
            if i in (1, 2):
                lists["validation" if i == 1 else "testing"].append(name)
    for name, some in lists.items():
        members[f"./{name}_list.txt"] = ("\n".join(some) + "\n").encode()
    return members


def windows(recordings, stride=375, n=12):
    """Overlapping windows of random walks, recording by recording -> series (windows, 2, 4000), which recording."""
    series, source = [], []
    for r in range(recordings):
        walk = np.round(np.random.default_rng(r).normal(0, 1, (2, 4000 + stride * n)).cumsum(1) / 100, 5)
        series += [walk[:, stride * i:stride * i + 4000] for i in range(n)]
        source += [r] * n
    return np.array(series), np.array(source)


def ts(series, targets):
    head = "# made\n@problemName BIDMC\n@timeStamps false\n@univariate false\n@targetlabel true\n@data\n"
    return (head + "".join(":".join([",".join(f"{v:.5f}" for v in channel) for channel in example] + [f"{y}"]) + "\n"
                           for example, y in zip(series, targets))).encode()


# ---- a server with faults ----------------------------------------------------------------------------

@pytest.fixture
def server(monkeypatch):
    """serve(name, content) -> function that gives the address of it under a fault; serve.log: (address, Range)."""
    files, log, cut_once = {}, [], set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_GET(self):
            self.close_connection = True
            _, fault, name = self.path.split("/", 2)
            log.append((self.path, self.headers.get("Range")))
            if fault.isdigit():
                return self.send_error(int(fault))
            content = files[name]
            if fault == "wrong":
                content = content[:-20] + bytes(20)
            if fault == "short":
                content = content[:-100]
            if fault == "html":
                content = b"<html>log in</html>"
            start = 0
            if self.headers.get("Range") and fault != "norange":
                start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
                if start >= len(content):
                    return self.send_error(416)
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            else:
                self.send_response(200)
            body = content[start:]
            if fault not in ("endless", "chunked"):
                self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Type", "text/html" if fault == "html" else "application/octet-stream")
            if fault == "encoding":
                self.send_header("Content-Encoding", "x-gzip")       # as Apache says of every .gz
            if fault == "chunked":
                self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                if fault == "endless":
                    while True:
                        self.wfile.write(bytes(1 << 16))
                if fault == "chunked":
                    return self.wfile.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body))
                if fault == "drip":
                    return self.wfile.write(body[:60_000])           # of each connection
                if fault == "cut" and self.path not in cut_once:
                    cut_once.add(self.path)
                    self.wfile.write(body[:len(body) // 2])
                elif fault == "stall":
                    self.wfile.write(body[:100])
                    self.wfile.flush()
                    time.sleep(1.5)
                elif fault == "slow":
                    for i in range(0, len(body), max(1, len(body) // 15)):
                        self.wfile.write(body[i:i + max(1, len(body) // 15)])
                        self.wfile.flush()
                        time.sleep(0.1)
                else:
                    self.wfile.write(body)
            except (BrokenPipeError, ConnectionResetError):
                pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    monkeypatch.setattr(data, "TIMEOUT", (1, 0.4))
    monkeypatch.setattr(data, "PAUSE", 0.01)

    def serve(name, content):
        files[name] = content
        return lambda fault: f"http://127.0.0.1:{httpd.server_port}/{fault}/{name}"

    serve.log = log
    yield serve
    httpd.shutdown()


def archive_of(serve, name, content, *faults):
    address = serve(name, content)
    return data.Archive(name, tuple(map(address, faults)), len(content),
                        "sha256:" + hashlib.sha256(content).hexdigest())


def point(monkeypatch, tasks, *archives):
    """Let TASKS download these archives instead."""
    for task in tasks:
        row = data.TASKS[task]
        monkeypatch.setitem(data.TASKS, task, replace(row, source=replace(row.source, archives=archives)))


@pytest.fixture
def reviews(tmp_path):
    return tar(tmp_path / "made.tar.gz", imdb() | {"aclImdb/noise": RNG.bytes(500_000)}).read_bytes()


def text_is_whole(folder):
    sizes = [len(data.load("text_demo", split, folder)) for split in data.SPLITS]
    return sizes == [54, 6, 20] and not (folder / "text_demo" / "parts").exists()


def no_set(folder):
    """Nothing that could be taken for a prepared set, no archive that could be taken for a whole one."""
    with pytest.raises(data.UserError, match="not prepared"):
        data.load("text_demo", "train", folder)
    return not list(folder.glob("downloads/*.gz"))


# ---- downloads ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("faults", [("ok",), ("cut",), ("norange",), ("slow",), ("404", "ok"), ("403", "cut"),
                                    ("wrong", "ok"), ("short", "ok"), ("500", "ok"), ("stall", "ok"), ("encoding",),
                                    ("drip",), ("chunked",)])
def test_download_succeeds(server, monkeypatch, tmp_path, reviews, faults):
    point(monkeypatch, ["text_demo"], archive_of(server, "aclImdb_v1.tar.gz", reviews, *faults))
    data.prepare("text_demo", tmp_path / "data")
    assert text_is_whole(tmp_path / "data")
    assert (tmp_path / "data" / "downloads" / "aclImdb_v1.tar.gz").read_bytes() == reviews
    ranges = [r for path, r in server.log if r]
    if faults == ("cut",):
        assert ranges == [f"bytes={len(reviews) // 2}-"]              # the second half only, once
    asked = len(server.log)
    data.prepare("text_demo", tmp_path / "data")
    assert len(server.log) == asked                                 # prepared once


@pytest.mark.parametrize("faults, words", [
    (("403",), "HTTP 403 Forbidden"), (("404", "403"), "HTTP 404 Not Found"), (("wrong",), "wrong checksum"),
    (("short",), "offers"), (("503",), "HTTP 503"), (("stall",), "broke off"), (("html",), "web page"),
    (("endless",), "sends more than"), (("416",), "another file")])
def test_download_fails_in_one_line_and_the_next_succeeds(server, monkeypatch, tmp_path, reviews, faults, words):
    folder = tmp_path / "data"
    point(monkeypatch, ["text_demo"], archive_of(server, "aclImdb_v1.tar.gz", reviews, *faults))
    line = fails("--task", "text_demo", "--data-dir", folder)
    assert words in line and f"python data.py --task text_demo --data-dir {folder} --raw DIR" in line
    assert "aclImdb/" in line
    assert line.count("http://") == len(faults) and no_set(folder)
    point(monkeypatch, ["text_demo"], archive_of(server, "aclImdb_v1.tar.gz", reviews, "ok"))
    data.prepare("text_demo", folder)
    assert text_is_whole(folder)


def test_no_server(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "PAUSE", 0.01)
    point(monkeypatch, ["text_demo"], data.Archive("a.tar.gz", ("http://127.0.0.1:9/a.tar.gz",), 10, "md5:0"))
    assert "no connection" in fails("--task", "text_demo", "--data-dir", tmp_path)


def test_a_part_that_is_not_ours(server, monkeypatch, tmp_path, reviews):
    """What lies about under the name of the part or the archive is not trusted: too short, too long, other bytes."""
    point(monkeypatch, ["text_demo"], archive_of(server, "aclImdb_v1.tar.gz", reviews, "ok"))
    for name in ("aclImdb_v1.tar.gz.part", "aclImdb_v1.tar.gz"):
        for junk in (b"?" * 500, b"?" * (len(reviews) + 1), b"?" * len(reviews)):
            folder = tmp_path / f"{len(junk)}{name}"
            (folder / "downloads").mkdir(parents=True)
            (folder / "downloads" / name).write_bytes(junk)
            data.prepare("text_demo", folder)
            assert text_is_whole(folder)


@pytest.mark.parametrize("record", ["{}", "[]", '{"files": []}', '{"files": null}', "no json",
                                    '{"files": [{"key": "a.ts", "size": 1, "checksum": null}]}'])
def test_a_record_without_checksum(server, monkeypatch, tmp_path, record):
    archive = data.Archive("a.ts", (server("a.ts", b"x")("ok"),), None, None, server("r", record.encode())("ok"))
    point(monkeypatch, ["bidmc_hr"], archive, archive)
    line = fails("--task", "bidmc_hr", "--data-dir", tmp_path)
    assert "a.ts cannot be downloaded (http" in line and "()" not in line


def test_pythia_is_fetched_and_checked(server, monkeypatch, tmp_path):
    """As Hugging Face publishes it: a list of files, large ones with their SHA-256, small ones with their git hash."""
    contents = {"model.safetensors": RNG.bytes(70_000), "tokenizer.json": b'{"model": {}}'}
    blob = hashlib.sha1(b"blob 13\0" + contents["tokenizer.json"]).hexdigest()
    listing = [{"type": "file", "oid": "0" * 40, "size": 70_000, "path": "model.safetensors",
                "lfs": {"oid": hashlib.sha256(contents["model.safetensors"]).hexdigest(), "size": 70_000}},
               {"type": "file", "oid": blob, "size": 13, "path": "tokenizer.json"}]
    record = server("tree", json.dumps(listing).encode())("ok")
    for faults in (("wrong", "ok"), ("cut", "cut")):
        folder = tmp_path / faults[0]
        monkeypatch.setattr(data, "PYTHIA_FILES", tuple(
            data.Archive(name, (server(name, content)(fault),), None, None, record)
            for (name, content), fault in zip(contents.items(), faults)))
        if faults == ("wrong", "ok"):
            with pytest.raises(data.UserError, match="wrong checksum.*pythia_rand"):
                data.fetch_pythia(folder)
            continue
        paths = data.fetch_pythia(folder)
        assert [path.read_bytes() for path in paths] == list(contents.values())
        asked = len(server.log)
        assert data.fetch_pythia(folder) == paths and len(server.log) == asked


def process(server_archives, *argv):
    """data.py in a process of its own, with other archives. {task: archives}"""
    code = ("import sys, json; from dataclasses import replace; import data\n"
            "for task, archives in json.loads(sys.argv[1]).items():\n"
            "    row = data.TASKS[task]\n"
            "    archives = tuple(data.Archive(*a[:1], tuple(a[1]), *a[2:]) for a in archives)\n"
            "    data.TASKS[task] = replace(row, source=replace(row.source, archives=archives))\n"
            "sys.exit(data.main(sys.argv[2:]))")
    plain = {task: [[a.name, a.urls, a.bytes, a.checksum] for a in archives]
             for task, archives in server_archives.items()}
    return subprocess.Popen([sys.executable, "-c", code, json.dumps(plain), *map(str, argv)], cwd=ROOT,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_while_downloading(server, tmp_path):
    """kill -9 at half of the download: the next call fetches the rest only."""
    noise = {"aclImdb/noise": RNG.bytes(3_000_000)}                 # so that there is something to wait for
    content = tar(tmp_path / "big.tar.gz", imdb() | noise).read_bytes()
    archive = archive_of(server, "aclImdb_v1.tar.gz", content, "slow")
    folder = tmp_path / "data"
    part = folder / "downloads" / "aclImdb_v1.tar.gz.part"
    running = process({"text_demo": [archive]}, "--task", "text_demo", "--data-dir", folder)
    deadline = time.time() + 30
    while not (part.exists() and part.stat().st_size > 1_000_000) and time.time() < deadline:
        time.sleep(0.02)
    running.send_signal(signal.SIGKILL)
    running.communicate()
    have = part.stat().st_size
    assert 0 < have < len(content) and no_set(folder)
    again = process({"text_demo": [archive]}, "--task", "text_demo", "--data-dir", folder)
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert server.log[-1][1] == f"bytes={have}-" and text_is_whole(folder)


def test_two_tasks_share_one_download(server, tmp_path):
    """Image and sCIFAR at the same time, and Image twice: one download."""
    content = tar(tmp_path / "c.tar.gz", cifar_binary(cifar_arrays())).read_bytes()
    archive = archive_of(server, "cifar-10-binary.tar.gz", content, "slow")
    tasks = ("image", "scifar", "image")
    running = [process({task: [archive]}, "--task", task, "--data-dir", tmp_path / "data") for task in tasks]
    for one, task in zip(running, tasks):
        out, err = one.communicate(timeout=60)
        assert one.returncode == 0 and f"{task}: ready (train 180 (official: 45,000)" in out, err
    assert len(server.log) == 1


def test_disk_full(server, monkeypatch, tmp_path, reviews):
    """A device that is really full (/dev/full), and one whose room is known not to suffice."""
    folder = tmp_path / "data"
    point(monkeypatch, ["text_demo"], archive_of(server, "aclImdb_v1.tar.gz", reviews, "ok"))
    (folder / "downloads").mkdir(parents=True)
    part = folder / "downloads" / "aclImdb_v1.tar.gz.part"
    part.symlink_to("/dev/full")
    line = fails("--task", "text_demo", "--data-dir", folder)
    assert "No space left" in line and "make room" in line and no_set(folder)
    part.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(data.shutil, "disk_usage", lambda path: type("Usage", (), dict(free=100)))
        assert "make room" in fails("--task", "text_demo", "--data-dir", folder) and no_set(folder)
    data.prepare("text_demo", folder)
    assert text_is_whole(folder)


def test_disk_full_while_preparing(tmp_path):
    """No file may grow beyond 1 MB, which the operating system enforces; then it may."""
    tar(tmp_path / "speech_commands_v0.02.tar.gz", speech())
    command = f"{sys.executable} data.py --task sc --raw {tmp_path} --data-dir {tmp_path / 'data'}"
    full = subprocess.run(["bash", "-c", f"ulimit -f 1000; {command}"], cwd=ROOT, capture_output=True, text=True)
    assert full.returncode == 2 and full.stderr.splitlines()[-1].startswith("error: ") and "make room" in full.stderr
    with pytest.raises(data.UserError, match="not prepared"):
        data.load("sc", "train", tmp_path / "data")
    subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, check=True)
    assert len(data.load("sc", "train", tmp_path / "data")) == 140


@pytest.mark.parametrize("when", ["test_x.npy", "train_x.npy", "train_y.npy"])
def test_killed_while_preparing(tmp_path, when):
    """kill -9 as soon as a file is there: never a set, then the same set as without a kill."""
    tar(tmp_path / "speech_commands_v0.02.tar.gz", speech())
    argv = ("--task", "sc", "--raw", tmp_path, "--data-dir", tmp_path / "data")
    running = process({}, *argv)
    while not (tmp_path / "data" / "sc" / when).exists() and running.poll() is None:
        time.sleep(0.001)
    running.send_signal(signal.SIGKILL)
    running.communicate()
    if not (tmp_path / "data" / "sc" / "meta.json").exists():        # else it was faster than the signal
        with pytest.raises(data.UserError, match="not prepared"):
            data.load("sc", "train", tmp_path / "data")
    assert data.main([str(word) for word in argv]) == 0
    data.prepare("sc", tmp_path / "quiet", raw=tmp_path)
    assert digest(tmp_path / "data" / "sc") == digest(tmp_path / "quiet" / "sc")


# ---- archives ----------------------------------------------------------------------------------------

def link(name, to, kind=tarfile.SYMTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, to
    return info


@pytest.mark.parametrize("members, extra, words", [
    ({"../../x": b"evil"}, (), "'../../x'"), ({"aclImdb/../../x": b"evil"}, (), "leads out"),
    ({"/tmp/x-absolute": b"evil"}, (), "leads out"),
    ({}, (link("aclImdb/train/pos/7_7.txt", "/etc/passwd"),), "not a file"),
    ({}, (link("aclImdb/train/pos/7_7.txt", "../x", tarfile.LNKTYPE),), "not a file")])
def test_hostile_archive(server, monkeypatch, tmp_path, members, extra, words):
    """Refused, and nothing is written outside, whether it was downloaded (checksum and all) or is the user's."""
    content = tar(tmp_path / "aclImdb_v1.tar.gz", imdb() | members, extra).read_bytes()
    point(monkeypatch, ["text_demo"], archive_of(server, "aclImdb_v1.tar.gz", content, "ok"))
    before = sorted(tmp_path.rglob("*"))
    assert words in fails("--task", "text_demo", "--data-dir", tmp_path / "a" / "b" / "data", "--raw", tmp_path)
    assert words in fails("--task", "text_demo", "--data-dir", tmp_path / "c" / "d" / "data")
    new = set(tmp_path.rglob("*")) - set(before)
    assert not [path for path in new if path.name in ("x", "x-absolute") or path.name.endswith(".txt")]
    assert not os.path.exists("/tmp/x-absolute")


@pytest.mark.parametrize("keep", [0.3, 0.7, 0.99])
def test_truncated_archive_of_the_user(tmp_path, keep):
    path = tar(tmp_path / "aclImdb_v1.tar.gz", imdb() | {"aclImdb/noise": RNG.bytes(100_000)})
    content = path.read_bytes()
    path.write_bytes(content[:int(keep * len(content))])
    assert "is damaged" in fails("--task", "text_demo", "--data-dir", tmp_path / "data", "--raw", tmp_path)
    path.write_bytes(content)
    data.prepare("text_demo", tmp_path / "data", raw=tmp_path)
    assert text_is_whole(tmp_path / "data")


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.bz2", "tar.xz"])
def test_flipped_bits_and_other_compressions(tmp_path, suffix):
    """A bit that flips in the middle of an archive is noticed, where the format has a checksum; so is a cut .tar."""
    plain = gzip.decompress(tar(tmp_path / "a.tar.gz", imdb()).read_bytes())
    (tmp_path / "a.tar.gz").unlink()
    pack = {"tar": bytes, "tar.gz": gzip.compress, "tar.bz2": bz2.compress, "tar.xz": lzma.compress}[suffix]
    path = tmp_path / f"aclImdb_v1.{suffix}"
    command = ("--task", "text_demo", "--data-dir", tmp_path / "data", "--raw", tmp_path)
    if suffix == "tar":
        path.write_bytes(plain[:len(plain) // 1024 * 512])             # at a border of its blocks
        assert "is damaged" in fails(*command)
    else:
        whole = bytearray(pack(plain))
        for place in (.3, .6, .9):
            flipped = whole.copy()
            flipped[int(place * len(whole))] ^= 4
            path.write_bytes(flipped)
            assert "is damaged" in fails(*command)
    path.write_bytes(pack(plain))
    data.prepare("text_demo", tmp_path / "data", raw=tmp_path)
    assert text_is_whole(tmp_path / "data")


def test_facts_of_the_sources():
    """Typed from the sources' own pages and the paper's official configurations, not from data.py."""
    rows = data.TASKS
    assert {name: row.mask for name, row in rows.items() if "demo" not in name and "mini" not in name and name != "text256"} == dict(
        listops=.1, text=.15, retrieval=.15, image=.5, pathfinder=.5, pathx=.5, pathx256=.5, sc=.25, scifar=.5,
        bidmc_hr=.25, bidmc_rr=.25, bidmc_spo2=.25, pathfinder64=.5)
    assert [(a.bytes, a.checksum[:15]) for name in ("text", "image", "sc") for a in rows[name].source.archives] == [
        (84_125_825, "sha256:c40f74a1"), (170_052_171, "sha256:c4a38c50"), (2_428_923_189, "sha256:af14739e")]
    for target, record in (("HR", 4001456), ("RR", 4001463), ("SpO2", 4001464)):
        archives = rows[f"bidmc_{target.lower()}"].source.archives
        assert [a.name for a in archives] == [f"BIDMC32{target}_TRAIN.ts", f"BIDMC32{target}_TEST.ts"]
        assert all(str(record) in url for a in archives for url in (*a.urls, a.record))
    assert (rows["sc"].names.index("bed"), rows["sc"].names.index("visual"), rows["sc"].names.index("zero")) == (0, 15, 34)
    assert len(set(rows["sc"].names)) == 35 and rows["image"].names.index("truck") == 9 == len(rows["image"].names) - 1
    assert (rows["image"].mean * 255, rows["image"].std * 255) == pytest.approx((122.6, 61))


def test_raw_without_anything(tmp_path):
    for task in ("text", "image", "sc", "bidmc_rr", "retrieval", "pathx"):
        line = fails("--task", task, "--data-dir", tmp_path / "data", "--raw", tmp_path)
        assert f"--raw {tmp_path}" in line
        assert "is not a folder" in fails("--task", task, "--data-dir", tmp_path / "data", "--raw", "")


# ---- Text --------------------------------------------------------------------------------------------

def test_text_from_archive_and_folder(tmp_path):
    """Every review against its file, by the rules spelled out again: characters, 15 occurrences, cut, <eos>."""
    made = imdb()
    (tmp_path / "raw").mkdir()
    tar(tmp_path / "raw" / "aclImdb_v1.tar.gz", made)
    for name, content in made.items():
        path = tmp_path / "unpacked" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    data.prepare("text_demo", tmp_path / "a", raw=tmp_path / "raw")
    data.prepare("text_demo", tmp_path / "b", raw=tmp_path / "unpacked")
    data.prepare("text_demo", tmp_path / "c", raw=tmp_path / "unpacked" / "aclImdb")
    texts = {split: {} for split in ("train", "test")}
    for name, content in made.items():
        parts = name.split("/")
        if len(parts) == 4 and parts[2] != "unsup":
            texts[parts[1]][content.decode("utf-8", "replace")[:127]] = int(parts[2] == "pos")
    counts = {}
    for text in texts["train"]:
        for character in text:
            counts[character] = counts.get(character, 0) + 1
    counts["\ufffd"] = 0                                            # once only, in the broken review
    known = sorted((c for c in counts if counts[c] >= 15), key=lambda c: (-counts[c], c))
    row = data.load_task("text_demo", tmp_path / "a")
    assert row.vocab == 4 + len(known) and "\U0001f600" not in known and "\u00e9" in known
    decode = dict(enumerate(["<mask>", "<pad>", "\ufffe", "<eos>"] + known))
    seen = {}
    for split in data.SPLITS:
        part = data.load("text_demo", split, tmp_path / "a")
        x, y, lengths = part.batch(range(len(part)))
        for ids, label, n in zip(x.tolist(), y.tolist(), lengths.tolist()):
            assert ids[n - 1] == data.EOS and set(ids[n:]) <= {data.PAD} and n <= 128
            seen.setdefault(split, {})["".join(decode[i] for i in ids[:n - 1])] = label
        for other in "bc":
            again = data.load("text_demo", split, tmp_path / other)
            assert (again.x == part.x).all() and (again.y == part.y).all()
    plain = {split: {"".join(c if c in known else "\ufffe" for c in text): y for text, y in some.items()}
             for split, some in texts.items()}
    assert seen["train"] | seen["val"] == plain["train"] and seen["test"] == plain["test"]
    assert not seen["train"].keys() & seen["val"].keys()
    shuffled = torch.randperm(60, generator=torch.Generator().manual_seed(42))
    labels = torch.tensor([0] * 30 + [1] * 30)[shuffled]            # the order of the files: negative, then positive
    assert (torch.from_numpy(np.array(data.load("text_demo", "val", tmp_path / "a").y)) == labels[54:]).all()


@real
def test_text_real(tmp_path):
    """All of IMDb: split sizes, class counts, vocabulary; prepared well under 4 GB."""
    code = ("import resource, sys, data\n"
            "assert data.main(sys.argv[1:]) == 0\n"
            "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)")
    done = subprocess.run([sys.executable, "-c", code, "--task", "text", "--data-dir", tmp_path, "--raw", SAMPLES],
                          cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 2e6                       # KiB
    row = data.load_task("text", tmp_path)
    assert row.vocab == 135 and row.classes == 2
    splits = [data.load("text", split, tmp_path) for split in data.SPLITS]
    assert [len(part) for part in splits] == [22_500, 2_500, 25_000] == list(row.sizes)
    assert np.bincount(np.concatenate([splits[0].y, splits[1].y])).tolist() == [12_500, 12_500]
    assert np.bincount(splits[2].y).tolist() == [12_500, 12_500]
    for part in splits:
        lengths = np.diff(part.offsets)
        assert lengths.max() == 4096 and (np.asarray(part.x)[part.offsets[1:] - 1] == data.EOS).all()
        assert (np.asarray(part.x) == data.UNK).mean() < 1e-4


# ---- Image, sCIFAR -----------------------------------------------------------------------------------

def test_small_pictures(tmp_path):
    """Side 12: each pixel is the mean of the original ones whose centres lie in its 8/3 x 8/3, in the full task's order;
    rounded along either side."""
    (tmp_path / "raw").mkdir()
    tar(tmp_path / "raw" / "cifar-10-binary.tar.gz", cifar_binary(cifar_arrays()))
    under = (np.arange(32) + 0.5) * 12 // 32 == np.arange(12)[:, None]                # (12, 32)
    weights = under / under.sum(1, keepdims=True)
    for task in ("image", "scifar"):
        for name in (task, f"{task}_mini"):
            data.prepare(name, tmp_path / "data", sizes=(50, 20, 30), raw=tmp_path / "raw")
        for split in data.SPLITS:
            full, small = (data.load(name, split, tmp_path / "data") for name in (task, f"{task}_mini"))
            assert (full.y == small.y).all() and small.x.shape[1:] == (144, full.x.shape[2])
            pictures = full.x.reshape(-1, 32, 32, full.x.shape[2])
            wanted = np.einsum("hi,wj,nijc->nhwc", weights, weights, pictures).reshape(small.x.shape)
            assert np.abs(wanted - small.x).max() <= 1


def test_cifar_binary_and_pickled(tmp_path):
    """The same images from either archive; each pixel where it belongs; the split that random_split draws."""
    arrays = cifar_arrays()
    for name, members in (("binary", cifar_binary(arrays)), ("python", cifar_pickled(arrays))):
        (tmp_path / name).mkdir()
        tar(tmp_path / name / f"cifar-10-{name}.tar.gz", members)
        for task in ("image", "scifar"):
            data.prepare(task, tmp_path / name / "data", raw=tmp_path / name)
    labels = np.concatenate([arrays[f"data_batch_{i}"][0] for i in range(1, 6)])
    planes = np.concatenate([arrays[f"data_batch_{i}"][1] for i in range(1, 6)])
    train, val = torch.utils.data.random_split(range(200), [180, 20], torch.Generator().manual_seed(42))
    for split, members in (("train", list(train)), ("val", list(val))):
        colour, grey = (data.load(task, split, tmp_path / "binary" / "data") for task in ("scifar", "image"))
        assert (colour.y == labels[members]).all() and (grey.y == labels[members]).all()
        assert (colour.x.transpose(0, 2, 1).reshape(-1, 3072) == planes[members]).all()
        from PIL import Image
        for i, member in enumerate(members[:20]):
            picture = Image.fromarray(planes[member].reshape(3, 32, 32).transpose(1, 2, 0)).convert("L")
            assert (np.asarray(picture).reshape(-1) == grey.x[i, :, 0]).all()
        for task in ("image", "scifar"):
            one, other = (data.load(task, split, tmp_path / name / "data") for name in ("binary", "python"))
            assert (one.x == other.x).all() and (one.y == other.y).all()
    test = data.load("scifar", "test", tmp_path / "binary" / "data")
    assert (test.y == arrays["test_batch"][0]).all()
    x, y, lengths = test.batch([0, 3])
    assert x.shape == (2, 1024, 3) and lengths is None and y.dtype == torch.int64
    row = data.TASKS["scifar"]
    expected = (x.double().numpy() / 255 - (0.4914, 0.4822, 0.4465)) / (0.247, 0.243, 0.261)
    assert np.allclose(data.normalise(row, x).numpy(), expected, atol=1e-6)


class Evil:
    def __reduce__(self):
        return os.system, ("echo executed > executed",)


def test_pickle_that_calls_something(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    members = cifar_pickled(cifar_arrays(4))
    members["cifar-10-batches-py/data_batch_2"] = pickle.dumps({b"data": Evil(), b"labels": [0]}, 2)
    tar(tmp_path / "cifar-10-python.tar.gz", members)
    line = fails("--task", "image", "--data-dir", tmp_path / "data", "--raw", tmp_path)
    assert "data_batch_2" in line and "system" in line and not (tmp_path / "executed").exists()


@pytest.mark.parametrize("change, words", [
    (lambda m: m.pop("cifar-10-batches-bin/data_batch_3.bin"), "lacks data_batch_3"),
    (lambda m: m.update({"cifar-10-batches-bin/test_batch.bin": b"\x00" * 3072}), "not a CIFAR-10 batch"),
    (lambda m: m.update({"cifar-10-batches-bin/test_batch.bin": b"\xff" * 3073}), "not a CIFAR-10 batch"),
    (lambda m: m.update({"cifar-10-batches-bin/test_batch.bin": b""}), "not a CIFAR-10 batch")])
def test_damaged_cifar(tmp_path, change, words):
    members = cifar_binary(cifar_arrays(4))
    change(members)
    tar(tmp_path / "cifar-10-binary.tar.gz", members)
    assert words in fails("--task", "image", "--data-dir", tmp_path / "data", "--raw", tmp_path)


@pytest.mark.parametrize("more", [
    dict(x_train=np.zeros((9, 32, 32), np.float32)), dict(x_train=np.zeros((9, 3, 32, 32), np.uint8)),
    dict(y_train=np.full(9, 10)), dict(y_train=np.full(9, -1)), dict(y_train=np.zeros(8, int)),
    dict(y_train=np.eye(10)[:9]), dict(y_train=np.array(["cat"] * 9)), dict(x_test=np.zeros(3, object))])
def test_damaged_npz(tmp_path, more):
    arrays = dict(x_train=np.zeros((9, 32, 32), np.uint8), y_train=np.zeros(9, int),
                  x_test=np.zeros((4, 32, 32), np.uint8), y_test=np.zeros((4, 1), int))
    np.savez(tmp_path / "cifar10.npz", **arrays | more)
    assert "not an .npz of CIFAR-10" in fails("--task", "image", "--data-dir", tmp_path / "d", "--raw", tmp_path)
    np.savez(tmp_path / "cifar10.npz", **arrays)
    data.prepare("image", tmp_path / "d", raw=tmp_path)


@real
def test_cifar_real(tmp_path):
    """The pickled subset against the grey file, which was made from the full set; the full split sizes."""
    (tmp_path / "grey").mkdir()
    (tmp_path / "grey" / "cifar10_gray.npz").symlink_to(SAMPLES / "cifar10_gray.npz")
    data.prepare("image", tmp_path / "full", raw=tmp_path / "grey")
    splits = [data.load("image", split, tmp_path / "full") for split in data.SPLITS]
    assert [len(part) for part in splits] == [45_000, 5_000, 10_000]
    assert np.bincount(np.concatenate([splits[0].y, splits[1].y])).tolist() == [5_000] * 10
    assert np.bincount(splits[2].y).tolist() == [1_000] * 10
    x = data.normalise(data.TASKS["image"], splits[0].batch(range(4000))[0])
    assert abs(x.mean()) < 0.05 and abs(x.std() - 1) < 0.05
    read = data.read_cifar(SAMPLES / "cifar-10-python-10k-2k.tar.gz")
    full = np.load(SAMPLES / "cifar10_gray.npz")
    first = np.concatenate([np.arange(start, start + 2000) for start in range(0, 50_000, 10_000)])
    assert (data.grey(read["train"][0]) == full["x_train"][first]).all()
    assert (read["train"][1] == full["y_train"][first]).all()
    assert (data.grey(read["test"][0]) == full["x_test"][:2000]).all()
    assert "colour" in fails("--task", "scifar", "--data-dir", tmp_path / "c", "--raw", tmp_path / "grey")


# ---- Speech Commands ---------------------------------------------------------------------------------

def test_speech(server, monkeypatch, tmp_path):
    """Official lists, padding, labels in the official order, one mean and deviation; downloaded, then unpacked."""
    made = speech()
    content = tar(tmp_path / "s.tar.gz", made).read_bytes()
    point(monkeypatch, ["sc"], archive_of(server, "speech_commands_v0.02.tar.gz", content, "ok"))
    data.prepare("sc", tmp_path / "data")
    samples = {}
    for name, raw in made.items():
        if name.endswith(".wav") and "noise" not in name:
            with wave.open(io.BytesIO(raw)) as file:
                values = np.frombuffer(file.readframes(20_000), "<i2")
            samples[name[2:]] = np.pad(values, (0, 16_000 - len(values)))
    for split, indices in (("train", (0, 3, 4, 5)), ("val", (1,)), ("test", (2,))):
        part = data.load("sc", split, tmp_path / "data")
        wanted = {f"{word}/{i:08x}_nohash_{i}.wav" for word in data.WORDS for i in indices}
        assert len(part) == len(wanted)
        expected = {(samples[name].tobytes(), data.WORDS.index(name.split("/")[0])) for name in wanted}
        assert {(np.array(x[:, 0]).tobytes(), int(y)) for x, y in zip(part.x, part.y)} == expected
    row = data.load_task("sc", tmp_path / "data")
    x = data.normalise(row, data.load("sc", "train", tmp_path / "data").batch(range(140))[0])
    assert x.shape == (140, 16_000, 1) and abs(x.mean()) < 1e-3 and abs(x.std() - 1) < 1e-3
    folder = tmp_path / "unpacked"
    for name, raw in made.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(raw)
    data.prepare("sc", tmp_path / "again", raw=folder)
    for split in data.SPLITS:
        one, other = (data.load("sc", split, tmp_path / name) for name in ("data", "again"))
        assert (one.x == other.x).all() and (one.y == other.y).all()


@pytest.mark.parametrize("name, raw, words", [
    ("./bed/0.wav", clip(np.zeros(100), rate=8000), "8000 Hz"),
    ("./bed/0.wav", clip(np.zeros(100), channels=2), "2 channels"),
    ("./bed/0.wav", clip(np.zeros(100))[:-50], "75 of its 100 samples"),
    ("./bed/0.wav", b"RIFFno wave", "not a .wav"), ("./bed/0.wav", b"", "not a .wav")])
def test_damaged_speech(tmp_path, name, raw, words):
    tar(tmp_path / "speech_commands_v0.02.tar.gz", speech() | {name: raw})
    line = fails("--task", "sc", "--data-dir", tmp_path / "data", "--raw", tmp_path)
    assert words in line and "bed/0.wav" in line


@real
def test_speech_real(tmp_path):
    data.prepare("sc", tmp_path, raw=SAMPLES)
    splits = [data.load("sc", split, tmp_path) for split in data.SPLITS]
    assert [len(part) for part in splits] == [25, 1, 1212]
    assert set(splits[2].y.tolist()) == set(range(35)) == set(range(data.TASKS["sc"].classes))
    assert data.TASKS["sc"].sizes[1:] == (9_981, 11_005) and sum(data.TASKS["sc"].sizes) == 105_829


# ---- BIDMC -------------------------------------------------------------------------------------------

def test_bidmc(server, monkeypatch, tmp_path):
    """Two .ts files behind a Zenodo record; targets in [-1, 1] by the training range; who overlaps whom is seen."""
    series, source = windows(6)
    targets = 60 + 5.0 * source + np.arange(len(source)) % 7
    parts = {"BIDMC32HR_TRAIN.ts": ts(series[:50], targets[:50]), "BIDMC32HR_TEST.ts": ts(series[50:], targets[50:])}
    record = {"files": [{"key": name, "size": len(raw), "checksum": "md5:" + hashlib.md5(raw).hexdigest()}
                        for name, raw in parts.items()]}
    record_at = server("record", json.dumps(record).encode())("ok")
    archives = [data.Archive(name, (server(name, raw)("404"), server(name, raw)("cut")), None, None, record_at)
                for name, raw in parts.items()]
    point(monkeypatch, ["bidmc_hr"], *archives)
    data.prepare("bidmc_hr", tmp_path / "data")
    train, rest = np.split(np.random.RandomState(0).permutation(72)[::-1], [50])
    splits = [data.load("bidmc_hr", split, tmp_path / "data") for split in data.SPLITS]
    assert [len(part) for part in splits] == [50, 11, 11]
    low, high = min(targets[train]), max(targets[train])
    for part in splits:
        x, y, _ = part.batch(range(len(part)))
        assert x.dtype == torch.float32 and x.shape[1:] == (4000, 2) and y.dtype == torch.float32
        for one, target in zip(x.numpy(), y.numpy()):
            at = np.flatnonzero(np.isclose(series[:, 0], one[:, 0], atol=1e-5).all(1))
            assert len(at) == 1 and np.allclose(series[at[0], 1], one[:, 1], atol=1e-5)
            assert np.isclose((target + 1) / 2 * (high - low) + low, targets[at[0]], atol=1e-4)
    meta = json.loads((tmp_path / "data" / "bidmc_hr" / "meta.json").read_text())
    assert meta["found"]["groups"] == 6 and meta["found"]["leak"] == 1.0
    # by recording: no test window shares a sample with a training window
    data.prepare("bidmc_hr", tmp_path / "grouped", raw=tmp_path / "data" / "downloads", grouped=True)
    splits = [data.load("bidmc_hr", split, tmp_path / "grouped") for split in data.SPLITS]
    assert [len(part) for part in splits] == [48, 12, 12]            # of six recordings four, one, one
    sources = [{int(source[np.isclose(series[:, 0], x[:, 0], atol=1e-5).all(1)][0]) for x in part.x} for part in splits]
    assert all(sources) and sum(map(len, sources)) == 6 and set.union(*sources) == set(range(6))
    assert json.loads((tmp_path / "grouped" / "bidmc_hr" / "meta.json").read_text())["found"]["leak"] == 0
    assert "grouped" in fails("--task", "bidmc_hr", "--data-dir", tmp_path / "data", "--grouped")
    assert "no meaning" in fails("--task", "image", "--data-dir", tmp_path / "data", "--grouped")


def test_windows_scaled_one_by_one(tmp_path):
    """Then no two windows share a number, and nothing can be said about overlap."""
    series, source = windows(3)
    series = (series - series.mean(2, keepdims=True)) / series.std(2, keepdims=True)
    for i, part in enumerate(("TRAIN", "TEST")):
        (tmp_path / f"BIDMC32HR_{part}.ts").write_bytes(ts(series[i::2], np.arange(len(series))[i::2]))
    data.prepare("bidmc_hr", tmp_path / "data", raw=tmp_path)
    assert json.loads((tmp_path / "data" / "bidmc_hr" / "meta.json").read_text())["found"]["leak"] is None
    assert "cannot be split" in fails("--task", "bidmc_hr", "--data-dir", tmp_path / "g", "--raw", tmp_path, "--grouped")


def test_official_windows_are_those_of_train_test_split():
    """scikit-learn's train_test_split(range(10), test_size=0.3, random_state=0) is documented to give these."""
    train, val, test = data.official_windows(10)
    assert train.tolist() == [9, 1, 6, 7, 3, 0, 5]
    # the second call shuffles [2, 8, 4] with seed 1, whose permutation of 3 is [0, 2, 1], and holds out two
    assert val.tolist() == [8] and test.tolist() == [2, 4]
    for task, n in (("bidmc_rr", 7870), ("bidmc_hr", 7949), ("bidmc_spo2", 7949)):
        parts = data.official_windows(n)
        assert tuple(map(len, parts)) == data.TASKS[task].sizes
        assert sorted(np.concatenate(parts)) == list(range(n))


def test_ts_values(tmp_path):
    path = tmp_path / "a.ts"
    path.write_text("#x\n@univariate false\n@DATA\n1,?,3:?,5,?:70.5\n\n0,0,1:4,4,4:80\n", encoding="latin-1")
    series, targets = data.read_ts(path, 3, 2)
    assert series.tolist() == [[[1, 5], [2, 5], [3, 5]], [[0, 4], [0, 4], [1, 4]]] and targets.tolist() == [70.5, 80]


@pytest.mark.parametrize("body, words", [
    ("1,2,3:1,2,3:7\n1,2,3:4:7\n", "line 4"), ("1,2,3:4,5,6\n", "line 3"), ("1,2,x:4,5,6:7\n", "line 3"),
    ("1,2,3:4,5,6:seven\n", "line 3"), ("?,?,?:4,5,6:7\n", "line 3"), ("1,2,3:4,5,6:nan\n", "not finite"),
    ("1,2,3:4,5,1e39:7\n", "not finite"), ("1,2,3:4,5,6:7,8,9:1\n", "line 3"), ("", "no example")])
def test_damaged_ts(tmp_path, body, words):
    (tmp_path / "a.ts").write_text("# x\n@data\n" + body)
    with pytest.raises(data.UserError, match=words):
        data.read_ts(tmp_path / "a.ts", 3, 2)


@real
def test_recordings_in_a_real_signal(tmp_path):
    """Windows of a real recording that overlap are one group; a flat stretch does not tie strangers together."""
    values = np.loadtxt(SAMPLES / "bidmc" / "bidmc_01_Signals.csv", delimiter=",", skiprows=1, usecols=(2, 5),
                        dtype=np.float32)
    series = np.stack([values[i:i + 4000] for i in range(0, len(values) - 4000, 375)])
    window, hashes = data.fingerprints(series)
    assert set(window) == set(range(len(series)))
    assert data.recordings(window, hashes, len(series)).max() == 0
    apart = np.stack([values[i:i + 4000] for i in range(0, len(values) - 4000, 4000)])
    assert data.recordings(*data.fingerprints(apart), len(apart)).max() == len(apart) - 1
    flat = np.zeros((2, 4000, 2), np.float32)
    assert len(data.fingerprints(flat)[0]) == 0
    # the same windows as .ts files, through the whole of prepare
    targets = 70 + np.arange(len(series)) % 9
    for i, part in enumerate(("TRAIN", "TEST")):
        (tmp_path / f"BIDMC32RR_{part}.ts").write_bytes(ts(series[i::2].transpose(0, 2, 1), targets[i::2]))
    data.prepare("bidmc_rr", tmp_path / "data", raw=tmp_path)
    assert json.loads((tmp_path / "data/bidmc_rr/meta.json").read_text())["found"] == {
        "label_range": [70, 78], "groups": 1, "leak": 1.0}
    assert "cannot be split" in fails("--task", "bidmc_rr", "--data-dir", tmp_path / "g", "--raw", tmp_path, "--grouped")


# ---- Retrieval ---------------------------------------------------------------------------------------

AAN = ('1.0\tA1\tB1\tplain text\tanother "quoted" word inside\n'
       '0.0\tA2\tB2\t"a tab\there, a line\nend, ""doubled"" quotes"\tb\n'
       '1.0\tA3\tB3\t' + "x" * 5000 + '\t\u00fc\n')


def test_retrieval(tmp_path):
    texts = [("plain text", 'another "quoted" word inside', 1), ('a tab\there, a line\nend, "doubled" quotes', "b", 0),
             ("x" * 3999, "\u00fc", 1)]
    for split in ("train", "eval", "test"):
        more = "" if split == "train" else "\ufeff"                    # a byte order mark is no text
        (tmp_path / f"new_aan_pairs.{split}.tsv").write_text(more + AAN * 2, encoding="utf-8", newline="")
    data.prepare("retrieval", tmp_path / "data", raw=tmp_path)
    row = data.load_task("retrieval", tmp_path / "data")
    known = set("".join(a + b for a, b, _ in texts))
    assert row.vocab == 4 + len(known)
    meta = json.loads((tmp_path / "data" / "retrieval" / "meta.json").read_text())
    symbols = ["", "", "", "", *meta["found"]["symbols"]]
    for split in data.SPLITS:
        part = data.load("retrieval", split, tmp_path / "data")
        assert len(part) == 6 and len(part.offsets) == 13
        x, y, lengths = part.batch([4, 0, 2])
        assert x.shape == (3, 2, 4000) and lengths.shape == (3, 2) and y.tolist() == [0, 1, 1]
        for pair, ends, which in zip(x.tolist(), lengths.tolist(), (1, 0, 2)):
            for ids, n, text in zip(pair, ends, texts[which]):
                assert "".join(symbols[i] for i in ids[:n - 1]) == text
                assert ids[n - 1] == data.EOS and set(ids[n:]) <= {data.PAD}
    data.prepare("retrieval", tmp_path / "less", sizes=(3, 2, 1), raw=tmp_path)
    assert [len(data.load("retrieval", split, tmp_path / "less")) for split in data.SPLITS] == [3, 2, 1]
    line = fails("--task", "retrieval", "--data-dir", tmp_path / "more", "--raw", tmp_path, "--train", 3, "--val", 7)
    assert "6 examples for val, not 7" in line


def test_vocabulary_is_that_of_the_training_texts(tmp_path):
    for split in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{split}.tsv").write_text(f"1.0\tA\tB\tab\t{'b' if split == 'train' else 'xyz'}\n")
    data.prepare("retrieval", tmp_path / "data", raw=tmp_path)
    x, _, lengths = data.load("retrieval", "val", tmp_path / "data").batch([0])
    assert data.load_task("retrieval", tmp_path / "data").vocab == 6
    assert x.tolist() == [[[5, 4, 3, 1], [2, 2, 2, 3]]] and lengths.tolist() == [[3, 4]]       # b is the more frequent


def test_a_quote_that_is_never_closed(tmp_path):
    for split in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{split}.tsv").write_text(AAN + '1.0\tA\tB\t"open' + "\nx" * 3_000_000)
    line = fails("--task", "retrieval", "--data-dir", tmp_path / "data", "--raw", tmp_path)
    assert "new_aan_pairs.train.tsv, line" in line and "field larger than" in line


@pytest.mark.parametrize("line", ["1.0\tA\tB\tonly one text\n", "2.0\tA\tB\tx\ty\n", "x\n", "label\tid1\tid2\tt\tt\n"])
def test_damaged_retrieval(tmp_path, line):
    for split in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{split}.tsv").write_text(AAN + line, encoding="utf-8", newline="")
    said = fails("--task", "retrieval", "--data-dir", tmp_path / "data", "--raw", tmp_path)
    assert "new_aan_pairs.train.tsv, line 5" in said


def test_retrieval_cannot_be_downloaded(tmp_path):
    line = fails("--task", "retrieval", "--data-dir", tmp_path)
    assert "403" in line and "new_aan_pairs.{train,eval,test}.tsv" in line and "--raw DIR" in line


def test_more_symbols_than_a_byte_holds(tmp_path):
    texts = "".join(map(chr, range(0x4e00, 0x4e00 + 400)))
    for split in ("train", "eval", "test"):
        (tmp_path / f"new_aan_pairs.{split}.tsv").write_text(f"1.0\tA\tB\t{texts}\tb\n", encoding="utf-8")
    data.prepare("retrieval", tmp_path / "data", raw=tmp_path)
    x, _, lengths = data.load("retrieval", "train", tmp_path / "data").batch([0])
    assert data.load_task("retrieval", tmp_path / "data").vocab == 405 == int(x.max()) + 1
    assert len(set(x[0, 0, :400].tolist())) == 400


# ---- --list, --show, memory --------------------------------------------------------------------------

def test_list(tmp_path, capsys):
    data.prepare("listops_demo", tmp_path, sizes=(10, 5, 5), workers=1)
    assert data.main(["--list", "--data-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in data.TASKS)
    for words in ("84,125,825 bytes from ai.stanford.edu", "45,000 / 5,000 / 10,000", "CC BY 4.0", "35 classes",
                  "regression", "2 x 4,000", "new_aan_pairs", " prepared; generated"):
        assert words in out
    assert out.count("not prepared") == len(data.TASKS) - 1


@pytest.mark.parametrize("task", ["listops_demo", "pathfinder_demo", "text_demo", "scifar", "sc", "bidmc_rr",
                                  "retrieval"])
def test_show(tmp_path, task):
    from PIL import Image
    raw = tmp_path / "raw"
    raw.mkdir()
    tar(raw / "aclImdb_v1.tar.gz", imdb()), tar(raw / "cifar-10-binary.tar.gz", cifar_binary(cifar_arrays(6)))
    if task == "sc":
        tar(raw / "speech_commands_v0.02.tar.gz", speech())
    if task == "bidmc_rr":
        series, source = windows(4, n=5)
        for i, part in enumerate(("TRAIN", "TEST")):
            (raw / f"BIDMC32RR_{part}.ts").write_bytes(ts(series[i::2], source[i::2] + 12.5))
    for split in ("train", "eval", "test"):
        (raw / f"new_aan_pairs.{split}.tsv").write_text(AAN, encoding="utf-8", newline="")
    generated = data.TASKS[task].make is not None
    more = ["--train", "20", "--val", "5", "--test", "5", "--workers", "1"] if generated else ["--raw", str(raw)]
    assert data.main(["--task", task, "--data-dir", str(tmp_path), "--show", str(tmp_path / "sheet.png"), *more]) == 0
    picture = np.asarray(Image.open(tmp_path / "sheet.png").convert("L"))
    assert min(picture.shape) > 400 and 0.005 < (picture < 128).mean() < 0.9
    middle, hidden = picture.shape[1] // 2, data.TASKS[task].mask
    if data.TASKS[task].kind == "tokens" or data.TASKS[task].side:     # waveforms show other steps on the right
        left, right = picture[60:, :middle].astype(int), picture[60:, -middle:].astype(int)
        assert (abs(left - right) > 40).mean() > 0.005, f"{hidden} are hidden, and nothing shows it"
    assert ".png" in fails("--task", task, "--data-dir", tmp_path, "--show", tmp_path / "sheet.jpeg2")


def test_batches_of_a_set_larger_than_memory(tmp_path):
    """PathX-256 at full size, as a file with holes: a batch reads its rows only."""
    row = data.TASKS["pathx256"]
    n = row.sizes[0]
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.uint8, (n, row.length, 1))
    x[n - 1] = 7
    x.flush()
    del x
    code = ("import resource, sys, numpy as np, data\n"
            "x = np.load(sys.argv[1], mmap_mode='r')\n"
            "part = data.Split(data.TASKS['pathx256'], x, np.zeros(len(x), np.uint8))\n"
            "import torch\n"
            "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
            "for step in range(50):\n"
            "    batch, _, _ = part.batch([len(x) - 1, *data.order(len(x), 0, step)[:7]])\n"
            "    assert batch[0].min() == 7 and batch.shape == (8, 65536, 1)\n"
            "print(x.nbytes, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)")
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "x.npy"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    size, grown = map(int, done.stdout.split())
    assert size > 10e9 and grown < 300_000                          # KiB
