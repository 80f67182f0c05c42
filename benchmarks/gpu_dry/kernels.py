"""The kernels that inductor writes for the passes over the logits, on a GPU that is not there.

    python -m benchmarks.gpu_dry.kernels TOKENS VOCABULARY PIECES CAPABILITY

Prints a line of JSON for each pass: of each kernel [times that it reads a logit, times that it
writes one, bytes of machine code]. torch traces and lowers the program's own functions on pretended
CUDA tensors, and Triton compiles what comes of it; nothing is run.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.gpu_dry.__main__ import load_guard


def main(tokens: int, vocabulary: int, pieces: int, capability: int) -> None:
    """Print the kernels of both passes over the logits.

    Args:
        tokens: of a micro batch.
        vocabulary: columns of the logits.
        pieces: those of the tokenizer; the columns behind them are padding.
        capability: compute capability of the card, such as 80.
    """
    load_guard()
    import torch

    from benchmarks.gpu_dry.pretended import PretendedGpu

    gpu = PretendedGpu()
    describe_card(capability)
    from megatron_patches.model import output

    with gpu.fake:
        logits = torch.empty(tokens, vocabulary, dtype=torch.bfloat16, device="cuda")
        of_tokens = torch.empty(tokens, dtype=torch.float64, device="cuda")
        columns = torch.zeros(tokens, dtype=torch.int64, device="cuda")
        owned = torch.ones(tokens, dtype=torch.bool, device="cuda")
    plain = output.LogitTerms()
    given: Any = {
        output._log_sum: (logits, pieces, plain),
        output._to_gradient: (logits, of_tokens, owned, columns, pieces, plain),
    }
    for function, arguments in given.items():
        sources = re.findall(
            r"async_compile\.triton\('\w+', '''\n(.*?)'''", code_of(function, arguments), re.S
        )
        kernels = []
        for source in sources:
            pointers = r"(?:in|out|in_out)_ptr\d"
            of_logits = set(re.findall(rf"'({pointers})': '\*bf16'", source))
            reads, writes = (
                [
                    name
                    for name in re.findall(rf"tl\.{word}\(({pointers}) \+", source)
                    if name in of_logits
                ]
                for word in ("load", "store")
            )
            kernels.append((len(reads), len(writes), compiled_bytes(source, capability)))
        print(json.dumps(kernels), flush=True)
    os._exit(0)  # no library may tidy up what was never there


def code_of(function: Any, arguments: Any) -> str:
    """Return the module that inductor writes for a function.

    Args:
        function: to compile.
        arguments: pretended tensors and numbers.
    """
    import torch
    from torch._inductor.graph import GraphLowering

    class Written(BaseException):
        pass

    def stop(graph: Any) -> Any:
        raise Written(graph.codegen()[0].value)

    lowering: Any = GraphLowering
    lowering._compile_to_module = lowering.compile_to_module = stop
    torch._dynamo.reset()
    try:
        with torch.no_grad():
            torch.compile(function, fullgraph=True, dynamic=False)(*arguments)
    except Written as written:
        return str(written)
    raise AssertionError("inductor was not asked")


def compiled_bytes(source: str, capability: int) -> int:
    """Compile a kernel.

    Args:
        source: of the kernel, as inductor writes it.
        capability: compute capability of the card.

    Returns:
        Bytes of machine code.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = ast.literal_eval(re.search(r"'signature': (\{.*?\})", source)[1])  # type: ignore[index]
    name = re.findall(r"def (\w+)\(", source)[-1]
    # Without inductor's own launcher, which asks for the card.
    source = re.sub(r"@triton_heuristics.*?(?=@triton\.jit)", "", source, flags=re.S)
    source = source.replace("triton_helpers.set_driver_to_gpu()", "")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "kernel.py")
        path.write_text(source)
        spec: Any = importlib.util.spec_from_file_location("kernel", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sizes = {"XBLOCK": 1, "R0_BLOCK": 2048} if "R0_BLOCK" in signature else {"XBLOCK": 1024}
        written = ASTSource(getattr(module, name), signature, sizes)
        return len(triton.compile(written, target=GPUTarget("cuda", capability, 32)).asm["cubin"])


def describe_card(capability: int) -> None:
    """Answer inductor's questions about the card as an A100 (80) or H100 (90) does."""
    import torch
    import torch._dynamo.device_interface
    import torch._inductor.codegen.triton
    import torch.utils._triton
    from torch._inductor import config
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from benchmarks.gpu_dry.pretended import answering

    card = SimpleNamespace(
        multi_processor_count=108 if capability == 80 else 132,
        major=capability // 10,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        total_memory=80e9,
        gcnArchName="pretended",
    )
    interface: Any = torch._dynamo.device_interface.CudaInterface
    interface.is_available = staticmethod(answering(True))
    interface.get_compute_capability = staticmethod(answering(capability))
    interface.get_device_properties = staticmethod(answering(card))
    interface.Worker.get_device_properties = staticmethod(answering(card))
    cuda: Any = torch.cuda
    cuda.get_device_properties = answering(card)
    cuda.get_device_capability = answering(divmod(capability, 10))
    cuda._exchange_device = answering(0)
    cuda._maybe_exchange_device = answering(0)
    modules: Any = (torch.utils._triton, torch._inductor.codegen.triton)
    for module in modules:
        module.triton_hash_with_backend = answering("pretended")
    asked: Any = SimpleNamespace(
        get_current_target=answering(GPUTarget("cuda", capability, 32)),
        get_current_device=answering(0),
        get_active_torch_device=answering("cuda"),
        get_device_capability=answering(divmod(capability, 10)),
    )
    driver.set_active(asked)
    config.compile_threads, config.force_disable_caches = 1, True
    config.joint_graph_constant_folding = False  # it would compute numbers, which are not there


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
