/* The k largest of rows of logits: the one pass over a whole vocabulary that is made for every token.
 *
 * A row is seen as blocks. The k-th largest of their maxima is a bound that at least k values reach, so that
 * only the blocks whose maximum reaches it are looked into. Largest first; of equals, the lower id first.
 *
 * Compiled without any library, for the oldest processor of its kind: it waits for memory, not for sums.
 */
#include <stddef.h>
#include <stdint.h>

#define VERSION 1
#define BLOCK 128

typedef struct {
    float value;
    int32_t id;
} entry;

/* Whether `a` comes after `b`. */
static inline int after(entry a, entry b) {
    return a.value < b.value || (a.value == b.value && a.id > b.id);
}

/* Puts `new` where the last of a heap was. On top of a heap is the one that comes last. */
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

/* Four floats at a time, as every processor of these kinds can. What is no number has to show: NEON's larger of
 * two is then none either, SSE's may be the other one. */
#if defined(__SSE2__)
#include <emmintrin.h>
typedef __m128 four;
#define LOAD _mm_loadu_ps
#define LARGER _mm_max_ps
#define ZERO _mm_setzero_ps()
#define STRANGE(odd, values) _mm_or_ps(odd, _mm_cmpunord_ps(values, values))
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
#define STRANGE(odd, values) (odd)
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
    four odd = STRANGE(STRANGE(STRANGE(STRANGE(ZERO, a), b), c), d);
    for (int at = 16; at < BLOCK; at += 16) {
        four e = LOAD(from + at), f = LOAD(from + at + 4), g = LOAD(from + at + 8), h = LOAD(from + at + 12);
        odd = STRANGE(STRANGE(STRANGE(STRANGE(odd, e), f), g), h);
        a = LARGER(a, e), b = LARGER(b, f), c = LARGER(c, g), d = LARGER(d, h);
    }
    return largest_of_four(LARGER(LARGER(a, b), LARGER(c, d)), odd);
#else
    return largest_of(from, BLOCK);
#endif
}

static int top_of_row(const float *row, int64_t size, int64_t k, float *maxima, entry *heap) {
    int64_t whole = size / BLOCK, blocks = (size + BLOCK - 1) / BLOCK, filled = 0;
    int strange = 0;
    for (int64_t block = 0; block < blocks; block++) {
        const float *from = row + block * BLOCK;
        maxima[block] = block < whole ? largest_of_block(from) : largest_of(from, size - whole * BLOCK);
        strange |= maxima[block] != maxima[block];
    }
    if (strange) return 0;
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
    /* The last one goes to the end, and so on: what is left is sorted. */
    while (filled > 1) {
        entry last = heap[0], moved = heap[--filled];
        sift(heap, filled, moved);
        heap[filled] = last;
    }
    return 1;
}

/* The `k` largest of each of `count` rows of `size` floats, `stride` floats apart, and which they are.
 *
 * `room` has 8-byte entries for k and then floats for the blocks of a row. Returns how many rows were done: fewer
 * than `count` where one has something that is no number.
 */
int64_t perdure_top_k(const float *rows, int64_t count, int64_t stride, int64_t size, int64_t k, int64_t *ids,
                      float *values, entry *room) {
    for (int64_t row = 0; row < count; row++) {
        if (!top_of_row(rows + row * stride, size, k, (float *)(room + k), room)) return row;
        for (int64_t at = 0; at < k; at++) {
            ids[row * k + at] = room[at].id;
            values[row * k + at] = room[at].value;
        }
    }
    return count;
}

int64_t perdure_top_k_version(void) { return VERSION; }
