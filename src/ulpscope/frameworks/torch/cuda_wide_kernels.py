"""Measuring large contiguous tensors of ordinary floats near the speed of the memory, by Triton.

Blocks with the same turn go into the same buckets without exchange between lanes. So each program takes blocks of one
turn (a list that is sorted by turn, `cuda_tables.py`), reads them 16 bytes a lane, adds them as they lie, and turns its
256 sums once, when it writes them. The parts are those of `cuda_kernels.measure`.
"""

import triton
import triton.language as tl

from ulpscope.frameworks.torch.cuda_kernels import _careful, _key


@triton.jit
def _store_part(head, high, low, total, square, zero):
    tl.store(head, _key(high))
    tl.store(head + 1, _key(low))
    numbers = head.to(tl.pointer_type(tl.float64))
    tl.store(numbers + 2, total)
    tl.store(numbers + 3, square)
    nothing = tl.zeros([], tl.int64)
    tl.store(head + 4, nothing)
    tl.store(head + 5, nothing)
    tl.store(head + 6, nothing)
    tl.store(head + 7, zero)
    tl.store(head + 8, nothing)
    tl.store(head + 9, nothing)


@triton.jit
def _numbers(order, at, stop, BLOCKS: tl.constexpr):
    """The next blocks of a list; past its end the first block of the tensor, which is there."""
    place = at + tl.arange(0, BLOCKS)
    return tl.load(order + place, mask=place < stop, other=0)


