/* The gate: the lock that a thread holds while our code runs on it. As threading.RLock is, which
 * would be called through Python four times a call. What is here changes under the lock of the
 * interpreter. */
#include "capture.h"

typedef struct Gate {
    PyObject_HEAD unsigned long owner; /* 0 where nobody holds it */
    Py_ssize_t times, waiting;
    PyThread_type_lock bell; /* locked until somebody who waits is to look again */
    char rung;
} Gate;

int gate_take(Gate *g) {
    unsigned long here = PyThread_get_thread_ident();
    if (g->owner && g->owner != here) return 0;
    g->owner = here, g->times++;
    return 1;
}
int gate_is_held(const Gate *g) { return g && g->owner == PyThread_get_thread_ident(); }
int gate_give_up(Gate *g) {
    if (g->owner != PyThread_get_thread_ident()) return -1;
    if (--g->times) return 0;
    g->owner = 0;
    if (g->waiting && !g->rung) g->rung = 1, PyThread_release_lock(g->bell);
    return 0;
}
/* Seconds are counted from when it was last given up: then it is in use, and nobody has left it
 * behind. */
static PyObject *gate_acquire(Gate *g, PyObject *args) {
    int blocking = 1;
    double timeout = -1;
    if (!PyArg_ParseTuple(args, "|pd", &blocking, &timeout)) return NULL;
    while (!gate_take(g)) {
        PyLockStatus heard = PY_LOCK_FAILURE;
        if (blocking) {
            g->waiting++;
            Py_BEGIN_ALLOW_THREADS
            heard = PyThread_acquire_lock_timed(
                g->bell, timeout < 0 ? -1 : (PY_TIMEOUT_T)(1e6 * timeout), 1);
            Py_END_ALLOW_THREADS
            g->waiting--;
        }
        if (heard == PY_LOCK_ACQUIRED) g->rung = 0;
        if (heard == PY_LOCK_INTR && PyErr_CheckSignals()) return NULL;
        if (heard == PY_LOCK_FAILURE) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}
static PyObject *gate_release(Gate *g, PyObject *none) {
    if (gate_give_up(g))
        return PyErr_SetString(PyExc_RuntimeError, "this thread does not hold the gate"), NULL;
    Py_RETURN_NONE;
}
static PyObject *gate_enter(Gate *g, PyObject *none) {
    PyObject *empty = PyTuple_New(0), *taken = empty ? gate_acquire(g, empty) : NULL;
    Py_XDECREF(empty);
    return taken;
}
static PyObject *gate_exit(Gate *g, PyObject *args) { return gate_release(g, NULL); }
static PyObject *gate_repr(Gate *g) {
    return PyUnicode_FromFormat("<gate owner=%lu times=%zd>", g->owner, g->times);
}
static int gate_init(Gate *g, PyObject *args, PyObject *kwargs) {
    if (g->bell || !(g->bell = PyThread_allocate_lock()))
        return PyErr_SetString(PyExc_RuntimeError, "no lock"), -1;
    PyThread_acquire_lock(g->bell, 0);
    return 0;
}
static void gate_dealloc(Gate *g) {
    PyTypeObject *type = Py_TYPE(g);
    if (g->bell) PyThread_free_lock(g->bell);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(g);
    Py_DECREF(type);
}
static PyMethodDef gate_methods[] = {
    {"acquire", (PyCFunction)gate_acquire, METH_VARARGS, "Takes it; whether that was possible."},
    {"release", (PyCFunction)gate_release, METH_NOARGS, "Gives it up."},
    {"__enter__", (PyCFunction)gate_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)gate_exit, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static PyType_Slot gate_slots[] = {{Py_tp_init, gate_init}, {Py_tp_dealloc, gate_dealloc},
    {Py_tp_repr, gate_repr}, {Py_tp_methods, gate_methods}, {0, NULL}};
PyType_Spec gate_spec = {
    "ulpscope.native._taps.Gate", sizeof(Gate), 0, Py_TPFLAGS_DEFAULT, gate_slots};
