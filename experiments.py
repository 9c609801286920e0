"""What every demo, table, figure and question trains: one entry each. run_all.sh trains it, analyze.py shows it.

    bash run_all.sh table8 --list       the commands that an entry stands for

An entry is a list of `rows`: tasks x models x arms, and every arm is trained with each seed. An arm is how a model
comes to its labels (from scratch, after self-pretraining, jointly) with the flags that differ from the recipe. Its word
tells its runs apart in their names, TASK-MODEL-WORD-START-sSEED. Commands (`chains`) and cells of tables (`record`) are
made of these entries alone; a new experiment is one more of them.
"""
import shlex
from collections import namedtuple

import zoo                                     # noqa: F401, fills MODELS
from data import declared, folder_name
from models import MODELS, keys_of
from pretrain import OBJECTIVES
from recipes import INHERITED, arch, assignments, halved, matching, number, read_table, recipe_line

# first: flags of pretraining, of an spt arm; of: the word of that pretraining, which arms may share.
Arm = namedtuple("Arm", "start word flags first of", defaults=("", "", "", None))
Row = namedtuple("Row", "task model arms word", defaults=("",))
Question = namedtuple("Question", "title seeds rows")


def scratch(word="", flags=""):
    return Arm("scratch", word, flags)


def spt(word="", first="", flags="", of=None):
    """Pretraining with flags `first`, then finetuning with `flags`, which inherits task, model, sizes and data."""
    return Arm("spt", word, flags, first, of)


def joint(word="", flags="--joint 1"):
    return Arm("joint", word, flags)


def both(word="", flags=""):
    """From scratch with these flags, and after a pretraining with them."""
    return [scratch(word, flags), spt(word, flags)]


def rows(tasks, models, arms, word=""):
    return [Row(task, model, arms, word) for task in tasks.split() for model in models.split()]


# ---- The paper's tables and figures ----------------------------------------------------------------------------------

LRA = "listops text retrieval image pathfinder pathx"
CAUSAL = "causal", "--objective causal"
FRACTIONS = 0.005, 0.01, 0.05, 0.1, 0.5, 1
LACKING = {"retrieval", "sc", "bidmc_hr", "bidmc_rr", "bidmc_spo2", "pythia"}      # what has no stand-in in mini


def paper(preset="paper"):
    """{target: rows}. The preset mini has stand-ins of tasks, TASK_mini, and other sizes and budgets."""
    full = preset == "paper"
    # Table 9: the paper prints numbers of parameters only, so the shapes are ours; 3m is the recipe itself. S4's last
    # step enlarges its state too, as the paper had to (appendix E). Mini: 2k 4k 10k (20k) 80k parameters.
    words = "100k 300k 1m 10m" if full else "2k 4k 10k 80k"
    rotary, s4 = ("d=48,ff=72 d=80,ff=160 d=144,ff=288 d=448,ff=896", "d=64 d=128 d=256 d=832,state=128") if full else (
        "d=8,ff=16 d=12,ff=24 d=20,ff=40 d=56,ff=112", "d=10 d=16 d=30 d=104")

    def sizes(shapes):
        return [arm for word, shape in zip(words.split(), shapes.split()) for arm in both(word, f"--arch {shape}")]

    # Table 8 (appendix D): what both stages have together. Pretraining takes 20, 40 or 60 % of it.
    budgets = {"image": ("epochs", 150), "text": ("epochs", 30)}
    if not full:
        budgets = {"image": ("steps", 2000), "text": ("steps", 2000)}

    def budget(unit, total, shares=(20, 40, 60)):
        return [scratch("budget0", f"--{unit} {total}"), *(
            spt(f"budget{share}", f"--{unit} {total * share // 100}", f"--{unit} {total - total * share // 100}")
            for share in shares)]

    # Figure 3 (section 3.4, appendix C.1.4), "until convergence": flags of pretraining, of finetuning, from scratch.
    # For Text from scratch the paper takes the better of 1e-3 and 5e-4 on validation. Warm-up and schedule are ours: on
    # the smallest shares the recipe would end before its warm-up does.
    longer = " --warmup 200 --schedule constant"
    parts = {"image": (" --lr 0.01 --batch 50 --steps 10000", f"--lr 0.002 --batch 50{longer}", f" --lr 0.002{longer}"),
             "text": (" --steps 40000", f"--epochs 200{longer}", f" --lr 0.001 --epochs 200{longer}")}

    def part(share, first, after, alone):
        flags, word = f"--train-fraction {share}", f"data{share}"
        return [scratch(word, flags + alone), spt(word, flags + first, after)]

    entries = {
        "table1": rows(LRA, "transformer", [*both(), spt(*CAUSAL)]),
        "table2": rows(LRA, "rotary s4", both()) + rows("pathx256", "s4", both())
        + rows("listops text retrieval image pathfinder", "pythia_rand pythia", [scratch()]),
        "table3": rows("sc", "s4 rotary", both(*CAUSAL))
        + rows("sc scifar bidmc_hr bidmc_rr bidmc_spo2", "s4 rotary", both()),
        "table7": rows("listops text image pathx", "s4 s4_rand dlr dlr_rand", both()),
        "table8": [row for task in budgets for row in rows(task, "rotary s4", budget(*budgets[task]))],
        "table9": rows("image", "rotary", both() + sizes(rotary)) + rows("image", "s4", both() + sizes(s4)),
        "figure1": rows(LRA, "transformer rotary s4", both()) + rows("pathx256", "s4", both()),
        "figure3": [row for task in parts for share in FRACTIONS
                    for row in rows(task, "s4", part(share, *parts[task] if full else ("", "", "")))],
        "figure4": rows("image text pathx listops", "s4", [Arm("pretrain")]),
        "figure5": [row for task in budgets for row in rows(task, "rotary", budget(*budgets[task], shares=[20]))]}
    entries["figure2"] = entries["table7"]
    tables = "table1", "table2", "table3", "table7", "table8", "table9", "figure3"
    entries["all"] = [row for target in tables for row in entries[target]]
    if full:
        return entries
    return {target: [row._replace(task=f"{row.task}_mini") for row in entry if not {row.task, row.model} & LACKING]
            for target, entry in entries.items()}


