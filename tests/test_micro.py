"""micro.py against the files that it repeats, and against a plain recurrence."""

import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT

import kernels
import micro
from models import Backbone, Classifier, Denoiser, config
from recipes import arch
from use.recurrent import s4_recover_C

# names of weights: micro.py's, models.py's
NAMES = dict(log_decay="kernel.A_log_re", frequency="kernel.A_im", log_dt="kernel.log_dt")
NAMES |= dict(P="kernel.P", B="kernel.B", C="kernel.C", skip="D", qkv="qkv", out="out")


def backbone_of(network, block):
    """Return the Backbone of models.py with the weights of micro's network."""
    name, sizes = "s4", dict(state=micro.STATES, n_ssm=1, place="pre", dropout=0.0)
    if block is micro.Attention:
        name, sizes = "transformer", dict(heads=micro.HEADS, ff=2 * micro.WIDTH)
    sizes = arch("text256", name, d=micro.WIDTH, layers=micro.LAYERS, norm="layer", **sizes)
    fields = SimpleNamespace(length=micro.LENGTH, vocab=micro.KINDS + 1, channels=None)
    backbone, weights = Backbone(config(sizes, fields)), {"encoder.weight": network.embed.weight}
    for path, value in network.blocks.state_dict().items():
        number, name, *part = path.split(".")
        if int(number) == micro.LAYERS:
            weights[f"norm.{name}"] = value
            continue
        if block is micro.S4 and name in ("log_decay", "frequency", "P", "B"):
            value = value[None]
        name = f"mixer.{NAMES[name]}" if name in NAMES else name.replace("ff1", "ff.0")
        weights[".".join(("layers", number, name.replace("ff2", "ff.2"), *part))] = value
    backbone.load_state_dict(weights)
    return backbone.train()


@pytest.mark.parametrize("block", [micro.Attention, micro.S4])
def test_the_first_losses_of_both_stages_are_those_of_the_models(block):
    torch.manual_seed(0)
    network, (x, labels) = micro.Network(block), micro.draw(8)
    backbone = backbone_of(network, block)
    torch.manual_seed(1)
    loss = micro.fill_loss(network, x, labels)
    torch.manual_seed(1)
    seen, hidden = micro.hide(x)
    denoiser, classifier = Denoiser(backbone, micro.KINDS), Classifier(backbone, 2, "mean")
    denoiser.head.load_state_dict(network.fill.state_dict())
    classifier.head[0].load_state_dict(network.label.state_dict())
    exact = F.cross_entropy(denoiser(seen, None, hidden), x[hidden])
    torch.testing.assert_close(loss, exact, rtol=1e-5, atol=1e-5)
    loss, exact = micro.label_loss(network, x, labels), F.cross_entropy(classifier(x), labels)
    torch.testing.assert_close(loss, exact, rtol=1e-5, atol=1e-5)


def test_the_kernel_is_that_of_hippos_recurrence():
    """In float64, for an impulse. Eigenvectors have any phase, which conj(P) B does not have."""
    d, l, N, dt = 3, 20, micro.STATES, torch.tensor([0.01, 0.1, 0.3], dtype=torch.float64)
    (A, P, B), nplr = (v[: N // 2] for v in micro.hippo()), kernels.hippo_nplr(N)
    torch.testing.assert_close(A, nplr[0])
    torch.testing.assert_close(P.conj() * B, nplr[1].conj() * nplr[2])
    C = torch.randn(2, d, N // 2, dtype=A.dtype, generator=torch.Generator().manual_seed(0))
    K = micro.kernel(*(torch.cat((v, v.conj()), -1) for v in (A, P, B, C)), dt, l)
    Abar, Bbar = kernels.discretize(*(v.repeat(d, 1) for v in (A, P, B)), dt)
    impulse = F.one_hot(torch.tensor([0]), l).double().expand(1, d, l)
    for ours, plain in zip(K, s4_recover_C(A, P, C, dt, l)):
        exact = kernels.ssm_scan(Abar, Bbar, torch.cat((plain, plain.conj()), -1), impulse)[0]
        assert (ours - exact).abs().max() < 1e-5 * exact.abs().max()


def test_the_task_and_the_mask_are_what_they_say():
    """Label 1: a copy. Label 0: at most four places differ; one in eight of them is drawn alike."""
    torch.manual_seed(0)
    x, labels = micro.draw(4_000)
    first, second = x.chunk(2, 1)
    changed = (first != second).sum(1)
    assert (changed[labels == 1] == 0).all() and changed.max() == 4
    assert abs(changed[labels == 0].float().mean() - 4 * 7 / 8) < 0.05
    assert abs(labels.float().mean() - 0.5) < 0.03
    counts = x.flatten().bincount(minlength=micro.KINDS)
    assert (counts / counts.sum() - 1 / micro.KINDS).abs().max() < 0.01
    seen, hidden = micro.hide(x)
    assert abs(hidden.float().mean() - 0.3) < 0.01
    assert torch.equal(seen[~hidden], x[~hidden]) and (seen[hidden] == micro.KINDS).all()


def test_all_four_runs_have_equal_passes_and_need_nothing_but_torch(capsys, monkeypatch):
    for name, value in (("EXAMPLES", 64), ("WIDTH", 16), ("LAYERS", 1)):
        monkeypatch.setattr(micro, name, value)
    for stage in ("fill_loss", "label_loss"):
        monkeypatch.setattr(micro, stage, mock.Mock(wraps=getattr(micro, stage)))
    scores = micro.compare(0, passes=4)
    assert micro.fill_loss.call_count == 2 * 2 and micro.label_loss.call_count == 2 * (4 + 2)
    assert len(scores) == 4 and all(0 <= score <= 100 for score in scores)
    rows = re.findall(r"^    (?:sequence|hidden|filled in) +(.*)", capsys.readouterr().out, re.M)
    assert [len(row.split()) for row in rows] == [micro.LENGTH] * 6
    text = (ROOT / "micro.py").read_text(encoding="utf-8")
    assert {*re.findall(r"^(?:import|from) (\w+)", text, re.M)} == {"math", "torch"}


@pytest.mark.slow
def test_the_table_in_the_docstring():
    """Means over its seeds within three points: single runs differ between machines."""
    rows = re.findall(r"^    (?:Transformer|S4), .{16}((?: +\d+\.\d)+)$", micro.__doc__, re.M)
    printed = torch.tensor([[float(score) for score in row.split()] for row in rows])
    scores = torch.tensor([micro.compare(seed) for seed in range(printed.shape[1])]).T
    assert printed.shape == (4, 10)
    assert (scores.mean(1) - printed.mean(1)).abs().max() < 3
