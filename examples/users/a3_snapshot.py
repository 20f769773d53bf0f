"""A 3. The whole process is frozen as it is; another process, or another machine, restores it from an archive.

Needs root and criu.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from examples.users.phone_call import play_to_decision_point
from sandbox_gym import Sandbox

ELSEWHERE = """
import sys
from sandbox_gym import Sandbox, Snapshot

snapshot = Snapshot.load(sys.argv[1])
with Sandbox.restore(snapshot) as copy:
    copy.run_code("step('book_viewing')")
    print("another process scores", copy.run_code("score()").value)
snapshot.delete()
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, Sandbox.create(cpus=1, memory="1Gi") as box:
        play_to_decision_point(box)
        decision = box.snapshot("decision")
        print("the sandbox runs on, at", box.run_code("score()").value)
        archive = Path(folder) / f"{decision.id}.sbx"
        decision.save(archive)  # or any URL that fsspec knows: s3://...
        decision.delete()
        subprocess.run([sys.executable, "-c", ELSEWHERE, str(archive)], check=True, timeout=100)


if __name__ == "__main__":
    main()
