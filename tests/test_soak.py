"""Load: many generations, in turn and at once, that leave nothing behind and disturb nobody."""

import sys
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
    with lily.Model.load(lily.DEMO) as model:
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
