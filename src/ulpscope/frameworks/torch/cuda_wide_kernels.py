"""Measuring large tensors of ordinary floats near the speed of the memory, by Triton.

Blocks with the same turn go into the same buckets, with the same signs but for their flips. So each program takes blocks of one
turn, one of each group, reads them 16 bytes a lane, adds them as they lie, and turns its 256 sums and gives them their signs once,
when it writes them. Groups are taken by tiles, and tiles by the shares of a turn in turn. The parts are those of
`cuda_kernels.measure_part`.

A tensor with strides (`STRIDED`) is one of up to four dimensions whose innermost lies together, in whole runs of 16 bytes
(`cuda_kernels.run_at`).
"""

import triton
import triton.language as tl

from ulpscope.frameworks.torch.cuda_kernels import _careful, _key, block_of, flips, run_at


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
def _fetch(
    pointer, block, n1, n2, n3, s0, s1, s2, m1, m2, m3, WIDTH: tl.constexpr, STRIDED: tl.constexpr
):  # fmt: skip
    """The elements of a few blocks, a lane reading WIDTH neighbours."""
    LANES: tl.constexpr = 256 // WIDTH
    beside = tl.arange(0, WIDTH)[None, None, :]
    if STRIDED:
        run = block[:, None, None] * LANES + tl.arange(0, LANES)[None, :, None]
        return tl.load(pointer + (run_at(run, n1, n2, n3, s0, s1, s2, m1, m2, m3) * WIDTH + beside))
    lane = (tl.arange(0, LANES) * WIDTH)[None, :, None]
    return tl.load(pointer + (block[:, None, None].to(tl.int64) * 256 + lane + beside))


@triton.jit
def _signs(flipped, group):
    """-1 for the blocks that are flipped."""
    ones = ((flipped >> (group.to(tl.uint32) & 31)) << 31) | 0x3F800000
    return ones.to(tl.float32, bitcast=True)[:, None, None]


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
    raw, sign, inside, high, low, total, square, zero, sketch,
    SKETCHED: tl.constexpr, MASKED: tl.constexpr, PACKED: tl.constexpr,
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
        sketch += x * sign
    return high, low, total, square, zero, sketch


@triton.jit
def _carried(high, low, few, squares, zeros, total, square, zero, sketch):
    """What a few groups came to, added to what was there before them."""
    total += few.to(tl.float64)
    square += squares.to(tl.float64)
    zero += tl.sum(zeros.to(tl.float32), 2)
    return high, low, total, square, zero, sketch


@triton.jit
def _tile(
    pointer, turn, at, n1, n2, n3, s0, s1, s2, m1, m2, m3, high, low, total, square, zero, sketch,
    BLOCKS: tl.constexpr, SKETCHED: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, STRIDED: tl.constexpr,
):  # fmt: skip
    """Four times BLOCKS groups: all are asked for before the first is used. They are added among themselves before they
    meet what was carried over: Triton's pass for sums over loops fails on three dimensions."""
    LANES: tl.constexpr = 256 // WIDTH
    one = at + tl.arange(0, BLOCKS)
    two = one + BLOCKS
    three = two + BLOCKS
    four = three + BLOCKS
    x1 = _fetch(pointer, block_of(one, turn), n1, n2, n3, s0, s1, s2, m1, m2, m3, WIDTH, STRIDED)
    x2 = _fetch(pointer, block_of(two, turn), n1, n2, n3, s0, s1, s2, m1, m2, m3, WIDTH, STRIDED)
    x3 = _fetch(pointer, block_of(three, turn), n1, n2, n3, s0, s1, s2, m1, m2, m3, WIDTH, STRIDED)
    x4 = _fetch(pointer, block_of(four, turn), n1, n2, n3, s0, s1, s2, m1, m2, m3, WIDTH, STRIDED)
    flipped = flips(at, turn)
    few = tl.zeros([BLOCKS, LANES], tl.float32)
    squares = tl.zeros([BLOCKS, LANES], tl.float32)
    zeros = tl.zeros([BLOCKS, LANES, WIDTH], high.dtype)
    high, low, few, squares, zeros, sketch = _fold(
        x1, _signs(flipped, one), True, high, low, few, squares, zeros, sketch, SKETCHED, False, PACKED
    )
    high, low, few, squares, zeros, sketch = _fold(
        x2, _signs(flipped, two), True, high, low, few, squares, zeros, sketch, SKETCHED, False, PACKED
    )
    high, low, few, squares, zeros, sketch = _fold(
        x3, _signs(flipped, three), True, high, low, few, squares, zeros, sketch, SKETCHED, False, PACKED
    )
    high, low, few, squares, zeros, sketch = _fold(
        x4, _signs(flipped, four), True, high, low, few, squares, zeros, sketch, SKETCHED, False, PACKED
    )
    return _carried(high, low, few, squares, zeros, total, square, zero, sketch)


@triton.jit
def _few(
    pointer, turn, at, whole, n1, n2, n3, s0, s1, s2, m1, m2, m3, high, low, total, square, zero, sketch,
    BLOCKS: tl.constexpr, SKETCHED: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, STRIDED: tl.constexpr,
):  # fmt: skip
    """BLOCKS groups, of which some may have no block with this turn."""
    LANES: tl.constexpr = 256 // WIDTH
    group = at + tl.arange(0, BLOCKS)
    block = block_of(group, turn)
    there = block < whole
    x = _fetch(pointer, tl.where(there, block, 0), n1, n2, n3, s0, s1, s2, m1, m2, m3, WIDTH, STRIDED)
    few = tl.zeros([BLOCKS, LANES], tl.float32)
    squares = tl.zeros([BLOCKS, LANES], tl.float32)
    zeros = tl.zeros([BLOCKS, LANES, WIDTH], high.dtype)
    high, low, few, squares, zeros, sketch = _fold(
        x, _signs(flips(at, turn), group), there[:, None, None], high, low, few, squares, zeros, sketch,
        SKETCHED, True, PACKED,
    )  # fmt: skip
    return _carried(high, low, few, squares, zeros, total, square, zero, sketch)


