"""The mathematics: convolution kernels of state space models, the FFT convolution, attention.

"Kernel" here means the convolution kernel K of a linear recurrence, not a GPU kernel. Everything is a pure function
of tensors; there is no nn.Module in this file, and it imports nothing from the others.

    python kernels.py            benchmark: fast form beside naive form (time, peak memory, error against float64)

The story, in the order of the file
    1  A linear recurrence  x[k] = Abar x[k-1] + Bbar u[k],  y[k] = C x[k]         (paper, eq. 1)
       is a convolution     y = K * u,  K[k] = C Abar^k Bbar                       (paper, eq. 2.4 and 4)
       so a whole sequence costs one FFT instead of l sequential steps: `fft_conv`.
    2  If Abar is diagonal, K is a sum of n geometric sequences, a Vandermonde product: `diagonal_kernel` (DLR, eq. 3).
       Taken in two levels it is a matrix product with n sqrt(l) exponentials in place of n l: `geometric_sums`.
    3  S4 has A = diag + rank 1 (HiPPO), discretised by the bilinear rule (eq. 2.1 to 2.3): `discretize`, `hippo_nplr`.
       Its kernel is known on the roots of unity through four Cauchy sums: `s4_kernel_naive`.
       Under the bilinear map each Cauchy sum is the spectrum of a diagonal kernel, so part 2 computes it: `s4_kernel`.
    4  A long kernel needs no recurrence: SGConv joins short learned pieces, stretched and weighted: `sgconv_kernel`.
    5  Attention, whole or in blocks, and rotary positions.

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
    step = 1 << max(0, l.bit_length() - 4)
    return ceil_div(l, step) * step


class _CircularConvolution(torch.autograd.Function):
    """y = first l values of the circular convolution of u (b, d, l) with K (d, n), n >= 2l.

    Written out because autograd's own backward of rfft is a complex FFT of twice the work, and because it would keep
    the spectrum of u, twice the size of u, for the backward pass; transforming u again is cheaper than that memory.
    """

    @staticmethod
    def forward(context, u, K):
        context.save_for_backward(u, K)
        n = K.shape[-1]
        return torch.fft.irfft(torch.fft.rfft(u, n=n) * torch.fft.rfft(K), n=n)[..., : u.shape[-1]].contiguous()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, grad):
        u, K = context.saved_tensors
        n = K.shape[-1]
        spectrum = torch.fft.rfft(grad, n=n)                                             # (b, d, n/2+1)
        # The adjoint of a convolution is a correlation: a conjugate in the frequency domain.
        grad_u = torch.fft.irfft(spectrum * torch.fft.rfft(K).conj(), n=n)[..., : u.shape[-1]]
        grad_K = torch.fft.irfft((spectrum * torch.fft.rfft(u, n=n).conj()).sum(0), n=n)
        return grad_u.contiguous(), grad_K


@torch.amp.autocast("cpu", enabled=False)
@torch.amp.autocast("cuda", enabled=False)
def fft_conv(u, K, K_back=None):
    """Causal convolution y[t] = sum_j K[j] u[t-j], plus sum_j K_back[j] u[t+1+j] when K_back is given.

    u (b, d, l), K and K_back (d, l) -> (b, d, l) in u's dtype. The backward kernel starts at lag 1, so that position
    t itself is counted once. Zero padding to twice the length makes the circular convolution of the FFT a linear one.
    """
    l = u.shape[-1]
    n = fft_length(2 * l)
    K = K[..., :l].float()
    parts = [K, K.new_zeros(K.shape[0], n - K.shape[-1])]                                # lags 0 .. l-1, then nothing
    if K_back is not None:                        # negative lags live at the end of the circle: index n-1-j is lag -1-j
        K_back = K_back[..., :l].float().flip(-1)
        parts = [K, K.new_zeros(K.shape[0], n - K.shape[-1] - K_back.shape[-1]), K_back]
    return _CircularConvolution.apply(u.float(), torch.cat(parts, -1)).to(u.dtype)       # (b, d, l)


# ---- 2  Diagonal recurrences: sums of geometric sequences ------------------------------------------------------------

def two_level_powers(log_p, l, m):
    """p^k for k = i m + j < l as two factors, p^j (..., n, m) and p^(i m) (..., n, l/m), both complex128."""
    log_p = log_p.to(torch.complex128)[..., None]                                        # (..., n, 1)
    index = torch.arange(max(m, ceil_div(l, m)), device=log_p.device, dtype=torch.float64)
    return torch.exp(log_p * index[:m]), torch.exp(log_p * (index[: ceil_div(l, m)] * m))


def geometric_sums(V, log_p, l, dtype=torch.float32):
    """Re sum_n V[r, d, n] exp(log_p[d, n] k) for k = 0 .. l-1: (r, d, n), (d, n) -> (r, d, l).

    Write k = i m + j with m ~ sqrt(l). Then p^k = p^(i m) p^j, and the sum over n becomes a product of an
    (l/m x n) and an (n x m) matrix per channel. n (m + l/m) exponentials are taken instead of n l, in float64, and the
    (d, n, l) tensor of the textbook never exists. Real and imaginary parts are laid side by side along n because
    Re(xy) = Re x Re y - Im x Im y is one real matrix product of inner size 2n.
    """
    r, d, n = V.shape
    # The left factor carries the r rows, so m is sqrt(r l) rather than sqrt(l): both factors are then equally large.
    # One column would have no gradient in torch 2.8.
    m = max(2, min(l, round(math.sqrt(l * r))))
    right, left = two_level_powers(log_p, l, m)                                          # (d, n, m), (d, n, l/m)
    number = torch.complex64 if dtype == torch.float32 else torch.complex128
    right = torch.view_as_real(right.to(number)).transpose(-1, -2).flatten(1, 2)         # (d, 2n, m): Re, Im per state
    left = left.to(number).transpose(-1, -2)                                             # (d, l/m, n)
    left = V.to(number).transpose(0, 1)[:, :, None, :] * left[:, None]                   # (d, r, l/m, n)
    left = torch.view_as_real(left.conj().resolve_conj()).flatten(-2).flatten(1, 2)      # (d, r l/m, 2n): Re, -Im
    K = torch.bmm(left, right)                                                           # (d, r l/m, m)
    return K.view(d, r, -1)[..., :l].transpose(0, 1)                                     # (r, d, l)


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

    W complex (c, d, n), Lambda complex (n,) shared by all channels or (d, n) -> float32 (c, d, l). There is no step
    size, no B, no factor 2 and no conjugate pairing. The caller must ensure Re Lambda <= 0; growing sums are right as
    long as e^(Re Lambda l) fits into float32.
    """
    if Lambda.ndim == 2:
        return geometric_sums(W, Lambda, l)
    # Shared poles: the c d rows of W are the rows of a single channel, and one (c d l/m x 2n)(2n x m) product makes all
    # kernels. Neither a (d, n, l) nor an (n, l) tensor exists.
    c, d, n = W.shape
    return geometric_sums(W.reshape(c * d, 1, n), Lambda[None], l).view(c, d, l)


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


