"""A program with an event loop of its own: it answers several people at once, and drops one who hangs up.

The model works in a thread, so the loop goes on; cancelling a task stops its answer with the token it is at.
"""

import asyncio
import time

import lily


async def answer(
    model: lily.Model, name: str, animal: str, max_tokens: int, bored: asyncio.Event | None = None
) -> None:
    """Stream a story to somebody, who may be bored after ten words."""
    words = 0
    try:
        async with model.astream(f"A story about a {animal}.", max_tokens=max_tokens, seed=1) as stream:
            async for chunk in stream:
                words += chunk.text.startswith(" ")
                if bored is not None and words == 10:
                    bored.set()
            done = await stream.completion()
    except asyncio.CancelledError:
        print(f"{name} hung up after {words} words")
        raise
    print(f"{name} got {done.usage.completion_tokens} tokens: {done.text[:60]!r}...")


async def heartbeat() -> None:
    """Stand for all else that the program does."""
    longest, last = 0.0, time.perf_counter()
    try:
        while True:
            await asyncio.sleep(0.005)
            longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    finally:
        print(f"the loop was never kept for more than {1000 * longest:.0f} ms")


async def main() -> None:
    """Serve three people, one of whom does not wait."""
    with lily.Model.load(lily.DEMO) as model:
        beat = asyncio.create_task(heartbeat())
        bored = asyncio.Event()
        people = [
            asyncio.create_task(answer(model, "Ada", "fox", 60)),
            asyncio.create_task(answer(model, "Ben", "hen", 60)),
            asyncio.create_task(answer(model, "Cleo", "whale", 3000, bored)),
        ]
        await bored.wait()
        people[2].cancel()
        await asyncio.gather(*people, return_exceptions=True)
        beat.cancel()
        await asyncio.gather(beat, return_exceptions=True)


asyncio.run(main())
