"""The page in a thread of this process, over this process's sandboxes and a log of each test's own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from sandbox_gym import ui
from tests.audit.conftest import log
from tests.network.conftest import web
from tests.pages import Site
from tests.sandbox.conftest import _pristine, box, client, no_leaks, pristine, run_folder

__all__ = ["_pristine", "box", "client", "log", "no_leaks", "pristine", "run_folder", "web"]


@pytest.fixture
def showing() -> Callable[..., AbstractContextManager[Site]]:
    """`with showing(path, control=...) as site`: the page, until the block ends."""

    @contextmanager
    def show(path: Path | None, **how: Any) -> Iterator[Site]:
        ready: queue.Queue[str] = queue.Queue()
        until = threading.Event()
        arguments = {"on_ready": ready.put, "until": until, **how}
        thread = threading.Thread(target=ui.serve, args=(path and str(path),), kwargs=arguments)
        thread.start()
        try:
            yield Site(ready.get(timeout=20))
        finally:
            until.set()
            thread.join(20)
            assert not thread.is_alive()

    return show
