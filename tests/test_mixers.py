"""The GPU kernels of attn_mix and gdn_mix, strategy by strategy.

Against the reference, and bit for bit where nothing but the route differs.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import rungs
from bench import synthetic
from cases import OPS, cases
from lily import _core, reference
from support import CHECKPOINTS, compare, kernels

Array = NDArray[Any]
LAYERS = {"gdn_mix": 0, "attn_mix": 3}
EXACT = 2e-5  # of the largest value: float32 sums of some thousand products
# Matrix tiles take q, and the shares that the softmax gives, in bfloat16: each off by at most 2^-9 of itself.
# A share whose score is s is then off by |s| 2^-9, and |s| < 2.5 for nearly all of the normal scores drawn.
TILED = 1e-2
STORED = 2.0**-8  # a key in bfloat16 that rounds to the other side


pytestmark = pytest.mark.long  # every strategy and option at many lengths: minutes in the simulator


@pytest.fixture(autouse=True)
def metal():
    rungs.climb("metal")


class Mixer:
    """A session that runs one op on one layer, with states that only this op has written."""

    def __init__(self, op: str, folder, kv: str, instrumented: bool, options: dict[str, str]) -> None:
        self.op, self.layer = op, LAYERS[op]
        given = {
            "device": "sim",
            "kernels": kernels(instrumented),
            "kv": kv,
            "prefill_chunk": "320",
        } | options
        self.session = _core.Session(_core.Weights(str(folder)), given)
        self.model = reference.Model(folder, kv=kv, keep_bytes=0)
        self.reads = tuple(name for name in OPS[op][1] if name != "state")
        self.after = cache(self._after)

    def draw(self, rows: int, seed: int) -> dict[str, Array]:
        rng = np.random.default_rng([seed, rows])
        widths = {name: self.session._get(name, 1).shape[1] for name in self.reads}
        return {name: rng.standard_normal((rows, width)).astype(np.float32) for name, width in widths.items()}

    def run(self, parts, given: dict[str, Array]) -> Array:
        """Run the op over [(state, rows), ...] and return y, the rows of all parts."""
        rows = sum(count for _, count in parts)
        wide = self.session._get("y", 1).shape[1]
        self.session._set("y", np.full((rows, wide), np.nan, np.float32))
        for name, array in given.items():
            self.session._set(name, array)
        self.session._run(self.op, self.layer, [(state, np.zeros(count, np.int32)) for state, count in parts])
        self.session._finish()
        y = self.session._get("y", rows)
        for state, count in parts:
            self.session._advance(state, count)
        return y[:, ~np.isnan(y).all(axis=0)]  # one kind of mixer fills its front only

    def state(self, state) -> tuple[Array, Array]:
        return self.session.layer_state(state, self.layer)

    def _after(self, past: int):
        state = self.session.new_state()
        for begin in range(0, past, 300):
            rows = min(300, past - begin)
            self.run([(state, rows)], self.draw(rows, 7 + begin))
        return state

    def fork(self, past: int):
        """Return a state that has taken in so many tokens."""
        return self.session.fork(self.after(past))

    def check(self, past: int, rows: int, tolerance: float) -> None:
        """Compare y and the state that the op leaves with the reference's."""
        state, given = self.fork(past), self.draw(rows, 0)
        before = tuple(part.astype(np.float64) for part in self.state(state))
        arguments = [given[name].astype(np.float64) for name in self.reads]
        wanted, states = OPS[self.op][0](self.model.layers[self.layer], *arguments, before)
        compare("y", self.run([(state, rows)], given), wanted, tolerance)
        exact = EXACT if self.model.layers[self.layer].numerics.round_kv is reference.exact else STORED
        for part, (got, want) in enumerate(zip(self.state(state), states, strict=True)):
            compare(f"state part {part}", got, want, exact)


