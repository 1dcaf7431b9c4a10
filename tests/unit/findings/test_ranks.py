"""One order over several ranks, on comparisons made by hand."""

import random

import pytest

from ulpscope.compare.comparison import CallComparison
from ulpscope.findings.divergence import diverge
from ulpscope.findings.exchange import Direction, Passings, Side, Way
from ulpscope.findings.model import Divergence, Status
from ulpscope.findings.ranks import Origin, origin, ranks_text
from ulpscope.model.names import call_text
from ulpscope.model.records import CallId, Phase
from unit.analyze.made import argument, call, tensor, unmeasured

WRONG = 0.25
GROUP = "torch.ProcessGroup"


def reduce(seq: int, gave: float = 0.0, got: float = 0.0, *, index: int = 0, group: list[int] | None = None):
    """An all_reduce of all ranks, or of a group."""
    values = [tensor("input", error=gave, measure=100 + seq), tensor("output", error=got, measure=200 + seq)]
    if group is not None:
        told = {"group_ranks": group, "group_id": "-".join(map(str, group))}
        values.append(argument("group", told, told, GROUP))
    return call("all_reduce", seq, *values, kind="Distributed", index=index)


def send(seq: int, to: int, gave: float = 0.0, *, name: str = "send", index: int = 0):
    values = (tensor("input", error=gave, measure=100 + seq), argument(1, to, to, "int"))
    return call(name, seq, *values, kind="Distributed", index=index)


def receive(seq: int, source: int, got: float = 0.0, *, name: str = "recv", index: int = 0):
    values = (
        tensor("input", error=0.0),
        argument(1, source, source, "int"),
        tensor("output", error=got, measure=200 + seq),
    )
    return call(name, seq, *values, kind="Distributed", index=index)


def fault(seq: int, gives: int, index: int = 0):
    """A call that introduces a difference, in what the call with the number `gives` will pass on."""
    return call("mul", seq, tensor("input"), tensor("output", error=WRONG, measure=100 + gives), index=index)


def clean(seq: int):
    return call("relu", seq, tensor("input"), tensor("output"), index=seq)


def on(rank: int, *calls: CallComparison, step: int = 0) -> Divergence:
    return diverge(calls, step=step, rank=rank)


def first(found: Origin) -> tuple[str, int, Status] | None:
    return None if found.first is None else (call_text(found.first.call), found.first.rank, found.first.status)


def test_no_ranks_have_no_origin() -> None:
    assert origin([]) == Origin()


def test_ranks_that_agree_are_clean() -> None:
    found = origin([on(rank, clean(0), reduce(1)) for rank in range(4)])
    assert (first(found), found.clean, found.ranks, found.sentences) == (None, (0, 1, 2, 3), (), ())


def test_one_rank_is_answered_as_it_is() -> None:
    found = origin([on(3, clean(0), fault(1, 2))])
    assert first(found) == ("Torch.mul.0.forward", 3, Status.INTRODUCED)
    assert found.sentences == ()


def test_a_fault_before_an_all_reduce_reaches_the_others_there() -> None:
    faulty = on(1, fault(0, 1), reduce(1, WRONG, WRONG))
    others = [on(rank, clean(0), reduce(1, 0.0, WRONG)) for rank in (0, 2, 3)]
    found = origin([others[0], faulty, *others[1:]])
    assert first(found) == ("Torch.mul.0.forward", 1, Status.INTRODUCED)
    assert found.also == ()
    assert [call_text(each.call) for each in found.findings] == ["Torch.mul.0.forward"]
    assert found.sentences == ("rank 1 -> ranks 0, 2-3 at Distributed.all_reduce.0.forward",)


def test_what_comes_before_an_exchange_precedes_what_comes_after_it_on_any_rank() -> None:
    """Although rank 0 has the smaller call number."""
    early = on(1, clean(0), clean(1), clean(2), fault(3, 9), reduce(4))
    late = on(0, reduce(0), fault(1, 9))
    found = origin([late, early])
    assert first(found) == ("Torch.mul.0.forward", 1, Status.INTRODUCED)
    assert found.also == ()
    assert [each.rank for each in found.findings] == [1, 0]


def test_an_exchange_between_others_orders_ranks_that_never_met() -> None:
    found = origin(
        [
            on(0, reduce(0, group=[0, 1], index=0), fault(1, 9)),
            on(1, reduce(0, group=[1, 2], index=0), reduce(1, group=[0, 1], index=1)),
            on(2, fault(0, 9), reduce(1, group=[1, 2])),
        ]
    )
    assert first(found) == ("Torch.mul.0.forward", 2, Status.INTRODUCED)
    assert found.also == ()


def test_findings_that_nothing_orders_are_all_given() -> None:
    found = origin([on(rank, fault(0, 1), reduce(1, WRONG, WRONG)) for rank in range(3)])
    assert first(found) == ("Torch.mul.0.forward", 0, Status.INTRODUCED)
    assert [each.rank for each in found.also] == [1, 2]
    assert found.sentences == ("at the same time ranks 1-2: Torch.mul.0.forward",)


