from dataclasses import replace

import pytest

from dspark.core.errors import InvalidRequestError
from dspark.core.types import SamplingParams
from dspark.engine.request import Request
from tests.support.world import request


@pytest.mark.parametrize(
    ("build", "param"),
    [
        (lambda: request(prompt=()), "prompt"),
        (lambda: request(max_tokens=0), "max_tokens"),
        (lambda: request(stop=("a", "")), "stop"),
        (lambda: request(sampling=SamplingParams(temperature=float("nan"))), "temperature"),
        (lambda: request(sampling=SamplingParams(temperature=float("inf"))), "temperature"),
        (lambda: request(sampling=SamplingParams(temperature=-0.1)), "temperature"),
        (lambda: request(sampling=SamplingParams(temperature=1e-40)), "temperature"),
        (lambda: request(sampling=SamplingParams(top_p=0.0)), "top_p"),
        (lambda: request(sampling=SamplingParams(top_p=1.01)), "top_p"),
        (lambda: request(sampling=SamplingParams(top_k=-1)), "top_k"),
        (lambda: request(sampling=SamplingParams(top_k=2**32)), "top_k"),
        (lambda: replace(request(), weight=0.0), "weight"),
        (lambda: replace(request(), weight=float("inf")), "weight"),
        (lambda: replace(request(), weight=float("nan")), "weight"),
    ],
)
def test_values_that_cannot_be_served_name_their_field(build, param: str) -> None:
    with pytest.raises(InvalidRequestError, match=param) as caught:
        build()
    assert caught.value.param == param


def test_the_edges_are_allowed() -> None:
    sampling = SamplingParams(temperature=0.0, top_p=1.0, top_k=0)
    assert isinstance(request(prompt=(0,), max_tokens=1, sampling=sampling), Request)
