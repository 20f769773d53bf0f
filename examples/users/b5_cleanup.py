"""B 5. Copies go when they are deleted; or by themselves: after a time to live, when idle, with the script's end."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

from sandbox_gym import Sandbox

CRASHES = """
from sandbox_gym import Sandbox
box = Sandbox.create(ephemeral=True)   # the default
print(box.id, flush=True)
raise SystemExit("the script crashed")
"""


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def gone(id: str) -> bool:
    command = [sys.executable, "-m", "sandbox_gym", "ls"]
    return id not in subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def main() -> None:
    with Sandbox.create() as base:
        copies = base.fork(3)
        for copy in copies:
            copy.terminate()
        print("deleted:", *(copy.status for copy in copies))
    brief = Sandbox.create(ttl=0.5)
    print("after its time to live:", until(lambda: gone(brief.id)))
    idle = Sandbox.create(idle_timeout=0.5)
    print("idle:", until(lambda: idle.status == "dead"))
    with Sandbox.create(idle_timeout=0.5, ephemeral=False) as resting:
        resting.run_code("x = 1")
        print(
            "put to rest:", until(lambda: resting.status == "stopped"), "awake:", resting.run_code("x").value
        )
    command = [sys.executable, "-c", CRASHES]
    crashed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    print("with its script:", until(lambda: gone(crashed.stdout.strip())), "-", crashed.stderr.strip())


if __name__ == "__main__":
    main()
