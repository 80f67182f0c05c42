"""Error that this package raises for mistakes and damage that its user can mend."""


class DataError(ValueError):
    """Bad input or damaged data; the message is one sentence naming file, line or option, and the remedy."""
