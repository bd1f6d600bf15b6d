/*
 * product.h: one product on a GPU, as the files of this folder share it.
 *
 *   matmul.c   stage, choose, launch, copy back, count     plan.c    which kernel; host or device chooses
 *   stage.c    operands in host memory                     launch.c  launches, marks in the stream's time
 *   stats.c    a call's statistics: these wait             recall.c  densities that earlier calls saw
 *   tune.c     how kernels are measured                    live.c    what calls take, from events around some
 *
 * Scratch holds, in this order: staged A, C, biases, residual and counts, the notes, the gate's branch, B's strips, the
 * kernels' workspace.
 */
#ifndef ESMM_CUDA_PRODUCT_H
#define ESMM_CUDA_PRODUCT_H

#include "choose/choose.h"
#include "cuda/cuda.h"

#define SCRATCH_ALIGN 256

/* What of a call lies in host memory, and where in scratch it is staged. */
typedef struct staging {
  bool a_staged, c_staged, bias_staged, gate_bias_staged, residual_staged, counts_staged;
  bool residual_is_c;         /* and C is staged */
  esmm_matrix a, c, residual; /* the caller's */
  const float *bias, *gate_bias;
  int32_t *counts;
  size_t a_at, c_at, bias_at, gate_bias_at, residual_at, counts_at;
  size_t factor_at; /* the gate's branch, where there is one */
  size_t notes_at, b_at, work_at;
  size_t bytes; /* of all scratch up to here: the notes, or the gate's branch */
} staging;

/* What the device reports, when statistics are wanted or a choice is explained. */
typedef struct notes {
  esmm_choice_device choice; /* of the sample: selectors look at it */
  esmm_choice_device report; /* of the kernel that ran, where it has something to say */
  uint64_t joint;
} notes;

/* A kernel with what it costs: a line in the densities of A at its strips. */
typedef struct candidate {
  const esmm_kernel *kernel; /* NULL: there is none */
  int index;
  int64_t variant;
  double base, per_strip, per_joint;
  double over, over_per_strip; /* off the line at low density: max(0, over + over_per_strip * strip) */
  /* Seconds of 2:4 overflow: base has most_overflow; per_overflow times the overflow's share may be less. */
  double per_overflow, most_overflow;
  double b;    /* B's density at its strips: no joint density is above it */
  size_t work; /* its workspace, bytes; SIZE_MAX: too large */
} candidate;

typedef enum which { RUN_DENSE = 0, RUN_SKIP = 1, DEVICE_CHOOSES } which;

/* What a call knows of A's densities before it sees A. */
typedef enum memory {
  MEMORY_OFF,     /* it does not ask */
  MEMORY_EMPTY,   /* nothing yet */
  MEMORY_REFUSED, /* there is no pinned memory for reports */
  MEMORY_SILENT,  /* a report never came */
  MEMORY_KNOWN
} memory;

typedef struct decision {
  candidate of[2]; /* RUN_DENSE, RUN_SKIP */
  which run;
  bool pair;     /* DEVICE_CHOOSES inside the skipping kernel: the dense one is its partner */
  bool whole;    /* of a gated product: one launch makes both branches */
  bool strip128; /* A is sampled at strips of 128 rows: those of the best skipping kernel */
  int considered;
  memory memory;
  bool by_pattern; /* MEMORY_KNOWN by the call's own pattern of A, not by earlier calls */
  /* With MEMORY_KNOWN, for the reason's text: */
  const esmm_kernel *next; /* the cheapest after the chosen one; NULL: there is none */
  double seconds, next_seconds;
  double predicted; /* of the chosen one, by its cost model alone */
} decision;

/* The candidates for calls of one shape, whatever A holds: kept in the context (recall.h). */
#define MOST_CANDIDATES 16
typedef struct candidates {
  decision unseen; /* where A's densities are not known */
  int count;
  bool skips;           /* a skipping kernel and another are among them: A's densities matter */
  bool strip8;          /* one of strips of 8 rows is, and may beat all dense ones: A's elements must be counted */
  esmm_history history; /* of choices with known densities */
  int stands, lent;     /* calls that the choice still holds for; those that history has counted */
  int chosen;           /* its place in all */
  double stood_seconds, stood_predicted;
  esmm_density_class seen; /* it holds while A's densities stay in this class */
  int delay;               /* calls until a report is used */
  double dense;            /* seconds of the cheapest dense kernel */
  bool overflow_matters;   /* one kernel is cheaper than that if no element of A overflows 2:4: ask for the share */
  candidate all[MOST_CANDIDATES];
} candidates;
_Static_assert(sizeof(candidates) <= ESMM_SHAPE_BYTES, "raise ESMM_SHAPE_BYTES");

/* Marks in the stream's time; the kernels of a pair run one after the other, so each has its own. */
enum { START, STAGED, PLANNED, EXTRACTED, DONE = EXTRACTED + 2, END = DONE + 2, MARKS };

typedef struct run {
  esmm_ctx *ctx;
  esmm_problem *p;
  CUstream stream;
  staging st;
  decision d;
  CUdeviceptr scratch;
  bool timed;
  bool branch;         /* of a gated product: it is not timed for itself */
  CUevent mark[MARKS]; /* all NULL unless timed */
  esmm_strips a_strips[2];
  bool all_of_b[2];
  esmm_stats stats[2]; /* as each kernel fills them */

  esmm_plan plan;        /* of a choice among kernels by known densities */
  esmm_history *history; /* of such calls */

  esmm_seen *seen;            /* what is remembered for such calls; NULL: nothing */
  esmm_seen view;             /* a copy of it, for explanations; or what the call's pattern says, */
  esmm_seen strip128, strip8; /* and that at strips of 128 rows and of 8, where view is at 32 */
  int64_t call;               /* number of this one among them; -1: it does not count */
  esmm_choice_device *report; /* where it reports; NULL: it does not */
  CUdeviceptr report_at;      /* the same for the device */
  bool reports_itself;        /* the kernel does; else a sampling launch goes before it */
  CUdeviceptr gate_report_at; /* where it reports to for the gate's run, too; 0: it does not */
} run;

