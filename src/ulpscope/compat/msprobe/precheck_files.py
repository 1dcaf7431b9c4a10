"""The csv files of msprobe's accuracy pre-check: results, details, and the comparison of two details. UTF-8 with a BOM.

A result is appended as soon as it is there, its details before it, so a run that ends early is gone on with where it ended.
"""

from __future__ import annotations

import csv
import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from ulpscope.model.errors import ConfigError
from ulpscope.replay.benchmark import RATIOS, Verdicts, beside
from ulpscope.replay.results import CallResult, OutputResult
from ulpscope.replay.standards import LIMITS, MEASURES, Measures, Standard, Status, standard_of, worst
from ulpscope.report.table import replacing

RESULT, DETAILS = "accuracy_checking_result_", "accuracy_checking_details_"
COMPARED, COMPARED_DETAILS = "api_precision_compare_result_", "api_precision_compare_details_"
RESULT_COLUMNS = ["API name", "Forward Test Success", "Backward Test Success", "Message"]
COMPARED_COLUMNS = ["API Name", *RESULT_COLUMNS[1:]]
_MEASURE_TITLES = """余弦相似度 最大绝对误差 双百指标 双千指标 双万指标 二进制一致错误率 误差均衡性 均方根误差 小值域错误占比
    相对误差最大值 相对误差平均值 inf/nan错误率 相对误差错误率 绝对误差错误率 ULP误差最大值 ULP误差平均值 ULP误差大于阈值占比"""
_TITLES = dict(zip(MEASURES, _MEASURE_TITLES.split(), strict=True))
DETAIL_COLUMNS = ["API Name", "Bench Dtype", "DEVICE Dtype", "Shape", *_TITLES.values(), "Status", "Message"]
# Measure -> its columns: number or ratio, and verdict.
_COMPARED: dict[str, tuple[str, str]] = {
    "small_value_error_rate": ("小值域错误比值", "小值域判定结果"),
    "rmse": ("均方根误差比值", "均方根误差判定结果"),
    "max_relative_error": ("相对误差最大值比值", "相对误差最大值判定结果"),
    "mean_relative_error": ("相对误差平均值比值", "相对误差平均值判定结果"),
    "error_balance": ("误差均衡性比值", "误差均衡性判定结果"),
    "inf_nan_error_rate": ("inf/nan错误率", "inf/nan判定结果"),
    "relative_error_rate": ("相对误差错误率", "相对误差判定结果"),
    "absolute_error_rate": ("绝对误差错误率", "绝对误差判定结果"),
    "binary_error_rate": ("二进制一致错误率", "二进制一致错误率判定结果"),
}
_ULP = ["ULP误差平均值", "ULP误差大于阈值占比", "ULP误差大于阈值占比比值", "ULP误差判定结果"]
_THOUSANDTH = ["双千指标", "双千指标判定结果"]
COMPARED_DETAIL_COLUMNS = [
    "API Name",
    *(title for pair in _COMPARED.values() for title in pair),
    *_ULP,
    *_THOUSANDTH,
    "比对结果",
    "比对算法",
    "Message",
]
ALGORITHMS = {
    Standard.BINARY: "二进制一致法",
    Standard.ABSOLUTE: "绝对阈值法",
    Standard.ULP: "ULP误差比对法",
    Standard.THOUSANDTH: "双千指标法",
    Standard.BENCHMARK: "标杆比对法",
}
_BLANK = " "
_ZERO_SIZE = re.compile(r"\b0\b")
_BOM = "utf-8-sig"
_STATUSES = {status.value: status for status in Status}
Line = list[str]


def timestamp() -> str:
    return time.strftime("%Y%m%d%H%M%S")


