"""models.py: what a layer may see, what padding may change, sizes, optimiser groups."""
import copy

import pytest
import torch

import models
from models import (ARCH, BatchNorm, Backbone, Classifier, Denoiser, S4, arch, count, param_groups, read_table)
from pretrain import lr_multiplier

SMALL = {
    "transformer": dict(model="transformer", layers=2, d=16, heads=2, ff=32, norm="layer", place="pre"),
    "rotary": dict(model="rotary", layers=2, d=16, heads=2, ff=32, norm="layer", place="pre"),
    "local": dict(model="rotary", layers=2, d=16, heads=2, ff=32, norm="layer", place="pre", block=16),
    "s4": dict(model="s4", layers=2, d=16, state=8, n_ssm=16, norm="batch", place="pre", dt_min=0.001, dt_max=0.1,
               dt_lr=0.001, ssm_lr=0.001),
    "s4_post": dict(model="s4", layers=2, d=16, state=8, n_ssm=4, norm="layer", place="post", dt_min=0.001, dt_max=0.1,
                    dt_lr="main", ssm_lr=0.001),
}


def small(name, causal=False, length=40, vocab=9):
    torch.manual_seed(0)
    return Backbone(SMALL[name], length, vocab, causal=causal).eval()


@pytest.mark.parametrize("name", SMALL)
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
        assert (swapped - together).abs().max() > 1e-3
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
         *((f"bidmc_{name}", "s4", None, 2, 1, "linear", 0.60) for name in ("hr", "rr", "spo2"))]


@pytest.mark.parametrize("task, model, vocab, channels, outputs, head, millions", SIZES)
def test_parameter_counts(task, model, vocab, channels, outputs, head, millions, monkeypatch):
    # No parameter depends on the length or on this matrix power, which takes seconds a layer at these sizes.
    monkeypatch.setattr(models, "truncation_correction", lambda A, P, C, dt, l: C)
    backbone = Backbone(arch(task, model), 64, vocab, channels)
    digits = 3 if millions == 0.105 else 2
    assert round(count(Classifier(backbone, outputs, "mean", head)) / 1e6, digits) == millions


def test_every_arch_row_is_complete():
    rows = read_table(ARCH)
    assert len({(row["task"], row["model"]) for row in rows}) == len(rows)
    for row in rows:
        s4_only = {"state", "n_ssm", "dt_min", "dt_max", "dt_lr", "ssm_lr"}
        assert (row.keys() >= s4_only) == (row["model"] == "s4"), row
        assert arch(row["task"], row["model"])["d"] % (arch(row["task"], row["model"]).get("heads", 1)) == 0


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
    layer = S4(d=6, state=16, n_ssm=2, dt_min=0.01, dt_max=0.1, length=70, causal=False, dt_lr=None, ssm_lr=1e-3)
    A, P, B = (v.expand(6, -1) for v in hippo_nplr(16))
    C_tilde, dt = torch.view_as_complex(layer.C.detach()), layer.log_dt.detach().exp()
    C = uncorrected(A, P, B, C_tilde, dt, 70)
    assert 0.5 < C.abs().square().mean() < 2                     # complex standard normal
    assert relative(layer.kernel().detach().double(), dense_s4(A, P, B, C, dt, 70)) < 1e-4


def test_gradients_reach_every_parameter():
    for name in SMALL:
        model = Denoiser(small(name), 5).train()
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


def test_learning_rates_survive_a_copy_of_the_model():
    model = Denoiser(small("s4"), 5)
    sizes = lambda m: [(g["name"], g["lr"], len(g["params"])) for g in param_groups(m, 0.01, 0.05)]
    assert sizes(copy.deepcopy(model)) == sizes(model)
