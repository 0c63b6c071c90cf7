"""A request and its answer as ASGI has them: a body with limits, JSON or events out, a client that leaves."""

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

import msgspec

from lily.server.config import Config
from lily.server.errors import ApiError

T = TypeVar("T")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_NESTING = re.compile(rb'"(?:[^"\\]|\\.)*"?|[\[{]|[\]}]', re.DOTALL)
_PATH = re.compile(r"^(?P<message>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)


class ClientGoneError(Exception):
    """The client has left: there is nobody to answer."""


class Exchange:
    """A request and its answer.

    status: int, what was answered, 0 for nothing yet.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, config: Config) -> None:
        """Wrap what ASGI gives."""
        self.scope = scope
        self.config = config
        self.status = 0
        self.headers: dict[str, str] = {
            key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]
        }
        self.extra: dict[str, str] = {}  # headers of the answer, whatever it is
        self._receive = receive
        self._send = send

    async def body(self) -> bytes:
        """Read the body. Raises ApiError if it is too long, too slow, or no JSON by its headers."""
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(415, f"Content-Type: wanted application/json, got {kind or 'none'}")
        encoding = self.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise ApiError(415, f"Content-Encoding: wanted none, got {encoding}")
        limit = self.config.body_bytes
        length = self.headers.get("content-length", "")
        if length.isdecimal() and int(length) > limit:
            raise _too_long(limit)
        try:
            async with asyncio.timeout(self.config.body_seconds):
                return await self._read(limit)
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self.config.body_seconds} s") from None

    async def _read(self, limit: int) -> bytes:
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            body += message.get("body", b"")
            if len(body) > limit:
                raise _too_long(limit)
            if not message.get("more_body", False):
                return bytes(body)

    async def json(self, value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Answer with JSON."""
        await self.answer(msgspec.json.encode(value), "application/json", status, headers)

    async def answer(
        self, body: bytes, kind: str, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Answer with a whole body."""
        await self._start(status, kind, {"content-length": str(len(body)), **(headers or {})})
        await self._write(b"" if self.scope["method"] == "HEAD" else body, more=False)

    async def begin_events(self) -> None:
        """Begin an answer of events."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        await self._start(200, "text/event-stream; charset=utf-8", headers)

    async def events(self, events: Iterable[bytes]) -> None:
        """Write some events."""
        if data := b"".join(events):
            await self._write(data, more=True)

    async def end_events(self) -> None:
        """End the answer."""
        await self._write(b"", more=False)

    async def until_gone(self, work: Coroutine[Any, Any, T]) -> T:
        """Do work for the client; if it leaves, cancel the work and raise ClientGoneError."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientGoneError
        finally:
            for each in (task, gone):
                if not each.done():
                    each.cancel()
                    with contextlib.suppress(asyncio.CancelledError, Exception):
                        await each

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _start(self, status: int, kind: str, headers: Mapping[str, str]) -> None:
        self.status = status
        pairs = {"content-type": kind, **self.extra, **headers}
        encoded = [
            (key.encode("latin-1"), value.encode("latin-1", "replace")) for key, value in pairs.items()
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _write(self, data: bytes, more: bool) -> None:
        message = {"type": "http.response.body", "body": data, "more_body": more}
        try:
            # Not wait_for: on Python 3.11 it loses a cancellation that comes just as the write is done.
            async with asyncio.timeout(self.config.write_seconds):
                await self._send(message)
        except (TimeoutError, OSError):
            raise ClientGoneError from None


def decode(body: bytes, kind: type[T], depth: int) -> T:
    """Read JSON. Raises ApiError with the place in it that is wrong."""
    check_depth(body, depth)
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        found = _PATH.match(str(error))
        path = found["path"] if found else None
        message = found["message"] if found else str(error)
        raise ApiError(
            400, f"{path or 'body'}: {message}", code="invalid_value", param=path or None
        ) from None
    except (msgspec.DecodeError, RecursionError, ValueError) as error:
        raise ApiError(400, f"body: {error}", code="invalid_json") from None


def check_depth(body: bytes, limit: int) -> None:
    """Raise ApiError 400 for JSON that is nested deeper than a limit."""
    if body.count(b"[") + body.count(b"{") <= limit:
        return
    depth = 0
    for found in _NESTING.finditer(body):
        if found[0] in (b"[", b"{"):
            depth += 1
            if depth > limit:
                raise ApiError(400, f"body: nested deeper than {limit} levels", code="invalid_json")
        elif found[0] in (b"]", b"}"):
            depth -= 1


def _too_long(limit: int) -> ApiError:
    return ApiError(413, f"body: wanted at most {limit} bytes; send less, or raise body_bytes")


def event(value: object, name: str | None = None) -> bytes:
    """Return a server-sent event of JSON."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(value) + b"\n\n"
