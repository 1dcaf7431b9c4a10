/* What the files of the capture's hot path share: capture.c (frames, calls), texts.c (texts and
 * names), stacks.c, values.c, calls.c (calls), mode.c (the function mode), modules.c (modules),
 * recorder.c (what Python calls), gradients.c (gradients), edges.c (the graph), cuda_queue.c
 * (tensors on a device), torch_abi.c (torch without Python), gate.c (the lock), foreign.c
 * (functions of extensions). */
#ifndef ULPSCOPE_TAPS_H
#define ULPSCOPE_TAPS_H
#include "abi.h"
#include "measure.h"

enum { MOST_PLACES = 32, FEW_VALUES = 6, FEW_EDGES = 4 };
enum { FORM_HEAD = 4, MOST_DIMS = 16 }; /* of a Form */

/* Words of Python, in the order of their spelling in capture.c. */
enum {
    F_BACK,
    F_LASTI,
    VERSION,
    DATA_PTR,
    REQUIRES_GRAD,
    DTYPE,
    SHAPE,
    STRIDE,
    DEVICE,
    BASE,
    STORAGE_OFFSET,
    IS_NEG,
    IS_CONJ,
    IS_INFERENCE,
    GRAD_FN,
    NEXT_FUNCTIONS,
    SEQUENCE_NR,
    VARIABLE,
    OUTPUT_NR,
    REGISTER_HOOK,
    DROP_LEFT_OVER,
    TROUBLE,
    CLOSE_RAISED,
    WANTS,
    OF_NAME,
    WANTS_BACKWARD,
    WANTS_NOW,
    NEW_META,
    OTHER,
    SCALAR_TEXTS,
    LEAVES,
    UNREAD,
    TRUSTS,
    TAKE,
    CODE_CLASS,
    FRAMES_TEXT,
    POSITIONS,
    CALL_SHAPE,
    SPELLING,
    SITE_SIGN,
    FAST,
    KIND,
    NAME,
    SLOW,
    FACTS,
    PLAIN,
    ITEMSIZE,
    NBYTES,
    EXTENT,
    LAYOUT,
    ENTER,
    EXIT,
    OUT,
    INPLACE,
    PLAIN_ROW,
    WAIT_FOR_GATE,
    IS_VIEW,
    REGISTER_PREHOOK,
    ARM_SLOWLY,
    LANE,
    RECIPE,
    CODE,
    UNTYPED_STORAGE,
    START,
    STOP,
    STEP,
    NAMES_OF,
    OF,
    TYPE_NAME,
    ALONE,
    OWN_PARAMETERS,
    IS_LEAF,
    ACCUMULATED_HOOKS,
    AROUND,
    GRAD,
    OPAQUE_TEXT,
    IS_META,
    INSIDE,
    WATCH_BELOW,
    IS_NESTED,
    IS_COMPLEX,
    ELEMENT_SIZE,
    WORDS
};
extern PyObject *word[WORDS];
#define GET(object, name) PyObject_GetAttr(object, word[name])
#define ASK(object, name) PyObject_CallMethodObjArgs(object, word[name], NULL)

/* What has a way of its own here that is faster than the general one, and how often each was gone
 * in this process. A way that no command of a user's comes to should go: a test asks. */
#define WAYS(X)                                                                                 \
    X(calls)                                                                                    \
    X(silent_calls) X(calls_of_modules_only) X(left_out_calls) X(signs) X(known_stacks)         \
        X(native_attributes) X(known_scalars) X(direct_tensors) X(known_forms) X(known_tensors) \
            X(known_parts) X(measured) X(modules) X(known_modules) X(single_nodes)              \
                X(several_nodes) X(older_nodes) X(entered) X(hooks) X(parts) X(arrivals)        \
                    X(foreign_calls) X(filed) X(queued) X(launches) X(device_rows) X(copies_back)
