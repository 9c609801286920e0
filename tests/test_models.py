"""models.py: what a layer may see, what padding may change, initial kernels, Pythia, sizes, optimiser groups."""
import copy
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import models
from models import (ARCH, DLR, S4, SSM, Backbone, BatchNorm, Classifier, Denoiser, arch, count, describe,
                    neox_weights, param_groups, read_safetensors, read_table)
from pretrain import lr_multiplier

SMALL = {
    "transformer": dict(model="transformer", layers=2, d=16, heads=2, ff=32, norm="layer", place="pre"),
    "rotary": dict(model="rotary", layers=2, d=16, heads=2, ff=32, norm="layer", place="pre"),
    "local": dict(model="rotary", layers=2, d=16, heads=2, ff=32, norm="layer", place="pre", block=16),
    "s4": dict(model="s4", layers=2, d=16, state=8, n_ssm=16, norm="batch", place="pre", dt_min=0.001, dt_max=0.1,
               dt_lr=0.001, ssm_lr=0.001),
    "s4_post": dict(model="s4", layers=2, d=16, state=8, n_ssm=4, norm="layer", place="post", dt_min=0.001, dt_max=0.1,
                    dt_lr="main", ssm_lr=0.001),
    "dlr": dict(model="dlr", layers=2, d=16, state=24, norm="layer", place="pre", dt_min=0.01, dt_max=0.1, ssm_lr=1e-4),
    "pythia": dict(model="pythia", layers=2, d=16, heads=2, ff=32, norm="layer", place="pre"),
}
SMALL["s4_rand"], SMALL["dlr_rand"] = SMALL["s4"] | dict(model="s4_rand"), SMALL["dlr"] | dict(model="dlr_rand")


def small(name, causal=False, length=40, vocab=9):
    torch.manual_seed(0)
    return Backbone(SMALL[name], length, vocab, causal=causal).eval()


@pytest.mark.parametrize("name", sorted(SMALL.keys() - {"s4_rand", "dlr_rand"}))      # their signals nearly vanish
def test_causal_models_do_not_see_the_future_and_bidirectional_ones_do(name):
    x = torch.randint(4, 9, (2, 40), generator=torch.Generator().manual_seed(0))
    changed = x.clone()
    changed[:, 25] = 4 + (changed[:, 25] - 3) % 5
    with torch.no_grad():
        before, after = (small(name, causal=True)(v) for v in (x, changed))
        assert torch.allclose(before[:, :25], after[:, :25], atol=1e-5)
        assert (before[:, 25:] - after[:, 25:]).abs().max() > 1e-3
        before, after = (small(name)(v) for v in (x, changed))
        assert (before[:, :25] - after[:, :25]).abs().max() > 1e-4


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("pool", ["mean", "max", "last"])
def test_padding_never_changes_a_sequence(name, pool):
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([40, 23, 7, 1])
    x = torch.full((4, 40), 1)
    for row, n in enumerate(lengths):
        x[row, :n] = torch.randint(4, 9, (n,), generator=generator)
    model = Classifier(small(name), 3, pool).eval()
    other_padding = torch.where(torch.arange(40) < lengths[:, None], x, torch.full_like(x, 7))
    with torch.no_grad():
        together = model(x, lengths)
        assert torch.equal(together, model(other_padding, lengths))
        for row, n in enumerate(lengths):
            assert torch.allclose(together[row], model(x[row:row + 1, :n], lengths[row:row + 1])[0], atol=1e-5)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("pool", ["mean", "max", "last"])
