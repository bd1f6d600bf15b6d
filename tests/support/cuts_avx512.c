/* cuts_avx512.c: see cuts_f32.h. */
#include "cpu/vec_avx512.h"

#define CUTS_NAME cuts_avx512
#include "cuts_f32.h"
