/* What surrounds the matrix products of a decoder layer on a CPU: norms, rotary embedding and the gate of an MLP. Each is
 * several calls of torch, which take longer than the work when a step has few rows.
 *
 * The only caller, which owns all memory and says what fits: `layer_kernel.py`. Sums are of float32; each result is
 * rounded once. A row's result depends on that row alone, whatever else is in the step.
 *
 * Several threads may work on one call: each takes the next piece from the counter at `next` until none is left. With 0
 * for `next` the calling thread is the only one.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <stdlib.h>

#include "../lanes.h"

enum { PIECE = 16 }; /* rows that a thread takes at a time */

#define ADDRESS(type, value) ((type)(uintptr_t)(value))

/* ---- numbers ---------------------------------------------------------------------------------------------------- */

/* The first `count` numbers from element `at` on, zeros after them. */
INLINE Floats load(const void *from, long at, long count, int is_half) {
    if (is_half) {
        Halves halves = {0};
        memcpy(&halves, (const uint16_t *)from + at, count == LANES ? sizeof halves : (size_t)count * 2);
        return (Floats)(__builtin_convertvector(halves, Words) << 16);
    }
    Floats floats = {0};
    memcpy(&floats, (const float *)from + at, count == LANES ? sizeof floats : (size_t)count * 4);
    return floats;
}

INLINE void store(void *into, long at, long count, int is_half, Floats floats) {
    if (is_half) {
        const Words bits = (Words)floats;
        const Words rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16; /* to the nearest, ties to even */
        const Words is_nan = (Words)(floats != floats);
        const Halves halves = __builtin_convertvector((rounded & ~is_nan) | (0x7FC0u & is_nan), Halves);
        memcpy((uint16_t *)into + at, &halves, count == LANES ? sizeof halves : (size_t)count * 2);
        return;
    }
    memcpy((float *)into + at, &floats, count == LANES ? sizeof floats : (size_t)count * 4);
}

/* The statements for each part of a row: `i` is where it begins, `count` is LANES, or for the last part what is left.
 * The compiler sees which: copies of a known size are single instructions. */
#define IN_PARTS(width, ...)                     \
    do {                                         \
        long i = 0;                              \
        for (; i + LANES <= (width); i += LANES) { \
            const long count = LANES;            \
            __VA_ARGS__                          \
        }                                        \
        if (i < (width)) {                       \
            const long count = (width)-i;        \
            __VA_ARGS__                          \
        }                                        \
    } while (0)

INLINE long take(int64_t *next, long count) { return (long)__atomic_fetch_add(next, count, __ATOMIC_RELAXED); }

/* ---- norms ------------------------------------------------------------------------------------------------------ */

typedef struct {
    const void *x, *added, *weight; /* added: NULL for none */
    void *total, *out;              /* total: x + added, rounded; NULL if nothing is added */
    long rows, width;
    float eps;
} Norm;

INLINE void norm_row(const Norm *work, long row, int is_half) {
    const long begin = row * work->width;
    Floats squares = {0};
    IN_PARTS(work->width, {
        Floats x = load(work->x, begin + i, count, is_half);
        if (work->added != NULL) {
            x += load(work->added, begin + i, count, is_half);
            store(work->total, begin + i, count, is_half, x);
            x = load(work->total, begin + i, count, is_half);
        }
        squares += x * x;
    });
    const void *x = work->added != NULL ? work->total : work->x;
    const float scale = 1.0f / sqrtf(sum_of(squares) / (float)work->width + work->eps);
    IN_PARTS(work->width, {
        const Floats weight = load(work->weight, i, count, is_half);
        store(work->out, begin + i, count, is_half, load(x, begin + i, count, is_half) * scale * weight);
    });
}

FOR_EACH_CPU static void norm_rows(const Norm *work, long from, long to, int is_half) {
    if (is_half)
        for (long row = from; row < to; row++) norm_row(work, row, 1);
    else
        for (long row = from; row < to; row++) norm_row(work, row, 0);
}

