/* Gradients of one call, taken from the autograd nodes that the call itself created; backward.py says how, and does the
 * same without this file. */
#include "capture.h"
#include <structmember.h>

static const char LATE[] = "a backward pass ran after stop() and was not recorded; stop after it";

/* What a backward record needs of its forward call. */
typedef struct {
    PyObject *kind, *name, *module;
    long long facts[6]; /* index, epoch, seq, parent, stack, named */
} Forward;
static Forward forward_of(const Call *c) {
    return (Forward){Py_NewRef(c->kind), Py_NewRef(c->name), Py_NewRef(c->module), {c->index, c->epoch, c->seq,
        c->parent, c->stack, c->named}};
}
static void forward_drop(Forward *w) {
    Py_CLEAR(w->kind);
    Py_CLEAR(w->name);
    Py_CLEAR(w->module);
}

/* Our own code inside a node: 1 when it may run; 0 when not, which is no error. */
typedef struct {
    State *state;
    Quiet quiet;
} Inside;
static int inside(Fast *f, Inside *in) {
    if (!f->active) return tell(f, LATE) ? -1 : 0;
    in->state = state_here(f);
    int entered = in->state ? enter(f, in->state) : -1;
    if (entered <= 0) return entered;
    if (!unheard(f, &in->quiet)) return 1;
    leave(f, in->state);
    return -1;
}
static PyObject *outside(Fast *f, Inside *in, const Forward *w, int entered, int failed) {
    if (failed) failed = border(f, w->kind, w->name, 1);
    if (entered > 0) heard_again(&in->quiet), leave(f, in->state);
    if (failed) return NULL;
    Py_RETURN_NONE;
}
/* New references; compiled autograd gives lists. */
static PyObject *gradients_at(PyObject *args, Py_ssize_t at) {
    PyObject *found = PyTuple_GetItem(args, at);
    return found ? PySequence_Tuple(found) : NULL;
}

/* --- a call made of one node ------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Fast *fast;
    Forward forward;
    PyObject *outputs, **slots, *few[4], *weak; /* a path or NULL for each gradient of the node: no tuple, which the collector would walk */
    Py_ssize_t count;
    long long again;
    int output, gaps; /* without outputs: the one output, which is shown at the first place */
} Hook;

