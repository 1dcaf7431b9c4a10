/* Calls as they come: opening, showing, closing, and the function mode of a thread. */
#include "capture.h"
#include <structmember.h>

enum { SILENT = 1, QUICK = 2, SIGNED = 4, FUNCTIONAL = 8, MUTATES = 16 }; /* Api.fast */
enum { LEFT_OUT = 32 }; /* none of its calls is wanted */
enum { IN_OVERRIDES = 1, IN_FUNCTIONAL = 2, IN_TORCH = 4, IN_DISPATCHER = 8, IS_APART = 16 };              /* ApiNames.code_class */
enum { RECOMPUTING = 1 }; /* in the bits of a stack */
enum { RECOMPUTED = 1 };
enum { UNNUMBERED = 1000000 }; /* as frameworks/threads.py has it */

/* --- opening, showing, closing ----------------------------------------------------------------------------------- */

static Call *new_call(Fast *f, PyObject *kind, PyObject *name, int phase) {
    Call *c = (Call *)PyType_GenericAlloc(call_type, 0);
    if (!c) return NULL;
    c->kind = Py_NewRef(kind), c->name = Py_NewRef(name), c->module = PyUnicode_FromStringAndSize("", 0);
    c->phase = Py_NewRef(PyTuple_GetItem(f->given[PHASE_LIST], phase));
    c->seq = c->parent = c->origin = c->stack = c->named = -1;
    c->wanted = c->chosen = 1, c->epoch = f->epoch;
    drop_values(c);
    return c;
}
int phase_of(const Fast *f, PyObject *phase) {
    for (int i = 0; i < PHASES; i++)
        if (PyTuple_GetItem(f->given[PHASE_LIST], i) == phase) return i;
    return -1;
}
int role_of(const Fast *f, PyObject *role) {
    for (int i = 0; i < ROLES; i++)
        if (PyTuple_GetItem(f->given[ROLE_LIST], i) == role) return i;
    return -1;
}
static Call *unwanted_call(Fast *f, PyObject *kind, PyObject *name, int phase) {
    Call *c = new_call(f, kind, name, phase);
    if (c) c->wanted = 0, c->epoch = 0;
    return c;
}
static int is_set(PyObject *function) { return function && function != Py_None; }
static int begin_dump(Fast *f) {
    if (!is_set(f->before_first)) return 0;
    PyObject *function = Py_NewRef(f->before_first), *done = PyObject_CallNoArgs(function);
    Py_DECREF(function), Py_XDECREF(done);
    return done ? 0 : -1;
}

