/* Numbers for the texts and names of a step. What a text says stays known from step to step; its
 * number is given anew in each. */
#include "capture.h"

enum { MOST_NAMES = 4096 };

static int64_t indexed(PyObject *index, PyObject *key) {
    PyObject *found = PyDict_GetItemWithError(index, key);
    return found ? PyLong_AsLongLong(found) : PyErr_Occurred() ? -1 : -2;
}
static int index_put(PyObject *index, PyObject *key, int64_t number) {
    PyObject *made = PyLong_FromLongLong(number);
    int failed = !made || PyDict_SetItem(index, key, made);
    return Py_XDECREF(made), failed ? -1 : 0;
}

int64_t text_number(Fast *f, int64_t at) {
    if (at < 0) return -1;
    Entry *entry = f->entries + at;
    if (entry->epoch != f->epoch) {
        int64_t number = frames_string((Frames *)f->given[FRAMES], PyBytes_AsString(entry->json),
            (size_t)PyBytes_Size(entry->json));
        if (number < 0) return -1;
        entry->number = (uint32_t)number, entry->epoch = f->epoch;
    }
    return entry->number;
}
int64_t json_entry(Fast *f, PyObject *json) {
    int64_t found = indexed(f->json, json);
    if (found != -2) return found;
    PyObject *bytes = PyUnicode_AsEncodedString(json, "utf-8", "backslashreplace"),
             *end = PyBytes_FromStringAndSize("\n", 1);
    if (bytes && end) PyBytes_Concat(&bytes, end);
    Py_XDECREF(end);
    if (!bytes || grow(&f->entries, &f->entry_room, f->entry_count + 1, sizeof *f->entries))
        return -1;
    f->entries[f->entry_count] = (Entry){bytes, 0, 0};
    return index_put(f->json, json, (int64_t)f->entry_count) ? -1 : (int64_t)f->entry_count++;
}
static int64_t dumped_entry(Fast *f, PyObject *content) {
    PyObject *json = PyObject_CallFunctionObjArgs(f->given[DUMPS], content, NULL);
    int64_t entry = json ? json_entry(f, json) : -1;
    Py_XDECREF(json);
    return entry;
}
int64_t plain_entry(Fast *f, PyObject *text) {
    uint64_t *met = table_find(&f->texts_met, (uint64_t)text, 0, 0);
    if (met) return (int64_t)*met;
    int64_t found = indexed(f->plain, text);
    if (found != -2) return found;
    found = dumped_entry(f, text);
    if (found < 0 || index_put(f->plain, text, found)) return -1;
    /* The dictionary keeps the text that it was first given, so that its address stays its own. */
    return table_put(&f->texts_met, (uint64_t)text, 0, 0, (uint64_t)found) ? -1 : found;
}
int64_t slot_entry(Fast *f, int role, PyObject *path) {
    if (PyTuple_Size(path) == 1 && PyLong_CheckExact(PyTuple_GetItem(path, 0))) {
        Py_ssize_t at = PyLong_AsSsize_t(PyTuple_GetItem(path, 0));
        if (at >= 0 && at < MOST_PLACES && f->places[role][at] != NONE32)
            return f->places[role][at];
        PyErr_Clear(); /* a key of a dictionary, larger than any place */
    }
    int64_t found = indexed(f->slot_index[role], path);
    if (found != -2) return found;
    PyObject *name = PyObject_GetAttrString(PyTuple_GetItem(f->given[ROLE_LIST], role), "value");
    PyObject *content = name ? PySequence_List(path) : NULL;
    if (content && PyList_Insert(content, 0, name)) Py_CLEAR(content);
    found = content ? dumped_entry(f, content) : -1;
    Py_XDECREF(name), Py_XDECREF(content);
    return found < 0 || index_put(f->slot_index[role], path, found) ? -1 : found;
}
/* Of an argument that is told by its name: of the first ones the address tells, as they are kept.
 */
int64_t named_slot(Fast *f, int role, PyObject *name) {
    uint64_t *met = table_find(&f->slots_met, (uint64_t)name, (uint64_t)role + 1, 0);
    if (met) return (int64_t)*met;
    PyObject *path = PyTuple_Pack(1, name);
    int64_t found = path ? slot_entry(f, role, path) : -1;
    Py_XDECREF(path);
    if (found < 0 || f->slots_met.used >= MOST_NAMES) return found;
    return PyList_Append(f->kept, name) ||
                   table_put(&f->slots_met, (uint64_t)name, (uint64_t)role + 1, 0, (uint64_t)found)
               ? -1
               : found;
}
/* The path of a place, always the same object for the first ones: thousands of them wait in hooks.
 */
PyObject *place_path(Py_ssize_t at) {
    static PyObject *paths[MOST_PLACES];
    if (at < MOST_PLACES && paths[at]) return Py_NewRef(paths[at]);
    PyObject *path = Py_BuildValue("(n)", at);
    if (path && at < MOST_PLACES && !paths[at]) paths[at] = Py_NewRef(path);
    return path;
}
int64_t place_entry(Fast *f, int role, Py_ssize_t at) {
    if (at < MOST_PLACES && f->places[role][at] != NONE32) return f->places[role][at];
    PyObject *path = place_path(at);
    int64_t found = path ? slot_entry(f, role, path) : -1;
    Py_XDECREF(path);
    if (found >= 0 && at < MOST_PLACES) f->places[role][at] = (uint32_t)found;
    return found;
}
int64_t named_at(Fast *f, PyObject *kind, PyObject *name) {
    /* The texts that a name was first met with are its key: they stay. */
    uint64_t *met = table_find(&f->names_met, (uint64_t)kind, (uint64_t)name, 0);
    PyObject *key = met ? NULL : PyTuple_Pack(2, kind, name);
    int64_t found = met ? (int64_t)*met : key ? indexed(f->named_index, key) : -1;
    if (found == -2) {
        int64_t one = plain_entry(f, kind), two = one < 0 ? -1 : plain_entry(f, name);
        found = -1;
        if (two >= 0 && !grow(&f->named, &f->named_room, f->named_count + 1, sizeof *f->named)) {
            f->named[f->named_count] = (Named){(uint32_t)one, (uint32_t)two, f->counted, {0}, 0};
            if (!index_put(f->named_index, key, (int64_t)f->named_count))
                found = (int64_t)f->named_count++;
            if (found >= 0 &&
                table_put(&f->names_met, (uint64_t)kind, (uint64_t)name, 0, (uint64_t)found))
                found = -1;
        }
    }
    Py_XDECREF(key);
    if (found >= 0 && f->named[found].epoch != f->counted) {
        memset(f->named[found].count, 0, sizeof f->named[found].count);
        f->named[found].epoch = f->counted;
    }
    return found;
}
