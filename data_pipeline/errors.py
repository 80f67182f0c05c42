"""Error that this package raises for mistakes and damage that its user can fix."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class DataError(ValueError):
    """Bad input or damaged data; the message is one sentence: file, line or option, and the fix."""


@contextlib.contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Turn a failed import into the DataError that `what` needs the extra.

    Args:
        what: the option or file that needs the package.
        extra: the extra of this distribution that installs it.

    Raises:
        DataError: the import failed.
    """
    try:
        yield
    except ImportError as error:
        raise DataError(
            f"{what} needs a package that is not installed ({error}); pip install "
            f"'ora-pretrain[{extra}]'"
        ) from error