def test_a_fault_in_another_group_is_its_own() -> None:
    """Although its group has met more often before."""
    pairs = [on(rank, fault(0, 1), reduce(1, WRONG, WRONG, group=[0, 1])) for rank in (0, 1)]
    meetings = [reduce(seq, group=[2, 3], index=seq) for seq in range(3)]
    others = [on(2, *meetings, fault(3, 9)), on(3, *meetings)]
    found = origin([*pairs, *others])
    assert first(found) == ("Torch.mul.0.forward", 0, Status.INTRODUCED)
    assert [each.rank for each in found.also] == [1, 2]


def test_a_rank_is_reached_once() -> None:
    faulty = on(1, fault(0, 1), reduce(1, WRONG, WRONG), reduce(2, WRONG, WRONG, index=1))
    other = on(0, reduce(0, 0.0, WRONG), reduce(1, 0.0, WRONG, index=1))
    assert origin([faulty, other]).sentences == ("rank 1 -> rank 0 at Distributed.all_reduce.0.forward",)


def test_findings_are_in_the_order_of_all_ranks() -> None:
    """Not in that of the calls' numbers: rank 1 has made fewer calls."""
    zero = on(0, clean(0), clean(1), clean(2), reduce(3, 0.0, WRONG), clean(4))
    one = on(1, reduce(0, 0.0, WRONG), fault(1, 9))
    found = origin([zero, one])
    assert [(each.rank, each.call.name) for each in found.findings] == [
        (1, "all_reduce"),
        (0, "all_reduce"),
        (1, "mul"),
    ]


def test_communication_is_the_culprit_where_all_gave_what_the_reference_has() -> None:
    found = origin([on(rank, clean(0), reduce(1, 0.0, WRONG), clean(2)) for rank in range(2)])
    assert first(found) == ("Distributed.all_reduce.0.forward", 0, Status.INTRODUCED)
    assert found.first is not None
    assert found.first.text == "ranks 0-1 gave what the reference has and got something else"
    assert [each.rank for each in found.also] == [1]


def test_a_fault_before_communication_that_fails_too_is_first() -> None:
    found = origin([on(0, fault(0, 9), reduce(1, 0.0, WRONG)), on(1, clean(0), reduce(1, 0.0, WRONG))])
    assert first(found) == ("Torch.mul.0.forward", 0, Status.INTRODUCED)
    assert found.also == ()


def test_what_came_from_a_rank_that_was_not_compared_is_from_outside() -> None:
    found = origin([on(0, reduce(0, 0.0, WRONG, group=[0, 1]))])
    assert first(found) == ("Distributed.all_reduce.0.forward", 0, Status.SOURCE)
    assert found.first is not None
    assert found.first.text == "it came from other ranks, and rank 1 cannot be compared"
    alone = origin([on(0, reduce(0, 0.0, WRONG))])
    assert alone.first is not None
    assert alone.first.text == "it came from other ranks, and those were not compared"


def test_a_group_of_one_has_nobody_to_blame() -> None:
    assert first(origin([on(0, reduce(0, 0.0, WRONG, group=[0]))])) == (
        "Distributed.all_reduce.0.forward",
        0,
        Status.INTRODUCED,
    )


def test_a_member_whose_input_is_not_known_leaves_it_open() -> None:
    unknown = call("all_reduce", 0, unmeasured("input"), tensor("output", error=WRONG), kind="Distributed")
    found = origin([on(0, reduce(0, 0.0, WRONG)), on(1, unknown)])
    assert first(found) == ("Distributed.all_reduce.0.forward", 0, Status.SOURCE)
    assert found.first is not None
    assert found.first.text == "it came from other ranks, and what rank 1 gave is not known"


@pytest.mark.parametrize("names", [("send", "recv"), ("isend", "irecv"), ("send", "irecv")])
def test_a_message_carries_a_difference_one_way(names: tuple[str, str]) -> None:
    sender = on(0, fault(0, 1), send(1, 1, WRONG, name=names[0]))
    receiver = on(1, receive(0, 0, WRONG, name=names[1]), send(1, 2, 0.0), clean(2))
    found = origin([receiver, sender, on(2, receive(0, 1, 0.0))])
    assert first(found) == ("Torch.mul.0.forward", 0, Status.INTRODUCED)
    assert found.sentences == (
        f"rank 0 -> rank 1 at Distributed.{names[0]}.0.forward",
        "rank 2 agrees with the reference",
    )


def test_a_sender_learns_nothing_from_its_message() -> None:
    found = origin([on(0, send(0, 1), fault(1, 9)), on(1, fault(0, 9), receive(1, 0))])
    assert {found.first.rank if found.first else None, *(each.rank for each in found.also)} == {0, 1}


