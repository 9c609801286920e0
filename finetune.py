"""Stage 2, supervised training: classify sequences (BIDMC: a number each), from a self-pretrained run or from scratch.

    python finetune.py --task listops_demo --model transformer                               from scratch
    python finetune.py --init runs/listops_demo-transformer-masked-pretrain-s0               task and model: the run's
    python finetune.py --task pathx --model s4 --init runs/pathx-s4-masked-pretrain-s0       the paper's run
    python finetune.py --task text --model pythia                                            from a language model

What differs from pretrain.py: a fresh head on a pooled sequence, the labels, and where the weights come from
(`load_backbone`). The score is accuracy, and R2 for regression. Validation chooses the checkpoint by it; the test split
is evaluated once, at the end, with that checkpoint, and every test sequence counts. Loop, run directory, --resume and
torchrun are as in stage 1.
"""
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from data import TASKS, UserError, fetch_pythia, load, load_task, prepare, pythia_tokens
from models import Backbone, Classifier, arch, neox_weights, param_groups, read_safetensors, read_table
from pretrain import (Log, apply_recipe, base_parser, batch_rows, guarded, identity, inputs_of, lr_multiplier,
                      micro_batches, new_state, open_run, plan, read_checkpoint, read_json, restore, rows_of,
                      run_directory, save, seed_dropout, setup, steps_of, symbols_of, to_device)

