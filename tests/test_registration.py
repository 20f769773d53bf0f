"""Sandbox-v0 is in Gymnasium's registry once both packages are imported, in either order."""

from __future__ import annotations

import subprocess
import sys

import pytest

SPEC = "gymnasium.spec('Sandbox-v0').entry_point"


@pytest.mark.parametrize(
    "code",
    [
        f"import gymnasium, sandbox_gym; print({SPEC})",
        f"import sandbox_gym, gymnasium; print({SPEC})",
        f"import sandbox_gym, gymnasium.vector; print({SPEC})",
        f"import sandbox_gym, importlib; import gymnasium; importlib.reload(sandbox_gym); print({SPEC})",
        "from gymnasium.envs.registration import _find_spec as f; print(f('sandbox_gym:Sandbox-v0').entry_point)",
    ],
)
def test_registered(code: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/"
    )
    assert result.stdout == "sandbox_gym.env:make_env\n", result.stderr


def test_nothing_heavy_comes_with_it() -> None:
    code = (
        "import sandbox_gym, gymnasium, sys; print([m for m in sys.modules if m.startswith('sandbox_gym')])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/"
    ).stdout
    assert output == "['sandbox_gym.registration', 'sandbox_gym']\n"
