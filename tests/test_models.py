"""Laws that every line of MODELS must obey, then what only some models promise."""

import contextlib
import json
import math
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import safetensors.torch
import torch
import torch.nn as nn
import torch.nn.functional as F
from test_kernels import Watch, dense_s4, relative, seeded

import models
from kernels import hippo_nplr, s4_kernel_naive
from models import MODELS, S4, Backbone, BatchNorm, Classifier, Denoiser, Joint, SizeError, config
from pretrain import spt_loss
from recipes import ATTENTION_SIZES, SSM_SIZES, arch, matching, read_table, rows
from tasks import SPECIAL, TASKS
from use.recurrent import s4_recover_C
from zoo.linformer import Linformer
from zoo.pythia import neox_weights, pythia_tokens

TASK = replace(TASKS["listops_mini"], length=40)
# The laws hold for every model, and for a few variants that have code of their own.
EVERY = {name: (name, {}) for name in MODELS}
EVERY |= dict(blocks=("rotary", dict(block=16)), batch=("transformer", dict(norm="batch")))
EVERY |= dict(wide=("linformer", dict(rank=70)), graph=("bigbird", dict(block=3)))
EVERY["post"] = "s4", dict(place="post", norm="layer", n_ssm=4)
every = pytest.mark.parametrize("name", EVERY)


def small(name, causal=False, task=TASK, seed=0, **changes):
    """A backbone of two layers."""
    model, variant = EVERY[name]
    sizes = arch("listops_mini", model, **dict(layers=2) | variant | changes)
    torch.manual_seed(seed)
    return Backbone(config(sizes, task, causal)).eval()


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
    x = torch.randint(4, 19, (len(lengths), int(lengths.max())), generator=seeded(0))
    return x.where(torch.arange(x.shape[1]) < lengths[:, None], 1), lengths


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
    """In a padded batch it is what it is alone; in training, padding's values do not count."""
    x, lengths = sequences(40, 23, 7, 1)
    repadded = x.where(x != 1, 7)
    for causal, backbone in forms(name):
        features, others = backbone(x, lengths), backbone(repadded, lengths)
        alone = [backbone(row[None, :n]) for row, n in zip(x, lengths)]
        for pool in ("mean", "max", "last"):
            model = Classifier(backbone, 3, pool).eval()
            together = model.classify(features, lengths)
            assert torch.equal(together, model.classify(others, lengths)), (causal, pool)
            each = torch.cat([model.classify(row, None) for row in alone])
            assert torch.allclose(together, each, atol=1e-5), (causal, pool)
        model.train()
        assert torch.equal(model(x, lengths), model(repadded, lengths)), causal


@torch.no_grad()
def test_documents_are_sequences_of_their_own_and_meet_in_the_head():
    """Rows 2i and 2i + 1 are example i. The head sees a, b, a - b and a b."""
    backbone, (x, lengths) = small("rotary"), sequences(40, 11, 5, 30, 17, 17)
    for pool in ("mean", "max", "last"):
        model, pooled = (Classifier(backbone, 2, pool, head).eval() for head in ("pair", "linear"))
        pooled.head = nn.Identity()
        documents = torch.cat([pooled(row[None, :n]) for row, n in zip(x, lengths)])
        a, b = documents[::2], documents[1::2]  # (3, d)
        exact = model.head(torch.cat((a, b, a - b, a * b), -1))
        assert torch.allclose(model(x, lengths), exact, atol=1e-5), pool


@every
@torch.no_grad()
def test_odd_lengths_are_finite_and_keep_the_past(name):
    """Built for a prime length, fed with others. A causal model's past is that of the whole."""
    x, _ = sequences(37, 37)
    for causal, backbone in forms(name, task=replace(TASK, length=37)):
        whole = backbone(x)
        for n in (1, 2, 3, 13, 36, 37):
            part = backbone(x[:, :n])
            assert part.shape == (2, n, backbone.d) and part.isfinite().all(), n
            assert not causal or torch.allclose(part, whole[:, :n], atol=1e-4), n
    for length in (1, 2, 7):  # shorter than blocks, pieces and ranks
        assert small(name, task=replace(TASK, length=length))(x[:, :length]).isfinite().all()


