"""The mathematics: convolution kernels of state space models, the FFT convolution, attention.

"Kernel" here means the convolution kernel K of a linear recurrence, not a GPU kernel. Everything is a pure function
of tensors; there is no nn.Module in this file, and it imports nothing from the others.

    python kernels.py            benchmark: fast form beside naive form (time, peak memory, error against float64), a
                                 layer beside what this machine could do, and the time to generate a position

The story, in the order of the file
    1  A linear recurrence  x[k] = Abar x[k-1] + Bbar u[k],  y[k] = C x[k]         (paper, eq. 1)
       is a convolution     y = K * u,  K[k] = C Abar^k Bbar                       (paper, eq. 2.4 and 4)
       so a whole sequence costs one FFT instead of l sequential steps: `fft_conv`.
    2  If Abar is diagonal, K is a sum of n geometric sequences, a Vandermonde product: `diagonal_kernel` (DLR, eq. 3).
       Taken in two levels it is a matrix product with n sqrt(l) exponentials in place of n l: `geometric_sums`.
    3  S4 has A = diag + rank 1 (HiPPO), discretised by the bilinear rule (eq. 2.1 to 2.3): `discretize`, `hippo_nplr`.
       Its kernel is known on the roots of unity through four Cauchy sums: `s4_kernel_naive`.
       Under the bilinear map each Cauchy sum is the spectrum of a diagonal kernel, so part 2 computes it: `s4_kernel`.
       To generate, the recurrence itself takes O(n) a step: `s4_step`.
    4  Beyond the paper: S4D and MEGA's averages are part 2 with other poles; S5 and LRU share one state among channels,
       so they scan; SGConv needs no recurrence, it joins short learned pieces, stretched and weighted.
    5  Attention, whole or in blocks, and rotary positions.
    6  Beyond the paper: attention in a band, between some blocks, among vectors hashed alike, and without softmax.
    7  Beyond the paper: matrices that are products of two cheaper ones.

Glossary (sizes lower-case, matrices upper-case as in the paper)
    b batch   l length   d channels   h heads   e width of a head   c kernels per channel (2 when bidirectional)
    N state size   n = N/2 stored states: A is real up to a change of basis, so its complex eigenvalues come in
      conjugate pairs and one of each pair is enough
    A   (d, n) diagonal part of S4's continuous state matrix
    Lambda  (n,) DLR: logarithms of the poles, Abar = diag(e^Lambda)      W  (c, d, n) its output map
    P   (d, n) low-rank part: A_full = diag(A) - P P*      B  (d, n) input map      C  (c, d, n) output map
    dt  (d,)   step size Delta of the discretisation       K  (c, d, l) convolution kernel

References: Amos et al. 2024, "Never Train from Scratch" (the paper); [1] Gu et al. 2022, "Efficiently Modeling Long
Sequences with Structured State Spaces" (S4); [2] Gupta et al. 2022, "Simplifying and Understanding State Space
Models with Diagonal Linear RNNs" (DLR); [3] Su et al. 2021, "RoFormer"; [4] Li et al. 2023, "What Makes Convolutional
Models Great on Long Sequence Modeling?" (SGConv).

Precision. Whatever autocast says, kernels and convolutions run in float32, because poles near the unit circle raised
to the power l do not survive bfloat16. Exponents are formed in float64: a phase of 10^4 radians has lost three of
float32's seven digits before the exponential is taken.
"""
import functools
import math

import torch
import torch.nn.functional as F

# ---- 1  Recurrence and convolution -----------------------------------------------------------------------------------

def ssm_scan(Abar, Bbar, C, u):
    """The recurrence itself, one step at a time (paper, eq. 1): what every kernel below must reproduce.

    Abar (d, n, n), Bbar (d, n), C (d, n), u (b, d, l) -> y (b, d, l), real part of C x[k].
    """
    x = torch.zeros(u.shape[0], *Bbar.shape, dtype=Bbar.dtype, device=u.device)          # (b, d, n)
    y = []
    for k in range(u.shape[-1]):
        x = torch.einsum("dmn,bdn->bdm", Abar, x) + Bbar * u[:, :, k, None]
        y.append(torch.einsum("dn,bdn->bd", C, x).real)
    return torch.stack(y, dim=-1)                                                        # (b, d, l)


def ceil_div(a, b):
    """a / b rounded up, for integers."""
    return -(-a // b)


def fft_length(l):
    """Smallest length >= l that is a small number times a power of two: FFTs of large prime lengths are slow."""
    step = 1
    while l >= 16 * step:              # not bit_length, which would make the compiler start anew at every length
        step *= 2
    return ceil_div(l, step) * step


class CircularConvolution(torch.autograd.Function):
    """`fft_conv`. Written out because autograd's own backward of rfft is a complex FFT of twice the work, and because
    it would keep the spectrum of u, twice the size of u, for the backward pass; transforming u again is cheaper than
    that memory."""

    @staticmethod
    def forward(context, u, K, D):
        l = u.shape[-1]
        n = fft_length(2 * l)
        circle = K.new_zeros(K.shape[1], n)
        circle[:, : K.shape[-1]] = K[0]                        # lags 0 .. l-1
        if len(K) == 2:                        # negative lags live at the end of the circle: index n-1-j is lag -1-j
            circle[:, n - K.shape[-1]:] = K[1].flip(-1)
        spectrum = torch.fft.rfft(circle)                                                # (d, n/2+1)
        if D is not None:                                      # a constant in all frequencies is a value at lag 0
            spectrum += D[:, None]
        context.save_for_backward(u, spectrum)
        context.n, context.shape = n, K.shape
        return torch.fft.irfft(torch.fft.rfft(u, n=n).mul_(spectrum), n=n)[..., :l].contiguous()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, grad):
        u, spectrum = context.saved_tensors
        n, (c, _, l) = context.n, context.shape
        grad = torch.fft.rfft(grad, n=n)                                                 # (b, d, n/2+1)
        # The adjoint of a convolution is a correlation: a conjugate in the frequency domain.
        of_u = torch.fft.irfft(grad * spectrum.conj(), n=n)[..., : u.shape[-1]]
        of_circle = torch.conj_physical_(torch.fft.rfft(u, n=n)).mul_(grad).sum(0)       # (d, n/2+1)
        circle = torch.fft.irfft(of_circle, n=n)                                         # (d, n)
        of_K = circle[None, :, :l] if c == 1 else torch.stack((circle[:, :l], circle[:, n - l:].flip(-1)))
        return of_u, of_K, circle[:, 0] if context.needs_input_grad[2] else None


@torch.amp.autocast("cpu", enabled=False)
@torch.amp.autocast("cuda", enabled=False)
def fft_conv(u, K, K_back=None, D=None):
    """Causal convolution y[t] = sum_j K[j] u[t-j], plus sum_j K_back[j] u[t+1+j] and D u[t] where these are given.

    u (b, d, l), K and K_back (d, l), or K (1 or 2, d, l), D (d,) -> (b, d, l) in u's dtype. The backward kernel
    starts at lag 1, so that position t itself is counted once. Zero padding to twice the length makes the circular
    convolution of the FFT a linear one.
    """
    if K.ndim == 2:
        K = K[None] if K_back is None else torch.stack((K, K_back))
    return CircularConvolution.apply(u.float(), K[..., : u.shape[-1]].float(), D).to(u.dtype)    # (b, d, l)


