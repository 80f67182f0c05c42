"""Check a release as a newcomer would: sdist and wheel, in empty environments, do what pages say.

    python -m tools.release python3.10 python3.13          # `make release-check`

For each Python: the wheel with the extra `compare` under constraints.txt and the CPU build of
torch, then `demo`, and `try` on the pages of docs; and `compare-losses` where there is no torch. A
line for each step, with its seconds. What fails, and a library's warning, ends the check with exit
code 1.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WITHOUT_TORCH = (
    "numpy",
    "scipy",
    "matplotlib",
    "tensorboard",
    "pydantic",
    "PyYAML",
    "typer",
    "rich",
    "safetensors",
    "zstandard",
    "threadpoolctl",
)
"""What compare-losses needs beside the program itself."""
SHORT = ("--set=schedule.steps=20", "--set=schedule.warmup_steps=4")
LOSSES = "name,seed,loss\nmain,1,3.31\nmain,2,3.29\nmine,1,3.30\nmine,2,3.28\n"


def build(out: Path) -> tuple[Path, Path]:
    """Build the sdist from what git tracks, and from the sdist the wheel.

    Args:
        out: Directory to make; it also gets the copy that is built, since a build litters it.

    Returns:
        Paths of sdist and wheel.
    """
    source = out / "source"
    listed = run(["git", "-C", str(ROOT), "ls-files", "-z"])
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    backend = f"from setuptools import build_meta as b; b.build_sdist({str(out.resolve())!r})"
    run([sys.executable, "-c", backend], where=source)
    (sdist,) = out.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    run([*pip, "--no-build-isolation", "--wheel-dir", str(out), str(sdist)])
    (wheel,) = out.glob("*.whl")
    return sdist, wheel


def run(command: Sequence[str], where: Path = ROOT.parent) -> str:
    """Run a command; if it fails, exit with its output.

    Args:
        where: Directory to run it in.

    Returns:
        What it printed, on both streams.
    """
    done = subprocess.run(
        command,
        cwd=where,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nexit code {done.returncode}: {shlex.join(command)}")
    return done.stdout


def run_program(program: Path, words: Sequence[str], where: Path) -> str:
    """Run the installed program; a library's warning counts as a failure.

    Args:
        words: Verb and arguments.
        where: Directory to run it in.

    Returns:
        The last line that it printed.
    """
    output = run([str(program), *words], where)
    if warned := re.search(r"^.*(Warning:|WARNING|No CUDA|cpp_extension).*$", output, flags=re.M):
        sys.exit(f"a newcomer sees: {warned.group()}\nfrom: {shlex.join(words)}")
    return output.splitlines()[-1]


def install(python: str, environment: Path, words: Sequence[str]) -> str:
    """Install packages into an environment, made if missing.

    Args:
        python: Interpreter to make it of.
        environment: Directory of the environment.
        words: Arguments of `pip install`.

    Returns:
        How many packages are there then.
    """
    if not environment.exists():
        run([python, "-m", "venv", str(environment)])
    pip = [str(environment / "bin/python"), "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", *words])
    return f"{len(run([*pip, 'list', '--format=freeze']).splitlines())} packages"


def timed(name: str, action: Callable[[], object]) -> None:
    """Carry out a step and print its duration and result.

    Args:
        action: Step to carry out; its result is printed.
    """
    began = time.monotonic()
    result = action()
    print(f"{name:<30} {time.monotonic() - began:6.0f} s   {result}", flush=True)


def check(python: str, wheel: Path, directory: Path, options: argparse.Namespace) -> None:
    """Install the wheel for a Python, and run what a newcomer runs.

    Args:
        python: name or path of the interpreter.
        wheel: Wheel to install.
        directory: Directory to make.
        options: torch_index and short, as on the command line.
    """
    directory.mkdir(parents=True)
    constraints = ROOT / "constraints.txt"
    constrained = ["--constraint", str(constraints)]
    torch = re.findall(r"^torch==\S+", constraints.read_text(), flags=re.M)
    index = ["--index-url", options.torch_index] if options.torch_index else []
    whole = directory / "torch"
    bare = directory / "no-torch"
    program = whole / "bin/ora-pretrain"
    short = SHORT if options.short else ()
    timed(f"{python} torch", lambda: install(python, whole, [*torch, *index]))
    timed(f"{python} wheel", lambda: install(python, whole, [*constrained, f"{wheel}[compare]"]))
    timed(f"{python} --version", lambda: run_program(program, ["--version"], directory))
    timed(f"{python} demo", lambda: run_program(program, ["demo", *short], directory))
    words = ["try", str(ROOT / "docs"), "--minutes=1", *short]
    timed(f"{python} try", lambda: run_program(program, words, directory))
    install(python, bare, [*constrained, *WITHOUT_TORCH])
    timed(f"{python} without torch", lambda: install(python, bare, ["--no-deps", str(wheel)]))
    (directory / "losses.csv").write_text(LOSSES)
    other = bare / "bin/ora-pretrain"
    compared = ["compare-losses", "losses.csv"]
    timed(f"{python} compare-losses", lambda: run_program(other, compared, directory))


def main() -> None:
    """Carry out the check that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tools.release")
    parser.add_argument("pythons", nargs="+", help="interpreters, as names or paths")
    parser.add_argument("--out", type=Path, default=Path("build/release"), help="made anew")
    parser.add_argument("--torch-index", default="", help="of torch; default: pip's own")
    parser.add_argument("--short", action="store_true", help="trains 20 steps each")
    options = parser.parse_args()
    out = options.out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    sdist, wheel = build(out)
    print(f"{sdist}\n{wheel}")
    for python in options.pythons:
        check(python, wheel, out / f"with-{python.replace('/', '-')}", options)


if __name__ == "__main__":
    main()