@every
@torch.no_grad()
def test_layers_are_independent_and_a_checkpoint_holds_all_that_was_drawn(name):
    """No weight matrix starts as a copy of another, nor queries as keys or values. Kernels that are
    made together are those that each layer would make alone."""
    x, lengths = sequences(40, 12)
    for causal, backbone in forms(name):
        parameters = dict(backbone.named_parameters(remove_duplicate=False))
        assert len({p.data_ptr() for p in parameters.values()}) == len(parameters)
        matrices = [p for key, p in parameters.items() if key.endswith("weight") and p.ndim > 1]
        matrices = [part for p in matrices for part in p.chunk(3)]
        for i, a in enumerate(matrices):
            assert all(a.shape != b.shape or (a != b).any() for b in matrices[:i])
        for layer, made in zip(backbone.layers, backbone.kernels(30)):
            for K in made:
                alone = layer.mixer.kernel(30)[..., :30]
                assert torch.allclose(K, alone, atol=1e-6, rtol=1e-5)
        features = backbone(x, lengths)
        assert torch.equal(small(name, causal)(x, lengths), features), "the same seed"
        other = small(name, causal, seed=1)
        assert not torch.equal(other(x, lengths), features)
        other.load_state_dict(backbone.state_dict())
        assert torch.equal(other(x, lengths), features)


@every
def test_a_step_stays_on_its_device_and_reads_nothing_back(name, monkeypatch):
    """On torch's device without values, where whatever a GPU would have to wait for is an error. A
    tensor elsewhere would be a table that was not moved."""

    def check(function, tensors):
        assert all(v.is_meta or v.ndim == 0 for v in tensors), function

    # knows no such device,
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # nor does this
    x, lengths, hidden = (v.to("meta") for v in (*sequences(17, 11), torch.arange(9)))
    for causal, backbone in forms(name, layers=1):
        for pool, ends in (("max", lengths), ("mean", None))[: 2 - causal]:
            model = Joint(backbone, 10, pool, "mlp", 19).to("meta").train()
            with Watch(check):
                outputs, prediction = model(x, ends, hidden)
                loss = spt_loss(SimpleNamespace(loss="ce"), prediction, x, hidden)[0]
                (outputs.square().sum() + loss).backward()


@pytest.mark.parametrize("name", ["s4", "rotary", "mamba", "blocks", "lstm"])
def test_one_compiled_graph_is_eager_at_all_lengths(name):
    """What cannot be in the graph is an error, and so is a state that starts anew per length."""
    torch._dynamo.reset()
    backbone, (x, lengths) = small(name, layers=1).train(), sequences(40, 11, 33)
    eager = backbone.body
    backbone.body = torch.compile(eager, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=2), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that caches are not used inside a graph
        for l in (40,) if name in ("blocks", "lstm") else (40, 39, 38):
            batch = x[:, :l], lengths.clamp(max=l)
            exact = eager(*batch, backbone.kernels(l))
            assert (backbone(*batch) - exact).abs().max() <= 1e-5 * exact.abs().max(), l


def test_every_row_of_sizes_counts_somewhere():
    changes = [row | {"model": name} for name in MODELS for row in read_table(MODELS[name].changes)]
    tasks = *TASKS, "file:x", "ucr:X"
    for table in (rows("sizes", ATTENTION_SIZES), rows("sizes", SSM_SIZES), changes):
        used = {id(matching(table, model, task=task)) for task in tasks for model in MODELS}
        assert all(id(row) in used for row in table)


