/* Sequence models for native.c, a record at a time: Embedding, Linear, LayerNorm, ReLU, GELU, self-attention and mean over the sequence, with
residual sums around any of them.

A record is a matrix of `rows` tokens, whose rows are padded with zeros to whole vectors. Its whole gradient is made, and its norm is that of the
very numbers that are added up.
*/

enum kind { EMBEDDING, LINEAR, LAYER_NORM, RELU, GELU, ATTENTION, POOL, BRANCH, MERGE };

struct op {
    long kind, rows, in, out, weight, bias; /* rows and width of the input; places in a point, -1 if there is none */
    long setting, other; /* tokens of an embedding and which is padding; heads; the value that a MERGE adds */
    double eps;
};

struct path { /* at one point */
    const float *point;
    float *value[STEPS + 1], *kept[STEPS], *forward[STEPS], *backward[STEPS], *bias[STEPS], *g;
};

struct sequence {
    struct path path[2];
    float *e[2], *aside[STEPS], *sum, *none, *turned, *side[3], *square;
    double *total, *tokens;
    int *seen; /* of a token, the row of the record that had it first */
    long added, size, place[STEPS]; /* numbers of a gradient, and where an op's begin */
};

INLINE long wide(const struct op *op) { return padded(op->in); }
INLINE long after(const struct op *op) { return op->kind == POOL ? 1 : op->rows; }

/* Numbers of an op's gradient by its weight, and by its bias. */
INLINE long by_weight(const struct op *op) {
    if (op->kind == EMBEDDING) return op->rows * padded(op->out);
    return op->weight < 0 ? 0 : (op->kind == LINEAR ? op->out : 1) * wide(op);
}
INLINE long by_bias(const struct op *op) { return op->bias < 0 ? 0 : padded(op->out); }

INLINE vec exponential(vec x) {
    x = choose(x < -87, -87 + (vec){0}, choose(x > 88, 88 + (vec){0}, x));
    vec n = (x * 1.44269504f + 12582912.0f) - 12582912.0f, r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = 1.9875691500e-4f * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f, p = p * r + 4.1665795894e-2f, p = p * r + 1.6666665459e-1f, p = p * r + 0.5f;
    return (p * r * r + r + 1) * (vec)((__builtin_convertvector(n, ints) + 127) << 23);
}

/* erf to an ulp: a polynomial about 0, and 1 - exp of one beyond. */
INLINE vec error_function(vec a) {
    vec t = choose(a < 0, -a, a), s = a * a, far, near;
    far = (-1.72853470e-5f * t + 3.83197126e-4f) * s + (-3.88396438e-3f * t + 2.42546219e-2f);
    far = far * t - 1.06777877e-1f, far = far * t - 6.34846687e-1f, far = far * t - 1.28717512e-1f;
    far = 1 - exponential(far * t - t);
    near = -5.96761703e-4f * s + 4.99119423e-3f;
    near = near * s - 2.67681349e-2f, near = near * s + 1.12819925e-1f, near = near * s - 3.76125336e-1f, near = near * s + 1.28379166e-1f;
    return choose(t > 0.927734375f, choose(a < 0, -far, far), near * a + a);
}

/* Columns of a matrix as one of its own, padded to whole vectors; and back; and as rows. */
INLINE void pack(long rows, long columns, const float *from, long ld, float *to) {
    for (long r = 0; r < rows; r++) memcpy(to + r * padded(columns), from + r * ld, columns * sizeof(float));
}
INLINE void spread(long rows, long columns, const float *from, float *to, long ld) {
    for (long r = 0; r < rows; r++) memcpy(to + r * ld, from + r * padded(columns), columns * sizeof(float));
}
INLINE void turn(long rows, long columns, const float *from, long ld, float *to) {
    for (long r = 0; r < rows; r++)
        for (long j = 0; j < columns; j++) to[j * padded(rows) + r] = from[r * ld + j];
}

INLINE void add_rows(long rows, long columns, const float *from, float *to) {
    memset(to, 0, columns * sizeof(float));
    for (long r = 0; r < rows; r++)
        for (long n = 0; n < columns; n++) to[n] += from[r * columns + n];
}

