"""A log for each test, and nothing of it left behind."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_gym import _audit
from sandbox_gym._audit import set_audit
from sandbox_gym._spares import forget
from tests.network.conftest import web
from tests.sandbox.conftest import _pristine, box, boxes, client, no_leaks, pristine, run_folder

__all__ = ["_pristine", "box", "boxes", "client", "no_leaks", "pristine", "run_folder", "web"]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """This process records there."""
    path = tmp_path / "audit.db"
    set_audit(path)
    yield path
    set_audit(None)
    assert _audit.VARIABLE not in os.environ
    assert "audit" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture(scope="package", autouse=True)
def no_warm_guests_before() -> None:
    """That other tests have left, and that would end while one here counts snapshots."""
    forget()
