/* Numbers for the values of a step: what each is, its measure, a text. */
#include "capture.h"

enum { MOST_KEPT = 200000, SWEEP = 10000, MOST_FLAT = 64 };

int is_tensor(const Fast *f, PyObject *value) {
    return (PyObject *)Py_TYPE(value) == f->given[TENSOR] ||
           (PyObject *)Py_TYPE(value) == f->given[PARAMETER];
}
static int is_scalar(PyObject *value) {
    return value == Py_None || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
           PyBool_Check(value) || PyUnicode_CheckExact(value);
}
int is_plain(const Fast *f, PyObject *value) {
    if (is_scalar(value) || PySlice_Check(value)) return 1;
    int known = PySet_Contains(f->given[OTHERS], (PyObject *)Py_TYPE(value));
    if (known < 0) PyErr_Clear(); /* a class without a hash */
    return known > 0;
}
static int is_empty(PyObject *value) {
    return (PyTuple_CheckExact(value) || PyList_CheckExact(value)) && !PySequence_Size(value);
}
/* A list or tuple of plain things and tensors, of which `leaves` would give each: not so of many
 * that are all plain. */
static int is_flat(const Fast *f, PyObject *value) {
    Py_ssize_t size =
        PyTuple_CheckExact(value) || PyList_CheckExact(value) ? PySequence_Size(value) : 0;
    int tensors = 0;
    if (size < 1) return 0;
    for (Py_ssize_t at = 0; at < size; at++) {
        PyObject *item = PySequence_GetItem(value, at);
        int tensor = item && is_tensor(f, item), flat = tensor || (item && is_plain(f, item));
        Py_XDECREF(item);
        if (!flat) return 0;
        tensors |= tensor;
    }
    return tensors || size <= MOST_FLAT;
}
/* The entry of what can be told of a value of which only the class can be told; -2 where there is
 * more, -1 after an error. */
static int64_t opaque_entry(Fast *f, PyObject *value) {
    PyObject *kind = (PyObject *)Py_TYPE(value);
    int64_t entry = indexed(f->opaque, kind);
    if (entry == -1 && PyErr_ExceptionMatches(PyExc_Exception))
        return PyErr_Clear(), -2; /* a class without a hash */
    if (entry != -2) return entry == NONE32 ? -2 : entry;
    PyObject *text = PyObject_CallMethodObjArgs(f->given[MEASURER], word[OPAQUE_TEXT], value, NULL);
    entry = !text ? -1 : text == Py_None ? NONE32 : json_entry(f, text);
    Py_XDECREF(text);
    if (entry < 0 || index_put(f->opaque, kind, entry)) return -1;
    return entry == NONE32 ? -2 : entry;
}
int visit_leaves(Fast *f, PyObject *value, PyObject *path, Visit visit, void *to) {
    if (is_tensor(f, value) || is_plain(f, value) || is_empty(value))
        return visit(f, to, path, value);
    int64_t opaque = opaque_entry(f, value);
    if (opaque != -2) return opaque < 0 ? -1 : visit(f, to, path, value);
    int failed = 0;
    if (is_flat(f, value)) {
        for (Py_ssize_t at = 0; !failed && at < PySequence_Size(value); at++) {
            PyObject *item = PySequence_GetItem(value, at), *step = place_path(at),
                     *full = step ? PySequence_Concat(path, step) : NULL;
            failed = !item || !full || visit(f, to, full, item);
            Py_XDECREF(item), Py_XDECREF(step), Py_XDECREF(full);
        }
        return failed ? -1 : 0;
    }
    PyObject *found = PyObject_CallMethodObjArgs(f->given[MEASURER], word[LEAVES], value, NULL),
             *pair;
    failed = !found;
    while (!failed && (pair = PyIter_Next(found))) {
        PyObject *full = PySequence_Concat(path, PyTuple_GetItem(pair, 0));
        failed = !full || visit(f, to, full, PyTuple_GetItem(pair, 1));
        Py_XDECREF(full), Py_DECREF(pair);
    }
    Py_XDECREF(found);
    return failed || PyErr_Occurred() ? -1 : 0;
}

/* Numbers that a method of the measurer has found. */
static int told_row(Fast *f, int method, PyObject *value, uint32_t row[3]) {
    PyObject *told = PyObject_CallMethodObjArgs(f->given[MEASURER], word[method], value, NULL);
    int failed = !told || !PyArg_ParseTuple(told, "III", row, row + 1, row + 2);
    Py_XDECREF(told);
    return failed ? -1 : 0;
}

