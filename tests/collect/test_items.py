"""What crosses from process to process."""

from __future__ import annotations

import pytest

from rollbook.collect.items import Answer, Failure, Line, decode_answer, encode_answer
from rollbook.records.turns import Usage
from rollbook.rollouts.limits import Spent
from rollbook.rollouts.types import Completion, FailureKind


def test_answers_arrive_as_they_were_sent() -> None:
    line = Answer(0, 2, line=Line(b"{}", 1.0, Usage(3, 4), Spent(2.0, 7.0)))
    reply = Completion({"role": "assistant", "content": "2"}, token_ids=[1])
    failure = Answer(1, 0, failure=Failure(FailureKind.JUDGE, "no", 500, 2.0, b"{}", reply=reply))
    assert [decode_answer(encode_answer(answer)) for answer in (line, failure)] == [line, failure]


@pytest.mark.parametrize(
    "odd",
    [
        Failure(FailureKind.JUDGE, "no", usage=Usage(10**30)),
        Failure(FailureKind.JUDGE, "no", reply=Completion({"role": "assistant", "content": object()})),
    ],
    ids=["a number past 64 bits", "an object"],
)
def test_an_answer_that_cannot_be_sent_is_a_failure(odd: Failure) -> None:
    arrived = decode_answer(encode_answer(Answer(1, 0, failure=odd)))
    assert arrived.row == 1 and arrived.failure is not None
    assert arrived.failure.kind is FailureKind.ENVIRONMENT
    assert "cannot be sent to the collector" in arrived.failure.message
