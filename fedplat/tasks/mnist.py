"""`mnist`: LeCun's handwritten digits from IDX files, 60,000 training and 10,000 test images of 28×28.

The four files are read from the data directory, gzipped or not. Each must have the checksum of the
original, or it is refused: a truncated file would otherwise train without a word.
`fedplat data download mnist` fetches them where there is a network.
"""

import gzip
import hashlib
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn

from fedplat.errors import UsageError
from fedplat.task import Examples, Split
from fedplat.tasks.classification import Classification

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
# SHA-256 of the uncompressed IDX content, so that any gzip packing of it will do.
CHECKSUMS = {
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
}
FILES: dict[Split, tuple[str, str]] = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


class Mnist(Classification):
    def __init__(self, data_dir: Path, model: Literal["2nn", "cnn", "dpcnn"] = "2nn") -> None:
        super().__init__(data_dir)
        if model not in _MODELS:
            raise UsageError(f"task.args.model must be one of {', '.join(_MODELS)} (got {model!r})")
        self.architecture = model

    def model(self) -> nn.Module:
        return _MODELS[self.architecture]()

    def data(self, split: Split) -> Examples:
        images, labels = (read_idx(self.data_dir, name) for name in FILES[split])
        scaled = torch.from_numpy(images).to(torch.float32).div_(255).unsqueeze(1)
        return Examples(scaled, torch.from_numpy(labels).to(torch.int64))


def _two_nn() -> nn.Module:
    """The 2NN of McMahan et al. 2017: 199,210 parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10)
    )


def _small_cnn() -> nn.Module:
    """Two convolutions and one hidden layer: 20,016 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 50), nn.ReLU(), nn.Linear(50, 10),
    )  # fmt: skip


def _private_cnn() -> nn.Module:
    """The small CNN that Opacus's published MNIST figures are for: 26,010 parameters, none of them in a BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), nn.ReLU(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


_MODELS: dict[str, Callable[[], nn.Module]] = {"2nn": _two_nn, "cnn": _small_cnn, "dpcnn": _private_cnn}


def read_idx(directory: Path, name: str) -> np.ndarray:
    """One IDX file as an array of bytes, checked against the original's checksum."""
    content = _read_bytes(directory, name)
    if hashlib.sha256(content).hexdigest() != CHECKSUMS[name]:
        raise UsageError(
            f"{directory / name}: checksum differs from the original MNIST file ({len(content)} bytes read): "
            f"truncated or changed. Remove it and run: fedplat data download mnist --dir {directory}"
        )
    dimensions = content[3]
    shape = np.frombuffer(content, ">i4", dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy()


def _read_bytes(directory: Path, name: str) -> bytes:
    for folder in (directory, directory / "mnist"):
        plain, packed = folder / name, folder / f"{name}.gz"
        try:
            if packed.exists():
                return gzip.decompress(packed.read_bytes())
            if plain.exists():
                return plain.read_bytes()
        except (OSError, EOFError, zlib.error) as error:
            raise UsageError(f"{packed}: can't be read ({error}): truncated? Remove it and download again") from None
    raise UsageError(
        f"{directory}: {name}[.gz] not found. Set data.dir to the folder with MNIST's IDX files, "
        f"or run: fedplat data download mnist --dir {directory}"
    )


def download(directory: Path, report: Callable[[str, float], None]) -> None:
    """Fetch the four files, check them, and only then put them in place."""
    directory.mkdir(parents=True, exist_ok=True)
    names = [name for pair in FILES.values() for name in pair]
    for number, name in enumerate(names):
        report(name, number / len(names))
        packed = _fetch(f"{name}.gz")
        if not _is_original(name, packed):
            raise UsageError(f"{name}.gz: the download has a wrong checksum; it was not written")
        partial = directory / f".{name}.gz.part"
        partial.write_bytes(packed)
        partial.rename(directory / f"{name}.gz")
    report("done", 1.0)


def _is_original(name: str, packed: bytes) -> bool:
    try:
        return hashlib.sha256(gzip.decompress(packed)).hexdigest() == CHECKSUMS[name]
    except (OSError, EOFError, zlib.error):
        return False


def _fetch(file: str) -> bytes:
    problems = []
    for mirror in MIRRORS:
        try:
            with urllib.request.urlopen(mirror + file, timeout=30) as response:
                content: bytes = response.read()
                return content
        except OSError as error:
            problems.append(f"{mirror}: {error}")
    raise UsageError(f"{file}: no mirror answered ({'; '.join(problems)}). Copy the four files by hand into data.dir")
