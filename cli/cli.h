/*
 * cli.h: what the subcommands of esmm share.
 *
 * A subcommand is one function, int cmd_<name>(int argc, char **argv), that returns the exit status; argv[0] is its
 * name. It declares its options in a table, and the parser makes the checks and the --help text from that one table,
 * so that the two cannot disagree. Results go to stdout; errors and progress go to stderr.
 */
#ifndef ESMM_CLI_H
#define ESMM_CLI_H

#include "esmm_tools.h"

#include "../io/file.h"
#include "../io/npy.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* ---- subcommands ---- */

/* Exit statuses. CLI_GO is not one: it says that a check passed and the command goes on. */
enum { CLI_GO = -1, CLI_OK = 0, CLI_FAILED = 1, CLI_USAGE = 2 };

typedef struct cli_command {
  const char *name, *summary;
  int (*run)(int argc, char **argv);
} cli_command;

int cmd_bench(int argc, char **argv);
int cmd_bench_weights(int argc, char **argv);
int cmd_check(int argc, char **argv);
int cmd_compare(int argc, char **argv);
int cmd_explain(int argc, char **argv);
int cmd_info(int argc, char **argv);
int cmd_inspect(int argc, char **argv);
int cmd_list(int argc, char **argv);
int cmd_profile(int argc, char **argv);
int cmd_prune(int argc, char **argv);
int cmd_report(int argc, char **argv);
int cmd_run(int argc, char **argv);
int cmd_tune(int argc, char **argv);

/* ---- errors: one line on stderr, "esmm: bench: --size: 12x is not a whole number" ---- */

void cli_set_command(const char *name); /* main does this; "" for esmm itself */
void cli_set_subject(const char *name); /* the subject of messages, put before each; "" for none */