static inline CUdeviceptr note_at(const run *r, size_t offset)
{
  return r->scratch + r->st.notes_at + offset;
}

/* The strips that the kernel counts A's densities at have 128 rows, or 32; index into esmm_sample. */
static inline bool uses_strip128(const esmm_kernel *kernel)
{
  return kernel->reads & (ESMM_FORM(ROWS16) | ESMM_FORM(CELLS16));
}
static inline int64_t strip_rows(bool strip128)
{
  return strip128 ? ESMM_TILE : ESMM_STRIP;
}
/* Its strip density is derived from others: see esmm_run_strip8_density. */
static inline bool uses_strip8(const esmm_kernel *kernel)
{
  return esmm_cuda_about(kernel)->strip_rows > 0;
}
#define STRIP8_LEVEL 3 /* strips of 8 rows, which is what such kernels have */
static inline int sample_level(const esmm_kernel *kernel)
{
  return uses_strip8(kernel) ? STRIP8_LEVEL : uses_strip128(kernel) ? 7 : 5;
}

/* The call must make B's strips. */
static inline bool wants_strips(const esmm_problem *p, const esmm_kernel *kernel)
{
  return kernel && kernel->reads & ESMM_FORM(STRIPS) && !(p->w->forms & ESMM_FORM(STRIPS));
}

/* stage.c */
/* Lays out r's staging, and gives its problem device operands, with addresses not known yet. gate_bias: that of a gated
   product. */
esmm_status esmm_run_stage(run *r, bool with_a, const float *gate_bias);
/* Their addresses, and copies of what the product needs; without the epilogue, of A alone. */
esmm_status esmm_run_upload(run *r, bool epilogue, size_t *moved);
esmm_status esmm_run_copy_back(run *r, size_t *moved);
static inline const float *esmm_run_gate_bias(const run *r) /* where it is after the upload */
{
  return r->st.gate_bias_staged ? esmm_cuda_pointer(r->scratch + r->st.gate_bias_at) : r->st.gate_bias;
}

/* plan.c */
/* Sets r's decision. counts: a product follows, which is one more call to remember; else it is only asked for. */
esmm_status esmm_run_choose(run *r, const char *force, bool counts);
/* Is one launch better than the two decided for a gated product, r's and gate's? Then that is r's decision. branch: as
   kernels see it, but for the address of its bias. */
bool esmm_run_choose_whole(run *r, const run *gate, const esmm_gate *branch, const char *force);
/* overflow: below 0 where it is not known. */
double esmm_run_seconds_at(const candidate *c, double strip, double joint, double overflow);
/* The density of strips of `fewer` rows, by that of elements and that of strips of `rows` rows; never more than the
   latter. element is 0 where it is not known. */
double esmm_run_strip8_density(double element, double strip, int64_t rows, int64_t fewer);
esmm_cuda_line esmm_run_line(const decision *d);
void esmm_run_note_class(const run *r); /* what was known of A, for explanations of the same problem */
/* Why `chosen` runs, at the densities of choice. */
void esmm_run_reason(const run *r, const char *force, which chosen, const esmm_choice_device *choice, char *text,
                     size_t bytes);

/* recall.c */
/* How late reports of such products are used. */
void esmm_run_set_pace(candidates *list, int64_t m, double dense_seconds);
/* Looks up what is known for this call, and takes the reports that are due. */
void esmm_run_recall(run *r, const candidates *list, bool counts);
void esmm_run_ask_for_report(run *r, const candidates *list); /* once it is decided what runs */
void esmm_run_let_sample(run *r);                             /* another kernel runs, which does not report itself */
void esmm_run_expect_report(run *r);                          /* once it is launched */
/* The report of a call that has read A's densities itself. */
void esmm_run_report(run *r, const esmm_choice_device *densities);

/* live.c */
/* How a call may be timed, once times of earlier calls are taken. counts: a product follows, which may change what is
   kept. */
void esmm_live_clock(run *r, bool counts, esmm_clock *clock);
/* Around the launches that the plan times; the sample that a report needs comes before. */
void esmm_live_begin(run *r);
void esmm_live_end(run *r);

/* launch.c */
esmm_status esmm_run_mark(const run *r, int which_mark);
esmm_status esmm_run_make_marks(run *r);
void esmm_run_free_marks(run *r);
/* Samples A at strips of that height, and chooses by d's line. */
esmm_status esmm_run_sample(esmm_ctx *ctx, const esmm_problem *p, const decision *d, bool strip128, CUdeviceptr out,
                            CUstream stream);
/* If the call reports and its kernel does not: a sampling launch before it. */
esmm_status esmm_run_report_ahead(run *r);
esmm_status esmm_run_launch(run *r);
/* The choice that a launch would make, without the product. */
esmm_status esmm_run_look(run *r, CUdeviceptr out);

/* stats.c */
esmm_status esmm_run_seconds_between(const run *r, int from, int to, double *seconds);
esmm_status esmm_run_stats(run *r, const char *force, esmm_stats *s);

#endif
