"""Sandboxes that end with their test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sandbox_gym.sandbox import Sandbox


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with Sandbox.create() as sandbox:
        yield sandbox