static Hook *new_hook(Fast *f, const Call *c, int output, PyObject *outputs, size_t slots, int gaps) {
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
static int show_output(Fast *f, Call *c, PyObject *path, Py_ssize_t place, PyObject *grads, int gaps, int passed) {
    PyObject *grad = place < PyTuple_Size(grads) ? PyTuple_GetItem(grads, place) : NULL;
    if (!grad || (grad == Py_None && !gaps)) return 0;
    return show(f, c, INPUT, path, 0, grad, NULL, 1) || (passed && show(f, c, OUTPUT, path, 0, grad, NULL, 1));
}
static int show_outputs(Fast *f, Call *c, PyObject *outputs, int output, PyObject *grads, int gaps, int passed) {
    PyObject *number, *path;
    Py_ssize_t at = 0;
    if (!outputs) return show_output(f, c, NULL, output, grads, gaps, passed);
    while (PyDict_Next(outputs, &at, &number, &path))
        if (show_output(f, c, path, PyLong_AsSsize_t(number), grads, gaps, passed)) return -1;
    return 0;
}
static int hook_show(Hook *h, State *s, PyObject *in, PyObject *out) {
    Fast *f = h->fast;
    Call *c = open_backward(f, s, h->forward.kind, h->forward.name, h->forward.facts, h->forward.module, h->again++);
    if (!c) return -1;
    int failed = show_outputs(f, c, h->outputs, h->output, out, h->gaps, 0);
    Py_ssize_t left = PyTuple_Size(in);
    for (Py_ssize_t at = 0; !failed && at < h->count && at < left; at++) {
        PyObject *path = h->slots[at], *grad = PyTuple_GetItem(in, at);
        if (path && (grad != Py_None || h->gaps)) failed = show(f, c, OUTPUT, path, 0, grad, NULL, 1);
    }
    failed = failed || close_call(f, c);
    Py_DECREF(c);
    return failed ? -1 : 0;
}
static PyObject *hook_call(Hook *h, PyObject *args, PyObject *kwargs) {
    Inside here = {0};
    Py_INCREF(h); /* whatever runs inside */
    int entered = inside(h->fast, &here), failed = entered < 0;
    if (entered > 0) {
        GONE(hooks);
        PyObject *in = gradients_at(args, 0), *out = in ? gradients_at(args, 1) : NULL;
        failed = !out || hook_show(h, here.state, in, out);
        Py_XDECREF(in), Py_XDECREF(out);
    }
    PyObject *result = outside(h->fast, &here, &h->forward, entered, failed);
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
static PyMemberDef hook_members[] = {{"__weaklistoffset__", T_PYSSIZET, offsetof(Hook, weak), READONLY, NULL}, {NULL,
    0, 0, 0, NULL}};
static PyType_Slot hook_slots[] = {{Py_tp_dealloc, hook_dealloc}, {Py_tp_call, hook_call}, {Py_tp_members,
    hook_members}, {0, NULL}};
PyType_Spec hook_spec = {"ulpscope.native._taps.Hook", sizeof(Hook), 0, Py_TPFLAGS_DEFAULT, hook_slots};

/* --- a call made of several nodes -------------------------------------------------------------------------------- */

/* The gradient of an argument: how many edges bring a part of it, how many have still to come, the sum so far. */
typedef struct {
    PyObject *path, *sum;
    int edges, waiting;
} Share;
enum { FEW_SHARES = 2, FEW_PLACES = 2 };
/* What has arrived of one backward of a call. */
typedef struct Pass {
    PyObject_HEAD
    Fast *fast;
    Forward forward;
    Share *shares, few[FEW_SHARES];
    size_t count, room;
    int expected, left;
    Call *open;
    long long thread, again;
    struct Pass *next; /* of those that are open */
    PyObject *weak;
} Pass;
/* The hook of one node of it: before a root, with its outputs; behind a node that edges leave, with places and shares. A
 * call that returned its input has the node that made it: the gradient of both is what arrives there. */
typedef struct {
    PyObject_HEAD
    Pass *pass;
    PyObject *outputs;
    int output, passed;
    int *places, few[2 * FEW_PLACES]; /* pairs: place, share; NULL before a root */
    size_t count, room;
} Part;

static void pass_reset(Pass *p) {
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
        if (p->shares[i].sum) failed = show(f, c, OUTPUT, p->shares[i].path, 0, p->shares[i].sum, NULL, 1);
    failed = failed || (c && close_call(f, c));
    Py_XDECREF(c);
    pass_reset(p);
    unlink_pass(p); /* which may be the last that holds it */
    return failed ? -1 : 0;
}
/* As backward.py has it, which keeps the graph and modes of the program out of it; here where there are none. */
static PyObject *add(Fast *f, PyObject *one, PyObject *two) {
    if (is_tensor(f, one) && is_tensor(f, two) && !is_grad_on() && f->given[MODES] != Py_None) {
        int modes = truth_of(PyObject_CallNoArgs(f->given[MODES]));
        if (modes <= 0) return modes ? NULL : PyNumber_Add(one, two);
    }
    return PyObject_CallFunctionObjArgs(f->given[ADD], one, two, NULL);
}
/* An argument used twice inside the call gets the sum of both gradients; it is shown when the last has come. */
static int pass_add(Pass *p, Share *share, PyObject *grad) {
    int left = --share->waiting, failed = 0;
    PyObject *sum = share->sum, *whole;
    share->sum = NULL;
    if (grad == Py_None) whole = sum;
    else if (!sum) whole = Py_NewRef(grad);
    else {
        whole = add(p->fast, sum, grad);
        Py_DECREF(sum);
        if (!whole) return -1;
    }
    if (whole && left > 0 && grad != Py_None) share->sum = whole;
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
        p->open = open_backward(f, s, p->forward.kind, p->forward.name, p->forward.facts, p->forward.module, p->again);
        if (!p->open) return -1;
        p->again++;
        p->thread = s->number;
        p->next = f->unfinished, f->unfinished = (Pass *)Py_NewRef((PyObject *)p);
    }
    int failed = 0;
    if (!part->places) failed = show_outputs(f, p->open, part->outputs, part->output, grads, 0, part->passed);
    for (size_t i = 0; !failed && i < part->count; i++) {
        int place = part->places[2 * i];
        failed = pass_add(p, p->shares + part->places[2 * i + 1],
            place < PyTuple_Size(grads) ? PyTuple_GetItem(grads, place) : Py_None);
    }
    return failed || (--p->left <= 0 && pass_finish(p)) ? -1 : 0;
}
static PyObject *part_call(Part *part, PyObject *args, PyObject *kwargs) {
    Inside here = {0};
    Py_INCREF(part); /* and with it the pass, whatever runs inside */
    int entered = inside(part->pass->fast, &here), failed = entered < 0;
    if (entered > 0) {
        GONE(parts);
        PyObject *grads = gradients_at(args, 0);
        failed = !grads || part_show(part, here.state, grads);
        Py_XDECREF(grads);
    }
    PyObject *result = outside(part->pass->fast, &here, &part->pass->forward, entered, failed);
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
static PyMemberDef pass_members[] = {{"__weaklistoffset__", T_PYSSIZET, offsetof(Pass, weak), READONLY, NULL}, {NULL,
    0, 0, 0, NULL}};
static PyType_Slot pass_slots[] = {{Py_tp_dealloc, pass_dealloc}, {Py_tp_members, pass_members}, {0, NULL}};
PyType_Spec pass_spec = {"ulpscope.native._taps.Pass", sizeof(Pass), 0, Py_TPFLAGS_DEFAULT, pass_slots};
static PyType_Slot part_slots[] = {{Py_tp_dealloc, part_dealloc}, {Py_tp_call, part_call}, {0, NULL}};
PyType_Spec part_spec = {"ulpscope.native._taps.Part", sizeof(Part), 0, Py_TPFLAGS_DEFAULT, part_slots};

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

/* --- arming ------------------------------------------------------------------------------------------------------ */

typedef struct {
    void *node;
    PyObject *value, *outputs; /* outputs NULL: number `output` at the first place */
    int output;
} Root;
/* The graph keeps torch's own; those of Python are ours to keep. The first few are looked through, the others are in a table. */
enum { FEW = 16 };
typedef struct {
    void **list, *few[FEW];
    size_t count, room;
    Table met;
    int native;
} Nodes;
static int meet(Nodes *nodes, void *node) {
    for (size_t i = 0; i < nodes->count && i < FEW; i++)
        if (nodes->list[i] == node) return 0;
    int many = nodes->count >= FEW;
    if (many && table_find(&nodes->met, (uint64_t)node, 0, 0)) return 0;
    if (grow_from(nodes->few, &nodes->list, &nodes->room, nodes->count + 1, sizeof *nodes->list) || (many && table_put(&nodes->met,
        (uint64_t)node, 0, 0, 1))) return -1;
    nodes->list[nodes->count++] = nodes->native ? node : Py_NewRef((PyObject *)node);
    return 0;
}
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
static int hold(Fast *f, PyObject *value, PyObject *armed) {
    Anchor *a = f->anchors;
    if (a && a->count < WITNESSES) {
        PyObject *weak = PyWeakref_NewRef(armed, NULL);
        if (!weak) return -1;
        a->above[a->count++] = weak;
    } else while ((a = f->anchors) && a->count == WITNESSES) {
        int alive = 0;
        for (int i = 0; !alive && i < WITNESSES; i++) alive = PyWeakref_GetObject(a->above[i]) != Py_None;
        if (alive) break;
        drop_anchor(f);
    }
    if (++f->armed % SEGMENT) return 0;
    PyObject *node = GET(value, GRAD_FN);
    if (!node || !(a = calloc(1, sizeof *a))) return Py_XDECREF(node), node ? PyErr_NoMemory() : NULL, -1;
    *a = (Anchor){f->anchors, node, {NULL}, 0};
    f->anchors = a;
    return 0;
}
/* While a hook is hung, `registrar` stands where torch asks a class for its way to put a hook into the table of a node. Ours
 * makes no handle, as nobody would hold it, and the hook is its own key. It may make nothing that the collector counts, who would
 * run the code of others meanwhile: what it answers is there before, always the same pair: a table and no handle. */
static PyObject *answer, *spare, *registrar, *entry; /* spare: a table that no node has */
static PyObject *enter_hook(PyObject *none, PyObject *const *args, Py_ssize_t count) {
    int good = count == 2 && spare, is_first = good && args[0] == Py_None;
    if (good) good = !PyTuple_SetItem(answer, 0, Py_NewRef(is_first ? spare : args[0]));
    if (good) good = !PyObject_SetItem(PyTuple_GetItem(answer, 0), args[1], args[1]);
    if (is_first) Py_CLEAR(spare);
    if (!good && !PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "this torch hangs hooks in another way");
    return good ? Py_NewRef(answer) : NULL;
}
static PyObject *registrar_attribute(PyObject *self, char *name) { return Py_NewRef(entry); }
static PyMethodDef enter_method = {"_register_hook", (PyCFunction)(void (*)(void))enter_hook, METH_FASTCALL, NULL};
static PyType_Slot registrar_slots[] = {{Py_tp_getattr, registrar_attribute}, {0, NULL}};
static PyType_Spec registrar_spec = {"ulpscope.native._taps.Registrar", sizeof(PyObject), 0, Py_TPFLAGS_DEFAULT, registrar_slots};
static int has_registrar(void) {
    if (registrar) return 1;
    PyObject *class = PyType_FromSpec(&registrar_spec);
    if (class && !entry) entry = PyCFunction_NewEx(&enter_method, NULL, NULL);
    if (class && entry) registrar = PyType_GenericAlloc((PyTypeObject *)class, 0);
    Py_XDECREF(class);
    return registrar != NULL;
}
/* The table of a node, of which there are a thousand until a backward pass is over: a dictionary that can be referred to weakly,
 * as torch does where the program hangs a hook on the same node, and no more than that. */
static PyMemberDef table_members[] = {{"__weaklistoffset__", T_PYSSIZET, 0, READONLY, NULL}, {NULL, 0, 0, 0, NULL}};
static PyType_Slot table_slots[] = {{Py_tp_members, table_members}, {0, NULL}};
static PyType_Spec table_spec = {"ulpscope.native._taps.Hooks", 0, 0, Py_TPFLAGS_DEFAULT, table_slots};
static PyObject *new_table(void) {
    static PyTypeObject *class;
    static newfunc create;
    static PyObject *nothing;
    static int is_tracked_again; /* by Python, once something is in it that the collector must see: until 3.13 */
    if (!class) {
        PyObject *size = PyObject_GetAttrString((PyObject *)&PyDict_Type, "__basicsize__");
        PyObject *bases = size ? PyTuple_Pack(1, &PyDict_Type) : NULL;
        table_members[0].offset = (Py_ssize_t)number_of(size);
        table_spec.basicsize = (int)(table_members[0].offset + (Py_ssize_t)sizeof(PyObject *));
        PyObject *made = bases && (nothing = PyTuple_New(0)) ? PyType_FromSpecWithBases(&table_spec, bases) : NULL;
        Py_XDECREF(bases);
        if (!made) return NULL;
        class = (PyTypeObject *)made;
        create = (newfunc)PyType_GetSlot(class, Py_tp_new);
        PyObject *tried = create(class, nothing, NULL), *list = tried ? PyList_New(0) : NULL;
        if (tried) PyObject_GC_UnTrack(tried);
        if (list && !PyDict_SetItem(tried, Py_None, list)) is_tracked_again = PyObject_GC_IsTracked(tried);
        Py_XDECREF(tried), Py_XDECREF(list);
        if (PyErr_Occurred()) return NULL;
    }
    PyObject *made = create(class, nothing, NULL);
    if (made && is_tracked_again) PyObject_GC_UnTrack(made); /* there is no cycle through a hook of ours */
    return made;
}
static PyObject *hang_natively(void *node, int before, PyObject *hook) {
    if (!answer && (answer = PyTuple_Pack(2, Py_None, Py_None))) PyObject_GC_UnTrack(answer); /* nobody else may hold it */
    if (!has_registrar() || !answer || (!spare && !(spare = new_table()))) return NULL;
    PyObject *handle = node_hang(node, before, hook, registrar);
    if (handle) GONE(hung);
    int is_ours = handle && !PyTuple_SetItem(answer, 0, Py_NewRef(Py_None));
    if (handle && !is_ours) PyErr_Clear();
    if (!is_ours) Py_CLEAR(answer);
    return handle;
}
static int hang(void *node, int native, int before, PyObject *hook) {
    PyObject *handle = native ? hang_natively(node, before, hook) : PyObject_CallMethodObjArgs((PyObject *)node,
        word[before ? REGISTER_PREHOOK : REGISTER_HOOK], hook, NULL);
    Py_XDECREF(handle);
    return handle ? 0 : -1;
}
static Part *new_part(Pass *p, PyObject *outputs, int output) {
    Part *part = (Part *)PyType_GenericAlloc(part_type, 0);
    if (!part) return NULL;
    part->pass = (Pass *)Py_NewRef((PyObject *)p), part->outputs = Py_XNewRef(outputs), part->output = output;
    return part;
}
/* Adds a place to the hook of a node that edges of the call leave. */
static int add_place(Pass *p, Part **part, int place, PyObject *path) {
    size_t share = 0;
    while (share < p->count && PyObject_RichCompareBool(p->shares[share].path, path, Py_EQ) != 1) share++;
    if (share == p->count) {
        if (grow_from(p->few, &p->shares, &p->room, p->count + 1, sizeof *p->shares)) return -1;
        p->shares[p->count++] = (Share){Py_NewRef(path), NULL, 0, 0};
    }
    p->shares[share].edges++;
    if (!*part && !(*part = new_part(p, NULL, 0))) return -1;
    if (!(*part)->places) (*part)->places = (*part)->few, (*part)->room = 2 * FEW_PLACES;
    if (grow_from((*part)->few, &(*part)->places, &(*part)->room, 2 * ((*part)->count + 1), sizeof(int))) return -1;
    (*part)->places[2 * (*part)->count] = place, (*part)->places[2 * (*part)->count + 1] = (int)share;
    (*part)->count++;
    return 0;
}
static Pass *new_pass(Fast *f, const Call *c) {
    Pass *p = (Pass *)PyType_GenericAlloc(pass_type, 0);
    if (p) p->fast = (Fast *)Py_NewRef((PyObject *)f), p->forward = forward_of(c), p->shares = p->few, p->room = FEW_SHARES;
    return p;
}
static int arm_several(Fast *f, Call *c, int64_t sequence, const Root *roots, size_t root_count, const Edges *e) {
    Pass *p = new_pass(f, c);
    if (!p) return -1;
    GONE(several_nodes);
    Nodes nodes;
    nodes.list = nodes.few, nodes.count = 0, nodes.room = FEW, nodes.met = (Table){0}, nodes.native = e->native;
    Children children = {0};
    Part *part = NULL;
    int status = -1;
    for (size_t i = 0; i < root_count; i++) {
        if (meet(&nodes, roots[i].node) || !(part = new_part(p, roots[i].outputs, roots[i].output))) goto done;
        if (hang(roots[i].node, e->native, 1, (PyObject *)part) || hold(f, roots[i].value, (PyObject *)p)) goto done;
        Py_CLEAR(part);
        p->expected++;
    }
    for (size_t i = 0; e->count && i < nodes.count; i++) {
        void *node = nodes.list[i];
        if (children_of(node, e->native, &children)) goto done;
        for (size_t at = 0; at < children.count; at++) {
            Child child;
            if (child_at(&children, at, &child)) goto done;
            if (!child.node) continue;
            int found = find_edge(e, &child, 0);
            if (found == -2) goto done;
            if (found >= 0) {
                if (add_place(p, &part, (int)at, e->list[found].path)) goto done;
            } else if (child.sequence != LEAF && (int64_t)child.sequence >= sequence && meet(&nodes, child.node)) goto done;
        }
        Py_CLEAR(children.list);
        if (part) {
            if (hang(node, e->native, 0, (PyObject *)part)) goto done;
            p->expected++;
        }
        Py_CLEAR(part);
    }
    pass_reset(p);
    status = 0;
done:
    for (size_t i = 0; !nodes.native && i < nodes.count; i++) Py_DECREF((PyObject *)nodes.list[i]);
    if (nodes.list != nodes.few) free(nodes.list);
    table_empty(&nodes.met);
    Py_XDECREF(children.list), Py_XDECREF(part), Py_DECREF(p);
    return status;
}
/* 1 where a node of the call has a child that the call made too. */
static int arm_single(Fast *f, Call *c, int64_t sequence, const Root *root, const Edges *e) {
    Children children;
    Child child, other;
    Hook *hook = NULL;
    int status = -1;
    if (children_of(root->node, e->native, &children)) return -1;
    for (size_t at = 0; at < children.count; at++) {
        if (child_at(&children, at, &child)) goto done;
        if (child.node && child.sequence != LEAF && (int64_t)child.sequence >= sequence) {
            status = 1;
            goto done;
        }
    }
    if (!(hook = new_hook(f, c, root->output, root->outputs, children.count, 0))) goto done;
    GONE(single_nodes);
    for (size_t at = 0; at < children.count; at++) {
        int turn = 0, found = -1;
        if (child_at(&children, at, &child)) goto done;
        for (size_t i = 0; child.node && i < at; i++) {
            if (child_at(&children, i, &other)) goto done;
            turn += other.node == child.node && other.number == child.number;
        }
        if (child.node && (found = find_edge(e, &child, turn)) == -2) goto done;
        if (found >= 0) hook->slots[at] = Py_NewRef(e->list[found].path);
    }
    status = hang(root->node, e->native, 0, (PyObject *)hook) || hold(f, root->value, (PyObject *)hook) ? -1 : 0;
done:
    Py_XDECREF(children.list), Py_XDECREF(hook);
    return status;
}

/* The nodes that made a result: those of the call, and, where there are none, older ones. */
enum { FEW_ROOTS = 2 };
typedef struct {
    Root *list, few[FEW_ROOTS];
    size_t count, room;
    int older, native;
    int64_t sequence;
} Roots;
static void drop_roots(Roots *roots) {
    for (size_t i = 0; i < roots->count; i++) {
        if (!roots->native) Py_DECREF((PyObject *)roots->list[i].node);
        Py_DECREF(roots->list[i].value), Py_XDECREF(roots->list[i].outputs);
    }
    roots->count = 0;
}
static int add_root(Fast *f, Roots *roots, PyObject *value, PyObject *path) {
    Direct d;
    int direct, wanted = wants_grad(f, value, &d, &direct);
    if (wanted <= 0) return wanted;
    void *node;
    if (node_of(value, direct ? &d : NULL, roots->native, &node)) return -1;
    if (!node) return 0;
    int64_t number = roots->native ? (int64_t)node_sequence(node) : number_of(ASK((PyObject *)node, SEQUENCE_NR));
    int64_t output = direct ? tensor_output(&d) : number_of(GET(value, OUTPUT_NR));
    int status = PyErr_Occurred() ? -1 : 0, older = number < roots->sequence;
    if (!status && !older && roots->older) drop_roots(roots);
    if (!status && !(older && roots->count && !roots->older)) {
        size_t at = 0;
        while (at < roots->count && roots->list[at].node != node) at++;
        if (at == roots->count) {
            if (grow_from(roots->few, &roots->list, &roots->room, at + 1, sizeof *roots->list)) status = -1;
            else roots->list[roots->count++] = (Root){roots->native ? node : Py_NewRef((PyObject *)node), Py_NewRef(value),
                path ? PyDict_New() : NULL, (int)output};
            roots->older = older;
        }
        PyObject *key = status || !path ? NULL : PyLong_FromLongLong(output);
        if (path && (!key || PyDict_SetItem(roots->list[at].outputs, key, path))) status = -1;
        Py_XDECREF(key);
    }
    if (!roots->native) Py_DECREF((PyObject *)node);
    return status;
}
static int add_root_leaf(Fast *f, void *to, PyObject *path, PyObject *leaf) {
    int tensor = is_tensor(f, leaf) ? 1 : is_plain(f, leaf) ? 0 : PyObject_IsInstance(leaf, f->given[TENSOR]);
    return tensor <= 0 ? tensor : add_root(f, to, leaf, PyTuple_Size(path) ? path : NULL);
}
static int arm_passed(Fast *f, const Call *c, const Root *root, int native) {
    Pass *p = new_pass(f, c);
    Part *part = p ? new_part(p, root->outputs, root->output) : NULL;
    int status = part ? 0 : -1;
    if (part) {
        GONE(older_nodes);
        part->passed = p->expected = p->left = 1;
        status = hang(root->node, native, 1, (PyObject *)part);
    }
    Py_XDECREF(part), Py_XDECREF(p);
    return status;
}

static int arm_slowly(Fast *f, Call *c, int64_t sequence, Edges *e, PyObject *args, PyObject *kwargs, PyObject *result) {
    PyObject *number = PyLong_FromLongLong(sequence), *none = kwargs ? NULL : PyDict_New(), *done = NULL;
    PyObject *table = e ? edges_table(e) : Py_NewRef(Py_None);
    if (number && table && (kwargs || none))
        done = PyObject_CallMethodObjArgs(f->given[BACKWARD], word[ARM_SLOWLY], (PyObject *)c, number, table, args,
            kwargs ? kwargs : none, result, NULL);
    Py_XDECREF(number), Py_XDECREF(none), Py_XDECREF(done), Py_XDECREF(table);
    return done ? 0 : -1;
}
/* Hooks the nodes that a finished call created, if it created any. */
int arm(Fast *f, Call *c, int64_t sequence, Edges *e, PyObject *args, PyObject *kwargs, PyObject *result) {
    if (f->node_order && PyUnicode_CompareWithASCIIString(c->kind, "Module"))
        return arm_slowly(f, c, sequence, e, args, kwargs, result); /* whose order is Python's to find */
    Roots roots;
    Edges own;
    roots.list = roots.few, roots.count = 0, roots.room = FEW_ROOTS;
    roots.sequence = sequence, roots.native = e ? e->native : is_graph_known(), roots.older = 0;
    own.are_known = 0;
    int status = is_tensor(f, result) ? add_root(f, &roots, result, NULL) : is_plain(f, result) ? 0 :
        visit_leaves(f, result, f->nowhere, add_root_leaf, &roots);
    if (!status && roots.older)
        for (size_t i = 0; !status && i < roots.count; i++) status = arm_passed(f, c, roots.list + i, roots.native);
    else if (!status && roots.count) {
        if (!e && find_edges(f, &own, args, kwargs, 0, roots.native)) status = -1;
        if (!e) e = &own;
        if (!status) status = roots.count == 1 ? arm_single(f, c, sequence, roots.list, e) : 1;
        if (status == 1) status = arm_several(f, c, sequence, roots.list, roots.count, e);
        if (own.are_known) drop_edges(&own);
    }
    drop_roots(&roots);
    if (roots.list != roots.few) free(roots.list);
    return status;
}

/* --- what Python calls ------------------------------------------------------------------------------------------- */

PyObject *fast_hook(Fast *f, PyObject *args) {
    PyObject *call, *outputs, *slots;
    int gaps;
    if (!PyArg_ParseTuple(args, "O!O!O!p", call_type, &call, &PyDict_Type, &outputs, &PyTuple_Type, &slots, &gaps))
        return NULL;
    Hook *hook = new_hook(f, (Call *)call, -1, outputs, (size_t)PyTuple_Size(slots), gaps);
    for (Py_ssize_t at = 0; hook && at < hook->count; at++) {
        PyObject *path = PyTuple_GetItem(slots, at);
        hook->slots[at] = path == Py_None ? NULL : Py_NewRef(path);
    }
    return (PyObject *)hook;
}
PyObject *fast_edges(Fast *f, PyObject *args) {
    PyObject *values, *named;
    int peek;
    if (!PyArg_ParseTuple(args, "O!O!p", &PyTuple_Type, &values, &PyDict_Type, &named, &peek)) return NULL;
    return new_edges(f, values, named, peek);
}
PyObject *fast_arm(Fast *f, PyObject *args) {
    PyObject *call, *edges, *values, *named, *result;
    long long sequence;
    if (!PyArg_ParseTuple(args, "O!LOO!O!O", call_type, &call, &sequence, &edges, &PyTuple_Type, &values,
        &PyDict_Type, &named, &result)) return NULL;
    if (arm(f, (Call *)call, sequence, edges_in(edges), values, named, result))
        return NULL;
    Py_RETURN_NONE;
}
