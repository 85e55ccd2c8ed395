/* Convolutional stages before a chain of Linear layers, for native.c: convolution, max-pooling by windows side by side, ReLU.

A stage has one record in each lane of a vector, so that every step is the same for all of them: an image is (channels, rows, columns, LANES).
Each record's gradient is made, and its norm is that of the very numbers that are added up.
*/

struct stage {
    long channels, height, width, outputs, kernel[2], padding[2], pool[2], relu, weight, bias; /* of the input; bias -1 if there is none */
};

struct shape {
    long high, wide, rows, columns, pooled[2], taps, size, reach; /* of the padded input, the output, the pooled; taps of an output, numbers of z */
};

#if LANES == 16
#define PAIRS 3
#else
#define PAIRS 2
#endif
#define NEXT 5 /* taps of a kernel row that are summed together */

static struct shape shape(const struct stage *s) {
    struct shape f;
    f.high = s->height + 2 * s->padding[0], f.wide = s->width + 2 * s->padding[1];
    f.rows = f.high - s->kernel[0] + 1, f.columns = f.wide - s->kernel[1] + 1;
    f.pooled[0] = f.rows / s->pool[0], f.pooled[1] = f.columns / s->pool[1];
    f.taps = s->channels * s->kernel[0] * s->kernel[1];
    f.reach = f.columns + 2 * (s->kernel[1] - 1);
    f.size = s->outputs * f.rows * f.reach;
    return f;
}

INLINE long weights(const struct stage *s) { return s->outputs * (shape(s).taps + (s->bias >= 0)); } /* and biases */

/* c (+)= sum over k of a[ka[k]] b[kb[k]], for `down` rows and `across` vectors of c. */
INLINE void tap_block(int down, int across, long depth, const float *a, long am, const long *ka, const float *b, const long *kb, const float *start,
                      float *c, long ldc) {
    vec sum[DOWN][ACROSS];
#pragma GCC unroll 8
    for (int i = 0; i < down; i++)
#pragma GCC unroll 8
        for (int v = 0; v < across; v++) {
            if (start) sum[i][v] = start[i] + (vec){0};
            else sum[i][v] = load(c + i * ldc + v * LANES);
        }
    for (long k = 0; k < depth; k++) {
        const float *row = b + kb[k], *column = a + ka[k];
        vec part[ACROSS];
#pragma GCC unroll 8
        for (int v = 0; v < across; v++) part[v] = load(row + v * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < down; i++)
#pragma GCC unroll 8
            for (int v = 0; v < across; v++) sum[i][v] += column[i * am] * part[v];
    }
#pragma GCC unroll 8
    for (int i = 0; i < down; i++)
#pragma GCC unroll 8
        for (int v = 0; v < across; v++) *(vec *)(c + i * ldc + v * LANES) = sum[i][v];
}

static void taps(long rows, long columns, long depth, const float *a, long am, const long *ka, const float *b, const long *kb, const float *start,
                 float *c, long ldc) {
    for (long m = 0; m < rows; m += DOWN)
        for (long n = 0; n < columns; n += ACROSS) {
            const float *a0 = a + m * am, *b0 = b + n * LANES, *s0 = start ? start + m : 0;
            float *c0 = c + m * ldc + n * LANES;
#define TAP_ROWS(down)                                                                        \
    switch (columns - n < ACROSS ? columns - n : ACROSS) {                                    \
        case 1: tap_block(down, 1, depth, a0, am, ka, b0, kb, s0, c0, ldc); break;            \
        case 2: tap_block(down, 2, depth, a0, am, ka, b0, kb, s0, c0, ldc); break;            \
        case 3: tap_block(down, ACROSS < 3 ? ACROSS : 3, depth, a0, am, ka, b0, kb, s0, c0, ldc); break; \
        default: tap_block(down, ACROSS, depth, a0, am, ka, b0, kb, s0, c0, ldc);             \
    }
            switch (rows - m < DOWN ? rows - m : DOWN) {
                case 1: TAP_ROWS(1) break;
                case 2: TAP_ROWS(2) break;
                case 3: TAP_ROWS(3) break;
                case 4: TAP_ROWS(4) break;
                case 5: TAP_ROWS(5) break;
                default: TAP_ROWS(DOWN)
            }
        }
}