def test_documents_are_sequences_of_their_own_and_meet_in_the_head(name, pool):
    """Each document's features are those of the document alone, whatever pads it; the head sees a, b, a - b and a b."""
    lengths = torch.tensor([[40, 11], [5, 30], [17, 17]])
    real = torch.arange(40) < lengths[..., None]
    x = torch.where(real, torch.randint(4, 9, (3, 2, 40), generator=torch.Generator().manual_seed(2)), 1)
    model = Classifier(small(name), 2, pool, "pair").eval()
    pooled = Classifier(model.backbone, 2, pool).eval()
    pooled.head = torch.nn.Identity()
    with torch.no_grad():
        together = model(x, lengths)
        assert torch.equal(together, model(torch.where(real, x, 7), lengths))
        a, b = (torch.cat([pooled(x[i:i + 1, k, :n], lengths[i:i + 1, k]) for i, n in enumerate(lengths[:, k])])
                for k in (0, 1))                                                              # (3, d)
        assert torch.allclose(together, model.head(torch.cat((a, b, a - b, a * b), -1)), atol=1e-5)
        swapped = model(x.flip(1), lengths.flip(1))
        assert torch.allclose(swapped, model.head(torch.cat((b, a, b - a, a * b), -1)), atol=1e-5)
        assert name.endswith("rand") or (swapped - together).abs().max() > 1e-3    # those start nearly constant
        features = model.backbone(x, lengths)
        assert features.shape == (3, 2, 40, 16)
        denoiser, where = Denoiser(model.backbone, 9), real & (x % 2 == 0)
        alone = torch.cat([denoiser(x[i:i + 1, k, :n], lengths[i:i + 1, k], where[i:i + 1, k, :n])
                           for i in range(3) for k, n in enumerate(lengths[i])])
        assert torch.allclose(denoiser(x, lengths, where), alone, atol=1e-5) and len(alone) == where.sum()


def test_dropout_takes_whole_channels_in_training_only():
    torch.manual_seed(0)
    model = Backbone(SMALL["s4_post"] | dict(dropout=0.3), 40, 9)
    seen = []
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout1d):
            module.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
    x = torch.randint(4, 9, (8, 40))
    model.train()(x)
    assert len(seen) == 2 * SMALL["s4_post"]["layers"]                # in the layer and on the residual branch
    for before, after in seen:
        assert before.shape == (8, 16, 40)
        kept = (after != 0).any(-1)
        assert torch.allclose(after, before * kept[..., None] / 0.7)
        assert 0.55 < kept.float().mean() < 0.85 and len(kept.unique(dim=0)) > 1
    same = Backbone(SMALL["s4_post"], 40, 9).eval()
    same.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(x), same(x))


def test_batch_norm_statistics_count_real_positions_only():
    torch.manual_seed(0)
    x = torch.randn(3, 10, 4) * 3 + 1
    lengths = torch.tensor([10, 4, 1])
    real = torch.cat([row[:n] for row, n in zip(x, lengths)])
    ours, theirs = BatchNorm(4), torch.nn.BatchNorm1d(4)
    out = ours(x, lengths)
    exact = theirs(real)
    assert torch.allclose(torch.cat([row[:n] for row, n in zip(out, lengths)]), exact, atol=1e-5)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.allclose(getattr(ours, name).float(), getattr(theirs, name).float(), atol=1e-6)
    assert torch.allclose(BatchNorm(4)(x), torch.nn.BatchNorm1d(4)(x.flatten(0, 1)).view_as(x), atol=1e-5)


