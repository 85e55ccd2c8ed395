/* Vectors, products of matrices, norms and losses, for native.c and what it includes. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#define ACROSS 4
#elif defined(__AVX__)
#define LANES 8
#define ACROSS 2
#else
#define LANES 4
#define ACROSS 4
#endif
#define DOWN 6
#define THIN 8 /* vectors across one row alone */
#define SLIM 4 /* columns that are not worth a vector of 16, of which there is one product a cycle where there are two of smaller ones */
#define TALL 12 /* rows of these at a time: a product takes four cycles */
#define TILE 48 /* a multiple of DOWN */
#define TOGETHER (4 * TILE) /* records that are summed in float32: then one moves a sum by its own terms and 192^2 ulps of the clip */
#define MOST 16 /* Linear layers, and stages */
#define STEPS 128 /* of a sequence model */
#define LONGEST 1e15 /* of task.LIMITS, as is 1e-19 */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float four __attribute__((vector_size(16)));
typedef int four_ints __attribute__((vector_size(16)));
#define INLINE static inline __attribute__((always_inline))

enum loss { CROSS_ENTROPY, LOGISTIC, SQUARED_ERROR };

INLINE long padded(long width) { return (width + LANES - 1) / LANES * LANES; }
INLINE vec load(const float *at) { return *(const vec *)at; }
INLINE vec choose(ints where, vec yes, vec no) { return (vec)((where & (ints)yes) | (~where & (ints)no)); }

