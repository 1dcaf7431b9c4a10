/* Calls of modules, and gradients of parameters, in the ordinary case: a module inside another on a
 * thread that is known. module_tap.py has the whole of it and takes every other case. */
#include "capture.h"

enum { STRETCH = 16 }; /* recursion.py */

/* --- gradients of parameters
 * ------------------------------------------------------------------------------------- */

/* Hears of each gradient that was accumulated; the tables are those of ParameterGradients. */
typedef struct {
    PyObject_HEAD Fast *fast;
    PyObject *watched, *owners, *open, *sizes, *kind;
} Arrival;

/* As torch has them: a plain dictionary cannot be referred to weakly. */
static PyObject *new_hooks(void) {
    static PyObject *class;
    if (!class) {
        PyObject *collections = PyImport_ImportModule("collections");
        class = collections ? PyObject_GetAttrString(collections, "OrderedDict") : NULL;
        Py_XDECREF(collections);
    }
    return class ? PyObject_CallNoArgs(class) : NULL;
}
/* As ParameterGradients has it. */
static int watch_parameter(Arrival *v, PyObject *owner, PyObject *name, PyObject *value) {
    int wanted = wants_grad(v->fast, value);
    if (wanted > 0) wanted = truth_of(GET(value, IS_LEAF));
    if (wanted <= 0) return wanted;
    PyObject *key = PyLong_FromVoidPtr(value), *hooks = key ? GET(value, ACCUMULATED_HOOKS) : NULL,
             *made = NULL, *pair = NULL;
    int failed = !hooks;
    if (!failed && !PyDict_GetItemWithError(v->watched, key)) {
        made =
            PyErr_Occurred() ? NULL : PyTuple_Pack(2, value, hooks == Py_None ? Py_True : Py_False);
        failed = !made || PyDict_SetItem(v->watched, key, made);
        Py_CLEAR(made);
    }
    int there = failed || hooks == Py_None ? 0 : PySequence_Contains(hooks, (PyObject *)v);
    if (!failed && there < 1) {
        PyObject *table = there ? NULL : hooks == Py_None ? new_hooks() : Py_NewRef(hooks);
        failed = !table || PyObject_SetItem(table, (PyObject *)v, (PyObject *)v) ||
                 (hooks == Py_None && PyObject_SetAttr(value, word[ACCUMULATED_HOOKS], table));
        Py_XDECREF(table);
    }
    PyObject *owners = failed ? NULL : PyDict_GetItemWithError(v->owners, key);
    if (!failed && !owners) {
        made = PyErr_Occurred() ? NULL : PyList_New(0);
        failed = !made || PyDict_SetItem(v->owners, key, made);
        owners = made;
    }
    pair = failed ? NULL : PyTuple_Pack(2, owner, name);
    int known = pair ? PySequence_Contains(owners, pair) : -1;
    if (!known) {
        PyObject *size = PyDict_GetItemWithError(v->sizes, owner),
                 *more = PyLong_FromSsize_t(size ? PyLong_AsSsize_t(size) + 1 : 1);
        failed = !more || PyErr_Occurred() || PyList_Append(owners, pair) ||
                 PyDict_SetItem(v->sizes, owner, more);
        Py_XDECREF(more);
    }
    Py_XDECREF(key), Py_XDECREF(hooks), Py_XDECREF(made), Py_XDECREF(pair);
    return failed || known < 0 ? -1 : 0;
}

/* --- calls of modules
 * -------------------------------------------------------------------------------------------- */

/* What a module is called. */
typedef struct {
    PyObject *weak, *path, *full;
} Known;
typedef struct {
    PyObject_HEAD Fast *fast;
    PyObject *tap, *kind, *module_class, *fx_traces;
    Arrival *arrival; /* NULL where gradients of parameters are not wanted */
    char records;
    Known *list;
    size_t count, room;
    Table known;
} Around;

