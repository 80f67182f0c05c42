"""Training samples: every token once, the order a function of numbers only, real content."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.errors import DataError
from data_pipeline.shards.manifest import Manifest, read_manifest
from data_pipeline.shards.mapping import FileMap
from data_pipeline.shards.permutation import index_type, permutation
from data_pipeline.shards.reading import ShardPool, lengths_of, open_shard
from data_pipeline.shards.samples import TrainingSamples, ValidationSamples
from tests.data_pipeline.helpers import MakeManifest, ShardSpec, Workshop

EOD = 2
LENGTHS = [1, 7, 40, 3, 64, 16, 2, 33, 5, 90, 11, 8, 1, 1, 25, 17, 30, 4, 6, 9]


def numbered_documents() -> list[list[int]]:
    """Documents whose ids are all different: document d is 1000 (d + 1), 1000 (d + 1) + 1, ..."""
    return [[1000 * (d + 1) + i for i in range(length)] for d, length in enumerate(LENGTHS)]


@pytest.fixture
def numbered(make_manifest: MakeManifest) -> Manifest:
    """The numbered documents over three shards of two sources."""
    documents = numbered_documents()
    specs: list[ShardSpec] = [("train", "a", 0, documents[:6]), ("train", "b", 0, documents[6:7])]
    return make_manifest([*specs, ("train", "a", 1, documents[7:])])


def epoch_of(samples: TrainingSamples, epoch: int) -> np.ndarray:
    n = samples.samples_per_epoch
    return samples.blocks(np.arange(epoch * n, (epoch + 1) * n))


@pytest.mark.parametrize("sequence_length", [1, 5, 16, 150])
def test_an_epoch_has_every_token_once_in_its_place(
    numbered: Manifest, sequence_length: int
) -> None:
    samples = TrainingSamples(numbered, sequence_length, seed=3)
    total = sum(LENGTHS) + len(LENGTHS)
    assert samples.samples_per_epoch == (total - 1) // sequence_length
    for epoch in (0, 1, 5):
        blocks = epoch_of(samples, epoch)
        assert blocks.shape == (samples.samples_per_epoch, sequence_length + 1)
        targets = Counter(blocks[:, 1:].ravel().tolist())
        dropped = total - 1 - blocks[:, 1:].size
        assert 0 <= dropped < sequence_length
        ends = targets.pop(EOD)
        assert max(targets.values()) == 1, "a token came twice"
        everything = {token for document in numbered_documents() for token in document}
        assert set(targets) <= everything
        # All but the dropped tail and the stream's first token, which is only an input.
        assert (len(everything) - len(targets)) + (len(LENGTHS) - ends) == dropped + 1
        last = {document[-1] for document in numbered_documents()}
        first = {document[0] for document in numbered_documents()}
        for row in blocks.tolist():
            for token, following in itertools.pairwise(row):
                if token == EOD:
                    assert following in first
                else:
                    assert following == (EOD if token in last else token + 1)


def test_numbers_take_four_bytes_where_that_is_enough() -> None:
    assert index_type(1 << 32) == np.uint32 and index_type((1 << 32) + 1) == np.int64


def test_neighbouring_blocks_overlap_by_one_token(numbered: Manifest) -> None:
    blocks = epoch_of(TrainingSamples(numbered, 10, seed=0), 0)
    first = Counter(blocks[:, 0].tolist())
    last = Counter(blocks[:, -1].tolist())
    # In the stream's order each block's last token is the next one's first: all but one of either.
    assert sum((first & last).values()) == len(blocks) - 1


def test_epochs_differ_and_seeds_differ(numbered: Manifest) -> None:
    samples = TrainingSamples(numbered, 8, seed=1)
    first = epoch_of(samples, 0)
    second = epoch_of(samples, 1)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, epoch_of(TrainingSamples(numbered, 8, seed=2), 0))
    # The blocks themselves are new in the next epoch, not only their order.
    assert {tuple(row) for row in first} != {tuple(row) for row in second}


def test_resume_at_any_number_and_any_layout(numbered: Manifest) -> None:
    whole = TrainingSamples(numbered, 8, seed=1)
    count = 3 * whole.samples_per_epoch
    expected = whole.blocks(np.arange(count))
    for start in range(0, count, 7):
        fresh = TrainingSamples(numbered, 8, seed=1)
        assert np.array_equal(fresh.blocks(np.arange(start, count)), expected[start:])
    for ranks in (2, 4):
        got = np.empty_like(expected)
        for rank in range(ranks):
            numbers = np.arange(rank, count, ranks)
            got[numbers] = TrainingSamples(numbered, 8, seed=1).blocks(numbers)
        assert np.array_equal(got, expected)
    shuffled = np.random.Generator(np.random.Philox(5)).permutation(count)
    assert np.array_equal(whole.blocks(shuffled), expected[shuffled])


def test_the_order_is_pinned(numbered: Manifest) -> None:
    # A change here changes the data order of every resumed run: it needs a new _ORDER_VERSION.
    blocks = TrainingSamples(numbered, 8, seed=1234).blocks(np.array([0, 1, 49]))
    expected = [[5007, 5008, 5009, 5010], [10087, 10088, 10089, 2], [10068, 10069, 10070, 10071]]
    assert blocks[:, :4].tolist() == expected


@pytest.mark.parametrize(("at_once", "held"), [(1, 40), (3, 300), (9, 1), (16, 2000)])
def test_the_order_is_the_same_when_few_numbers_are_held_and_sorted_at_a_time(
    numbered: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int, held: int
) -> None:
    numbers = np.arange(2 * TrainingSamples(numbered, 8, seed=1).samples_per_epoch)
    expected = TrainingSamples(numbered, 8, seed=1).blocks(numbers)
    whole = np.concatenate(list(permutation(1000, "key")))
    monkeypatch.setattr("data_pipeline.shards.permutation.AT_ONCE", at_once)
    monkeypatch.setattr("data_pipeline.shards.permutation.HELD", held)
    pieces = list(permutation(1000, "key"))
    assert len(pieces) > 500 // at_once and max(map(len, pieces)) < 3 * at_once + 10
    assert np.array_equal(np.concatenate(pieces), whole)
    assert np.array_equal(np.sort(whole), np.arange(1000))
    for cache in (None, tmp_path):
        samples = TrainingSamples(numbered, 8, seed=1, cache_directory=cache)
        assert np.array_equal(samples.blocks(numbers), expected)


def test_held_out_shards_behind_the_samples_are_not_read(make_manifest: MakeManifest) -> None:
    documents = numbered_documents()
    parts = [documents[:6], documents[6:9], documents[9:]]
    specs: list[ShardSpec] = [("validation", "a", n, part) for n, part in enumerate(parts)]
    manifest = make_manifest(specs)
    whole = ValidationSamples([manifest], "a", 8, 1000)
    expected = whole.blocks(np.arange(len(whole)))
    tokens = [shard.tokens for shard in manifest.shards]
    for lost in (1, 2):
        Path(f"{manifest.prefix(manifest.shards[-lost])}.idx").unlink()
        count = (sum(tokens[:-lost]) - 1) // 8
        few = ValidationSamples([manifest], "a", 8, count)
        assert np.array_equal(few.blocks(np.arange(count)), expected[:count])


def test_an_order_of_ten_times_as_many_samples_draws_ten_times_as_many_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = []

    class Counting(np.random.Philox):
        def random_raw(self, size: int) -> np.ndarray:
            drawn.append(size)
            return super().random_raw(size)

    monkeypatch.setattr("numpy.random.Philox", Counting)
    monkeypatch.setattr("data_pipeline.shards.permutation.AT_ONCE", 10)
    monkeypatch.setattr("data_pipeline.shards.permutation.HELD", 100, raising=False)
    words = []
    for count in (10_000, 100_000):
        drawn.clear()
        list(permutation(count, "key"))
        words.append(sum(drawn))
    assert words[1] == 10 * words[0]


def test_cache_gives_the_same_and_notices_other_data(numbered: Manifest, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    plain = TrainingSamples(numbered, 8, seed=1)
    numbers = np.arange(2 * plain.samples_per_epoch)
    for _ in range(2):
        cached = TrainingSamples(numbered, 8, seed=1, cache_directory=cache)
        assert np.array_equal(cached.blocks(numbers), plain.blocks(numbers))
    files = sorted(cache.glob("*.npy"))
    # Two epochs of three arrays, the documents' addresses, and a note to each of the three.
    assert len(files) == 7 and len(list(cache.iterdir())) == 7 + 3
    # The cached order is used, not made again.
    first_times = [path.stat().st_mtime_ns for path in files]
    TrainingSamples(numbered, 8, seed=1, cache_directory=cache).blocks(numbers)
    assert [path.stat().st_mtime_ns for path in sorted(cache.glob("*.npy"))] == first_times
    # Every argument that means another order has files of its own.
    TrainingSamples(numbered, 8, seed=2, cache_directory=cache).blocks(numbers[:1])
    TrainingSamples(numbered, 9, seed=1, cache_directory=cache).blocks(numbers[:1])
    TrainingSamples(numbered, 8, seed=1, cache_directory=cache, source="a").blocks(numbers[:1])
    TrainingSamples(numbered, 8, seed=1, cache_directory=cache, salt="part").blocks(numbers[:1])
    # So have other data under the same names: one shard was made anew with other ids in it.
    shards = (dataclasses.replace(numbered.shards[0], bin_sha256="0" * 64), *numbered.shards[1:])
    other = dataclasses.replace(numbered, shards=shards)
    TrainingSamples(other, 8, seed=1, cache_directory=cache).blocks(numbers[:1])
    assert len(list(cache.glob("*.npy"))) == 7 + 5 * 3 + 2  # of other data also the addresses


@pytest.mark.parametrize("part", ["documents", "ends", "blocks", "addresses"])
def test_a_cache_that_is_damaged_is_made_again(
    numbered: Manifest, tmp_path: Path, part: str
) -> None:
    numbers = np.arange(20)
    expected = TrainingSamples(numbered, 8, seed=1, cache_directory=tmp_path).blocks(numbers)
    (path,) = tmp_path.glob(f"*-{part}.npy")
    whole = path.read_bytes()
    for at in (-1, len(whole) // 2, 8, 30):
        content = bytearray(whole)
        content[at] ^= 1
        path.write_bytes(content)
        again = TrainingSamples(numbered, 8, seed=1, cache_directory=tmp_path).blocks(numbers)
        assert np.array_equal(again, expected)
        assert path.read_bytes() == whole
    for note in tmp_path.glob("*.json"):
        note.write_bytes(note.read_bytes().replace(b"crc32", b"crc33"))
    again = TrainingSamples(numbered, 8, seed=1, cache_directory=tmp_path).blocks(numbers)
    assert np.array_equal(again, expected)


def test_shards_are_opened_when_they_are_read_and_closed_again(numbered: Manifest) -> None:
    samples = TrainingSamples(numbered, 8, seed=1)
    numbers = np.arange(samples.samples_per_epoch)
    expected = samples.blocks(numbers)
    pool = ShardPool(numbered, numbered.shards_of("train"), most_open=2)
    shards = numbered.shards_of("train")
    everything = [pool.tokens(number) for number in range(len(shards)) for _ in range(2)]
    assert list(pool._open) == [1, 2]  # arrays stay valid after their shards have been closed
    for shard, tokens in zip(shards, everything[::2], strict=True):
        assert np.array_equal(tokens, open_shard(numbered, shard).tokens)
    path = Path(f"{numbered.prefix(numbered.shards_of('train')[0])}.bin")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"\.bin has .* bytes where the manifest says .* verify"):
        TrainingSamples(numbered, 8, seed=1).blocks(numbers)
    path.unlink()
    with pytest.raises(DataError, match=r"\.bin is missing; .* verify .* says what to do"):
        TrainingSamples(numbered, 8, seed=1).blocks(numbers)
    assert expected.shape == (samples.samples_per_epoch, 9)


def test_real_text_comes_through(workshop: Workshop) -> None:
    manifest = read_manifest(workshop.shards)
    samples = TrainingSamples(manifest, 64, seed=0)
    targets = epoch_of(samples, 0)[:, 1:]
    expected = np.zeros(manifest.tokenizer.vocab_size, dtype=np.int64)
    for shard in manifest.shards_of("train"):
        opened = open_shard(manifest, shard)
        expected += np.bincount(opened.tokens, minlength=len(expected))
    missing = expected - np.bincount(targets.ravel(), minlength=len(expected))
    assert missing.min() >= 0 and missing.sum() == manifest.tokens("train") - targets.size <= 64


def test_validation_is_sequential_and_of_one_source(workshop: Workshop) -> None:
    manifest = read_manifest(workshop.shards)
    for source in manifest.sources("validation"):
        shards = manifest.shards_of("validation", source)
        tokens = [np.array(open_shard(manifest, shard).tokens) for shard in shards]
        stream = np.concatenate(tokens).astype(np.int64)
        samples = ValidationSamples([manifest], source, 32, max_samples=10_000)
        assert len(samples) == (len(stream) - 1) // 32
        blocks = samples.blocks(np.arange(len(samples)))
        assert np.array_equal(blocks[:, :-1].ravel(), stream[: len(samples) * 32])
        assert np.array_equal(blocks[:, 1:].ravel(), stream[1 : len(samples) * 32 + 1])
        few = ValidationSamples([manifest], source, 32, max_samples=3)
        assert len(few) == 3 and np.array_equal(few.blocks(np.arange(3)), blocks[:3])
        with pytest.raises(IndexError):
            few.blocks(np.array([3]))


def test_too_few_tokens_and_unknown_source(workshop: Workshop, numbered: Manifest) -> None:
    with pytest.raises(DataError, match=r"has 393 tokens, too few .* sequence_length 393"):
        TrainingSamples(numbered, 393, seed=0)
    assert TrainingSamples(numbered, 392, seed=0).samples_per_epoch == 1
    with pytest.raises(DataError, match=r"sequence_length 0"):
        TrainingSamples(numbered, 0, seed=0)
    manifest = read_manifest(workshop.shards)
    with pytest.raises(
        DataError, match=r"no validation documents of source 'Books'; it has PydocTopics"
    ):
        ValidationSamples([manifest], "Books", 8, 1)
    with pytest.raises(DataError, match=r"too few for one block of sequence_length 1000000"):
        ValidationSamples([manifest], "PydocTopics", 1_000_000, 1)
    with pytest.raises(DataError, match="max_samples 0 must be at least 1"):
        ValidationSamples([manifest], "PydocTopics", 8, 0)


@pytest.mark.parametrize("sequence_length", [1, 16])
def test_the_document_of_every_id_is_told(numbered: Manifest, sequence_length: int) -> None:
    home = {}
    for shard in numbered.shards_of("train"):
        opened = open_shard(numbered, shard)
        ends = np.cumsum(opened.lengths)
        for position, token in enumerate(opened.tokens.tolist()):
            document = int(np.searchsorted(ends, position, side="right"))
            home[token] = f"{shard.name}, document {document}"
    samples = TrainingSamples(numbered, sequence_length, seed=3)
    for number in (*range(5), samples.samples_per_epoch + 3):
        (ids,) = samples.blocks(np.array([number]))
        told = samples.origins(number)
        assert len(told) == sequence_length + 1
        pairs = list(zip(ids.tolist(), told, strict=True))
        documents = [(token, name) for token, name in pairs if token != EOD]
        assert all(home[token] == name for token, name in documents) and len(documents) > 0
        for (token, name), after in zip(pairs, told[1:], strict=False):
            assert token == EOD or name == after  # a document continues up to the id that ends it


def test_an_index_of_other_documents_and_files_without_bytes(
    numbered: Manifest, tmp_path: Path
) -> None:
    shard = numbered.shards_of("train")[0]
    assert lengths_of(numbered, shard).sum() == shard.tokens
    for other in ({"documents": shard.documents + 1}, {"tokens": shard.tokens - 1}):
        with pytest.raises(DataError, match=r"\.idx is not as the manifest says; see verify"):
            lengths_of(numbered, dataclasses.replace(shard, **other))
    (tmp_path / "empty").touch()
    mapped = FileMap(tmp_path / "empty")
    mapped.expect_random_access()
    mapped.forget_pages()
    assert mapped.content.shape == (0,)
    (tmp_path / "one").write_bytes(b"x")
    assert FileMap(tmp_path / "one").content.tolist() == [ord("x")]
    with pytest.raises(OSError, match="not a regular file") as raised:
        FileMap(tmp_path)  # a directory can be opened, but not mapped
    assert raised.value.filename == str(tmp_path)
