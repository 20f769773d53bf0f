"""Each backend against the bare commands beneath it, in the same run; images against the host's files; egress.

python -m benchmarks.backends [--quick] [--json FILE]
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from pathlib import Path

from benchmarks import _backends_docker, _backends_gvisor, _backends_network
from benchmarks._report import Row, main, progress
from benchmarks.branch import restore_times
from sandbox_gym.backends import lookup
from sandbox_gym.images.image import Image
from sandbox_gym.sandbox import Sandbox
from sandbox_gym.testing.topics.images import small_root


def images(quick: bool) -> list[Row]:
    """Restores of a sandbox made of an image, and of one made of the host's files, in turns."""
    rounds = 300 if quick else 1000
    with tempfile.TemporaryDirectory(prefix="sandbox-gym-bench-") as folder:
        image = Image.from_directory(small_root(Path(folder), compiled=True))
        with Sandbox.create(image=image) as ours, Sandbox.create() as theirs:
            snapshots = ours.snapshot(), theirs.snapshot()
            times: tuple[list[float], list[float]] = [], []
            for _ in range(rounds):
                for which in (0, 1):
                    times[which].extend(restore_times(snapshots[which], 1))
            for snapshot in snapshots:
                snapshot.delete()
    of_image, of_host = (statistics.median(found) * 1e3 for found in times)
    return [Row("native: restore, from an image", of_image, "ms", "from the host's files", of_host, bar=1.1)]


def run(quick: bool) -> list[Row]:
    progress("native: restore from an image and from the host's files")
    rows = images(quick)
    with contextlib.ExitStack() as stack:
        if "docker" in lookup.BUILT_IN:
            stack.enter_context(_backends_docker.daemon())
            progress("docker: snapshots and restores, beside docker's own commands")
            rows += _backends_docker.run(quick)
        if "gvisor" in lookup.BUILT_IN:
            progress("gvisor: snapshots and restores, beside runsc")
            rows += _backends_gvisor.run(quick)
        for backend in sorted(lookup.BUILT_IN):
            progress(f"{backend}: what it reaches of the network")
            bare = stack.enter_context(_backends_gvisor.wired()) if backend == "gvisor" else None
            rows += _backends_network.run(backend, quick, bare)
    return rows


if __name__ == "__main__":
    main(__doc__, run)
