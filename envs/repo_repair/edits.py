"""Small edits of a program's text that change what it does: how bugs are made, and what a menu of fixes holds.

An edit replaces a few characters, so that comments and layout stay as they are. Sites are found in the syntax tree,
inside functions only; what a type checker, a decorator, an error's message or an f-string holds is left alone.
"""

from __future__ import annotations

import ast
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

_COMPARISONS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: (r"is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: (r"in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
_ARITHMETIC: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
}
_OF_TYPES = {"isinstance", "issubclass", "getattr", "setattr", "hasattr", "super", "cast"}
# Messages of errors; f-strings, in which positions are wrong before Python 3.12.
# Python 3.11 counts the depth of all threads together, and takes their difference for an error of its own.
_one_at_a_time = threading.Lock()
_LEFT_ALONE = (ast.Raise, ast.Assert, ast.ExceptHandler, ast.JoinedStr)
_SKIPPED_FUNCTIONS = {"__repr__", "__str__", "main", "_main"}


@dataclass(frozen=True)
class Edit:
    """`start`, `end`: bytes of the file, which are `old` and become `new`. `function`: its qualified name."""

    path: str
    function: str
    kind: str
    start: int
    end: int
    old: str
    new: str

    def apply(self, source: str) -> str:
        data = source.encode()
        return (data[: self.start] + self.new.encode() + data[self.end :]).decode()

    def back(self) -> Edit:
        """What takes it back, in the file that it has made."""
        end = self.start + len(self.new.encode())
        return Edit(self.path, self.function, self.kind, self.start, end, self.new, self.old)


def edits(path: str, source: str) -> list[Edit]:
    """Every edit known for a file, in its order. Some may not compile, or change nothing: see `changes`."""
    finder = _Finder(path, source)
    finder.visit(_parsed(source))
    return sorted(set(finder.found), key=lambda edit: (edit.start, edit.end, edit.new))


def changes(edit: Edit, source: str) -> bool:
    """Whether it makes a program that compiles, and is another."""
    try:
        return ast.dump(_parsed(edit.apply(source))) != ast.dump(_parsed(source))
    except SyntaxError:
        return False


def _parsed(source: str) -> ast.Module:
    with _one_at_a_time:
        return ast.parse(source)


def shuffled(candidates: Sequence[Edit], rng: random.Random) -> list[Edit]:
    """In an order of chance: first one of each function, then another of each, and so on, of all kinds in turn."""
    order = list(candidates)
    rng.shuffle(order)
    kinds = sorted({edit.kind for edit in order})
    rng.shuffle(kinds)
    order = _in_turn(order, lambda edit: edit.kind, kinds.index)
    return _in_turn(order, lambda edit: (edit.path, edit.function), lambda _: 0)


def _in_turn(
    order: Sequence[Edit], group: Callable[[Edit], Hashable], rank: Callable[[Any], int]
) -> list[Edit]:
    seen: Counter[Hashable] = Counter()
    ranks = []
    for edit in order:
        ranks.append((seen[group(edit)], rank(group(edit))))
        seen[group(edit)] += 1
    return [edit for _, edit in sorted(zip(ranks, order), key=lambda pair: pair[0])]


