"""A rank's part of the global batches, and what a packed batch means when documents stand alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pretrain.data.batches import rank_samples
from pretrain.model.packing import count_predictions, document_layout

EOD = 2


@pytest.mark.parametrize("data_parallel_size", [1, 2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_the_ranks_share_the_global_batch_out(
    data_parallel_size: int, micro_batch_size: int
) -> None:
    shares = [
        rank_samples(
            48,
            global_batch_size=16,
            micro_batch_size=micro_batch_size,
            data_parallel_rank=rank,
            data_parallel_size=data_parallel_size,
        )
        for rank in range(data_parallel_size)
    ]
    assert {share.shape for share in shares} == {
        (16 // micro_batch_size // data_parallel_size, micro_batch_size)
    }
    # Micro batch by micro batch, rank by rank: the same order for every layout.
    assert np.stack(shares, axis=1).ravel().tolist() == list(range(48, 64))


def test_a_layout_done_by_hand() -> None:
    inputs = torch.tensor([[5, 6, EOD, 7, EOD, EOD, 8, 9], [EOD, 3, 3, 3, 3, 3, 3, EOD]])
    layout = document_layout(inputs, EOD)
    assert layout.positions.tolist() == [[0, 1, 2, 0, 1, 0, 0, 1], [0, 0, 1, 2, 3, 4, 5, 6]]
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 3, 3], [0, 1, 1, 1, 1, 1, 1, 1]])
    for sample, query, key in np.ndindex(2, 8, 8):
        visible = key <= query and documents[sample, query] == documents[sample, key]
        assert layout.documents.mask()[sample, 0, query, key].item() is not bool(visible)
    assert layout.counted.tolist() == [
        [True, True, False, True, False, False, True, True],
        [False, *[True] * 6, False],
    ]


def test_predictions_from_the_last_id_are_no_predictions() -> None:
    tokens = torch.tensor([[5, EOD, 7, EOD], [EOD, 5, 5, 5]])  # the last column is only predicted
    assert count_predictions(tokens, EOD) == 4
    assert count_predictions(tokens, None) == 6
    assert count_predictions(tokens[:0], EOD) == 0