# Classifiers, in millions, as computed from the paper's tables: (task, model, vocabulary, channels, outputs, head).
SIZES = [("listops", "transformer", 19, 1, 10, "linear", 12.63), ("listops", "rotary", 19, 1, 10, "linear", 12.63),
         ("listops", "s4", 19, 1, 10, "linear", 0.60), ("text", "transformer", 136, 1, 2, "mlp", 12.95),
         ("text", "rotary", 136, 1, 2, "mlp", 12.95), ("text", "s4", 136, 1, 2, "linear", 1.32),
         ("retrieval", "transformer", 99, 1, 2, "pair", 0.87), ("retrieval", "rotary", 99, 1, 2, "pair", 1.27),
         ("retrieval", "s4", 99, 1, 2, "pair", 1.58), ("image", "transformer", None, 1, 10, "mlp", 0.105),
         ("image", "rotary", None, 1, 10, "mlp", 3.23), ("image", "s4", None, 1, 10, "linear", 3.57),
         ("pathfinder", "transformer", None, 1, 2, "linear", 0.40),
         ("pathfinder", "rotary", None, 1, 2, "linear", 1.19), ("pathfinder", "s4", None, 1, 2, "linear", 1.29),
         ("pathx", "transformer", None, 1, 2, "linear", 0.40), ("pathx", "rotary", None, 1, 2, "linear", 0.99),
         ("pathx", "s4", None, 1, 2, "linear", 1.29),
         ("pathx256", "s4", None, 1, 2, "linear", 1.29), ("sc", "rotary", None, 1, 35, "linear", 0.40),
         ("sc", "s4", None, 1, 35, "linear", 0.38), ("scifar", "rotary", None, 3, 10, "mlp", 3.23),
         ("scifar", "s4", None, 3, 10, "linear", 3.57), ("bidmc_hr", "rotary", None, 2, 1, "linear", 0.40),
         *((f"bidmc_{name}", "rotary", None, 2, 1, "linear", 0.40) for name in ("rr", "spo2")),
         *((f"bidmc_{name}", "s4", None, 2, 1, "linear", 0.60) for name in ("hr", "rr", "spo2")),
         ("listops", "dlr", 19, 1, 10, "linear", 4.48), ("text", "dlr", 136, 1, 2, "linear", 7.13),
         ("image", "dlr", None, 1, 10, "linear", 15.76), ("pathx", "dlr", None, 1, 2, "linear", 7.10),
         ("listops", "s4_rand", 19, 1, 10, "linear", 0.60), ("listops", "dlr_rand", 19, 1, 10, "linear", 4.48)]


@pytest.mark.parametrize("task, model, vocab, channels, outputs, head, millions", SIZES)
def test_parameter_counts(task, model, vocab, channels, outputs, head, millions, monkeypatch):
    # No parameter depends on the length or on this matrix power, which takes seconds a layer at these sizes.
    monkeypatch.setattr(models, "truncation_correction", lambda A, P, C, dt, l: C)
    backbone = Backbone(arch(task, model), 64, vocab, channels)
    digits = 3 if millions == 0.105 else 2
    assert round(count(Classifier(backbone, outputs, "mean", head)) / 1e6, digits) == millions


def test_pythia_has_the_parameters_of_pythia():
    """18,915,328 outside the embedding and the language model's head (Biderman et al. 2023)."""
    for task in ("listops", "text", "retrieval", "image", "pathfinder"):
        backbone = Backbone(arch(task, "pythia_rand"), 64, vocab=7, causal=True)
        assert count(backbone) == 18_915_328 + 7 * 512
        for name, p in backbone.named_parameters():
            if p.ndim == 2 and p.numel() > 10_000:
                assert abs(p.std() / 0.02 - 1) < 0.02, name
            elif name.endswith("bias"):
                assert (p == 0).all(), name


def test_every_arch_row_is_complete():
    rows = read_table(ARCH) + read_table(models.SMALL_ARCH)
    assert len({(row["task"], row["model"]) for row in rows}) == len(rows)
    columns = {"s4": {"state", "n_ssm", "dt_min", "dt_max", "dt_lr", "ssm_lr"},
               "dlr": {"state", "dt_min", "dt_max", "ssm_lr"}}
    for row in rows:
        optional = {"task", "model", "layers", "d", "norm", "place", "block", "dropout"}
        assert row.keys() - optional == columns.get(row["model"], {"heads", "ff"}), row
        assert arch(row["task"], row["model"])["d"] % (arch(row["task"], row["model"]).get("heads", 1)) == 0
    assert arch("text", "dlr_rand") == arch("text", "dlr") | {"model": "dlr_rand"}


