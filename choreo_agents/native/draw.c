/* A row's winner, as near as single precision tells, and whether that is near enough: what the kernel in
 * sampling/triton_kernel.py computes, step by step.
 */
#include "native.h"
#include "vectors.h"

enum { SURE = 0, NEAR = 1, UNSURE = 2 };

INLINE int any(ivec which) {
#if WIDTH == 16
    return _mm512_test_epi32_mask((__m512i)which, (__m512i)which) != 0;
#else
    return _mm256_movemask_ps((__m256)which) != 0;
#endif
}

/* Two to the x, for x <= 0, to two units in the last place; 0 below -126. */
INLINE vec power_of_two(vec x) {
    const vec magic = all(12582912.0f), turns = x + magic;
    const uvec power = ((uvec)turns - (uvec)magic) << 23;
    const vec r = (x - (turns - magic)) * 0.693147180559945f;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return pick(x > -126.0f, (vec)((uvec)p + power), (vec){0});
}

/* The natural logarithm of a normal number above 0, to a few units in the last place. */
INLINE vec logarithm(vec x) {
    const ivec bits = (ivec)x, halved = (bits & 0x7fffff) > 0x3504f3; /* above the root of two */
    const ivec exponent = (bits >> 23) - 127 - halved;                 /* `halved` is -1 where it holds */
    const vec m = (vec)((bits & 0x7fffff) | pick_bits(halved, 0x3f000000, 0x3f800000)) - 1.0f, z = m * m;
    vec p = all(7.0376836292e-2f);
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    return m * z * p - 0.5f * z + m + __builtin_convertvector(exponent, vec) * 0.693147180559945f;
}

INLINE uvec hashed(uvec words, uint32_t key, uint32_t later) { /* see noise.hashed */
    uvec bits = words + key;
    bits = ((bits ^ (bits >> 16)) * 0x7FEB352Du) ^ later;
    bits = (bits ^ (bits >> 15)) * 0x846CA68Bu;
    return bits ^ (bits >> 16);
}

/* -ln(1 - u) of the words' uniform numbers; see noise.gumbel. */
INLINE vec energy(uvec words, const uint32_t *key) {
    const uvec first = hashed(words, key[0], key[1]) & 0x7FFFFFFFu, rest = hashed(words, key[2], key[3]);
    const vec low = (floats_of(first) + (floats_of(rest) + 0.5f) * 0x1p-32f) * 0x1p-31f;
    const vec high = (floats_of(0x7FFFFFFFu - first) + (floats_of(~rest) + 0.5f) * 0x1p-32f) * 0x1p-31f;
    const vec series = low * (1.0f + low * (0.5f + low * (0.33333333f + low * 0.25f)));
    return pick(low < 0.015625f, series, -logarithm(high));
}

/* WIDTH logits, and -inf beyond the last. */
INLINE vec some(const float *logits, int64_t at, int64_t words) {
    if (at + WIDTH <= words) return load(logits + at);
    vec x = all(-INFINITY);
    for (int64_t i = at; i < words; i++) x[i - at] = logits[i];
    return x;
}

static int32_t ordered(int32_t number) { return number ^ ((number >> 31) & 0x7FFFFFFF); }

