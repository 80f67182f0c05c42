"""Error that this package raises for mistakes and damage that its user can mend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class DataError(ValueError):
    """Bad input or damaged data; the message is one sentence naming file, line or option, and the remedy."""


@contextlib.contextmanager
def needs_extra(what: str, extra: str) -> Iterator[None]:
    """Turn a failed import into the DataError that `what` needs the extra."""
    try:
        yield
    except ImportError as error:
        raise DataError(
            f"{what} needs a package that is not installed ({error}); pip install 'ora-pretrain[{extra}]'"
        ) from error
