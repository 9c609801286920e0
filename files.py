"""Files, downloads and one-line errors, used by every script. A first reading may skip this
file."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def silent(kind, *rest):
    """Print no traceback after Ctrl-C while a script is still importing. Imports take seconds, so
    scripts import this file first."""
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, *rest)


# Only for our scripts: other programs that import this file keep their own hook.
if ROOT in Path(getattr(sys.modules["__main__"], "__file__", "/")).resolve().parents:
    sys.excepthook = silent

# Slow imports come after the hook is set.
import argparse  # noqa: E402
import contextlib  # noqa: E402
import difflib  # noqa: E402
import hashlib  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import shutil  # noqa: E402
import time  # noqa: E402
import traceback  # noqa: E402

import filelock  # noqa: E402
from tqdm import tqdm  # noqa: E402

# ---- errors --------------------------------------------------------------------------------------


class UserError(Exception):
    """A user's mistake, described in one line: what is wrong, the value, and the command that fixes
    it."""


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
        word, known = (
            message.partition("unrecognized arguments: ")[2].split(" "),
            self._option_string_actions,
        )
        close = difflib.get_close_matches(word[0], known, 1)
        raise UserError(message + "".join(f"; did you mean {one}?" for one in close))


def exit_code(main, interrupted="interrupted"):
    """Run a script's main and return its exit code: 0 or what main returns; 2, after printing one
    line, for a mistake of the user and for a failing disk; 130 for Ctrl-C; 141, silently, if
    nothing reads the output any more."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # for ASCII terminals
    text = None
    try:
        code = main() or 0
        print(end="", flush=True)
    except BrokenPipeError:
        code = 141
    except (UserError, OSError, MemoryError, ImportError) as error:  # e.g. no matplotlib
        code, text = 2, f"error: {error}"
    except KeyboardInterrupt as error:
        code, text = 130, str(error) or interrupted
    with contextlib.suppress(OSError):
        if text:
            print(" ".join(text.splitlines()), file=sys.stderr)
        print(end="", flush=True)
        return code
    # otherwise closing it fails again at exit
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


@contextlib.contextmanager
def reading(problem, advice):
    """Turn any exception into a one-line UserError: a damaged file can make its reader raise
    anything."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        kind = (
            f"{type(error).__name__} " if isinstance(error, LookupError) or not str(error) else ""
        )
        raise UserError(
            f"{problem}: {kind}{' '.join(str(error).split())[:300]}; {advice}"
        ) from None


def without_comments(source):
    """Return Python source without comments and empty lines. Unlike ast.unparse, it does not depend
    on the version."""
    string_or_comment = r"""((?P<quote>\"{3}|'{3}|"|')(?:\\.|.)*?(?P=quote))|#[^\n]*"""
    source = re.sub(string_or_comment, lambda found: found[1] or "", source, flags=re.DOTALL)
    return "\n".join(filter(None, map(str.rstrip, source.split("\n"))))


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
        raise UserError(
            f"cannot write {path}: {str(error).splitlines()[0]}; make room, or choose another "
            "folder"
        ) from None
    finally:
        device or temporary.unlink(missing_ok=True)


def write_json(path, record):
    """Write a record as indented JSON, atomically. Values that JSON has no type for are written as
    text."""
    text = json.dumps(record, indent=1, default=str) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))


def read_json(path):
    """Read a JSON object -> dict. UserError if the file is missing or damaged."""
    advice = f"restore it, or, if {Path(path).parent} is a data set or a run, remove that folder"
    with reading(f"{path} is missing or damaged", advice):
        record = json.loads(Path(path).read_text())
        if not isinstance(record, dict):
            raise ValueError("it is no JSON object")
        return record


def locked(path, busy, wait=True):
    """Acquire a lock file -> context manager. The lock is released when this process ends, however
    it ends. If another process holds it, print `busy` and wait; without `wait`, raise `busy` as
    UserError."""
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
    """Download a file into a folder, unless it is there, and return its path.

    The file is called NAME.part until it is complete and its checksum verified; the next call
    resumes it. UserError after four failures in a row without a new byte; the message says what to
    do `by_hand`."""
    from requests import RequestException
    from urllib3.exceptions import HTTPError as BrokenBody  # raised in the middle of a body

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
                # without its pool's words
                reason = getattr(next(iter(error.args), None), "reason", error)
                failures = [] if grown else [*failures, str(reason)]
                time.sleep(PAUSE)
            if len(failures) == 4 or "wrong checksum" in failures and not have:
                raise UserError(
                    f"{url} cannot be downloaded ({'; '.join(dict.fromkeys(failures))}). Get it in "
                    "another "
                    f"way, then {by_hand}"
                )
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
        left = int(answer.headers.get("Content-Length", 0))
        # Not iter_content: it would unpack a body that the server declares as gzip, and drop the
        # end of a broken body.
        with (
            tqdm.wrapattr(
                answer.raw, "read", desc=part.name, total=have + left, initial=have
            ) as body,
            open(part, "ab" if have else "wb") as file,
        ):
            shutil.copyfileobj(body, file)


def sha256_of(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- rooms: folders in which every file adds models or tasks -------------------------------------


def refuse(path, problem):
    """End the script with one line that names the file."""
    name = path.relative_to(ROOT) if ROOT in path.parents else path
    print(
        f"error: {name}: {' '.join(problem.split())}; fix it, or remove it from {path.parent.name}/",
        file=sys.stderr,
    )
    raise SystemExit(2)


def load_room(folder, table, what, check):
    """Import every file of a folder. A file adds entries to a table {name: entry}. Return {name:
    its file}.

    what: the flag that chooses an entry, for messages. check(name, entry) raises if an entry does
    not fit; it is called after all files are loaded. A file that cannot be loaded, fails its check
    or reuses the name of another file's entry ends the script with one line."""
    homes = {}  # {name: its file}
    for path in sorted(folder.glob("[!_.]*.py")):
        before = dict(table)
        try:
            importlib.import_module(f"{folder.name}.{path.stem}")
        except Exception as error:  # an unfinished file can raise anything
            frames = [
                (Path(frame.filename), frame.lineno)
                for frame in traceback.extract_tb(error.__traceback__)
            ]
            frames += (
                [(Path(error.filename), error.lineno)] if isinstance(error, SyntaxError) else []
            )
            inside = [
                frame
                for frame in frames
                if frame[0].parent == folder and frame[0].name != "__init__.py"
            ]
            # the error may be in another file, which it imports
            path, line = inside[-1] if inside else (path, 1)
            refuse(path, f"line {line}: {type(error).__name__}: {error}")
        for name in table:
            if name in before and table[name] is not before[name]:
                home = f"{folder.name}/{homes[name].name}" if name in homes else "models.py"
                refuse(path, f"{what} {name} is already defined in {home}")
            if name not in before:
                homes[name] = path
    check_room(homes, table, check)
    return homes


def check_room(homes, table, check):
    for name, path in homes.items():
        try:
            check(name, table[name])
        except Exception as error:  # an entry may be anything
            refuse(path, str(error))
