"""Memory comes back: after a step, after a request, after a model, on the CPU and on the GPU kernels."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

import lily
from support import CHECKPOINTS, backends, options_of

ASK = {"stop_tokens": (), "reuse": "off"}


@pytest.fixture(
    params=[
        name
        for name in backends()
        if name in ("avx512vnni packed", "avx512", "plain", "sim rows", "cuda rows")
    ]
)
def model(request: pytest.FixtureRequest) -> Iterator[lily.Model]:
    options = {"threads": 2, **options_of(request.param)}
    with lily.Model.load(CHECKPOINTS["tiny"], **options) as model:
        yield model


def test_steps_and_requests_leave_no_buffer_behind(model: lily.Model) -> None:
    """All blocks that a device allocates while it runs are a state's: pages, recurrent states, logits."""
    session = model._engine.session
    page, recurrent, logits = session.state_sizes
    cpu = model.info.device.startswith("cpu")
    prompt, steps, requests = (
        ([5] * 200, 40, 12) if cpu else ([5] * 8, 5, 2)
    )  # simulated ones take their time

    def sizes(seed: int) -> list[int]:
        with model.stream(prompt, seed=seed, max_tokens=steps, **ASK) as stream:
            return [session.state_bytes for _ in stream]

    first = sizes(0)
    assert len(set(first[1:])) == 1  # one page of 256 positions, whatever the step
    assert page < first[1] <= page + 3 * (recurrent + logits)
    scratch, peak = session.scratch_bytes, session.state_peak
    for seed in range(1, requests):
        assert set(sizes(seed)[1:]) <= set(first[1:])
        assert session.state_bytes == 0
    assert (session.scratch_bytes, session.state_peak) == (scratch, peak)


LOADS = """
import gc, json, sys
from pathlib import Path
import lily

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def load():
    model = lily.Model.load(lily.DEMO, threads=2)
    model.prefill([5] * 300)
    model.generate([5] * 9, max_tokens=3, stop_tokens=())
    return model

def closed():
    model = load()
    yield
    model.close()
    yield  # it is still named

def left():
    with load():
        yield
    yield

def dropped():
    model = load()
    yield
    del model
    yield

for _ in closed():  # what Python and the allocator keep for good
    pass
shares = {}
for way in (closed, left, dropped):
    before = resident()
    steps = way()
    next(steps)
    loaded = resident()
    next(steps)
    shares[way.__name__] = (loaded - resident()) / (loaded - before)
    del steps
sizes = []
for _ in range(10):
    model = load()  # as a notebook's cell is run again: the last one goes when the next is there
    sizes.append(resident())
print(json.dumps({"shares": shares, "sizes": sizes}))
"""


@pytest.mark.unsanitized  # measures resident memory, in a program of its own
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_a_model_gives_its_memory_back() -> None:
    run = subprocess.run([sys.executable, "-c", LOADS], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert set(found["shares"]) == {"closed", "left", "dropped"}
    assert min(found["shares"].values()) > 0.95, found["shares"]
    sizes = found["sizes"]
    assert max(sizes[2:]) < 1.05 * sizes[1], sizes
