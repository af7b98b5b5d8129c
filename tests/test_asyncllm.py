"""Errors of Ray and vLLM are told apart by what they say of the engine, and so are the flags of an order."""

import threading
from pathlib import Path

import pytest

from relight.agents.adapters.asyncllm.client import ENDS
from relight.agents.adapters.asyncllm.losses import Loss, loss_of
from relight.agents.adapters.asyncllm.place import flags_of, name_of
from relight.agents.node.delegated.application import Order
from relight.agents.replay.limits import DEATHS
from relight.events.errors import UsageError


def raised(package: str, *names: str, **fields: object) -> Exception:
    """An error of a class with that last name, over those before it, as if it came from `package`."""
    kind: type[Exception] = Exception
    for name in names:
        kind = type(name, (kind,), {"__module__": f"{package}.exceptions"})
    error = kind("boom")
    for name, value in fields.items():
        setattr(error, name, value)
    return error


DEAD = raised("vllm.v1.engine", "VLLMServerError", "EngineDeadError")


@pytest.mark.parametrize(
    ("error", "loss"),
    [
        (DEAD, Loss.ENGINE),
        (raised("ray", "RayError", "RayTaskError", cause=DEAD), Loss.ENGINE),
        (
            raised(
                "ray",
                "RayError",
                "RayTaskError",
                traceback_str="Traceback\n  …\nvllm.v1.engine.exceptions.EngineDeadError: EngineCore …\n",
            ),
            Loss.ENGINE,
        ),
        (raised("ray", "RayError", "RayActorError", "ActorDiedError"), Loss.ACTOR),
        (raised("ray", "RayError", "RayActorError"), Loss.ACTOR),
        (raised("ray", "RayError", "RayActorError", "ActorUnavailableError"), Loss.AWAY),
        (raised("ray", "RayError", "GetTimeoutError"), Loss.AWAY),
        (ExceptionGroup("two", [ValueError("x"), raised("ray", "RayActorError")]), Loss.ACTOR),
        (raised("ray", "RayError", "RayTaskError", cause=ValueError("max_tokens")), None),
        (raised("vllm.v1.engine", "EngineGenerateError"), None),
        (raised("app", "EngineDeadError"), None),
        (TimeoutError(), None),
    ],
)
def test_an_error_says_what_is_lost(error: BaseException, loss: Loss | None) -> None:
    assert loss_of(error) is loss


def test_what_caused_an_error_counts_and_a_circle_of_causes_ends() -> None:
    outer = RuntimeError("generation failed")
    outer.__cause__ = DEAD
    DEAD.__cause__ = outer
    try:
        assert loss_of(outer) is Loss.ENGINE
    finally:
        DEAD.__cause__ = None


def test_every_loss_interrupts_a_turn_as_a_death_does() -> None:
    assert set(ENDS) == set(Loss)
    assert set(ENDS.values()) <= DEATHS


def order(*command: str, weights: str | None = "/w/7.4") -> Order:
    return Order(
        engine="e0",
        incarnation=3,
        port=8001,
        weights=Path(weights) if weights else None,
        command=command,
        marks={},
        within_s=60.0,
        withdrawn=threading.Event(),
    )


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (("--model", "/w/7.4"), ["--model", "/w/7.4", "--port", "8001", "--host", "127.0.0.1"]),
        (
            ("vllm", "serve", "/w/7.4", "--port=8001", "--host", "0.0.0.0"),
            ["/w/7.4", "--port=8001", "--host", "0.0.0.0"],
        ),
        (
            ("python", "-m", "vllm.entrypoints.openai.api_server", "--model", "/w/7.4", "--port", "8001"),
            ["--model", "/w/7.4", "--port", "8001", "--host", "127.0.0.1"],
        ),
    ],
)
def test_the_flags_of_vllm_serve_come_from_the_orders_command(command: list[str], flags: list[str]) -> None:
    assert flags_of(order(*command)) == flags


def test_a_command_that_would_start_on_other_weights_is_refused() -> None:
    with pytest.raises(UsageError, match=r"the command of e0 has no \{weights\}"):
        flags_of(order("--model", "/models/base"))


def test_a_name_has_its_incarnation() -> None:
    assert name_of("grpo-1", "e0", 3) == "grpo-1.e0.3"
