"""What the engine's driver may rely on, whatever a port is made of."""

import asyncio
import contextlib
import secrets
import time
from dataclasses import replace

import grpc
import numpy as np
import pytest
from dspark_services.models import load_draft_worker, load_target_worker
from dspark_services.scheduler.clients import GrpcVerifier
from grpc_health.v1 import health_pb2, health_pb2_grpc

from dspark.core.errors import (
    ConfigError,
    HandshakeError,
    InvalidRequestError,
    MessageTooLargeError,
    OutOfBlocksError,
    UnknownSequenceError,
    WorkerUnavailableError,
)
from dspark.core.types import (
    Draft,
    DraftBatch,
    DraftReply,
    DraftRow,
    OpenSequence,
    ProfileShape,
    RowStatus,
    SamplingParams,
    SequenceKey,
    VerifyBatch,
    VerifyReply,
    VerifyRow,
)
from dspark.modeling.draft_worker import DraftWorker
from dspark.modeling.target_worker import TargetWorker
from dspark.ops.settings import Settings, load_settings
from dspark.wire import transport as wire_transport
from tests.support.workers import Transport, drafter_port, verifier_port, verifier_server

GREEDY = SamplingParams(temperature=0.0)
PROMPT = (5, 6, 7, 8, 9)
BIG = 6 * 2**20  # more than gRPC's default limit of 4 MiB


@pytest.fixture(params=["grpc", "inproc"])
def transport(request: pytest.FixtureRequest) -> Transport:
    return request.param


@pytest.fixture(scope="module")
def settings(tiny_settings_argv: list[str]) -> Settings:
    return load_settings(tiny_settings_argv, {})


@pytest.fixture(scope="module")
def target(settings: Settings) -> TargetWorker:
    return load_target_worker(settings)


@pytest.fixture(scope="module")
def drafter(settings: Settings) -> DraftWorker:
    return load_draft_worker(settings)


@pytest.fixture
def key() -> SequenceKey:
    """A sequence of another scheduler in every test: the workers are shared."""
    return SequenceKey(secrets.randbits(64), 0)


def opening(key: SequenceKey, step: int = 1) -> VerifyBatch:
    row = VerifyRow(key, len(PROMPT), len(PROMPT), OpenSequence(PROMPT, GREEDY, 64))
    return VerifyBatch(step, (replace(row, want_features=True),))


def draft(key: SequenceKey, *tokens: int) -> Draft:
    return Draft(key, np.array(tokens, np.int64), np.zeros(len(tokens), np.float32))


# --- Verifier --------------------------------------------------------------------------------


async def test_handshake_says_what_the_worker_is(
    transport: Transport, target: TargetWorker, drafter: DraftWorker
) -> None:
    async with verifier_port(transport, target) as verifier:
        assert await verifier.handshake() == target.info
    async with drafter_port(transport, drafter) as port:
        assert await port.handshake() == drafter.info


async def test_a_repeated_step_is_answered_from_memory(
    transport: Transport, target: TargetWorker, key: SequenceKey
) -> None:
    async with verifier_port(transport, target) as verifier:
        first = await verifier.verify(opening(key))
        again = await verifier.verify(opening(key))
        assert first.verdicts[0].status is RowStatus.OK
        assert first.verdicts[0].next_token is not None
        assert again.verdicts == first.verdicts
        assert again.batch_tokens == 0  # nothing was computed


async def test_a_subset_of_a_step_may_be_resent(
    transport: Transport, target: TargetWorker, key: SequenceKey
) -> None:
    other = key._replace(sequence=1)
    both = VerifyBatch(1, opening(key).rows + opening(other).rows)
    async with verifier_port(transport, target) as verifier:
        first = await verifier.verify(both)
        again = await verifier.verify(VerifyBatch(1, both.rows[1:]))
        assert again.verdicts == first.verdicts[1:]


async def test_another_payload_under_a_known_step_is_a_conflict(
    transport: Transport, target: TargetWorker, key: SequenceKey
) -> None:
    async with verifier_port(transport, target) as verifier:
        await verifier.verify(opening(key))
        row = VerifyRow(key, len(PROMPT), 1)
        reply = await verifier.verify(VerifyBatch(1, (row,)))
        assert reply.verdicts[0].status is RowStatus.CONFLICT


