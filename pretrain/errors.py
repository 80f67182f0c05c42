"""The one error this package raises for something its user can mend."""


class UserError(ValueError):
    """A mistake the user can mend; the message is one sentence naming the key, file or line and the remedy.

    `rank_specific`: only this rank knows of it, so it must speak for itself. Otherwise all ranks refuse
    alike, and rank 0 speaks for them.
    """

    def __init__(self, message: str, *, rank_specific: bool = False) -> None:
        super().__init__(message)
        self.rank_specific = rank_specific
