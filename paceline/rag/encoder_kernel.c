/* A layer of the BERT encoder on a CPU with weights and inputs of 8 bits: the twin of a layer in `paceline/encoder.py`.
 *
 * Weights are rounded once, a scale an output (`quantised.py`); the inputs of each matrix in each row, a scale a row.
 * Products and sums of these are exact, so that a row does not depend on the rows beside it. Attention, norms and the
 * wide layer's function are float32. Needs a processor that multiplies four bytes at a time (VNNI, with AVX2 or
 * AVX-512): `is_supported` tells. The only caller, which owns all memory: `quantised.py`. Nothing is kept between calls.
 */
#if !defined(SUFFIX)

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 384, WIDE = 1536, HEADS = 12, HEAD = WIDTH / HEADS, BLOCK = 16, TILE = 6, MATRICES = 4, PARTS = 5 };
enum { BUFFERS = MATRICES * PARTS + 4 };

typedef struct {
    const int8_t *weights;     /* (outputs / BLOCK, inputs / 4, BLOCK, 4) */
    const float *scales;       /* (outputs,) of the weights */
    const int32_t *totals;     /* (outputs,) sums of an output's weights */
    const float *bias;         /* (outputs,) */
    const float *smooth;       /* (inputs,) by which inputs are multiplied first; their weights are divided by it */
    long inputs, outputs;
} Matrix;

typedef struct {
    Matrix attention, mixed, wide, narrow; /* the first: queries, keys and values beside each other */
    const float *norms[4];                 /* weight and bias after attention, and at the end */
} Layer;

typedef struct {
    float scale;
    int32_t zero; /* the byte of 0 */
} Row;

typedef struct {
    float *attention, *mixed, *wide, *scores, *keys, *values; /* the last two: of one head, the first turned */
    uint8_t *bytes;
    Row *rows; /* what their bytes are */
} Scratch;

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define HAS_KERNEL 1
#include <immintrin.h>
#define INLINE static inline __attribute__((always_inline))
#define JOIN_(name, suffix) name##suffix
#define JOIN(name, suffix) JOIN_(name, suffix)
#define OF(name) JOIN(name, SUFFIX)

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#define SUFFIX _avx512
#define PRODUCTS "vpdpbusd"
#include "encoder_kernel.c"
#undef SUFFIX
#undef PRODUCTS
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,avxvnni")
#define SUFFIX _avx2
#define PRODUCTS "%{vex%} vpdpbusd"
#include "encoder_kernel.c"
#undef SUFFIX
#undef PRODUCTS
#pragma GCC pop_options
#endif

/* ---- for Python -------------------------------------------------------------------------------------------------- */

enum { NONE, AVX2, AVX512 };

