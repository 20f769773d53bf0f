"""The shape that docs/architecture.md draws: who imports whom, what an import costs, how long a file is."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sandbox_gym

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "sandbox_gym"

# Bottom first. A module imports from its own layer and those below. New files in sandbox_gym/ go here.
LAYERS: dict[str, set[str]] = {
    "guest": {"guest"},
    "base": {"_home", "api", "channel", "checks", "errors", "network", "registration", "seeds"},
    "images": {"images"},
    "backends": {"backends"},
    "sandbox": {
        "_audit",
        "_audit_rows",
        "_audit_watch",
        "_budget",
        "_calls",
        "_capture",
        "_drafts",
        "_idle",
        "_records",
        "_snapshot",
        "_store",
        "_text",
        "_transfer",
        "archive",
        "exploring",
        "process",
        "sandbox",
        "template",
    },
    "tasks": {"tasks"},
    "environments": {
        "acting",
        "_exchange",
        "_exchange_values",
        "_lanes",
        "_spares",
        "branch_model",
        "branching",
        "env",
        "envs",
        "hosting",
        "snapshot_model",
        "testing",
        "vector",
    },
    "integrations": {"agents", "evals", "ray", "rllib"},
    "front": {
        "__main__",
        "_pages",
        "_table",
        "_tree",
        "audit",
        "benchmarks",
        "cli",
        "demo",
        "doctor",
        "duel",
        "ui",
    },
}
RANK = {name: rank for rank, names in enumerate(LAYERS.values()) for name in names}
# Beside the stack: knows nothing of sandboxes, and the environments' layer gives it its states.
SEARCH = "search"
SEARCH_RANK = list(LAYERS).index("environments")


def _sources() -> dict[str, Path]:
    """Every module by its true name. The links are not followed: envs/ and backends/ are read as real folders."""
    found = {}
    for folder, name in (
        ("sandbox_gym", PACKAGE),
        ("envs", "sandbox_gym.envs"),
        ("backends", "sandbox_gym.backends"),
    ):
        for path in (ROOT / folder).rglob("*.py"):
            parts = [*name.split("."), *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    for path in (ROOT / "benchmarks").rglob("*.py"):
        found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


SOURCES = _sources()


def _imports(module: str, *, nested: bool = True) -> Iterator[tuple[int, str]]:
    """(line, absolute name) of each import. `nested`: also those inside functions and `if TYPE_CHECKING`."""
    path = SOURCES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if nested else tree.body:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parts = parts[: len(parts) - node.level + 1]
                base = ".".join([*parts, base] if base else parts)
            for alias in node.names:
                yield node.lineno, _target(base, alias.name)


def _target(base: str, name: str) -> str:
    """The module that `from base import name` needs: a submodule, or where the package's lazy name is at home."""
    if base == PACKAGE and name in sandbox_gym._HOMES:
        return f"{PACKAGE}.{sandbox_gym._HOMES[name]}"
    return f"{base}.{name}" if f"{base}.{name}" in SOURCES else base


def _part(module: str) -> str:
    """What the layers name: `sandbox_gym.X...` is X, `benchmarks...` is benchmarks; "" for the package itself."""
    first, _, rest = module.partition(".")
    return rest.partition(".")[0] if first == PACKAGE else first


def _ours(module: str) -> bool:
    return module.partition(".")[0] in (PACKAGE, "benchmarks", "envs", "backends")


MODULES = sorted(SOURCES)
HOMELESS = {_part(module) for module in MODULES} - set(RANK) - {SEARCH, ""}


def test_every_module_has_a_layer() -> None:
    assert not HOMELESS, f"put {sorted(HOMELESS)} into a layer of {Path(__file__).name}"


@pytest.mark.parametrize("module", [module for module in MODULES if _part(module) in RANK.keys() - {"guest"}])
def test_imports_point_down(module: str) -> None:
    rank = RANK[_part(module)]
    for line, target in _imports(module):
        if _ours(target) and _part(target) != "":
            other = _part(target)
            assert other in HOMELESS or (SEARCH_RANK if other == SEARCH else RANK[other]) <= rank, (
                f"{SOURCES[module]}:{line} imports {target}, which is above it"
            )


