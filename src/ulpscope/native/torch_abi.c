/* What an ordinary tensor is, what the graph holds and what a thread is set to, asked of torch's own library: a dozen attributes through Python cost more than measuring a small
 * tensor. Nothing is assumed of how torch lays out its objects: `learn` finds where a tensor has its implementation and its
 * dispatch keys, by samples whose addresses and keys Python tells, and compares every answer with that of Python. Where
 * anything differs, or a function is missing, tensors are asked through their attributes, here as everywhere. */
#include "capture.h"
#ifndef _WIN32
#include <dlfcn.h>
#endif

enum { OBJECT_WORDS = 4, IMPL_WORDS = 24, NODE_WORDS = 20, LEAF_WORDS = 64 }; /* how far to look: so large are they in torch 2.11 to 2.13 */

typedef void *Impl;
static struct {
    int ready;
    size_t impl_at, keys_at;
    int (*requires_grad)(Impl);
    uint32_t (*output_nr)(Impl *);
    int64_t (*version)(Impl *);
    int (*is_view)(Impl *);
    Impl *(*base)(Impl *);
    PyObject *(*object)(Impl *);
    int (*data_ptr)(Impl *, void **);
    int (*dim)(Impl *, int64_t *);
    int (*sizes)(Impl *, int64_t **);
    int (*strides)(Impl *, int64_t **);
    int (*dtype)(Impl *, int32_t *);
    int (*device_type)(Impl *, int32_t *);
    int (*device_index)(Impl *, int32_t *);
    int (*storage_offset)(Impl *, int64_t *);
    int (*storage_size)(Impl *, int64_t *);
} torch;
/* Of its memory: where a tensor has it, and where it says whether torch may resize it. */
static struct {
    int ready;
    size_t at, resizable_at;
} storage;
/* Of autograd's graph. `hang` holds how a hook is put behind a node, and before it; torch asks a class for a part of that. */
static struct {
    int ready;
    size_t sequence_at, edges_at, edge_bytes, variable_at;
    uint64_t leaf_class;
    void **(*grad_fn)(Impl *);
    PyObject *(*hang[2])(void *, PyObject *), **function_class;
    uint64_t (*sequence)(void);
} graph;
/* Of the thread: whether classes and modes hear of calls, whether there will be a backward pass, whether anybody writes down
 * what is called, whether we are below autograd. */
