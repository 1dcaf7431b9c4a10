/* Rows of cells as the text of a sheet or of a csv file.
 * Cells of the usual kinds are written here, every other cell by a call of Python, which says what is right for all of
 * them: report/xlsx.py and report/csv.py give the same bytes without this file. */
#include "../_abi.h"
#include <math.h>
#include <stdio.h>

typedef uint8_t u8;
typedef uint64_t u64;

/* --- numbers, with the digits of repr() --- */

/* 10**k for every eighth k, rounded to 64 bits of which the first is set. */
enum { LEAST_POWER = -348, POWER_STEP = 8 };
static const u64 powers[] = {
    0xfa8fd5a0081c0288, 0xbaaee17fa23ebf76, 0x8b16fb203055ac76, 0xcf42894a5dce35ea, 0x9a6bb0aa55653b2d,
    0xe61acf033d1a45df, 0xab70fe17c79ac6ca, 0xff77b1fcbebcdc4f, 0xbe5691ef416bd60c, 0x8dd01fad907ffc3c,
    0xd3515c2831559a83, 0x9d71ac8fada6c9b5, 0xea9c227723ee8bcb, 0xaecc49914078536d, 0x823c12795db6ce57,
    0xc21094364dfb5637, 0x9096ea6f3848984f, 0xd77485cb25823ac7, 0xa086cfcd97bf97f4, 0xef340a98172aace5,
    0xb23867fb2a35b28e, 0x84c8d4dfd2c63f3b, 0xc5dd44271ad3cdba, 0x936b9fcebb25c996, 0xdbac6c247d62a584,
    0xa3ab66580d5fdaf6, 0xf3e2f893dec3f126, 0xb5b5ada8aaff80b8, 0x87625f056c7c4a8b, 0xc9bcff6034c13053,
    0x964e858c91ba2655, 0xdff9772470297ebd, 0xa6dfbd9fb8e5b88f, 0xf8a95fcf88747d94, 0xb94470938fa89bcf,
    0x8a08f0f8bf0f156b, 0xcdb02555653131b6, 0x993fe2c6d07b7fac, 0xe45c10c42a2b3b06, 0xaa242499697392d3,
    0xfd87b5f28300ca0e, 0xbce5086492111aeb, 0x8cbccc096f5088cc, 0xd1b71758e219652c, 0x9c40000000000000,
    0xe8d4a51000000000, 0xad78ebc5ac620000, 0x813f3978f8940984, 0xc097ce7bc90715b3, 0x8f7e32ce7bea5c70,
    0xd5d238a4abe98068, 0x9f4f2726179a2245, 0xed63a231d4c4fb27, 0xb0de65388cc8ada8, 0x83c7088e1aab65db,
    0xc45d1df942711d9a, 0x924d692ca61be758, 0xda01ee641a708dea, 0xa26da3999aef774a, 0xf209787bb47d6b85,
    0xb454e4a179dd1877, 0x865b86925b9bc5c2, 0xc83553c5c8965d3d, 0x952ab45cfa97a0b3, 0xde469fbd99a05fe3,
    0xa59bc234db398c25, 0xf6c69a72a3989f5c, 0xb7dcbf5354e9bece, 0x88fcf317f22241e2, 0xcc20ce9bd35c78a5,
    0x98165af37b2153df, 0xe2a0b5dc971f303a, 0xa8d9d1535ce3b396, 0xfb9b7cd9a4a7443c, 0xbb764c4ca7a44410,
    0x8bab8eefb6409c1a, 0xd01fef10a657842c, 0x9b10a4e5e9913129, 0xe7109bfba19c0c9d, 0xac2820d9623bf429,
    0x80444b5e7aa7cf85, 0xbf21e44003acdd2d, 0x8e679c2f5e44ff8f, 0xd433179d9c8cb841, 0x9e19db92b4e31ba9,
    0xeb96bf6ebadf77d9, 0xaf87023b9bf0ee6b,
};

/* f * 2**e */
typedef struct {
    u64 f;
    int e;
} Scaled;

static Scaled times(Scaled a, Scaled b) {
    unsigned __int128 product = (unsigned __int128)a.f * b.f + ((u64)1 << 63);
    return (Scaled){(u64)(product >> 64), a.e + b.e + 64};
}

static Scaled normal(Scaled a) {
    int shift = __builtin_clzll(a.f);
    return (Scaled){a.f << shift, a.e - shift};
}

