"""Copies map their files again from their own root: what they then refer to, and that they go on as if nothing was."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox_gym.guest import remap
from sandbox_gym.sandbox import Sandbox

if os.geteuid():
    pytest.skip("only root may ask the kernel what mounts a mapping is of", allow_module_level=True)

CALL = "from sandbox_gym_guest import rebind\nrebind.rebind()\n"
SOURCE = Path(remap.__file__).with_suffix(".c")


def run(box: Sandbox, code: str) -> str:
    """The value of the code's last line; what failed inside fails the test."""
    result = box.run_code(code, timeout=60)
    assert result.ok, (result.error, result.stderr)
    return result.value or ""


def pids_inside(box: Sandbox) -> list[int]:
    """As this test numbers them."""
    space = run(box, "import os; os.readlink('/proc/self/ns/pid')").strip("'")
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.readlink(f"/proc/{entry}/ns/pid") == space:
                found.append(int(entry))
        except OSError:  # it ended
            continue
    return found


def foreign(pid: int) -> set[str]:
    """The files in a process's memory, and its program, whose mount isn't one of its mount namespace's."""
    own = {line.split()[0] for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()}
    folder = f"/proc/{pid}/map_files"
    found = set()
    for link in [*(f"{folder}/{name}" for name in os.listdir(folder)), f"/proc/{pid}/exe"]:
        path = os.readlink(link)
        fd = os.open(link, os.O_PATH)
        info = Path(f"/proc/self/fdinfo/{fd}").read_text()
        os.close(fd)
        if info.split("mnt_id:")[1].split()[0] not in own:
            found.add(path)
    return found


@pytest.fixture
def copy_of() -> Iterator[Callable[[Sandbox], Sandbox]]:
    made: list[Sandbox] = []

    def fork(box: Sandbox) -> Sandbox:
        made.extend(box.fork(1))
        return made[-1]

    yield fork
    for box in made:
        box.terminate()


CopyOf = Callable[[Sandbox], Sandbox]


def test_every_mapping_is_of_the_copys_own_mounts(box: Sandbox, copy_of: CopyOf) -> None:
    run(box, "import numpy, sqlite3, ssl")
    third = second = copy_of(copy_of(box))
    for copy in (second, third := copy_of(second)):
        (pid,) = pids_inside(copy)
        assert any("libpython" in path or "/python" in path for path in foreign(pid))
        assert run(copy, "from sandbox_gym_guest import rebind; rebind.needs_rebind()") == "True"
        run(copy, CALL)
        assert foreign(pid) == set()
        assert run(copy, "rebind.needs_rebind()") == "False"
    # A copy of a copy that did it needs it again.
    fourth = copy_of(third)
    (pid,) = pids_inside(fourth)
    assert foreign(pid)
    run(fourth, CALL)
    assert foreign(pid) == set()
    run(third, CALL)  # and one that has nothing to do is left as it is
    assert foreign(pids_inside(third)[0]) == set()


STATE = """
import ctypes, decimal, locale, re, sqlite3, ssl, zlib
import numpy as np
libc = ctypes.CDLL(None, use_errno=True)
array = np.arange(1_000_000.0)
generator = np.random.default_rng(5)
table = sqlite3.connect(":memory:")
table.execute("create table t (a)")
table.executemany("insert into t values (?)", [(i,) for i in range(1000)])
context = ssl.create_default_context()
pattern = re.compile("(a+)b")
decimal.getcontext().prec = 11
libc.srand(77)  # this state and the next lie in the C library's .data and .bss
ctypes.c_int.in_dll(libc, "optind").value = 4321
"""
LOOK = """(
    array.sum(), (array @ array), generator.random(), table.execute("select sum(a) from t").fetchone(),
    len(context.get_ciphers()) > 3, ssl.MemoryBIO().write(b"x"), pattern.match("aaab").group(1),
    str(decimal.Decimal(1) / 7), [libc.rand() for _ in range(5)],
    ctypes.c_int.in_dll(libc, "optind").value, zlib.crc32(b"x"), locale.setlocale(locale.LC_ALL),
)"""


