"""Lily beside transformers or llama.cpp, by turns, on the same shape and the same tokens.

    python -m bench.peers DIRECTORY [--option device=cuda --option kernels=FILE ...] [--torch-device cuda]
                          [--lengths 512,2K,4K] [--steps 32] [--rounds 3] [--record [FILE]]
                          [--llama FILE.gguf --llama-python VENV/bin/python [--threads 2]]

With --llama the peers are two of llama.cpp, its weights repacked and not, on a file of the same shape and as
many bits. Otherwise the peer is transformers:

transformers cannot read MLX's files, so it gets the shape of DIRECTORY's config.json with random weights of
its own, in bfloat16: four times the bytes of the 4-bit checkpoint. Routing is then even, whatever the
checkpoint's is. It runs as it comes, without compilation; which kernels it found is in the record's note.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import lily
from bench import record, run
from bench.llama import Llama
from bench.speed import about, lengths, option
from lily import _core, speed

FASTER = (
    "fla",
    "causal_conv1d",
    "flash_attn",
    "kernels",
)  # packages that transformers uses if they are there


class Transformers:
    """The same architecture in transformers, with random weights."""

    def __init__(self, directory: Path, device: str) -> None:
        """Make a model of the shape in a folder's config.json.

        device: torch's. Raises ImportError without torch and a transformers that has the architecture.
        """
        import torch
        import transformers

        text = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        config = transformers.Qwen3_5MoeTextConfig(**text.get("text_config", text))
        self._torch: Any = torch
        self._device = device
        self.name = f"transformers {transformers.__version__}"
        self.note = f"torch {torch.__version__} bfloat16 on {device}, random weights of the same shape, with "
        self.note += ", ".join(name for name in FASTER if find_spec(name)) or "torch's own kernels"
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(device):
                self._model: Any = transformers.Qwen3_5MoeForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)

    def trial(self, tokens: speed.Tokens, steps: int) -> tuple[float, float]:
        """Take tokens in and write `steps` greedily; return tokens per second of either."""
        with self._torch.inference_mode():
            ids = self._torch.tensor(tokens[None].tolist(), device=self._device)
            started = time.perf_counter()
            token, cache = self._step(ids, None)
            first = time.perf_counter()
            token, cache = self._step(token, cache)  # as one of Lily's, not counted
            second = time.perf_counter()
            for _ in range(steps):
                token, cache = self._step(token, cache)
            ended = time.perf_counter()
        return len(tokens) / (first - started), steps / (ended - second)

    def _step(self, ids: Any, cache: Any) -> tuple[Any, Any]:
        out = self._model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(-1)
        token.item()  # whoever writes text needs it
        return token, out.past_key_values


def cases(rows: Sequence[speed.Row]) -> Iterator[tuple[str, str, list[float]]]:
    """Yield (case, unit, samples) of every row, and how many times faster the first engine is, by rounds."""
    first = {row.length: row for row in rows if row.engine == rows[0].engine}
    for row in rows:
        for phase in ("prefill", "decode"):
            rates = list(getattr(row, phase))
            yield f"{row.engine}, {phase}@{row.length}", "tok/s", rates
            if row is not first[row.length]:
                mine = getattr(first[row.length], phase)
                ratios = [a / b for a, b in zip(mine, rates, strict=True)]
                yield f"{first[row.length].engine} over {row.engine}, {phase}@{row.length}", "x", ratios


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--lengths", type=lengths, default=[512, 2048, 4096], help="with commas between")
    parser.add_argument("--steps", type=int, default=32, help="tokens to write after each")
    parser.add_argument("--rounds", type=int, default=3, help="samples of each case")
    parser.add_argument("--torch-device", default="cpu", help="where torch runs: cpu, cuda")
    parser.add_argument("--option", type=option, action="append", default=[], help="of Lily, NAME=VALUE")
    parser.add_argument("--llama", type=Path, metavar="FILE", help="the same shape as GGUF, for llama.cpp")
    parser.add_argument("--llama-python", default=sys.executable, help="that has llama-cpp-python")
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp")
    record.add_option(parser)
    given = parser.parse_args(arguments)
    if given.steps < 1 or given.rounds < 1 or not given.lengths:
        parser.error("wanted at least one step, one round and one length")
    peers: list[Transformers | Llama] = []
    try:
        if given.llama:
            context = max(given.lengths) + given.steps + 64
            for plain in (False, True):
                peers.append(Llama(given.llama_python, given.llama, given.threads, context, plain))
        else:
            peers.append(Transformers(given.directory, given.torch_device))
    except (ImportError, AttributeError) as error:
        raise SystemExit(f"transformers cannot be used: {error}") from error

    weights = _core.Weights(str(given.directory))
    session = _core.Session(weights, dict(given.option))
    runners: list[speed.Runner] = [speed.Lily(session, lily.__version__), *peers]
    facts = about(given.directory, session, dict(given.option))
    notes = {peer.name: peer.note for peer in peers}
    print(f"{given.directory}: {facts}; {notes}")
    keep = partial(record.keep, given.record, bench="peers", options=facts, device=session.device)
    rows = speed.sweep(runners, given.lengths, weights.config["vocab"], given.steps, given.rounds)
    for case, unit, samples in cases(rows):
        keep(case, unit, samples, next((note for name, note in notes.items() if name in case), ""))
    for peer in peers:
        if isinstance(peer, Llama):
            peer.close()
    ratios = [statistics.median(samples) for _, unit, samples in cases(rows) if unit == "x"]
    print(f"Lily is {min(ratios):.3g} to {max(ratios):.3g} times as fast")


if __name__ == "__main__":
    run(main)
