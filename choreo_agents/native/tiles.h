/* Products of tiles of bfloat16s (AMX), where the variant has them: sixteen rows, and sums in fp32.
 *
 * A row's sums are the same, bit by bit, whatever rows stand beside it in a tile.
 */
#pragma once
#define TILE 16 /* rows of a tile, and numbers of fp32 in each */
#define DEEP 32 /* bfloat16s in a tile's row: how much one product sums up */

#ifdef HAS_TILES
/* What a thread's tiles are, for as long as it works here; what they were is put back, as other libraries rely on it. */
struct tiles {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

/* Compilers take it that the instructions read and write the first bytes of these alone. */
#define SEEN_WHOLE(POINTER) __asm__ volatile("" ::"r"(POINTER) : "memory")

static __attribute__((noinline)) void tiles_begin(struct tiles *before) {
    struct tiles whole = {.palette = 1};
    for (int i = 0; i < 8; i++) whole.bytes[i] = 64, whole.rows[i] = TILE;
    _tile_storeconfig(before);
    SEEN_WHOLE(before);
    SEEN_WHOLE(&whole);
    _tile_loadconfig(&whole);
}

static __attribute__((noinline)) void tiles_end(const struct tiles *before) {
    SEEN_WHOLE(before);
    if (before->palette)
        _tile_loadconfig(before);
    else
        _tile_release();
}

INLINE void tiles_zero(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}
#endif

#ifdef __AVX512BF16__
/* `count` floats as bfloat16s, ties to even, and noughts up to `whole`, a multiple of DEEP. */
INLINE void narrowed(const float *from, int64_t count, int64_t whole, uint16_t *to) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m256bh x = _mm512_cvtneps_pbh(_mm512_loadu_ps(from + i));
        memcpy(to + i, &x, 32);
    }
    if (i < count) {
        __m256bh x = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps((__mmask16)((1u << (count - i)) - 1), from + i));
        memcpy(to + i, &x, 32), i += 16;
    }
    if (i < whole) memset(to + i, 0, (size_t)(whole - i) * 2);
}
#endif
