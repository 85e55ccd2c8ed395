/* Sums of clipped per-record gradients of a chain of Linear layers and ReLU, or of one behind convolutions (stages.c), or of a sequence model
(sequences.c): what ghost.py and structured.py do, for float32 on a CPU.

A tile of records goes through the whole chain while it lies in the cache: forward, backward, norms, scale, sum. In a tile records are rows,
and a row is padded with zeros to whole vectors. Norms, and which records are unsound, are those of task.py and ghost.py.
*/
#include "vectors.c"
#include "normals.c"
#include "stages.c"

struct layer { long in, out, weight, bias, relu; }; /* widths, places in a point (bias -1 if there is none), whether ReLU follows */

struct call {
    long layers, loss, runs, silos, records, dim, targets, pieces, points;
    long own, weighted; /* whether each silo has its point, and each run its weights */
    const struct layer *layer;
    long stages;
    const struct stage *stage;
    long ops;
    const struct op *op; /* of a sequence model, which has neither layers nor stages */
    const float *x, *y, *weight, *point[2];
    const double *clip;
    float *out;
};

INLINE const float *point(const struct call *call, long p, long run, long silo) {
    return call->point[p] + (call->own ? run * call->silos + silo : run) * call->dim;
}

#include "sequences.c"

struct flow {
    float *a[MOST], *z, *e[MOST], *forward[MOST], *backward[MOST], *bias[MOST];
    const float *point;
    float *x[MOST], *which[MOST], *g[MOST]; /* of stages: padded input, what pools chose, and each record's gradient */
};

struct tile {
    long rows, added;
    float *y, *weight, *ones, *none, *sum[MOST], *sums[MOST]; /* none: zeros */
    double *total[MOST], *totals[MOST];
    struct flow flow[2];
    const float *record[TILE];
    float *image, *up[2], *back, *share, *gathered[MOST];
    double *square, *by_stage[MOST];
    long *ka[MOST], *kb[MOST], *la[MOST], *lb[MOST];
};

/* The stages' outputs as the rows that the first Linear layer reads. */
static void stages_forward(const struct call *call, struct flow *f, const struct tile *t) {
    for (long s = 0; s < call->stages; s++) {
        const struct stage *stage = call->stage + s, *next = stage + 1;
        struct shape this = shape(stage);
        int last = s == call->stages - 1;
        stage_forward(stage, f->point, t->ka[s], t->kb[s], f->x[s], t->image, f->which[s], last ? t->up[0] : f->x[s + 1],
                      last ? this.pooled[0] : shape(next).high, last ? this.pooled[1] : shape(next).wide, last ? 0 : next->padding[0],
                      last ? 0 : next->padding[1]);
    }
    long in = call->layer[0].in, wide = padded(in);
    for (long r = 0; r < LANES; r++)
        for (long i = 0; i < in; i++) f->a[0][r * wide + i] = t->up[0][i * LANES + r];
}

/* Each record's gradient by the stages' weights, from that by the first Linear layer's input. */
static void stages_backward(const struct call *call, struct flow *f, struct tile *t, long rows) {
    long in = call->layer[0].in, wide = padded(in), at = 0, relu = call->stage[call->stages - 1].relu;
    product(rows, in, call->layer[0].out, f->e[0], padded(call->layer[0].out), 1, f->backward[0], t->none, 0, t->back);
    for (long i = 0; i < in; i++)
        for (long r = 0; r < LANES; r++) {
            int passes = r < t->rows && !(relu && f->a[0][r * wide + i] <= 0);
            t->up[0][i * LANES + r] = passes ? t->back[r * wide + i] : 0;
        }
    for (long s = call->stages - 1; s >= 0; s--, at = 1 - at) {
        const struct stage *stage = call->stage + s;
        stage_backward(stage, f->point, t->la[s], t->lb[s], f->x[s], t->image, f->which[s], t->up[at], f->g[s], s ? t->up[1 - at] : 0);
        if (!s || !call->stage[s - 1].relu) continue;
        struct shape this = shape(stage);
        for (long c = 0; c < stage->channels; c++)
            for (long y = 0; y < stage->height; y++)
                for (long n = 0; n < stage->width; n++) {
                    vec *e = (vec *)(t->up[1 - at] + ((c * stage->height + y) * stage->width + n) * LANES);
                    vec a = load(f->x[s] + ((c * this.high + y + stage->padding[0]) * this.wide + n + stage->padding[1]) * LANES);
                    *e = choose(a <= 0, (vec){0}, *e);
                }
    }
}

