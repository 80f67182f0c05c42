"""The one error this package raises for something its user can fix."""


class UserError(ValueError):
    """A mistake of the user: one sentence naming the key, file or line, and the remedy.

    Characters that do not print, which what was typed may have, are escaped, so that one line
    remains.

    Args:
        rank_specific: only this rank knows of it, so it must speak for itself. Otherwise all ranks
            refuse alike, and rank 0 speaks for them.
        passing: the same command may succeed later, so a Slurm job tries it again.
    """

    def __init__(self, message: str, *, rank_specific: bool = False, passing: bool = False) -> None:
        if not message.isprintable():
            message = "".join(
                c if c.isprintable() else c.encode("unicode_escape").decode() for c in message
            )
        super().__init__(message)
        self.rank_specific = rank_specific
        self.passing = passing
