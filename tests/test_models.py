"""models.py: laws that every line of MODELS must obey, then what only some models promise: sizes,
kernels, weights."""

import contextlib
import json
import math
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn as nn
import torch.nn.functional as F
from test_kernels import dense_s4, relative, uncorrected
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import models
from kernels import hippo_nplr, masked_norm, s4_kernel_naive
from models import (
    DLR,
    MODELS,
    S4,
    SSM,
    Backbone,
    BatchNorm,
    Classifier,
    Denoiser,
    Joint,
    SizeError,
    config,
    count,
    keys_of,
    param_groups,
)
from pretrain import spt_loss
from recipes import ATTENTION_SIZES, SSM_SIZES, arch, matching, read_table, rows
from tasks import SPECIAL, TASKS
from zoo.linformer import Linformer
from zoo.pythia import neox_weights, pythia_tokens
from zoo.sgconv import SGConv

TASK = replace(TASKS["listops_mini"], length=40)
# The laws hold for every model, and for a few variants that have code of their own.
EVERY = {name: (name, {}) for name in MODELS} | {
    "blocks": ("rotary", dict(block=16)),
    "batch": ("transformer", dict(norm="batch")),
    "post": ("s4", dict(place="post", norm="layer", n_ssm=4)),
    "wide": ("linformer", dict(rank=70)),
    "graph": ("bigbird", dict(block=3)),
}
every = pytest.mark.parametrize("name", EVERY)


def settings(name, causal=False, task=TASK, **changes):
    """The object `c` of a model that has two layers."""
    model, variant = EVERY[name]
    return config(arch("listops_mini", model, **dict(layers=2) | variant | changes), task, causal)


def small(name, causal=False, **more):
    torch.manual_seed(0)
    return Backbone(settings(name, causal, **more)).eval()


def forms(name, **more):
    """The backbones of a model: bidirectional and, where there is such a form, causal."""
    yield False, small(name, **more)
    try:
        yield True, small(name, True, **more)
    except SizeError as error:
        assert "no causal form" in str(error)


def sequences(*lengths):
    """Random symbols (b, longest), PAD after each sequence's end, and the lengths."""
    lengths = torch.tensor(lengths)
    x = torch.randint(
        4, 19, (len(lengths), int(lengths.max())), generator=torch.Generator().manual_seed(0)
    )
    return x.where(torch.arange(x.shape[1]) < lengths[:, None], 1), lengths


# ---- laws ----------------------------------------------------------------------------------------


@every
@torch.no_grad()
def test_causal_models_do_not_see_the_future_and_bidirectional_ones_do(name):
    x, _ = sequences(40, 40)
    changed = x.clone()
    changed[:, 25] = 4 + (changed[:, 25] - 3) % 15
    for causal, backbone in forms(name):
        before = backbone(x)
        change = (before - backbone(changed)).abs() / before.abs().max()
        assert change[:, 25:].max() > 1e-4, "position 25 itself"
        assert change[:, 26:].max() > 1e-5, "positions after it"
        # What is left in the causal form is the rounding of FFTs.
        assert change[:, :25].max() < 2e-6 if causal else change[:, :25].max() > 1e-5


@every
@torch.no_grad()
def test_padding_never_changes_a_sequence(name):
    """In evaluation, a sequence in a padded batch is what it is alone; in training, padding's
    values do not count."""
    x, lengths = sequences(40, 23, 7, 1)
    repadded = x.where(x != 1, 7)
    for causal, backbone in forms(name):
        for pool in ("mean", "max", "last"):
            model = Classifier(backbone, 3, pool).eval()
            together = model(x, lengths)
            assert torch.equal(together, model(repadded, lengths))
            for row, n in enumerate(lengths):
                assert torch.allclose(together[row], model(x[row : row + 1, :n])[0], atol=1e-5), (
                    causal,
                    pool,
                    n,
                )
        model.train()
        assert torch.equal(model(x, lengths), model(repadded, lengths))


@torch.no_grad()
def test_documents_are_sequences_of_their_own_and_meet_in_the_head():
    """Rows 2i and 2i + 1 are example i. Each document is pooled alone; the head sees a, b, a - b
    and a b."""
    x, lengths = sequences(40, 11, 5, 30, 17, 17)
    for pool in ("mean", "max", "last"):
        model = Classifier(small("rotary"), 2, pool, "pair").eval()
        pooled = Classifier(model.backbone, 2, pool).eval()
        pooled.head = nn.Identity()
        # (3, d)
        a, b = (
            torch.cat([pooled(x[i : i + 1, : lengths[i]]) for i in range(k, 6, 2)]) for k in (0, 1)
        )
        assert torch.allclose(
            model(x, lengths), model.head(torch.cat((a, b, a - b, a * b), -1)), atol=1e-5
        )


