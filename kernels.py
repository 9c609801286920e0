"""The mathematics: convolution kernels of state space models, the FFT convolution, attention.

"Kernel" means the convolution kernel K of a linear recurrence, not a GPU kernel. Everything is a
pure function of tensors; there is no nn.Module in this file. Each fast form stands beside its
textbook form, called `_naive`. The file ends with what a first reading may skip.

    python kernels.py       parts 1 to 3 in numbers, and a picture (results/story.py, the one file
                            above this one that it calls)

The story, in the order of the file
    1  A linear recurrence  x[k] = Abar x[k-1] + Bbar u[k],  y[k] = C x[k]         (paper, eq. 1)
       is a convolution     y = K * u,  K[k] = C Abar^k Bbar              (paper, eq. 2.4 and 4)
       so a whole sequence costs a few FFTs instead of l sequential steps: `fft_conv`.
    2  If Abar is diagonal, K is a sum of n geometric sequences, a Vandermonde product:
       `diagonal_kernel` (DLR, eq. 3). Writing k = i m + j makes it a matrix product that needs
       n sqrt(l) powers, not n l: `geometric_sums`.
    3  S4 has A = diag + rank 1 (HiPPO: `hippo_legs`), discretised by the bilinear rule (eq. 2.1
       to 2.3): `discretize`. Its kernel follows in five steps: 1 to 3 lead to four Cauchy sums,
       `s4_kernel_naive`; 4 computes each as in part 2, 5 in float32: `s4_kernel`.
    4  Attention, whole or in blocks, and rotary positions.

Glossary (sizes lower-case, matrices upper-case as in the paper)
    b, l, d   batch, length, channels        dir   directions: 2 if bidirectional, else 1
    h, e      heads, width of a head         N     state size
    n         stored states: DLR stores all N; S4 one of each conjugate pair of eigenvalues, N/2
    A         (d, n)        diagonal part of S4's continuous state matrix: A_full = diag(A) - P P*
    P         (d, n)        low-rank part
    B, C      (d, n), (dir, d, n)     input map, output map
    dt        (d,)          step size Delta of the discretisation
    Lambda    (n,)          DLR: logarithms of the poles, Abar = diag(e^Lambda)
                            (pole: an eigenvalue of Abar; K is made of the powers of poles)
    W         (dir, d, n)   DLR: output map
    K         (dir, d, l)   convolution kernel

References: Amos et al. 2024, "Never Train from Scratch" (the paper); [1] Gu et al. 2022,
"Efficiently Modeling Long Sequences with Structured State Spaces" (S4); [2] Gupta et al. 2022,
"Simplifying and Understanding State Space Models with Diagonal Linear RNNs" (DLR); [3] Su et al.
2021, "RoFormer".

Precision: kernels and convolutions run in float32, also under autocast, because bfloat16 cannot
raise a pole near the unit circle to the power l. Exponents are formed in float64: float32 loses
digits of a phase of 10^4 radians. A result that is computed under `no_grad` gets its backward pass
from gradients.py, which computes what autograd would, in less time and memory."""

import functools
import math
import runpy
from pathlib import Path

import torch
import torch.nn.functional as F

import gradients
from gradients import over_processes, with_gradient

# ---- 1  Recurrence and convolution ---------------------------------------------------------------


def ssm_scan(Abar, Bbar, C, u):
    """Run the recurrence one step at a time (paper, eq. 1): what every kernel below must reproduce.

    Abar (d, N, N), Bbar (d, N), C (d, N), u (b, d, l) -> y (b, d, l), the real part of C x[k]."""
    x = torch.zeros(u.shape[0], *Bbar.shape, dtype=Bbar.dtype, device=u.device)  # (b, d, N)
    y = []
    for k in range(u.shape[-1]):
        x = torch.einsum("dmn,bdn->bdm", Abar, x) + Bbar * u[:, :, k, None]
        y.append(torch.einsum("dn,bdn->bd", C, x).real)
    return torch.stack(y, dim=-1)  # (b, d, l)


