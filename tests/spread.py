"""How tests spread over several processes (`-n`): file by file, those that need all cores in one row.

An engine of vLLM or a Ray cluster starts on all cores there are; several at once only make each other late.
"""

from xdist.scheduler import LoadScopeScheduling

ON_ALL_CORES = [
    f"tests/test_{name}.py"
    for name in (
        "demo_vllm",
        "example_grpo",
        "example_fault_tolerance",
        "node_vllm",
        "weights_vllm",
        "node_parts",
        "ray",
        "replay_vllm",
        "replay_openai_vllm",
        "stub_actor",
        "verl_handing",
        "verl_parts",
        "integration_trl",
        "asyncllm_actor",
        "verl",
    )
]
"""Begun in this order, before all others, since they last longest."""


def place(test: str) -> int:
    """Where a test stands in the order; those of equal places stay as they are."""
    file = test.partition("::")[0]
    return ON_ALL_CORES.index(file) if file in ON_ALL_CORES else len(ON_ALL_CORES)


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist tells no types
    """Each file to one process, and those of `ON_ALL_CORES` to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "on all cores" if file in ON_ALL_CORES else file
