"""Prompts and answers that a model has taken in, found again by their tokens: states along a trie.

A recurrent state cannot be taken back by a token, so a state is of use only to a sequence that begins with
all of its tokens. Which are kept, and where prompts are cut to keep one, is decided here.
"""

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lily import _core

if TYPE_CHECKING:
    from lily.tokenizer import Tokenizer

Tokens = NDArray[np.int32]

LEAST = 16  # tokens that are worth a state of their own
NEAR = 64  # tokens that are not: they are taken in again from the state before
APART = 512  # tokens from one state to the next within a prompt
GRID = 2048  # positions at whose multiples a prompt is cut where it has no messages
_OLD = 64  # requests after which a state that was used again counts as one that never was
_TRACES = 1024  # nodes of the trie up to which sequences are remembered whose states are gone
_TRACED = 512 << 10  # tokens, the same


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a model's cache holds, and what it was good for.

    bytes: int, of all states in it, memory that they share counted once.  budget: int, the most it may be.
    states: int, how many.
    requests: int, that looked; hits: int, that found something; cached_tokens: int, that they were spared.
    evictions: int, states that made room.
    disk_bytes: int, of the states in `cache_dir`.  disk_hits: int, requests that found theirs there.
    """

    bytes: int
    budget: int
    states: int
    requests: int
    hits: int
    cached_tokens: int
    evictions: int
    disk_bytes: int = 0
    disk_hits: int = 0


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Node:
    """A place in the trie: what leads there from its parent, and the state after it, if there is one."""

    run: Tokens
    above: "weakref.ref[_Node] | None"  # no cycle: what is dropped is freed at once
    children: "dict[int, _Node]" = field(default_factory=dict)
    state: "_core.State | None" = None
    known: bool = False  # a sequence ended here, whether its state is still there or not
    exact: bool = True  # whether it has the bits that the tokens have when they are taken in at once
    written: bool = False  # whether it is an answer's end
    uses: int = 0  # how often it was used and not grown out of
    used: int = 0  # by which request last

    @property
    def parent(self) -> "_Node | None":
        """The node before it, None at the root."""
        return self.above() if self.above is not None else None

    @property
    def tokens(self) -> Tokens:
        """Those from the root to here."""
        node: _Node | None = self
        runs = []
        while node is not None:
            runs.append(node.run)
            node = node.parent
        return np.concatenate(runs[::-1])

    @property
    def length(self) -> int:
        """How many they are."""
        node: _Node | None = self
        length = 0
        while node is not None:
            length += len(node.run)
            node = node.parent
        return length


@dataclass(slots=True, eq=False)
class Hit:
    """What a request found: a state after the first `length` of its tokens, or None and 0.

    follows: bool, whether the request goes on with a conversation that was here before.
    exact: bool, whether the state has the bits that it has when all of it is taken in as a prompt.
    """

    state: "_core.State | None"
    length: int
    follows: bool
    exact: bool
    node: "_Node | None" = None


class PrefixCache:
    """States by their tokens, within a budget of bytes. Safe to call from any thread.

    What was used again outlives what was not, so requests that come once push no conversation out.
    """

    def __init__(
        self,
        budget: int,
        session: "Callable[[], _core.Session]",
        save: "Callable[[Tokens, _core.State], object] | None" = None,
    ) -> None:
        """Begin empty.

        session: returns the core's session, which counts the bytes.
        save: called with what is given up for want of room, before it is.
        """
        self._save = save
        self.budget = budget
        self._session = session
        self._lock = threading.Lock()
        self._root = _Node(np.empty(0, np.int32), None)
        self._requests = self._hits = self._cached_tokens = self._evictions = 0
        self._tokens = self._size = 0  # of the trie, in tokens and nodes

    def find(self, tokens: Tokens, begins: int = 0, exact: bool = False) -> Hit:
        """Return the longest state that a prompt begins with and can go on from.

        Where a device sums a prompt in blocks of positions, going on within one gives other bits than
        beginning anew does, so that is not done. An answer was not taken in as a prompt in the first place:
        the next turn goes on from wherever it ended, unless `exact`.

        begins: where its first answer does: what is shared up to there is a common beginning, and the
            request another conversation's.
        """
        session, end = self._session(), len(tokens)

        def usable(node: _Node, depth: int) -> bool:
            if node.state is None or (depth == end and not node.state.has_logits):
                return False
            if session.grid == 1:
                return True
            return (node.written and not exact) or (session.resumes(depth, end) and (node.exact or not exact))

        with self._lock:
            self._requests += 1
            best: _Node | None = None
            length = known = 0
            for node, depth in self._walk(tokens):
                if node.known and depth >= begins:
                    known = depth
                if usable(node, depth):
                    best, length = node, depth
            if best is not None:
                self._hits += 1
                self._cached_tokens += length
                best.used = self._requests
                best.uses += 1
            return Hit(best.state if best else None, length, known > 0, best is None or best.exact, best)

    def put(
        self, tokens: Tokens, state: "_core.State", hit: Hit, *, written: bool = False, wait: bool = True
    ) -> None:
        """Keep a state after so many tokens, if there is room or if room can be made.

        state: nobody extends it any more.
        hit: what the request found that made it. The use that it was put to goes over to its successor.
        written: whether it is an answer's end, made token by token.
        wait: False to keep nothing if another thread is at work here.
        """
        if not self._lock.acquire(blocking=wait):
            return
        try:
            node = self._place(tokens)
            node.known, node.used = True, self._requests
            if hit.follows:
                node.uses = max(node.uses, 1)
            if node.state is None and self._keep(node, state):
                node.state, node.written, node.exact = state, written, hit.exact and not written
                if hit.follows and hit.node is not None and hit.node is not node:
                    hit.node.uses = max(0, hit.node.uses - 1)
                    hit.node = None
            self._forget_traces()
        finally:
            self._lock.release()

    def make_room(self, needed: int) -> int:
        """Drop states until so many bytes are free, or none is left; return the bytes."""
        with self._lock:
            before = self._session().kept_bytes
            freed = 0
            while freed < needed and (victim := self._victim(None)) is not None:
                self._drop(victim)
                freed = before - self._session().kept_bytes
            return freed

    def save(self) -> None:
        """Save what a later process can go on with: where conversations and their last prompts ended."""
        if self._save is None:
            return
        with self._lock:
            worth = {node for node in self._nodes() if node.state and (node.uses > 0 or not node.children)}
            for node in list(worth):
                before = node.parent
                while before is not None and before.state is None:
                    before = before.parent
                worth |= {before} if before is not None else set()
            for node in sorted(worth, key=lambda node: node.used):
                if node.state is not None:
                    self._save(node.tokens, node.state)

    def clear(self) -> None:
        """Drop everything, and forget that it was ever there."""
        with self._lock:
            for node in list(self._nodes()):
                if node.state is not None:
                    self._session().let_go(node.state)
            self._root = _Node(np.empty(0, np.int32), None)
            self._tokens = self._size = 0

    def stats(self) -> CacheStats:
        """Return the numbers of now."""
        with self._lock:
            return CacheStats(
                bytes=self._session().kept_bytes,
                budget=self.budget,
                states=sum(node.state is not None for node in self._nodes()),
                requests=self._requests,
                hits=self._hits,
                cached_tokens=self._cached_tokens,
                evictions=self._evictions,
            )

    # ---- The budget

    def _keep(self, node: _Node, state: "_core.State") -> bool:
        """Count a state as kept, making room for it."""
        session = self._session()
        if session.cost(state) > self.budget:
            return False
        while not session.keep(state, self.budget):
            victim = self._victim(node)
            if victim is None:
                return False
            self._drop(victim)
        return True

    def _victim(self, newcomer: _Node | None) -> _Node | None:
        """Return the state to give up: the one used longest ago, first of those that were used once.

        newcomer: what room is made for. If it comes for the first time, it pushes out nothing that was used
            again, unless that was long ago.
        """
        worst: tuple[bool, int, int] | None = None
        found = None
        for node in self._nodes():
            if node.state is None or node is newcomer:
                continue
            again = node.uses > 0 and self._requests - node.used < _OLD
            if again and newcomer is not None and newcomer.uses == 0:
                continue
            rank = (again, node.used, node.length)
            if worst is None or rank < worst:
                worst, found = rank, node
        return found

    def _drop(self, node: _Node) -> None:
        assert node.state is not None
        if self._save is not None:  # while it counts, so that no moment escapes
            self._save(node.tokens, node.state)
        self._session().let_go(node.state)
        node.state = None
        self._evictions += 1

    # ---- The trie

    def _nodes(self) -> Iterator[_Node]:
        left = [self._root]
        while left:
            node = left.pop()
            left += node.children.values()
            yield node

    def _walk(self, tokens: Tokens) -> Iterator[tuple[_Node, int]]:
        """Yield the nodes whose tokens a sequence begins with, and how many they are."""
        node, depth = self._root, 0
        while depth < len(tokens):
            child = node.children.get(int(tokens[depth]))
            if child is None or _common(child.run, tokens[depth:]) < len(child.run):
                return
            node, depth = child, depth + len(child.run)
            yield node, depth

    def _place(self, tokens: Tokens) -> _Node:
        """Return the node of a sequence, made if it is not there."""
        node, depth = self._root, 0
        for node, depth in self._walk(tokens):  # noqa: B007  to the last of them
            pass
        if depth == len(tokens):
            return node
        rest = tokens[depth:].copy()  # a view would keep the whole prompt
        child = node.children.get(int(rest[0]))
        if child is not None:  # parts ways within its run: cut there
            common = _common(child.run, rest)
            middle = _Node(child.run[:common].copy(), weakref.ref(node))
            child.run, child.above = child.run[common:].copy(), weakref.ref(middle)
            middle.children[int(child.run[0])] = child
            node.children[int(rest[0])] = middle
            self._size += 1
            node, rest = middle, rest[common:].copy()
            if not len(rest):
                return node
        leaf = _Node(rest, weakref.ref(node))
        node.children[int(rest[0])] = leaf
        self._tokens += len(rest)
        self._size += 1
        return leaf

    def _forget_traces(self) -> None:
        """Take out what leads to no state, the longest unused first, once the trie is large."""
        while self._tokens > _TRACED or self._size > _TRACES:
            bare = [node for node in self._nodes() if not node.children and node.state is None]
            if not bare or bare == [self._root]:
                return
            for node in sorted(bare, key=lambda node: node.used)[: max(1, len(bare) // 4)]:
                self._take_out(node)

    def _take_out(self, node: _Node) -> None:
        while (parent := node.parent) is not None and not node.children and node.state is None:
            del parent.children[int(node.run[0])]
            self._tokens -= len(node.run)
            self._size -= 1
            node = parent
            if node.known:
                return


class Borders:
    """Where messages begin in token ids, and where answers do."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        """Look the marker up; a checkpoint without it has no messages."""
        self._start = tokenizer.token_id("<|im_start|>")
        self._header = np.array(tokenizer.encode("assistant\n"), np.int32)

    def answers(self, tokens: Tokens) -> list[int]:
        """Return the positions behind the assistant's headers."""
        return [
            behind
            for at in self._starts(tokens)
            if (behind := at + 1 + len(self._header)) <= len(tokens)
            and np.array_equal(tokens[at + 1 : behind], self._header)
        ]

    def cuts(self, tokens: Tokens, done: int = 0, grid: int = 1) -> list[int]:
        """Return where to keep a state while a prompt is taken in from `done` on; the last is its end.

        The next turn's prompt may part ways right behind the last header, since templates write an answer's
        beginning otherwise once it is history: a state is kept there. Others are kept where messages begin,
        and on a grid, a good deal apart. All of them are fixed by the tokens, and multiples of `grid`.
        """
        end = len(tokens)
        answers = self.answers(tokens)
        borders = sorted({*self._starts(tokens), *answers, *range(GRID, end, GRID)} - {0})
        chosen: list[int] = []
        for border in borders:
            if border >= (chosen[-1] + APART if chosen else NEAR):
                chosen.append(border)
        if answers and answers[-1] >= LEAST:
            chosen = [*(cut for cut in chosen if cut < answers[-1] - NEAR), answers[-1]]
        return sorted(cut for cut in {*(cut // grid * grid for cut in chosen), end} if cut > done)

    def _starts(self, tokens: Tokens) -> list[int]:
        return [] if self._start is None else np.flatnonzero(tokens == self._start).tolist()


def _common(a: Tokens, b: Tokens) -> int:
    """Return how many tokens two sequences have in common from their beginnings."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if differ.size else length
