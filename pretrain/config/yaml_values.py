"""YAML as this program reads and writes it: YAML 1.2's plain values, within limits, one sentence if not.

The limits are far above any configuration. Without them a few lines of aliases could stand for more values
than memory holds, and deep nesting would end in a traceback.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import yaml

MAX_DEPTH = 32
MAX_VALUES = 100_000
MAX_DIGITS = 40
MAX_CHARACTERS = 4096

FLOAT = re.compile(r"^[-+]?(\d[\d_]*\.?\d*|\.\d+)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$")
_PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}


class YamlProblem(ValueError):
    """Text that is not YAML, or more than a configuration may hold; the message completes `the value ...`."""


class _Loader(yaml.SafeLoader):
    """Resolves scalars as YAML 1.2 does; PyYAML's own way is 1.1, where 5e-4 is text and `off` a boolean."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # PyYAML's own way to configure a loader class


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(~|null|Null|NULL|)$"), None)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), None
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9][\d_]*)$"), None)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, None)


class _Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.1 or 1.2 would take for something other than text."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, None)


def parse_yaml(text: str) -> Any:
    """The value of the one document in `text`; None if it is empty.

    Raises:
        YamlProblem: as `compose_yaml` and `construct_yaml`.
    """
    node = compose_yaml(text)
    return None if node is None else construct_yaml(node)


def compose_yaml(text: str) -> yaml.Node | None:
    """The node of the one document in `text`, which knows lines; None if it is empty.

    Raises:
        YamlProblem: not YAML, not plain values, too deep, too many.
    """
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
        finally:
            loader.dispose()
        if node is not None:
            _Limits().check(node)
        return node
    except RecursionError:
        raise YamlProblem(f"nests deeper than {MAX_DEPTH} levels") from None
    except yaml.YAMLError as error:
        raise YamlProblem(f"is not valid YAML: {_problem(error)}") from None


def construct_yaml(node: yaml.Node) -> Any:
    """The value of a node that `compose_yaml` has let pass.

    Raises:
        YamlProblem: a key that is a list or a mapping, or a tag that does not go with its value.
    """
    try:
        return _Loader("").construct_document(node)
    except yaml.YAMLError as error:
        raise YamlProblem(f"is not valid YAML: {_problem(error)}") from None
    except (ValueError, LookupError):  # PyYAML converting, say, `!!bool x`
        raise YamlProblem("is not valid YAML: a tag does not go with its value; write it without") from None


def dump_yaml(values: Mapping[str, Any]) -> str:
    """YAML that `parse_yaml` reads back as the same values, keys in the given order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _problem(error: Exception) -> str:
    """PyYAML's problem in one line, with the line number."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return f"line {mark.line + 1}: {problem}" if mark is not None else problem


class _Limits:
    """Measures what a node stands for once its aliases are written out, each node only once."""

    def __init__(self) -> None:
        self._measured: dict[int, tuple[int, int] | None] = {}

    def check(self, node: yaml.Node) -> tuple[int, int]:
        """(values, levels) of a node.

        Raises:
            YamlProblem: too many, too deep, an alias inside of what it stands for, a tag or text that a
                configuration cannot hold.
        """
        known = self._measured.get(id(node), (0, 0))
        if known is None:
            raise YamlProblem(f"has at line {_line(node)} an alias inside of what it stands for")
        if known != (0, 0):
            return known
        self._measured[id(node)] = None
        if node.tag not in _PLAIN_TAGS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            raise YamlProblem(f"has at line {_line(node)} the tag {tag}; write plain values without it")
        if isinstance(node, yaml.ScalarNode):
            _check_scalar(node)
        inside = [self.check(part) for part in _parts(node)]
        values = 1 + sum(size for size, _ in inside)
        levels = 1 + max((depth for _, depth in inside), default=0)
        if values > MAX_VALUES:
            raise YamlProblem(
                f"has at line {_line(node)} more than {MAX_VALUES:,} values once its aliases are written out"
            )
        if levels > MAX_DEPTH:
            raise YamlProblem(f"nests deeper than {MAX_DEPTH} levels at line {_line(node)}")
        self._measured[id(node)] = values, levels
        return values, levels


def _parts(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _check_scalar(node: yaml.ScalarNode) -> None:
    if any("\ud800" <= character <= "\udfff" for character in node.value):
        raise YamlProblem(f"has at line {_line(node)} half of a surrogate pair, which is no character")
    if len(node.value) > MAX_CHARACTERS:
        raise YamlProblem(f"has at line {_line(node)} a text of more than {MAX_CHARACTERS:,} characters")
    if node.tag.endswith(":int") and len(node.value) > MAX_DIGITS:
        raise YamlProblem(f"has at line {_line(node)} a whole number of more than {MAX_DIGITS} digits")


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
