"""Every patch of `make mutants` is about a line that stands in the product, and one of them is found here."""

from pathlib import Path

import pytest

from tests.mutants.__main__ import ROOT, apply, hunt, mutated
from tests.mutants.patches import PATCHES, Patch


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_patch_is_about_a_line_that_stands(patch: Patch) -> None:
    assert (ROOT / patch.path).read_text().count(patch.before) == 1
    assert patch.after != patch.before and "\n" not in patch.before + patch.after


def test_a_patch_that_fits_nowhere_is_refused() -> None:
    with (
        mutated(None) as copy,
        pytest.raises(ValueError, match="has 0 times 'no such line'"),
    ):
        apply(PATCHES[0]._replace(before="no such line"), copy)
    assert not Path(copy).exists()


def test_a_mutant_is_found_and_the_product_is_left_as_it_was() -> None:
    patch = next(each for each in PATCHES if each.name == "a load is a proof of the weights")
    before = (ROOT / patch.path).read_text()
    one = hunt(patch, 30.0)
    assert one.found is not None and "S1" in str(one.found["rule"]), one.said
    assert (ROOT / patch.path).read_text() == before
