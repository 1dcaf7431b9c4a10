/* Reads the entries of a dump.json of msprobe without making Python objects of their text.
 * Knows the usual shapes of an entry and nothing else: whatever it does not know, it leaves to msprobe_values.py, by giving
 * up with no word about why.  leaves.py says what the functions return; both ways must give equal values. */
#include "../../_abi.h"
#include <math.h>

typedef uint8_t u8;
enum { TEXTS = 256, MOST_SLOTS = 4096, MOST_DIMS = 64, MOST_KEYS = 32, DEPTH = 16, SECTIONS = 8, STATISTICS = 4 };
enum { SLOT, TYPE, DTYPE, SHAPE, STRIDE, DEVICE, GRADIENT, STATS, CHECKSUM, SCALAR, PAYLOAD, MEASURE, ERROR, EXTRA, PARTS };
static const char *const value_fields[] = {
    "slot",  "type",     "dtype",  "shape",   "stride",  "device", "requires_grad",
    "stats", "checksum", "scalar", "payload", "measure", "error",  "extra",
    "parts",
};
static const char *const told_fields[] = {"numel", "max", "min", "mean", "norm"};
enum { VALUE_FIELDS = PARTS + 1, TOLD_FIELDS = STATISTICS + 1 };

/* A class with slots, filled without a call of its __init__: as object.__setattr__ does it in a frozen dataclass. */
typedef struct {
    PyTypeObject *type;
    PyObject *members[VALUE_FIELDS];
    descrsetfunc set;
} Maker;

typedef struct {
    PyObject_HEAD
    Maker value, told;
    PyObject *slot, *empty, *list, *object, *none;
    Py_ssize_t sections;
    struct {
        PyObject *name, *role, *slots;
    } section[SECTIONS];
    PyObject *texts[TEXTS];
} Leaves;

typedef struct {
    const u8 *p, *end;
    Leaves *leaves;
    int backward, depth;
    PyObject *path[DEPTH];
    PyObject **found;
    u8 *section_of;
    Py_ssize_t count, room;
} Reader;

typedef struct {
    const u8 *at;
    Py_ssize_t size;
} Text;

/* --- words of JSON: 0, or -1 to give up --- */

static int is_space(u8 c) { return c == ' ' || c == '\n' || c == '\r' || c == '\t'; }
static int is_digit(u8 c) { return c >= '0' && c <= '9'; }

/* The next character that is no space; 0 at the end. */
static u8 next(Reader *r) {
    while (r->p < r->end && is_space(*r->p)) r->p++;
    return r->p < r->end ? *r->p : 0;
}

static int take(Reader *r, u8 c) {
    if (next(r) != c) return -1;
    r->p++;
    return 0;
}

static int word(Reader *r, const char *text) {
    Py_ssize_t size = (Py_ssize_t)strlen(text);
    if (r->end - r->p < size || memcmp(r->p, text, (size_t)size)) return -1;
    r->p += size;
    return 0;
}

/* What follows a member: 1 for another one, 0 for the end of the list or object. */
static int more(Reader *r, u8 end) {
    u8 c = next(r);
    r->p++;
    return c == ',' ? 1 : c == end ? 0 : -1;
}

/* A string without escapes. */
static int text(Reader *r, Text *found) {
    if (take(r, '"')) return -1;
    found->at = r->p;
    while (r->p < r->end && *r->p != '"') {
        if (*r->p < ' ' || *r->p == '\\') return -1;
        r->p++;
    }
    found->size = r->p - found->at;
    return r->p < r->end ? (r->p++, 0) : -1;
}

static int is(Text text, const char *name) {
    size_t size = strlen(name);
    return (size_t)text.size == size && !memcmp(text.at, name, size);
}

static int same(Text a, Text b) { return a.size == b.size && !memcmp(a.at, b.at, (size_t)a.size); }