def test_messages_that_cross_do_not_wait_for_each_other() -> None:
    """Both receive before they send, as with irecv: neither could begin if a receive had to end first."""
    zero = on(0, fault(0, 2), receive(1, 1, name="irecv"), send(2, 1, WRONG, name="isend"))
    one = on(1, receive(0, 0, WRONG, name="irecv"), send(1, 0, name="isend"))
    found = origin([zero, one])
    assert first(found) == ("Torch.mul.0.forward", 0, Status.INTRODUCED)
    assert found.sentences == ("rank 0 -> rank 1 at Distributed.isend.0.forward",)


def batch(seq: int, *messages: tuple[str, int, float]):
    """Messages (op, peer, error), as native dumps list them: the outputs are what was received."""
    values, received = [], 0
    for at, (op, peer, error) in enumerate(messages):
        gave = error if op == "isend" else 0.0
        values += [argument((0, at, "op"), op, op, "str"), argument((0, at, "peer"), peer, peer, "int")]
        values.append(tensor("input", (0, at, "tensor"), gave, measure=100 + seq))
        if op == "irecv":
            values.append(tensor("output", received, error, measure=200 + seq + at))
            received += 1
    return call("batch_isend_irecv", seq, *values, kind="Distributed")


def test_a_batch_is_several_messages() -> None:
    zero = on(0, fault(0, 1), batch(1, ("isend", 1, WRONG), ("irecv", 2, 0.0)))
    one = on(1, batch(0, ("isend", 2, 0.0), ("irecv", 0, WRONG)))
    two = on(2, batch(0, ("isend", 0, 0.0), ("irecv", 1, 0.0)))
    found = origin([zero, one, two])
    assert first(found) == ("Torch.mul.0.forward", 0, Status.INTRODUCED)
    assert found.sentences == (
        "rank 0 -> rank 1 at Distributed.batch_isend_irecv.0.forward",
        "rank 2 agrees with the reference",
    )


def broadcast(seq: int, gave: float, got: float):
    values = (tensor("input", error=gave, measure=100 + seq), argument("src", 0, 0, "int"), tensor("output", error=got))
    return call("broadcast", seq, *values, kind="Distributed")


def test_only_the_root_of_a_broadcast_gives() -> None:
    """What the others hold before it may be anything."""
    found = origin([on(0, fault(0, 1), broadcast(1, WRONG, WRONG)), on(1, broadcast(0, 1.0, WRONG))])
    assert first(found) == ("Torch.mul.0.forward", 0, Status.INTRODUCED)
    assert found.sentences == ("rank 0 -> rank 1 at Distributed.broadcast.0.forward",)
    assert origin([on(0, broadcast(0, 0.0, 0.0)), on(1, broadcast(0, 1.0, 0.0))]).first is None


def test_the_earliest_step_wins_whatever_order_they_come_in() -> None:
    later = [on(rank, fault(0, 1), reduce(1, WRONG, WRONG), step=2) for rank in range(2)]
    early = [on(0, clean(0), reduce(1, 0.0, WRONG), step=1), on(1, fault(0, 1), reduce(1, WRONG, WRONG), step=1)]
    before = [on(rank, clean(0), reduce(1), step=0) for rank in range(2)]
    divergences = [*before, *early, *later]
    for seed in range(10):
        random.Random(seed).shuffle(divergences)
        found = origin(divergences)
        assert first(found) == ("Torch.mul.0.forward", 1, Status.INTRODUCED)
        assert found.first is not None and found.first.step == 1


def test_a_rank_that_differs_without_a_recorded_exchange_is_told() -> None:
    """As where gradients are reduced below Python."""
    gradients = call("fc.Linear", 5, tensor("parameters", "weight", WRONG), kind="Module", phase=Phase.PARAMETERS_GRAD)
    found = origin([on(0, clean(0), gradients), on(1, fault(0, 9), gradients)])
    assert first(found) == ("Torch.mul.0.forward", 1, Status.INTRODUCED)
    assert found.sentences == ("rank 0 too, by no recorded communication call",)


def test_a_missing_exchange_on_one_rank_stops_nobody() -> None:
    found = origin(
        [on(0, fault(0, 9), reduce(1), reduce(2, index=1), reduce(3, index=2)), on(1, reduce(0), fault(1, 9))]
    )
    assert first(found) == ("Torch.mul.0.forward", 0, Status.INTRODUCED)
    assert found.also == ()


@pytest.mark.parametrize(
    ("ranks", "text"), [([5], "rank 5"), ([4, 5, 6, 7], "ranks 4-7"), ([3, 0, 1, 7], "ranks 0-1, 3, 7")]
)
def test_ranks_are_told_in_spans(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_a_passing_costs_a_few_dozen_bytes() -> None:
    passings = Passings()
    way = Way("all_reduce", Direction.MEETING, tuple(range(8)), "7")
    for seq in range(1000):
        passings.add(
            CallId("Distributed", "all_reduce", seq, Phase.FORWARD), seq, way=way, gave=Side.AGREES, got=Side.DIFFERS
        )
    assert len(passings) == 1000
    assert passings[7].nth == 7 and passings[7].group == tuple(range(8)) and passings[-1].seq == 999
    assert [each.call.index for each in passings[3:5]] == [3, 4]
    assert sum(column.itemsize for column in passings._columns) <= 24