/* Moves the last digit towards the number; 0 if the digits may not be the shortest and nearest. */
static int weed(char *last, u64 distance, u64 interval, u64 rest, u64 step, u64 unit) {
    u64 least = distance - unit, most = distance + unit;
    while (rest < least && interval - rest >= step && (rest + step < least || least - rest >= rest + step - least))
        --*last, rest += step;
    if (rest < most && interval - rest >= step && (rest + step < most || most - rest > rest + step - most)) return 0;
    return 2 * unit <= rest && rest <= interval - 4 * unit;
}

/* The shortest digits that stand for a positive number, and where its point is: 0.DIGITS * 10**point.  The algorithm is
 * Grisu3 (Loitsch 2010); it returns 0 digits for one number in two hundred, of which it cannot tell. */
static int digits_of(double number, char *digits, int *point) {
    u64 bits;
    memcpy(&bits, &number, sizeof bits);
    u64 fraction = bits & (((u64)1 << 52) - 1);
    int exponent = (int)(bits >> 52 & 0x7FF);
    Scaled exact = exponent ? (Scaled){fraction | (u64)1 << 52, exponent - 1075} : (Scaled){fraction, -1074};
    Scaled w = normal(exact), above = normal((Scaled){2 * exact.f + 1, exact.e - 1});
    /* Below a power of two, the numbers lie twice as near. */
    int narrow = !fraction && exponent > 1;
    Scaled below = {narrow ? 4 * exact.f - 1 : 2 * exact.f - 1, exact.e - 1 - narrow};
    below = (Scaled){below.f << (below.e - above.e), above.e};
    int place = (-LEAST_POWER + (int)ceil((-61 - w.e) * 0.30102999566398114) - 1) / POWER_STEP + 1;
    int k = LEAST_POWER + POWER_STEP * place;
    Scaled power = {powers[place], ((k * 217706) >> 16) - 63};
    w = times(w, power), above = times(above, power), below = times(below, power);
    u64 unit = 1, top = above.f + unit, interval = top - (below.f - unit), one = (u64)1 << -w.e;
    uint32_t whole = (uint32_t)(top >> -w.e), divisor = 1;
    u64 part = top & (one - 1);
    int kappa = 1, count = 0;
    for (; whole / divisor >= 10; divisor *= 10) kappa++;
    for (; kappa > 0; divisor /= 10) {
        digits[count++] = (char)('0' + whole / divisor);
        whole %= divisor, kappa--;
        u64 rest = ((u64)whole << -w.e) + part;
        if (rest >= interval) continue;
        *point = count + kappa - k;
        return weed(digits + count - 1, top - w.f, interval, rest, (u64)divisor << -w.e, unit) ? count : 0;
    }
    for (;;) {
        part *= 10, unit *= 10, interval *= 10;
        digits[count++] = (char)('0' + (part >> -w.e));
        part &= one - 1, kappa--;
        if (part >= interval) continue;
        *point = count + kappa - k;
        return weed(digits + count - 1, (top - w.f) * unit, interval, part, one, unit) ? count : 0;
    }
}

enum { NUMBER_ROOM = 32 };

/* repr() of a finite number; returns its length, -1 with an exception. */
static int written(double number, char *to) {
    char digits[NUMBER_ROOM], *out = to;
    int point = 1, count = 1;
    if (signbit(number)) *out++ = '-';
    if (number == 0) digits[0] = '0';
    else count = digits_of(fabs(number), digits, &point);
    if (!count) {
        char *text = PyOS_double_to_string(number, 'r', 0, Py_DTSF_ADD_DOT_0, NULL);
        if (!text) return -1;
        size_t size = strlen(text);
        memcpy(to, text, size);
        PyMem_Free(text);
        return (int)size;
    }
    if (point <= -4 || point > 16) {
        *out++ = digits[0];
        if (count > 1) *out++ = '.';
        memcpy(out, digits + 1, (size_t)count - 1);
        out += count - 1;
        return (int)(out - to) + sprintf(out, "e%c%02d", point < 1 ? '-' : '+', abs(point - 1));
    }
    if (point <= 0) {
        *out++ = '0', *out++ = '.';
        for (; point < 0; point++) *out++ = '0';
        memcpy(out, digits, (size_t)count);
        return (int)(out - to) + count;
    }
    for (int i = 0; i < count || i < point; i++) {
        if (i == point) *out++ = '.';
        *out++ = i < count ? digits[i] : '0';
    }
    if (count <= point) *out++ = '.', *out++ = '0';
    return (int)(out - to);
}

/* --- cells --- */

typedef struct {
    char *text;
    size_t size, room;
} Out;

static char *reserve(Out *out, size_t more) {
    if (!out->text || out->room - out->size < more) {
        size_t room = 2 * (out->size + more) + 4096;
        char *text = realloc(out->text, room);
        if (!text) return (char *)PyErr_NoMemory();
        out->text = text, out->room = room;
    }
    return out->text + out->size;
}

