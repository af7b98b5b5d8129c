"""The stub's tokenizer: bytes, pairs of letters and two special tokens; decoded as vLLM decodes. Pure.

Half of the vocabulary are single bytes, so that the tokens of a random text often end in the middle of a
character, where engines spell differently than anybody expects.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from relight.agents.stub.tokens import VOCABULARY

BEGIN, END = VOCABULARY - 2, VOCABULARY - 1
"""Around each message of a chat. Special: not spelled unless asked for."""

_SPECIAL = {BEGIN: b"<|im_start|>", END: b"<|im_end|>"}
_LETTERS = "abcdefghijklmnop"
_WORDS = [bytes([byte]) for byte in range(256)] + [(a + b).encode() for a in _LETTERS for b in _LETTERS]

OPEN = "�"
"""What a text ends in whose last character is not whole."""

REACH = 4
"""Tokens looked back at for the name of one that completes a character."""


def encode(text: str) -> list[int]:
    """Text as its bytes."""
    return list(text.encode())


def template(messages: Iterable[dict[str, Any]]) -> list[int]:
    """A chat as a prompt for the assistant's next message."""
    ids: list[int] = []
    for message in messages:
        ids += [BEGIN, *encode(f"{message['role']}\n{message['content']}"), END, *encode("\n")]
    return [*ids, BEGIN, *encode("assistant\n")]


def decode(token_ids: Iterable[int], *, special: bool = False) -> str:
    """The text of tokens that stand alone."""
    words = (
        _SPECIAL[each] if each in _SPECIAL else _WORDS[each]
        for each in token_ids
        if special or each not in _SPECIAL
    )
    return b"".join(words).decode(errors="replace")


class Speaker:
    """Tokens to text, one by one, as the tokenizers library's DecodeStream does it behind a prompt.

    A prompt that ends within a character gives it nothing to begin behind: then it speaks all of it.
    """

    def __init__(self, prompt: Sequence[int], *, special: bool = False) -> None:
        self._special = special
        self._ids = list(prompt)
        self._prefix = ""

    def say(self, token_ids: Iterable[int]) -> str:
        return "".join(self._say(token_id) for token_id in token_ids)

    def _say(self, token_id: int) -> str:
        if not self._prefix and self._ids:
            prefix = decode(self._ids, special=self._special)
            if not prefix.endswith(OPEN):
                self._prefix = prefix
        self._ids.append(token_id)
        text = decode(self._ids, special=self._special)
        if len(text) <= len(self._prefix) or text.endswith(OPEN):
            return ""
        said = text[len(self._prefix) :]
        self._ids, self._prefix = [], ""
        return said


def name_of(token_id: int, context: Sequence[int]) -> str:
    """A token's name in logprobs: one that completes a character has the whole of it, one within has none."""
    name = decode([token_id], special=True)
    if not name.endswith(OPEN):
        return name
    for reach in range(1, min(len(context), REACH) + 1):
        before = list(context[-reach:])
        text = decode([*before, token_id], special=True)
        if text.endswith(OPEN):
            continue
        while before and decode(before[-1:], special=True).endswith(OPEN):
            del before[-1]
        return text.removeprefix(decode(before, special=True))
    return ""
