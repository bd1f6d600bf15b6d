/*
 * models.h: files of tensors, for the commands that go through whole models (inspect, prune, bench-weights) or take
 * a tensor of one (bench, run).
 */
#ifndef ESMM_CLI_MODELS_H
#define ESMM_CLI_MODELS_H

#include "../io/tensors.h"
#include "cli.h"
#include "inspect/baseline.h"

/* Which axis of a tensor is k, the one that a product sums over. */
typedef enum model_k_axis {
  MODEL_K_AUTO,  /* the last in safetensors and .pt, the first in .npy and raw files */
  MODEL_K_LAST,  /* [out, in], as torch.nn.Linear keeps its weight: B is the tensor transposed */
  MODEL_K_FIRST, /* [in, out]: B is the tensor as it is */
} model_k_axis;

/* clang-format off */
#define MODEL_K_AXIS_OPTION(target, seen) \
  {"k-axis", CLI_CHOICE, target, "auto|last|first",                                                                    \
   "the axis that products sum over: last is [out, in], as PyTorch's\n"                                                \
   "Linear has it, first is [in, out], as B is multiplied; auto:\n"                                                    \
   "last for safetensors and .pt, first for .npy and raw files", 0, 0, "auto|last|first", seen}
/* clang-format on */

/* Does the path name a model: a directory, the index of one in several files (.index.json), or a file that is
   safetensors or .pt by its first bytes or its ending? */
bool model_is(const char *path);

/* Files of tensors: the path itself, or those below a directory, by name. */
typedef struct model_files {
  char **paths;
  int count;
  size_t prefix; /* of each path, that need not be shown */
  int failed;    /* directories and links that could not be looked into, and were said */
  bool one;      /* they are one model: those that an index names */
} model_files;

int model_files_find(const char *path, model_files *files); /* CLI_GO, or CLI_FAILED where there is none */
int model_files_spared(const model_files *files, const char *what, const char *path); /* see cli_output_spares */
void model_files_free(model_files *files);

/* The shape that a raw file's name gives ("w_4096x11008.f32"); both 0 where there is none. */
void model_raw_shape(const char *path, int64_t *rows, int64_t *cols);

/* A .npy or raw file; known: its shape, else that of its name where it is raw. what: the option, or NULL. */
int model_read(const char *what, const char *path, bool known, int64_t rows, int64_t cols, io_matrix *out);
/* The same, or a tensor, as model_load has it; a tensor of one dimension is a row. what: the option. */
int model_read_word(esmm_ctx *ctx, const char *what, const char *word, bool as_b, model_k_axis axis, bool known,
                    int64_t rows, int64_t cols, io_matrix *out);

/* B [k,n] of a tensor's matrix: itself, or the same memory seen transposed. */
esmm_matrix model_as_b(const io_tensors *tensors, const esmm_matrix *matrix, model_k_axis axis);

/*
 * A tensor by a word for --load-a and --load-b: FILE::TENSOR, or a safetensors or .pt file that has one matrix; FILE
 * may be the index of a model in several files. The copy is row-major and tight, in the tensor's dtype; as_b: B [k,n]
 * by axis, else the tensor as it is.
 */
bool model_is_word(const char *word);
int model_load(esmm_ctx *ctx, const char *what, const char *word, bool as_b, model_k_axis axis, io_matrix *out);

/* "[4096, 11008]" in a static ring: good until a few calls later. */
const char *model_shape(const io_tensor *tensor);

/* ---- densities (model_density.c) ---- */

enum { MODEL_STRIPS = 5, MODEL_BLOCKS = 4, MODEL_GROUPS = 3 };
extern const int64_t model_strips[MODEL_STRIPS]; /* columns of B that share a bitmap */
extern const int64_t model_blocks[MODEL_BLOCKS]; /* rows and columns of a block */
extern const int model_groups[MODEL_GROUPS];     /* k's of a group of N:M */

typedef struct model_densities {
  double element;
  double strip[MODEL_STRIPS];
  double block[MODEL_BLOCKS];
  int most[MODEL_GROUPS]; /* nonzeros in a group of that many k's of one column */
} model_densities;

/*
 * What weights may be prepared as to fit the pattern that they show, and how to say it: "2:4 along k (--format
 * nm:2:4)", "blocks of 64 x 64 (--format bsr:64)"; "" where there is none. In a static buffer.
 */
const char *model_pattern(const model_densities *densities);

int model_measure(esmm_ctx *ctx, const char *what, const esmm_matrix *b, model_densities *out);

/* What the plan expects of a product A [m,k] x B, A dense. */
typedef struct model_prediction {
  double seconds, dense; /* of the chosen kernel, of the baseline; NAN where there is none */
  char kernel[32];       /* that most columns of B go to; "" for none */
  char why[160];         /* there is no prediction, or "" */
} model_prediction;

/* B is prepared a band of columns at a time, so that little memory is needed. CLI_GO also where `why` is not empty. */
int model_predict(esmm_ctx *ctx, const char *what, const esmm_matrix *b, int64_t m, const esmm_prepare_opts *opts,
                  const dense_baseline *baseline, model_prediction *out);

#endif
