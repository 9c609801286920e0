"""Print what recipes.py holds: `python recipes.py --task pathx --model s4`."""

import contextlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from files import Parser, UserError, exit_code  # noqa: F401, the last for its callers
from models import MODELS, keys_of
from recipes import arch, recipe_line
from tasks import TASKS


def print_recipes():
    """Print the sizes and the recipe of a task and model, for each stage."""
    parser = Parser(examples=True, description="Print sizes and recipe.", allow_abbrev=False)
    parser.add_argument("--task", required=True, choices=TASKS)
    parser.add_argument("--model", required=True, choices=MODELS)
    args = parser.parse_args()
    sizes = arch(args.task, args.model) or {}
    print(
        " ".join(
            [
                "sizes           ",
                *(f"{name}={sizes[name]}" for name in keys_of(args.model) if name in sizes),
            ]
        )
    )
    first, second = ("pool", "head"), ("loss", "mask")  # flags of the other stage
    for objective, start, unused in (
        ("masked", "pretrain", first),
        ("causal", "pretrain", (*first, "mask")),
        (None, "spt", second),
        (None, "scratch", second),
    ):
        with contextlib.suppress(UserError):  # no recipe for this stage
            name, _, values = recipe_line(args.task, TASKS[args.task], args.model, objective, start)
            text = " ".join(
                f"{key}={value}"
                for key, value in values.items()
                if value is not None and key not in unused
            )
            ours = "; no recipe of the paper" if objective and not name.endswith(objective) else ""
            print(f"{start:9} {objective or '':6} {text}  (line {name}{ours})")
