/* Queueing the measuring of a tensor on its device, for the ordinary case: a kernel that is
 * compiled, a batch with room. cuda_gauge.py has the whole of it, makes the kernels and the
 * batches, and takes every other case. */
#include "capture.h"
#include <math.h>
#include <structmember.h>

enum { MOST_SCALARS = 16, MOST_ARGUMENTS = 40, ABOUT_BYTES = 24 };
enum {
    CHECKS = 4,
    SEVERAL = 128 /* cuda_kernels.py: find */,
    WORDS_OF_ONE = 24 /* cuda_mail.py */
};

/* A compiled kernel; its function is 0 until it may be launched from here. All its arguments are
 * integers. Where the driver tells at which places of a buffer it wants them, that is quicker than
 * an address for each. */
typedef struct {
    PyObject_HEAD unsigned long long function;
    unsigned threads, shared;
    char asked;    /* whether the driver was asked */
    int arguments; /* 0 where it did not tell */
    size_t bytes;
    struct {
        uint16_t at, size;
    } places[MOST_ARGUMENTS + 2];
} Kernel;
/* How tensors of one type and layout are measured. */
typedef struct {
    PyObject_HEAD Kernel *usual, *wide;
    unsigned programs, wide_programs;
    uint64_t scalars[MOST_SCALARS], wide_scalars[MOST_SCALARS], checks[CHECKS];
    int scalar_count, wide_count;
    unsigned long long room;
    char direct, aligned;
    char about[ABOUT_BYTES];
} Recipe;
/* A tensor that is to be measured before our code ends: what one call shows is launched together.
 */
typedef struct {
    PyObject *value;
    const Recipe *recipe;
    Kernel *kernel; /* NULL once it is launched */
    uint64_t pointer, part, row;
} Queued;
/* The batch that answers gather in now; cuda_gauge.py says what its numbers mean. */
typedef struct Lane {
    PyObject_HEAD PyObject *capturing, *stream_of, *device, *unknown;
    Kernel *combine;
    unsigned long long stream, used, count, combined, told, parts, segments, places, residues,
        numbers, about, rows, others, masks, weights, most_rows, most_parts;
    int index, pieces, waiting;
    char bound, checked;
    Queued queue[SEVERAL];
} Lane;

typedef int (*Launcher)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
    unsigned, void *, void **, void **);
static Launcher launcher;
static int (*stream_state)(void *, int *), (*copier)(void *, uint64_t, size_t, void *),
    (*recorder)(void *, void *), (*argument)(void *, size_t, size_t *, size_t *);
/* When the first lane is made, torch has loaded them. */
static void find_functions(void) {
    void *found[] = {found_in("libcuda.so.1", "cuLaunchKernel"),
        found_in("libcuda.so.1", "cuStreamIsCapturing"),
        found_in("libcuda.so.1", "cuMemcpyDtoHAsync_v2"), found_in("libcuda.so.1", "cuEventRecord"),
        found_in("libcuda.so.1", "cuFuncGetParamInfo")};
    memcpy(&launcher, found, sizeof *found), memcpy(&stream_state, found + 1, sizeof *found);
    memcpy(&copier, found + 2, sizeof *found), memcpy(&recorder, found + 3, sizeof *found);
    memcpy(&argument, found + 4, sizeof *found);
    find_cuda_stream();
}
/* Whether the stream that torch works on is ours, and is not being recorded into a graph; -1 after
 * an error. */
