"""The one error this package raises for something its user can mend."""


class DataError(ValueError):
    """Bad input or damaged data; the message is one sentence naming file, line or option, and the remedy."""
