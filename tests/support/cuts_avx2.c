/* cuts_avx2.c: see cuts_f32.h. */
#include "cpu/vec_avx2.h"

#define CUTS_NAME cuts_avx2
#include "cuts_f32.h"
