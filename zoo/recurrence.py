"""The recurrences of LSTM and GRU over a sequence, each one operation of torch. No model of its own: see zoo/lstm.py.

This replaces calls of nn.LSTM and nn.GRU, whose loop over the positions torch.compile and results/costs.py would
unroll. A GPU runs the same cuDNN kernels as with nn.LSTM; a CPU runs the loops below. Only the sequential part is in a
loop: the products with x, and in the backward pass everything that does not depend on the gradient, are computed for
all positions at once.

Sizes: k directions, which run side by side, l length, b batch, d width of x, n hidden units. Weights are those of k
nn.LSTMCell or nn.GRUCell, stacked: W (k, 4n, d), U (k, 4n, n) and two biases (k, 4n); GRU: 3n instead of 4n.
"""
import torch
import torch.nn.functional as F
from torch import Tensor


def lstm_step(a, v, h, c):
    """Return h[t], c[t], (k, b, n), from a = W x[t], v = U h[t-1], with biases, (k, b, 4n): Hochreiter and Schmidhuber
    1997 with the forget gate of Gers et al. 2000."""
    i, f, g, o = (a + v).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_step(a, v, h, c):
    """Return h[t], (k, b, n), and c, which is unused, from a, v (k, b, 3n): Cho et al. 2014 with the reset gate after
    the product, as in cuDNN."""
    (a_r, a_z, a_n), (v_r, v_z, v_n) = a.chunk(3, -1), v.chunk(3, -1)
    z = (a_z + v_z).sigmoid()
    new = (a_n + (a_r + v_r).sigmoid() * v_n).tanh()
    return new + z * (h - new), c


def backwards(*parts):
    """Go through tensors (k, l, ...) from the last position to the first, all at the same one."""
    return reversed([*zip(*(part.unbind(1) for part in parts))])


def lstm_backward(grad, a, v, before, U):
    """Return the gradients of a and of v, (k, l, b, 4n) both, from that of h, (k, l, b, n); before: h[t-1]."""
    i, f, g, o = (a + v).chunk(4, -1)
    i, f, g, o, cells = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid(), [torch.zeros_like(before[:, 0])]
    for forget, write in zip(f.unbind(1), (i * g).unbind(1)):
        cells.append(torch.addcmul(write, forget, cells[-1]))                                 # (k, b, n)
    tanh, last = torch.stack(cells[1:], 1).tanh(), torch.stack(cells[:-1], 1)                 # (k, l, b, n)
    by_c = torch.stack((g * i * (1 - i), last * f * (1 - f), i * (1 - g * g)), 3)             # (k, l, b, 3, n)
    by_o, by_tanh = tanh * o * (1 - o), o * (1 - tanh * tanh)
    found, dv, dc = torch.empty_like(a), torch.zeros_like(a[:, 0]), cells[0]
    parts = grad, by_tanh, by_c, by_o, f, found.unflatten(3, (4, -1))
    for dh, through, gates, output, forget, into in backwards(*parts):
        dh = torch.baddbmm(dh, dv, U)                                                         # (k, b, n)
        dc = torch.addcmul(dc, dh, through)
        torch.mul(dc[:, :, None], gates, out=into[:, :, :3])                                  # in place: no cat
        torch.mul(dh, output, out=into[:, :, 3])
        dv, dc = into.flatten(2), dc * forget                                                 # (k, b, 4n), (k, b, n)
    return found, found


def gru_backward(grad, a, v, before, U):
    """Return what `lstm_backward` returns, of (k, l, b, 3n)."""
    (a_r, a_z, a_n), (v_r, v_z, v_n) = a.chunk(3, -1), v.chunk(3, -1)
    r, z = (a_r + v_r).sigmoid(), (a_z + v_z).sigmoid()
    new = (a_n + r * v_n).tanh()
    by_new = (1 - z) * (1 - new * new)
    by_r, by_z = by_new * v_n * r * (1 - r), (before - new) * z * (1 - z)
    by_v = torch.stack((by_r, by_z, by_new * r), 3)                                           # (k, l, b, 3, n)
    dv, carry, found = torch.zeros_like(a[:, 0]), torch.zeros_like(before[:, 0]), []
    for dh, gates, keep in backwards(grad, by_v, z):
        dh = torch.baddbmm(dh + carry, dv, U)                                                 # (k, b, n)
        dv, carry = (dh[:, :, None] * gates).flatten(2), dh * keep
        found.append(dh)
    dh = torch.stack(found[::-1], 1)[:, :, :, None]                                           # (k, l, b, 1, n)
    return (dh * torch.stack((by_r, by_z, by_new), 3)).flatten(3), (dh * by_v).flatten(3)