/* The stages' share of each record's squared norm. */
static void stages_square(const struct call *call, struct tile *t) {
    for (long r = 0; r < LANES; r++) t->square[r] = 0;
    for (long s = 0; s < call->stages; s++) {
        long count = weights(call->stage + s);
        float *g = t->flow[0].g[s];
        if (call->points == 2)
            for (long i = 0; i < count * LANES; i++) g[i] -= t->flow[1].g[s][i];
        for (long from = 0; from < count; from += 64) {
            vec sum = {0};
            for (long i = from; i < count && i < from + 64; i++) sum += load(g + i * LANES) * load(g + i * LANES);
            for (long r = 0; r < LANES; r++) t->square[r] += sum[r];
        }
        for (long r = 0; r < LANES; r++) t->square[r] += count * (double)FLT_MIN;
    }
}

static void pass(const struct call *call, struct flow *f, struct tile *t) {
    long rows = (t->rows + DOWN - 1) / DOWN * DOWN, last = call->layers - 1;
    if (call->stages) stages_forward(call, f, t);
    for (long l = 0; l <= last; l++) {
        const struct layer *layer = call->layer + l;
        long in = padded(layer->in);
        float *z = l < last ? f->a[l + 1] : f->z;
        product(rows, layer->out, layer->in, f->a[l], in, 1, f->forward[l], f->bias[l], layer->relu ? z : 0, z);
    }
    long width = call->layer[last].out, out = padded(width);
    memset(f->e[last], 0, rows * out * sizeof(float));
    for (long r = 0; r < t->rows; r++) {
        const float *z = f->z + r * out, *y = t->y + r * call->targets;
        if (width == 2 && call->loss == CROSS_ENTROPY)
            slope_of_two(z, y, f->e[last] + r * out);
        else
            slope(call->loss, width, z, y, f->e[last] + r * out);
    }
    if (call->layer[last].relu)
        for (long i = 0; i < t->rows * out; i++) f->e[last][i] = f->z[i] <= 0 ? 0 : f->e[last][i];
    for (long l = last; l > 0; l--) {
        const float *gate = call->layer[l - 1].relu ? f->a[l] : 0;
        product(rows, call->layer[l].in, call->layer[l].out, f->e[l], padded(call->layer[l].out), 1, f->backward[l], t->none, gate, f->e[l - 1]);
    }
    if (call->stages) stages_backward(call, f, t, rows);
}

/* Whether both points see the same input of a layer. */
INLINE int same(const struct call *call, long l) { return l == 0 && call->stages == 0; }

/* Leaves a1 - a2 and e1 - e2 where a2 and e1 were. */
static void differ(const struct call *call, struct tile *t) {
    for (long l = 0; l < call->layers; l++) {
        long in = padded(call->layer[l].in), out = padded(call->layer[l].out);
        float *a1 = t->flow[0].a[l], *a2 = t->flow[1].a[l], *e1 = t->flow[0].e[l], *e2 = t->flow[1].e[l];
        if (!same(call, l))
            for (long i = 0; i < t->rows * in; i++) a2[i] = a1[i] - a2[i];
        for (long i = 0; i < t->rows * out; i++) e1[i] = e1[i] - e2[i];
    }
}

/* Of each record weight * min(1, clip / norm), or 0 if it is unsound. */
static void shares(const struct call *call, const struct tile *t, double clip) {
    double total[TILE] = {0}, size[TILE] = {0};
    int sound[TILE];
    for (long r = 0; r < TILE; r++) sound[r] = 1;
    for (long r = 0; r < t->rows && call->stages; r++) total[r] = t->square[r];
    for (long l = 0; l < call->layers; l++) {
        long in = padded(call->layer[l].in), out = padded(call->layer[l].out);
        int bias = call->layer[l].bias >= 0;
        const float *a = t->flow[0].a[l], *e = t->flow[0].e[l];
        if (call->points == 1 || same(call, l)) {
            for (long r = 0; r < t->rows; r += 4) { /* TILE is a multiple of it, and what is beyond the last record is not looked at */
                double aa[4], ee[4];
                squares(a + r * in, in, aa), squares(e + r * out, out, ee);
                for (long k = 0; k < 4; k++) {
                    double part = ee[k] * (aa[k] + bias);
                    sound[r + k] &= aa[k] < LONGEST * LONGEST;
                    total[r + k] += part, size[r + k] += part;
                }
            }
            continue;
        }
        for (long r = 0; r < t->rows; r++) {
            double aa, bb, ab, ee, ff, ef;
            products(a + r * in, t->flow[1].a[l] + r * in, in, &aa, &bb, &ab);
            products(e + r * out, t->flow[1].e[l] + r * out, out, &ee, &ff, &ef);
            double part = ee * (aa + bias) + bb * ff;
            sound[r] &= aa < LONGEST * LONGEST && bb < LONGEST * LONGEST;
            total[r] += part + 2 * ab * ef, size[r] += part;
        }
    }
    for (long r = 0; r < t->rows; r++) {
        double norm = sqrt(total[r]);
        if (call->points == 2) {
            total[r] += 1e-13 * size[r];
            norm = sqrt(total[r] < 0 ? 0 : total[r]) + 8 * FLT_EPSILON * sqrt(size[r]);
        }
        if (call->stages) sound[r] &= norm * norm < LONGEST * LONGEST; /* as structured.py has it */
        t->share[r] = sound[r] ? share(norm, clip) * t->weight[r] : 0;
    }
}

