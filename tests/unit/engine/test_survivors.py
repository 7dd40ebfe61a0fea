"""What an engine went on with after its host had died: who may claim it, and what is handed out then."""

from __future__ import annotations

import array
import itertools

from seedance.engine.adapter import Output
from seedance.engine.request import FinishReason, Sampling
from seedance.engine.survivors import NO_CLAIM, Survivors, claim_of

GREEDY = Sampling(max_tokens=9, temperature=0.0)


def ids(*token_ids: int) -> array.array[int]:
    return array.array("I", token_ids)


def test_a_claim_is_the_same_for_the_same_stream_asked_the_same_thing_and_for_no_other() -> None:
    asked = ("acme", 1, [1, 2], Sampling(max_tokens=9, logit_bias={3: 1.0, 1: 2.0}))
    again = ("acme", 1, array.array("I", [1, 2]), Sampling(max_tokens=9, logit_bias={3: 1.0, 1: 2.0}))
    assert claim_of(*asked) == claim_of(*again) != NO_CLAIM
    others = [
        ("acme2", 1, [1, 2], GREEDY),
        ("acme", 2, [1, 2], GREEDY),
        ("acme", 1, [1, 2, 0], GREEDY),
        ("acme", 1, [2, 1], GREEDY),
        ("acme", 1, [1, 2], Sampling(max_tokens=8, temperature=0.0)),
        ("acme", 1, [1, 2], GREEDY),
    ]
    assert all(claim_of(*one) != claim_of(*other) for one, other in itertools.combinations(others, 2))


def test_log_probabilities_cannot_be_claimed() -> None:
    claim = claim_of("acme", 1, [1], Sampling(max_tokens=9, logprobs=0))
    assert claim == NO_CLAIM
    survivors = Survivors()
    survivors.add(4, claim, ids(1))
    assert survivors.claim(claim, []) is None
    assert survivors.give_up() == [4]


def test_who_claims_gets_what_came_behind_what_he_has() -> None:
    survivors = Survivors()
    survivors.add(4, "a", ids(1, 2))
    survivors.add(5, "b", ids(7))
    assert survivors.take([Output(4, [3], None, None, 16), Output(6, [9]), Output(5, [8])]) == [Output(6, [9])]
    assert set(survivors.keys) == {4, 5}
    assert survivors.claim("a", ids(1)) == Output(4, [2, 3], None, None, 16)
    assert set(survivors.keys) == {5}
    assert survivors.take([Output(4, [4])]) == [Output(4, [4])]  # from here on it is as any other
    assert survivors.claim("a", ids(1)) is None
    assert survivors.claim("b", [7, 8]) == Output(5, [])
    assert not survivors


def test_what_ended_meanwhile_is_handed_out_with_its_end_and_its_key_is_free() -> None:
    survivors = Survivors()
    survivors.add(4, "a", ids(1))
    assert survivors.take([Output(4, [2], FinishReason.STOP)]) == []
    assert list(survivors.keys) == []
    assert survivors.take([Output(4, [5])]) == [Output(4, [5])]  # another one has got the key
    assert survivors
    assert survivors.claim("a", []) == Output(4, [1, 2], FinishReason.STOP)
    survivors.add(6, "b", ids())
    survivors.take([Output(6, [], FinishReason.ERROR, None, 0, "broken")])
    assert survivors.claim("b", []) == Output(6, [], FinishReason.ERROR, None, 0, "broken")


def test_tokens_that_are_not_its_own_claim_nothing() -> None:
    survivors = Survivors()
    survivors.add(4, "a", ids(1, 2))
    for emitted in ([2], [1, 3], [1, 2, 3]):
        assert survivors.claim("a", emitted) is None
    assert survivors.claim("b", []) is None
    survivors.add(5, "a", ids(1, 3))  # of another worker of the same tenant
    assert survivors.claim("a", [1, 3]) == Output(5, [])
    assert survivors.claim("a", [1, 2]) == Output(4, [])


def test_what_nobody_claims_is_given_up_but_for_what_has_ended() -> None:
    survivors = Survivors()
    for key in (4, 5, 6):
        survivors.add(key, str(key), ids())
    survivors.take([Output(5, [1], FinishReason.LENGTH)])
    assert survivors.give_up() == [4, 6]
    assert not survivors
    assert survivors.claim("4", []) is None