async def test_an_older_step_is_stale(
    transport: Transport, target: TargetWorker, key: SequenceKey
) -> None:
    async with verifier_port(transport, target) as verifier:
        await verifier.verify(opening(key, step=5))
        reply = await verifier.verify(opening(key, step=4))
        assert reply.verdicts[0].status is RowStatus.STALE


async def test_an_unknown_sequence_is_a_verdict_for_a_row_and_an_error_for_features(
    transport: Transport, target: TargetWorker, key: SequenceKey
) -> None:
    async with verifier_port(transport, target) as verifier:
        reply = await verifier.verify(VerifyBatch(1, (VerifyRow(key, 9, 1),)))
        assert reply.verdicts[0].status is RowStatus.UNKNOWN
        with pytest.raises(UnknownSequenceError, match="sequence 0"):
            await verifier.features(key, 0, 1)


async def test_features_are_kept_for_the_sequences_life(
    transport: Transport, target: TargetWorker, key: SequenceKey
) -> None:
    async with verifier_port(transport, target) as verifier:
        verdict = (await verifier.verify(opening(key))).verdicts[0]
        assert await verifier.features(key, 0, len(PROMPT)) == verdict.features
        await verifier.verify(VerifyBatch(2, (), close=(key,)))
        with pytest.raises(UnknownSequenceError):
            await verifier.features(key, 0, len(PROMPT))


async def test_large_messages_pass(
    transport: Transport, target: TargetWorker, key: SequenceKey
) -> None:
    async with verifier_port(transport, target) as verifier:
        await verifier.verify(opening(key))
        block = replace(draft(key, 1), hidden=bytes(BIG))
        row = VerifyRow(key, len(PROMPT) + 1, 1, draft=block)
        reply = await verifier.verify(VerifyBatch(2, (row,)))
        assert reply.verdicts[0].status is RowStatus.OK


async def test_profile_times_every_shape(transport: Transport, target: TargetWorker) -> None:
    shapes = [ProfileShape(1, 1, 1, 16), ProfileShape(8, 8, 4, 32)]
    async with verifier_port(transport, target) as verifier:
        seconds = await verifier.profile(shapes, 1)
    assert len(seconds) == 2
    assert all(0 < value < 10 for value in seconds)


async def test_a_refused_batch_raises_the_workers_own_error(
    transport: Transport, target: TargetWorker, key: SequenceKey
) -> None:
    row = VerifyRow(key, len(PROMPT), 1, OpenSequence(PROMPT, GREEDY, max_len=10**6))
    async with verifier_port(transport, target) as verifier:
        with pytest.raises(InvalidRequestError, match="holds at most"):
            await verifier.verify(VerifyBatch(1, (row,)))
        # The stream ended with that error; the next call opens another.
        assert (await verifier.verify(opening(key))).verdicts[0].status is RowStatus.OK


# --- Drafter ---------------------------------------------------------------------------------


async def test_drafts_come_in_order_and_a_wrong_length_is_out_of_sync(
    transport: Transport, target: TargetWorker, drafter: DraftWorker, key: SequenceKey
) -> None:
    async with verifier_port(transport, target) as verifier:
        verdict = (await verifier.verify(opening(key))).verdicts[0]
    tokens = (*PROMPT, verdict.next_token)
    known = DraftRow(key, 0, tokens, verdict.features, 3, GREEDY)
    unknown = DraftRow(SequenceKey(9, 9), 40, (1,), b"", 3, GREEDY)
    async with drafter_port(transport, drafter) as port:
        reply = await port.draft(DraftBatch(1, (unknown, known)))
    assert [d.key for d in reply.drafts] == [unknown.key, known.key]
    assert [d.in_sync for d in reply.drafts] == [False, True]
    assert [len(d.tokens) for d in reply.drafts] == [0, 3]


class SlowDrafter:
    """Answers with its step number as the number of seconds; the first call takes long."""

    def draft(self, batch: DraftBatch) -> DraftReply:
        time.sleep(0.5 if batch.step == 1 else 0.0)
        return DraftReply(batch.step, (), float(batch.step))


async def test_a_late_reply_is_not_taken_for_the_next_one(transport: Transport) -> None:
    async with drafter_port(transport, SlowDrafter(), reply_timeout=0.35) as port:
        with pytest.raises(WorkerUnavailableError, match="step 1"):
            await port.draft(DraftBatch(1, ()))
        for step in (2, 3):
            reply = await port.draft(DraftBatch(step, ()))
            assert (reply.step, reply.seconds) == (step, float(step))


