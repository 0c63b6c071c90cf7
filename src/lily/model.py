"""The model as users meet it: load a checkpoint, generate, stream, prefill, score."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, Unpack, cast

import numpy as np
from numpy.typing import NDArray

from lily.chat import Message
from lily.completion import Completion, Stream
from lily.engine import Engine
from lily.errors import ModelFilesError
from lily.files import checkpoint_folder
from lily.prefix import Prefix
from lily.progress import Report, reporter
from lily.sampling import SamplingArguments, spelled_out
from lily.tokenizer import Tokenizer

Tokens: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
Prompt: TypeAlias = str | Sequence[Message] | Tokens
"""A str is one user message; a list of dicts is a conversation; ints are token ids, taken as they are."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What was loaded, and how it runs.

    path: str.  device: str, where it runs and by which code path.
    context, vocab: int, in tokens.
    weight_bytes: int, of the tensors in use.  scratch_bytes: int, held besides weights and prefixes.
    tensors, skipped_tensors: int, in use, and passed over as parts of vision or multi-token prediction.
    fingerprint: str, equal for equal checkpoints.
    config: dict of the model's dimensions.  options: dict of str, how it was told to run.
    sampling: dict of the checkpoint's temperature, top_k and so on, as in lily.Sampling.
    stop_tokens: tuple of int, the tokens that end an answer.
    """

    path: str
    device: str
    context: int
    vocab: int
    weight_bytes: int
    scratch_bytes: int
    tensors: int
    skipped_tensors: int
    fingerprint: str
    config: dict[str, Any]
    options: dict[str, str]
    sampling: dict[str, float]
    stop_tokens: tuple[int, ...]


class Model:
    """A checkpoint, loaded. Any thread may use it; calls take turns.

    Its memory is freed by `close()`, by the end of a `with` block, or when it and its prefixes are dropped.
    """

    def __init__(self, engine: Engine) -> None:
        """Wrap what Model.load has loaded."""
        self._engine = engine

    @classmethod
    def load(cls, path: str | os.PathLike[str], **options: str | int) -> "Model":
        """Load a checkpoint.

        path: its folder, with config.json, tokenizer.json and *.safetensors; lily.DEMO is the embedded one.
        options: how to run it, threads=4 say; `lily info` lists them. LILY_THREADS=4 in the environment does
            the same for calls that don't say.
        Raises ModelFilesError for files that are missing, damaged or of another model; ValueError or
        TypeError for an option; DeviceError if the device refuses.
        """
        return cls(
            Engine(checkpoint_folder(path), {name: _option(name, value) for name, value in options.items()})
        )

    @spelled_out
    def generate(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop_tokens: Iterable[int] | None = None,
        logprobs: bool = False,
        top_logprobs: int = 0,
        **sampling: Unpack[SamplingArguments],
    ) -> Completion:
        """Write an answer and return it whole.

        prompt: str, one user message; list of messages with role and content; or token ids, as they are.
        max_tokens: int >= 1, where to cut the answer; by default, and at most, what the context has room for,
            and 32,768 if nothing is given.
        stop_tokens: token ids that end the answer, instead of the checkpoint's own; () for none.
        logprobs: whether to give each token's logprob.  top_logprobs: int >= 0, of how many of the likeliest
            tokens in its place to give theirs too.
        sampling: how tokens are drawn: temperature, top_k, top_p, min_p, repetition_penalty,
            presence_penalty, frequency_penalty, logit_bias and seed, see lily.Sampling; by default as the
            checkpoint says. temperature=0 takes the likeliest token each time. The same seed gives the same
            answer. Without one the answer differs each time, and says which seed it was.
        Raises ContextError if the prompt leaves no room, before any work; ValueError or TypeError for an
        argument; ModelFilesError if the checkpoint has no usable chat template; LilyError after close().
        """
        return self.stream(
            prompt,
            max_tokens=max_tokens,
            stop_tokens=stop_tokens,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            **sampling,
        ).completion()

    @spelled_out
    def stream(
        self,
        prompt: Prompt,
        *,
        max_tokens: int | None = None,
        stop_tokens: Iterable[int] | None = None,
        logprobs: bool = False,
        top_logprobs: int = 0,
        **sampling: Unpack[SamplingArguments],
    ) -> Stream:
        """Return an iterator that writes an answer chunk by chunk.

        Takes, and raises, what generate does. Arguments are checked here; work begins with the first chunk.
        """
        engine = self._engine
        tokens = self._encode(prompt)
        drawn_by = engine.defaults.resolve(sampling)
        return Stream(
            engine,
            engine.request(tokens, None, 0, max_tokens, drawn_by, stop_tokens, logprobs, top_logprobs),
        )

    def prefill(self, prompt: Prompt, progress: bool | Report | None = None) -> Prefix:
        """Take a prompt in and return it as a Prefix, to continue any number of times without doing so again.

        prompt: as for generate.
        progress: True for a bar on a terminal, or a function of (tokens done, tokens in all), which may raise
            to stop.
        Raises ContextError if it does not fit, before any work, and what generate raises for a prompt.
        """
        report = reporter(progress)
        tokens = self._encode(prompt)
        self._engine.check_room(len(tokens))
        return Prefix(self._engine, tuple(tokens.tolist()), self._engine.take_in(tokens, report=report))

    def logits(self, tokens: Tokens, progress: bool | Report | None = None) -> NDArray[np.float32]:
        """Score a text: return (T, vocab) float32, row t the logits of what follows tokens[: t + 1].

        tokens: T token ids, as model.tokenizer.encode makes them.  progress: as for prefill.
        Raises ContextError if they do not fit, TypeError or ValueError if they are no token ids.
        """
        if isinstance(tokens, str):
            raise TypeError("tokens: wanted token ids, got a str; pass model.tokenizer.encode(text)")
        report = reporter(progress)
        session = self._engine.session
        ids = self._engine.tokens("tokens", tokens)
        self._engine.check_room(len(ids))
        return session.logits(session.new_state(), ids, report)

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer."""
        return self._engine.tokenizer

    @property
    def info(self) -> ModelInfo:
        """Sizes, device and settings. Raises LilyError after close()."""
        engine, session = self._engine, self._engine.session
        return ModelInfo(
            path=str(engine.folder),
            device=session.device,
            context=engine.context,
            vocab=engine.vocab,
            weight_bytes=engine.weight_bytes,
            scratch_bytes=session.scratch_bytes,
            tensors=engine.tensors,
            skipped_tensors=engine.skipped_tensors,
            fingerprint=engine.fingerprint,
            config=dict(engine.config),
            options=session.options,
            sampling=engine.defaults.numbers(),
            stop_tokens=tuple(sorted(engine.tokenizer.stop)),
        )

    def close(self) -> None:
        """Free the weights. What runs in other threads ends with LilyError; closing twice does nothing."""
        self._engine.close()

    def __enter__(self) -> "Model":
        """Return itself; leaving the block closes it."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        """Show what it is and where it runs."""
        engine = self._engine
        if engine.closed:
            return f"<lily.Model {engine.folder.name}: closed>"
        size = engine.weight_bytes / 1e9
        return f"<lily.Model {engine.folder.name}: {size:.2f} GB on {engine.session.device}>"

    def _encode(self, prompt: Prompt) -> NDArray[np.int32]:
        """Return a prompt's (n,) int32 token ids."""
        engine = self._engine
        _ = engine.session  # a closed model says so before it looks at the prompt
        if isinstance(prompt, str):
            return self._encode([{"role": "user", "content": prompt}])
        if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Sequence | np.ndarray):
            raise TypeError(
                f"prompt: wanted a str, a list of messages or token ids, got {type(prompt).__name__}"
            )
        if isinstance(prompt, np.ndarray) or not any(isinstance(item, Mapping) for item in prompt):
            return engine.tokens("prompt", cast(Tokens, prompt))
        if engine.template is None:
            raise ModelFilesError(
                f"{engine.folder}: no chat_template.jinja, and no chat_template in tokenizer_config.json; "
                "fetch it, or pass token ids: model.tokenizer.encode(text)"
            )
        return engine.tokens(
            "prompt", engine.template.encode(cast(Sequence[Message], prompt), engine.tokenizer)
        )


def _option(name: str, value: object) -> str:
    """Return an option's value as the core reads it."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise TypeError(f"option {name}: wanted a str or an int, got {value!r}")
    return str(value)
