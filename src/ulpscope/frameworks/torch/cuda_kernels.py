"""Triton kernels that measure a tensor where it lies: one read, one launch, nothing waits.

`measure` cuts a tensor into spans of whole 256-element blocks; each program writes one part: a head of `HEAD` 64-bit
words and 256 sums of the sketch. `combine` adds the parts of each row in a fixed order, so that equal bits at
places that are aligned alike give equal numbers. How many programs there are depends on the tensor alone, not on the device.

An element goes to bucket (j + turn) & 255, so each lane belongs to a bucket and reads the element that falls into it:
turning costs an index, not an exchange between lanes. Turns are computed, signs come from a table (`cuda_tables.py`).

A launch measures one tensor, of which its arguments tell, or several, the others told by rows of 64-bit words in pinned memory: the
last program of the tensor and of all before it, plus one; its address, first part and row; then as the arguments are from the number
of elements on.

Words of a head: largest and smallest finite value as keys (integers in the order of the values), sum, sum of squares,
counts of nan, +inf, -inf and zero, for float64 the squares of values scaled by 2**-600 and 2**600, the CRC residue.
"""

import triton
import triton.language as tl

# Blocks that a program reads at a time: enough loads under way, few enough registers.
ROWS = 16
# Programs that make one row, with a sketch and without.
PIECES = (17, 1)


@triton.jit
def find(program, others, count):
    """The words of the tensor that a program belongs to, and the first of its programs; there are at most 128 tensors, with 24 words
    each (`cuda_mail.py`, `cuda_queue.c`)."""
    table = others.to(tl.pointer_type(tl.int64))
    lane = tl.arange(0, 128)
    end = tl.load(table + lane * 24, mask=lane < count, other=0x7FFFFFFF)
    number = tl.sum((end <= program).to(tl.int32), 0)
    begin = tl.load(table + number * 24 - 24, mask=number > 0, other=0)
    return table + number * 24, begin.to(tl.int32)


@triton.jit
def mixed(h):
    """The mixing function of the sketch (`ulpscope/native/measuring.py`)."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def group_turn(group):
    """What the turns of a group of blocks begin with."""
    return (group.to(tl.uint32) * 0x9E3779B1) >> 24


@triton.jit
def flips(group, turn):
    """A word with the flip of a block in bit `group & 31`."""
    return mixed((turn + (group.to(tl.uint32) >> 5) * 256) ^ 0x6F706521)


@triton.jit
def _turn(row, group):
    place = row.to(tl.uint32) & 255
    return ((place ^ (place >> 4)) * 53 + group_turn(group)) & 255


@triton.jit
def block_of(group, turn):
    """The block of a group that has a turn: 29 is the inverse of 53."""
    place = ((turn - group_turn(group)) * 29) & 255
    return (group.to(tl.uint32) * 256 + (place ^ (place >> 4))).to(tl.int32)


@triton.jit
def _place(turn, SKETCHED: tl.constexpr):
    """Which element of its block each lane reads."""
    bucket = tl.arange(0, 256)
    if SKETCHED:
        return (bucket - turn.to(tl.int32)) & 255
    return bucket


@triton.jit
def _offset(place, n1, n2, n3, s0, s1, s2, s3, STRIDED: tl.constexpr):
    """Where the element at a row-major place lies, in elements from the first."""
    if STRIDED:
        flat = place.to(tl.uint32)
        inner = flat // n3.to(tl.uint32)
        middle = inner // n2.to(tl.uint32)
        outer = middle // n1.to(tl.uint32)
        third = (flat - inner * n3.to(tl.uint32)).to(tl.int64)
        second = (inner - middle * n2.to(tl.uint32)).to(tl.int64)
        first = (middle - outer * n1.to(tl.uint32)).to(tl.int64)
        return outer.to(tl.int64) * s0 + first * s1 + second * s2 + third * s3
    return place


@triton.jit
def _divided(number, how):
    """A number below 2**31 divided by one that was known before: multiplied by the low half of `how`, shifted by the high one."""
    return tl.umulhi(number, how.to(tl.uint32)) >> (how >> 32).to(tl.uint32)


@triton.jit
def run_at(run, n1, n2, n3, s0, s1, s2, m1, m2, m3):
    """Where a run of 16 bytes lies, in runs from the first; sizes and strides are counted in runs too, `m1` to `m3` are how to divide
    by the sizes."""
    flat = run.to(tl.uint32)
    inner = _divided(flat, m3)
    middle = _divided(inner, m2)
    outer = _divided(middle, m1)
    third = (flat - inner * n3.to(tl.uint32)).to(tl.int64)
    second = (inner - middle * n2.to(tl.uint32)).to(tl.int64)
    first = (middle - outer * n1.to(tl.uint32)).to(tl.int64)
    return outer.to(tl.int64) * s0 + first * s1 + second * s2 + third


@triton.jit
def _minus(group, turn, at, masks):
    """1 in the lowest bit where the sketch takes an element negated."""
    flip = flips(group, turn) >> (group.to(tl.uint32) & 31)
    return (tl.load(masks + turn.to(tl.int32) * 8 + (at >> 5)) >> (at & 31)) ^ flip.to(tl.int32)


@triton.jit
def _key(value):
    """A 64-bit integer in the order of a float64."""
    bits = value.to(tl.float64).to(tl.int64, bitcast=True)
    return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)


@triton.jit
def _quick_rows(
    start, stop, pointer, numel, masks, n1, n2, n3, s0, s1, s2, s3, high, low, total, square, zero, sketch,
    SKETCHED: tl.constexpr, STRIDED: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Adds a few blocks: float32 within them, float64 from one such group to the next."""
    few = tl.zeros([256], tl.float32)
    few_squares = tl.zeros([256], tl.float32)
    few_signed = tl.zeros([256], tl.float32)
    group = start >> 8  # of all of them: their number divides 256, and `start`
    for step in tl.static_range(ROWS):
        row = start + step
        turn = _turn(row, group)
        at = _place(turn, SKETCHED)
        if STRIDED:
            place = row.to(tl.int64) * 256 + at
            source = pointer + _offset(place, n1, n2, n3, s0, s1, s2, s3, STRIDED)
        else:
            source = pointer + row.to(tl.int64) * 256 + at
        if MASKED:
            inside = (row < stop) & (row.to(tl.int64) * 256 + at < numel)
            x = tl.load(source, mask=inside, other=0).to(tl.float32)
            high = tl.maximum(high, tl.where(inside, x, float("-inf")))
            low = tl.minimum(low, tl.where(inside, x, float("inf")))
            zero += ((x == 0) & inside).to(tl.int32)
        else:
            x = tl.load(source).to(tl.float32)
            high = tl.maximum(high, x)
            low = tl.minimum(low, x)
            zero += (x == 0).to(tl.int32)
        few += x
        few_squares += x * x
        if SKETCHED:
            bits = x.to(tl.int32, bitcast=True) ^ (_minus(group, turn, at, masks) << 31)
            few_signed += bits.to(tl.float32, bitcast=True)
    total += few.to(tl.float64)
    square += few_squares.to(tl.float64)
    sketch += few_signed.to(tl.float64)
    return high, low, total, square, zero, sketch


