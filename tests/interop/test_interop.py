"""Our dumps against those of the real mindstudio-probe, on real models. How the peers get here: peers.py."""

from __future__ import annotations

import csv
import importlib.util
import math
import re
from pathlib import Path

import pytest

from interop import agreement
from interop.agreement import Differs
from interop.dumps import KINDS, Dumps
from interop.exceptions import DOCS, EXCEPTIONS, LEVELS, InOurs, document, exemptions
from interop.models import MODELS, NEEDS_TRANSFORMERS
from interop.peers import NEWEST, OLDER, Peer, python
from interop.rows import Key, Row, rows

pytestmark = [pytest.mark.interop, pytest.mark.slow]

READ_BY_US = tuple(model for model in MODELS if model not in NEEDS_TRANSFORMERS)  # the older peers have none
_DIFFERS: dict[str, Differs] = {
    "statistics": agreement.statistics_differ,
    "md5": agreement.checksums_differ,
    "tensor": agreement.tensors_differ,
}


@pytest.fixture(scope="session")
def dumps(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Dumps:
    base = tmp_path_factory.getbasetemp()
    return Dumps((base if worker_id == "master" else base.parent) / "interop")


@pytest.fixture
def needs_peer() -> None:
    python(NEWEST)
    if importlib.util.find_spec("ulpscope.compat") is None:
        pytest.skip("ulpscope.compat.msprobe is not there yet")


def both(dumps: Dumps, model: str, level: str, kind: str) -> tuple[dict[Key, Row], dict[Key, Row]]:
    return rows(dumps.ours(model, level, kind)), rows(dumps.peer(NEWEST, model, level, kind))


def told(problems: list[str]) -> str:
    return "\n".join([f"{len(problems)} tensors:", *problems[:40]])


@pytest.mark.usefixtures("needs_peer")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("model", MODELS)
def test_our_dump_has_every_tensor_of_the_peers(dumps: Dumps, model: str, level: str, kind: str) -> None:
    ours, peer = both(dumps, model, level, kind)
    problems, _ = agreement.missing(ours, peer, agreement.shape_differs, level)
    assert peer
    assert not problems, told(problems)


@pytest.mark.usefixtures("needs_peer")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("model", MODELS)
def test_our_numbers_are_the_peers(dumps: Dumps, model: str, level: str, kind: str) -> None:
    ours, peer = both(dumps, model, level, kind)
    differs = _DIFFERS[kind]
    if kind == "md5":
        differs = _decided_by_files(differs, rows(dumps.peer(NEWEST, model, level, "tensor")), peer)
    if not disturbed(dumps, model, level, kind):
        problems, _ = agreement.missing(ours, peer, differs, level)
        assert not problems, told(problems)
        return
    late = _after_the_loss(peer)
    before = {key: row for key, row in peer.items() if key not in late}
    problems, _ = agreement.missing(ours, before, differs, level)
    rough, _ = agreement.missing(ours, {key: peer[key] for key in late}, agreement.roughly_differ, level)
    assert before
    assert not problems + rough, told(problems + rough)


def disturbed(dumps: Dumps, model: str, level: str, kind: str) -> bool:
    """Whether the peer changed what it recorded: its hooks on modules reorder the sums of gradients. Ours must not."""
    changed = dumps.changed(model, level, kind)
    assert not changed["ours"], "recording changed the gradients"
    return changed["peer"]


def _after_the_loss(peer: dict[Key, Row]) -> set[Key]:
    """Every tensor from the first backward call on, in the order of the peer's file."""
    keys = list(peer)
    first = next(
        (at for at, (call, _) in enumerate(keys) if re.search(r"\.(backward|parameters_grad)\b", call)), len(keys)
    )
    return set(keys[first:])


def _decided_by_files(differs: Differs, saved: dict[Key, Row], peer: dict[Key, Row]) -> Differs:
    """The peer takes checksums in a thread of its own and may see what an in-place call wrote later; its files are copies."""
    names = {id(row): key for key, row in peer.items()}

    def decided(row: Row, ours: Row) -> str | None:
        problem = differs(row, ours)
        copy = saved.get(names[id(row)])
        if problem and copy is not None and ours.md5 == agreement.saved_checksum(copy):
            return None
        return problem

    return decided


@pytest.mark.usefixtures("needs_peer")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_the_peers_own_comparison_finds_no_difference(dumps: Dumps, model: str, kind: str) -> None:
    if importlib.util.find_spec("ulpscope.store.formats.msprobe_writer") is None:
        pytest.skip("ulpscope.store.formats.msprobe_writer is not there yet")
    level = "L1"  # at L0 and mix the peer changes the gradients, see `disturbed`
    with dumps.compared(model, level, kind).open(newline="") as file:
        found = list(csv.DictReader(file))
    ours, saved = rows(dumps.ours(model, level, kind)), rows(dumps.peer(NEWEST, model, level, "tensor"))
    problems = [f"{row['NPU Name']}: {why}" for row in found if (why := _not_passed(row, ours, saved, level))]
    assert found
    assert not problems, told(problems)


def _not_passed(row: dict[str, str], ours: dict[Key, Row], saved: dict[Key, Row], level: str) -> str | None:
    name = row["NPU Name"]
    key = _split(name)
    if exemptions(*key, level) or (row["Result"] == "pass" and row["Bench Name"] == name):
        return None
    if row["Bench Name"] != name:
        return "unmatched"
    error = row.get("NormRelativeErr")
    if row["Result"] == "warning" and error and _percent(error) < 100 * agreement.unit(row["NPU Dtype"]):
        return None  # "10 times that of input", where the input's is 0 and this one the last digit of a Norm
    if "Norm" in row["Err_message"] and _norm_agrees(row):
        return None
    if "BENCH MD5" in row and key in saved and agreement.saved_checksum(saved[key]) == ours[key].md5:
        return None  # see _decided_by_files
    return f"{row['Result']} {row['Err_message']}"


def _norm_agrees(row: dict[str, str]) -> bool:
    """Whether the peer's comparison stumbles over a Norm: -0.0 beside 0.0, or one that was too large for its float32."""
    peer, ours = float(row["NPU l2norm"]), float(row["Bench l2norm"])
    return peer == ours or (math.isinf(peer) and ours > agreement.LARGEST[row["NPU Dtype"].removeprefix("torch.")])


def _percent(text: str) -> float:
    return float(text.rstrip("%")) if re.match(r"[\d.]", text) else 0.0


def _split(name: str) -> Key:
    """`Functional.relu.0.forward.input.0` into its call and slot."""
    match = re.match(
        r"(.*?\.(?:forward|backward|parameters_grad)(?:\.\d+(?=\.(?:input|output|parameters|[A-Za-z_])))?)\.(.*)$", name
    )
    assert match, name
    return match[1], match[2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("model", MODELS)
def test_we_read_the_dump_of_the_newest_peer(dumps: Dumps, model: str, level: str, kind: str) -> None:
    _check_reading(dumps.peer(NEWEST, model, level, kind), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("model", READ_BY_US)
@pytest.mark.parametrize("peer", OLDER, ids=lambda peer: peer.version)
def test_we_read_the_dumps_of_older_peers(dumps: Dumps, peer: Peer, model: str, level: str, kind: str) -> None:
    _check_reading(dumps.peer(peer, model, level, kind), kind)


def _check_reading(out: Path, kind: str) -> None:
    """Every tensor of dump.json is there, under its name, with its numbers, and with its elements where it has a file."""
    if importlib.util.find_spec("ulpscope.store.formats.msprobe_reader") is None:
        pytest.skip("ulpscope.store.formats.msprobe_reader is not there yet")
    import ulpscope
    from ulpscope.model.names import call_text, slot_text

    written = rows(out)
    dump = ulpscope.open_dump(out)
    values = {
        (call_text(call.id), slot_text(value.slot)): value
        for call in dump.calls()
        for value in call.values
        if value.shape is not None
    }
    assert written
    for (call, slot), row in written.items():
        value = next((values[key] for key in _spellings(call, slot) if key in values), None)
        assert value is not None, f"{call} {slot} was not read"
        assert (str(value.dtype).removeprefix("torch."), value.shape) == (row.dtype, row.shape), f"{call} {slot}"
        if row.statistics and value.stats is not None:
            _check_numbers(
                f"{call} {slot}", row, (value.stats.max, value.stats.min, value.stats.mean, value.stats.norm)
            )
        elif row.statistics:
            assert kind == "md5", f"{call} {slot} was read without its statistics"
        if row.md5 is not None:
            assert value.checksum is not None
            assert f"{value.checksum:08x}" == row.md5[-8:]
        if row.file is not None and row.file.is_file():
            assert dump.load(value).shape == row.shape


def _check_numbers(where: str, row: Row, found: tuple[float | None, ...]) -> None:
    for key, number in zip(("Max", "Min", "Mean", "Norm"), found, strict=True):
        if key in row.statistics:
            written = abs(row.statistics[key]) if key == "Norm" else row.statistics[key]
            assert number == written or written != written, f"{where}: {key} is {written!r}, read as {number!r}"


def _spellings(call: str, slot: str) -> list[Key]:
    """Our name of a slot: a gradient of a parameter lies in `output`, 8.2.1 gives parameters_grad no number."""
    calls = [call, call + ".0"] if call.endswith("parameters_grad") else [call]
    slots = [slot, f"output.{slot}", f"parameters.{slot}"]
    return [(each, place) for each in calls for place in slots]


def test_the_table_of_exceptions_in_the_docs_is_current() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert document(text) == text, "run `python tests/interop/exceptions.py`"


@pytest.mark.usefixtures("needs_peer")
def test_every_exception_is_needed(dumps: Dumps) -> None:
    used: set[str] = set()
    for model in MODELS:
        for level in LEVELS:
            ours, peer = both(dumps, model, level, "statistics")
            used |= set(agreement.missing(ours, peer, agreement.statistics_differ, level)[1])
    assert [each.pattern for each in EXCEPTIONS if each.pattern not in used and each.in_ours is not InOurs.SCALAR] == []
