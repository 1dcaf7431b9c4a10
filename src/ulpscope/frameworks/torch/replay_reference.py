"""What a kernel should have computed: the same operation in float64 on the inputs it was given.

Where a kernel has no float64 form, in this order: a reference registered with `ulpscope.reference`, one of the definitions
in `replay_definitions`, torch's decomposition. What has none of these is unknown, and says so.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ulpscope.frameworks.torch import internals
from ulpscope.frameworks.torch.replay_definitions import DEFINITIONS, INSIDE
from ulpscope.frameworks.torch.replay_scales import MAPS, SCALES
from ulpscope.frameworks.torch.replay_score import UNIT
from ulpscope.frameworks.torch.replay_values import items, mapped, mapped_args, mapped_kwargs, memory_of, tensors
from ulpscope.model.operators import FIRST_FACTOR, HIDDEN_WRITES, LOGARITHMS, OPAQUE_OUTPUTS, POSITIONS, Trait, traits

Definition = Callable[..., Any]
# Movement that may change the dtype, or writes plain numbers: the source is taken in float64 and rounded anew.
_CASTS = Trait.CASTS | Trait.COPIES_OVER
_STEP = 2.0**-26
_SAMPLES = 2
_PLACED = 4.0  # units by which the place of a sample may be off
_DRAWS = 8
_SIDES = 3  # operands that are moved to both sides of a jump
_LARGE = 1 << 14
_BLOCK = 1 << 19
_FAINT = 2.0**-96  # below it, a sum of squares in float32 may lack terms
_NOTHING = torch.finfo(torch.float32).tiny
_FACTORS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_REDUCES = frozenset({"norm", "max"})  # of a list, each to one number
# Namespaces of kernels and kinds of calls that bear an operand a little nearer to zero.
_KNOWN_DOMAINS = frozenset({"aten", "prims", "Functional", "Torch", "Tensor", "VF"})
# The process-wide registry of `ulpscope.reference`: an operator is registered once, as in torch itself.
_registered: dict[str, Definition] = {}


def reference(name: str) -> Callable[[Definition], Definition]:
    """Registers the definition of an operator of your own: `@ulpscope.reference("mylib::op")`.

    The function gets the operator's arguments with every floating point tensor in float64 and returns what the operator
    returns. An operator that writes its arguments gets copies and must write them.
    """
    if "::" not in name:
        raise ValueError(f"{name!r} is not the name of an operator; a name looks like 'mylib::op'")

    def enter(function: Definition) -> Definition:
        _registered[name] = function
        return function

    return enter


@dataclass(slots=True)
class Plan:
    """What is known about one kernel before it runs."""

    func: Any
    op: str
    name: str
    kind: str
    written: list[tuple[int, str]]
    fresh: list[int]
    working: bool = False
    registered: Definition | None = None
    schema: list[str] = field(default_factory=list)
    defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def decides(self) -> bool:
        return Trait.DECIDES in traits(self.name)


@dataclass(slots=True)
class Expected:
    """What each output should be, the scale of its error, and how many terms went into an element.

    `leans`: by how many units all elements of an output move together where plain arguments are rounded.
    """

    values: list[Any]
    scales: list[Tensor | None]
    terms: list[int]
    exact: bool
    working: list[bool]
    leans: list[float] | None = None


def plan_of(func: Any) -> Plan:
    schema = func._schema
    space, _, rest = schema.name.partition("::")
    written = [
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    written += [(place, schema.arguments[place].name) for place in HIDDEN_WRITES.get(rest, ())]
    aliases = [returned.alias_info for returned in schema.returns]
    fresh = [place for place, alias in enumerate(aliases) if alias is None]
    name = rest.removeprefix("_foreach_") if rest.startswith("_foreach_") else rest
    known = traits(name)
    bare = name if known & (Trait.EXACT | Trait.MULTILINEAR) else name.removesuffix("_")
    plan = Plan(func, f"{space}.{rest}.{func._overloadname}", bare, "", written, fresh)
    plan.registered = _registered.get(f"{space}::{rest}")
    plan.schema = [argument.name for argument in schema.arguments]
    plan.defaults = {each.name: each.default_value for each in schema.arguments if each.has_default_value()}
    plan.kind = _kind(plan, func, bool(aliases) and all(alias is not None for alias in aliases), rest)
    plan.working = plan.kind in ("contraction", "other") or Trait.SEVERAL_ROUNDINGS in known
    return plan


def _kind(plan: Plan, func: Any, aliased: bool, rest: str) -> str:
    name = plan.name
    if plan.registered is not None:
        return "custom"
    known = traits(name)
    if Trait.UNINITIALISED in traits(rest):
        return "unwritten"
    if (aliased and not plan.written) or Trait.GIVES_BACK in known:
        return "view"
    if torch.Tag.nondeterministic_seeded in func.tags and name not in DEFINITIONS:
        return "random"
    if Trait.POOLS in known or (Trait.CHOOSES in known and (len(func._schema.returns) > 1 or name.startswith("arg"))):
        return "choice"
    if Trait.EXACT in known:
        return "movement"
    if Trait.MULTILINEAR in known:
        return "contraction"
    if name in SCALES:
        return "map" if torch.Tag.pointwise in func.tags else "norm"
    if torch.Tag.pointwise in func.tags or (rest.startswith("_foreach_") and name not in _REDUCES):
        return "map"
    return "other"


def outputs(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> list[Any]:
    """The tensors a call has made or written, in a fixed order: fresh results, then written arguments."""
    returned = result if isinstance(result, tuple) else (result,)
    found: list[Any] = []
    hidden = OPAQUE_OUTPUTS.get(plan.name, ())
    for place in plan.fresh:
        if place < len(returned) and place not in hidden:
            item = returned[place]
            found += list(item) if isinstance(item, list | tuple) else [item]
    for place, key in plan.written:
        item = args[place] if place < len(args) else kwargs.get(key)
        found += list(item) if isinstance(item, list | tuple) else [item]
    return found


def keep_written(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with copies of what the call is going to write, under whichever name it reads that memory too."""
    if not plan.written:
        return args, kwargs
    written = [args[place] if place < len(args) else kwargs.get(key) for place, key in plan.written]
    memory = {memory_of(leaf) for leaf in tensors(written)}

    def keep(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) and memory_of(value) in memory else value

    return mapped_args(keep, args), mapped_kwargs(keep, kwargs)


