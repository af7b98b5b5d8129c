"""`python -m tests.journals [--record | --rewrite]`: replay every journal; 1 where a byte differs.

`--record [NAME]` plays the real runs anew. `--rewrite` keeps the inputs and writes what the core of now makes
of them, to be read as a diff.
"""

import argparse
import sys
import time

import anyio

from tests.journals import journal
from tests.journals.replaying import Replay, all_journals, replay
from tests.journals.runs import RUNS, record

SHOWN = 5


def compare(*, rewrite: bool) -> int:
    replays: list[Replay] = []
    began_s = time.monotonic()
    for path in all_journals():
        found = replay(journal.read(path))
        replays.append(found)
        for text in found.differences[:SHOWN]:
            print(f"{path.name}: {text}")
        if rewrite and found.differences:
            path.write_bytes(b"".join(map(journal.written, found.lines)))
            print(f"{path.name}: written anew, {len(found.differences)} lines differ")
    differ = sum(len(each.differences) for each in replays)
    print(
        f"journals: {len(replays)} journals, {sum(each.facts for each in replays):,} facts, "
        f"{sum(each.ticks for each in replays):,} ticks, "
        f"{sum(each.decisions for each in replays):,} decisions, "
        f"{sum(each.compared for each in replays):,} bytes compared in {time.monotonic() - began_s:.1f} s, "
        f"{differ} lines differ"
    )
    return 0 if replays and (rewrite or not differ) else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.journals")
    parser.add_argument("--record", nargs="?", const="", metavar="NAME", help="play the real runs, or one")
    parser.add_argument("--rewrite", action="store_true")
    args = parser.parse_args()
    if args.record is not None:
        chosen = [run for run in RUNS if args.record in ("", run.name)]
        if not chosen:
            parser.error(f"no run {args.record!r}; there are {', '.join(run.name for run in RUNS)}")
        for run in chosen:
            path = anyio.run(record, run)
            print(f"recorded {path.name}: {path.stat().st_size:,} bytes", flush=True)
    return compare(rewrite=args.rewrite)


if __name__ == "__main__":
    sys.exit(main())
