"""The accuracy pre-check: every recorded API call of a dump run again, and judged. One call in, one result out.

    for result in check_dump(dump, Plan()):
        ...

Results hold numbers and texts alone, so they travel between processes. A call that cannot be run again is SKIP and says why.
"""

from __future__ import annotations

import dataclasses
import enum
import multiprocessing
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

from ulpscope.frameworks.torch.api_arguments import KINDS
from ulpscope.frameworks.torch.api_runner import ApiRun, ApiRunner, Output
from ulpscope.model.errors import DumpError
from ulpscope.model.names import call_text
from ulpscope.model.records import CallId, CallRecord, Phase, Role
from ulpscope.replay.results import CallResult, OutputResult
from ulpscope.replay.standards import (
    Explained,
    Judgement,
    Measures,
    Standard,
    Status,
    explained,
    judge,
    standard_of,
    worst,
)
from ulpscope.store.dump import Dump
from ulpscope.store.registry import open_dump

# Held to equality by the older tools, though with decimals they compute.
_NOT_EXACT = frozenset({"round", "round_"})
_PARTS_A_PROCESS = 4


class Rule(enum.Enum):
    """By what a result is judged: the older tools' order of thresholds, or what rounding explains."""

    MSPROBE = "msprobe"
    ROUNDING = "rounding"


