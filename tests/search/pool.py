"""Values as small numbers: equal ones get the same, so that states are tuples of numbers.

Ids of decisions are renamed to what they ask for, deadlines to one that has not passed, and reasons, causes
and serials left out: nothing may depend on them, and states that differ in nothing else are one state.
"""

from typing import Any, Generic, TypeVar

import msgspec

from relight.events import codec
from relight.events.decisions import Alarm, Decision, LoadWeights, SyncWeights
from relight.events.facts import Fact, NodeSilent, TrainerSilent
from relight.events.ids import DecisionId, SyncId

T = TypeVar("T")
Message = Decision | Fact

NOW = 1_000_000_000
"""Bus time in ms. It stands still; deadlines pass one by one, in any order."""
ARMED = NOW + 1_000_000
"""A time that has not come yet."""

replace = msgspec.structs.replace


class Pool(Generic[T]):
    """Numbers for values, from 1: 0 is none."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._values: list[Any] = [None]

    def number(self, value: T, key: Any = None) -> int:
        key = value if key is None else key
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._values)
            self._values.append(value)
        return number

    def __getitem__(self, number: int) -> T:
        return self._values[number]  # type: ignore[no-any-return]


class Messages(Pool[Message]):
    """Facts and decisions as they travel."""

    def of(self, message: Message) -> int:
        return self.number(message, codec.to_json(message))


_WHAT = ("engine", "incarnation", "node", "run", "version", "then")


def plain(message: Any, syncs: dict[SyncId, SyncId]) -> Any:
    """The message with nothing in it that only tells one asking from another. `syncs` renames new ids."""
    if isinstance(message, NodeSilent | TrainerSilent):
        return replace(message, since=0)
    if not isinstance(message, Decision):
        return message
    changes: dict[str, Any] = {"reason": "", "cause": None, "recovery": None}
    if isinstance(message, SyncWeights | LoadWeights) and message.sync in syncs:
        changes["sync"] = syncs[message.sync]
    if hasattr(message, "deadline"):
        changes["deadline"] = ARMED
    if isinstance(message, Alarm):
        changes["detail"] = ""
    told = [getattr(message, name, None) for name in _WHAT]
    what = ".".join(str(each) for each in (changes.get("sync"), *told) if each is not None)
    changes["id"] = DecisionId(f"{message.epoch}-{type(message).__name__}:{what}")
    return replace(message, **changes)
