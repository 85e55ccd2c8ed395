"""The one error that a user may cause: the command line prints its sentence and exits with code
2.
"""


class BadInput(ValueError):
    """Something the user gave cannot be used; the message is one sentence that names the field, the
    value and what would do.
    """


def require(holds: object, what: str, value: object, wanted: str) -> None:
    """BadInput, in the form that such a sentence has everywhere, unless it holds."""
    if not holds:
        raise BadInput(f"{what} is {value!r}; it must be {wanted}")


class Refused(Exception):
    """The gate says no. The code is one of a fixed list, a function of query, policy and ledger
    alone.
    """

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code
