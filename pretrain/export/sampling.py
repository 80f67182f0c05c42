"""Text from an exported model, printed token by token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pretrain.errors import UserError
from pretrain.export.models import (
    read_language_model,
    read_tokenizer,
    require_transformers,
    require_trust,
)


@dataclass(frozen=True)
class Sampling:
    """Settings of the sampling.

    Attributes:
        tokens: Most tokens after the prompt.
        temperature: Divisor of the logits; 0 is greedy.
        top_p: Total probability of the likeliest tokens that are drawn from.
        seed: Seed of the draws, set again for every prompt.
    """

    tokens: int = 100
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise UserError(f"tokens {self.tokens} must be at least 1")
        if not (self.temperature == 0 or 1e-4 <= self.temperature <= 1e4):
            raise UserError(f"temperature {self.temperature:g} must be 0 or from 0.0001 to 10000")
        if not 0 <= self.top_p <= 1:  # NaN passes typer's limits
            raise UserError(f"top-p {self.top_p:g} must be from 0 to 1")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed {self.seed} must be from 0 to 2^63 - 1")


class Sampler:
    """A model and its tokenizer, loaded once for any number of prompts.

    Args:
        directory: An export, or another directory of transformers.
        trust_code: Whether code in the directory may run.

    Raises:
        UserError: transformers is missing, or cannot load the directory.
    """

    def __init__(self, directory: Path, trust_code: bool) -> None:
        require_transformers("sample")
        require_trust(directory, trust_code)
        self.tokenizer = read_tokenizer(directory, trust_code)
        self.model = read_language_model(directory, trust_code, "auto").eval()
        # Learned positions end there; rotary ones continue beyond the lengths seen in training.
        self.positions: int | None = getattr(self.model.config, "n_positions", None)

    def write(self, prompt: str, sampling: Sampling) -> str:
        """Print the prompt and then each new token.

        Returns:
            The new text.

        Raises:
            UserError: as `text`.
        """
        from transformers import TextStreamer

        self._ids(prompt, sampling.tokens)  # refused before anything is printed
        print(prompt, end="", flush=True)
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        return self.text(prompt, sampling, streamer)

    def text(self, prompt: str, sampling: Sampling, streamer: Any = None) -> str:
        """Return the new text after a prompt.

        Args:
            streamer: A streamer of transformers, which gets each token at once.

        Raises:
            UserError: prompt and new tokens exceed the model's positions.
        """
        ids = self._ids(prompt, sampling.tokens)
        torch.manual_seed(sampling.seed)
        options: dict[str, Any] = {"do_sample": sampling.temperature > 0}
        if sampling.temperature:
            temperature = float(sampling.temperature)  # transformers refuses a whole number
            options |= {"temperature": temperature, "top_p": sampling.top_p, "top_k": 0}
        with torch.inference_mode():
            output = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=sampling.tokens,
                streamer=streamer,
                **options,
            )
        return str(self.tokenizer.decode(output[0, ids.size(1) :], skip_special_tokens=True))

    def _ids(self, prompt: str, tokens: int) -> torch.Tensor:
        ids = self.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        ids = ids or [self.model.config.eos_token_id]  # an empty prompt begins a document
        if self.positions is not None and len(ids) + tokens > self.positions:
            raise UserError(
                f"a prompt of {len(ids)} tokens and --tokens {tokens} are more than the "
                f"{self.positions} positions that the model has learned; give fewer"
            )
        return torch.tensor([ids])
