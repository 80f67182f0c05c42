"""Environment variables: an empty one counts as unset."""

from __future__ import annotations

import os

_MEANINGFUL = ("_VISIBLE_DEVICES", "_PROXY")
"""Ends of the names of variables that say something by being empty: no GPU, and no proxy."""


def unset_empty_variables() -> None:
    """Remove empty variables from the environment of this process and its children.

    Job scripts export variables that they have no value for; called before anything reads one.
    """
    for name, value in list(os.environ.items()):
        if not value and not name.upper().endswith(_MEANINGFUL):
            del os.environ[name]
