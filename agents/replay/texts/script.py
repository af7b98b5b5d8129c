"""The ledger of a text that can go on after a death: its tokens, and the bytes that spell them. Pure.

The invariant, beside a delivery's: one role, one id, one finish, and each chunk's text belongs to its tokens.
"""

from typing import NamedTuple

from relight.agents.replay.delivery import Delivery
from relight.agents.replay.ledger import Ask, News
from relight.agents.replay.strand import WHOLE, Malformed, Strand
from relight.agents.replay.texts import words
from relight.agents.replay.texts.asked import Asked
from relight.agents.replay.texts.words import Head, Said, Usage
from relight.agents.replay.wire import Delta
from relight.events.version import Version

NO_IDS = "text without token ids"
PARSED = "the state of a reasoning or tool call's parser"


class Kept(NamedTuple):
    """What is there when an attempt goes on."""

    prompt: list[int]
    token_ids: list[int]
    text: str


class Script(Delivery):
    """One answer with one choice."""

    def __init__(self, asked: Asked) -> None:
        """Raises UsageError for what cannot go on; see `Asked.why_replayed`."""
        super().__init__([], asked.params)
        self._asked = asked
        self._forget()

    def _forget(self) -> None:
        super()._forget()
        self._prompt = []
        self._head: Head | None = None
        self._preamble: bytes | None = None
        self._texts: list[str] = []
        self._offset = 0
        self._mark = (0, 0)
        """Texts and offset where the attempt under way began."""
        self._mute = False
        """The engine tells no token ids."""
        self._finish: bytes | None = None
        self._usage: bytes | None = None
        self._usage_due = self._counts

    @property
    def _counts(self) -> bool:
        """The answer tells its usage."""
        return self._asked.usage or not self._asked.streamed

    # --- asking ------------------------------------------------------------------------------------

    @property
    def kept(self) -> Kept:
        return Kept(list(self._prompt), list(self._strands[0].token_ids), "".join(self._texts))

    @property
    def complete(self) -> bool:
        """With the usage, where the engine is to tell one."""
        return super().complete and not (self._usage_due and self._usage is None)

    def settle(self) -> bool:
        self._usage_due = False  # nobody tells it any more
        return super().settle()

    def why_replayed(self, version: str) -> str | None:
        return NO_IDS if self._mute else super().why_replayed(version)

    def ask(self, *, attempt: int, version: str) -> Ask:
        ask = super().ask(attempt=attempt, version=version)
        if ask.kept:
            self._usage_due = False  # the engine would tell that of its own part
        self._mark = (len(self._texts), self._offset)
        return ask

    def close(self, *, certain: Version | None, floor: Version, doubt: str = "") -> None:
        """As every ledger's; but nobody is told versions here, so none has to be certain to go on."""
        trusted = self._doubt
        super().close(certain=certain, floor=floor, doubt=doubt)
        self._doubt = trusted

    def reject(self) -> None:
        super().reject()
        texts, self._offset = self._mark
        del self._texts[texts:]
        self._finish = None

    # --- feeding -----------------------------------------------------------------------------------

    def feed(self, delta: Delta) -> News | None:
        assert isinstance(delta, Said)
        match delta.part:
            case "preamble":
                self._learn(delta)
                self._preamble = delta.payload
            case "usage":
                self._usage = delta.payload
            case "end":
                self._usage_due = False
            case "tokens":
                return self._mumbled(delta) if self._mumbles(delta) else self._spoke(delta)
        return None

    def _learn(self, said: Said) -> None:
        """The prompt's ids and the answer's head come with an attempt's first chunk."""
        if said.prompt_token_ids is not None and not self._prompt:
            self._prompt = list(said.prompt_token_ids)
        if self._head is None and said.payload:
            self._head = words.head_of(said.payload)

    def _mumbles(self, said: Said) -> bool:
        """Text comes without ids from its first on; an end that is the attempt's alone has none anyway."""
        if said.token_ids is not None or said.finish_reason not in (None, *WHOLE):
            return False
        return self._mute or self._void or not self._strands[0].token_ids

    def _mumbled(self, said: Said) -> News:
        """Text goes through without ids; a death is then a reason to begin anew."""
        self._learn(said)
        if self._void:
            self._strands, self._void = [Strand()], False
        self._mute = True
        if said.finish_reason in WHOLE:
            strand = self._strands[0]
            strand.finish_reason, strand.stop_reason = said.finish_reason, said.stop_reason
        self._tell(said)
        return News(said.index, 0, [], None)

    def _spoke(self, said: Said) -> News | None:
        self._learn(said)
        if self._asked.scored and said.token_ids and said.counted != len(said.token_ids):
            raise Malformed(f"{len(said.token_ids)} token ids with {said.counted or 0} logprobs")
        news = super().feed(said)
        if said.parsed:
            self.distrust(PARSED)
        if news is not None or said.text or said.finish_reason in WHOLE:
            self._tell(said)
        return news

    def _tell(self, said: Said) -> None:
        if self._preamble is not None:
            self._give(self._shown(self._preamble))
            self._preamble = None
        self._texts.append(said.text)
        if said.finish_reason in WHOLE:
            self._finish = self._chunk(said)
        else:
            self._give(self._chunk(said))
        self._offset = said.spoken or self._offset

    def _chunk(self, said: Said) -> bytes:
        if said.payload:
            whole = said.finish_reason is None or said.finish_reason in WHOLE
            return self._shown(said.payload if whole else words.unfinished(said.payload))
        assert self._head is not None, "an attempt that goes on has a head"
        offset = self._offset
        self._offset += sum(len(entry.token) for entry in said.entries or ())
        usage = self._counted() if self._asked.continuous else None
        return words.chunk(self._asked, self._head, said, offset=offset, usage=usage)

    def _shown(self, payload: bytes) -> bytes:
        return payload if self._asked.shows_ids else words.without_ids(payload)

    # --- giving out --------------------------------------------------------------------------------

    def last(self) -> list[bytes]:
        """The finish and the usage: as an engine told them, or as no engine lived to tell them."""
        if self._head is None:
            return []
        finish = self._finish
        if finish is None:
            end = self._strands[0]
            said = Said(index=0, token_ids=[], finish_reason=end.finish_reason, stop_reason=end.stop_reason)
            finish = self._chunk(said)
        if not self._counts:
            return [finish]
        return [finish, self._usage or words.usage_chunk(self._asked, self._head, self._counted())]

    def _counted(self) -> Usage:
        prompt, made = len(self._prompt), len(self._strands[0].token_ids)
        return Usage(prompt, prompt + made, made)