static int put(Out *out, const char *text, size_t size) {
    char *to = reserve(out, size);
    if (!to) return -1;
    memcpy(to, text, size);
    out->size += size;
    return 0;
}
#define PUT(out, text) put(out, text, sizeof text - 1)

static int put_float(Out *out, double number) {
    char *to = reserve(out, NUMBER_ROOM);
    int size = to ? written(number, to) : -1;
    if (size < 0) return -1;
    out->size += (size_t)size;
    return 0;
}

/* The kinds of bytes in texts; FOREIGN ones are for Python. */
enum { PLAIN, MARKUP, LINE, FOREIGN };
static u8 in_sheet[256], in_csv[256];
enum { MOST_TEXT = 32767 };

static void fill_tables(void) {
    for (int c = 0; c < 256; c++) {
        in_sheet[c] = c == '\n' ? LINE : c < ' ' || c > 126 ? FOREIGN : strchr("&<>", c) ? MARKUP : PLAIN;
        in_csv[c] = c && strchr(",\"\n\r", c) ? FOREIGN : PLAIN;
    }
}

/* The bytes of a text, and how many there are of each kind; NULL without an exception if it is no UTF-8. */
static const char *bytes_of(PyObject *text, const u8 *kinds, Py_ssize_t *size, Py_ssize_t *found) {
    const char *bytes = PyUnicode_AsUTF8AndSize(text, size);
    if (!bytes) return PyErr_Clear(), NULL;
    for (Py_ssize_t i = 0; i < *size; i++) found[kinds[(u8)bytes[i]]]++;
    return bytes;
}

/* Whether a text reads like the escape of a character, _x000A_. */
static int looks_escaped(const char *text) {
    while ((text = strstr(text, "_x"))) {
        if (strspn(text + 2, "0123456789abcdefABCDEF") >= 4 && text[6] == '_') return 1;
        text += 2;
    }
    return 0;
}

static int put_escaped(Out *out, const char *text, Py_ssize_t size) {
    char *to = reserve(out, 5 * (size_t)size), *start = to;
    if (!to) return -1;
    for (Py_ssize_t i = 0; i < size; i++) {
        const char *escape = text[i] == '&' ? "&amp;" : text[i] == '<' ? "&lt;" : text[i] == '>' ? "&gt;" : NULL;
        if (!escape) *to++ = text[i];
        else while (*escape) *to++ = *escape++;
    }
    out->size += (size_t)(to - start);
    return 0;
}

/* A text up to the end of its cell; 1 where it is for Python. */
static int put_text(Out *out, PyObject *cell) {
    Py_ssize_t size, found[FOREIGN + 1] = {0};
    const char *text = bytes_of(cell, in_sheet, &size, found);
    if (!text || found[FOREIGN] || size > MOST_TEXT / 2 || looks_escaped(text)) return 1;
    if (!size) return PUT(out, "/>");
    int spaced = found[LINE] || text[0] == ' ' || text[size - 1] == ' ';
    if (spaced ? PUT(out, " t=\"inlineStr\"><is><t xml:space=\"preserve\">") : PUT(out, " t=\"inlineStr\"><is><t>"))
        return -1;
    if (found[MARKUP] ? put_escaped(out, text, size) : put(out, text, (size_t)size)) return -1;
    return PUT(out, "</t></is></c>");
}

/* What Python makes of a cell, as UTF-8. */
static PyObject *asked(PyObject *make, PyObject *cell) {
    PyObject *text = PyObject_CallFunctionObjArgs(make, cell, NULL);
    PyObject *bytes = text ? PyUnicode_AsEncodedString(text, "utf-8", "replace") : NULL;
    Py_XDECREF(text);
    return bytes;
}

/* A cell of a sheet, with the style of its row. */
static int sheet_cell(Out *out, PyObject *cell, PyObject *make, const char *style, size_t style_size) {
    PyTypeObject *type = Py_TYPE(cell);
    Py_ssize_t size;
    if (PUT(out, "<c") || put(out, style, style_size)) return -1;
    if (type == &PyFloat_Type) {
        double number = PyFloat_AsDouble(cell);
        if (isfinite(number)) return PUT(out, "><v>") || put_float(out, number) || PUT(out, "</v></c>");
    } else if (type == &PyUnicode_Type) {
        int state = put_text(out, cell);
        if (state < 1) return state;
    }
    PyObject *other = asked(make, cell);
    char *bytes;
    if (!other || PyBytes_AsStringAndSize(other, &bytes, &size)) return Py_XDECREF(other), -1;
    int failed = put(out, bytes + 2, (size_t)size - 2);
    Py_DECREF(other);
    return failed;
}

