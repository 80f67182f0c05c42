"""Compatibility with megatron-core and torch.

Version checks, stand-ins on a CPU, and differences between versions.

megatron-core asks for a CUDA device and a CUDA random-number tracker even where tensors live on the
CPU (`tensor_parallel/layers.py`, `tensor_parallel/random.py`, `rotary_pos_embedding.py`).
`prepare_megatron_core` supplies CPU equivalents with the same meaning, and only when the device is
the CPU: on CUDA nothing is replaced. The limits of torch.compile are set here too.

Its supported versions differ in `mark_tensor_parallel`, in `mlp_spec`, and in the argument `name`
that every module gets from 0.18 on: None, unless the model has a name. Ours accept the argument and
do not use it.

Version-sensitive, like every file of this package that imports megatron-core: each states after
this word which internals it relies on. To support another version, read them all.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from functools import cache, partial, wraps
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from megatron_patches.errors import MethodError

TESTED_MEGATRON_CORE = ("0.16.1", "0.19.2")
"""The oldest and the newest megatron-core whose internals this package was tested with. From 0.17
on it needs Python 3.12."""
TESTED_TORCH = ("2.9", "2.15")
"""The oldest and the newest torch with which `make test-oldest` and `make test-newest` passed."""
_torch_compile = torch.compile
_KERNEL_OF_EXPERTS = "megatron.core.transformer.moe.ops.paged_stash"


def check_megatron_core_version(installed: str | None = None) -> None:
    """Refuse a megatron-core older or newer than those whose internals were tested.

    Args:
        installed: version to judge; None: that of the installed package.

    Raises:
        MethodError: it was not tested.
    """
    installed = installed or version("megatron-core")
    oldest, newest = TESTED_MEGATRON_CORE
    if not _minor_version(oldest) <= _minor_version(installed) <= _minor_version(newest):
        raise MethodError(
            f"megatron-core {installed} is installed but this program was written against "
            f"{oldest} to {newest}; pip install megatron-core=={oldest}"
        )


def untested_torch(installed: str = torch.__version__) -> str | None:
    """Return a sentence for the user if the installed torch is newer than any tested one.

    Raises:
        MethodError: torch is older than any that was tested.
    """
    oldest, newest = TESTED_TORCH
    tested = f"this program was tested with torch {oldest} to {newest}"
    if _minor_version(installed) < _minor_version(oldest):
        raise MethodError(
            f"torch {installed} is installed but {tested}; install torch {oldest} or newer"
        )
    return (
        f"{tested}; {installed} is newer"
        if _minor_version(installed) > _minor_version(newest)
        else None
    )


def _minor_version(text: str) -> tuple[int, ...]:
    """Return (2, 9) for "2.9", "2.9.1+cu128" and "2.9.0a0+145a3a7bda.nv25.10"."""
    return tuple(int(part) for part in text.split(".")[:2])


def prepare_imports() -> None:
    """Import megatron-core without needless imports, and without warnings no user can act on.

    Call this before anything else imports megatron-core or DeepSpeed.
    """
    # Before the first import of either package, whose modules decorate functions as they load.
    torch.compile = _compile_when_called
    if any(option.startswith("error") for option in sys.warnoptions):
        warnings.simplefilter("default")  # else PYTHONWARNINGS=error ends a training for a package
    for message, category in (
        (".*(Apex|Transformer Engine).*not installed", UserWarning),  # this program uses neither
        ("full scope is deprecated", UserWarning),  # a default of megatron-core's own config
        (".*torch.distributed.*is deprecated", FutureWarning),  # megatron-core calls it
    ):
        warnings.filterwarnings("ignore", message=message, category=category)
    logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(
        lambda record: not record.getMessage().startswith("GPTModel IS DEPRECATED")
    )
    quiet_extension_lookup()
    with without_unused_packages():
        import megatron.core  # noqa: F401


def quiet_extension_lookup() -> None:
    """Silence torch's message about a missing GPU runtime when DeepSpeed is imported.

    A build of torch for GPUs logs it at every start on a machine without one.
    """
    logging.getLogger("torch.utils.cpp_extension").addFilter(_is_no_missing_runtime)


def _is_no_missing_runtime(record: logging.LogRecord) -> bool:
    return not re.match("No (CUDA|ROCm) runtime is found", record.getMessage())


@contextlib.contextmanager
def without_unused_packages() -> Iterator[None]:
    """Hide boto3 from imports inside the context, and Triton on a machine without a GPU.

    megatron-core and DeepSpeed try to import both and work without them; together they take a third
    of a second of every start. Later imports get the real packages. megatron-core 0.19 does require
    Triton, which the CPU build of torch lacks, for a kernel of experts. No model here has experts:
    a module whose names are all None stands in for that kernel.
    """
    stand_in = ModuleType(_KERNEL_OF_EXPERTS)
    vars(stand_in)["__getattr__"] = {}.get
    unused = {"boto3": None, _KERNEL_OF_EXPERTS: stand_in, "triton": None}
    if torch.cuda.is_available():
        unused = {"boto3": None}
    hidden = [name for name in unused if name not in sys.modules]
    sys.modules.update({name: unused[name] for name in hidden})  # type: ignore[misc]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


def _compile_when_called(model: Any = None, **settings: Any) -> Any:
    """Delay torch.compile of the functions that megatron-core and DeepSpeed decorate with it.

    The two packages decorate some forty functions, none of which this program calls, and the first
    decoration imports torch's whole compiler, which takes a second. Functions of other packages are
    compiled as always.
    """
    if model is None:
        return partial(_compile_when_called, **settings)
    if (getattr(model, "__module__", None) or "").partition(".")[0] not in (
        "megatron",
        "deepspeed",
    ):
        return _torch_compile(model, **settings)
    compiled = cache(partial(_torch_compile, model, **settings))
    return wraps(model)(lambda *arguments, **keywords: compiled()(*arguments, **keywords))


@contextlib.contextmanager
def one_group_per_ranks() -> Iterator[None]:
    """Make megatron-core's `initialize_model_parallel` create one process group per set of ranks.

    megatron-core creates a group for each kind of parallelism, 43 on one rank, most of them of the
    same ranks; each costs threads and sockets, or an NCCL communicator. This program uses two
    kinds, tensor and data parallelism. Their groups coincide only where both are a single rank,
    which waits for no other.
    """
    new_group, groups = dist.new_group, {}

    # Groups differ in their options too, so these belong to the key.
    def new_or_same(ranks: Any, **settings: Any) -> Any:
        key = (tuple(ranks), *(settings.get(name) for name in ("backend", "timeout", "pg_options")))
        if key not in groups:
            groups[key] = new_group(ranks, **settings)
        return groups[key]

    dist.new_group = new_or_same  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.new_group = new_group


def prepare_megatron_core(device: torch.device) -> None:
    """Make megatron-core usable on `device`; call once per process, after the process groups exist.

    On CUDA this only creates megatron-core's own random-number tracker. On the CPU it also answers
    `torch.cuda.current_device()` with the CPU device and puts a tracker over the CPU generator in
    place.
    """
    check_megatron_core_version()
    from megatron.core.tensor_parallel import random as megatron_random

    if device.type == "cuda":
        megatron_random.initialize_rng_tracker(force_reset=True)
        return

    # megatron-core asks this for the device of every weight, on a CPU too.
    def current_device() -> torch.device:
        return device

    torch.cuda.current_device = current_device  # type: ignore[assignment]
    megatron_random._CUDA_RNG_STATE_TRACKER = _cpu_rng_tracker()
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True


def mark_tensor_parallel(weight: torch.Tensor, dim: int) -> None:
    """Mark a weight as this rank's slice, for checkpoints and DeepSpeed's gradient norm.

    The attributes are megatron-core's. Its own function for them refuses a weight that is marked
    already, and from 0.18 on its layers mark their weights themselves.
    """
    weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    weight.partition_dim, weight.partition_stride = dim, 1  # type: ignore[attr-defined]


def mlp_spec(linear_fc1: type, linear_fc2: type) -> Any:
    """Return the spec of megatron-core's MLP of two linear layers for its TransformerLayer."""
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    submodules = MLPSubmodules(linear_fc1=linear_fc1, linear_fc2=linear_fc2)
    if hasattr(MLP, "as_mlp_submodule"):  # 0.18 and later
        return partial(MLP.as_mlp_submodule, submodules=submodules)
    return ModuleSpec(module=MLP, submodules=submodules)