static int is_stream(const Lane *lane) {
    uint64_t stream;
    int state;
    if (stream_state && cuda_stream(lane->index, &stream)) {
        if (stream != lane->stream) return 0;
        return !stream_state((void *)(uintptr_t)stream, &state) && !state;
    }
    int capturing = truth_of(PyObject_CallNoArgs(lane->capturing));
    if (capturing) return capturing < 0 ? -1 : 0;
    uint64_t told =
        (uint64_t)number_of(PyObject_CallFunctionObjArgs(lane->stream_of, lane->device, NULL));
    return PyErr_Occurred() ? -1 : told == lane->stream;
}
/* Asks where the arguments of a kernel belong, of which so many are known. */
static void ask_places(Kernel *kernel, int count) {
    size_t at, size, bytes = 0;
    int i = 0;
    kernel->asked = 1;
    for (; argument && i < count + 2 &&
           !argument((void *)(uintptr_t)kernel->function, (size_t)i, &at, &size);
        i++) {
        if ((size != 4 && size != 8) || at + size > sizeof(uint64_t[MOST_ARGUMENTS + 2])) return;
        kernel->places[i].at = (uint16_t)at, kernel->places[i].size = (uint16_t)size;
        if (at + size > bytes) bytes = at + size;
    }
    if (i >= count) kernel->arguments = i, kernel->bytes = bytes;
}
/* Integers of 32 bits are the low half of 64. Behind the arguments stand two addresses of scratch
 * memory that our kernels have none of. */
static int launch(
    Kernel *kernel, unsigned programs, uint64_t stream, const uint64_t *numbers, int count) {
    enum { BUFFER = 1, SIZE = 2 }; /* as CUDA has them */
    uint64_t all[MOST_ARGUMENTS + 2] = {0}, buffer[MOST_ARGUMENTS + 2] = {0};
    void *places[MOST_ARGUMENTS + 2],
        *packed[] = {(void *)BUFFER, buffer, (void *)SIZE, &kernel->bytes, NULL};
    memcpy(all, numbers, sizeof *all * (size_t)count);
    if (!kernel->asked) ask_places(kernel, count);
    for (int i = 0; i < kernel->arguments; i++)
        memcpy((char *)buffer + kernel->places[i].at, all + i, kernel->places[i].size);
    for (int i = 0; !kernel->arguments && i < count + 2; i++) places[i] = all + i;
    int error = launcher((void *)(uintptr_t)kernel->function, programs, 1, 1, kernel->threads, 1, 1,
        kernel->shared, (void *)(uintptr_t)stream, kernel->arguments ? NULL : places,
        kernel->arguments ? packed : NULL);
    if (error) PyErr_Format(PyExc_RuntimeError, "a kernel was not launched: CUDA error %d", error);
    return error ? -1 : 0;
}
/* Whether it was possible; else torch's own way serves, and tells what is wrong. */
PyObject *copy_back(PyObject *module, PyObject *args) {
    unsigned long long to, from, size, stream, event;
    if (!PyArg_ParseTuple(args, "KKKKK", &to, &from, &size, &stream, &event)) return NULL;
    if (!copier) find_functions();
    void *queue = (void *)(uintptr_t)stream;
    int done = copier && recorder && !copier((void *)(uintptr_t)to, from, (size_t)size, queue) &&
               !recorder((void *)(uintptr_t)event, queue);
    if (done) GONE(copies_back);
    return PyBool_FromLong(done);
}
static int is_ready(const Kernel *kernel) { return kernel && kernel->function && launcher; }