def numbers_in(plan: Plan, found: list[Any]) -> tuple[torch.dtype | None, ...]:
    """What plain numbers may be rounded to before they are computed with; None: not at all. The usual one first."""
    dtypes = [item.dtype for item in found if isinstance(item, Tensor) and item.dtype in UNIT]
    if not dtypes or torch.float64 in dtypes or plan.kind not in ("map", "norm", "contraction", "other"):
        return (None,)
    if plan.kind == "other" and plan.written:
        return (None,)  # what an optimizer makes of its betas is a matter of `leans`
    own = dtypes[0]
    return (torch.float32, None) if own is torch.float32 else (torch.float32, None, own)


def has_numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether there is a plain number that a rounding would change."""
    return any(
        (isinstance(item, float) and math.isfinite(item))
        or (isinstance(item, Tensor) and not item.dim() and item.dtype is torch.float64)
        for item in items(args, kwargs)
    )


def expected(
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    found: list[Any],
    numbers: torch.dtype | None = None,
) -> Expected:
    """The reference of a call, with plain numbers rounded to `numbers`. Raises where there is none."""
    floats = [leaf for leaf in tensors(args, kwargs) if leaf.dtype in UNIT]
    answers = any(isinstance(item, Tensor) and item.dtype in UNIT for item in found)
    accumulates = Trait.ACCUMULATES in traits(plan.name) and not any(value is True for value in args[3:4])
    if plan.kind == "movement" or accumulates or not answers:
        if not answers or not floats or (floats[0].is_cpu and not traits(plan.name) & _CASTS):
            values = _run(plan, *_copied(plan, args, kwargs))
        else:
            values = _run(plan, *_up(plan, args, kwargs))
        return Expected(values, [None] * len(values), [1] * len(values), exact=True, working=[False] * len(values))
    if _is_large_product(plan, args):
        value, scale = _product(plan, args, kwargs)
        return Expected([value], [scale], _terms(plan, args, [value]), exact=False, working=[plan.working])
    wide, wide_kwargs = _up(plan, args, kwargs, integers=not floats, numbers=numbers)
    values = _evaluate(plan, wide, wide_kwargs)
    scales, terms = _scales(plan, wide, wide_kwargs, values, [leaf.dtype for leaf in tensors(args, kwargs)])
    logarithm = LOGARITHMS.get(plan.name)
    if logarithm is not None and (small := scales[logarithm]) is not None:
        scales[logarithm] = small + 1
    sums = Trait.SUMS_BESIDE in traits(plan.name)
    # A factor such as a learning rate is itself rounded to the working dtype by some kernels.
    factored = Trait.ROUNDED_ONCE in traits(plan.name)
    working = [
        plan.working or (sums and place > 0) or (factored and scales[place] is not None) for place in range(len(values))
    ]
    leans = _told_rounded(plan, wide, wide_kwargs, values, scales) if plan.kind == "other" and plan.written else None
    return Expected(values, scales, terms, exact=False, working=working, leans=leans)


def out_of_range(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Tensor | None:
    """Where a kernel must leave the range of its dtype on the way to a result that is in it; None where nothing is known."""
    run = INSIDE.get(plan.name)
    if run is None:
        return None
    beyond = ~torch.isfinite(run(*args, **kwargs))
    return beyond if beyond.shape == result.shape else beyond.any().expand(result.shape)


def beside_jumps(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], found: list[Any], want: Expected) -> None:
    """What jumps where its operands move by a unit may be on either side: of each element, the side nearer to what was found."""
    unit = max((UNIT[item.dtype] for item in found if isinstance(item, Tensor) and item.dtype in UNIT), default=0.0)
    wide, wide_kwargs = _up(plan, args, kwargs)
    operands = [at for at, value in enumerate(wide) if _is_wide(value)]
    for moved in _to_both_sides(wide, operands, unit, POSITIONS.get(plan.name)):
        for at, value in enumerate(_evaluate(plan, moved, wide_kwargs)):
            near, item = want.values[at], found[at]
            if _is_wide(near) and _is_wide(value) and value.shape == near.shape == item.shape:
                nearer = (value - item).abs() < (near - item).abs()
                want.values[at] = torch.where(nearer, value, near)


def _to_both_sides(
    wide: tuple[Any, ...], operands: list[int], unit: float, grid: int | None
) -> Iterator[tuple[Any, ...]]:
    """The arguments with operands a unit up and down; each place of a grid for itself, by as much as working it out may be off."""
    if grid is None:
        for signs in itertools.product((-unit, unit), repeat=min(_SIDES, len(operands))):
            moves = dict(zip(operands, signs, strict=False))
            yield tuple(value * (1 + moves[at]) if at in moves else value for at, value in enumerate(wide))
        return
    generator = torch.Generator().manual_seed(0)
    places = wide[grid]
    for _ in range(_DRAWS):
        by = torch.rand(places.shape, generator=generator, dtype=torch.float64).mul_(2).sub_(1).to(places.device)
        moved = places + by.mul_(_PLACED * unit) * places.abs().clamp_min(1.0)
        yield (*wide[:grid], moved, *wide[grid + 1 :])


# --- running ----------------------------------------------------------------------------------------------------


def _evaluate(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The results in float64, of copies of what the kernel writes."""
    args, kwargs = keep_written(plan, args, kwargs)
    return _run(plan, args, kwargs)


