"""What both ends of a connection must agree on: protocol version, message limits, keepalive."""

from typing import Protocol

from dspark.core.errors import HandshakeError, MessageTooLargeError

PROTOCOL_VERSION = 3

MAX_MESSAGE_BYTES = 64 * 2**20  # a long prompt's features in one message; gRPC's default is 4 MiB
_KEEPALIVE_MS = 10_000


class Message(Protocol):
    """What all protobuf messages have."""

    def ByteSize(self) -> int: ...


ChannelOptions = list[tuple[str, int]]

_MESSAGE_LIMITS: ChannelOptions = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
]

CLIENT_OPTIONS: ChannelOptions = [
    *_MESSAGE_LIMITS,
    # A peer that vanished without closing its socket is noticed within two of these.
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
    # A restarted worker on the same machine is back in seconds, so look often.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

SERVER_OPTIONS: ChannelOptions = [
    *_MESSAGE_LIMITS,
    # By default a server ends connections that ping often, and how often ours do is not ours to
    # say: flow control pings too, after every large message.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server beside the first
]


def fits(message: Message) -> bool:
    """Whether a message is within the limit of both ends."""
    return message.ByteSize() <= MAX_MESSAGE_BYTES


def check_size(message: Message, what: str) -> None:
    """Refuse a message that the other end would not take; gRPC would end the whole stream with it.

    Raises:
        MessageTooLargeError: it is over the limit; ``what`` says what it carries.
    """
    if not fits(message):
        raise MessageTooLargeError(
            f"{what} takes {message.ByteSize():,} bytes, and a message holds {MAX_MESSAGE_BYTES:,}"
        )


def check_protocol(peer_version: int, peer: str) -> None:
    """Refuse a peer of another protocol version.

    Raises:
        HandshakeError: the versions differ.
    """
    if peer_version != PROTOCOL_VERSION:
        raise HandshakeError(
            f"the {peer} speaks protocol version {peer_version}, this process "
            f"{PROTOCOL_VERSION}; install the same dspark-serve release in both"
        )
