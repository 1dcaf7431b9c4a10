/* Makes objects of classes with slots without a call of their __init__, which in a frozen dataclass is Python.
 * Knows neither the classes nor what their fields mean. */
#include "_abi.h"

typedef struct {
    PyObject *type;
    descrsetfunc set;
    Py_ssize_t count;
    PyObject *members[];
} Maker;

static void release(PyObject *capsule) {
    Maker *maker = PyCapsule_GetPointer(capsule, NULL);
    for (Py_ssize_t i = 0; maker && i < maker->count; i++) Py_XDECREF(maker->members[i]);
    if (maker) Py_XDECREF(maker->type);
    free(maker);
}

static PyObject *make(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    const Maker *maker = PyCapsule_GetPointer(self, NULL);
    if (!maker) return NULL;
    if (count != maker->count)
        return PyErr_Format(PyExc_TypeError, "%zd fields were expected, %zd are given", maker->count, count);
    PyObject *made = PyType_GenericAlloc((PyTypeObject *)maker->type, 0);
    for (Py_ssize_t i = 0; made && i < count; i++)
        if (maker->set(maker->members[i], made, args[i])) Py_CLEAR(made);
    return made;
}
static PyMethodDef make_method = {"make", (PyCFunction)(void (*)(void))make, METH_FASTCALL, "All fields, in order."};

static PyObject *maker(PyObject *module, PyObject *args) {
    PyObject *type, *fields;
    if (!PyArg_ParseTuple(args, "O!O!", &PyType_Type, &type, &PyTuple_Type, &fields)) return NULL;
    Py_ssize_t count = PyTuple_Size(fields);
    Maker *found = calloc(1, sizeof *found + (size_t)count * sizeof *found->members);
    if (!found) return PyErr_NoMemory();
    PyObject *capsule = PyCapsule_New(found, NULL, release), *made = NULL;
    if (!capsule) {
        free(found);
        return NULL;
    }
    found->type = Py_NewRef(type), found->count = count;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *member = found->members[i] = PyObject_GetAttr(type, PyTuple_GetItem(fields, i));
        descrsetfunc set = member ? (descrsetfunc)PyType_GetSlot(Py_TYPE(member), Py_tp_descr_set) : NULL;
        if (!set || (i && set != found->set)) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a field of the class has no slot");
            Py_DECREF(capsule);
            return NULL;
        }
        found->set = set;
    }
    made = PyCFunction_NewEx(&make_method, capsule, NULL);
    Py_DECREF(capsule);
    return made;
}

static PyMethodDef methods[] = {
    {"maker", maker, METH_VARARGS, "A function that makes objects of a class from all their fields."},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "_making", .m_methods = methods, .m_slots = slots};
PyMODINIT_FUNC PyInit__making(void) { return PyModuleDef_Init(&definition); }