def test_state_goes_on(box: Sandbox, copy_of: CopyOf) -> None:
    run(box, STATE)
    copy, other = copy_of(box), copy_of(box)
    run(copy, CALL)
    assert run(copy, LOOK) == run(other, LOOK)
    # The copy can still grow: its heap by brk, its stack, new libraries, and be forked again.
    grow = """
import bz2, csv, json, uuid, xml.parsers.expat
def deep(n): return n and 1 + deep(n - 1)
import sys; sys.setrecursionlimit(20_000)
more = [bytes(100) for _ in range(200_000)]
deep(8_000), len(more)
"""
    assert run(copy, grow) == "(8000, 200000)"
    assert run(copy_of(copy), LOOK) == run(copy, LOOK)
    assert copy.shell("echo alive").stdout == "alive\n"


FILES = """
import ctypes, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
PAGE = mmap.PAGESIZE
def fresh(name):
    with open(name, "wb") as file:
        for letter in b"abcdefgh":
            file.write(bytes([letter]) * PAGE)
        file.write(b"tail")
def private(name, protection=mmap.PROT_READ | mmap.PROT_WRITE):
    with open(name, "rb") as file:
        return mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, protection)
def shared(name):
    with open(name, "rb") as file:
        return mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
def start(mapping): return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
def protect(mapping, protection):
    assert libc.mprotect(ctypes.c_void_p(start(mapping)), ctypes.c_size_t(9 * PAGE), protection) == 0
def line(name): return [l for l in open("/proc/self/maps") if l.rstrip().endswith("/" + name)]
os.chdir("/workspace")
"""


def test_written_and_unwritten_pages_of_every_protection(box: Sandbox, copy_of: CopyOf) -> None:
    run(box, FILES + "for n in ('rw', 'none', 'ro', 'clean', 'hidden', 'sh', 'late'): fresh(n)")
    box = copy_of(box)  # the files are of a layer below by now
    run(
        box,
        """
rw, none, ro, clean, hidden = map(private, ("rw", "none", "ro", "clean", "hidden"))
sh = shared("sh")
with open("/dev/zero", "rb") as file:
    zero = mmap.mmap(file.fileno(), 4 * PAGE, mmap.MAP_PRIVATE)
zero[PAGE], zero[3 * PAGE] = zero[0], 7
for mapping in (rw, none, ro):
    mapping[2 * PAGE] = 1
    mapping[8 * PAGE + 3] = 2
protect(none, 0); protect(hidden, 0); protect(ro, 1)
""",
    )
    copy = copy_of(box)
    run(copy, "import numpy; late = private('late'); rw[3 * PAGE] = 3; " + CALL.replace("\n", "; ", 1))
    assert foreign(pids_inside(copy)[0]) == set()
    rights = run(copy, "[line(n)[0].split()[1] for n in ('rw', 'none', 'ro', 'clean', 'hidden', 'sh')]")
    assert rights == "['rw-p', '---p', 'r--p', 'rw-p', '---p', 'r--s']"
    run(copy, "protect(none, 3); protect(hidden, 3)")
    written = """
expected = bytearray(b"".join(bytes([letter]) * PAGE for letter in b"abcdefgh") + b"tail")
plain = bytes(expected)
expected[2 * PAGE] = 1; expected[8 * PAGE + 3] = 2
first = bytes(expected); expected[3 * PAGE] = 3
rw[:] == expected, none[:] == first, ro[:] == first, clean[:] == hidden[:] == sh[:] == late[:] == plain
"""
    assert run(copy, written) == "(True, True, True, True)"
    assert run(copy, "zero[:] == bytes(3 * PAGE) + bytes([7]) + bytes(PAGE - 1)") == "True"
    run(copy, "rw[0] = clean[0] = hidden[0] = 9")
    assert run(copy, "open('rw', 'rb').read() == open('clean', 'rb').read() == plain") == "True"


