"""The search for the newest checkpoint, where a client of the file system sees old names."""

from functools import cached_property, partial
from pathlib import Path

import pytest

from pretrain.checkpoint.resuming import _newest_whole
from pretrain.checkpoint.verify import verify
from pretrain.config.load import load_config
from pretrain.errors import UserError
from pretrain.ranks.groups import ParallelContext
from pretrain.runs.directory import RunDirectory
from pretrain.runs.position import Position
from tests.fabricated_checkpoints import about, write_two_ranks
from tests.tiny import tiny_overrides


class CachedNames(RunDirectory):
    """A run directory as a client of NFS may see it: without what others have renamed since."""

    @cached_property
    def _first_seen(self) -> list[Path]:
        return super().complete_checkpoints()

    def complete_checkpoints(self) -> list[Path]:
        return list(self._first_seen)


def test_a_checkpoint_kept_aside_is_not_looked_at_again(
    tmp_path: Path, context: ParallelContext
) -> None:
    run = CachedNames(tmp_path)
    for step in (1, 2, 3):
        write_two_ranks(run.checkpoint(step), about(Position(step)))
    for step in (2, 3):
        (run.checkpoint(step) / "parameters.json").write_text("{}")
    overrides = tiny_overrides(Path("nowhere"), tmp_path, "run", checkpoint__fall_back="true")
    checkpoint = load_config("demo", overrides).checkpoint
    judge = partial(verify, by_hash=checkpoint.verify == "full")
    newest, notes = _newest_whole(run, checkpoint.fall_back, context, judge)
    assert newest == run.checkpoint(1) and len(notes) == 2
    (run.checkpoint(1) / "parameters.json").write_text("{}")
    last = CachedNames(tmp_path)
    with pytest.raises(UserError, match="there is no checkpoint before it"):
        _newest_whole(last, checkpoint.fall_back, context, judge)
    assert (tmp_path / "checkpoints/step_00000003.damaged").is_dir()
