"""Record what a change must leave byte-equal, and compare with a recording.

    python -m tools.record --out build/before.json       # every part
    python -m tools.record --against build/before.json   # exit code 1 if a value differs
    python -m tools.record --against tests/recorded/v0.5-lab.json --parts bank,show

| part | what is recorded |
| --- | --- |
| bank | rows of frozen heads, of every construction and scope and of every variant |
| shards | tokenizer, shards and manifest of a seeded corpus |
| init | initial weights of every design, on one rank and on two tensor-parallel ranks |
| train | exact losses and gradient norms of ten steps of every design, and its checkpoint |
| export | logits of an export of each of those runs; "refused" where there is no class for it |
| show | the resolved configuration of every shipped config and variant, by section |
| plan | the answer of `plan --json` for the same, by heading |

Banks of `svd`, `householder` and `cayley`, and what is computed by training and exports, have the
same bits only on machines that round as that of the recording (`tools.arithmetic`). Designs,
variants and constructions that only one of the two has, removed or added since, are printed and are
no difference.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from typer.testing import CliRunner

from data_pipeline.errors import DataError
from megatron_patches.bank.orthonormal import CONSTRUCTIONS, ROLES, SCOPES, BankRecipe
from megatron_patches.bank.shards import bank_rows, layer_shard
from megatron_patches.errors import MethodError
from megatron_patches.recipe.variants import VARIANTS
from pretrain.__main__ import app
from pretrain.config.load import load_config
from pretrain.config.sources import shipped_files
from pretrain.errors import UserError
from pretrain.ranks.groups import LaunchEnvironment, initialize_distributed, shutdown_distributed
from pretrain.ranks.signals import StopSignals
from pretrain.ranks.single_process import one_process
from pretrain.runs.metrics_file import read_metrics
from tests.command_line import checkpoint_tensors
from tests.distributed.designs import DESIGNS, design_overrides
from tests.ranks import ROOT, run_ranks
from tools.arithmetic import arithmetic_digest
from tools.made_corpus import write_made_corpus

CONFIGS = tuple(shipped_files("pretrain.configs", "*.yaml"))
GPUS = {"demo": "4", "demo_modern": "4"}
STEPS = 10
"""Of `train`; the second change of `unfreeze` needs so many."""
DIGITS = 16
"""Hexadecimal digits of a SHA-256 that are kept: enough for what nobody forges."""


def digest(content: bytes) -> str:
    """Return the first digits of the SHA-256 of `content`."""
    return hashlib.sha256(content).hexdigest()[:DIGITS]


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the digest of a tensor's type, shape and elements."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return digest(head + flat.view(torch.uint8).numpy().tobytes())


@dataclass
class Workplace:
    """Directory and shared results of the parts.

    Attributes:
        directory: For everything that is written.
    """

    directory: Path
    _trained: dict[str, Any] | None = None

    def shards(self) -> Path:
        """Return the directory of the seeded corpus's shards, made on the first call."""
        shards = self.directory / "unigram/shards"
        if not shards.exists():
            _make_shards(self.directory / "unigram", "unigram")
        return shards

    def trained(self) -> dict[str, Any]:
        """Return the report of `train_designs`; trained in `directory`/runs on the first call."""
        if self._trained is None:
            runs = self.directory / "runs"
            payload = _payload(self.shards(), runs, schedule__steps=STEPS)
            self._trained = run_ranks(1, "tools.record:train_designs", payload, timeout=1800)
        return self._trained


def _payload(shards: Path, runs: Path, **settings: Any) -> dict[str, Any]:
    """Return what rank functions get: the overrides of every design."""
    overrides = {
        design: design_overrides(design, shards, runs, design, **settings) for design in DESIGNS
    }
    return {"runs": overrides}


def _make_shards(directory: Path, model_type: str) -> None:
    """Write the seeded corpus, a tokenizer and shards of it below `directory`."""
    corpus = str(directory / "corpus")
    tokenizer = str(directory / "tokenizer")
    write_made_corpus(directory / "corpus")
    size = ["--vocab-size", "512", "--model-type", model_type]
    _data_pipeline("train-tokenizer", corpus, "--out", tokenizer, *size)
    into = [f"--tokenizer={tokenizer}.model", f"--out={directory / 'shards'}", "--name=tiny"]
    _data_pipeline("tokenize", corpus, *into)


