/* Products of few or many rows with a layer's weights, which are read from memory once.
 *
 * Each output is a chain of fused multiply-adds over the inputs, in order, and a sum over such chains, however many rows
 * there are and whoever shares the work: a row's outputs are the same, bit by bit, in any company. Weights in pairs of
 * bfloat16s are multiplied by rows that are rounded to bfloat16s, two products at a time, and summed in fp32.
 */
#include "native.h"
#include "vectors.h"

#include "tiles.h"

#define PANEL 16
#define EACH (PANEL / WIDTH) /* vectors in a panel's row */
#define MOST_ROWS (WIDTH == 16 ? 8 : 6) /* that are gone through at once: as many sums as there are registers for */
#define ITEM 4               /* panels that a thread takes at once */
#define CHAIN 512            /* inputs: in a longer one rounding errors add up */
#define FEWEST_SHARED (1 << 18) /* products of numbers below which a second thread costs more than it does */
#define ROWS_AT_ONCE 256 /* that are gone through with all weights while they are at hand, as bfloat16s */
#define FEWEST_NARROWED (1 << 17) /* numbers that repay a second thread to round them */
/* rows that repay a copy of a panel of bfloat16s in floats: vectors of sixteen are widened as fast as that is read */
#define FEWEST_WIDENED (WIDTH == 16 ? INT32_MAX : 20)

/* Where bfloat16s are multiplied in pairs, a pair takes the place of a float: in the rows, which are rounded first, and in
 * the panels. */
INLINE int64_t depth_of(const struct linear *linear, const int dtype) {
    return dtype == BF16_PAIRS ? (linear->inputs + DEEP - 1) / DEEP * DEEP / 2 : linear->inputs;
}

INLINE vec weights(const void *panel, int64_t at, const int dtype) {
    return dtype == BF16 ? widened((const uint16_t *)panel + at) : load((const float *)panel + at);
}

INLINE vec multiplied(vec sum, const float *left, vec right, const int dtype) {
#ifdef __AVX512BF16__
    if (dtype == BF16_PAIRS)
        return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(*left), (__m512bh)right);
#endif
    return sum + *left * right;
}

/* `rows` of x with so many panels, side by side: rows * panels * EACH sums stay in registers. */
INLINE void tile(const int rows, const int panels, const struct product *product, int64_t row, int64_t panel,
                 const char *from, const int dtype) {
    const struct linear *linear = product->linear;
    const int64_t depth = depth_of(linear, dtype), size = depth * PANEL;
    const int64_t x_row = dtype == BF16_PAIRS ? depth : product->x_row;
    const float *x = (dtype == BF16_PAIRS ? product->scratch : product->x) + row * x_row;
    vec total[MOST_ROWS][8];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < panels * EACH; j++) total[i][j] = (vec){0};
    for (int64_t first = 0; first < depth; first += CHAIN) {
        const int64_t end = first + CHAIN < depth ? first + CHAIN : depth;
        vec sum[MOST_ROWS][8];
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < panels * EACH; j++) sum[i][j] = (vec){0};
        for (int64_t k = first; k < end; k++) {
            vec right[8];
            for (int p = 0; p < panels; p++)
                for (int j = 0; j < EACH; j++)
                    right[p * EACH + j] = weights(from, p * size + k * PANEL + j * WIDTH, dtype);
            for (int i = 0; i < rows; i++) {
                const float *left = x + i * x_row + k;
                for (int j = 0; j < panels * EACH; j++) sum[i][j] = multiplied(sum[i][j], left, right[j], dtype);
            }
        }
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < panels * EACH; j++) total[i][j] += sum[i][j];
    }
    for (int i = 0; i < rows; i++)
        for (int p = 0; p < panels; p++) {
            const int64_t at = (panel + p) * PANEL;
            const int64_t count = linear->outputs - at < PANEL ? linear->outputs - at : PANEL;
            float *out = product->out + (row + i) * product->out_row + at, found[PANEL];
            for (int j = 0; j < EACH; j++) store(found + j * WIDTH, total[i][p * EACH + j]);
            for (int64_t n = 0; n < count; n++) {
                const float value = linear->bias ? found[n] + linear->bias[at + n] : found[n];
                out[n] = product->adds ? out[n] + value : value;
            }
        }
}