static int supported(void) {
#ifdef HAS_KERNEL
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw"))
        return AVX512;
    if (__builtin_cpu_supports("avxvnni") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return AVX2;
#endif
    return NONE;
}

static PyObject *is_supported(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    return PyBool_FromLong(supported() != NONE);
}

static void run(const Layer *layer, float *hidden, const int32_t *lengths, long texts, const Scratch *scratch) {
#ifdef HAS_KERNEL
    if (supported() == AVX512)
        run_layer_avx512(layer, hidden, lengths, texts, scratch);
    else
        run_layer_avx2(layer, hidden, lengths, texts, scratch);
#else
    (void)layer, (void)hidden, (void)lengths, (void)texts, (void)scratch;
#endif
}

static long padded(long count, long to) { return (count + to - 1) / to * to; }

/* run_layer(hidden, lengths, weights): hidden (rows, WIDTH) float32 is replaced by the layer's outputs; lengths int32, of
 * the texts, whose rows follow each other; weights: buffers of four matrices, five each, and of two norms. */
static PyObject *run_layer(PyObject *self, PyObject *arguments) {
    (void)self;
    Py_buffer hidden, lengths, held[BUFFERS];
    PyObject *weights;
    if (!PyArg_ParseTuple(arguments, "w*y*O", &hidden, &lengths, &weights)) return NULL;
    int count = 0;
    void *memory = NULL;
    for (; count < BUFFERS; count++) {
        PyObject *each = PySequence_GetItem(weights, count);
        const int failed = each == NULL || PyObject_GetBuffer(each, &held[count], PyBUF_C_CONTIGUOUS) != 0;
        Py_XDECREF(each);
        if (failed) goto end;
    }
    static const long sizes[MATRICES][2] = {{WIDTH, 3 * WIDTH}, {WIDTH, WIDTH}, {WIDTH, WIDE}, {WIDE, WIDTH}};
    Layer layer;
    Matrix *matrices[MATRICES] = {&layer.attention, &layer.mixed, &layer.wide, &layer.narrow};
    int fits = supported() != NONE;
    for (int i = 0; i < MATRICES; i++) {
        const Py_buffer *of = held + i * PARTS;
        const long inputs = sizes[i][0], outputs = sizes[i][1];
        *matrices[i] = (Matrix){of[0].buf, of[1].buf, of[2].buf, of[3].buf, of[4].buf, inputs, outputs};
        fits &= of[0].len == inputs * outputs && of[1].len == 4 * outputs && of[2].len == 4 * outputs &&
                of[3].len == 4 * outputs && of[4].len == 4 * inputs;
    }
    for (int i = 0; i < 4; i++) {
        layer.norms[i] = held[MATRICES * PARTS + i].buf;
        fits &= held[MATRICES * PARTS + i].len == 4 * WIDTH;
    }
    const long texts = lengths.len / 4, rows = hidden.len / (4 * WIDTH);
    long total = 0, longest = 0;
    for (long i = 0; i < texts; i++) {
        const long length = ((const int32_t *)lengths.buf)[i];
        fits &= length > 0;
        total += length;
        longest = length > longest ? length : longest;
    }
    if (!fits || total != rows) {
        PyErr_SetString(PyExc_ValueError, "buffers of other sizes, or a processor without VNNI");
        goto end;
    }
    const long most = padded(longest, BLOCK), all = padded(rows, TILE);
    const long floats = rows * (4 * WIDTH + WIDE) + (TILE + 2 * HEAD) * most + 2 * all;
    memory = malloc((size_t)(4 * floats + all * WIDE));
    if (memory == NULL) {
        PyErr_NoMemory();
        goto end;
    }
    Scratch scratch;
    scratch.attention = memory;
    scratch.mixed = scratch.attention + rows * 3 * WIDTH;
    scratch.wide = scratch.mixed + rows * WIDTH;
    scratch.scores = scratch.wide + rows * WIDE;
    scratch.keys = scratch.scores + TILE * most;
    scratch.values = scratch.keys + HEAD * most;
    scratch.rows = (Row *)(scratch.values + HEAD * most);
    scratch.bytes = (uint8_t *)(scratch.rows + all);
    Py_BEGIN_ALLOW_THREADS;
    run(&layer, hidden.buf, lengths.buf, texts, &scratch);
    Py_END_ALLOW_THREADS;
end:
    free(memory);
    while (count > 0) PyBuffer_Release(&held[--count]);
    PyBuffer_Release(&hidden);
    PyBuffer_Release(&lengths);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"is_supported", is_supported, METH_NOARGS, "True on a processor on which `run_layer` runs."},
    {"run_layer", run_layer, METH_VARARGS, "Replace rows by a layer's outputs."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_encoder_kernel", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__encoder_kernel(void) { return PyModule_Create(&module); }

#else /* the computation, once for each kind of processor ------------------------------------------------------------ */

INLINE float OF(sum_of)(__m256 x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

INLINE float OF(most_of)(__m256 x) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

INLINE __m256 OF(all)(float x) { return _mm256_set1_ps(x); }

/* e to the power of numbers that are at most 0, within 3e-7 of itself; below -83 next to nothing. */
INLINE __m256 OF(exp_below)(__m256 x) {
    const __m256 y = _mm256_max_ps(_mm256_mul_ps(x, OF(all)(1.44269504f)), OF(all)(-120.0f));
    const __m256 whole = _mm256_round_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 f = _mm256_sub_ps(y, whole);
    __m256 p = OF(all)(1.3276473e-3f); /* |f| <= 0.5: least relative error of six terms */
    p = _mm256_fmadd_ps(p, f, OF(all)(9.6755419e-3f));
    p = _mm256_fmadd_ps(p, f, OF(all)(5.5507131e-2f));
    p = _mm256_fmadd_ps(p, f, OF(all)(2.4022120e-1f));
    p = _mm256_fmadd_ps(p, f, OF(all)(6.9314694e-1f));
    p = _mm256_fmadd_ps(p, f, OF(all)(1.0000001f));
    const __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), power));
}

