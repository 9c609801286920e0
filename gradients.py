"""Hand-written backward passes, because autograd's would cost several times the time or memory.
Skip this file at a first reading. A forward pass computes what its caller in kernels.py or
models.py states. A backward pass computes what autograd would (tests/test_kernels.py compares
them)."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class CircularConvolution(torch.autograd.Function):
    """`fft_conv`: u (b, d, l), the kernel on a circle (d, n), D (d,) or None -> irfft(rfft(u)
    (rfft(circle) + D)), (b, d, l). Autograd's backward of rfft is a complex FFT, which is twice the
    work."""

    @staticmethod
    def forward(context, u, circle, D):
        n = circle.shape[-1]
        spectrum = torch.fft.rfft(circle)  # (d, n/2+1)
        if D is not None:  # a constant over all frequencies is an impulse at lag 0
            spectrum += D[:, None]
        U = torch.fft.rfft(u, n=n)  # (b, d, n/2+1)
        y = torch.fft.irfft(U * spectrum, n=n)[..., : u.shape[-1]].contiguous()
        # The adjoint of a convolution is a correlation: a conjugate in the frequency domain.
        context.save_for_backward(U.conj_physical_(), spectrum.conj_physical_())
        context.sizes = n, u.shape[-1]
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, grad):
        (U, spectrum), (n, l) = context.saved_tensors, context.sizes
        grad = torch.fft.rfft(grad, n=n)  # (b, d, n/2+1)
        circle = torch.fft.irfft((U * grad).sum(0), n=n)  # (d, n)
        of_u = torch.fft.irfft(grad.mul_(spectrum), n=n)[..., :l]
        # D acts like lag 0
        return of_u, circle, circle[:, 0] if context.needs_input_grad[2] else None


class GeometricSums(torch.autograd.Function):
    """`geometric_sums`: V (d, r, n), log_p (d, n), outer p^(i m) (d, l/m, n) and inner conj(p^j)
    (d, m, n) -> Re sum_n V p^k (d, r, l). log_p is an argument because it gets the gradient.
    Autograd's backward pass would copy and store several times as much."""

    @staticmethod
    def forward(context, V, log_p, outer, inner, l):
        d, r, n = V.shape
        left = V.to(outer.dtype)[:, :, None] * outer[:, None]  # (d, r, l/m, n)
        # Re(x y) = Re x Re y - Im x Im y is the product of [Re x, Im x] and the conjugate's [Re y,
        # -Im y]. Real and imaginary parts lie side by side in memory, so the sum over n is a real
        # matrix product. (d, r, l/m, 2n), (d, m, 2n)
        left, right = (torch.view_as_real(y).flatten(-2) for y in (left, inner))
        context.save_for_backward(V, outer, right)
        return (left.flatten(1, 2) @ right.mT).view(d, r, -1)[..., :l]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, grad):
        """Return sums over k of conjugate powers, weighted by grad and by k grad, because d p^k / d
        log p = k p^k."""
        V, outer, right = context.saved_tensors
        d, r, n = V.shape
        grad = F.pad(grad, (0, outer.shape[1] * right.shape[1] - grad.shape[-1]))  # (d, r, l)
        k = torch.arange(grad.shape[-1], device=grad.device, dtype=grad.dtype)

        def sums(grad):
            over_j = grad.reshape(d, -1, right.shape[1]) @ right  # (d, r l/m, 2n)
            over_j = torch.view_as_complex(over_j.view(d, r, -1, n, 2))
            return over_j.mul_(outer.conj()[:, None]).sum(2).to(V.dtype)  # (d, r, n)  summed over i

        return sums(grad), (sums(k * grad) * V.conj()).sum(1), None, None, None


