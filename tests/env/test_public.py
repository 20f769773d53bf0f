"""The package's own face: its names, its weight at import, its registry entry."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import sandbox_gym

ROOT = Path(sandbox_gym.__file__).parent


def run(code: str, *flags: str) -> str:
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT.parent, timeout=60
    ).stdout


def test_every_public_name_is_there() -> None:
    for name in sandbox_gym.__all__:
        if (
            name == "SandboxVectorEnv"
            and not (ROOT / "vector.py").exists()
            and not (ROOT / "vector").exists()
        ):
            continue
        assert getattr(sandbox_gym, name).__name__ == name
    assert sorted(sandbox_gym.__all__) == sandbox_gym.__all__
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        sandbox_gym.nothing_of_the_kind  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.asname for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(sandbox_gym.__all__)


def test_it_is_light_at_import_and_needs_no_packages() -> None:
    heavy = ("numpy", "gymnasium", "ray", "torch", "matplotlib", "multiprocessing", "concurrent")
    code = f"import sys, sandbox_gym; print([name for name in {heavy} if name in sys.modules])"
    assert run(code).strip() == "[]"
    run("import sandbox_gym, sandbox_gym.backends.native.supervisor", "-S")


@pytest.mark.parametrize("first", ["gymnasium, sandbox_gym", "sandbox_gym, gymnasium"])
def test_both_orders_of_import_register_it(first: str) -> None:
    code = f"import {first}; print(gymnasium.registry['Sandbox-v0'].vector_entry_point)"
    assert run(code).strip() == "sandbox_gym.vector:SandboxVectorEnv"


def test_registering_twice_is_once() -> None:
    run(
        "import warnings; warnings.simplefilter('error'); import sandbox_gym as s; s.register_envs(); s.register_envs()"
    )
