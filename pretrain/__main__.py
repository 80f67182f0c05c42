"""The command line, `python -m pretrain VERB`; a user's mistake is one sentence, exit code 2."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from contextlib import suppress
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

try:
    import typer
    from typer.core import TyperGroup
except ModuleNotFoundError:
    print(
        f"error: {sys.executable} has no typer; `make demo` installs what is needed into .venv, "
        "then `source .venv/bin/activate`",
        file=sys.stderr,
    )
    sys.exit(2)

from data_pipeline.io.home import expand_arguments, unset_empty_variables
from data_pipeline.io.limits import limit_sentence
from data_pipeline.io.words import guard_output, output_or_refusal, shown_in_line
from pretrain.checkpoint.verb import checkpoint
from pretrain.config.arguments import ConfigArgument, OverridesArgument
from pretrain.doctor.request import Difference, Request
from pretrain.errors import UserError
from pretrain.export.verb import export, import_, sample
from pretrain.plan.verb import plan
from pretrain.ranks.devices import ask_for, use_cuda
from pretrain.ranks.environment import (
    REFUSAL,
    LaunchEnvironment,
    launcher_listens,
    speaks_for_all,
)
from pretrain.ranks.output import outlive_output
from pretrain.ranks.signals import StopSignals

LABORATORY = {
    "compare": "laboratory.compare_verbs:compare",
    "compare-losses": "laboratory.compare_verbs:compare_losses",
    "sweep": "laboratory.sweep.verb:sweep",
    "trial": "laboratory.sweep.verb:trial",
    "replay": "laboratory.replay.verb:replay",
    "diff": "laboratory.replay.verb:diff",
    "evaluate": "laboratory.evaluation.verbs:evaluate",
    "try": "laboratory.quickstart.verbs:try_",
    "demo": "laboratory.quickstart.verbs:demo",
}
"""{verb: its function, or its app of verbs}, all that this package knows of the laboratory."""

PANELS = {
    "Begin": ("try", "demo", "list", "show", "plan"),
    "Train": ("doctor", "train", "checkpoint", "sweep", "trial"),
    "Compare": ("compare", "compare-losses", "evaluate"),
    "Look closer": ("replay", "diff"),
    "Publish": ("sample", "export", "import"),
}
"""{panel of `--help`: its verbs}, in the order of a user's work."""

SHIPPED = {"configs": ("pretrain.configs", "*.yaml"), "grids": ("laboratory.grids", "*/*.yaml")}
"""{what `list` prints: package and pattern of the files}"""


class Named(str, Enum):
    """A kind of thing whose names `list` prints."""

    VARIANTS = "variants"
    CONFIGS = "configs"
    GRIDS = "grids"


