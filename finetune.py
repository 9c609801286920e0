"""Stage 2, supervised training: classify sequences (or predict a number), from a self-pretrained run or from scratch.

    python finetune.py --task pathfinder_demo --model transformer                            from scratch
    python finetune.py --init runs/pathfinder_demo-transformer-masked-pretrain-s0            task and model: the run's
    python finetune.py --task pathx --model s4 --init runs/pathx-s4-masked-pretrain-s0       the paper's run
    python finetune.py --task pathfinder_demo --model transformer --joint 1                  both losses at once
    python finetune.py --freeze --init runs/pathfinder_demo-transformer-masked-pretrain-s0   a linear probe

Three things differ from pretrain.py: a new head on the pooled sequence, the labels, and where the weights come from
(`load_backbone`). The score is accuracy, or R2 for regression. Validation chooses the checkpoint (in your data, by
balanced accuracy if classes are unequal). The test split is evaluated once, at the end, with that checkpoint and
without dropping an incomplete batch. Loop, run directory, --resume and torchrun are as in stage 1. Joint training,
which has no stage 1, stands at the end.
"""
from files import UserError  # first: no traceback if Ctrl-C comes while the rest is imported

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from data import open_task
from engine.feed import drawing
from engine.flags import arguments
from engine.folder import read_checkpoint
from engine.processes import guarded
from engine.run import Run, learning_rate
from models import HELPERS, MODELS, Backbone, Classifier, Joint, config, make_optimizer
from pretrain import OBJECTIVES, spt_loss
from tasks.split import balanced_accuracy, unequal

# ---- Loss and score --------------------------------------------------------------------------------------------------

def supervised_loss(task, outputs, y, weights=None):
    """Return the summed loss: cross-entropy of outputs (b, classes) and y (b,), with weights (classes,) if they are
    given; regression: squared error of (b, 1)."""
    if task.classes:
        return F.cross_entropy(outputs, y, weights, reduction="sum")
    return (outputs[:, 0] - y).square().sum()


def class_weights(task, train):
    """Return a weight for each class, float32 (classes,): inversely proportional to its number of training examples, 1
    on average over these."""
    sizes = np.bincount(train.labels(), minlength=task.classes).clip(1)
    return torch.from_numpy(len(train) / (task.classes * sizes)).float()


def r2(squared_error, y):
    """Return R2 = 1 - SSE / SST of a whole split, given its SSE and targets y (n,); 0 if all targets are equal. (The
    official code averages R2 over batches, which is another number.)"""
    y = np.asarray(y, dtype=np.float64)
    return 0.0 if y.min() == y.max() else 1 - squared_error / float(np.square(y - y.mean()).sum())


@torch.no_grad()
def evaluate(model, task, split, run):
    """Return loss, score (accuracy, or R2 for regression) and predictions (n,) over a whole split, each sequence once.
    predictions: classes or numbers, float64 like the numbers that processes add up."""
    model.eval()
    loss = torch.zeros((), dtype=torch.float64, device=run.device)
    found = torch.zeros(len(split), dtype=torch.float64, device=run.device)
    for _, rows, batch in run.batches(split, split.lengths(), independent=True):          # this process's batches
        with run.autocast():
            outputs = model(model.backbone.inputs(batch), batch.lengths).double()             # (b, classes or 1)
        loss += supervised_loss(task, outputs, batch.y)
        found[rows] = outputs.argmax(-1).double() if task.classes else outputs[:, 0]
    model.train()
    loss, found = run.total(loss).item(), run.total(found).cpu().numpy()
    return loss / len(split), float(np.mean(found == split.y)) if task.classes else r2(loss, split.y), found


# ---- Where the weights come from -------------------------------------------------------------------------------------

