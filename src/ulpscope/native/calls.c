/* Calls as they come: opening, showing, closing. */
#include "capture.h"

enum { RECOMPUTING = 1 };      /* in the bits of a stack */
enum { UNNUMBERED = 1000000 }; /* as frameworks/threads.py has it */

static Call *new_call(Fast *f, PyObject *kind, PyObject *name, int phase) {
    Call *c = (Call *)PyType_GenericAlloc(call_type, 0);
    if (!c) return NULL;
    c->kind = Py_NewRef(kind), c->name = Py_NewRef(name),
    c->module = PyUnicode_FromStringAndSize("", 0);
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
Call *unwanted_call(Fast *f, PyObject *kind, PyObject *name, int phase) {
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
static int selected(Fast *f, PyObject *kind, PyObject *name) {
    PyObject *told =
        PyObject_CallMethodObjArgs(f->given[SELECTION], word[OF_NAME], kind, name, NULL);
    Py_XDECREF(told);
    return !told ? -1 : told == Py_True ? ALL_WANTED : told == Py_False ? NONE_WANTED : EACH_ASKED;
}
int choice_of(Fast *f, const Call *c) {
    if (f->all_free || c->named < 0) return f->all_free ? ALL_WANTED : EACH_ASKED;
    int choice = f->named[c->named].choice;
    if (!choice && (choice = selected(f, c->kind, c->name)) > 0)
        f->named[c->named].choice = (char)choice;
    return choice;
}
/* `carries`: the stacks of others may go on from its own. */
Call *open_call(
    Fast *f, State *s, PyObject *kind, PyObject *name, PyObject *frame, int phase, int carries) {
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
        PyObject *done =
            PyObject_CallMethodObjArgs(recorder, word[DROP_LEFT_OVER], (PyObject *)s, frame, NULL);
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
        PyObject *path =
            PyTuple_GetItem(module, 0); /* of a graph: see frameworks.torch.graph_modules */
        path = PyUnicode_CheckExact(path)
                   ? Py_NewRef(path)
                   : PyObject_CallMethodObjArgs(path, word[INSIDE], frame ? frame : Py_None, NULL);
        if (!path) {
            Py_DECREF(c);
            return NULL;
        }
        set_ref(&c->module, path);
        stop = PyTuple_GetItem(module, 2);
        over = PyLong_AsLongLong(PyTuple_GetItem(module, 3));
    }
    int choice = phase <= 2 ? choice_of(f, c) : ALL_WANTED;
    if (choice < 0) {
        Py_DECREF(c);
        return NULL;
    }
    if (phase <= 2 && !f->all_free) {
        int chosen = choice != NONE_WANTED;
        PyObject *number = choice == EACH_ASKED ? PyLong_FromLongLong(c->index) : NULL;
        if (number)
            chosen = truth_of(PyObject_CallMethodObjArgs(
                f->given[SELECTION], word[WANTS], kind, name, number, c->phase, c->module, NULL));
        Py_XDECREF(number);
        if (chosen < 0 || PyErr_Occurred()) {
            Py_DECREF(c);
            return NULL;
        }
        c->chosen = (char)chosen, c->wanted = chosen && (phase ? f->backward : f->forward);
    }
    if (f->given[STACKS] != Py_None && (carries || choice != NONE_WANTED)) {
        int found = 0;
        if (frame) {
            c->stack = stack_number(f, frame, stop, over, &found);
            if (c->stack < 0) {
                Py_DECREF(c);
                return NULL;
            }
            int again =
                found & RECOMPUTING ? truth_of(PyObject_CallNoArgs(f->given[IN_BACKWARD])) : 0;
            if (again < 0) {
                Py_DECREF(c);
                return NULL;
            }
            if (again) c->flags |= RECOMPUTED;
        } else if (above)
            c->stack = above->stack;
    }
    return c;
}

static int add_value(Call *c, int64_t slot, const uint32_t row[3]) {
    if (slot < 0 || grow_from(c->few, &c->values, &c->room, 4 * (c->count + 1), sizeof *c->values))
        return -1;
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
    int64_t slot =
        PyTuple_Size(path) ? slot_entry(f, how->role, path) : place_entry(f, how->role, 0);
    if (!how->unread) return show_at(f, how->call, slot, leaf, how->produced);
    uint32_t row[3];
    int64_t number = text_number(f, slot);
    PyObject *told = number < 0 ? NULL
                                : PyObject_CallMethodObjArgs(
                                      f->given[MEASURER], word[UNREAD], leaf, how->unread, NULL);
    int failed = !told || !PyArg_ParseTuple(told, "III", row, row + 1, row + 2) ||
                 add_value(how->call, number, row);
    Py_XDECREF(told);
    return failed ? -1 : 0;
}
/* path: a tuple, or NULL for the place `at`. */
int show(Fast *f, Call *c, int role, PyObject *path, Py_ssize_t at, PyObject *value,
    PyObject *unread, int produced) {
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
    if (r.trace)
        PyException_SetTraceback(
            r.error, r.trace); /* which tells whether a signal handler of the program raised it */
    return r;
}
void drop_raised(Raised *r) { Py_XDECREF(r->kind), Py_XDECREF(r->error), Py_XDECREF(r->trace); }
int tell(Fast *f, const char *text) {
    PyObject *done = PyObject_CallMethod(f->given[RECORDER], "note", "s", text);
    Py_XDECREF(done);
    return done ? 0 : -1;
}
/* The number of an entry's text in this step. 0, or -1 with an exception set. */
static int put_text(Fast *f, int64_t entry, uint32_t *number) {
    int64_t found = text_number(f, entry);
    if (found < 0) return -1;
    *number = (uint32_t)found;
    return 0;
}
/* The same of a text, or of none: NULL, None or empty. */
static int put_plain(Fast *f, PyObject *borrowed_text, uint32_t *number) {
    *number = NONE32;
    if (!borrowed_text || borrowed_text == Py_None || !PyUnicode_GetLength(borrowed_text)) return 0;
    return put_text(f, plain_entry(f, borrowed_text), number);
}
/* Ends a call: fills its row and gives it, with its values, to the journal.
 * 0, or -1 with an exception set. Its values are gone either way. */
int close_call(Fast *f, Call *c) {
    CallRow row = {0};
    int status = -1;
    if (!c->wanted) return 0; /* it was given no values */
    if (c->epoch != f->epoch) {
        status = tell(f, "calls that were under way when a step ended are not recorded");
        goto done;
    }
    int64_t named = c->named >= 0 ? c->named : named_at(f, c->kind, c->name);
    int phase = phase_of(f, c->phase);
    if (named < 0 || phase < 0) goto done;
    row.seq = (uint64_t)c->seq;
    row.parent = c->parent < 0 ? NONE64 : (uint64_t)c->parent;
    row.origin = c->origin < 0 ? NONE64 : (uint64_t)c->origin;
    row.index = (uint32_t)c->index;
    row.again = (uint32_t)c->again;
    row.values = (uint32_t)c->count;
    row.stack = c->stack < 0 ? NONE32 : (uint32_t)c->stack;
    row.thread = (uint32_t)c->thread;
    row.phase = (uint8_t)phase;
    row.flags = (uint8_t)c->flags;
    if (put_text(f, f->named[named].kind, &row.kind) ||
        put_text(f, f->named[named].name, &row.name))
        goto done;
    if (put_plain(f, c->note, &row.note) || put_plain(f, c->module, &row.module)) goto done;
    status =
        frames_commit((Frames *)f->given[FRAMES], &row, c->values, sizeof(ValueRow) * c->count);
done:
    drop_values(c); /* a closed call may live until its backward has run */
    return status;
}

/* The call ended with the exception that is set, which goes on, unless a newer one hits us here. */
void close_raised(Fast *f, Call *c) {
    Raised r = take_raised();
    PyObject *done = PyObject_CallMethodObjArgs(
        f->given[RECORDER], word[CLOSE_RAISED], (PyObject *)c, r.error, NULL);
    if (done)
        PyErr_Restore(r.kind, r.error, r.trace);
    else
        drop_raised(&r);
    Py_XDECREF(done);
}

Call *open_backward(Fast *f, State *s, PyObject *kind, PyObject *name, const long long *facts,
    PyObject *module, long long again) {
    if (begin_dump(f)) return NULL;
    Call *c = new_call(f, kind, name, 1);
    if (!c) return NULL;
    c->index = facts[0];
    c->seq = (long long)f->sequence++;
    c->thread = s->number;
    c->again = again;
    set_ref(&c->module, Py_NewRef(module));
    if (facts[1] == (long long)f->epoch)
        c->origin = facts[2], c->parent = facts[3], c->stack = facts[4], c->named = facts[5];
    else if (tell(f, "a backward pass reached calls of an earlier step"))
        Py_CLEAR(c);
    if (c && f->follows_backward) {
        PyObject *number = PyLong_FromLongLong(c->index);
        int now = !number ? -1
                          : truth_of(PyObject_CallMethodObjArgs(f->given[SELECTION],
                                word[WANTS_NOW], kind, name, number, module, NULL));
        Py_XDECREF(number);
        if (now < 0)
            Py_CLEAR(c);
        else if (!now)
            c->wanted = 0, c->epoch = 0;
    }
    return c;
}

int enter(Fast *f, State *s) {
    if (s->busy) return 0;
    if (!f->gate) return PyErr_SetString(PyExc_RuntimeError, "there is no gate"), -1;
    s->busy = s->in_c =
        1; /* before anything is asked for: a finalizer can run wherever memory is */
    int taken = gate_take(f->gate);
    if (!taken) {
        PyObject *done = ASK(f->given[RECORDER], WAIT_FOR_GATE);
        taken = done ? 1 : -1;
        Py_XDECREF(done);
    }
    if (taken < 0)
        s->busy = s->in_c = 0;
    else
        f->in_c = 1, f->transform = -1;
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
    if (f->gate)
        gate_give_up(f->gate); /* unless it was freed already, because an exception seemed to have
                                  left it behind */
}
/* The hook border: what went wrong in recording is told, and the program goes on; what is no
 * Exception is its own. */
int border(Fast *f, PyObject *kind_text, PyObject *name, int is_backward) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
    Raised r = take_raised();
    PyObject *where =
                 PyUnicode_FromFormat(is_backward ? "backward of %U.%U" : "%U.%U", kind_text, name),
             *done = NULL;
    if (where)
        done = PyObject_CallMethodObjArgs(f->given[RECORDER], word[TROUBLE], where, r.error, NULL);
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
    s->number = (long long)(f->threads ? UNNUMBERED + f->threads : 0), f->threads++,
    s->busy = own > 0;
    s->object[CALLS] = PyList_New(0), s->object[MODULES] = PyList_New(0),
    s->object[FREE] = Py_NewRef(f->given[FREEING]);
    int failed = own < 0 || !s->object[CALLS] || !s->object[MODULES] ||
                 PyDict_SetItem(all, f->key, (PyObject *)s);
    Py_DECREF(s); /* the thread keeps it */
    return failed ? NULL : s;
}