# start: spt = from a pretraining run (paper, tables 4 to 6, its values for FT), scratch = random weights, both = the
# same values for either, corpus = the weights of a language model. Transformers from scratch take the values of their
# SPT row: the paper lists no others. S4 from scratch is cited by the paper from Gu et al. 2022, so those rows are
# theirs, in the official configuration's numbers (PathX-256: paper, appendix C.1.2; BIDMC: table 6, whose other entries
# for S4 repeat table 5's for S4 + SPT, a misprint). Pythia with random weights takes the values of the pretrained one.
# Epochs, warm-up, schedule: the official configurations (rotary: as in pretrain.py; s4_rand: as s4 with SPT), but
# warm-up and cosine for the Transformers on Speech Commands, where those wait for a plateau. pool: table 4 for
# Transformers, the official configuration for all others, max on PathX (C.1.3). head: the official configurations.
RECIPES = """
task             model        objective  start    pool  head      lr    wd  batch  epochs  steps  warmup  schedule
listops          transformer  masked     both     mean  linear  1e-4   0.1     64     100      -    2000  constant
listops          transformer  causal     both     last  linear  5e-4   0.1    128     100      -    2000  constant
listops          rotary       masked     both     mean  linear  1e-4  0.05     64     100      -    2000  constant
listops          s4           masked     spt      mean  linear  1e-3  0.05     16      40      -    2000  constant
listops          s4           masked     scratch  mean  linear  1e-2  0.05     50      40      -    2000  cosine
listops          s4_rand      masked     spt      mean  linear  1e-3  0.05     16      40      -    2000  constant
listops          s4_rand      masked     scratch  mean  linear  5e-4  0.05     16      40      -    2000  constant
listops          dlr          masked     both     mean  linear  5e-4  0.05     16      40      -    2000  constant
listops          dlr_rand     masked     spt      mean  linear  5e-4  0.05     64      40      -    2000  constant
listops          dlr_rand     masked     scratch  mean  linear  1e-4  0.05     16      40      -    2000  constant
listops          pythia       causal     corpus   mean  linear  5e-5     0     64     200      -     200  cosine
listops          pythia_rand  causal     scratch  mean  linear  5e-5     0     64     200      -     200  cosine
text             transformer  masked     both     mean  mlp     1e-4   0.1     64      65      -    2000  constant
text             transformer  causal     both     mean  mlp     1e-4   0.1     64      65      -    2000  constant
text             rotary       masked     both     mean  mlp     5e-4   0.1     64      65      -    2000  constant
text             s4           masked     spt      mean  linear  5e-4  0.05     16      32      -    5000  cosine
text             s4           masked     scratch  mean  linear  1e-2  0.05     16      32      -    5000  cosine
text             s4_rand      masked     both     mean  linear  1e-3  0.05     16      32      -    5000  cosine
text             dlr          masked     spt      mean  linear  1e-3  0.05     16      32      -    2000  constant
text             dlr          masked     scratch  mean  linear  5e-4  0.05     16      32      -    2000  constant
text             dlr_rand     masked     spt      mean  linear  5e-4  0.05     16      32      -    2000  constant
text             dlr_rand     masked     scratch  mean  linear  1e-3  0.05     16      32      -    2000  constant
text             pythia       causal     corpus   last  linear  5e-4     0     16      32      -    5000  constant
text             pythia_rand  causal     scratch  last  linear  5e-4     0     16      32      -    5000  constant
retrieval        transformer  masked     both     mean  pair    5e-4     0     16      32      -    5000  constant
retrieval        transformer  causal     both     mean  pair    1e-3     0     48      32      -    5000  constant
retrieval        rotary       masked     both     mean  pair    5e-4     0     16      32      -    5000  constant
retrieval        s4           masked     spt      mean  pair    5e-4  0.05    256      20      -    2500  constant
retrieval        s4           masked     scratch  mean  pair    1e-2  0.05     64      20      -    2500  cosine
retrieval        pythia       causal     corpus   mean  pair    1e-4     0    256      20      -    2500  constant
retrieval        pythia_rand  causal     scratch  mean  pair    1e-4     0    256      20      -    2500  constant
image            transformer  masked     both     max   mlp     1e-3     0     16     200      -    2000  constant
image            transformer  causal     both     max   mlp     1e-3     0     32     200      -    2000  constant
image            rotary       masked     both     mean  mlp     1e-3     0     64     200      -    2000  constant
image            s4           masked     spt      mean  linear  1e-3  0.05    512     200      -    1000  cosine
image            s4           masked     scratch  mean  linear  1e-2  0.05     50     200      -    1000  cosine
image            s4_rand      masked     spt      mean  linear  5e-4  0.05     64     200      -    1000  cosine
image            s4_rand      masked     scratch  mean  linear  1e-4  0.05    128     200      -    1000  cosine
image            dlr          masked     spt      mean  linear  1e-3  0.05     64     200      -    1000  constant
image            dlr          masked     scratch  mean  linear  5e-4  0.05     64     200      -    1000  constant
image            dlr_rand     masked     spt      mean  linear  1e-3  0.05     64     200      -    1000  constant
image            dlr_rand     masked     scratch  mean  linear  1e-3  0.05     16     200      -    1000  constant
image            pythia       causal     corpus   mean  linear  7e-5     0     64     200      -    2000  constant
image            pythia_rand  causal     scratch  mean  linear  7e-5     0     64     200      -    2000  constant
pathfinder       transformer  masked     both     mean  linear  5e-4     0     16     200      -    5000  constant
pathfinder       transformer  causal     both     mean  linear  1e-3     0    256     200      -    5000  constant
pathfinder       rotary       masked     both     mean  linear  5e-4     0     64     200      -    5000  constant
pathfinder       s4           masked     spt      last  linear  1e-3  0.03     64     200      -    2500  constant
pathfinder       s4           masked     scratch  last  linear  4e-3  0.03     64     200      -    2500  cosine
pathfinder       pythia       causal     corpus   last  linear  1e-4     0   1024     200      -    2500  constant
pathfinder       pythia_rand  causal     scratch  last  linear  1e-4     0   1024     200      -    2500  constant
pathx            transformer  masked     both     max   linear  5e-4     0     32     200      -    5000  constant
pathx            transformer  causal     both     max   linear  5e-4     0    256     200      -    5000  constant
pathx            rotary       masked     both     max   linear  5e-4     0     32     200      -    5000  constant
pathx            s4           masked     spt      max   linear  1e-3  0.05     64      50      -   10000  cosine
pathx            s4           masked     scratch  max   linear  5e-4  0.05     16      50      -   10000  cosine
pathx            s4_rand      masked     both     max   linear  5e-4  0.05     16      50      -   10000  cosine
pathx            dlr          masked     both     max   linear  5e-4  0.05     64      50      -    5000  cosine
pathx            dlr_rand     masked     spt      max   linear  5e-4  0.05     16      50      -    5000  cosine
pathx            dlr_rand     masked     scratch  max   linear  5e-4  0.05     64      50      -    5000  cosine
pathx256         s4           masked     spt      max   linear  1e-3  0.05     64      50      -   10000  cosine
pathx256         s4           masked     scratch  max   linear  1e-4  0.05     16      50      -   10000  cosine
sc               rotary       masked     both     max   linear  1e-3     0    256     200      -    2000  cosine
sc               rotary       causal     both     max   linear  1e-3     0    256     200      -    2000  cosine
sc               s4           masked     spt      max   linear  5e-3  0.05     16      40      -    1000  cosine
sc               s4           masked     scratch  max   linear  1e-2  0.05     16      40      -    1000  cosine
sc               s4           causal     spt      max   linear  5e-4  0.05     16      40      -    1000  cosine
sc               s4           causal     scratch  max   linear  1e-2  0.05     16      40      -    1000  cosine
scifar           rotary       masked     both     mean  mlp     1e-3     0     64     200      -    2000  constant
scifar           s4           masked     spt      mean  linear  5e-4  0.05     64     200      -    1000  cosine
scifar           s4           masked     scratch  mean  linear  1e-2  0.05     50     200      -    1000  cosine
bidmc_hr         rotary       masked     both     max   linear  5e-4     0     32     500      -       0  step
bidmc_hr         s4           masked     spt      mean  linear  1e-3  0.05     64     500      -       0  step
bidmc_hr         s4           masked     scratch  mean  linear  1e-3  0.05     32     500      -       0  step
bidmc_rr         rotary       masked     both     max   linear  5e-4     0     32     500      -       0  step
bidmc_rr         s4           masked     spt      mean  linear  1e-3  0.05     64     500      -       0  step
bidmc_rr         s4           masked     scratch  mean  linear  1e-2  0.05     32     500      -       0  step
bidmc_spo2       rotary       masked     both     max   linear  1e-4     0      8     500      -       0  step
bidmc_spo2       s4           masked     spt      mean  linear  1e-3  0.05     64     500      -       0  step
bidmc_spo2       s4           masked     scratch  mean  linear  1e-2  0.05     32     500      -       0  step
"""