static PyObject *class_name(PyObject *module) {
    PyObject *name = GET((PyObject *)Py_TYPE(module), TYPE_NAME),
             *text = name ? PyObject_Str(name) : NULL;
    Py_XDECREF(name);
    return text;
}
static const Known *known_as(Around *a, PyObject *module, PyObject *above) {
    PyTypeObject *type = Py_TYPE(module);
    uint64_t *at = table_find(&a->known, (uint64_t)module, (uint64_t)type, 0);
    if (at && PyWeakref_GetObject(a->list[*at].weak) == module)
        return GONE(known_modules), a->list + *at;
    PyObject *names = GET(a->tap, NAMES_OF), *path = NULL, *full = NULL,
             *weak = PyWeakref_NewRef(module, NULL);
    if (names && weak) path = PyObject_CallMethodObjArgs(names, word[OF], module, above, NULL);
    PyObject *name = path ? class_name(module) : NULL;
    if (name)
        full =
            PyUnicode_GetLength(path) ? PyUnicode_FromFormat("%U.%U", path, name) : Py_NewRef(name);
    Py_XDECREF(names), Py_XDECREF(name);
    size_t place = at ? *at : a->count;
    if (!full || (!at && (grow(&a->list, &a->room, place + 1, sizeof *a->list) ||
                             table_put(&a->known, (uint64_t)module, (uint64_t)type, 0, place)))) {
        Py_XDECREF(weak), Py_XDECREF(path), Py_XDECREF(full);
        return NULL;
    }
    Known *known = a->list + place;
    if (at)
        Py_DECREF(known->weak), Py_DECREF(known->path), Py_DECREF(known->full);
    else
        a->count++;
    *known = (Known){weak, path, full};
    return known;
}

/* 1: done here; 0: the call is none of ours; 2: by Python; -1 after an error. */
static int is_usual(Around *a, State *s, PyObject *module) {
    Fast *f = a->fast;
    int tracing = traces(f);
    if (tracing) return tracing < 0 ? -1 : 0;
    if ((tracing = truth_of(PyObject_CallNoArgs(a->fx_traces)))) return tracing < 0 ? -1 : 0;
    if (s->compiled || (s->busy && s->in_c))
        return 0; /* a finalizer that runs inside our own code */
    int is_module = PyObject_IsInstance(module, a->module_class);
    if (is_module <= 0) return is_module;
    Py_ssize_t depth = PyList_Size(s->object[MODULES]);
    PyObject *mode = s->object[MODE], *alone;
    if (s->busy || !mode || mode == Py_None || depth % STRETCH == 0)
        return 2; /* also the outermost */
    if (!(alone = GET(a->tap, ALONE))) return -1;
    Py_DECREF(alone);
    return alone == Py_None ? 1 : 2;
}

static int show_parameters(Around *a, Call *c, PyObject *module) {
    PyObject *all = GET(module, OWN_PARAMETERS), *items;
    if (!all) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        return PyErr_Clear(), 0; /* __init__ of nn.Module never ran */
    }
    items = PyObject_Size(all) ? PyMapping_Items(all) : NULL;
    Py_DECREF(all);
    int failed = !items && PyErr_Occurred();
    for (Py_ssize_t at = 0, size = items ? PyList_Size(items) : 0; !failed && at < size; at++) {
        PyObject *pair = PyList_GetItem(items, at), *key = PyTuple_GetItem(pair, 0);
        PyObject *value = key ? PyTuple_GetItem(pair, 1) : NULL;
        if (!value)
            failed = 1;
        else if (value != Py_None)
            failed = show_named(a->fast, c, PARAMETERS, key, value) ||
                     (a->arrival && watch_parameter(a->arrival, c->name, key, value));
    }
    Py_XDECREF(items);
    return failed;
}

