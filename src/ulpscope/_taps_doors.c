/* Doors: while a capture is on, functions and attributes of torch's library begin here. By torch's own way a call reads its
 * arguments, finds our mode, looks for its own name, is told to the mode, and begins anew without it; through a door it is told at
 * once and read once. What is told is learnt from that way: the first time a call is let through and it is heard which function the
 * mode is told of, with which arguments. Whatever is not as usual goes torch's way, where the mode decides: other modes, classes
 * of tensors, arguments of which it is not known that they hold none.
 *
 * No object of torch's is exchanged. A function and a method have a field that says how Python calls them fastest, which counts
 * neither for what they equal nor for their hash; an attribute has its code in a table. */
#include "_taps.h"

enum { MOST_ATTRIBUTES = 128 };
enum { UNMET, LEARNT, NEVER };
typedef PyObject *(*Vector)(PyObject *, PyObject *const *, size_t, PyObject *);
typedef PyObject *(*Function)(PyObject *, PyObject *, PyObject *);

typedef struct {
    PyObject *object;
    Vector before; /* NULL of a function, which Python calls with a tuple then */
    Function original;
    PyObject *self; /* of a function: what it is called with, or NULL */
    PyObject *func; /* that the mode is told */
    PyObject *sign; /* its own name, where it may stand for an operator */
    uint64_t owner; /* who knows it by the number `facts` */
    size_t facts;
    char met, is_method, is_bare; /* bare: of no arguments but the tensor */
} Door;
/* Of an attribute that is asked and set; only those of which nothing is recorded. */
typedef struct {
    PyGetSetDef *place;
    getter get;
    setter set;
    void *closure;
    char met[2];
} Attribute;
/* A call as Python makes it. */
typedef struct {
    PyObject *const *args;
    Py_ssize_t count;
    PyObject *names; /* of the arguments behind the others, or NULL */
} Made;
/* One on its way through torch, to learn what the mode is told of it. */
typedef struct Meeting {
    Door *door;
    char *met; /* of an attribute */
    PyObject *frame;
    const Made *made;
} Meeting;

static Door *doors;
static size_t door_count, door_room, attribute_count, *learnt, learnt_count, learnt_room; /* the latter by their numbers */
static Table doors_at;
static Attribute attributes[MOST_ATTRIBUTES];
enum { NONE_OPEN, LEARNT_OPEN, ALL_OPEN };
static long open_now; /* threads.py says which, and when */

static PyObject *tuple_of(PyObject *const *items, Py_ssize_t count) {
    PyObject *made = PyTuple_New(count);
    for (Py_ssize_t at = 0; made && at < count; at++) PyTuple_SetItem(made, at, Py_NewRef(items[at]));
    return made;
}
static Py_ssize_t named_count(const Made *m) { return m->names ? PyTuple_Size(m->names) : 0; }
static PyObject *named_of(const Made *m) {
    PyObject *made = PyDict_New();
    for (Py_ssize_t at = 0; made && at < named_count(m); at++)
        if (PyDict_SetItem(made, PyTuple_GetItem(m->names, at), m->args[m->count + at])) Py_CLEAR(made);
    return made;
}
/* As Python calls it. */
static PyObject *call_as_before(const Door *d, const Made *m) {
    if (d->before) return d->before(d->object, m->args, (size_t)m->count, m->names);
    PyObject *args = tuple_of(m->args, m->count), *kwargs = args && named_count(m) ? named_of(m) : NULL, *result = NULL;
    if (args && (kwargs || !named_count(m))) result = d->original(d->self, args, kwargs);
    Py_XDECREF(args), Py_XDECREF(kwargs);
    return result;
}

/* --- meeting the mode -------------------------------------------------------------------------------------------- */

