"""run_code: state that lives on, output and errors as data, and a time-out that always ends."""

# ruff: noqa: E501  (programs for the guest are text)
from __future__ import annotations

import time

import pytest

from sandbox_gym.errors import LimitExceeded, SandboxDied
from sandbox_gym.sandbox import Sandbox

MIB = 1 << 20


def test_names_live_on_between_cells(box: Sandbox) -> None:
    assert box.run_code("import math\nx = 20\ndef twice(n): return 2 * n").value is None
    result = box.run_code("twice(x) + math.floor(2.5)")
    assert result.ok and result.value == "42"
    assert box.run_code("_").value == "42"
    assert box.run_code("class A: pass\nA.__module__, A().__class__ is A").value == "('__main__', True)"


def test_streams_are_kept_apart_and_in_order(box: Sandbox) -> None:
    code = "import os, sys, subprocess\nprint('a')\nos.write(1, b'b\\n')\nsubprocess.run(['echo', 'c'])\nprint('d', end='')\n"
    result = box.run_code(code + "print('e1', file=sys.stderr)\nos.write(2, b'e2\\n')\nNone")
    assert result.stdout == "a\nb\nc\nd"
    assert result.stderr == "e1\ne2\n"
    assert result.value is None and result.duration > 0


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("1 / 0", "ZeroDivisionError", "division by zero"),
        ("def f(:", "SyntaxError", ""),
        ("'\\ud800'.encode()", "UnicodeEncodeError", "surrogates"),
        ("raise SystemExit(3)", "SystemExit", "3"),
        ("import sys; sys.exit('bye')", "SystemExit", "bye"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt", ""),
        ("raise BaseException('all')", "BaseException", "all"),
        ("raise GeneratorExit", "GeneratorExit", ""),
        ("class E(Exception):\n  def __str__(self): raise TypeError\nraise E", "E", "unprintable"),
        ("class R:\n  def __repr__(self): raise ValueError('no repr')\nR()", "ValueError", "no repr"),
        ("def f(): f()\nf()", "RecursionError", ""),
        ("(" * 500, "SyntaxError", ""),
        ("a\0b", "SyntaxError", "null"),
        ("await 1", "TypeError", ""),
        ("input()", "EOFError", ""),
    ],
)
def test_an_exception_is_data(box: Sandbox, code: str, kind: str, message: str) -> None:
    result = box.run_code(code)
    assert result.error is not None and not result.ok and not result.timed_out
    assert result.error.type == kind or (kind, result.error.type) == ("SyntaxError", "ValueError")
    assert message in result.error.message
    assert box.run_code("'alive'").value == "'alive'"


def test_a_traceback_shows_the_cell_and_nothing_of_ours(box: Sandbox) -> None:
    error = box.run_code("def inner():\n    raise ValueError('deep')\ninner()").error
    assert error is not None
    assert "raise ValueError('deep')" in error.traceback and "<cell 1>" in error.traceback
    assert "sandbox_gym_guest" not in error.traceback
    assert str(error) == "ValueError: deep"


def test_top_level_await(box: Sandbox) -> None:
    code = "import asyncio\nasync def f():\n    await asyncio.sleep(0)\n    return 7\nx = await f()\nawait f() + x"
    assert box.run_code(code).value == "14"
    assert box.run_code("x").value == "7"


def test_output_is_bounded_and_the_cut_is_told(box: Sandbox) -> None:
    result = box.run_code(
        f"import sys\nsys.stdout.write('x' * {3 * MIB})\nsys.stderr.write('y' * {2 * MIB})\nNone"
    )
    assert len(result.stdout) == MIB and result.stdout_cut == 2 * MIB
    assert len(result.stderr) == MIB and result.stderr_cut == MIB
    result = box.run_code("import subprocess\nsubprocess.run('head -c 3000000 /dev/zero', shell=True); None")
    assert len(result.stdout) == MIB and result.stdout_cut == 3_000_000 - MIB


