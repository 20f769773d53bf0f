"""A store of images for each test, and a way to look at what was unpacked."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox_gym import Image
from tests.images.making import layout

Unpack = Callable[..., Path]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where images of this test lie."""
    home = tmp_path / "home"
    monkeypatch.setenv("SANDBOX_GYM_HOME", str(home))
    return home


@pytest.fixture
def unpack(tmp_path: Path) -> Unpack:
    """`unpack(layer, ...)`: the root file system of an image with these layers."""
    numbers = iter(range(1000))

    def call(*layers: bytes) -> Path:
        rootfs = Image.from_oci_archive(layout(tmp_path / f"layout-{next(numbers)}", layers)).rootfs
        assert rootfs is not None
        return Path(rootfs)

    return call


@pytest.fixture(autouse=True)
def no_descriptors_left() -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert len(os.listdir("/proc/self/fd")) == before
