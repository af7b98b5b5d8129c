"""The orchestrator in the world: it reads, commits, dies, loses a reply or freezes."""

from collections.abc import Iterator

from tests.search.parts import Parts
from tests.search.world import Next, World


class Deciding(Parts):
    def _takes_over(self, world: World) -> World:
        epoch = world.top + 1
        done = self.mind.take_over(world.job, epoch, world.stamp)
        return self._commits(world._replace(top=epoch, deciding=True), done)

    def _reads(self, world: World) -> World:
        done = self.mind.hear(world.job, world.facts[0])
        if done.ended:
            return world._replace(deciding=False)
        return self._commits(world._replace(facts=world.facts[1:]), done, heard=world.facts[0])

    def _commits_late(self, world: World) -> World:
        assert world.held is not None
        _, epoch, done = world.held
        world = world._replace(held=None)
        return self._commits(world, done) if self.accepts(world, epoch) else world

    def _faults_of_mind(self, world: World) -> Iterator[Next]:
        yield ("! orchestrator dies",), world._replace(deciding=False)
        if not world.facts:
            return
        done = self.mind.hear(world.job, world.facts[0])
        if done.ended:
            return
        read = world._replace(facts=world.facts[1:])
        if done.half != done.state:
            yield (
                ("! orchestrator dies before its records", world.facts[0]),
                self._commits(read, done, heard=world.facts[0], half=True)._replace(deciding=False),
            )
        committed = self._commits(read, done, heard=world.facts[0])
        yield ("! reply is lost", world.facts[0]), committed._replace(held=("lost", 0, done))
        frozen = ("old", self.mind[world.job].epoch, done)
        yield ("! orchestrator freezes", world.facts[0]), world._replace(deciding=False, held=frozen)
