"""kernels.py against oracles that share no code with it: float64 recurrences, direct sums, dense softmax."""
import math
import subprocess
import sys

import pytest
import torch

import kernels
from conftest import ROOT
from kernels import (attention, diagonal_kernel, diagonal_kernel_naive, fft_conv, hippo_nplr, random_dlr, random_s4,
                     rotary, s4_kernel, s4_kernel_naive, sgconv_kernel, ssm_scan)

COMPLEX = torch.complex128


def relative(ours, exact):
    return ((ours - exact).abs().max() / exact.abs().max()).item()


def all_states(v):
    """Both of each conjugate pair, in double precision: (..., n) -> (..., N)."""
    return torch.cat((v, v.conj()), -1).to(COMPLEX)


def dense_s4(A, P, B, C, dt, l):
    """K[k] = C Abar^k Bbar over all N states, channel by channel, by plain float64 matrix powers. C is uncorrected."""
    A, P, B, C = (all_states(v) for v in (A, P, B, C))
    K = torch.zeros(C.shape[0], C.shape[1], l, dtype=torch.float64)
    for channel in range(C.shape[1]):
        a, p, bb = (v[min(channel, v.shape[0] - 1)] for v in (A, P, B))
        full = torch.diag(a) - torch.outer(p, p.conj())
        eye = torch.eye(len(a), dtype=COMPLEX)
        inverse = torch.linalg.inv(eye - dt[channel].double() / 2 * full)
        step = inverse @ (eye + dt[channel].double() / 2 * full)
        x = inverse @ (dt[channel].double() * bb)
        for k in range(l):
            K[:, channel, k] = (C[:, channel] @ x).real
            x = step @ x
    return K


def uncorrected(A, P, B, C_tilde, dt, l):
    """C from C~ = C (I - Abar^l), solved densely in float64, so that the oracle starts from what the kernel gets."""
    Abar, _ = kernels.discretize(A.to(COMPLEX), P.to(COMPLEX), B.to(COMPLEX), dt.double())
    gap = torch.eye(Abar.shape[-1], dtype=COMPLEX) - torch.linalg.matrix_power(Abar, l)
    C = torch.linalg.solve(gap.transpose(-1, -2), all_states(C_tilde).permute(1, 2, 0))  # (d, N, c)
    return C.permute(2, 0, 1)[..., : A.shape[-1]]                                        # (c, d, n)


@pytest.mark.parametrize("l", [1, 2, 3, 17, 64, 100, 255, 1021])
@pytest.mark.parametrize("dt_range", [(1e-4, 1e-3), (1e-3, 0.1), (1.0, 10.0)])
def test_s4_kernel_is_the_recurrence(l, dt_range):
    for N in (2, 64):
        arguments = random_s4(6, N, 2, l, *dt_range, seed=l)
        A, P, B, C, dt = arguments
        exact = dense_s4(A, P, B, uncorrected(A, P, B, C, dt, l), dt, l)
        assert relative(s4_kernel(*arguments, l).double(), exact) < 1e-4


def test_s4_kernel_with_poles_close_to_roots_of_unity():
    """Poles put on purpose a hair's breadth from an l-th root of unity, where the Cauchy sums nearly divide by zero."""
    l, n = 96, 4
    angle = 2 * math.pi * torch.tensor([1.0, 5.0, 11.0, 30.0], dtype=torch.float64) / l
    p = 0.9999999 * torch.polar(torch.ones(n, dtype=torch.float64), -angle)
    dt = torch.tensor([0.01, 0.3], dtype=torch.float64)
    A = 2 / dt[:, None] * (p - 1) / (p + 1)
    assert (1 - p ** l).abs().max() < 2e-5
    generator = torch.Generator().manual_seed(0)
    P, B = (torch.randn(2, n, dtype=COMPLEX, generator=generator) for _ in range(2))
    C = torch.randn(2, 2, n, dtype=COMPLEX, generator=generator)
    C_tilde = kernels.truncation_correction(A, P, C, dt, l)
    assert relative(s4_kernel(A, P, B, C_tilde, dt, l).double(), dense_s4(A, P, B, C, dt, l)) < 1e-4