static void softmax(long width, float scale, float *s) {
    float most = s[0], sum = 0;
    for (long i = width; i < padded(width); i++) s[i] = s[0];
#pragma omp simd reduction(max : most)
    for (long i = 0; i < width; i++) most = s[i] > most ? s[i] : most;
    for (long i = 0; i < padded(width); i += LANES) *(vec *)(s + i) = exponential((load(s + i) - most) * scale);
#pragma omp simd reduction(+ : sum)
    for (long i = 0; i < width; i++) sum += s[i];
    for (long i = 0; i < width; i++) s[i] /= sum;
    memset(s + width, 0, (padded(width) - width) * sizeof(float));
}

/* The heads' weights stay in p, (heads, rows, padded rows). */
static void attend(const struct op *op, struct sequence *t, const float *a, float *p, float *out) {
    long rows = op->rows, across = padded(rows), ld = wide(op), width = op->out / op->setting;
    for (long h = 0; h < op->setting; h++, p += rows * across) {
        const float *q = a + h * width;
        turn(rows, width, q + op->out, ld, t->turned);
        pack(rows, width, q + 2 * op->out, ld, t->side[0]);
        product(rows, across, width, q, ld, 1, t->turned, t->none, 0, p);
        for (long r = 0; r < rows; r++) softmax(rows, 1 / sqrtf(width), p + r * across);
        product(rows, padded(width), rows, p, across, 1, t->side[0], t->none, 0, t->side[1]);
        spread(rows, width, t->side[1], out + h * width, padded(op->out));
    }
}

static void attend_back(const struct op *op, struct sequence *t, const float *a, const float *p, const float *e, float *down) {
    long rows = op->rows, across = padded(rows), ld = wide(op), width = op->out / op->setting, columns = padded(width);
    float *slopes = t->square, *one = t->side[0], *found = t->side[1], *by_output = t->side[2], scale = 1 / sqrtf(width);
    for (long h = 0; h < op->setting; h++, p += rows * across) {
        const float *q = a + h * width, *k = q + op->out;
        float *to = down + h * width;
        pack(rows, width, e + h * width, padded(op->out), by_output);
        turn(rows, width, k + op->out, ld, t->turned);
        product(rows, across, width, by_output, columns, 1, t->turned, t->none, 0, slopes);
        for (long r = 0; r < rows; r++) {
            float dot = 0, *s = slopes + r * across;
            const float *own = p + r * across;
#pragma omp simd reduction(+ : dot)
            for (long i = 0; i < across; i++) dot += s[i] * own[i];
            for (long i = 0; i < across; i++) s[i] = own[i] * (s[i] - dot) * scale;
        }
        pack(rows, width, k, ld, one);
        product(rows, columns, rows, slopes, across, 1, one, t->none, 0, found);
        spread(rows, width, found, to, ld);
        pack(rows, width, q, ld, one);
        product(rows, columns, rows, slopes, 1, across, one, t->none, 0, found);
        spread(rows, width, found, to + op->out, ld);
        product(rows, columns, rows, p, 1, across, by_output, t->none, 0, found);
        spread(rows, width, found, to + 2 * op->out, ld);
    }
}

/* Keeps the normalised rows, and behind them what each was divided by. */
static void normalise(const struct op *op, const float *w, const float *a, float *u, float *z) {
    long n = op->in, ld = wide(op);
    for (long r = 0; r < op->rows; r++, a += ld, z += ld) {
        float sum = 0, squares = 0, *own = u + r * ld;
#pragma omp simd reduction(+ : sum)
        for (long i = 0; i < n; i++) sum += a[i];
        float mean = sum / n;
#pragma omp simd reduction(+ : squares)
        for (long i = 0; i < n; i++) squares += (a[i] - mean) * (a[i] - mean);
        float by = u[op->rows * ld + r] = 1 / sqrtf(squares / n + (float)op->eps);
        for (long i = 0; i < n; i++) own[i] = (a[i] - mean) * by;
        for (long i = 0; i < n; i++) z[i] = own[i] * (op->weight < 0 ? 1 : w[op->weight + i]) + (op->bias < 0 ? 0 : w[op->bias + i]);
    }
}