INLINE const char *place(const struct linear *linear, int64_t panel, const int dtype) {
    return (const char *)linear->panels + panel * depth_of(linear, dtype) * PANEL * (dtype == BF16 ? 2 : 4);
}

/* A few rows with the panels of one item. With the intrinsic for pairs, compilers put the sums of four panels into memory. */
#define ROWS(COUNT, PANELS)                                                                            \
    INLINE void rows_##COUNT(const struct product *product, int64_t row, int64_t panel, int64_t end,   \
                             const int dtype) {                                                        \
        const int wide = dtype == BF16_PAIRS && COUNT > 2 ? 2 : PANELS;                                \
        for (; panel + wide <= end; panel += wide)                                                     \
            tile(COUNT, wide, product, row, panel, place(product->linear, panel, dtype), dtype);       \
        for (; panel < end; panel++)                                                                   \
            tile(COUNT, 1, product, row, panel, place(product->linear, panel, dtype), dtype);          \
    }
#if WIDTH == 8
ROWS(1, 4)
ROWS(2, 2)
ROWS(3, 2)
ROWS(4, 1)
ROWS(5, 1)
ROWS(6, 1)
#else
ROWS(1, 4)
ROWS(2, 4)
ROWS(3, 4)
ROWS(4, 4)
ROWS(5, 4)
ROWS(6, 4)
ROWS(7, 2)
ROWS(8, 2)
#endif

/* All rows with panels, a few at a time: what is read for the first is at hand for the rest. */
INLINE void item(const struct product *product, int64_t first, int64_t end, const int dtype) {
    int64_t row = 0;
#if WIDTH == 16
    for (; row + 8 <= product->rows; row += 8) rows_8(product, row, first, end, dtype);
#else
    for (; row + 6 <= product->rows; row += 6) rows_6(product, row, first, end, dtype);
#endif
    switch (product->rows - row) {
        case 1: rows_1(product, row, first, end, dtype); break;
        case 2: rows_2(product, row, first, end, dtype); break;
        case 3: rows_3(product, row, first, end, dtype); break;
        case 4: rows_4(product, row, first, end, dtype); break;
        case 5: rows_5(product, row, first, end, dtype); break;
#if WIDTH == 16
        case 6: rows_6(product, row, first, end, dtype); break;
        case 7: rows_7(product, row, first, end, dtype); break;
#endif
    }
}

/* The same of one panel whose bfloat16s are made floats first. */
static void item_widened(const struct product *product, int64_t panel, float *made) {
    const struct linear *linear = product->linear;
    const uint16_t *from = (const uint16_t *)place(linear, panel, BF16);
    for (int64_t at = 0; at < (int64_t)linear->inputs * PANEL; at += WIDTH) store(made + at, widened(from + at));
    struct linear one = *linear;
    one.panels = made, one.dtype = FP32, one.outputs -= panel * PANEL, one.bias += linear->bias ? panel * PANEL : 0;
    struct product part = *product;
    part.linear = &one, part.out += panel * PANEL;
    item(&part, 0, 1, FP32);
}

struct shared {
    const struct product *product;
    atomic_int next, next_scratch;
};

