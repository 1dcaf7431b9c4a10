"""The judge on rows made by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from ulpscope.analyze.ledger import Verdict, judge
from ulpscope.analyze.pattern import pattern
from ulpscope.analyze.told import told_differently
from ulpscope.store.ledger_file import Exchange, Leaf, Measure, Row


def row(seq: int = 0, **fields: Any) -> Row:
    given: dict[str, Any] = {
        "step": 0,
        "rank": 0,
        "phase": "forward",
        "op": "aten.mm.default",
        "dtypes": "bfloat16,bfloat16",
        "index": seq,
        "kind": "contraction",
        "module": f"layers.{seq}",
        "api": f"Functional.linear.{seq}.forward",
    }
    return Row(seq=seq, **(given | fields))


def measure(**fields: Any) -> Measure:
    given: dict[str, Any] = {"place": 0, "dtype": "bfloat16", "shape": (16, 64), "terms": 128, "rms": 0.3, "worst": 0.9}
    return Measure(**(given | fields))


def clean(count: int = 8) -> list[Row]:
    return [row(seq, measures=(measure(),)) for seq in range(count)]


def with_one(at: int, **fields: Any) -> list[Row]:
    rows = clean()
    rows[at] = row(at, **fields)
    return rows


def test_rounding_alone_names_nobody() -> None:
    judgement = judge(clean(), clean())
    assert judgement.first is None
    assert judgement.counts == {"within rounding": 8}


def test_the_call_above_its_limit_is_named_and_not_those_after_it() -> None:
    judgement = judge(with_one(3, measures=(measure(rms=8.0, worst=20.0),)))
    assert judgement.first is not None
    assert (judgement.first.row.seq, judgement.first.verdict) == (3, Verdict.INTRODUCED)
    assert len(judgement.findings) == 1
    assert judgement.first.excess == pytest.approx(8.0 / 0.8, rel=0.02)


def test_the_first_sure_finding_comes_before_an_earlier_doubtful_one() -> None:
    rows = with_one(3, measures=(measure(rms=800.0),))
    rows[1] = row(1, measures=(measure(rms=0.9),))
    judgement = judge(rows)
    assert judgement.first is not None
    assert judgement.first.row.seq == 3
    assert [finding.row.seq for finding in judgement.findings] == [1, 3]


def test_a_call_that_is_as_wide_in_the_reference_is_not_named() -> None:
    wide = with_one(3, measures=(measure(rms=8.0, worst=20.0),))
    assert judge(wide, wide).first is None


def test_a_reference_in_another_dtype_does_not_widen_the_limit() -> None:
    target = with_one(3, measures=(measure(rms=8.0, worst=20.0),))
    reference = with_one(3, measures=(measure(rms=8.0, worst=20.0, dtype="float32"),))
    judgement = judge(target, reference)
    assert judgement.first is not None
    assert judgement.first.row.seq == 3


def test_one_call_that_rounds_its_partial_sums_stands_out_among_its_peers() -> None:
    # 0.7 is below what theory allows for partial sums in bfloat16, but no other call of this run has them.
    judgement = judge(with_one(3, measures=(measure(rms=0.7),)), clean())
    assert judgement.first is not None
    assert judgement.first.row.seq == 3
    everywhere = [row(seq, measures=(measure(rms=0.7),)) for seq in range(8)]
    assert judge(everywhere, clean()).first is None


def test_a_running_sum_is_not_compared_with_shorter_ones() -> None:
    sums = {"kind": "contraction", "op": "aten.embedding_dense_backward.default"}
    short = [row(seq, measures=(measure(dtype="float16", rms=0.05),), **sums) for seq in range(7)]
    long = row(7, measures=(measure(dtype="float16", rms=1.3, terms=64),), **sums)
    assert judge([*short, long]).first is None


@pytest.mark.parametrize(("op", "named"), [("aten.sigmoid_backward.default", False), ("aten.sigmoid.default", True)])
def test_a_product_of_three_may_be_rounded_three_times(op: str, named: bool) -> None:
    rounded = measure(dtype="float16", misrounded=0.36)
    assert (judge([row(0, measures=(rounded,), op=op, kind="map")]).first is not None) == named


@pytest.mark.parametrize(
    ("toward", "spread", "named"), [(-0.72, 0.01, True), (-0.72, 0.2, False), (-0.02, 0.001, False)]
)
def test_a_result_that_leans_is_named_if_chance_does_not_explain_it(toward: float, spread: float, named: bool) -> None:
    judgement = judge(with_one(3, measures=(measure(toward=toward, spread=spread),)), clean())
    assert (judgement.first is not None) == named


@pytest.mark.parametrize(("scalars", "named"), [({"other": 0.1}, False), ({}, True)])
def test_a_product_with_a_number_may_lean_since_the_number_is_rounded_first(
    scalars: dict[str, Any], named: bool
) -> None:
    product = {"kind": "map", "op": "aten.mul.Tensor", "scalars": scalars}
    leaning = measure(dtype="float32", toward=0.8, spread=0.001, rms=0.8)
    assert (judge(with_one(3, measures=(leaning,), **product)).first is not None) == named


def test_an_element_that_should_be_finite_and_is_not_names_its_producer() -> None:
    judgement = judge(with_one(2, measures=(measure(lost=1),)))
    assert judgement.first is not None
    assert "not finite" in judgement.first.why


def test_moved_data_must_be_equal_to_the_bit() -> None:
    moved = {"kind": "movement", "op": "aten.cat.default"}
    judgement = judge(with_one(2, measures=(measure(rms=0.0, worst=0.0, wrong=3),), **moved))
    assert judgement.first is not None
    assert judgement.first.why.startswith("3 of 1024 elements differ")


def test_another_argument_is_found_before_any_arithmetic() -> None:
    scaled = {"kind": "map", "op": "aten.mul.Tensor"}
    reference = with_one(2, scalars={"other": 0.125}, **scaled)
    target = with_one(2, scalars={"other": 0.15}, **scaled)
    judgement = judge(target, reference)
    assert judgement.first is not None
    assert (judgement.first.verdict, judgement.first.row.seq) == (Verdict.TOLD, 2)
    assert judgement.first.why == "other = 0.15, the reference has 0.125"


def test_a_number_after_a_choice_may_differ_and_a_number_before_it_may_not() -> None:
    def run(size: int, *, chosen: bool) -> list[Row]:
        choice = row(0, op="aten.topk.default", kind="choice", decides=chosen)
        return [choice, row(1, op="aten.narrow.default", kind="movement", scalars={"length": size})]

    assert judge(run(3, chosen=True), run(4, chosen=True)).first is None
    assert judge(run(3, chosen=False), run(4, chosen=False)).first is not None


def leaf(**fields: Any) -> Leaf:
    given: dict[str, Any] = {
        "place": "mat2",
        "dtype": "float32",
        "shape": (4, 4),
        "crc": 1,
        "norm": 4.0,
        "sketch": (1.0,),
    }
    return Leaf(**(given | fields))


def test_other_weights_are_named_with_the_call_that_reads_them() -> None:
    reference = with_one(2, leaves=(leaf(name="layers.2.weight"),))
    target = with_one(2, leaves=(leaf(name="layers.2.weight", crc=2),))
    judgement = judge(target, reference)
    assert judgement.first is not None
    assert "layers.2.weight" in judgement.first.why


def test_weights_of_lower_precision_are_the_same_up_to_their_rounding() -> None:
    reference = [row(seq, leaves=(leaf(),)) for seq in range(4)]
    rounded = [row(seq, leaves=(leaf(dtype="bfloat16", crc=7, sketch=(1.001,)),)) for seq in range(4)]
    assert judge(rounded, reference).first is None
    other = [*rounded[:3], row(3, leaves=(leaf(dtype="bfloat16", crc=7, sketch=(2.0,)),))]
    judgement = judge(other, reference)
    assert judgement.first is not None
    assert judgement.first.row.seq == 3


def test_a_call_that_only_the_target_makes_is_a_finding() -> None:
    extra = [
        *clean(4),
        row(4, module="layers.0", api="Functional.relu.0.forward", op="aten.relu.default", kind="movement"),
    ]
    judgement = judge(extra, clean(4))
    assert judgement.first is not None
    assert judgement.first.why == "called 1 times here, 0 times in the reference"


def test_a_rank_that_did_not_get_the_sum_is_named() -> None:
    def rank(number: int, got: float) -> Row:
        exchange = Exchange("allreduce.sum", (0, 1), 0, given=(float(number + 1),), got=(got,), norm=10.0)
        part = {"op": "c10d.allreduce_.default", "kind": "collective", "rank": number, "exchange": exchange}
        return row(0, measures=(measure(dtype="float32", rms=0.0, worst=0.0),), **part)

    assert judge([rank(0, 3.0), rank(1, 3.0)]).first is None
    judgement = judge([rank(0, 3.0), rank(1, 2.0)])
    assert judgement.first is not None
    assert judgement.first.row.rank == 1


Floats = tuple[float, ...]


@pytest.mark.parametrize(
    ("how", "given", "got", "wrong"),
    [
        ("broadcast.1", [(1.0,), (2.0,)], [(2.0,), (2.0,)], [(1.0,), (2.0,)]),
        ("allgather_base", [(1.0,), (2.0,)], [(1.0, 2.0), (1.0, 2.0)], [(2.0, 1.0), (1.0, 2.0)]),
        ("reduce_scatter_base.sum", [(1.0, 2.0), (3.0, 4.0)], [(4.0,), (6.0,)], [(6.0,), (6.0,)]),
        ("reduce_scatter_base.avg", [(1.0, 2.0), (3.0, 4.0)], [(2.0,), (3.0,)], [(4.0,), (3.0,)]),
    ],
)
def test_a_rank_that_got_something_else_is_named(
    how: str, given: list[Floats], got: list[Floats], wrong: list[Floats]
) -> None:
    def ranks(got: list[Floats]) -> list[Row]:
        exchanges = [Exchange(how, (0, 1), 0, given=given[at], got=got[at], norm=10.0) for at in range(2)]
        part = {"op": f"c10d.{how}", "kind": "collective", "measures": (measure(dtype="float32", rms=0.0, worst=0.0),)}
        return [row(0, rank=at, exchange=exchange, **part) for at, exchange in enumerate(exchanges)]

    assert judge(ranks(got)).first is None
    first = judge(ranks(wrong)).first
    assert first is not None
    assert first.row.rank == 0


def test_what_could_not_be_judged_is_unknown_and_says_why() -> None:
    judgement = judge(with_one(2, unknown="NotImplementedError: no double"))
    assert judgement.counts["unknown"] == 1
    assert judgement.unknown == {"aten.mm.default: NotImplementedError: no double": 1}


def test_what_is_not_finite_has_no_other_shape() -> None:
    assert pattern(measure(lost=1)).kind == "not finite"
    assert pattern(measure(undefined=2)).kind == "not finite"


def test_the_factor_of_a_scale_error_is_told() -> None:
    found = pattern(measure(toward=8.0, spread=0.01, rms=8.0))
    assert math.isclose(float(found.text.rsplit(" ", 1)[1]), 1 + 8 / 256, rel_tol=1e-6)


def test_a_row_survives_the_change_of_its_step() -> None:
    later = [replace(each, step=1) for each in clean(2)]
    assert judge([*clean(2), *later], [*clean(2), *later]).first is None


def test_kernels_of_a_call_that_was_made_of_others_are_not_compared_by_their_arguments() -> None:
    call = {"module": "attn", "api": "Functional.scaled_dot_product_attention.0.forward", "kind": "view"}
    reference = [row(0, op="aten.transpose.int", scalars={"dim0": 1}, **call)]
    target = [
        row(0, op="aten.transpose.int", scalars={"dim0": -2}, **call),
        row(1, op="aten._scaled_dot_product_flash_attention.default", **call),
    ]
    assert not [why for _, why, _ in told_differently(reference, target)]
    assert [why for _, why, _ in told_differently(reference, target[:1])] == ["dim0 = -2, the reference has 1"]


def test_a_copy_that_only_one_device_needs_is_not_told() -> None:
    copy = row(3, op="aten.clone.default", kind="movement", api="Tensor.contiguous.0.forward", module="layers.2")
    assert judge([*clean(3), copy], clean(3)).first is None
    moved = replace(copy, op="aten._to_copy.default", dtypes="float32", scalars={"dtype": "torch.float32"})
    assert judge([*clean(3), moved], clean(3)).first is None
    assert judge([*clean(3), replace(moved, scalars={"dtype": "torch.float16"})], clean(3)).first is not None
    other = row(3, op="aten.relu.default", kind="movement", api="Functional.relu.0.forward", module="layers.2")
    first = judge([*clean(3), other], clean(3)).first
    assert first is not None
    assert first.verdict is Verdict.TOLD


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer"])
def test_where_nothing_was_followed_nan_is_named_and_inf_only_where_it_can_not_be_meant(phase: str) -> None:
    nan = judge(with_one(2, phase=phase, measures=(measure(undefined=3),))).first
    assert nan is not None
    assert (nan.row.seq, nan.verdict) == (2, Verdict.PURPOSE)
    assert nan.why.partition(":")[0] == "3 values are NaN, made from numbers"
    inf = judge(with_one(2, phase=phase, measures=(measure(infinite=3),))).first
    assert (inf is None) is (phase == "forward")


def pole(*after: Row) -> list[Row]:
    """A call that made an infinity, and those that read it."""
    made = row(0, op="aten.log.default", dtypes="float32", kind="map", measures=(measure(infinite=1),), poles=())
    return [made, *after]


SOURCE = (("aten.log.default", "float32", 0),)


def reader(seq: int, **fields: Any) -> Row:
    return row(seq, **({"op": "aten.mul.Tensor", "kind": "map", "poles": SOURCE} | fields))


@pytest.mark.parametrize(
    ("after", "harm"),
    [
        ([reader(1)], ""),
        ([reader(1, passes=True)], ""),
        ([reader(1, passes=True, ends="weight", param="fc.bias")], "the weight fc.bias in step 0"),
        ([reader(1, passes=True, ends="gradient", param="fc.bias")], "the gradient of fc.bias in step 0"),
        # An update that did not take it: the scaler of gradients has left the step out.
        ([reader(1, passes=True, ends="gradient"), row(2, phase="optimizer")], ""),
        ([reader(1, passes=True, ends="loss")], "a loss in step 0: Functional.linear.1.forward"),
    ],
)
def test_what_is_infinite_by_definition_is_a_finding_only_where_it_reaches_something(
    after: list[Row], harm: str
) -> None:
    found = judge(pole(*after))
    assert (found.first is not None) is bool(harm)
    (finding,) = found.findings or found.remarks
    assert finding.verdict is Verdict.PURPOSE
    assert (f"it reaches {harm}" if harm else "no weight or loss") in finding.why


def test_a_loss_that_is_masked_later_is_no_harm() -> None:
    loss = reader(1, op="aten.sum.default", dtypes="float32", index=0, passes=True, ends="loss")
    masked = row(2, op="aten.where.self", kind="movement", poles=(("aten.sum.default", "float32", 0),))
    assert judge(pole(loss, masked)).first is None
    passed = replace(masked, passes=True)
    assert judge(pole(loss, passed)).first is not None


def habitual(toward: float, **fields: Any) -> Measure:
    return measure(
        dtype="float32", shape=(64, 64), toward=toward, spread=0.001, **({"rms": 1.0, "worst": 4.0} | fields)
    )


def attention(*leans: float) -> list[Row]:
    told = {"op": "mine.attention.default", "kind": "norm", "dtypes": "float32"}
    return [row(seq, measures=(habitual(lean),), **told) for seq, lean in enumerate(leans)]


def test_what_a_kernel_does_at_every_call_at_one_small_size_is_its_habit() -> None:
    found = judge(attention(-4.0, -4.2, -3.9, -4.1, -4.0))
    assert found.first is None
    assert found.counts["habit"] == 5
    assert found.remarks[0].why.endswith("at all 5 calls of attention: as this kernel does")


@pytest.mark.parametrize(
    "leans",
    [
        (-4.0, -4.1, -4.0),  # too few to speak of all
        (-0.1, -0.1, -0.1, -0.1, -4.0),  # one that leaves the habit of its kind
        (-40.0, -40.0, -40.0, -40.0, -40.0),  # beyond what a quick function explains
    ],
)
def test_what_is_no_habit_is_named(leans: tuple[float, ...]) -> None:
    assert judge(attention(*leans)).first is not None


def test_in_low_precision_nothing_that_leans_is_a_habit() -> None:
    leaning = measure(toward=-0.72, spread=0.01)
    rows = [row(seq, measures=(leaning,)) for seq in range(8)]
    assert len(judge(rows).findings) == 8


def test_one_or_two_elements_have_no_root_mean_square() -> None:
    few = measure(dtype="float32", shape=(2,), rms=1.1, worst=1.2)
    told = {"op": "aten.sqrt.default", "kind": "map"}
    assert judge([row(0, measures=(few,), **told)]).first is None


def test_a_limit_that_nobody_measured_is_wider_and_says_so() -> None:
    told = {"op": "mine.op.default", "kind": "map"}
    near, far = (measure(dtype="float32", rms=rms, worst=4.0) for rms in (3.0, 5.0))
    assert judge([row(0, measures=(near,), **told)]).first is None
    first = judge([row(0, measures=(far,), **told)]).first
    assert first is not None
    assert first.why.endswith("limit assumed: op was not measured")


def test_nan_that_the_reference_makes_too_is_not_named() -> None:
    rows = with_one(2, measures=(measure(undefined=3),))
    assert judge(rows, rows).first is None
