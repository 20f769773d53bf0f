"""What layers become: files as they were, whiteouts, and stacks of layers against a plain model."""

from __future__ import annotations

import os
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.images.making import entry, folder, hard_link, layer, link

Unpack = Callable[..., Path]


def listing(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_files_come_as_they_were(unpack: Unpack, format: int) -> None:
    root = unpack(
        layer(
            folder("./", mode=0o755),
            folder("etc/", mode=0o2750, uid=7, gid=8, mtime=1_111_111_111),
            entry("etc/a", content=b"a" * 5000, mode=0o4755, uid=1000, gid=1001),
            hard_link("b", "etc/a"),
            link("c", "/etc/a"),
            entry("pipe", tarfile.FIFOTYPE, mode=0o600),
            entry("dev/null", tarfile.CHRTYPE, devmajor=1, devminor=3),
            entry("dev/disk", tarfile.BLKTYPE, devmajor=8, devminor=0),
            entry("empty"),
            format=format,
        )
    )
    assert listing(root) == ["b", "c", "dev", "empty", "etc", "etc/a", "pipe"]
    status, above = (root / "b").stat(), (root / "etc").stat()
    assert (root / "b").read_bytes() == b"a" * 5000 and status.st_ino == (root / "etc/a").stat().st_ino
    assert stat.S_IMODE(status.st_mode) == 0o4755 and stat.S_IMODE(above.st_mode) == 0o2750
    assert above.st_mtime == 1_111_111_111 and status.st_mtime == 1_000_000_000
    assert os.readlink(root / "c") == "/etc/a" and stat.S_ISFIFO((root / "pipe").lstat().st_mode)
    if os.geteuid() == 0:
        assert (status.st_uid, status.st_gid, above.st_uid, above.st_gid) == (1000, 1001, 7, 8)


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_large_numbers(unpack: Unpack, format: int) -> None:
    deep = "/".join(["d" * 200] * 10)
    root = unpack(
        layer(
            entry(f"{deep}/é{'f' * 100}", content=b"deep", uid=2**31, gid=2**30, mtime=2**33 + 5),
            link("long", "t" * 3000),
            hard_link("hard", f"{deep}/é{'f' * 100}"),
            format=format,
        )
    )
    status = (root / "hard").stat()
    assert (root / deep / f"é{'f' * 100}").read_bytes() == b"deep"
    assert os.readlink(root / "long") == "t" * 3000
    assert status.st_mtime == 2**33 + 5 and status.st_nlink == 2
    if os.geteuid() == 0:
        assert (status.st_uid, status.st_gid) == (2**31, 2**30)


def test_times_before_1970_and_parts_of_seconds(unpack: Unpack) -> None:
    root = unpack(layer(entry("old", mtime=-1.5), entry("new", mtime=1.25)))
    assert (root / "old").stat().st_mtime_ns == -1_500_000_000
    assert (root / "new").stat().st_mtime_ns == 1_250_000_000


def test_attributes(unpack: Unpack) -> None:
    capability = b"\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00" + bytes(8)
    info, content = entry("ping", content=b"x")
    info.pax_headers = {
        "SCHILY.xattr.security.capability": capability.decode(errors="surrogateescape"),
        "SCHILY.xattr.user.note": "a=b\nc",
        "SCHILY.xattr.trusted.overlay.redirect": "/etc",
        "SCHILY.xattr.user.overlay.whiteout": "y",
        "SCHILY.xattr.security.selinux": "system_u",
    }
    path = unpack(layer((info, content))) / "ping"
    assert os.getxattr(path, "user.note") == b"a=b\nc"
    names = {"user.note"} | ({"security.capability"} if os.geteuid() == 0 else set())
    assert names <= set(os.listxattr(path)) <= names | {"security.selinux"}
    if os.geteuid() == 0:
        assert os.getxattr(path, "security.capability") == capability


@pytest.mark.parametrize("format", ["gnu", "posix --sparse-version=0.1", "posix --sparse-version=1.0"])
@pytest.mark.parametrize("pieces", [3, 40])
def test_sparse_files(unpack: Unpack, tmp_path: Path, format: str, pieces: int) -> None:
    """As GNU tar writes them."""
    with open(tmp_path / "holes", "wb") as file:
        for number in range(pieces):
            file.seek((number + 1) << 20)
            file.write(b"%d" % number)
        file.truncate((pieces + 9) << 20)
    command = [
        "tar",
        "--sparse",
        f"--format={format.split(maxsplit=1)[0]}",
        *format.split()[1:],
        "-cf",
        "-",
        "holes",
    ]
    tar = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True).stdout
    assert len(tar) < 1 << 20
    path = unpack(tar + b"") / "holes"
    assert path.read_bytes() == (tmp_path / "holes").read_bytes()
    assert path.stat().st_blocks * 512 < 1 << 20


def test_the_last_of_a_name_counts(unpack: Unpack) -> None:
    root = unpack(
        layer(
            entry("a", content=b"1"),
            hard_link("b", "a"),
            entry("a", content=b"2"),
            folder("d"),
            entry("d/x"),
            entry("d", content=b"file"),
            link("l", "a"),
            folder("l"),
            entry("l/y"),
            folder("same"),
            entry("same/z"),
            folder("same", mode=0o700),
        )
    )
    assert (root / "a").read_bytes() == b"2" and (root / "b").read_bytes() == b"1"
    assert (root / "d").read_bytes() == b"file"
    assert listing(root) == ["a", "b", "d", "l", "l/y", "same", "same/z"]
    assert stat.S_IMODE((root / "same").stat().st_mode) == 0o700