/* Whether the calls of a name are wanted, which is asked once; -1 after an error. */
enum { UNASKED, ALL_WANTED, NONE_WANTED, EACH_ASKED };
static int selected(Fast *f, PyObject *kind, PyObject *name) {
    PyObject *told = PyObject_CallMethodObjArgs(f->given[SELECTION], word[OF_NAME], kind, name, NULL);
    Py_XDECREF(told);
    return !told ? -1 : told == Py_True ? ALL_WANTED : told == Py_False ? NONE_WANTED : EACH_ASKED;
}
static int choice_of(Fast *f, const Call *c) {
    if (f->all_free || c->named < 0) return f->all_free ? ALL_WANTED : EACH_ASKED;
    int choice = f->named[c->named].choice;
    if (!choice && (choice = selected(f, c->kind, c->name)) > 0) f->named[c->named].choice = (char)choice;
    return choice;
}
/* `carries`: the stacks of others may go on from its own. */
Call *open_call(Fast *f, State *s, PyObject *kind, PyObject *name, PyObject *frame, int phase, int carries) {
    PyObject *recorder = f->given[RECORDER];
    if (frame && is_set(f->ignored)) {
        PyObject *ignored = Py_NewRef(f->ignored);
        int skip = truth_of(PyObject_CallFunctionObjArgs(ignored, frame, NULL));
        Py_DECREF(ignored);
        if (skip < 0) return NULL;
        if (skip) return unwanted_call(f, kind, name, phase);
    }
    if (begin_dump(f)) return NULL;
    int guarded = frame && is_set(s->object[GUARD]), below = 0;
    if (guarded) below = frame_is_below(frame, PyTuple_GetItem(s->object[GUARD], 1));
    if (below < 0) return NULL;
    if (guarded && !below) {
        PyObject *done = PyObject_CallMethodObjArgs(recorder, word[DROP_LEFT_OVER], (PyObject *)s, frame, NULL);
        if (!done) return NULL;
        Py_DECREF(done);
    }
    int64_t named = named_at(f, kind, name);
    Call *c = named < 0 ? NULL : new_call(f, kind, name, phase);
    if (!c) return NULL;
    c->named = named;
    c->index = f->named[named].count[phase]++;
    c->seq = (long long)f->sequence++;
    c->thread = s->number;
    Py_ssize_t depth = PyList_Size(s->object[CALLS]), modules = PyList_Size(s->object[MODULES]);
    PyObject *last = depth > 0 ? PyList_GetItem(s->object[CALLS], depth - 1) : NULL, *stop = NULL;
    Call *above = last && Py_TYPE(last) == call_type ? (Call *)last : NULL;
    long long over = -1;
    if (above) c->parent = above->seq;
    if (modules > 0) {
        PyObject *module = PyList_GetItem(s->object[MODULES], modules - 1);
        PyObject *path = PyTuple_GetItem(module, 0); /* of a graph: see frameworks.torch.graph_modules */
        path = PyUnicode_CheckExact(path) ? Py_NewRef(path)
            : PyObject_CallMethodObjArgs(path, word[INSIDE], frame ? frame : Py_None, NULL);
        if (!path) { Py_DECREF(c); return NULL; }
        set_ref(&c->module, path);
        stop = PyTuple_GetItem(module, 2);
        over = PyLong_AsLongLong(PyTuple_GetItem(module, 3));
    }
    int choice = phase <= 2 ? choice_of(f, c) : ALL_WANTED;
    if (choice < 0) { Py_DECREF(c); return NULL; }
    if (phase <= 2 && !f->all_free) {
        int chosen = choice != NONE_WANTED;
        PyObject *number = choice == EACH_ASKED ? PyLong_FromLongLong(c->index) : NULL;
        if (number) chosen = truth_of(PyObject_CallMethodObjArgs(f->given[SELECTION], word[WANTS], kind, name,
            number, c->phase, c->module, NULL));
        Py_XDECREF(number);
        if (chosen < 0 || PyErr_Occurred()) { Py_DECREF(c); return NULL; }
        c->chosen = (char)chosen, c->wanted = chosen && (phase ? f->backward : f->forward);
    }
    if (f->given[STACKS] != Py_None && (carries || choice != NONE_WANTED)) {
        int found = 0;
        if (frame) {
            c->stack = stack_number(f, frame, stop, over, &found);
            if (c->stack < 0) { Py_DECREF(c); return NULL; }
            int again = found & RECOMPUTING ? truth_of(PyObject_CallNoArgs(f->given[IN_BACKWARD])) : 0;
            if (again < 0) { Py_DECREF(c); return NULL; }
            if (again) c->flags |= RECOMPUTED;
        } else if (above) c->stack = above->stack;
    }
    return c;
}

static int add_value(Call *c, int64_t slot, const uint32_t row[3]) {
    if (slot < 0 || grow_from(c->few, &c->values, &c->room, 4 * (c->count + 1), sizeof *c->values)) return -1;
    uint32_t *to = c->values + 4 * c->count++;
    to[0] = (uint32_t)slot;
    memcpy(to + 1, row, 3 * sizeof *row);
    return 0;
}
static int show_at(Fast *f, Call *c, int64_t slot, PyObject *value, int produced) {
    uint32_t row[3];
    int64_t number = text_number(f, slot);
    return number < 0 || value_row(f, value, produced, row) ? -1 : add_value(c, number, row);
}
typedef struct {
    Call *call;
    PyObject *unread;
    int role, produced;
} Showing;
static int show_leaf(Fast *f, void *to, PyObject *path, PyObject *leaf) {
    const Showing *how = to;
    int64_t slot = PyTuple_Size(path) ? slot_entry(f, how->role, path) : place_entry(f, how->role, 0);
    if (!how->unread) return show_at(f, how->call, slot, leaf, how->produced);
    uint32_t row[3];
    int64_t number = text_number(f, slot);
    PyObject *told = number < 0 ? NULL : PyObject_CallMethodObjArgs(f->given[MEASURER], word[UNREAD], leaf,
        how->unread, NULL);
    int failed = !told || !PyArg_ParseTuple(told, "III", row, row + 1, row + 2) || add_value(how->call, number, row);
    Py_XDECREF(told);
    return failed ? -1 : 0;
}
/* path: a tuple, or NULL for the place `at`. */
int show(Fast *f, Call *c, int role, PyObject *path, Py_ssize_t at, PyObject *value, PyObject *unread, int produced) {
    if (c->epoch != f->epoch || !(f->roles >> role & 1)) return 0;
    if (!path && !unread && (is_tensor(f, value) || is_plain(f, value)))
        return show_at(f, c, place_entry(f, role, at), value, produced);
    Showing how = {c, unread, role, produced};
    PyObject *whole = path ? Py_NewRef(path) : place_path(at);
    int failed = !whole || visit_leaves(f, value, whole, show_leaf, &how);
    Py_XDECREF(whole);
    return failed ? -1 : 0;
}

