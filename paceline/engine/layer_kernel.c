/* Decoder layers on a CPU, or parts of them: linears with weights in a file's format, norms, rotary positions, gates,
 * attention.
 *
 * Numbers are float32, bfloat16 or float16, sums float32. A linear reads a weight once where it lies, such as in a
 * mapped file, and converts it in registers. Attention reads K and V through block tables, as `tile_plan.py` lays them
 * out, with the softmax on the way (FlashAttention, Dao et al. 2022), from one multiple of 256 columns to the next, so
 * that threads may share a long sequence. Every sum has one order, whichever rows are computed with it and whoever
 * computes it: a row has the same bits in every batch. Threads are those of the caller's OpenMP, whose
 * `GOMP_parallel` is given, so that no second team waits for the same cores. They go through a list of tasks together:
 * each takes the next part until none is left, then waits for those that others compute, but not for others that
 * compute none: on a busy machine a thread that sleeps holds up a task only if it fell asleep in it. Needs x86-64 with
 * AVX2, FMA and F16C: `is_supported` tells. The only caller, which owns all memory: `layer_kernel.py`. Nothing is kept
 * between calls.
 */
#if !defined(LANES)

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { FLOAT32, BFLOAT16, FLOAT16 };
enum { OUTPUTS = 4, TILE = 16 };  /* outputs of a product's inner loop, and those that a thread takes at a time */
enum { KEPT = 1 << 16 };          /* numbers of rows that stay in a core's second cache, beside a tile's weights */
enum { WIDENED = 1 << 15 };       /* numbers of weights that are converted once for all rows, if these are many */
enum { LINES = 32, COLUMNS = 32 }; /* of attention at a time: rows, once for each head of theirs; cached rows */
enum { CHUNK = 256 };             /* columns between two multiples of it have a softmax of their own, then join */
enum { MOST_ROOM = 1 << 26 };     /* numbers of chunks that wait to join: 256 MiB */
enum { DIMS = 256 };              /* of a head at most */
enum { ALONE = 1 << 15, FEW = 1 << 18 }; /* numbers, and products, that are not worth a second thread */
enum { GATES = 1 << 10 };                /* that a thread takes at a time */
enum { PATIENCE = 1 << 10 };             /* looks at what others compute before the core is left to them */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(_WIN32)
#define HAS_KERNEL 1
#include <immintrin.h>
#include <sched.h>

static size_t size_of(int format) { return format == FLOAT32 ? 4 : 2; }

typedef struct {
    int64_t weights, outputs, format; /* the address of (outputs, inputs), row after row */
} Part;

typedef struct {
    const Part *parts; /* matrices below each other */
    const float *x;    /* (rows, inputs) */
    const float *bias; /* of all outputs, or NULL */
    float *y;          /* (rows, stride) */
    long count, rows, inputs, stride;
    int adds; /* to what is in y */
} Product;

typedef struct {
    const char *x; /* (rows, heads, width), heads beside each other */
    const char *weight;
    char *y;
    long rows, heads, width, x_stride, y_stride; /* strides from row to row, in numbers */
    float eps;
    int format;
} Norm;

typedef struct {
    char *x; /* (rows, heads, width), heads beside each other: replaced */
    const char *cos, *sin; /* (rows, width), the first half of sin negated */
    long rows, heads, width, stride;
    int format;
} Turn;

typedef struct {
    const char *x; /* (rows, 2 * width): gates, then what they let through */
    char *y;       /* (rows, width) */
    long rows, width;
    int format;
} Gate;

typedef struct { /* what becomes of the projected heads of a row, in float32 */
    Norm query, key; /* without weights: none */
    Turn turn;       /* of both */
    const float *key_from, *value_from; /* (rows, heads, dim), of rows as far apart as those that are turned */
    float *keys, *values;               /* (slots, heads, dim) */
    const int64_t *slots;               /* (rows,) */
    long size;                          /* numbers of a row's K, and of its V */
} Place;

/* Fields of an item, as `tile_plan.Item` names them. */
enum { ROW, NUM_ROWS, TABLE, BEGIN, END, FULL, OWN, MASK, WORDS, POSITIONS, SLOT, LEAST, FIELDS };

typedef struct {
    const char *query, *keys, *values; /* (rows, heads, dim), (slots, kv heads, dim) twice */
    char *output;                      /* (rows, heads, value dim) */
    const int32_t *items, *pool;
    const int64_t *positions;
    long query_row, key_slot, value_slot, output_row; /* strides in numbers; heads lie beside each other */
    long items_count, heads, kv_heads, key_dim, value_dim, block, window; /* window 0: none */
    float scale, softcap;                                                  /* softcap 0: none */
    int format;
    long chunks;      /* of the longest item, where threads divide items by them; else 1 */
    long lines, wide; /* then of the highest item, and numbers of a line, padded */
    float *room;      /* (items, kv heads, chunks, lines): what a line has mixed, `best` and `total` */
} Attention;

/* Lines of an item: its rows, once for each of the heads that share a head of K and V. */
static long lines_of(const Attention *t, const int32_t *item) { return item[NUM_ROWS] * (t->heads / t->kv_heads); }

/* A multiple of COLUMNS, before which no row of the item sees anything. */
static long first_column(const Attention *t, const int32_t *item) {
    const long first = t->window ? (item[LEAST] - t->window + 1) / COLUMNS * COLUMNS : 0;
    return first > item[BEGIN] ? first : item[BEGIN];
}

static float *room_of(const Attention *t, long head, long chunk, long line) {
    return t->room + ((head * t->chunks + chunk) * t->lines + line) * (t->wide + 2);
}

enum { LINEAR, NORM, TURN, GATE, PLACE, ATTEND, JOIN_CHUNKS };

typedef struct {
    long next, done;                           /* parts that threads have taken, and have computed */
    long parts __attribute__((aligned(64))); /* not in the line of the cache that threads write to */
    int kind;
    union {
        Product linear;
        Norm norm;
        Turn turn;
        Gate gate;
        Place place;
        Attention attention;
    };
} Task;

typedef struct {
    Task *tasks; /* each needs those before it */
    long count;
} Program;

#define AT(address) ((void *)(uintptr_t)(address))

typedef void Parallel(void (*)(void *), void *, unsigned, unsigned);

#define INLINE static inline __attribute__((always_inline)) TARGET
#define ONCE static __attribute__((noinline)) TARGET /* not once more for each format of its callers */
#define JOIN_(name, lanes) name##_##lanes
#define JOIN(name, lanes) JOIN_(name, lanes)
#define OF(name) JOIN(name, LANES)

