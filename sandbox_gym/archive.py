"""Snapshots that travel: one file, compressed, every byte of which is checked before anything is made of it.

A snapshot's parts (what criu wrote of its memory, and each layer of its disk) are blobs, named by the SHA-256 of what
is stored of them. An archive is a mark, the blobs, the manifest, its length, and another mark; the manifest holds the
hash of each blob and its own. A store of templates keeps the same blobs and manifests as files of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from sandbox_gym import _audit, _records
from sandbox_gym._drafts import Draft
from sandbox_gym._snapshot import Snapshot
from sandbox_gym.api import Archiving, Backend, Rng, SandboxSpec
from sandbox_gym.backends import lookup
from sandbox_gym.errors import SnapshotError

Place = str | os.PathLike[str]
FORMAT, VERSION = "sandbox-gym snapshot", 1
_HEAD = b"sandbox-gym snapshot\n"
_TAIL = struct.Struct("<Q8s")  # the manifest's length, and a mark
_END = b"sbx-end\n"
_SEALED = re.compile(rb'\{"sha256":"([0-9a-f]{64})","manifest":(\{.*\})\}\n', re.DOTALL)
_MOST_MANIFEST = 4 << 20  # bytes
_MOST_PARTS = 500
_MOST_LABEL = 1000  # characters
_LEVEL = 1  # of zstd
_MOST_WINDOW = 1 << 27  # bytes that a frame may ask for to be decompressed
_BLOCK = 1 << 20


class Damaged(ValueError):
    """It is no archive, or not what was written; the message says in which way."""


# ---- what is in it -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A blob: hash and length of what is stored, the length of what that decompresses to, and the files it holds."""

    sha256: str
    stored_bytes: int
    bytes: int
    files: int


@dataclass(frozen=True)
class Manifest:
    """`state`: the snapshot, beside its parts; `facts`: what it relies on. Both are the backend's own plain JSON."""

    state: Mapping[str, Any]
    facts: Mapping[str, Any]
    parts: tuple[Part, ...]
    label: str | None
    created: float  # seconds since the epoch
    origin: str | None = None  # the snapshot that was written, by its id where it was taken

    @property
    def stored_bytes(self) -> int:
        return sum(part.stored_bytes for part in self.parts)

    def encode(self) -> bytes:
        """With its own hash, over every byte but the hash."""
        body = json.dumps(
            {"format": FORMAT, "version": VERSION, **asdict(self)}, separators=(",", ":")
        ).encode()
        return b'{"sha256":"%s","manifest":%s}\n' % (hashlib.sha256(body).hexdigest().encode(), body)

    @classmethod
    def decode(cls, block: bytes) -> Manifest:
        """Raises Damaged."""
        sealed = _SEALED.fullmatch(block)
        if sealed is None or hashlib.sha256(sealed[2]).hexdigest().encode() != sealed[1]:
            raise Damaged("its manifest is not what was written")
        try:
            fields = json.loads(sealed[2])
        except (ValueError, RecursionError):
            raise Damaged("its manifest is no JSON") from None
        if fields.get("format") != FORMAT or fields.get("version") != VERSION:
            raise Damaged(
                f"it is of version {fields.get('version')!r} of the format {str(fields.get('format'))[:100]!r}, and "
                f"this release reads version {VERSION} of {FORMAT!r}"
            )
        try:
            return cls._checked(fields)
        except (KeyError, TypeError) as error:
            raise Damaged(f"its manifest lacks what it must hold ({error})") from None

    @classmethod
    def _checked(cls, fields: dict[str, Any]) -> Manifest:
        state, facts, label, created = (fields[name] for name in ("state", "facts", "label", "created"))
        parts = tuple(Part(**part) for part in fields["parts"])
        for part in parts:
            sizes = part.stored_bytes, part.bytes, part.files
            if not re.fullmatch("[0-9a-f]{64}", part.sha256) or any(
                type(s) is not int or s < 0 for s in sizes
            ):
                raise TypeError(f"a part {str(part)[:200]}")
        if not isinstance(state, dict) or not isinstance(facts, dict) or state["parts"] != len(parts):
            raise TypeError(f"{len(parts)} parts")
        if not 1 <= len(parts) <= _MOST_PARTS or not isinstance(created, float):
            raise TypeError(f"{len(parts)} parts")
        if label is not None and (not isinstance(label, str) or len(label) > _MOST_LABEL):
            raise TypeError("a label")
        origin = fields.get("origin")
        return cls(state, facts, parts, label, created, None if origin is None else str(origin)[:_MOST_LABEL])


