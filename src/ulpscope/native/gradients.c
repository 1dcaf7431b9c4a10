/* Gradients of one call, taken from the autograd nodes that the call itself created; backward.py
 * says how, and does the same without this file. */
#include "capture.h"
#include <structmember.h>

static const char LATE[] = "a backward pass ran after stop() and was not recorded; stop after it";

/* What a backward record needs of its forward call. */
static Forward forward_of(const Call *c) {
    return (Forward){Py_NewRef(c->kind), Py_NewRef(c->name), Py_NewRef(c->module),
        {c->index, c->epoch, c->seq, c->parent, c->stack, c->named}};
}
static void forward_drop(Forward *w) {
    Py_CLEAR(w->kind);
    Py_CLEAR(w->name);
    Py_CLEAR(w->module);
}

/* Our own code inside a node: 1 when it may run; 0 when not, which is no error. */
static int inside(Fast *f, State **s) {
    if (!f->active) return tell(f, LATE) ? -1 : 0;
    *s = state_here(f);
    int entered = *s ? enter(f, *s) : -1;
    if (entered <= 0) return entered;
    if (!unheard(f, *s)) return 1;
    leave(f, *s);
    return -1;
}
static PyObject *outside(Fast *f, State *s, const Forward *w, int entered, int failed) {
    if (failed) failed = border(f, w->kind, w->name, 1);
    if (entered > 0) {
        heard_again(f, s);
        leave(f, s);
    }
    if (failed) return NULL;
    Py_RETURN_NONE;
}
/* New references; compiled autograd gives lists. */
static PyObject *gradients_at(PyObject *args, Py_ssize_t at) {
    PyObject *found = PyTuple_GetItem(args, at);
    return found ? PySequence_Tuple(found) : NULL;
}

/* --- a call made of one node
 * ------------------------------------------------------------------------------------- */

Hook *new_hook(Fast *f, const Call *c, int output, PyObject *outputs, size_t slots, int gaps) {
    Hook *h = (Hook *)PyType_GenericAlloc(hook_type, 0);
    if (!h) return NULL;
    h->slots = slots <= sizeof h->few / sizeof *h->few ? h->few : calloc(slots, sizeof *h->slots);
    if (!h->slots) return Py_DECREF(h), PyErr_NoMemory(), NULL;
    h->count = (Py_ssize_t)slots;
    h->fast = (Fast *)Py_NewRef((PyObject *)f);
    h->forward = forward_of(c);
    h->outputs = Py_XNewRef(outputs);
    h->output = output, h->gaps = gaps;
    return h;
}
/* The gradient of a result; of one that was passed on, it is that of the argument too. */
static int show_output(
    Fast *f, Call *c, PyObject *path, Py_ssize_t place, PyObject *grads, int gaps, int passed) {
    PyObject *grad = place < PyTuple_Size(grads) ? PyTuple_GetItem(grads, place) : NULL;
    if (!grad || (grad == Py_None && !gaps)) return 0;
    return show(f, c, INPUT, path, 0, grad, NULL, 1) ||
           (passed && show(f, c, OUTPUT, path, 0, grad, NULL, 1));
}
static int show_outputs(
    Fast *f, Call *c, PyObject *outputs, int output, PyObject *grads, int gaps, int passed) {
    PyObject *number, *path;
    Py_ssize_t at = 0;
    if (!outputs) return show_output(f, c, NULL, output, grads, gaps, passed);
    while (PyDict_Next(outputs, &at, &number, &path))
        if (show_output(f, c, path, PyLong_AsSsize_t(number), grads, gaps, passed)) return -1;
    return 0;
}
static int hook_show(Hook *h, State *s, PyObject *in, PyObject *out) {
    Fast *f = h->fast;
    Call *c = open_backward(
        f, s, h->forward.kind, h->forward.name, h->forward.facts, h->forward.module, h->again++);
    if (!c) return -1;
    int failed = show_outputs(f, c, h->outputs, h->output, out, h->gaps, 0);
    Py_ssize_t left = PyTuple_Size(in);
    for (Py_ssize_t at = 0; !failed && at < h->count && at < left; at++) {
        PyObject *path = h->slots[at], *grad = PyTuple_GetItem(in, at);
        if (path && (grad != Py_None || h->gaps))
            failed = show(f, c, OUTPUT, path, 0, grad, NULL, 1);
    }
    failed = failed || close_call(f, c);
    Py_DECREF(c);
    return failed ? -1 : 0;
}
static PyObject *hook_call(Hook *h, PyObject *args, PyObject *kwargs) {
    State *here = NULL;
    Py_INCREF(h); /* whatever runs inside */
    int entered = inside(h->fast, &here), failed = entered < 0;
    if (entered > 0) {
        GONE(hooks);
        PyObject *in = gradients_at(args, 0), *out = in ? gradients_at(args, 1) : NULL;
        failed = !out || hook_show(h, here, in, out);
        Py_XDECREF(in), Py_XDECREF(out);
    }
    PyObject *result = outside(h->fast, here, &h->forward, entered, failed);
    Py_DECREF(h);
    return result;
}
static void hook_dealloc(Hook *h) {
    PyTypeObject *type = Py_TYPE(h);
    if (h->weak) PyObject_ClearWeakRefs((PyObject *)h);
    forward_drop(&h->forward);
    for (Py_ssize_t at = 0; at < h->count; at++) Py_XDECREF(h->slots[at]);
    if (h->slots != h->few) free(h->slots);
    Py_XDECREF(h->fast), Py_XDECREF(h->outputs);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(h);
    Py_DECREF(type);
}
static PyMemberDef hook_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Hook, weak), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};
static PyType_Slot hook_slots[] = {{Py_tp_dealloc, hook_dealloc}, {Py_tp_call, hook_call},
    {Py_tp_members, hook_members}, {0, NULL}};
