// Local SGD's steps of a round, a block for a few networks of one silo: a network's weights stay in registers from the first step to the last.
//
// A thread has one hidden unit: its INPUTS weights, its bias and its OUTPUTS weights of the second layer; the second bias is held by all alike.
// Parameters of a network and its noise lie as [INPUTS + 1 + OUTPUTS][HIDDEN] and OUTPUTS behind, so that neighbours read neighbours.
// INPUTS, HIDDEN, OUTPUTS, TOGETHER, ADAM and the betas of Adam are defined by whoever compiles this.

#define OWN (INPUTS + 1 + OUTPUTS)
#define DIM (OWN * HIDDEN + OUTPUTS)
#define WARPS (HIDDEN / 32)
#define SUMS (OUTPUTS + 1)

struct Parameter {
    float value;
#if ADAM
    float first, second;
#endif
    __device__ void step(float gradient, float pace, float even1, float even2) {
#if ADAM
        first = BETA1 * first + (1.f - BETA1) * gradient;
        second = BETA2 * second + (1.f - BETA2) * gradient * gradient;
        value -= pace * (first * even1) / (sqrtf(second * even2) + SMALL);
#else
        value -= pace * gradient;
#endif
    }
};

// Adds up over a network's HIDDEN threads, and tells each of them; every thread of the block comes here.
template <int COUNT>
__device__ void added(float (&values)[COUNT], float (*room)[SUMS], int warp) {
    for (int i = 0; i < COUNT; i++)
        for (int other = 16; other; other /= 2) values[i] += __shfl_xor_sync(0xffffffffu, values[i], other);
    __syncthreads();
    if (threadIdx.x % 32 == 0)
        for (int i = 0; i < COUNT; i++) room[warp][i] = values[i];
    __syncthreads();
    for (int i = 0; i < COUNT; i++) {
        values[i] = 0.f;
        for (int w = 0; w < WARPS; w++) values[i] += room[warp / WARPS * WARPS + w][i];
    }
}

// state (S, G, DIM); x (K, S, most, INPUTS), squares and y (K, S, most), of which the first count (K, S) are there; noise (K, S, DIM);
// settings (S, G, 3): clip, pace and the noise's standard deviation.
extern "C" __global__ void __launch_bounds__(HIDDEN * TOGETHER, ADAM ? 2 : 4) walk(
    float* state, const float* x, const float* squares, const int* y, const int* count, const float* noise, const float* settings,
    int steps, int silos, int runs, int most, int noisy
) {
    extern __shared__ float shared[];
    float* record = shared;                                // (most, INPUTS)
    float* slope = record + most * INPUTS;                 // (most, threads)
    float* active = slope + most * blockDim.x;             // (most, threads)
    float* outer = active + most * blockDim.x;             // (most, TOGETHER, OUTPUTS)
    __shared__ float room[TOGETHER * WARPS][SUMS];
    const int thread = threadIdx.x, net = thread / HIDDEN, hidden = thread % HIDDEN, warp = thread / 32, silo = blockIdx.y;
    const int run = blockIdx.x * TOGETHER + net;
    const bool there = run < runs;  // whoever has no network goes along, for the others' sake
    const long long at = (long long)silo * runs + (there ? run : 0);
    const float clip = settings[3 * at], pace = settings[3 * at + 1], deviation = settings[3 * at + 2];

    Parameter own[OWN], last[OUTPUTS];
    for (int i = 0; i < OWN; i++) own[i] = Parameter{state[at * DIM + i * HIDDEN + hidden]};
    for (int o = 0; o < OUTPUTS; o++) last[o] = Parameter{state[at * DIM + OWN * HIDDEN + o]};

    float power1 = 1.f, power2 = 1.f;  // of the betas
    for (int k = 0; k < steps; k++) {
        const long long here = (long long)k * silos + silo;
        const int records = count[here];
        __syncthreads();  // until all are done with the last step's records
        for (int i = thread; i < records * INPUTS; i += blockDim.x) record[i] = x[here * most * INPUTS + i];
        __syncthreads();
        for (int r = 0; r < records; r++) {
            float z = own[INPUTS].value;
#pragma unroll
            for (int i = 0; i < INPUTS; i++) z += own[i].value * record[r * INPUTS + i];
            const float a = z > 0.f || z != z ? z : 0.f;
            float sums[SUMS];
            for (int o = 0; o < OUTPUTS; o++) sums[o] = own[INPUTS + 1 + o].value * a;
            sums[OUTPUTS] = a * a;
            added(sums, room, warp);
            float largest = sums[0] + last[0].value, total = 0.f, e2[OUTPUTS], square2 = 0.f, e1 = 0.f;
            for (int o = 0; o < OUTPUTS; o++) largest = fmaxf(largest, sums[o] += last[o].value);
            for (int o = 0; o < OUTPUTS; o++) total += e2[o] = expf(sums[o] - largest);
            for (int o = 0; o < OUTPUTS; o++) {
                e2[o] = e2[o] / total - (y[here * most + r] == o);
                square2 += e2[o] * e2[o];
                e1 += own[INPUTS + 1 + o].value * e2[o];
            }
            e1 = a > 0.f ? e1 : a != a ? a : 0.f;
            float square1[1] = {e1 * e1};
            added(square1, room, warp);
            const float norm = sqrtf(square1[0] * (squares[here * most + r] + 1.f) + square2 * (sums[OUTPUTS] + 1.f));
            const bool sound = norm <= 3.402823466e38f;  // no for what is not a number
            const float scale = sound ? clip / fmaxf(norm, clip) : 0.f;
            slope[r * blockDim.x + thread] = sound ? scale * e1 : 0.f;
            active[r * blockDim.x + thread] = sound ? a : 0.f;
            if (hidden == 0)
                for (int o = 0; o < OUTPUTS; o++) outer[(r * TOGETHER + net) * OUTPUTS + o] = sound ? scale * e2[o] : 0.f;
        }
        __syncthreads();

#if ADAM
        power1 *= BETA1, power2 *= BETA2;
#endif
        const float even1 = 1.f / (1.f - power1), even2 = 1.f / (1.f - power2);
        const float* drawn = noise + here * DIM;
        float gradient[OWN];
#pragma unroll
        for (int i = 0; i < OWN; i++) gradient[i] = noisy ? deviation * drawn[i * HIDDEN + hidden] : 0.f;
        for (int r = 0; r < records; r++) {
            const float e = slope[r * blockDim.x + thread], a = active[r * blockDim.x + thread];
#pragma unroll
            for (int i = 0; i < INPUTS; i++) gradient[i] += e * record[r * INPUTS + i];
            gradient[INPUTS] += e;
            for (int o = 0; o < OUTPUTS; o++) gradient[INPUTS + 1 + o] += outer[(r * TOGETHER + net) * OUTPUTS + o] * a;
        }
#pragma unroll
        for (int i = 0; i < OWN; i++) own[i].step(gradient[i], pace, even1, even2);
        for (int o = 0; o < OUTPUTS; o++) {
            float sum = noisy ? deviation * drawn[OWN * HIDDEN + o] : 0.f;
            for (int r = 0; r < records; r++) sum += outer[(r * TOGETHER + net) * OUTPUTS + o];
            last[o].step(sum, pace, even1, even2);
        }
    }
    if (!there) return;
    for (int i = 0; i < OWN; i++) state[at * DIM + i * HIDDEN + hidden] = own[i].value;
    if (hidden == 0)
        for (int o = 0; o < OUTPUTS; o++) state[at * DIM + OWN * HIDDEN + o] = last[o].value;
}