/* What differs from tensor to tensor; how many programs it takes. */
static unsigned describe(const Queued *q, uint64_t *to) {
    const Recipe *r = q->recipe;
    int wide = q->kernel == r->wide, count = wide ? r->wide_count : r->scalar_count;
    to[1] = q->pointer, to[2] = q->part, to[3] = q->row;
    memcpy(to + 4, wide ? r->wide_scalars : r->scalars, sizeof *to * (size_t)count);
    memcpy(to + 4 + count, r->checks, sizeof r->checks);
    return (wide ? r->wide_programs : r->programs) + (unsigned)r->checks[0];
}
/* Launches one of the queue, and with it all that the same kernel measures. */
static int launch_alike(Lane *l, int first) {
    const Queued *q = l->queue + first;
    const Recipe *r = q->recipe;
    Kernel *kernel = q->kernel;
    uint64_t *others = (uint64_t *)(uintptr_t)l->others + WORDS_OF_ONE * l->told, programs = 0;
    uint64_t numbers[MOST_ARGUMENTS] = {
        q->pointer, l->parts, q->part, l->segments, q->row, l->masks};
    int count = 6, several = 0, wide = kernel == r->wide,
        scalars = wide ? r->wide_count : r->scalar_count;
    for (int i = first; i < l->waiting; i++) {
        if (l->queue[i].kernel != kernel) continue;
        uint64_t *to = others + WORDS_OF_ONE * several++;
        to[0] = programs += describe(l->queue + i, to);
        if (i > first) l->queue[i].kernel = NULL;
    }
    memcpy(numbers + count, wide ? r->wide_scalars : r->scalars, sizeof *numbers * (size_t)scalars),
        count += scalars;
    memcpy(numbers + count, r->checks, sizeof r->checks), count += CHECKS;
    uint64_t rest[] = {(uint64_t)(uintptr_t)others, (uint64_t)several, others[0], l->places,
        l->residues, l->weights};
    memcpy(numbers + count, rest, sizeof rest), count += (int)(sizeof rest / sizeof *rest);
    if (several > 1)
        l->told +=
            (unsigned)several; /* until the answers are back: it is read when the kernel runs */
    GONE(launches);
    return launch(kernel, (unsigned)programs, l->stream, numbers, count);
}
/* Lets go of what waits, from a copy: a finalizer may have something measured. */
static void drop_queue(Lane *l) {
    Queued dropped[SEVERAL];
    int count = l->waiting;
    memcpy(dropped, l->queue, sizeof *dropped * (size_t)count);
    l->waiting = 0;
    for (int i = 0; i < count; i++)
        Py_DECREF(dropped[i].value), Py_DECREF((PyObject *)dropped[i].recipe);
}
/* Launches what waits. Of what was not launched nothing is known. */
static int launch_queue(Lane *l) {
    int failed = 0;
    uint32_t nothing[4] = {0, PENDING};
    for (int i = 0; i < l->waiting && !failed; i++)
        failed = l->queue[i].kernel && launch_alike(l, i);
    for (int i = 0; i < l->waiting && failed; i++)
        memcpy((char *)(uintptr_t)l->about + ABOUT_BYTES * l->queue[i].row + 8, nothing,
            sizeof nothing);
    drop_queue(l);
    return failed ? -1 : 0;
}
/* Makes rows of the parts that are there. */
static int combine(Lane *lane) {
    if (launch_queue(lane)) return -1;
    uint64_t numbers[MOST_ARGUMENTS] = {lane->parts, lane->segments, lane->rows, lane->combined};
    if (lane->used &&
        launch(lane->combine, (unsigned)lane->pieces * (unsigned)(lane->count - lane->combined),
            lane->stream, numbers, 4))
        return -1;
    lane->combined = lane->count, lane->used = 0;
    return 0;
}
/* The number of the row, -1 after an error, -2 where Python must do it. In C it is launched when
 * our code ends: until then nobody else's runs, and the tensor is held. In Python, which an
 * exception may end at any moment, it is launched at once. */
