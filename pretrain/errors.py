"""The one error that this package raises for a mistake of its user."""


class UserError(ValueError):
    """A mistake of the user: one sentence naming the key, file or line, and the remedy.

    Characters that do not print, which a user may have typed, are escaped, so that the message
    stays one line.

    Args:
        rank_specific: Whether only this rank knows of the mistake and must speak for itself.
            Otherwise all ranks refuse alike, and rank 0 speaks for them.
        passing: Whether the same command may succeed later, so that a Slurm job tries again.
    """

    def __init__(self, message: str, *, rank_specific: bool = False, passing: bool = False) -> None:
        if not message.isprintable():
            message = "".join(
                c if c.isprintable() else c.encode("unicode_escape").decode() for c in message
            )
        super().__init__(message)
        self.rank_specific = rank_specific
        self.passing = passing
