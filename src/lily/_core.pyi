from collections.abc import Callable, Mapping, Sequence
import os
from typing import Annotated, Any

import numpy
import numpy.typing
from numpy.typing import NDArray


class Weights:
    """A checkpoint's files, checked and mapped."""

    def __init__(self, directory: str | os.PathLike[str]) -> None: ...

    @property
    def config(self) -> dict[str, Any]:
        """The model's dimensions."""

    @property
    def nbytes(self) -> int:
        """Bytes of the bound tensors."""

    @property
    def tensors(self) -> int:
        """How many are bound."""

    @property
    def skipped(self) -> int:
        """Vision and multi-token-prediction tensors, not read."""

    @property
    def warnings(self) -> list[str]: ...

    @property
    def fingerprint(self) -> str:
        """Equal for equal checkpoints, however sharded."""

    def tensor_table(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Name, type and shape of every bound tensor, under the core's names."""

    def tensor_bytes(self, name: str) -> bytes:
        """A copy of one bound tensor's bytes."""

class Sampling:
    """What tokens are drawn by; by default, the best each time."""

    def __init__(self, *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, repetition_penalty: float = 1.0, presence_penalty: float = 0.0, frequency_penalty: float = 0.0, logit_bias: Mapping[int, float] = {}, seed: int = 0) -> None: ...

class History:
    """The tokens of an answer so far, counted for the penalties."""

    def __init__(self) -> None: ...

    def add(self, token: int) -> None:
        """Count a token once more; Session.step does so by itself."""

    @property
    def counts(self) -> dict[int, int]:
        """How often each token is there."""

class Traffic:
    """What a dispatch asks of a stretch of memory: declared, and as seen."""

    @property
    def bytes(self) -> int:
        """Bound."""

    @property
    def reads(self) -> int:
        """Declared: bytes of these that it reads, each counted once."""

    @property
    def writes(self) -> int:
        """Declared: bytes that it writes."""

    @property
    def read_lines(self) -> int:
        """Seen: distinct lines of 64 bytes that it read."""

    @property
    def written_lines(self) -> int:
        """Seen: such lines that it wrote."""

    @property
    def asked_read(self) -> int:
        """Seen: bytes that all threads together asked for."""

    @property
    def asked_written(self) -> int:
        """Seen: bytes that all threads together gave."""

    @property
    def accesses(self) -> int:
        """Seen: accesses of SIMD-groups."""

    @property
    def sectors(self) -> int:
        """Seen: sectors of 32 bytes, each counted once an access."""

    @property
    def lines(self) -> int:
        """Seen: lines of 128 bytes, each counted once an access."""

class Dispatch:
    """One launch of a GPU kernel."""

    @property
    def kernel(self) -> str: ...

    @property
    def op(self) -> str:
        """The step of the model that it belongs to."""

    @property
    def stage(self) -> int:
        """Barriers before it."""

    @property
    def groups(self) -> int:
        """Threadgroups."""

    @property
    def threads(self) -> int:
        """Of a threadgroup."""

    @property
    def memory(self) -> list[Traffic]:
        """In the order of its declarations."""

class State:
    """Everything one sequence leaves behind after its tokens."""

    @property
    def length(self) -> int:
        """Tokens taken in so far."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory this state refers to, shared with forks or not."""

    def fork(self) -> State:
        """
        A copy that shares memory until one of the two is extended; of a state that nobody is extending.
        """

    @property
    def has_logits(self) -> bool:
        """Whether the logits of the last token are at hand."""

def bytes_of(states: Sequence[State]) -> int:
    """
    Bytes of memory that some states refer to together: what they share counts once.
    """

class Session:
    """A checkpoint on a device, and the loops that drive it."""

    def __init__(self, weights: Weights, options: Mapping[str, str], notice: Callable[[str], object] | None = None) -> None:
        """notice: called with a sentence for what takes long, before it is done."""

    @property
    def device(self) -> str:
        """The backend and its code path."""

    @property
    def threads(self) -> int:
        """Threads that share the work."""

    @property
    def packed_bytes(self) -> int:
        """
        Bytes of matrices that are kept in another order than the files'; 0 where they are used in place.
        """

    @property
    def scratch_bytes(self) -> int:
        """
        Bytes allocated besides weights and states; fixed when the session is made.
        """

    @property
    def room(self) -> int | None:
        """
        Bytes that the device's memory has left for states; None if it does not say.
        """

    @property
    def options(self) -> dict[str, str]:
        """The options in force."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of the states that are kept, each block of memory once."""

    def cost(self, state: State) -> int:
        """Bytes by which keeping a state would add to kept_bytes."""

    def keep(self, state: State, budget: int) -> bool:
        """
        Count a state among those that are kept; False, and nothing done, if they would take up more than the budget.
        """

    def let_go(self, state: State) -> None:
        """Undo keep."""

    def new_state(self) -> State: ...

    def fork(self, state: State) -> State:
        """A copy that shares memory until one of the two is extended."""

    def extend(self, state: State, tokens: numpy.typing.NDArray[numpy.int32], progress: Callable[[int, int], None] | None = None, interrupt: Callable[[], None] | None = None, checkpoints: Sequence[int] = (), end: int = 0) -> list[State]:
        """
        Take tokens in; the state then holds the last one's logits. Returns the states at the positions that checkpoints names. end: where the prompt ends, if these are not its last tokens; then there are no logits. progress is called between chunks, interrupt every 50 ms or so; what they raise ends the work.
        """

    @property
    def grid(self) -> int:
        """
        A prompt cut at multiples of it gets the bits of the prompt in one piece.
        """

    def resumes(self, position: int, end: int) -> bool:
        """
        Whether a prompt of `end` tokens that goes on from a checkpoint gets the bits that it has in one piece.
        """

    @property
    def state_order(self) -> str:
        """
        Names how states are laid out; those of another order can't be restored.
        """

    @property
    def state_sizes(self) -> tuple[int, int, int]:
        """
        Bytes of a page of 256 positions, of a copy of the recurrent states, and of logits.
        """

    @property
    def state_bytes(self) -> int:
        """
        Bytes of all its states that are alive, without what lies in mapped files.
        """

    @property
    def state_peak(self) -> int:
        """The most that state_bytes has been since reset_state_peak()."""

    def reset_state_peak(self) -> None: ...

    @property
    def state_limit(self) -> int:
        """
        The most that state_bytes may be, or 0: what would need more raises MemoryLimitError.
        """

    @state_limit.setter
    def state_limit(self, arg: int, /) -> None: ...

    def parts(self, state: State) -> tuple[list[numpy.typing.NDArray[numpy.uint8]], numpy.typing.NDArray[numpy.uint8], numpy.typing.NDArray[numpy.uint8] | None]:
        """
        A state's memory as bytes that no other state writes: pages, recurrent states, logits or None.
        """

    def restore(self, file: int, nbytes: int, pages: int, states: Sequence[tuple[int, int, int]]) -> list[State]:
        """
        Map a file by its descriptor and return the states that lie in it: pages from a byte on; for each state its length, and the bytes where its recurrent states and logits begin, -1 for none.
        """

    def sample(self, state: State, sampling: Sampling, history: History | None = None, allowed: numpy.typing.NDArray[numpy.uint32] | None = None) -> int:
        """
        Draw the token that follows. allowed: a bit for each token, bit i % 32 of word i / 32 for token i.
        """

    def step(self, state: State, token: int, sampling: Sampling, history: History, allowed: numpy.typing.NDArray[numpy.uint32] | None = None) -> int:
        """Take a drawn token in, and into the history, and draw the next."""

    def step_with(self, state: State, token: int, guess: numpy.typing.NDArray[numpy.int32], sampling: Sampling, history: History) -> list[int]:
        """
        Take in a drawn token and a guess of what follows it in one pass; return the tokens that as many steps would have drawn, as far as the guess was right, and one more.
        """

    def logprobs(self, state: State, token: int, top: int) -> list[tuple[int, float]]:
        """
        (token, logprob) of a token that could follow, then of the `top` likeliest: the log-softmax of the last token's logits as they are.
        """

    def logits(self, state: State, tokens: numpy.typing.NDArray[numpy.int32], progress: Callable[[int, int], None] | None = None, interrupt: Callable[[], None] | None = None) -> numpy.typing.NDArray[numpy.float32]:
        """Take tokens in; returns (T, V) float32, every row's logits."""

    def last_logits(self, state: State) -> NDArray[numpy.float32]:
        """The last token's logits, (V,) float32."""

    def layer_state(self, state: State, layer: int) -> tuple[numpy.typing.NDArray[numpy.float32], numpy.typing.NDArray[numpy.float32]]:
        """
        A layer's state in float32: keys and values (G, T, Dh), or conv (C - 1, channels) and S (Hv, Dv, Dk).
        """

    def _sample_from(self, logits: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], sampling: Sampling, position: int, history: History | None = None, allowed: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> int: ...

    @property
    def _step_counts(self) -> tuple[int, int]:
        """Decode steps run, and the passes that they were run in."""

    def end(self) -> None:
        """Let calls under way end their threads at their next chance."""

    @property
    def calls(self) -> int: ...

    def _finish(self) -> None: ...

    def _drop_barrier(self, number: int) -> None:
        """
        Let the simulator take no notice of the number-th barrier from here, for tests.
        """

    def _compile(self) -> list[str]:
        """Compile every kernel; what is wrong with any, a line each."""

    def _device_seconds(self) -> float:
        """
        Seconds that the device worked since the last call; 0 where it does not say.
        """

    def _recorded(self) -> list[Dispatch]:
        """
        The dispatches since the last call, as an instrumented simulator saw them; the first call begins.
        """

    def _run(self, op: str, layer: int, parts: Sequence[tuple[State, Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]]]) -> None:
        """Run one op over [(state, tokens), ...], for tests."""

    def _time(self, ops: Sequence[tuple[str, int]], times: int, parts: Sequence[tuple[State, Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]]]) -> list[float]:
        """
        Seconds of each of [(op, layer), ...], run `times` times on one batch, for benchmarks; the last one's include the wait for a device.
        """

    def _use_kernels(self, file: str) -> None:
        """Take a CPU's kernels of a row or few from a file, for benchmarks."""

    @property
    def _stages(self) -> int:
        """How often the CPU's threads were called together so far; 0 on a GPU."""

    def _advance(self, state: State, tokens: int) -> None: ...

    def _set(self, name: str, rows: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', writable=False)]) -> None: ...

    def _get(self, name: str, rows: int) -> NDArray[numpy.float32]: ...

def metal_facts(kernels: str = '') -> str:
    """
    What is known of this machine's GPU as Metal sees it, a line each; empty without Metal.
    """

def record_decode(directory: str | os.PathLike[str], position: int, options: Mapping[str, str]) -> list[Dispatch]:
    """
    The dispatches of the decode step at a position, for a folder's config.json: recorded dry.
    """

def read_config(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """The model's dimensions in a folder's config.json."""

def _scratch_of_prefill(directory: str | os.PathLike[str], tokens: int, options: Mapping[str, str]) -> int: ...

def option_list() -> list[tuple[str, str, str, str]]:
    """Every option: name, type, default, what it does."""

def option_alternatives() -> dict[str, list[str]]:
    """
    The values that each option's default is measured against; none for one that is no technique.
    """