static void normalise_back(const struct op *op, const float *w, const float *u, float *e, float *by_weight, float *by_bias, float *down) {
    long n = op->in, ld = wide(op);
    const float *by = u + op->rows * ld;
    for (long r = 0; r < op->rows; r++, u += ld, e += ld, down += ld) {
        float sum = 0, dot = 0;
        if (op->weight >= 0)
            for (long i = 0; i < n; i++) by_weight[i] += e[i] * u[i];
        if (op->bias >= 0)
            for (long i = 0; i < n; i++) by_bias[i] += e[i];
        if (op->weight >= 0)
            for (long i = 0; i < n; i++) e[i] *= w[op->weight + i];
#pragma omp simd reduction(+ : sum, dot)
        for (long i = 0; i < n; i++) sum += e[i], dot += e[i] * u[i];
        sum /= n, dot /= n;
        for (long i = 0; i < n; i++) down[i] = (e[i] - sum - u[i] * dot) * by[r];
    }
}

/* From a record x to the values of all ops. */
static void along(const struct call *call, struct path *f, struct sequence *t, const float *x) {
    const struct op *op = call->op;
    if (op->kind != EMBEDDING) pack(op->rows, op->in, x, op->in, f->value[0]);
    for (long i = 0; i < call->ops; i++, op++) {
        long rows = op->rows, numbers = rows * wide(op), out = padded(op->out);
        float *a = f->value[i], *z = f->value[i + 1], *kept = f->kept[i];
        switch (op->kind) {
            case EMBEDDING:
                for (long r = 0; r < rows; r++) memcpy(z + r * out, f->point + op->weight + (long)x[r] * op->out, op->out * sizeof(float));
                break;
            case LINEAR: product(rows, out, op->in, a, wide(op), 1, f->forward[i], f->bias[i], 0, z); break;
            case LAYER_NORM: normalise(op, f->point, a, kept, z); break;
            case RELU:
                for (long n = 0; n < numbers; n++) z[n] = a[n] < 0 ? 0 : a[n];
                break;
            case GELU:
                for (long n = 0; n < numbers; n += LANES) {
                    vec v = load(a + n), below = 0.5f + 0.5f * error_function(v * 0.70710678f);
                    *(vec *)(z + n) = v * below;
                    *(vec *)(kept + n) = below + v * 0.39894228f * exponential(-0.5f * v * v);
                }
                break;
            case ATTENTION: attend(op, t, a, kept, z); break;
            case POOL:
                add_rows(rows, out, a, z);
                for (long n = 0; n < out; n++) z[n] /= rows;
                break;
            case MERGE:
                for (long n = 0; n < numbers; n++) z[n] = a[n] + f->value[op->other][n];
        }
    }
}

