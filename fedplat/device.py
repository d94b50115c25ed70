"""Where tensors live: the accelerator if the machine has one, else the CPU."""

import torch


def default_device() -> torch.device:
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        if found is not None:
            return found
    return torch.device("cpu")
