"""How a server is set up."""

import ipaddress
import os
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, get_args, get_origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How a server is set up.

    host, port: where it listens; port 0 takes a free one.
    api_key: str, what clients must send, as a Bearer token or as x-api-key; None for no key.
    allow_public: bool, whether it may listen beyond this machine without a key.
    allowed_hosts: names, beside this machine's own, that a request may be addressed to. With a key any may.
    allowed_origins: of web pages elsewhere that may use it, "https://example.org"; "*" for any.
    name: str, the model's name in /v1/models; by default its folder's.
    strict_model: bool, whether a request that names another model is refused.
    prefix: str or path of a file that Prefix.save wrote, which prompts may begin with; None for none.
    max_tokens: int, where an answer is cut whose request doesn't say; None for the model's own limit.
    thinking: bool, whether answers begin with thoughts if the request doesn't say; None for the template's.
    body_bytes: int, the longest body.  depth: int, the deepest JSON.  messages: int, the most in a request;
    tools: int, likewise.
    keep_alive: float, seconds of silence in a stream until it says that it goes on.
    body_seconds: float, in which a request must have arrived.  write_seconds: float, in which a client must
        take what is sent.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    api_key: str | None = None
    allow_public: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    name: str | None = None
    strict_model: bool = False
    prefix: str | os.PathLike[str] | None = None
    max_tokens: int | None = None
    thinking: bool | None = None
    body_bytes: int = 32 * 2**20
    depth: int = 128
    messages: int = 10_000
    tools: int = 1_024
    keep_alive: float = 5.0
    body_seconds: float = 60.0
    write_seconds: float = 60.0

    def __post_init__(self) -> None:
        """Check each setting.

        Raises TypeError or ValueError for one that can't be, and for an address that others can reach without
        a key.
        """
        for each in fields(self):
            _check(each.name, each.type, getattr(self, each.name))
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip()):
            raise ValueError("api_key: wanted ASCII characters; generate one, or leave it out")
        if not self.api_key and not self.allow_public and not is_loopback(self.host):
            raise ValueError(
                f"host: {self.host} can be reached from other machines, and there is no key; set api_key "
                "(--api-key, LILY_API_KEY), or allow_public (--allow-public) if something else protects it"
            )
        if not 0 <= self.port < 2**16:
            raise ValueError(f"port: wanted 0 to 65535, got {self.port}")
        for name in ("body_bytes", "depth", "messages", "tools", "max_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name}: wanted at least 1, got {value}")
        for name in ("keep_alive", "body_seconds", "write_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: wanted more than 0 seconds, got {getattr(self, name)}")


def _check(name: str, wanted: Any, value: object) -> None:
    """Raise TypeError unless a value is of the type that a setting is declared with."""
    for kind in get_args(wanted) if get_origin(wanted) is UnionType else (wanted,):
        origin = get_origin(kind) or kind
        if origin is tuple:
            if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
                return
        elif isinstance(value, bool):
            if origin is bool:
                return
        elif isinstance(value, (int, float) if origin is float else origin):
            return
    said = wanted if get_origin(wanted) else wanted.__name__
    raise TypeError(f"{name}: wanted {said}, got {type(value).__name__}")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
