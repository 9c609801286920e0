"""Continue symbols, or the upper half of images, with a causally pretrained run."""

import math

import numpy as np
import torch
from PIL import Image

from data import open_task
from files import UserError
from tasks import EOS, MASK, PAD, UNK
from use.recurrent import backbone_step, can_step


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
    x = continued(task, trained.model, x)
    if not task.side:
        print(task.between.join(task.symbols[i] for i in x[0] if i != EOS))
        return
    pixels = np.hstack(x.view(-1, task.side, task.side).byte().numpy())  # (side, b side)
    height, width = pixels.shape
    picture = Image.fromarray(pixels).resize([4 * width, 4 * height], Image.NEAREST)
    picture.save(args.run / "sample.png")
    print(f"wrote {args.run / 'sample.png'}: validation images; the lower half is generated")


def beginning(trained, prompt):
    """Return the given symbols (b, t), which the model continues."""
    task = trained.task
    if task.side and prompt is not None:
        raise UserError(
            f"--prompt has no meaning for the images of {task.family}, whose upper half is given"
        )
    if prompt is None:
        _, _, val, _ = open_task(trained.saved["task"], trained.data_dir)
        if task.side:
            return val.batch(np.arange(8)).symbols[:, : task.length // 2]  # (8, l/2)
        first = val.batch([0])
        most = first.lengths[0] - 1  # without <eos>
        return first.symbols[:1, : max(1, min(task.length // 4, most))]  # (1, l/4)
    words = prompt.split() if task.between else list(prompt)
    if unknown := set(words) - set(task.symbols[EOS + 1 :]):  # special symbols are unknown, too
        raise UserError(
            f"--prompt {prompt!r}: {task.family} has no symbol "
            f"{' '.join(map(repr, sorted(unknown)))}; "
            f"it has: {' '.join(task.symbols[EOS + 1 : EOS + 100])}"
        )
    if not 0 < len(words) < task.length:
        raise UserError(
            f"--prompt has {len(words)} symbols; {task.family} needs 1 to {task.length - 1}"
        )
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
