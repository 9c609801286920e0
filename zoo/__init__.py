"""Architectures beyond the paper, one file each. Every script accepts the models of a new file here
as --model. A first reading can skip this folder.

    cp zoo/linformer.py zoo/mine.py        change the class, and the name in the last line: --model accepts that name

A file reads from top to bottom: the formula and its fast form, the layer, sizes and recipes that
differ from those of the model that it is `like`, and its line of `MODELS`. zoo/shared.py holds what
several files use. If a file cannot be loaded, or its tables do not fit its classes, every script
ends with one line that names the file."""

from pathlib import Path

from files import load_room
from models import MODELS

homes = load_room(Path(__file__).parent, MODELS, "--model", lambda name, model: None)
