/* The rows of a dump. Made by `python -m ulpscope.native.schema`, of the texts in schema.py. */

#ifndef ULPSCOPE_SCHEMA_H
#define ULPSCOPE_SCHEMA_H
#include <stdint.h>

#define NONE32 0xffffffffu
#define NONE64 0xffffffffffffffffu
#define FRAME_MAGIC "ulpF"

/* `calls.bin`, a row for each finished call. */
typedef struct {
    uint64_t seq;             /* when it began: the number of the call within its step */
    uint64_t parent;          /* seq of the call around it; of a backward call, seq of the parent of its forward call */
    uint64_t origin;          /* of a backward call, seq of its forward call */
    uint64_t first_value;     /* where its values begin in values.bin, in rows */
    uint32_t kind;            /* string: Torch, Functional, Module, ... */
    uint32_t name;            /* string */
    uint32_t index;           /* how many calls of that kind, name and phase began before it in the step */
    uint32_t again;           /* of a backward call that ran more than once: which time, from 0 */
    uint32_t values;          /* how many values it has */
    uint32_t stack;           /* string: its Python stack */
    uint32_t note;            /* string: the exception, where it raised one */
    uint32_t module;          /* string: the module it ran in */
    uint32_t thread;          /* of the program, in the order they were seen */
    uint8_t phase;            /* see below */
    uint8_t flags;            /* see below */
    uint16_t unused;          /* 0 */
} CallRow;
_Static_assert(sizeof(CallRow) == 72, "no gaps");

/* `values.bin`, a row for each argument and result; those of a call follow each other. */
typedef struct {
    uint32_t slot;            /* string: role, then positions and keys */
    uint32_t meta;            /* string: type, dtype, shape, stride, device, ... */
    uint32_t measure;         /* row of measures.bin */
    uint32_t text;            /* string: the value of a scalar, or why there is no measure */
} ValueRow;
_Static_assert(sizeof(ValueRow) == 16, "no gaps");

/* `measures.bin`, a row for each distinct tensor value. */
typedef struct {
    uint64_t max_bits;        /* the largest finite element: bits of an f64, an i64 or a u64, as `kind` says */
    uint64_t min_bits;        /* the smallest */
    double sum;               /* of the finite elements */
    double norm;              /* of the finite elements: the root of the sum of their squares */
    uint64_t numel;           /* how many elements */
    uint64_t nan;             /* how many of them are nan */
    uint64_t posinf;          /* inf */
    uint64_t neginf;          /* -inf */
    uint64_t zero;            /* 0.0 or -0.0 */
    uint32_t crc;             /* CRC-32 of the elements in row-major order */
    uint32_t kind;            /* bits, see below */
    uint64_t payload_offset;  /* where its elements begin in payload.bin, in bytes */
    uint64_t payload_nbytes;  /* how many bytes */
    uint64_t sketch_offset;   /* where its sketch begins in sketches.bin, in bytes */
    uint32_t sketch_len;      /* how many floats */
    uint32_t known;           /* of another tool's numbers, bits 0 to 3: which of max, min, mean and norm there are; else what follows the sketch */
} MeasureRow;
_Static_assert(sizeof(MeasureRow) == 112, "no gaps");

/* A frame of `journal.ring`, before its bytes. Its arrays: of strings, measures, sketches, values, calls. */
typedef struct {
    char magic[4];            /* ulpF */
    uint32_t body;            /* how many bytes follow */
    uint64_t places[5];       /* where they belong in each table */
    uint32_t sizes[5];        /* how many are of each */
    uint32_t unused;          /* 0 */
} FrameHead;
_Static_assert(sizeof(FrameHead) == 72, "no gaps");

/* The head of a ring, whose bytes begin at 4096. */
typedef struct {
    char magic[8];            /* ulpring1 */
    uint64_t capacity;        /* how many bytes it holds */
    uint64_t head;            /* bytes put since the start */
    uint64_t taken;           /* bytes that have reached their file */
} RingHead;
_Static_assert(sizeof(RingHead) == 32, "no gaps");

enum {
    RECOMPUTED = 1, /* made again within a backward, by a checkpoint */
    RAISED = 2, /* ended with an exception */
    STATS = 1, /* max, min, sum, norm and counts are known */
    CRC = 2, /* the CRC-32 is known */
    SKETCH = 4, /* a sketch was asked for */
    KIND_SIGNED = 8, /* max and min are i64 */
    KIND_UNSIGNED = 16, /* max and min are u64 */
    TOLD = 32, /* the numbers are another tool's: `sum` is the mean, `known` says which there are */
    PENDING = 64, /* reserved for a tensor on a device and not yet filled in: nothing is known */
};

enum { AT_STRINGS, AT_MEASURES, AT_SKETCHES, AT_VALUES, AT_CALLS, TABLES };

enum { INPUT, OUTPUT, PARAMETERS, ROLES };

enum { FORWARD_PHASE, BACKWARD_PHASE, PARAMETERS_GRAD_PHASE, STEP_PHASE, DEBUG_PHASE, PHASES };

#endif