@pytest.mark.parametrize("l, N, tolerance", [(16, 8, 1e-4), (33, 8, 1e-4), (1024, 64, 1e-2), (2001, 64, 1e-2)])
def test_gradients_of_the_s4_kernel(l, N, tolerance):
    """Against autograd through the textbook form in float64. dt's is the hardest: it moves every pole at once."""
    double = [v.to(COMPLEX if v.is_complex() else torch.float64) for v in random_s4(5, N, 2, l)]
    weight = torch.randn(2, 5, l, generator=torch.Generator().manual_seed(1))
    gradients = []
    for form, arguments in ((s4_kernel_naive, double), (s4_kernel, random_s4(5, N, 2, l))):
        arguments = [v.clone().requires_grad_() for v in arguments]
        (form(*arguments, l) * weight).sum().backward()
        gradients.append([v.grad.to(COMPLEX) for v in arguments])
    errors = [relative(ours, exact) for exact, ours in zip(*gradients)]
    assert max(errors[:-1]) < tolerance / 10 and errors[-1] < tolerance, errors


def test_shared_states_broadcast():
    A, P, B, C, dt = random_s4(6, 8, 1, 50)
    assert torch.equal(s4_kernel(A[:1], P[:1], B[:1], C, dt, 50), s4_kernel(A, P, B, C, dt, 50))


def test_truncation_by_length_is_undone_at_that_length_only():
    """C~ is tied to l: at its own l the kernel is the one of C, cut."""
    A, P, B, C, dt = random_s4(3, 16, 1, 128)
    long = dense_s4(A, P, B, uncorrected(A, P, B, C, dt, 128), dt, 200)
    assert relative(s4_kernel(A, P, B, C, dt, 128).double(), long[..., :128]) < 1e-4


def test_hippo_is_legs():
    N = 32
    A, P, B = hippo_nplr(N)
    k = torch.arange(N, dtype=torch.float64)
    legs = -torch.sqrt((2 * k[:, None] + 1) * (2 * k + 1)).tril(-1) - torch.diag(k + 1)
    ours = torch.diag(all_states(A)) - torch.outer(all_states(P), all_states(P).conj())
    # Same matrix in another basis: same traces of powers, and the same impulse response through B for any output.
    power, legs_power = torch.eye(N, dtype=COMPLEX), torch.eye(N, dtype=torch.float64)
    for _ in range(4):
        power, legs_power = power @ ours, legs_power @ legs
        assert abs(torch.trace(power) / torch.trace(legs_power) - 1) < 1e-9
    krylov = torch.stack([torch.linalg.matrix_power(ours, i) @ all_states(B) for i in range(4)])
    legs_krylov = torch.stack([torch.linalg.matrix_power(legs, i) @ torch.sqrt(2 * k + 1) for i in range(4)])
    gram, legs_gram = krylov.conj() @ krylov.T, legs_krylov @ legs_krylov.T
    assert ((gram - legs_gram).abs() / legs_gram.abs()).max() < 1e-9      # the change of basis is unitary
    assert (A.imag < 0).all() and (A.imag.diff() > 0).all()
    with pytest.raises(ValueError, match="even"):
        hippo_nplr(7)


@pytest.mark.parametrize("l", [1, 2, 31, 400])
@pytest.mark.parametrize("shared", [True, False])
def test_diagonal_kernel_is_the_sum(l, shared):
    generator = torch.Generator().manual_seed(l)
    n, d = 24, 3
    decay, turn = torch.rand(2, n, generator=generator) if shared else torch.rand(2, d, n, generator=generator)
    Lambda = torch.complex(-0.05 * decay, 6.28 * turn)
    W = torch.randn(2, d, n, dtype=torch.complex64, generator=generator)
    k = torch.arange(l, dtype=torch.float64)
    exact = (W.to(COMPLEX)[..., None] * torch.exp(Lambda.to(COMPLEX)[..., None] * k)).sum(-2).real
    assert relative(diagonal_kernel(W, Lambda, l).double(), exact) < 1e-5