def _run(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    run = plan.registered or DEFINITIONS.get(plan.name)
    if run is None:
        try:
            return outputs(plan, args, kwargs, plan.func(*args, **kwargs))
        except (RuntimeError, NotImplementedError):
            run = internals.decompositions.get(plan.func)
            if run is None:
                raise
    return outputs(plan, args, kwargs, run(*args, **kwargs))


def _copied(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return keep_written(plan, args, kwargs)


def _up(
    plan: Plan,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    integers: bool = False,
    numbers: torch.dtype | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments in float64; `integers` too, where an operation makes floats of them. Plain numbers are rounded to
    `numbers` first, a tensor that stands for one number among others too."""

    def widen(value: Any) -> Any:
        if isinstance(value, float) and numbers is not None:
            return rounded_number(value, numbers)
        if isinstance(value, Tensor):
            if numbers is not None and value.dtype is torch.float64 and not value.dim():
                return value.detach().to(numbers).to(torch.float64)
            if value.dtype in UNIT:
                return value.detach().to(torch.float64)
            if value.dtype is torch.complex64:
                return value.detach().to(torch.complex128)
            return value.detach().to(torch.float64) if integers and plan.kind in ("map", "contraction") else value
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return torch.float64
        return value

    wide = list(mapped_args(widen, args))
    wide_kwargs = mapped_kwargs(widen, kwargs)
    if Trait.HALF_TO_FLOAT in traits(plan.name) and len(wide) > 2:
        wide[2] = False
    return tuple(wide), wide_kwargs


def rounded_number(value: float, dtype: torch.dtype) -> float:
    """A plain number as a kernel of this dtype has it; one that does not fit is left as it is."""
    near = torch.tensor(value, dtype=torch.float64).to(dtype).item() if math.isfinite(value) else value
    return near if math.isfinite(near) and (near or not value) else value


# --- scales -----------------------------------------------------------------------------------------------------


def _scales(
    plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any], dtypes: list[torch.dtype]
) -> tuple[list[Tensor | None], list[int]]:
    count = len(values)
    ones = [1] * count
    if plan.kind == "contraction":
        return _squares(plan, args, kwargs, values), _terms(plan, args, values)
    rule = SCALES.get(plan.name)
    if rule is not None:
        found = rule(args, kwargs, values)
        return (found + [None] * count)[:count], _terms(plan, args, values) if plan.kind == "norm" else ones
    if plan.kind == "map":
        if Trait.ROUNDED_ONCE in traits(plan.name):
            if kwargs.get("rounding_mode") is not None:
                return [2 * value.abs() for value in values], ones  # by way of the remainder: three roundings
            return _second_part(plan, args, kwargs, count), ones
        if plan.name == "pow" and len(args) > 1 and isinstance(args[1], int | float):
            exponent = abs(float(args[1]))
            return [None if exponent == 2 else values[0].abs() * max(1.0, exponent)], ones
        if plan.name in MAPS and isinstance(args[0], Tensor):
            return MAPS[plan.name](args, kwargs, values), ones
        return _answers(plan, args, kwargs, values), ones
    return _shaken(plan, args, kwargs, values, dtypes), _terms(plan, args, values)


def _second_part(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> list[Tensor | None]:
    alpha = kwargs.get("alpha", args[2] if len(args) > 2 and isinstance(args[2], int | float) else 1)
    if alpha == 1:
        return [None] * count
    # `_foreach_add_` has a list of second parts, one for each result.
    parts = args[1] if isinstance(args[1], list | tuple) else [args[1]]
    return [(part * alpha).abs() if isinstance(part, Tensor) else None for part in parts]


def _squares(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any]) -> list[Tensor | None]:
    """Root of the sum of the squares of the products: the size of a partial sum of terms with random signs."""

    def square(value: Any) -> Any:
        return value * value if isinstance(value, Tensor) and value.dtype is torch.float64 else value

    squared = {key: value * value if key in ("alpha", "beta") else square(value) for key, value in kwargs.items()}
    found = _evaluate(plan, mapped_args(square, args), squared)
    scales: list[Tensor | None] = []
    for scale, value in zip(found, values, strict=True):
        if not isinstance(scale, Tensor):
            scales.append(None)
            continue
        root = scale.clamp_min(0.0).sqrt()
        if plan.name == "mean":
            root = root / math.sqrt(max(1, args[0].numel() // max(1, value.numel())))
        scales.append(root)
    return scales


def _is_large_product(plan: Plan, args: tuple[Any, ...]) -> bool:
    return (
        plan.name in ("mm", "addmm")
        and not plan.written
        and args[-1].numel() >= _LARGE
        and all(factor.layout is torch.strided and factor.dtype in _FACTORS for factor in args[-2:])
    )


def _product(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A large matrix product and its scale, some of its terms at a time: neither factor is there in float64 as a whole.

    The scale is that of `_squares` in float32: it needs few digits, and this is half of the work. Each row and column is
    taken in units of its own largest element, so that no square overflows; where terms may have vanished, because the large
    ones of a row meet the small ones of a column, it is done again in float64.
    """
    a, b = args[-2:]
    sizes = _largest(a, 1), _largest(b, 0)
    rows, terms, columns = a.shape[0], a.shape[1], b.shape[1]
    width = max(64, _BLOCK // (rows + columns))
    value = torch.zeros(rows, columns, dtype=torch.float64, device=a.device)
    squares = torch.zeros(rows, columns, dtype=torch.float32, device=a.device)
    for start in range(0, terms, width):
        parts = a[:, start : start + width], b[start : start + width]
        value.addmm_(*(part.double() for part in parts))
        squares.addmm_(*(_scaled(part, size).square_() for part, size in zip(parts, sizes, strict=True)))
    faint = squares < _FAINT
    scale = squares.sqrt_().double().mul_(sizes[0]).mul_(sizes[1])
    if bool(faint.any()):
        faint &= (sizes[0] > _NOTHING) & (sizes[1] > _NOTHING)
        for some in faint.any(1).nonzero().split(max(1, _BLOCK // columns)):
            some = some.flatten()
            scale[some] = a[some].double().square().mm(b.double().square()).sqrt_()
    if plan.name == "mm":
        return value, scale
    alpha, beta, added = kwargs.get("alpha", 1), kwargs.get("beta", 1), args[0].double()
    return value.mul_(alpha).add_(added, alpha=beta), torch.hypot(scale * alpha, added * beta)


def _largest(factor: Tensor, dim: int) -> Tensor:
    """The largest element of each row or column; never nothing to divide by."""
    low, high = torch.aminmax(factor, dim=dim, keepdim=True)
    return torch.maximum(-low, high).double().nan_to_num(1.0, 1.0, 1.0).clamp_min_(_NOTHING)


def _scaled(part: Tensor, sizes: Tensor) -> Tensor:
    """A copy in float32 without elements above 1: their squares do not overflow."""
    return part.div(sizes).float() if part.dtype is torch.float64 else part.float() / sizes.float()


def _answers(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any]) -> list[Tensor | None]:
    """|x f'(x)| summed over the operands of a map, by differences."""
    total: list[Any] = [None] * len(values)
    for place, operand in enumerate(args):
        if not any(_is_wide(leaf) for leaf in items((operand,))):
            continue
        moved = mapped(lambda leaf: _sides(plan, leaf, leaf * -_STEP)[0] if _is_wide(leaf) else leaf, operand)
        changed = _evaluate(plan, (*args[:place], moved, *args[place + 1 :]), kwargs)
        for at, (new, old) in enumerate(zip(changed, values, strict=True)):
            if _is_wide(old):
                part = ((new - old) / _STEP).abs()
                total[at] = part if total[at] is None else total[at] + part
    return total


def _shaken(
    plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any], dtypes: list[torch.dtype]
) -> list[Tensor | None]:
    """How the results answer when every operand element moves by a unit at random: any operation has this scale.

    An operand of a higher precision moves by a unit of its own. The moves come from a generator of our own; the program's
    is not touched.
    """
    generator = torch.Generator().manual_seed(0)
    coarsest = max((UNIT[dtype] for dtype in dtypes if dtype in UNIT), default=1.0)
    units = {
        id(leaf): UNIT.get(dtype, coarsest) / coarsest
        for leaf, dtype in zip(tensors(args, kwargs), dtypes, strict=True)
    }
    grid = id(args[POSITIONS[plan.name]]) if plan.name in POSITIONS else 0

    wide = [leaf for leaf in tensors(args, kwargs) if _is_moved(leaf)]
    others: list[Tensor] = []

    def shake(leaf: Any) -> Any:
        if not _is_moved(leaf):
            return leaf
        parts = torch.view_as_real(leaf) if leaf.is_complex() else leaf
        signs = torch.randint(0, 2, parts.shape, generator=generator, dtype=torch.int8)
        step = _STEP * units[id(leaf)]
        moves = torch.tensor([-step, step], dtype=torch.float64)[signs.int()].to(leaf.device)
        if id(leaf) == grid:
            moved, other = leaf + _PLACED * moves * leaf.abs().clamp_min(1.0), leaf
        elif leaf.is_complex():
            moved, other = torch.view_as_complex(parts * (1 + moves)), leaf
        else:
            moved, other = _sides(plan, leaf, leaf * moves)
        others.append(other)
        return moved

    def other_side(leaf: Any) -> Any:
        return next(sides) if _is_moved(leaf) else leaf

    squares: list[Any] = [None] * len(values)
    for _ in range(_SAMPLES):
        others.clear()
        changed = _evaluate(plan, mapped_args(shake, args), mapped_kwargs(shake, kwargs))
        base, sides = values, iter(others)
        if any(other is not leaf for other, leaf in zip(others, wide, strict=True)):
            base = _evaluate(plan, mapped_args(other_side, args), mapped_kwargs(other_side, kwargs))
        for at, (new, old) in enumerate(zip(changed, base, strict=True)):
            if _is_wide(old) and old.numel():
                part = ((new - old) / _STEP).square()
                squares[at] = part if squares[at] is None else squares[at] + part
    scales: list[Tensor | None] = []
    for square in squares:
        if square is None:
            scales.append(None)
            continue
        mean = (square / _SAMPLES).nan_to_num(0.0, 0.0, 0.0)
        scales.append((mean + 0.1 * mean.mean()).sqrt())
    return scales


def _sides(plan: Plan, leaf: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    """An operand moved, and what to compare with: no element leaves the domain of the kernel, which on CUDA may end the program.

    What lies between the smallest and the largest element is taken to be in it, as for probabilities. Elements that are all the same
    move toward zero, some here and the others there, which only torch's own kernels are known to bear. Raises LookupError for others.
    """
    finite = torch.isfinite(leaf)
    known = leaf[finite]
    if not known.numel():
        return leaf, leaf
    by = torch.where(finite, by, 0.0)
    low, high = torch.aminmax(known)
    if bool(low < high):
        moved, mirrored = leaf + by, leaf - by
        moved = torch.where((moved < low) | (moved > high), mirrored, moved)
        return torch.where((moved < low) | (moved > high), leaf, moved), leaf
    if plan.registered is None and plan.op.partition(".")[0] not in _KNOWN_DOMAINS:
        raise LookupError("the condition is unknown: the domain of the kernel is")
    inward = leaf - by.abs() * leaf.sign()
    up = by * leaf.sign() > 0
    return torch.where(up, leaf, inward), torch.where(up, inward, leaf)


def _told_rounded(
    plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any], scales: list[Tensor | None]
) -> list[float]:
    """How all results answer when the plain arguments are rounded: an optimizer in float32 may take 1 - beta of a rounded
    beta, and that is a thousand units. Widens the scales by it.
    """

    def move(leaf: Any) -> Any:
        return leaf * (1 - _STEP) if isinstance(leaf, float) else leaf

    leans = [0.0] * len(values)
    changed = _evaluate(plan, mapped_args(move, args), mapped_kwargs(move, kwargs))
    for at, (new, old, scale) in enumerate(zip(changed, values, scales, strict=True)):
        if scale is None or not _is_wide(old) or not old.numel():
            continue
        answer = ((new - old) / _STEP).nan_to_num(0.0, 0.0, 0.0)
        scales[at] = torch.hypot(scale, answer)
        large = old.abs() > 0.5 * old.norm() / math.sqrt(old.numel())
        if bool(large.any()):
            leans[at] = abs(float((answer[large] / old[large]).mean()))
    return leans


def _is_wide(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype is torch.float64


def _is_moved(leaf: Any) -> bool:
    """An operand that is moved to see how the results answer; the parts of a complex number are moved each for itself."""
    return isinstance(leaf, Tensor) and leaf.dtype in (torch.float64, torch.complex128)


def _terms(plan: Plan, args: tuple[Any, ...], values: list[Any]) -> list[int]:
    """How many products or summands one element of each result has."""
    sizes = [leaf.numel() for leaf in tensors(args)]
    name = plan.name
    if name in FIRST_FACTOR:
        return [args[FIRST_FACTOR[name]].shape[-1]] * len(values)
    if "convolution" in name and "backward" not in name:
        return [args[1].numel() // max(1, args[1].shape[0])] * len(values)
    if name.startswith("convolution_backward"):
        grad, weight = args[0], args[2]
        lines = grad.numel() // max(1, grad.shape[1])  # the gradients of weights and bias are sums over all of these
        return [weight.numel() // max(1, weight.shape[1]), lines, lines]
    return [
        max(1, max(sizes, default=1) // max(1, value.numel())) if isinstance(value, Tensor) and value.numel() else 1
        for value in values
    ]
