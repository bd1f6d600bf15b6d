/*
 * random_calls.h: what the parts of test_random.c share: a world of contexts and prepared weights that goes from call
 * to call, and operands whose values are known in float64.
 */
#ifndef ESMM_TEST_RANDOM_CALLS_H
#define ESMM_TEST_RANDOM_CALLS_H

#include "harness.h"

enum { HELD = 12, MOST_ELEMENTS = 1 << 20 };

/* What the numbers are. WHOLE: integers and halves of them, whose sums are exact. SPECIAL: WHOLE, with some NaN and
   Inf. REAL: anything of [-1, 1). */
typedef enum value_kind { WHOLE, SPECIAL, REAL } value_kind;

/* Prepared weights, and their elements as float64, [k,n] row-major. */
typedef struct held {
  esmm_weights *weights;
  double *values;
  int64_t k, n;
  esmm_dtype dtype;
  esmm_format format;
  value_kind kind;
  bool strict; /* strict products can run */
} held;

enum { FOR_A, FOR_B, FOR_C, FOR_RESIDUAL, ARENAS };

typedef struct world {
  th_rng rng;
  esmm_ctx *ctx;
  int threads;
  bool remembers;
  held held[HELD];
  th_arena arena[ARENAS];
  double *values[ARENAS]; /* of what lies there, row-major */
  const char *dir;        /* for files */
  esmm_allocator allocator;
  int fail_in; /* the allocation that fails, counted from 1; 0: none */
  bool failed;
  char now[700];                   /* the call, in words */
  int64_t calls, products, across; /* made so far; products cut into several blocks along m, n or k, or shared out */
} world;

int64_t below(world *w, int64_t n); /* 0 to n - 1 */
bool chance(world *w, double share);
int64_t about(world *w, int64_t least, int64_t most); /* evenly in the logarithm */
esmm_dtype any_dtype(world *w);
esmm_order any_order(world *w);
void say(world *w, const char *format, ...) __attribute__((format(printf, 2, 3))); /* adds to w->now */
void must_be(world *w, esmm_status got, esmm_status want);

/*
 * Values [rows, cols] with zeros in places of some kind (none, single ones, strips, dead k's, all), from `density` or
 * a density of its own. k runs along the columns if k_is_cols.
 */
void draw_values(world *w, double *values, int64_t rows, int64_t cols, value_kind kind, bool k_is_cols);
/* A matrix in an arena with these values, which become what the dtype makes of them. */
esmm_matrix place_values(world *w, int arena, int64_t rows, int64_t cols, esmm_dtype dtype, double *values);
/* Is every element of padding between lines of m still what th_matrix_place made it? */
bool padding_intact(const esmm_matrix *m);

/* A held B with k rows (0: any) and n columns (0: any), prepared now or earlier; `but` stays held. */
held *any_weights(world *w, int64_t k, int64_t n, const held *but);
void drop_weights(held *h);

/* The calls: each makes one, and compares its result. */
void call_product(world *w);
void call_prune(world *w);
void call_format_check(world *w);
void call_copy(world *w);
void call_pattern(world *w);
void call_generate(world *w);
void call_layer(world *w);
void call_wrong(world *w);
void call_context(world *w);

#endif
