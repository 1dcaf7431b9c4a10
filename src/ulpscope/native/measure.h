/* How one extension has a tensor measured by another, without Python between them. */
#ifndef ULPSCOPE_MEASURE_H
#define ULPSCOPE_MEASURE_H
#include "abi.h"
#include "schema.h"

#define MEASURE_FOR_C "ulpscope.native._measure.MEASURE_FOR_C" /* what the capsule is called */
/* A row; with what may follow: two of the longest sketch, the statistics of what is unmasked, and
 * two floats for each row. */
enum {
    MEASURE_BYTES = sizeof(MeasureRow),
    UNMASKED_BYTES = 48,
    MOST_ROWS = 1024,
    MOST_OF_ROW = MEASURE_BYTES + 8 * 256 + UNMASKED_BYTES + 8 * MOST_ROWS
};
typedef struct {
    const void *at;
    long code, flags;
    int64_t dim;
    const int64_t *sizes, *strides; /* in elements */
    uint64_t sketch_offset;
} Measured;
/* Writes its row; how long that is, -1 after an error. */
typedef Py_ssize_t (*MeasureForC)(const Measured *, char *row);
#endif
