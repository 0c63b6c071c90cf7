"""`lily chat`: a conversation in a terminal.

Answers go to stdout; thoughts, numbers and what the program itself says only where a person sees them.
"""

import os
import sys
import time

from lily.completion import Completion, Stream
from lily.errors import ContextError
from lily.messages import Message
from lily.model import Model
from lily.prefix import Prefix
from lily.settings import Generation

HELP = '''\
/help   this
/undo   take the last question back, with its answer
/reset  begin anew
/quit   leave; so does Ctrl-D
Ctrl-C stops an answer. """ begins and ends a message of several lines.'''


class Conversation:
    """What was said, and the state up to the last question, so that a turn costs only what is new in it.

    messages: list of messages, the system's first if there is one.
    """

    def __init__(self, model: Model, system: str | None, thinking: bool | None, settings: Generation) -> None:
        """Begin with nothing said."""
        self.model = model
        self.system: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.system)
        self._thinking = thinking
        self._settings = settings
        self._asked: Prefix | None = None  # up to the last question, without the beginning of an answer

    def ask(self, question: str) -> Stream:
        """Take a question in and return its answer, to be written."""
        messages = [*self.messages, {"role": "user", "content": question}]
        prompt = self.model.encode(messages, thinking=self._thinking)
        asked = self.model.encode(messages, thinking=self._thinking, add_generation_prompt=False)
        if prompt[: len(asked)] != asked:  # a template that writes history otherwise once it is answered
            asked = prompt
        known = self._asked
        if known and len(known) < len(asked) and list(known.tokens) == asked[: len(known)]:
            self._asked = known.extend(asked[len(known) :], progress=True)
        else:
            self._asked = self.model.prefill(asked, progress=True)
        self.messages = messages
        header = prompt[len(asked) :]
        return (self._asked.extend(header) if header else self._asked).stream(**self._settings)

    def answered(self, done: Completion) -> None:
        """Keep an answer, or as much of it as there is; without any, its question goes too."""
        if done.text or done.reasoning:
            self.messages.append(done.message)
        else:
            self.messages.pop()

    def undo(self) -> bool:
        """Take the last question back, with its answer; return whether there was one."""
        asked = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if asked:
            del self.messages[asked[-1] :]
        return bool(asked)

    def reset(self) -> None:
        """Begin with nothing said."""
        self.messages = list(self.system)


def talk(conversation: Conversation) -> None:
    """Read questions and write answers until the input ends or /quit is read."""
    by_hand = sys.stdin.isatty()
    if by_hand:
        import contextlib

        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  input() then edits lines and recalls earlier ones
        _say("Ctrl-D leaves, /help says more.")
    while True:
        try:
            question = _read("> " if by_hand else "")
        except KeyboardInterrupt:
            print()
            _say("Ctrl-D leaves.")
            continue
        except EOFError:
            if by_hand:
                print()
            return
        command = question.strip()
        if command == "/quit":
            return
        if command in ("/undo", "/reset", "/help"):
            _obey(conversation, command)
        elif command.startswith("/") and " " not in command:
            _say(f"no command {command}; /help lists them")
        elif command:
            _turn(conversation, question)


def _read(prompt: str) -> str:
    """Return a line, or the lines between two of triple quotes."""
    line = input(prompt)
    if not line.startswith('"""'):
        return line
    lines = [line.removeprefix('"""')]
    while not lines[-1].endswith('"""'):
        lines.append(input(". " if prompt else ""))
    lines[-1] = lines[-1].removesuffix('"""')
    return "\n".join(lines)


def _obey(conversation: Conversation, command: str) -> None:
    if command == "/help":
        _say(HELP)
    elif command == "/reset":
        conversation.reset()
        _say("All forgotten.")
    else:
        _say("Taken back." if conversation.undo() else "There is nothing to take back.")


def _turn(conversation: Conversation, question: str) -> None:
    """Ask, and write the answer down as it comes. Ctrl-C ends the turn, and what is written stays."""
    started = time.perf_counter()
    stream = None
    try:
        stream = conversation.ask(question)
        waited = time.perf_counter() - started
        write(stream)
    except KeyboardInterrupt:
        print()
        if stream is None:
            _say("Stopped; the question is not kept.")
            return
    except ContextError as error:
        _say(f"{error}: /undo takes back, /reset begins anew")
        return
    done = stream.so_far()
    conversation.answered(done)
    usage, timings = done.usage, done.timings
    end = {"length": ", cut at the limit", None: ", stopped"}.get(done.finish_reason, "")
    _say(
        f"{usage.prompt_tokens} tokens asked, answer after {waited + timings.prefill_seconds:.1f} s; "
        f"{usage.completion_tokens} tokens, {timings.decode_tokens_per_second:.1f}/s{end}"
    )


def write(stream: Stream) -> None:
    """Write an answer to stdout, its thoughts dim before it if that is a terminal."""
    seen = sys.stdout.isatty()
    thinking = False
    try:
        for chunk in stream:
            if chunk.reasoning and seen:
                print(chunk.reasoning if thinking else _dim_from() + chunk.reasoning, end="", flush=True)
                thinking = True
            if chunk.text:
                if thinking:
                    print(_dim_to() + "\n\n", end="")
                    thinking = False
                print(chunk.text, end="", flush=True)
    finally:
        if thinking:
            print(_dim_to(), end="")
    print()


def _say(text: str) -> None:
    """Say something of the program's own, to a person only."""
    if sys.stderr.isatty():
        print(f"{_dim_from()}{text}{_dim_to()}", file=sys.stderr)


def _dim_from() -> str:
    return "\x1b[2m" if _colours() else ""


def _dim_to() -> str:
    return "\x1b[22m" if _colours() else ""


def _colours() -> bool:
    """Return whether the terminal takes escape sequences, by the customs of NO_COLOR and of TERM."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
