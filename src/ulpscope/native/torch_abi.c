/* The only file that names symbols of torch. What is asked of each value is asked of torch's own
 * library: twelve attributes through Python cost more than measuring a small tensor. Three of the
 * functions are const getters of C++, the others torch's stable interface for C; each has its twin
 * in an attribute, which serves where `check_torch` was not called (ULPSCOPE_NATIVE=safe, a torch
 * that we do not know), or where one of thirteen samples is told otherwise than by Python. */
#include "capture.h"
#ifndef _WIN32
#include <dlfcn.h>
#endif

typedef void *Impl; /* what a tensor of Python refers to; torch's functions want to know where that
                       is written */
enum { TORCH_CPU, C10, TORCH_CUDA };
#define OF_TENSORS(X)                                                                       \
    X(requires_grad, C10, "_ZNK3c1010TensorImpl13requires_gradEv", _Bool, (Impl))           \
    X(version, TORCH_CPU, "_ZNK2at10TensorBase8_versionEv", int64_t, (Impl *))              \
    X(is_view, TORCH_CPU, "_ZNK2at10TensorBase7is_viewEv", _Bool, (Impl *))                 \
    X(data_ptr, TORCH_CPU, "aoti_torch_get_data_ptr", int, (Impl *, void **))               \
    X(storage_offset, TORCH_CPU, "aoti_torch_get_storage_offset", int, (Impl *, int64_t *)) \
    X(dim, TORCH_CPU, "aoti_torch_get_dim", int, (Impl *, int64_t *))                       \
    X(sizes, TORCH_CPU, "aoti_torch_get_sizes", int, (Impl *, int64_t **))                  \
    X(strides, TORCH_CPU, "aoti_torch_get_strides", int, (Impl *, int64_t **))              \
    X(layout, TORCH_CPU, "aoti_torch_get_layout", int, (Impl *, int32_t *))                 \
    X(dtype, TORCH_CPU, "aoti_torch_get_dtype", int, (Impl *, int32_t *))                   \
    X(device_type, TORCH_CPU, "aoti_torch_get_device_type", int, (Impl *, int32_t *))       \
    X(device_index, TORCH_CPU, "aoti_torch_get_device_index", int, (Impl *, int32_t *))
/* Of which each serves without the others. */
#define OF_THREADS(X)                                                         \
    X(grad_mode, TORCH_CPU, "aoti_torch_grad_mode_is_enabled", _Bool, (void)) \
    X(stream, TORCH_CUDA, "aoti_torch_get_current_cuda_stream", int, (int32_t, void **))

#define FIELD(name, library, symbol, result, arguments) result(*name) arguments;
static struct {
    char ready;
    size_t impl_at; /* where the object of Python has it */
    int32_t strided;
    OF_TENSORS(FIELD) OF_THREADS(FIELD)
} torch;

typedef struct {
    void *to;
    int library;
    const char *symbol;
} Wanted;
#define WANTED(name, library, symbol, result, arguments) {&torch.name, library, symbol},
static const Wanted of_tensors[] = {OF_TENSORS(WANTED)};
static const Wanted of_threads[] = {OF_THREADS(WANTED)};

void *found_in(const char *library, const char *name) {
#ifdef _WIN32
    return NULL;
#else
    void *opened = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
    return opened ? dlsym(opened, name) : NULL;
#endif
}
/* Whether all of them are there. */
static int find_all(const Wanted *wanted, size_t count) {
    static const char *const libraries[] = {"libtorch_cpu.so", "libc10.so", "libtorch_cuda.so"};
    int all = 1;
    for (size_t i = 0; i < count; i++) {
        void *found = found_in(libraries[wanted[i].library], wanted[i].symbol);
        memcpy(wanted[i].to, &found, sizeof found);
        all = all && found;
    }
    return all;
}
static Impl impl_of(PyObject *value) { return *(Impl *)((char *)value + torch.impl_at); }

/* --- what is asked of tensors ---------------------------------------------------------------- */