def _data_pipeline(*arguments: str) -> None:
    command = [sys.executable, "-m", "data_pipeline", *arguments]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


# --- parts: each yields (name, digest) ------------------------------------------------------------
Entries = Iterator[tuple[str, str]]


def bank(workplace: Workplace) -> Entries:
    """Yield rows of every construction at two small shapes, and of two heads of every variant."""
    recipes: dict[str, dict[str, Any]] = {
        f"{construction}/{scope}": {"construction": construction, "scope": scope}
        for construction in CONSTRUCTIONS
        for scope in SCOPES
    }
    recipes |= {
        "gaussian": {"init": "gaussian"},
        "gaussian/std": {"init": "gaussian", "gaussian_std": 0.02},
    }
    for name, recipe in recipes.items():
        for hidden_size, head_dim in ((64, 8), (64, 16)):
            yield from _bank_rows(f"{name}/{hidden_size}x{head_dim}", hidden_size, head_dim, recipe)
    for variant in VARIANTS:
        with _refusals() as allowed:
            variant_recipe = load_config("small", [f"attention.variant={variant}"]).recipe
            if isinstance(variant_recipe, BankRecipe):
                for role in ROLES:
                    rows = bank_rows(variant_recipe, 1, role, [0, 3])
                    yield f"variant/{variant}/{role}", digest(rows.tobytes())
        if not allowed:
            yield f"variant/{variant}", "refused"


def _bank_rows(name: str, hidden_size: int, head_dim: int, recipe: dict[str, Any]) -> Entries:
    """Yield rows of four query and two key heads in float64, and as a rank holds them in bf16."""
    try:
        bank_recipe = BankRecipe(
            seed=1234,
            hidden_size=hidden_size,
            head_dim=head_dim,
            num_attention_heads=4,
            num_query_groups=2,
            **recipe,
        )
    except MethodError:
        yield name, "refused"
        return
    for role in ROLES:
        rows = bank_rows(bank_recipe, 1, role, range(bank_recipe.num_heads(role)))
        yield f"{name}/{role}", digest(rows.tobytes())
    shard = layer_shard(
        bank_recipe, layer=1, role="query", rank=1, tensor_parallel_size=2, dtype=torch.bfloat16
    )
    yield f"{name}/rank 1 of 2/bf16", tensor_digest(shard)


def shards(workplace: Workplace) -> Entries:
    """Yield every file of the directories of both kinds of tokenizer, except location.json."""
    workplace.shards()
    _make_shards(workplace.directory / "bpe", "bpe")
    for kind in ("unigram", "bpe"):
        directory = workplace.directory / kind
        yield f"{kind}/tokenizer.model", digest((directory / "tokenizer.model").read_bytes())
        for file in sorted((directory / "shards").rglob("*")):
            name = f"{kind}/{file.relative_to(directory)}"
            if file.name == "location.json":  # where the texts lie
                continue
            if file.is_file():
                yield name, digest(file.read_bytes())


def init(workplace: Workplace) -> Entries:
    """Yield parameters and buffers of all designs on every rank."""
    for size in (1, 2):
        directory = workplace.directory
        payload = _payload(directory, directory, parallel__tensor_model_parallel_size=size)
        weights = run_ranks(size, "tools.record:initial_weights", payload)
        for design, ranks in weights.items():
            for rank, tensors in enumerate(ranks):
                name = f"{design}/tp{size}/rank {rank}"
                yield name, digest(json.dumps(sorted(tensors.items())).encode())


def initial_weights(payload: dict[str, Any]) -> dict[str, list[dict[str, str]]]:
    """Return what every rank has of each design: {parameter or buffer: digest} (rank function)."""
    import torch.distributed as dist

    from pretrain.model.build import build_model

    environment = LaunchEnvironment.read()
    size = environment.world_size
    context = initialize_distributed(environment, size, timeout_seconds=300)
    weights = {}
    for design, overrides in payload["runs"].items():
        model = build_model(load_config("demo", overrides), context)
        rank_digests = {
            name: tensor_digest(tensor)
            for tensors in (model.named_parameters(), model.named_buffers())
            for name, tensor in tensors
        }
        ranks: list[dict[str, str]] = [{}] * size
        dist.all_gather_object(ranks, rank_digests)
        weights[design] = ranks
    shutdown_distributed(context)
    return weights