@pytest.mark.parametrize("l", [1, 5, 1021])
def test_gradients_of_the_diagonal_kernel_with_shared_poles(l):
    """Against autograd through the direct sum in float64, for poles that decay, stand still and turn fast."""
    W, Lambda = random_dlr(5, 40, 2, l, dtype=COMPLEX)
    Lambda[:3] = torch.tensor([0, 3.1j, -0.5 + 6j])
    weight = torch.randn(2, 5, l, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = []
    for form, dtype in ((diagonal_kernel_naive, COMPLEX), (diagonal_kernel, torch.complex64)):
        arguments = [v.clone().to(dtype).requires_grad_() for v in (W, Lambda)]
        (form(*arguments, l) * weight).sum().backward()
        gradients.append([v.grad.to(COMPLEX) for v in arguments])
    assert all(relative(ours, exact) < 1e-3 for exact, ours in zip(*gradients) if exact.abs().max() > 0)


def test_diagonal_kernel_at_full_size():
    """One layer of DLR on PathX (d = 256, N = 1,024, l = 16,384, two directions), forward and backward: under 2 GB for
    the whole process, and at least ten times the speed of the broadcast form, measured on two of the 256 channels."""
    program = ("import resource, time, torch; from kernels import *\n"
               "W, Lambda = (v.requires_grad_() for v in random_dlr(256, 1024, 2, 16384))\n"
               "def seconds(form, W):\n"
               "    start = time.perf_counter()\n"
               "    form(W, Lambda, 16384).square().sum().backward()\n"
               "    return time.perf_counter() - start\n"
               "fast = min(seconds(diagonal_kernel, W) for _ in range(2))\n"
               "memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
               "print(memory, 128 * seconds(diagonal_kernel_naive, W[:, :2]) / fast)")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    memory, ratio = map(float, done.stdout.split())
    assert memory < 2_000_000 and ratio > 10, done.stderr


@pytest.mark.parametrize("l", [1, 2, 7, 97, 130])
@pytest.mark.parametrize("back", [True, False])
def test_fft_convolution_is_the_direct_sum(l, back):
    generator = torch.Generator().manual_seed(l)
    u, K, K_back = (torch.randn(*shape, generator=generator) for shape in ((2, 3, l), (3, l), (3, l)))
    exact = torch.zeros(2, 3, l)
    for t in range(l):
        for s in range(l):
            if s <= t:
                exact[..., t] += K[:, t - s] * u[..., s]
            elif back:
                exact[..., t] += K_back[:, s - t - 1] * u[..., s]
    assert relative(fft_conv(u, K, K_back if back else None), exact) < 1e-5
    longer = torch.cat((K, torch.ones(3, 5)), -1)                        # a kernel longer than the input is cut
    assert torch.allclose(fft_conv(u, longer), fft_conv(u, K), atol=1e-6)


def test_kernel_and_convolution_are_the_scan():
    l = 60
    A, P, B, C, dt = random_s4(4, 8, 1, l, dtype=COMPLEX)
    Abar, Bbar = kernels.discretize(A, P, B, dt)
    C_raw = uncorrected(A, P, B, C, dt, l)
    u = torch.randn(2, 4, l, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    exact = ssm_scan(Abar, Bbar, all_states(C_raw)[0], u)
    assert relative(fft_conv(u.float(), s4_kernel(A, P, B, C, dt, l)[0]).double(), exact) < 1e-4


def test_memory_at_the_longest_sequence():
    """One layer of PathX-256 (l = 65,536, d = 256, two directions) forward and backward within 4 GB, whole process."""
    program = ("import resource, torch; from kernels import random_s4, s4_kernel\n"
               "arguments = [v.requires_grad_() for v in random_s4(256, 64, 2, 65536, dt_min=1e-4)]\n"
               "s4_kernel(*arguments, 65536).square().sum().backward()\n"
               "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert int(done.stdout) < 4_000_000, done.stderr


def test_kernels_ignore_autocast():
    arguments = random_s4(4, 8, 2, 64)
    u = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0))
    outside = s4_kernel(*arguments, 64)
    with torch.autocast("cpu", torch.bfloat16):
        inside = s4_kernel(*arguments, 64)
        convolved = fft_conv(u, inside[0])
    assert torch.equal(outside, inside) and torch.equal(convolved, fft_conv(u, outside[0]))


def stretched_pieces(w, l, multiplier, power, init_scale):
    """SGConv's kernel lag by lag, from its definition, in Python's own floats: (S, c, d, d0) -> (c, d, l)."""
    S, c, d, d0 = w.shape
    K = torch.zeros(c, d, l, dtype=torch.float64)
    for direction in range(c):
        for channel in range(d):
            start, m = 0, multiplier[channel].item()
            for i in range(S):
                piece, stretch = w[i, direction, channel].tolist(), 2 ** (max(0, i - 1) + init_scale)
                for t in range(min(d0 * stretch, l - start)):
                    place = min(max((t + 0.5) / stretch - 0.5, 0), d0 - 1)
                    left = int(place)
                    right = min(left + 1, d0 - 1)
                    value = piece[left] * (left + 1 - place) + piece[right] * (place - left)
                    decay = (start + t + 1) ** -power[channel].item() if power is not None else 1
                    K[direction, channel, start + t] = m ** (S - 1 - i) * value * decay
                start += d0 * stretch
    return K


@pytest.mark.parametrize("l", [1, 7, 32, 100, 192])                     # 192 is past the end of all these kernels
@pytest.mark.parametrize("S, d0, init_scale", [(1, 4, 0), (2, 3, 1), (4, 8, 0), (5, 1, 0), (4, 2, 3)])
@pytest.mark.parametrize("powered", [False, True])
def test_sgconv_kernel_is_stretched_pieces(l, S, d0, init_scale, powered):
    generator = torch.Generator().manual_seed(S)
    w = torch.randn(S, 2, 3, d0, generator=generator).requires_grad_()
    multiplier, power = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 0.5]) if powered else None
    exact = stretched_pieces(w, l, multiplier, power, init_scale)
    ours = sgconv_kernel(w, l, multiplier, power, init_scale)
    assert ours.dtype == torch.float32 and ours.shape == (2, 3, l) and relative(ours.double(), exact) < 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sgconv_kernel(w, l, multiplier, power, init_scale), ours)
    # The kernel is linear in w, so its gradient is what it makes of each unit vector.
    weight = torch.randn(2, 3, l, generator=generator)
    ours.backward(weight)
    for i in range(S):
        for t in range(d0):
            unit = torch.zeros_like(w)
            unit[i, :, :, t] = 1
            direct = (stretched_pieces(unit, l, multiplier, power, init_scale) * weight).sum(-1)      # (c, d)
            assert torch.allclose(w.grad[i, :, :, t].double(), direct, rtol=1e-5, atol=1e-4)