@triton.jit
def _fetch(pointer, sign_bytes, block, SKETCHED: tl.constexpr, WIDTH: tl.constexpr):
    """The elements of a few blocks, a lane reading WIDTH neighbours, and their signs."""
    lane = (tl.arange(0, 256 // WIDTH) * WIDTH)[None, :, None]
    row = block[:, None, None]
    x = tl.load(pointer + (row.to(tl.int64) * 256 + lane + tl.arange(0, WIDTH)[None, None, :]))
    if SKETCHED:
        byte = tl.load(sign_bytes + row * 32 + lane // 8)
    else:
        byte = row
    return x, byte


@triton.jit
def _two_at_a_time(kept, x, PACKED: tl.constexpr, BFLOAT16: tl.constexpr, FLOAT16: tl.constexpr):
    """What an instruction for pairs of 16-bit floats makes of what is kept and of new elements."""
    ASM: tl.constexpr = BFLOAT16 if PACKED == 1 else FLOAT16
    return tl.inline_asm_elementwise(ASM, "=r,r,r", [kept, x], dtype=kept.dtype, is_pure=True, pack=2)


@triton.jit
def _larger(high, x, PACKED: tl.constexpr):
    if PACKED:
        return _two_at_a_time(high, x, PACKED, "max.bf16x2 $0, $1, $2;", "max.f16x2 $0, $1, $2;")
    else:
        return tl.maximum(high, x.to(tl.float32))


@triton.jit
def _smaller(low, x, PACKED: tl.constexpr):
    if PACKED:
        return _two_at_a_time(low, x, PACKED, "min.bf16x2 $0, $1, $2;", "min.f16x2 $0, $1, $2;")
    else:
        return tl.minimum(low, x.to(tl.float32))


@triton.jit
def _with_zeros(count, x, PACKED: tl.constexpr):
    """How many were zero so far; a 16-bit float counts to 256."""
    if PACKED:
        return _two_at_a_time(
            count, x, PACKED,
            "{ .reg .b32 t, z; mov.b32 z, 0; set.eq.bf16x2.bf16x2 t, $2, z; add.bf16x2 $0, $1, t; }",
            "{ .reg .b32 t, z; mov.b32 z, 0; set.eq.f16x2.f16x2 t, $2, z; add.f16x2 $0, $1, t; }",
        )  # fmt: skip
    else:
        return count + (x == 0).to(tl.float32)


@triton.jit
def _fold(
    raw, byte, inside, high, low, total, square, zero, sketch,
    SKETCHED: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Adds what was fetched."""
    x = raw.to(tl.float32)
    if MASKED:
        x = tl.where(inside, x, 0.0)
        high = _larger(high, tl.where(inside, raw, float("-inf")).to(raw.dtype), PACKED)
        low = _smaller(low, tl.where(inside, raw, float("inf")).to(raw.dtype), PACKED)
        zero = _with_zeros(zero, tl.where(inside, raw, 1.0).to(raw.dtype), PACKED)
    else:
        high = _larger(high, raw, PACKED)
        low = _smaller(low, raw, PACKED)
        zero = _with_zeros(zero, raw, PACKED)
    total += tl.sum(x, 2)
    square += tl.sum(x * x, 2)
    if SKETCHED:
        lane = (tl.arange(0, 256 // WIDTH) * WIDTH)[None, :, None]
        element = tl.arange(0, WIDTH)[None, None, :]
        minus = (byte.to(tl.int32) << (31 - lane % 8 - element)) & -0x80000000
        sketch += (x.to(tl.int32, bitcast=True) ^ minus).to(tl.float32, bitcast=True)
    return high, low, total, square, zero, sketch


@triton.jit
def _tile(
    pointer, sign_bytes, one, two, three, four, high, low, total, square, zero, sketch,
    SKETCHED: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Four groups of blocks: all are asked for before the first is used. They are added among themselves before they
    meet what was carried over: Triton's pass for sums over loops fails on three dimensions."""
    LANES: tl.constexpr = 256 // WIDTH
    BLOCKS: tl.constexpr = 128 // LANES
    x1, b1 = _fetch(pointer, sign_bytes, one, SKETCHED, WIDTH)
    x2, b2 = _fetch(pointer, sign_bytes, two, SKETCHED, WIDTH)
    x3, b3 = _fetch(pointer, sign_bytes, three, SKETCHED, WIDTH)
    x4, b4 = _fetch(pointer, sign_bytes, four, SKETCHED, WIDTH)
    few = tl.zeros([BLOCKS, LANES], tl.float32)
    squares = tl.zeros([BLOCKS, LANES], tl.float32)
    zeros = tl.zeros([BLOCKS, LANES, WIDTH], high.dtype)
    high, low, few, squares, zeros, sketch = _fold(
        x1, b1, True, high, low, few, squares, zeros, sketch, SKETCHED, False, WIDTH, PACKED
    )
    high, low, few, squares, zeros, sketch = _fold(
        x2, b2, True, high, low, few, squares, zeros, sketch, SKETCHED, False, WIDTH, PACKED
    )
    high, low, few, squares, zeros, sketch = _fold(
        x3, b3, True, high, low, few, squares, zeros, sketch, SKETCHED, False, WIDTH, PACKED
    )
    high, low, few, squares, zeros, sketch = _fold(
        x4, b4, True, high, low, few, squares, zeros, sketch, SKETCHED, False, WIDTH, PACKED
    )
    return high, low, total + few.to(tl.float64), square + squares.to(tl.float64), zero + zeros.to(tl.float32), sketch


@triton.jit
def _group(
    pointer, sign_bytes, one, left, high, low, total, square, zero, sketch,
    SKETCHED: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One group, of which `left` blocks are there."""
    LANES: tl.constexpr = 256 // WIDTH
    BLOCKS: tl.constexpr = 128 // LANES
    x, byte = _fetch(pointer, sign_bytes, one, SKETCHED, WIDTH)
    inside = (tl.arange(0, BLOCKS) < left)[:, None, None]
    few = tl.zeros([BLOCKS, LANES], tl.float32)
    squares = tl.zeros([BLOCKS, LANES], tl.float32)
    zeros = tl.zeros([BLOCKS, LANES, WIDTH], high.dtype)
    high, low, few, squares, zeros, sketch = _fold(
        x, byte, inside, high, low, few, squares, zeros, sketch, SKETCHED, True, WIDTH, PACKED
    )
    return high, low, total + few.to(tl.float64), square + squares.to(tl.float64), zero + zeros.to(tl.float32), sketch


@triton.jit
def wide_part(
    program, programs, address, parts, part, segments, row, signs, turns, order, starts, counts, numel, split,
    DTYPE: tl.constexpr, SKETCHED: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """One part: blocks of one turn, or a share of them; the last program takes the block that is not whole."""
    pointer = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
    sign_table = signs.to(tl.pointer_type(tl.int32))
    turn_table = turns.to(tl.pointer_type(tl.int32))
    list_of_blocks = order.to(tl.pointer_type(tl.int32))
    head = parts.to(tl.pointer_type(tl.int64)) + (part + program) * 140
    sums = (head + 12).to(tl.pointer_type(tl.float32))
    bucket = tl.arange(0, 256)
    if program == 0:
        segment = segments.to(tl.pointer_type(tl.int64)) + row * 2
        tl.store(segment, part)
        tl.store(segment + 1, programs.to(tl.int64))
    if program == 256 * split:
        whole = (numel // 256).to(tl.int32)
        _careful(
            head, sums + bucket, pointer, whole, whole + 1, numel, sign_table, turn_table, list_of_blocks,
            0, 0, 0, 0, 0, 0, 0, 0, SKETCHED, False, False,
        )  # fmt: skip
        return
    turn = program // split
    share = program % split
    begin = tl.load(starts.to(tl.pointer_type(tl.int32)) + turn)
    count = tl.load(counts.to(tl.pointer_type(tl.int32)) + turn)
    LANES: tl.constexpr = 256 // WIDTH
    BLOCKS: tl.constexpr = 128 // LANES
    GROUP: tl.constexpr = 4 * BLOCKS
    KEPT: tl.constexpr = DTYPE if PACKED else tl.float32
    each = (count + split * BLOCKS - 1) // (split * BLOCKS) * BLOCKS
    first = begin + tl.minimum(share * each, count)
    stop = begin + tl.minimum((share + 1) * each, count)
    high = tl.full([BLOCKS, LANES, WIDTH], float("-inf"), KEPT)
    low = tl.full([BLOCKS, LANES, WIDTH], float("inf"), KEPT)
    total = tl.zeros([BLOCKS, LANES], tl.float64)
    square = tl.zeros([BLOCKS, LANES], tl.float64)
    zero = tl.zeros([BLOCKS, LANES, WIDTH], tl.float32)
    sketch = tl.zeros([BLOCKS, LANES, WIDTH], tl.float32)
    sign_bytes = signs.to(tl.pointer_type(tl.uint8))
    full = first + (stop - first) // GROUP * GROUP
    one = _numbers(list_of_blocks, first, stop, BLOCKS)
    two = _numbers(list_of_blocks, first + BLOCKS, stop, BLOCKS)
    three = _numbers(list_of_blocks, first + 2 * BLOCKS, stop, BLOCKS)
    four = _numbers(list_of_blocks, first + 3 * BLOCKS, stop, BLOCKS)
    for at in range(first, full, GROUP):
        next_one = _numbers(list_of_blocks, at + GROUP, stop, BLOCKS)
        next_two = _numbers(list_of_blocks, at + GROUP + BLOCKS, stop, BLOCKS)
        next_three = _numbers(list_of_blocks, at + GROUP + 2 * BLOCKS, stop, BLOCKS)
        next_four = _numbers(list_of_blocks, at + GROUP + 3 * BLOCKS, stop, BLOCKS)
        high, low, total, square, zero, sketch = _tile(
            pointer, sign_bytes, one, two, three, four, high, low, total, square, zero, sketch, SKETCHED, WIDTH, PACKED
        )
        one = next_one
        two = next_two
        three = next_three
        four = next_four
    for at in range(full, stop, BLOCKS):
        high, low, total, square, zero, sketch = _group(
            pointer, sign_bytes, _numbers(list_of_blocks, at, stop, BLOCKS), stop - at,
            high, low, total, square, zero, sketch, SKETCHED, WIDTH, PACKED,
        )  # fmt: skip
    largest = tl.max(tl.max(tl.max(high.to(tl.float32), 2), 1), 0)
    smallest = tl.min(tl.min(tl.min(low.to(tl.float32), 2), 1), 0)
    sum_all = tl.sum(tl.sum(total, 1), 0)
    sum_squares = tl.sum(tl.sum(square, 1), 0)
    # As in cuda_kernels.measure: what is not finite, or has lost bits, is read once more with care.
    finite = (tl.abs(sum_all) < float("inf")) & (sum_squares < float("inf"))
    exact = (sum_squares > 1e-25) | ((largest == 0) & (smallest == 0))
    if finite & exact:
        _store_part(
            head,
            largest,
            smallest,
            sum_all,
            sum_squares,
            tl.sum(tl.sum(tl.sum(zero.to(tl.int32), 2), 1), 0).to(tl.int64),
        )
        if SKETCHED:
            place = (tl.arange(0, LANES) * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
            tl.store(sums + ((place + turn) & 255), tl.sum(sketch, 0))
    else:
        _careful(
            head, sums + bucket, pointer, first, stop, numel, sign_table, turn_table, list_of_blocks,
            0, 0, 0, 0, 0, 0, 0, 0, SKETCHED, False, True,
        )  # fmt: skip