# ---- 2  Diagonal recurrences: sums of geometric sequences ------------------------------------------------------------

@functools.lru_cache(maxsize=16)
def two_levels(count, device):
    """0 .. f-1, then every f-th number up to count, float64, and f: each k < count is a sum of one of either kind."""
    fine = 2 ** (count.bit_length() // 2)
    ranges = torch.arange(fine, device=device), torch.arange(0, count, fine, device=device)
    return torch.cat(ranges).double(), fine


def powers(log_p, count, number):
    """p^k for k < count: log p (d, n) -> (d, count, n) of complex type `number`, as products of about 2 sqrt(count)
    powers. Those are taken in float64, by real functions: complex exponentials run at a third of their speed."""
    index, fine = two_levels(count, log_p.device)                                        # (f + count / f,)
    size = torch.exp(log_p.real[:, None] * index[:, None])                               # (d, f + count / f, n)
    angle = log_p.imag[:, None] * index[:, None]
    p = torch.complex(torch.cos(angle).mul_(size), torch.sin(angle).mul_(size)).to(number)
    return (p[:, fine:, None] * p[:, None, :fine]).flatten(1, 2)[:, :count]


class GeometricSums(torch.autograd.Function):
    """`geometric_sums`. Written out, because autograd's own backward pass copies and keeps several times as much."""

    @staticmethod
    def forward(context, V, log_p, l, number):
        d, r, n = V.shape
        # Left and right factor are about equally large, and l is a multiple of m where it is one of a power of two.
        m = min(l, 2 ** round(math.log2(2 * l * r) / 2))
        right = powers(log_p.conj(), m, number)                                          # (d, m, n)  p^j, conjugated
        step = powers(m * log_p, ceil_div(l, m), number)                                 # (d, l/m, n)  p^(i m)
        left = V.to(number)[:, :, None] * step[:, None]                                  # (d, r, l/m, n)
        # Re(x y) = Re x Re y - Im x Im y is the product of [Re x, Im x] and the conjugate's [Re y, -Im y]: with real
        # and imaginary parts side by side, as they lie in memory, the sum over n is a real matrix product.
        left, right = (torch.view_as_real(y).flatten(-2) for y in (left, right))         # (d, r, l/m, 2n), (d, m, 2n)
        context.save_for_backward(V, step, right)
        return (left.flatten(1, 2) @ right.mT).view(d, r, -1)[..., :l]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, grad):
        """d p^k / d log p = k p^k: both gradients are sums over k of conjugate powers, weighted by grad and k grad."""
        V, step, right = context.saved_tensors
        d, r, n = V.shape
        grad = F.pad(grad, (0, step.shape[1] * right.shape[1] - grad.shape[-1]))         # (d, r, l)
        k = torch.arange(grad.shape[-1], device=grad.device, dtype=grad.dtype)

        def sums(grad):
            inner = grad.reshape(d, -1, right.shape[1]) @ right                          # (d, r l/m, 2n)  over j
            inner = torch.view_as_complex(inner.view(d, r, -1, n, 2))
            return inner.mul_(step.conj()[:, None]).sum(2).to(V.dtype)                   # (d, r, n)       over i

        return sums(grad), (sums(k * grad) * V.conj()).sum(1), None, None


def geometric_sums(V, log_p, l, dtype=torch.float32):
    """Re sum_n V[d, r, n] exp(log_p[d, n] k) for k = 0 .. l-1: V (d, r, n), log_p (d, n) -> (d, r, l).

    Write k = i m + j with m ~ sqrt(l). Then p^k = p^(i m) p^j, and the sum over n becomes a product of an
    (l/m x n) and an (n x m) matrix for each set of poles, whose r rows share the right one. n (m + l/m) powers are
    needed instead of n l, and the (d, n, l) tensor of the textbook never exists.
    """
    number = torch.complex64 if dtype == torch.float32 else torch.complex128
    return GeometricSums.apply(V.to(torch.complex128), log_p.to(torch.complex128), l, number)


def diagonal_kernel_naive(W, Lambda, l):
    """The diagonal kernel as it is written (paper, eq. 3): same arguments and result as `diagonal_kernel`.

    Builds (c, d, n, l) tensors. Precision follows the inputs: give complex128 for an oracle.
    """
    k = torch.arange(l, device=W.device, dtype=W.real.dtype)
    return (W[..., None] * torch.exp(Lambda[..., None] * k)).sum(-2).real                # (c, d, l)


@torch.amp.autocast("cpu", enabled=False)
@torch.amp.autocast("cuda", enabled=False)
def diagonal_kernel(W, Lambda, l):
    """Kernel of the diagonal linear RNN (paper, eq. 3; [2]): K[c, d, k] = Re sum_n W[c, d, n] exp(Lambda[n] k).

    W complex (c, d, n), Lambda complex (n,) shared by all channels, (d, n), or (g, n) for g groups of d/g channels
    -> float32 (c, d, l). There is no step size, no B, no factor 2 and no conjugate pairing. The caller must ensure
    Re Lambda <= 0; growing sums are right as long as e^(Re Lambda l) fits into float32.
    """
    c, d, n = W.shape
    Lambda = Lambda.view(-1, n)                                                          # (g, n)
    W = W.unflatten(1, (len(Lambda), -1)).transpose(0, 1)                                # (g, c, d/g, n)
    # A group is one (c d/g l/m x 2n)(2n x m) product. Neither a (d, n, l) nor an (n, l) tensor exists.
    K = geometric_sums(W.flatten(1, 2), Lambda, l)                                       # (g, c d/g, l)
    return K.unflatten(1, (c, -1)).transpose(0, 1).flatten(1, 2)                         # (c, d, l)


# ---- 3  S4: diagonal plus low rank, bilinear discretisation ----------------------------------------------------------

