"""Everything that crosses the wire comes back equal."""

from dataclasses import fields
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dspark.core.types import (
    Draft,
    DraftBatch,
    DrafterInfo,
    DraftReply,
    DraftRow,
    DraftSource,
    OpenSequence,
    ProfileShape,
    RowStatus,
    SamplingParams,
    Scaling,
    SequenceKey,
    TargetInfo,
    Verdict,
    VerifyBatch,
    VerifyReply,
    VerifyRow,
)
from dspark.wire import codec
from dspark.wire.dspark.v1 import drafter_pb2, verifier_pb2

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
float32 = st.floats(width=32, allow_nan=False)
seconds = st.floats(0, 1e6)
tokens = st.lists(uint32, max_size=8).map(tuple)
keys = st.builds(SequenceKey, uint64, uint64)
sampling = st.builds(SamplingParams, st.floats(0, 5), uint32, st.floats(0, 1), uint64)
close = st.lists(keys, max_size=3).map(tuple)


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    size = draw(st.integers(0, 6))

    def floats() -> np.ndarray:
        values = draw(st.lists(float32, min_size=size, max_size=size))
        return np.array(values, np.float32)

    sampled = size > 0 and draw(st.booleans())
    return Draft(
        key=draw(keys),
        tokens=np.array(draw(st.lists(uint32, min_size=size, max_size=size)), np.int64),
        confidence_logits=floats(),
        in_sync=draw(st.booleans()),
        source=draw(st.sampled_from(DraftSource)),
        q=floats() if sampled else None,
        cut=floats() if sampled else None,
        hidden=draw(st.binary(max_size=32)) if sampled else b"",
    )


draft_rows = st.builds(DraftRow, keys, uint32, tokens, st.binary(), uint32, sampling)
draft_batches = st.builds(DraftBatch, uint64, st.lists(draft_rows, max_size=4).map(tuple), close)
draft_replies = st.builds(DraftReply, uint64, st.lists(drafts(), max_size=4).map(tuple), seconds)
openings = st.none() | st.builds(OpenSequence, tokens, sampling, uint32)
verify_rows = st.builds(
    VerifyRow, keys, uint32, uint32, openings, st.none() | drafts(), st.booleans()
)
verify_batches = st.builds(VerifyBatch, uint64, st.lists(verify_rows, max_size=4).map(tuple), close)
verdicts = st.builds(
    Verdict,
    keys,
    st.sampled_from(RowStatus),
    uint32,
    uint32,
    uint32,
    st.none() | uint32,
    st.binary(),
    seconds,
)
verify_replies = st.builds(
    VerifyReply,
    uint64,
    st.lists(verdicts, max_size=4).map(tuple),
    seconds,
    seconds,
    seconds,
    uint32,
)
target_infos = st.builds(
    TargetInfo, uint64, *[st.text()] * 4, uint32, uint32, uint32, uint32, st.text(), st.text()
)
numbers = st.lists(seconds).map(tuple)
calibrations = st.dictionaries(st.text(), st.builds(Scaling, numbers, numbers), max_size=2)
drafter_infos = st.builds(
    DrafterInfo, uint64, *[st.text()] * 3, uint32, st.text(), st.text(), calibrations
)
shapes = st.builds(ProfileShape, uint32, uint32, uint32, uint32)


def assert_same(left: Any, right: Any) -> None:
    """Equality of dataclasses that hold arrays."""
    assert type(left) is type(right)
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    elif hasattr(left, "__dataclass_fields__"):
        for field in fields(left):
            assert_same(getattr(left, field.name), getattr(right, field.name))
    elif isinstance(left, tuple):
        assert len(left) == len(right)
        for pair in zip(left, right, strict=True):
            assert_same(*pair)
    else:
        assert left == right


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


@given(draft_batches)
def test_draft_batch(value: DraftBatch) -> None:
    assert_same(codec.decode_draft_batch(over_the_wire(codec.encode_draft_batch(value))), value)


@given(draft_replies)
def test_draft_reply(value: DraftReply) -> None:
    assert_same(codec.decode_draft_reply(over_the_wire(codec.encode_draft_reply(value))), value)


@given(verify_batches)
def test_verify_batch(value: VerifyBatch) -> None:
    assert_same(codec.decode_verify_batch(over_the_wire(codec.encode_verify_batch(value))), value)


@given(verify_replies)
def test_verify_reply(value: VerifyReply) -> None:
    assert_same(codec.decode_verify_reply(over_the_wire(codec.encode_verify_reply(value))), value)


@given(target_infos, uint32)
def test_target_info(value: TargetInfo, version: int) -> None:
    message = over_the_wire(codec.encode_target_info(value, version))
    assert message.protocol_version == version
    assert_same(codec.decode_target_info(message), value)


@given(drafter_infos, uint32)
def test_drafter_info(value: DrafterInfo, version: int) -> None:
    message = over_the_wire(codec.encode_drafter_info(value, version))
    assert message.protocol_version == version
    assert_same(codec.decode_drafter_info(message), value)


@given(st.lists(shapes, max_size=5), uint32)
def test_profile_request(value: list[ProfileShape], repeats: int) -> None:
    message = over_the_wire(codec.encode_profile_request(value, repeats))
    assert codec.decode_profile_request(message) == (value, repeats)


@given(keys, uint32, uint32)
def test_features_request(key: SequenceKey, start: int, stop: int) -> None:
    message = over_the_wire(codec.encode_features_request(key, start, stop))
    assert (codec.decode_key(message.key), message.start, message.stop) == (key, start, stop)


def test_minus_infinity_survives_as_a_cut() -> None:
    draft = Draft(
        key=SequenceKey(1, 2),
        tokens=np.array([3], np.int64),
        confidence_logits=np.array([0.5], np.float32),
        q=np.array([0.25], np.float32),
        cut=np.array([-np.inf], np.float32),
    )
    reply = DraftReply(1, (draft,), 0.0)
    assert_same(codec.decode_draft_reply(over_the_wire(codec.encode_draft_reply(reply))), reply)


def test_messages_carry_every_field_of_their_dataclass() -> None:
    """A field added to a dataclass and forgotten in the proto file fails here."""
    for dataclass, message in (
        (TargetInfo, verifier_pb2.VerifierHandshake),
        (DrafterInfo, drafter_pb2.DrafterHandshake),
        (DraftRow, drafter_pb2.DraftRow),
        (VerifyRow, verifier_pb2.VerifyRow),
        (Verdict, verifier_pb2.Verdict),
        (VerifyReply, verifier_pb2.VerifyReply),
        (ProfileShape, verifier_pb2.ProfileShape),
    ):
        names = {field.name for field in fields(dataclass)}
        assert names <= set(message.DESCRIPTOR.fields_by_name), dataclass