def test_sizes_of_table_9(monkeypatch):
    """Within a tenth of what they are called (3m is named after Image's row itself), and in the models' own shapes."""
    monkeypatch.setattr(models, "truncation_correction", lambda A, P, C, dt, l: C)
    meant = {"image": {"100k": 1e5, "300k": 3e5, "1m": 1e6, "3m": 3e6, "10m": 1e7},
             "image_mini": {"2k": 2e3, "4k": 4e3, "10k": 1e4, "20k": 2e4, "80k": 8e4}}
    rows = read_table(models.SIZES)
    assert [(row["task"], row["model"], row["size"]) for row in rows] == [
        (task, model, size) for task in meant for model in ("rotary", "s4") for size in meant[task]]
    for row in rows:
        sizes = arch(row["task"], row["model"], row["size"])
        if row["size"] in ("3m", "20k"):
            assert sizes == arch(row["task"], row["model"])
        if row["size"] != "3m":
            head = "mlp" if (row["task"], row["model"]) == ("image", "rotary") else "linear"
            model = Classifier(Backbone(sizes, 64), 10, "mean", head)
            assert count(model) == pytest.approx(meant[row["task"]][row["size"]], rel=0.1)
        assert "size" not in sizes and sizes["d"] % (2 * sizes.get("heads", 1)) == 0
    assert arch("text", "s4", "1m") is None and arch("image", "s4", "2m") is None


def test_ssm_learning_rates_survive_the_schedule():
    model = Denoiser(small("s4"), 5)
    groups = param_groups(model, lr=0.01, weight_decay=0.05)
    optimizer = torch.optim.AdamW(groups)
    by_id = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    assert len(by_id) == len(list(model.parameters()))
    for step, total in ((0, 100), (9, 100), (50, 100), (99, 100)):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_multiplier(step, 10, total, "cosine")
        for name, parameter in model.named_parameters():
            special = name.rsplit(".", 1)[-1] in ("log_dt", "A_log_re", "A_im", "P", "B")
            group = by_id[id(parameter)]
            assert group["weight_decay"] == (0 if special else 0.05)
            ratio = group["lr"] / by_id[id(model.head.weight)]["lr"]
            assert ratio == pytest.approx(0.1 if special else 1)
    assert lr_multiplier(0, 10, 100, "constant") == pytest.approx(0.1)
    assert lr_multiplier(99, 10, 100, "constant") == 1
    assert lr_multiplier(100, 10, 100, "cosine") == pytest.approx(0)
    assert [lr_multiplier(step, 0, 500, "step") for step in (0, 99, 100, 200, 399, 499)] == [1, 1, .5, .25, .125, .0625]


def test_dt_follows_the_main_rate_where_the_table_says_main():
    groups = param_groups(small("s4_post"), lr=0.01, weight_decay=0.05)
    rates = {(group["lr"], group["weight_decay"]) for group in groups}
    assert rates == {(0.01, 0.05), (0.01, 0), (0.001, 0)}


def test_s4_starts_as_the_recurrence_of_hippo():
    """The layer's initial kernel, through C~ and its float32 storage, is C Abar^k Bbar of HiPPO at the drawn step sizes."""
    from kernels import hippo_nplr
    from test_kernels import dense_s4, relative, uncorrected

    torch.manual_seed(3)
    layer = S4(6, state=16, n_ssm=2, dt_min=0.01, dt_max=0.1, length=70, causal=False, dt_lr=None, ssm_lr=1e-3)
    A, P, B = (v.expand(6, -1) for v in hippo_nplr(16))
    C_tilde, dt = torch.view_as_complex(layer.C.detach()), layer.log_dt.detach().exp()
    C = uncorrected(A, P, B, C_tilde, dt, 70)
    assert 0.5 < C.abs().square().mean() < 2                     # complex standard normal
    assert relative(layer(12).detach().double(), dense_s4(A, P, B, C, dt, 70)) < 1e-4


# ---- initial kernels -------------------------------------------------------------------------------------------------


def layer_kernel(task, model, length, layer=0):
    """Initial kernels (2, d, length) of the first layer of a row of ARCH."""
    torch.manual_seed(0)
    return Backbone(arch(task, model) | dict(layers=layer + 1), length, 9).layers[layer].mixer.kernel(length).detach()


