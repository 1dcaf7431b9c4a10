/* Numbers for the stacks of a step, and what is asked of frames. */
#include "capture.h"
#ifndef _WIN32
#include <dlfcn.h>
#endif

/* Functions that Python has and its stable interface has not. */
static struct {
    int looked;
    PyObject *(*back)(PyObject *), *(*variable)(PyObject *, PyObject *);
    int (*lasti)(PyObject *);
} frames;
static void find_frames(void) {
    frames.looked = 1;
#ifndef _WIN32
    void *found[] = {dlsym(RTLD_DEFAULT, "PyFrame_GetBack"),
        dlsym(RTLD_DEFAULT, "PyFrame_GetLasti"), dlsym(RTLD_DEFAULT, "PyFrame_GetVar")};
    memcpy(&frames.back, found, sizeof *found), memcpy(&frames.lasti, found + 1, sizeof *found);
    memcpy(&frames.variable, found + 2, sizeof *found);
#endif
}
PyObject *frame_back(PyObject *frame) {
    if (!frames.looked) find_frames();
    if (!frames.back) return GET(frame, F_BACK);
    PyObject *back = frames.back(frame);
    return back ? back : PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}
/* Whether `above` is it, or called it; -1 after an error. */
int frame_is_below(PyObject *frame, PyObject *above) {
    PyObject *walk = Py_NewRef(frame), *back;
    for (; walk && walk != above && walk != Py_None; walk = back)
        back = frame_back(walk), Py_DECREF(walk);
    Py_XDECREF(walk);
    return walk ? walk == above : -1;
}
int64_t frame_lasti(PyObject *frame) {
    if (!frames.looked) find_frames();
    return frames.lasti ? frames.lasti(frame) : number_of(GET(frame, F_LASTI));
}

/* Whether a variable of a frame is this very object; 0 also where that cannot be asked, which needs
 * Python 3.12. */
int frame_holds(PyObject *frame, PyObject *name, PyObject *value) {
    if (!frames.looked) find_frames();
    PyObject *found = frames.variable && name != Py_None ? frames.variable(frame, name) : NULL;
    if (!found) PyErr_Clear();
    Py_XDECREF(found); /* the frame keeps it */
    return found == value;
}

int code_class(Fast *f, PyObject *code) {
    uint64_t *found = table_find(&f->codes, (uint64_t)code, 0, 0);
    if (found) return (int)*found;
    int64_t number =
        number_of(PyObject_CallMethodObjArgs(f->given[NAMES], word[CODE_CLASS], code, NULL));
    if (PyErr_Occurred() || PyList_Append(f->kept, code) ||
        table_put(&f->codes, (uint64_t)code, 0, 0, (uint64_t)number))
        return -1;
    return (int)number;
}

/* The number of the stack that begins at `frame`; `above` is that of the stack at frame `stop`. */
int64_t stack_number(Fast *f, PyObject *frame, PyObject *stop, int64_t above, int *bits) {
    uint64_t near[2 * 64], *spots = near, *heap = NULL;
    size_t count = 0, room = 64, heap_room = 0;
    PyObject *walk = Py_NewRef(frame);
    int64_t result = -1, lasti;
    while (walk && walk != Py_None && walk != stop) {
        PyObject *code = (PyObject *)PyFrame_GetCode((PyFrameObject *)walk);
        Py_XDECREF(code); /* its frame keeps it */
        lasti = frame_lasti(walk);
        if (count == room) {
            if (grow(&heap, &heap_room, 4 * room, sizeof *heap)) goto done;
            if (spots == near) memcpy(heap, near, sizeof near);
            spots = heap, room *= 2;
        }
        spots[2 * count] = (uint64_t)code, spots[2 * count + 1] = (uint64_t)lasti, count++;
        PyObject *back = frame_back(walk);
        Py_DECREF(walk);
        walk = back;
    }
    if (!walk) goto done;
    uint64_t chain = 0;
    for (size_t i = count; i--;) {
        uint64_t *next = table_find(&f->links, spots[2 * i], spots[2 * i + 1], chain);
        if (!next) {
            PyObject *code = (PyObject *)spots[2 * i];
            if (PyList_Append(f->kept, code) ||
                grow(&f->chains, &f->chain_room, f->chain_count + 1, sizeof *f->chains) ||
                table_put(&f->links, spots[2 * i], spots[2 * i + 1], chain, f->chain_count))
                goto done;
            f->chains[f->chain_count] = (Chain){NULL, 0};
            chain = f->chain_count++;
        } else
            chain = *next;
    }
    uint64_t *known = table_find(&f->stacks, chain + 1, (uint64_t)(above + 1), 0);
    if (known)
        GONE(known_stacks), result = (int64_t)*known;
    else {
        if (!f->chains[chain].json) {
            PyObject *told = PyObject_CallMethodObjArgs(
                         f->given[STACKS], word[FRAMES_TEXT], frame, stop ? stop : Py_None, NULL),
                     *text;
            int found_bits;
            if (!told || !PyArg_ParseTuple(told, "Oi", &text, &found_bits)) {
                Py_XDECREF(told);
                goto done;
            }
            PyObject *bytes = PyUnicode_AsEncodedString(text, "utf-8", "backslashreplace");
            Py_DECREF(told);
            if (!bytes) goto done;
            f->chains[chain].json = bytes, f->chains[chain].bits = found_bits;
        }
        result = frames_stack((Frames *)f->given[FRAMES], f->chains[chain].json, above);
        uint64_t *over = above < 0 ? NULL : table_find(&f->marked, (uint64_t)above + 1, 0, 0);
        uint64_t mark = (uint64_t)f->chains[chain].bits | (over ? *over : 0);
        if (result < 0 ||
            table_put(&f->stacks, chain + 1, (uint64_t)(above + 1), 0, (uint64_t)result) ||
            (mark && table_put(&f->marked, (uint64_t)result + 1, 0, 0, mark)))
            result = -1;
    }
    if (result >= 0 && bits) {
        uint64_t *mark = f->marked.used ? table_find(&f->marked, (uint64_t)result + 1, 0, 0) : NULL;
        *bits = mark ? (int)*mark : 0;
    }
done:
    Py_XDECREF(walk);
    free(heap);
    return result;
}
