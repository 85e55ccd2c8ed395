/* Vectors, products of matrices, norms and losses, for native.c and what it includes. */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
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
#define TILE 48 /* a multiple of DOWN */
#define TOGETHER (4 * TILE) /* records that are summed in float32: then one moves a sum by its own terms and 192^2 ulps of the clip */
#define MOST 16 /* Linear layers, and stages */
#define STEPS 128 /* of a sequence model */
#define LONGEST 1e15 /* of task.LIMITS, as is 1e-19 */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float four __attribute__((vector_size(16)));
#define INLINE static inline __attribute__((always_inline))

enum loss { CROSS_ENTROPY, LOGISTIC, SQUARED_ERROR };

INLINE long padded(long width) { return (width + LANES - 1) / LANES * LANES; }
INLINE vec load(const float *at) { return *(const vec *)at; }
INLINE vec choose(ints where, vec yes, vec no) { return (vec)((where & (ints)yes) | (~where & (ints)no)); }

/* c (+)= a b for `down` rows and `across` vectors: a is (down, depth) of strides am and ak. */
INLINE void block(int down, int across, long depth, const float *a, long am, long ak, const float *b, long ldb, const float *start, float *c,
                  long ldc) {
    vec sum[DOWN][ACROSS];
#pragma GCC unroll 8
    for (int i = 0; i < down; i++)
#pragma GCC unroll 8
        for (int v = 0; v < across; v++) sum[i][v] = *(const vec *)((start ? start : c + i * ldc) + v * LANES);
    for (long k = 0; k < depth; k++) {
        vec row[ACROSS];
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
        for (int v = 0; v < across; v++) *(vec *)(c + i * ldc + v * LANES) = sum[i][v];
}

INLINE void rows_of(int down, int across, long depth, const float *a, long am, long ak, const float *b, long ldb, const float *start, float *c,
                    long ldc) {
    switch (across) {
        case 1: block(down, 1, depth, a, am, ak, b, ldb, start, c, ldc); break;
        case 2: block(down, 2, depth, a, am, ak, b, ldb, start, c, ldc); break;
#if ACROSS > 2
        case 3: block(down, 3, depth, a, am, ak, b, ldb, start, c, ldc); break;
        case 4: block(down, 4, depth, a, am, ak, b, ldb, start, c, ldc); break;
#endif
    }
}

/* c = start + a b, or c += a b without `start`; c is (rows, columns), columns a multiple of LANES. */
static void product(long rows, long columns, long depth, const float *a, long am, long ak, const float *b, const float *start, float *c) {
    for (long n = 0; n < columns; n += ACROSS * LANES) {
        int across = (columns - n) / LANES < ACROSS ? (columns - n) / LANES : ACROSS;
        const float *from = start ? start + n : 0;
        for (long m = 0, down; m < rows; m += down) {
            const float *am0 = a + m * am;
            float *c0 = c + m * columns + n;
            down = rows - m >= 2 * DOWN || rows - m == DOWN ? DOWN : rows - m > DOWN ? (rows - m + 1) / 2 : rows - m; /* no small rest */
            switch (down) {
                case 1: rows_of(1, across, depth, am0, am, ak, b + n, columns, from, c0, columns); break;
                case 2: rows_of(2, across, depth, am0, am, ak, b + n, columns, from, c0, columns); break;
                case 3: rows_of(3, across, depth, am0, am, ak, b + n, columns, from, c0, columns); break;
                case 4: rows_of(4, across, depth, am0, am, ak, b + n, columns, from, c0, columns); break;
                case 5: rows_of(5, across, depth, am0, am, ak, b + n, columns, from, c0, columns); break;
                default: rows_of(6, across, depth, am0, am, ak, b + n, columns, from, c0, columns);
            }
        }
    }
}

INLINE float lanes(vec u) {
    union { vec whole; four part[LANES / 4]; } sum = {u};
    for (int i = 1; i < LANES / 4; i++) sum.part[0] += sum.part[i];
    return (sum.part[0][0] + sum.part[0][1]) + (sum.part[0][2] + sum.part[0][3]);
}

/* ||u||^2 in float64 but for blocks of 64; what squares may have lost to underflow is added. */
INLINE double square(const float *u, long width) {
    double total = width * (double)FLT_MIN;
    for (long at = 0; at < width; at += 64) {
        vec sum = {0};
        long end = width < at + 64 ? width : at + 64;
        for (long i = at; i < end; i += LANES) {
            vec part = *(const vec *)(u + i);
            sum += part * part;
        }
        total += lanes(sum);
    }
    return total;
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
