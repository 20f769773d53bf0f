"""A 5. While it runs, a command lists every live copy with its age, origin, memory and state; another, the tree."""

from __future__ import annotations

import subprocess
import sys

from examples.users.phone_call import play_to_decision_point
from sandbox_gym import Sandbox


def main() -> None:
    with Sandbox.create(name="call", cpus=1, memory="1Gi") as box:
        play_to_decision_point(box)
        copies = box.fork(3, prefix="rollout-")
        for command in ("ls", "tree"):  # in another terminal: sandbox-gym ls, sandbox-gym tree --watch
            subprocess.run([sys.executable, "-m", "sandbox_gym", command], check=True, timeout=60)
        for copy in copies:
            copy.terminate()


if __name__ == "__main__":
    main()
