"""What a site keeps between the rounds of a job (personal layers, control variates), on its own disk.

Flower keeps a client's state in the SuperNode's memory, where it is lost with the process and seen by it. What no
request has used for a month is deleted.
"""

import json
from pathlib import Path

import safetensors.numpy
from flwr.app import RecordDict

from client_app.keeping import Keeping
from fedplat.errors import JobError
from fedplat.files import write_file
from fedplat.job import Job
from fedplat.records import decode_records, encode_records

_LAYOUT = "layout"


class SiteMemory:
    """One file per job that has something to remember."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._keeping = Keeping(folder, "*.safetensors")

    def recall(self, job: Job) -> RecordDict:
        path = self._path(job)
        self._keeping.use(path)
        if not job.uses_client_state or not path.exists():
            return RecordDict()
        try:
            with safetensors.safe_open(path, "numpy") as file:
                layout = json.loads(file.metadata()[_LAYOUT])
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
            raise JobError(f"{path}: what this site remembers of the job can't be read: {error}") from None
        return decode_records(layout, arrays)

    def save(self, job: Job, memory: RecordDict) -> None:
        if not job.uses_client_state:
            return
        layout, arrays = encode_records(memory)
        content = safetensors.numpy.save(arrays, metadata={_LAYOUT: json.dumps(layout)})
        write_file(self._path(job), content, mode=0o600)

    def _path(self, job: Job) -> Path:
        return self._folder / f"{job.digest[:32]}.safetensors"