PyType_Spec hook_spec = {
    "ulpscope.native._taps.Hook", sizeof(Hook), 0, Py_TPFLAGS_DEFAULT, hook_slots};

/* --- a call made of several nodes
 * -------------------------------------------------------------------------------- */

void pass_reset(Pass *p) {
    p->left = p->expected;
    for (size_t i = 0; i < p->count; i++) {
        p->shares[i].waiting = p->shares[i].edges;
        Py_CLEAR(p->shares[i].sum);
    }
    Py_CLEAR(p->open);
}
static void unlink_pass(Pass *p) {
    for (Pass **at = &p->fast->unfinished; *at; at = &(*at)->next)
        if (*at == p) {
            *at = p->next;
            p->next = NULL;
            Py_DECREF(p);
            return;
        }
}
void drop_passes(Fast *f) {
    while (f->unfinished) unlink_pass(f->unfinished);
}
/* Shows what is left and stores the call. */
static int pass_finish(Pass *p) {
    Fast *f = p->fast;
    Call *c = p->open;
    int failed = 0;
    p->open = NULL;
    for (size_t i = 0; c && !failed && i < p->count; i++)
        if (p->shares[i].sum)
            failed = show(f, c, OUTPUT, p->shares[i].path, 0, p->shares[i].sum, NULL, 1);
    failed = failed || (c && close_call(f, c));
    Py_XDECREF(c);
    pass_reset(p);
    unlink_pass(p); /* which may be the last that holds it */
    return failed ? -1 : 0;
}
/* As backward.py has it, which keeps the graph and modes of the program out of it; here where there
 * are none. */
static PyObject *add(Fast *f, PyObject *one, PyObject *two) {
    if (is_tensor(f, one) && is_tensor(f, two) && !is_grad_on(f) && f->given[MODES] != Py_None) {
        int modes = truth_of(PyObject_CallNoArgs(f->given[MODES]));
        if (modes <= 0) return modes ? NULL : PyNumber_Add(one, two);
    }
    return PyObject_CallFunctionObjArgs(f->given[ADD], one, two, NULL);
}
/* An argument used twice inside the call gets the sum of both gradients; it is shown when the last
 * has come. */
