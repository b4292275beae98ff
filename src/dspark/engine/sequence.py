"""One request's life: every committed token goes through `Sequence.push`, one at a time."""

from dspark.core.ngram import NgramIndex
from dspark.core.types import SequenceKey, Tokens, Verdict
from dspark.engine.draft_context import DraftContext
from dspark.engine.events import Usage
from dspark.engine.request import FinishReason, Request
from dspark.engine.text import TextStream


class Sequence:
    """Committed tokens, where they end, and what the two workers hold of them.

    `max_len` (prompt and output) is fixed at the start: the KV cache is reserved for it.
    """

    def __init__(self, key: SequenceKey, request: Request, max_context: int) -> None:
        self.key = key
        self.request = request
        self.max_len = min(len(request.prompt) + request.max_tokens, max_context)
        self.tokens = list(request.prompt)
        self.ngrams = NgramIndex(self.tokens)
        self.finish: FinishReason | None = None
        self.opened = False  # the verifier holds the sequence
        self.computed_len = 0  # tokens in the verifier's KV cache
        self.cached_len = 0
        self.draft_context = DraftContext()
        self.known_to_drafter = False  # it may hold state, however stale
        self.steps = self.proposed = self.admitted = self.accepted = 0
        self._text = TextStream(request.detokenizer, request.stop)

    @property
    def committed_len(self) -> int:
        return len(self.tokens)

    @property
    def pending(self) -> int:
        """Committed tokens the target has not processed; 1, the anchor, once prefill is over."""
        return len(self.tokens) - self.computed_len

    @property
    def decoding(self) -> bool:
        return self.opened and self.pending == 1

    @property
    def remaining(self) -> int:
        """Tokens that may still be committed."""
        return self.max_len - len(self.tokens)

    def push(self, token: int) -> FinishReason | None:
        """Commit one token. What ends the output is checked in a fixed order, length last, so that
        a stop which the last allowed token completes is still a stop."""
        self.tokens.append(token)
        if token in self.request.eos_ids or token in self.request.stop_token_ids:
            self._text.flush()
            self.finish = FinishReason.STOP
        elif self._text.push(token):
            self.finish = FinishReason.STOP
        elif len(self.tokens) == self.max_len:
            self.finish = FinishReason.STOP if self._text.flush() else FinishReason.LENGTH
        return self.finish

    def commit(self, tokens: Tokens) -> tuple[int, ...]:
        """Commit a verified block up to the token that ends the output; returns what was kept."""
        start = self.committed_len
        for token in tokens:
            if self.push(token) is not None:
                break
        self.steps += 1
        return tuple(self.tokens[start:])

    def take_text(self) -> str:
        return self._text.take()

    def computed(self, verdict: Verdict) -> None:
        """The verifier processed a row of this sequence."""
        if not self.opened and self.steps == 0:
            self.cached_len = verdict.cached_len  # of the prompt; a re-opened sequence hits more
        self.opened = True
        self.computed_len = verdict.computed_len
        self.draft_context.extend(verdict.features, verdict.computed_len)

    def count_draft(self, proposed: int, admitted: int, accepted: int) -> None:
        """Add one step's draft tokens to the totals."""
        self.proposed += proposed
        self.admitted += admitted
        self.accepted += accepted

    def reopen(self) -> None:
        """The verifier holds nothing of this sequence any more; what is committed stays so."""
        self.opened = False
        self.computed_len = 0
        self.draft_context.forget(0)

    def forget_drafter(self) -> None:
        """Another drafter is there, which has never heard of this sequence."""
        self.known_to_drafter = False
        self.draft_context.forget(self.computed_len)

    def usage(self) -> Usage:
        prompt_tokens = len(self.request.prompt)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=self.committed_len - prompt_tokens,
            cached_tokens=self.cached_len,
            steps=self.steps,
            proposed=self.proposed,
            admitted=self.admitted,
            accepted=self.accepted,
        )