typedef struct {
    Call *call;
    Edges edges;
    PyObject *rest; /* the arguments without the module */
    int64_t sequence;
    int follow;
} Begun;
static int begin(
    Around *a, State *s, PyObject *frame, PyObject *args, PyObject *kwargs, Begun *begun) {
    Fast *f = a->fast;
    PyObject *module = PyTuple_GetItem(args, 0), *modules = s->object[MODULES];
    PyObject *above = PyTuple_GetItem(PyList_GetItem(modules, PyList_Size(modules) - 1), 0);
    const Known *known = known_as(a, module, above);
    if (!known || !(begun->rest = PyTuple_GetSlice(args, 1, PyTuple_Size(args)))) return -1;
    PyObject *path = Py_NewRef(known->path), *key, *value;
    Call *c = begun->call = open_call(f, s, a->kind, known->full, frame, 0, 1);
    int failed = !c;
    if (c) c->wanted = c->wanted && a->records;
    if (c && c->wanted) {
        for (Py_ssize_t at = 0; !failed && at < PyTuple_Size(begun->rest); at++)
            failed = show(f, c, INPUT, NULL, at, PyTuple_GetItem(begun->rest, at), NULL, 0);
        for (Py_ssize_t at = 0; !failed && PyDict_Next(kwargs, &at, &key, &value);)
            failed = show_named(f, c, INPUT, key, value);
        failed = failed || show_parameters(a, c, module);
        if (!failed && a->arrival &&
            !PyUnicode_CheckExact(path)) { /* a graph: nobody calls the modules it is made of */
            PyObject *done = PyObject_CallMethodObjArgs(a->tap, word[WATCH_BELOW], path, NULL);
            failed = !done;
            Py_XDECREF(done);
        }
    }
    if (!failed && a->records) {
        begun->follow = follows(f, c);
        failed = begun->follow < 0 ||
                 (begun->follow && find_edges(f, &begun->edges, begun->rest, kwargs, 1));
    }
    if (!failed) {
        PyObject *stack = PyLong_FromLongLong(c->stack);
        PyObject *entry =
            stack ? PyTuple_Pack(4, path, c->wanted ? (PyObject *)c : Py_None, frame, stack) : NULL;
        failed = !entry || PyList_Append(modules, entry);
        Py_XDECREF(stack), Py_XDECREF(entry);
        if (!failed) begun->sequence = sequence_now(f);
    }
    Py_DECREF(path);
    return failed || PyErr_Occurred() ? -1 : 0;
}
/* Takes a call off the stack, and whatever was left above it by something that never ended. */
static void unwind(PyObject *list, PyObject *from) {
    Py_ssize_t size = PyList_Size(list), at = size;
    while (at > 0 && PyList_GetItem(list, at - 1) != from) at--;
    if (at > 0 && PyList_SetSlice(list, at - 1, size, NULL)) PyErr_Clear();
}
/* The hook border, of a module. */
static int border_of(Around *a, PyObject *module) {
    Raised r = take_raised();
    PyObject *name = class_name(module);
    if (!name) return drop_raised(&r), -1;
    PyErr_Restore(r.kind, r.error, r.trace);
    int failed = border(a->fast, a->kind, name, 0);
    Py_DECREF(name);
    return failed;
}
static PyObject *run_module(
    Around *a, State *s, PyObject *original, PyObject *args, PyObject *kwargs) {
    Fast *f = a->fast;
    PyObject *frame = (PyObject *)PyEval_GetFrame(), *result = NULL, *kind, *error, *trace;
    Py_ssize_t depth = PyList_Size(s->object[MODULES]);
    Begun begun = {0};
    if (enter(f, s) < 0) return NULL;
    GONE(modules);
    int quiet = !unheard(f, s), failed = !quiet || begin(a, s, frame, args, kwargs, &begun);
    if (quiet) heard_again(f, s);
    if (failed) begun.follow = 0, failed = border_of(a, PyTuple_GetItem(args, 0));
    leave(f, s);
    Call *c = begun.call;
    if (!failed && c && c->wanted) failed = PyList_Append(s->object[CALLS], (PyObject *)c);
    if (!failed) result = PyObject_Call(original, args, kwargs);
    PyErr_Fetch(&kind, &error, &trace);
    if (PyList_SetSlice(s->object[MODULES], depth, PyList_Size(s->object[MODULES]), NULL))
        PyErr_Clear();
    if (c && c->wanted) unwind(s->object[CALLS], (PyObject *)c);
    PyErr_Restore(kind, error, trace);
    if (c && !failed && !result) close_raised(f, c);
    if (result && c && (c->wanted || begun.follow)) {
        int entered = enter(f, s);
        quiet = entered >= 0 && !unheard(f, s);
        failed = !quiet;
        if (!failed && c->wanted)
            failed = show(f, c, OUTPUT, f->nowhere, 0, result, NULL, 0) || close_call(f, c);
        if (!failed && begun.follow)
            failed = arm(f, c, begun.sequence, &begun.edges, begun.rest, kwargs, result);
        if (quiet) heard_again(f, s);
        if (failed && border_of(a, PyTuple_GetItem(args, 0))) Py_CLEAR(result);
        if (entered > 0) leave(f, s);
    }
    if (begun.edges.are_known) drop_edges(&begun.edges);
    Py_XDECREF((PyObject *)c), Py_XDECREF(begun.rest);
    return result;
}
static PyObject *around_call(Around *a, PyObject *all, PyObject *none) {
    PyObject *original = PyTuple_GetItem(all, 0), *args = original ? tuple_at(all, 1) : NULL;
    PyObject *kwargs = args ? PyTuple_GetItem(all, 2) : NULL;
    if (!kwargs) return NULL;
    if (!PyDict_Check(kwargs)) return PyErr_SetString(PyExc_TypeError, "not a dictionary"), NULL;
    int usual = a->fast->active;
    State *s = usual ? state_here(a->fast) : NULL;
    if (usual) usual = !s ? -1 : PyTuple_Size(args) ? is_usual(a, s, PyTuple_GetItem(args, 0)) : 0;
    if (usual < 0 && border_of(a, PyTuple_Size(args) ? PyTuple_GetItem(args, 0) : Py_None))
        return NULL;
    if (usual < 0) usual = 0; /* it runs unrecorded */
    if (!usual) return PyObject_Call(original, args, kwargs);
    if (usual == 2)
        return PyObject_CallMethodObjArgs(a->tap, word[AROUND], original, args, kwargs, NULL);
    Py_INCREF(s);
    PyObject *result = run_module(a, s, original, args, kwargs);
    Py_DECREF(s);
    return result;
}