#define WAY_NUMBER(name) WAY_##name,
enum { WAYS(WAY_NUMBER) ALL_WAYS };
extern uint64_t ways_gone[ALL_WAYS];
#define GONE(name) (ways_gone[WAY_##name]++)

/* Three numbers to one; the first is never 0. */
typedef struct {
    uint64_t *cells;
    size_t mask, used;
} Table;
uint64_t *table_find(const Table *, uint64_t, uint64_t, uint64_t);
int table_put(Table *, uint64_t, uint64_t, uint64_t, uint64_t);
void table_empty(Table *);
void table_clear(Table *);
int grow(void *array, size_t *room, size_t count, size_t item);
int grow_from(const void *few, void *array, size_t *room, size_t count,
    size_t item); /* of which the first stood elsewhere, in `few` */
int64_t number_of(PyObject *owned);
int truth_of(PyObject *owned);
PyObject *tuple_at(PyObject *args, Py_ssize_t at);
static inline uint64_t word_of(const void *object, size_t at) {
    return *(const uint64_t *)((const char *)object + at);
}
static inline void set_ref(PyObject **to, PyObject *owned) {
    PyObject *old = *to;
    *to = owned;
    Py_XDECREF(old);
}

typedef struct {
    char *data;
    size_t size, room;
} Bytes;
typedef struct {
    PyObject_HEAD PyObject *put, *wake;
    Py_buffer view;
    char *map;
    char failed, full;
    uint64_t capacity, woken, sizes[5], sketch_size, calls;
    uint32_t string_count, measure_count;
    Bytes strings, measures, sketches;
} Frames;
int frames_commit(Frames *, CallRow *row, const void *values, size_t size);
int64_t frames_string(Frames *, const char *json, size_t size);
int64_t frames_stack(Frames *, PyObject *json, long long parent);
int64_t frames_measure(Frames *, const char *row, size_t size);

typedef struct {
    PyObject_HEAD PyObject *kind, *name, *module, *note, *phase;
    long long index, seq, parent, origin, stack, thread, again, epoch, flags;
    long long named;     /* where its name is, while its epoch lasts; or -1 */
    char wanted, chosen; /* chosen by its name; wanted, if its phase is too */
    uint32_t *values,
        few[4 * FEW_VALUES]; /* four each: slot, meta, measure, text; the first ones here */
    size_t count, room;
} Call;
void drop_values(Call *);

enum { CALLS, MODULES, MODE, REGION, REDISPATCHED, GUARD, FREE, SILENCE, HEARING, STATE_OBJECTS };
typedef struct {
    PyObject_HEAD PyObject *object[STATE_OBJECTS];
    long long number, compiled,
        handling;    /* handling: calls that our mode has been given, which is off meanwhile */
    char busy, in_c; /* whether our own code runs on the thread, and whether it is C, which no frame
                        tells */
} State;

/* A text of a dump: its bytes stay, its number belongs to one step. */
typedef struct {
    PyObject *json;
    uint32_t number, epoch;
} Entry;
typedef struct {
    uint32_t kind, name, epoch, count[PHASES];
    char choice; /* whether its calls are wanted */
} Named;
/* A chain of frames; bits: 1 it passes through checkpointing. */
typedef struct {
    PyObject *json;
    int bits;
} Chain;
/* One kind of tensor. */
typedef struct {
    PyObject *python, *lane, *recipe;
    long code;               /* of its type, in dtypes.py */
    int64_t dim, *sizes;     /* and behind them the strides */
    int64_t like[FORM_HEAD]; /* as Form has it, where that is known */
    uint32_t facts, layout;
    char plain, is_complex;
    uint64_t itemsize, nbytes, extent;
} Meta;
/* A tensor that was measured: itself (offset and layout 0 in its key), or a part of its base. */
typedef struct {
    PyObject *weak;
    uint64_t key[3];
    uint64_t version, pointer, memory, offset;
    uint32_t layout, row[3];
    int requires_grad;
} Seen;

