"""micro.py against the files that it repeats, and against a plain recurrence."""

import re
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT

import kernels
import micro
from models import Backbone, Classifier, Denoiser, config
from recipes import arch

FIELDS = dict(length=micro.LENGTH, vocab=micro.KINDS + 1, channels=None)
SIZES = dict(d=micro.WIDTH, layers=micro.LAYERS, norm="layer", dropout=0.0)
OF_BLOCK = {
    micro.Attention: ("transformer", dict(heads=micro.HEADS, ff=2 * micro.WIDTH)),
    micro.S4: ("s4", dict(state=micro.STATES, n_ssm=1, place="pre")),
}


def network_of(block):
    torch.manual_seed(0)
    return micro.Network(block)


def backbone_of(network, block):
    """Return the Backbone of models.py with the weights of micro's network."""
    name, sizes = OF_BLOCK[block]
    sizes = {"model": name} | arch("text256", name) | SIZES | sizes
    backbone = Backbone(config(sizes, SimpleNamespace(**FIELDS)))
    weights = {}
    for name, value in network.blocks.state_dict().items():
        number, _, name = name.partition(".")
        if int(number) == micro.LAYERS:
            weights[f"norm.{name}"] = value
            continue
        if block is micro.S4 and name in NAMES:
            value = value[None] if name in ("log_decay", "frequency", "P", "B") else value
            name = NAMES[name]
        elif block is micro.S4:
            name = name.replace("out.", "mixer.out.")
        else:
            name = re.sub(r"^(qkv|out)\.", r"mixer.\1.", name)
            name = name.replace("ff1.", "ff.0.").replace("ff2.", "ff.2.")
        weights[f"layers.{number}.{name}"] = value
    backbone.load_state_dict(weights | {"encoder.weight": network.embed.weight})
    if block is micro.Attention:
        backbone.positions = network.positions.detach()
    return backbone


NAMES = dict(log_decay="A_log_re", frequency="A_im", P="P", B="B", C="C", log_dt="log_dt")
NAMES = {name: f"mixer.kernel.{place}" for name, place in NAMES.items()} | {"skip": "mixer.D"}


