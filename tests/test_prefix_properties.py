"""Whatever was done to prefixes, warm logits are cold ones, bit for bit: trees of forks, cuts, files."""

import os
import tempfile
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lily
from support import CHECKPOINTS, backends, options_of

# Examples of each run: the simulator takes a thousand times as long as the processor.
EXAMPLES = {"sim tiles": 4, "sim rows": 2}
BORDERS = (1, 2, 3, 31, 33, 62, 63, 64, 65, 66, 100, 127, 128, 129, 130)  # of tiles, chunks and checkpoints
STEPS = ("extend", "extend", "rollback", "fork", "save", "drop", "generate", "abandon")


@cache
def model_of(checkpoint: str, backend: str, kv: str, warm: bool) -> lily.Model:
    """A model for what is kept, or one that keeps nothing and takes each prompt in at once."""
    spacing = 64 if warm else 0
    options = {
        "prefill_chunk": 128,
        "checkpoint_tokens": spacing,
        "kv": kv,
        "threads": 2,
        **options_of(backend),
    }
    return lily.Model.load(CHECKPOINTS[checkpoint], **options)


class Cold:
    """Logits and answers of token ids that were taken in at once, each made once."""

    def __init__(self, model: lily.Model) -> None:
        self._model = model
        self._prefixes: dict[tuple[int, ...], lily.Prefix] = {}

    def prefix(self, tokens: tuple[int, ...]) -> lily.Prefix:
        if tokens not in self._prefixes:
            self._prefixes[tokens] = self._model.prefill(tokens)
        return self._prefixes[tokens]


@cache
def cold_of(checkpoint: str, backend: str, kv: str) -> Cold:
    return Cold(model_of(checkpoint, backend, kv, warm=False))


@st.composite
def programs(draw, most_steps):
    """Draw what to do: a first length, then steps of (what, with which prefix, how much, which tokens)."""
    step = st.tuples(st.sampled_from(STEPS), st.integers(0, 7), st.sampled_from(BORDERS), st.integers(0, 1))
    return draw(st.sampled_from(BORDERS)), draw(st.lists(step, min_size=2, max_size=most_steps))


def saved_and_loaded(model: lily.Model, prefix: lily.Prefix) -> lily.Prefix:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "a.lily")
        prefix.save(path)
        return model.load_prefix(path)


def stop(done, total):
    raise KeyError


def run(checkpoint: str, backend: str, kv: str, program, longest: int) -> None:
    """Carry a program out, and compare every prefix that is alive with a cold one after every step."""
    model, cold = model_of(checkpoint, backend, kv, warm=True), cold_of(checkpoint, backend, kv)
    rng = np.random.default_rng(1)
    texts = rng.integers(0, min(600, model.info.vocab), (2, 400)).tolist()
    first, steps = program
    alive = [model.prefill(texts[0][:first], checkpoints=[max(1, first - 1)])]
    for what, which, amount, text in steps:
        prefix = alive[which % len(alive)]
        if what == "extend" and len(prefix) + amount <= longest:
            alive.append(prefix.extend(texts[text][len(prefix) : len(prefix) + amount]))
        elif what == "rollback" and amount < len(prefix):
            alive.append(prefix.rollback(amount))
        elif what == "fork":
            alive.append(prefix.fork())
        elif what == "save":
            alive[which % len(alive)] = saved_and_loaded(model, prefix)
        elif what == "drop" and len(alive) > 1:
            alive.remove(prefix)
        elif what == "generate":
            wanted = cold.prefix(prefix.tokens).generate(seed=amount, max_tokens=3, stop_tokens=())
            assert prefix.generate(seed=amount, max_tokens=3, stop_tokens=()).tokens == wanted.tokens
        elif what == "abandon" and len(prefix) + 150 <= longest:
            with pytest.raises(KeyError):
                prefix.extend(texts[1 - text][:150], progress=stop)
        for one in alive:
            assert np.array_equal(one.logits(), cold.prefix(one.tokens).logits()), (what, len(one))
    session = model._engine.session
    del alive, prefix, one
    assert session.state_bytes == 0


def check(checkpoint: str, backend: str, kv: str, examples: int, longest: int, most_steps: int = 10) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(programs(most_steps))
    def holds(program):
        run(checkpoint, backend, kv, program, longest)

    holds()


def one_of_each() -> list[str]:
    """Return the best code path of the CPU, and the GPU kernels as a prompt goes through them."""
    return [name for name in backends() if name in (backends()[0], "sim tiles")]


@pytest.mark.parametrize("backend", one_of_each())
def test_warm_is_cold(backend):
    check("tiny", backend, "bf16", EXAMPLES.get(backend, 30), 330)


@pytest.mark.parametrize("kv", ["f32", "int8"])
def test_warm_is_cold_whatever_keys_are_kept_in(kv):
    check("tiny", backends()[0], kv, 15, 330)


def test_warm_is_cold_on_the_demo():
    check("demo", backends()[0], "bf16", 6, 200, 6)


@pytest.mark.long  # the simulator, and every code path
@pytest.mark.parametrize("kv", ["bf16", "int8"])
@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("checkpoint", ["tiny", "demo"])
def test_warm_is_cold_everywhere(checkpoint, backend, kv):
    many = 100 if checkpoint == "tiny" else 20
    longest = 330 if not backend.startswith("sim") else 200 if checkpoint == "tiny" else 140
    check(checkpoint, backend, kv, EXAMPLES.get(backend, many), longest, 8)
