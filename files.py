"""Files, downloads and one-line errors: what every script uses, and nobody needs to read first."""
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def silent(kind, *rest):
    """No traceback where Ctrl-C comes while a script still imports, which takes seconds: scripts import this file
    first."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, *rest)


# Of our scripts only: what imports this from elsewhere keeps its own way.
if ROOT in Path(getattr(sys.modules["__main__"], "__file__", "/")).resolve().parents:
    sys.excepthook = silent

# Only now what takes its time to be imported.
import argparse  # noqa: E402
import contextlib  # noqa: E402
import hashlib  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import shutil  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402

import filelock  # noqa: E402
from tqdm import tqdm  # noqa: E402

# ---- errors ----------------------------------------------------------------------------------------------------------

class UserError(Exception):
    """A user's mistake, in one line: what is wrong, the value, the command that mends it."""


class Parser(argparse.ArgumentParser):
    """argparse's, with one-line errors. A bare command prints the examples of its script's docstring, if asked to."""

    def __init__(self, *, examples=False, **more):
        super().__init__(**more)
        self.examples = examples

    def parse_args(self, args=None, namespace=None):
        if self.examples and args is None and len(sys.argv) == 1:
            print("\n\n".join(sys.modules["__main__"].__doc__.split("\n\n")[:2]))
            raise SystemExit(0)
        return super().parse_args(args, namespace)

    def error(self, message):
        raise UserError(message)


def exit_code(main, interrupted="interrupted"):
    """Runs a script's main -> 0, or what it returns; 2, after one line, for a user's mistake and for what a disk does;
    130 for Ctrl-C; 141, without a word, where nobody reads any more what it prints."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")          # an ASCII terminal
    text = None
    try:
        code = main() or 0
        print(end="", flush=True)
    except BrokenPipeError:
        code = 141
    except (UserError, OSError, MemoryError, ImportError) as error:              # no matplotlib, say
        code, text = 2, f"error: {error}"
    except KeyboardInterrupt as error:
        code, text = 130, str(error) or interrupted
    with contextlib.suppress(OSError):
        if text:
            print(" ".join(text.splitlines()), file=sys.stderr)
        print(end="", flush=True)
        return code
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())     # else its end fails too
    return code


@contextlib.contextmanager
def reading(problem, advice):
    """UserError, in one line, for whatever the reader of a file raises: a damaged one can make it raise anything."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        kind = f"{type(error).__name__} " if isinstance(error, LookupError) or not str(error) else ""
        raise UserError(f"{problem}: {kind}{' '.join(str(error).split())[:300]}; {advice}") from None


# ---- whole files -----------------------------------------------------------------------------------------------------

def write_atomically(path, write):
    """write(open binary file), then rename: `path` is there whole or not at all. UserError for a full disk."""
    path = Path(path)
    device = path.is_char_device()                        # /dev/stdout, say, whose place no file may take
    temporary = path if device else path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            device or os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:              # torch.save reports a full disk as RuntimeError
        raise UserError(f"cannot write {path}: {str(error).splitlines()[0]}; make room, or choose another "
                        "folder") from None
    finally:
        device or temporary.unlink(missing_ok=True)


def write_json(path, record):
    """A record as indented JSON, written atomically; what JSON has no type for is written as text."""
    text = json.dumps(record, indent=1, default=str) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def read_json(path, *wanted):
    """A JSON object -> dict. UserError when the file is missing or damaged, or lacks one of these fields."""
    advice = f"restore it, or, if {Path(path).parent} is one data set or run, remove that"
    with reading(f"{path} is missing or damaged", advice):
        record = json.loads(Path(path).read_text())
        if not isinstance(record, dict) or not {*wanted} <= record.keys():
            raise ValueError(f"it is no record with {' '.join(wanted)}" if wanted else "it is no record")
        return record