enum {
    RECORDER,
    GATE,
    MEASURER,
    STACKS,
    SELECTION,
    FRAMES,
    TENSOR,
    PARAMETER,
    ROLE_LIST,
    PHASE_LIST,
    TRACING,
    GRAD_ENABLED,
    SEQUENCE,
    IN_BACKWARD,
    NO_FUNCTIONS,
    TRANSFORM,
    DUMPS,
    REWRITTEN_DICT,
    UNWRITTEN,
    WRAPPED,
    MEASURE,
    OTHERS,
    ACCUMULATOR,
    TABLE,
    ENTER_PLAINLY,
    MEANT,
    FREEING,
    OWN,
    ADD,
    EXCLUDED,
    INFERENCE,
    RESIZABLE,
    BACKWARD,
    NAMES,
    APIS,
    MODES,
    GIVEN
};
typedef struct {
    PyObject_HEAD PyObject *given[GIVEN];
    char reuse, on_module, all_free, forward, backward, node_order, untracked, follows_backward;
    char active, quiet; /* which Python sets, and the two below, which are seldom there */
    PyObject *before_first, *ignored;
    char in_c; /* whether the thread that holds the gate is in C, where no frame tells of it */
    unsigned roles;
    long measure_flags;
    uint32_t epoch, counted; /* of the numbers, and of the counters of names */
    uint64_t sequence, threads;
    struct ApiFacts *apis;
    size_t api_count, api_room;
    Table apis_at;
    PyObject *key; /* of this among what a thread keeps */
    struct Gate *gate;
    struct Lane *queued; /* where tensors wait to be measured */
    Entry *entries;
    size_t entry_count, entry_room;
    PyObject *opaque, *plain, *json, *named_index, *metas_index, *layouts, *slot_index[ROLES],
        *scalars[7];
    Named *named;
    size_t named_count, named_room;
    uint32_t places[ROLES][MOST_PLACES];
    Chain *chains;
    size_t chain_count, chain_room;
    Table links, stacks, marked, codes, sites, shapes, names_met, texts_met, slots_met, scalars_met;
    PyObject *kept;    /* code objects and names, whose addresses are keys */
    PyObject *nowhere; /* the empty path */
    PyObject *nones;   /* what a `with` block ends with that did not raise */
    Meta *metas;
    size_t meta_count, meta_room;
    Seen *seen;
    size_t seen_count, seen_room, sweep_at;
    char met_inference; /* whether a tensor was that has no version */
    char
        transform; /* whether one is under way: -1 until it is asked, in each stretch of our code */
    Table seen_at, known, distrusted, forms;
    struct Pass *unfinished;
    struct Anchor *anchors; /* the newest first */
    uint64_t armed;
} Fast;

/* Of torch_abi.c: tensors of torch's own classes, and the thread. */
typedef struct {
    uint64_t version, pointer;
    int requires_grad;
} Use; /* what changes from use to use */
typedef struct {
    int64_t numbers[FORM_HEAD +
                    2 * MOST_DIMS]; /* dtype, device, its index, dimensions; sizes, strides */
    size_t count;
    uint64_t offset;
} Form; /* how a tensor lies in memory */
int tensor_requires_grad(PyObject *value);
int tensor_is_view(PyObject *value);
PyObject *tensor_base(PyObject *value);
int tensor_use(PyObject *value, Use *);
int tensor_pointer(PyObject *value, uint64_t *to);
int tensor_form(PyObject *value, Form *);
int is_grad_on(Fast *);
int cuda_stream(int index, uint64_t *to);
void find_cuda_stream(void);
void *found_in(
    const char *library, const char *name); /* a function of a library that is loaded, or NULL */
PyObject *check_torch(PyObject *module, PyObject *samples);