int64_t queue_measure(
    Fast *f, PyObject *lane_object, PyObject *recipe_object, PyObject *value, uint64_t pointer) {
    Lane *lane = (Lane *)lane_object;
    Recipe *recipe = (Recipe *)recipe_object;
    if (!lane->bound || !recipe->direct || (recipe->aligned && pointer % 4) ||
        lane->count >= lane->most_rows)
        return -2;
    Kernel *kernel = recipe->wide && pointer % 16 == 0 ? recipe->wide : recipe->usual;
    if (!is_ready(kernel)) return -2;
    int full = lane->used + recipe->room > lane->most_parts;
    if (full && !is_ready(lane->combine)) return -2;
    int ours = lane->waiting ? 1 : is_stream(lane);
    if (ours <= 0) return ours ? -1 : -2;
    if ((full && combine(lane)) || (lane->waiting == SEVERAL && launch_queue(lane))) return -1;
    if (f->queued != lane && launch_queued(f)) return -1;
    /* What was let go of may have had a finalizer, and that something to measure. */
    if (!lane->bound || lane->count >= lane->most_rows ||
        lane->used + recipe->room > lane->most_parts)
        return -2;
    int64_t number =
        frames_measure((Frames *)f->given[FRAMES], PyBytes_AsString(lane->unknown), MEASURE_BYTES);
    if (number < 0) return -1;
    lane->queue[lane->waiting++] = (Queued){Py_NewRef(value), (Recipe *)Py_NewRef(recipe_object),
        kernel, pointer, lane->used, lane->count};
    ((uint32_t *)(uintptr_t)lane->numbers)[lane->count] = (uint32_t)number;
    memcpy((char *)(uintptr_t)lane->about + ABOUT_BYTES * lane->count, recipe->about, ABOUT_BYTES);
    lane->used += recipe->room, lane->count++;
    GONE(queued);
    if (f->queued != lane) f->queued = (Lane *)Py_NewRef(lane_object);
    return (f->in_c && gate_is_held(f->gate)) || !launch_queued(f) ? number : -1;
}
/* Launches what our code has queued. */
int launch_queued(Fast *f) {
    Lane *lane = f->queued;
    if (!lane) return 0;
    f->queued = NULL;
    int failed = launch_queue(lane);
    Py_DECREF(lane);
    return failed;
}
int is_lane(PyObject *value) { return Py_TYPE(value) == lane_type; }

static PyMemberDef kernel_members[] = {
    {"function", T_ULONGLONG, offsetof(Kernel, function), 0, NULL},
    {"threads", T_UINT, offsetof(Kernel, threads), 0, NULL},
    {"shared", T_UINT, offsetof(Kernel, shared), 0, NULL}, {NULL, 0, 0, 0, NULL}};
static PyType_Slot kernel_slots[] = {{Py_tp_members, kernel_members}, {0, NULL}};
PyType_Spec kernel_spec = {
    "ulpscope.native._taps.Kernel", sizeof(Kernel), 0, Py_TPFLAGS_DEFAULT, kernel_slots};

static int take_scalars(PyObject *tuple, uint64_t *to) {
    Py_ssize_t count = PyTuple_Size(tuple);
    if (count > MOST_SCALARS)
        return PyErr_SetString(PyExc_ValueError, "too many arguments of a kernel"), -1;
    for (Py_ssize_t i = 0; i < count; i++)
        to[i] = PyLong_AsUnsignedLongLongMask(PyTuple_GetItem(tuple, i));
    return PyErr_Occurred() ? -1 : (int)count;
}
static int recipe_init(Recipe *r, PyObject *args, PyObject *kwargs) {
    PyObject *usual, *wide, *one, *two;
    unsigned long long checks[CHECKS];
    const char *about;
    Py_ssize_t size;
    int direct, aligned;
    if (!PyArg_ParseTuple(args, "OIO!OIO!(KKKK)Kppy#", &usual, &r->programs, &PyTuple_Type, &one,
            &wide, &r->wide_programs, &PyTuple_Type, &two, checks, checks + 1, checks + 2,
            checks + 3, &r->room, &direct, &aligned, &about, &size))
        return -1;
    if (size != ABOUT_BYTES) return PyErr_SetString(PyExc_ValueError, "not a row"), -1;
    memcpy(r->about, about, ABOUT_BYTES);
    for (int i = 0; i < CHECKS; i++) r->checks[i] = checks[i];
    if ((r->scalar_count = take_scalars(one, r->scalars)) < 0 ||
        (r->wide_count = take_scalars(two, r->wide_scalars)) < 0)
        return -1;
    r->direct = (char)direct, r->aligned = (char)aligned;
    r->usual = usual == Py_None ? NULL : (Kernel *)Py_NewRef(usual),
    r->wide = wide == Py_None ? NULL : (Kernel *)Py_NewRef(wide);
    return 0;
}
static void recipe_dealloc(Recipe *r) {
    PyTypeObject *type = Py_TYPE(r);
    Py_XDECREF(r->usual), Py_XDECREF(r->wide);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(r);
    Py_DECREF(type);
}
static PyType_Slot recipe_slots[] = {
    {Py_tp_init, recipe_init}, {Py_tp_dealloc, recipe_dealloc}, {0, NULL}};