@cache
def mixer(op: str, checkpoint: str, kv: str = "f32", instrumented: bool = False, **options: str) -> Mixer:
    return Mixer(op, CHECKPOINTS[checkpoint], kv, instrumented, options)


def name_of(options: dict[str, str]) -> str:
    return "-".join(f"{name}-{value}" for name, value in options.items()) or "defaults"


# Against the reference.


@pytest.mark.parametrize("scan", ["registers", "packed", "chunked"])
@pytest.mark.parametrize(
    "case", [case for case in cases() if case.op == "gdn_mix" and case.rows > 2], ids=str
)
def test_scans_are_the_reference(case, scan):
    mixer("gdn_mix", case.checkpoint, gdn_scan=scan, gdn_scan_from="3").check(case.past, case.rows, EXACT)


@pytest.mark.parametrize("flash", [True, False], ids=["tiles", "spans"])
@pytest.mark.parametrize("case", [case for case in cases() if case.op == "attn_mix"], ids=str)
def test_attention_over_bfloat16_is_the_reference(case, flash):
    tiles = mixer("attn_mix", case.checkpoint, "bf16", flash_from="2" if flash else "0")
    tiles.check(case.past, case.rows, TILED if flash and case.rows > 1 else STORED)


@pytest.mark.parametrize("checkpoint", ["tiny", "small", "demo"])
def test_tensor_operations_give_what_simdgroup_matrix_gives(checkpoint):
    """Attention in tiles of either kind; the simulator adds their products up in one order."""
    found = []
    for tiles in ("simdgroup", "tensor"):
        one = mixer("attn_mix", checkpoint, "bf16", flash_from="2", tiles=tiles)
        for past, rows in ((0, 2), (255, 33), (300, 65)):
            one.check(past, rows, TILED)
        found.append(one.run([(one.fork(300), 65)], one.draw(65, 1)))
    assert np.array_equal(*found)


@pytest.mark.parametrize("seen", [255, 256, 257, 299, 300, 1023, 1024, 1025, 2048, 2049])
@pytest.mark.parametrize("blocks_from", ["0", "300"])
@pytest.mark.parametrize("kv", ["bf16", "f32"])
def test_spans_of_every_length_are_the_reference(seen, blocks_from, kv):
    mixer("attn_mix", "demo", kv, fixed_blocks_from=blocks_from).check(seen - 1, 1, EXACT)


@pytest.mark.parametrize("rows", [31, 32, 33], ids=lambda rows: f"{rows} rows")
@pytest.mark.parametrize("op", ["attn_mix", "gdn_mix"])
def test_far_along_the_switches_are_at_the_default(op, rows):
    """Beyond 2,048 positions, with one row less than tiles and scans begin at, as many, and one more."""
    tolerance = TILED if op == "attn_mix" and rows >= 32 else STORED
    mixer(op, "tiny", "bf16").check(2310, rows, tolerance)


@pytest.fixture(scope="module")
def published_widths(tmp_path_factory):
    directory = tmp_path_factory.mktemp("widths")
    synthetic.write(directory, layers=4, experts=8, vocab=600)
    yield directory
    for file in directory.glob("*.safetensors"):
        file.unlink()  # pytest keeps the directories of three runs


@pytest.mark.parametrize(
    ("op", "tolerance", "options"),
    [
        ("gdn_mix", EXACT, {"gdn_scan": "registers"}),
        ("gdn_mix", EXACT, {"gdn_scan": "packed"}),
        ("gdn_mix", EXACT, {"gdn_scan": "chunked"}),
        ("attn_mix", TILED, {}),
        ("attn_mix", STORED, {"flash_from": "0"}),
    ],
    ids=str,
)
def test_the_published_widths(published_widths, op, tolerance, options):
    wide = Mixer(op, published_widths, "bf16", False, options)
    assert (wide.model.config.heads, wide.model.config.kv_heads, wide.model.config.head_dim) == (16, 2, 256)
    assert (wide.model.config.key_heads, wide.model.config.value_heads, wide.model.config.key_dim) == (
        16,
        32,
        128,
    )
    for past, rows in ((0, 1), (61, 67), (300, 1)):
        wide.check(past, rows, tolerance if rows > 1 else STORED)


