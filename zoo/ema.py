"""MEGA's moving averages as a convolution (Ma et al. 2023). Not a --model: MEGA, SPADE use it.

    s[t] = q s[t-1] + p beta u[t],  y = sum_h gamma s / sqrt(h),  p = sigmoid(delta),
    q = 1 - p sigmoid(alpha)
The kernel is a sum of geometric sequences with real poles q, which `geometric_sums` of kernels.py
computes. It covers all lags; the official code cuts it after 1,024."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from kernels import geometric_sums
from models import Kernel


def ema_kernel(delta, alpha, beta, gamma, l):
    """Return the kernel of h damped averages: four (dir, d, h) -> float32 (dir, d, l)."""
    directions, d, h = delta.shape
    p = delta.double().sigmoid()  # (dir, d, h)
    log_q = torch.log1p(-p * alpha.double().sigmoid())
    W = gamma * p * beta / math.sqrt(h)
    K = geometric_sums(W.flatten(0, 1)[:, None], log_q.flatten(0, 1), l)
    return K.view(directions, d, l)


class EMA(Kernel):
    """Kernels of MEGA: c.averages damped exponential averages per channel and direction.

    At the start they all fade within about 60 positions; longer memory must be learned."""

    def __init__(self, c):
        super().__init__()
        self.d = c.d
        shape = (c.directions, c.d, c.averages)
        self.delta = nn.Parameter(torch.randn(shape) * 0.2)
        self.alpha = nn.Parameter(torch.randn(shape) * 0.2)
        self.beta = nn.Parameter(torch.randn(shape) * 0.02 + (-1.0) ** torch.arange(c.averages))
        self.gamma = nn.Parameter(torch.randn(shape))

    def arguments(self, p):
        return p.delta, p.alpha, p.beta, p.gamma

    def make(self, delta, alpha, beta, gamma, l):
        K = ema_kernel(delta, alpha, beta, gamma, l)
        if len(K) == 1:
            return K
        # The backward kernel of `fft_conv` starts at lag 1, MEGA's at lag 0: its first value joins
        # the forward kernel.
        return torch.stack((K[0] + F.pad(K[1, :, :1], (0, l - 1)), F.pad(K[1, :, 1:], (0, 1))))
