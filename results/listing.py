"""Print what models.py holds: `python models.py`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import zoo  # noqa: E402
from files import exit_code  # noqa: E402, F401, for its callers
from models import MODELS  # noqa: E402


def print_models():
    """Print a line per model: what it is, with its paper."""
    for name, model in MODELS.items():
        about = model.about or sys.modules[f"zoo.{zoo.homes[name].stem}"].__doc__.split("\n\n")[0]
        about = " ".join(about.split())
        print(f"{name:15} {about}")
    print(
        "\nSizes and recipe on a task: python pretrain.py --task listops --model s4 --help. Costs: "
        "results/costs.md"
    )
