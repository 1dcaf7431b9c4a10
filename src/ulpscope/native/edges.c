/* The graph: which of its edges the arguments of a call are, which nodes the call made, and hooks
 * on these. All of it is asked through Python, where each node becomes an object while it is asked:
 * so nothing is asked twice, and children that are an argument's edge are asked nothing at all. */
#include "capture.h"

#define LEAF NONE64 /* the sequence number of nodes that accumulate */

/* --- edges of arguments ---------------------------------------------------------------------- */

/* Whether a tensor takes part in a backward pass; -1 after an error. */
int wants_grad(const Fast *f, PyObject *value) {
    return is_tensor(f, value) ? tensor_requires_grad(value) : truth_of(GET(value, REQUIRES_GRAD));
}
/* Whether a leaf of a value is a tensor; -1 after an error. */
static int is_any_tensor(Fast *f, PyObject *leaf) {
    if (is_tensor(f, leaf)) return 1;
    return is_plain(f, leaf) ? 0 : PyObject_IsInstance(leaf, f->given[TENSOR]);
}
/* Whether it is a view that was written: asking for its node makes torch rebuild it. */
static int is_rebased(const Fast *f, PyObject *value) {
    int view = is_tensor(f, value) ? tensor_is_view(value) : truth_of(ASK(value, IS_VIEW));
    if (view <= 0) return view;
    int64_t version = number_of(GET(value, VERSION));
    return PyErr_Occurred() ? -1 : version != 0;
}
static int add_edge(Fast *f, Edges *e, PyObject *value, PyObject *path, int peek) {
    int wanted = wants_grad(f, value);
    if (wanted <= 0) return wanted;
    int skip = peek ? is_rebased(f, value) : 0;
    if (skip) return skip < 0 ? -1 : 0;
    PyObject *node = GET(value, GRAD_FN);
    if (!node) return -1;
    Edge edge = {node, NULL, -1};
    if (node == Py_None)
        set_ref(&edge.node, Py_NewRef(value));
    else
        edge.number = number_of(GET(value, OUTPUT_NR));
    if (PyErr_Occurred() || grow_from(e->few, &e->list, &e->room, e->count + 1, sizeof *e->list)) {
        Py_DECREF(edge.node);
        return -1;
    }
    edge.path = Py_NewRef(path);
    e->leaves += edge.number < 0;
    e->list[e->count++] = edge;
    return 0;
}
typedef struct {
    Edges *edges;
    int peek;
} Adding;
static int add_leaf(Fast *f, void *to, PyObject *path, PyObject *leaf) {
    const Adding *how = to;
    int tensor = is_any_tensor(f, leaf);
    return tensor <= 0 ? tensor : add_edge(f, how->edges, leaf, path, how->peek);
}
/* 0, or -1 with an exception set and no edges. With `peek`, views whose node torch would have to
 * rebuild are left out. */
int find_edges(Fast *f, Edges *e, PyObject *args, PyObject *kwargs, int peek) {
    Adding how = {e, peek};
    PyObject *key, *value, *path;
    int failed = 0;
    e->list = e->few;
    e->room = FEW_EDGES;
    e->count = e->leaves = 0;
    e->are_known = 1;
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
        Py_DECREF(e->list[i].node);
        Py_DECREF(e->list[i].path);
    }
    if (e->list != e->few) free(e->list);
    e->list = e->few;
    e->count = e->leaves = 0;
    e->are_known = 0;
}