def test_sgconv_kernel_by_hand():
    """Two pieces of one value each, then one of two lags and one of four: half the weight from piece to piece."""
    w = torch.tensor([5.0, 3.0, 2.0, 1.0]).view(4, 1, 1, 1)
    assert sgconv_kernel(w, 9, torch.tensor([2.0])).flatten().tolist() == [40, 12, 4, 4, 1, 1, 1, 1, 0]
    w = torch.tensor([0.0, 4.0]).view(1, 1, 1, 2)                       # stretched four times; ends are held
    assert sgconv_kernel(w, 8, torch.tensor([2.0]), init_scale=2).flatten().tolist() == [0, 0, .5, 1.5, 2.5, 3.5, 4, 4]


# ---- attention -------------------------------------------------------------------------------------------------------


def dense_attention(q, k, v, allowed):
    """Explicit softmax over the keys each query may see, allowed (b, l, l), float64."""
    scores = (q.double() @ k.double().transpose(-1, -2)) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~allowed[:, None], -math.inf).softmax(-1) @ v.double()


@pytest.mark.parametrize("l", [1, 5, 16, 37])
@pytest.mark.parametrize("block", [None, 4, 8, 64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_attention_is_the_dense_mask(l, block, causal, padded):
    generator = torch.Generator().manual_seed(l)
    q, k, v = (torch.randn(3, 2, l, 8, generator=generator) for _ in range(3))
    lengths = torch.tensor([l, max(1, l // 2), 1]) if padded else None
    i, j = torch.arange(l)[:, None], torch.arange(l)
    allowed = torch.ones(l, l, dtype=torch.bool)
    if block:
        allowed &= (i // block - j // block).abs() <= 1
    if causal:
        allowed &= j <= i
    allowed = allowed.expand(3, l, l)
    real = torch.ones(3, l, dtype=torch.bool)
    if padded:
        real = j < lengths[:, None]
        allowed = allowed & real[:, None, :]
    ours = attention(q, k, v, causal=causal, block=block, lengths=lengths)
    exact = dense_attention(q, k, v, allowed)
    assert torch.isfinite(ours).all()
    rows = real[:, None, :, None].expand_as(ours)
    assert torch.allclose(ours.double()[rows], exact[rows], atol=1e-5)


def test_rotary_scores_depend_on_distance_only():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 16, generator=generator).expand(1, 1, 50, 16) for _ in range(2))
    scores = rotary(q)[0, 0] @ rotary(k)[0, 0].T
    for distance in (-7, 0, 3, 20):
        diagonal = scores.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4)
    assert not torch.allclose(scores[0, 0], scores[0, 7], atol=1e-2)
    assert torch.allclose(rotary(q).norm(dim=-1), q.norm(dim=-1), atol=1e-5)
    # By hand: position 3, the second pair of a head of 4 turns by 3 / 100 radians.
    x = torch.zeros(1, 1, 4, 4)
    x[..., 2] = 1
    assert torch.allclose(rotary(x)[0, 0, 3], torch.tensor([0, 0, math.cos(0.03), math.sin(0.03)]), atol=1e-6)


def test_rotary_stays_exact_at_the_longest_sequence():
    l = 65536
    x = torch.zeros(1, 1, l, 2)
    x[..., 0] = 1
    assert abs(rotary(x)[0, 0, l - 1, 0].item() - math.cos(l - 1)) < 1e-6


@pytest.mark.parametrize("l, back", [(1, True), (13, True), (13, False), (64, True)])
def test_gradients_of_the_fft_convolution(l, back):
    generator = torch.Generator().manual_seed(l)
    arguments = [torch.randn(*shape, generator=generator) for shape in ((3, 2, l), (2, l), (2, l))][: 3 if back else 2]
    weight = torch.randn(3, 2, l, generator=generator)

    def direct(u, K, K_back=None):
        """The convolution as a product with a dense Toeplitz matrix, T[t, s] = K[t - s] or K_back[s - t - 1]."""
        lag = torch.arange(l)[:, None] - torch.arange(l)
        T = torch.where(lag >= 0, K[:, lag.clamp(min=0)], 0)
        if K_back is not None:
            T = T + torch.where(lag < 0, K_back[:, (-lag - 1).clamp(min=0)], 0)
        return torch.einsum("dts,bds->bdt", T, u)

    gradients = []
    for form, cast in ((fft_conv, torch.Tensor.float), (direct, torch.Tensor.double)):
        leaves = [cast(v).detach().clone().requires_grad_() for v in arguments]
        (form(*leaves) * cast(weight)).sum().backward()
        gradients.append([v.grad.double() for v in leaves])
    assert all((ours - exact).abs().max() < 1e-4 * exact.abs().max() + 1e-6 for ours, exact in zip(*gradients))
