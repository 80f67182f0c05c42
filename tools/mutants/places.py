"""Where faults are planted: code whose mistakes would be silent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.ranks import ROOT
from tools.mutants.changes import Change, changes

MODULES = (
    *("megatron_patches/bank/*.py", "megatron_patches/attention/*.py"),
    *(f"pretrain/study/{name}.py" for name in ("gaps", "seeds", "sequential")),
    *(f"pretrain/compare/{name}.py" for name in ("compute", "convergence", "trend")),
    *(
        f"pretrain/checkpoint/{name}.py"
        for name in ("blocks", "format", "identity", "loading", "slices", "verify")
    ),
    *(
        f"data_pipeline/shards/{name}.py"
        for name in ("blend", "documents", "mapping", "permutation")
    ),
    *(
        f"data_pipeline/shards/{name}.py"
        for name in ("proportions", "reading", "samples", "writing")
    ),
)
TESTS = (
    *(
        "tests/megatron_patches",
        "tests/pretrain/study",
        "tests/pretrain/compare",
        "tests/pretrain/checkpoint",
    ),
    *("tests/data_pipeline/shards", "tests/data_pipeline/tokenizing"),
    *("tests/fuzz/test_run_files.py", "tests/fuzz/test_shard_files.py"),
)
"""Whose fast tests have to find the faults: those of the same packages."""
_KERNEL = (
    "Triton's kernel, and how it is started: in a process of its own, by test_monarch_kernel.py"
)
LEFT_OUT: dict[str, str] = {
    "megatron_patches/bank/monarch_triton.py": _KERNEL,
    **dict.fromkeys(
        (
            f"megatron_patches/bank/monarch_kernel.py::{name}"
            for name in ("launch", "kernel_constants", "kernel_stages", "_next_power_of_two")
        ),
        _KERNEL,
    ),
}
"""{module, or module::function: why the fast suite does not run it, and which test does}."""


def modules() -> list[Path]:
    """The modules, relative to the checkout."""
    found = [path for pattern in MODULES for path in sorted(ROOT.glob(pattern)) or [ROOT / pattern]]
    paths = [path.relative_to(ROOT) for path in found if path.name != "__init__.py"]
    return [path for path in paths if str(path) not in LEFT_OUT]


def faults() -> Iterator[tuple[Path, Change]]:
    """Every fault of every module."""
    for path in modules():
        for change in changes((ROOT / path).read_text()):
            if f"{path}::{change.function}" not in LEFT_OUT:
                yield path, change
