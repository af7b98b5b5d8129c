"""The picture of an engine's life, drawn from the table it lives by."""

from relight.orchestrator.core.guards import always
from relight.orchestrator.core.table import NEXT


def mermaid() -> str:
    """The table as a Mermaid state diagram. Rows that stay where they are are left out."""
    edges: dict[tuple[str, str], list[str]] = {}
    for (before, fact), rows in NEXT.items():
        for guard, after in rows.items():
            if after is not before:
                why = fact.__name__ if guard is always else f"{fact.__name__} [{guard.__name__}]"
                edges.setdefault((before.value, after.value), []).append(why)
    lines = [
        f"    {before} --> {after}: {', '.join(whys)}" for (before, after), whys in sorted(edges.items())
    ]
    return "\n".join(["```mermaid", "stateDiagram-v2", "    [*] --> NEW", *lines, "```"]) + "\n"


if __name__ == "__main__":
    print(mermaid())
