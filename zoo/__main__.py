"""Print a line per file of models: their names, what they are, with the paper. Called as `python -m
zoo`."""

import sys
from collections import defaultdict

from models import MODELS
from zoo import homes

PAPER = {  # those of models.py; a file of zoo/ begins with its line
    "transformer": "Attention, sinusoidal positions (Vaswani et al. 2017; Tay et al. 2020).",
    "rotary": "Attention, rotary positions (Su et al. 2021).",
    "s4": "S4: diagonal plus low rank, from HiPPO (Gu et al. 2022).",
    "s4_rand": "S4 with every parameter drawn from N(0, 0.1^2) (Amos et al. 2024).",
    "dlr": "DLR: the diagonal linear RNN (Gupta et al. 2022).",
    "dlr_rand": "DLR with every parameter drawn from N(0, 0.1^2) (Amos et al. 2024).",
}

if __name__ == "__main__":
    names = defaultdict(list)  # {what models are: their names}
    for name in MODELS:
        text = PAPER.get(name) or sys.modules[f"zoo.{homes[name].stem}"].__doc__
        names[" ".join(text.split("\n\n")[0].split())].append(name)
    for text, models in names.items():
        print(f"{', '.join(models)}: {text}")
    print("\nSizes and recipe on a task: python pretrain.py --task listops --model s4 --help")
    print("Costs: results/costs.md")
