"""The mutants. A test looks at every patch, so that none of them outlives what it is about."""

from tests.mutants.of_bus import OF_BUS
from tests.mutants.of_core import OF_CORE
from tests.mutants.of_hands import OF_HANDS
from tests.mutants.patch import Patch

PATCHES: tuple[Patch, ...] = (*OF_BUS, *OF_CORE, *OF_HANDS)
