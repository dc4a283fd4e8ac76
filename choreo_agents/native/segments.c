/* Attention of a step over runs of slots: each run's keys are read once for all its readers, parts are merged.
 *
 * All sums are in fp32, whatever keys and values are kept in, and the order of each is given by the plan alone, not by
 * threads. attention/backends/native.py says what the plan holds.
 */
#include "native.h"
#include "vectors.h"

#include "tiles.h"

#define BLOCK 64 /* slots at a time */

typedef float vec8 __attribute__((vector_size(32)));
typedef uint16_t half8 __attribute__((vector_size(16)));
typedef uint32_t uvec8 __attribute__((vector_size(32)));

INLINE vec8 wide8(const void *from, int dtype) {
    if (dtype == FP32) {
        vec8 x;
        memcpy(&x, from, sizeof x);
        return x;
    }
    half8 x;
    memcpy(&x, from, sizeof x);
    return (vec8)(__builtin_convertvector(x, uvec8) << 16);
}

INLINE uint16_t rounded(float x) { /* to bfloat16, ties to even */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 64);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE float number(const void *from, int64_t at, int dtype) {
    if (dtype == FP32) return ((const float *)from)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE const void *element(const void *from, int64_t at, int dtype) {
    return (const char *)from + at * (dtype == FP32 ? 4 : 2);
}

/* c[rows][columns] += a[rows][depth] b[depth][columns], for `rows` up to 6 and two vectors of columns or one. */
INLINE void tile(const int rows, const int vectors, int64_t depth, const float *a, int64_t a_row, const float *b,
                 int64_t b_row, float *c, int64_t c_row, const int adds) {
    vec sum[6][2];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) sum[i][j] = adds ? load(c + i * c_row + j * WIDTH) : (vec){0};
    for (int64_t k = 0; k < depth; k++) {
        vec right[2];
        for (int j = 0; j < vectors; j++) right[j] = load(b + k * b_row + j * WIDTH);
        for (int i = 0; i < rows; i++) {
            float left = a[i * a_row + k];
            for (int j = 0; j < vectors; j++) sum[i][j] += left * right[j];
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++) store(c + i * c_row + j * WIDTH, sum[i][j]);
}

#define PRODUCTS(ROWS)                                                                                                   \
    static void tiles_##ROWS(int64_t depth, int64_t columns, const float *a, int64_t a_row, const float *b,           \
                             int64_t b_row, float *c, int64_t c_row, int adds) {                                      \
        int64_t j = 0;                                                                                                \
        for (; j + 2 * WIDTH <= columns; j += 2 * WIDTH) {                                                            \
            if (adds)                                                                                                 \
                tile(ROWS, 2, depth, a, a_row, b + j, b_row, c + j, c_row, 1);                                        \
            else                                                                                                      \
                tile(ROWS, 2, depth, a, a_row, b + j, b_row, c + j, c_row, 0);                                        \
        }                                                                                                             \
        if (j < columns) {                                                                                            \
            if (adds)                                                                                                 \
                tile(ROWS, 1, depth, a, a_row, b + j, b_row, c + j, c_row, 1);                                        \
            else                                                                                                      \
                tile(ROWS, 1, depth, a, a_row, b + j, b_row, c + j, c_row, 0);                                        \
        }                                                                                                             \
    }
PRODUCTS(1)
PRODUCTS(2)
PRODUCTS(3)
PRODUCTS(4)
PRODUCTS(5)
PRODUCTS(6)

/* The same for any number of rows; `columns` is a multiple of WIDTH. */
static void product(int64_t rows, int64_t depth, int64_t columns, const float *a, int64_t a_row, const float *b,
                    int64_t b_row, float *c, int64_t c_row, int adds) {
    for (; rows > 0; rows -= 6, a += 6 * a_row, c += 6 * c_row) switch (rows) {
        case 1: tiles_1(depth, columns, a, a_row, b, b_row, c, c_row, adds); break;
        case 2: tiles_2(depth, columns, a, a_row, b, b_row, c, c_row, adds); break;
        case 3: tiles_3(depth, columns, a, a_row, b, b_row, c, c_row, adds); break;
        case 4: tiles_4(depth, columns, a, a_row, b, b_row, c, c_row, adds); break;
        case 5: tiles_5(depth, columns, a, a_row, b, b_row, c, c_row, adds); break;
        default: tiles_6(depth, columns, a, a_row, b, b_row, c, c_row, adds);
        }
}