/* A text as an object; those met before are the same object, mostly. */
static PyObject *shared(Leaves *leaves, Text text) {
    uint32_t hash = (uint32_t)text.size;
    for (Py_ssize_t i = 0; i < text.size; i++) hash = hash * 31 + text.at[i];
    PyObject **place = &leaves->texts[(hash ^ hash >> 8) % TEXTS];
    if (*place) {
        Py_ssize_t size;
        const char *known = PyUnicode_AsUTF8AndSize(*place, &size);
        if (!known) return NULL;
        if (size == text.size && !memcmp(known, text.at, (size_t)size)) return Py_NewRef(*place);
    }
    PyObject *made = PyUnicode_DecodeUTF8((const char *)text.at, text.size, NULL);
    if (made) {
        Py_XDECREF(*place);
        *place = Py_NewRef(made);
    }
    return made;
}

static PyObject *number(Reader *r) {
    const u8 *start = r->p;
    int64_t whole = 0;
    int fraction = 0;
    if (r->p < r->end && *r->p == '-') r->p++;
    const u8 *digits = r->p;
    for (; r->p < r->end && is_digit(*r->p); r->p++)
        if (r->p - digits < 18) whole = 10 * whole + (*r->p - '0');
    if (r->p == digits || (*digits == '0' && r->p - digits > 1)) return NULL;
    Py_ssize_t size = r->p - digits;
    if (r->p < r->end && *r->p == '.') {
        const u8 *after = ++r->p;
        while (r->p < r->end && is_digit(*r->p)) r->p++;
        if (r->p == after) return NULL;
        fraction = 1;
    }
    if (r->p < r->end && (*r->p | 32) == 'e') {
        r->p++;
        if (r->p < r->end && (*r->p == '+' || *r->p == '-')) r->p++;
        const u8 *after = r->p;
        while (r->p < r->end && is_digit(*r->p)) r->p++;
        if (r->p == after) return NULL;
        fraction = 1;
    }
    /* An entry ends with a brace: a number at the end is none, and strtod never reads past it. */
    if (r->p == r->end) return NULL;
    if (!fraction) return size > 18 ? NULL : PyLong_FromLongLong(*start == '-' ? -whole : whole);
    char *end;
    double found = PyOS_string_to_double((const char *)start, &end, NULL);
    if ((found == -1.0 && PyErr_Occurred()) || end != (const char *)r->p || !isfinite(found)) return NULL;
    return PyFloat_FromDouble(found);
}

/* null, true, false, a text or a number; or a list of such, nested up to `lists` times. */
static PyObject *plain(Reader *r, int lists) {
    Text found;
    switch (next(r)) {
    case 'n': return word(r, "null") ? NULL : Py_NewRef(Py_None);
    case 't': return word(r, "true") ? NULL : Py_NewRef(Py_True);
    case 'f': return word(r, "false") ? NULL : Py_NewRef(Py_False);
    case '"': return text(r, &found) ? NULL : shared(r->leaves, found);
    case '[': break;
    default: return number(r);
    }
    if (!lists) return NULL;
    PyObject *list = PyList_New(0);
    r->p++;
    int going = !list ? -1 : next(r) == ']' ? more(r, ']') : 1;
    while (going > 0) {
        PyObject *item = plain(r, lists - 1);
        going = !item || PyList_Append(list, item) ? -1 : more(r, ']');
        Py_XDECREF(item);
    }
    if (going < 0) Py_CLEAR(list);
    return list;
}

/* --- values --- */

static PyObject *made(const Maker *maker, PyObject *const *fields, int count) {
    PyObject *found = PyType_GenericAlloc(maker->type, 0);
    for (int i = 0; found && i < count; i++)
        if (maker->set(maker->members[i], found, fields[i] ? fields[i] : Py_None)) Py_CLEAR(found);
    return found;
}

/* The slot at the path of the reader: one object for all values there. */
static PyObject *slot_here(Reader *r, int section) {
    PyObject *path = PyTuple_New(r->depth), *found = NULL;
    PyObject *known = r->leaves->section[section].slots;
    for (int i = 0; path && i < r->depth; i++) PyTuple_SetItem(path, i, Py_NewRef(r->path[i]));
    if (path && (found = PyDict_GetItemWithError(known, path))) {
        Py_INCREF(found);
    } else if (path && !PyErr_Occurred()) {
        if (PyDict_Size(known) >= MOST_SLOTS) PyDict_Clear(known);
        found = PyObject_CallFunctionObjArgs(r->leaves->slot, r->leaves->section[section].role, path, NULL);
        if (found && PyDict_SetItem(known, path, found)) Py_CLEAR(found);
    }
    Py_XDECREF(path);
    return found;
}

