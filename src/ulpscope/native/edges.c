/* Edges of the graph: which of them are the arguments of a call, and what a node leads to. */
#include "capture.h"

/* The node that made a tensor, or NULL where there is none; -1 after an error. With a node of Python comes a reference. */
int node_of(PyObject *value, Direct *direct, int native, void **node) {
    int safe = native && direct && !(direct->version && tensor_is_view(direct));
    PyObject *found = safe ? NULL : GET(value, GRAD_FN); /* which may make torch rebuild it, and raise */
    if (!safe && !found) return -1;
    if (native) *node = found == Py_None ? NULL : tensor_node(tensor_impl(value));
    else *node = found == Py_None ? NULL : Py_NewRef(found);
    Py_XDECREF(found);
    return 0;
}
/* Whether a tensor takes part in a backward pass; `direct` says whether it was asked without Python. */
int wants_grad(Fast *f, PyObject *value, Direct *d, int *direct) {
    *direct = is_tensor(f, value) ? is_direct(f, value, d) : 0;
    return *direct > 0 ? d->requires_grad : *direct ? -1 : truth_of(GET(value, REQUIRES_GRAD));
}
static int add_edge(Fast *f, Edges *e, PyObject *value, PyObject *path, int peek) {
    Direct d;
    int direct, wanted = wants_grad(f, value, &d, &direct);
    if (wanted <= 0) return wanted;
    if (peek) { /* a view that was written: asking for its node makes torch rebuild it */
        int view = direct ? tensor_is_view(&d) : truth_of(ASK(value, IS_VIEW));
        if (view < 0) return -1;
        if (view && (direct ? (int64_t)d.version : number_of(GET(value, VERSION)))) return PyErr_Occurred() ? -1 : 0;
    }
    Edge edge = {.number = -1};
    if (node_of(value, direct ? &d : NULL, e->native, &edge.node)) return -1;
    int leaf = !edge.node;
    if (leaf) edge.node = e->native ? tensor_impl(value) : Py_NewRef(value);
    else edge.number = direct ? tensor_output(&d) : number_of(GET(value, OUTPUT_NR));
    if (e->native && !leaf) edge.sequence = node_sequence(edge.node);
    if (PyErr_Occurred() || grow_from(e->few, &e->list, &e->room, e->count + 1, sizeof *e->list)) {
        if (!e->native) Py_DECREF((PyObject *)edge.node);
        return -1;
    }
    edge.path = Py_NewRef(path);
    e->list[e->count++] = edge;
    return 0;
}
typedef struct {
    Edges *edges;
    int peek;
} Adding;
static int add_leaf(Fast *f, void *to, PyObject *path, PyObject *leaf) {
    const Adding *how = to;
    int tensor = is_tensor(f, leaf) ? 1 : is_plain(f, leaf) ? 0 : PyObject_IsInstance(leaf, f->given[TENSOR]);
    return tensor <= 0 ? tensor : add_edge(f, how->edges, leaf, path, how->peek);
}
int find_edges(Fast *f, Edges *e, PyObject *args, PyObject *kwargs, int peek, int native) {
    Adding how = {e, peek};
    PyObject *key, *value, *path;
    int failed = 0;
    e->list = e->few, e->room = FEW_EDGES, e->count = 0;
    e->native = (char)native, e->are_known = 1;
    if (native) GONE(native_edges);
    for (Py_ssize_t at = 0, size = PyTuple_Size(args); !failed && at < size; at++) {
        value = PyTuple_GetItem(args, at);
        if (!is_tensor(f, value) && is_plain(f, value)) continue;
        path = place_path(at);
        failed = !path || visit_leaves(f, value, path, add_leaf, &how);
        Py_XDECREF(path);
    }
    for (Py_ssize_t at = 0; !failed && kwargs && PyDict_Next(kwargs, &at, &key, &value);) {
        if (!is_tensor(f, value) && is_plain(f, value)) continue;
        path = PyTuple_Pack(1, key);
        failed = !path || visit_leaves(f, value, path, add_leaf, &how);
        Py_XDECREF(path);
    }
    if (failed) drop_edges(e);
    return failed ? -1 : 0;
}
void drop_edges(Edges *e) {
    for (size_t i = 0; i < e->count; i++) {
        if (!e->native) Py_DECREF((PyObject *)e->list[i].node);
        Py_DECREF(e->list[i].path);
    }
    if (e->list != e->few) free(e->list);
    e->list = e->few, e->count = 0, e->are_known = 0;
}
/* As backward.py has them; of nodes of Python. */
PyObject *edges_table(const Edges *e) {
    PyObject *table = PyDict_New();
    for (size_t i = 0; table && i < e->count; i++) {
        const Edge *edge = e->list + i;
        PyObject *key = edge->number < 0 ? PyLong_FromVoidPtr(edge->node) : Py_BuildValue("(OL)",
            (PyObject *)edge->node, (long long)edge->number);
        PyObject *paths = key ? PyDict_GetItemWithError(table, key) : NULL, *made = paths ? Py_NewRef(paths) :
            PyList_New(0);
        if (!key || !made || PyList_Append(made, edge->path) || (!paths && PyDict_SetItem(table, key, made)))
            Py_CLEAR(table);
        Py_XDECREF(key), Py_XDECREF(made);
    }
    return table;
}
typedef struct {
    PyObject_HEAD
    Edges edges;
} EdgesObject;
PyObject *new_edges(Fast *f, PyObject *args, PyObject *kwargs, int peek) {
    EdgesObject *e = (EdgesObject *)PyType_GenericAlloc(edges_type, 0);
    if (e && find_edges(f, &e->edges, args, kwargs, peek, 0)) Py_CLEAR(e);
    return (PyObject *)e;
}
Edges *edges_in(PyObject *object) { return Py_TYPE(object) == edges_type ? &((EdgesObject *)object)->edges : NULL; }
static void edges_dealloc(EdgesObject *e) {
    PyTypeObject *type = Py_TYPE(e);
    drop_edges(&e->edges);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(e);
    Py_DECREF(type);
}
static PyObject *table_of_edges(EdgesObject *e, PyObject *none) { return edges_table(&e->edges); }
static PyMethodDef edges_methods[] = {{"table", (PyCFunction)table_of_edges, METH_NOARGS, "Paths by edge."}, {NULL, NULL, 0, NULL}};
static PyType_Slot edges_slots[] = {{Py_tp_dealloc, edges_dealloc}, {Py_tp_methods, edges_methods}, {0, NULL}};
PyType_Spec edges_spec = {"ulpscope.native._taps.Edges", sizeof(EdgesObject), 0, Py_TPFLAGS_DEFAULT, edges_slots};

