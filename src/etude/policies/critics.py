"""Several critics at once: one matrix product a layer for all of them.

Shape letters: E critics, B batch, F features, A action, I inputs, H hidden units, Z critics that are asked.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


class CriticEnsemble(nn.Module):
    """Multilayer perceptrons of one shape that say, each for itself, what an action in a state will earn.

    Args:
        inputs: Numbers of a state and of an action together.
        hidden: Width of each hidden layer.
        critics: How many there are.
        layer_norm: Whether hidden layers are normalised, which keeps critics from promising too much for actions that
            no data has.
    """

    def __init__(self, inputs: int, hidden: list[int], critics: int, layer_norm: bool = True) -> None:
        super().__init__()
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        self.gains, self.shifts = nn.ParameterList(), nn.ParameterList()
        self.widths = [inputs, *hidden, 1]
        for width_in, width_out in pairwise(self.widths):
            weight_EIH = torch.empty(critics, width_in, width_out)
            for weight_IH in weight_EIH:
                nn.init.xavier_uniform_(weight_IH)
            self.weights.append(nn.Parameter(weight_EIH))
            self.biases.append(nn.Parameter(torch.zeros(critics, 1, width_out)))
        for width in hidden if layer_norm else ():
            self.gains.append(nn.Parameter(torch.ones(critics, 1, width)))
            self.shifts.append(nn.Parameter(torch.zeros(critics, 1, width)))

    def forward(
        self, features_BF: Tensor, actions_BA: Tensor, *, subset_Z: Tensor | None = None, moved: bool = True
    ) -> Tensor:
        """Return what each critic expects of each row, (E, B), or (Z, B) of some of them.

        Args:
            features_BF: The states.
            actions_BA: The actions, normalised.
            subset_Z: Which critics are asked; None asks all.
            moved: Whether a loss of the result moves the critics. Where not, it still moves what the actions are of.
        """
        out = torch.cat([features_BF, actions_BA], dim=1)
        last = len(self.weights) - 1
        for layer in range(last + 1):
            weight, bias = (
                self._pick(self.weights, layer, subset_Z, moved),
                self._pick(self.biases, layer, subset_Z, moved),
            )
            out = torch.baddbmm(bias, out.expand(weight.shape[0], -1, -1), weight)
            if layer == last:
                return out.squeeze(-1)
            if len(self.gains):
                gain, shift = (self._pick(kept, layer, subset_Z, moved) for kept in (self.gains, self.shifts))
                out = torch.addcmul(shift, functional.layer_norm(out, out.shape[-1:]), gain)
            out = out.relu_()  # what is before it is kept by nobody
        raise AssertionError("there is no critic without a layer")

    @staticmethod
    def _pick(kept: nn.ParameterList, layer: int, subset_Z: Tensor | None, moved: bool) -> Tensor:
        found: Tensor = kept[layer] if moved else kept[layer].detach()
        return found if subset_Z is None else found.index_select(0, subset_Z)

    @torch.no_grad()
    def follow(self, leader: CriticEnsemble, rate: float) -> None:
        """Move every weight by a share of the way to another ensemble's."""
        torch._foreach_lerp_(list(self.parameters()), list(leader.parameters()), rate)