@every
@torch.no_grad()
def test_odd_lengths(name):
    """Built for a prime length, fed with others: finite, and a causal model's past is that of the
    whole sequence."""
    x, _ = sequences(37, 37)
    for causal, backbone in forms(name, task=replace(TASK, length=37)):
        whole = backbone(x)
        assert whole.shape == (2, 37, backbone.d) and whole.isfinite().all()
        for n in (1, 2, 3, 13, 36):
            part = backbone(x[:, :n])
            assert part.shape == (2, n, backbone.d) and part.isfinite().all()
            assert not causal or torch.allclose(part, whole[:, :n], atol=1e-4)
    for length in (1, 2, 7):  # shorter than blocks, pieces and ranks
        assert small(name, task=replace(TASK, length=length))(x[:, :length]).isfinite().all()


@every
@torch.no_grad()
def test_layers_are_independent_and_a_checkpoint_holds_all_that_was_drawn(name):
    """No storage is shared, and no weight matrix starts as a copy of another, nor queries as keys
    or values."""
    x, lengths = sequences(40, 12)
    for causal, backbone in forms(name):
        parameters = dict(backbone.named_parameters(remove_duplicate=False))
        assert len({p.data_ptr() for p in parameters.values()}) == len(parameters)
        matrices = [
            part
            for key, p in parameters.items()
            if key.endswith("weight") and p.ndim > 1
            for part in p.chunk(3 if "qkv" in key else 1)
        ]
        assert all(
            a.shape != b.shape or (a != b).any()
            for i, a in enumerate(matrices)
            for b in matrices[:i]
        )
        assert torch.equal(small(name, causal)(x, lengths), backbone(x, lengths))  # the same seed
        torch.manual_seed(99)
        other = Backbone(settings(name, causal)).eval()
        assert not torch.equal(other(x, lengths), backbone(x, lengths))
        other.load_state_dict(backbone.state_dict())
        assert torch.equal(other(x, lengths), backbone(x, lengths))


@every
def test_a_step_reads_nothing_back(name):
    """Forward and backward pass with padding and numbered hidden positions: nothing that a GPU
    would have to wait for. The kernels that layers make together are those that each would make
    alone."""
    waits = {
        f"aten.{name}.default" for name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")
    }

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            assert str(function) not in waits, function
            return function(*args, **kwargs or {})

    for _, backbone in forms(name):
        model, (x, lengths) = Denoiser(backbone, 19).train(), sequences(40, 11, 33)
        hidden = (
            (torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) < 0.3)
            .flatten()
            .nonzero()[:, 0]
        )
        with Watch():
            args = SimpleNamespace(loss="ce")
            spt_loss(args, model(x, lengths, hidden), x, hidden)[0].backward()
            outputs, prediction = Joint(backbone, 10, "max", "mlp", 19)(
                x, lengths, hidden, x, lengths
            )
            (outputs.square().sum() + spt_loss(args, prediction, x, hidden)[0]).backward()
        with torch.no_grad():
            for layer, made in zip(backbone.layers, backbone.kernels(30)):
                assert all(
                    torch.allclose(K, layer.mixer.kernel(30)[..., :30], atol=1e-6, rtol=1e-5)
                    for K in made
                )