def fft_conv_naive(u, K, D=None):
    """Convolve as the formula is written, lag by lag: y[t] = sum_j K[0, j] u[t-j].

    u (b, d, l), K (dir, d, l or longer), D (d,) or None -> (b, d, l). A second kernel adds sum_j
    K[1, j] u[t+1+j]; it begins one position ahead, so that position t is counted once. D adds
    D u[t]. O(l^2). Precision follows the inputs."""
    l = u.shape[-1]
    y = torch.zeros_like(u) if D is None else D[:, None] * u
    for j in range(l):
        y = y + K[0, :, j, None] * F.pad(u[..., : l - j], (j, 0))
        if len(K) == 2:
            y = y + K[1, :, j, None] * F.pad(u[..., j + 1 :], (0, j + 1))
    return y


def fft_conv(u, K, D=None):
    """Compute `fft_conv_naive` in O(l log l), in float32; the result has u's dtype.

    Multiplying spectra, irfft(rfft(u) rfft(circle)), convolves on a circle of n points. With n >= 2
    l and zeros in between nothing wraps around. Lag -1-j of the second kernel sits at n-1-j."""
    l = u.shape[-1]
    n = fft_length(2 * l)
    ahead, *back = K[..., :l].float().unbind()  # (d, l) each
    between = ahead.new_zeros(len(ahead), n - len(K) * l)
    circle = torch.cat((ahead, between, *(lags.flip(-1) for lags in back)), -1)  # (d, n)
    x = u.float()
    with torch.no_grad():
        spectrum = torch.fft.rfft(circle)  # (d, n/2+1)
        if D is not None:  # a constant over all frequencies is an impulse at lag 0
            spectrum += D[:, None]
        U = torch.fft.rfft(x, n=n)  # (b, d, n/2+1)
        y = torch.fft.irfft(U * spectrum, n=n)[..., :l].contiguous()  # (b, d, l)
        conjugates = U.conj_physical_(), spectrum.conj_physical_()
    return with_gradient(y, gradients.convolution_gradient, conjugates, x, circle, D).to(u.dtype)


# ---- 2  Diagonal recurrences: sums of geometric sequences ----------------------------------------


def diagonal_kernel_naive(W, Lambda, l):
    """Compute `diagonal_kernel` as its formula is written (paper, eq. 3).

    Builds (dir, d, n, l) tensors. Precision follows the inputs: complex128 gives an oracle."""
    k = torch.arange(l, device=W.device, dtype=W.real.dtype)
    return (W[..., None] * torch.exp(Lambda[..., None] * k)).sum(-2).real  # (dir, d, l)


def diagonal_kernel(W, Lambda, l):
    """Return the kernel of DLR, K[dir, d, k] = Re sum_n W[dir, d, n] exp(Lambda[n] k) (eq. 3; [2]).

    W complex (dir, d, n), Lambda complex (n,) shared by all channels, (d, n), or (g, n) for g
    groups of d/g channels -> float32 (dir, d, l). There is no step size, no B, no factor 2 and no
    conjugate pairing. The caller ensures Re Lambda <= 0. Growing sums stay right while
    e^(Re Lambda l) fits into float32."""
    directions, d, n = W.shape
    Lambda = Lambda.view(-1, n)  # (g, n)
    W = W.unflatten(1, (len(Lambda), -1)).transpose(0, 1)  # (g, dir, d/g, n)
    K = geometric_sums(W.flatten(1, 2), Lambda, l)  # (g, dir d/g, l)
    return K.unflatten(1, (directions, -1)).transpose(0, 1).flatten(1, 2)  # (dir, d, l)


@torch.amp.autocast("cpu", enabled=False)  # it would change the matrix product
@torch.amp.autocast("cuda", enabled=False)
def geometric_sums(V, log_p, l, dtype=torch.float32):
    """Return Re sum_n V[d, r, n] exp(log_p[d, n] k), k < l: V (d, r, n), log_p (d, n) -> (d, r, l).

    The two-level split: k = i m + j, so p^k = p^(i m) p^j. The sum over n becomes the product of an
    (r l/m x n) and an (n x m) matrix: all r rows of one set of poles share the second. With m ~
    sqrt(2 r l) both are about equally large: n (m + l/m) powers are needed instead of n l."""
    number = torch.complex64 if dtype == torch.float32 else torch.complex128
    V = V.to(torch.complex128)
    log_p = log_p.to(torch.complex128)
    d, r, _ = V.shape
    # m is a power of two, so a power-of-two l needs no padding.
    m = min(l, 2 ** round(math.log2(2 * l * r) / 2))
    with torch.no_grad():
        outer = powers(m * log_p, ceil_div(l, m), number)  # (d, l/m, n)  p^(i m)
        left = V.to(number)[:, :, None] * outer[:, None]  # (d, r, l/m, n)
        # Re(x y) is the dot product of [Re x, Im x] and of the conjugate's [Re y, -Im y]. Real and
        # imaginary parts lie side by side in memory, so the sum over n is a real matrix product.
        left = torch.view_as_real(left).flatten(-2).flatten(1, 2)  # (d, r l/m, 2n)
        right = torch.view_as_real(powers(log_p.conj(), m, number)).flatten(-2)  # (d, m, 2n)  p^j
        y = (left @ right.mT).view(d, r, -1)[..., :l]  # (d, r, l)
    return with_gradient(y, gradients.geometric_gradient, (V.detach(), outer, right), V, log_p)