/* c (+)= a b for `down` rows and `across` vectors: a is (down, depth) of strides am and ak; then 0 where `gate`, or c if it is that, is <= 0. */
INLINE void block(int down, int across, long depth, const float *a, long am, long ak, const float *b, long ldb, const float *start,
                  const float *gate, float *c, long ldc) {
    vec sum[DOWN][THIN];
#pragma GCC unroll 8
    for (int i = 0; i < down; i++)
#pragma GCC unroll 8
        for (int v = 0; v < across; v++) sum[i][v] = *(const vec *)((start ? start : c + i * ldc) + v * LANES);
    for (long k = 0; k < depth; k++) {
        vec row[THIN];
#pragma GCC unroll 8
        for (int v = 0; v < across; v++) row[v] = *(const vec *)(b + k * ldb + v * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < down; i++) {
            float f = a[i * am + k * ak];
#pragma GCC unroll 8
            for (int v = 0; v < across; v++) sum[i][v] += f * row[v];
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < down; i++)
#pragma GCC unroll 8
        for (int v = 0; v < across; v++) {
            vec done = sum[i][v];
            if (gate) done = choose((gate == c ? done : load(gate + i * ldc + v * LANES)) <= 0, (vec){0}, done);
            *(vec *)(c + i * ldc + v * LANES) = done;
        }
}

/* One or two rows alone would wait for each sum before they add to it: they take more vectors at a time. */
INLINE int widest(int down) { return down == 1 ? THIN : down == 2 ? 4 : ACROSS; }

INLINE void rows_of(int down, int across, long depth, const float *a, long am, long ak, const float *b, long ldb, const float *start,
                    const float *gate, float *c, long ldc) {
#define CASE(n) case n: if (n <= widest(down)) block(down, n, depth, a, am, ak, b, ldb, start, gate, c, ldc); break
    switch (across) { CASE(1); CASE(2); CASE(3); CASE(4); CASE(5); CASE(6); CASE(7); CASE(8); }
#undef CASE
}

#if LANES == 16
/* `block` for four columns, with products that are added unrounded as there: some compilers would split those of a single row. */
INLINE void slim(int down, long depth, const float *a, long am, long ak, const float *b, const float *start, const float *gate, float *c,
                 long ld) {
    __m128 sum[TALL];
#pragma GCC unroll 12
    for (int i = 0; i < down; i++) sum[i] = _mm_loadu_ps(start ? start : c + i * ld);
    for (long k = 0; k < depth; k++)
#pragma GCC unroll 12
        for (int i = 0; i < down; i++) sum[i] = _mm_fmadd_ps(_mm_set1_ps(a[i * am + k * ak]), _mm_loadu_ps(b + k * ld), sum[i]);
#pragma GCC unroll 12
    for (int i = 0; i < down; i++)
        for (int v = 0; v < SLIM; v++) c[i * ld + v] = gate && (gate == c ? sum[i][v] : gate[i * ld + v]) <= 0 ? 0 : sum[i][v];
}

static void slim_product(long rows, long depth, const float *a, long am, long ak, const float *b, const float *start, const float *gate,
                         float *c, long ld) {
    for (long m = 0, down; m < rows; m += down) {
        const float *am0 = a + m * am, *g0 = gate ? gate + m * ld : 0;
        down = rows - m >= TALL ? TALL : rows - m >= 4 ? 4 : 1;
        switch (down) {
            case TALL: slim(TALL, depth, am0, am, ak, b, start, g0, c + m * ld, ld); break;
            case 4: slim(4, depth, am0, am, ak, b, start, g0, c + m * ld, ld); break;
            default: slim(1, depth, am0, am, ak, b, start, g0, c + m * ld, ld);
        }
    }
}
#endif

/* c = start + a b, or c += a b without `start`; with a `gate` c is 0 where that is <= 0. Rows of b and c are padded: a slim rest's padding is not
touched, and other padding is made like the rest. */
static void product(long rows, long width, long depth, const float *a, long am, long ak, const float *b, const float *start,
                    const float *gate, float *c) {
    long columns = padded(width), whole = columns, most = widest(rows < 3 ? rows : 3);
#if LANES == 16
    if (width % LANES && width % LANES <= SLIM) {
        whole -= LANES;
        slim_product(rows, depth, a, am, ak, b + whole, start ? start + whole : 0, gate ? gate + whole : 0, c + whole, columns);
    }
#endif
    for (long n = 0; n < whole; n += most * LANES) {
        int across = (whole - n) / LANES < most ? (whole - n) / LANES : most;
        const float *from = start ? start + n : 0;
        for (long m = 0, down; m < rows; m += down) {
            const float *am0 = a + m * am, *g0 = gate ? gate + m * columns + n : 0;
            float *c0 = c + m * columns + n;
            down = rows - m >= 2 * DOWN || rows - m == DOWN ? DOWN : rows - m > DOWN ? (rows - m + 1) / 2 : rows - m; /* no small rest */
            switch (down) {
                case 1: rows_of(1, across, depth, am0, am, ak, b + n, columns, from, g0, c0, columns); break;
                case 2: rows_of(2, across, depth, am0, am, ak, b + n, columns, from, g0, c0, columns); break;
                case 3: rows_of(3, across, depth, am0, am, ak, b + n, columns, from, g0, c0, columns); break;
                case 4: rows_of(4, across, depth, am0, am, ak, b + n, columns, from, g0, c0, columns); break;
                case 5: rows_of(5, across, depth, am0, am, ak, b + n, columns, from, g0, c0, columns); break;
                default: rows_of(6, across, depth, am0, am, ak, b + n, columns, from, g0, c0, columns);
            }
        }
    }
}

INLINE four quarters(vec u) {
    union { vec whole; four part[LANES / 4]; } sum = {u};
    for (int i = 1; i < LANES / 4; i++) sum.part[0] += sum.part[i];
    return sum.part[0];
}

/* ||u||^2 in float64 but for blocks of 64; what squares may have lost to underflow is added. */
INLINE double square(const float *u, long width) {
    double total = width * (double)FLT_MIN;
    for (long at = 0; at < width; at += 64) {
        vec sum = {0};
        long end = width < at + 64 ? width : at + 64;
        for (long i = at; i < end; i += LANES) sum += load(u + i) * load(u + i);
        four four = quarters(sum);
        total += (four[0] + four[1]) + (four[2] + four[3]);
    }
    return total;
}

INLINE four by_two(four a, four b) {
    return __builtin_shuffle(a, b, (four_ints){0, 2, 4, 6}) + __builtin_shuffle(a, b, (four_ints){1, 3, 5, 7});
}

/* `square` of four rows, to the last bit: no sum waits for another. */
INLINE void squares(const float *u, long width, double *total) {
    for (int r = 0; r < 4; r++) total[r] = width * (double)FLT_MIN;
    for (long at = 0; at < width; at += 64) {
        vec sum[4] = {0};
        long end = width < at + 64 ? width : at + 64;
        for (long i = at; i < end; i += LANES)
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) {
                vec part = load(u + r * width + i);
                sum[r] += part * part;
            }
        four all = by_two(by_two(quarters(sum[0]), quarters(sum[1])), by_two(quarters(sum[2]), quarters(sum[3])));
        for (int r = 0; r < 4; r++) total[r] += all[r];
    }
}