@pytest.mark.parametrize("model", MODELS)
def test_every_size_is_declared_where_it_is_read(model):
    """A key of a class has a kind, which the model's own value fits; --arch takes it back. What no
    class reads is refused: a column of the model that it is `like`, or nothing at all."""
    for task in ("listops", "image_mini", "pathx"):
        sizes, keys = arch(task, model), models.keys_of(model)
        assert arch(task, model, layers=1) == sizes | dict(layers=1)
        assert {name for name, key in keys.items() if key.default is ...} <= sizes.keys()
        for name in [*sizes.keys() - {"model"}, "nothing"]:
            key = keys.get(name)
            if key and sizes[name] is not None:
                assert arch(task, model, **{name: sizes[name]}) == sizes, name
            wrong, message = ["nothing"], f"{name} must be" if key else f"has no {name}; it has: "
            if key and key.kind in (int, float):
                wrong += [(key.least or 0) - 1, key.most + 1, math.nan]
            for value in wrong:
                with pytest.raises(SizeError, match=message):
                    arch(task, model, **{name: value})


# Classifiers, in millions, as computed from the paper's tables. S4 and DLR have a linear head
# wherever the Transformers have an mlp.
MILLIONS = """
task        vocab channels outputs head   transformer rotary   s4   dlr s4_rand dlr_rand
listops        19        -      10 linear       12.63  12.63 0.60  4.48    0.60     4.48
text          136        -       2 mlp          12.95  12.95 1.32  7.13       -        -
retrieval      99        -       2 pair          0.87   1.27 1.58     -       -        -
image           -        1      10 mlp          0.105   3.23 3.57 15.76       -        -
pathfinder      -        1       2 linear        0.40   1.19 1.29     -       -        -
pathx           -        1       2 linear        0.40   0.99 1.29  7.10       -        -
pathx256        -        1       2 linear           -      - 1.29     -       -        -
sc              -        1      35 linear           -   0.40 0.38     -       -        -
scifar          -        3      10 mlp              -   3.23 3.57     -       -        -
bidmc_rr        -        2       1 linear           -   0.40 0.60     -       -        -
"""


def test_classifiers_have_as_many_parameters_as_in_the_paper(monkeypatch):
    """Pythia's are those outside the embedding and the language model's head (Biderman et al.)."""
    # a matrix power that takes seconds a layer at the paper's sizes
    monkeypatch.setattr(models, "truncation_correction", lambda A, P, C, dt, l: C)

    def counted(task, model, head, outputs, vocab=None, channels=None):
        outside = SimpleNamespace(length=64, vocab=vocab, channels=channels)
        backbone = Backbone(config(arch(task, model), outside))
        return models.count(Classifier(backbone, outputs, "mean", head))

    for row in read_table(MILLIONS):
        numbers = {name: int(row[name]) for name in ("vocab", "channels", "outputs") if name in row}
        for model in row.keys() & MODELS.keys():
            mlp = row["head"] == "mlp" and model not in ("transformer", "rotary")
            count = counted(row["task"], model, "linear" if mlp else row["head"], **numbers)
            digits = len(row[model].split(".")[1])
            assert f"{count / 1e6:.{digits}f}" == row[model], (row["task"], model)
    assert counted("listops", "pythia_rand", "linear", 2, 7) == 18_915_328 + 7 * 512 + 2 * 513


def test_time_scales_have_learning_rates_of_their_own():
    """And which of those are decayed; all others follow the recipe."""
    hippo = "A_log_re A_im P B"
    for task, model, own in (
        ("image_mini", "s4", {(1e-3, 0): f"{hippo} log_dt"}),
        ("image", "s4", {(1e-3, 0): hippo, (0.02, 0): "log_dt"}),  # dt_lr is "main"
        ("image", "dlr", {(1e-4, 0): "theta Lambda_im W"}),
        ("image", "sgconv", {(1e-3, 0.05): "w"}),
        ("image", "lru", {(0.005, 0): "nu theta gamma B"}),  # a quarter of the main rate
        ("text", "s5", {(1e-3, 0): "A_log_re A_im B"}),
        ("image", "rotary", {}),
    ):
        backbone = Backbone(config(arch(task, model, layers=1), replace(TASKS["image"], length=16)))
        names, groups = {}, models.param_groups(backbone, 0.02, 0.05)
        for name, p in backbone.named_parameters():
            (group,) = (group for group in groups if any(p is other for other in group["params"]))
            key = group["initial_lr"], group["weight_decay"], group["name"]
            names.setdefault(key, set()).add(name.rsplit(".", 1)[-1])
            assert group["lr"] == group["initial_lr"], model
        main = names.pop((0.02, 0.05, "main"))
        assert names == {(*key, "own"): {*text.split()} for key, text in own.items()}, model
        assert "weight" in main and ("D" in main) == (model != "rotary"), model