# ---- 3  S4: diagonal plus low rank, bilinear discretisation --------------------------------------

# From the recurrence to the kernel, in five steps. S4 is the differential equation
#     x' = A_full x + B u,  y = C x,  with A_full = diag(A) - P P*,
# sampled with step size dt by the bilinear rule (`discretize`), where h = dt / 2:
#     Abar = (I - h A_full)^-1 (I + h A_full),  Bbar = (I - h A_full)^-1 dt B,  K[k] = C Abar^k Bbar
# K costs l products with an (N, N) matrix that way; its spectrum costs far less. w runs through the
# l roots of unity e^(-2 pi i j / l), so w^l = 1. (K is real, so half of them suffice.)
#
# 1  Powers become one inverse. The discrete Fourier transform of K is a geometric series of
#    matrices:
#        sum_{k<l} K[k] w^k  =  C (I - Abar^l) (I - w Abar)^-1 Bbar  =  C~ (I - w Abar)^-1 Bbar
#    S4 trains C~ = C (I - Abar^l) in place of C, so Abar^l is needed only at the start
#    (`truncation_correction`).
# 2  The discretisation cancels. I - w Abar and Bbar both begin with (I - h A_full)^-1; the first is
#    inverted:
#        I - w Abar = (I - h A_full)^-1 [(1-w) I - h (1+w) A_full]
#        so the spectrum is  dt C~ [(1-w) I - h (1+w) A_full]^-1 B
# 3  The inverse is a sum. [..] = D + g P P* with D diagonal, D_n = (1-w) - h (1+w) A_n, and a
#    number g = h (1+w). Woodbury's identity inverts such a matrix:
#        (D + g P P*)^-1  =  D^-1 - g D^-1 P P* D^-1 / (1 + g P* D^-1 P)
#    Call sum_n v_n / D_n a Cauchy sum: CB for v_n = C~_n B_n, CP for C~_n P_n, PB for
#    conj(P_n) B_n, PP for |P_n|^2. Then
#        the spectrum is  dt (CB - g CP PB / (1 + g PP))               `s4_kernel_naive` ends here
# 4  A Cauchy sum is a spectrum. With a_n = h A_n and p_n = (1+a_n) / (1-a_n), the pole of state n
#    if there were no P:
#        D_n = (1-a_n) (1 - w p_n)      and      1 / (1 - w p) = sum_{k<l} w^k p^k / (1 - p^l)
#        so  sum_n v_n / D_n  is the discrete Fourier transform of
#            sum_n v_n p_n^k / ((1-a_n) (1-p_n^l))
#    These are the sums of geometric sequences of part 2, one matrix product for all four. States
#    come in conjugate pairs, so the code sums over one of each pair and takes 2 Re.
# 5  Float32 suffices. The two terms of step 3 nearly cancel: if B = beta P, CB = beta CP and PB =
#    beta PP, and what is left of beta CP (1 - g PP / (1 + g PP)) is beta CP / (1 + g PP). HiPPO
#    starts there, with beta = sqrt(2). So B = beta P + B', for any number beta, and
#        CB - g CP PB / (1 + g PP)  =  CB' + CP (beta - g PB') / (1 + g PP)
#    And g goes into the sums that it multiplies, because fast states, of large a, have their pole
#    near -1: they would give large sums just where g vanishes. From 2 - D_n = (1+w) (1+a_n):
#        g / D_n  =  h (2/D_n - 1) / (1+a_n)  =  dt / ((1+a_n) D_n)  -  h / (1+a_n)
#    The second term does not depend on w: its sum is a constant.