static int around_init(Around *a, PyObject *args, PyObject *kwargs) {
    PyObject *fast, *tap, *kind, *class, *traces, *arrival;
    int records;
    if (!PyArg_ParseTuple(args, "OOUOOOp", &fast, &tap, &kind, &class, &traces, &arrival, &records))
        return -1;
    a->fast = (Fast *)Py_NewRef(fast), a->tap = Py_NewRef(tap), a->kind = Py_NewRef(kind);
    a->module_class = Py_NewRef(class), a->fx_traces = Py_NewRef(traces),
    a->records = (char)records;
    a->arrival = arrival == Py_None ? NULL : (Arrival *)Py_NewRef(arrival);
    return 0;
}
static int around_traverse(Around *a, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(a));
    Py_VISIT(a->fast);
    Py_VISIT(a->tap);
    Py_VISIT(a->arrival);
    return 0;
}
static int around_clear(Around *a) {
    Py_CLEAR(a->fast);
    Py_CLEAR(a->tap);
    Py_CLEAR(a->arrival);
    return 0;
}
static void around_dealloc(Around *a) {
    PyTypeObject *type = Py_TYPE(a);
    PyObject_GC_UnTrack(a);
    around_clear(a);
    for (size_t i = 0; i < a->count; i++)
        Py_DECREF(a->list[i].weak), Py_DECREF(a->list[i].path), Py_DECREF(a->list[i].full);
    free(a->list);
    table_empty(&a->known);
    Py_XDECREF(a->kind), Py_XDECREF(a->module_class), Py_XDECREF(a->fx_traces);
    PyObject_GC_Del(a);
    Py_DECREF(type);
}
static PyType_Slot around_slots[] = {{Py_tp_init, around_init}, {Py_tp_call, around_call},
    {Py_tp_dealloc, around_dealloc}, {Py_tp_traverse, around_traverse}, {Py_tp_clear, around_clear},
    {0, NULL}};
PyType_Spec around_spec = {"ulpscope.native._taps.Around", sizeof(Around), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, around_slots};

