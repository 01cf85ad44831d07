/* What surrounds the matrix products of a decoder layer on a CPU: norms, rotary embedding, the gate of an MLP, and
 * attention over the blocks of a KV cache where they lie. Each is several passes over memory in torch, whose calls take
 * longer than the work when a step has few rows.
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

enum { QUERIES = 32 };      /* rows x heads that share a head of K and V, at a time */
enum { COLUMNS = 16 };      /* at a time: their scores are one vector */
enum { PIECE = 16 };        /* rows that a thread takes at a time */

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

INLINE long lanes_left(long at, long width) { return width - at < LANES ? width - at : LANES; }

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
    for (long i = 0; i < work->width; i += LANES) {
        const long count = lanes_left(i, work->width);
        Floats x = load(work->x, begin + i, count, is_half);
        if (work->added != NULL) {
            x += load(work->added, begin + i, count, is_half);
            store(work->total, begin + i, count, is_half, x);
            x = load(work->total, begin + i, count, is_half);
        }
        squares += x * x;
    }
    const void *x = work->added != NULL ? work->total : work->x;
    const float scale = 1.0f / sqrtf(sum_of(squares) / (float)work->width + work->eps);
    for (long i = 0; i < work->width; i += LANES) {
        const long count = lanes_left(i, work->width);
        store(work->out, begin + i, count, is_half,
              load(x, begin + i, count, is_half) * scale * load(work->weight, i, count, is_half));
    }
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
        for (long i = 0; i < half; i += LANES) {
            const long count = lanes_left(i, half);
            const Floats a = load(work->x, first + i, count, is_half), b = load(work->x, second + i, count, is_half);
            store(work->x, first + i, count, is_half,
                  a * load(work->cos, turn + i, count, is_half) + b * load(work->sin, turn + i, count, is_half));
            store(work->x, second + i, count, is_half,
                  b * load(work->cos, turn + half + i, count, is_half) +
                      a * load(work->sin, turn + half + i, count, is_half));
        }
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
    for (long i = 0; i < work->width; i += LANES) {
        const long count = lanes_left(i, work->width);
        const Floats gate = load(work->x, from + i, count, is_half), zero = {0};
        const Words is_negative = (Words)(gate < zero);
        const Floats power = all_exp2_below(chosen(is_negative, gate, -gate) * LOG2_E); /* e^-|x|, at most 1 */
        const Floats share = chosen(is_negative, power, zero + 1.0f) / (1.0f + power);  /* 1 / (1 + e^-x) */
        store(work->out, into + i, count, is_half,
              gate * share * load(work->x, from + work->width + i, count, is_half));
    }
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

/* ---- attention -------------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t first, rows, columns; /* rows of the step, and cached rows of the sequence, those of this step included */
    uint64_t table, mask;         /* int64 ids of blocks; (rows, columns) bytes, 0: row i sees all but the last
                                     rows - 1 - i columns */
} Item;

typedef struct {
    const void *query; /* (rows, query_stride): heads of dim each */
    const void *keys, *values; /* (slots, kv heads, dim) */
    void *out;                 /* (rows, heads, value_dim) */
    const Item *items;
    long num_items, query_stride, heads, kv_heads, dim, value_dim, block_size, window; /* window 0: none */
    float scale, softcap; /* softcap 0: none */
} Attention;

typedef struct {
    long wide, value_wide;      /* dim and value_dim, filled up with zeros to whole vectors */
    float *query, *key, *value; /* (QUERIES, wide), (wide, COLUMNS), (COLUMNS, value_wide) */
    float *mixed;               /* (QUERIES, value_wide) */
    float best[QUERIES], mass[QUERIES];
} Scratch;

INLINE long filled_up(long count) { return (count + LANES - 1) / LANES * LANES; }

INLINE Floats lanes_at(const float *from) {
    Floats floats;
    memcpy(&floats, from, sizeof floats);
    return floats;
}

INLINE int64_t slot_of(const Attention *work, const Item *item, long column) {
    const int64_t *table = ADDRESS(const int64_t *, item->table);
    return table[column / work->block_size] * work->block_size + column % work->block_size;
}

