"""A layer copied while it is in use, and what layers take."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from sandbox_gym.api import Limits
from sandbox_gym.backends.native.disk import BtrfsStore, Layer, TmpfsStore, is_full, used_bytes
from sandbox_gym.errors import SnapshotError
from tests.native.trees import mounted, tree, writable

Apart = Callable[[Callable[[], None]], None]


@contextmanager
def _clone(store: BtrfsStore, layer: Layer) -> Iterator[Layer]:
    copy = store.clone(layer)
    try:
        yield copy
    finally:
        copy.release()


def _base(place: Path) -> str:
    (place / "base/.root").mkdir(parents=True)
    (place / "base/.root/gone").write_text("base")
    (place / "base/.root/changed").write_text("base")
    return f"{place}/base"


def test_a_copy_is_of_that_instant_and_the_sandbox_goes_on(
    store: BtrfsStore, place: Path, apart: Apart
) -> None:
    def body() -> None:
        base = _base(place)
        with writable(store) as layer, mounted(layer, [], base) as root:
            os.unlink(f"{root}/gone")
            with (
                open(f"{root}/changed", "r+") as written,
                open(f"{root}/mapped", "wb+") as file,
                open(f"{root}/removed", "w+") as removed,
            ):
                written.write("then")
                written.flush()
                file.truncate(1 << 20)
                memory = mmap.mmap(file.fileno(), 1 << 20)
                memory[-4:] = b"then"
                removed.write("no name")
                removed.flush()
                os.unlink(f"{root}/removed")
                before = tree(root)
                with _clone(store, layer) as copy:
                    written.write("later")
                    written.flush()
                    memory[-4:] = b"late"
                    removed.write(" at all")
                    removed.flush()
                    removed.seek(0)
                    assert removed.read() == "no name at all"
                    Path(f"{root}/new").write_text("later")
                    assert copy.lower is not None
                    with writable(store) as own, mounted(own, [copy.lower], base) as seen:
                        assert tree(seen) == before
                        assert sorted(os.listdir(seen)) == ["changed", "mapped"]
                        assert Path(f"{seen}/mapped").read_bytes()[-4:] == b"then"
                    assert copy.used == used_bytes(copy.lower) >= 1 << 12
                memory.close()
            assert Path(f"{root}/changed").read_text() == "thenlater"
            assert Path(f"{root}/mapped").read_bytes()[-4:] == b"late"

    apart(body)


def _fill(path: str) -> int:
    """Writes until the limit is met. How much that was."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    try:
        for _ in range(1 << 10):
            try:
                os.write(fd, os.urandom(1 << 16))
            except OSError as error:
                if not is_full(error):
                    raise
                return os.fstat(fd).st_size
    finally:
        os.close(fd)
    raise AssertionError("no limit")


def test_a_copy_outlives_the_layer_and_has_no_limit_of_its_own(
    store: BtrfsStore, place: Path, apart: Apart
) -> None:
    def body() -> None:
        limits = Limits(disk_bytes=4 << 20)
        layer = store.make(limits, 0)
        base = _base(place)
        with mounted(layer, [], base) as root:
            size = _fill(f"{root}/full")
            copy = store.clone(layer)
        layer.release()
        assert os.stat(f"{copy.lower}/.root/full").st_size == size > 1 << 20
        Path(f"{copy.folder}/more").write_bytes(os.urandom(8 << 20))
        copy.release()

    apart(body)


def test_a_copy_of_what_is_frozen_and_of_what_went_on_after_that(
    store: BtrfsStore, place: Path, apart: Apart
) -> None:
    def body() -> None:
        base = _base(place)
        with writable(store) as layer:
            with _clone(store, layer) as copy:
                assert copy.lower is None and copy.used == 0
            with mounted(layer, [], base) as root:
                Path(f"{root}/one").write_text("1")
                layer.freeze()
                Path(f"{root}/two").write_text("2")
                with _clone(store, layer) as copy, _clone(store, copy) as again:
                    Path(f"{root}/three").write_text("3")
                    for lower in (copy.lower, again.lower):
                        assert sorted(os.listdir(f"{lower}/.root")) == ["one", "two"]

    apart(body)


def test_a_tmpfs_says_that_it_can_not_be_copied(apart: Apart) -> None:
    def body() -> None:
        store = TmpfsStore()
        layer = store.make(Limits(), 0)
        with pytest.raises(SnapshotError, match="btrfs"):
            store.clone(layer)
        layer.release()

    apart(body)


def test_what_a_layer_takes(place: Path, apart: Apart) -> None:
    def body() -> None:
        (place / "a/b").mkdir(parents=True)
        (place / "a/one").write_bytes(os.urandom(1 << 20))
        os.link(place / "a/one", place / "a/b/again")
        os.symlink("/usr", place / "a/link")
        with open(place / "a/sparse", "wb") as file:
            file.truncate(1 << 30)
        # The link's own few bytes come to it, and the hole does not; a file of two names counts once.
        assert 1 << 20 <= used_bytes(f"{place}") <= (1 << 20) + 4096

    apart(body)


def test_what_lies_deeper_than_a_path_can_name_is_counted(place: Path, apart: Apart) -> None:
    def body() -> None:
        fd = os.open(place, os.O_RDONLY)
        for _ in range(3000):
            os.mkdir("deep", dir_fd=fd)
            below = os.open("deep", os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = below
        file = os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
        os.write(file, bytes(4096))
        os.close(file)
        os.close(fd)
        assert used_bytes(f"{place}") == 4096

    apart(body)


def test_moving_folders_meanwhile_leads_nowhere_else(
    place: Path, apart: Apart, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever moves the folder that is being read would have the walk go on in the one above the layer."""

    def body() -> None:
        (place / "layer/a/b/c").mkdir(parents=True)
        inside, walk = os.stat(place / "layer/a/b").st_ino, os.scandir

        def scandir(fd: int) -> Any:
            if os.fstat(fd).st_ino == inside and (place / "layer/a/b").exists():
                os.rename(place / "layer/a/b", place / "b")
            return walk(fd)

        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", scandir)
            with pytest.raises(OSError, match="folder was moved"):
                used_bytes(f"{place}/layer")
        assert not (place / "layer/a/b").exists()

    apart(body)
