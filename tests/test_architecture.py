"""House rules of the packages: imports go one way, the loop knows no variant, files are short."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from megatron_patches.recipe.variants import VARIANTS
from tests.parsed_files import nodes, parsed, python_files
from tests.ranks import ROOT
from tools.count_code import PARTS, count, size

PACKAGES = ("pretrain", "laboratory", "megatron_patches", "data_pipeline")
MAY_IMPORT = {
    "pretrain": {"pretrain", "megatron_patches", "data_pipeline", "ds_configs"},
    "laboratory": {"laboratory", "pretrain", "megatron_patches", "data_pipeline"},
    "megatron_patches": {"megatron_patches"},
    "data_pipeline": {"data_pipeline"},
}
OURS = {*PACKAGES, "ds_configs", "tests", "benchmarks", "tools"}
LONGEST_FILE = 450
"""Lines of code, as `tools.count_code` counts them."""


@cache
def modules(package: str) -> list[Path]:
    paths = python_files(ROOT / package)
    assert paths, package
    return paths


@cache
def imports(path: Path) -> frozenset[str]:
    """Full names of all modules that a file imports, in functions and TYPE_CHECKING blocks too."""
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package: str) -> None:
    for path in modules(package):
        ours = {name.split(".")[0] for name in imports(path)} & OURS
        if path == ROOT / "pretrain/api.py":
            ours -= {"laboratory"}  # types of what it looks up by name
        assert ours <= MAY_IMPORT[package], (
            f"{path.relative_to(ROOT)} imports {ours - MAY_IMPORT[package]}"
        )


# The floors of each package, the lowest first: a room imports none beside or above it.
FLOORS = {
    "pretrain": (
        ("errors", "reporting"),
        ("runs", "ranks"),
        ("config",),
        ("telemetry", "model", "data", "plan"),
        ("checkpoint", "doctor"),
        ("optimizer",),
        ("training",),
        ("export",),
        ("__main__", "api", "job"),
    ),
    "laboratory": (
        ("reporting", "runs"),
        ("study",),
        ("compare", "finetuning", "replay", "sweep"),
        ("api", "compare_verbs", "evaluation", "quickstart", "slurm"),
        ("results",),
    ),
    "megatron_patches": (
        ("errors",),
        ("bank",),
        ("recipe",),
        ("engine",),
        ("attention",),
        ("model",),
        ("__main__",),
    ),
    "data_pipeline": (
        ("errors",),
        ("io",),
        ("sources",),
        ("tokenizer",),
        ("shards",),
        ("tokenizing", "demo_corpus"),
        ("__main__",),
    ),
}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_room_imports_one_of_its_own_floor_or_above(package: str) -> None:
    height = {room: floor for floor, rooms in enumerate(FLOORS[package]) for room in rooms}
    rooms = {path.name.removesuffix(".py") for path in (ROOT / package).iterdir()}
    assert rooms - {"__init__", "__pycache__", "configs", "grids", "py.typed"} == height.keys()
    arrows = [
        (path.relative_to(ROOT / package).parts[0].removesuffix(".py"), name.split(".")[1], path)
        for path in modules(package)
        for name in imports(path)
        if name.startswith(f"{package}.")
    ]
    assert len(arrows) > 30
    back = [
        arrow for arrow in arrows if arrow[0] != arrow[1] and height[arrow[1]] >= height[arrow[0]]
    ]
    assert back == []


LABORATORY_MAY_IMPORT = {
    # The run directory, the form of texts and tables, the configuration's reading.
    "pretrain.errors": "*",
    "pretrain.runs": "*",
    "pretrain.reporting": "*",
    "pretrain.config": "*",
    # What starts runs.
    "pretrain.data.open": "*",
    "pretrain.ranks": "*",
    "pretrain.job.shape": "slurm",
    # What looks into trained models.
    "pretrain.export": "evaluation finetuning compare_verbs",
    "pretrain.model": "evaluation",
    "pretrain.training.validation": "evaluation",
    "pretrain.telemetry.metrics": "evaluation",
    # A step is repeated with the trainer's own functions.
    "pretrain.training.loop": "replay",
    "pretrain.training.open_run": "replay",
    "pretrain.checkpoint": "replay",
    "pretrain.data.batches": "replay",
}
"""{module or folder of `pretrain`: rooms of the laboratory that may import it; * for all}"""


def test_the_laboratory_imports_of_the_trainer_only_what_is_listed() -> None:
    used: set[str] = set()
    for path in modules("laboratory"):
        room = path.relative_to(ROOT / "laboratory").parts[0].removesuffix(".py")
        for name in imports(path):
            if not name.startswith("pretrain."):
                continue
            entry = next((e for e in LABORATORY_MAY_IMPORT if f"{name}.".startswith(f"{e}.")), None)
            assert entry is not None, f"{path.relative_to(ROOT)} imports {name}"
            rooms = LABORATORY_MAY_IMPORT[entry]
            assert rooms == "*" or room in rooms.split(), f"{path.relative_to(ROOT)}: {name}"
            used.add(entry)
    assert used == LABORATORY_MAY_IMPORT.keys()


@cache
def import_graph() -> dict[str, set[str]]:
    """{module: our modules that it imports, in functions and TYPE_CHECKING blocks too}."""
    paths = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in PACKAGES
        for path in modules(package)
    }
    graph = {}
    for module, path in paths.items():
        imported = imports(path)
        graph[module] = {
            target
            for name in imported
            if (target := name if name in paths else name.rpartition(".")[0]) in paths
            and target != module
        }
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module: each reaches each."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            new = graph[ahead.pop()] - seen
            seen |= new
            ahead += new
        return seen

    reach = {module: reached(module) for module in graph}
    components = {
        tuple(sorted(other for other in reach[module] if module in reach[other]))
        for module in graph
        if module in reach[module]
    }
    return [list(circle) for circle in sorted(components)]


def test_modules_import_each_other_in_no_circle() -> None:
    graph = import_graph()
    assert len(graph) > 150 and sum(map(len, graph.values())) > 400
    assert circles(graph) == []


def test_only_load_makes_a_configuration() -> None:
    """So that nothing holds one which `refusals` has not judged."""
    makers = set()
    for path in [*modules("pretrain"), *modules("laboratory")]:
        for node in nodes(path):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                if called == "Config" or called.startswith(("Config.model_", "config.model_copy")):
                    makers.add(path.relative_to(ROOT).as_posix())
    assert makers == {"pretrain/config/load.py"}


def test_orthonormal_rows_depend_on_nothing_else_of_ours() -> None:
    imported = imports(ROOT / "megatron_patches/bank/orthonormal.py")
    ours = {name.rsplit(".", 1)[0] for name in imported if name.split(".")[0] in OURS}
    allowed = {
        f"megatron_patches.bank.{name}" for name in ("exact", "factors", "gaussian", "structured")
    }
    assert ours <= {"megatron_patches.errors"} | allowed


BANK = [
    ROOT / f"megatron_patches/bank/{name}.py"
    for name in ("orthonormal", "exact", "gaussian", "structured")
]


@pytest.mark.parametrize(
    ("paths", "without"),
    [
        (BANK, {"torch", "megatron", "deepspeed"}),
        ([*modules("megatron_patches"), *modules("data_pipeline")], {"deepspeed"}),
    ],
    ids=["bank", "deepspeed"],
)
def test_packages_that_a_module_may_not_import(paths: list[Path], without: set[str]) -> None:
    for path in paths:
        assert {name.split(".")[0] for name in imports(path)}.isdisjoint(without), path


LAUNCHER = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURMD_NODENAME",
}
"""What a launcher tells a rank about the ranks."""


def launcher_variables(path: Path) -> set[str]:
    """Those of LAUNCHER that a file names, but for `os.environ[NAME] = ...`, which only writes."""
    written = {
        id(node.slice)
        for node in nodes(path)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)
    }
    constants = (
        node for node in nodes(path) if isinstance(node, ast.Constant) and id(node) not in written
    )
    return {node.value for node in constants if isinstance(node.value, str)} & LAUNCHER


def test_one_file_reads_the_launchers_environment() -> None:
    readers = {
        str(path.relative_to(ROOT)) for path in modules("pretrain") if launcher_variables(path)
    }
    # `launch` is a launcher: it writes what `environment` reads.
    assert readers == {"pretrain/ranks/environment.py", "pretrain/ranks/launch.py"}
    assert launcher_variables(ROOT / "pretrain/ranks/environment.py") == LAUNCHER


def test_ranks_and_signals_are_known_without_torch() -> None:
    """Signal handlers and refusals come before torch, whose import takes seconds."""
    names = ("environment", "signals", "devices")
    program = f"import sys, {', '.join(f'pretrain.ranks.{name}' for name in names)}"
    program += ", pretrain.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def replaced_attributes(path: Path) -> set[str]:
    """`module.name` of everything of somebody else's modules that a file assigns to."""
    modules = {
        (alias.asname or alias.name).split(".")[0]
        for node in nodes(path)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    targets = [
        target
        for node in nodes(path)
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    assigned = {ast.unparse(target) for target in targets if isinstance(target, ast.Attribute)}
    return {name for name in assigned if name.split(".")[0] in modules}


def test_only_compat_replaces_anything_of_torch_or_megatron_core() -> None:
    replaced = {
        str(path.relative_to(ROOT)): names
        for package in PACKAGES
        for path in modules(package)
        if (names := replaced_attributes(path))
    }
    assert replaced == {
        "megatron_patches/engine/compat.py": {
            "dist.new_group",  # for the length of `initialize_model_parallel`
            "torch.compile",
            "torch.cuda.current_device",
            "torch._dynamo.config.recompile_limit",
            "torch.compiler.config.cache_key_tag",
            "config.triton.mix_order_reduction",  # of torch._inductor
            "megatron_random._CUDA_RNG_STATE_TRACKER",
            "megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED",
        },
        # Nor there: these are torch's own settings.
        "pretrain/ranks/gpu_settings.py": {
            "torch.utils.deterministic.fill_uninitialized_memory",
            "torch.backends.cudnn.deterministic",
            "torch.backends.cudnn.benchmark",
            "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
        },
        # DeepSpeed's, in the one place that imports it: what prints much, and waits for the device.
        "pretrain/ranks/groups.py": {
            "bf16_optimizer.see_memory_usage",
            "bf16_optimizer.is_invalid_grad_norm",
            "bf16_optimizer.BF16_Optimizer._update_hp_grad",
            "utils.mask_nan_or_inf_with_val_inplace",
        },
        # Python's own: names and texts are shown there as words, and both may go away.
        "data_pipeline/io/words.py": {"sys.stdout", "sys.stderr"},
        # Nothing is replaced there: two groups of a training that is over are forgotten.
        "pretrain/ranks/release.py": {
            "parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
            "parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
        },
    }


def test_what_is_written_against_a_version_says_so() -> None:
    """A reader who raises megatron-core's version finds every file to look at by one word."""
    for path in modules("megatron_patches"):
        against = any(name.startswith("megatron.core") for name in imports(path))
        docstring = ast.get_docstring(parsed(path)) or ""
        assert ("Version-sensitive" in docstring) >= against, path.relative_to(ROOT)


def test_the_loop_names_no_variant() -> None:
    """Nor does anything else of the program: variants are data, only variants.py names them."""
    published = ROOT / "laboratory/results"  # names the variants of its pages
    for path in [*modules("pretrain"), *modules("laboratory")]:
        if path.is_relative_to(published):
            continue
        docstrings = {
            id(node.body[0].value)
            for node in nodes(path)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        texts = [node for node in nodes(path) if isinstance(node, ast.Constant)]
        variants = {node.value for node in texts if id(node) not in docstrings} & set(VARIANTS)
        # The default baseline of `compare`, and of tasks.
        may_name = {"laboratory/compare_verbs.py": {"vanilla"}, "evaluation/verbs.py": {"vanilla"}}
        # Transformers' word for a layer with two kinds of cache.
        may_name["export/architectures.py"] = {"hybrid"}
        keys = ("/".join(path.parts[-2:]), "/".join(path.parts[-3:]))
        allowed = set().union(*(may_name.get(key, set()) for key in keys))
        assert variants <= allowed, f"{path.relative_to(ROOT)} names {variants - allowed}"
    assert "variant" not in (ROOT / "pretrain/training/loop.py").read_text()


@pytest.mark.parametrize("package", (*PACKAGES, "tests", "benchmarks"))
def test_files_are_short(package: str) -> None:
    lengths = {path.relative_to(ROOT): size(path.read_text()).lines for path in modules(package)}
    assert {path: length for path, length in lengths.items() if length > LONGEST_FILE} == {}


SMALL = 60
"""Lines of code below which a module that only one of its folder imports needs a reason."""
APART = {
    "data_pipeline/shards/parts.py": "what a blend is of, and what two parts may not share",
    "megatron_patches/engine/zero_state.py": "attributes that another DeepSpeed may name anew",
    "megatron_patches/bank/structured.py": "rows of fixed matrices, with a cosine of their own",
    "pretrain/export/agreement.py": "an export that is shown to agree with its model",
    "pretrain/training/rank_zero.py": "collectives of what one rank does for all",
    "pretrain/training/state_transfer.py": "what passes from the engine of one phase to the next",
}
"""{a small module that one other of its folder imports: why it is one of its own}"""


BUDGETS = {"core": 26_960, "laboratory": 10_000, "tools": 3_950, "tests": 34_990}
"""Lines of code of each part at most, as `tools.count_code` counts them."""


@pytest.mark.parametrize("part", PARTS)
def test_the_code_stays_within_its_budget(part: str) -> None:
    assert count(*PARTS[part]).lines <= BUDGETS[part]


def test_the_program_in_twenty_files_of_the_readme_stays_short() -> None:
    rows = re.findall(
        r"^\| .*\((.*)\) \| (`.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    files = {
        path
        for folders, names in rows
        for path in (path for package in PACKAGES for path in modules(package))
        if path.stem in re.findall(r"\w+", names)
        if any(f"/{folder}/" in path.as_posix() for folder in re.findall(r"`(.*?)`", folders))
    }
    assert len(files) == 20, files
    assert sum(size(path.read_text()).lines for path in files) <= 3_000


def test_a_small_module_with_one_importer_has_a_reason() -> None:
    importers: dict[str, set[str]] = {}
    for module, targets in import_graph().items():
        for target in targets:
            importers.setdefault(target, set()).add(module)
    small = set()
    for package in PACKAGES:
        for path in modules(package):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            folder = name.rpartition(".")[0]
            others = importers.get(name, set())
            alone = len(others) == 1 and {other.rpartition(".")[0] for other in others} == {folder}
            if alone and size(path.read_text()).lines < SMALL:
                small.add(path.relative_to(ROOT).as_posix())
    assert small == APART.keys()


def test_each_folder_says_what_its_files_are() -> None:
    """Each module and each folder below is named in the docstring of `__init__.py`."""
    missing = []
    for package in (*PACKAGES, "benchmarks"):
        for init in modules(package):
            if init.name != "__init__.py":
                continue
            words = set(re.findall(r"\w+", ast.get_docstring(ast.parse(init.read_text())) or ""))
            files = {path.stem for path in init.parent.glob("*.py")}
            folders = {path.parent.name for path in init.parent.glob("*/__init__.py")}
            missing += [
                f"{init.parent.relative_to(ROOT)}: {name}"
                for name in sorted((files | folders) - {"__init__", "__main__"} - words)
            ]
    assert missing == []
