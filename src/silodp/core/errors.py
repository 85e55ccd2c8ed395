"""Define the two errors of silodp, and distinguish Ctrl-C from an error of a user's code.

`BadInput` is for the user: the command line prints its sentence and exits with code 2. `Refused` is
for an asker: a gate replies with its code.
"""

import signal
import threading


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


def raise_if_ctrl_c(error: BaseException) -> None:
    """Raise the error again if Python may have raised it because of Ctrl-C.

    A gate handles Ctrl-C by itself, and answers in a thread that no signal reaches. A model or a
    feature map that raises KeyboardInterrupt on one record must not end the gate, and must not
    prevent the reply. Otherwise the gate would reveal the record.
    """
    handled_by_python = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    reached = threading.current_thread() is threading.main_thread()
    if isinstance(error, KeyboardInterrupt) and handled_by_python and reached:
        raise error
