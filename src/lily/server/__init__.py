"""The server: OpenAI's and Anthropic's HTTP interfaces on one port. It needs the extra `server`."""

import logging
import socket
import threading
from typing import TYPE_CHECKING, Any

from lily.errors import LilyError, how_to_install
from lily.settings import check_names

if TYPE_CHECKING:
    import uvicorn

    from lily.model import Model
    from lily.server.app import App
    from lily.server.config import Config

_log = logging.getLogger("lily.server")
_STOP_SECONDS = 3  # for answers under way when the server ends


def asgi(model: "Model", **settings: Any) -> "App":
    """Return an ASGI application that answers with a model, to be mounted in a program of one's own.

    settings: those of lily.server.config.Config, which docs/server.md lists.
    Raises ValueError or TypeError for a setting, LilyError without the server's packages.
    """
    _, config = _configured(settings)
    from lily.server.app import App

    return App(model, config)


class Server:
    """A server that runs in a thread, until stop() or the end of a `with` block.

    url: str, where it is.  app: the ASGI application that it serves.
    """

    def __init__(self, model: "Model", **settings: Any) -> None:
        """Listen at once; model.serve makes one.

        Raises OSError if the port is taken, PrefixFileError if a prefix can't be read.
        """
        uvicorn, config = _configured(settings)
        self.app = app = asgi(model, **settings)
        self._socket = _listen(config)
        host, port = config.host, self._socket.getsockname()[1]
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._server = uvicorn.Server(_uvicorn_config(uvicorn, app))
        app.ending = lambda: self._server.should_exit
        self._thread = threading.Thread(target=self._run, name="lily-server", daemon=True)

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])

    def start(self) -> "Server":
        """Serve in a thread and return when requests are answered."""
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise LilyError("the server ended as it began; its log, lily.server, says why")
            self._thread.join(0.01)
        return self

    def run(self) -> None:
        """Serve in this thread until Ctrl-C or SIGTERM."""
        self._run()

    def stop(self) -> None:
        """End the server; answers under way have a few seconds."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close()

    def __enter__(self) -> "Server":
        """Return itself; leaving the block stops it."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop it."""
        self.stop()

    def __repr__(self) -> str:
        """Show where it is."""
        return f"<lily.Server {self.url}>"


def _configured(settings: dict[str, Any]) -> tuple[Any, "Config"]:
    """Return uvicorn and a server's settings."""
    try:
        import msgspec  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise LilyError(
            f"the server needs more packages ({error.name}): {how_to_install('server')}"
        ) from error
    from lily.server.config import Config

    check_names(settings, Config)
    return uvicorn, Config(**settings)


def _listen(config: "Config") -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # Only of what it knows to be TCP does asyncio have the system send a body at once, not after 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host.strip("[]"), config.port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        where = f"{config.host}:{config.port}"
        raise OSError(error.errno, f"{where}: {error.strerror}; choose another port or host") from None
    return listener


def _uvicorn_config(uvicorn: Any, app: "App") -> "uvicorn.Config":
    from lily.server.protocol import protocol

    return uvicorn.Config(  # type: ignore[no-any-return]
        app,
        http=protocol(app.config.body_seconds),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_STOP_SECONDS,
        h11_max_incomplete_event_size=64 * 1024,
    )