@triton.jit
def _quick(
    pointer, first, stop, numel, masks, n1, n2, n3, s0, s1, s2, s3,
    SKETCHED: tl.constexpr, STRIDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Numbers of a span if all is finite and in the range of float32; what comes out tells whether that was so."""
    high = tl.full([256], float("-inf"), tl.float32)
    low = tl.full([256], float("inf"), tl.float32)
    total = tl.zeros([256], tl.float64)
    square = tl.zeros([256], tl.float64)
    sketch = tl.zeros([256], tl.float64)
    zero = tl.zeros([256], tl.int32)
    whole = tl.minimum(stop, (numel // 256).to(tl.int32))
    whole = first + (whole - first) // ROWS * ROWS
    for start in range(first, whole, ROWS):
        high, low, total, square, zero, sketch = _quick_rows(
            start, stop, pointer, numel, masks, n1, n2, n3, s0, s1, s2, s3,
            high, low, total, square, zero, sketch, SKETCHED, STRIDED, False, ROWS,
        )  # fmt: skip
    for start in range(whole, stop, 4):
        high, low, total, square, zero, sketch = _quick_rows(
            start, stop, pointer, numel, masks, n1, n2, n3, s0, s1, s2, s3,
            high, low, total, square, zero, sketch, SKETCHED, STRIDED, True, 4,
        )  # fmt: skip
    return high, low, total, square, zero, sketch


@triton.jit
def _careful(
    head, sums, pointer, first, stop, numel, masks, wanted, share, split, n1, n2, n3, s0, s1, s2, s3,
    KIND: tl.constexpr, SKETCHED: tl.constexpr, STRIDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The part of a span of any type: float64 throughout, what is not finite counted and left out. With `TILE`, of the
    blocks with the turn `wanted` in a share of the groups (`cuda_wide_kernels.py`)."""
    high = tl.full([256], -0x8000000000000000, tl.int64)
    low = tl.full([256], 0x7FFFFFFFFFFFFFFF, tl.int64)
    total = tl.zeros([256], tl.float64)
    square = tl.zeros([256], tl.float64)
    shrunk = tl.zeros([256], tl.float64)
    grown = tl.zeros([256], tl.float64)
    sketch = tl.zeros([256], tl.float64)
    nan = tl.zeros([256], tl.int32)
    above = tl.zeros([256], tl.int32)
    below = tl.zeros([256], tl.int32)
    zero = tl.zeros([256], tl.int32)
    for number in range(first, stop):
        row = block_of((number // TILE * split + share) * TILE + number % TILE, wanted) if TILE else number
        turn = _turn(row, row >> 8)
        at = _place(turn, SKETCHED)
        place = row.to(tl.int64) * 256 + at
        inside = place < numel
        x = tl.load(pointer + _offset(place, n1, n2, n3, s0, s1, s2, s3, STRIDED), mask=inside, other=0)
        if KIND == 0 or KIND == 1:
            wide = x.to(tl.float64)
            kept = inside & (tl.abs(wide) < float("inf"))
            nan += (inside & (wide != wide)).to(tl.int32)
            above += (inside & (wide == float("inf"))).to(tl.int32)
            below += (inside & (wide == float("-inf"))).to(tl.int32)
            key = _key(wide)
            wide = tl.where(kept, wide, 0.0)
        else:
            kept = inside
            if KIND == 4:
                key = (x != 0).to(tl.int64)
                wide = key.to(tl.float64)
            elif KIND == 3:
                key = x.to(tl.int64) ^ -0x8000000000000000
                wide = x.to(tl.float64)
            else:
                key = x.to(tl.int64)
                wide = x.to(tl.float64)
        high = tl.maximum(high, tl.where(kept, key, -0x8000000000000000))
        low = tl.minimum(low, tl.where(kept, key, 0x7FFFFFFFFFFFFFFF))
        total += wide
        square += wide * wide
        zero += (kept & (wide == 0)).to(tl.int32)
        if KIND == 1:
            small = wide * 2.409919865102884e-181
            large = wide * 4.149515568880993e180
            shrunk += small * small
            grown += large * large
        if SKETCHED:
            minus = (_minus(row >> 8, turn, at, masks) & 1) != 0
            sketch += tl.where(minus, -wide, wide)
    tl.store(head, tl.max(high, 0))
    tl.store(head + 1, tl.min(low, 0))
    numbers = head.to(tl.pointer_type(tl.float64))
    tl.store(numbers + 2, tl.sum(total, 0))
    tl.store(numbers + 3, tl.sum(square, 0))
    tl.store(head + 4, tl.sum(nan, 0).to(tl.int64))
    tl.store(head + 5, tl.sum(above, 0).to(tl.int64))
    tl.store(head + 6, tl.sum(below, 0).to(tl.int64))
    tl.store(head + 7, tl.sum(zero, 0).to(tl.int64))
    tl.store(numbers + 8, tl.sum(shrunk, 0))
    tl.store(numbers + 9, tl.sum(grown, 0))
    if SKETCHED:
        tl.store(sums, sketch.to(tl.float32))


@triton.jit
def measure_part(
    program, programs, address, parts, part, segments, row, masks, numel, span, n1, n2, n3, s0, s1, s2, s3,
    DTYPE: tl.constexpr, KIND: tl.constexpr, SKETCHED: tl.constexpr, STRIDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One part of one tensor: the blocks `span` by `span`."""
    blocks = ((numel + 255) // 256).to(tl.int32)
    first = program * span
    stop = tl.minimum(first + span, blocks)
    pointer = address.to(tl.pointer_type(DTYPE))
    mask_table = masks.to(tl.pointer_type(tl.int32))
    head = parts.to(tl.pointer_type(tl.int64)) + (part + program) * 140
    sums = (head + 12).to(tl.pointer_type(tl.float32)) + tl.arange(0, 256)
    if program == 0:
        segment = segments.to(tl.pointer_type(tl.int64)) + row * 2
        tl.store(segment, part)
        tl.store(segment + 1, programs.to(tl.int64))
    if KIND == 0:
        high, low, total, square, zero, sketch = _quick(
            pointer, first, stop, numel, mask_table, n1, n2, n3, s0, s1, s2, s3, SKETCHED, STRIDED, ROWS
        )
        largest = tl.max(high, 0)
        smallest = tl.min(low, 0)
        sum_all = tl.sum(total, 0)
        sum_squares = tl.sum(square, 0)
        # A sum that is not finite: an element was not, or it left float32. Small squares have lost bits.
        finite = (tl.abs(sum_all) < float("inf")) & (sum_squares < float("inf"))
        exact = (sum_squares > 1e-25) | ((largest == 0) & (smallest == 0))
        if finite & exact:
            tl.store(head, _key(largest))
            tl.store(head + 1, _key(smallest))
            numbers = head.to(tl.pointer_type(tl.float64))
            tl.store(numbers + 2, sum_all)
            tl.store(numbers + 3, sum_squares)
            nothing = tl.zeros([], tl.int64)
            tl.store(head + 4, nothing)
            tl.store(head + 5, nothing)
            tl.store(head + 6, nothing)
            tl.store(head + 7, tl.sum(zero, 0).to(tl.int64))
            tl.store(head + 8, nothing)
            tl.store(head + 9, nothing)
            if SKETCHED:
                tl.store(sums, sketch.to(tl.float32))
        else:
            _careful(
                head, sums, pointer, first, stop, numel, mask_table, 0, 0, 0, n1, n2, n3, s0, s1, s2, s3,
                KIND, SKETCHED, STRIDED, 0,
            )  # fmt: skip
    else:
        _careful(
            head, sums, pointer, first, stop, numel, mask_table, 0, 0, 0, n1, n2, n3, s0, s1, s2, s3,
            KIND, SKETCHED, STRIDED, 0,
        )  # fmt: skip


@triton.jit
def _combine_heads(source, target, count):
    lane = tl.arange(0, 256)
    high = tl.full([256], -0x8000000000000000, tl.int64)
    low = tl.full([256], 0x7FFFFFFFFFFFFFFF, tl.int64)
    total = tl.zeros([256], tl.float64)
    square = tl.zeros([256], tl.float64)
    nan = tl.zeros([256], tl.int64)
    above = tl.zeros([256], tl.int64)
    below = tl.zeros([256], tl.int64)
    zero = tl.zeros([256], tl.int64)
    shrunk = tl.zeros([256], tl.float64)
    grown = tl.zeros([256], tl.float64)
    for start in range(0, count, 256):
        inside = start + lane < count
        head = source + (start + lane) * 140
        numbers = head.to(tl.pointer_type(tl.float64))
        high = tl.maximum(high, tl.load(head, mask=inside, other=-0x8000000000000000))
        low = tl.minimum(low, tl.load(head + 1, mask=inside, other=0x7FFFFFFFFFFFFFFF))
        total += tl.load(numbers + 2, mask=inside, other=0.0)
        square += tl.load(numbers + 3, mask=inside, other=0.0)
        nan += tl.load(head + 4, mask=inside, other=0)
        above += tl.load(head + 5, mask=inside, other=0)
        below += tl.load(head + 6, mask=inside, other=0)
        zero += tl.load(head + 7, mask=inside, other=0)
        shrunk += tl.load(numbers + 8, mask=inside, other=0.0)
        grown += tl.load(numbers + 9, mask=inside, other=0.0)
    answers = target.to(tl.pointer_type(tl.float64))
    tl.store(target, tl.max(high, 0))
    tl.store(target + 1, tl.min(low, 0))
    tl.store(answers + 2, tl.sum(total, 0))
    tl.store(answers + 3, tl.sum(square, 0))
    tl.store(target + 4, tl.sum(nan, 0))
    tl.store(target + 5, tl.sum(above, 0))
    tl.store(target + 6, tl.sum(below, 0))
    tl.store(target + 7, tl.sum(zero, 0))
    tl.store(answers + 8, tl.sum(shrunk, 0))
    tl.store(answers + 9, tl.sum(grown, 0))


@triton.jit(do_not_specialize=["parts", "segments", "rows", "first_row"])
def combine(parts: tl.int64, segments: tl.int64, rows: tl.int64, first_row: tl.int64, SKETCHED: tl.constexpr):
    """One row from its parts, in their order: a program for the head, and where there is a sketch one for each 16 buckets."""
    PIECES: tl.constexpr = 17 if SKETCHED else 1
    row = first_row + tl.program_id(0) // PIECES
    piece = tl.program_id(0) % PIECES
    segment = segments.to(tl.pointer_type(tl.int64)) + row * 2
    first = tl.load(segment)
    count = tl.load(segment + 1).to(tl.int32)
    if count == 0:
        return  # its answer is there already
    source = parts.to(tl.pointer_type(tl.int64)) + first * 140
    target = rows.to(tl.pointer_type(tl.int64)) + row * 140
    if piece == 0:
        _combine_heads(source, target, count)
        return
    if SKETCHED:
        bucket = 16 * (piece - 1) + tl.arange(0, 16)
        sums = tl.zeros([256, 16], tl.float64)
        for start in range(0, count, 256):
            part = start + tl.arange(0, 256)[:, None]
            place = (source + 12).to(tl.pointer_type(tl.float32)) + part * 280 + bucket[None, :]
            sums += tl.load(place, mask=part < count, other=0.0).to(tl.float64)
        tl.store((target + 12).to(tl.pointer_type(tl.float32)) + bucket, tl.sum(sums, 0).to(tl.float32))