def test_a_stream_that_a_cell_kept_writes_to_the_present_cell(box: Sandbox) -> None:
    box.run_code(
        "import logging, sys\nlogging.basicConfig(stream=sys.stderr, format='%(message)s')\nout = sys.stdout"
    )
    for _ in range(3):  # each with a bound of its own
        result = box.run_code("logging.warning('w' * 900_000)\nout.write('kept'); None")
        assert len(result.stderr) == 900_001 and result.stdout == "kept"


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.stdout.close()",
        "import sys; sys.stdout.detach()",
        "import sys; sys.stdout = None",
        "import sys; sys.stdout = open('/dev/full', 'w')",
        "import os; os.close(1); os.close(2)",
        "import sys, io; sys.stdout = io.StringIO()",
    ],
)
def test_broken_streams_last_one_cell(box: Sandbox, code: str) -> None:
    box.run_code(code)
    assert box.run_code("print('back')").stdout == "back\n"


def test_huge_values_are_cut(box: Sandbox) -> None:
    result = box.run_code("'x' * 10_000_000")
    assert result.value is not None and len(result.value) < 70_000 and "characters cut" in result.value
    result = box.run_code("raise ValueError('m' * 10_000_000)")
    assert result.error is not None and len(result.error.message) < 70_000


def test_memory_that_a_value_needs_is_an_error_that_names_the_limit(box: Sandbox) -> None:
    with pytest.raises(LimitExceeded, match=r"memory.*512|memory.*536870912"):
        box.run_code("x = bytearray(2 << 30)")
    with pytest.raises(SandboxDied, match=box.name):
        box.run_code("1")


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import subprocess; subprocess.run(['sleep', '60'])",
        "import asyncio\nawait asyncio.sleep(60)",
        "import threading; threading.Event().wait()",
        "try:\n    while True: pass\nexcept Exception: pass",
        "import sys\nwhile True: print('flood')",
    ],
)
def test_a_time_out_interrupts_and_the_session_lives_on(box: Sandbox, code: str) -> None:
    box.run_code("kept = 1")
    started = time.monotonic()
    result = box.run_code(code, timeout=0.2)
    assert result.timed_out and not result.ok and result.error is None
    assert time.monotonic() - started < 2.0
    assert box.run_code("kept").value == "1"
    assert "sleep" not in box.shell("cat /proc/[0-9]*/comm").stdout


def test_a_time_out_keeps_what_was_printed(box: Sandbox) -> None:
    assert box.run_code("print('so far')\nwhile True: pass", timeout=0.2).stdout == "so far\n"


@pytest.mark.parametrize(
    "code",
    [
        "import time\nwhile True:\n    try: time.sleep(60)\n    except BaseException: pass",
        "import collections, itertools; collections.deque(itertools.repeat(0), 0)",  # in C, where no signal is looked at
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
    ],
)
def test_what_ignores_its_interrupt_is_killed(box: Sandbox, code: str) -> None:
    started = time.monotonic()
    result = box.run_code(code, timeout=0.2)
    assert result.timed_out and result.error is not None and result.error.type == "SandboxDied"
    assert time.monotonic() - started < 4.0
    assert box.status == "dead"
    with pytest.raises(SandboxDied, match=f"{box.name} is dead.*did not stop"):
        box.run_code("1")


def test_a_crash_of_the_interpreter_is_an_error_that_names_the_sandbox(box: Sandbox) -> None:
    with pytest.raises(SandboxDied, match=f"{box.name} is gone"):
        box.run_code("import os; os._exit(1)")
    with pytest.raises(SandboxDied, match=box.name):
        box.shell("true")


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "1", None])
def test_a_timeout_is_a_positive_number(box: Sandbox, timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        box.run_code("1", timeout=timeout)
    with pytest.raises(ValueError, match="timeout"):
        box.shell("true", timeout=timeout)


def test_modules_of_the_working_folder(box: Sandbox) -> None:
    box.write_file("/workspace/adder.py", "def add(a, b): return a + b\n")
    box.write_file("/workspace/random.py", "raise RuntimeError('not the library')\n")
    assert box.run_code("import adder; adder.add(2, 3)").value == "5"
    assert box.run_code("import random; random.Random(1).randrange(9)").value == "2"