def hippo_legs(N):
    """Return HiPPO-LegS, float64 A (N, N), B (N,): x holds the past as Legendre coefficients.

        A[n, k] = -sqrt(2n+1) sqrt(2k+1) below the diagonal, -(n+1) on it, 0 above
        B[n]    = sqrt(2n+1)

    A state with x' = A x + B u summarises the whole past of u. An impulse of u leaves (e^(s A) B)_n
    = e^-s L_n(e^-s) in state n after a time s; L_n are the Legendre polynomials, shifted to [0, 1]
    and orthonormal there. So x_n is the n-th Legendre coefficient of the past on the clock z =
    e^-s, and u(t-s) ~ sum_n x_n(t) L_n(e^-s). The state remembers the recent past sharply and
    earlier times ever more blurred (results/kernels.png shows it). A lag of k steps is the time s =
    k dt, so a smaller dt remembers more steps."""
    n = torch.arange(N, dtype=torch.float64)
    B = torch.sqrt(2 * n + 1)  # (N,)
    return -torch.tril(B[:, None] * B[None, :], diagonal=-1) - torch.diag(n + 1), B


def hippo_nplr(N):
    """Return `hippo_legs` in diagonal-plus-rank-1 form: A, P, B, each complex (N/2,), N even.

    Call that matrix and vector A, B. A + P P^T, with P_n = sqrt(n + 1/2), is -1/2 plus a
    skew-symmetric matrix, so it has orthonormal eigenvectors V (`eigh`). In their basis A becomes
    diag(.) - P P*, and P, B become V* P, V* B. Eigenvalues come in conjugate pairs; those with
    negative imaginary part are returned, ascending. Source: [1], C.1."""
    if N < 2 or N % 2:
        raise ValueError(f"the state size N must be even and at least 2, got {N}")
    A, B = hippo_legs(N)  # (N, N), (N,)
    P = torch.sqrt(torch.arange(N, dtype=torch.float64) + 0.5)  # (N,)
    normal = A + P[:, None] * P[None, :]  # -1/2 I + skew
    skew = (normal - normal.T).to(torch.complex128) / 2
    imag, V = torch.linalg.eigh(-1j * skew)  # ascending, V unitary
    A = torch.complex(torch.full_like(imag, -0.5), imag)  # (N,) the diagonal
    P, B = (V.mH @ v.to(V.dtype) for v in (P, B))
    return A[: N // 2], P[: N // 2], B[: N // 2]  # the negative imaginary parts


def discretize(A, P, B, dt):
    """Discretise by the bilinear rule with dense matrices (eq. 2.1 to 2.3): for reading and tests.

    A, P, B complex (d, n) or (1, n), one of each conjugate pair; dt (d,) -> Abar (d, N, N), Bbar
    (d, N), N = 2n. O(d N^3)."""
    A, P, B = (torch.cat((v, v.conj()), -1) for v in (A, P, B))  # (d, N) all states
    A_full = torch.diag_embed(A) - P[..., :, None] * P.conj()[..., None, :]  # (d, N, N)
    half_step = dt[:, None, None] / 2 * A_full
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    Abar = torch.linalg.solve(eye - half_step, eye + half_step)  # (d, N, N)
    Bbar = torch.linalg.solve(eye - half_step, (dt[:, None] * B)[..., None])[..., 0]  # (d, N)
    return Abar, Bbar


def truncation_correction(A, P, C, dt, l):
    """Return C~ = C (I - Abar^l), which S4 trains (step 1; [1], lemma C.3): (dir, d, n) complex."""
    C_real = torch.cat((C.real, -C.imag), -1).double()  # (dir, d, N) a row for [Re x, Im x]
    C_real = C_real - torch.einsum("cdm,dmn->cdn", C_real, transition_power(A, P, dt, l))
    return torch.complex(*C_real.chunk(2, -1)).conj().resolve_conj()  # (dir, d, n) complex128


def s4_kernel_naive(A, P, B, C, dt, l):
    """Compute `s4_kernel` as the textbook does ([1], algorithm 1): steps 1 to 3 above.

    ([1] divides by 1 + w, which vanishes at w = -1; step 2 does not.) Builds (dir, d, n, l)
    tensors: O(d n l) memory. Precision follows the inputs: complex128 gives an oracle."""
    A, P, B, C = (torch.cat((v, v.conj()), -1) for v in (A, P, B, C))  # all N states
    angle = torch.arange(l // 2 + 1, device=dt.device, dtype=torch.float64) * (-2 * math.pi / l)
    w = torch.polar(torch.ones_like(angle), angle).to(A.dtype)  # (l/2+1,)
    dt = dt.to(A.real.dtype)[:, None]  # (d, 1)
    h = dt / 2
    D = (1 - w) - h[..., None] * (1 + w) * A[..., None]  # (d, N, l/2+1)
    g = h * (1 + w)  # (d, l/2+1)

    def cauchy(v):
        return (v[..., None] / D).sum(-2)  # (..., d, l/2+1)

    CB, CP, PB, PP = (cauchy(v) for v in (C * B, C * P, P.conj() * B, P.conj() * P))
    return torch.fft.irfft(dt * (CB - g * CP * PB / (1 + g * PP)), n=l)  # (dir, d, l)


def s4_kernel(A, P, B, C, dt, l, precise=None):
    """Return the kernel of S4: A_full = diag(A) - P P*, bilinear discretisation (eq. 2; [1]).

    A, P, B complex (d, n) or (1, n), one of each conjugate pair; C complex (dir, d, n), the C~ of
    step 1; dt (d,) -> real float32 (dir, d, l). Over all N = 2n states, [one half, its conjugate],
    K[k] = C Abar^k Bbar: C is not conjugated, and there is no extra factor. Steps 1 to 5 take O(d n
    sqrt(l)) powers and O(dir d l) memory.

    Error relative to the largest |K|, against a float64 recurrence: below 1e-4 (typically 1e-6) for
    dt in [1e-4, 10], any l, Re A <= -1e-4. Gradients are as good, except that of dt: 1e-3 at l in
    the thousands. Two cases lose digits in float32: a state that barely decays over l steps may
    have its pole on a root of unity, 1e-6 / |1 - p^l|; and a state with dt A near -2 makes g / D_n
    a difference of large terms, 1e-8 / |1 + a|. precise: sum in float64, at twice the time; None
    checks whether that is needed, which makes a GPU wait. `S4` in models.py makes the first case
    rare by a minimum decay, but does not guard against the second."""
    A, P, B, C = (v.to(torch.complex128) for v in (A, P, B, C))
    dt = dt.double()[:, None]  # (d, 1)
    a = dt * A / 2  # (d, n)
    log_p = 2 * torch.atanh(a)  # p = (1+a) / (1-a)
    denominator = (1 - a) * -torch.expm1(l * log_p)  # (d, n)  (1-a) (1-p^l)
    if precise is None:
        smallest = torch.minimum(denominator.detach().abs(), (1 + a.detach()).abs()).min()
        precise = bool(smallest < 0.02)  # float32 would lose digits
    dtype = torch.float64 if precise else torch.float32

    with torch.no_grad():  # any beta gives the same sum
        beta = (P.conj() * B).real.sum(-1, keepdim=True) / P.abs().square().sum(-1, keepdim=True)
    # The sums' numerators are products of a row and a column: CB' and CP for each C, then g PB' and
    # g PP, in which g / D_n = dt / ((1+a_n) D_n) - h / (1+a_n).
    rows = torch.cat((C.transpose(0, 1), (P.conj() / (1 + a))[:, None]), 1)  # (d, dir+1, n)
    columns = dt[..., None] * torch.stack((B - beta * P, P), 1)  # (d, 2, n)
    # The factor 2 with Re: the conjugate halves add their conjugates.
    V = rows[:, :, None] * (columns * (2 / denominator)[:, None])[:, None]  # (d, dir+1, 2, n)
    sums = geometric_sums(V.flatten(1, 2), log_p, l, dtype)
    sums = sums.unflatten(1, (-1, 2))  # (d, dir+1, 2, l)
    # The constants -h / (1+a_n), summed, are not in `sums`:
    #     beta - g PB' = above - sum,  1 + g PP = below + sum
    constant = (rows[:, -1:] * columns).real.sum(-1)  # (d, 2)
    constants = torch.cat((beta + constant[:, :1], 1 - constant[:, 1:]), 1).to(dtype)
    with torch.no_grad():
        spectra = torch.fft.rfft(sums)  # (d, dir+1, 2, l/2+1)
        CB, CP = spectra[:, :-1].unbind(2)  # (d, dir, l/2+1) each
        PB, PP = spectra[:, -1:].unbind(2)  # (d, 1, l/2+1) each
        above, below = constants[:, :, None].split(1, 1)  # (d, 1, 1) each
        below = below + PP
        ratio = (above - PB) / below  # (d, 1, l/2+1)
        K = torch.fft.irfft(torch.addcmul(CB, CP, ratio), n=l)  # (d, dir, l)  CB' + CP ratio
    kept = CP.clone(), below, ratio  # a view of CP would keep all spectra
    K = with_gradient(K, gradients.woodbury_gradient, kept, sums, constants)
    return K.float().transpose(0, 1)  # (dir, d, l)


# ---- 4  Attention and rotary positions -----------------------------------------------------------


def rotary(x, start=0, dim=-2):
    """Rotate the pair (x[2m], x[2m+1]) at position t by t 10000^(-2m/e): rotary positions ([3]).

    x (..., l, e) -> same shape and dtype; start: the position of the first element; dim: holds
    positions. Afterwards q_i . k_j depends on the positions only through i - j. A pair is a complex
    number, and its rotation one complex product."""
    l = x.shape[dim]
    e = x.shape[-1]
    turns = rotary_turns(l if start == 0 else fft_length(start + l), e, x.device)[start : start + l]
    turns = turns.unflatten(0, (l,) + (1,) * (x.ndim - 2 - dim % x.ndim))  # (l, 1, ..., e/2, 2)
    pairs = x.float().unflatten(-1, (-1, 2))  # (..., l, e/2, 2)
    if torch.compiler.is_compiling():  # the compiler does not take complex numbers
        real, imag = pairs.unbind(-1)
        cos, sin = turns.unbind(-1)
        turned = torch.stack((real * cos - imag * sin, real * sin + imag * cos), -1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(turns))
    return turned.flatten(-2).to(x.dtype)


def attention(q, k, v, causal=False, block=None, lengths=None):
    """Compute multi-head attention: queries, keys, values (b, h, l, e) -> (b, h, l, e).

    block: each block of that many positions attends to itself and one block on either side (causal:
    the previous one), as in the paper from length 16K on (section 2). l need not be a multiple of
    it. lengths (b,): keys at or past a sequence's true length are not attended. Outputs at queries
    past it are finite and meaningless."""
    l = k.shape[-2]
    mask = None
    if lengths is not None and not causal:  # causal: padding comes last, no real query looks there
        mask = padding_mask(lengths, l, q.dtype)  # (b, 1, 1, l)
    if block is None or block >= l:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    # Many small blocks take one call: a call costs launches on a GPU, and on a CPU a start and a
    # wait of all threads; the compiler starts anew for every number of calls. Masks of large causal
    # blocks would fill a CPU's memory.
    if l > 8 * block and (block <= 512 or q.is_cuda or torch.compiler.is_compiling()):
        return near_attention(q, k, v, block, None, causal, lengths)
    return block_attention(q, k, v, block, causal, mask)


# ---- Skip at a first reading ---------------------------------------------------------------------

# Sizes, lengths and padding, used by every file.


def ceil_div(a, b):
    """Return a / b rounded up, for integers."""
    return -(-a // b)


def fft_length(l):
    """Return the smallest length >= l that is 1 to 16 times a power of two.

    FFTs of large prime lengths are slow."""
    step = 1
    while l >= 16 * step:  # bit_length would make the compiler start anew at every length
        step *= 2
    return ceil_div(l, step) * step


def true_lengths(lengths, b, l, device):
    """Return true lengths (b,): `lengths`, or l for every sequence if that is None."""
    return torch.full((b,), l, device=device) if lengths is None else lengths


@functools.lru_cache(maxsize=4)  # all layers and norms ask for the same
def inside(lengths, l, dtype=torch.bool):
    """Return which positions are real: lengths (...,), never changed in place -> (..., l)."""
    return (torch.arange(l, device=lengths.device) < lengths[..., None]).to(dtype)


@functools.lru_cache(maxsize=4)
def padding_mask(lengths, l, dtype):
    """Return what is added to attention scores, (b, 1, 1, l): 0 for real keys, else -inf."""
    real = inside(lengths, l)  # (b, l)
    return torch.zeros_like(real, dtype=dtype).masked_fill(~real, -math.inf)[:, None, None]


# Powers of poles and of S4's matrix.


def powers(log_p, count, number):
    """Return p^k for k < count: log p (d, n) -> (d, count, n) of complex type `number`.

    The two-level split again: with k = i f + j only about 2 sqrt(count) powers are made, and
    multiplied in pairs. `doubling` makes them in complex128, in half the time of exponentials."""
    f = 2 ** (count.bit_length() // 2)
    p = torch.polar(log_p.real.exp(), log_p.imag)  # (d, n)
    fine = doubling(p, f)  # (d, f, n)  p^j
    coarse = doubling(fine[:, -1] * p, ceil_div(count, f))  # (d, count/f, n)  p^(i f)
    return (coarse.to(number)[:, :, None] * fine.to(number)[:, None]).flatten(1, 2)[:, :count]


def doubling(p, count):
    """Return p^k for k < count, (d, n) -> (d, count, n): the powers so far, and the same times the
    next square of p."""
    y = torch.ones_like(p)[:, None]
    while y.shape[1] < count:
        y = torch.cat((y, y * p[:, None]), 1)
        p = p * p
    return y[:, :count]


def transition_power(A, P, dt, l):
    """Return Abar^l (d, N, N), float64, as a real matrix on [Re x, Im x], a quarter of the work.

    A, P complex (d, n) or (1, n), dt (d,). On states [x, conj x], A_full is x -> R x + S conj x."""
    A, P = (v.to(torch.complex128) for v in (A, P))
    R = torch.diag_embed(A) - P[..., :, None] * P.conj()[..., None, :]  # (d, n, n)
    S = -P[..., :, None] * P[..., None, :]
    upper = torch.cat((R.real + S.real, S.imag - R.imag), -1)
    lower = torch.cat((R.imag + S.imag, R.real - S.real), -1)
    half_step = dt.double()[:, None, None] / 2 * torch.cat((upper, lower), -2)  # (d, N, N)
    eye = torch.eye(half_step.shape[-1]).to(half_step)
    return torch.linalg.matrix_power(torch.linalg.solve(eye - half_step, eye + half_step), l)


# For BatchNorm: statistics over real positions.


def masked_norm(x, real, gain, bias, eps):
    """Normalise x (b, d, l) by its mean and variance over the real positions of all processes.

    real (b, 1, l): 1 or 0; gain, bias (d,) -> (b, d, l), and of the real positions mean (d, 1),
    variance (d, 1) and number (1, 1)."""
    with torch.no_grad():
        count = over_processes(real.sum((0, 2), keepdim=True)[0])  # (1, 1)
        share = real / count  # (b, 1, l)
        mean = over_processes((x * share).sum((0, 2))[:, None])  # (d, 1)
        centred = x - mean
        variance = over_processes(centred.square().mul_(share).sum((0, 2))[:, None])  # (d, 1)
        rate = torch.rsqrt(variance + eps)  # (d, 1)
        scale = rate * gain[:, None]
        y = (centred * scale).add_(bias[:, None])  # on a CPU a quarter of the time of `addcmul`
    kept = centred, share, rate, scale
    y = with_gradient(y, gradients.norm_gradient, kept, x, gain, bias)
    return y, mean, variance, count


# For attention: the table of rotary angles; all blocks in one call.


@functools.lru_cache(maxsize=8)
def rotary_turns(l, e, device):
    """Return exp(i t 10000^(-2m/e)) for position t and pair m as cosine and sine, (l, e/2, 2).

    Angles are float64: at l = 65536 a float32 angle is off by thousandths of a radian."""
    frequency = 10000.0 ** (-torch.arange(0, e, 2, device=device, dtype=torch.float64) / e)
    t = torch.arange(l, device=device, dtype=torch.float64)
    angle = t[:, None] * frequency
    return torch.stack((angle.cos(), angle.sin()), -1).float()


def split_blocks(x, size, n):
    """Cut (..., l, e) into blocks (..., n, size, e), the last filled up with zeros."""
    return F.pad(x, (0, 0, 0, n * size - x.shape[-2])).unflatten(-2, (n, size))


def real_keys(positions, l, lengths):
    """Return which key positions hold a real element: positions (...) -> bool (1 or b, ...)."""
    ends = true_lengths(lengths, 1, l, positions.device)
    return (positions >= 0) & (positions < ends.view(-1, *[1] * positions.ndim))


def attend_blocks(q, k, v, causal, mask):
    """Return softmax(q k^T / sqrt(e) + mask) v. Causal: the last query is aligned with the last
    key, so that a block can also see the block before it."""
    lq = q.shape[-2]
    lk = k.shape[-2]
    if causal and lq != lk:  # is_causal would align the first query with the first key instead
        if q.is_cuda and not torch.compiler.is_compiling():
            from torch.nn.attention.bias import causal_lower_right  # imports the compiler: seconds

            mask = causal_lower_right(lq, lk)  # describes a mask that would take 67 MB
        else:
            mask = torch.ones(lq, lk, dtype=torch.bool, device=q.device).tril(lk - lq)  # (lq, lk)
        causal = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


def block_attention(q, k, v, block, causal, mask):
    """Compute `attention` with one call per block: queries, keys, values (b, h, l, e) -> the same.

    mask: (b, 1, 1, l) or None. Where blocks are few and large (4 of 4096 on PathX), a call without
    a mask may use flash kernels. Block i reads keys[:, :, (i-1) block : (i+2) block]. Interior
    blocks take them from overlapping `unfold` views: autograd would give every slice a gradient of
    full length."""
    l = k.shape[-2]
    reach = (2 if causal else 3) * block
    k_views, v_views = (  # (b, h, reach, e) each
        x.unfold(2, min(reach, l), block).transpose(-1, -2).unbind(2) for x in (k, v)
    )
    outputs = []
    for i, queries in enumerate(q.split(block, 2)):
        near = slice(max(0, (i - 1) * block), min(l, (i - 1) * block + reach))
        if near.stop - near.start == reach:
            keys, values = k_views[i - 1], v_views[i - 1]
        else:
            keys, values = k[:, :, near], v[:, :, near]
        near_mask = None
        if mask is not None:
            near_mask = mask[..., near]
            empty = near_mask.amax(-1, keepdim=True) < 0  # padded queries; softmax needs a key
            near_mask = near_mask.masked_fill(empty, 0.0)
        outputs.append(attend_blocks(queries, keys, values, causal, near_mask))
    return torch.cat(outputs, -2)


def near_attention(q, k, v, size, reach=None, causal=False, lengths=None):
    """Compute `attention` in blocks of `size` with one call: blocks become rows of the batch.

    With `reach`, positions attend only to |j - i| <= reach. Queries, keys, values (b, h, l, e) ->
    (b, h, l, e)."""
    b, h, l, e = q.shape
    size = min(size, l)
    n = ceil_div(l, size)  # blocks of queries
    blocks = 2 if causal else 3  # of keys for each
    width = blocks * size
    after = (n + blocks - 2) * size - l  # filled up at the end
    device = q.device
    q = split_blocks(q, size, n).transpose(1, 2)  # (b, n, h, size, e)
    k, v = (F.pad(x, (0, 0, size, after)).unflatten(2, (-1, size)).transpose(1, 2) for x in (k, v))
    # Copies beside each other; the gradient of overlapping `unfold` views takes longer.
    k, v = (torch.cat([x[:, i : i + n] for i in range(blocks)], 3) for x in (k, v))
    i = torch.arange(n * size, device=device).view(n, size, 1)
    first = size * torch.arange(n, device=device)[:, None, None]  # of each block
    j = first + torch.arange(-size, width - size, device=device)  # (n, 1, width)
    seen = real_keys(j, l, lengths)  # (1 or b, n, 1, width)
    if reach is not None:
        seen = seen & ((i - j).abs() <= reach)  # (1 or b, n, size, width)
    if causal:
        seen = seen & (j <= i)
    seen = seen | ~seen.any(-1, keepdim=True)  # padded queries may see no key; softmax needs one
    seen = seen.expand(b, -1, -1, -1).flatten(0, 1)[:, None]  # (b n, 1, 1 or size, width)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))  # (b n, h, size or width, e)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)  # (b n, h, size, e)
    return y.unflatten(0, (b, n)).transpose(1, 2).flatten(2, 3)[:, :, :l]  # (b, h, l, e)


if __name__ == "__main__":
    story = runpy.run_path(str(Path(__file__).parent / "results" / "story.py"))
    raise SystemExit(story["exit_code"](lambda: story["main"](Path("kernels.png"))))
