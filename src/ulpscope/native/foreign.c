/* Functions of others that take tensors and of which torch sees no call: while somebody asks for
 * it, he is told of each call when it has ended. A function has a field that says how Python calls
 * it fastest, which counts neither for what it equals nor for its hash: no object is exchanged. */
#include "capture.h"

typedef PyObject *(*Vector)(PyObject *, PyObject *const *, size_t, PyObject *);
typedef PyObject *(*Function)(PyObject *, PyObject *, PyObject *);
/* Where Python has kept, since 3.8, the table of a function, and how it calls it. */
enum { TABLE_AT = sizeof(PyObject), VECTOR_AT = TABLE_AT + 4 * sizeof(void *) };

static Table foreign_at;                 /* how Python called each before, 0 for with a tuple */
static PyObject *foreign, *foreign_told; /* the list of them, and who is told, or NULL */

static PyMethodDef *table_of(PyObject *object) {
    return (PyMethodDef *)(uintptr_t)word_of(object, TABLE_AT);
}
static void set_vector(PyObject *object, Vector vector) {
    memcpy((char *)object + VECTOR_AT, &vector, sizeof vector);
}
static PyObject *probed(PyObject *self, PyObject *args, PyObject *kwargs) { Py_RETURN_NONE; }
static PyObject *probed_soon(
    PyObject *self, PyObject *const *args, size_t counted, PyObject *names) {
    Py_RETURN_TRUE;
}
/* Whether it is so here, as a function of our own tells; -1 after an error. */
static int is_known_python(void) {
    static PyMethodDef probe = {
        "probe", (PyCFunction)(void (*)(void))probed, METH_VARARGS | METH_KEYWORDS, NULL};
    PyObject *function = PyCFunction_NewEx(&probe, NULL, NULL), *first = NULL, *soon = NULL;
    int good = function && table_of(function) == &probe && !word_of(function, VECTOR_AT);
    if (good && (first = PyObject_CallNoArgs(function)))
        set_vector(function, probed_soon), soon = PyObject_CallNoArgs(function);
    good = first == Py_None && soon == Py_True;
    Py_XDECREF(first), Py_XDECREF(soon), Py_XDECREF(function);
    return PyErr_Occurred() ? -1 : good;
}
/* Whether all of it lies in one of the ranges; -1 after an error. */
static int is_inside(const void *place, size_t size, PyObject *ranges) {
    for (Py_ssize_t at = 0; at < PyList_Size(ranges); at++) {
        unsigned long long from, to;
        if (!PyArg_ParseTuple(PyList_GetItem(ranges, at), "KK", &from, &to)) return -1;
        if ((uint64_t)(uintptr_t)place >= from && (uint64_t)(uintptr_t)place + size <= to) return 1;
    }
    return 0;
}
static PyObject *tuple_of(PyObject *const *items, Py_ssize_t count) {
    PyObject *made = PyTuple_New(count);
    for (Py_ssize_t at = 0; made && at < count; at++)
        PyTuple_SetItem(made, at, Py_NewRef(items[at]));
    return made;
}
/* As Python calls it: with a tuple where it had no faster way. */
static PyObject *call_as_before(
    PyObject *object, uint64_t before, PyObject *const *args, Py_ssize_t count, PyObject *names) {
    Vector vector;
    Function original;
    memcpy(&vector, &before, sizeof vector),
        memcpy(&original, &table_of(object)->ml_meth, sizeof original);
    if (vector) return vector(object, args, (size_t)count, names);
    PyObject *all = tuple_of(args, count), *kwargs = all && names ? PyDict_New() : NULL,
             *result = NULL;
    for (Py_ssize_t at = 0; kwargs && at < PyTuple_Size(names); at++)
        if (PyDict_SetItem(kwargs, PyTuple_GetItem(names, at), args[count + at])) Py_CLEAR(kwargs);
    if (all && (kwargs || !names)) result = original(PyCFunction_GetSelf(object), all, kwargs);
    Py_XDECREF(all), Py_XDECREF(kwargs);
    return result;
}
static PyObject *come_foreign(
    PyObject *object, PyObject *const *args, size_t counted, PyObject *names) {
    Py_ssize_t count = (Py_ssize_t)(counted << 1 >>
                                    1); /* the first bit says what may be done with the arguments */
    uint64_t *at = table_find(&foreign_at, (uint64_t)object, 0, 0);
    if (!at) return PyErr_SetString(PyExc_SystemError, "a function that is not known"), NULL;
    PyObject *told = Py_XNewRef(foreign_told),
             *result = call_as_before(object, *at, args, count, names), *kind, *error, *trace, *all;
    if (!told) return result;
    GONE(foreign_calls);
    PyErr_Fetch(&kind, &error, &trace); /* one that raised may have written all the same */
    all = tuple_of(args, count + (names ? PyTuple_Size(names) : 0));
    PyObject *done = all ? PyObject_CallFunctionObjArgs(told, all, NULL) : NULL;
    Py_XDECREF(all), Py_XDECREF(done), Py_DECREF(told);
    if (done) return PyErr_Restore(kind, error, trace), result;
    Py_XDECREF(kind), Py_XDECREF(error), Py_XDECREF(trace),
        Py_XDECREF(result); /* a newer one has come */
    return NULL;
}
/* Bytecode that has met a function often calls the code in its table, if that says no more than how
 * its arguments are given: a word more, which means nothing here, makes it ask the function again.
 */