@torch.no_grad()
def test_post_norm_layers_normalise_their_sum_and_dropout_takes_whole_channels():
    model, passes, (x, _) = small("post", dropout=0.3), [], sequences(*[40] * 8)
    block, y = model.layers[0], torch.randn(2, 40, model.d, generator=seeded(0))
    assert torch.allclose(block(y), block.norm(y + block.mixer(y)), atol=1e-5)
    assert model.norm is None and small("s4").norm is not None
    for module in model.modules():
        if isinstance(module, nn.Dropout1d):
            module.register_forward_hook(lambda _, inputs, output: passes.append((*inputs, output)))
    model.train()(x)
    assert len(passes) == 2 * 2  # in the layer and on the residual branch
    for before, after in passes:  # (b, d, l)
        kept = (after != 0).any(-1)  # (b, d)
        assert torch.allclose(after, before * kept[..., None] / 0.7)
        assert 0.6 < kept.float().mean() < 0.8 and len(kept.unique(dim=0)) > 1


def test_batch_norm_counts_real_positions_only():
    """Its outputs, averages and gradients are those of torch's on real positions alone."""
    torch.manual_seed(0)
    x, lengths = torch.randn(3, 10, 4) * 3 + 1, torch.tensor([10, 4, 1])
    real, weight = torch.arange(10) < lengths[:, None], torch.randn(15, 4)
    ours, theirs, results = BatchNorm(4), nn.BatchNorm1d(4), []
    for norm in (ours, theirs):
        norm.weight.data, leaf = torch.arange(1.0, 5), x.clone().requires_grad_()
        y = ours(leaf, lengths)[real] if norm is ours else theirs(leaf[real])
        gradients = torch.autograd.grad((y * weight).sum(), [leaf, *norm.parameters()])
        results.append((y, *gradients, *(v.float() for v in norm.buffers())))
    for a, b in zip(*results):
        assert torch.allclose(a, b, atol=1e-5)
    assert torch.allclose(BatchNorm(4)(x), nn.BatchNorm1d(4)(x.flatten(0, 1)).view_as(x), atol=1e-5)


def mixer_settings(**sizes):
    defaults = dict(causal=False, directions=2, dropout=0.0, ssm_lr=1e-3, dt_lr=1e-3)
    return SimpleNamespace(**defaults | sizes)


def test_s4_is_exact_for_states_that_last_and_resonate():
    """Rows of an image may lead there: the pole is an l-th root of unity."""
    torch.manual_seed(0)
    kernel = S4(mixer_settings(d=64, state=64, n_ssm=64, dt_min=0.001, dt_max=0.1, length=196))
    with torch.no_grad():
        kernel.A_log_re[:, 3] = math.log(1e-4)
        turns = torch.arange(64) % 24
        kernel.A_im[:, 3] = 2 / kernel.log_dt.exp() * torch.tan(-math.pi * turns / 196)
        arguments = kernel.arguments(kernel)
        exact = [v.to(torch.promote_types(v.dtype, torch.float64)) for v in arguments]
        K, exact = kernel(196), s4_kernel_naive(*exact, 196)
    assert ((K - exact).abs().amax(-1) / exact.abs().amax(-1)).max() < 1e-3


