"""Environments with what `pip install '.[EXTRA]'` would put there, of the packages tests run with.

Nothing is copied or fetched: the packages of the tests' own environment are linked.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.ranks import rank_environment

PROGRAM = "ora-pretrain"


class Environment:
    """A virtual environment without pip, at first with Python's own modules only.

    Attributes:
        programs: its directory of programs.
        packages: its directory of packages.
    """

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-m", "venv", "--without-pip", directory]
        subprocess.run(command, check=True, timeout=100)
        scheme = "posix_prefix"  # of a virtual environment: Python 3.10 has no scheme "venv"
        base = {"base": str(directory), "platbase": str(directory)}
        paths = sysconfig.get_paths(scheme, vars=base)
        self.programs = Path(paths["scripts"])
        self.packages = Path(paths["purelib"])

    def install(self, *extras: str) -> None:
        """Link what the program needs, with these extras, but not the program."""
        for name in needed(PROGRAM, frozenset(extras)):
            package = distribution(name)
            parts = {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}
            for part in parts:
                link = self.packages / part
                if not link.exists():  # packages may share a directory
                    link.symlink_to(package.locate_file(part))
            for script in package.entry_points.select(group="console_scripts"):
                self._write_program(script.name, script.value)

    def install_checkout(self, checkout: Path) -> None:
        """Do what `pip install --editable` does with the program itself."""
        (self.packages / "checkout.pth").write_text(f"{checkout}\n")
        self._write_program(PROGRAM, "pretrain.__main__:main")

    def _write_program(self, name: str, function: str) -> None:
        module, _, attribute = function.partition(":")
        program = self.programs / name
        program.write_text(
            f"#!{self.programs / 'python'}\nimport sys\n"
            f"from {module} import {attribute}\nsys.exit({attribute}())\n"
        )
        program.chmod(0o755)

    def run(
        self, command: str | list[str], where: Path, timeout: float = 500
    ) -> subprocess.CompletedProcess[str]:
        """Run a command with this environment active.

        Args:
            command: a line of the shell, or words.
            where: directory to run it in.
            timeout: seconds.
        """
        environment = rank_environment()
        environment.pop("PYTHONPATH", None)
        environment["PATH"] = f"{self.programs}:{environment['PATH']}"
        return subprocess.run(
            command,
            shell=isinstance(command, str),
            cwd=where,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )


def needed(name: str, extras: frozenset[str] = frozenset()) -> set[str]:
    """Return the packages that one needs, directly or not, without the program.

    Args:
        name: of the package.
        extras: of it.
    """
    packages: set[str] = set()
    waiting = [(name, extras)]
    seen = set(waiting)
    while waiting:
        package, chosen = waiting.pop()
        try:
            lines = requires(package) or ()
        except PackageNotFoundError:  # of another platform, or replaced by another build
            continue
        if package != PROGRAM:
            packages.add(package)
        for line in map(Requirement, lines):
            marked = [{"extra": extra} for extra in ("", *chosen)]
            if line.marker is None or any(map(line.marker.evaluate, marked)):
                dependency = (canonicalize_name(line.name), frozenset(line.extras))
                if dependency not in seen:
                    seen.add(dependency)
                    waiting.append(dependency)
    return packages