def half_lives(K):
    """For each kernel, the lag by which half of its energy has passed: (c, d)."""
    energy = K.double().square().cumsum(-1)
    return (energy < energy[..., -1:] / 2).sum(-1)


def test_dlr_is_its_recurrence():
    """The whole layer against x[k] = diag(e^Lambda) x[k-1] + u[k], y = Re(W x) in float64, run forwards and, for the
    second direction, backwards over what lies strictly ahead; then D, GELU and GLU."""
    torch.manual_seed(0)
    u = torch.randn(2, 30, 3)
    layer = SSM(DLR(3, state=8, dt_min=0.01, dt_max=0.1, causal=False, ssm_lr=1e-4), 3)
    kernel = layer.kernel
    Lambda = torch.complex(-kernel.theta.double().square(), kernel.Lambda_im.double())
    assert -0.1 / 2 - 1e-6 < Lambda.real.min() and Lambda.real.max() < -0.01 / 2 + 1e-6
    assert torch.allclose(Lambda.imag, torch.arange(8).double() * 2 * math.pi / 8)
    W, step = torch.view_as_complex(kernel.W.double()), torch.diag(Lambda.exp())              # (2, 3, 8), (8, 8)
    y = layer.D.double() * u.double()
    for b in range(2):
        for d in range(3):
            forwards = backwards = torch.zeros(8, dtype=torch.complex128)
            for k in range(30):
                forwards = step @ forwards + u[b, k, d]
                y[b, k, d] += (W[0, d] @ forwards).real
            for k in reversed(range(30)):
                y[b, k, d] += (W[1, d] @ backwards).real
                backwards = step @ backwards + u[b, k, d]
    one, two = (F.gelu(y) @ layer.out.weight.double().T + layer.out.bias.double()).chunk(2, -1)
    assert torch.allclose(layer(u).double(), one * two.sigmoid(), atol=1e-5)


def test_dlr_starts_as_documented():
    torch.manual_seed(0)
    kernel = DLR(64, state=2048, dt_min=1e-4, dt_max=1e-2, causal=False, ssm_lr=1e-4)
    W, decay = kernel.W.detach() * 2048, kernel.theta.detach().square()
    assert abs(W.std() - 1) < 0.01 and abs(W.mean()) < 0.01
    assert kernel.theta.min() > 0 and 0.5e-4 <= decay.min() < 0.6e-4 and 0.4e-2 < decay.max() <= 0.5e-2
    assert decay.median().item() == pytest.approx(0.5e-3, rel=0.15)   # log-uniform: the geometric mean of both ends


def test_dlr_kernels_belong_to_no_length():
    kernel = DLR(4, state=16, dt_min=0.001, dt_max=0.1, causal=True, ssm_lr=1e-4)
    assert kernel(50).shape == (1, 4, 50) and torch.allclose(kernel(300)[..., :50], kernel(50), atol=1e-6)


def test_hippo_kernels_last_and_random_ones_die():
    """Half-lives of initial kernels at 4,096 steps (Text's sizes), in lags. HiPPO's follow the step sizes, dt in
    [0.001, 0.1]: 26 in the median, and up to 356. With all parameters from N(0, 0.1^2) it is 0 in the median and 2 at
    most: the first value of a kernel is most of it, and by lag 30 less than a millionth of its peak is left."""
    hippo, random = layer_kernel("text", "s4", 4096), layer_kernel("text", "s4_rand", 4096)
    assert 20 < half_lives(hippo).median() < 35 and 300 < half_lives(hippo).max() < 400
    assert half_lives(random).median() == 0 and half_lives(random).max() == 2
    left = lambda K: K[..., 30:].abs().amax(-1) / K.abs().amax(-1)
    assert left(random).max() < 1e-6 and left(hippo).median() > 0.4