def affine(x, W, bias):
    """Return W x + bias for each direction: x (k, l, b, d), W (k, m, d), bias (k, m) -> (k, l, b, m)."""
    return torch.baddbmm(bias[:, None], x.flatten(1, 2), W.mT).unflatten(1, x.shape[1:3])


def cudnn(x, *weights):
    """Run one direction in cuDNN: x (l, b, d) -> its results, y (l, b, n) first, and the arguments that its backward
    pass takes again."""
    n, weights = weights[1].shape[1], [*weights]
    mode = 2 if len(weights[0]) == 4 * n else 3                          # cuDNN's numbers of LSTM and GRU
    # cuDNN needs the weights in one block of memory. torch moves what it is given there, so it is given copies.
    block = torch._cudnn_rnn_flatten_weight([w.clone() for w in weights], 4, x.shape[2], mode, n, 0, 1, False, False)
    h = x.new_zeros(1, x.shape[1], n)
    c, sizes = h if mode == 2 else None, (mode, n, 0, 1, False, 0.0, True, False, [], None)
    return torch._cudnn_rnn(x, weights, 4, block, h, c, *sizes), (block, h, c), sizes


def cudnn_backward(grad, x, *weights):
    """Return the gradients of x and of the weights. Repeats the forward pass, which keeps nothing."""
    (y, _, _, reserve, _), begin, sizes = cudnn(x, *weights)
    wanted = [True, False, False, True]                                  # of x and the weights, not of the first state
    dx, _, _, of_weights = torch.ops.aten._cudnn_rnn_backward(x, [*weights], 4, *begin, y, grad, None, None, *sizes,
                                                              reserve, wanted)
    return dx, *of_weights


# Operators of torch: --compile takes each as one call. `register_fake` says what shapes they return.
@torch.library.custom_op(__name__.replace(".", "::"), mutates_args=())
def recur(x: Tensor, W: Tensor, U: Tensor, bias_x: Tensor, bias_h: Tensor) -> Tensor:
    """Return the hidden states, starting from zero: x (k, l, b, d) -> (k, l, b, n)."""
    if torch.backends.cudnn.is_acceptable(x):
        return torch.stack([cudnn(*one)[0][0] for one in zip(x, W, U, bias_x, bias_h)])
    step, y = lstm_step if U.shape[1] == 4 * U.shape[2] else gru_step, []
    h = c = x.new_zeros(len(x), x.shape[2], U.shape[2])
    for a in affine(x, W, bias_x).unbind(1):
        h, c = step(a, torch.baddbmm(bias_h[:, None], h, U.mT), h, c)
        y.append(h)
    return torch.stack(y, 1)


@torch.library.custom_op(__name__.replace(".", "::") + "_backward", mutates_args=())
def recur_backward(grad: Tensor, y: Tensor, x: Tensor, W: Tensor, U: Tensor, bias_x: Tensor,
                   bias_h: Tensor) -> list[Tensor]:
    """Return the gradients of x and of the weights. Only x and y are kept for this: it computes the gates again."""
    if torch.backends.cudnn.is_acceptable(x):
        return [torch.stack(parts) for parts in zip(*map(cudnn_backward, grad, x, W, U, bias_x, bias_h))]
    before = torch.cat((torch.zeros_like(y[:, :1]), y[:, :-1]), 1)                            # (k, l, b, n)
    backward = lstm_backward if U.shape[1] == 4 * U.shape[2] else gru_backward
    da, dv = backward(grad, affine(x, W, bias_x), affine(before, U, bias_h), before, U)
    x, before, da, dv = (part.flatten(1, 2) for part in (x, before, da, dv))                  # (k, l b, ...)
    return [(da @ W).unflatten(1, grad.shape[1:3]), da.mT @ x, dv.mT @ before, da.sum(1), dv.sum(1)]


recur.register_fake(lambda x, W, U, *biases: x.new_empty(*x.shape[:3], U.shape[2]))
recur_backward.register_fake(lambda grad, y, *inputs: [*map(torch.empty_like, inputs)])
recur.register_autograd(
    lambda ctx, grad: tuple(recur_backward(grad.contiguous(), *ctx.saved_tensors)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output, *inputs))
