"""The one exception that is shown to the user without a traceback."""


class UserError(ValueError):
    """Something the user can mend. The message is one line: what is wrong, with which value, and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