/* Moves the sums of a few tiles on into the totals, in float64. */
static void carry(const struct call *call, struct tile *t) {
    for (long l = 0; l < call->layers; l++) {
        long in = padded(call->layer[l].in), out = padded(call->layer[l].out);
        for (long i = 0; i < call->layer[l].out * in; i++) t->total[l][i] += t->sum[l][i];
        for (long i = 0; i < out; i++) t->totals[l][i] += t->sums[l][i];
        memset(t->sum[l], 0, call->layer[l].out * in * sizeof(float));
        memset(t->sums[l], 0, out * sizeof(float));
    }
    for (long s = 0; s < call->stages; s++)
        for (long i = 0; i < weights(call->stage + s); i++) {
            vec *sum = (vec *)(t->gathered[s] + i * LANES);
            for (long r = 0; r < LANES; r++) t->by_stage[s][i] += (*sum)[r];
            *sum = (vec){0};
        }
    t->added = 0;
}

/* Lays the tile's images side by side in the lanes, and zeros where there are fewer. */
static void images(const struct call *call, struct tile *t) {
    const struct stage *s = call->stage;
    struct shape f = shape(s);
    for (long c = 0; c < s->channels; c++)
        for (long y = 0; y < s->height; y++) {
            float *to = t->flow[0].x[0] + ((c * f.high + y + s->padding[0]) * f.wide + s->padding[1]) * LANES;
            long from = (c * s->height + y) * s->width;
            for (long n = 0; n < s->width; n++)
                for (long r = 0; r < LANES; r++) to[n * LANES + r] = r < t->rows ? t->record[r][from + n] : 0;
        }
}

/* Adds a tile's clipped gradients to the sums. */
static void add(const struct call *call, struct tile *t, double clip) {
    if (call->stages) images(call, t);
    for (long p = 0; p < call->points; p++) pass(call, t->flow + p, t);
    if (call->points == 2) differ(call, t);
    if (call->stages) stages_square(call, t);
    memset(t->share, 0, TILE * sizeof(float));
    shares(call, t, clip);
    for (long p = 0; p < call->points; p++)
        for (long l = 0; l < call->layers; l++) {
            long in = padded(call->layer[l].in), out = padded(call->layer[l].out);
            for (long r = 0; r < t->rows && !(p && same(call, l)); r++) {
                float *e = t->flow[p].e[l] + r * out, share = t->share[r];
                if (share != 0) {
                    for (long i = 0; i < out; i += LANES) *(vec *)(e + i) = load(e + i) * share;
                } else { /* an unsound record may hold anything */
                    memset(e, 0, out * sizeof(float));
                    memset(t->flow[p].a[l] + r * in, 0, in * sizeof(float));
                }
            }
        }
    for (long l = 0; l < call->layers; l++) {
        long in = call->layer[l].in, out = call->layer[l].out;
        float *e = t->flow[0].e[l];
        product(out, in, t->rows, e, 1, padded(out), t->flow[0].a[l], 0, 0, t->sum[l]);
        if (call->points == 2 && !same(call, l)) product(out, in, t->rows, t->flow[1].e[l], 1, padded(out), t->flow[1].a[l], 0, 0, t->sum[l]);
        product(1, out, t->rows, t->ones, 0, 1, e, 0, 0, t->sums[l]);
    }
    for (long s = 0; s < call->stages; s++) {
        vec share = load(t->share);
        for (long i = 0; i < weights(call->stage + s); i++) { /* a lane without a record, or with an unsound one, may hold anything */
            vec part = share * load(t->flow[0].g[s] + i * LANES);
            *(vec *)(t->gathered[s] + i * LANES) += choose(share == 0, (vec){0}, part);
        }
    }
    t->added += t->rows, t->rows = 0;
    if (t->added + TILE > TOGETHER) carry(call, t);
}