/* x * (1 + erf(x / sqrt(2))) / 2, as in `encoder.py`: max(x, 0) - |x| * erfc(|x| / sqrt(2)) / 2. */
INLINE __m256 OF(gelu)(__m256 x) {
    const __m256 size = _mm256_andnot_ps(OF(all)(-0.0f), x), one = OF(all)(1.0f);
    const __m256 t = _mm256_div_ps(one, _mm256_fmadd_ps(size, OF(all)(0.3275911f / 1.41421356f), one));
    __m256 lost = OF(all)(1.061405429f);
    lost = _mm256_fmadd_ps(lost, t, OF(all)(-1.453152027f));
    lost = _mm256_fmadd_ps(lost, t, OF(all)(1.421413741f));
    lost = _mm256_fmadd_ps(lost, t, OF(all)(-0.284496736f));
    lost = _mm256_fmadd_ps(lost, t, OF(all)(0.254829592f));
    lost = _mm256_mul_ps(lost, t);
    const __m256 tail = OF(exp_below)(_mm256_mul_ps(_mm256_mul_ps(size, size), OF(all)(-0.5f)));
    lost = _mm256_mul_ps(_mm256_mul_ps(lost, tail), _mm256_mul_ps(size, OF(all)(0.5f)));
    return _mm256_sub_ps(_mm256_max_ps(x, _mm256_setzero_ps()), lost);
}

/* A row in bytes: the least number is 0, the greatest 255. Their scale, and the byte of 0. */
INLINE float OF(to_bytes)(const float *row, const float *smooth, uint8_t *bytes, int32_t *zero, long count) {
    __m256 most = _mm256_setzero_ps(), least = _mm256_setzero_ps();
    for (long i = 0; i < count; i += 8) {
        const __m256 x = _mm256_mul_ps(_mm256_loadu_ps(row + i), _mm256_loadu_ps(smooth + i));
        most = _mm256_max_ps(most, x);
        least = _mm256_min_ps(least, x);
    }
    const float lowest = -OF(most_of)(_mm256_sub_ps(_mm256_setzero_ps(), least));
    const float scale = (OF(most_of)(most) - lowest) / 255.0f + 1e-30f;
    *zero = (int32_t)(0.5f - lowest / scale);
    const __m256 factor = OF(all)(1.0f / scale);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7), from = _mm256_set1_epi32(*zero);
    for (long i = 0; i < count; i += 32) {
        __m256i four[4];
        for (int j = 0; j < 4; j++) {
            const __m256 x = _mm256_mul_ps(_mm256_loadu_ps(row + i + 8 * j), _mm256_loadu_ps(smooth + i + 8 * j));
            four[j] = _mm256_add_epi32(_mm256_cvtps_epi32(_mm256_mul_ps(x, factor)), from);
        }
        const __m256i two = _mm256_packs_epi32(four[0], four[1]), rest = _mm256_packs_epi32(four[2], four[3]);
        const __m256i packed = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(two, rest), order);
        _mm256_storeu_si256((__m256i *)(bytes + i), packed);
    }
    return scale;
}

/* `rows` rows (a constant) and a block of outputs. */
INLINE void OF(tile)(
    const Matrix *matrix, long block, const uint8_t *bytes, const Row *of_rows, float *out, long inputs, int rows
) {
    __m256i sums[TILE][2];
    for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
    const int8_t *weights = matrix->weights + block * BLOCK * inputs;
    for (long k = 0; k < inputs; k += 4) {
        const __m256i first = _mm256_loadu_si256((const __m256i *)(weights + k * BLOCK));
        const __m256i second = _mm256_loadu_si256((const __m256i *)(weights + k * BLOCK + 32));
        for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, bytes + r * inputs + k, 4);
            const __m256i x = _mm256_set1_epi32(four);
            /* not the intrinsics: around these the compiler copies the sums */
            __asm__(PRODUCTS " %2, %1, %0" : "+v"(sums[r][0]) : "v"(x), "v"(first));
            __asm__(PRODUCTS " %2, %1, %0" : "+v"(sums[r][1]) : "v"(x), "v"(second));
        }
    }
    for (int half = 0; half < 2; half++) {
        const long at = block * BLOCK + 8 * half;
        const __m256i totals = _mm256_loadu_si256((const __m256i *)(matrix->totals + at));
        const __m256 scales = _mm256_loadu_ps(matrix->scales + at), bias = _mm256_loadu_ps(matrix->bias + at);
        for (int r = 0; r < rows; r++) {
            const __m256i too_much = _mm256_mullo_epi32(totals, _mm256_set1_epi32(of_rows[r].zero));
            const __m256 sum = _mm256_cvtepi32_ps(_mm256_sub_epi32(sums[r][half], too_much));
            const __m256 made = _mm256_fmadd_ps(sum, _mm256_mul_ps(scales, OF(all)(of_rows[r].scale)), bias);
            _mm256_storeu_ps(out + r * matrix->outputs + at, made);
        }
    }
}

