"""The one exception tree. Services map each leaf to a gRPC status and an HTTP code."""

from dspark.core.types import SequenceKey


class DSparkError(Exception):
    """Base of every error raised on purpose; the message is one sentence for a person."""


class ConfigError(DSparkError):
    """A setting is unknown, malformed or contradicts another one."""


class PromptError(DSparkError):
    """A prompt file or data set cannot be read."""


class TargetError(DSparkError):
    """The target model is missing, corrupt or of an unsupported family."""


class DrafterError(DSparkError):
    """The drafter checkpoint is missing, corrupt or does not fit its target."""


class InvalidRequestError(DSparkError):
    """A client sent something that cannot be served; `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFoundError(InvalidRequestError):
    """The client asked for a model that is not served here."""


class WorkerUnavailableError(DSparkError):
    """A worker did not answer in time, or the connection to it is gone. Retrying may help."""


class MessageTooLargeError(DSparkError):
    """A message between two processes is over the limit of the wire, and was not sent.

    `key` names the sequence whose part alone is too large, where there is just one in the message.
    """

    def __init__(self, message: str, key: SequenceKey | None = None) -> None:
        super().__init__(message)
        self.key = key


class OverloadedError(DSparkError):
    """The queue of waiting requests is full. Retrying later helps."""


class HandshakeError(DSparkError):
    """Two processes do not fit together: protocol version or a digest differs."""


class StaleStepError(DSparkError):
    """A message for a step older than the last one that was processed for its sequence."""


class ConflictingStepError(DSparkError):
    """A repeated (sequence, step) carried another payload than the first time."""


class UnknownSequenceError(DSparkError):
    """The worker holds no such sequence, or fewer tokens of it than the caller assumes."""


class OutOfBlocksError(DSparkError):
    """The KV cache has no free block left."""
