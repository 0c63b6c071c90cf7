"""What a request can fail with, and the form that each dialect's clients read it in."""

from collections.abc import Mapping
from typing import Any

from lily.errors import ContextError, LilyError, MemoryLimitError, QueueFullError

_KINDS = {  # of OpenAI's API, and of Anthropic's
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("invalid_request_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("invalid_request_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("invalid_request_error", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("server_error", "overloaded_error"),
}


class ApiError(Exception):
    """An answer other than 200.

    status: int, of HTTP.  message: str.  code: str or None, for programs.  param: str or None, the field at
    fault, as a path.  headers: more headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Describe a failure."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        # Clients send again what failed with 429 or 5xx. Only what may then go well is worth it.
        retry = "true" if status in (429, 503) else "false"
        self.headers = {"x-should-retry": retry, **(headers or {})}

    def openai(self) -> dict[str, Any]:
        """Return the body that OpenAI's clients read."""
        kind = _KINDS.get(self.status, _KINDS[500])[0]
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic(self) -> dict[str, Any]:
        """Return the body that Anthropic's clients read."""
        kind = _KINDS.get(self.status, _KINDS[500])[1]
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def unsupported(param: str, why: str = "leave it out") -> ApiError:
    """Return the refusal of a field by its name."""
    return ApiError(
        400, f"{param}: not supported by this server; {why}", code="unsupported_parameter", param=param
    )


def invalid(param: str, message: str) -> ApiError:
    """Return the refusal of a field's value."""
    return ApiError(400, f"{param}: {message}", code="invalid_value", param=param)


def of_exception(error: BaseException, context: int) -> ApiError:
    """Return what a failure of the library's means to a client.

    context: int, in tokens, the model's.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextError):
        return ApiError(
            400,
            f"This model's maximum context length is {context} tokens: the prompt is too long. {error}",
            code="context_length_exceeded",
            param="messages",
        )
    if isinstance(error, ValueError | TypeError | RecursionError):
        where, colon, _ = str(error).partition(": ")
        param = where if colon and " " not in where else None
        return ApiError(400, str(error) or "nested too deep", code="invalid_value", param=param)
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers={"retry-after": str(error.retry_after)})
    if isinstance(error, MemoryLimitError):
        # Sent again it would need as much again.
        return ApiError(503, str(error), code="out_of_memory", headers={"x-should-retry": "false"})
    if isinstance(error, MemoryError):
        return ApiError(500, "out of memory; send a shorter prompt", code="out_of_memory")
    if isinstance(error, LilyError):
        return ApiError(500, str(error), code="model_error")
    return ApiError(500, f"internal error: {type(error).__name__}", code="internal_error")
