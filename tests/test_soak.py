"""Load: many generations, in turn and at once, that leave nothing behind and disturb nobody."""

import random
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import lily

pytestmark = [pytest.mark.long, pytest.mark.unsanitized]
PROMPT = "Once upon a time there was a little"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture(scope="module")
def model() -> Iterator[lily.Model]:
    with lily.Model.load(lily.DEMO, cache_bytes=32 << 20) as model:
        yield model


def answer(model: lily.Model, seed: int) -> tuple[int, ...]:
    prompt = model.tokenizer.encode(PROMPT)
    return model.generate(prompt, max_tokens=12, temperature=0.9, seed=seed, stop_tokens=()).tokens


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_two_thousand_generations_leave_nothing_behind(model: lily.Model) -> None:
    seen = {seed: answer(model, seed) for seed in range(20)}
    assert len(set(seen.values())) > 10
    for turn in range(100):  # the allocator's and the interpreter's own caches fill
        answer(model, turn % 20)
    before = resident_bytes()
    for turn in range(2000):
        assert answer(model, turn % 20) == seen[turn % 20]
    grown = resident_bytes() - before
    assert grown < 8 << 20, f"{grown / 2**20:.1f} MB more after 2,000 generations"


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_two_thousand_unrelated_requests_leave_nothing_behind(model: lily.Model) -> None:
    """Each is new to the cache, which is full, and to what remembers answers."""

    def ask(number: int) -> tuple[int, ...]:
        prompt = [2 + (number * 7919 + i * i) % 4000 for i in range(24)]
        return model.generate(prompt, max_tokens=17, seed=number, stop_tokens=()).tokens

    first = ask(5000)
    for number in range(600):
        ask(number)
    before = resident_bytes()
    for number in range(600, 2600):
        ask(number)
        stats = model.cache_stats()
        assert stats.bytes <= stats.budget
    grown = resident_bytes() - before
    assert stats.evictions > 2000
    assert grown < 0.01 * before, f"{grown / 2**20:.2f} MB more on {before / 2**20:.0f} MB"
    assert ask(5000) == first


def test_a_thousand_requests_between_change_nothing(model: lily.Model) -> None:
    story = model.tokenizer.encode("The secret of the lighthouse keeper was a fox. " * 8)
    ask = {"max_tokens": 16, "seed": 7, "stop_tokens": (), "logprobs": True}
    want = model.generate(story, reuse="off", **ask)
    for number in range(1000):
        model.generate([2 + (number * 31 + i) % 4000 for i in range(20)], max_tokens=1, seed=number)
        if number % 100 == 0:
            done = model.generate(story, **ask)
            assert (done.tokens, done.logprobs) == (want.tokens, want.logprobs)
    done = model.generate(story, **ask)
    assert (done.tokens, done.logprobs) == (want.tokens, want.logprobs)


def test_eight_threads_that_often_change_their_minds(model: lily.Model) -> None:
    """Conversations at once for a minute, some called off at any stage; each answers as it does alone."""
    words = ["the", "fox", "and", "a", "hen", "went", "down", "to", "a", "river", "where", "she", "sang"]

    def conversation(number: int) -> list[dict[str, str]]:
        turns = [" ".join(words[(number + i) % len(words)] for i in range(20 + 40 * (number % 5)))]
        turns += [f"And then, {word}?" for word in words[: number % 3]]
        messages: list[dict[str, str]] = []
        for turn in turns:
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": "I see."}]
        return messages[:-1]

    def ask(number: int, **settings: object) -> lily.Stream:
        return model.stream(conversation(number), max_tokens=12, seed=number, stop_tokens=(), **settings)

    want = [ask(number, reuse="off").completion().tokens for number in range(24)]
    end = time.monotonic() + 60
    counts = [0, 0]

    def work(seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < end:
            number = chance.randrange(24)
            stream = ask(number)
            if chance.random() < 0.5:
                assert stream.completion().tokens == want[number]
                counts[0] += 1
                continue
            timer = threading.Timer(chance.random() * 0.1, stream.cancel)
            timer.start()
            so_far = stream.completion().tokens
            assert so_far == want[number][: len(so_far)]
            timer.cancel()
            counts[1] += len(so_far) < 12

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, seed) for seed in range(8)]:
            done.result()
    assert min(counts) > 20
    assert model.queue_stats().active == model.queue_stats().waiting == 0


def test_callers_at_once_get_what_they_get_alone(model: lily.Model) -> None:
    alone = {seed: answer(model, seed) for seed in range(20)}
    with ThreadPoolExecutor(16) as pool:
        at_once = list(pool.map(lambda turn: answer(model, turn % 20), range(800)))
    assert at_once == [alone[turn % 20] for turn in range(800)]


def test_forks_at_once_share_a_prefix_and_leave_it_alone(model: lily.Model) -> None:
    prefix = model.prefill(model.tokenizer.encode(PROMPT * 40))  # more than a page of 256 positions
    before = prefix.logits().tobytes()
    more = [model.tokenizer.encode(f" {name}") for name in ("fox", "river", "moon", "house")]

    def grow(turn: int) -> bytes:
        return prefix.extend(more[turn % 4]).extend(more[turn % 3]).logits().tobytes()

    alone = [grow(turn) for turn in range(12)]
    with ThreadPoolExecutor(16) as pool:
        at_once = list(pool.map(grow, range(600)))
    assert at_once == [alone[turn % 12] for turn in range(600)]
    assert prefix.logits().tobytes() == before


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_loading_and_closing_leaves_nothing_behind() -> None:
    def once() -> None:
        with lily.Model.load(lily.DEMO) as model:
            answer(model, 1)

    for _ in range(5):
        once()
    before = resident_bytes()
    for _ in range(100):
        once()
    grown = resident_bytes() - before
    assert grown < 16 << 20, f"{grown / 2**20:.1f} MB more after 100 loads"
