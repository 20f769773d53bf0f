"""Backends by name: those built in, those of other packages, and options."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import sandbox_gym
from sandbox_gym.backends import lookup
from sandbox_gym.backends.native.client import NativeBackend
from sandbox_gym.errors import BackendUnavailable
from sandbox_gym.sandbox import Sandbox
from tests.backends.conftest import Install

_THEIRS = """
from sandbox_gym.api import Deviation
from sandbox_gym.backends.native.client import NativeBackend
from sandbox_gym.errors import BackendUnavailable

class Mine(NativeBackend):
    name = "mine"
    deviations = (Deviation("snapshot.budget_is_kept", "nothing counts memory here"),)

    def __init__(self, option="plain"):
        self.option = option
        super().__init__()

    def set_budget(self, *, memory, disk):
        raise BackendUnavailable("backend mine counts no memory: leave set_budget out")
"""
_USE = """
import sandbox_gym, sys
from sandbox_gym.backends import lookup
from sandbox_gym.testing import checks
assert "mine" in lookup.names() and [d.check for d in lookup.deviations("mine:x")] == ["snapshot.budget_is_kept"]
assert not lookup._made
part = checks("mine", ["create", "snapshot", "fork", "rng"])
assert len(part) > 15
for check in part:
    check()
with sandbox_gym.Sandbox.create(backend="mine:fancy") as box:
    assert box.run_code("6 * 7").value == "42"
    assert type(box._backend).__module__ == "their_sandboxes" and box._backend.option == "fancy"
assert lookup.get("mine").option == "plain" and lookup.get("mine") is not lookup.get("mine:fancy")
assert type(lookup.get("native")).__name__ == "NativeBackend"
lookup.shut_down()
print("fine")
"""


def test_another_package_s_backend(distribution: Install) -> None:
    folder = distribution({"mine": "their_sandboxes:Mine", "native": "their_sandboxes:Mine"})
    (folder / "their_sandboxes.py").write_text(_THEIRS)
    root = str(Path(sandbox_gym.__file__).parent.parent)
    result = subprocess.run(
        [sys.executable, "-c", _USE],
        env={**os.environ, "PYTHONPATH": f"{root}:{folder}"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.stdout == "fine\n", result.stderr


def test_one_of_each_name() -> None:
    assert lookup.get("native") is lookup.get("native")
    assert lookup.factory("native") is NativeBackend
    assert set(lookup.BUILT_IN) <= set(lookup.names())


@pytest.mark.parametrize("name", ["nothing", "nothing:option", "", ":", "Native"])
def test_unknown_names(name: str) -> None:
    for use in (lookup.get, lookup.deviations):
        with pytest.raises(ValueError, match=r"choose from .*native"):
            use(name)
    with pytest.raises(ValueError, match="choose from"):
        Sandbox.create(backend=name)


def test_options_that_are_not_taken() -> None:
    for name in ("native:fast", "native:"):
        with pytest.raises(ValueError, match="takes no option"):
            lookup.get(name)


def test_packages_that_are_broken(installed: Callable[..., None]) -> None:
    installed(gone="no_such_module_of_theirs:X", wrong="tests.backends.wrong:NoSuchClass")
    for name in ("gone", "wrong"):
        assert name in lookup.names()
        with pytest.raises(BackendUnavailable, match="mend or uninstall their-sandboxes"):
            lookup.get(name)