int tensor_requires_grad(PyObject *value) {
    return torch.ready ? torch.requires_grad(impl_of(value)) : truth_of(GET(value, REQUIRES_GRAD));
}
int tensor_is_view(PyObject *value) {
    if (!torch.ready) return truth_of(ASK(value, IS_VIEW));
    Impl impl = impl_of(value);
    return torch.is_view(&impl);
}
/* A new reference; None where it is no view. */
PyObject *tensor_base(PyObject *value) {
    return torch.ready && !tensor_is_view(value) ? Py_NewRef(Py_None) : GET(value, BASE);
}
/* 0, or -1 with an exception set, as of a tensor without memory. */
int tensor_pointer(PyObject *value, uint64_t *to) {
    Impl impl = torch.ready ? impl_of(value) : NULL;
    void *pointer;
    if (impl && !torch.data_ptr(&impl, &pointer))
        *to = (uint64_t)(uintptr_t)pointer;
    else
        *to = (uint64_t)number_of(ASK(value, DATA_PTR));
    return PyErr_Occurred() ? -1 : 0;
}
static int use_told(PyObject *value, Use *to) {
    to->requires_grad = truth_of(GET(value, REQUIRES_GRAD));
    to->version = (uint64_t)number_of(GET(value, VERSION));
    to->pointer = (uint64_t)number_of(ASK(value, DATA_PTR));
    return PyErr_Occurred() ? -1 : 0;
}
/* What changes from use to use, of a tensor of which each is known to exist: a getter cannot say
 * that there is no version. 0, or -1 with an exception set. */
int tensor_use(PyObject *value, Use *to) {
    if (!torch.ready) return use_told(value, to);
    Impl impl = impl_of(value);
    void *pointer;
    if (torch.data_ptr(&impl, &pointer)) return use_told(value, to);
    to->requires_grad = torch.requires_grad(impl);
    to->version = (uint64_t)torch.version(&impl);
    to->pointer = (uint64_t)(uintptr_t)pointer;
    GONE(direct_tensors);
    return 0;
}
/* How a tensor lies in memory: 1; 0 where only its attributes tell; -1 with an exception set. */
int tensor_form(PyObject *value, Form *to) {
    if (!torch.ready) return 0;
    Impl impl = impl_of(value);
    int32_t dtype, layout, device, index;
    int64_t dim, offset, *sizes, *strides;
    if (torch.layout(&impl, &layout) || layout != torch.strided) return 0;
    int nested = truth_of(GET(value, IS_NESTED)); /* which has no sizes */
    if (nested) return nested < 0 ? -1 : 0;
    if (torch.dim(&impl, &dim) || dim > MOST_DIMS) return 0;
    if (torch.sizes(&impl, &sizes) || torch.strides(&impl, &strides)) return 0;
    if (torch.dtype(&impl, &dtype) || torch.storage_offset(&impl, &offset)) return 0;
    if (torch.device_type(&impl, &device) || torch.device_index(&impl, &index)) return 0;
    to->offset = (uint64_t)offset;
    to->count = FORM_HEAD + 2 * (size_t)dim;
    to->numbers[0] = dtype;
    to->numbers[1] = device;
    to->numbers[2] = index;
    to->numbers[3] = dim;
    memcpy(to->numbers + FORM_HEAD, sizes, sizeof *sizes * (size_t)dim);
    memcpy(to->numbers + FORM_HEAD + dim, strides, sizeof *strides * (size_t)dim);
    return 1;
}

/* --- what is asked of the thread, and of the device ------------------------------------------ */

/* Whether there will be a backward pass; -1 with an exception set. */
int is_grad_on(Fast *f) {
    if (torch.ready && torch.grad_mode) return torch.grad_mode();
    return truth_of(PyObject_CallNoArgs(f->given[GRAD_ENABLED]));
}
/* The stream that torch works on: 1; 0 where only Python can say. */
int cuda_stream(int index, uint64_t *to) {
    void *stream;
    if (!torch.ready || !torch.stream || torch.stream(index, &stream)) return 0;
    *to = (uint64_t)(uintptr_t)stream;
    return 1;
}
/* The library for CUDA is loaded later than the others. */
void find_cuda_stream(void) { find_all(of_threads, sizeof of_threads / sizeof *of_threads); }

/* --- whether torch tells what Python tells --------------------------------------------------- */