static int pass_add(Pass *p, Share *share, PyObject *grad) {
    int left = --share->waiting, failed = 0;
    PyObject *sum = share->sum, *whole;
    share->sum = NULL;
    if (grad == Py_None)
        whole = sum;
    else if (!sum)
        whole = Py_NewRef(grad);
    else {
        whole = add(p->fast, sum, grad);
        Py_DECREF(sum);
        if (!whole) return -1;
    }
    if (whole && left > 0 && grad != Py_None)
        share->sum = whole;
    else if (whole) {
        failed = show(p->fast, p->open, OUTPUT, share->path, 0, whole, NULL, 1);
        Py_DECREF(whole);
    }
    return failed;
}
static int part_show(Part *part, State *s, PyObject *grads) {
    Pass *p = part->pass;
    Fast *f = p->fast;
    if (!p->open) {
        p->open = open_backward(
            f, s, p->forward.kind, p->forward.name, p->forward.facts, p->forward.module, p->again);
        if (!p->open) return -1;
        p->again++;
        p->thread = s->number;
        p->next = f->unfinished, f->unfinished = (Pass *)Py_NewRef((PyObject *)p);
    }
    int failed = 0;
    if (!part->places)
        failed = show_outputs(f, p->open, part->outputs, part->output, grads, 0, part->passed);
    for (size_t i = 0; !failed && i < part->count; i++) {
        int place = part->places[2 * i];
        failed = pass_add(p, p->shares + part->places[2 * i + 1],
            place < PyTuple_Size(grads) ? PyTuple_GetItem(grads, place) : Py_None);
    }
    return failed || (--p->left <= 0 && pass_finish(p)) ? -1 : 0;
}
static PyObject *part_call(Part *part, PyObject *args, PyObject *kwargs) {
    State *here = NULL;
    Py_INCREF(part); /* and with it the pass, whatever runs inside */
    int entered = inside(part->pass->fast, &here), failed = entered < 0;
    if (entered > 0) {
        GONE(parts);
        PyObject *grads = gradients_at(args, 0);
        failed = !grads || part_show(part, here, grads);
        Py_XDECREF(grads);
    }
    PyObject *result = outside(part->pass->fast, here, &part->pass->forward, entered, failed);
    Py_DECREF(part);
    return result;
}
static void pass_dealloc(Pass *p) {
    PyTypeObject *type = Py_TYPE(p);
    if (p->weak) PyObject_ClearWeakRefs((PyObject *)p);
    pass_reset(p);
    for (size_t i = 0; i < p->count; i++) Py_XDECREF(p->shares[i].path);
    if (p->shares != p->few) free(p->shares);
    forward_drop(&p->forward);
    Py_XDECREF(p->fast);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(p);
    Py_DECREF(type);
}
static void part_dealloc(Part *part) {
    PyTypeObject *type = Py_TYPE(part);
    if (part->places != part->few) free(part->places);
    Py_XDECREF(part->pass), Py_XDECREF(part->outputs);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(part);
    Py_DECREF(type);
}
static PyMemberDef pass_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Pass, weak), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};
static PyType_Slot pass_slots[] = {
    {Py_tp_dealloc, pass_dealloc}, {Py_tp_members, pass_members}, {0, NULL}};
PyType_Spec pass_spec = {
    "ulpscope.native._taps.Pass", sizeof(Pass), 0, Py_TPFLAGS_DEFAULT, pass_slots};
static PyType_Slot part_slots[] = {
    {Py_tp_dealloc, part_dealloc}, {Py_tp_call, part_call}, {0, NULL}};
PyType_Spec part_spec = {
    "ulpscope.native._taps.Part", sizeof(Part), 0, Py_TPFLAGS_DEFAULT, part_slots};

PyObject *fast_finish_pass(Fast *f, PyObject *state) {
    for (;;) {
        Pass *p = f->unfinished;
        while (p && state != Py_None && p->thread != ((State *)state)->number) p = p->next;
        if (!p) Py_RETURN_NONE;
        Py_INCREF(p);
        int failed = pass_finish(p) && border(f, p->forward.kind, p->forward.name, 1);
        Py_DECREF(p);
        if (failed) return NULL;
    }
}

/* --- nodes that are held ---------------------------------------------------------------------- */