static float number_of(int32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static int32_t bits_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* The lowest logit of the `top_k` highest, found by halving. */
static float kept(const float *logits, int64_t words, float top, int32_t top_k) {
    int64_t low = -2139095041, high = (int64_t)ordered(bits_of(top)) + 1;
    while (high - low > 1) {
        const int64_t middle = (low + high) >> 1;
        const float least = number_of(ordered((int32_t)middle));
        ivec count = {0};
        for (int64_t at = 0; at < words; at += WIDTH) count -= some(logits, at, words) >= least;
        int64_t found = 0;
        for (int i = 0; i < WIDTH; i++) found += count[i];
        if (least == -INFINITY) found = words;
        if (found >= top_k) low = middle;
        if (found == top_k) high = middle + 1;
        if (found < top_k) high = middle;
    }
    return number_of(ordered((int32_t)low));
}

struct winners {
    vec best, next;
    ivec at, next_at;
};

INLINE void compete(struct winners *w, vec score, ivec at) {
    const ivec is_best = score > w->best, is_next = score > w->next;
    w->next_at = (is_best & w->at) | (~is_best & ((is_next & at) | (~is_next & w->next_at)));
    w->next = pick(is_best, w->best, pick(is_next, score, w->next));
    w->at = (is_best & at) | (~is_best & w->at);
    w->best = pick(is_best, score, w->best);
}

/* The two highest of all lanes, and the third as far as it is known; the first word of equal ones. */
static void rank(const struct winners *w, int32_t first[2], float high[3]) {
    high[0] = high[1] = high[2] = -INFINITY, first[0] = first[1] = 0;
    for (int i = 0; i < WIDTH; i++)
        for (int j = 0; j < 2; j++) {
            const float score = j ? w->next[i] : w->best[i];
            const int32_t at = j ? w->next_at[i] : w->at[i];
            if (score > high[0] || (score == high[0] && at < first[0])) {
                high[2] = high[1], high[1] = high[0], first[1] = first[0], high[0] = score, first[0] = at;
            } else if (score > high[1] || (score == high[1] && at < first[1])) {
                high[2] = high[1], high[1] = score, first[1] = at;
            } else if (score > high[2])
                high[2] = score;
        }
    /* Of a lane whose two best are the two highest a third is not known: it is no higher than the second. */
    for (int i = 0; i < WIDTH; i++) {
        const int both = (w->at[i] == first[0] && w->next_at[i] == first[1]) || (w->at[i] == first[1] && w->next_at[i] == first[0]);
        if (both && w->next[i] > -INFINITY) high[2] = high[1];
    }
}

static void draw_one(const struct drawing *drawing, int64_t number) {
    const int32_t *asked = drawing->asked + 9 * number;
    int32_t *told = drawing->told + 6 * number;
    const int64_t words = drawing->words;
    const float *logits = drawing->logits + asked[0] * drawing->row;
    const float scale = number_of(asked[2]), min_p = number_of(asked[3]), top_p = number_of(asked[4]);
    const uint32_t *key = (const uint32_t *)asked + 5;
    ivec lanes, strange = {0};
    for (int i = 0; i < WIDTH; i++) lanes[i] = i;

    vec best = all(-INFINITY);
    for (int64_t at = 0; at < words; at += WIDTH) {
        const vec x = some(logits, at, words);
        strange |= x != x;
        best = pick(x > best, x, best);
    }
    float top = best[0];
    for (int i = 1; i < WIDTH; i++) top = best[i] > top ? best[i] : top;
    int32_t first[2] = {0, 0};
    for (int64_t at = 0; at < words; at++)
        if (logits[at] == top) {
            first[0] = first[1] = (int32_t)at;
            break;
        }
    int kind = !any(strange) && top > drawing->lowest && top <= drawing->highest ? SURE : UNSURE;

    if (kind == SURE && scale > 0) {
        const float bound = asked[1] > 0 ? kept(logits, words, top, asked[1]) : -INFINITY;
        float total = 1, least = min_p;
        if (top_p < 1) {
            vec weights = {0};
            for (int64_t at = 0; at < words; at += WIDTH) {
                const vec x = some(logits, at, words);
                weights += pick(x >= bound, power_of_two((x - top) * scale), (vec){0});
            }
            total = sum_of(weights);
            /* Words so unlikely that all of them together were less than what the nucleus leaves out. */
            const float outside = log2f((1 - top_p) * total / (float)words) - 0.01f;
            least = outside > least ? outside : least;
        }
        float ruled_out = -1;
        for (int goes_on = 1; goes_on;) {
            struct winners w = {all(-INFINITY), all(-INFINITY), {0}, {0}};
            for (int64_t at = 0; at < words; at += WIDTH) {
                const vec x = some(logits, at, words), own = (x - top) * scale;
                ivec may = (x >= bound) & (own >= least) & (x > -INFINITY);
                if (ruled_out >= 0) may &= power_of_two(own) > ruled_out;
                if (!any(may)) continue;
                const ivec ids = lanes + (int32_t)at;
                const vec score = own - logarithm(energy((uvec)ids, key)) * 1.44269504088896341f;
                compete(&w, pick(may, score, all(-INFINITY)), ids);
            }
            float high[3];
            rank(&w, first, high);
            const int is_near = high[0] - high[1] <= drawing->margin;
            kind = high[0] - high[2] <= drawing->margin ? UNSURE : is_near ? NEAR : SURE;
            if (high[0] == -INFINITY) kind = UNSURE;
            goes_on = 0;
            if (top_p < 1 && kind != UNSURE) {
                const float mine = power_of_two(all((logits[first[0]] - top) * scale))[0];
                const float other = power_of_two(all((logits[first[1]] - top) * scale))[0];
                const int is_other = is_near && other < mine;
                const float weight = is_other ? other : mine, its = logits[first[is_other]];
                const int32_t it = first[is_other];
                const float from = weight * (1 - drawing->alike) - drawing->least;
                const float beyond = mine * (1 + drawing->alike) + drawing->least;
                vec upto = {0}, above = {0};
                for (int64_t at = 0; at < words; at += WIDTH) {
                    const vec x = some(logits, at, words);
                    const vec own = pick(x >= bound, power_of_two((x - top) * scale), (vec){0});
                    const ivec is_behind = (x == its) & (lanes + (int32_t)at >= it);
                    upto += pick((own > from) & ~is_behind, own, (vec){0});
                    above += pick(own > beyond, own, (vec){0});
                }
                if (sum_of(upto) * (1 + drawing->lost) >= top_p * total * (1 - drawing->lost)) {
                    kind = UNSURE;
                    if (sum_of(above) >= top_p * total * (1 + drawing->lost) && mine > ruled_out)
                        ruled_out = mine, goes_on = 1;
                }
            }
        }
    }
    told[0] = first[0], told[1] = first[1], told[2] = kind;
    told[3] = bits_of(logits[first[0]]), told[4] = bits_of(logits[first[1]]), told[5] = bits_of(top);
}

struct draws {
    const struct drawing *drawing;
    atomic_int next;
};

static void draw_some(void *data) {
    struct draws *draws = data;
    for (;;) {
        const int number = atomic_fetch_add(&draws->next, 1);
        if (number >= draws->drawing->draws) return;
        draw_one(draws->drawing, number);
    }
}

void NAMED(draw)(const struct drawing *drawing) {
    struct draws draws = {.drawing = drawing};
    if (drawing->parallel && drawing->threads > 1 && drawing->draws > 1)
        drawing->parallel(draw_some, &draws, (unsigned)drawing->threads, 0);
    else
        draw_some(&draws);
}