def test_random_dlr_remembers_but_tells_nothing_apart():
    """DLR starts with frequencies all around the circle: a tenth or so of its kernels' energy lies below 0.4 radians.
    From N(0, 0.1^2) its kernels last too, but practically all of their energy lies there: they are smooth."""
    def share_below(K, frequency):
        spectrum = torch.fft.rfft(K.double()).abs().square().sum((0, 1))
        return (spectrum[: int(frequency / math.pi * len(spectrum))].sum() / spectrum.sum()).item()

    own, random = layer_kernel("text", "dlr", 4096), layer_kernel("text", "dlr_rand", 4096)
    assert 0.05 < share_below(own, 0.4) < 0.25 and share_below(random, 0.4) > 0.99
    assert half_lives(own).min() > 1000 and half_lives(random).median() > 500


@pytest.mark.parametrize("name", ["s4_rand", "dlr_rand"])
def test_random_initialisation_takes_every_parameter(name):
    torch.manual_seed(0)
    sizes = SMALL[name] | dict(d=64, n_ssm=64)
    for model in (Denoiser(Backbone(sizes, 40, 9), 50), Classifier(Backbone(sizes, 40, 9), 10, "mean", "mlp")):
        everything = torch.cat([p.detach().flatten() for p in model.parameters()])
        assert abs(everything.std() / 0.1 - 1) < 0.02 and abs(everything.mean()) < 0.002
        for key, p in model.named_parameters():                      # norm gains, log dt and head among them
            assert p.numel() < 30 or 0.05 < p.std() < 0.2 and p.abs().max() < 0.6, key
        buffers = dict(model.named_buffers())
        assert all((value == 1).all() for key, value in buffers.items() if key.endswith("running_var"))


# ---- Pythia ----------------------------------------------------------------------------------------------------------


def write_safetensors(path, tensors, **changes):
    """The format from its description: length of the header, header, arrays."""
    header, blobs, at = {"__metadata__": {"format": "pt"}}, [], 0
    names = {torch.float16: "F16", torch.uint8: "U8", torch.bool: "BOOL", torch.float32: "F32"}
    for name, tensor in tensors.items():
        blob = tensor.contiguous().numpy().tobytes()
        header[name] = dict(dtype=names[tensor.dtype], shape=list(tensor.shape), data_offsets=[at, at + len(blob)])
        blobs.append(blob)
        at += len(blob)
    header |= changes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def made_neox(layers, d, heads, ff, vocab, turned, seed=0):
    """Weights in the names, shapes and types of the public checkpoint, buffers included."""
    generator = torch.Generator().manual_seed(seed)
    make = lambda *shape, scale=0.3: (torch.randn(*shape, generator=generator) * scale).half()
    tensors = {"gpt_neox.embed_in.weight": make(vocab, d, scale=1), "embed_out.weight": make(vocab, d)}
    for i in range(layers):
        at = f"gpt_neox.layers.{i}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{norm}.weight"], tensors[f"{at}{norm}.bias"] = 1 + make(d), make(d)
        for name, shape in (("attention.query_key_value", (3 * d, d)), ("attention.dense", (d, d)),
                            ("mlp.dense_h_to_4h", (ff, d)), ("mlp.dense_4h_to_h", (d, ff))):
            tensors[f"{at}{name}.weight"], tensors[f"{at}{name}.bias"] = make(*shape), make(shape[0])
        tensors[f"{at}attention.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.bool).tril()
        tensors[f"{at}attention.masked_bias"] = torch.tensor(-math.inf).half()
        tensors[f"{at}attention.rotary_emb.inv_freq"] = make(turned // 2)
    tensors["gpt_neox.final_layer_norm.weight"], tensors["gpt_neox.final_layer_norm.bias"] = 1 + make(d), make(d)
    return tensors


def plain_neox(tensors, tokens, layers, heads, turned):
    """GPT-NeoX written out with loops in float64 numpy, from its description: tokens (l,) -> features (l, d)."""
    get = lambda name: tensors[f"gpt_neox.{name}"].double().numpy()
    x = get("embed_in.weight")[tokens]
    l, d = x.shape
    e = d // heads

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x ** 2).mean(-1, keepdims=True) + 1e-5) * get(f"{name}.weight") + get(f"{name}.bias")

    def linear(x, name):
        return x @ get(f"{name}.weight").T + get(f"{name}.bias")

    def turn(v, t):
        """The first `turned` dimensions, in halves: m is paired with m + turned / 2."""
        v, half = v.copy(), turned // 2
        for m in range(half):
            angle = t / 10000 ** (2 * m / turned)
            a, b = v[m], v[m + half]
            v[m], v[m + half] = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
        return v

    for i in range(layers):
        at = f"layers.{i}"
        fused = linear(norm(x, f"{at}.input_layernorm"), f"{at}.attention.query_key_value").reshape(l, heads, 3, e)
        mixed = np.zeros((l, heads, e))
        for h in range(heads):
            q = np.stack([turn(fused[t, h, 0], t) for t in range(l)])
            k = np.stack([turn(fused[t, h, 1], t) for t in range(l)])
            for t in range(l):
                scores = k[:t + 1] @ q[t] / math.sqrt(e)
                share = np.exp(scores - scores.max())
                mixed[t, h] = (share / share.sum()) @ fused[:t + 1, h, 2]
        hidden = linear(norm(x, f"{at}.post_attention_layernorm"), f"{at}.mlp.dense_h_to_4h")
        hidden = hidden * (1 + np.vectorize(math.erf)(hidden / math.sqrt(2))) / 2
        x = x + linear(mixed.reshape(l, d), f"{at}.attention.dense") + linear(hidden, f"{at}.mlp.dense_4h_to_h")
    return norm(x, "final_layer_norm")


