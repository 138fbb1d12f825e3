"""What this package raises."""


class QuackKernelsError(Exception):
    """Base of every error that is particular to this package."""


class ArgumentError(QuackKernelsError, ValueError):
    """An argument that no kernel accepts; says which, what it is, and what is accepted."""

    def __init__(self, argument: str, value: str, accepted: str) -> None:
        """Keep the three parts as attributes; all reach `args`, so the error pickles between processes."""
        super().__init__(argument, value, accepted)
        self.argument = argument
        self.value = value
        self.accepted = accepted

    def __str__(self) -> str:
        """Return one sentence for the user."""
        return f"{self.argument} {self.value}, but {self.accepted}"
