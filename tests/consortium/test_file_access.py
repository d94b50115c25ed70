"""Who could read or replace a file, from owners and modes alone: a table, and the kernel's own answer."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedplat.consortium.file_access import READ, SEARCH, WRITE, Credentials, can_read, can_replace, grants
from fedplat.errors import UsageError

NODE = Credentials(uid=60_001, gids=frozenset({60_001, 60_100}))


def _status(mode: int, uid: int, gid: int) -> os.stat_result:
    return os.stat_result((0o100000 | mode, 0, 0, 1, uid, gid, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "uid", "gid", "right", "granted"),
    [
        (0o600, 1000, 1000, READ, False),
        (0o640, 1000, 1000, READ, False),
        (0o640, 1000, 60_001, READ, True),
        (0o640, 1000, 60_100, READ, True),  # a group it is also in
        (0o604, 1000, 1000, READ, True),
        (0o604, 1000, 60_001, READ, False),  # the group counts, not the others
        (0o000, 60_001, 1000, READ, True),  # an owner can chmod
        (0o644, 1000, 1000, WRITE, False),
        (0o646, 1000, 1000, WRITE, True),
        (0o660, 1000, 60_100, WRITE, True),
        (0o711, 1000, 1000, SEARCH, True),
        (0o710, 1000, 1000, SEARCH, False),
        (0o710, 1000, 60_100, SEARCH, True),
    ],
)
def test_the_table(mode: int, uid: int, gid: int, right: int, granted: bool) -> None:
    assert grants(_status(mode, uid, gid), NODE, right) is granted


def test_root_may_do_everything() -> None:
    assert grants(_status(0, 1000, 1000), Credentials(0, frozenset({0})), READ | WRITE | SEARCH)


@pytest.fixture
def tree() -> Iterator[Path]:
    """home/kit/secret, outside of pytest's own directories: those are closed to others."""
    with tempfile.TemporaryDirectory() as top:
        Path(top).chmod(0o755)
        folder = Path(top) / "home" / "kit"
        folder.mkdir(parents=True)
        (folder / "secret").write_text("x")
        yield Path(top) / "home"


CASES = [  # modes of home, kit and secret → can a stranger read the secret, can a stranger replace it
    (0o755, 0o755, 0o644, True, False),
    (0o755, 0o700, 0o644, False, False),
    (0o700, 0o755, 0o644, False, False),
    (0o755, 0o755, 0o600, False, False),
    (0o755, 0o777, 0o600, False, True),
    (0o777, 0o700, 0o600, False, True),  # moves the whole kit away
    (0o1777, 0o700, 0o600, False, False),  # the sticky bit holds it
    (0o755, 0o711, 0o604, True, False),  # no listing needed to open a known name
    (0o755, 0o744, 0o644, False, False),  # listing is not entering
    (0o755, 0o755, 0o602, False, True),
    (0o700, 0o777, 0o666, False, False),
]


@pytest.mark.parametrize(("home", "kit", "secret", "readable", "replaceable"), CASES)
def test_every_directory_above_counts(
    tree: Path, home: int, kit: int, secret: int, readable: bool, replaceable: bool
) -> None:
    path = tree / "kit" / "secret"
    for place, mode in ((path, secret), (path.parent, kit), (tree, home)):
        place.chmod(mode)
    assert can_read(path, NODE) is readable
    assert can_replace(path, NODE) is replaceable
    if os.getuid() == 0:
        assert _kernel_says(path) is readable


def _kernel_says(path: Path) -> bool:
    """Become that user and try."""
    return (
        subprocess.run(
            ["/bin/cat", path], user=NODE.uid, group=NODE.uid, extra_groups=[], capture_output=True
        ).returncode
        == 0
    )


def test_a_directory_of_data_is_read_by_listing_or_by_entering(tree: Path) -> None:
    for mode, readable in ((0o700, False), (0o704, True), (0o701, True), (0o750, False), (0o755, True)):
        (tree / "kit").chmod(mode)
        assert can_read(tree / "kit", NODE) is readable


def test_a_link_is_what_it_points_to(tree: Path) -> None:
    (tree / "open").symlink_to(tree / "kit" / "secret")
    (tree / "kit").chmod(0o700)
    assert not can_read(tree / "open", NODE)


def test_a_user_that_is_not_there_is_an_error() -> None:
    with pytest.raises(UsageError, match="useradd"):
        Credentials.of("no-such-user-here")
