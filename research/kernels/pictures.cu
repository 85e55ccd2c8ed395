/* Two stages of convolution, ReLU and 2 x 2 max-pooling on a GPU, for many runs over the same records: what torch does in thirty kernels.

Sizes are set when it is compiled (`pictures.py`): pictures CHANNELS x HEIGHT x WIDTH, kernels of SIDE x SIDE without padding, O1 and O2
outputs, pooled to ROWS1 x COLUMNS1 and ROWS2 x COLUMNS2; W1, B1, W2 and B2 say where weights and biases lie in a point.
A block has the records `first` to `first + step` of one silo in one run, one after the other. A pooled place keeps which of its four it chose:
behind it the gradient is zero at the others, so that a weight's gradient is a sum over pooled places alone.
*/
#define TAPS (SIDE * SIDE)
#define PLACES1 (ROWS1 * COLUMNS1)
#define PLACES2 (ROWS2 * COLUMNS2)
#define EVEN(n) (((n) + 1) / 2 * 2)
#define GRADIENT (O1 * CHANNELS * TAPS + O1 + O2 * O1 * TAPS + O2)
#define NOT_A_NUMBER(v) ((v) != (v))

typedef unsigned char byte;

/* The largest of four and which it is, as torch has it: the first of equals, and NaN before all. */
__device__ __forceinline__ float pooled(const float *four, int *choice) {
    float most = four[0];
    *choice = 0;
#pragma unroll
    for (int i = 1; i < 4; i++)
        if (four[i] > most || NOT_A_NUMBER(four[i])) most = four[i], *choice = i;
    return most <= 0 ? 0 : most;
}

/* Adds to total[o][four places] the products of a (SIDE + 1)^2 patch with `outputs` weights that lie side by side, tap after tap. */
template <int outputs>
__device__ __forceinline__ void stage(float (*total)[4], const float *patch, int row, const float *weight, int across) {
    float v[SIDE + 1][SIDE + 1];
#pragma unroll
    for (int i = 0; i <= SIDE; i++)
#pragma unroll
        for (int j = 0; j <= SIDE; j += 2) {
            float2 two = *(const float2 *)(patch + i * row + j);
            v[i][j] = two.x, v[i][j + 1] = two.y;
        }
#pragma unroll
    for (int i = 0; i < SIDE; i++)
#pragma unroll
        for (int j = 0; j < SIDE; j++)
#pragma unroll
            for (int o = 0; o < outputs; o += 2) {
                float2 two = *(const float2 *)(weight + (i * SIDE + j) * across + o);
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    float here = v[i + k / 2][j + k % 2];
                    total[o][k] += two.x * here;
                    total[o + 1][k] += two.y * here;
                }
            }
}

extern "C" __global__ void __launch_bounds__(THREADS) forward(
    const float *x, const float *w, const float *share, float *first_out, byte *first_choice, float *second_out, byte *second_choice,
    int records, int of_run, int of_silo, int step) {
    const int silo = blockIdx.y, wide = EVEN(WIDTH), wide1 = EVEN(COLUMNS1), across1 = EVEN(O1);
    const long run = blockIdx.z, cell = run * gridDim.y + silo;
    __shared__ __align__(16) float picture[CHANNELS * HEIGHT * EVEN(WIDTH)], between[O1 * ROWS1 * EVEN(COLUMNS1) + 2];
    __shared__ __align__(16) float weight1[CHANNELS * TAPS * EVEN(O1)], weight2[O1 * TAPS * O2], bias1[EVEN(O1)], bias2[O2];
    w += run * of_run + (long)silo * of_silo;
    for (int i = threadIdx.x; i < CHANNELS * TAPS * across1; i += THREADS) {
        int o = i % across1;
        weight1[i] = o < O1 ? w[W1 + o * CHANNELS * TAPS + i / across1] : 0;
    }
    for (int i = threadIdx.x; i < O1 * TAPS * O2; i += THREADS) weight2[i] = w[W2 + i % O2 * O1 * TAPS + i / O2];
    for (int i = threadIdx.x; i < across1; i += THREADS) bias1[i] = i < O1 ? w[B1 + i] : 0;
    for (int i = threadIdx.x; i < O2; i += THREADS) bias2[i] = w[B2 + i];
    const int last = min(records, (int)(blockIdx.x + 1) * step);
    for (int n = blockIdx.x * step; n < last; n++) {
        if (share[(long)silo * records + n] == 0) continue; /* nobody reads what is not written of it */
        const float *from = x + ((long)silo * records + n) * (CHANNELS * HEIGHT * WIDTH);
        for (int i = threadIdx.x; i < CHANNELS * HEIGHT * WIDTH; i += THREADS) picture[i / WIDTH * wide + i % WIDTH] = from[i];
        __syncthreads();
        const long at = cell * records + n;
        for (int place = threadIdx.x; place < PLACES1; place += THREADS) {
            float total[EVEN(O1)][4] = {};
            int row = place / COLUMNS1, column = place % COLUMNS1;
            for (int c = 0; c < CHANNELS; c++)
                stage<EVEN(O1)>(total, picture + (c * HEIGHT + 2 * row) * wide + 2 * column, wide, weight1 + c * TAPS * across1, across1);
#pragma unroll
            for (int o = 0; o < O1; o++) {
                int choice;
#pragma unroll
                for (int k = 0; k < 4; k++) total[o][k] += bias1[o];
                float most = pooled(total[o], &choice);
                between[(o * ROWS1 + row) * wide1 + column] = most;
                first_out[at * (O1 * PLACES1) + o * PLACES1 + place] = most;
                first_choice[at * (O1 * PLACES1) + o * PLACES1 + place] = choice;
            }
        }
        __syncthreads();
        for (int item = threadIdx.x; item < PLACES2 * (O2 / 2); item += THREADS) {
            float total[2][4] = {};
            int place = item % PLACES2, o = item / PLACES2 * 2, row = place / COLUMNS2, column = place % COLUMNS2;
            for (int c = 0; c < O1; c++)
                stage<2>(total, between + (c * ROWS1 + 2 * row) * wide1 + 2 * column, wide1, weight2 + c * TAPS * O2 + o, O2);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int choice;
#pragma unroll
                for (int k = 0; k < 4; k++) total[i][k] += bias2[o + i];
                second_out[at * (O2 * PLACES2) + (o + i) * PLACES2 + place] = pooled(total[i], &choice);
                second_choice[at * (O2 * PLACES2) + (o + i) * PLACES2 + place] = choice;
            }
        }
    }
}