@dataclass(frozen=True)
class Blob:
    """A part where it lies in a file that can seek."""

    file: BinaryIO
    offset: int
    part: Part

    def check(self) -> None:
        """Raises Damaged."""
        digest = hashlib.sha256()
        for block in self._stored():
            digest.update(block)
        if digest.hexdigest() != self.part.sha256:
            raise Damaged(f"its part {self.part.sha256[:12]} is not what was written")

    def blocks(self) -> Iterator[bytes]:
        """What it holds, decompressed. Raises Damaged, where it holds more or less than it should."""
        import zstandard

        left = self.part.bytes
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW)
        source: Any = _Stored(self._stored())
        try:
            # Bounded reads, since a few bytes can stand for very many.
            with decompressor.stream_reader(source, read_size=_BLOCK) as reader:
                while block := reader.read(_BLOCK):
                    left -= len(block)
                    if left < 0:
                        break
                    yield block
        except zstandard.ZstdError as error:
            raise Damaged(f"its part {self.part.sha256[:12]} can't be decompressed ({error})") from None
        if left:
            raise Damaged(f"its part {self.part.sha256[:12]} holds not as much as its manifest says")

    def _stored(self) -> Iterator[bytes]:
        self.file.seek(self.offset)
        left = self.part.stored_bytes
        while left:
            block = self.file.read(min(left, _BLOCK))
            if not block:
                raise Damaged(f"its part {self.part.sha256[:12]} breaks off")
            left -= len(block)
            yield block


class _Stored:
    """Blocks as what zstandard reads of a file."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks

    def read(self, size: int) -> bytes:
        return next(self._blocks, b"")


# ---- to and from a backend ------------------------------------------------------------------------------------------


def archiving(backend: Backend) -> Archiving:
    """Raises SnapshotError."""
    if not isinstance(backend, Archiving):
        raise SnapshotError(f"snapshots of the {backend.name} backend can't be saved or loaded: native's can")
    return backend


@contextmanager
def as_image(snapshot: Snapshot) -> Iterator[Snapshot]:
    """The same as files: a frozen process has to be restored and written first. Raises SnapshotError."""
    from sandbox_gym.sandbox import Sandbox

    if snapshot.deleted:
        raise SnapshotError(f"{snapshot!r} was deleted: take another snapshot")
    if snapshot.engine == "criu":
        yield snapshot
        return
    with Sandbox.restore(snapshot) as copy:
        image = copy.snapshot(engine="criu")
    try:
        yield image
    finally:
        image.delete()


def write_parts(
    image: Snapshot, target: Callable[[], BinaryIO], label: str | None, timeout: float
) -> Manifest:
    """Compresses each part into a file of `target`'s. Raises SnapshotError, OSError of those files."""
    backend = archiving(image._backend)
    facts, state = backend.facts(image._spec), backend.describe(image.id)
    deadline = time.monotonic() + timeout
    parts = [
        _write_part(backend, image.id, number, target(), deadline - time.monotonic())
        for number in range(state["parts"])
    ]
    return Manifest(state, facts, tuple(parts), label, time.time(), image.id)


def _write_part(backend: Archiving, image_id: str, number: int, target: BinaryIO, timeout: float) -> Part:
    import zstandard

    compressor = zstandard.ZstdCompressor(level=_LEVEL).compressobj()
    digest = hashlib.sha256()
    size = stored = 0

    def store(block: bytes) -> None:
        nonlocal stored
        digest.update(block)
        target.write(block)
        stored += len(block)

    def write(block: bytes) -> None:
        nonlocal size
        size += len(block)
        store(compressor.compress(block))

    files = backend.pack(image_id, number, write, timeout=max(0.0, timeout))
    store(compressor.flush())
    return Part(digest.hexdigest(), stored, size, files)


def restore_parts(
    backend: Backend,
    manifest: Manifest,
    blobs: Sequence[Blob],
    timeout: float,
    *,
    change: Callable[[SandboxSpec], SandboxSpec] = lambda spec: spec,
) -> Snapshot:
    """A snapshot of `backend`, once every part is found to be what was written. `change`: what its sandboxes' spec
    becomes. Raises Damaged, SnapshotError.
    """
    archive = archiving(backend)
    try:
        spec = change(archive.spec_of(manifest.state))
        lacks = archive.lacks(manifest.facts, manifest.state)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"its manifest is of no release that is known here ({error!r})") from None
    if lacks:
        raise SnapshotError(f"it can't be restored here: {'; '.join(lacks)}")
    for blob in blobs:
        blob.check()
    blocks = chain.from_iterable(blob.blocks() for blob in blobs)
    files = [part.files for part in manifest.parts]
    taken = archive.unpack(spec, manifest.state, files, blocks, timeout=timeout)
    snapshot = Snapshot(backend, taken, spec, None, manifest.label)
    _audit.loaded(snapshot, manifest.origin)
    return snapshot


