"""The mathematics: convolution kernels of state space models, the FFT convolution, attention.

"Kernel" here means the convolution kernel K of a linear recurrence, not a GPU kernel. Everything is a pure function
of tensors; there is no nn.Module in this file, and it imports nothing from the others.

Each fast form stands beside its textbook form, called `_naive`. The written-out `backward` methods may be skipped: they
compute what autograd would, with half the transforms and a fraction of the memory.

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
    4  Attention, whole or in blocks, and rotary positions.

Glossary (sizes lower-case, matrices upper-case as in the paper)
    b batch   l length   d channels   h heads   e width of a head   c kernels per channel (2 when bidirectional)
    N state size   n stored states: of DLR all, of S4 N/2, since its A is real up to a change of basis, so that its
      complex eigenvalues come in conjugate pairs and one of each pair is enough
    A   (d, n) diagonal part of S4's continuous state matrix
    Lambda  (n,) DLR: logarithms of the poles, Abar = diag(e^Lambda)      W  (c, d, n) its output map
    P   (d, n) low-rank part: A_full = diag(A) - P P*      B  (d, n) input map      C  (c, d, n) output map
    dt  (d,)   step size Delta of the discretisation       K  (c, d, l) convolution kernel
Every file uses `true_lengths` and `inside` (which positions are real, and which are padding) and `ceil_div`.

References: Amos et al. 2024, "Never Train from Scratch" (the paper); [1] Gu et al. 2022, "Efficiently Modeling Long
Sequences with Structured State Spaces" (S4); [2] Gupta et al. 2022, "Simplifying and Understanding State Space
Models with Diagonal Linear RNNs" (DLR); [3] Su et al. 2021, "RoFormer".

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


# ---- 2  Diagonal recurrences: sums of geometric sequences ------------------------------------------------------------

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


def geometric_sums(V, log_p, l, dtype=torch.float32):
    """Re sum_n V[d, r, n] exp(log_p[d, n] k) for k = 0 .. l-1: V (d, r, n), log_p (d, n) -> (d, r, l).

    Write k = i m + j with m ~ sqrt(l). Then p^k = p^(i m) p^j, and the sum over n becomes a product of an
    (l/m x n) and an (n x m) matrix for each set of poles, whose r rows share the right one. n (m + l/m) powers are
    needed instead of n l, and the (d, n, l) tensor of the textbook never exists.
    """
    number = torch.complex64 if dtype == torch.float32 else torch.complex128
    return GeometricSums.apply(V.to(torch.complex128), log_p.to(torch.complex128), l, number)


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


def powers(log_p, count, number):
    """p^k for k < count: log p (d, n) -> (d, count, n) of complex type `number`, as products of about 2 sqrt(count)
    powers. Those are taken in float64, by real functions: complex exponentials run at a third of their speed."""
    index, fine = two_levels(count, log_p.device)                                        # (f + count / f,)
    size = torch.exp(log_p.real[:, None] * index[:, None])                               # (d, f + count / f, n)
    angle = log_p.imag[:, None] * index[:, None]
    p = torch.complex(torch.cos(angle).mul_(size), torch.sin(angle).mul_(size)).to(number)
    return (p[:, fine:, None] * p[:, None, :fine]).flatten(1, 2)[:, :count]


@functools.lru_cache(maxsize=16)
def two_levels(count, device):
    """0 .. f-1, then every f-th number up to count, float64, and f: each k < count is a sum of one of either kind."""
    fine = 2 ** (count.bit_length() // 2)
    ranges = torch.arange(fine, device=device), torch.arange(0, count, fine, device=device)
    return torch.cat(ranges).double(), fine


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
    by about 1e-6 / |1 - p^l|: `precise` takes them in float64, at twice the time. With None the function checks whether
    float64 is needed, which makes a GPU wait; `S4` in models.py keeps its states from it instead.
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


# ---- 4  Attention and rotary positions -------------------------------------------------------------------------------

def rotary(x, start=0, dim=-2):
    """Rotary position embedding ([3]): rotates the pair (x[2m], x[2m+1]) at position t by t * 10000^(-2m/e).

    x (..., l, e) -> same shape and dtype. All of e is rotated (paper, section 3.2). After it, q_i . k_j depends on the
    positions only through i - j. A pair is a complex number, and its rotation one complex product. start: the position
    of the first element; dim: the dimension of positions, if it is another.
    """
    l, e = x.shape[dim], x.shape[-1]
    turns = rotary_turns(l if start == 0 else fft_length(start + l), e, x.device)[start:start + l]
    turns = turns.unflatten(0, (l,) + (1,) * (x.ndim - 2 - dim % x.ndim))                # (l, 1, ..., e/2, 2)
    pairs = x.float().unflatten(-1, (-1, 2))                                             # (..., l, e/2, 2)
    if torch.compiler.is_compiling():                       # which leaves complex numbers to uncompiled code
        (one, two), (cos, sin) = pairs.unbind(-1), turns.unbind(-1)
        turned = torch.stack((one * cos - two * sin, one * sin + two * cos), -1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(turns))
    return turned.flatten(-2).to(x.dtype)


@functools.lru_cache(maxsize=8)
def rotary_turns(l, e, device):
    """exp(i t 10000^(-2m/e)) for position t and pair m, (l, e/2, 2): cosine and sine. Angles are float64: at l = 65536
    a float32 angle is off by thousandths of a radian."""
    frequency = 10000.0 ** (-torch.arange(0, e, 2, device=device, dtype=torch.float64) / e)
    angle = torch.arange(l, device=device, dtype=torch.float64)[:, None] * frequency
    return torch.stack((angle.cos(), angle.sin()), -1).float()


def true_lengths(lengths, b, l, device):
    """True lengths (b,); where they are None, all of l."""
    return torch.full((b,), l, device=device) if lengths is None else lengths


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
    lq, lk = q.shape[-2], k.shape[-2]
    if causal and lq != lk:               # is_causal would align the first query with the first key instead
        if q.is_cuda and not torch.compiler.is_compiling():
            from torch.nn.attention.bias import causal_lower_right     # imports the compiler: seconds
            mask = causal_lower_right(lq, lk)                          # tells the library; no mask of 67 MB
        else:
            mask = torch.ones(lq, lk, dtype=torch.bool, device=q.device).tril(lk - lq)   # (lq, lk)
        causal = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


def faster(q, k, v, causal, block, lengths):
    """`attention` by other means, or None where there are none: zoo/gpu_attention.py puts a function for GPUs here."""


def attention(q, k, v, causal=False, block=None, lengths=None):
    """Multi-head attention, (b, h, l, e) three times -> (b, h, l, e).

    block: the sequence is cut into blocks of that size, and each attends to itself and its neighbours, one on each
    side (causal: itself and the previous one), as the paper does from 16K on (section 2). l need not be a multiple.
    lengths (b,): keys at or past a sequence's true length are not attended. What comes out at queries past the true
    length is finite and without meaning.
    """
    if (y := faster(q, k, v, causal, block, lengths)) is not None:
        return y
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


if __name__ == "__main__":
    print("the benchmark: python results/speed.py")