# ---- Demos, and what is trained like them ----------------------------------------------------------------------------

# Learning rates of pretraining, finetuning and training from scratch, and the models for which each of them is the best
# of three (results/architectures.md). A model that is not here has its recipe's.
RATES = {model: line.split()[0].split("/") for line in """
3e-3/3e-3/3e-3 transformer
3e-3/1e-3/3e-3 rotary linear performer_relu
9e-3/1e-3/1e-3 local bigbird
9e-3/1e-3/3e-3 longformer
3e-3/3e-3/1e-3 linformer
9e-3/3e-3/3e-3 reformer spade mamba
3e-3/1e-3/1e-3 performer
9e-3/3e-3/1e-3 mega
9e-3/9e-3/3e-3 mega_chunk s4_rand dlr s4d_inv s4d_legs s5 lru sgconv
9e-3/9e-3/9e-3 s4 dlr_rand dfout s4d""".strip().splitlines() for model in line.split()[1:]}


def rated(first, after, alone, word="", flags=""):
    """Both, with a learning rate for each stage and for training from scratch."""
    flags = f" {flags}" if flags else ""
    return [scratch(word, f"--lr {alone}{flags}"), spt(word, f"--lr {first}{flags}", f"--lr {after}")]


DEMOS = {"demo": ("pathfinder_demo", "transformer s4"), "demo-text": ("text_demo", "rotary s4"),
         "text256": ("text256", "rotary s4"), "demo-init": ("text_demo", "s4 s4_rand dlr dlr_rand"),
         "architectures": ("text_demo", " ".join(RATES))}
# The rotary Transformer with structured feed-forward parts (zoo/structured.py), half of the parameters of dense ones or
# less: a block shuffle's number of blocks sets its share.
STRUCTURED = {"lowrank": "ffn=lowrank", "blockdense": "ffn=blockdense", "blockshuffle": "ffn=blockshuffle",
              "guided": "ffn=lowrank,guided=0.5"}


def demo(target, models=""):
    """Rows of a demo, for the models that are asked for."""
    (task, usual), entry = DEMOS[target], []
    for model in (models or usual).split():
        rates = RATES.get(model) if target == "architectures" else None
        entry += rows(task, model, rated(*rates) if rates else both())
        if rates and model == "rotary":
            for word, sizes in STRUCTURED.items():
                entry += rows(task, model, rated(*rates, flags=f"--arch {sizes}"), word)
    return entry


WAYS = "scratch", "spt", "joint", "probe"                        # probe: after SPT the head alone is trained


