"""Define the one error that a user may cause.

The command line prints its sentence and exits with code 2.
"""


class BadInput(ValueError):
    """An error for user input that cannot be used.

    The message is one sentence with the field, the value and what to do.
    """


def require(condition: object, what: str, value: object, wanted: str) -> None:
    """Raise BadInput, in the form of all such sentences, unless the condition is true."""
    if not condition:
        raise BadInput(f"{what} is {value!r}; it must be {wanted}")


class Refused(Exception):
    """An error for a query that a gate refuses.

    The code is one of a fixed list. It is a function of query, policy and ledger alone.
    """

    def __init__(self, code: str) -> None:
        """Store the code."""
        super().__init__(code)
        self.code = code