class ResultFiles:
    """The two files of one run. `done` are the calls that they hold already."""

    def __init__(self, result: Path, details: Path, done: frozenset[str] = frozenset()) -> None:
        self.result, self.details, self.done = result, details, done

    @classmethod
    def new(cls, folder: Path, stamp: str) -> ResultFiles:
        """Files with headers. Raises ConfigError where they cannot be written."""
        found = cls(folder / f"{RESULT}{stamp}.csv", folder / f"{DETAILS}{stamp}.csv")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _write(found.result, RESULT_COLUMNS, [])
            _write(found.details, DETAIL_COLUMNS, [])
        except OSError as error:
            raise ConfigError([f"-o {folder}: {error.strerror}"]) from None
        return found

    @classmethod
    def resumed(cls, result: Path) -> ResultFiles:
        """Files of an earlier run, without what it left half done."""
        if not result.name.startswith(RESULT):
            raise ConfigError([f"-csv_path {result}: its name does not begin with {RESULT}"])
        details = result.with_name(DETAILS + result.name.removeprefix(RESULT))
        lines = [line for line in read_lines(result, RESULT_COLUMNS) if len(line) >= 3 and line[1] in _STATUSES]
        done = frozenset(line[0] for line in lines)
        kept = [
            line
            for line in read_lines(details, DETAIL_COLUMNS)
            if len(line) == len(DETAIL_COLUMNS) and _api_of(line[0]) in done
        ]
        _write(result, RESULT_COLUMNS, lines)
        _write(details, DETAIL_COLUMNS, kept)
        return cls(result, details, done)

    def add(self, found: CallResult) -> None:
        """Appends one result."""
        lines = [_detail(output) for output in found.outputs]
        if not lines:
            blanks = [_BLANK] * (len(DETAIL_COLUMNS) - 3)
            lines = [[f"{found.name}.forward.output.0", *blanks, Status.SKIP.value, found.message]]
        _append(self.details, lines)
        backward = _BLANK if found.backward is None else found.backward.value
        message = [found.message] if found.message else []
        _append(self.result, [[found.name, found.forward.value, backward, *message]])


def compare_details(npu: Path, gpu: Path, folder: Path, stamp: str) -> tuple[Path, Path]:
    """api_precision_compare: both details beside each other. Returns the files of results and of details."""
    target, benchmark = _by_name(npu), _by_name(gpu)
    details: list[Line] = []
    calls: dict[tuple[str, int], dict[str, list[Status]]] = {}
    for (name, turn), line in target.items():
        status, cells = _compared(name, line, benchmark.get((name, turn)))
        details.append(cells)
        phase = "backward" if ".backward." in name else "forward"
        calls.setdefault((_api_of(name), turn), {}).setdefault(phase, []).append(status)
    results = [
        [name, *(worst(found[phase]).value if phase in found else _BLANK for phase in ("forward", "backward")), ""]
        for (name, _), found in calls.items()
    ]
    paths = folder / f"{COMPARED}{stamp}.csv", folder / f"{COMPARED_DETAILS}{stamp}.csv"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(paths[0], COMPARED_COLUMNS, results)
        _write(paths[1], COMPARED_DETAIL_COLUMNS, details)
    except OSError as error:
        raise ConfigError([f"-o {folder}: {error.strerror}"]) from None
    return paths


def _compared(name: str, target: Line, benchmark: Line | None) -> tuple[Status, Line]:
    message = target[-1].strip()
    if target[-2] == Status.SKIP.value or benchmark is None or benchmark[-2] == Status.SKIP.value:
        if target[-2] != Status.SKIP.value:
            message = "The benchmark has no such output." if benchmark is None else benchmark[-1].strip()
        return Status.SKIP, _cells(name, {}, Status.SKIP, _BLANK, message)
    dtype = target[2].strip().removeprefix("torch.")
    nothing = _nothing_to_compare(dtype, target[3])
    if nothing:
        return Status.SKIP, _cells(name, {}, Status.SKIP, _BLANK, nothing)
    own, other = _measures(target), _measures(benchmark)
    if all(getattr(own, measure) is None for measure in MEASURES):
        # Dropout has no numbers: its status is what there is to compare.
        status = _STATUSES.get(target[-2], Status.SKIP)
        return status, _cells(name, {}, status, _BLANK, message)
    standard = _standard(name, dtype, own)
    if standard is not Standard.BINARY and dtype not in LIMITS:
        # The standards have numbers for three dtypes; equality needs none.
        message = f"There is no standard for {target[2].strip()}, skip this test."
        return Status.SKIP, _cells(name, {}, Status.SKIP, _BLANK, message)
    verdicts = beside(own, other, standard=standard, dtype=dtype)
    status = verdicts.status
    told = [f"{status.value.upper()}: {each}" for each, status in _failed(verdicts)]
    return status, _cells(name, _pairs(verdicts), status, ALGORITHMS[verdicts.standard], "\n".join(told))


def _nothing_to_compare(dtype: str, shape: str) -> str:
    if not dtype:
        return "The output has no dtype: it was not there, skip this test."
    return "The output has no elements, skip this test." if _ZERO_SIZE.search(shape) else ""


