/*
 * ffn.h: what the files of the feed-forward layer share.
 *
 *   layer.c     the layer, its weights, its caches, and their ownership
 *   forward.c   x to y, and what the cache keeps
 *   backward.c  dy to gradients
 *   passes.h    the work between products, for each device
 *   cpu.c       a CPU's, made of
 *   sparsify.c  2:4 along either axis
 *   rows.c      moves and sums of rows: gathering, scattering, columns' sums
 *   masked*     dh where h is alive, and nowhere else
 *
 * Every matrix between products is row-major [tokens, features], so that a pass over it reads and writes it in order;
 * products that want it transposed take it as a column-major view.
 */
#ifndef ESMM_FFN_INTERNAL_H
#define ESMM_FFN_INTERNAL_H

#include "backend.h"
#include "ffn/passes.h"

#define FFN_STRIP 8          /* tokens that share one bitmap of h */
#define FFN_SHARE 0.95       /* sparse_share, unless given */
#define FFN_COMPACT 0.9      /* backward works on the alive features alone where they are at most this share of all */
#define FFN_MASKED 0.22      /* below this density of h, dh is computed element by element */
#define FFN_DECODE_TOKENS 16 /* so few go through the gate first */

/* One of the caller's matrices, and what forward passes multiply with. */
typedef struct ffn_factor {
  esmm_matrix matrix; /* data is NULL where the layer has none */
  esmm_weights *prepared;
} ffn_factor;

typedef struct ffn_branch {
  ffn_factor reduce; /* [d_model, rank1], with rank1 only */
  ffn_factor expand; /* [d_in, d_hidden] */
  float *bias;       /* [d_hidden] or NULL */
} ffn_branch;

enum { FFN_UP = 0, FFN_GATE = 1, FFN_BRANCHES = 2 };

typedef struct ffn_params {
  ffn_branch in[FFN_BRANCHES];
  ffn_factor contract; /* [d_hidden, d_out] */
  ffn_factor restore;  /* [rank2, d_model], with rank2 only */
  float *b2;           /* [d_model] or NULL */
} ffn_params;

struct esmm_ffn {
  esmm_allocator allocator;
  const esmm_backend *backend; /* where it computes, */
  int ordinal;                 /* on which of its devices */
  esmm_ffn_opts o;             /* defaults filled in */
  int64_t d_in, d_out;         /* the dimension that meets h on either side: a rank, or d_model */
  int branches;                /* 1, or 2 where gated */
  ffn_params params;
  uint64_t generation;    /* of its weights; 0: it has none */
  uint64_t weights_set;   /* how often so far */
  bool in_place;          /* they were set without options: the caller's matrices stay where they are */
  esmm_ffn_cache *caches; /* all that were made for this layer */
  uint64_t caches_made;   /* freed ones too */
  esmm_ffn_cache *own;    /* for passes without one */
};

/* Buffers of a cache. Those from FFN_SPARSE on are room to work in, and hold nothing between passes. */
enum {
  FFN_H,        /* [tokens, d_hidden] */
  FFN_PRE_UP,   /* before the activation, where its derivative needs it; where gated, what the gate multiplies */
  FFN_PRE_GATE, /* before the activation, where gated */
  FFN_IN_UP,    /* x times reduce, with rank1 */
  FFN_IN_GATE,
  FFN_T,       /* h times contract, with rank2 */
  FFN_COUNTS,  /* int32 [d_hidden]: nonzeros of each column of h */
  FFN_OPEN,    /* int32 [d_hidden], where gated by a ReLU: tokens that open each column's gate */
  FFN_ORDER,   /* int32 [d_hidden]: alive features, those of fewest nonzeros first */
  FFN_COLUMNS, /* int32 [d_hidden]: features that go sparse, by index; on a GPU the others, behind their place */
  FFN_TOKENS,  /* int32 [tokens]: the order that groups of tokens are taken from */
  FFN_KEYS,    /* uint64 [d_hidden]: to rank by, on a CPU */
  FFN_SPARSE,  /* an operand after sparsifying */
  FFN_PARTIAL, /* sums of rows, before they are added in order */
  FFN_DPRE_UP,
  FFN_DPRE_GATE,
  FFN_COMPACT_H, /* h's alive columns */
  FFN_PLACES,    /* int32 [d_hidden]: where a feature is among the alive ones, -1 where it is not */
  FFN_WEIGHTS,   /* rows of the caller's weights, gathered */
  FFN_WIDE_DT,   /* dt as fp32 rows */
  FFN_GRADIENT,  /* a gradient of the alive features alone */
  FFN_DT,        /* [tokens, rank2] */
  FFN_DS,        /* [tokens, rank1] */
  FFN_DX,        /* [tokens, d_model]: the up branch's part of a 16-bit dx */
  FFN_ROWS,      /* rows as fp32, a few a thread */
  FFN_NOTES,     /* a device's notes for the report: kept */
  FFN_OTHERS, /* int32 [d_hidden]: -1 for features that go sparse, else which of the others it is, where a device asks
                 for it; kept */
  FFN_SIDE,   /* columns of an operand that do not go sparse */
  FFN_TURNED, /* w1 [d_hidden][d_model], for passes of few tokens; kept */
  FFN_DECODE, /* a device's own memory for those; kept */
  FFN_BUFFERS
};