static void multiply_some(void *data) {
    struct shared *shared = data;
    const struct product *product = shared->product;
    const int64_t panels = (product->linear->outputs + PANEL - 1) / PANEL;
    float *scratch = NULL;
    if (product->linear->dtype == BF16 && product->rows >= FEWEST_WIDENED && product->scratch)
        scratch = product->scratch + product->scratch_each * atomic_fetch_add(&shared->next_scratch, 1);
    for (;;) {
        const int64_t first = (int64_t)ITEM * atomic_fetch_add(&shared->next, 1);
        if (first >= panels) return;
        const int64_t end = first + ITEM < panels ? first + ITEM : panels;
        if (scratch)
            for (int64_t panel = first; panel < end; panel++) item_widened(product, panel, scratch);
        else if (product->linear->dtype == FP32)
            item(product, first, end, FP32);
#ifdef __AVX512BF16__
        else if (product->linear->dtype == BF16_PAIRS)
            item(product, first, end, BF16_PAIRS);
#endif
        else
            item(product, first, end, BF16);
    }
}

#ifdef HAS_TILES
/* A tile of sums into the outputs, as far as there are rows and outputs. */
INLINE void put(const struct product *product, const float *found, int64_t row, int64_t panel) {
    const struct linear *linear = product->linear;
    const int64_t at = panel * PANEL, rest = product->rows - row;
    const int64_t rows = rest < TILE ? rest : TILE;
    const int64_t count = linear->outputs - at < PANEL ? linear->outputs - at : PANEL;
    const __mmask16 which = (__mmask16)((1u << count) - 1);
    const __m512 bias = linear->bias ? _mm512_maskz_loadu_ps(which, linear->bias + at) : _mm512_setzero_ps();
    for (int64_t i = 0; i < rows; i++) {
        float *out = product->out + (row + i) * product->out_row + at;
        __m512 sum = _mm512_add_ps(_mm512_loadu_ps(found + i * PANEL), bias);
        if (product->adds) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(which, out));
        _mm512_mask_storeu_ps(out, which, sum);
    }
}

#define PUT(NUMBER, ROW, WHERE)                          \
    do {                                                 \
        _tile_stored(NUMBER, found, PANEL * 4);          \
        __asm__ volatile("" ::: "memory");               \
        put(product, found, ROW, WHERE);                 \
    } while (0)

/* Sixteen rows with up to four panels, side by side. */
INLINE void tiled_once(const struct product *product, int64_t row, int64_t panel, const int panels) {
    const int64_t deep = (product->linear->inputs + DEEP - 1) / DEEP, size = deep * DEEP * PANEL;
    const uint16_t *x = (const uint16_t *)product->scratch + row * deep * DEEP;
    const uint16_t *from = (const uint16_t *)product->linear->panels + panel * size;
    float found[TILE * PANEL];
    tiles_zero();
    for (int64_t k = 0; k < deep; k++) {
        const uint16_t *at = from + k * DEEP * PANEL;
        _tile_loadd(4, x + k * DEEP, deep * DEEP * 2);
        _tile_loadd(5, at, PANEL * 4);
        _tile_dpbf16ps(0, 4, 5);
        if (panels > 1) {
            _tile_loadd(6, at + size, PANEL * 4);
            _tile_dpbf16ps(1, 4, 6);
        }
        if (panels > 2) {
            _tile_loadd(7, at + 2 * size, PANEL * 4);
            _tile_dpbf16ps(2, 4, 7);
        }
        if (panels > 3) {
            _tile_loadd(5, at + 3 * size, PANEL * 4);
            _tile_dpbf16ps(3, 4, 5);
        }
    }
    PUT(0, row, panel);
    if (panels > 1) PUT(1, row, panel + 1);
    if (panels > 2) PUT(2, row, panel + 2);
    if (panels > 3) PUT(3, row, panel + 3);
}

