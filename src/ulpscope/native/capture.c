/* The part of a capture that runs for every call: numbers for names, stacks and values, the frames
 * of the journal, the function mode and the hook behind an autograd node.  Everything unusual goes
 * to the Python beside it: recorder.py, summary.py, function_tap.py and backward.py, which do the
 * same without this file; store/frames.py has the frames. Nothing here is linked with torch:
 * torch_abi.c asks ordinary tensors, others are asked through their attributes. The lock that keeps
 * all this in order is the recorder's gate, held by every caller. */
#include "capture.h"
#include <errno.h>
#include <structmember.h>
#ifndef _WIN32
#include <sys/uio.h>
#endif

PyObject *word[WORDS];
static const char *const spelling[WORDS] = {
    "f_back",
    "f_lasti",
    "_version",
    "data_ptr",
    "requires_grad",
    "dtype",
    "shape",
    "stride",
    "device",
    "_base",
    "storage_offset",
    "is_neg",
    "is_conj",
    "is_inference",
    "grad_fn",
    "next_functions",
    "_sequence_nr",
    "variable",
    "output_nr",
    "register_hook",
    "_drop_left_over",
    "trouble",
    "close_raised",
    "wants",
    "of_name",
    "wants_backward",
    "wants_now",
    "_new_meta",
    "other",
    "scalar_texts",
    "leaves",
    "unread",
    "trusts",
    "take",
    "code_class",
    "frames_text",
    "positions",
    "call_shape",
    "spelling",
    "site_sign",
    "fast",
    "kind",
    "name",
    "slow",
    "facts",
    "plain",
    "itemsize",
    "nbytes",
    "extent",
    "layout",
    "__enter__",
    "__exit__",
    "out",
    "inplace",
    "plain_row",
    "wait_for_gate",
    "_is_view",
    "register_prehook",
    "arm_slowly",
    "lane",
    "recipe",
    "code",
    "untyped_storage",
    "start",
    "stop",
    "step",
    "names",
    "of",
    "__name__",
    "alone",
    "_parameters",
    "is_leaf",
    "_post_accumulate_grad_hooks",
    "_around",
    "grad",
    "opaque_text",
    "is_meta",
    "inside",
    "watch_below",
    "is_nested",
    "is_complex",
    "element_size",
};

/* --- small things
 * ------------------------------------------------------------------------------------------------
 */

static uint64_t *slot_at(const Table *table, uint64_t a, uint64_t b, uint64_t c) {
    uint64_t h = (a * 0x9E3779B97F4A7C15u ^ b) * 0xBF58476D1CE4E5B9u;
    h = (h ^ h >> 29 ^ c) * 0x94D049BB133111EBu;
    for (size_t i = (size_t)(h >> 20);; i++) {
        uint64_t *cell = table->cells + 4 * (i & table->mask);
        if (!cell[0] || (cell[0] == a && cell[1] == b && cell[2] == c)) return cell;
    }
}
uint64_t *table_find(const Table *table, uint64_t a, uint64_t b, uint64_t c) {
    if (!table->cells) return NULL;
    uint64_t *cell = slot_at(table, a, b, c);
    return cell[0] ? cell + 3 : NULL;
}
int table_put(Table *table, uint64_t a, uint64_t b, uint64_t c, uint64_t value) {
    if (!table->cells || 2 * table->used > table->mask) {
        size_t size = table->cells ? 2 * (table->mask + 1) : 256;
        Table larger = {calloc(size, 4 * sizeof(uint64_t)), size - 1, table->used};
        if (!larger.cells) return PyErr_NoMemory(), -1;
        for (size_t i = 0; table->cells && i <= table->mask; i++) {
            uint64_t *from = table->cells + 4 * i;
            if (from[0])
                memcpy(slot_at(&larger, from[0], from[1], from[2]), from, 4 * sizeof *from);
        }
        free(table->cells);
        *table = larger;
    }
    uint64_t *cell = slot_at(table, a, b, c);
    table->used += !cell[0];
    cell[0] = a, cell[1] = b, cell[2] = c, cell[3] = value;
    return 0;
}
void table_empty(Table *table) {
    free(table->cells);
    memset(table, 0, sizeof *table);
}
/* What it held is likely to be about as much again. */
void table_clear(Table *table) {
    enum { MOST = 1 << 15 };
    if (table->mask >= MOST)
        table_empty(table);
    else if (table->used)
        memset(table->cells, 0, 4 * sizeof(uint64_t) * (table->mask + 1)), table->used = 0;
}

