"""The proof after each test that its evals left nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from sandbox_gym.backends import lookup


def _holdings() -> list[str]:
    return sorted(str(row["id"]) for row in lookup.get("native").list())


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = _holdings()
    yield
    deadline = time.monotonic() + 3.0
    while (after := _holdings()) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert after == before