def test_pythia_computes_what_its_checkpoint_means(tmp_path):
    """Made weights, written as a .safetensors file and read back: features, and logits of the checkpoint's own head,
    are those of a plain implementation, beyond the 32 positions that the file's mask buffer was made for too."""
    sizes = dict(model="pythia", layers=3, d=96, heads=3, ff=160, norm="layer", place="pre")
    tensors = made_neox(3, 96, 3, 160, vocab=50, turned=8)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    read = read_safetensors(tmp_path / "model.safetensors")
    assert read.keys() == tensors.keys() and all(torch.equal(read[k], tensors[k]) for k in tensors)
    tokens = torch.randperm(50, generator=torch.Generator().manual_seed(1))[:11]
    backbone = Backbone(sizes, 45, vocab=11, causal=True).eval()
    backbone.load_state_dict(neox_weights(read, sizes, tokens))
    x = torch.randint(11, (2, 45), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours = backbone(x).double()
    for row, features in zip(x, ours):
        exact = torch.from_numpy(plain_neox(tensors, tokens[row].numpy(), 3, 3, turned=8))
        assert torch.allclose(features, exact, atol=2e-4)
        head = tensors["embed_out.weight"].double()
        assert torch.allclose(features @ head.T, exact @ head.T, atol=2e-3)


@pytest.mark.parametrize("damage", ["cut", "offsets", "header", "dtype", "shape", "empty", "text"])
def test_damaged_safetensors(damage, tmp_path):
    path = tmp_path / "model.safetensors"
    good = dict(dtype="F16", shape=[2, 3], data_offsets=[0, 12])
    changes = dict(offsets=dict(a=good | dict(data_offsets=[0, 1 << 40])), dtype=dict(a=good | dict(dtype="F8")),
                   shape=dict(a=good | dict(shape=[5, 5]))).get(damage, {})
    write_safetensors(path, {"a": torch.ones(2, 3).half()}, **changes)
    raw = path.read_bytes()
    path.write_bytes({"cut": raw[:-1], "header": (1 << 60).to_bytes(8, "little") + raw[8:], "empty": b"",
                      "text": b"<html>404 Not Found</html>"}.get(damage, raw))
    with pytest.raises((ValueError, KeyError)):
        read_safetensors(path)


# ---- the table -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["transformer", "rotary", "s4", "s4_post", "dlr", "pythia"])
def test_described_costs_are_those_of_a_real_pass(name):
    """Memory against what a real pass over real tensors keeps for one sequence more, FLOPs against the formulas."""
    l, sizes = 64, SMALL[name]
    mixer, rest, memory, flops = describe(sizes, l, 9, 1)
    torch.manual_seed(0)
    backbone = Backbone(sizes, l, 9)
    assert mixer + rest == count(backbone)

    class Fixed(torch.nn.Module):
        def __init__(self, K):
            super().__init__()
            self.forward = lambda l: K

    for module in backbone.modules():
        if isinstance(module, SSM):
            module.kernel = Fixed(module.kernel(l).detach())
    kept = [{}, {}, {}]
    for b in (1, 2):
        keep = lambda t: kept[b].setdefault(t.untyped_storage().data_ptr(), (t, t.untyped_storage().nbytes())) and t
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            y = backbone(torch.zeros(b, l, dtype=torch.int64), torch.full((b,), l))
    assert memory == pytest.approx(sum(n for _, n in kept[2].values()) - sum(n for _, n in kept[1].values()), rel=0.02)
    d, n = y.shape[-1], 2 * l
    per_layer = (8 * d * d + 4 * d * sizes["ff"] + 4 * d * l if "heads" in sizes else
                 4 * d * d + 2 * d * 2.5 * n * math.log2(n) / l)      # GLU; there and back for each channel
    assert flops == pytest.approx(2 * per_layer, rel=0.01)
    by_hand = dict(transformer=4 * d * d + 4 * d, dlr=2 * 2 * d * 24 + 2 * 24 + d,
                   s4=2 * 2 * d * 4 + 6 * 16 * 4 + d + d)             # C; A, P, B of each copy; log dt; D
    assert name not in by_hand or mixer == 2 * by_hand[name]


def test_describing_leaves_nothing_behind():
    """Rotary angles are cached by length and device: tensors without values must not be found there afterwards."""
    backbone = small("rotary")
    x = torch.randint(9, (1, 40))
    before = backbone(x)
    describe(SMALL["rotary"], 40, 9, 1)
    assert torch.equal(backbone(x), before)


def test_gradients_reach_every_parameter():
    for name in SMALL:
        model = Denoiser(small(name, causal=name == "pythia"), 5).train()
        x = torch.randint(4, 9, (3, 40))
        where = torch.rand(3, 40) < 0.5
        model(x, torch.tensor([40, 30, 2]), where).square().mean().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters()), name


