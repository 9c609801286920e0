"""No traceback where Ctrl-C comes while a script still imports, which takes seconds. Scripts import this first."""
import sys
from pathlib import Path


def silent(kind, *rest):
    if kind is not KeyboardInterrupt:
        sys.__excepthook__(kind, *rest)


# Of a script of ours alone: what imports it from elsewhere keeps its own way.
if Path(getattr(sys.modules["__main__"], "__file__", "/")).resolve().parent == Path(__file__).resolve().parent:
    sys.excepthook = silent
