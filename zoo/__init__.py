"""Architectures beyond the paper, one file each. A file dropped into this folder is a --model of every script.

    cp zoo/linformer.py zoo/mine.py        change the class and the name in the last line; --model knows it now

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
        frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        frames += [(path, error.lineno)] if isinstance(error, SyntaxError) else []
        path, line = [frame for frame in frames if frame[0].parent == path.parent][-1]        # it may import another
        problem = " ".join(f"line {line}: {type(error).__name__}: {error}".split())
    if problem:
        print(f"error: zoo/{path.name}: {problem}; mend it, or take it out of zoo/", file=sys.stderr)
        raise SystemExit(2)
