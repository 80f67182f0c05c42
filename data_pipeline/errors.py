"""Error that this package raises for mistakes and damage that its user can fix."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTION = "ora-pretrain"


class DataError(ValueError):
    """Bad input or damaged data; the message is one sentence: file, line or option, and the fix."""


class NoTextColumn(DataError):
    """A table has no column that may hold the text."""


@contextlib.contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Turn a failed import into the DataError that `what` needs the extra.

    Args:
        what: the option or file that needs the package.
        extra: the extra of this distribution that installs it.

    Raises:
        DataError: the import failed.
    """
    try:
        yield
    except ImportError as error:
        raise DataError(
            f"{what} needs a package that is not installed ({error}); {how_to_install(extra)}"
        ) from error


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra into the environment this program runs in.

    In a checkout it is the checkout's own extra. Elsewhere it names the extra's packages: this
    program is on no index, so its name there would be that of whoever registers it.
    """
    pip = _pip_install()
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        there = "" if Path.cwd() == checkout else f"cd {shlex.quote(str(checkout))} && "
        return f"{there}{pip} --constraint constraints.txt --editable '.[{extra}]'"
    try:
        return f"{pip} {shlex.join(_packages_of(extra))}"
    except PackageNotFoundError:  # the files were copied, not installed
        return f"{pip} what the extra {extra} in pyproject.toml lists"


def _pip_install() -> str:
    """Return the beginning of a command that installs into this Python's environment."""
    python = sys.executable
    if find_spec("pip") is None:  # an environment that uv made
        return f"uv pip install --python {shlex.quote(python)}"
    first = shutil.which("pip")
    if first and Path(first).parent == Path(python).parent:
        return "pip install"
    return f"{shlex.quote(python)} -m pip install"


def _packages_of(extra: str) -> list[str]:
    """Return the requirements of an extra, and of the extras that it includes.

    Raises:
        PackageNotFoundError: this program is not an installed distribution.
    """
    from packaging.requirements import Requirement

    found: dict[str, None] = {}
    for text in requires(DISTRIBUTION) or ():
        one = Requirement(text)
        if one.marker is None or not one.marker.evaluate({"extra": extra}):
            continue
        if one.name == DISTRIBUTION:
            for included in sorted(one.extras):
                found |= dict.fromkeys(_packages_of(included))
        else:
            found[f"{one.name}{one.specifier}"] = None
    return list(found)