# Not the paper's: as in pretrain.py.
SMALL_RECIPES = """
task            model                   objective     start   pool head     lr wd batch steps warmup schedule eval_every
text256         rotary                  masked        spt     max  linear 1e-3  0    16  2000     50 cosine            -
text256         rotary                  masked        scratch max  linear 1e-3  0    16  6000     50 cosine            -
text256         s4                      masked        spt     max  linear 4e-3  0    16  2000     50 cosine            -
text256         s4                      masked        scratch max  linear 4e-3  0    16  6000     50 cosine            -
text_demo       rotary                  masked        spt     max  linear 1e-3  0    32   700     50 cosine            -
text_demo       rotary                  masked        scratch max  linear 1e-3  0    32  2000     50 cosine            -
text_demo       s4|s4_rand|dlr|dlr_rand masked        spt     max  linear 4e-3  0    32   700     50 cosine            -
text_demo       s4|s4_rand|dlr|dlr_rand masked        scratch max  linear 4e-3  0    32  2000     50 cosine            -
listops_demo    transformer|rotary      masked        spt     mean linear 1e-3  0    32  1000     50 cosine            -
listops_demo    transformer|rotary      masked        scratch mean linear 1e-3  0    32  1700     50 cosine            -
listops_demo    s4                      masked        spt     mean linear 4e-3  0    32  1000     50 cosine            -
listops_demo    s4                      masked        scratch mean linear 4e-3  0    32  1700     50 cosine            -
pathfinder_demo transformer|rotary      masked        spt     mean linear 1e-3  0    16  1400     50 cosine            -
pathfinder_demo transformer|rotary      masked        scratch mean linear 1e-3  0    16  2700     50 cosine            -
pathfinder_demo s4|s4_rand|dlr|dlr_rand masked        spt     mean linear 1e-2  0    16   900     50 cosine            -
pathfinder_demo s4|s4_rand|dlr|dlr_rand masked        scratch mean linear 1e-2  0    16  1900     50 cosine            -
listops_mini    transformer|rotary      masked|causal both    mean linear 3e-3  0    16  2000     50 cosine          200
listops_mini    s4|s4_rand|dlr|dlr_rand masked        both    mean linear 1e-2  0    16  2000     50 cosine          200
text_mini       transformer|rotary      masked|causal both    max  linear 3e-3  0    16   700     50 cosine          200
text_mini       s4|s4_rand|dlr|dlr_rand masked        both    max  linear 1e-2  0    16   700     50 cosine          200
image_mini      transformer|rotary      masked|causal both    mean linear 3e-3  0    16   700     50 cosine          200
image_mini      s4|s4_rand|dlr|dlr_rand masked        both    mean linear 1e-2  0    16   700     50 cosine          200
scifar_mini     transformer|rotary      masked|causal both    mean linear 3e-3  0    16   700     50 cosine          200
scifar_mini     s4|s4_rand|dlr|dlr_rand masked        both    mean linear 1e-2  0    16   700     50 cosine          200
pathfinder_mini transformer|rotary      masked|causal both    mean linear 1e-3  0    16  1000     50 cosine          200
pathfinder_mini s4                      masked        both    mean linear 1e-2  0    16  1000     50 cosine          200
pathx_mini      transformer|rotary      masked|causal both    mean linear 1e-3  0    16  1400     50 cosine          200
pathx_mini      s4|s4_rand|dlr|dlr_rand masked        both    mean linear 1e-2  0    16  1000     50 cosine          200
pathx256_mini   s4                      masked        both    mean linear 1e-2  0    16  1000     50 cosine          200
listops_mini    pythia_rand             causal        scratch last linear 1e-3  0    16  2000     50 cosine          200
text_mini       pythia_rand             causal        scratch last linear 1e-3  0    16   700     50 cosine          200
image_mini      pythia_rand             causal        scratch last linear 1e-3  0    16   700     50 cosine          200
pathfinder_mini pythia_rand             causal        scratch last linear 1e-3  0    16  1000     50 cosine          200
"""

