"""What a pretrained run knows of its inputs: a picture of what it fills in, and, if it is causal,
sequences or images that it continues."""

import math

import numpy as np
import torch
from PIL import Image

from data import open_task, sheet
from engine.feed import drawing
from files import UserError
from pretrain import OBJECTIVES, denoising
from tasks import EOS, MASK, PAD, UNK
from tasks.picture import height
from use.recurrent import backbone_step, can_step

# ---- Filling in ----------------------------------------------------------------------------------


@torch.no_grad()
def filled_in(trained, batch):
    """Return what a pretrained run predicts for a batch of b sequences, as arrays that are 0 where
    nothing is predicted: bool (b, l), which positions are; the predictions, ids (b, l) or samples
    (b, l, channels); bool (b, l), where they are wrong: another symbol, or off by half a standard
    deviation."""
    args, task = trained.args, trained.task
    x = batch.symbols if batch.samples is None else batch.samples
    b, l = x.shape[:2]
    rows = np.arange(len(batch.y))
    draw = drawing(task, batch, rows, slice(0, len(rows)), args.seed, 1 << 41)
    inputs, lengths, hidden, targets = denoising(args, batch, draw)
    with trained.autocast():
        outputs = trained.model(inputs, lengths, hidden)  # (m, outputs)
    m = len(outputs)

    # Which position does each prediction stand for? The same pretext tells, given a batch that
    # holds its positions. They begin at 2^20, above all symbols.
    numbers = (2**20 + torch.arange(l)).expand(b, l)
    numbered = batch._replace(symbols=numbers)
    if batch.samples is not None:
        numbered = numbered._replace(samples=numbers[..., None].expand_as(x).float())
    numbers = denoising(args, numbered, draw).targets[hidden]  # (m, ...)
    position = numbers.reshape(m, -1)[:, 0].long() - 2**20  # (m,)
    real = (position >= 0) & (position < l)  # (m,)
    if len(hidden) != b or not real.any():
        predictions = f"the predictions of --objective {args.objective}"
        raise UserError(f"--show: {predictions} are not positions of a sequence")

    targets = targets[hidden]  # (m, ...)
    if args.loss == "ce":  # of several predictions, e.g. of the next positions, the first
        vocab = OBJECTIVES[args.objective].reads(args, task).vocab
        guess = outputs.unflatten(-1, (-1, vocab)).argmax(-1)[:, 0]
        wrong = guess != targets.reshape(m, -1)[:, 0]
        guess = guess.where(guess < task.vocab, UNK)
    else:
        guess = outputs
        wrong = (guess - targets).abs().nan_to_num().amax(-1) > 0.5  # not where a value is missing
    places = hidden.nonzero()[real, 0], position[real]

    def placed(values):
        """Put values (m, ...) at their places (b, l, ...)."""
        return values.new_zeros(b, l, *values.shape[1:]).index_put(places, values[real]).numpy()

    return placed(real), placed(guess), placed(wrong)


def show(trained, split, path):
    """Write a picture of four sequences: the original, the model's input, and as the model fills it
    in."""
    if not trained.is_pretraining:
        raise UserError(
            f"--show needs a run of pretrain.py, but {trained.run} is one of finetune.py"
        )
    task, args = trained.task, trained.args
    batch = split.batch(np.arange(min(4, len(split))))
    hidden, guess, wrong = filled_in(trained, batch)
    if task.channels and args.loss == "ce":  # gray levels as samples
        guess = (guess[..., None] / task.scale - task.mean) / task.std
    n = len(batch.y)
    nothing = np.zeros_like(hidden)
    as_read = (["read from left to right"] * n, nothing)
    if OBJECTIVES[args.objective].hides:
        as_read = ([f"{args.mask:.0%} hidden"] * n, hidden)
    filled = ([f"filled in by {args.model}"] * n, hidden, guess, wrong)
    size = 17, height(task) * n  # inches
    colours = "correct predictions are blue, wrong ones orange"
    if task.side:
        size = 7.2, height(task) * n
        colours = "hidden pixels are blue, wrong ones orange"
    elif not task.channels:  # texts are wide: below each other
        size = 6.2, 3.3 * height(task) * n
    columns = (["original"] * n, nothing), as_read, filled
    sheet(path, task, batch, size, columns, stacked=not task.channels)
    right = 1 - wrong.sum() / hidden.sum()
    print(f"wrote {path}: {colours}; of {hidden.sum():,} hidden positions {right:.1%} are correct")