def hippo_nplr(N):
    """HiPPO-LegS, the state matrix that remembers the past as Legendre coefficients, in diagonal-plus-rank-1 form.

    Returns A, P, B, each complex (N/2,), conjugate representatives with negative imaginary part in ascending order,
    such that diag(A) - P P* (over all N states) is HiPPO-LegS in the basis of its eigenvectors V, and B = V* B_legs.
    Source: [1], appendix C.1. Computed in float64: A + P P^T is normal, -1/2 plus a skew-symmetric matrix, so `eigh` of
    -i times that skew part gives an orthonormal V.
    """
    if N < 2 or N % 2:
        raise ValueError(f"the state size N must be even and at least 2, got {N}")
    k = torch.arange(N, dtype=torch.float64)
    B = torch.sqrt(2 * k + 1)                                                            # (N,)
    P = torch.sqrt(k + 0.5)                                                              # (N,)
    A = -torch.tril(B[:, None] * B[None, :], diagonal=-1) - torch.diag(k + 1)            # (N, N) LegS
    normal = A + P[:, None] * P[None, :]                                                 # -1/2 I + skew
    imag, V = torch.linalg.eigh(-1j * (normal - normal.T).to(torch.complex128) / 2)      # ascending, V unitary
    first = slice(0, N // 2)                                                             # the negative imaginary parts
    Vh = V.conj().T.to(torch.complex128)
    A_diag = torch.complex(torch.full_like(imag, -0.5), imag)
    return A_diag[first], (Vh @ P.to(Vh.dtype))[first], (Vh @ B.to(Vh.dtype))[first]


def discretize(A, P, B, dt):
    """Bilinear discretisation, written out with dense matrices (paper, eq. 2.1 to 2.3). O(d N^3): for reading,
    initialisation and tests.

    A, P, B complex (d, n) or (1, n), one of each conjugate pair; dt (d,) -> Abar (d, N, N), Bbar (d, N), N = 2n.
    """
    A, P, B = (torch.cat((v, v.conj()), -1) for v in (A, P, B))                          # (d, N) all states
    A_full = torch.diag_embed(A) - P[..., :, None] * P.conj()[..., None, :]              # (d, N, N)
    half_step = dt[:, None, None] / 2 * A_full
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    Abar = torch.linalg.solve(eye - half_step, eye + half_step)                          # (d, N, N)
    Bbar = torch.linalg.solve(eye - half_step, (dt[:, None] * B)[..., None])[..., 0]     # (d, N)
    return Abar, Bbar


def transition_power(A, P, dt, l):
    """Abar^l (d, N, N) as a real matrix on [Re x, Im x], for A, P complex (d, n) or (1, n) and dt (d,), in float64.

    The state keeps its conjugate pairs, [x, conj x], so A_full is x -> F x + G conj x: a quarter of the arithmetic of
    the complex (N, N) matrix, which matters for large N.
    """
    A, P = A.to(torch.complex128), P.to(torch.complex128)
    F = torch.diag_embed(A) - P[..., :, None] * P.conj()[..., None, :]                   # (d, n, n)
    G = -P[..., :, None] * P[..., None, :]
    A_real = torch.cat((torch.cat((F.real + G.real, G.imag - F.imag), -1),
                        torch.cat((F.imag + G.imag, F.real - G.real), -1)), -2)          # (d, N, N)
    half_step, eye = dt.double()[:, None, None] / 2 * A_real, torch.eye(A_real.shape[-1]).to(A_real)
    return torch.linalg.matrix_power(torch.linalg.solve(eye - half_step, eye + half_step), l)


def truncation_correction(A, P, C, dt, l):
    """C~ = C (I - Abar^l), the form of C that S4 trains ([1], lemma C.3): C complex (c, d, n) -> (c, d, n), complex128.

    It turns the truncated sum over k < l into a closed form.
    """
    C_real = torch.cat((C.real, -C.imag), -1).double()                                   # (c, d, N) Re C x as a row
    C_real = C_real - torch.einsum("cdm,dmn->cdn", C_real, transition_power(A, P, dt, l))
    return torch.complex(*C_real.chunk(2, -1)).conj().resolve_conj()                     # (c, d, n)


def s4_kernel_naive(A, P, B, C, dt, l):
    """The S4 kernel as the textbook writes it ([1], algorithm 1): same arguments and result as `s4_kernel`.

    On the l-th roots of unity w, with C~ in place of C, the generating function sum_k K[k] w^k is
        dt C~ [(1 - w) I - dt/2 (1 + w) A_full]^-1 B
    and Woodbury's identity reduces the inverse of diagonal-plus-rank-1 to four Cauchy sums S(v) = sum_n v_n / D_n(w),
    D_n = (1 - w) - dt/2 (1 + w) A_n. (This form has no division by 1 + w, which vanishes at w = -1.)
    Builds (c, d, n, l) tensors: O(d n l) memory. Precision follows the inputs: give complex128 for an oracle.
    """
    A, P, B, C = (torch.cat((v, v.conj()), -1) for v in (A, P, B, C))                    # all N states
    angle = torch.arange(l // 2 + 1, device=dt.device, dtype=torch.float64) * (-2 * math.pi / l)
    w = torch.polar(torch.ones_like(angle), angle).to(A.dtype)                           # (l/2+1,)
    dt = dt.to(A.real.dtype)[:, None]                                                    # (d, 1)
    D = (1 - w) - (dt / 2)[..., None] * (1 + w) * A[..., None]                           # (d, N, l/2+1)

    def cauchy(v):
        return (v[..., None] / D).sum(-2)                                                # (..., d, l/2+1)

    g = dt / 2 * (1 + w)                                                                 # (d, l/2+1)
    spectrum = dt * (cauchy(C * B)
                     - g * cauchy(C * P) * cauchy(P.conj() * B) / (1 + g * cauchy(P.conj() * P)))
    return torch.fft.irfft(spectrum, n=l)                                                # (c, d, l)


# Where some |1 - x| |1 - p^l| falls below this, float32 is not enough.
NEAR_ROOT_OF_UNITY = 0.02


class WoodburyKernel(torch.autograd.Function):
    """irfft(CB + CP (first[0] - PB) / (first[1] + PP)) of the rfft of `sums` (d, c+1, 2, l), whose rows are CB, CP for
    each C, then PB, PP; first (d, 2) -> (d, c, l). Written out because autograd's backward passes of rfft and irfft are
    complex transforms of twice the work: each is the other's adjoint, but for factors that cancel here."""

    @staticmethod
    def forward(context, sums, first):
        CB_PB, CP_PP = torch.fft.rfft(sums).unbind(2)                                    # (d, c+1, l/2+1)
        below = first[:, 1:, None] + CP_PP[:, -1:]
        ratio = (first[:, :1, None] - CB_PB[:, -1:]) / below                             # (d, 1, l/2+1)
        context.save_for_backward(CP_PP[:, :-1].clone(), below, ratio)     # a view would keep all that it is a view of
        return torch.fft.irfft(torch.addcmul(CB_PB[:, :-1], CP_PP[:, :-1], ratio), n=sums.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, grad):
        CP, below, ratio = context.saved_tensors
        of_CB = torch.fft.rfft(grad)                                                     # (d, c, l/2+1)
        of_PB = (of_CB * CP.conj()).sum(1, keepdim=True) / -below.conj()
        of_CB_PB = torch.cat((of_CB, of_PB), 1)
        both = torch.stack((of_CB_PB, of_CB_PB * ratio.conj()), 2)                       # (d, c+1, 2, l/2+1)
        both = torch.fft.irfft(both, n=grad.shape[-1])
        PB, PP = both[:, -1, :, :1].unbind(1)              # a constant in all frequencies is a value at k = 0
        return both, torch.cat((-PB, PP), 1)


@torch.amp.autocast("cpu", enabled=False)
@torch.amp.autocast("cuda", enabled=False)
def s4_kernel(A, P, B, C, dt, l, precise=None):
    """Convolution kernel of S4: A_full = diag(A) - P P*, bilinear discretisation (paper, eq. 2; [1]).

    A, P, B complex (d, n) or (1, n), one of each conjugate pair; C complex (c, d, n), the truncation-corrected
    C~ = C (I - Abar^l); dt (d,) -> real float32 (c, d, l).  With x~ = [x, conj x] over all N = 2n states,
    K[k] = C_raw~ Abar^k Bbar.  C is not conjugated and there is no extra factor.

    How: each Cauchy sum of `s4_kernel_naive` has terms
        v_n / D_n(w) = v_n / (1 - x_n)  *  1 / (1 - w p_n),    x_n = dt A_n / 2,    p_n = (1 + x_n) / (1 - x_n),
    and on the l-th roots of unity  1 / (1 - w p) = sum_{k<l} w^k p^k / (1 - p^l)  exactly. So a Cauchy sum is the
    discrete Fourier transform of a sum of geometric sequences with the poles p_n, which `geometric_sums` computes as
    one matrix product for all four sums. O(d n sqrt(l)) powers, O(c d l) memory.

    In float32 the textbook's form would cancel badly, so two things are written differently. With B = beta P + B',
        CB - g CP PB / (1 + g PP)  =  CB' + CP (beta - g PB') / (1 + g PP)        (CB: the Cauchy sum of C B, and so on)
    where nothing cancels at the start: HiPPO has B = sqrt(2) P. And g = dt/2 (1 + w) goes into the sums,
        g / D  =  dt / (1 - x^2)  *  1 / (1 - w p)  -  dt / (2 (1 + x)),
    because fast states (large x) have poles near -1: long and large sums, just where g vanishes.

    Accuracy, relative to the largest |K|, against a float64 recurrence: below 1e-4 (typically 1e-6) for dt in
    [1e-4, 10], any l, Re A <= -1e-4. Gradients alike, except that of dt, which is good to 1e-3 at l in the thousands.
    A state that forgets next to nothing in l steps may have its pole on a root of unity, where sums in float32 are off
    by about 1e-6 / |1 - p^l|: `precise` takes them in float64, at twice the time. None looks whether that is needed, a
    read-back that makes a GPU wait; `S4` in models.py keeps its states from it instead.
    """
    A, P, B, C = (v.to(torch.complex128) for v in (A, P, B, C))
    dt = dt.double()[:, None]                                                            # (d, 1)
    x = dt * A / 2                                                                       # (d, n)
    log_p = 2 * torch.atanh(x)
    gap = (1 - x) * -torch.expm1(l * log_p)                                              # (d, n)  (1 - x) (1 - p^l)
    if precise is None:
        precise = bool(gap.detach().abs().min() < NEAR_ROOT_OF_UNITY)
    dtype = torch.float64 if precise else torch.float32

    with torch.no_grad():                                                                # any beta gives the same sum
        beta = (P.conj() * B).real.sum(-1, keepdim=True) / P.abs().square().sum(-1, keepdim=True)
    right = dt[..., None] * torch.stack((B - beta * P, P), 1)                            # (d, 2, n)
    left = torch.cat((C.transpose(0, 1), (P.conj() / (1 + x))[:, None]), 1)              # (d, c+1, n)
    rest = (left[:, -1:] * right).real.sum(-1)                                           # (d, 2)
    first = torch.cat((beta + rest[:, :1], 1 - rest[:, 1:]), 1)
    # The factor 2 with Re: the conjugate halves add their conjugates.
    V = left[:, :, None] * (right * (2 / gap)[:, None])[:, None]                         # (d, c+1, 2, n)
    sums = geometric_sums(V.flatten(1, 2), log_p, l, dtype).unflatten(1, (-1, 2))        # (d, c+1, 2, l)
    return WoodburyKernel.apply(sums, first.to(dtype)).float().transpose(0, 1)           # (c, d, l)


def s4_recover_C(A, P, C, dt, l):
    """C from the trained C~ = C (I - Abar^l), which a step needs: complex (c, d, n) -> (c, d, n), complex128."""
    power = transition_power(A, P, dt, l)                                                # (d, N, N)
    C_real = torch.cat((C.real, -C.imag), -1).double()                                   # (c, d, N) Re C x as a row
    rest = (torch.eye(power.shape[-1]).to(power) - power).transpose(-1, -2)
    C_real = torch.linalg.solve(rest, C_real.permute(1, 2, 0)).permute(2, 0, 1)          # (c, d, N)
    return torch.complex(*C_real.chunk(2, -1)).conj().resolve_conj()                     # (c, d, n)


def s4_step(A, P, B, C, dt, x, u):
    """One step of S4's recurrence in O(n) a channel: state x complex (b, d, n), input u (b, d) -> y (b, d), x.

    A, P, B complex (d, n) or (1, n), C complex (d, n) as `s4_recover_C` gives it, dt (d,). The bilinear rule,
    (2/dt - A_full) x' = (2/dt + A_full) x + 2 B u, with the inverse of diagonal plus rank 1 by Woodbury. The state is
    half of [x, conj x]; the other half enters through real parts. Abar is never diagonalised: at HiPPO's start its
    eigenvectors have condition 4e7.
    """
    rate = 2 / dt[:, None]                                                               # (d, 1)
    F_, Pc = 1 / (rate - A), P.conj()                                                    # (d, n)
    rho = 1 / (1 + 2 * (P.abs().square() * F_).real.sum(-1, keepdim=True))               # (d, 1)
    w = (rate + A) * x - P * (2 * (Pc * x).real.sum(-1, keepdim=True)) + 2 * B * u[..., None]
    x = F_ * (w - P * (rho * 2 * (Pc * F_ * w).real.sum(-1, keepdim=True)))              # (b, d, n)
    return (2 * (C * x).real.sum(-1)).float(), x.to(torch.complex64)


# ---- 4  Other recurrences, and a kernel without one ------------------------------------------------------------------

@torch.amp.autocast("cpu", enabled=False)
@torch.amp.autocast("cuda", enabled=False)
def s4d_kernel(A, B, C, dt, l, rule="zoh"):
    """Kernel of S4D, a diagonal state space (Gu et al. 2022, arXiv 2206.11893): A, B complex (d, n) or (1, n), one of
    each conjugate pair; C complex (c, d, n); dt (d,) -> float32 (c, d, l).

    With x = dt A, K[k] = 2 Re sum_n C B Bbar p^k: zoh, p = e^x and Bbar = (e^x - 1) / A; bilinear,
    p = (1 + x/2) / (1 - x/2) and Bbar = dt / (1 - x/2).
    """
    return diagonal_kernel(*s4d_poles(A, B, C, dt, rule), l)


def s4d_poles(A, B, C, dt, rule="zoh"):
    """W (c, d, n) and Lambda (d, n), complex128, with which S4D is the sum of `diagonal_kernel`."""
    A, B, C = (v.to(torch.complex128) for v in (A, B, C))
    dt = dt.double()[:, None]                                                            # (d, 1)
    x = dt * A                                                                           # (d, n)
    if rule == "zoh":
        return 2 * C * B * torch.expm1(x) / A, x
    return 2 * C * B * dt / (1 - x / 2), torch.log((1 + x / 2) / (1 - x / 2))


@torch.amp.autocast("cpu", enabled=False)
@torch.amp.autocast("cuda", enabled=False)
def ema_kernel(delta, alpha, beta, gamma, l):
    """Kernel of MEGA's damped exponential moving averages (Ma et al. 2023): each (c, d, h) -> float32 (c, d, l).

    p = sigmoid(delta), q = 1 - p sigmoid(alpha); s[t] = q s[t-1] + p beta u[t], y = sum_h gamma s / sqrt(h). A sum of
    geometric sequences with real poles q, each direction its own.
    """
    c, d, h = delta.shape
    p = delta.double().sigmoid()                                                         # (c, d, h)
    log_q = torch.log1p(-p * alpha.double().sigmoid())
    W = gamma * p * beta / math.sqrt(h)
    return geometric_sums(W.flatten(0, 1)[:, None], log_q.flatten(0, 1), l).view(c, d, l)


@torch.amp.autocast("cpu", enabled=False)
@torch.amp.autocast("cuda", enabled=False)
def diagonal_scan(log_lambda, v):
    """x[t] = lambda x[t-1] + v[t]: complex (n,), complex (b, l, n) -> complex (b, l, n).

    By doubling: after log2(l) passes, each position has the sum over all before it. Powers of lambda are taken from its
    logarithm in float64; repeated squaring in float32 would lose two digits.
    """
    return DiagonalScan.apply(log_lambda, v)


class DiagonalScan(torch.autograd.Function):
    """Keeps x alone for the backward pass, where autograd would keep every one of the log2(l) passes."""

    @staticmethod
    def forward(ctx, log_lambda, v):
        x, shift = v, 1
        while shift < v.shape[1]:
            power = torch.exp(shift * log_lambda.to(torch.complex128)).to(v.dtype)       # (n,)
            x = torch.cat((x[:, :shift], x[:, shift:] + power * x[:, :-shift]), 1)
            shift *= 2
        ctx.save_for_backward(log_lambda, x)
        return x

    @staticmethod
    def backward(ctx, grad):
        """v's gradient is the same scan from the end. log lambda's: that, times the derivative of lambda x[t-1]."""
        log_lambda, x = ctx.saved_tensors
        grad = DiagonalScan.apply(log_lambda.conj(), grad.flip(1)).flip(1)               # (b, l, n)
        return (grad[:, 1:] * (log_lambda.exp() * x[:, :-1]).conj()).sum((0, 1)), grad


def sgconv_kernel(w, l, multiplier, power=None, init_scale=0):
    """Kernel of SGConv ([4]): S short learned pieces, the later ones stretched longer and weighted less.

    w (S, c, d, d0) pieces of d0 values, the first nearest to lag 0; multiplier (d,); power (d,) or None
    -> float32 (c, d, l). Piece i is stretched s = 2^(max(0, i-1) + init_scale) times by linear interpolation (lag t of
    it reads the piece at (t + 1/2) / s - 1/2, clamped), so pieces are d0, d0, 2 d0, 4 d0, ... lags long, times
    2^init_scale, and S d0 parameters reach T = d0 2^(S-1 + init_scale) lags. Piece i is weighted by
    multiplier^(S-1-i): at 2, each piece weighs half as much as the one before. With power, lag t is also weighted by
    (t + 1)^-power. The result is cut to l lags or continued with zeros.
    The layer, not this function, divides by the norm that the kernel has over all T lags at initialisation.
    """
    multiplier = multiplier.float()[:, None]                                             # (d, 1)
    pieces = []
    for i, piece in enumerate(w.float()):
        stretch = 2 ** (max(0, i - 1) + init_scale)
        piece = piece * multiplier ** (len(w) - 1 - i)                                   # (c, d, d0)
        pieces.append(F.interpolate(piece, scale_factor=stretch, mode="linear"))         # (c, d, d0 stretch)
    K = torch.cat(pieces, -1)                                                            # (c, d, T)
    if power is not None:
        lag = torch.arange(K.shape[-1], device=K.device)
        K = K * (lag + 1) ** -power.float()[:, None]
    return F.pad(K, (0, l - K.shape[-1]))                        # (c, d, l)  a negative pad cuts


# ---- 5  Attention and rotary positions -------------------------------------------------------------------------------

@functools.lru_cache(maxsize=8)
def rotary_phases(l, e, device):
    """exp(i t 10000^(-2m/e)) for position t and pair m, (l, e/2). Angles are float64: at l = 65536 a float32 angle is
    off by thousandths of a radian."""
    frequency = 10000.0 ** (-torch.arange(0, e, 2, device=device, dtype=torch.float64) / e)
    angle = torch.arange(l, device=device, dtype=torch.float64)[:, None] * frequency
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)


def rotary(x, start=0, dim=-2):
    """Rotary position embedding ([3]): rotates the pair (x[2m], x[2m+1]) at position t by t * 10000^(-2m/e).

    x (..., l, e) -> same shape and dtype. All of e is rotated (paper, section 3.2). After it, q_i . k_j depends on the
    positions only through i - j. A pair is a complex number, and its rotation one complex product. start: the position
    of the first element; dim: the dimension of positions, if it is another.
    """
    l, e = x.shape[dim], x.shape[-1]
    phases = rotary_phases(l if start == 0 else fft_length(start + l), e, x.device)[start:start + l]
    phases = phases.unflatten(0, (l,) + (1,) * (x.ndim - 2 - dim % x.ndim))              # (l, 1, ..., e/2)
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))                      # (..., l, e/2)
    return torch.view_as_real(pairs * phases).flatten(-2).to(x.dtype)


