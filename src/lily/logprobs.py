"""How likely the model held the tokens of an answer to be, and what it held likelier."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lily._core import State
    from lily.engine import Engine
    from lily.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with the logarithm of its probability.

    token: int, its id.  text: str, as it is written; U+FFFD stands for part of a character.
    utf8: bytes that it adds to a text, perhaps part of a character; none for a special marker. Over an answer
        they add up to its text.
    logprob: float <= 0, the natural logarithm of the probability that the model itself gave it: before
        temperature, bias, penalties and all else that a token is then drawn by.
    top: tuple of TokenLogprob, the likeliest tokens in its place, best first; as many as top_logprobs said.
    """

    token: int
    text: str
    utf8: bytes
    logprob: float
    top: tuple["TokenLogprob", ...] = ()


def token_logprob(engine: "Engine", state: "State", token: int, top: int) -> TokenLogprob:
    """Return the logprob of a token that could follow a state, with those of the `top` likeliest."""
    own, *likeliest = engine.session.logprobs(state, token, top)
    described = [_describe(engine.tokenizer, *each) for each in likeliest]
    return _describe(engine.tokenizer, *own, tuple(described))


def _describe(
    tokenizer: "Tokenizer", token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()
) -> TokenLogprob:
    text = tokenizer.token_bytes(token).decode(errors="replace")
    return TokenLogprob(token, text, tokenizer.token_bytes(token, markers=False), logprob, top)
