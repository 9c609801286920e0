"""Stage 2, supervised training: classify sequences (BIDMC: a number each), from a self-pretrained run or from scratch.

    python finetune.py --task pathfinder_demo --model transformer                            from scratch
    python finetune.py --init runs/pathfinder_demo-transformer-masked-pretrain-s0            task and model: the run's
    python finetune.py --task pathx --model s4 --init runs/pathx-s4-masked-pretrain-s0       the paper's run
    python finetune.py --task pathfinder_demo --model transformer --joint 1                  both losses at once
    python finetune.py --freeze --init runs/pathfinder_demo-transformer-masked-pretrain-s0   the head alone

What differs from pretrain.py: a fresh head on a pooled sequence, the labels, and where the weights come from
(`load_backbone`). With --joint there is no stage 1; each step adds its loss to the labels'. The score is accuracy, and
R2 for regression. Validation chooses the checkpoint by it; the test split is evaluated once, at the end, with that
checkpoint, and every test sequence counts. Loop, run directory, --resume and torchrun are as in stage 1, and so is the
table of recipes.
"""
from files import UserError, read_json  # first: no traceback if Ctrl-C comes while the rest is imported

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from data import open_task
from engine.flags import arguments
from engine.folder import read_checkpoint
from engine.processes import guarded
from engine.run import Run, learning_rate
from models import HELPERS, MODELS, Backbone, Classifier, Joint, config, make_optimizer
from pretrain import OBJECTIVES, spt_loss

# ---- Loss and score --------------------------------------------------------------------------------------------------

def supervised_loss(task, outputs, y):
    """Summed loss: cross-entropy of outputs (b, classes) and y (b,), or for regression the squared error of (b, 1)."""
    if task.classes:
        return F.cross_entropy(outputs, y, reduction="sum")
    return (outputs[:, 0] - y).square().sum()


def r2(squared_error, y):
    """1 - SSE / SST for the SSE of a whole split and its targets y (n,); 0 where all targets are equal, since nothing
    can be explained there. (The official code's mean of R2 over batches is another number.)"""
    y = np.asarray(y, dtype=np.float64)
    return 0.0 if y.min() == y.max() else 1 - squared_error / float(np.square(y - y.mean()).sum())


@torch.no_grad()
def evaluate(model, task, split, run):
    """Loss and score over a whole split, each sequence once, whatever the batch size or number of processes. The score
    is accuracy, and R2 for regression. Third, of each class: how many labels, predictions and right predictions."""
    model.eval()
    loss = torch.zeros((), dtype=torch.float64, device=run.device)
    counts = torch.zeros(3, task.classes or 0, dtype=torch.int64, device=run.device)
    for _, _, batch in run.batches(split, split.lengths(), independent=True):
        with run.autocast():
            outputs = model(model.backbone.inputs(batch), batch.lengths).double()             # (b, classes or 1)
        loss += supervised_loss(task, outputs, batch.y)
        if task.classes:
            label, guess = (F.one_hot(one, task.classes) for one in (batch.y, outputs.argmax(-1)))       # (b, classes)
            counts += torch.stack((label, guess, label * guess)).sum(1)
    model.train()
    loss, counts = run.total(loss).item(), dict(zip(("labels", "predicted", "right"), run.total(counts).tolist()))
    return loss / len(split), sum(counts["right"]) / len(split) if task.classes else r2(loss, split.y), counts


# ---- Where the weights come from -------------------------------------------------------------------------------------

