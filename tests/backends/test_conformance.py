"""Every backend does what the suite says, but for what it declares."""

from __future__ import annotations

import pytest

from sandbox_gym.testing import Check, checks

BACKENDS = ["native"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("check", [check for backend in BACKENDS for check in checks(backend)], ids=repr)
def test_conformance(check: Check) -> None:
    check()
