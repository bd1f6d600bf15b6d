/*
 * bench.h: what the parts of `esmm bench` share.
 *
 * bench.c reads the options and walks the sweep; bench_data.c makes the operands; bench_check.c holds results to a
 * float64 reference; bench_measure.c runs the contestants; bench_gpu.c is how a GPU does so; bench_report.c prints;
 * bench_extra.c has --skip-stats and --extraction, bench_stream.c --calls and --switch, bench_list.c --list,
 * bench_suites.c --suite, bench_plot.c --plot, bench_epilogue.c --epilogue, bench_given.c --given, bench_prepare.c
 * --prepare, bench_peers.c --peers, bench_energy.c --energy.
 */
#ifndef ESMM_CLI_BENCH_H
#define ESMM_CLI_BENCH_H

#include "blas.h"
#include "cli.h"
#include "cublas.h"
#include "energy.h"
#include "error_bound.h"

/* ---- bench_epilogue.c: the options ---- */

/* What --epilogue asks for, which only our kernels do: a dense library's product is plain. */
typedef struct bench_epilogue {
  bool any; /* of the following */
  bool bias, residual, gate, counts;
  esmm_activation activation;
  int64_t bitmap_rows; /* 0: no bitmaps */
} bench_epilogue;

/* text NULL: nothing. CLI_GO or CLI_USAGE. */
int bench_epilogue_parse(const char *text, bench_epilogue *out);

/* Options that a line of a list may have too. */
#define BENCH_PRODUCT_OPTIONS(b)                                                                                     \
  {"epilogue", CLI_STRING, &(b)->epilogue_words, "LIST", BENCH_EPILOGUE_HELP, 0, 0, NULL, NULL},                     \
      {"given", CLI_INT, &(b)->given_rows, "ROWS", "our products get A's bitmaps, of strips of ROWS rows", 1, 65536, \
       NULL,    NULL},                                                                                               \
  {                                                                                                                  \
    "peers", CLI_FLAG, &(b)->peers, NULL, "on a GPU also cuSPARSELt (nm:2:4) and cuSPARSE (zeros of B)", 0, 0, NULL, \
        NULL                                                                                                         \
  }
#define BENCH_EPILOGUE_HELP                                       \
  "our product's epilogue: bias, relu, relu2, gelu, gelu-tanh,\n" \
  "silu, gate, residual, counts, bitmaps:ROWS (default none)"

typedef struct bench_suite bench_suite;
typedef struct bench_plot bench_plot;

typedef struct bench {
  /* options */
  cli_problem problem;
  const char *kernel_words; /* as they were given */
  const char **kernels;     /* what they mean; "" is auto */
  int kernel_count;
  int64_t runs;
  bool no_check, no_tune, skip_stats, extraction, once, calls, prepare, peers, energy;
  const char *price_words; /* of --price, or NULL */
  double price;            /* dollars per kWh, or per hour of the machine */
  bool by_the_hour;
  const char *epilogue_words; /* NULL: none */
  bench_epilogue epilogue;
  int64_t given_rows;       /* 0: A's bitmaps are not given */
  bool alone;               /* --once, --calls, --prepare: no dense library and no random data beside ours */
  int64_t switch_every;     /* 0: not asked for */
  const char *list;         /* NULL: not asked for */
  const char *suite_word;   /* of --suite, or NULL */
  const bench_suite *suite; /* that is measured, or NULL; list is then what messages call it */
  char asked[32];           /* of the suite's product */
  const char *json, *csv, *plot;
  double sweep[64];
  int sweep_count; /* 0: none asked for */
  /* the machine */
  esmm_ctx *ctx;
  int threads;
  bool gpu; /* of ctx */
  blas_library libraries[BLAS_LIBRARIES];
  int library_count;
  cublas_library cublas; /* on a GPU: libraries[0] is this one by name and title */
  energy_meter meter;    /* of --energy */
  cli_progress progress;
  int done, total; /* for the progress line */
  int line;        /* of the list; 0 without one */
} bench;

/* ---- bench.c ---- */

/* The dense libraries of b->ctx's device, b->gpu and b->threads being set; cublas_close(&b->cublas) afterwards. */
void bench_open_libraries(bench *b);

/* ---- bench_data.c ---- */

enum { BENCH_TIMERS = 16, BENCH_STRIP = 128 };