@functools.lru_cache(maxsize=None)
def flash_attn_works():
    """Whether flash-attn is installed and a call works: a build for another GPU or torch imports, then fails."""
    try:
        from flash_attn import flash_attn_func
        probe = torch.zeros(1, 8, 1, 32, device="cuda", dtype=torch.bfloat16)
        flash_attn_func(probe, probe, probe)
        return True
    except Exception:
        return False


@functools.lru_cache(maxsize=4)                                          # all layers and norms ask for the same
def inside(lengths, l, dtype=torch.bool):
    """True lengths (...,) -> (..., l), True or 1 at real positions. The lengths must not be changed in place."""
    return (torch.arange(l, device=lengths.device) < lengths[..., None]).to(dtype)


@functools.lru_cache(maxsize=4)
def padding_mask(lengths, l, dtype):
    """(b, 1, 1, l), to be added to scores: 0 for real keys, -inf for padded ones."""
    return torch.zeros_like(inside(lengths, l), dtype=dtype).masked_fill(~inside(lengths, l), -math.inf)[:, None, None]


def _attend(q, k, v, causal, mask):
    """softmax(q k^T / sqrt(e) + mask) v. Causal: the last query is aligned with the last key, for looking one block
    back."""
    flash = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
    if mask is None and flash and not torch.compiler.is_compiling() and flash_attn_works():
        from flash_attn import flash_attn_func
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))                                 # (b, l, h, e)
        return flash_attn_func(q, k, v, causal=causal).transpose(1, 2)
    lq, lk = q.shape[-2], k.shape[-2]
    if causal and lq != lk:               # scaled_dot_product_attention aligns is_causal with the first key instead
        mask = torch.ones(lq, lk, dtype=torch.bool, device=q.device).tril(lk - lq)       # (lq, lk)
        causal = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


