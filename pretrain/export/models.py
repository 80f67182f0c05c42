"""Model directories of transformers: identity, loading, the refusal to run their code unasked."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from data_pipeline.errors import how_to_install
from data_pipeline.io.files import MOST_BYTES, open_regular, read_regular
from pretrain.errors import UserError

# Pickled weights could run code; only safetensors is read.
WEIGHTS = ("*.safetensors",)
_CONTENT = (*WEIGHTS, "*.json", "*.model", "*.txt", "*.py")
"""Files that decide the outputs of a model: weights, configuration, tokenizer, code."""
FACTS = "export.json"
"""File of an export that says where the model comes from; the outputs do not depend on it."""
FILES_FACT = "files"
"""Key of FACTS with the SHA-256 of every other file."""
CHECKPOINT_FACT = "checkpoint_sha256"
"""Key of FACTS with the SHA-256 of the checkpoint's marker, which has that of every file there."""
_TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model", "vocab.txt")
"""Files of a tokenizer; without any of them transformers makes a tokenizer that knows no text."""
_AUTO_MAP = "auto_map"
_IMPLEMENTATION = "implementation"
"""Key, and end of keys, by which a configuration makes transformers run code, also the hub's."""


def model_digest(directory: Path) -> str:
    """Return the SHA-256 of all files that decide the outputs of a model.

    Raises:
        UserError: a file cannot be read.
    """
    digest = hashlib.sha256()
    for path in sorted({path for kind in _CONTENT for path in directory.glob(kind)}):
        if path.name != FACTS:
            digest.update(path.name.encode() + b"\0")
            with _reading(path), open_regular(path) as file:
                while block := file.read(1 << 20):
                    digest.update(block)
    return digest.hexdigest()


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{file} cannot be read: {reason}") from error


def require_trust(directory: Path, trusted: bool) -> None:
    """Refuse a model directory with code of its own, unless the user trusts that code.

    Args:
        trusted: Whether the user has said so.

    Raises:
        UserError: there is code that is not trusted.
    """
    if trusted:
        return
    if code := sorted(directory.rglob("*.py")):
        raise UserError(
            f"{directory} has code of its own, {code[0].name}: read it, then give --trust-code"
        )
    for file, key, value in named_code(directory):
        if key != _AUTO_MAP:  # which transformers ignores unless it is told to trust code
            raise UserError(
                f"{file} has {key}={value}, code of the hub: read it, then give --trust-code"
            )


def named_code(directory: Path) -> Iterator[tuple[Path, str, Any]]:
    """Yield where a configuration names code to run, in the directory or on the hub.

    Yields:
        File, key and value.

    Raises:
        UserError: a file cannot be read.
    """
    for file in sorted(directory.glob("*config.json")):
        with _reading(file):
            content = json.loads(read_regular(file))
        for key, value in content.items() if isinstance(content, dict) else ():
            if key == _AUTO_MAP or (key.endswith(_IMPLEMENTATION) and "/" in str(value)):
                yield file, key, value


def require_transformers(verb: str) -> None:
    """Import transformers with its progress bars and warnings switched off.

    Args:
        verb: The verb that needs transformers, for the message.

    Raises:
        UserError: transformers is not installed.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    _make_room_for_code()
    from megatron_patches.engine.compat import quiet_extension_lookup

    quiet_extension_lookup()
    try:
        from transformers.utils import logging
    except ImportError as error:
        raise UserError(
            f"{verb} needs the package transformers ({error}): {how_to_install('export')}"
        ) from error
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _make_room_for_code() -> None:
    """Give transformers a directory for a model's own code where its cache cannot be written.

    It copies the code there before it imports it, also for a model that was just written.
    """
    name = "HF_MODULES_CACHE"
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.path.expanduser(os.environ.get(name, f"{home}/modules")))
    try:
        cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()
    except OSError:
        os.environ[name] = tempfile.mkdtemp(prefix="ora_modules_")
        atexit.register(shutil.rmtree, os.environ[name], ignore_errors=True)


@contextmanager
def loading(directory: Path) -> Iterator[None]:
    """Turn every error of transformers and its readers about a directory into one sentence.

    Raises:
        UserError: transformers raised an error, or a file in the directory is not a regular one.
    """
    for path in sorted({path for kind in _CONTENT for path in directory.glob(kind)}):
        with _reading(path):
            open_regular(path, None if path.suffix == ".safetensors" else MOST_BYTES).close()
    try:
        yield
    # transformers, tokenizers and safetensors raise types of all kinds for a damaged file.
    except Exception as error:
        reason = " ".join(str(error).split())[:500]
        if not isinstance(error, (OSError, ValueError, RuntimeError, SafetensorError)):
            reason = (
                f"a file there holds what it does not expect ({type(error).__name__}: {reason}); "
                "restore the model's files"
            )
        raise UserError(f"transformers cannot load {directory}: {reason}") from error


def read_language_model(directory: Path, trusted: bool, dtype: Any) -> Any:
    """Load a causal language model on the CPU.

    Args:
        trusted: Whether code in the directory may run.
        dtype: Type of the weights; "auto": the type in the files.

    Raises:
        UserError: transformers cannot load it, or a weight is missing.
    """
    from transformers import AutoModelForCausalLM

    with loading(directory):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(directory),
            dtype=dtype,
            trust_remote_code=trusted,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    model, info = loaded
    refuse_missing(directory, info["missing_keys"])
    return model


def refuse_missing(directory: Path, names: Collection[str]) -> None:
    """Refuse a model without some of its weights, which transformers would fill with random ones.

    Raises:
        UserError: weights are missing.
    """
    if names:
        raise UserError(
            f"{directory} has no weight {min(names)}; restore its files, or export the run again"
        )


def require_tokenizer(directory: Path) -> None:
    """Refuse a model directory without a tokenizer.

    Raises:
        UserError: there is no tokenizer.
    """
    if not any((directory / name).is_file() for name in _TOKENIZERS):
        raise UserError(
            f"{directory} has no tokenizer ({_TOKENIZERS[0]}): put the model's own there"
        )


def read_tokenizer(directory: Path, trusted: bool) -> Any:
    """Load the tokenizer of a model directory.

    Args:
        trusted: Whether code in the directory may run.

    Raises:
        UserError: there is none, or transformers cannot load it.
    """
    from transformers import AutoTokenizer

    require_tokenizer(directory)
    with loading(directory):
        return AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=trusted, local_files_only=True
        )