#define LANES 8
#define ROWS 3 /* with four outputs 12 sums, 3 inputs and a weight: all 16 registers */
#define TARGET __attribute__((target("avx2,fma,f16c")))
#define VECTOR __m256
#define INTS __m256i
#define HALVES __m128i
#define MM(name) _mm256_##name
#define LOAD_HALVES(p) _mm_loadu_si128((const __m128i *)(p))
#define STORE_HALVES(p, x) _mm_storeu_si128((__m128i *)(p), x)
#define LOW(x) (x)
#define AS_FLOATS(x) _mm256_castsi256_ps(x)
#define AS_INTS(x) _mm256_castps_si256(x)
#define ROUNDED(x) _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
/* 16 bits of every 32, in order */
#define NARROW(x) _mm256_castsi256_si128(_mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0xd8))
#include "layer_kernel.c"
#undef LANES
#undef ROWS
#undef TARGET
#undef VECTOR
#undef INTS
#undef HALVES
#undef MM
#undef LOAD_HALVES
#undef STORE_HALVES
#undef LOW
#undef AS_FLOATS
#undef AS_INTS
#undef ROUNDED
#undef NARROW

#define LANES 16
#define ROWS 6 /* 24 sums, 6 inputs and a weight of 32 registers */
#define TARGET __attribute__((target("avx2,fma,f16c,avx512f")))
#define VECTOR __m512
#define INTS __m512i
#define HALVES __m256i
#define MM(name) _mm512_##name
#define LOAD_HALVES(p) _mm256_loadu_si256((const __m256i *)(p))
#define STORE_HALVES(p, x) _mm256_storeu_si256((__m256i *)(p), x)
#define LOW(x)                                                                                                         \
    _mm256_add_ps(_mm512_castps512_ps256(x), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x), 1)))
#define AS_FLOATS(x) _mm512_castsi512_ps(x)
#define AS_INTS(x) _mm512_castps_si512(x)
#define ROUNDED(x) _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define NARROW(x) _mm512_cvtepi32_epi16(x)
#include "layer_kernel.c"
#endif

/* ---- for Python -------------------------------------------------------------------------------------------------- */

enum { NONE, AVX2, AVX512 };

static int supported(void) {
#ifdef HAS_KERNEL
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
        return NONE;
    return __builtin_cpu_supports("avx512f") ? AVX512 : AVX2;
#else
    return NONE;
#endif
}

static PyObject *is_supported(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyBool_FromLong(supported() != NONE);
}

#ifdef HAS_KERNEL
typedef unsigned long long Address;

static Task linear_of(const Part *parts, long count, const float *x, long rows, long inputs, const float *bias,
                      float *y, long stride, int adds) {
    Task t = {.kind = LINEAR, .linear = {parts, x, bias, y, count, rows, inputs, stride, adds}};
    for (long i = 0; i < count; i++) t.parts += (parts[i].outputs + TILE - 1) / TILE;
    return t;
}

static Task norm_of(Norm norm) { return (Task){.kind = NORM, .parts = norm.rows, .norm = norm}; }

static Task gate_of(Gate gate) {
    return (Task){.kind = GATE, .parts = gate.rows * ((gate.width + GATES - 1) / GATES), .gate = gate};
}

/* Attention, and what joins its chunks if it is divided. */
static Task *attend_of(Task *t, Attention attention) {
    const long heads = attention.items_count * attention.kv_heads;
    *t++ = (Task){.kind = ATTEND, .parts = heads * attention.chunks, .attention = attention};
    *t++ = (Task){.kind = JOIN_CHUNKS, .parts = attention.chunks > 1 ? heads : 0, .attention = attention};
    return t;
}

/* Divide items by their columns, too, where one would hold up the threads; no bit depends on it. Returns what is to be
 * freed. */
static void *divide(Attention *t, unsigned threads) {
    long longest = 0, all = 0, end = 0;
    t->lines = 0, t->wide = (t->value_dim + 15) / 16 * 16;
    for (const int32_t *item = t->items; item < t->items + t->items_count * FIELDS; item += FIELDS) {
        const long columns = item[END] - first_column(t, item), lines = lines_of(t, item);
        all += columns * t->kv_heads;
        longest = columns > longest ? columns : longest, end = item[END] > end ? item[END] : end;
        t->lines = lines > t->lines ? lines : t->lines;
    }
    t->chunks = 1;
    if (threads < 2 || longest <= CHUNK || 2 * (long)threads * longest <= all) return NULL;
    const long chunks = (end + CHUNK - 1) / CHUNK;
    const double numbers = (double)t->items_count * t->kv_heads * chunks * t->lines * (t->wide + 2);
    t->room = numbers > MOST_ROOM ? NULL : malloc(sizeof(float) * (size_t)numbers);
    if (t->room != NULL) t->chunks = chunks;
    return t->room;
}

