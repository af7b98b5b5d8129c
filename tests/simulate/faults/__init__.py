"""What goes wrong, and when: each kind of fault as one function that says whether it has happened."""

from tests.simulate.faults.bus import OF_BUS
from tests.simulate.faults.engines import OF_ENGINES
from tests.simulate.faults.minds import OF_MINDS
from tests.simulate.faults.nodes import OF_NODES
from tests.simulate.faults.people import OF_PEOPLE
from tests.simulate.faults.trainers import OF_TRAINERS

FAULTS = {**OF_ENGINES, **OF_NODES, **OF_MINDS, **OF_TRAINERS, **OF_BUS, **OF_PEOPLE}
"""By kind."""
