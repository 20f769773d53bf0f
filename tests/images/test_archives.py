"""What docker, podman and skopeo write, in every shape; damaged, and for other machines."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import zstandard

from sandbox_gym import Image, ImageError
from tests.images.making import (
    CONFIG,
    Compress,
    config,
    docker_save,
    entry,
    folder,
    layer,
    layout,
    sha256,
    tarred,
)

LOWER = layer(folder("etc"), entry("etc/motd", content=b"low"), entry("etc/old"))
UPPER = layer(entry("etc/motd", content=b"up"), entry("etc/.wh.old"))
COMPRESS: list[Compress] = [bytes, gzip.compress, zstandard.compress]


def zstd_chunked(block: bytes) -> bytes:
    """As containers/storage writes it: several frames, and some that say nothing."""
    compressor, nothing = (
        zstandard.ZstdCompressor(),
        b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"note",
    )
    return nothing + b"".join(
        compressor.compress(block[i : i + 700]) + nothing for i in range(0, len(block), 700)
    )


def look(image: Image) -> tuple[str, list[str]]:
    assert image.rootfs is not None
    return (Path(image.rootfs) / "etc/motd").read_text(), os.listdir(Path(image.rootfs) / "etc")


@pytest.mark.parametrize("outer", [None, *COMPRESS])
@pytest.mark.parametrize("inner", [*COMPRESS, zstd_chunked])
def test_layouts(tmp_path: Path, inner: Compress, outer: Compress | None) -> None:
    place = layout(
        tmp_path / "layout", [LOWER, UPPER], compress=inner, Env=["A=1", "B=x=y"], WorkingDir="/srv/app"
    )
    if outer is not None:
        place = tarred(tmp_path / "layout.tar", place, outer)
    image = Image.from_oci_archive(place)
    assert look(image) == ("up", ["motd"])
    assert image.env == {"A": "1", "B": "x=y"} and image.workdir == "/srv/app"


@pytest.mark.parametrize("outer", COMPRESS)
@pytest.mark.parametrize("inner", [bytes, gzip.compress])
def test_docker_save(tmp_path: Path, inner: Compress, outer: Compress) -> None:
    again = layer(entry("etc/motd", content=b"low"))  # the same layer twice is saved once, with a link
    layers = [LOWER, again, UPPER, again]
    image = Image.from_oci_archive(docker_save(tmp_path / "x.tar", layers, compress=outer))
    assert look(image) == ("low", ["motd"])
    assert image.env == {} and image.workdir is None
    assert image.digest == sha256(json.dumps(config(layers)).encode())


def test_the_same_by_another_way_is_there_already(tmp_path: Path) -> None:
    first = Image.from_oci_archive(layout(tmp_path / "one", [LOWER, UPPER]))
    assert first.rootfs is not None
    (Path(first.rootfs) / "mark").touch()
    again = Image.from_oci_archive(docker_save(tmp_path / "x.tar", [LOWER, UPPER]))
    assert again == first and (Path(first.rootfs) / "mark").exists()
    assert Image.list() == [first] and hash(first) == hash(again)


def changed(place: Path, change: Any) -> Path:
    """A layout whose index is another."""
    index = json.loads((place / "index.json").read_text())
    change(index)
    (place / "index.json").write_text(json.dumps(index))
    return place


def add(place: Path, content: dict[str, Any]) -> dict[str, Any]:
    """A blob more; what names it."""
    block = json.dumps(content).encode()
    (place / "blobs/sha256" / sha256(block)).write_bytes(block)
    return {"digest": f"sha256:{sha256(block)}", "size": len(block)}


def test_the_one_for_this_machine_is_taken(tmp_path: Path) -> None:
    place = layout(tmp_path / "layout", [LOWER])
    ours = json.loads((place / "index.json").read_text())["manifests"][0]
    platform = {"os": "linux", "architecture": CONFIG["architecture"]}
    nested = {
        "manifests": [
            {**add(place, {}), "platform": {"os": "linux", "architecture": "sparc"}},
            {**add(place, {"config": {}}), "platform": {"os": "unknown", "architecture": "unknown"}},
            {**ours, "platform": platform},
            {**ours, "platform": platform},  # by two names
        ]
    }
    outer = add(place, nested)
    assert (
        look(Image.from_oci_archive(changed(place, lambda index: index.update(manifests=[outer]))))[0]
        == "low"
    )
    none = add(place, {"manifests": nested["manifests"][:2]})
    with pytest.raises(ImageError, match="no image for linux/"):
        Image.from_oci_archive(changed(place, lambda index: index.update(manifests=[none])))


def test_another_machines_image_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIG, "architecture", "sparc")
    with pytest.raises(ImageError, match="it is for linux/sparc, and this machine is linux/"):
        Image.from_oci_archive(layout(tmp_path / "layout", [LOWER]))


def test_several_images_are_refused(tmp_path: Path) -> None:
    place, other = layout(tmp_path / "one", [LOWER]), layout(tmp_path / "two", [UPPER])
    for blob in (other / "blobs/sha256").iterdir():
        blob.rename(place / "blobs/sha256" / blob.name)
    more = json.loads((other / "index.json").read_text())["manifests"]
    with pytest.raises(ImageError, match="2 images"):
        Image.from_oci_archive(changed(place, lambda index: index["manifests"].extend(more)))


# ---- damage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("how", ["changed", "cut", "missing"])
def test_a_damaged_blob_is_refused(tmp_path: Path, home: Path, which: int, how: str) -> None:
    """Manifest, configuration or a layer: whichever it is, nothing is kept."""
    place = layout(tmp_path / "layout", [LOWER, UPPER])
    blob = sorted((place / "blobs/sha256").iterdir())[which]
    block = bytearray(blob.read_bytes())
    block[len(block) // 2] ^= 1
    blob.unlink()
    if how != "missing":
        blob.write_bytes(block if how == "changed" else block[:-1])
    with pytest.raises(ImageError, match="hash that names it" if how != "missing" else "missing"):
        Image.from_oci_archive(place)
    assert not (home / "images").exists() or os.listdir(home / "images") == []


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("compress", COMPRESS)
def test_an_archive_that_was_cut_off_is_refused(
    tmp_path: Path, home: Path, part: float, compress: Compress
) -> None:
    whole = docker_save(
        tmp_path / "x.tar", [LOWER, layer(entry("big", content=os.urandom(100_000)))], compress=compress
    )
    block = whole.read_bytes()
    whole.write_bytes(block[: int(len(block) * part)])
    with pytest.raises(ImageError):
        Image.from_oci_archive(whole)
    assert Image.list() == []


def test_docker_saves_layers_are_held_to_the_configuration(tmp_path: Path) -> None:
    block = docker_save(tmp_path / "x.tar", [LOWER, UPPER]).read_bytes()
    (tmp_path / "y.tar").write_bytes(block.replace(b"up" + bytes(510), b"UP" + bytes(510)))
    with pytest.raises(ImageError, match=r"layer 2 of 2.*configuration"):
        Image.from_oci_archive(tmp_path / "y.tar")


@pytest.mark.parametrize(
    ("inner", "said"),
    [
        ({"Env": ["A"]}, "Env"),
        ({"Env": "A=1"}, "Env"),
        ({"Env": ["A=\0"]}, "null"),
        ({"WorkingDir": "srv"}, "WorkingDir"),
        ({"WorkingDir": 1}, "WorkingDir"),
    ],
)
def test_a_configuration_that_is_none(tmp_path: Path, inner: dict[str, Any], said: str) -> None:
    with pytest.raises(ImageError, match=said):
        Image.from_oci_archive(layout(tmp_path / "layout", [LOWER], **inner))


INDEXES: list[Any] = [
    *([], {}, {"manifests": None}, {"manifests": [1]}, {"manifests": []}, {"manifests": [{}]}),
    {"manifests": [{"digest": "md5:1"}]},
    {"manifests": [{"digest": "sha256:../../x"}]},
    {"manifests": [{"digest": 1}]},
    {"manifests": [{"digest": f"sha256:{'0' * 64}"}] * 1000},
]


@pytest.mark.parametrize("index", INDEXES)
def test_an_index_that_is_none(tmp_path: Path, index: Any) -> None:
    place = layout(tmp_path / "layout", [LOWER])
    (place / "index.json").write_text(json.dumps(index))
    with pytest.raises(ImageError):
        Image.from_oci_archive(place)


def test_an_index_of_itself_ends(tmp_path: Path) -> None:
    place = layout(tmp_path / "layout", [LOWER])
    inner = add(place, json.loads((place / "index.json").read_text()))
    for _ in range(8):
        inner = add(place, {"manifests": [inner]})
    with pytest.raises(ImageError, match="indexes"):
        Image.from_oci_archive(changed(place, lambda index: index.update(manifests=[inner])))


@pytest.mark.parametrize(
    "names", [["../../etc/passwd"], ["/etc/passwd"], [1], ["a\0"], ["\ud800"], ["nowhere"], "x"]
)
def test_docker_save_with_names_that_are_none(tmp_path: Path, names: Any) -> None:
    block = json.dumps(config([LOWER])).encode()
    listing = json.dumps([{"Config": "c.json", "Layers": names}]).encode()
    (tmp_path / "x.tar").write_bytes(
        layer(entry("c.json", content=block), entry("manifest.json", content=listing))
    )
    with pytest.raises(ImageError):
        Image.from_oci_archive(tmp_path / "x.tar")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/c.json").write_bytes(block)
    (tmp_path / "folder/manifest.json").write_bytes(listing)
    with pytest.raises(ImageError):
        Image.from_oci_archive(tmp_path / "folder")


@pytest.mark.parametrize("part", ["config", "rootfs", "os"])
@pytest.mark.parametrize("value", [None, 1, "x", ["x"], {"diff_ids": "x"}, {"diff_ids": [1]}])
def test_a_configuration_of_other_kinds(tmp_path: Path, part: str, value: Any) -> None:
    block = json.dumps({**config([LOWER]), part: value}).encode()
    listing = json.dumps([{"Config": "c.json", "Layers": ["l"]}]).encode()
    members = ("c.json", block), ("l", LOWER), ("manifest.json", listing)
    (tmp_path / "x.tar").write_bytes(layer(*(entry(name, content=content) for name, content in members)))
    if part == "config" and not isinstance(value, (int, str, list)):
        assert Image.from_oci_archive(tmp_path / "x.tar").env == {}
        return
    with pytest.raises(ImageError):
        Image.from_oci_archive(tmp_path / "x.tar")


def test_what_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello" * 1000)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/oci-layout").mkdir()
    (tmp_path / "tar").write_bytes(LOWER)
    for name in ("text", "folder", "tar"):
        with pytest.raises(ImageError):
            Image.from_oci_archive(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        Image.from_oci_archive(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="folder"):
        Image.of(tmp_path / "nowhere")