/* The weights of a point as `pass` reads them. */
static void unpack(const struct call *call, const float *w, struct flow *f) {
    f->point = w;
    for (long l = 0; l < call->layers; l++) {
        const struct layer *layer = call->layer + l;
        long in = padded(layer->in), out = padded(layer->out);
        const float *weight = w + layer->weight;
        for (long o = 0; o < layer->out; o++) {
            memcpy(f->backward[l] + o * in, weight + o * layer->in, layer->in * sizeof(float));
            for (long i = 0; i < layer->in; i++) f->forward[l][i * out + o] = weight[o * layer->in + i];
            if (layer->bias >= 0) f->bias[l][o] = w[layer->bias + o];
        }
    }
}

/* One piece of one silo's records in one run. */
static void work(const struct call *call, struct tile *t, long run, long silo, long piece) {
    const struct stage *first = call->stage;
    long in = call->stages ? first->channels * first->height * first->width : call->layer[0].in, wide = padded(in);
    long from = piece * call->records / call->pieces, to = (piece + 1) * call->records / call->pieces;
    const float *weight = call->weight + ((call->weighted ? run * call->silos : 0) + silo) * call->records;
    const float *x = call->x + silo * call->records * in, *y = call->y + silo * call->records * call->targets;
    for (long p = 0; p < call->points; p++) {
        const float *w = point(call, p, run, silo);
        if (t->flow[p].point != w) unpack(call, w, t->flow + p); /* most silos have the point of the one before */
    }
    for (long l = 0; l < call->layers; l++) {
        memset(t->total[l], 0, call->layer[l].out * padded(call->layer[l].in) * sizeof(double));
        memset(t->totals[l], 0, padded(call->layer[l].out) * sizeof(double));
    }
    for (long s = 0; s < call->stages; s++) memset(t->by_stage[s], 0, weights(call->stage + s) * sizeof(double));
    for (long r = from; r < to; r++) {
        if (weight[r] == 0) continue;
        t->record[t->rows] = x + r * in;
        if (!call->stages) {
            for (long i = 0; i < in; i += 16) __builtin_prefetch(x + (r + TILE) * in + i); /* for the next tile */
            copy(x + r * in, in, t->flow[0].a[0] + t->rows * wide);
        }
        for (long k = 0; k < call->targets; k++) t->y[t->rows * call->targets + k] = y[r * call->targets + k];
        t->weight[t->rows++] = weight[r];
        if (t->rows == (call->stages ? LANES : TILE)) add(call, t, call->clip[run]);
    }
    if (t->rows) add(call, t, call->clip[run]);
    carry(call, t);
    float *out = call->out + ((run * call->silos + silo) * call->pieces + piece) * call->dim;
    for (long l = 0; l < call->layers; l++) {
        const struct layer *layer = call->layer + l;
        for (long o = 0; o < layer->out; o++) {
            for (long i = 0; i < layer->in; i++) out[layer->weight + o * layer->in + i] = t->total[l][o * padded(layer->in) + i];
            if (layer->bias >= 0) out[layer->bias + o] = t->totals[l][o];
        }
    }
    for (long s = 0; s < call->stages; s++) {
        const struct stage *stage = call->stage + s;
        long count = stage->outputs * shape(stage).taps;
        for (long i = 0; i < count; i++) out[stage->weight + i] = t->by_stage[s][i];
        for (long o = 0; o < stage->outputs && stage->bias >= 0; o++) out[stage->bias + o] = t->by_stage[s][count + o];
    }
}