PyType_Spec recipe_spec = {
    "ulpscope.native._taps.Recipe", sizeof(Recipe), 0, Py_TPFLAGS_DEFAULT, recipe_slots};

static int lane_init(Lane *l, PyObject *args, PyObject *kwargs) {
    PyObject *capturing, *stream_of, *device, *unknown, *kernel;
    int checked;
    if (!PyArg_ParseTuple(args, "OOOSpKKOiKK", &capturing, &stream_of, &device, &unknown, &checked,
            &l->most_rows, &l->most_parts, &kernel, &l->pieces, &l->masks, &l->weights))
        return -1;
    if (PyBytes_Size(unknown) != MEASURE_BYTES)
        return PyErr_SetString(PyExc_ValueError, "not a row"), -1;
    l->capturing = Py_NewRef(capturing), l->stream_of = Py_NewRef(stream_of),
    l->device = Py_NewRef(device), l->unknown = Py_NewRef(unknown);
    l->combine = kernel == Py_None ? NULL : (Kernel *)Py_NewRef(kernel);
    l->checked = (char)checked, l->index = (int)PyLong_AsLong(device);
    find_functions();
    return PyErr_Occurred() ? -1 : 0;
}
static PyObject *lane_bind(Lane *l, PyObject *args) {
    if (!PyArg_ParseTuple(args, "KKKKKKKKKKKKK", &l->stream, &l->used, &l->count, &l->combined,
            &l->told, &l->parts, &l->segments, &l->places, &l->residues, &l->rows, &l->numbers,
            &l->about, &l->others))
        return NULL;
    l->bound = 1;
    Py_RETURN_NONE;
}
static PyObject *lane_launch(Lane *l, PyObject *none) {
    if (launch_queue(l)) return NULL;
    Py_RETURN_NONE;
}
static void lane_dealloc(Lane *l) {
    PyTypeObject *type = Py_TYPE(l);
    drop_queue(l);
    Py_XDECREF(l->capturing), Py_XDECREF(l->stream_of), Py_XDECREF(l->device),
        Py_XDECREF(l->unknown), Py_XDECREF(l->combine);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(l);
    Py_DECREF(type);
}
static PyMemberDef lane_members[] = {{"used", T_ULONGLONG, offsetof(Lane, used), 0, NULL},
    {"count", T_ULONGLONG, offsetof(Lane, count), 0, NULL},
    {"combined", T_ULONGLONG, offsetof(Lane, combined), 0, NULL},
    {"stream", T_ULONGLONG, offsetof(Lane, stream), 0, NULL},
    {"told", T_ULONGLONG, offsetof(Lane, told), READONLY, NULL},
    {"bound", T_BOOL, offsetof(Lane, bound), 0, NULL}, {NULL, 0, 0, 0, NULL}};
static PyMethodDef lane_methods[] = {
    {"bind", (PyCFunction)lane_bind, METH_VARARGS, "Goes on with a batch."},
    {"launch", (PyCFunction)lane_launch, METH_NOARGS, "Launches what waits."},
    {NULL, NULL, 0, NULL}};
static PyType_Slot lane_slots[] = {{Py_tp_init, lane_init}, {Py_tp_dealloc, lane_dealloc},
    {Py_tp_members, lane_members}, {Py_tp_methods, lane_methods}, {0, NULL}};
PyType_Spec lane_spec = {
    "ulpscope.native._taps.Lane", sizeof(Lane), 0, Py_TPFLAGS_DEFAULT, lane_slots};

/* --- answers
 * -----------------------------------------------------------------------------------------------------
 */

