"""A pretended GPU: CUDA tensors without contents, and a count of what a GPU would have to do.

torch's FakeTensorMode runs a program on shapes and types alone. On a torch built for the CPU it
needs a device guard for CUDA, which the command loads, and stand-ins for what torch.cuda offers as
Python.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LARGE = 2**20
"""Bytes from which on a copy counts."""
COPIES = ("_to_copy", "copy_", "clone", "cat")
READS = ("_local_scalar_dense", "nonzero", "equal")


def answering(answer: Any) -> Any:
    """Return a function that takes any arguments and returns `answer`."""

    def answered(*args: Any, **settings: Any) -> Any:
        return answer

    return answered


class Costs(TorchDispatchMode):
    """Counts by kind and place; the kinds are KINDS of the command."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()
        self.pinned: dict[int, Any] = {}

    def add(self, kind: str, what: str, times: float = 1) -> None:
        """Add to the count of the innermost line outside torch that caused it.

        Args:
            kind: Column of the table.
            what: Noun for what is counted.
            times: Number of times, or an amount.
        """
        self.found[kind, f"{what} at {_innermost_line()}"] += times  # type: ignore[assignment]

    def total(self, kind: str) -> float:
        """Return the total of one kind over all lines of code."""
        return sum(count for (counted_kind, _), count in self.found.items() if counted_kind == kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name in READS and isinstance(inputs[0], FakeTensor):
            if inputs[0].is_cuda:
                self.add("host wait", name)
            # Flags on the GPU tell of trouble, those on the CPU of states of generators, unchanged.
            return not inputs[0].is_cuda if inputs[0].dtype == torch.bool else 1.0
        result = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        # Operations of `prim` read properties of tensors and launch no kernel.
        if func.namespace != "prim" and any(tensor.is_cuda for tensor in inputs + results):
            # The third argument of `copy_` is non_blocking; that of others may be a tensor.
            waits = name in COPIES and not (kwargs.get("non_blocking") or True in args[2:])
            self._count(name, inputs, results, waits=waits)
        return result

    def _count(
        self, name: str, inputs: list[torch.Tensor], results: list[torch.Tensor], *, waits: bool
    ) -> None:
        devices = {tensor.device.type for tensor in inputs + results}
        if name in COPIES and len(devices) > 1:
            source = inputs[-1]
            if waits:
                self.add("host wait", f"{name} from the {source.device.type}")
            elif source.device.type == "cpu" and source.untyped_storage()._cdata not in self.pinned:
                self.add("pageable", f"{name} of {tuple(source.shape)}")
        elif len({tensor.device for tensor in inputs if tensor.dim()}) > 1:
            self.add("mixed", name)
        moved = sum(tensor.nbytes for tensor in results)
        if name in COPIES and moved >= LARGE:
            types = f"{inputs[-1].dtype} to {results[0].dtype}".replace("torch.", "")
            self.add("copy", f"{name} of {tuple(results[0].shape)}, {types}")
            self.add("copied MB", name, moved / 1e6)


class PretendedGpu(contextlib.ExitStack):
    """Context in which CUDA is pretended; parts of it last for the rest of the process.

    Attributes:
        costs: Everything asked of the GPU since the last `costs.found.clear()`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.costs = Costs()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        # torch.tensor(…, device="cuda") is then a tensor of the CPU and a copy, which is counted.
        fake: Any = FakeTensorMode
        fake.avoid_device_init = property(answering(True))
        torch.autograd.set_multithreading_enabled(False)
        _stand_in(self.costs)

    def __enter__(self) -> PretendedGpu:
        self.enter_context(self.fake)
        self.enter_context(self.costs)
        return self

    def move(self, model: torch.nn.Module) -> None:
        """Replace all tensors of a model on the CPU by pretended ones; tied weights stay tied."""
        moved: dict[int, torch.Tensor] = {}

        def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in moved:
                with self.fake:
                    pretended = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                    if isinstance(tensor, torch.nn.Parameter):
                        pretended = torch.nn.Parameter(
                            pretended, requires_grad=tensor.requires_grad
                        )
                # Megatron keeps flags such as `tensor_model_parallel` as attributes of parameters.
                pretended.__dict__.update(vars(tensor))
                moved[id(tensor)] = pretended
            return moved[id(tensor)]

        for module in model.modules():
            for store in (module._parameters, module._buffers):
                for name, tensor in store.items():
                    moved_to = None if tensor is None else on_gpu(tensor)
                    store[name] = moved_to  # type: ignore[assignment]
            attributes = vars(module)
            for store in (attributes, attributes.get("head_orders", {})):
                store |= {
                    k: on_gpu(value)
                    for k, value in store.items()
                    if isinstance(value, torch.Tensor)
                }


def _stand_in(costs: Costs) -> None:
    """Replace functions of torch.cuda by stand-ins, and count those that wait."""

    class Event:
        def __init__(self, *args: Any, **settings: Any) -> None: ...

        def __getattr__(self, name: str) -> Any:
            return answering(None)

        def elapsed_time(self, other: Any) -> float:
            return 1.0

        def synchronize(self) -> None:
            wait()

    class Stream(Event):
        device = torch.device("cuda", 0)

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *error: object) -> None: ...

    def pinned(tensor: torch.Tensor, *device: Any) -> torch.Tensor:
        storage = tensor.untyped_storage()
        costs.pinned[storage._cdata] = storage
        return tensor

    def as_list(tensor: torch.Tensor) -> list[float]:
        costs.add("host wait", "tolist")
        # An update, its norm, no signals.
        return [1.0, 1.0][: tensor.numel()] + [0.0] * (tensor.numel() - 2)

    state = torch.get_rng_state()
    card = SimpleNamespace(major=9, minor=0, total_memory=85e9, name="pretended")
    generator = SimpleNamespace(get_state=answering(state), set_state=answering(None))
    answers = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (9, 0),
        "get_device_properties": card,
        "get_device_name": "pretended",
        "get_rng_state": state,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "mem_get_info": (85e9, 85e9),
        "memory_stats": {},
        "init": None,
        "_lazy_init": None,
        "set_device": None,
        "empty_cache": None,
        "manual_seed": None,
        "manual_seed_all": None,
        "set_rng_state": None,
        "reset_peak_memory_stats": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answering(answer))

    def wait(*device: Any) -> None:
        costs.add("host wait", "synchronize")

    def current_stream(*device: Any) -> Stream:
        return Stream()

    cuda: Any = torch.cuda
    cuda.Event, cuda.Stream, cuda.default_generators = Event, Stream, (generator,)
    cuda.current_stream = cuda.default_stream = current_stream
    cuda.stream = answering(contextlib.nullcontext())
    cuda.synchronize = wait
    cuda.nvtx.range_push = cuda.nvtx.range_pop = answering(None)
    fake: Any = FakeTensor
    fake.tolist = as_list
    tensor: Any = torch.Tensor
    tensor.pin_memory = pinned
    tensor.record_stream = answering(None)


def _innermost_line() -> str:
    """Return the innermost line outside torch and this file, as `file:line`."""
    for frame in reversed(traceback.extract_stack(limit=40)):
        if "/torch/" not in frame.filename and frame.filename != __file__:
            file = frame.filename.split("site-packages/")[-1].removeprefix(f"{Path.cwd()}/")
            return f"{file}:{frame.lineno}"
    return sys.argv[0]
