"""How much a capture costs, ours and the peer's, step beside step in one run.

    python benchmarks/run.py --workloads llama,tiny --configs op,mix --rounds 7 --json FILE

See README.md for what is measured and how. Without the peer (`--no-peer`, or where it cannot be installed) ours is
measured alone.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import report
from tools import CONFIGS, Options

HERE = Path(__file__).resolve().parent
PEER = HERE / ".peer"
RESULTS = HERE / "results"
PARTS = ("llama", "resnet50", "tiny", "scaling", "startup")
DEFAULT_CONFIGS = ("op", "module", "mix", "crc", "tensors", "overflow")
# Short steps are read several times in a row, and the median is one reading.
BARE_REPEATS = {"llama": 1, "resnet50": 1, "tiny": 7}
OUR_REPEATS = {"llama": 1, "resnet50": 1, "tiny": 3}
RECORDS = (1_000, 10_000, 100_000)
PEER_RECORDS = RECORDS[:2]
ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
ENVIRONMENT = {**os.environ, **dict.fromkeys(ONE_THREAD, "1"), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


class WorkerError(Exception):
    """A worker could not do what it was told; the message is its own."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A tool with its options, in the Python that has it. No tool: the bare step."""

    python: str
    tool: str | None = None
    options: Options | None = None
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians over the rounds. Ratios are to the bare step of the same round; extra is recorded minus bare."""

    rounds: int
    cpu_ratio: float
    wall_ratio: float
    extra_cpu: float
    extra_wall: float
    peak_over_bare: float
    stopped_cpu_ratio: float
    stopped_wall_ratio: float
    records: int
    logical: int
    distinct: int

    @property
    def us_per_record(self) -> float:
        return self.extra_cpu / self.records * 1e6 if self.records else float("nan")


class Worker:
    """A process that runs steps when it is told to."""

    def __init__(self, who: Contestant, workload: str, sizes: dict[str, int], scratch: Path) -> None:
        own = Path(tempfile.mkdtemp(dir=scratch))
        self._log = own / "log"
        order = {"tool": who.tool, "options": who.options, "workload": workload, "sizes": sizes}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [who.python, str(HERE / "worker.py"), json.dumps({**order, "folder": str(own / "run")})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=own,
                env=ENVIRONMENT,
            )
        self._answer()

    def steps(self, *, record: bool, times: int = 1, count: bool = False) -> dict[str, Any]:
        """Medians of CPU, wall and peak memory of `times` steps, and what the first dump holds if `count`."""
        self._say({"do": "step", "record": record, "times": times, "count": count})
        answer = self._answer()
        medians = {key: statistics.median(step[key] for step in answer["steps"]) for key in ("cpu", "wall", "peak")}
        return {**medians, "count": answer.get("count")}

    def close(self) -> None:
        try:
            self._say({"do": "quit"})
            self._process.wait(timeout=30)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()

    def _say(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last = self._log.read_text(errors="replace").strip().rsplit("\n", 1)[-1]
            raise WorkerError(f"the worker ended with status {self._process.wait()}: {last or 'it said nothing'}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer


@contextmanager
def workers(
    contestants: dict[str, Contestant], workload: str, sizes: dict[str, int], scratch: Path
) -> Iterator[tuple[dict[str, Worker], dict[str, str]]]:
    """A worker for each contestant that could start one, and the reasons of those that could not."""
    with ExitStack() as stack:
        alive: dict[str, Worker] = {}
        failed: dict[str, str] = {}
        for name, who in contestants.items():
            try:
                alive[name] = Worker(who, workload, sizes, scratch)
                stack.callback(alive[name].close)
            except WorkerError as error:
                failed[name] = str(error)
        yield alive, failed


def race(
    contestants: dict[str, Contestant], workload: str, sizes: dict[str, int], rounds: int, scratch: Path
) -> dict[str, Cost | str]:
    """The cost of each contestant, or why there is none. A round is, for each: bare, recorded, stopped."""
    repeats = BARE_REPEATS[workload] if not sizes else 3
    bare = {f"bare {who.python}": Contestant(who.python) for who in contestants.values()}
    with workers({**bare, **contestants}, workload, sizes, scratch) as (alive, failed):
        rows: dict[str, list[tuple[dict[str, Any], ...]]] = {name: [] for name in contestants if name in alive}
        counts: dict[str, dict[str, int]] = {}
        for number in range(-1, rounds):  # round -1 warms up
            for name in rows:
                who = contestants[name]
                try:
                    base = alive[f"bare {who.python}"].steps(record=False, times=repeats)
                    times = who.repeats if number >= 0 else 1
                    recorded = alive[name].steps(record=True, times=times, count=number < 0)
                    stopped = alive[name].steps(record=False, times=repeats)
                except (KeyError, WorkerError, OSError) as error:
                    failed.setdefault(name, str(error))
                    continue
                counts[name] = recorded["count"] or counts[name]
                if number >= 0:
                    rows[name].append((base, recorded, stopped))
    return {name: failed.get(name) or summary(rows[name], counts[name]) for name in contestants}


def summary(rows: list[tuple[dict[str, Any], ...]], count: dict[str, int]) -> Cost:
    def median(of: Any) -> float:
        return statistics.median(of(*row) for row in rows)

    return Cost(
        rounds=len(rows),
        cpu_ratio=median(lambda bare, recorded, _: recorded["cpu"] / bare["cpu"]),
        wall_ratio=median(lambda bare, recorded, _: recorded["wall"] / bare["wall"]),
        extra_cpu=median(lambda bare, recorded, _: recorded["cpu"] - bare["cpu"]),
        extra_wall=median(lambda bare, recorded, _: recorded["wall"] - bare["wall"]),
        peak_over_bare=median(lambda bare, recorded, _: recorded["peak"] - bare["peak"]),
        stopped_cpu_ratio=median(lambda bare, _, stopped: stopped["cpu"] / bare["cpu"]),
        stopped_wall_ratio=median(lambda bare, _, stopped: stopped["wall"] / bare["wall"]),
        **count,
    )


def measure_workload(workload: str, configs: list[str], peer: str | None, rounds: int, scratch: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in configs:
        config = CONFIGS[name]
        repeats = OUR_REPEATS[workload]
        contestants = {"ulpscope": Contestant(sys.executable, "ulpscope", config.ulpscope, repeats)}
        if name == "op":
            plain = {**config.ulpscope, "sketch": False}
            contestants["without sketch"] = Contestant(sys.executable, "ulpscope", plain, repeats)
        if peer is not None and config.msprobe is not None:
            contestants["msprobe"] = Contestant(peer, "msprobe", config.msprobe)
        _progress(f"{workload} {name}")
        found[name] = race(contestants, workload, {}, rounds, scratch)
    return found


def measure_scaling(peer: str | None, rounds: int, sizes: tuple[int, ...], scratch: Path) -> dict[str, Any]:
    """Each call of the tiny workload makes two records: forward and backward."""
    config = CONFIGS["op"]
    found: dict[str, Any] = {}
    for records in sizes:
        _progress(f"scaling {records} records")
        contestants = {"ulpscope": Contestant(sys.executable, "ulpscope", config.ulpscope)}
        if peer is not None and records in PEER_RECORDS:
            contestants["msprobe"] = Contestant(peer, "msprobe", config.msprobe)
        found[str(records)] = race(contestants, "tiny", {"calls": records // 2}, rounds, scratch)
    return found


def measure_startup(peer: str | None, rounds: int) -> dict[str, Any]:
    """CPU seconds of fresh processes, medians; what importing each tool costs over importing torch alone."""
    pythons = {"ulpscope": sys.executable} | ({"msprobe": peer} if peer is not None else {})
    uses = {
        "ulpscope": "import torch, ulpscope; ulpscope.Capture",
        "msprobe": "import torch; from msprobe.pytorch import PrecisionDebugger",
    }
    found: dict[str, Any] = {}
    for name, python in pythons.items():
        _progress(f"startup {name}")
        commands = {
            "python": [python, "-c", "pass"],
            "torch": [python, "-c", "import torch"],
            "use": [python, "-c", uses[name]],
            "help": [str(Path(python).parent / name), "--help"],
        }
        if name == "ulpscope":
            commands["import"] = [python, "-c", "import ulpscope"]
        readings = [{what: _cpu_seconds(command) for what, command in commands.items()} for _ in range(rounds)]
        found[name] = {
            what: None if readings[0][what] is None else statistics.median(reading[what] for reading in readings)
            for what in commands
        }
    quiet = "import sys, ulpscope; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", quiet], capture_output=True, env=ENVIRONMENT, check=False)
    found["ulpscope"]["quiet"] = done.returncode == 0 and not done.stdout and not done.stderr
    return found


def _cpu_seconds(command: list[str]) -> float | None:
    """CPU of a command and its children; None when it fails."""
    try:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    except OSError:
        return None
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime if process.returncode == 0 else None


def peer_python() -> str | None:
    """The peer's own Python below .peer, installed on first use; None, and a word about it, where that fails."""
    python, stamp = PEER / "bin" / "python", PEER / ".installed"
    if stamp.exists():
        return str(python)
    _progress(f"installing the peer into {PEER}")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # torch first: the peer must not decide which torch it is measured with.
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(PEER)],
        [*pip, "torch==2.13.0"],
        [*pip, "mindstudio-probe==26.2.0", "transformers"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            _progress(f"the peer cannot be installed, ours is measured alone: {done.stderr.strip()[-300:]}")
            return None
    stamp.touch()
    return str(python)


def _progress(text: str) -> None:
    sys.stderr.write(f"-- {text}\n")


def _listed(known: tuple[str, ...]) -> Any:
    def read(text: str) -> list[str]:
        items = [item for item in text.split(",") if item]
        for item in items:
            if item not in known:
                raise argparse.ArgumentTypeError(f"{item!r} is none of {', '.join(known)}")
        return items

    return read


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=_listed(PARTS), default=list(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--configs", type=_listed(tuple(CONFIGS)), default=list(DEFAULT_CONFIGS), help=f"of {', '.join(CONFIGS)}"
    )
    parser.add_argument("--rounds", type=int, help="timed rounds after one to warm up (7)")
    parser.add_argument("--no-peer", action="store_true", help="measure ours alone")
    parser.add_argument("--peer", metavar="PYTHON", help="a Python that has the peer already, instead of .peer")
    parser.add_argument("--json", metavar="FILE", type=Path, help="all figures, for another program")
    parser.add_argument("--quick", action="store_true", help="two rounds, no 100,000 records: figures to look at only")
    return parser.parse_args()


def main() -> None:
    asked = arguments()
    rounds = asked.rounds or (2 if asked.quick else 7)
    peer = None if asked.no_peer else asked.peer or peer_python()
    RESULTS.mkdir(exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=RESULTS))  # not /tmp, which may be memory
    found: dict[str, Any] = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "rounds": rounds}
    out = sys.stdout.write
    verdicts: list[str] = []
    try:
        for part in asked.workloads:
            if part == "scaling":
                sizes = RECORDS[:2] if asked.quick else RECORDS
                found[part] = measure_scaling(peer, rounds, sizes, scratch)
                text = report.scaling(found[part])
            elif part == "startup":
                found[part] = measure_startup(peer, rounds)
                text = report.startup(found[part])
            else:
                found[part] = measure_workload(part, asked.configs, peer, rounds, scratch)
                text = report.workload(part, found[part])
            out(text + "\n")
            sys.stdout.flush()
            verdicts += [word for word in text.split() if word in (report.OK, report.MISSED)]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if asked.json is not None:
            asked.json.write_text(json.dumps(found, indent=1, default=asdict) + "\n")
    out(f"{verdicts.count(report.OK)} of {len(verdicts)} targets reached, {rounds} rounds\n")


if __name__ == "__main__":
    main()
