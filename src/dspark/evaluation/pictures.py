"""Pictures of evaluations."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dspark.core.types import VerificationMode
from dspark.evaluation.acceptance import Acceptance
from dspark.evaluation.calibration import BeforeAndAfter
from dspark.evaluation.compare import Compared
from dspark.evaluation.threshold import Cut
from dspark.ops.figures import new_figure, save_figure


def draw_acceptance(result: Acceptance, file: Path) -> None:
    """Share of rounds accepted through each position: whole drafter, without its Markov head, and
    the 4-gram table."""
    figure, (axes,) = new_figure(1)
    kinds = (("drafter", "-"), ("without_markov", "--"), ("table", ":"))
    for domain, color in zip(result.drafter, ("C0", "C1", "C2", "k", "C3", "C4"), strict=False):
        for kind, style in kinds:
            scores = getattr(result, kind)
            if scores is not None:
                shares = scores[domain].acceptance
                label = domain if kind == "drafter" else None
                axes.plot(range(1, len(shares) + 1), shares, style, color=color, label=label)
                axes.set_xticks(range(1, len(shares) + 1))
    axes.set(
        title="Accepted through each position\n(dashed: without Markov head; dotted: 4-gram table)",
        xlabel="position in the block",
        ylabel="share of rounds",
        ylim=(0, 1),
    )
    axes.legend()
    save_figure(figure, file)


def draw_calibration(result: Mapping[VerificationMode, BeforeAndAfter], file: Path) -> None:
    """Reliability diagrams of the survival through each position, before and after scaling."""
    figure, panels = new_figure(2 * len(result))
    titles = [(mode, when) for mode in result for when in ("before", "after")]
    for axes, (mode, when) in zip(panels, titles, strict=True):
        calibration = getattr(result[mode], when)
        for k, diagram in enumerate(calibration.diagrams):
            filled = diagram.count > 0
            label = f"{k + 1}: ECE {calibration.scores[k].ece:.1%}"
            axes.plot(diagram.predicted[filled], diagram.observed[filled], "o-", ms=3, label=label)
        axes.plot((0, 1), (0, 1), color="grey", linewidth=0.8)
        axes.set(
            title=f"{mode}, {when} scaling", xlabel="predicted survival", ylabel="accepted share"
        )
        axes.legend(title="position", fontsize="small", title_fontsize="small")
    save_figure(figure, file)


def draw_thresholds(result: Mapping[str, Sequence[Cut]], file: Path) -> None:
    """What each threshold verifies and keeps, by domain."""
    figure, (lengths, shares) = new_figure(2)
    for domain, cuts in result.items():
        verified, accepted = [cut.verified for cut in cuts], [cut.accepted for cut in cuts]
        lengths.plot(verified, accepted, "o-", ms=3, label=domain)
        levels, kept = [cut.threshold for cut in cuts], [cut.kept_share for cut in cuts]
        shares.plot(levels, kept, "o-", ms=3, label=domain)
    lengths.set(
        title="Every threshold, from high (left) to low",
        xlabel="verified length",
        ylabel="accepted length",
    )
    shares.set(
        title="What of the verified drafts is kept",
        xlabel="threshold on the survival",
        ylabel="accepted share",
        ylim=(0, 1),
    )
    lengths.legend()
    save_figure(figure, file)


def draw_comparison(result: Sequence[Compared], folder: Path) -> list[Path]:
    """Accepted length by domain, acceptance by position (greedy, all domains) and draft latency, as
    folder/NAME.svg."""
    files = []
    modes = list(result[0].lengths)
    figure, panels = new_figure(len(modes))
    for axes, mode in zip(panels, modes, strict=True):
        domains = list(result[0].lengths[mode])
        for index, own in enumerate(result):
            lengths = [own.lengths[mode][domain] for domain in domains]
            at = [place + 0.8 * (index + 0.5) / len(result) - 0.4 for place in range(len(domains))]
            middle = [length.accepted_length for length in lengths]
            ends = [
                [length.accepted_length - length.low for length in lengths],
                [length.high - length.accepted_length for length in lengths],
            ]
            axes.bar(at, middle, 0.8 / len(result), yerr=ends, label=own.name)
        axes.set_xticks(range(len(domains)), domains)
        axes.set(title=f"Accepted length, {mode}", ylim=(1, None))
    panels[0].legend(fontsize="small", loc="upper left")
    files.append(folder / "drafters-length.svg")
    save_figure(figure, files[-1])

    figure, (positions, latency) = new_figure(2)
    for own in result:
        shares = own.lengths[modes[0]]["all"].conditional
        positions.plot(range(1, len(shares) + 1), shares, "o-", label=own.name)
        latency.plot(list(own.draft_ms), list(own.draft_ms.values()), "o-", label=own.name)
    positions.set(title=f"Acceptance by position, {modes[0]}", xlabel="position", ylim=(0, 1))
    latency.set(title="Time of a draft", xlabel="sequences", ylabel="milliseconds")
    latency.set_xscale("log", base=2)
    sizes = list(result[0].draft_ms)
    latency.set_xticks(sizes, [str(size) for size in sizes])
    positions.legend(fontsize="small")
    files.append(folder / "drafters-positions.svg")
    save_figure(figure, files[-1])
    return files
