"""What is launched to measure tensors, by Triton: one tensor or several, and with them their CRC-32, for which the first programs
of each are; both read at the same time, so that one of the two finds most of it in the cache of the device."""

import triton
import triton.language as tl

from ulpscope.frameworks.torch.cuda_crc_kernels import residue_part
from ulpscope.frameworks.torch.cuda_kernels import find, measure_part
from ulpscope.frameworks.torch.cuda_wide_kernels import wide_part


@triton.jit
def _found(program, others, count, first):
    """The words of the tensor that a program belongs to, which is not the first of its launch, and its first program. Of two it is
    known: what lies in the memory of the host is far away."""
    found = others.to(tl.pointer_type(tl.int64)) + 24
    begin = first
    if count > 2:
        found, begin = find(program, others, count)
    return found, begin


@triton.jit
def _tensor(found, begin):
    """Of one of several tensors: its programs, address, first part, row and number of elements, and its span or shares."""
    return (
        tl.load(found).to(tl.int32) - begin,
        tl.load(found + 1),
        tl.load(found + 2),
        tl.load(found + 3),
        tl.load(found + 4),
        tl.load(found + 5).to(tl.int32),
    )


@triton.jit
def _form(found):
    """Its sizes and all strides but the last."""
    return (
        tl.load(found + 6),
        tl.load(found + 7),
        tl.load(found + 8),
        tl.load(found + 9),
        tl.load(found + 10),
        tl.load(found + 11),
    )


@triton.jit
def _checks(words):
    """Of its CRC: programs, bytes, words, words of a span."""
    return tl.load(words).to(tl.int32), tl.load(words + 1), tl.load(words + 2), tl.load(words + 3)


@triton.jit(do_not_specialize=["address", "parts", "part", "segments", "row", "masks", "numel", "span",
                               "n1", "n2", "n3", "s0", "s1", "s2", "s3", "checks", "nbytes", "words", "reach", "others", "count", "first",
                               "places", "residues", "weights"])  # fmt: skip
def measure(
    address: tl.int64, parts: tl.int64, part: tl.int64, segments: tl.int64, row: tl.int64, masks: tl.int64,
    numel: tl.int64, span: tl.int32, n1: tl.int64, n2: tl.int64, n3: tl.int64, s0: tl.int64, s1: tl.int64, s2: tl.int64, s3: tl.int64,
    checks: tl.int32, nbytes: tl.int64, words: tl.int64, reach: tl.int64,
    others: tl.int64, count: tl.int32, first: tl.int32, places: tl.int64, residues: tl.int64, weights: tl.int64,
    DTYPE: tl.constexpr, KIND: tl.constexpr, SKETCHED: tl.constexpr, STRIDED: tl.constexpr, ROWS: tl.constexpr,
    CHECKED: tl.constexpr, STEPS: tl.constexpr, PROGRAMS: tl.constexpr, ITEM: tl.constexpr,
):  # fmt: skip
    """Tensors of any kind and layout."""
    program = tl.program_id(0)
    programs = first
    if program >= first:
        found, begin = _found(program, others, count, first)
        program -= begin
        programs, address, part, row, numel, span = _tensor(found, begin)
        if STRIDED:
            n1, n2, n3, s0, s1, s2 = _form(found)
            s3 = tl.load(found + 12)
        if CHECKED:
            checks, nbytes, words, reach = _checks(found + 13)
    if CHECKED:
        if program < checks:
            residue_part(
                program, address, places, residues, row, nbytes, words, reach, weights, n1, n2, n3, s0, s1, s2, s3, 0, 0, 0,
                STEPS, PROGRAMS, ITEM, False,
            )  # fmt: skip
            return
        program -= checks
        programs -= checks
    measure_part(
        program, programs, address, parts, part, segments, row, masks, numel, span, n1, n2, n3, s0, s1, s2, s3,
        DTYPE, KIND, SKETCHED, STRIDED, ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["address", "parts", "part", "segments", "row", "masks", "numel", "split",
                               "n1", "n2", "n3", "s0", "s1", "s2", "m1", "m2", "m3",
                               "checks", "nbytes", "words", "reach", "others", "count", "first",
                               "places", "residues", "weights"])  # fmt: skip
def measure_wide(
    address: tl.int64, parts: tl.int64, part: tl.int64, segments: tl.int64, row: tl.int64, masks: tl.int64,
    numel: tl.int64, split: tl.int32, n1: tl.int64, n2: tl.int64, n3: tl.int64, s0: tl.int64, s1: tl.int64, s2: tl.int64,
    m1: tl.int64, m2: tl.int64, m3: tl.int64,
    checks: tl.int32, nbytes: tl.int64, words: tl.int64, reach: tl.int64,
    others: tl.int64, count: tl.int32, first: tl.int32, places: tl.int64, residues: tl.int64, weights: tl.int64,
    DTYPE: tl.constexpr, SKETCHED: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr, ITEM: tl.constexpr,
    CHECKED: tl.constexpr, STEPS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Large tensors of ordinary floats that lie in runs of 16 bytes. `ITEM` is the size of an element of one with strides, and 0."""
    program = tl.program_id(0)
    programs = first
    if program >= first:
        found, begin = _found(program, others, count, first)
        program -= begin
        programs, address, part, row, numel, split = _tensor(found, begin)
        if ITEM:
            n1, n2, n3, s0, s1, s2 = _form(found)
            m1 = tl.load(found + 12)
            m2 = tl.load(found + 13)
            m3 = tl.load(found + 14)
        if CHECKED:
            checks, nbytes, words, reach = _checks(found + 15)
    if CHECKED:
        if program < checks:
            residue_part(
                program, address, places, residues, row, nbytes, words, reach, weights, n1, n2, n3, s0, s1, s2, 1, m1, m2, m3,
                STEPS, PROGRAMS, ITEM, ITEM > 0,
            )  # fmt: skip
            return
        program -= checks
        programs -= checks
    wide_part(
        program, programs, address, parts, part, segments, row, masks, numel, split, n1, n2, n3, s0, s1, s2, m1, m2, m3,
        DTYPE, SKETCHED, WIDTH, PACKED, ITEM > 0,
    )  # fmt: skip