def own(task, models="", share="", ways=WAYS[:3], passes=None):
    """Your own data: three ways at equal passes, an even number, by default the recipe's. With a share of the labels,
    pretraining is the same."""
    labels, few = (f"--label-fraction {share}", f"l{share}") if share else ("", "")
    whole, half, short = (f"--steps {passes}", f"--steps {passes // 2}", f"p{passes}") if passes else ("", "", "")

    def join(mark, *words):
        return mark.join(filter(None, words))

    word = join("-", few, short)
    arms = dict(scratch=scratch(word, join(" ", labels, whole)), spt=spt(word, half, join(" ", labels, half), of=short),
                joint=joint(word, join(" ", "--joint 1", labels, half)),
                probe=spt(join("-", word, "probe"), half, join(" ", "--freeze", labels, half), of=short))
    return [Row(task, model, [arms[way] for way in ways]) for model in (models or "rotary s4").split()]


def sweep(tasks, models, settings, starts, known):
    """Tasks x models x ways to start x settings, each [(flag, value)]. known: {stage: {flag: its default}}. A flag is
    set in each stage where it has a meaning; pretrain.lr and finetune.lr: in that stage alone."""
    return [Row(task, model, [*dict.fromkeys(
        arm_of(task, model, start, setting, known) for start in starts for setting in settings)])
        for task in tasks for model in models]


# ---- The questions of results/findings.md ----------------------------------------------------------------------------

# Steps between evaluations: ten for each arm, so that validation has as many checkpoints to choose from.
EVERY = """
task            model              scratch spt joint
text256         *                      600 200   300
text_demo       *                      200  70   100
pathfinder_demo transformer|rotary     270 140   135
pathfinder_demo *                      190  90    95
"""
# Joint training: weight of the masked loss and rate, the best of its trials on validation (question 0).
JOINT = """
task            model       joint lr
pathfinder_demo transformer     1 3e-3
pathfinder_demo rotary        0.1 3e-3
pathfinder_demo s4            0.1 1e-2
text_demo       rotary        0.3 3e-3
text_demo       s4            0.3 1e-2
text256         rotary          3 3e-3
text256         linear        0.3 3e-3
text256         s4              1 1e-2
"""

# Question 10. passes: of both stages at a budget of 1. tried: rates on the labels, of which trials chose (question 12)
# one for scratch and one for spt, each for a budget of 1/4, for 1/2 to 2, and for 4 and more. share: of the passes,
# that pretraining takes where the budget varies. most: the largest budget. dropout: of two more arms at 4, or none.
CURVE = """
task            model       pool passes tried                scratch            spt                share most dropout
pathfinder_demo transformer mean   2700 0.0003/0.001/0.003   0.001/0.003/0.001  0.001/0.001/0.001   0.5   4   0
pathfinder_demo transformer max    2700 0.0003/0.001/0.003   0.001/0.001/0.001  0.0003/0.001/0.001  0.5   4   0
pathfinder_demo s4          mean   1900 0.003/0.01/0.03      0.01/0.01/0.01     0.03/0.01/0.01      0.5   4   0
text256         s4          max    6000 0.0013/0.004/0.01    0.004/0.01/0.01    0.004/0.01/0.01     0.5   16  0.05
text256         rotary      max    6000 0.0003/0.001/0.003   0.001/0.0003/0.001 0.001/0.0003/0.001  0.5   16  0
"""
BUDGETS, SHARES = (0.25, 0.5, 1, 2, 4, 16), (0.1, 0.25, 0.5, 0.75)
# Question 11: other exits from a plateau, with the rate that trials chose at a budget of 1.
EXITS = """
task            model       mimetic near  repeat listops shuffled
pathfinder_demo transformer 0.001   0.001 0.001  0.001   0.001
text256         rotary      0.001   0.001 0.0003 0.001   0.001
"""


def settled(row):
    """A row of a question with what its arms share: evaluations, joint training's weight and rate, the rate of S4 on
    text_demo. Runs of `architectures`, called rated, stay as they are."""
    every = matching(read_table(EVERY), row.model, task=row.task)
    tuned = matching(read_table(JOINT), row.model, task=row.task)
    if every is None or "rated" in row.word:
        return row
    rate = "--lr 1e-2" if (row.task, row.model) == ("text_demo", "s4") else ""

    def complete(arm):
        flags, first = arm.flags, arm.first
        if arm.start == "joint" and "--joint" not in flags:
            flags += f" --joint {tuned['joint']} --lr {tuned['lr']}"
        flags += f" --eval-every {every[arm.start]}" if "--eval-every" not in flags else ""
        flags += f" {rate}" if "--lr" not in flags else ""
        first += f" {rate}" if "--lr" not in first else ""
        return arm._replace(flags=flags.strip(), first=first.strip())

    return row._replace(arms=[*map(complete, row.arms)])


