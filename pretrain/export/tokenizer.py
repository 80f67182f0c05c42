"""Conversion of a run's tokenizer to Hugging Face's tokenizer.json, and a comparison of the two.

The pieces of the SentencePiece model are written in their order, so that ids stay the same. A
reserved piece written out in a text (`</s>`, `<0x41>`) is encoded as ordinary text, as in training:
hence the scores of reserved pieces, and `split_special_tokens`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from data_pipeline.io.files import read_json, write_json
from data_pipeline.shards.manifest import Manifest
from data_pipeline.shards.reading import open_shard
from data_pipeline.tokenizer.identity import HUGGING_FACE
from data_pipeline.tokenizer.tokenizer import open_tokenizer, read_model
from pretrain.errors import UserError

_SPACE = "\u2581"
_NEVER = -1e6
"""Score of pieces that no text is encoded to; with 0.0 they would win over all others."""
_COMPARED_TOKENS = 200_000


def write_tokenizer(manifest: Manifest, out: Path, model_max_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Args:
        model_max_length: Longest text in tokens.

    Raises:
        UserError: tokenizer.json cannot hold a model of this kind.
        DataError: the model cannot be read.
    """
    identity, path = manifest.tokenizer, manifest.tokenizer_path
    if identity.model_type == HUGGING_FACE:
        pieces = _write_as_trained(path, out / "tokenizer.json")
    else:
        open_tokenizer(path)  # refuses a damaged file in one sentence
        model = read_model(path)
        converted(model, path).save(str(out / "tokenizer.json"), pretty=False)
        pieces = {number: piece.piece for number, piece in enumerate(model.pieces)}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        # A text begins after the end-of-document token: the model saw no other beginning in
        # training.
        "bos_token": pieces[identity.eod_id],
        "eos_token": pieces[identity.eod_id],
        # Training pads nothing, and a batch's padding is masked: any piece will do.
        "pad_token": pieces[identity.eod_id],
        # Prompts of a batch end where their continuations begin.
        "padding_side": "left",
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
    }
    if identity.unk_id >= 0:
        config["unk_token"] = pieces[identity.unk_id]
    write_json(out / "tokenizer_config.json", config)


def _write_as_trained(path: Path, out: Path) -> dict[int, str]:
    """Copy a tokenizer.json without what training switches off; return its tokens by their ids.

    Training adds no token in front or at the end, cuts no text and pads none.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    special_tokens = tokenizer.num_special_tokens_to_add(is_pair=False)
    if special_tokens or tokenizer.truncation or tokenizer.padding:
        content = read_json(path)
        write_json(out, content | {"post_processor": None, "truncation": None, "padding": None})
    else:
        shutil.copyfile(path, out)
    return {id_: token for token, id_ in tokenizer.get_vocab(with_added_tokens=True).items()}


def converted(proto: Any, path: Path) -> Any:
    """Return a SentencePiece model as a `tokenizers.Tokenizer`.

    Args:
        path: File of the model, for the error.

    Raises:
        UserError: the model is neither BPE nor unigram.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers

    kind = proto.trainer_spec.ModelType.Name(proto.trainer_spec.model_type).lower()
    models = {"bpe": _bpe, "unigram": _unigram}
    if kind not in models:
        raise UserError(
            f"{path} is a {kind} model, which tokenizer.json cannot hold; only BPE and unigram"
        )
    tokenizer = Tokenizer(models[kind](proto))
    spec = proto.normalizer_spec
    steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    decoding: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix:
        steps.insert(0, normalizers.Prepend(_SPACE))
        decoding.append(decoders.Strip(" ", 1, 0))
    if spec.remove_extra_whitespaces:
        steps[:0] = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.precompiled_charsmap:
        steps.insert(0, normalizers.Precompiled(spec.precompiled_charsmap))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(decoding)
    tokenizer.add_tokens(
        [
            AddedToken(piece.piece, normalized=False, special=piece.type != piece.USER_DEFINED)
            for piece in proto.pieces
            if piece.type in (piece.CONTROL, piece.UNKNOWN, piece.USER_DEFINED)
        ]
    )
    return tokenizer


def _unigram(proto: Any) -> Any:
    from tokenizers.models import Unigram

    scores = [
        (piece.piece, piece.score if piece.type in (piece.NORMAL, piece.USER_DEFINED) else _NEVER)
        for piece in proto.pieces
    ]
    return Unigram(scores, proto.trainer_spec.unk_id, proto.trainer_spec.byte_fallback)


def _bpe(proto: Any) -> Any:
    """Return a BPE model, its merges by score.

    SentencePiece merges the pair with the best piece first.
    """
    from tokenizers.models import BPE

    scores = {
        piece.piece: piece.score
        for piece in proto.pieces
        if piece.type in (piece.NORMAL, piece.USER_DEFINED)
    }
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(scores, key=lambda piece: -scores[piece])
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    vocabulary = {piece.piece: number for number, piece in enumerate(proto.pieces)}
    unknown, in_bytes = (
        proto.pieces[proto.trainer_spec.unk_id].piece,
        proto.trainer_spec.byte_fallback,
    )
    return BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=in_bytes)


@dataclass(frozen=True)
class TokenizerAgreement:
    """The exported tokenizer compared with the run's own, on held-out documents.

    documents: Number of documents.
    tokens: Number of tokens in all documents.
    different_ids: Number of documents to which the two tokenizers give different ids.
    different_texts: Number of documents whose ids the two decode to different texts.
    """

    documents: int
    tokens: int
    different_ids: int
    different_texts: int


def compare_tokenizers(
    manifests: Sequence[Manifest], out: Path, custom: bool
) -> TokenizerAgreement:
    """Encode held-out text with both tokenizers, by their defaults, and count the differences.

    If ids differ, the run's SentencePiece model is copied into the export.

    Args:
        custom: Whether the export has code of its own, which is then trusted.

    Raises:
        DataError: a shard cannot be read.
    """
    from transformers import AutoTokenizer

    manifest = manifests[0]
    run_tokenizer = open_tokenizer(manifest.tokenizer_path)
    # As a user would: transformers also looks at the model's class and its code.
    exported = AutoTokenizer.from_pretrained(
        str(out), trust_remote_code=custom, local_files_only=True
    )
    documents = tokens = different_ids = different_texts = 0
    for text in _held_out_texts(manifests):
        ids = run_tokenizer.encode([text])[0].tolist()
        documents = documents + 1
        tokens = tokens + len(ids)
        by_options = exported(text, add_special_tokens=False)["input_ids"]
        different_ids += not exported(text)["input_ids"] == by_options == ids
        different_texts += exported.decode(ids) != run_tokenizer.decode(ids)
        if tokens >= _COMPARED_TOKENS:
            break
    if different_ids and manifest.tokenizer.model_type != HUGGING_FACE:
        shutil.copyfile(manifest.tokenizer_path, out / "tokenizer.model")
    return TokenizerAgreement(documents, tokens, different_ids, different_texts)


def _held_out_texts(manifests: Sequence[Manifest]) -> Iterator[str]:
    """Yield the texts of held-out documents, or of training documents where there are none."""
    for manifest in manifests:
        tokenizer = open_tokenizer(manifest.tokenizer_path)
        for shard in manifest.shards_of("validation") or manifest.shards_of("train"):
            opened = open_shard(manifest, shard)
            start = 0
            for length in islice(opened.lengths.tolist(), shard.documents):
                yield tokenizer.decode(opened.tokens[start : start + length - 1].tolist())
                start += length