# Bit for bit.


def grow(attention: Mixer) -> list[Array]:
    """Take tokens in by ones and by several, past every kind of span; return each y and the last state."""
    state = attention.fork(254)
    found = [attention.run([(state, rows)], attention.draw(rows, 1)) for rows in (1, 1, 1, 3, 40, 1)]
    state = attention.fork(1100)
    found += [attention.run([(state, rows)], attention.draw(rows, 1)) for rows in (1, 2)]
    return [*found, *attention.state(state)]


@pytest.mark.parametrize("checkpoint", ["tiny", "small", "demo"])
@pytest.mark.parametrize(
    "options",
    [{"gqa_packing": "false"}, {"coalesced_kv": "false"}, {"gqa_packing": "0", "fixed_blocks_from": "300"}],
    ids=name_of,
)
def test_how_keys_are_loaded_leaves_no_trace(checkpoint, options):
    spans = {name: value for name, value in options.items() if name == "fixed_blocks_from"}
    wanted = grow(mixer("attn_mix", checkpoint, "bf16", **spans))
    for step, (got, want) in enumerate(
        zip(grow(mixer("attn_mix", checkpoint, "bf16", **options)), wanted, strict=True)
    ):
        assert np.array_equal(got, want), step


def test_blocks_of_one_size_do_change_the_sums():
    """The option does something: from its threshold on, and not before."""
    growing, fixed = (
        grow(mixer("attn_mix", "demo", "bf16", **o)) for o in ({}, {"fixed_blocks_from": "300"})
    )
    same = [np.array_equal(a, b) for a, b in zip(growing, fixed, strict=True)]
    assert same == [True] * 5 + [False] * 3 + [True] * 2  # the sixth sees 301; then y beyond, and the states


def in_pieces(one: Mixer, past: int, pieces: list[int], seed: int = 3) -> tuple[Array, ...]:
    """Take the same tokens in, cut in pieces; return y of all, and the state."""
    given = one.draw(sum(pieces), seed)
    state, rows, begin = one.fork(past), [], 0
    for count in pieces:
        rows.append(one.run([(state, count)], {name: a[begin : begin + count] for name, a in given.items()}))
        begin += count
    return (np.concatenate(rows), *one.state(state))


@pytest.mark.parametrize(
    ("op", "kv", "options", "past", "pieces"),
    [
        # One at a time each row appends its own key; together they find it in its page.
        ("attn_mix", "bf16", {}, 250, [1] * 8),
        ("attn_mix", "f32", {}, 250, [1, 3, 1, 2, 1]),
        ("attn_mix", "int8", {}, 250, [1, 3, 1, 2, 1]),
        ("attn_mix", "bf16", {"fixed_blocks_from": "8"}, 1020, [1, 1, 3, 1]),
        ("attn_mix", "bf16", {"flash_from": "2"}, 37, [2, 31, 64, 3, 29]),
        ("gdn_mix", "f32", {}, 3, [1, 2, 5, 8, 1]),
        ("gdn_mix", "f32", {"gdn_scan": "packed", "gdn_scan_from": "3"}, 3, [4, 33, 64, 3]),
        ("gdn_mix", "f32", {"gdn_scan": "registers", "gdn_scan_from": "3"}, 3, [4, 33, 64, 3]),
        # Chunks lie on the position grid: cuts at its borders are none.
        ("gdn_mix", "f32", {"gdn_scan_from": "3"}, 37, [27, 64, 128, 5]),
    ],
    ids=str,
)
@pytest.mark.parametrize("checkpoint", ["tiny", "demo"])
def test_pieces_are_the_whole(checkpoint, op, kv, options, past, pieces):
    one = mixer(op, checkpoint, kv, **options)
    for got, want in zip(in_pieces(one, past, pieces), in_pieces(one, past, [sum(pieces)]), strict=True):
        assert np.array_equal(got, want)