static void set_foreign(int open) {
    for (Py_ssize_t i = 0; foreign && i < PyList_Size(foreign); i++) {
        PyObject *object = PyList_GetItem(foreign, i);
        PyMethodDef *table = table_of(object);
        Vector before;
        memcpy(&before, table_find(&foreign_at, (uint64_t)object, 0, 0), sizeof before);
        set_vector(object, open ? come_foreign : before);
        if (before)
            table->ml_flags =
                open ? table->ml_flags | METH_COEXIST : table->ml_flags & ~METH_COEXIST;
    }
}
/* 1 if it can be watched, 0 if not, -1 after an error. */
static int add_foreign(PyObject *object, PyObject *ranges) {
    if (!PyCFunction_CheckExact(object)) return 0;
    if (table_find(&foreign_at, (uint64_t)object, 0, 0)) return 1;
    PyMethodDef *table = table_of(object);
    uint64_t before = word_of(object, VECTOR_AT);
    int can = before ? !(table->ml_flags & METH_COEXIST)
                     : (table->ml_flags & ~METH_STATIC) == (METH_VARARGS | METH_KEYWORDS);
    if (can && before) can = is_inside(table, sizeof *table, ranges);
    if (can <= 0) return can;
    return table_put(&foreign_at, (uint64_t)object, 0, 0, before) || PyList_Append(foreign, object)
               ? -1
               : 1;
}
/* More of them, which stay known, where memory may be written, and who is told from now on, or
 * None; gives those that cannot be watched. */
PyObject *watch_foreign(PyObject *module, PyObject *args) {
    PyObject *functions, *ranges, *told;
    if (!PyArg_ParseTuple(args, "O!O!O", &PyList_Type, &functions, &PyList_Type, &ranges, &told))
        return NULL;
    int known = foreign ? 1 : is_known_python();
    if (!known) return Py_NewRef(functions);
    if (known < 0 || (!foreign && !(foreign = PyList_New(0)))) return NULL;
    PyObject *left = PyList_New(0);
    set_foreign(0);
    for (Py_ssize_t at = 0; left && at < PyList_Size(functions); at++) {
        int can = add_foreign(PyList_GetItem(functions, at), ranges);
        if (can < 0 || (!can && PyList_Append(left, PyList_GetItem(functions, at)))) Py_CLEAR(left);
    }
    set_ref(&foreign_told, left && told != Py_None ? Py_NewRef(told) : NULL);
    set_foreign(foreign_told != NULL);
    return left;
}
