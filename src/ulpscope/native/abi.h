/* The stable ABI of Python 3.10, and what of it that version exports without saying so. */
#ifndef ULPSCOPE_ABI_H
#define ULPSCOPE_ABI_H
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030a0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
/* Headers of Python 3.12 return these without counting, as befits 3.12; what they make must serve 3.10 and 3.11 too. */
#undef Py_RETURN_NONE
#undef Py_RETURN_TRUE
#undef Py_RETURN_FALSE
#undef Py_RETURN_NOTIMPLEMENTED
#define Py_RETURN_NONE return Py_NewRef(Py_None)
#define Py_RETURN_TRUE return Py_NewRef(Py_True)
#define Py_RETURN_FALSE return Py_NewRef(Py_False)
#define Py_RETURN_NOTIMPLEMENTED return Py_NewRef(Py_NotImplemented)
#if Py_LIMITED_API + 0 < 0x030b0000
/* The buffer protocol entered the stable ABI in 3.11; 3.10 has the same structure and exports the same functions. */
typedef struct {
    void *buf;
    PyObject *obj;
    Py_ssize_t len, itemsize;
    int readonly, ndim;
    void *format, *shape, *strides, *suboffsets, *internal;
} Py_buffer;
PyAPI_FUNC(int) PyObject_GetBuffer(PyObject *, Py_buffer *, int);
PyAPI_FUNC(void) PyBuffer_Release(Py_buffer *);
enum { PyBUF_SIMPLE = 0, PyBUF_WRITABLE = 1 };
#endif
#endif
