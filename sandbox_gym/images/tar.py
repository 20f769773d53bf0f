"""Tar archives from a stream that only goes forward, for archives that may mean harm: nothing that a header says makes
this hold more than a megabyte, or read further than the archive goes.

Reads ustar and pax (POSIX.1-2001, pax(1)), GNU's long names and both of its sparse files, and extended attributes as
star and Go write them (SCHILY.xattr). https://www.gnu.org/software/tar/manual/html_node/Standard.html
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

BLOCK = 512
_MOST_HEADER = 1 << 20  # bytes of a long name, of pax records, or of a sparse file's map
_PIECE = 1 << 20
_MOST_ID = 2**32 - 2  # the last one means "no change" to chown
_TIME = re.compile(rb"(-?)(\d{1,10})(?:\.(\d*))?")
_ATTRIBUTE = b"SCHILY.xattr."

Kind = Literal["file", "hardlink", "symlink", "folder", "fifo", "device"]
_KINDS: dict[bytes, Kind] = {
    b"\0": "file",
    b"0": "file",
    b"7": "file",
    b"S": "file",
    b"1": "hardlink",
    b"2": "symlink",
    b"3": "device",
    b"4": "device",
    b"5": "folder",
    b"6": "fifo",
}


class Damaged(ValueError):
    """It is no archive, not what was written, or means harm; the message says in which way."""


@dataclass(frozen=True)
class Entry:
    """A file of an archive. `modified`: nanoseconds; `size`: bytes, holes included; `pieces`: where in the file the
    bytes that follow belong, as (offset, length).
    """

    name: bytes
    kind: Kind
    mode: int
    uid: int
    gid: int
    modified: int
    size: int
    target: bytes
    attributes: dict[str, bytes]
    pieces: list[tuple[int, int]]


@dataclass
class _Extra:
    """What stands before a header and is meant for it."""

    records: dict[bytes, bytes] = field(default_factory=dict)
    name: bytes | None = None
    target: bytes | None = None


class Reader:
    """Iterates over entries. Between two of them `data` gives a file's bytes; what was not read is passed over."""

    def __init__(self, read: Callable[[int], bytes], skip: Callable[[int], None] | None = None) -> None:
        """`read(n)`: n bytes, fewer only at the end; `skip(n)`: goes on so far, where that is faster than to read."""
        self.offset = 0
        self._read, self._skip = read, skip
        self._left = 0  # bytes of the entry that nobody has read yet
        self._padding = 0
        self._shared: dict[bytes, bytes] = {}  # pax records for all that follow

    def __iter__(self) -> Iterator[Entry]:
        """Raises Damaged."""
        extra = _Extra()
        while (header := self._header()) is not None:
            flag, size = header[156:157], _number(header[124:136])
            if size < 0:
                raise Damaged("a size below zero")
            if flag in b"LKxg":
                block = self._extra(size)
                if flag == b"L":
                    extra.name = block.split(b"\0", 1)[0]
                elif flag == b"K":
                    extra.target = block.split(b"\0", 1)[0]
                elif flag == b"x":
                    extra.records = _records(block)
                else:
                    self._shared.update(_records(block))
                    if sum(len(k) + len(v) for k, v in self._shared.items()) > _MOST_HEADER:
                        raise Damaged("too many pax records for all entries")
                continue
            if flag not in _KINDS:
                raise Damaged(f"an entry of the unknown type {flag!r}")
            yield self._entry(header, extra)
            extra = _Extra()

    def data(self, length: int) -> Iterator[bytes]:
        """The next bytes of the entry that came last, in pieces."""
        while length:
            block = self._exactly(min(length, _PIECE))
            length -= len(block)
            self._left -= len(block)
            yield block

    # ---- headers -------------------------------------------------------------------------------------------------

    def _header(self) -> bytes | None:
        self._pass_over(self._left + self._padding)
        self._left = self._padding = 0
        block = self._take(BLOCK)
        if not block or block == bytes(BLOCK):  # some writers leave out the blocks of zeros at the end
            return None
        if len(block) < BLOCK:
            raise Damaged("it breaks off in a header")
        told, bare = _number(block[148:156]), block[:148] + b" " * 8 + block[156:]
        # Some old writers took bytes for signed.
        if told != sum(bare) and told != sum(bare) - 256 * sum(byte > 127 for byte in bare):
            raise Damaged("a header's checksum is wrong: it is no tar archive, or damaged")
        return block

    def _entry(self, header: bytes, extra: _Extra) -> Entry:
        records = {key: value for key, value in {**self._shared, **extra.records}.items() if value}
        kind = _KINDS[header[156:157]]
        name, target = _name(header), header[157:257].split(b"\0", 1)[0]
        name = records.get(b"GNU.sparse.name") or records.get(b"path") or extra.name or name
        if kind == "file" and header[156:157] == b"\0" and name.endswith(b"/"):
            kind = "folder"  # as before there were types
        stored = size = _decimal(records.get(b"size"), _number(header[124:136])) if kind == "file" else 0
        self._left, self._padding = stored, -stored % BLOCK
        pieces = [(0, stored)] if stored else []
        if kind == "file" and (found := self._sparse(header, records)) is not None:
            pieces, size = found
        uid = _decimal(records.get(b"uid"), _number(header[108:116]))
        gid = _decimal(records.get(b"gid"), _number(header[116:124]))
        if not (0 <= uid <= _MOST_ID and 0 <= gid <= _MOST_ID):
            raise Damaged(f"{_show(name)}: an owner that is none")
        return Entry(
            name,
            kind,
            _number(header[100:108]) & 0o7777,
            uid,
            gid,
            _nanoseconds(records.get(b"mtime"), _number(header[136:148])),
            size,
            records.get(b"linkpath") or extra.target or target,
            {_text(k[len(_ATTRIBUTE) :]): v for k, v in records.items() if k.startswith(_ATTRIBUTE)},
            pieces,
        )

    # ---- sparse files --------------------------------------------------------------------------------------------

    def _sparse(self, header: bytes, records: dict[bytes, bytes]) -> tuple[list[tuple[int, int]], int] | None:
        """The pieces and the whole size of a sparse file; None for another."""
        if header[156:157] == b"S":
            numbers, size = self._old_map(header), _number(header[483:495])
        elif b"GNU.sparse.map" in records:  # version 0.1
            numbers = [_decimal(number) for number in records[b"GNU.sparse.map"].split(b",")]
            size = _decimal(records.get(b"GNU.sparse.size"))
        elif records.get(b"GNU.sparse.major") == b"1":
            numbers, size = self._new_map(), _decimal(records.get(b"GNU.sparse.realsize"))
        elif any(key.startswith(b"GNU.sparse.") for key in records):
            raise Damaged("a sparse file of a version that is not known here")
        else:
            return None
        pieces = [(start, length) for start, length in zip(numbers[::2], numbers[1::2]) if length]
        end = 0
        for start, length in pieces:
            if start < end or length < 0:
                raise Damaged("a sparse file whose pieces overlap")
            end = start + length
        if end > size or sum(length for _, length in pieces) != self._left:
            raise Damaged("a sparse file whose map does not fit its size")
        return pieces, size

    def _old_map(self, header: bytes) -> list[int]:
        """Of GNU's own format: four pieces in the header, and more in blocks after it while a flag says so."""
        fields, more = header[386:482], header[482]
        while more:
            if len(fields) > _MOST_HEADER:
                raise Damaged("a sparse file of too many pieces")
            block = self._exactly(BLOCK)
            fields, more = fields + block[:504], block[504]
        return [_number(fields[start : start + 12]) for start in range(0, len(fields), 12)]

    def _new_map(self) -> list[int]:
        """Of version 1.0: decimal lines in the blocks before the data: how many pieces, then each one's two numbers."""
        blocks: list[bytes] = []
        lines, wanted = 0, 1
        while lines < wanted:
            if self._left < BLOCK or len(blocks) * BLOCK > _MOST_HEADER:
                raise Damaged("a sparse file without a map, or with too large a one")
            blocks.append(self._exactly(BLOCK))
            self._left -= BLOCK
            lines += blocks[-1].count(b"\n")
            if wanted == 1 and lines:
                wanted += 2 * _decimal(b"".join(blocks).split(b"\n", 1)[0])
        return [_decimal(line) for line in b"".join(blocks).split(b"\n")[1:wanted]]

    # ---- bytes ---------------------------------------------------------------------------------------------------

    def _extra(self, size: int) -> bytes:
        if size > _MOST_HEADER:
            raise Damaged(f"a header of {size} bytes")
        block = self._exactly(size)
        self._exactly(-size % BLOCK)
        return block

    def _exactly(self, size: int) -> bytes:
        block = self._take(size)
        if len(block) != size:
            raise Damaged("it breaks off")
        return block

    def _take(self, size: int) -> bytes:
        block = self._read(size)
        self.offset += len(block)
        return block

    def _pass_over(self, size: int) -> None:
        if self._skip is not None and size:
            self._skip(size)
            self.offset += size
            return
        while size:
            size -= len(self._exactly(min(size, _PIECE)))


