"""A run's tokenizer as Hugging Face's tokenizer.json, and whether the two give the same ids.

The file is written from the SentencePiece model piece by piece, in the same order, so that ids are places in
it. What a text with a reserved piece written out in it becomes (`</s>`, `<0x41>`) stays text, as it does in
training: hence the scores of reserved pieces, and `split_special_tokens`.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from data_pipeline.shards.manifest import Manifest
from data_pipeline.shards.reading import open_shard
from data_pipeline.tokenizer.identity import HUGGING_FACE
from data_pipeline.tokenizer.tokenizer import open_tokenizer, read_model
from pretrain.errors import UserError
from pretrain.runs.directory import write_json

_SPACE = "\u2581"
_NEVER = -1e6
"""The score of pieces that no text becomes: with 0.0 they would be the best of all."""
_COMPARED_TOKENS = 200_000


def write_tokenizer(manifest: Manifest, out: Path, model_max_length: int) -> None:
    """tokenizer.json and tokenizer_config.json.

    Raises:
        UserError: the model is of a kind that Hugging Face's program does not have.
        DataError: it cannot be read.
    """
    identity, path = manifest.tokenizer, manifest.tokenizer_path
    if identity.model_type == HUGGING_FACE:
        shutil.copyfile(path, out / "tokenizer.json")
        pieces = {number: piece for piece, number in _vocabulary(path).items()}
    else:
        open_tokenizer(path)  # says what is wrong with the file, if something is
        content = tokenizer_json(read_model(path), path)
        text = json.dumps(content, ensure_ascii=False)
        (out / "tokenizer.json").write_text(text, encoding="utf-8")
        pieces = {number: piece.piece for number, piece in enumerate(read_model(path).pieces)}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        # A document's end is what a text begins after: the model never saw another beginning.
        "bos_token": pieces[identity.eod_id],
        "eos_token": pieces[identity.eod_id],
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    if identity.unk_id >= 0:
        config["unk_token"] = pieces[identity.unk_id]
    write_json(out / "tokenizer_config.json", config)


def tokenizer_json(proto: Any, path: Path) -> dict[str, Any]:
    """The content of tokenizer.json for a SentencePiece model.

    Raises:
        UserError: it is neither BPE nor unigram.
    """
    kind = proto.trainer_spec.ModelType.Name(proto.trainer_spec.model_type).lower()
    models = {"bpe": _bpe, "unigram": _unigram}
    if kind not in models:
        raise UserError(f"{path} is a {kind} model, which tokenizer.json cannot hold; only BPE and unigram")
    dummy = proto.normalizer_spec.add_dummy_prefix
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if dummy:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": piece.piece,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": piece.type != piece.USER_DEFINED,
            }
            for number, piece in enumerate(proto.pieces)
            if piece.type in (piece.CONTROL, piece.UNKNOWN, piece.USER_DEFINED)
        ],
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(proto.normalizer_spec)},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": models[kind](proto),
    }


def _normalizers(spec: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if spec.precompiled_charsmap:
        charsmap = base64.b64encode(spec.precompiled_charsmap).decode("ascii")
        found.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if spec.remove_extra_whitespaces:
        found.append({"type": "Strip", "strip_left": True, "strip_right": True})
        found.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    if spec.add_dummy_prefix:
        found.append({"type": "Prepend", "prepend": _SPACE})
    return [*found, {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]


def _unigram(proto: Any) -> dict[str, Any]:
    scores = [
        (piece.piece, piece.score if piece.type in (piece.NORMAL, piece.USER_DEFINED) else _NEVER)
        for piece in proto.pieces
    ]
    return {
        "type": "Unigram",
        "unk_id": proto.trainer_spec.unk_id,
        "vocab": scores,
        "byte_fallback": proto.trainer_spec.byte_fallback,
    }


def _bpe(proto: Any) -> dict[str, Any]:
    """SentencePiece joins the neighbours that make the best piece: all ways to make each, by its score."""
    scores = {
        piece.piece: piece.score for piece in proto.pieces if piece.type in (piece.NORMAL, piece.USER_DEFINED)
    }
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(scores, key=lambda piece: -scores[piece])
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": proto.pieces[proto.trainer_spec.unk_id].piece,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": proto.trainer_spec.byte_fallback,
        "ignore_merges": False,
        "vocab": {piece.piece: number for number, piece in enumerate(proto.pieces)},
        "merges": merges,
    }


def _vocabulary(path: Path) -> dict[str, int]:
    import tokenizers

    found: dict[str, int] = tokenizers.Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    return found


@dataclass(frozen=True)
class TokenizerAgreement:
    """The exported tokenizer beside the run's own, on held-out documents.

    different_ids: documents that the two cut otherwise; different_texts: those whose ids the exported one
    does not decode to the text.
    """

    documents: int
    tokens: int
    different_ids: int
    different_texts: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def compare_tokenizers(manifests: Sequence[Manifest], out: Path, custom: bool) -> TokenizerAgreement:
    """Encode held-out text by both; what differs is counted, and then the run's own goes with the export.

    Args:
        custom: the export has code of its own.

    Raises:
        DataError: a shard cannot be read.
    """
    manifest = manifests[0]
    own, exported = open_tokenizer(manifest.tokenizer_path), _load(out, custom)
    documents = tokens = different_ids = different_texts = 0
    for text in _held_out_texts(manifests):
        ids = own.encode([text])[0].tolist()
        documents, tokens = documents + 1, tokens + len(ids)
        different_ids += exported(text, add_special_tokens=False)["input_ids"] != ids
        different_texts += exported.decode(ids) != own.decode(ids)
        if tokens >= _COMPARED_TOKENS:
            break
    if different_ids and manifest.tokenizer.model_type != HUGGING_FACE:
        shutil.copyfile(manifest.tokenizer_path, out / "tokenizer.model")
    return TokenizerAgreement(documents, tokens, different_ids, different_texts)


def _load(directory: Path, custom: bool) -> Any:
    """As a user would. `AutoTokenizer` looks at the model's class too, and asks whether to trust its code."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=custom)


def _held_out_texts(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Texts of held-out documents, of training documents where there are none."""
    for manifest in manifests:
        tokenizer = open_tokenizer(manifest.tokenizer_path)
        for shard in manifest.shards_of("validation") or manifest.shards_of("train"):
            opened = open_shard(manifest, shard)
            start = 0
            for length in islice(opened.lengths.tolist(), shard.documents):
                yield tokenizer.decode(opened.tokens[start : start + length - 1].tolist())
                start += length
