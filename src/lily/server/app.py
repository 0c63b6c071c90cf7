"""The ASGI application: who may ask, what is asked, whose turn it is, and the answer's way out."""

import asyncio
import contextlib
import dataclasses
import hmac
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from lily.asynchronous import AsyncStream
from lily.completion import Completion, Stream
from lily.errors import ContextError, LilyError, PrefixMismatchError
from lily.model import Model
from lily.scheduler import Place
from lily.server.anthropic import CountTokens, Messages
from lily.server.chat import Chat
from lily.server.completions import Completions
from lily.server.config import Config, is_loopback
from lily.server.dialect import Answer, Ask, Dialect, now
from lily.server.errors import ApiError, of_exception
from lily.server.exchange import ClientGoneError, Exchange, Receive, Scope, Send, decode
from lily.server.metrics import Metrics, resident_bytes
from lily.server.responses import Responses
from lily.settings import Settings

_log = logging.getLogger("lily.server")

DIALECTS = (Chat, Completions, Responses, Messages)

_LONG = 2**16  # bytes

Handler = Callable[[Exchange], Awaitable[None]]


class App:
    """An ASGI application that answers with a model."""

    def __init__(self, model: Model, config: Config) -> None:
        """Serve a model, which stays the caller's to close. Raises PrefixFileError for config.prefix."""
        self.model = model
        self.config = config
        self.metrics = Metrics()
        self.scheduler = model._engine.scheduler
        self.name = config.name or model._engine.name
        self.ending: Callable[[], bool] = lambda: False  # whether the server is about to end
        self._started = now()
        self._hold_prefix()
        dialects = dialects_of(config, model)
        routes: list[BaseRoute] = [self._route(dialect) for dialect in dialects]
        routes.append(self._count_route(CountTokens(config)))
        routes += [
            Route("/", _root, methods=["GET", "HEAD"]),
            Route("/health", self._health, methods=["GET", "HEAD"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/v1/models", self._models, methods=["GET"]),
            Route("/v1/models/{name:path}", self._model, methods=["GET"]),
        ]
        self._router = Starlette(routes=routes, exception_handlers={404: _not_found, 405: _not_allowed})

    def _hold_prefix(self) -> None:
        """Have the cache hold the prefix that prompts may begin with."""
        path = self.config.prefix
        if path is None:
            return
        try:
            self.model.load_prefix(path).remember()
        except PrefixMismatchError as error:
            _log.warning("%s; prompts are taken in anew", error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's request."""
        if scope["type"] != "http":
            await self._router(scope, receive, send)
            return
        started, status = time.monotonic(), 0

        async def watched(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *self._cors(scope)]
            await send(message)

        try:
            refusal = self._refuse(scope)
            if refusal is None:
                await self._router(scope, receive, watched)
            else:
                await _error_response(scope, refusal)(scope, receive, watched)
        finally:
            path = _known_path(scope["path"])
            self.metrics.request(path, status)
            seconds = time.monotonic() - started
            _log.info("%s %s %d %.3f s", scope["method"], path, status, seconds)

    def _refuse(self, scope: Scope) -> Response | ApiError | None:
        """Return why a request is not looked at, None if it is."""
        headers = {key.lower(): value.decode("latin-1") for key, value in scope["headers"]}
        config = self.config
        host = _name_of(headers.get(b"host", ""))
        known = is_loopback(host) or host in (config.host.lower(), *map(str.lower, config.allowed_hosts))
        if not known and (config.allowed_hosts or not config.api_key) and not config.allow_public:
            return ApiError(403, f"Host: {host!r:.80} is not this server's; see allowed_hosts", code="host")
        origin = headers.get(b"origin")
        if origin is not None and not self._allowed(origin):
            return ApiError(403, f"Origin: {origin!r:.80} may not use this server; see allowed_origins")
        if scope["method"] == "OPTIONS":
            return Response(status_code=204)
        if config.api_key and scope["path"] not in ("/", "/health"):
            bearer = headers.get(b"authorization", "")
            scheme, _, token = bearer.partition(" ")
            given = token.strip() if scheme.lower() == "bearer" else headers.get(b"x-api-key", "")
            if not hmac.compare_digest(given.encode(), config.api_key.encode()):
                return ApiError(401, "the key is missing or wrong", code="invalid_api_key")
        return None

    def _allowed(self, origin: str) -> bool:
        """Return whether a web page may use the server: this machine's, and those that are named."""
        allowed = self.config.allowed_origins
        return "*" in allowed or origin in allowed or is_loopback(_name_of(origin.partition("://")[2]))

    def _cors(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        origin = next((value for key, value in scope["headers"] if key.lower() == b"origin"), None)
        if origin is None or not self._allowed(origin.decode("latin-1")):
            return []
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-allow-methods", b"GET, POST, OPTIONS"),
            (b"access-control-allow-headers", b"*, authorization"),
            (b"vary", b"origin"),
        ]

    def _route(self, dialect: Dialect) -> Route:
        async def work(exchange: Exchange) -> None:
            await self._generate(dialect, exchange)

        return self._post(dialect.path, work)

    def _count_route(self, dialect: CountTokens) -> Route:
        async def work(exchange: Exchange) -> None:
            request = await self._read(dialect, await exchange.body())
            prompt, settings = dialect.prompt(request)
            # What the same request to /v1/messages would take in, earlier answers' own tokens among it.
            tokens, _ = await asyncio.to_thread(
                self.model._prompt, prompt, cast(Settings, settings), whole=True
            )
            await exchange.json({"input_tokens": len(tokens)})

        return self._post(dialect.path, work)

    def _post(self, path: str, work: Handler) -> Route:
        """Return a route whose failures are answered in the dialect of its path."""

        class Endpoint:
            """Starlette takes an object for an application of its own, and a function for a handler."""

            async def __call__(_, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: N805
                exchange = Exchange(scope, receive, send, self.config)
                try:
                    await work(exchange)
                except ClientGoneError:
                    self.metrics.cancelled += 1
                except asyncio.CancelledError:
                    if not self.ending():
                        raise
                    if not exchange.status:
                        await self._fail(exchange, _shutting_down())
                except Exception as error:
                    await self._fail(exchange, error)

        return Route(path, Endpoint(), methods=["POST"])

    async def _fail(self, exchange: Exchange, error: Exception) -> None:
        failure = of_exception(error, self.model._engine.context)
        if failure.status >= 500:
            _report(exchange.scope["path"], error)
        if exchange.status:
            raise error  # the answer has begun and can't be taken back
        body = failure.anthropic() if _is_anthropic(exchange.scope) else failure.openai()
        await exchange.json(body, failure.status, failure.headers)

    async def _generate(self, dialect: Dialect, exchange: Exchange) -> None:
        """Answer one request for text."""
        self.scheduler.check_queue()  # a body that nobody has time for is not read
        body = await exchange.body()
        with self.scheduler.line_up() as place:
            request = await self._read(dialect, body)
            try:
                # A prompt's tokens may be made here, of a text that may be long.
                long = len(body) >= _LONG
                ask = await asyncio.to_thread(dialect.ask, request) if long else dialect.ask(request)
                self._name(ask)
                exchange.extra |= ask.headers
                streams = await asyncio.to_thread(self._prepare, ask, place)
            except ContextError as error:
                failure = of_exception(error, self.model._engine.context)
                failure.param = dialect.prompt_field
                raise failure from error
            answer = dialect.answer(request, ask)
            work = self._stream if ask.stream else self._whole
            await exchange.until_gone(work(exchange, answer, streams, place))

    async def _read(self, dialect: Dialect, body: bytes) -> Any:
        """Return a request, and refuse the fields of it that are not supported."""

        def read() -> Any:
            request = decode(body, dialect.request, self.config.depth)
            dialect.check(body)
            return request

        # A long one takes a while, in which others are to be heard.
        return read() if len(body) < _LONG else await asyncio.to_thread(read)

    def _name(self, ask: Ask) -> None:
        """Settle the model's name that an answer has."""
        if self.config.strict_model and ask.model not in ("", self.name):
            raise ApiError(
                404,
                f"model: {ask.model!r:.80} is not loaded, {self.name!r} is",
                code="model_not_found",
                param="model",
            )
        ask.model = ask.model or self.name

    def _prepare(self, ask: Ask, place: Place) -> list[Stream]:
        """Check the generations and set them up, to take part one after the other; none of them works yet."""
        pairs = zip(ask.prompts, ask.settings, strict=True)
        try:
            streams = [self.model.stream(prompt, **settings) for prompt, settings in pairs]
        except (TypeError, ValueError) as error:
            raise ask.fault(error) from error
        for stream in streams:
            stream.take_place(place)
        return streams

    async def _whole(
        self, exchange: Exchange, answer: Answer, streams: Sequence[Stream], place: Place
    ) -> None:
        done: list[Completion] = []
        for stream in streams:
            begun = time.monotonic()
            async with _asynchronous(stream) as chunks:
                if (chunk := await anext(chunks, None)) is not None:
                    self._measure(stream, begun)
                    answer.take(len(done), chunk)
                for chunk in await chunks.rest():
                    answer.take(len(done), chunk)
                done.append(stream.so_far())
                self.metrics.completion(done[-1])
        place.leave()  # whoever has the answer finds it free
        await exchange.json(answer.whole(done))

    def _measure(self, stream: Stream, begun: float) -> None:
        """Count the waiting for the first piece of an answer."""
        queued = stream.so_far().timings.queue_seconds
        self.metrics.queue.add(queued)
        self.metrics.first_token.add(time.monotonic() - begun - queued)

    async def _stream(
        self, exchange: Exchange, answer: Answer, streams: Sequence[Stream], place: Place
    ) -> None:
        await exchange.begin_events()
        try:
            await self._write_events(exchange, answer, streams, place)
        except ClientGoneError:
            raise
        except asyncio.CancelledError:
            if self.ending():  # a stream that just stops looks complete to many clients
                with contextlib.suppress(ClientGoneError):
                    await exchange.events(answer.error(_shutting_down()))
                    await exchange.end_events()
            raise
        except Exception as error:
            failure = of_exception(error, self.model._engine.context)
            if failure.status >= 500:
                _report(exchange.scope["path"], error)
            await exchange.events(answer.error(failure))
        await exchange.end_events()

    async def _write_events(
        self, exchange: Exchange, answer: Answer, streams: Sequence[Stream], place: Place
    ) -> None:
        done: list[Completion] = []
        await exchange.events(answer.begin(streams[0].so_far().usage))
        for index, stream in enumerate(streams):
            begun: float | None = time.monotonic()
            async with _asynchronous(stream) as chunks:
                while (chunk := await self._patiently(exchange, answer, anext(chunks, None))) is not None:
                    if begun is not None:
                        self._measure(stream, begun)
                        begun = None
                    await exchange.events(answer.chunk(index, chunk))
            done.append(stream.so_far())
            self.metrics.completion(done[-1])
            if len(done) == len(streams):
                place.leave()
            await exchange.events(answer.end(index, done[-1]))
        await exchange.events(answer.close(done))

    async def _patiently(self, exchange: Exchange, answer: Answer, work: Awaitable[Any]) -> Any:
        """Wait for work, and tell the client now and then that it goes on."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=self.config.keep_alive)
                if not task.done():
                    await exchange.events([answer.keep_alive])
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def _health(self, request: Request) -> Response:
        closed = self.model._engine.closed
        state: dict[str, Any] = {"status": "closed" if closed else "ok", "model": self.name}
        state |= {"running": self.scheduler.active, "waiting": self.scheduler.waiting}
        return JSONResponse(state, 503 if closed else 200)

    async def _metrics(self, request: Request) -> Response:
        gauges = {
            "requests_running": ("Requests that use the model.", float(self.scheduler.active)),
            "requests_waiting": ("Requests that wait for a turn.", float(self.scheduler.waiting)),
            "resident_bytes": ("Memory of the process.", float(resident_bytes())),
            "weight_bytes": ("Memory of the weights.", float(self.model._engine.weight_bytes)),
        }
        if not self.model._engine.closed:
            # The cache may be at work, saving a state to disk.
            stats = await asyncio.to_thread(self.model.cache_stats)
            queue = self.scheduler.stats()
            gauges |= {
                "state_bytes": ("Memory of all states.", float(queue.live_bytes)),
                "state_limit_bytes": ("The most that they may take.", float(queue.limit_bytes)),
            }
            gauges |= {
                f"cache_{name}": (f"The prefix cache's {name}.", float(value))
                for name, value in dataclasses.asdict(stats).items()
            }
        return Response(self.metrics.text(gauges), media_type="text/plain; version=0.0.4")

    def _card(self) -> dict[str, Any]:
        engine = self.model._engine
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._started))
        return {
            "id": self.name,
            "object": "model",
            "type": "model",
            "created": self._started,
            "created_at": created,
            "display_name": self.name,
            "owned_by": "lily",
            "context_length": engine.context,
            "max_model_len": engine.context,
            "sampling": engine.defaults.numbers(),
        }

    async def _models(self, request: Request) -> Response:
        ends = {"first_id": self.name, "last_id": self.name, "has_more": False}
        return JSONResponse({"object": "list", "data": [self._card()], **ends})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self.name:
            error = ApiError(
                404, f"model: {name!r:.80} is not loaded, {self.name!r} is", code="model_not_found"
            )
            return _error_response(request.scope, error)
        return JSONResponse(self._card())


def dialects_of(config: Config, model: Model) -> list[Dialect]:
    """Return the endpoints that write answers."""

    def encode(text: str) -> list[int]:
        return model.tokenizer.encode(text, markers=True, most=model._engine.context)

    return [Chat(config), Completions(config, encode), Responses(config), Messages(config)]


def _report(path: str, error: Exception) -> None:
    """Log a failure and where it came from; its words only if they are ours: others may be a prompt's."""
    said = str(error) if isinstance(error, LilyError) else ""
    where = "".join(traceback.format_tb(error.__traceback__))
    _log.error("%s: %s: %s\n%s", path, type(error).__name__, said, where)


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutting_down")


def _asynchronous(stream: Stream) -> AsyncStream:
    return AsyncStream(lambda: stream)


def _is_anthropic(scope: Scope) -> bool:
    named = any(key.lower() == b"anthropic-version" for key, _ in scope["headers"])
    return named or scope["path"].startswith("/v1/messages")


def _error_response(scope: Scope, error: ApiError | Response) -> Response:
    if isinstance(error, Response):
        return error
    body = error.anthropic() if _is_anthropic(scope) else error.openai()
    return JSONResponse(body, error.status, error.headers)


def _name_of(host: str) -> str:
    """Return a host without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] if ":" in host else host


def _known_path(path: str) -> str:
    """Return a path for counting: those that a stranger makes up are one."""
    known = (
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/models",
        "/health",
    )
    more = ("/v1/messages/count_tokens", "/metrics", "/")
    return path if path in (*known, *more) else "other"


async def _root(request: Request) -> Response:
    return JSONResponse({"name": "lily"})


async def _not_found(request: Request, error: Exception) -> Response:
    return _error_response(request.scope, ApiError(404, f"there is no {request.url.path!r:.100} here"))


async def _not_allowed(request: Request, error: Exception) -> Response:
    failure = ApiError(405, f"{request.method} does nothing here")
    return _error_response(request.scope, failure)
