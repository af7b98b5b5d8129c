"""The rollout: two requests at the same time through `relight.ReplayClient`, one in each mode."""

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any

import anyio
import msgspec

import relight
from relight.orchestrator.cli.demo import reports
from relight.orchestrator.cli.demo.evidence import MODES, Attempt, Mode, Piece, Plan, Turn

SESSION = "demo"
"""One session for both: they are sent to the same engine, however many there are."""


def sampling(max_tokens: int) -> dict[str, Any]:
    """Greedy, with the logprob of each sampled token, and of exactly that length."""
    return {"max_tokens": max_tokens, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}


def read(path: Path) -> Plan:
    """The plan as the demo wrote it."""
    return msgspec.json.decode(path.read_bytes(), type=Plan)


@asynccontextmanager
async def callers(bus: str, *, job: str) -> AsyncGenerator[dict[Mode, relight.ReplayClient]]:
    """A client for each mode, open and with its routes read: both requests then begin at the same moment."""
    async with (
        relight.ReplayClient(bus, job=job, mode="restart") as restart,
        relight.ReplayClient(bus, job=job, mode="continue") as continued,
    ):
        yield {"restart": restart, "continue": continued}


async def both(clients: dict[Mode, relight.ReplayClient], requests: Plan, pipe: IO[bytes]) -> None:
    """Send both, report each piece as it comes and each turn; a call that fails is reported too."""
    async with anyio.create_task_group() as tasks:
        for mode in MODES:
            tasks.start_soon(_one, clients[mode], requests, mode, pipe)


async def _one(client: relight.ReplayClient, requests: Plan, mode: Mode, pipe: IO[bytes]) -> None:
    params = sampling(requests.max_tokens)
    try:
        async with client.stream(requests.prompts[mode], params, session=SESSION) as pieces:
            async for piece in pieces:
                reports.tell(pipe, reports.Got(piece=_seen(mode, piece)))
        reports.tell(pipe, reports.Returned(turn=_told(mode, pieces.turn)))
    except relight.ReplayError as error:
        reports.tell(pipe, reports.Broke(mode=mode, error=str(error)))


def _seen(mode: Mode, piece: Any) -> Piece:
    return Piece(
        mode=mode,
        engine=piece.engine,
        incarnation=piece.incarnation,
        attempt=piece.attempt,
        token_ids=tuple(piece.token_ids),
        logprobs=tuple(piece.logprobs or ()),
        at_ms=time.monotonic() * 1000.0,
    )


def _told(mode: Mode, turn: Any) -> Turn:
    return Turn(
        mode=mode,
        token_ids=tuple(turn.token_ids),
        logprobs=tuple(turn.logprobs or ()),
        finish_reason=turn.finish_reason,
        versions=tuple((str(span.version), span.start, span.end) for span in turn.versions),
        attempts=tuple(
            Attempt(
                engine=attempt.engine,
                incarnation=attempt.incarnation,
                request_id=attempt.request_id,
                kept=attempt.kept,
                ended=attempt.reason,
            )
            for attempt in turn.attempts
        ),
    )
