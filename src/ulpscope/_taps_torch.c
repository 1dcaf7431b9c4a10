/* What an ordinary tensor is, asked of torch's own library: a dozen attributes through Python cost more than measuring a small
 * tensor. Nothing is assumed of how torch lays out its objects: `learn` finds where a tensor has its implementation and its
 * dispatch keys, by samples whose addresses and keys Python tells, and compares every answer with that of Python. Where
 * anything differs, or a function is missing, tensors are asked through their attributes, here as everywhere. */
#include "_taps.h"
#ifndef _WIN32
#include <dlfcn.h>
#endif

enum { OBJECT_WORDS = 4, IMPL_WORDS = 22 }; /* how far to look: so large are both in torch 2.13 */

typedef void *Impl;
static struct {
    int ready;
    size_t impl_at, keys_at;
    int (*requires_grad)(Impl);
    uint32_t (*output_nr)(Impl *);
    int64_t (*version)(Impl *);
    int (*is_view)(Impl *);
    int (*data_ptr)(Impl *, void **);
    int (*dim)(Impl *, int64_t *);
    int (*sizes)(Impl *, int64_t **);
    int (*strides)(Impl *, int64_t **);
    int (*dtype)(Impl *, int32_t *);
    int (*device_type)(Impl *, int32_t *);
    int (*device_index)(Impl *, int32_t *);
    int (*storage_offset)(Impl *, int64_t *);
} torch;

static int find_functions(void) {
#ifdef _WIN32
    return 0;
#else
    void *libraries[] = {dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD), dlopen("libc10.so", RTLD_NOW | RTLD_NOLOAD)};
    struct { const char *name; int library; void *to; } wanted[] = {
        {"_ZNK3c1010TensorImpl13requires_gradEv", 1, &torch.requires_grad},
        {"_ZNK2at10TensorBase9output_nrEv", 0, &torch.output_nr}, {"_ZNK2at10TensorBase8_versionEv", 0, &torch.version},
        {"_ZNK2at10TensorBase7is_viewEv", 0, &torch.is_view}, {"aoti_torch_get_data_ptr", 0, &torch.data_ptr},
        {"aoti_torch_get_dim", 0, &torch.dim}, {"aoti_torch_get_sizes", 0, &torch.sizes},
        {"aoti_torch_get_strides", 0, &torch.strides}, {"aoti_torch_get_dtype", 0, &torch.dtype},
        {"aoti_torch_get_device_type", 0, &torch.device_type}, {"aoti_torch_get_device_index", 0, &torch.device_index},
        {"aoti_torch_get_storage_offset", 0, &torch.storage_offset}};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *found = libraries[wanted[i].library] ? dlsym(libraries[wanted[i].library], wanted[i].name) : NULL;
        if (!found) return 0;
        memcpy(wanted[i].to, &found, sizeof found);
    }
    return 1;
#endif
}

static Impl impl_of(PyObject *value) { return *(Impl *)((char *)value + torch.impl_at); }
static uint64_t keys_of(Impl impl) { return *(uint64_t *)((char *)impl + torch.keys_at); }

