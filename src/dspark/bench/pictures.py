"""Pictures of what `dspark bench serve` measured."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dspark.bench.contenders import BASELINE, Contender
from dspark.bench.serving import Summary
from dspark.ops.figures import new_figure, save_figure
from dspark.ops.settings import Settings

_DEFAULT = Settings.model_fields["planner"].default
_THRESHOLD = "threshold:"


def draw(rows: Sequence[Summary], folder: Path) -> list[Path]:
    """Every picture that the results have enough points for, as folder/TRANSPORT-NAME.svg, or
    TRANSPORT-NAME-DRAFTER.svg where it is of the contenders with a drafter that was named.

    Raises ConfigError if matplotlib is missing.
    """
    files = []
    for transport in dict.fromkeys(row.transport for row in rows):
        own = [row for row in rows if row.transport == transport]
        pictures = {name: picture(own) for name, picture in _OF_ALL.items()}
        for drafter, planners in _by_drafter(own).items():
            suffix = f"-{drafter}" if drafter else ""
            for name, picture in _OF_ONE_DRAFTER.items():
                pictures[name + suffix] = picture(planners)
        for name, figure in pictures.items():
            if figure is not None:
                files.append(folder / f"{transport}-{name}.svg")
                save_figure(figure, files[-1])
    return files


def _by_drafter(rows: Sequence[Summary]) -> dict[str, list[Summary]]:
    """The contenders with each drafter that was named, and those with none, called by their
    planners alone."""
    found: dict[str, list[Summary]] = {}
    for row in rows:
        contender = Contender.parse(row.planner)
        found.setdefault(contender.drafter, []).append(replace(row, planner=contender.planner))
    return found


def _lengths(rows: Sequence[Summary]) -> Any:
    """Verified and accepted length as load rises."""
    curves = [(name, own) for name, own in _by_planner(rows) if name != BASELINE and len(own) > 1]
    if not curves:
        return None
    made, (axes,) = new_figure()
    axes.set(
        title="Verified and accepted length by load", xlabel="concurrent requests", ylabel="tokens"
    )
    for name, own in curves:
        load = [row.concurrency for row in own]
        (line,) = axes.plot(load, [r.verified_length for r in own], "o-", label=f"{name} verified")
        accepted = [row.accepted_length for row in own]
        axes.plot(load, accepted, "x--", color=line.get_color(), label=f"{name} accepted")
    _load_axis(axes, rows)
    axes.set_ylim(top=1.35 * axes.get_ylim()[1])  # the legend's place
    axes.legend(fontsize="x-small", ncols=3, loc="upper center")
    return made


def _pareto(rows: Sequence[Summary]) -> Any:
    """Throughput against what each user gets."""
    curves = [(name, own) for name, own in _by_planner(rows) if len(own) > 1]
    if not curves:
        return None
    made, (axes,) = new_figure()
    axes.set(
        title="Throughput and user speed",
        xlabel="tokens a second, median user",
        ylabel="tokens a second, all users",
    )
    for name, own in curves:
        axes.plot([r.user_rate for r in own], [r.throughput for r in own], "o-", label=name)
        for row in own:
            at = (row.user_rate, row.throughput)
            axes.annotate(str(row.concurrency), at, xytext=(3, 3), textcoords="offset points",
                          fontsize="x-small")  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.legend(title="planner (points: concurrency)", fontsize="small", title_fontsize="small")
    return made


def _domains(rows: Sequence[Summary]) -> Any:
    """How much of each domain's drafts the default planner sends to the target."""
    own = [row for row in rows if row.planner == _DEFAULT]
    if len(own) < 2:
        return None
    made, (axes,) = new_figure()
    axes.set(
        title=f"Share of drafts trimmed by {_DEFAULT}",
        xlabel="concurrent requests",
        ylabel="share of drafted tokens",
    )
    for domain in sorted({name for row in own for name in row.by_domain}):
        points = [row for row in own if domain in row.by_domain]
        shares = [row.by_domain[domain].trimmed_share for row in points]
        axes.plot([row.concurrency for row in points], shares, "o-", label=domain)
    axes.set_ylim(0, 1)
    _load_axis(axes, rows)
    axes.legend()
    return made


def _threshold(rows: Sequence[Summary]) -> Any:
    """A static cut at different survivals: what it keeps is the same at any load, what it costs
    is not."""
    swept = [row for row in rows if row.planner.startswith(_THRESHOLD)]
    if len({row.planner for row in swept}) < 2:
        return None
    made, (axes,) = new_figure()
    axes.set(
        title="A fixed survival threshold",
        xlabel="threshold",
        ylabel="throughput over plain decoding",
    )
    for load in sorted({row.concurrency for row in swept}):
        own = sorted(
            (float(row.planner.removeprefix(_THRESHOLD)), row.ratio, row.verified_length)
            for row in swept
            if row.concurrency == load
        )
        axes.plot([at for at, _, _ in own], [ratio for _, ratio, _ in own], "o-", label=str(load))
        for at, ratio, verified in own:
            axes.annotate(f"{verified:.1f}", (at, ratio), xytext=(3, 3),
                          textcoords="offset points", fontsize="x-small")  # fmt: skip
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.legend(title="concurrent requests (points: verified length)", fontsize="small",
                title_fontsize="small")  # fmt: skip
    return made


def _by_planner(rows: Sequence[Summary]) -> Iterator[tuple[str, list[Summary]]]:
    for planner in dict.fromkeys(row.planner for row in rows):
        own = (row for row in rows if row.planner == planner)
        yield planner, sorted(own, key=lambda row: row.concurrency)


def _load_axis(axes: Any, rows: Sequence[Summary]) -> None:
    loads = sorted({row.concurrency for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(load) for load in loads])


_Picture = Callable[[Sequence[Summary]], Any]

_OF_ALL: dict[str, _Picture] = {"lengths": _lengths, "pareto": _pareto}
_OF_ONE_DRAFTER: dict[str, _Picture] = {"domains": _domains, "threshold": _threshold}
