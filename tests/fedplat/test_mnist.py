"""MNIST from IDX files: the original is read whole, and anything else is refused."""

import gzip
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedplat.errors import UsageError
from fedplat.job import validate_job
from fedplat.task import rehearse
from fedplat.tasks import load_task
from fedplat.tasks.mnist import FILES, Mnist, read_idx

ORIGINAL = Path(__file__).parents[3] / "shared/data/mnist"
needs_files = pytest.mark.skipif(not ORIGINAL.is_dir(), reason=f"MNIST's IDX files are not in {ORIGINAL}")
LABELS = FILES["test"][1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The two test files; images are linked, labels are a copy to be spoiled."""
    (tmp_path / f"{FILES['test'][0]}.gz").symlink_to(ORIGINAL / f"{FILES['test'][0]}.gz")
    shutil.copyfile(ORIGINAL / f"{LABELS}.gz", tmp_path / f"{LABELS}.gz")
    return tmp_path


@needs_files
@pytest.mark.parametrize(("split", "size"), [("train", 60_000), ("test", 10_000)])
def test_splits_have_the_original_sizes_and_shapes(split: str, size: int) -> None:
    examples = Mnist(ORIGINAL).data(split)  # type: ignore[arg-type]
    assert examples.inputs.shape == (size, 1, 28, 28)
    assert examples.inputs.dtype == torch.float32
    assert (float(examples.inputs.min()), float(examples.inputs.max())) == (0.0, 1.0)
    assert torch.bincount(examples.targets, minlength=10).min() > 0.08 * size


@needs_files
def test_first_images_carry_the_published_labels() -> None:
    assert read_idx(ORIGINAL, FILES["train"][1])[:5].tolist() == [5, 0, 4, 1, 9]
    assert read_idx(ORIGINAL, LABELS)[:5].tolist() == [7, 2, 1, 0, 4]


@needs_files
@pytest.mark.parametrize(("model", "parameters"), [("2nn", 199_210), ("cnn", 20_016)])
def test_models_have_the_documented_size_and_fit_the_data(model: str, parameters: int) -> None:
    job = validate_job({"task": {"name": "mnist", "args": {"model": model}}, "data": {"dir": str(ORIGINAL)}}, "test")
    task = load_task(job)
    assert sum(p.numel() for p in task.model().parameters()) == parameters
    rehearse(task, "mnist", task.data("test"))


@needs_files
def test_files_may_be_unpacked_and_may_lie_in_a_folder_called_mnist(folder: Path) -> None:
    expected = read_idx(folder, LABELS)
    (folder / "mnist").mkdir()
    (folder / "mnist" / LABELS).write_bytes(gzip.decompress((folder / f"{LABELS}.gz").read_bytes()))
    (folder / f"{LABELS}.gz").unlink()
    assert (read_idx(folder, LABELS) == expected).all()


def flip(position: int) -> Callable[[bytes], bytes]:
    return lambda packed: packed[:position] + bytes([packed[position] ^ 0xFF]) + packed[position + 1 :]


def repack(change: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda packed: gzip.compress(change(gzip.decompress(packed)))


SPOILED: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda packed: b"",
    "truncated header": lambda packed: packed[:5],
    "truncated body": lambda packed: packed[: len(packed) // 2],
    "truncated trailer": lambda packed: packed[:-3],
    "not gzip": lambda packed: b"<html>404</html>",
    "flipped in the header": flip(1),
    "invalid deflate stream": lambda packed: gzip.compress(b"")[:10] + b"\xff" * 100,
    "flipped in the body": flip(2000),
    "flipped in the checksum": flip(-6),
    "trailing garbage": lambda packed: packed + b"garbage",
    "one label changed": repack(flip(500)),
    "one label missing": repack(lambda content: content[:-1]),
    "other data": lambda packed: gzip.compress(b"\0\0\x08\x01\0\0\0\x02\x01\x02"),
}


@needs_files
@pytest.mark.parametrize("spoil", SPOILED.values(), ids=SPOILED.keys())
def test_spoiled_file_is_refused_and_named(folder: Path, spoil: Callable[[bytes], bytes]) -> None:
    file = folder / f"{LABELS}.gz"
    file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(UsageError) as refusal:
        Mnist(folder).data("test")
    assert LABELS in str(refusal.value)
    assert "download" in str(refusal.value)


def test_invalid_deflate_sample_really_is_what_zlib_refuses() -> None:
    """Guards the table above: gzip reports some damage as OSError and some as zlib.error."""
    with pytest.raises(zlib.error):
        gzip.decompress(SPOILED["invalid deflate stream"](b""))


def test_missing_files_say_where_they_were_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"not found\. Set data\.dir.*fedplat data download mnist") as refusal:
        Mnist(tmp_path).data("train")
    assert str(tmp_path) in str(refusal.value)


def test_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"{FILES['test'][0]}.gz").mkdir()
    with pytest.raises(UsageError, match="can't be read"):
        Mnist(tmp_path).data("test")


def test_unknown_architecture_lists_the_valid_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"task\.args\.model must be one of 2nn, cnn, dpcnn \(got 'resnet'\)"):
        Mnist(tmp_path, model="resnet")  # type: ignore[arg-type]
