"""Process of test_strangers.py: verbs on a stranger's run, watched by an audit hook.

The hook is also that of all processes which this one starts: `sitecustomize` of a directory in
PYTHONPATH imports `watch` from here.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

LOG = "STRANGERS_LOG"
"""Environment variable with the file that gets a line for each deed outside ALLOWED."""
ALLOWED = "STRANGERS_ALLOWED"
"""Environment variable with the directories that may be written to, joined by `:`."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PLACES = {
    "os.mkdir": (0,),
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.rename": (0, 1),
    "os.symlink": (1,),
    "os.link": (1,),
    "os.truncate": (0,),
    "os.utime": (0,),
    "os.chmod": (0,),
    "shutil.rmtree": (0,),
}
"""{event: places of the paths that it changes, in its arguments}."""
_PROGRAMS = ("subprocess.Popen", "os.posix_spawn", "os.exec")
_WATCHED = {"open", "socket.connect", *_PLACES, *_PROGRAMS}
_OWN_PROGRAMS = {Path(sys.executable).name, "git", "ldconfig", "gcc", "uname", "fc-list"}


def watch() -> None:
    """Write down whatever this process does outside the allowed directories from now on."""
    log = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    allowed = tuple(os.environ[ALLOWED].split(":"))

    def changed(event: str, arguments: tuple[Any, ...]) -> list[Any]:
        if event == "open":
            path, _, flags = arguments
            return [path] if isinstance(flags, int) and flags & _WRITING else []
        if event in ("os.remove", "os.rmdir") and arguments[-1] != -1:
            return []  # relative to a directory, of which shutil.rmtree has told
        return [arguments[index] for index in _PLACES.get(event, ())]

    def foreign(path: Any) -> bool:
        if not isinstance(path, (str, bytes, os.PathLike)):
            return False  # a descriptor, which has been opened before
        directory, name = os.path.split(os.path.abspath(os.fsdecode(path)))
        return not f"{os.path.realpath(directory)}/{name}/".startswith((*allowed, "/dev/"))

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _WATCHED:
            return  # an import alone has a hundred thousand others
        told = [path for path in changed(event, arguments) if foreign(path)]
        if event == "socket.connect":
            address = arguments[1]
            near = ("127.0.0.1", "::1", socket.gethostname())
            told += [] if isinstance(address, (str, bytes)) or address[0] in near else [address]
        if event in _PROGRAMS and Path(os.fsdecode(arguments[0])).name not in _OWN_PROGRAMS:
            told.append(arguments[:2])
        if told:
            os.write(log, f"{event} {told}\n".encode())

    sys.addaudithook(hook)


def main(run: str, original: str, other: str, out: str) -> None:
    """Open a stranger's run with every verb that reads runs.

    Args:
        run: directory of the run.
        original: of the same run as it was made.
        other: of a run of another variant.
        out: directory for what the verbs write.
    """
    from pretrain.__main__ import app

    runs = [run, other]
    for words in (
        ["compare", *runs, "--baseline=vanilla", "--prompt=The", "--sample-tokens=2"],
        ["diff", run, original],
        ["evaluate", "diversity", *runs],
        ["export", run],
        ["replay", run, "--step=3"],
    ):
        app([*words, f"--out={out}/{words[0]}"], standalone_mode=False)
    app(["sample", run, "--tokens=2"], standalone_mode=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
