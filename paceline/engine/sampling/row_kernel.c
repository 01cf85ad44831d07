/* Tokens and heads of rows of logits on a CPU: the C twin of `open_sampler`, of the greedy choice and of the heads in
 * `batch_sampler`. A row is read once for its groups' maxima and its mass at temperature 1, and once more where top-p
 * needs the mass at another and few groups do not settle it.
 *
 * Each group of ids is bounded by its largest logit and its least noise, and only groups and ids that can still win are
 * read. Top-p needs the mass before the candidate: the groups that reach its logit are read, all others are bounded by
 * their maxima, and the whole row is summed only where these bounds do not decide. Logits and scores are relative to the
 * row's largest logit: what competes is near it, so float32 suffices to discard. The noise: `core/sampling/noise.py`.
 * What is left to the reference: `noise.margins`. The only caller, which owns all memory: `row_kernel.py`. Built where
 * the installation finds a compiler; elsewhere this module is absent, and torch's samplers do its work.
 *
 * Several threads may work on one call's rows: each takes the next row until none is left. Nothing is kept between
 * calls. Top-k is not handled here.
 */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif
#define INLINE static inline __attribute__((always_inline))

enum { GROUP = 64, LANES = 16, CANDIDATES = 6, NOT_CERTAIN = -1 };
enum { ADDED = 16 }; /* groups that are added in float32, before their sums are in float64 */
enum { AHEAD = 4096 }; /* bytes: how far before its use a row is fetched; the processor itself stops at each page */

static const uint64_t GAMMA = 0x9E3779B97F4A7C15u, FIRST_GROUP = (uint64_t)1 << 32;
static const float MARGIN = 1e-4f, DISTINCT = 1e-5f; /* nats, as in `noise.py` */
static const double SLACK = 1e-3;                    /* nats: more than the rounding of a bound in float32 */

typedef struct {
    double inverse, top_p, min_p, margin; /* inverse: 1 / temperature */
} Options;

typedef struct {
    const void *values;
    int is_half; /* bfloat16, else float32 */
    long vocab, groups;
    float *maxima; /* (groups,) */
    float best;
    int wants_mass;
    double mass; /* sum of exp(logit - best), if it is wanted */
} Row;

/* ---- numbers ---------------------------------------------------------------------------------------------------- */

