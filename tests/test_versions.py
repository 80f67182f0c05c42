"""What pyproject.toml declares, the constraints pin and the code checks must be one story."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import pretrain
from megatron_patches.engine.compat import (
    TESTED_MEGATRON_CORE,
    TESTED_TORCH,
    check_megatron_core_version,
    quiet_extension_lookup,
    untested_torch,
    without_unused_packages,
)
from megatron_patches.errors import MethodError
from pretrain.ranks.groups import SUPPORTED_DEEPSPEED
from tests.distributed.workers.runs import parallel
from tests.ranks import ROOT, function_on_warm_ranks, run_program

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def declared(*extras: str) -> dict[str, Requirement]:
    """{name: requirement} of the program, and of `extras` and the extras in them."""
    lines = [*project()["dependencies"]]
    for extra in extras:
        lines += project()["optional-dependencies"][extra]
    requirements = [Requirement(line) for line in lines]
    contained = {
        extra
        for requirement in requirements
        if requirement.name == "ora-pretrain"
        for extra in requirement.extras
    }
    direct = {
        canonicalize_name(requirement.name): requirement
        for requirement in requirements
        if requirement.name != "ora-pretrain"
    }
    return declared(*sorted(contained)) | direct if contained else direct


def pinned(name: str) -> dict[str, list[Version]]:
    """{package: versions that a constraints file pins, one for each Python it tells apart}."""
    versions: dict[str, list[Version]] = {}
    for line in (ROOT / name).read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (specifier,) = requirement.specifier
            assert specifier.operator == "==", line
            versions.setdefault(canonicalize_name(requirement.name), []).append(
                Version(specifier.version)
            )
    return versions


def lowest(requirement: Requirement) -> Version:
    (version,) = (item.version for item in requirement.specifier if item.operator == ">=")
    return Version(version)


def release(version: Version) -> tuple[int, ...]:
    """1.15 and 1.15.0 are one version."""
    return (*version.release, 0, 0)[:3]


def test_the_oldest_set_is_the_lowest_of_what_is_declared() -> None:
    wanted = {name: release(lowest(requirement)) for name, requirement in declared("test").items()}
    pins = {
        name: [release(version) for version in versions]
        for name, versions in pinned("constraints-oldest.txt").items()
    }
    assert pins == {name: [version] for name, version in wanted.items()}


EXTRAS = ("test", "dev", "export", "eval", "site")


def test_every_dependency_is_pinned_within_its_range() -> None:
    pins = pinned("constraints.txt")
    for name, requirement in declared(*EXTRAS).items():
        assert pins.get(name), f"constraints.txt does not pin {name}"
        assert all(version in requirement.specifier for version in pins[name]), name


def test_the_code_checks_the_versions_that_are_declared() -> None:
    dependencies = declared()
    oldest, newest = TESTED_TORCH
    assert str(dependencies["torch"].specifier) == f">={oldest}"
    (tested,) = pinned("constraints.txt")["torch"]
    assert Version(oldest) <= tested <= Version(f"{newest}.99")
    oldest, newest = TESTED_MEGATRON_CORE
    assert pinned("constraints.txt")["megatron-core"] == [Version(oldest), Version(newest)]
    for name, first, last in (
        ("deepspeed", SUPPORTED_DEEPSPEED, SUPPORTED_DEEPSPEED),
        ("megatron-core", oldest, newest),
    ):
        major, minor = map(int, last.split(".")[:2])
        assert str(lowest(dependencies[name])).startswith(first)
        assert f"<{major}.{minor + 1}" in str(dependencies[name].specifier)


def test_every_python_that_is_declared_is_named() -> None:
    pythons = {
        line.rsplit(" ", 1)[1] for line in project()["classifiers"] if " :: Python :: 3." in line
    }
    assert pythons == {"3.10", "3.11", "3.12", "3.13"}
    assert project()["requires-python"] == ">=3.10"


def test_a_megatron_core_outside_the_tested_range_is_refused() -> None:
    check_megatron_core_version()
    for good in ("0.16.1", "0.17.0rc1", "0.18.2", "0.19.2", "0.19.9"):
        check_megatron_core_version(good)
    for bad in ("0.15.3", "0.20.0", "1.0.0"):
        refusal = rf"megatron-core {bad} is installed .* 0\.16\.1 to 0\.19\.2"
        with pytest.raises(MethodError, match=refusal):
            check_megatron_core_version(bad)


def test_a_torch_is_used_or_warned_of_or_refused_by_its_version() -> None:
    for tested in ("2.9.0", "2.9.0a0+145a3a7bda.nv25.10", "2.11.0+cu130", "2.13.0+cpu", "2.15.3"):
        assert untested_torch(tested) is None
    for newer in ("2.16.0", "3.0.0.dev20270101+cu140"):
        warning = untested_torch(newer)
        assert warning is not None and "torch 2.9 to 2.15" in warning and newer in warning
    refusal = r"torch 2\.8\.0\+cu128 is installed .* install torch 2\.9 or newer"
    with pytest.raises(MethodError, match=refusal):
        untested_torch("2.8.0+cu128")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, which must succeed."""
    command = [sys.executable, *arguments]
    done = run_program(command)
    assert done.returncode == 0, done.stderr
    return done


def rank_of_a_newer_torch(payload: dict[str, Any]) -> None:
    """Join the other ranks with a torch that is taken for a newer one than it is."""
    untested_torch.__defaults__ = ("2.99.0",)  # torch's own, when the module was imported
    with parallel():
        pass


@pytest.mark.distributed
def test_a_rank_warns_in_one_line_and_continues() -> None:
    done = function_on_warm_ranks(2, "tests.test_versions:rank_of_a_newer_torch", {})
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert lines == ["warning: this program was tested with torch 2.9 to 2.15; 2.99.0 is newer"]


def test_the_version_has_one_owner_and_is_printed() -> None:
    assert "version" in project()["dynamic"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", pretrain.__version__)
    (line,) = run("-m", "pretrain", "--version").stdout.splitlines()
    python = sys.version.split()[0]
    assert line.startswith(f"ora-pretrain {pretrain.__version__} (Python {python}, torch 2.")


def test_a_build_for_gpus_does_not_say_at_each_start_that_there_is_none() -> None:
    """What else torch's lookup of compilers says is heard."""
    quiet_extension_lookup()
    heard = io.StringIO()
    handler = logging.StreamHandler(heard)
    logger = logging.getLogger("torch.utils.cpp_extension")
    logger.addHandler(handler)
    try:
        logger.warning("No CUDA runtime is found, using CUDA_HOME='%s'", "/usr/local/cuda")
        logger.warning("Error checking compiler version for %s", "c++")
    finally:
        logger.removeHandler(handler)
    assert heard.getvalue() == "Error checking compiler version for c++\n"


def test_megatron_core_starts_without_triton() -> None:
    """From 0.19 on it imports a kernel of experts without asking whether there is Triton."""
    name = "megatron.core.transformer.moe.ops.paged_stash"
    assert name not in sys.modules
    with without_unused_packages():
        assert torch.cuda.is_available() or sys.modules[name].paged_stash_copy_kernel is None
    assert name not in sys.modules
