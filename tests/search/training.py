"""The trainer in the world: its boundaries, exports, runs and faults."""

from collections.abc import Callable, Iterator
from typing import Any

from relight.events.decisions import SyncWeights
from relight.events.facts import TrainerSilent
from relight.events.ids import EngineName
from tests.search import trainer as trainers
from tests.search.parts import Parts
from tests.search.trainer import Trainer
from tests.search.world import BORN, Next, Words, World, told


class Training(Parts):
    def trainer_does(self, world: World, what: Any, act: Callable[[Trainer], trainers.Said]) -> World:
        number = world.trainer

        def compute() -> tuple[int, Words]:
            trainer, said = act(self.trainers[number])
            return self.trainers.number(trainer, trainers.key(trainer)), tuple(map(self.messages.of, said))

        after, said = self._remember(("t", number, what), compute)
        return self._say(world._replace(trainer=after), 2, said)

    def _of_trainer(self, world: World) -> Iterator[Next]:
        trainer = self.trainers[world.trainer]
        hears = world.decisions[2]
        if not trainer.alive:
            yield from self._of_dead_trainer(world, trainer)
            return
        if hears:
            if hears[0] == BORN:
                after = self.trainer_does(
                    told(world, 2, ()),
                    ("born", world.job),
                    lambda each: trainers.caught_up(each, self.mind[world.job]),
                )
            else:
                heard = self.messages[hears[0]]
                after = self.trainer_does(
                    told(world, 2, hears[1:]), ("hear", hears[0]), lambda each: trainers.turn(each, heard)
                )
            yield ("trainer hears", hears[0]), after
        barrier = trainer.barrier
        if barrier.running is not None:
            yield ("trainer has exported",), self._exported(world)
        elif barrier.waiting:
            yield ("trainer exports",), self._exports(world)
        opening = trainers.opening(trainer)
        if opening is not None:
            yield ("trainer opens",), self.trainer_does(world, "open", lambda e: trainers.open_(e, opening))

    def _of_dead_trainer(self, world: World, trainer: Trainer) -> Iterator[Next]:
        run = trainer.barrier.run + 1
        began = self.trainer_does(
            told(world, 2, ()),
            ("fresh", world.job),
            lambda _: trainers.fresh(run, self.mind[world.job], pushes=self.plan.pushes),
        )
        yield ("trainer begins", run), began
        if world.deciding and world.held is None and self._is_watched(world, trainer):
            yield ("trainer is silent",), self._tells_of_trainer(world, trainer)

    def _is_watched(self, world: World, trainer: Trainer) -> bool:
        meta = self.mind[world.job].meta
        return meta.run == trainer.barrier.run and not meta.finished and not meta.trainer_silent

    def _tells_of_trainer(self, world: World, trainer: Trainer) -> World:
        silent = self.messages.of(TrainerSilent(run=trainer.barrier.run, since=0))
        return self._commits(world, self.mind.hear(world.job, silent))

    def _exports(self, world: World) -> World:
        if self.plan.pushes:
            order = self.trainers[world.trainer].barrier.waiting[0]
            world = self._pushed(world, order, version=False)
        return self.trainer_does(world, "begin", trainers.begin)

    def _exported(self, world: World) -> World:
        order = self.trainers[world.trainer].barrier.running
        assert order is not None
        dead: frozenset[tuple[str, int]] = frozenset()
        if self.plan.pushes:
            dead = frozenset(
                (str(member.engine), member.incarnation)
                for member in order.members
                if not self._is_alive(world, member.engine, member.incarnation)
            )
            world = self._pushed(world, order, version=True)
        return self.trainer_does(world, ("end", dead), lambda each: trainers.end(each, dead))

    def _is_alive(self, world: World, engine: EngineName, incarnation: int) -> bool:
        agent = self.agents[world.agents["ab".index(self._node(engine))]]
        return any(each.alive and each.incarnation == incarnation for each in agent.processes)

    def _node(self, engine: EngineName) -> str:
        return next(node.node for node in self.nodes if node.engine == engine)

    def _pushed(self, world: World, order: SyncWeights, *, version: bool, cut_off: bool = False) -> World:
        for member in order.members:
            index = "ab".index(self._node(member.engine))
            agent = self.nodes[index].pushed(
                self.agents[world.agents[index]],
                member.incarnation,
                order.version if version else None,
                cut_off=cut_off,
            )
            world = self._agent_did(world, index, (self.agents.number(agent), ()))
        return world

    def _faults_of_trainer(self, world: World) -> Iterator[Next]:
        trainer = self.trainers[world.trainer]
        if not trainer.alive:
            return
        running = trainer.barrier.running
        hurt = world
        if running is not None and self.plan.pushes:
            hurt = self._pushed(world, running, version=False, cut_off=True)
        if "export" in self._kinds and running is not None:
            yield ("! trainer is cut off",), self.trainer_does(hurt, "close", trainers.close)
            yield ("! export fails",), self.trainer_does(world, "fails", trainers.export_fails)
        if "trainer" not in self._kinds:
            return
        dead = self.trainer_does(hurt, "dies", lambda each: (each._replace(alive=False), ()))
        yield ("! trainer dies",), told(dead, 2, ())
        if world.deciding and world.held is None and self._is_watched(world, trainer):
            yield ("! trainer seems silent",), self._tells_of_trainer(world, trainer)
