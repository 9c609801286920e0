"""Stage 2, supervised training: learn the labels of sequences, from a self-pretrained run or from
scratch.

    # from scratch
    python finetune.py --task pathfinder_demo --model transformer
    # from a pretraining run, which sets task and model; below, the paper's run
    python finetune.py --init runs/pathfinder_demo-transformer-masked-pretrain-s0
    python finetune.py --task pathx --model s4 --init runs/pathx-s4-masked-pretrain-s0
    # both losses at once, without a first stage
    python finetune.py --task pathfinder_demo --model transformer --joint 1
    # a linear probe: only the head is trained
    python finetune.py --freeze --init runs/pathfinder_demo-transformer-masked-pretrain-s0

Three things differ from pretrain.py: a new head on the pooled sequence, the labels, and where the
weights come from (`load_backbone`). The loss is cross-entropy, the score accuracy;
engine/targets.py has those of other targets, too. Validation chooses the checkpoint (in your data,
by balanced accuracy if classes are unequal). The test split is evaluated once, at the end, with
that checkpoint and without dropping an incomplete batch. Loop, run directory, --resume and torchrun
are as in stage 1. Joint training, which has no stage 1, stands at the end."""

from collections import namedtuple

import torch

from engine.feed import drawing
from engine.folder import read_checkpoint
from engine.processes import guarded
from engine.run import Run
from engine.setup import setup
from engine.targets import class_weights, kind_of_target
from files import reading
from models import HELPERS, MODELS, Classifier, Joint, make_optimizer
from pretrain import OBJECTIVES, denoising, make_backbone, parts_of
from recipes import learning_rate

# ---- Evaluation ----------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(model, kind, split, run, name):
    """Return loss, {name_score: value} and predictions over a whole split, each sequence once.
    kind: of the targets; validation chooses by the last of its scores. predictions have the shape
    of the targets, float64 like the numbers that processes add up."""
    model.eval()
    targets = split.labels()
    y = targets.reshape(len(split), -1)  # (n, 1, k or length)
    loss = torch.zeros((), dtype=torch.float64, device=run.device)
    predictions = torch.zeros(y.shape, dtype=torch.float64, device=run.device)
    # this process's batches
    for _, rows, batch in run.batches(split, split.lengths(), independent=True):
        with run.autocast():
            # (b[, l], classes or 1)
            outputs = model(model.backbone.inputs(batch), batch.lengths).double()
        loss += kind.loss(outputs, batch.y)
        prediction = kind.predict(outputs).double().reshape(len(rows), -1)  # (b, 1, k or l)
        predictions[rows, : prediction.shape[1]] = prediction
    model.train()
    predictions = run.total(predictions).cpu().numpy().reshape(targets.shape)
    scores = kind.scores(targets, predictions)
    scores = {f"{name}_{score}": value for score, value in scores.items()}
    return run.total(loss).item() / len(split), scores, predictions


# ---- Where the weights come from -----------------------------------------------------------------


def load_backbone(model, args, say):
    """Load the pretrained backbone into a Classifier and print what was loaded.

    Everything but the head transfers. Only the input layer of a task with samples may differ in
    shape: its column for the mask channel is dropped if nothing is hidden or missing now. Any other
    difference is an error."""
    saved = read_checkpoint(args.init / "best.pt")["model"]
    new = model.state_dict()
    pretrained = {
        name: tensor
        for name, tensor in saved.items()
        if name.startswith("backbone.") and name.split(".")[-1] not in HELPERS
    }
    dropped = ""
    encoder = pretrained.get("backbone.encoder.weight")  # (d, channels) of a task with samples
    wanted = new.get("backbone.encoder.weight")
    if encoder is not None and wanted is not None and encoder.shape[1] == wanted.shape[1] + 1:
        pretrained["backbone.encoder.weight"] = encoder[:, :-1]
        dropped = "; the input layer's column for the mask channel is dropped"
    head = {name: tensor for name, tensor in new.items() if name.startswith("head.")}
    problem = f"{args.init} holds another architecture than this run"
    with reading(problem, "it may be of another version of the code"):
        model.load_state_dict(pretrained | head)
    say(
        f"from {args.init}: {len(pretrained)} tensors loaded; not loaded: "
        f"{', '.join(sorted(saved.keys() - pretrained.keys()))}; new: "
        f"{', '.join(sorted(head))}{dropped}"
    )


def make_model(args, task, run):
    """Return the model: from a pretraining run, from trained weights or from scratch."""
    backbone = make_backbone(args, task)
    outputs = task.classes or 1
    if args.start == "joint":
        predicted = OBJECTIVES[args.objective].outputs(args, task)
        return Joint(backbone, outputs, args.pool, args.head, predicted)
    model = Classifier(backbone, outputs, args.pool, args.head)
    if args.start == "spt" and not run.folder.resumes:
        load_backbone(model, args, run.say)
    elif args.start == "corpus" and not run.folder.resumes:
        MODELS[args.model].weights(model, task, args, run.say)
    if args.freeze:
        model.freeze()
    return model


