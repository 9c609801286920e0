"""Entries: what every demo, table and figure trains. To add an experiment, add an entry.

    bash run_all.sh table8 --list       prints the commands of an entry

An entry is a list of `rows`: tasks x models x variants. Every variant is trained with every seed. A
variant is a way to train on the labels (from scratch, after self-pretraining, jointly), with the
flags that differ from the recipe. Commands and cells of tables (commands.py) follow from these
entries only."""

from collections import namedtuple

# start: scratch, spt, joint or pretrain; word: how the paper's tables call it; first: the flags of
# spt's pretraining. Several variants may share one.
Variant = namedtuple("Variant", "start word flags first", defaults=("", "", ""))
Row = namedtuple("Row", "task model variants")


def scratch(word="", flags=""):
    return Variant("scratch", word, flags)


def spt(word="", first="", flags=""):
    """Pretrain with flags `first`, then finetune with `flags`."""
    return Variant("spt", word, flags, first)


def both(word="", flags=""):
    """Return two variants: from scratch with these flags, and SPT with them in pretraining."""
    return [scratch(word, flags), spt(word, flags)]


def rows(tasks, models, variants):
    return [Row(task, model, variants) for task in tasks.split() for model in models.split()]


# ---- The paper's tables and figures --------------------------------------------------------------

LRA = "listops text retrieval image pathfinder pathx"
CAUSAL = "causal", "--objective causal"
FRACTIONS = 0.005, 0.01, 0.05, 0.1, 0.5, 1
# without a stand-in in mini
LACKING = {"retrieval", "sc", "bidmc_hr", "bidmc_rr", "bidmc_spo2", "pythia"}


def paper(preset="paper"):
    """Return {target: rows}; the preset mini has stand-in tasks and other sizes and budgets."""
    full = preset == "paper"
    # Table 9: the paper prints only numbers of parameters, so the shapes are ours; 3m is the recipe
    # itself. The largest S4 also has a larger state, as in the paper (appendix E). Mini: 2k 4k 10k
    # (20k) 80k parameters.
    sizes = (
        {"100k": "d=48,ff=72", "300k": "d=80,ff=160", "1m": "d=144,ff=288", "10m": "d=448,ff=896"},
        {"100k": "d=64", "300k": "d=128", "1m": "d=256", "10m": "d=832,state=128"},
    )
    if not full:
        sizes = (
            {"2k": "d=8,ff=16", "4k": "d=12,ff=24", "10k": "d=20,ff=40", "80k": "d=56,ff=112"},
            {"2k": "d=10", "4k": "d=16", "10k": "d=30", "80k": "d=104"},
        )
    rotary, s4 = (
        [variant for word, size in shapes.items() for variant in both(word, f"--arch {size}")]
        for shapes in sizes
    )
    # Table 8 (appendix D): one budget for both stages. Pretraining takes 20, 40 or 60 % of it.
    budgets = {"image": ("epochs", 150), "text": ("epochs", 30)}
    if not full:
        budgets = {"image": ("steps", 2000), "text": ("steps", 2000)}

    def budget(task, shares=(20, 40, 60)):
        unit, total = budgets[task]
        variants = [scratch("budget0", f"--{unit} {total}")]
        for share in shares:
            first = total * share // 100
            word = f"budget{share}"
            variants.append(spt(word, f"--{unit} {first}", f"--{unit} {total - first}"))
        return variants

    # Figure 3 (section 3.4, appendix C.1.4), "until convergence": flags of pretraining, of
    # finetuning, from scratch. From scratch on Text, the paper takes the better of 1e-3 and 5e-4 on
    # validation. Warm-up and schedule are ours: with the smallest shares, the recipe would end
    # before its warm-up.
    constant = "--warmup 200 --schedule constant"
    flags = {
        "image": (
            "--lr 0.01 --batch 50 --steps 10000",
            f"--lr 0.002 --batch 50 {constant}",
            f"--lr 0.002 {constant}",
        ),
        "text": (
            "--steps 40000",
            f"--epochs 200 {constant}",
            f"--lr 0.001 --epochs 200 {constant}",
        ),
    }
    if not full:
        flags = dict.fromkeys(flags, ("", "", ""))

    def fractions(task):
        first, after, whole = flags[task]
        variants = []
        for share in FRACTIONS:
            word, data = f"data{share}", f"--train-fraction {share} "
            variants.append(scratch(word, (data + whole).strip()))
            variants.append(spt(word, (data + first).strip(), after))
        return variants

    entries = {
        "table1": rows(LRA, "transformer", [*both(), spt(*CAUSAL)]),
        "table2": rows(LRA, "rotary s4", both())
        + rows("pathx256", "s4", both())
        + rows("listops text retrieval image pathfinder", "pythia_rand pythia", [scratch()]),
        "table3": rows("sc", "s4 rotary", both(*CAUSAL))
        + rows("sc scifar bidmc_hr bidmc_rr bidmc_spo2", "s4 rotary", both()),
        "table7": rows("listops text image pathx", "s4 s4_rand dlr dlr_rand", both()),
        "table8": [row for task in budgets for row in rows(task, "rotary s4", budget(task))],
        "table9": rows("image", "rotary", both() + rotary) + rows("image", "s4", both() + s4),
        "figure1": rows(LRA, "transformer rotary s4", both()) + rows("pathx256", "s4", both()),
        "figure3": [row for task in flags for row in rows(task, "s4", fractions(task))],
        "figure4": rows("image text pathx listops", "s4", [Variant("pretrain")]),
        "figure5": [row for task in budgets for row in rows(task, "rotary", budget(task, [20]))],
    }
    entries["figure2"] = entries["table7"]
    tables = "table1", "table2", "table3", "table7", "table8", "table9", "figure3"
    entries["all"] = [row for target in tables for row in entries[target]]
    if full:
        return entries
    for target, entry in entries.items():
        kept = [row for row in entry if not {row.task, row.model} & LACKING]
        entries[target] = [row._replace(task=f"{row.task}_mini") for row in kept]
    return entries


# ---- Demos and your data -------------------------------------------------------------------------

DEMOS = {
    "demo": ("pathfinder_demo", "transformer s4"),
    "demo-text": ("text_demo", "rotary s4"),
    "recall": ("recall", "transformer s4 mamba lstm"),
    "text256": ("text256", "rotary s4"),
    "demo-init": ("text_demo", "s4 s4_rand dlr dlr_rand"),
}


def demo(target, models=""):
    """Return the rows of a demo, for these models or its usual ones."""
    task, usual = DEMOS[target]
    return rows(task, models or usual, both())


STARTS = "scratch", "spt", "joint", "linear_probe"  # linear_probe: SPT, then train only the head


def own(task, models="", share=None, starts=None, passes=None, weights=False):
    """Return rows for your data: starts at equal passes (default: the recipe's). share: of the
    labels; weights: --class-weights. Pretraining depends on neither."""

    def flags(*words):
        return " ".join(filter(None, words))

    labels = flags(share and f"--label-fraction {share:g}", weights and "--class-weights")
    whole = passes and f"--steps {passes // 2 * 2}"
    half = passes and f"--steps {passes // 2}"  # joint training needs two passes a step
    variants = dict(
        scratch=scratch(flags=flags(labels, whole)),
        spt=spt(first=flags(half), flags=flags(labels, half)),
        joint=Variant("joint", flags=flags("--joint 1", labels, half)),
        linear_probe=spt(first=flags(half), flags=flags("--freeze", labels, half)),
    )
    chosen = [variants[start] for start in starts or STARTS[:3]]
    return [Row(task, model, chosen) for model in (models or "rotary s4").split()]
