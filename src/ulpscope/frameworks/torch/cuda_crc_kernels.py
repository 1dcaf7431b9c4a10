"""CRC-32 on a device, by Triton.

Bits are reflected as in zlib: a 32-bit word is a polynomial whose highest power is the lowest bit. A lane reads every
128th word, so its words are the coefficients of a polynomial in y = x^(32 * 128). Since 32 * 128 is a power of two, y is
a conjugate of x and a root of the same polynomial, and 32 registers hold the remainder: bit m of all of them is one
polynomial in y, so one step divides 32 polynomials at once, at 14 exclusive ors a word. Remainders of lanes and programs
are then moved to their places by multiplication with powers of x.
"""

import triton
import triton.language as tl

from ulpscope.frameworks.torch.cuda_kernels import _offset, run_at

LANES = 128


@triton.jit
def _next(s, word):
    """The remainder after one more word: times y, plus the word."""
    top = s[31]
    return (
        word ^ top, s[0] ^ top, s[1] ^ top, s[2], s[3] ^ top, s[4] ^ top, s[5], s[6] ^ top,
        s[7] ^ top, s[8], s[9] ^ top, s[10] ^ top, s[11] ^ top, s[12], s[13], s[14],
        s[15] ^ top, s[16], s[17], s[18], s[19], s[20], s[21] ^ top, s[22] ^ top,
        s[23], s[24], s[25] ^ top, s[26], s[27], s[28], s[29], s[30],
    )  # fmt: skip


@triton.jit
def _times(value, factor):
    """The product of two remainders."""
    product = value ^ value
    for bit in tl.static_range(32):
        product = product ^ (value & (0 - ((factor >> (31 - bit)) & 1)))
        value = (value >> 1) ^ (0xEDB88320 & (0 - (value & 1)))
    return product


@triton.jit
def _times_y(value, table):
    """The product of a remainder with y: `table` has those of each byte at each of its four places."""
    one = tl.load(table + (value & 255)) ^ tl.load(table + 256 + ((value >> 8) & 255))
    return one ^ tl.load(table + 512 + ((value >> 16) & 255)) ^ tl.load(table + 768 + (value >> 24))


@triton.jit
def _element(pointer, place, numel, n1, n2, n3, s0, s1, s2, s3):
    """The bits of an element of a tensor with strides."""
    source = pointer + _offset(place, n1, n2, n3, s0, s1, s2, s3, True)
    return tl.load(source, mask=place < numel, other=0)


