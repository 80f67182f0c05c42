"""Thorough check of a shard directory: rehash, reopen, recount, decode a sample."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.io.files import sha256_file
from data_pipeline.shards.manifest import (
    REJECTS_NAME,
    SPLITS,
    Manifest,
    Shard,
    expected_files,
    file_problem,
    rejects_intact,
)
from data_pipeline.shards.reading import open_shard
from data_pipeline.tokenizer.tokenizer import Tokenizer, open_tokenizer

_SAMPLE_DOCUMENTS = 8
_CHUNK_TOKENS = 1 << 24


def refuse_tokenizer(manifest: Manifest, tokenizer: Path) -> None:
    """Refuse a model that is not the directory's own.

    Raises:
        DataError: If it is another.
    """
    if sha256_file(tokenizer) != manifest.tokenizer.sha256:
        raise DataError(
            f"{tokenizer} is not the tokenizer of {manifest.directory}, "
            f"{manifest.tokenizer.file}; give that one, or leave --tokenizer out"
        )


def find_problems(manifest: Manifest) -> list[str]:
    """List everything that is wrong with a shard directory.

    Returns:
        Clauses that begin with a file's path.
    """
    files = expected_files(manifest, hash_everything=True)
    problems = [problem for file in files if (problem := file_problem(*file))]
    present_files = [*manifest.directory.glob("*.bin"), *manifest.directory.glob("*.idx")]
    unknown = set(present_files) - {path for path, _, _ in files}
    problems += [f"{path} is not in the manifest" for path in sorted(unknown)]
    rejects = manifest.directory / REJECTS_NAME
    if not rejects_intact(rejects, manifest.rejects_sha256):
        problems.append(f"{rejects} is not as the manifest says")
    if problems:
        # Changed files are not opened: reading past the end of a cut memory map would kill the
        # process.
        return problems
    try:
        stored_tokenizer = open_tokenizer(manifest.tokenizer_path)
    except DataError as error:
        return [str(error)]
    for shard in manifest.shards:
        try:
            problem = _content_problem(manifest, shard, stored_tokenizer)
        except DataError as error:
            problem = str(error)
        if problem:
            problems.append(problem)
    return problems


def leaked_documents(manifests: Sequence[Manifest]) -> list[str]:
    """List the pairs of directories of which one trains on documents that the other holds out.

    Documents are the same if their ids are: only exact duplicates are found.

    Returns:
        One clause per pair.

    Raises:
        DataError: If the directories have different tokenizers.
    """
    if len({(m.tokenizer.sha256, m.tokenizer.eod_id, m.dtype) for m in manifests}) > 1:
        raise DataError(
            "the directories were made with different tokenizers or ends of documents, so their "
            "ids cannot be compared"
        )
    held_out = {
        manifest.directory: {digest for split in SPLITS[1:] for digest in _digests(manifest, split)}
        for manifest in manifests
    }
    clauses = []
    for manifest in manifests:
        leaks: Counter[Path] = Counter()
        for digest in _digests(manifest, "train"):
            leaks.update(directory for directory, digests in held_out.items() if digest in digests)
        clauses += [
            f"{manifest.directory} trains on {count:,} documents that {directory} holds out"
            for directory, count in leaks.items()
        ]
    return clauses


def _digests(manifest: Manifest, split: str) -> Iterator[bytes]:
    """Yield a hash of the ids of every document of a split."""
    for shard in manifest.shards_of(split):
        opened = open_shard(manifest, shard)
        start = 0
        for length in opened.lengths.tolist():
            ids = opened.tokens[start : start + length]
            yield hashlib.blake2b(ids.data, digest_size=16).digest()
            start += length


def _content_problem(manifest: Manifest, shard: Shard, tokenizer: Tokenizer) -> str | None:
    """Describe ids out of range, documents without end, or documents that decoding changes."""
    opened = open_shard(manifest, shard)
    path = f"{manifest.prefix(shard)}.bin"
    tokens = opened.tokens
    eod_id = manifest.tokenizer.eod_id
    vocab_size = manifest.tokenizer.vocab_size
    ends = np.cumsum(opened.lengths)
    if not np.all(tokens[ends - 1] == eod_id):
        return f"{path} has a document that does not end with the end-of-document id {eod_id}"
    end_ids = 0
    for start in range(0, len(tokens), _CHUNK_TOKENS):
        chunk = tokens[start : start + _CHUNK_TOKENS]
        if int(chunk.max()) >= vocab_size or int(chunk.min()) < 0:
            return f"{path} has an id that the tokenizer's {vocab_size:,} tokens do not cover"
        end_ids += int(np.count_nonzero(chunk == eod_id))
    if end_ids != shard.documents:
        return f"{path} has {end_ids:,} end-of-document ids but {shard.documents:,} documents"
    if manifest.options.get("allow_lossy"):
        return None
    for number in np.linspace(0, shard.documents - 1, _SAMPLE_DOCUMENTS).astype(int):
        ids = tokens[ends[number] - opened.lengths[number] : ends[number] - 1].tolist()
        if tokenizer.encode([tokenizer.decode(ids)])[0].tolist() != ids:
            return f"{path}: document {number} does not decode to a text with the same ids"
    return None
