"""Measuring a tensor and its CRC-32 in one launch, by Triton: the first programs check, the others measure, at the same time, so
that one of the two reads finds most of it in the cache of the device."""

import triton
import triton.language as tl

from ulpscope.frameworks.torch.cuda_crc_kernels import residue_part
from ulpscope.frameworks.torch.cuda_kernels import measure_part
from ulpscope.frameworks.torch.cuda_wide_kernels import wide_part


@triton.jit(do_not_specialize=["address", "parts", "part", "segments", "row", "signs", "turns", "numel", "span",
                               "n1", "n2", "n3", "s0", "s1", "s2", "s3", "places", "residues", "checks", "nbytes",
                               "words", "reach", "weights"])  # fmt: skip
def measure_checked(
    address: tl.int64, parts: tl.int64, part: tl.int64, segments: tl.int64, row: tl.int64, signs: tl.int64, turns: tl.int64,
    numel: tl.int64, span: tl.int32, n1: tl.int64, n2: tl.int64, n3: tl.int64, s0: tl.int64, s1: tl.int64, s2: tl.int64, s3: tl.int64,
    places: tl.int64, residues: tl.int64, checks: tl.int32, nbytes: tl.int64, words: tl.int64, reach: tl.int64, weights: tl.int64,
    DTYPE: tl.constexpr, KIND: tl.constexpr, SKETCHED: tl.constexpr, STRIDED: tl.constexpr, ROWS: tl.constexpr,
    STEPS: tl.constexpr, PROGRAMS: tl.constexpr, ITEM: tl.constexpr,
):  # fmt: skip
    """As `cuda_kernels.measure`, after `checks` programs for the CRC."""
    program = tl.program_id(0)
    if program < checks:
        residue_part(
            program, address, places, residues, row, nbytes, words, reach, weights, n1, n2, n3, s0, s1, s2, s3,
            STEPS, PROGRAMS, ITEM,
        )  # fmt: skip
        return
    measure_part(
        program - checks, tl.num_programs(0) - checks, address, parts, part, segments, row, signs, turns, numel, span,
        n1, n2, n3, s0, s1, s2, s3, DTYPE, KIND, SKETCHED, STRIDED, ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["address", "parts", "part", "segments", "row", "signs", "turns", "order", "starts",
                               "counts", "numel", "split", "places", "residues", "checks", "nbytes", "words", "reach",
                               "weights"])  # fmt: skip
def measure_wide_checked(
    address: tl.int64, parts: tl.int64, part: tl.int64, segments: tl.int64, row: tl.int64, signs: tl.int64,
    turns: tl.int64, order: tl.int64, starts: tl.int64, counts: tl.int64, numel: tl.int64, split: tl.int32,
    places: tl.int64, residues: tl.int64, checks: tl.int32, nbytes: tl.int64, words: tl.int64, reach: tl.int64, weights: tl.int64,
    DTYPE: tl.constexpr, SKETCHED: tl.constexpr, WIDTH: tl.constexpr, PACKED: tl.constexpr,
    STEPS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """As `cuda_wide_kernels.measure_wide`, after `checks` programs for the CRC."""
    program = tl.program_id(0)
    if program < checks:
        residue_part(
            program, address, places, residues, row, nbytes, words, reach, weights, 0, 0, 0, 0, 0, 0, 0,
            STEPS, PROGRAMS, 0,
        )  # fmt: skip
        return
    wide_part(
        program - checks, tl.num_programs(0) - checks, address, parts, part, segments, row, signs, turns, order, starts,
        counts, numel, split, DTYPE, SKETCHED, WIDTH, PACKED,
    )  # fmt: skip
