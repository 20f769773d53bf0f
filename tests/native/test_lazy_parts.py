"""The parts of a lazy restore: the library in criu, the areas that are still to come, the images they come from."""

from __future__ import annotations

import os
import re
import subprocess
import zlib
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_gym.backends.native import lazy, pages
from sandbox_gym.backends.native.areas import Areas

SOURCE = Path(lazy.__file__).with_name("uffd.c")


def test_the_library_is_that_of_the_source(tmp_path: Path) -> None:
    """Byte for byte where the compiler is the one that made it."""
    comment = SOURCE.read_text().split("*/")[0].replace("\n *", " ")
    flags = re.search(r"gcc (.*?) -o X", comment)
    assert flags
    built = tmp_path / "X"
    subprocess.run(["gcc", *flags[1].split(), "-o", built, SOURCE], check=True, timeout=60)
    version = subprocess.run(
        ["gcc", "-dumpfullversion"], check=True, capture_output=True, text=True, timeout=60
    )
    if version.stdout.strip() == "12.2.0":
        block, library = bytearray(built.read_bytes()), zlib.decompress(lazy._CODE)
        block[40:48], block[58:64] = bytes(8), bytes(6)  # without the sections' table, which no loader reads
        assert bytes(block[: len(library)]) == library


def test_with_the_library_system_calls_are_as_without(tmp_path: Path) -> None:
    library = tmp_path / "uffd.so"
    library.write_bytes(zlib.decompress(lazy._CODE))
    code = (
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True); libc.syscall.restype = ctypes.c_long\n"
        "import os; print(libc.syscall(39) == os.getpid(), libc.syscall(3, 9999), ctypes.get_errno())\n"
        "place = ctypes.create_string_buffer(4096)\n"  # six arguments: mmap
        "print(libc.syscall(9, 0, 8192, 3, 0x22, ctypes.c_long(-1), 0) > 0)\n"
    )
    said = subprocess.run(
        ["python3", "-c", code],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert said.stdout == "True -1 9\nTrue\n" and not said.stderr


Step = tuple[str, int, int, int]
_steps = st.lists(
    st.one_of(
        st.tuples(st.just("cut"), st.integers(0, 60), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("move"), st.integers(0, 40), st.integers(1, 10), st.integers(60, 90)),
        st.tuples(st.just("move"), st.integers(60, 90), st.integers(1, 10), st.integers(0, 40)),
    ),
    max_size=30,
)


@settings(max_examples=300)
@given(st.sets(st.integers(0, 60)), _steps)
def test_areas_are_what_a_map_of_single_pages_would_be(pages: set[int], steps: list[Step]) -> None:
    model = {page: page * 7 for page in pages}
    areas = Areas((page * 10, page * 10 + 10, page * 70) for page in pages)
    for kind, place, length, target in steps:
        if kind == "cut":
            gone = {page: model.pop(page) for page in range(place, place + length) if page in model}
            assert _pages(areas.cut(place * 10, (place + length) * 10)) == gone
        else:
            moved = {page: model.pop(page) for page in range(place, place + length) if page in model}
            for page in range(target, target + length):
                model.pop(page, None)
            model |= {page - place + target: offset for page, offset in moved.items()}
            areas.move(place * 10, target * 10, length * 10)
        assert _pages(areas) == model
        assert len(areas) == len(list(areas))
        for page in range(0, 101, 9):
            at, after = areas.at(page * 10), areas.after(page * 10)
            assert (at is not None) == (page in model)
            assert after is None or after[0] >= page * 10
            assert (after is None) == (
                not any(other >= page for other in model) or _none_starts(areas, page * 10)
            )


def _none_starts(areas: Areas, address: int) -> bool:
    return all(start < address for start, _, _ in areas)


def _pages(areas: Areas | list[tuple[int, int, int]]) -> dict[int, int]:
    found = {}
    for start, end, offset in areas:
        assert start < end
        for address in range(start, end, 10):
            assert address // 10 not in found
            found[address // 10] = (offset + address - start) // 10
    return found


def test_an_image_of_either_criu_is_read(tmp_path: Path) -> None:
    """4.1 tells the number of pages in one field, 4.2 in another."""
    from sandbox_gym.backends.native import rpc

    def message(*fields: tuple[int, int]) -> bytes:
        block = b"".join(rpc._field(number, value) for number, value in fields)
        return len(block).to_bytes(4, "little") + block

    lazy_page, present = 6, 4
    image = bytes(8) + message((1, 3))
    image += message((1, 0x10000), (2, 2), (4, present))
    image += message((1, 0x20000), (2, 3), (4, lazy_page))
    image += message((1, 0x30000), (2, 0), (4, lazy_page), (5, 1))
    (tmp_path / "pagemap-1.img").write_bytes(image)
    (tmp_path / "pages-3.img").write_bytes(bytes(6 * 4096))
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        _, areas = pages.read_image(folder, 1)
    finally:
        os.close(folder)
    assert list(areas) == [(0x20000, 0x23000, 0x2000), (0x30000, 0x31000, 0x5000)]
