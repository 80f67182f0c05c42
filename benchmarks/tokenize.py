"""How fast tokenising is, beside the bare tokenizer, Megatron-LM's tool and datasets.map.

    python benchmarks/tokenize.py [--megabytes 80] [--repetitions 3] [--unigram] [--json FILE]
        [--also [preprocess_data] [huge_pages] [sentencepiece] [datasets] [memory]]
        [--megatron-lm CHECKOUT [--megatron-python PYTHON]]

See `tokenize_rates.py` for what is measured and how.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path

if __name__ == "__main__":
    from tokenize_rates import main

    main()
elif __name__ == "tokenize":
    # Every script of this directory has it first on its path, and the standard library imports its own
    # `tokenize` all over: this is what it then gets.
    path = Path(sysconfig.get_path("stdlib")) / "tokenize.py"
    spec = importlib.util.spec_from_file_location("tokenize", path)
    assert spec is not None and spec.loader is not None
    sys.modules["tokenize"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["tokenize"])