static int arrived_at(Arrival *v, State *s, PyObject *owner, PyObject *key, PyObject *grad) {
    Fast *f = v->fast;
    PyObject *found = PyDict_GetItemWithError(v->open, owner), *seen = NULL;
    Call *opened = NULL;
    int failed = 0;
    if (found) {
        opened = (Call *)Py_NewRef(PyTuple_GetItem(found, 0)),
        seen = Py_NewRef(PyTuple_GetItem(found, 1));
        if (PySet_Contains(seen, key) == 1) {
            failed = close_call(f, opened);
            Py_CLEAR(opened);
            Py_CLEAR(seen);
        }
    }
    if (!opened && !failed) {
        opened = open_call(f, s, v->kind, owner, NULL, 2, 0);
        seen = opened ? PySet_New(NULL) : NULL;
        PyObject *pair = opened && seen ? PyTuple_Pack(2, (PyObject *)opened, seen) : NULL;
        failed = !pair || PyDict_SetItem(v->open, owner, pair);
        Py_XDECREF(pair);
    }
    failed = failed || PySet_Add(seen, key);
    if (!failed && opened->wanted) failed = show_named(f, opened, PARAMETERS, key, grad);
    if (!failed) {
        PyObject *size = PyDict_GetItemWithError(v->sizes, owner);
        if (PySet_Size(seen) >= (size ? PyLong_AsSsize_t(size) : 0))
            failed = close_call(f, opened) || PyDict_DelItem(v->open, owner);
    }
    Py_XDECREF((PyObject *)opened), Py_XDECREF(seen);
    return failed ? -1 : 0;
}
static PyObject *arrival_call(Arrival *v, PyObject *args, PyObject *none) {
    PyObject *value = PyTuple_GetItem(args, 0);
    Fast *f = v->fast;
    if (!value) return NULL;
    State *s = f->active ? state_here(f) : NULL;
    int entered = !f->active ? 0 : s ? enter(f, s) : -1;
    if (entered < 0) return NULL;
    if (!entered) Py_RETURN_NONE;
    GONE(arrivals);
    int quiet = !unheard(f, s);
    PyObject *key = quiet ? PyLong_FromVoidPtr(value) : NULL, *grad = key ? GET(value, GRAD) : NULL;
    PyObject *owners = grad ? PyDict_GetItemWithError(v->owners, key) : NULL,
             *all = owners ? PySequence_Tuple(owners) : NULL;
    int failed = !grad || PyErr_Occurred();
    for (Py_ssize_t at = 0, size = all ? PyTuple_Size(all) : 0; !failed && at < size; at++) {
        PyObject *pair = PyTuple_GetItem(all, at);
        failed = arrived_at(v, s, PyTuple_GetItem(pair, 0), PyTuple_GetItem(pair, 1), grad);
    }
    Py_XDECREF(key), Py_XDECREF(grad), Py_XDECREF(all);
    if (quiet) heard_again(f, s);
    if (failed) {
        PyObject *what = PyUnicode_FromString("gradients");
        failed = !what || border(f, v->kind, what, 0);
        Py_XDECREF(what);
    }
    leave(f, s);
    if (failed) return NULL;
    Py_RETURN_NONE;
}
/* Takes our hook off every parameter: `release`, of all of them. */
static PyObject *arrival_leave(Arrival *v, PyObject *none) {
    PyObject *all = PyDict_Values(v->watched), *value, *was_none;
    int failed = !all;
    for (Py_ssize_t at = 0, size = all ? PyList_Size(all) : 0; !failed && at < size; at++) {
        if (!PyArg_ParseTuple(PyList_GetItem(all, at), "OO", &value, &was_none))
            return Py_DECREF(all), NULL;
        PyObject *hooks = GET(value, ACCUMULATED_HOOKS);
        failed = !hooks;
        if (hooks && hooks != Py_None) {
            int there = PySequence_Contains(hooks, (PyObject *)v);
            failed = there < 0 || (there && PyObject_DelItem(hooks, (PyObject *)v)) ||
                     (was_none == Py_True && !PyObject_Size(hooks) &&
                         PyObject_SetAttr(value, word[ACCUMULATED_HOOKS], Py_None));
        }
        Py_XDECREF(hooks);
    }
    Py_XDECREF(all);
    if (failed) return NULL;
    PyDict_Clear(v->watched);
    Py_RETURN_NONE;
}
static PyMethodDef arrival_methods[] = {
    {"leave", (PyCFunction)arrival_leave, METH_NOARGS, "Takes it off every parameter."},
    {NULL, NULL, 0, NULL}};
static int arrival_init(Arrival *v, PyObject *args, PyObject *kwargs) {
    PyObject *fast, *watched, *owners, *open, *sizes, *kind;
    if (!PyArg_ParseTuple(args, "OO!O!O!O!U", &fast, &PyDict_Type, &watched, &PyDict_Type, &owners,
            &PyDict_Type, &open, &PyDict_Type, &sizes, &kind))
        return -1;
    v->watched = Py_NewRef(watched);
    v->fast = (Fast *)Py_NewRef(fast), v->owners = Py_NewRef(owners), v->open = Py_NewRef(open);
    v->sizes = Py_NewRef(sizes), v->kind = Py_NewRef(kind);
    return 0;
}
static int arrival_traverse(Arrival *v, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(v));
    Py_VISIT(v->fast);
    Py_VISIT(v->watched);
    Py_VISIT(v->owners);
    Py_VISIT(v->open);
    return 0;
}
static int arrival_clear(Arrival *v) {
    Py_CLEAR(v->fast);
    Py_CLEAR(v->watched);
    Py_CLEAR(v->owners);
    Py_CLEAR(v->open);
    return 0;
}
static void arrival_dealloc(Arrival *v) {
    PyTypeObject *type = Py_TYPE(v);
    PyObject_GC_UnTrack(v);
    arrival_clear(v);
    Py_XDECREF(v->sizes), Py_XDECREF(v->kind);
    PyObject_GC_Del(v);
    Py_DECREF(type);
}
static PyType_Slot arrival_slots[] = {{Py_tp_init, arrival_init}, {Py_tp_call, arrival_call},
    {Py_tp_dealloc, arrival_dealloc}, {Py_tp_traverse, arrival_traverse},
    {Py_tp_clear, arrival_clear}, {Py_tp_methods, arrival_methods}, {0, NULL}};
PyType_Spec arrival_spec = {"ulpscope.native._taps.Arrival", sizeof(Arrival), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, arrival_slots};
