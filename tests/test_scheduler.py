"""Who takes part: places, the queue, memory and time, without a model and with one."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

import lily
from lily.scheduler import Place, Scheduler, machine_memory


@dataclass
class Held:
    nbytes: int


def nothing() -> None:
    pass


class Machine:
    """Memory that places hold, and a cache that gives some back."""

    def __init__(self, limit: int = 1000, cache: int = 0, active: int = 2, waiting: int = 2) -> None:
        self.live, self.cache = cache, cache
        self.scheduler = Scheduler(active, waiting, limit, lambda: self.live, self.make_room)

    def make_room(self, needed: int) -> int:
        freed = min(needed, self.cache)
        self.cache -= freed
        self.live -= freed
        return freed

    def hold(self, place: Place, nbytes: int) -> None:
        place.note(Held(nbytes))
        self.live += nbytes


def until(condition: object) -> None:
    deadline = time.monotonic() + 10
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_places_are_given_in_the_order_of_arrival() -> None:
    scheduler = Machine(waiting=8).scheduler
    first = [scheduler.admit(1, nothing), scheduler.admit(1, nothing)]
    order: list[int] = []

    def come(number: int) -> None:
        with scheduler.admit(1, nothing):
            order.append(number)

    threads = []
    for number in range(6):
        threads.append(threading.Thread(target=come, args=(number,)))
        threads[-1].start()
        until(lambda number=number: scheduler.stats().waiting == number + 1)
    assert (scheduler.stats().active, order) == (2, [])
    scheduler.leave(first[0])
    for thread in threads:
        thread.join(10)
    assert order == list(range(6))
    scheduler.leave(first[1])
    scheduler.leave(first[1])
    assert scheduler.stats().active == 0


def test_a_full_queue_says_so_at_once() -> None:
    scheduler = Machine(active=1, waiting=1).scheduler
    with scheduler.admit(1, nothing), ThreadPoolExecutor(1) as pool:
        other = pool.submit(scheduler.admit, 1, nothing)
        until(lambda: scheduler.stats().waiting == 1)
        with pytest.raises(
            lily.QueueFullError, match=r"^1 requests wait for the model already, behind 1 at "
        ) as caught:
            scheduler.admit(1, nothing)
        assert (caught.value.active, caught.value.waiting) == (1, 1)
        assert scheduler.stats().waiting == 1
        first = scheduler._active[0]
        scheduler.leave(first)
        scheduler.leave(other.result(10))


def test_whoever_waits_can_leave_the_queue() -> None:
    scheduler = Machine(active=1).scheduler

    class Enough(Exception):  # noqa: N818
        pass

    def check() -> None:
        if scheduler.stats().waiting:
            raise Enough

    with scheduler.admit(1, nothing):
        with pytest.raises(Enough):
            scheduler.admit(1, check)
        assert scheduler.stats().waiting == 0
    scheduler.leave(scheduler.admit(1, nothing))


def test_memory_is_promised_before_it_is_allocated() -> None:
    machine = Machine(limit=1000, active=8)
    scheduler = machine.scheduler
    with pytest.raises(lily.MemoryLimitError, match=r"needs 0.0 MB for its tokens"):
        scheduler.admit(1001, nothing)
    with ThreadPoolExecutor(1) as pool:
        first = scheduler.admit(600, nothing)
        machine.hold(first, 100)
        assert scheduler.spare() == 400
        second = pool.submit(scheduler.admit, 500, nothing)
        until(lambda: scheduler.stats().waiting == 1)
        time.sleep(0.1)
        assert not second.done()
        machine.live -= 100
        first.__exit__(None, None, None)
        scheduler.leave(second.result(10))


def test_the_cache_makes_room() -> None:
    machine = Machine(limit=1000, cache=700)
    with machine.scheduler.admit(500, nothing):
        assert machine.cache == 500
    machine.live += 600  # prefixes that a caller holds
    machine.cache = 0
    machine.live -= 500
    with pytest.raises(lily.MemoryLimitError, match=r"beside 0 unfinished streams and the prefixes"):
        machine.scheduler.admit(500, nothing)


def test_a_stream_that_is_left_lying_keeps_nobody_out() -> None:
    scheduler = Machine(active=1).scheduler
    lying = scheduler.admit(1, nothing)
    lying.rest()
    with scheduler.admit(1, nothing):
        assert scheduler.stats().active == 2
        lying.resume()
    scheduler.leave(lying)


def test_memory_in_streams_that_are_left_lying_is_not_waited_for_for_ever() -> None:
    scheduler = Machine(limit=1000).scheduler
    lying = scheduler.admit(900, nothing)
    lying.rest()
    begun = time.monotonic()
    with pytest.raises(lily.MemoryLimitError, match=r"beside 1 unfinished streams"):
        scheduler.admit(900, nothing)
    assert 0.5 < time.monotonic() - begun < 10
    scheduler.leave(lying)


def test_the_machine_has_memory() -> None:
    assert 2**28 < machine_memory() < 2**45


# ---- With a model


@pytest.fixture(scope="module")
def model() -> lily.Model:
    return lily.Model.load(lily.DEMO, max_active=2, max_waiting=3, prefill_chunk=64)


def test_more_streams_than_places_can_be_read_side_by_side(model: lily.Model) -> None:
    streams = [model.stream("A story.", seed=seed, max_tokens=6, stop_tokens=()) for seed in range(4)]
    texts = [""] * 4
    for _ in range(6):
        for i, stream in enumerate(streams):
            texts[i] += getattr(next(stream, None), "text", "")
    for i, stream in enumerate(streams):
        texts[i] += "".join(chunk.text for chunk in stream)
    assert texts == [
        model.generate("A story.", seed=seed, max_tokens=6, stop_tokens=()).text for seed in range(4)
    ]
    assert model.queue_stats().active == 0


def test_threads_and_tasks_stand_in_one_queue(model: lily.Model) -> None:
    alone = [model.generate("A story.", seed=seed, max_tokens=8).tokens for seed in range(5)]

    async def ask() -> list[lily.Completion]:
        return await asyncio.gather(
            *(model.agenerate("A story.", seed=seed, max_tokens=8) for seed in range(3))
        )

    with ThreadPoolExecutor(2) as pool:
        threads = [pool.submit(model.generate, "A story.", seed=seed, max_tokens=8) for seed in (3, 4)]
        tasks = asyncio.run(ask())
    assert [done.tokens for done in (*tasks, *(thread.result() for thread in threads))] == alone


def test_a_model_whose_queue_is_full_says_so(model: lily.Model) -> None:
    gate, begun = threading.Event(), threading.Event()

    def hold(done: int, total: int) -> None:
        begun.set()
        assert gate.wait(20)

    with ThreadPoolExecutor(8) as pool:
        work = [
            pool.submit(model.generate, [5] * 100, max_tokens=1, progress=hold, reuse="off") for _ in range(5)
        ]
        until(lambda: model.queue_stats().waiting == 3)
        assert begun.wait(10)
        with pytest.raises(lily.QueueFullError):
            model.generate("A story.", max_tokens=1)
        model._engine.scheduler.most_waiting = 4
        late = model.stream("A story.", max_tokens=1, timeout=0.01)
        with pytest.raises(lily.DeadlineError):
            late.completion()
        model._engine.scheduler.most_waiting = 3
        gate.set()
        assert {len(done.result().tokens) for done in work} <= {0, 1}


def test_a_deadline_ends_prompt_and_answer(model: lily.Model) -> None:
    for prompt, settings in (([5] * 4000, {}), ([5] * 3, {"stop_tokens": (), "max_tokens": 4000})):
        begun = time.monotonic()
        stream = model.stream(prompt, timeout=0.3, reuse="off", **settings)
        with pytest.raises(TimeoutError, match=r"^timeout: the time is up after "):
            stream.completion()
        assert time.monotonic() - begun < 5
        done = stream.so_far()
        assert done.finish_reason is None
        assert (len(done.tokens) > 0) == (len(prompt) == 3)
        assert model.queue_stats().active == 0
    assert len(model.generate("A story.", timeout=600, max_tokens=3, stop_tokens=()).tokens) == 3
    for wrong, error in ((0, ValueError), (-1, ValueError), ("soon", TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"^timeout: wanted "):
            model.stream("A story.", timeout=wrong)


def test_memory_is_admitted_before_any_work() -> None:
    limit = 8 << 20
    with lily.Model.load(lily.DEMO, memory_bytes=limit, cache_bytes=0) as small:
        reached: list[int] = []
        with pytest.raises(lily.MemoryLimitError, match=r"MB for states 8.4 MB are free"):
            small.generate([5] * 3000, max_tokens=1000, progress=lambda done, _: reached.append(done))
        assert not reached
        # Where nobody says how long an answer may be, it is as long as there is room for.
        stream = small.stream("A story.")
        assert 1 <= stream._request.max_tokens < 2000
        assert small.generate("A story.", max_tokens=4, stop_tokens=()).finish_reason == "length"
        assert small._engine.session.state_peak <= limit
    with pytest.raises(
        lily.MemoryLimitError, match=r"^memory: wanted .* MB for a short prompt, got 0.0 MB beside"
    ):
        lily.Model.load(lily.DEMO, memory_bytes=1)
    for name in ("cache_bytes", "memory_bytes", "max_active", "max_waiting"):
        with pytest.raises(ValueError, match=f"^{name}: wanted "):
            lily.Model.load(lily.DEMO, **{name: -1})


def test_a_prompt_that_does_not_fit_the_context_is_refused_at_once(model: lily.Model) -> None:
    with pytest.raises(lily.ContextError):
        model.stream([5] * 5000)


def test_a_cancelled_stream_leaves_the_queue(model: lily.Model) -> None:
    gate = threading.Event()

    def hold(done: int, total: int) -> None:
        assert gate.wait(20)

    with ThreadPoolExecutor(4) as pool:
        work = [
            pool.submit(model.generate, [5] * 100, max_tokens=1, progress=hold, reuse="off") for _ in range(2)
        ]
        until(lambda: model.queue_stats().active == 2)
        stream = model.stream("A story.")
        waits = pool.submit(stream.completion)
        until(lambda: model.queue_stats().waiting == 1)
        stream.cancel()
        assert waits.result(5).tokens == ()
        assert model.queue_stats().waiting == 0
        gate.set()
        for done in work:
            done.result()


def test_a_state_is_looked_at_by_its_own_thread_alone() -> None:
    """The core is at it meanwhile: the server crashed where another thread counted pages that were moving."""
    owner, machine = threading.get_ident(), Machine()

    class Watched:
        @property
        def nbytes(self) -> int:
            assert threading.get_ident() == owner
            return 300

    with machine.scheduler.admit(400, nothing) as place:
        place.note(Watched())
        machine.live += 300

        def other() -> int:
            with machine.scheduler.admit(500, nothing):
                return machine.scheduler.stats().reserved_bytes

        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(other).result(timeout=10) > 0
        place.rest()
        assert place.unallocated == 100
