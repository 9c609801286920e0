"""Architectures beyond the paper, one file each. A file dropped into this folder is a --model of every script.

    cp zoo/linformer.py zoo/mine.py        change the class and the name in the last line; --model knows it now

A file reads from top to bottom: the formula in a plain and a fast form, the layer, its sizes and recipes where they are
not those of the model that it is `like`, and its line. zoo/shared.py and zoo/gpu_attention.py have what several use. A
file that cannot be loaded, or whose tables do not fit its classes, ends every script with one line that names it.
"""
import importlib
import sys
import traceback
from pathlib import Path

from models import MODELS, keys_of
from recipes import SMALL_RECIPES, arch, assignments, read_table

RECIPE_COLUMNS = {*SMALL_RECIPES.split("\n")[1].split()} - {"model", "eval"}


def refuse(path, problem):
    print(f"error: zoo/{path.name}: {' '.join(problem.split())}; mend it, or take it out of zoo/", file=sys.stderr)
    raise SystemExit(2)


def tables_of(name):
    """The tables of sizes, of changes and of recipes that a line of MODELS brings. AssertionError for a torn row."""
    model = MODELS[name]
    return [read_table(text) for text in (model.sizes, model.changes, model.recipes)]


def check(name):
    """ValueError where the tables of a line of MODELS do not fit its classes."""
    model, keys, chain = MODELS[name], keys_of(name), [name]
    while (like := MODELS[chain[-1]].like) is not None:
        if like not in MODELS or like in chain:
            raise ValueError(f"{chain[-1]} is like {like}, which is {'itself' if like in chain else 'no model'}")
        chain.append(like)
    if wrong := [key for key in keys if isinstance(keys[key].kind, type) and keys[key].kind not in (int, float)]:
        raise ValueError(f"the kind of {wrong[0]} must be int, float or values to choose from")
    own, changes, _ = tables_of(name)
    unknown = {key for row in own for key in row} | {key for row in changes for key in assignments(row["sizes"])}
    if unknown := unknown - keys.keys() - {"task"}:
        raise ValueError(f"no class of {name} declares {' '.join(sorted(unknown))} in its keys")
    for row in own or filter(None, [arch("listops", name)]):
        if missing := {key for key in keys if keys[key].default is ...} - row.keys() - model.extras.keys():
            raise ValueError(f"sizes of {name} lack {' '.join(sorted(missing))}, and its key has no default")
    if model.recipes and (missing := RECIPE_COLUMNS - set(model.recipes.strip().split("\n")[0].split())):
        raise ValueError(f"recipes of {name} lack {' '.join(sorted(missing))}")


homes = {}                                 # {model: its file}
for path in sorted(Path(__file__).parent.glob("[!_.]*.py")):
    before = dict(MODELS)
    try:
        importlib.import_module(f"zoo.{path.stem}")
    except Exception as error:             # a file in the making can raise anything
        frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        frames += [(Path(error.filename), error.lineno)] if isinstance(error, SyntaxError) else []
        inside = [frame for frame in frames if frame[0].parent == path.parent and frame[0].name != "__init__.py"]
        path, line = inside[-1] if inside else (path, 1)                                      # it may import another
        refuse(path, f"line {line}: {type(error).__name__}: {error}")
    for name in MODELS:
        if name in before and MODELS[name] is not before[name]:
            home = f"zoo/{homes[name].name}" if name in homes else "models.py"
            refuse(path, f"--model {name} is that of {home} already")
        if name not in before:
            homes[name] = path
for step in (tables_of, check):            # all tables first: a model may use those of another
    for name, path in homes.items():
        try:
            step(name)
        except Exception as error:         # a line of any kind
            refuse(path, str(error))
