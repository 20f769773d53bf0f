"""Images that leave this supervisor, and those that come from elsewhere: as streams through a pipe of the client's.

An image's parts are the folder that criu wrote, then its layers, newest first. Each leaves as a stream of its own; all
of them come in as one. The work is done in jobs, and an image that comes is known to nobody before all of it is there.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandbox_gym.api import Limits
from sandbox_gym.backends.shared import protocol
from sandbox_gym.backends.shared.jobs import TIMED_OUT, Jobs
from sandbox_gym.errors import SnapshotError

from . import criu, disk
from .disk import Store
from .exchange import SEAL
from .images import Image
from .node import Family
from .packing import pack, unpack
from .population import MAX_DEPTH, Population

Reply = Callable[..., bool]
_NO_LIMITS = Limits(None, None, None, None)
_BLOCK = 1 << 20
_MOST_LAYERS = 400  # overlayfs stacks 500
_MOST_FILES = 50_000_000  # to count as many inodes takes minutes
_OWN_FILES = 32  # that a layer has beside what it shows, and more
_MOST_WORDS = 4000  # bytes of what a job says of its failure


class Transport:
    def __init__(self, guests: Population, jobs: Jobs, store: Store, folder: Path) -> None:
        self._guests = guests
        self._jobs = jobs
        self._store = store
        self._folder = folder
        self._count = 0

    # ---- out ----------------------------------------------------------------------------------------------------

    def describe(self, snapshot_id: str) -> dict[str, Any]:
        """What else an image is, beside its `parts`. Raises SnapshotError for what is no image."""
        image = self._image(snapshot_id)
        return {
            # Closed: an archive's word opens nothing of another machine's.
            "spec": protocol.spec_to_json(replace(image.family.spec, network=None)),
            "control_inode": image.control_inode,
            "memory_bytes": image.memory_bytes,
            "outside": list(image.outside),
            "attached": [target for _, target in image.family.base.attached],
            "parts": len(_parts(image)),
        }

    def pack(self, request: dict[str, Any], reply: Reply) -> None:
        """Writes a part to the descriptor that came with the request."""
        image = self._image(request["snapshot"])
        place, target = _parts(image)[request["part"]], request["fds"][0]

        def body() -> str:
            with open(target, "wb", buffering=_BLOCK) as stream:
                return str(pack(place, stream))

        def ended(code: int, words: str) -> None:
            image.restoring -= 1
            image.drop_unneeded()
            if code:
                reply(_failed(f"snapshot {image.id} could not be packed: {words}"))
            else:
                reply({"files": int(words)})

        self._start(body, request["timeout"], ended)
        image.restoring += 1  # it must stay until then

    def _image(self, snapshot_id: str) -> Image:
        found = self._guests.snapshots.get(snapshot_id)
        if not isinstance(found, Image):
            why = "gone: it was deleted" if found is None else "a frozen process, and not on disk"
            raise SnapshotError(f"snapshot {snapshot_id} is {why}")
        return found

    # ---- in -----------------------------------------------------------------------------------------------------

    def unpack(self, request: dict[str, Any], family: Family, reply: Reply) -> None:
        """Makes an image of what the descriptor that came with the request gives."""
        criu.find()
        here = [target for _, target in family.base.attached]
        if request["attached"] != here:
            raise SnapshotError(
                f"its guest was shown {request['attached']} by mounts of their own, and here that is {here}: the "
                "disks of this machine are divided otherwise"
            )
        image = self._empty(family, request)
        places, source = _parts(image), request["fds"][0]

        def body() -> str:
            with open(source, "rb", buffering=_BLOCK) as stream:
                for place in places:
                    unpack(stream, place)
                if stream.read(len(SEAL) + 1) != SEAL:
                    raise ValueError("it did not end where it should, or its sender gave up")
            return json.dumps([disk.used_bytes(place) for place in places[1:]])

        def ended(code: int, words: str) -> None:
            if code:
                image.drop()
                reply(_failed(f"it could not be unpacked: {words}"))
                return
            for layer, used in zip(image.layers, json.loads(words)):
                layer.used = used
                layer.count_inodes()
            self._guests.snapshots[image.id] = image
            image.handles = 1
            found = {"id": image.id, "engine": "criu", "why": "it was loaded", "depth_left": MAX_DEPTH}
            if not reply(found):
                self._guests.release(image.id)

        try:
            self._start(body, request["timeout"], ended)
        except BaseException:
            image.drop()
            raise

    def _empty(self, family: Family, request: dict[str, Any]) -> Image:
        """An image with nothing in it yet. Raises OSError."""
        files = request["files"][1:]
        if len(files) > _MOST_LAYERS or sum(files) > _MOST_FILES:
            raise SnapshotError(
                f"it has {len(files)} layers with {sum(files)} files; at most {_MOST_LAYERS} with {_MOST_FILES} can be"
            )
        self._count += 1
        folder = self._folder / f"loaded-{self._count}"
        folder.mkdir()
        inode, memory = int(request["control_inode"]), int(request["memory_bytes"])
        image = Image(secrets.token_hex(6), family, (), folder, inode, memory, loaded=True)
        image.outside = [(str(a), str(b), str(c)) for a, b, c in request.get("outside", [])]
        try:
            above = 0
            for count in reversed(files):  # the oldest first: their inode numbers rise
                layer = self._store.make(_NO_LIMITS, 0, above)
                image.layers = (layer, *image.layers)
                above = layer.start + count + _OWN_FILES
                layer.lower = layer.frozen
                os.mkdir(layer.lower)
        except BaseException:
            image.drop()
            raise
        return image

    def _start(self, body: Callable[[], str], timeout: float, done: Callable[[int, str], None]) -> None:
        """A job. `done` hears its exit code, and what `body` returned, or why it failed."""
        words = os.memfd_create("words")

        def run() -> None:
            try:
                said = body()
            except Exception as error:
                said = f"{type(error).__name__}: {error}"[:_MOST_WORDS]
                os.write(words, said.encode(errors="replace"))
                os._exit(1)
            os.write(words, said.encode())

        def ended(code: int) -> None:
            with open(words, "rb") as file:
                file.seek(0)
                said = file.read().decode(errors="replace")
            if code == TIMED_OUT:
                said = f"it did not end within {timeout:g} s"
            done(code, said or (f"it ended with {code}" if code else ""))

        try:
            self._jobs.start(run, timeout, ended)
        except BaseException:
            os.close(words)
            raise


def _parts(image: Image) -> list[str]:
    """The folders that hold it: criu's, and those of the layers in which something was ever written."""
    return [str(image.folder), *(layer.lower for layer in image.layers if layer.lower is not None)]


def _failed(reason: str) -> dict[str, Any]:
    return {"error": "SnapshotError", "message": reason}