/* Keys and values of a head from `count` columns on; what is left of COLUMNS stays from before: it is not visible. */
INLINE void read_columns(const Attention *work, const Item *item, const Scratch *scratch, long head, long first,
                         long count, int is_half) {
    for (long i = 0; i < count; i++) {
        const long at = slot_of(work, item, first + i) * work->kv_heads + head;
        for (long d = 0; d < work->dim; d += LANES) {
            const Floats key = load(work->keys, at * work->dim + d, lanes_left(d, work->dim), is_half);
            for (int lane = 0; lane < LANES; lane++) scratch->key[(d + lane) * COLUMNS + i] = key[lane];
        }
        for (long d = 0; d < work->value_dim; d += LANES) {
            const Floats value = load(work->values, at * work->value_dim + d, lanes_left(d, work->value_dim), is_half);
            memcpy(scratch->value + i * scratch->value_wide + d, &value, sizeof value);
        }
    }
}

/* All bits for the columns that a row sees, none for the others. */
INLINE Words seen_columns(const Attention *work, const Item *item, long row, long first, long count) {
    const long own = item->columns - item->rows + row; /* the row's column, which is its position in a chain */
    const long oldest = work->window > 0 && own - work->window + 1 > first ? own - work->window + 1 - first : 0;
    const long newest = item->mask != 0 || own - first >= count ? count : own - first + 1;
    const uint8_t *mask = ADDRESS(const uint8_t *, item->mask) + row * item->columns + first;
    uint32_t seen[LANES];
    if (item->mask != 0)
        for (long i = 0; i < LANES; i++) seen[i] = i < count && mask[i] != 0 ? UINT32_MAX : 0;
    else
        for (long i = 0; i < LANES; i++) seen[i] = oldest <= i && i < newest ? UINT32_MAX : 0;
    Words words;
    memcpy(&words, seen, sizeof words);
    return words;
}

INLINE Floats softly_capped(Floats scores, float cap) {
    float lanes[LANES];
    memcpy(lanes, &scores, sizeof lanes);
    for (int i = 0; i < LANES; i++) lanes[i] = cap * tanhf(lanes[i] / cap);
    return lanes_at(lanes);
}

/* Take columns into account for one query. */
INLINE void attend_columns(const Attention *work, Scratch *scratch, long place, const Words *seen, long count) {
    const float *query = scratch->query + place * scratch->wide;
    Floats sums[4] = {{0}};
    for (long d = 0; d < scratch->wide; d += 4)
        for (int i = 0; i < 4; i++) sums[i] += query[d + i] * lanes_at(scratch->key + (d + i) * COLUMNS);
    Floats scores = ((sums[0] + sums[1]) + (sums[2] + sums[3])) * work->scale;
    if (work->softcap > 0.0f) scores = softly_capped(scores, work->softcap);
    const float before = scratch->best[place], here = max_of(chosen(*seen, scores, (Floats){0} - INFINITY));
    const float best = here > before ? here : before;
    if (best == -INFINITY) return;
    const Floats powers = (scores - best) * LOG2_E;
    Floats weights = all_exp2_below(powers) + (powers - powers); /* what is not a number stays none */
    weights = (Floats)((Words)weights & *seen);
    const float shrink = exp2_below((before - best) * LOG2_E);
    scratch->best[place] = best;
    scratch->mass[place] = scratch->mass[place] * shrink + sum_of(weights);
    float *mixed = scratch->mixed + place * scratch->value_wide, shares[COLUMNS];
    memcpy(shares, &weights, sizeof shares);
    for (long d = 0; d < scratch->value_wide; d += LANES) {
        Floats sum = lanes_at(mixed + d) * shrink;
        for (long i = 0; i < count; i++) sum += shares[i] * lanes_at(scratch->value + i * scratch->value_wide + d);
        memcpy(mixed + d, &sum, sizeof sum);
    }
}

