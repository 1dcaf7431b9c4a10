/* Numbers for the values of a step: what each is, its measure, a text. */
#include "capture.h"

enum { MOST_KEPT = 200000, SWEEP = 10000, MOST_FLAT = 64 };

int is_tensor(const Fast *f, PyObject *value) {
    return (PyObject *)Py_TYPE(value) == f->given[TENSOR] || (PyObject *)Py_TYPE(value) == f->given[PARAMETER];
}
static int is_scalar(PyObject *value) {
    return value == Py_None || PyLong_CheckExact(value) || PyFloat_CheckExact(value) || PyBool_Check(value) ||
           PyUnicode_CheckExact(value);
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
/* A list or tuple of plain things and tensors, of which `leaves` would give each: not so of many that are all plain. */
static int is_flat(const Fast *f, PyObject *value) {
    Py_ssize_t size = PyTuple_CheckExact(value) || PyList_CheckExact(value) ? PySequence_Size(value) : 0;
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
/* The entry of what can be told of a value of which only the class can be told; -2 where there is more, -1 after an error. */
static int64_t opaque_entry(Fast *f, PyObject *value) {
    PyObject *kind = (PyObject *)Py_TYPE(value);
    int64_t entry = indexed(f->opaque, kind);
    if (entry == -1 && PyErr_ExceptionMatches(PyExc_Exception)) return PyErr_Clear(), -2; /* a class without a hash */
    if (entry != -2) return entry == NONE32 ? -2 : entry;
    PyObject *text = PyObject_CallMethodObjArgs(f->given[MEASURER], word[OPAQUE_TEXT], value, NULL);
    entry = !text ? -1 : text == Py_None ? NONE32 : json_entry(f, text);
    Py_XDECREF(text);
    if (entry < 0 || index_put(f->opaque, kind, entry)) return -1;
    return entry == NONE32 ? -2 : entry;
}
int visit_leaves(Fast *f, PyObject *value, PyObject *path, Visit visit, void *to) {
    if (is_tensor(f, value) || is_plain(f, value) || is_empty(value)) return visit(f, to, path, value);
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
    PyObject *found = PyObject_CallMethodObjArgs(f->given[MEASURER], word[LEAVES], value, NULL), *pair;
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
    uint64_t *met = table_find(&f->scalars_met, (uint64_t)key, (uint64_t)index, 0), both = met ? *met : 0;
    PyObject *found = met ? NULL : PyDict_GetItemWithError(index, key);
    if (!met && !found) {
        PyObject *texts = PyErr_Occurred() ? NULL : PyObject_CallMethodObjArgs(f->given[MEASURER],
            word[SCALAR_TEXTS], value, NULL), *a, *b;
        if (!texts || !PyArg_ParseTuple(texts, "OO", &a, &b)) { Py_XDECREF(texts); return -1; }
        int64_t one = json_entry(f, a), two = one < 0 ? -1 : json_entry(f, b);
        Py_DECREF(texts);
        both = (uint64_t)one << 32 | (uint32_t)two;
        if (two < 0 || index_put(index, key, (int64_t)both) || table_put(&f->scalars_met, (uint64_t)key, (uint64_t)index, 0, both))
            return -1;
    } else if (found) both = PyLong_AsUnsignedLongLong(found);
    if (met) GONE(known_scalars);
    int64_t type = text_number(f, (int64_t)(both >> 32)), text = text_number(f, (int64_t)(both & NONE32));
    row[0] = (uint32_t)type, row[1] = NONE32, row[2] = (uint32_t)text;
    return type < 0 || text < 0 ? -1 : 0;
}

static int scalar_row(Fast *f, PyObject *value, uint32_t row[3]) {
    int kind = PyBool_Check(value) ? 1 : PyLong_CheckExact(value) ? 0 : PyUnicode_CheckExact(value) ? 2 :
        value == Py_None ? 3 : 4;
    PyObject *index = f->scalars[kind];
    if (kind == 4) {
        double number = PyFloat_AsDouble(value);
        if (number != number || number == 0) { /* 0.0 and -0.0 are not the same, and no nan is the same as itself */
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
    int failed = PyErr_Occurred() ? -1 : key ? kept_row(f, f->scalars[6], key, value, row) : told_row(f, OTHER,
        value, row);
    Py_XDECREF(start), Py_XDECREF(stop), Py_XDECREF(step), Py_XDECREF(key);
    return failed;
}

static int64_t meta_at(Fast *f, PyObject *value, PyObject *requires_grad) {
    PyObject *dtype = GET(value, DTYPE), *shape = GET(value, SHAPE), *stride = ASK(value, STRIDE),
        *device = GET(value, DEVICE), *key = NULL;
    int64_t found = -1;
    if (dtype && shape && stride && device)
        key = PyTuple_Pack(6, (PyObject *)Py_TYPE(value), dtype, shape, stride, device, requires_grad);
    Py_XDECREF(dtype), Py_XDECREF(shape), Py_XDECREF(stride), Py_XDECREF(device);
    if (key) found = indexed(f->metas_index, key);
    if (found == -2) {
        PyObject *made = PyObject_CallMethodObjArgs(f->given[MEASURER], word[NEW_META], key, value, NULL),
            *facts = NULL, *layout = NULL;
        Meta meta = {0};
        found = -1;
        if (made && (facts = GET(made, FACTS)) && (meta.plain = truth_of(GET(made, PLAIN))) >= 0) {
            int64_t entry = json_entry(f, facts);
            meta.python = made, meta.facts = (uint32_t)entry;
            if (entry >= 0 && meta.plain) {
                meta.itemsize = (uint64_t)number_of(GET(made, ITEMSIZE)), meta.nbytes = (uint64_t)number_of(GET(made,
                    NBYTES));
                meta.extent = (uint64_t)number_of(GET(made, EXTENT));
                layout = GET(made, LAYOUT);
                int64_t number = layout ? indexed(f->layouts, layout) : -1;
                if (number == -2) number = index_put(f->layouts, layout, PyDict_Size(f->layouts) + 1) ? -1 :
                    PyDict_Size(f->layouts);
                meta.layout = (uint32_t)number;
                meta.code = (long)number_of(GET(made, CODE));
                meta.lane = GET(made, LANE), meta.recipe = GET(made, RECIPE);
            }
            if (!PyErr_Occurred() && !grow(&f->metas, &f->meta_room, f->meta_count + 1, sizeof *f->metas) &&
                !index_put(f->metas_index, key, (int64_t)f->meta_count)) {
                f->metas[f->meta_count] = meta;
                Py_INCREF(made);
                found = (int64_t)f->meta_count++;
            } else Py_XDECREF(meta.lane), Py_XDECREF(meta.recipe);
        }
        Py_XDECREF(made), Py_XDECREF(facts), Py_XDECREF(layout);
    }
    Py_XDECREF(key);
    return found;
}

enum { FORM_HEAD = 4, MOST_DIMS = 16 };
/* As meta_at, of a tensor that was asked without Python. */
static int64_t meta_like(Fast *f, PyObject *value, Direct *d) {
    int64_t form[FORM_HEAD + 2 * MOST_DIMS] = {0};
    if (!tensor_layout(d) || d->dim > MOST_DIMS) return meta_at(f, value, d->requires_grad ? Py_True : Py_False);
    size_t dim = (size_t)d->dim, size = sizeof *form * (FORM_HEAD + 2 * dim);
    form[0] = d->dim, form[1] = d->dtype, form[2] = d->device_type, form[3] = d->device_index;
    memcpy(form + FORM_HEAD, d->sizes, sizeof *form * dim), memcpy(form + FORM_HEAD + dim, d->strides, sizeof *form * dim);
    uint64_t mark = 0x9E3779B97F4A7C15u;
    for (size_t i = 0; i < FORM_HEAD + 2 * dim; i++) mark = (mark ^ (uint64_t)form[i]) * 0xBF58476D1CE4E5B9u, mark ^= mark >> 29;
    uint64_t type = (uint64_t)Py_TYPE(value) | (uint64_t)d->requires_grad;
    uint64_t *found = table_find(&f->forms, mark | 1, d->keys, type);
    if (found && f->metas[*found].form[0] == d->dim && !memcmp(f->metas[*found].form, form, size)) return GONE(known_forms), (int64_t)*found;
    int64_t at = meta_at(f, value, d->requires_grad ? Py_True : Py_False);
    if (at < 0 || found || f->metas[at].form) return at; /* two forms with one mark: the second is not kept */
    if (!(f->metas[at].form = malloc(size))) return PyErr_NoMemory(), -1;
    memcpy(f->metas[at].form, form, size);
    return table_put(&f->forms, mark | 1, d->keys, type, (uint64_t)at) ? -1 : at;
}
/* Tensors with the same dispatch keys are alike in everything that makes one odd: the first is looked at. */
int is_direct(Fast *f, PyObject *value, Direct *d) {
    uint64_t keys = tensor_keys(value);
    if (!keys) return 0;
    uint64_t *known = table_find(&f->keys, keys, 0, 0);
    if (!known) {
        int ordinary = truth_of(PyObject_CallFunctionObjArgs(f->given[ORDINARY], value, NULL));
        if (ordinary < 0) return -1;
        if (table_put(&f->keys, keys, 0, 0, ordinary > 0)) return -1;
        known = table_find(&f->keys, keys, 0, 0);
    }
    return *known && tensor_facts(value, d);
}

static Seen *seen_find(Fast *f, const Table *table, uint64_t a, uint64_t b, uint64_t c, PyObject *owner) {
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
        table_put(seen->key[1] ? &f->known : &f->seen_at, seen->key[0], seen->key[1], seen->key[2], kept);
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
    if (!weak || (!old && table_put(table, key[0], key[1], key[2], at))) { Py_XDECREF(weak); return -1; }
    if (old) Py_XDECREF(f->seen[at].weak);
    else f->seen_count++;
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

/* Whether a tensor that torch has not just returned has its memory, and torch alone may write it. */
static int is_safe(const Fast *f, PyObject *value, const Meta *meta, uint64_t offset) {
    PyObject *storage = ASK(value, UNTYPED_STORAGE);
    int safe = 0;
    if (storage && (uint64_t)number_of(ASK(storage, NBYTES)) >= (offset + meta->extent) * meta->itemsize &&
        !PyErr_Occurred())
        safe = truth_of(PyObject_CallFunctionObjArgs(f->given[RESIZABLE], storage, NULL)) == 1;
    Py_XDECREF(storage);
    return safe;
}
static int64_t measure(Fast *f, PyObject *value, const Meta *meta, uint64_t pointer) {
    int64_t number = -2;
    if (meta->lane && is_lane(meta->lane)) number = queue_measure(f, meta->lane, meta->recipe, value, pointer);
    if (number != -2) return number;
    if (meta->form && f->given[MEASURE] != Py_None && meta->lane == Py_None) {
        Frames *frames = (Frames *)f->given[FRAMES];
        const MeasureForC *function = PyCapsule_GetPointer(f->given[MEASURE], MEASURE_FOR_C);
        const int64_t *sizes = meta->form + FORM_HEAD, *strides = sizes + meta->form[0];
        Measured asked = {(const void *)(uintptr_t)pointer, meta->code, f->measure_flags, meta->form[0], sizes, strides,
            frames->sketch_size};
        _Alignas(16) char row[MOST_OF_ROW];
        Py_ssize_t size = function ? (*function)(&asked, row) : -1;
        GONE(measured);
        return size < 0 ? -1 : frames_measure(frames, row, (size_t)size);
    }
    PyObject *place = PyLong_FromUnsignedLongLong(pointer);
    if (!place) return -1;
    number = number_of(PyObject_CallMethodObjArgs(f->given[MEASURER], word[TAKE], value, place, meta->python, NULL));
    Py_DECREF(place);
    return number;
}

/* The facts of a tensor that must be asked through its attributes; 1 where it has no memory, of which torch warns who asks for it. */
static int ask_tensor(PyObject *value, Direct *d) {
    int meta = truth_of(GET(value, IS_META));
    if (meta) return meta;
    d->requires_grad = truth_of(GET(value, REQUIRES_GRAD));
    if (d->requires_grad < 0) return -1;
    d->version = (uint64_t)number_of(GET(value, VERSION));
    if (PyErr_Occurred()) PyErr_Clear(); /* inference tensors have none, and are told below */
    d->pointer = (uint64_t)number_of(ASK(value, DATA_PTR));
    return PyErr_Occurred() ? -1 : 0;
}
/* Whether such a tensor is not what its memory says; -1 after an error. */
static int is_odd(Fast *f, PyObject *value) {
    PyObject *transform = PyObject_CallNoArgs(f->given[TRANSFORM]);
    int odd = !transform ? -1 : transform == Py_None ? 0 : truth_of(PyObject_CallFunctionObjArgs(f->given[WRAPPED],
        value, NULL));
    Py_XDECREF(transform);
    if (!odd) odd = truth_of(ASK(value, IS_NEG));
    return odd ? odd : truth_of(ASK(value, IS_CONJ));
}
/* Whether memory has, by its address, places that nobody has written. */
static int is_unwritten(const Fast *f, uint64_t memory) {
    if (!PyDict_Size(f->given[UNWRITTEN])) return 0;
    PyObject *key = PyLong_FromUnsignedLongLong(memory), *found = key ? PyDict_GetItemWithError(f->given[UNWRITTEN], key) : NULL;
    Py_XDECREF(key);
    if (!found) PyErr_Clear();
    return found != NULL;
}
/* The same of a tensor, in doubt 1. */
int may_be_unwritten(Fast *f, PyObject *value) {
    Direct d = {0};
    if (!PyDict_Size(f->given[UNWRITTEN]) || !is_tensor(f, value)) return 0;
    int64_t at = is_direct(f, value, &d) > 0 ? meta_like(f, value, &d) : -1;
    if (at < 0) return PyErr_Clear(), 1;
    return is_unwritten(f, d.pointer - d.offset * f->metas[at].itemsize);
}
/* An ordinary tensor; 1 when it is not, 2 when Python knows more of its memory. */
static int tensor_row(Fast *f, PyObject *value, int produced, uint32_t row[3]) {
    Direct d = {0};
    Seen now = {0};
    int direct = is_direct(f, value, &d), result = -1, inference = 0;
    int asked = direct ? direct < 0 ? -1 : 0 : ask_tensor(value, &d);
    if (asked) return asked;
    if (direct) GONE(direct_tensors);
    now.requires_grad = d.requires_grad, now.version = d.version, now.pointer = d.pointer;
    Seen *seen = seen_find(f, &f->seen_at, (uint64_t)value, 0, 0, value);
    if (seen && seen->version == now.version && seen->pointer == now.pointer &&
        seen->requires_grad == now.requires_grad &&
        !is_distrusted(f, seen->memory)) {
        memcpy(row, seen->row, sizeof seen->row);
        GONE(known_tensors);
        return 0;
    }
    int64_t at = direct ? meta_like(f, value, &d) : meta_at(f, value, d.requires_grad ? Py_True : Py_False);
    if (at < 0) return -1;
    Meta *meta = f->metas + at;
    if (!meta->plain) return 1;
    if (!direct) {
        int odd = is_odd(f, value);
        if (odd) return odd;
        d.offset = (uint64_t)number_of(ASK(value, STORAGE_OFFSET));
        inference = truth_of(ASK(value, IS_INFERENCE));
        if (PyErr_Occurred()) return -1;
    }
    now.offset = d.offset;
    now.memory = now.pointer - now.offset * meta->itemsize;
    if (is_unwritten(f, now.memory)) return 2;
    PyObject *base = !f->reuse ? Py_NewRef(Py_None) : direct ? tensor_base(value, &d) : GET(value, BASE);
    if (!base) return -1;
    if (meta->nbytes && !now.memory) {
        result = 1;
        goto done;
    }
    int reusable = f->reuse && !inference && !is_distrusted(f, now.memory);
    PyObject *owner = base == Py_None ? value : base;
    now.layout = meta->layout;
    int64_t facts = text_number(f, meta->facts);
    if (facts < 0) goto done;
    row[0] = now.row[0] = (uint32_t)facts, row[2] = now.row[2] = NONE32;
    if (reusable) {
        seen = seen_find(f, &f->seen_at, (uint64_t)owner, 0, 0, owner);
        if (!seen || seen->version != now.version || seen->offset != now.offset || seen->layout != now.layout)
            seen = seen_find(f, &f->known, (uint64_t)owner, now.offset + 1, now.layout, owner);
        if (seen && seen->version == now.version) {
            row[1] = seen->row[1];
            GONE(known_parts);
            result = 0;
            goto done;
        }
    }
    /* Where it is measured each time only its memory must be there. */
    int there = !produced && direct && tensor_storage(&d) >= (int64_t)((now.offset + meta->extent) * meta->itemsize) &&
        (!reusable || tensor_is_resizable(&d) == 1);
    if (there) GONE(resizable);
    if (!produced && !there && !is_safe(f, value, meta, now.offset)) {
        if (PyErr_Occurred()) goto done;
        PyObject *memory = PyLong_FromUnsignedLongLong(now.memory), *told = NULL;
        if (memory) told = PyObject_CallMethodObjArgs(f->given[MEASURER], word[TRUSTS], value, meta->python, memory,
            reusable ? Py_True : Py_False, NULL);
        Py_XDECREF(memory);
        reusable = truth_of(told);
        if (reusable < 0) goto done;
        meta = f->metas + at;
    }
    int64_t number = measure(f, value, meta, now.pointer);
    if (PyErr_Occurred()) goto done;
    row[1] = now.row[1] = (uint32_t)number;
    result = reusable && remember(f, owner, owner != value, &now) ? -1 : 0;
done:
    Py_DECREF(base);
    return result;
}

/* What it is, its measure, and a text (a scalar, or why there is no measure). */
int value_row(Fast *f, PyObject *value, int produced, uint32_t row[3]) {
    if (!is_tensor(f, value)) {
        if (is_scalar(value)) return scalar_row(f, value, row);
        if (PySlice_Check(value)) return slice_row(f, value, row);
        if (is_empty(value)) return kept_row(f, f->scalars[5], (PyObject *)Py_TYPE(value), value, row);
        int known = PySet_Contains(f->given[OTHERS], (PyObject *)Py_TYPE(value));
        if (known) return known < 0 ? -1 : kept_row(f, f->scalars[5], value, value, row);
        int64_t opaque = opaque_entry(f, value), number = opaque < 0 ? opaque : text_number(f, opaque);
        if (number == -2) return told_row(f, OTHER, value, row);
        row[0] = (uint32_t)number, row[1] = row[2] = NONE32;
        return number < 0 ? -1 : 0;
    }
    int result;
    /* Where kernels write without a trace, Python keeps count. */
    result = PyDict_Size(f->given[REWRITTEN_DICT]) ? 2 : tensor_row(f, value, produced, row);
    if (result == 2) {
        PyObject *told = PyObject_CallMethodObjArgs(f->given[MEASURER], word[PLAIN_ROW], value, produced ? Py_True :
            Py_False, NULL);
        result = !told || !PyArg_ParseTuple(told, "III", row, row + 1, row + 2) ? -1 : 0;
        Py_XDECREF(told);
        return result;
    }
    if (result < 0 && (PyErr_ExceptionMatches(PyExc_RuntimeError) || PyErr_ExceptionMatches(PyExc_TypeError) ||
        PyErr_ExceptionMatches(PyExc_AttributeError))) {
        Raised r = take_raised();
        int meant = truth_of(PyObject_CallFunctionObjArgs(f->given[MEANT], r.error, NULL));
        if (meant > 0) PyErr_Restore(r.kind, r.error, r.trace);
        else drop_raised(&r);
        result = meant ? -1 : 1;
    }
    return result > 0 ? told_row(f, OTHER, value, row) : result;
}

void drop_metas(Fast *f) {
    for (size_t i = 0; i < f->meta_count; i++) {
        Meta *m = f->metas + i;
        PyObject **all[] = {&m->python, &m->lane, &m->recipe};
        for (size_t k = 0; k < sizeof all / sizeof *all; k++) Py_CLEAR(*all[k]);
        free(m->form);
    }
    f->meta_count = 0;
    table_empty(&f->forms);
}

/* --- steps ------------------------------------------------------------------------------------------------------- */

void forget_step(Fast *f, int anew) {
    f->epoch++, f->counted += anew, f->sequence = 0;
    forget_values(f);
    table_clear(&f->distrusted), table_clear(&f->stacks), table_clear(&f->marked);
    if (anew && (f->entry_count > MOST_KEPT || f->chain_count > MOST_KEPT || f->meta_count > MOST_KEPT)) {
        PyObject *all[] = {f->opaque, f->plain, f->json, f->named_index, f->metas_index, f->layouts};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) if (all[i]) PyDict_Clear(all[i]);
        for (size_t i = 0; i < sizeof f->slot_index / sizeof *f->slot_index; i++) if (f->slot_index[i]) PyDict_Clear(f->slot_index[i]);
        for (size_t i = 0; i < sizeof f->scalars / sizeof *f->scalars; i++) if (f->scalars[i]) PyDict_Clear(f->scalars[i]);
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
