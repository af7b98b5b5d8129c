"""One attempt at a text: the engine's own answer, or what an engine generates on behind a seam."""

from collections.abc import Callable

from relight.agents.replay.strand import WHOLE
from relight.agents.replay.stream import Flight
from relight.agents.replay.texts import relay, words
from relight.agents.replay.texts.seam import Seam
from relight.agents.replay.texts.words import Said
from relight.agents.replay.wire import Chunk, ScoredChunk, ScoredDelta

END = ScoredChunk([Said(index=0, part="end")])


class TextFlight(Flight):
    """`seam` is there while the text around it is still to be spelled. `streamed`: the body is events."""

    def __init__(self, *, idle_s: float | None, streamed: bool = True) -> None:
        super().__init__(ranked=False, idle_s=idle_s)
        self.reads: Callable[[bytes], ScoredChunk] = words.read
        self.seam: Seam | None = None
        self._streamed = streamed
        self._finished = False

    async def read(self) -> list[Chunk]:
        if not self._streamed:
            return [self._whole(await self.rest())]
        chunks = await super().read()
        if self.seam is None:
            return chunks
        return [await self._mended(chunk) for chunk in chunks]

    def _decode(self, payload: bytes) -> Chunk:
        chunk = self.reads(payload)
        self._finished = self._finished or any(choice.finish_reason in WHOLE for choice in chunk.choices)
        return chunk

    def _done(self) -> Chunk:
        return END if self._finished else super()._done()

    def _whole(self, content: bytes) -> Chunk:
        self.reads = relay.body
        return self._chunk(content)

    async def _mended(self, chunk: Chunk) -> Chunk:
        told: list[ScoredDelta] = [
            await self._spelled(said) for said in chunk.choices if isinstance(said, Said)
        ]
        return ScoredChunk(told, chunk.request_id, chunk.error)

    async def _spelled(self, said: Said) -> Said:
        if self.seam is None or said.part != "tokens":
            return said
        mended = await self.seam.mended(said, self)
        if self.seam.passed:
            self.seam = None
        return mended
