"""What is printed under an answer."""

from dspark.cli.generate import Step, summary


def test_the_summary_keeps_the_four_draft_counters_apart() -> None:
    steps = [Step(1, 0, 0), Step(3, 4, 2), Step(1, 2, 0)]
    usage = {
        "completion_tokens": 5,
        "dspark": {"steps": 3, "proposed": 8, "admitted": 6, "accepted": 2},
    }
    assert summary(steps, usage, 2.0) == [
        "5 tokens in 3 steps: 1.67 a step, 2.5 a second",
        "drafted 8, admitted 6, trimmed 2, accepted 2",
        "accepted/admitted, step by step: 0/0 2/4 0/2",
    ]
