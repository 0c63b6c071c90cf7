"""A stream for asyncio: the work is done in a thread, and a task that is cancelled takes it along."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lily.completion import Chunk, Completion, Stream

T = TypeVar("T")


class AsyncStream(AsyncIterator[Chunk]):
    """An answer while it is written: iterate over it with `async for`, from one task at a time.

    Work is done only when a chunk is asked for. Leave it, or cancel the task that waits for it, whenever you
    like: the model then stops with the token, or the part of the prompt, that it is at.
    """

    def __init__(self, begin: Callable[[], Stream]) -> None:
        """Hold what sets the generation up; Model.astream and Prefix.astream make one."""
        self._begin = begin
        self._stream: Stream | None = None
        self._cancelled = False
        # Its own, since the event loop's threads are few, and the host's.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lily")

    def __aiter__(self) -> "AsyncStream":
        """Return itself."""
        return self

    async def __anext__(self) -> Chunk:
        """Return the next chunk."""
        chunk = await self._run(lambda stream: next(stream, None))
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    async def __aenter__(self) -> "AsyncStream":
        """Return itself; leaving the block ends the generation."""
        return self

    async def __aexit__(self, *exception: object) -> None:
        """End the generation and wait until it has."""
        self.cancel()
        if self._stream is not None:
            await self._run(Stream.close)

    def cancel(self) -> None:
        """Have the generation end, as Stream.cancel does."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()

    async def completion(self) -> Completion:
        """Write the rest, if there is one, and return the whole answer."""
        return await self._run(Stream.completion)

    async def rest(self) -> list[Chunk]:
        """Write the rest and return its chunks."""
        return await self._run(list)

    async def _run(self, work: Callable[[Stream], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._work, work)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _work(self, work: Callable[[Stream], T]) -> T:
        """Do some of the work, in the thread; set the generation up if that is not yet done."""
        if self._stream is None:
            self._stream = self._begin()
            if self._cancelled:
                self._stream.cancel()
        return work(self._stream)