# With --train-fraction: paper, section 3.4 and appendix C.1.4, "until convergence". For Text from scratch the paper
# takes the better of 1e-3 and 5e-4 on validation. Warm-up and schedule are ours: on the smallest shares the rows above
# would end before their warm-up does.
PART_RECIPES = """
task       model objective start   pool head     lr   wd batch epochs steps warmup schedule eval_every
text       s4    masked    spt     mean linear 5e-4 0.05    16    200     -    200 constant          -
text       s4    masked    scratch mean linear 1e-3 0.05    16    200     -    200 constant          -
image      s4    masked    both    mean linear 2e-3 0.05    50    200     -    200 constant          -
text_mini  s4    masked    both    max  linear 1e-2    0    16      -   700     50 cosine          200
image_mini s4    masked    both    mean linear 1e-2    0    16      -   700     50 cosine          200
"""


def recipes():
    """The rows of all tables, one per start."""
    return [row | {"start": start} for row in rows_of(PART_RECIPES, RECIPES, SMALL_RECIPES)
            for start in (("spt", "scratch") if row["start"] == "both" else (row["start"],))]


def parse_args(argv=None):
    """Flags of stage 2. With --init, task, model and objective come from the pretraining run's config.json."""
    parser, what, recipe = base_parser(__doc__.splitlines()[0], "START")
    what.add_argument("--init", type=Path, help="pretraining run directory; without it, training is from scratch "
                                                "(pythia: from the weights of the language model)")
    recipe.add_argument("--pool", choices=("mean", "max", "last"), help="how the sequence becomes one vector")
    recipe.add_argument("--head", choices=("linear", "mlp", "pair"),
                        help="on that vector; mlp: one hidden layer; pair: for tasks with two documents an example")
    inherited = {}

    def key_of(first):
        if first.init is None:
            return dict(task=first.task, model=first.model, objective=first.objective,
                        start="corpus" if first.model == "pythia" else "scratch", part=first.train_fraction is not None)
        if not first.init.is_dir():
            raise UserError(f"--init {first.init} is not a directory; it wants a pretraining run, not a file")
        inherited.update(read_json(first.init / "config.json"))
        for name in ("task", "model", "objective", "arch"):
            if name not in inherited:
                raise UserError(f"{first.init / 'config.json'} has no {name}; is it a pretraining run of this project?")
        known = arch(inherited["task"], inherited["model"], inherited.get("size"))
        if known is None or not isinstance(inherited["arch"], dict) or inherited["arch"].keys() != known.keys():
            raise UserError(f"{first.init} holds an architecture that models.py does not have: {inherited['arch']}")
        if "start" in inherited:
            raise UserError(f"{first.init} is a finetuning run; --init wants a pretraining run")
        for name in ("task", "model", "size", "objective", "spt_share"):
            if getattr(first, name) not in (None, inherited.get(name)):
                flag = "--" + name.replace("_", "-")
                raise UserError(f"{flag} {getattr(first, name)}, but {first.init} was pretrained "
                                + (f"with {flag} {inherited[name]}" if inherited.get(name) else f"without {flag}"))
        for name in ("train_fraction", "spt_share"):
            if not isinstance(inherited.get(name), (int, float, type(None))):
                raise UserError(f"{first.init / 'config.json'} is damaged: its {name} is {inherited[name]}")
        share = inherited.get("train_fraction")
        # Both stages see the same examples, unless a flag says otherwise.
        first.spt_share = inherited.get("spt_share")
        parser.set_defaults(size=inherited.get("size"), train_fraction=share, spt_share=first.spt_share)
        return {name: inherited[name] for name in ("task", "model", "objective")} | dict(
            start="spt", part=share is not None or first.train_fraction is not None)

    args = apply_recipe(parser, argv, recipes(), key_of)
    documents = TASKS[args.task].documents
    if (args.head == "pair") != (documents == 2):
        raise UserError(f"--head {args.head} does not fit {args.task}, where an example has {documents} document"
                        f"{'s; use --head pair' if documents > 1 else '; use --head linear or mlp'}")
    args.init = args.init and Path(os.path.relpath(args.init))         # one run, however its path was written
    if args.train_fraction is not None and not args.part:  # also where it is inherited
        args.changed["train_fraction"] = args.train_fraction
    if inherited:
        args.arch = inherited["arch"]
        args.pretraining = {k: inherited.get(k) for k in (
            "mask", "loss", "lr", "wd", "batch", "steps", "epochs", "warmup", "schedule", "train_fraction", "seed",
            "data")}
        if inherited.get("changed") or not (args.init / "result.json").exists():
            # A finetuned model is only as much the recipe's as the pretraining it starts from.
            args.changed["init"] = f"{args.init}: {inherited.get('changed') or 'pretraining is unfinished'}"
    args.out = args.out or run_directory(args, args.start)
    return args


