"""Archives that mean harm: refused, with nothing written outside of their root and nothing kept."""

from __future__ import annotations

import io
import os
import random
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox_gym import Image, ImageError
from sandbox_gym.images.tar import Damaged, Reader
from tests.images.making import entry, folder, hard_link, layer, layout, link

Unpack = Callable[..., Path]
Member = tuple[tarfile.TarInfo, bytes]


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file beside the store, as far up from an image's root as `UP` goes."""
    (tmp_path / "victim").write_text("untouched")
    return tmp_path / "victim"


def sparse(records: dict[str, str]) -> Member:
    headers = {f"GNU.sparse.{key}": value for key, value in records.items()}
    return entry("a", content=b"x", pax_headers=headers)


UP = "../../../.."
LONG = "/".join(["d" * 200] * 19)
HOSTILE: dict[str, list[Member]] = {
    "dots": [entry(f"{UP}/victim", content=b"x")],
    "dots inside": [folder("a"), entry(f"a/../{UP}/victim", content=b"x")],
    "dots alone": [folder("..")],
    "absolute": [entry("/victim", content=b"x")],
    "null": [entry("a", pax_headers={"path": "a\0b"})],
    "null in a link": [entry("l", tarfile.SYMTYPE, pax_headers={"linkpath": "a\0b"})],
    "null in an attribute": [entry("a", pax_headers={"SCHILY.xattr.user.a\0b": "1"})],
    "a link to nothing": [entry("l", tarfile.SYMTYPE)],
    "link up": [link("l", UP), entry("l/victim", content=b"x")],
    "link up in a folder": [link("a/l", f"../{UP}"), entry("a/l/victim", content=b"x")],
    "link by a link": [link("a", "."), link("a/b", f"a/a/{UP}"), entry("b/victim", content=b"x")],
    "whiteout up": [link("l", UP), entry("l/.wh.victim")],
    "opaque up": [link("l", UP), entry("l/.wh..wh..opq")],
    "whiteout of dots": [folder("a"), entry("a/.wh...")],
    "whiteout of itself": [folder("a"), entry("a/.wh..")],
    "whiteout of nothing": [folder("a"), entry("a/.wh.")],
    "whiteout by dots": [entry(f"{UP}/.wh.victim")],
    "hard link up": [hard_link("a", f"{UP}/victim")],
    "hard link absolute": [hard_link("a", "/etc/passwd")],
    "hard link by a link": [link("l", UP), hard_link("a", "l/victim")],
    "hard link to nothing": [hard_link("a", "b")],
    "hard link to a folder": [folder("b"), hard_link("a", "b")],
    "loop": [link("a", "b"), link("b", "a"), entry("a/c")],
    "many links": [*(link(f"l{n}", f"l{n + 1}") for n in range(50)), folder("l50"), entry("l0/a")],
    "a file in a file": [entry("a"), entry("a/b")],
    "a root that is a file": [entry(".")],
    "a root that is a link": [link("./", "/etc")],
    "a long path": [entry("/".join(["d" * 200] * 30))],
    "a long name": [entry("n" * 300)],
    "a long path by links": [folder(LONG), link("l", LONG), entry("l/" + "e/" * 200)],
    "a huge header": [entry("a", pax_headers={"comment": "x" * (2 << 20)})],
    "no owner": [entry("a", uid=2**32 - 1)],
    "an owner below zero": [entry("a", pax_headers={"uid": "-1"})],
    "a time that is none": [entry("a", pax_headers={"mtime": "1e999999999"})],
    "a size that is none": [entry("a", pax_headers={"size": "9" * 30})],
    "an unknown type": [entry("a", b"Z")],
    "a sparse map too long": [sparse({"map": "0,1,9,9", "size": "99"})],
    "a sparse map below": [sparse({"map": "5,1", "size": "3"})],
    "a sparse map of nothing": [sparse({"major": "1", "minor": "0"})],
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_refused(name: str, unpack: Unpack, victim: Path, home: Path) -> None:
    before = set(os.listdir(victim.parent))
    with pytest.raises(ImageError):
        unpack(layer(entry("first", content=b"1"), *HOSTILE[name]))
    assert victim.read_text() == "untouched"
    assert set(os.listdir(victim.parent)) - before == {"layout-0", "home"}
    assert os.listdir(home / "images") == []
    assert Image.list() == []


def test_links_out_are_kept_as_links(unpack: Unpack) -> None:
    """A link may lead anywhere, as long as nothing is written through it."""
    root = unpack(layer(link("l", f"{UP}/victim"), link("to", "/etc"), entry("to/passwd", content=b"x")))
    assert os.readlink(root / "l") == f"{UP}/victim" and os.readlink(root / "to") == "/etc"
    assert (root / "etc/passwd").read_bytes() == b"x"


def test_an_absolute_link_stays_in_the_image(unpack: Unpack, victim: Path) -> None:
    root = unpack(layer(link("l", str(victim.parent)), entry("l/victim", content=b"x")))
    assert victim.read_text() == "untouched"
    assert (root / str(victim).lstrip("/")).read_text() == "x"


def test_what_lies_deep_can_be_removed_again(unpack: Unpack, home: Path) -> None:
    """Without a stack of calls or of descriptors as deep as the folders."""
    deep = "/".join(["d"] * 1100)
    image = unpack(layer(folder(deep), folder("closed", mode=0)))
    assert image.exists()
    with pytest.raises(ImageError):
        unpack(layer(folder(deep), folder("closed", mode=0), entry("..")))
    (kept,) = Image.list()
    kept.delete()
    assert os.listdir(home / "images") == []
    assert os.listdir(unpack(layer(folder(deep)), layer(entry(".wh.d")))) == []


def test_a_bomb_stops_in_time(tmp_path: Path, home: Path) -> None:
    bomb = layout(tmp_path / "bomb", [layer(entry("zeros", content=bytes(64 << 20)))])
    with pytest.raises(TimeoutError):
        Image.from_oci_archive(bomb, timeout=0.01)
    assert not (home / "images").exists() or os.listdir(home / "images") == []


def sized(size: bytes) -> bytes:
    """A header that claims a size."""
    info = tarfile.TarInfo("a")
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    block[124:136] = size
    block[148:156] = b"%06o\0 " % (256 + sum(block[:148]) + sum(block[156:512]))
    return bytes(block)


@pytest.mark.parametrize(
    "size", [b"77777777777\0", struct.pack(">BxxxQ", 0x80, 2**63), b"\xff" * 12, b"junk" * 3]
)
def test_a_size_without_bytes(unpack: Unpack, size: bytes, home: Path) -> None:
    with pytest.raises(ImageError):
        unpack(sized(size))
    assert os.listdir(home / "images") == []


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), cut=st.booleans())
def test_noise_is_refused_or_read(seed: int, cut: bool) -> None:
    """Whatever bytes change: the reader ends, with entries or with its one kind of error."""
    chance = random.Random(seed)
    block = bytearray(
        layer(
            entry("a", content=b"x" * 700),
            entry("é" * 60, pax_headers={"SCHILY.xattr.user.x": "1", "mtime": "1.5"}),
            entry("s", content=b"x" * 512, pax_headers={"GNU.sparse.map": "0,512", "GNU.sparse.size": "600"}),
            format=chance.choice([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
        )
    )
    for _ in range(chance.randint(1, 4)):
        block[chance.randrange(len(block))] = chance.choice(
            [0, 0x20, 0x31, 0x37, 0x80, 0xFF, chance.randrange(256)]
        )
    if chance.random() < 0.7:  # with checksums that are right, else little is read at all
        for start in range(0, len(block) - 511, 512):
            if block[start + 257 : start + 262] == b"ustar":
                total = 256 + sum(block[start : start + 148]) + sum(block[start + 156 : start + 512])
                block[start + 148 : start + 156] = b"%06o\0 " % total
    source = io.BytesIO(bytes(block[: chance.randrange(len(block))] if cut else block))
    reader = Reader(source.read)
    try:
        for found in reader:
            assert sum(len(piece) for _, length in found.pieces for piece in reader.data(length)) <= len(
                block
            )
    except Damaged:
        pass


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    members=st.lists(
        st.tuples(
            st.sampled_from(
                ["a", "a/b", "b", "b/a", "a/../b", "..", "../victim", "/victim", "a/b/../../../victim"]
            ),
            st.sampled_from([tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE]),
            st.sampled_from([".", "a", "b", "..", f"{UP}", f"{UP}/victim", "/", "/victim", "a/.."]),
        ),
        max_size=8,
    )
)
def test_nothing_is_ever_written_outside(
    members: list[tuple[str, bytes, str]], unpack: Unpack, victim: Path, home: Path
) -> None:
    tar = layer(
        *(
            entry(name, kind, b"x" if kind == tarfile.REGTYPE else b"", linkname=target)
            for name, kind, target in members
        )
    )
    try:
        unpack(tar)
    except ImageError:
        pass
    assert victim.read_text() == "untouched" and victim.stat().st_nlink == 1
    assert {name for name in os.listdir(victim.parent) if not name.startswith("layout")} == {"victim", "home"}
    assert os.listdir(home) == ["images"]
    assert all(
        os.listdir(home / "images" / name) in ([".root", "image.json"], ["image.json", ".root"])
        for name in os.listdir(home / "images")
    )