@every
def test_compiled_is_eager_in_one_graph(name):
    """What --compile compiles, but for the generated code and the backward pass. What cannot be in
    the graph is an error."""
    torch._dynamo.reset()
    backbone, (x, lengths) = small(name, layers=1).train(), sequences(40, 11, 33)
    eager = backbone(x, lengths)
    backbone.body = torch.compile(backbone.body, backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that caches are not used inside a graph
        assert (backbone(x, lengths) - eager).abs().max() <= 1e-5 * eager.abs().max()


@pytest.mark.parametrize("name", ["rotary", "s4", "mamba"])
def test_compiled_once_for_all_lengths(name):
    """Batches of text are as long as their longest sequence: the compiler must not start anew for
    each, which it does eight times at most."""
    torch._dynamo.reset()
    backbone, (x, lengths) = small(name, layers=1), sequences(40, 11, 33)
    # which asks our own operators for their shapes
    backend = "aot_eager" if name == "mamba" else "eager"
    backbone.body = torch.compile(backbone.body, backend=backend, fullgraph=True)
    for l in range(40, 28, -1):
        with torch.set_grad_enabled(l % 2 == 0), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            backbone.train(l % 2 == 0)(x[:, :l], lengths.clamp(max=l))


@every
def test_nothing_stays_on_the_cpu(name, monkeypatch):
    """Forward and backward pass on torch's device without values: no operation takes or makes a
    tensor elsewhere, as a table would be that was not moved, or a mask made in the wrong place."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **kwargs or {})
            for v in torch.utils._pytree.tree_leaves((args, kwargs, result)):
                assert not isinstance(v, torch.Tensor) or v.is_meta or v.ndim == 0, (
                    function,
                    v.device,
                    v.shape,
                )
            return result

    # knows no such device,
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # nor does this
    for _, backbone in forms(name):
        model, (x, lengths) = Denoiser(backbone, 19).to("meta"), sequences(40, 11, 33)
        x, lengths, hidden = (v.to("meta") for v in (x, lengths, torch.arange(9)))
        joint = Joint(backbone, 10, "mean", "linear", 19).to("meta")
        with Watch():
            for pass_lengths in (None, lengths):
                model.train()(x, pass_lengths, hidden).square().sum().backward()
            outputs, prediction = joint(x, lengths, hidden, x, lengths)
            (outputs.square().sum() + prediction.square().sum()).backward()


# ---- sizes ---------------------------------------------------------------------------------------


def test_every_row_of_sizes_counts_somewhere():
    changes = [
        row | {"model": name} for name, model in MODELS.items() for row in read_table(model.changes)
    ]
    for table in (rows("sizes", ATTENTION_SIZES), rows("sizes", SSM_SIZES), changes):
        used = [
            matching(table, model, task=task)
            for task in [*TASKS, "file:x", "ucr:X"]
            for model in MODELS
        ]
        assert all(any(row is some for some in used) for row in table)


@pytest.mark.parametrize("model", MODELS)
def test_every_size_is_declared_where_it_is_read(model):
    """A key of a class has a kind, which the model's own value fits; --arch takes it back. What no
    class reads, a column of the model that it is `like`, or nothing at all, is refused."""
    for task in ("listops", "image_mini", "pathx"):
        sizes, keys = arch(task, model), keys_of(model)
        assert {name for name, key in keys.items() if key.default is ...} <= sizes.keys()
        for name in sizes.keys() - {"model"}:
            if name in keys and sizes[name] is not None:
                assert arch(task, model, **{name: sizes[name]}) == sizes
            key = keys.get(name)
            bounds = (
                [(key.least or 0) - 1, key.most + 1] if key and key.kind in (int, float) else []
            )
            for wrong in ("nothing", *bounds):
                with pytest.raises(
                    SizeError, match=f"{name} must be" if key else f"has no {name}; it has: "
                ):
                    arch(task, model, **{name: wrong})
        with pytest.raises(SizeError, match="has no nothing; it has: "):
            arch(task, model, nothing=1)


def test_sizes_are_those_of_the_first_own_row_or_of_the_model_it_is_like():
    # the first counts
    assert arch("scifar_mini", "s4")["n_ssm"] == 2 and arch("pathx_mini", "s4")["n_ssm"] == 48
    assert arch("listops", "pythia")["d"] == 512 and arch("listops_mini", "pythia")["d"] == 32
    assert arch("text", "dlr_rand") == arch("text", "dlr") | {"model": "dlr_rand"}
    assert arch("scifar", "sgconv") == arch("scifar", "s4") | dict(
        model="sgconv",
        piece=32,
        decay=2.0,
        decay_spread=0.0,
        power=0.0,
        stretch=0,
        cosine=0,
        piece_lr=1e-3,
    )
    assert (
        arch("image", "sgconv")["dropout"] == 0.2 and arch("pathx", "mega_chunk")["chunk"] == 4096
    )
    assert arch("listops", "lru")["C_scale"] == 1  # S5's own sizes are not those of models like it
    assert arch("sc", "transformer")["ff"] == arch("sc", "rotary")["ff"] == 128
    # those of any task
    assert arch("sc", "dlr")["state"] == 256 and arch("pathfinder64", "rotary")["ff"] == 256
    assert arch("image", "sgconv", power=0.5, cosine=1)["power"] == 0.5
    assert arch("image", "bigbird", random=0)["random"] == 0
    for model, wrong in (
        ("sgconv", dict(cosine=2)),
        ("lru", dict(angle=-1)),
        ("rotary", dict(ffn="lowrank", guided=2)),
        ("rotary", dict(guided=0.5)),
        ("local", dict(block=0)),
        ("s4", dict(dt_min=math.nan)),
        ("linformer", dict(rotary=0.5)),
    ):
        with pytest.raises(SizeError):
            arch("image", model, **wrong)
    changes = dict(d=64, dropout=0, norm="batch", layers=1)
    assert arch("image", "s4", **changes) == arch("image", "s4") | changes
    assert config(arch("image", "rotary", block=16, rotary=0.5), TASK).rotary == 0.5


# Classifiers, in millions, as computed from the paper's tables: vocabulary, channels, outputs,
# head, {model: millions}. S4 and DLR have a linear head wherever the Transformers have an mlp.
SIZES = {
    "listops": (
        19,
        None,
        10,
        "linear",
        dict(transformer=12.63, rotary=12.63, s4=0.60, dlr=4.48, s4_rand=0.60, dlr_rand=4.48),
    ),
    "text": (136, None, 2, "mlp", dict(transformer=12.95, rotary=12.95, s4=1.32, dlr=7.13)),
    "retrieval": (99, None, 2, "pair", dict(transformer=0.87, rotary=1.27, s4=1.58)),
    "image": (None, 1, 10, "mlp", dict(transformer=0.105, rotary=3.23, s4=3.57, dlr=15.76)),
    "pathfinder": (None, 1, 2, "linear", dict(transformer=0.40, rotary=1.19, s4=1.29)),
    "pathx": (None, 1, 2, "linear", dict(transformer=0.40, rotary=0.99, s4=1.29, dlr=7.10)),
    "pathx256": (None, 1, 2, "linear", dict(s4=1.29)),
    "sc": (None, 1, 35, "linear", dict(rotary=0.40, s4=0.38)),
    "scifar": (None, 3, 10, "mlp", dict(rotary=3.23, s4=3.57)),
    **{
        f"bidmc_{name}": (None, 2, 1, "linear", dict(rotary=0.40, s4=0.60))
        for name in ("hr", "rr", "spo2")
    },
}


def parameters(task, model, vocab, channels, outputs, head, causal=False, **overrides):
    c = config(
        arch(task, model, **overrides),
        SimpleNamespace(length=64, vocab=vocab, channels=channels),
        causal,
    )
    return count(Classifier(Backbone(c), outputs, "mean", head))


@pytest.fixture
def quick_s4(monkeypatch):
    """S4 without a matrix power that takes seconds a layer at the paper's sizes."""
    monkeypatch.setattr(models, "truncation_correction", lambda A, P, C, dt, l: C)


@pytest.mark.parametrize("task", SIZES)
def test_parameter_counts(task, quick_s4):
    *outside, head, sizes = SIZES[task]
    for model, millions in sizes.items():
        mlp = head == "mlp" and model in ("transformer", "rotary")
        counted = parameters(task, model, *outside, "mlp" if mlp else head.replace("mlp", "linear"))
        assert round(counted / 1e6, 3 if millions == 0.105 else 2) == millions, model


# ---- optimiser groups, norms, dropout ------------------------------------------------------------


@pytest.mark.parametrize(
    "task, model, own",
    [
        ("image_mini", "s4", {(1e-3, 0): {"A_log_re", "A_im", "P", "B", "log_dt"}}),
        # dt_lr is "main"
        ("image", "s4", {(1e-3, 0): {"A_log_re", "A_im", "P", "B"}, (0.02, 0): {"log_dt"}}),
        ("image", "dlr", {(1e-4, 0): {"theta", "Lambda_im", "W"}}),
        ("image", "sgconv", {(1e-3, 0.05): {"w"}}),
        ("image", "lru", {(0.005, 0): {"nu", "theta", "gamma", "B"}}),  # a quarter of the main rate
        ("text", "s5", {(1e-3, 0): {"A_log_re", "A_im", "B"}}),
        ("image", "rotary", {}),
    ],
)
def test_which_parameters_have_rates_of_their_own(task, model, own, quick_s4):
    """And which of those are decayed; all others follow the recipe."""
    backbone = Backbone(config(arch(task, model, layers=1), replace(TASKS["image"], length=16)))
    names = {id(p): name.rsplit(".", 1)[-1] for name, p in backbone.named_parameters()}
    groups = param_groups(backbone, 0.02, 0.05)
    assert sorted(id(p) for group in groups for p in group["params"]) == sorted(names)
    assert all(group["initial_lr"] == group["lr"] for group in groups)
    groups = {
        (group["lr"], group["weight_decay"], group["name"]): {names[id(p)] for p in group["params"]}
        for group in groups
    }
    main = groups.pop((0.02, 0.05, "main"))
    assert groups == {(*key, "own"): value for key, value in own.items()}
    assert "weight" in main and ("D" in main) == (model != "rotary")


@torch.no_grad()
def test_norms_stand_where_the_row_says():
    x = torch.randn(2, 40, 48, generator=torch.Generator().manual_seed(0))
    for name, last in (("s4", True), ("post", False), ("transformer", True)):
        backbone, y = small(name), x[..., : small(name).d]
        block = backbone.layers[0]
        if name == "transformer":
            mixed = y + block.mixer(block.norm1(y))
            exact = mixed + block.ff(block.norm2(mixed))
        else:
            exact = (
                y + block.mixer(block.norm(y)) if name == "s4" else block.norm(y + block.mixer(y))
            )
        assert torch.allclose(block(y), exact, atol=1e-5) and (backbone.norm is not None) == last


@torch.no_grad()
def test_dropout_takes_whole_channels():
    torch.manual_seed(0)
    model, seen, (x, _) = Backbone(settings("post", dropout=0.3)), [], sequences(*[40] * 8)
    for module in model.modules():
        if isinstance(module, nn.Dropout1d):
            module.register_forward_hook(
                lambda module, inputs, output: seen.append((inputs[0], output))
            )
    model.train()(x)
    assert len(seen) == 2 * 2  # in the layer and on the residual branch
    for before, after in seen:
        kept = (after != 0).any(-1)  # (b, d)
        assert before.shape == (8, model.d, 40)
        assert torch.allclose(after, before * kept[..., None] / 0.7)
        assert 0.6 < kept.float().mean() < 0.8 and len(kept.unique(dim=0)) > 1


def test_batch_norm_statistics_count_real_positions_only():
    torch.manual_seed(0)
    x, lengths = torch.randn(3, 10, 4) * 3 + 1, torch.tensor([10, 4, 1])
    real = torch.arange(10) < lengths[:, None]
    ours, theirs = BatchNorm(4), nn.BatchNorm1d(4)
    assert torch.allclose(ours(x, lengths)[real], theirs(x[real]), atol=1e-5)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.allclose(getattr(ours, name).float(), getattr(theirs, name).float(), atol=1e-6)
    assert torch.allclose(BatchNorm(4)(x), nn.BatchNorm1d(4)(x.flatten(0, 1)).view_as(x), atol=1e-5)


def test_masked_norm_has_the_gradients_of_its_formula():
    """With padded positions, whose own gradients count too."""
    torch.manual_seed(0)
    x, gain, bias = (
        torch.randn(3, 4, 10, dtype=torch.float64) * 3 + 1,
        torch.randn(4).double(),
        torch.randn(4).double(),
    )
    real = (torch.arange(10) < torch.tensor([[10], [4], [1]])).double()[:, None]  # (b, 1, l)

    def plain(x, gain, bias):
        some = x.transpose(1, 2)[real[:, 0] == 1]  # (m, d)
        mean, rate = some.mean(0)[:, None], torch.rsqrt(some.var(0, correction=0) + 1e-5)[:, None]
        return (x - mean) * rate * gain[:, None] + bias[:, None]

    leaves, weight = [v.requires_grad_() for v in (x, gain, bias)], torch.randn_like(x)
    ours = masked_norm(x, real, gain, bias, 1e-5)[0]
    assert torch.allclose(ours, plain(*leaves))
    for fast, exact in zip(
        *(torch.autograd.grad((y * weight).sum(), leaves) for y in (ours, plain(*leaves)))
    ):
        assert torch.allclose(fast, exact)


# ---- mixers against their formulas ---------------------------------------------------------------


def mixer_settings(**sizes):
    return SimpleNamespace(
        **dict(causal=False, directions=2, dropout=0.0, ssm_lr=1e-3, dt_lr=1e-3) | sizes
    )


def test_s4_is_exact_for_states_that_last_and_resonate():
    """One state a channel that hardly fades and turns a whole number of times in a sequence, as
    rows of an image would have it: its pole is an l-th root of unity, and float32 must do all the
    same."""
    torch.manual_seed(0)
    kernel = S4(mixer_settings(d=64, state=64, n_ssm=64, dt_min=0.001, dt_max=0.1, length=196))
    with torch.no_grad():
        kernel.A_log_re[:, 3] = math.log(1e-4)
        turns = torch.arange(64) % 24
        kernel.A_im[:, 3] = 2 / kernel.log_dt.exp() * torch.tan(-math.pi * turns / 196)
        exact = [
            v.to(torch.promote_types(v.dtype, torch.float64)) for v in kernel.arguments(kernel)
        ]
        K, exact = kernel(196), s4_kernel_naive(*exact, 196)
    assert ((K - exact).abs().amax(-1) / exact.abs().amax(-1)).max() < 1e-3


def test_s4_starts_as_the_recurrence_of_hippo():
    """The initial kernel, through C~ and its float32 storage, is C Abar^k Bbar of HiPPO at the
    drawn step sizes."""
    torch.manual_seed(3)
    layer = S4(mixer_settings(d=6, state=16, n_ssm=2, dt_min=0.002, dt_max=0.1, length=70))
    A, P, B = (v.expand(6, -1) for v in hippo_nplr(16))
    C_tilde, dt = torch.view_as_complex(layer.C.detach()), layer.log_dt.detach().exp()
    C = uncorrected(A, P, B, C_tilde, dt, 70)
    assert 0.5 < C.abs().square().mean() < 2  # complex standard normal
    assert relative(layer(12).detach().double(), dense_s4(A, P, B, C, dt, 70)) < 1e-4


def test_dlr_is_its_recurrence():
    """The whole layer against x[k] = diag(e^Lambda) x[k-1] + u[k], y = Re(W x) in float64, run
    forwards and, for the second direction, backwards over what lies strictly ahead; then D, GELU
    and GLU."""
    torch.manual_seed(0)
    u = torch.randn(2, 30, 3)
    layer = SSM(DLR, mixer_settings(d=3, state=8, dt_min=0.01, dt_max=0.1))
    kernel = layer.kernel
    Lambda = torch.complex(-kernel.theta.double().square(), kernel.Lambda_im.double())
    assert Lambda.real.min() > -0.1 / 2 - 1e-6 and Lambda.real.max() < -0.01 / 2 + 1e-6
    assert torch.allclose(Lambda.imag, torch.arange(8).double() * 2 * math.pi / 8)
    assert 0.8 < 8 * kernel.W.std() < 1.2
    # (2, 3, 8), (2, 30, 3)
    W, y = torch.view_as_complex(kernel.W.double()), layer.D.double() * u.double()
    forwards = backwards = torch.zeros(2, 3, 8, dtype=torch.complex128)  # (b, d, n)
    for k in range(30):
        forwards = Lambda.exp() * forwards + u[:, k, :, None]
        y[:, k] += (W[0] * forwards).sum(-1).real
    for k in reversed(range(30)):
        y[:, k] += (W[1] * backwards).sum(-1).real
        backwards = Lambda.exp() * backwards + u[:, k, :, None]
    one, two = (F.gelu(y) @ layer.out.weight.double().T + layer.out.bias.double()).chunk(2, -1)
    assert torch.allclose(layer(u).double(), one * two.sigmoid(), atol=1e-5)


def test_sgconv_kernels_have_norm_one_at_the_start():
    """Pieces of 1, 1, 2, 4 and 8 times 32 lags, interpolated in between, each half as heavy as the
    one before."""
    torch.manual_seed(0)
    kernel = SGConv(
        mixer_settings(
            d=3,
            length=300,
            piece=32,
            decay=2.0,
            decay_spread=0,
            power=0,
            stretch=0,
            cosine=0,
            piece_lr=1e-3,
        )
    )
    lags = [(np.arange(32 * stretch) + 0.5) / stretch - 0.5 for stretch in (1, 1, 2, 4, 8)]
    exact = np.concatenate(
        [
            np.apply_along_axis(lambda w: np.interp(at, np.arange(32), w) / 2**i, -1, piece)
            for i, (at, piece) in enumerate(zip(lags, kernel.w.detach().double().numpy()))
        ],
        -1,
    )
    exact /= np.linalg.norm(exact, axis=-1, keepdims=True)  # (2, 3, 512)
    assert np.allclose(kernel(300).detach(), exact[..., :300], atol=1e-6)
    assert torch.allclose(kernel(512).norm(dim=-1), torch.ones(2, 3))
    with torch.no_grad():
        kernel.w *= 3  # training goes on, the divisor stays
    assert np.allclose(kernel(300).detach(), 3 * exact[..., :300], atol=1e-5)


@pytest.mark.parametrize("rank", [5, 70])
@pytest.mark.parametrize("lengths", [None, (13, 4)])
def test_linformer_is_its_formula(rank, lengths):
    """softmax(q (E^T k)^T / sqrt(e)) E^T v in float64, head by head, with as many rows of E as a
    sequence is long."""
    torch.manual_seed(0)
    layer = Linformer(mixer_settings(d=12, heads=3, length=20, rank=rank, rotary=0, block=None))
    assert layer.mix.shape == (20, rank) and layer.mix.abs().max() <= math.sqrt(6 / (20 + rank))
    x = torch.randn(2, 13, 12)
    ours = layer(x, None if lengths is None else torch.tensor(lengths)).double()
    layer.double()
    for y, row, n in zip(ours, x.double(), lengths or (13, 13)):
        q, k, v = layer.qkv(row[:n]).unflatten(-1, (3, 3, 4)).permute(1, 2, 0, 3)  # (h, n, e) each
        E = layer.mix[:n].T  # (r, n)
        # (n, h, e)
        heads = ((q @ (E @ k).transpose(1, 2) / 2).softmax(-1) @ (E @ v)).transpose(0, 1)
        assert torch.allclose(y[:n], layer.out(heads.flatten(1)), atol=1e-6)


def test_linformer_projects_keys_and_values_of_its_mixtures_only():
    """Queries and outputs take l d^2 products each; keys and values of all positions would take as
    many again."""
    layer = Linformer(mixer_settings(d=64, heads=4, length=256, rank=4, rotary=0, block=None))
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(1, 256, 64))
    assert 2 < counter.get_total_flops() / (2 * 256 * 64 * 64) < 3


