"""kernels.py against oracles that share no code with it: float64 recurrences, direct sums, dense
softmax."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT

import kernels
from kernels import (
    attention,
    diagonal_kernel,
    diagonal_kernel_naive,
    fft_conv,
    fft_conv_naive,
    hippo_nplr,
    rotary,
    s4_kernel,
    s4_kernel_naive,
    ssm_scan,
    truncation_correction,
)
from zoo.sgconv import sgconv_kernel

COMPLEX = torch.complex128


def random_s4(d, N, c, l, dt_min=1e-3, dt_max=0.1, dtype=torch.complex64, seed=0):
    """HiPPO-initialised arguments of `s4_kernel` (A, P, B, C~, dt) with random C and log-uniform
    dt."""
    generator = torch.Generator().manual_seed(seed)
    A, P, B = (v.expand(d, -1).contiguous() for v in hippo_nplr(N))  # (d, n)
    C = torch.randn(c, d, N // 2, dtype=COMPLEX, generator=generator)
    dt = (
        torch.exp(
            torch.rand(d, generator=generator, dtype=torch.float64) * math.log(dt_max / dt_min)
        )
        * dt_min
    )
    C = truncation_correction(A, P, C, dt, l)
    return [v.to(dtype) for v in (A, P, B, C)] + [dt.to(dtype.to_real())]


def relative(ours, exact):
    return ((ours - exact).abs().max() / exact.abs().max()).item()


def all_states(v):
    """Both of each conjugate pair, in double precision: (..., n) -> (..., N)."""
    return torch.cat((v, v.conj()), -1).to(COMPLEX)


def dense_s4(A, P, B, C, dt, l):
    """K[k] = C Abar^k Bbar over all N states, one float64 step after another. C is uncorrected."""
    A, P, B, C = (all_states(v) for v in (A, P, B, C))
    dt, eye, K = dt.double()[:, None, None], torch.eye(A.shape[-1], dtype=COMPLEX), []
    # (d, N, N)
    half_step = dt / 2 * (torch.diag_embed(A) - P[..., :, None] * P.conj()[..., None, :])
    inverse = torch.linalg.inv(eye - half_step)
    step, x = inverse @ (eye + half_step), inverse @ (dt * B[..., None])  # x (d, N, 1)
    for _ in range(l):
        K.append((C * x[..., 0]).sum(-1).real)  # (c, d)
        x = step @ x
    return torch.stack(K, -1)


def uncorrected(A, P, B, C_tilde, dt, l):
    """C from C~ = C (I - Abar^l), solved densely in float64, so that the oracle starts from what
    the kernel gets."""
    Abar, _ = kernels.discretize(A.to(COMPLEX), P.to(COMPLEX), B.to(COMPLEX), dt.double())
    gap = torch.eye(Abar.shape[-1], dtype=COMPLEX) - torch.linalg.matrix_power(Abar, l)
    C = torch.linalg.solve(gap.transpose(-1, -2), all_states(C_tilde).permute(1, 2, 0))  # (d, N, c)
    return C.permute(2, 0, 1)[..., : A.shape[-1]]  # (c, d, n)


def value_and_gradients(form, arguments, weight, *l):
    """What a form makes of its arguments, then their gradients of its weighted sum, all in double
    precision."""
    leaves = [v.detach().clone().requires_grad_() for v in arguments]
    value = form(*leaves, *l)
    (value * weight).sum().backward()
    return [v.to(COMPLEX) for v in (value.detach(), *(leaf.grad for leaf in leaves))]


def errors(fast, oracle, arguments, weight, *l):
    """Relative errors of the value and of every gradient, against the oracle's autograd in
    float64."""
    double = [v.to(torch.promote_types(v.dtype, torch.float64)) for v in arguments]
    pairs = zip(
        value_and_gradients(fast, arguments, weight, *l),
        value_and_gradients(oracle, double, weight, *l),
    )
    return [relative(ours, exact) for ours, exact in pairs if exact.abs().max() > 0]


# ---- S4 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("l", [1, 2, 3, 17, 64, 100, 255, 1021])
@pytest.mark.parametrize("dt_range", [(1e-4, 1e-3), (1e-3, 0.1), (1.0, 10.0)])
def test_s4_kernel_is_the_recurrence(l, dt_range):
    for N in (2, 64):
        A, P, B, C, dt = random_s4(6, N, 2, l, *dt_range, seed=l)
        ours = s4_kernel(A, P, B, C, dt, l)
        assert (
            relative(ours.double(), dense_s4(A, P, B, uncorrected(A, P, B, C, dt, l), dt, l)) < 1e-4
        )
        # channels may share states
        assert relative(s4_kernel(A[:1], P[:1], B[:1], C, dt, l), ours) < 1e-5


def test_s4_kernel_with_poles_close_to_roots_of_unity():
    """Poles put on purpose a hair's breadth from an l-th root of unity, where the Cauchy sums
    nearly divide by zero."""
    l, n = 96, 4
    angle = 2 * math.pi * torch.tensor([1.0, 5.0, 11.0, 30.0], dtype=torch.float64) / l
    p = 0.9999999 * torch.polar(torch.ones(n, dtype=torch.float64), -angle)
    dt = torch.tensor([0.01, 0.3], dtype=torch.float64)
    A = 2 / dt[:, None] * (p - 1) / (p + 1)
    assert (1 - p**l).abs().max() < 2e-5
    generator = torch.Generator().manual_seed(0)
    P, B = (torch.randn(2, n, dtype=COMPLEX, generator=generator) for _ in range(2))
    C = torch.randn(2, 2, n, dtype=COMPLEX, generator=generator)
    C_tilde = kernels.truncation_correction(A, P, C, dt, l)
    assert relative(s4_kernel(A, P, B, C_tilde, dt, l).double(), dense_s4(A, P, B, C, dt, l)) < 1e-4


@pytest.mark.parametrize(
    "l, N, tolerance", [(16, 8, 1e-4), (33, 8, 1e-4), (1024, 64, 1e-2), (2001, 64, 1e-2)]
)
def test_s4_kernel_and_its_gradients_are_those_of_the_textbook(l, N, tolerance):
    """dt's gradient is the hardest: it moves every pole at once."""
    weight = torch.randn(2, 5, l, generator=torch.Generator().manual_seed(1))
    *others, of_dt = errors(s4_kernel, s4_kernel_naive, random_s4(5, N, 2, l), weight, l)
    assert max(others) < tolerance / 10 and of_dt < tolerance