def train(workplace: Workplace) -> Entries:
    """Yield exact losses and gradient norms, and the last checkpoint's tensors."""
    for design, curves in workplace.trained().items():
        for quantity, values in curves.items():
            yield f"{design}/{quantity}", digest(" ".join(map(repr, values)).encode())
        run = workplace.directory / "runs" / design
        tensors = checkpoint_tensors(run / f"checkpoints/step_{STEPS:08d}")
        shown = {
            key: tensor_digest(value) if torch.is_tensor(value) else repr(value)
            for key, value in sorted(tensors.items())
        }
        yield f"{design}/checkpoint", digest(_lines(shown).encode())


def train_designs(payload: dict[str, Any]) -> dict[str, Any]:
    """Train every design, and return its curves (rank function)."""
    from pretrain.training.loop import train as run_training

    curves = {}
    for design, overrides in payload["runs"].items():
        config = load_config("demo", overrides)
        run_training(config, StopSignals())
        records = list(read_metrics(config.run_path / "metrics.jsonl"))
        curves[design] = {
            tag: [record[tag] for record in records] for tag in ("loss/train", "optim/grad_norm")
        }
    return curves


def export(workplace: Workplace) -> Entries:
    """Yield logits of exports in transformers, and the tensors of their files."""
    workplace.trained()
    payload = {
        "runs": str(workplace.directory / "runs"),
        "out": str(workplace.directory / "exports"),
    }
    yield from run_ranks(1, "tools.record:export_designs", payload, timeout=1800).items()


