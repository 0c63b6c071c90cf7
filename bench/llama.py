"""llama.cpp as bench.peers runs it: in a process of its own, by the Python that has llama-cpp-python.

    python bench/llama.py FILE.gguf [--threads 2] [--context 4096] [--batch 2048] [--plain]

Started so, it reads {"tokens": [...], "steps": N} a line and answers each with tokens per second,
{"prefill": ..., "decode": ...}. --plain leaves weights in the file's order, which llama.cpp takes prompts in
faster by; without it they are repacked, which it writes faster by. Imports nothing of Lily.
"""

import argparse
import ctypes
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Llama:
    """llama.cpp behind a pipe. name: with its package's version and how it keeps weights."""

    def __init__(self, python: str, file: Path, threads: int, context: int, plain: bool) -> None:
        """Start it and wait until the model is loaded. Raises OSError if it does not start."""
        given = ["--threads", str(threads), "--context", str(context), *(["--plain"] if plain else [])]
        self._process = subprocess.Popen(
            [python, __file__, str(file), *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        about = self._read()
        self.name = f"llama.cpp ({about['version']}{', plain' if plain else ', repacked'})"
        self.note = f"llama-cpp-python {about['version']}, {about['system']}"

    def trial(self, tokens: Any, steps: int) -> tuple[float, float]:
        """Take tokens in and write `steps` greedily; return tokens per second of either."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps({"tokens": [int(t) for t in tokens], "steps": steps}) + "\n")
        self._process.stdin.flush()
        rates = self._read()
        return rates["prefill"], rates["decode"]

    def close(self) -> None:
        """End the process."""
        with self._process:  # closes the pipes, and waits
            pass

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise OSError(f"llama.cpp ended with status {self._process.returncode}")
        answer: dict[str, Any] = json.loads(line)
        return answer


class _Engine:
    """A model and a context of llama.cpp's C interface."""

    def __init__(self, library: Any, given: argparse.Namespace) -> None:
        self._library = library
        self._silent = library.llama_log_callback(lambda _level, _text, _data: None)
        library.llama_log_set(self._silent, ctypes.c_void_p(0))
        library.llama_backend_init()
        of_model = library.llama_model_default_params()
        of_model.n_gpu_layers = 0
        of_model.use_extra_bufts = not given.plain
        model = library.llama_model_load_from_file(str(given.file).encode(), of_model)
        of_context = library.llama_context_default_params()
        of_context.n_ctx = given.context
        of_context.n_batch = of_context.n_ubatch = self._most = given.batch
        of_context.n_threads = of_context.n_threads_batch = given.threads
        self._context = library.llama_init_from_model(model, of_context)
        self._vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(model))

    def trial(self, tokens: Sequence[int], steps: int) -> dict[str, float]:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), True)
        started = time.perf_counter()
        for first in range(0, len(tokens), self._most):
            token = self._take(tokens[first : first + self._most], first)
        read = time.perf_counter()
        token = self._take([token], len(tokens))  # as one of Lily's, not counted
        begun = time.perf_counter()
        for step in range(steps):
            token = self._take([token], len(tokens) + 1 + step)
        ended = time.perf_counter()
        return {"prefill": len(tokens) / (read - started), "decode": steps / (ended - begun)}

    def _take(self, tokens: Sequence[int], position: int) -> int:
        """Take tokens in at a position; return the best next one."""
        import numpy as np

        batch = self._library.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position + i
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            batch.logits[i] = i + 1 == len(tokens)
        status = self._library.llama_decode(self._context, batch)
        self._library.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode: {status}")
        logits = self._library.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab,)).argmax())


def main() -> None:
    """Answer lines until there are none."""
    import llama_cpp

    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--plain", action="store_true")
    engine = _Engine(llama_cpp, parser.parse_args())
    flags = llama_cpp.llama_print_system_info().decode()
    present = " ".join(
        part.split("=")[0].strip() for part in flags.split("|") if part.strip().endswith("= 1")
    )
    print(
        json.dumps({"version": llama_cpp.__version__, "system": present.removeprefix("CPU : ")}), flush=True
    )
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(engine.trial(asked["tokens"], asked["steps"])), flush=True)


if __name__ == "__main__":
    main()