# ---- Continuing ----------------------------------------------------------------------------------


def generate(trained, args):
    """Print a sequence that begins with --prompt, or write images to RUN/sample.png."""
    task = trained.task
    for name, wanted in (("start", "pretrain"), ("objective", "causal"), ("loss", "ce")):
        value = trained.saved.get(name)
        if value != wanted:
            raise UserError(
                f"{args.run} has {name} {value}; to continue a sequence, predict.py needs a run of "
                "pretrain.py with --objective causal --loss ce. Labels need a run of finetune.py "
                "(--init RUN); other outputs of a pretraining run are --show sheet.png, --features "
                "out.npy"
            )
    x = beginning(trained, args.prompt)
    torch.manual_seed(args.seed)
    x = continued(task, trained.model, x)  # (b, l)
    if not task.side:
        print(task.between.join(task.symbols[i] for i in x[0] if i != EOS))
        return
    pixels = np.hstack(x.view(-1, task.side, task.side).byte().numpy())  # (side, b side)
    path = args.run / "sample.png"
    Image.fromarray(pixels.repeat(4, 0).repeat(4, 1)).save(path)  # four times larger
    print(f"wrote {path}: validation images; the lower half is generated")


def beginning(trained, prompt):
    """Return the given symbols (b, t), which the model continues."""
    task = trained.task
    if prompt is None:
        _, _, val, _ = open_task(trained.saved["task"], trained.data_dir)
        if task.side:
            return val.batch(np.arange(8)).symbols[:, : task.length // 2]  # (8, l/2)
        first = val.batch([0])
        most = first.lengths[0] - 1  # without <eos>
        return first.symbols[:1, : max(1, min(task.length // 4, most))]  # (1, l/4)
    if task.side:
        raise UserError("--prompt has no meaning for the images of a task; leave it out")
    words = prompt.split() if task.between else list(prompt)
    if unknown := set(words) - set(task.symbols[EOS + 1 :]):  # special symbols are unknown, too
        problem = f"{task.family} has no symbol {' '.join(map(repr, sorted(unknown)))}"
        symbols = " ".join(task.symbols[EOS + 1 : EOS + 100])
        raise UserError(f"--prompt {prompt!r}: {problem}; it has: {symbols}")
    if not 0 < len(words) < task.length:
        problem = f"--prompt has {len(words)} symbols"
        raise UserError(f"{problem}; {task.family} needs 1 to {task.length - 1}")
    return torch.tensor([[task.symbols.index(word) for word in words]])  # (1, words)


@torch.no_grad()
def continued(task, model, x):
    """Draw symbols after x (b, t) up to the task's length, or until all sequences end in <eos> ->
    (b, length at most). A model whose layers all have a recurrent form takes one step per position
    (attention keeps keys and values). Other models compute all positions again for every new
    one."""
    backbone = model.backbone
    steps = can_step(backbone)
    states = None
    t = x.shape[1]
    for i in range(0 if steps else t - 1, task.length - 1):
        seen = x[:, i] if steps else x  # (b,) or (b, i + 1)
        if not backbone.reads_symbols:
            seen = (seen[..., None].float() / task.scale - task.mean) / task.std
        if steps:
            features, states = backbone_step(backbone, seen, i, states)  # (b, d)
        else:
            features = backbone(seen)[:, -1]
        if i + 1 < t:
            continue
        scores = model.head(features)  # (b, vocab)
        if not task.side:
            scores[:, [MASK, PAD, UNK]] = -math.inf
        x = torch.cat((x, torch.multinomial(scores.softmax(-1), 1)), 1)
        if not task.side and (x[:, -1] == EOS).all():
            break
    return x
