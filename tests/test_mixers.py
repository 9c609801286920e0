"""The other ways to mix positions, against plain float64 forms: dense masks, loops, recurrences."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from kernels import (
    attention,
    diagonal_kernel,
    fft_conv,
    hippo_nplr,
    s4_kernel,
    truncation_correction,
)
from models import MODELS, Attention, Backbone, SizeError, config, keys_of
from recipes import arch
from use.recurrent import backbone_step, can_step, s4_recover_C, s4_step
from zoo.bigbird import bigbird_attention
from zoo.linear import favor_features, linear_attention
from zoo.longformer import Longformer
from zoo.mega import Mega, ema_kernel
from zoo.reformer import lsh_attention
from zoo.s4d import s4d_poles
from zoo.scan import diagonal_scan
from zoo.selective import AT_ONCE, segments, selective_scan
from zoo.structured import StructuredLinear, guide, structured_linear

DOUBLE = torch.float64
LENGTHS = [None, (1.0, 0.4)]  # shares of the length that are real, for each sequence of a batch


def heads(l, e=4, h=3, b=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(b, h, l, e, dtype=DOUBLE, generator=generator) for _ in range(3)]


def ends(shares, l):
    return None if shares is None else torch.tensor([max(1, int(share * l)) for share in shares])


def allowed(mask, lengths, causal):
    """A mask of (l, l) or (h, l, l) pairs, without padded keys and, if causal, without later
    ones."""
    i = torch.arange(mask.shape[-1])
    mask = mask & (i <= i[:, None]) if causal else mask
    return (
        mask.expand(1, *mask.shape)
        if lengths is None
        else mask & (i < lengths[:, None])[:, None, None]
    )


def weighted(scores, mask, v):
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def same(ours, exact, lengths, tolerance=1e-10):
    """Equal at all real positions; finite elsewhere."""
    assert torch.isfinite(ours).all()
    for i, (a, b) in enumerate(zip(ours, exact)):
        end = None if lengths is None else lengths[i]
        torch.testing.assert_close(a[..., :end, :], b[..., :end, :], rtol=0, atol=tolerance)


def banded(q, k, v, window, causal=False, lengths=None):
    """Longformer's attention, without its projections."""
    return Longformer.attend(SimpleNamespace(window=window, causal=causal), q, k, v, lengths)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shares", LENGTHS)
@pytest.mark.parametrize("l", [1, 5, 23, 64])
def test_banded_block_sparse_and_linear_attention_are_their_dense_forms(l, shares, causal):
    q, k, v = heads(l)
    lengths, i = ends(shares, l), torch.arange(l)
    scores = q @ k.transpose(-1, -2) / 2  # 1 / sqrt(e)
    for window in (1, 2, 7, 200):
        band = (i[:, None] - i).abs() <= window // 2
        exact = weighted(scores, allowed(band, lengths, causal), v)
        same(banded(q, k, v, window, causal, lengths), exact, lengths)
    for block in (2, 4):
        n = -(-l // block)
        random = torch.randint(
            0, n, (3, max(0, n - 2), 2), generator=torch.Generator().manual_seed(1)
        )
        pattern = torch.zeros(3, n, n, dtype=torch.bool)
        for h in range(3):
            for row in range(n):
                inner = 0 < row < n - 1
                seen = (
                    {0, row - 1, row, row + 1, n - 1} | set(random[h, row - 1].tolist())
                    if inner
                    else range(n)
                )
                pattern[h, row, list(seen)] = True
        dense = pattern.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :l, :l]
        exact = weighted(scores, allowed(dense, lengths, causal), v)
        same(bigbird_attention(q, k, v, block, random, causal, lengths), exact, lengths)
    assert MODELS["linear"].extras["phi"](q).equal(F.elu(q) + 1)
    assert MODELS["performer_relu"].extras["phi"](q).equal(F.relu(q) + 1e-3)
    for features in (MODELS[name].extras["phi"] for name in ("linear", "performer_relu")):
        q_, k_ = features(q), features(k)
        weights = (
            q_ @ k_.transpose(-1, -2) * allowed(torch.ones(l, l, dtype=torch.bool), lengths, causal)
        )
        exact = weights @ v / (weights.sum(-1, keepdim=True) + 1e-6)
        same(linear_attention(q_, k_, v, causal, lengths), exact, lengths)


