"""Metrics in Prometheus' text format, version 0.0.4: what several of our processes tell on `/metrics`."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4"

Values = Counter[int] | Counter[float] | int | float
"""A number; of a histogram how often each value came."""


class Family(NamedTuple):
    """One metric and what was read of it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...]
    samples: Mapping[tuple[str, ...], Values]
    """By the values of `labels`."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets."""


def text(families: Iterable[Family]) -> str:
    """All of them, each combination of labels on lines of its own, in their order."""
    return "".join(line + "\n" for family in families for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    yield f"# HELP {family.name} {family.help}"
    yield f"# TYPE {family.name} {family.kind}"
    for values, found in sorted(family.samples.items()):
        pairs = list(zip(family.labels, values, strict=True))
        if isinstance(found, (int, float)):
            yield f"{family.name}{_named(pairs)} {_number(found)}"
        else:
            yield from _histogram(family, pairs, found)


def _histogram(
    family: Family, pairs: list[tuple[str, str]], found: Counter[int] | Counter[float]
) -> Iterator[str]:
    total = sum(found.values())
    for bound in family.bounds:
        below = sum(count for value, count in found.items() if value <= bound)
        yield f"{family.name}_bucket{_named([*pairs, ('le', f'{bound:g}')])} {below}"
    yield f"{family.name}_bucket{_named([*pairs, ('le', '+Inf')])} {total}"
    yield f"{family.name}_sum{_named(pairs)} {sum(value * count for value, count in found.items()):g}"
    yield f"{family.name}_count{_named(pairs)} {total}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.15g}"


def _named(pairs: Iterable[tuple[str, str]]) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in pairs)
    return f"{{{inside}}}" if inside else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
