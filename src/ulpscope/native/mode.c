/* The function mode of a thread: whom a call of torch belongs to, how he wrote it, what is recorded
 * around it. */
#include "capture.h"

enum { SILENT = 1, QUICK = 2, SIGNED = 4, FUNCTIONAL = 8, MUTATES = 16 }; /* Api.fast */
enum { LEFT_OUT = 32 }; /* none of its calls is wanted */
enum {
    IN_OVERRIDES = 1,
    IN_FUNCTIONAL = 2,
    IN_TORCH = 4,
    IN_DISPATCHER = 8,
    IS_APART = 16
}; /* ApiNames.code_class */

static const ApiFacts *facts_of(Fast *f, PyObject *api) {
    uint64_t *at = table_find(&f->apis_at, (uint64_t)api, 0, 0);
    if (at) return f->apis + *at;
    PyObject *kind = GET(api, KIND), *name = kind ? GET(api, NAME) : NULL;
    long flags = name ? (long)number_of(GET(api, FAST)) : 0;
    if (PyErr_Occurred() || grow(&f->apis, &f->api_room, f->api_count + 1, sizeof *f->apis) ||
        table_put(&f->apis_at, (uint64_t)api, 0, 0, f->api_count)) {
        Py_XDECREF(kind), Py_XDECREF(name);
        return NULL;
    }
    f->apis[f->api_count] = (ApiFacts){Py_NewRef(api), kind, name, flags};
    return f->apis + f->api_count++;
}
/* Of the next calls of a function of which none is wanted nothing is made, if no Python runs inside
 * it. */
static void leave_out(Fast *f, const ApiFacts *facts, PyObject *func, const Call *c) {
    int builtin = Py_TYPE(func) == &PyMethodDescr_Type || PyCFunction_CheckExact(func);
    if (!builtin || f->all_free || !c->epoch || facts->flags & (SIGNED | FUNCTIONAL) ||
        c->name != facts->name || choice_of(f, c) != NONE_WANTED)
        return;
    uint64_t *at = table_find(&f->apis_at, (uint64_t)facts->api, 0, 0);
    if (at) f->apis[*at].flags |= LEFT_OUT;
}
void drop_apis(Fast *f) {
    for (size_t i = 0; i < f->api_count; i++)
        Py_DECREF(f->apis[i].api), Py_DECREF(f->apis[i].kind), Py_DECREF(f->apis[i].name);
    free(f->apis);
    table_empty(&f->apis_at);
}

/* How many arguments the call under way in the frame above another has by position, or 0. */
static int64_t positions_at(Fast *f, PyObject *frame) {
    PyObject *caller = frame_back(frame), *code = NULL, *back;
    int kind = 0;
    int64_t result = -1;
    while (caller && caller != Py_None) {
        code = (PyObject *)PyFrame_GetCode((PyFrameObject *)caller);
        Py_XDECREF(code); /* its frame keeps it */
        kind = code_class(f, code);
        if (kind < 0) goto done;
        if (!(kind & IN_DISPATCHER)) break;
        back = frame_back(caller);
        set_ref(&caller, back);
    }
    if (!caller) goto done;
    if (caller == Py_None) {
        result = 0;
        goto done;
    }
    uint64_t lasti = (uint64_t)frame_lasti(caller),
             *found = table_find(&f->shapes, (uint64_t)code, lasti, 0);
    if (found)
        result = (int64_t)*found;
    else {
        PyObject *told =
            PyObject_CallMethodObjArgs(f->given[NAMES], word[CALL_SHAPE], caller, NULL);
        result = !told ? -1 : told == Py_None ? 0 : PyLong_AsLongLong(PyTuple_GetItem(told, 0));
        Py_XDECREF(told);
        if (result >= 0 && table_put(&f->shapes, (uint64_t)code, lasti, 0, (uint64_t)result))
            result = -1;
    }
done:
    Py_XDECREF(caller);
    return result;
}
/* How the caller wrote a sign, where that follows from his code, or from one of his variables; NULL
 * and no error where Python must look. */
