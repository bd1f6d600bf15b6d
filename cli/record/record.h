/*
 * record.h: records, the files of lines that `esmm bench --json` writes and bench/results keeps, as compare and report
 * read them.
 */
#ifndef ESMM_CLI_RECORD_H
#define ESMM_CLI_RECORD_H

#include "cli.h"

/* One measurement. Texts are never NULL; numbers that are not there are NAN. */
typedef struct record_line {
  char *key; /* what was measured, and where: equal for two measurements of the same thing */
  char *suite, *asked, *device, *dtype, *generator, *format, *kernel, *requested, *baseline, *outcome;
  double m, n, k, threads, density_a, density_b;
  double ms, least, p95; /* of a call: the median, the fastest, the 95th percentile; least may be NAN */
  double baseline_ms, speedup, rel_err;
} record_line;

enum { RECORD_PROBLEMS = 20 };

typedef struct record {
  char *path;
  record_line *lines;
  int count, others; /* others: lines that are no product's time, such as checks */
  char *date, *version, *source_id;
  char *problems[RECORD_PROBLEMS]; /* what is wrong with it, and where; said on stderr too */
  int problem_count, left_out;     /* left_out: problems beyond those */
} record;

typedef struct records {
  record *list;
  int count;
} records;

/*
 * A file, or every .jsonl file below a directory, by name, added to those there are. Wrong lines are problems, and the
 * others are read. CLI_GO; CLI_FAILED where nothing can be read.
 */
int records_read(const char *path, records *out);
void records_free(records *all);

#endif