def load_backbone(model, args, say):
    """Puts the pretrained backbone into a Classifier and prints which tensors were loaded.

    Everything but the head transfers. The one shape that may differ is the input layer of continuous tasks: its
    mask-indicator column has no counterpart any more and is dropped. Any other difference is an error.
    """
    directory = args.init
    checkpoint = read_checkpoint(directory / "best.pt")
    pretrained = {k: v for k, v in checkpoint["model"].items() if k.startswith("backbone.")}
    pretrained = {k: v for k, v in pretrained.items() if k.split(".")[-1] not in HELPERS}
    ours = model.state_dict()
    encoder = "backbone.encoder.weight"
    dropped = ""
    if encoder in pretrained and encoder in ours and pretrained[encoder].shape[1] == ours[encoder].shape[1] + 1:
        pretrained[encoder] = pretrained[encoder][:, :-1]
        dropped = "; the mask-indicator column of the input layer is dropped"
    head = {k for k in ours if k.startswith("head.")}
    wrong = sorted(ours.keys() - pretrained.keys() - head) + sorted(pretrained.keys() - ours.keys())
    wrong += [k for k in pretrained.keys() & ours.keys() if pretrained[k].shape != ours[k].shape]
    if wrong:
        raise UserError(f"{directory} holds another architecture than this run, or one of an older version: {wrong[0]} "
                        f"does not fit ({len(wrong)} such tensors)")
    model.load_state_dict(pretrained | {k: ours[k] for k in head})
    say(f"from {directory}: {len(pretrained)} tensors taken over; left behind: "
        f"{', '.join(sorted(k for k in checkpoint['model'] if k not in pretrained))}; fresh: "
        f"{', '.join(sorted(head))}{dropped}")


# ---- Flags -----------------------------------------------------------------------------------------------------------

def inherit(flags):
    """{flag: value} that follows from --init, whose config.json says what was pretrained. Both stages see the same
    examples, unless --train-fraction differs."""
    if flags.label_fraction is not None and flags.train_fraction is not None:
        raise UserError("choose one of --label-fraction and --train-fraction, both of which choose training examples")
    trained = flags.model in MODELS and MODELS[flags.model].weights is not None
    if flags.joint is not None and trained:
        raise UserError(f"--joint has no meaning for {flags.model}, which is trained already and not from scratch")
    if flags.init is None:
        return dict(start="corpus" if trained else "scratch" if flags.joint is None else "joint")
    if flags.joint is not None:
        raise UserError(f"--joint {flags.joint:g} is training from scratch; it has no meaning with --init")
    if not (flags.init / "config.json").exists():
        raise UserError(f"--init {flags.init} is not the directory of a pretraining run: it has no config.json")
    saved = read_json(flags.init / "config.json")
    needed = {"task", "model", "objective", "arch", "train_fraction", "changed"}
    if saved.get("start") != "pretrain" or not needed <= saved.keys() or not isinstance(saved["changed"], dict):
        raise UserError(f"{flags.init} is not a pretraining run, or one of an older version; --init wants a new one")
    for name in ("task", "model", "objective"):
        if getattr(flags, name) not in (None, saved[name]):
            raise UserError(f"--{name} {getattr(flags, name)}, but {flags.init} was pretrained with --{name} "
                            f"{saved[name]}; leave that flag out, or choose another --init")
    if (flags.init / "best.pt").exists():
        kept = read_checkpoint(flags.init / "best.pt")["config"]
        if edited := [name for name in sorted(needed - {"changed"}) if kept.get(name) != saved[name]]:
            raise UserError(f"{flags.init}/config.json is not that of its best.pt: {edited[0]} = {saved[edited[0]]}, "
                            f"not {kept.get(edited[0])}; restore it, or choose another --init")
    if flags.arch is not None:
        raise UserError(f"--arch has no meaning with --init: sizes are those of {flags.init}")
    fixed = {name: saved[name] for name in ("task", "model", "objective", "arch")}
    return fixed | dict(start="spt", init=Path(os.path.relpath(flags.init)), pretraining=saved,
                        train_fraction=flags.train_fraction or saved["train_fraction"])


def parse_args(argv=None):
    return arguments("finetune", argv, OBJECTIVES, inherit)


def make_model(args, task, run):
    """The model: from a pretraining run, from trained weights or from scratch. `run.start` restores a resumed one."""
    if args.init is not None and args.pretraining["data"] != task.data:
        raise UserError(f"{args.init} was pretrained on {args.pretraining['data']}, and {args.task} in {args.data_dir} "
                        f"holds {task.data}; its test split may hold what was pretrained on")
    objective = OBJECTIVES[args.objective]
    mask_channel = args.start == "joint" and objective.hides and task.channels is not None
    sizes = config(args.arch, task, causal=objective.causal, mask_channel=mask_channel)
    backbone, outputs = Backbone(sizes), task.classes or 1
    if args.start == "joint":
        return Joint(backbone, outputs, args.pool, args.head, task.vocab if args.loss == "ce" else task.channels)
    model = Classifier(backbone, outputs, args.pool, args.head)
    if args.start == "spt" and not run.folder.resumes:
        load_backbone(model, args, run.say)
    elif args.start == "corpus" and not run.folder.resumes:
        MODELS[args.model].weights(model, task, args, run.say)
    if args.freeze:
        model.freeze()
    return model