int grow_from(const void *few, void *array, size_t *room, size_t count, size_t item) {
    if (count <= *room) return 0;
    size_t wanted = *room ? 2 * *room : 8;
    while (wanted < count) wanted *= 2;
    void *old = *(void **)array,
         *larger = old == few ? malloc(wanted * item) : realloc(old, wanted * item);
    if (!larger) return PyErr_NoMemory(), -1;
    if (old && old == few) memcpy(larger, few, *room * item);
    *(void **)array = larger, *room = wanted;
    return 0;
}
int grow(void *array, size_t *room, size_t count, size_t item) {
    return grow_from(NULL, array, room, count, item);
}
static int append(Bytes *to, const void *data, size_t size) {
    if (grow(&to->data, &to->room, to->size + size, 1)) return -1;
    memcpy(to->data + to->size, data, size);
    to->size += size;
    return 0;
}
int64_t number_of(PyObject *owned) {
    if (!owned) return -1;
    uint64_t number = PyLong_AsUnsignedLongLongMask(owned);
    Py_DECREF(owned);
    return (int64_t)number;
}
int truth_of(PyObject *owned) {
    int truth = owned ? PyObject_IsTrue(owned) : -1;
    Py_XDECREF(owned);
    return truth;
}

/* An argument that is a tuple, or NULL after an error: parsing takes longer than a small call. */
PyObject *tuple_at(PyObject *args, Py_ssize_t at) {
    PyObject *found = PyTuple_GetItem(args, at);
    if (found && !PyTuple_Check(found))
        return PyErr_SetString(PyExc_TypeError, "not a tuple"), NULL;
    return found;
}

/* --- frames
 * ------------------------------------------------------------------------------------------------------
 */

enum { FRAME_HEAD = sizeof(FrameHead), RING_DATA = 4096 };

static void detach(Frames *f) {
    if (f->map) PyBuffer_Release(&f->view);
    f->map = NULL;
}
static int frames_init(Frames *f, PyObject *args, PyObject *kwargs) {
    PyObject *put, *wake;
    if (!PyArg_ParseTuple(args, "OO", &put, &wake)) return -1;
    f->put = Py_NewRef(put), f->wake = Py_NewRef(wake);
    return 0;
}
static PyObject *frames_attach(Frames *f, PyObject *view) {
    detach(f);
    f->strings.size = f->measures.size = f->sketches.size = 0;
    memset(f->sizes, 0, sizeof f->sizes);
    f->string_count = f->measure_count = 0;
    f->sketch_size = f->calls = f->woken = 0;
    if (view != Py_None) {
        if (PyObject_GetBuffer(view, &f->view, PyBUF_WRITABLE)) return NULL;
        f->map = f->view.buf;
        f->capacity = (uint64_t)f->view.len - RING_DATA;
    }
    Py_RETURN_NONE;
}
static void ring_copy(Frames *f, uint64_t at, const void *data, size_t size) {
    at %= f->capacity;
    size_t first = size < f->capacity - at ? size : (size_t)(f->capacity - at);
    memcpy(f->map + RING_DATA + at, data, first);
    memcpy(f->map + RING_DATA, (const char *)data + first, size - first);
}
/* Gives a frame for which the ring has no room to Python. Whether it was put; -1 with an exception
 * set. */
