"""The global model in shared memory: written once per round, read by every worker, never pickled per client.

A message's arrays are replaced by a small reference. A worker maps the memory, copies it once per version, and
then hands all its clients the same bytes, so that the handler decodes them once too.
"""

from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory

from flwr.app import Array, ArrayRecord, RecordDict

from fedplat import wire


@dataclass(frozen=True)
class ArrayPlace:
    """One array inside the shared block."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stype: str
    offset: int
    size: int


@dataclass(frozen=True)
class ModelReference:
    """Where a worker finds the array records of a message."""

    block: str
    version: int
    records: dict[str, tuple[ArrayPlace, ...]]


class ModelWriter:
    """The parent's half: keeps the last two versions mapped (the round's training and its evaluation)."""

    KEPT = 2

    def __init__(self) -> None:
        self._version = 0
        self._known: dict[tuple[int, ...], tuple[ModelReference, SharedMemory, list[bytes]]] = {}

    def place(self, content: RecordDict) -> ModelReference:
        """Write the content's arrays, unless exactly these are there already."""
        records = wire.records(content, ArrayRecord)
        data = [array.data for record in records.values() for array in record.values()]
        key = tuple(id(piece) for piece in data)
        if key not in self._known:
            self._known[key] = (*self._write(records), data)
            for old in list(self._known)[: -self.KEPT]:
                self._release(self._known.pop(old)[1])
        return self._known[key][0]

    def close(self) -> None:
        for _, block, _ in self._known.values():
            self._release(block)
        self._known.clear()

    def _write(self, records: dict[str, ArrayRecord]) -> tuple[ModelReference, SharedMemory]:
        total = sum(len(array.data) for record in records.values() for array in record.values())
        block = SharedMemory(create=True, size=max(1, total))
        offset, places = 0, {}
        for key, record in records.items():
            row = []
            for name, array in record.items():
                size = len(array.data)
                _view(block)[offset : offset + size] = array.data
                row.append(ArrayPlace(name, array.dtype, tuple(array.shape), array.stype, offset, size))
                offset += size
            places[key] = tuple(row)
        self._version += 1
        return ModelReference(block.name, self._version, places), block

    @staticmethod
    def _release(block: SharedMemory) -> None:
        block.close()
        block.unlink()


class ModelReader:
    """A worker's half: copies each version once."""

    def __init__(self) -> None:
        self._version = 0
        self._records: dict[str, ArrayRecord] = {}

    def fetch(self, reference: ModelReference) -> dict[str, ArrayRecord]:
        if reference.version != self._version:
            block = SharedMemory(reference.block)
            try:
                self._records = {
                    key: ArrayRecord({place.name: _array(block, place) for place in places})
                    for key, places in reference.records.items()
                }
            finally:
                block.close()
            self._version = reference.version
        return {key: record.copy() for key, record in self._records.items()}


def _array(block: SharedMemory, place: ArrayPlace) -> Array:
    data = bytes(_view(block)[place.offset : place.offset + place.size])
    return Array(dtype=place.dtype, shape=place.shape, stype=place.stype, data=data)


def _view(block: SharedMemory) -> memoryview:
    assert block.buf is not None, "the block is mapped until it is closed"
    return block.buf