static int are_told(const Made *m, PyObject *args, PyObject *kwargs) {
    if (PyTuple_Size(args) != m->count || (kwargs ? PyDict_Size(kwargs) : 0) != named_count(m)) return 0;
    for (Py_ssize_t at = 0; at < m->count; at++)
        if (PyTuple_GetItem(args, at) != m->args[at]) return 0;
    for (Py_ssize_t at = 0; at < named_count(m); at++)
        if (PyDict_GetItem(kwargs, PyTuple_GetItem(m->names, at)) != m->args[m->count + at]) return 0;
    return 1;
}
/* The mode is told of a call. No Python of anybody's has begun since the door if the frame is the same. */
void meet_mode(State *s, PyObject *func, PyObject *args, PyObject *kwargs, int is_silent) {
    Meeting *m = s->meeting;
    s->meeting = NULL;
    if (!m || (PyObject *)PyEval_GetFrame() != m->frame) return;
    if (!m->door && is_silent >= 0) *m->met = is_silent ? LEARNT : NEVER;
    if (!m->door) return;
    int good = (Py_TYPE(func) == &PyMethodDescr_Type || PyCFunction_CheckExact(func)) && are_told(m->made, args, kwargs);
    if (good && grow(&learnt, &learnt_room, learnt_count + 1, sizeof *learnt)) good = 0, PyErr_Clear();
    if (good) set_ref(&m->door->func, Py_NewRef(func)), learnt[learnt_count++] = (size_t)(m->door - doors);
    m->door->met = good ? LEARNT : NEVER;
}
static PyObject *first_time(Door *d, Mode *mode, const Made *made) {
    State *s = (State *)Py_NewRef((PyObject *)mode->state);
    Meeting met = {d, NULL, (PyObject *)PyEval_GetFrame(), made};
    s->meeting = &met;
    PyObject *result = call_as_before(d, made);
    if (s->meeting == &met && result && result != Py_NotImplemented) d->met = NEVER; /* it asks no mode */
    if (s->meeting == &met) s->meeting = NULL;
    Py_DECREF(s);
    return result;
}

/* --- calls ------------------------------------------------------------------------------------------------------- */

/* Whether no class of tensors could have a say. */
static int is_ordinary(const Fast *f, PyObject *value) { return is_tensor(f, value) || is_plain(f, value); }
static int are_all_ordinary(const Fast *f, const Made *m) {
    for (Py_ssize_t at = 0, size = m->count + named_count(m); at < size; at++) {
        PyObject *value = m->args[at];
        if (is_ordinary(f, value)) continue;
        int is_tuple = PyTuple_CheckExact(value);
        if (!is_tuple && !PyList_CheckExact(value)) return 0;
        for (Py_ssize_t i = 0, count = PySequence_Size(value); i < count; i++)
            if (!is_ordinary(f, is_tuple ? PyTuple_GetItem(value, i) : PyList_GetItem(value, i))) return 0;
    }
    return 1;
}
static int facts_at(Fast *f, Door *d, ApiFacts *to) {
    const ApiFacts *facts = NULL;
    if (d->owner == f->number) facts = api_at(f, d->facts);
    else {
        PyObject *api = PyDict_GetItemWithError(f->given[APIS], d->func);
        if ((facts = api ? facts_of(f, api, &d->facts) : NULL)) d->owner = f->number;
        else PyErr_Clear();
    }
    if (facts) *to = *facts;
    return facts != NULL;
}
/* With the mode off, as torch has it meanwhile. */
static PyObject *through(Door *d, Mode *m, const ApiFacts *facts, const Made *made, char *is_slow) {
    Py_ssize_t own = d->is_method;
    PyObject *all = tuple_of(made->args, made->count), *rest = NULL, *kwargs = NULL, *result = NULL;
    if (all && !d->is_bare) rest = own ? tuple_of(made->args + own, made->count - own) : Py_NewRef(all);
    if (all && named_count(made)) kwargs = named_of(made);
    Way way = {.func = d->func, .args = all, .kwargs = kwargs, .direct = d->original, .self = own ? made->args[0] : d->self,
        .rest = rest, .sign = d->sign};
    if (all && (rest || d->is_bare) && (kwargs || !named_count(made))) result = handle(m, facts, NULL, &way);
    Py_XDECREF(all), Py_XDECREF(rest), Py_XDECREF(kwargs);
    *is_slow = way.is_slow;
    return result;
}
static int is_usual_call(const Door *d, const Mode *m, const Made *made) {
    if (d->is_method && !(made->count && is_tensor(m->fast, made->args[0]))) return 0;
    return (!d->is_bare || (made->count == 1 && !named_count(made))) && are_all_ordinary(m->fast, made);
}
static int is_free(const Mode *m) { /* of a call that goes round it */
    return m && m->fast && m->state && (!m->state->object[REDISPATCHED] || m->state->object[REDISPATCHED] == Py_None);
}
static PyObject *come(PyObject *object, PyObject *const *args, size_t counted, PyObject *names) {
    uint64_t *at = table_find(&doors_at, (uint64_t)object, 0, 0);
    if (!at) return PyErr_SetString(PyExc_SystemError, "a door that is not known"), NULL;
    Door *d = doors + *at;
    Made made = {args, (Py_ssize_t)(counted << 1 >> 1), names}; /* the first bit says what may be done with the arguments */
    Mode *m = d->met == NEVER ? NULL : mode_alone();
    if (!is_free(m)) return call_as_before(d, &made);
    if (d->met == UNMET) return first_time(d, m, &made);
    State *s = (State *)Py_NewRef((PyObject *)m->state);
    Held held = take_mode_off(); /* which keeps it: whatever is asked for may run a finalizer, and that may end the capture */
    ApiFacts facts;
    PyObject *result = NULL;
    char is_slow = 0;
    s->handling++;
    if (!facts_at(m->fast, d, &facts)) is_slow = 1;
    else if (is_let_through(m, &facts)) result = call_as_before(d, &made);
    else if (is_usual_call(d, m, &made)) result = through(d, m, &facts, &made, &is_slow);
    else is_slow = 1;
    s->handling--;
    put_mode_on(&held);
    Py_DECREF(s);
    return is_slow ? call_as_before(d, &made) : result;
}