static int frames_put(Frames *f, const FrameHead *head, const Bytes parts[TABLES]) {
    PyObject *whole = PyBytes_FromStringAndSize(NULL, FRAME_HEAD + (Py_ssize_t)head->body);
    if (!whole) return -1;
    char *to = PyBytes_AsString(whole);
    memcpy(to, head, FRAME_HEAD);
    to += FRAME_HEAD;
    for (int i = 0; i < TABLES; to += head->sizes[i++]) memcpy(to, parts[i].data, head->sizes[i]);
    int status = truth_of(PyObject_CallFunctionObjArgs(f->put, whole, NULL));
    Py_DECREF(whole);
    return status;
}
/* Puts a frame of parts that belong at `places` of their tables. Whether it was put; -1 with an
 * exception set. */
static int frames_place(Frames *f, const uint64_t places[TABLES], const Bytes parts[TABLES]) {
    RingHead *ring = (RingHead *)f->map;
    FrameHead head = {.magic = FRAME_MAGIC};
    for (int i = 0; i < TABLES; i++) {
        head.places[i] = places[i];
        head.sizes[i] = (uint32_t)parts[i].size;
        head.body += head.sizes[i];
    }
    uint64_t end = ring->head;
    uint64_t taken = __atomic_load_n(&ring->taken, __ATOMIC_ACQUIRE);
    if (FRAME_HEAD + (uint64_t)head.body > f->capacity - (end - taken))
        return frames_put(f, &head, parts);
    ring_copy(f, end, &head, FRAME_HEAD);
    end += FRAME_HEAD;
    for (int i = 0; i < TABLES; end += head.sizes[i++])
        if (head.sizes[i]) ring_copy(f, end, parts[i].data, head.sizes[i]);
    __atomic_store_n(&ring->head, end, __ATOMIC_RELEASE);
    /* What is filed during a step nobody waits for at its end. The writer takes its time: each
     * sixteenth wakes it once. */
    if (end - (taken > f->woken ? taken : f->woken) > f->capacity / 16) {
        f->full = 1;
        f->woken = end;
    }
    return 1;
}
/* Last of all: Python may raise there what is meant for the program. */
static int wake_if_full(Frames *f) {
    if (!f->full) return 0;
    f->full = 0;
    PyObject *woken = PyObject_CallNoArgs(f->wake);
    Py_XDECREF(woken);
    return woken ? 0 : -1;
}
/* Puts a frame of what has come since the last one and of a call, if there is one, whose first
 * value is filled in. 0, or -1 with an exception set. */