class WoodburyKernel(torch.autograd.Function):
    """The end of `s4_kernel`, irfft(CB' + CP (above - g PB') / (below + g PP)) -> (d, c, l). These
    spectra are the rfft of `sums` (d, c+1, 2, l): CB', CP for each C, then g PB', g PP. constants
    (d, 2): above, below. Autograd's backward passes of rfft and irfft are complex transforms, twice
    the work. Instead, each serves as the adjoint of the other, up to factors that cancel here."""

    @staticmethod
    def forward(context, sums, constants):
        CB_PB, CP_PP = torch.fft.rfft(sums).unbind(2)  # (d, c+1, l/2+1)
        below = constants[:, 1:, None] + CP_PP[:, -1:]
        ratio = (constants[:, :1, None] - CB_PB[:, -1:]) / below  # (d, 1, l/2+1)
        # a view keeps the whole tensor
        context.save_for_backward(CP_PP[:, :-1].clone(), below, ratio)
        return torch.fft.irfft(torch.addcmul(CB_PB[:, :-1], CP_PP[:, :-1], ratio), n=sums.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, grad):
        CP, below, ratio = context.saved_tensors
        of_CB = torch.fft.rfft(grad)  # (d, c, l/2+1)
        of_PB = (of_CB * CP.conj()).sum(1, keepdim=True) / -below.conj()
        of_CB_PB = torch.cat((of_CB, of_PB), 1)
        both = torch.stack((of_CB_PB, of_CB_PB * ratio.conj()), 2)  # (d, c+1, 2, l/2+1)
        both = torch.fft.irfft(both, n=grad.shape[-1])
        # a constant over all frequencies: an impulse at k = 0
        PB, PP = both[:, -1, :, :1].unbind(1)
        return both, torch.cat((-PB, PP), 1)


def masked_batch_norm(norm, x, real):
    """Apply nn.BatchNorm1d `norm` in training mode: x (b, d, l) -> (b, d, l). Statistics are taken
    over real positions of all processes. real (b, l): 1 or 0, or None if all positions are real."""
    many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if real is None and not many:
        return nn.BatchNorm1d.forward(norm, x)
    real = torch.ones(len(x), x.shape[2], device=x.device) if real is None else real
    with torch.autocast(x.device.type, enabled=False):
        y, mean, variance, count = MaskedNorm.apply(
            x.float(), real[:, None], norm.weight, norm.bias, norm.eps, many
        )
    with torch.no_grad():
        norm.running_mean.lerp_(mean[:, 0], norm.momentum)
        norm.running_var.lerp_((variance * count / (count - 1).clamp(min=1))[:, 0], norm.momentum)
        norm.num_batches_tracked += 1
    return y.to(x.dtype)


class MaskedNorm(torch.autograd.Function):
    """x (b, d, l), real (b, 1, l) 1 or 0, gain and bias (d,) -> (x - mean) / sqrt(variance + eps) *
    gain + bias, and mean (d, 1), variance (d, 1) and number (1, 1) of the real positions of all
    processes. On a CPU a product and an in-place sum take a quarter of the time of `addcmul` or of
    a product with a vector."""

    @staticmethod
    def forward(context, x, real, gain, bias, eps, many):
        count = total(real.sum((0, 2), keepdim=True)[0], many)  # (1, 1)
        share = real / count  # (b, 1, l)
        mean = total((x * share).sum((0, 2))[:, None], many)  # (d, 1)
        x = x - mean
        variance = total(x.square().mul_(share).sum((0, 2))[:, None], many)  # (d, 1)
        rate = torch.rsqrt(variance + eps)
        context.save_for_backward(x, share, gain, rate)
        context.many = many
        context.mark_non_differentiable(mean, variance, count)
        context.set_materialize_grads(False)
        return (x * (rate * gain[:, None])).add_(bias[:, None]), mean, variance, count

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, grad, *_):
        """Compute gradients of y = gain z + bias, z = rate x (x: centred). Mean and variance make
        every z depend on all real x."""
        x, share, gain, rate = context.saved_tensors
        grad = grad.contiguous()  # (b, d, l) in memory too, and so all gradients before this one
        of_bias = grad.sum((0, 2))[:, None]  # (d, 1)
        of_gain = (grad * x).sum((0, 2))[:, None] * rate  # (d, 1)
        sums = total(torch.cat((of_bias, of_gain), 1), context.many)  # (d, 2)
        shift = (x * (sums[:, 1:] * rate)).add_(sums[:, :1]).mul_(share)  # (b, d, l)
        return (
            (grad - shift).mul_(rate * gain[:, None]),
            None,
            of_gain[:, 0],
            of_bias[:, 0],
            None,
            None,
        )


def total(value, many):
    """Return the sum over processes."""
    if many:
        dist.all_reduce(value)
    return value