def test_s4_kernel_and_convolution_are_the_scan():
    l = 60
    A, P, B, C, dt = random_s4(4, 8, 1, l, dtype=COMPLEX)
    Abar, Bbar = kernels.discretize(A, P, B, dt)
    C_raw = uncorrected(A, P, B, C, dt, l)
    u = torch.randn(2, 4, l, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = ssm_scan(Abar, Bbar, all_states(C_raw)[0], u)
    assert relative(fft_conv(u.float(), s4_kernel(A, P, B, C, dt, l)).double(), exact) < 1e-4


@pytest.mark.parametrize("l, r", [(1, 1), (2, 3), (7, 2), (64, 1), (65, 6), (100, 40)])
def test_geometric_sums_and_their_gradients_are_those_of_the_plain_sum(l, r):
    """In float64, and once more by finite differences."""
    generator = torch.Generator().manual_seed(l)
    V = torch.randn(2, r, 3, dtype=COMPLEX, generator=generator)
    log_p = torch.complex(
        -torch.rand(2, 3, generator=generator).double(), 3 * torch.randn(2, 3).double()
    )

    def plain(V, log_p):
        return (V[..., None] * torch.exp(log_p[:, None, :, None] * torch.arange(l))).sum(2).real

    def fast(V, log_p):
        return kernels.geometric_sums(V, log_p, l, torch.float64)

    weight = torch.randn(2, r, l, dtype=torch.float64, generator=generator)
    assert max(errors(fast, plain, [V, log_p], weight)) < 1e-12
    if l < 10:
        assert torch.autograd.gradcheck(fast, [V.requires_grad_(), log_p.requires_grad_()])


def test_the_derivation_of_the_kernel_holds_step_by_step():
    """The text at the head of part 3 of kernels.py, number by number, in float64, at every root of
    unity."""
    generator, N, l = torch.Generator().manual_seed(0), 6, 32
    P, B, C = torch.randn(3, N, dtype=COMPLEX, generator=generator)
    A = torch.complex(-torch.rand(N, dtype=torch.float64, generator=generator) - 0.1, P.real)
    dt = torch.tensor(0.3, dtype=torch.float64)
    h, eye, w = (
        dt / 2,
        torch.eye(N, dtype=COMPLEX),
        torch.exp(torch.arange(l).to(COMPLEX) * (-2j * math.pi / l)),
    )
    A_full = torch.diag(A) - P[:, None] * P.conj()
    inverse = torch.linalg.inv(eye - h * A_full)
    Abar, Bbar = inverse @ (eye + h * A_full), inverse @ (dt * B)
    K = torch.stack([C @ torch.linalg.matrix_power(Abar, k) @ Bbar for k in range(l)])
    spectrum = torch.fft.fft(K)
    C_tilde = C @ (eye - torch.linalg.matrix_power(Abar, l))

    def holds(found, exact=spectrum):
        assert relative(torch.as_tensor(found), exact) < 1e-8

    # 1  powers become one inverse
    holds(torch.stack([C_tilde @ torch.linalg.inv(eye - v * Abar) @ Bbar for v in w]))
    # 2  the discretisation cancels
    brackets = [(1 - v) * eye - h * (1 + v) * A_full for v in w]
    for v, bracket in zip(w, brackets):
        holds(inverse @ bracket, eye - v * Abar)
    holds(torch.stack([dt * C_tilde @ torch.linalg.inv(bracket) @ B for bracket in brackets]))
    # 3  the inverse is a sum, which Woodbury's identity inverts
    D, g = (1 - w) - h * (1 + w) * A[:, None], h * (1 + w)  # (N, l), (l,)
    for i, bracket in enumerate(brackets):
        holds(torch.diag(D[:, i]) + g[i] * P[:, None] * P.conj(), bracket)
        inverse_D = torch.diag(1 / D[:, i])
        PP = P.conj() @ inverse_D @ P
        low_rank = inverse_D @ (P[:, None] * P.conj()) @ inverse_D / (1 + g[i] * PP)
        holds(inverse_D - g[i] * low_rank, torch.linalg.inv(bracket))

    def cauchy(v):
        return (v[:, None] / D).sum(0)

    CB, CP, PB, PP = (cauchy(v) for v in (C_tilde * B, C_tilde * P, P.conj() * B, P.conj() * P))
    holds(dt * (CB - g * CP * PB / (1 + g * PP)))
    # 4  a Cauchy sum is a spectrum
    a = h * A
    p, k = (1 + a) / (1 - a), torch.arange(l)
    holds((1 - a)[:, None] * (1 - w * p[:, None]), D)
    geometric = ((C_tilde * B / ((1 - a) * (1 - p**l)))[:, None] * p[:, None] ** k).sum(0)  # (l,)
    holds(torch.fft.fft(geometric), CB)
    # 5  nothing large cancels
    beta = 0.7
    holds(beta * CP - g * CP * beta * PP / (1 + g * PP), beta * CP / (1 + g * PP))
    rest = B - beta * P
    holds(dt * (cauchy(C_tilde * rest) + CP * (beta - g * cauchy(P.conj() * rest)) / (1 + g * PP)))
    holds((1 + w) * (1 + a)[:, None], 2 - D)
    holds((h / (1 + a))[:, None] * (2 / D - 1), g / D)
    holds(dt / ((1 + a)[:, None] * D) - (h / (1 + a))[:, None], g / D)
    A, P, B = hippo_nplr(16)
    assert (B - math.sqrt(2) * P).abs().max() < 1e-10 * B.abs().max()


def test_what_hippos_state_remembers():
    """Legendre polynomials of the past on the clock e^-s: e^(s A) B, and what the state says of a
    signal."""
    N, n = 12, torch.arange(12, dtype=torch.float64)
    B = torch.sqrt(2 * n + 1)
    A = -torch.tril(B[:, None] * B, -1) - torch.diag(n + 1)
    for s in (0.0, 0.3, 2.0):
        L = B * torch.tensor(
            [np.polynomial.Legendre.basis(i)(2 * math.exp(-s) - 1) for i in range(N)]
        )
        ours = torch.linalg.matrix_exp(s * A) @ B
        assert (ours - math.exp(-s) * L).abs().max() < 1e-8


def test_hippo_is_legs():
    """The same matrix in another basis: the same traces of powers, and a unitary change of basis
    for A^i B."""
    N = 32
    A, P, B = hippo_nplr(N)
    k = torch.arange(N, dtype=torch.float64)
    legs = -torch.sqrt((2 * k[:, None] + 1) * (2 * k + 1)).tril(-1) - torch.diag(k + 1)
    ours = torch.diag(all_states(A)) - torch.outer(all_states(P), all_states(P).conj())
    powers = [[torch.linalg.matrix_power(matrix, i) for i in range(5)] for matrix in (ours, legs)]
    assert all(abs(torch.trace(a) / torch.trace(b) - 1) < 1e-9 for a, b in zip(*powers))
    krylov, legs_krylov = (
        torch.stack([power @ v for power in some])  # (5, N)
        for some, v in zip(powers, (all_states(B), torch.sqrt(2 * k + 1)))
    )
    assert ((krylov.conj() @ krylov.T) / (legs_krylov @ legs_krylov.T) - 1).abs().max() < 1e-9
    assert (A.imag < 0).all() and (A.imag.diff() > 0).all()
    with pytest.raises(ValueError, match="even"):
        hippo_nplr(7)


# ---- diagonal kernels, convolution ---------------------------------------------------------------


def dense_diagonal(W, Lambda, l):
    """K[k] = Re sum_n W p^k with p = e^Lambda, one step after another."""
    K, x = [], torch.exp(0 * Lambda)
    for _ in range(l):
        K.append((W * x).sum(-1).real)  # (c, d)
        x = x * torch.exp(Lambda)
    return torch.stack(K, -1)


@pytest.mark.parametrize("l", [1, 2, 5, 31, 400, 1021])
@pytest.mark.parametrize("poles", [(24,), (3, 24)])
def test_diagonal_kernel_is_the_recurrence(l, poles):
    """And its gradients, for poles that decay, stand still and turn fast, shared by all channels or
    not."""
    generator = torch.Generator().manual_seed(l)
    decay, turn = torch.rand(2, *poles, generator=generator)
    Lambda = torch.complex(-0.05 * decay, 6.28 * turn)
    Lambda[..., :3] = torch.tensor([0, 3.1j, -0.5 + 6j])
    W = torch.randn(2, 3, 24, dtype=torch.complex64, generator=generator)
    weight = torch.randn(2, 3, l, generator=generator)
    of_value, *of_gradients = errors(diagonal_kernel, dense_diagonal, (W, Lambda), weight, l)
    assert of_value < 1e-5 and max(of_gradients) < 1e-3
    W, Lambda = W.to(COMPLEX), Lambda.to(COMPLEX)
    assert relative(diagonal_kernel_naive(W, Lambda, l), dense_diagonal(W, Lambda, l)) < 1e-9


def toeplitz(u, K, D=None):
    """The convolution as a product with a dense matrix, T[t, s] = K[0, t-s] or K[1, s-t-1]."""
    lag = torch.arange(u.shape[-1])[:, None] - torch.arange(u.shape[-1])
    T = torch.where(lag >= 0, K[0][:, lag.clamp(min=0)], 0)
    if len(K) == 2:
        T = T + torch.where(lag < 0, K[1][:, (-lag - 1).clamp(min=0)], 0)
    if D is not None:
        T = T + D[:, None, None] * torch.eye(len(lag))
    return torch.einsum("dts,bds->bdt", T, u)


@pytest.mark.parametrize("l", [1, 2, 7, 97, 130])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("skip", [False, True])
def test_fft_conv_and_its_gradients_are_those_of_the_direct_sum(l, directions, skip):
    generator = torch.Generator().manual_seed(l)
    u, weight = torch.randn(2, 3, 2, l, generator=generator)
    K = torch.randn(directions, 2, l, generator=generator)
    arguments = (u, K, torch.randn(2, generator=generator)) if skip else (u, K)
    assert max(errors(fft_conv, toeplitz, arguments, weight)) < 1e-5
    assert max(errors(fft_conv_naive, toeplitz, arguments, weight)) < 1e-5
    # a kernel longer than the input is cut
    longer = torch.cat((K, torch.ones(directions, 2, 5)), -1)
    assert torch.allclose(fft_conv(u, longer), fft_conv(u, K), atol=1e-6)
    assert torch.allclose(fft_conv_naive(u, longer), fft_conv_naive(u, K))


@pytest.mark.parametrize(
    "kernel, limit",
    [
        (
            "s4_kernel(*(v.requires_grad_() for v in random_s4(256, 64, 2, 65536, dt_min=1e-4)), "
            "65536)",
            4e6,
        ),
        (
            "diagonal_kernel(torch.randn(2, 256, 1024, dtype=torch.complex64, requires_grad=True),"
            "                torch.complex(-torch.rand(1024), torch.rand(1024)).requires_grad_(), "
            "16384)",
            2e6,
        ),
    ],
    ids=["s4", "dlr"],
)
def test_memory_at_full_size(kernel, limit):
    """One layer of PathX-256 with S4, of PathX with DLR, both directions, forward and backward: KiB
    of the process. One tensor of directions, channels, states and lags would take 9 and 69 GB."""
    program = (
        "import resource, sys, torch; from kernels import *; sys.path += ['tests']; from "
        "test_kernels import *\n"
        f"{kernel}.square().sum().backward()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert int(done.stdout) < limit, done.stderr


def test_kernels_ignore_autocast():
    arguments, generator = random_s4(4, 8, 2, 64), torch.Generator().manual_seed(0)
    u, w = torch.randn(2, 4, 64, generator=generator), torch.randn(3, 2, 4, 8, generator=generator)

    def made():
        K = s4_kernel(*arguments, 64)
        return (
            K,
            fft_conv(u, K),
            diagonal_kernel(arguments[3], arguments[0], 64),
            sgconv_kernel(w, 64, torch.ones(4), torch.zeros(4), 0),
        )

    outside = made()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, made(), outside))