class BrokenDrafter:
    """Fails on its first call in a way nobody planned for."""

    calls = 0

    def draft(self, batch: DraftBatch) -> DraftReply:
        self.calls += 1
        if self.calls == 1:
            raise ZeroDivisionError("a defect")
        return DraftReply(batch.step, (), 0.0)


# --- gRPC alone ------------------------------------------------------------------------------


async def test_a_defect_in_the_worker_counts_as_unavailable_once() -> None:
    async with drafter_port("grpc", BrokenDrafter()) as port:
        with pytest.raises(WorkerUnavailableError):
            await port.draft(DraftBatch(1, ()))
        assert (await port.draft(DraftBatch(2, ()))).step == 2


async def test_a_full_cache_is_no_message_that_is_too_large(
    target: TargetWorker, key: SequenceKey
) -> None:
    """gRPC has a status of its own for the latter, which ours must not share."""
    keys = [SequenceKey(key.incarnation, index) for index in range(9)]
    most = target.info.max_context
    rows = [VerifyRow(k, len(PROMPT), 1, OpenSequence(PROMPT, GREEDY, most)) for k in keys]
    async with verifier_port("grpc", target) as verifier:
        with pytest.raises(OutOfBlocksError, match="KV blocks are needed"):
            await verifier.verify(VerifyBatch(1, tuple(rows)))
        await verifier.verify(VerifyBatch(2, (), close=tuple(keys)))


@pytest.fixture
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for a few tokens' features (64 bytes each), a dozen closes, or one row of a batch."""
    monkeypatch.setattr(wire_transport, "MAX_MESSAGE_BYTES", 250)


@pytest.mark.usefixtures("small_messages")
async def test_a_step_and_features_too_large_for_a_message_go_in_several(
    target: TargetWorker, drafter: DraftWorker, key: SequenceKey
) -> None:
    keys = [SequenceKey(key.incarnation, index) for index in range(5)]
    rows = [replace(opening(k).rows[0]) for k in keys]
    drafts = []
    async with verifier_port("grpc", target) as verifier, drafter_port("grpc", drafter) as port:
        reply = await verifier.verify(VerifyBatch(1, tuple(rows)))
        assert [verdict.key for verdict in reply.verdicts] == keys
        assert reply.batch_tokens == len(PROMPT) * len(keys)
        assert {verdict.features for verdict in reply.verdicts} == {b""}  # to be asked for
        for step, verdict in enumerate(reply.verdicts, start=1):
            features = await verifier.features(verdict.key, 0, len(PROMPT))
            assert features == target.features(verdict.key, 0, len(PROMPT))
            row = DraftRow(verdict.key, 0, (*PROMPT, verdict.next_token), features, 3, GREEDY)
            (drafted,) = (await port.draft(DraftBatch(step, (row,)))).drafts
            other = replace(row, key=SequenceKey(key.incarnation, 99))  # in one piece
            drafts.append((drafted, drafter.draft(DraftBatch(step, (other,))).drafts[0]))
    for ours, whole in drafts:
        assert ours.tokens.tolist() == whole.tokens.tolist()
        assert ours.confidence_logits == pytest.approx(whole.confidence_logits, abs=1e-5)


@pytest.mark.usefixtures("small_messages")
async def test_a_row_too_large_for_a_message_is_named_and_the_stream_goes_on(
    target: TargetWorker, drafter: DraftWorker, key: SequenceKey
) -> None:
    long = (3,) * 300
    too_large = SequenceKey(key.incarnation, 7)
    row = VerifyRow(too_large, len(long), 1, OpenSequence(long, GREEDY, 310))
    async with verifier_port("grpc", target) as verifier:
        with pytest.raises(MessageTooLargeError, match=r"step 1 .* verifier .* holds 250") as error:
            await verifier.verify(VerifyBatch(1, (*opening(key).rows, row)))
        assert error.value.key == too_large
        assert (await verifier.verify(opening(key))).verdicts[0].status is RowStatus.OK
    async with drafter_port("grpc", drafter) as port:
        row = DraftRow(key, 0, (1,), bytes(300), 3, GREEDY)
        with pytest.raises(MessageTooLargeError, match="drafter"):
            await port.draft(DraftBatch(1, (row,)))
        assert (await port.draft(DraftBatch(2, ()))).step == 2


