"""Hand-written backward passes, for forward passes that stand in kernels.py. Skip this file at a
first reading.

Each returns what autograd would (tests/test_kernels.py compares them) in a fraction of its time or
memory, from the gradient of a result and what the forward pass kept."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def with_gradient(y, gradient, kept, *inputs):
    """Return y, a tensor computed under `no_grad`, with its place in autograd's graph.

    gradient(grad of y, *kept) returns a gradient for each of the inputs that y was computed from.
    kept: other tensors than the inputs (the compiler takes none twice). An input may be None."""
    return WithGradient.apply(y, gradient, len(kept), *kept, *inputs)


class WithGradient(torch.autograd.Function):
    """`with_gradient`. Its forward pass is the identity."""

    @staticmethod
    def forward(context, y, gradient, number, *tensors):
        context.gradient = gradient
        context.number = number  # of kept tensors
        context.save_for_backward(*tensors[:number])
        return y.view_as(y)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, grad):
        others = 3 + context.number  # arguments before the inputs
        grads = context.gradient(grad, *context.saved_tensors)
        needed = context.needs_input_grad[others:]
        return (None,) * others + tuple(g if need else None for g, need in zip(grads, needed))


def convolution_gradient(grad, U, spectrum):
    """Return gradients of u (b, d, l), circle (d, n) and D (d,) for `fft_conv`, where y = irfft(U
    spectrum): U (b, d, n/2+1) and spectrum (d, n/2+1), conjugated; grad (b, d, l).

    The adjoint of a convolution is a correlation: a conjugate in the frequency domain. Autograd's
    backward of rfft is a complex FFT, which is twice the work."""
    l = grad.shape[-1]
    n = 2 * (spectrum.shape[-1] - 1)  # `fft_length` of an even number is even
    grad = torch.fft.rfft(grad, n=n)  # (b, d, n/2+1)
    circle = torch.fft.irfft((U * grad).sum(0), n=n)  # (d, n)
    u = torch.fft.irfft(grad.mul_(spectrum), n=n)[..., :l]
    return u, circle, circle[:, 0]  # D acts like lag 0


def geometric_gradient(grad, V, outer, right):
    """Return gradients of V (d, r, n) and log_p (d, n) for `geometric_sums`: grad (d, r, l), outer
    p^(i m) (d, l/m, n), right (d, m, 2n).

    They are sums over k of conjugate powers, weighted by grad and by k grad, because d p^k / d log
    p = k p^k."""
    d, r, n = V.shape
    m = right.shape[1]
    grad = F.pad(grad, (0, outer.shape[1] * m - grad.shape[-1]))  # (d, r, l)
    k = torch.arange(grad.shape[-1], device=grad.device, dtype=grad.dtype)

    def sums(grad):
        over_j = grad.reshape(d, -1, m) @ right  # (d, r l/m, 2n)
        over_j = torch.view_as_complex(over_j.view(d, r, -1, n, 2))
        return over_j.mul_(outer.conj()[:, None]).sum(2).to(V.dtype)  # (d, r, n)  summed over i

    return sums(grad), (sums(k * grad) * V.conj()).sum(1)


def woodbury_gradient(grad, CP, below, ratio):
    """Return gradients of sums (d, c+1, 2, l) and of the constants above and below (d, 2) for
    `s4_kernel`: grad (d, c, l), CP (d, c, l/2+1), below and ratio (d, 1, l/2+1).

    rfft and irfft each serve as the adjoint of the other, up to factors that cancel."""
    of_CB = torch.fft.rfft(grad)  # (d, c, l/2+1)
    of_PB = (of_CB * CP.conj()).sum(1, keepdim=True) / -below.conj()
    of_CB_PB = torch.cat((of_CB, of_PB), 1)
    both = torch.stack((of_CB_PB, of_CB_PB * ratio.conj()), 2)  # (d, c+1, 2, l/2+1)
    both = torch.fft.irfft(both, n=grad.shape[-1])
    # a constant over all frequencies: an impulse at k = 0
    PB, PP = both[:, -1, :, :1].unbind(1)
    return both, torch.cat((-PB, PP), 1)


def norm_gradient(grad, x, share, rate, scale):
    """Return gradients of x (b, d, l), gain and bias (d,) for `masked_norm`: grad (b, d, l), x
    centred, share (b, 1, l), rate and scale (d, 1).

    y = gain z + bias, z = rate x, scale = gain rate. Mean and variance make every z depend on all
    real x."""
    grad = grad.contiguous()  # (b, d, l) in memory too, and so all gradients before this one
    bias = grad.sum((0, 2))[:, None]  # (d, 1)
    of_gain = (grad * x).sum((0, 2))[:, None] * rate  # (d, 1)
    sums = over_processes(torch.cat((bias, of_gain), 1))  # (d, 2)
    shift = (x * (sums[:, 1:] * rate)).add_(sums[:, :1]).mul_(share)  # (b, d, l)
    return (grad - shift).mul_(scale), of_gain[:, 0], bias[:, 0]


def is_distributed():
    """Return whether several processes train one model."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def over_processes(value):
    """Return the sum over processes, in place."""
    if is_distributed():
        dist.all_reduce(value)
    return value