enum { ANSWER_HEAD = 12, ANSWER_WORDS = 140 }; /* cuda_rows.py */
enum { OF_DOUBLES = 1, OF_SIGNED = 2, OF_UNSIGNED = 3 };
typedef struct {
    uint64_t numel;
    uint32_t kind, flags, sketch, zeros;
} About;
_Static_assert(sizeof(About) == ABOUT_BYTES, "as cuda_rows.py has it");
static double double_of(uint64_t bits) {
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}
static uint64_t extreme(uint64_t key, uint32_t kind, int unseen) {
    if (kind >= OF_SIGNED) return kind == OF_UNSIGNED ? key ^ 1ull << 63 : key;
    double value = unseen ? 0.0 : double_of(key >> 63 ? key ^ 0x7FFFFFFFFFFFFFFFull : key);
    value += 0.0; /* which of 0.0 and -0.0 wins depends on the order */
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}
static double norm_of(const uint64_t *words, uint32_t kind) {
    double square = double_of(words[3]);
    if (kind == OF_DOUBLES && square < 0x1p-900) return sqrt(double_of(words[9])) / 0x1p600;
    if (kind == OF_DOUBLES && !(square - square == 0)) return sqrt(double_of(words[8])) * 0x1p600;
    return sqrt(square);
}
static void row_of(const uint64_t *words, const About *about, MeasureRow *row) {
    *row = (MeasureRow){.numel = about->numel,
        .kind = about->flags,
        .payload_offset = NONE64,
        .sketch_len = about->sketch};
    if (about->flags & STATS) {
        row->nan = words[4];
        row->posinf = words[5];
        row->neginf = words[6];
        row->zero = words[7];
        int unseen = about->numel == row->nan + row->posinf + row->neginf;
        row->max_bits = extreme(words[0], about->kind, unseen);
        row->min_bits = extreme(words[1], about->kind, unseen);
        row->sum = double_of(words[2]);
        row->norm = norm_of(words, about->kind);
        row->kind |= about->kind == OF_SIGNED     ? KIND_SIGNED
                     : about->kind >= OF_UNSIGNED ? KIND_UNSIGNED
                                                  : 0;
    }
    if (about->flags & CRC) row->crc = (uint32_t)words[10] ^ about->zeros;
}
/* As cuda_rows.py has it: fills the rows and the sketches; how many bytes of these. */
PyObject *rows_of(PyObject *module, PyObject *args) {
    Py_buffer answers, about, rows, sketches;
    if (!PyArg_ParseTuple(args, "y*y*w*w*", &answers, &about, &rows, &sketches)) return NULL;
    size_t count = (size_t)about.len / sizeof(About), size = 0;
    int good = (size_t)answers.len >= count * 8 * ANSWER_WORDS &&
               (size_t)rows.len >= count * sizeof(MeasureRow);
    for (size_t i = 0; good && i < count; i++) {
        const uint64_t *words = (const uint64_t *)answers.buf + ANSWER_WORDS * i;
        About one;
        MeasureRow row;
        memcpy(&one, (const char *)about.buf + sizeof one * i, sizeof one);
        size_t more = 4 * (size_t)one.sketch;
        if (!(good = more <= 8 * (ANSWER_WORDS - ANSWER_HEAD) &&
                     size + more <= (size_t)sketches.len))
            break;
        row_of(words, &one, &row);
        row.sketch_offset = size;
        memcpy((char *)rows.buf + sizeof row * i, &row, sizeof row);
        memcpy((char *)sketches.buf + size, words + ANSWER_HEAD, more), size += more;
    }
    PyBuffer_Release(&answers), PyBuffer_Release(&about), PyBuffer_Release(&rows),
        PyBuffer_Release(&sketches);
    if (!good)
        return PyErr_SetString(PyExc_ValueError, "answers, rows and sketches do not agree"), NULL;
    GONE(device_rows);
    return PyLong_FromSize_t(size);
}