async def test_a_peer_with_another_limit_is_no_full_cache() -> None:
    """The status that gRPC itself ends a call with, here for a reply over the client's limit."""
    async with drafter_port("grpc", TalkativeDrafter()) as port:
        with pytest.raises(MessageTooLargeError, match=r"larger than max"):
            await port.draft(DraftBatch(1, ()))


class TalkativeDrafter:
    def draft(self, batch: DraftBatch) -> DraftReply:
        hidden = bytes(65 * 2**20)
        return DraftReply(batch.step, (replace(draft(SequenceKey(1, 1)), hidden=hidden),), 0.0)


async def test_nobody_there_is_unavailable() -> None:
    verifier = GrpcVerifier("127.0.0.1:1", 1, reply_timeout=5.0)
    with pytest.raises(WorkerUnavailableError, match=r"verifier at 127\.0\.0\.1:1"):
        await verifier.handshake()
    with pytest.raises(WorkerUnavailableError, match=r"verifier at 127\.0\.0\.1:1"):
        await verifier.verify(VerifyBatch(1, ()))
    await verifier.close()


async def test_another_protocol_version_is_refused(
    target: TargetWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with verifier_port("grpc", target) as verifier:
        monkeypatch.setattr("dspark_services.scheduler.clients.PROTOCOL_VERSION", 99)
        with pytest.raises(HandshakeError, match=r"version 99.*same dspark-serve release"):
            await verifier.handshake()


async def test_the_client_finds_a_restarted_server(target: TargetWorker, key: SequenceKey) -> None:
    with verifier_server(target) as endpoint:
        verifier = GrpcVerifier(endpoint, 1, reply_timeout=5.0)
        first = await verifier.verify(opening(key))
    with pytest.raises(WorkerUnavailableError):
        await verifier.verify(opening(key))
    with verifier_server(target, endpoint):
        for _ in range(50):
            try:
                again = await verifier.verify(opening(key))
                break
            except WorkerUnavailableError:
                await asyncio.sleep(0.1)
        assert again.verdicts == first.verdicts
        await verifier.close()


async def test_a_worker_replaced_while_idle_gets_no_step_before_a_handshake(
    target: TargetWorker, key: SequenceKey
) -> None:
    """Its successor may hold another model, which only the handshake would tell."""
    with verifier_server(target) as endpoint:
        verifier = GrpcVerifier(endpoint, 1, reply_timeout=5.0)
        await verifier.handshake()
    with verifier_server(target, endpoint):
        await asyncio.sleep(0.3)  # for the client to see the old stream end
        with pytest.raises(WorkerUnavailableError, match="while idle"):
            await verifier.verify(opening(key))
        async with asyncio.timeout(5):
            while True:
                with contextlib.suppress(WorkerUnavailableError):
                    await verifier.handshake()
                    break
                await asyncio.sleep(0.1)
        assert (await verifier.verify(opening(key))).verdicts[0].status is RowStatus.OK
        await verifier.close()


class SlowVerifier:
    def verify(self, batch: VerifyBatch) -> VerifyReply:
        time.sleep(0.5)
        return VerifyReply(batch.step, (), 0.5, 0.0, 0.0, 0)


async def test_health_is_served_while_the_worker_is_busy() -> None:
    with verifier_server(SlowVerifier()) as endpoint:
        verifier = GrpcVerifier(endpoint, 1, reply_timeout=0.1)
        with pytest.raises(WorkerUnavailableError):
            await verifier.verify(VerifyBatch(1, ()))
        async with grpc.aio.insecure_channel(endpoint) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=0.3)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        await verifier.close()


async def test_a_server_that_stops_finishes_its_step() -> None:
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(verifier_server(SlowVerifier()))
        verifier = GrpcVerifier(endpoint, 1, reply_timeout=5.0)
        step = asyncio.create_task(verifier.verify(VerifyBatch(1, ())))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(stack.close)
        assert (await step).step == 1
        await verifier.close()


async def test_a_port_in_use_is_refused(target: TargetWorker) -> None:
    with (
        verifier_server(target) as endpoint,
        pytest.raises(ConfigError, match=endpoint),
        verifier_server(target, endpoint),
    ):
        pass


def test_message_limits_are_the_same_on_both_sides() -> None:
    for name in ("grpc.max_send_message_length", "grpc.max_receive_message_length"):
        limits = {
            dict(options)[name]
            for options in (wire_transport.CLIENT_OPTIONS, wire_transport.SERVER_OPTIONS)
        }
        assert limits == {64 * 2**20}
