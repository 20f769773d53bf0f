"""Merged layers show what the stack of them showed."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox_gym.backends.native.disk import BtrfsStore
from sandbox_gym.backends.native.merge import merge
from tests.native.trees import ACL, CHANGES, Change, apply, links, mounted, tree, writable

Apart = Callable[[Callable[[], None]], None]
_OPAQUE, _ORIGIN = "trusted.overlay.opaque", "trusted.overlay.origin"


def test_any_layers_merged_are_like_the_stack(store: BtrfsStore, apart: Apart) -> None:
    """Random layers, each written through an overlay over those below; some neighbours of them are merged."""

    @settings(max_examples=80, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(
        st.lists(CHANGES, min_size=10, max_size=20),
        st.lists(st.lists(CHANGES, min_size=5, max_size=15), min_size=2, max_size=4),
        st.tuples(st.integers(0, 1), st.integers(0, 1)),
        st.lists(CHANGES, max_size=8),
    )
    def check(
        below: list[Change], steps: list[list[Change]], kept: tuple[int, int], after: list[Change]
    ) -> None:
        with ExitStack() as stack:
            base = stack.enter_context(writable(store)).folder + "/base"
            os.makedirs(f"{base}/.root")
            apply(f"{base}/.root", below)
            lowers: list[str] = []
            for changes in steps:
                layer = stack.enter_context(writable(store))
                with mounted(layer, lowers, base) as root:
                    apply(root, changes)
                layer.freeze()
                if layer.lower is not None:
                    lowers.insert(0, layer.lower)
            target = stack.enter_context(writable(store)).folder + "/merged"
            os.mkdir(target)
            top, bottom = kept if len(lowers) > sum(kept) else (0, 0)
            end = len(lowers) - bottom
            merge(lowers[top:end], target)
            expected, found = links(lowers[top:end], target)
            assert found == expected
            merged = [*lowers[:top], target, *lowers[end:]]
            with (
                mounted(stack.enter_context(writable(store)), lowers, base) as old,
                mounted(stack.enter_context(writable(store)), merged, base) as new,
            ):
                assert tree(old) == tree(new)
                assert apply(old, after) == apply(new, after)
                assert tree(old, times=False) == tree(new, times=False)

    apart(check)


@contextmanager
def _both(store: BtrfsStore, place: Path, layers: int) -> Iterator[tuple[str, str]]:
    """The layers `place/0` (newest) and so on over `place/base`, as a stack and merged."""
    for number in range(layers):
        (place / f"{number}/.root").mkdir(parents=True, exist_ok=True)
    for name in ("base/.root", "merged"):
        (place / name).mkdir(parents=True, exist_ok=True)
    lowers = [f"{place}/{number}" for number in range(layers)]
    merge(lowers, f"{place}/merged")
    with (
        writable(store) as one,
        writable(store) as other,
        mounted(one, lowers, f"{place}/base") as old,
        mounted(other, [f"{place}/merged"], f"{place}/base") as new,
    ):
        yield old, new


def _whiteout(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))


def _text(path: Path, text: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_what_a_newer_layer_hides_stays_hidden(store: BtrfsStore, place: Path, apart: Apart) -> None:
    def body() -> None:
        for name in ("gone/deep", "again/old", "opaque/old", "file/old", "folder/old"):
            _text(place / f"base/.root/{name}")
            _text(place / f"2/.root/{name}2")
        _whiteout(place / "1/.root/gone")
        _text(place / "0/.root/again/new")
        _whiteout(place / "1/.root/again")
        _text(place / "0/.root/opaque/new")
        (place / "1/.root/opaque").mkdir()
        os.setxattr(place / "1/.root/opaque", _OPAQUE, b"y")
        _text(place / "0/.root/file")
        _text(place / "1/.root/folder")
        _text(place / "0/.root/folder/new")
        with _both(store, place, 3) as (old, new):
            assert tree(old) == tree(new)
            assert {name for name in tree(new) if b"/" in name} == {
                b"again/new",
                b"opaque/new",
                b"folder/new",
            }
            assert b"gone" not in tree(new)
        # Nothing was copied to be hidden then.
        for name in ("gone", "file"):
            assert not (place / f"merged/.root/{name}").is_dir()

    apart(body)


def test_whiteouts_in_a_folder_that_the_base_lacks_are_not_listed(
    store: BtrfsStore, place: Path, apart: Apart
) -> None:
    def body() -> None:
        _text(place / "1/.root/new/a")
        _text(place / "1/.root/new/b")
        _whiteout(place / "0/.root/new/a")
        with _both(store, place, 2) as (old, new):
            assert os.listdir(f"{new}/new") == os.listdir(f"{old}/new") == ["b"]

    apart(body)


def test_whiteouts_that_are_attributes(store: BtrfsStore, place: Path, apart: Apart) -> None:
    def body() -> None:
        for name in ("a", "b"):
            _text(place / f"1/.root/folder/{name}")
        _text(place / "0/.root/folder/a", "")
        os.setxattr(place / "0/.root/folder/a", "trusted.overlay.whiteout", b"")
        os.setxattr(place / "0/.root/folder", _OPAQUE, b"x")
        os.setxattr(place / "0", _OPAQUE, b"x")  # as the kernel wants it: on the layer too
        with _both(store, place, 2) as (old, new):
            assert tree(old) == tree(new)
            assert os.listdir(f"{new}/folder") == ["b"]

    apart(body)


def test_private_attributes_are_left_out_and_the_guests_own_kept(place: Path, apart: Apart) -> None:
    def body() -> None:
        private = ("origin", "impure", "nlink", "upper", "uuid", "protattr")
        for path in (_text(place / "1/.root/x/file"), place / "1/.root/x"):
            for name in private:
                os.setxattr(path, f"trusted.overlay.{name}", b"y")
            os.setxattr(path, "trusted.overlay.overlay.opaque", b"y")
            os.setxattr(path, "user.overlay.opaque", b"y")
        (place / "m").mkdir()
        merge([f"{place}/1"], f"{place}/m")
        for path in (place / "m/.root/x", place / "m/.root/x/file"):
            assert sorted(os.listxattr(path)) == ["trusted.overlay.overlay.opaque", "user.overlay.opaque"]

    apart(body)


@pytest.mark.parametrize("name", ["redirect", "metacopy"])
def test_what_points_into_other_layers_is_refused(name: str, place: Path, apart: Apart) -> None:
    def body() -> None:
        path = _text(place / "1/.root/x/file")
        os.setxattr(path if name == "metacopy" else path.parent, f"trusted.overlay.{name}", b"/y")
        (place / "m").mkdir()
        before = os.listdir("/proc/self/fd")
        with pytest.raises(ValueError, match=name):
            merge([f"{place}/1"], f"{place}/m")
        assert os.listdir("/proc/self/fd") == before

    apart(body)


def test_links_stay_links(place: Path, apart: Apart) -> None:
    def body() -> None:
        one = _text(place / "1/.root/a/one")
        (place / "1/.root/b").mkdir()
        for name in ("a/two", "b/three", "b/hidden"):
            os.link(one, place / f"1/.root/{name}")
        os.symlink("one", place / "1/.root/a/pointer")
        os.link(place / "1/.root/a/pointer", place / "1/.root/b/pointer", follow_symlinks=False)
        other = _text(place / "0/.root/b/hidden", "other")
        os.link(other, place / "0/.root/b/also")
        for number in (0, 1):  # one of each layer, with names of the same number
            os.utime(place / f"{number}", (5, 5))
        (place / "m").mkdir()
        merge([f"{place}/0", f"{place}/1"], f"{place}/m")
        root = place / "m/.root"
        status = [os.lstat(root / name) for name in ("a/one", "a/two", "b/three")]
        assert {(s.st_ino, s.st_nlink) for s in status} == {(status[0].st_ino, 3)}
        assert os.lstat(root / "a/pointer").st_ino == os.lstat(root / "b/pointer").st_ino
        assert os.lstat(root / "b/hidden").st_ino == os.lstat(root / "b/also").st_ino
        assert (root / "b/hidden").read_text() == "other"
        assert os.listdir(place / "m") == [".root"] and os.stat(place / "m").st_mtime == 5

    apart(body)


def test_a_file_with_as_many_names_as_there_can_be(place: Path, apart: Apart) -> None:
    def body() -> None:
        one = _text(place / "1/.root/0")
        for number in range(1, 65_535):
            os.link(one, place / f"1/.root/{number}")
        with pytest.raises(OSError, match=os.strerror(errno.EMLINK)):
            os.link(one, place / "1/.root/one too many")
        (place / "m").mkdir()
        merge([f"{place}/1"], f"{place}/m")
        assert len(os.listdir(place / "m/.root")) == 65_535

    apart(body)


def test_links_that_a_guest_laid_are_not_followed(place: Path, apart: Apart) -> None:
    def body() -> None:
        outside = _text(place / "outside/secret", "secret")
        _text(place / "1/.root/folder/secret", "own")
        _text(place / "1/.root/file", "own")
        for name, target in (("folder", outside.parent), ("file", outside), ("loop", Path("loop"))):
            path = place / f"0/.root/{name}"
            path.parent.mkdir(parents=True, exist_ok=True)
            os.symlink(target, path)
        os.chown(place / "0/.root/file", 7, 8, follow_symlinks=False)
        os.utime(place / "0/.root/file", ns=(3, 4), follow_symlinks=False)
        before = os.stat(outside)
        (place / "m").mkdir()
        merge([f"{place}/0", f"{place}/1"], f"{place}/m")
        assert os.readlink(place / "m/.root/folder") == str(outside.parent)
        link = os.lstat(place / "m/.root/file")
        assert (link.st_uid, link.st_gid, link.st_atime_ns, link.st_mtime_ns) == (7, 8, 3, 4)
        assert os.stat(outside) == before and os.listdir(outside.parent) == ["secret"]

    apart(body)


def test_kinds_modes_and_capabilities(store: BtrfsStore, place: Path, apart: Apart) -> None:
    def body() -> None:
        root = place / "0/.root"
        setuid = _text(root / "setuid")
        os.chown(setuid, 7, 8)
        os.chmod(setuid, 0o6755)
        capability = struct.pack("<5I", 0x02000001, 1 << 13, 0, 0, 0)
        os.setxattr(setuid, "security.capability", capability)
        os.mkfifo(root / "fifo", 0o622)
        os.mknod(root / "socket", stat.S_IFSOCK | 0o722)
        os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        os.mknod(root / "disk", stat.S_IFBLK | 0o600, os.makedev(7, 99))
        os.setxattr(root / "fifo", "trusted.x", b"1")
        os.mkdir(root / "locked", 0o000)
        with _both(store, place, 1) as (old, new):
            assert tree(old) == tree(new)
            seen = tree(new)[b"setuid"]
            assert (seen.mode, seen.attributes["security.capability"]) == (0o6755, capability)

    apart(body)


def test_an_older_layers_files_inherit_nothing_from_a_newer_folder(
    store: BtrfsStore, place: Path, apart: Apart
) -> None:
    def body() -> None:
        _text(place / "1/.root/folder/old/older")
        (place / "0/.root/folder").mkdir(parents=True)
        os.chown(place / "0/.root/folder", 7, 8)
        os.chmod(place / "0/.root/folder", 0o2770)
        os.setxattr(place / "0/.root/folder", "system.posix_acl_default", ACL)
        os.utime(place / "0/.root/folder", ns=(3, 4))
        with _both(store, place, 2) as (old, new):
            assert tree(old) == tree(new)
            assert tree(new)[b"folder"].modified == 4
            assert tree(new)[b"folder/old"].attributes == {}

    apart(body)


def test_large_files_share_their_blocks_and_holes_stay_holes(place: Path, apart: Apart) -> None:
    def body() -> None:
        data = os.urandom(1 << 20)
        _text(place / "0/.root/large").write_bytes(data)
        for size in (10 << 20, 12_000):
            with open(place / f"0/.root/sparse{size}", "wb") as file:
                file.seek(8192)
                file.write(b"x")
                file.truncate(size)
        # Not to be cloned: FICLONE takes no two files of which one has checksums.
        odd = _text(place / "0/.root/odd", "")
        with open(odd, "wb") as file:
            fcntl.ioctl(file, 0x40086602, struct.pack("l", 0x40))  # FS_IOC_SETFLAGS: no dump
            file.write(data)
        (place / "m").mkdir()
        merge([f"{place}/0"], f"{place}/m")
        for name in os.listdir(place / "0/.root"):
            old, new = place / "0/.root" / name, place / "m/.root" / name
            assert old.read_bytes() == new.read_bytes(), name
            assert new.stat().st_blocks <= old.stat().st_blocks + 8, name
        os.sync()
        assert _is_shared(place / "m/.root/large") and not _is_shared(place / "m/.root/odd")

    apart(body)


def _is_shared(path: Path) -> bool:
    """Whether the file's first extent is shared with another's (FS_IOC_FIEMAP)."""
    with open(path, "rb") as file:
        answer = fcntl.ioctl(file, 0xC020660B, struct.pack("QQIIII56x", 0, 1 << 40, 0, 0, 1, 0))
    return bool(struct.unpack_from("I", answer, 32 + 40)[0] & 0x2000)


def test_folders_deeper_than_a_path_can_name_and_descriptors_can_count(place: Path, apart: Apart) -> None:
    depth, name = 3000, "deep"

    def dig(layer: str, content: str) -> None:
        os.mkdir(place / layer)
        fd = os.open(place / layer, os.O_RDONLY)
        for _ in range(depth):
            os.mkdir(name, dir_fd=fd)
            fd = _down(fd, name)
        os.close(os.open(content, os.O_CREAT | os.O_WRONLY, dir_fd=fd))
        os.close(fd)

    def body() -> None:
        dig("0", "new")
        dig("1", "old")
        (place / "m").mkdir()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 10, hard))
        try:
            merge([f"{place}/0", f"{place}/1"], f"{place}/m")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        fd = os.open(place / "m", os.O_RDONLY)
        for _ in range(depth):
            fd = _down(fd, name)
        assert sorted(os.listdir(fd)) == ["new", "old"]
        os.close(fd)

    apart(body)


def _down(fd: int, name: str) -> int:
    below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
    os.close(fd)
    return below


def test_many_files_take_little_time(place: Path, apart: Apart) -> None:
    def body() -> None:
        for number in range(3000):
            _text(place / f"{number % 30}/.root/{number % 7}/{number}")
        (place / "m").mkdir()
        start = time.monotonic()
        merge([f"{place}/{number}" for number in range(30)], f"{place}/m")
        assert time.monotonic() - start < 3  # 0.15 s where it was written
        assert sum(len(files) for _, _, files in os.walk(place / "m")) == 3000

    apart(body)