/* Adds a value; takes the fields, which may be NULL for None. */
static int add(Reader *r, int section, PyObject **fields) {
    PyObject *value = NULL;
    if ((fields[SLOT] = slot_here(r, section)) && (fields[EXTRA] = PyDict_New()) && (fields[PARTS] = PyTuple_New(0)))
        value = made(&r->leaves->value, fields, VALUE_FIELDS);
    for (int i = 0; i < VALUE_FIELDS; i++) Py_XDECREF(fields[i]);
    if (!value) return -1;
    if (r->count == r->room) {
        Py_ssize_t room = r->room ? 2 * r->room : 16;
        PyObject **found = realloc(r->found, (size_t)room * sizeof *found);
        if (found) r->found = found;
        u8 *section_of = realloc(r->section_of, (size_t)room);
        if (section_of) r->section_of = section_of;
        if (!found || !section_of) {
            Py_DECREF(value);
            return -1;
        }
        r->room = room;
    }
    r->found[r->count] = value;
    r->section_of[r->count++] = (u8)section;
    return 0;
}

static int add_plain(Reader *r, int section, PyObject *type) {
    PyObject *fields[VALUE_FIELDS] = {[TYPE] = Py_NewRef(type)};
    return add(r, section, fields);
}

/* --- leaves --- */

typedef struct {
    PyObject *dtype, *shape, *gradient, *checksum, *statistics[STATISTICS];
    int64_t numel;
    int float_dtype;
} Tensor;

static int sizes(Reader *r, Tensor *tensor) {
    PyObject *found[MOST_DIMS];
    Py_ssize_t count = 0;
    int going = take(r, '[') ? -1 : next(r) == ']' ? more(r, ']') : 1;
    tensor->numel = 1;
    while (going > 0) {
        const u8 *start = (next(r), r->p);
        int64_t size = 0;
        while (r->p < r->end && is_digit(*r->p) && r->p - start < 19) size = 10 * size + (*r->p++ - '0');
        Py_ssize_t digits = r->p - start;
        int bad = digits < 1 || digits > 18 || (*start == '0' && digits > 1) || count == MOST_DIMS ||
                  __builtin_mul_overflow(tensor->numel, size, &tensor->numel);
        going = bad || !(found[count] = PyLong_FromLongLong(size)) ? -1 : (count++, more(r, ']'));
    }
    tensor->shape = going ? NULL : PyTuple_New(count);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (tensor->shape) PyTuple_SetItem(tensor->shape, i, found[i]);
        else Py_DECREF(found[i]);
    }
    return tensor->shape ? 0 : -1;
}

static int checksum(Reader *r, Tensor *tensor) {
    Text found;
    if (next(r) == 'n') return word(r, "null");
    if (text(r, &found) || found.size != 8) return -1;
    long long sum = 0;
    for (int i = 0; i < 8; i++) {
        u8 c = found.at[i], letter = c | 32;
        if (!is_digit(c) && (letter < 'a' || letter > 'f')) return -1;
        sum = 16 * sum + (is_digit(c) ? c - '0' : letter - 'a' + 10);
    }
    return (tensor->checksum = PyLong_FromLongLong(sum)) ? 0 : -1;
}

/* A statistic: a number, null, or one of the words that JSON lacks. */
static PyObject *statistic(Reader *r) {
    switch (next(r)) {
    case 'N': return word(r, "NaN") ? NULL : PyFloat_FromDouble(NAN);
    case 'I': return word(r, "Infinity") ? NULL : PyFloat_FromDouble(INFINITY);
    case '"': return NULL;
    case '-':
        if (!word(r, "-Infinity")) return PyFloat_FromDouble(-INFINITY);
    }
    return plain(r, 0);
}

static PyObject *truth_or_null(Reader *r) {
    u8 c = next(r);
    return c == 'n' || c == 't' || c == 'f' ? plain(r, 0) : NULL;
}

static int has_float(Text text) {
    for (Py_ssize_t i = 0; i + 5 <= text.size; i++)
        if (!memcmp(text.at + i, "float", 5)) return 1;
    return 0;
}

