"""The recorders that are compared, behind one small interface, and what each configuration means to each of them.

A tool is imported when it is built, in a worker of its own virtual environment. `end` returns when the dump is complete.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Options = dict[str, Any]
Count = dict[str, int]


class Tool(Protocol):
    """Records a step between `begin` and `end`; `dump` is the folder of the step that ended last."""

    def __init__(self, folder: Path, options: Options) -> None: ...
    def begin(self, model: Any) -> None: ...
    def end(self) -> None: ...
    @property
    def dump(self) -> Path: ...
    def count(self) -> Count:
        """Of that dump: its records, the bytes it can give back (logical) and those it stores for them (distinct)."""
        ...


class Ulpscope:
    def __init__(self, folder: Path, options: Options) -> None:
        import ulpscope

        self._open = ulpscope.open_dump
        self._folder = folder
        self._steps = 0
        self._capture = ulpscope.Capture(folder, **options)

    def begin(self, model: Any) -> None:
        self._capture.start(model)

    def end(self) -> None:
        self._capture.stop()
        self._capture.step()
        self._steps += 1

    @property
    def dump(self) -> Path:
        return self._folder / f"step{self._steps - 1}"

    def count(self) -> Count:
        dump = self._open(self.dump)
        if not self._capture.config.tensors:
            return {"records": len(dump), "logical": 0, "distinct": 0}
        payloads = [value.payload for call in dump.calls() for value in call.values if value.payload is not None]
        return {
            "records": len(dump),
            "logical": sum(payload.nbytes for payload in payloads),
            "distinct": sum({payload.offset: payload.nbytes for payload in payloads}.values()),
        }


class Msprobe:
    def __init__(self, folder: Path, options: Options) -> None:
        from msprobe.pytorch import PrecisionDebugger

        folder.mkdir(parents=True)
        summary = {"summary_mode": options["summary_mode"]} if "summary_mode" in options else {}
        task = options["task"]
        config = {
            "task": task,
            "level": options["level"],
            "dump_path": str(folder),
            "rank": [],
            "step": [],
            task: {"scope": [], "list": [], "data_mode": ["all"], **summary},
        }
        file = folder.with_suffix(".json")
        file.write_text(json.dumps(config))
        self._folder = folder
        self._steps = 0
        self._debugger = PrecisionDebugger(config_path=str(file))

    def begin(self, model: Any) -> None:
        self._debugger.start(model)

    def end(self) -> None:
        self._debugger.stop()
        self._debugger.step()
        self._steps += 1

    @property
    def dump(self) -> Path:
        return self._folder / f"step{self._steps - 1}"

    def count(self) -> Count:
        records = sum(len(json.loads(file.read_text())["data"]) for file in self.dump.glob("*/dump.json"))
        nbytes = sum(file.stat().st_size for file in self.dump.rglob("*.pt"))
        return {"records": records, "logical": nbytes, "distinct": nbytes}


TOOLS: dict[str, type[Tool]] = {"ulpscope": Ulpscope, "msprobe": Msprobe}


@dataclass(frozen=True, slots=True)
class Config:
    """The same wish in the words of both tools; the peer has no kernel level on a CPU."""

    ulpscope: Options
    msprobe: Options | None


# What the peer leaves out of a Llama: calls that move, make or convert elements. Without them both record the same calls.
LEFT_OUT = [
    *(f"Tensor.{name}" for name in ("__getitem__", "__neg__", "contiguous", "float", "reshape", "to", "transpose")),
    *("Tensor.unsqueeze", "Tensor.view", "Torch.arange", "Torch.cat", "Torch.tensor", "Torch._foreach_add_"),
]
CONFIGS = {
    "op": Config({"level": "op"}, {"task": "statistics", "level": "L1"}),
    "module": Config({"level": "module"}, {"task": "statistics", "level": "L0"}),
    "mix": Config({"level": "mix"}, {"task": "statistics", "level": "mix"}),
    "op-alike": Config({"level": "op", "skip": LEFT_OUT}, {"task": "statistics", "level": "L1"}),
    "mix-alike": Config({"level": "mix", "skip": LEFT_OUT}, {"task": "statistics", "level": "mix"}),
    "crc": Config(
        {"level": "op", "checksum": True},
        {"task": "statistics", "level": "L1", "summary_mode": "md5"},
    ),
    "tensors": Config({"level": "op", "tensors": True}, {"task": "tensor", "level": "L1"}),
    "kernel": Config({"level": "kernel"}, None),
    "overflow": Config({"level": "op", "overflows": -1, "sketch": False}, None),
}