def _name(header: bytes) -> bytes:
    name = header[:100].split(b"\0", 1)[0]
    prefix = header[345:500].split(b"\0", 1)[0]
    # GNU's own format has other things there.
    return prefix + b"/" + name if prefix and header[257:263] == b"ustar\0" else name


def _number(text: bytes) -> int:
    """Octal digits, or in base 256 where the first bit is set."""
    if text[0] & 0x80:
        value = int.from_bytes(text, "big") - (1 << 8 * len(text) - 1)
        return value if not text[0] & 0x40 else value - (1 << 8 * len(text) - 1)
    digits = text.split(b"\0", 1)[0].strip()
    try:
        return int(digits or b"0", 8)
    except ValueError:
        raise Damaged("a header with no number where one belongs: it is no tar archive, or damaged") from None


def _decimal(text: bytes | None, otherwise: int | None = None) -> int:
    if text is None and otherwise is not None:
        return otherwise
    if text is None or not text.isdigit() or len(text) > 19:
        raise Damaged(f"{_show(text or b'')} where a number belongs")
    return int(text)


def _nanoseconds(text: bytes | None, seconds: int) -> int:
    if text is not None:
        found = _TIME.fullmatch(text)
        if found is None:
            raise Damaged(f"{_show(text)} where a time belongs")
        value = int(found[2] + (found[3] or b"").ljust(9, b"0")[:9])
        value = -value if found[1] else value
    else:
        value = seconds * 10**9
    if not -(2**63) <= value < 2**63:
        raise Damaged("a time that is none")
    return value


def _records(block: bytes) -> dict[bytes, bytes]:
    """pax records, each `LENGTH KEY=VALUE` and a newline; a value is any bytes."""
    found, start = {}, 0
    while start < len(block) and block[start]:  # some writers pad it with zeros
        space = block.find(b" ", start, start + 20)
        end = start + _decimal(block[start:space] if space > 0 else b"")
        key, equals, value = block[space + 1 : end].partition(b"=")
        if end > len(block) or not equals or not value.endswith(b"\n"):
            raise Damaged("a pax record that is none")
        found[key] = value[:-1]
        start = end
    return found


def _text(name: bytes) -> str:
    try:
        return name.decode()
    except UnicodeDecodeError:
        raise Damaged(f"an attribute that is named {_show(name)}") from None


def _show(name: bytes) -> str:
    return repr(name[:200].decode(errors="backslashreplace"))