/* out (rows, outputs) of x (rows, inputs, a constant), through the wide layer's function if it is that. */
INLINE void OF(linear)(
    const Matrix *matrix, const float *x, long rows, float *out, const Scratch *scratch, long inputs, int is_wide
) {
    const long outputs = matrix->outputs;
    uint8_t *bytes = scratch->bytes;
    Row *of_rows = scratch->rows;
    for (long r = 0; r < rows; r++)
        of_rows[r].scale =
            OF(to_bytes)(x + r * inputs, matrix->smooth, bytes + r * inputs, &of_rows[r].zero, inputs);
    for (long block = 0; block < outputs / BLOCK; block++) {
        long r = 0;
        for (; r + TILE <= rows; r += TILE)
            OF(tile)(matrix, block, bytes + r * inputs, of_rows + r, out + r * outputs, inputs, TILE);
        for (; r < rows; r++) OF(tile)(matrix, block, bytes + r * inputs, of_rows + r, out + r * outputs, inputs, 1);
    }
    for (long i = 0; is_wide && i < rows * outputs; i += 8)
        _mm256_storeu_ps(out + i, OF(gelu)(_mm256_loadu_ps(out + i)));
}

/* hidden = norm(hidden + x) */
INLINE void OF(add_and_norm)(float *hidden, const float *x, long rows, const float *weight, const float *bias) {
    for (long r = 0; r < rows; r++, hidden += WIDTH, x += WIDTH) {
        __m256 sum = _mm256_setzero_ps(), square = _mm256_setzero_ps();
        for (int i = 0; i < WIDTH; i += 8) {
            const __m256 both = _mm256_add_ps(_mm256_loadu_ps(hidden + i), _mm256_loadu_ps(x + i));
            _mm256_storeu_ps(hidden + i, both);
            sum = _mm256_add_ps(sum, both);
        }
        const __m256 mean = OF(all)(OF(sum_of)(sum) / WIDTH);
        for (int i = 0; i < WIDTH; i += 8) {
            const __m256 apart = _mm256_sub_ps(_mm256_loadu_ps(hidden + i), mean);
            square = _mm256_fmadd_ps(apart, apart, square);
        }
        const __m256 factor = OF(all)(1.0f / sqrtf(OF(sum_of)(square) / WIDTH + 1e-12f));
        for (int i = 0; i < WIDTH; i += 8) {
            const __m256 apart = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(hidden + i), mean), factor);
            _mm256_storeu_ps(hidden + i, _mm256_fmadd_ps(apart, _mm256_loadu_ps(weight + i), _mm256_loadu_ps(bias + i)));
        }
    }
}

