"""How the code reads: no golf, and docstrings with sections where there is something to tell."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parsed_files import nodes, parsed, python_files
from tests.ranks import ROOT

FOLDERS = (
    "pretrain",
    "laboratory",
    "megatron_patches",
    "data_pipeline",
    "benchmarks",
    "tools",
    "slurm",
    "docs",
    "tests",
)
COMPUTED = (
    ast.Call,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.IfExp,
    ast.BoolOp,
    ast.Compare,
    ast.Lambda,
    ast.JoinedStr,
)
MANY_POSITIONAL = {
    "max",
    "min",
    "zip",
    "print",
    "chain",
    "product",
    "join",
    "joinpath",
    "apply",
    "save_for_backward",
    "Path",
    "add_row",
    "run",
    "update",
    "_flash_attention_forward",
}
"""Functions of any number of equal arguments, such as words of a command line.

`apply` of an autograd.Function takes no keywords, and the arguments of `_flash_attention_forward`
have other names in other versions of torch.
"""

SHAPED = re.compile(r"\b(Tensor|NDArray|FloatArray|ndarray)\b")
"""Types of parameters whose shapes a docstring tells."""

STRANDED = re.compile(r"^ *[\])}]+[:,]?( as \w+:)? +# (?!fmt:|type:)")
"""A comment behind the last bracket of a statement that the formatter has cut for its sake."""


def files() -> list[Path]:
    """The files that the rules hold for."""
    return [path for folder in FOLDERS for path in python_files(ROOT / folder)]


def named(node: ast.expr) -> str:
    """The last name of what is called."""
    return ast.unparse(node).rpartition(".")[2]


def golf(node: ast.AST) -> str | None:
    """What is wrong with a node of a syntax tree, in a word or two."""
    match node:
        case ast.Starred(value=ast.Tuple() | ast.List()):
            return "star-packing"
        case ast.Expr(value=ast.Tuple()):
            return "tuple as a statement"
        case ast.Assign(value=ast.Lambda()) | ast.AnnAssign(value=ast.Lambda()):
            return "lambda kept in a name"
        case ast.Assign(targets=targets, value=ast.Tuple(elts=values)):
            several = any(isinstance(target, ast.Tuple) for target in targets)
            inner = (child for value in values for child in ast.walk(value))
            if several and any(isinstance(child, COMPUTED) for child in inner):
                return "tuple assignment of computed values"
        case ast.Call(func=function, args=arguments) if len(arguments) > 4:
            positional = sum(not isinstance(argument, ast.Starred) for argument in arguments)
            if positional > 4 and named(function) not in MANY_POSITIONAL:
                return "more than four positional arguments"
    return None


def public_functions(path: Path) -> Iterator[ast.FunctionDef]:
    """The public functions of a module, and the public methods of its public classes."""
    bodies = [parsed(path).body]
    while bodies:
        for node in bodies.pop():
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bodies.append(node.body)
            elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                yield node


def without_sections(function: ast.FunctionDef) -> str | None:
    """What the docstring of a public function lacks."""
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    # A verb's docstring is its help, and a redefinition has that of what it redefines.
    if any(".command" in text or ".callback" in text or text == "override" for text in decorators):
        return None
    docstring = ast.get_docstring(function) or ""
    if "Example: python -m " in docstring:  # a verb that is made one elsewhere
        return None
    arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    if any(arg.annotation and "typer." in ast.unparse(arg.annotation) for arg in arguments):
        return None
    shaped = {
        argument.arg
        for argument in arguments
        if argument.annotation and SHAPED.search(ast.unparse(argument.annotation))
    }
    if len(shaped) >= 2 and "Args:" not in docstring and "`[" not in docstring:
        return "Args"
    raised = [node for node in ast.walk(function) if isinstance(node, ast.Raise)]
    users = [node for node in raised if node.exc is not None and _is_users_error(node.exc)]
    if users and "Raises:" not in docstring:
        return "Raises"
    return None


def _is_users_error(raised: ast.expr) -> bool:
    called = raised.func if isinstance(raised, ast.Call) else raised
    return named(called) in ("UserError", "MethodError", "DataError", "DamagedCheckpoint")


def test_code_is_not_golf() -> None:
    violations = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {wrong}"
        for path in files()
        for node in nodes(path)
        if (wrong := golf(node))
    ]
    assert violations == []


@pytest.mark.parametrize(
    "text",
    [
        "f(*(a, b), c)",
        "f(a), g(b)",
        "key = lambda row: row[0]",
        "first, second = f(a), g(b)",
        "f(a, b, c, d, e)",
    ],
)
def test_golf_is_seen(text: str) -> None:
    assert any(map(golf, ast.walk(ast.parse(text))))


@pytest.mark.parametrize("text", ["a, b = b, a", "a, b = f(c)", "f(a, b, c, d, e=1)", "f(*rows)"])
def test_plain_code_is_not_golf(text: str) -> None:
    assert not any(map(golf, ast.walk(ast.parse(text))))


def test_a_comment_stands_above_a_statement_that_it_is_too_long_for() -> None:
    violations = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if STRANDED.match(line)
    ]
    assert violations == []
    assert STRANDED.match("    )  # far from what it is about")


def test_public_docstrings_have_sections() -> None:
    violations = [
        f"{path.relative_to(ROOT)}:{function.lineno}: {function.name} lacks {missing}"
        for path in files()
        if path.relative_to(ROOT).parts[0] not in ("tests", "docs")
        for function in public_functions(path)
        if (missing := without_sections(function))
    ]
    assert violations == []