/* Have threads compute tasks; small ones are left to the caller. */
static PyObject *run(Address parallel, unsigned threads, Task *tasks, long count, int is_small) {
    Program program = {tasks, count};
    void (*work)(void *) = supported() == AVX512 ? work_16 : work_8;
    Py_BEGIN_ALLOW_THREADS;
    if (threads > 1 && !is_small && (count > 1 || tasks->parts > 1))
        ((Parallel *)AT(parallel))(work, &program, threads, 0);
    else
        work(&program);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

/* Arguments of all: the address of GOMP_parallel, threads, the format but of linears and layers, then the numbers of
 * the task, pointers as integers. */
static PyObject *linear(PyObject *self, PyObject *arguments) {
    (void)self;
    Address parallel, parts_at, x, bias, y;
    unsigned threads;
    long count, inputs, rows, stride, products = 0;
    if (!PyArg_ParseTuple(arguments, "KIKllKlKKl", &parallel, &threads, &parts_at, &count, &inputs, &x, &rows, &bias,
                          &y, &stride))
        return NULL;
    const Part *parts = AT(parts_at);
    for (long i = 0; i < count; i++) products += rows * inputs * parts[i].outputs;
    Task t = linear_of(parts, count, AT(x), rows, inputs, AT(bias), AT(y), stride, 0);
    return run(parallel, threads, &t, 1, products < FEW);
}

static PyObject *norm(PyObject *self, PyObject *arguments) {
    (void)self;
    Address parallel, x, weight, y;
    unsigned threads;
    Norm n;
    if (!PyArg_ParseTuple(arguments, "KIiKlKlKlllf", &parallel, &threads, &n.format, &x, &n.x_stride, &y, &n.y_stride,
                          &weight, &n.rows, &n.heads, &n.width, &n.eps))
        return NULL;
    n.x = AT(x), n.weight = AT(weight), n.y = AT(y);
    Task t = norm_of(n);
    return run(parallel, threads, &t, 1, n.rows * n.heads * n.width < ALONE);
}

static PyObject *turn(PyObject *self, PyObject *arguments) {
    (void)self;
    Address parallel, x, cos, sin;
    unsigned threads;
    Task t = {.kind = TURN};
    Turn *n = &t.turn;
    if (!PyArg_ParseTuple(arguments, "KIiKlKKlll", &parallel, &threads, &n->format, &x, &n->stride, &cos, &sin,
                          &n->rows, &n->heads, &n->width))
        return NULL;
    n->x = AT(x), n->cos = AT(cos), n->sin = AT(sin), t.parts = n->rows;
    return run(parallel, threads, &t, 1, n->rows * n->heads * n->width < ALONE);
}

static PyObject *gate(PyObject *self, PyObject *arguments) {
    (void)self;
    Address parallel, x, y;
    unsigned threads;
    Gate n;
    if (!PyArg_ParseTuple(arguments, "KIiKKll", &parallel, &threads, &n.format, &x, &y, &n.rows, &n.width)) return NULL;
    n.x = AT(x), n.y = AT(y);
    Task t = gate_of(n);
    return run(parallel, threads, &t, 1, n.rows * n.width < ALONE / 4);
}

static PyObject *attend(PyObject *self, PyObject *arguments) {
    (void)self;
    Address parallel, query, keys, values, output, items, pool, positions;
    unsigned threads;
    Attention n;
    if (!PyArg_ParseTuple(arguments, "KIiKlKlKlKlKlKKllllllff", &parallel, &threads, &n.format, &query, &n.query_row,
                          &keys, &n.key_slot, &values, &n.value_slot, &output, &n.output_row, &items, &n.items_count,
                          &pool, &positions, &n.heads, &n.kv_heads, &n.key_dim, &n.value_dim, &n.block, &n.window,
                          &n.scale, &n.softcap))
        return NULL;
    if (n.key_dim > DIMS || n.value_dim > DIMS) {
        PyErr_SetString(PyExc_ValueError, "heads of too many numbers");
        return NULL;
    }
    n.query = AT(query), n.keys = AT(keys), n.values = AT(values), n.output = AT(output);
    n.items = AT(items), n.pool = AT(pool), n.positions = AT(positions);
    long products = 0;
    for (const int32_t *item = n.items; item < n.items + n.items_count * FIELDS; item += FIELDS)
        products += (long)item[NUM_ROWS] * (item[END] - item[BEGIN]) * n.heads * (n.key_dim + n.value_dim);
    void *room = divide(&n, products < FEW ? 1 : threads);
    Task tasks[2];
    attend_of(tasks, n);
    PyObject *none = run(parallel, threads, tasks, n.chunks > 1 ? 2 : 1, products < FEW);
    free(room);
    return none;
}

/* ---- whole layers, in float32: the records of `layer_kernel.py` ---- */
typedef struct {
    int64_t parts, count, bias;
} Linear;

typedef struct {
    int64_t before, between, query, key; /* weights of norms; the last two 0: heads are not normed */
    Linear qkv, out, up, down;           /* up: the gates', then those of what they let through */
    int64_t middle;                      /* numbers between up and down */
    int64_t index;                       /* of its K and V */
    int64_t window;
    float eps, scale, softcap;
} Layer;

_Static_assert(sizeof(Layer) == 168, "as large as `LAYER` is in Python");

typedef struct {
    Address hidden;         /* (rows, width): replaced */
    Address room;           /* for what is between, as `tasks_of` divides it; of rows that pad the others any numbers */
    Address cos, sin;       /* as those of `Turn` */
    Address keys, values;   /* (layers, slots, kv heads, dim) each */
    Address slots;          /* (rows,) of K and V */
    Address items, pool, positions;
    long rows, width, layer; /* numbers of a layer's K */
    long items_count, heads, kv_heads, dim, block;
} Step;

enum { TASKS = 10 }; /* of a layer */

static Attention attention_of(const Step *s) {
    const long queries = s->heads * s->dim, kept = s->kv_heads * s->dim;
    Attention t = {.items = AT(s->items), .items_count = s->items_count, .pool = AT(s->pool)};
    t.positions = AT(s->positions), t.query_row = queries + 2 * kept, t.output_row = queries;
    t.key_slot = t.value_slot = kept, t.key_dim = t.value_dim = s->dim;
    t.heads = s->heads, t.kv_heads = s->kv_heads, t.block = s->block;
    return t;
}

static void tasks_of(Task *t, const Layer *n, const Step *s, Attention attention) {
    const long rows = s->rows, queries = s->heads * s->dim, kept = s->kv_heads * s->dim, wide = queries + 2 * kept;
    float *hidden = AT(s->hidden), *normed = AT(s->room), *heads = normed + rows * s->width;
    float *mixed = heads + rows * wide;
    float *both = heads, *passed = both + rows * 2 * n->middle; /* where heads are, which are not needed any more */
    float *keys = (float *)AT(s->keys) + n->index * s->layer, *values = (float *)AT(s->values) + n->index * s->layer;
    Norm norm = {.x = (char *)hidden, .y = (char *)normed, .rows = rows, .heads = 1, .eps = n->eps};
    norm.width = norm.x_stride = norm.y_stride = s->width;
    Norm head = {.rows = rows, .width = s->dim, .x_stride = wide, .y_stride = wide, .eps = n->eps};
    Place place = {.query = head, .key = head, .keys = keys, .values = values, .slots = AT(s->slots), .size = kept};
    place.query.x = place.query.y = (char *)heads, place.query.weight = AT(n->query), place.query.heads = s->heads;
    place.key.x = place.key.y = (char *)(heads + queries), place.key.weight = AT(n->key), place.key.heads = s->kv_heads;
    place.turn = (Turn){.x = (char *)heads, .cos = AT(s->cos), .sin = AT(s->sin), .rows = rows, .width = s->dim};
    place.turn.heads = s->heads + s->kv_heads, place.turn.stride = wide;
    place.key_from = heads + queries, place.value_from = place.key_from + kept;
    attention.query = (char *)heads, attention.keys = (char *)keys, attention.values = (char *)values;
    attention.output = (char *)mixed, attention.window = n->window;
    attention.scale = n->scale, attention.softcap = n->softcap;
#define PRODUCT(of, x, inputs, y, stride, adds)                                                                        \
    linear_of(AT(n->of.parts), n->of.count, x, rows, inputs, AT(n->of.bias), y, stride, adds)
    norm.weight = AT(n->before), *t++ = norm_of(norm);
    *t++ = PRODUCT(qkv, normed, s->width, heads, wide, 0);
    *t++ = (Task){.kind = PLACE, .parts = rows, .place = place};
    t = attend_of(t, attention);
    *t++ = PRODUCT(out, mixed, queries, hidden, s->width, 1);
    norm.weight = AT(n->between), *t++ = norm_of(norm);
    *t++ = PRODUCT(up, normed, s->width, both, 2 * n->middle, 0);
    *t++ = gate_of((Gate){(char *)both, (char *)passed, rows, n->middle, 0});
    *t++ = PRODUCT(down, passed, n->middle, hidden, s->width, 1);
#undef PRODUCT
}

static PyObject *layers(PyObject *self, PyObject *arguments) {
    (void)self;
    Address parallel, layers_at;
    unsigned threads;
    long count;
    Step n;
    if (!PyArg_ParseTuple(arguments, "KIKlKKKKKKKKKKllllllll", &parallel, &threads, &layers_at, &count, &n.hidden,
                          &n.room, &n.cos, &n.sin, &n.keys, &n.values, &n.slots, &n.items, &n.pool, &n.positions,
                          &n.rows, &n.width, &n.layer, &n.items_count, &n.heads, &n.kv_heads, &n.dim, &n.block))
        return NULL;
    Task *tasks = aligned_alloc(64, sizeof(Task) * TASKS * count);
    if (tasks == NULL) return PyErr_NoMemory();
    Attention attention = attention_of(&n);
    void *room = divide(&attention, threads); /* one after the other, layers use it again */
    for (long i = 0; i < count; i++) tasks_of(tasks + TASKS * i, (const Layer *)AT(layers_at) + i, &n, attention);
    PyObject *none = run(parallel, threads, tasks, TASKS * count, 0);
    free(room);
    free(tasks);
    return none;
}
#endif

static PyMethodDef methods[] = {
    {"is_supported", is_supported, METH_NOARGS, "True on a processor on which the others run."},
#ifdef HAS_KERNEL
    {"linear", linear, METH_VARARGS, "y = x W' + b in float32, W in its own format."},
    {"norm", norm, METH_VARARGS, "Root mean square norm of each head of each row."},
    {"turn", turn, METH_VARARGS, "Turn heads of rows to their positions, in place."},
    {"gate", gate, METH_VARARGS, "SiLU of the first half of a row times the second."},
    {"attend", attend, METH_VARARGS, "Attention of the rows of whole tiles."},
    {"layers", layers, METH_VARARGS, "Decoder layers one after the other."},
#endif
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_layer_kernel", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__layer_kernel(void) { return PyModule_Create(&module); }

#else /* the computation, once for each width of registers ---------------------------------------------------------- */

/* ---- numbers in any format ---- */
INLINE VECTOR OF(load)(const char *numbers, int format, long at) {
    switch (format) {
    case BFLOAT16:
        return AS_FLOATS(MM(slli_epi32)(MM(cvtepu16_epi32)(LOAD_HALVES(numbers + 2 * at)), 16));
    case FLOAT16:
        return MM(cvtph_ps)(LOAD_HALVES(numbers + 2 * at));
    default:
        return MM(loadu_ps)((const float *)numbers + at);
    }
}

INLINE void OF(store)(char *numbers, int format, long at, VECTOR x) {
    switch (format) {
    case BFLOAT16: { /* to the nearest, of two to the even one */
        const INTS bits = AS_INTS(x), odd = MM(srli_epi32)(MM(slli_epi32)(bits, 15), 31);
        const INTS up = MM(add_epi32)(MM(add_epi32)(bits, odd), MM(set1_epi32)(0x7fff));
        STORE_HALVES(numbers + 2 * at, NARROW(MM(srli_epi32)(up, 16)));
        break;
    }
    case FLOAT16:
        STORE_HALVES(numbers + 2 * at, MM(cvtps_ph)(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
        break;
    default:
        MM(storeu_ps)((float *)numbers + at, x);
    }
}

/* The first `count` numbers, and zeros. */
INLINE VECTOR OF(load_some)(const char *numbers, int format, long at, long count) {
    char some[4 * LANES] = {0};
    memcpy(some, numbers + size_of(format) * at, size_of(format) * count);
    return OF(load)(some, format, 0);
}

INLINE void OF(store_some)(char *numbers, int format, long at, VECTOR x, long count) {
    char some[4 * LANES];
    OF(store)(some, format, 0, x);
    memcpy(numbers + size_of(format) * at, some, size_of(format) * count);
}

INLINE VECTOR OF(load_part)(const char *numbers, int format, long at, long stop) {
    return at + LANES <= stop ? OF(load)(numbers, format, at) : OF(load_some)(numbers, format, at, stop - at);
}

INLINE void OF(store_part)(char *numbers, int format, long at, VECTOR x, long stop) {
    if (at + LANES <= stop)
        OF(store)(numbers, format, at, x);
    else
        OF(store_some)(numbers, format, at, x, stop - at);
}

INLINE void OF(widen)(const char *numbers, int format, long count, float *into) {
    for (long i = 0; i < count; i += LANES)
        OF(store_part)((char *)into, FLOAT32, i, OF(load_part)(numbers, format, i, count), count);
}

/* The sums of the lanes of each. */
INLINE __m128 OF(sums)(VECTOR a, VECTOR b, VECTOR c, VECTOR d) {
    const __m256 four = _mm256_hadd_ps(_mm256_hadd_ps(LOW(a), LOW(b)), _mm256_hadd_ps(LOW(c), LOW(d)));
    return _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1));
}

INLINE float OF(sum)(VECTOR x) { return _mm_cvtss_f32(OF(sums)(x, x, x, x)); }

/* 2 to the power of numbers, within 3e-7 of itself; 0 below -126. */
INLINE VECTOR OF(exp2)(VECTOR x) {
    const VECTOR least = MM(set1_ps)(-127.0f), y = MM(max_ps)(least, x); /* NaN stays */
    const VECTOR whole = ROUNDED(y), f = MM(sub_ps)(y, whole);
    VECTOR p = MM(set1_ps)(1.3276473e-3f); /* |f| <= 0.5: least relative error of six terms */
    p = MM(fmadd_ps)(p, f, MM(set1_ps)(9.6755419e-3f));
    p = MM(fmadd_ps)(p, f, MM(set1_ps)(5.5507131e-2f));
    p = MM(fmadd_ps)(p, f, MM(set1_ps)(2.4022120e-1f));
    p = MM(fmadd_ps)(p, f, MM(set1_ps)(6.9314694e-1f));
    p = MM(fmadd_ps)(p, f, MM(set1_ps)(1.0f));
    const INTS power = MM(slli_epi32)(MM(add_epi32)(MM(cvtps_epi32)(whole), MM(set1_epi32)(127)), 23);
    return MM(mul_ps)(p, AS_FLOATS(power)); /* the power of -127 is 0 */
}

/* ---- linears ---- */
/* weights: of `outputs` outputs from `output` on, in this format. */
INLINE void OF(block)(const Product *t, int format, const char *weights, long output, int outputs, long row, int rows) {
    const long inputs = t->inputs, whole = inputs / LANES * LANES;
    const size_t size = size_of(format);
    const float *x = t->x + row * inputs;
    VECTOR sums[OUTPUTS][ROWS], in[ROWS];
    for (int o = 0; o < OUTPUTS; o++)
        for (int r = 0; r < rows; r++) sums[o][r] = MM(setzero_ps)();
    for (long i = 0; i < whole; i += LANES) {
        for (int r = 0; r < rows; r++) in[r] = MM(loadu_ps)(x + r * inputs + i);
        for (int o = 0; o < outputs; o++) {
            const VECTOR w = OF(load)(weights + size * o * inputs, format, i);
            for (int r = 0; r < rows; r++) sums[o][r] = MM(fmadd_ps)(w, in[r], sums[o][r]);
        }
    }
    if (whole < inputs) {
        for (int r = 0; r < rows; r++)
            in[r] = OF(load_some)((const char *)(x + r * inputs), FLOAT32, whole, inputs - whole);
        for (int o = 0; o < outputs; o++) {
            const VECTOR w = OF(load_some)(weights + size * o * inputs, format, whole, inputs - whole);
            for (int r = 0; r < rows; r++) sums[o][r] = MM(fmadd_ps)(w, in[r], sums[o][r]);
        }
    }
    for (int r = 0; r < rows; r++) {
        float found[OUTPUTS];
        _mm_storeu_ps(found, OF(sums)(sums[0][r], sums[1][r], sums[2][r], sums[3][r]));
        float *y = t->y + (row + r) * t->stride + output;
        for (int o = 0; o < outputs; o++) {
            const float own = found[o] + (t->bias ? t->bias[output + o] : 0.0f);
            y[o] = t->adds ? y[o] + own : own;
        }
    }
}

/* Calls for as many rows as fit, with counts that are constants, so that sums stay in registers. */
#define BLOCKS(row, stop, block)                                                                                       \
    do {                                                                                                               \
        long r_ = (row);                                                                                               \
        for (; r_ + ROWS <= (stop); r_ += ROWS) block(r_, ROWS);                                                       \
        switch ((stop)-r_) {                                                                                           \
        case 5:                                                                                                        \
            block(r_, (5 < ROWS ? 5 : 1));                                                                             \
            break;                                                                                                     \
        case 4:                                                                                                        \
            block(r_, (4 < ROWS ? 4 : 1));                                                                             \
            break;                                                                                                     \
        case 3:                                                                                                        \
            block(r_, (3 < ROWS ? 3 : 1));                                                                             \
            break;                                                                                                     \
        case 2:                                                                                                        \
            block(r_, 2);                                                                                              \
            break;                                                                                                     \
        case 1:                                                                                                        \
            block(r_, 1);                                                                                              \
            break;                                                                                                     \
        }                                                                                                              \
    } while (0)

/* Four outputs of rows `row` to `stop` - 1. */
INLINE void OF(four)(const Product *t, int format, const char *weights, long output, long row, long stop) {
#define BLOCK(r, count) OF(block)(t, format, weights, output, OUTPUTS, r, count)
    BLOCKS(row, stop, BLOCK);
#undef BLOCK
}

ONCE void OF(four_of_floats)(const Product *t, const float *weights, long output, long row, long stop) {
    OF(four)(t, FLOAT32, (const char *)weights, output, row, stop);
}

/* Outputs `begin` to `end` - 1 of a part, whose first output is `before` of all. */
INLINE void OF(tile)(const Product *t, const Part *part, int format, long begin, long end, long before) {
    const long inputs = t->inputs, fit = KEPT / inputs / ROWS * ROWS, most = fit > ROWS ? fit : ROWS;
    const size_t size = size_of(format);
    float widened[WIDENED];
    for (long row = 0; row < t->rows; row += most) {
        const long stop = row + most < t->rows ? row + most : t->rows;
        const int is_worth = stop - row > ROWS && OUTPUTS * inputs <= WIDENED;
        long output = begin;
        for (; output + OUTPUTS <= end; output += OUTPUTS) {
            const char *weights = (const char *)AT(part->weights) + size * output * inputs;
            if (format == FLOAT32) {
                OF(four_of_floats)(t, (const float *)weights, before + output, row, stop);
            } else if (is_worth) {
                OF(widen)(weights, format, OUTPUTS * inputs, widened);
                OF(four_of_floats)(t, widened, before + output, row, stop);
            } else
                OF(four)(t, format, weights, before + output, row, stop);
        }
        for (; output < end; output++) {
            const char *weights = (const char *)AT(part->weights) + size * output * inputs;
            for (long r = row; r < stop; r++) OF(block)(t, format, weights, before + output, 1, r, 1);
        }
    }
}

#define EACH_FORMAT(format, call) /* as a constant */                                                                  \
    switch (format) {                                                                                                  \
    case BFLOAT16:                                                                                                     \
        call(BFLOAT16);                                                                                                \
        break;                                                                                                         \
    case FLOAT16:                                                                                                      \
        call(FLOAT16);                                                                                                 \
        break;                                                                                                         \
    default:                                                                                                           \
        call(FLOAT32);                                                                                                 \
    }

/* Tile `tile` of those of all parts, numbered one after the other. */
TARGET static void OF(linear)(const Product *t, long tile) {
    long begin = TILE * tile, before = 0;
    const Part *part = t->parts;
    for (long tiles; begin >= (tiles = (part->outputs + TILE - 1) / TILE * TILE); part++)
        begin -= tiles, before += part->outputs;
    const long end = begin + TILE < part->outputs ? begin + TILE : part->outputs;
#define CALL(format) OF(tile)(t, part, format, begin, end, before)
    EACH_FORMAT(part->format, CALL)
#undef CALL
}

/* ---- norms, positions and gates: of a row, or of a part of it ---- */
INLINE void OF(norm)(const Norm *t, int format, long row) {
    const size_t size = size_of(format);
    for (long head = 0; head < t->heads; head++) {
        const char *x = t->x + size * (row * t->x_stride + head * t->width);
        char *y = t->y + size * (row * t->y_stride + head * t->width);
        VECTOR squares = MM(setzero_ps)();
        for (long i = 0; i < t->width; i += LANES) {
            const VECTOR each = OF(load_part)(x, format, i, t->width);
            squares = MM(fmadd_ps)(each, each, squares);
        }
        const VECTOR scale = MM(set1_ps)(1.0f / sqrtf(OF(sum)(squares) / (float)t->width + t->eps));
        for (long i = 0; i < t->width; i += LANES) {
            const VECTOR weight = OF(load_part)(t->weight, format, i, t->width);
            const VECTOR each = MM(mul_ps)(OF(load_part)(x, format, i, t->width), scale);
            OF(store_part)(y, format, i, MM(mul_ps)(each, weight), t->width);
        }
    }
}

INLINE void OF(turn)(const Turn *t, int format, long row) {
    const size_t size = size_of(format);
    const long half = t->width / 2;
    const char *cos = t->cos + size * row * t->width, *sin = t->sin + size * row * t->width;
    for (long head = 0; head < t->heads; head++) {
        char *x = t->x + size * (row * t->stride + head * t->width), *y = x + size * half;
        for (long i = 0; i < half; i += LANES) {
            const VECTOR a = OF(load_part)(x, format, i, half), b = OF(load_part)(y, format, i, half);
            const VECTOR c = MM(mul_ps)(a, OF(load_part)(cos, format, i, half));
            const VECTOR d = MM(mul_ps)(b, OF(load_part)(cos + size * half, format, i, half));
            const VECTOR e = OF(load_part)(sin + size * half, format, i, half);
            OF(store_part)(x, format, i, MM(fmadd_ps)(b, OF(load_part)(sin, format, i, half), c), half);
            OF(store_part)(y, format, i, MM(fmadd_ps)(a, e, d), half);
        }
    }
}

INLINE void OF(gate)(const Gate *t, int format, long part) {
    const size_t size = size_of(format);
    const VECTOR one = MM(set1_ps)(1.0f), minus = MM(set1_ps)(-1.44269504f);
    const long parts = (t->width + GATES - 1) / GATES, row = part / parts, first = part % parts * GATES;
    const long stop = first + GATES < t->width ? first + GATES : t->width;
    const char *x = t->x + size * row * 2 * t->width;
    char *y = t->y + size * row * t->width;
    for (long i = first; i < stop; i += LANES) {
        const VECTOR g = OF(load_part)(x, format, i, stop);
        const VECTOR up = OF(load_part)(x + size * t->width, format, i, stop);
        const VECTOR most = MM(min_ps)(MM(mul_ps)(g, minus), MM(set1_ps)(126.0f));
        const VECTOR open = MM(div_ps)(g, MM(add_ps)(one, OF(exp2)(most)));
        OF(store_part)(y, format, i, MM(mul_ps)(open, up), stop);
    }
}

/* A row. */
INLINE void OF(place)(const Place *t, long row) {
    if (t->query.weight) {
        OF(norm)(&t->query, FLOAT32, row);
        OF(norm)(&t->key, FLOAT32, row);
    }
    OF(turn)(&t->turn, FLOAT32, row);
    const long at = t->size * t->slots[row], from = row * t->turn.stride;
    memcpy(t->keys + at, t->key_from + from, sizeof(float) * t->size);
    memcpy(t->values + at, t->value_from + from, sizeof(float) * t->size);
}

/* ---- attention: a tile's rows, once for each of the heads that share a head of K and V ---- */
typedef struct {
    float query[LINES][DIMS], mixed[LINES][DIMS]; /* padded with zeros to whole registers */
    float scores[LINES][COLUMNS];                 /* base 2; then the weights */
    float keys[COLUMNS][DIMS], values[COLUMNS][DIMS];
    const float *key_at[COLUMNS], *value_at[COLUMNS];
    float best[LINES], total[LINES];                                       /* of a chunk, as `mixed` is */
    float joined[LINES][DIMS], joined_best[LINES], joined_total[LINES]; /* of the chunks so far */
} OF(Tile);

INLINE long OF(padded)(long count) { return (count + LANES - 1) / LANES * LANES; }

/* Rows of the cache as float32: where they lie, or a copy, padded with zeros. */
INLINE void OF(rows_of)(const char *numbers, int format, long dim, float *copy, const float **at) {
    if (format == FLOAT32 && dim % LANES == 0) {
        *at = (const float *)numbers;
        return;
    }
    for (long i = 0; i < dim; i += LANES) MM(storeu_ps)(copy + i, OF(load_part)(numbers, format, i, dim));
    *at = copy;
}

/* The columns of `begin` + 0 to COLUMNS - 1 that a row sees, a bit each. */
INLINE uint32_t OF(seen)(const Attention *t, const int32_t *item, long row, long begin, long count) {
    const uint32_t stored = count < COLUMNS ? (1u << count) - 1 : ~0u;
    uint32_t bits = stored;
    const long position = (long)t->positions[item[ROW] + row];
    if (begin + count > item[FULL]) {
        if (item[WORDS] == 0) {
            const long visible = position + 1 - begin;
            bits &= visible >= COLUMNS ? ~0u : visible <= 0 ? 0 : (1u << visible) - 1;
        } else
            for (long i = 0; i < count; i++) {
                const long own = begin + i - item[OWN];
                const int32_t *words = t->pool + item[MASK] + row * item[WORDS];
                if (own >= 0 && !((uint32_t)words[own / 32] >> (own % 32) & 1)) bits &= ~(1u << i);
            }
    }
    if (t->window)
        for (long i = 0; i < count; i++) {
            const long own = begin + i - item[OWN];
            const long at = item[WORDS] && own >= 0 ? t->pool[item[POSITIONS] + own] : begin + i;
            if (position - at >= t->window) bits &= ~(1u << i);
        }
    return bits;
}

INLINE void OF(score)(OF(Tile) * tile, long dim, long column, long line, int lines) {
    VECTOR sums[OUTPUTS][ROWS], in[ROWS];
    for (int o = 0; o < OUTPUTS; o++)
        for (int r = 0; r < lines; r++) sums[o][r] = MM(setzero_ps)();
    for (long i = 0; i < dim; i += LANES) {
        for (int r = 0; r < lines; r++) in[r] = MM(loadu_ps)(tile->query[line + r] + i);
        for (int o = 0; o < OUTPUTS; o++) {
            const VECTOR k = MM(loadu_ps)(tile->key_at[column + o] + i);
            for (int r = 0; r < lines; r++) sums[o][r] = MM(fmadd_ps)(k, in[r], sums[o][r]);
        }
    }
    for (int r = 0; r < lines; r++)
        _mm_storeu_ps(tile->scores[line + r] + column, OF(sums)(sums[0][r], sums[1][r], sums[2][r], sums[3][r]));
}

ONCE void OF(scores)(OF(Tile) * tile, long dim, long count, long lines) {
    for (long column = 0; column < count; column += OUTPUTS) {
#define BLOCK(r, count) OF(score)(tile, dim, column, r, count)
        BLOCKS(0, lines, BLOCK);
#undef BLOCK
    }
}

/* Scores to weights; what a line has mixed so far decays. */
ONCE void OF(weigh)(const Attention *t, OF(Tile) * tile, long line, long dim, uint32_t seen) {
    float *scores = tile->scores[line];
    VECTOR most = MM(set1_ps)(-INFINITY);
    for (long i = 0; i < COLUMNS; i += LANES) {
        VECTOR each = MM(mul_ps)(MM(loadu_ps)(scores + i), MM(set1_ps)(t->scale));
        if (t->softcap != 0.0f) { /* tanh(x) = 1 - 2 / (exp(2 x) + 1) */
            const VECTOR one = MM(set1_ps)(1.0f);
            const VECTOR twice = MM(mul_ps)(each, MM(set1_ps)(2.88539008f / t->softcap));
            const VECTOR power = OF(exp2)(MM(min_ps)(MM(set1_ps)(126.0f), twice));
            const VECTOR share = MM(div_ps)(MM(set1_ps)(2.0f), MM(add_ps)(power, one));
            each = MM(mul_ps)(MM(sub_ps)(one, share), MM(set1_ps)(t->softcap * 1.44269504f));
        }
        MM(storeu_ps)(scores + i, each);
    }
    if (seen != ~0u)
        for (long i = 0; i < COLUMNS; i++)
            if (!(seen >> i & 1)) scores[i] = -INFINITY;
    for (long i = 0; i < COLUMNS; i += LANES) most = MM(max_ps)(MM(loadu_ps)(scores + i), most);
    float each[LANES], best = tile->best[line], total;
    MM(storeu_ps)(each, most);
    for (int i = 0; i < LANES; i++) best = each[i] > best ? each[i] : best;
    const VECTOR from = MM(set1_ps)(best == -INFINITY ? 0.0f : best); /* weights of 0, and not of what is no number */
    VECTOR sum = MM(setzero_ps)();
    for (long i = 0; i < COLUMNS; i += LANES) {
        const VECTOR weight = OF(exp2)(MM(sub_ps)(MM(loadu_ps)(scores + i), from));
        MM(storeu_ps)(scores + i, weight);
        sum = MM(add_ps)(sum, weight);
    }
    total = OF(sum)(sum);
    if (best > tile->best[line]) {
        float decay[LANES];
        MM(storeu_ps)(decay, OF(exp2)(MM(set1_ps)(tile->best[line] - best)));
        tile->total[line] *= decay[0];
        const VECTOR less = MM(set1_ps)(decay[0]);
        for (long i = 0; i < dim; i += LANES)
            MM(storeu_ps)(tile->mixed[line] + i, MM(mul_ps)(MM(loadu_ps)(tile->mixed[line] + i), less));
        tile->best[line] = best;
    }
    tile->total[line] += total;
}

INLINE void OF(mix)(OF(Tile) * tile, long count, long dim, int dims, long line, int lines) {
    VECTOR sums[ROWS][OUTPUTS], v[OUTPUTS];
    for (int r = 0; r < lines; r++)
        for (int d = 0; d < dims; d++) sums[r][d] = MM(loadu_ps)(tile->mixed[line + r] + dim + d * LANES);
    for (long column = 0; column < count; column++) {
        for (int d = 0; d < dims; d++) v[d] = MM(loadu_ps)(tile->value_at[column] + dim + d * LANES);
        for (int r = 0; r < lines; r++) {
            const VECTOR weight = MM(set1_ps)(tile->scores[line + r][column]);
            for (int d = 0; d < dims; d++) sums[r][d] = MM(fmadd_ps)(weight, v[d], sums[r][d]);
        }
    }
    for (int r = 0; r < lines; r++)
        for (int d = 0; d < dims; d++) MM(storeu_ps)(tile->mixed[line + r] + dim + d * LANES, sums[r][d]);
}

ONCE void OF(mixes)(OF(Tile) * tile, long count, long wide, long lines) {
    long d = 0;
    for (; d + OUTPUTS * LANES <= wide; d += OUTPUTS * LANES) {
#define BLOCK(r, rows) OF(mix)(tile, count, d, OUTPUTS, r, rows)
        BLOCKS(0, lines, BLOCK);
#undef BLOCK
    }
    for (; d < wide; d += LANES)
        for (long r = 0; r < lines; r++) OF(mix)(tile, count, d, 1, r, 1);
}

/* What lines see of the columns from `begin` to `end`. */
INLINE void OF(attend_chunk)(const Attention *t, int format, OF(Tile) * tile, const int32_t *item, long kv_head,
                             long line, long lines, long begin, long end) {
    const size_t size = size_of(format);
    const long group = t->heads / t->kv_heads, dim = OF(padded)(t->key_dim), wide = OF(padded)(t->value_dim);
    const long first = line / group, last = (line + lines - 1) / group;
    for (long i = 0; i < lines; i++) {
        memset(tile->mixed[i], 0, sizeof(float) * wide);
        tile->best[i] = -INFINITY, tile->total[i] = 0.0f;
    }
    for (; begin < end; begin += COLUMNS) {
        const long count = end - begin < COLUMNS ? end - begin : COLUMNS;
        uint32_t seen[LINES], any = 0;
        for (long row = first; row <= last; row++) any |= seen[row - first] = OF(seen)(t, item, row, begin, count);
        if (!any) continue;
        for (long i = 0; i < count; i++) {
            const long column = begin + i;
            const long slot = t->pool[item[TABLE] + column / t->block] * t->block + column % t->block;
            OF(rows_of)(t->keys + size * (slot * t->key_slot + kv_head * t->key_dim), format, t->key_dim, tile->keys[i],
                        &tile->key_at[i]);
            OF(rows_of)(t->values + size * (slot * t->value_slot + kv_head * t->value_dim), format, t->value_dim,
                        tile->values[i], &tile->value_at[i]);
        }
        for (long i = count; i % OUTPUTS; i++) tile->key_at[i] = tile->key_at[0]; /* not seen */
        OF(scores)(tile, dim, count, lines);
        for (long i = 0; i < lines; i++) {
            const uint32_t visible = seen[(line + i) / group - first];
            if (visible)
                OF(weigh)(t, tile, i, wide, visible);
            else
                memset(tile->scores[i], 0, sizeof tile->scores[i]);
        }
        OF(mixes)(tile, count, wide, lines);
    }
}

ONCE void OF(begin_lines)(const Attention *t, OF(Tile) * tile, long lines) {
    for (long i = 0; i < lines; i++) {
        memset(tile->joined[i], 0, sizeof(float) * OF(padded)(t->value_dim));
        tile->joined_best[i] = -INFINITY, tile->joined_total[i] = 0.0f;
    }
}

/* Have what a line sees of the next chunk join what it saw before. */
ONCE void OF(join)(const Attention *t, OF(Tile) * tile, long line, const float *mixed, float best, float total) {
    if (total == 0.0f) return; /* it sees none of it */
    const float before = tile->joined_best[line], after = best > before ? best : before;
    const VECTOR less = OF(exp2)(MM(set1_ps)(before - after)), share = OF(exp2)(MM(set1_ps)(best - after));
    float *joined = tile->joined[line];
    for (long d = 0; d < t->value_dim; d += LANES) {
        const VECTOR kept = MM(mul_ps)(MM(loadu_ps)(joined + d), less);
        MM(storeu_ps)(joined + d, MM(fmadd_ps)(MM(loadu_ps)(mixed + d), share, kept));
    }
    tile->joined_total[line] = fmaf(total, MM(cvtss_f32)(share), tile->joined_total[line] * MM(cvtss_f32)(less));
    tile->joined_best[line] = after;
}

INLINE void OF(load_lines)(const Attention *t, int format, OF(Tile) * tile, const int32_t *item, long kv_head,
                           long line, long lines) {
    const long group = t->heads / t->kv_heads, dim = OF(padded)(t->key_dim);
    for (long i = 0; i < lines; i++) {
        const long row = item[ROW] + (line + i) / group, head = kv_head * group + (line + i) % group;
        const char *query = t->query + size_of(format) * (row * t->query_row + head * t->key_dim);
        for (long d = 0; d < dim; d += LANES)
            MM(storeu_ps)(tile->query[i] + d, OF(load_part)(query, format, d, t->key_dim));
    }
}

INLINE void OF(store_lines)(const Attention *t, int format, const OF(Tile) * tile, const int32_t *item, long kv_head,
                            long line, long lines) {
    const long group = t->heads / t->kv_heads;
    for (long i = 0; i < lines; i++) {
        const long row = item[ROW] + (line + i) / group, head = kv_head * group + (line + i) % group;
        char *output = t->output + size_of(format) * (row * t->output_row + head * t->value_dim);
        const float total = tile->joined_total[i];
        const VECTOR share = MM(set1_ps)(total == 0.0f ? 0.0f : 1.0f / total);
        for (long d = 0; d < t->value_dim; d += LANES)
            OF(store_part)(output, format, d, MM(mul_ps)(MM(loadu_ps)(tile->joined[i] + d), share), t->value_dim);
    }
}

/* A head of K and V of an item, or one chunk of it. */
INLINE void OF(attend_head)(const Attention *t, int format, OF(Tile) * tile, long head, long chunk) {
    const int32_t *item = t->items + head / t->kv_heads * FIELDS;
    const long kv_head = head % t->kv_heads, all = lines_of(t, item);
    const int is_divided = t->chunks > 1;
    long first = first_column(t, item), end = item[END];
    if (is_divided) {
        first = first > chunk * CHUNK ? first : chunk * CHUNK;
        end = end < (chunk + 1) * CHUNK ? end : (chunk + 1) * CHUNK;
        if (first >= end) return; /* nor does `join_chunks` look there */
    }
    memset(&tile->scores, 0, sizeof tile->scores);
    for (long line = 0; line < all; line += LINES) {
        const long lines = all - line < LINES ? all - line : LINES;
        OF(load_lines)(t, format, tile, item, kv_head, line, lines);
        if (!is_divided) OF(begin_lines)(t, tile, lines);
        for (long begin = first, next; begin < end; begin = next) {
            next = (begin / CHUNK + 1) * CHUNK;
            OF(attend_chunk)(t, format, tile, item, kv_head, line, lines, begin, next < end ? next : end);
            for (long i = 0; i < lines; i++)
                if (is_divided) {
                    float *room = room_of(t, head, chunk, line + i);
                    memcpy(room, tile->mixed[i], sizeof(float) * OF(padded)(t->value_dim));
                    room[t->wide] = tile->best[i], room[t->wide + 1] = tile->total[i];
                } else
                    OF(join)(t, tile, i, tile->mixed[i], tile->best[i], tile->total[i]);
        }
        if (!is_divided) OF(store_lines)(t, format, tile, item, kv_head, line, lines);
    }
}

TARGET static void OF(attend)(const Attention *t, long part) {
    OF(Tile) tile;
#define CALL(format) OF(attend_head)(t, format, &tile, part / t->chunks, part % t->chunks)
    EACH_FORMAT(t->format, CALL)
#undef CALL
}

TARGET static void OF(join_chunks)(const Attention *t, long head) {
    OF(Tile) tile;
    const int32_t *item = t->items + head / t->kv_heads * FIELDS;
    const long all = lines_of(t, item);
    for (long line = 0; line < all; line += LINES) {
        const long lines = all - line < LINES ? all - line : LINES;
        OF(begin_lines)(t, &tile, lines);
        for (long chunk = first_column(t, item) / CHUNK; chunk * CHUNK < item[END]; chunk++)
            for (long i = 0; i < lines; i++) {
                const float *room = room_of(t, head, chunk, line + i);
                OF(join)(t, &tile, i, room, room[t->wide], room[t->wide + 1]);
            }
#define CALL(format) OF(store_lines)(t, format, &tile, item, head % t->kv_heads, line, lines)
        EACH_FORMAT(t->format, CALL)
#undef CALL
    }
}

/* ---- tasks ---- */
TARGET static void OF(compute)(const Task *t, long part) {
    switch (t->kind) {
    case LINEAR:
        OF(linear)(&t->linear, part);
        break;
    case NORM:
#define CALL(format) OF(norm)(&t->norm, format, part)
        EACH_FORMAT(t->norm.format, CALL)
#undef CALL
        break;
    case TURN:
#define CALL(format) OF(turn)(&t->turn, format, part)
        EACH_FORMAT(t->turn.format, CALL)
#undef CALL
        break;
    case GATE:
#define CALL(format) OF(gate)(&t->gate, format, part)
        EACH_FORMAT(t->gate.format, CALL)
#undef CALL
        break;
    case PLACE:
        OF(place)(&t->place, part);
        break;
    case ATTEND:
        OF(attend)(&t->attention, part);
        break;
    case JOIN_CHUNKS:
        OF(join_chunks)(&t->attention, part);
        break;
    }
}

/* What each thread does. */
static void OF(work)(void *argument) {
    const Program *program = argument;
    for (Task *t = program->tasks; t < program->tasks + program->count; t++) {
        long computed = 0;
        for (long part; (part = __atomic_fetch_add(&t->next, 1, __ATOMIC_RELAXED)) < t->parts; computed++)
            OF(compute)(t, part);
        __atomic_fetch_add(&t->done, computed, __ATOMIC_RELEASE);
        for (long looks = 0; __atomic_load_n(&t->done, __ATOMIC_ACQUIRE) < t->parts; looks++)
            if (looks < PATIENCE)
                _mm_pause();
            else
                sched_yield();
    }
}
#endif