# ---- initial kernels -----------------------------------------------------------------------------


def test_what_initial_kernels_remember_and_tell_apart():
    """At Text's sizes and 4,096 steps: half-lives, the lags by which half of a kernel's energy has
    passed, and the share of the energy below 0.4 radians. HiPPO's kernels last as long as their
    step sizes say, dt in [0.001, 0.1]. With all parameters from N(0, 0.1^2) the first value is most
    of a kernel, and by lag 30 less than a millionth of its peak is left. DLR remembers either way,
    but its random kernels are smooth: neighbours look the same to them."""
    K, half_lives, low = {}, {}, {}
    for model in ("s4", "s4_rand", "dlr", "dlr_rand"):
        torch.manual_seed(0)
        c = config(
            arch("text", model, layers=1), SimpleNamespace(length=4096, vocab=9, channels=None)
        )
        K[model] = Backbone(c).layers[0].mixer.kernel(4096).detach().double()  # (2, d, 4096)
        energy = K[model].square().cumsum(-1)
        half_lives[model] = (energy < energy[..., -1:] / 2).sum(-1)
        spectrum = torch.fft.rfft(K[model]).abs().square().sum((0, 1))
        low[model] = spectrum[: int(0.4 / math.pi * len(spectrum))].sum() / spectrum.sum()
    assert 20 < half_lives["s4"].median() < 35 and 300 < half_lives["s4"].max() < 400
    assert half_lives["s4_rand"].median() == 0 and half_lives["s4_rand"].max() == 2
    assert (K["s4_rand"][..., 30:].abs().amax(-1) / K["s4_rand"].abs().amax(-1)).max() < 1e-6
    assert half_lives["dlr"].min() > 1000 and half_lives["dlr_rand"].median() > 500
    assert 0.05 < low["dlr"] < 0.25 and low["dlr_rand"] > 0.99


