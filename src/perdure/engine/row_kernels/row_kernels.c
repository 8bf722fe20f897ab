/* What is done with whole rows of logits for every token: finding the k largest, and drawing one of them.
 *
 * A row is seen as blocks. The k-th largest of their maxima is a bound that at least k values reach, so that
 * only the blocks whose maximum reaches it are looked into. Largest first; of equals, the lower id first.
 *
 * Compiled without any library, for the oldest processor of its kind: it waits for memory, not for sums. With
 * an exponential of its own, a draw is the same on all of them.
 */
#include <stddef.h>
#include <stdint.h>

#define VERSION 4
#define BLOCK 128
/* Blocks that are fetched ahead: what a device has just written is in no cache. */
#define AHEAD 8

typedef struct {
    float value;
    int32_t id;
} entry;

/* Whether `a` comes after `b`. */
static inline int after(entry a, entry b) {
    return a.value < b.value || (a.value == b.value && a.id > b.id);
}

/* Puts `new` into the place on top of a heap, and that one away. On top of a heap is the one that comes last. */
static void sift(entry *heap, int64_t size, entry new) {
    int64_t at = 0;
    for (;;) {
        int64_t child = 2 * at + 1;
        if (child >= size) break;
        if (child + 1 < size && after(heap[child + 1], heap[child])) child++;
        if (!after(heap[child], new)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = new;
}

/* Adds `new` to a heap of up to `k`; once it is full, the last one has to go. */
static inline int64_t add(entry *heap, int64_t size, int64_t k, entry new) {
    if (size == k) {
        if (after(heap[0], new)) sift(heap, size, new);
        return size;
    }
    int64_t at = size;
    while (at > 0 && after(new, heap[(at - 1) / 2])) {
        heap[at] = heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap[at] = new;
    return size + 1;
}

/* Makes a list, largest first, of a heap: the last one goes to its end, and so on. */
static void sort(entry *heap, int64_t size) {
    while (size > 1) {
        entry last = heap[0], moved = heap[--size];
        sift(heap, size, moved);
        heap[size] = last;
    }
}

/* Four floats at a time, as every processor of these kinds can. What is no number has to show: NEON's larger of
 * two is then none either, SSE's may be the other one. */
#if defined(__SSE2__)
#include <emmintrin.h>
typedef __m128 four;
#define LOAD _mm_loadu_ps
#define LARGER _mm_max_ps
#define ZERO _mm_setzero_ps()
#define STRANGE(odd, x, y) _mm_or_ps(odd, _mm_cmpunord_ps(x, y))
static inline float largest_of_four(four values, four odd) {
    four halves = LARGER(values, _mm_movehl_ps(values, values));
    float largest = _mm_cvtss_f32(_mm_max_ss(halves, _mm_shuffle_ps(halves, halves, 1)));
    return _mm_movemask_ps(odd) ? __builtin_nanf("") : largest;
}
#elif defined(__ARM_NEON)
#include <arm_neon.h>
typedef float32x4_t four;
#define LOAD vld1q_f32
#define LARGER vmaxq_f32
#define ZERO vdupq_n_f32(0)
#define STRANGE(odd, x, y) (odd)
static inline float largest_of_four(four values, four odd) {
    (void)odd;
    return vmaxvq_f32(values);
}
#endif

/* The largest of some values, or no number where one of them is none. */
static inline float largest_of(const float *from, int64_t count) {
    float largest = from[0];
    for (int64_t at = 0; at < count; at++) {
        if (from[at] != from[at]) return from[at];
        largest = from[at] > largest ? from[at] : largest;
    }
    return largest;
}

/* The same of a whole block. */
static inline float largest_of_block(const float *from) {
#ifdef LOAD
    four a = LOAD(from), b = LOAD(from + 4), c = LOAD(from + 8), d = LOAD(from + 12);
    four odd = STRANGE(STRANGE(ZERO, a, b), c, d);
    for (int at = 16; at < BLOCK; at += 16) {
        four e = LOAD(from + at), f = LOAD(from + at + 4), g = LOAD(from + at + 8), h = LOAD(from + at + 12);
        odd = STRANGE(STRANGE(odd, e, f), g, h);
        a = LARGER(a, e), b = LARGER(b, f), c = LARGER(c, g), d = LARGER(d, h);
    }
    return largest_of_four(LARGER(LARGER(a, b), LARGER(c, d)), odd);
#else
    return largest_of(from, BLOCK);
#endif
}

/* Fills `heap` with the `k` largest of a row, largest first, given the maxima of its blocks. */
static void top_of_blocks(const float *row, int64_t size, int64_t k, const float *maxima, entry *heap) {
    int64_t blocks = (size + BLOCK - 1) / BLOCK, filled = 0;
    float bound = -__builtin_inff();
    if (blocks > k) {
        for (int64_t block = 0; block < blocks; block++)
            filled = add(heap, filled, k, (entry){maxima[block], (int32_t)block});
        bound = heap[0].value;
        filled = 0;
    }
    for (int64_t block = 0; block < blocks; block++) {
        if (!(maxima[block] >= bound)) continue;
        int64_t end = (block + 1) * BLOCK < size ? (block + 1) * BLOCK : size;
        for (int64_t at = block * BLOCK; at < end; at++)
            if (row[at] >= bound) filled = add(heap, filled, k, (entry){row[at], (int32_t)at});
    }
    sort(heap, k);
}

/* The same without them. False: something there is no number. */
static int top_of_row(const float *row, int64_t size, int64_t k, float *maxima, entry *heap) {
    int64_t whole = size / BLOCK, blocks = (size + BLOCK - 1) / BLOCK;
    int strange = 0;
    for (int64_t block = 0; block < blocks; block++) {
        const float *from = row + block * BLOCK;
        if (block + AHEAD < whole)
            for (int at = 0; at < BLOCK; at += 16) __builtin_prefetch(from + AHEAD * BLOCK + at);
        maxima[block] = block < whole ? largest_of_block(from) : largest_of(from, size - whole * BLOCK);
        strange |= maxima[block] != maxima[block];
    }
    if (strange) return 0;
    top_of_blocks(row, size, k, maxima, heap);
    return 1;
}

/* The exponential of a number that is not above 0, to the last bit or the one before it. */
static double exponential(double x) {
    static const double terms[] = {1.0,           1.0,           1.0 / 2,        1.0 / 6,         1.0 / 24,
                                   1.0 / 120,     1.0 / 720,     1.0 / 5040,     1.0 / 40320,     1.0 / 362880,
                                   1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800.0};
    if (x < -708.0) return 0.0;
    double whole = (double)(int64_t)(x * 1.4426950408889634 - 0.5);
    double rest = (x - whole * 6.93147180369123816490e-01) - whole * 1.90821492927058770002e-10;
    double sum = terms[13];
    for (int term = 12; term >= 0; term--) sum = sum * rest + terms[term];
    union {
        int64_t bits;
        double value;
    } power = {((int64_t)whole + 1023) << 52};
    return sum * power.value;
}

/* Puts `n` biased ones among the `wide` largest of a row, and leaves the k largest of all. */
static void apply_bias(const float *row, int64_t wide, int64_t k, int64_t n, const int64_t *biased,
                       const float *bias, entry *heap) {
    int64_t filled = 0;
    for (int64_t at = 0; at < wide && filled < k; at++) {
        int64_t own = 0;
        while (own < n && biased[own] != heap[at].id) own++;
        /* What is read lies at or behind where is written. */
        if (own == n) filled = add(heap, filled, k, heap[at]);
    }
    for (int64_t own = 0; own < n; own++)
        filled = add(heap, filled, k, (entry){row[biased[own]] + bias[own], (int32_t)biased[own]});
    sort(heap, filled);
}

/* How a row is drawn from: the limit of top-p, the depth of min-p, the temperature, a number from 0 to 1. */
typedef struct {
    double top_p, min_p, temperature, number;
} cuts;

static int32_t draw(const entry *found, int64_t k, const cuts *how, double *weights) {
    double peak = found[0].value, total = 0.0, before = 0.0, sum = 0.0;
    for (int64_t at = 0; at < k; at++) total += weights[at] = exponential(found[at].value - peak);
    int64_t kept = 0;
    for (; kept < k; kept++) {
        double value = found[kept].value;
        if (value < peak + how->min_p || (before >= how->top_p * total && value != peak)) break;
        before += weights[kept];
        sum += weights[kept] = exponential((value - peak) / how->temperature);
    }
    double target = how->number * sum, reached = 0.0;
    int64_t last = 0;
    for (int64_t at = 0; at < kept; at++) {
        if ((reached += weights[at]) > target) return found[at].id;
        if (weights[at] > 0.0) last = at;
    }
    /* Rounding may leave none. */
    return found[last].id;
}

enum { DONE, NO_NUMBER, NOTHING_TO_DRAW };

/* A token for each of `count` rows of `size` floats, `stride` floats apart, out of the `k` largest after `n`
 * biases. `next` is the first row that nobody has taken, `done` how many are finished. */
typedef struct {
    const float *rows;
    int64_t count, stride, size, k, n;
    const int64_t *biased;
    const float *bias;
    const cuts *how;
    int64_t *tokens;
    int64_t next, done, outcome;
} job;

static int64_t draw_row(const job *job, int64_t at, entry *room) {
    const float *row = job->rows + at * job->stride;
    int64_t k = job->k, n = job->n, wide = k + n < job->size ? k + n : job->size;
    double *weights = (double *)(room + k + n);
    if (!top_of_row(row, job->size, wide, (float *)(weights + k), room)) return NO_NUMBER;
    if (n) apply_bias(row, wide, k, n, job->biased, job->bias, room);
    if (room[0].value == -__builtin_inff()) return NOTHING_TO_DRAW;
    if (!(room[0].value < __builtin_inff())) return NO_NUMBER;
    job->tokens[at] = k == 1 ? room[0].id : draw(room, k, job->how + at, weights);
    return DONE;
}

/* Takes rows until none is left. Several threads may do so at once, each with a room of its own for k + n
 * entries, k weights and the maxima of blocks, of 8 bytes each. */
void perdure_draw(job *job, entry *room) {
    int64_t at;
    while ((at = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->count) {
        int64_t outcome = draw_row(job, at, room);
        if (outcome != DONE) __atomic_store_n(&job->outcome, outcome, __ATOMIC_RELAXED);
        __atomic_fetch_add(&job->done, 1, __ATOMIC_RELEASE);
    }
}

/* Whether all rows are finished, waited for as long as a few of them take. */
int64_t perdure_drawn(const job *job) {
    for (int tries = 0; tries < 1 << 16; tries++)
        if (__atomic_load_n(&job->done, __ATOMIC_ACQUIRE) == job->count) return 1;
    return 0;
}

/* The `k` largest of each of `count` rows of `size` floats, `stride` floats apart, and which they are. `room` is
 * for k entries and the maxima of blocks, of 8 bytes each. */
int64_t perdure_top_k(const float *rows, int64_t count, int64_t stride, int64_t size, int64_t k, int64_t *ids,
                      float *values, entry *room) {
    for (int64_t row = 0; row < count; row++) {
        if (!top_of_row(rows + row * stride, size, k, (float *)(room + k), room)) return NO_NUMBER;
        for (int64_t at = 0; at < k; at++) {
            ids[row * k + at] = room[at].id;
            values[row * k + at] = room[at].value;
        }
    }
    return DONE;
}

/* How far a value may lie from the reference: an exponential of more is no float. */
#define FAR 80.0f

/* Added to a number and taken away again, this leaves a whole one, which is also in the last bits of the sum. */
#define ROUND 12582912.0f

typedef void sums_function(const float *, int64_t, float, double *, float *);

/* One pass over `blocks` blocks of a row: the sums of 2^t and of t * 2^t, where t is how far a value lies above
 * `reference` in powers of two, and the maxima of the blocks. In single precision within a block. What is no
 * number, or lies too far above the reference, makes nonsense of the sums. */
#if defined(__ARM_NEON)
/* Sixteen numbers at a time, stage by stage: each stage waits for the one before, and not its neighbours. */
#define EACH for (int i = 0; i < 4; i++)
static void sums_neon(const float *row, int64_t blocks, float reference, double *sums, float *maxima) {
    const four base = vdupq_n_f32(reference), scale = vdupq_n_f32(1.44269504f), least = vdupq_n_f32(-125.0f);
    const four round = vdupq_n_f32(ROUND);
    /* 2^x from -1/2 to 1/2, to 3 parts in a million. */
    const four c0 = vdupq_n_f32(9.999992614e-1f), c1 = vdupq_n_f32(6.931218144e-1f);
    const four c2 = vdupq_n_f32(2.402474489e-1f), c3 = vdupq_n_f32(5.591786277e-2f);
    const four c4 = vdupq_n_f32(9.570100328e-3f);
    double first = 0.0, second = 0.0;
    for (int64_t block = 0; block < blocks; block++) {
        const float *from = row + block * BLOCK;
        four total = ZERO, moment = ZERO, largest = LOAD(from);
        for (int at = 0; at < BLOCK; at += 16) {
            four t[4], whole[4], rest[4], square[4], p[4], high[4];
            if (block + AHEAD < blocks) __builtin_prefetch(from + AHEAD * BLOCK + at);
            EACH t[i] = LOAD(from + at + 4 * i);
            EACH largest = LARGER(largest, t[i]);
            /* Further down is as good as nothing, and no power of two that a float has. */
            EACH t[i] = LARGER(vmulq_f32(vsubq_f32(t[i], base), scale), least);
            EACH whole[i] = vaddq_f32(t[i], round);
            EACH rest[i] = vsubq_f32(t[i], vsubq_f32(whole[i], round));
            EACH square[i] = vmulq_f32(rest[i], rest[i]);
            EACH high[i] = vfmaq_f32(c2, c3, rest[i]);
            EACH p[i] = vfmaq_f32(c0, c1, rest[i]);
            EACH high[i] = vfmaq_f32(high[i], c4, square[i]);
            EACH p[i] = vfmaq_f32(p[i], high[i], square[i]);
            EACH p[i] = (four)vaddq_s32((int32x4_t)p[i], vshlq_n_s32((int32x4_t)whole[i], 23));
            EACH total = vaddq_f32(total, p[i]);
            EACH moment = vfmaq_f32(moment, p[i], t[i]);
        }
        first += vaddvq_f32(total), second += vaddvq_f32(moment), maxima[block] = vmaxvq_f32(largest);
    }
    sums[0] = first, sums[1] = second * 0.6931471805599453;
}

static sums_function *fastest_sums(void) { return sums_neon; }
#else
/* Sixteen numbers at a time, in words that compilers turn into what a processor has: this waits for sums, and
 * is asked for at every token while somebody looks on. */
typedef float floats __attribute__((vector_size(64)));
typedef int32_t integers __attribute__((vector_size(64)));
#define LANES 16
#define ALL(x) ((floats){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x})
/* Where `mask` is set the first, else the other. */
#define WHERE(mask, a, b) ((floats)(((integers)(a) & (mask)) | ((integers)(b) & ~(mask))))
#define SUMS(name, MULTIPLY_ADD)                                                                              \
    static void name(const float *row, int64_t blocks, float reference, double *sums, float *maxima) {        \
        double first = 0.0, second = 0.0;                                                                     \
        for (int64_t block = 0; block < blocks; block++) {                                                    \
            const float *from = row + block * BLOCK;                                                          \
            floats total = ALL(0.0f), moment = ALL(0.0f), largest;                                            \
            __builtin_memcpy(&largest, from, sizeof largest);                                                 \
            if (block + AHEAD < blocks)                                                                       \
                for (int at = 0; at < BLOCK; at += 16) __builtin_prefetch(from + AHEAD * BLOCK + at);         \
            for (int at = 0; at < BLOCK; at += LANES) {                                                       \
                floats value, t, whole, rest, p;                                                              \
                __builtin_memcpy(&value, from + at, sizeof value);                                            \
                largest = WHERE(value > largest, value, largest);                                             \
                t = (value - ALL(reference)) * ALL(1.44269504f);                                              \
                /* Further down is as good as nothing, and no power of two that a float has. */               \
                t = WHERE(t < ALL(-125.0f), ALL(-125.0f), t);                                                 \
                whole = t + ALL(ROUND);                                                                       \
                rest = t - (whole - ALL(ROUND));                                                              \
                p = MULTIPLY_ADD(ALL(1.33908674e-3f), rest, ALL(9.66637369e-3f));                             \
                p = MULTIPLY_ADD(p, rest, ALL(5.55035710e-2f));                                               \
                p = MULTIPLY_ADD(p, rest, ALL(2.40223489e-1f));                                               \
                p = MULTIPLY_ADD(p, rest, ALL(6.93147188e-1f));                                               \
                p = MULTIPLY_ADD(p, rest, ALL(1.0f));                                                         \
                p = (floats)((integers)p + ((integers)whole << 23));                                          \
                total += p;                                                                                   \
                moment = MULTIPLY_ADD(p, t, moment);                                                          \
            }                                                                                                 \
            float lanes[3][LANES];                                                                            \
            __builtin_memcpy(lanes[0], &total, sizeof total);                                                 \
            __builtin_memcpy(lanes[1], &moment, sizeof moment);                                               \
            __builtin_memcpy(lanes[2], &largest, sizeof largest);                                             \
            for (int half = LANES / 2; half; half /= 2)                                                       \
                for (int lane = 0; lane < half; lane++) {                                                     \
                    lanes[0][lane] += lanes[0][lane + half];                                                  \
                    lanes[1][lane] += lanes[1][lane + half];                                                  \
                    float other = lanes[2][lane + half];                                                      \
                    lanes[2][lane] = other > lanes[2][lane] ? other : lanes[2][lane];                         \
                }                                                                                             \
            first += lanes[0][0], second += lanes[1][0], maxima[block] = lanes[2][0];                         \
        }                                                                                                     \
        sums[0] = first, sums[1] = second * 0.6931471805599453;                                               \
    }

#define IN_TWO_STEPS(a, b, c) ((a) * (b) + (c))
SUMS(sums_anywhere, IN_TWO_STEPS)

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define IN_ONE_STEP(a, b, c) ((floats)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
__attribute__((target("avx512f,avx512dq"))) SUMS(sums_avx512, IN_ONE_STEP)
__attribute__((target("avx2"))) SUMS(sums_avx2, IN_TWO_STEPS)

/* What this processor and its system can do. */
static sums_function *fastest_sums(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE)) return sums_anywhere;
    unsigned states, high;
    __asm__("xgetbv" : "=a"(states), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (states & 0x6) != 0x6) return sums_anywhere;
    if ((states & 0xe6) == 0xe6 && (b & bit_AVX512F) && (b & bit_AVX512DQ)) return sums_avx512;
    return b & bit_AVX2 ? sums_avx2 : sums_anywhere;
}
#else
static sums_function *fastest_sums(void) { return sums_anywhere; }
#endif
#endif

/* What is told of `count` rows: of each the `k` largest and which they are, and the sums of that pass in natural
 * units with their reference behind them. `next` and `done` are those of a `job`. */
typedef struct {
    const float *rows;
    int64_t count, stride, size, k;
    int64_t *ids;
    float *values;
    double *sums;
    int64_t next, done, outcome;
} measures;

/* Blocks at the beginning of a row that the reference is taken from: the largest of all is not known before the
 * pass, and tokens that are often used come first. */
#define FIRST 4

static int64_t measure_row(const measures *job, int64_t at, sums_function *sums_of, entry *room) {
    const float *row = job->rows + at * job->stride;
    int64_t size = job->size, k = job->k, whole = size / BLOCK;
    float *maxima = (float *)(room + k), reference = largest_of(row, size < BLOCK ? size : BLOCK);
    double *sums = job->sums + 3 * at;
    for (int64_t block = 1; block < FIRST && block < whole; block++) {
        float other = largest_of_block(row + block * BLOCK);
        reference = other > reference ? other : reference;
    }
    for (int again = 0;; again++) {
        if (reference - reference == 0.0f) {
            float largest = -__builtin_inff();
            sums_of(row, whole, reference, sums, maxima);
            for (int64_t block = 0; block < whole; block++)
                largest = maxima[block] > largest ? maxima[block] : largest;
            if (whole * BLOCK < size) {
                float last = maxima[whole] = largest_of(row + whole * BLOCK, size - whole * BLOCK);
                if (last != last) return NO_NUMBER;
                largest = last > largest ? last : largest;
            }
            if (largest - reference <= FAR) break;
        }
        if (again || !top_of_row(row, size, k, maxima, room)) return NO_NUMBER;
        reference = room[0].value;
    }
    if (sums[0] != sums[0]) return NO_NUMBER;
    top_of_blocks(row, size, k, maxima, room);
    for (int64_t rest = whole * BLOCK; rest < size; rest++) {
        double beyond = (double)row[rest] - reference;
        double weight = beyond > 0.0 ? 1.0 / exponential(-beyond) : exponential(beyond);
        sums[0] += weight;
        if (weight > 0.0) sums[1] += weight * beyond;
    }
    sums[2] = reference;
    for (int64_t best = 0; best < k; best++) {
        job->ids[at * k + best] = room[best].id;
        job->values[at * k + best] = room[best].value;
    }
    return DONE;
}

/* Takes rows until none is left, as `perdure_draw` does. `room` is as for `perdure_top_k`. */
void perdure_measure(measures *job, entry *room) {
    static sums_function *sums_here;
    sums_function *found = __atomic_load_n(&sums_here, __ATOMIC_RELAXED);
    if (!found) __atomic_store_n(&sums_here, found = fastest_sums(), __ATOMIC_RELAXED);
    int64_t at;
    while ((at = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < job->count) {
        int64_t outcome = measure_row(job, at, found, room);
        if (outcome != DONE) __atomic_store_n(&job->outcome, outcome, __ATOMIC_RELAXED);
        __atomic_fetch_add(&job->done, 1, __ATOMIC_RELEASE);
    }
}

/* Whether all rows of that are finished. */
int64_t perdure_measured(const measures *job) {
    for (int tries = 0; tries < 1 << 16; tries++)
        if (__atomic_load_n(&job->done, __ATOMIC_ACQUIRE) == job->count) return 1;
    return 0;
}

/* What the caller has to know. */
int64_t perdure_row_kernels_version(void) { return VERSION; }
int64_t perdure_row_kernels_block(void) { return BLOCK; }
