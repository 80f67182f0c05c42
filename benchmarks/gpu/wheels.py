"""The packages that a GPU machine without a network needs beside Python and torch, as wheels.

    python -m benchmarks.gpu.wheels --python 3.12 --out build/gpu-wheels

At the versions of constraints.txt, for Linux on x86-64. torch is the machine's own, with all that
it brings. Left out is what training does not import: plots (matplotlib, scipy), downloads
(huggingface_hub), parquet (pyarrow), and what only makes tokenizing faster (gigatoken). DeepSpeed
has no wheels: one is made here, without its compiled operations, none of which is used.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FROM_SOURCE = "deepspeed"
OURS = (
    "deepspeed",
    "megatron-core",
    "numpy",
    "orjson",
    "protobuf",
    "psutil",
    "pydantic",
    "pyyaml",
    "rich",
    "safetensors",
    "sentencepiece",
    "tensorboard",
    "threadpoolctl",
    "typer",
    "zstandard",
)
"""What is imported by training and by making the demo's shards."""
THEIRS = (
    "absl-py",
    "annotated-doc",
    "annotated-types",
    "click",
    "einops",
    "hjson",
    "markdown-it-py",
    "mdurl",
    "msgpack",
    "ninja",
    "packaging",
    "py-cpuinfo",
    "pydantic-core",
    "pygments",
    "setuptools",
    "shellingham",
    "six",
    "tqdm",
    "typing-extensions",
    "typing-inspection",
)
"""What those import in turn, and torch does not bring."""
GLIBC = ("2_17", "2_24", "2_27", "2_28", "2_31", "2_34", "2_35")
PLATFORMS = [
    *(f"manylinux_{version}_x86_64" for version in GLIBC),
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
]
"""pip takes wheels of exactly these, so each has to be named."""


def main() -> None:
    """Make the directory of wheels anew; exit with an error if one is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="a directory of wheels alone; made anew"
    )
    parser.add_argument("--python", default="3.12", help="of the GPU machine")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    download([*OURS, *THEIRS], arguments.python, arguments.out)
    build(FROM_SOURCE, arguments.out)
    wheels = sorted(arguments.out.glob("*.whl"))
    missing = {*map(plain, [*OURS, *THEIRS])} - {
        plain(wheel.name.split("-")[0]) for wheel in wheels
    }
    if missing:
        sys.exit(f"error: no wheel came for {', '.join(sorted(missing))}")
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {size / 1e6:.1f} MB, in {arguments.out}")


def download(names: list[str], python: str, out: Path) -> None:
    """Download wheels for another Python than this one, none of them built.

    Args:
        names: of packages; the one from source is left out.
        python: its version, as 3.12.
        out: the directory for the wheels.
    """
    words = [
        "--no-deps",
        "--only-binary=:all:",
        "--implementation",
        "cp",
        "--python-version",
        python,
    ]
    words += [word for platform in PLATFORMS for word in ("--platform", platform)]
    wheels = [name for name in names if name != FROM_SOURCE]
    places = ["--constraint", str(ROOT / "constraints.txt"), "--dest", str(out)]
    _pip("download", *words, *places, *wheels)


def build(name: str, out: Path) -> None:
    """Build a wheel of pure Python from a package's source, at the version installed here.

    Args:
        name: of the package.
        out: the directory for the wheel.
    """
    wanted = f"{name}=={version(name)}"
    words = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(out)]
    _pip("wheel", *words, wanted)
    built = [wheel.name for wheel in out.glob(f"{name}-*.whl")]
    if not built or not built[0].endswith("-py3-none-any.whl"):
        sys.exit(f"error: the wheel of {name} is {built}, but one without compiled parts was meant")


def plain(name: str) -> str:
    """A package's name as names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
    done = subprocess.run(command, env=os.environ | {"DS_BUILD_OPS": "0"})
    if done.returncode:
        sys.exit(f"error: pip {words[0]} ended with {done.returncode}")


if __name__ == "__main__":
    main()
