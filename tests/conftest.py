"""Tests run the code of the repository root, one thread each, with no GPU needed."""
import atexit
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "results")]                    # costs.py and speed.py stand beside their pages
os.environ.setdefault("OMP_NUM_THREADS", "1")       # small tensors: more threads cost more than they bring

# What tests start as `python` is this one, whatever PATH holds. (A link to it would lose its virtual environment.)
BIN = Path(tempfile.mkdtemp())
atexit.register(shutil.rmtree, BIN, ignore_errors=True)
(BIN / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
(BIN / "python").chmod(0o755)
os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"

import torch  # noqa: E402

import zoo  # noqa: E402, F401, all of MODELS

torch.set_num_threads(1)


OLD = torch.__version__.startswith("2.8.")            # counts some operations more, and keeps a third less for Reformer


def same_line(one, other):
    """Whether two lines are the same; with an old torch, their numbers within 5 %."""
    if not OLD:
        return one == other
    number = r"\d[\d,]*\.?\d*"
    ours, its = ([float(n.replace(",", "")) for n in re.findall(number, line)] for line in (one, other))
    return re.sub(number, "#", one) == re.sub(number, "#", other) and all(
        abs(a - b) <= 0.05 * abs(b) + 0.051 for a, b in zip(ours, its))