/* A plain value whose texts are kept under a key. */
static int kept_row(Fast *f, PyObject *index, PyObject *key, PyObject *value, uint32_t row[3]) {
    /* The dictionary keeps the key that it was first given, so that its address stays its own. */
    uint64_t *met = table_find(&f->scalars_met, (uint64_t)key, (uint64_t)index, 0),
             both = met ? *met : 0;
    PyObject *found = met ? NULL : PyDict_GetItemWithError(index, key);
    if (!met && !found) {
        PyObject *texts = PyErr_Occurred() ? NULL
                                           : PyObject_CallMethodObjArgs(f->given[MEASURER],
                                                 word[SCALAR_TEXTS], value, NULL),
                 *a, *b;
        if (!texts || !PyArg_ParseTuple(texts, "OO", &a, &b)) {
            Py_XDECREF(texts);
            return -1;
        }
        int64_t one = json_entry(f, a), two = one < 0 ? -1 : json_entry(f, b);
        Py_DECREF(texts);
        both = (uint64_t)one << 32 | (uint32_t)two;
        if (two < 0 || index_put(index, key, (int64_t)both) ||
            table_put(&f->scalars_met, (uint64_t)key, (uint64_t)index, 0, both))
            return -1;
    } else if (found)
        both = PyLong_AsUnsignedLongLong(found);
    if (met) GONE(known_scalars);
    int64_t type = text_number(f, (int64_t)(both >> 32)),
            text = text_number(f, (int64_t)(both & NONE32));
    row[0] = (uint32_t)type, row[1] = NONE32, row[2] = (uint32_t)text;
    return type < 0 || text < 0 ? -1 : 0;
}

static int scalar_row(Fast *f, PyObject *value, uint32_t row[3]) {
    int kind = PyBool_Check(value)           ? 1
               : PyLong_CheckExact(value)    ? 0
               : PyUnicode_CheckExact(value) ? 2
               : value == Py_None            ? 3
                                             : 4;
    PyObject *index = f->scalars[kind];
    if (kind == 4) {
        double number = PyFloat_AsDouble(value);
        if (number != number ||
            number == 0) { /* 0.0 and -0.0 are not the same, and no nan is the same as itself */
            PyObject *text = PyObject_Repr(value);
            int failed = text ? kept_row(f, index, text, value, row) : -1;
            Py_XDECREF(text);
            return failed;
        }
    }
    return kept_row(f, index, value, value, row);
}
static int slice_row(Fast *f, PyObject *value, uint32_t row[3]) {
    PyObject *start = GET(value, START), *stop = GET(value, STOP), *step = GET(value, STEP);
    int plain = start && stop && step;
    PyObject *const parts[] = {start, stop, step};
    for (int i = 0; plain && i < 3; i++) plain = parts[i] == Py_None || PyLong_CheckExact(parts[i]);
    PyObject *key = plain ? PyTuple_Pack(3, start, stop, step) : NULL;
    int failed = PyErr_Occurred() ? -1
                 : key            ? kept_row(f, f->scalars[6], key, value, row)
                                  : told_row(f, OTHER, value, row);
    Py_XDECREF(start), Py_XDECREF(stop), Py_XDECREF(step), Py_XDECREF(key);
    return failed;
}

