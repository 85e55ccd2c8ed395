"""Frames for many silos whose ends are alike, in the memory of one: a question about a large model
differs between silos in its first bytes alone.

Standard library only: the server, and the hub in the engine's process, pass them on as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping


class Frames(Mapping[str, bytes]):
    """Frames by silo; each is put together when it is asked for, and not held."""

    def __init__(self, parts: Mapping[str, tuple[bytes, bytes]], most: int = 2**32) -> None:
        """`most` is how long a reply to any of them can be, in bytes: whoever reads a longer one
        may hang up.
        """
        self._parts = dict(parts)
        self.most = most

    @classmethod
    def of(cls, frames: Mapping[str, bytes]) -> Frames:
        """The same frames, none of which is copied."""
        if isinstance(frames, cls):
            return frames
        return cls({name: (frame, b"") for name, frame in frames.items()})

    @classmethod
    def sharing(
        cls, frames: Iterable[tuple[str, bytes]], cut: Callable[[bytes], int], most: int = 2**32
    ) -> Frames:
        """One frame after another, of which the end from `cut` on is held once where it is that of
        the frame before.
        """
        parts = dict[str, tuple[bytes, bytes]]()
        tail = b""
        for name, frame in frames:
            at = cut(frame)
            if len(frame) - at != len(tail) or not frame.endswith(tail):
                tail = frame[at:]
            parts[name] = frame[:at], tail
        return cls(parts, most)

    def pieces(self, name: str) -> tuple[bytes, bytes]:
        """The frame's beginning, and the end that others may share."""
        return self._parts[name]

    def size(self, name: str) -> int:
        return sum(map(len, self._parts[name]))

    def only(self, names: Iterable[str]) -> Frames:
        return Frames({name: self._parts[name] for name in names}, self.most)

    @property
    def end(self) -> bytes:
        """What all of them end with, where they hold it once."""
        ends = {id(tail): tail for _, tail in self._parts.values()}
        if len(ends) == 1:
            return next(iter(ends.values()))
        return b""

    def __getitem__(self, name: str) -> bytes:
        head, tail = self._parts[name]
        return head + tail if tail else head

    def __contains__(self, name: object) -> bool:  # without putting it together
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)