/* Whether the backward of a call is wanted, and there will be one. */
int follows(Fast *f, Call *c) {
    int follow = is_grad_on(f);
    if (follow <= 0 || !c->epoch) return follow < 0 ? -1 : 0;
    int choice = choice_of(f, c);
    if (choice != EACH_ASKED) return choice < 0 ? -1 : choice == ALL_WANTED && f->backward;
    return truth_of(
        PyObject_CallMethodObjArgs(f->given[RECORDER], word[WANTS_BACKWARD], (PyObject *)c, NULL));
}

/* --- what a thread is doing
 * ---------------------------------------------------------------------------------------- */

/* 0, or -1 with an exception set. A thread has one object for it: our code does not begin again
 * inside itself. */
int unheard(Fast *f, State *s) {
    if (!s->object[HEARING]) {
        PyObject *quiet = PyObject_CallNoArgs(f->given[NO_FUNCTIONS]);
        set_ref(&s->object[SILENCE], quiet ? GET(quiet, ENTER) : NULL);
        set_ref(&s->object[HEARING], s->object[SILENCE] ? GET(quiet, EXIT) : NULL);
        Py_XDECREF(quiet);
    }
    PyObject *done = s->object[HEARING] ? PyObject_CallNoArgs(s->object[SILENCE]) : NULL;
    Py_XDECREF(done);
    return done ? 0 : -1;
}
/* Also with an exception set. */
void heard_again(Fast *f, State *s) {
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    Py_XDECREF(PyObject_Call(s->object[HEARING], f->nones, NULL));
    PyErr_Restore(kind, error, trace);
}
int64_t sequence_now(Fast *f) { return number_of(PyObject_CallNoArgs(f->given[SEQUENCE])); }
/* Whether somebody writes down what is called; -1 with an exception set. */
int traces(Fast *f) {
    PyObject *tracing = PyObject_CallNoArgs(f->given[TRACING]);
    Py_XDECREF(tracing);
    return tracing ? tracing != Py_None : -1;
}