/* What only Python knows of tensors that are alike: the first of them is looked at. */
static int read_meta(Fast *f, PyObject *made, Meta *meta) {
    PyObject *facts = GET(made, FACTS), *layout = NULL;
    int64_t entry = facts ? json_entry(f, facts) : -1;
    Py_XDECREF(facts);
    int plain = entry < 0 ? -1 : truth_of(GET(made, PLAIN));
    meta->facts = (uint32_t)entry;
    meta->plain = plain > 0;
    if (plain <= 0) return plain;
    meta->itemsize = (uint64_t)number_of(GET(made, ITEMSIZE));
    meta->nbytes = (uint64_t)number_of(GET(made, NBYTES));
    meta->extent = (uint64_t)number_of(GET(made, EXTENT));
    meta->code = (long)number_of(GET(made, CODE));
    if (!(layout = GET(made, LAYOUT))) return -1;
    int64_t number = indexed(f->layouts, layout);
    if (number == -2) {
        number = PyDict_Size(f->layouts) + 1;
        if (index_put(f->layouts, layout, number)) number = -1;
    }
    Py_DECREF(layout);
    meta->layout = (uint32_t)number;
    meta->lane = GET(made, LANE);
    meta->recipe = GET(made, RECIPE);
    return PyErr_Occurred() ? -1 : 0;
}
static int read_sizes(PyObject *shape, PyObject *stride, Meta *meta) {
    Py_ssize_t dim = PyTuple_Size(shape);
    meta->dim = dim;
    if (dim > MOST_DIMS) return 0;
    meta->sizes = malloc(sizeof *meta->sizes * (2 * (size_t)dim + 1));
    if (!meta->sizes) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t at = 0; at < dim; at++) {
        meta->sizes[at] = PyLong_AsLongLong(PyTuple_GetItem(shape, at));
        meta->sizes[dim + at] = PyLong_AsLongLong(PyTuple_GetItem(stride, at));
    }
    return PyErr_Occurred() ? -1 : 0;
}
static void drop_meta(Meta *meta) {
    Py_CLEAR(meta->python);
    Py_CLEAR(meta->lane);
    Py_CLEAR(meta->recipe);
    free(meta->sizes);
    meta->sizes = NULL;
}
static int64_t new_meta(Fast *f, PyObject *key, PyObject *value) {
    Meta meta = {.like = {-1}};
    meta.python = PyObject_CallMethodObjArgs(f->given[MEASURER], word[NEW_META], key, value, NULL);
    if (!meta.python || read_meta(f, meta.python, &meta)) goto failed;
    if (read_sizes(PyTuple_GetItem(key, 2), PyTuple_GetItem(key, 3), &meta)) goto failed;
    int is_complex = truth_of(ASK(value, IS_COMPLEX));
    if (is_complex < 0) goto failed;
    meta.is_complex = (char)is_complex;
    if (grow(&f->metas, &f->meta_room, f->meta_count + 1, sizeof *f->metas)) goto failed;
    if (index_put(f->metas_index, key, (int64_t)f->meta_count)) goto failed;
    f->metas[f->meta_count] = meta;
    return (int64_t)f->meta_count++;
failed:
    drop_meta(&meta);
    return -1;
}
static int64_t meta_told(Fast *f, PyObject *value, int requires_grad) {
    PyObject *dtype = GET(value, DTYPE), *shape = dtype ? GET(value, SHAPE) : NULL;
    PyObject *stride = shape ? ASK(value, STRIDE) : NULL,
             *device = stride ? GET(value, DEVICE) : NULL;
    PyObject *key = NULL;
    if (device)
        key = PyTuple_Pack(6, (PyObject *)Py_TYPE(value), dtype, shape, stride, device,
            requires_grad ? Py_True : Py_False);
    Py_XDECREF(dtype);
    Py_XDECREF(shape);
    Py_XDECREF(stride);
    Py_XDECREF(device);
    int64_t found = key ? indexed(f->metas_index, key) : -1;
    if (found == -2) found = new_meta(f, key, value);
    Py_XDECREF(key);
    return found;
}
/* The number of what is known of all tensors like this one, and where in its memory it begins; -1
 * after an error. */
static int64_t meta_of(Fast *f, PyObject *value, int requires_grad, uint64_t *offset) {
    Form form;
    int known = tensor_form(value, &form);
    if (known <= 0) {
        int64_t at = known < 0 ? -1 : meta_told(f, value, requires_grad);
        if (at >= 0 && f->metas[at].plain)
            *offset = (uint64_t)number_of(ASK(value, STORAGE_OFFSET));
        return PyErr_Occurred() ? -1 : at;
    }
    *offset = form.offset;
    uint64_t mark = 0x9E3779B97F4A7C15u, type = (uint64_t)Py_TYPE(value) | (uint64_t)requires_grad;
    for (size_t i = 0; i < form.count; i++) {
        mark = (mark ^ (uint64_t)form.numbers[i]) * 0xBF58476D1CE4E5B9u;
        mark ^= mark >> 29;
    }
    uint64_t *found = table_find(&f->forms, mark | 1, type, 0);
    size_t size = sizeof *form.numbers * (form.count - FORM_HEAD);
    if (found) {
        const Meta *meta = f->metas + *found;
        int same = !memcmp(meta->like, form.numbers, sizeof meta->like);
        if (same && meta->sizes && !memcmp(meta->sizes, form.numbers + FORM_HEAD, size)) {
            GONE(known_forms);
            return (int64_t)*found;
        }
    }
    int64_t at = meta_told(f, value, requires_grad);
    if (at < 0 || found) return at; /* two forms with one mark: the second is not kept */
    memcpy(f->metas[at].like, form.numbers, sizeof f->metas[at].like);
    return table_put(&f->forms, mark | 1, type, 0, (uint64_t)at) ? -1 : at;
}

