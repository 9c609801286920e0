"""Tests run the code of the repository root, one thread each, with no GPU needed."""
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "results")]                    # costs.py and speed.py stand beside their pages
os.environ.setdefault("OMP_NUM_THREADS", "1")       # small tensors: more threads cost more than they bring

import torch  # noqa: E402

import zoo  # noqa: E402, F401, all of MODELS

torch.set_num_threads(1)
