"""Readers of the files that describe a run; every key they read exists and has its type."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from data_pipeline.io.files import read_regular
from data_pipeline.io.forms import Count, parse_json, problem
from pretrain.errors import UserError
from pretrain.runs.environment import STARTED


class _KeysOnce:
    """A loader that refuses repeated keys, of which PyYAML takes the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [str(key.value) for key, _ in node.value]
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.YAMLError(f"it has the key {twice!r} twice")
        return super().construct_mapping(node, deep)  # type: ignore[misc]


class _Loader(_KeysOnce, yaml.SafeLoader):
    """PyYAML's own parser."""


class _FastLoader(_KeysOnce, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """libyaml's parser if PyYAML was built with it; several times as fast."""


YAML_ERRORS = (
    yaml.YAMLError,
    RecursionError,
    ArithmeticError,  # "\UFFFFFFFF"
    AttributeError,  # !!timestamp x
    LookupError,  # !!bool x
    ValueError,
)
"""Exceptions of PyYAML for a text that is not YAML, or whose values do not fit their tags."""

# Characters: libyaml has no limit of depth, and a longer text can overflow its stack.
_SHALLOW = 1 << 14

LARGEST_YAML = 1 << 18
"""Maximum characters of a file of settings; a few thousand are usual, and the parser is slow."""

_Positive = Annotated[Count, Field(ge=1)]
_Loss = Annotated[float, Field(gt=-1e100, lt=1e100)] | None
_Perplexity = Annotated[float, Field(gt=0, lt=1e150)]
_Time = Annotated[str, AfterValidator(lambda text: datetime.strptime(text, STARTED))]


class _Was(TypedDict):
    was: Any


def _judged(changes: dict[str, _Was]) -> dict[str, _Was]:
    TypeAdapter(_Positive).validate_python(
        changes.get("telemetry.every", {"was": 1})["was"], strict=True
    )
    return changes


class _Origin(TypedDict, total=False):
    """Entries of environment.json about the last start, and about each start in `segments`."""

    device: str | None
    cpu_kernels: str | None
    host: str | None
    git_commit: str | None
    started: _Time
    tensor_model_parallel_size: _Positive


class _Trunk(TypedDict, total=False):
    started: _Time | None


class Segment(_Origin):
    """A start of a run in environment.json.

    `data_changes` says how the data differ from those before; `lost` names files that were missing
    or damaged; `seals` has the SHA-256 of each seal beside the run, and is not there if an older
    version started it.
    """

    first_step: _Positive
    changes: Annotated[dict[str, _Was], AfterValidator(_judged)]
    data_changes: NotRequired[list[str]]
    lost: NotRequired[list[str]]
    seals: NotRequired[list[str]]
    branched_from: NotRequired[_Trunk]


class _Environment(_Origin):
    python: NotRequired[str]
    packages: NotRequired[dict[str, str | None]]
    world_size: _Positive
    segments: NotRequired[list[Segment]]


def _form(keys: Mapping[str, Any]) -> Any:
    """Return the type of a mapping with these keys, and any others."""
    fields = {key: _form(form) if isinstance(form, dict) else form for key, form in keys.items()}
    return TypedDict("Form", fields)  # type: ignore[operator]


_FORMS = {
    "config": {
        "run": {"name": str, "seed": int},
        "model": {
            **dict.fromkeys(
                ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"), _Positive
            ),
            "position_embedding": str,
        },
        "attention": {"variant": str, "adapters": NotRequired[list[str] | None]},
        "optimizer": {"learning_rate": Annotated[float, Field(gt=0, lt=1e100)]},
        "schedule": {
            "warmup_steps": NotRequired[Count],
            "steps": NotRequired[_Positive | None],
            "flops": NotRequired[int | None],
        },
        "data": {"sequence_length": _Positive, "validation_samples": _Positive},
        "telemetry": {"every": _Positive},
    },
    "data": {
        "fingerprint": str,
        "validation_tokens": dict[str, _Positive],
        "validation_bytes": NotRequired[dict[str, Count]],
        "unigram_perplexity": _Perplexity,
    },
    "audit": {
        "zero_stage": Annotated[int, Field(ge=0, le=3)],
        "totals": {
            **dict.fromkeys(("model_trainable_parameters", "model_frozen_parameters"), Count),
            **dict.fromkeys(("trainable_bytes", "frozen_bytes", "gradient_bytes"), Count),
            "optimizer_state_bytes": Count,
        },
    },
    "summary": {
        **dict.fromkeys(("step", "tokens"), _Positive),
        "samples": NotRequired[_Positive],
        "loss": NotRequired[_Loss],
        "validation": {
            "loss": _Loss,
            "perplexity": _Perplexity | None,
            "perplexity_by_source": dict[str, _Perplexity | None],
        },
    },
    "export": {
        **dict.fromkeys(("run", "variant", "model"), str),
        "seed": int,
        "step": Count,
        "attention": {"adapters": NotRequired[list[str] | None]},
        "parameters": {"trainable": Count},
        "sequence_length": _Positive,
        "data": {"fingerprint": str},
        "frozen_rows": dict[str, list[Annotated[list[Count], Field(min_length=2, max_length=2)]]],
        "folded": NotRequired[list[str]],
        "files": NotRequired[dict[str, str]],
        "checkpoint_sha256": NotRequired[str],
    },
    "checkpoint": {
        "keys": dict[str, Any],
        "position": {
            "step": Count,
            **dict.fromkeys(("consumed_samples", "consumed_tokens"), NotRequired[Count]),
        },
    },
}
"""{file without suffix: {key: type, or a mapping of keys}} for the keys that are read; a file may
have others."""


@cache
def _adapter(stem: str) -> TypeAdapter[Any]:
    return TypeAdapter(_form(_FORMS[stem]) if stem in _FORMS else _Environment)


def read_facts(path: Path) -> dict[str, Any]:
    """Read a file that describes a run: config.yaml, or a JSON file of `_FORMS`.

    Raises:
        UserError: the file is missing or damaged, or a key is missing or has the wrong type.
    """
    return read_form(path, _adapter(path.stem))


def read_form(path: Path, form: TypeAdapter[Any]) -> dict[str, Any]:
    """Read a YAML or JSON file and check its content against a form.

    Args:
        form: Form of the keys that are read; the file may have others.

    Raises:
        UserError: as `read_facts`.
    """
    if not path.is_file():
        raise UserError(f"{path} is missing: the run's directory is incomplete; restore the file")
    content = _content(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} does not hold a mapping of keys to values; restore the file")
    try:
        form.validate_python(content, strict=True)
    except ValidationError as error:
        missing = error.errors()[0]["type"] == "missing"
        remedy = "run again" if missing else "restore the file"
        raise UserError(f"{problem(path, error)}; {remedy}") from None
    return content


def _content(path: Path) -> Any:
    """Parse a YAML or JSON file, or refuse it in one sentence."""
    try:
        text = read_regular(path).decode()
        if path.suffix != ".yaml":
            return parse_json(text)
        if len(text) > LARGEST_YAML:
            raise ValueError(f"it is longer than {LARGEST_YAML:,} characters")
        return yaml.load(text, _FastLoader if len(text) < _SHALLOW else _Loader)
    except (OSError, *YAML_ERRORS) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise UserError(f"{path} cannot be read ({reason}); restore the file") from error