@pytest.mark.parametrize("module", [module for module in MODULES if _part(module) == SEARCH])
def test_search_knows_nothing_of_sandboxes(module: str) -> None:
    for line, target in _imports(module):
        assert not _ours(target) or _part(target) == SEARCH, f"{SOURCES[module]}:{line} imports {target}"


def test_envs_and_backends_are_imported_by_their_true_names_only() -> None:
    tests = [
        (path, node)
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
    ]
    named = [
        (path, alias.name) for path, node in tests if isinstance(node, ast.Import) for alias in node.names
    ]
    named += [
        (path, node.module or "")
        for path, node in tests
        if isinstance(node, ast.ImportFrom) and not node.level
    ]
    named += [(SOURCES[module], target) for module in MODULES for _, target in _imports(module)]
    wrong = [(path, name) for path, name in named if name.partition(".")[0] in ("envs", "backends")]
    assert not wrong


@pytest.mark.parametrize("name", ["envs", "backends"])
def test_other_names_are_refused(name: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {name}"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/"
    )
    assert result.returncode != 0
    assert f"ImportError: import sandbox_gym.{name}, not {name}" in result.stderr


# ---- the guest ---------------------------------------------------------------------------------------------------

GUEST = [module for module in MODULES if _part(module) == "guest"]


@pytest.mark.parametrize("module", GUEST)
def test_the_guest_needs_little(module: str) -> None:
    """It runs as `sandbox_gym_guest` in a root file system without sandbox_gym."""
    tree = ast.parse(SOURCES[module].read_text())
    absolute = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for name in [a.name for a in node.names]
    }
    absolute |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level == 0}
    foreign = {name.partition(".")[0] for name in absolute} - sys.stdlib_module_names
    # matplotlib loads its backend by itself, when a cell has imported it.
    assert foreign <= {"numpy", "gymnasium", "matplotlib"}
    assert {n.level for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)} <= {0, 1}


def test_the_guest_starts_with_the_standard_library_alone() -> None:
    """An image may have no numpy: what `agent` imports as it starts, and what that imports."""
    seen, waiting = set(), [f"{PACKAGE}.guest.agent"]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            for line, target in _imports(module, nested=False):
                if _part(target) == "guest":
                    waiting.append(target)
                else:
                    assert target.partition(".")[0] in sys.stdlib_module_names, f"{SOURCES[module]}:{line}"
    assert len(seen) > 3


def test_the_guest_is_one_flat_folder() -> None:
    assert all(path.parent == ROOT / "sandbox_gym/guest" for path in map(SOURCES.__getitem__, GUEST))


# ---- the package -------------------------------------------------------------------------------------------------


def _modules_after(code: str) -> tuple[set[str], float]:
    program = (
        f"import sys, time, json\nstart = time.perf_counter()\n{code}\ntook = time.perf_counter() - start\n"
    )
    program += "print(json.dumps([list(sys.modules), took]))"
    output = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd="/"
    ).stdout
    modules, took = json.loads(output)
    return set(modules), took


def test_import_is_light(record_property: Callable[[str, object], None]) -> None:
    loaded, took = _modules_after(f"import {PACKAGE}")
    record_property("import_seconds", took)
    print(f"import sandbox_gym: {took * 1e3:.1f} ms")
    extra = {name.partition(".")[0] for name in loaded - _modules_after("")[0]} - sys.stdlib_module_names
    assert extra == {PACKAGE}
    assert {name for name in loaded if name.startswith(f"{PACKAGE}.")} == {f"{PACKAGE}.registration"}


def test_all_is_what_is_exported() -> None:
    assert sandbox_gym.__all__ == sorted(sandbox_gym.__all__)
    assert set(sandbox_gym.__all__) == set(sandbox_gym._HOMES)
    assert set(sandbox_gym.__all__) == _names_for_type_checkers()
    namespace: dict[str, object] = {}
    exec(f"from {PACKAGE} import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(sandbox_gym.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        sandbox_gym.nothing  # noqa: B018


def _names_for_type_checkers() -> set[str]:
    block = next(node for node in ast.parse(SOURCES[PACKAGE].read_text()).body if isinstance(node, ast.If))
    return {
        alias.asname or alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith(PACKAGE)])
def test_files_are_short(module: str) -> None:
    lines = len(SOURCES[module].read_text().splitlines())
    assert lines <= 400, f"{SOURCES[module]} has {lines} lines: would two names serve better than one?"
