"""A small BERT from text of one's own: a WordPiece tokenizer, then masked-language-model pretraining.

Devlin et al. (NAACL 2019) without next-sentence prediction: 15 % of the pieces are to be told, of which 80 %
are hidden behind [MASK], 10 % are replaced by another piece and 10 % left as they are. Blocks are cut from
the shuffled documents of the training side; which, and what is hidden in them, follows from the seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from data_pipeline.sources.records import Document
from pretrain.errors import UserError
from pretrain.finetuning.bert.sentences import Text

if TYPE_CHECKING:
    from transformers import BertForMaskedLM, BertTokenizer

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
HIDDEN_SHARE, MASK_SHARE, RANDOM_SHARE = 0.15, 0.8, 0.1
_NOT_SCORED = -100
_BEGIN, _INSIDE = "▁", "##"
"""What a word begins with while the vocabulary is made, and what a piece inside a word begins with then."""
_HELD_OUT_BLOCKS = 256


@dataclass(frozen=True)
class SmallBert:
    """Sizes and training of a small BERT; the learning rate is the peak of a linear rise and fall."""

    hidden_size: int = 64
    num_layers: int = 4
    num_attention_heads: int = 4
    vocab_size: int = 4000
    sequence_length: int = 48
    batch_size: int = 32
    steps: int = 2000
    learning_rate: float = 2e-3
    seed: int = 1

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise UserError(
                f"--hidden-size {self.hidden_size} is not divisible by --heads {self.num_attention_heads}"
            )


@dataclass(frozen=True)
class Pretrained:
    """Mean cross-entropy in nats of hidden pieces in held-out documents, and over a guess by frequency."""

    settings: SmallBert
    training_pieces: int
    loss_untrained: float
    loss: float
    loss_by_frequency: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def train_tokenizer(documents: tuple[Document, ...], settings: SmallBert) -> BertTokenizer:
    """WordPiece in lower case, as that of bert-base-uncased, the same each time.

    The vocabulary is that of a BPE of words that begin with a sign of their own: tokenizers' trainer of
    WordPiece numbers its letters by a hash that differs from process to process, and breaks ties by them.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import BertTokenizer

    normal, cut = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    words = (
        " ".join(_BEGIN + word for word, _ in cut.pre_tokenize_str(normal.normalize_str(document.text)))
        for document in documents
    )
    bpe.train_from_iterator(words, trainers.BpeTrainer(vocab_size=settings.vocab_size, show_progress=False))
    ranked = sorted(bpe.get_vocab().items(), key=lambda item: item[1])
    letters = sorted({letter for piece, _ in ranked for letter in piece} - {_BEGIN})
    pieces = [*SPECIAL, *letters, *(_INSIDE + letter for letter in letters)]
    pieces += [piece[1:] if piece[0] == _BEGIN else _INSIDE + piece for piece, _ in ranked if piece != _BEGIN]
    vocabulary = list(dict.fromkeys(pieces))[: settings.vocab_size]
    return BertTokenizer(
        vocab={piece: number for number, piece in enumerate(vocabulary)},
        do_lower_case=True,
        model_max_length=settings.sequence_length,
    )