@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name].init is models.randomise])
def test_random_initialisation_takes_every_parameter(name):
    torch.manual_seed(0)
    c = settings(name, d=64, **dict(n_ssm=64) if name == "s4_rand" else {})
    for model in (Denoiser(Backbone(c), 50), Classifier(Backbone(c), 10, "mean", "mlp")):
        everything = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert abs(everything.std() / 0.1 - 1) < 0.02 and abs(everything.mean()) < 0.002
        for key, p in model.named_parameters():  # norm gains, log dt and head among them
            assert p.numel() < 30 or 0.05 < p.std() < 0.2 and p.abs().max() < 0.6, key
        assert all(
            (value == 1).all()
            for key, value in model.named_buffers()
            if key.endswith("running_var")
        )


# ---- Pythia --------------------------------------------------------------------------------------

# Tokens of a byte-level vocabulary: one printable character for each byte, so a space is U+0120,
# and e-acute, two bytes, is U+00C3 U+00A9.
VOCABULARY = {
    "<|endoftext|>": 0,
    "<|padding|>": 1,
    "MIN": 40,
    "MAX": 41,
    "MED": 42,
    "SM": 43,
    "]": 44,
    "X": 45,
    "\u0120": 50,
    "a": 51,
    "b": 52,
    "\u00c3\u00a9": 60,
    "\u010a": 61,
    "\u00c3\u0143": 62,
}
VOCABULARY |= {str(level): 100 + level for level in range(256)}