/* --- attributes -------------------------------------------------------------------------------------------------- */

typedef struct {
    State *state;
    Meeting met;
    Held held;
} Asking;
/* Whether a mode hears of it, which `end_asking` puts on again. */
static int begin_asking(Asking *a, char *met, PyObject *self, PyObject *value) {
    Mode *m = *met == NEVER ? NULL : mode_alone();
    if (!is_free(m) || !is_tensor(m->fast, self) || (value && value != Py_None && !is_tensor(m->fast, value) &&
        !PyBool_Check(value))) return 0;
    State *s = a->state = (State *)Py_NewRef((PyObject *)m->state);
    if (*met == LEARNT) a->held = take_mode_off(), s->handling++;
    else {
        a->met = (Meeting){.met = met, .frame = (PyObject *)PyEval_GetFrame()};
        s->meeting = &a->met;
    }
    return 1;
}
static void end_asking(Asking *a) {
    if (a->met.met) {
        if (a->state->meeting == &a->met && !PyErr_Occurred()) *a->met.met = NEVER; /* it asks no mode */
        if (a->state->meeting == &a->met) a->state->meeting = NULL;
    } else a->state->handling--, put_mode_on(&a->held);
    Py_DECREF(a->state);
}
static PyObject *get_attribute(PyObject *self, void *closure) {
    Attribute *a = closure;
    Asking asking = {0};
    int heard = begin_asking(&asking, a->met, self, NULL);
    PyObject *result = a->get(self, a->closure);
    if (heard) end_asking(&asking);
    return result;
}
static int set_attribute(PyObject *self, PyObject *value, void *closure) {
    Attribute *a = closure;
    Asking asking = {0};
    int heard = begin_asking(&asking, a->met + 1, self, value), result = a->set(self, value, a->closure);
    if (heard) end_asking(&asking);
    return result;
}

/* --- building ---------------------------------------------------------------------------------------------------- */

/* Where Python has kept, since 3.8, the tables of functions and descriptors, and how it calls them. */
enum { FUNCTION_TABLE = sizeof(PyObject), DESCRIPTOR_TABLE = FUNCTION_TABLE + 3 * sizeof(void *), VECTOR = DESCRIPTOR_TABLE +
    sizeof(void *) };
