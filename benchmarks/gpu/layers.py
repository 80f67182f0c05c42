"""Single layers: those of every kind compiled, and the products of structured banks by each way.

    python -m benchmarks.gpu.layers compile --seconds 50 --json compile.json
    python -m benchmarks.gpu.layers structured --seconds 30 --json structured.json

Stages of the check. `compile`: graph breaks, and the difference from eager layers; bf16 and
inductor on a GPU, fp32 on the CPU, where the graphs run with torch's own kernels. `structured`: the
Triton kernel beside two batched products and the dense matrix; one layer's product and, apart, its
input gradient, for the tokens of a micro batch of `large`, in the precision and at the hidden sizes
of SIZES. All ways take turns. Without a GPU: small sizes, and the operator's own products.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_patches.engine.compat import prepare_imports

prepare_imports()

import torch  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

from benchmarks.gpu.card import HEAD_DIM, facts  # noqa: E402
from benchmarks.gpu.measurements import Measurements, measuring_parser  # noqa: E402
from benchmarks.gpu.trainings import MAIN_VARIANTS  # noqa: E402
from megatron_patches.bank.monarch import Factors, add_input_grad, project  # noqa: E402
from megatron_patches.bank.monarch_kernel import TILES, Tile  # noqa: E402
from megatron_patches.bank.orthonormal import BankRecipe, factors_of_heads  # noqa: E402
from megatron_patches.model.penalty import take_auxiliary_losses  # noqa: E402
from megatron_patches.recipe.variants import VARIANTS  # noqa: E402
from pretrain.config.load import load_config  # noqa: E402
from pretrain.model.build import build_model, compile_layers, token_losses  # noqa: E402
from pretrain.model.structured_products import (  # noqa: E402
    PRODUCTS,
    StructuredProducts,
    take_turns,
    use_structured_products,
    way_of,
)
from pretrain.ranks.gpu_settings import use_arithmetic  # noqa: E402
from pretrain.ranks.groups import ParallelContext, set_seeds  # noqa: E402
from pretrain.ranks.single_process import one_process  # noqa: E402

BY_KERNEL = "monarch by the kernel"
"""Whatever a measurement would choose; without a GPU by the operator's own products."""
SIZES = (
    (1024, torch.bfloat16),
    (2048, torch.bfloat16),
    (768, torch.bfloat16),
    (1024, torch.float32),
)
SMALL_SIZES = ((128, torch.bfloat16), (192, torch.float32))


def main() -> None:
    """Compile layers or time products, as the command line says."""
    parser = measuring_parser(__doc__)
    parser.add_argument("what", choices=("compile", "structured"))
    every = list(dict.fromkeys([*MAIN_VARIANTS, *VARIANTS, BY_KERNEL]))
    every.remove("pretrained")  # needs the weights of another run
    parser.add_argument("--variants", nargs="+", default=every)
    parser.add_argument("--part", type=int, default=0, help="which of --parts")
    parser.add_argument("--parts", type=int, default=1, help="that share the variants")
    arguments = parser.parse_args()
    if arguments.what == "compile":
        measured = Measurements(arguments.json, arguments.seconds, variants={})
        with one_process() as context:
            for variant in arguments.variants[arguments.part :: arguments.parts]:
                for dropout in (0.0, 0.1) if variant in MAIN_VARIANTS else (0.0,):
                    measure = partial(compare_compiled, variant, dropout, context)
                    measured.attempt(f"{variant}, dropout {dropout:g}", measure, "variants")
        return
    use_arithmetic(deterministic=False, reduced_precision_reduction=False)
    on_gpu = torch.cuda.is_available()
    tokens = 25 * 512 if on_gpu else 3 * 16
    measured = Measurements(
        arguments.json, arguments.seconds, facts=facts(), tokens=tokens, sizes={}
    )
    for hidden_size, dtype in SIZES if on_gpu else SMALL_SIZES:
        name = f"{hidden_size}, {str(dtype).removeprefix('torch.')}"
        measure = partial(
            time_products,
            hidden_size,
            dtype,
            tokens,
            failed=measured.values["failed"],
            size=name,
        )
        measured.attempt(name, measure, "sizes")