/* ||u||^2, ||v||^2 and u.v in float64, where products of float32 numbers are exact: they are about to cancel. */
static void products(const float *u, const float *v, long width, double *uu, double *vv, double *uv) {
    double a = 0, b = 0, c = 0;
#pragma omp simd reduction(+ : a, b, c)
    for (long i = 0; i < width; i++) {
        a += (double)u[i] * u[i];
        b += (double)v[i] * v[i];
        c += (double)u[i] * v[i];
    }
    *uu = a, *vv = b, *uv = c;
}

/* `width` numbers, without a call. */
INLINE void copy(const float *from, long width, float *to) {
    long i = 0;
    for (; i + LANES <= width; i += LANES) *(vec *)(to + i) = load(from + i);
    if (i < width && width >= LANES) *(vec *)(to + width - LANES) = load(from + width - LANES);
    for (; width < LANES && i < width; i++) to[i] = from[i];
}

/* The gradient of a record's loss by its outputs z. */
static void slope(enum loss loss, long width, const float *z, const float *y, float *e) {
    if (loss == SQUARED_ERROR) {
        for (long k = 0; k < width; k++) e[k] = 2 * (z[k] - y[k]);
    } else if (loss == LOGISTIC) {
        e[0] = 1 / (1 + expf(-z[0])) - y[0];
    } else {
        float most = z[0], sum = 0;
        int known = 0;
        for (long k = 1; k < width; k++) most = z[k] > most ? z[k] : most;
        if (!isfinite(most)) most = NAN; /* as softmax has it: the record is unsound */
        for (long k = 0; k < width; k++) sum += e[k] = z[k] == most ? 1 : expf(z[k] - most);
        for (long k = 0; k < width; k++) known |= y[0] == k;
        for (long k = 0; k < width; k++) e[k] = known ? e[k] / sum - (y[0] == k) : 0;
    }
}

/* The same for the cross-entropy of two classes: which of them is larger is anybody's guess, so there is no branch on it. */
INLINE void slope_of_two(const float *z, const float *y, float *e) {
    int second = z[1] > z[0], known = y[0] == 0 || y[0] == 1;
    float most = second ? z[1] : z[0], less = second ? z[0] : z[1];
    if (!isfinite(most)) most = NAN;
    float part = expf(less - most), sum = 1 + part, large = 1 / sum, small = part / sum;
    e[0] = known ? (second ? small : large) - (y[0] == 0) : 0;
    e[1] = known ? (second ? large : small) - (y[0] == 1) : 0;
}

/* min(1, clip / norm), or 0 where that has no digits left. */
INLINE float share(double norm, double clip) {
    double least = clip > 1e-19 ? clip : 1e-19, part = clip / (norm <= least ? least : norm);
    return part >= FLT_MIN ? part : 0;
}

/* Hands out `size` floats of the block, or only counts them where there is no block yet. */
static float *take(float *at, long *used, long size) {
    float *given = at ? at + *used : 0;
    *used += (size + 15) / 16 * 16; /* whole cache lines */
    return given;
}