def test_s4_starts_as_the_recurrence_of_hippo():
    """Through C~ and its float32 storage, at the drawn step sizes."""
    torch.manual_seed(3)
    layer = S4(mixer_settings(d=6, state=16, n_ssm=2, dt_min=0.002, dt_max=0.1, length=70))
    A, P, B = (v.expand(6, -1) for v in hippo_nplr(16))
    C_tilde, dt = torch.view_as_complex(layer.C.detach()), layer.log_dt.detach().exp()
    C = s4_recover_C(A, P, C_tilde, dt, 70)
    assert 0.5 < C.abs().square().mean() < 2  # complex standard normal
    assert relative(layer(12).detach().double(), dense_s4(A, P, B, C, dt, 70)) < 1e-4


@torch.no_grad()
def test_linformer_is_its_formula():
    """softmax(q (E^T k)^T / sqrt(e)) E^T v, with as many rows of E as a sequence is long."""
    torch.manual_seed(0)
    x = torch.randn(2, 13, 12)
    for rank, lengths in ((5, None), (5, [13, 4]), (70, [13, 4])):
        layer = Linformer(mixer_settings(d=12, heads=3, length=20, rank=rank, rotary=0, block=None))
        assert 0.1 < layer.mix.abs().max() <= math.sqrt(6 / (20 + rank))
        ours = layer(x, lengths and torch.tensor(lengths)).double()
        layer.double()
        for y, row, n in zip(ours, x.double(), lengths or (13, 13)):
            q, k, v = layer.qkv(row[:n]).unflatten(-1, (3, 3, 4)).permute(1, 2, 0, 3)  # (h, n, e)
            E = layer.mix[:n].T  # (r, n)
            heads = (q @ (E @ k).mT / 2).softmax(-1) @ (E @ v)
            exact = layer.out(heads.transpose(0, 1).flatten(1))
            assert torch.allclose(y[:n], exact, atol=1e-6), (rank, n)


def test_what_initial_kernels_remember_and_tell_apart():
    """At Text's sizes: half-lives of a kernel's energy, and its share below 0.4 radians. HiPPO's
    kernels last as long as their step sizes say. A random S4 has little but its first value. A
    random DLR remembers, but neighbours look the same to it."""
    K, half_lives, low = {}, {}, {}
    outside = SimpleNamespace(length=4096, vocab=9, channels=None)
    for model in ("s4", "s4_rand", "dlr", "dlr_rand"):
        torch.manual_seed(0)
        layer = Backbone(config(arch("text", model, layers=1), outside)).layers[0]
        K[model] = layer.mixer.kernel(4096).detach().double()  # (2, d, 4096)
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
    backbone = small(name, d=64, **dict(n_ssm=64) if name == "s4_rand" else {})
    for model in (Denoiser(backbone, 50), Classifier(backbone, 10, "mean", "mlp")):
        everything = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert abs(everything.std() / 0.1 - 1) < 0.02 and abs(everything.mean()) < 0.002
        for key, p in model.named_parameters():  # norm gains, log dt and head among them
            assert p.numel() < 30 or 0.05 < p.std() < 0.2 and p.abs().max() < 0.6, key


# Tokens of a byte-level vocabulary: one printable character for each byte, so a space is U+0120,
# and e-acute, two bytes, is U+00C3 U+00A9.
VOCABULARY = {"<|endoftext|>": 0, "<|padding|>": 1, "\u0120": 50, "a": 51, "b": 52}
VOCABULARY |= dict(MIN=40, MAX=41, MED=42, SM=43, X=45) | {"]": 44}
VOCABULARY |= {"\u00c3\u00a9": 60, "\u010a": 61, "\u00c3\u0143": 62}
VOCABULARY |= {str(level): 100 + level for level in range(256)}


