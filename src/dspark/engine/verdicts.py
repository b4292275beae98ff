"""Guards the border to the verifier: nothing is committed from a reply that does not fit."""

from dspark.core.errors import ConflictingStepError, StaleStepError
from dspark.core.types import RowStatus, SequenceKey, Verdict, VerifyReply
from dspark.engine.step import Row, Step


def checked_verdicts(step: Step, reply: VerifyReply) -> dict[SequenceKey, Verdict]:
    """The reply's verdicts by sequence.

    Raises StaleStepError if the reply, or a row of it, belongs to another step, and
    ConflictingStepError if a verdict cannot be the answer to its row.
    """
    if reply.step != step.number:
        raise StaleStepError(
            f"The verifier answered step {reply.step} instead of {step.number}: drop that reply."
        )
    verdicts = {verdict.key: verdict for verdict in reply.verdicts}
    for row in step.rows:
        verdict = verdicts.get(row.sequence.key)
        if verdict is not None and verdict.status is not RowStatus.UNKNOWN:
            _check(row, verdict, f"Sequence {verdict.key.sequence} in step {step.number}")
    return verdicts


def _check(row: Row, verdict: Verdict, where: str) -> None:
    sequence = row.sequence
    if verdict.status is RowStatus.STALE:
        raise StaleStepError(f"{where}: the verifier has already gone on to a later step.")
    if verdict.status is RowStatus.CONFLICT:
        raise ConflictingStepError(f"{where}: the verifier saw another payload for this step.")
    if verdict.next_token is None:
        fits = not row.commits and sequence.computed_len < verdict.computed_len
    else:
        fits = verdict.accepted <= row.admitted and (
            verdict.computed_len == sequence.committed_len + verdict.accepted
        )
    if not fits:
        raise ConflictingStepError(
            f"{where}: the verdict (computed {verdict.computed_len}, accepted {verdict.accepted}, "
            f"next {verdict.next_token}) does not fit the row that was sent "
            f"({sequence.committed_len} committed, {row.admitted} draft tokens)."
        )