/* norm(next, is_half, rows, width, eps, x, added, weight, total, out) */
static PyObject *norm(PyObject *module, PyObject *arguments) {
    (void)module;
    unsigned long long next, x, added, weight, total, out;
    int is_half;
    Norm work;
    if (!PyArg_ParseTuple(arguments, "KillfKKKKK", &next, &is_half, &work.rows, &work.width, &work.eps, &x, &added,
                          &weight, &total, &out))
        return NULL;
    work.x = ADDRESS(const void *, x), work.added = ADDRESS(const void *, added);
    work.weight = ADDRESS(const void *, weight);
    work.total = ADDRESS(void *, total), work.out = ADDRESS(void *, out);
    int64_t alone = 0, *counter = next != 0 ? ADDRESS(int64_t *, next) : &alone;
    Py_BEGIN_ALLOW_THREADS
    for (long at; (at = take(counter, PIECE)) < work.rows;)
        norm_rows(&work, at, at + PIECE < work.rows ? at + PIECE : work.rows, is_half);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* ---- rotary embedding ------------------------------------------------------------------------------------------- */

typedef struct {
    void *x;                 /* (rows, stride): `heads` heads of `dim` from each row's beginning are turned in place */
    const void *cos, *sin;   /* (rows, dim), the first half of sin negated */
    long rows, stride, heads, dim;
} Rotary;

INLINE void rotate_row(const Rotary *work, long row, int is_half) {
    const long dim = work->dim, half = dim / 2, turn = row * dim;
    for (long head = 0; head < work->heads; head++) {
        const long first = row * work->stride + head * dim, second = first + half;
        IN_PARTS(half, {
            const Floats a = load(work->x, first + i, count, is_half), b = load(work->x, second + i, count, is_half);
            const Floats cos = load(work->cos, turn + i, count, is_half), sin = load(work->sin, turn + i, count, is_half);
            const Floats far_cos = load(work->cos, turn + half + i, count, is_half);
            const Floats far_sin = load(work->sin, turn + half + i, count, is_half);
            store(work->x, first + i, count, is_half, a * cos + b * sin);
            store(work->x, second + i, count, is_half, b * far_cos + a * far_sin);
        });
    }
}

FOR_EACH_CPU static void rotate_rows(const Rotary *work, long from, long to, int is_half) {
    if (is_half)
        for (long row = from; row < to; row++) rotate_row(work, row, 1);
    else
        for (long row = from; row < to; row++) rotate_row(work, row, 0);
}

/* rotate(next, is_half, rows, stride, heads, dim, x, cos, sin) */
static PyObject *rotate(PyObject *module, PyObject *arguments) {
    (void)module;
    unsigned long long next, x, cosine, sine;
    int is_half;
    Rotary work;
    if (!PyArg_ParseTuple(arguments, "KillllKKK", &next, &is_half, &work.rows, &work.stride, &work.heads, &work.dim, &x,
                          &cosine, &sine))
        return NULL;
    work.x = ADDRESS(void *, x), work.cos = ADDRESS(const void *, cosine), work.sin = ADDRESS(const void *, sine);
    int64_t alone = 0, *counter = next != 0 ? ADDRESS(int64_t *, next) : &alone;
    Py_BEGIN_ALLOW_THREADS
    for (long at; (at = take(counter, PIECE)) < work.rows;)
        rotate_rows(&work, at, at + PIECE < work.rows ? at + PIECE : work.rows, is_half);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* ---- the gate of an MLP ----------------------------------------------------------------------------------------- */

typedef struct {
    const void *x; /* (rows, 2 * width): gates, then what they let through */
    void *out;     /* (rows, width) */
    long rows, width;
} Gate;

INLINE void gate_row(const Gate *work, long row, int is_half) {
    const long from = row * 2 * work->width, into = row * work->width;
    IN_PARTS(work->width, {
        const Floats gate = load(work->x, from + i, count, is_half), zero = {0};
        const Words is_negative = (Words)(gate < zero);
        const Floats power = all_exp2_below(chosen(is_negative, gate, -gate) * LOG2_E); /* e^-|x|, at most 1 */
        const Floats share = chosen(is_negative, power, zero + 1.0f) / (1.0f + power);  /* 1 / (1 + e^-x) */
        const Floats value = load(work->x, from + work->width + i, count, is_half);
        store(work->out, into + i, count, is_half, gate * share * value);
    });
}

FOR_EACH_CPU static void gate_rows(const Gate *work, long from, long to, int is_half) {
    if (is_half)
        for (long row = from; row < to; row++) gate_row(work, row, 1);
    else
        for (long row = from; row < to; row++) gate_row(work, row, 0);
}

/* gate(next, is_half, rows, width, x, out): silu of the first half of each row times the second */
static PyObject *gate(PyObject *module, PyObject *arguments) {
    (void)module;
    unsigned long long next, x, out;
    int is_half;
    Gate work;
    if (!PyArg_ParseTuple(arguments, "KillKK", &next, &is_half, &work.rows, &work.width, &x, &out)) return NULL;
    work.x = ADDRESS(const void *, x), work.out = ADDRESS(void *, out);
    int64_t alone = 0, *counter = next != 0 ? ADDRESS(int64_t *, next) : &alone;
    Py_BEGIN_ALLOW_THREADS
    for (long at; (at = take(counter, PIECE)) < work.rows;)
        gate_rows(&work, at, at + PIECE < work.rows ? at + PIECE : work.rows, is_half);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"norm", norm, METH_VARARGS, NULL},
                                {"rotate", rotate, METH_VARARGS, NULL},
                                {"gate", gate, METH_VARARGS, NULL},
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_layer_kernel", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__layer_kernel(void) { return PyModule_Create(&definition); }