int show_named(Fast *f, Call *c, int role, PyObject *key, PyObject *value) {
    if (c->epoch != f->epoch || !(f->roles >> role & 1)) return 0;
    if (PyUnicode_CheckExact(key) && (is_tensor(f, value) || is_plain(f, value)))
        return show_at(f, c, named_slot(f, role, key), value, 0);
    PyObject *path = PyTuple_Pack(1, key);
    int failed = !path || show(f, c, role, path, 0, value, NULL, 0);
    Py_XDECREF(path);
    return failed ? -1 : 0;
}

Raised take_raised(void) {
    Raised r;
    PyErr_Fetch(&r.kind, &r.error, &r.trace);
    PyErr_NormalizeException(&r.kind, &r.error, &r.trace);
    if (r.trace) PyException_SetTraceback(r.error, r.trace); /* which tells whether a signal handler of the program raised it */
    return r;
}
void drop_raised(Raised *r) { Py_XDECREF(r->kind), Py_XDECREF(r->error), Py_XDECREF(r->trace); }
int tell(Fast *f, const char *text) {
    PyObject *done = PyObject_CallMethod(f->given[RECORDER], "note", "s", text);
    Py_XDECREF(done);
    return done ? 0 : -1;
}
int close_call(Fast *f, Call *c) {
    if (!c->wanted) return 0;
    if (c->epoch != f->epoch) return tell(f, "calls that were under way when a step ended are not recorded");
    int64_t named = c->named >= 0 ? c->named : named_at(f, c->kind, c->name), kind = named < 0 ? -1 : text_number(f, f->named[named].kind);
    int64_t name = kind < 0 ? -1 : text_number(f, f->named[named].name), said = NONE32, module = NONE32;
    if (name < 0) return -1;
    if (c->note && c->note != Py_None) said = text_number(f, plain_entry(f, c->note));
    if (c->module && PyUnicode_GetLength(c->module) > 0) module = text_number(f, plain_entry(f, c->module));
    int phase = phase_of(f, c->phase);
    if (said < 0 || module < 0 || phase < 0) return -1;
    char row[CALL_BYTES];
    uint64_t wide[4] = {(uint64_t)c->seq, c->parent < 0 ? NONE64 : (uint64_t)c->parent, c->origin < 0 ? NONE64 :
        (uint64_t)c->origin, 0};
    uint32_t numbers[9] = {(uint32_t)kind, (uint32_t)name, (uint32_t)c->index, (uint32_t)c->again, (uint32_t)c->count,
                           c->stack < 0 ? NONE32 : (uint32_t)c->stack, (uint32_t)said, (uint32_t)module,
                               (uint32_t)c->thread};
    unsigned char small[4] = {(unsigned char)phase, (unsigned char)c->flags, 0, 0};
    memcpy(row, wide, 32), memcpy(row + 32, numbers, 36), memcpy(row + 68, small, 4);
    int failed = frames_commit((Frames *)f->given[FRAMES], row, c->values, 16 * c->count);
    drop_values(c); /* a closed call may live until its backward has run */
    return failed;
}

/* The call ended with the exception that is set, which goes on, unless a newer one hits us here. */
void close_raised(Fast *f, Call *c) {
    Raised r = take_raised();
    PyObject *done = PyObject_CallMethodObjArgs(f->given[RECORDER], word[CLOSE_RAISED], (PyObject *)c, r.error, NULL);
    if (done) PyErr_Restore(r.kind, r.error, r.trace);
    else drop_raised(&r);
    Py_XDECREF(done);
}