static Seen *seen_find(
    Fast *f, const Table *table, uint64_t a, uint64_t b, uint64_t c, PyObject *owner) {
    uint64_t *at = table_find(table, a, b, c);
    if (!at) return NULL;
    Seen *seen = f->seen + *at;
    return seen->weak && PyWeakref_GetObject(seen->weak) == owner ? seen : NULL;
}
static void sweep(Fast *f) {
    size_t kept = 0;
    table_empty(&f->seen_at), table_empty(&f->known);
    for (size_t i = 0; i < f->seen_count; i++) {
        Seen *seen = f->seen + i;
        if (!seen->weak || PyWeakref_GetObject(seen->weak) == Py_None) {
            Py_XDECREF(seen->weak);
            continue;
        }
        f->seen[kept] = *seen;
        table_put(
            seen->key[1] ? &f->known : &f->seen_at, seen->key[0], seen->key[1], seen->key[2], kept);
        kept++;
    }
    f->seen_count = kept, f->sweep_at = 2 * kept + SWEEP;
}
static int remember(Fast *f, PyObject *owner, int is_part, const Seen *seen) {
    if (f->seen_count >= f->sweep_at) sweep(f);
    Table *table = is_part ? &f->known : &f->seen_at;
    uint64_t key[3] = {(uint64_t)owner, is_part ? seen->offset + 1 : 0, is_part ? seen->layout : 0};
    uint64_t *old = table_find(table, key[0], key[1], key[2]);
    size_t at = old ? *old : f->seen_count;
    if (!old && grow(&f->seen, &f->seen_room, at + 1, sizeof *f->seen)) return -1;
    PyObject *weak = PyWeakref_NewRef(owner, NULL);
    if (!weak || (!old && table_put(table, key[0], key[1], key[2], at))) {
        Py_XDECREF(weak);
        return -1;
    }
    if (old)
        Py_XDECREF(f->seen[at].weak);
    else
        f->seen_count++;
    f->seen[at] = *seen;
    f->seen[at].weak = weak;
    memcpy(f->seen[at].key, key, sizeof key);
    return 0;
}
void forget_values(Fast *f) {
    for (size_t i = 0; i < f->seen_count; i++) Py_CLEAR(f->seen[i].weak);
    f->seen_count = 0, f->sweep_at = SWEEP;
    table_clear(&f->seen_at), table_clear(&f->known);
}

/* torch refuses to swap a tensor that has a weak reference. */
void release_value(Fast *f, PyObject *value) {
    for (size_t i = 0; i < f->seen_count; i++)
        if (f->seen[i].key[0] == (uint64_t)value) Py_CLEAR(f->seen[i].weak);
}

static int is_distrusted(const Fast *f, uint64_t memory) {
    return f->distrusted.used && memory && table_find(&f->distrusted, memory, 0, 0) != NULL;
}

/* Whether a tensor that torch has not just returned has its memory, and torch alone may write it,
 * which matters where it is not measured again; -1 after an error. */