@triton.jit
def _word(address, place, numel, n1, n2, n3, s0, s1, s2, s3, ITEM: tl.constexpr):
    """The 32 bits at a place, in the order of the elements."""
    if ITEM == 4:
        pointer = address.to(tl.pointer_type(tl.uint32))
        return _element(pointer, place, numel, n1, n2, n3, s0, s1, s2, s3)
    elif ITEM == 8:
        both = _element(address.to(tl.pointer_type(tl.uint64)), place // 2, numel, n1, n2, n3, s0, s1, s2, s3)
        return (both >> ((place % 2) * 32).to(tl.uint64)).to(tl.uint32)
    elif ITEM == 2:
        pointer = address.to(tl.pointer_type(tl.uint16))
        low = _element(pointer, 2 * place, numel, n1, n2, n3, s0, s1, s2, s3).to(tl.uint32)
        return low | _element(pointer, 2 * place + 1, numel, n1, n2, n3, s0, s1, s2, s3).to(tl.uint32) << 16
    else:
        pointer = address.to(tl.pointer_type(tl.uint8))
        word = _element(pointer, 4 * place, numel, n1, n2, n3, s0, s1, s2, s3).to(tl.uint32)
        for byte in tl.static_range(1, 4):
            next_byte = _element(pointer, 4 * place + byte, numel, n1, n2, n3, s0, s1, s2, s3).to(tl.uint32)
            word = word | next_byte << (8 * byte)
        return word


@triton.jit
def residue_part(
    program, address, places, residues, row, nbytes, words, span, weights, n1, n2, n3, s0, s1, s2, s3, m1, m2, m3,
    STEPS: tl.constexpr, PROGRAMS: tl.constexpr, ITEM: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """The remainder of one span of a tensor's words; what lies behind the end counts as zero. `weights` has that of each lane,
    and the table for y. A lane asks for `STEPS` words before it uses the first. `ITEM` is the size of an element of a tensor
    with strides, and 0 for one that is contiguous; with `RUNS` it lies in runs of 16 bytes, and its form is counted in those."""
    lane = tl.arange(0, 128)
    table = weights.to(tl.pointer_type(tl.uint32))
    pointer = address.to(tl.pointer_type(tl.uint32))
    first = program * span
    whole = tl.minimum(first + span, words // (128 * STEPS) * (128 * STEPS))
    z = tl.zeros([128], tl.uint32)
    s = (z, z, z, z, z, z, z, z, z, z, z, z, z, z, z, z, z, z, z, z, z, z, z, z, z, z, z, z, z, z, z, z)
    if ITEM == 0:
        for at in range(first, whole, 128 * STEPS):
            for step in tl.static_range(STEPS):
                s = _next(s, tl.load(pointer + at + step * 128 + lane))
        for at in range(tl.maximum(first, whole), first + span, 128 * STEPS):
            for step in tl.static_range(STEPS):
                place = at + step * 128 + lane
                s = _next(s, tl.load(pointer + place, mask=place < words, other=0))
    elif RUNS:
        for at in range(first, first + span, 128 * STEPS):
            for step in tl.static_range(STEPS):
                place = at + step * 128 + lane
                inside = place < words
                run = run_at(tl.where(inside, place, 0) // 4, n1, n2, n3, s0, s1, s2, m1, m2, m3)
                s = _next(s, tl.load(pointer + run * 4 + place % 4, mask=inside, other=0))
    else:
        numel = nbytes // ITEM
        for at in range(first, first + span, 128 * 4):
            for step in tl.static_range(4):
                s = _next(s, _word(address, at + step * 128 + lane, numel, n1, n2, n3, s0, s1, s2, s3, ITEM))
    # Horner's rule over the registers, highest power first.
    value = z
    for _ in range(0, 32):
        value = _times_y(value, table + 128) ^ s[31]
        s = (
            s[31], s[0], s[1], s[2], s[3], s[4], s[5], s[6], s[7], s[8], s[9], s[10], s[11], s[12], s[13], s[14],
            s[15], s[16], s[17], s[18], s[19], s[20], s[21], s[22], s[23], s[24], s[25], s[26], s[27], s[28], s[29],
            s[30],
        )  # fmt: skip
    value = _times(value, tl.load(table + lane))
    whole_value = tl.xor_sum(value, 0)
    tl.store(residues.to(tl.pointer_type(tl.uint32)) + row * PROGRAMS + program, whole_value)
    if program == 0:
        place = places.to(tl.pointer_type(tl.int64)) + row * 2
        tl.store(place, nbytes)
        tl.store(place + 1, span)


@triton.jit(do_not_specialize=["address", "row", "places", "residues", "nbytes", "words", "span", "weights"])
def residue(
    address: tl.int64, row: tl.int64, places: tl.int64, residues: tl.int64, nbytes: tl.int64, words: tl.int64,
    span: tl.int64, weights: tl.int64, STEPS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """The remainders of a contiguous tensor of which nothing else is measured by a kernel."""
    residue_part(
        tl.program_id(0), address, places, residues, row, nbytes, words, span, weights, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        STEPS, PROGRAMS, 0, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["places", "residues", "rows", "powers"])
def combine_residues(places: tl.int64, residues: tl.int64, rows: tl.int64, powers: tl.int64, PROGRAMS: tl.constexpr):
    """Moves the remainder of each span to its place and adds them: into word 10 of the row's answer."""
    row = tl.program_id(0)
    place = places.to(tl.pointer_type(tl.int64)) + row * 2
    nbytes = tl.load(place)
    span = tl.load(place + 1) * 4
    if nbytes == 0:
        return
    table = powers.to(tl.pointer_type(tl.uint32))
    count = ((nbytes + span - 1) // span).to(tl.int32)
    total = tl.zeros([128], tl.uint32)
    for start in range(0, count, 128):
        part = start + tl.arange(0, 128)
        value = tl.load(residues.to(tl.pointer_type(tl.uint32)) + row * PROGRAMS + part, mask=part < count, other=0)
        # Bits behind the span, less the zeros behind the end, and the 32 that a CRC appends. x has the order 2^32 - 1.
        shift = (nbytes - (part.to(tl.int64) + 1) * span) * 8 + 32
        shift = shift % 0xFFFFFFFF
        shift = tl.where(shift < 0, shift + 0xFFFFFFFF, shift)
        for bit in range(0, 32):
            moved = _times(value, tl.load(table + bit))
            value = tl.where(((shift >> bit) & 1) != 0, moved, value)
        total ^= value
    answer = rows.to(tl.pointer_type(tl.int64)) + row.to(tl.int64) * 140 + 10
    tl.store(answer, tl.xor_sum(total, 0).to(tl.int64))
