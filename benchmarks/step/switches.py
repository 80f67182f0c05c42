"""Two of the switches of section `performance` alone: the loss, and the attention of packed documents.

    OMP_NUM_THREADS=1 python -m benchmarks.step.switches

Each way takes turns with the others on the same tensors, forward and backward. Printed: the median over
rounds of (its CPU time / the first way's of the same round), and what autograd keeps of the loss. Whole steps
under a switch: benchmarks.step.measure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.step.contenders import in_turn, ratio
from megatron_patches.engine.documents import Documents, attend_within_documents
from megatron_patches.model.output import OutputLayer
from pretrain.ranks.groups import ParallelContext
from pretrain.ranks.single_process import one_process

Ways = Mapping[str, Callable[[], torch.Tensor]]
LOSSES = ((2048, 512, torch.float32), (32000, 512, torch.float32), (8192, 256, torch.bfloat16))
TOKENS, BATCH = 1024, 4
DOCUMENTS = (32, 128, 512)
SAMPLES, LENGTH, HEADS, HEAD_DIM = 4, 512, 8, 64


def main() -> None:
    with one_process() as context:
        for vocabulary, hidden, dtype in LOSSES:
            ways = losses(context, vocabulary, hidden, dtype)
            kept = {name: bytes_kept(way) / 2**20 for name, way in ways.items()}
            report(f"loss, {TOKENS} x {hidden} x {vocabulary}, {dtype}", ways, rounds=6, kept=kept)
        for mean in DOCUMENTS:
            report(f"attention, documents of {mean} tokens on average", attention(mean), rounds=14)


def losses(context: ParallelContext, vocabulary: int, hidden: int, dtype: torch.dtype) -> Ways:
    """The mean loss by every way of `performance.cross_entropy`."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=1,
        params_dtype=dtype,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )
    group = context.tensor_parallel_group
    weight = (torch.randn(vocabulary, hidden) * 0.05).to(dtype).requires_grad_()
    inputs = torch.randn(TOKENS // BATCH, BATCH, hidden).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (BATCH, TOKENS // BATCH))
    in_place, chunked = (
        OutputLayer(config, vocabulary, vocabulary, True, group, own) for own in (True, False)
    )

    def megatron() -> torch.Tensor:
        logits, _ = chunked(inputs, weight)
        return vocab_parallel_cross_entropy(logits, labels.t().contiguous()).mean()

    return {
        "megatron": megatron,
        "in_place": lambda: in_place(inputs, weight, labels=labels)[0].mean(),
        "chunked": lambda: chunked(inputs, weight, labels=labels)[0].mean(),
    }


def attention(mean: int) -> Ways:
    """The sum of what causal attention gives, by every way of `performance.document_attention`."""
    begins = torch.rand(SAMPLES, LENGTH) < 1 / mean
    starts = torch.where(begins, torch.arange(LENGTH), 0).cummax(1).values
    heads = [torch.randn(LENGTH, SAMPLES, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3)]

    def mask() -> torch.Tensor:
        query, key, value = (part.permute(1, 2, 0, 3) for part in heads)
        seen = ~Documents(starts).mask()
        return scaled_dot_product_attention(query, key, value, attn_mask=seen).permute(2, 0, 1, 3).sum()

    def flash() -> torch.Tensor:
        documents = Documents(starts).with_boundaries()
        query, key, value = (part.transpose(0, 1).flatten(0, 1) for part in heads)
        return attend_within_documents(query, key, value, documents, 0.0, HEAD_DIM**-0.5).sum()

    return {"mask": mask, "flash": flash}


def report(title: str, ways: Ways, rounds: int, kept: Mapping[str, float] | None = None) -> None:
    """Let the ways take turns, after two rounds that do not count, and print their ratios."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 2):
        for name, way in in_turn(list(ways.items()), number):
            started = time.process_time()
            way().backward()
            seconds[name].append(time.process_time() - started)
    print(title)
    first = next(iter(seconds.values()))
    for name, times in seconds.items():
        median = ratio(times[2:], first[2:])["median"]
        print(f"  {name:10} {median:5.2f}" + (f"   {kept[name]:6.1f} MiB kept" if kept else ""))


def bytes_kept(way: Callable[[], torch.Tensor]) -> int:
    """Return the bytes that autograd keeps for backward, weights and inputs included."""
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        way()
    return sum(kept.values())


if __name__ == "__main__":
    main()
