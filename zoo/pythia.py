"""Pythia: stage 2 starts from a language model (paper, section 3.5), finetuned on a task's own
symbols.

    python finetune.py --task text --model pythia        from the weights of Pythia-70M (downloaded)
    python finetune.py --task text --model pythia_rand   the same architecture from a random start

Each symbol becomes one of the model's tokens, so no position is added or lost. The architecture is
GPT-NeoX (Biderman et al. 2023), x + mixer(norm1(x)) + ff(norm2(x)), only finetuned here."""

import json
from pathlib import Path

import torch
import torch.nn as nn

from files import fetch, reading
from models import MODELS, Attention, Model, TransformerBlock

PYTHIA = "https://huggingface.co/EleutherAI/pythia-70m-deduped/resolve/main"


def load_pythia(model, task, args, say):
    """Load the weights of Pythia-70M into a Classifier. Download them on first use."""
    import safetensors.torch  # only needed for this format

    path, tokenizer = fetch_pythia(args.data_dir)
    problem = f"{path} or {tokenizer.name} does not belong to pythia-70m-deduped, or is damaged"
    with reading(problem, "remove it and run the same command again"):
        tokens, without = pythia_tokens(task.symbols, tokenizer)
        weights = neox_weights(safetensors.torch.load_file(path), args.arch, tokens)
        model.backbone.load_state_dict(weights)
    say(f"from {path}: {len(weights)} tensors loaded; {len(tokens)} rows of the embedding")
    if without:
        say(f"symbols without their own token: {' '.join(map(repr, without))}")


def fetch_pythia(data_dir="data"):
    """Download Pythia-70M if it is missing -> paths of model.safetensors and tokenizer.json."""
    folder = Path(data_dir) / "pythia-70m-deduped"
    by_hand = f"put it into {folder} and run the same command again; or use --model pythia_rand"
    names = "model.safetensors", "tokenizer.json"
    with reading(folder, "make room, or choose another --data-dir"):
        return [fetch(f"{PYTHIA}/{name}", folder, by_hand) for name in names]


def pythia_tokens(symbols, tokenizer):
    """Return the tokens of a task's symbols, int64 (vocab,), and a list of those that have none.

    tokenizer: path of tokenizer.json. A gray level becomes the token of its decimal digits, a
    character its own, an operator of ListOps that of its name ("MAX"). <eos>, <unk> and symbols
    without a token become <|endoftext|>, as in the official code; <mask> never occurs here."""
    names = {"<pad>": "<|padding|>"}
    if "[MIN" in symbols:  # elsewhere X is a letter
        names |= {"[MIN": "MIN", "[MAX": "MAX", "[MED": "MED", "[SM": "SM", "X": "]"}
    vocabulary = json.loads(tokenizer.read_text(encoding="utf-8"))["model"]["vocab"]
    # Tokens are written with one printable character per byte: the byte's own character if it is
    # printable, else the next unused one from 256 on (byte-level BPE, as in GPT-2).
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        letters.setdefault(byte, chr(256 + len(letters) - len(printable)))
    tokens = []
    without = []
    for symbol in symbols:
        name = names.get(symbol, symbol)
        token = vocabulary.get("".join(letters[byte] for byte in name.encode()))
        if token is None and symbol not in ("<mask>", "<unk>", "<eos>"):
            without.append(symbol)
        tokens.append(vocabulary["<|endoftext|>"] if token is None else token)
    return torch.tensor(tokens), without


def neox_weights(tensors, sizes, tokens):
    """Convert the tensors of a GPT-NeoX checkpoint to a state dict of `Backbone`.

    tokens (vocab,): the checkpoint's token for every symbol of the task; embeddings of other tokens
    are left out. KeyError or RuntimeError if names or shapes do not fit.

    In GPT-NeoX the rows of query_key_value are (h, 3, e), head by head; here all queries come
    first, then keys, then values. Its rotary positions pair dimension m with m + e/8, half a
    rotated part away; `rotary` pairs neighbours. Reordering both in the same way does not change
    their products."""
    heads = sizes["heads"]
    e = sizes["d"] // heads
    r = int(sizes["rotary"] * e)
    neighbours = torch.arange(r).view(2, -1).T.flatten().tolist() + list(range(r, e))

    def fused(name):
        rows = tensors[name].float().unflatten(0, (heads, 3, e)).transpose(0, 1)  # (3, h, e, ...)
        return torch.cat((rows[:2, :, neighbours], rows[2:])).flatten(0, 2)  # (3 d, ...)

    names = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    names |= {"mixer.out": "attention.dense"}
    names |= {"ff.0": "mlp.dense_h_to_4h", "ff.2": "mlp.dense_4h_to_h"}
    weights = {"encoder.weight": tensors["gpt_neox.embed_in.weight"].float()[tokens]}
    for part in ("weight", "bias"):
        weights[f"norm.{part}"] = tensors[f"gpt_neox.final_layer_norm.{part}"].float()
        for i in range(sizes["layers"]):
            layer = f"gpt_neox.layers.{i}"
            qkv = fused(f"{layer}.attention.query_key_value.{part}")
            weights[f"layers.{i}.mixer.qkv.{part}"] = qkv
            for name, neox_name in names.items():
                tensor = tensors[f"{layer}.{neox_name}.{part}"].float()
                weights[f"layers.{i}.{name}.{part}"] = tensor
    return weights


class NeoXBlock(TransformerBlock):
    """A block whose parts both read its input."""

    def forward(self, x, lengths=None, *K):
        return x + self.mixer(self.norm1(x, lengths), lengths, *K) + self.ff(self.norm2(x, lengths))

    def step(self, x, state):
        y, state = self.mixer.step(self.norm1(x), state)
        return x + y + self.ff(self.norm2(x)), state  # (b, d)


@torch.no_grad()
def init_neox(backbone):
    """Draw weights from N(0, 0.02^2) and set biases to 0, as the official code's library does."""
    for module in backbone.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.normal_(0, 0.02)
        if isinstance(module, nn.Linear):
            module.bias.zero_()


SIZES = """
task   layers   d heads   ff block
*_mini      3  32     2   64     -
*           6 512     8 2048     -
"""
RECIPES = """
task            objective loss pool head   lr     wd batch length warmup schedule eval
listops         causal    -    mean linear -/5e-5 0  64    200e   200    cos      -
text            causal    -    last linear -/5e-4 0  16    32e    5000   const    -
retrieval       causal    -    mean pair   -/1e-4 0  256   20e    2500   const    -
image           causal    -    mean linear -/7e-5 0  64    200e   2000   const    -
pathfinder      causal    -    last linear -/1e-4 0  1024  200e   2500   const    -
listops_mini    causal    -    last linear -/1e-3 0  16    2000   50     cos      200
pathfinder_mini causal    -    last linear -/1e-3 0  16    1000   50     cos      200
*_mini          causal    -    last linear -/1e-3 0  16    700    50     cos      200
"""
GPT = dict(block=NeoXBlock, mixer=Attention, extras=dict(rotary=0.25), symbols=True, init=init_neox)
MODELS |= {
    "pythia": Model(**GPT, weights=load_pythia, sizes=SIZES, recipes=RECIPES),
    "pythia_rand": Model(**GPT, like="pythia"),
}
