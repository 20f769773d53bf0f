"""What tests of the native backend's parts share: a mount namespace of their own, and a disk in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from sandbox_gym.backends.native.disk import BtrfsStore
from sandbox_gym.guest import syscalls

_T = TypeVar("_T")
Apart = Callable[[Callable[[], _T]], _T]


@pytest.fixture(scope="module")
def _thread() -> Iterator[Executor]:
    """One thread in a mount namespace of its own: when it ends, so does all that was mounted there."""
    if os.geteuid() != 0:
        pytest.skip("the disk on btrfs is for root")

    def enter() -> None:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(enter).result(10)
        yield thread


@pytest.fixture(scope="module")
def apart(_thread: Executor) -> Callable[[Callable[[], _T]], _T]:
    """`apart(function)`: what it returns, called in that thread."""

    def call(function: Callable[[], _T]) -> _T:
        return _thread.submit(function).result(100)

    return call


@pytest.fixture(scope="module")
def store(_thread: Executor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BtrfsStore]:
    """A disk that only `apart` sees."""
    made = _thread.submit(lambda: BtrfsStore(tmp_path_factory.mktemp("disk"))).result(60)
    yield made
    os.close(made._root)


@pytest.fixture
def place(store: BtrfsStore, apart: Apart[Path]) -> Path:
    """A fresh folder on that disk."""

    def make() -> Path:
        place = Path(store._folder) / f"place-{os.urandom(4).hex()}"
        place.mkdir()
        return place

    return apart(make)
