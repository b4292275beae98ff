"""Domain values to protobuf messages and back: the only module that knows the messages' fields."""

from dataclasses import asdict
from typing import Any

import numpy as np

from dspark.core.types import (
    Draft,
    DraftBatch,
    DrafterInfo,
    DraftReply,
    DraftRow,
    DraftSource,
    Floats,
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
from dspark.wire.dspark.v1 import drafter_pb2, types_pb2, verifier_pb2

_STATUS_TO_PB = {
    RowStatus.OK: verifier_pb2.ROW_STATUS_OK,
    RowStatus.UNKNOWN: verifier_pb2.ROW_STATUS_UNKNOWN,
    RowStatus.STALE: verifier_pb2.ROW_STATUS_STALE,
    RowStatus.CONFLICT: verifier_pb2.ROW_STATUS_CONFLICT,
}
_STATUS_FROM_PB = {number: status for status, number in _STATUS_TO_PB.items()}
_SOURCE_TO_PB = {
    DraftSource.MODEL: types_pb2.DRAFT_SOURCE_MODEL,
    DraftSource.NGRAM: types_pb2.DRAFT_SOURCE_NGRAM,
}
_SOURCE_FROM_PB = {number: source for source, number in _SOURCE_TO_PB.items()}

# Messages whose fields are exactly the dataclass's scalars.
_TARGET_FIELDS = tuple(TargetInfo.__dataclass_fields__)
_DRAFTER_FIELDS = tuple(f for f in DrafterInfo.__dataclass_fields__ if f != "calibration")
_SHAPE_FIELDS = tuple(ProfileShape.__dataclass_fields__)


# --- Shared parts ----------------------------------------------------------------------------


def encode_key(key: SequenceKey) -> types_pb2.SequenceKey:
    return types_pb2.SequenceKey(incarnation=key.incarnation, sequence=key.sequence)


def decode_key(message: types_pb2.SequenceKey) -> SequenceKey:
    return SequenceKey(message.incarnation, message.sequence)


def _encode_sampling(sampling: SamplingParams) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        nonce=sampling.nonce,
    )