typedef struct ffn_buffer {
  void *data;
  size_t bytes;
} ffn_buffer;

struct esmm_ffn_cache {
  esmm_allocator allocator;
  const ffn_passes *passes; /* of its memory, */
  int ordinal;              /* and the device that it lies on, */
  bool on_device;           /* in its own memory */
  esmm_ffn *ffn;            /* NULL once the layer is freed */
  esmm_ffn_cache *previous, *next;
  uint64_t generation; /* of the weights its pass was made with; 0: it holds none */
  uint64_t number;     /* among the layer's caches: MVUE draws for each of them */
  uint64_t runs;       /* passes so far that did not fail: and anew in each */
  int64_t tokens;
  esmm_matrix x; /* the caller's */
  ffn_buffer buffers[FFN_BUFFERS];
  esmm_weights *b[FFN_BS]; /* that a device keeps from pass to pass */
  bool counted;            /* statistics of this pass were taken */
  bool in_graph;           /* a graph was captured that uses its memory, */
  int64_t graph_tokens;    /* its tokens */
  bool looked;             /* which features are dead in it was found out, for its backward pass */
  esmm_pattern *pattern;   /* of h, strips of FFN_STRIP tokens; NULL where none was taken */
  int64_t alive, sparse;   /* entries of FFN_ORDER and of FFN_COLUMNS */
  void *device;            /* the device's part */
  uint64_t turned;         /* generation of the weights that FFN_TURNED is of; 0: of none */
  int64_t shuffled;        /* tokens that FFN_TOKENS is an order of; 0: of none */
  /* For the report: */
  int64_t alive_columns; /* columns of h with a nonzero */
  int64_t nonzeros;
  double strip_density;
  esmm_ffn_drop drops[FFN_DROPS];
};

/* ---- layer.c ---- */

/* Room for rows x cols elements of `element` bytes, in cache->buffers[buffer].data. */
esmm_status esmm_ffn_reserve(esmm_ctx *ctx, esmm_ffn_cache *cache, int buffer, int64_t rows, int64_t cols,
                             size_t element);
/* The same as a tight row-major matrix. */
esmm_status esmm_ffn_matrix(esmm_ctx *ctx, esmm_ffn_cache *cache, int buffer, int64_t rows, int64_t cols,
                            esmm_dtype dtype, esmm_matrix *out);
/* A buffer that holds a matrix already. */
esmm_matrix esmm_ffn_view(const esmm_ffn_cache *cache, int buffer, int64_t rows, int64_t cols, esmm_dtype dtype);
static inline const int32_t *ffn_numbers(const esmm_ffn_cache *cache, int buffer)
{
  return cache->buffers[buffer].data;
}

esmm_status esmm_ffn_check_shape(esmm_ctx *ctx, const char *what, const esmm_matrix *m, int64_t rows, int64_t cols,
                                 esmm_matrix *out);
esmm_status esmm_ffn_check_report(esmm_ctx *ctx, const esmm_ffn_report *report);
/* The layer computes where the context does. */
esmm_status esmm_ffn_check_device(esmm_ctx *ctx, const esmm_ffn *ffn);
/* Copies the pass's numbers from the cache to the caller's report; forward: only that pass's. */
esmm_status esmm_ffn_fill_report(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache, bool forward,
                                 esmm_ffn_report *report);

static inline esmm_matrix ffn_transposed(esmm_matrix m)
{
  const int64_t rows = m.rows;
  m.rows = m.cols;
  m.cols = rows;
  m.order = m.order == ESMM_ROW_MAJOR ? ESMM_COL_MAJOR : ESMM_ROW_MAJOR;
  return m;
}