def load_backbone(model, args, say):
    """Puts the pretrained backbone into a Classifier and says exactly what was and what was not taken over.

    Everything but the head transfers. The one shape that may differ is the input layer of continuous tasks: its
    mask-indicator column has no counterpart any more and is dropped. Any other difference is an error.
    """
    directory = args.init
    if not (directory / "result.json").exists():
        say(f"warning: {directory} is not finished; its best checkpoint so far is used")
    checkpoint = read_checkpoint(directory / "best.pt")
    config = checkpoint["config"]
    for name, ours in (("objective", args.objective), ("arch", args.arch)):
        if config.get(name) != ours:
            raise UserError(f"{directory}/best.pt holds another architecture: {name} {config.get(name)}, not {ours}")
    pretrained = {k: v for k, v in checkpoint["model"].items() if k.startswith("backbone.")}
    ours = model.state_dict()
    encoder = "backbone.encoder.weight"
    dropped = ""
    if encoder in pretrained and encoder in ours and pretrained[encoder].shape[1] == ours[encoder].shape[1] + 1:
        pretrained[encoder] = pretrained[encoder][:, :-1]
        dropped = "; the mask-indicator column of the input layer is dropped"
    missing = {k for k in ours if k not in pretrained}
    unexpected = sorted(pretrained.keys() - ours.keys())
    head = {k for k in ours if k.startswith("head.")}
    wrong = sorted(missing - head) + unexpected
    wrong += [k for k in pretrained.keys() & ours.keys() if pretrained[k].shape != ours[k].shape]
    if wrong:
        raise UserError(f"{directory} holds another architecture than this run, or one of an older version: {wrong[0]} "
                        f"does not fit ({len(wrong)} such tensors)")
    model.load_state_dict(pretrained | {k: ours[k] for k in head})
    say(f"from {directory}: {len(pretrained)} tensors taken over; left behind: "
        f"{', '.join(sorted(k for k in checkpoint['model'] if k not in pretrained))}; fresh: "
        f"{', '.join(sorted(head))}{dropped}")


