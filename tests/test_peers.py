"""bench.peers: what it makes of two engines' rates, and that transformers runs where it is installed."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import peers
from bench.llama import Llama
from lily.speed import Row
from support import CHECKPOINTS

pytestmark = pytest.mark.unsanitized
TINY = CHECKPOINTS["tiny"]


def test_ratios_are_of_the_same_round() -> None:
    rows = [Row("ours", 8, (4.0, 9.0), (2.0, 2.0)), Row("theirs", 8, (2.0, 3.0), (1.0, 4.0))]
    assert list(peers.cases(rows)) == [
        ("ours, prefill@8", "tok/s", [4.0, 9.0]),
        ("ours, decode@8", "tok/s", [2.0, 2.0]),
        ("theirs, prefill@8", "tok/s", [2.0, 3.0]),
        ("ours over theirs, prefill@8", "x", [2.0, 3.0]),
        ("theirs, decode@8", "tok/s", [1.0, 4.0]),
        ("ours over theirs, decode@8", "x", [2.0, 0.5]),
    ]


def test_both_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stand:
        name, note = "stand 1.0", "of known rates"

        def __init__(self, directory: Path, device: str) -> None:
            assert (directory, device) == (TINY, "cpu")

        def trial(self, tokens: np.ndarray, steps: int) -> tuple[float, float]:
            return 1e-3, 1e-3

    monkeypatch.setattr(peers, "Transformers", Stand)
    file = tmp_path / "samples.jsonl"
    arguments = ["--lengths", "9,20", "--steps", "2", "--rounds", "2", "--record", str(file)]
    peers.main([str(TINY), *arguments])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 12
    assert all(
        line["note"] == ("" if line["case"].startswith("lily 0.1.0, ") else Stand.note) for line in lines
    )
    assert all(min(line["samples"]) > 1 for line in lines if line["unit"] == "x")
    assert "times as fast" in capsys.readouterr().out


def test_without_transformers_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit, match="transformers cannot be used: "):
        peers.main([str(TINY)])


@pytest.mark.filterwarnings("ignore")  # its own, of which every version has others
def test_transformers_takes_the_shape() -> None:
    for name in ("torch", "transformers"):
        pytest.importorskip(name, reason=f"{name} is not installed; only bench.peers needs it")
    engine = peers.Transformers(TINY, "cpu")
    assert (
        engine._model.config.num_experts
        == json.loads((TINY / "config.json").read_text())["text_config"]["num_experts"]
    )
    assert min(engine.trial(np.arange(9, dtype=np.int32), 3)) > 0


def test_llama_cpp_answers_through_its_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package need not be there: one of its name with the functions that are called takes its place."""
    (tmp_path / "llama_cpp.py").write_text(LLAMA_CPP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    peer = Llama(sys.executable, TINY / "config.json", threads=3, context=64, plain=True)
    assert peer.name == "llama.cpp (9.9, plain)"
    assert peer.note == "llama-cpp-python 9.9, SSE3 AVX"
    prefill, decode = peer.trial(np.arange(9, dtype=np.int32), 4)
    assert prefill > 0
    assert decode > 0
    peer.close()
    with pytest.raises(OSError, match=r"llama\.cpp ended with status"):
        Llama(sys.executable, tmp_path / "nowhere", threads=1, context=8, plain=False)


# Takes tokens that follow one another, three threads and weights as they are, and nothing else.
LLAMA_CPP = """
import ctypes, pathlib, types
__version__ = "9.9"
seen = []
llama_log_callback = lambda f: f
llama_log_set = lambda f, data: None
llama_backend_init = lambda: None
llama_model_default_params = llama_context_default_params = types.SimpleNamespace
llama_print_system_info = lambda: b"CPU : SSE3 = 1 | AVX = 1 | NEON = 0 | "
llama_get_memory = lambda context: seen
llama_memory_clear = lambda memory, data: memory.clear()
llama_model_get_vocab = lambda model: 16
llama_vocab_n_tokens = lambda vocab: vocab
logits = (ctypes.c_float * 16)(*range(16))
llama_get_logits_ith = lambda context, i: ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))
llama_batch_free = lambda batch: None

def llama_model_load_from_file(path, given):
    assert pathlib.Path(path.decode()).exists() and not given.use_extra_bufts and given.n_gpu_layers == 0

def llama_init_from_model(model, given):
    assert (given.n_threads, given.n_ctx) == (3, 64)

def llama_batch_init(count, embedding, sequences):
    room = {name: [None] * count for name in ("token", "pos", "n_seq_id", "logits")}
    return types.SimpleNamespace(**room, seq_id=[[None] for _ in range(count)])

def llama_decode(context, batch):
    seen.extend(batch.pos)
    assert seen == list(range(len(seen))) and (len(seen) == 9 or batch.token == [15])
    return 0
"""