def truncation_correction(A, P, C, dt, l):
    """C~ = C (I - Abar^l), the form of C that S4 trains ([1], lemma C.3): C complex (c, d, n) -> (c, d, n).

    It turns the truncated sum over k < l into a closed form. The state keeps its conjugate pairs, [x, conj x], so
    A_full is x -> F x + G conj x, and on [Re x, Im x] a real matrix: a quarter of the arithmetic, which matters for
    large N. Run in float64: Abar^l by repeated squaring.
    """
    A, P, C = (v.to(torch.complex128) for v in (A, P, C))
    F = torch.diag_embed(A) - P[..., :, None] * P.conj()[..., None, :]                   # (d, n, n)
    G = -P[..., :, None] * P[..., None, :]
    A_real = torch.cat((torch.cat((F.real + G.real, G.imag - F.imag), -1),
                        torch.cat((F.imag + G.imag, F.real - G.real), -1)), -2)          # (d, N, N)
    half_step, eye = dt.double()[:, None, None] / 2 * A_real, torch.eye(A_real.shape[-1]).to(A_real)
    power = torch.linalg.matrix_power(torch.linalg.solve(eye - half_step, eye + half_step), l)
    C_real = torch.cat((C.real, -C.imag), -1)                                            # (c, d, N) Re C x as a row
    C_tilde = C_real - torch.einsum("cdm,dmn->cdn", C_real, power)
    return torch.complex(*C_tilde.chunk(2, -1)).conj().resolve_conj()                    # (c, d, n)


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


# Where some |1 - p^l| falls below this, the Cauchy sums are nearly singular on the grid and float32 cancels badly.
NEAR_ROOT_OF_UNITY = 0.02