static int csv_cell(Out *out, PyObject *cell, PyObject *make) {
    PyTypeObject *type = Py_TYPE(cell);
    Py_ssize_t size;
    if (type == &PyFloat_Type && isfinite(PyFloat_AsDouble(cell))) return put_float(out, PyFloat_AsDouble(cell));
    if (type == &PyUnicode_Type) {
        Py_ssize_t found[FOREIGN + 1] = {0};
        const char *text = bytes_of(cell, in_csv, &size, found);
        int formula = text && size && text[0] && strchr("=+-@\t", text[0]);
        if (text && !formula && !found[FOREIGN]) return put(out, text, (size_t)size);
    }
    PyObject *other = asked(make, cell);
    char *bytes;
    if (!other || PyBytes_AsStringAndSize(other, &bytes, &size)) return Py_XDECREF(other), -1;
    int failed = put(out, bytes, (size_t)size);
    Py_DECREF(other);
    return failed;
}

/* --- rows --- */

typedef struct {
    PyObject *make, *styles;
    Py_ssize_t width, number;
    int sheet;
} Table;

/* 1 for a row of another width. */
static int put_row(Out *out, PyObject *row, const Table *table) {
    PyObject *cells = PyTuple_Check(row) && PyTuple_Size(row) == 2 ? PyTuple_GetItem(row, 0) : NULL;
    if (!cells || !PyTuple_Check(cells) || PyTuple_Size(cells) != table->width) return 1;
    const char *style = "";
    Py_ssize_t style_size = 0;
    PyObject *colour = PyTuple_GetItem(row, 1);
    if (table->sheet && colour != Py_None) {
        PyObject *text = PyObject_GetItem(table->styles, colour);
        style = text ? PyUnicode_AsUTF8AndSize(text, &style_size) : NULL;
        /* The table of styles keeps it. */
        Py_XDECREF(text);
        if (!style) return -1;
    }
    if (table->sheet) {
        char *to = reserve(out, 48);
        if (!to) return -1;
        out->size += (size_t)sprintf(to, "<row r=\"%lld\">", (long long)table->number);
    }
    for (Py_ssize_t i = 0; i < table->width; i++) {
        PyObject *cell = PyTuple_GetItem(cells, i);
        if (table->sheet ? sheet_cell(out, cell, table->make, style, (size_t)style_size)
                         : ((i && PUT(out, ",")) || csv_cell(out, cell, table->make)))
            return -1;
    }
    return table->sheet ? PUT(out, "</row>") : PUT(out, "\n");
}

static PyObject *rows_of(PyObject *rows, Table table) {
    if (!PyList_Check(rows)) return PyErr_Format(PyExc_TypeError, "the rows must be a list");
    Out out = {NULL};
    int state = 0;
    /* The list is asked for its size every time: a cell may run Python. */
    for (Py_ssize_t i = 0; !state && i < PyList_Size(rows); i++, table.number++) {
        PyObject *row = Py_NewRef(PyList_GetItem(rows, i));
        state = put_row(&out, row, &table);
        Py_DECREF(row);
    }
    PyObject *found = NULL;
    if (!state) found = PyBytes_FromStringAndSize(out.text ? out.text : "", (Py_ssize_t)out.size);
    free(out.text);
    return state == 1 ? Py_NewRef(Py_None) : found;
}

static PyObject *sheet_rows(PyObject *module, PyObject *args) {
    Table table = {.sheet = 1};
    PyObject *rows;
    if (!PyArg_ParseTuple(args, "OnnO!O", &rows, &table.number, &table.width, &PyDict_Type, &table.styles, &table.make))
        return NULL;
    return rows_of(rows, table);
}

static PyObject *csv_rows(PyObject *module, PyObject *args) {
    Table table = {.sheet = 0};
    PyObject *rows;
    if (!PyArg_ParseTuple(args, "OnO", &rows, &table.width, &table.make)) return NULL;
    return rows_of(rows, table);
}

static int execute(PyObject *module) { return fill_tables(), 0; }
static PyMethodDef methods[] = {
    {"sheet_rows", sheet_rows, METH_VARARGS, "Rows as the XML of a sheet; None if one has another width."},
    {"csv_rows", csv_rows, METH_VARARGS, "Rows as lines of csv; None if one has another width."},
    {NULL, NULL, 0, NULL},
};
static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};
static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT, .m_name = "_cells", .m_methods = methods, .m_slots = slots};
PyMODINIT_FUNC PyInit__cells(void) { return PyModuleDef_Init(&definition); }
