"""The other ways to mix positions, against plain float64 forms: dense masks, loops, recurrences."""

import math
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from test_kernels import COMPLEX, DOUBLE, relative, seeded

import kernels
from kernels import attention, fft_conv, hippo_nplr, s4_kernel
from models import MODELS, Attention, Backbone, SizeError, config, keys_of
from recipes import arch, read_table
from use.recurrent import backbone_step, can_step, s4_recover_C, s4_step
from zoo.bigbird import bigbird_attention
from zoo.linear import favor_features, linear_attention
from zoo.longformer import Longformer
from zoo.reformer import lsh_attention
from zoo.scan import diagonal_scan
from zoo.selective import AT_ONCE, segments, selective_scan
from zoo.sgconv import sgconv_kernel
from zoo.structured import StructuredLinear, guide

NAMES = """transformer rotary s4 s4_rand dlr dlr_rand bigbird dfout gru linear performer
performer_relu linformer local longformer lru lstm mamba mega mega_chunk pythia pythia_rand reformer
s4d s4d_inv s4d_legs s5 sgconv spade"""
KNOWN = {*NAMES.split()}  # which are causal and which step; you may have others in zoo/
PHI = {"linear": lambda x: F.elu(x) + 1, "performer_relu": lambda x: F.relu(x) + 1e-3}
TASK = SimpleNamespace(length=80, vocab=30, channels=None)


def mixer(name, causal=False, **sizes):
    """A layer's mixer, with the defaults of its keys where no size is given."""
    c = {key: declared.default for key, declared in keys_of(name).items()} | MODELS[name].extras
    c |= dict(causal=causal, directions=1 if causal else 2, layer=0, dropout=0.0)
    torch.manual_seed(0)
    return MODELS[name].mixer(SimpleNamespace(**c | dict(dt_lr="main", ssm_lr=1e-3) | sizes))


def weights_of(layer):
    return {name: p.detach().double() for name, p in layer.named_parameters()}


def allowed(mask, lengths, causal):
    """A mask of (l, l) or (h, l, l) pairs, without padded keys and, if causal, later ones."""
    i = torch.arange(mask.shape[-1])
    mask = mask & (i <= i[:, None]) if causal else mask
    return mask if lengths is None else mask & (i < lengths[:, None, None, None])


def weighted(scores, mask, v):
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def same(ours, exact, lengths, tolerance=1e-10):
    """Equal at all real positions; finite elsewhere."""
    assert torch.isfinite(ours).all()
    for i, (a, b) in enumerate(zip(ours, exact)):
        end = None if lengths is None else lengths[i]
        torch.testing.assert_close(a[..., :end, :], b[..., :end, :], rtol=0, atol=tolerance)


