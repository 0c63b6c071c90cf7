"""What the whole suite shares: how hard hypothesis looks, and a model that is served."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

import lily
from cases import Case
from scripted import make_checkpoint
from support import code_paths

# What says no code path gets one in float32, so that the suite asks the same of every machine: "auto" would
# round prompts to bfloat16 where there is AMX, whose backend has a name of its own.
os.environ.setdefault("LILY_SIMD", code_paths()[0])

settings.register_profile("default", max_examples=50, deadline=None)
settings.register_profile("long", max_examples=300, deadline=None)
settings.load_profile("default")


@pytest.hookimpl(tryfirst=True)  # before pytest takes out what is not asked for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as long what simulates half a minute of a larger checkpoint's past, row by row."""
    for item in items:
        if not isinstance(item, pytest.Function) or not hasattr(item, "callspec"):
            continue
        backend, case = (item.callspec.params.get(name) for name in ("backend", "case"))
        if backend == "sim rows" and isinstance(case, Case) and case.past and case.checkpoint != "tiny":
            item.add_marker(pytest.mark.long)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lily.Model]:
    """Return a model whose answers can be told to it; files that need another have one of that name."""
    with lily.Model.load(make_checkpoint(tmp_path_factory.mktemp("told"))) as model:
        yield model


@pytest.fixture(scope="module")
def url(model: lily.Model) -> Iterator[str]:
    """Return where that model is served."""
    with model.serve(background=True, port=0) as server:
        yield server.url