def attention(q, k, v, causal=False, block=None, lengths=None):
    """Multi-head attention, (b, h, l, e) three times -> (b, h, l, e).

    block: the sequence is cut into blocks of that size, and each attends to itself and its neighbours, one on each
    side (causal: itself and the previous one), as the paper does from 16K on (section 2). l need not be a multiple.
    lengths (b,): keys at or past a sequence's true length are not attended. What comes out at queries past the true
    length is finite and without meaning.
    """
    l, mask = k.shape[-2], None
    if lengths is not None and not causal:          # causal: padding is at the end, where no real query ever looks
        mask = padding_mask(lengths, l, q.dtype)                                         # (b, 1, 1, l)
    if block is None or block >= l:
        return _attend(q, k, v, causal, mask)
    # One call per block. Blocks are few (4 of 4096 on PathX) and large, and a call without a mask may use flash
    # kernels. Blocks with all their neighbours are unbound from overlapping views: the gradient of a slice would be as
    # long as the sequence, once for each block.
    reach, out = (2 if causal else 3) * block, []
    ks, vs = (x.unfold(2, min(reach, l), block).transpose(-1, -2).unbind(2) for x in (k, v))     # (b, h, reach, e) each
    for i, some in enumerate(q.split(block, 2)):
        near = slice(max(0, (i - 1) * block), min(l, (i - 1) * block + reach))
        whole = near.stop - near.start == reach
        keys, values = (ks[i - 1], vs[i - 1]) if whole else (k[:, :, near], v[:, :, near])
        some_mask = None if mask is None else mask[..., near]
        if mask is not None:                               # no key left: a padded query; softmax needs one
            some_mask = some_mask.masked_fill(some_mask.amax(-1, keepdim=True) < 0, 0.0)
        out.append(_attend(some, keys, values, causal, some_mask))
    return torch.cat(out, -2)