def load_pythia(model, args, say):
    """Puts the weights of Pythia-70M into a Classifier, downloading them on first use (paper, section 3.5)."""
    path, tokenizer = fetch_pythia(args.data_dir)
    tokens, without = pythia_tokens(args.task, tokenizer, args.data_dir)
    try:
        weights = neox_weights(read_safetensors(path), args.arch, torch.from_numpy(tokens))
        model.backbone.load_state_dict(weights)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise UserError(f"{path} is not the weights of pythia-70m-deduped, or it is damaged "
                        f"({' '.join(str(error).split())[:200]}); remove it, and run the same command again") from None
    say(f"from {path}: {len(weights)} tensors taken over; of the embedding, the {len(tokens)} rows of this task's "
        "symbols" + (f"; without a token of their own: {' '.join(map(repr, without))}" if without else ""))
    say("fresh: " + ", ".join(sorted(k for k in model.state_dict() if k.startswith("head."))))


def supervised_loss(task, outputs, y):
    """Summed loss: cross-entropy of outputs (b, classes) and y (b,), or for regression the squared error of (b, 1)."""
    if task.classes:
        return F.cross_entropy(outputs, y, reduction="sum")
    return (outputs[:, 0] - y).square().sum()


def r2(squared_error, y):
    """1 - SSE / SST for the SSE of a whole split and its targets y (n,); 0 where all targets are equal, since nothing
    can be explained there. (The official code's mean of R2 over batches is another number.)"""
    y = np.asarray(y, dtype=np.float64)
    return 0.0 if y.min() == y.max() else 1 - squared_error / np.square(y - y.mean()).sum()


