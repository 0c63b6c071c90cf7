"""Whatever a checkpoint's files hold, loading gives Weights or ModelFilesError and nothing else.

A crash ends the test run, so it shows too. The long run has many more examples and the sanitizers.
"""

import json
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoint_maker import PREFIX, Stored, file_bytes, header_of, make, write, write_file
from lily._core import Weights
from lily.errors import ModelFilesError

SMALL = make(num_hidden_layers=2, hidden_size=64, vocab_size=64, num_experts=2, moe_intermediate_size=64)
HEADER = header_of(SMALL.tensors)
DATA = b"".join(array.tobytes() for _, array in SMALL.tensors.values())
FILE = file_bytes(json.dumps(HEADER, separators=(",", ":")).encode(), DATA)
HEADER_END = len(FILE) - len(DATA)
CONFIG = json.dumps(SMALL.config).encode()

EDGES = [
    0,
    1,
    -1,
    4,
    8,
    63,
    64,
    65,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**60,
    2**62,
    2**63 - 1,
    -(2**63),
    2**63,
    2**64,
]
integers = st.sampled_from(EDGES) | st.integers(-(2**65), 2**65)
scalars = st.none() | st.booleans() | integers | st.floats() | st.text(max_size=20)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)
types = st.sampled_from(["U32", "BF16", "F16", "F32", "U8", "F4", "I64", "F64", "C64", "BOOL", "", "bf16"])


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield write(Path(path), SMALL)


def check(folder: Path, **files: bytes) -> bool:
    """Load the folder with some files changed; whether it loads."""
    names = {"config": "config.json", "model": "model.safetensors", "index": "model.safetensors.index.json"}
    try:
        for key, content in files.items():
            (folder / names[key]).write_bytes(content)
        weights = Weights(str(folder))
    except ModelFilesError as error:
        message = str(error)
        assert message.startswith(str(folder))
        assert message.endswith((".", "?"))
        assert len(message) < 4096
        assert message.count("\n") < 20
        return False
    else:
        for name, _, _ in weights.tensor_table():
            weights.tensor_bytes(name)  # every byte that was bound is there
        return True
    finally:
        (folder / names["config"]).write_bytes(CONFIG)
        (folder / names["model"]).write_bytes(FILE)
        (folder / names["index"]).unlink(missing_ok=True)


def fuzz(**strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a property on a few examples by default, and on many under the marker long."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]

        @pytest.mark.parametrize("examples", [60, pytest.param(1000, marks=pytest.mark.long)])
        def run(folder: Path, examples: int) -> None:
            @settings(max_examples=examples, deadline=None, suppress_health_check=checks)
            @given(**strategies)
            def body(**drawn: Any) -> None:
                test(folder, **drawn)

            body()

        run.__name__ = test.__name__
        run.__doc__ = test.__doc__
        return run

    return decorate


def test_the_unchanged_files_load(folder: Path) -> None:
    assert check(folder)


@fuzz(content=st.binary(max_size=300))
def test_any_bytes(folder: Path, content: bytes) -> None:
    assert not check(folder, model=content)


@fuzz(length=integers, text=st.binary(max_size=200))
def test_any_header_behind_any_length(folder: Path, length: int, text: bytes) -> None:
    assert not check(folder, model=struct.pack("<Q", length % 2**64) + text)


entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": types | scalars,
        "shape": st.lists(integers, max_size=4) | values,
        "data_offsets": st.lists(integers, min_size=2, max_size=2) | values,
    },
)


@fuzz(
    header=st.dictionaries(
        st.sampled_from(sorted(HEADER)) | st.text(max_size=9), entries | values, max_size=4
    )
)
def test_any_entries(folder: Path, header: dict[str, Any]) -> None:
    assert not check(folder, model=file_bytes(json.dumps(header).encode(), bytes(64)))