typedef struct {
    PyObject_HEAD Fast *fast;
    State *state;
} Mode;
/* No class and no mode of the program's hears what is asked in between. */
int unheard(Fast *, State *);
void heard_again(Fast *, State *);
int64_t sequence_now(Fast *);
int traces(Fast *);

/* Of texts.c, stacks.c and values.c. Numbers are -1 after an error. */
void forget_step(Fast *, int anew);
void drop_metas(Fast *);
void drop_anchors(Fast *);
void forget_values(Fast *);
void release_value(Fast *, PyObject *value);
int64_t text_number(Fast *, int64_t entry);
int64_t plain_entry(Fast *, PyObject *text);
int64_t json_entry(Fast *, PyObject *json);
int64_t slot_entry(Fast *, int role, PyObject *path);
int64_t named_slot(Fast *, int role, PyObject *name);
PyObject *place_path(Py_ssize_t at);
int64_t place_entry(Fast *, int role, Py_ssize_t at);
int64_t named_at(Fast *, PyObject *kind, PyObject *name);
PyObject *frame_back(PyObject *frame); /* None behind the last */
int frame_is_below(PyObject *frame, PyObject *above);
int64_t frame_lasti(PyObject *frame);
int frame_holds(PyObject *frame, PyObject *name, PyObject *value);
int code_class(Fast *, PyObject *code);
int64_t stack_number(Fast *, PyObject *frame, PyObject *stop, int64_t above, int *bits);
int value_row(Fast *, PyObject *value, int produced, uint32_t row[3]);
int is_tensor(const Fast *, PyObject *value); /* of torch's own class */
int may_be_unwritten(Fast *, PyObject *value);
int is_plain(const Fast *, PyObject *value); /* neither a tensor nor anything that may hold one */
typedef int (*Visit)(Fast *, void *to, PyObject *path, PyObject *leaf);
int visit_leaves(Fast *, PyObject *value, PyObject *path, Visit, void *to);

/* Of calls.c. */
Call *open_call(
    Fast *, State *, PyObject *kind, PyObject *name, PyObject *frame, int phase, int carries);
Call *unwanted_call(Fast *, PyObject *kind, PyObject *name, int phase);
enum { UNASKED, ALL_WANTED, NONE_WANTED, EACH_ASKED };
int choice_of(
    Fast *, const Call *); /* whether the calls of its name are wanted; -1 after an error */
int phase_of(const Fast *, PyObject *phase);
int role_of(const Fast *, PyObject *role);
Call *open_backward(Fast *, State *, PyObject *kind, PyObject *name, const long long *facts,
    PyObject *module, long long again);
int show(Fast *, Call *, int role, PyObject *path, Py_ssize_t at, PyObject *value, PyObject *unread,
    int produced);
int show_named(Fast *, Call *, int role, PyObject *key, PyObject *value);
int close_call(Fast *, Call *);
void close_raised(Fast *, Call *);
int tell(Fast *, const char *text);
typedef struct {
    PyObject *kind, *error, *trace;
} Raised;
Raised take_raised(
    void); /* the exception that is set, with its traceback; PyErr_Restore or drop_raised ends it */
void drop_raised(Raised *);
int enter(Fast *, State *);
void leave(Fast *, State *);
int border(Fast *, PyObject *kind, PyObject *name, int is_backward);
State *state_here(Fast *);
int follows(Fast *, Call *);
void drop_apis(Fast *);
PyObject *asked_mode(PyObject *module, PyObject *above);
/* What is asked of a function at each of its calls; names.py has the whole of it. What it holds
 * stays; where it lies may change whenever Python runs: it is copied before. */
typedef struct ApiFacts {
    PyObject *api, *kind, *name;
    long flags;
} ApiFacts;

/* Of foreign.c. */
PyObject *watch_foreign(PyObject *module, PyObject *args);

/* Of gate.c. */
int gate_take(struct Gate *);
int gate_give_up(struct Gate *);
int gate_is_held(const struct Gate *);

