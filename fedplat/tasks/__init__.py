"""The built-in tasks, and how a task named in a job is found.

`digits`, `mnist` and `cancer` are built in. Anything else is `package.module:Class`, imported from
where fedplat is installed: code is never shipped with a job.
"""

import importlib
import os
from collections.abc import Iterable
from pathlib import Path

from fedplat.arguments import bind_arguments
from fedplat.errors import FedplatError, UsageError, unknown_name
from fedplat.job import Job
from fedplat.task import Task, require_protocol

BUILT_IN = {
    "digits": "fedplat.tasks.digits:Digits",
    "mnist": "fedplat.tasks.mnist:Mnist",
    "cancer": "fedplat.tasks.cancer:Cancer",
}


def data_dir(job: Job) -> Path:
    return Path(job.data.dir or os.environ.get("FEDPLAT_DATA") or "data")


def load_task(job: Job) -> Task:
    """The task of a job, constructed with its arguments."""
    name = job.task.name
    cls = find_class(BUILT_IN.get(name, name), "task", BUILT_IN)
    # The class is judged before it is constructed: its constructor may need data that isn't there.
    require_protocol(cls, name)
    bind_arguments(cls, job.task.args, "task.args", reserved={"data_dir"})
    try:
        task: Task = cls(data_dir=data_dir(job), **job.task.args)
    except FedplatError:
        raise
    except Exception as error:  # the task is somebody's own code
        raise UsageError(f"task {name}: its constructor failed: {type(error).__name__}: {error}") from error
    return task


def find_class(reference: str, what: str, built_in: Iterable[str]) -> type:
    """Import `package.module:Class`, or explain in one sentence why that can't be done."""
    module_name, colon, class_name = reference.partition(":")
    if not colon:
        raise UsageError(f"{unknown_name(what, reference, built_in)}; or your own as 'package.module:Class'")
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except Exception as error:  # a module of the user's own can fail in any way while it is imported
        reason = f"{type(error).__name__}: {error}"
        raise UsageError(f"{what} {reference}: can't import {module_name}: {reason}. Is it on PYTHONPATH?") from None
    if not isinstance(found, type):
        raise UsageError(f"{what} {reference}: {module_name} has no class {class_name}")
    return found
