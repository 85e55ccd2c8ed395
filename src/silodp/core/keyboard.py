"""Tell Ctrl-C from a KeyboardInterrupt that somebody's own code raises.

A gate handles Ctrl-C by itself, and answers in a thread that no signal reaches. There a model or a
map of features that raises KeyboardInterrupt on one record must end nothing, as with any other
exception: a gate that ends, or never replies, tells of the record.
"""

from __future__ import annotations

import signal
import threading


def raise_if_ctrl_c(error: BaseException) -> None:
    """Raise the error again if Python may have raised it because somebody pressed Ctrl-C."""
    handled_by_python = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    reached = threading.current_thread() is threading.main_thread()
    if isinstance(error, KeyboardInterrupt) and handled_by_python and reached:
        raise error
