/* What Python calls: the same functions for taps that are written in Python, and what they work
 * with. */
#include "capture.h"
#include <structmember.h>

static const char *const given_names[GIVEN] = {
    "recorder",
    "gate",
    "measurer",
    "stacks",
    "selection",
    "frames",
    "tensor",
    "parameter",
    "roles",
    "phases",
    "tracing",
    "grad_enabled",
    "sequence",
    "in_backward",
    "no_functions",
    "transform",
    "dumps",
    "rewritten",
    "unwritten",
    "wrapped",
    "measure",
    "others",
    "accumulator",
    "table",
    "enter_plainly",
    "meant",
    "free",
    "own",
    "added",
    "excluded",
    "inference",
    "resizable",
    "backward",
    "names",
    "apis",
    "modes",
};
static PyObject *fast_give(Fast *f, PyObject *args, PyObject *kwargs) {
    PyObject *key, *value;
    Py_ssize_t at = 0;
    struct {
        const char *name;
        char *flag;
    } flags[] = {{"reuse", &f->reuse}, {"on_module", &f->on_module}, {"all_free", &f->all_free},
        {"forward", &f->forward}, {"backward_wanted", &f->backward}, {"node_order", &f->node_order},
        {"untracked", &f->untracked}, {"follows_backward", &f->follows_backward}};
    while (kwargs && PyDict_Next(kwargs, &at, &key, &value)) {
        int found = 0;
        for (int i = 0; !found && i < GIVEN; i++)
            if (!PyUnicode_CompareWithASCIIString(key, given_names[i]))
                set_ref(&f->given[i], Py_NewRef(value)), found = 1;
        for (size_t i = 0; !found && i < sizeof flags / sizeof *flags; i++)
            if (!PyUnicode_CompareWithASCIIString(key, flags[i].name))
                *flags[i].flag = (char)PyObject_IsTrue(value), found = 1;
        if (!found && !PyUnicode_CompareWithASCIIString(key, "role_bits"))
            f->roles = (unsigned)PyLong_AsUnsignedLong(value), found = 1;
        if (!found && !PyUnicode_CompareWithASCIIString(key, "measure_flags"))
            f->measure_flags = PyLong_AsLong(value), found = 1;
        if (!found) return PyErr_Format(PyExc_TypeError, "%U is not known", key);
    }
    PyObject *gate = f->given[GATE];
    f->gate = Py_TYPE(gate) == gate_type ? (struct Gate *)gate : NULL;
    if (gate != Py_None && !f->gate)
        return PyErr_SetString(PyExc_TypeError, "not a gate of ours"), NULL;
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}
static int fast_init(Fast *f, PyObject *args, PyObject *kwargs) {
    PyObject **dicts[] = {&f->opaque, &f->plain, &f->json, &f->named_index, &f->metas_index,
        &f->layouts, f->slot_index, f->slot_index + 1, f->slot_index + 2, f->scalars,
        f->scalars + 1, f->scalars + 2, f->scalars + 3, f->scalars + 4, f->scalars + 5,
        f->scalars + 6};
    for (size_t i = 0; i < sizeof dicts / sizeof *dicts; i++)
        if (!(*dicts[i] = PyDict_New())) return -1;
    static long long made;
    if (!(f->key = PyUnicode_FromFormat("ulpscope %lld", ++made)) ||
        !(f->nowhere = PyTuple_New(0)) ||
        !(f->nones = PyTuple_Pack(3, Py_None, Py_None, Py_None)) || !(f->kept = PyList_New(0)) ||
        grow(&f->chains, &f->chain_room, 1, sizeof *f->chains))
        return -1;
    f->chains[0] = (Chain){NULL, 0}, f->chain_count = 1;
    memset(f->places, 0xFF, sizeof f->places);
    f->sweep_at = 10000, f->roles = 7;
    for (int i = 0; i < GIVEN; i++) f->given[i] = Py_NewRef(Py_None);
    PyObject *done = fast_give(f, args, kwargs);
    Py_XDECREF(done);
    return done ? 0 : -1;
}
static PyObject *fast_begin_step(Fast *f, PyObject *anew) {
    forget_step(f, anew == Py_True);
    return PyLong_FromUnsignedLong(f->epoch);
}
static PyObject *fast_forget(Fast *f, PyObject *none) {
    forget_values(f);
    Py_RETURN_NONE;
}
static PyObject *fast_release(Fast *f, PyObject *value) {
    release_value(f, value);
    Py_RETURN_NONE;
}
static PyObject *fast_distrust(Fast *f, PyObject *memory) {
    uint64_t place = PyLong_AsUnsignedLongLongMask(memory);
    if (PyErr_Occurred() || (place && table_put(&f->distrusted, place, 0, 0, 1))) return NULL;
    Py_RETURN_NONE;
}
static PyObject *fast_text(Fast *f, PyObject *json) {
    int64_t number = text_number(f, json_entry(f, json));
    return number < 0 ? NULL : PyLong_FromLongLong(number);
}
static PyObject *fast_row(Fast *f, PyObject *args) {
    PyObject *value;
    int produced = 0;
    uint32_t row[3];
    f->transform = -1;
    if (!PyArg_ParseTuple(args, "O|p", &value, &produced) || value_row(f, value, produced, row))
        return NULL;
    return Py_BuildValue("III", row[0], row[1], row[2]);
}
static PyObject *fast_state(Fast *f, PyObject *none) {
    return Py_XNewRef((PyObject *)state_here(f));
}
static PyObject *fast_enter(Fast *f, PyObject *state) {
    int entered = enter(f, (State *)state);
    if (entered > 0) ((State *)state)->in_c = f->in_c = 0; /* what follows is Python */
    return entered < 0 ? NULL : PyBool_FromLong(entered);
}
static PyObject *fast_leave(Fast *f, PyObject *state) {
    leave(f, (State *)state);
    Py_RETURN_NONE;
}
static PyObject *fast_open_call(Fast *f, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"state", "kind", "name", "frame", "phase", NULL};
    PyObject *state, *kind, *name, *frame, *phase = NULL;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!UUO|O", names, state_type, &state, &kind, &name, &frame, &phase))
        return NULL;
    int number = phase ? phase_of(f, phase) : 0;
    if (number < 0) return PyErr_SetString(PyExc_ValueError, "not a phase"), NULL;
    return (PyObject *)open_call(
        f, (State *)state, kind, name, frame == Py_None ? NULL : frame, number, 1);
}
static PyObject *fast_open_backward(Fast *f, PyObject *args) {
    PyObject *state, *forward, *kind, *name, *module;
    long long again, facts[6] = {0, 0, 0, 0, 0, -1};
    if (!PyArg_ParseTuple(args, "O!O!L", state_type, &state, &PyTuple_Type, &forward, &again) ||
        !PyArg_ParseTuple(forward, "UULLLLUL", &kind, &name, facts, facts + 1, facts + 2, facts + 3,
            &module, facts + 4))
        return NULL;
    return (PyObject *)open_backward(f, (State *)state, kind, name, facts, module, again);
}
static PyObject *fast_show(Fast *f, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"call", "role", "path", "value", "unread", "produced", NULL};
    PyObject *call, *role, *path, *value, *unread = Py_None;
    int produced = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OO!O|Op", names, call_type, &call, &role,
            &PyTuple_Type, &path, &value, &unread, &produced))
        return NULL;
    int number = role_of(f, role);
    if (number < 0) return PyErr_SetString(PyExc_ValueError, "not a role"), NULL;
    if (show(f, (Call *)call, number, path, 0, value, unread == Py_None ? NULL : unread, produced))
        return NULL;
    Py_RETURN_NONE;
}
static PyObject *fast_close_call(Fast *f, PyObject *call) {
    if (Py_TYPE(call) != call_type) return PyErr_SetString(PyExc_TypeError, "not a call"), NULL;
    if (close_call(f, (Call *)call)) return NULL;
    Py_RETURN_NONE;
}
static int fast_traverse(Fast *f, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(f));
    for (int i = 0; i < GIVEN; i++) Py_VISIT(f->given[i]);
    Py_VISIT(f->before_first);
    Py_VISIT(f->ignored);
    for (size_t i = 0; i < f->meta_count; i++) Py_VISIT(f->metas[i].python);
    Py_VISIT(f->metas_index);
    return 0;
}
static int fast_clear(Fast *f) {
    Py_CLEAR(f->before_first);
    Py_CLEAR(f->ignored);
    Py_CLEAR(f->queued);
    f->gate = NULL;
    drop_passes(f);
    drop_anchors(f);
    for (int i = 0; i < GIVEN; i++) Py_CLEAR(f->given[i]);
    drop_metas(f);
    Py_CLEAR(f->metas_index);
    return 0;
}
static void fast_dealloc(Fast *f) {
    PyTypeObject *type = Py_TYPE(f);
    PyObject_GC_UnTrack(f);
    PyObject *kind, *error, *trace, *all = PyThreadState_GetDict();
    PyErr_Fetch(&kind, &error, &trace);
    if (f->key && all && PyDict_DelItem(all, f->key)) PyErr_Clear();
    PyErr_Restore(kind, error, trace);
    Py_CLEAR(f->key);
    forget_values(f);
    fast_clear(f);
    drop_apis(f);
    Table *tables[] = {&f->seen_at, &f->known, &f->links, &f->stacks, &f->marked, &f->codes,
        &f->sites, &f->shapes, &f->names_met, &f->texts_met, &f->slots_met, &f->scalars_met,
        &f->distrusted};
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) table_empty(tables[i]);
    for (size_t i = 0; i < f->entry_count; i++) Py_XDECREF(f->entries[i].json);
    for (size_t i = 0; i < f->chain_count; i++) Py_XDECREF(f->chains[i].json);
    free(f->entries), free(f->named), free(f->chains), free(f->metas), free(f->seen);
    Py_XDECREF(f->opaque), Py_XDECREF(f->plain), Py_XDECREF(f->json), Py_XDECREF(f->named_index),
        Py_XDECREF(f->layouts), Py_XDECREF(f->kept), Py_XDECREF(f->nowhere), Py_XDECREF(f->nones);
    for (int i = 0; i < ROLES; i++) Py_XDECREF(f->slot_index[i]);
    for (int i = 0; i < 7; i++) Py_XDECREF(f->scalars[i]);
    PyObject_GC_Del(f);
    Py_DECREF(type);
}
#define KEYWORDS METH_VARARGS | METH_KEYWORDS
static PyMethodDef fast_methods[] = {
    {"give", (PyCFunction)(void (*)(void))fast_give, KEYWORDS, "Sets what it works with."},
    {"begin_step", (PyCFunction)fast_begin_step, METH_O,
        "Fresh numbers for a new dump, and counters if they begin anew; its epoch."},
    {"forget_values", (PyCFunction)fast_forget, METH_NOARGS, "Trusts nothing that was measured."},
    {"release", (PyCFunction)fast_release, METH_O, "Lets go of a tensor."},
    {"distrust", (PyCFunction)fast_distrust, METH_O, "Measures memory each time."},
    {"text", (PyCFunction)fast_text, METH_O, "The number of a JSON text."},
    {"row", (PyCFunction)fast_row, METH_VARARGS, "The numbers of a value."},
    {"state", (PyCFunction)fast_state, METH_NOARGS, "What this thread is doing."},
    {"enter", (PyCFunction)fast_enter, METH_O, "Begins our own code on a thread."},
    {"leave", (PyCFunction)fast_leave, METH_O, "Ends it."},
    {"open_call", (PyCFunction)(void (*)(void))fast_open_call, KEYWORDS, "Begins a call."},
    {"open_backward", (PyCFunction)fast_open_backward, METH_VARARGS,
        "Begins the backward of a call."},
    {"show", (PyCFunction)(void (*)(void))fast_show, KEYWORDS, "Adds a value to a call."},
    {"close_call", (PyCFunction)fast_close_call, METH_O, "Stores a call."},
    {"hook", (PyCFunction)fast_hook, METH_VARARGS, "The hook of a call that is one node."},
    {"edges", (PyCFunction)fast_edges, METH_VARARGS, "Which autograd edge each argument is."},
    {"arm", (PyCFunction)fast_arm, METH_VARARGS, "Hooks the nodes that a finished call created."},
    {"enter_hook", (PyCFunction)fast_enter_hook, METH_VARARGS,
        "Puts a hook into the table of a node."},
    {"finish_pass", (PyCFunction)fast_finish_pass, METH_O,
        "Closes what is still open, of one thread or of all."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef fast_members[] = {{"in_c", T_BOOL, offsetof(Fast, in_c), READONLY, NULL},
    {"active", T_BOOL, offsetof(Fast, active), 0, NULL},
    {"quiet", T_BOOL, offsetof(Fast, quiet), 0, NULL},
    {"before_first", T_OBJECT, offsetof(Fast, before_first), 0, NULL},
    {"ignored", T_OBJECT, offsetof(Fast, ignored), 0, NULL}, {NULL, 0, 0, 0, NULL}};
static PyType_Slot fast_slots[] = {{Py_tp_members, fast_members}, {Py_tp_init, fast_init},
    {Py_tp_dealloc, fast_dealloc}, {Py_tp_traverse, fast_traverse}, {Py_tp_clear, fast_clear},
    {Py_tp_methods, fast_methods}, {0, NULL}};
PyType_Spec fast_spec = {"ulpscope.native._taps.Fast", sizeof(Fast), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, fast_slots};