/* The operands in a GPU's memory; matrices may share it. */
typedef struct bench_gpu {
  esmm_matrix a, c;                               /* in the dtypes asked for */
  esmm_matrix plain_a, plain_b, dense_a, dense_b; /* for cuBLAS, in library_dtype */
  esmm_matrix plain_c;                            /* its result */
  esmm_matrix plain_gate, gate_c;                 /* with a gate: its other product */
  bool transposed;                                /* plain_b and dense_b are column-major: cuBLAS is faster so (fp32) */
  esmm_matrix flush[2];                           /* copying one onto the other empties the L2 cache */
  esmm_timer *timers[BENCH_TIMERS];
  esmm_matrix owned[20];
  int owned_count;
} bench_gpu;

/* What an epilogue reads and writes. */
typedef struct bench_finish {
  io_matrix bias, residual;                          /* of the host: fp32 */
  io_matrix gate;                                    /* a second B, in B's dtype */
  io_matrix *plain_gate;                             /* [copies]: in fp32 */
  esmm_weights **gate_weights;                       /* [copies] */
  esmm_matrix near_bias, near_residual, near_counts; /* where the device wants them */
  io_matrix last_counts_host;                        /* int32_t in fp32's clothes, as near_counts */
  esmm_pattern *patterns[BENCH_TIMERS];              /* of calls not yet waited for; the last is the newest */
  int pattern_count;
} bench_finish;

/* oneDNN's operands of one problem. */
typedef struct bench_onednn {
  onednn_product *product; /* NULL: it is not there */
  char reason[128];        /* why it cannot; "": it can */
  esmm_dtype dtype;        /* of its A and B */
  bool narrow;             /* its C is of the dtype that ours has; else in fp32 */
  int copies, variants;
  io_matrix *a, *dense_a;      /* [variants]: borrowed where they are of that dtype already */
  void **b, **dense_b, **gate; /* [copies], in its layout; dense_b NULL: b is random dense data */
} bench_onednn;

typedef struct bench_peer bench_peer;
enum { BENCH_PEERS = 2 };

/*
 * The operands of one problem. With few rows in A the weights are what takes time, and in real use they come from
 * memory: then there are several copies of them, and several A's, and each call takes the next. On a GPU there is one
 * of each, and its cache is emptied before each call.
 */
typedef struct bench_data {
  int64_t m, k, n;
  cli_source source_b;
  esmm_dtype library_dtype; /* what the dense libraries multiply: fp32; on a GPU that of A and B where both have one of
                               16 bits and C has the same or fp32 */
  int copies, variants;     /* of B, of A */
  io_matrix *a;             /* [variants], in the dtype asked for */
  io_matrix b;
  esmm_weights **weights; /* [copies] */
  io_matrix c;            /* ours */
  io_matrix *plain_a;     /* [variants]: the same data in fp32, row-major, for the libraries and the reference */
  io_matrix *plain_b;     /* [copies] */
  io_matrix *dense_a;     /* [variants]: random dense data */
  io_matrix *dense_b;     /* [copies] */
  io_matrix plain_c;
  esmm_weights **dense_weights; /* [copies]: only where there is no library to compare with */
  double seconds_prepare;       /* median over the copies */
  esmm_weights_info info;
  double density_a;       /* exact element density */
  double strip_density_a; /* exact, of strips of BENCH_STRIP rows */
  bench_gpu gpu;
  bench_finish finish;
  esmm_pattern **given; /* [given_count]: of --given; NULL without */
  int given_count;
  bench_onednn onednn;
  bench_peer *peers[BENCH_PEERS];
  int peer_count;
} bench_data;

int bench_data_make(bench *b, bench_data *data); /* CLI_GO or a status; free it in both cases */
/* A step of a sweep for which only A has to be made anew: B, its weights and the random data stay. */
bool bench_data_fits(const bench *b, const bench_data *data);
int bench_data_next(bench *b, bench_data *data); /* as bench_data_make */
void bench_data_free(const bench *b, bench_data *data);

/* Borrowed where the matrix is fp32, row-major and tight already (then memory is NULL), else a copy. */
int bench_plain(esmm_ctx *ctx, const char *what, const esmm_matrix *m, bool always_copy, io_matrix *out);
/* A matrix of the host without zeros. */
int bench_dense(const bench *b, const char *what, esmm_operand operand, uint64_t seed, int64_t rows, int64_t cols,
                esmm_dtype dtype, io_matrix *out);