Call *open_backward(Fast *f, State *s, PyObject *kind, PyObject *name, const long long *facts, PyObject *module,
    long long again) {
    if (begin_dump(f)) return NULL;
    Call *c = new_call(f, kind, name, 1);
    if (!c) return NULL;
    c->index = facts[0];
    c->seq = (long long)f->sequence++;
    c->thread = s->number;
    c->again = again;
    set_ref(&c->module, Py_NewRef(module));
    if (facts[1] == (long long)f->epoch) c->origin = facts[2], c->parent = facts[3], c->stack = facts[4], c->named = facts[5];
    else if (tell(f, "a backward pass reached calls of an earlier step")) Py_CLEAR(c);
    return c;
}

int enter(Fast *f, State *s) {
    if (s->busy) return 0;
    if (!f->gate) return PyErr_SetString(PyExc_RuntimeError, "there is no gate"), -1;
    s->busy = s->in_c = 1; /* before anything is asked for: a finalizer can run wherever memory is */
    int taken = gate_take(f->gate);
    if (!taken) {
        PyObject *done = ASK(f->given[RECORDER], WAIT_FOR_GATE);
        taken = done ? 1 : -1;
        Py_XDECREF(done);
    }
    if (taken < 0) s->busy = s->in_c = 0;
    else f->in_c = 1;
    return taken;
}
/* What went wrong is told, and no exception is left. */
static void tell_trouble(Fast *f, const char *where) {
    Raised r = take_raised();
    PyObject *done = PyObject_CallMethod(f->given[RECORDER], "trouble", "sO", where, r.error);
    if (!done) PyErr_WriteUnraisable(f->given[RECORDER]);
    Py_XDECREF(done), drop_raised(&r);
}
/* Also with an exception set. */
void leave(Fast *f, State *s) {
    while (f->queued) { /* what it lets go of may have a finalizer */
        PyObject *kind, *error, *trace;
        PyErr_Fetch(&kind, &error, &trace);
        if (launch_queued(f)) tell_trouble(f, "tensors on a device");
        PyErr_Restore(kind, error, trace);
    }
    s->busy = s->in_c = f->in_c = 0;
    if (f->gate) gate_give_up(f->gate); /* unless it was freed already, because an exception seemed to have left it behind */
}
/* The hook border: what went wrong in recording is told, and the program goes on; what is no Exception is its own. */
int border(Fast *f, PyObject *kind_text, PyObject *name, int is_backward) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    Raised r = take_raised();
    PyObject *where = PyUnicode_FromFormat(is_backward ? "backward of %U.%U" : "%U.%U", kind_text, name), *done = NULL;
    if (where) done = PyObject_CallMethodObjArgs(f->given[RECORDER], word[TROUBLE], where, r.error, NULL);
    Py_XDECREF(where), Py_XDECREF(done), drop_raised(&r);
    return done ? 0 : -1;
}

State *state_here(Fast *f) {
    PyObject *all = PyThreadState_GetDict();
    if (!all) return PyErr_SetString(PyExc_RuntimeError, "no thread"), NULL;
    PyObject *found = PyDict_GetItemWithError(all, f->key);
    if (found || PyErr_Occurred()) return (State *)found;
    State *s = (State *)PyType_GenericAlloc(state_type, 0);
    if (!s) return NULL;
    int own = f->given[OWN] == Py_None ? 0 : truth_of(PyObject_CallNoArgs(f->given[OWN]));
    s->number = (long long)(f->threads ? UNNUMBERED + f->threads : 0), f->threads++, s->busy = own > 0;
    s->object[CALLS] = PyList_New(0), s->object[MODULES] = PyList_New(0),
        s->object[FREE] = Py_NewRef(f->given[FREEING]);
    int failed = own < 0 || !s->object[CALLS] || !s->object[MODULES] || PyDict_SetItem(all, f->key, (PyObject *)s);
    Py_DECREF(s); /* the thread keeps it */
    return failed ? NULL : s;
}

/* Whether the backward of a call is wanted, and there will be one. */
int follows(Fast *f, Call *c) {
    int follow = is_grad_on();
    if (follow < 0) follow = truth_of(PyObject_CallNoArgs(f->given[GRAD_ENABLED]));
    if (follow <= 0 || !c->epoch) return follow < 0 ? -1 : 0;
    int choice = choice_of(f, c);
    if (choice != EACH_ASKED) return choice < 0 ? -1 : choice == ALL_WANTED && f->backward;
    return truth_of(PyObject_CallMethodObjArgs(f->given[RECORDER], word[WANTS_BACKWARD], (PyObject *)c, NULL));
}

