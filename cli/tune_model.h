/* tune_model.h: esmm tune MODEL, for cmd_tune.c. */
#ifndef ESMM_CLI_TUNE_MODEL_H
#define ESMM_CLI_TUNE_MODEL_H

#include "cli.h"

typedef struct tune_request {
  const char *path, *rows, *density_a; /* lists, as they were given */
  int k_axis;                          /* a model_k_axis */
} tune_request;

int tune_model(esmm_ctx *ctx, const tune_request *request); /* an exit status */

#endif
