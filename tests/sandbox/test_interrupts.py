"""Ctrl-C on the host, in the middle of a call."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from sandbox_gym.sandbox import Sandbox


@pytest.fixture
def interrupted() -> Iterator[None]:
    """SIGINT for this thread in a moment: by then the call under test waits, of which nothing else could tell."""
    timer = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    yield
    timer.join()


def test_a_cell_is_interrupted_and_its_state_kept(box: Sandbox, interrupted: None) -> None:
    with pytest.raises(KeyboardInterrupt):
        box.run_code("import time; x = 2; time.sleep(60)", timeout=100)
    assert box.run_code("x", timeout=5).value == "2"


def test_after_another_call_the_next_waits_for_its_end(box: Sandbox, interrupted: None) -> None:
    with pytest.raises(KeyboardInterrupt):
        box.shell("sleep 1.5; echo done > f", timeout=20)
    assert box.shell("cat f", timeout=5).stdout == "done\n"
    assert box.run_code("1 + 1").value == "2"
