"""LSTM (Hochreiter and Schmidhuber 1997) and GRU (Cho et al. 2014), the recurrent networks before
state space models.

    LSTM   i, f, o = sigmoid(W x[t] + U h[t-1] + bias), each with its own weights
           g = tanh(of the same form);   c[t] = f c[t-1] + i g;   h[t] = o tanh(c[t])
    GRU    r, z = sigmoid(of the same form);   new = tanh(W x[t] + bias + r (U h[t-1] + bias))
           h[t] = z h[t-1] + (1 - z) new

The gates read h[t-1], so there is no convolution and no parallel scan. A layer is x +
Linear(LSTM(norm(x))); the causal objective has one direction with d hidden units, the masked one
two with d/2 each, concatenated. Depths, widths and recipes are the rotary Transformer's, because
none are published for self-pretraining; the learning rates for your data were chosen for the LSTM
(results/ucr.md). Leave out --compile: it unrolls the loop over positions and takes minutes."""

import torch
import torch.nn as nn

from models import MODELS, Key, Model, SizeError, SSMBlock


def reverse(x, lengths):
    """Reverse each sequence of x (b, l, d) within its true length; reversing twice restores x.

    So the second direction meets padding last, too. nn.LSTM(bidirectional=True) would start in the
    padding; pack_padded_sequence prevents that, but a GPU would have to wait for the lengths."""
    if lengths is None:
        return x.flip(1)
    position = torch.arange(x.shape[1], device=x.device)
    end = lengths[:, None]
    order = torch.where(position < end, end - 1 - position, position)  # (b, l)
    return x.gather(1, order[..., None].expand_as(x))


def run_cell(cell, x):
    """Run an LSTM or GRU cell over x (b, l, d) and return its hidden states (b, l, n), as nn.LSTM
    and nn.GRU do; torch.compile takes these calls (cuDNN on a GPU), but not those modules."""
    h = x.new_zeros(1, x.shape[0], cell.hidden_size)
    # with biases, one layer, no dropout, training (else cuDNN has no backward pass), one direction,
    # batch first
    flags = True, 1, 0.0, True, False, True
    weights = [*cell.parameters()]
    if isinstance(cell, nn.GRUCell):
        return torch.gru(x, h, weights, *flags)[0]
    return torch.lstm(x, (h, h), weights, *flags)[0]


class Recurrent(nn.Module):
    """A GRU in one or two directions, in float32, then a Linear: (b, l, d) -> (b, l, d)."""

    Cell = nn.GRUCell  # weights as torch initialises them

    def __init__(self, c):
        super().__init__()
        if c.d % c.directions:
            raise SizeError(f"d={c.d} is odd, but two directions have d/2 hidden units each")
        self.cells = nn.ModuleList(self.Cell(c.d, c.d // c.directions) for _ in range(c.directions))
        self.out = nn.Linear(c.d, c.d)

    def forward(self, x, lengths=None):
        with torch.autocast(x.device.type, enabled=False):
            x = x.float()
            y = [run_cell(self.cells[0], x)]  # (b, l, d / directions)
            y += [reverse(run_cell(cell, reverse(x, lengths)), lengths) for cell in self.cells[1:]]
        return self.out(torch.cat(y, -1))  # (b, l, d)

    def step(self, x, state):
        """x (b, d), state after the previous position or None -> y (b, d), state."""
        state = self.cells[0](x, state)
        return self.out(state[0] if isinstance(state, tuple) else state), state  # LSTM: (h, c)


class LSTM(Recurrent):
    """The same with an LSTM. c.forget is added to the bias of the forget gate: at 1 a cell first
    keeps about 0.73 of its value per position, at 0 (nn.LSTM's default) about half."""

    keys = dict(forget=Key(float, 1.0))
    Cell = nn.LSTMCell

    def __init__(self, c):
        super().__init__(c)
        for cell in self.cells:  # gates in torch's order: i, f, g, o
            cell.bias_ih.data[cell.hidden_size : 2 * cell.hidden_size] += c.forget


SIZES = """
task                        layers   d norm  place
listops|text                     6 512 layer pre
retrieval|pathfinder             6 128 layer pre
image|scifar                     6 256 layer pre
pathx|pathx256                   5 128 layer pre
pathfinder_demo|*_mini           3  32 layer pre
*_demo|text256|file:*|ucr:*      3  64 layer pre
*                                4 128 layer pre
"""
RECIPES = """
task         objective     loss pool head lr                  wd batch length      warmup schedule
file:*|ucr:* masked|causal -    mean -    3e-3/3e-3/3e-3/9e-3 0  16    10e/10e/20e 50     cos
"""
MODELS |= {
    name: Model(SSMBlock, mixer, "rotary", sizes=SIZES, recipes=RECIPES)
    for name, mixer in (("lstm", LSTM), ("gru", Recurrent))
}
