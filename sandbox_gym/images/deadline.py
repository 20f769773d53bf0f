"""How long a call may take."""

from __future__ import annotations

import time

from sandbox_gym.errors import SandboxTimeout


def check(deadline: float) -> None:
    """`deadline`: on the monotonic clock. Raises SandboxTimeout."""
    if time.monotonic() > deadline:
        raise SandboxTimeout("the image was not ready in time: pass a longer timeout=")
