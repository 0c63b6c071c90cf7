"""Who takes part, of the requests to one model: so many at a time, the others in the order they came.

The core gives those that take part their turns, chunk by chunk and token by token. Here memory is granted
before it is allocated. There is no thread of its own: requests wait in their callers'.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

from lily.errors import MemoryLimitError, QueueFullError

_LOOK = 0.05  # seconds between two looks at whether a request that waits still has to
_ASIDE = (
    0.1  # seconds after which a stream that nobody asks for more gives its place up, though not its memory
)
_STUCK = 1.0  # seconds after which memory in such streams' hands is no longer waited for
_SHARE = 0.9  # of the machine's memory that weights, scratch, states and cache may take together


class Held(Protocol):
    """What a request holds: its state."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it refers to."""


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Requests to a model, and the memory that is promised to them.

    active: int, requests that take part.  waiting: int, in the queue.  most_active, most_waiting: int, how
    many may.
    reserved_bytes: int, promised to those that take part.  live_bytes: int, of all states there are: theirs,
    prefixes and the cache.  limit_bytes: int, what all states together may take.
    """

    active: int
    waiting: int
    most_active: int
    most_waiting: int
    reserved_bytes: int
    live_bytes: int
    limit_bytes: int


@dataclass(slots=True, eq=False)
class Place:
    """A request's place, in the queue and then among those that take part, until leave().

    needed: int, bytes, the most that its states will take.
    state: what it has written so far, once there is something. Only the thread that works on it may look: the
        core is at it meanwhile.
    held: int, bytes of the state when that thread last looked, for others to read.
    waits: bool, whether it is ready to begin: one that is still being read keeps nobody behind it waiting.
    """

    scheduler: "Scheduler"
    needed: int = 0
    state: Held | None = None
    held: int = 0
    waits: bool = False
    idle_since: float | None = field(default=None)
    begun: float | None = field(default=None)

    def note(self, state: Held | None = None) -> None:
        """Note what the state takes now; with one given, that it is the state from here on."""
        if state is not None:
            self.state = state
        self.held = self.state.nbytes if self.state is not None else 0

    def rest(self) -> None:
        """Say that a chunk was handed out, and that there is nothing to do until the next is asked for."""
        self.note()
        self.idle_since = time.monotonic()

    def resume(self) -> None:
        """Say that the next chunk is asked for."""
        self.idle_since = None

    def forget(self) -> None:
        """Say that its state is gone."""
        self.state, self.held = None, 0

    def leave(self) -> None:
        """Let the next one in; doing so twice does nothing."""
        self.forget()
        self.scheduler.leave(self)

    def __enter__(self) -> "Place":
        """Return itself; leaving the block leaves it."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Leave it."""
        self.leave()

    @property
    def unallocated(self) -> int:
        """Bytes that are promised to it and not yet allocated."""
        return max(0, self.needed - self.held)

    def rested(self, seconds: float) -> bool:
        """Return whether nobody has asked it for anything for so long."""
        since = self.idle_since  # read once: another thread's
        return since is not None and time.monotonic() - since > seconds


