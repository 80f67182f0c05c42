"""The one error this package raises for something its user can mend."""


class MethodError(ValueError):
    """A request the method cannot honour (impossible shape, unknown name); the message is one sentence."""