/* One member of a tensor behind its key. */
static int member(Reader *r, Text key, Tensor *tensor, unsigned *seen) {
    static const char *const keys[] = {"Max",   "Min",           "Mean", "Norm",     "dtype",
                                       "shape", "requires_grad", "md5",  "data_name"};
    unsigned which = 0, count = sizeof keys / sizeof *keys;
    while (which < count && !is(key, keys[which])) which++;
    if (which == count || *seen >> which & 1) return -1;
    *seen |= 1u << which;
    Text found;
    switch (which) {
    case 4:
        if (next(r) == 'n') return word(r, "null");
        if (text(r, &found)) return -1;
        tensor->float_dtype = has_float(found);
        return (tensor->dtype = shared(r->leaves, found)) ? 0 : -1;
    case 5: return sizes(r, tensor);
    case 6: return (tensor->gradient = truth_or_null(r)) ? 0 : -1;
    case 7: return checksum(r, tensor);
    /* A tensor with a file of its own is for Python to look up. */
    case 8: return next(r) == 'n' ? word(r, "null") : text(r, &found) || !is(found, "-1") ? -1 : 0;
    default: return (tensor->statistics[which] = statistic(r)) ? 0 : -1;
    }
}

/* What the numbers say; a new reference, None if there are none. */
static PyObject *statistics(Leaves *leaves, Tensor *tensor) {
    PyObject *fields[TOLD_FIELDS] = {NULL};
    int known = 0;
    if (!tensor->numel) return Py_NewRef(leaves->empty);
    for (int i = 0; i < STATISTICS; i++) {
        PyObject *number = tensor->statistics[i];
        if (!number || number == Py_None) continue;
        known = 1;
        if (!PyFloat_Check(number)) {
            if (tensor->float_dtype) return NULL;
            if (PyBool_Check(number)) {
                tensor->statistics[i] = PyLong_FromLong(number == Py_True);
                Py_DECREF(number);
                if (!(number = tensor->statistics[i])) return NULL;
            }
        }
        if (i == STATISTICS - 1) {
            /* The Norm of a tensor without dimensions is its element there, sign and all. */
            double norm = fabs(PyFloat_AsDouble(number));
            tensor->statistics[i] = PyFloat_FromDouble(norm);
            Py_DECREF(number);
            if (!tensor->statistics[i]) return NULL;
        }
    }
    if (!known) return Py_NewRef(Py_None);
    memcpy(fields + 1, tensor->statistics, sizeof tensor->statistics);
    if (!(fields[0] = PyLong_FromLongLong(tensor->numel))) return NULL;
    PyObject *found = made(&leaves->told, fields, TOLD_FIELDS);
    Py_DECREF(fields[0]);
    return found;
}

/* The rest of a tensor behind its type, of which `key` is the first key; takes the type. */
static int tensor_leaf(Reader *r, int section, PyObject *type, Text key) {
    Tensor tensor = {NULL};
    PyObject *stats = NULL;
    unsigned seen = 0;
    int going = 1;
    while (going > 0) {
        going = take(r, ':') || member(r, key, &tensor, &seen) ? -1 : more(r, '}');
        if (going > 0 && text(r, &key)) going = -1;
    }
    int failed = going || !tensor.shape || !(stats = statistics(r->leaves, &tensor));
    for (int i = 0; i < STATISTICS; i++) Py_XDECREF(tensor.statistics[i]);
    PyObject *fields[VALUE_FIELDS] = {[TYPE] = type,
                                      [DTYPE] = tensor.dtype,
                                      [SHAPE] = tensor.shape,
                                      [GRADIENT] = tensor.gradient,
                                      [STATS] = stats,
                                      [CHECKSUM] = tensor.checksum};
    if (!failed) return add(r, section, fields);
    for (int i = 0; i < VALUE_FIELDS; i++) Py_XDECREF(fields[i]);
    return -1;
}

