"""SCAFFOLD at a client: corrected steps, and a new control variate (Karimireddy et al. 2020, Algorithm 1, option II).

    in each of K steps      y ← y − lr · (g(y) − cᵢ + c)
    after them              cᵢ⁺ = cᵢ − c + (x − y) / (K · lr)
    to the server           y and Δc = cᵢ⁺ − cᵢ;   cᵢ⁺ stays here

cᵢ⁺ is the mean of the gradients that this client's own steps used: clipped ones if the job clips (the correction
comes after the clip), with the terms of proximal_mu and weight_decay. https://arxiv.org/abs/1910.06378
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from client_app.local import Corrections
from fedplat import wire
from fedplat.model import Arrays, controlled_parameters, read_arrays, write_arrays


class ControlVariates:
    """The parameters of one resident model that have a control variate; none unless the job is SCAFFOLD's."""

    def __init__(self, model: nn.Module, travelling: Mapping[str, Tensor], is_scaffold: bool) -> None:
        self._parameters = controlled_parameters(model, travelling) if is_scaffold else {}
        self._zeros = read_arrays({name: torch.zeros_like(p) for name, p in self._parameters.items()})

    def expected(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Dtype and shape of the control variates that a request brings."""
        return {name: (str(zero.dtype), zero.shape) for name, zero in self._zeros.items()}

    def split(self, received: Arrays) -> tuple[Arrays, Arrays]:
        """What the server sent: the model, and its control variates c."""
        if not self._parameters:
            return received, {}
        model = {name: array for name, array in received.items() if name not in self._parameters}
        return model, {name: array for name, array in received.items() if name in self._parameters}

    def own(self, remembered: Arrays) -> Arrays:
        """cᵢ, which is 0 in a client's first round."""
        return {name: remembered.get(name, zero) for name, zero in self._zeros.items()}

    def corrections(self, c: Arrays, own: Arrays) -> Corrections:
        """c − cᵢ for each parameter. Raises ValueError if c doesn't fit the model."""
        found = {name: torch.empty_like(p, requires_grad=False) for name, p in self._parameters.items()}
        write_arrays(found, c)
        return [(p, found[name] - torch.from_numpy(own[name]).to(p.device)) for name, p in self._parameters.items()]

    def renewed(self, x: Arrays, y: Arrays, c: Arrays, own: Arrays, distance: float) -> Arrays:
        """cᵢ⁺ after training from x to y; `distance` is K · lr."""
        if distance == 0:  # a schedule may end at lr = 0: nothing moved, nothing was measured
            return own
        renewed = {}
        for control, before in own.items():
            name = control.removeprefix(wire.CONTROL)
            gradient = np.subtract(x[name], y[name], dtype=np.float64) / distance
            renewed[control] = (before - c[control] + gradient).astype(before.dtype)
        return renewed
