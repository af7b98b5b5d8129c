"""The JSON of text answers, field for field as vLLM 0.32 writes it: completions, chats, and generate's own.

They are made of the same choices as token answers; a `Spoken` spells them for one request.
"""

import time
from typing import Any

from relight.agents.stub import shapes
from relight.agents.stub.generation import Generation
from relight.agents.stub.sampling import Body
from relight.agents.stub.spelling import Speaker, name_of

Choice = dict[str, Any]


class Spoken:
    """The words of `/inference/v1/generate` in text mode; those of other routes are made from it."""

    def __init__(self, prompt: list[int], *, special: bool = False, silent: bool = False) -> None:
        """`special`: special tokens are spelled too. `silent`: no token ids are told."""
        self.prompt = prompt
        self.silent = silent
        self.created = int(time.time())
        self._special = special
        self._speakers: dict[int, Speaker] = {}
        self._said: dict[int, list[int]] = {}

    def name(self, plain_id: str) -> str:
        return f"generate-tokens-{plain_id}"

    def spelled(self, choice: Choice) -> Choice:
        """The choice with its text, and its logprobs by name."""
        index, ids = choice["index"], choice["token_ids"]
        speaker = self._speakers.setdefault(index, Speaker(self.prompt, special=self._special))
        said = self._said.setdefault(index, [])
        stopped = choice["finish_reason"] == "stop"
        text = speaker.say(ids[:-1] if stopped else ids)
        entries: list[dict[str, Any]] | None = None
        if choice["logprobs"] is not None:
            entries = []
            for scored in choice["logprobs"]["content"]:
                name = name_of(scored["token_id"], said)
                said.append(scored["token_id"])
                entry = {"token": name, "logprob": scored["logprob"], "bytes": list(name.encode())}
                entries.append({**entry, "top_logprobs": [entry]})
        return {**choice, "text": text, "logprobs": None if entries is None else {"content": entries}}

    def chunk(
        self, generation: Generation, choices: list[Choice], usage: dict[str, Any] | None = None
    ) -> bytes:
        spelled = [self.spelled(choice) for choice in choices]
        return shapes.event(
            {"request_id": generation.request_id, "choices": spelled, "usage": usage, "output_mode": "text"}
        )

    def whole(self, generation: Generation, choices: list[Choice], body: Body, model: str) -> dict[str, Any]:
        spelled = [self.spelled(choice) for choice in choices]
        return {**shapes.whole(generation, spelled, body, model), "output_mode": "text"}