class Verbs(TyperGroup):
    """The verbs; an error about a setting given as an option says how settings are written."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return [verb for verbs in PANELS.values() for verb in verbs]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        command: Any = super().get_command(ctx, cmd_name)
        if command is not None:
            panels = (panel for panel, verbs in PANELS.items() if cmd_name in verbs)
            command.rich_help_panel = next(panels)
        return command

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            return super().invoke(ctx)
        # NoSuchOption is click's, or that of the click inside newer versions of typer.
        except Exception as error:
            option = getattr(error, "option_name", None)
            verb = getattr(error, "ctx", None)
            settings = verb is not None and any(
                parameter.name == "overrides" for parameter in verb.command.params
            )
            if option and settings:
                reported: Any = error
                reported.message = f"{reported.message.rstrip('.')}. {_written_as_setting(option)}"
            raise


def _written_as_setting(option: str) -> str:
    """Return a sentence on how to write a setting that was given as an option."""
    from pretrain.config.keys import KEYS

    name = option.strip("-").replace("-", "_")
    alike = [key for key in KEYS if key.rpartition(".")[2] == name]
    keys = alike or [key for key in KEYS if name in key]
    settings = ", ".join(f"{key}=..." for key in keys[:4]) or "section.key=value"
    return f"Settings have no dashes: {settings}"


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Pretrain GPT models with frozen orthonormal Query/Key projections beside ordinary ones.",
)

app.add_typer(checkpoint, name="checkpoint")


def _print_versions(requested: bool) -> None:
    """Print the versions that a bug report needs."""
    if not requested:
        return
    from platform import python_version

    from pretrain.runs.environment import package_versions

    versions = package_versions()
    libraries = ", ".join(
        f"{name} {versions[name] or 'missing'}" for name in ("torch", "megatron-core", "deepspeed")
    )
    typer.echo(f"ora-pretrain {versions['ora-pretrain']} (Python {python_version()}, {libraries})")
    raise typer.Exit


@app.callback()
def _program(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_print_versions,
            help="Print the versions in use and exit.",
        ),
    ] = False,
) -> None:
    """Options before the verb."""
    if context.invoked_subcommand in ("checkpoint", "compare", "sweep", "trial"):
        # Thousands of runs make many small objects; where tensors are in use, garbage is large.
        gc.set_threshold(50_000, 20, 100)


LocalRanksOption = Annotated[
    int,
    typer.Option(
        min=0, help="Start this many ranks on this machine; 0: ranks come from torchrun or srun."
    ),
]


@app.command()
def train(
    config: ConfigArgument, overrides: OverridesArgument = None, local_ranks: LocalRanksOption = 0
) -> None:
    """Train, resuming from the newest complete checkpoint of the same run if there is one.

    On GPUs where the machine has any. To train on the CPU of such a machine: run.device=cpu.

    Example: python -m pretrain train demo attention.variant=orthogonal --local-ranks 4
    """
    outlive_output()
    if local_ranks:
        _train_on_local_ranks(config, overrides or [], local_ranks)
    # Before the import of torch: an early signal must not kill the rank.
    signals = StopSignals().install()
    gc.disable()  # collections during the imports below take half a second and free nothing
    from pretrain.config.load import load_config
    from pretrain.data.open import check_inputs

    loaded = load_config(config, overrides or [])
    # Quick checks first: the imports below take seconds.
    check_inputs(loaded, LaunchEnvironment.read().world_size)
    ask_for(loaded.run.device)  # before the imports that look for GPUs
    from megatron_patches.engine.compat import prepare_imports

    prepare_imports()
    from pretrain.export.run_exports import check_can_export, export_at_end
    from pretrain.training.loop import train as run_training

    if loaded.checkpoint.export_at_end:
        check_can_export(loaded)
    gc.freeze()  # later collections need not look at the imported modules either
    gc.enable()
    state = run_training(loaded, signals)
    signals.ignore()
    # A job script has it made after its ranks.
    if loaded.checkpoint.export_at_end and REFUSAL not in os.environ:
        export_at_end(loaded.run_directory, state)
    _leave(0)


@app.command()
def show(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    meanings: Annotated[
        bool, typer.Option("--meanings", help="Print also the meaning of each key.")
    ] = False,
    tensors: Annotated[
        bool,
        typer.Option(
            "--tensors",
            help="Print what trains, by the names that patterns of rates and decay match.",
        ),
    ] = False,
) -> None:
    """Print the resolved config, each value with where it came from, and the model's true size.

    Example: python -m pretrain show large parallel.tensor_model_parallel_size=2
    """
    from pretrain.config.show import render_show, render_tensors

    if tensors and meanings:
        raise UserError("--tensors prints no keys, so --meanings has none to explain; drop one")
    if tensors:
        typer.echo(render_tensors(config, overrides or []))
    else:
        typer.echo(render_show(config, overrides or [], meanings=meanings))


@app.command()
def doctor(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    local_ranks: LocalRanksOption = 0,
    timeout: Annotated[
        float, typer.Option(min=1, help="Seconds to wait for a rank to come, and for its checks.")
    ] = 180,
    gpus: Annotated[
        int | None,
        typer.Option(min=0, help="GPUs that every node must have; default: as Slurm says."),
    ] = None,
    allow: Annotated[
        list[Difference] | None,
        typer.Option(help="Leave no node out for this difference; repeatable."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the results and bad nodes as JSON.")
    ] = None,
) -> None:
    """Check every node before training.

    Exit code 0: all fit; 2: you or the site must act; 3: bad nodes.

    Example: srun python -m pretrain doctor large --report doctor.json
    """
    request = Request(
        config=config,
        overrides=tuple(overrides or ()),
        timeout=timeout,
        gpus=gpus,
        allow=tuple(allow or ()),
        report=report,
    )
    if local_ranks and not launcher_listens():  # each rank runs the same command line
        from pretrain.ranks.launch import launch_local_ranks

        command = [sys.executable, "-m", "pretrain", *sys.argv[1:]]
        sys.exit(launch_local_ranks(command, local_ranks))
    code = _doctor_on_this_rank(request)
    sys.stdout.flush()
    # Python would wait at its end for the thread of a check that hangs.
    os._exit(code)


@app.command("list")
def list_(what: Annotated[Named, typer.Argument(help="What to list.")]) -> None:
    """List the variants of attention, the shipped configurations, or the grids of `sweep`.

    Example: python -m pretrain list grids
    """
    from itertools import takewhile
    from textwrap import fill

    from megatron_patches.recipe.variants import PURPOSES, VARIANTS
    from pretrain.config.sources import shipped_files

    about = {}
    for name, path in shipped_files(*SHIPPED.get(what.value, SHIPPED["configs"])).items():
        comment = takewhile(lambda line: line.startswith("# "), path.read_text().splitlines())
        about[name] = " ".join(line[2:] for line in comment).partition(". ")[0]
    if what is Named.VARIANTS:
        about = {
            name: f"{policy.training_in_words:17}{PURPOSES[name]}"
            for name, policy in VARIANTS.items()
        }
    wide = max(map(len, about)) + 2
    for name, text in about.items():
        typer.echo(fill(f"{name:{wide}}{text.removesuffix('.')}", 80, subsequent_indent=" " * wide))


for _verb in (plan, export, sample, import_):
    app.command(_verb.__name__.rstrip("_"))(_verb)
for _name, _place in LABORATORY.items():
    _module, _, _attribute = _place.partition(":")
    _function = getattr(import_module(_module), _attribute)
    if isinstance(_function, typer.Typer):
        app.add_typer(_function, name=_name)
    else:
        app.command(_name)(_function)
expand_arguments(app)


def _train_on_local_ranks(config: str, overrides: list[str], ranks: int) -> NoReturn:
    """Refuse here, once, what can be refused, then start the ranks; exit with their exit code."""
    from pretrain.config.load import load_config
    from pretrain.data.open import check_inputs
    from pretrain.ranks.launch import launch_local_ranks

    loaded = load_config(config, overrides)
    check_inputs(loaded, ranks)
    ask_for(loaded.run.device)
    use_cuda()
    typer.echo(f"{loaded.run_path}: starting {ranks} ranks; their imports take a while")
    command = [sys.executable, "-m", "pretrain", "train", config, *overrides]
    _leave(launch_local_ranks(command, ranks))


def _leave(code: int) -> NoReturn:
    """End this process without the seconds that freeing torch takes; everything is closed."""
    with suppress(OSError):  # Python itself reports an output that is gone
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _doctor_on_this_rank(request: Request) -> int:
    """Run the preflight and return its exit code.

    Steps that must precede the import of torch come first.
    """
    # torch's sockets warn of what the doctor reports itself, in a sentence.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from megatron_patches.engine.compat import prepare_imports
    from megatron_patches.errors import MethodError
    from pretrain.config.load import load_config

    prepare_imports()
    # The doctor reports a refused config too.
    with suppress(UserError, MethodError):
        ask_for(load_config(request.config, request.overrides).run.device)
    from pretrain.doctor.rank import run_doctor

    return run_doctor(request)


def main() -> None:
    """Run the verb; turn a user's mistake into one sentence and exit code 2 (entry point)."""
    from data_pipeline.errors import DataError
    from megatron_patches.errors import MethodError

    unset_empty_variables()
    guard_output()
    try:
        with output_or_refusal():
            app(standalone_mode=True)
    except (UserError, DataError, MethodError) as error:
        _report(error)
        sys.exit(2)
    except Exception as error:
        if (sentence := limit_sentence(error)) is None:
            raise
        _report(UserError(sentence, rank_specific=True))
        sys.exit(2)


def _report(error: Exception) -> None:
    """Print the error; rank 0 speaks for all ranks, unless the error is one rank's own.

    In a Slurm job, a refusal that all ranks share is also written to a file, because the job must
    not try again, unless the refusal may pass.
    """
    sentence = shown_in_line(str(error))
    rank_specific = getattr(error, "rank_specific", False)
    if speaks_for_all() or rank_specific:
        print(f"error: {sentence}", file=sys.stderr, flush=True)
    if REFUSAL in os.environ and not rank_specific and not getattr(error, "passing", False):
        with suppress(OSError):  # the job then takes the refusal for a crash, which it counts
            Path(os.environ[REFUSAL]).write_text(f"{sentence}\n")


if __name__ == "__main__":
    main()