static long lay_out(const struct call *call, float *at, struct tile *t) {
    long used = 0, last = call->layers - 1;
    t->y = take(at, &used, TILE * call->targets);
    t->weight = take(at, &used, TILE);
    t->ones = take(at, &used, TILE);
    long widest = 0;
    for (long l = 0; l <= last; l++) widest = call->layer[l].in > widest ? call->layer[l].in : widest;
    t->none = take(at, &used, padded(widest));
    for (long l = 0; l <= last; l++) {
        t->sum[l] = take(at, &used, call->layer[l].out * padded(call->layer[l].in));
        t->sums[l] = take(at, &used, call->layer[l].out);
        t->total[l] = (double *)take(at, &used, 2 * call->layer[l].out * padded(call->layer[l].in));
        t->totals[l] = (double *)take(at, &used, 2 * padded(call->layer[l].out));
    }
    for (long p = 0; p < call->points; p++) {
        struct flow *f = t->flow + p;
        f->point = 0;
        for (long l = 0; l <= last; l++) {
            long in = padded(call->layer[l].in), out = padded(call->layer[l].out);
            f->a[l] = p && same(call, l) ? t->flow[0].a[0] : take(at, &used, TILE * in); /* both points see the same records */
            f->e[l] = take(at, &used, TILE * out);
            f->forward[l] = take(at, &used, call->layer[l].in * out);
            f->backward[l] = take(at, &used, call->layer[l].out * in);
            f->bias[l] = take(at, &used, out);
        }
        f->z = take(at, &used, TILE * padded(call->layer[last].out));
    }
    t->share = take(at, &used, TILE);
    if (!call->stages) return used;
    long image = 0, up = padded(call->layer[0].in);
    for (long s = 0; s < call->stages; s++) {
        const struct stage *stage = call->stage + s;
        struct shape f = shape(stage);
        long before = stage->channels * stage->height * stage->width, across = stage->outputs * stage->kernel[1];
        image = f.size > image ? f.size : image, up = s && before > up ? before : up;
        for (long p = 0; p < call->points; p++) {
            struct flow *flow = t->flow + p;
            flow->x[s] = p && !s ? t->flow[0].x[0] : take(at, &used, stage->channels * f.high * f.wide * LANES);
            flow->which[s] = take(at, &used, stage->outputs * f.pooled[0] * f.pooled[1] * LANES);
            flow->g[s] = take(at, &used, weights(stage) * LANES);
        }
        t->gathered[s] = take(at, &used, weights(stage) * LANES);
        t->by_stage[s] = (double *)take(at, &used, 2 * weights(stage));
        t->ka[s] = (long *)take(at, &used, 2 * f.taps), t->kb[s] = (long *)take(at, &used, 2 * f.taps);
        t->la[s] = (long *)take(at, &used, 2 * across), t->lb[s] = (long *)take(at, &used, 2 * across);
        if (at) places(stage, t->ka[s], t->kb[s], t->la[s], t->lb[s]);
    }
    t->image = take(at, &used, image * LANES);
    t->up[0] = take(at, &used, up * LANES), t->up[1] = take(at, &used, up * LANES);
    t->back = take(at, &used, TILE * padded(call->layer[0].in));
    t->square = (double *)take(at, &used, 2 * LANES);
    return used;
}

/* Bytes that a thread takes. */
long block_bytes(const struct call *call) {
    struct tile tile;
    struct sequence sequence;
    return ((call->ops ? lay_out_sequence(call, 0, &sequence) : lay_out(call, 0, &tile)) * sizeof(float) + 63) / 64 * 64;
}

/* 0; or 1 without memory for all threads, 2 where a record holds a token that there is not, and then `out` does not hold. */
long clipped_sums(const struct call *call, long threads) {
    long failed = 0, tasks = call->runs * call->silos * call->pieces;
#pragma omp parallel num_threads(threads) reduction(max : failed)
    {
        struct tile tile;
        struct sequence sequence;
        long size = block_bytes(call);
        float *block = aligned_alloc(64, size);
        if (block) {
            memset(block, 0, size);
            if (call->ops) {
                lay_out_sequence(call, block, &sequence);
            } else {
                lay_out(call, block, &tile);
                tile.rows = tile.added = 0;
                for (long r = 0; r < TILE; r++) tile.ones[r] = 1;
            }
        } else {
            failed = 1;
        }
#pragma omp for schedule(dynamic)
        for (long task = 0; task < tasks; task++) {
            long run = task / (call->silos * call->pieces), silo = task / call->pieces % call->silos, piece = task % call->pieces;
            if (block && call->ops && work_sequence(call, &sequence, run, silo, piece)) failed = 2;
            if (block && !call->ops) work(call, &tile, run, silo, piece);
        }
        free(block);
    }
    return failed;
}

/* The level of x86-64 that this processor and its system run: 4 with AVX-512, 3 with AVX2, else 1; 0 on others. */
long level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("x86-64-v4") ? 4 : __builtin_cpu_supports("x86-64-v3") ? 3 : 1;
#else
    return 0;
#endif
}
