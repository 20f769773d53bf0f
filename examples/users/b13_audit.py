"""B 13. An audit log holds every command that an agent ran, for when a reward looks too good.

The same without a change in the program: SANDBOX_GYM_AUDIT=audit.db python train.py; sandbox-gym audit audit.db
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from sandbox_gym import Sandbox, audit, set_audit


def agent(box: Sandbox) -> None:
    """Finds its way to the reward."""
    box.shell("ls")
    box.shell("cat grade.py")
    box.write_file("grade.py", "print(1.0)\n")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "audit.db"
        set_audit(log)
        with Sandbox.create(name="task-base") as base:
            base.write_file("grade.py", "print(0.0)\n")
            (episode,) = base.fork(1, prefix="ep-")
            with episode:
                agent(episode)
                reward = float(episode.exec(["python3", "grade.py"]).stdout)
        set_audit(None)
        print("reward", reward, "- what has it done?")
        for event in audit.read(log, sandbox="ep-1"):
            print(f"{event.kind:8} {event.text}")


if __name__ == "__main__":
    main()