static struct {
    int ready, silent;
    uint16_t autograd;
    int (*state)(void);
    void (*set_state)(int);
    char (*grad_enabled)(void);
    void **(*tracing)(void);
    char (*excluded)(uint16_t);
} thread;
/* A function of a library that is loaded, or NULL. */
void *found_in(const char *library, const char *name) {
#ifdef _WIN32
    return NULL;
#else
    void *opened = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
    return opened ? dlsym(opened, name) : NULL;
#endif
}
typedef struct {
    const char *name;
    int library;
    void *to;
} Wanted;
static int find_all(const Wanted *wanted, size_t count) {
    static const char *const libraries[] = {"libtorch_cpu.so", "libc10.so", "libtorch_python.so"};
    for (size_t i = 0; i < count; i++) {
        void *found = found_in(libraries[wanted[i].library], wanted[i].name);
        if (!found) return 0;
        memcpy(wanted[i].to, &found, sizeof found);
    }
    return 1;
}
static int find_tensors(void) {
    const Wanted wanted[] = {
        {"_ZNK3c1010TensorImpl13requires_gradEv", 1, &torch.requires_grad},
        {"_ZNK2at10TensorBase9output_nrEv", 0, &torch.output_nr}, {"_ZNK2at10TensorBase8_versionEv", 0, &torch.version},
        {"_ZNK2at10TensorBase7is_viewEv", 0, &torch.is_view}, {"aoti_torch_get_data_ptr", 0, &torch.data_ptr},
        {"aoti_torch_get_dim", 0, &torch.dim}, {"aoti_torch_get_sizes", 0, &torch.sizes},
        {"aoti_torch_get_strides", 0, &torch.strides}, {"aoti_torch_get_dtype", 0, &torch.dtype},
        {"aoti_torch_get_device_type", 0, &torch.device_type}, {"aoti_torch_get_device_index", 0, &torch.device_index},
        {"aoti_torch_get_storage_offset", 0, &torch.storage_offset},
        {"aoti_torch_get_storage_size", 0, &torch.storage_size}};
    const Wanted of_views[] = {
        {"_ZNK2at10TensorBase5_baseEv", 0, &torch.base}, {"_Z16THPVariable_WrapRKN2at10TensorBaseE", 2, &torch.object}};
    if (!find_all(of_views, 2)) torch.base = NULL; /* an older torch */
    return find_all(wanted, sizeof wanted / sizeof *wanted);
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
    PyObject *value, *shape, *stride, *of;
    unsigned long long cdata, keys, pointer;
    long long version, output, offset, bytes;
    int grad, device;
    if (!PyArg_ParseTuple(sample, "OKKpLKO!O!LLOiL", &value, &cdata, &keys, &grad, &version, &pointer, &PyTuple_Type,
        &shape, &PyTuple_Type, &stride, &offset, &output, &of, &device, &bytes)) return 0;
    Direct told;
    if (!tensor_facts(value, &told)) return 0;
    PyObject *base = tensor_base(value, &told);
    Py_XDECREF(base); /* which the sample keeps */
    return base == of && impl_of(value) == (Impl)(uintptr_t)cdata && told.keys == keys &&
           told.requires_grad == grad && told.version == (uint64_t)version && told.pointer == pointer &&
           tensor_layout(&told) && told.offset == (uint64_t)offset && same_numbers(shape, told.sizes, told.dim) &&
           same_numbers(stride, told.strides, told.dim) && torch.output_nr(&told.impl) == (uint32_t)output &&
           told.device_index == device && tensor_storage(&told) == bytes;
}
PyObject *learn(PyObject *module, PyObject *samples) {
    enum { MOST = 16 };
    const uint64_t *objects[MOST], *impls[MOST];
    uint64_t addresses[MOST], keys[MOST];
    Py_ssize_t count = PySequence_Size(samples);
    if (count < 2 || count > MOST) return PyErr_SetString(PyExc_ValueError, "not so many samples"), NULL;
    torch.ready = storage.ready = graph.ready = thread.ready = 0;
    int good = find_tensors();
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
PyObject *tensor_base(PyObject *value, Direct *of) {
    if (!tensor_is_view(of)) return Py_NewRef(Py_None);
    return torch.base ? torch.object(torch.base(&of->impl)) : GET(value, BASE);
}
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

int64_t tensor_storage(Direct *of) {
    int64_t size;
    return torch.storage_size(&of->impl, &size) ? -1 : size;
}
int tensor_is_resizable(const Direct *of) {
    const char *memory = storage.ready ? (const char *)(uintptr_t)word_of(of->impl, storage.at) : NULL;
    return memory ? memory[storage.resizable_at] : -1;
}
/* Samples: a tensor, the address of what torch knows of its memory, and whether that may be resized, as some may and some may not. */
PyObject *learn_storage(PyObject *module, PyObject *samples) {
    enum { MOST = 8, FIRST = 16, LAST = 80 }; /* where to look for the flag: so large it is in torch 2.11 to 2.13 */
    const uint64_t *impls[MOST];
    uint64_t places[MOST];
    int flags[MOST], found = 0;
    Py_ssize_t count = PySequence_Size(samples);
    if (count < 2 || count > MOST) return PyErr_SetString(PyExc_ValueError, "not so many samples"), NULL;
    storage.ready = 0;
    for (Py_ssize_t i = 0; torch.ready && i < count; i++) {
        PyObject *sample = PySequence_GetItem(samples, i), *value;
        unsigned long long place;
        if (!sample || !PyArg_ParseTuple(sample, "OKp", &value, &place, flags + i)) return Py_XDECREF(sample), NULL;
        impls[i] = impl_of(value), places[i] = place;
        Py_DECREF(sample); /* the list keeps it */
    }
    if (!torch.ready || !(storage.at = place_of(impls, places, (size_t)count, IMPL_WORDS))) Py_RETURN_FALSE;
    for (size_t at = FIRST; at < LAST; at++) {
        Py_ssize_t agree = 0;
        while (agree < count && ((const char *)(uintptr_t)places[agree])[at] == flags[agree]) agree++;
        if (agree == count) storage.resizable_at = at, found++;
    }
    return PyBool_FromLong(storage.ready = found == 1);
}

/* --- the graph, and the thread ----------------------------------------------------------------------------------- */

int is_graph_known(void) { return graph.ready; }
/* The implementation of any tensor, and the node that made it; asking for the node of a view that was written makes torch
 * rebuild it, which can raise: Python must have asked before. */
void *tensor_impl(PyObject *value) { return impl_of(value); }
void *tensor_node(void *impl) { return *graph.grad_fn(&impl); }
uint64_t node_sequence(const void *node) { return word_of(node, graph.sequence_at); }
size_t node_children(const void *node) {
    return (word_of(node, graph.edges_at + 8) - word_of(node, graph.edges_at)) / graph.edge_bytes;
}
void *node_child(const void *node, size_t at, uint32_t *number) {
    const char *edge = (const char *)(uintptr_t)word_of(node, graph.edges_at) + at * graph.edge_bytes;
    memcpy(number, edge + graph.edge_bytes - 8, sizeof *number);
    return (void *)(uintptr_t)word_of(edge, 0);
}
void *node_leaf(const void *node) {
    return word_of(node, 0) == graph.leaf_class ? (void *)(uintptr_t)word_of(node, graph.variable_at) : NULL;
}
/* `asked` answers instead of the class that torch asks for its way to do this. */
PyObject *node_hang(void *node, int before, PyObject *hook, PyObject *asked) {
    if (!graph.function_class) return graph.hang[before](node, hook);
    PyObject *class = *graph.function_class;
    *graph.function_class = asked;
    PyObject *handle = graph.hang[before](node, hook);
    *graph.function_class = class;
    return handle;
}
int64_t next_sequence(void) { return graph.ready ? (int64_t)graph.sequence() : -1; }

/* Until `restore_thread`: no class and no mode hears of what is asked. 0 where Python must see to it. */
int silence_thread(int *was) {
    if (!thread.ready) return 0;
    *was = thread.state();
    thread.set_state(thread.silent);
    GONE(silenced);
    return 1;
}
void restore_thread(int was) { thread.set_state(was); }
int is_grad_on(void) { return thread.ready ? thread.grad_enabled() & 1 : -1; }
int is_tracing(void) { return thread.ready ? *thread.tracing() != NULL : -1; }
int is_autograd_off(void) { return thread.ready ? thread.excluded(thread.autograd) & 1 : -1; }

/* A sample of the graph: a tensor that is no view of anything written, the sequence number of its node, and of each child a
 * tensor (None where there is no child), the number of its output, whether it is a leaf. */
typedef struct {
    const uint64_t *node;
    uint64_t sequence;
    PyObject *children;
} Sample;
static int read_sample(PyObject *from, Sample *to) {
    PyObject *value;
    unsigned long long sequence;
    if (!PyArg_ParseTuple(from, "OKO!", &value, &sequence, &PyTuple_Type, &to->children)) return 0;
    to->node = tensor_node(impl_of(value)), to->sequence = sequence;
    return to->node != NULL;
}
/* Nodes that accumulate, and whose gradient. */
enum { MOST_LEAVES = 16 };
typedef struct {
    const uint64_t *nodes[MOST_LEAVES];
    uint64_t impls[MOST_LEAVES];
    size_t count;
} Leaves;
/* Whether the edges of all samples lie at this place. */
static int has_edges(const Sample *samples, size_t count, size_t at, size_t bytes, Leaves *leaves) {
    leaves->count = 0;
    for (size_t i = 0; i < count; i++)
        if (word_of(samples[i].node, at + 8) - word_of(samples[i].node, at) != bytes * (size_t)PyTuple_Size(samples[i].children))
            return 0;
    graph.edges_at = at, graph.edge_bytes = bytes;
    for (size_t i = 0; i < count; i++)
        for (Py_ssize_t k = 0; k < PyTuple_Size(samples[i].children); k++) {
            PyObject *value;
            unsigned number;
            int leaf;
            uint32_t told;
            if (!PyArg_ParseTuple(PyTuple_GetItem(samples[i].children, k), "OIp", &value, &number, &leaf)) return 0;
            const void *child = node_child(samples[i].node, (size_t)k, &told);
            if (!child != (value == Py_None) || (child && told != number)) return 0;
            if (child && !leaf && child != tensor_node(impl_of(value))) return 0;
            if (child && leaf && leaves->count < MOST_LEAVES)
                leaves->nodes[leaves->count] = child, leaves->impls[leaves->count++] = (uint64_t)(uintptr_t)impl_of(value);
        }
    return 1;
}
/* All leaves are of one class, which no other node is of, and have their variable at one place. Memory that was freed may say
 * the same of another place, by chance: then nothing is learnt. */
static int has_leaves(const Leaves *leaves, const Sample *samples, size_t count) {
    if (leaves->count < 2) return 0;
    graph.leaf_class = leaves->nodes[0][0];
    graph.variable_at = place_of(leaves->nodes, leaves->impls, leaves->count, LEAF_WORDS);
    for (size_t i = 0; i < leaves->count; i++)
        if (leaves->nodes[i][0] != graph.leaf_class || node_sequence(leaves->nodes[i]) != NONE64) return 0;
    for (size_t i = 0; i < count; i++)
        if (samples[i].node[0] == graph.leaf_class) return 0;
    return graph.variable_at > 0;
}
PyObject *learn_graph(PyObject *module, PyObject *list) {
    enum { MOST = 16 };
    const Wanted wanted[] = {{"_ZNK2at10TensorBase7grad_fnEv", 0, &graph.grad_fn},
        {"_ZN5torch8autograd20registerFunctionHookERNS0_4NodeEP7_object", 2, &graph.hang[0]},
        {"_ZN5torch8autograd23registerFunctionPreHookERNS0_4NodeEP7_object", 2, &graph.hang[1]},
        {"_ZN2at15sequence_number4peekEv", 0, &graph.sequence}};
    Sample samples[MOST];
    Leaves leaves;
    const uint64_t *nodes[MOST];
    uint64_t sequences[MOST];
    Py_ssize_t count = PySequence_Size(list);
    if (count < 2 || count > MOST) return PyErr_SetString(PyExc_ValueError, "not so many samples"), NULL;
    graph.ready = 0;
    int good = torch.ready && find_all(wanted, sizeof wanted / sizeof *wanted), found = 0;
    for (Py_ssize_t i = 0; good && i < count; i++) {
        PyObject *sample = PySequence_GetItem(list, i);
        good = sample && read_sample(sample, samples + i);
        nodes[i] = good ? samples[i].node : NULL, sequences[i] = good ? samples[i].sequence : 0;
        Py_XDECREF(sample); /* the list keeps it */
    }
    good = good && (graph.sequence_at = place_of(nodes, sequences, (size_t)count, NODE_WORDS));
    for (size_t word = 1; good && !found && word < NODE_WORDS - 1; word++)
        for (size_t bytes = 16; !found && bytes <= 24; bytes += 8)
            found = has_edges(samples, (size_t)count, 8 * word, bytes, &leaves) && has_leaves(&leaves, samples, (size_t)count);
    if (PyErr_Occurred()) return NULL;
    graph.ready = good && found;
    graph.function_class = found_in("libtorch_python.so", "THPFunctionClass");
    return PyBool_FromLong(graph.ready);
}
/* The four answers, by which Python sees whether they are right; None where a function is missing. */
PyObject *thread_state(PyObject *module, PyObject *autograd) {
    const Wanted wanted[] = {
        {"_ZN2at4impl22PythonTorchFunctionTLS18get_disabled_stateEv", 0, &thread.state},
        {"_ZN2at4impl22PythonTorchFunctionTLS18set_disabled_stateENS0_26TorchFunctionDisabledStateE", 0, &thread.set_state},
        {"_ZN5torch3jit6tracer15getTracingStateEv", 0, &thread.tracing},
        {"_ZN3c108GradMode10is_enabledEv", 1, &thread.grad_enabled},
        {"_ZN3c104impl28tls_is_dispatch_key_excludedENS_11DispatchKeyE", 1, &thread.excluded}};
    long key = PyLong_AsLong(autograd);
    if (PyErr_Occurred()) return NULL;
    if (!find_all(wanted, sizeof wanted / sizeof *wanted)) Py_RETURN_NONE;
    return Py_BuildValue("(iiii)", thread.state(), thread.grad_enabled() & 1, *thread.tracing() != NULL,
        thread.excluded((uint16_t)key) & 1);
}
/* What the first of them is where nothing is heard, and the key of the last. */
PyObject *learn_thread(PyObject *module, PyObject *args) {
    long autograd;
    if (!PyArg_ParseTuple(args, "il", &thread.silent, &autograd)) return NULL;
    thread.autograd = (uint16_t)autograd;
    thread.ready = thread.silent > 0 && thread.state && thread.set_state && thread.grad_enabled && thread.tracing && thread.excluded;
    return PyBool_FromLong(thread.ready);
}

/* --- with Python where it must be ---------------------------------------------------------------------------------- */

/* No class and no mode of the program's hears what we ask, until `heard_again`, also with an exception set. */
int unheard(Fast *f, Quiet *q) {
    *q = (Quiet){0};
    if ((q->native = silence_thread(&q->was))) return 0;
    PyObject *made = PyObject_CallNoArgs(f->given[NO_FUNCTIONS]), *done = made ? ASK(made, ENTER) : NULL;
    if (!done) Py_CLEAR(made);
    Py_XDECREF(done);
    q->made = made;
    return made ? 0 : -1;
}
void heard_again(Quiet *q) {
    PyObject *kind, *error, *trace;
    if (q->native) restore_thread(q->was);
    if (!q->made) return;
    PyErr_Fetch(&kind, &error, &trace);
    Py_XDECREF(PyObject_CallMethodObjArgs(q->made, word[EXIT], Py_None, Py_None, Py_None, NULL));
    Py_DECREF(q->made);
    PyErr_Restore(kind, error, trace);
}
int64_t sequence_now(Fast *f) {
    int64_t now = next_sequence();
    return now >= 0 ? now : number_of(PyObject_CallNoArgs(f->given[SEQUENCE]));
}
/* Whether somebody writes down what is called. */
int traces(Fast *f) {
    int known = is_tracing();
    if (known >= 0) return known;
    PyObject *tracing = PyObject_CallNoArgs(f->given[TRACING]);
    Py_XDECREF(tracing);
    return tracing ? tracing != Py_None : -1;
}