static PyObject *sign_at(Fast *f, PyObject *frame, const ApiFacts *facts, int64_t lasti,
    PyObject *code, PyObject *args) {
    uint64_t *found = table_find(&f->sites, (uint64_t)code, (uint64_t)lasti, 0);
    PyObject *sign;
    if (!found) {
        if (code_class(f, code) < 0) return NULL; /* which also keeps the code */
        sign = PyObject_CallMethodObjArgs(f->given[NAMES], word[SITE_SIGN], frame, NULL);
        if (!sign || PyList_Append(f->kept, sign)) {
            Py_XDECREF(sign);
            return NULL;
        }
        Py_DECREF(sign);
        if (table_put(&f->sites, (uint64_t)code, (uint64_t)lasti, 0, (uint64_t)sign)) return NULL;
    } else
        sign = (PyObject *)*found;
    if (sign == Py_None) return facts->name;
    if (sign == Py_False) { /* a sign that writes: what it is called follows from the function */
        found = table_find(&f->sites, (uint64_t)code, (uint64_t)lasti, (uint64_t)facts->api);
        return found ? (PyObject *)*found : NULL;
    }
    if (!PyTuple_CheckExact(sign)) return sign;
    /* Which of the two was the tensor? Two signs, the variables on the left and on the right, and
     * which it is if the code tells. */
    PyObject *second = PyTuple_Size(args) > 1 ? PyTuple_GetItem(args, 1) : NULL,
             *told = PyTuple_GetItem(sign, 4);
    if (!second || is_tensor(f, second)) return PyTuple_GetItem(sign, 0);
    if (!is_plain(f, second)) return NULL;
    if (told != Py_None) return told;
    for (int side = 0; side < 2; side++)
        if (frame_holds(frame, PyTuple_GetItem(sign, 2 + side), PyTuple_GetItem(args, 0)))
            return PyTuple_GetItem(sign, side);
    return NULL;
}

typedef struct {
    PyObject *args, *kwargs, *frame, *name;
    int is_apart;
} Shown;

/* Whom the call belongs to, and its arguments as he wrote them. All references are owned. */
static int look(Fast *f, const ApiFacts *facts, Shown *shown) {
    PyObject *api = facts->api, *api_name = facts->name;
    long flags = facts->flags;
    PyObject *frame = (PyObject *)PyEval_GetFrame(), *back;
    if (!frame) return PyErr_SetString(PyExc_RuntimeError, "a call without a frame"), -1;
    shown->frame = Py_NewRef(frame);
    int kind;
    PyObject *code;
    for (;;) {
        code = (PyObject *)PyFrame_GetCode((PyFrameObject *)shown->frame);
        kind = code_class(f, code);
        Py_DECREF(code);
        if (kind < 0) return -1;
        if (!(kind & IN_OVERRIDES)) break;
        if (!(back = frame_back(shown->frame))) return -1;
        if (back == Py_None) {
            Py_DECREF(back);
            break;
        }
        set_ref(&shown->frame, back);
    }
    shown->is_apart = kind & IS_APART;
    if (flags & FUNCTIONAL && kind & IN_FUNCTIONAL) {
        if (!(back = frame_back(shown->frame))) return -1;
        int64_t wanted = back == Py_None ? 0 : positions_at(f, shown->frame);
        if (wanted < 0) {
            Py_DECREF(back);
            return -1;
        }
        if (back != Py_None && wanted <= PyTuple_Size(shown->args))
            set_ref(&shown->frame, back);
        else if (back != Py_None) {
            PyObject *empty = shown->kwargs ? NULL : PyDict_New(), *told, *args, *kwargs;
            told = PyObject_CallMethodObjArgs(f->given[NAMES], word[POSITIONS], shown->frame,
                shown->args, shown->kwargs ? shown->kwargs : empty, NULL);
            Py_XDECREF(empty);
            if (!told || !PyArg_ParseTuple(told, "OO", &args, &kwargs)) {
                Py_XDECREF(told);
                Py_DECREF(back);
                return -1;
            }
            set_ref(&shown->args, Py_NewRef(args));
            set_ref(&shown->kwargs, Py_NewRef(kwargs));
            Py_DECREF(told);
            set_ref(&shown->frame, back);
        } else
            Py_DECREF(back);
    }
    shown->name = NULL;
    if (flags & SIGNED) {
        code = (PyObject *)PyFrame_GetCode((PyFrameObject *)shown->frame);
        kind = code_class(f, code);
        int64_t lasti = frame_lasti(shown->frame);
        PyObject *sign = kind < 0 || PyErr_Occurred() ? NULL
                         : kind & IN_TORCH
                             ? NULL
                             : sign_at(f, shown->frame, facts, lasti, code, shown->args);
        if (!sign && !PyErr_Occurred()) {
            uint64_t *site =
                kind & IN_TORCH ? NULL : table_find(&f->sites, (uint64_t)code, (uint64_t)lasti, 0);
            int keeps = site && (PyObject *)*site == Py_False;
            shown->name = PyObject_CallMethodObjArgs(
                f->given[NAMES], word[SPELLING], api, shown->frame, shown->args, NULL);
            if (keeps && shown->name &&
                (PyList_Append(f->kept, shown->name) ||
                    table_put(&f->sites, (uint64_t)code, (uint64_t)lasti, (uint64_t)api,
                        (uint64_t)shown->name)))
                Py_CLEAR(shown->name);
        }
        if (sign) GONE(signs), shown->name = Py_NewRef(sign);
        Py_DECREF(code);
        return shown->name ? 0 : -1;
    }
    shown->name = Py_NewRef(api_name);
    return 0;
}
static void drop(Shown *shown) {
    Py_CLEAR(shown->args);
    Py_CLEAR(shown->kwargs);
    Py_CLEAR(shown->frame);
    Py_CLEAR(shown->name);
}