def _decode_sampling(message: types_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(message.temperature, message.top_k, message.top_p, message.nonce)


def _encode_draft(draft: Draft) -> types_pb2.Draft:
    return types_pb2.Draft(
        key=encode_key(draft.key),
        tokens=draft.tokens.tolist(),
        confidence_logits=draft.confidence_logits.tolist(),
        in_sync=draft.in_sync,
        source=_SOURCE_TO_PB[draft.source],
        q=None if draft.q is None else draft.q.tolist(),
        cut=None if draft.cut is None else draft.cut.tolist(),
        hidden=draft.hidden,
    )


def _decode_draft(message: types_pb2.Draft) -> Draft:
    return Draft(
        key=decode_key(message.key),
        tokens=np.array(message.tokens, dtype=np.int64),
        confidence_logits=_floats(message.confidence_logits),
        in_sync=message.in_sync,
        source=_SOURCE_FROM_PB[message.source],
        q=_floats(message.q) if message.q else None,
        cut=_floats(message.cut) if message.cut else None,
        hidden=message.hidden,
    )


def _floats(values: Any) -> Floats:
    return np.array(values, dtype=np.float32)


# --- Draft -----------------------------------------------------------------------------------


def encode_draft_batch(batch: DraftBatch) -> drafter_pb2.DraftRequest:
    rows = [
        drafter_pb2.DraftRow(
            key=encode_key(row.key),
            base_committed_len=row.base_committed_len,
            tokens=row.tokens,
            features=row.features,
            num_draft=row.num_draft,
            sampling=_encode_sampling(row.sampling),
        )
        for row in batch.rows
    ]
    return drafter_pb2.DraftRequest(step=batch.step, rows=rows, close=map(encode_key, batch.close))


def decode_draft_batch(message: drafter_pb2.DraftRequest) -> DraftBatch:
    rows = tuple(
        DraftRow(
            key=decode_key(row.key),
            base_committed_len=row.base_committed_len,
            tokens=tuple(row.tokens),
            features=row.features,
            num_draft=row.num_draft,
            sampling=_decode_sampling(row.sampling),
        )
        for row in message.rows
    )
    return DraftBatch(message.step, rows, tuple(map(decode_key, message.close)))


def encode_draft_reply(reply: DraftReply) -> drafter_pb2.DraftReply:
    return drafter_pb2.DraftReply(
        step=reply.step, drafts=map(_encode_draft, reply.drafts), seconds=reply.seconds
    )


def decode_draft_reply(message: drafter_pb2.DraftReply) -> DraftReply:
    return DraftReply(message.step, tuple(map(_decode_draft, message.drafts)), message.seconds)


def encode_drafter_info(info: DrafterInfo, protocol_version: int) -> drafter_pb2.DrafterHandshake:
    return drafter_pb2.DrafterHandshake(
        protocol_version=protocol_version,
        calibration={
            mode: drafter_pb2.Scaling(**asdict(scaling))
            for mode, scaling in info.calibration.items()
        },
        **{name: getattr(info, name) for name in _DRAFTER_FIELDS},
    )


def decode_drafter_info(message: drafter_pb2.DrafterHandshake) -> DrafterInfo:
    return DrafterInfo(
        **{name: getattr(message, name) for name in _DRAFTER_FIELDS},
        calibration={
            mode: Scaling(tuple(own.temperatures), tuple(own.intercepts))
            for mode, own in message.calibration.items()
        },
    )


# --- Verify ----------------------------------------------------------------------------------


def encode_verify_batch(batch: VerifyBatch) -> verifier_pb2.VerifyRequest:
    return verifier_pb2.VerifyRequest(
        step=batch.step,
        rows=map(_encode_verify_row, batch.rows),
        close=map(encode_key, batch.close),
    )


def decode_verify_batch(message: verifier_pb2.VerifyRequest) -> VerifyBatch:
    return VerifyBatch(
        step=message.step,
        rows=tuple(map(_decode_verify_row, message.rows)),
        close=tuple(map(decode_key, message.close)),
    )


def _encode_verify_row(row: VerifyRow) -> verifier_pb2.VerifyRow:
    return verifier_pb2.VerifyRow(
        key=encode_key(row.key),
        base_committed_len=row.base_committed_len,
        num_pending=row.num_pending,
        open=None if row.open is None else _encode_open(row.open),
        draft=None if row.draft is None else _encode_draft(row.draft),
        want_features=row.want_features,
    )


def _decode_verify_row(message: verifier_pb2.VerifyRow) -> VerifyRow:
    return VerifyRow(
        key=decode_key(message.key),
        base_committed_len=message.base_committed_len,
        num_pending=message.num_pending,
        open=_decode_open(message.open) if message.HasField("open") else None,
        draft=_decode_draft(message.draft) if message.HasField("draft") else None,
        want_features=message.want_features,
    )


def _encode_open(value: OpenSequence) -> verifier_pb2.OpenSequence:
    return verifier_pb2.OpenSequence(
        tokens=value.tokens, sampling=_encode_sampling(value.sampling), max_len=value.max_len
    )


def _decode_open(message: verifier_pb2.OpenSequence) -> OpenSequence:
    return OpenSequence(tuple(message.tokens), _decode_sampling(message.sampling), message.max_len)


def encode_verify_reply(reply: VerifyReply) -> verifier_pb2.VerifyReply:
    verdicts = [
        verifier_pb2.Verdict(
            key=encode_key(verdict.key),
            status=_STATUS_TO_PB[verdict.status],
            computed_len=verdict.computed_len,
            cached_len=verdict.cached_len,
            accepted=verdict.accepted,
            next_token=verdict.next_token,
            features=verdict.features,
            q_gap=verdict.q_gap,
        )
        for verdict in reply.verdicts
    ]
    return verifier_pb2.VerifyReply(
        step=reply.step,
        verdicts=verdicts,
        seconds=reply.seconds,
        backbone_seconds=reply.backbone_seconds,
        head_seconds=reply.head_seconds,
        batch_tokens=reply.batch_tokens,
    )


def decode_verify_reply(message: verifier_pb2.VerifyReply) -> VerifyReply:
    verdicts = tuple(
        Verdict(
            key=decode_key(verdict.key),
            status=_STATUS_FROM_PB[verdict.status],
            computed_len=verdict.computed_len,
            cached_len=verdict.cached_len,
            accepted=verdict.accepted,
            next_token=verdict.next_token if verdict.HasField("next_token") else None,
            features=verdict.features,
            q_gap=verdict.q_gap,
        )
        for verdict in message.verdicts
    )
    return VerifyReply(
        step=message.step,
        verdicts=verdicts,
        seconds=message.seconds,
        backbone_seconds=message.backbone_seconds,
        head_seconds=message.head_seconds,
        batch_tokens=message.batch_tokens,
    )


def encode_target_info(info: TargetInfo, protocol_version: int) -> verifier_pb2.VerifierHandshake:
    return verifier_pb2.VerifierHandshake(
        protocol_version=protocol_version, **{name: getattr(info, name) for name in _TARGET_FIELDS}
    )


def decode_target_info(message: verifier_pb2.VerifierHandshake) -> TargetInfo:
    return TargetInfo(**{name: getattr(message, name) for name in _TARGET_FIELDS})


def encode_features_request(
    key: SequenceKey, start: int, stop: int
) -> verifier_pb2.FeaturesRequest:
    return verifier_pb2.FeaturesRequest(key=encode_key(key), start=start, stop=stop)


def encode_profile_request(shapes: list[ProfileShape], repeats: int) -> verifier_pb2.ProfileRequest:
    messages = [
        verifier_pb2.ProfileShape(**{name: getattr(shape, name) for name in _SHAPE_FIELDS})
        for shape in shapes
    ]
    return verifier_pb2.ProfileRequest(shapes=messages, repeats=repeats)


def decode_profile_request(
    message: verifier_pb2.ProfileRequest,
) -> tuple[list[ProfileShape], int]:
    shapes = [
        ProfileShape(**{name: getattr(shape, name) for name in _SHAPE_FIELDS})
        for shape in message.shapes
    ]
    return shapes, message.repeats