/* g[i][v] += sum over places of e[i] x[v]: the gradient by `across` taps of a kernel row and `down` outputs. */
INLINE void pair_block(int down, int across, long rows, long columns, const float *e, long em, long el, const float *x, long xl, float *g, long gm) {
    vec sum[PAIRS][NEXT];
#pragma GCC unroll 8
    for (int i = 0; i < down; i++)
#pragma GCC unroll 8
        for (int v = 0; v < across; v++) sum[i][v] = load(g + i * gm + v * LANES);
    for (long r = 0; r < rows; r++)
        for (long n = 0; n < columns; n++) {
            vec left[PAIRS];
#pragma GCC unroll 8
            for (int i = 0; i < down; i++) left[i] = load(e + i * em + r * el + n * LANES);
#pragma GCC unroll 8
            for (int v = 0; v < across; v++) {
                vec right = load(x + r * xl + (n + v) * LANES);
#pragma GCC unroll 8
                for (int i = 0; i < down; i++) sum[i][v] += left[i] * right;
            }
        }
#pragma GCC unroll 8
    for (int i = 0; i < down; i++)
#pragma GCC unroll 8
        for (int v = 0; v < across; v++) *(vec *)(g + i * gm + v * LANES) = sum[i][v];
}

static void pairs(long outputs, long across, long rows, long columns, const float *e, long em, long el, const float *x, long xl, float *g, long gm) {
    for (long m = 0; m < outputs; m += PAIRS)
        for (long n = 0; n < across; n += NEXT) {
            const float *e0 = e + m * em, *x0 = x + n * LANES;
            float *g0 = g + m * gm + n * LANES;
#define PAIR_ROWS(down)                                                                            \
    switch (across - n < NEXT ? across - n : NEXT) {                                               \
        case 1: pair_block(down, 1, rows, columns, e0, em, el, x0, xl, g0, gm); break;             \
        case 2: pair_block(down, 2, rows, columns, e0, em, el, x0, xl, g0, gm); break;             \
        case 3: pair_block(down, 3, rows, columns, e0, em, el, x0, xl, g0, gm); break;             \
        case 4: pair_block(down, 4, rows, columns, e0, em, el, x0, xl, g0, gm); break;             \
        default: pair_block(down, NEXT, rows, columns, e0, em, el, x0, xl, g0, gm);                \
    }
            switch (outputs - m < PAIRS ? outputs - m : PAIRS) {
                case 1: PAIR_ROWS(1) break;
                case 2: PAIR_ROWS(2) break;
                default: PAIR_ROWS(PAIRS)
            }
        }
}

/* Places in a stage's weights and input, or in the gradient by its output, that a sum over taps goes through. */
static void places(const struct stage *s, long *ka, long *kb, long *la, long *lb) {
    struct shape f = shape(s);
    long k = 0, l = 0;
    for (long c = 0; c < s->channels; c++)
        for (long i = 0; i < s->kernel[0]; i++)
            for (long j = 0; j < s->kernel[1]; j++) ka[k] = k, kb[k++] = ((c * f.high + i) * f.wide + j) * LANES;
    for (long o = 0; o < s->outputs; o++)
        for (long j = 0; j < s->kernel[1]; j++)
            la[l] = o * f.taps + j, lb[l++] = (o * f.rows * f.reach + s->kernel[1] - 1 - j) * LANES;
}