@pytest.mark.parametrize("block", OF_BLOCK, ids=lambda block: block.__name__)
def test_the_first_losses_of_both_stages_are_those_of_the_models(block):
    network = network_of(block)
    backbone = backbone_of(network, block).train()
    x, labels = micro.draw(8)
    torch.manual_seed(1)
    loss = micro.fill_loss(network, x, labels)
    torch.manual_seed(1)
    seen, hidden = micro.hide(x)
    denoiser = Denoiser(backbone, micro.KINDS)
    denoiser.head.load_state_dict(network.fill.state_dict())
    predictions = denoiser(seen, None, hidden)
    same = torch.nn.functional.cross_entropy(predictions, x[hidden])
    torch.testing.assert_close(loss, same, rtol=1e-5, atol=1e-5)
    classifier = Classifier(backbone, 2, "mean")
    classifier.head[0].load_state_dict(network.label.state_dict())
    same = torch.nn.functional.cross_entropy(classifier(x), labels)
    torch.testing.assert_close(micro.label_loss(network, x, labels), same, rtol=1e-5, atol=1e-5)


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_the_kernel_is_that_of_the_textbook_and_of_a_recurrence(float64):
    """In float64: `s4_kernel_naive`, and x[k] = Abar x[k-1] + Bbar u[k] for an impulse u."""
    A, P, B = micro.hippo()
    n, d, l = micro.STATES // 2, 3, 20
    dt = torch.tensor([0.01, 0.1, 0.3], dtype=torch.float64)
    half = torch.randn(2, d, n, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    C = torch.cat((half, half.conj()), -1)
    assert torch.allclose(A.flip(0)[:n], A[:n].conj())  # pairs, in ascending order of frequency
    pairs = [torch.cat((v[:n], v[:n].conj())) for v in (A, P, B)]
    K = micro.kernel(*pairs, C, dt, l)
    naive = kernels.s4_kernel_naive(A[:n], P[:n], B[:n], half, dt, l)
    torch.testing.assert_close(K, naive, rtol=1e-9, atol=1e-9)
    rows = [v[:n].repeat(d, 1) for v in (A, P, B)]
    Abar, Bbar = kernels.discretize(*rows, dt)
    whole = torch.linalg.matrix_power(Abar, l)  # C~ = C (1 - Abar^l)
    eye = torch.eye(2 * n, dtype=Abar.dtype)
    plain = torch.linalg.solve((eye - whole).mT, C[0, ..., None])[..., 0]
    impulse = torch.zeros(1, d, l, dtype=torch.float64)
    impulse[..., 0] = 1
    y = kernels.ssm_scan(Abar, Bbar, plain, impulse)
    torch.testing.assert_close(K[:1], y, rtol=1e-9, atol=1e-9)


def test_hippo_in_its_basis_is_hippo(monkeypatch):
    """The eigenvalues of diag(A) - P P* are those of the matrix, -1 .. -N; P and B are its own."""
    monkeypatch.setattr(micro, "STATES", 8)
    A, P, B = micro.hippo()
    values = torch.linalg.eigvals(torch.diag(A) - P[:, None] * P.conj())
    wanted = -torch.arange(8, 0, -1.0, dtype=torch.float64)
    torch.testing.assert_close(values.real.sort().values, wanted, rtol=1e-8, atol=1e-8)
    nplr = kernels.hippo_nplr(8)
    torch.testing.assert_close(A[:4], nplr[0])
    # eigenvectors have any phase, which these products do not have
    torch.testing.assert_close((P.conj() * B)[:4], nplr[1].conj() * nplr[2])
    torch.testing.assert_close(B.abs()[:4], nplr[2].abs())


def test_the_task_is_what_it_says():
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


def test_three_positions_in_ten_are_hidden():
    torch.manual_seed(0)
    x, _ = micro.draw(4_000)
    seen, hidden = micro.hide(x)
    assert abs(hidden.float().mean() - 0.3) < 0.01
    assert torch.equal(seen[~hidden], x[~hidden]) and (seen[hidden] == micro.KINDS).all()


def test_it_needs_nothing_but_torch():
    imports = re.findall(r"^(?:import|from) (\w+)", (ROOT / "micro.py").read_text(), re.M)
    assert {*imports} == {"math", "torch"}


def test_two_steps_print_a_sequence_what_is_filled_in_and_four_accuracies(capsys, monkeypatch):
    monkeypatch.setattr(micro, "EXAMPLES", 64)
    scores = micro.compare(0, passes=4)
    lines = capsys.readouterr().out.splitlines()
    assert len(scores) == 4 and all(0 <= score <= 100 for score in scores)
    accuracies = [line for line in lines if line.endswith("%")]
    assert [f"{score:.1f}" in line for score, line in zip(scores, accuracies)] == [True] * 4
    for name in "sequence", "hidden", "filled in":
        rows = [line for line in lines if line.startswith(f"    {name}")]
        symbols = [row.removeprefix(f"    {name}").split() for row in rows]
        assert [*map(len, symbols)] == [micro.LENGTH] * 2


@pytest.mark.slow
def test_the_table_in_the_docstring():
    """Means over its seeds within three points: single runs differ between machines."""
    rows = re.findall(r"^    (?:Transformer|S4), .{16}((?: +\d+\.\d)+)$", micro.__doc__, re.M)
    printed = torch.tensor([[float(score) for score in row.split()] for row in rows])
    scores = torch.tensor([micro.compare(seed) for seed in range(printed.shape[1])]).T
    assert printed.shape == (4, 10)
    assert (scores.mean(1) - printed.mean(1)).abs().max() < 3
