"""Files of a stranger's export that run a program where believed, and a process that loads them."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

from data_pipeline.io.files import hash_file
from tests.laboratory.evaluation.tiny_models import write_tasks


class _Program:
    """Unpickled, it leaves a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self.canary,)


def make_hostile(directory: Path, canary: Path) -> None:
    """Put a program wherever transformers looks for one, and forge the files of export.json."""
    program = f"from pathlib import Path\nPath({str(canary)!r}).touch()\n"
    (directory / "evil.py").write_text(program)
    (directory / "custom_generate").mkdir()
    (directory / "custom_generate/generate.py").write_text(program)
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(_Program(canary)))
    for name, key, value in (
        ("config.json", "AutoConfig", "evil.Config"),
        ("config.json", "AutoModelForCausalLM", "evil.Model"),
        ("tokenizer_config.json", "AutoTokenizer", ["evil.Slow", "evil.Fast"]),
    ):
        content = json.loads((directory / name).read_text())
        content.setdefault("auto_map", {})[key] = value
        content["model_type"] = "evil"
        (directory / name).write_text(json.dumps(content))
    forge(directory)


def forge(directory: Path) -> None:
    """Let export.json state every file as it is."""
    facts = json.loads((directory / "export.json").read_text())
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != "export.json")
    facts["files"] = {str(path.relative_to(directory)): hash_file(path) for path in files}
    (directory / "export.json").write_text(json.dumps(facts))


def loaded(run: Path, directory: Path, pickled: Path) -> list[str]:
    """Load a run through its hostile export, and two hostile directories, by every loader there is.

    Returns:
        Each thing that this process ran, opened or unpickled of them.
    """
    seen: list[str] = []

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        code = str(getattr(arguments[0], "co_filename", "")) if event == "exec" else ""
        opened = str(arguments[0]) if event == "open" else ""
        theirs = ("evil.py", "custom_generate", "pytorch_model.bin")
        if any(name in code + opened for name in theirs):
            seen.append(f"{event} {code or opened}")
        if event == "pickle.find_class" and arguments[0] == "pathlib":
            seen.append(f"unpickled {arguments}")

    sys.addaudithook(hook)
    from laboratory.evaluation.tasks.harness import Request, evaluate, load_manager, require_harness
    from laboratory.finetuning.glue_data import TASKS
    from laboratory.finetuning.models import load_classifier, load_tokenizer, open_pretrained
    from pretrain.errors import UserError
    from pretrain.export.run_exports import exported
    from pretrain.export.sampling import Sampler

    Sampler(exported(run), trust_code=True)
    require_harness()
    opened = open_pretrained(run, trust_code=False)
    names = ["choice"]
    files = write_tasks(run.parent / "task files", items=4)
    request = Request(names, None, None, batch_size=1, device="cpu", results=run.parent / "results")
    evaluate(opened, load_manager(names, files), request)
    load_classifier(opened, TASKS["sst2"], load_tokenizer(opened))
    loaders: list[Callable[[Path], object]] = [
        lambda path: Sampler(path, trust_code=False),
        lambda path: open_pretrained(path, trust_code=False),
    ]
    for path, load in product((directory, pickled), loaders):
        try:
            load(path)
        except UserError:
            continue
        seen.append(f"{path} was not refused")
    return seen


if __name__ == "__main__":
    print(json.dumps(loaded(*map(Path, sys.argv[1:]))))
