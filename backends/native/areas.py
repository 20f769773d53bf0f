"""Ranges of a process's memory, and where in a file their pages lie."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

Area = tuple[int, int, int]  # start, end, and where its bytes lie in the file of pages


class Areas:
    """The addresses that still wait for pages of the image, in order. Anything else has come, or is zero."""

    def __init__(self, areas: Iterable[Area] = ()) -> None:
        self._areas = sorted(areas)

    def __len__(self) -> int:
        return len(self._areas)

    def __iter__(self) -> Iterator[Area]:
        return iter(self._areas)

    def size(self) -> int:
        """How many bytes wait."""
        return sum(end - start for start, end, _ in self._areas)

    def at(self, address: int) -> Area | None:
        index = bisect.bisect_left(self._areas, (address + 1,)) - 1
        return self._areas[index] if index >= 0 and self._areas[index][1] > address else None

    def after(self, address: int) -> Area | None:
        """The first that starts there or later."""
        index = bisect.bisect_left(self._areas, (address,))
        return self._areas[index] if index < len(self._areas) else None

    def cut(self, start: int, end: int) -> list[Area]:
        """Takes a range out, and returns what was there."""
        first = bisect.bisect_left(self._areas, (start,))
        if first and self._areas[first - 1][1] > start:
            first -= 1
        last = bisect.bisect_left(self._areas, (end,), first)
        gone, rest = [], []
        for a, b, offset in self._areas[first:last]:
            low, high = max(a, start), min(b, end)
            gone.append((low, high, offset + low - a))
            rest += [(a, low, offset)] if a < low else []
            rest += [(high, b, offset + high - a)] if high < b else []
        self._areas[first:last] = rest
        return gone

    def move(self, source: int, target: int, length: int) -> None:
        moved = self.cut(source, source + length)
        self.cut(target, target + length)
        index = bisect.bisect_left(self._areas, (target,))
        self._areas[index:index] = [(a - source + target, b - source + target, o) for a, b, o in moved]

    def copy(self) -> Areas:
        return Areas(self._areas)
