"""The stub's language model and its reading of weights, without any process."""

import json
from pathlib import Path

import pytest

from relight.agents.stub.launch import make_model
from relight.agents.stub.tokens import (
    EMPTY,
    VOCABULARY,
    Digest,
    Sampling,
    next_token,
    prefix_of,
    reference,
    score,
    score_prompt,
    weights_digest,
)
from relight.agents.stub.weights import BadWeights, Tensor, read_folder, replaced

OLD, NEW = Digest("a" * 64), Digest("b" * 64)


def test_a_continuation_at_every_cut_goes_on_exactly() -> None:
    ids, logprobs = reference(OLD, [1, 2, 3], 40)
    for cut in range(40):
        more, scored = reference(OLD, [1, 2, 3, *ids[:cut]], 40 - cut)
        assert ids[:cut] + more == ids
        assert logprobs[:cut] + scored == logprobs


@pytest.mark.parametrize("damage", ["lost", "doubled", "shifted"])
def test_one_damaged_token_changes_all_that_follow(damage: str) -> None:
    ids, _ = reference(OLD, [1, 2, 3], 20)
    damaged = {"lost": ids[:9], "doubled": [*ids[:10], ids[9]], "shifted": [*ids[:8], ids[9], ids[8]]}[damage]
    follow, _ = reference(OLD, [1, 2, 3, *damaged], 10)
    assert follow != ids[10:]


def test_other_weights_give_other_tokens() -> None:
    assert reference(OLD, [1], 10) != reference(NEW, [1], 10)


def test_logprobs_are_finite_negative_and_exact_in_json() -> None:
    _, logprobs = reference(OLD, [7], 200)
    assert all(-0.5 <= logprob < 0 for logprob in logprobs)
    assert json.loads(json.dumps(logprobs)) == logprobs
    assert {token.rank for token in (next_token(OLD, prefix_of([n])) for n in range(50))} == {1}


def test_prompt_scores_repeat_what_generation_gave() -> None:
    ids, logprobs = reference(OLD, [1, 2], 10)
    scored = score_prompt(OLD, [1, 2, *ids])
    assert scored[0] is None
    assert [token.logprob for token in scored[2:] if token] == logprobs


def test_a_forced_token_scores_lower_than_the_greedy_one() -> None:
    greedy = next_token(OLD, EMPTY)
    forced = [score(OLD, EMPTY, token) for token in range(VOCABULARY) if token != greedy.token_id]
    assert max(token.logprob for token in forced) < greedy.logprob
    assert min(token.rank for token in forced) > 1


def test_with_a_seed_only_the_full_replay_repeats_the_sample() -> None:
    sampling = Sampling(temperature=1.0, seed=5)
    ids, _ = reference(OLD, [1], 20, sampling=sampling)
    assert reference(OLD, [1], 20, sampling=sampling)[0] == ids
    assert reference(OLD, [1], 20)[0] != ids
    assert reference(OLD, [1], 20, sampling=Sampling(1.0, 6))[0] != ids
    assert reference(OLD, [1, *ids[:5]], 15, sampling=sampling)[0] != ids[5:]


def test_banned_tokens_are_passed_over() -> None:
    first = next_token(OLD, EMPTY).token_id
    assert next_token(OLD, EMPTY, banned=(first,)).token_id == (first + 1) % VOCABULARY


def test_the_digest_knows_content_and_not_sharding(tmp_path: Path) -> None:
    one = weights_digest(make_model(tmp_path / "one", seed=1))
    assert weights_digest(make_model(tmp_path / "three", seed=1, shards=3)) == one
    assert weights_digest(make_model(tmp_path / "other", seed=2)) != one


def test_a_truncated_file_is_no_model(tmp_path: Path) -> None:
    (file,) = make_model(tmp_path, seed=1).glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(BadWeights, match="truncated"):
        read_folder(tmp_path)


def test_a_shard_that_the_index_names_must_be_there(tmp_path: Path) -> None:
    make_model(tmp_path, seed=1)
    index = {"weight_map": {"layer.0.weight": "model-00009-of-00009.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadWeights, match="model-00009-of-00009"):
        read_folder(tmp_path)


def test_a_reload_keeps_missing_tensors_and_refuses_strange_ones() -> None:
    old = {"a": Tensor("F32", (2,), "1"), "b": Tensor("F32", (2,), "2")}
    assert replaced(old, {"a": Tensor("F32", (2,), "3")}) == {"a": Tensor("F32", (2,), "3"), "b": old["b"]}
    with pytest.raises(BadWeights, match="no parameter named 'c'"):
        replaced(old, {"c": Tensor("F32", (2,), "3")})
    with pytest.raises(BadWeights, match="shape"):
        replaced(old, {"a": Tensor("F32", (3,), "3")})
