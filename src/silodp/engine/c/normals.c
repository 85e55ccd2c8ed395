/* The float32 normals of numpy.random.Generator on PCG64, number for number: its ziggurat on its state, without a call and a mispredicted sign
for each of them. Tables come from the ziggurat's definition: 256 layers of one area, the lowest with the tail beyond TAIL.
*/
#define TAIL 3.6541528853610088
#define AREA 0.00492867323397465524494
#define FACTOR (((unsigned __int128)2549297995355413924ULL << 64) + 4865540595714422341ULL)

struct pcg { unsigned __int128 state, increment; };
struct bits { struct pcg *pcg; int kept; uint32_t upper; }; /* numpy's pcg64_state: a step gives two numbers, and one may be left */

static struct { uint32_t inside[256]; float width[256], height[256]; } ziggurat;

__attribute__((constructor)) static void make_ziggurat(void)
{
    double x = TAIL, base = AREA / exp(-0.5 * TAIL * TAIL), unit = 1 << 23;
    ziggurat.inside[0] = (uint32_t)lrint(TAIL / base * unit);
    ziggurat.width[0] = base / unit;
    ziggurat.height[0] = 1;
    for (int i = 255; i > 0; i--) {
        double above = i > 1 ? sqrt(-2 * log(AREA / x + exp(-0.5 * x * x))) : 0;
        ziggurat.inside[i] = (uint32_t)lrint(above / x * unit);
        ziggurat.width[i] = x / unit;
        ziggurat.height[i] = exp(-0.5 * x * x);
        x = above;
    }
}

INLINE uint32_t next(struct bits *b, struct pcg *pcg)
{
    if (b->kept) {
        b->kept = 0;
        return b->upper;
    }
    pcg->state = pcg->state * FACTOR + pcg->increment;
    uint64_t mixed = (uint64_t)(pcg->state >> 64) ^ (uint64_t)pcg->state;
    unsigned turn = pcg->state >> 122;
    mixed = mixed >> turn | mixed << (-turn & 63);
    b->kept = 1;
    b->upper = mixed >> 32;
    return (uint32_t)mixed;
}

INLINE float uniform(struct bits *b, struct pcg *pcg) { return (next(b, pcg) >> 8) * 0x1p-24f; }

/* A number outside its layer's box: from the tail, or below the curve, or again. */
static __attribute__((noinline, optimize("fp-contract=off"))) float rare(struct bits *b, struct pcg *pcg, uint32_t r, float x)
{
    for (;;) {
        uint32_t i = r & 255;
        if (i == 0) {
            for (;;) {
                float beyond = -(float)(1 / TAIL) * log1pf(-uniform(b, pcg)), y = -log1pf(-uniform(b, pcg));
                if (y + y > beyond * beyond)
                    return r >> 17 & 1 ? -((float)TAIL + beyond) : (float)TAIL + beyond;
            }
        }
        if ((ziggurat.height[i - 1] - ziggurat.height[i]) * uniform(b, pcg) + ziggurat.height[i] < exp(-0.5 * x * x))
            return x;
        r = next(b, pcg);
        x = (r >> 9) * ziggurat.width[r & 255];
        x = r >> 8 & 1 ? -x : x;
        if (r >> 9 < ziggurat.inside[r & 255])
            return x;
    }
}

/* Fills out with the next `count` normals, fewer if the generator comes to the state `stop` with nothing left over; how many there are. */
static long fill(struct bits *b, struct pcg *p, float *out, long count, const unsigned __int128 *stop)
{
    struct pcg pcg = *p;
    struct bits bits = *b;
    long k = 0;
    for (; k < count && !(stop && !bits.kept && pcg.state == *stop); k++) {
        uint32_t r = next(&bits, &pcg), sign = (r & 256) << 23, shown;
        float x = (r >> 9) * ziggurat.width[r & 255];
        memcpy(&shown, &x, 4);
        shown ^= sign;
        memcpy(&x, &shown, 4);
        out[k] = __builtin_expect(r >> 9 < ziggurat.inside[r & 255], 1) ? x : rare(&bits, &pcg, r, x);
    }
    *p = pcg, *b = bits;
    return k;
}

/* The generator so many steps on: a step is an affine map, and so are two, four and eight. */
static unsigned __int128 ahead(struct pcg pcg, long steps)
{
    unsigned __int128 factor = FACTOR, plus = pcg.increment;
    for (; steps; steps >>= 1, plus *= factor + 1, factor *= factor)
        if (steps & 1) pcg.state = pcg.state * factor + plus;
    return pcg.state;
}

/* Fills out with the next `count` normals of the generator whose state this is, and leaves it as numpy would.

Two threads take the states in two halves. How many numbers the first half makes shows only then, as a rare one takes several steps, so the second's
are moved to where they belong; and where a rare one spans the middle, once in eighty times, they are not the next numbers, and are made again.
*/
void normals(struct bits *state, float *out, long count, long threads)
{
    struct pcg pcg = *state->pcg, beyond = pcg;
    struct bits bits = *state, after;
    long done = 0;
    if (threads > 1 && count >= 1 << 14) {
        while (bits.kept) done += fill(&bits, &pcg, out + done, 1, 0);
        long half = (count - done) / 2, rest = count - done - half, made = 0;
        unsigned __int128 middle = beyond.state = ahead(pcg, half / 2);
        after = bits;
#pragma omp parallel sections num_threads(2)
        {
#pragma omp section
            made = fill(&bits, &pcg, out + done, half, &middle);
#pragma omp section
            fill(&after, &beyond, out + done + half, rest, 0);
        }
        if (!bits.kept && pcg.state == middle) {
            memmove(out + done + made, out + done + half, rest * sizeof(float));
            made += rest, pcg = beyond, bits = after;
        }
        done += made;
    }
    fill(&bits, &pcg, out + done, count - done, 0);
    *state->pcg = pcg;
    *state = bits;
}
