"""A gateway for tests, in front of stub engines, and OpenAI's own client in front of it."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio
import openai

from relight.agents.replay.gateway import Settings, serve
from tests.replay_job import JOB

WITHIN_S = 30.0
MESSAGES: Any = [{"role": "user", "content": "Where is Zürich?"}]


@asynccontextmanager
async def gateway(url: str, **settings: Any) -> AsyncGenerator[str]:
    """A gateway's address; it drains when the block is left."""
    async with anyio.create_task_group() as tasks:

        async def run(*, task_status: Any) -> None:
            chosen = Settings(**{"port": 0, **settings})
            await serve(bus_url=url, job=JOB, settings=chosen, task_status=task_status)

        port = await tasks.start(run)
        yield f"http://127.0.0.1:{port}"
        tasks.cancel_scope.cancel()


def client_of(address: str, **options: Any) -> openai.AsyncOpenAI:
    """OpenAI's client as it is, with its own retries off: a replay must not be theirs."""
    return openai.AsyncOpenAI(**{"base_url": f"{address}/v1", "api_key": "none", "max_retries": 0, **options})


class Told(NamedTuple):
    """What one answer says, streamed or whole, in the order of its events."""

    text: str
    token_ids: list[int]
    logprobs: list[Any]
    finish_reasons: list[str]
    roles: list[str]
    ids: set[str]
    usages: list[dict[str, Any]]

    @property
    def said(self) -> tuple[Any, ...]:
        """What does not depend on when and by whom it was said."""
        return self.text, self.token_ids, self.logprobs, self.finish_reasons, self.roles, self.usages


async def told(events: AsyncIterator[Any]) -> Told:
    """Collect a stream of chunks of either endpoint."""
    texts: list[str] = []
    gathered = Told("", [], [], [], [], set(), [])
    async for event in events:
        gathered.ids.add(event.id)
        if event.usage is not None:
            gathered.usages.append(counts(event.usage))
        for choice in event.choices:
            delta = getattr(choice, "delta", None)
            texts.append((choice.text if delta is None else delta.content) or "")
            if delta is not None and delta.role is not None:
                gathered.roles.append(delta.role)
            gathered.token_ids.extend(choice.model_extra.get("token_ids") or [])
            gathered.logprobs.extend(entries(choice.logprobs))
            if choice.finish_reason is not None:
                gathered.finish_reasons.append(choice.finish_reason)
    return gathered._replace(text="".join(texts))


def whole(answer: Any) -> Told:
    """The same of an answer that is not streamed."""
    (choice,) = answer.choices
    message = getattr(choice, "message", None)
    return Told(
        choice.text if message is None else message.content,
        choice.model_extra.get("token_ids") or [],
        entries(choice.logprobs),
        [choice.finish_reason],
        [] if message is None else [message.role],
        {answer.id},
        [counts(answer.usage)],
    )


def entries(logprobs: Any) -> list[Any]:
    """One entry a token, in whatever shape the endpoint gives them."""
    if logprobs is None:
        return []
    if getattr(logprobs, "content", None) is not None:
        return [entry.model_dump() for entry in logprobs.content]
    parts = (logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)
    return list(zip(*parts, strict=True))


def counts(usage: Any) -> dict[str, Any]:
    return {name: getattr(usage, name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


async def ask(client: openai.AsyncOpenAI, kind: str, *, streamed: bool, **options: Any) -> Told:
    """One greedy answer with everything in it that may go wrong over a seam."""
    extra = {"return_token_ids": True, **options.pop("extra_body", {})}
    common: dict[str, Any] = {"max_tokens": 100, "temperature": 0, "extra_body": extra, **options}
    if streamed:
        common |= {"stream": True, "stream_options": {"include_usage": True}}
    if kind == "chat":
        answer: Any = await client.chat.completions.create(
            messages=MESSAGES, logprobs=True, top_logprobs=1, **common
        )
    else:
        answer = await client.completions.create(prompt=kind, logprobs=1, **common)
    return await told(answer) if streamed else whole(answer)
