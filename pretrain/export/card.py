"""README.md of an export: the model, its measurements and limits, how to load it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def model_card(facts: Mapping[str, Any], name: str) -> str:
    """Return the model card of an export.

    Args:
        facts: Content of export.json.
        name: Name of the export's directory.
    """
    parts = (
        _FRONT_MATTER,
        f"# {facts['run']}",
        _summary(facts),
        _table(facts),
        _loading(facts, name),
        _frozen(facts),
        _agreement(facts),
        _LIMITS,
    )
    return "\n\n".join(parts)


_FRONT_MATTER = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- ora-pretrain
- orthogonal-random-attention
---"""


def _summary(facts: Mapping[str, Any]) -> str:
    return (
        f"A GPT language model: run `{facts['run']}` at step {facts['step']:,}, attention variant "
        f"`{facts['variant']}`. It was pretrained by ora-pretrain {facts['ora_pretrain']}, which "
        "trains GPTs with frozen orthonormal Query/Key projections beside ordinary ones."
    )


def _table(facts: Mapping[str, Any]) -> str:
    perplexity, tokens = facts["validation_perplexity"], facts["tokens"]
    parameters, data = facts["parameters"], facts["data"]
    trained = "not recorded at this step" if tokens is None else f"{tokens:,}"
    quality = "not measured at this step" if perplexity is None else f"{perplexity:.2f}"
    rows = {
        "parameters, trained / frozen": f"{parameters['trainable']:,} / {parameters['frozen']:,}",
        "training tokens": trained,
        "data": f"{', '.join(data['names'])} ({', '.join(data['sources'])})",
        "validation perplexity, on held-out text of the same data": quality,
        "sequence length": f"{facts['sequence_length']:,}",
        "seed": str(facts["seed"]),
        "weights": facts["dtype"],
    }
    return "\n".join(
        ["| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in rows.items())]
    )


def _loading(facts: Mapping[str, Any], name: str) -> str:
    trust, why = "", ""
    if facts["custom_code"]:
        trust = ", trust_remote_code=True"
        own_parts = [f"model.{key}={value}" for key, value in facts["own_parts"].items()]
        parts = ", ".join([*own_parts, *facts["attention"]["adapters"]])
        why = (
            f"\n\nThe model has parts ({parts}) that no class of transformers has together, or in "
            "this place: `modeling_ora.py` has them, so loading needs `trust_remote_code=True`."
        )
    return f"""## Loading it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})
model = AutoModelForCausalLM.from_pretrained("{name}"{trust})
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0]))
```

It is a `{facts["model"]}` to transformers.{why}"""


def _frozen(facts: Mapping[str, Any]) -> str:
    frozen, folded = facts["frozen"], facts["folded"]
    recipe = facts["frozen_bank"]["recipe"]
    sentences = []
    if frozen["drawn"]:
        sentences.append(
            "Query and Key rows that were never trained are named in `export.json` "
            f"(`frozen_rows`), with the recipe of their bank (seed {recipe['seed']}) and its "
            "digests."
        )
    if frozen["as_trained"]:
        sentences.append(
            "Query and Key rows that were trained and then frozen are named in `export.json` "
            "(`frozen_rows`), with their digests."
        )
    if not sentences:
        return "## Frozen weights\n\nNone: every weight was trained."
    if folded:
        sentences.append(
            f"The trained corrections ({', '.join(folded)}) are folded into rows: they are not the "
            "bank's."
        )
    sentences.append("Nothing freezes them in transformers: training this model trains them too.")
    return "## Frozen weights\n\n" + " ".join(sentences)


def _agreement(facts: Mapping[str, Any]) -> str:
    logits, tokenizer = facts["logits"], facts["tokenizer"]
    return f"""## How well it agrees with the run

Measured when it was exported, on held-out text:

* logits in float32: largest difference {logits["difference"]:.2g} at a largest logit of
  {logits["largest"]:.2g}, over {logits["compared"]:,} logits;
* tokenizer: other ids in {tokenizer["different_ids"]} of {tokenizer["documents"]} documents
  ({tokenizer["tokens"]:,} tokens), another text in {tokenizer["different_texts"]}."""


_LIMITS = """## Limits

* A base model: it continues text. It was not trained to follow instructions, nor to be safe, and
  repeats what its data says, true or not.
* Perplexity depends on the tokenizer and on the text: compare it only with models of the same both.
* Nothing was evaluated beyond what stands above. Inputs longer than the sequence length were never
  seen in training.
"""