# ---- SGConv --------------------------------------------------------------------------------------


def stretched_pieces(w, l, multiplier, power, init_scale):
    """SGConv's kernel lag by lag, from its definition, by NumPy's interpolation: (S, c, d, d0) ->
    (c, d, l)."""
    S, c, d, d0 = w.shape
    K = torch.zeros(c, d, l, dtype=torch.float64)
    for direction, channel in np.ndindex(c, d):
        lags = []
        for i, piece in enumerate(w[:, direction, channel].tolist()):
            stretch = 2 ** (max(0, i - 1) + init_scale)
            for t in range(d0 * stretch):
                value = np.interp((t + 0.5) / stretch - 0.5, range(d0), piece)  # holds the ends
                decay = (len(lags) + 1) ** -power[channel].item()
                lags.append(multiplier[channel].item() ** (S - 1 - i) * value * decay)
        K[direction, channel, : len(lags)] = torch.tensor(lags)[:l]
    return K


@pytest.mark.parametrize("l", [1, 7, 32, 100, 192])  # 192 is past the end of all these kernels
@pytest.mark.parametrize(
    "S, d0, init_scale", [(1, 4, 0), (2, 3, 1), (4, 8, 0), (5, 1, 0), (4, 2, 3)]
)
@pytest.mark.parametrize("powered", [False, True])
def test_sgconv_kernel_is_stretched_pieces(l, S, d0, init_scale, powered):
    generator = torch.Generator().manual_seed(S)
    w, direction = torch.randn(2, S, 2, 3, d0, generator=generator)
    multiplier, power = torch.tensor([1.0, 2.0, 3.0]), powered * torch.tensor([0.0, 1.0, 0.5])
    ours = sgconv_kernel(w.requires_grad_(), l, multiplier, power, init_scale)
    assert ours.dtype == torch.float32 and ours.shape == (2, 3, l)
    assert relative(ours.double(), stretched_pieces(w, l, multiplier, power, init_scale)) < 1e-6
    # The kernel is linear in w, so its derivative in a direction is the kernel of that direction.
    weight = torch.randn(2, 3, l, generator=generator)
    ours.backward(weight)
    exact = (stretched_pieces(direction, l, multiplier, power, init_scale) * weight).sum()
    assert torch.allclose((w.grad * direction).sum().double(), exact, rtol=1e-5, atol=1e-4)