/* Both print and return, so that `return cli_usage(...)` reads well. */
int cli_usage(const char *format, ...) __attribute__((format(printf, 1, 2)));  /* CLI_USAGE: the words were wrong */
int cli_failed(const char *format, ...) __attribute__((format(printf, 1, 2))); /* CLI_FAILED: the work went wrong */
/* A failure of the library: "what: the context's error text"; CLI_FAILED. ctx may be NULL. */
int cli_status(const esmm_ctx *ctx, const char *what, esmm_status status);
/* A remark on stderr that is not an error: "esmm: bench: ..." */
void cli_note(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Memory for the command's own small things; does not return NULL: prints and exits with CLI_FAILED. */
void *cli_alloc(size_t count, size_t size); /* zeroed */
void *cli_grow(void *ptr, size_t count, size_t size);

/* ---- loops (parallel.c) ---- */

typedef void cli_item(void *arg, int64_t i);
void cli_parallel(int threads, int64_t items, cli_item *item, void *arg); /* items 0 to items - 1, in any order */

/* ---- options (args.c) ---- */

typedef enum cli_kind {
  CLI_FLAG,     /* bool: no value */
  CLI_INT,      /* int64_t in [min, max] */
  CLI_SEED,     /* uint64_t, all of them */
  CLI_DOUBLE,   /* double in [min, max] */
  CLI_DENSITY,  /* double in [0, 1]: "0.5", ".5", "50%" */
  CLI_STRING,   /* const char *, not empty */
  CLI_OPTIONAL, /* const char *: "" for --name alone; --name=value, or a separate word that is one of choices */
  CLI_CHOICE,   /* int: the index in choices, "any|decode|large-m" */
  CLI_DTYPE,    /* int: an esmm_dtype, by its name */
  CLI_DIMS,     /* int64_t[3], each in [min, max]: --dims M K N, or --dims=MxKxN */
  CLI_HEADING   /* no option: help is a heading in the --help text */
} cli_kind;

typedef struct cli_option {
  const char *name; /* without the dashes: "density-a" */
  cli_kind kind;
  void *target;        /* as kind says; keeps its value when the option is not there */
  const char *value;   /* what --help calls the value: "N" */
  const char *help;    /* may hold newlines: they start an aligned line */
  double min, max;     /* CLI_INT, CLI_DOUBLE, CLI_DIMS; both 0: no limits but the type's (CLI_INT, CLI_DIMS: >= 0) */
  const char *choices; /* CLI_CHOICE; CLI_OPTIONAL: words it takes */
  bool *seen;          /* set when the option was there; may be NULL */
} cli_option;

typedef struct cli_parser {
  const char *synopsis;      /* "bench [kernels] [runs] [options]" */
  const char *about;         /* a paragraph, its lines broken by hand at 100 columns */
  const cli_option *options; /* ends with an entry whose kind is CLI_FLAG and whose name is NULL, that is {0} */
  const char *notes;         /* printed after the options: rules and examples; may be NULL */
  int min_words, max_words;  /* how many words may stand beside the options */
  const char *words_are;     /* for the error about too few or too many: "a file" */
  bool alone;                /* a separate program: the synopsis has its name */
} cli_parser;

/*
 * Parses argv[1..]. The words that are not options are left, in order, in words[0..*count-1] (room for max_words).
 * Options may stand anywhere; "--" ends them; an option given twice is an error. Returns CLI_GO, or the exit status:
 * CLI_OK after --help (also -h), CLI_USAGE after an error.
 */
int cli_parse(const cli_parser *parser, int argc, char **argv, const char **words, int *count);

/* Single values, checked; `what` names the thing in the error. Return CLI_GO or CLI_USAGE. */
int cli_parse_int(const char *what, const char *text, int64_t min, int64_t max, int64_t *out);
int cli_parse_double(const char *what, const char *text, double min, double max, double *out);
int cli_parse_density(const char *what, const char *text, double *out);
/* "1,.75,50%": at most room values; *count says how many. */
int cli_parse_densities(const char *what, const char *text, double *out, int room, int *count);

/* --format: "dense", "bsr:R", "bsr:RxC", "nm:N:M", "nm:N:M:C", and "N:M" for "nm:N:M"; NULL is dense. */
int cli_parse_format(const char *text, esmm_format *format);

/* The candidate nearest to word by edit distance, or NULL when none is near enough to be worth suggesting. */
const char *cli_closest(const char *word, const char *const *candidates, int count);

/* ---- tables, colour, progress (table.c) ---- */

typedef enum cli_style { CLI_PLAIN, CLI_BOLD, CLI_FAINT, CLI_GOOD, CLI_BAD, CLI_WARN } cli_style;

bool cli_colour(FILE *out); /* a terminal, TERM not "dumb", and NO_COLOR unset or empty */
/* fprintf in a style; plain text where there is no colour. */
void cli_print(FILE *out, cli_style style, const char *format, ...) __attribute__((format(printf, 3, 4)));
int cli_width(const char *utf8); /* columns a string takes on a terminal */
/* Columns that lines of out should fit: COLUMNS where it is set, else the terminal's; 0 where out is no terminal. */
int cli_screen_width(FILE *out);

typedef struct cli_table cli_table;
/* align: one character a column, 'l' or 'r'; its length is the number of columns. heads: one a column, or NULL. */
cli_table *cli_table_new(const char *align, const char *const *heads);
/* The next cell, left to right, row after row. */
void cli_table_cell(cli_table *table, cli_style style, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* A row of a table of facts: the name in bold, then the text. */
void cli_table_fact(cli_table *table, const char *name, const char *format, ...) __attribute__((format(printf, 3, 4)));
void cli_table_rule(cli_table *table); /* a thin line before the next row */
/*
 * Columns two spaces apart, no blanks at the ends of lines. A table wider than width (0: no limit) breaks its last
 * column between words if that is text; else the columns that do not fit follow in further tables below, each after the
 * first column. cli_table_print takes the screen's width.
 */
void cli_table_print(const cli_table *table, FILE *out);
void cli_table_print_wrapped(const cli_table *table, int width, FILE *out);
void cli_table_free(cli_table *table);

/* Human forms, in a static ring of buffers: good until some sixteen calls later. */
const char *cli_seconds(double seconds);               /* "1.23 ms" */
const char *cli_bytes(double bytes);                   /* "12.0 MiB" */
const char *cli_percent(double share);                 /* "12.5 %" */
const char *cli_number(double x, int digits);          /* significant digits; "-" where not finite */
const char *cli_count(int64_t count, const char *one); /* "1 row", "2 rows" */

/* One line on stderr that rewrites itself: only on a terminal, and only once the work has taken two seconds. */
typedef struct cli_progress {
  const char *title;
  double started, last;
  bool shown;
} cli_progress;

void cli_progress_start(cli_progress *progress, const char *title);
void cli_progress_update(void *progress, int done, int total); /* the shape of esmm_tune's callback */
void cli_progress_end(cli_progress *progress);                 /* takes the line away */

double cli_now(void); /* seconds, monotonic */

/* ---- output files (output.c) ---- */

/*
 * A file that appears whole or not at all: cli_output_open finds out whether it can be written, cli_output_close
 * replaces it. "-" is stdout; devices and pipes (/dev/null) are written straight.
 */
typedef struct cli_output {
  FILE *file;
  const char *path;
  char *text; /* what a regular file will hold */
  size_t bytes;
} cli_output;

bool cli_same_file(const char *x, const char *y); /* the same name, or two names of one file; NULL is none */

/*
 * CLI_GO, or a usage error where writing `path` would overwrite `other_path`, which the command reads or writes: a file
 * or FILE::TENSOR. Either may be NULL.
 */
int cli_output_spares(const char *what, const char *path, const char *other, const char *other_path);

int cli_output_open(cli_output *output, const char *what, const char *path); /* CLI_GO or CLI_FAILED */
int cli_output_close(cli_output *output, const char *what);                  /* CLI_GO or CLI_FAILED */
void cli_output_discard(cli_output *output);                                 /* leaves no trace; accepts a closed one */

/* JSON values; a number that is not finite is null. */
void cli_json_string(FILE *out, const char *text);
void cli_json_number(FILE *out, double x);

/* CSV: quoted where it must be. */
void cli_csv_string(FILE *out, const char *text);

/* A field of a record: listed once, printed as JSON or as CSV. */
typedef struct cli_field {
  const char *name;
  const char *text; /* NULL: a number */
  double number;
  bool literal; /* text is no string: a number with more digits than a double has, true or false, a list */
} cli_field;

void cli_json_fields(FILE *out, const cli_field *fields, int count); /* "name":value,... without the braces */
/* A line; where heads is true, the line of names before it. Numbers that are not finite are left empty. */
void cli_csv_record(FILE *out, const cli_field *fields, int count, bool heads);

/* ---- matrices and contexts (operand.c) ---- */

/*
 * io_matrix (io/npy.h) owns every matrix of the command, read or made; io_matrix_free() frees it, and its memory comes
 * from aligned_alloc or malloc, so that free() is right for it.
 */
int cli_matrix_alloc(const char *what, int64_t rows, int64_t cols, esmm_dtype dtype, io_matrix *out); /* row-major */
/* A copy in another dtype, row-major and tightly packed. */
int cli_matrix_convert(esmm_ctx *ctx, const char *what, const esmm_matrix *from, esmm_dtype dtype, io_matrix *out);

/* Where a command works. Put CLI_MACHINE_OPTIONS(&machine) into its option table. */
typedef struct cli_machine {
  const char *device; /* NULL: ESMM_DEVICE, else auto */
  int64_t threads;    /* 0: the default */
} cli_machine;

/* force NULL: none. Prints on failure; CLI_GO, CLI_USAGE (a bad device, force or count), CLI_FAILED (no such GPU). */
int cli_context(const cli_machine *machine, const char *force, esmm_ctx **ctx);
int cli_check_device(const char *what, const char *device); /* CLI_GO, or CLI_USAGE for no device's name */
bool cli_on_gpu(const esmm_ctx *ctx);

/* A pattern's statistics; all 0 for NULL, and the context's error text then stays. */
esmm_pattern_info cli_pattern(esmm_ctx *ctx, const esmm_pattern *pattern);

/* "2 threads", or on a GPU "cuda:0"; in a static buffer. */
const char *cli_workers(const esmm_ctx *ctx);
/* One faint line where auto became the CPU, under a heading of that width: "GPU        none: ..." */
void cli_print_no_gpu(const esmm_ctx *ctx, int width, FILE *out);

/*
 * A new matrix in the device's memory, row-major (or as order says) and tightly packed. data is NULL
 * after a failure; cli_device_free() accepts that.
 */
int cli_device_alloc(esmm_ctx *ctx, const char *what, int64_t rows, int64_t cols, esmm_dtype dtype, esmm_order order,
                     esmm_matrix *out);
/* The same with the values of a matrix that lies anywhere. */
int cli_device_copy(esmm_ctx *ctx, const char *what, const esmm_matrix *from, esmm_dtype dtype, esmm_order order,
                    esmm_matrix *out);
void cli_device_free(esmm_ctx *ctx, esmm_matrix *matrix);
/* A matrix of the host where the device's kernels want it: itself on a CPU, a copy on a GPU. */
int cli_device_view(esmm_ctx *ctx, const char *what, const esmm_matrix *host, esmm_matrix *out);
void cli_device_view_free(esmm_ctx *ctx, const esmm_matrix *host, esmm_matrix *view);

/* Unless there is a tuning cache: measures, saves, and says so in one line on stderr. Measures again if the machine was
   busy then and is idle now. */
int cli_tune_once(esmm_ctx *ctx);
void cli_warn_busy_tuning(const esmm_ctx *ctx); /* after tuning, where others used the machine: one line on stderr */

/*
 * Where A and B come from. Put CLI_PROBLEM_OPTIONS(&problem) into the option table, cli_problem_init() before the
 * parse, cli_problem_resolve() after it; cli_problem_make() as often as needed.
 */
typedef struct cli_source {
  const char *path;         /* loaded from here, or NULL: generated */
  const char *preset;       /* of an activations generator, or NULL */
  esmm_generator generator; /* when path is NULL */
  esmm_prune_opts prune;    /* when path is NULL: how to prune it; its format is dense for nothing */
  char text[128];           /* "blockwise, density 0.5, strip 32" */
} cli_source;

typedef struct cli_problem {
  /* the options as they were given */
  cli_machine machine;
  int64_t size, dims[3], strip;
  bool has_size, has_dims, has_strip;
  bool dense, random, blockwise, has_activations;
  const char *activations; /* preset, "" for none named */
  const char *pattern, *pattern_a, *pattern_b;
  double density, density_a, density_b, dead; /* NAN: not given */
  bool has_dtype, has_dtype_a, has_dtype_b, has_dtype_c;
  int dtype, dtype_a, dtype_b, dtype_c; /* esmm_dtype once resolved */
  uint64_t seed;
  const char *load_a, *load_b;
  const char *name_a, *name_b; /* what messages call them: the options, unless another command found the files */
  int k_axis;                  /* model_k_axis (models.h) of a load_b that names a tensor */
  int64_t tile_rows;           /* 0: not asked for */
  int use;                     /* esmm_use */
  const char *format;          /* NULL: dense */
  /* what they mean: set by cli_problem_resolve */
  double density_now; /* of this step of a sweep, else --density */
  cli_source a, b;
  esmm_prepare_opts prepare; /* use and format */
  int64_t m, k, n;           /* final once the operands are made: files may decide them */
} cli_problem;

void cli_problem_init(cli_problem *problem);
/* Checks the options against each other. density replaces --density where it is not NAN (a sweep). */
int cli_problem_resolve(cli_problem *problem, double density); /* CLI_GO or CLI_USAGE */
/* See cli_output_spares: the files that --load-a and --load-b name. */
int cli_problem_spared(const cli_problem *problem, const char *what, const char *path);
/* Makes or loads A and B in the asked dtypes; sets m, k, n. The caller frees both, also after a failure. b NULL: only
   A, which must not be a file. */
int cli_problem_make(esmm_ctx *ctx, cli_problem *problem, io_matrix *a, io_matrix *b);

#define CLI_MAX_DIMENSION 1e9

/* clang-format off */
#define CLI_DEVICE_OPTION(target)                                                                                      \
  {"device", CLI_STRING, target, "auto|cpu|cuda[:N]", "default: ESMM_DEVICE, else auto: the first GPU that works,\n" \
   "else the CPU", 0, 0, NULL, NULL}
#define CLI_MACHINE_OPTIONS(p)                                                                                         \
  CLI_DEVICE_OPTION(&(p)->device),                                                                                     \
  {"threads", CLI_INT, &(p)->threads, "N", "default: ESMM_THREADS, else the CPUs it may run on", 1, 1024, NULL, NULL}

#define CLI_PROBLEM_OPTIONS(p)                                                                                         \
  {NULL, CLI_HEADING, NULL, NULL, "Shape", 0, 0, NULL, NULL},                                                          \
  {"size", CLI_INT, &(p)->size, "N", "M = K = N = N (default 1024)", 0, CLI_MAX_DIMENSION, NULL, &(p)->has_size},      \
  {"dims", CLI_DIMS, (p)->dims, "M K N", "C [M,N] = A [M,K] x B [K,N]", 0, CLI_MAX_DIMENSION, NULL, &(p)->has_dims},   \
  {NULL, CLI_HEADING, NULL, NULL, "Where the zeros are (see below)", 0, 0, NULL, NULL},                                \
  {"dense", CLI_FLAG, &(p)->dense, NULL, "no zeros", 0, 0, NULL, NULL},                                                \
  {"random", CLI_FLAG, &(p)->random, NULL, "each element on its own", 0, 0, NULL, NULL},                               \
  {"blockwise", CLI_FLAG, &(p)->blockwise, NULL, "whole strips: 32 rows of A, 32 columns of B", 0, 0, NULL, NULL},     \
  {"strip", CLI_INT, &(p)->strip, "N", "rows (columns of B) of a strip, with --blockwise (default 32)", 1, 65536,      \
   NULL, &(p)->has_strip},                                                                                             \
  {"activations", CLI_OPTIONAL, &(p)->activations, "early|middle|late",                                                \
   "A like a trained net's activations (default middle)", 0, 0, "early|middle|late", &(p)->has_activations},           \
  {"dead", CLI_DENSITY, &(p)->dead, "D", "share of features that are never active, with --activations", 0, 0, NULL,    \
   NULL},                                                                                                              \
  {"pattern", CLI_STRING, &(p)->pattern, "P", "eight 0s and 1s, repeated along K; with --blockwise the share\n"        \
   "of ones is the density", 0, 0, NULL, NULL},                                                                        \
  {"pattern-a", CLI_STRING, &(p)->pattern_a, "P", "the same for A only", 0, 0, NULL, NULL},                            \
  {"pattern-b", CLI_STRING, &(p)->pattern_b, "P", "the same for B only", 0, 0, NULL, NULL},                            \
  {"density", CLI_DENSITY, &(p)->density, "D", "nonzero share, 0 to 1 or 0% to 100%", 0, 0, NULL, NULL},               \
  {"density-a", CLI_DENSITY, &(p)->density_a, "D", "the same for A only", 0, 0, NULL, NULL},                           \
  {"density-b", CLI_DENSITY, &(p)->density_b, "D", "the same for B only", 0, 0, NULL, NULL},                           \
  {"seed", CLI_SEED, &(p)->seed, "S", "of all generators (default 1)", 0, 0, NULL, NULL},                              \
  {"load-a", CLI_STRING, &(p)->load_a, "FILE", "A from a .npy file, raw float32 with --dims, or FILE::TENSOR of\n" \
   "safetensors or .pt", 0, 0, NULL, NULL},                                                                            \
  {"load-b", CLI_STRING, &(p)->load_b, "FILE", "B likewise; a tensor [out, in] is transposed", 0, 0, NULL, NULL},      \
  {"tile-rows", CLI_INT, &(p)->tile_rows, "N", "repeat the rows of a loaded A until there are N, at least as\n"        \
   "many as the file has: C is then [N, ...]; M of --dims is the file's",                                              \
   1, CLI_MAX_DIMENSION, NULL, NULL},                                                                                  \
  {NULL, CLI_HEADING, NULL, NULL, "How it is multiplied", 0, 0, NULL, NULL},                                           \
  {"dtype", CLI_DTYPE, &(p)->dtype, "f32|bf16|f16", "of A, B and C (default f32; of a loaded file: its own)", 0, 0,    \
   NULL, &(p)->has_dtype},                                                                                             \
  {"dtype-a", CLI_DTYPE, &(p)->dtype_a, "T", "of A only", 0, 0, NULL, &(p)->has_dtype_a},                              \
  {"dtype-b", CLI_DTYPE, &(p)->dtype_b, "T", "of B only", 0, 0, NULL, &(p)->has_dtype_b},                              \
  {"dtype-c", CLI_DTYPE, &(p)->dtype_c, "T", "of C only", 0, 0, NULL, &(p)->has_dtype_c},                              \
  {"use", CLI_CHOICE, &(p)->use, "any|decode|large-m", "what B is prepared for (default any)", 0, 0,                   \
   "any|decode|large-m", NULL},                                                                                        \
  {"format", CLI_STRING, &(p)->format, "F", "what B is prepared as: dense (default), bsr:R or bsr:RxC (blocks),\n" \
   "nm:N:M or nm:N:M:C (N of every M k's; C columns choose together)", 0, 0, NULL, NULL},                              \
  CLI_MACHINE_OPTIONS(&(p)->machine)

/* The rules of cli_problem_resolve, for the notes of a --help text. */
#define CLI_PROBLEM_NOTES                                                                                              \
  "Where the zeros are\n"                                                                                              \
  "  One of --dense, --random, --blockwise, --activations, --pattern. --density is for A and B alike,\n"               \
  "  --density-a and --density-b are for one; an operand without a density, when the other has one, is dense.\n"       \
  "  --random, --blockwise without any density: 0.5 for both.\n"                                                       \
  "  --activations: A only, its density and dead share from the preset unless given; B is dense unless --density-b.\n" \
  "  No mode but a density: A unstructured (as --random) at --density, B dense unless --density-b is given.\n"         \
  "  No mode and no density: as --blockwise --density 0.5; with --load-a or --load-b, dense.\n"                        \
  "  A loaded operand stays as it is; the other is dense unless a mode or its density asks for more.\n"                \
  "  --format bsr: B is dense, less its blocks of least norm; its density is the share of blocks that stay.\n"         \
  "  --format nm: B is dense, less the elements of least magnitude of each group; it has no other density.\n"
/* clang-format on */

/* ---- kernels by name ---- */

/*
 * Resolves "all", "auto", names and ideas, in comma lists, into kernel names ("" stands for auto), each once, in the
 * order given. *names is an array to free(); the strings are the library's. Returns CLI_GO or CLI_USAGE.
 */
int cli_kernels(const esmm_ctx *ctx, const char *what, const char *list, const char ***names, int *count);

#endif
