/* How one extension has a tensor measured by another, without Python between them. */
#ifndef ULPSCOPE_MEASURE_H
#define ULPSCOPE_MEASURE_H
#include "_abi.h"

#define MEASURER_NAME "ulpscope._native.measurer"
enum { MOST_OF_ROW = 112 + 4 * 256 }; /* a row and its sketch */
typedef struct {
    const void *at;
    long code, flags;
    int64_t dim;
    const int64_t *sizes, *strides; /* in elements */
    uint64_t sketch_offset;
} Measured;
/* Writes its row; how long that is, -1 after an error. */
typedef Py_ssize_t (*Measurer)(const Measured *, char *row);
#endif