/* From a padded input x to the pooled output: `out` is (outputs, high, wide) of which it fills the middle, `which` says what was chosen. */
static void stage_forward(const struct stage *s, const float *w, const long *ka, const long *kb, const float *x, float *z, float *which, float *out,
                          long high, long wide, long top, long left) {
    static const float none[DOWN];
    struct shape f = shape(s);
    for (long m = 0; m < s->outputs; m += DOWN)
        for (long r = 0; r < f.rows; r++)
            taps(s->outputs - m < DOWN ? s->outputs - m : DOWN, f.columns, f.taps, w + s->weight + m * f.taps, f.taps, ka, x + r * f.wide * LANES, kb,
                 s->bias >= 0 ? w + s->bias + m : none, z + (m * f.rows + r) * f.columns * LANES, f.rows * f.columns * LANES);
    for (long o = 0; o < s->outputs; o++)
        for (long r = 0; r < f.pooled[0]; r++)
            for (long n = 0; n < f.pooled[1]; n++) {
                const float *window = z + ((o * f.rows + r * s->pool[0]) * f.columns + n * s->pool[1]) * LANES;
                vec most = load(window);
                ints at = {0};
                for (int k = 1; k < s->pool[0] * s->pool[1]; k++) {
                    vec next = load(window + (k / s->pool[1] * f.columns + k % s->pool[1]) * LANES);
                    ints better = (next > most) | (next != next);
                    most = choose(better, next, most);
                    at = (ints)choose(better, (vec)(k + (ints){0}), (vec)at);
                }
                if (s->relu) most = choose(most < 0, (vec){0}, most);
                *(vec *)(out + ((o * high + r + top) * wide + n + left) * LANES) = most;
                *(ints *)(which + ((o * f.pooled[0] + r) * f.pooled[1] + n) * LANES) = at;
            }
}

/* From the gradient `up` by the pooled output, behind its ReLU, to that by weights and biases (in g) and, with `down`, by the input. */
static void stage_backward(const struct stage *s, const float *w, const long *la, const long *lb, const float *x, float *e, const float *which,
                           const float *up, float *g, float *down) {
    struct shape f = shape(s);
    long window = s->pool[0] * s->pool[1], edge = s->kernel[1] - 1;
    memset(e, 0, f.size * LANES * sizeof(float));
    for (long o = 0; o < s->outputs; o++)
        for (long r = 0; r < f.pooled[0]; r++)
            for (long n = 0; n < f.pooled[1]; n++) {
                long at = ((o * f.pooled[0] + r) * f.pooled[1] + n) * LANES;
                vec slope = load(up + at);
                ints chosen = *(const ints *)(which + at);
                float *corner = e + ((o * f.rows + r * s->pool[0]) * f.reach + edge + n * s->pool[1]) * LANES;
                for (int k = 0; k < window; k++)
                    *(vec *)(corner + (k / s->pool[1] * f.reach + k % s->pool[1]) * LANES) = choose(chosen == k, slope, (vec){0});
            }
    memset(g, 0, weights(s) * LANES * sizeof(float));
    for (long r = 0; r < f.rows; r += 2) /* two rows at a time lie in the nearest cache */
        for (long c = 0; c < s->channels; c++)
            for (long i = 0; i < s->kernel[0]; i++)
                pairs(s->outputs, s->kernel[1], f.rows - r < 2 ? f.rows - r : 2, f.columns, e + (r * f.reach + edge) * LANES, f.rows * f.reach * LANES,
                      f.reach * LANES, x + ((c * f.high + r + i) * f.wide) * LANES, f.wide * LANES,
                      g + (c * s->kernel[0] + i) * s->kernel[1] * LANES, f.taps * LANES);
    for (long o = 0; o < s->outputs && s->bias >= 0; o++) {
        vec sum = {0};
        for (long i = 0; i < f.rows * f.reach; i++) sum += load(e + (o * f.rows * f.reach + i) * LANES);
        *(vec *)(g + (s->outputs * f.taps + o) * LANES) = sum;
    }
    if (!down) return;
    memset(down, 0, s->channels * s->height * s->width * LANES * sizeof(float));
    for (long y = 0; y < s->height; y++)
        for (long i = 0; i < s->kernel[0]; i++) {
            long r = y + s->padding[0] - i;
            if (r < 0 || r >= f.rows) continue;
            taps(s->channels, s->width, s->outputs * s->kernel[1], w + s->weight + i * s->kernel[1], s->kernel[0] * s->kernel[1], la,
                 e + (r * f.reach + s->padding[1]) * LANES, lb, 0, down + y * s->width * LANES, s->height * s->width * LANES);
        }
}
