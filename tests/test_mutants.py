"""Every patch of `make mutants` is about a line that stands in the product, and one of them is found here."""

from pathlib import Path

import pytest

from tests.mutants.aims import AIMS, aimed
from tests.mutants.copies import ROOT, apply, mutated
from tests.mutants.patch import Patch
from tests.mutants.patches import PATCHES
from tests.mutants.trial import hunt, passes
from tests.simulate.plan import KINDS, swarm


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_a_patch_is_about_a_line_that_stands(patch: Patch) -> None:
    assert (ROOT / patch.path).read_text().count(patch.before) == 1
    assert patch.after != patch.before and "\n" not in patch.before + patch.after


def test_patches_have_names_of_their_own_and_aims_that_stand() -> None:
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)
    assert {patch.aim for patch in PATCHES} - {""} == set(AIMS)


def test_an_aim_changes_the_plan_of_a_seed_and_nothing_else() -> None:
    assert aimed("", 3) == swarm(3)
    for aim in AIMS:
        plan = aimed(aim, 3)
        assert set(plan.kinds) <= set(KINDS)
        assert (plan.seed, plan.faults_s, plan.engines) == (3, swarm(3).faults_s, swarm(3).engines)


def test_a_patch_that_fits_nowhere_is_refused() -> None:
    with (
        mutated(None) as copy,
        pytest.raises(ValueError, match="has 0 times 'no such line'"),
    ):
        apply(PATCHES[0]._replace(before="no such line"), copy)
    assert not Path(copy).exists()


@pytest.mark.parametrize("knows", [True, False], ids=["known", "hunted"])
def test_a_mutant_is_found_and_the_product_is_left_as_it_was(knows: bool) -> None:
    patch = next(each for each in PATCHES if each.name == "a load is a proof of the weights")
    before = (ROOT / patch.path).read_text()
    one = hunt(patch, 30.0, knows=knows)
    assert one.found is not None and "S1" in str(one.found.rule), one.said
    assert one.found.known is (knows and patch.seed is not None)
    assert (ROOT / patch.path).read_text() == before
    assert passes(one) is None