@pytest.mark.parametrize("checkpoint", ["tiny", "demo"])
@pytest.mark.parametrize("op", ["gdn_mix", "attn_mix"])
@pytest.mark.parametrize("counts", [[1, 1, 1, 1, 1], [1, 40, 3, 1, 1]], ids=str)
def test_a_sequence_does_not_see_its_neighbours(checkpoint, op, counts):
    """Of one span and of several, of one row and of many."""
    one = mixer(op, checkpoint, "bf16")
    pasts = [300, 0, 1024, 255, 7]
    given = one.draw(sum(counts), 5)
    borders = np.cumsum([0, *counts])
    alone, together = [one.fork(past) for past in pasts], [one.fork(past) for past in pasts]
    rows = [
        one.run([(state, count)], {name: array[begin : begin + count] for name, array in given.items()})
        for state, count, begin in zip(alone, counts, borders, strict=False)
    ]
    got = one.run(list(zip(together, counts, strict=True)), given)
    assert np.array_equal(got, np.concatenate(rows))
    for a, b in zip(alone, together, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(one.state(a), one.state(b), strict=True))


def test_more_rows_than_there_is_room_for_results():
    """Decode of many long contexts goes in passes, each of as many rows as fit."""
    one = mixer("attn_mix", "tiny", "bf16")
    given = one.draw(20, 6)
    got = one.run([(one.fork(1024 + i % 3), 1) for i in range(20)], given)
    for i in (0, 7, 8, 19):
        row = one.run(
            [(one.fork(1024 + i % 3), 1)], {name: array[i : i + 1] for name, array in given.items()}
        )
        assert np.array_equal(got[i : i + 1], row)


def test_tiles_do_not_see_what_was_abandoned():
    """Positions past the last token, which a longer run that was dropped has written, are cleared."""
    one = mixer("attn_mix", "small", "bf16", flash_from="2")
    clean, used = one.fork(0), one.fork(0)
    given = one.draw(40, 2)
    poison = {name: np.full((64, array.shape[1]), np.nan, np.float32) for name, array in given.items()}
    one.run([(used, 1)], {name: array[:1] for name, array in given.items()})
    one.run([(clean, 1)], {name: array[:1] for name, array in given.items()})
    (
        one.session._set("k", poison["k"]),
        one.session._set("v", poison["v"]),
        one.session._set("qg", poison["qg"]),
    )
    one.session._run(
        "attn_mix", 3, [(used, np.zeros(63, np.int32))]
    )  # not advanced: its tokens are not taken in
    rest = {name: array[1:] for name, array in given.items()}
    assert np.array_equal(one.run([(used, 39)], rest), one.run([(clean, 39)], rest))


# Watched.


@pytest.mark.parametrize(
    ("op", "options"),
    [
        ("attn_mix", {}),
        ("attn_mix", {"gqa_packing": "0", "coalesced_kv": "0"}),
        ("attn_mix", {"flash_from": "0"}),
        ("attn_mix", {"tiles": "simdgroup"}),
        ("attn_mix", {"tiles": "tensor"}),
        ("attn_mix", {"kv": "int8"}),
        ("gdn_mix", {"gdn_scan": "registers"}),
        ("gdn_mix", {"gdn_scan": "packed"}),
        ("gdn_mix", {"gdn_scan": "chunked"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("checkpoint", ["tiny", "demo"])
def test_no_kernel_strays(checkpoint, op, options):
    """No access out of bounds, undeclared, unordered or of memory that nothing wrote."""
    one = Mixer(op, CHECKPOINTS[checkpoint], "bf16", True, options)
    state = one.session.new_state()
    for rows in (1, 3, 33, 1, 250, 1):
        assert np.isfinite(one.run([(state, rows)], one.draw(rows, 4))).all()