def made_neox(layers, d, heads, ff, vocab, turned, seed=0):
    """Weights in the names, shapes and types of the public checkpoint, buffers included."""
    generator = torch.Generator().manual_seed(seed)

    def make(*shape, scale=0.3):
        return (torch.randn(*shape, generator=generator) * scale).half()

    tensors = {
        "gpt_neox.embed_in.weight": make(vocab, d, scale=1),
        "embed_out.weight": make(vocab, d),
    }
    for i in range(layers):
        at = f"gpt_neox.layers.{i}."
        for name, shape in (
            ("attention.query_key_value", (3 * d, d)),
            ("attention.dense", (d, d)),
            ("mlp.dense_h_to_4h", (ff, d)),
            ("mlp.dense_4h_to_h", (d, ff)),
            ("input_layernorm", (d,)),
            ("post_attention_layernorm", (d,)),
        ):
            tensors[f"{at}{name}.weight"], tensors[f"{at}{name}.bias"] = (
                make(*shape),
                make(shape[0]),
            )
        tensors[f"{at}attention.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.bool).tril()
        tensors[f"{at}attention.masked_bias"] = torch.tensor(-math.inf).half()
        tensors[f"{at}attention.rotary_emb.inv_freq"] = make(turned // 2)
    tensors["gpt_neox.final_layer_norm.weight"], tensors["gpt_neox.final_layer_norm.bias"] = (
        1 + make(d),
        make(d),
    )
    return tensors


def plain_neox(tensors, tokens, layers, heads, turned):
    """GPT-NeoX in float64 numpy, from its description: tokens (l,) -> features (l, d)."""

    def get(name):
        return tensors[f"gpt_neox.{name}"].double().numpy()

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * get(f"{name}.weight") + get(
            f"{name}.bias"
        )

    def linear(x, name):
        return x @ get(f"{name}.weight").T + get(f"{name}.bias")

    def turn(v):
        """The first `turned` dimensions of (l, e), in halves: m is paired with m + turned / 2."""
        a, b, rest = np.split(v, (turned // 2, turned), -1)
        return np.concatenate(
            (a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle), rest), -1
        )

    x = get("embed_in.weight")[tokens]
    l, d = x.shape
    # (l, turned / 2)
    angle = np.arange(l)[:, None] / 10000 ** (2 * np.arange(turned // 2) / turned)
    for i in range(layers):
        at, mixed = f"layers.{i}", []
        fused = linear(norm(x, f"{at}.input_layernorm"), f"{at}.attention.query_key_value").reshape(
            l, heads, 3, -1
        )
        for q, k, v in fused.transpose(1, 2, 0, 3):  # (l, e) each
            scores = np.exp(turn(q) @ turn(k).T / math.sqrt(d // heads)) * np.tri(l)
            mixed.append(scores / scores.sum(-1, keepdims=True) @ v)
        hidden = linear(norm(x, f"{at}.post_attention_layernorm"), f"{at}.mlp.dense_h_to_4h")
        hidden = hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2
        x = (
            x
            + linear(np.concatenate(mixed, -1), f"{at}.attention.dense")
            + linear(hidden, f"{at}.mlp.dense_4h_to_h")
        )
    return norm(x, "final_layer_norm")


def test_pythia_computes_what_its_checkpoint_means(tmp_path):
    """Made weights, written as a .safetensors file and read back: features are those of a plain
    implementation, beyond the 32 positions that the file's mask buffer was made for too."""
    sizes = arch("listops_mini", "pythia", layers=3, d=96, heads=3, ff=160)
    tensors = made_neox(3, 96, 3, 160, vocab=50, turned=8)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    tokens = torch.randperm(50, generator=torch.Generator().manual_seed(1))[:11]
    backbone = Backbone(
        config(sizes, SimpleNamespace(length=45, vocab=11, channels=None), causal=True)
    ).eval()
    read = safetensors.torch.load_file(tmp_path / "model.safetensors")
    backbone.load_state_dict(neox_weights(read, sizes, tokens))
    x = torch.randint(11, (2, 45), generator=torch.Generator().manual_seed(2))
    for row, features in zip(x, backbone(x).double()):
        exact = torch.from_numpy(plain_neox(tensors, tokens[row].numpy(), 3, 3, turned=8))
        assert torch.allclose(features, exact, atol=2e-4)


def test_symbols_become_the_tokens_of_a_byte_level_vocabulary(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": VOCABULARY}}))
    for symbols, tokens, without in (
        (TASKS["listops"].symbols, [0, 1, 0, 0, *range(100, 110), 40, 41, 42, 43, 44], []),
        (
            (*SPECIAL, *" ab\u00e9\n\u00ed\u4e00cX"),
            [0, 1, 0, 0, 50, 51, 52, 60, 61, 62, 0, 0, 45],
            ["\u4e00", "c"],
        ),
        (TASKS["image"].symbols, list(range(100, 356)), []),
    ):
        found, missing = pythia_tokens(symbols, tmp_path / "tokenizer.json")
        assert found.tolist() == tokens and missing == without


def test_pythia_has_the_parameters_of_pythia():
    """18,915,328 outside the embedding and the language model's head (Biderman et al. 2023); here
    with two outputs."""
    for task in ("listops", "image"):
        assert (
            parameters(task, "pythia_rand", 7, 1, 2, "linear", True)
            == 18_915_328 + 7 * 512 + 2 * 513
        )
    for name, p in small("pythia_rand", True, d=128).named_parameters():
        if p.ndim == 2:
            assert abs(p.std() / 0.02 - 1) < 0.05, name
        assert not name.endswith("bias") or not p.any()