/* How many copies of `bytes` bytes make operands come from memory, as far as there is room. */
int bench_copies(size_t bytes);

/* ---- bench_check.c ---- */

typedef struct bench_reference {
  int64_t *rows;  /* rows of C that are checked, ascending */
  int64_t *terms; /* [row_count]: nonzeros of that row of A */
  int64_t row_count, n;
  double *values, *magnitudes; /* [row_count][n]: the sums, and those of |a||b| */
  double largest;              /* max |value| */
  /* with an epilogue, else NULL and 0: */
  bool finished; /* C is what the epilogue makes of the sums */
  esmm_activation activation;
  const float *bias, *residual;          /* [n], [m][n] */
  double *gate_values, *gate_magnitudes; /* [row_count][n] */
} bench_reference;

typedef struct bench_error {
  double relative;  /* max |C - reference| / max |reference|; INFINITY where C is NaN */
  double share;     /* the largest error as a share of what error_bound.h allows there; right up to 1 */
  int64_t row, col; /* where that is, and what it is */
  double got, want, allowed;
} bench_error;

/* a [m,k] and b [k,n] are tight rows. CLI_GO or a status; free it in both cases. */
int bench_reference_make(int threads, int64_t m, int64_t k, int64_t n, const float *a, const float *b,
                         bench_reference *reference);
void bench_reference_free(bench_reference *reference);
/* c holds all of C, or only the rows that are checked. */
bench_error bench_error_find(const bench_reference *reference, const error_rule *rule, const float *c,
                             bool only_checked);
/* A hash of the same elements: equal for equal bits. */
uint64_t bench_bits(const bench_reference *reference, const float *c, bool only_checked);

/* ---- bench_measure.c ---- */

typedef enum bench_outcome { BENCH_OK, BENCH_WRONG, BENCH_UNSUPPORTED, BENCH_NOT_CHECKED } bench_outcome;
const char *bench_outcome_str(bench_outcome outcome); /* "ok", "wrong", "unsupported", "not_checked" */

typedef struct bench_contestant {
  const blas_library *library; /* NULL: ours */
  bench_peer *peer;            /* NULL: ours or a dense library's */
  const char *force;           /* ours: a kernel, "" for auto */
  bool vector;                 /* a library's routine for one row, or for one column: sgemv */
  bool dense_data;             /* on the random dense operands */
  bool passes;                 /* a library's product, then one pass over C for --epilogue: beside the peers */
  bool is_baseline;
  char name[64]; /* "joint_f32_avx2", "openblas_sgemm", "openblas_sgemm_on_random", "cublas_gemm_bf16" */
  bench_outcome outcome;
  char reason[256]; /* why this kernel, or why not */
  double rel_err;
  bench_error error; /* the worst of its checks */
  int checks;        /* how often that kernel was compared, into C full of NaN */
  uint64_t bits;     /* of what was compared last */
  bool varies;       /* the checks found different bits */
  double *seconds;   /* every timed call */
  int count, calls, per_round;
  int batch; /* calls that are timed together */
  double estimate;
  double median, p95, fastest; /* seconds; NAN when there is none */
  double extract, plan;        /* medians, ours only */
  double first;                /* median of a call that knows nothing of those before; auto on a GPU only */
  double joules, watts;        /* of a call, and while calls followed each other; NAN: not measured */
  esmm_stats stats;            /* of the checked call, ours only */
} bench_contestant;

typedef struct bench_result {
  bench_contestant *contestants; /* ours first, in the order asked for */
  int ours, peers, count;        /* ours, then baselines, then peers */
  int best;                      /* index of the fastest baseline, -1: there is none */
  double baseline_err;           /* of that library and routine on this data */
  int64_t checked_rows;
} bench_result;

int bench_measure(bench *b, bench_data *data, bench_result *result); /* CLI_GO or a status */
int bench_routines(const bench *b, const bench_data *data);          /* of a library for this product: 1, or 2 */
/* One product; turn picks the copies. On a GPU it is put on the stream. */
esmm_status bench_call(bench *b, bench_data *data, const bench_contestant *c, int turn, esmm_stats *stats);
int bench_call_failed(const bench *b, const bench_contestant *c, esmm_status status);
/* Calls until the plan has learnt from c's calls: auto on a GPU. */
int bench_settle(bench *b, bench_data *data, const bench_contestant *c);
void bench_result_free(bench_result *result);
int bench_once(bench *b, bench_data *data);     /* each kernel once, nothing measured: for profilers */
double bench_median(double *values, int count); /* sorts them; NAN for none */