/* What torch tells of a call. */
typedef struct {
    PyObject *func, *args, *kwargs;
    char is_slow; /* set where Python must do it */
} Way;
static PyObject *carry_out(const Way *w) { return PyObject_Call(w->func, w->args, w->kwargs); }
static PyObject *run_recorded(Mode *m, const ApiFacts *facts, int writes, const Way *w) {
    Fast *f = m->fast;
    State *s = m->state;
    PyObject *args = w->args, *kwargs = w->kwargs;
    PyObject *api_kind = Py_NewRef(facts->kind), *api_name = Py_NewRef(facts->name), *result = NULL;
    long flags = facts->flags;
    Shown shown = {Py_NewRef(args), Py_XNewRef(kwargs), NULL, NULL, 0};
    Call *c = NULL;
    Edges edges; /* found before the call where it writes over its arguments */
    int follow = 0, entered = enter(f, s);
    edges.are_known = 0;
    if (entered <= 0) goto end;
    if (!look(f, facts, &shown))
        c = shown.is_apart ? unwanted_call(f, api_kind, shown.name, 0)
                           : open_call(f, s, api_kind, shown.name, shown.frame, 0, 0);
    if (c && c->wanted) {
        int failed = 0;
        Py_ssize_t at = 0, count = PyTuple_Size(shown.args);
        PyObject *key, *value;
        for (at = 0; !failed && at < count; at++)
            failed = show(f, c, INPUT, NULL, at, PyTuple_GetItem(shown.args, at), NULL, 0);
        for (at = 0; !failed && shown.kwargs && PyDict_Next(shown.kwargs, &at, &key, &value);)
            failed = show_named(f, c, INPUT, key, value);
    }
    if (c && !PyErr_Occurred()) {
        leave_out(f, facts, w->func, c);
        follow = follows(f, c);
        if (follow > 0 && writes) find_edges(f, &edges, shown.args, shown.kwargs, 0);
    }
    if (PyErr_Occurred()) {
        follow = 0;
        if (border(f, api_kind, api_name, 0)) {
            leave(f, s);
            goto end;
        }
    }
    leave(f, s);
    if (!c) {
        result = carry_out(w);
        goto end;
    }
    int64_t sequence = follow > 0 ? sequence_now(f) : 0;
    if (PyList_Append(s->object[CALLS], (PyObject *)c)) goto end;
    result = carry_out(w);
    Py_ssize_t depth = PyList_Size(s->object[CALLS]);
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    if (depth > 0 && PyList_SetSlice(s->object[CALLS], depth - 1, depth, NULL)) PyErr_Clear();
    PyErr_Restore(kind, error, trace);
    if (!result) {
        close_raised(f, c);
        goto end;
    }
    if (!c->wanted && follow <= 0) goto end;
    if ((entered = enter(f, s)) < 0) {
        Py_CLEAR(result);
        goto end;
    }
    PyObject *given = result;
    int quiet = 0;
    if (result == Py_None && flags & MUTATES && PyTuple_Size(args))
        given = PyTuple_GetItem(args, 0);
    int failed = (PyObject *)Py_TYPE(result) != f->given[TENSOR] && (quiet = !unheard(f, s)) == 0;
    if (!failed && c->wanted)
        failed = show(f, c, OUTPUT, f->nowhere, 0, given, NULL, 1) || close_call(f, c);
    if (!failed && follow > 0)
        failed =
            arm(f, c, sequence, edges.are_known ? &edges : NULL, shown.args, shown.kwargs, given);
    if (failed && border(f, api_kind, api_name, 0)) Py_CLEAR(result);
    if (quiet) heard_again(f, s);
    if (entered) leave(f, s);
end:
    if (entered == 0 && !result && !PyErr_Occurred()) result = carry_out(w);
    if (edges.are_known) drop_edges(&edges);
    drop(&shown);
    Py_XDECREF((PyObject *)c), Py_XDECREF(api_kind), Py_XDECREF(api_name);
    return result;
}

