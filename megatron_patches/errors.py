"""The one error this package raises for something its user can mend."""


class MethodError(ValueError):
    """A request the method cannot honour: an impossible shape, an unknown name. The message is one sentence."""