@pytest.mark.parametrize("shares", LENGTHS)
@pytest.mark.parametrize("l", [24, 23, 6])
def test_lsh_attention_is_sorting_and_cutting(l, shares):
    """Chunk by chunk, one query after another. l = 23: the last chunk is filled up with padding."""
    chunk, rounds, half = 6, 3, 4
    q, _, v = heads(l, h=2)
    rotations = torch.randn(
        2, 4, rounds, half, dtype=DOUBLE, generator=torch.Generator().manual_seed(2)
    )
    lengths = ends(shares, l)
    exact, size = torch.zeros_like(v), -(-l // chunk) * chunk
    for b in range(len(q)):
        end = l if lengths is None else int(lengths[b])
        for h in range(2):
            rows = []
            for r in range(rounds):
                turned = q[b, h] @ rotations[h, :, r]  # (l, half)
                bucket = torch.cat((turned, -turned), -1).argmax(-1).tolist()
                bucket = [bucket[t] if t < end else 2 * half for t in range(size)]
                rows += sorted(range(size), key=lambda t: (bucket[t], t))
            found = {t: [] for t in range(end)}
            chunks = [rows[i : i + chunk] for i in range(0, len(rows), chunk)]
            for u, own in enumerate(chunks):
                keys = [j for j in chunks[u - 1] + own if j < end]  # chunk -1 is the last one
                for i in (i for i in own if i < end):
                    scores = torch.stack(
                        [q[b, h, i] @ q[b, h, j] / q[b, h, j].norm() for j in keys]
                    )
                    scores[[n for n, j in enumerate(keys) if j == i]] = -1e5
                    found[i].append((scores.logsumexp(0), scores.softmax(0) @ v[b, h, keys]))
            for i, parts in found.items():
                share = torch.stack([total for total, _ in parts]).softmax(0)
                exact[b, h, i] = sum(weight * y for weight, (_, y) in zip(share, parts))
    same(lsh_attention(q, v, rotations, chunk, lengths), exact, lengths)


def test_each_becomes_full_attention_at_its_limit():
    """One block, a window of the whole length, every block named, one chunk, an identity for
    Linformer's mixtures."""
    l = 32
    q, k, v = heads(l)
    lengths = torch.tensor([32, 20])
    full = attention(q, k, v, lengths=lengths)
    every = torch.arange(8).expand(3, 6, 8)
    for ours in (
        attention(q, k, v, block=l, lengths=lengths),
        banded(q, k, v, 2 * l, lengths=lengths),
        bigbird_attention(q, k, v, 4, every, lengths=lengths),
        attention(q, torch.eye(l, dtype=DOUBLE).T @ k, v, lengths=lengths),
    ):
        same(ours, full, lengths)
    scores = q @ (q / q.norm(dim=-1, keepdim=True)).transpose(-1, -2)
    mask = allowed(~torch.eye(l, dtype=torch.bool), lengths, False)
    rotations = torch.randn(1, 4, 2, 4, dtype=DOUBLE)
    same(lsh_attention(q, v, rotations, l, lengths), weighted(scores, mask, v), lengths)


@pytest.mark.parametrize("causal", [False, True])
def test_performer_features_are_positive_estimates_of_softmax(causal):
    """With many directions and small vectors, linear attention with these features is nearly
    softmax attention."""
    q, k, v = heads(20)
    q, k, lengths = 0.5 * q, 0.5 * k, torch.tensor([20, 9])
    W = torch.randn(20_000, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(3))
    fq = favor_features(q, W, query=True)
    fk = favor_features(k, W, query=False, causal=causal, lengths=lengths)
    assert (fq > 0).all() and (fk > 0).all()
    exact = attention(q, k, v, causal=causal, lengths=lengths)
    same(linear_attention(fq, fk, v, causal, lengths, eps=0.0), exact, lengths, 0.05)
    x = q.square().sum(-1, keepdim=True) / 4  # |x e^-1/4|^2 / 2
    exponent = q @ W[:7].T / 2**0.5
    ours = favor_features(q, W[:7], query=True, eps=1e-3)
    exact = (torch.exp(exponent - x - exponent.amax(-1, keepdim=True)) + 1e-3) / 7**0.5
    torch.testing.assert_close(ours, exact, rtol=0, atol=1e-12)


def test_ema_and_s4d_kernels_are_their_recurrences():
    c, d, n, l = 2, 3, 4, 200
    torch.manual_seed(0)
    delta, alpha, beta, gamma = (torch.randn(c, d, n, dtype=DOUBLE) for _ in range(4))
    p, state, K = delta.sigmoid(), torch.zeros(c, d, n, dtype=DOUBLE), []
    for t in range(l):
        state = (1 - p * alpha.sigmoid()) * state + p * beta * (t == 0)
        K.append((gamma * state).sum(-1) / n**0.5)
    ours = ema_kernel(*(v.float() for v in (delta, alpha, beta, gamma)), l)
    torch.testing.assert_close(ours.double(), torch.stack(K, -1), rtol=0, atol=1e-6)

    A = torch.complex(-torch.rand(d, n) - 0.1, 5 * torch.randn(d, n))
    B, C, dt = (
        torch.randn(d, n) + 0j,
        torch.randn(c, d, n, dtype=torch.complex64),
        torch.rand(d) * 0.1 + 1e-3,
    )
    dense = torch.diag_embed(A.to(torch.complex128))  # (d, n, n)
    step, eye = dt.double()[:, None, None] * dense, torch.eye(n, dtype=torch.complex128)
    Abar = torch.matrix_exp(step)
    x, K = (torch.linalg.solve(dense, Abar - eye) @ B.to(torch.complex128)[..., None])[..., 0], []
    for _ in range(l):
        K.append(2 * (C * x).sum(-1).real)
        x = (Abar @ x[..., None])[..., 0]
    exact = torch.stack(K, -1)
    ours = diagonal_kernel(*s4d_poles(A, B, C, dt), l).double()
    assert (ours - exact).abs().max() < 1e-5 * exact.abs().max()


def test_scan_by_doubling_is_the_loop():
    torch.manual_seed(0)
    v, log_lambda = (
        torch.randn(2, 301, 5, dtype=torch.complex64),
        torch.complex(-0.01 * torch.rand(5), torch.randn(5)),
    )
    x, exact = torch.zeros(2, 5, dtype=torch.complex128), []
    for t in range(301):
        x = log_lambda.to(torch.complex128).exp() * x + v[:, t]
        exact.append(x)
    exact = torch.stack(exact, 1)
    assert (diagonal_scan(log_lambda, v) - exact).abs().max() < 1e-6 * exact.abs().max()
    small = [x.to(torch.complex128).requires_grad_() for x in (log_lambda, v[:, :9])]
    assert torch.autograd.gradcheck(diagonal_scan, small)


# of one position, a chunk, chunks and a part of one,
@pytest.mark.parametrize("l", [1, 4, 7, 37, 64, 301])
def test_a_selective_scan_is_the_loop(l, monkeypatch):  # segments, of which the last is shorter
    """Values, gradients of all inputs; in the dtype of the inputs."""
    torch.manual_seed(l)
    monkeypatch.setitem(AT_ONCE, "cpu", 60 * 9)  # three examples, five channels, four states
    u, delta, B, C = (torch.randn(3, l, size, dtype=torch.float64) for size in (5, 5, 4, 4))
    inputs = [u, F.softplus(delta - 2), -torch.rand(5, 4, dtype=torch.float64) * 4, B, C]
    inputs = [value.detach().requires_grad_() for value in inputs]
    u_, delta_, A, B_, C_ = inputs
    s, y = 0, []
    for t in range(l):
        s = torch.exp(delta_[:, t, :, None] * A) * s + (delta_ * u_)[:, t, :, None] * B_[:, t, None]
        y.append((s * C_[:, t, None]).sum(-1))
    assert segments(u.transpose(0, 1), A) == {64: 4, 301: 9}.get(l, 1)
    fast, exact, weights = selective_scan(*inputs), torch.stack(y, 1), torch.randn_like(u)
    found, wanted = (torch.autograd.grad((weights * y).sum(), inputs) for y in (fast, exact))
    assert all((a - b).abs().max() < 1e-10 for a, b in zip((fast, *found), (exact, *wanted)))
    single = selective_scan(*(value.float() for value in inputs))
    assert single.dtype == torch.float32 and (single - exact).abs().max() < 1e-5 * exact.abs().max()
    if l in (7, 64):
        inputs = [
            value.detach().transpose(0, value.ndim - 2).contiguous().requires_grad_()
            for value in inputs
        ]
        torch.library.opcheck(torch.ops.zoo.selective, inputs)  # what --compile sees of it


def plain_recurrence(w, x, order):
    """LSTM or GRU in float64, one position after another: weights of a cell, x (l, d), positions in
    the order in which they are read -> (l, n)."""
    n = w["weight_hh"].shape[1]
    h, c, y = (
        torch.zeros(n, dtype=DOUBLE),
        torch.zeros(n, dtype=DOUBLE),
        torch.zeros(len(x), n, dtype=DOUBLE),
    )
    for t in order:
        reads, recalls = w["weight_ih"] @ x[t] + w["bias_ih"], w["weight_hh"] @ h + w["bias_hh"]
        if len(reads) == 4 * n:
            i, f, g, o = (reads + recalls).split(n)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        else:
            (r, z, new), (r_h, z_h, new_h) = reads.split(n), recalls.split(n)
            z = (z + z_h).sigmoid()
            h = (1 - z) * (new + (r + r_h).sigmoid() * new_h).tanh() + z * h
        y[t] = h
    return y


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_lstm_and_gru_are_their_recurrence(name, causal):
    """Forwards, and backwards from each sequence's own end, in float64; then the Linear."""
    torch.manual_seed(0)
    layer = MODELS[name].mixer(SimpleNamespace(d=6, directions=1 if causal else 2, forget=1.0))
    cells, out = (
        [{key: p.detach().double() for key, p in part.named_parameters()} for part in layer.cells],
        layer.out,
    )
    x = torch.randn(3, 20, 6)
    for lengths in (None, torch.tensor([20, 7, 1])):
        rows = []
        for row, end in zip(x.double(), (20, 20, 20) if lengths is None else lengths.tolist()):
            orders = (range(end), range(end - 1, -1, -1))
            rows.append(
                torch.cat([plain_recurrence(w, row, order) for w, order in zip(cells, orders)], -1)
            )
        exact = torch.stack(rows) @ out.weight.detach().double().T + out.bias.detach().double()
        same(layer(x, lengths).detach().double(), exact, lengths, 1e-5)
    if name == "lstm":  # torch's biases of the forget gate, and 1
        n, torch_s = layer.cells[0].hidden_size, torch.nn.LSTMCell(6, layer.cells[0].hidden_size)
        assert (
            layer.cells[0].bias_ih[n : 2 * n] > 0.4
        ).all() and torch_s.bias_ih.abs().max() < n**-0.5


def test_s4_steps_are_the_convolution_at_hippos_start():
    """N = 64 and steps from 1e-4 to 0.1: the hard case, where diagonalising Abar in float32 is
    wrong by 13 %."""
    torch.manual_seed(0)
    d, l = 4, 1024
    A, P, B = (v.expand(d, -1) for v in hippo_nplr(64))
    C, dt = (
        torch.randn(1, d, 32, dtype=torch.complex128),
        torch.tensor([1e-4, 1e-3, 1e-2, 0.1], dtype=DOUBLE),
    )
    corrected = truncation_correction(A, P, C, dt, l)
    found = s4_recover_C(A, P, corrected, dt, l)
    torch.testing.assert_close(found, C, rtol=0, atol=1e-10)
    u = torch.randn(2, d, l)
    y = fft_conv(u, s4_kernel(A, P, B, corrected, dt, l))
    single = [v.to(torch.complex64) for v in (A, P, B, found[0])]
    x, steps = torch.zeros(2, d, 32, dtype=torch.complex64), []
    for t in range(l):
        out, x = s4_step(*single, dt.float(), x, u[:, :, t])
        steps.append(out)
    assert (torch.stack(steps, -1) - y).norm() < 1e-4 * y.norm()


TASK = SimpleNamespace(length=96, vocab=30, channels=None)
# Of these the tests know which are causal, and which of those step. You may have others in zoo/.
KNOWN = {
    *[
        "transformer",
        "rotary",
        "s4",
        "s4_rand",
        "dlr",
        "dlr_rand",
        "bigbird",
        "dfout",
        "gru",
        "linear",
        "performer",
        "performer_relu",
        "linformer",
        "local",
        "longformer",
        "lru",
        "lstm",
        "mamba",
        "mega",
        "mega_chunk",
        "pythia",
        "pythia_rand",
        "reformer",
        "s4d",
        "s4d_inv",
        "s4d_legs",
        "s5",
        "sgconv",
        "spade",
    ]
}


def test_a_forward_pass_of_ones_own_does_not_inherit_a_step():
    """Else predict.py would generate from another model than was trained."""

    class Gated(Attention):
        def forward(self, x, lengths=None):
            return 2 * super().forward(x, lengths)

    backbone = causal_backbone("rotary")
    assert can_step(backbone)
    backbone.layers[1].mixer.__class__ = Gated
    assert not can_step(backbone)


def causal_backbone(model, task=TASK):
    torch.manual_seed(0)
    return Backbone(config(arch("listops_mini", model), task, causal=True)).eval()


@pytest.mark.parametrize("model", MODELS)
@torch.no_grad()
def test_a_model_one_step_at_a_time_is_the_whole_model(model):
    """Past one block, window and chunk, too. Models without steps say so."""
    causal, steps = (
        model not in ("linformer", "reformer"),
        model not in ("mega", "mega_chunk", "spade", "sgconv"),
    )
    try:
        backbone = causal_backbone(model)
    except SizeError as error:
        assert "no causal form" in str(error) and not (causal and model in KNOWN)
        return
    assert causal and (can_step(backbone) == steps or model not in KNOWN)
    if can_step(backbone):
        x, states, steps = torch.randint(0, 30, (2, 96)), None, []
        for t in range(96):
            y, states = backbone_step(backbone, x[:, t], t, states)
            steps.append(y)
        exact = backbone(x)
        assert (torch.stack(steps, 1) - exact).abs().max() < 1e-4 * exact.abs().max()


@pytest.mark.parametrize("n,m", [(12, 8), (8, 12), (12, 24)])
def test_structured_matrices_are_the_dense_ones_that_they_stand_for(n, m):
    """blockdense: block-diagonal, then dense. blockshuffle: two block-diagonal ones, and after each
    a transposition of (block, element). Parameters are counted by the formulas of Wei et al."""
    torch.manual_seed(0)
    x, bias, blocks = torch.randn(2, 5, n, dtype=DOUBLE), torch.randn(m, dtype=DOUBLE), 4
    q = min(n, m) // blocks
    shuffle = torch.eye(blocks * q, dtype=DOUBLE).view(q, blocks, -1).transpose(0, 1).flatten(0, 1)
    back = torch.eye(m, dtype=DOUBLE).view(blocks, m // blocks, -1).transpose(0, 1).flatten(0, 1)
    shapes = {
        "lowrank": ((3, n), (m, 3)),
        "blockdense": ((blocks, 2, n // blocks), (m, 8)),
        "blockshuffle": ((blocks, q, n // blocks), (blocks, m // blocks, q)),
    }
    for kind, (first, second) in (
        (kind, [torch.randn(s, dtype=DOUBLE) for s in two]) for kind, two in shapes.items()
    ):
        if kind == "lowrank":
            W = second @ first
        elif kind == "blockdense":
            W = second @ torch.block_diag(*first)
        else:
            W = back @ torch.block_diag(*second) @ shuffle @ torch.block_diag(*first)
        ours = structured_linear(x, first, second, bias, kind)
        torch.testing.assert_close(ours, x @ W.T + bias, rtol=0, atol=1e-10)

    for kind in shapes:
        c = SimpleNamespace(ffn=kind, ffn_share=0.5, ffn_blocks=4, guided=0.5)
        layer = StructuredLinear(64, 128, c).train()
        x = torch.randn(3, 64)
        product = structured_linear(x, layer.first, layer.second, layer.bias, kind)
        torch.testing.assert_close(layer(x), product, atol=1e-5, rtol=0)
        weights = layer.first.numel() + layer.second.numel()
        formulas = {
            "lowrank": 21 * (64 + 128),
            "blockdense": 28 * (128 + 16),
            "blockshuffle": 16 * (64 + 128),
        }
        assert weights == formulas[kind]
        plain = layer(x)
        for step, a in ((0, 1.0), (25, 0.5), (50, 0.0)):
            guide(layer, step, 100)
            assert abs(layer.a - a) < 1e-12
            # the guide begins as the product
            torch.testing.assert_close(layer(x), plain, atol=1e-5, rtol=0)
        guide(layer, 0, 100)
        layer(x).sum().backward()
        assert (
            layer.first.grad.abs().max() == layer.second.grad.abs().max() == 0
            and layer.guide.grad.abs().max() > 0
        )


def plain_mega(layer, x, raw, lengths, chunk, laplace, causal):
    """Moving-average gated attention in float64, position by position; x (b, l, d)."""
    sigma, silu = torch.sigmoid, lambda v: v * torch.sigmoid(v)
    w = {name: p.detach().double() for name, p in layer.named_parameters()}
    b, l, d = x.shape
    out = torch.zeros_like(raw)
    p = sigma(w["kernel.delta"])  # (c, d, h)
    q = 1 - p * sigma(w["kernel.alpha"])
    for i in range(b):
        end = l if lengths is None else int(lengths[i])
        y = torch.zeros(l, d, dtype=DOUBLE)
        for direction, order in enumerate([range(l), range(l - 1, -1, -1)][: 1 if causal else 2]):
            state = torch.zeros(d, p.shape[-1], dtype=DOUBLE)
            for t in order:
                u = x[i, t] if t < end else torch.zeros(d, dtype=DOUBLE)
                state = (
                    q[direction] * state + p[direction] * w["kernel.beta"][direction] * u[:, None]
                )
                y[t] += (w["kernel.gamma"][direction] * state).sum(-1) / p.shape[-1] ** 0.5
        averages = silu(y + w["omega"] * x[i])
        v = silu(x[i] @ w["values.weight"].T + w["values.bias"])
        gates = averages @ w["gates.weight"].T + w["gates.bias"]
        update, z, reset, own = gates.split((d, w["scale"].shape[1], v.shape[1], d), -1)
        query, key = (silu(z) * w["scale"][n] + w["shift"][n] for n in range(2))
        attended = torch.zeros(l, v.shape[1], dtype=DOUBLE)
        for t in range(end):
            start = t // chunk * chunk
            keys = [j for j in range(start, min(start + chunk, end)) if j <= t or not causal]
            bias = torch.stack([w["bias"][len(w["bias"]) // 2 + j - t] for j in keys])
            scores = key[keys] @ query[t]
            if laplace:
                scores = scores / len(keys) + bias
                weights = (1 + torch.erf((scores - 0.707107) / (0.282095 * 2**0.5))) / 2
            else:
                weights = (scores / len(query[t]) ** 0.5 + bias).softmax(0)
            attended[t] = weights @ v[keys]
        h = silu(own + (silu(reset) * attended) @ w["out.weight"].T + w["out.bias"])
        out[i] = sigma(update) * (h - raw[i])
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("attend", ["softmax", "laplace"])
@pytest.mark.parametrize("chunk", [None, 5])
def test_mega_is_its_formula(chunk, attend, causal):
    """Averages in both directions from lag 0, chunks that do not divide the length, padding, the
    number of keys."""
    torch.manual_seed(0)
    sizes = dict(
        d=6,
        v=10,
        z=4,
        averages=3,
        length=13,
        chunk=chunk,
        activation=attend,
        causal=causal,
        dropout=0.0,
        layer=0,
    )
    c = SimpleNamespace(**sizes, directions=1 if causal else 2)
    layer = Mega(c)
    for parameter in layer.parameters():  # at the start much is nearly 0
        parameter.data = torch.randn_like(parameter)
    x, raw = torch.randn(2, 13, 6), torch.randn(2, 13, 6)
    for lengths in (None, torch.tensor([13, 7])):
        ours = layer(x, lengths, raw).detach().double()
        exact = plain_mega(
            layer, x.double(), raw.double(), lengths, chunk or 13, attend == "laplace", causal
        )
        same(ours, exact, lengths, 1e-4)


@pytest.mark.parametrize("name", ["s5", "lru"])
def test_shared_states_are_their_recurrence(name):
    """Every position after the other in float64, forwards and backwards; then D, GELU and the
    gate."""
    torch.manual_seed(0)
    sizes = dict(
        d=6, state=8, n_ssm=2, dt_min=1e-2, dt_max=0.1, dt_lr="main", ssm_lr=1e-3, directions=2
    )
    sizes |= dict(r_min=0.9, r_max=0.99) if name == "lru" else {}
    defaults = {key: declared.default for key, declared in keys_of(name).items()}
    layer = MODELS[name].mixer(SimpleNamespace(**defaults | sizes))
    w = {key: p.detach().double() for key, p in layer.named_parameters()}
    B, C = (torch.view_as_complex(w[key].contiguous()) for key in ("B", "C"))
    if name == "s5":
        A = torch.complex(-w["A_log_re"].exp(), w["A_im"])
        assert len(A) == 4 and torch.equal(A[:2], A[2:])  # half of each of two equal blocks
        pole = (A * w["log_dt"].exp()).exp()
        B = ((pole - 1) / A)[:, None] * B
    else:
        pole = torch.exp(torch.complex(-w["nu"].exp(), w["theta"].exp()))
        assert pole.abs().min() >= 0.9 - 1e-6 and pole.abs().max() <= 0.99 + 1e-6
        torch.testing.assert_close(
            w["gamma"].exp(), (1 - pole.abs() ** 2).sqrt(), rtol=1e-4, atol=0
        )
        B = w["gamma"].exp()[:, None] * B
    u, y = torch.randn(2, 50, 6), torch.zeros(2, 50, 6, dtype=DOUBLE)
    for direction, order in enumerate((range(50), range(49, -1, -1))):
        x = torch.zeros(2, len(pole), dtype=torch.complex128)
        for t in order:
            x = pole * x + u[:, t].to(torch.complex128) @ B.T
            y[:, t] += (2 if name == "s5" else 1) * (x @ C[direction].T).real
    y = torch.nn.functional.gelu(y + w["D"] * u.double(), approximate="tanh")
    gate = y @ w["out.weight"].T + w["out.bias"]
    exact = y * gate.sigmoid() if name == "s5" else gate[..., :6] * gate[..., 6:].sigmoid()
    same(layer(u).detach().double(), exact, None, 1e-4)


def test_spade_joins_a_bare_s4_in_the_bottom_layer_only():
    torch.manual_seed(0)
    backbone = Backbone(config(arch("text_demo", "spade"), TASK))
    assert [layer.mixer.ssm is not None for layer in backbone.layers] == [True, False, False]
    bottom, x, raw = backbone.layers[0].mixer.eval(), torch.randn(2, 96, 64), torch.randn(2, 96, 64)
    K = bottom.ssm(96).detach()
    state = torch.zeros(2, 96, 64)
    for lag in range(96):  # position t itself counts once
        state[:, lag:] += K[0, :, lag] * x[:, : 96 - lag]
        state[:, : 95 - lag] += K[1, :, lag] * x[:, lag + 1 :]
    state = state + bottom.D * x
    ssm, bottom.ssm = bottom.ssm, None
    gates = bottom(x, None, raw)  # u (h - raw), without S4
    bottom.ssm = ssm
    averages = torch.nn.functional.silu(bottom.convolve(x, bottom.kernel(96), None, bottom.omega))
    update = bottom.gates(averages)[..., :64].sigmoid()
    h = gates / update + raw
    exact = update * (
        bottom.join(torch.cat((bottom.norm_ssm(state), bottom.norm_out(h)), -1)) - raw
    )
    same(bottom(x, None, raw).detach(), exact.detach(), None, 1e-3)


def test_parameters_are_those_of_the_specifications():
    """Layers with their norms at each task's own length, in millions as published; formulas where
    nothing is."""
    published = {
        "sgconv": dict(
            listops=0.29, text=0.87, retrieval=0.83, image=4.34, pathfinder=1.38, pathx=2.37
        ),
        "mega": dict(
            listops=0.58, text=0.92, retrieval=1.39, image=2.78, pathfinder=1.35, pathx=0.37
        ),
    }
    lengths = dict(
        listops=2000, text=4096, retrieval=4000, image=1024, pathfinder=1024, pathx=16384
    )

    def layers(task, model):
        outside = SimpleNamespace(length=lengths[task], vocab=10, channels=None)
        return sum(
            p.numel() for p in Backbone(config(arch(task, model), outside)).layers.parameters()
        )

    for model, tasks in published.items():
        for task, millions in tasks.items():
            assert abs(layers(task, model) / 1e6 - millions) < 0.01, (task, model)
    d, plain = 64, layers("image", "transformer")
    for model, more in dict(
        local=0,
        longformer=0,
        bigbird=0,
        linear=0,
        performer=0,
        performer_relu=0,
        reformer=-3 * (d * d + d),
        linformer=3 * 1024 * 16,
    ).items():
        assert layers("image", model) == plain + more, model
    n, d = 8, 128  # S5: Lambda, dt, B, two C, D, gate, norm; LRU: n = 256, a GLU
    assert layers("listops", "s5") == 8 * (3 * n + 2 * n * d + 4 * n * d + d + d * d + d + 2 * d)
    n, glu = 256, 2 * d * d + 2 * d
    assert layers("listops", "lru") == 6 * (3 * n + 2 * n * d + 4 * n * d + d + glu + 2 * d)
    # gates, two biases, Linear, norm
    assert layers("listops", "lstm") == 6 * (7 * 512**2 + 8 * 512 + 512 + 1024)
    assert layers("listops", "gru") == 6 * (5.5 * 512**2 + 6 * 512 + 512 + 1024)
    # S4D: dt, A, B a channel, two C; DFouT: 64 poles a channel, two W
    n, rest = 32, d + glu + 2 * d
    assert layers("listops", "s4d") == 8 * (d + 4 * d * n + 4 * d * n + rest)
    assert layers("listops", "dfout") == 8 * (2 * d * 64 + 4 * d * 64 + rest)
    # SPADE: one S4, D, two norms, and a Linear that joins both
    chunked = layers("text", "mega_chunk")
    assert layers("text", "mega") - chunked == 4 * 2 * (4096 - 128)
    assert layers("text", "spade") - chunked == (d + 6 * d * n + 4 * d * n) + d + 4 * d + (
        2 * d * d + d
    )


def test_starts_of_the_diagonal_models():
    """Frequencies as published, one number after the other; poles of a channel between those of the
    one before."""
    N, outside = 16, SimpleNamespace(length=64, vocab=10, channels=None)

    def kernel(model, **sizes):
        return (
            Backbone(config(arch("listops", model, layers=1, d=8, **sizes), outside))
            .layers[0]
            .mixer.kernel
        )

    scale = [math.sqrt(2 * i + 1) for i in range(N)]  # HiPPO plus its rank-one term
    normal = [
        [-scale[i] * scale[j] / 2 * ((i > j) - (i < j)) - (i == j) / 2 for j in range(N)]
        for i in range(N)
    ]
    legs = torch.linalg.eigvals(torch.tensor(normal, dtype=DOUBLE)).imag
    exact = {
        "s4d": [math.pi * n for n in range(8)],
        "s4d_inv": [16 / math.pi * (16 / (2 * n + 1) - 1) for n in range(8)],
        "s4d_legs": legs[legs > 0].tolist(),
    }
    for model, frequencies in exact.items():
        start = kernel(model, state=N, n_ssm=8)
        assert start.A_im.shape == (8, 8) and torch.allclose(
            start.A_log_re.exp(), torch.tensor(0.5)
        )
        ours = sorted(start.A_im[0].abs().tolist())
        assert ours == pytest.approx(sorted(frequencies), rel=1e-4), model
    torch.manual_seed(0)
    for name, p in (
        Backbone(config(arch("text", "mega", layers=1), outside)).layers[0].named_parameters()
    ):
        if name.endswith("bias") and name != "mixer.bias":
            assert not p.any(), name
        elif p.ndim == 2 and name.endswith("weight"):
            assert p.std().item() == pytest.approx(0.02, rel=0.05), name
    turns = kernel("dfout", state=N).Lambda_im / (2 * math.pi)  # (d, n), in turns
    assert torch.allclose(turns.T.flatten(), torch.arange(8 * N) / (8 * N))
    stretched = kernel("sgconv", piece=4, stretch=1)
    K = stretched(4 * 2 ** len(stretched.w)).detach()  # pieces of 8, 8, 16, 32 lags
    assert torch.allclose(K.norm(dim=-1), torch.ones(2, 8), atol=1e-4) and K.shape[-1] == 64
