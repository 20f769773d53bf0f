"""How a sandbox is captured: once as it stands, and where that fails once more, with its guest made ready."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from sandbox_gym import _budget
from sandbox_gym.api import Taken
from sandbox_gym.channel import GuestError
from sandbox_gym.errors import SandboxDied, SnapshotError
from sandbox_gym.guest.wire import Op

if TYPE_CHECKING:
    from sandbox_gym.sandbox import Sandbox

_TIMEOUT = 60.0  # seconds
_SETTLE_TIMEOUT = 30.0
_MAX_REASON = 2000  # characters


def capture(box: Sandbox, *, keep: bool, engine: str = "auto", levels: int = 1) -> Taken:
    """See `Backend.snapshot`. The caller holds the sandbox's lock. Raises SnapshotError, SandboxDied, LimitExceeded."""

    def take(settled: bool) -> Taken:
        # A copy that is made at once is made by the guest, which then tells itself.
        obstacle = box._call(Op.SETTLE, settled, timeout=_SETTLE_TIMEOUT) if settled or not keep else None
        return box._backend.snapshot(
            box._live,
            keep=keep,
            engine=engine,
            settled=settled,
            obstacle=str(obstacle)[:_MAX_REASON] if obstacle else None,
            levels=levels,
            timeout=_TIMEOUT,
        )

    box._capturing = True
    try:
        with contextlib.suppress(SnapshotError):
            return _budget.within(box._backend, lambda: take(False))
        # What a command has left may have ended since: the guest reaps it, and makes itself fit for criu.
        return _budget.within(box._backend, lambda: take(True))
    except SandboxDied as error:
        raise box._fatal(error) from None
    except GuestError as error:
        raise SnapshotError(f"sandbox {box.name}: its guest could not be made ready: {error}") from None
    finally:
        box._capturing = False