/* From the gradient e by the last value to that by all weights, in g. */
static void back(const struct call *call, struct path *f, struct sequence *t, const float *x, float *e) {
    for (long i = call->ops - 1; i >= 0; i--) {
        const struct op *op = call->op + i;
        long rows = op->rows, numbers = rows * wide(op), out = padded(op->out);
        float *a = f->value[i], *kept = f->kept[i], *g = f->g + t->place[i], *b = g + by_weight(op), *down = e == t->e[0] ? t->e[1] : t->e[0];
        switch (op->kind) {
            case EMBEDDING:
                memset(g, 0, rows * out * sizeof(float));
                for (long r = 0; r < rows; r++) t->seen[(long)x[r]] = -1;
                for (long r = 0; r < rows; r++) {
                    int *first = t->seen + (long)x[r];
                    if ((long)x[r] == op->other) continue;
                    if (*first < 0) *first = r;
                    for (long n = 0; n < op->out; n++) g[*first * out + n] += e[r * out + n];
                }
                return;
            case LINEAR:
                product(op->out, wide(op), rows, e, 1, out, a, t->none, 0, g);
                if (op->bias >= 0) add_rows(rows, out, e, b);
                if (i) product(rows, wide(op), op->out, e, out, 1, f->backward[i], t->none, 0, down);
                break;
            case LAYER_NORM:
                memset(g, 0, (by_weight(op) + by_bias(op)) * sizeof(float));
                memset(down, 0, numbers * sizeof(float));
                normalise_back(op, f->point, kept, e, g, b, down);
                break;
            case RELU:
                for (long n = 0; n < numbers; n++) down[n] = a[n] <= 0 ? 0 : e[n];
                break;
            case GELU:
                for (long n = 0; n < numbers; n++) down[n] = e[n] * kept[n];
                break;
            case ATTENTION:
                memset(down, 0, numbers * sizeof(float));
                attend_back(op, t, a, kept, e, down);
                break;
            case POOL:
                for (long r = 0; r < rows; r++)
                    for (long n = 0; n < out; n++) down[r * out + n] = e[n] / rows;
                break;
            case BRANCH:
                for (long n = 0; n < numbers; n++) down[n] = e[n] + t->aside[i][n];
                break;
            case MERGE: memcpy(t->aside[op->other], e, numbers * sizeof(float)); continue;
        }
        e = down;
    }
}

/* The weights of a point as products read them. */
static void unfold(const struct call *call, const float *w, struct path *f) {
    if (f->point == w) return;
    f->point = w;
    for (long i = 0; i < call->ops; i++) {
        const struct op *op = call->op + i;
        if (op->kind != LINEAR) continue;
        turn(op->out, op->in, w + op->weight, op->in, f->forward[i]);
        pack(op->out, op->in, w + op->weight, op->in, f->backward[i]);
        if (op->bias >= 0) memcpy(f->bias[i], w + op->bias, op->out * sizeof(float));
    }
}

static void carry_sequence(struct sequence *t) {
    for (long i = 0; i < t->size; i++) t->total[i] += t->sum[i];
    memset(t->sum, 0, t->size * sizeof(float));
    t->added = 0;
}

/* Adds a record's clipped gradient to the sums. */
static void add_record(const struct call *call, struct sequence *t, const float *x, const float *y, float weight, double clip) {
    const struct op *last = call->op + call->ops - 1, *first = call->op;
    float *g = t->path[0].g;
    int sound = 1;
    for (long p = 0; p < call->points; p++) {
        struct path *f = t->path + p;
        along(call, f, t, x);
        memset(t->e[0], 0, padded(last->out) * sizeof(float));
        slope(call->loss, last->out, f->value[call->ops], y, t->e[0]);
        back(call, f, t, x, t->e[0]);
        for (long i = 0; i < call->ops; i++)
            if (call->op[i].kind == LINEAR && call->op[i].rows == 1) sound &= square(f->value[i], wide(call->op + i)) < LONGEST * LONGEST;
    }
    if (call->points == 2)
        for (long i = 0; i < t->size; i++) g[i] -= t->path[1].g[i];
    double norm = sqrt(square(g, t->size));
    float part = sound && norm * norm < LONGEST * LONGEST ? share(norm, clip) * weight : 0;
    if (part == 0) return;
    for (long i = 0; i < t->size; i++) t->sum[i] += part * g[i];
    if (first->kind == EMBEDDING)
        for (long r = 0; r < first->rows; r++)
            for (long n = 0; n < first->out; n++) t->tokens[(long)x[r] * first->out + n] += part * g[r * padded(first->out) + n];
    if (++t->added == TOGETHER) carry_sequence(t);
}