int frames_commit(Frames *f, CallRow *row, const void *values, size_t size) {
    if (!f->map || f->failed) return 0;
    if (row) row->first_value = f->sizes[AT_VALUES] / sizeof(ValueRow);
    Bytes parts[TABLES] = {
        [AT_STRINGS] = f->strings,
        [AT_MEASURES] = f->measures,
        [AT_SKETCHES] = f->sketches,
        [AT_VALUES] = {(char *)values, size, 0},
        [AT_CALLS] = {(char *)row, row ? sizeof *row : 0, 0},
    };
    int done = frames_place(f, f->sizes, parts);
    if (done < 0) return -1;
    f->strings.size = f->measures.size = f->sketches.size = 0;
    for (int i = 0; done && i < TABLES; i++) f->sizes[i] += parts[i].size;
    f->calls += done && row;
    return wake_if_full(f);
}
int64_t frames_string(Frames *f, const char *json, size_t size) {
    return append(&f->strings, json, size) ? -1 : (int64_t)f->string_count++;
}
/* A stack: its frames as JSON, and the number of the stack they were called from, or -1. */
int64_t frames_stack(Frames *f, PyObject *json, long long parent) {
    char end[48];
    int size = snprintf(
        end, sizeof end, parent < 0 ? ", \"parent\": null}\n" : ", \"parent\": %lld}\n", parent);
    static const char begin[] = "{\"frames\": ";
    size_t before = f->strings.size;
    if (append(&f->strings, begin, sizeof begin - 1) ||
        append(&f->strings, PyBytes_AsString(json), (size_t)PyBytes_Size(json)) ||
        append(&f->strings, end, (size_t)size))
        return f->strings.size = before, -1;
    return f->string_count++;
}
static PyObject *frames_add_string(Frames *f, PyObject *text) {
    PyObject *bytes = PyUnicode_AsEncodedString(text, "utf-8", "backslashreplace");
    int64_t number =
        bytes ? frames_string(f, PyBytes_AsString(bytes), (size_t)PyBytes_Size(bytes)) : -1;
    Py_XDECREF(bytes);
    if (number < 0 || append(&f->strings, "\n", 1)) return NULL;
    return PyLong_FromLongLong(number);
}
int64_t frames_measure(Frames *f, const char *row, size_t size) {
    if (append(&f->measures, row, MEASURE_BYTES) ||
        append(&f->sketches, row + MEASURE_BYTES, size - MEASURE_BYTES))
        return -1;
    f->sketch_size += size - MEASURE_BYTES;
    return f->measure_count++;
}
static PyObject *frames_add_measured(Frames *f, PyObject *row) {
    char *data;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(row, &data, &size)) return NULL;
    if (size < MEASURE_BYTES) return PyErr_SetString(PyExc_ValueError, "not a row"), NULL;
    int64_t number = frames_measure(f, data, (size_t)size);
    return number < 0 ? NULL : PyLong_FromLongLong(number);
}
static PyObject *frames_commit_call(Frames *f, PyObject *args) {
    const char *row, *values;
    Py_ssize_t length, size;
    CallRow own;
    if (!PyArg_ParseTuple(args, "y#y#", &row, &length, &values, &size)) return NULL;
    if (length && length != sizeof own)
        return PyErr_SetString(PyExc_ValueError, "not a call"), NULL;
    memcpy(&own, row, (size_t)length);
    if (frames_commit(f, length ? &own : NULL, values, (size_t)size)) return NULL;
    Py_RETURN_NONE;
}
/* Rows of measures that are there already, by their numbers, and their sketches, which follow the
 * last ones. */
