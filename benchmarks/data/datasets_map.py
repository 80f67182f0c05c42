"""The same work with `datasets`: load the files, map the text to ids. Prints the tokens."""

from __future__ import annotations

import sys
from typing import Any

import datasets
import pyarrow.compute
import sentencepiece


class Encoder:
    """Loads the model where it is first used: in every process of map."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._processor: sentencepiece.SentencePieceProcessor | None = None

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self._processor is None:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=self._model)
        return {"ids": self._processor.encode(batch["text"], num_threads=1)}


def main() -> None:
    """datasets_map.py WORKERS MODEL CACHE FILE..."""
    workers, model, cache, paths = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]
    loaded = datasets.load_dataset("json", data_files=paths, cache_dir=cache, split="train", num_proc=workers)
    mapped = loaded.map(
        Encoder(model), batched=True, batch_size=1000, num_proc=workers, remove_columns=loaded.column_names
    )
    lengths = pyarrow.compute.list_value_length(mapped.data.column("ids"))
    print("measured: tokens", pyarrow.compute.sum(lengths).as_py() + len(mapped))


if __name__ == "__main__":
    main()
