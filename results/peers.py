"""Time each mixer beside what pip installs for the same job: the tables of results/peers.md.

    pip install s5-pytorch==0.2.1 lru-pytorch==0.1.3 mambapy==1.2.0 minimamba==1.0.1 transformers==5.24.0 \\
        Mega-pytorch==0.1.0 local-attention==1.11.2 linformer==0.2.3 reformer-pytorch==1.4.4 \\
        performer-pytorch==1.1.4 linear-attention-transformer==0.19.1
    python results/peers.py                       # most of an hour, on a machine without other work
    python results/peers.py --lengths 1024 --threads 1 --only mamba

A line of `PEERS` says how to build a package's layer, and which weights are the same: where it does, both layers get
them, and their outputs are compared. A package that is missing or fails becomes a row that says so.
"""
import ctypes
import importlib
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import zoo  # noqa: F401  (fills MODELS)
from engine.processes import keep_memory
from files import Parser, exit_code
from models import MODELS, config
from recipes import arch

SIZES = dict(d=64, heads=4, ff=128)               # of every mixer; the rest are its defaults
POSITIONS = 4096                                  # of a batch: 4 sequences of 1,024, else one
SECONDS = 12                                      # for each pair of layers
TOO_LONG = 10                                     # seconds of a package that is then not tried at a longer length


# ---- Packages --------------------------------------------------------------------------------------------------------

class Chain(nn.Sequential):
    """Layers in a row. Of a tuple only the first entry counts."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


class Call(nn.Module):
    """A layer that needs other arguments than x: call(layer, x)."""

    def __init__(self, layer, call):
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x):
        return self.call(self.layer, x)


class Gate(nn.Module):
    """What surrounds the recurrence of S5 and LRU here: GELU, then the mixer's own gate."""

    def __init__(self, mixer):
        super().__init__()
        self.out, self.gate = mixer.out, mixer.gate

    def forward(self, y):
        return self.gate(F.gelu(y, approximate="tanh"))


def longformer(Layer, c, mixer):
    sizes = sys.modules[Layer.__module__].LongformerConfig(
        hidden_size=c.d, num_attention_heads=c.heads, attention_window=[c.window], attention_probs_dropout_prob=0.0)
    layer = Layer(sizes, 0)
    del layer.query_global, layer.key_global, layer.value_global         # of global tokens, which no layer here has

    def call(layer, x):
        mask = torch.zeros(x.shape[:2])
        return layer(x, mask, is_index_masked=mask > 0, is_index_global_attn=mask > 0, is_global_attn=False)
    return Chain(Call(layer, call), nn.Linear(c.d, c.d))