# ---- 6  Cheaper attention --------------------------------------------------------------------------------------------

def split_blocks(x, size, n):
    """(..., l, e) -> (..., n, size, e), filled up with zeros."""
    return F.pad(x, (0, 0, 0, n * size - x.shape[-2])).unflatten(-2, (n, size))


def real_keys(positions, l, lengths):
    """Which key positions hold a real element: positions (...) -> bool (1 or b, ...)."""
    ends = torch.full((1,), l, device=positions.device) if lengths is None else lengths
    return (positions >= 0) & (positions < ends.view(-1, *[1] * positions.ndim))


def longformer_attention(q, k, v, window, causal=False, lengths=None):
    """Attention in a band, |j - i| <= window // 2, without global tokens (Beltagy et al. 2020): (b, h, l, e) thrice ->
    (b, h, l, e). lengths as in `attention`.

    Blocks of half a window: each attends to itself and its two neighbours, with the band as the mask. O(l window).
    """
    b, h, l, e = q.shape
    size = max(1, min(window // 2, l))
    n = ceil_div(l, size)
    q = split_blocks(q, size, n)                                                         # (b, h, n, size, e)
    k, v = (F.pad(x, (0, 0, size, (n + 1) * size - l)).unfold(2, 3 * size, size).transpose(-1, -2) for x in (k, v))
    i = torch.arange(n * size, device=q.device).view(n, size, 1)
    j = torch.arange(-size, 2 * size, device=q.device) + size * torch.arange(n, device=q.device)[:, None, None]
    seen = ((i - j).abs() <= window // 2) & real_keys(j, l, lengths)                     # (1 or b, n, size, 3 size)
    if causal:
        seen = seen & (j <= i)
    seen = seen | ~seen.any(-1, keepdim=True)                # padded queries may see no key; softmax needs one
    seen = seen.expand(b, -1, -1, -1).flatten(0, 1)[:, None]                             # (b n, 1, size, 3 size)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))                       # (b n, h, size or 3 size, e)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)                          # (b n, h, size, e)
    return y.unflatten(0, (b, n)).transpose(1, 2).flatten(2, 3)[:, :, :l]                # (b, h, l, e)


def bigbird_attention(q, k, v, block, random, causal=False, lengths=None):
    """Block-sparse attention (Zaheer et al. 2020): (b, h, l, e) thrice -> (b, h, l, e). lengths as in `attention`.

    Of n blocks, the first and the last attend to everything; row block i between them attends to itself, its
    neighbours, the two end blocks, and the blocks that `random` (h, n-2, r) int64 names. A key counts once, however
    often it is named.
    """
    b, h, l, e = q.shape
    n = ceil_div(l, block)
    if n < 3:                                                # end blocks only
        return attention(q, k, v, causal, lengths=lengths)
    q, k, v = (split_blocks(x, block, n) for x in (q, k, v))                             # (b, h, n, block, e)
    place = torch.arange(n * block, device=q.device).view(n, block)
    row = torch.arange(1, n - 1, device=q.device)
    fixed = torch.stack((row * 0, row - 1, row, row + 1, row * 0 + n - 1), -1)           # (n-2, 5)
    read = torch.cat((fixed.expand(h, -1, -1), random), -1)                              # (h, n-2, 5 + r)
    again = (read[..., :, None] == read[..., None, :]).tril(-1).any(-1)                  # named before in this row
    head = torch.arange(h, device=q.device)[:, None, None]
    near_k, near_v = (x[:, head, read].flatten(3, 4) for x in (k, v))                    # (b, h, n-2, (5+r) block, e)

    def attend(q, k, v, i, j, allowed):
        """Queries at positions i (..., m), keys at j (..., s): (b, x, h, m, e) -> the same, one call for all x."""
        seen = real_keys(j, l, lengths)[..., None, :] & allowed[..., None, :]
        if causal:
            seen = seen & (j[..., None, :] <= i[..., None])
        seen = seen | ~seen.any(-1, keepdim=True)            # as above
        seen = seen.expand(b, *seen.shape[1:]).flatten(0, 1)
        y = F.scaled_dot_product_attention(*(x.flatten(0, 1) for x in (q, k, v)), attn_mask=seen)
        return y.unflatten(0, (b, -1))

    inner, near_k, near_v = (x.transpose(1, 2) for x in (q[:, :, 1:-1], near_k, near_v)) # (b, n-2, h, ., e)
    keys = place[read].flatten(2).transpose(0, 1)                                        # (n-2, h, (5+r) block)
    allowed = ~again.repeat_interleave(block, -1).transpose(0, 1)
    inner = attend(inner, near_k, near_v, place[1:-1, None], keys, allowed).transpose(1, 2)   # (b, h, n-2, block, e)
    ends, every = (x.flatten(2, 3)[:, None] for x in (q[:, :, [0, -1]], k))              # (b, 1, h, 2 block or l, e)
    i, j = place[[0, -1]].view(1, 1, -1), place.view(1, 1, -1)
    ends = attend(ends, every, v.flatten(2, 3)[:, None], i, j, torch.ones_like(j, dtype=torch.bool))
    first, last = ends[:, 0].unflatten(2, (2, block)).split(1, 2)                        # (b, h, 1, block, e)
    return torch.cat((first, inner, last), 2).flatten(2, 3)[:, :, :l]                    # (b, h, l, e)


def lsh_attention(q, v, rotations, chunk, lengths=None):
    """Reformer's attention (Kitaev et al. 2020): shared queries and keys q, v (b, h, l, e) -> (b, h, l, e).

    In each round, vectors with the same bucket are likely neighbours: bucket = the largest of [x R, -x R] for that
    round's random rotation, `rotations` (h or 1, e, rounds, buckets / 2). Sorted by bucket and cut into chunks,
    the positions of a chunk attend to it and to the chunk before (the first one: to the last). Keys have length 1,
    there is no scale, and a position attends to itself only where nothing else is left. The rounds are averaged,
    each weighted by its share of the softmax's denominator. O(rounds l chunk). There is no causal form: where a chunk
    ends depends on the future.
    """
    b, h, l, e = q.shape
    n = ceil_div(l, chunk)
    size, ends = n * chunk, torch.full((b,), l, device=q.device) if lengths is None else lengths
    q, v = (F.pad(x, (0, 0, 0, size - l)) for x in (q, v))                               # (b, h, size, e)
    rounds, half = rotations.shape[2:]
    place = torch.arange(size, device=q.device)
    real = place < ends[:, None]                                                         # (b, size)
    with torch.no_grad():
        turned = torch.einsum("bhle,hert->bhrlt", q, rotations.to(q.dtype).expand(h, -1, -1, -1))
        bucket = torch.cat((turned, -turned), -1).argmax(-1)                             # (b, h, r, size)
        bucket = bucket.where(real[:, None, None], 2 * half)                             # padding after all buckets
        bucket = bucket + (2 * half + 1) * torch.arange(rounds, device=q.device)[:, None]
        order = (bucket * size + place).flatten(2).argsort(-1)                           # (b, h, r size)
    position = order % size

    def sort(x):
        x = x.take_along_dim(position[..., None], 2)                                     # (b, h, r size, e)
        return x.unflatten(2, (-1, chunk))                                               # (b, h, chunks, chunk, e)

    def with_previous(x):
        return torch.cat((x.roll(1, 2), x), 3)                                           # (b, h, chunks, 2 chunk, ...)

    i = position.unflatten(2, (-1, chunk))                                               # (b, h, chunks, chunk)
    j = with_previous(i)
    logits = sort(q) @ with_previous(sort(F.normalize(q, dim=-1))).transpose(-1, -2)
    logits = logits.masked_fill(i[..., :, None] == j[..., None, :], -1e5)
    logits = logits.masked_fill(j[..., None, :] >= ends.view(b, 1, 1, 1, 1), -1e9)
    share = logits.logsumexp(-1, keepdim=True)                                           # (b, h, chunks, chunk, 1)
    y = (logits - share).exp() @ with_previous(sort(v))                                  # (b, h, chunks, chunk, e)
    back = order.argsort(-1)[..., None]
    y, share = (x.flatten(2, 3).take_along_dim(back, 2).unflatten(2, (rounds, size)) for x in (y, share))
    return (y * share.softmax(2)).sum(2)[:, :, :l]                                       # (b, h, l, e)


def elu_features(x):
    """Features of the Linear Transformer (Katharopoulos et al. 2020): elu(x) + 1, same shape."""
    return F.elu(x) + 1


def relu_features(x):
    """Features of the generalised Performer: relu(x) + 0.001, same shape."""
    return F.relu(x) + 1e-3


def favor_features(x, W, query, eps=1e-6, causal=False, lengths=None):
    """Performer's positive random features, (b, h, l, e) -> (b, h, l, m): their dot products estimate
    exp(q.k / sqrt(e)) (Choromanski et al. 2021). W (m, e): random directions.

    So that exp does not overflow, each query's largest exponent is subtracted, and one largest exponent of all keys;
    both cancel in the quotient of `linear_attention`, but for eps. Causal: nothing is subtracted for keys, as it would
    leak the future; the exponent is at most |w|^2 / 2, which float32 holds for e up to 64.
    """
    m, e = W.shape
    x = x * e ** -0.25
    exponent = x @ W.to(x.dtype).T                                                       # (b, h, l, m)
    largest = exponent.detach()
    if query:
        largest = largest.amax(-1, keepdim=True)                                         # (b, h, l, 1)
    elif causal:
        largest = 0
    else:
        real = real_keys(torch.arange(x.shape[-2], device=x.device), x.shape[-2], lengths)[:, None, :, None]
        largest = largest.masked_fill(~real, -math.inf).amax((-2, -1), keepdim=True)     # (b, h, 1, 1)
    return m ** -0.5 * (torch.exp(exponent - x.square().sum(-1, keepdim=True) / 2 - largest) + eps)


def linear_attention(q, k, v, causal=False, lengths=None, eps=1e-6):
    """q (k^T v) / (q . sum of k + eps), the products taken in this order: O(l) (Katharopoulos et al. 2020).

    q, k (b, h, l, m): features, not negative; v (b, h, l, e) -> (b, h, l, e). Causal: sums over j <= i, exactly, by
    chunks: earlier ones as a running sum of k^T v, the query's own as a masked matrix.
    """
    l, size = q.shape[-2], 64
    if lengths is not None and not causal:
        k = k * real_keys(torch.arange(l, device=k.device), l, lengths)[:, None, :, None]
    v = F.pad(v, (0, 1), value=1.0)                          # the denominator is one more column of values
    if causal:
        q, k, v = (split_blocks(x, size, ceil_div(l, size)) for x in (q, k, v))          # (b, h, n, size, .)
        state = (k.transpose(-1, -2) @ v).cumsum(2)                                      # (b, h, n, m, e + 1)
        before = F.pad(state, (0, 0, 0, 0, 1, 0))[:, :, :-1]
        y = (q @ before + (q @ k.transpose(-1, -2)).tril() @ v).flatten(2, 3)[:, :, :l]
    else:
        y = q @ (k.transpose(-1, -2) @ v)                                                # (b, h, l, e + 1)
    return y[..., :-1] / (y[..., -1:] + eps)


# ---- 7  Structured matrices ------------------------------------------------------------------------------------------

def structured_linear(x, first, second, bias, kind):
    """x W^T + bias with W a product of two cheaper matrices (Wei et al. 2024): (..., N) -> (..., M).

    lowrank       first (R, N), second (M, R)
    blockdense    first (B, R/B, N/B), one matrix for each slice of x; second (M, R)
    blockshuffle  first (B, Q, N/B), second (B, M/B, Q), Q = min(N, M) / B: block diagonal both. Between them the values
                  are read as a (Q, B) matrix and transposed, after them as (B, M/B)
    """
    if kind == "lowrank":
        return F.linear(F.linear(x, first), second, bias)
    blocks = len(first)
    x = torch.einsum("...bn,bqn->...bq", x.unflatten(-1, (blocks, -1)), first)           # (..., B, R/B or Q)
    if kind == "blockdense":
        return F.linear(x.flatten(-2), second, bias)
    x = x.flatten(-2).unflatten(-1, (-1, blocks)).transpose(-1, -2)                      # (..., B, Q) shuffled
    x = torch.einsum("...bq,bmq->...bm", x, second)                                      # (..., B, M/B)
    return x.transpose(-1, -2).flatten(-2) + bias                                        # (..., M)


# ---- Benchmark -------------------------------------------------------------------------------------------------------

def random_s4(d, N, c, l, dt_min=1e-3, dt_max=0.1, dtype=torch.complex64, seed=0):
    """HiPPO-initialised arguments of `s4_kernel` (A, P, B, C~, dt) with random C and log-uniform dt."""
    generator = torch.Generator().manual_seed(seed)
    A, P, B = (v.expand(d, -1).contiguous() for v in hippo_nplr(N))                      # (d, n)
    C = torch.randn(c, d, N // 2, dtype=torch.complex128, generator=generator)
    dt = torch.exp(torch.rand(d, generator=generator, dtype=torch.float64) * math.log(dt_max / dt_min)) * dt_min
    C = truncation_correction(A, P, C, dt, l)
    return [v.to(dtype) for v in (A, P, B, C)] + [dt.to(dtype.to_real())]


def random_dlr(d, n, c, l, dt_min=1e-4, dt_max=1e-3, dtype=torch.complex64, seed=0):
    """Arguments of `diagonal_kernel` (W, Lambda) as DLR initialises them. l is unused; `random_s4` needs it."""
    generator = torch.Generator().manual_seed(seed)
    dt = torch.exp(torch.rand(n, generator=generator, dtype=torch.float64) * math.log(dt_max / dt_min)) * dt_min
    Lambda = torch.complex(-dt / 2, 2 * math.pi * torch.arange(n, dtype=torch.float64) / n)
    W = torch.randn(c, d, n, 2, generator=generator, dtype=torch.float64) / n
    return [torch.view_as_complex(W).to(dtype), Lambda.to(dtype)]


def measure(kernel, naive, make, sizes, device):
    """Forward + backward of `kernel`, in a new process: (seconds, peak MiB, error against `naive` in float64)."""
    import resource
    import time

    kernel(*(v.to(device) for v in make(2, 4, 1, 16)), 16).sum()                         # warm up
    arguments, l, seconds = make(*sizes), sizes[-1], []
    leaves = [v.detach().to(device).requires_grad_() for v in arguments]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(1 if kernel is naive else 3):
        start = time.perf_counter()
        K = kernel(*leaves, l)                                                           # (c, d, l)
        torch.autograd.grad(K.square().sum(), leaves)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    on_cpu = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else on_cpu
    # Four channels are enough for the error: rows of A, P, B, C and W, elements of dt; DLR's Lambda has none.
    few = [v[..., :4, :] if v.ndim > 1 else v if v.is_complex() else v[:4] for v in arguments]
    exact = naive(*(v.to(torch.promote_types(v.dtype, torch.float64)) for v in few), l)  # (c, 4, l)
    return min(seconds), peak / 2**20, ((K[:, :4].cpu() - exact).abs().max() / exact.abs().max()).item()


def benchmark(fast, naive, make, n, lengths, naive_up_to, d=256, c=2):
    """Prints seconds and peak memory of forward + backward, and the largest error over the largest |K|, by length."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"{fast.__name__}, forward + backward, d={d} N={n} directions={c}, {device}, "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| l | form | s | MiB | error |\n|---|---|---|---|---|")
    for l in lengths:
        for kernel in (naive, fast) if l <= naive_up_to else (fast,):
            # A new process inherits the peak of its parent, so this one computes nothing.
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                seconds, peak, error = pool.submit(measure, kernel, naive, make, (d, n, c, l), device).result()
            print(f"| {l} | {'naive' if kernel is naive else 'fast'} | {seconds:.3f} | {peak:.0f} | {error:.1e} |",
                  flush=True)
    print()


def benchmark_steps(lengths, d=256, N=64, h=4):
    """Prints milliseconds to generate position l of one sequence in one layer, without its projections: S4 by its
    recurrence, S4 by the convolution of all positions so far, attention with cached keys and values."""
    import time

    print(f"milliseconds per generated position of one layer, d={d} N={N} heads={h}, cpu, "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print("| position | S4, one step | S4, whole convolution | attention, cached |\n|---|---|---|---|")
    for l in lengths:
        A, P, B, C, dt = random_s4(d, N, 1, l)
        C_raw = s4_recover_C(A, P, C, dt, l)[0].to(A.dtype)                              # (d, n)
        K, u = s4_kernel(A, P, B, C, dt, l)[0], torch.randn(1, d, l)
        x, q = torch.zeros(1, d, N // 2, dtype=A.dtype), torch.randn(1, h, 1, d // h)
        cache = torch.randn(1, h, l - 1, d // h)

        def attend():
            k = torch.cat((cache, q), 2)                                                 # (1, h, l, e)
            return F.scaled_dot_product_attention(q, k, torch.cat((cache, q), 2))

        cells = []
        for step in (lambda: s4_step(A, P, B, C_raw, dt, x, u[:, :, -1]), lambda: fft_conv(u, K), attend):
            step()
            start, n = time.perf_counter(), 0
            while time.perf_counter() - start < 0.5:
                step()
                n += 1
            cells.append(f"{1000 * (time.perf_counter() - start) / n:.3f}")
        print(f"| {l} | {' | '.join(cells)} |", flush=True)


def machine_speed():
    """What this machine reaches on what it does best -> operations a second of a float32 matrix product, bytes a second
    of a copy."""
    a, b, copy = torch.randn(1024, 1024), torch.randn(2**25), torch.zeros(2**25)
    return 2 * 1024**3 / least_seconds(lambda: a @ a), 2 * b.nbytes / least_seconds(lambda: copy.copy_(b))


def least_seconds(f, times=10):
    import time

    took = []
    for _ in range(times):
        start = time.perf_counter()
        f()
        took.append(time.perf_counter() - start)
    return min(took)


def benchmark_layer(sizes):
    """Prints milliseconds, forward + backward, of the three parts of a bidirectional S4 layer, beside a bound: the time
    that their arithmetic takes at the speed of a matrix product or, if longer, their operands' at that of a copy."""
    speed, bandwidth = machine_speed()
    print(f"one S4 layer, forward + backward, ms (bound), cpu, {torch.get_num_threads()} threads: "
          f"{speed / 1e9:.0f} GFLOP/s, {bandwidth / 1e9:.1f} GB/s\n")
    print("| d, N, l, batch | kernel | convolution | GELU, linear, GLU |\n|---|---|---|---|")
    for d, N, l, b in sizes:
        arguments = [v.requires_grad_() for v in random_s4(d, N, 2, l)]
        K, u = s4_kernel(*arguments, l).detach().requires_grad_(), torch.randn(b, d, l, requires_grad=True)
        W = torch.randn(2 * d, d, requires_grad=True)
        fft = 2.5 * 2 * l * math.log2(2 * l)                                             # of one sequence and channel
        parts = ((lambda: s4_kernel(*arguments, l, precise=False), arguments,
                  3 * 2 * 6 * N * d * l, 6 * 2 * d * l),                                 # 6 sums, 3 products of each
                 (lambda: fft_conv(u, K), (u, K), 5 * b * d * fft, 5 * b * d * l),
                 (lambda: F.glu(W @ F.gelu(u), dim=1), (u, W), 3 * 2 * b * l * 2 * d * d, 5 * b * d * l))
        cells = []
        for part, leaves, flops, numbers in parts:
            took = least_seconds(lambda: torch.autograd.grad(part().sum(), leaves))
            cells.append(f"{1000 * took:.1f} ({1000 * max(flops / speed, 4 * numbers / bandwidth):.1f})")
        print(f"| {d}, {N}, {l}, {b} | {' | '.join(cells)} |", flush=True)
    print()


if __name__ == "__main__":
    benchmark(s4_kernel, s4_kernel_naive, random_s4, 64, (1024, 4096, 16384, 65536), naive_up_to=4096)
    benchmark(diagonal_kernel, diagonal_kernel_naive, random_dlr, 1024, (256, 1024, 4096, 16384), naive_up_to=256)
    benchmark_layer(((64, 16, 256, 16), (256, 64, 1024, 4), (512, 64, 1024, 4)))
    benchmark_steps((1024, 4096, 16384))
