"""Architectures beyond the paper, one file each. A file dropped into this folder is a --model of every script.

    cp zoo/longformer.py zoo/mine.py       change the class, its formula and the line of MODELS at the end; that is all

A file reads from top to bottom: the formula in a plain and a fast form, the layer, its sizes and recipes where they are
not those of the model that it is `like`, and its line. zoo/shared.py has what several of them use.
"""
import importlib
import sys
import traceback
from pathlib import Path

from models import MODELS

for path in sorted(Path(__file__).parent.glob("[!_.]*.py")):
    before = dict(MODELS)
    try:
        importlib.import_module(f"zoo.{path.stem}")
        again = [name for name in before if MODELS[name] is not before[name]]
        problem = f"there is a --model {again[0]} already" if again else ""
    except Exception as error:             # a file in the making can raise anything
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        place = f", line {lines[-1]}" if lines else ""
        problem = " ".join(f"{type(error).__name__}{place}: {error}".split())
    if problem:
        print(f"error: zoo/{path.name}: {problem}; mend it, or take it out of zoo/", file=sys.stderr)
        raise SystemExit(2)
