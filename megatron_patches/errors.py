"""The error of this package for requests that a user can correct."""


class MethodError(ValueError):
    """A request that the method cannot meet (impossible shape, unknown name).

    The message is one sentence.
    """
