"""A host program with an event loop: it never waits for the model, and what it cancels stops."""

import asyncio
import time

import pytest

import lily
from scripted import scripted

QUESTION = [{"role": "user", "content": "Why?"}]


def test_the_answer_is_the_one_that_threads_get(model: lily.Model) -> None:
    async def ask() -> tuple[lily.Completion, lily.Completion, list[lily.Chunk]]:
        prefix = model.prefill(QUESTION)
        whole = await model.agenerate(QUESTION, seed=3, max_tokens=20)
        chunks = [chunk async for chunk in prefix.astream(seed=3, max_tokens=20)]
        return whole, await prefix.agenerate(seed=3, max_tokens=20), chunks

    want = model.generate(QUESTION, seed=3, max_tokens=20)
    whole, again, chunks = asyncio.run(ask())
    assert whole.tokens == again.tokens == want.tokens
    assert sum((chunk.tokens for chunk in chunks), ()) == want.tokens


def test_the_event_loop_goes_on(model: lily.Model) -> None:
    async def count_beside() -> tuple[lily.Completion, int]:
        task = asyncio.create_task(model.agenerate([5] * 2000, max_tokens=50, stop_tokens=()))
        beats = 0
        while not task.done():
            await asyncio.sleep(0.002)
            beats += 1
        return task.result(), beats

    done, beats = asyncio.run(count_beside())
    assert len(done.tokens) == 50
    assert beats > 10


def test_several_take_turns(model: lily.Model) -> None:
    async def ask() -> list[lily.Completion]:
        return await asyncio.gather(
            *(model.agenerate(QUESTION, seed=seed, max_tokens=20) for seed in range(12))
        )

    alone = [model.generate(QUESTION, seed=seed, max_tokens=20).tokens for seed in range(12)]
    assert [done.tokens for done in asyncio.run(ask())] == alone


def test_a_cancelled_task_stops_with_the_token_it_is_at(model: lily.Model) -> None:
    async def cancel(script: object) -> None:
        task = asyncio.create_task(model.agenerate(QUESTION))
        await asyncio.to_thread(script.waits.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        script.release.set()

    with scripted(model, "one two three four five six seven", hold_at=3) as script:
        asyncio.run(cancel(script))
        for _ in range(100):  # long enough for the whole answer
            time.sleep(0.002)
        assert script.drawn == 4
    assert len(model.generate(QUESTION, max_tokens=5, stop_tokens=()).tokens) == 5


def test_a_cancelled_task_stops_within_its_prompt() -> None:
    with lily.Model.load(lily.DEMO, prefill_chunk=16) as model:
        reached: list[int] = []

        async def cancel() -> None:
            stream = model.astream([5] * 4000, progress=lambda done, total: reached.append(done))
            task = asyncio.create_task(stream.completion())
            while not reached:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with stream:  # which waits until the thread is done
                pass

        asyncio.run(cancel())
        assert 0 < reached[-1] < 4000


def test_a_stream_may_be_left_or_cancelled(model: lily.Model) -> None:
    async def leave() -> tuple[lily.Completion, list[lily.Chunk]]:
        async for _ in model.astream(QUESTION, stop_tokens=()):
            break
        async with model.astream(QUESTION, stop_tokens=(), seed=1) as stream:
            await anext(stream)
            stream.cancel()
            rest = [chunk async for chunk in stream]
            done = await stream.completion()
        early = model.astream(QUESTION)
        early.cancel()
        return done, [*rest, *[chunk async for chunk in early]]

    done, rest = asyncio.run(leave())
    assert done.finish_reason is None
    assert 1 <= len(done.tokens) <= 3
    assert len(rest) <= 2


def test_errors_come_with_the_first_chunk(model: lily.Model) -> None:
    async def ask() -> None:
        stream = model.astream(QUESTION, stop="")
        with pytest.raises(ValueError, match=r"^stop: wanted at least one character"):
            await anext(stream)
        async with model.astream(QUESTION, stop=""):
            pass
        with pytest.raises(lily.ContextError):
            await model.agenerate([5] * 5000)
        with pytest.raises(TypeError, match="unexpected argument 'tempo'"):
            await model.prefill(QUESTION).agenerate(tempo=1)

    asyncio.run(ask())


def test_a_stream_can_be_cancelled_from_another_thread(model: lily.Model) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with (
        scripted(model, "one two three four five six seven", hold_at=2) as script,
        ThreadPoolExecutor(1) as pool,
    ):
        stream = model.stream(QUESTION, thinking=False)
        future = pool.submit(stream.completion)
        assert script.waits.wait(10)
        stream.cancel()
        script.release.set()
        done = future.result(10)
    assert (len(done.tokens), done.finish_reason) == (3, None)
    assert done.text == model.tokenizer.decode(done.tokens)


def test_a_stream_cancelled_before_it_begins_does_nothing(model: lily.Model) -> None:
    with scripted(model, "one") as script:
        stream = model.stream(QUESTION)
        stream.cancel()
        assert list(stream) == []
        assert script.drawn == 0


def test_threads_end_with_their_streams(model: lily.Model) -> None:
    import gc
    import threading

    async def ask() -> None:
        for _ in range(5):
            await model.agenerate(QUESTION, max_tokens=2)

    asyncio.run(ask())
    gc.collect()
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("lily") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)
