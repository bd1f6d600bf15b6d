/*
 * inspect.h: what the two halves of `esmm inspect` share: cmd_inspect.c looks into one matrix or prepared weights,
 * inspect_model.c goes through every tensor of a model or a directory.
 */
#ifndef ESMM_CLI_INSPECT_H
#define ESMM_CLI_INSPECT_H

#include "models.h"

typedef struct inspect_request {
  const char *path, *dims, *json, *format;
  int64_t m, n, rows, cols; /* rows, cols: of --dims, else 0 */
  bool has_n;
  int k_axis; /* model_k_axis */
  cli_machine machine;
} inspect_request;

int inspect_model(esmm_ctx *ctx, const inspect_request *request); /* an exit status */

#endif
