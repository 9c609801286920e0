"""Files, downloads and one-line errors, used by every script. Skip it at a first reading."""

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import filelock
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent

# ---- errors --------------------------------------------------------------------------------------


class UserError(Exception):
    """A user's mistake in one line: what is wrong, the value, and the command that fixes it."""


class BadRows(UserError):
    """Some rows cannot be read. rows: which of the file, counted from 0."""

    def __init__(self, text, rows):
        super().__init__(text)
        self.rows = [*rows]


def refuse_rows(path, problems, advice):
    """Raise BadRows if there are problems, {row: (its place, what is wrong)}. Up to five rows are
    named."""
    if problems:
        (first, problem), *others = problems.values()
        text = f"{path}, {first}: {problem}{advice and '; '}{advice}"
        if others:
            more = ", ..." if others[4:] else ""
            places = ", ".join(place for place, _ in others[:4])
            text += f". The same: {places}{more} ({len(problems):,} in all)"
        raise BadRows(text, problems)


class Parser(argparse.ArgumentParser):
    """argparse's parser with one-line errors. With `examples`, a command without arguments prints
    the examples of its script's docstring."""

    def __init__(self, *, examples=False, **more):
        super().__init__(**more)
        self.examples = examples

    def parse_args(self, args=None, namespace=None):
        if self.examples and args is None and len(sys.argv) == 1:
            print("\n\n".join((sys.modules["__main__"].__doc__ or "").split("\n\n")[:2]))
            raise SystemExit(0)
        return super().parse_args(args, namespace)

    def error(self, message):
        raise UserError(message)


def exit_code(main, interrupted="interrupted"):
    """Run a script's main and return its exit code: 0 or what main returns; 2, after one line, for
    a user's mistake or a failing disk; 130 for Ctrl-C; 141 if nothing reads the output any more."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # for ASCII terminals
    text = None
    try:
        code = main() or 0
        print(end="", flush=True)
    except BrokenPipeError:  # e.g. of `| head`
        code = 141
    except (UserError, OSError, MemoryError, ImportError) as error:  # e.g. no matplotlib
        code = 2
        text = f"error: {error}"
    except KeyboardInterrupt as error:
        code = 130
        text = str(error) or interrupted
    if text:
        print(" ".join(text.splitlines()), file=sys.stderr)
    try:
        print(end="", flush=True)
    except OSError:  # otherwise it fails again, with a traceback, when Python ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


@contextlib.contextmanager
def reading(problem, advice):
    """Turn any exception into a UserError: a damaged file can make its reader raise anything."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        if isinstance(error, LookupError) or not text:  # whose text is a bare key, or nothing
            text = f"{type(error).__name__} {text}"
        raise UserError(f"{problem}: {text}; {advice}") from None


def without_comments(source):
    """Return Python source without comments and empty lines, in every Python the same."""
    string_or_comment = r"""((?P<quote>\"{3}|'{3}|"|')(?:\\.|.)*?(?P=quote))|#[^\n]*"""
    source = re.sub(string_or_comment, lambda match: match[1] or "", source, flags=re.DOTALL)
    lines = [line.rstrip() for line in source.split("\n")]
    return "\n".join(line for line in lines if line)


# ---- whole files ---------------------------------------------------------------------------------


def write_atomically(path, write):
    """Call write(open binary file), then rename: `path` is complete or absent. UserError for a full
    disk."""
    path = Path(path)
    device = path.is_char_device()  # e.g. /dev/stdout: a rename would replace it by a file
    temporary = path if device else path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            device or os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        problem = f"cannot write {path}: {str(error).splitlines()[0]}"
        raise UserError(f"{problem}; make room, or choose another folder") from None
    finally:
        device or temporary.unlink(missing_ok=True)