int children_of(void *node, int native, Children *to) {
    *to = (Children){node, native ? NULL : GET((PyObject *)node, NEXT_FUNCTIONS), 0};
    if (!native && !to->list) return -1;
    to->count = native ? node_children(node) : (size_t)PyTuple_Size(to->list);
    return 0;
}
int child_at(const Children *of, size_t at, Child *to) {
    if (of->list) {
        PyObject *pair = PyTuple_GetItem(of->list, (Py_ssize_t)at), *node = PyTuple_GetItem(pair, 0);
        *to = (Child){node == Py_None ? NULL : node, PyLong_AsLongLong(PyTuple_GetItem(pair, 1)), 0};
        if (to->node) to->sequence = (uint64_t)number_of(ASK(node, SEQUENCE_NR));
        return PyErr_Occurred() ? -1 : 0;
    }
    uint32_t number;
    to->node = node_child(of->node, at, &number), to->number = number;
    to->sequence = to->node ? node_sequence(to->node) : 0;
    return 0;
}
/* Which argument an edge to `child` is: its place in the list, -1 for none, -2 after an error. `turn` counts how often it
 * was met, where each may stand for one of several arguments. */
int find_edge(const Edges *e, const Child *child, int turn) {
    if (!e->count) return -1;
    void *target = child->node, *variable = NULL;
    if (child->sequence == LEAF && e->native) variable = node_leaf(child->node);
    else if (child->sequence == LEAF && !(variable = GET((PyObject *)child->node, VARIABLE))) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -2;
        PyErr_Clear(); /* a node that only says that there is no gradient */
    }
    int64_t number = variable ? -1 : child->number;
    if (variable) target = variable;
    int last = -1;
    for (size_t i = 0; i < e->count; i++)
        if (e->list[i].node == target && e->list[i].number == number && (!e->native || variable ||
            e->list[i].sequence == child->sequence)) {
            last = (int)i;
            if (!turn--) break;
        }
    if (!e->native) Py_XDECREF((PyObject *)variable);
    return last;
}
