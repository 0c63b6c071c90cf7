"""uvicorn's HTTP protocol, with an end to waiting for a request whose head never comes."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


def protocol(seconds: float) -> type[asyncio.Protocol]:
    """Return a protocol that closes a connection on which a head takes longer than so many seconds."""

    class Protocol(H11Protocol):
        """Closes what stays silent."""

        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            """Begin to wait."""
            super().connection_made(transport)
            self._timer = self.loop.call_later(seconds, self._lose_patience)

        def data_received(self, data: bytes) -> None:
            """Take in some of a request."""
            super().data_received(data)
            if self.cycle is not None and self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def connection_lost(self, exc: Exception | None) -> None:
            """End waiting."""
            if self._timer is not None:
                self._timer.cancel()
            super().connection_lost(exc)

        def _lose_patience(self) -> None:
            if self.cycle is None and not self.transport.is_closing():
                self.transport.close()

    return Protocol