def trials(task, models, rates, some=(0.1, 0.3, 1, 3)):
    """Rows of joint training, of each rate and weight of the masked loss."""
    return [Row(task, model, [joint(f"w{weight}", f"--lr {rate} --joint {weight}") for weight in some], f"lr{rate}")
            for model in models.split() for rate in rates.split()]


def few(share):
    """A share of the labels, which are soon known by heart."""
    flags = f"--label-fraction {share} --eval-every 50"
    return [scratch("", flags), spt("", "", flags, of=""), joint("", flags)]


def fraction(share, rates=""):
    """A share of all data, without which nothing is seen in either stage; further rates on the labels."""
    some, often = f"--train-fraction {share}", "--eval-every 50"
    return [scratch("", f"{some} {often}"), *(scratch(f"lr{r}", f"{some} {often} --lr {r}") for r in rates.split()),
            spt("", some, often), *(spt(f"lr{r}", some, f"{often} --lr {r}", of=f"f{share}") for r in rates.split())]


def length(steps):
    return scratch(f"s{steps}", f"--steps {steps} --eval-every {steps // 10}")


def alone(curve, budget, rate, word="", more=""):
    """A model of CURVE from scratch with this budget; evaluated after each tenth, as in each stage of `after`."""
    n = round(int(curve["passes"]) * budget)
    return scratch(f"b{budget:g}-lr{rate:g}{word}", f"--steps {n} --eval-every {n // 10} --lr {rate}{more}")


def after(curve, budget, share, rate, word="", more="", before=""):
    """The same with a share of the budget for pretraining, which all rates on the labels share. word: of the name.
    before: flags of pretraining, such as question11.patch's --inputs, other examples to denoise."""
    first = round(int(curve["passes"]) * budget * share)
    n = round(int(curve["passes"]) * budget) - first
    of = f"b{budget:g}-share{share:g}{word}"
    return spt(f"{of}-lr{rate:g}", f"--steps {first} --eval-every {first // 10}{before}",
               f"--steps {n} --eval-every {n // 10} --lr {rate}{more}", of=of)


def chosen(curve, start, budget):
    """The rate that trials chose."""
    return float(curve[start].split("/")[0 if budget < 0.5 else 1 if budget < 4 else 2])


def of_curve(curve, some):
    """Rows of question 10 for a line of CURVE, or with its trials. some(curve, flag of pooling) -> arms."""
    usual = "max" if curve["task"] == "text256" else "mean"
    pool = curve["pool"] if curve["pool"] != usual else ""
    return rows(curve["task"], curve["model"], some(curve, pool and f" --pool {pool}"), pool)


def budgets(curve, pool):
    """From scratch and after SPT with each budget, then with dropout at 4, then each share of pretraining at 1."""
    share, dropout = float(curve["share"]), curve["dropout"]
    sizes = [(b, "", "") for b in BUDGETS if b <= float(curve["most"])]
    sizes += [(4, f"-dropout{dropout}", f" --arch dropout={dropout}")] if float(dropout) else []
    return [*(alone(curve, b, chosen(curve, "scratch", b), word, pool + drop) for b, word, drop in sizes),
            *(after(curve, b, share, chosen(curve, "spt", b), word, pool, drop) for b, word, drop in sizes),
            *(after(curve, 1, s, chosen(curve, "spt", 1), more=pool) for s in SHARES if s != share)]


def tried(curve, pool):
    """Three rates from scratch and three after SPT, at three budgets."""
    rates = [float(rate) for rate in curve["tried"].split("/")]
    return [arm for b in (0.25, 1, 4) for arm in (*(alone(curve, b, rate, more=pool) for rate in rates),
                                                  *(after(curve, b, 0.5, rate, more=pool) for rate in rates))]


def regularised(curve, pool):
    """From scratch at four times the passes, where both models overfit on text. Our Transformer has no dropout."""
    ways = {f"-dropout{p}": f"--arch dropout={p}" for p in (0.05, 0.1, 0.2) if curve["model"] == "s4"}
    ways |= {f"-wd{wd}": f"--wd {wd}" for wd in (0.01, 0.1)}
    return [alone(curve, 4, chosen(curve, "scratch", 4), word, f"{pool} {flags}") for word, flags in ways.items()]