def test_backbone_copies_are_independent_of_each_other():
    """No tensor is shared between layers or between q, k, v: the official code starts them as copies of one matrix."""
    backbone = small("rotary")
    q, k, v = backbone.layers[0].mixer.qkv.weight.chunk(3)
    assert not torch.equal(q, k) and not torch.equal(k, v)
    assert not torch.equal(backbone.layers[0].mixer.qkv.weight, backbone.layers[1].mixer.qkv.weight)


def test_dlr_has_rates_of_its_own():
    """Poles and W: their own rate, undecayed; everything else, D included, the main one (official configuration)."""
    model = Denoiser(small("dlr"), 5)
    names = {id(p): name.rsplit(".", 1)[-1] for name, p in model.named_parameters()}
    groups = {(g["lr"], g["weight_decay"]): {names[id(p)] for p in g["params"]} for g in param_groups(model, 0.01, 0.05)}
    assert groups.keys() == {(1e-4, 0), (0.01, 0.05)} and groups[1e-4, 0] == {"theta", "Lambda_im", "W"}
    assert "D" in groups[0.01, 0.05]


def test_learning_rates_survive_a_copy_of_the_model():
    model = Denoiser(small("s4"), 5)
    sizes = lambda m: [(g["name"], g["lr"], len(g["params"])) for g in param_groups(m, 0.01, 0.05)]
    assert sizes(copy.deepcopy(model)) == sizes(model)