def made_neox(layers, d, heads, ff, vocab, turned):
    """Weights in the names, shapes and types of the public checkpoint, buffers included."""
    generator = seeded(0)

    def make(*shape, scale=0.3):
        return (torch.randn(*shape, generator=generator) * scale).half()

    tensors = {"gpt_neox.embed_in.weight": make(vocab, d, scale=1)}
    tensors |= {"embed_out.weight": make(vocab, d)}
    shapes = {"attention.query_key_value": (3 * d, d), "attention.dense": (d, d)}
    shapes |= {"mlp.dense_h_to_4h": (ff, d), "mlp.dense_4h_to_h": (d, ff)}
    shapes |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (d,))
    for i in range(layers):
        at = f"gpt_neox.layers.{i}."
        for name, shape in shapes.items():
            tensors |= {f"{at}{name}.weight": make(*shape), f"{at}{name}.bias": make(shape[0])}
        tensors[f"{at}attention.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.bool).tril()
        tensors[f"{at}attention.masked_bias"] = torch.tensor(-math.inf).half()
        tensors[f"{at}attention.rotary_emb.inv_freq"] = make(turned // 2)
    last = "gpt_neox.final_layer_norm"
    return tensors | {f"{last}.weight": 1 + make(d), f"{last}.bias": make(d)}


def plain_neox(tensors, tokens, layers, heads, turned):
    """GPT-NeoX in float64, from its description: tokens (l,) -> features (l, d). Of each head the
    first `turned` dimensions are rotated in halves: m is paired with m + turned / 2."""
    weights = {name.removeprefix("gpt_neox."): value.double() for name, value in tensors.items()}

    def norm(x, name):
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(x, name):
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def turn(v):
        a, b, rest = v.tensor_split((turned // 2, turned), -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    x = weights["embed_in.weight"][tokens]
    l, d = x.shape
    frequencies = 10000 ** (-2 * torch.arange(turned // 2).double() / turned)
    cos, sin = (form(torch.arange(l)[:, None] * frequencies) for form in (torch.cos, torch.sin))
    for at in (f"layers.{i}" for i in range(layers)):
        fused = linear(norm(x, f"{at}.input_layernorm"), f"{at}.attention.query_key_value")
        q, k, v = fused.view(l, heads, 3, -1).permute(2, 1, 0, 3)  # (h, l, e) each
        scores = (turn(q) @ turn(k).mT / math.sqrt(d // heads)).exp().tril()
        mixed = (scores / scores.sum(-1, keepdim=True) @ v).transpose(0, 1).flatten(1)
        hidden = linear(norm(x, f"{at}.post_attention_layernorm"), f"{at}.mlp.dense_h_to_4h")
        hidden = F.gelu(hidden)
        x = x + linear(mixed, f"{at}.attention.dense") + linear(hidden, f"{at}.mlp.dense_4h_to_h")
    return norm(x, "final_layer_norm")


@torch.no_grad()
def test_pythia_computes_what_its_checkpoint_means(tmp_path):
    """Beyond the 32 positions that the file's mask buffer was made for, too."""
    sizes = arch("listops_mini", "pythia", layers=3, d=96, heads=3, ff=160)
    tensors = made_neox(3, 96, 3, 160, vocab=50, turned=8)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tokens = torch.randperm(50, generator=seeded(1))[:11]
    outside = SimpleNamespace(length=45, vocab=11, channels=None)
    backbone = Backbone(config(sizes, outside, causal=True)).eval()
    backbone.load_state_dict(neox_weights(tensors, sizes, tokens))
    x = torch.randint(11, (2, 45), generator=seeded(2))
    for row, features in zip(x, backbone(x).double()):
        exact = plain_neox(tensors, tokens[row], 3, 3, turned=8)
        assert torch.allclose(features, exact, atol=2e-4)


def test_symbols_become_the_tokens_of_a_byte_level_vocabulary(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": VOCABULARY}}))
    letters = *SPECIAL, *" ab\u00e9\n\u00ed\u4e00cX"
    for symbols, tokens, without in (
        (TASKS["listops"].symbols, [0, 1, 0, 0, *range(100, 110), *range(40, 46)][:-1], []),
        (letters, [0, 1, 0, 0, 50, 51, 52, 60, 61, 62, 0, 0, 45], ["\u4e00", "c"]),
        (TASKS["image"].symbols, [*range(100, 356)], []),
    ):
        ours, missing = pythia_tokens(symbols, path)
        assert ours.tolist() == tokens and missing == without
