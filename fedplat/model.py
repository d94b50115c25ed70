"""The model of a job: how it starts, which of its tensors travel, how arrays go in and out.

What travels is everything in the model's state except what `task.freeze` and `task.personal` name:
trainable parameters and buffers. Frozen tensors come from `task.init_from` (or the seed) at every party,
personal ones start there and are then each client's own; neither ever crosses the network.
"""

import fnmatch
import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from fedplat import wire
from fedplat.errors import UsageError
from fedplat.job import Job
from fedplat.streams import torch_seeded
from fedplat.task import Task

Arrays = dict[str, np.ndarray]
_TRAVEL_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)


def build_model(job: Job, task: Task) -> nn.Module:
    """The initial model: seeded, optionally loaded from a file, with frozen parameters marked.

    Raises UsageError for patterns of `task.freeze` and `task.personal` that this model can't follow.
    """
    with torch_seeded(job.job.seed, "model"):
        model = task.model()
        if job.privacy is not None and job.privacy.convert_model:
            model = _converted(model)
    if job.task.init_from is not None:
        load_file(model, Path(job.task.init_from), job.task.init_sha256)
    _freeze(model, job.task.freeze)
    _require_personal(model, job.task.personal, job.task.freeze)
    return model


def _converted(model: nn.Module) -> nn.Module:
    """Layers that couple examples replaced by Opacus's own choice of ones that don't; the same at every party."""
    from opacus.validators import ModuleValidator

    converted: nn.Module = ModuleValidator.fix(model)
    return converted


def _freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    _require_matches("task.freeze", patterns, list(model.state_dict()))
    for name, parameter in model.named_parameters():
        if _is_named(name, patterns):
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("task.freeze leaves nothing to train: narrow its patterns")


def _require_personal(model: nn.Module, personal: tuple[str, ...], freeze: tuple[str, ...]) -> None:
    names = list(model.state_dict())
    _require_matches("task.personal", personal, names)
    both = [name for name in names if _is_named(name, personal) and _is_named(name, freeze)]
    if both:
        raise UsageError(f"{', '.join(both)}: frozen and personal at once. Narrow task.freeze or task.personal")
    if all(_is_named(name, personal + freeze) for name in names):
        raise UsageError("task.personal leaves nothing to travel, so nothing would be learned together: narrow it")


def _require_matches(key: str, patterns: tuple[str, ...], names: list[str]) -> None:
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise UsageError(f"{key}: '{pattern}' matches no parameter. The model has: {', '.join(names)}")


def _is_named(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def travelling_state(model: nn.Module, freeze: tuple[str, ...], personal: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """The live tensors that travel between server and clients, by name."""
    return _exchangeable({n: t for n, t in model.state_dict().items() if not _is_named(n, freeze + personal)})


def personal_state(model: nn.Module, personal: tuple[str, ...]) -> dict[str, Tensor]:
    """The live tensors that each client trains and keeps for itself, buffers included, by name."""
    return _exchangeable({name: t for name, t in model.state_dict().items() if _is_named(name, personal)})


def volatile_state(model: nn.Module) -> dict[str, Tensor]:
    """The live buffers that are not part of the model's state (`persistent=False`), by name."""
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name not in kept}


def controlled_parameters(model: nn.Module, travelling: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """The parameters that SCAFFOLD corrects (trained and travelling), by the name of their control variate."""
    named = model.named_parameters()
    return {wire.CONTROL + name: p for name, p in named if p.requires_grad and name in travelling}


def _exchangeable(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state, if NumPy and safetensors know all of its types."""
    for name, tensor in state.items():
        if tensor.dtype not in _TRAVEL_DTYPES:
            raise UsageError(
                f"model tensor '{name}' is {tensor.dtype}: keep weights in float32 and set local.precision = 'bf16'"
            )
    return state


def set_training(model: nn.Module, freeze: tuple[str, ...]) -> None:
    """Training mode, except for modules whose buffers are frozen (a frozen BatchNorm must not move)."""
    model.train()
    for prefix, module in model.named_modules():
        buffers = [f"{prefix}.{name}".lstrip(".") for name, _ in module.named_buffers(recurse=False)]
        if any(_is_named(name, freeze) for name in buffers):
            module.training = False  # this module only: `eval()` would reach into its children


@torch.no_grad()
def read_arrays(state: Mapping[str, Tensor]) -> Arrays:
    """Copies of the tensors as NumPy arrays."""
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in state.items()}


@torch.no_grad()
def write_arrays(state: Mapping[str, Tensor], arrays: Mapping[str, np.ndarray]) -> None:
    """Copy arrays into the live tensors; names and shapes must match exactly."""
    if arrays.keys() != state.keys():
        difference = sorted(arrays.keys() ^ state.keys())
        raise ValueError(f"arrays don't fit the model: {', '.join(difference[:5])}")
    for name, tensor in state.items():
        if tuple(arrays[name].shape) != tuple(tensor.shape):
            raise ValueError(f"array '{name}' has shape {arrays[name].shape}, the model has {tuple(tensor.shape)}")
    for name, tensor in state.items():
        array = np.require(arrays[name], requirements=["C", "W"])  # torch warns of what it could not write to
        tensor.copy_(torch.from_numpy(array).reshape(tensor.shape))


def file_sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"task.init_from: {path} can't be read: {error.strerror}") from None


def load_file(model: nn.Module, path: Path, sha256: str | None) -> None:
    """Transfer learning: copy every tensor whose name and shape the model has."""
    if path.exists() and not path.is_file():  # a pipe would be waited for, for ever
        raise UsageError(f"task.init_from: {path} can't be read: it is no regular file")
    found = file_sha256(path)
    if sha256 is not None and found != sha256:
        raise UsageError(f"task.init_from: {path} has SHA-256 {found}, the job says {sha256}")
    try:
        loaded = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise UsageError(f"task.init_from: {path} is not a safetensors file: {error}") from None
    state = model.state_dict()
    shared = {n: t for n, t in loaded.items() if n in state and t.shape == state[n].shape}
    if not shared:
        raise UsageError(
            f"task.init_from: no tensor of {path} fits the model. It has {', '.join(loaded)}; "
            f"the model has {', '.join(state)}"
        )
    with torch.no_grad():
        for name, tensor in shared.items():
            state[name].copy_(tensor)
