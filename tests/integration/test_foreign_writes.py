"""C++ extensions that write into tensors behind torch's back: what they wrote is measured, not what was there before."""

import ctypes
import importlib.machinery
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ulpscope
from integration.runs import LEVELS
from ulpscope.frameworks.torch import internals
from ulpscope.native import taps

# As pybind11 makes it: a function that says what it takes. It finds the memory by itself, as a C++ caster does.
SOURCE = r"""
#include <Python.h>
static PyObject *fill(PyObject *self, PyObject *args, PyObject *kwargs) {
    PyObject *tensors, *places;
    double value;
    if (!PyArg_ParseTuple(args, "OOd", &tensors, &places, &value)) return NULL;
    for (Py_ssize_t i = 0; i < PyList_Size(places); i++) {
        float *to = PyLong_AsVoidPtr(PyList_GetItem(places, i));
        for (int k = 0; k < 4; k++) to[k] = (float)value;
    }
    if (value < 0) return PyErr_SetString(PyExc_ValueError, "below zero"), NULL;
    Py_RETURN_NONE;
}
static PyObject *fill_soon(PyObject *self, PyObject *const *args, Py_ssize_t count, PyObject *names) {
    PyObject *all = PyTuple_Pack(3, args[0], args[1], args[2]), *result = all ? fill(self, all, NULL) : NULL;
    Py_XDECREF(all);
    return result;
}
static PyMethodDef methods[] = {
    {"fill_soon", (PyCFunction)(void (*)(void))fill_soon, METH_FASTCALL | METH_KEYWORDS,
     "fill_soon(arg0: collections.abc.Sequence[torch.Tensor], arg1: list[int], arg2: float) -> None"},
    {"fill", (PyCFunction)(void (*)(void))fill, METH_VARARGS | METH_KEYWORDS,
     "fill(arg0: list[torch.Tensor], arg1: list[int], arg2: float) -> None"},
    {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "NAME", NULL, -1, methods};
PyMODINIT_FUNC PyInit_NAME(void) { return PyModule_Create(&module); }
"""
Load = Callable[[], Any]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")

    def build(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        source, made = folder / "m.c", folder / f"{name}{importlib.machinery.EXTENSION_SUFFIXES[0]}"
        source.write_text(SOURCE.replace("NAME", name))
        include = sysconfig.get_paths()["include"]
        subprocess.run([compiler, "-shared", "-fPIC", f"-I{include}", "-o", made, source], check=True)
        return made

    return build


@pytest.fixture
def load(compiled: Callable[[str], Path], request: pytest.FixtureRequest) -> Iterator[Load]:
    name = f"foreign_{abs(hash(request.node.name)) % 10**8}"
    path = compiled(name)

    def loaded() -> Any:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[name] = module
        return module

    yield loaded
    sys.modules.pop(name, None)


def largest(path: Path) -> list[float]:
    values = [value for call in ulpscope.open_dump(path).calls() for value in call.values]
    return [value.stats.max for value in values if value.stats is not None and value.slot.role.value == "input"]


@pytest.mark.skipif(taps.C is None or internals.native() != "full", reason="functions cannot be watched here")
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["fill", "fill_soon"])
@pytest.mark.parametrize("when", ["before", "during"])
def test_what_an_extension_was_given_is_measured_anew(
    when: str, name: str, level: str, load: Load, tmp_path: Path
) -> None:
    module = load() if when == "before" else None
    data, model = torch.zeros(4), nn.Identity()
    place = data.data_ptr()

    def fill(value: float) -> None:
        getattr(module, name)([data], [place], value)

    def fill_often(value: float) -> None:
        function = getattr(module, name)
        for _ in range(50):  # Python has shorter ways for what it has met
            function([data], [place], value)

    if module is not None:
        fill_often(0.0)
        before = (getattr(module, name), hash(getattr(module, name)))
    gone = taps.C.ways()["foreign_calls"] if taps.C is not None else 0
    with ulpscope.capture(tmp_path / "run", model=model, level=level):
        model(data)
        data.abs()
        if module is None:
            module = load()
        else:
            assert (getattr(module, name), hash(getattr(module, name))) == before
        for value in (1.0, 2.0):
            fill_often(value)
            model(data)
            data.abs()
        with pytest.raises(ValueError, match="below zero"):
            fill(-1.0)
        model(data)
        data.abs()
    assert taps.C is not None and taps.C.ways()["foreign_calls"] - gone == 101
    found = largest(tmp_path / "run")
    expected = [0.0, 1.0, 2.0, -1.0]
    assert list(dict.fromkeys(found)) == expected and found == sorted(found, key=expected.index)
    fill_often(5.0)
    assert data.tolist() == [5.0] * 4 and model(data) is data


def test_where_it_cannot_be_watched_the_dump_names_it(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taps, "C", None)
    module = load()
    model = nn.Identity()
    with ulpscope.capture(tmp_path / "run", model=model, level="op"):
        torch.zeros(4).abs()
    notes = ulpscope.open_dump(tmp_path / "run").manifest.notes
    assert any(module.__name__ in note and "reuse=False" in note for note in notes)


@pytest.mark.parametrize("level", LEVELS)
def test_an_operator_with_a_false_schema_is_measured_anew(level: str, tmp_path: Path) -> None:
    library = torch.library.Library("ulpscope_foreign", "FRAGMENT")
    library.define(f"fill_{level}(Tensor x) -> ()")

    def fill(data: Tensor) -> None:
        (ctypes.c_float * 4).from_address(place)[:] = [1.0] * 4

    library.impl(f"fill_{level}", fill, "CPU")
    data, model = torch.zeros(4), nn.Identity()
    place = data.data_ptr()
    with ulpscope.capture(tmp_path / "run", model=model, level=level):
        model(data)
        data.abs()
        getattr(torch.ops.ulpscope_foreign, f"fill_{level}")(data)
        model(data)
        data.abs()
    found = largest(tmp_path / "run")
    assert found == sorted(found) and found[-1] == 1.0