@fuzz(
    name=st.sampled_from(sorted(SMALL.tensors)),
    dtype=st.none() | types,
    shape=st.none() | st.lists(integers, max_size=4),
    offsets=st.none() | st.tuples(integers, integers),
)
def test_one_entry_changed(
    folder: Path, name: str, dtype: str | None, shape: list[int] | None, offsets: tuple[int, int] | None
) -> None:
    changes = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    entry = HEADER[name] | {key: value for key, value in changes.items() if value is not None}
    header = json.dumps(HEADER | {name: entry}).encode()
    loads = check(folder, model=file_bytes(header, DATA))
    assert loads or entry != HEADER[name]


@fuzz(
    name=st.sampled_from(sorted(SMALL.tensors)),
    dtype=st.sampled_from(["U32", "BF16", "F16", "F32", "U8"]),
    shape=st.lists(st.sampled_from([0, 1, 2, 4, 8, 16, 64, 128]), max_size=4),
)
def test_one_tensor_of_another_kind(folder: Path, name: str, dtype: str, shape: list[int]) -> None:
    """The file is well-formed; the tensor need not be what the model wants."""
    items = {"U32": "u4", "F32": "f4", "BF16": "u2", "F16": "f2", "U8": "u1"}
    write_file(folder / "changed", SMALL.tensors | {name: Stored(dtype, np.zeros(shape, items[dtype]))})
    content = (folder / "changed").read_bytes()
    check(folder, model=content)


edits = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True),
        st.sampled_from(["set", "insert", "delete"]),
        st.binary(min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=4,
)


def edited(content: bytes, changes: list[tuple[float, str, bytes]]) -> bytes:
    out = bytearray(content)
    for where, kind, new in changes:
        at = int(where * len(out))
        if kind == "set":
            out[at : at + len(new)] = new
        elif kind == "insert":
            out[at:at] = new
        else:
            del out[at : at + len(new)]
    return bytes(out)


@fuzz(changes=edits)
def test_header_bytes_changed(folder: Path, changes: list[tuple[float, str, bytes]]) -> None:
    check(folder, model=edited(FILE[:HEADER_END], changes) + FILE[HEADER_END:])


@fuzz(changes=edits)
def test_header_text_changed_under_the_right_length(
    folder: Path, changes: list[tuple[float, str, bytes]]
) -> None:
    check(folder, model=file_bytes(edited(FILE[8:HEADER_END], changes), DATA))


@fuzz(keep=st.integers(0, len(FILE) - 1))
def test_file_cut_anywhere(folder: Path, keep: int) -> None:
    assert not check(folder, model=FILE[:keep])


@fuzz(changes=edits)
def test_config_bytes_changed(folder: Path, changes: list[tuple[float, str, bytes]]) -> None:
    check(folder, config=edited(CONFIG, changes))


@fuzz(
    path=st.sampled_from(
        [("text_config", key) for key in SMALL.config["text_config"]]
        + [("text_config", "rope_parameters", key) for key in SMALL.config["text_config"]["rope_parameters"]]
        + [(key,) for key in SMALL.config]
        + [("quantization", key) for key in SMALL.config["quantization"]]
    ),
    value=values,
)
def test_one_config_value_changed(folder: Path, path: tuple[str, ...], value: Any) -> None:
    config = json.loads(CONFIG)
    section = config
    for key in path[:-1]:
        section = section[key]
    section[path[-1]] = value
    check(folder, config=json.dumps(config).encode())


@fuzz(
    plan=st.dictionaries(
        st.sampled_from(["bits", "group_size", "mode", PREFIX + "layers.0.mlp.gate", "x"]), values
    )
)
def test_any_quantisation_section(folder: Path, plan: dict[str, Any]) -> None:
    config = json.loads(CONFIG)
    del config["quantization_config"]
    check(folder, config=json.dumps(config | {"quantization": plan}).encode())


@fuzz(
    index=values
    | st.fixed_dictionaries(
        {"weight_map": values | st.dictionaries(st.text(max_size=9), st.text(max_size=9))}
    )
)
def test_any_index(folder: Path, index: Any) -> None:
    check(folder, index=json.dumps(index).encode())


@fuzz(text=st.text(alphabet='{}[]",:\\ \n0123456789.eE+-truefalsn\ud83c\udf38u', max_size=80))
def test_any_json_text(folder: Path, text: str) -> None:
    assert not check(folder, config=text.encode("utf-8", "surrogatepass"))