@pytest.mark.parametrize("l", [1, 5, 23, 70])
def test_banded_block_sparse_and_linear_attention_are_their_dense_forms(l):
    q, k, v = torch.randn(3, 2, 3, l, 4, dtype=DOUBLE, generator=seeded(0))
    i, scores = torch.arange(l), q @ k.mT / 2  # 1 / sqrt(e)
    for ends, causal in product((None, [l, max(1, 2 * l // 5)]), (False, True)):
        lengths = ends and torch.tensor(ends)
        for window in (1, 2, 7, 200):
            band = SimpleNamespace(window=window, causal=causal)
            near = allowed((i[:, None] - i).abs() <= window // 2, lengths, causal)
            ours = Longformer.attend(band, q, k, v, lengths)
            same(ours, weighted(scores, near, v), lengths)
        for block in (2, 4):
            n = -(-l // block)
            random = torch.randint(0, n, (3, max(0, n - 2), 2), generator=seeded(1))
            pattern = torch.ones(3, n, n, dtype=torch.bool)
            for h, row in product(range(3), range(1, n - 1)):
                seen = {0, row - 1, row, row + 1, n - 1, *random[h, row - 1].tolist()}
                pattern[h, row] = torch.tensor([column in seen for column in range(n)])
            dense = pattern.repeat_interleave(block, 1).repeat_interleave(block, 2)[:, :l, :l]
            ours = bigbird_attention(q, k, v, block, random, causal, lengths)
            same(ours, weighted(scores, allowed(dense, lengths, causal), v), lengths)
        every = allowed(torch.ones(l, l, dtype=torch.bool), lengths, causal)
        for name, phi in PHI.items():
            weights = phi(q) @ phi(k).mT * every
            features = map(MODELS[name].extras["phi"], (q, k))
            exact = weights @ v / (weights.sum(-1, keepdim=True) + 1e-6)
            same(linear_attention(*features, v, causal, lengths), exact, lengths)


@pytest.mark.parametrize("l", [24, 23, 6])
def test_lsh_attention_is_sorting_and_cutting(l):
    """Chunk by chunk, one query after another. l = 23: the last chunk is filled up with padding."""
    chunk, rounds, half = 6, 3, 4
    q, v = torch.randn(2, 2, 2, l, 4, dtype=DOUBLE, generator=seeded(0))
    rotations = torch.randn(2, 4, rounds, half, dtype=DOUBLE, generator=seeded(2))
    size = -(-l // chunk) * chunk
    for lengths in (None, torch.tensor([l, 2 * l // 5])):
        exact = torch.zeros_like(v)
        for b, h in product(range(2), range(2)):
            end, rows = l if lengths is None else int(lengths[b]), []
            for r in range(rounds):
                turned = q[b, h] @ rotations[h, :, r]  # (l, half)
                bucket = torch.cat((turned, -turned), -1).argmax(-1)[:end].tolist()
                bucket += [2 * half] * (size - end)
                rows += sorted(range(size), key=lambda t: (bucket[t], t))
            parts = [[] for _ in range(end)]
            chunks = [rows[i : i + chunk] for i in range(0, len(rows), chunk)]
            for u, own in enumerate(chunks):
                keys = [j for j in chunks[u - 1] + own if j < end]  # chunk -1 is the last one
                for i in (i for i in own if i < end):
                    scores = q[b, h, keys] @ q[b, h, i] / q[b, h, keys].norm(dim=-1)
                    scores[torch.tensor(keys) == i] = -1e5
                    parts[i].append((scores.logsumexp(0), scores.softmax(0) @ v[b, h, keys]))
            for i, rounds_of_i in enumerate(parts):
                totals, values = map(torch.stack, zip(*rounds_of_i))
                exact[b, h, i] = totals.softmax(0) @ values
        same(lsh_attention(q, v, rotations, chunk, lengths), exact, lengths)


@pytest.mark.parametrize("causal", [False, True])
def test_performer_features_are_positive_estimates_of_softmax(causal):
    q, k, v = torch.randn(3, 2, 3, 20, 4, dtype=DOUBLE, generator=seeded(0))
    q, k, lengths = 0.5 * q, 0.5 * k, torch.tensor([20, 9])
    W = torch.randn(20_000, 4, dtype=DOUBLE, generator=seeded(3))
    fq = favor_features(q, W, query=True)
    fk = favor_features(k, W, query=False, causal=causal, lengths=lengths)
    assert (fq > 0).all() and (fk > 0).all()
    exact = attention(q, k, v, causal=causal, lengths=lengths)
    same(linear_attention(fq, fk, v, causal, lengths, eps=0.0), exact, lengths, 0.05)
    x, exponent = q.square().sum(-1, keepdim=True) / 4, q @ W[:7].T / 2**0.5  # |x e^-1/4|^2 / 2
    exact = (torch.exp(exponent - x - exponent.amax(-1, keepdim=True)) + 1e-3) / 7**0.5
    same(favor_features(q, W[:7], query=True, eps=1e-3), exact, None, 1e-12)


@pytest.mark.parametrize("name", ["dlr", "dfout", "s4d", "s5", "lru"])
def test_a_diagonal_layer_is_its_recurrence(name):
    """x[t] = p x[t-1] + B u[t], y[t] = Re C x[t] + D u[t] in both directions; then GELU, a gate.
    Backwards, kernels read strictly ahead, scans the position itself, too."""
    layer = mixer(name, d=6, state=8, n_ssm=2, dt_min=1e-2, dt_max=0.1)
    w = {key.removeprefix("kernel."): value for key, value in weights_of(layer).items()}
    B, C = (w[key].contiguous() for key in (("W", "W") if "W" in w else ("B", "C")))
    B, C = torch.view_as_complex(B), torch.view_as_complex(C)  # C (2, d, n)
    scan, pairs = name in ("s5", "lru"), 2 if name in ("s4d", "s5") else 1
    if name == "lru":
        p = torch.exp(torch.complex(-w["nu"].exp(), w["theta"].exp()))
        B = w["gamma"].exp()[:, None] * B
    elif pairs == 1:
        p, B = torch.exp(torch.complex(-(w["theta"] ** 2), w["Lambda_im"])), 1
    else:
        A, dt = torch.complex(-w["A_log_re"].exp(), w["A_im"]), w["log_dt"].exp()
        if not scan:  # channel i has copy i mod n_ssm
            A, B, dt = A.tile(3, 1), B.tile(3, 1), dt[:, None]
        p = (A * dt).exp()
        B = ((p - 1) / A)[:, None] * B if scan else (p - 1) / A * B
    u = torch.randn(2, 30, 6)
    y = w["D"] * u
    for direction, order in enumerate((range(30), range(29, -1, -1))):
        x = torch.zeros(2, len(p)) if scan else torch.zeros(2, 6, C.shape[-1])
        for t in order:
            now = u[:, t].to(COMPLEX)
            after = p * x + (now @ B.T if scan else now[..., None] * B)
            read = x if direction and not scan else after
            read = read @ C[direction].T if scan else (read * C[direction]).sum(-1)
            y[:, t] += pairs * read.real
            x = after
    y = F.gelu(y, approximate="tanh" if scan else "none")
    gate = y @ w["out.weight"].T + w["out.bias"]
    exact = y * gate.sigmoid() if name == "s5" else F.glu(gate)
    same(layer(u).detach().double(), exact, None, 1e-4)


def test_scan_by_doubling_is_the_loop():
    v = torch.randn(2, 301, 5, dtype=torch.complex64, generator=seeded(0))
    decay, turn = torch.rand(2, 5, generator=seeded(1))
    log_lambda = torch.complex(-0.01 * decay, 3 * turn)
    x, exact = 0, []
    for t in range(301):
        x = log_lambda.to(COMPLEX).exp() * x + v[:, t]
        exact.append(x)
    assert relative(diagonal_scan(log_lambda, v), torch.stack(exact, 1)) < 1e-6
    short = [value.to(COMPLEX).requires_grad_() for value in (log_lambda, v[:, :9])]
    assert torch.autograd.gradcheck(diagonal_scan, short)


# one position, a chunk and a part of one, chunks, segments, of which the last may be shorter
@pytest.mark.parametrize("l", [1, 7, 37, 64, 301])
def test_a_selective_scan_is_the_loop(l, monkeypatch):
    torch.manual_seed(l)
    monkeypatch.setitem(AT_ONCE, "cpu", 60 * 9)  # three examples, five channels, four states
    u, delta, B, C = (torch.randn(3, l, size, dtype=DOUBLE) for size in (5, 5, 4, 4))
    inputs = [u, F.softplus(delta - 2), -torch.rand(5, 4, dtype=DOUBLE) * 4, B, C]
    u, delta, A, B, C = inputs = [value.requires_grad_() for value in inputs]
    s, y = 0, []
    for t in range(l):
        s = torch.exp(delta[:, t, :, None] * A) * s + (delta * u)[:, t, :, None] * B[:, t, None]
        y.append((s * C[:, t, None]).sum(-1))
    assert segments(u.transpose(0, 1), A) == {64: 4, 301: 9}.get(l, 1)
    fast, exact, weights = selective_scan(*inputs), torch.stack(y, 1), torch.randn_like(u)
    gradients = (torch.autograd.grad((weights * y).sum(), inputs) for y in (fast, exact))
    for a, b in [(fast, exact), *zip(*gradients)]:
        assert (a - b).abs().max() < 1e-10
    single = selective_scan(*(value.float() for value in inputs))
    assert single.dtype == torch.float32 and relative(single, exact) < 1e-5
    if l in (7, 64):  # what --compile sees of it
        inputs = [v.detach().transpose(0, v.ndim - 2).contiguous().requires_grad_() for v in inputs]
        torch.library.opcheck(torch.ops.zoo.selective, inputs)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_lstm_and_gru_are_those_of_torch(name):
    """Forwards, and backwards from each sequence's own end, one by one; then the Linear."""
    x, network = torch.randn(3, 20, 6, generator=seeded(0)), dict(lstm=nn.LSTM, gru=nn.GRU)[name]
    for causal, ends in product((False, True), (None, [20, 7, 1])):
        layer, exact = mixer(name, causal, d=6), torch.zeros(3, 20, 6)
        n = 6 // len(layer.cells)
        torchs = network(6, n, batch_first=True, bidirectional=not causal)
        for suffix, cell in zip(("l0", "l0_reverse"), layer.cells):
            weights = {f"{key}_{suffix}": value for key, value in cell.state_dict().items()}
            torchs.load_state_dict(torchs.state_dict() | weights)
        for i, end in enumerate(ends or [20] * 3):
            exact[i, :end] = layer.out(torchs(x[i, None, :end])[0][0])
        lengths = ends and torch.tensor(ends)
        same(layer(x, lengths), exact, lengths, 1e-5)
    if name == "lstm":  # of the forget gate: torch's bias, within n^-0.5, and 1
        assert (layer.cells[0].bias_ih.chunk(4)[1] - 1).abs().max() < n**-0.5


def test_s4_steps_are_the_convolution_at_hippos_start():
    """The hard case: diagonalising Abar in float32 is wrong by 13 %."""
    d, l = 4, 1024
    A, P, B = (v.expand(d, -1) for v in hippo_nplr(64))
    C = torch.randn(1, d, 32, dtype=COMPLEX, generator=seeded(0))
    dt = torch.tensor([1e-4, 1e-3, 1e-2, 0.1], dtype=DOUBLE)
    corrected = kernels.truncation_correction(A, P, C, dt, l)
    recovered = s4_recover_C(A, P, corrected, dt, l)
    same(recovered, C, None)
    u = torch.randn(2, d, l, generator=seeded(1))
    y = fft_conv(u, s4_kernel(A, P, B, corrected, dt, l))
    single = [v.to(torch.complex64) for v in (A, P, B, recovered[0])]
    x, steps = torch.zeros(2, d, 32, dtype=torch.complex64), []
    for t in range(l):
        out, x = s4_step(*single, dt.float(), x, u[:, :, t])
        steps.append(out)
    assert (torch.stack(steps, -1) - y).norm() < 1e-4 * y.norm()


def causal_backbone(model):
    torch.manual_seed(0)
    return Backbone(config(arch("listops_mini", model, layers=2), TASK, causal=True)).eval()


def test_a_forward_pass_of_ones_own_does_not_inherit_a_step():
    """Else predict.py would generate from another model than was trained."""

    class Gated(Attention):
        def forward(self, x, lengths=None):
            return 2 * super().forward(x, lengths)

    backbone = causal_backbone("rotary")
    assert can_step(backbone)
    backbone.layers[1].mixer.__class__ = Gated
    assert not can_step(backbone)


@pytest.mark.parametrize("model", MODELS)
@torch.no_grad()
def test_a_model_one_step_at_a_time_is_the_whole_model(model):
    """Past one block, window and chunk, too. Models without steps say so."""
    causal = model not in ("linformer", "reformer")
    steps = model not in ("mega", "mega_chunk", "spade", "sgconv")
    try:
        backbone = causal_backbone(model)
    except SizeError as error:
        assert "no causal form" in str(error) and not (causal and model in KNOWN)
        return
    assert causal and (can_step(backbone) == steps or model not in KNOWN)
    if can_step(backbone):
        x, states, features = torch.randint(0, 30, (2, 80)), None, []
        for t in range(80):
            y, states = backbone_step(backbone, x[:, t], t, states)
            features.append(y)
        assert relative(torch.stack(features, 1), backbone(x)) < 1e-4


def stretched_pieces(w, l, multiplier, power, stretch):
    """SGConv's kernel from its definition, by NumPy's interpolation: (S, c, d, d0) -> (c, d, l)."""
    S, c, d, d0 = w.shape
    K = np.zeros((c, d, l))
    for direction, channel in np.ndindex(c, d):
        lags = []
        for i, piece in enumerate(w[:, direction, channel]):
            longer = 2 ** (max(0, i - 1) + stretch)
            at = (np.arange(d0 * longer) + 0.5) / longer - 0.5
            lags += [*np.interp(at, range(d0), piece) * multiplier[channel] ** (S - 1 - i)]
        lags = np.array(lags) * np.arange(1.0, len(lags) + 1) ** -power[channel]
        K[direction, channel, : len(lags)] = lags[:l]
    return torch.from_numpy(K)


def test_sgconv_kernel_is_stretched_pieces():
    multiplier, powers = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 0.5])
    for S, d0, stretch in ((1, 4, 0), (2, 3, 1), (4, 8, 0), (5, 1, 0), (4, 2, 3)):
        w = torch.randn(S, 2, 3, d0, generator=seeded(S))
        for l, power in product((1, 32, 192), (0 * powers, powers)):
            ours = sgconv_kernel(w, l, multiplier, power, stretch)
            exact = stretched_pieces(w.numpy(), l, multiplier.numpy(), power.numpy(), stretch)
            assert relative(ours.double(), exact) < 1e-6, (S, d0, stretch, l, power)
    for piece, stretch in ((32, 0), (4, 1)):
        kernel = mixer("sgconv", d=3, length=300, piece=piece, stretch=stretch).kernel
        start = kernel(512).detach()
        assert torch.allclose(start.norm(dim=-1), torch.ones(2, 3)), piece
        kernel.w.data *= 3
        assert torch.allclose(kernel(512), 3 * start), "training goes on, the divisor stays"


def transposition(rows, columns):
    eye = torch.eye(rows * columns)
    return eye.view(rows, columns, -1).transpose(0, 1).flatten(0, 1)


@pytest.mark.parametrize("kind", ["lowrank", "blockdense", "blockshuffle"])
def test_structured_matrices_are_the_dense_ones_that_they_stand_for(kind):
    """And have as many numbers as Wei et al. count. A guide begins as the product, and trains."""
    numbers = dict(lowrank=21 * 192, blockdense=28 * (128 + 16), blockshuffle=16 * 192)
    for n, m in ((128, 64), (64, 128), (64, 64)):
        c = SimpleNamespace(ffn=kind, ffn_share=0.5, ffn_blocks=4, guided=0.5)
        torch.manual_seed(0)
        layer, x = StructuredLinear(n, m, c), torch.randn(2, 3, n)
        nn.init.normal_(layer.bias)
        first, second = layer.first, layer.second
        assert (n, m) != (64, 128) or first.numel() + second.numel() == numbers[kind]
        W = first if kind == "lowrank" else torch.block_diag(*first)
        if kind == "blockshuffle":
            W = torch.block_diag(*second) @ transposition(min(n, m) // 4, 4) @ W
            W = transposition(4, m // 4) @ W
        else:
            W = second @ W
        exact = x @ W.T + layer.bias
        torch.manual_seed(0)
        if kind == "lowrank":  # the largest singular values of a Linear are kept
            kept, all_values = map(torch.linalg.svdvals, (W, nn.Linear(n, m).weight))
            assert torch.allclose(kept[: len(first)], all_values[: len(first)], atol=1e-5)
        for step, a in ((25, 0.5), (50, 0.0), (0, 1.0)):
            guide(layer, step, 100)
            assert abs(layer.a - a) < 1e-12, step
            same(layer(x), exact, None, 1e-5)
        layer(x).sum().backward()
        assert not first.grad.any() and not second.grad.any() and layer.guide.grad.any()
        same(layer.eval()(x), exact, None, 1e-5)


def plain_mega(layer, x, raw, end, chunk, laplace):
    """In float64 on one sequence x (l, d), averages position by position, attention by a mask."""
    w, silu, (l, d) = weights_of(layer), F.silu, x.shape
    i, y = torch.arange(l), w["omega"] * x
    p, u = w["kernel.delta"].sigmoid(), x * (i < end)[:, None]  # p (c, d, h)
    q = 1 - p * w["kernel.alpha"].sigmoid()
    for direction in range(len(p)):  # both from lag 0
        state = torch.zeros_like(p[0])
        for t in i.flip(0) if direction else i:
            enters = p[direction] * w["kernel.beta"][direction] * u[t, :, None]
            state = q[direction] * state + enters
            y[t] += (w["kernel.gamma"][direction] * state).sum(-1) / p.shape[-1] ** 0.5
    v = silu(F.linear(x, w["values.weight"], w["values.bias"]))
    gates = F.linear(silu(y), w["gates.weight"], w["gates.bias"])
    update, z, reset, own = gates.split((d, w["scale"].shape[1], v.shape[1], d), -1)
    query, key = (silu(z) * w["scale"][n] + w["shift"][n] for n in range(2))
    seen = (i // chunk == i[:, None] // chunk) & (i < end)
    seen = seen & (i <= i[:, None]) if len(p) == 1 else seen
    place = len(w["bias"]) // 2 + i - i[:, None]
    scores, bias = query @ key.T, w["bias"][place.clamp(0, len(w["bias"]) - 1)]
    if laplace:
        scores = scores / seen.sum(-1, keepdim=True) + bias
        weights = (1 + torch.erf((scores - 0.707107) / (0.282095 * 2**0.5))) / 2 * seen
    else:
        weights = weighted(scores / z.shape[1] ** 0.5 + bias, seen, torch.eye(l).double())
    h = silu(own + F.linear(silu(reset) * (weights @ v), w["out.weight"], w["out.bias"]))
    return update.sigmoid() * (h - raw)


@pytest.mark.parametrize("attend", ["softmax", "laplace"])
def test_mega_is_its_formula(attend):
    for causal, chunk in product((False, True), (None, 5)):
        sizes = dict(d=6, v=10, z=4, averages=3, length=13, chunk=chunk, activation=attend)
        layer = mixer("mega", causal, **sizes)
        for parameter in layer.parameters():  # at the start much is nearly 0
            parameter.data = torch.randn_like(parameter)
        x, raw = torch.randn(2, 2, 13, 6)
        for ends in (None, [13, 7]):
            rows = zip(x.double(), raw.double(), ends or (13, 13))
            exact = [plain_mega(layer, *row, chunk or 13, attend == "laplace") for row in rows]
            lengths = ends and torch.tensor(ends)
            same(layer(x, lengths, raw).detach().double(), exact, lengths, 1e-4)


@torch.no_grad()
def test_spade_joins_a_bare_s4_in_the_bottom_layer_only():
    torch.manual_seed(0)
    backbone = Backbone(config(arch("text_demo", "spade"), TASK))
    assert [layer.mixer.ssm is not None for layer in backbone.layers] == [True, False, False]
    bottom, (x, raw) = backbone.layers[0].mixer.eval(), torch.randn(2, 2, 80, 64)
    state = kernels.fft_conv_naive(x.mT, bottom.ssm(80), bottom.D).mT
    ours, bottom.ssm = bottom(x, None, raw), None
    without = bottom(x, None, raw)  # u (h - raw), without S4
    averages = F.silu(bottom.convolve(x, bottom.kernel(80), None, bottom.omega))
    update = bottom.gates(averages)[..., :64].sigmoid()
    h = without / update + raw
    joined = bottom.join(torch.cat((bottom.norm_ssm(state), bottom.norm_out(h)), -1))
    same(ours, update * (joined - raw), None, 1e-3)


# Layers with their norms, at each task's own length, in millions as published.
PUBLISHED = """
model  listops:2000 text:4096 retrieval:4000 image:1024 pathfinder:1024 pathx:16384
sgconv         0.29      0.87           0.83       4.34            1.38        2.37
mega           0.58      0.92           1.39       2.78            1.35        0.37
"""


def test_parameters_are_those_of_the_specifications():
    def layers(task, model, length=1024):
        outside = SimpleNamespace(length=length, vocab=10, channels=None)
        backbone = Backbone(config(arch(task, model), outside))
        return sum(p.numel() for p in backbone.layers.parameters())

    for row in read_table(PUBLISHED):
        model = row.pop("model")
        for (task, length), millions in ((key.split(":"), row[key]) for key in row):
            number = layers(task, model, int(length))
            assert abs(number / 1e6 - float(millions)) < 0.01, (task, model, number)
    d, plain = 64, layers("image", "transformer")
    more = dict.fromkeys(("local", "longformer", "bigbird", "linear", *PHI, "performer"), 0)
    for model, number in (more | dict(reformer=-3 * (d * d + d), linformer=3 * 1024 * 16)).items():
        assert layers("image", model) == plain + number, model


def test_models_start_where_the_specifications_say():
    """DFouT's poles lie between those of the channel before, LRU's in a ring; states keep size."""
    N = 16

    def start_of(model, **sizes):
        layer = mixer(model, **dict(d=8, state=N, n_ssm=8, dt_min=1e-2, dt_max=0.1) | sizes)
        return getattr(layer, "kernel", layer)

    scale = torch.sqrt(2 * torch.arange(N, dtype=DOUBLE) + 1)  # HiPPO plus its rank-one term
    skew = (scale[:, None] * scale / -2).tril(-1)
    legs = torch.linalg.eigvals(skew - skew.T).imag
    n = torch.arange(8.0)
    inv = N / math.pi * (N / (2 * n + 1) - 1)
    for model, exact in (("s4d", math.pi * n), ("s4d_inv", inv), ("s4d_legs", legs[legs > 0])):
        start, exact = start_of(model), exact.float().sort().values
        assert torch.allclose(start.A_im.abs().sort().values, exact.expand(8, -1)), model
        assert torch.allclose(start.A_log_re.exp(), torch.tensor(0.5)), model
    for model, poles in (("dlr", N), ("dfout", 8 * N)):
        start, turns = start_of(model), 2 * math.pi * torch.arange(poles) / poles
        assert torch.allclose(start.Lambda_im.view(-1, N).mT.flatten(), turns), model
        assert 0.005 - 1e-6 < start.theta.square().min() < start.theta.square().max() < 0.05 + 1e-6
        assert 0.8 < N * start.W.std() < 1.2
    assert torch.equal(*start_of("s5", n_ssm=2).A_im.chunk(2)), "two equal blocks"
    ring = start_of("lru", r_min=0.9, r_max=0.99)
    size = torch.exp(-ring.nu.exp())
    assert size.min() >= 0.9 - 1e-6 and size.max() <= 0.99 + 1e-6
    torch.testing.assert_close(ring.gamma.exp(), (1 - size**2).sqrt(), rtol=1e-4, atol=0)
    for model in ("mega", "pythia_rand"):
        block = Backbone(config(arch("text", model, layers=1), TASK, causal=True)).layers[0]
        for name, p in block.named_parameters():
            if name.endswith("weight") and p.ndim == 2:
                assert p.std().item() == pytest.approx(0.02, rel=0.05), name
            assert not name.endswith("bias") or name == "mixer.bias" or not p.any(), name