def exits(curve, rates):
    """The arms of question 11 with their own settings. rates: {exit: [rate]}."""
    begin = dict(mimetic="--begin mimetic", near="--begin near", repeat="--repeat 0.125")
    return [*(alone(curve, 1, rate, f"-{word}", f" {flags}") for word, flags in begin.items() for rate in rates[word]),
            *(after(curve, 1, float(curve["share"]), rate, f"-{word}", before=f" --inputs {word}")
              for word in ("listops", "shuffled") for rate in rates[word])]


def of_exits(lines):
    """Question 11's rows: scratch, SPT, what question 11 adds, joint training; then max pooling, where it is not the
    rule. Its trials are those rows of `exits` with three rates each, and more rates of pretraining on ListOps, which
    Pathfinder's recipe leaves unlearned."""
    found, trials = [], []
    for line in read_table(EXITS):
        some = [each for each in lines if (each["task"], each["model"]) == (line["task"], line["model"])]
        own, known = some[0], {word: [float(line[word])] for word in line if word not in ("task", "model")}
        again = "b1" if line["task"] == "pathfinder_demo" else ""            # for the fresh images
        found.append(Row(line["task"], line["model"], [
            alone(own, 1, chosen(own, "scratch", 1)), after(own, 1, float(own["share"]), chosen(own, "spt", 1)),
            *exits(own, known), joint(again, "")], ""))
        found += [row for other in some[1:] for row in of_curve(other, lambda curve, pool: [
            alone(curve, 1, chosen(curve, "scratch", 1), more=pool)])]
        three = [float(rate) for rate in own["tried"].split("/")]
        trials.append(Row(line["task"], line["model"], [*exits(own, dict.fromkeys(known, three)), *(
            after(own, 1, float(own["share"]), known["listops"][0], f"-listops-at{at}",
                  before=f" --inputs listops --lr {at}")
            for at in (0.0003, 0.001, 0.01) if line["task"] == "pathfinder_demo")], ""))
    return found, trials


def pretrainings(rates, flags=""):
    """With the recipe's rate of pretraining and with others."""
    return [spt("", flags), *(spt(f"lr{rate}", f"{flags} --lr {rate}".strip()) for rate in rates.split())]


def hide(kinds, word="", flags=""):
    """Other ways to hide, by question6.patch."""
    return [spt(f"{kind}-{word}" if word else kind, f"--hide {kind} {flags}".strip()) for kind in kinds.split()]


def take(kinds, rewind=""):
    """Kinds of parameters that finetuning takes over, by question8.patch; the others as they began, or drawn anew."""
    return [spt(f"{kind}-rewind" if rewind else kind, "", f"--take {kind}{rewind}", of="") for kind in kinds.split()]


def of_rates(rate, word):
    """The recipe's rates, and this one in both stages."""
    plain, other = both(), rated(rate, rate, rate, word)
    return [plain[0], other[0], plain[1], other[1]]


def of_trials(path, text):
    """Question 0's rows, some lists of them."""
    return [
        rows(path, "transformer rotary", [scratch(), *(scratch(f"lr{r}", f"--lr {r}") for r in (0.0003, 0.003))]),
        trials(path, "transformer rotary", "0.001 0.003 0.01"), trials(text, "rotary", "0.001 0.003 0.01"),
        rows(text, "rotary", [joint("w0.3-again", "--lr 0.003 --joint 0.3")], "lr0.003"),
        rows(text, "rotary", [joint("w0.3-again", "--lr 0.01 --joint 0.3")], "lr0.01"),
        trials(path, "s4", "0.003 0.01 0.03"), trials(text, "s4", "0.001 0.004 0.01"),
        rows(path, "s4 s4d dfout dlr s4_rand dlr_rand", of_rates("3e-3", "lr0.003")),
        rows(text, "s4", of_rates("4e-3", "lr0.004")),
        rows("text256", "s4", of_rates("1e-2", "lr0.01")),
        trials("text256", "rotary linear", "0.001 0.003 0.01", [0.3]), trials("text256", "s4", "0.004 0.01", [0.3]),
        trials("text256", "rotary linear", "0.003", [1, 3]), trials("text256", "s4", "0.01", [1, 3]),
        rows(text, "rotary", fraction(0.05, "0.0003 0.003"), "f0.05"),
        rows(text, "s4", fraction(0.05, "0.001 0.003"), "f0.05"),
        rows(path, "transformer", pretrainings("0.001 0.01")),
        rows(path, "transformer", pretrainings("0.001 0.01", "--hide runs3"), "runs3"),
        rows(path, "transformer", pretrainings("0.001 0.01", "--hide patches"), "patches"),
        rows(text, "rotary", pretrainings("0.01")),
        rows(text, "rotary", pretrainings("0.01", "--hide runs10"), "runs10")]