def test_whiteouts(unpack: Unpack) -> None:
    lower = layer(
        *(
            entry(f"{name}/{file}", content=b"low")
            for name in ("gone", "opaque", "kept", "again")
            for file in "ab"
        ),
        link("link", "kept"),
        entry("opaque/deep/c"),
        entry("opaque/deep/d"),
    )
    upper = layer(
        entry("again/new", content=b"up"),
        entry("again/b", content=b"up"),
        entry(".wh.again"),  # of what lies below, though it comes after what is new
        entry(".wh.gone"),
        entry(".wh.link"),
        entry("opaque/deep/d", content=b"up"),
        entry("opaque/.wh..wh..opq"),
        entry("opaque/new"),
        entry("kept/.wh.a"),
        entry("kept/.wh.never"),
        entry("kept/.wh..wh.plnk/1.2"),
    )
    root = unpack(lower, upper)
    assert listing(root) == [
        *("again", "again/b", "again/new", "kept", "kept/b"),
        *("opaque", "opaque/deep", "opaque/deep/d", "opaque/new"),
    ]
    assert (root / "again/b").read_bytes() == (root / "opaque/deep/d").read_bytes() == b"up"


def test_hard_links_across_layers(unpack: Unpack) -> None:
    root = unpack(
        layer(entry("a", content=b"1"), hard_link("b", "a")),
        layer(hard_link("c", "a"), hard_link("c", "c"), entry("a", content=b"2")),
    )
    assert [(root / name).read_bytes() for name in "abc"] == [b"2", b"1", b"1"]
    assert (root / "b").stat().st_nlink == 2


def test_links_are_read_as_in_the_sandbox(unpack: Unpack) -> None:
    """As with a merged /usr, which one layer makes and the next writes through."""
    root = unpack(
        layer(folder("usr/bin"), link("bin", "usr/bin"), link("abs", "/usr"), link("up", "usr/../usr/./bin")),
        layer(entry("bin/x"), entry("abs/bin/y"), entry("up/z"), link("abs/to", "/fresh"), entry("abs/to/w")),
    )
    assert sorted(os.listdir(root / "usr/bin")) == ["x", "y", "z"]
    assert os.listdir(root / "fresh") == ["w"]


def test_a_link_that_is_replaced_on_the_way(unpack: Unpack) -> None:
    root = unpack(layer(link("d/l", "."), folder("d/l/l"), entry("d/l/l/f")))
    assert listing(root) == ["d", "d/l", "d/l/l", "d/l/l/f"]


# ---- stacks against a model --------------------------------------------------------------------------------------

_NAMES = st.sampled_from(["a", "b", "a/a", "a/b", "b/a", "a/a/a", "a/a/b"])
_FILE = st.tuples(_NAMES, st.sampled_from(["file", "folder", "whiteout", "opaque"]), st.integers(0, 255))
_LAYERS = st.lists(st.dictionaries(_NAMES, _FILE.map(lambda f: f[1:]), max_size=6), min_size=1, max_size=4)


def model(layers: list[dict[str, tuple[str, int]]]) -> dict[str, bytes | None]:
    """Paths to contents, None for a folder: overlayfs's own rule, one layer merged over what lies below."""
    below: dict[str, bytes | None] = {}
    for files in layers:
        own: dict[str, bytes | None] = {}
        hidden, opaque = set(), set()
        for path, (kind, number) in files.items():
            if kind == "whiteout":
                hidden.add(path)
                above = path
            else:
                own[path] = b"%d" % number if kind == "file" else None
                above = path
                if kind == "opaque":
                    opaque.add(path)
            while above := above.rpartition("/")[0]:
                own.setdefault(above, None)
        merged = dict(own)
        for path, content in below.items():
            ways = [path[:i] for i, c in enumerate(path) if c == "/"]
            covered = any(way in hidden or way in opaque or own.get(way) is not None for way in ways)
            if not covered and path not in hidden and path not in own:
                merged[path] = content
        # What a file covers, or what lies in nothing, is not there.
        below = {
            p: c
            for p, c in merged.items()
            if all(merged.get(p[:i], b"") is None for i, x in enumerate(p) if x == "/")
        }
    return below


def consistent(files: dict[str, tuple[str, int]]) -> bool:
    """No file of a layer lies in a file, or in what the layer itself says is a file."""
    kinds = {path: kind for path, (kind, _) in files.items()}
    return all(
        kinds.get(path[:i], "folder") in ("folder", "opaque")
        for path in files
        for i, c in enumerate(path)
        if c == "/"
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layers=_LAYERS, backwards=st.booleans())
def test_any_stack_is_what_an_overlay_would_show(
    unpack: Unpack, layers: list[dict[str, tuple[str, int]]], backwards: bool
) -> None:
    layers = [files for files in layers if consistent(files)]
    if not layers:
        return
    tars = []
    for files in layers:
        members = []
        for path, (kind, number) in sorted(files.items()):
            above, _, name = path.rpartition("/")
            place = f"{above}/" if above else ""
            if kind == "file":
                # A folder of a lower layer in its place has to go first, as for tools that write such layers.
                members.append(entry(path, content=b"%d" % number))
            elif kind == "whiteout":
                members.append(entry(f"{place}.wh.{name}"))
            else:
                members.append(folder(path))
                if kind == "opaque":
                    members.append(entry(f"{path}/.wh..wh..opq"))
        tars.append(layer(*(reversed(members) if backwards else members)))
    root = unpack(*tars)
    found = {name: (root / name).read_bytes() if (root / name).is_file() else None for name in listing(root)}
    assert found == model(layers)
