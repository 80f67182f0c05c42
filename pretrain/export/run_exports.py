"""Exports kept inside a run directory, made at the end of training or when a verb needs one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from data_pipeline.io.files import hash_file, refusing
from data_pipeline.io.lease import Lease
from pretrain.checkpoint.damage import DamagedCheckpoint
from pretrain.checkpoint.format import marker_digest
from pretrain.config.tree import Config
from pretrain.errors import UserError
from pretrain.export.models import (
    CHECKPOINT_FACT,
    FACTS,
    FILES_FACT,
    named_code,
    require_transformers,
)
from pretrain.export.names import OWN_CODE
from pretrain.ranks.devices import ask_for
from pretrain.ranks.environment import speaks_for_all, without_launcher
from pretrain.ranks.launch import prepare_child
from pretrain.runs.directory import FINISHED, RunDirectory, free_name, step_of
from pretrain.runs.facts import read_facts

_DTYPES = ("fp32", "bf16")
_TIMEOUT = 6 * 3600
_TRIES = 3
"""Checkpoints that are tried of a run whose training removes the newest meanwhile."""
_OWN_FILES = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "model.safetensors",
    "README.md",
    FACTS,
    OWN_CODE.name,
}


def exported(path: Path, step: int | None = None) -> Path:
    """Return a Hugging Face directory: `path` itself if it is one, else the run's export.

    Another process exports, because an export hides the GPUs from its process for good. If several
    commands want an export at once, one of them makes it. Exports whose checkpoints are gone are
    removed. If a training continues and removes the newest checkpoint meanwhile, its next is taken.

    Args:
        path: Directory of a run or an export.
        step: Step of the run's checkpoint; None: the newest one.

    Raises:
        UserError: `path` is neither, or as `export_run`.
        DataError: as `export_run`.
    """
    run = RunDirectory(path)
    if not run.config.is_file():
        if not (path / "config.json").is_file():
            raise UserError(
                f"{path} is neither a run directory nor an export: it has no config.yaml"
            )
        if step is not None:
            raise UserError(
                f"--step {step}: {path} is an export, which is of one step; leave --step out"
            )
        return path
    if run.exports.is_symlink():
        raise UserError(
            f"{run.exports} is a link, and nothing is written to where it leads: make the export "
            f"with `python -m pretrain export {path} --out DIR`, and give DIR"
        )
    for _ in range(_TRIES):
        checkpoint = run.find_checkpoint(step)
        try:
            return _export_of(run, checkpoint)
        except UserError:
            if step is not None or checkpoint.is_dir():
                raise
    raise UserError(
        f"the training of {path} removes each checkpoint before it is read; wait for its end, or "
        "give it a larger checkpoint.keep_last"
    )


def _export_of(run: RunDirectory, checkpoint: Path) -> Path:
    """Return the export of a checkpoint, made now unless it is there."""
    _remove_outdated(run)
    out = run.exports / checkpoint.name
    if out.is_dir() and not is_own_export(out):
        with refusing(f"set {out} aside"):
            aside = out.rename(free_name(out, ".foreign"))
        print(f"{out} is not as an export was written; kept aside as {aside.name}", file=sys.stderr)
    with ExitStack() as stack:
        if not out.is_dir():
            lease = Lease(run.exports / f".{out.name}.lock", f"exporting {run.path}", _TIMEOUT)
            with refusing(f"write {run.exports}"):
                stack.enter_context(lease)
        if not out.is_dir():  # unless another command made the export while this one waited
            print(f"exporting {checkpoint} first", file=sys.stderr, flush=True)
            export_apart(run.path, out, step_of(checkpoint))
    return out


def export_apart(run: Path, out: Path, step: int | None = None, dtype: str | None = None) -> str:
    """Export in a separate process, which ends with this one.

    Args:
        step: Step of the checkpoint; None: the newest one.
        dtype: fp32 or bf16; None: as in `export_run`.

    Returns:
        The last line that the process printed.

    Raises:
        UserError: as `export_run`, or the export took too long.
    """
    if dtype not in (None, *_DTYPES):
        raise UserError(f"dtype is {dtype!r}; give fp32 or bf16")
    if step is not None and step < 0:
        raise UserError(f"step is {step}; give that of a checkpoint")
    command = [sys.executable, "-m", "pretrain", "export", str(run), "--out", str(out)]
    command += ["--step", str(step)] if step is not None else []
    command += ["--dtype", dtype] if dtype else []
    try:
        done = subprocess.run(
            command,
            env=without_launcher(os.environ),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
            preexec_fn=prepare_child,  # so that it does not outlive a kill of this process
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"the export of {run} was not done after {_TIMEOUT // 3600} hours"
        ) from error
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        raise UserError(last.removeprefix("error: "))
    return done.stdout.strip().rpartition("\n")[2]


def export_on_cpu(run: Path, out: Path, step: int | None, dtype: str | None) -> dict[str, Any]:
    """Call `export_run` in one process without a GPU, on whatever device the run was trained.

    Returns:
        The content of export.json.
    """
    RunDirectory(run).require_run()  # before imports that take seconds
    from megatron_patches.engine.compat import prepare_imports

    prepare_imports()
    ask_for("cpu")
    from pretrain.export.export import export_run
    from pretrain.ranks.single_process import one_process

    with one_process() as context:
        return export_run(run, out, context, step=step, dtype=dtype)


def check_can_export(config: Config) -> None:
    """Check before step 1 that the export of checkpoint.export_at_end will be possible.

    Raises:
        UserError: transformers is missing, or has no class for this model.
    """
    from pretrain.export.architectures import architecture_of

    try:
        require_transformers("export")
        architecture_of(config)
    except UserError as error:
        raise UserError(f"checkpoint.export_at_end: {error}") from error


def export_at_end(run: RunDirectory, state: str) -> None:
    """Export a finished run in a separate process (rank 0), unless the export exists already.

    The run stays finished: a failed export is a warning, and can be made later.
    """
    if state != FINISHED or not speaks_for_all():
        return
    out = run.exports / run.find_checkpoint(None).name
    if out.exists():
        return
    try:
        print(f"exported: {export_apart(run.path, out)}", flush=True)
    except UserError as error:
        print(
            f"warning: the run is finished, but its export failed ({error}); try again with "
            f"`python -m pretrain export {run.path} --out {out}`",
            file=sys.stderr,
            flush=True,
        )


def is_own_export(directory: Path) -> bool:
    """Return whether a directory is as `export_run` wrote it, with no code but this package's.

    The digests in export.json do not prove where the files come from. So no other kind of file is
    allowed, and the code is compared with the package's own.
    """
    try:
        if any(path.is_symlink() or path.name not in _OWN_FILES for path in directory.iterdir()):
            return False
        stated = read_facts(directory / FACTS).get(FILES_FACT)
        digests = {path.name: hash_file(path) for path in directory.iterdir() if path.name != FACTS}
        own_class = re.compile(rf"{OWN_CODE.stem}\.\w+")
        only_own = all(
            own_class.fullmatch(str(name))
            for _, _, code_map in named_code(directory)
            for name in dict(code_map).values()
        )
    except (OSError, ValueError, TypeError):
        return False
    code = digests.get(OWN_CODE.name)
    return stated == digests and only_own and code in (None, hash_file(OWN_CODE))


def _remove_outdated(run: RunDirectory) -> None:
    """Remove exports of checkpoints that no longer exist, or were written again."""
    live = {path.name: path for path in run.complete_checkpoints()}
    for directory in run.exports.glob("step_*"):
        if not _is_an_export(directory):
            continue
        checkpoint = live.get(directory.name)
        with suppress(DamagedCheckpoint):  # a training removes it now
            if checkpoint and _checkpoint_fact(directory) == marker_digest(checkpoint):
                continue
        with suppress(FileNotFoundError):  # another command removes it too
            shutil.rmtree(directory)


def _is_an_export(directory: Path) -> bool:
    """Return whether the directory holds nothing but a whole export, named after a checkpoint.

    A name with a dot marks an export in progress, left by a killed process, or kept aside.
    """
    if directory.is_symlink() or not re.fullmatch(r"step_\d+", directory.name):
        return False
    return directory.is_dir() and all(
        path.name in _OWN_FILES and not path.is_dir() for path in directory.iterdir()
    )


def _checkpoint_fact(directory: Path) -> object:
    try:
        return read_facts(directory / FACTS).get(CHECKPOINT_FACT)
    except UserError:
        return None
