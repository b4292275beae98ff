"""`dspark profile`: what steps cost on this machine, measured anew through the real services."""

import httpx
from rich.console import Console
from rich.table import Table

from dspark.cli.server import private_server
from dspark.core.cost import StepCost
from dspark.ops.settings import Settings


def measure_anew(settings: Settings, console: Console) -> StepCost:
    """Start the services, which measure and keep the profile, and ask them for it.

    Raises:
        WorkerUnavailableError: a service did not start; the last lines of the log say why.
    """
    settings = settings.model_copy(update={"reprofile": True})
    with private_server(settings, console) as url:
        reply = httpx.get(f"{url}/status", trust_env=False)
    return StepCost.from_fields(reply.json()["cost"])


def tables(cost: StepCost) -> list[Table]:
    """Target steps by batch size, each token with a head row; drafts by requests; the rest."""
    steps = Table("tokens", "ms", "tokens/s", title="target step")
    for tokens in cost.tokens.counts:
        seconds = float(cost.verify_seconds(tokens, tokens, 0))
        steps.add_row(str(tokens), f"{seconds * 1e3:.2f}", f"{tokens / seconds:.0f}")
    shown = [steps]
    if cost.draft is not None:
        drafts = Table("requests", "ms", title="draft")
        for requests in cost.draft.counts:
            drafts.add_row(str(requests), f"{cost.draft_seconds(requests) * 1e3:.2f}")
        shown.append(drafts)
    rest = Table("part of a step", "microseconds", title="beside the curves")
    rest.add_row("a row through the head", f"{cost.head_row_seconds * 1e6:.1f}")
    rest.add_row("a token of context", f"{cost.context_token_seconds * 1e6:.2f}")
    rest.add_row("outside both models", f"{cost.overhead_seconds * 1e6:.0f}")
    return [*shown, rest]