class Scheduler:
    """Lets requests take part, in the order they came. Safe to call from any thread.

    Nothing is waited for with its lock held, so that an event loop may ask too.
    """

    def __init__(
        self,
        most_active: int,
        most_waiting: int,
        limit: int,
        live_bytes: Callable[[], int],
        make_room: Callable[[int], int],
    ) -> None:
        """Begin with none.

        limit: bytes for all states.  live_bytes: what they take now.
        make_room: asked to free so many bytes of cache; returns how many it did. It may take its time.
        """
        self.most_active, self.most_waiting, self.limit = most_active, most_waiting, limit
        self._live_bytes, self._make_room = live_bytes, make_room
        # Reentrant: a stream that is dropped leaves wherever Python happens to drop it.
        self._changed = threading.Condition(threading.RLock())
        self._active: list[Place] = []
        self._queue: list[Place] = []
        self._seconds: deque[float] = deque([1.0], maxlen=16)  # that the last ones took part

    def line_up(self) -> Place:
        """Return a place at the queue's end, to be left; admit waits for its turn.

        Raises QueueFullError if too many are there already.
        """
        with self._changed:
            self.check_queue()
            place = Place(self)
            self._queue.append(place)
            return place

    def check_queue(self) -> None:
        """Raise QueueFullError if one more may not line up."""
        with self._changed:
            active, waiting = self._at_work(), len(self._queue)
            if active + waiting < self.most_active + self.most_waiting:
                return
            each = sum(self._seconds) / len(self._seconds)
            seconds = max(1, min(60, round(each * waiting / self.most_active)))
        raise QueueFullError(
            f"{waiting} requests wait for the model already, behind {active} at work, and no more may; try "
            f"again in {seconds} s, or load it with a larger max_waiting",
            active,
            waiting,
            seconds,
        )

    def admit(self, needed: int, check: Callable[[], None], place: Place | None = None) -> Place:
        """Wait until a request may take part, and return its place, to be left.

        needed: bytes, the most that its state will take.
        check: called several times a second while it waits; what it raises ends the waiting.
        place: where it stands in the queue. One that takes part, for another state of as many bytes, goes on.
        Raises MemoryLimitError if the memory can't be had, QueueFullError if too many wait already.
        """
        self.check(needed)
        place = place or self.line_up()
        if place in self._active:
            return place
        place.needed = max(place.needed, needed)
        place.waits = True
        try:
            while not self._begin(place):
                check()
        except BaseException:
            self.leave(place)
            raise
        return place

    def check(self, needed: int) -> None:
        """Raise MemoryLimitError if so many bytes can't be had whatever ends."""
        if needed > self.limit:
            raise self._no_memory(needed, "now")

    def require(self, needed: int) -> None:
        """Raise MemoryLimitError unless there are so many bytes, or the cache can be made to give them."""
        if needed > self.spare():
            self._make_room(needed - self.spare())
        if needed > self.spare():
            raise self._no_memory(needed, "now")

    def leave(self, place: Place) -> None:
        """Take a request out; doing so twice does nothing."""
        with self._changed:
            if place in self._active:
                self._active.remove(place)
                if place.begun is not None:
                    self._seconds.append(time.monotonic() - place.begun)
            elif place in self._queue:
                self._queue.remove(place)
            self._changed.notify_all()

    @property
    def active(self) -> int:
        """How many take part."""
        return len(self._active)

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return sum(place.waits for place in list(self._queue))

    def stats(self) -> QueueStats:
        """Return the numbers of now."""
        with self._changed:
            return QueueStats(
                active=self.active,
                waiting=self.waiting,
                most_active=self.most_active,
                most_waiting=self.most_waiting,
                reserved_bytes=sum(place.needed for place in list(self._active)),
                live_bytes=self._live_bytes(),
                limit_bytes=self.limit,
            )

    def spare(self) -> int:
        """Return how many bytes of states there may be beyond those that are there or promised."""
        with self._changed:
            return self.limit - self._live_bytes() - sum(place.unallocated for place in list(self._active))

    def _at_work(self) -> int:
        return sum(not place.rested(_ASIDE) for place in list(self._active))

    def _begin(self, place: Place) -> bool:
        """Have a request take part if it may, or else wait a little for that."""
        with self._changed:
            turn = next((each for each in self._queue if each.waits), None) is place
            if not turn or self._at_work() >= self.most_active:
                self._changed.wait(_LOOK)
                return False
            missing = place.needed - self.spare()
            if missing <= 0:
                self._queue.remove(place)
                self._active.append(place)
                place.waits, place.begun = False, time.monotonic()
                return True
        self._make_room(missing)
        with self._changed:
            if place.needed > self.spare():
                if all(other.rested(_STUCK) for other in self._active):
                    others = f"beside {len(self._active)} unfinished streams and the prefixes"
                    raise self._no_memory(place.needed, others)
                self._changed.wait(_LOOK)
        return False

    def _no_memory(self, needed: int, beside: str) -> MemoryLimitError:
        return MemoryLimitError(
            f"memory: this request needs {needed / 1e6:.1f} MB for its tokens, and of the "
            f"{self.limit / 1e6:.1f} MB for states {max(0, self.spare()) / 1e6:.1f} MB are free {beside}; "
            "shorten the prompt, lower max_tokens, close streams and drop prefixes, or load with a larger "
            "memory_bytes"
        )


def memory_for_states(weights: int, scratch: int) -> int:
    """Return how many bytes the machine has for states, beside weights and scratch of so many."""
    return int(_SHARE * machine_memory()) - weights - scratch


def machine_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or its control group's."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            found = min(found, int(Path(file).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return found
