"""kernels.py and gradients.py against float64 recurrences, direct sums and dense softmax."""

import math
from functools import partial
from itertools import product
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kernels
from kernels import attention, diagonal_kernel, fft_conv, hippo_nplr, s4_kernel
from use.recurrent import s4_recover_C
from zoo.sgconv import sgconv_kernel

COMPLEX, DOUBLE = torch.complex128, torch.float64


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def random_s4(d, N, c, l, steps=(1e-3, 0.1), seed=0):
    """HiPPO-initialised arguments of `s4_kernel` (A, P, B, C~, dt), random C, log-uniform dt."""
    generator, (low, high) = seeded(seed), map(math.log, steps)
    A, P, B = (v.expand(d, -1).contiguous() for v in hippo_nplr(N))  # (d, n)
    C = torch.randn(c, d, N // 2, dtype=COMPLEX, generator=generator)
    dt = torch.exp(low + (high - low) * torch.rand(d, generator=generator, dtype=DOUBLE))
    C = kernels.truncation_correction(A, P, C, dt, l)
    return [v.to(torch.complex64) for v in (A, P, B, C)] + [dt.float()]


def relative(ours, exact):
    return ((ours - exact).abs().max() / exact.abs().max()).item()


def all_states(v):
    """Both of each conjugate pair, in double precision: (..., n) -> (..., N)."""
    return torch.cat((v, v.conj()), -1).to(COMPLEX)


def dense_s4(A, P, B, C, dt, l):
    """K[k] = C Abar^k Bbar over all N states, one float64 step after another. C is uncorrected."""
    A, P, B, C = map(all_states, (A, P, B, C))
    dt, eye, K = dt.double()[:, None, None], torch.eye(A.shape[-1], dtype=COMPLEX), []
    half_step = dt / 2 * (torch.diag_embed(A) - P[..., :, None] * P.conj()[..., None, :])
    inverse = torch.linalg.inv(eye - half_step)  # (d, N, N)
    step, x = inverse @ (eye + half_step), inverse @ (dt * B[..., None])  # x (d, N, 1)
    for _ in range(l):
        K.append((C * x[..., 0]).sum(-1).real)  # (c, d)
        x = step @ x
    return torch.stack(K, -1)


def errors(fast, oracle, arguments, weight, *l):
    """Relative errors of a form's value and gradients, against the oracle's in float64."""
    double = [v.to(torch.promote_types(v.dtype, DOUBLE)) for v in arguments]
    results = []
    for form, values in ((fast, arguments), (oracle, double)):
        leaves = [v.detach().clone().requires_grad_() for v in values]
        value = form(*leaves, *l)
        results.append((value, *torch.autograd.grad((value * weight).sum(), leaves)))
    pairs = ([v.detach().to(COMPLEX) for v in pair] for pair in zip(*results))
    return [relative(ours, exact) for ours, exact in pairs if exact.abs().max() > 0]


@pytest.mark.parametrize("l", [1, 2, 3, 64, 255, 1021])
def test_s4_kernel_is_the_recurrence(l):
    for steps, N in product(((1e-4, 1e-3), (1e-3, 0.1), (1.0, 10.0)), (2, 64)):
        A, P, B, C, dt = random_s4(6, N, 2, l, steps, seed=l)
        ours = s4_kernel(A, P, B, C, dt, l)
        exact = dense_s4(A, P, B, s4_recover_C(A, P, C, dt, l), dt, l)
        assert relative(ours.double(), exact) < 1e-4, (steps, N)
        shared = s4_kernel(A[:1], P[:1], B[:1], C, dt, l)
        assert relative(shared, ours) < 1e-5, "channels may share states"


def test_float64_is_chosen_in_time():
    """Poles a hair's breadth from an l-th root of unity, where the Cauchy sums nearly divide by
    zero; then dt A near -2, where both terms of g / D_n are large."""
    l, generator = 96, seeded(0)
    p = 0.9999999 * torch.exp(-2j * math.pi / l * torch.tensor([1, 5, 11, 30], dtype=DOUBLE))
    assert (1 - p**l).abs().max() < 2e-5
    dt = torch.tensor([0.01, 0.3], dtype=DOUBLE)
    cases = [(2 / dt[:, None] * (p - 1) / (p + 1), dt, 1e-4)]
    for off in (0.1, 1e-2, 1e-3, 1e-5):
        A = torch.randn(1, 4, dtype=COMPLEX, generator=generator)
        A = -A.real.abs() - 0.1 + 1j * A.imag
        A[0, 0] = -0.5 * (1 + off)
        cases.append((A, torch.tensor([4.0], dtype=DOUBLE), 1e-5))
    for A, dt, tolerance in cases:
        P, B, *C = torch.randn(4, *A.shape, dtype=COMPLEX, generator=generator)
        C = torch.stack(C)
        ours = s4_kernel(A, P, B, kernels.truncation_correction(A, P, C, dt, l), dt, l)
        assert relative(ours, dense_s4(A, P, B, C, dt, l)) < tolerance, A


@pytest.mark.parametrize("l, N, tolerance", [(16, 8, 1e-4), (33, 8, 1e-4), (2001, 64, 1e-2)])
def test_s4_kernel_and_its_gradients_are_those_of_the_textbook(l, N, tolerance):
    """dt's gradient is the hardest: it moves every pole at once."""
    weight = torch.randn(2, 5, l, generator=seeded(1))
    *others, of_dt = errors(s4_kernel, kernels.s4_kernel_naive, random_s4(5, N, 2, l), weight, l)
    assert max(others) < tolerance / 10 and of_dt < tolerance


def test_geometric_sums_and_their_gradients_are_those_of_the_plain_sum():
    for l, r in ((1, 1), (2, 3), (7, 2), (64, 1), (65, 6), (100, 40)):
        generator = seeded(l)
        V = torch.randn(2, r, 3, dtype=COMPLEX, generator=generator)
        decay, turn = torch.rand(2, 2, 3, dtype=DOUBLE, generator=generator)
        log_p = torch.complex(-decay, 6 * turn)

        def plain(V, log_p):
            return (V[..., None] * torch.exp(log_p[:, None, :, None] * torch.arange(l))).sum(2).real

        def fast(V, log_p):
            return kernels.geometric_sums(V, log_p, l, DOUBLE)

        weight = torch.randn(2, r, l, dtype=DOUBLE, generator=generator)
        assert max(errors(fast, plain, [V, log_p], weight)) < 1e-12, (l, r)


def test_the_derivation_of_the_kernel_holds_step_by_step():
    """The text at the head of part 3 of kernels.py, number by number, at every root of unity."""
    N, l, dt, beta, k = 6, 32, 0.3, 0.7, torch.arange(32, dtype=DOUBLE)
    A, P, B, C = torch.randn(4, N, dtype=COMPLEX, generator=seeded(0))
    A = torch.complex(-A.real.abs() - 0.1, A.imag)
    h, w, eye = dt / 2, torch.exp(k * (-2j * math.pi / l)), torch.eye(N, dtype=COMPLEX)
    A_full = torch.diag(A) - P[:, None] * P.conj()
    inverse = torch.linalg.inv(eye - h * A_full)
    Abar, Bbar = inverse @ (eye + h * A_full), inverse @ (dt * B)
    K = torch.stack([C @ torch.linalg.matrix_power(Abar, power) @ Bbar for power in range(l)])
    C_tilde, every_w = C @ (eye - torch.linalg.matrix_power(Abar, l)), w[:, None, None]

    def holds(ours, exact):
        assert relative(ours, exact) < 1e-8

    def cauchy(v):
        return (v[:, None] / D).sum(0)

    spectrum = torch.fft.fft(K)
    # 1  powers become one inverse
    holds(C_tilde @ torch.linalg.inv(eye - every_w * Abar) @ Bbar, spectrum)
    # 2  the discretisation cancels
    brackets = (1 - every_w) * eye - h * (1 + every_w) * A_full
    holds(dt * (C_tilde @ torch.linalg.inv(brackets) @ B), spectrum)
    # 3  the inverse is a sum, which Woodbury's identity inverts
    D, g = (1 - w) - h * (1 + w) * A[:, None], h * (1 + w)  # (N, l), (l,)
    holds(torch.diag_embed(D.T) + g[:, None, None] * P[:, None] * P.conj(), brackets)
    CB, CP, PB, PP = map(cauchy, (C_tilde * B, C_tilde * P, P.conj() * B, P.conj() * P))
    holds(dt * (CB - g * CP * PB / (1 + g * PP)), spectrum)
    # 4  a Cauchy sum is a spectrum
    a = h * A
    p = (1 + a) / (1 - a)
    holds((1 - a)[:, None] * (1 - w * p[:, None]), D)
    geometric = ((C_tilde * B / ((1 - a) * (1 - p**l)))[:, None] * p[:, None] ** k).sum(0)  # (l,)
    holds(torch.fft.fft(geometric), CB)
    # 5  nothing large cancels
    PB_rest, CB_rest = cauchy(P.conj() * (B - beta * P)), cauchy(C_tilde * (B - beta * P))
    holds(dt * (CB_rest + CP * (beta - g * PB_rest) / (1 + g * PP)), spectrum)
    holds((1 + w) * (1 + a)[:, None], 2 - D)
    holds(dt / ((1 + a)[:, None] * D) - (h / (1 + a))[:, None], g / D)
    _, P, B = hippo_nplr(16)
    holds(math.sqrt(2) * P, B)


def test_hippo_is_legs_and_holds_the_past_as_legendre_polynomials():
    """By a unitary change of basis for all A^i B; e^(s A) B are polynomials on the clock e^-s."""
    N = 8
    A, P, B = hippo_nplr(N)
    assert (A.imag < 0).all() and (A.imag.diff() > 0).all()
    n = torch.arange(N, dtype=DOUBLE)
    legs_B = torch.sqrt(2 * n + 1)
    legs = -(legs_B[:, None] * legs_B).tril(-1) - torch.diag(n + 1)
    nplr = torch.diag(all_states(A)) - torch.outer(all_states(P), all_states(P).conj())
    products = []
    for matrix, v in ((nplr, all_states(B)), (legs, legs_B)):
        krylov = torch.stack([torch.linalg.matrix_power(matrix, i) @ v for i in range(N)])
        products.append(krylov.conj() @ krylov.T)
    assert (products[0] / products[1] - 1).abs().max() < 1e-9
    with pytest.raises(ValueError, match="even"):
        hippo_nplr(7)
    for s in (0.0, 0.3, 2.0):
        L = [np.polynomial.Legendre.basis(i)(2 * math.exp(-s) - 1) for i in range(N)]
        impulse = torch.linalg.matrix_exp(s * legs) @ legs_B
        assert (impulse - math.exp(-s) * legs_B * torch.tensor(L)).abs().max() < 1e-8, s


def dense_diagonal(W, Lambda, l):
    """K[k] = Re sum_n W p^k with p = e^Lambda, one step after another."""
    K, x = [], torch.exp(0 * Lambda)
    for _ in range(l):
        K.append((W * x).sum(-1).real)  # (c, d)
        x = x * torch.exp(Lambda)
    return torch.stack(K, -1)


def test_diagonal_kernel_and_its_gradients_are_those_of_the_recurrence():
    """For poles that decay, stand still and turn fast, shared by all channels or not."""
    for l, poles in product((1, 2, 31, 1021), ((24,), (3, 24))):
        decay, turn = torch.rand(2, *poles, generator=seeded(l))
        Lambda = torch.complex(-0.05 * decay, 6.28 * turn)
        Lambda[..., :3] = torch.tensor([0, 3.1j, -0.5 + 6j])
        W = torch.randn(2, 3, 24, dtype=torch.complex64, generator=seeded(l))
        weight = torch.randn(2, 3, l, generator=seeded(l + 1))
        of_value, *of_gradients = errors(diagonal_kernel, dense_diagonal, (W, Lambda), weight, l)
        assert of_value < 1e-5 and max(of_gradients) < 1e-3, (l, poles)
        W, Lambda = W.to(COMPLEX), Lambda.to(COMPLEX)
        naive = kernels.diagonal_kernel_naive(W, Lambda, l)
        assert relative(naive, dense_diagonal(W, Lambda, l)) < 1e-9


def toeplitz(u, K, D=None):
    """The convolution as a product with a dense matrix, T[t, s] = K[0, t-s] or K[1, s-t-1]."""
    lag = torch.arange(u.shape[-1])[:, None] - torch.arange(u.shape[-1])
    T = torch.where(lag >= 0, K[0][:, lag.clamp(min=0)], 0)
    if len(K) == 2:
        T = T + torch.where(lag < 0, K[1][:, (-lag - 1).clamp(min=0)], 0)
    if D is not None:
        T = T + D[:, None, None] * torch.eye(len(lag))
    return torch.einsum("dts,bds->bdt", T, u)


def test_convolutions_and_their_gradients_are_those_of_the_direct_sum():
    for l, directions, skip in product((1, 2, 97, 130), (1, 2), (False, True)):
        u, weight = torch.randn(2, 3, 2, l, generator=seeded(l))
        K = torch.randn(directions, 2, l, generator=seeded(l + 1))
        arguments = (u, K, torch.randn(2, generator=seeded(l + 2)))[: 2 + skip]
        longer = torch.cat((K, torch.ones(directions, 2, 5)), -1)
        for convolve in (fft_conv, kernels.fft_conv_naive):
            assert max(errors(convolve, toeplitz, arguments, weight)) < 1e-5, (l, directions, skip)
            assert torch.allclose(convolve(u, longer), convolve(u, K), atol=1e-6), "it is cut"


class Watch(TorchDispatchMode):
    """Calls check(function, tensors) with all tensors that an operation takes or makes."""

    def __init__(self, check):
        super().__init__()
        self.check = check

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        leaves = tree_leaves((args, kwargs, result))
        self.check(function, [v for v in leaves if isinstance(v, torch.Tensor)])
        return result


def test_no_tensor_of_a_full_size_layer_is_much_larger_than_its_kernel():
    """Of S4 on PathX-256 and DLR on PathX, where one of directions, channels, states and lags would
    be 32 and 1,024 times as long. Torch's device `meta` knows shapes only."""

    def leaf(*shape, dtype=torch.complex64):
        return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)

    s4 = *(leaf(256, 32) for _ in "APB"), leaf(2, 256, 32), leaf(256, dtype=torch.float32), 65536
    dlr = leaf(2, 256, 1024), leaf(1024), 16384
    for make, arguments in ((partial(s4_kernel, precise=False), s4), (diagonal_kernel, dlr)):
        sizes = []
        with Watch(lambda _, tensors: sizes.extend(v.nbytes for v in tensors)):
            K = make(*arguments)
            K.square().sum().backward()
        assert max(sizes) <= 6 * K.nbytes, make