/* Edges as Python keeps them between the beginning and the end of a call. */
typedef struct {
    PyObject_HEAD Edges edges;
} EdgesObject;
PyObject *new_edges(Fast *f, PyObject *args, PyObject *kwargs, int peek) {
    EdgesObject *e = (EdgesObject *)PyType_GenericAlloc(edges_type, 0);
    if (e && find_edges(f, &e->edges, args, kwargs, peek)) Py_CLEAR(e);
    return (PyObject *)e;
}
Edges *edges_in(PyObject *object) {
    return Py_TYPE(object) == edges_type ? &((EdgesObject *)object)->edges : NULL;
}
static void edges_dealloc(EdgesObject *e) {
    PyTypeObject *type = Py_TYPE(e);
    drop_edges(&e->edges);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(e);
    Py_DECREF(type);
}
/* As backward.py has them. */
static PyObject *edges_table(const Edges *e) {
    PyObject *table = PyDict_New();
    for (size_t i = 0; table && i < e->count; i++) {
        const Edge *edge = e->list + i;
        PyObject *key = edge->number < 0
                            ? PyLong_FromVoidPtr(edge->node)
                            : Py_BuildValue("(OL)", edge->node, (long long)edge->number);
        PyObject *paths = key ? PyDict_GetItemWithError(table, key) : NULL;
        PyObject *made = paths ? Py_NewRef(paths) : PyList_New(0);
        int failed = !key || !made || PyList_Append(made, edge->path);
        if (failed || (!paths && PyDict_SetItem(table, key, made))) Py_CLEAR(table);
        Py_XDECREF(key);
        Py_XDECREF(made);
    }
    return table;
}
static PyObject *table_of_edges(EdgesObject *e, PyObject *none) { return edges_table(&e->edges); }
static PyMethodDef edges_methods[] = {
    {"table", (PyCFunction)table_of_edges, METH_NOARGS, "Paths by edge."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot edges_slots[] = {
    {Py_tp_dealloc, edges_dealloc}, {Py_tp_methods, edges_methods}, {0, NULL}};
PyType_Spec edges_spec = {
    "ulpscope.native._taps.Edges", sizeof(EdgesObject), 0, Py_TPFLAGS_DEFAULT, edges_slots};

/* --- what a node leads to -------------------------------------------------------------------- */

/* All borrowed. */
typedef struct {
    PyObject *node; /* NULL where there is none */
    int64_t number;
    char is_leaf;
} Child;
static Child child_at(const Fast *f, PyObject *children, Py_ssize_t at) {
    PyObject *pair = PyTuple_GetItem(children, at), *node = PyTuple_GetItem(pair, 0);
    if (node == Py_None) return (Child){0};
    int is_leaf = (PyObject *)Py_TYPE(node) == f->given[ACCUMULATOR];
    return (Child){node, PyLong_AsLongLong(PyTuple_GetItem(pair, 1)), (char)is_leaf};
}
/* Which argument an edge to `child` is: its place in the list, -1 for none, -2 after an error.
 * `turn` counts how often it was met, where each may stand for one of several arguments. */
static int find_edge(const Edges *e, const Child *child, int turn) {
    PyObject *target = child->node, *variable = NULL;
    int64_t number = child->is_leaf ? -1 : child->number;
    int last = -1;
    if (!e->count || (child->is_leaf && !e->leaves)) return -1;
    if (child->is_leaf && !(target = variable = GET(child->node, VARIABLE))) return -2;
    for (size_t i = 0; i < e->count; i++)
        if (e->list[i].node == target && e->list[i].number == number) {
            last = (int)i;
            if (!turn--) break;
        }
    Py_XDECREF(variable);
    return last;
}
/* Whether the call that began at `sequence` made it; -1 after an error. */
static int is_made_since(const Child *child, int64_t sequence) {
    if (child->is_leaf) return 0;
    uint64_t number = (uint64_t)number_of(ASK(child->node, SEQUENCE_NR));
    if (PyErr_Occurred()) return -1;
    return number != LEAF && (int64_t)number >= sequence;
}

/* --- the nodes that made a result ------------------------------------------------------------ */

typedef struct {
    PyObject *node, *value, *outputs; /* outputs NULL: number `output` at the first place */
    int output;
} Root;
/* Those of the call, and, where there are none, older ones. */
enum { FEW_ROOTS = 2 };
typedef struct {
    Root *list, few[FEW_ROOTS];
    size_t count, room;
    int older;
    int64_t sequence;
} Roots;
static void drop_roots(Roots *roots) {
    for (size_t i = 0; i < roots->count; i++) {
        Py_DECREF(roots->list[i].node);
        Py_DECREF(roots->list[i].value);
        Py_XDECREF(roots->list[i].outputs);
    }
    roots->count = 0;
}
/* The root of a node, which is made where it is not there; NULL after an error. */
static Root *root_of(Roots *roots, PyObject *node, PyObject *value, PyObject *path, int output) {
    for (size_t at = 0; at < roots->count; at++)
        if (roots->list[at].node == node) return roots->list + at;
    if (grow_from(roots->few, &roots->list, &roots->room, roots->count + 1, sizeof *roots->list))
        return NULL;
    PyObject *outputs = path ? PyDict_New() : NULL;
    if (path && !outputs) return NULL;
    roots->list[roots->count] = (Root){Py_NewRef(node), Py_NewRef(value), outputs, output};
    return roots->list + roots->count++;
}
static int add_node(Roots *roots, PyObject *node, PyObject *value, PyObject *path) {
    int older = number_of(ASK(node, SEQUENCE_NR)) < roots->sequence;
    int64_t output = number_of(GET(value, OUTPUT_NR));
    if (PyErr_Occurred()) return -1;
    if (older && roots->count && !roots->older) return 0;
    if (!older && roots->older) drop_roots(roots);
    roots->older = older;
    Root *root = root_of(roots, node, value, path, (int)output);
    if (!root || !path) return root ? 0 : -1;
    PyObject *key = PyLong_FromLongLong(output);
    int failed = !key || PyDict_SetItem(root->outputs, key, path);
    Py_XDECREF(key);
    return failed ? -1 : 0;
}
static int add_root(Fast *f, Roots *roots, PyObject *value, PyObject *path) {
    int wanted = wants_grad(f, value);
    PyObject *node = wanted > 0 ? GET(value, GRAD_FN) : NULL;
    if (!node) return wanted ? -1 : 0;
    int failed = node == Py_None ? 0 : add_node(roots, node, value, path);
    Py_DECREF(node);
    return failed;
}
static int add_root_leaf(Fast *f, void *to, PyObject *path, PyObject *leaf) {
    int tensor = is_any_tensor(f, leaf);
    return tensor <= 0 ? tensor : add_root(f, to, leaf, PyTuple_Size(path) ? path : NULL);
}

/* --- hooks on them --------------------------------------------------------------------------- */

/* The table of a node's hooks, of which there are a thousand until a backward pass is over. The
 * collector need not see it while there is no cycle through it, which a hook of ours does not make.
 */
static PyObject *new_table(Fast *f) {
    PyObject *table = PyObject_CallNoArgs(f->given[TABLE]);
    if (table && f->untracked) PyObject_GC_UnTrack(table);
    return table;
}
/* Runs in place of the function by which torch puts a hook into the table of a node: of ours nobody
 * holds a handle, which would take longer to make than all else. */
PyObject *fast_enter_hook(Fast *f, PyObject *args) {
    PyObject *table, *hook;
    if (!PyArg_UnpackTuple(args, "_register_hook", 2, 2, &table, &hook)) return NULL;
    if (Py_TYPE(hook) != hook_type && Py_TYPE(hook) != part_type)
        return PyObject_Call(f->given[ENTER_PLAINLY], args, NULL);
    table = table == Py_None ? new_table(f) : Py_NewRef(table);
    int failed = !table || PyObject_SetItem(table, hook, hook);
    PyObject *pair = failed ? NULL : PyTuple_Pack(2, table, Py_None);
    Py_XDECREF(table);
    if (pair) GONE(entered);
    return pair;
}
static int hang(PyObject *node, int before, PyObject *hook) {
    PyObject *way = word[before ? REGISTER_PREHOOK : REGISTER_HOOK];
    PyObject *handle = PyObject_CallMethodObjArgs(node, way, hook, NULL);
    Py_XDECREF(handle);
    return handle ? 0 : -1;
}
/* How many children before this one lead to the same edge. */
static int turn_of(const Fast *f, PyObject *children, Py_ssize_t at, const Child *child) {
    int turn = 0;
    for (Py_ssize_t i = 0; i < at; i++) {
        Child other = child_at(f, children, i);
        turn += other.node == child->node && other.number == child->number;
    }
    return turn;
}
/* The hook of a call that is one node. 1 where the call made a child of it too: then it is several.
 */
static int arm_single(
    Fast *f, Call *c, int64_t sequence, const Root *root, const Edges *e, PyObject *children) {
    Py_ssize_t count = children ? PyTuple_Size(children) : -1;
    Hook *hook = count < 0 ? NULL : new_hook(f, c, root->output, root->outputs, (size_t)count, 0);
    int status = hook ? 0 : -1;
    for (Py_ssize_t at = 0; !status && at < count; at++) {
        Child child = child_at(f, children, at);
        if (!child.node) continue;
        int found = find_edge(e, &child, turn_of(f, children, at, &child));
        if (found >= 0)
            hook->slots[at] = Py_NewRef(e->list[found].path);
        else
            status = found == -2 ? -1 : is_made_since(&child, sequence);
    }
    if (!status) {
        GONE(single_nodes);
        if (hang(root->node, 0, (PyObject *)hook) || hold(f, root->node, (PyObject *)hook))
            status = -1;
    }
    Py_XDECREF((PyObject *)hook);
    return status;
}

/* Nodes that were met. The first few are looked through, the others are in a table. */
enum { FEW_NODES = 16 };
typedef struct {
    PyObject **list, *few[FEW_NODES];
    size_t count, room;
    Table met;
} Nodes;
static int meet(Nodes *nodes, PyObject *node) {
    for (size_t i = 0; i < nodes->count && i < FEW_NODES; i++)
        if (nodes->list[i] == node) return 0;
    int many = nodes->count >= FEW_NODES;
    if (many && table_find(&nodes->met, (uint64_t)node, 0, 0)) return 0;
    if (grow_from(nodes->few, &nodes->list, &nodes->room, nodes->count + 1, sizeof *nodes->list))
        return -1;
    if (many && table_put(&nodes->met, (uint64_t)node, 0, 0, 1)) return -1;
    nodes->list[nodes->count++] = Py_NewRef(node);
    return 0;
}
static void drop_nodes(Nodes *nodes) {
    for (size_t i = 0; i < nodes->count; i++) Py_DECREF(nodes->list[i]);
    if (nodes->list != nodes->few) free(nodes->list);
    table_empty(&nodes->met);
}
/* Before each root, for the gradients of results. */
static int arm_roots(Fast *f, Pass *p, const Root *roots, size_t count, Nodes *nodes) {
    for (size_t i = 0; i < count; i++) {
        Part *part =
            meet(nodes, roots[i].node) ? NULL : new_part(p, roots[i].outputs, roots[i].output);
        int failed = !part || hang(roots[i].node, 1, (PyObject *)part) ||
                     hold(f, roots[i].node, (PyObject *)p);
        Py_XDECREF((PyObject *)part);
        if (failed) return -1;
        p->expected++;
    }
    return 0;
}
/* Behind a node that edges leave, for the gradients of arguments; the children that the call made
 * are met. */
static int arm_node(
    Fast *f, Pass *p, PyObject *node, int64_t sequence, const Edges *e, Nodes *nodes) {
    PyObject *children = GET(node, NEXT_FUNCTIONS);
    Part *part = NULL;
    int status = children ? 0 : -1;
    for (Py_ssize_t at = 0, count = children ? PyTuple_Size(children) : 0; !status && at < count;
        at++) {
        Child child = child_at(f, children, at);
        if (!child.node) continue;
        int found = find_edge(e, &child, 0), made = 0;
        if (found >= 0)
            status = add_place(p, &part, (int)at, e->list[found].path);
        else
            made = found == -2 ? -1 : is_made_since(&child, sequence);
        if (made) status = made < 0 ? -1 : meet(nodes, child.node);
    }
    Py_XDECREF(children);
    if (part && !status) {
        status = hang(node, 0, (PyObject *)part);
        p->expected++;
    }
    Py_XDECREF((PyObject *)part);
    return status;
}
static int arm_several(Fast *f, Call *c, const Roots *roots, const Edges *e) {
    Pass *p = new_pass(f, c);
    if (!p) return -1;
    GONE(several_nodes);
    Nodes nodes;
    nodes.list = nodes.few;
    nodes.count = 0;
    nodes.room = FEW_NODES;
    nodes.met = (Table){0};
    int failed = arm_roots(f, p, roots->list, roots->count, &nodes);
    for (size_t i = 0; !failed && e->count && i < nodes.count; i++)
        failed = arm_node(f, p, nodes.list[i], roots->sequence, e, &nodes);
    if (!failed) pass_reset(p);
    drop_nodes(&nodes);
    Py_DECREF((PyObject *)p);
    return failed;
}
/* A call that returned its input: the gradient of both is what arrives at the node that made it. */
static int arm_passed(Fast *f, const Call *c, const Root *root) {
    Pass *p = new_pass(f, c);
    Part *part = p ? new_part(p, root->outputs, root->output) : NULL;
    int status = -1;
    if (part) {
        GONE(older_nodes);
        part->passed = p->expected = p->left = 1;
        status = hang(root->node, 1, (PyObject *)part);
    }
    Py_XDECREF((PyObject *)part);
    Py_XDECREF((PyObject *)p);
    return status;
}
static int arm_slowly(Fast *f, Call *c, int64_t sequence, Edges *e, PyObject *args,
    PyObject *kwargs, PyObject *result) {
    PyObject *number = PyLong_FromLongLong(sequence),
             *named = kwargs ? Py_NewRef(kwargs) : PyDict_New();
    PyObject *table = e ? edges_table(e) : Py_NewRef(Py_None), *done = NULL;
    if (number && table && named)
        done = PyObject_CallMethodObjArgs(f->given[BACKWARD], word[ARM_SLOWLY], (PyObject *)c,
            number, table, args, named, result, NULL);
    Py_XDECREF(number);
    Py_XDECREF(named);
    Py_XDECREF(table);
    Py_XDECREF(done);
    return done ? 0 : -1;
}
static int arm_made(
    Fast *f, Call *c, const Roots *roots, Edges *e, PyObject *args, PyObject *kwargs) {
    Edges own = {.are_known = 0};
    if (!e && find_edges(f, &own, args, kwargs, 0)) return -1;
    if (!e) e = &own;
    /* Held until the end: a child that is asked for again is the same object then. */
    PyObject *children = GET(roots->list->node, NEXT_FUNCTIONS);
    int status = children ? 1 : -1;
    if (children && roots->count == 1)
        status = arm_single(f, c, roots->sequence, roots->list, e, children);
    if (status == 1) status = arm_several(f, c, roots, e);
    Py_XDECREF(children);
    if (own.are_known) drop_edges(&own);
    return status;
}
/* Hooks the nodes that a finished call created, if it created any. Edges that were not found
 * before are found here. */
int arm(Fast *f, Call *c, int64_t sequence, Edges *e, PyObject *args, PyObject *kwargs,
    PyObject *result) {
    if (f->node_order && PyUnicode_CompareWithASCIIString(c->kind, "Module"))
        return arm_slowly(
            f, c, sequence, e, args, kwargs, result); /* whose order is Python's to find */
    Roots roots;
    roots.list = roots.few;
    roots.count = 0;
    roots.room = FEW_ROOTS;
    roots.sequence = sequence;
    roots.older = 0;
    int status = 0;
    if (is_tensor(f, result))
        status = add_root(f, &roots, result, NULL);
    else if (!is_plain(f, result))
        status = visit_leaves(f, result, f->nowhere, add_root_leaf, &roots);
    if (!status && roots.count && !roots.older) status = arm_made(f, c, &roots, e, args, kwargs);
    for (size_t i = 0; !status && roots.older && i < roots.count; i++)
        status = arm_passed(f, c, roots.list + i);
    drop_roots(&roots);
    if (roots.list != roots.few) free(roots.list);
    return status;
}

/* --- what Python calls ----------------------------------------------------------------------- */

PyObject *fast_edges(Fast *f, PyObject *args) {
    PyObject *values, *named;
    int peek;
    if (!PyArg_ParseTuple(args, "O!O!p", &PyTuple_Type, &values, &PyDict_Type, &named, &peek))
        return NULL;
    return new_edges(f, values, named, peek);
}
PyObject *fast_arm(Fast *f, PyObject *args) {
    PyObject *call, *edges, *values, *named, *result;
    long long sequence;
    if (!PyArg_ParseTuple(args, "O!LOO!O!O", call_type, &call, &sequence, &edges, &PyTuple_Type,
            &values, &PyDict_Type, &named, &result))
        return NULL;
    if (arm(f, (Call *)call, sequence, edges_in(edges), values, named, result)) return NULL;
    Py_RETURN_NONE;
}