/* Every so-manieth node is held until what was built on it is gone: backward.py says why. */
enum { SEGMENT = 997, WITNESSES = 8 };
typedef struct Anchor {
    struct Anchor *next;
    PyObject *node, *above[WITNESSES];
    int count;
} Anchor;
static void drop_anchor(Fast *f) {
    Anchor *a = f->anchors;
    f->anchors = a->next;
    for (int i = 0; i < a->count; i++) Py_DECREF(a->above[i]);
    Py_DECREF(a->node);
    free(a);
}
void drop_anchors(Fast *f) {
    while (f->anchors) drop_anchor(f);
}
static int is_needed(const Anchor *a) {
    for (int i = 0; i < a->count; i++)
        if (PyWeakref_GetObject(a->above[i]) != Py_None) return 1;
    return a->count < WITNESSES;
}
/* Lets go of those of which nothing is left, or holds this node too. */
int hold(Fast *f, PyObject *node, PyObject *armed) {
    Anchor *a = f->anchors;
    if (a && a->count < WITNESSES) {
        PyObject *weak = PyWeakref_NewRef(armed, NULL);
        if (!weak) return -1;
        a->above[a->count++] = weak;
    } else {
        while (f->anchors && !is_needed(f->anchors)) drop_anchor(f);
    }
    if (++f->armed % SEGMENT) return 0;
    a = calloc(1, sizeof *a);
    if (!a) {
        PyErr_NoMemory();
        return -1;
    }
    *a = (Anchor){f->anchors, Py_NewRef(node), {NULL}, 0};
    f->anchors = a;
    return 0;
}

/* --- for who puts hooks on nodes ------------------------------------------------------------- */

Part *new_part(Pass *p, PyObject *outputs, int output) {
    Part *part = (Part *)PyType_GenericAlloc(part_type, 0);
    if (!part) return NULL;
    part->pass = (Pass *)Py_NewRef((PyObject *)p), part->outputs = Py_XNewRef(outputs),
    part->output = output;
    return part;
}
/* Adds a place to the hook of a node that edges of the call leave. */
int add_place(Pass *p, Part **part, int place, PyObject *path) {
    size_t share = 0;
    while (share < p->count && PyObject_RichCompareBool(p->shares[share].path, path, Py_EQ) != 1)
        share++;
    if (share == p->count) {
        if (grow_from(p->few, &p->shares, &p->room, p->count + 1, sizeof *p->shares)) return -1;
        p->shares[p->count++] = (Share){Py_NewRef(path), NULL, 0, 0};
    }
    p->shares[share].edges++;
    if (!*part && !(*part = new_part(p, NULL, 0))) return -1;
    if (!(*part)->places) (*part)->places = (*part)->few, (*part)->room = 2 * FEW_PLACES;
    if (grow_from(
            (*part)->few, &(*part)->places, &(*part)->room, 2 * ((*part)->count + 1), sizeof(int)))
        return -1;
    (*part)->places[2 * (*part)->count] = place,
                        (*part)->places[2 * (*part)->count + 1] = (int)share;
    (*part)->count++;
    return 0;
}
Pass *new_pass(Fast *f, const Call *c) {
    Pass *p = (Pass *)PyType_GenericAlloc(pass_type, 0);
    if (p)
        p->fast = (Fast *)Py_NewRef((PyObject *)f), p->forward = forward_of(c), p->shares = p->few,
        p->room = FEW_SHARES;
    return p;
}
PyObject *fast_hook(Fast *f, PyObject *args) {
    PyObject *call, *outputs, *slots;
    int gaps;
    if (!PyArg_ParseTuple(args, "O!O!O!p", call_type, &call, &PyDict_Type, &outputs, &PyTuple_Type,
            &slots, &gaps))
        return NULL;
    Hook *hook = new_hook(f, (Call *)call, -1, outputs, (size_t)PyTuple_Size(slots), gaps);
    for (Py_ssize_t at = 0; hook && at < hook->count; at++) {
        PyObject *path = PyTuple_GetItem(slots, at);
        hook->slots[at] = path == Py_None ? NULL : Py_NewRef(path);
    }
    return (PyObject *)hook;
}
