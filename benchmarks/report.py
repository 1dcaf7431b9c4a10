"""The figures as Markdown tables, each with the target it is held against."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

OK, MISSED, UNKNOWN = "ok", "MISSED", "no peer"
# Costs per record that differ by no more than this are called the same.
SAME = 1.25
NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Target:
    """A limit from the issue: what it says, and how ours (and the peer's, if it needs it) is held against it."""

    text: str
    reached: Callable[[Any, Any], bool]
    needs_peer: bool = False

    def verdict(self, ours: Any, peer: Any) -> str:
        if isinstance(ours, str):
            return MISSED
        if self.needs_peer and (peer is None or isinstance(peer, str)):
            return UNKNOWN
        return OK if self.reached(ours, peer) else MISSED


def _cpu_at_most(limit: float) -> Target:
    return Target(f"CPU <= {limit}", lambda ours, _: ours.cpu_ratio <= limit)


TARGETS: dict[tuple[str, str], list[Target]] = {
    ("llama", "op"): [_cpu_at_most(1.25)],
    ("llama", "mix"): [_cpu_at_most(1.35)],
    ("llama", "crc"): [_cpu_at_most(1.4)],
    ("llama", "tensors"): [
        Target("peak <= 1/3 peer", lambda ours, peer: ours.peak_over_bare <= peer.peak_over_bare / 3, needs_peer=True)
    ],
    ("llama", "overflow"): [_cpu_at_most(1.15)],
    ("resnet50", "overflow"): [_cpu_at_most(1.15)],
    ("tiny", "op"): [Target("<= 40 us a record", lambda ours, _: ours.us_per_record <= 40)],
}
RATE_FACTOR = 5.0
US_PER_RECORD = 40.0
HELP_SECONDS = 0.1


def workload(name: str, found: dict[str, Any]) -> str:
    """One row per configuration; then what full tensors and the sketch cost."""
    head = ["config", "CPU ours", "CPU peer", "wall ours", "wall peer", "us/record ours", "us/record peer"]
    head += ["records ours", "records peer", "peak MB ours", "peak MB peer", "after stop ours", "after stop peer"]
    rows = []
    for config, costs in found.items():
        ours, peer = costs["ulpscope"], costs.get("msprobe")
        targets = TARGETS.get((name, config), [])
        row = [config]
        for show in (
            lambda cost: f"{cost.cpu_ratio:.2f}",
            lambda cost: f"{cost.wall_ratio:.2f}",
            lambda cost: f"{cost.us_per_record:.0f}",
            lambda cost: f"{cost.records}",
            lambda cost: f"{cost.peak_over_bare / 1e6:.0f}",
            lambda cost: f"{cost.stopped_cpu_ratio:.2f}",
        ):
            row += [_shown(ours, show), _shown(peer, show)]
        row.append(", ".join(target.text for target in targets) or NOTHING)
        row.append(", ".join(target.verdict(ours, peer) for target in targets) or NOTHING)
        rows.append(row)
    parts = [f"### {name}: times the bare step", _table([*head, "target", "verdict"], rows), *_failures(found)]
    if "tensors" in found:
        parts.append(_rates(name, found["tensors"]))
    if "op" in found:
        parts.append(_sketch(found["op"]))
    return "\n\n".join(part for part in parts if part) + "\n"


def _rates(name: str, costs: dict[str, Any]) -> str:
    """GB of values a reader gets back, per second that the capture added to the step."""
    judged = name == "llama"
    rows = []
    ours, peer = costs["ulpscope"], costs.get("msprobe")
    for clock in ("cpu", "wall"):

        def rate(cost: Any, nbytes: str = "logical", clock: str = clock) -> float:
            return getattr(cost, nbytes) / max(getattr(cost, f"extra_{clock}"), 1e-9) / 1e9

        target = Target(f">= {RATE_FACTOR:.0f} x peer", lambda a, b: rate(a) >= RATE_FACTOR * rate(b), needs_peer=True)
        both = not isinstance(ours, str) and peer is not None and not isinstance(peer, str)
        rows.append(
            [
                f"extra {clock} second",
                _shown(ours, lambda cost: f"{cost.logical / 1e9:.3f}"),
                _shown(ours, lambda cost: f"{cost.distinct / 1e9:.3f}"),
                _shown(peer, lambda cost: f"{cost.logical / 1e9:.3f}"),
                _shown(ours, lambda cost: f"{rate(cost):.2f}"),
                _shown(ours, lambda cost: f"{rate(cost, 'distinct'):.2f}"),
                _shown(peer, lambda cost: f"{rate(cost):.2f}"),
                f"{rate(ours) / rate(peer):.1f}" if both else NOTHING,
                target.text if judged else NOTHING,
                target.verdict(ours, peer) if judged else NOTHING,
            ]
        )
    head = ["full tensors, per", "logical GB ours", "distinct GB ours", "GB peer"]
    head += ["GB/s ours", "distinct GB/s ours", "GB/s peer", "factor"]
    return _table([*head, "target", "verdict"], rows)


def _sketch(costs: dict[str, Any]) -> str:
    with_it, without = costs["ulpscope"], costs.get("without sketch")
    if without is None or isinstance(with_it, str) or isinstance(without, str):
        return ""
    return (
        f"sketch (op): CPU {with_it.cpu_ratio:.2f} with, {without.cpu_ratio:.2f} without; "
        f"{with_it.us_per_record:.1f} and {without.us_per_record:.1f} us a record"
    )


def scaling(found: dict[str, Any]) -> str:
    """CPU microseconds per record against the records of a step."""
    rows, costs = [], []
    target = Target(f"<= {US_PER_RECORD:.0f} us", lambda ours, _: ours.us_per_record <= US_PER_RECORD)
    for size, both in found.items():
        ours, peer = both["ulpscope"], both.get("msprobe")
        if not isinstance(ours, str):
            costs.append(ours.us_per_record)
        row = [f"{int(size):,}", _shown(ours, lambda cost: f"{cost.us_per_record:.1f}")]
        row += [_shown(peer, lambda cost: f"{cost.us_per_record:.0f}"), target.text, target.verdict(ours, peer)]
        rows.append(row)
    if len(costs) == len(found) > 1:
        spread = max(costs) / min(costs)
        verdict = OK if spread <= SAME else MISSED
        rows.append(["largest / smallest", f"{spread:.2f}", NOTHING, f"the same (<= {SAME})", verdict])
    title = "### scaling: us of CPU per record, op level, tiny workload"
    table = _table(["records a step", "ours", "peer", "target", "verdict"], rows)
    return "\n\n".join([title, table, *_failures(found)]) + "\n"


def startup(found: dict[str, Any]) -> str:
    """CPU seconds until a tool can be used."""
    ours, peer = found["ulpscope"], found.get("msprobe", {})

    def seconds(value: float | None) -> str:
        return NOTHING if value is None else f"{value:.2f}"

    def over(reading: dict[str, Any], what: str, base: str) -> float | None:
        return None if reading.get(what) is None else reading[what] - reading[base]

    asked = ours["help"]
    fast = asked is not None and asked < HELP_SECONDS
    rows = [
        ["--help", seconds(asked), seconds(peer.get("help")), f"< {HELP_SECONDS} s", OK if fast else MISSED],
        [
            "import, over python",
            seconds(over(ours, "import", "python")),
            NOTHING,
            "no print, no torch",
            OK if ours["quiet"] else MISSED,
        ],
        [
            "import for capture, over torch",
            seconds(over(ours, "use", "torch")),
            seconds(over(peer, "use", "torch")),
            NOTHING,
            NOTHING,
        ],
    ]
    return "### startup: CPU seconds\n\n" + _table(["what", "ours", "peer", "target", "verdict"], rows) + "\n"


def _shown(cost: Any, show: Callable[[Any], str]) -> str:
    if cost is None:
        return NOTHING
    return "failed" if isinstance(cost, str) else show(cost)


def _failures(found: dict[str, Any]) -> list[str]:
    return [
        f"{row}, {name}: failed: {cost}"
        for row, costs in found.items()
        for name, cost in costs.items()
        if isinstance(cost, str)
    ]


def _table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)) + " |" for row in lines
    )