/* `count` queries (a constant) of a head against all keys of their text. */
INLINE void OF(attend)(
    const float *queries, const float *keys, const float *values, float *scores, float *mixed, long length, int count
) {
    const long padded_length = (length + BLOCK - 1) / BLOCK * BLOCK;
    for (long j = 0; j < padded_length; j += BLOCK) {
        __m256 sums[TILE][2];
        for (int q = 0; q < count; q++) sums[q][0] = sums[q][1] = _mm256_setzero_ps();
        for (int d = 0; d < HEAD; d++) {
            const __m256 first = _mm256_loadu_ps(keys + d * padded_length + j);
            const __m256 second = _mm256_loadu_ps(keys + d * padded_length + j + 8);
            for (int q = 0; q < count; q++) {
                const __m256 x = OF(all)(queries[q * 3 * WIDTH + d]);
                sums[q][0] = _mm256_fmadd_ps(x, first, sums[q][0]);
                sums[q][1] = _mm256_fmadd_ps(x, second, sums[q][1]);
            }
        }
        for (int q = 0; q < count; q++) {
            _mm256_storeu_ps(scores + q * padded_length + j, sums[q][0]);
            _mm256_storeu_ps(scores + q * padded_length + j + 8, sums[q][1]);
        }
    }
    __m256 shares[TILE];
    for (int q = 0; q < count; q++) {
        float *row = scores + q * padded_length;
        for (long j = length; j < padded_length; j++) row[j] = -INFINITY;
        __m256 most = OF(all)(-INFINITY), sum = _mm256_setzero_ps();
        for (long j = 0; j < padded_length; j += 8) most = _mm256_max_ps(most, _mm256_loadu_ps(row + j));
        most = OF(all)(OF(most_of)(most));
        const __m256 scale = OF(all)(0.176776695f); /* 1 / sqrt(HEAD) */
        for (long j = 0; j < padded_length; j += 8) {
            const __m256 apart = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(row + j), most), scale);
            const __m256 share = OF(exp_below)(apart);
            _mm256_storeu_ps(row + j, share);
            sum = _mm256_add_ps(sum, share);
        }
        shares[q] = OF(all)(1.0f / OF(sum_of)(sum));
    }
    for (int d = 0; d < HEAD; d += BLOCK) {
        __m256 sums[TILE][2];
        for (int q = 0; q < count; q++) sums[q][0] = sums[q][1] = _mm256_setzero_ps();
        for (long j = 0; j < length; j++) {
            const __m256 first = _mm256_loadu_ps(values + j * HEAD + d);
            const __m256 second = _mm256_loadu_ps(values + j * HEAD + d + 8);
            for (int q = 0; q < count; q++) {
                const __m256 x = OF(all)(scores[q * padded_length + j]);
                sums[q][0] = _mm256_fmadd_ps(x, first, sums[q][0]);
                sums[q][1] = _mm256_fmadd_ps(x, second, sums[q][1]);
            }
        }
        for (int q = 0; q < count; q++) {
            _mm256_storeu_ps(mixed + q * WIDTH + d, _mm256_mul_ps(sums[q][0], shares[q]));
            _mm256_storeu_ps(mixed + q * WIDTH + d + 8, _mm256_mul_ps(sums[q][1], shares[q]));
        }
    }
}

static void OF(attend_text)(const float *rows, float *mixed, long length, const Scratch *scratch) {
    const long padded_length = (length + BLOCK - 1) / BLOCK * BLOCK;
    for (int head = 0; head < HEADS; head++) {
        const float *queries = rows + head * HEAD, *keys = queries + WIDTH, *values = keys + WIDTH;
        float *out = mixed + head * HEAD;
        for (int d = 0; d < HEAD; d++) {
            float *turned = scratch->keys + d * padded_length;
            for (long j = 0; j < length; j++) turned[j] = keys[j * 3 * WIDTH + d];
            for (long j = length; j < padded_length; j++) turned[j] = 0.0f;
        }
        for (long j = 0; j < length; j++)
            memcpy(scratch->values + j * HEAD, values + j * 3 * WIDTH, HEAD * sizeof(float));
        long q = 0;
        for (; q + TILE <= length; q += TILE)
            OF(attend)(
                queries + q * 3 * WIDTH, scratch->keys, scratch->values, scratch->scores, out + q * WIDTH, length, TILE
            );
        for (; q < length; q++)
            OF(attend)(
                queries + q * 3 * WIDTH, scratch->keys, scratch->values, scratch->scores, out + q * WIDTH, length, 1
            );
    }
}

static void OF(run_layer)(
    const Layer *layer, float *hidden, const int32_t *lengths, long texts, const Scratch *scratch
) {
    long rows = 0;
    for (long i = 0; i < texts; i++) rows += lengths[i];
    OF(linear)(&layer->attention, hidden, rows, scratch->attention, scratch, WIDTH, 0);
    for (long i = 0, row = 0; i < texts; row += lengths[i++])
        OF(attend_text)(scratch->attention + row * 3 * WIDTH, scratch->wide + row * WIDTH, lengths[i], scratch);
    OF(linear)(&layer->mixed, scratch->wide, rows, scratch->mixed, scratch, WIDTH, 0);
    OF(add_and_norm)(hidden, scratch->mixed, rows, layer->norms[0], layer->norms[1]);
    OF(linear)(&layer->wide, hidden, rows, scratch->wide, scratch, WIDTH, 1);
    OF(linear)(&layer->narrow, scratch->wide, rows, scratch->mixed, scratch, WIDE, 0);
    OF(add_and_norm)(hidden, scratch->mixed, rows, layer->norms[2], layer->norms[3]);
}

#endif