/* Whether no class of tensors has a say. */
static int are_ordinary(const Fast *f, PyObject *types) {
    Py_ssize_t size = PyTuple_CheckExact(types) ? PyTuple_Size(types)
                      : PyObject_IsTrue(types)  ? -1
                                                : 0;
    for (Py_ssize_t at = 0; at < size; at++)
        if (PyTuple_GetItem(types, at) != f->given[TENSOR] &&
            PyTuple_GetItem(types, at) != f->given[PARAMETER])
            return 0;
    return size >= 0;
}
static PyObject *handle(Mode *m, const ApiFacts *facts, PyObject *types, Way *w) {
    Fast *f = m->fast;
    State *s = m->state;
    long flags = facts->flags;
    if (flags & SILENT) return GONE(silent_calls), carry_out(w);
    if (s->busy && s->in_c) return carry_out(w); /* our own code asks a tensor */
    if (s->busy) goto slow;                      /* Python of ours, or left behind by it */
    if (!f->active) return carry_out(w);
    if (!(flags & QUICK) || !are_ordinary(f, types)) goto slow;
    int tracing = traces(f);
    if (tracing) return tracing < 0 ? NULL : carry_out(w);
    if (f->on_module) return GONE(calls_of_modules_only), carry_out(w);
    PyObject *out = w->kwargs ? PyDict_GetItem(w->kwargs, word[OUT]) : NULL;
    PyObject *inplace = w->kwargs ? PyDict_GetItem(w->kwargs, word[INPLACE]) : NULL;
    int writes = flags & MUTATES || (inplace && inplace != Py_False);
    if (out && out != Py_None) goto slow;
    if (PyTuple_Size(w->args) && may_be_unwritten(f, PyTuple_GetItem(w->args, 0))) goto slow;
    if (f->quiet) return carry_out(w);
    if (flags & LEFT_OUT)
        return GONE(left_out_calls), f->sequence++,
               carry_out(w); /* it has its number, and nothing inside it is recorded */
    if (!PyList_Size(s->object[CALLS])) {
        int inside = truth_of(PyObject_CallNoArgs(f->given[EXCLUDED]));
        if (inside < 0) return NULL;
        if (inside)
            inside = !truth_of(
                PyObject_CallNoArgs(f->given[INFERENCE])); /* which excludes autograd too */
        if (inside) goto slow;
    }
    GONE(calls);
    return run_recorded(m, facts, writes, w);
slow:
    w->is_slow = 1;
    return NULL;
}
/* What torch tells the mode. */
static PyObject *hear(Mode *m, PyObject *func, PyObject *types, PyObject *args, PyObject *kwargs) {
    Fast *f = m->fast;
    State *s = m->state;
    Way way = {.func = func,
        .args = args,
        .kwargs = kwargs == Py_None || (kwargs && !PyDict_Size(kwargs)) ? NULL : kwargs};
    PyObject *api = f && s ? PyDict_GetItemWithError(f->given[APIS], func) : NULL, *result = NULL;
    if (!api) PyErr_Clear(); /* also of a function that cannot be a key */
    const ApiFacts *found = api ? facts_of(f, api) : NULL, copy = found ? *found : (ApiFacts){0},
                   *facts = found ? &copy : NULL;
    if (api && !facts) return NULL;
    if (facts && func == s->object[REDISPATCHED]) {
        Py_CLEAR(s->object[REDISPATCHED]);
        return carry_out(&way);
    }
    if (facts) result = handle(m, facts, types, &way);
    if (facts && !way.is_slow) return result;
    return PyObject_CallMethodObjArgs(
        (PyObject *)m, word[SLOW], func, types, args, way.kwargs ? way.kwargs : Py_None, NULL);
}
static PyObject *mode_call(Mode *m, PyObject *all, PyObject *none) {
    PyObject *func, *types, *args = NULL, *kwargs = NULL, *empty = NULL;
    if (!PyArg_UnpackTuple(all, "__torch_function__", 2, 4, &func, &types, &args, &kwargs))
        return NULL;
    if (!args && !(args = empty = PyTuple_New(0))) return NULL;
    State *s = (State *)Py_XNewRef((PyObject *)m->state);
    if (s) s->handling++;
    PyObject *result = hear(m, func, types, args, kwargs);
    if (s) s->handling--;
    Py_XDECREF(s), Py_XDECREF(empty);
    return result;
}
/* At each call torch asks a mode for this method twice, and the method whose it is, by texts, which
 * Python looks for in every class: the mode is its own method. */
