"""Where an engine may be on this node, and which engines of other nodes are here.

A place is what one engine takes up: a spare slot, or that of an own engine, which is free while the engine
is at another node and nothing of it is left here. Invariant: who takes which place is on disk before it is
started there, with its definition, so that a successor owns it whatever has become of the node file.
"""

from collections.abc import Callable, Collection, Iterator

import msgspec

from relight.agents.node.config import DEVICES, Engine, NodeFile, Spare, device
from relight.agents.node.errors import StartFailure
from relight.agents.node.record import Store
from relight.events.ids import EngineName


class Stay(msgspec.Struct, frozen=True, kw_only=True):
    """One engine that is not at its own place."""

    engine: Engine
    """As it was defined when it came."""
    place: str


class Stays(msgspec.Struct, frozen=True, kw_only=True):
    """What is on disk."""

    engines: dict[EngineName, Stay] = {}


class Places:
    """The places of one node. `is_gone` says of an own engine that nothing of it is left here."""

    def __init__(self, file: NodeFile, store: Store, *, is_gone: Callable[[EngineName], bool]) -> None:
        self._node = file.node
        self._own = {engine.name: engine for engine in file.engines}
        self._spare: Spare | None = file.spare
        self._may_come = file.spare.engines if file.spare else ()
        self._store = store
        self._is_gone = is_gone
        self._stays = dict(store.stays(Stays, Stays()).engines)
        self.elsewhere: frozenset[EngineName] = frozenset()
        """Engines that the orchestrator has at other nodes."""

    @property
    def here(self) -> tuple[Engine, ...]:
        """Every engine of this node, as it is to be run here: its own, and those that came."""
        return tuple(self.engine(name) for name in (*self._own, *self.guests))

    @property
    def guests(self) -> tuple[EngineName, ...]:
        """Engines of other nodes that are here."""
        return tuple(name for name in self._stays if name not in self._own)

    @property
    def delegated(self) -> tuple[EngineName, ...]:
        """Engines that an application starts here, or would start."""
        engines = (*self.here, *self._may_come)
        return tuple(dict.fromkeys(each.name for each in engines if each.launcher == "delegated"))

    @property
    def each(self) -> str:
        """What an engine takes up here, for people."""
        return self._spare.each if self._spare else ""

    def engine(self, name: EngineName) -> Engine:
        """The engine as it is to be run at the place that it has, or any engine that nobody defined."""
        stay = self._stays.get(name)
        defined = self._defined(name, stay.engine.part if stay else None)
        if stay is None:
            return defined or Engine(name=name)
        return self._at(defined or stay.engine, stay.place)

    def _defined(self, name: EngineName, part: int | None) -> Engine | None:
        """As the node file has it: of one that may come that part, or any."""
        if name in self._own:
            return self._own[name]
        fit = (each for each in self._may_come if each.name == name and part in (None, each.part))
        return next(fit, None)

    @property
    def take_parts(self) -> bool:
        """Whether parts of engines over several nodes may come: each part of those of which any may."""
        known = {(engine.name, engine.part) for engine in self._may_come}
        counts = [(engine.name, engine.parts) for engine in self._may_come if isinstance(engine.parts, int)]
        wanted = {(name, part) for name, count in counts if count > 1 for part in range(count)}
        return bool(wanted) and wanted <= known

    def free(self) -> int:
        """How many more engines can be taken."""
        return sum(1 for _ in self._free())

    def take(self, name: EngineName, part: int | None = 0, *, avoid: Collection[str] = ()) -> Engine:
        """Give that part of `name` (None: any) a place, unless it has one; the engine as it is run there.

        From a place with a device of `avoid` an engine of which nothing is left here goes to one without, if
        there is a free one. Raises StartFailure.
        """
        if not self._has_place(name, part):
            defined = self._defined(name, part)
            if defined is None:
                raise StartFailure("undefined", self._without(name, part), retryable=False)
            self._keep(defined, self._place_for(defined, avoid))
        elif device(engine := self.engine(name)) in avoid and self._is_gone(name):
            better = (place for place in self._free() if device(self._at(engine, place)) not in avoid)
            if (place := next(better, None)) is not None:
                self._keep(self._defined(name, part) or engine, place)
        self.elsewhere -= {name}
        return self.engine(name)

    def _has_place(self, name: EngineName, part: int | None) -> bool:
        if name in self._own:
            return self._spare is None or not (self._is_away(name) or self._is_taken_from(name))
        return name in self._stays and part in (None, self._stays[name].engine.part)

    def _is_taken_from(self, name: EngineName) -> bool:
        """Whether another came while this own engine was away: all that a later life knows of that."""
        mine = self._stays[name].place if name in self._stays else name
        stayed = (other for other, stay in self._stays.items() if other != name and stay.place == mine)
        return self._is_gone(name) and not all(map(self._is_own_and_away, stayed))

    def _without(self, name: EngineName, part: int | None) -> str:
        known = ", ".join(dict.fromkeys((*self._own, *(each.name for each in self._may_come)))) or "none"
        what = f"part {part} of {name}" if part else name
        return f"the node file of {self._node} has no definition of {what}; it has {known}"

    def _place_for(self, engine: Engine, avoid: Collection[str]) -> str:
        name = engine.name
        if name in self._stays and name not in self._own:  # for another part of it
            return self._stays[name].place
        free = list(self._free())
        if not free:
            held = ", ".join(sorted({*self._own, *self._stays} - self.elsewhere)) or "none"
            raise StartFailure("no-spare", f"node {self._node} has no place left; engines there: {held}")
        return min(free, key=lambda place: (device(self._at(engine, place)) in avoid, place != name))

    def leave(self, name: EngineName) -> None:
        """A guest has gone, and its place is free."""
        self._stays.pop(name, None)
        self._save()

    def _keep(self, engine: Engine, place: str) -> None:
        self._stays.pop(engine.name, None)
        if place != engine.name:
            self._stays[engine.name] = Stay(engine=engine, place=place)
        self._save()

    def _save(self) -> None:
        self._store.keep_stays(Stays(engines=self._stays))

    def _is_away(self, name: EngineName) -> bool:
        return name in self.elsewhere and self._is_gone(name)

    def _free(self) -> Iterator[str]:
        if self._spare is None:
            return
        taken = {stay.place for name, stay in self._stays.items() if not self._is_own_and_away(name)}
        taken |= {name for name in self._own if name not in self._stays and not self._is_away(name)}
        yield from (place for place in self._all(self._spare) if place not in taken)

    def _is_own_and_away(self, name: EngineName) -> bool:
        return name in self._own and self._is_away(name)

    def _all(self, spare: Spare) -> Iterator[str]:
        yield from (_slot(index) for index in range(spare.slots))
        yield from self._own

    def _at(self, engine: Engine, place: str) -> Engine:
        """`engine` with the devices of `place` in place of its own."""
        devices = self._devices_of(place)
        if not devices:
            return engine
        named = [variable for variable in DEVICES if variable in engine.env] or [next(iter(devices))]
        plain = {name: value for name, value in engine.env.items() if name not in DEVICES}
        value = next(iter(devices.values()))
        return msgspec.structs.replace(engine, env={**plain, **dict.fromkeys(named, value)})

    def _devices_of(self, place: str) -> dict[str, str]:
        owner = self._own.get(EngineName(place))
        if owner is not None:
            return {name: owner.env[name] for name in DEVICES if name in owner.env}
        slots = self._spare.devices if self._spare else ()
        mine = next((devices for index, devices in enumerate(slots) if _slot(index) == place), None)
        return {DEVICES[0]: mine} if mine else {}


def _slot(index: int) -> str:
    return f"spare {index}"  # no engine's name has a space
