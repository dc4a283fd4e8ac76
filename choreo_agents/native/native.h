/* What the library's functions are told; structs.py reads its fields here. */
#pragma once
#include <stdint.h>

#define LAYOUT 4 /* one more whenever a structure changes */

typedef void (*parallel_fn)(void (*)(void *), void *, unsigned, unsigned);

enum { FP32 = 0, BF16 = 1, BF16_PAIRS = 2 };
enum { STILL = 0, HALVES = 1, NEIGHBOURS = 2 };

/* A step's attention in the layers of one kind: the same from layer to layer. */
struct plan {
    int32_t tokens, heads, kv_heads, dim;
    int32_t chunks, pairs; /* pairs that are attended here; the parts of others lie behind them */
    int32_t dtype, threads;
    int32_t pairing, turned_from, half; /* how a query turns: `half` angles from dimension `turned_from` on */
    float softcap;                      /* 0: none */
    const int32_t *chunk;               /* [chunks][4]: first slot, slots, first pair, pairs */
    const int32_t *pair;                /* [pairs][4]: token, its row of angles or -1, first slot it sees, behind its last */
    const int32_t *first_part;          /* [tokens + 1] */
    const int32_t *part;                /* the parts of each token, one token after the other */
    const float *cos, *sin;             /* [rows of angles][half] */
    float *outs, *tops, *totals;        /* parts: [parts][heads][dim], [parts][heads] twice */
    float *scratch;                     /* [threads][scratch_each] */
    int64_t scratch_each;
    parallel_fn parallel; /* GOMP_parallel, or null */
};

enum { WRITE = 1, ATTEND = 2, MERGE = 4 }; /* what a call is to do, in this order */

/* One layer's numbers; strides count elements, and dimensions of a head lie side by side. */
struct layer {
    const void *query;
    int64_t query_token, query_head;
    void *keys, *values;
    int64_t pool_head, pool_slot;
    const void *new_keys, *new_values;
    int64_t new_key_token, new_key_head, new_value_token, new_value_head;
    const int64_t *slots; /* [tokens] where the new ones go */
    void *out;            /* [tokens][heads][dim] */
    const float *sinks;   /* [heads], or null */
    float scale;
    int32_t dtype; /* of query, new keys and values, and out; of those in the pool the plan says it */
};

/* A linear layer's weights, sixteen outputs side by side: [outputs / 16, rounded up][inputs][16]; in pairs of inputs, for
 * products of bfloat16s: [outputs / 16, rounded up][inputs / 2, up to a multiple of 16][16][2]. */
struct linear {
    const void *panels;
    const float *bias; /* or null */
    int32_t inputs, outputs;
    int32_t dtype; /* of the panels: bfloat16 ones hold weights that lose nothing by it */
};

/* out[rows][outputs] = x[rows][inputs] times the weights; strides count floats. */
struct product {
    const struct linear *linear;
    const float *x;
    float *out;
    int64_t x_row, out_row;
    int32_t rows, adds; /* adds: to what is there */
    int32_t threads;
    parallel_fn parallel;
    float *scratch; /* [threads][scratch_each], or null; of `inputs` * 16 at least. For pairs: all rows as bfloat16s */
    int64_t scratch_each;
};

/* Tokens to be drawn; see sampling/kernel.py. */
struct drawing {
    const float *logits; /* [rows][row] */
    const int32_t *asked; /* [draws][9]: row, top-k or 0, scale, least exponent, top-p, four numbers of a noise key */
    int32_t *told;        /* [draws][6]: first and second word, how sure that is, their logits, the highest logit */
    int64_t row;
    int32_t draws, words, threads;
    float margin, lost, alike, least, lowest, highest;
    parallel_fn parallel;
};

/* What every row of a decoder layer goes through, as the layer's weights say it. */
struct decoder {
    struct linear qkv, o, gate_up, down; /* queries, keys and values side by side; gates before what they gate */
    const float *input_norm, *inner_norm;
    const float *query_norm, *key_norm; /* [dim], or null */
    float eps, query_eps;
};

/* A forward pass, one layer after the other. Memory is the caller's; rows of each array follow one another. */
struct pass {
    int32_t rows, width, inner, threads;
    parallel_fn parallel;
    float *x;                                /* [rows][width]: in and out */
    float *normed, *qkv, *attended, *gated;  /* of one layer */
    const float *cos, *sin;                  /* [rows][half], as the model turns what it encodes */
    float *scratch;
    int64_t scratch_each;
};