def write_json(path, record):
    """Write a record as indented JSON, atomically; what JSON has no type for, as text."""
    text = json.dumps(record, indent=1, default=str) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def read_json(path):
    """Read a JSON object -> dict. UserError if the file is missing or damaged."""
    advice = f"restore it, or, if {Path(path).parent} is a data set or a run, remove that folder"
    with reading(f"{path} is missing or damaged", advice):
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        if not isinstance(record, dict):
            raise ValueError("it is no JSON object")
        return record


def locked(path, busy, wait=True):
    """Acquire a lock file -> context manager; however this process ends, the lock is released. If
    another holds it, print `busy` and wait; without `wait`, raise `busy` as UserError."""
    lock = filelock.FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except filelock.Timeout:
        if not wait:
            raise UserError(busy) from None
        print(f"{busy}; waiting", flush=True)
        return lock.acquire()


# ---- downloads -----------------------------------------------------------------------------------

PAUSE = 2  # seconds before a download is retried


def fetch(url, folder, by_hand, sha256=None):
    """Download a file into a folder, unless it is there, and return its path. It is called
    NAME.part until it is complete and its checksum verified; the next call resumes it. UserError,
    with what to do `by_hand`, after four failures in a row without a new byte."""
    from requests import RequestException
    from urllib3.exceptions import HTTPError as BrokenBody  # raised in the middle of a body

    name = url.rsplit("/", 1)[1]
    path = folder / name
    part = folder / f"{name}.part"
    failures = []
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / f".{name}.lock", f"{path} is being downloaded by another process"):
        while not path.exists():
            have = part.stat().st_size if part.exists() else 0
            try:
                _request(url, part, have)
                if sha256 in (None, sha256_of(part)):
                    os.replace(part, path)
                    break
                part.unlink()
                failures.append("wrong checksum")
            except (RequestException, BrokenBody) as error:
                grown = part.exists() and part.stat().st_size > have
                # without its pool's words
                reason = getattr(next(iter(error.args), None), "reason", error)
                failures = [] if grown else [*failures, str(reason)]
                time.sleep(PAUSE)
            if len(failures) == 4 or "wrong checksum" in failures and not have:
                problem = f"{url} cannot be downloaded ({'; '.join(dict.fromkeys(failures))})"
                raise UserError(f"{problem}. Get it in another way, then {by_hand}")
    return path


def _request(url, part, have):
    """Request the bytes after the first `have`, and append them to `part` as they arrive."""
    import requests

    headers = {"Accept-Encoding": "identity", "Range": f"bytes={have}-"}
    with requests.get(url, headers=headers, stream=True, timeout=60) as answer:
        if answer.status_code == 416:  # no bytes are missing
            return
        answer.raise_for_status()
        if answer.status_code != 206:  # a server that cannot resume sends the whole file
            have = 0
        total = have + int(answer.headers.get("Content-Length", 0))
        progress = dict(desc=part.name, total=total, initial=have)
        # Not iter_content: it would unpack a body that the server declares as gzip, and drop the
        # end of a broken body.
        with (
            tqdm.wrapattr(answer.raw, "read", **progress) as body,
            open(part, "ab" if have else "wb") as file,
        ):
            shutil.copyfileobj(body, file)


def sha256_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- rooms: folders in which every file adds models or tasks -------------------------------------


def load_room(folder, table, flag):
    """Import every file of a folder; each adds entries to a table {name: entry}. Return {name: its
    file}. A name that is taken ends the script with one line. flag: chooses an entry."""
    homes = {}
    for path in sorted(folder.glob("[!_.]*.py")):
        before = dict(table)
        importlib.import_module(f"{folder.name}.{path.stem}")
        for name, entry in table.items():
            if name not in before:
                homes[name] = path
            elif entry is not before[name]:
                home = f"{folder.name}/{homes[name].name}" if name in homes else "models.py"
                problem = f"{folder.name}/{path.name}: {flag} {name} is already defined in {home}"
                print(f"error: {problem}; choose another name", file=sys.stderr)
                raise SystemExit(2)
    return homes