/* --- the mode ---------------------------------------------------------------------------------------------------- */

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
/* Of the next calls of a function of which none is wanted nothing is made, if no Python runs inside it. */
static void leave_out(Fast *f, const ApiFacts *facts, PyObject *func, const Call *c) {
    int builtin = Py_TYPE(func) == &PyMethodDescr_Type || PyCFunction_CheckExact(func);
    if (!builtin || f->all_free || !c->epoch || facts->flags & (SIGNED | FUNCTIONAL) || c->name != facts->name || choice_of(f, c) != NONE_WANTED)
        return;
    uint64_t *at = table_find(&f->apis_at, (uint64_t)facts->api, 0, 0);
    if (at) f->apis[*at].flags |= LEFT_OUT;
}
void drop_apis(Fast *f) {
    for (size_t i = 0; i < f->api_count; i++) Py_DECREF(f->apis[i].api), Py_DECREF(f->apis[i].kind), Py_DECREF(f->apis[i].name);
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
    if (caller == Py_None) { result = 0; goto done; }
    uint64_t lasti = (uint64_t)frame_lasti(caller), *found = table_find(&f->shapes, (uint64_t)code,
        lasti, 0);
    if (found) result = (int64_t)*found;
    else {
        PyObject *told = PyObject_CallMethodObjArgs(f->given[NAMES], word[CALL_SHAPE], caller, NULL);
        result = !told ? -1 : told == Py_None ? 0 : PyLong_AsLongLong(PyTuple_GetItem(told, 0));
        Py_XDECREF(told);
        if (result >= 0 && table_put(&f->shapes, (uint64_t)code, lasti, 0, (uint64_t)result)) result = -1;
    }
done:
    Py_XDECREF(caller);
    return result;
}
/* How the caller wrote a sign, where that follows from his code, or from one of his variables; NULL and no error where Python must
 * look. */