/* One piece of one silo's records in one run; another number than 0 where a record holds a token that there is not. */
static long work_sequence(const struct call *call, struct sequence *t, long run, long silo, long piece) {
    const struct op *first = call->op;
    long in = first->rows * (first->kind == EMBEDDING ? 1 : first->in), table = first->kind == EMBEDDING ? first->setting * first->out : 0;
    long from = piece * call->records / call->pieces, to = (piece + 1) * call->records / call->pieces;
    const float *weight = call->weight + ((call->weighted ? run * call->silos : 0) + silo) * call->records;
    for (long p = 0; p < call->points; p++) unfold(call, point(call, p, run, silo), t->path + p);
    memset(t->total, 0, t->size * sizeof(double));
    memset(t->tokens, 0, table * sizeof(double));
    for (long r = from; r < to; r++) {
        const float *x = call->x + (silo * call->records + r) * in;
        if (weight[r] == 0) continue;
        for (long i = 0; table && i < in; i++)
            if (!(x[i] >= 0 && x[i] < first->setting)) return 1;
        add_record(call, t, x, call->y + (silo * call->records + r) * call->targets, weight[r], call->clip[run]);
    }
    carry_sequence(t);
    float *out = call->out + ((run * call->silos + silo) * call->pieces + piece) * call->dim;
    for (long i = 0; i < table; i++) out[first->weight + i] = t->tokens[i];
    for (long i = 0; i < call->ops; i++) {
        const struct op *op = call->op + i;
        const double *found = t->total + t->place[i];
        if (op->kind != EMBEDDING && op->weight >= 0)
            for (long r = 0; r < by_weight(op) / wide(op); r++)
                for (long n = 0; n < op->in; n++) out[op->weight + r * op->in + n] = found[r * wide(op) + n];
        if (op->bias >= 0)
            for (long n = 0; n < op->out; n++) out[op->bias + n] = found[by_weight(op) + n];
    }
    return 0;
}

static long lay_out_sequence(const struct call *call, float *at, struct sequence *t) {
    long used = 0, widest = 0, most = 0, longest = 0, head = 0;
    t->size = t->added = 0;
    for (long i = 0; i < call->ops; i++) {
        const struct op *op = call->op + i;
        long out = padded(op->out);
        t->place[i] = t->size, t->size += by_weight(op) + by_bias(op);
        widest = out > widest ? out : widest, widest = wide(op) > widest ? wide(op) : widest;
        most = op->rows > most ? op->rows : most;
        if (op->kind == ATTENTION) head = padded(op->out / op->setting) > head ? padded(op->out / op->setting) : head;
        longest = padded(op->rows) > longest ? padded(op->rows) : longest;
        t->aside[i] = op->kind == BRANCH ? take(at, &used, op->rows * out) : 0;
    }
    for (long p = 0; p < call->points; p++) {
        struct path *f = t->path + p;
        f->point = 0;
        f->g = take(at, &used, t->size);
        f->value[0] = call->op->kind == EMBEDDING ? 0 : take(at, &used, call->op->rows * wide(call->op));
        for (long i = 0; i < call->ops; i++) {
            const struct op *op = call->op + i;
            long kept = op->kind == GELU ? op->rows * wide(op) : op->kind == LAYER_NORM ? op->rows * (wide(op) + 1) : 0;
            if (op->kind == ATTENTION) kept = op->setting * op->rows * padded(op->rows);
            f->value[i + 1] = op->kind == BRANCH ? f->value[i] : take(at, &used, after(op) * padded(op->out));
            f->kept[i] = take(at, &used, kept);
            if (op->kind != LINEAR) continue;
            f->forward[i] = take(at, &used, op->in * padded(op->out));
            f->backward[i] = take(at, &used, op->out * wide(op));
            f->bias[i] = take(at, &used, padded(op->out));
        }
    }
    for (long k = 0; k < 2; k++) t->e[k] = take(at, &used, most * widest);
    for (long k = 0; k < 3; k++) t->side[k] = take(at, &used, most * head);
    t->turned = take(at, &used, head * longest);
    t->square = take(at, &used, most * longest);
    t->none = take(at, &used, widest > longest ? widest : longest);
    t->sum = take(at, &used, t->size);
    t->total = (double *)take(at, &used, 2 * t->size);
    long tokens = call->op->kind == EMBEDDING ? call->op->setting : 0;
    t->tokens = (double *)take(at, &used, 2 * tokens * call->op->out);
    t->seen = (int *)take(at, &used, tokens);
    return used;
}