@triton.jit
def _merged(high, low, total, square, zero, other_high, other_low, other_total, other_square, other_zero):
    return (
        tl.maximum(high, other_high),
        tl.minimum(low, other_low),
        total + other_total,
        square + other_square,
        zero + other_zero,
    )


@triton.jit
def _flat(values):
    """One number a thread, in whatever order they are."""
    return tl.reshape(values, [128], can_reorder=True)


@triton.jit
def wide_part(
    program, programs, address, parts, part, segments, row, masks, numel, split, n1, n2, n3, s0, s1, s2, m1, m2, m3,
    DTYPE: tl.constexpr, SKETCHED: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, STRIDED: tl.constexpr,
):  # fmt: skip
    """One part: blocks of one turn, or a share of them; the last program takes the block that is not whole."""
    pointer = tl.multiple_of(address.to(tl.pointer_type(DTYPE)), 16)
    mask_table = masks.to(tl.pointer_type(tl.int32))
    head = parts.to(tl.pointer_type(tl.int64)) + (part + program) * 140
    sums = (head + 12).to(tl.pointer_type(tl.float32))
    bucket = tl.arange(0, 256)
    whole = (numel // 256).to(tl.int32)
    if program == 0:
        segment = segments.to(tl.pointer_type(tl.int64)) + row * 2
        tl.store(segment, part)
        tl.store(segment + 1, programs.to(tl.int64))
    if program == 256 * split:
        _careful(
            head, sums + bucket, pointer, whole, whole + 1, numel, mask_table, 0, 0, 0,
            n1, n2, n3 * WIDTH, s0 * WIDTH, s1 * WIDTH, s2 * WIDTH, 1, 0, SKETCHED, STRIDED, 0,
        )  # fmt: skip
        return
    turn = (program // split).to(tl.uint32)
    share = program % split
    LANES: tl.constexpr = 256 // WIDTH
    BLOCKS: tl.constexpr = 128 // LANES
    TILE: tl.constexpr = 4 * BLOCKS
    KEPT: tl.constexpr = DTYPE if PACKED else tl.float32
    lane = tl.arange(0, LANES)
    # The signs, long before they are needed.
    mask = tl.load(mask_table + program // split * 8 + lane * WIDTH // 32)
    high = tl.full([BLOCKS, LANES, WIDTH], float("-inf"), KEPT)
    low = tl.full([BLOCKS, LANES, WIDTH], float("inf"), KEPT)
    total = tl.zeros([BLOCKS, LANES], tl.float64)
    square = tl.zeros([BLOCKS, LANES], tl.float64)
    zero = tl.zeros([BLOCKS, LANES], tl.float32)
    sketch = tl.zeros([BLOCKS, LANES, WIDTH], tl.float32)
    tiles = whole // (256 * TILE)
    for tile in range(share, tiles, split):
        high, low, total, square, zero, sketch = _tile(
            pointer, turn, tile * TILE, n1, n2, n3, s0, s1, s2, m1, m2, m3, high, low, total, square, zero, sketch,
            BLOCKS, SKETCHED, WIDTH, PACKED, STRIDED,
        )  # fmt: skip
    # What is left is less than a tile.
    groups = (whole + 255) // 256 if tiles % split == share else 0
    for at in range(tiles * TILE, groups, BLOCKS):
        high, low, total, square, zero, sketch = _few(
            pointer, turn, at, whole, n1, n2, n3, s0, s1, s2, m1, m2, m3, high, low, total, square, zero, sketch,
            BLOCKS, SKETCHED, WIDTH, PACKED, STRIDED,
        )  # fmt: skip
    largest, smallest, total, square, zeros = tl.reduce(
        (
            _flat(tl.max(high.to(tl.float32), 2)),
            _flat(tl.min(low.to(tl.float32), 2)),
            _flat(total),
            _flat(square),
            _flat(zero.to(tl.int32)),
        ),
        0,
        _merged,
    )
    # As in cuda_kernels.measure_part: what is not finite, or has lost bits, is read once more with care.
    finite = (tl.abs(total) < float("inf")) & (square < float("inf"))
    exact = (square > 1e-25) | ((largest == 0) & (smallest == 0))
    if finite & exact:
        _store_part(head, largest, smallest, total, square, zeros.to(tl.int64))
        if SKETCHED:
            place = (lane * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
            minus = mask[:, None] << (31 - (place & 31))
            signed = tl.sum(sketch, 0).to(tl.int32, bitcast=True) ^ (minus & -0x80000000)
            tl.store(sums + ((place + program // split) & 255), signed.to(tl.float32, bitcast=True))
    else:
        count = (tiles + split - share) // split * TILE
        _careful(
            head, sums + bucket, pointer, 0, count, whole.to(tl.int64) * 256, mask_table, turn, share, split,
            n1, n2, n3 * WIDTH, s0 * WIDTH, s1 * WIDTH, s2 * WIDTH, 1, 0, SKETCHED, STRIDED, TILE,
        )  # fmt: skip
