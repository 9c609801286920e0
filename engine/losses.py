"""The losses and gradient norms of training steps. They stay on the device, so that no step waits
for it."""

import torch


class Losses:
    """The loss of each step, and its parts if it has several.

    totals: {name: sum since the last log line}, e.g. of a checkpoint. All tensors keep their places
    in memory, because a CUDA graph (graph.py) writes into them."""

    def __init__(self, device, step, totals):
        # of the current step
        self.current = {name: torch.zeros((), device=device) for name in totals}
        self.totals = {}
        for name, value in totals.items():
            self.totals[name] = torch.full((), value, dtype=torch.float64, device=device)
        # step, loss, gradient norm of the last step, or of the first in which one was not finite
        self.latest = torch.zeros(3, dtype=torch.float64, device=device)
        self.step = torch.full((), float(step), device=device)

    def add(self, name, loss):
        """Add a loss () of a part of the batch to the current step."""
        if name not in self.current:
            self.current[name] = loss.new_zeros(())
            self.totals[name] = loss.new_zeros((), dtype=torch.float64)
        self.current[name] += loss.detach()

    def end_step(self, total, optimizer):
        """Add the current step to the totals. total: sums a tensor over processes, in place."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        for name, loss in self.current.items():
            self.totals[name] += total(loss)
        latest = torch.stack((self.step, self.current["loss"], norm)).double()
        self.latest.copy_(torch.where(self.latest.isfinite().all(), latest, self.latest))
        self.step += 1
        for loss in self.current.values():
            loss.zero_()

    def read(self):
        """Return the totals, {name: float}. This waits for the device."""
        return {name: total.item() for name, total in self.totals.items()}

    def clear(self):
        for total in self.totals.values():
            total.zero_()