def questions():
    """{number: Question}. Rows with the same arms are one table of results/findings.md; gains are over the first."""
    path, text, eighth = "pathfinder_demo", "text_demo", "--train-fraction 0.125"
    three, rate10 = [*both(), joint("", "")], ("lr0.01", "--lr 0.01")
    slow, fast = rated("3e-3", "3e-3", "3e-3"), rated("9e-3", "9e-3", "9e-3")
    small, short = "--arch d=64 --epochs", "--epochs 4 --batch 64 --warmup 200"
    image = [scratch("", f"{small} 8"), scratch("e4", f"--arch d=64 {short}"), spt("", f"{small} 4", short),
             spt("lr0.01", f"{small} 4", f"--lr 1e-2 {short}", of="100k")]
    long = [scratch("", "--lr 3e-3 --steps 7600 --eval-every 760"),
            spt("", "--lr 3e-3 --steps 4000", "--lr 3e-3 --steps 3600 --eval-every 360")]
    found = {
        0: ("Trials by which settings were chosen: validation accuracy, seed 0", range(1), of_trials(path, text)),
        1: ("SPT, joint training or scratch at equal passes?", range(3), [
            rows("text256", "rotary linear s4", three), rows(path, "transformer s4", three),
            rows(path, "s4", [scratch("s900", "--steps 900 --eval-every 90")])]),
        2: ("Few labels: what does SPT gain with 1, 5, 25 and 100 % of them?", range(3), [
            *(rows(text, model, few(share) if share else three, share and f"l{share}")
              for model in ("rotary", "s4") for share in (0.01, 0.05, 0.25, "")),
            *(rows(text, model, fraction(share), f"f{share}")
              for model in ("rotary", "s4") for share in (0.05, 0.25))]),
        3: ("Does SPT make the initialisation redundant?", range(3), [
            rows(path, "s4 s4d", both()), rows(path, "s4d", both("", "--arch dt_max=0.01"), "short"),
            rows(path, "dfout dlr s4_rand dlr_rand", slow, "lr0.003"),
            rows(path, "s4_rand dlr_rand", long, "lr0.003-long"),
            rows(text, "s4 s4d", fast, "rated"),
            rows(text, "s4d", rated("9e-3", "9e-3", "9e-3", "", "--arch dt_max=0.01"), "rated-short"),
            rows(text, "dfout", fast, "rated"), rows(text, "dlr s4_rand", rated("9e-3", "9e-3", "3e-3"), "rated"),
            rows(text, "dlr_rand", fast, "rated")]),
        4: ("Luck: how many of ten seeds leave chance?", range(10), [
            rows(path, "transformer rotary", three),
            rows(path, "transformer", [scratch("", "--pool max"), spt("", "", "--pool max", of=""),
                                       joint("", "--pool max")], "max"),
            rows(path, "transformer", [joint("w0.1", "--lr 0.003 --joint 0.1")], "lr0.003")]),
        5: ("How much pretraining, and on how much?", range(5), [
            rows(path, "transformer", [length(1400), *(
                spt(f"p{n}", f"--steps {n}") for n in (175, 350, 700, 1400, 2800)), scratch(), length(4200)]),
            rows(path, "transformer", [scratch("n0.125", eighth), *(
                spt(f"n{share}", f"--train-fraction {share}", eighth) for share in (0.125, 0.25, 0.5, 1))]),
            rows(path, "transformer", [*(
                scratch(f"n{share}", f"--train-fraction {share}") for share in (0.125, 0.25, 0.5)), scratch()])]),
        6: ("What to hide?", range(3), [
            rows(path, "transformer", [spt(), spt("m0.15", "--mask 0.15"), spt("m0.5", "--mask 0.5"),
                                       *hide("runs3 runs10 patches rows")]),
            rows(path, "transformer", [spt(*rate10), *hide("runs3 runs10 patches rows", *rate10)]),
            rows(path, "transformer", [spt("p2800", "--steps 2800"), *hide("runs3 patches", "p2800", "--steps 2800")]),
            rows(text, "rotary", [spt(), spt("m0.15", "--mask 0.15"), spt("m0.5", "--mask 0.5"),
                                  *hide("runs3 runs10")])]),
        7: ("Masked or causal?", range(3), [
            row for model in ("rotary", "s4") for row in (
                rows(text, model, both()), rows(text, model, both("", "--objective causal"), "causal"))]),
        8: ("Where does the gain sit?", range(5), [
            row for task, model, steps, kinds in ((text, "rotary", 700, "qk v mixers others"),
                                                  (text, "s4", 700, "A BC mixers others"),
                                                  (path, "transformer", 1400, "qk v mixers others"))
            for row in (rows(task, model, [length(steps), spt(), *take(kinds)]),
                        rows(task, model, [length(steps), *take(kinds, " --rewind")]))]),
        9: ("One real row as far as a CPU carries it: Image, S4 with 100k parameters", range(1), [
            rows("image", "s4", image, "100k")])}
    return {number: Question(title, seeds, [settled(row) for some in entry for row in some])
            for number, (title, seeds, entry) in (found | beyond_todays_passes()).items()}