class Labelled(NamedTuple):
    """Examples of a batch that pass through the model together: a Batch and, with --joint, what the objective makes of
    it. One that hides nothing has no corrupted inputs."""
    symbols: "torch.Tensor | None"
    samples: "torch.Tensor | None"
    lengths: "torch.Tensor | None"
    y: torch.Tensor
    corrupted: "torch.Tensor | None" = None
    hidden: "torch.Tensor | None" = None          # positions to predict: (b, l), then (m,) in b l
    targets: "torch.Tensor | None" = None


def main(argv=None):
    args = parse_args(argv)
    run, objective = Run(args), OBJECTIVES[args.objective]
    task, train, val, test = open_task(args.task, args.data_dir, args.train_fraction, args.label_fraction, labels=True)
    score_name = "accuracy" if task.classes else "r2"
    run.open(task, train)                         # sets the number of steps; checks the run directory
    torch.manual_seed(args.seed)
    model = make_model(args, task, run).to(run.device)
    optimizer = make_optimizer(model, args.lr, args.wd)
    forward, inputs = run.start(model, optimizer), model.backbone.inputs

    def prepare(step):
        """The parts of a step's batch, on the CPU, while the step before runs."""
        rows, mine = run.rows(step)               # examples of the whole batch; which of them are this process's
        batch = train.batch(rows[mine])
        whole = Labelled(*batch)
        if args.joint is None:
            return run.parts(whole, rows, mine, task.documents)
        corrupted, targets, hidden = objective.pretext(args, task, batch, rows, mine, args.seed, step)
        whole = whole._replace(corrupted=corrupted if objective.hides else None, hidden=hidden, targets=targets)
        return [part._replace(hidden=run.numbers(part.hidden))
                for part in run.parts(whole, rows, mine, task.documents)]

    @run.measured                                 # notes loss and gradient norm; with --compile a CUDA graph
    def learn(parts):
        """A step of the optimiser: the gradient of the loss of a whole batch, part by part."""
        if args.joint is not None:                # as in pretrain.py: hidden positions, on all processes
            n = run.total(sum((part.hidden >= 0).sum() for part in parts)).clamp(min=1)
        optimizer.zero_grad(set_to_none=True)
        for part in run.exchange(parts):
            if args.joint is None:
                with run.autocast():
                    outputs = forward(inputs(part), part.lengths)                             # (b, classes or 1)
                run.backward(supervised_loss(task, outputs.float(), part.y) / args.batch)
                continue
            with run.autocast():
                outputs, prediction = forward(inputs(part), part.lengths, part.corrupted, part.hidden)
            loss, _ = spt_loss(prediction, part.targets, part.hidden, args.loss)              # of the same examples
            run.backward(supervised_loss(task, outputs.float(), part.y) / args.batch + args.joint * loss / n)
        optimizer.step()

    # ---- training: evaluate, save, stop?, step, log -----------------------------------------------------------
    for step in range(run.step, run.steps + 1):   # run.step: 0, or where a stopped run goes on
        if run.evaluates(step):
            loss, score, _ = evaluate(model, task, val, run)
            run.evaluated(step, score, **{"val_loss": loss, f"val_{score_name}": score})      # best.pt, last.pt
        if step == run.steps:
            break

        for group in optimizer.param_groups:      # scales each group's own rate: SSM parameters keep theirs
            group["lr"] = group["initial_lr"] * learning_rate(step, run.steps, args)
        learn(run.begin(step, prepare))           # the prepared parts, on the device; dropout is seeded
        run.stepped(step)                         # log line, checkpoint; ends here if a signal asked for it

    # ---- the test split, once, with the checkpoint that validation chose ---------------------------------------
    run.load_best()
    test_loss, test_score, counts = evaluate(model, task, test, run)
    run.finish(**{f"val_{score_name}": run.state["best"], f"test_{score_name}": test_score}, test_loss=test_loss,
               start=args.start, init=str(args.init) if args.init else None, test_examples=len(test),
               counts=counts if task.classes else None)


if __name__ == "__main__":
    guarded(main)
