"""What a trained model says: continues a sequence with a causally pretrained run, one position after another.

    python pretrain.py --task listops_demo --model s4 --objective causal
    python predict.py runs/listops_demo-s4-causal-pretrain-s0 --prompt "[MAX 3"

Prints symbols, or writes sample.png into the run directory: images whose upper half is given. Layers that have a
recurrent form take one step a position, attention keeps keys and values; where a layer has no step, all positions are
computed anew for each.
"""
import math
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from data import EOS, MASK, PAD, UNK, Parser, UserError, open_task, read_json
from models import MODELS, Backbone, Denoiser, config
from run import between, guarded, read_checkpoint


def load(directory, data_dir):
    """The task, its validation split and the `Denoiser` of a causally pretrained run, in eval mode."""
    if not (directory / "best.pt").is_file():
        raise UserError(f"{directory} is not the directory of a pretraining run")
    saved = read_json(directory / "config.json")
    for name, wanted in (("start", "pretrain"), ("objective", "causal"), ("loss", "ce")):
        if saved.get(name) != wanted:
            raise UserError(f"{directory} has {name} {saved.get(name)}; predict.py wants a run of pretrain.py with "
                            "--objective causal --loss ce")
    if saved["model"] not in MODELS:
        raise UserError(f"{directory} was trained with --model {saved['model']}, which is not in zoo/ any more")
    task, _, val, _ = open_task(saved["task"], data_dir)
    backbone = Backbone(config(saved["arch"], task, causal=True))
    model = Denoiser(backbone, task.vocab).eval()
    model.load_state_dict(read_checkpoint(directory / "best.pt")["model"])
    return task, val, model


def beginning(task, val, prompt):
    """What is given: symbols (b, t)."""
    if task.side:
        if prompt is not None:
            raise UserError(f"--prompt has no meaning for the images of {task.family}, whose upper half is given")
        return val.batch(np.arange(8)).symbols[:, : task.length // 2]                         # (b, l/2)
    if prompt is None:
        some = val.batch([0])
        return some.symbols[:1, :max(1, min(task.length // 4, some.lengths[0] - 1))]          # (1, l/4), without <eos>
    words = prompt.split() if task.between else list(prompt)
    if unknown := set(words) - set(task.symbols[EOS + 1:]):            # nor the special ones
        raise UserError(f"--prompt {prompt!r}: {task.family} has no symbol {' '.join(map(repr, sorted(unknown)))}; "
                        f"it has: {' '.join(task.symbols[EOS + 1:EOS + 100])}")
    if not 0 < len(words) < task.length:
        raise UserError(f"--prompt has {len(words)} symbols; {task.family} wants 1 to {task.length - 1}")
    return torch.tensor([[task.symbols.index(word) for word in words]])                       # (1, words)


@torch.no_grad()
def continued(task, model, x):
    """Draws symbols after x (b, t) until the task's length, or <eos> in all of them -> (b, length at most)."""
    backbone = model.backbone
    given, states, steps = x.shape[1], None, backbone.can_step()
    for t in range(0 if steps else given - 1, task.length - 1):
        seen = x[:, t] if steps else x                                                        # (b,) or (b, t + 1)
        if not backbone.reads_symbols:
            seen = (seen[..., None].float() / task.scale - task.mean) / task.std
        if steps:
            features, states = backbone.step(seen, t, states)                                 # (b, d)
        else:
            features = backbone(seen)[:, -1]
        if t + 1 < given:
            continue
        scores = model.head(features)                                                         # (b, vocab)
        if not task.side:
            scores[:, [MASK, PAD, UNK]] = -math.inf
        x = torch.cat((x, torch.multinomial(scores.softmax(-1), 1)), 1)
        if not task.side and (x[:, -1] == EOS).all():
            break
    return x


def main(argv=None):
    parser = Parser(description="Continues a sequence with a causally pretrained run.", allow_abbrev=False)
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of a run of pretrain.py --objective causal")
    parser.add_argument("--prompt", help="how the sequence begins (default: a piece of the validation split)")
    parser.add_argument("--seed", type=between(int, 0, 2**63 - 1), default=0, help="of the symbols that are drawn")
    parser.add_argument("--data-dir", default="data", help="where prepared data sets live")
    args = parser.parse_args(argv)
    task, val, model = load(args.run, args.data_dir)
    x = beginning(task, val, args.prompt)
    torch.manual_seed(args.seed)
    x = continued(task, model, x)
    if task.side:
        pictures = np.hstack(x.view(-1, task.side, task.side).byte().numpy())                 # (side, b side)
        Image.fromarray(pictures).resize([4 * pixels for pixels in pictures.shape[::-1]], Image.NEAREST).save(
            args.run / "sample.png")
        print(f"wrote {args.run / 'sample.png'}: validation images, their upper half given")
    else:
        print(task.between.join(task.symbols[i] for i in x[0] if i != EOS))


if __name__ == "__main__":
    guarded(main)
