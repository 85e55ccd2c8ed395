"""Turn every error of a user's object into an AssertionError of one sentence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from silodp.core.errors import BadInput


@contextlib.contextmanager
def one_sentence(name: str = "") -> Iterator[None]:
    """Raise AssertionError in place of any error inside. The original error is its cause."""
    try:
        yield
    except AssertionError:
        raise
    except BadInput as error:
        raise AssertionError(str(error)) from error
    except Exception as error:
        raise AssertionError(
            f"{name}: raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error
