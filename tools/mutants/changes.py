"""The faults that can be planted in a module, each a change of its syntax tree at one place."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

EXCHANGED: tuple[tuple[type[ast.AST], type[ast.AST]], ...] = (
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
    (ast.Add, ast.Sub),
    (ast.Mult, ast.FloorDiv),
    (ast.LShift, ast.RShift),
    (ast.BitAnd, ast.BitOr),
    (ast.And, ast.Or),
)
OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    **dict(EXCHANGED),
    **{other: one for one, other in EXCHANGED},
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitXor: ast.BitAnd,
    ast.MatMult: ast.Add,
}
TYPES = ("Mapping", "Sequence", "Callable", "dict", "list")


@dataclass(frozen=True)
class Change:
    """A fault.

    Attributes:
        number: Counts the faults of a module, from 1, in the order of its tree.
        line: Where it is.
        function: Names of the classes and functions around it, joined by dots.
        before: The code as it is.
        after: The code with the fault.
    """

    number: int
    line: int
    function: str
    before: str
    after: str


def changes(source: str) -> list[Change]:
    """Return every fault that can be planted in a module."""
    return [change for change, _ in _plantable(ast.parse(source))]


def planted(source: str, number: int) -> ast.Module:
    """Return the tree of a module with one fault.

    Args:
        source: The module's text.
        number: Of the fault, as `changes` counts them.
    """
    tree = ast.parse(source)
    plant = next(plant for change, plant in _plantable(tree) if change.number == number)
    plant()
    return ast.fix_missing_locations(tree)


def _plantable(tree: ast.Module) -> Iterator[tuple[Change, Callable[[], None]]]:
    """Yield each fault, and what plants it in this tree."""
    number = 0
    for function, parent, field, place, node in _places(tree, ""):
        other = _other(node)
        if other is None:
            continue
        number += 1
        # Of an operator the expression around it is shown.
        is_operator = isinstance(node, ast.operator | ast.cmpop | ast.boolop)
        shown = parent if is_operator else node
        after = copy.deepcopy(parent) if is_operator else other
        if is_operator:
            _replace(after, field, place, other)
        line = getattr(node, "lineno", getattr(parent, "lineno", 0))
        if isinstance(parent, ast.Compare) and isinstance(node, ast.cmpop):
            line = parent.comparators[place or 0].lineno
        change = Change(number, line, function, before=_text(shown), after=_text(after))
        yield change, partial(_replace, parent, field, place, other=other)


def _text(node: ast.AST) -> str:
    return ast.unparse(ast.fix_missing_locations(copy.deepcopy(node)))


def _replace(parent: ast.AST, field: str, place: int | None, other: ast.AST) -> None:
    if place is None:
        setattr(parent, field, other)
    else:
        getattr(parent, field)[place] = other


def _places(
    node: ast.AST, function: str
) -> Iterator[tuple[str, ast.AST, str, int | None, ast.AST]]:
    """Yield (function around, parent, field, place in it, node), but of types and docstrings."""
    for field, value in ast.iter_fields(node):
        if _matters_to_readers_only(node, field):
            continue
        for place, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST):
                continue
            inner = function
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = f"{function}.{child.name}".lstrip(".")
            yield inner, node, field, place if isinstance(value, list) else None, child
            yield from _places(child, inner)


def _matters_to_readers_only(node: ast.AST, field: str) -> bool:
    """Return whether a field is about types, or text."""
    if field in ("annotation", "returns", "type_params", "format_spec"):
        return True
    if isinstance(node, ast.If):
        return "TYPE_CHECKING" in ast.unparse(node.test)
    if isinstance(node, ast.Call):
        return ast.unparse(node.func) in ("cast", "TypeVar", "field")
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) in ("__all__", "__slots__")
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Name) and node.value.id in TYPES
    return isinstance(node, ast.ClassDef | ast.FunctionDef) and field == "decorator_list"


def _other(node: ast.AST) -> ast.AST | None:
    """Return what may stand in place of a node."""
    if type(node) in OPERATORS:
        return OPERATORS[type(node)]()
    other: ast.AST | None = None
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        other = ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        other = ast.Constant(node.value + 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        return node.operand
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        if not (isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)):
            inverted = copy.copy(node)
            inverted.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
            return inverted
    elif isinstance(node, ast.Break | ast.Continue):
        other = ast.Continue() if isinstance(node, ast.Break) else ast.Break()
    elif isinstance(node, ast.Raise | ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        other = ast.Pass()
    return None if other is None else ast.copy_location(other, node)