def main(argv=None):
    args, task, (train, val, test) = setup("finetune", argv, OBJECTIVES)  # flags and data
    run = Run(args, task, train)  # device, processes; checks the run directory
    torch.manual_seed(args.seed)
    model = make_model(args, task, run).to(run.device)
    kind = kind_of_target(task, train)  # its loss and its scores
    weights = class_weights(task, train).to(run.device) if args.class_weights else None
    optimizer = make_optimizer(model, args)
    # restores a stopped run; returns the model to call (compiled, DDP)
    forward = run.start(model, optimizer)
    inputs = model.backbone.inputs  # symbols or samples of a batch, whichever the backbone reads

    def make_parts(step):
        """Make a step's batch on the CPU, while the step before runs. Return it in parts."""
        rows, share = run.rows(step)  # examples of the whole batch; this process's share of them
        return run.parts(train.batch(rows[share]), rows, share)  # similar lengths together

    def learn(parts):
        """Take one optimiser step: the gradient of the whole batch's mean loss, summed part by
        part."""
        optimizer.zero_grad(set_to_none=True)
        for part in run.exchange(parts):  # each part; in the last, processes add up their gradients
            with run.autocast():  # bfloat16 on a GPU
                outputs = forward(inputs(part), part.lengths)  # (b[, l], classes or 1)
            run.backward({"labels": kind.loss(outputs.float(), part.y, weights) / args.batch})
        optimizer.step()

    if args.joint is not None:  # adds pretraining's loss
        make_parts, learn = joint_training(
            args, task, train, run, model, forward, optimizer, kind, weights
        )
    learn = run.measured(learn)  # records loss and gradient norm; with --compile a CUDA graph

    # ---- training: evaluate, save, stop?, step, log ----------------------------------------------
    for step in range(run.step, run.steps + 1):  # run.step: 0, or where a stopped run continues
        if run.evaluates(step):  # every --eval-every steps and at the end
            loss, scores, _ = evaluate(model, kind, val, run, "val")
            # logs; best.pt, last.pt
            run.evaluated(step, [*scores.values()][-1], val_loss=loss, **scores)
        if step == run.steps:
            break

        for group in optimizer.param_groups:  # the schedule scales each group's own rate
            group["lr"] = group["initial_lr"] * learning_rate(step, run.steps, args)
        learn(run.begin(step, make_parts))  # seeds dropout; returns the parts, on the device
        run.stepped(step)  # log line, checkpoint; ends the run if a signal asked for it

    # ---- the test split, once, with the checkpoint that validation chose -------------------------
    run.load_best()  # best.pt into the model
    test_loss, test_scores, predictions = evaluate(model, kind, test, run, "test")
    val_scores = {f"val_{kind.score}": run.state["best"]}
    if len(test_scores) > 1:
        _, val_scores, _ = evaluate(model, kind, val, run, "val")
    # predictions.npz, result.json, and a last line with the scores
    record = run.folder.predictions(task, test.y, predictions)
    run.finish(**val_scores, **test_scores, **record, test_loss=test_loss, start=args.start)


# ---- Joint training ------------------------------------------------------------------------------

# A part of a batch with labels (`Batch` in data.py) and what the objective makes of it (`Denoising`
# in pretrain.py). corrupted: inputs with hidden positions; None with the causal objective.
JointPart = namedtuple(
    "JointPart", "symbols samples lengths y corrupted corrupted_lengths hidden targets"
)


def joint_training(args, task, train, run, model, forward, optimizer, kind, weights):
    """Return make_parts and learn of joint training: the loss on labels plus --joint times
    pretraining's loss on the same examples. Without a first stage, it shows what the second loss by
    itself is worth."""
    objective = OBJECTIVES[args.objective]
    inputs = model.backbone.inputs

    def make_parts(step):
        rows, share = run.rows(step)  # as in pretrain.py
        batch = train.batch(rows[share])
        draw = drawing(task, batch, rows, share, args.seed, step)
        second = denoising(args, batch, draw)
        if not objective.hides:  # it reads the same inputs
            second = second._replace(inputs=None, lengths=None)
        return run.parts(JointPart(*batch, *second), rows, share, objective.whole)

    def learn(parts):
        n = run.positions(parts)  # as in pretrain.py
        optimizer.zero_grad(set_to_none=True)
        for part in run.exchange(parts):
            with run.autocast():
                outputs, prediction = forward(
                    inputs(part), part.lengths, part.hidden, part.corrupted, part.corrupted_lengths
                )
            loss, _ = objective.loss(args, prediction, part.targets, part.hidden)
            labels = kind.loss(outputs.float(), part.y, weights) / args.batch
            run.backward({"labels": labels} | parts_of(loss, n, args.joint))  # both are logged
        optimizer.step()

    return make_parts, learn


if __name__ == "__main__":
    guarded(main)