INLINE uint64_t mixed(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

INLINE double exponential(uint64_t hash) { return -log(((double)(hash >> 12) + 0.5) * 0x1p-52); }

INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static const float LOG2_E = 1.44269504f;

/* 2 to the power of a number that is at most 0, within 3e-7 of itself; below -120 next to nothing. */
INLINE float exp2_below(float x) {
    const float clamped = x > -120.0f ? x : -120.0f;
    const float shifted = clamped + 12582912.0f; /* the nearest integer is in the lowest bits */
    const float f = clamped - (shifted - 12582912.0f);
    float p = 1.3276473e-3f; /* |f| <= 0.5: least relative error of six terms */
    p = p * f + 9.6755419e-3f;
    p = p * f + 5.5507131e-2f;
    p = p * f + 2.4022120e-1f;
    p = p * f + 6.9314694e-1f;
    p = p * f + 1.0000001f;
    return float_of(bits_of(p) + (bits_of(shifted) << 23));
}

/* ---- sweeps ----------------------------------------------------------------------------------------------------- */

/* The logits of a group, minus infinity beyond the vocabulary. */
INLINE void read_group(const Row *row, long group, float values[GROUP]) {
    const long rest = row->vocab - group * GROUP;
    const uint16_t *half = (const uint16_t *)row->values + group * GROUP;
    if (rest >= GROUP) {
        if (row->is_half)
            for (int i = 0; i < GROUP; i++) values[i] = float_of((uint32_t)half[i] << 16);
        else
            memcpy(values, (const float *)row->values + group * GROUP, GROUP * sizeof(float));
        return;
    }
    for (int i = 0; i < GROUP; i++) values[i] = -INFINITY;
    for (int i = 0; i < rest; i++)
        values[i] = row->is_half ? float_of((uint32_t)half[i] << 16) : ((const float *)row->values)[group * GROUP + i];
}

/* Bits of a float as an integer in the order of the floats, and back: compilers make fast maxima of integers only. */
INLINE int32_t ordered(uint32_t bits) { return (int32_t)(bits ^ ((uint32_t)((int32_t)bits >> 31) & 0x7FFFFFFFu)); }

/* The same of bfloat16: twice as many at a time. */
INLINE int16_t ordered_half(uint16_t bits) { return (int16_t)(bits ^ ((uint16_t)((int16_t)bits >> 15) & 0x7FFFu)); }

/* The largest logit of a group, as such an integer. */
INLINE int32_t largest_of(const Row *row, long group) {
    if (row->is_half && (group + 1) * GROUP <= row->vocab) {
        const uint16_t *half = (const uint16_t *)row->values + group * GROUP;
        int16_t most = INT16_MIN;
        for (int i = 0; i < GROUP; i++) {
            const int16_t value = ordered_half(half[i]);
            most = value > most ? value : most;
        }
        return ordered((uint32_t)(uint16_t)ordered_half((uint16_t)most) << 16);
    }
    float values[GROUP];
    read_group(row, group, values);
    int32_t most = INT32_MIN;
    for (int i = 0; i < GROUP; i++) {
        const int32_t value = ordered(bits_of(values[i]));
        most = value > most ? value : most;
    }
    return most;
}

/* True if every logit of these groups is a number or an infinity. */
INLINE int are_numbers(const Row *row, long first, long end) {
    const long begin = first * GROUP, count = (end * GROUP < row->vocab ? end * GROUP : row->vocab) - begin;
    if (row->is_half) {
        const uint16_t *half = (const uint16_t *)row->values + begin;
        uint16_t most = 0;
        for (long i = 0; i < count; i++) {
            const uint16_t size = half[i] & 0x7FFFu;
            most = size > most ? size : most;
        }
        return most <= 0x7F80u;
    }
    const uint32_t *bits = (const uint32_t *)row->values + begin;
    uint32_t most = 0;
    for (long i = 0; i < count; i++) {
        const uint32_t size = bits[i] & 0x7FFFFFFFu;
        most = size > most ? size : most;
    }
    return most <= 0x7F800000u;
}

INLINE void take(double *total, float lanes[LANES]) {
    for (int lane = 0; lane < LANES; lane++) *total += lanes[lane], lanes[lane] = 0.0f;
}

/* Finds the largest logit of each group and of the row, and the mass of all logits if it is wanted, which costs little
 * while they come from memory. False for a row in which a number is not one. */
FOR_EACH_CPU static int sweep(Row *row) {
    float values[GROUP], lanes[LANES] = {0};
    int32_t most = INT32_MIN;
    const long size = ADDED * GROUP * (row->is_half ? 2 : 4); /* bytes */
    row->best = -INFINITY;
    for (long first = 0, end; first < row->groups; first = end) {
        end = first + ADDED < row->groups ? first + ADDED : row->groups;
        const char *ahead = (const char *)row->values + first / ADDED * size + AHEAD;
        for (long line = 0; line < size; line += 64) __builtin_prefetch(ahead + line);
        if (!are_numbers(row, first, end)) return 0;
        for (long group = first; group < end; group++) {
            const int32_t largest = largest_of(row, group);
            row->maxima[group] = float_of((uint32_t)ordered((uint32_t)largest));
            most = largest > most ? largest : most;
        }
        const float best = float_of((uint32_t)ordered((uint32_t)most));
        if (row->wants_mass && best > -INFINITY) {
            row->mass *= exp((double)row->best - (double)best);
            for (long group = first; group < end; group++) {
                read_group(row, group, values);
                for (int i = 0; i < GROUP; i += LANES)
                    for (int lane = 0; lane < LANES; lane++)
                        lanes[lane] += exp2_below((values[i + lane] - best) * LOG2_E);
            }
            take(&row->mass, lanes);
        }
        row->best = best;
    }
    return 1;
}

/* Upper bounds of all scores in the groups. The least x of a group is -log(u) / GROUP >= (w + w * w / 2) / GROUP, with
 * w = 1 - u of 24 bits, rounded down. The bits of a float, as a number, are at most its logarithm. */
FOR_EACH_CPU static void bound_scores(const Row *row, uint64_t key, float inverse, float *bounds) {
    for (long group = 0; group < row->groups; group++) {
        const uint64_t hash = mixed((FIRST_GROUP + (uint64_t)group) * GAMMA + key);
        const float w = (float)(int32_t)(~hash >> 40) * 0x1p-24f;
        const float least = (w + w * w * 0.5f) * (1.0f / GROUP);
        const float logarithm = ((float)(int32_t)bits_of(least) * 0x1p-23f - 127.0f) * 0.69314718f;
        bounds[group] = (row->maxima[group] - row->best) * inverse - logarithm;
    }
}

/* Sums of exp((logit - best) * inverse). */
typedef struct {
    double all, from_floor, above_ceiling;
} Masses;

/* Of the groups whose largest logit reaches `from`. */
FOR_EACH_CPU static Masses masses_from(const Row *row, float inverse, float from, float floor, float ceiling) {
    Masses found = {0.0, 0.0, 0.0};
    float all[LANES] = {0}, near[LANES] = {0}, above[LANES] = {0}, values[GROUP];
    const float slope = inverse * LOG2_E;
    int added = 0;
    for (long group = 0; group < row->groups; group++) {
        if (!(row->maxima[group] >= from)) continue;
        read_group(row, group, values);
        for (int i = 0; i < GROUP; i += LANES)
            for (int lane = 0; lane < LANES; lane++) {
                const float value = values[i + lane], weight = exp2_below((value - row->best) * slope);
                all[lane] += weight;
                near[lane] += value >= floor ? weight : 0.0f;
                above[lane] += value > ceiling ? weight : 0.0f;
            }
        if (++added < ADDED) continue;
        take(&found.all, all), take(&found.from_floor, near), take(&found.above_ceiling, above);
        added = 0;
    }
    take(&found.all, all), take(&found.from_floor, near), take(&found.above_ceiling, above);
    return found;
}

/* The number of groups that reach `from`, and the mass of the largest logits of the others. */
FOR_EACH_CPU static long others(const Row *row, float inverse, float from, double *mass) {
    float lanes[LANES] = {0};
    int32_t reached = 0;
    const float slope = inverse * LOG2_E;
    for (long group = 0; group < row->groups; group++) reached += row->maxima[group] >= from;
    long group = 0;
    for (; group + LANES <= row->groups; group += LANES)
        for (int lane = 0; lane < LANES; lane++) {
            const float value = row->maxima[group + lane];
            lanes[lane] += value >= from ? 0.0f : exp2_below((value - row->best) * slope);
        }
    for (; group < row->groups; group++)
        lanes[0] += row->maxima[group] >= from ? 0.0f : exp2_below((row->maxima[group] - row->best) * slope);
    *mass = 0.0;
    take(mass, lanes);
    return reached;
}

/* ---- heads ------------------------------------------------------------------------------------------------------ */

/* The `count` largest logits, falling, equals by rising id; returns how many there are. */
static int largest(const Row *row, int count, int32_t *ids, float *logits) {
    int found = 0;
    float values[GROUP];
    for (long group = 0; group < row->groups; group++) {
        if (found == count && !(row->maxima[group] > logits[count - 1])) continue;
        read_group(row, group, values);
        for (int i = 0; i < GROUP; i++) {
            if (found == count && !(values[i] > logits[count - 1])) continue;
            if (values[i] == -INFINITY) continue;
            int place = found < count ? found++ : count - 1;
            for (; place > 0 && logits[place - 1] < values[i]; place--) {
                logits[place] = logits[place - 1];
                ids[place] = ids[place - 1];
            }
            logits[place] = values[i];
            ids[place] = (int32_t)(group * GROUP + i);
        }
    }
    return found;
}

/* Of logits that are the model's own, so that equal ones are equal in the reference too. */
static int64_t greedy(const Row *row) {
    int32_t ids[2];
    float logits[2];
    if (largest(row, 2, ids, logits) == 1) return ids[0];
    const float gap = logits[0] - logits[1];
    return gap > 0.0f && gap <= DISTINCT ? NOT_CERTAIN : ids[0];
}

/* ---- open rows -------------------------------------------------------------------------------------------------- */

typedef struct {
    const Row *row;
    const Options *options;
    uint64_t key;
    float *bounds;                /* of the groups' scores */
    double known[CANDIDATES + 1]; /* falling: scores that ids of the row are known to have */
    int found;                    /* of the best scores that reach the floor, falling, equals by rising id */
    double scores[CANDIDATES + 1];
    int64_t ids[CANDIDATES + 1];
    float logits[CANDIDATES + 1];
} Search;

static double relative(const Search *search, float logit) {
    return ((double)logit - (double)search->row->best) * search->options->inverse;
}

static void insert(Search *search, double score, int64_t id, float logit) {
    if (search->found > CANDIDATES && !(score > search->scores[CANDIDATES])) return;
    int place = search->found <= CANDIDATES ? search->found++ : CANDIDATES;
    for (; place > 0 && search->scores[place - 1] < score; place--) {
        search->scores[place] = search->scores[place - 1];
        search->ids[place] = search->ids[place - 1];
        search->logits[place] = search->logits[place - 1];
    }
    search->scores[place] = score;
    search->ids[place] = id;
    search->logits[place] = logit;
}

/* Finds the scores of the group's ids that may reach the floor. */
static void read_scores(Search *search, long group, double floor) {
    float values[GROUP];
    read_group(search->row, group, values);
    const uint64_t hash = mixed((FIRST_GROUP + (uint64_t)group) * GAMMA + search->key);
    const double least = exponential(hash) / GROUP;
    /* An id's noise is at most its group's: most ids are out before theirs is made. */
    const double needed = (floor - SLACK + log(least)) / search->options->inverse + (double)search->row->best;
    const float lowest = needed > -3e38 ? (float)needed : -3e38f; /* no id that cannot be drawn */
    for (int i = 0; i < GROUP; i++) {
        if (!(values[i] >= lowest)) continue;
        const int64_t id = group * GROUP + i;
        double x = least;
        if ((hash ^ (uint64_t)id) & (GROUP - 1)) x += exponential(mixed((uint64_t)id * GAMMA + search->key));
        insert(search, relative(search, values[i]) - log(x), id, values[i]);
    }
}

static void remember(Search *search) {
    for (int i = 0; i < search->found; i++)
        if (search->scores[i] > search->known[i]) search->known[i] = search->scores[i];
}

/* Finds the best `place` + 1 scores and all that are near the last of them. The floor rises with what is found. */
static void search_groups(Search *search, int place) {
    const double reach = 2.0 * search->options->margin;
    double floor = search->known[place] - reach;
    search->found = 0;
    for (long group = 0; group < search->row->groups; group++) {
        if (!((double)search->bounds[group] >= floor - SLACK) || search->bounds[group] == -INFINITY) continue;
        read_scores(search, group, floor);
        if (search->found > place && search->scores[place] - reach > floor) floor = search->scores[place] - reach;
    }
    remember(search);
}

/* True for the largest logit of the row if no other is near. */
static int is_alone(const Row *row, float logit) {
    if (logit != row->best) return 0;
    const float floor = logit - MARGIN;
    float values[GROUP];
    int near = 0;
    for (long group = 0; group < row->groups && near < 2; group++) {
        if (!(row->maxima[group] >= floor)) continue;
        read_group(row, group, values);
        for (int i = 0; i < GROUP; i++) near += values[i] >= floor;
    }
    return near == 1;
}

/* 1 if the mass of the ids before this logit is certainly below top-p, -1 if certainly above, else 0. Where few groups
 * reach the logit, these are read and the others bounded by their largest; else, and where that is not enough, all. */
static int is_within(const Search *search, float logit) {
    const Row *row = search->row;
    const float inverse = (float)search->options->inverse;
    const float floor = logit - DISTINCT > -3e38f ? logit - DISTINCT : -3e38f, ceiling = logit + DISTINCT;
    const double low = search->options->top_p - search->options->margin;
    const double high = search->options->top_p + search->options->margin;
    const double own = exp(relative(search, logit));
    double rest;
    if (others(row, inverse, floor, &rest) * 4 < row->groups) {
        const Masses some = masses_from(row, inverse, floor, floor, ceiling);
        if ((some.from_floor - own) / (some.all + rest) < low) return 1;
        if (some.above_ceiling / (some.all + GROUP * rest) > high) return -1;
    }
    const Masses every = masses_from(row, inverse, -INFINITY, floor, ceiling);
    if ((every.from_floor - own) / every.all < low) return 1;
    return every.above_ceiling / every.all > high ? -1 : 0;
}

/* 1 for a candidate that min-p and top-p keep, -1 for one that they drop, 0 where it is not certain. */
static int is_kept(const Search *search, float logit) {
    const Options *options = search->options;
    if ((!(options->min_p > 0.0) && !(options->top_p < 1.0)) || is_alone(search->row, logit)) return 1;
    if (options->min_p > 0.0) {
        const double distance = relative(search, logit) - log(options->min_p);
        if (distance < options->margin) return distance <= -options->margin ? -1 : 0;
    }
    return options->top_p < 1.0 ? is_within(search, logit) : 1;
}

static int64_t sampled(const Row *row, const Options *options, uint64_t key, float *bounds) {
    Search search = {.row = row, .options = options, .key = key, .bounds = bounds};
    for (int i = 0; i <= CANDIDATES; i++) search.known[i] = -INFINITY;
    bound_scores(row, key, (float)options->inverse, bounds);
    long first = 0;
    for (long group = 1; group < row->groups; group++)
        if (bounds[group] > bounds[first]) first = group;
    read_scores(&search, first, -INFINITY);
    remember(&search);
    for (int place = 0; place < CANDIDATES; place++) {
        search_groups(&search, place);
        if (place >= search.found) return NOT_CERTAIN;
        if (place + 1 < search.found && search.scores[place] - search.scores[place + 1] <= options->margin)
            return NOT_CERTAIN;
        const int kept = is_kept(&search, search.logits[place]);
        if (kept >= 0) return kept ? search.ids[place] : NOT_CERTAIN;
    }
    return NOT_CERTAIN;
}

/* ---- all rows --------------------------------------------------------------------------------------------------- */

typedef struct {
    long rows, vocab, width; /* width: of heads */
    const char *logits;
    Py_ssize_t stride; /* bytes from row to row */
    int is_half;
    const int64_t *places;     /* (rows,) of the rows in the logits */
    const uint8_t *are_greedy; /* (rows,) */
    const uint64_t *keys;      /* (rows,) */
    const Options *options;    /* (rows,) */
    const int32_t *num_tops;   /* (rows,) */
    int64_t *tokens;           /* (rows,) */
    int32_t *ids, *head_size;  /* (rows, width), (rows,) */
    double *probs;             /* (rows, width) */
} Work;

static void work_on(const Work *work, long at, float *maxima, float *bounds) {
    const long groups = (work->vocab + GROUP - 1) / GROUP;
    const int num_top = work->num_tops[at];
    const char *values = work->logits + work->places[at] * work->stride;
    Row row = {values, work->is_half, work->vocab, groups, maxima, 0.0f, num_top > 0, 0.0};
    work->tokens[at] = NOT_CERTAIN;
    work->head_size[at] = 0;
    if (!sweep(&row) || !isfinite(row.best)) return; /* the reference says what is wrong */
    work->tokens[at] = work->are_greedy[at] ? greedy(&row)
                                            : sampled(&row, &work->options[at], work->keys[at], bounds);
    if (num_top == 0) return;
    int32_t *ids = work->ids + at * work->width;
    double *probs = work->probs + at * work->width;
    float logits[GROUP];
    const int count = largest(&row, num_top, ids, logits);
    for (int i = 0; i < count; i++) probs[i] = exp((double)logits[i] - (double)row.best) / row.mass;
    work->head_size[at] = count;
}

/* work_on_rows(next, rows, vocab, width, stride, is_half, addresses...): works on rows from the counter at `next` on. */
static PyObject *work_on_rows(PyObject *module, PyObject *arguments) {
    (void)module;
    unsigned long long next, logits, places, are_greedy, keys, options, num_tops, tokens, ids, head_size, probs;
    Work work;
    if (!PyArg_ParseTuple(arguments, "KlllniKKKKKKKKKK", &next, &work.rows, &work.vocab, &work.width, &work.stride,
                          &work.is_half, &logits, &places, &are_greedy, &keys, &options, &num_tops, &tokens, &ids,
                          &head_size, &probs))
        return NULL;
    work.logits = (const char *)(uintptr_t)logits;
    work.places = (const int64_t *)(uintptr_t)places;
    work.are_greedy = (const uint8_t *)(uintptr_t)are_greedy;
    work.keys = (const uint64_t *)(uintptr_t)keys;
    work.options = (const Options *)(uintptr_t)options;
    work.num_tops = (const int32_t *)(uintptr_t)num_tops;
    work.tokens = (int64_t *)(uintptr_t)tokens;
    work.ids = (int32_t *)(uintptr_t)ids;
    work.head_size = (int32_t *)(uintptr_t)head_size;
    work.probs = (double *)(uintptr_t)probs;
    const size_t groups = (size_t)(work.vocab + GROUP - 1) / GROUP;
    float *scratch = malloc(2 * groups * sizeof(float));
    if (scratch == NULL) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    for (long at; (at = __atomic_fetch_add((int64_t *)(uintptr_t)next, 1, __ATOMIC_RELAXED)) < work.rows;)
        work_on(&work, at, scratch, scratch + groups);
    Py_END_ALLOW_THREADS
    free(scratch);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"work_on_rows", work_on_rows, METH_VARARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_row_kernel", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__row_kernel(void) { return PyModule_Create(&definition); }