static PyObject *mode_attribute(PyObject *m, char *name) {
    if (!strcmp(name, "__torch_function__") || !strcmp(name, "__self__"))
        return GONE(native_attributes), Py_NewRef(m);
    PyObject *text = PyUnicode_FromString(name),
             *found = text ? PyObject_GenericGetAttr(m, text) : NULL;
    Py_XDECREF(text);
    return found;
}
static PyType_Slot asked_slots[] = {
    {Py_tp_getattr, mode_attribute}, {Py_tp_getattro, PyObject_GenericGetAttr}, {0, NULL}};
static PyType_Spec asked_spec = {
    "ulpscope.native._taps.AskedMode", 0, 0, Py_TPFLAGS_DEFAULT, asked_slots};
/* A class of modes, below one of Python's, which has no slot for what is asked by a text. */
PyObject *asked_mode(PyObject *module, PyObject *above) {
    PyObject *bases = PyTuple_Pack(1, above),
             *made = bases ? PyType_FromSpecWithBases(&asked_spec, bases) : NULL;
    Py_XDECREF(bases);
    return made;
}
static PyObject *mode_method(Mode *m, PyObject *all) { return mode_call(m, all, NULL); }
static int mode_init(Mode *m, PyObject *args, PyObject *kwargs) {
    PyObject *fast, *state;
    if (!PyArg_ParseTuple(args, "OO!", &fast, state_type, &state)) return -1;
    m->fast = (Fast *)Py_NewRef(fast), m->state = (State *)Py_NewRef(state);
    return 0;
}
static int mode_traverse(Mode *m, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(m));
    Py_VISIT(m->fast);
    Py_VISIT(m->state);
    return 0;
}
static int mode_clear(Mode *m) {
    Py_CLEAR(m->fast);
    Py_CLEAR(m->state);
    return 0;
}
static void mode_dealloc(Mode *m) {
    PyTypeObject *type = Py_TYPE(m);
    PyObject_GC_UnTrack(m);
    mode_clear(m);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(m);
    Py_DECREF(type);
}
static PyMethodDef mode_methods[] = {
    {"__torch_function__", (PyCFunction)mode_method, METH_VARARGS, "One call of torch."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot mode_slots[] = {{Py_tp_init, mode_init}, {Py_tp_call, mode_call},
    {Py_tp_dealloc, mode_dealloc}, {Py_tp_traverse, mode_traverse}, {Py_tp_clear, mode_clear},
    {Py_tp_methods, mode_methods}, {0, NULL}};
PyType_Spec mode_spec = {"ulpscope.native._taps.Mode", sizeof(Mode), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, mode_slots};
