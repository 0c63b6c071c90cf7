"""Counters in Prometheus's text format. No prompt and no name of a caller is among them."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lily.completion import Completion

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_SPEEDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)


class Histogram:
    """How often a value was at most each bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """Begin with nothing seen."""
        self._bounds = bounds
        self._counts = [0] * len(bounds)
        self._total = 0.0
        self._seen = 0

    def add(self, value: float) -> None:
        """Count a value."""
        self._seen += 1
        self._total += value
        for i, bound in enumerate(self._bounds):
            self._counts[i] += value <= bound

    def lines(self, name: str) -> Iterable[str]:
        """Return its lines."""
        for bound, count in zip(self._bounds, self._counts, strict=True):
            yield f'{name}_bucket{{le="{bound}"}} {count}'
        yield f'{name}_bucket{{le="+Inf"}} {self._seen}'
        yield f"{name}_sum {self._total}"
        yield f"{name}_count {self._seen}"


@dataclass(slots=True)
class Metrics:
    """What a server has counted since it started."""

    requests: dict[tuple[str, int], int] = field(default_factory=dict)
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    queue: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    speed: Histogram = field(default_factory=lambda: Histogram(_SPEEDS))

    def request(self, path: str, status: int) -> None:
        """Count an answered request."""
        self.requests[path, status] = self.requests.get((path, status), 0) + 1

    def completion(self, done: "Completion") -> None:
        """Count an answer's tokens and speed."""
        self.prompt_tokens += done.usage.prompt_tokens
        self.cached_tokens += done.usage.cached_tokens
        self.completion_tokens += done.usage.completion_tokens
        if done.timings.decode_tokens:
            self.speed.add(done.timings.decode_tokens_per_second)

    def text(self, gauges: dict[str, tuple[str, float]]) -> str:
        """Return all of it.

        gauges: help and value of what is measured now, by name.
        """
        lines = ["# HELP lily_requests_total Answered requests.", "# TYPE lily_requests_total counter"]
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'lily_requests_total{{path="{path}",status="{status}"}} {count}')
        for name, text, value in (
            ("requests_cancelled_total", "Requests whose client left.", self.cancelled),
            ("prompt_tokens_total", "Tokens of prompts.", self.prompt_tokens),
            ("cached_tokens_total", "Tokens of prompts that were there already.", self.cached_tokens),
            ("completion_tokens_total", "Tokens of answers.", self.completion_tokens),
        ):
            lines += [f"# HELP lily_{name} {text}", f"# TYPE lily_{name} counter", f"lily_{name} {value}"]
        for name, (text, measured) in gauges.items():
            lines += [f"# HELP lily_{name} {text}", f"# TYPE lily_{name} gauge", f"lily_{name} {measured}"]
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From the turn to the first piece.", self.first_token),
            ("queue_seconds", "Waited for a turn.", self.queue),
            ("decode_tokens_per_second", "Speed of answers.", self.speed),
        ):
            lines += [f"# HELP lily_{name} {text}", f"# TYPE lily_{name} histogram"]
            lines += histogram.lines(f"lily_{name}")
        return "\n".join(lines) + "\n"


def resident_bytes() -> int:
    """Return how much memory the process has resident; its peak where the present size can't be had."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = int(file.read().split()[1])
    except OSError:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    import os

    return pages * os.sysconf("SC_PAGE_SIZE")
