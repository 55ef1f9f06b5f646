"""What crosses from process to process."""

from __future__ import annotations

import pytest

from rollbook.collect.rows import Outcome
from rollbook.collect.wire import decode_outcomes, encode_outcomes
from rollbook.rollouts.types import Completion, FailureKind


@pytest.mark.parametrize(
    "odd",
    [
        Outcome(1, 0, input_tokens=10**30),
        Outcome(1, 0, reply=Completion({"role": "assistant", "content": object()})),
    ],
    ids=["a number past 64 bits", "an object"],
)
def test_an_outcome_that_cannot_be_sent_is_a_failure_and_the_others_are_unharmed(odd: Outcome) -> None:
    good = Outcome(0, 0, line=b"{}", reward=1.0)
    arrived = decode_outcomes(encode_outcomes([good, odd, good]))
    assert [arrived[0], arrived[2]] == [good, good]
    assert (arrived[1].row, arrived[1].failure) == (1, FailureKind.ENVIRONMENT)
    assert "cannot be sent to the collector" in arrived[1].message