def _standard(name: str, dtype: str, own: Measures) -> Standard:
    found = standard_of(_api_of(name).split(".")[-2], dtype)
    # A file of another version may hold the numbers of another standard.
    needs = {Standard.BINARY: own.binary_error_rate, Standard.ULP: own.mean_ulp, Standard.THOUSANDTH: own.thousandth}
    needs[Standard.ABSOLUTE] = own.relative_error_rate
    return found if found is Standard.BENCHMARK or needs[found] is not None else Standard.BENCHMARK


def _failed(verdicts: Verdicts) -> Iterable[tuple[str, Status]]:
    for measure, status in verdicts.statuses.items():
        if status is Status.PASS or measure == "error_balance":
            continue
        title = _COMPARED[measure][0] if measure in _COMPARED else _TITLES.get(measure, measure)
        limit = (
            f"不满足标准，超过{RATIOS[measure]:g}倍" if status is Status.ERROR and measure in RATIOS else "不满足标准"
        )
        yield f"{title}{limit}", status


def _pairs(verdicts: Verdicts) -> dict[str, str]:
    cells: dict[str, str] = {}
    for measure, titles in _COMPARED.items():
        if measure in verdicts.numbers:
            cells |= {titles[0]: _number(verdicts.numbers[measure]), titles[1]: verdicts.statuses[measure].value}
    if verdicts.standard is Standard.ULP:
        names = ("mean_ulp", "large_ulp_rate", "large_ulp_ratio")
        numbers = [_number(verdicts.numbers.get(name)) for name in names]
        status = verdicts.statuses.get("large_ulp_rate")
        cells |= dict(zip(_ULP, [*numbers, _BLANK if status is None else status.value], strict=True))
    if "thousandth" in verdicts.numbers:
        numbers = [_number(verdicts.numbers["thousandth"]), verdicts.statuses["thousandth"].value]
        cells |= dict(zip(_THOUSANDTH, numbers, strict=True))
    return cells


def _cells(name: str, cells: dict[str, str], status: Status, algorithm: str, message: str) -> Line:
    whole = {"API Name": name, **cells, "比对结果": status.value, "比对算法": algorithm, "Message": message}
    return [whole.get(title, _BLANK) for title in COMPARED_DETAIL_COLUMNS]


def _measures(line: Line) -> Measures:
    numbers: dict[str, float | None] = {}
    for measure, cell in zip(MEASURES, line[4 : 4 + len(MEASURES)], strict=True):
        try:
            numbers[measure] = float(cell)
        except ValueError:
            numbers[measure] = None
    return Measures(**numbers)


def _by_name(path: Path) -> dict[tuple[str, int], Line]:
    """By name and turn: an online check sees the same call in every step."""
    turns: Counter[str] = Counter()
    found: dict[tuple[str, int], Line] = {}
    for line in read_lines(path, DETAIL_COLUMNS):
        if len(line) == len(DETAIL_COLUMNS):
            found[line[0], turns[line[0]]] = line
            turns[line[0]] += 1
    return found


def _api_of(name: str) -> str:
    for phase in (".forward.", ".backward."):
        name = name.partition(phase)[0]
    return name


def _detail(output: OutputResult) -> Line:
    found = output.judgement
    numbers = [_number(getattr(found.measures, measure)) for measure in MEASURES]
    named = output.shape is not None
    about = [f"torch.{output.reference_dtype}", f"torch.{output.dtype}", str(output.shape)] if named else [_BLANK] * 3
    return [output.name, *about, *numbers, found.status.value, found.message]


def _number(number: float | None) -> str:
    return _BLANK if number is None else f"{number:.14f}"


# --- lines ------------------------------------------------------------------------------------------------------


def read_lines(path: Path, columns: Sequence[str]) -> list[Line]:
    """The lines below a header. Raises ConfigError for another file."""
    try:
        with path.open(encoding=_BOM, newline="", errors="replace") as file:
            lines = list(csv.reader(file))
    except (OSError, csv.Error) as error:
        raise ConfigError([f"{path} cannot be read: {error}"]) from None
    if not lines or lines[0] != list(columns):
        raise ConfigError([f"{path} is not one of our tables: it has not the columns {', '.join(columns[:3])} ..."])
    return lines[1:]


def _write(path: Path, columns: Sequence[str], lines: Iterable[Line]) -> None:
    with replacing(path) as draft, draft.open("w", encoding=_BOM, newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([columns, *lines])


def _append(path: Path, lines: Iterable[Line]) -> None:
    with path.open("a", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)