def pretrain_small(
    text: Text,
    tokenizer: BertTokenizer,
    settings: SmallBert,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[BertForMaskedLM, Pretrained]:
    """Train a BertForMaskedLM on the CPU; the same settings and number of threads give the same bits.

    Args:
        report: told (step, mean loss since the last report), about 20 times.

    Raises:
        UserError: the text is shorter than one batch.
    """
    blocks = _blocks(text.training, tokenizer, settings.sequence_length)
    held_out = _blocks(text.validation, tokenizer, settings.sequence_length)[:_HELD_OUT_BLOCKS]
    if len(blocks) < settings.batch_size or not len(held_out):
        raise UserError(
            f"the text has {len(blocks)} blocks of {settings.sequence_length} pieces for training and "
            f"{len(held_out)} held out: give more text, or a smaller --batch-size or --sequence-length"
        )
    model = new_model(len(tokenizer), settings)
    hide = _Hider(tokenizer)
    untrained = _held_out_loss(model, held_out, hide, settings)
    _train(model, blocks, hide, settings, report)
    return model, Pretrained(
        settings,
        blocks.size,
        untrained,
        _held_out_loss(model, held_out, hide, settings),
        _frequency_loss(blocks, held_out, hide, settings),
    )


def new_model(vocab_size: int, settings: SmallBert) -> BertForMaskedLM:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(settings.seed)
    return BertForMaskedLM(
        BertConfig(
            vocab_size=vocab_size,
            hidden_size=settings.hidden_size,
            num_hidden_layers=settings.num_layers,
            num_attention_heads=settings.num_attention_heads,
            intermediate_size=4 * settings.hidden_size,
            max_position_embeddings=settings.sequence_length,
        )
    )


def _train(
    model: BertForMaskedLM,
    blocks: npt.NDArray[np.int64],
    hide: _Hider,
    settings: SmallBert,
    report: Callable[[int, float], None],
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), settings.learning_rate, weight_decay=0.01)
    rise = max(1, settings.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / rise, (settings.steps - step) / max(1, settings.steps - rise)),
    )
    model.train()
    torch.manual_seed(settings.seed)  # of dropout
    order = _stream(settings, "order")
    queue = np.empty(0, np.int64)
    losses: list[float] = []
    every = max(1, settings.steps // 20)
    for step in range(settings.steps):
        while len(queue) < settings.batch_size:
            queue = np.concatenate([queue, order.permutation(len(blocks))])
        chosen, queue = queue[: settings.batch_size], queue[settings.batch_size :]
        loss = _loss(model, *hide(blocks[chosen], _stream(settings, f"step {step}")))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % every == 0:
            report(step + 1, float(np.mean(losses)))
            losses = []
    model.eval()


class _Hider:
    """Blocks -> what the model is shown, and what it has to tell."""

    def __init__(self, tokenizer: BertTokenizer) -> None:
        self.mask, self.vocab_size = tokenizer.mask_token_id, len(tokenizer)
        self._first_plain = len(SPECIAL)

    def __call__(
        self, blocks: npt.NDArray[np.int64], stream: np.random.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(shown, labels) [batch, sequence], int64; the label of a piece that counts for nothing is −100."""
        chosen = (stream.random(blocks.shape) < HIDDEN_SHARE) & (blocks >= self._first_plain)
        fate = stream.random(blocks.shape)
        other = stream.integers(self._first_plain, self.vocab_size, blocks.shape)
        shown = np.where(chosen & (fate < MASK_SHARE), self.mask, blocks)
        replaced = chosen & (fate >= MASK_SHARE) & (fate < MASK_SHARE + RANDOM_SHARE)
        shown = np.where(replaced, other, shown)
        labels = np.where(chosen, blocks, _NOT_SCORED)
        return torch.from_numpy(shown), torch.from_numpy(labels)


def _loss(model: BertForMaskedLM, shown: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of what was hidden; logits are made of nothing else."""
    states = model.bert(input_ids=shown).last_hidden_state
    scored = labels != _NOT_SCORED
    return torch.nn.functional.cross_entropy(model.cls(states[scored]), labels[scored])


@torch.no_grad()
def _held_out_loss(
    model: BertForMaskedLM, blocks: npt.NDArray[np.int64], hide: _Hider, settings: SmallBert
) -> float:
    model.eval()
    return float(_loss(model, *hide(blocks, _stream(settings, "held out"))))


def _frequency_loss(
    blocks: npt.NDArray[np.int64], held_out: npt.NDArray[np.int64], hide: _Hider, settings: SmallBert
) -> float:
    """The same predictions by the share of each piece in the training text, one added to each count."""
    counts = np.bincount(blocks.reshape(-1), minlength=hide.vocab_size)[len(SPECIAL) :] + 1.0
    _, labels = hide(held_out, _stream(settings, "held out"))
    scored = labels[labels != _NOT_SCORED].numpy() - len(SPECIAL)
    return float(-np.log(counts[scored] / counts.sum()).mean())


def _blocks(documents: tuple[Document, ...], tokenizer: BertTokenizer, length: int) -> npt.NDArray[np.int64]:
    """[blocks, length] ids: [CLS], pieces of the documents one after the other, [SEP]."""
    ids: list[int] = []
    for document in documents:
        ids += tokenizer(document.text, add_special_tokens=False, truncation=False, verbose=False)[
            "input_ids"
        ]
    inside = length - 2
    whole = np.array(ids[: len(ids) // inside * inside], np.int64).reshape(-1, inside)
    edge = np.ones((len(whole), 1), np.int64)
    return np.concatenate([tokenizer.cls_token_id * edge, whole, tokenizer.sep_token_id * edge], axis=1)


def _stream(settings: SmallBert, name: str) -> np.random.Generator:
    """The random stream of that name: it depends on nothing that was drawn before."""
    key = tuple(name.encode())
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(settings.seed, spawn_key=key)))


def save_bert(directory: Path, model: BertForMaskedLM, tokenizer: BertTokenizer) -> None:
    """As transformers reads it."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
