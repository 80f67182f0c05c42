"""A run goes on at any layout.

Loaded is bit for bit what was saved, and losses differ by rounding.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from megatron_patches.recipe.variants import VARIANTS
from tests.command_line import checkpoint_tensors, equal
from tests.distributed.designs import DESIGNS, design_overrides
from tests.distributed.layouts import Chain, Layout, chains, facts, layouts
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(1800)  # the first test of a batch trains all its models

Answer = TypeVar("Answer")
WORKER = "tests.distributed.workers.layouts:go_on"
LINKS = (2, 2, 2)
"""Steps at each layout of a chain.

The loss of the first shows loaded weights, that of the second moments.
"""
STEPS = sum(LINKS)
TOLERANCE = {
    "fp32": 1e-6,
    "bf16": 1e-3,
    "bf16 sums": 3e-3,
    "fp32 muon": 1e-6,
    "bf16 muon": 1e-3,
}
"""Largest relative difference of a loss from those of the uninterrupted run on one rank."""
TRIED = (
    ("vanilla", "fp32"),
    ("orthogonal", "bf16"),
    ("orthogonal_penalty", "fp32"),
    ("unfreeze", "fp32"),
    ("monarch-hybrid-low_rank", "bf16"),
    ("low_rank", "fp32"),
    ("hybrid-three-adapters", "fp32"),
    ("hybrid-shared-adapters", "fp32"),
)
ON_TWO_RANKS = (
    ("thin", "fp32"),
    ("monarch_shared_conv", "bf16"),
    ("monarch_trainable", "fp32"),
    ("vanilla-freezes", "bf16"),
    ("monarch-freezes", "fp32"),
    ("synthesizer_random", "bf16"),
    ("synthesizer_factorized", "fp32"),
    ("orthogonal", "bf16 sums"),
)
"""What only its own tensors could make differ from the chains above."""
QUICK = chains(TRIED, layouts(4), len(LINKS))
SLOW = chains(ON_TWO_RANKS, layouts(2), len(LINKS))
CHAINS = [*QUICK, *SLOW]
SINGLE = Layout(1, 1, zero_stage=1, sequence_parallel=False, micro_batch_size=2)


class Link(NamedTuple):
    """What a chain did at one of its layouts."""

    checkpoint: Path
    loaded: Path | None
    answer: dict[str, Any]


class Trained:
    """Chains that are trained when one of their batch is asked for.

    Attributes:
        links: {chain: its links}.
        whole: {chain: losses of the same run on one rank}.
    """

    def __init__(self, shards: Path, runs: Path, *batches: Sequence[Chain]) -> None:
        self.shards, self.runs = shards, runs
        self.links = OnDemand(self.train, *batches)
        self.whole = OnDemand(self.uninterrupted, *batches)

    def overrides(self, chain: Chain, layout: Layout, name: str) -> list[str]:
        precision, _, special = chain.precision.partition(" ")
        return design_overrides(
            chain.design,
            self.shards,
            runs=self.runs,
            name=name,
            zero_stage=layout.zero_stage,
            schedule__steps=STEPS,
            checkpoint__keep_last=len(LINKS) + 1,
            parallel__tensor_model_parallel_size=layout.tensor_parallel,
            parallel__sequence_parallel=layout.sequence_parallel,
            data__micro_batch_size=layout.micro_batch_size,
            precision__dtype=precision,
            precision__grad_accum_dtype="bf16" if special == "sums" else "fp32",
            optimizer__kind="muon" if special == "muon" else "adamw",
        )

    def uninterrupted(self, some: Sequence[Chain]) -> dict[Chain, list[float]]:
        """{chain: losses of the same run on one rank}"""
        runs = {
            chain: {"chain": chain, "layout": SINGLE, "name": f"{chain}-whole"} for chain in some
        }
        answers = self._launch(runs, STEPS, None)
        return {chain: answer["loss"] for chain, answer in answers.items()}

    def train(self, some: Sequence[Chain]) -> dict[Chain, list[Link]]:
        by_chain: dict[Chain, list[Link]] = {chain: [] for chain in some}
        for index, steps in enumerate(LINKS):
            runs = {
                chain: {"chain": chain, "layout": chain.layouts[index], "name": str(chain)}
                for chain in some
            }
            for chain, answer in self._launch(runs, steps, index or None).items():
                run = self.runs / str(chain)
                step = sum(LINKS[: index + 1])
                loaded = self.echo(chain, index) if index else None
                by_chain[chain].append(Link(run / f"checkpoints/step_{step:08d}", loaded, answer))
        return by_chain

    def echo(self, chain: Chain, index: int) -> Path:
        return self.runs / "loaded" / str(chain) / str(index)

    def _launch(
        self, runs: dict[Chain, dict[str, Any]], steps: int, echo: int | None
    ) -> dict[Chain, dict[str, Any]]:
        """Train all, those of one world size in one launch."""
        by_chain = {}
        for ranks in sorted({run["layout"].ranks for run in runs.values()}):
            some = [chain for chain, run in runs.items() if run["layout"].ranks == ranks]
            payload = [
                {
                    "overrides": self.overrides(**runs[chain]),
                    "steps": steps,
                    "echo": str(self.echo(chain, echo)) if echo else None,
                }
                for chain in some
            ]
            answers = run_ranks(ranks, WORKER, {"runs": payload}, timeout=1200)
            by_chain.update(zip(some, answers, strict=True))
        return by_chain


class OnDemand(dict[Chain, Answer]):
    """{chain: what it did}, of a batch at once, when one of the batch is asked for."""

    def __init__(
        self, train: Callable[[Sequence[Chain]], dict[Chain, Answer]], *batches: Sequence[Chain]
    ) -> None:
        super().__init__()
        self._train = train
        self._batches = batches

    def __missing__(self, chain: Chain) -> Answer:
        self.update(self._train(next(batch for batch in self._batches if chain in batch)))
        return self[chain]


@pytest.fixture(scope="module")
def trained(tiny_shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tiny_shards, tmp_path_factory.mktemp("layouts"), QUICK, SLOW)


def with_slow(quick: Sequence[Chain], slow: Sequence[Chain]) -> pytest.MarkDecorator:
    """Try every chain, those of the second kind only where slow tests run."""
    marked = [pytest.param(chain, marks=pytest.mark.slow) for chain in slow]
    return pytest.mark.parametrize("chain", [*quick, *marked], ids=str)


every_chain = with_slow(QUICK, SLOW)


def test_the_chains_try_every_pair() -> None:
    tried = {fact for chain in CHAINS for fact in facts(chain)}
    for stage, other in product(range(4), range(4)):
        assert ("zero_stage", stage, other) in tried
    for size, other in product((1, 2, 4), (1, 2, 4)):
        assert ("tensor_parallel", size, other) in tried
        assert ("data_parallel", size, other) in tried
    for size, stage in product((1, 2, 4), range(4)):
        assert (("tensor_parallel", size), ("zero_stage", stage)) in tried
        assert (("data_parallel", size), ("zero_stage", stage)) in tried
    for precision, stage in product(("fp32", "bf16"), (1, 2, 3)):
        assert (("precision", precision), ("zero_stage", stage)) in tried
    assert {DESIGNS[chain.design]["variant"] for chain in CHAINS} >= {
        variant
        for variant in VARIANTS
        # like others:
        if variant
        not in (
            "hadamard",
            "dct",
            "pretrained",
            "orthogonal_shared",
            "orthogonal_trainable",
        )
    }


@every_chain
def test_what_is_loaded_is_what_was_saved(chain: Chain, trained: Trained) -> None:
    for prior, after in zip(trained.links[chain], trained.links[chain][1:], strict=False):
        assert after.loaded is not None
        saved = checkpoint_tensors(prior.checkpoint)
        loaded = checkpoint_tensors(after.loaded)
        steps = saved["position/step"]
        assert loaded.pop("counters/micro_steps") == steps * after.answer["micro steps"]
        assert saved.pop("counters/micro_steps") == steps * prior.answer["micro steps"]
        assert saved.keys() == loaded.keys() and len(saved) > 30
        assert [key for key in saved if not equal(saved[key], loaded[key])] == []
        masters = [
            tensor
            for key, tensor in saved.items()
            if key.startswith(("master/", "exp_avg/", "momentum/"))
        ]
        assert all(tensor.isfinite().all() and tensor.any() for tensor in masters)


@every_chain
def test_losses_are_those_of_the_uninterrupted_run(chain: Chain, trained: Trained) -> None:
    answers = [link.answer for link in trained.links[chain]]
    assert [answer["state"] for answer in answers] == ["stopped", "stopped", "finished"]
    losses = answers[-1]["loss"]
    assert len(losses) == STEPS
    assert losses == pytest.approx(trained.whole[chain], rel=TOLERANCE[chain.precision])


@every_chain
def test_the_history_tells_of_the_layouts(chain: Chain, trained: Trained) -> None:
    run = trained.links[chain][0].checkpoint.parents[1]
    segments = json.loads((run / "environment.json").read_text())["segments"]
    assert [segment["first_step"] for segment in segments] == [1, 1 + LINKS[0], 1 + sum(LINKS[:2])]
    for segment, layout in zip(segments, chain.layouts, strict=True):
        assert segment["world_size"] == layout.ranks and segment["zero_stage"] == layout.zero_stage
    for segment, prior, after in zip(segments[1:], chain.layouts, chain.layouts[1:], strict=False):
        changed = segment["changes"].get("tensor_model_parallel_size")
        if prior.tensor_parallel == after.tensor_parallel:
            assert changed is None
        else:
            assert changed == {"was": prior.tensor_parallel, "is": after.tensor_parallel}


@pytest.mark.full
@pytest.mark.parametrize("number", range(6))
def test_more_chains_on_up_to_16_ranks(number: int, trained: Trained) -> None:
    # Planning takes a second.
    large = chains([*product(DESIGNS, ("fp32", "bf16"))] * 3, layouts(16), len(LINKS))
    some = large[number::6]
    more = Trained(trained.shards, trained.runs, some)
    for chain in some:
        test_what_is_loaded_is_what_was_saved(chain, more)
        test_losses_are_those_of_the_uninterrupted_run(chain, more)
        shutil.rmtree(more.runs / str(chain))
