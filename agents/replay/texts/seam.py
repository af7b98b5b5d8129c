"""The text around a seam, spelled by the engine from the tokens on both of its sides.

Theory. An engine that goes on from prompt and kept tokens spells what it adds. Where the kept tokens end in
the middle of a character, it cannot: vLLM's decoder then finds no text to begin behind, and speaks everything
from the first token of the prompt on (measured on 0.32.0). Nor does it know the tokens before the seam when
it names a token that completes a character. So the kept tokens are derendered first. Their text must begin
with what was sent, or the answer does not go on; what they hold beyond that is sent with the next chunk. The
decoder's state goes on through the tokens behind the seam, until nothing of a character is open and, where
logprobs name tokens, none before the seam can be part of one. From there on the engine's own text is right,
since its decoder has spoken up to the same token.

What stays as the engine tells it: the names of candidates, other than the sampled token, within that reach.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp
import anyio
import msgspec

from relight.agents.replay.request import headers_of
from relight.agents.replay.speech import Errand
from relight.agents.replay.stream import Flight, Interrupted, Rejected
from relight.agents.replay.texts.asked import Asked
from relight.agents.replay.texts.script import Kept
from relight.agents.replay.texts.words import Entry, Said
from relight.agents.replay.turn import End

PATH = "/v1/completions/derender"
"""Text of tokens, for both endpoints: a chat's needs no parser, or it would not go on."""

REACH = 4
"""Tokens that vLLM looks back for the name of one that completes a character."""

ASKED_S = 10.0
"""How long an engine may take to spell: milliseconds when idle, more while it is busy."""

_SPELLING = ("skip_special_tokens", "spaces_between_special_tokens")


class _State(msgspec.Struct, frozen=True):
    prev_tokens: list[str] = []
    read_offset: int = 0


class _Logprobs(msgspec.Struct, frozen=True):
    tokens: list[str] = []


class _Choice(msgspec.Struct, frozen=True):
    text: str
    logprobs: _Logprobs | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice]


class _Spelled(msgspec.Struct, frozen=True):
    chunk: _Chunk
    stream_state: msgspec.Raw


class Spelled(NamedTuple):
    """Tokens as text. `names` has one entry a token, where they were asked for."""

    text: str
    names: list[str]
    state: msgspec.Raw


class Seam:
    """The place between `kept` and what follows, while it matters. Made by `opened`."""

    def __init__(self, asked: Asked, errand: Errand, spelled: Spelled, rest: str) -> None:
        self._asked = asked
        self._errand = errand
        self._state = spelled.state
        self._rest = rest
        self._since = 0

    @property
    def passed(self) -> bool:
        """The engine's own text is right from here on."""
        return not (self._rest or self._open or (self._asked.scored and self._since < REACH))

    @property
    def _open(self) -> bool:
        state = msgspec.json.decode(self._state, type=_State)
        return state.read_offset < len(state.prev_tokens)

    async def mended(self, said: Said, flight: Flight) -> Said:
        """`said` with its text, and the names of its tokens, as they are in one piece with what was kept."""
        token_ids = said.token_ids or []
        # A token that ends the answer is no part of its text, unless that was asked for.
        spoken = len(token_ids)
        if said.finish_reason == "stop" and not self._asked.fields.get("include_stop_str_in_output"):
            spoken -= 1
        text, names = said.text, list[str]()
        if self._open or self._asked.scored:
            spelled = await spell(
                token_ids[:spoken], asked=self._asked, errand=self._errand, flight=flight, state=self._state
            )
            text, names, self._state = spelled.text, spelled.names, spelled.state
        text, self._rest = self._rest + text, ""
        self._since += len(token_ids)
        entries = None if said.entries is None else _named(said.entries, names)
        return msgspec.structs.replace(said, text=text, entries=entries)


async def opened(asked: Asked, errand: Errand, kept: Kept, flight: Flight) -> Seam:
    """The seam behind `kept`; raises Rejected where its text is not what was sent, and as `Flight.open`."""
    spelled = await spell(kept.token_ids, asked=asked, errand=errand, flight=flight, prompt=kept.prompt)
    if not spelled.text.startswith(kept.text):
        raise Rejected(409, b"the kept tokens do not spell the text that was sent")
    return Seam(asked, errand, spelled, spelled.text[len(kept.text) :])


async def spell(  # noqa: PLR0913 - what an engine needs to spell
    token_ids: Sequence[int],
    *,
    asked: Asked,
    errand: Errand,
    flight: Flight,
    state: msgspec.Raw | None = None,
    prompt: Sequence[int] = (),
) -> Spelled:
    """`token_ids` as text, after `state` or else after `prompt`; raises Rejected and as `Flight.open`."""
    choice: dict[str, Any] = {"index": 0, "token_ids": token_ids}
    if asked.scored:
        choice["logprobs"] = {"content": [{"token_id": each, "logprob": 0.0} for each in token_ids]}
    spelling = {name: asked.fields[name] for name in _SPELLING if name in asked.fields}
    body = {
        "stream": True,
        "model": asked.fields.get("model"),
        "generate_chunk": {"request_id": errand.request_id, "choices": [choice]},
        "stream_state": state,
        "prompt_token_ids": prompt or None,
        "completion_request": {"prompt": "-", **spelling},
    }
    answer = await question(flight, errand, msgspec.json.encode(body), path=PATH)
    try:
        read = msgspec.json.decode(answer, type=_Spelled)
        (spelled,) = read.chunk.choices
    except (msgspec.MsgspecError, ValueError) as error:
        raise Rejected(502, f"{PATH}: {error}".encode()) from error
    return Spelled(spelled.text, spelled.logprobs.tokens if spelled.logprobs else [], read.stream_state)


async def question(flight: Flight, errand: Errand, body: bytes, *, path: str) -> bytes:
    """The answer to a question beside a generation; raises as `Flight.open`, also when it comes too late."""
    http: aiohttp.ClientSession = errand.http
    try:
        with anyio.fail_after(ASKED_S):
            headers = headers_of(errand.call, errand.request_id)
            return await flight.ask(http, errand.address, body, headers, path=path)
    except TimeoutError as error:
        raise Interrupted(End.IDLE, f"{path}: no answer within {ASKED_S:g} s") from error


def _named(entries: Sequence[Entry], names: Sequence[str]) -> list[Entry]:
    return [
        _renamed(entry, names[place]) if place < len(names) else entry for place, entry in enumerate(entries)
    ]


def _renamed(entry: Entry, name: str) -> Entry:
    """The sampled token, which is the first of its candidates too, by its name."""
    if name == entry.token:
        return entry
    spelled = list(name.encode())
    tops = entry.top_logprobs
    if tops:
        tops = [msgspec.structs.replace(tops[0], token=name, bytes=spelled), *tops[1:]]
    return msgspec.structs.replace(entry, token=name, bytes=spelled, top_logprobs=tops)