/* The only word of all objects that has the value which belongs to it. */
static size_t place_of(const uint64_t *const *objects, const uint64_t *values, size_t count, size_t words) {
    size_t found = 0;
    for (size_t word = 1; word < words; word++) {
        size_t agree = 0;
        while (agree < count && objects[agree][word] == values[agree]) agree++;
        if (agree == count) {
            if (found) return 0;
            found = word;
        }
    }
    return found * sizeof(uint64_t);
}
static int same_numbers(PyObject *tuple, const int64_t *numbers, int64_t count) {
    if (PyTuple_Size(tuple) != count) return 0;
    for (int64_t i = 0; i < count; i++)
        if (PyLong_AsLongLong(PyTuple_GetItem(tuple, i)) != numbers[i]) return 0;
    return 1;
}
/* A sample: tensor, address of its implementation, keys, and what its attributes are. */
static int agrees(PyObject *sample) {
    PyObject *value, *shape, *stride;
    unsigned long long cdata, keys, pointer;
    long long version, output, offset;
    int grad, view, device;
    if (!PyArg_ParseTuple(sample, "OKKpLKO!O!LLpi", &value, &cdata, &keys, &grad, &version, &pointer, &PyTuple_Type,
        &shape, &PyTuple_Type, &stride, &offset, &output, &view, &device)) return 0;
    Direct told;
    return tensor_facts(value, &told) && impl_of(value) == (Impl)(uintptr_t)cdata && told.keys == keys &&
           told.requires_grad == grad && told.version == (uint64_t)version && told.pointer == pointer &&
           tensor_layout(&told) && told.offset == (uint64_t)offset && same_numbers(shape, told.sizes, told.dim) &&
           same_numbers(stride, told.strides, told.dim) && torch.output_nr(&told.impl) == (uint32_t)output &&
           (torch.is_view(&told.impl) & 1) == view && told.device_index == device;
}
PyObject *learn(PyObject *module, PyObject *samples) {
    enum { MOST = 16 };
    const uint64_t *objects[MOST], *impls[MOST];
    uint64_t addresses[MOST], keys[MOST];
    Py_ssize_t count = PySequence_Size(samples);
    if (count < 2 || count > MOST) return PyErr_SetString(PyExc_ValueError, "not so many samples"), NULL;
    torch.ready = 0;
    int good = find_functions();
    for (Py_ssize_t i = 0; good && i < count; i++) {
        PyObject *sample = PySequence_GetItem(samples, i);
        objects[i] = (const uint64_t *)PyTuple_GetItem(sample, 0);
        addresses[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(sample, 1));
        keys[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(sample, 2));
        impls[i] = (const uint64_t *)(uintptr_t)addresses[i];
        Py_DECREF(sample); /* the list keeps it */
        if (PyErr_Occurred()) return NULL;
    }
    good = good && (torch.impl_at = place_of(objects, addresses, (size_t)count, OBJECT_WORDS)) &&
        (torch.keys_at = place_of(impls, keys, (size_t)count, IMPL_WORDS));
    torch.ready = good;
    for (Py_ssize_t i = 0; torch.ready && i < count; i++) {
        PyObject *sample = PySequence_GetItem(samples, i);
        torch.ready = sample && agrees(sample);
        Py_XDECREF(sample);
    }
    if (PyErr_Occurred()) torch.ready = 0;
    if (PyErr_Occurred()) return NULL;
    return PyBool_FromLong(torch.ready);
}

uint64_t tensor_keys(PyObject *value) { return torch.ready ? keys_of(impl_of(value)) : 0; }
int tensor_is_view(Direct *of) { return torch.is_view(&of->impl) & 1; }
int64_t tensor_output(Direct *of) { return (int64_t)torch.output_nr(&of->impl); }
/* What changes from use to use; 0 where only Python can say. The tensor must be an ordinary one with ordinary keys. */
int tensor_facts(PyObject *value, Direct *to) {
    if (!torch.ready) return 0;
    to->impl = impl_of(value);
    to->keys = keys_of(to->impl);
    to->requires_grad = torch.requires_grad(to->impl) & 1;
    to->version = (uint64_t)torch.version(&to->impl);
    void *pointer;
    if (torch.data_ptr(&to->impl, &pointer)) return 0;
    to->pointer = (uint64_t)(uintptr_t)pointer;
    return 1;
}
int tensor_layout(Direct *to) {
    int64_t offset;
    if (torch.dim(&to->impl, &to->dim) || torch.sizes(&to->impl, &to->sizes) || torch.strides(&to->impl, &to->strides) ||
        torch.dtype(&to->impl, &to->dtype) || torch.device_type(&to->impl, &to->device_type) ||
        torch.device_index(&to->impl, &to->device_index) || torch.storage_offset(&to->impl, &offset)) return 0;
    to->offset = (uint64_t)offset;
    return 1;
}