def export_designs(payload: dict[str, Any]) -> dict[str, str]:
    """Export every run; return the digests of its logits and weights (rank function)."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    from pretrain.export.export import export_run

    tokens = torch.arange(48).view(3, 16) * 7 % 512
    digests = {}
    with one_process() as context:
        for design in DESIGNS:
            out = Path(payload["out"]) / design
            with _refusals() as allowed:
                export_run(Path(payload["runs"]) / design, out, context)
            if not allowed:
                digests[design] = "refused"
                continue
            model = AutoModelForCausalLM.from_pretrained(
                str(out), dtype=torch.float32, trust_remote_code=True
            )
            with torch.no_grad():
                digests[f"{design}/logits"] = tensor_digest(model.eval()(tokens).logits)
            weights = load_file(out / "model.safetensors")
            shown = {name: tensor_digest(weight) for name, weight in sorted(weights.items())}
            digests[f"{design}/weights"] = digest(_lines(shown).encode())
    return digests


def show(workplace: Workplace) -> Entries:
    """Yield the sections of `show`, over all configs, for each variant."""
    for variant in VARIANTS:
        sections: dict[str, list[str]] = {}
        for config in CONFIGS:
            for line in _verb("show", config, f"attention.variant={variant}").splitlines():
                section = line.partition(" ")[0].partition(".")[0] or "more"
                # Line numbers move with every comment of a config's file.
                shown = " ".join(word.partition(".yaml:")[0] for word in line.split())
                sections.setdefault(section, []).append(f"{config}: {shown}")
        for section, lines in sections.items():
            yield f"{variant}/{section}", digest("\n".join(lines).encode())


def plan(workplace: Workplace) -> Entries:
    """Yield the headings of `plan --json`, over all configs, for each variant."""
    for variant in VARIANTS:
        headings: dict[str, list[str]] = {}
        for config in CONFIGS:
            arguments = ["--gpus", GPUS.get(config, "8"), "--json"]
            answer = _verb("plan", config, f"attention.variant={variant}", *arguments)
            headings_of_config = {"refused": True} if answer == "refused" else json.loads(answer)
            for heading, content in headings_of_config.items():
                lines = json.dumps(content, indent=1).splitlines()
                headings.setdefault(heading, []).extend(f"{config}: {line}" for line in lines)
        for heading, lines in headings.items():
            yield f"{variant}/{heading}", digest("\n".join(lines).encode())


def _verb(*arguments: str) -> str:
    """Return what a verb of the program prints, or "refused"."""
    with _refusals() as allowed:
        done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
        assert done.exit_code == 0, done.output
    return done.stdout if allowed else "refused"


@contextlib.contextmanager
def _refusals() -> Iterator[list[bool]]:
    """Catch refusals of the program; the yielded list stays empty then, else it gets True."""
    allowed: list[bool] = []
    try:
        yield allowed
        allowed.append(True)
    except (UserError, MethodError, DataError):
        pass


def _lines(values: dict[str, str]) -> str:
    return "\n".join(f"{name} {value}" for name, value in values.items())


PARTS: dict[str, Callable[[Workplace], Entries]] = {
    "bank": bank,
    "shards": shards,
    "init": init,
    "train": train,
    "export": export,
    "show": show,
    "plan": plan,
}


# --- recordings -----------------------------------------------------------------------------------
def record(parts: Iterable[str]) -> dict[str, Any]:
    """Return a recording of some keys of `PARTS`: the machine, and the digests by part."""
    # Other numbers of threads sum in another order.
    torch.set_num_threads(1)
    directory = Path(tempfile.mkdtemp(prefix="record-"))
    try:
        workplace = Workplace(directory)
        recorded: dict[str, dict[str, str]] = {}
        for part in parts:
            recorded[part] = dict(PARTS[part](workplace))
            print(f"{part}: {len(recorded[part])} values", file=sys.stderr, flush=True)
    finally:
        shutil.rmtree(directory)
    return {"machine": machine(), "parts": recorded}


def machine() -> str:
    """Return what last bits may depend on: how the machine rounds, and versions."""
    capability = torch.backends.cpu.get_cpu_capability()
    return (
        f"{platform.machine()} {capability}, arithmetic {arithmetic_digest()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, numpy {np.__version__}"
    )


def differences(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a line for each value that differs, or that is missing in one of the two.

    Args:
        was: The recording to compare with.
        now: The new recording; designs that only one of the two has are left out.
    """
    lines = []
    for part, values in now["parts"].items():
        earlier = was["parts"].get(part, {})
        both = _designs(part, earlier) & _designs(part, values)
        for name in earlier | values:
            pair = (earlier.get(name, "missing"), values.get(name, "missing"))
            if pair[0] != pair[1] and _designs(part, [name]) <= both:
                lines.append(f"{part}/{name} differs: {pair[0]} before, {pair[1]} now")
    return lines


def _designs(part: str, names: Iterable[str]) -> set[str]:
    """Return the first words of names: their designs; of a bank's, construction and scope."""
    words = 2 if part == "bank" else 1
    return {"/".join(name.split("/")[:words]) for name in names}


def only_in_one(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a line for each part with designs in one recording only: removed or added since.

    Args:
        was: The recording to compare with.
        now: The new recording; other parts than its own are left out.
    """
    lines = []
    for part, values in now["parts"].items():
        earlier = _designs(part, was["parts"].get(part, {}))
        current = _designs(part, values)
        for kind, names in (("gone", earlier - current), ("new", current - earlier)):
            if names:
                lines.append(f"{part}: {kind}: {', '.join(sorted(names))}")
    return lines


def main() -> int:
    """Run the command line; return 1 if something differs."""
    parser = argparse.ArgumentParser(prog="python -m tools.record", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, help="write the recording here")
    parser.add_argument("--against", type=Path, help="compare with this recording")
    parser.add_argument("--parts", help=f"some of {','.join(PARTS)}; default: all")
    arguments = parser.parse_args()
    if arguments.out is None and arguments.against is None:
        parser.error("give --out or --against")
    parts = arguments.parts.split(",") if arguments.parts else list(PARTS)
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]}; parts: {', '.join(PARTS)}")
    was = json.loads(arguments.against.read_text()) if arguments.against else None
    now = record(parts)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(now, indent=1) + "\n")
    if was is None:
        return 0
    lines = differences(was, now)
    if lines and was["machine"] != now["machine"]:
        print(f"recorded on {was['machine']}; this is {now['machine']}")
    print("\n".join([*only_in_one(was, now), *(lines or ["nothing differs"])]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