@torch.no_grad()
def evaluate(model, task, split, args, run):
    """Loss and score over a whole split, each sequence once, whatever the batch size or number of processes. The score
    is accuracy, and R2 for regression."""
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=run.device)
    size = args.micro_batch or args.batch
    for i in range(run.rank, -(-len(split) // size), run.world):
        x, y, lengths = to_device(split.batch(np.arange(i * size, min((i + 1) * size, len(split)))), run.device)
        with run.autocast():
            outputs = model(inputs_of(task, args.model, x), lengths).double()
        sums[0] += supervised_loss(task, outputs, y)
        sums[1] += (outputs.argmax(-1) == y).sum()                     # for classes only
        sums[2] += len(y)
    model.train()
    loss, right, n = run.total(sums).tolist()
    return loss / n, right / n if task.classes else r2(loss, split.y)


def main(argv=None):
    args = parse_args(argv)
    run = setup(args)
    if args.init is not None:
        run.say(f"inherited from {args.init}: task {args.task}, model {args.model}, objective {args.objective}, sizes")
        if args.train_fraction is not None:
            run.say(f"  trains on a share of {args.train_fraction:g} of the training examples (--train-fraction)")
    prepare(args.task, args.data_dir)
    task = load_task(args.task, args.data_dir)
    score_name = "accuracy" if task.classes else "r2"
    train = load(args.task, "train", args.data_dir, args.train_fraction)
    val, test = (load(args.task, name, args.data_dir) for name in ("val", "test"))
    args.data = identity(args)
    if args.init is not None and args.pretraining["data"] != args.data:
        raise UserError(f"{args.init} was pretrained on {args.pretraining['data']}, and {args.data_dir}/{args.task} "
                        f"holds {args.data}; its test split may hold what was pretrained on")
    total, per_epoch = steps_of(args, len(train))

    # ---- model: from a pretraining run, from Pythia's weights, or from scratch; or that of the run that is resumed --
    torch.manual_seed(args.seed)
    backbone = Backbone(args.arch, task.length, symbols_of(task, args.model), task.channels,
                        causal=args.objective == "causal")
    model = Classifier(backbone, task.classes or 1, args.pool, args.head)
    resumed = args.resume and any((args.out / name).exists() for name in ("last.pt", "result.json"))
    if args.init is not None and not resumed:
        load_backbone(model, args, run.say)
    elif args.model == "pythia" and not resumed:
        load_pythia(model, args, run.say)
    resume_from = open_run(args, run)
    model.to(run.device)
    optimizer = torch.optim.AdamW(param_groups(model, args.lr, args.wd), fused=True)
    state = new_state() if resume_from is None else restore(resume_from, args, model, optimizer)
    plan(args, run, model, optimizer, total, per_epoch, train, val)
    log = Log(args, run, total, state)
    parallel = run.wrap(model, args)

    # ---- training: evaluate, save, stop?, step, log -----------------------------------------------------------
    for step in range(state["step"], total + 1):
        if step == total or (step > 0 and step % args.eval_every == 0):
            if step > state["evaluated"]:                              # not again right after resuming
                with log.pause():
                    loss, score = evaluate(model, task, val, args, run)
                log.evaluation(step, **{"val_loss": loss, f"val_{score_name}": score})
                state["evaluated"] = step
                if score > state["best"]:
                    state.update(best=score, best_step=step)
                    save(args.out / "best.pt", run, args, model)
                log.save(step, state, run, args, model, optimizer)
        if step == total:
            break

        for group in optimizer.param_groups:      # scales each group's own rate: SSM parameters keep theirs
            group["lr"] = group["initial_lr"] * lr_multiplier(step, args.warmup, total, args.schedule)
        seed_dropout(args, step, run)
        rows = batch_rows(len(train), args, step, per_epoch, run)
        x, y, lengths = to_device(train.batch(rows.whole[rows.mine]), run.device)
        optimizer.zero_grad(set_to_none=True)
        batch_loss = torch.zeros((), device=run.device)
        for part, last in micro_batches(rows, args, run):
            with run.no_sync(parallel, last):
                with run.autocast():
                    inputs = inputs_of(task, args.model, x[part])
                    outputs = parallel(inputs, None if lengths is None else lengths[part])
                loss = supervised_loss(task, outputs.float(), y[part]) / len(rows.whole)
                (loss * run.world).backward()                          # outside autocast, as in pretrain.py
            batch_loss += loss.detach()
        optimizer.step()
        log.training(step, state, run.total(batch_loss).item(), optimizer)
        log.save_if_due(step + 1, state, run, args, model, optimizer)

    # ---- the test split, once, with the checkpoint that validation chose ---------------------------------------
    if run.world > 1:
        torch.distributed.barrier()                                    # best.pt is written by process 0
    model.load_state_dict(read_checkpoint(args.out / "best.pt")["model"])
    test_loss, test_score = evaluate(model, task, test, args, run)
    results = {f"val_{score_name}": state["best"], f"test_{score_name}": test_score, "test_loss": test_loss,
               "start": args.start, "init": str(args.init) if args.init else None, "test_examples": len(test)}
    log.finish(args, run, state, model, len(train), results)
    run.close()


if __name__ == "__main__":
    guarded(main)
