"""The faults that can be planted in a module, each a change of its syntax tree at one place."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE,),
    ast.LtE: (ast.Lt,),
    ast.Gt: (ast.GtE,),
    ast.GtE: (ast.Gt,),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.FloorDiv,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.BitXor: (ast.BitAnd,),
    ast.MatMult: (ast.Add,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}


@dataclass(frozen=True)
class Change:
    """A fault: `number` counts the faults of a module in the order of its tree."""

    number: int
    line: int
    function: str
    before: str
    after: str


def changes(source: str) -> list[Change]:
    """Every fault that can be planted in a module."""
    return [change for change, _ in _planted(ast.parse(source))]


def planted(source: str, number: int) -> ast.Module:
    """The tree of the module with that fault."""
    tree = ast.parse(source)
    for change, plant in _planted(tree):
        if change.number == number:
            plant()
            return ast.fix_missing_locations(tree)
    raise ValueError(f"there is no fault {number}")


def _planted(tree: ast.Module) -> Iterator[tuple[Change, Callable[[], None]]]:
    """Each fault, and what plants it in this tree."""
    number = 0
    for function, parent, field, place, node in _places(tree, ""):
        for other in _others(node, field):
            plant = partial(_replace, parent, field, place, other)
            number += 1
            shown = parent if isinstance(node, (ast.operator, ast.cmpop, ast.boolop)) else node
            after = copy.deepcopy(shown)
            if shown is parent:
                _replace(after, field, place, other)
            else:
                after = other
            line = getattr(node, "lineno", getattr(parent, "lineno", 0))
            if isinstance(parent, ast.Compare) and isinstance(node, ast.cmpop):
                line = parent.comparators[place or 0].lineno
            texts = [
                ast.unparse(ast.fix_missing_locations(copy.deepcopy(each)))
                for each in (shown, after)
            ]
            yield Change(number, line, function, texts[0], texts[1]), plant


def _replace(parent: ast.AST, field: str, place: int | None, other: ast.AST) -> None:
    if place is None:
        setattr(parent, field, other)
    else:
        getattr(parent, field)[place] = other


def _places(
    node: ast.AST, function: str
) -> Iterator[tuple[str, ast.AST, str, int | None, ast.AST]]:
    """(function around it, parent, field, place in the field, node), without types, texts and docstrings."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_params", "format_spec") or _is_for_types(
            node, field
        ):
            continue
        children = value if isinstance(value, list) else [value]
        for place, child in enumerate(children):
            if not isinstance(child, ast.AST):
                continue
            inner = function
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inner = f"{function}.{child.name}".lstrip(".")
            yield inner, node, field, place if isinstance(value, list) else None, child
            yield from _places(child, inner)


def _is_for_types(node: ast.AST, field: str) -> bool:
    """Whether a field matters to readers and type checkers only."""
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return True
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("cast", "TypeVar", "field"):
        return True
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("__all__", "__slots__"):
        return True
    is_class = isinstance(node, (ast.ClassDef, ast.FunctionDef)) and field == "decorator_list"
    return is_class or (isinstance(node, ast.Subscript) and _is_type(node.value))


def _is_type(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in (
        "Mapping",
        "Sequence",
        "Callable",
        "dict",
        "list",
    )


def _others(node: ast.AST, field: str) -> Iterator[ast.AST]:
    """What may stand in place of a node."""
    for other in OPERATORS.get(type(node), ()):
        yield other()
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.copy_location(ast.Constant(not node.value), node)
        elif isinstance(node.value, (int, float)):
            yield ast.copy_location(ast.Constant(node.value + 1), node)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node.operand
    elif isinstance(node, (ast.If, ast.IfExp, ast.While)):
        if not (isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)):
            other = copy.copy(node)
            other.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
            yield other
    elif isinstance(node, ast.Break):
        yield ast.copy_location(ast.Continue(), node)
    elif isinstance(node, ast.Continue):
        yield ast.copy_location(ast.Break(), node)
    elif isinstance(node, (ast.Raise, ast.AugAssign)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield ast.copy_location(ast.Pass(), node)