def test_files_that_are_other_ones_by_now(box: Sandbox, copy_of: CopyOf) -> None:
    names = "('gone', 'replaced', 'changed', 'touched', 'cut', 'pipe')"
    run(box, FILES + f"for n in {names}: fresh(n)")
    box = copy_of(box)
    run(box, f"held = {{n: private(n) for n in {names}}}\nfor m in held.values(): m[PAGE] = 1")
    copy = copy_of(box)
    run(
        copy,
        """
expected = {n: m[:] for n, m in held.items()}
os.remove("gone"); fresh("new"); os.rename("new", "replaced"); os.chmod("touched", 0o600)
file = open("changed", "r+b"); file.write(b"other"); file.close()
os.truncate("cut", 3 * PAGE)
os.remove("pipe"); os.mkfifo("pipe")
""",
    )
    run(copy, CALL)
    assert foreign(pids_inside(copy)[0]) == set()
    assert run(copy, "{n: m[:] == expected[n] for n, m in held.items()}").count("True") == 6
    # A file of the same content is mapped; the rest would read differently, so it is memory of no file.
    assert run(copy, "[n for n in held if line(n)]") == "['replaced', 'touched']"


def test_memory_shared_with_a_file_that_is_gone(box: Sandbox, copy_of: CopyOf) -> None:
    run(box, FILES + "fresh('gone')")
    box = copy_of(box)
    run(box, "held = shared('gone')")
    copy = copy_of(box)
    result = copy.run_code("os.remove('gone')\n" + CALL)
    assert result.error is not None and result.error.type == "OSError"
    assert "/workspace/gone" in result.error.message
    assert run(copy, "held[PAGE], rebind.needs_rebind()") == "(98, True)"
    run(copy, "held.close()\n" + CALL)
    assert foreign(pids_inside(copy)[0]) == set()


def test_a_child_inherits_mappings_of_the_copys_own(box: Sandbox, copy_of: CopyOf) -> None:
    run(box, "from sandbox_gym_guest import rebind")
    copy = copy_of(box)
    copy.shell("true")
    assert run(copy, "rebind.needs_rebind()") == "True"  # a command executes another program: nothing to do
    run(
        copy,
        "import os\nread, write = os.pipe()\nchild = os.fork()\nif not child: os.read(read, 1); os._exit(3)",
    )
    assert run(copy, "rebind.needs_rebind()") == "False"
    pids = pids_inside(copy)
    assert len(pids) == 2 and [foreign(pid) for pid in pids] == [set(), set()]
    assert run(copy, "os.write(write, b'x'); os.waitpid(child, 0)[1] >> 8") == "3"


def test_a_first_guest_has_nothing_to_do() -> None:
    with Sandbox.create(memory="256Mi", disk="64Mi", pids=32) as first:
        assert run(first, "from sandbox_gym_guest import rebind; rebind.needs_rebind()") == "False"
        (pid,) = pids_inside(first)
        assert foreign(pid) == set()
        lines = "{line for line in open('/proc/self/maps') if '/' in line}"
        assert run(first, f"before = {lines}; rebind.rebind(); before <= {lines}") == "True"
        assert foreign(pid) == set()


# ---- the machine code -----------------------------------------------------------------------------------------------


def test_the_machine_code_is_that_of_the_source(tmp_path: Path) -> None:
    """Byte for byte where the compiler is the one that made it; elsewhere that it is one block without data beside."""
    comment = SOURCE.read_text().split("*/")[0].replace("\n *", " ")
    flags = re.search(r"gcc (.*?) -o X", comment)
    assert flags
    built, code = tmp_path / "X", tmp_path / "CODE"
    subprocess.run(["gcc", *flags[1].split(), "-o", built, SOURCE], check=True, timeout=60)
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text", built, code], check=True, timeout=60)
    version = subprocess.run(
        ["gcc", "-dumpfullversion"], check=True, capture_output=True, text=True, timeout=60
    )
    headers = subprocess.run(["objdump", "-h", built], check=True, capture_output=True, text=True, timeout=60)
    assert not re.search(r"\.(rodata|data|bss|got)", headers.stdout)
    if version.stdout.strip() == "12.2.0":
        assert code.read_bytes() == remap._CODE
