"""Who may use the model now, and who waits: first come, first served, and a full queue says so at once."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from lily.server.errors import ApiError


class Admission:
    """A bounded queue before the model.

    running, waiting: int, how many do now.
    """

    def __init__(self, concurrency: int, queue: int) -> None:
        """Let so many run at a time and so many wait."""
        self._concurrency = concurrency
        self._queue = queue
        self._turns: deque[asyncio.Future[None]] = deque()
        self._recent: deque[float] = deque([1.0], maxlen=16)  # seconds that runs took
        self.running = 0

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._turns)

    def check(self) -> None:
        """Raise ApiError 429, with the seconds after which to try again, if the queue is full."""
        if self.running >= self._concurrency and self.waiting >= self._queue:
            each = sum(self._recent) / len(self._recent)
            seconds = max(1, min(60, round(each * self.waiting / self._concurrency)))
            raise ApiError(
                429,
                f"the queue is full: {self.running} requests run and {self.waiting} wait; "
                f"try again in {seconds} s",
                code="queue_full",
                headers={"retry-after": str(seconds)},
            )

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn and hold it. Raises ApiError as check does."""
        self.check()
        if self.running < self._concurrency and not self._turns:
            self.running += 1
        else:
            await self._wait()
        started = time.monotonic()
        try:
            yield
        finally:
            self._recent.append(time.monotonic() - started)
            self._pass_on()

    async def _wait(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # it came just then
            elif turn in self._turns:
                self._turns.remove(turn)
            raise

    def _pass_on(self) -> None:
        """Give a turn to who waits longest, or back."""
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self.running -= 1