def beyond_todays_passes():
    """Questions 10 and 11, and their trials."""
    curve = read_table(CURVE)
    ways_out, their_trials = of_exits(curve)
    return {
        10: ("Does the gain last with more passes, and which share of them should pretraining have?", range(5), [
            of_curve(line, budgets) for line in curve]),
        11: ("Is it a prior, or any exit from a plateau?", range(5), [ways_out]),
        12: ("Trials of 10 and 11: validation accuracy, seeds that no table has", range(100, 101), [
            *(of_curve(line, tried) for line in curve), their_trials,
            *(of_curve(line, regularised) for line in curve if line["task"] == "text256")])}


# ---- Flags, and what differs from the recipe -------------------------------------------------------------------------

DENOISING = {"mask", "loss", "joint"}                            # without meaning where nothing is hidden


def arm_of(task, model, start, setting, known):
    """An arm of a sweep. What is the recipe's own value is left out of flags and word, so that a setting has one name,
    whichever sweep asks for it."""
    pretrained, stages = start in ("spt", "probe"), {"pretrain": {}, "finetune": {}}
    passed_on = INHERITED | {"objective"}
    useless = {"pretrain": set() if pretrained else known["pretrain"].keys(),
               "finetune": set() if start == "joint" else DENOISING | passed_on if pretrained else DENOISING}
    for name, value in sorted(setting, key=lambda pair: pair[0].split(".")[0] in known):   # one stage's own come last
        only, rest = name.split(".", 1) if name.split(".")[0] in known else (None, name)
        flag, _, key = rest.replace("-", "_").partition(".")
        for stage, flags in stages.items():
            asked = {"train_fraction"} if only else set()        # the second stage may have a share of its own
            if only in (None, stage) and flag in known[stage].keys() - (useless[stage] - asked):
                flags[flag] = flags.get(flag, {}) | {key: number(value)} if key else number(value)
    objective = stages["pretrain" if pretrained else "finetune"].get("objective")
    for stage, flags in stages.items():
        how = stage if stage == "pretrain" else "spt" if pretrained else start
        stages[stage] = differing(flags, task, model, objective, how, known[stage]) if flags else {}
    first, second = stages["pretrain"], stages["finetune"]
    of = "-".join(words_of(first))
    word = "-".join([*words_of(second), *(word for flag in first for word in words_of(
        {flag: first[flag]}, "" if flag in passed_on else "pre-"))])
    first, text = text_of(first), text_of({"joint": 1} | second if start == "joint" else second)
    if start == "probe":
        return spt(f"{word}-probe".strip("-"), first, f"{text} --freeze".strip(), of)
    return spt(word, first, text, of) if pretrained else Arm(start, word, text)


def words_of(flags, prefix=""):
    """What a setting is called in names of runs: {"lr": 0.01, "arch": {"d": 64}} -> ['lr0.01', 'd64']."""
    return [word for flag, value in flags.items() for word in (
        [f"{key}{each}" for key, each in value.items()] if isinstance(value, dict) else
        [f"{prefix}{flag.replace('_', '-')}{value}"])]


def text_of(flags):
    """{"lr": 0.01, "arch": {"d": 64}} -> '--lr 0.01 --arch d=64', which `given` reads."""
    values = {flag: ",".join(f"{key}={each}" for key, each in value.items()) if isinstance(value, dict) else value
              for flag, value in flags.items()}
    return " ".join(f"--{flag.replace('_', '-')} {value}" for flag, value in values.items())