def test_kernels_ignore_autocast():
    A, P, B, C, dt = random_s4(4, 8, 2, 64)
    u, w = torch.randn(2, 4, 64, generator=seeded(0)), torch.randn(3, 2, 4, 8, generator=seeded(1))
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled):
            K = s4_kernel(A, P, B, C, dt, 64)
            sgconv = sgconv_kernel(w, 64, torch.ones(4), torch.zeros(4), 0)
            results.append((K, fft_conv(u, K), diagonal_kernel(C, A, 64), sgconv))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("l", [1, 5, 16, 37])
def test_attention_is_the_dense_mask(l):
    """A float64 softmax over the keys that a query may see; queries past the end are finite."""
    q, k, v = torch.randn(3, 3, 2, l, 8, generator=seeded(l))
    i, j = torch.arange(l)[:, None], torch.arange(l)
    scores = q.double() @ k.double().transpose(-1, -2) / math.sqrt(8)
    options = product((None, 4, 8, 64), (False, True), (None, [l, max(1, l // 2), 1]))
    for block, causal, lengths in options:
        lengths = lengths and torch.tensor(lengths)
        real = j < (torch.tensor([l] * 3) if lengths is None else lengths)[:, None]  # (b, l)
        seen = real[:, None, None, :] & (j <= i if causal else i == i)
        seen = seen & ((i // (block or l) - j // (block or l)).abs() <= 1)
        ours = attention(q, k, v, causal=causal, block=block, lengths=lengths)
        exact = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v.double()
        rows, case = real[:, None, :, None].expand_as(ours), (block, causal, lengths)
        assert torch.isfinite(ours).all(), case
        assert torch.allclose(ours.double()[rows], exact[rows], atol=1e-5), case


def test_many_small_blocks_take_one_call():
    """On a CPU, too, where every call starts its threads and waits for them."""
    attend = F.scaled_dot_product_attention
    for causal, lengths in product((False, True), (None, torch.tensor([100, 7]))):
        with mock.patch.object(F, attend.__name__, wraps=attend) as calls:
            attention(*torch.randn(3, 2, 2, 100, 8), causal=causal, block=4, lengths=lengths)
        assert calls.call_count == 1, (causal, lengths)


def test_rotary_turns_pairs_by_their_position():
    """Pair m of a head of e by t 10000^(-2m/e) radians, exactly at the longest sequence, too."""
    x = torch.randn(65536, 4, dtype=DOUBLE, generator=seeded(0))
    angle = torch.arange(65536)[:, None] * torch.tensor([1, 0.01], dtype=DOUBLE)
    exact = torch.view_as_real(torch.view_as_complex(x.view(-1, 2, 2)) * torch.exp(1j * angle))
    assert (kernels.rotary(x.float()) - exact.flatten(1)).abs().max() < 2e-6
