"""Files of an export that need no model, as safetensors reads them; what is missing."""

from __future__ import annotations

import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pretrain.errors import UserError
from pretrain.export.directories import made_beside, refuse_existing
from pretrain.export.models import require_transformers
from pretrain.export.weight_files import Weight, write_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_safetensors_reads_what_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    tensors = {
        "a.weight": torch.randn(3, 5, dtype=torch.float64).t(),  # not contiguous
        "b": torch.randn(7).bfloat16(),
        "ünïcode": torch.randn(2, 1, 4),
    }
    weights = [
        Weight(name, tuple(tensor.shape), lambda tensor=tensor: tensor)
        for name, tensor in tensors.items()
    ]
    written = write_weights(tmp_path / "model.safetensors", weights, dtype)
    loaded = load_file(tmp_path / "model.safetensors")
    assert written == sum(tensor.numel() for tensor in tensors.values()) * dtype.itemsize
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == dtype and torch.equal(loaded[name], tensor.to(dtype))


def test_one_weight_is_made_at_a_time(tmp_path: Path) -> None:
    references: list[weakref.ref[np.ndarray[Any, Any]]] = []

    def make(number: int) -> torch.Tensor:
        assert not any(earlier() is not None for earlier in references)
        values = np.full(4, number, dtype=np.float32)
        references.append(weakref.ref(values))
        return torch.from_numpy(values)

    weights = [Weight(str(number), (4,), lambda number=number: make(number)) for number in range(3)]
    assert references == []
    write_weights(tmp_path / "model.safetensors", weights, torch.float32)
    assert len(references) == 3


def test_a_directory_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    out = tmp_path / "new/export"
    with pytest.raises(ValueError, match="half way"), made_beside(out) as directory:
        (directory / "half").write_text("")
        raise ValueError("half way")
    assert list(out.parent.iterdir()) == []
    with made_beside(out) as directory:
        (directory / "whole").write_text("")
    assert [path.name for path in out.parent.iterdir()] == ["export"] and (out / "whole").is_file()
    assert out.stat().st_mode & 0o777 == (tmp_path / "new").stat().st_mode & 0o777
    with pytest.raises(UserError, match="exists already"):
        refuse_existing(out)
    with pytest.raises(UserError, match="cannot write beside"), made_beside(out / "whole/x"):
        pass


@pytest.mark.parametrize("verb", ["export", "sample"])
def test_without_transformers_the_extra_is_named(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("transformers", "transformers.utils"):
        # Python then raises as for a missing package.
        monkeypatch.setitem(sys.modules, module, None)
    said = rf"^{verb} needs the package transformers .* pip install .*'\.\[export\]'"
    with pytest.raises(UserError, match=said):
        require_transformers(verb)
