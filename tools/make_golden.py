"""Record what mlx-lm computes in float32, for tests/golden: the vectors that reference.py is checked against.

    python tools/make_golden.py random tests/checkpoints/tiny tests/golden/tiny.npz --every 3
    python tools/make_golden.py text DEMO_CHECKPOINT tests/golden/demo.npz --text tests/golden/heldout.txt

Every floating tensor (scales, biases, norms, convolutions) is widened to float32 first, which is exact: in
bfloat16 mlx-lm's CPU path accumulates in bfloat16 and errs by percents. Needs mlx, mlx-lm and tokenizers.
"""

import argparse
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

PROMPT = "<|im_start|>user\nWhere is the library?<|im_end|>\n<|im_start|>assistant\n<think>\n"
CONTINUED = 16  # greedy tokens after the prompt
RANDOM = 70  # tokens of the random sequence: more than one block of 64
WINDOWS, WINDOW = 2, 2560  # of the text: together more than 4,096 positions, each within the demo's context
SHOWN = 24  # positions of the text whose logits are kept whole


def load_float32(directory: Path) -> Any:
    """Load a checkpoint with mlx-lm, its integers as they are and everything else in float32."""
    model, _ = load_model(directory)
    widened = tree_map(
        lambda a: a.astype(mx.float32) if mx.issubdtype(a.dtype, mx.floating) else a, model.parameters()
    )
    model.update(widened)
    mx.eval(model.parameters())
    return model


def teacher_forced(model: Any, tokens: list[int]) -> tuple[np.ndarray, list[Any]]:
    """Return the logits (T, V) after each token, in one pass, and the caches it leaves."""
    caches = make_prompt_cache(model)
    logits = model(mx.array(tokens)[None], cache=caches)
    mx.eval(logits, [cache.state for cache in caches])
    assert logits.dtype == mx.float32
    return np.array(logits)[0], caches


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    """Return the `count` tokens that follow, the best one each time."""
    caches, new, out = make_prompt_cache(model), tokens, []
    for _ in range(count):
        logits = model(mx.array(new)[None], cache=caches)
        out.append(int(mx.argmax(logits[0, -1])))
        new = out[-1:]
    return out


def states(caches: list[Any], every: int) -> dict[str, np.ndarray]:
    """Return each layer's two state arrays as reference.py orders them, flat, one element in `every`."""
    found = {}
    for layer, cache in enumerate(caches):
        attention = hasattr(cache, "keys")
        pair = (cache.keys, cache.values) if attention else (cache[0], cache[1])
        for part, array in enumerate(pair):
            whole = np.array(array[0, :, : cache.offset] if attention else array[0])
            found[f"state_{layer}_{part}"] = whole.reshape(-1)[::every]
    return found


def record_random(model: Any, directory: Path, every: int) -> dict[str, np.ndarray]:
    """Record a prompt with its greedy continuation, and random tokens with the states they leave."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompt = tokenizer.encode(PROMPT).ids
    chat = prompt + greedy(model, prompt, CONTINUED)
    vocab = teacher_forced(model, prompt[:1])[0].shape[-1]
    random = np.random.default_rng(36).integers(0, vocab, RANDOM).tolist()
    random_logits, caches = teacher_forced(model, random)
    return {
        "prompt_length": np.array(len(prompt)),
        "chat_tokens": np.array(chat, np.int32),
        "chat_logits": teacher_forced(model, chat)[0],
        "random_tokens": np.array(random, np.int32),
        "random_logits": random_logits,
        "every": np.array(every),
        **states(caches, every),
    }


def record_text(model: Any, directory: Path, text: str) -> dict[str, np.ndarray]:
    """Record windows of a text whose documents are joined as in training, each ended by <|endoftext|>."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    documents = [part.strip() for part in text.split("<|endoftext|>") if part.strip()]
    stream = [token for part in documents for token in [*tokenizer.encode(part).ids, end]]
    windows = np.array(stream[: WINDOWS * WINDOW], np.int32).reshape(WINDOWS, WINDOW)
    shown = np.sort(np.random.default_rng(36).choice(WINDOWS * WINDOW, SHOWN, replace=False))
    best, target, kept = [], [], []
    for tokens in windows:
        logits, _ = teacher_forced(model, tokens.tolist())
        best.append(logits.argmax(-1).astype(np.int32))
        wide = logits.astype(np.float64)
        total = wide.max(-1) + np.log(np.exp(wide - wide.max(-1, keepdims=True)).sum(-1))
        target.append(wide[np.arange(WINDOW - 1), tokens[1:]] - total[:-1])
        kept.append(logits)
    return {
        "tokens": windows,
        "top1": np.stack(best),
        "target_log_probability": np.stack(target),
        "shown": shown,
        "shown_logits": np.concatenate(kept)[shown],
    }


def main() -> None:
    """Record one file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kind", choices=["random", "text"])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--every", type=int, default=1, help="keep one element of the states in so many")
    parser.add_argument("--text", type=Path, help="the text to record, UTF-8")
    arguments = parser.parse_args()
    model = load_float32(arguments.checkpoint)
    if arguments.kind == "random":
        record = record_random(model, arguments.checkpoint, arguments.every)
    else:
        record = record_text(model, arguments.checkpoint, arguments.text.read_text(encoding="utf-8"))
    np.savez_compressed(arguments.out, **record)
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