/* One head of K and V for up to QUERIES queries of an item, from query `from` on: row by row, its heads in order. */
INLINE void attend_queries(const Attention *work, const Item *item, Scratch *scratch, long head, long from, long to,
                           int is_half) {
    const long group = work->heads / work->kv_heads, first_row = from / group, last_row = (to - 1) / group;
    for (long each = from; each < to; each++) {
        const long row = item->first + each / group, at = (head * group + each % group) * work->dim;
        for (long d = 0; d < work->dim; d += LANES) {
            const long count = lanes_left(d, work->dim);
            const Floats floats = load(work->query, row * work->query_stride + at + d, count, is_half);
            memcpy(scratch->query + (each - from) * scratch->wide + d, &floats, sizeof floats);
        }
        scratch->best[each - from] = -INFINITY, scratch->mass[each - from] = 0.0f;
    }
    memset(scratch->mixed, 0, (size_t)((to - from) * scratch->value_wide) * sizeof(float));
    const long own = item->columns - item->rows, oldest = own + first_row - work->window + 1;
    const long stop = item->mask != 0 ? item->columns : own + last_row + 1;
    const long begin = item->mask == 0 && work->window > 0 && oldest > 0 ? oldest / COLUMNS * COLUMNS : 0;
    for (long first = begin; first < stop; first += COLUMNS) {
        const long count = stop - first < COLUMNS ? stop - first : COLUMNS;
        read_columns(work, item, scratch, head, first, count, is_half);
        for (long row = first_row; row <= last_row; row++) {
            const Words seen = seen_columns(work, item, row, first, count);
            const long begins = row * group > from ? row * group : from;
            const long ends = (row + 1) * group < to ? (row + 1) * group : to;
            for (long each = begins; each < ends; each++) attend_columns(work, scratch, each - from, &seen, count);
        }
    }
    for (long each = from; each < to; each++) {
        const long row = item->first + each / group;
        const long at = (row * work->heads + head * group + each % group) * work->value_dim;
        const float *mixed = scratch->mixed + (each - from) * scratch->value_wide;
        for (long d = 0; d < work->value_dim; d += LANES)
            store(work->out, at + d, lanes_left(d, work->value_dim), is_half,
                  lanes_at(mixed + d) / scratch->mass[each - from]);
    }
}

FOR_EACH_CPU static void attend_item(const Attention *work, Scratch *scratch, long unit, int is_half) {
    const Item *item = &work->items[unit / work->kv_heads];
    const long head = unit % work->kv_heads, queries = (long)item->rows * (work->heads / work->kv_heads);
    for (long from = 0; from < queries; from += QUERIES) {
        const long to = from + QUERIES < queries ? from + QUERIES : queries;
        if (is_half)
            attend_queries(work, item, scratch, head, from, to, 1);
        else
            attend_queries(work, item, scratch, head, from, to, 0);
    }
}

/* attend(next, is_half, num_items, query_stride, heads, kv_heads, dim, value_dim, block_size, window, scale, softcap,
 *        query, keys, values, items, out) */
static PyObject *attend(PyObject *module, PyObject *arguments) {
    (void)module;
    unsigned long long next, query, keys, values, items, out;
    int is_half;
    Attention work;
    if (!PyArg_ParseTuple(arguments, "KillllllllffKKKKK", &next, &is_half, &work.num_items, &work.query_stride,
                          &work.heads, &work.kv_heads, &work.dim, &work.value_dim, &work.block_size, &work.window,
                          &work.scale, &work.softcap, &query, &keys, &values, &items, &out))
        return NULL;
    work.query = ADDRESS(const void *, query), work.keys = ADDRESS(const void *, keys);
    work.values = ADDRESS(const void *, values), work.items = ADDRESS(const Item *, items);
    work.out = ADDRESS(void *, out);
    Scratch scratch = {.wide = filled_up(work.dim), .value_wide = filled_up(work.value_dim)};
    const size_t count = (size_t)((QUERIES + COLUMNS) * (scratch.wide + scratch.value_wide));
    float *floats = calloc(count, sizeof(float));
    if (floats == NULL) return PyErr_NoMemory();
    scratch.query = floats;
    scratch.key = scratch.query + QUERIES * scratch.wide;
    scratch.value = scratch.key + COLUMNS * scratch.wide;
    scratch.mixed = scratch.value + COLUMNS * scratch.value_wide;
    int64_t alone = 0, *counter = next != 0 ? ADDRESS(int64_t *, next) : &alone;
    Py_BEGIN_ALLOW_THREADS
    for (long at; (at = take(counter, 1)) < work.num_items * work.kv_heads;) attend_item(&work, &scratch, at, is_half);
    Py_END_ALLOW_THREADS
    free(floats);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"norm", norm, METH_VARARGS, NULL},
                                {"rotate", rotate, METH_VARARGS, NULL},
                                {"gate", gate, METH_VARARGS, NULL},
                                {"attend", attend, METH_VARARGS, NULL},
                                {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_layer_kernel", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__layer_kernel(void) { return PyModule_Create(&definition); }
