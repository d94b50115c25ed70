"""Durable files: whole or not at all, also when the disk really refuses the write."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedplat.files import write_directory, write_file

# A real EFBIG: the kernel lets a file grow to the limit and then refuses, as a full disk does.
LIMITED = """
import errno, resource, signal, sys
from pathlib import Path
from fedplat.files import write_directory, write_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    eval(sys.argv[2])(Path(sys.argv[1]), eval(sys.argv[3]))
except OSError as error:
    sys.exit(0 if error.errno == errno.EFBIG else 1)
sys.exit(2)
"""


def run_limited(path: Path, function: str, content: str) -> int:
    return subprocess.run([sys.executable, "-c", LIMITED, str(path), function, content], check=False).returncode


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@settings(max_examples=20, deadline=None)
@given(st.binary(max_size=300), st.binary(max_size=300))
def test_file_holds_what_was_written_last(tmp_path_factory: pytest.TempPathFactory, one: bytes, other: bytes) -> None:
    folder = tmp_path_factory.mktemp("files")
    write_file(folder / "a", one)
    write_file(folder / "a", other)
    assert everything(folder) == {"a": other}


def test_directory_holds_all_its_files_and_nothing_else(tmp_path: Path) -> None:
    write_directory(tmp_path / "deep" / "d", {"a": b"1", "b": b""})
    assert everything(tmp_path) == {"deep/d/a": b"1", "deep/d/b": b""}


def test_failed_write_keeps_the_old_file_and_leaves_no_rest(tmp_path: Path) -> None:
    write_file(tmp_path / "a", b"old")
    assert run_limited(tmp_path / "a", "write_file", "b'x' * 20_000") == 0
    assert everything(tmp_path) == {"a": b"old"}


def test_failed_write_of_a_new_file_leaves_nothing(tmp_path: Path) -> None:
    assert run_limited(tmp_path / "a", "write_file", "b'x' * 20_000") == 0
    assert list(tmp_path.iterdir()) == []


def test_failed_directory_leaves_nothing_of_its_good_files(tmp_path: Path) -> None:
    assert run_limited(tmp_path / "d", "write_directory", "{'small': b'ok', 'large': b'x' * 20_000}") == 0
    assert list(tmp_path.iterdir()) == []


def test_directory_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    write_directory(tmp_path / "d", {"a": b"1"})
    with pytest.raises(OSError):
        write_directory(tmp_path / "d", {"b": b"2"})
    assert everything(tmp_path) == {"d/a": b"1"}
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_rests_of_a_crash_do_not_get_in_the_way(tmp_path: Path) -> None:
    (tmp_path / ".a.part").write_bytes(b"half")
    (tmp_path / ".d.part").mkdir()
    (tmp_path / ".d.part" / "stale").write_bytes(b"half")
    write_file(tmp_path / "a", b"whole")
    write_directory(tmp_path / "d", {"x": b"whole"})
    assert everything(tmp_path) == {"a": b"whole", "d/x": b"whole"}


def test_write_into_a_missing_folder_fails_without_making_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_file(tmp_path / "no" / "a", b"1")
    assert os.listdir(tmp_path) == []  # noqa: PTH208