def allow_graphs(count: int) -> None:
    """Let torch.compile make `count` graphs of one function.

    All layers run the same function, which has a graph for each kind of layer, in training and in
    evaluation.
    """
    import torch._dynamo  # takes a second

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, count)


def mend_inductor() -> None:
    """Work around a wrong result and a failure of the inductor of torch 2.13.

    The key of its disk cache leaves out the CPU's vector width: on nodes that share a cache, or
    with ATEN_CPU_CAPABILITY set, a graph compiled for vectors of 16 numbers is reused where vectors
    have 8, and gives NaN. The width is therefore added to the key. On GPUs inductor tries to join
    sums over rows with sums over columns, and ends in an AssertionError if a kernel has sums of
    unlike lengths: those of a convolution's taps, and of query_key_bias with shared rows. Joining
    is therefore switched off, which costs 5 % of a layer's elementwise traffic with dropout, and
    nothing without.
    """
    import torch.compiler.config
    from torch._inductor import config

    # Appended, since the user may have set a tag.
    kernels = torch.backends.cpu.get_cpu_capability()
    tags = torch.compiler.config.cache_key_tag.split()
    if kernels not in tags:
        torch.compiler.config.cache_key_tag = " ".join((*tags, kernels))
    if hasattr(config.triton, "mix_order_reduction"):
        config.triton.mix_order_reduction = False


def _cpu_rng_tracker() -> object:
    """Make a megatron-core random-number tracker whose streams live in the CPU generator."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    class CPURNGStatesTracker(CudaRNGStatesTracker):
        """Tracker with the base class's contract: `fork` swaps the state of the CPU generator."""

        def add(self, name: str, seed: int) -> None:
            if name in self.states_:
                raise ValueError(f"random-number stream {name!r} already exists")
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
            outside = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outside)

    return CPURNGStatesTracker()


def seed_dropout(shared_seed: int, tensor_parallel_seed: int) -> None:
    """Seed both dropout streams.

    megatron-core draws dropout on replicated activations from the default generator (equal on all
    tensor-parallel ranks) and on sharded activations from its tracker. Seeding them before every
    micro batch makes masks a function of the seeds, so a resumed run needs no saved generator
    state.

    Args:
        shared_seed: seed of the stream that the tensor-parallel ranks share.
        tensor_parallel_seed: seed of this rank's stream.
    """
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    # torch.manual_seed would seed every kind of device, and format a traceback for each that is not
    # in use.
    torch.default_generator.manual_seed(shared_seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(shared_seed)
    tracker = get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("model-parallel-rng", tensor_parallel_seed)