/* ---- bench_onednn.c ---- */

int bench_onednn_make(const bench *b, bench_data *data); /* CLI_GO or a status; bench_data_free frees it */
int bench_onednn_next(const bench *b, bench_data *data); /* the new A's */
void bench_onednn_free(bench_data *data);
io_matrix *bench_onednn_result(bench_data *data); /* its C */
bool bench_onednn_call(const bench *b, bench_data *data, const bench_contestant *c, int variant, int copy);

/* ---- bench_given.c ---- */

int bench_given_make(const bench *b, bench_data *data); /* when A is there; again for the next A */
const esmm_pattern *bench_given(const bench_data *data, const bench_contestant *c, int variant);
void bench_given_free(bench_data *data);

/* ---- bench_epilogue.c ---- */

int bench_finish_make(bench *b, bench_data *data); /* CLI_GO or a status; bench_data_free frees it */
void bench_finish_free(const bench *b, bench_data *data);
/* Our options for one call: opts gets what the epilogue needs. */
void bench_finish_opts(const bench *b, bench_data *data, int turn, esmm_matmul_opts *opts);
/* After calls that were waited for: lets go of their bitmaps but the newest. */
void bench_finish_release(bench_data *data);
/* On a GPU: the epilogue on each element of a library's plain C, in one pass. */
bool bench_finish_can_pass(const bench *b);
esmm_status bench_finish_pass(bench *b, bench_data *data);
/* Adds the epilogue. */
int bench_finish_reference(const bench *b, const bench_data *data, bench_reference *reference);
/* The exact result for row i of the reference and column j, and how far it may be off before it is stored. */
double bench_finish_exact(const bench_reference *reference, const error_rule *rule, int64_t i, int64_t j,
                          double *error);
/* Are the counts and bitmaps of the last call those of C? CLI_GO with *right, and why not; or a status. */
int bench_finish_check(const bench *b, bench_data *data, bool *right, char *why, size_t why_bytes);

/* ---- bench_peers.c ---- */

/* Libraries for sparse weights. One that cannot multiply this has a reason. */
void bench_peers_make(bench *b, bench_data *data);
void bench_peers_free(bench *b, bench_data *data);
esmm_status bench_peer_call(bench_peer *peer);
const char *bench_peer_name(const bench_peer *peer);
const char *bench_peer_reason(const bench_peer *peer); /* "": it can */
const esmm_matrix *bench_peer_result(const bench_peer *peer);

/* ---- bench_gpu.c ---- */

/* Copies the operands there and prepares the weights; frees what the host no longer needs. */
int bench_gpu_make(bench *b, bench_data *data);
void bench_gpu_free(const bench *b, bench_data *data);
int bench_gpu_next(const bench *b, bench_data *data); /* the new A in the old one's place */
/* One product, put on the default stream. */
esmm_status bench_gpu_call(bench *b, bench_data *data, const bench_contestant *c, esmm_stats *stats);
/* The cache emptied, then a call, `count` times; seconds of the GPU's own clock. */
esmm_status bench_gpu_time(bench *b, bench_data *data, const bench_contestant *c, double *seconds, int count);
esmm_status bench_gpu_flush(const bench *b, bench_data *data);
/* Forgets, then calls until the plan remembers enough. */
esmm_status bench_gpu_settle(bench *b, bench_data *data, const bench_contestant *c);
/* The median of calls that follow a forgetting. */
esmm_status bench_gpu_first(bench *b, bench_data *data, const bench_contestant *c, double *seconds);
/* NaN into the rows of C that are checked; the error of what is there later, and a hash of it. */
esmm_status bench_gpu_poison(const bench *b, bench_data *data, const bench_contestant *c,
                             const bench_reference *reference);
esmm_status bench_gpu_error(const bench *b, bench_data *data, const bench_contestant *c,
                            const bench_reference *reference, const error_rule *rule, bench_error *error,
                            uint64_t *bits);

/* ---- bench_report.c ---- */

