"""Architectures beyond the paper, one file each. Every script accepts the models of a new file here
as --model. A first reading can skip this folder.

    python -m zoo                       a line per model: what it is, with its paper
    cp zoo/linformer.py zoo/mine.py     change the class, and the name in the last line: --model
                                        accepts that name

A file reads from top to bottom: the formula and its fast form, the layer, sizes and recipes that
differ from those of the model that it is `like`, and its line of `MODELS`. zoo/shared.py holds what
several files use. If a file cannot be loaded, or its tables do not fit its classes, every script
ends with one line that names the file."""

from pathlib import Path

import tasks
from files import check_room, load_room
from models import MODELS, keys_of
from recipes import arch, assignments, check_recipes, check_sizes, check_tables, number, read_table


def check(name, model):
    """Raise ValueError if a model's tables do not fit its classes."""
    keys, chain = keys_of(name), [name]
    while (like := MODELS[chain[-1]].like) is not None:
        if like not in MODELS or like in chain:
            raise ValueError(
                f"{chain[-1]} is like {like}, which is {'itself' if like in chain else 'no model'}"
            )
        chain.append(like)
    if wrong := [
        key
        for key in keys
        if isinstance(keys[key].kind, type) and keys[key].kind not in (int, float)
    ]:
        raise ValueError(
            f"the kind of {wrong[0]} must be int, float or a collection of allowed values"
        )
    for row in read_table(model.sizes):
        check_sizes(name, {key: number(cell) for key, cell in row.items() if key != "task"})
    if not model.sizes and (sizes := arch("listops", name)):
        check_sizes(name, {key: value for key, value in sizes.items() if key in keys})
    for row in read_table(model.changes):
        check_sizes(name, assignments(row["sizes"]), whole=False)
    check_recipes(name, model.recipes, "task")


# All tables are read before any is checked: one may use another's.
homes = load_room(
    Path(__file__).parent,
    MODELS,
    "--model",
    lambda name, model: [read_table(text) for text in (model.sizes, model.changes, model.recipes)],
)
check_room(tasks.homes, tasks.TASKS, check_tables)  # tables of tasks may name any model
check_room(homes, MODELS, check)
