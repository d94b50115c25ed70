"""The global model on the server: loading arrays into it, measuring it, writing it out whole."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors.numpy

from fedplat.device import default_device
from fedplat.errors import JobError, UsageError
from fedplat.evaluate import Measurement, evaluate
from fedplat.files import write_file
from fedplat.job import Job
from fedplat.model import Arrays, build_model, read_arrays, travelling_state, write_arrays
from fedplat.task import Examples, Task


class GlobalModel:
    """The server's copy of the model; frozen parameters stay here and never travel."""

    def __init__(self, job: Job, task: Task) -> None:
        self._task = task
        self._device = default_device()
        self._model = build_model(job, task).to(self._device)
        self._state = travelling_state(self._model, job.task.freeze)
        self.initial: Arrays = read_arrays(self._state)
        self._test: Examples | None = task.data("test") if job.evaluation.server else None

    def conform(self, arrays: Mapping[str, np.ndarray]) -> Arrays:
        """A strategy's result in the model's own order and dtypes (FedAdam widens to float64)."""
        if arrays.keys() != self.initial.keys():
            raise JobError("the strategy returned other arrays than the model's")
        conformed = {}
        for name, template in self.initial.items():
            array = arrays[name]
            if not np.isfinite(array).all():
                raise JobError(f"the strategy returned NaN or infinite values in '{name}': lower its learning rate")
            whole = np.issubdtype(template.dtype, np.floating)
            conformed[name] = np.asarray(array if whole else np.rint(array)).astype(template.dtype)
        return conformed

    def measure(self, arrays: Arrays) -> Measurement:
        if self._test is None:
            raise UsageError("this job has evaluation.server = false")
        write_arrays(self._state, arrays)
        return evaluate(self._model, self._task, self._test, self._device)

    def save(self, arrays: Arrays, path: Path) -> str:
        """Write the whole model, frozen parameters included; returns the file's SHA-256."""
        write_arrays(self._state, arrays)
        content = safetensors.numpy.save(read_arrays(self._model.state_dict()))
        write_file(path, content)
        return hashlib.sha256(content).hexdigest()