static void *table_of(PyObject *object, size_t at) { return (void *)(uintptr_t)word_of(object, at); }
static void set_vector(PyObject *object, Vector vector) { memcpy((char *)object + VECTOR, &vector, sizeof vector); }
static PyObject *probed(PyObject *self, PyObject *args, PyObject *kwargs) { Py_RETURN_NONE; }
static PyObject *probed_soon(PyObject *self, PyObject *const *args, size_t counted, PyObject *names) { Py_RETURN_TRUE; }
/* Whether it is so here, as a function and a method of our own tell. */
static int is_known_python(void) {
    static PyMethodDef probe = {"probe", (PyCFunction)(void (*)(void))probed, METH_VARARGS | METH_KEYWORDS, NULL};
    PyObject *one = PyLong_FromLong(1), *function = PyCFunction_NewEx(&probe, NULL, NULL), *method = PyDescr_NewMethod(&PyLong_Type, &probe);
    int good = one && function && method && table_of(function, FUNCTION_TABLE) == &probe && !word_of(function, VECTOR) &&
        table_of(method, DESCRIPTOR_TABLE) == &probe && word_of(method, VECTOR);
    for (int turn = 0; good && turn < 2; turn++) {
        PyObject *object = turn ? method : function, *told = PyObject_CallFunctionObjArgs(object, one, NULL), *soon = NULL;
        if (told) set_vector(object, probed_soon), soon = PyObject_CallFunctionObjArgs(object, one, NULL);
        good = told == Py_None && soon == Py_True;
        Py_XDECREF(told), Py_XDECREF(soon);
    }
    Py_XDECREF(one), Py_XDECREF(function), Py_XDECREF(method);
    return PyErr_Occurred() ? -1 : good;
}
static int build_door(PyObject *object) {
    int is_method = Py_TYPE(object) == &PyMethodDescr_Type;
    if (!is_method && !PyCFunction_CheckExact(object)) return 0;
    PyMethodDef *table = table_of(object, is_method ? DESCRIPTOR_TABLE : FUNCTION_TABLE);
    Vector before;
    memcpy(&before, (char *)object + VECTOR, sizeof before);
    int flags = table->ml_flags & ~METH_STATIC, is_bare = is_method && flags == METH_NOARGS;
    if ((flags != (METH_VARARGS | METH_KEYWORDS) && !is_bare) || !before != !is_method || table_find(&doors_at,
        (uint64_t)object, 0, 0)) return 0;
    if (grow(&doors, &door_room, door_count + 1, sizeof *doors) || table_put(&doors_at, (uint64_t)object, 0, 0, door_count))
        return -1;
    Door *d = doors + door_count++;
    *d = (Door){.object = Py_NewRef(object), .before = before, .is_method = (char)is_method, .is_bare = (char)is_bare};
    memcpy(&d->original, &table->ml_meth, sizeof d->original);
    if (!is_method) d->self = PyCFunction_GetSelf(object);
    else if (!strncmp(table->ml_name, "__", 2)) d->sign = PyUnicode_InternFromString(table->ml_name);
    return PyErr_Occurred() ? -1 : 0;
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
/* Only where its table may be written: ranges of such memory are given. */
static int build_attribute(PyObject *object, PyObject *ranges) {
    if (attribute_count == MOST_ATTRIBUTES || Py_TYPE(object) != &PyGetSetDescr_Type) return 0;
    PyGetSetDef *place = table_of(object, DESCRIPTOR_TABLE);
    int writable = is_inside(place, sizeof *place, ranges);
    if (writable < 0) return -1;
    if (writable && place->get) attributes[attribute_count++] = (Attribute){place, place->get, place->set, place->closure, {UNMET, UNMET}};
    return 0;
}
PyObject *build_doors(PyObject *module, PyObject *args) {
    PyObject *objects, *ranges;
    if (!PyArg_ParseTuple(args, "O!O!", &PyList_Type, &objects, &PyList_Type, &ranges)) return NULL;
    int good = door_count ? 0 : is_known_python();
    if (good < 0) return NULL;
    for (Py_ssize_t at = 0, size = good ? PyList_Size(objects) : 0; at < size; at++) {
        PyObject *object = PyList_GetItem(objects, at);
        if (build_door(object) || build_attribute(object, ranges)) return NULL;
    }
    return Py_BuildValue("(nnn)", (Py_ssize_t)door_count, (Py_ssize_t)attribute_count, (Py_ssize_t)learnt_count);
}
static void set_doors(long which, int open) {
    for (size_t i = 0, count = which == ALL_OPEN ? door_count : which == LEARNT_OPEN ? learnt_count : 0; i < count; i++) {
        Door *d = doors + (which == ALL_OPEN ? i : learnt[i]);
        set_vector(d->object, open ? come : d->before);
    }
    for (size_t i = 0; which && i < attribute_count; i++) {
        Attribute *a = attributes + i;
        a->place->closure = open ? a : a->closure;
        a->place->get = open ? get_attribute : a->get;
        a->place->set = open && a->set ? set_attribute : a->set;
    }
}
/* There are thousands, of which a program uses some dozens: to touch all, twice a step, misses the caches thousands of times. */
PyObject *open_doors(PyObject *module, PyObject *wanted) {
    long which = PyLong_AsLong(wanted);
    if (PyErr_Occurred()) return NULL;
    if (which != open_now) set_doors(open_now, 0), set_doors(which, 1), open_now = which;
    Py_RETURN_NONE;
}

/* --- functions of others ----------------------------------------------------------------------------------------- */

/* What takes tensors and is not torch's: while somebody asks for it, he is told of each call when it has ended. */
static Table foreign_at;
static PyObject *foreign, *foreign_told; /* the list of them, and who is told, or NULL */

static PyObject *come_foreign(PyObject *object, PyObject *const *args, size_t counted, PyObject *names) {
    Made made = {args, (Py_ssize_t)(counted << 1 >> 1), names};
    PyMethodDef *table = table_of(object, FUNCTION_TABLE);
    uint64_t *at = table_find(&foreign_at, (uint64_t)object, 0, 0);
    if (!at) return PyErr_SetString(PyExc_SystemError, "a function that is not known"), NULL;
    Door door = {.object = object, .self = PyCFunction_GetSelf(object)};
    memcpy(&door.before, at, sizeof door.before), memcpy(&door.original, &table->ml_meth, sizeof door.original);
    PyObject *told = Py_XNewRef(foreign_told), *result = call_as_before(&door, &made), *kind, *error, *trace, *all, *done = NULL;
    if (!told) return result;
    PyErr_Fetch(&kind, &error, &trace); /* one that raised may have written all the same */
    if ((all = tuple_of(args, made.count + named_count(&made)))) done = PyObject_CallFunctionObjArgs(told, all, NULL);
    Py_XDECREF(all), Py_XDECREF(done), Py_DECREF(told);
    if (done) return PyErr_Restore(kind, error, trace), result;
    Py_XDECREF(kind), Py_XDECREF(error), Py_XDECREF(trace), Py_XDECREF(result); /* a newer one has come */
    return NULL;
}
/* Bytecode that has met a function often calls the code in its table, if that says no more than how its arguments are given: a
 * word more, which means nothing here, makes it ask the function again. */
static void set_foreign(int open) {
    for (Py_ssize_t i = 0; foreign && i < PyList_Size(foreign); i++) {
        PyObject *object = PyList_GetItem(foreign, i);
        PyMethodDef *table = table_of(object, FUNCTION_TABLE);
        Vector before;
        memcpy(&before, table_find(&foreign_at, (uint64_t)object, 0, 0), sizeof before);
        set_vector(object, open ? come_foreign : before);
        if (before) table->ml_flags = open ? table->ml_flags | METH_COEXIST : table->ml_flags & ~METH_COEXIST;
    }
}
/* 1 if it can be watched, 0 if not, -1 after an error. */
static int add_foreign(PyObject *object, PyObject *ranges) {
    if (!PyCFunction_CheckExact(object)) return 0;
    if (table_find(&foreign_at, (uint64_t)object, 0, 0)) return 1;
    PyMethodDef *table = table_of(object, FUNCTION_TABLE);
    uint64_t before = word_of(object, VECTOR);
    int can = before ? !(table->ml_flags & METH_COEXIST) : (table->ml_flags & ~METH_STATIC) == (METH_VARARGS | METH_KEYWORDS);
    if (can && before) can = is_inside(table, sizeof *table, ranges);
    if (can <= 0) return can;
    return table_put(&foreign_at, (uint64_t)object, 0, 0, before) || PyList_Append(foreign, object) ? -1 : 1;
}
/* More of them, which stay known, where memory may be written, and who is told from now on, or None; gives those that cannot be watched. */
PyObject *watch_foreign(PyObject *module, PyObject *args) {
    PyObject *functions, *ranges, *told;
    if (!PyArg_ParseTuple(args, "O!O!O", &PyList_Type, &functions, &PyList_Type, &ranges, &told)) return NULL;
    if (!foreign && !(foreign = PyList_New(0))) return NULL;
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