def differing(flags, task, model, objective, start, defaults=None):
    """Those of these flags that are not the recipe's own values, sorted. Sizes for your own data depend on their
    number."""
    _, usual, recipe = recipe_line(task, declared(task), model, objective, start)
    if start == "joint":
        recipe = (halved(recipe) if OBJECTIVES[usual].hides else recipe) | {"joint": 1}
    recipe = (defaults or {}) | recipe | {"objective": recipe_line(task, declared(task), model, None, start)[1]}
    sizes = arch(task, model) if ":" not in task else {}
    flags = {name: {key: value[key] for key in sorted(value) if sizes.get(key) != value[key]} if name == "arch" else
             value for name, value in sorted(flags.items())}
    return {name: value for name, value in flags.items() if value not in ({}, recipe.get(name))}


def given(text):
    """'--lr 3e-3 --arch d=64 --rewind' -> {"lr": 0.003, "arch": {"d": 64}, "rewind": True}."""
    words, found = text.split(), {}
    for word, after in zip(words, [*words[1:], "--"]):
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            found[name] = (True if after.startswith("--") else assignments(after) if name == "arch" else number(after))
    return found


# ---- Commands --------------------------------------------------------------------------------------------------------

# What one command trains. first: the same of its pretraining.
Trained = namedtuple("Trained", "task model word start flags first", defaults=(None,))
FORKED = "--hide", "--take", "--rewind", "--begin", "--repeat", "--inputs"      # flags of patches in results/findings


def trained(row):
    """[Trained] of a row's arms."""
    found = []
    for arm in row.arms:
        word, first = "-".join(filter(None, (row.word, arm.word))), None
        if arm.start == "spt":
            first = Trained(row.task, row.model, word if arm.of is None else arm.of, "pretrain", arm.first)
        found.append(Trained(row.task, row.model, word, arm.start, arm.flags, first))
    return found


def chains(entry, seed, folder):
    """The commands of an entry for one seed, as lists of commands of which each wants those before it: one run, or a
    pretraining with all finetunings that start from it. Runs from scratch come first: `forecast` waits for them."""
    groups = {}
    for run in dict.fromkeys(run for row in entry for run in trained(row)):
        group = groups.setdefault(run.first or run, [run.first] if run.first else [])
        group.append(run)
    order = "pretrain", "scratch", "spt", "joint"
    return [commands(group, seed, folder) for group in sorted(groups.values(), key=lambda g: order.index(g[-1].start))]


def record(run):
    """What result.json will say that a run is: task, model, objective, start, joint, changed."""
    task, flags, before = declared(run.task), given(run.flags), run.first and record(run.first)
    start = "corpus" if run.start == "scratch" and MODELS[run.model].weights else run.start
    objective = before["objective"] if before else flags.pop("objective", None)
    objective = recipe_line(run.task, task, run.model, objective, start)[1]
    if before:
        keys = keys_of(run.model, before["changed"].get("arch", {}).get("ffn", "dense"))
        inherited = {name: value for name, value in before["changed"].items() if name in INHERITED}
        if "arch" in inherited:
            inherited["arch"] = {name: value for name, value in inherited["arch"].items() if keys[name].inherited}
        flags = inherited | flags
    weight = flags.pop("joint", None)
    changed = differing(flags, run.task, run.model, objective, start)
    changed |= {"pretraining": before["changed"]} if before and before["changed"] else {}
    return dict(task=run.task, model=run.model, objective=objective, start=start, joint=weight, changed=changed)


def commands(group, seed, folder):
    """Of runs that follow each other."""
    forked = any(flag in f"{run.flags} " for run in group for flag in FORKED)
    found = ["bash results/findings/fork.sh"] if forked else []

    def out(run):
        task = folder_name(run.task) if ":" in run.task else run.task
        return f"{folder}/{'-'.join(filter(None, (task, run.model, run.word, run.start)))}-s{seed}"

    for run in group:
        script = "pretrain" if run.start == "pretrain" else "finetune"
        what = f"--init {out(run.first)}" if run.first else f"--task {shlex.quote(run.task)} --model {run.model}"
        flags = f" {run.flags}" if run.flags else ""
        found.append(f"python {'runs/fork/' * forked}{script}.py {what}{flags} --seed {seed} --resume --out {out(run)}")
    return found