typedef struct bench_report {
  FILE *out; /* where people look: stderr when a record goes to stdout */
  cli_table *table, *skip_table, *extraction_table, *energy_table;
  char energy_title[200];
  cli_output json, csv;
  bool csv_started;
  FILE *remarks; /* printed below the table, from text */
  char *text;
  size_t bytes;
  int wrong, measured;
  char refused[256]; /* why the first of our kernels that could not run could not; "" if all could */
  int failed;        /* products of a list */
  bool noisy, starred;
  bench_plot *plot; /* of --plot; NULL: nothing was measured yet */
} bench_report;

enum { BENCH_FIELDS = 96 }; /* of a record, at most */

int bench_report_open(const bench *b, bench_report *report);
/* The first cell of a row where a table has several products: which of them it is of. */
void bench_report_place(const bench *b, const bench_data *data, cli_table *t);
/* The lines above the table: the machine and the problem, whose first step was just measured. result NULL: no more. */
void bench_report_head(const bench *b, const bench_data *data, const bench_result *result, bench_report *report);
void bench_report_add(const bench *b, const bench_data *data, const bench_result *result, bench_report *report);
/* The measurements of one of our kernels; out has room for BENCH_FIELDS. Returns how many. */
int bench_report_fields(const bench_data *data, const bench_result *result, const bench_contestant *c, cli_field *out);
/* A record of these fields, after those of the request. */
void bench_report_record(const bench *b, const bench_data *data, bench_report *report, const char *kernel,
                         const char *requested, const cli_field *own, int count);
int bench_report_close(bench_report *report); /* prints the tables, replaces the files */
void bench_report_discard(bench_report *report);

/* ---- bench_extra.c ---- */

/* Both add rows to a table of the report, which they make when it is not there yet. */
int bench_skip_stats(const bench *b, const bench_data *data, bench_report *report);
int bench_extraction(const bench *b, const bench_data *data, bench_report *report);

/* ---- bench_energy.c ---- */

int bench_energy_parse(bench *b); /* --price: CLI_GO or CLI_USAGE */
void bench_energy_open(bench *b); /* b->meter, or why there is none; energy_close() later */
/* Joules of ours, of the fastest dense library and of peers. CLI_GO or a status; a meter that fails is none of these.
 */
int bench_energy(bench *b, bench_data *data, bench_result *result);
double bench_energy_dollars(const bench *b, double joules, double seconds); /* of a million products; NAN: no price */
int bench_energy_fields(const bench *b, const bench_result *result, const bench_contestant *c, cli_field *out);
void bench_energy_add(const bench *b, const bench_data *data, const bench_result *result, bench_report *report);
void bench_energy_title(const bench *b, char *out, size_t bytes);

/* ---- bench_stream.c ---- */

/* Both print their own table through the report, and write a record. */
int bench_calls(bench *b, bench_data *data, bench_report *report);
int bench_switch(bench *b, bench_data *data, bench_report *report);

/* ---- bench_prepare.c ---- */

/* --prepare: pruning B to its format and preparing it. */
int bench_prepare(bench *b, bench_data *data, bench_report *report);

/* ---- bench.c ---- */

/* Measures and reports the product whose operands were made. */
int bench_product(bench *b, bench_data *data, bench_report *report); /* CLI_GO or a status */

/* ---- bench_list.c ---- */

/* The products of b->list, or of b->suite, each with the options of the command line and those of its line. */
int bench_list(bench *b, bench_report *report);

/* ---- bench_plot.c ---- */

int bench_plot_check(const bench *b); /* CLI_GO or CLI_USAGE: the options */
void bench_plot_add(const bench *b, const bench_data *data, const bench_result *result, bench_plot **plot);
int bench_plot_write(const bench *b, bench_plot *plot); /* CLI_GO or CLI_FAILED */

/* ---- bench_suites.c ---- */

int bench_suite_find(const char *name, bool gpu, const bench_suite **out); /* CLI_GO or CLI_USAGE */
int bench_suites_print(void);                                              /* --suite list: an exit status */
int bench_suite_products(const bench_suite *suite);
/* The options of one product, to free(); NULL: no memory. asked: what its last list gave. */
char *bench_suite_line(const bench_suite *suite, int product, char *asked, size_t asked_bytes);
const char *bench_suite_name(const bench_suite *suite);

#endif
