"""The model as users meet it: load a checkpoint, generate, stream, prefill, score."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack, cast, get_args

import numpy as np
from numpy.typing import NDArray

from lily.asynchronous import AsyncStream
from lily.cache import CacheStats
from lily.completion import Completion, Stream
from lily.engine import Capacity, Engine
from lily.errors import ModelFilesError
from lily.files import checkpoint_folder
from lily.messages import Message, check_tools
from lily.prefix import Prefix, take_in
from lily.progress import Report, reporter
from lily.sampling import integer
from lily.scheduler import QueueStats
from lily.settings import Generation, Rendering, Reuse, Settings, check_names, of, spelled_out
from lily.tokenizer import Tokenizer

if TYPE_CHECKING:
    from lily.server import Server

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
    sampling: dict of the checkpoint's own numbers, see lily.Sampling.
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
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        download: bool = False,
        revision: str | None = None,
        progress: bool = True,
        cache_bytes: int | None = None,
        memory_bytes: int | None = None,
        max_active: int = 8,
        max_waiting: int = 64,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_dir_bytes: int = 16 << 30,
        **options: str | int,
    ) -> "Model":
        """Load a checkpoint.

        path: its folder, with config.json, tokenizer.json and *.safetensors; or its id on the Hugging Face
            hub, "org/name", which is looked up in the hub's cache on this machine, without the network;
            lily.DEMO is the embedded one.
        download: whether to fetch an id's files if the cache lacks some of them.
        revision: the branch, tag or commit of an id; by default "main".
        progress: whether a download draws bars, on a terminal or in a notebook.
        cache_bytes: int, the most that the states of earlier prompts and answers may take, which later ones
            begin with; 0 keeps none. By default a quarter of memory_bytes.
        memory_bytes: int, the most that all states may take, prefixes and the cache among them. By default
            nine tenths of the machine's memory, or of the control group's, less weights and scratch.
        max_active: int, requests that take part at once.  max_waiting: int, that wait behind them.
        cache_dir: folder in which the cache saves what it has no room for, and what it holds at close(), so
            that it outlives the process; by default nothing is saved.
        cache_dir_bytes: int, the most that the files in it may take.
        options: how to run it, threads=4 say; `lily info` lists them. LILY_THREADS=4 in the environment does
            the same for calls that don't say.
        Raises ModelFilesError for files that are missing, damaged or of another model, with the command that
        fetches them; ValueError or TypeError for an option; DeviceError if the device refuses;
        MemoryLimitError if the machine is too small for a prompt.
        """
        capacity = Capacity(cache_bytes, memory_bytes, max_active, max_waiting, cache_dir, cache_dir_bytes)
        folder = checkpoint_folder(path, revision=revision, download=download, progress=progress)
        return cls(Engine(folder, {name: _option(name, value) for name, value in options.items()}, capacity))

    @spelled_out
    def generate(self, prompt: Prompt, **settings: Unpack[Settings]) -> Completion:
        """Write an answer and return it whole.

        prompt: str, one user message; list of messages with role and content, as OpenAI's API has them; or
            token ids, as they are.
        max_tokens: int >= 1, where to cut the answer; by default, and at most, what the context has room for,
            and 32,768 if nothing is given.
        temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias,
            seed: how tokens are drawn, see lily.Sampling; by default as the checkpoint says. temperature=0
                takes the likeliest token each time. The same seed gives the same answer. Without one the
                answer differs each time, and says which seed it was.
        logprobs: whether to give each token's logprob.  top_logprobs: int >= 0, of how many of the likeliest
            tokens in its place to give theirs too.
        stop: str or several, where the answer's text ends, without it. Thoughts are not searched.
        stop_tokens: token ids that end the answer, instead of the checkpoint's own; () for none.
        timeout: float, seconds from the beginning of the work to its end, with the wait for other requests.
        reuse: "auto" to begin with what earlier requests have taken in, and to take earlier answers' own
            tokens for their text; "strict" for the former alone; "off" for neither.
        progress: True for a bar while the prompt is taken in, on a terminal or in a notebook; or a function
            of (tokens done, tokens in all), which may raise to stop.
        tools: list of {"type": "function", "function": {"name", "description", "parameters"}}; the answer's
            calls are its tool_calls.
        tool_choice: "auto", by default; "none" leaves the tools out; "required", or {"type": "function",
            "function": {"name": ...}}, has the answer be a call.
        parallel_tool_calls: False to end the answer with its first call.
        schema: a JSON schema, as a dict or as a class of pydantic's, that the text then is an instance of.
        regex, grammar: str, a regular expression or a grammar in Lark's notation that the text follows.
            These three, and calls that must be made, need llguidance. Thoughts are free of them.
        thinking_budget: int >= 0, after how many tokens thoughts are ended.

        For a str and for messages only:
        tools, as above: the template writes them into the prompt.
        thinking: bool, whether the model thinks first; by default as the template has it.
        preserve_thinking: bool, whether earlier answers keep their thoughts in the prompt, so that it only
            grows from turn to turn; True by default.
        template_kwargs: dict, what else the template may read.
        continue_final_message: True to go on with the last message, the assistant's, instead of answering.
            What is returned does not repeat it.
        add_generation_prompt: False to leave out the beginning of the assistant's answer.

        Raises ContextError if the prompt leaves no room, before any work; ValueError or TypeError for an
        argument; ModelFilesError if the checkpoint has no usable chat template; LilyError after close();
        MemoryLimitError if there is no memory for it, QueueFullError if too many wait already, DeadlineError
        when the timeout is over.
        """
        return self.stream(prompt, **settings).completion()

    @spelled_out
    def stream(self, prompt: Prompt, **settings: Unpack[Settings]) -> Stream:
        """Return an iterator that writes an answer chunk by chunk.

        Takes, and raises, what generate does. Arguments are checked here; work begins with the first chunk.
        """
        check_names(settings, Settings)
        report = reporter(settings.get("progress"))
        engine = self._engine
        tokens, spliced = self._prompt(prompt, settings)
        reuse = settings.get("reuse", "auto")
        generation = of(Generation, settings)
        return Stream(
            engine, engine.request(tokens, (), None, generation, report, reuse=reuse, spliced_tokens=spliced)
        )

    @spelled_out
    async def agenerate(self, prompt: Prompt, **settings: Unpack[Settings]) -> Completion:
        """Write an answer and return it whole, without keeping the event loop waiting.

        Takes, and raises, what generate does. Cancelling it ends the work with the token, or the part of the
        prompt, that it is at.
        """
        return await self.astream(prompt, **settings).completion()

    @spelled_out
    def astream(self, prompt: Prompt, **settings: Unpack[Settings]) -> AsyncStream:
        """Return an asynchronous iterator that writes an answer chunk by chunk, in a thread of its own.

        Takes, and raises, what generate does, the latter with the first chunk.
        """
        return AsyncStream(lambda: self.stream(prompt, **settings))

    @spelled_out
    def encode(self, prompt: Prompt, **rendering: Unpack[Rendering]) -> list[int]:
        """Return the token ids of a prompt, which are what generate takes in.

        Takes, and raises, what generate does for prompts; not what concerns the answer.
        """
        check_names(rendering, Rendering)
        return list(map(int, self._encode(prompt, rendering)))

    @spelled_out
    def prefill(
        self,
        prompt: Prompt,
        *,
        checkpoints: Sequence[int] = (),
        progress: bool | Report | None = None,
        **rendering: Unpack[Rendering],
    ) -> Prefix:
        """Take a prompt in and return it as a Prefix, to continue any number of times without doing so again.

        Takes, and raises, what encode does.
        checkpoints: lengths, in tokens, at which to keep the recurrent states beside those on the token grid,
            so that rollback, and what else goes on from there, takes few tokens in anew. Where the device
            sums in blocks of positions each is moved to the border of a block at or before it.
        progress: as for generate.
        Raises ContextError if it does not fit, before any work; TypeError or ValueError for a checkpoint.
        """
        report = reporter(progress)
        check_names(rendering, Rendering)
        tokens = self._encode(prompt, rendering, self._engine.context)
        self._engine.check_room(len(tokens))
        grid = self._engine.session.grid
        if not isinstance(checkpoints, Iterable):
            raise TypeError(f"checkpoints: wanted lengths, got {type(checkpoints).__name__}")
        pinned = {integer("checkpoints", n, 1, self._engine.context + 1) // grid * grid for n in checkpoints}
        return take_in(self._engine, tuple(tokens.tolist()), (), frozenset(pinned), report)

    def load_prefix(self, path: str | os.PathLike[str]) -> Prefix:
        """Restore a prefix that Prefix.save wrote; the tokens are not taken in again.

        path: of the file. On a CPU its keys and values stay in it, mapped, and must not be changed there as
            long as the prefix, or what was made from it, lives. Another may take its name.
        Raises PrefixFileError if it can't be read or is damaged, PrefixMismatchError if it was saved by other
        weights, with another tokenizer, on another kind of device or by another code path, which differ in
        the last bits, with another type of keys and values or by another version; LilyError after close().
        """
        from lily import saved

        loaded = saved.read(path, self._engine)
        return Prefix(self._engine, loaded.tokens, loaded.states[-1], loaded.states[:-1], loaded.pinned)

    def serve(self, *, background: bool = False, **settings: Any) -> "Server | None":
        """Answer over HTTP, as OpenAI's and Anthropic's servers do, until Ctrl-C.

        background: True to serve in a thread and return at once; the server that comes back has a url and
            stop(), which the end of a `with` block calls too.
        settings: host, port, api_key and others, which docs/server.md lists. Port 0 takes a free one.
        Raises ValueError or TypeError for a setting, an address others can reach without a key among them;
            OSError if the port is taken; LilyError without the packages of the extra `server`.
        """
        from lily.server import Server

        server = Server(self, **settings)
        if background:
            return server.start()
        server.run()
        return None

    def logits(self, tokens: Tokens, progress: bool | Report | None = None) -> NDArray[np.float32]:
        """Score a text: return (T, vocab) float32, row t the logits of what follows tokens[: t + 1].

        tokens: T token ids, as model.tokenizer.encode makes them.  progress: as for generate.
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

    def cache_stats(self) -> CacheStats:
        """Return what the cache of earlier prompts and answers holds. Raises LilyError after close()."""
        _ = self._engine.session
        return self._engine.cache_stats()

    def queue_stats(self) -> QueueStats:
        """Return which requests there are, and their memory. Raises LilyError after close()."""
        _ = self._engine.session
        return self._engine.scheduler.stats()

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
            return f"<lily.Model {engine.name}: closed>"
        size = engine.weight_bytes / 1e9
        return f"<lily.Model {engine.name}: {size:.2f} GB on {engine.session.device}>"

    def _prompt(
        self, prompt: Prompt, settings: Settings, *, whole: bool = False
    ) -> tuple[NDArray[np.int32], int]:
        """Return the (n,) int32 token ids that an answer's prompt has, and how many of them are spliced in.

        whole: whether to return them also if they do not fit the context.
        """
        engine = self._engine
        reuse = settings.get("reuse", "auto")
        if reuse not in get_args(Reuse):
            raise ValueError(f"reuse: wanted one of {', '.join(get_args(Reuse))}, got {reuse!r}")
        rendering = of(Rendering, settings)
        if settings.get("tool_choice") == "none":
            rendering.pop("tools", None)
        tokens = self._encode(prompt, rendering, None if whole else engine.context)
        if reuse == "auto" and _is_rendered(prompt):
            return engine.splices.splice(tokens, check_tools(rendering.get("tools") or ()))
        return tokens, 0

    def _encode(self, prompt: Prompt, rendering: Rendering, most: int | None = None) -> NDArray[np.int32]:
        """Return a prompt's (n,) int32 token ids; ContextError if they are surely more than `most`."""
        engine = self._engine
        _ = engine.session  # a closed model says so before it looks at the prompt
        if isinstance(prompt, str):
            return self._encode([{"role": "user", "content": prompt}], rendering, most)
        if isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Sequence | np.ndarray):
            raise TypeError(
                f"prompt: wanted a str, a list of messages or token ids, got {type(prompt).__name__}"
            )
        if len(prompt) == 0:
            raise ValueError("prompt: wanted a str, at least one message or one token id, got an empty list")
        if not _is_rendered(prompt):
            if rendering:
                raise ValueError(f"{next(iter(rendering))}: wanted messages to render, got token ids")
            return engine.tokens("prompt", cast(Tokens, prompt))
        if engine.template is None:
            raise ModelFilesError(
                f"{engine.folder}: no chat_template.jinja, and no chat_template in tokenizer_config.json; "
                "fetch it, or pass token ids: model.tokenizer.encode(text)"
            )
        messages = cast(Sequence[Message], prompt)
        return engine.tokens(
            "prompt", engine.template.encode(messages, engine.tokenizer, most=most, **rendering)
        )


def _is_rendered(prompt: Prompt) -> bool:
    """Return whether the chat template makes the prompt; if not, it is token ids."""
    if isinstance(prompt, np.ndarray):
        return False
    return isinstance(prompt, str) or any(isinstance(item, Mapping) for item in prompt)


def _option(name: str, value: object) -> str:
    """Return an option's value as the core reads it."""
    if not isinstance(value, str | Integral):  # bool and NumPy's whole numbers are among these
        raise TypeError(f"option {name}: wanted a str, an int or a bool, got {value!r}")
    text = str(value)
    if not (name.isascii() and text.isascii()):
        raise ValueError(f"option {name!r}: wanted ASCII text, got {text!r}; `lily info` lists the options")
    return text
