"""The replay client's metrics in Prometheus' text format, from one table. Pure.

A name ends in its unit. Labels are bounded: outcomes, reasons and ways are fixed sets, versions and engines
are none of them.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from relight.agents.replay.tally import Book
from relight.events import exposition
from relight.events.exposition import Values

Labels = tuple[str, ...]
Read = Callable[[Book], Mapping[Labels, Values]]
"""A number for each combination of labels; of a histogram how often each value came."""

TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16_384, 65_536)
"""Upper bounds of lengths."""
SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds of breaks: from a survivor that takes over at once to a cold start."""


class Metric(NamedTuple):
    """One metric: how it is read from a book, and what it means."""

    name: str
    kind: Literal["counter", "histogram"]
    help: str
    labels: Labels
    read: Read
    bounds: tuple[float, ...] = ()


def _one(read: Callable[[Book], Values]) -> Read:
    return lambda book: {(): read(book)}


def _turns(book: Book) -> Mapping[Labels, Values]:
    return {(outcome, _yes(cut)): count for (outcome, cut), count in book.turns.items()}


def _replays(book: Book) -> Mapping[Labels, Values]:
    return {(reason, way): count for (reason, way), count in book.replays.items()}


def _lengths(book: Book) -> Mapping[Labels, Values]:
    return {(_yes(cut),): lengths for cut, lengths in book.lengths.items()}


def _yes(value: bool) -> str:
    return "yes" if value else "no"


METRICS: tuple[Metric, ...] = (
    Metric(
        "relight_replay_turns_total",
        "counter",
        "Turns that ended, by how and by whether a replay was needed.",
        ("outcome", "interrupted"),
        _turns,
    ),
    Metric(
        "relight_replay_suspect_turns_total",
        "counter",
        "Turns that were in flight when two engines died.",
        (),
        _one(lambda book: book.suspects),
    ),
    Metric(
        "relight_replay_replays_total",
        "counter",
        "Attempts after the first, by why the one before ended and how they went on.",
        ("reason", "way"),
        _replays,
    ),
    Metric(
        "relight_replay_tokens_total",
        "counter",
        "Tokens in the turns that ended.",
        (),
        _one(lambda book: book.tokens),
    ),
    Metric(
        "relight_replay_kept_tokens_total",
        "counter",
        "Tokens that continuations did not have to sample again.",
        (),
        _one(lambda book: book.kept),
    ),
    Metric(
        "relight_replay_regenerated_tokens_total",
        "counter",
        "Tokens that had come and were dropped.",
        (),
        _one(lambda book: book.regenerated),
    ),
    Metric(
        "relight_replay_mixed_version_turns_total",
        "counter",
        "Complete turns with tokens of more than one version of the weights.",
        (),
        _one(lambda book: book.mixed),
    ),
    Metric(
        "relight_replay_unknown_version_turns_total",
        "counter",
        "Complete turns with tokens of a version that nobody knows.",
        (),
        _one(lambda book: book.unknown),
    ),
    Metric(
        "relight_replay_sample_tokens",
        "histogram",
        "Lengths of complete samples, by whether a replay was needed: the bias of replays.",
        ("interrupted",),
        _lengths,
        TOKENS,
    ),
    Metric(
        "relight_replay_gap_seconds",
        "histogram",
        "From a break to the turn's next token.",
        (),
        _one(lambda book: book.gaps_s),
        SECONDS,
    ),
)
"""Every metric of the client."""


def text(book: Book) -> str:
    """All of them, in the text format of version 0.0.4."""
    return exposition.text(
        exposition.Family(
            metric.name, metric.kind, metric.help, metric.labels, metric.read(book), metric.bounds
        )
        for metric in METRICS
    )
