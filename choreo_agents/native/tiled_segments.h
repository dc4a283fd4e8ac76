/* A part of segments.c: chunks of bfloat16s, by tiles. */
#pragma once
#ifdef HAS_TILES
/* Keys [count][dim], two dimensions in each of 32 bits, into [dim / 2][BLOCK]; noughts up to a whole tile. */
INLINE void paired_keys(const void *keys, int64_t row, int64_t count, int64_t dim, float *to) {
    for (int64_t s = 0; s < (count + TILE - 1) / TILE * TILE; s += 8)
        for (int64_t d = 0; d < dim; d += 16) {
            vec8 r[8];
            for (int i = 0; i < 8; i++)
                if (s + i < count)
                    memcpy(&r[i], element(keys, (s + i) * row + d, BF16), 32);
                else
                    r[i] = (vec8){0};
            transpose8(r, to + d / 2 * BLOCK + s, BLOCK);
        }
}

/* Values [count][dim] into [count / 2][dim][2], two slots in each of 32 bits; noughts up to a tile's depth. */
INLINE void paired_values(const void *values, int64_t row, int64_t count, int64_t dim, uint32_t *to) {
    for (int64_t s = 0; s < (count + DEEP - 1) / DEEP * DEEP; s += 2, to += dim)
        for (int64_t d = 0; d < dim; d += 16) {
            uvec left = {0}, right = {0};
            half x;
            if (s < count) {
                memcpy(&x, element(values, s * row + d, BF16), 32);
                left = __builtin_convertvector(x, uvec);
            }
            if (s + 1 < count) {
                memcpy(&x, element(values, (s + 1) * row + d, BF16), 32);
                right = __builtin_convertvector(x, uvec);
            }
            left |= right << 16;
            memcpy(to + d, &left, 64);
        }
}

/* c[16][64] = or += a[16][depth] b[depth][64], a of bfloat16s and b of pairs of them; fewer columns by whole tiles. */
INLINE void tiled(int64_t depth, int64_t columns, const uint16_t *a, int64_t a_row, const uint32_t *b, int64_t b_row,
                  float *c, int64_t c_row, const int adds) {
    __asm__ volatile("" ::: "memory");
    for (int64_t j = 0; j < columns; j += 4 * TILE) {
        const int64_t wide = (columns - j) / TILE < 4 ? (columns - j) / TILE : 4;
        if (adds) {
            _tile_loadd(0, c + j, c_row * 4);
            if (wide > 1) _tile_loadd(1, c + j + TILE, c_row * 4);
            if (wide > 2) _tile_loadd(2, c + j + 2 * TILE, c_row * 4);
            if (wide > 3) _tile_loadd(3, c + j + 3 * TILE, c_row * 4);
        } else
            tiles_zero();
        for (int64_t k = 0; k < depth; k += DEEP) {
            const uint32_t *right = b + k / 2 * b_row + j;
            _tile_loadd(4, a + k, a_row * 2);
            _tile_loadd(5, right, b_row * 4);
            _tile_dpbf16ps(0, 4, 5);
            if (wide > 1) {
                _tile_loadd(6, right + TILE, b_row * 4);
                _tile_dpbf16ps(1, 4, 6);
            }
            if (wide > 2) {
                _tile_loadd(7, right + 2 * TILE, b_row * 4);
                _tile_dpbf16ps(2, 4, 7);
            }
            if (wide > 3) {
                _tile_loadd(5, right + 3 * TILE, b_row * 4);
                _tile_dpbf16ps(3, 4, 5);
            }
        }
        _tile_stored(0, c + j, c_row * 4);
        if (wide > 1) _tile_stored(1, c + j + TILE, c_row * 4);
        if (wide > 2) _tile_stored(2, c + j + 2 * TILE, c_row * 4);
        if (wide > 3) _tile_stored(3, c + j + 3 * TILE, c_row * 4);
    }
    __asm__ volatile("" ::: "memory");
}

/* The same as `attend_chunk`, of bfloat16s by tiles: queries and weights are rounded to them, sums are not. */
static void attend_tiled(const struct plan *plan, const struct layer *layer, const int32_t *chunk, int64_t kv_head,
                         float *scratch) {
    const int64_t dim = plan->dim, group = plan->heads / plan->kv_heads, slots = chunk[1];
    const int32_t *pairs = plan->pair + 4 * (int64_t)chunk[2];
    const int64_t queries = chunk[3] * group, rows = (queries + TILE - 1) / TILE * TILE;
    float *out = scratch, *scores = out + rows * dim, *keys = scores + rows * BLOCK, *values = keys + dim / 2 * BLOCK;
    uint16_t *query = (uint16_t *)(values + BLOCK / 2 * dim), *weight = query + rows * dim;
    float *top = (float *)(weight + rows * BLOCK), *total = top + queries;
    memset(query + queries * dim, 0, (size_t)((rows - queries) * dim) * 2);
    memset(weight + queries * BLOCK, 0, (size_t)((rows - queries) * BLOCK) * 2);
    for (int64_t q = 0; q < queries; q++) {
        const int32_t *pair = pairs + 4 * (q / group);
        const int64_t from = pair[0] * layer->query_token + (kv_head * group + q % group) * layer->query_head;
        turned(plan, layer, element(layer->query, from, layer->dtype), pair[1], scores);
        narrowed(scores, dim, dim, query + q * dim);
        top[q] = -INFINITY, total[q] = 0;
    }
    memset(out, 0, sizeof(float) * rows * dim);
    for (int64_t first = 0; first < slots; first += BLOCK) {
        const int64_t count = slots - first < BLOCK ? slots - first : BLOCK;
        const int64_t columns = (count + TILE - 1) / TILE * TILE, deep = (count + DEEP - 1) / DEEP * DEEP;
        const int64_t from = kv_head * layer->pool_head + (chunk[0] + first) * layer->pool_slot;
        paired_keys(element(layer->keys, from, BF16), layer->pool_slot, count, dim, keys);
        for (int64_t q = 0; q < rows; q += TILE)
            tiled(dim, columns, query + q * dim, dim, (const uint32_t *)keys, BLOCK, scores + q * BLOCK, BLOCK, 0);
        weigh(plan, pairs, queries, first, count, columns, scores, out, top, total);
        for (int64_t q = 0; q < queries; q++) narrowed(scores + q * BLOCK, columns, deep, weight + q * BLOCK);
        paired_values(element(layer->values, from, BF16), layer->pool_slot, count, dim, (uint32_t *)values);
        for (int64_t q = 0; q < rows; q += TILE)
            tiled(deep, dim, weight + q * BLOCK, BLOCK, (const uint32_t *)values, dim, out + q * dim, dim, 1);
    }
    found_parts(plan, chunk, kv_head, out, top, total);
}
#endif