static int is_safe(
    const Fast *f, PyObject *value, const Meta *meta, uint64_t offset, int reusable) {
    PyObject *storage = ASK(value, UNTYPED_STORAGE);
    int safe = storage ? 1 : -1;
    uint64_t wanted = (offset + meta->extent) * meta->itemsize;
    if (storage && (uint64_t)number_of(ASK(storage, NBYTES)) < wanted) safe = 0;
    if (safe > 0 && reusable)
        safe = truth_of(PyObject_CallFunctionObjArgs(f->given[RESIZABLE], storage, NULL));
    Py_XDECREF(storage);
    return PyErr_Occurred() ? -1 : safe;
}
static int64_t measure_here(Fast *f, const Meta *meta, uint64_t pointer) {
    Frames *frames = (Frames *)f->given[FRAMES];
    const MeasureForC *function = PyCapsule_GetPointer(f->given[MEASURE], MEASURE_FOR_C);
    const int64_t *sizes = meta->sizes, *strides = sizes + meta->dim;
    Measured asked = {(const void *)(uintptr_t)pointer, meta->code, f->measure_flags, meta->dim,
        sizes, strides, frames->sketch_size};
    _Alignas(16) char row[MOST_OF_ROW];
    Py_ssize_t size = function ? (*function)(&asked, row) : -1;
    GONE(measured);
    return size < 0 ? -1 : frames_measure(frames, row, (size_t)size);
}
static int64_t measure(Fast *f, PyObject *value, const Meta *meta, uint64_t pointer) {
    int64_t number = -2;
    if (meta->lane && is_lane(meta->lane))
        number = queue_measure(f, meta->lane, meta->recipe, value, pointer);
    if (number != -2) return number;
    if (meta->sizes && f->given[MEASURE] != Py_None && meta->lane == Py_None)
        return measure_here(f, meta, pointer);
    PyObject *place = PyLong_FromUnsignedLongLong(pointer), *told = NULL;
    if (place)
        told = PyObject_CallMethodObjArgs(
            f->given[MEASURER], word[TAKE], value, place, meta->python, NULL);
    Py_XDECREF(place);
    return number_of(told);
}

/* Whether a tensor that is alike others that are plain is not what its memory says; -1 after an
 * error. */
static int is_odd(PyObject *value, const Meta *meta) {
    int is_complex = meta->is_complex, odd = truth_of(ASK(value, IS_NEG));
    return odd || !is_complex ? odd : truth_of(ASK(value, IS_CONJ));
}
/* Whether it belongs to a transform that is under way; -1 after an error. */
static int is_wrapped(Fast *f, PyObject *value) {
    if (f->transform < 0) {
        PyObject *transform = PyObject_CallNoArgs(f->given[TRANSFORM]);
        if (!transform) return -1;
        f->transform = transform != Py_None;
        Py_DECREF(transform);
    }
    return f->transform ? truth_of(PyObject_CallFunctionObjArgs(f->given[WRAPPED], value, NULL))
                        : 0;
}
/* 1 where there is no version, as of inference tensors; -1 after an error. Torch raises then, which
 * takes time: where one was met, others are asked first. */
static int version_of(Fast *f, PyObject *value, uint64_t *to) {
    int inference = f->met_inference ? truth_of(ASK(value, IS_INFERENCE)) : 0;
    if (inference) return inference;
    *to = (uint64_t)number_of(GET(value, VERSION));
    if (!PyErr_Occurred()) return 0;
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return -1;
    PyErr_Clear();
    f->met_inference = 1;
    return 1;
}
/* Whether memory has, by its address, places that nobody has written. */
static int is_unwritten(const Fast *f, uint64_t memory) {
    if (!PyDict_Size(f->given[UNWRITTEN])) return 0;
    PyObject *key = PyLong_FromUnsignedLongLong(memory);
    PyObject *found = key ? PyDict_GetItemWithError(f->given[UNWRITTEN], key) : NULL;
    Py_XDECREF(key);
    if (!found) PyErr_Clear();
    return found != NULL;
}
/* The same of a tensor, in doubt 1. */
int may_be_unwritten(Fast *f, PyObject *value) {
    if (!PyDict_Size(f->given[UNWRITTEN]) || !is_tensor(f, value)) return 0;
    int doubt = truth_of(GET(value, IS_META)); /* of whose memory torch warns who asks for it */
    uint64_t offset = doubt ? 0 : (uint64_t)number_of(ASK(value, STORAGE_OFFSET));
    uint64_t item = doubt ? 0 : (uint64_t)number_of(ASK(value, ELEMENT_SIZE));
    uint64_t pointer = doubt ? 0 : (uint64_t)number_of(ASK(value, DATA_PTR));
    if (!PyErr_Occurred() && !doubt) return is_unwritten(f, pointer - offset * item);
    PyErr_Clear();
    return 1;
}

/* What is found out of a tensor before it is measured. */
typedef struct {
    PyObject *value, *base; /* of which it is a view, or None */
    Seen now;
    int64_t meta;
    int reusable; /* whether it need not be measured again */
} Looked;