typedef struct {
    PyObject *value, *dtype, *shape, *stride;
    uint64_t cdata;
    int view, index;
    long long offset;
    Use use;
} Sample;
static int read_sample(PyObject *from, Sample *to) {
    unsigned long long cdata, version, pointer;
    if (!PyArg_ParseTuple(from, "OKpKpKOO!O!Li", &to->value, &cdata, &to->use.requires_grad,
            &version, &to->view, &pointer, &to->dtype, &PyTuple_Type, &to->shape, &PyTuple_Type,
            &to->stride, &to->offset, &to->index))
        return -1;
    to->cdata = cdata;
    to->use.version = version;
    to->use.pointer = pointer;
    return 0;
}
/* The only word of all objects that is the address of what each refers to; 0 where there is none.
 */
static size_t find_impl(const Sample *samples, size_t count) {
    size_t found = 0, words = SIZE_MAX;
    for (size_t i = 0; i < count; i++) {
        PyObject *type = (PyObject *)Py_TYPE(samples[i].value);
        size_t size =
            (size_t)number_of(PyObject_GetAttrString(type, "__basicsize__")) / sizeof(void *);
        if (size < words) words = size;
    }
    for (size_t at = sizeof(PyObject) / sizeof(void *); !PyErr_Occurred() && at < words; at++) {
        size_t agree = 0;
        while (agree < count &&
               word_of(samples[agree].value, at * sizeof(void *)) == samples[agree].cdata)
            agree++;
        if (agree < count) continue;
        if (found) return 0;
        found = at * sizeof(void *);
    }
    return found;
}
static int same_numbers(PyObject *tuple, const int64_t *numbers, int64_t count) {
    if (PyTuple_Size(tuple) != count) return 0;
    for (int64_t i = 0; i < count; i++)
        if (PyLong_AsLongLong(PyTuple_GetItem(tuple, i)) != numbers[i]) return 0;
    return 1;
}
static int agrees(const Sample *sample, PyObject **dtypes) {
    enum { MOST_DTYPES = 64 };
    Use use;
    Form form;
    if (tensor_use(sample->value, &use) || tensor_form(sample->value, &form) != 1) return 0;
    int64_t dim = form.numbers[3], dtype = form.numbers[0];
    if (dtype < 0 || dtype >= MOST_DTYPES || (dtypes[dtype] && dtypes[dtype] != sample->dtype))
        return 0;
    dtypes[dtype] = sample->dtype;
    return use.requires_grad == sample->use.requires_grad && use.version == sample->use.version &&
           use.pointer == sample->use.pointer && tensor_is_view(sample->value) == sample->view &&
           form.numbers[2] == sample->index && form.offset == (uint64_t)sample->offset &&
           same_numbers(sample->shape, form.numbers + FORM_HEAD, dim) &&
           same_numbers(sample->stride, form.numbers + FORM_HEAD + dim, dim);
}
/* A sample: a tensor, `_cdata`, and what its attributes are. From now on tensors are asked without
 * Python if it told the same of each; whether that is so. */
PyObject *check_torch(PyObject *module, PyObject *list) {
    enum { MOST = 16 };
    Sample samples[MOST];
    PyObject *dtypes[64] = {NULL};
    Py_ssize_t count = PyList_Size(list);
    if (count < 2 || count > MOST) return PyErr_Format(PyExc_ValueError, "%zd samples", count);
    torch.ready = 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (read_sample(PyList_GetItem(list, i), samples + i)) return NULL;
    int good = find_all(of_tensors, sizeof of_tensors / sizeof *of_tensors);
    if (good) torch.impl_at = find_impl(samples, (size_t)count);
    if (PyErr_Occurred()) return NULL;
    if (!good || !torch.impl_at) Py_RETURN_FALSE;
    Impl first = impl_of(samples[0].value);
    if (torch.layout(&first, &torch.strided)) Py_RETURN_FALSE;
    find_all(of_threads, sizeof of_threads / sizeof *of_threads);
    torch.ready = 1;
    for (Py_ssize_t i = 0; good && i < count; i++) good = agrees(samples + i, dtypes);
    torch.ready = (char)good;
    return PyErr_Occurred() ? NULL : PyBool_FromLong(good);
}