/* Is h zero wherever its activation's derivative is, and stays there? */
static inline bool ffn_makes_zeros(const esmm_ffn *ffn)
{
  return ffn->o.activation == ESMM_ACT_RELU || ffn->o.activation == ESMM_ACT_RELU2;
}
static inline bool ffn_is_lossy(const esmm_ffn *ffn)
{
  return ffn->o.mode == ESMM_FFN_SPLIT || ffn->o.mode == ESMM_FFN_SPARSE;
}

/* Does the backward pass leave out dead features? */
static inline bool ffn_compacts(const esmm_ffn *ffn)
{
  return ffn_makes_zeros(ffn) && ffn->backend->layer->compacts & 1u << ffn->o.mode;
}

/* splitmix64 */
static inline uint64_t ffn_random(uint64_t *state)
{
  uint64_t z = *state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

static inline uint64_t ffn_seed(const esmm_ffn *ffn, const esmm_ffn_cache *cache, ffn_operand operand)
{
  uint64_t state = ffn->o.seed;
  state = ffn_random(&state) ^ cache->number;
  state = ffn_random(&state) ^ cache->runs;
  return ffn_random(&state) + (uint64_t)operand;
}

/* ---- forward.c ---- */

/* Counts, order, columns and pattern of the h that the cache holds, unless it has them. */
esmm_status esmm_ffn_take_statistics(esmm_ctx *ctx, const esmm_ffn *ffn, esmm_ffn_cache *cache);
/* The fixed order of tokens for groups of four: the same for the same seed and number of tokens. */
void esmm_ffn_shuffle_tokens(uint64_t seed, int64_t tokens, int32_t *order);
/* How many columns go sparse. */
int64_t esmm_ffn_sparse_columns(const esmm_ffn *ffn);

/* ---- sparsify.c ---- */

/* dst = src with at most two nonzeros in each group of four, in the columns that the cache says; both [tokens, .] of
   one dtype, row-major. Adds to the cache's drops. */
esmm_status esmm_ffn_sparsify_matrix(esmm_ctx *ctx, esmm_ffn_cache *cache, const ffn_sparsify *how,
                                     const esmm_matrix *src, esmm_matrix *dst);

/* ---- rows.c ---- */

/* Elements order[0..count) of row `row` of m (all of it where order is NULL) as fp32. */
void esmm_ffn_load_row(const esmm_matrix *m, int64_t row, const int32_t *order, int64_t count, float *out);
/* The CPU's moves and sums, as passes.h says. They cannot fail, and do not round up: dst has the gathered rows
   alone. */
esmm_status esmm_ffn_gather_rows(esmm_ctx *ctx, const esmm_matrix *src, const int32_t *order, int64_t count,
                                 esmm_matrix *dst);
esmm_status esmm_ffn_gather_columns(esmm_ctx *ctx, const esmm_matrix *src, const int32_t *order, int64_t count,
                                    esmm_matrix *dst);
esmm_status esmm_ffn_scatter_rows(esmm_ctx *ctx, const esmm_matrix *src, const int32_t *places, esmm_matrix *dst,
                                  bool add);
esmm_status esmm_ffn_column_sums(esmm_ctx *ctx, esmm_ffn_cache *cache, const esmm_matrix *m, const int32_t *order,
                                 int64_t count, int64_t n, float *out, bool add);

/* ---- masked.h ---- */

/* out[t, i] = dt[t] . w[w_rows[i]] where alive[t, columns[i]] is above zero (or NaN), else 0. */
typedef struct ffn_masked {
  esmm_matrix dt, w;               /* [tokens, d], [.., d]: fp32, row-major */
  esmm_matrix alive;               /* [tokens, ..], row-major */
  esmm_matrix out;                 /* [tokens, features], fp32, row-major */
  const int32_t *w_rows, *columns; /* NULL: i */
} ffn_masked;

void esmm_ffn_masked_run(const esmm_ctx *ctx, const ffn_masked *job);
void esmm_ffn_masked_avx512(const esmm_ctx *ctx, const ffn_masked *job);
void esmm_ffn_masked_avx2(const esmm_ctx *ctx, const ffn_masked *job);
void esmm_ffn_masked_portable(const esmm_ctx *ctx, const ffn_masked *job);

#endif
