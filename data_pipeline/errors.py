"""Error that this package raises for mistakes and damage that its user can fix."""

from __future__ import annotations

import shlex
import shutil
import sys
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTION = "ora-pretrain"


class DataError(ValueError):
    """Bad input or damaged data; the message is one sentence: file, line or option, and the fix."""


class NoTextColumn(DataError):
    """Refusal of a table without a column that may hold the text."""


def how_to_install(extra: str) -> str:
    """Return the command that installs an extra into the environment this program runs in.

    In a checkout, the command installs the checkout's own extra. Elsewhere it names the extra's
    packages: this program is on no index, where its name would be that of whoever registers it.
    """
    pip = _pip_install()
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        change_directory = "" if Path.cwd() == checkout else f"cd {shlex.quote(str(checkout))} && "
        return f"{change_directory}{pip} --constraint constraints.txt --editable '.[{extra}]'"
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

    requirements: dict[str, None] = {}
    for text in requires(DISTRIBUTION) or ():
        requirement = Requirement(text)
        if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
            continue
        if requirement.name == DISTRIBUTION:
            for included in sorted(requirement.extras):
                requirements |= dict.fromkeys(_packages_of(included))
        else:
            requirements[f"{requirement.name}{requirement.specifier}"] = None
    return list(requirements)