/* Thirty-two rows with two panels. */
static void tiled_twice(const struct product *product, int64_t row, int64_t panel) {
    const int64_t deep = (product->linear->inputs + DEEP - 1) / DEEP, size = deep * DEEP * PANEL;
    const uint16_t *x = (const uint16_t *)product->scratch + row * deep * DEEP;
    const uint16_t *from = (const uint16_t *)product->linear->panels + panel * size;
    float found[TILE * PANEL];
    tiles_zero();
    for (int64_t k = 0; k < deep; k++) {
        _tile_loadd(4, x + k * DEEP, deep * DEEP * 2);
        _tile_loadd(6, from + k * DEEP * PANEL, PANEL * 4);
        _tile_loadd(5, x + (TILE * deep + k) * DEEP, deep * DEEP * 2);
        _tile_loadd(7, from + size + k * DEEP * PANEL, PANEL * 4);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    PUT(0, row, panel);
    PUT(1, row, panel + 1);
    PUT(2, row + TILE, panel);
    PUT(3, row + TILE, panel + 1);
}

/* Some rows, from a whole pair of tiles on, with the panels of one item. */
static void item_tiled(const struct product *product, int64_t row, int64_t rows, int64_t first, int64_t end) {
    if (rows - row > TILE) {
        const int64_t last = row + (rows - row + TILE - 1) / (2 * TILE) * 2 * TILE; /* those left over may be few */
        for (int64_t panel = first; panel + 2 <= end; panel += 2)
            for (int64_t i = row; i < last; i += 2 * TILE) tiled_twice(product, i, panel);
        if ((end - first) % 2)
            for (int64_t i = row; i < last; i += TILE) tiled_once(product, i, end - 1, 1);
        row = last;
    }
    for (; row < rows; row += TILE) switch (end - first) {
        case 1: tiled_once(product, row, first, 1); break;
        case 2: tiled_once(product, row, first, 2); break;
        case 3: tiled_once(product, row, first, 3); break;
        default: tiled_once(product, row, first, 4);
        }
}

static void multiply_tiled(void *data) {
    struct shared *shared = data;
    const struct product *product = shared->product;
    const int64_t panels = (product->linear->outputs + PANEL - 1) / PANEL, items = (panels + ITEM - 1) / ITEM;
    struct tiles before;
    tiles_begin(&before);
    for (;;) {
        const int64_t next = atomic_fetch_add(&shared->next, 1), first = next % items * ITEM;
        const int64_t row = next / items * ROWS_AT_ONCE, rest = product->rows - row;
        if (rest <= 0) break;
        item_tiled(product, row, row + (rest < ROWS_AT_ONCE ? rest : ROWS_AT_ONCE), first,
                   first + ITEM < panels ? first + ITEM : panels);
    }
    tiles_end(&before);
}

#endif

#ifdef __AVX512BF16__
/* Rows of x as bfloat16s; for tiles, with rows of noughts up to a whole one. */
static void narrow_some(void *data) {
    struct shared *shared = data;
    const struct product *product = shared->product;
    const int64_t inputs = product->linear->inputs, whole = (inputs + DEEP - 1) / DEEP * DEEP;
#ifdef HAS_TILES
    const int64_t rows = (product->rows + TILE - 1) / TILE * TILE;
#else
    const int64_t rows = product->rows;
#endif
    for (;;) {
        const int64_t row = atomic_fetch_add(&shared->next_scratch, 1);
        if (row >= rows) return;
        uint16_t *to = (uint16_t *)product->scratch + row * whole;
        if (row < product->rows)
            narrowed(product->x + row * product->x_row, inputs, whole, to);
        else
            memset(to, 0, (size_t)whole * 2);
    }
}
#endif

void NAMED(multiply)(const struct product *product) {
    struct shared shared = {.product = product};
    const struct linear *linear = product->linear;
    const int64_t numbers = (int64_t)product->rows * linear->inputs * linear->outputs;
    const int together = product->parallel && product->threads > 1 && numbers >= FEWEST_SHARED;
    void (*some)(void *) = multiply_some;
#ifdef __AVX512BF16__
    if (linear->dtype == BF16_PAIRS) {
        if (together && (int64_t)product->rows * linear->inputs >= FEWEST_NARROWED)
            product->parallel(narrow_some, &shared, (unsigned)product->threads, 0);
        else
            narrow_some(&shared);
#ifdef HAS_TILES
        some = multiply_tiled;
#endif
    }
#endif
    if (together)
        product->parallel(some, &shared, (unsigned)product->threads, 0);
    else
        some(&shared);
}