def locked(path, busy, wait=True):
    """Take a lock file -> context manager; it is released when this process ends, however it ends. Where another
    process holds it: print `busy` and wait, or raise it as UserError."""
    lock = filelock.FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except filelock.Timeout:
        if not wait:
            raise UserError(busy) from None
        print(f"{busy}; waiting", flush=True)
        return lock.acquire()


# ---- downloads -------------------------------------------------------------------------------------------------------

PAUSE = 2                                # seconds before a download is tried again


def fetch(url, folder, by_hand, sha256=None):
    """Download a file into a folder, unless it is there -> its path.

    Until it is whole and its checksum right it is NAME.part, with which the next call resumes. UserError after four
    failures in a row without a new byte, with what to do `by_hand`.
    """
    from requests import RequestException
    from urllib3.exceptions import HTTPError as BrokenBody          # in the middle of a body
    name = url.rsplit("/", 1)[1]
    path, part, failures = folder / name, folder / f"{name}.part", []
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
                failures = [] if grown else [*failures, str(error)]
                time.sleep(PAUSE)
            if len(failures) == 4 or "wrong checksum" in failures and not have:
                raise UserError(f"{url} cannot be downloaded ({'; '.join(dict.fromkeys(failures))}). Get it in another "
                                f"way, {by_hand}")
    return path


def _request(url, part, have):
    """One request for what is missing after `have` bytes; the body goes into `part` as it comes."""
    import requests
    headers = {"Accept-Encoding": "identity", "Range": f"bytes={have}-"}
    with requests.get(url, headers=headers, stream=True, timeout=60) as answer:
        if answer.status_code == 416:                     # nothing is missing
            return
        answer.raise_for_status()
        if answer.status_code != 206:                     # a server that does not resume sends all of it
            have = 0
        left = int(answer.headers.get("Content-Length", 0))
        # Not iter_content: it would unpack what a server calls a gzip encoding, and drop the end of a broken body.
        with tqdm.wrapattr(answer.raw, "read", desc=part.name, total=have + left, initial=have) as body:
            with open(part, "ab" if have else "wb") as file:
                shutil.copyfileobj(body, file)


def sha256_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- rooms: every file of a folder is a model or a task --------------------------------------------------------------

def refuse(path, problem):
    """End with one line that names the file."""
    name = path.relative_to(ROOT) if ROOT in path.parents else path
    print(f"error: {name}: {' '.join(problem.split())}; mend it, or take it out of {path.parent.name}/",
          file=sys.stderr)
    raise SystemExit(2)


def load_room(folder, table, what, check):
    """Import every file of a folder, each of which adds entries to a table {name: entry}.

    what: the flag that chooses an entry, for messages. check(name, entry) raises where an entry does not fit; all files
    are loaded before. A file that cannot be loaded or checked, or that takes the name of another's entry, ends the
    script with one line.
    """
    homes = {}                                 # {name: its file}
    for path in sorted(folder.glob("[!_.]*.py")):
        before = dict(table)
        try:
            importlib.import_module(f"{folder.name}.{path.stem}")
        except Exception as error:             # a file in the making can raise anything
            frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
            frames += [(Path(error.filename), error.lineno)] if isinstance(error, SyntaxError) else []
            inside = [frame for frame in frames if frame[0].parent == folder and frame[0].name != "__init__.py"]
            path, line = inside[-1] if inside else (path, 1)                                  # it may import another
            refuse(path, f"line {line}: {type(error).__name__}: {error}")
        for name in table:
            if name in before and table[name] is not before[name]:
                home = f"{folder.name}/{homes[name].name}" if name in homes else "models.py"
                refuse(path, f"{what} {name} is that of {home} already")
            if name not in before:
                homes[name] = path
    check_room(homes, table, check)
    return homes


def check_room(homes, table, check):
    for name, path in homes.items():
        try:
            check(name, table[name])
        except Exception as error:             # an entry of any kind
            refuse(path, str(error))
