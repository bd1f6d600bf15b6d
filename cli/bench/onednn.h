/*
 * onednn.h: oneDNN, PyTorch's library on a CPU, as a baseline of the benchmark: opened at run time, never linked. It
 * uses a CPU's 16-bit instructions, and chooses the layout of weights.
 */
#ifndef ESMM_CLI_ONEDNN_H
#define ESMM_CLI_ONEDNN_H

#include "esmm.h"

#include <stdbool.h>

typedef struct onednn_library onednn_library;

/* NULL where it is not there. ESMM_ONEDNN names another file, unless it is "off". title gets its name and version. */
onednn_library *onednn_open(int threads, char *title, size_t title_bytes);

/* Products of one shape: A [m,k] row-major of a dtype, B [k,n] prepared, C [m,n] row-major. */
typedef struct onednn_product onednn_product;
/* Never NULL: what it cannot multiply has a reason. */
onednn_product *onednn_product_make(onednn_library *library, int64_t m, int64_t k, int64_t n, esmm_dtype dtype,
                                    esmm_dtype dtype_c);
const char *onednn_product_reason(const onednn_product *product); /* "": it can */
const char *onednn_product_kernel(const onednn_product *product); /* "brg:avx512_core_bf16": its instructions */
void onednn_product_free(onednn_product *product);

/* B, once: row-major and tightly packed, of the product's dtype; NULL where it failed. */
void *onednn_weights_make(onednn_product *product, const void *b);
void onednn_weights_free(onednn_product *product, void *weights);

/* a and c are tightly packed. */
bool onednn_multiply(onednn_product *product, const void *a, void *weights, void *c);

#endif