class Completion(Spoken):
    """The words of `/v1/completions`."""

    def __init__(self, prompt: list[int], *, model: str, shows_ids: bool, **how: bool) -> None:
        super().__init__(prompt, **how)
        self._model = model
        self._shows_ids = shows_ids
        self._offsets: dict[int, int] = {}
        self._begun: set[int] = set()

    def name(self, plain_id: str) -> str:
        return f"cmpl-{plain_id}-0"

    def _choice(self, choice: Choice) -> Choice:
        spelled, index = self.spelled(choice), choice["index"]
        first = index not in self._begun
        self._begun.add(index)
        return {
            "index": index,
            "text": spelled["text"],
            "logprobs": self._logprobs(index, spelled["logprobs"]),
            "finish_reason": choice["finish_reason"],
            "stop_reason": choice["stop_reason"],
            "prompt_token_ids": self.prompt if first and self._ids_told else None,
            "token_ids": choice["token_ids"] if self._ids_told else None,
        }

    def _id(self, generation: Generation) -> str:
        """The answer's id: the request's without its prompt's number."""
        return generation.request_id.removesuffix("-0")

    @property
    def _ids_told(self) -> bool:
        return self._shows_ids and not self.silent

    def _logprobs(self, index: int, told: dict[str, Any] | None) -> dict[str, Any] | None:
        if told is None:
            return None
        names = [entry["token"] for entry in told["content"]]
        offsets: list[int] = []
        for name in names:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(name)
        return {
            "text_offset": offsets,
            "token_logprobs": [entry["logprob"] for entry in told["content"]],
            "tokens": names,
            "top_logprobs": [{entry["token"]: entry["logprob"]} for entry in told["content"]],
        }

    def chunk(
        self, generation: Generation, choices: list[Choice], usage: dict[str, Any] | None = None
    ) -> bytes:
        return self._event("text_completion", generation, [self._choice(each) for each in choices], usage)

    def _event(
        self, kind: str, generation: Generation, choices: list[Choice], usage: dict[str, Any] | None
    ) -> bytes:
        content = {"id": self._id(generation), "object": kind, "created": self.created, "model": self._model}
        told = {} if usage is None else {"usage": usage, "system_fingerprint": "stub"}
        return shapes.event({**content, "choices": choices, **told})

    def whole(self, generation: Generation, choices: list[Choice], body: Body, model: str) -> dict[str, Any]:
        told = [{**self._choice(each), "prompt_logprobs": None, "routed_experts": None} for each in choices]
        return self._whole("text_completion", generation, told, body, model)

    def _whole(
        self, kind: str, generation: Generation, choices: list[Choice], body: Body, model: str
    ) -> dict[str, Any]:
        return {
            "id": self._id(generation),
            "object": kind,
            "created": self.created,
            "model": model,
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": "stub",
            "usage": shapes.usage(generation, len(body.token_ids)),
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "metrics": None,
        }


class Chat(Completion):
    """The words of `/v1/chat/completions`."""

    def __init__(
        self, prompt: list[int], *, model: str, shows_ids: bool, ranked: int = 0, **how: bool
    ) -> None:
        super().__init__(prompt, model=model, shows_ids=shows_ids, **how)
        self._ranked = ranked

    def name(self, plain_id: str) -> str:
        return f"chatcmpl-{plain_id}"

    def _logprobs(self, index: int, told: dict[str, Any] | None) -> dict[str, Any] | None:
        if told is None:
            return None
        return {
            "content": [
                {**entry, "top_logprobs": entry["top_logprobs"][: self._ranked]} for entry in told["content"]
            ]
        }

    def chunk(
        self, generation: Generation, choices: list[Choice], usage: dict[str, Any] | None = None
    ) -> bytes:
        kind = "chat.completion.chunk"
        begin = b""
        if not self._begun:
            for index in range(len(generation.parts)):
                role = {"role": "assistant", "content": ""}
                first = {"index": index, "delta": role, "logprobs": None, "finish_reason": None}
                begin += self._event(kind, generation, [first], None)
            ids = shapes.encode(self.prompt) if self._ids_told else b"null"
            begin = begin.replace(b"}]}\n\n", b'}],"prompt_token_ids":' + ids + b"}\n\n", 1)
        said: list[Choice] = []
        for each in choices:
            told = self._choice(each)
            ended = {"stop_reason": told["stop_reason"]} if told["finish_reason"] else {}
            kept = {name: told[name] for name in ("logprobs", "finish_reason", "token_ids")}
            said.append({"index": told["index"], "delta": {"content": told["text"]}, **kept, **ended})
        return begin + self._event(kind, generation, said, usage)

    def whole(self, generation: Generation, choices: list[Choice], body: Body, model: str) -> dict[str, Any]:
        said: list[Choice] = []
        for each in choices:
            told = self._choice(each)
            del told["prompt_token_ids"]
            message = {"role": "assistant", "content": told.pop("text"), **_NO_MESSAGE}
            said.append({**told, "message": message, "routed_experts": None})
        around = {
            "prompt_logprobs": None,
            "prompt_token_ids": self.prompt if self._ids_told else None,
            "prompt_text": None,
        }
        return {**self._whole("chat.completion", generation, said, body, model), **around}

    def _id(self, generation: Generation) -> str:
        return generation.request_id


_NO_MESSAGE = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