/* Whether it was measured and nobody has written since: 0 with its row, 1 where not; -1 after an
 * error. */
static int known_row(Fast *f, PyObject *value, uint32_t row[3]) {
    const Seen *seen = seen_find(f, &f->seen_at, (uint64_t)value, 0, 0, value);
    Use use;
    if (!seen) return 1;
    if (tensor_use(value, &use)) return -1;
    if (seen->version != use.version || seen->pointer != use.pointer) return 1;
    if (seen->requires_grad != use.requires_grad || is_distrusted(f, seen->memory)) return 1;
    memcpy(row, seen->row, sizeof seen->row);
    GONE(known_tensors);
    return 0;
}
/* 1 where it is not ordinary, 2 where Python knows more of its memory; -1 after an error. */
static int look_at(Fast *f, Looked *it) {
    int odd = is_wrapped(f, it->value);
    if (odd) return odd;
    it->now.requires_grad = tensor_requires_grad(it->value);
    if (it->now.requires_grad < 0) return -1;
    it->meta = meta_of(f, it->value, it->now.requires_grad, &it->now.offset);
    if (it->meta < 0) return -1;
    const Meta *meta = f->metas + it->meta;
    if (!meta->plain) return 1;
    odd = is_odd(it->value, meta);
    if (odd) return odd;
    int inference = version_of(f, it->value, &it->now.version);
    if (inference < 0 || tensor_pointer(it->value, &it->now.pointer)) return -1;
    meta = f->metas + it->meta;
    it->now.memory = it->now.pointer - it->now.offset * meta->itemsize;
    it->now.layout = meta->layout;
    if (is_unwritten(f, it->now.memory)) return 2;
    if (meta->nbytes && !it->now.memory) return 1;
    it->reusable = f->reuse && !inference && !is_distrusted(f, it->now.memory);
    it->base = f->reuse ? tensor_base(it->value) : Py_NewRef(Py_None);
    return it->base ? 0 : -1;
}
/* Whether this part of the same memory was measured: 0 with its measure, 1 where not. */
static int known_part(Fast *f, const Looked *it, PyObject *owner, uint32_t row[3]) {
    const Seen *now = &it->now, *seen = seen_find(f, &f->seen_at, (uint64_t)owner, 0, 0, owner);
    if (!seen || seen->version != now->version || seen->offset != now->offset ||
        seen->layout != now->layout)
        seen = seen_find(f, &f->known, (uint64_t)owner, now->offset + 1, now->layout, owner);
    if (!seen || seen->version != now->version) return 1;
    row[1] = seen->row[1];
    GONE(known_parts);
    return 0;
}
/* Whether its memory can be trusted until somebody writes to it; Python says it where there is any
 * doubt, and raises where it has no memory. */
static int trusts(Fast *f, const Looked *it) {
    const Meta *meta = f->metas + it->meta;
    int safe = is_safe(f, it->value, meta, it->now.offset, it->reusable);
    if (safe) return safe < 0 ? -1 : it->reusable;
    PyObject *memory = PyLong_FromUnsignedLongLong(it->now.memory), *told = NULL;
    meta = f->metas + it->meta;
    if (memory)
        told = PyObject_CallMethodObjArgs(f->given[MEASURER], word[TRUSTS], it->value, meta->python,
            memory, it->reusable ? Py_True : Py_False, NULL);
    Py_XDECREF(memory);
    return truth_of(told);
}
static int measured_row(Fast *f, Looked *it, int produced, uint32_t row[3]) {
    PyObject *owner = it->base == Py_None ? it->value : it->base;
    int64_t facts = text_number(f, f->metas[it->meta].facts);
    if (facts < 0) return -1;
    row[0] = it->now.row[0] = (uint32_t)facts;
    row[2] = it->now.row[2] = NONE32;
    if (it->reusable && !known_part(f, it, owner, row)) return 0;
    if (!produced) it->reusable = trusts(f, it);
    if (it->reusable < 0) return -1;
    int64_t number = measure(f, it->value, f->metas + it->meta, it->now.pointer);
    if (PyErr_Occurred()) return -1;
    row[1] = it->now.row[1] = (uint32_t)number;
    return it->reusable && remember(f, owner, owner != it->value, &it->now) ? -1 : 0;
}
/* An ordinary tensor; 1 when it is not, 2 when Python knows more of its memory. */
static int tensor_row(Fast *f, PyObject *value, int produced, uint32_t row[3]) {
    Looked it = {.value = value};
    int status = known_row(f, value, row);
    if (status == 1 && !(status = look_at(f, &it))) status = measured_row(f, &it, produced, row);
    Py_XDECREF(it.base);
    return status;
}