@torch.amp.autocast("cpu", enabled=False)
@torch.amp.autocast("cuda", enabled=False)
def s4_kernel(A, P, B, C, dt, l):
    """Convolution kernel of S4: A_full = diag(A) - P P*, bilinear discretisation (paper, eq. 2; [1]).

    A, P, B complex (d, n) or (1, n), one of each conjugate pair; C complex (c, d, n), the truncation-corrected
    C~ = C (I - Abar^l); dt (d,) -> real float32 (c, d, l).  With x~ = [x, conj x] over all N = 2n states,
    K[k] = C_raw~ Abar^k Bbar.  C is not conjugated and there is no extra factor.

    How: each Cauchy sum of `s4_kernel_naive` has terms
        v_n / D_n(w) = v_n / (1 - dt A_n / 2)  *  1 / (1 - w p_n),      p_n = (1 + dt A_n / 2) / (1 - dt A_n / 2),
    and on the l-th roots of unity  1 / (1 - w p) = sum_{k<l} w^k p^k / (1 - p^l)  exactly. So a Cauchy sum is the
    discrete Fourier transform of a sum of geometric sequences with the poles p_n, which `geometric_sums` computes as
    one matrix product for all four sums. O(d n sqrt(l)) exponentials, O(c d l) memory.

    Accuracy, relative to the largest |K|, against a float64 recurrence: below 1e-4 (typically 1e-5) for dt in
    [1e-4, 10], any l, Re A <= -1e-4. Gradients alike, except that of dt, which is good to 1e-2 at l in the thousands.
    When a pole p comes close to an l-th root of unity, the sums are large and cancel; that case is detected and taken
    in float64 (about twice the time), so accuracy holds there too.
    """
    A, P, B, C = (v.to(torch.complex128) for v in (A, P, B, C))
    dt = dt.double()[:, None]                                                            # (d, 1)
    x = dt * A / 2
    log_p = torch.log((1 + x) / (1 - x))                                                 # (d, n)
    root_gap = 1 - torch.exp(l * log_p)                                                  # (d, n)  1 - p^l
    precise = bool(root_gap.detach().abs().min() < NEAR_ROOT_OF_UNITY)
    dtype = torch.float64 if precise else torch.float32

    c = C.shape[0]
    shape = C.shape[1:]                                                                  # (d, n)
    V = torch.cat((C * B, C * P, (P.conj() * B).expand(1, *shape), (P.conj() * P).expand(1, *shape)))
    V = 2 * V / ((1 - x) * root_gap)                # the factor 2 with Re: the conjugate halves add their conjugates
    sums = geometric_sums(V, log_p.expand(shape), l, dtype)                              # (2c+2, d, l)
    CB, CP, PB, PP = torch.fft.rfft(sums).split((c, c, 1, 1))                            # (., d, l/2+1)

    angle = torch.arange(l // 2 + 1, device=dt.device, dtype=torch.float64) * (-2 * math.pi / l)
    g = dt / 2 * (1 + torch.polar(torch.ones_like(angle), angle))                        # (d, l/2+1)
    g = g.to(CB.dtype)
    spectrum = CB - CP * (g * PB / (1 + g * PP))                                         # Woodbury
    return (dt * torch.fft.irfft(spectrum, n=l)).float()                                 # (c, d, l)


# ---- 4  A kernel without a recurrence --------------------------------------------------------------------------------

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


def rotary(x):
    """Rotary position embedding ([3]): rotates the pair (x[2m], x[2m+1]) at position t by t * 10000^(-2m/e).

    x (..., l, e) -> same shape and dtype. All of e is rotated (paper, section 3.2). After it, q_i . k_j depends on the
    positions only through i - j. A pair is a complex number, and its rotation one complex product.
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))                      # (..., l, e/2)
    return torch.view_as_real(pairs * rotary_phases(*x.shape[-2:], x.device)).flatten(-2).to(x.dtype)


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


def _attend(q, k, v, causal, mask):
    """softmax(q k^T / sqrt(e)) v. Causal: the last query is aligned with the last key, for looking one block back."""
    flash = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
    if mask is None and flash and flash_attn_works():
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
    l, keys = q.shape[-2], k.shape[-2]                    # they differ for Linformer only
    block = block or max(l, keys)
    out = []
    # One call per block. Blocks are few (4 of 4096 on PathX) and large, and a call without a mask may use flash
    # kernels.
    for start in range(0, l, block):
        lo, hi = max(0, start - block), min(keys, start + (block if causal else 2 * block))
        mask = None
        if lengths is not None and not causal:      # causal: padding is at the end, where no real query ever looks
            real = torch.arange(lo, hi, device=q.device) < lengths[:, None]              # (b, keys)
            real = real | ~real.any(-1, keepdim=True)            # no key left: a padded query; softmax needs one
            mask = real[:, None, None, :]                                                # (b, 1, 1, keys)
        out.append(_attend(q[..., start:start + block, :], k[..., lo:hi, :], v[..., lo:hi, :], causal, mask))
    return out[0] if len(out) == 1 else torch.cat(out, -2)


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


if __name__ == "__main__":
    benchmark(s4_kernel, s4_kernel_naive, random_s4, 64, (1024, 4096, 16384, 65536), naive_up_to=4096)
    benchmark(diagonal_kernel, diagonal_kernel_naive, random_dlr, 1024, (256, 1024, 4096, 16384), naive_up_to=256)
