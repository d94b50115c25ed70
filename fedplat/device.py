"""Where tensors live (the accelerator if the machine has one, else the CPU) and how many threads compute them."""

import torch


def default_device() -> torch.device:
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        if found is not None:
            return found
    return torch.device("cpu")


def use_threads(count: int) -> None:
    """Torch threads of this process; 0 leaves them alone. Two processes with torch's default fight for the cores."""
    if count and torch.get_num_threads() != count:
        torch.set_num_threads(count)
