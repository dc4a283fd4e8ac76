/* A decoder layer from its input to its output, as Llama and those after it are built:
 *
 *   x += o(attention(turned(q, k of norm(x))))        x += down(silu(gate(norm(x))) * up(norm(x)))
 *
 * in fp32. Attention is that of segments.c, products are those of linear.c.
 */
#include "native.h"
#include "vectors.h"
#ifdef HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define FEWEST_SHARED 16384 /* numbers below which a second thread costs more than it does */

void NAMED(attend)(const struct plan *, const struct layer *, int);
void NAMED(multiply)(const struct product *);

struct rows {
    const struct pass *pass;
    const struct decoder *decoder;
    const struct plan *plan;
    const float *norm;
    atomic_int next;
    void (*each)(struct rows *, int64_t row);
};

static void some_rows(void *data) {
    struct rows *rows = data;
    for (;;) {
        const int row = atomic_fetch_add(&rows->next, 1);
        if (row >= rows->pass->rows) return;
        rows->each(rows, row);
    }
}

static void all_rows(struct rows *rows, int64_t numbers, void (*each)(struct rows *, int64_t)) {
    const struct pass *pass = rows->pass;
    rows->next = 0;
    rows->each = each;
    if (pass->parallel && pass->threads > 1 && pass->rows * numbers >= FEWEST_SHARED)
        pass->parallel(some_rows, rows, (unsigned)pass->threads, 0);
    else
        some_rows(rows);
}

/* to = x over the root of its mean square, times the weights. `width` may be any number. */
static void normalise(const float *x, const float *weight, float eps, int64_t width, float *to) {
    vec squares = {0};
    float rest = 0;
    int64_t i = 0;
    for (; i + WIDTH <= width; i += WIDTH) squares += load(x + i) * load(x + i);
    for (int64_t j = i; j < width; j++) rest += x[j] * x[j];
    const float scale = 1.0f / sqrtf((sum_of(squares) + rest) / (float)width + eps);
    for (i = 0; i + WIDTH <= width; i += WIDTH) store(to + i, load(weight + i) * (load(x + i) * scale));
    for (; i < width; i++) to[i] = weight[i] * (x[i] * scale);
}

static void norm_row(struct rows *rows, int64_t row) {
    const int64_t width = rows->pass->width;
    normalise(rows->pass->x + row * width, rows->norm, rows->decoder->eps, width, rows->pass->normed + row * width);
}

/* Queries and keys of a row, normalised head by head where the model does, and turned to the row's position. */
static void turn_row(struct rows *rows, int64_t row) {
    const struct plan *plan = rows->plan;
    const int64_t dim = plan->dim, half = plan->half, away = plan->pairing == HALVES ? half : 1;
    const int64_t step = plan->pairing == HALVES ? 1 : 2;
    const float *cos = rows->pass->cos + row * half, *sin = rows->pass->sin + row * half;
    float *head = rows->pass->qkv + row * (plan->heads + 2 * plan->kv_heads) * dim;
    for (int64_t h = 0; h < plan->heads + plan->kv_heads; h++, head += dim) {
        const float *norm = h < plan->heads ? rows->decoder->query_norm : rows->decoder->key_norm;
        if (norm) normalise(head, norm, rows->decoder->query_eps, dim, head);
        if (plan->pairing == STILL) continue;
        float *at = head + plan->turned_from;
        for (int64_t i = 0; i < half; i++) {
            const float left = at[i * step], right = at[i * step + away];
            at[i * step] = left * cos[i] - right * sin[i];
            at[i * step + away] = right * cos[i] + left * sin[i];
        }
    }
}

/* gates[inner], values[inner] side by side: silu(gate) * value, in the place of the gates. */
static void gate_row(struct rows *rows, int64_t row) {
    const int64_t inner = rows->pass->inner;
    float *gate = rows->pass->gated + row * 2 * inner, *value = gate + inner;
    int64_t i = 0;
    for (; i + WIDTH <= inner; i += WIDTH) {
        const vec x = load(gate + i), away = pick(x < -80.0f, all(80.0f), -x);
        store(gate + i, x / (1.0f + exponential(away)) * load(value + i));
    }
    for (; i < inner; i++) gate[i] = gate[i] / (1.0f + expf(-gate[i])) * value[i];
}

static void product_of(const struct pass *pass, const struct linear *linear, const float *x, int64_t x_row, float *out,
                       int64_t out_row, int adds) {
    const struct product product = {linear,     x,    out,           x_row,          out_row,       pass->rows,
                                    adds,       pass->threads, pass->parallel, pass->scratch, pass->scratch_each};
    NAMED(multiply)(&product);
}

/* `attention` says where the layer's keys and values are; the rest of it is said here. */
void NAMED(decode)(const struct decoder *decoder, const struct pass *pass, const struct plan *plan,
                   struct layer *attention) {
    struct rows rows = {.pass = pass, .decoder = decoder, .plan = plan};
    const int64_t dim = plan->dim, heads = plan->heads, kv_heads = plan->kv_heads, width = pass->width;
    const int64_t wide = (heads + 2 * kv_heads) * dim;
    rows.norm = decoder->input_norm;
    all_rows(&rows, width, norm_row);
    product_of(pass, &decoder->qkv, pass->normed, width, pass->qkv, wide, 0);
    all_rows(&rows, wide, turn_row);
    attention->query = pass->qkv, attention->query_token = wide, attention->query_head = dim;
    attention->new_keys = pass->qkv + heads * dim, attention->new_values = pass->qkv + (heads + kv_heads) * dim;
    attention->new_key_token = attention->new_value_token = wide;
    attention->new_key_head = attention->new_value_head = dim;
    attention->out = pass->attended;
    NAMED(attend)(plan, attention, WRITE | ATTEND | MERGE);
    product_of(pass, &decoder->o, pass->attended, heads * dim, pass->x, width, 1);
    rows.norm = decoder->inner_norm;
    all_rows(&rows, width, norm_row);
    product_of(pass, &decoder->gate_up, pass->normed, width, pass->gated, 2 * pass->inner, 0);
    all_rows(&rows, pass->inner, gate_row);
    product_of(pass, &decoder->down, pass->gated, 2 * pass->inner, pass->x, width, 1);
}

/* The last normalisation, of all rows: from x to normed. */
void NAMED(normalise)(const struct decoder *decoder, const struct pass *pass) {
    struct rows rows = {.pass = pass, .decoder = decoder, .norm = decoder->input_norm};
    all_rows(&rows, pass->width, norm_row);
}

/* By which who loads the library knows that they mean the same structures. */
int32_t NAMED(layout)(int32_t *sizes) {
    sizes[0] = sizeof(struct plan), sizes[1] = sizeof(struct layer), sizes[2] = sizeof(struct linear);
    sizes[3] = sizeof(struct product), sizes[4] = sizeof(struct decoder), sizes[5] = sizeof(struct pass);
    sizes[6] = sizeof(struct drawing);
    return LAYOUT;
}

#ifdef HAS_TILES
#define REQUEST_PERMISSION 0x1023 /* of arch_prctl */
#define TILE_DATA 18              /* the state of registers that threads are to have */

/* Whether the system lets this process have tiles, which it has to be asked for. */
int32_t NAMED(permitted)(void) { return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0; }
#endif