def compare_compiled(variant: str, dropout: float, context: ParallelContext) -> dict[str, float]:
    """Run one micro batch of the demo's model forward and backward, eager and compiled.

    Args:
        variant: of the attention; BY_KERNEL is monarch with the kernel.
        dropout: its probability.
        context: this rank.

    Returns:
        graphs, breaks, seconds of the first compiled pass; without dropout also how far loss and
        gradients are apart, in units of the loss and of the largest entry of each gradient.
    """
    torch._dynamo.reset()
    counters.clear()
    on_gpu = context.device.type == "cuda"
    settings = [
        f"attention.variant={variant.removesuffix(' by the kernel')}",
        f"model.dropout={dropout}",
        "parallel.tensor_model_parallel_size=1",
        f"precision.dtype={'bf16' if on_gpu else 'fp32'}",
        f"model.num_layers={4 if on_gpu else 2}",
    ]
    products = StructuredProducts(Tile() if variant == BY_KERNEL else None, "for this check")
    eager = one_pass(settings, context, products, backend=None)
    started = time.perf_counter()
    compiled = one_pass(settings, context, products, backend="inductor" if on_gpu else "aot_eager")
    result: dict[str, float] = {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
        "seconds": time.perf_counter() - started,
        "finite": all(bool(tensor.isfinite().all()) for tensor in compiled.values()),
    }
    if not dropout:
        apart = {
            name: (
                (tensor - eager[name]).abs().max() / eager[name].abs().max().clamp(min=1e-12)
            ).item()
            for name, tensor in compiled.items()
            if tensor.numel()
        }
        result["loss"] = apart.pop("loss")
        result["gradients"] = max(apart.values())
    return result


def one_pass(
    settings: list[str], context: ParallelContext, products: StructuredProducts, backend: str | None
) -> dict[str, torch.Tensor]:
    """Run one micro batch of the demo's model forward and backward.

    Args:
        settings: overrides of `demo`.
        context: this rank.
        products: the ways of structured products.
        backend: that compiles the layers; None leaves them eager.

    Returns:
        Mean loss and all gradients by name, in fp32.
    """
    config = load_config("demo", settings)
    model = build_model(config, context)
    use_structured_products(model, products)
    if backend is not None:
        compile_layers(model, backend)
    set_seeds(config.run.seed, 1, 0, 0)
    generator = torch.Generator().manual_seed(7)
    size = (config.data.micro_batch_size, config.data.sequence_length + 1)
    tokens = torch.randint(config.model.vocab_size, size, generator=generator).to(context.device)
    loss = token_losses(model, tokens).mean()
    sum(take_auxiliary_losses(model).values(), loss).backward()
    gradients = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach().float(), **gradients}


def time_products(
    hidden_size: int, dtype: torch.dtype, tokens: int, failed: dict[str, str], size: str
) -> dict[str, Any]:
    """Time every way of one layer's structured products, forward and backward.

    Args:
        hidden_size: of the layer.
        dtype: of its numbers.
        tokens: of the micro batch.
        failed: is given the traceback of a way that fails.
        size: the name of this size there.

    Returns:
        Milliseconds of every way, how far its result is from that of fp32, by norm, and the TB/s of
            the best kernel.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    heads = hidden_size // HEAD_DIM
    recipe = BankRecipe(
        seed=1,
        hidden_size=hidden_size,
        head_dim=HEAD_DIM,
        num_attention_heads=heads,
        num_query_groups=heads,
        scope="layer",
        construction="monarch",
    )
    made = factors_of_heads(recipe, 0, [("query", range(heads)), ("key", range(heads))])
    factors = Factors(
        *(torch.from_numpy(part).to(device, dtype) for part in (made.right, made.left))
    )
    exact = Factors(factors.right.float(), factors.left.float()).rows()
    weight = exact.to(dtype)
    generator = torch.Generator(device).manual_seed(1)
    x, total, grad = (
        torch.randn(tokens, width, generator=generator, device=device, dtype=dtype)
        for width in (hidden_size, hidden_size, len(weight))
    )
    ways: dict[str, Tile | None] = {PRODUCTS: None, **{way_of(tile): tile for tile in TILES}}

    def backward(tile: Tile | None) -> torch.Tensor:
        return add_input_grad(grad, factors, total.clone(), tile)

    passes: dict[str, tuple[dict[str, Callable[[], torch.Tensor]], torch.Tensor]] = {
        "forward": (
            {"dense": lambda: x @ weight.t()}
            | {name: partial(project, x, factors, tile) for name, tile in ways.items()},
            x.float() @ exact.t(),
        ),
        "backward": (
            {"dense": lambda: torch.addmm(total, grad, weight)}
            | {name: partial(backward, tile) for name, tile in ways.items()},
            total.float() + grad.float() @ exact,
        ),
    }
    result: dict[str, Any] = {}
    for name, (works, wanted) in passes.items():
        apart = {}
        for way, work in list(works.items()):
            try:
                apart[way] = ((work().float() - wanted).norm() / wanted.norm()).item()
            except Exception:  # a tile that this card has no room for
                failed[f"{size}, {name}: {way}"] = traceback.format_exc(limit=-6)
                del works[way]
        result[name] = {"milliseconds": take_turns(works, device), "apart": apart}
    # The least that a pass can move: the input once, queries and keys once.
    moved = (x.numel() + grad.numel()) * x.element_size()
    taken = result["forward"]["milliseconds"]
    best = min((taken[way] for way in ways if ways[way] and way in taken), default=float("inf"))
    return {**result, "best_kernel_tb_s": moved / best / 1e9}


if __name__ == "__main__":
    main()
