"""Many clients at once, some of which leave: each answer is the one given alone, and nothing is left."""

import asyncio
import sys

import pytest

from bench.serve import QUESTIONS, Outcome, load, serving

pytestmark = pytest.mark.unsanitized


def check(outcome: Outcome, health: float) -> None:
    assert outcome.faults == []
    assert outcome.completed
    assert outcome.left
    assert outcome.health_p99 < health


def test_a_few_seconds_of_load() -> None:
    with serving() as url:
        # Of a few samples the slowest one, on a machine that has other tests to run.
        check(asyncio.run(load(url, 8, 3, QUESTIONS[::6])), health=1)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_a_minute_of_load() -> None:
    with serving() as url:
        outcome = asyncio.run(load(url, 32, 60))
    check(outcome, health=0.1)
    assert outcome.growth < 0.02