# ---- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("l", [1, 5, 16, 37])
@pytest.mark.parametrize("block", [None, 4, 8, 64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_attention_is_the_dense_mask(l, block, causal, padded):
    """An explicit float64 softmax over the keys each query may see; queries past the end are
    finite, no more."""
    generator = torch.Generator().manual_seed(l)
    q, k, v = torch.randn(3, 3, 2, l, 8, generator=generator)
    lengths = torch.tensor([l, max(1, l // 2), 1]) if padded else torch.tensor([l, l, l])
    i, j = torch.arange(l)[:, None], torch.arange(l)
    real = j < lengths[:, None]  # (b, l)
    allowed = real[:, None, None, :].expand(3, 2, l, l)
    if block:
        allowed = allowed & ((i // block - j // block).abs() <= 1)
    if causal:
        allowed = allowed & (j <= i)
    ours = attention(q, k, v, causal=causal, block=block, lengths=lengths if padded else None)
    scores = q.double() @ k.double().transpose(-1, -2) / math.sqrt(8)
    exact = scores.masked_fill(~allowed, -math.inf).softmax(-1) @ v.double()
    rows = real[:, None, :, None].expand_as(ours)
    assert torch.isfinite(ours).all() and torch.allclose(
        ours.double()[rows], exact[rows], atol=1e-5
    )


@pytest.mark.parametrize("lengths", [None, torch.tensor([100, 7])])
@pytest.mark.parametrize("causal", [False, True])
def test_many_small_blocks_take_one_call(lengths, causal, monkeypatch):
    """On a CPU, too, where every call starts its threads and waits for them."""
    calls, attend = [], F.scaled_dot_product_attention

    def counted(*arguments, **options):
        calls.append(arguments)
        return attend(*arguments, **options)

    monkeypatch.setattr(kernels.F, "scaled_dot_product_attention", counted)
    attention(*torch.randn(3, 2, 2, 100, 8), causal=causal, block=4, lengths=lengths)
    assert len(calls) == 1


def test_rotary_scores_depend_on_distance_only():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 16, generator=generator).expand(1, 1, 50, 16) for _ in range(2))
    scores = rotary(q)[0, 0] @ rotary(k)[0, 0].T
    for distance in (-7, 0, 3, 20):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4)
    assert not torch.allclose(scores[0, 0], scores[0, 7], atol=1e-2)
    # By hand: pair m of a head of 4 turns by t / 100^m radians, exactly at the longest sequence,
    # too.
    turned = rotary(torch.tensor([1.0, 0, 1, 0]).expand(1, 1, 65536, 4))[0, 0]
    for t in (3, 65535):
        exact = torch.tensor([math.cos(t), math.sin(t), math.cos(t / 100), math.sin(t / 100)])
        assert torch.allclose(turned[t], exact, atol=1e-6)


@pytest.mark.parametrize("off", [0.1, 1e-2, 1e-3, 1e-5])
def test_a_state_near_the_pole_of_the_last_step(off):
    """dt A near -2, where both terms of g / D_n are large: float64 is chosen in time."""
    generator = torch.Generator().manual_seed(0)
    A, P, B, C = (torch.randn(1, 4, dtype=torch.complex128, generator=generator) for _ in range(4))
    A = -A.real.abs() - 0.1 + 1j * A.imag
    A[0, 0] = -0.5 * (1 + off)
    dt = torch.tensor([4.0], dtype=torch.float64)
    exact = s4_kernel_naive(A, P, B, C[None], dt, 64)
    assert relative(s4_kernel(A, P, B, C[None], dt, 64), exact) < 1e-5