def make_ready(image: Snapshot, *, rng: Rng) -> Snapshot:
    """In place of `image`: its first copy, which stands still for others to be copied from, where fork can do that."""
    from sandbox_gym.sandbox import Sandbox

    with Sandbox.restore(image, rng=rng) as box:
        try:
            ready = box._take(keep=False, label=image.label, engine="fork")
        except SnapshotError:  # more than one thread or process: criu makes each copy
            return image
        box._end("terminated", None)
    image.delete()
    return ready


# ---- one file ------------------------------------------------------------------------------------------------------


def save(snapshot: Snapshot, place: Place, *, timeout: float) -> None:
    """See `Snapshot.save`."""
    _records.check_seconds("timeout", timeout)
    archiving(snapshot._backend).facts(snapshot._spec)  # what is lacking is said before any work
    path = local_path(place)
    if path is not None:
        with Draft(os.path.dirname(path)) as draft:
            write(snapshot, draft.file, timeout)
            draft.publish(path)
        return
    with tempfile.TemporaryFile() as spool:
        write(snapshot, spool, timeout)
        spool.seek(0)
        _upload(spool, os.fspath(place))


def write(snapshot: Snapshot, file: BinaryIO, timeout: float) -> None:
    """An archive into a file that is empty. Raises SnapshotError, BackendUnavailable, OSError of that file."""
    file.write(_HEAD)
    with as_image(snapshot) as image:
        block = write_parts(image, lambda: file, snapshot.label, timeout).encode()
    file.write(block)
    file.write(_TAIL.pack(len(block), _END))
    file.flush()


def load(place: Place, *, backend: str, timeout: float) -> Snapshot:
    """See `Snapshot.load`."""
    _records.check_seconds("timeout", timeout)
    with _opened(place) as file:
        try:
            manifest, blobs = read(file)
            return restore_parts(lookup.get(backend), manifest, blobs, timeout)
        except (Damaged, SnapshotError) as error:
            raise SnapshotError(f"{os.fspath(place)}: {error}") from None


def read(file: BinaryIO) -> tuple[Manifest, list[Blob]]:
    """What an archive holds; its blobs are not looked at yet. Raises Damaged."""
    size = file.seek(0, os.SEEK_END)
    if size < len(_HEAD) + _TAIL.size:
        raise Damaged("it is too short for an archive")
    file.seek(0)
    if file.read(len(_HEAD)) != _HEAD:
        raise Damaged("it is no archive of a snapshot")
    file.seek(size - _TAIL.size)
    length, end = _TAIL.unpack(file.read(_TAIL.size))
    start = size - _TAIL.size - length
    if end != _END or length > _MOST_MANIFEST or start < len(_HEAD):
        raise Damaged("it does not end as an archive does: it was cut off, or changed")
    file.seek(start)
    manifest = Manifest.decode(file.read(length))
    if len(_HEAD) + manifest.stored_bytes != start:
        raise Damaged("its parts are not as long as its manifest says")
    blobs, offset = [], len(_HEAD)
    for part in manifest.parts:
        blobs.append(Blob(file, offset, part))
        offset += part.stored_bytes
    return manifest, blobs


# ---- places --------------------------------------------------------------------------------------------------------


def local_path(place: Place) -> str | None:
    """Of a path or a file: URL; None for another URL. Raises ValueError for a file: URL of another host."""
    text = os.fspath(place)
    if text.startswith("file:"):
        url = urlsplit(text)
        if url.netloc not in ("", "localhost"):
            raise ValueError(f"{text!r} is a file of another host: write file:///path")
        return os.path.abspath(unquote(url.path))
    return None if "://" in text or "::" in text else os.path.abspath(text)


@contextmanager
def _opened(place: Place) -> Iterator[BinaryIO]:
    """For reading; what lies elsewhere is fetched first."""
    path = local_path(place)
    if path is not None:
        with open(path, "rb") as file:
            yield file
        return
    import fsspec

    with tempfile.TemporaryFile() as spool:
        with fsspec.open(os.fspath(place), "rb") as source:
            shutil.copyfileobj(source, spool, _BLOCK)
        yield spool


def _upload(spool: BinaryIO, url: str) -> None:
    import fsspec

    try:
        with fsspec.open(url, "wb") as target:
            shutil.copyfileobj(spool, target, _BLOCK)
    except BaseException:
        with suppress(
            Exception
        ):  # half of it may be there; whatever this raises, the first failure says more
            system, path = fsspec.core.url_to_fs(url)
            system.rm_file(path)
        raise