static int patch_all(
    Frames *f, const uint32_t *numbers, size_t count, MeasureRow *rows, Bytes sketches) {
    for (size_t i = 0; i < count; i++) rows[i].sketch_offset += f->sketch_size;
    for (size_t i = 0, next; i < count && f->map && !f->failed;
        i = next) { /* `put` runs Python, where much can happen */
        for (next = i + 1; next < count && numbers[next] == numbers[next - 1] + 1; next++) {}
        uint64_t places[TABLES];
        Bytes parts[TABLES] = {
            [AT_MEASURES] = {(char *)(rows + i), sizeof *rows * (next - i), 0},
            [AT_SKETCHES] = sketches,
        };
        memcpy(places, f->sizes, sizeof places);
        places[AT_MEASURES] = sizeof *rows * (uint64_t)numbers[i];
        int done = frames_place(f, places, parts);
        if (done < 0) return -1;
        if (done) {
            f->sizes[AT_SKETCHES] += sketches.size;
            f->sketch_size += sketches.size;
        }
        sketches.size = 0;
    }
    return 0;
}
static PyObject *frames_patch(Frames *f, PyObject *args) {
    Py_buffer numbers, rows, sketches;
    if (!PyArg_ParseTuple(args, "y*w*y*", &numbers, &rows, &sketches)) return NULL;
    size_t count = (size_t)numbers.len / 4;
    int failed = (size_t)rows.len != MEASURE_BYTES * count;
    if (failed)
        PyErr_SetString(PyExc_ValueError, "numbers and rows do not agree");
    else if (f->map && !f->failed && count)
        failed = patch_all(
            f, numbers.buf, count, rows.buf, (Bytes){sketches.buf, (size_t)sketches.len, 0});
    PyBuffer_Release(&numbers), PyBuffer_Release(&rows), PyBuffer_Release(&sketches);
    if (failed || wake_if_full(f)) return NULL;
    Py_RETURN_NONE;
}
#ifndef _WIN32
typedef struct {
    FrameHead head;
    const char *cut; /* its bytes */
} Frame;
/* The frame at a place; 0 where it is not whole, -1 where it is broken. */
static int frame_at(const Py_buffer *data, Py_ssize_t at, Frame *to) {
    if (at + FRAME_HEAD > data->len) return 0;
    const char *from = (const char *)data->buf + at;
    memcpy(&to->head, from, FRAME_HEAD);
    if (at + FRAME_HEAD + (Py_ssize_t)to->head.body > data->len) return 0;
    to->cut = from + FRAME_HEAD;
    uint64_t all = 0;
    for (int i = 0; i < TABLES; i++) all += to->head.sizes[i];
    return all <= to->head.body ? 1 : -1;
}
/* Pieces that follow each other in a file. */
enum { MOST_PIECES = 256 };
typedef struct {
    int file, count;
    uint64_t at;
    struct iovec pieces[MOST_PIECES];
} Run;
static int run_write(Run *run) {
    struct iovec *next = run->pieces;
    while (run->count) {
        ssize_t done = pwritev(run->file, next, run->count, (off_t)run->at);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return done ? -1 : (errno = EIO, -1);
        run->at += (uint64_t)done;
        while (run->count && (size_t)done >= next->iov_len)
            done -= (ssize_t)next->iov_len, next++, run->count--;
        if (run->count)
            next->iov_base = (char *)next->iov_base + done, next->iov_len -= (size_t)done;
    }
    return 0;
}
/* In this order: whoever reads meanwhile begins with the last, and finds what it points to. */
static int run_all(Run runs[TABLES]) {
    for (int i = 0; i < TABLES; i++)
        if (run_write(runs + i)) return -1;
    return 0;
}
static int run_add(Run runs[TABLES], int i, const char *data, size_t size) {
    Run *run = runs + i;
    if (!size) return 0;
    if (run->count == MOST_PIECES && run_all(runs)) return -1;
    run->pieces[run->count++] = (struct iovec){(void *)(uintptr_t)data, size};
    return 0;
}
/* 0, an error number, or -1 where a frame is broken. */
static int file_all(const Py_buffer *data, Run runs[TABLES], uint64_t *filed, Py_ssize_t *end) {
    Frame frame;
    const FrameHead *head = &frame.head;
    int whole;
    uint64_t begun = *filed;
    Py_ssize_t at = 0;
    for (; (whole = frame_at(data, at, &frame)) > 0; at += FRAME_HEAD + (Py_ssize_t)head->body)
        for (int i = 0; i < TABLES; frame.cut += head->sizes[i++]) {
            if (!at) runs[i].at = i == AT_MEASURES ? begun : head->places[i];
            if (i == AT_MEASURES && head->places[i] != *filed) continue;
            if (run_add(runs, i, frame.cut, head->sizes[i])) return errno;
            *filed += i == AT_MEASURES ? head->sizes[i] : 0;
        }
    if (whole < 0) return -1;
    if (run_all(runs)) return errno;
    *end = at;
    /* Then what is known now of measures that are there already. */
    Run *measures = runs + AT_MEASURES;
    for (at = 0; at < *end && frame_at(data, at, &frame) > 0;
        at += FRAME_HEAD + (Py_ssize_t)head->body) {
        uint32_t size = head->sizes[AT_MEASURES];
        if (head->places[AT_MEASURES] == begun) {
            begun += size;
            continue;
        }
        measures->at = head->places[AT_MEASURES];
        if (run_add(runs, AT_MEASURES, frame.cut + head->sizes[AT_STRINGS], size) ||
            run_write(measures))
            return errno;
    }
    return 0;
}
static PyObject *file_frames(PyObject *module, PyObject *args) {
    Py_buffer data;
    unsigned long long begun;
    int files[TABLES], failed;
    if (!PyArg_ParseTuple(
            args, "y*(iiiii)K", &data, files, files + 1, files + 2, files + 3, files + 4, &begun))
        return NULL;
    GONE(filed);
    Run *runs = calloc(TABLES, sizeof *runs);
    uint64_t filed = begun;
    Py_ssize_t end = 0;
    for (int i = 0; runs && i < TABLES; i++) runs[i].file = files[i];
    Py_BEGIN_ALLOW_THREADS
    failed = runs ? file_all(&data, runs, &filed, &end) : ENOMEM;
    Py_END_ALLOW_THREADS
    free(runs);
    PyBuffer_Release(&data);
    if (failed < 0)
        return PyErr_SetString(PyExc_ValueError, "a frame of the journal is broken"), NULL;
    if (failed) return errno = failed, PyErr_SetFromErrno(PyExc_OSError);
    return Py_BuildValue("(nK)", end, (unsigned long long)filed);
}
#endif
static void frames_dealloc(Frames *f) {
    PyTypeObject *type = Py_TYPE(f);
    PyObject_GC_UnTrack(f);
    detach(f);
    free(f->strings.data), free(f->measures.data), free(f->sketches.data);
    Py_CLEAR(f->put);
    Py_CLEAR(f->wake);
    PyObject_GC_Del(f);
    Py_DECREF(type);
}
static int frames_traverse(Frames *f, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(f));
    Py_VISIT(f->put);
    Py_VISIT(f->wake);
    return 0;
}
static int frames_clear(Frames *f) {
    Py_CLEAR(f->put);
    Py_CLEAR(f->wake);
    return 0;
}
static PyMethodDef frames_methods[] = {
    {"attach", (PyCFunction)frames_attach, METH_O,
        "Begins with the memory of a ring; None lets go of it."},
    {"add_string", (PyCFunction)frames_add_string, METH_O, "Stores one JSON text; its number."},
    {"add_measured", (PyCFunction)frames_add_measured, METH_O,
        "Stores a row and its sketch; its number."},
    {"commit", (PyCFunction)frames_commit_call, METH_VARARGS,
        "Puts a frame: a call's row, or nothing, and its values."},
    {"patch", (PyCFunction)frames_patch, METH_VARARGS,
        "Puts rows of measures at their place, and further sketches."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef frames_members[] = {
    {"failed", T_BOOL, offsetof(Frames, failed), 0, NULL},
    {"calls", T_ULONGLONG, offsetof(Frames, calls), READONLY, NULL},
    {"measures", T_UINT, offsetof(Frames, measure_count), READONLY, NULL},
    {"sketch_size", T_ULONGLONG, offsetof(Frames, sketch_size), READONLY, NULL},
    {"pending", T_PYSSIZET, offsetof(Frames, measures) + offsetof(Bytes, size), READONLY, NULL},
    {"pending_strings", T_PYSSIZET, offsetof(Frames, strings) + offsetof(Bytes, size), READONLY,
        NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot frames_slots[] = {{Py_tp_init, frames_init}, {Py_tp_dealloc, frames_dealloc},
    {Py_tp_traverse, frames_traverse}, {Py_tp_clear, frames_clear}, {Py_tp_methods, frames_methods},
    {Py_tp_members, frames_members}, {0, NULL}};
static PyType_Spec frames_spec = {"ulpscope.native._taps.Frames", sizeof(Frames), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, frames_slots};

/* --- calls and threads
 * ------------------------------------------------------------------------------------------- */

void drop_values(Call *c) {
    if (c->values != c->few) free(c->values);
    c->values = c->few, c->count = 0, c->room = sizeof c->few / sizeof *c->few;
}
static void call_dealloc(Call *c) {
    PyTypeObject *type = Py_TYPE(c);
    drop_values(c);
    Py_XDECREF(c->kind), Py_XDECREF(c->name), Py_XDECREF(c->module), Py_XDECREF(c->note),
        Py_XDECREF(c->phase);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(c);
    Py_DECREF(type);
}
static PyMemberDef call_members[] = {
    {"kind", T_OBJECT_EX, offsetof(Call, kind), 0, NULL},
    {"name", T_OBJECT_EX, offsetof(Call, name), 0, NULL},
    {"module", T_OBJECT_EX, offsetof(Call, module), 0, NULL},
    {"note", T_OBJECT, offsetof(Call, note), 0, NULL},
    {"phase", T_OBJECT_EX, offsetof(Call, phase), 0, NULL},
    {"index", T_LONGLONG, offsetof(Call, index), 0, NULL},
    {"seq", T_LONGLONG, offsetof(Call, seq), 0, NULL},
    {"parent", T_LONGLONG, offsetof(Call, parent), 0, NULL},
    {"origin", T_LONGLONG, offsetof(Call, origin), 0, NULL},
    {"stack", T_LONGLONG, offsetof(Call, stack), 0, NULL},
    {"thread", T_LONGLONG, offsetof(Call, thread), 0, NULL},
    {"again", T_LONGLONG, offsetof(Call, again), 0, NULL},
    {"epoch", T_LONGLONG, offsetof(Call, epoch), 0, NULL},
    {"flags", T_LONGLONG, offsetof(Call, flags), 0, NULL},
    {"wanted", T_BOOL, offsetof(Call, wanted), 0, NULL},
    {"chosen", T_BOOL, offsetof(Call, chosen), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot call_slots[] = {
    {Py_tp_dealloc, call_dealloc}, {Py_tp_members, call_members}, {0, NULL}};
static PyType_Spec call_spec = {
    "ulpscope.native._taps.Call", sizeof(Call), 0, Py_TPFLAGS_DEFAULT, call_slots};

static int state_traverse(State *s, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(s));
    for (int i = 0; i < STATE_OBJECTS; i++) Py_VISIT(s->object[i]);
    return 0;
}
static int state_clear(State *s) {
    for (int i = 0; i < STATE_OBJECTS; i++) Py_CLEAR(s->object[i]);
    return 0;
}
static void state_dealloc(State *s) {
    PyTypeObject *type = Py_TYPE(s);
    PyObject_GC_UnTrack(s);
    state_clear(s);
    PyObject_GC_Del(s);
    Py_DECREF(type);
}
static PyMemberDef state_members[] = {
    {"number", T_LONGLONG, offsetof(State, number), 0, NULL},
    {"compiled", T_LONGLONG, offsetof(State, compiled), 0, NULL},
    {"busy", T_BOOL, offsetof(State, busy), 0, NULL},
    {"in_c", T_BOOL, offsetof(State, in_c), READONLY, NULL},
    {"handling", T_LONGLONG, offsetof(State, handling), READONLY, NULL},
    {"calls", T_OBJECT, offsetof(State, object[CALLS]), 0, NULL},
    {"modules", T_OBJECT, offsetof(State, object[MODULES]), 0, NULL},
    {"mode", T_OBJECT, offsetof(State, object[MODE]), 0, NULL},
    {"region", T_OBJECT, offsetof(State, object[REGION]), 0, NULL},
    {"redispatched", T_OBJECT, offsetof(State, object[REDISPATCHED]), 0, NULL},
    {"guard", T_OBJECT, offsetof(State, object[GUARD]), 0, NULL},
    {"free", T_OBJECT, offsetof(State, object[FREE]), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyType_Slot state_slots[] = {{Py_tp_dealloc, state_dealloc},
    {Py_tp_traverse, state_traverse}, {Py_tp_clear, state_clear}, {Py_tp_members, state_members},
    {0, NULL}};
static PyType_Spec state_spec = {"ulpscope.native._taps.State", sizeof(State), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, state_slots};

PyTypeObject *call_type, *state_type, *hook_type, *edges_type, *pass_type, *part_type, *lane_type,
    *gate_type;

/* --- the module
 * --------------------------------------------------------------------------------------------------
 */

static int add_type(PyObject *module, const char *name, PyType_Spec *spec, PyTypeObject **kept) {
    PyObject *type = PyType_FromSpec(spec);
    if (!type) return -1;
    if (kept) *kept = (PyTypeObject *)Py_NewRef(type);
    return PyModule_AddObject(module, name, type);
}
static int execute(PyObject *module) {
    for (int i = 0; i < WORDS; i++)
        if (!(word[i] = PyUnicode_InternFromString(spelling[i]))) return -1;
    return add_type(module, "Frames", &frames_spec, NULL) ||
           add_type(module, "Call", &call_spec, &call_type) ||
           add_type(module, "State", &state_spec, &state_type) ||
           add_type(module, "Hook", &hook_spec, &hook_type) ||
           add_type(module, "Edges", &edges_spec, &edges_type) ||
           add_type(module, "Pass", &pass_spec, &pass_type) ||
           add_type(module, "Part", &part_spec, &part_type) ||
           add_type(module, "Fast", &fast_spec, NULL) ||
           add_type(module, "Mode", &mode_spec, NULL) ||
           add_type(module, "Kernel", &kernel_spec, NULL) ||
           add_type(module, "Recipe", &recipe_spec, NULL) ||
           add_type(module, "Lane", &lane_spec, &lane_type) ||
           add_type(module, "Around", &around_spec, NULL) ||
           add_type(module, "Arrival", &arrival_spec, NULL) ||
           add_type(module, "Gate", &gate_spec, &gate_type);
}
uint64_t ways_gone[ALL_WAYS];
static PyObject *ways(PyObject *module, PyObject *none) {
#define WAY_NAME(name) #name,
    static const char *const names[] = {WAYS(WAY_NAME)};
    PyObject *found = PyDict_New();
    for (int i = 0; found && i < ALL_WAYS; i++) {
        PyObject *count = PyLong_FromUnsignedLongLong(ways_gone[i]);
        if (!count || PyDict_SetItemString(found, names[i], count)) Py_CLEAR(found);
        Py_XDECREF(count);
    }
    return found;
}
static PyMethodDef functions[] = {
    {"ways", ways, METH_NOARGS, "How often each fast way was gone in this process."},
#ifndef _WIN32
    {"file_frames", file_frames, METH_VARARGS, "Writes frames into the files of their tables."},
#endif
    {"check_torch", check_torch, METH_O,
        "Asks tensors without Python if that tells the same of each sample; whether it does."},
    {"copy_back", copy_back, METH_VARARGS,
        "Queues a copy from a device, and an event after it; whether it could."},
    {"watch_foreign", watch_foreign, METH_VARARGS,
        "More functions that take tensors, ranges of memory that may be written, and who is told "
        "of a call of any, with its arguments, when it has ended, or None; gives those that cannot "
        "be watched."},
    {"asked_mode", asked_mode, METH_O, "A class of modes that torch finds its way into sooner."},
    {"rows_of", rows_of, METH_VARARGS,
        "Fills in rows and sketches of what a device answered; bytes of these."},
    {NULL, NULL, 0, NULL}};
static PyModuleDef_Slot slots[] = {{Py_mod_exec, execute}, {0, NULL}};
static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "_taps", .m_methods = functions, .m_slots = slots};
PyMODINIT_FUNC PyInit__taps(void) { return PyModuleDef_Init(&definition); }

/* All of it is one unit: the compiler sees through calls from file to file, which are most of what
 * is called here. */
#include "texts.c"
#include "stacks.c"
#include "values.c"
#include "calls.c"
#include "mode.c"
#include "modules.c"
#include "recorder.c"
#include "gradients.c"
#include "foreign.c"
#include "edges.c"
#include "gate.c"
#include "cuda_queue.c"
#include "torch_abi.c"
