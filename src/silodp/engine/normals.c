/* The float32 normals of numpy.random.Generator on PCG64, number for number: its ziggurat on its state, without a call and a mispredicted sign
for each of them. Tables come from the ziggurat's definition: 256 layers of one area, the lowest with the tail beyond TAIL.
*/
#define TAIL 3.6541528853610088
#define AREA 0.00492867323397465524494

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
    pcg->state = pcg->state * (((unsigned __int128)2549297995355413924ULL << 64) + 4865540595714422341ULL) + pcg->increment;
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

/* Fills out with the next `count` normals of the generator whose state this is, and leaves it as numpy would. */
void normals(struct bits *state, float *out, long count)
{
    struct pcg pcg = *state->pcg;
    struct bits bits = *state;
    for (long k = 0; k < count; k++) {
        uint32_t r = next(&bits, &pcg), sign = (r & 256) << 23, shown;
        float x = (r >> 9) * ziggurat.width[r & 255];
        memcpy(&shown, &x, 4);
        shown ^= sign;
        memcpy(&x, &shown, 4);
        out[k] = __builtin_expect(r >> 9 < ziggurat.inside[r & 255], 1) ? x : rare(&bits, &pcg, r, x);
    }
    *state->pcg = pcg;
    *state = bits;
}
