"""Stacks of frozen layers made shorter: in the background while a chain grows, and when it is rebased."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from sandbox_gym.api import Limits
from sandbox_gym.backends.shared.jobs import Jobs

from .disk import Layer, Store, used_bytes
from .images import Image
from .merge import merge
from .node import Node

_NO_LIMITS = Limits(None, None, None, None)


class Stacks:
    def __init__(self, jobs: Jobs, store: Store) -> None:
        self._jobs = jobs
        self._store = store

    def ahead(self, node: Node, timeout: float) -> None:
        """Begins to merge what a snapshot stands on, so that a rebase further down need not wait for it."""
        layers, newest = node.layers, node.layer
        for layer in layers:
            layer.hold()

        def ended(merged: Layer | None, reason: str) -> None:
            newest.merged = merged
            for layer in layers:
                layer.release()

        try:
            self._merge(layers, 0, timeout, ended)
        except OSError as error:
            ended(None, str(error))

    def flatten(self, image: Image, timeout: float, done: Callable[[str], None]) -> None:
        """Merges its layers into one, but for those that were merged ahead; `done` hears "", or why that failed.

        Raises OSError.
        """
        layers = image.layers
        n = next((i for i, layer in enumerate(layers) if layer.merged is not None), len(layers))
        ready = [layer.merged for layer in layers[n : n + 1] if layer.merged is not None]

        def ended(merged: Layer | None, reason: str) -> None:
            if merged is not None:
                for layer in ready:
                    layer.hold()
                image.layers = (merged, *ready)
                for layer in layers:
                    layer.release()
            done(reason)

        self._merge(layers[:n], max((layer.top for layer in ready), default=0), timeout, ended)

    def _merge(
        self,
        layers: Sequence[Layer],
        above: int,
        timeout: float,
        done: Callable[[Layer | None, str], None],
    ) -> None:
        """`done` hears the merged layer, whose inode numbers are higher than `above`, or why there is none."""
        merged = self._store.make(_NO_LIMITS, 0, above)
        merged.lower = f"{merged.folder}/f"
        os.mkdir(merged.lower)
        lowers = [layer.lower for layer in layers if layer.lower is not None]
        count = Path(merged.folder) / "used"

        def body() -> None:
            merge(lowers, f"{merged.folder}/f")
            count.write_text(str(used_bytes(f"{merged.folder}/f")))

        def ended(code: int) -> None:
            if code:
                merged.release()
                done(None, f"its layers could not be merged ({code})")
                return
            merged.used = int(count.read_text())
            merged.count_inodes()
            done(merged, "")

        try:
            self._jobs.start(body, timeout, ended)
        except OSError:
            merged.release()
            raise
