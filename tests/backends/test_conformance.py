"""Every backend does what the suite says, but for what it declares."""

from __future__ import annotations

import pytest

from sandbox_gym.testing import Check, checks
from tests.backends.conftest import Ready

BACKENDS = ["native", "docker", "gvisor"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", [check for backend in BACKENDS for check in checks(backend)], ids=repr)
def test_conformance(check: Check, ready: Ready) -> None:
    ready(check.backend)
    check()