@dataclass(frozen=True, slots=True)
class Choice:
    """Which operators are run. With both lists, only what the first has and the second has not."""

    white: frozenset[str] = frozenset()
    black: frozenset[str] = frozenset()
    once: bool = False

    def wants(self, op: str) -> bool:
        return (not self.white or op in self.white) and op not in self.black


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run and judge."""

    runner: ApiRunner = field(default_factory=ApiRunner)
    choice: Choice = field(default_factory=Choice)
    rule: Rule = Rule.ROUNDING
    error_data: Path | None = None


def api_name(call: CallId) -> str:
    """`Functional.conv2d.0`."""
    return f"{call.kind}.{call.name}.{call.index}"


def places(dump: Dump, choice: Choice, done: Collection[str] = ()) -> list[int]:
    """Where in a dump the calls are that shall be run, but for those that are done."""
    found = [
        place
        for place, call in enumerate(dump.ids())
        if call.phase is Phase.FORWARD
        and call.kind in KINDS
        and choice.wants(call.name.partition(".")[0] if call.kind == "Aten" else call.name)
    ]
    if choice.once:
        seen: dict[object, int] = {}
        for place in found:
            seen.setdefault(_signature(dump.nth(place)), place)
        found = list(seen.values())
    ids = dump.ids()
    return [place for place in found if api_name(ids[place]) not in done]


def check_dump(dump: Dump, plan: Plan, done: Collection[str] = ()) -> Iterator[CallResult]:
    """Runs the calls of a dump in their order."""
    for place in places(dump, plan.choice, done):
        yield check_call(dump, place, plan)


def check_call(dump: Dump, place: int, plan: Plan) -> CallResult:
    """Runs and judges the call at a place of a dump."""
    forward = dump.nth(place)
    name = api_name(forward.id)
    try:
        backward: CallRecord | None = dump.call(dataclasses.replace(forward.id, phase=Phase.BACKWARD))
    except DumpError:
        backward = None
    runner = dataclasses.replace(plan.runner, keep=plan.error_data is not None)
    run = runner.run(forward, backward, dump.load_bits)
    result = _result(name, forward.id, run, plan.rule)
    if plan.error_data is not None and result.status in (Status.ERROR, Status.WARNING):
        run.save(plan.error_data, name)
    return result


def check_in_processes(
    folder: Path, plan: Plan, done: Collection[str] = (), *, processes: int, devices: Sequence[str] = ()
) -> Iterator[CallResult]:
    """The same by many processes, in the same order. A process that dies costs the one call that killed it."""
    wanted = places(open_dump(folder), plan.choice, done)
    size = max(1, -(-len(wanted) // (processes * _PARTS_A_PROCESS)))
    parts = [wanted[at : at + size] for at in range(0, len(wanted), size)]
    plans = [_on(plan, devices, number) for number in range(len(parts))]
    number = 0
    while number < len(parts):
        with _pool(processes) as pool:
            futures = [pool.submit(_part, folder, plans[at], parts[at]) for at in range(number, len(parts))]
            try:
                for future in futures:
                    yield from future.result()
                    number += 1
            except BrokenProcessPool:
                pass
        if number < len(parts):
            yield from _one_by_one(folder, plans[number], parts[number])
            number += 1


def _one_by_one(folder: Path, plan: Plan, part: list[int]) -> Iterator[CallResult]:
    ids = open_dump(folder).ids()
    for place in part:
        with _pool(1) as pool:
            try:
                yield from pool.submit(_part, folder, plan, [place]).result()
            except BrokenProcessPool:
                text = "The process that ran it ended: the kernel crashed, or the memory was not enough."
                yield CallResult(api_name(ids[place]), Status.ERROR, None, text)


def _pool(processes: int) -> ProcessPoolExecutor:
    # A forked process cannot use a device that its parent has touched.
    return ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))


def _part(folder: Path, plan: Plan, part: list[int]) -> list[CallResult]:
    dump = open_dump(folder)
    return [check_call(dump, place, plan) for place in part]


def _on(plan: Plan, devices: Sequence[str], number: int) -> Plan:
    if not devices:
        return plan
    runner = dataclasses.replace(plan.runner, device=devices[number % len(devices)])
    return dataclasses.replace(plan, runner=runner)


def _signature(call: CallRecord) -> object:
    """Calls of the same operator with the same kinds of arguments are the same to a check."""
    about = [
        (value.slot.path, value.dtype, value.shape, None if value.is_tensor else repr(value.scalar))
        for value in call.values
        if value.slot.role is Role.INPUT
    ]
    return call.id.kind, call.id.name, tuple(about)


def _result(name: str, call: CallId, run: ApiRun, rule: Rule) -> CallResult:
    forward = [_judged(call, output, rule) for output in run.forward]
    backward_id = dataclasses.replace(call, phase=Phase.BACKWARD)
    backward = None if run.backward is None else _gradients(backward_id, run.backward, rule)
    told = []
    if run.forward_trouble:
        told.append(f"not run again: {run.forward_trouble}")
    elif run.backward_trouble:
        told.append(f"backward not run again: {run.backward_trouble}")
    judged = [*forward, *(backward or [])]
    told += [f"{each.name}: {_why(each)}" for each in judged if each.status in (Status.WARNING, Status.ERROR)]
    return CallResult(
        name,
        worst(each.status for each in forward),
        None if backward is None else worst(each.status for each in backward),
        "; ".join(told),
        tuple(judged),
        run.real,
    )


def _gradients(call: CallId, outputs: Sequence[Output], rule: Rule) -> list[OutputResult]:
    """Of every tensor among the arguments; the older tools number them, we name their place."""
    if rule is Rule.ROUNDING:
        return [_judged(call, output, rule) for output in outputs if output.reference is not None]
    return [_judged(call, dataclasses.replace(output, path=(at,)), rule) for at, output in enumerate(outputs)]


def _why(result: OutputResult) -> str:
    if result.explained is None:
        return result.judgement.message.strip()
    return f"error {result.explained.error:.3g}, rounding explains {result.explained.limit:.3g}"


def _judged(call: CallId, output: Output, rule: Rule) -> OutputResult:
    slot = ".".join(["output", *map(str, output.path)])
    name = f"{call_text(call)}.{slot}"
    if output.reference is None or output.rounded is None or output.target is None:
        skipped = Judgement(Measures(), Status.SKIP, output.why)
        return OutputResult(name, output.reference_dtype, output.dtype, None, skipped)
    found = judge(output.reference, output.rounded, output.target, op=call.name, dtype=output.dtype)
    limits = None
    if rule is Rule.ROUNDING:
        limits = _explained(call, output)
    elif found.status in (Status.WARNING, Status.ERROR):
        found = _unless_explained(found, _explained(call, output))
    shape = tuple(output.target.shape)
    return OutputResult(name, output.reference_dtype, output.dtype, shape, found, limits, output.recorded)


def _unless_explained(found: Judgement, limits: Explained) -> Judgement:
    """A gradient that cancels to nothing has any cosine: what rounding explains is not the operator's fault."""
    if limits.status is not Status.PASS:
        return found
    text = f"{found.message.strip()} But rounding explains it: error {limits.error:.3g}, explained {limits.limit:.3g}."
    return Judgement(found.measures, Status.PASS, text)


def _explained(call: CallId, output: Output) -> Explained:
    exact = standard_of(call.name, output.dtype) is Standard.BINARY and call.name not in _NOT_EXACT
    exact = exact and call.phase is Phase.FORWARD
    assert output.reference is not None and output.rounded is not None and output.target is not None
    arrays = output.reference, output.rounded, output.target
    found = explained(*arrays, op=call.name, dtype=output.dtype, unit=output.unit, response=0.0, exact=exact)
    if found.status is Status.PASS or not found.limit:
        return found
    # Only where rounding the result alone does not explain it: this runs the call twice more.
    response = output.response()
    return explained(*arrays, op=call.name, dtype=output.dtype, unit=output.unit, response=response, exact=exact)
