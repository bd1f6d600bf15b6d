/* cuts_portable.c: see cuts_f32.h. */
#include "cpu/vec_portable.h"

#define CUTS_NAME cuts_portable
#include "cuts_f32.h"