/* A leaf behind its key "type". */
static int leaf(Reader *r, int section) {
    Text name, key;
    if (text(r, &name)) return -1;
    int going = more(r, '}');
    if (going < 0 || (going && text(r, &key))) return -1;
    int has_value = going && is(key, "value"), is_tensor = going && !has_value;
    int dropped = r->backward && is(name, "NoneType");
    if ((has_value && is(name, "torch.device")) || (dropped && is_tensor)) return -1;
    PyObject *type = shared(r->leaves, name), *scalar = NULL;
    if (!type) return -1;
    if (is_tensor) return tensor_leaf(r, section, type, key);
    if (has_value) {
        scalar = take(r, ':') ? NULL : plain(r, 8);
        if (!scalar || take(r, '}')) going = -1;
    }
    if (dropped || going < 0) {
        Py_XDECREF(scalar);
        Py_DECREF(type);
        return going < 0 ? -1 : 0;
    }
    PyObject *fields[VALUE_FIELDS] = {[TYPE] = type, [SCALAR] = scalar};
    return add(r, section, fields);
}

static int node(Reader *r, int section);

/* A node below the one that is read, at a step that is taken over. */
static int below(Reader *r, int section, PyObject *step) {
    if (!step || r->depth == DEPTH) {
        Py_XDECREF(step);
        return -1;
    }
    r->path[r->depth++] = step;
    int failed = node(r, section);
    Py_DECREF(r->path[--r->depth]);
    return failed;
}

static int list(Reader *r, int section) {
    r->p++;
    if (next(r) == ']') {
        r->p++;
        return r->depth ? add_plain(r, section, r->leaves->list) : 0;
    }
    int going = 1;
    for (long place = 0; going > 0; place++)
        going = below(r, section, PyLong_FromLong(place)) ? -1 : more(r, ']');
    return going;
}

/* A leaf, or an object of nodes. */
static int object(Reader *r, int section) {
    Text keys[MOST_KEYS];
    r->p++;
    if (next(r) == '}') {
        r->p++;
        return r->depth ? add_plain(r, section, r->leaves->object) : 0;
    }
    for (int count = 0; count < MOST_KEYS; count++) {
        if (text(r, &keys[count]) || take(r, ':')) return -1;
        if (is(keys[count], "type")) {
            if (count) return -1;
            if (r->depth) return leaf(r, section);
            /* A value that stands alone in its section is the first. */
            r->path[r->depth++] = PyLong_FromLong(0);
            int failed = leaf(r, section);
            Py_DECREF(r->path[--r->depth]);
            return failed;
        }
        for (int other = 0; other < count; other++)
            if (same(keys[other], keys[count])) return -1;
        int going = below(r, section, shared(r->leaves, keys[count])) ? -1 : more(r, '}');
        if (going < 1) return going;
    }
    return -1;
}

static int node(Reader *r, int section) {
    switch (next(r)) {
    case '{': return object(r, section);
    case '[': return list(r, section);
    case 'n':
        if (word(r, "null")) return -1;
        return r->depth && !r->backward ? add_plain(r, section, r->leaves->none) : 0;
    default: return -1;
    }
}

static int section_named(Leaves *leaves, Text key) {
    for (Py_ssize_t i = 0; i < leaves->sections; i++) {
        Py_ssize_t size;
        const char *name = PyUnicode_AsUTF8AndSize(leaves->section[i].name, &size);
        if (name && size == key.size && !memcmp(name, key.at, (size_t)size)) return (int)i;
    }
    return -1;
}

static int entry(Reader *r) {
    unsigned seen = 0;
    Text key;
    if (take(r, '{')) return -1;
    int going = 1;
    while (going > 0) {
        if (text(r, &key) || take(r, ':')) return -1;
        int section = section_named(r->leaves, key);
        if (section < 0 || seen >> section & 1 || node(r, section)) return -1;
        seen |= 1u << section;
        going = more(r, '}');
    }
    return going || r->p != r->end ? -1 : 0;
}

static PyObject *in_order(Reader *r) {
    PyObject *found = PyTuple_New(r->count);
    Py_ssize_t place = 0;
    for (int section = 0; found && section < SECTIONS; section++)
        for (Py_ssize_t i = 0; i < r->count; i++)
            if (r->section_of[i] == section) PyTuple_SetItem(found, place++, Py_NewRef(r->found[i]));
    return found;
}