class _Finder(ast.NodeVisitor):
    def __init__(self, path: str, source: str) -> None:
        self.found: list[Edit] = []
        self._path = path
        self._data = source.encode()
        self._lines = [0]
        for line in self._data.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._names: list[str] = []
        self._inside = 0  # functions around

    # ---- where to look ---------------------------------------------------------------------------------------------

    def visit(self, node: ast.AST) -> None:
        if not isinstance(node, _LEFT_ALONE):
            super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in _SKIPPED_FUNCTIONS:
            return
        self._names.append(node.name)
        self._inside += 1
        defaults = [default for default in node.args.kw_defaults if default is not None]
        for part in (*node.args.defaults, *defaults, *node.body):
            self.visit(part)
        self._inside -= 1
        self._names.pop()

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._names.append(node.name)
        for part in node.body:
            self.visit(part)
        self._names.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    # ---- what to change there --------------------------------------------------------------------------------------

    def visit_Compare(self, node: ast.Compare) -> None:
        terms = [node.left, *node.comparators]
        for left, op, right in zip(terms, node.ops, terms[1:]):
            self._operator("comparison", left, right, *_COMPARISONS[type(op)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in _ARITHMETIC and not (_is_text(node.left) or _is_text(node.right)):
            old, new = _ARITHMETIC[type(node.op)]
            self._operator("arithmetic", node.left, node.right, re.escape(old), new)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:]):
            self._operator("boolean", left, right, old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            start = self._start(node)
            match = re.match(rb"not\s*", self._data[start:])
            assert match is not None
            self._add("negation", start, start + match.end(), "")
        self.generic_visit(node)

    def _condition(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if isinstance(node.test, (ast.Name, ast.Call, ast.Attribute, ast.Subscript)):
            self._add("negation", self._start(node.test), self._start(node.test), "not ")

    def visit_If(self, node: ast.If) -> None:
        self._condition(node)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        written = self._text(node)
        if isinstance(node.value, bool):
            self._add("constant", self._start(node), self._end(node), str(not node.value))
        elif type(node.value) is int and written == str(node.value):
            for value in {node.value + 1, abs(node.value - 1)}:
                self._add("constant", self._start(node), self._end(node), str(value))

    def visit_Slice(self, node: ast.Slice) -> None:
        self._bounds([node.lower, node.upper])
        self.generic_visit(node)

    def _bounds(self, nodes: Sequence[ast.expr | None]) -> None:
        for node in nodes:
            if isinstance(node, (ast.Name, ast.Attribute, ast.Call)):
                for step in (" + 1", " - 1"):
                    self._add("off by one", self._end(node), self._end(node), step)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "range":
            self._bounds(node.args[-1:] if len(node.args) == 1 else node.args[:2])
        plain = len(node.args) >= 2 and not any(isinstance(arg, ast.Starred) for arg in node.args[:2])
        if plain and name not in _OF_TYPES:
            first, second = node.args[:2]
            gap = self._data[self._end(first) : self._start(second)].decode()
            if "#" not in gap and "\n" not in gap:
                swapped = self._text(second) + gap + self._text(first)
                self._add("swapped arguments", self._start(first), self._end(second), swapped)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._drop(node)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._drop(node)
        if type(node.op) in _ARITHMETIC and not _is_text(node.value):
            old, new = _ARITHMETIC[type(node.op)]
            self._operator("arithmetic", node.target, node.value, re.escape(f"{old}="), f"{new}=")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if isinstance(node.targets[0], (ast.Attribute, ast.Subscript)):
            self._drop(node)
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add("early end", self._start(node), self._end(node), "break")

    def visit_For(self, node: ast.For) -> None:
        last = node.body[-1]
        if not isinstance(last, (ast.Return, ast.Raise, ast.Break, ast.Continue)):
            indent = " " * node.body[0].col_offset
            self._add("early end", self._end(last), self._end(last), f"\n{indent}break")
        self.generic_visit(node)

    # ---- text ------------------------------------------------------------------------------------------------------

    def _drop(self, node: ast.stmt) -> None:
        if node.lineno == node.end_lineno:
            self._add("dropped statement", self._start(node), self._end(node), "pass")

    def _operator(self, kind: str, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        start = self._end(left)
        gap = self._data[start : self._start(right)].decode()
        found = list(re.finditer(rf"\b{old}\b" if old[0].isalpha() else old, gap))
        if len(found) == 1 and "#" not in gap:
            self._add(kind, start + found[0].start(), start + found[0].end(), new)

    def _add(self, kind: str, start: int, end: int, new: str) -> None:
        if self._inside:
            old = self._data[start:end].decode()
            self.found.append(Edit(self._path, ".".join(self._names), kind, start, end, old, new))

    def _start(self, node: ast.AST) -> int:
        place: ast.expr = node  # type: ignore[assignment]  # expressions and statements alike have a place
        return self._lines[place.lineno - 1] + place.col_offset

    def _end(self, node: ast.AST) -> int:
        place: ast.expr = node  # type: ignore[assignment]
        assert place.end_lineno is not None and place.end_col_offset is not None  # it was parsed
        return self._lines[place.end_lineno - 1] + place.end_col_offset

    def _text(self, node: ast.AST) -> str:
        return self._data[self._start(node) : self._end(node)].decode()


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    )
