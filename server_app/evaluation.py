"""The global model on the server: loading arrays into it, measuring it, writing it out whole."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch

from fedplat import wire
from fedplat.device import default_device
from fedplat.errors import JobError, UsageError
from fedplat.evaluate import Measurement, evaluate
from fedplat.files import write_file
from fedplat.job import Job
from fedplat.model import (
    Arrays,
    build_model,
    controlled_parameters,
    personal_state,
    read_arrays,
    travelling_state,
    write_arrays,
)
from fedplat.task import Examples, Task, load_examples


def initial_clip_norm(job: Job) -> Arrays:
    """Where an adaptive clip norm starts; empty if the job has none."""
    if job.privacy is None or job.privacy.adaptive is None:
        return {}
    return {wire.CLIP_NORM: np.array(job.privacy.clip_norm, np.float32)}


class GlobalModel:
    """The server's copy of the model; frozen parameters stay here and never travel.

    `initial` is what a run starts from: the model's travelling arrays and, for SCAFFOLD, control variates of zero, and
    an adaptive clip norm.
    """

    def __init__(self, job: Job, task: Task) -> None:
        self._task = task
        self._device, self._loaded = default_device(), False
        self._model = build_model(job, task).to(self._device)
        self._state = travelling_state(self._model, job.task.freeze, job.task.personal)
        self._personal = frozenset(personal_state(self._model, job.task.personal))
        self._controlled = controlled_parameters(self._model, self._state) if job.is_scaffold else {}
        self._clip_norm = initial_clip_norm(job)
        self.dtypes = {name: array.dtype for name, array in self.initial.items()}
        self.num_parameters = sum(tensor.numel() for tensor in self._state.values())
        self._test: Examples | None = load_examples(task, job.task.name, "test") if job.evaluation.server else None

    @property
    def initial(self) -> Arrays:
        """A copy of what a run starts from; to be had until other arrays were loaded, and not kept here."""
        if self._loaded:
            raise RuntimeError("the initial model has been written over")
        controls = read_arrays({name: torch.zeros_like(p) for name, p in self._controlled.items()})
        return read_arrays(self._state) | controls | self._clip_norm

    def conform(self, arrays: Mapping[str, np.ndarray]) -> Arrays:
        """A strategy's result in the model's own order and dtypes (FedAdam widens to float64)."""
        if arrays.keys() != self.dtypes.keys():
            raise JobError("the strategy returned other arrays than the model's")
        conformed = {}
        for name, dtype in self.dtypes.items():
            values = arrays[name] if np.issubdtype(dtype, np.floating) else np.rint(arrays[name])
            conformed[name] = np.asarray(values).astype(dtype, copy=False)
            if not np.isfinite(conformed[name]).all():
                raise JobError(f"the strategy returned NaN or infinite values in '{name}': lower its learning rate")
        return conformed

    def origin(self, arrays: Arrays) -> Arrays:
        """What an update's distance is measured from: the model, and no change where clients send changes (Δc)."""
        return {name: array if name in self._state else np.zeros_like(array) for name, array in arrays.items()}

    def measure(self, arrays: Arrays) -> Measurement:
        if self._test is None:
            raise UsageError("this job has evaluation.server = false")
        self._write(arrays)
        return evaluate(self._model, self._task, self._test, self._device)

    def save(self, arrays: Arrays, path: Path) -> str:
        """Write the model, frozen parameters included; returns the file's SHA-256.

        Personal layers are left out: the server never had a trained one.
        """
        self._write(arrays)
        ours = {name: t for name, t in self._model.state_dict().items() if name not in self._personal}
        content = safetensors.numpy.save({name: tensor.cpu().numpy() for name, tensor in ours.items()})
        write_file(path, content)
        return hashlib.sha256(content).hexdigest()

    def _write(self, arrays: Arrays) -> None:
        self._loaded = True
        write_arrays(self._state, {name: arrays[name] for name in self._state})