def load_backbone(model, args, say):
    """Load the pretrained backbone into a Classifier and print what was loaded.

    Everything but the head transfers. Only the input layer of a task with samples may differ in shape: its column for
    the mask channel is dropped if nothing is hidden or missing now. Any other difference is an error.
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
        dropped = "; the input layer's column for the mask channel is dropped"
    head = {k for k in ours if k.startswith("head.")}
    wrong = sorted(ours.keys() - pretrained.keys() - head) + sorted(pretrained.keys() - ours.keys())
    wrong += [k for k in pretrained.keys() & ours.keys() if pretrained[k].shape != ours[k].shape]
    if wrong:
        raise UserError(f"{directory} holds another architecture than this run, or one of an older version: {wrong[0]} "
                        f"does not fit ({len(wrong)} such tensors)")
    model.load_state_dict(pretrained | {k: ours[k] for k in head})
    say(f"from {directory}: {len(pretrained)} tensors loaded; not loaded: "
        f"{', '.join(sorted(k for k in checkpoint['model'] if k not in pretrained))}; new: "
        f"{', '.join(sorted(head))}{dropped}")


def parse_args(argv=None):
    return arguments("finetune", argv, OBJECTIVES)


def make_model(args, task, run):
    """Return the model: from a pretraining run, from trained weights or from scratch. `run.start` restores a stopped
    one."""
    if args.init is not None and args.pretraining["data"] != task.data:
        raise UserError(f"{args.init} was pretrained on {args.pretraining['data']}, and {args.task} in {args.data_dir} "
                        f"holds {task.data}; its test split may hold what was pretrained on")
    objective = OBJECTIVES[args.objective]
    mask_channel = task.gaps or args.start == "joint" and objective.hides and task.channels is not None
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


def main(argv=None):
    args = parse_args(argv)
    run = Run(args)                               # device, processes
    task, train, val, test = open_task(args.task, args.data_dir, args.train_fraction, args.label_fraction, labels=True)
    score_name = "accuracy" if task.classes else "r2"
    run.open(task, train)                         # sets the number of steps; checks the run directory
    torch.manual_seed(args.seed)
    model = make_model(args, task, run).to(run.device)
    balanced = task.own and task.classes and unequal(train.labels())
    weights = class_weights(task, train).to(run.device) if args.class_weights else None
    optimizer = make_optimizer(model, args.lr, args.wd)
    forward = run.start(model, optimizer)         # restores a stopped run; returns the model to call (compiled, DDP)
    inputs = model.backbone.inputs                # symbols or samples of a batch, whichever the backbone reads

    def prepare(step):
        """Make a step's batch on the CPU, while the step before runs. Return it in parts."""
        rows, mine = run.rows(step)               # examples of the whole batch; which of them are this process's
        return run.parts(train.batch(rows[mine]), rows, mine, task.documents)     # sequences of similar length together

    def learn(parts):
        """Take one optimiser step: the gradient of the whole batch's mean loss, summed part by part."""
        optimizer.zero_grad(set_to_none=True)
        for part in run.exchange(parts):          # each part; in the last, processes add up their gradients
            with run.autocast():                  # bfloat16 on a GPU
                outputs = forward(inputs(part), part.lengths)                                 # (b, classes or 1)
            run.backward(supervised_loss(task, outputs.float(), part.y, weights) / args.batch)
        optimizer.step()

    def scored(split, name):
        """Return loss, scores and predictions over a split; the last score is the one by which validation chooses."""
        loss, score, found = evaluate(model, task, split, run)
        more = {f"{name}_balanced_accuracy": balanced_accuracy(split.y, found)} if balanced else {}
        return loss, {f"{name}_{score_name}": score} | more, found

    plain = prepare, learn                        # --joint adds pretraining's loss: see the end of this file
    make_batch, update = plain if args.joint is None else joint_training(
        args, task, train, run, model, forward, optimizer, weights)
    update = run.measured(update)                 # records loss and gradient norm; with --compile a CUDA graph

    # ---- training: evaluate, save, stop?, step, log -----------------------------------------------------------
    for step in range(run.step, run.steps + 1):   # run.step: 0, or where a stopped run continues
        if run.evaluates(step):                   # every --eval-every steps and at the end
            loss, scores, _ = scored(val, "val")
            run.evaluated(step, [*scores.values()][-1], val_loss=loss, **scores)              # logs; best.pt, last.pt
        if step == run.steps:
            break

        for group in optimizer.param_groups:      # the schedule scales each group's own rate
            group["lr"] = group["initial_lr"] * learning_rate(step, run.steps, args)
        update(run.begin(step, make_batch))       # seeds dropout; returns the prepared parts, on the device
        run.stepped(step)                         # log line, checkpoint; ends the run if a signal asked for it

    # ---- the test split, once, with the checkpoint that validation chose ---------------------------------------
    run.load_best()                               # best.pt into the model
    test_loss, test_scores, found = scored(test, "test")
    val_scores = scored(val, "val")[1] if balanced else {f"val_{score_name}": run.state["best"]}
    # predictions.npz, result.json, and a last line with the scores
    kept = run.folder.predictions(task.classes, test.y, found, task.names if task.own else ())
    run.finish(**val_scores, **test_scores, **kept, test_loss=test_loss, start=args.start,
               init=str(args.init) if args.init else None)


# ---- Joint training --------------------------------------------------------------------------------------------------

class Labelled(NamedTuple):
    """A part of a batch with labels and, besides, what the objective makes of it (see `Denoising` in pretrain.py)."""
    symbols: "torch.Tensor | None"
    samples: "torch.Tensor | None"
    lengths: "torch.Tensor | None"
    y: torch.Tensor
    corrupted: "torch.Tensor | None"              # inputs with hidden positions; None with the causal objective
    hidden: torch.Tensor
    targets: torch.Tensor


def joint_training(args, task, train, run, model, forward, optimizer, weights):
    """Return prepare and learn of joint training: the loss on labels plus --joint times pretraining's loss on the same
    examples. Without a first stage, it shows what the second loss by itself is worth."""
    objective, inputs = OBJECTIVES[args.objective], model.backbone.inputs

    def prepare(step):
        rows, mine = run.rows(step)               # as in pretrain.py
        batch = train.batch(rows[mine])
        corrupted, targets, hidden = objective.pretext(
            args, batch, drawing(task, batch, rows, mine, args.seed, step))
        whole = Labelled(*batch, corrupted if objective.hides else None, hidden, targets)
        return [part._replace(hidden=run.numbers(part.hidden))
                for part in run.parts(whole, rows, mine, task.documents)]

    def learn(parts):
        n = run.total(sum((part.hidden >= 0).sum() for part in parts)).clamp(min=1)   # as in pretrain.py
        optimizer.zero_grad(set_to_none=True)
        for part in run.exchange(parts):
            with run.autocast():
                outputs, prediction = forward(inputs(part), part.lengths, part.corrupted, part.hidden)
            loss, _ = spt_loss(prediction, part.targets, part.hidden, args.loss)
            loss = supervised_loss(task, outputs.float(), part.y, weights) / args.batch + args.joint * loss / n
            run.backward(loss)
        optimizer.step()

    return prepare, learn


if __name__ == "__main__":
    guarded(main)