/* What it is, its measure, and a text (a scalar, or why there is no measure). */
int value_row(Fast *f, PyObject *value, int produced, uint32_t row[3]) {
    if (!is_tensor(f, value)) {
        if (is_scalar(value)) return scalar_row(f, value, row);
        if (PySlice_Check(value)) return slice_row(f, value, row);
        if (is_empty(value))
            return kept_row(f, f->scalars[5], (PyObject *)Py_TYPE(value), value, row);
        int known = PySet_Contains(f->given[OTHERS], (PyObject *)Py_TYPE(value));
        if (known) return known < 0 ? -1 : kept_row(f, f->scalars[5], value, value, row);
        int64_t opaque = opaque_entry(f, value),
                number = opaque < 0 ? opaque : text_number(f, opaque);
        if (number == -2) return told_row(f, OTHER, value, row);
        row[0] = (uint32_t)number, row[1] = row[2] = NONE32;
        return number < 0 ? -1 : 0;
    }
    int result;
    /* Where kernels write without a trace, Python keeps count. */
    result = PyDict_Size(f->given[REWRITTEN_DICT]) ? 2 : tensor_row(f, value, produced, row);
    if (result == 2) {
        PyObject *told = PyObject_CallMethodObjArgs(
            f->given[MEASURER], word[PLAIN_ROW], value, produced ? Py_True : Py_False, NULL);
        result = !told || !PyArg_ParseTuple(told, "III", row, row + 1, row + 2) ? -1 : 0;
        Py_XDECREF(told);
        return result;
    }
    if (result < 0 &&
        (PyErr_ExceptionMatches(PyExc_RuntimeError) || PyErr_ExceptionMatches(PyExc_TypeError) ||
            PyErr_ExceptionMatches(PyExc_AttributeError))) {
        Raised r = take_raised();
        int meant = truth_of(PyObject_CallFunctionObjArgs(f->given[MEANT], r.error, NULL));
        if (meant > 0)
            PyErr_Restore(r.kind, r.error, r.trace);
        else
            drop_raised(&r);
        result = meant ? -1 : 1;
    }
    return result > 0 ? told_row(f, OTHER, value, row) : result;
}

void drop_metas(Fast *f) {
    for (size_t i = 0; i < f->meta_count; i++) drop_meta(f->metas + i);
    f->meta_count = 0;
    table_empty(&f->forms);
}

/* --- steps
 * -------------------------------------------------------------------------------------------------------
 */

void forget_step(Fast *f, int anew) {
    f->epoch++, f->counted += anew, f->sequence = 0;
    forget_values(f);
    table_clear(&f->distrusted), table_clear(&f->stacks), table_clear(&f->marked);
    if (anew &&
        (f->entry_count > MOST_KEPT || f->chain_count > MOST_KEPT || f->meta_count > MOST_KEPT)) {
        PyObject *all[] = {
            f->opaque, f->plain, f->json, f->named_index, f->metas_index, f->layouts};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            if (all[i]) PyDict_Clear(all[i]);
        for (size_t i = 0; i < sizeof f->slot_index / sizeof *f->slot_index; i++)
            if (f->slot_index[i]) PyDict_Clear(f->slot_index[i]);
        for (size_t i = 0; i < sizeof f->scalars / sizeof *f->scalars; i++)
            if (f->scalars[i]) PyDict_Clear(f->scalars[i]);
        for (size_t i = 0; i < f->entry_count; i++) Py_CLEAR(f->entries[i].json);
        drop_metas(f);
        for (size_t i = 0; i < f->chain_count; i++) Py_CLEAR(f->chains[i].json);
        f->entry_count = f->named_count = 0;
        f->chain_count = 1, f->chains[0].bits = 0;
        memset(f->places, 0xFF, sizeof f->places);
        Table *met[] = {&f->links, &f->names_met, &f->texts_met, &f->slots_met, &f->scalars_met};
        for (size_t i = 0; i < sizeof met / sizeof *met; i++) table_empty(met[i]);
    }
}
