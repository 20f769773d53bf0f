"""The conformance suite itself: it finds out what does one thing wrong, and deviations that are not true."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox_gym.testing import Check, NotConforming, Result, checks, conformance
from tests.backends import wrong

Installed = Callable[..., None]
ROOT = Path(__file__).resolve().parent.parent.parent


def _check(backend: str, name: str) -> Check:
    (check,) = checks(backend, [name])
    return check


@pytest.fixture(autouse=True)
def all_installed(installed: Installed) -> None:
    kinds = [kind for kind in vars(wrong).values() if getattr(kind, "__module__", "") == wrong.__name__]
    installed(**{kind.__name__.lower(): f"{wrong.__name__}:{kind.__name__}" for kind in kinds})


@pytest.mark.parametrize(
    ("backend", "name", "said"),
    [
        ("shares", "fork.siblings_are_sealed", "the others' state"),
        ("patient", "create.times_out", "no SandboxTimeout"),
        ("deaf", "code.time_out_keeps_state", "status"),
        ("generous", "limits.memory_of_commands", "over the limit"),
        ("generous", "limits.memory_of_cells", "error"),
        ("generous", "limits.disk", "100 MiB in 64"),
        ("talkative", "create.environment_is_given", "variables of the host inside"),
        ("careless", "network.rules_of_copies", "are reached"),
        ("refuses", "fork.siblings_are_sealed", "belongs into its deviations"),
        ("vain", "fork.siblings_are_sealed", "take it out of the deviations"),
        ("breaks", "fork.siblings_are_sealed", "harmed"),
        ("crashes", "fork.siblings_are_sealed", "ended with SandboxDied"),
    ],
)
def test_what_is_wrong_is_found(backend: str, name: str, said: str) -> None:
    with pytest.raises(NotConforming, match=said):
        _check(backend, name)()


def test_what_stays_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox_gym.testing.suite.PATIENCE", 0.2)
    with pytest.raises(NotConforming, match="all that it made is gone"):
        _check("littering", "code.names_live_on")()


def test_deviations_that_are_true() -> None:
    check = _check("honest", "fork.siblings_are_sealed")
    assert check.why == "copies are not made here"
    check()
    with pytest.raises(NotConforming, match="belongs into its deviations"):
        _check("honest", "fork.of_forks")()


def test_deviations_of_no_check() -> None:
    with pytest.raises(NotConforming, match=r"'fork\.makes_coffee': no check has that name"):
        checks("confused")
    with pytest.raises(NotConforming, match="makes_coffee"):
        conformance("confused")


def test_results() -> None:
    few = ["code.names_live_on", "fork"]
    seen: list[Result] = []
    with pytest.raises(NotConforming, match="fails 1 of 3 checks") as caught:
        conformance("honest", few, progress=seen.append)
    assert {result.check: result.verdict for result in seen} == {
        "code.names_live_on": "ok",
        "fork.siblings_are_sealed": "deviates",
        "fork.of_forks": "failed",
    }
    assert "memory can't be captured here" in str(caught.value)
    kept = conformance("honest", ["code.names_live_on", "fork.siblings_are_sealed"])
    assert [(result.verdict, result.why) for result in kept] == [
        ("ok", ""),
        ("deviates", "copies are not made here"),
    ]
    with pytest.raises(ValueError, match="no check or topic 'coffee'"):
        conformance("honest", ["coffee"])


def test_the_command() -> None:
    command = [sys.executable, "-m", "sandbox_gym.testing", "native", "code.names_live_on", "rng"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=60)
    assert "ok" in result.stdout and "3 checks" in result.stdout


def test_it_needs_no_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; import sandbox_gym.testing as t; print(len(t.checks('native')))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert int(result.stdout) > 60