static PyObject *sign_at(Fast *f, PyObject *frame, const ApiFacts *facts, int64_t lasti, PyObject *code, PyObject *args) {
    uint64_t *found = table_find(&f->sites, (uint64_t)code, (uint64_t)lasti, 0);
    PyObject *sign;
    if (!found) {
        if (code_class(f, code) < 0) return NULL; /* which also keeps the code */
        sign = PyObject_CallMethodObjArgs(f->given[NAMES], word[SITE_SIGN], frame, NULL);
        if (!sign || PyList_Append(f->kept, sign)) { Py_XDECREF(sign); return NULL; }
        Py_DECREF(sign);
        if (table_put(&f->sites, (uint64_t)code, (uint64_t)lasti, 0, (uint64_t)sign)) return NULL;
    } else sign = (PyObject *)*found;
    if (sign == Py_None) return facts->name;
    if (sign == Py_False) { /* a sign that writes: what it is called follows from the function */
        found = table_find(&f->sites, (uint64_t)code, (uint64_t)lasti, (uint64_t)facts->api);
        return found ? (PyObject *)*found : NULL;
    }
    if (!PyTuple_CheckExact(sign)) return sign;
    /* Which of the two was the tensor? Two signs, the variables on the left and on the right, and which it is if the code tells. */
    PyObject *second = PyTuple_Size(args) > 1 ? PyTuple_GetItem(args, 1) : NULL, *told = PyTuple_GetItem(sign, 4);
    if (!second || is_tensor(f, second)) return PyTuple_GetItem(sign, 0);
    if (!is_plain(f, second)) return NULL;
    if (told != Py_None) return told;
    for (int side = 0; side < 2; side++)
        if (frame_holds(frame, PyTuple_GetItem(sign, 2 + side), PyTuple_GetItem(args, 0))) return PyTuple_GetItem(sign, side);
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
        if (back == Py_None) { Py_DECREF(back); break; }
        set_ref(&shown->frame, back);
    }
    shown->is_apart = kind & IS_APART;
    if (flags & FUNCTIONAL && kind & IN_FUNCTIONAL) {
        if (!(back = frame_back(shown->frame))) return -1;
        int64_t wanted = back == Py_None ? 0 : positions_at(f, shown->frame);
        if (wanted < 0) { Py_DECREF(back); return -1; }
        if (back != Py_None && wanted <= PyTuple_Size(shown->args)) set_ref(&shown->frame, back);
        else if (back != Py_None) {
            PyObject *empty = shown->kwargs ? NULL : PyDict_New(), *told, *args, *kwargs;
            told = PyObject_CallMethodObjArgs(f->given[NAMES], word[POSITIONS], shown->frame, shown->args,
                shown->kwargs ? shown->kwargs : empty, NULL);
            Py_XDECREF(empty);
            if (!told || !PyArg_ParseTuple(told, "OO", &args, &kwargs))
                { Py_XDECREF(told); Py_DECREF(back); return -1; }
            set_ref(&shown->args, Py_NewRef(args));
            set_ref(&shown->kwargs, Py_NewRef(kwargs));
            Py_DECREF(told);
            set_ref(&shown->frame, back);
        } else Py_DECREF(back);
    }
    shown->name = NULL;
    if (flags & SIGNED) {
        code = (PyObject *)PyFrame_GetCode((PyFrameObject *)shown->frame);
        kind = code_class(f, code);
        int64_t lasti = frame_lasti(shown->frame);
        PyObject *sign = kind < 0 || PyErr_Occurred() ? NULL : kind & IN_TORCH ? NULL : sign_at(f, shown->frame,
            facts, lasti, code, shown->args);
        if (!sign && !PyErr_Occurred()) {
            uint64_t *site = kind & IN_TORCH ? NULL : table_find(&f->sites, (uint64_t)code, (uint64_t)lasti, 0);
            int keeps = site && (PyObject *)*site == Py_False;
            shown->name = PyObject_CallMethodObjArgs(f->given[NAMES], word[SPELLING], api, shown->frame, shown->args, NULL);
            if (keeps && shown->name && (PyList_Append(f->kept, shown->name) || table_put(&f->sites, (uint64_t)code, (uint64_t)lasti,
                (uint64_t)api, (uint64_t)shown->name))) Py_CLEAR(shown->name);
        }
        if (sign) GONE(signs), shown->name = Py_NewRef(sign);
        Py_DECREF(code);
        return shown->name ? 0 : -1;
    }
    shown->name = Py_NewRef(api_name);
    return 0;
}
static void drop(Shown *shown) { Py_CLEAR(shown->args); Py_CLEAR(shown->kwargs); Py_CLEAR(shown->frame); Py_CLEAR(shown->name); }

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
    if (!look(f, facts, &shown)) c = shown.is_apart ? unwanted_call(f, api_kind, shown.name, 0) : open_call(f, s, api_kind,
        shown.name, shown.frame, 0, 0);
    if (c && c->wanted) {
        int failed = 0;
        Py_ssize_t at = 0, count = PyTuple_Size(shown.args);
        PyObject *key, *value;
        for (at = 0; !failed && at < count; at++) failed = show(f, c, INPUT, NULL, at, PyTuple_GetItem(shown.args,
            at), NULL, 0);
        for (at = 0; !failed && shown.kwargs && PyDict_Next(shown.kwargs, &at, &key, &value);)
            failed = show_named(f, c, INPUT, key, value);
    }
    if (c && !PyErr_Occurred()) {
        leave_out(f, facts, w->func, c);
        follow = follows(f, c);
        if (follow > 0 && writes) find_edges(f, &edges, shown.args, shown.kwargs, 0, is_graph_known() && !f->node_order);
    }
    if (PyErr_Occurred()) {
        follow = 0;
        if (border(f, api_kind, api_name, 0)) { leave(f, s); goto end; }
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
    if ((entered = enter(f, s)) < 0) { Py_CLEAR(result); goto end; }
    PyObject *given = result;
    Quiet quiet = {0};
    if (result == Py_None && flags & MUTATES && PyTuple_Size(args)) given = PyTuple_GetItem(args, 0);
    int failed = (PyObject *)Py_TYPE(result) != f->given[TENSOR] && unheard(f, &quiet);
    if (!failed && c->wanted) failed = show(f, c, OUTPUT, f->nowhere, 0, given, NULL, 1) || close_call(f, c);
    if (!failed && follow > 0) failed = arm(f, c, sequence, edges.are_known ? &edges : NULL, shown.args, shown.kwargs, given);
    if (failed && border(f, api_kind, api_name, 0)) Py_CLEAR(result);
    heard_again(&quiet);
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
    Py_ssize_t size = PyTuple_CheckExact(types) ? PyTuple_Size(types) : PyObject_IsTrue(types) ? -1 : 0;
    for (Py_ssize_t at = 0; at < size; at++)
        if (PyTuple_GetItem(types, at) != f->given[TENSOR] && PyTuple_GetItem(types, at) != f->given[PARAMETER])
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
    if (flags & LEFT_OUT) return GONE(left_out_calls), f->sequence++, carry_out(w); /* it has its number, and nothing inside it is recorded */
    if (!PyList_Size(s->object[CALLS])) {
        int inside = is_autograd_off();
        if (inside < 0) inside = truth_of(PyObject_CallNoArgs(f->given[EXCLUDED]));
        if (inside < 0) return NULL;
        if (inside) inside = !truth_of(PyObject_CallNoArgs(f->given[INFERENCE])); /* which excludes autograd too */
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
    Way way = {.func = func, .args = args, .kwargs = kwargs == Py_None || (kwargs && !PyDict_Size(kwargs)) ? NULL : kwargs};
    PyObject *api = f && s ? PyDict_GetItemWithError(f->given[APIS], func) : NULL, *result = NULL;
    if (!api) PyErr_Clear(); /* also of a function that cannot be a key */
    const ApiFacts *found = api ? facts_of(f, api) : NULL, copy = found ? *found : (ApiFacts){0}, *facts = found ? &copy : NULL;
    if (api && !facts) return NULL;
    if (facts && func == s->object[REDISPATCHED]) {
        Py_CLEAR(s->object[REDISPATCHED]);
        return carry_out(&way);
    }
    if (facts) result = handle(m, facts, types, &way);
    if (facts && !way.is_slow) return result;
    return PyObject_CallMethodObjArgs((PyObject *)m, word[SLOW], func, types, args, way.kwargs ? way.kwargs : Py_None, NULL);
}
static PyObject *mode_call(Mode *m, PyObject *all, PyObject *none) {
    PyObject *func, *types, *args = NULL, *kwargs = NULL, *empty = NULL;
    if (!PyArg_UnpackTuple(all, "__torch_function__", 2, 4, &func, &types, &args, &kwargs)) return NULL;
    if (!args && !(args = empty = PyTuple_New(0))) return NULL;
    State *s = (State *)Py_XNewRef((PyObject *)m->state);
    if (s) s->handling++;
    PyObject *result = hear(m, func, types, args, kwargs);
    if (s) s->handling--;
    Py_XDECREF(s), Py_XDECREF(empty);
    return result;
}
/* At each call torch asks a mode for this method twice, and the method whose it is, by texts, which Python looks for in every
 * class: the mode is its own method. */
static PyObject *mode_attribute(PyObject *m, char *name) {
    if (!strcmp(name, "__torch_function__") || !strcmp(name, "__self__")) return GONE(native_attributes), Py_NewRef(m);
    PyObject *text = PyUnicode_FromString(name), *found = text ? PyObject_GenericGetAttr(m, text) : NULL;
    Py_XDECREF(text);
    return found;
}
static PyType_Slot asked_slots[] = {{Py_tp_getattr, mode_attribute}, {Py_tp_getattro, PyObject_GenericGetAttr}, {0, NULL}};
static PyType_Spec asked_spec = {"ulpscope.native._taps.AskedMode", 0, 0, Py_TPFLAGS_DEFAULT, asked_slots};
/* A class of modes, below one of Python's, which has no slot for what is asked by a text. */
PyObject *asked_mode(PyObject *module, PyObject *above) {
    PyObject *bases = PyTuple_Pack(1, above), *made = bases ? PyType_FromSpecWithBases(&asked_spec, bases) : NULL;
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
    Py_CLEAR(m->fast); Py_CLEAR(m->state);
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
    {"__torch_function__", (PyCFunction)mode_method, METH_VARARGS, "One call of torch."}, {NULL, NULL, 0, NULL}};
static PyType_Slot mode_slots[] = {
    {Py_tp_init, mode_init}, {Py_tp_call, mode_call}, {Py_tp_dealloc, mode_dealloc}, {Py_tp_traverse, mode_traverse},
    {Py_tp_clear, mode_clear}, {Py_tp_methods, mode_methods}, {0, NULL}};
PyType_Spec mode_spec = {
    "ulpscope.native._taps.Mode", sizeof(Mode), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, mode_slots};