/* Eight rows of eight numbers, turned over. */
INLINE void transpose8(vec8 r[8], float *to, int64_t row) {
#define LOW(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define HIGH(a, b) __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
    vec8 t[8], u[8];
    for (int i = 0; i < 8; i += 2) t[i] = LOW(r[i], r[i + 1]), t[i + 1] = HIGH(r[i], r[i + 1]);
    for (int i = 0; i < 8; i += 4) {
        u[i] = __builtin_shufflevector(t[i], t[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        u[i + 1] = __builtin_shufflevector(t[i], t[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        u[i + 2] = __builtin_shufflevector(t[i + 1], t[i + 3], 0, 1, 8, 9, 4, 5, 12, 13);
        u[i + 3] = __builtin_shufflevector(t[i + 1], t[i + 3], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    for (int i = 0; i < 4; i++) {
        vec8 left = __builtin_shufflevector(u[i], u[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        vec8 right = __builtin_shufflevector(u[i], u[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
        memcpy(to + i * row, &left, 32);
        memcpy(to + (i + 4) * row, &right, 32);
    }
}

/* Keys [count][dim] into [dim][BLOCK]; what is beyond `count` is nought, up to a multiple of 8. */
INLINE void turned_over(const void *keys, int64_t row, int64_t count, int64_t dim, float *to, const int dtype) {
    for (int64_t s = 0; s < count; s += 8)
        for (int64_t d = 0; d < dim; d += 8) {
            vec8 r[8];
            for (int i = 0; i < 8; i++)
                r[i] = s + i < count ? wide8(element(keys, (s + i) * row + d, dtype), dtype) : (vec8){0};
            transpose8(r, to + d * BLOCK + s, BLOCK);
        }
}

/* One head's query as its run's shift asks for, times the scale. */
static void turned(const struct plan *plan, const struct layer *layer, const void *query, int32_t turn, float *to) {
    const float scale = layer->scale;
    if (layer->dtype == FP32)
        for (int64_t d = 0; d < plan->dim; d++) to[d] = number(query, d, FP32) * scale;
    else
        for (int64_t d = 0; d < plan->dim; d++) to[d] = number(query, d, BF16) * scale;
    if (turn < 0) return;
    const float *cos = plan->cos + (int64_t)turn * plan->half, *sin = plan->sin + (int64_t)turn * plan->half;
    const int64_t step = plan->pairing == HALVES ? 1 : 2, away = plan->pairing == HALVES ? plan->half : 1;
    float *at = to + plan->turned_from;
    for (int64_t i = 0; i < plan->half; i++) {
        float left = at[i * step], right = at[i * step + away];
        at[i * step] = left * cos[i] - right * sin[i];
        at[i * step + away] = right * cos[i] + left * sin[i];
    }
}

/* Whether one of these is no number. */
INLINE int any_unlike(const float *row, int64_t low, int64_t high) {
    for (int64_t s = low; s < high; s++)
        if (row[s] != row[s]) return 1;
    return 0;
}

struct work {
    const struct plan *plan;
    const struct layer *layer;
    atomic_int next_scratch, next_item, next_token;
};

/* A block's scores into weights, with what was found before scaled to the new highest score. What a query does not see
 * weighs nothing. */
INLINE void weigh(const struct plan *plan, const int32_t *pairs, int64_t queries, int64_t first, int64_t count,
                  int64_t columns, float *scores, float *out, float *top, float *total) {
    const int64_t dim = plan->dim, group = plan->heads / plan->kv_heads;
    for (int64_t q = 0; q < queries; q++) {
        float *row = scores + q * BLOCK;
        const int32_t *pair = pairs + 4 * (q / group);
        int64_t low = pair[2] - first, high = pair[3] - first;
        low = low < 0 ? 0 : low > count ? count : low, high = high > count ? count : high;
        if (low >= high) {
            memset(row, 0, sizeof(float) * columns);
            continue;
        }
        if (plan->softcap > 0)
            for (int64_t s = 0; s < columns; s += WIDTH)
                store(row + s, plan->softcap * tangent(load(row + s) / plan->softcap));
        for (int64_t s = 0; s < low; s++) row[s] = -INFINITY;
        for (int64_t s = high; s < columns; s++) row[s] = -INFINITY;
        vec most = load(row);
        for (int64_t s = WIDTH; s < columns; s += WIDTH) most = highest(most, load(row + s));
        const float before = top[q], now = highest_of(most) > before ? highest_of(most) : before;
        if (now == -INFINITY && !any_unlike(row, low, high)) { /* as if it saw nothing here */
            memset(row, 0, sizeof(float) * columns);
            continue;
        }
        vec sum = {0};
        for (int64_t s = 0; s < columns; s += WIDTH) {
            vec weight = exponential(load(row + s) - now);
            store(row + s, weight);
            sum += weight;
        }
        const float kept = before == now ? 1.0f : expf(before - now);
        total[q] = total[q] * kept + sum_of(sum), top[q] = now;
        if (kept != 1.0f)
            for (int64_t d = 0; d < dim; d += WIDTH) store(out + q * dim + d, load(out + q * dim + d) * kept);
    }
}

/* What a chunk's pairs have found, to where it is merged. */
INLINE void found_parts(const struct plan *plan, const int32_t *chunk, int64_t kv_head, const float *out,
                        const float *top, const float *total) {
    const int64_t dim = plan->dim, group = plan->heads / plan->kv_heads;
    for (int64_t q = 0; q < chunk[3] * group; q++) {
        int64_t to = (chunk[2] + q / group) * (int64_t)plan->heads + kv_head * group + q % group;
        memcpy(plan->outs + to * dim, out + q * dim, sizeof(float) * dim);
        plan->tops[to] = top[q], plan->totals[to] = total[q];
    }
}

/* One chunk under one key head: the parts of its pairs. */
INLINE void attend_chunk(const struct plan *plan, const struct layer *layer, const int32_t *chunk, int64_t kv_head,
                         float *scratch, const int dtype) {
    const int64_t dim = plan->dim, group = plan->heads / plan->kv_heads, slots = chunk[1];
    const int32_t *pairs = plan->pair + 4 * (int64_t)chunk[2];
    const int64_t queries = chunk[3] * group;
    float *query = scratch, *out = query + queries * dim, *scores = out + queries * dim;
    float *keys = scores + queries * BLOCK, *values = keys + dim * BLOCK;
    float *top = values + (dtype == FP32 ? 0 : dim * BLOCK), *total = top + queries;
    for (int64_t p = 0; p < chunk[3]; p++)
        for (int64_t g = 0; g < group; g++) {
            const int32_t *pair = pairs + 4 * p;
            int64_t from = pair[0] * layer->query_token + (kv_head * group + g) * layer->query_head;
            turned(plan, layer, element(layer->query, from, layer->dtype), pair[1], query + (p * group + g) * dim);
            top[p * group + g] = -INFINITY, total[p * group + g] = 0;
        }
    memset(out, 0, sizeof(float) * queries * dim);
    for (int64_t first = 0; first < slots; first += BLOCK) {
        const int64_t count = slots - first < BLOCK ? slots - first : BLOCK;
        const int64_t columns = (count + WIDTH - 1) / WIDTH * WIDTH;
        const int64_t from = kv_head * layer->pool_head + (chunk[0] + first) * layer->pool_slot;
        turned_over(element(layer->keys, from, dtype), layer->pool_slot, count, dim, keys, dtype);
        if (columns > (count + 7) / 8 * 8) /* vectors of 16: eight more are looked at */
            for (int64_t d = 0; d < dim; d++) memset(keys + d * BLOCK + columns - 8, 0, 32);
        product(queries, dim, columns, query, dim, keys, BLOCK, scores, BLOCK, 0);
        weigh(plan, pairs, queries, first, count, columns, scores, out, top, total);
        const float *right;
        int64_t right_row = dim;
        if (dtype == FP32)
            right = (const float *)element(layer->values, from, dtype), right_row = layer->pool_slot;
        else {
            for (int64_t s = 0; s < count; s++)
                for (int64_t d = 0; d < dim; d += 8) {
                    vec8 x = wide8(element(layer->values, from + s * layer->pool_slot + d, dtype), dtype);
                    memcpy(values + s * dim + d, &x, 32);
                }
            right = values;
        }
        product(queries, count, dim, scores, BLOCK, right, right_row, out, dim, 1);
    }
    found_parts(plan, chunk, kv_head, out, top, total);
}

#include "tiled_segments.h"

/* A token's parts into one, under all heads. */
static void merge_token(const struct plan *plan, const struct layer *layer, int64_t token) {
    const int64_t dim = plan->dim, heads = plan->heads;
    const int32_t *from = plan->part + plan->first_part[token];
    const int64_t parts = plan->first_part[token + 1] - plan->first_part[token];
    for (int64_t head = 0; head < heads; head++) {
        float top = -INFINITY, total = 0;
        for (int64_t i = 0; i < parts; i++) {
            float x = plan->tops[from[i] * heads + head];
            top = x > top ? x : top;
        }
        float out[MOST_TURNED];
        memset(out, 0, sizeof(float) * dim);
        for (int64_t i = 0; i < parts; i++) {
            const int64_t at = from[i] * heads + head;
            const float weight = plan->tops[at] == top ? 1.0f : expf(plan->tops[at] - top);
            total += weight * plan->totals[at];
            for (int64_t d = 0; d < dim; d += WIDTH)
                store(out + d, load(out + d) + weight * load(plan->outs + at * dim + d));
        }
        if (layer->sinks) total += expf(layer->sinks[head] - top);
        const int64_t to = (token * heads + head) * dim;
        if (layer->dtype == FP32)
            for (int64_t d = 0; d < dim; d++) ((float *)layer->out)[to + d] = out[d] / total;
        else
            for (int64_t d = 0; d < dim; d++) ((uint16_t *)layer->out)[to + d] = rounded(out[d] / total);
    }
}

static void attend_some(void *data) {
    struct work *work = data;
    const struct plan *plan = work->plan;
    float *scratch = plan->scratch + plan->scratch_each * atomic_fetch_add(&work->next_scratch, 1);
#ifdef HAS_TILES
    struct tiles before;
    const int by_tiles = plan->dtype == BF16 && plan->dim % DEEP == 0;
    if (by_tiles) tiles_begin(&before);
#endif
    for (;;) {
        const int item = atomic_fetch_add(&work->next_item, 1);
        if (item >= plan->chunks * plan->kv_heads) break;
        const int32_t *chunk = plan->chunk + 4 * (int64_t)(item / plan->kv_heads);
#ifdef HAS_TILES
        if (by_tiles) {
            attend_tiled(plan, work->layer, chunk, item % plan->kv_heads, scratch);
            continue;
        }
#endif
        if (plan->dtype == FP32)
            attend_chunk(plan, work->layer, chunk, item % plan->kv_heads, scratch, FP32);
        else
            attend_chunk(plan, work->layer, chunk, item % plan->kv_heads, scratch, BF16);
    }
#ifdef HAS_TILES
    if (by_tiles) tiles_end(&before);
#endif
}

static void merge_some(void *data) {
    struct work *work = data;
    for (;;) {
        const int token = atomic_fetch_add(&work->next_token, 1);
        if (token >= work->plan->tokens) return;
        merge_token(work->plan, work->layer, token);
    }
}

static void by_all(const struct plan *plan, void (*some)(void *), struct work *work) {
    if (plan->parallel && plan->threads > 1)
        plan->parallel(some, work, (unsigned)plan->threads, 0);
    else
        some(work);
}

/* One token's keys or values under one head, as the pool keeps them. */
static void write_head(void *to, const void *from, int64_t dim, int dtype, int from_dtype) {
    if (dtype == from_dtype)
        memcpy(to, from, (size_t)dim * (dtype == FP32 ? 4 : 2));
    else if (dtype == BF16)
        for (int64_t d = 0; d < dim; d++) ((uint16_t *)to)[d] = rounded(((const float *)from)[d]);
    else
        for (int64_t d = 0; d < dim; d++) ((float *)to)[d] = number(from, d, BF16);
}

/* Write the new keys and values where they go. */
static void write_new(const struct plan *plan, const struct layer *layer) {
    const int dtype = plan->dtype, own = layer->dtype;
    for (int64_t head = 0; head < plan->kv_heads; head++)
        for (int64_t token = 0; token < plan->tokens; token++) {
            const int64_t to = head * layer->pool_head + layer->slots[token] * layer->pool_slot;
            const int64_t key = head * layer->new_key_head + token * layer->new_key_token;
            const int64_t value = head * layer->new_value_head + token * layer->new_value_token;
            write_head((void *)element(layer->keys, to, dtype), element(layer->new_keys, key, own), plan->dim, dtype, own);
            write_head((void *)element(layer->values, to, dtype), element(layer->new_values, value, own), plan->dim,
                       dtype, own);
        }
}

void NAMED(attend)(const struct plan *plan, const struct layer *layer, int what) {
    struct work work = {.plan = plan, .layer = layer};
    if (what & WRITE) write_new(plan, layer);
    if (what & ATTEND && plan->chunks) by_all(plan, attend_some, &work);
    if (what & MERGE) by_all(plan, merge_some, &work);
}
