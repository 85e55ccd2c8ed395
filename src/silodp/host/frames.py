"""Store frames for many silos, with their common end in memory once.

The frames of a query about a large model differ between silos in their first bytes only. This
module needs the standard library only. The server, and the hub in the engine's process, pass frames
on unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping


class Frames(Mapping[str, bytes]):
    """Frames by silo. Each is put together on access and is not stored."""

    def __init__(self, parts: Mapping[str, tuple[bytes, bytes]], most: int = 2**32) -> None:
        """Store the beginning and the end of each silo's frame.

        `most` is the largest size of a reply to any of them, in bytes. A reader of a longer reply
        may close the connection.
        """
        self._parts = dict(parts)
        self.most = most

    @classmethod
    def of(cls, frames: Mapping[str, bytes]) -> Frames:
        """Return the same frames as a `Frames`, without copying them."""
        if isinstance(frames, cls):
            return frames
        return cls({name: (frame, b"") for name, frame in frames.items()})

    @classmethod
    def sharing(
        cls, frames: Iterable[tuple[str, bytes]], cut: Callable[[bytes], int], most: int = 2**32
    ) -> Frames:
        """Return these frames, with an end that equals the previous frame's stored once.

        `cut` returns the position at which a frame's end begins.
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
        """Return the beginning of the frame, and the end that others may share."""
        return self._parts[name]

    def size(self, name: str) -> int:
        """Return the size of the silo's frame in bytes."""
        return sum(map(len, self._parts[name]))

    def only(self, names: Iterable[str]) -> Frames:
        """Return the frames of these silos."""
        return Frames({name: self._parts[name] for name in names}, self.most)

    @property
    def end(self) -> bytes:
        """Return the end that all frames share, or b"" if they do not share one."""
        ends = {id(tail): tail for _, tail in self._parts.values()}
        if len(ends) == 1:
            return next(iter(ends.values()))
        return b""

    def __getitem__(self, name: str) -> bytes:
        head, tail = self._parts[name]
        if not tail:
            return head  # a frame without a shared end is not copied
        return head + tail

    def __contains__(self, name: object) -> bool:
        # Mapping's own method would put the frame together first.
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)