static PyObject *leaves_read(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 4) return PyErr_Format(PyExc_TypeError, "4 arguments were expected, %zd are given", count);
    Py_ssize_t start = PyLong_AsSsize_t(args[1]), stop = PyLong_AsSsize_t(args[2]);
    Py_buffer raw;
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &raw, PyBUF_SIMPLE)) return NULL;
    PyObject *found = NULL;
    if (start >= 0 && start <= stop && stop <= raw.len) {
        const u8 *bytes = raw.buf;
        Reader reader = {.p = bytes + start, .end = bytes + stop, .leaves = (Leaves *)self};
        reader.backward = args[3] == Py_True;
        if (!entry(&reader)) found = in_order(&reader);
        for (Py_ssize_t i = 0; i < reader.count; i++) Py_DECREF(reader.found[i]);
        free(reader.found);
        free(reader.section_of);
    }
    PyBuffer_Release(&raw);
    if (found) return found;
    /* Python finds the same mistake, and has words for it. */
    PyErr_Clear();
    return Py_NewRef(Py_None);
}

/* --- the object --- */

static int prepare(Maker *maker, PyObject *type, const char *const *fields, int count) {
    PyObject *slots = PyObject_GetAttrString(type, "__slots__");
    Py_ssize_t size = slots ? PyObject_Size(slots) : -1;
    Py_XDECREF(slots);
    if (size != count || !PyType_Check(type)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "the class has other fields than _leaves.c knows");
        return -1;
    }
    maker->type = (PyTypeObject *)Py_NewRef(type);
    for (int i = 0; i < count; i++)
        if (!(maker->members[i] = PyObject_GetAttrString(type, fields[i]))) return -1;
    maker->set = (descrsetfunc)PyType_GetSlot(Py_TYPE(maker->members[0]), Py_tp_descr_set);
    for (int i = 0; i < count; i++)
        if (!maker->set || Py_TYPE(maker->members[i]) != Py_TYPE(maker->members[0])) {
            PyErr_SetString(PyExc_TypeError, "the class has fields without slots");
            return -1;
        }
    return 0;
}

static void leaves_dealloc(PyObject *self) {
    Leaves *leaves = (Leaves *)self;
    PyTypeObject *type = Py_TYPE(self);
    for (int i = 0; i < VALUE_FIELDS; i++) {
        Py_XDECREF(leaves->value.members[i]);
        Py_XDECREF(leaves->told.members[i]);
    }
    PyObject *held[] = {(PyObject *)leaves->value.type, (PyObject *)leaves->told.type, leaves->slot, leaves->empty,
                        leaves->list,                   leaves->object,                leaves->none};
    for (size_t i = 0; i < sizeof held / sizeof *held; i++) Py_XDECREF(held[i]);
    for (int i = 0; i < SECTIONS; i++) {
        Py_XDECREF(leaves->section[i].name);
        Py_XDECREF(leaves->section[i].role);
        Py_XDECREF(leaves->section[i].slots);
    }
    for (int i = 0; i < TEXTS; i++) Py_XDECREF(leaves->texts[i]);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyObject *leaves_new(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    PyObject *value, *slot, *told, *empty, *sections;
    if (!PyArg_ParseTuple(args, "OOOOO!", &value, &slot, &told, &empty, &PyTuple_Type, &sections)) return NULL;
    Leaves *leaves = (Leaves *)PyType_GenericAlloc(type, 0);
    if (!leaves) return NULL;
    leaves->slot = Py_NewRef(slot), leaves->empty = Py_NewRef(empty);
    leaves->list = PyUnicode_InternFromString("list"), leaves->object = PyUnicode_InternFromString("object");
    leaves->none = PyUnicode_InternFromString("NoneType");
    leaves->sections = PyTuple_Size(sections);
    int failed = !leaves->list || !leaves->object || !leaves->none || leaves->sections > SECTIONS ||
                 prepare(&leaves->value, value, value_fields, VALUE_FIELDS) ||
                 prepare(&leaves->told, told, told_fields, TOLD_FIELDS);
    for (Py_ssize_t i = 0; !failed && i < leaves->sections; i++) {
        PyObject *name, *role;
        if ((failed = !PyArg_ParseTuple(PyTuple_GetItem(sections, i), "UO", &name, &role))) break;
        leaves->section[i].name = Py_NewRef(name), leaves->section[i].role = Py_NewRef(role);
        failed = !(leaves->section[i].slots = PyDict_New());
    }
    if (!failed) return (PyObject *)leaves;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "too many sections");
    Py_DECREF(leaves);
    return NULL;
}