/* Distances between rows at which the taps of a kernel of 5 lie in different banks of shared memory. */
#define APART(n) ((n) <= 19 ? 19 : (n) <= 38 ? 38 : (n))

/* From the gradient `slope` by the second stage's output: each record's gradient by both stages' parameters, and its squared norm.
A warp has a channel between the stages, O1 in all, and a lane a tap of the kernel; the lane behind the taps has the bias, whose input is 1. */
extern "C" __global__ void __launch_bounds__(32 * O1, 5) backward(
    const float *x, const float *w, const float *share, const float *first_out, const byte *first_choice, const float *second_out,
    const byte *second_choice, const float *slope, float *gradient, double *square, int records, int of_run, int of_silo, int step) {
    const int silo = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, threads = 32 * O1, wide = APART(WIDTH), wide1 = APART(COLUMNS1);
    const long run = blockIdx.z, cell = run * gridDim.y + silo;
    __shared__ float picture[CHANNELS * HEIGHT * APART(WIDTH)], between[O1 * ROWS1 * APART(COLUMNS1)], by_between[O1 * ROWS1 * APART(COLUMNS1)];
    __shared__ __align__(16) float e2[4 * PLACES2 * O2]; /* by the second convolution's output: place after place, zero where it was not chosen */
    __shared__ __align__(8) float2 staged[O1][32];
    __shared__ double squares[O1];
    const int tap = min(lane, TAPS - 1), at0 = tap / SIDE * wide + tap % SIDE, at1 = tap / SIDE * wide1 + tap % SIDE;
    const bool there = lane < TAPS;
    float weight[O2];
    w += run * of_run + (long)silo * of_silo;
#pragma unroll
    for (int o = 0; o < O2; o++) weight[o] = w[W2 + (o * O1 + warp) * TAPS + tap];
    const int last = min(records, (int)(blockIdx.x + 1) * step);
    for (int n = blockIdx.x * step; n < last; n++) {
        if (share[(long)silo * records + n] == 0) continue;
        const long at = cell * records + n;
        const float *from = x + ((long)silo * records + n) * (CHANNELS * HEIGHT * WIDTH);
        float *out1 = gradient + at * GRADIENT, *bias1 = out1 + O1 * CHANNELS * TAPS, *out2 = bias1 + O1, *bias2 = out2 + O2 * O1 * TAPS;
        __syncthreads(); /* of the record before */
        for (int i = threadIdx.x; i < CHANNELS * HEIGHT * WIDTH; i += threads) picture[i / WIDTH * wide + i % WIDTH] = from[i];
        for (int i = threadIdx.x; i < O1 * PLACES1; i += threads) {
            int k = i / COLUMNS1 * wide1 + i % COLUMNS1;
            between[k] = first_out[at * (O1 * PLACES1) + i];
            by_between[k] = 0;
        }
        for (int i = threadIdx.x; i < O2 * PLACES2; i += threads) {
            int o = i % O2, place = i / O2;
            const long there2 = at * (O2 * PLACES2) + o * PLACES2 + place;
            int choice = second_choice[there2], corner = place / COLUMNS2 * 4 * COLUMNS2 + place % COLUMNS2 * 2;
            float here = slope[there2];
            here = second_out[there2] > 0 || NOT_A_NUMBER(here) ? here : 0;
#pragma unroll
            for (int k = 0; k < 4; k++) e2[(corner + k / 2 * 2 * COLUMNS2 + k % 2) * O2 + o] = k == choice ? here : 0;
        }
        __syncthreads();
        double found = 0;
        float by_weight[O2] = {}, *mine = by_between + warp * ROWS1 * wide1; /* a warp's own channel: nobody else adds to it */
        const float *its = between + warp * ROWS1 * wide1;
        for (int row = 0; row < 2 * ROWS2; row++)
#pragma unroll 2
            for (int column = 0; column < 2 * COLUMNS2; column++) {
                const float4 *e = (const float4 *)(e2 + (row * 2 * COLUMNS2 + column) * O2);
                float input = there ? its[row * wide1 + column + at1] : 1, back[4] = {};
#pragma unroll
                for (int o = 0; o < O2 / 4; o++) {
                    float4 four = e[o];
                    by_weight[4 * o] += four.x * input, back[0] += four.x * weight[4 * o];
                    by_weight[4 * o + 1] += four.y * input, back[1] += four.y * weight[4 * o + 1];
                    by_weight[4 * o + 2] += four.z * input, back[2] += four.z * weight[4 * o + 2];
                    by_weight[4 * o + 3] += four.w * input, back[3] += four.w * weight[4 * o + 3];
                }
                if (there) mine[row * wide1 + column + at1] += (back[0] + back[1]) + (back[2] + back[3]);
                __syncwarp();
            }
#pragma unroll
        for (int o = 0; o < O2; o++)
            if (there || (lane == TAPS && warp == 0)) {
                *(there ? out2 + (o * O1 + warp) * TAPS + lane : bias2 + o) = by_weight[o];
                found += (double)by_weight[o] * by_weight[o];
            }
        float total[CHANNELS] = {}, bias = 0;
        for (int start = 0; start < PLACES1; start += 32) { /* the first weight, for the same channel */
            int place = start + lane, base = 0;
            float e = 0;
            if (place < PLACES1) {
                int row = place / COLUMNS1, column = place % COLUMNS1, choice = first_choice[(at * O1 + warp) * PLACES1 + place];
                float here = mine[row * wide1 + column];
                e = its[row * wide1 + column] > 0 || NOT_A_NUMBER(here) ? here : 0;
                base = (2 * row + choice / 2) * wide + 2 * column + choice % 2;
            }
            staged[warp][lane] = make_float2(e, __int_as_float(base));
            bias += e;
            __syncwarp();
#pragma unroll 8
            for (int i = 0; i < min(32, PLACES1 - start); i++) {
                float2 two = staged[warp][i];
                const float *patch = picture + __float_as_int(two.y) + at0;
#pragma unroll
                for (int c = 0; c < CHANNELS; c++) total[c] += two.x * patch[c * HEIGHT * wide];
            }
            __syncwarp();
        }
#pragma unroll
        for (int c = 0; c < CHANNELS; c++)
            if (there) {
                out1[(warp * CHANNELS + c) * TAPS + lane] = total[c];
                found += (double)total[c] * total[c];
            }
        for (int k = 16; k; k /= 2) bias += __shfl_xor_sync(0xffffffff, bias, k);
        if (lane == 0) {
            bias1[warp] = bias;
            found += (double)bias * bias;
        }
        for (int k = 16; k; k /= 2) found += __shfl_xor_sync(0xffffffff, found, k);
        if (lane == 0) squares[warp] = found;
        __syncthreads();
        if (threadIdx.x == 0) {
            for (int i = 1; i < O1; i++) found += squares[i];
            square[at] = found;
        }
    }
}

/* The sum over a silo's records of scale x gradient; a record of scale 0 may hold anything. */
extern "C" __global__ void add(const float *gradient, const float *scale, float *out, int records) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const long cell = blockIdx.y;
    if (i >= GRADIENT) return;
    float total = 0;
    for (int n = 0; n < records; n++) {
        float share = scale[cell * records + n];
        if (share != 0) total += share * gradient[(cell * records + n) * GRADIENT + i];
    }
    out[cell * GRADIENT + i] = total;
}