/* Of cuda_queue.c. */
int64_t queue_measure(Fast *, PyObject *lane, PyObject *recipe, PyObject *value, uint64_t pointer);
int launch_queued(Fast *);
int is_lane(PyObject *);
PyObject *rows_of(PyObject *module, PyObject *args);
PyObject *copy_back(PyObject *module, PyObject *args);

/* Of edges.c. */
typedef struct {
    PyObject *node, *path; /* of a leaf, the tensor */
    int64_t number;        /* -1 for a leaf */
} Edge;
typedef struct {
    Edge *list, few[FEW_EDGES]; /* a list that points into itself: it is never copied */
    size_t count, room, leaves; /* how many are leaves */
    char are_known;
} Edges;
int find_edges(Fast *, Edges *, PyObject *args, PyObject *kwargs, int peek);
void drop_edges(Edges *);
PyObject *new_edges(Fast *, PyObject *args, PyObject *kwargs, int peek);
Edges *edges_in(PyObject *); /* NULL where it is none */
int wants_grad(const Fast *, PyObject *value);
int arm(
    Fast *, Call *, int64_t sequence, Edges *, PyObject *args, PyObject *kwargs, PyObject *result);
PyObject *fast_edges(Fast *, PyObject *args);
PyObject *fast_arm(Fast *, PyObject *args);
PyObject *fast_enter_hook(Fast *, PyObject *all);

/* Of gradients.c. */
/* What a backward record needs of its forward call. */
typedef struct {
    PyObject *kind, *name, *module;
    long long facts[6]; /* index, epoch, seq, parent, stack, named */
} Forward;
/* The hook of a call that is one node. */
typedef struct {
    PyObject_HEAD Fast *fast;
    Forward forward;
    PyObject *outputs, **slots, *few[4], *weak; /* a path or NULL for each gradient of the node: no
                                                   tuple, which the collector would walk */
    Py_ssize_t count;
    long long again;
    int output, gaps; /* without outputs: the one output, which is shown at the first place */
} Hook;

/* The gradient of an argument: how many edges bring a part of it, how many have still to come, the
 * sum so far. */
typedef struct {
    PyObject *path, *sum;
    int edges, waiting;
} Share;
enum { FEW_SHARES = 2, FEW_PLACES = 2 };
/* What has arrived of one backward of a call. */
typedef struct Pass {
    PyObject_HEAD Fast *fast;
    Forward forward;
    Share *shares, few[FEW_SHARES];
    size_t count, room;
    int expected, left;
    Call *open;
    long long thread, again;
    struct Pass *next; /* of those that are open */
    PyObject *weak;
} Pass;
/* The hook of one node of it: before a root, with its outputs; behind a node that edges leave, with
 * places and shares. A call that returned its input has the node that made it: the gradient of both
 * is what arrives there. */
typedef struct {
    PyObject_HEAD Pass *pass;
    PyObject *outputs;
    int output, passed;
    int *places, few[2 * FEW_PLACES]; /* pairs: place, share; NULL before a root */
    size_t count, room;
} Part;

Hook *new_hook(Fast *, const Call *, int output, PyObject *outputs, size_t slots, int gaps);
Pass *new_pass(Fast *, const Call *);
Part *new_part(Pass *, PyObject *outputs, int output);
int add_place(Pass *, Part **, int place, PyObject *path);
void pass_reset(Pass *);
int hold(Fast *, PyObject *node, PyObject *armed);
void drop_passes(Fast *);
PyObject *fast_hook(Fast *, PyObject *args);
PyObject *fast_finish_pass(Fast *, PyObject *state);

extern PyTypeObject *call_type, *state_type, *hook_type, *edges_type, *pass_type, *part_type,
    *lane_type, *gate_type;
extern PyType_Spec fast_spec, mode_spec, hook_spec, edges_spec, pass_spec, part_spec, kernel_spec,
    recipe_spec, lane_spec, around_spec, arrival_spec, gate_spec;

#endif
