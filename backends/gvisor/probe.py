"""Whether the gVisor backend works on this machine: a sandbox is made, and a copy of it answers."""

from __future__ import annotations

import time
import warnings

from sandbox_gym.api import SandboxSpec
from sandbox_gym.backends.shared import programs
from sandbox_gym.channel import GuestError
from sandbox_gym.checks import Check
from sandbox_gym.errors import SandboxError
from sandbox_gym.guest.wire import Op

from . import runsc
from .client import GvisorBackend

_SECONDS = 30.0
_NAME = "gvisor"


def check() -> Check:
    """Leaves nothing."""
    found = runsc.look()
    if isinstance(found, programs.Lack):
        return Check(_NAME, "missing", f"{found.why}; hostile code is safest there", found.remedy)
    try:
        made, answered, answer = _try()
    except (SandboxError, GuestError, OSError) as error:
        meaning = f"{found}, but no sandbox could be made: {error}"
        return Check(
            _NAME, "limited", meaning, "another release of runsc may do: name it by SANDBOX_GYM_RUNSC"
        )
    if answer != "42":
        return Check(_NAME, "limited", f"{found}: a copy answered {answer}, not 42", "report it as a bug")
    times = f"made in {made * 1e3:.0f} ms, snapshot and copy in {answered * 1e3:.0f} ms"
    return Check(_NAME, "ok", f"{found}: a sandbox was {times}")


def _try() -> tuple[float, float, str]:
    """Seconds to a sandbox, and from there to the answer of its copy; that answer."""
    backend = GvisorBackend()
    try:
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # limits that can't be set: another check says so
            live = backend.create(SandboxSpec(), name=None, timeout=_SECONDS)
        live.channel.call(Op.CODE, {"code": "x = 6 * 7"}, timeout=_SECONDS)
        made = time.perf_counter()
        taken = backend.snapshot(live, keep=True, engine="auto", settled=False, timeout=_SECONDS)
        (copy,) = backend.restore(taken.id, names=[None], timeout=_SECONDS)
        answer = copy.channel.call(Op.CODE, {"code": "x"}, timeout=_SECONDS)
        answered = time.perf_counter()
        for each in (live, copy):
            backend.terminate(each)
        value = answer.get("value") if isinstance(answer, dict) else None
        return made - start, answered - made, str(value)
    finally:
        backend.close()
