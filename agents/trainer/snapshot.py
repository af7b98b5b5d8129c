"""SnapshotSync: versions of the weights as directories that engines pull from or are started on.

A version is written into `DIR/RUN.STEP-RANDOM.partial`, fsynced, renamed to `DIR/RUN.STEP`, and never
changed again. So a directory that bears a version's name is whole, whatever was killed when; and a version
that stands is not written twice. The last `keep` stay, and every one that an engine was told to load or to
start on, for as long as it may do so.
"""

import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from relight.agents import snapshot
from relight.agents.snapshot import MANIFEST, WEIGHTS, File, Manifest, SnapshotError
from relight.agents.trainer import lockstep, places, shards
from relight.agents.trainer.sync import Context, Left
from relight.agents.trainer.tensors import Arrays, Named, origin
from relight.events import codec
from relight.events.decisions import SyncWeights
from relight.events.errors import UsageError
from relight.events.facts import WeightsPublished
from relight.events.values import Member, Weights
from relight.events.version import Version

log = logging.getLogger(__name__)

PARTIAL = ".partial"
SHARD_BYTES = 5_000_000_000
"""The size that Hugging Face has written for years: few files, and host memory for one of them."""


class SnapshotSync:
    """Writes full weights to a directory that every engine's agent reaches.

    `model`: a torch module (its `config` is written too), a mapping of names to arrays, or a function that
    returns one. `config`: a mapping (becomes `config.json`) or a directory whose files that are no weights
    are copied. `tokenizer`: something with `save_pretrained`, or such a directory. `shared`: whether engines
    on other machines reach the directory; None judges by its file system. `publish_every`: beside a transport
    that pushes, only each such sync is followed by a snapshot, the first one included.

    With several ranks each calls a function that is given as `model`, and what rank 0 gets is written;
    tensors of a module that are spread over the ranks (FSDP) are gathered one by one.
    """

    pushes = False
    subset = True

    def __init__(  # noqa: PLR0913 -- a public signature
        self,
        model: Any | Arrays | Callable[[], Arrays],
        directory: str | os.PathLike[str],
        *,
        keep: int = 2,
        publish_every: int = 1,
        shared: bool | None = None,
        max_shard_bytes: int = SHARD_BYTES,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        tokenizer: Any = None,
    ) -> None:
        if keep < 2:
            raise UsageError(f"keep={keep}: at least 2 versions must stay, one may be loading")
        if publish_every < 1:
            raise UsageError(f"publish_every={publish_every} must be 1 or more")
        if max_shard_bytes < 1:
            raise UsageError(f"max_shard_bytes={max_shard_bytes} must be positive")
        self.directory = Path(directory).absolute()
        self._origin = origin(model)
        self.publish_every = publish_every
        self._shared = shared
        self._keep = keep
        self._max_shard_bytes = max_shard_bytes
        self._config = config
        self._tokenizer = tokenizer
        self._standing: dict[Version, Weights] = {}
        self._pruning: threading.Thread | None = None
        self._context = Context()
        self._passed_over = publish_every - 1
        self._joint: Version | None = None
        """A version that the other ranks were told to export with this one."""

    def bind(self, context: Context) -> None:
        self._context = context

    def is_due(self) -> bool:
        """Whether this sync is one of those that a snapshot follows. Asked once a sync."""
        self._passed_over += 1
        return self._passed_over >= self.publish_every

    def joint(self, version: Version) -> bool:
        """Unless it stands, in which case nobody is asked for anything."""
        self._joint = version if self._stands(version) is None else None
        return self._joint is not None

    def join(self, order: SyncWeights, left: Left) -> None:
        lockstep.follow(self._context.ranks, self._origin.tensors, max_shard_bytes=self._max_shard_bytes)

    def exportable(self, version: Version) -> bool:
        return True

    def fingerprint(self) -> Hashable | None:
        return self._origin.fingerprint()

    def export(self, order: SyncWeights, left: Left) -> WeightsPublished:
        """Publish `order.version`, written unless it stands.

        Raises SnapshotError, with nothing left behind; UsageError where members do not reach the directory.
        """
        weights = self.write(order.version, members=order.members)
        return WeightsPublished(
            sync=order.sync, version=weights.version, uri=weights.uri, digest=weights.digest
        )

    def write(self, version: Version, *, members: Sequence[Member] = ()) -> Weights:
        """The weights of `version`, for `members` to read, written unless they stand. Raises as `export`."""
        known = None if self._joint == version else self._stands(version)
        self._joint = None
        if known is not None:
            self._check_reach(members)
            return known
        place = self.directory / str(version)
        digest = self._written(place, version, members)
        self._standing[version] = Weights(version=version, uri=str(place), digest=digest)
        self._passed_over = 0
        self._prune_aside()
        return self._standing[version]

    def _stands(self, version: Version) -> Weights | None:
        """What stands of `version`, whole as far as sizes tell where this life wrote it; agents hash it."""
        place = self.directory / str(version)
        known = self._standing.get(version)
        if known is not None and snapshot.looks_whole(place, known.digest):
            return known
        digest = self._intact(place, version)
        if digest is None:
            return None
        self._standing[version] = Weights(version=version, uri=str(place), digest=digest)
        return self._standing[version]

    def _ready(self, members: Sequence[Member]) -> list[Named]:
        self._check_reach(members)
        return self._origin.tensors()

    def _check_reach(self, members: Sequence[Member]) -> None:
        why = places.told(self.directory, members) if self._shared is None else None
        if why is not None:
            raise UsageError(why)

    def close(self) -> None:
        """Wait for the removal of old versions."""
        if self._pruning is not None:
            self._pruning.join()

    def _intact(self, place: Path, version: Version) -> str | None:
        """The digest of what stands at `place`; None where nothing whole does."""
        if not place.exists():
            return None
        try:
            manifest = snapshot.verify(place)
        except SnapshotError as error:
            log.warning("snapshot is damaged and written again", extra={"place": place, "error": str(error)})
            return None
        return snapshot.digest_of(manifest) if manifest.version == version else None

    def _written(self, place: Path, version: Version, members: Sequence[Member]) -> str:
        self.close()
        partial = place.with_name(f"{version}-{secrets.token_hex(4)}{PARTIAL}")
        together = lockstep.leading(self._context.ranks, lambda: self._ready(members))
        try:
            with together as (tensors, go):
                self._make_room(version, sum(tensor.size for tensor in tensors))
                partial.mkdir()
                manifest = self._fill(partial, version, tensors, go)
            if place.exists():  # damaged, or it would not be written again
                place.replace(partial.with_name(f"{partial.stem}-old{PARTIAL}"))
            partial.replace(place)
            shards.sync_directory(self.directory)
        except OSError as error:
            raise SnapshotError(f"snapshot {version} cannot be written to {partial}: {error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # gone by now, unless something was raised
        return snapshot.digest_of(manifest)

    def _make_room(self, version: Version, size: int) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for path in self.directory.glob(f"*{PARTIAL}"):
            found = _version(path.name.partition("-")[0])
            if found is not None and found.run <= version.run:  # left by a life that is over
                shutil.rmtree(path, ignore_errors=True)
        free = shutil.disk_usage(self.directory).free
        if free < size:
            raise SnapshotError(
                f"snapshot {version} needs {size} bytes, {self.directory} has {free} free:"
                " make room or lower `keep`"
            )

    def _fill(
        self, partial: Path, version: Version, tensors: list[Named], go: Callable[[], None]
    ) -> Manifest:
        if not tensors:
            raise SnapshotError(f"snapshot {version}: the model has no tensors")
        files = shards.write(partial, tensors, max_shard_bytes=self._max_shard_bytes, go=go)
        files += self._side_files(partial, {file.name for file in files})
        manifest = Manifest(
            version=version,
            files=tuple(sorted(files)),
            tensors={tensor.name: tensor.form for tensor in sorted(tensors, key=lambda tensor: tensor.name)},
        )
        shards.write_durably(partial / MANIFEST, snapshot.encoded(manifest))
        shards.sync_directory(partial)
        return manifest

    def _side_files(self, partial: Path, written: set[str]) -> list[File]:
        """Config and tokenizer: what is given explicitly replaces what the model brings."""
        self._origin.side_files(partial)
        for side in (self._config, self._tokenizer):
            if side is None:
                continue
            if isinstance(side, Mapping):
                (partial / "config.json").write_text(codec.to_json(cast(object, side)))
            elif isinstance(side, str | os.PathLike):
                _copy_sides(Path(cast("str | os.PathLike[str]", side)), partial)
            else:
                side.save_pretrained(partial)
        sides = sorted(path for path in partial.iterdir() if path.is_file() and path.name not in written)
        for path in sides:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return [snapshot.hashed(path) for path in sides]

    def _prune_aside(self) -> None:
        """Remove all but the newest versions, and those in use, in a thread: unlinking takes a while."""
        self._pruning = threading.Thread(target=self._prune, name="relight-prune", daemon=True)
        self._pruning.start()

    def _prune(self) -> None:
        try:
            found = [_version(path.name) for path in self.directory.iterdir()]
            used = self._context.in_use()
            for version in sorted(version for version in found if version is not None)[: -self._keep]:
                if version in used:  # it goes with a later one
                    continue
                self._standing.pop(version, None)
                doomed = self.directory / f"{version}-{secrets.token_hex(4)}{PARTIAL}"
                (self.directory / str(version)).replace(doomed)
                shutil.rmtree(doomed)
        except OSError as error:
            log.warning("old snapshots stay", extra={"directory": self.directory, "error": str(error)})


def adopt(directory: Path, version: Version) -> str:
    """The digest of weights that the application wrote: of their manifest, made now where there is none.

    A manifest of an older run is replaced, in one step, by that of `version`, when every file was read and is
    what it says. A load that has read the old one goes on with the same files; one that begins later with the
    old digest is refused before its engine is touched, and a start ends. Both are asked for again, with what
    is published next: until then, also where this process dies first, nothing is loaded from here.

    Raises SnapshotError, also where the manifest is of a newer run or of another step of this one, and where
    files are not those of an older run.
    """
    if not (directory / MANIFEST).exists():
        return _described(directory, snapshot.describe(directory, version))
    found = snapshot.read_manifest(directory)
    if found.version == version:
        return snapshot.digest_of(found)
    if found.version.run >= version.run:
        raise SnapshotError(f"{directory} holds version {found.version}, not {version}")
    try:
        found = snapshot.verify(directory)
    except SnapshotError as error:
        raise SnapshotError(
            f"{directory} is not what was published as {found.version} ({error}):"
            f" where it was written again, remove its {MANIFEST} first"
        ) from error
    return _described(directory, msgspec.structs.replace(found, version=version))


def _described(directory: Path, manifest: Manifest) -> str:
    """The digest of `manifest`, which stands in `directory` from now on. Raises SnapshotError."""
    partial = directory / f"{MANIFEST}{PARTIAL}"
    try:
        partial.unlink(missing_ok=True)
        shards.write_durably(partial, snapshot.encoded(manifest))
        partial.replace(directory / MANIFEST)
        shards.sync_directory(directory)
    except OSError as error:
        raise SnapshotError(f"{directory}: no manifest can be written into it: {error}") from error
    return snapshot.digest_of(manifest)


def _version(name: str) -> Version | None:
    try:
        return Version.parse(name)
    except ValueError:
        return None


def _copy_sides(source: Path, target: Path) -> None:
    """Files of a model directory that are no weights and no index of any."""
    if not source.is_dir():
        raise SnapshotError(f"{source}: no such directory to copy config or tokenizer from")
    for path in sorted(source.iterdir()):
        weights = path.suffix in WEIGHTS or path.name.endswith(".index.json") or path.name == MANIFEST
        if path.is_file() and not weights:
            shutil.copyfile(path, target / path.name)