/* --- entries --- */

/* Behind the object or list at p: brackets are counted outside of strings.  NULL if it does not end. */
static const u8 *behind(const u8 *p, const u8 *end) {
    static const signed char steps[256] = {['{'] = 1, ['['] = 1, ['}'] = -1, [']'] = -1, ['"'] = 2};
    for (Py_ssize_t depth = 0; p < end; p++) {
        int step = steps[*p];
        if (!step) continue;
        if (step == 2) {
            for (p++; p < end && *p != '"'; p++) p += *p == '\\';
        } else if (!(depth += step)) {
            return p + 1;
        }
    }
    return NULL;
}

static PyObject *entries(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    if (count != 4) return PyErr_Format(PyExc_TypeError, "4 arguments were expected, %zd are given", count);
    Py_ssize_t start = PyLong_AsSsize_t(args[1]), enough = PyLong_AsSsize_t(args[2]);
    Py_buffer raw;
    if (PyErr_Occurred() || !PyList_Check(args[3]) || PyObject_GetBuffer(args[0], &raw, PyBUF_SIMPLE)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "the names go to a list");
        return NULL;
    }
    const u8 *bytes = raw.buf, *done = bytes + start;
    Reader r = {.p = done, .end = bytes + raw.len};
    uint64_t *spans = NULL;
    size_t found = 0, room = 0;
    while (start >= 0 && start < raw.len && r.p - bytes - start < enough) {
        Text key;
        if (text(&r, &key) || take(&r, ':') || (next(&r) != '{' && *r.p != '[')) break;
        const u8 *value = r.p, *end = behind(value, r.end);
        r.p = end ? end : r.end;
        if (!end || next(&r) != ',') break;
        if (found == room) {
            room = room ? 2 * room : 1024;
            uint64_t *more = realloc(spans, room * 2 * sizeof *spans);
            if (!more) break;
            spans = more;
        }
        PyObject *name = PyUnicode_DecodeUTF8((const char *)key.at, key.size, NULL);
        if (!name || PyList_Append(args[3], name)) {
            Py_XDECREF(name);
            break;
        }
        Py_DECREF(name);
        spans[2 * found] = (uint64_t)(value - bytes), spans[2 * found++ + 1] = (uint64_t)(end - bytes);
        done = ++r.p;
    }
    PyErr_Clear();
    Py_ssize_t at = done - bytes;
    PyBuffer_Release(&raw);
    Py_ssize_t size = (Py_ssize_t)(found * 2 * sizeof *spans);
    PyObject *answer = Py_BuildValue("y#n", spans ? (const char *)spans : "", size, at);
    free(spans);
    return answer;
}

static PyMethodDef leaves_methods[] = {
    {"read", (PyCFunction)(void (*)(void))leaves_read, METH_FASTCALL, "The values of an entry, or None."},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot leaves_slots[] = {
    {Py_tp_new, (void *)leaves_new},
    {Py_tp_dealloc, (void *)leaves_dealloc},
    {Py_tp_methods, leaves_methods},
    {0, NULL},
};
static PyType_Spec leaves_spec = {.name = "ulpscope.store.formats._leaves.Leaves",
                                  .basicsize = sizeof(Leaves),
                                  .flags = Py_TPFLAGS_DEFAULT,
                                  .slots = leaves_slots};

static int execute(PyObject *module) {
    PyObject *type = PyType_FromSpec(&leaves_spec);
    int failed = !type || PyModule_AddObject(module, "Leaves", type);
    if (failed) Py_XDECREF(type);
    return failed ? -1 : 0;
}
static PyMethodDef methods[] = {
    {"entries", (PyCFunction)(void (*)(void))entries, METH_FASTCALL, "Names and places of entries."},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};
static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "_leaves", .m_methods = methods, .m_slots = slots};
PyMODINIT_FUNC PyInit__leaves(void) { return PyModuleDef_Init(&definition); }