def bigbird(Layer, c, mixer):
    module = sys.modules[Layer.__module__]
    sizes = module.BigBirdConfig(hidden_size=c.d, num_attention_heads=c.heads, block_size=c.block, use_bias=True,
                                 num_random_blocks=c.random, max_position_embeddings=c.length)

    ones = torch.ones(max(1, POSITIONS // c.length), c.length)
    blocked, band, start, end = module.BigBirdModel.create_masks_for_block_sparse_attn(ones, c.block)
    return Chain(Call(Layer(sizes), lambda layer, x: layer(x, band, start, end, blocked, blocked)), nn.Linear(c.d, c.d))


def copy_s5(mixer, peer):
    seq, A = peer[0].seq, torch.complex(-mixer.A_log_re.exp(), mixer.A_im)
    return zip((seq.Lambda, seq.B, seq.C, seq.D, seq.log_step),
               (A, mixer.B, 2 * torch.view_as_complex(mixer.C[0]), mixer.D, mixer.log_dt))


def copy_lru(mixer, peer):
    lru, B, C = peer[0], torch.view_as_complex(mixer.B), torch.view_as_complex(mixer.C[0])
    return zip((lru.nu_log, lru.theta_log, lru.gamma_log, lru.B, lru.C, lru.D),
               (mixer.nu, mixer.theta, mixer.gamma, B, C, torch.diag(mixer.D)))


CELLS = " ".join(f"0.{name}_l0{end}=cells.{i}.{name}" for i, end in enumerate(("", "_reverse"))
                 for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")) + " 1.weight=out.weight 1.bias=out.bias"
MAMBA = """in_proj.weight=enter.weight conv1d.weight=scans.0.conv.weight conv1d.bias=scans.0.conv.bias D=scans.0.D
    x_proj.weight=scans.0.select.weight dt_proj.weight=scans.0.delta.weight dt_proj.bias=scans.0.delta.bias
    A_log=scans.0.A_log out_proj.weight=out.weight"""
HEADS = " ".join(f"0.layer.{name}.{part}=qkv.{part}/{i}" for i, name in enumerate(("query", "key", "value"))
                 for part in ("weight", "bias")) + " 1.weight=out.weight 1.bias=out.bias"
SPLIT = "to_q.weight=qkv.weight/0 to_k.weight=qkv.weight/1 to_v.weight=qkv.weight/2 to_out.weight=out.weight"
BIASES = " to_q.bias=qkv.bias/0 to_k.bias=qkv.bias/1 to_v.bias=qkv.bias/2 to_out.bias=out.bias"
MAMBA_OF = "transformers.models.mamba.modeling_mamba:MambaMixer"
LONGFORMER_OF = "transformers.models.longformer.modeling_longformer:LongformerSelfAttention"
BIGBIRD_OF = "transformers.models.big_bird.modeling_big_bird:BigBirdBlockSparseAttention"
LINEAR_OF = "linear_attention_transformer.linear_attention_transformer:SelfAttention"

# model, causal, package, module:class, how to build it; copy: theirs=ours (/i: the i-th third of it), a function that
# yields pairs, or why nothing is compared
PEERS = [
    ("transformer", False, "torch", "torch.nn:MultiheadAttention", lambda Layer, c, mixer: Chain(Call(
        Layer(c.d, c.heads, batch_first=True), lambda layer, x: layer(x, x, x, need_weights=False))),
     "0.layer.in_proj_weight=qkv.weight 0.layer.in_proj_bias=qkv.bias 0.layer.out_proj.weight=out.weight "
     "0.layer.out_proj.bias=out.bias"),
    ("lstm", False, "torch", "torch.nn:LSTM", lambda Layer, c, mixer: Chain(
        Layer(c.d, c.d // 2, bidirectional=True, batch_first=True), nn.Linear(c.d, c.d)), CELLS),
    ("s5", True, "s5-pytorch", "s5:S5", lambda Layer, c, mixer: Chain(Layer(c.d, c.state // 2), Gate(mixer)), copy_s5),
    ("lru", True, "lru-pytorch", "LRU_pytorch:LRU", lambda Layer, c, mixer: Chain(
        Layer(c.d, c.d, c.state), Gate(mixer)), copy_lru),
    ("mamba", True, "mambapy", "mambapy.mamba:MambaBlock", lambda Layer, c, mixer: Layer(
        sys.modules[Layer.__module__].MambaConfig(d_model=c.d, n_layers=1, d_state=c.state)), MAMBA),
    ("mamba", True, "minimamba", "minimamba:S6", lambda Layer, c, mixer: Layer(
        sys.modules["minimamba"].MambaConfig(d_model=c.d, n_layer=1, d_state=c.state)), MAMBA),
    ("mamba", True, "transformers", MAMBA_OF, lambda Layer, c, mixer: Layer(sys.modules[Layer.__module__].MambaConfig(
        hidden_size=c.d, state_size=c.state, num_hidden_layers=1), 0), MAMBA),
    ("mega", False, "Mega-pytorch", "mega_pytorch:MegaLayer", lambda Layer, c, mixer: Layer(
        dim=c.d, ema_heads=c.averages, attn_dim_qk=c.z, attn_dim_value=c.v, causal=False),
     "other projections, kernels and biases of another form"),
    ("longformer", False, "transformers", LONGFORMER_OF, longformer, HEADS),
    ("bigbird", False, "transformers", BIGBIRD_OF, bigbird, "it draws other random blocks"),
    ("local", False, "local-attention", "local_attention:LocalMHA", lambda Layer, c, mixer: Layer(
        dim=c.d, window_size=c.block, dim_head=c.d // c.heads, heads=c.heads, use_rotary_pos_emb=False,
        exact_windowsize=False), "to_qkv.weight=qkv.weight to_out.weight=out.weight"),
    ("linformer", False, "linformer", "linformer:LinformerSelfAttention", lambda Layer, c, mixer: Layer(
        c.d, c.length, k=c.rank, heads=c.heads), SPLIT + " to_out.bias=out.bias proj_k=mix proj_v=mix"),
    ("reformer", False, "reformer-pytorch", "reformer_pytorch:LSHSelfAttention", lambda Layer, c, mixer: Layer(
        c.d, c.heads, bucket_size=c.chunk, n_hashes=c.rounds), "it draws new rotations at every call"),
    ("performer", False, "performer-pytorch", "performer_pytorch:SelfAttention", lambda Layer, c, mixer: Layer(
        c.d, heads=c.heads, dim_head=c.d // c.heads, nb_features=c.features, qkv_bias=True),
     SPLIT + BIASES + " fast_attention.projection_matrix=W"),
    ("performer_relu", False, "performer-pytorch", "performer_pytorch:SelfAttention", lambda Layer, c, mixer: Layer(
        c.d, heads=c.heads, dim_head=c.d // c.heads, generalized_attention=True, nb_features=c.d // c.heads,
        qkv_bias=True), "its features are projected first"),
    ("linear", False, "linear-attention-transformer", LINEAR_OF, lambda Layer, c, mixer: Layer(c.d, c.heads),
     "other features: softmax over keys and queries"),
]
ABSENT = {"lrnnx": "its wheel is not built without nvcc, and every model imports a CUDA extension",
          "transformers, MegaMovingAverage": "left transformers before release 5"}


# ---- Measuring -------------------------------------------------------------------------------------------------------

@torch.no_grad()
def share_weights(mixer, peer, copy):
    """Give both layers the same weights. A bias that the package lacks becomes zero."""
    if callable(copy):
        for theirs, ours in copy(mixer, peer):
            theirs.copy_(ours)
        return
    ours, theirs = (dict(module.named_parameters()) | dict(module.named_buffers()) for module in (mixer, peer))
    for pair in copy.split():
        name, own = pair.split("=")
        own, _, part = own.partition("/")
        theirs[name].copy_(ours[own].chunk(3)[int(part)] if part else ours[own])
    for name in set(ours) - {pair.split("=")[1].split("/")[0] for pair in copy.split()}:
        assert name.endswith("bias"), f"{name} is not copied"
        ours[name].zero_()


def step(layer, x):
    """Run forward and backward -> seconds."""
    start = time.perf_counter()
    layer(x).square().mean().backward()
    return time.perf_counter() - start


def peak(layer, x):
    """Return the MiB by which a forward and backward pass raises the process's memory at most (Linux)."""
    def status(key):
        return int(Path("/proc/self/status").read_text().split(key + ":")[1].split()[0]) / 1024

    ctypes.CDLL("libc.so.6").malloc_trim(0)                              # what earlier layers freed
    Path("/proc/self/clear_refs").write_text("5")                        # the highest mark starts anew
    before = status("VmRSS")
    step(layer, x)
    return status("VmHWM") - before


def compare(peer, length, threads):
    """Return a row (ms of both, the median ratio with its range, MiB of both, the ratio of parameters, the difference
    of outputs), and the package's seconds."""
    name, causal, _, where, make, copy = peer
    module, layer = where.split(":")
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    c = config(arch("listops", name) | SIZES, SimpleNamespace(length=length, vocab=16, channels=None), causal)
    c.layer = 0
    mixer = MODELS[name].mixer(c)
    peer = make(getattr(importlib.import_module(module), layer), c, mixer)
    x = torch.randn(max(1, POSITIONS // length), length, c.d, requires_grad=True)
    ours = Call(mixer, lambda layer, x: x + layer(x, None, x)) if name == "mega" else mixer
    if callable(copy) or "=" in copy:
        share_weights(mixer, peer, copy)
        with torch.no_grad():
            y, z = ours(x), peer(x)
        copy = f"{((y - z).abs().max() / y.abs().max()).item():.0e}"
    least = 3 if step(ours, x) + step(peer, x) < TOO_LONG else 1         # and warm up
    memory, pairs, start = (peak(ours, x), peak(peer, x)), [], time.perf_counter()
    while len(pairs) < 9 and (len(pairs) < least or time.perf_counter() - start < SECONDS):
        turn = 1 - 2 * (len(pairs) % 2)                                  # each goes first in every other pair
        pairs.append([step(layer, x) for layer in (ours, peer)[::turn]][::turn])
    ratios = sorted(b / a for a, b in pairs)
    sizes = [sum(p.numel() * (1 + p.is_complex()) for p in layer.parameters()) for layer in (mixer, peer)]
    ms = [1000 * statistics.median(column) for column in zip(*pairs)]
    return (f"{ms[0]:.1f} | {ms[1]:.1f} | {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) "
            f"| {memory[0]:.0f} | {memory[1]:.0f} | {sizes[1] / sizes[0]:.2f} | {copy}"), ms[1] / 1000


def main():
    parser = Parser(description="Time each mixer beside what pip installs for the same job.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    names = sorted({name for name, _, package, *_ in PEERS for name in (name, package)})
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help="models or packages")
    args = parser.parse_args()
    keep_memory()
    print("| model | package | threads | length | ms | package's ms | times as fast | MiB | package's MiB "
          "| parameters | outputs differ by |\n" + "|---" * 11 + "|")
    for peer in PEERS:
        name, _, package, *_ = peer
        for threads in args.threads if not args.only or {name, package} & set(args.only) else ():
            seconds = 0
            for length in args.lengths:
                try:
                    row, seconds = (compare(peer, length, threads) if seconds < TOO_LONG else
                                    ("not run: the length before took the package too long" + " |" * 6, seconds))
                except Exception as error:                                # a package may fail in any way
                    row = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}" + " |" * 6
                print(f"| {name} | {package} | {threads} | {length:,} | {row} |", flush=True)
    for package, why in ABSENT.items():
        print(f"| | {package} | | | {why} |" + " |" * 6)


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
