"""The only port of a Flower server that is open to other machines: TLS, the Fleet API, and the
line.

SuperLink serves three APIs on one port, and asks for no credential to begin runs and to register
nodes. So SuperLink listens on this machine alone, and this front door lets two things through:
requests below /v1/fleet/, which nodes sign, and couriers' lines. Each request has a connection of
its own to SuperLink, with exactly the announced number of bytes. So no request can hide behind
another.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from pathlib import Path

HEAD = 2**14
PIECE = 2**17
"""Bytes of a request before its body, and of what is copied at once."""
BODY = 2**20
"""Bytes of a body: nodes send keys, signatures and empty answers."""
PATIENCE = 60.0
GREETING = 10.0
"""Seconds in which a body must have come, and in which a connection must have begun."""
AT_ONCE = 256
"""Requests that SuperLink has at once; the next ones wait at the door."""
REQUEST = re.compile(rb"(?:GET|POST|PUT|DELETE) (/v1/fleet/[A-Za-z0-9/_-]*) HTTP/1\.1")
HEADER = re.compile(rb"([A-Za-z0-9_-]+): *([^\r\n\0]*)")
DROPPED = {b"connection", b"keep-alive", b"proxy-connection", b"te", b"upgrade"}
REFUSED = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Refused(Exception):
    """The request is for another API, or is not in the form of Flower's nodes."""


def only_fleet(head: bytes) -> tuple[bytes, int]:
    """Return the head for SuperLink, and the length of the body. Raise Refused for any other
    request.
    """
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    if not REQUEST.fullmatch(first):
        raise Refused
    kept = [first]
    length = None
    for line in lines:
        header = HEADER.fullmatch(line)
        if not header:
            raise Refused
        name = header[1].lower()
        if name == b"transfer-encoding":
            raise Refused
        if name == b"content-length":
            if length is not None or not re.fullmatch(rb"[0-9]{1,7}", header[2]):
                raise Refused
            length = int(header[2])
        if name not in DROPPED:
            kept.append(line)
    if (length or 0) > BODY:
        raise Refused
    return b"\r\n".join([*kept, b"Connection: close", b"", b""]), length or 0


async def serve(folder: Path, host: str, port: int, superlink: int, line: Path) -> None:
    """Listen at host and port with the server's certificate, forever.

    `superlink` is SuperLink's port on this machine. `line` is the socket for couriers' lines.
    """
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(folder / "server.pem", folder / "server.key")
    trust = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    free = asyncio.Semaphore(AT_ONCE)

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, EOFError, asyncio.LimitOverrunError):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), GREETING)
            if head.startswith(b"SILODP "):
                await _carry(head, reader, writer, line)
            else:
                async with free:
                    await _forward(head[:HEAD], reader, writer, superlink, trust)
        await _close(writer)

    server = await asyncio.start_server(
        greet, host, port, ssl=own, limit=PIECE, ssl_handshake_timeout=GREETING, backlog=1024
    )
    async with server:
        await server.serve_forever()


async def _carry(
    head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: Path
) -> None:
    """Copy a courier's line to the relay and back, until one end hangs up."""
    near, far = await asyncio.open_unix_connection(line, limit=PIECE)
    far.write(head)
    copies = [asyncio.create_task(_copy(*ends)) for ends in ((reader, far), (near, writer))]
    # If one end hangs up, the other end is closed too.
    await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    for copy in copies:
        copy.cancel()
    await _close(far)


async def _forward(
    head: bytes,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    superlink: int,
    trust: ssl.SSLContext,
) -> None:
    """Send a request to SuperLink, and copy its reply. Refuse a request that is not for the Fleet
    API.
    """
    try:
        checked, length = only_fleet(head)
    except Refused:
        writer.write(REFUSED)
        await writer.drain()
        return
    body = await asyncio.wait_for(reader.readexactly(length), PATIENCE)
    near, far = await asyncio.open_connection("127.0.0.1", superlink, ssl=trust)
    far.write(checked + body)
    await _copy(near, writer)
    await _close(far)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copy bytes in one direction until the end."""
    with contextlib.suppress(OSError):
        while piece := await source.read(PIECE):
            target.write(piece)
            await target.drain()


async def _close(writer: asyncio.StreamWriter) -> None:
    """Close the connection, and wait at most a second for it."""
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        await asyncio.wait_for(writer.wait_closed(), 1.0)
