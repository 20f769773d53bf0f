"""Guests that hold one thing each, for both engines' tests: what takes it, and how to see that it goes on."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from sandbox_gym.backends.native import criu
from sandbox_gym.sandbox import Sandbox

PRELUDE = """
import ctypes, fcntl, mmap, os, select, signal, socket, struct, subprocess, sys, threading, time
C = ctypes.CDLL(None, use_errno=True)

def until(condition):
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)
    return True

def child(function, *arguments):
    '''Forks one that calls it, says so, and stays. Its number.'''
    ready, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            function(*arguments)
            os.write(go, b"1")
            os.close(go); os.close(ready)
            time.sleep(600)
        finally:
            os._exit(1)
    os.close(go)
    assert os.read(ready, 1), "the child failed"
    os.close(ready)
    return pid

def thread(function):
    '''Starts one that calls it, says so, waits for `e`, and calls it again: with False, then with True.'''
    global e, t
    e, begun = threading.Event(), threading.Event()
    def work():
        function(False); begun.set(); e.wait(); function(True)
    t = threading.Thread(target=work, daemon=True); t.start(); assert begun.wait(5)

def finish():
    e.set(); t.join(5)
    return not t.is_alive()
"""


@dataclass(frozen=True)
class Kind:
    """`hold`: code that makes it. `check`: code whose last expression is true where it has gone on, in the source and
    in each copy. `fork`, `criu`: words of the engine's refusal, "" where it takes it. Between bars: one of fork's, all
    of criu's. `optional`: not each kernel has it. `mended`: it needs a criu that scripts/install-criu.sh builds.
    """

    hold: str
    check: str
    fork: str = ""
    criu: str = ""
    optional: bool = False
    mended: bool = False


def hold(box: Sandbox, kind: Kind) -> None:
    """Makes it in a sandbox, or skips the test."""
    result = box.run_code(f"{PRELUDE}\n{kind.hold}")
    if kind.optional and not result.ok:
        pytest.skip(f"not here: {result.error and result.error.message}")
    assert result.ok, result.error
    lack = criu.look()
    if kind.mended and not (isinstance(lack, criu.Criu) and lack.mended):
        pytest.skip("criu is not one that scripts/install-criu.sh has built")
